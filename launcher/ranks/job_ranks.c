#include "launcher/ranks/job_ranks.h"

#include <stdio.h>

#include "base/check.h"
#include "launcher/ranks/ranks.h"
#include "launcher/ranks/signals.h"

void cpa_job_ranks_open(cpa_comm *comm, cpa_job_ranks *out) {
    *out = (cpa_job_ranks){.comm = comm, .rank = cpa_comm_rank(comm), .size = cpa_comm_size(comm)};
    (void)cpa_control_open(comm, &out->control, NULL); /* fails without a communicator only */
}

void cpa_job_ranks_close(cpa_job_ranks *ranks) {
    cpa_control_close(&ranks->control);
}

/* A fault of another rank is said once: by that rank where it has said so to the others, else by the first of those that
 * lost it. The rest speak up only if that does not end them. */
static void let_others_speak(const cpa_job_ranks *ranks, cpa_status status) {
    if (!cpa_ranks_end_together() || cpa_comm_check(ranks->comm, -1, NULL) == CPA_OK) return;
    cpa_ranks_await_turn(ranks->rank + (status != CPA_COMM));
    if (cpa_comm_who_gave_up(ranks->comm, NULL) >= 0) cpa_ranks_await_end();
}

void cpa_job_ranks_explain_loss(const cpa_job_ranks *ranks, int lost, cpa_error *out) {
    if (cpa_comm_who_gave_up(ranks->comm, out) < 0) cpa_fail(out, CPA_COMM, "rank %d is lost", lost);
}

static _Noreturn void abort_with(const cpa_job_ranks *ranks, cpa_status status, const char *message,
                                 cpa_exit_code code) {
    cpa_comm_abort(ranks->comm, status, message);
    cpa_signals_break_off(cpa_comm_who_gave_up(ranks->comm, NULL) < 0);
    let_others_speak(ranks, status);
    fprintf(stderr, "cp_attn: rank %d: %s\n", ranks->rank, message);
    fflush(stderr);
    cpa_ranks_abort(code);
}

_Noreturn void cpa_job_ranks_abort(const cpa_job_ranks *ranks, cpa_status status, const char *message) {
    abort_with(ranks, status, message, CPA_EXIT_FAULT);
}

void cpa_job_ranks_part(const cpa_job_ranks *ranks, cpa_exit_code code) {
    cpa_error err;
    if (cpa_comm_barrier(ranks->comm, &err) != CPA_OK)
        abort_with(ranks, err.status, err.message, code == CPA_EXIT_DONE ? CPA_EXIT_FAULT : code);
}

void cpa_job_ranks_broadcast(cpa_job_ranks *ranks, void *data, int64_t bytes) {
    cpa_error err;
    if (cpa_control_bcast(&ranks->control, data, bytes, 0, &err) != CPA_OK)
        cpa_job_ranks_abort(ranks, err.status, err.message);
}

cpa_exit_code cpa_job_ranks_agree(cpa_job_ranks *ranks, cpa_exit_code code) {
    cpa_job_ranks_broadcast(ranks, &code, sizeof code);
    return code;
}

int64_t cpa_job_ranks_least(cpa_job_ranks *ranks, int64_t number) {
    cpa_error err;
    double negative = -(double)number;
    if (cpa_control_max(&ranks->control, &negative, 1, &err) != CPA_OK)
        cpa_job_ranks_abort(ranks, err.status, err.message);
    return (int64_t)-negative;
}

cpa_exit_code cpa_job_ranks_explain(const cpa_job_ranks *ranks, cpa_status status, const char *message) {
    if (status != CPA_OK && ranks->rank == 0) fprintf(stderr, "cp_attn: %s\n", message);
    return cpa_exit_code_of(status);
}

void cpa_job_ranks_log(void *ctx, cpa_log_level level, const char *line) {
    static const char *const names[] = {"error", "warn", "info", "debug"};
    const cpa_job_ranks *ranks = ctx;
    if (ranks->rank == 0) {
        fprintf(stderr, "cp_attn: %s: %s\n", names[level], line);
    } else {
        fprintf(stderr, "cp_attn: %s: rank %d: %s\n", names[level], ranks->rank, line);
    }
}
