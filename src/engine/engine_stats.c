#include "src/engine/engine_stats.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/name_list.h"
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
    cpa_context *context = engine->worker->context;
    cpa_rank_totals totals = {.verify = {0}};
    cpa_context_get_stats(context, &totals.context, sizeof totals.context);
    totals.rank = (cpa_rank_stats){
        .steps = engine->stats.steps,
        .step_begin_s = engine->step_begin_s,
        .step_end_s = engine->step_end_s,
        .attend_s = totals.context.attend_s,
        .exposed_comm_s = totals.context.exposed_comm_s,
        .graph_s = cpa_context_replayed_seconds(context),
    };
    memcpy(totals.bytes_to, cpa_context_bytes_to(context), (size_t)engine->control.size * sizeof totals.bytes_to[0]);
    if (engine->worker->disk) cpa_disk_blocks_get_stats(engine->worker->disk, &totals.disk);
    if (engine->verify) cpa_verify_get_stats(engine->verify, &totals.verify);
    totals.sparse = cpa_worker_sparse_totals(engine->worker);
    return totals;
}

/* How a figure of the engine is made of those of the ranks, which are of the same type. */
typedef enum joining { SUM_OF_COUNTS = 0, SUM_OF_REALS, MOST_OF_REALS } joining;

#define JOINED(of_rank, how, of_engine)                                                                                \
    { offsetof(cpa_rank_totals, of_rank), how, offsetof(cpa_engine_stats, of_engine) }

static const struct {
    size_t of_rank;
    joining how;
    size_t of_engine;
} joined[] = {
    JOINED(context.bytes_sent, SUM_OF_COUNTS, bytes_sent),
    JOINED(context.row_bytes_sent, SUM_OF_COUNTS, row_bytes_sent),
    JOINED(context.index_bytes_sent, SUM_OF_COUNTS, index_bytes_sent),
    JOINED(context.keys_attended, SUM_OF_COUNTS, keys_attended),
    JOINED(context.keys_read, SUM_OF_COUNTS, keys_read),
    JOINED(context.plain_rows, SUM_OF_COUNTS, plain_rows),
    JOINED(context.ring.device_bytes, SUM_OF_COUNTS, ring_device_bytes),
    JOINED(context.ring.bytes_read, SUM_OF_COUNTS, ring_bytes_read),
    JOINED(context.ring.timed_bytes, SUM_OF_COUNTS, ring_timed_bytes),
    JOINED(context.ring.copy_s, SUM_OF_REALS, ring_copy_s),
    JOINED(context.ring.waited_s, MOST_OF_REALS, ring_waited_s),
    JOINED(context.tiles_seen, SUM_OF_COUNTS, tiles_seen),
    JOINED(context.tiles_skipped, SUM_OF_COUNTS, tiles_skipped),
    JOINED(context.exposed_comm_s, MOST_OF_REALS, exposed_comm_s),
    JOINED(sparse.host_bytes, SUM_OF_COUNTS, sparse_host_bytes),
    JOINED(disk.bytes_written, SUM_OF_COUNTS, folder_bytes_written),
    JOINED(disk.bytes_read, SUM_OF_COUNTS, folder_bytes_read),
    JOINED(verify.rows, SUM_OF_COUNTS, verify_rows),
    JOINED(verify.violations, SUM_OF_COUNTS, verify_violations),
    JOINED(verify.undecided, SUM_OF_COUNTS, verify_undecided),
    JOINED(verify.max_error, MOST_OF_REALS, verify_max_error),
    JOINED(verify.listed_rows, SUM_OF_COUNTS, selection_rows),
    JOINED(verify.left_out, SUM_OF_REALS, selection_mass_left_out_mean), /* for now the sum */
    JOINED(verify.most_left_out, MOST_OF_REALS, selection_mass_left_out_max),
    JOINED(verify.seconds, MOST_OF_REALS, verify_s),
};

static int64_t sum_of_counts(const cpa_engine *engine, size_t of_rank) {
    int64_t sum = 0;
    for (int32_t rank = 0; rank < engine->control.size; rank++)
        sum += *(const int64_t *)((const char *)&engine->totals[rank] + of_rank);
    return sum;
}

static double sum_of_reals(const cpa_engine *engine, size_t of_rank) {
    double sum = 0;
    for (int32_t rank = 0; rank < engine->control.size; rank++)
        sum += *(const double *)((const char *)&engine->totals[rank] + of_rank);
    return sum;
}

static double most_of_reals(const cpa_engine *engine, size_t of_rank) {
    double most = 0;
    for (int32_t rank = 0; rank < engine->control.size; rank++)
        most = fmax(most, *(const double *)((const char *)&engine->totals[rank] + of_rank));
    return most;
}

void cpa_engine_join_totals(cpa_engine *engine) {
    double attend_s = 0;
    for (size_t i = 0; i < sizeof joined / sizeof joined[0]; i++) {
        char *to = (char *)&engine->stats + joined[i].of_engine;
        if (joined[i].how == SUM_OF_COUNTS) {
            *(int64_t *)to = sum_of_counts(engine, joined[i].of_rank);
        } else {
            const size_t of_rank = joined[i].of_rank;
            *(double *)to =
                joined[i].how == SUM_OF_REALS ? sum_of_reals(engine, of_rank) : most_of_reals(engine, of_rank);
        }
    }
    if (engine->stats.selection_rows > 0)
        engine->stats.selection_mass_left_out_mean /= (double)engine->stats.selection_rows;
    engine->stats.decode_kernels[0] = engine->stats.prefill_kernels[0] = 0;
    for (int32_t rank = 0; rank < engine->control.size; rank++) {
        const cpa_context_stats *context = &engine->totals[rank].context;
        attend_s += context->attend_s;
        cpa_name_list_add(engine->stats.decode_kernels, CPA_KERNEL_NAMES, context->decode_kernels);
        cpa_name_list_add(engine->stats.prefill_kernels, CPA_KERNEL_NAMES, context->prefill_kernels);
    }
    const double busiest_s = most_of_reals(engine, offsetof(cpa_rank_totals, context.attend_s));
    engine->stats.imbalance = attend_s > 0 ? busiest_s * engine->control.size / attend_s : 1;
    const cpa_worker_sparse_stats sparse = cpa_worker_sparse_totals(engine->worker);
    engine->stats.sparse_blocks_kept = sparse.kept;
    engine->stats.sparse_blocks_seen = sparse.seen;
    engine->stats.sparse_bytes = sparse.bytes;
    engine->stats.sparse_blocks_busiest = sparse.busiest;
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
                     cpa_context_replayed_seconds(engine->worker->context),
                     cpa_context_estimate_seconds(engine->worker->context)};
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
    s->sparse_s = most[3];
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
    if (engine->totals)
        memcpy(published->totals, engine->totals, (size_t)engine->control.size * sizeof *engine->totals);
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

cpa_status cpa_engine_get_rank_stats(const cpa_engine *engine, int32_t rank, cpa_rank_stats *out, size_t size,
                                     int64_t *bytes_to) {
    if (!engine || !engine->totals || rank < 0 || rank >= engine->control.size) return CPA_INVALID;
    cpa_published_stats *published = engine->published;
    pthread_mutex_lock(&published->lock);
    const cpa_rank_totals *totals = &published->totals[rank];
    const cpa_status status = cpa_struct_give(&totals->rank, sizeof totals->rank, out, size);
    if (status == CPA_OK && bytes_to)
        memcpy(bytes_to, totals->bytes_to, (size_t)engine->control.size * sizeof *bytes_to);
    pthread_mutex_unlock(&published->lock);
    return status;
}
