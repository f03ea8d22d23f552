# cp_attn bench, as a user calls it.
# cpattn_bench_test(NAME COMMAND TARGET): a test that calls bench.sh with a program.
function(cpattn_bench_test name command target)
  add_test(NAME ${name} COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/bench.sh ${command} $<TARGET_FILE:${target}>)
  string(REPLACE ";" " " mpirun "${CPATTN_MPIRUN}")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS "host;mpi" PROCESSORS 2
    ENVIRONMENT "MPIRUN=${mpirun};${CPATTN_MPI_TEST_ENV}")
endfunction()

cpattn_bench_test(bench_results_are_right right cp_attn)
cpattn_bench_test(bench_counts_wrong_results wrong cp_attn_faults)
cpattn_bench_test(bench_refuses_bad_usage bad cp_attn)
if(CPATTN_CUDA)
  foreach(n 1 2 4)
    cpattn_bench_test(bench_results_are_right-cuda-np${n} device cp_attn)
    get_test_property(bench_results_are_right-cuda-np${n} ENVIRONMENT environment)
    cpattn_on_device(bench_results_are_right-cuda-np${n} cuda ${n})
    set_property(TEST bench_results_are_right-cuda-np${n} APPEND PROPERTY ENVIRONMENT "${environment};RANKS=${n}")
  endforeach()
endif()

# The table of bench/gpu.sh, from figures made up.
add_test(NAME bench_table_judges COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/bench_table.sh)
set_tests_properties(bench_table_judges PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
