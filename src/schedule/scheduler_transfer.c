#include "src/schedule/scheduler_transfer.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/cache/parcel.h"
#include "src/schedule/scheduler_preempt.h"

cpa_status cpa_transfer_begin(const cpa_scheduler *s, const cpa_scheduler_request *request, cpa_sequence *sequence,
                              cpa_error *err) {
    if (!request->imports && !request->exports) return CPA_OK;
    /* What is imported has no logits: a prompt that is to tell its log-probabilities is computed. */
    if (request->imports && !request->sampling.prompt_logprobs) sequence->importable = request->prompt_tokens;
    if (cpa_parcel_root(s->identity, s->model, request->salt, s->options.store_layers, &sequence->parcels))
        return CPA_OK;
    return cpa_fail(err, CPA_INTERNAL, "request %" PRIu64 ": SHA-256 of what it is made of failed", request->id);
}

int64_t cpa_transfer_tokens(const cpa_sequence *sequence, int64_t found) {
    const int64_t tokens = cpa_min64(sequence->importable, cpa_sequence_known(sequence) - 1);
    return tokens > found ? tokens : 0;
}

/* The entries of a pool for the first tokens that the token behind them does not see: from *first on, to *end. */
static void unseen_entries(const cpa_scheduler *s, const cpa_sequence *sequence, int32_t pool, int64_t tokens,
                           int64_t *first, int64_t *end) {
    *first = cpa_sequence_first_unseen(sequence, &s->options, pool);
    *end = cpa_max64(*first, cpa_sequence_unseen(sequence, &s->options, pool, tokens));
}

void cpa_transfer_count_blocks(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens) {
    for (int32_t p = 0; p < s->n_pools; p++) {
        int64_t first, end;
        const int64_t held = sequence->shards[p].held;
        unseen_entries(s, sequence, p, tokens, &first, &end);
        first = cpa_max64(first, held);
        s->lacks[p] = cpa_sequence_needs(sequence, &s->options, cpa_pool_rank(&s->options, p), tokens + 1) - held;
        s->lacks[p] -= cpa_max64(0, end - first);
    }
}

/* A transfer of the first tokens of a prompt, without its blocks, with the digests of its parcels. */
static cpa_status add_transfer(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens, int imports,
                               cpa_error *err) {
    const int64_t parcels = cpa_parcels(tokens), prompt = sequence->request.prompt_tokens;
    cpa_step_plan *plan = s->plan;
    cpa_plan_transfer *transfer = cpa_step_plan_add_transfer(plan);
    const int64_t digests = plan->n_token_ids;
    uint32_t *words = cpa_step_plan_add_tokens(plan, parcels * CPA_PLAN_DIGEST_WORDS);
    if (!transfer || !words) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    *transfer = (cpa_plan_transfer){.request = sequence->request.id,
                                    .placement = sequence->placement,
                                    .tokens = tokens,
                                    .digests = digests,
                                    .blocks = plan->n_transfer_blocks,
                                    .imports = (uint32_t)imports};
    cpa_prefix_digest digest = sequence->parcels;
    for (int64_t j = 0; j < parcels; j++) {
        uint32_t ids[CPA_PARCEL_TOKENS];
        const int64_t first = j * CPA_PARCEL_TOKENS;
        const int32_t n = (int32_t)cpa_min64(CPA_PARCEL_TOKENS, prompt - first);
        for (int32_t i = 0; i < n; i++) ids[i] = cpa_sequence_token(sequence, &s->options, first + i);
        if (!cpa_parcel_link(&digest, ids, n, &digest))
            return cpa_fail(err, CPA_INTERNAL, "request %" PRIu64 ": SHA-256 of its tokens failed", transfer->request);
        memcpy(words + j * CPA_PLAN_DIGEST_WORDS, digest.bytes, sizeof digest.bytes);
    }
    return CPA_OK;
}

/* Adds a block to the transfer that was added last. */
static cpa_status add_block(cpa_scheduler *s, int32_t pool, int64_t entry, int32_t block, cpa_error *err) {
    const int32_t size = s->options.map.cp_size;
    cpa_plan_transfer_block *added = cpa_step_plan_add_transfer_block(s->plan);
    if (!added) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    *added = (cpa_plan_transfer_block){pool / size, pool % size, (int32_t)entry, block};
    s->plan->transfers[s->plan->n_transfers - 1].n_blocks++;
    return CPA_OK;
}

cpa_status cpa_transfer_plan_import(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens, cpa_error *err) {
    CPA_TRY(add_transfer(s, sequence, tokens, 1, err));
    for (int32_t p = 0; p < s->n_pools; p++) {
        const int64_t n = cpa_sequence_needs(sequence, &s->options, cpa_pool_rank(&s->options, p), tokens);
        int64_t first, end;
        unseen_entries(s, sequence, p, tokens, &first, &end);
        for (int64_t i = sequence->shards[p].held; i < n; i++) {
            if (i >= first && i < end) {
                cpa_sequence_skip_entry(sequence, p);
                continue;
            }
            cpa_sequence_take(sequence, p, s->pools[p], 1);
            CPA_TRY(add_block(s, p, i, sequence->blocks[p * sequence->stride + i], err));
        }
    }
    sequence->imported = tokens - sequence->computed;
    sequence->computed = tokens;
    s->stats.imported_tokens += sequence->imported;
    return CPA_OK;
}

cpa_status cpa_transfer_plan_export(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const int64_t tokens = sequence->request.prompt_tokens;
    if (!sequence->request.exports || sequence->exported || sequence->emitted == 0) return CPA_OK;
    CPA_TRY(add_transfer(s, sequence, tokens, 0, err));
    for (int32_t p = 0; p < s->n_pools; p++) {
        const int64_t n = cpa_sequence_needs(sequence, &s->options, cpa_pool_rank(&s->options, p), tokens);
        for (int64_t i = 0; i < n; i++) {
            const int32_t block = sequence->blocks[p * sequence->stride + i];
            if (block >= 0) CPA_TRY(add_block(s, p, i, block, err));
        }
    }
    sequence->exported = 1;
    return CPA_OK;
}

cpa_status cpa_scheduler_import_failed(cpa_scheduler *s, uint64_t request, int64_t tokens, cpa_error *err) {
    cpa_sequence *sequence;
    HASH_FIND(hh, s->by_id, &request, sizeof request, sequence);
    if (!sequence) return cpa_fail(err, CPA_INVALID, "request %" PRIu64 " is not there to be computed", request);
    s->stats.import_failures++;
    s->stats.imported_tokens -= sequence->imported; /* `computed` is 0 where it was preempted meanwhile */
    sequence->importable = sequence->import_failed ? 0 : tokens;
    sequence->import_failed = 1;
    return cpa_scheduler_start_again(s, sequence, err);
}
