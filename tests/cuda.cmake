# What is CUDA's alone: operations against the host's, bit for bit.
cpattn_test_program(test_cuda_ops test_cuda_ops.c cuda_fixture.c)
target_include_directories(test_cuda_ops PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
add_test(NAME test_cuda_ops COMMAND test_cuda_ops)
cpattn_on_device(test_cuda_ops cuda 1)

# Timings of the same operations; see bench/gpu.sh.
add_executable(cuda_bench cuda_bench.c cuda_fixture.c $<TARGET_OBJECTS:cpattn_cuda_bench_read>)
target_link_libraries(cuda_bench PRIVATE cpattn_fixtures cpattn_static)
target_include_directories(cuda_bench PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
set_target_properties(cuda_bench PROPERTIES CUDA_ARCHITECTURES OFF LINKER_LANGUAGE C)
