# The CUDA back end against the host and the float64 reference. Without a device the tests say so and are skipped.
function(cpattn_cuda_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE cpattn_static PkgConfig::CUNIT)
  target_include_directories(${name} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS gpu SKIP_RETURN_CODE 77)
endfunction()

cpattn_cuda_test(test_cuda_attend test_cuda_attend.c cuda_fixture.c attend_fixture.c kv_fixture.c)
cpattn_cuda_test(test_cuda_ops test_cuda_ops.c cuda_fixture.c kv_fixture.c)
