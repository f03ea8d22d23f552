/* The device transport that a test of transports is about, and what travels in it.
 *
 * CPATTN_TEST_TRANSPORT names it where CPATTN_TEST_DEVICE (device_fixture.h) is cuda: peer (the default) or nccl, which
 * takes a device for each rank. Tests of what uses transports take the one that is named, else the one that is faster. */
#ifndef CPA_TESTS_TRANSPORT_FIXTURE_H
#define CPA_TESTS_TRANSPORT_FIXTURE_H

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "tests/device_fixture.h"

/* What cpa_test_device_missing answers for the device of the transport; 1 as well if it lacks devices, and 2, with a
 * line, if CPATTN_TEST_TRANSPORT is wrong. */
int cpa_test_transport_missing(void);
/* The transport under test: MPI on the host. */
const cpa_transport_table *cpa_test_transport(void);
/* The one that is named, for an engine. */
cpa_transport_kind cpa_test_transport_kind(void);

/* A well-mixed number, the same on every rank. */
uint64_t cpa_test_mixed(uint64_t x);
/* Byte i of what a rank sends to another in an exchange. */
uint8_t cpa_test_pattern(int from, int to, uint64_t exchange, int64_t i);

#endif
