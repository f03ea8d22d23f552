# The host back end.
cpattn_unit_test(test_attend test_attend.c attend_fixture.c kv_fixture.c)
cpattn_unit_test(test_attend_bits test_attend_bits.c attend_fixture.c kv_fixture.c)
cpattn_unit_test(test_ops test_ops.c attend_fixture.c kv_fixture.c)
cpattn_unit_test(test_kv test_kv.c kv_fixture.c)
cpattn_unit_test(test_quant test_quant.c attend_fixture.c kv_fixture.c)
cpattn_unit_test(test_merge test_merge.c kv_fixture.c)
cpattn_unit_test(test_synthesize test_synthesize.c)

# The table of docs/ACCURACY.md; as a test only its short lengths.
add_executable(quant_accuracy quant_accuracy.c kv_fixture.c)
target_link_libraries(quant_accuracy PRIVATE cpattn_static)
add_test(NAME quant_accuracy COMMAND quant_accuracy 2048)
set_tests_properties(quant_accuracy PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
