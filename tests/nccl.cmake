# The device transports. One process a GPU; two processes may share one, which peer memory allows and NCCL does not.
cpattn_unit_test(test_nccl_library test_nccl_library.c)
cpattn_test_program(test_device_transport test_device_transport.c)
foreach(program test_nccl_library test_device_transport)
  target_include_directories(${program} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endforeach()

foreach(n 1 2 3 4)
  add_test(NAME test_device_transport-np${n} COMMAND ${CPATTN_MPIRUN} -np ${n} $<TARGET_FILE:test_device_transport>)
  cpattn_on_device(test_device_transport-np${n} cuda ${n})
  set_tests_properties(test_device_transport-np${n} PROPERTIES RUN_SERIAL ON) # it measures times
endforeach()
