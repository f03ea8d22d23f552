#include "src/worker/worker_biases.h"

#include <math.h>

/* Of a sequence: that without its ends, or with them. */
typedef struct bias_lists {
    int64_t n_plain, n_short; /* entries; 0 where no row needs it */
} bias_lists;

static int is_short(const cpa_worker_seq *seq, const cpa_worker_emission *e) {
    return e->position - seq->sampling.prompt_tokens < seq->sampling.min_tokens;
}

/* In how many entries two lists that ascend become one. */
static int64_t merge(const cpa_plan_bias *biases, int64_t n_biases, const cpa_plan_bias *ends, int64_t n_ends,
                     uint32_t *tokens, float *values) {
    int64_t n = 0, i = 0, j = 0;
    for (; i < n_biases || j < n_ends; n++) {
        const int from_ends = j < n_ends && (i == n_biases || ends[j].token <= biases[i].token);
        const cpa_plan_bias entry = from_ends ? ends[j] : biases[i];
        i += i < n_biases && biases[i].token == entry.token;
        j += from_ends;
        if (!tokens) continue;
        tokens[n] = entry.token;
        values[n] = entry.value;
    }
    return n;
}

static bias_lists lists_of(const cpa_worker_seq *seq, const cpa_worker_emission *emissions, int64_t n) {
    const cpa_plan_sampling *s = &seq->sampling;
    const int64_t both = merge(seq->biases, s->n_biases, seq->biases + s->n_biases, s->n_ends, NULL, NULL);
    bias_lists lists = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        if (s->n_ends > 0 && is_short(seq, &emissions[i])) {
            lists.n_short = both;
        } else {
            lists.n_plain = s->n_biases;
        }
    }
    return lists;
}

void cpa_worker_count_biases(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_worker_rows *rows = worker->rows;
    int64_t emission = 0;
    rows->sizes.biases = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int64_t n = cpa_plan_chunk_emissions(chunk);
        const bias_lists lists = lists_of(&worker->seqs[chunk->seq], rows->emissions + emission, n);
        if (chunk->given < 0) rows->sizes.biases += lists.n_plain + lists.n_short;
        emission += n;
    }
    if (rows->sizes.biases > 0) rows->wants |= CPA_WANTS_BIASES;
}

int64_t cpa_worker_pad_biases(int64_t biases) {
    int64_t power = 64;
    while (power < biases) power *= 2;
    return biases > 0 ? power : 0;
}

int64_t cpa_worker_most_biases(const cpa_worker *worker) {
    return worker->network->vocabulary > 0 ? cpa_worker_pad_biases(2 * CPA_PLAN_MOST_BIASES * worker->options.max_seqs)
                                           : 0;
}

void cpa_worker_list_biases(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_step_arrays *to = &rows->host;
    int64_t entry = 0, emission = 0;
    for (int64_t i = 0; rows->sizes.biases > 0 && i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const cpa_worker_seq *seq = &worker->seqs[chunk->seq];
        const cpa_plan_sampling *s = &seq->sampling;
        const cpa_worker_emission *emissions = rows->emissions + emission;
        const int64_t n = chunk->given < 0 ? cpa_plan_chunk_emissions(chunk) : 0, first = entry;
        const bias_lists lists = lists_of(seq, emissions, n);
        if (lists.n_plain > 0)
            entry += merge(seq->biases, s->n_biases, NULL, 0, to->bias_tokens + entry, to->bias_values + entry);
        if (lists.n_short > 0)
            entry += merge(seq->biases, s->n_biases, seq->biases + s->n_biases, s->n_ends, to->bias_tokens + entry,
                           to->bias_values + entry);
        for (int64_t e = 0; e < n; e++) {
            const int ends_out = s->n_ends > 0 && is_short(seq, &emissions[e]);
            if (emissions[e].rank != worker->rank && !rows->replicated) continue;
            to->bias_first[emissions[e].index] = (int32_t)(first + (ends_out ? lists.n_plain : 0));
            to->bias_count[emissions[e].index] = (int32_t)(ends_out ? lists.n_short : lists.n_plain);
        }
        emission += cpa_plan_chunk_emissions(chunk);
    }
}
