# The operations: on the host, and the same programs on a device.
cpattn_unit_test(test_attend test_attend.c)
cpattn_unit_test_on_device(test_attend cuda:portable cuda:simple cuda:small)
foreach(module ops kv merge synthesize)
  cpattn_unit_test(test_${module} test_${module}.c)
  cpattn_unit_test_on_device(test_${module})
endforeach()
# Bits that the host alone promises.
cpattn_unit_test(test_attend_bits test_attend_bits.c)

cpattn_unit_test(test_quant test_quant.c)
cpattn_unit_test_on_device(test_quant cuda:portable cuda:simple cuda:small)

# The table of docs/ACCURACY.md; as a test only its short lengths.
cpattn_test_program(quant_accuracy quant_accuracy.c)
add_test(NAME quant_accuracy COMMAND quant_accuracy 2048)
set_tests_properties(quant_accuracy PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
