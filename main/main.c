/* The program: `mpirun -np N cp_attn [options]`, `cp_attn serve ...`, `cp_attn generate ...`,
 * `cp_attn bench ...`, `cp_attn check FILE` or `cp_attn plot FILE...`. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "bench/bench.h"
#include "bench/serve/serve.h"
#include "launcher/block_store.h"
#include "launcher/dry_run.h"
#include "launcher/ranks/ranks.h"
#include "launcher/row_check.h"
#include "launcher/run.h"
#include "launcher/serve.h"
#include "plot/plot.h"
#include "program/commands.h"

static int run_bench(cpa_comm *comm, int argc, char **argv) {
    cpa_rank_placement placement;
    cpa_error err;
    cpa_status placed = cpa_placement_find(comm, 0, 1, &placement, &err);
    if (placed == CPA_OK) return cpa_bench_main(comm, argc, argv, &placement);
    fprintf(stderr, "cp_attn: %s\n", err.message);
    return (int)cpa_exit_code_of(placed);
}

/* Rank 0 plans; the others have nothing to do. */
static cpa_exit_code dry_run(cpa_service *service, const cpa_workload *workload) {
    cpa_job_ranks *ranks = &service->ranks;
    cpa_error err;
    cpa_exit_code code = CPA_EXIT_DONE;
    if (ranks->rank == 0)
        code = cpa_job_ranks_explain(ranks, cpa_dry_run(&service->job, ranks->size, workload, &err), err.message);
    return cpa_job_ranks_agree(ranks, code);
}

/* The job of rank 0, on all ranks, without what is none of their business. */
static void send_job(cpa_job_ranks *ranks, cpa_job *job) {
    static cpa_job sent; /* too large for a small stack */
    sent = *job;
    cpa_settings_hide_secrets(&sent.settings);
    cpa_job_ranks_broadcast(ranks, &sent, sizeof sent);
    if (ranks->rank != 0) *job = sent;
}

/* The job that rank 0 reads from the command line, the environment and the files, on all ranks. */
static cpa_exit_code run_job(cpa_comm *comm, int argc, char **argv, double *timeout_s) {
    static cpa_service service;           /* likewise */
    cpa_workload workload = {.count = 0}; /* rank 0 */
    cpa_job_ranks_open(comm, &service.ranks);
    if (service.ranks.rank == 0)
        cpa_job_prepare(argc, argv, service.ranks.size, &service.job, &workload, &service.answer);
    send_job(&service.ranks, &service.job);
    if (service.ranks.rank > 0) cpa_settings_receive(&service.job.settings);
    (void)cpa_job_set_rules(&service.job, NULL); /* right, as they were read; pointers are those of this rank now */
    const cpa_settings *settings = &service.job.settings;
    cpa_exit_code code = service.job.code;
    if (service.job.run) {
        cpa_log_set(cpa_job_ranks_log, &service.ranks, (cpa_log_level)settings->log_level);
        cpa_comm_set_timeout(comm, settings->rank_timeout);
        *timeout_s = settings->rank_timeout;
        code = settings->dry_run ? dry_run(&service, &workload)
               : settings->serve ? cpa_serve(&service)
                                 : cpa_run_batch(&service, &workload);
        cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    }
    cpa_workload_release(&workload);
    cpa_prompt_answer_close(&service.answer);
    cpa_settings_release(&service.job.settings);
    cpa_job_ranks_part(&service.ranks, code);
    cpa_job_ranks_close(&service.ranks);
    return code;
}

/* Before it is known which rank this is. */
static void log_early(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx, (void)level;
    fprintf(stderr, "cp_attn: warn: %s\n", line);
}

/* What was closed when the program started is opened again, so that MPI's own descriptors do not take its number and
 * get what is printed; writing there fails as before. */
static int hold_standard_streams(void) {
    for (int d = STDIN_FILENO; d <= STDERR_FILENO; d++) {
        if (fcntl(d, F_GETFD) < 0 && open("/dev/null", d == STDIN_FILENO ? O_WRONLY : O_RDONLY) != d) return 0;
    }
    return 1;
}

int main(int argc, char **argv) {
    cpa_comm *comm = NULL;
    cpa_error err;
    if (!hold_standard_streams()) return CPA_EXIT_FAULT;
    const cpa_command command = cpa_command_of(argc, argv);
    if (command == CPA_COMMAND_BENCH_SERVE)
        return cpa_bench_serve_main(argc - 2, argv + 2, getenv("OPENAI_API_KEY")); /* a client has no ranks */
    if (command == CPA_COMMAND_CHECK) return cpa_row_check_main(argc - 1, argv + 1);
    if (command == CPA_COMMAND_PLOT) return cpa_plot_main(argc - 1, argv + 1);
    cpa_log_set(log_early, NULL, CPA_LOG_WARN);
    cpa_status joined = cpa_ranks_join(&argc, &argv, &comm, &err);
    if (joined != CPA_OK) {
        fprintf(stderr, "cp_attn: %s\n", err.message);
        cpa_ranks_abort(cpa_exit_code_of(joined));
    }
    double timeout_s = 10; /* as --rank-timeout, which a job may set */
    int code =
        command == CPA_COMMAND_BENCH ? run_bench(comm, argc - 1, argv + 1) : (int)run_job(comm, argc, argv, &timeout_s);
    cpa_ranks_leave(comm, timeout_s, (cpa_exit_code)code);
    if (cpa_job_store_has_library()) {
        fflush(NULL);
        _exit(code);
    }
    return code;
}
