#include "src/worker/worker_drafts.h"

#include "base/check.h"
#include "src/worker/worker_tokens.h"

int64_t cpa_worker_accepted(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_chunk *chunk,
                            int64_t emission) {
    const uint32_t *drafts = plan->token_ids + chunk->tokens + cpa_plan_chunk_tokens(chunk) - chunk->drafts;
    int64_t accepted = 0;
    while (accepted < chunk->drafts && drafts[accepted] == cpa_worker_drawn(worker, emission + accepted).id) accepted++;
    return accepted;
}

/* The row of an emission, if it is on this rank, enters no statistics. */
static void forget_row(cpa_worker *worker, int64_t emission) {
    const cpa_worker_emission *e = &worker->ran->emissions[emission];
    if (e->rank != worker->rank && !worker->ran->replicated) return;
    const int32_t row = worker->ran->host.rows[e->index];
    for (int32_t layer = 0; layer < worker->nonfinite.layers; layer++)
        cpa_nonfinite_marks(&worker->nonfinite, layer)[row] = 0;
}

void cpa_worker_judge_drafts(cpa_worker *worker, const cpa_step_plan *plan) {
    int64_t emission = 0;
    for (int64_t i = 0; worker->ran->drafts > 0 && i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        if (chunk->drafts > 0) {
            const int64_t accepted = cpa_worker_accepted(worker, plan, chunk, emission);
            worker->seqs[chunk->seq].right = chunk->start + 1 + accepted;
            for (int64_t wrong = accepted + 1; wrong <= chunk->drafts; wrong++) forget_row(worker, emission + wrong);
        }
        emission += cpa_plan_chunk_emissions(chunk);
    }
}

cpa_status cpa_worker_cut(cpa_worker *worker, const cpa_plan_cut *cut, cpa_error *err) {
    cpa_worker_seq *seq = &worker->seqs[cut->seq];
    const cpa_owner_map map = worker->options.map;
    if (!seq->active || cut->tokens != seq->right)
        return cpa_fail(err, CPA_INTERNAL,
                        "request %llu is cut to %lld tokens, this rank counts %lld that no wrong draft comes before",
                        (unsigned long long)seq->request, (long long)cut->tokens, (long long)seq->right);
    seq->len = cut->tokens;
    const int64_t owned = cpa_tokens_before(map, cpa_tokens_on(map, seq->placement, worker->rank), seq->len);
    seq->n_blocks = (owned + worker->options.block_size - 1) / worker->options.block_size;
    return CPA_OK;
}
