# What is CUDA's alone: operations against the host's, bit for bit; memory and streams.
cpattn_test_program(test_cuda_ops test_cuda_ops.c)
cpattn_test_program(test_cuda_memory test_cuda_memory.c)
target_include_directories(test_cuda_memory PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
foreach(program test_cuda_ops test_cuda_memory)
  add_test(NAME ${program} COMMAND ${program})
  cpattn_on_device(${program} cuda 1)
endforeach()

# Where the plan cuts; needs no device.
cpattn_unit_test(test_attend_split test_attend_split.c)
target_include_directories(test_attend_split PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

# The engine on a device, as one rank and as several that share it or have one each.
cpattn_test_program(test_cuda_engine test_cuda_engine.c)
cpattn_mpi_test_on_device(test_cuda_engine "1;2;3")
cpattn_test_over(test_cuda_engine nccl 2)
