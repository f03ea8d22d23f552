# What is CUDA's alone: operations against the host's, bit for bit.
cpattn_test_program(test_cuda_ops test_cuda_ops.c cuda_fixture.c)
target_include_directories(test_cuda_ops PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
add_test(NAME test_cuda_ops COMMAND test_cuda_ops)
cpattn_on_device(test_cuda_ops cuda 1)

# Where the plan cuts; needs no device.
cpattn_unit_test(test_attend_split test_attend_split.c)
target_include_directories(test_attend_split PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

# The engine on a device, as one rank and as several that share it or have one each.
add_executable(test_cuda_engine test_cuda_engine.c)
target_link_libraries(test_cuda_engine PRIVATE cpattn_static ${CPATTN_CUNIT})
foreach(n 1 2 3)
  add_test(NAME test_cuda_engine-np${n} COMMAND ${CPATTN_MPIRUN} -np ${n} $<TARGET_FILE:test_cuda_engine>)
  set_tests_properties(test_cuda_engine-np${n} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS gpu PROCESSORS 2
    ENVIRONMENT "${CPATTN_MPI_TEST_ENV}" SKIP_REGULAR_EXPRESSION "skipped: no CUDA device")
endforeach()
