/* Communicators: how the ranks of one context-parallel group reach each other.
 *
 * A communicator is made from MPI (<cpattn/mpi.h>, libcpattn_mpi), from a communicator of NCCL, from a TCP
 * store, or from a table of functions of the caller. Contexts and engines are created over one, and may share it. Ranks
 * are 0..size-1, at most 64. A communicator, and whatever was created over it, is used by one thread at a time.
 *
 * Calls that are collective are made by every rank, in the same order. No wait is for ever: a rank of which nothing has
 * been heard for `timeout_s`, or which has ended, ends the waits of all others with CPA_COMM and a line that names it.
 * Each rank has a thread that says it is alive, whatever its other threads do, over TCP connections to rank 0. A rank
 * that cannot reach rank 0 like that logs a warning and is not watched, and neither is anyone while a constructor
 * runs, which waits for `join_s` instead. What is sent is not encrypted. */
#ifndef CPATTN_COMM_H
#define CPATTN_COMM_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cpa_comm cpa_comm;

/* What constructors take; NULL: all defaults. */
typedef struct cpa_comm_options {
    size_t size;
    double timeout_s; /* how long a rank may be silent, as when it is stopped; less than 2 is taken for 2; 0 = 10 */
    double join_s;    /* how long to wait for all ranks to come; 0 = 60 */
    /* What all ranks of the job are told and nobody else knows, at least 16 letters; every connection that is made has to
     * prove that it knows it. NULL: none. A communicator over MPI or functions of the caller makes one of its own, and
     * sends it over these. */
    const char *secret;
} cpa_comm_options;

/* One rank, which has nobody to talk to. */
CPA_API cpa_status cpa_comm_alone(cpa_comm **out, cpa_error *err);

/* The ranks that meet at host:port, where rank 0 listens; what MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE usually
 * name. Messages go over a TCP connection between each two ranks. Ranks listen at the address by which they reach rank 0,
 * and rank 0 at the first of `host` that is its own. Without a secret whoever can connect there may take a rank's place:
 * a warning is logged. Ranks of different secrets are refused with CPA_INVALID. Collective. */
CPA_API cpa_status cpa_comm_from_store(const char *host, int32_t port, int32_t rank, int32_t size,
                                       const cpa_comm_options *options, cpa_comm **out, cpa_error *err);

/* The ranks of a communicator of NCCL, `nccl_comm` (an ncclComm_t), whose device is the current one of the calling
 * thread. NCCL, which is loaded at run time, carries their addresses, through memory of the device; messages go over
 * TCP afterwards, and `nccl_comm` is not used any more. Collective; where one rank fails before it calls NCCL (on its
 * arguments, or memory), the others wait in NCCL, which has time-outs of its own. CPA_UNSUPPORTED in a build without
 * CUDA. */
CPA_API cpa_status cpa_comm_from_nccl(void *nccl_comm, const cpa_comm_options *options, cpa_comm **out, cpa_error *err);

/* NULL does nothing. Not before what was created over it. Waits for other ranks for a second at most. */
CPA_API void cpa_comm_destroy(cpa_comm *comm);

/* Pure. */
CPA_API int32_t cpa_comm_rank(const cpa_comm *comm);
CPA_API int32_t cpa_comm_size(const cpa_comm *comm);

/* Collective: every rank's `bytes` bytes, the same number on each, in rank order at `all` ([size * bytes]). */
CPA_API cpa_status cpa_comm_all_gather(cpa_comm *comm, const void *mine, int64_t bytes, void *all, cpa_error *err);
/* Collective: what `data` holds on rank `root`, on every rank. */
CPA_API cpa_status cpa_comm_broadcast(cpa_comm *comm, void *data, int64_t bytes, int32_t root, cpa_error *err);
/* Collective: returns once every rank has called it. */
CPA_API cpa_status cpa_comm_barrier(cpa_comm *comm, cpa_error *err);
/* Collective: if any rank gives another status than CPA_OK, every rank returns that of the lowest such rank, with its
 * message (that of `err` there), prefixed with "rank R: ". */
CPA_API cpa_status cpa_comm_agree(cpa_comm *comm, cpa_status mine, cpa_error *err);
/* One message to another rank, which receives it with the same number of bytes. Messages between two ranks keep their
 * order. Both block; a send may return before the message is received. */
CPA_API cpa_status cpa_comm_send(cpa_comm *comm, int32_t peer, const void *data, int64_t bytes, cpa_error *err);
CPA_API cpa_status cpa_comm_receive(cpa_comm *comm, int32_t peer, void *data, int64_t bytes, cpa_error *err);

/* Tells all other ranks that this one gives up: their waits end with `status` and "rank R: message". For a program that
 * is about to end after a fault of its own. Does nothing where another rank is already lost. Waits for nobody. */
CPA_API void cpa_comm_abort(cpa_comm *comm, cpa_status status, const char *message);
/* How long a rank may be silent from now on, as timeout_s of the options; on every rank. 0 or less does nothing. */
CPA_API void cpa_comm_set_timeout(cpa_comm *comm, double seconds);

/* ---- a transport of the caller ---- */

/* A message on its way; owned by the back end. */
typedef struct cpa_comm_request cpa_comm_request;

/* What carries the messages of a communicator: between each two ranks, tagged, in order for each tag. All functions are
 * called by one thread at a time, and none but `cancel` waits for another rank. Buffers belong to the back end until `test` says
 * that the request is done or has failed, or it is cancelled. */
typedef struct cpa_comm_ops {
    size_t size;
    const char *name; /* such as "mpi" */
    /* Starts a message of `bytes` (0 or more) bytes with a tag of 0..32767. *out is set only on success. */
    cpa_status (*send)(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes, cpa_comm_request **out,
                       cpa_error *err);
    /* Expects the next message of that peer and tag, which has exactly `bytes` bytes. */
    cpa_status (*receive)(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes, cpa_comm_request **out,
                          cpa_error *err);
    /* Moves messages along; *done says whether this one is over. Done or failed, the request exists no more. */
    cpa_status (*test)(void *state, cpa_comm_request *request, int *done, cpa_error *err);
    /* Gives a request up; from then on nothing is received into its buffer, nor read from it. What the other rank has
     * begun to take may be waited for, a second or so. */
    void (*cancel)(void *state, cpa_comm_request *request);
    /* Frees the state; NULL if there is nothing to free. */
    void (*close)(void *state);
} cpa_comm_ops;

/* Collective: bad options and the like of one rank are refused by all, but bad `ops`, `rank` and `size` by that one
 * alone, as nothing can be sent by them. `ops` is copied; `state` is the first argument of its functions, closed with
 * the communicator, and still the caller's if this fails. */
CPA_API cpa_status cpa_comm_create(const cpa_comm_ops *ops, void *state, int32_t rank, int32_t size,
                                   const cpa_comm_options *options, cpa_comm **out, cpa_error *err);

#ifdef __cplusplus
}
#endif
#endif
