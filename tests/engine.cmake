# The engine, the sampled check and what they stand on.
cpattn_unit_test(test_reference test_reference.c)
cpattn_mpi_test(test_engine "1;2;3;4" test_engine.c)
cpattn_mpi_test(test_quant_engine "1;2;3;4" test_quant_engine.c)
