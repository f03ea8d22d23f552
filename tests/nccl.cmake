# The device transports.
cpattn_unit_test(test_nccl_library test_nccl_library.c)
cpattn_test_program(test_device_transport test_device_transport.c device_traffic.c)
cpattn_test_program(test_device_failures test_device_failures.c device_traffic.c)
foreach(program test_nccl_library test_device_transport test_device_failures)
  target_include_directories(${program} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endforeach()

cpattn_transport_test_on_device(test_device_transport "1;2;3;4")
cpattn_transport_test_on_device(test_device_failures "2;3")
