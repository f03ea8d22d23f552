/* attend: softmax(scale * Q K^T + mask) V over pages.
 *
 * Keys are taken in splits of CPA_HOST_SPLIT_TOKENS local indices, and splits in tiles of CPA_ATTEND_TILE, both at
 * absolute local indices. Within a split the softmax is online over the tiles (Milakov and Gimelshein,
 * arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135); the state of a row is the left fold of the states of
 * its splits by the two-state merge of state.h. A tile or split of which a row sees nothing leaves its state as it was,
 * bit for bit, and every sum has one order. So the bits of a row do not depend on the rows beside it, on the threads,
 * or on where a resumed call took over.
 *
 * A score of NaN or +inf makes its exponential NaN, and so the sum of the row, which is looked at once a split: the
 * loops need no check. A key that weighs 0 for some row of a group still meets that row's zero in a product, and 0 *
 * NaN is NaN: a row whose O, but not whose sum, came out of a split as no number goes through it again, alone and with
 * zeros for the values of such keys. So a row has the same bits whatever the keys hold that it does not see.
 *
 * In reading order: attend_plan.c deals rows to units, attend_cascade.c those of several items that share keys,
 * attend_rows.c takes a unit through a split, attend_vector.h takes a group of rows through a tile, with the products
 * of attend_floats.h (packed tiles) and attend_pages.h (in place), or of attend_pairs.h. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "kernels/attend_log.h"
#include "kernels/host/attend/attend_cascade.h"
#include "kernels/host/attend/attend_out.h"
#include "kernels/host/attend/attend_rows.h"
#include "kernels/host/attend/state.h"

/* Where the results of one row go, and where they came from. */
typedef struct row_place {
    float *o, *lse; /* NULL: not wanted */
    char *out;
} row_place;

static row_place place_of(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t row) {
    const cpa_attend_batch *batch = &job->plan->batch;
    const cpa_partial *state = &job->args.state;
    const cpa_host_member member = cpa_host_member_of(job->plan, unit, job->group, row);
    int64_t index = job->plan->items[member.item].q_row + member.token;
    int64_t head = cpa_attend_query_head(job, unit, row);
    int64_t at = (index * job->args.out_row_stride + head * job->args.out_head_stride) * cpa_host_out_bytes(&job->args);
    return (row_place){
        .o = state->o ? state->o + index * state->o_row_stride + head * batch->shape.v_dim : NULL,
        .lse = state->lse ? state->lse + index * state->lse_row_stride + head * job->args.lse_head_stride : NULL,
        .out = job->args.out ? (char *)job->args.out + at : NULL};
}

/* Begins the fold with the empty state, or with what the caller has, and goes on with what the rows share. */
static void load_states(const cpa_attend_job *job, const cpa_host_unit *unit, cpa_attend_workspace *work) {
    int32_t v_dim = job->plan->batch.shape.v_dim, rows = cpa_host_unit_rows(unit);
    for (int32_t i = 0; i < rows; i++) {
        float *o = work->state_o + (int64_t)i * v_dim;
        row_place place = place_of(job, unit, i);
        work->state_lse[i] = job->args.resume ? cpa_state_lse(*place.lse) : -INFINITY;
        if (isnan(work->state_lse[i]))
            cpa_state_set_nan(o, &work->state_lse[i], v_dim);
        else if (work->state_lse[i] == -INFINITY)
            memset(o, 0, (size_t)v_dim * sizeof *o);
        else
            memcpy(o, place.o, (size_t)v_dim * sizeof *o);
        cpa_host_fold_shared(job->plan, unit, i, o, &work->state_lse[i]);
    }
}

/* The result of a row, which a sink shares in. */
static void store_out(const cpa_attend_job *job, row_place place, const float *o, float lse, int64_t head) {
    const int32_t v_dim = job->plan->batch.shape.v_dim;
    const float *sinks = job->score.rules.sink_logits;
    float scaled[CPA_MAX_HEAD_DIM];
    if (sinks) {
        const float factor = cpa_attend_sink_factor(lse, sinks[head]);
        for (int32_t d = 0; d < v_dim; d++) scaled[d] = o[d] * factor;
        o = scaled;
    }
    cpa_host_store_out(&job->args, place.out, o, v_dim);
}

static void store_states(const cpa_attend_job *job, const cpa_host_unit *unit, const cpa_attend_workspace *work) {
    int32_t v_dim = job->plan->batch.shape.v_dim, rows = cpa_host_unit_rows(unit);
    for (int32_t i = 0; i < rows; i++) {
        const float *o = work->state_o + (int64_t)i * v_dim;
        row_place place = place_of(job, unit, i);
        if (place.o) memcpy(place.o, o, (size_t)v_dim * sizeof *o);
        if (place.lse) *place.lse = work->state_lse[i];
        if (place.out) store_out(job, place, o, work->state_lse[i], cpa_attend_query_head(job, unit, i));
    }
}

static cpa_attend_workspace *workspace_of(const cpa_attend_job *job, int32_t thread) {
    return cpa_host_device_of(job->stream)->workspaces[thread];
}

static void attend_whole(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t thread) {
    cpa_attend_workspace *work = workspace_of(job, thread);
    int32_t v_dim = job->plan->batch.shape.v_dim, rows = cpa_host_unit_rows(unit);
    load_states(job, unit, work);
    for (int64_t split = unit->split_begin; split < unit->split_end; split++) {
        if (!cpa_attend_split(job, unit, split, work, thread == 0)) continue;
        for (int32_t i = 0; i < rows; i++)
            cpa_state_fold(work->state_o + (int64_t)i * v_dim, &work->state_lse[i], work->o + i * job->o_stride,
                           work->lse[i], v_dim);
    }
    store_states(job, unit, work);
}

/* Leaves the states of the unit's splits in the plan's partials. */
static void attend_part(const cpa_attend_job *job, const cpa_host_unit *unit, int32_t thread) {
    cpa_attend_workspace *work = workspace_of(job, thread);
    int32_t v_dim = job->plan->batch.shape.v_dim, rows = cpa_host_unit_rows(unit);
    float *o = job->plan->partials + unit->partial;
    for (int64_t split = unit->split_begin; split < unit->split_end; split++) {
        float *lse = o + (int64_t)rows * v_dim;
        int seen = cpa_attend_split(job, unit, split, work, thread == 0);
        for (int32_t i = 0; i < rows; i++) {
            lse[i] = seen ? work->lse[i] : -INFINITY;
            if (seen) memcpy(o + (int64_t)i * v_dim, work->o + i * job->o_stride, (size_t)v_dim * sizeof *o);
        }
        o += cpa_host_partial_floats(job->plan, unit);
    }
}

static void count_tiles(const cpa_attend_job *job, const cpa_attend_workspace *work) {
    if (job->skip == 0 || !job->args.tile_counts) return;
    for (int i = 0; i < 2; i++) __atomic_fetch_add(&job->args.tile_counts[i], work->tiles[i], __ATOMIC_RELAXED);
}

static void attend_shared_unit(void *ctx, int64_t item, int32_t thread) {
    const cpa_attend_job *job = ctx;
    const cpa_host_unit *unit = &job->plan->shared_units[item];
    cpa_attend_load_rows(job, unit, workspace_of(job, thread));
    attend_part(job, unit, thread);
    count_tiles(job, workspace_of(job, thread));
}

static void attend_unit(void *ctx, int64_t item, int32_t thread) {
    const cpa_attend_job *job = ctx;
    const cpa_host_unit *unit = &job->plan->units[item];
    cpa_attend_load_rows(job, unit, workspace_of(job, thread));
    if (unit->partial < 0)
        attend_whole(job, unit, thread);
    else
        attend_part(job, unit, thread);
    count_tiles(job, workspace_of(job, thread));
}

/* Folds the partial states of rows that several units shared. */
static void fold_unit(void *ctx, int64_t item, int32_t thread) {
    const cpa_attend_job *job = ctx;
    const cpa_host_unit *unit = &job->plan->folds[item];
    cpa_attend_workspace *work = workspace_of(job, thread);
    int32_t v_dim = job->plan->batch.shape.v_dim, rows = cpa_host_unit_rows(unit);
    const float *o = job->plan->partials + unit->partial;
    load_states(job, unit, work);
    for (int64_t split = unit->split_begin; split < unit->split_end; split++) {
        const float *lse = o + (int64_t)rows * v_dim;
        for (int32_t i = 0; i < rows; i++)
            cpa_state_fold(work->state_o + (int64_t)i * v_dim, &work->state_lse[i], o + (int64_t)i * v_dim, lse[i],
                           v_dim);
        o += cpa_host_partial_floats(job->plan, unit);
    }
    store_states(job, unit, work);
}

/* The queries that are elsewhere go where the others are. */
static void place_ready_queries(const cpa_host_plan *plan, const cpa_attend_args *args, const void *ready_q) {
    const cpa_attend_fusion *fusion = &plan->base.fusion;
    const int64_t row_bytes = args->q_row_stride * cpa_dtype_bytes(args->q_dtype), rows = fusion->ready_rows;
    char *place = (char *)(uintptr_t)args->q + fusion->ready_row * row_bytes;
    if (rows > 0) memcpy(place, ready_q, (size_t)(rows * row_bytes));
}

cpa_status cpa_host_attend_supported(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                                     const cpa_mask *mask, cpa_error *err) {
    (void)device, (void)where, (void)shape, (void)mask, (void)err;
    return CPA_OK;
}

static const cpa_attend_isa *isa_of(const cpa_device *base, cpa_dtype q_dtype, cpa_dtype kv_dtype) {
    const cpa_host_device *device = (const cpa_host_device *)base;
    return device->pair_isa && q_dtype == CPA_BF16 && kv_dtype == CPA_BF16 ? device->pair_isa : device->isa;
}

/* Few rows are those whose heads go together; see cpa_host_unit_heads. */
void cpa_host_attend_kernels_of(const cpa_attend_plan *base, const cpa_attend_args *args, cpa_attend_kernels *out) {
    const cpa_host_plan *plan = (const cpa_host_plan *)base;
    const cpa_host_device *device = (const cpa_host_device *)base->device;
    const cpa_attend_isa *isa =
        isa_of(base->device, args ? args->q_dtype : base->shape.dtype, args ? args->kv.dtype : base->shape.kv_dtype);
    const cpa_attend_isa *fastest = device->pair_isa ? device->pair_isa : isa;
    const cpa_attend_kernel kernel = {isa->name, fastest->name,
                                      isa == fastest ? NULL : "queries, keys or values that are not bf16"};
    *out = (cpa_attend_kernels){0};
    for (int64_t i = 0; i < plan->batch.n_items; i++) {
        const int64_t rows = plan->items[i].q_count * (base->shape.q_heads / base->shape.kv_heads);
        if (rows > 0) *(rows <= device->isa->rows ? &out->decode : &out->prefill) = kernel;
    }
    if (plan->n_shared > 0) out->shared = kernel;
}

cpa_status cpa_host_attend(const cpa_attend_plan *base, const cpa_attend_args *args, const void *ready_q,
                           cpa_stream *stream) {
    const cpa_host_plan *plan = (const cpa_host_plan *)base;
    const cpa_attend_batch *batch = &plan->batch;
    cpa_attend_job job = {
        .plan = plan, .isa = isa_of(stream->device, args->q_dtype, args->kv.dtype), .args = *args, .stream = stream};
    if (!base->n_items) return CPA_OK;
    cpa_attend_log_kernels(base, args);
    job.args.kv = cpa_kv_view_resolve(args->kv);
    cpa_attend_resolve_rows(&job.args, &batch->shape);
    place_ready_queries(plan, &job.args, ready_q);
    double scale = args->scale != 0 ? args->scale : 1 / sqrt(batch->shape.k_dim);
    job.group = batch->shape.q_heads / batch->shape.kv_heads;
    job.score = cpa_attend_score_of(args, job.group);
    job.score_scale = (float)(job.score.transforms ? scale : scale * M_LOG2E);
    job.skip = args->skip_tiles * (float)M_LOG2E;
    job.o_stride = (batch->shape.v_dim + job.isa->lanes - 1) / job.isa->lanes * job.isa->lanes;
    cpa_host_run(stream, plan->n_shared_units, attend_shared_unit, &job);
    cpa_host_run(stream, plan->n_units, attend_unit, &job);
    cpa_host_run(stream, plan->n_folds, fold_unit, &job);
    cpa_host_refuse_rows(plan, &job.args);
    return CPA_OK;
}
