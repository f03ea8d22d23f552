/* The engine of `cp_attn bench`: the device, and the loop that times a benchmark's cases. */
#include "bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "bench/benchmark.h"
#include "bench/links.h"
#include "bench/memory.h"
#include "bench/report.h"
#include "bench/scaling.h"
#include "program/exit_code.h"
#include "program/output_file.h"

/* A device is timed in batches of calls between two waits, long enough that starting and waiting (some 10 us) do not
 * count; the host runs a call when it is made. */
static const double batch_s = 5e-3;
enum { MAX_CALLS_PER_BATCH = 2000, CALIBRATION_CALLS = 3 };

static const cpa_bench *const benches[] = {&cpa_bench_attend,
                                           &cpa_bench_varlen,
                                           &cpa_bench_offload,
                                           &cpa_bench_varlen_attend,
                                           &cpa_bench_sparse,
                                           &cpa_bench_xattn,
                                           &cpa_bench_xattn_estimate,
                                           &cpa_bench_attend_blocks,
                                           &cpa_bench_attend_beside,
                                           &cpa_bench_merge,
                                           &cpa_bench_kv_write,
                                           &cpa_bench_kv_pack,
                                           &cpa_bench_kv_convert,
                                           &cpa_bench_linear,
                                           &cpa_bench_expert_linear,
                                           &cpa_bench_rmsnorm,
                                           &cpa_bench_swiglu,
                                           &cpa_bench_rmsnorm_codes,
                                           &cpa_bench_rmsnorm2,
                                           &cpa_bench_rotate,
                                           &cpa_bench_latent_norm_rope,
                                           &cpa_bench_qk_norm_rope,
                                           &cpa_bench_index_write,
                                           &cpa_bench_index_q,
                                           &cpa_bench_index_logits,
                                           &cpa_bench_sample,
                                           &cpa_bench_topk,
                                           &cpa_bench_exchange,
                                           &cpa_bench_step,
                                           &cpa_bench_q_norm_rope_kv_write,
                                           &cpa_bench_inverse_rope_quant,
                                           &cpa_bench_compress_write};
enum { N_BENCHES = sizeof benches / sizeof benches[0] };

enum { NAMES_BYTES = 512 };

/* All names, with commas between them. */
static const char *list_names(char names[NAMES_BYTES]) {
    names[0] = 0;
    for (int i = 0; i <= N_BENCHES; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, NAMES_BYTES - used, "%s%s", i ? ", " : "", i < N_BENCHES ? benches[i]->name : "scaling");
    }
    return names;
}

static void print_help(void) {
    char names[NAMES_BYTES];
    printf(
        "usage: mpirun -np N cp_attn bench NAME [options]    measure one operation on N ranks\n"
        "       cp_attn bench serve --url URL [options]    a server; 'cp_attn bench serve --help' lists them\n"
        "\n"
        "NAME is one of\n  ");
    cpa_text_wrap(list_names(names), 2, 2, stdout);
    printf("\n");
    cpa_bench_options_print_help();
    printf("shapes, and those without --shapes on the host / on cuda:\n");
    for (int i = 0; i < N_BENCHES; i++) {
        printf("  %-9s %s\n    ", benches[i]->name, benches[i]->dims);
        cpa_text_wrap(benches[i]->shapes_host, 4, 6, stdout);
        printf("    ");
        cpa_text_wrap(benches[i]->shapes_cuda, 4, 6, stdout);
    }
    printf("  %-9s sequences x new tokens x context\n    ", "scaling");
    cpa_text_wrap("without --shapes 1 x C x C and B x 1 x D, with --context C, --batch B and --decode-context D", 4, 6,
                  stdout);
    printf("exit codes: 0 done, 1 a result was wrong, 2 bad usage, 3 a fault at run time\n");
}

/* ---- the time of a case ---- */

/* Seconds of one call, in all and to enqueue it. */
typedef struct batch_time {
    double call_s, enqueue_s;
} batch_time;

static int compare_times(const void *a, const void *b) {
    double x = ((const batch_time *)a)->call_s, y = ((const batch_time *)b)->call_s;
    return (x > y) - (x < y);
}

/* What runs: a prepared case, and how many calls it has made. */
typedef struct running {
    cpa_bench_site *site;
    const cpa_bench *bench;
    void *state;
    int64_t calls;
} running;

static cpa_status wait(const running *r, cpa_error *err) {
    if (r->bench->wait) return r->bench->wait(r->state, err);
    return cpa_bench_enqueued(r->site, cpa_stream_sync(r->site->stream), err);
}

/* n calls between two waits; ranks begin together, and the slowest counts. */
static cpa_status time_batch(running *r, int64_t n, batch_time *out, cpa_error *err) {
    cpa_status ran = CPA_OK;
    double start = cpa_clock_now();
    for (int64_t i = 0; ran == CPA_OK && i < n; i++) ran = r->bench->run(r->state, r->calls++, err);
    double enqueued = cpa_clock_now();
    if (ran == CPA_OK) ran = wait(r, err);
    double slowest[3] = {cpa_clock_now() - start, enqueued - start, ran};
    CPA_TRY(cpa_control_max(&r->site->control, slowest, 3, err));
    if (slowest[2] > 0) CPA_TRY(cpa_control_agree(&r->site->control, ran, err));
    *out = (batch_time){slowest[0] / (double)n, slowest[1] / (double)n};
    return CPA_OK;
}

/* How many calls fill a batch; the same on every rank. Warms up. */
static cpa_status calls_per_batch(running *r, int64_t *out, cpa_error *err) {
    batch_time time;
    CPA_TRY(time_batch(r, 1, &time, err));
    *out = 1;
    if (r->site->backend == CPA_BACKEND_HOST) return CPA_OK;
    CPA_TRY(time_batch(r, CALIBRATION_CALLS, &time, err));
    double calls = batch_s / time.call_s + 1;
    *out = calls < MAX_CALLS_PER_BATCH ? (int64_t)calls : MAX_CALLS_PER_BATCH;
    return CPA_OK;
}

/* Runs the prepared case until it has been timed long enough. */
static cpa_status time_case(running *r, cpa_bench_row *row, cpa_error *err) {
    const cpa_bench_options *options = &r->site->options;
    batch_time *times = malloc(CPA_BENCH_MAX_ITERATIONS * sizeof *times);
    cpa_status status = times ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for times");
    double total = 0;
    int64_t n = 0, calls = 1;
    CPA_TRY_GOTO(cpa_control_agree(&r->site->control, status, err), done);
    CPA_TRY_GOTO(calls_per_batch(r, &calls, err), done);
    while (!cpa_bench_is_timed(options, n, total, options->min_time_s)) {
        CPA_TRY_GOTO(time_batch(r, calls, &times[n], err), done);
        total += times[n++].call_s * (double)calls;
    }
    qsort(times, (size_t)n, sizeof *times, compare_times);
    row->time_s = n % 2 ? times[n / 2].call_s : 0.5 * (times[n / 2 - 1].call_s + times[n / 2].call_s);
    row->enqueue_s = times[n / 2].enqueue_s;
    row->iterations = n * calls;
done:
    free(times);
    return status;
}

static cpa_status run_case(cpa_bench_site *site, const cpa_bench *bench, const cpa_bench_case *one, cpa_bench_row *row,
                           cpa_error *err) {
    running r = {.site = site, .bench = bench};
    site->options = one->options;
    *row = (cpa_bench_row){.flops = -1, .bytes = -1};
    cpa_status status = bench->prepare(site, one->shape, row, &r.state, err);
    CPA_TRY_GOTO(cpa_control_agree(&site->control, status, err), out);
    CPA_TRY_GOTO(time_case(&r, row, err), out);
    status = bench->check(r.state, row, err);
    CPA_TRY_GOTO(cpa_control_agree(&site->control, status, err), out);
    double counts[2] = {(double)row->checked, (double)row->wrong};
    CPA_TRY_GOTO(cpa_control_sum(&site->control, counts, 2, err), out);
    row->checked = (int64_t)counts[0];
    row->wrong = (int64_t)counts[1];
out:
    bench->release(r.state);
    return status;
}

/* ---- a benchmark ---- */

/* Runs all cases; *wrong is the number of wrong results. The preamble waits for the first case, so that a case that is
 * refused leaves one line. */
static cpa_status run_cases(cpa_bench_site *site, const cpa_bench *bench, const cpa_bench_case *cases, int n_cases,
                            int64_t *wrong, cpa_error *err) {
    bool root = site->control.rank == 0;
    const cpa_bench_options options = site->options;
    char date[CPA_BENCH_DATE_BYTES];
    cpa_bench_date(date);
    json_t *rows = json_array();
    double bus_bandwidths = 0;
    cpa_status status = root && options.json[0] ? cpa_output_retire(options.json, err) : CPA_OK;
    CPA_TRY_GOTO(cpa_control_agree(&site->control, status, err), out);
    for (int i = 0; i < n_cases; i++) {
        cpa_bench_row row;
        CPA_TRY_GOTO(run_case(site, bench, &cases[i], &row, err), out);
        *wrong += row.wrong;
        bus_bandwidths += row.bytes / row.time_s;
        json_array_append_new(rows, cpa_bench_row_to_json(site, bench, cases[i].name, &row));
        site->options = options;
        if (root && i == 0) {
            cpa_bench_print_preamble(site, bench->name, date);
            cpa_bench_print_heading(bench, &row);
        }
        if (root) cpa_bench_print_row(site, bench, cases[i].name, &row);
    }
    if (root && bench->has_bus_bandwidth) cpa_bench_print_average(bus_bandwidths, n_cases);
    if (root && options.json[0]) status = cpa_bench_write_json(site, bench->name, date, rows, err);
    status = cpa_control_agree(&site->control, status, err);
out:
    json_decref(rows);
    return status;
}

static cpa_status measure_floor(cpa_bench_site *site, cpa_error *err) {
    CPA_TRY(cpa_control_agree(&site->control, cpa_bench_measure_bandwidth(site, err), err));
    double sums[2] = {site->read_bandwidth, site->copy_bandwidth};
    CPA_TRY(cpa_control_sum(&site->control, sums, 2, err));
    site->read_bandwidth = sums[0] / site->control.size;
    site->copy_bandwidth = sums[1] / site->control.size;
    return CPA_OK;
}

static cpa_status run_bench(cpa_bench_site *site, const cpa_bench *bench, cpa_bench_case *cases, int64_t *wrong,
                            cpa_error *err) {
    int n_cases = 0;
    const char *shapes = site->options.shapes[0]             ? site->options.shapes
                         : site->backend == CPA_BACKEND_CUDA ? bench->shapes_cuda
                                                             : bench->shapes_host;
    CPA_TRY(cpa_bench_cases_parse(shapes, bench->n_dims, &site->options, site->backend, cases, &n_cases, err));
    CPA_TRY(cpa_bench_options_resolve(&site->options, site->backend, err));
    if (site->control.size < bench->min_ranks) {
        return cpa_fail(err, CPA_INVALID, "bench %s: needs at least %d ranks, runs on %d; start it with mpirun -np",
                        bench->name, bench->min_ranks, site->control.size);
    }
    if (bench->floor != CPA_BENCH_NO_FLOOR) CPA_TRY(measure_floor(site, err));
    if (bench->floor == CPA_BENCH_LINK)
        CPA_TRY(cpa_control_agree(&site->control, cpa_bench_measure_link(site, err), err));
    if (bench->min_ranks > 1) {
        CPA_TRY(cpa_bench_find_links(site, err));
    }
    return run_cases(site, bench, cases, n_cases, wrong, err);
}

static cpa_status open_device(cpa_bench_site *site, cpa_rank_placement *placement, cpa_error *err) {
    cpa_device_choice choice = (cpa_device_choice)site->options.device;
    CPA_TRY(cpa_placement_choose(site->control.comm, choice, placement, err));
    site->backend = placement->backend;
    site->memory_bytes = placement->memory_bytes;
    if (site->options.threads == 0) site->options.threads = placement->threads;
    cpa_device_options options = cpa_placement_device(placement);
    options.threads = (int32_t)site->options.threads;
    site->shares_cores =
        site->backend == CPA_BACKEND_HOST && options.threads * placement->ranks_here > placement->cores;
    cpa_status status = cpa_device_open(&options, &site->device, err);
    if (status == CPA_OK) status = cpa_stream_create(site->device, &site->stream, err);
    return cpa_control_agree(&site->control, status, err);
}

static cpa_status run_named(cpa_bench_site *site, const char *name, cpa_rank_placement *placement, int64_t *wrong,
                            cpa_error *err) {
    const cpa_bench *bench = NULL;
    for (int i = 0; name && i < N_BENCHES; i++) {
        if (strcmp(name, benches[i]->name) == 0) bench = benches[i];
    }
    if (!bench && (!name || strcmp(name, "scaling") != 0)) {
        char names[NAMES_BYTES], found[64];
        cpa_text_quote(name ? name : "", name ? strlen(name) : 0, found, sizeof found);
        return cpa_fail(err, CPA_INVALID, "bench: found '%s', expected serve, %s (or --help)", found,
                        list_names(names));
    }
    const char *json = site->options.json;
    cpa_status status = CPA_OK;
    if (site->control.rank == 0 && json[0]) status = cpa_output_check("bench: --result-json", json, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    CPA_TRY(open_device(site, placement, err));
    if (!bench) return cpa_bench_scaling(site, wrong, err);
    cpa_bench_case *cases = calloc(CPA_BENCH_MAX_CASES, sizeof *cases);
    if (!cases) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for cases");
    status = run_bench(site, bench, cases, wrong, err);
    free(cases);
    return status;
}

int cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement) {
    cpa_bench_site site = {.argc = argc, .argv = argv};
    const char *name = NULL;
    int64_t wrong = 0;
    cpa_error err = {0};
    cpa_status status = cpa_control_open(comm, &site.control, &err);
    bool opened = status == CPA_OK;
    if (opened) status = cpa_bench_options_parse(argc, argv, &site.options, &name, &err);
    bool help = status == CPA_OK && site.options.help;
    if (help && site.control.rank == 0) print_help();
    if (status == CPA_OK && !help) status = run_named(&site, name, placement, &wrong, &err);
    if (status == CPA_OK) {
        status = cpa_output_flush(&err);
        status = cpa_control_agree(&site.control, status, &err);
    }
    if (status != CPA_OK && (!opened || site.control.rank == 0)) fprintf(stderr, "cp_attn: %s\n", err.message);
    if (site.device) cpa_bench_release_probe(&site);
    cpa_stream_destroy(site.stream);
    cpa_device_close(site.device);
    if (opened) cpa_control_close(&site.control);
    return (int)(status != CPA_OK ? cpa_exit_code_of(status) : wrong ? CPA_EXIT_CHECK_FAILED : CPA_EXIT_DONE);
}
