# What is CUDA's alone: operations against the host's, bit for bit.
cpattn_test_program(test_cuda_ops test_cuda_ops.c cuda_fixture.c)
target_include_directories(test_cuda_ops PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
add_test(NAME test_cuda_ops COMMAND test_cuda_ops)
cpattn_on_device(test_cuda_ops cuda 1)

