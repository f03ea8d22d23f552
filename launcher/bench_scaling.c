#include "launcher/bench_scaling.h"

#include <stdio.h>

#include "base/check.h"
#include "launcher/bench_memory.h"
#include "launcher/bench_report.h"

/* The share of a device's free memory that caches of decode may take; queries, staging and work space need some. */
static const double cache_share = 0.8;

/* How many sequences of the decode batch fit on a team. */
static int64_t sequences_that_fit(const cpa_bench_site *site, int32_t ranks) {
    const cpa_bench_options *o = &site->options;
    double sequence = (double)o->decode_context * (double)(o->kv_heads * (o->k_dim + o->v_dim)) *
                      (double)cpa_dtype_bytes((cpa_dtype)o->kv_dtype);
    double fit = cache_share * (double)site->memory_bytes * ranks / sequence;
    return fit < (double)o->batch ? (int64_t)fit : o->batch;
}

/* One work on one rank alone, while the others wait, and then on all. Results on every rank. */
static cpa_status run_work(cpa_bench_site *site, const cpa_bench_work *alone, const cpa_bench_work *together,
                           cpa_bench_team_result results[2], cpa_error *err) {
    cpa_control *control = &site->control;
    cpa_status status = CPA_OK;
    if (control->rank == 0) status = cpa_bench_team_run(site, MPI_COMM_SELF, alone, &results[0], err);
    CPA_TRY(cpa_control_agree(control, status, err));
    CPA_TRY(cpa_control_bcast(control, &results[0], sizeof results[0], 0, err));
    if (control->size == 1) return CPA_OK;
    return cpa_bench_team_run(site, control->comm, together, &results[1], err);
}

/* Rate of all ranks over that of one: work a second, so that a smaller batch on one rank compares. */
static double speedup_of(const cpa_bench_team_result *alone, const cpa_bench_team_result *r) {
    return r->flops / r->time_s / (alone->flops / alone->time_s);
}

static void print_result(const cpa_bench_site *site, const cpa_bench_work *work, const cpa_bench_team_result *alone,
                         const cpa_bench_team_result *r) {
    char shape[64];
    double each = r->time_s * r->ranks, speedup = speedup_of(alone, r);
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)work->sequences, (long long)work->new_tokens,
             (long long)work->context);
    printf("%8s %20s %6d %12.1f %8lld %11.2f %9.2f %9.2f %8.2f %8.3f %9.2f %10.2f %8.0f %7.0f\n", work->name, shape,
           r->ranks, 1e6 * r->time_s, (long long)r->iterations, 1e-9 * r->flops / each, 1e-9 * r->bytes / each,
           100 * r->bytes / each / site->read_bandwidth, speedup, speedup / r->ranks, 100 * r->exposed_s / r->time_s,
           r->bytes_sent / (1 << 20), r->checked, r->wrong);
    fflush(stdout);
}

static json_t *result_to_json(const cpa_bench_site *site, const cpa_bench_work *work,
                              const cpa_bench_team_result *alone, const cpa_bench_team_result *r) {
    double each = r->time_s * r->ranks, speedup = speedup_of(alone, r);
    return json_pack("{ss si sI sI sI sI sf sf sI sf sf sf sf sf sf sf sf sI sI}", "work", work->name, "ranks",
                     r->ranks, "sequences", (json_int_t)work->sequences, "new_tokens", (json_int_t)work->new_tokens,
                     "context", (json_int_t)work->context, "chunk", (json_int_t)work->chunk, "time_us", 1e6 * r->time_s,
                     "enqueue_us", 1e6 * r->enqueue_s, "iterations", (json_int_t)r->iterations, "gflops",
                     1e-9 * r->flops / each, "gbytes_per_s", 1e-9 * r->bytes / each, "share_of_bandwidth",
                     r->bytes / each / site->read_bandwidth, "speedup", speedup, "efficiency", speedup / r->ranks,
                     "exposed_us", 1e6 * r->exposed_s, "exposed_share", r->exposed_s / r->time_s, "bytes_sent",
                     r->bytes_sent, "checked", (json_int_t)r->checked, "wrong", (json_int_t)r->wrong);
}

static void print_heading(const cpa_bench_site *site) {
    printf(
        "# shape: sequences x new tokens x context, causal, one layer; time of the slowest rank, a median; rates of "
        "one\n"
        "# rank; speedup and efficiency against one rank alone; exposed: waiting for messages, of the time; sent by\n"
        "# all ranks in one layer\n");
    if (site->options.chunk < site->options.context) {
        printf("# prefill in steps of %lld tokens\n", (long long)site->options.chunk);
    }
    printf("#%7s %20s %6s %12s %8s %11s %9s %9s %8s %8s %9s %10s %8s %7s\n", "work", "shape", "ranks", "time (us)",
           "iters", "GFLOP/s", "GB/s", "% of read", "speedup", "effic.", "exposed %", "sent (MiB)", "checked",
           "#wrong");
}

static void print_short_batches(const cpa_bench_site *site, int64_t alone, int64_t together) {
    if (alone == site->options.batch) return;
    printf("# memory: %lld of %lld sequences on one rank", (long long)alone, (long long)site->options.batch);
    printf(", %lld on all; speedup compares sequences a second\n", (long long)together);
}

/* The memory that decides batches is that of the rank with the least. */
static cpa_status agree_on_memory(cpa_bench_site *site, cpa_error *err) {
    double least = -(double)site->memory_bytes;
    CPA_TRY(cpa_control_max(&site->control, &least, 1, err));
    site->memory_bytes = (int64_t)-least;
    return CPA_OK;
}

static cpa_status measure_bandwidth(cpa_bench_site *site, cpa_error *err) {
    cpa_status status = cpa_bench_measure_bandwidth(site, err);
    cpa_bench_release_probe(site);
    return cpa_control_agree(&site->control, status, err);
}

cpa_status cpa_bench_scaling(cpa_bench_site *site, int64_t *wrong, cpa_error *err) {
    bool root = site->control.rank == 0;
    char date[CPA_BENCH_DATE_BYTES];
    CPA_TRY(cpa_bench_options_resolve(&site->options, site->backend, err));
    CPA_TRY(agree_on_memory(site, err));
    const cpa_bench_options *o = &site->options;
    int64_t alone = sequences_that_fit(site, 1), together = sequences_that_fit(site, site->control.size);
    if (alone < 1) {
        return cpa_fail(err, CPA_INVALID, "bench scaling: --decode-context: %lld tokens do not fit on one device",
                        (long long)o->decode_context);
    }
    const cpa_bench_work works[][2] = {
        {{"prefill", CPA_PASS_KV, 1, o->context, o->context, o->chunk},
         {"prefill", CPA_PASS_KV, 1, o->context, o->context, o->chunk}},
        {{"decode", CPA_PASS_Q, alone, 1, o->decode_context, 1},
         {"decode", CPA_PASS_Q, together, 1, o->decode_context, 1}},
    };
    CPA_TRY(measure_bandwidth(site, err));
    cpa_bench_date(date);
    json_t *rows = json_array();
    cpa_status status = CPA_OK;
    for (size_t i = 0; i < sizeof works / sizeof works[0]; i++) {
        cpa_bench_team_result results[2] = {{0}, {0}};
        CPA_TRY_GOTO(run_work(site, &works[i][0], &works[i][1], results, err), done);
        if (root && i == 0) {
            cpa_bench_print_preamble(site, "scaling", date);
            print_heading(site);
            print_short_batches(site, alone, together);
        }
        for (int team = 0; team < (site->control.size > 1 ? 2 : 1); team++) {
            *wrong += (int64_t)results[team].wrong;
            if (root) print_result(site, &works[i][team], &results[0], &results[team]);
            json_array_append_new(rows, result_to_json(site, &works[i][team], &results[0], &results[team]));
        }
    }
    if (root && o->json[0]) status = cpa_bench_write_json(site, "scaling", date, rows, err);
    status = cpa_control_agree(&site->control, status, err);
done:
    json_decref(rows);
    return status;
}
