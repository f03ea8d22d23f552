#include "src/worker/worker_tokens.h"

#include "base/check.h"
#include "kernels/operators.h"
#include "src/context/context.h"

cpa_status cpa_worker_take_tokens(cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    if (!rows->takes) return CPA_OK;
    const cpa_take_tokens_args take = {
        .rows = rows->sizes.rows + rows->sizes.history,
        .sources = worker->arrays.sources,
        .ids = &worker->drawn->id,
        .id_stride = (int32_t)(sizeof *worker->drawn / sizeof worker->drawn->id),
        .tokens = worker->arrays.tokens,
    };
    return worker->device->operators->take_tokens(&take, worker->stream);
}

cpa_status cpa_worker_take_next_tokens(cpa_worker *worker) {
    const cpa_drawn *drawn = cpa_worker_own_tokens(worker);
    const cpa_take_tokens_args take = {
        .rows = worker->rows->sizes.next_tokens,
        .sources = worker->arrays.next_sources,
        .ids = &drawn->id,
        .id_stride = (int32_t)(sizeof *drawn / sizeof drawn->id),
        .tokens = worker->arrays.next_tokens,
    };
    return worker->device->operators->take_tokens(&take, worker->stream);
}

/* Where this rank's part of what all ranks draw begins. */
static int64_t own_first(const cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    return rows->replicated ? 0 : worker->rank * rows->sizes.emissions;
}

cpa_drawn *cpa_worker_own_tokens(const cpa_worker *worker) {
    return worker->drawn + own_first(worker);
}

cpa_token_ranks *cpa_worker_own_ranks(const cpa_worker *worker) {
    return worker->ranks + own_first(worker);
}

uint32_t *cpa_worker_own_guesses(const cpa_worker *worker) {
    return worker->guesses + own_first(worker);
}

cpa_status cpa_worker_share_tokens(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_rows *rows = worker->rows;
    const int64_t n = rows->sizes.emissions, bytes = n * (int64_t)sizeof *worker->drawn;
    const int64_t guesses = n * (int64_t)sizeof *worker->guesses;
    cpa_status status = CPA_OK;
    if (worker->options.map.cp_size == 1 || rows->replicated) return CPA_OK;
    if (rows->draws) status = cpa_context_share(worker->context, worker->drawn, bytes, worker->stream);
    if (status == CPA_OK && rows->draws && rows->wants & CPA_WANTS_RANKS)
        status = cpa_context_share(worker->context, worker->ranks, n * (int64_t)sizeof *worker->ranks, worker->stream);
    if (status == CPA_OK && guesses > 0 && worker->options.model.draft_layers > 0)
        status = cpa_context_share(worker->context, worker->guesses, guesses, worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "tokens: %s", cpa_context_error(worker->context));
}

cpa_status cpa_worker_fetch_tokens(cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    const int64_t entries = (rows->replicated ? 1 : worker->options.map.cp_size) * rows->sizes.emissions;
    const int64_t bytes = entries * (int64_t)sizeof *worker->drawn, ranks = entries * (int64_t)sizeof *worker->ranks;
    const int64_t sums = rows->sizes.emissions * (int64_t)sizeof *worker->sums_host;
    if (rows->drafts > 0)
        CPA_TRY(worker->device->table->copy(worker->sums_host, worker->arrays.sums, sums, worker->stream));
    if (worker->options.model.draft_layers > 0)
        CPA_TRY(worker->device->table->copy(worker->guesses_host, worker->guesses,
                                            entries * (int64_t)sizeof *worker->guesses, worker->stream));
    if (!rows->draws) return CPA_OK;
    if (rows->wants & CPA_WANTS_RANKS)
        CPA_TRY(worker->device->table->copy(worker->ranks_host, worker->ranks, ranks, worker->stream));
    return worker->device->table->copy(worker->drawn_host, worker->drawn, bytes, worker->stream);
}

cpa_drawn cpa_worker_drawn(const cpa_worker *worker, int64_t emission) {
    const cpa_worker_rows *ran = worker->ran;
    const cpa_worker_emission *e = &ran->emissions[emission];
    cpa_drawn drawn = {0, 0};
    if (ran->draws) drawn = worker->drawn_host[e->rank * ran->sizes.emissions + e->index];
    if (e->given >= 0) drawn.id = (uint32_t)e->given;
    return drawn;
}

const cpa_token_ranks *cpa_worker_ranks(const cpa_worker *worker, int64_t emission) {
    const cpa_worker_rows *ran = worker->ran;
    const cpa_worker_emission *e = &ran->emissions[emission];
    if (!ran->draws || !(ran->wants & CPA_WANTS_RANKS)) return NULL;
    return &worker->ranks_host[e->rank * ran->sizes.emissions + e->index];
}

uint32_t cpa_worker_guess(const cpa_worker *worker, int64_t emission) {
    const cpa_worker_emission *e = &worker->ran->emissions[emission];
    return worker->guesses_host[e->rank * worker->ran->sizes.emissions + e->index];
}

/* The plan after the step may have given the index of a sequence to another one by now. */
void cpa_worker_keep_tokens(cpa_worker *worker) {
    const cpa_worker_rows *ran = worker->ran;
    for (int64_t i = 0; ran->draws && i < ran->n_emissions; i++) {
        const cpa_worker_emission *e = &ran->emissions[i];
        cpa_worker_seq *seq = &worker->seqs[e->seq];
        /* Behind drafts the next chunk brings them; until then the sequence shows what its rows were made of. */
        if (seq->active && seq->began == e->began && !e->is_judged)
            seq->tokens[e->position] = cpa_worker_drawn(worker, i).id;
    }
}

/* Takes what an emission of the step before has added to the digest off again. */
static cpa_status discard_emission(cpa_worker *worker, const cpa_worker_emission *e) {
    if (e->rank != worker->rank && !worker->rows->replicated) return CPA_OK;
    if (worker->rows->drafts > 0) {
        worker->digest_off += worker->sums_host[e->index];
        return CPA_OK;
    }
    uint64_t *part = &worker->discarded[worker->n_discarded++];
    return worker->device->table->copy(part, &worker->arrays.sums[e->index], sizeof *part, worker->stream);
}

cpa_status cpa_worker_discard_tokens(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    const cpa_worker_rows *rows = worker->rows;
    for (int64_t i = 0; i < plan->n_discards; i++) {
        const cpa_plan_discard *discard = &plan->discards[i];
        int found = 0;
        for (int64_t at = 0; at < rows->n_emissions; at++) {
            const cpa_worker_emission *e = &rows->emissions[at];
            if (e->request != discard->request || (e->position < discard->position && !e->is_wrong)) continue;
            found = 1;
            CPA_TRY(discard_emission(worker, e));
        }
        if (!found)
            return cpa_fail(err, CPA_INTERNAL,
                            "token %lld of request %llu is discarded, which the step before does not yield",
                            (long long)discard->position, (unsigned long long)discard->request);
    }
    return CPA_OK;
}

void cpa_worker_settle_discards(cpa_worker *worker) {
    while (worker->n_discarded > 0) worker->digest_off += worker->discarded[--worker->n_discarded];
}
