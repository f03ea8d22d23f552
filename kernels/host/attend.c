/* attend: softmax(scale * Q K^T + mask) V over pages. */
#include <math.h>

#include "base/fault.h"
#include "kernels/host/attend_plan.h"
#include "kernels/host/convert.h"
#include "kernels/host/state.h"

typedef struct attend_job {
    const cpa_host_plan *plan;
    const cpa_attend_item *item;
    cpa_attend_args args;
    float scale;
    int32_t group;
} attend_job;

/* The keys that a query sees are, in local indices, [0, sinks) and [first, end). */
typedef struct visible {
    int64_t end, first, sinks;
} visible;

static visible visible_keys(const attend_job *job, int64_t query) {
    const cpa_attend_item *item = job->item;
    const cpa_mask *mask = &job->args.mask;
    cpa_owner_map map = job->plan->batch.map;
    int64_t position = cpa_shard_pos(map, item->q_slot, item->q_first + query);
    visible seen = {item->k_first + item->k_count, 0, 0};
    if (mask->causal) {
        int64_t last = position + (cpa_fault_is(CPA_FAULT_OFF_BY_ONE_MASK) ? 0 : 1);
        int64_t end = cpa_shard_len(map, item->k_slot, last);
        if (end < seen.end) seen.end = end;
    }
    if (mask->window > 0 && position - mask->window + 1 > 0) {
        seen.first = cpa_shard_len(map, item->k_slot, position - mask->window + 1);
        seen.sinks = cpa_shard_len(map, item->k_slot, mask->sinks);
    }
    return seen;
}

static const char *key_at(const attend_job *job, int64_t key, int32_t head, int values) {
    const cpa_kv_view *kv = &job->args.kv;
    int64_t local = key - job->item->k_first, bytes = cpa_dtype_bytes(kv->dtype);
    int64_t block = job->plan->tables[job->item->table + local / kv->block_size], token = local % kv->block_size;
    if (values)
        return (const char *)kv->v +
               (block * kv->v_block_stride + token * kv->v_token_stride + head * kv->v_head_stride) * bytes;
    return (const char *)kv->k +
           (block * kv->k_block_stride + token * kv->k_token_stride + head * kv->k_head_stride) * bytes;
}

static void attend_split(const attend_job *job, const float *q, int32_t head, const visible *seen, int64_t begin,
                         int64_t end, float *o, float *lse) {
    float score[CPA_HOST_SPLIT_TOKENS], row[CPA_MAX_HEAD_DIM], max = -INFINITY, sum = 0;
    int32_t k_dim = job->args.kv.k_dim, v_dim = job->args.kv.v_dim;
    for (int64_t key = begin; key < end; key++) {
        float dot = 0;
        score[key - begin] = -INFINITY;
        if (key >= seen->sinks && key < seen->first) continue;
        cpa_widen(row, key_at(job, key, head, 0), job->args.kv.dtype, k_dim);
        for (int32_t d = 0; d < k_dim; d++) dot += q[d] * row[d];
        score[key - begin] = dot * job->scale;
        max = fmaxf(max, score[key - begin]);
    }
    for (int32_t d = 0; d < v_dim; d++) o[d] = 0;
    for (int64_t key = begin; key < end; key++) {
        if (key >= seen->sinks && key < seen->first) continue;
        float p = expf(score[key - begin] - max);
        sum += p;
        cpa_widen(row, key_at(job, key, head, 1), job->args.kv.dtype, v_dim);
        for (int32_t d = 0; d < v_dim; d++) o[d] += p * row[d];
    }
    for (int32_t d = 0; d < v_dim; d++) o[d] = sum > 0 ? o[d] / sum : 0;
    *lse = sum > 0 ? max + logf(sum) : -INFINITY;
}

static void attend_row(void *ctx, int64_t index, int32_t thread) {
    const attend_job *job = ctx;
    const cpa_attend_item *item = job->item;
    int32_t q_heads = job->plan->batch.q_heads, k_dim = job->args.kv.k_dim, v_dim = job->args.kv.v_dim;
    int64_t query = index / q_heads, row = item->q_row + query;
    int32_t head = (int32_t)(index % q_heads), kv_head = head / job->group;
    (void)thread;
    if (cpa_fault_is(CPA_FAULT_SWAPPED_KV_HEAD)) kv_head = (kv_head + 1) % job->args.kv.kv_heads;
    float q[CPA_MAX_HEAD_DIM], o[CPA_MAX_HEAD_DIM] = {0}, o_split[CPA_MAX_HEAD_DIM], lse = -INFINITY, lse_split;
    cpa_widen(q,
              (const char *)job->args.q +
                  (row * job->args.q_row_stride + (int64_t)head * k_dim) * cpa_dtype_bytes(job->args.q_dtype),
              job->args.q_dtype, k_dim);
    cpa_partial state = job->args.state;
    float *state_o = state.o ? state.o + row * state.o_row_stride + (int64_t)head * v_dim : NULL;
    float *state_lse = state.lse ? state.lse + row * state.lse_row_stride + head : NULL;
    if (job->args.resume && cpa_state_lse(*state_lse) > -INFINITY) {
        lse = *state_lse;
        memcpy(o, state_o, (size_t)v_dim * sizeof *o);
    }
    visible seen = visible_keys(job, query);
    for (int64_t begin = item->k_first; begin < seen.end;) {
        int64_t end = (begin / CPA_HOST_SPLIT_TOKENS + 1) * CPA_HOST_SPLIT_TOKENS;
        if (end > seen.end) end = seen.end;
        attend_split(job, q, kv_head, &seen, begin, end, o_split, &lse_split);
        cpa_state_fold(o, &lse, o_split, lse_split, v_dim);
        begin = end;
    }
    if (state_o) memcpy(state_o, o, (size_t)v_dim * sizeof *o);
    if (state_lse) *state_lse = lse;
    if (job->args.out)
        cpa_narrow((char *)job->args.out + (row * q_heads + head) * (int64_t)v_dim * cpa_dtype_bytes(job->args.q_dtype),
                   o, job->args.q_dtype, v_dim);
}

cpa_status cpa_host_attend(const cpa_attend_plan *base, const cpa_attend_args *args, cpa_stream *stream) {
    const cpa_host_plan *plan = (const cpa_host_plan *)base;
    attend_job job = {.plan = plan, .args = *args, .group = plan->batch.q_heads / plan->batch.kv_heads};
    job.args.kv = cpa_kv_view_resolve(args->kv);
    job.args.state = cpa_partial_resolve(args->state, plan->batch.q_heads, plan->batch.v_dim);
    if (!job.args.q_row_stride) job.args.q_row_stride = (int64_t)plan->batch.q_heads * plan->batch.k_dim;
    job.scale = args->scale != 0 ? args->scale : 1.0f / sqrtf((float)plan->batch.k_dim);
    for (int64_t i = 0; i < plan->batch.n_items; i++) {
        job.item = &plan->items[i];
        cpa_host_run(stream, job.item->q_count * plan->batch.q_heads, attend_row, &job);
    }
    return CPA_OK;
}
