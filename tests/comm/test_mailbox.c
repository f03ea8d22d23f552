/* Messages of rank 0 that travel while the ranks do something else. */
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "tests/fixtures/mpi_unit.h"

enum { MESSAGES = 6 };
static const int64_t lengths[MESSAGES] = {5, 0, 3 << 20, -1, 300001, 1};

static uint8_t pattern(int message, int64_t at) {
    return (uint8_t)(at * 7 + at / 251 + message);
}

/* Sends the messages one after another, and forgets each at once: it is a copy that travels. */
static void send_all(cpa_mailbox *mailbox, int wait) {
    uint8_t *data = malloc(3 << 20);
    for (int m = 0; m <= MESSAGES; m++) {
        int flushed = 0, status = CPA_OK;
        while (!flushed && status == CPA_OK) status = (int)cpa_mailbox_flush(mailbox, wait, &flushed, NULL);
        CU_ASSERT_EQUAL(status, CPA_OK);
        if (m == MESSAGES) break;
        for (int64_t i = 0; i < lengths[m]; i++) data[i] = pattern(m, i);
        CU_ASSERT_EQUAL(cpa_mailbox_send(mailbox, data, lengths[m], NULL), CPA_OK);
        memset(data, 0xa5, 3 << 20);
    }
    free(data);
}

static void receive_all(cpa_mailbox *mailbox, int wait) {
    for (int m = 0; m < MESSAGES; m++) {
        int arrived = 0, calls = 0, wrong = 0, status = CPA_OK;
        int64_t bytes = 77;
        const void *data = NULL;
        for (; !arrived && status == CPA_OK; calls++)
            status = (int)cpa_mailbox_receive(mailbox, wait, &arrived, &data, &bytes, NULL);
        CU_ASSERT_EQUAL(status, CPA_OK);
        CU_ASSERT_EQUAL(bytes, lengths[m]);
        CU_ASSERT_EQUAL(data != NULL, lengths[m] > 0);
        CU_ASSERT(!wait || calls == 1);
        for (int64_t i = 0; data && i < bytes; i++) wrong += ((const uint8_t *)data)[i] != pattern(m, i);
        CU_ASSERT_EQUAL(wrong, 0);
    }
}

static void messages_arrive_whole_and_in_order(void) {
    cpa_control control;
    cpa_mailbox *mailbox;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_mailbox_open(&control, &mailbox, NULL), CPA_OK);
    for (int wait = 0; wait < 2; wait++) (control.rank == 0 ? send_all : receive_all)(mailbox, wait);
    cpa_mailbox_close(mailbox);
    cpa_control_close(&control);
}

/* Whoever looks for a message does not wait for it, and may go on with collective calls on the same channel. */
static void nobody_waits_for_a_message_that_is_not_sent(void) {
    cpa_control control;
    cpa_mailbox *mailbox;
    int arrived = 1;
    int64_t bytes;
    const void *data = &control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_mailbox_open(&control, &mailbox, NULL), CPA_OK);
    if (control.rank > 0) {
        CU_ASSERT_EQUAL(cpa_mailbox_receive(mailbox, 0, &arrived, &data, &bytes, NULL), CPA_OK);
        CU_ASSERT(!arrived && data == NULL);
    }
    double sum = 1;
    CU_ASSERT_EQUAL(cpa_control_sum(&control, &sum, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(sum, control.size);
    /* Given up before anything is sent, it takes nothing away from the next one. */
    cpa_mailbox_close(mailbox);
    CU_ASSERT_EQUAL(cpa_control_sum(&control, &sum, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_mailbox_open(&control, &mailbox, NULL), CPA_OK);
    (control.rank == 0 ? send_all : receive_all)(mailbox, 1);
    cpa_mailbox_close(mailbox);
    cpa_control_close(&control);
}

/* A head that was damaged on its way: the length is out of bounds, or the bytes are not those that it was made for. */
static void damage_is_noticed(void) {
    struct {
        int64_t length;
        uint64_t checksum;
    } heads[2] = {{(int64_t)1 << 40, 1}, {8, 1}};
    for (int way = 0; way < 2; way++) {
        cpa_control control;
        cpa_mailbox *mailbox;
        char bytes[8] = "damaged";
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_mailbox_open(&control, &mailbox, NULL), CPA_OK);
        cpa_comm_request *requests[2 * CPA_COMM_MAX_RANKS] = {NULL};
        for (int32_t rank = 1; rank < control.size && control.rank == 0; rank++) {
            cpa_comm_start_send(control.comm, rank, control.tag + CPA_CONTROL_TAG_MAILBOX, &heads[way],
                                sizeof heads[way], &requests[2 * rank], NULL);
            cpa_comm_start_send(control.comm, rank, control.tag + CPA_CONTROL_TAG_MAILBOX, bytes, sizeof bytes,
                                &requests[2 * rank + 1], NULL);
        }
        if (control.rank > 0) {
            int arrived;
            int64_t n;
            const void *data;
            CU_ASSERT_EQUAL(cpa_mailbox_receive(mailbox, 1, &arrived, &data, &n, &err), CPA_COMM);
            CU_ASSERT_PTR_NOT_NULL(strstr(err.message, way == 0 ? "expected at most" : "arrived damaged"));
        }
        for (int i = 0; i < 2 * control.size; i++) cpa_comm_wait(control.comm, &requests[i], i / 2, NULL);
        cpa_mailbox_close(mailbox);
        cpa_control_close(&control);
    }
}

static const cpa_test tests[] = {
    {"damage is noticed", damage_is_noticed},
    {"messages arrive whole and in order", messages_arrive_whole_and_in_order},
    {"nobody waits for a message that is not sent", nobody_waits_for_a_message_that_is_not_sent},
};
CPA_MPI_TEST_MAIN("mailbox", tests)
