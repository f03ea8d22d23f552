#include "src/check/self_test_rules.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <cpattn/score.h>

#include "base/check.h"
#include "base/hash.h"
#include "src/check/reference.h"
#include "src/check/self_test_pages.h"
#include "src/check/self_test_results.h"

enum { ROWS_APART = 9 }; /* of those that the reference has, beside the last ones */

/* Rules that change scores where tiles differ, one kind of kernel each. */
typedef struct rule_case {
    const char *name;
    float softcap, temperature_len;
    int has_slopes, has_sinks, has_bits;
} rule_case;

static const rule_case CASES[] = {
    {.name = "softcap", .softcap = 3, .temperature_len = 50},
    {.name = "ALiBi", .has_slopes = 1, .has_sinks = 1},
    {.name = "sinks", .has_sinks = 1},
    {.name = "bits", .has_bits = 1},
};

/* What the cases take from, on the host; `device`: the same there. */
typedef struct rule_inputs {
    float *slopes, *sinks; /* [q_heads] */
    uint32_t *bits;        /* [rows, words] */
    int64_t words, *row_word, *first;
    int32_t *width;
    cpa_score_rules rules;
    cpa_custom_mask custom;
} rule_inputs;

/* Whether a row sees the key of index `key`, by its bits: stretches of many keys, and single ones beside. */
static int bit_of(int64_t row, int64_t key) {
    const int64_t stretch = 90, all = 3;
    return key / stretch % all == 1 || cpa_mix64((uint64_t)(row * stretch * stretch + key)) % all == 0;
}

static cpa_status make_inputs(cpa_kernel_test *t, rule_inputs *in, cpa_error *err) {
    const int32_t heads = t->options->model.attention.q_heads;
    const int64_t four = (int64_t)sizeof(float), eight = (int64_t)sizeof(int64_t), keys = cpa_self_test_total_keys(t);
    const int32_t width = (int32_t)(keys - keys / 8); /* no row sees what is behind */
    in->words = cpa_mask_words(width);
    CPA_TRY(cpa_self_test_host(t, heads * four, &in->slopes, err));
    CPA_TRY(cpa_self_test_host(t, heads * four, &in->sinks, err));
    CPA_TRY(cpa_self_test_host(t, t->rows * in->words * four, &in->bits, err));
    CPA_TRY(cpa_self_test_host(t, t->rows * eight, &in->row_word, err));
    CPA_TRY(cpa_self_test_host(t, t->rows * eight, &in->first, err));
    CPA_TRY(cpa_self_test_host(t, t->rows * four, &in->width, err));
    for (int32_t h = 0; h < heads; h++) {
        in->slopes[h] = exp2f(-8.0f * (float)(h + 1) / (float)heads);
        in->sinks[h] = (float)(h % 4) - 1;
    }
    for (int64_t row = 0; row < t->rows; row++) {
        in->row_word[row] = row * in->words;
        in->first[row] = 0;
        in->width[row] = width;
        for (int64_t word = 0; word < in->words; word++) {
            uint32_t bits = 0;
            for (int64_t i = 0; i < 32; i++) bits |= (uint32_t)bit_of(row, word * 32 + i) << i;
            in->bits[row * in->words + word] = bits;
        }
    }
    CPA_TRY(cpa_self_test_device(t, heads * four, in->slopes, &in->rules.alibi_slopes, err));
    CPA_TRY(cpa_self_test_device(t, heads * four, in->sinks, &in->rules.sink_logits, err));
    CPA_TRY(cpa_self_test_device(t, t->rows * in->words * four, in->bits, &in->custom.bits, err));
    CPA_TRY(cpa_self_test_device(t, t->rows * eight, in->row_word, &in->custom.row_word, err));
    CPA_TRY(cpa_self_test_device(t, t->rows * eight, in->first, &in->custom.first, err));
    return cpa_self_test_device(t, t->rows * four, in->width, &in->custom.width, err);
}

static void expect_row(cpa_kernel_test *t, const rule_inputs *in, const rule_case *c, int64_t row, int32_t head) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t at = row * shape->q_heads + head, kv_head = head / (shape->q_heads / shape->kv_heads);
    const cpa_mask causal = {.causal = 1};
    double o[CPA_MAX_HEAD_DIM], lse, tolerance;
    cpa_reference_row reference;
    cpa_reference_begin(&reference, t->q + at * shape->k_dim, shape->k_dim, shape->v_dim, t->coarser, (double)t->scale);
    cpa_reference_set_rules(&reference, &(cpa_reference_rules){.softcap = (double)c->softcap,
                                                               .temperature_len = (double)c->temperature_len,
                                                               .slope = c->has_slopes ? (double)in->slopes[head] : 0,
                                                               .sink = c->has_sinks ? (double)in->sinks[head] : 0,
                                                               .has_sink = c->has_sinks,
                                                               .index = t->q_positions[row]});
    for (int64_t i = t->keys[0]; i < t->keys[0] + t->limits[row]; i++) {
        const int64_t key = t->k_positions[i];
        if (c->has_bits ? key >= in->width[row] || !bit_of(row, key)
                        : !cpa_reference_sees(causal, t->q_positions[row], key))
            continue;
        cpa_reference_add_ruled(&reference, 1, t->k + (i * shape->kv_heads + kv_head) * shape->k_dim,
                                t->v + (i * shape->kv_heads + kv_head) * shape->v_dim, &key, NULL);
    }
    cpa_reference_end(&reference, o, &lse, &tolerance);
    for (int32_t d = 0; d < shape->v_dim; d++) t->want.o[at * shape->v_dim + d] = (float)o[d];
    t->want.lse[at] = (float)lse;
    t->want.tolerance[at] = (float)tolerance;
}

/* Some rows and the last ones, each with one query head. */
static void expect(cpa_kernel_test *t, const rule_inputs *in, const rule_case *c) {
    const int32_t heads = t->options->model.attention.q_heads;
    for (int64_t i = 0; i < t->rows * heads; i++) t->want.tolerance[i] = -1;
    for (int64_t row = 0; row < t->rows; row++) {
        const int taken = row % ROWS_APART == 0 || row >= t->rows - CPA_SELF_TEST_DECODE_ROWS - 1;
        if (taken) expect_row(t, in, c, row, (int32_t)(row % heads));
    }
}

static cpa_status check_case(cpa_kernel_test *t, const rule_inputs *in, const rule_case *c, cpa_error *err) {
    const cpa_mask causal = {.causal = 1};
    const cpa_self_test_result r = t->results[0];
    const cpa_score_rules rules = {.softcap = c->softcap,
                                   .temperature_len = c->temperature_len,
                                   .alibi_slopes = c->has_slopes ? in->rules.alibi_slopes : NULL,
                                   .sink_logits = c->has_sinks ? in->rules.sink_logits : NULL};
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = t->q_device,
                                  .q_dtype = t->options->model.attention.dtype,
                                  .kv = t->kv,
                                  .mask = causal,
                                  .scale = t->scale,
                                  .state = {.lse = r.lse},
                                  .out = r.out,
                                  .rules = &rules,
                                  .custom = c->has_bits ? &in->custom : NULL};
    const char *path;
    char what[64];
    expect(t, in, c);
    for (int32_t p = 0; (path = t->device->self_test->attend_path(t->device, p)); p++) {
        const cpa_status status = cpa_attend(t->plans[1], &args, t->stream);
        if (status != CPA_OK) return cpa_fail(err, status, "attend with %s: %s", c->name, t->stream->error.message);
        snprintf(what, sizeof what, "attend with %s, path %s", c->name, path);
        CPA_TRY(cpa_self_test_compare(t, what, causal, &r, 1, err));
    }
    return CPA_OK;
}

cpa_status cpa_self_test_check_rules(cpa_kernel_test *t, cpa_error *err) {
    rule_inputs in = {.words = 0};
    CPA_TRY(make_inputs(t, &in, err));
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) CPA_TRY(check_case(t, &in, &CASES[i], err));
    return CPA_OK;
}
