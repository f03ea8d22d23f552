#include "src/context/plan_agreement.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"

void cpa_plan_agreement_open(cpa_plan_agreement *agreement, cpa_control *control) {
    *agreement = (cpa_plan_agreement){.control = control, .rules = CPA_HASH_START};
}

void cpa_plan_agreement_close(cpa_plan_agreement *agreement) {
    if (!agreement->control) return;
    for (int32_t rank = 0; rank < agreement->control->size; rank++)
        cpa_comm_cancel(agreement->control->comm, &agreement->sends[rank]);
}

static uint64_t hash_chunks(const cpa_context_chunk *chunks, int64_t n_chunks) {
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, &n_chunks, sizeof n_chunks);
    for (int64_t i = 0; i < n_chunks; i++) {
        const cpa_context_chunk *c = &chunks[i];
        const int64_t same[] = {
            c->start, c->count, (int64_t)c->placement.kind, c->placement.rank, (int64_t)c->algorithm, c->form};
        hash = cpa_hash_bytes(hash, same, sizeof same);
    }
    return hash;
}

void cpa_plan_agreement_attend(cpa_plan_agreement *a, const cpa_context_ops *ops, const cpa_planned_step *step,
                               const cpa_layer *layer, int64_t call) {
    a->rules = cpa_layer_digest(a->rules, ops, step, layer);
    cpa_comm_note_work(a->control->comm, (cpa_work){a->control->channel, call, a->rules},
                       "attends by another mask, scale or score rule than");
}

static int32_t tag_of(const cpa_plan_agreement *a) {
    return a->control->tag + CPA_CONTROL_TAG_PLAN;
}

static cpa_status flush(cpa_plan_agreement *a, cpa_error *err) {
    for (int32_t rank = 0; rank < a->control->size; rank++)
        CPA_TRY(cpa_comm_wait(a->control->comm, &a->sends[rank], rank, err));
    return CPA_OK;
}

cpa_status cpa_plan_agreement_tell(cpa_plan_agreement *a, const cpa_context_chunk *chunks, int64_t n_chunks,
                                   int64_t layers, cpa_status status, const cpa_error *refusal, cpa_error *err) {
    if (a->control->size == 1) return CPA_OK;
    CPA_TRY(flush(a, err));
    a->mine = (cpa_plan_note){.status = status, .layers = layers, .rules = a->rules};
    if (status == CPA_OK) a->mine.chunks = hash_chunks(chunks, n_chunks);
    if (status != CPA_OK) snprintf(a->mine.message, sizeof a->mine.message, "%.255s", refusal->message);
    a->open++;
    for (int32_t rank = 0; rank < a->control->size; rank++) {
        if (rank == a->control->rank) continue;
        CPA_TRY(cpa_comm_start_send(a->control->comm, rank, tag_of(a), &a->mine, sizeof a->mine, &a->sends[rank], err));
    }
    return CPA_OK;
}

/* Waits for a note. A rank sends it before it can refuse the layer that follows, but a refusal may overtake it on
 * another connection: what ends the wait counts where the note does not come within a second. */
static cpa_status wait_for_note(cpa_comm *comm, cpa_comm_request **request, int32_t rank, cpa_error *err) {
    const cpa_status status = cpa_comm_wait(comm, request, rank, err);
    if (status == CPA_OK || !*request) return status;
    const double end = cpa_clock_now() + 1;
    for (int done = 0; cpa_clock_now() < end; sched_yield()) {
        CPA_TRY(cpa_comm_test(comm, request, &done, err));
        if (done) return CPA_OK;
    }
    return status;
}

/* What a rank has said of the last of the open plans. */
static cpa_status receive(const cpa_plan_agreement *a, int32_t rank, cpa_plan_note *out, cpa_error *err) {
    cpa_comm *comm = a->control->comm;
    for (int64_t i = 0; i < a->open; i++) {
        cpa_comm_request *request;
        CPA_TRY(cpa_comm_start_receive(comm, rank, tag_of(a), out, sizeof *out, &request, err));
        cpa_status status = wait_for_note(comm, &request, rank, err);
        cpa_comm_cancel(comm, &request);
        CPA_TRY(status);
    }
    return CPA_OK;
}

cpa_status cpa_plan_agreement_compare(cpa_plan_agreement *a, cpa_error *err) {
    cpa_plan_note first = {0}, note;
    cpa_status verdict = CPA_OK;
    if (a->open == 0) return CPA_OK;
    for (int32_t rank = 0; rank < a->control->size; rank++) {
        note = a->mine;
        if (rank != a->control->rank) CPA_TRY(receive(a, rank, &note, err));
        if (rank == 0) first = note;
        if (verdict != CPA_OK) continue; /* the lowest rank's fault is reported; the others' notes are taken */
        if (note.layers != first.layers) {
            verdict = cpa_fail(err, CPA_COMM,
                               "plan: rank %d has attended %" PRId64 " layers with exchanges, and rank 0 %" PRId64
                               ", as some were refused on one rank: the context cannot go on",
                               rank, note.layers, first.layers);
        } else if (note.status != CPA_OK) {
            verdict = cpa_fail(err, CPA_INVALID, "plan: rank %d: %.255s", rank, note.message);
        } else if (note.chunks != first.chunks) {
            verdict = cpa_fail(err, CPA_INVALID, "plan: the chunks of rank %d are not those of rank 0", rank);
        } else if (note.rules != first.rules) {
            verdict = cpa_fail(err, CPA_INVALID,
                               "plan: the masks, scales or score rules by which rank %d attended the step before are "
                               "not those of rank 0: its results are wrong",
                               rank);
        }
    }
    a->open = 0;
    a->rules = CPA_HASH_START;
    return verdict;
}
