/* What is behind a cpa_comm, for the parts of comm/ that send messages of their own. */
#ifndef CPA_COMMUNICATOR_H
#define CPA_COMMUNICATOR_H

#include <cpattn/comm.h>

#include "comm/limits.h"
#include "comm/store/watch.h"

/* Tags of the program's own calls; channels take theirs from those behind. */
enum { CPA_COMM_TAG_COLLECTIVE = 0, CPA_COMM_TAG_MESSAGE, CPA_COMM_TAG_FIRST_FREE, CPA_COMM_TAGS = 32768 };

struct cpa_comm {
    cpa_comm_ops ops;
    void *state;
    int32_t rank, size;
    uint64_t tags_taken[CPA_COMM_TAGS / 64]; /* [CPA_COMM_TAGS] a bit for each tag in use; the same on every rank */
    int32_t n_tags;                          /* tags 0..n_tags-1 are its own; at most CPA_COMM_TAGS */
    int32_t next_tag;                        /* tag at which to look for a free one; the same on every rank */
    int32_t channels;                        /* opened so far */
    double deadline;  /* deadline of the constructor's own waits, of cpa_clock_now; 0: they are over */
    cpa_watch *watch; /* NULL with one rank */
    cpa_calls calls;  /* calls that this rank waits in, between cpa_comm_begin_wait and its end */
    void *remembered; /* what is measured once for a communicator; freed with it */
};

/* Options with their defaults filled in; those of a smaller known size are zero. */
cpa_status cpa_comm_take_options(const cpa_comm_options *given, cpa_comm_options *out, cpa_error *err);

/* The key of connections that follows from the secret of the options. */
cpa_status cpa_comm_key(const cpa_comm_options *options, cpa_job_key *out, cpa_error *err);

/* cpa_comm_create, where rank 0 listens at the address `host` alone for the connections by which ranks are watched; NULL:
 * at that of loopback where all ranks are on one host, else at every one. */
cpa_status cpa_comm_create_at(const char *host, const cpa_comm_ops *ops, void *state, int32_t rank, int32_t size,
                              const cpa_comm_options *options, cpa_comm **out, cpa_error *err);

/* A communicator of the ranks 0..n-1 of another, over its messages, with tags that it takes from there for good: a dozen
 * of them can be made. *out is NULL on the other ranks. Collective over `whole`, which must outlive it; fails on all of
 * its ranks alike. */
cpa_status cpa_comm_first_ranks(cpa_comm *whole, int32_t n, cpa_comm **out, cpa_error *err);

/* Takes n tags in a row, which nobody else uses until they are given back; *first is -1 where there are none. Every
 * rank takes and gives back the same ones in the same order, whatever fails. They come round: those that were given
 * back last are taken last, as messages of theirs that nobody received may still be on their way. */
cpa_status cpa_comm_take_tags(cpa_comm *comm, int32_t n, int32_t *first, cpa_error *err);
/* Does nothing with first = -1. */
void cpa_comm_give_back_tags(cpa_comm *comm, int32_t first, int32_t n);

/* Whether the request is done, which then exists no more; sets it to NULL then. NULL is done. */
cpa_status cpa_comm_test(cpa_comm *comm, cpa_comm_request **request, int *done, cpa_error *err);
/* Waits for a message from or to `peer`, unless that is to no end. */
cpa_status cpa_comm_wait(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err);
/* The same for a message that may be long in coming, without keeping the processor: it may be seen 10 ms late. */
cpa_status cpa_comm_wait_idly(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err);
/* Fails if waiting for `peer` (-1: for any rank) is to no end: a rank is lost, or has refused a call that this one
 * waits in. cpa_comm_wait looks too. */
cpa_status cpa_comm_check(cpa_comm *comm, int32_t peer, cpa_error *err);
/* The rank that has said why it gives up (cpa_comm_abort), while this one has not; -1: none has. `why` gets the line,
 * unless it is NULL. Any thread may call it. */
int32_t cpa_comm_who_gave_up(cpa_comm *comm, cpa_error *why);
/* This rank begins to wait in calls of a channel that others may refuse, or no longer waits. Calls that have returned
 * count too while what they have enqueued may be under way. Returns those that it waited in before, which a wait in the
 * middle of another begins again at its end. */
cpa_calls cpa_comm_begin_wait(cpa_comm *comm, cpa_calls calls);
void cpa_comm_end_wait(cpa_comm *comm);
/* What this rank does in a call of a channel. The waits of ranks that do not do the same end after a time-out, since
 * they wait for each other, with a line that says `difference` (cpa_watch_note_work). Costs no message. */
void cpa_comm_note_work(cpa_comm *comm, cpa_work work, const char *difference);
/* Tells the others that this rank takes no part in a call of the channel, or in it and all later ones. */
void cpa_comm_refuse(cpa_comm *comm, int32_t channel, int64_t call, int and_later, const cpa_error *why);
/* Gives a request up unless it is NULL, and sets it to NULL. */
void cpa_comm_cancel(cpa_comm *comm, cpa_comm_request **request);
/* Starts a message; *request is NULL if that fails. */
cpa_status cpa_comm_start_send(cpa_comm *comm, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                               cpa_comm_request **request, cpa_error *err);
cpa_status cpa_comm_start_receive(cpa_comm *comm, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                  cpa_comm_request **request, cpa_error *err);

#endif
