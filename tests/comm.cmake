# Communication, and context attention over it: on the host, and the same programs on devices.

# cpattn_test_over(NAME TRANSPORT RANKS): a program of what uses a transport on devices, over the one that is named.
function(cpattn_test_over name transport ranks)
  if(CPATTN_CUDA)
    set(test ${name}-${transport}-np${ranks})
    add_test(NAME ${test} COMMAND ${CPATTN_MPIRUN} -np ${ranks} $<TARGET_FILE:${name}>)
    cpattn_on_device(${test} cuda ${ranks})
    set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT CPATTN_TEST_TRANSPORT=${transport})
  endif()
endfunction()

# cpattn_transport_test_on_device(NAME RANKS): a program of transports over each of the devices', for each number of
# ranks in the list RANKS. Two ranks may share a GPU, which peer memory allows and NCCL does not.
function(cpattn_transport_test_on_device name ranks)
  foreach(transport peer nccl)
    foreach(n IN LISTS ranks)
      cpattn_test_over(${name} ${transport} ${n})
    endforeach()
  endforeach()
endfunction()

cpattn_mpi_test(test_transport "1;2;3;4" test_transport.c)
cpattn_transport_test_on_device(test_transport "1;2;4")
cpattn_mpi_test(test_post "1;2;3;4" test_post.c)
cpattn_mpi_test(test_roll_call "2;4" test_roll_call.c)
cpattn_mpi_test(test_context "1;2;3;4;5" test_context.c)
cpattn_mpi_test_on_device(test_context "1;2;4")
cpattn_test_over(test_context nccl 2)
set(gather_ranks 1 2 3 4)
if(CPATTN_SANITIZE) # four on two cores take minutes, and do nothing that three do not
  list(REMOVE_ITEM gather_ranks 4)
endif()
cpattn_mpi_test(test_pass_kv_gather "${gather_ranks}" test_pass_kv_gather.c)
cpattn_mpi_test_on_device(test_pass_kv_gather "2;4")
cpattn_mpi_test(test_context_ahead "1;2" test_context_ahead.c)
cpattn_mpi_test_on_device(test_context_ahead "1;2")
add_test(NAME test_context-np8 COMMAND ${CPATTN_MPIRUN} -np 8 $<TARGET_FILE:test_context>)
set_tests_properties(test_context-np8 PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS "host;mpi;slow" PROCESSORS 2
                                                 ENVIRONMENT "${CPATTN_MPI_TEST_ENV}")

# The same frame over the twin of the library that has the fault points.
cpattn_mpi_test(test_context_faults "2;3" test_context_faults.c)
cpattn_mpi_test_on_device(test_context_faults "2;4")
set_target_properties(test_context_faults PROPERTIES
  LINK_LIBRARIES "cpattn_fixtures;cpattn_static_faults;${CPATTN_CUNIT}" COMPILE_DEFINITIONS CPA_FAULT_POINTS)
