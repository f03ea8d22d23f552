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
    int32_t *parents;  /* [options->most], behind */
    uint32_t drafts[]; /* [options->most] */
};

cpa_drafting *cpa_drafting_create(const cpa_drafting_options *options, uint64_t request) {
    const size_t most = (size_t)options->most;
    cpa_drafting *drafting =
        calloc(1, sizeof *drafting + most * (sizeof *drafting->drafts + sizeof *drafting->parents));
    if (!drafting) return NULL;
    drafting->parents = (int32_t *)(void *)(drafting->drafts + most);
    drafting->options = options;
    drafting->request = request;
    const cpa_ngram_options ngram = {sizeof ngram, options->ngram_min, options->ngram_max, options->ngram_branches};
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

/* What a model's drafter says; what it fills beyond is not looked at. */
static int64_t ask_model(cpa_drafting *drafting, int64_t most) {
    const cpa_drafting_options *o = drafting->options;
    const cpa_draft_args args = {.size = sizeof args,
                                 .request = drafting->request,
                                 .tokens = drafting->tokens,
                                 .n_tokens = drafting->known,
                                 .max_drafts = most,
                                 .drafts = drafting->drafts,
                                 .parents = drafting->parents};
    for (int64_t i = 0; i < most; i++) drafting->parents[i] = (int32_t)i - 1;
    return cpa_min64(o->draft(o->ctx, &args), most);
}

int64_t cpa_drafting_ask(cpa_drafting *drafting, int64_t most, const uint32_t **drafts, const int32_t **parents) {
    const cpa_drafting_options *o = drafting->options;
    int64_t n = 0, kept = 0;
    int is_tree = 0;
    *drafts = drafting->drafts;
    *parents = NULL;
    if (most > o->most) most = o->most;
    if (drafting->out_of_memory || most < 1) return 0;
    n = drafting->ngram ? cpa_ngram_draft_tree(drafting->ngram, most, drafting->drafts, drafting->parents)
                        : ask_model(drafting, most);
    for (; kept < n && drafting->drafts[kept] != CPA_NO_TOKEN; kept++) {
        const int32_t parent = drafting->parents[kept];
        const int is_next = parent == kept - 1;
        if (parent < -1 || parent >= kept || (o->chains_alone && !is_next)) break;
        is_tree |= !is_next;
    }
    if (is_tree) *parents = drafting->parents;
    return kept;
}
