#include "src/worker/worker_drafts.h"

#include "base/check.h"
#include "src/worker/worker_tokens.h"

int64_t cpa_worker_next_accepted(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                                 int64_t emission, int64_t at) {
    const uint32_t *drafts = plan->token_ids + chunk->tokens + cpa_plan_chunk_tokens(chunk) - chunk->drafts;
    const uint32_t drawn = cpa_worker_drawn(worker, emission + at).id;
    for (int64_t i = at; i < chunk->drafts; i++)
        if (cpa_plan_parent(plan, chunk, i) == at - 1 && drafts[i] == drawn) return i + 1;
    return -1;
}

/* The row of an emission, if it is on this rank, enters no statistics. */
static void forget_row(cpa_worker *worker, int64_t emission) {
    const cpa_worker_emission *e = &worker->ran->emissions[emission];
    if (e->rank != worker->rank && !worker->ran->replicated) return;
    const int32_t row = worker->ran->host.rows[e->index];
    for (int32_t layer = 0; layer < worker->nonfinite.layers; layer++)
        cpa_nonfinite_marks(&worker->nonfinite, layer)[row] = 0;
}

/* Tells the rows of a chunk apart, and counts how far the cache has the tokens that are right, in their places. */
static void judge_chunk(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk, int64_t emission) {
    cpa_worker_emission *emissions = worker->ran->emissions + emission;
    int64_t right = 0, in_place = 0;
    for (int64_t i = 1; i <= chunk->drafts; i++) emissions[i].is_wrong = 1;
    for (int64_t at = 0; (at = cpa_worker_next_accepted(worker, plan, chunk, emission, at)) >= 0;) {
        emissions[at].is_wrong = 0;
        right++;
        in_place += in_place + 1 == right && at == right;
    }
    worker->seqs[chunk->seq].right = cpa_plan_first_draft(chunk) + in_place;
    for (int64_t i = 1; i <= chunk->drafts; i++)
        if (emissions[i].is_wrong) forget_row(worker, emission + i);
}

void cpa_worker_judge_drafts(cpa_worker *worker, const cpa_step_plan *plan) {
    int64_t emission = 0;
    for (int64_t i = 0; worker->ran->drafts > 0 && i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        if (chunk->drafts > 0) judge_chunk(worker, plan, chunk, emission);
        emission += cpa_plan_chunk_emissions(chunk);
    }
}

void cpa_worker_cut_tables(cpa_worker *worker, int32_t seq, int64_t blocks) {
    for (int32_t g = 0; g < worker->options.groups.count; g++)
        cpa_block_tables_cut((cpa_table_set){worker->tables, g}, seq, blocks);
}

cpa_status cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err) {
    cpa_worker_seq *seq = &worker->seqs[cut->seq];
    const cpa_owner_map map = worker->options.map;
    if (!seq->active || cut->tokens != seq->right)
        return cpa_fail(err, CPA_INTERNAL,
                        "request %llu is cut to %lld tokens, this rank counts %lld that are right and in their places",
                        (unsigned long long)seq->request, (long long)cut->tokens, (long long)seq->right);
    seq->len = cut->tokens;
    const int64_t owned = cpa_tokens_before(map, cpa_tokens_on(map, seq->placement, worker->rank), seq->len);
    cpa_worker_cut_tables(worker, cut->seq, (owned + worker->options.block_size - 1) / worker->options.block_size);
    return CPA_OK;
}
