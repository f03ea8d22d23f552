/* What the watches of ranks tell each other, and what is known of a rank that is lost. Nothing here is locked. */
#ifndef CPA_STORE_LOSSES_H
#define CPA_STORE_LOSSES_H

#include "comm/store/watch.h"

typedef enum cpa_notice_kind {
    CPA_NOTICE_HEARTBEAT = 0,
    CPA_NOTICE_LEFT,    /* the rank has said that it leaves */
    CPA_NOTICE_ENDED,   /* its connection has ended, and it had not said so */
    CPA_NOTICE_SILENT,  /* it has not been heard of for the time-out, or is stuck; `message` says which */
    CPA_NOTICE_REFUSED, /* it takes no part in some calls; `refusal` says in which */
} cpa_notice_kind;

/* What goes over a connection; all the same size. */
typedef struct cpa_notice {
    int32_t kind, rank;
    int32_t waits_for; /* heartbeat: the rank that the sender waits for; -1: none */
    float waited_s;    /* heartbeat: s for which the sender has waited */
    cpa_works works;   /* heartbeat: what the sender is doing */
    cpa_call_refusal refusal;
    cpa_status status;
    char message[400];
} cpa_notice;

typedef struct cpa_loss {
    cpa_notice_kind kind; /* CPA_NOTICE_HEARTBEAT: the rank is not lost */
    double since;
    cpa_call_refusal refusal;
    int64_t last_call; /* the last one that is refused, if not all later ones are */
    cpa_status status;
    char message[400];
} cpa_loss;

/* Adds to what is known of a rank what a notice says of it, unless what is known explains that. */
void cpa_loss_note(cpa_loss *loss, const cpa_notice *notice);
/* cpa_watch_check, by what is known of `size` ranks. */
cpa_status cpa_losses_check(const cpa_loss *losses, int32_t size, int32_t peer, cpa_calls calls, cpa_error *err);
/* The first rank that takes part in nothing any more; -1: none. `why` gets what it says, unless it is NULL. */
int32_t cpa_losses_who_gave_up(const cpa_loss *losses, int32_t size, cpa_error *why);

#endif
