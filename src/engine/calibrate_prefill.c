#include "src/engine/calibrate_prefill.h"

#include <math.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"
#include "src/context/context_plan.h"
#include "src/engine/calibrate_probe.h"

enum { LEAST_TOKENS = 512, LAYERS = 3 };

/* Cached tokens of the two chunks through whose times the line of a probe goes. */
static const int64_t CACHED[] = {CPA_PLANNER_PROBE_CACHED, 4 * CPA_PLANNER_PROBE_CACHED};

static cpa_status plan_chunk(cpa_calibrate_probe *p, const cpa_context_chunk *chunk, cpa_error *err) {
    cpa_context_begin(p->context);
    CPA_TRY(cpa_calibrate_context_failed(p, cpa_context_plan_ahead(p->context, chunk, 1, NULL, NULL, 0), err));
    CPA_TRY(cpa_calibrate_context_failed(p, cpa_context_upload_plan(p->context, p->stream), err));
    CPA_TRY(cpa_calibrate_probe_attend(p, 1, err)); /* the warm-up */
    return cpa_calibrate_context_failed(p, cpa_context_sync(p->context, p->stream), err);
}

/* Seconds of a layer, on the slowest rank. */
static cpa_status time_chunk(cpa_calibrate_probe *p, cpa_algorithm algorithm, int64_t tokens, int64_t cached,
                             double *seconds, cpa_error *err) {
    const cpa_context_chunk chunk = {.start = cached, .count = tokens, .algorithm = algorithm, .block_table = p->table};
    double ready = 0;
    CPA_TRY(cpa_control_agree(p->control, plan_chunk(p, &chunk, err), err));
    CPA_TRY(cpa_control_max(p->control, &ready, 1, err)); /* ranks begin together */
    const double start = cpa_clock_now();
    cpa_status status = cpa_calibrate_probe_attend(p, LAYERS, err);
    if (status == CPA_OK) status = cpa_calibrate_context_failed(p, cpa_context_sync(p->context, p->stream), err);
    *seconds = (cpa_clock_now() - start) / LAYERS;
    CPA_TRY(cpa_control_agree(p->control, status, err));
    return cpa_control_max(p->control, seconds, 1, err);
}

static cpa_status measure_line(cpa_calibrate_probe *p, cpa_algorithm algorithm, int64_t tokens, cpa_planner_line *line,
                               cpa_error *err) {
    double seconds[2];
    for (int i = 0; i < 2; i++) CPA_TRY(time_chunk(p, algorithm, tokens, CACHED[i], &seconds[i], err));
    line->each_s = fmax(seconds[1] - seconds[0], 0) / (double)(CACHED[1] - CACHED[0]);
    line->first_s = seconds[0];
    return CPA_OK;
}

static cpa_status measure_probes(cpa_calibrate_probe *p, int64_t most_tokens, cpa_planner *planner, cpa_error *err) {
    for (int64_t tokens = LEAST_TOKENS; tokens <= most_tokens && planner->n_probes < CPA_PLANNER_PROBES; tokens *= 2) {
        cpa_planner_probe *probe = &planner->probes[planner->n_probes];
        probe->new_tokens = tokens;
        CPA_TRY(measure_line(p, CPA_PASS_KV, tokens, &probe->pass_kv, err));
        CPA_TRY(measure_line(p, CPA_PASS_Q, tokens, &probe->pass_q, err));
        planner->n_probes++;
        cpa_log(CPA_LOG_INFO,
                "a layer of %lld new tokens over %lld / %lld: pass-kv %.0f / %.0f us, pass-q %.0f / %.0f us",
                (long long)tokens, (long long)CACHED[0], (long long)CACHED[1], 1e6 * probe->pass_kv.first_s,
                1e6 * (probe->pass_kv.first_s + probe->pass_kv.each_s * (double)(CACHED[1] - CACHED[0])),
                1e6 * probe->pass_q.first_s,
                1e6 * (probe->pass_q.first_s + probe->pass_q.each_s * (double)(CACHED[1] - CACHED[0])));
    }
    return CPA_OK;
}

cpa_status cpa_calibrate_prefill(cpa_control *control, cpa_device *device, const cpa_worker_options *o,
                                 cpa_planner *planner, cpa_error *err) {
    const int64_t tokens = cpa_min64(o->max_tokens, (int64_t)LEAST_TOKENS << (CPA_PLANNER_PROBES - 1));
    const int64_t round = (int64_t)o->map.interleave * control->size;
    cpa_calibrate_probe probe = {0};
    planner->n_probes = 0;
    if (tokens < LEAST_TOKENS) return CPA_OK;
    cpa_status status =
        cpa_calibrate_probe_open(&probe, control, device, o, tokens, (tokens / round + 1) * o->map.interleave,
                                 ((CACHED[1] + tokens) / round + 1) * o->map.interleave, err);
    if (status == CPA_OK) status = measure_probes(&probe, tokens, planner, err);
    cpa_calibrate_probe_close(&probe);
    return status;
}
