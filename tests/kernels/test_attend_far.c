/* attend far from ordinary numbers, on every instruction set of this CPU: keys and queries beyond 2^30 tokens, scores
 * that are not finite under rules, and what joining pieces of keys costs where scores are large. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/device/host.h"
#include "src/check/reference.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { DIM = 16, BLOCK = 16, MOST_KEYS = 4112, BLOCKS = MOST_KEYS / BLOCK };

static cpa_device *device;
static cpa_stream *stream;
static const char *isa; /* that attend takes */

/* One row of one head over a cache of fp32 whose blocks lie in order. */
typedef struct far_row {
    cpa_owner_map map;
    cpa_token_set set;      /* of the query and the keys */
    int64_t query, k_first; /* local indices */
    int64_t keys;
    cpa_mask mask;
    cpa_score_rules rules;
    cpa_key_bits bits;
    cpa_score_bias bias;
    float q[DIM], k[MOST_KEYS][DIM], v[MOST_KEYS][DIM];
    float o[DIM], lse; /* the result */
} far_row;

/* Keys and values of noise, and a mask of nothing. */
static void make_row(far_row *r, int64_t keys) {
    memset(r, 0, sizeof *r);
    r->map = (cpa_owner_map){1, BLOCK};
    r->set = (cpa_token_set){CPA_TOKENS_ALL, 0};
    r->keys = keys;
    uint32_t random = 1;
    for (int64_t i = 0; i < (2 * keys + 1) * DIM; i++) {
        random = random * 1664525u + 1013904223u;
        float *to = i < DIM                ? &r->q[i]
                    : i < (keys + 1) * DIM ? &r->k[i / DIM - 1][i % DIM]
                                           : &r->v[i / DIM - keys - 1][i % DIM];
        *to = (float)(random >> 8) * 0x1p-23f - 1;
    }
}

static void attend(far_row *r) {
    int32_t table[BLOCKS];
    for (int32_t i = 0; i < BLOCKS; i++) table[i] = i;
    const cpa_attend_item item = {
        .q_count = 1, .q_first = r->query, .k_first = r->k_first, .k_count = r->keys, .q_set = r->set, .k_set = r->set};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = r->map,
                                    .shape = {.q_heads = 1, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM},
                                    .block_size = BLOCK,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = table,
                                    .n_table_entries = (r->keys + BLOCK - 1) / BLOCK};
    const cpa_key_selection selection = {.bits = &r->bits};
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = r->q,
                                  .kv = {.k = r->k,
                                         .v = r->v,
                                         .num_blocks = BLOCKS,
                                         .block_size = BLOCK,
                                         .kv_heads = 1,
                                         .k_dim = DIM,
                                         .v_dim = DIM},
                                  .mask = r->mask,
                                  .scale = 1,
                                  .state = {.o = r->o, .lse = &r->lse},
                                  .rules = &r->rules,
                                  .selection = r->bits.bits ? &selection : NULL,
                                  .bias = r->bias.values ? &r->bias : NULL};
    cpa_attend_plan *plan;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_OK);
    cpa_attend_plan_destroy(plan);
}

/* Whether the result is what float64 makes of keys that are seen: see[i] != 0, all where it is NULL. */
static int is_right(const far_row *r, const uint8_t *see) {
    const int64_t query = cpa_token_index(r->map, r->set, r->query);
    const cpa_reference_rules rules = {.softcap = (double)r->rules.softcap,
                                       .slope = r->rules.alibi_slopes ? (double)*r->rules.alibi_slopes : 0,
                                       .index = query};
    double want[DIM], lse, tolerance;
    cpa_reference_row row;
    cpa_reference_begin(&row, r->q, DIM, DIM, CPA_F32, 1);
    cpa_reference_set_rules(&row, &rules);
    for (int64_t i = 0; i < r->keys; i++) {
        const int64_t index = cpa_token_index(r->map, r->set, r->k_first + i), at = index - r->bias.first;
        const float *values = r->bias.values, bias = at >= 0 && at < r->bias.width ? values[at] : 0;
        if (!see || see[i]) cpa_reference_add_ruled(&row, 1, r->k[i], r->v[i], &index, &bias);
    }
    cpa_reference_end(&row, want, &lse, &tolerance);
    const double error = cpa_reference_error(r->o, want, DIM);
    if (isnan(lse)) return isnan(r->lse) && error == 0;
    const int right = error <= tolerance && fabs((double)r->lse - lse) <= cpa_reference_lse_tolerance(CPA_F32, lse);
    if (!right) printf("\n    %s: O off by %g of %g, LSE %g, expected %g", isa, error, tolerance, (double)r->lse, lse);
    return right;
}

/* Runs a case on every instruction set. */
static void on_every_isa(void (*run)(far_row *r)) {
    far_row *r = malloc(sizeof *r);
    cpa_test_device_open(1, &device, &stream);
    for (int i = 0; cpa_attend_isas[i]; i++) {
        if (!cpa_attend_isas[i]->supported()) continue;
        isa = cpa_attend_isas[i]->name;
        cpa_host_use_isa((cpa_host_device *)device, cpa_attend_isas[i]);
        run(r);
    }
    cpa_test_device_close(device, stream);
    free(r);
}

/* A query so far behind its keys, and one so far before them. */
static void run_far_query(far_row *r) {
    static const int64_t far[] = {1 << 20, (1 << 30) + 5, (int64_t)1 << 36, ((int64_t)1 << 44) - 1};
    for (size_t i = 0; i < 2 * sizeof far / sizeof *far; i++) {
        const int64_t distance = far[i / 2];
        const float slope = 1000 / (float)distance;
        make_row(r, 40);
        r->query = i % 2 ? 7 : distance;
        r->k_first = i % 2 ? distance / BLOCK * BLOCK - 2 * MOST_KEYS : 0;
        r->rules.alibi_slopes = &slope;
        attend(r);
        CU_ASSERT(is_right(r, NULL));
    }
}

static void alibi_counts_from_queries_far_away(void) {
    on_every_isa(run_far_query);
}

/* A shard's run ends within a tile, and its next one begins 2^32 tokens further on: each key has the bias, the bit and
 * the distance of its own index. */
static void run_far_runs(far_row *r) {
    enum { KEYS = 64, RUN = (1 << 26) + 16, BEHIND = 16 };
    const float slope = 0x1p-33f;
    const int64_t row_word = 0, bits_first = (int64_t)64 * RUN;
    const int32_t width = KEYS - BEHIND;
    const uint32_t bits[2] = {0x5a5a1234, 0xf00f};
    float bias[KEYS];
    uint8_t see[KEYS];
    make_row(r, KEYS);
    r->map = (cpa_owner_map){64, RUN};
    r->set = (cpa_token_set){CPA_TOKENS_SHARD, 0};
    r->query = RUN + 100;
    r->k_first = RUN - BEHIND;
    r->rules.alibi_slopes = &slope;
    for (int i = 0; i < KEYS; i++) bias[i] = (float)(i % 5) - 2;
    r->bias = (cpa_score_bias){.values = bias, .first = bits_first, .width = width};
    attend(r);
    CU_ASSERT(is_right(r, NULL));

    r->bits = (cpa_key_bits){.bits = bits, .row_word = &row_word, .first = &bits_first, .width = &width};
    r->mask.causal = 1;
    for (int i = 0; i < KEYS; i++) see[i] = i < BEHIND || bits[(i - BEHIND) / 32] >> (i - BEHIND) % 32 & 1;
    attend(r);
    CU_ASSERT(is_right(r, see));
}

static void keys_of_runs_far_apart_have_their_own_index(void) {
    on_every_isa(run_far_runs);
}

/* Scores of +inf and -inf by overflow, and of NaN, under a softcap. */
static void run_softcap(far_row *r) {
    make_row(r, 40);
    r->rules.softcap = 5;
    r->q[0] = 3e38f;
    for (int64_t i = 0; i < r->keys; i++) r->k[i][0] = i % 3 ? 0 : i % 2 ? -100 : 100;
    attend(r);
    CU_ASSERT(isfinite(r->lse) && is_right(r, NULL));
    r->k[11][0] = NAN;
    attend(r);
    CU_ASSERT(isnan(r->lse) && isnan(r->o[0]));
}

static void a_softcap_makes_infinite_scores_finite(void) {
    on_every_isa(run_softcap);
}

/* A key of NaN, and one whose score is +inf: a bias of -inf does not hide them, bits do. */
static void run_hidden(far_row *r) {
    enum { KEYS = 40 };
    const int64_t row_word = 0, first = 0;
    const int32_t width = KEYS;
    uint32_t bits[2] = {UINT32_MAX, UINT32_MAX};
    float bias[KEYS] = {0};
    uint8_t see[KEYS];
    for (int way = 0; way < 2; way++) {
        make_row(r, KEYS);
        memset(see, 1, sizeof see);
        see[9] = 0;
        r->k[9][3] = way ? INFINITY : NAN;
        r->q[3] = 1;
        bias[9] = -INFINITY;
        bits[0] = ~((uint32_t)1 << 9);
        r->bias = (cpa_score_bias){.values = bias, .width = KEYS};
        attend(r);
        CU_ASSERT(isnan(r->lse) && isnan(r->o[0]));
        r->bias.values = NULL;
        r->bits = (cpa_key_bits){.bits = bits, .row_word = &row_word, .first = &first, .width = &width};
        attend(r);
        r->bias.width = 0;
        CU_ASSERT(is_right(r, see));
        r->k[9][3] = 0; /* a score that is a number is hidden by either */
        r->bits.bits = NULL;
        r->bias = (cpa_score_bias){.values = bias, .width = KEYS};
        attend(r);
        CU_ASSERT(is_right(r, see));
    }
}

static void bits_hide_what_a_bias_does_not(void) {
    on_every_isa(run_hidden);
}

/* A window of 3 keys ahead: of a row with bits it bounds nothing, of one without all. */
static void run_right(far_row *r) {
    enum { KEYS = 40, FIRST = 30 };
    const int64_t first = FIRST;
    const int32_t width = KEYS - FIRST;
    const uint32_t bits = 0x2a5;
    uint8_t see[KEYS];
    for (int64_t row_word = -1; row_word < 1; row_word++) {
        make_row(r, KEYS);
        r->query = 10;
        r->mask.right = 3;
        r->bits = (cpa_key_bits){.bits = &bits, .row_word = &row_word, .first = &first, .width = &width};
        for (int i = 0; i < KEYS; i++) see[i] = row_word < 0 ? i - 10 < 3 : i < FIRST || bits >> (i - FIRST) & 1;
        attend(r);
        CU_ASSERT(is_right(r, see));
    }
}

static void bits_decide_in_the_place_of_right(void) {
    on_every_isa(run_right);
}

/* By how much O is off for equal keys, 1 those of one piece and -1 the others. */
static double error_of_pieces(far_row *r, float score, int64_t keys, int64_t one) {
    const int64_t piece = cpa_attend_split_tokens(device);
    double mean = 0, error = 0;
    make_row(r, keys);
    memset(r->q, 0, sizeof r->q);
    r->q[0] = score;
    for (int64_t key = 0; key < keys; key++) {
        const float value = key / piece == one ? 1 : -1;
        r->k[key][0] = 1;
        for (int d = 0; d < DIM; d++) r->v[key][d] = value;
        mean += (double)value / (double)keys;
    }
    attend(r);
    for (int d = 0; d < DIM; d++) error = fmax(error, fabs((double)r->o[d] - mean));
    return error;
}

/* Equal keys are exact where there is one piece; where there are more, O is off by up to |LSE| 2^-24 for each that is
 * joined, as ops.h says. */
static void run_pieces(far_row *r) {
    const int64_t piece = cpa_attend_split_tokens(device);
    for (float score = 1; score < 3e7f; score *= 1.7f) {
        CPA_ASSERT_ORDER(error_of_pieces(r, score, piece, 0), <=, 1e-6);
        double most = 0;
        for (int64_t one = 0; one < 5; one++) most = fmax(most, error_of_pieces(r, score, 4 * piece + 1, one));
        CPA_ASSERT_ORDER(most, <=, 4 * (double)score * 0x1p-24 + 1e-6);
    }
}

static void pieces_of_keys_are_joined_by_fp32(void) {
    on_every_isa(run_pieces);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"ALiBi counts from queries far away", alibi_counts_from_queries_far_away},
        {"keys of runs far apart have their own index", keys_of_runs_far_apart_have_their_own_index},
        {"a softcap makes infinite scores finite", a_softcap_makes_infinite_scores_finite},
        {"bits hide what a bias does not", bits_hide_what_a_bias_does_not},
        {"bits decide in the place of `right`", bits_decide_in_the_place_of_right},
        {"pieces of keys are joined by fp32", pieces_of_keys_are_joined_by_fp32},
    };
    return cpa_test_main(argc, argv, "attend far from ordinary numbers", tests, (int)(sizeof tests / sizeof tests[0]));
}
