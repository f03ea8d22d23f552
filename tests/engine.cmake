# The engine, the sampled check and what they stand on.
cpattn_unit_test(test_reference test_reference.c)
cpattn_mpi_test(test_engine "1;2;3;4" test_engine.c)
cpattn_mpi_test(test_engine_runs "1;2;3;4" test_engine_runs.c)
cpattn_mpi_test_on_device(test_engine_runs "1;2;4")
cpattn_mpi_test(test_timeline "1;2;3" test_timeline.c)
cpattn_mpi_test_on_device(test_engine "1;2;4")
cpattn_mpi_test(test_quant_engine "1;2;3;4" test_quant_engine.c)
cpattn_mpi_test_on_device(test_quant_engine "1;2;4")

# Random combinations of all that a cache can be; as a slow test more of them.
cpattn_mpi_test(test_combinations "1;2;3;4" test_combinations.c)
cpattn_mpi_test_on_device(test_combinations "1;2;4")
foreach(n 1 2 3 4)
  add_test(NAME test_combinations_many-np${n} COMMAND ${CPATTN_MPIRUN} -np ${n} $<TARGET_FILE:test_combinations>)
  set_tests_properties(test_combinations_many-np${n} PROPERTIES TIMEOUT 1200 LABELS "host;mpi;slow" PROCESSORS 2
    ENVIRONMENT "CPATTN_TEST_SEEDS=16:215;${CPATTN_MPI_TEST_ENV}")
endforeach()

# The self-test of the operations, in the twin with fault points: on the host, and on a CUDA device where there is one.
cpattn_unit_test(test_self_test_kernels test_self_test_kernels.c)
cpattn_unit_test_on_device(test_self_test_kernels)
set_target_properties(test_self_test_kernels PROPERTIES
  LINK_LIBRARIES "cpattn_fixtures;cpattn_static_faults;${CPATTN_CUNIT}" COMPILE_DEFINITIONS CPA_FAULT_POINTS)
