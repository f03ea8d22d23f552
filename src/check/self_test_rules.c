#include "src/check/self_test_rules.h"

#include <stdio.h>

#include "base/check.h"
#include "base/hash.h"
#include "src/check/cases/score.h"
#include "src/check/self_test_results.h"

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

/* What the cases take from, on the host and on the device. */
typedef struct rule_inputs {
    cpa_case_score host;
    cpa_case_score_on_device device;
} rule_inputs;

/* Stretches of many keys, and single ones beside. */
static int sees_in_stretches(const void *ctx, int64_t row, int64_t key) {
    const int64_t stretch = 90, all = 3;
    (void)ctx;
    return key / stretch % all == 1 || cpa_mix64((uint64_t)(row * stretch * stretch + key)) % all == 0;
}

static cpa_status make_inputs(cpa_kernel_test *t, rule_inputs *in, cpa_error *err) {
    const int64_t keys = cpa_self_test_total_keys(t);
    in->host = (cpa_case_score){.q_heads = t->options->model.attention.q_heads, .rows = t->rows};
    CPA_TRY(cpa_case_score_add_slopes(&in->host, err));
    CPA_TRY(cpa_case_score_add_sinks(&in->host, err));
    in->host.sinks[in->host.q_heads - 1] = 1; /* not -inf, which may be the only one */
    CPA_TRY(cpa_case_score_add_bits(&in->host, 0, (int32_t)(keys - keys / 8), err)); /* none sees what is behind */
    cpa_case_score_fill_bits(&in->host, sees_in_stretches, NULL);
    return cpa_case_score_upload(&in->host, t->stream, &in->device, err);
}

/* Leaves of everything what a case has. */
static void take(const rule_case *c, rule_inputs *in) {
    in->host.softcap = in->device.rules.softcap = c->softcap;
    in->host.temperature_len = in->device.rules.temperature_len = c->temperature_len;
    if (!c->has_slopes) in->host.slopes = NULL, in->device.rules.alibi_slopes = NULL;
    if (!c->has_sinks) in->host.sinks = NULL, in->device.rules.sink_logits = NULL;
    if (!c->has_bits) in->host.bits = NULL, in->device.bits.bits = NULL;
}

static cpa_status check_case(cpa_kernel_test *t, const rule_inputs *all, const rule_case *c, cpa_error *err) {
    const cpa_mask causal = {.causal = 1};
    const cpa_self_test_result r = t->results[0];
    rule_inputs in = *all;
    take(c, &in);
    cpa_attend_args args = {.size = sizeof args,
                            .q = t->q_device,
                            .q_dtype = t->options->model.attention.dtype,
                            .kv = t->kv,
                            .mask = causal,
                            .scale = t->scale,
                            .state = {.lse = r.lse},
                            .out = r.out};
    cpa_case_score_set(&in.device, &args);
    const char *path;
    char what[64];
    cpa_self_test_expect(t, causal, &in.host, 0, in.host.q_heads);
    for (int32_t p = 0; (path = t->device->self_test->attend_path(t->device, p)); p++) {
        const cpa_status status = cpa_attend(t->plans[1], &args, t->stream);
        if (status != CPA_OK) return cpa_fail(err, status, "attend with %s: %s", c->name, t->stream->error.message);
        snprintf(what, sizeof what, "attend with %s, path %s", c->name, path);
        CPA_TRY(cpa_self_test_compare(t, what, causal, &r, 1, err));
    }
    return CPA_OK;
}

cpa_status cpa_self_test_check_rules(cpa_kernel_test *t, cpa_error *err) {
    rule_inputs in = {.host = {.q_heads = 0}};
    cpa_status status = make_inputs(t, &in, err);
    for (size_t i = 0; status == CPA_OK && i < sizeof CASES / sizeof *CASES; i++)
        status = check_case(t, &in, &CASES[i], err);
    (void)t->device->table->stream_sync(t->stream); /* what reads them has run */
    cpa_case_score_free(&in.device, t->device);
    cpa_case_score_release(&in.host);
    return status;
}
