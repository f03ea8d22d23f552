/* Requests between the thread of the engine and those that read them: what comes when one is read, or refused, at the
 * worst moment. */
#include <stdlib.h>

#include "src/llm/request_table.h"
#include "tests/fixtures/unit.h"

static cpa_request_table table;

static cpa_llm_request *enter(void) {
    cpa_llm_request *request = calloc(1, sizeof *request);
    pthread_cond_init(&request->came, NULL);
    CU_ASSERT_EQUAL_FATAL(cpa_request_table_enter(&table, request, NULL), CPA_OK);
    return request;
}

static cpa_status wait_for_any(cpa_llm_request **out) {
    return cpa_request_table_wait(&table, 0, out, NULL);
}

static void end_engine(void) {
    const cpa_error none = {CPA_OK, ""};
    cpa_request_table_stop(&table);
    cpa_request_table_end(&table, &none);
}

static void give_ranks(const cpa_llm_request *request, int64_t index) {
    const cpa_token_ranks ranks = {.rank = 10 + index};
    cpa_request_table_on_ranks(&table, request->id, index, &ranks);
}

static void give_token(const cpa_llm_request *request, int64_t index) {
    cpa_request_table_on_token(&table, request->id, index, (uint32_t)(10 + index), 0);
}

/* Reads one piece, of so many tokens from that one on, each with its ranks. */
static void read(cpa_llm_request *request, int64_t index, int64_t count) {
    CU_ASSERT_EQUAL_FATAL(cpa_request_table_collect(&table, request, 0, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(request->read.count, count);
    CU_ASSERT_PTR_NOT_NULL_FATAL(request->read.ranks);
    for (int64_t i = 0; i < count; i++) {
        CU_ASSERT_EQUAL(request->read.tokens[i].id, 10 + index + i);
        CU_ASSERT_EQUAL(request->read.ranks[i].rank, 10 + index + i);
    }
}

static void ranks_come_with_their_token(void) {
    cpa_request_table_open(&table);
    cpa_llm_request *request = enter();
    cpa_request_table_take(&table, request);
    give_ranks(request, 0);
    give_token(request, 0);
    give_ranks(request, 1);
    read(request, 0, 1);
    CU_ASSERT_EQUAL(cpa_request_table_collect(&table, request, 0, NULL), CPA_BUSY);
    give_token(request, 1);
    give_ranks(request, 2);
    give_token(request, 2);
    give_ranks(request, 3);
    read(request, 1, 2);
    give_token(request, 3);
    read(request, 3, 1);
    cpa_request_table_close(&table);
}

static void nobody_is_told_of_what_the_engine_refuses(void) {
    cpa_llm_request *found = NULL;
    cpa_request_table_open(&table);
    cpa_llm_request *request = enter();
    end_engine();
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_BUSY);
    cpa_request_table_return(&table, request);
    cpa_request_free(request);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_STOPPED);
    CU_ASSERT_PTR_NULL(found);
    cpa_request_table_close(&table);
}

static void what_came_before_the_engine_said_yes_is_told(void) {
    cpa_llm_request *found = NULL;
    cpa_request_table_open(&table);
    cpa_llm_request *first = enter(), *second = enter();
    give_token(first, 0);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_BUSY);
    cpa_request_table_take(&table, first);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_OK);
    CU_ASSERT_PTR_EQUAL(found, first);
    end_engine();
    cpa_request_table_take(&table, second);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_OK);
    CU_ASSERT_PTR_EQUAL(found, first);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_OK);
    CU_ASSERT_PTR_EQUAL(found, second);
    CU_ASSERT_EQUAL(wait_for_any(&found), CPA_STOPPED);
    cpa_request_table_close(&table);
}

static const cpa_test tests[] = {
    {"ranks come with their token", ranks_come_with_their_token},
    {"nobody is told of what the engine refuses", nobody_is_told_of_what_the_engine_refuses},
    {"what came before the engine said yes is told", what_came_before_the_engine_said_yes_is_told},
};

CPA_TEST_MAIN("request table", tests)
