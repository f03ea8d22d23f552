/* Latencies, the report and the result file of a made-up run. */
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher/output/report.h"
#include "launcher/output/result_json.h"
#include "program/metrics_json.h"
#include "program/output_file.h"
#include "program/progress_line.h"
#include "tests/fixtures/unit.h"

/* Three requests that arrive at 1 s: token times in seconds. */
static void add_requests(cpa_metrics *metrics) {
    static const double times[3][3] = {{1.5, 1.75, 2.25}, {2.0, 3.0, 0}, {1.25, 0, 0}};
    static const int64_t counts[3] = {3, 2, 1};
    for (int i = 0; i < 3; i++) {
        cpa_request_result result = {.id = (uint64_t)i + 1,
                                     .prompt_tokens = 10 * (i + 1),
                                     .output_tokens = counts[i],
                                     .arrival_s = 1,
                                     .first_token_s = times[i][0],
                                     .finish_s = times[i][counts[i] - 1],
                                     .token_s = times[i]};
        cpa_metrics_add(metrics, &result);
    }
}

static void latencies_have_their_usual_meaning(void) {
    cpa_metrics metrics = {.options = {.percentiles = {99, 0, 25}, .n_percentiles = 3}};
    add_requests(&metrics);
    CU_ASSERT_EQUAL(metrics.completed, 3);
    CU_ASSERT_EQUAL(metrics.input_tokens, 60);
    CU_ASSERT_EQUAL(metrics.output_tokens, 6);

    cpa_summary ttft = cpa_metrics_summary(&metrics, CPA_TTFT); /* 500, 1000, 250 */
    CU_ASSERT_EQUAL(ttft.count, 3);
    CU_ASSERT_DOUBLE_EQUAL(ttft.mean, 1750.0 / 3, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(ttft.median, 500, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(ttft.percentiles[0], 500 + 0.98 * 500, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(ttft.percentiles[1], 250, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(ttft.percentiles[2], 375, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(ttft.std, 311.80478223116, 1e-6);

    cpa_summary tpot = cpa_metrics_summary(&metrics, CPA_TPOT); /* 375, 1000 */
    CU_ASSERT_EQUAL(tpot.count, 2);
    CU_ASSERT_DOUBLE_EQUAL(tpot.median, 687.5, 1e-9);
    cpa_summary itl = cpa_metrics_summary(&metrics, CPA_ITL); /* 250, 500, 1000 */
    CU_ASSERT_EQUAL(itl.count, 3);
    CU_ASSERT_DOUBLE_EQUAL(itl.median, 500, 1e-9);
    cpa_summary e2e = cpa_metrics_summary(&metrics, CPA_E2E); /* 1250, 2000, 250 */
    CU_ASSERT_DOUBLE_EQUAL(e2e.median, 1250, 1e-9);
    cpa_metrics_release(&metrics);
}

/* A server that runs for months keeps the last latencies alone. */
static void a_window_keeps_the_last_samples(void) {
    cpa_metrics metrics = {.window = 2};
    for (int i = 0; i < 100; i++) add_requests(&metrics);
    CU_ASSERT_EQUAL(metrics.completed, 300);
    CU_ASSERT_EQUAL(metrics.n_records, 0);
    CU_ASSERT_EQUAL(metrics.samples[CPA_ITL].capacity >= 2 && metrics.samples[CPA_ITL].capacity < 100, 1);
    const cpa_summary ttft = cpa_metrics_summary(&metrics, CPA_TTFT); /* 1000, 250 */
    CU_ASSERT_EQUAL(ttft.count, 2);
    CU_ASSERT_DOUBLE_EQUAL(ttft.mean, 625, 1e-9);
    json_t *root = json_object();
    CU_ASSERT_EQUAL(cpa_metrics_put(root, &metrics, 300, 10, 1), 0);
    CU_ASSERT(json_is_null(json_object_get(root, "ttfts")));
    CU_ASSERT(json_is_null(json_object_get(root, "max_concurrent_requests")));
    json_decref(root);
    cpa_metrics_release(&metrics);
}

static void a_run_without_tokens_has_zeros(void) {
    cpa_metrics metrics = {0};
    cpa_summary summary = cpa_metrics_summary(&metrics, CPA_ITL);
    CU_ASSERT_EQUAL(summary.count, 0);
    CU_ASSERT_EQUAL(summary.mean, 0);
    CU_ASSERT_EQUAL(summary.std, 0);
    CU_ASSERT_EQUAL(cpa_metrics_peaks(&metrics).requests, 0);
    cpa_metrics_release(&metrics);
}

/* A request of `n` output tokens that come every `gap` seconds after its start. */
static void add_regular(cpa_metrics *metrics, double start, double gap, int64_t n) {
    double times[8];
    for (int64_t i = 0; i < n; i++) times[i] = start + gap * (double)(i + 1);
    const cpa_request_times request = {
        .id = 9, .prompt_tokens = 5, .output_tokens = n, .start_s = start, .token_s = times, .n_times = n};
    cpa_metrics_add_request(metrics, &request);
}

/* Intervals that only touch do not overlap; tokens are counted by seconds after the first start. */
static void peaks_are_those_of_completed_requests(void) {
    cpa_metrics metrics = {0};
    add_regular(&metrics, 10, 0.25, 4);   /* 10 .. 11, its last token in the next second */
    add_regular(&metrics, 11, 0.5, 2);    /* 11 .. 12 */
    add_regular(&metrics, 10.5, 0.25, 1); /* 10.5 .. 10.75 */
    add_regular(&metrics, 10.6, 0.25, 1); /* 10.6 .. 10.85 */
    const cpa_request_times lost = {.start_s = 10.6, .error = "lost"};
    cpa_metrics_add_request(&metrics, &lost);
    const cpa_peaks peaks = cpa_metrics_peaks(&metrics);
    CU_ASSERT_EQUAL(peaks.requests, 3);
    CU_ASSERT_EQUAL(peaks.tokens_per_s, 5);
    CU_ASSERT_EQUAL(metrics.failed, 1);
    cpa_metrics_release(&metrics);
}

static void goodput_counts_requests_within_every_objective(void) {
    cpa_metrics metrics = {0};
    cpa_error err;
    CU_ASSERT_EQUAL(cpa_goodput_parse("x", "ttft:1000 e2el:1250", &metrics.options, &err), CPA_OK);
    add_requests(&metrics); /* TTFT 500, 1000, 250; E2E 1250, 2000, 250 */
    CU_ASSERT_EQUAL(metrics.good, 2);
    cpa_metrics_release(&metrics);
    CU_ASSERT_EQUAL(cpa_goodput_parse("x", "tpot:700", &metrics.options, &err), CPA_OK);
    add_requests(&metrics); /* TPOT 375, 1000, none */
    CU_ASSERT_EQUAL(metrics.good, 2);
    cpa_metrics_release(&metrics);
}

static void wishes_that_make_no_sense_are_refused(void) {
    static const char *const percentiles[] = {
        "", "99,", ",99", "101", "-1", "nan", "9;5", "x", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17"};
    static const char *const objectives[] = {"ttft",  "ttft:", "ttft:0",  "ttft:-1",
                                             "itl:5", "x:1",   "ttft:1x", "ttft:inf"};
    cpa_metrics_options options = {.n_percentiles = 7};
    cpa_error err;
    for (size_t i = 0; i < sizeof percentiles / sizeof percentiles[0]; i++) {
        CU_ASSERT_EQUAL(cpa_percentiles_parse("--percentiles", percentiles[i], &options, &err), CPA_INVALID);
        CU_ASSERT_EQUAL(strncmp(err.message, "--percentiles: found '", 22), 0);
    }
    for (size_t i = 0; i < sizeof objectives / sizeof objectives[0]; i++)
        CU_ASSERT_EQUAL(cpa_goodput_parse("--goodput", objectives[i], &options, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(options.n_percentiles, 7);
    CU_ASSERT_FALSE(options.has_goodput);
}

/* A run of four requests of which three were completed. */
static const cpa_link two_links[4] = {{.kind = CPA_LINK_UNKNOWN},
                                      {.kind = CPA_LINK_NVLINK, .nvlinks = 18, .bandwidth = 2.5e11},
                                      {.kind = CPA_LINK_NVLINK, .nvlinks = 18, .bandwidth = 2.5e11}};

static cpa_outcome make_outcome(cpa_settings *settings, cpa_model_file *model, cpa_workload *workload,
                                cpa_metrics *metrics) {
    char name[] = "cp_attn";
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(1, (char *[]){name}, settings, &err), CPA_OK);
    cpa_model_small(model);
    model->shape.attention.kv_dtype = CPA_BF16;
    *workload = (cpa_workload){.count = 4, .title = "four requests"};
    *metrics = (cpa_metrics){.options = {.percentiles = {99}, .n_percentiles = 1}};
    add_requests(metrics);
    return (cpa_outcome){
        .settings = settings,
        .model = model,
        .workload = workload,
        .device = "a device",
        .transport = "peer",
        .links = two_links,
        .cp_size = 2,
        .interleave = 16,
        .block_bytes = 4096,
        .metrics = metrics,
        .stats = {.steps = 7,
                  .duration_s = 4,
                  .chunks_pass_kv = 11,
                  .chunks_pass_q = 13,
                  .choices = "pass-kv 11 (its exchange hides), pass-q 13 (decode)",
                  .planner_flops = 2e9,
                  .planner_bandwidth = 3e9,
                  .overlap_tokens = 640,
                  .bytes_sent = 3 << 20,
                  .row_bytes_sent = 2 << 20,
                  .index_bytes_sent = 1 << 20,
                  .exposed_comm_s = 0.0125,
                  .imbalance = 1.25,
                  .plain_rows = 77,
                  .decode_kernels = "latent",
                  .prefill_kernels = "hopper, portable",
                  .staging_bytes = 2048,
                  .staging_bound = 64 << 20,
                  .kv_blocks = 100,
                  .kv_peak = 42,
                  .kv_groups = 1,
                  .kv_group = {{.layers = 4, .block_bytes = 4096, .blocks = 100, .peak = 42}},
                  .preemptions = 5,
                  .ring_device_bytes = 1 << 20,
                  .ring_bytes_read = 5 << 20,
                  .ring_timed_bytes = 4000000,
                  .ring_copy_s = 0.002,
                  .ring_waited_s = 0.0035,
                  .sparse_host_bytes = 3 << 20,
                  .drafted_chunks = 10,
                  .draft_tokens = 40,
                  .accepted_tokens = 15,
                  .verify_rows = 1234,
                  .verify_violations = 1,
                  .verify_max_error = 0.5,
                  .verify_s = 0.75,
                  .selection_rows = 1000,
                  .selection_mass_left_out_mean = 0.0625,
                  .selection_mass_left_out_max = 0.375,
                  .sparse_blocks_kept = 25,
                  .sparse_blocks_seen = 100,
                  .sparse_s = 1.5,
                  .output_digest = 0xabcdef},
        .checked_logits = 1,
        .logits = {.tokens = 64, .violations = 2, .turned = 3, .max_error = 0.25},
    };
}

static void the_report_names_every_figure(void) {
    static const char *const figures[] = {"3 of 4 completed in 4.00 s and 7 steps",
                                          "TTFT",
                                          "TPOT",
                                          "ITL",
                                          "E2E",
                                          "pass-kv 11 (its exchange hides), pass-q 13 (decode)",
                                          "from 640 new tokens",
                                          "3.0 MiB sent",
                                          "staging 2.0 KiB of 64.0 MiB",
                                          "12.5 ms",
                                          "1.25",
                                          "decode by latent; prefill by hopper, portable",
                                          "77 rows attended without tensor cores",
                                          "peak 42 of 100 blocks",
                                          "5 preemptions",
                                          "5.0 MiB read through 1.0 MiB of device memory, at 2.0 GB/s, waited for 3.5 "
                                          "ms",
                                          "40 tokens, 15 accepted (37.5 %), 2.50 tokens a request",
                                          "1234 rows in 0.75 s, 1 violations, largest error 0.5",
                                          "1000 of these rows attend chosen keys, which leave out 0.0625 of their "
                                          "softmax on average, 0.375 at most",
                                          "prompts attend 0.25 of the blocks of keys that they see, estimated in 1.5 s",
                                          "64 tokens compared with a plain forward, 2 violations, 3 right by another "
                                          "choice of experts, largest error 0.25",
                                          "0000000000abcdef",
                                          "four requests",
                                          "a device",
                                          "peer; 1 pair of ranks joined by NVLink (18 links) at 250.00 GB/s each way"};
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    cpa_report_preamble(&outcome, file);
    cpa_report_print(&outcome, file);
    fclose(file);
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
        CU_ASSERT_PTR_NOT_NULL(strstr(text, figures[i]));
        if (!strstr(text, figures[i])) printf("missing: %s\n", figures[i]);
    }
    free(text);
    cpa_metrics_release(&metrics);
}

/* The number at root[object][key], or at root[key] when object is NULL; -1 if there is none. */
static double number_at(const json_t *root, const char *object, const char *key) {
    const json_t *from = object ? json_object_get(root, object) : root;
    const json_t *value = json_object_get(from, key);
    return json_is_number(value) ? json_number_value(value) : -1;
}

/* The result file of a run. */
static json_t *result_of(const cpa_outcome *outcome) {
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_result_json_write("report-test.json", outcome, &err), CPA_OK);
    json_t *root = json_load_file("report-test.json", 0, NULL);
    unlink("report-test.json");
    return root;
}

static void the_result_file_has_the_keys_of_vllm_and_ours(void) {
    static const struct {
        const char *object, *key;
        double value;
    } expected[] = {
        {NULL, "completed", 3},
        {NULL, "failed", 1},
        {NULL, "duration", 4},
        {NULL, "total_input_tokens", 60},
        {NULL, "total_output_tokens", 6},
        {NULL, "request_throughput", 0.75},
        {NULL, "output_throughput", 1.5},
        {NULL, "total_token_throughput", 16.5},
        {NULL, "mean_ttft_ms", 1750.0 / 3},
        {NULL, "median_ttft_ms", 500},
        {NULL, "p99_ttft_ms", 990},
        {NULL, "std_ttft_ms", 311.80478223116},
        {NULL, "median_tpot_ms", 687.5},
        {NULL, "median_itl_ms", 500},
        {NULL, "median_e2el_ms", 1250},
        {"verify", "rows", 1234},
        {"verify", "violations", 1},
        {"verify", "max_error", 0.5},
        {"verify", "seconds", 0.75},
        {"verify", "selection_rows", 1000},
        {"verify", "selection_mass_left_out_mean", 0.0625},
        {"verify", "selection_mass_left_out_max", 0.375},
        {"logits", "tokens", 64},
        {"logits", "violations", 2},
        {"logits", "other_experts", 3},
        {"logits", "max_error", 0.25},
        {"cp", "size", 2},
        {"cp", "pass_kv", 11},
        {"cp", "pass_q", 13},
        {"cp", "bytes_sent", 3 << 20},
        {"cp", "row_bytes_sent", 2 << 20},
        {"cp", "index_bytes_sent", 1 << 20},
        {"cp", "exposed_comm_ms", 12.5},
        {"cp", "imbalance", 1.25},
        {"cp", "sparse_s", 1.5},
        {"cp", "plain_rows", 77},
        {"cp", "staging_bytes", 2048},
        {"kv", "blocks", 100},
        {"kv", "peak", 42},
        {"kv", "preemptions", 5},
        {"kv", "ring_device_bytes", 1 << 20},
        {"kv", "ring_bytes_read", 5 << 20},
        {"kv", "ring_copy_ms", 2},
        {"kv", "ring_waited_ms", 3.5},
        {"cp", "sparse_host_bytes", 3 << 20},
        {"spec_decode", "num_drafts", 10},
        {"spec_decode", "draft_tokens", 40},
        {"spec_decode", "accepted_tokens", 15},
        {"spec_decode", "acceptance_rate", 0.375},
    };
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    strcpy(model.name, "not \xff UTF-8");
    json_t *root = result_of(&outcome);
    CU_ASSERT_PTR_NOT_NULL_FATAL(root);
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        CU_ASSERT_DOUBLE_EQUAL(number_at(root, expected[i].object, expected[i].key), expected[i].value, 1e-6);
    }
    const json_t *cp = json_object_get(root, "cp");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(cp, "decode_kernels")), "latent");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(cp, "prefill_kernels")), "hopper, portable");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(root, "output_digest")), "0000000000abcdef");
    json_decref(root);
    cpa_metrics_release(&metrics);
}

/* By pairs; null where there are none to speak of, as in a dry run. */
static void the_result_file_names_transport_and_links(void) {
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    setenv("NCCL_NET", "Socket", 1);
    outcome.transport = "nccl";
    outcome.given_up = 1; /* known all the same */
    json_t *root = result_of(&outcome);
    json_t *expected =
        json_pack("{ss s{ss} s[{s[ii] ss si sf}]}", "transport", "nccl", "environment", "NCCL_NET", "Socket", "pairs",
                  "ranks", 0, 1, "kind", "NVLink", "nvlinks", 18, "gbytes_per_s", 250.0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(expected);
    CU_ASSERT(json_equal(json_object_get(root, "links"), expected));
    json_decref(expected);
    json_decref(root);
    unsetenv("NCCL_NET");

    const cpa_link plain[4] = {[1] = {.kind = CPA_LINK_SOCKETS}, [2] = {.kind = CPA_LINK_SOCKETS}};
    outcome.links = plain;
    root = result_of(&outcome);
    const json_t *pair = json_array_get(json_object_get(json_object_get(root, "links"), "pairs"), 0);
    CU_ASSERT(json_is_null(json_object_get(pair, "nvlinks")));
    CU_ASSERT(json_is_null(json_object_get(pair, "gbytes_per_s")));
    json_decref(root);

    outcome.links = NULL;
    root = result_of(&outcome);
    CU_ASSERT(json_is_null(json_object_get(root, "links")));
    json_decref(root);
    cpa_metrics_release(&metrics);
}

/* Lists of what happened to each request, by their start; settings as what they are. */
static void the_result_file_has_every_request_and_setting(void) {
    static const char *const keys[] = {"start_times", "input_lens", "output_lens", "ttfts", "itls", "errors"};
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    const cpa_request_result late = {.id = 4, .prompt_tokens = 40, .arrival_s = 0.5, .reason = CPA_FINISH_CANCELLED};
    cpa_metrics_add(&metrics, &late);
    strcpy(settings.cache_salt, "secret");
    json_t *root = result_of(&outcome);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        CU_ASSERT_EQUAL(json_array_size(json_object_get(root, keys[i])), 4);
    json_t *expected = json_pack("{s[iiii] s[iiii] s[ssss] s[[][ff][f][]] s[ffff] s[ffff]}", "input_lens", 40, 10, 20,
                                 30, "output_lens", 0, 3, 2, 1, "errors", "cancelled", "", "", "", "itls", 0.25, 0.5,
                                 1.0, "ttfts", 0.0, 0.5, 1.0, 0.25, "start_times", 0.5, 1.0, 1.0, 1.0);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        CU_ASSERT(json_equal(json_object_get(root, keys[i]), json_object_get(expected, keys[i])));
    const json_t *values = json_object_get(root, "settings");
    CU_ASSERT_EQUAL(json_integer_value(json_object_get(values, "block-size")), 16);
    CU_ASSERT_EQUAL(json_real_value(json_object_get(values, "rank-timeout")), 10);
    CU_ASSERT(json_is_true(json_object_get(values, "bind")));
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(values, "num-blocks")), "auto");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(values, "request-rate")), "inf");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(values, "policy")), "priority");
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(values, "cache-salt")), "(not shown)");
    json_decref(expected);
    json_decref(root);
    cpa_metrics_release(&metrics);
}

static void lists_of_a_huge_run_are_left_out(void) {
    cpa_metrics metrics = {0};
    json_t *root = json_object();
    for (int64_t i = 0; i <= CPA_DETAILED_REQUESTS; i++) add_regular(&metrics, (double)i, 0.5, 1);
    CU_ASSERT_EQUAL(cpa_metrics_put(root, &metrics, metrics.completed, 1, 1), 0);
    CU_ASSERT(json_is_null(json_object_get(root, "ttfts")));
    CU_ASSERT_EQUAL(json_integer_value(json_object_get(root, "completed")), CPA_DETAILED_REQUESTS + 1);
    json_decref(root);
    cpa_metrics_release(&metrics);
}

/* A server keeps the last latencies alone: what it does not know of its requests is not told as nothing. */
static void who_keeps_a_window_lists_no_requests(void) {
    cpa_metrics metrics = {.window = 2};
    json_t *root = json_object();
    for (int64_t i = 0; i < 5; i++) add_regular(&metrics, (double)i, 0.5, 2);
    CU_ASSERT_EQUAL(cpa_metrics_put(root, &metrics, metrics.completed, 1, 1), 0);
    CU_ASSERT(json_is_null(json_object_get(root, "errors")));
    CU_ASSERT(json_is_null(json_object_get(root, "max_concurrent_requests")));
    CU_ASSERT_EQUAL(json_integer_value(json_object_get(root, "completed")), 5);
    CU_ASSERT(json_is_real(json_object_get(root, "mean_itl_ms")));
    json_decref(root);
    cpa_metrics_release(&metrics);
}

/* What was not measured is no zero: latencies of a run without output tokens after the first, rates of a dry run. */
static void what_was_not_measured_is_null(void) {
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    char text[4096] = "";
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    cpa_metrics_release(&metrics);
    metrics.options = (cpa_metrics_options){.percentiles = {99}, .n_percentiles = 1};
    settings.dry_run = 1;
    json_t *root = result_of(&outcome);
    CU_ASSERT(json_is_null(json_object_get(root, "mean_itl_ms")));
    CU_ASSERT(json_is_null(json_object_get(root, "p99_ttft_ms")));
    CU_ASSERT(json_is_null(json_object_get(root, "output_throughput")));
    CU_ASSERT(json_is_null(json_object_get(root, "max_concurrent_requests")));
    CU_ASSERT(json_is_null(json_object_get(root, "request_goodput")));
    CU_ASSERT(json_is_null(json_object_get(root, "itls")));
    CU_ASSERT(json_is_true(json_object_get(root, "dry_run")));
    json_decref(root);
    FILE *file = fmemopen(text, sizeof text, "w");
    cpa_report_print(&outcome, file);
    fclose(file);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "TTFT             -           -           -"));
}

/* First tokens that are precise are a group of their own, which is told of as what it is. */
static void precise_tokens_are_told_with_their_memory(void) {
    static const char *const figures[] = {
        "(5.5 MiB, int8, first 64 tokens fp32)", "4 layers without a window: peak 42 of",
        "first 64 tokens in fp32, 4 layers: peak 9 of 80, 5.0 MiB", "744.0 KiB of 5.5 MiB at these peaks"};
    enum { BLOCK_BYTES = 64 << 10 };
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    char text[8192] = "";
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    model.shape.attention.kv_dtype = CPA_INT8;
    outcome.stats.kv_groups = 2;
    outcome.stats.kv_group[0].blocks = 128;
    outcome.stats.kv_group[1] = (cpa_engine_kv_group){
        .layers = 4, .window = 1, .sinks = 64, .block_bytes = BLOCK_BYTES, .blocks = 80, .peak = 9};
    outcome.stats.precise_bytes = 80 * BLOCK_BYTES;
    FILE *file = fmemopen(text, sizeof text, "w");
    cpa_report_preamble(&outcome, file);
    cpa_report_print(&outcome, file);
    fclose(file);
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
        CU_ASSERT_PTR_NOT_NULL(strstr(text, figures[i]));
        if (!strstr(text, figures[i])) printf("missing: %s in %s\n", figures[i], text);
    }
    json_t *root = result_of(&outcome);
    CU_ASSERT_EQUAL(number_at(root, "kv", "precise_bytes"), 80 * BLOCK_BYTES);
    CU_ASSERT_EQUAL(number_at(root, "kv", "bytes"), 80 * BLOCK_BYTES + 128 * 4096);
    json_decref(root);
    cpa_metrics_release(&metrics);
}

/* What only the end of a step tells is not known of a run that was given up within one. */
static void a_run_that_was_given_up_tells_what_is_known(void) {
    static const char *const unknown[] = {"verify", "cp", "kv", "output_digest"};
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    char text[4096] = "";
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    outcome.stopped_by = SIGINT;
    outcome.given_up = 1;
    json_t *root = result_of(&outcome);
    for (int i = 0; i < 4; i++) CU_ASSERT(json_is_null(json_object_get(root, unknown[i])));
    CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(root, "stopped_by")), "SIGINT");
    CU_ASSERT(json_is_integer(json_object_get(root, "completed")));
    CU_ASSERT(json_is_object(json_object_get(root, "settings")));
    json_decref(root);
    FILE *file = fmemopen(text, sizeof text, "w");
    cpa_report_print(&outcome, file);
    fclose(file);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "stopped     in the middle of a step"));
    CU_ASSERT_PTR_NULL(strstr(text, "digest"));
    cpa_metrics_release(&metrics);
}

static void a_result_file_is_whole_or_absent(void) {
    cpa_settings settings;
    cpa_model_file model;
    cpa_workload workload;
    cpa_metrics metrics;
    cpa_error err;
    cpa_outcome outcome = make_outcome(&settings, &model, &workload, &metrics);
    CU_ASSERT_EQUAL_FATAL(mkdir("report-dir", 0777), 0);
    CU_ASSERT_EQUAL(cpa_output_check("--result-json", "report-dir/r.json", &err), CPA_OK);
    CU_ASSERT_EQUAL(rmdir("report-dir"), 0); /* the check has left nothing behind */
    CU_ASSERT_EQUAL(cpa_output_check("--result-json", "report-dir/r.json", &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "report-dir/r.json"));
    CU_ASSERT_EQUAL(cpa_output_check("--result-json", "/dev/null", &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_output_check("--result-json", ".", &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_result_json_write("report-dir/r.json", &outcome, &err), CPA_IO);
    CU_ASSERT_EQUAL(access("report-dir/r.json", F_OK), -1);
    cpa_metrics_release(&metrics);
}

/* Off a terminal a line each half a minute; on one the line is written anew. Both say the rate and the time left. */
static void progress_tells_rate_and_time_left(void) {
    char text[512] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    cpa_progress_line progress = cpa_progress_line_start(1000, 4);
    progress.out = file;
    progress.terminal = 0;
    progress.next_s = 30;
    cpa_progress_line_update(&progress, 100, 0, 29.9);
    CU_ASSERT_STRING_EQUAL(text, "");
    cpa_progress_line_update(&progress, 250, 1, 31);
    CU_ASSERT_STRING_EQUAL(text, " 25%  250/1000 tokens  1/4 requests  31.0 s  8.1 tokens/s  93 s left\n");
    cpa_progress_line_update(&progress, 260, 1, 60.9);
    CU_ASSERT_EQUAL(strlen(text), strcspn(text, "\n") + 1);
    progress.terminal = 1;
    cpa_progress_line_update(&progress, 500, 2, 620);
    cpa_progress_line_finish(&progress);
    fclose(file);
    const char *second = strchr(text, '\n') + 1;
    CU_ASSERT_STRING_EQUAL(second,
                           "\r\033[K 50%  500/1000 tokens  2/4 requests  620.0 s  0.8 tokens/s  10 min left\r\033[K");
}

static const cpa_test tests[] = {
    {"progress tells rate and time left", progress_tells_rate_and_time_left},
    {"latencies have their usual meaning", latencies_have_their_usual_meaning},
    {"a window keeps the last samples", a_window_keeps_the_last_samples},
    {"a run without tokens has zeros", a_run_without_tokens_has_zeros},
    {"peaks are those of completed requests", peaks_are_those_of_completed_requests},
    {"goodput counts requests within every objective", goodput_counts_requests_within_every_objective},
    {"wishes that make no sense are refused", wishes_that_make_no_sense_are_refused},
    {"the report names every figure", the_report_names_every_figure},
    {"the result file has the keys of vLLM and ours", the_result_file_has_the_keys_of_vllm_and_ours},
    {"the result file names transport and links", the_result_file_names_transport_and_links},
    {"the result file has every request and setting", the_result_file_has_every_request_and_setting},
    {"precise tokens are told with their memory", precise_tokens_are_told_with_their_memory},
    {"lists of a huge run are left out", lists_of_a_huge_run_are_left_out},
    {"who keeps a window lists no requests", who_keeps_a_window_lists_no_requests},
    {"what was not measured is null", what_was_not_measured_is_null},
    {"a run that was given up tells what is known", a_run_that_was_given_up_tells_what_is_known},
    {"a result file is whole or absent", a_result_file_is_whole_or_absent},
};
CPA_TEST_MAIN("report", tests)
