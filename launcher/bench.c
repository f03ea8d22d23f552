/* The engine of `cp_attn bench`: options, the loop that times a benchmark's cases, the table and its JSON. */
#include "launcher/bench.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"

enum {
    MAX_CASES = 64,
    MAX_ITERATIONS = 100000,
    MIN_ITERATIONS = 3,
};

typedef struct bench_case {
    char name[48];
    int64_t shape[CPA_BENCH_MAX_DIMS];
} bench_case;

static const cpa_bench *const benches[] = {&cpa_bench_attend, &cpa_bench_merge, &cpa_bench_exchange};
static const char *const dtype_names[CPA_DTYPE_COUNT] = {"fp32", "bf16", "fp16"};

static void print_help(void) {
    printf(
        "usage: cp_attn bench attend|merge|exchange [options]\n"
        "  --shapes LIST    cases, comma-separated; a number may end in K, M or G (powers of 1024)\n");
    for (size_t i = 0; i < sizeof benches / sizeof *benches; i++) {
        printf("                     %s: %s; default %s\n", benches[i]->name, benches[i]->dims,
               benches[i]->default_shapes);
    }
    printf(
        "  --dtype TYPE     fp32, bf16 or fp16; default fp32\n"
        "  --heads Q/KV     query and KV heads; default 8/2\n"
        "  --head-dim N     width of a head; default 128\n"
        "  --block-size N   tokens in a block of the KV cache; default 16\n"
        "  --threads N      threads of a rank; default: what the program would use\n"
        "  --min-time S     repeat each case for at least S seconds; default 0.5\n"
        "  --iters N        repeat each case N times instead\n"
        "  --json FILE      write the table to FILE as well, which must not exist\n"
        "exit code: 0 done, 1 a result was wrong, 2 bad usage, 3 a fault at run time\n");
}

/* Reads digits with an optional K, M or G from *text and moves it past them. */
static bool read_count(const char **text, int64_t *out) {
    char *end;
    if (**text < '0' || **text > '9') return false;
    errno = 0;
    long long value = strtoll(*text, &end, 10);
    int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (errno || value <= 0 || value > (INT64_MAX >> shift)) return false;
    *out = (int64_t)value << shift;
    *text = end + (shift > 0);
    return true;
}

static bool read_int32(const char *text, int32_t max, int32_t *out) {
    int64_t value;
    if (!read_count(&text, &value) || *text || value > max) return false;
    *out = (int32_t)value;
    return true;
}

static bool read_heads(const char *text, cpa_bench_options *options) {
    int64_t q, kv;
    if (!read_count(&text, &q) || *text++ != '/' || !read_count(&text, &kv) || *text) return false;
    if (q > 1024 || q % kv != 0) return false;
    options->q_heads = (int32_t)q;
    options->kv_heads = (int32_t)kv;
    return true;
}

static bool read_dtype(const char *text, cpa_dtype *out) {
    for (int i = 0; i < CPA_DTYPE_COUNT; i++) {
        if (strcmp(text, dtype_names[i]) == 0) {
            *out = (cpa_dtype)i;
            return true;
        }
    }
    return false;
}

static cpa_status parse_cases(const cpa_bench *bench, const char *list, bench_case *cases, int *n_cases,
                              cpa_error *err) {
    const char *text = list;
    for (*n_cases = 0; *n_cases < MAX_CASES; text++) {
        bench_case *one = &cases[*n_cases];
        const char *begin = text;
        bool ok = true;
        for (int d = 0; ok && d < bench->n_dims; d++) {
            ok = read_count(&text, &one->shape[d]) && (d + 1 == bench->n_dims || *text++ == 'x');
        }
        if (!ok || (*text && *text != ',') || text - begin >= (ptrdiff_t)sizeof one->name) {
            return cpa_fail(err, CPA_INVALID, "bench %s: --shapes %s: expected %s, comma-separated, such as %s",
                            bench->name, list, bench->dims, bench->default_shapes);
        }
        snprintf(one->name, sizeof one->name, "%.*s", (int)(text - begin), begin);
        ++*n_cases;
        if (!*text) return CPA_OK;
    }
    return cpa_fail(err, CPA_INVALID, "bench %s: --shapes lists more than %d cases", bench->name, MAX_CASES);
}

/* One option; false if its value is not what print_help says. */
static bool apply_option(int option, const char *value, cpa_bench_options *options) {
    char *end;
    switch (option) {
        case 's': options->shapes = value; return true;
        case 'd': return read_dtype(value, &options->dtype);
        case 'H': return read_heads(value, options);
        case 'D': return read_int32(value, CPA_MAX_HEAD_DIM, &options->head_dim);
        case 'B':
            return read_int32(value, 1 << 20, &options->block_size) &&
                   (options->block_size & (options->block_size - 1)) == 0;
        case 't': return read_int32(value, 4096, &options->threads);
        case 'm':
            options->min_time_s = strtod(value, &end);
            return end != value && !*end && options->min_time_s >= 0 && options->min_time_s <= 3600;
        case 'i': return read_count(&value, &options->iterations) && !*value && options->iterations <= MAX_ITERATIONS;
        case 'j': options->json = value; return *value != '\0';
        default: return false;
    }
}

/* *help is set if the command line asks for it. */
static cpa_status parse_options(int argc, char **argv, cpa_bench_options *options, const cpa_bench **bench, bool *help,
                                cpa_error *err) {
    static const struct option table[] = {
        {"shapes", required_argument, NULL, 's'},
        {"dtype", required_argument, NULL, 'd'},
        {"heads", required_argument, NULL, 'H'},
        {"head-dim", required_argument, NULL, 'D'},
        {"block-size", required_argument, NULL, 'B'},
        {"threads", required_argument, NULL, 't'},
        {"min-time", required_argument, NULL, 'm'},
        {"iters", required_argument, NULL, 'i'},
        {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option, index = 0;
    opterr = 0;
    optind = 0; /* start afresh: the program may have used getopt before */
    while ((option = getopt_long(argc, argv, ":", table, &index)) != -1) {
        if (option == 'h') {
            *help = true;
            return CPA_OK;
        }
        if (option == '?' || option == ':') {
            return cpa_fail(err, CPA_INVALID, "bench: %s '%s'; see cp_attn bench --help",
                            option == ':' ? "no value after" : "unknown option", argv[optind - 1]);
        }
        if (!apply_option(option, optarg, options)) {
            return cpa_fail(err, CPA_INVALID, "bench: --%s %s is not what cp_attn bench --help asks for",
                            table[index].name, optarg);
        }
    }
    for (size_t i = 0; optind == argc - 1 && i < sizeof benches / sizeof *benches; i++) {
        if (strcmp(argv[optind], benches[i]->name) == 0) *bench = benches[i];
    }
    if (!*bench) return cpa_fail(err, CPA_INVALID, "bench: expected one of attend, merge, exchange");
    return CPA_OK;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the prepared case until it has been timed long enough; ranks begin together, and the slowest counts. */
static cpa_status time_case(cpa_bench_site *site, const cpa_bench *bench, void *state, cpa_bench_row *row,
                            cpa_error *err) {
    double *times = malloc(MAX_ITERATIONS * sizeof *times);
    cpa_status status = cpa_control_agree(
        &site->control, times ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for times"), err);
    double total = 0;
    int64_t n = -1; /* the first run warms up */
    while (status == CPA_OK && n < MAX_ITERATIONS) {
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

static cpa_status run_case(cpa_bench_site *site, const cpa_bench *bench, const bench_case *one, cpa_bench_row *row,
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
    printf("# ranks %d, threads %d, dtype %s, heads %d/%d, head dim %d, block size %d\n", site->control.size,
           o->threads, dtype_names[o->dtype], o->q_heads, o->kv_heads, o->head_dim, o->block_size);
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
    json_t *root =
        json_pack("{ss ss ss ss si si ss si si si si so}", "version", cpa_version(), "benchmark", bench->name, "date",
                  date, "device", cpa_device_description(site->device), "ranks", site->control.size, "threads",
                  o->threads, "dtype", dtype_names[o->dtype], "q_heads", o->q_heads, "kv_heads", o->kv_heads,
                  "head_dim", o->head_dim, "block_size", o->block_size, "rows", rows);
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
static cpa_status run_cases(cpa_bench_site *site, const cpa_bench *bench, const bench_case *cases, int n_cases,
                            int64_t *wrong, cpa_error *err) {
    bool root = site->control.rank == 0;
    char date[32];
    date_now(date, sizeof date);
    json_t *rows = json_array();
    cpa_status status = CPA_OK;
    if (root) print_preamble(site, bench, date);
    for (int i = 0; i < n_cases; i++) {
        cpa_bench_row row;
        CPA_TRY_GOTO(run_case(site, bench, &cases[i], &row, err), out);
        *wrong += row.wrong;
        if (root) print_row(cases[i].name, &row);
        json_array_append_new(rows, row_to_json(cases[i].name, &row));
    }
    if (root && site->options.json) status = write_json(site, bench, date, json_incref(rows), err);
    status = cpa_control_agree(&site->control, status, err);
out:
    json_decref(rows);
    return status;
}

static cpa_status open_device(cpa_bench_site *site, const cpa_placement *placement, cpa_error *err) {
    cpa_device_options options = cpa_placement_device(placement);
    options.threads = site->options.threads;
    CPA_TRY(cpa_device_open(&options, &site->device, err));
    return cpa_stream_create(site->device, &site->stream, err);
}

static cpa_status run_bench(cpa_bench_site *site, const cpa_bench *bench, const cpa_placement *placement,
                            int64_t *wrong, cpa_error *err) {
    bench_case cases[MAX_CASES];
    int n_cases;
    const char *shapes = site->options.shapes ? site->options.shapes : bench->default_shapes;
    CPA_TRY(parse_cases(bench, shapes, cases, &n_cases, err));
    if (site->control.size < bench->min_ranks) {
        return cpa_fail(err, CPA_INVALID, "bench %s: needs at least %d ranks, runs on %d; start it with mpirun -np",
                        bench->name, bench->min_ranks, site->control.size);
    }
    cpa_status status = CPA_OK;
    if (site->control.rank == 0 && site->options.json && access(site->options.json, F_OK) == 0) {
        status = cpa_fail(err, CPA_INVALID, "bench: --json %s exists and is not overwritten", site->options.json);
    }
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    status = open_device(site, placement, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    return run_cases(site, bench, cases, n_cases, wrong, err);
}

int cpa_bench_main(int argc, char **argv, const cpa_placement *placement) {
    cpa_bench_site site = {
        .options = {.dtype = CPA_F32,
                    .q_heads = 8,
                    .kv_heads = 2,
                    .head_dim = 128,
                    .block_size = 16,
                    .threads = placement->threads,
                    .min_time_s = 0.5},
    };
    const cpa_bench *bench = NULL;
    int64_t wrong = 0;
    bool help = false;
    cpa_error err = {0};
    cpa_status status = cpa_control_open(MPI_COMM_WORLD, &site.control, &err);
    bool opened = status == CPA_OK;
    if (opened) status = parse_options(argc, argv, &site.options, &bench, &help, &err);
    if (help && site.control.rank == 0) print_help();
    if (status == CPA_OK && !help) status = run_bench(&site, bench, placement, &wrong, &err);
    if (status != CPA_OK && (!opened || site.control.rank == 0)) fprintf(stderr, "cp_attn: %s\n", err.message);
    cpa_stream_destroy(site.stream);
    cpa_device_close(site.device);
    if (opened) cpa_control_close(&site.control);
    return status == CPA_INVALID ? 2 : status != CPA_OK ? 3 : wrong > 0;
}
