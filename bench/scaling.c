#include "bench/scaling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "bench/inputs.h"
#include "bench/links.h"
#include "bench/memory.h"
#include "bench/report.h"
#include "bench/scaling_team.h"
#include "comm/limits.h"
#include "program/commands.h"
#include "program/output_file.h"

/* The share of a device's free memory that caches of decode may take; queries, staging and work space need some. */
static const double cache_share = 0.8;

/* How many of the sequences fit on a team. */
static int64_t sequences_that_fit(const cpa_bench_site *site, const int64_t *shape, int32_t ranks) {
    const cpa_bench_options *o = &site->options;
    double block = (double)(cpa_bench_block_bytes(o, CPA_SYNTH_K) + cpa_bench_block_bytes(o, CPA_SYNTH_V));
    double fit = cache_share * (double)site->memory_bytes * ranks / (block * (double)shape[2] / (double)o->block_size);
    return fit < (double)shape[0] ? (int64_t)fit : shape[0];
}

static cpa_status run_alone(cpa_bench_site *site, const cpa_bench_work *work, cpa_bench_team_result *result,
                            cpa_error *err) {
    cpa_comm *alone;
    CPA_TRY(cpa_comm_alone(&alone, err));
    cpa_status status = cpa_bench_team_run(site, alone, work, result, err);
    cpa_comm_destroy(alone);
    return status;
}

static double mean(const double *values, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += values[i];
    return sum / n;
}

/* By how much layers of which each waits for the slowest rank are longer than those of the slowest rank: what single
 * layers differ by, which an exchange does not add. */
static cpa_status compare_layers(cpa_bench_site *site, cpa_bench_team_result *alone, double *differ_s, cpa_error *err) {
    double slowest = alone->n_layers > 0 ? mean(alone->layer_s, alone->n_layers) : 0;
    CPA_TRY(cpa_control_max(&site->control, &slowest, 1, err));
    CPA_TRY(cpa_control_max(&site->control, alone->layer_s, CPA_BENCH_MARKED_LAYERS, err));
    *differ_s = alone->n_layers > 0 ? mean(alone->layer_s, alone->n_layers) - slowest : 0;
    return CPA_OK;
}

/* What one rank attends of a decode step, done by each rank for itself: the time of the slowest, what their layers
 * differ by, and what was checked, go to *result. */
static cpa_status run_shards(cpa_bench_site *site, const cpa_bench_work *together, cpa_bench_team_result *result,
                             cpa_error *err) {
    cpa_owner_map map = {site->control.size, (int32_t)site->options.interleave};
    cpa_bench_work shard = *together;
    cpa_bench_team_result alone = {0};
    shard.context = cpa_shard_len(map, 0, together->context); /* shard 0 has the most */
    shard.marks_layers = true;
    cpa_status status = run_alone(site, &shard, &alone, err);
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    double counts[2] = {alone.checked, alone.wrong};
    CPA_TRY(cpa_control_max(&site->control, &alone.time_s, 1, err));
    CPA_TRY(cpa_control_sum(&site->control, counts, 2, err));
    CPA_TRY(compare_layers(site, &alone, &result->differ_s, err));
    result->n_layers = alone.n_layers;
    result->shard_s = alone.time_s;
    result->checked += counts[0];
    result->wrong += counts[1];
    return CPA_OK;
}

/* Ranks that do the work together: the first ones. */
typedef struct bench_team {
    int32_t ranks;
    cpa_comm *comm;      /* of these ranks; NULL: this is none of them */
    cpa_control control; /* on it */
} bench_team;

/* The same works on as many ranks, and on one alone before. */
typedef struct bench_teams {
    bench_team teams[CPA_COMM_MAX_RANKS];
    int n;
} bench_teams;

/* The work of each team, and, behind that of one rank, its results, on every rank. */
typedef struct team_results {
    cpa_bench_work work[CPA_COMM_MAX_RANKS + 1];
    cpa_bench_team_result results[CPA_COMM_MAX_RANKS + 1];
} team_results;

/* What rank 0 has found out, on every rank. */
static cpa_status tell_result(cpa_bench_site *site, cpa_status status, cpa_bench_team_result *result, cpa_error *err) {
    CPA_TRY(cpa_control_agree(&site->control, status, err));
    return cpa_control_bcast(&site->control, result, sizeof *result, 0, err);
}

static cpa_status run_team(cpa_bench_site *site, const bench_team *team, const cpa_bench_work *work,
                           cpa_bench_team_result *result, cpa_error *err) {
    cpa_bench_site own = *site;
    own.control = team->control;
    CPA_TRY(cpa_bench_team_run(&own, team->comm, work, result, err));
    return work->new_tokens == 1 && work->algorithm == CPA_PASS_Q ? run_shards(&own, work, result, err) : CPA_OK;
}

/* The work on one rank alone and then on each team, while the other ranks wait. */
static cpa_status run_work(cpa_bench_site *site, const bench_teams *teams, team_results *r, cpa_error *err) {
    cpa_status status = CPA_OK;
    if (site->control.rank == 0) status = run_alone(site, &r->work[0], &r->results[0], err);
    CPA_TRY(tell_result(site, status, &r->results[0], err));
    for (int i = 0; i < teams->n; i++) {
        const bench_team *team = &teams->teams[i];
        status = team->comm ? run_team(site, team, &r->work[i + 1], &r->results[i + 1], err) : CPA_OK;
        CPA_TRY(tell_result(site, status, &r->results[i + 1], err));
    }
    return CPA_OK;
}

/* Rate of all ranks over that of one: work a second, so that a smaller batch on one rank compares. */
static double speedup_of(const cpa_bench_team_result *alone, const cpa_bench_team_result *r) {
    return r->flops / r->time_s / (alone->flops / alone->time_s);
}

/* Whether what exchanges add to the time of a rank's shares can be told. */
static bool is_comparable(const cpa_bench_site *site, const cpa_bench_team_result *r) {
    return r->shard_s > 0 && !site->shares_cores;
}

static void print_result(const cpa_bench_site *site, const cpa_bench_work *work, const cpa_bench_team_result *alone,
                         const cpa_bench_team_result *r) {
    char shape[64], added[32] = "-", differ[32] = "-";
    double each = r->time_s * r->ranks, speedup = speedup_of(alone, r);
    if (is_comparable(site, r)) snprintf(added, sizeof added, "%.2f", 1e6 * (r->time_s - r->shard_s));
    if (r->n_layers > 0) snprintf(differ, sizeof differ, "%.2f", 1e6 * r->differ_s);
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)work->sequences, (long long)work->new_tokens,
             (long long)work->context);
    printf("%8s %20s %6d %12.1f %8lld %11.2f %9.2f %9.2f %8.2f %8.3f %9.2f %10.2f %10s %11s %8.0f %7.0f\n", work->name,
           shape, r->ranks, 1e6 * r->time_s, (long long)r->iterations, 1e-9 * r->flops / each, 1e-9 * r->bytes / each,
           100 * r->bytes / each / site->read_bandwidth, speedup, speedup / r->ranks, 100 * r->exposed_s / r->time_s,
           r->bytes_sent / (1 << 20), added, differ, r->checked, r->wrong);
    fflush(stdout);
}

static json_t *result_to_json(const cpa_bench_site *site, const char *name, const cpa_bench_work *work,
                              const cpa_bench_team_result *alone, const cpa_bench_team_result *r) {
    double each = r->time_s * r->ranks, speedup = speedup_of(alone, r);
    return json_pack("{ss ss si sI sI sI sI sf sf sI sf sf sf sf sf sf sf sf so so so sI sI}", "shape", name, "work",
                     work->name, "ranks", r->ranks, "sequences", (json_int_t)work->sequences, "new_tokens",
                     (json_int_t)work->new_tokens, "context", (json_int_t)work->context, "chunk",
                     (json_int_t)work->chunk, "time_us", 1e6 * r->time_s, "enqueue_us", 1e6 * r->enqueue_s,
                     "iterations", (json_int_t)r->iterations, "gflops", 1e-9 * r->flops / each, "gbytes_per_s",
                     1e-9 * r->bytes / each, "share_of_bandwidth", r->bytes / each / site->read_bandwidth, "speedup",
                     speedup, "efficiency", speedup / r->ranks, "exposed_us", 1e6 * r->exposed_s, "exposed_share",
                     r->exposed_s / r->time_s, "bytes_sent", r->bytes_sent, "shard_us",
                     r->shard_s > 0 ? json_real(1e6 * r->shard_s) : json_null(), "added_us",
                     is_comparable(site, r) ? json_real(1e6 * (r->time_s - r->shard_s)) : json_null(), "differ_us",
                     r->n_layers > 0 ? json_real(1e6 * r->differ_s) : json_null(), "checked", (json_int_t)r->checked,
                     "wrong", (json_int_t)r->wrong);
}

static void print_heading(const cpa_bench_site *site) {
    printf(
        "# shape: sequences x new tokens x context, causal, one layer; time of the slowest rank, a median; rates of "
        "one\n"
        "# rank; speedup and efficiency against one rank alone; exposed: waiting for messages, of the time; sent by\n"
        "# all ranks in one layer; added: to attention over the shares of one rank by exchanges and merge; differ: of\n"
        "# that, what waiting for the slowest rank in each layer takes where nothing is exchanged\n");
    if (site->shares_cores)
        printf("# cores: the ranks of a host share them, so no speedup can be had, and what is added cannot be told\n");
    if (site->options.chunk) {
        printf("# prefill in steps of %lld tokens\n", (long long)site->options.chunk);
    }
    printf("#%7s %20s %6s %12s %8s %11s %9s %9s %8s %8s %9s %10s %10s %11s %8s %7s\n", "work", "shape", "ranks",
           "time (us)", "iters", "GFLOP/s", "GB/s", "% of read", "speedup", "effic.", "exposed %", "sent (MiB)",
           "added (us)", "differ (us)", "checked", "#wrong");
}

static void print_short_batch(const cpa_bench_work *wanted, const cpa_bench_work *alone,
                              const cpa_bench_work *together) {
    if (alone->sequences == wanted->sequences) return;
    printf("# memory: %lld of %lld sequences on one rank, %lld on all; speedup compares sequences a second\n",
           (long long)alone->sequences, (long long)wanted->sequences, (long long)together->sequences);
}

/* The memory that decides batches is that of the rank with the least; cores are shared where any rank shares them. */
static cpa_status agree_on_site(cpa_bench_site *site, cpa_error *err) {
    double most[2] = {-(double)site->memory_bytes, site->shares_cores};
    CPA_TRY(cpa_control_max(&site->control, most, 2, err));
    site->memory_bytes = (int64_t)-most[0];
    site->shares_cores = most[1] > 0;
    return CPA_OK;
}

static cpa_status measure_bandwidth(cpa_bench_site *site, cpa_error *err) {
    cpa_status status = cpa_bench_measure_bandwidth(site, err);
    cpa_bench_release_probe(site);
    return cpa_control_agree(&site->control, status, err);
}

/* One token each is decode, more are a prefill. */
static cpa_bench_work work_of(const cpa_bench_options *o, const int64_t *shape) {
    bool decode = shape[1] == 1;
    const int64_t chunk = o->chunk ? o->chunk : shape[1];
    return (cpa_bench_work){
        .name = decode ? "decode" : "prefill",
        .algorithm = o->algorithm != CPA_AUTO ? (cpa_algorithm)o->algorithm
                     : decode                 ? CPA_PASS_Q
                                              : CPA_PASS_KV,
        .sequences = shape[0],
        .new_tokens = shape[1],
        .context = shape[2],
        .chunk = chunk,
        .pass_q_tokens = decode ? 0 : (int64_t)(o->pass_q_share * (double)chunk),
    };
}

static cpa_status run_case(cpa_bench_site *site, const bench_teams *teams, const cpa_bench_case *one, json_t *rows,
                           int64_t *wrong, cpa_error *err) {
    static team_results r; /* too large for a small stack */
    bool root = site->control.rank == 0;
    site->options = one->options;
    const cpa_bench_work work = work_of(&one->options, one->shape);
    r = (team_results){.work = {work}};
    r.work[0].sequences = sequences_that_fit(site, one->shape, 1);
    if (r.work[0].sequences < 1) {
        return cpa_fail(err, CPA_INVALID, "bench scaling: a context of %lld tokens does not fit on one device",
                        (long long)work.context);
    }
    for (int i = 1; i <= teams->n; i++) {
        r.work[i] = work;
        r.work[i].sequences = sequences_that_fit(site, one->shape, teams->teams[i - 1].ranks);
    }
    CPA_TRY(run_work(site, teams, &r, err));
    if (root) print_short_batch(&work, &r.work[0], &r.work[teams->n]);
    for (int i = 0; i <= teams->n; i++) {
        *wrong += (int64_t)r.results[i].wrong;
        if (root) print_result(site, &r.work[i], &r.results[0], &r.results[i]);
        json_array_append_new(rows, result_to_json(site, one->name, &r.work[i], &r.results[0], &r.results[i]));
    }
    return CPA_OK;
}

/* ---- teams ---- */

/* More ranks are asked for than this job has: by which line they could be had. */
static cpa_status too_few_ranks(const cpa_bench_site *site, long wanted, cpa_error *err) {
    char line[256];
    return cpa_fail(
        err, CPA_INVALID,
        "bench scaling: --ranks: found '%.64s', expected numbers from 1 to the %d of the job; start it as %s",
        site->options.ranks, site->control.size,
        cpa_command_line((int)wanted, site->argc, site->argv, line, sizeof line));
}

/* The next number of --ranks, at *text, which moves behind it and its comma. */
static cpa_status read_ranks(const cpa_bench_site *site, const char **text, int32_t least, int32_t *out,
                             cpa_error *err) {
    char *end;
    const long ranks = strtol(*text, &end, 10);
    const char *last = strrchr(site->options.ranks, ',');
    const long most = strtol(last ? last + 1 : site->options.ranks, NULL, 10);
    if (most > site->control.size && most <= CPA_COMM_MAX_RANKS) return too_few_ranks(site, most, err);
    if (end == *text || (*end && *end != ',') || (*end && !end[1]) || ranks < least || ranks > site->control.size)
        return cpa_fail(err, CPA_INVALID,
                        "bench scaling: --ranks: found '%.64s', expected numbers from 1 to the %d of the job, each "
                        "larger than the one before",
                        site->options.ranks, site->control.size);
    *text = *end ? end + 1 : end;
    *out = (int32_t)ranks;
    return CPA_OK;
}

/* Teams of more than one rank: those of --ranks, or all. Collective; the caller closes them after a failure too. */
static cpa_status open_teams(cpa_bench_site *site, bench_teams *teams, cpa_error *err) {
    const char *text = site->options.ranks;
    char all[16];
    snprintf(all, sizeof all, "%d", site->control.size);
    if (!*text) text = all;
    for (int32_t before = 0; *text;) {
        bench_team *team = &teams->teams[teams->n];
        CPA_TRY(read_ranks(site, &text, before + 1, &team->ranks, err));
        before = team->ranks;
        if (team->ranks == 1) continue;
        if (team->ranks == site->control.size)
            team->comm = site->control.comm;
        else
            CPA_TRY(cpa_comm_first_ranks(site->control.comm, team->ranks, &team->comm, err));
        teams->n++;
        const cpa_status status = team->comm ? cpa_control_open(team->comm, &team->control, err) : CPA_OK;
        CPA_TRY(cpa_control_agree(&site->control, status, err));
    }
    return CPA_OK;
}

static void close_teams(const cpa_bench_site *site, bench_teams *teams) {
    for (int i = 0; i < teams->n; i++) {
        cpa_control_close(&teams->teams[i].control);
        if (teams->teams[i].comm != site->control.comm) cpa_comm_destroy(teams->teams[i].comm);
    }
}

/* ---- cases ---- */

/* The cases of --shapes, or those of --context, --batch and --decode-context. */
static cpa_status parse_cases(cpa_bench_site *site, cpa_bench_case *cases, int *n_cases, cpa_error *err) {
    const cpa_bench_options unresolved = site->options;
    cpa_bench_options *o = &site->options;
    char list[CPA_TEXT_BYTES];
    CPA_TRY(cpa_bench_options_resolve(o, site->backend, err));
    snprintf(list, sizeof list, "1x%lldx%lld,%lldx1x%lld", (long long)o->context, (long long)o->context,
             (long long)o->batch, (long long)o->decode_context);
    CPA_TRY(cpa_bench_cases_parse(o->shapes[0] ? o->shapes : list, 3, &unresolved, site->backend, cases, n_cases, err));
    for (int i = 0; i < *n_cases; i++) {
        const int64_t *shape = cases[i].shape;
        if (shape[1] > shape[2]) {
            return cpa_fail(err, CPA_INVALID, "bench scaling: %lld new tokens in a context of %lld",
                            (long long)shape[1], (long long)shape[2]);
        }
    }
    return CPA_OK;
}

static cpa_status run_cases(cpa_bench_site *site, const bench_teams *teams, const cpa_bench_case *cases, int n_cases,
                            int64_t *wrong, cpa_error *err) {
    const cpa_bench_options options = site->options;
    bool root = site->control.rank == 0;
    char date[CPA_BENCH_DATE_BYTES];
    cpa_bench_date(date);
    json_t *rows = json_array();
    cpa_status status = root && options.json[0] ? cpa_output_retire(options.json, err) : CPA_OK;
    status = cpa_control_agree(&site->control, status, err);
    if (root && status == CPA_OK) {
        cpa_bench_print_preamble(site, "scaling", date);
        print_heading(site);
    }
    for (int i = 0; status == CPA_OK && i < n_cases; i++) status = run_case(site, teams, &cases[i], rows, wrong, err);
    site->options = options;
    if (status == CPA_OK && root && options.json[0]) status = cpa_bench_write_json(site, "scaling", date, rows, err);
    json_decref(rows);
    return cpa_control_agree(&site->control, status, err);
}

cpa_status cpa_bench_scaling(cpa_bench_site *site, int64_t *wrong, cpa_error *err) {
    static bench_teams teams; /* too large for a small stack */
    int n_cases = 0;
    CPA_TRY(agree_on_site(site, err));
    cpa_bench_case *cases = calloc(CPA_BENCH_MAX_CASES, sizeof *cases);
    cpa_status status = cases ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for cases");
    if (status == CPA_OK) status = parse_cases(site, cases, &n_cases, err);
    if (status == CPA_OK) status = measure_bandwidth(site, err);
    if (status == CPA_OK && site->control.size > 1) status = cpa_bench_find_links(site, err);
    if (status == CPA_OK) status = open_teams(site, &teams, err);
    if (status == CPA_OK) status = run_cases(site, &teams, cases, n_cases, wrong, err);
    close_teams(site, &teams);
    free(cases);
    return status;
}
