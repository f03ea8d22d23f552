#include "src/engine/engine_stats.h"

#include <math.h>
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

cpa_rank_totals cpa_engine_own_totals(const cpa_engine *engine) {
    cpa_context_stats context;
    cpa_verify_stats verify = {0};
    cpa_context_get_stats(engine->worker->context, &context, sizeof context);
    if (engine->verify) cpa_verify_get_stats(engine->verify, &verify);
    return (cpa_rank_totals){
        .bytes_sent = context.bytes_sent,
        .keys_attended = context.keys_attended,
        .keys_read = context.keys_read,
        .plain_rows = context.plain_rows,
        .verify_rows = verify.rows,
        .verify_violations = verify.violations,
        .verify_undecided = verify.undecided,
        .verify_max_error = verify.max_error,
        .verify_s = verify.seconds,
        .exposed_comm_s = context.exposed_comm_s,
        .attend_s = context.attend_s,
    };
}

void cpa_engine_join_totals(cpa_engine *engine) {
    const int32_t ranks = engine->control.size;
    cpa_engine_stats *s = &engine->stats;
    cpa_rank_totals sum = {0}, most = {0};
    for (int32_t rank = 0; rank < ranks; rank++) {
        const cpa_rank_totals *t = &engine->totals[rank];
        sum.bytes_sent += t->bytes_sent;
        sum.keys_attended += t->keys_attended;
        sum.keys_read += t->keys_read;
        sum.plain_rows += t->plain_rows;
        sum.verify_rows += t->verify_rows;
        sum.verify_violations += t->verify_violations;
        sum.verify_undecided += t->verify_undecided;
        sum.attend_s += t->attend_s;
        most.verify_max_error = fmax(most.verify_max_error, t->verify_max_error);
        most.verify_s = fmax(most.verify_s, t->verify_s);
        most.exposed_comm_s = fmax(most.exposed_comm_s, t->exposed_comm_s);
        most.attend_s = fmax(most.attend_s, t->attend_s);
    }
    s->bytes_sent = sum.bytes_sent;
    s->keys_attended = sum.keys_attended;
    s->keys_read = sum.keys_read;
    s->plain_rows = sum.plain_rows;
    s->verify_rows = (int64_t)sum.verify_rows;
    s->verify_violations = (int64_t)sum.verify_violations;
    s->verify_undecided = (int64_t)sum.verify_undecided;
    s->verify_max_error = most.verify_max_error;
    s->verify_s = most.verify_s;
    s->exposed_comm_s = most.exposed_comm_s;
    s->imbalance = sum.attend_s > 0 ? most.attend_s * ranks / sum.attend_s : 1;
}

/* Rank 0 gets what every rank has added up, and joins it. Collective. */
static cpa_status gather_totals(cpa_engine *engine, cpa_error *err) {
    const cpa_rank_totals own = cpa_engine_own_totals(engine);
    CPA_TRY(cpa_control_gather(&engine->control, &own, sizeof own, engine->totals, 0, err));
    if (engine->control.rank == 0) cpa_engine_join_totals(engine);
    return CPA_OK;
}

cpa_status cpa_engine_collect_stats(cpa_engine *engine, cpa_error *err) {
    cpa_control *control = &engine->control;
    cpa_context_stats context;
    cpa_context_get_stats(engine->worker->context, &context, sizeof context);
    cpa_engine_stats *s = &engine->stats;
    double most[] = {(double)context.staging_bytes, s->actual_attend_s,
                     cpa_context_replayed_seconds(engine->worker->context)};
    uint64_t digest;
    CPA_TRY(cpa_worker_digest(engine->worker, &digest, err));
    CPA_TRY(cpa_control_max(control, most, sizeof most / sizeof most[0], err));
    CPA_TRY(cpa_control_sum_u64(control, &digest, 1, err));
    CPA_TRY(gather_totals(engine, err));
    CPA_TRY(count_nonfinite(engine, err));
    s->graph_steps = engine->worker->graph_steps;
    s->chunks_pass_kv = context.chunks_pass_kv;
    s->chunks_pass_q = context.chunks_pass_q;
    s->staging_bytes = (int64_t)most[0];
    s->staging_bound = context.staging_bound;
    s->actual_attend_s = most[1];
    s->graph_s = most[2];
    s->output_digest = digest;
    s->planner_flops = engine->planner.flops;
    s->planner_bandwidth = engine->planner.bandwidth;
    s->planner_memory_bandwidth = engine->planner.memory_bandwidth;
    s->planner_exchange_s = engine->planner.exchange_s;
    s->overlap_tokens = cpa_planner_overlap_tokens(&engine->planner);
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
