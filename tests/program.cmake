# The program: its parts alone, then cp_attn itself under mpirun.

# cpattn_launcher_test(NAME SOURCE...): a unit test of parts of the program.
function(cpattn_launcher_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE cpattn_launcher cpattn_static PkgConfig::CUNIT)
  target_compile_definitions(${name} PRIVATE CPA_CONFIGS="${PROJECT_SOURCE_DIR}/configs")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
endfunction()

cpattn_launcher_test(test_settings test_settings.c)
cpattn_launcher_test(test_trace test_trace.c)
cpattn_launcher_test(test_report test_report.c)

# cpattn_program_test(CASE ARGUMENT...): one case of program_test.sh, in a folder of its own.
string(REPLACE ";" " " CPATTN_MPIRUN_LINE "${CPATTN_MPIRUN}")
function(cpattn_program_test case)
  string(REPLACE ";" "_" suffix "${ARGN}")
  string(REGEX REPLACE "_$" "" name "program_${case}_${suffix}")
  add_test(NAME ${name} COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/program_test.sh ${case} ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS "host;mpi" PROCESSORS 2
    ENVIRONMENT "CP_ATTN=$<TARGET_FILE:cp_attn>;CP_ATTN_FAULTS=$<TARGET_FILE:cp_attn_faults>;MPIRUN=${CPATTN_MPIRUN_LINE};CONFIGS=${PROJECT_SOURCE_DIR}/configs;${CPATTN_MPI_TEST_ENV}")
endfunction()

cpattn_program_test(bad_input)
cpattn_program_test(bad_input_on_many_ranks)
cpattn_program_test(answers)
cpattn_program_test(precedence)
cpattn_program_test(trace)
cpattn_program_test(shapes)
cpattn_program_test(quant)
cpattn_program_test(window)
cpattn_program_test(preemption)
cpattn_program_test(mixed)
cpattn_program_test(signal)
foreach(fault dropped-shard stale-block off-by-one-mask base2-lse swapped-kv-head wrong-scale)
  cpattn_program_test(fault ${fault})
endforeach()
