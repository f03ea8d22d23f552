#include "src/worker/worker_apply.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "src/worker/worker_disk.h"
#include "src/worker/worker_drafts.h"
#include "src/worker/worker_forms.h"

static cpa_status apply_append(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_append *append,
                               cpa_error *err) {
    if (append->rank != worker->rank) return CPA_OK;
    return cpa_block_tables_append((cpa_table_set){worker->tables, append->group}, append->seq,
                                   plan->block_ids + append->blocks, append->count,
                                   cpa_kv_cache_null_block(worker->caches[append->group]), err);
}

static cpa_status apply_nulled(cpa_worker *worker, const cpa_plan_nulled *v, cpa_error *err) {
    const cpa_table_set at = {worker->tables, v->group};
    if (v->rank != worker->rank) return CPA_OK;
    const int64_t count = cpa_block_tables_count(at, v->seq);
    if (v->entry >= count)
        return cpa_fail(err, CPA_INTERNAL, "entry %d of sequence %d is void, its table has %lld", v->entry, v->seq,
                        (long long)count);
    return cpa_block_tables_replace(at, v->seq, v->entry, cpa_kv_cache_null_block(worker->caches[v->group]), err);
}

static cpa_status take_sampling(cpa_worker_seq *seq, const cpa_step_plan *plan, const cpa_plan_sampling *sampling,
                                cpa_error *err) {
    const int64_t n = cpa_plan_listed_biases(sampling);
    if (!cpa_array_reserve(&seq->biases, &seq->cap_biases, n, sizeof *seq->biases))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for %lld biases", (long long)n);
    if (n > 0) memcpy(seq->biases, plan->biases + sampling->biases, (size_t)n * sizeof *seq->biases);
    seq->sampling = *sampling;
    return CPA_OK;
}

static cpa_status apply_chunk(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                              cpa_error *err) {
    cpa_worker_seq *seq = &worker->seqs[chunk->seq];
    if (chunk->flags & CPA_CHUNK_FIRST) {
        seq->active = 1;
        seq->request = chunk->request;
        seq->placement = chunk->placement;
        seq->len = chunk->start;
        seq->began = worker->plans;
        seq->emitted = 0;
        seq->in_history = 0;
        seq->sampling = (cpa_plan_sampling){.top_p = 1, .repetition_penalty = 1};
        if (chunk->sampling >= 0) CPA_TRY(take_sampling(seq, plan, &plan->samplings[chunk->sampling], err));
    }
    int64_t n_tokens = cpa_plan_chunk_tokens(chunk), end = chunk->start + chunk->count;
    if (!seq->active || seq->request != chunk->request || seq->len != chunk->start) {
        return cpa_fail(err, CPA_INTERNAL, "chunk of request %llu starts at %lld, the cache of sequence %d holds %lld",
                        (unsigned long long)chunk->request, (long long)chunk->start, chunk->seq, (long long)seq->len);
    }
    if (!cpa_array_reserve(&seq->tokens, &seq->cap_tokens, end + 1, sizeof *seq->tokens))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for %lld tokens", (long long)end + 1);
    if (!(chunk->flags & CPA_CHUNK_DRAWN))
        memcpy(seq->tokens + end - n_tokens, plan->token_ids + chunk->tokens, (size_t)n_tokens * sizeof *seq->tokens);
    seq->len = seq->right = end;
    const cpa_owner_map map = worker->options.map;
    int64_t owned = cpa_tokens_before(map, cpa_tokens_on(map, seq->placement, worker->rank), seq->len);
    int64_t needs = (owned + worker->options.block_size - 1) / worker->options.block_size;
    for (int32_t g = 0; g < worker->options.groups.count; g++) {
        const int64_t count = cpa_block_tables_count((cpa_table_set){worker->tables, g}, chunk->seq);
        if (needs != count)
            return cpa_fail(err, CPA_INTERNAL, "request %llu owns %lld tokens in %lld blocks here, expected %lld",
                            (unsigned long long)chunk->request, (long long)owned, (long long)count, (long long)needs);
    }
    return CPA_OK;
}

/* Moves of all groups between two tiers. */
static cpa_status move(cpa_worker *worker, cpa_kv_tier from, cpa_kv_tier to, const cpa_block_move *moves, int64_t n) {
    for (int32_t g = 0; g < worker->options.groups.count; g++)
        CPA_TRY(
            cpa_kv_cache_move(worker->caches[g], from, to, worker->rank, moves, n, worker->damaged, worker->stream));
    return CPA_OK;
}

cpa_status cpa_worker_move(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    CPA_TRY(cpa_worker_disk_load(worker, plan, err));
    CPA_TRY(move(worker, CPA_TIER_DEVICE, CPA_TIER_HOST, plan->swap_outs, plan->n_swap_outs));
    cpa_worker_disk_store(worker, plan);
    if (plan->n_swap_ins > 0) {
        if (!cpa_array_reserve(&worker->damaged, &worker->cap_damaged, plan->n_swap_ins, sizeof *worker->damaged))
            return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for the swaps");
        memset(worker->damaged, 0, (size_t)plan->n_swap_ins * sizeof *worker->damaged);
    }
    CPA_TRY(move(worker, CPA_TIER_HOST, CPA_TIER_DEVICE, plan->swap_ins, plan->n_swap_ins));
    return move(worker, CPA_TIER_DEVICE, CPA_TIER_DEVICE, plan->copies, plan->n_copies);
}

cpa_status cpa_worker_apply(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    for (int64_t i = 0; i < plan->n_cuts; i++) CPA_TRY(cpa_worker_cut(worker, &plan->cuts[i], err));
    for (int64_t i = 0; i < plan->n_nulled; i++) CPA_TRY(apply_nulled(worker, &plan->nulled[i], err));
    for (int64_t i = 0; i < plan->n_releases; i++) {
        worker->seqs[plan->releases[i]].active = 0;
        cpa_worker_cut_tables(worker, plan->releases[i], 0);
    }
    for (int64_t i = 0; i < plan->n_appends; i++) CPA_TRY(apply_append(worker, plan, &plan->appends[i], err));
    if (!cpa_array_reserve(&worker->chunks, &worker->cap_chunks, plan->n_chunks, sizeof *worker->chunks) ||
        !cpa_array_reserve(&worker->table_rows, &worker->cap_table_rows, plan->n_chunks, sizeof *worker->table_rows))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for the chunks");
    cpa_context_chunk *chunks = worker->chunks;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        CPA_TRY(apply_chunk(worker, plan, chunk, err));
        chunks[i] = (cpa_context_chunk){.start = chunk->start,
                                        .count = chunk->count,
                                        .placement = chunk->placement,
                                        .algorithm = chunk->algorithm,
                                        .form = cpa_worker_form_of(worker, chunk)};
        worker->table_rows[i] = chunk->seq;
    }
    return CPA_OK;
}
