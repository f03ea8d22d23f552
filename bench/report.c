#include "bench/report.h"

#include <stdio.h>
#include <time.h>

#include "base/check.h"
#include "comm/links.h"
#include "program/commands.h"
#include "program/json_put.h"
#include "program/links.h"

void cpa_bench_date(char date[CPA_BENCH_DATE_BYTES]) {
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, CPA_BENCH_DATE_BYTES, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}

/* NULL where they were not looked for. */
static const char *links_text(const cpa_bench_site *site, char *text, size_t size) {
    if (!site->links) return NULL;
    return cpa_links_describe(cpa_links_carrier(site->transport, site->control.comm), site->links, site->control.size,
                              text, size);
}

void cpa_bench_print_preamble(const cpa_bench_site *site, const char *name, const char *date) {
    const cpa_bench_options *o = &site->options;
    char links[512], command[4096];
    printf("# cp_attn %s bench %s, %s\n", cpa_version(), name, date);
    printf("# command: %s\n", cpa_command_line(site->control.size, site->argc, site->argv, command, sizeof command));
    printf("# device: %s\n", cpa_device_description(site->device));
    printf("# ranks %d, threads %lld, dtype %s, heads %lld/%lld, head dim %lld, block size %lld\n", site->control.size,
           (long long)o->threads, cpa_dtype_name((cpa_dtype)o->dtype), (long long)o->q_heads, (long long)o->kv_heads,
           (long long)o->k_dim, (long long)o->block_size);
    if (site->read_bandwidth > 0) {
        printf("# memory: %.1f GB/s read, %.1f GB/s copied (read and written), of one rank, measured in this run\n",
               1e-9 * site->read_bandwidth, 1e-9 * site->copy_bandwidth);
    }
    if (site->link_bandwidth > 0)
        printf("# link: %.1f GB/s from page-locked memory of the host, measured in this run\n",
               1e-9 * site->link_bandwidth);
    if (site->launch_s > 0) printf("# a launch: %.2f us, of a kernel that reads nothing\n", 1e6 * site->launch_s);
    if (links_text(site, links, sizeof links)) printf("# transport that the program would use: %s\n", links);
}

static double floor_bandwidth(const cpa_bench_site *site, const cpa_bench *bench) {
    return bench->floor == CPA_BENCH_READ   ? site->read_bandwidth
           : bench->floor == CPA_BENCH_COPY ? site->copy_bandwidth
           : bench->floor == CPA_BENCH_LINK ? site->link_bandwidth
                                            : 0;
}

void cpa_bench_print_heading(const cpa_bench *bench, const cpa_bench_row *first) {
    static const char *const shares[] = {"", "% of read", "% of copy", "% of link"};
    printf("# shape: %s; figures of one rank; time is the median; checked: %s\n", bench->dims, bench->checked);
    printf("#%49s %12s %8s", "shape", "time (us)", "iters");
    if (first->flops >= 0) printf(" %11s", "GFLOP/s");
    if (bench->has_bus_bandwidth)
        printf(" %12s %12s", "algbw (GB/s)", "busbw (GB/s)");
    else if (first->bytes >= 0)
        printf(" %9s", "GB/s");
    if (bench->floor != CPA_BENCH_NO_FLOOR) printf(" %9s", shares[bench->floor]);
    if (first->kernels[0]) printf(" %20s", "kernels");
    printf(" %10s %7s\n", "checked", "#wrong");
}

/* Of bytes that a rank sends to the others, the rate of those that it has for all ranks. */
static double algorithm_bandwidth(const cpa_bench_site *site, const cpa_bench_row *row) {
    return row->bytes / row->time_s * site->control.size / (site->control.size - 1);
}

/* Their names, between commas; NULL: the benchmark tells none. */
static const char *kernels_text(const cpa_bench_row *row, char *text, size_t size) {
    size_t used = 0;
    for (int i = 0; i < CPA_BENCH_MOST_KERNELS && row->kernels[i] && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? "," : "", row->kernels[i]);
    return used > 0 ? text : NULL;
}

static double share_left_out(const cpa_bench_row *row) {
    return row->tiles[0] > 0 ? (double)row->tiles[1] / (double)row->tiles[0] : 0;
}

void cpa_bench_print_row(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                         const cpa_bench_row *row) {
    char kernels[128];
    printf("%50s %12.1f %8lld", name, 1e6 * row->time_s, (long long)row->iterations);
    if (row->flops >= 0) printf(" %11.2f", 1e-9 * row->flops / row->time_s);
    if (bench->has_bus_bandwidth)
        printf(" %12.2f %12.2f", 1e-9 * algorithm_bandwidth(site, row), 1e-9 * row->bytes / row->time_s);
    else if (row->bytes >= 0)
        printf(" %9.2f", 1e-9 * row->bytes / row->time_s);
    if (bench->floor != CPA_BENCH_NO_FLOOR)
        printf(" %9.2f", 100 * row->bytes / row->time_s / floor_bandwidth(site, bench));
    if (row->kernels[0]) printf(" %20s", kernels_text(row, kernels, sizeof kernels));
    printf(" %10lld %7lld\n", (long long)row->checked, (long long)row->wrong);
    if (row->tiles[0] > 0) printf("#%49s %12.3f of the tiles left out\n", "", share_left_out(row));
    fflush(stdout);
}

void cpa_bench_print_average(double bus_bandwidths, int n_rows) {
    printf("# average busbw: %.2f GB/s\n", 1e-9 * bus_bandwidths / n_rows);
}

static json_t *rate_to_json(double per_second) {
    return per_second <= 0 ? json_null() : json_real(1e-9 * per_second);
}

json_t *cpa_bench_row_to_json(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                              const cpa_bench_row *row) {
    const cpa_bench_options *o = &site->options;
    double floor = floor_bandwidth(site, bench);
    char kernels[128];
    return json_pack(
        "{ss ss sf sf sI so so so so so sI sI ss? ss? so}", "shape", name, "dtype", cpa_dtype_name((cpa_dtype)o->dtype),
        "time_us", 1e6 * row->time_s, "enqueue_us", 1e6 * row->enqueue_s, "iterations", (json_int_t)row->iterations,
        "gflops", rate_to_json(row->flops / row->time_s), "gbytes_per_s", rate_to_json(row->bytes / row->time_s),
        "algbw_gbytes_per_s", bench->has_bus_bandwidth ? rate_to_json(algorithm_bandwidth(site, row)) : json_null(),
        "busbw_gbytes_per_s", bench->has_bus_bandwidth ? rate_to_json(row->bytes / row->time_s) : json_null(),
        "share_of_bandwidth", floor > 0 ? json_real(row->bytes / row->time_s / floor) : json_null(), "checked",
        (json_int_t)row->checked, "wrong", (json_int_t)row->wrong, "kernels",
        kernels_text(row, kernels, sizeof kernels), "why_no_faster", row->why, "tiles_left_out",
        row->tiles[0] > 0 ? json_real(share_left_out(row)) : json_null());
}

cpa_status cpa_bench_write_json(const cpa_bench_site *site, const char *name, const char *date, json_t *rows,
                                cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    char links[512], command[4096];
    json_t *root = json_pack(
        "{ss ss ss ss si sI ss sI sI sI sI so so so sf ss* ss* sO}", "version", cpa_version(), "benchmark", name,
        "date", date, "device", cpa_device_description(site->device), "ranks", site->control.size, "threads",
        (json_int_t)o->threads, "dtype", cpa_dtype_name((cpa_dtype)o->dtype), "q_heads", (json_int_t)o->q_heads,
        "kv_heads", (json_int_t)o->kv_heads, "head_dim", (json_int_t)o->k_dim, "block_size", (json_int_t)o->block_size,
        "read_gbytes_per_s", rate_to_json(site->read_bandwidth), "copy_gbytes_per_s",
        rate_to_json(site->copy_bandwidth), "link_gbytes_per_s", rate_to_json(site->link_bandwidth), "launch_us",
        1e6 * site->launch_s, "transport", site->transport ? site->transport->name : NULL, "links",
        links_text(site, links, sizeof links), "rows", rows);
    const char *line = cpa_command_line(site->control.size, site->argc, site->argv, command, sizeof command);
    if (root && cpa_json_put_text(root, "command", line) != 0) {
        json_decref(root);
        root = NULL;
    }
    if (!root) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for the JSON");
    cpa_status status = cpa_json_write(o->json, root, err);
    json_decref(root);
    return status;
}
