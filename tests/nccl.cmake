# The device transports. One process a GPU; two processes may share one, which peer memory allows and NCCL does not.
function(cpattn_device_comm_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE cpattn_static PkgConfig::CUNIT)
  target_include_directories(${name} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()

cpattn_unit_test(test_nccl_library test_nccl_library.c)
target_include_directories(test_nccl_library PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

cpattn_device_comm_program(test_device_transport test_device_transport.c)
foreach(n 1 2 3 4)
  add_test(NAME test_device_transport-np${n} COMMAND ${CPATTN_MPIRUN} -np ${n} $<TARGET_FILE:test_device_transport>)
  set_tests_properties(test_device_transport-np${n} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS "gpu;multigpu"
    PROCESSORS 2 ENVIRONMENT "${CPATTN_MPI_TEST_ENV}" SKIP_REGULAR_EXPRESSION "skipped: no CUDA device")
endforeach()
