/* The engine of `cp_attn bench`: options, the loop that times a benchmark's cases, the table and its JSON. */
#include "launcher/bench.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "launcher/exit_code.h"
#include "launcher/model_file.h"

enum { MIN_ITERATIONS = 3 };

static const cpa_bench *const benches[] = {&cpa_bench_attend, &cpa_bench_merge, &cpa_bench_exchange};
enum { N_BENCHES = sizeof benches / sizeof benches[0] };

static void print_help(void) {
    printf("usage: cp_attn bench attend|merge|exchange [options]\n");
    cpa_bench_options_print_help();
    printf("shapes:\n");
    for (int i = 0; i < N_BENCHES; i++) {
        printf("  %-9s %s [%s]\n", benches[i]->name, benches[i]->dims, benches[i]->default_shapes);
    }
    printf("exit codes: 0 done, 1 a result was wrong, 2 bad usage, 3 a fault at run time\n");
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the prepared case until it has been timed long enough; ranks begin together, and the slowest counts. */
static cpa_status time_case(cpa_bench_site *site, const cpa_bench *bench, void *state, cpa_bench_row *row,
                            cpa_error *err) {
    double *times = malloc(CPA_BENCH_MAX_ITERATIONS * sizeof *times);
    cpa_status status = cpa_control_agree(
        &site->control, times ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for times"), err);
    double total = 0;
    int64_t n = -1; /* the first run warms up */
    while (status == CPA_OK && n < CPA_BENCH_MAX_ITERATIONS) {
        const cpa_bench_options *options = &site->options;
        bool enough =
            options->iterations ? n >= options->iterations : n >= MIN_ITERATIONS && total >= options->min_time_s;
        if (enough) break;
        double start = cpa_clock_now();
        cpa_status ran = bench->run(state, err);
        double slowest[2] = {cpa_clock_now() - start, ran};
        status = cpa_control_max(&site->control, slowest, 2, err);
        if (status == CPA_OK && slowest[1] > 0) status = cpa_control_agree(&site->control, ran, err);
        if (n >= 0) {
            times[n] = slowest[0];
            total += slowest[0];
        }
        n++;
    }
    if (status == CPA_OK) {
        qsort(times, (size_t)n, sizeof *times, compare_doubles);
        row->time_s = n % 2 ? times[n / 2] : 0.5 * (times[n / 2 - 1] + times[n / 2]);
        row->iterations = n;
    }
    free(times);
    return status;
}

static cpa_status run_case(cpa_bench_site *site, const cpa_bench *bench, const cpa_bench_case *one, cpa_bench_row *row,
                           cpa_error *err) {
    void *state = NULL;
    *row = (cpa_bench_row){.flops = -1, .bytes = -1, .read_bandwidth = -1};
    cpa_status status = bench->prepare(site, one->shape, row, &state, err);
    CPA_TRY_GOTO(cpa_control_agree(&site->control, status, err), out);
    CPA_TRY_GOTO(time_case(site, bench, state, row, err), out);
    status = bench->check(state, row, err);
    CPA_TRY_GOTO(cpa_control_agree(&site->control, status, err), out);
    double counts[2] = {(double)row->checked, (double)row->wrong};
    CPA_TRY_GOTO(cpa_control_sum(&site->control, counts, 2, err), out);
    row->checked = (int64_t)counts[0];
    row->wrong = (int64_t)counts[1];
out:
    bench->release(state);
    return status;
}

static void date_now(char *text, size_t size) {
    time_t now = time(NULL);
    struct tm utc;
    strftime(text, size, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}

static void print_preamble(const cpa_bench_site *site, const cpa_bench *bench, const char *date) {
    const cpa_bench_options *o = &site->options;
    printf("# cp_attn %s bench %s, %s\n", cpa_version(), bench->name, date);
    printf("# device: %s\n", cpa_device_description(site->device));
    printf("# ranks %d, threads %lld, dtype %s, heads %lld/%lld, head dim %lld, block size %lld\n", site->control.size,
           (long long)o->threads, cpa_dtype_name((cpa_dtype)o->dtype), (long long)o->q_heads, (long long)o->kv_heads,
           (long long)o->head_dim, (long long)o->block_size);
    printf("# shape: %s; figures of one rank; time is the median; checked: %s\n", bench->dims, bench->checked);
    printf("#%21s %12s %8s %10s %10s %11s %10s %7s\n", "shape", "time (us)", "iters", "GFLOP/s", "GB/s", "read GB/s",
           "checked", "#wrong");
}

static void print_rate(double per_second, int width) {
    if (per_second < 0) {
        printf(" %*s", width, "-");
    } else {
        printf(" %*.2f", width, 1e-9 * per_second);
    }
}

static void print_row(const char *name, const cpa_bench_row *row) {
    printf("%22s %12.1f %8lld", name, 1e6 * row->time_s, (long long)row->iterations);
    print_rate(row->flops / row->time_s, 10);
    print_rate(row->bytes / row->time_s, 10);
    print_rate(row->read_bandwidth, 11);
    printf(" %10lld %7lld\n", (long long)row->checked, (long long)row->wrong);
    fflush(stdout);
}

static json_t *rate_to_json(double per_second) {
    return per_second < 0 ? json_null() : json_real(1e-9 * per_second);
}

static json_t *row_to_json(const char *name, const cpa_bench_row *row) {
    return json_pack("{ss sf sI so so so sI sI}", "shape", name, "time_us", 1e6 * row->time_s, "iterations",
                     (json_int_t)row->iterations, "gflops", rate_to_json(row->flops / row->time_s), "gbytes_per_s",
                     rate_to_json(row->bytes / row->time_s), "read_gbytes_per_s", rate_to_json(row->read_bandwidth),
                     "checked", (json_int_t)row->checked, "wrong", (json_int_t)row->wrong);
}

/* Rank 0: writes a new file; takes ownership of rows. */
static cpa_status write_json(const cpa_bench_site *site, const cpa_bench *bench, const char *date, json_t *rows,
                             cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    json_t *root = json_pack("{ss ss ss ss si sI ss sI sI sI sI so}", "version", cpa_version(), "benchmark",
                             bench->name, "date", date, "device", cpa_device_description(site->device), "ranks",
                             site->control.size, "threads", o->threads, "dtype", cpa_dtype_name((cpa_dtype)o->dtype),
                             "q_heads", (json_int_t)o->q_heads, "kv_heads", o->kv_heads, "head_dim",
                             (json_int_t)o->head_dim, "block_size", (json_int_t)o->block_size, "rows", rows);
    if (!root) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for the JSON");
    FILE *file = fopen(o->json, "wx");
    if (!file) {
        json_decref(root);
        return cpa_fail(err, CPA_IO, "bench: cannot create %s: %s", o->json, strerror(errno));
    }
    bool written = json_dumpf(root, file, JSON_INDENT(2)) == 0;
    written = fputc('\n', file) != EOF && written;
    written = fclose(file) == 0 && written;
    json_decref(root);
    return written ? CPA_OK : cpa_fail(err, CPA_IO, "bench: cannot write %s: %s", o->json, strerror(errno));
}

/* All cases; *wrong is the number of wrong results. */
static cpa_status run_cases(cpa_bench_site *site, const cpa_bench *bench, const cpa_bench_case *cases, int n_cases,
                            int64_t *wrong, cpa_error *err) {
    bool root = site->control.rank == 0;
    char date[32];
    date_now(date, sizeof date);
    json_t *rows = json_array();
    cpa_status status = CPA_OK;
    for (int i = 0; i < n_cases; i++) {
        cpa_bench_row row;
        CPA_TRY_GOTO(run_case(site, bench, &cases[i], &row, err), out);
        *wrong += row.wrong;
        if (root && i == 0) print_preamble(site, bench, date);
        if (root) print_row(cases[i].name, &row);
        json_array_append_new(rows, row_to_json(cases[i].name, &row));
    }
    if (root && site->options.json[0]) status = write_json(site, bench, date, json_incref(rows), err);
    status = cpa_control_agree(&site->control, status, err);
out:
    json_decref(rows);
    return status;
}

static cpa_status open_device(cpa_bench_site *site, const cpa_placement *placement, cpa_error *err) {
    cpa_device_options options = cpa_placement_device(placement);
    options.threads = (int32_t)site->options.threads;
    CPA_TRY(cpa_device_open(&options, &site->device, err));
    return cpa_stream_create(site->device, &site->stream, err);
}

static cpa_status run_bench(cpa_bench_site *site, const cpa_bench *bench, const cpa_placement *placement,
                            int64_t *wrong, cpa_error *err) {
    cpa_bench_case cases[CPA_BENCH_MAX_CASES];
    const char *shapes = site->options.shapes[0] ? site->options.shapes : bench->default_shapes;
    int n_cases = cpa_bench_cases_parse(shapes, bench->n_dims, cases);
    if (n_cases == 0) {
        return cpa_fail(err, CPA_INVALID, "bench %s: --shapes: found '%s', expected at most %d of %s, such as %s",
                        bench->name, shapes, CPA_BENCH_MAX_CASES, bench->dims, bench->default_shapes);
    }
    if (site->control.size < bench->min_ranks) {
        return cpa_fail(err, CPA_INVALID, "bench %s: needs at least %d ranks, runs on %d; start it with mpirun -np",
                        bench->name, bench->min_ranks, site->control.size);
    }
    cpa_status status = CPA_OK;
    if (site->control.rank == 0 && site->options.json[0] && access(site->options.json, F_OK) == 0) {
        status = cpa_fail(err, CPA_INVALID, "bench: --json %s exists and is not overwritten", site->options.json);
    }
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    status = open_device(site, placement, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    return run_cases(site, bench, cases, n_cases, wrong, err);
}

static cpa_status find_bench(const char *name, const cpa_bench **out, cpa_error *err) {
    for (int i = 0; name && i < N_BENCHES; i++) {
        if (strcmp(name, benches[i]->name) == 0) {
            *out = benches[i];
            return CPA_OK;
        }
    }
    return cpa_fail(err, CPA_INVALID, "bench: found '%s', expected attend, merge or exchange (or --help)",
                    name ? name : "");
}

int cpa_bench_main(int argc, char **argv, const cpa_placement *placement) {
    cpa_bench_site site = {0};
    const cpa_bench *bench = NULL;
    const char *name = NULL;
    int64_t wrong = 0;
    cpa_error err = {0};
    cpa_status status = cpa_control_open(MPI_COMM_WORLD, &site.control, &err);
    bool opened = status == CPA_OK;
    if (opened) status = cpa_bench_options_parse(argc, argv, &site.options, &name, &err);
    bool help = status == CPA_OK && site.options.help;
    if (help && site.control.rank == 0) print_help();
    if (status == CPA_OK && !help) status = find_bench(name, &bench, &err);
    if (status == CPA_OK && !help) {
        if (site.options.threads == 0) site.options.threads = placement->threads;
        status = run_bench(&site, bench, placement, &wrong, &err);
    }
    if (status != CPA_OK && (!opened || site.control.rank == 0)) fprintf(stderr, "cp_attn: %s\n", err.message);
    cpa_stream_destroy(site.stream);
    cpa_device_close(site.device);
    if (opened) cpa_control_close(&site.control);
    return (int)(status != CPA_OK ? cpa_exit_code_of(status) : wrong ? CPA_EXIT_CHECK_FAILED : CPA_EXIT_DONE);
}
