/* All ranks must plan the same chunks and attend their layers alike: each tells the others what it has planned, and how
 * it attended the layers before, while it plans, and compares before its first layer, when what they say has come. The
 * engine's plans all come from rank 0 and need none of this. */
#ifndef CPA_PLAN_AGREEMENT_H
#define CPA_PLAN_AGREEMENT_H

#include <cpattn/context.h>

#include "comm/comm.h"
#include "src/context/layer_digest.h"

/* What a rank says of a plan. */
typedef struct cpa_plan_note {
    uint64_t chunks; /* a hash of what must be the same */
    /* Layers with exchanges that the rank has attended so far, which number the messages between ranks. */
    int64_t layers;
    uint64_t rules; /* a hash of masks, scales and score rules of the layers attended since the ranks last compared */
    cpa_status status;
    char message[256]; /* why the rank has refused the chunks */
} cpa_plan_note;

typedef struct cpa_plan_agreement {
    cpa_control *control;
    int64_t open; /* plans that have not been compared */
    uint64_t rules;
    cpa_plan_note mine;
    cpa_comm_request *sends[CPA_COMM_MAX_RANKS];
} cpa_plan_agreement;

/* `control` must outlive it; one agreement a channel. */
void cpa_plan_agreement_open(cpa_plan_agreement *agreement, cpa_control *control);
void cpa_plan_agreement_close(cpa_plan_agreement *agreement);
/* Tells the others of a plan after so many layers with exchanges, which has got `status`, with `refusal` then. Waits
 * until they have taken the one before. */
cpa_status cpa_plan_agreement_tell(cpa_plan_agreement *agreement, const cpa_context_chunk *chunks, int64_t n_chunks,
                                   int64_t layers, cpa_status status, const cpa_error *refusal, cpa_error *err);
/* A layer of the step with exchanges is attended, in that call of the context. Ranks that wait for each other as they
 * do so differently hear of it once they have waited for a time-out. */
void cpa_plan_agreement_attend(cpa_plan_agreement *agreement, const cpa_context_ops *ops, const cpa_planned_step *step,
                               const cpa_layer *layer, int64_t call);
/* On every rank alike, CPA_INVALID if ranks have planned different chunks, or one has refused them, or the layers
 * before were attended under different masks, scales or score rules, and CPA_COMM if one has attended other layers than
 * the others. Does nothing the second time. Waits for the others to plan; if that fails `open` is not 0 afterwards. */
cpa_status cpa_plan_agreement_compare(cpa_plan_agreement *agreement, cpa_error *err);

#endif
