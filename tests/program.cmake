# The program: its parts alone, then cp_attn itself under mpirun.

# cpattn_launcher_test(NAME SOURCE...): a unit test of parts of the program.
function(cpattn_launcher_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE cpattn_launcher cpattn_static ${CPATTN_CUNIT})
  target_compile_definitions(${name} PRIVATE CPA_CONFIGS="${PROJECT_SOURCE_DIR}/configs")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
endfunction()

cpattn_launcher_test(test_settings test_settings.c)
cpattn_launcher_test(test_trace test_trace.c)
cpattn_launcher_test(test_report test_report.c)
cpattn_launcher_test(test_cores test_cores.c)

# cpattn_add_program_test(NAME RANKS ARGUMENT...): a call of program_test.sh.
string(REPLACE ";" " " CPATTN_MPIRUN_LINE "${CPATTN_MPIRUN}")
function(cpattn_add_program_test name ranks)
  add_test(NAME ${name} COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/program_test.sh ${ARGN})
  set(CPATTN_PROGRAM_TEST_ENV
    "CP_ATTN=$<TARGET_FILE:cp_attn>" "CP_ATTN_FAULTS=$<TARGET_FILE:cp_attn_faults>" "MPIRUN=${CPATTN_MPIRUN_LINE}"
    "CONFIGS=${PROJECT_SOURCE_DIR}/configs" "RANKS=${ranks}" "${CPATTN_MPI_TEST_ENV}" PARENT_SCOPE)
endfunction()

# cpattn_program_test(CASE ARGUMENT...): one case of program_test.sh on the host, in a folder of its own.
function(cpattn_program_test case)
  string(REPLACE ";" "_" suffix "${ARGN}")
  string(REGEX REPLACE "_$" "" name "program_${case}_${suffix}")
  cpattn_add_program_test(${name} 8 ${case} ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS "host;mpi" PROCESSORS 2
                                          ENVIRONMENT "${CPATTN_PROGRAM_TEST_ENV}")
endfunction()

# cpattn_program_test_on_device(RANKS CASE ARGUMENT...): the same on CUDA devices, on at most n ranks for each n of the
# list RANKS.
function(cpattn_program_test_on_device ranks case)
  if(NOT CPATTN_CUDA)
    return()
  endif()
  string(REPLACE ";" "_" suffix "${ARGN}")
  string(REGEX REPLACE "_$" "" name "program_${case}_${suffix}")
  foreach(n IN LISTS ranks)
    cpattn_add_program_test(${name}-cuda-np${n} ${n} ${case} ${ARGN})
    cpattn_on_device(${name}-cuda-np${n} cuda ${n})
    set_property(TEST ${name}-cuda-np${n} APPEND PROPERTY ENVIRONMENT "${CPATTN_PROGRAM_TEST_ENV}")
  endforeach()
endfunction()

foreach(case bad_input answers precedence signal mixed default_dtype)
  cpattn_program_test(${case})
  cpattn_program_test_on_device(1 ${case})
endforeach()
cpattn_program_test(local_context)
cpattn_program_test_on_device("2;4" local_context)
foreach(case trace shapes preemption quant window prefix swap timeline)
  cpattn_program_test(${case})
  cpattn_program_test_on_device("1;2;4" ${case})
endforeach()
foreach(case bad_input_on_many_ranks dead_rank failed_rank)
  cpattn_program_test(${case})
  cpattn_program_test_on_device("2;4" ${case})
endforeach()
cpattn_program_test(dry_run)
cpattn_program_test(affinity)
foreach(fault dropped-shard stale-block off-by-one-mask base2-lse swapped-kv-head wrong-scale)
  cpattn_program_test(fault ${fault})
  cpattn_program_test_on_device("2;4" fault ${fault})
endforeach()
# What only a build with CUDA can get wrong.
if(CPATTN_CUDA)
  cpattn_program_test(no_device)
endif()
cpattn_program_test_on_device(1 too_little) # takes the memory of the device
if(CPATTN_CUDA)
  set_tests_properties(program_too_little-cuda-np1 PROPERTIES RUN_SERIAL ON)
endif()
cpattn_program_test_on_device(2 no_nccl)
cpattn_program_test_on_device("1;2;4" binding)
