/* One sequence, sharded over the slots of an owner map, with everything that attend needs to run over it. */
#ifndef CPA_TESTS_ATTEND_FIXTURE_H
#define CPA_TESTS_ATTEND_FIXTURE_H

#include "kv_fixture.h"

enum { CPA_TEST_MAX_SLOTS = 8 };

/* Queries are the tokens [start, length), keys the tokens [0, length). */
typedef struct cpa_attend_case {
    cpa_dtype q_dtype, kv_dtype;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    int32_t block_size, cp_size, interleave;
    int64_t start, length;
    cpa_mask mask;
    int32_t head_major;
    float scale;
    float k_scale, v_scale; /* of the cache */
} cpa_attend_case;

typedef struct cpa_attend_fixture {
    cpa_attend_case shape;
    cpa_owner_map map;
    cpa_device *device;
    cpa_stream *stream;
    cpa_attend_plan *plan;
    cpa_test_sequence sequence;
    cpa_kv_fixture kv;
    cpa_kv_view device_kv; /* its pages on the device */
    int32_t *tables;       /* the block tables of all slots, each followed by unused entries */
    int64_t n_table_entries;
    int64_t table[CPA_TEST_MAX_SLOTS];    /* index of a slot's first entry */
    int64_t k_tokens[CPA_TEST_MAX_SLOTS]; /* keys of a slot */
    int64_t q_first[CPA_TEST_MAX_SLOTS];  /* local index of a slot's first query */
    int64_t q_count[CPA_TEST_MAX_SLOTS];
    int64_t q_row[CPA_TEST_MAX_SLOTS]; /* first row of a slot */
    int64_t rows;
    void *q;        /* [rows, q_heads, k_dim], q_dtype */
    void *device_q; /* the same on the device */
    int again;      /* a run attends so many times more, with the same setting of the plan */
    int64_t
        padding; /* 0: O and LSE of a state lie apart. Otherwise a row of it holds O, LSE and at least so many floats
                         that nothing may touch, as a message does */
} cpa_attend_fixture;

/* The results of all rows, in host memory; all NaN at first. */
typedef struct cpa_attend_result {
    float *o, *lse;
    void *out;
    int64_t o_bytes, lse_bytes, out_bytes;
} cpa_attend_result;

void cpa_attend_fixture_init(cpa_attend_fixture *fixture, const cpa_attend_case *shape, int32_t threads);
void cpa_attend_fixture_destroy(cpa_attend_fixture *fixture);

void cpa_attend_result_init(cpa_attend_result *result, const cpa_attend_fixture *fixture);
void cpa_attend_result_destroy(cpa_attend_result *result);
/* Whether o, lse and out agree bit for bit. */
int cpa_attend_result_same(const cpa_attend_result *a, const cpa_attend_result *b);

/* Queries [q_begin, q_begin + q_count) of q_slot, counted from its first, against local keys [k_begin, k_end) of
 * k_slot. */
cpa_attend_item cpa_attend_fixture_item(const cpa_attend_fixture *fixture, int32_t q_slot, int64_t q_begin,
                                        int64_t q_count, int32_t k_slot, int64_t k_begin, int64_t k_end);

/* Plans the items and attends on the device, from and to the result; `out` is written unless resume is set. A touch of
 * the padding is reported as CPA_INTERNAL. */
cpa_status cpa_attend_fixture_run(cpa_attend_fixture *fixture, const cpa_attend_item *items, int64_t n_items,
                                  int resume, cpa_attend_result *result);

/* All queries of every slot against the keys of k_slot. */
cpa_status cpa_attend_fixture_run_slot(cpa_attend_fixture *fixture, int32_t k_slot, cpa_attend_result *result);

/* Compares every `stride`-th row with the float64 reference over the keys of k_slot (-1: of all slots): O, LSE and out
 * within tolerance, empty rows exactly 0 and -inf. Returns how many (row, head) pairs disagree; *worst, if not NULL, is
 * raised to the largest error of O over its tolerance. */
int64_t cpa_attend_fixture_check(const cpa_attend_fixture *fixture, int32_t k_slot, int64_t stride,
                                 const cpa_attend_result *result, double *worst);

#endif
