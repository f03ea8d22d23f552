#include "src/schedule/drafting.h"

#include <stdlib.h>
#include <string.h>

#include <cpattn/ngram.h>
#include <cpattn/nn.h>

#include "base/array.h"
#include "base/min_max.h"

struct cpa_drafting {
    const cpa_drafting_options *options;
    uint64_t request;
    cpa_ngram *ngram; /* NULL where a model drafts, which is shown */
    uint32_t *tokens; /* [known] */
    int64_t known, capacity;
    int out_of_memory;
    uint32_t drafts[]; /* [options->most] */
};

cpa_drafting *cpa_drafting_create(const cpa_drafting_options *options, uint64_t request) {
    cpa_drafting *drafting = calloc(1, sizeof *drafting + (size_t)options->most * sizeof *drafting->drafts);
    if (!drafting) return NULL;
    drafting->options = options;
    drafting->request = request;
    const cpa_ngram_options ngram = {sizeof ngram, options->ngram_min, options->ngram_max};
    if (!options->draft && cpa_ngram_create(&ngram, &drafting->ngram, NULL) != CPA_OK) {
        free(drafting);
        return NULL;
    }
    return drafting;
}

void cpa_drafting_destroy(cpa_drafting *drafting) {
    if (!drafting) return;
    const cpa_drafting_options *o = drafting->options;
    if (o->draft && o->draft_end) o->draft_end(o->ctx, drafting->request);
    cpa_ngram_destroy(drafting->ngram);
    free(drafting->tokens);
    free(drafting);
}

int64_t cpa_drafting_known(const cpa_drafting *drafting) {
    return drafting->known;
}

void cpa_drafting_learn(cpa_drafting *drafting, const uint32_t *tokens, int64_t n) {
    if (drafting->out_of_memory) return;
    if (drafting->ngram) {
        drafting->out_of_memory = cpa_ngram_add(drafting->ngram, tokens, n, NULL) != CPA_OK;
    } else if (cpa_array_reserve(&drafting->tokens, &drafting->capacity, drafting->known + n, sizeof *tokens)) {
        memcpy(drafting->tokens + drafting->known, tokens, (size_t)n * sizeof *tokens);
    } else {
        drafting->out_of_memory = 1;
    }
    drafting->known += n;
}

int64_t cpa_drafting_ask(cpa_drafting *drafting, int64_t most, const uint32_t **drafts) {
    const cpa_drafting_options *o = drafting->options;
    int64_t n = 0, kept = 0;
    *drafts = drafting->drafts;
    if (most > o->most) most = o->most;
    if (drafting->out_of_memory || most < 1) return 0;
    if (drafting->ngram) return cpa_ngram_draft(drafting->ngram, most, drafting->drafts);
    const cpa_draft_args args = {.size = sizeof args,
                                 .request = drafting->request,
                                 .tokens = drafting->tokens,
                                 .n_tokens = drafting->known,
                                 .max_drafts = most,
                                 .drafts = drafting->drafts};
    n = cpa_min64(o->draft(o->ctx, &args), most);
    while (kept < n && drafting->drafts[kept] != CPA_NO_TOKEN) kept++;
    return kept;
}
