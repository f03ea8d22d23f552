#include "src/check/verify_groups.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Heads whose rows are checked over the same keys. */
static int32_t heads_together(const cpa_verify *verify, const cpa_verify_sample *sample) {
    const cpa_attention_shape *shape = &cpa_verify_form(verify, sample)->shape;
    return shape->q_heads / shape->kv_heads;
}

/* Orders samples by chunk, layer, head (heads that share keys are neighbours), position. */
static int compare_samples(const void *a, const void *b) {
    const cpa_verify_sample *x = a, *y = b;
    if (x->chunk != y->chunk) return x->chunk < y->chunk ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

/* Of the samples of a layer, which are sorted, the first one of each row judges what was chosen for the row. */
static cpa_status choose_judges(const cpa_verify *verify, const cpa_step_plan *plan, cpa_error *err) {
    int64_t longest = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++)
        longest = plan->chunks[i].count > longest ? plan->chunks[i].count : longest;
    char *judged = verify->index_bytes > 0 ? malloc((size_t)longest + 1) : NULL;
    if (verify->index_bytes == 0) return CPA_OK;
    if (!judged) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld rows", (long long)longest);
    for (int64_t i = 0; i < verify->n_samples; i++) {
        cpa_verify_sample *s = &verify->samples[i], *before = i > 0 ? s - 1 : NULL;
        if (!before || before->chunk != s->chunk || before->layer != s->layer) memset(judged, 0, (size_t)longest);
        char *mark = judged + s->position - plan->chunks[s->chunk].start;
        s->judges = !*mark;
        *mark = 1;
    }
    free(judged);
    return CPA_OK;
}

cpa_status cpa_verify_group_samples(cpa_verify *verify, const cpa_step_plan *plan, cpa_verify_group **out, int64_t *n,
                                    cpa_error *err) {
    const cpa_attention_shape *shape = &verify->worker->options.model.attention;
    qsort(verify->samples, (size_t)verify->n_samples, sizeof *verify->samples, compare_samples);
    CPA_TRY(choose_judges(verify, plan, err));
    cpa_verify_group *groups = *out = malloc((size_t)verify->n_samples * sizeof *groups);
    *n = 0;
    if (!groups) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld groups", (long long)verify->n_samples);
    for (int64_t i = 0; i < verify->n_samples; i++) {
        const cpa_verify_sample *s = &verify->samples[i], *before = i > 0 ? s - 1 : NULL;
        const int32_t together = heads_together(verify, s);
        if (!before || before->chunk != s->chunk || before->layer != s->layer ||
            before->head / together != s->head / together) {
            groups[*n] = (cpa_verify_group){.first = i,
                                            .last_position = -1,
                                            .kv_head = s->head / (shape->q_heads / shape->kv_heads),
                                            .checker = (int32_t)(*n % verify->control->size)};
            (*n)++;
        }
        cpa_verify_group *g = &groups[*n - 1];
        g->count++;
        g->judges |= s->judges;
        int64_t last = cpa_verify_last_key(verify, &plan->chunks[s->chunk], s);
        if (last > g->last_position) g->last_position = last;
    }
    return CPA_OK;
}
