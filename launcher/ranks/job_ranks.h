/* What the ranks of a job tell each other beside its steps: what rank 0 has decided, what is wrong, and that one of
 * them ends the job. */
#ifndef CPA_LAUNCHER_JOB_RANKS_H
#define CPA_LAUNCHER_JOB_RANKS_H

#include "comm/comm.h"
#include "program/exit_code.h"

/* The ranks, as one of them sees them. */
typedef struct cpa_job_ranks {
    cpa_comm *comm; /* the caller's */
    cpa_control control;
    int rank, size;
} cpa_job_ranks;

/* `comm` must outlive the ranks. */
void cpa_job_ranks_open(cpa_comm *comm, cpa_job_ranks *out);
void cpa_job_ranks_close(cpa_job_ranks *ranks);

/* Why the rank `lost` is gone: the line of the rank that has given up, if one has, or that it is lost. */
void cpa_job_ranks_explain_loss(const cpa_job_ranks *ranks, int lost, cpa_error *out);

/* Ends the job, with a line, from a rank that others wait for. Does not return. */
_Noreturn void cpa_job_ranks_abort(const cpa_job_ranks *ranks, cpa_status status, const char *message);

/* Returns once every rank is about to leave: here one that does not come is named. Ends the job then, with `code`
 * unless that is CPA_EXIT_DONE. */
void cpa_job_ranks_part(const cpa_job_ranks *ranks, cpa_exit_code code);

/* What rank 0 has in `data`, on every rank. Collective; a rank that cannot ends the job. */
void cpa_job_ranks_broadcast(cpa_job_ranks *ranks, void *data, int64_t bytes);
/* Every rank returns what rank 0 decided. Likewise. */
cpa_exit_code cpa_job_ranks_agree(cpa_job_ranks *ranks, cpa_exit_code code);
/* The least of the ranks' numbers. Likewise. */
int64_t cpa_job_ranks_least(cpa_job_ranks *ranks, int64_t number);

/* Rank 0 says what is wrong, in one line; `message` is read only then. */
cpa_exit_code cpa_job_ranks_explain(const cpa_job_ranks *ranks, cpa_status status, const char *message);

/* A cpa_log_fn, with the ranks as its ctx: the lines of every rank go to stderr. */
void cpa_job_ranks_log(void *ranks, cpa_log_level level, const char *line);

#endif
