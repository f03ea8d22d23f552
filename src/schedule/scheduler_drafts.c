#include "src/schedule/scheduler_drafts.h"

#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/scheduler_blocks.h"

/* Gives back what the sequence holds behind its last token. */
static cpa_status give_back(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    for (int32_t p = 0; p < s->n_pools; p++) {
        cpa_sequence_shard *shard = &sequence->shards[p];
        for (int64_t n = -cpa_sequence_lacks(sequence, &s->options, p, sequence->computed); n > 0; n--, shard->held--) {
            const int32_t block = sequence->blocks[p * sequence->stride + shard->held - 1];
            CPA_TRY(cpa_block_pool_release(s->pools[p], block, err));
            sequence->tenant->held[p]--;
        }
        shard->announced = cpa_min64(shard->announced, shard->held);
    }
    return CPA_OK;
}

cpa_status cpa_scheduler_settle_drafts(cpa_scheduler *s, cpa_error *err) {
    for (int32_t i = 0; i < s->n_running; i++) {
        cpa_sequence *sequence = s->running[i];
        if (sequence->n_drafts == 0) continue;
        cpa_plan_cut *cut = cpa_step_plan_add_cut(s->plan);
        cpa_plan_discard *discard = cpa_step_plan_add_discard(s->plan);
        if (!cut || !discard) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        *cut = (cpa_plan_cut){sequence->index, sequence->computed};
        *discard = (cpa_plan_discard){sequence->request.id, cpa_sequence_known(sequence)};
        sequence->n_drafts = 0;
        CPA_TRY(give_back(s, sequence, err));
    }
    return CPA_OK;
}

void cpa_scheduler_teach_drafter(cpa_scheduler *s, cpa_sequence *sequence, int64_t end) {
    enum { AT_A_TIME = 256 };
    uint32_t tokens[AT_A_TIME];
    if (s->options.drafting.most == 0 || s->options.drafting.is_told) return;
    if (!sequence->drafting) sequence->drafting = cpa_drafting_create(&s->options.drafting, sequence->request.id);
    if (!sequence->drafting) return;
    end = cpa_min64(end, cpa_sequence_named(sequence));
    for (int64_t at = cpa_drafting_known(sequence->drafting); at < end;) {
        const int64_t n = cpa_min64(end - at, AT_A_TIME);
        for (int64_t i = 0; i < n; i++) tokens[i] = cpa_sequence_token(sequence, &s->options, at + i);
        cpa_drafting_learn(sequence->drafting, tokens, n);
        at += n;
    }
}

/* At most so many drafts behind the `known` tokens of a sequence, to sequence->drafts; how many there are. */
static int64_t ask(cpa_scheduler *s, cpa_sequence *sequence, int64_t known, int64_t most) {
    if (s->options.drafting.is_told) {
        sequence->told = sequence->guess;
        sequence->drafts = &sequence->told;
        sequence->parents = NULL;
        return sequence->guess != CPA_NO_TOKEN;
    }
    cpa_scheduler_teach_drafter(s, sequence, known);
    return sequence->drafting ? cpa_drafting_ask(sequence->drafting, most, &sequence->drafts, &sequence->parents) : 0;
}

/* Drafts for a sequence that is given its one token, as many as blocks allow. */
static void draft(cpa_scheduler *s, cpa_sequence *sequence) {
    const int64_t known = cpa_sequence_known(sequence);
    const int64_t left = sequence->request.output_tokens - sequence->emitted - 1;
    int64_t n = cpa_min64(left, s->budget);
    /* What may follow a draft of a constrained answer nobody knows before the draft is right. */
    if (n < 1 || cpa_sequence_named(sequence) < known || sequence->request.sampling.constrained) return;
    n = ask(s, sequence, known, n);
    while (n > 0 && !(cpa_scheduler_has_room(s, sequence, known + n) && cpa_scheduler_within_quota(s, sequence))) n--;
    if (n < 1) return;
    cpa_scheduler_take_lacking(s, sequence);
    sequence->n_drafts = sequence->n_listed = n;
    sequence->accepted = -1;
    sequence->planned += n;
    s->budget -= n;
}

void cpa_scheduler_add_drafts(cpa_scheduler *s) {
    for (int32_t i = 0; s->options.drafting.most > 0 && i < s->n_scheduled; i++) {
        cpa_sequence *sequence = s->scheduled[i];
        if (sequence->planned == sequence->misplaced + 1 && cpa_sequence_decodes(sequence)) draft(s, sequence);
    }
}
