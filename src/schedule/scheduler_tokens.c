#include "src/schedule/scheduler_tokens.h"

#include <inttypes.h>
#include <string.h>

#include <cpattn/nn.h>

#include "base/array.h"
#include "base/check.h"
#include "src/schedule/scheduler_internal.h"
#include "src/schedule/scheduler_preempt.h"
#include "src/schedule/scheduler_prefix.h"

/* The sequence with that id, or one whose last token the last plan emits; not both: another with its id comes only when
 * that token is there. */
static cpa_sequence *find(cpa_scheduler *s, uint64_t request) {
    cpa_sequence *sequence;
    HASH_FIND(hh, s->by_id, &request, sizeof request, sequence);
    for (int32_t i = 0; !sequence && i < s->n_finished; i++)
        if (s->finished[i]->request.id == request && s->finished[i]->emitted > s->finished[i]->reported)
            sequence = s->finished[i];
    return sequence;
}

/* Leaves a running sequence to the next plan, as one that has finished. */
static void stop_running(cpa_scheduler *s, cpa_sequence *sequence) {
    int32_t at = 0;
    while (s->running[at] != sequence) at++;
    s->n_running--;
    sequence->tenant->running--;
    memmove(&s->running[at], &s->running[at + 1], (size_t)(s->n_running - at) * sizeof *s->running);
    cpa_scheduler_unlink(s, sequence);
    s->finished[s->n_finished++] = sequence;
}

/* One more of the drafts was right: the one that is the token reported before. Its place in the cache is right too if
 * it is that of a chain. 0: there is none. */
static int accept_draft(cpa_sequence *sequence) {
    if (sequence->n_drafts == 0) return 0;
    const int64_t before = sequence->accepted;
    const int64_t draft = cpa_sequence_draft_behind(sequence, before, sequence->last);
    if (draft < 0) return 0;
    sequence->accepted = draft;
    sequence->n_drafts--;
    sequence->emitted++;
    cpa_tenant_serve(sequence->tenant, 0, 1);
    if (sequence->misplaced == 0 && draft == before + 1) {
        sequence->computed++;
    } else {
        sequence->misplaced++;
    }
    return 1;
}

cpa_status cpa_scheduler_report(cpa_scheduler *s, uint64_t request, uint32_t token, cpa_error *err) {
    cpa_sequence *sequence = find(s, request);
    if (!sequence) return CPA_OK;
    const int accepts = sequence->reported == sequence->emitted;
    if (accepts && !accept_draft(sequence))
        return cpa_fail(err, CPA_INTERNAL, "request %" PRIu64 ": a token is reported that no plan has emitted",
                        request);
    sequence->reported++;
    sequence->last = token;
    sequence->guess = CPA_NO_TOKEN;
    if (sequence->request.draws) {
        if (!cpa_array_reserve(&sequence->outputs, &sequence->cap_outputs, sequence->reported,
                               sizeof *sequence->outputs))
            return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory for its tokens", request);
        sequence->outputs[sequence->reported - 1] = token;
    }
    if (sequence->blocks && (accepts || sequence->request.draws)) CPA_TRY(cpa_scheduler_link(s, sequence, err));
    if (!accepts || sequence->emitted < sequence->request.output_tokens) return CPA_OK;
    HASH_DEL(s->by_id, sequence);
    stop_running(s, sequence);
    s->stats.finished++;
    return CPA_OK;
}

void cpa_scheduler_guess(cpa_scheduler *s, uint64_t request, uint32_t token) {
    cpa_sequence *sequence = find(s, request);
    if (sequence) sequence->guess = token;
}

/* Nobody wants any more what was emitted for the request and not reported. */
static cpa_status discard_tokens(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    if (sequence->emitted + sequence->n_drafts == sequence->reported) return CPA_OK;
    if (!cpa_array_reserve(&s->discards, &s->cap_discards, s->n_discards + 1, sizeof *s->discards))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory to end a request");
    s->discards[s->n_discards++] =
        (cpa_plan_discard){sequence->request.id, sequence->request.prompt_tokens + sequence->reported};
    sequence->reported = sequence->emitted;
    return CPA_OK;
}

cpa_status cpa_scheduler_end(cpa_scheduler *s, uint64_t request, int *ended, cpa_error *err) {
    cpa_sequence *sequence = find(s, request);
    *ended = sequence != NULL;
    if (!sequence) return CPA_OK;
    const int finished = sequence->emitted == sequence->request.output_tokens;
    CPA_TRY(discard_tokens(s, sequence, err));
    s->stats.ended++;
    s->stats.finished -= finished;
    if (finished) return CPA_OK;
    HASH_DEL(s->by_id, sequence);
    if (sequence->blocks) {
        stop_running(s, sequence);
        return CPA_OK;
    }
    if (sequence->arrived) {
        cpa_waiting_remove(&s->waiting, sequence);
    } else {
        cpa_sequence_queue_remove(&s->future, sequence);
    }
    cpa_status status = cpa_scheduler_drop_host(s, sequence, err);
    cpa_waiting_forget(&s->waiting, sequence);
    return status;
}
