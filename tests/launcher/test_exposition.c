/* What Prometheus is told of made-up requests and steps. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "launcher/output/exposition.h"
#include "launcher/output/metrics_file.h"
#include "tests/fixtures/unit.h"

/* Whether a line of the text is this one. */
static int has_line(const char *text, const char *line) {
    const size_t length = strlen(line);
    for (const char *at = text; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
        if (strncmp(at, line, length) == 0 && at[length] == '\n') return 1;
    printf("missing: %s\n", line);
    return 0;
}

static void add(cpa_exposition *e, cpa_finish_reason reason, int64_t tokens, double scheduled_s, double finish_s) {
    const double token_s[] = {1.25, 1.5, 1.505};
    const cpa_request_result result = {.prompt_tokens = 10,
                                       .output_tokens = tokens,
                                       .arrival_s = 1,
                                       .scheduled_s = scheduled_s,
                                       .first_token_s = tokens > 0 ? token_s[0] : finish_s,
                                       .finish_s = finish_s,
                                       .token_s = token_s,
                                       .reason = reason};
    cpa_exposition_add_result(e, &result);
}

static void latencies_fall_into_buckets(void) {
    static const char *const lines[] = {
        "# TYPE cpattn_time_to_first_token_seconds histogram",
        "cpattn_time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.1\"} 0",
        "cpattn_time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.25\"} 2", /* a bound belongs to its bucket */
        "cpattn_time_to_first_token_seconds_bucket{model_name=\"m\",le=\"2560\"} 2",
        "cpattn_time_to_first_token_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 2",
        "cpattn_time_to_first_token_seconds_sum{model_name=\"m\"} 0.5",
        "cpattn_time_to_first_token_seconds_count{model_name=\"m\"} 2",
        "cpattn_inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.01\"} 1",
        "cpattn_inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.3\"} 3",
        "cpattn_inter_token_latency_seconds_bucket{model_name=\"m\",le=\"80\"} 3",
        "cpattn_e2e_request_latency_seconds_bucket{model_name=\"m\",le=\"0.5\"} 0",
        "cpattn_e2e_request_latency_seconds_bucket{model_name=\"m\",le=\"0.8\"} 1",
        "cpattn_e2e_request_latency_seconds_count{model_name=\"m\"} 1", /* of those that are complete */
        "cpattn_request_queue_time_seconds_bucket{model_name=\"m\",le=\"0.3\"} 2",
        "cpattn_request_queue_time_seconds_bucket{model_name=\"m\",le=\"7680\"} 2",
        "cpattn_request_queue_time_seconds_bucket{model_name=\"m\",le=\"+Inf\"} 3",
        "cpattn_request_queue_time_seconds_count{model_name=\"m\"} 3", /* not of the one that never ran */
        "cpattn_request_success_total{model_name=\"m\",finished_reason=\"length\"} 1",
        "cpattn_request_success_total{model_name=\"m\",finished_reason=\"stop\"} 0",
        "cpattn_request_success_total{model_name=\"m\",finished_reason=\"abort\"} 2",
        "cpattn_request_success_total{model_name=\"m\",finished_reason=\"expired\"} 1",
        "cpattn_request_success_total{model_name=\"m\",finished_reason=\"error\"} 0",
    };
    const cpa_engine_stats none = {.steps = 0};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    add(e, CPA_FINISH_LENGTH, 3, 1.125, 1.505);
    add(e, CPA_FINISH_CANCELLED, 2, 1.25, 2);
    add(e, CPA_FINISH_CANCELLED, 0, 3, 3);
    add(e, CPA_FINISH_EXPIRED, 0, 9000, 9001);
    char *text = cpa_exposition_render(e, &none);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) CU_ASSERT(has_line(text, lines[i]));
    free(text);
    cpa_exposition_release(e);
}

static void what_the_engine_counts_is_told(void) {
    static const char *const lines[] = {
        "# TYPE cpattn_num_requests_running gauge",
        "cpattn_num_requests_running{model_name=\"m\"} 3",
        "cpattn_num_requests_waiting{model_name=\"m\"} 4",
        "cpattn_num_tenants{model_name=\"m\"} 2",
        "cpattn_kv_cache_usage_perc{model_name=\"m\"} 0.25",
        "# TYPE cpattn_prefix_cache_queries_total counter",
        "cpattn_prefix_cache_queries_total{model_name=\"m\"} 160", /* tokens */
        "cpattn_prefix_cache_hits_total{model_name=\"m\"} 32",
        "cpattn_num_preemptions_total{model_name=\"m\"} 5",
        "cpattn_prompt_tokens_total{model_name=\"m\"} 123456789012",
        "cpattn_generation_tokens_total{model_name=\"m\"} 77",
        "cpattn_spec_decode_num_drafts_total{model_name=\"m\"} 10",
        "cpattn_spec_decode_num_draft_tokens_total{model_name=\"m\"} 40",
        "cpattn_spec_decode_num_accepted_tokens_total{model_name=\"m\"} 15",
        "cpattn_verify_rows_total{model_name=\"m\"} 6",
        "cpattn_verify_violations_total{model_name=\"m\"} 1",
        "cpattn_selection_mass_left_out{model_name=\"m\"} 0.125",
        "cpattn_selection_mass_left_out_max{model_name=\"m\"} 0.75",
        "# TYPE cpattn_precise_tokens_bytes gauge",
        "cpattn_precise_tokens_bytes{model_name=\"m\"} 8192",
        "cpattn_exchange_bytes_total{model_name=\"m\"} 4096",
        "cpattn_exposed_comm_seconds_total{model_name=\"m\"} 0.125",
        "cpattn_rank_imbalance{model_name=\"m\"} 1.5",
        "cpattn_attend_plain_rows_total{model_name=\"m\"} 21",
        "cpattn_chunks_total{model_name=\"m\",algorithm=\"pass-kv\"} 11",
        "cpattn_chunks_total{model_name=\"m\",algorithm=\"pass-q\"} 12",
        "cpattn_chunks_total{model_name=\"m\",algorithm=\"none\"} 13",
    };
    const cpa_engine_stats stats = {.requests_running = 3,
                                    .requests_waiting = 4,
                                    .tenants_active = 2,
                                    .kv_blocks = 40,
                                    .kv_used = 10,
                                    .prefix_queries = 10,
                                    .prefix_hits = 2,
                                    .preemptions = 5,
                                    .prefilled_tokens = 123456789012,
                                    .output_tokens = 77,
                                    .drafted_chunks = 10,
                                    .draft_tokens = 40,
                                    .accepted_tokens = 15,
                                    .verify_rows = 6,
                                    .verify_violations = 1,
                                    .selection_rows = 5,
                                    .selection_mass_left_out_mean = 0.125,
                                    .selection_mass_left_out_max = 0.75,
                                    .precise_bytes = 8192,
                                    .bytes_sent = 4096,
                                    .exposed_comm_s = 0.125,
                                    .imbalance = 1.5,
                                    .plain_rows = 21,
                                    .planned_pass_kv = 11,
                                    .planned_pass_q = 12,
                                    .planned_local = 13};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    char *text = cpa_exposition_render(e, &stats);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) CU_ASSERT(has_line(text, lines[i]));
    free(text);
    cpa_exposition_release(e);
}

static void a_step_counts_once(void) {
    cpa_engine_stats stats = {.steps = 1, .computed_tokens = 100};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    cpa_exposition_add_step(e, &stats);
    cpa_exposition_add_step(e, &stats);
    stats = (cpa_engine_stats){.steps = 2, .computed_tokens = 108};
    cpa_exposition_add_step(e, &stats);
    char *text = cpa_exposition_render(e, &stats);
    CU_ASSERT(has_line(text, "cpattn_iteration_tokens_total_bucket{model_name=\"m\",le=\"1\"} 0"));
    CU_ASSERT(has_line(text, "cpattn_iteration_tokens_total_bucket{model_name=\"m\",le=\"8\"} 1"));
    CU_ASSERT(has_line(text, "cpattn_iteration_tokens_total_bucket{model_name=\"m\",le=\"128\"} 2"));
    CU_ASSERT(has_line(text, "cpattn_iteration_tokens_total_count{model_name=\"m\"} 2"));
    CU_ASSERT(has_line(text, "cpattn_iteration_tokens_total_sum{model_name=\"m\"} 108"));
    free(text);
    cpa_exposition_release(e);
}

/* Pairs by what joins them, and the slowest of those that were measured. */
static void links_are_told_by_their_kind(void) {
    static const cpa_link links[9] = {[1] = {.kind = CPA_LINK_NVLINK, .bandwidth = 3e11},
                                      [2] = {.kind = CPA_LINK_SOCKETS, .bandwidth = 2e9},
                                      [5] = {.kind = CPA_LINK_SOCKETS, .bandwidth = 1e9}};
    static const char *const lines[] = {
        "cpattn_link_pairs{model_name=\"m\",transport=\"nccl\",link=\"NVLink\"} 1",
        "cpattn_link_pairs{model_name=\"m\",transport=\"nccl\",link=\"sockets\"} 2",
        "cpattn_link_slowest_bytes_per_second{model_name=\"m\",transport=\"nccl\",link=\"NVLink\"} 300000000000",
        "cpattn_link_slowest_bytes_per_second{model_name=\"m\",transport=\"nccl\",link=\"sockets\"} 1000000000",
    };
    const cpa_engine_stats none = {.steps = 0};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    cpa_exposition_set_links(e, "nccl", links, 3);
    char *text = cpa_exposition_render(e, &none);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) CU_ASSERT(has_line(text, lines[i]));
    free(text);
    cpa_exposition_release(e);
}

static void a_name_cannot_end_its_label(void) {
    const cpa_engine_stats none = {.steps = 0};
    cpa_exposition *e = cpa_exposition_create("a\"b\\c\nd", 16);
    char *text = cpa_exposition_render(e, &none);
    CU_ASSERT(has_line(text, "cpattn_num_requests_running{model_name=\"a\\\"b\\\\c\\nd\"} 0"));
    free(text);
    cpa_exposition_release(e);
    static const char *const names[][2] = {{"gr\xc3\xb6\xc3\x9f er", "gr\xc3\xb6\xc3\x9f er"}, {"a\xff\xc3", "a??"}};
    for (int i = 0; i < 2; i++) { /* the text is UTF-8 */
        char line[80];
        snprintf(line, sizeof line, "cpattn_num_requests_running{model_name=\"%s\"} 0", names[i][1]);
        e = cpa_exposition_create(names[i][0], 16);
        text = cpa_exposition_render(e, &none);
        CU_ASSERT(has_line(text, line));
        free(text);
        cpa_exposition_release(e);
    }
}

/* Every sample belongs to the HELP and TYPE before it; each metric has them once. */
static void every_sample_has_its_head(void) {
    const cpa_engine_stats none = {.steps = 0};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    char *text = cpa_exposition_render(e, &none), *rest = text, name[64] = "", heads[4096] = "";
    for (char *line; (line = strsep(&rest, "\n")) && *line;) {
        char type[16];
        if (sscanf(line, "# HELP %63s", name) == 1) {
            char key[80];
            snprintf(key, sizeof key, "<%s>", name);
            CU_ASSERT_PTR_NULL(strstr(heads, key));
            strncat(heads, key, sizeof heads - strlen(heads) - 1);
            line = strsep(&rest, "\n");
            char typed[64];
            CU_ASSERT_EQUAL(sscanf(line, "# TYPE %63s %15s", typed, type), 2);
            CU_ASSERT_STRING_EQUAL(typed, name);
            CU_ASSERT(strcmp(type, "counter") == 0 || strcmp(type, "gauge") == 0 || strcmp(type, "histogram") == 0);
        } else {
            CU_ASSERT_EQUAL(strncmp(line, name, strlen(name)), 0);
            CU_ASSERT_PTR_NOT_NULL(strstr(line, "{model_name=\"m\""));
        }
    }
    free(text);
    cpa_exposition_release(e);
}

/* The first line of a file that tells of tokens; empty: there is none. */
static void read_tokens(const char *path, char *line, size_t bytes) {
    FILE *file = fopen(path, "r");
    line[0] = 0;
    while (file && fgets(line, (int)bytes, file) && strncmp(line, "cpattn_generation_tokens_total", 30) != 0)
        line[0] = 0;
    if (file) fclose(file);
}

static int warnings;
static void count_warnings(void *ctx, cpa_log_level level, const char *line) {
    (void)ctx;
    warnings += level == CPA_LOG_WARN && strstr(line, "exposition-test/m.prom") != NULL;
}

static void a_file_is_written_when_that_is_due(void) {
    const cpa_engine_stats stats = {.output_tokens = 7};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    cpa_metrics_file file = {NULL, NULL, 0, 0, 0};
    char line[100];
    cpa_error err;
    cpa_metrics_file_update(&file, &stats); /* nobody wants it */
    CU_ASSERT_EQUAL(cpa_metrics_file_open("exposition-test/m.prom", e, &file, &err), CPA_IO);
    CU_ASSERT_EQUAL_FATAL(mkdir("exposition-test", 0777), 0);
    CU_ASSERT_EQUAL(cpa_metrics_file_open("exposition-test/m.prom", e, &file, &err), CPA_OK);
    cpa_metrics_file_update(&file, &stats);
    read_tokens(file.path, line, sizeof line);
    CU_ASSERT_STRING_EQUAL(line, "cpattn_generation_tokens_total{model_name=\"m\"} 0\n");
    file.next_s = 0;
    cpa_metrics_file_update(&file, &stats);
    read_tokens(file.path, line, sizeof line);
    CU_ASSERT_STRING_EQUAL(line, "cpattn_generation_tokens_total{model_name=\"m\"} 7\n");
    CPA_ASSERT_ORDER(file.next_s, >, cpa_clock_now() + 1);
    unlink("exposition-test/m.prom");
    CU_ASSERT_EQUAL(rmdir("exposition-test"), 0); /* nothing is left beside it */
    cpa_log_set(count_warnings, NULL, CPA_LOG_WARN);
    for (int i = 0; i < 3; i++, file.next_s = 0) cpa_metrics_file_update(&file, &stats);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    CU_ASSERT_EQUAL(warnings, 1);
    CU_ASSERT_EQUAL(cpa_metrics_file_write(&file, &stats, &err), CPA_IO);
    cpa_exposition_release(e);
}

enum { ROUNDS = 200 };

static void *add_many(void *e) {
    for (int i = 0; i < ROUNDS; i++) add(e, CPA_FINISH_STOP, 3, 1, 2);
    return NULL;
}

static void threads_add_while_it_is_rendered(void) {
    const cpa_engine_stats none = {.steps = 0};
    cpa_exposition *e = cpa_exposition_create("m", 16);
    pthread_t threads[2];
    for (int t = 0; t < 2; t++) pthread_create(&threads[t], NULL, add_many, e);
    for (int i = 0; i < 5; i++) free(cpa_exposition_render(e, &none));
    for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
    char *text = cpa_exposition_render(e, &none);
    CU_ASSERT(has_line(text, "cpattn_request_success_total{model_name=\"m\",finished_reason=\"stop\"} 400"));
    CU_ASSERT(has_line(text, "cpattn_inter_token_latency_seconds_count{model_name=\"m\"} 800"));
    free(text);
    cpa_exposition_release(e);
}

static const cpa_test tests[] = {
    {"latencies fall into buckets", latencies_fall_into_buckets},
    {"what the engine counts is told", what_the_engine_counts_is_told},
    {"a step counts once", a_step_counts_once},
    {"links are told by their kind", links_are_told_by_their_kind},
    {"a name cannot end its label", a_name_cannot_end_its_label},
    {"every sample has its head", every_sample_has_its_head},
    {"a file is written when that is due", a_file_is_written_when_that_is_due},
    {"threads add while it is rendered", threads_add_while_it_is_rendered},
};
CPA_TEST_MAIN("exposition", tests)
