/* A region of parts in plain memory, whose owner puts while another reads: at the worst moment. */
#include <stdlib.h>
#include <string.h>

#include "src/cache/part_region.h"
#include "tests/fixtures/unit.h"

enum { BYTES = CPA_REGION_LEAST_BYTES, PART = 3000, HEAD_AND_BUCKET = 256 };

typedef struct fixture {
    char memory[BYTES];
    cpa_region_access access;
    cpa_part_region *region;
    int puts_after_read; /* parts that are put behind the next read of a part */
    int next;
} fixture;

static cpa_block_key key_of(int number) {
    cpa_block_key key = {.group = number};
    memset(key.digest, number, sizeof key.digest);
    return key;
}

static cpa_status put(fixture *f, int number) {
    const cpa_block_key key = key_of(number);
    char part[PART];
    memset(part, number, sizeof part);
    return cpa_part_region_put(f->region, &key, part, sizeof part, NULL);
}

static cpa_status read_memory(void *ctx, int64_t at, void *bytes, int64_t n, cpa_error *err) {
    fixture *f = ctx;
    (void)err;
    memcpy(bytes, f->memory + at, (size_t)n);
    for (; n > HEAD_AND_BUCKET && f->puts_after_read > 0; f->puts_after_read--)
        CU_ASSERT_EQUAL(put(f, f->next++), CPA_OK);
    return CPA_OK;
}

static cpa_status write_memory(void *ctx, int64_t at, const void *bytes, int64_t n, cpa_error *err) {
    (void)err;
    memcpy(((fixture *)ctx)->memory + at, bytes, (size_t)n);
    return CPA_OK;
}

static fixture *make(void) {
    fixture *f = calloc(1, sizeof *f);
    f->access = (cpa_region_access){f, BYTES, read_memory, write_memory, 0};
    f->next = 1;
    CU_ASSERT_EQUAL_FATAL(cpa_part_region_create(&f->access, &f->region, NULL), CPA_OK);
    return f;
}

static void end(fixture *f) {
    cpa_part_region_destroy(f->region);
    free(f);
}

/* The bytes that are found by that number; -1: an error. */
static int64_t get(fixture *f, int number) {
    const cpa_block_key key = key_of(number);
    char part[PART];
    int64_t n;
    return cpa_part_region_get(&f->access, &key, part, sizeof part, &n, NULL) == CPA_OK ? n : -1;
}

static void what_was_written_over_while_it_was_read_is_not_there(void) {
    fixture *f = make();
    CU_ASSERT_EQUAL(put(f, 100), CPA_OK);
    CU_ASSERT_EQUAL(get(f, 100), PART);
    f->puts_after_read = 1; /* in another place: what was read stays */
    CU_ASSERT_EQUAL(get(f, 100), PART);
    f->puts_after_read = 8;
    CU_ASSERT_EQUAL(get(f, 100), 0);
    CU_ASSERT_EQUAL(get(f, 9), PART);
    end(f);
}

/* A part by the same key, of other bytes, is another part. */
static void a_part_that_came_anew_while_it_was_read_is_not_taken(void) {
    fixture *f = make();
    CU_ASSERT_EQUAL(put(f, 100), CPA_OK);
    f->next = 100;
    f->puts_after_read = 1;
    CU_ASSERT_EQUAL(get(f, 100), 0);
    CU_ASSERT_EQUAL(get(f, 100), PART);
    end(f);
}

static void a_damaged_table_is_refused(void) {
    fixture *f = make();
    const cpa_block_key key = key_of(1);
    CU_ASSERT_EQUAL(put(f, 1), CPA_OK);
    char *slot = memmem(f->memory, BYTES, &key, sizeof key);
    CU_ASSERT_PTR_NOT_NULL_FATAL(slot);
    int64_t places[2], n;
    memcpy(places, slot + sizeof key, sizeof places);
    const int64_t wrong[][2] = {{BYTES - 10, 11}, {8, 11}, {places[0], -1}, {INT64_MAX, 100}, {places[0], INT64_MAX}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        cpa_error err = {CPA_OK, ""};
        char part[PART];
        memcpy(slot + sizeof key, wrong[i], sizeof wrong[i]);
        CU_ASSERT_EQUAL(cpa_part_region_get(&f->access, &key, part, sizeof part, &n, &err), CPA_IO);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "in memory of 16384"));
    }
    memcpy(slot + sizeof key, places, sizeof places);
    CU_ASSERT_EQUAL(get(f, 1), PART);
    memset(f->memory + 8, 0xff, 8); /* the number of buckets, which is read by who is new */
    CU_ASSERT_EQUAL(get(f, 1), PART);
    f->access.buckets = 0;
    CU_ASSERT_EQUAL(get(f, 1), -1);
    end(f);
}

/* Many keys that share few buckets: each new one can be found, and nothing else changes. */
static void a_full_bucket_gives_up_its_oldest(void) {
    fixture *f = make();
    char byte = 1;
    for (int i = 0; i < 60; i++) {
        const cpa_block_key key = key_of(i);
        CU_ASSERT_EQUAL(cpa_part_region_put(f->region, &key, &byte, 1, NULL), CPA_OK);
        CU_ASSERT_EQUAL(get(f, i), 1);
    }
    int there = 0;
    for (int i = 0; i < 60; i++) there += get(f, i) == 1;
    CU_ASSERT_EQUAL(there, 2 * 4); /* 16 KiB have two buckets of four */
    end(f);
}

static const cpa_test tests[] = {
    {"what was written over while it was read is not there", what_was_written_over_while_it_was_read_is_not_there},
    {"a part that came anew while it was read is not taken", a_part_that_came_anew_while_it_was_read_is_not_taken},
    {"a damaged table is refused", a_damaged_table_is_refused},
    {"a full bucket gives up its oldest", a_full_bucket_gives_up_its_oldest},
};

CPA_TEST_MAIN("regions of parts", tests)
