#include "src/engine/engine_stats.h"

#include <stdio.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/engine/engine_options.h"

/* What the scheduler knows, on rank 0. */
static void collect_scheduler_stats(cpa_engine *engine) {
    cpa_engine_stats *s = &engine->stats;
    cpa_scheduler_stats scheduled;
    cpa_scheduler_get_stats(engine->scheduler, &scheduled);
    cpa_engine_take_stats(&scheduled, s);
    size_t used = 0;
    s->choices[0] = 0;
    for (int algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        for (int reason = 0; reason < CPA_REASON_COUNT; reason++) {
            int64_t chunks = scheduled.chunks[algorithm][reason];
            if (chunks == 0 || used >= sizeof s->choices) continue;
            const char *name = reason == CPA_REASON_LOCAL ? "none" : cpa_algorithm_name((cpa_algorithm)algorithm);
            used += (size_t)snprintf(s->choices + used, sizeof s->choices - used, "%s%s %lld (%s)", used ? ", " : "",
                                     name, (long long)chunks, cpa_planner_reason_name((cpa_planner_reason)reason));
        }
    }
}

/* Rows of all ranks that are not finite; collective. */
static cpa_status count_nonfinite(cpa_engine *engine, cpa_error *err) {
    cpa_engine_stats *s = &engine->stats;
    cpa_nonfinite all;
    CPA_TRY(cpa_nonfinite_join(&engine->worker->nonfinite, &engine->control, &all, err));
    s->nonfinite_rows = all.rows;
    s->nonfinite_request = all.first.request;
    s->nonfinite_position = all.first.position;
    s->nonfinite_layer = (int32_t)all.first.layer;
    return CPA_OK;
}

cpa_status cpa_engine_collect_stats(cpa_engine *engine, cpa_error *err) {
    cpa_control *control = &engine->control;
    cpa_context_stats context;
    cpa_context_get_stats(engine->worker->context, &context, sizeof context);
    cpa_verify_stats verify = {0};
    if (engine->verify) cpa_verify_get_stats(engine->verify, &verify);
    cpa_engine_stats *s = &engine->stats;
    double most[] = {context.exposed_comm_s,
                     context.attend_s,
                     (double)context.staging_bytes,
                     verify.max_error,
                     s->actual_attend_s,
                     verify.seconds,
                     cpa_context_replayed_seconds(engine->worker->context)};
    double attend_sum = context.attend_s;
    uint64_t sums[] = {(uint64_t)context.bytes_sent, verify.rows, verify.violations, 0, verify.undecided};
    CPA_TRY(cpa_worker_digest(engine->worker, &sums[3], err));
    CPA_TRY(cpa_control_max(control, most, sizeof most / sizeof most[0], err));
    CPA_TRY(cpa_control_sum(control, &attend_sum, 1, err));
    CPA_TRY(cpa_control_sum_u64(control, sums, 5, err));
    CPA_TRY(count_nonfinite(engine, err));
    s->graph_steps = engine->worker->graph_steps;
    s->chunks_pass_kv = context.chunks_pass_kv;
    s->chunks_pass_q = context.chunks_pass_q;
    s->exposed_comm_s = most[0];
    s->imbalance = attend_sum > 0 ? most[1] * control->size / attend_sum : 1;
    s->staging_bytes = (int64_t)most[2];
    s->staging_bound = context.staging_bound;
    s->verify_max_error = most[3];
    s->actual_attend_s = most[4];
    s->verify_s = most[5];
    s->graph_s = most[6];
    s->bytes_sent = (int64_t)sums[0];
    s->verify_rows = (int64_t)sums[1];
    s->verify_violations = (int64_t)sums[2];
    s->verify_undecided = (int64_t)sums[4];
    s->output_digest = sums[3];
    s->planner_flops = engine->planner.flops;
    s->planner_bandwidth = engine->planner.bandwidth;
    s->planner_memory_bandwidth = engine->planner.memory_bandwidth;
    s->planner_exchange_s = engine->planner.exchange_s;
    s->overlap_tokens = cpa_planner_overlap_tokens(&engine->planner);
    s->kv_blocks = engine->options.num_blocks;
    if (engine->scheduler) collect_scheduler_stats(engine);
    return cpa_control_bcast(control, s, sizeof *s, 0, err);
}

void cpa_engine_publish_stats(cpa_engine *engine, const cpa_scheduler_stats *scheduled) {
    cpa_published_stats *published = engine->published;
    pthread_mutex_lock(&published->lock);
    published->stats = engine->stats;
    if (scheduled) cpa_engine_take_stats(scheduled, &published->stats);
    pthread_mutex_unlock(&published->lock);
}

cpa_status cpa_engine_get_stats(const cpa_engine *engine, cpa_engine_stats *out, size_t size) {
    if (!engine) return CPA_INVALID;
    cpa_published_stats *published = engine->published;
    pthread_mutex_lock(&published->lock);
    cpa_status status = cpa_struct_give(&published->stats, sizeof published->stats, out, size);
    pthread_mutex_unlock(&published->lock);
    return status;
}
