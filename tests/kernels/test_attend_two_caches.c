/* Keys in two places: the first tokens of a sequence in the model's dtype before a quantised cache, and the keys of the
 * chunk itself from contiguous tensors behind one. Two calls, the second of which resumes; against float64 of what each
 * place holds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

enum { START = 203, LENGTH = 260, BLOCK = 16 };

/* 58 new tokens over a prefix, or one; sharded over some ranks; with a window and without. */
typedef struct two_caches_case {
    cpa_dtype dtype, kv_dtype;
    int32_t cp_size;
    int64_t start;
    cpa_mask mask;
} two_caches_case;

static const two_caches_case cases[] = {
    {CPA_BF16, CPA_INT8, 1, START, {.causal = 1}},
    {CPA_BF16, CPA_FP8_E4M3, 2, START, {.causal = 1}},
    {CPA_F16, CPA_INT8, 3, LENGTH - 1, {.causal = 1}},
    {CPA_BF16, CPA_INT8, 2, START, {.causal = 1, .sinks = 5, .window = 90}},
    {CPA_F32, CPA_FP8_E4M3, 1, START, {.causal = 1}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static cpa_attend_case case_of(const two_caches_case *c, cpa_dtype kv_dtype, int32_t block_size) {
    return (cpa_attend_case){.q_dtype = c->dtype,
                             .kv_dtype = kv_dtype,
                             .q_heads = 8,
                             .kv_heads = 2,
                             .k_dim = 64,
                             .v_dim = 64,
                             .block_size = block_size,
                             .cp_size = c->cp_size,
                             .interleave = BLOCK,
                             .start = c->start,
                             .length = LENGTH,
                             .mask = c->mask};
}

/* All queries against the keys of all shards in [begin, end), by sequence index. */
static void run(cpa_attend_fixture *f, int64_t begin, int64_t end, int32_t k_slot, int resume,
                cpa_attend_result *result) {
    cpa_attend_item items[CPA_TEST_MAX_SLOTS];
    const cpa_token_set set = {CPA_TOKENS_SHARD, k_slot};
    const int64_t k_begin = cpa_tokens_before(f->map, set, begin), k_end = cpa_tokens_before(f->map, set, end);
    for (int32_t slot = 0; slot < f->shape.cp_size; slot++)
        items[slot] = cpa_attend_fixture_item(f, slot, 0, f->q_count[slot], k_slot, k_begin, k_end);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(f, items, f->shape.cp_size, resume, result), CPA_OK);
}

/* Keys before `border` from `first`, the others from `second`; the result of each shard against the reference, over the
 * sequence that `second` has been given of `first` in part. */
static void check_border(cpa_attend_fixture *first, cpa_attend_fixture *second, int64_t border) {
    const int64_t k_row = (int64_t)second->shape.kv_heads * second->shape.k_dim;
    memcpy(second->sequence.k, first->sequence.k, (size_t)(border * k_row) * sizeof(float));
    memcpy(second->sequence.v, first->sequence.v, (size_t)(border * k_row) * sizeof(float));
    for (int32_t slot = 0; slot < second->shape.cp_size; slot++) {
        cpa_attend_result result;
        cpa_attend_result_init(&result, second);
        run(first, 0, border, slot, 0, &result);
        run(second, border, LENGTH, slot, 1, &result);
        /* A resumed call of the fixture has no `out`: that is the state here. */
        cpa_narrow(result.out, result.o, second->shape.q_dtype,
                   result.out_bytes / cpa_dtype_bytes(second->shape.q_dtype));
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(second, slot, 3, &result, NULL), 0);
        cpa_attend_result_destroy(&result);
    }
}

static void check_case(const two_caches_case *c, int32_t second_block, cpa_dtype first_dtype, cpa_dtype second_dtype,
                       int64_t border) {
    cpa_attend_fixture first, second;
    const cpa_attend_case a = case_of(c, first_dtype, BLOCK), b = case_of(c, second_dtype, second_block);
    cpa_attend_fixture_init(&first, &a, 1);
    cpa_attend_fixture_init(&second, &b, 1);
    check_border(&first, &second, border);
    cpa_attend_fixture_destroy(&second);
    cpa_attend_fixture_destroy(&first);
}

static void first_tokens_are_kept_precise(void) {
    for (int i = 0; i < CASES; i++) {
        for (int32_t blocks = 1; blocks <= 4; blocks += 3)
            check_case(&cases[i], BLOCK, cases[i].dtype, cases[i].kv_dtype, (int64_t)blocks * BLOCK * cases[i].cp_size);
    }
}

/* The tensors are a cache of blocks of one token. */
static void keys_of_the_chunk_come_from_its_tensors(void) {
    for (int i = 0; i < CASES; i++) check_case(&cases[i], 1, cases[i].kv_dtype, cases[i].dtype, cases[i].start);
}

static const cpa_test tests[] = {
    {"first tokens are kept precise", first_tokens_are_kept_precise},
    {"keys of the chunk come from its tensors", keys_of_the_chunk_come_from_its_tensors},
};
CPA_DEVICE_TEST_MAIN("attend_two_caches", tests)
