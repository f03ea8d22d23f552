# The host back end.
cpattn_unit_test(test_attend test_attend.c attend_fixture.c kv_fixture.c)
