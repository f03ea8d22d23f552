/* Traces, the workloads made from them and without them, and the size of the cache that they need. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/job.h"
#include "tests/fixtures/unit.h"

static char *write_file(const char *text) {
    static char name[32];
    strcpy(name, "trace-XXXXXX");
    int descriptor = mkstemp(name);
    CU_ASSERT_FATAL(descriptor >= 0);
    CU_ASSERT_FATAL(write(descriptor, text, strlen(text)) == (ssize_t)strlen(text));
    close(descriptor);
    return name;
}

static cpa_status open_text(const char *text, int64_t limit, double scale, cpa_trace *out, cpa_error *err) {
    char *name = write_file(text);
    err->message[0] = 0;
    cpa_status status = cpa_trace_open(name, limit, scale, out, err);
    unlink(name);
    return status;
}

static void a_trace_is_read_line_by_line(void) {
    const char *text =
        "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 3, \"hash_ids\": [5, 6]}\r\n"
        "\n"
        "{\"timestamp\": 2.5, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [9], \"priority\": -2, "
        "\"salt\": \"s\", \"n\": 3, \"x\": "
        "{}}";
    cpa_trace trace;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(open_text(text, 0, 1, &trace, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(trace.count, 2);
    CU_ASSERT_EQUAL(trace.requests[0].id, 1);
    CU_ASSERT_EQUAL(trace.requests[0].prompt_tokens, 513);
    CU_ASSERT_EQUAL(trace.requests[0].output_tokens, 3);
    CU_ASSERT_EQUAL(trace.requests[0].hashes[1], 6);
    CU_ASSERT_EQUAL(trace.requests[1].id, 3);
    CU_ASSERT_EQUAL(trace.requests[1].timestamp_ms, 2.5);
    CU_ASSERT_EQUAL(trace.requests[1].priority, -2);
    CU_ASSERT_EQUAL(trace.requests[1].samples, 3);
    CU_ASSERT_STRING_EQUAL(trace.requests[1].salt, "s");
    CU_ASSERT_EQUAL(trace.requests[0].samples, 1);
    CU_ASSERT_PTR_NULL(trace.requests[0].salt);
    cpa_trace_close(&trace);
}

static void only_the_requests_asked_for_are_read_and_checked(void) {
    const char *text =
        "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 3, \"hash_ids\": [5]}\n"
        "{\"timestamp\": 0, \"input_length\": -5, \"output_length\": 3, \"hash_ids\": [5]}\n";
    cpa_trace trace;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(open_text(text, 1, 1, &trace, &err), CPA_OK);
    CU_ASSERT_EQUAL(trace.count, 1);
    cpa_trace_close(&trace);
    CU_ASSERT_EQUAL(open_text(text, 2, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, ":2: found \"input_length\": -5"));
}

#define GOOD "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 3, \"hash_ids\": [5]}\n"

/* A line of a trace, and what its message must say. */
static void a_bad_line_is_refused_with_its_number(void) {
    static const char *const cases[][2] = {
        {"{\"timestamp\":0,\"input_length\":-5,\"output_length\":1,\"hash_ids\":[]}", "\"input_length\": -5"},
        {"{\"timestamp\":0,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}", "\"input_length\": 0"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":0,\"hash_ids\":[1]}", "\"output_length\": 0"},
        {"{\"timestamp\":0,\"input_length\":5.5,\"output_length\":1,\"hash_ids\":[1]}", "\"input_length\": 5.5"},
        {"{\"timestamp\":0,\"input_length\":\"5\",\"output_length\":1,\"hash_ids\":[1]}", "\"input_length\": \"5\""},
        {"{\"timestamp\":0,\"input_length\":5,\"hash_ids\":[1]}", "found no \"output_length\""},
        {"{\"timestamp\":-1,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}", "\"timestamp\": -1"},
        {"{\"timestamp\":null,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}", "\"timestamp\": null"},
        {"{\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}", "found no \"timestamp\""},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":7}", "\"hash_ids\": 7"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[-7]}", "\"hash_ids\": -7"},
        {"{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[7]}",
         "found 1 hash_ids for input_length 513, expected 2"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[7,8]}", "found 2 hash_ids"},
        {"{\"timestamp\":0,\"input_length\":99999999999999999999,\"output_length\":1,\"hash_ids\":[7]}", "malformed"},
        {"{\"timestamp\":0,\"input_length\":9223372036854775807,\"output_length\":1,\"hash_ids\":[7]}", "expected an"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[7],\"priority\":1e3}", "\"priority\""},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"salt\":7}", "\"salt\": 7, expected a text"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"n\":0}", "\"n\": 0, expected an integer from 1"},
        {"{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"n\":129}",
         "\"n\": 129, expected an integer from 1 to"},
        {"{\"timestamp\":0,\"timestamp\":0}", "malformed JSON"},
        {"{\"timestamp\":0,", "malformed JSON"},
        {"[1, 2]", "no object"},
        {"17", "no object"},
        {"\xff\xfe\x01", "malformed JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cpa_trace trace;
        cpa_error err;
        char text[512];
        snprintf(text, sizeof text, GOOD "%s\n", cases[i][0]);
        CU_ASSERT_EQUAL(open_text(text, 0, 1, &trace, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, ":2: found "));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i][1]));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected"));
        CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
        if (!strstr(err.message, cases[i][1])) printf("%s -> %s\n", cases[i][0], err.message);
    }
}

/* A file asks for no more than so many requests, samples included, and its lines end somewhere. */
static void what_a_trace_costs_is_bounded(void) {
    static const char line[] = "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"n\":128}\n";
    enum { LINES = CPA_TRACE_MAX_REQUESTS / CPA_TRACE_MAX_SAMPLES + 1, LENGTH = sizeof line - 1 };
    cpa_trace trace;
    cpa_error err;
    char *text = malloc((size_t)LINES * LENGTH + 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    for (int i = 0; i < LINES; i++) memcpy(text + i * LENGTH, line, sizeof line);
    CU_ASSERT_EQUAL(open_text(text, 0, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, ":8193: found 1048704 requests so far, samples included"));
    text[(LINES - 1) * LENGTH] = 0;
    CU_ASSERT_EQUAL_FATAL(open_text(text, 0, 1, &trace, &err), CPA_OK);
    CU_ASSERT_EQUAL(trace.count, LINES - 1);
    cpa_trace_close(&trace);
    free(text);
    CU_ASSERT_EQUAL(cpa_trace_open("/dev/zero", 0, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "/dev/zero:1: found a line of more than 16777216 bytes"));
}

static void without_hash_ids_a_prompt_shares_nothing(void) {
    const char *text =
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1}\n"
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": []}\n";
    cpa_trace trace;
    cpa_error err;
    CU_ASSERT_EQUAL(open_text(text, 0, 1, &trace, &err), CPA_OK);
    int64_t same = 0;
    for (int64_t p = 0; p < 600; p++) same += cpa_trace_token(&trace, 1, p) == cpa_trace_token(&trace, 2, p);
    CPA_ASSERT_ORDER(same, <, 3);
    cpa_trace_close(&trace);
}

static void a_trace_without_requests_is_refused(void) {
    cpa_trace trace;
    cpa_error err;
    CU_ASSERT_EQUAL(open_text("", 0, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(open_text("\n  \n", 0, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_trace_open("no/such.jsonl", 0, 1, &trace, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "no/such.jsonl: found no readable file"));
    CU_ASSERT_EQUAL(cpa_trace_open("/", 0, 1, &trace, &err), CPA_INVALID);
}

static void a_length_too_large_for_its_scale_is_refused(void) {
    cpa_trace trace;
    cpa_error err;
    const char *text = "{\"timestamp\":0,\"input_length\":5,\"output_length\":1099511627776,\"hash_ids\":[1]}\n";
    CU_ASSERT_EQUAL_FATAL(open_text(text, 0, 1, &trace, &err), CPA_OK);
    cpa_trace_close(&trace);
    CU_ASSERT_EQUAL(open_text(text, 0, 1e6, &trace, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, ":1: found \"output_length\""));
}

/* Two prompts that share their first two hash blocks, and a third that shares the second one at another place. */
#define SHARING                                                                                                        \
    "{\"timestamp\":0,\"input_length\":1500,\"output_length\":40,\"hash_ids\":[10,11,12]}\n"                           \
    "{\"timestamp\":0,\"input_length\":1536,\"output_length\":40,\"hash_ids\":[10,11,13]}\n"                           \
    "{\"timestamp\":0,\"input_length\":1024,\"output_length\":40,\"hash_ids\":[14,11]}\n"

static void shared_prefixes_stay_shared_at_any_scale(void) {
    static const double scales[] = {1, 0.02, 0.37, 0.001, 1e-6, 3.3};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        double scale = scales[i];
        cpa_trace trace;
        cpa_error err;
        CU_ASSERT_EQUAL_FATAL(open_text(SHARING, 0, scale, &trace, &err), CPA_OK);
        int64_t first = trace.requests[0].prompt_tokens, second = trace.requests[1].prompt_tokens;
        CU_ASSERT_EQUAL(first, (int64_t)fmax(1, floor(1500 * scale)));
        CU_ASSERT_EQUAL(trace.requests[0].output_tokens, (int64_t)fmax(1, floor(40 * scale)));
        int64_t shared = (int64_t)floor(1024 * scale), differ = 0;
        for (int64_t p = 0; p < first && p < second; p++) {
            int equal = cpa_trace_token(&trace, 1, p) == cpa_trace_token(&trace, 2, p);
            if (p < shared) CU_ASSERT(equal);
            if (p >= shared && first > 1) differ += !equal;
        }
        if (first > shared && first > 1) CU_ASSERT_EQUAL(differ, first - shared);
        cpa_trace_close(&trace);
    }
}

static void tokens_differ_where_blocks_positions_or_requests_do(void) {
    cpa_trace trace;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(open_text(SHARING, 0, 1, &trace, &err), CPA_OK);
    int same_place = 0, next_place = 0, outputs = 0;
    for (int64_t p = 0; p < 512; p++) {
        same_place += cpa_trace_token(&trace, 1, p) == cpa_trace_token(&trace, 3, p);
        next_place += cpa_trace_token(&trace, 1, p) == cpa_trace_token(&trace, 1, p + 1);
    }
    for (int64_t p = 0; p < 40; p++) {
        outputs += cpa_trace_token(&trace, 1, 1500 + p) == cpa_trace_token(&trace, 2, 1536 + p);
    }
    CU_ASSERT_EQUAL(same_place, 0);
    CU_ASSERT_EQUAL(next_place, 0);
    CU_ASSERT_EQUAL(outputs, 0);
    cpa_trace_close(&trace);
}

/* Settings of a run, as the command line would give them. */
static cpa_settings settings_of(int argc, const char *const *argv) {
    cpa_settings settings;
    cpa_error err;
    char *words[8] = {NULL};
    for (int i = 0; i < argc; i++) words[i] = strdup(argv[i]);
    CU_ASSERT_EQUAL_FATAL(cpa_settings_load(argc, words, &settings, &err), CPA_OK);
    for (int i = 0; i < argc; i++) free(words[i]);
    return settings;
}

static cpa_status load(const cpa_settings *settings, cpa_workload *out, cpa_error *err) {
    const cpa_workload_options options = cpa_job_workload_options(settings);
    return cpa_workload_load(&options, out, err);
}

static void trace_times_are_used_only_when_asked_for(void) {
    const char *text =
        "{\"timestamp\":9000,\"input_length\":5,\"output_length\":1,\"hash_ids\":[1]}\n"
        "{\"timestamp\":7000,\"input_length\":6,\"output_length\":1,\"hash_ids\":[1]}\n";
    char *name = write_file(text);
    cpa_settings plain = settings_of(3, (const char *[]){"cp_attn", "--trace", name});
    cpa_settings timed = settings_of(5, (const char *[]){"cp_attn", "--trace", name, "--time-scale", "0.5"});
    cpa_workload workload;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(load(&plain, &workload, &err), CPA_OK);
    CU_ASSERT_EQUAL(workload.requests[0].id, 1);
    CU_ASSERT_EQUAL(workload.requests[0].arrival_s, 0);
    CU_ASSERT_EQUAL(workload.requests[1].arrival_s, 0);
    CU_ASSERT_EQUAL(workload.prompt_tokens, 11);
    cpa_workload_release(&workload);
    CU_ASSERT_EQUAL_FATAL(load(&timed, &workload, &err), CPA_OK);
    CU_ASSERT_EQUAL(workload.requests[0].id, 2); /* the earlier one */
    CU_ASSERT_EQUAL(workload.requests[0].arrival_s, 0);
    CU_ASSERT_DOUBLE_EQUAL(workload.requests[1].arrival_s, 1.0, 1e-12);
    cpa_workload_release(&workload);
    unlink(name);
}

static void random_arrivals_have_the_rate_and_follow_the_seed(void) {
    static const char *const line[] = {"cp_attn", "--requests", "4000", "--request-rate", "20", "--seed", "3"};
    cpa_settings settings = settings_of(7, line);
    cpa_workload workload, again;
    cpa_error err;
    CU_ASSERT(!cpa_job_is_mixed(&settings));
    CU_ASSERT_EQUAL_FATAL(load(&settings, &workload, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(load(&settings, &again, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(workload.count, 4000);
    double last = workload.requests[3999].arrival_s;
    CU_ASSERT_DOUBLE_EQUAL(last, 200, 20); /* 4000 / 20, within six standard deviations */
    int long_gaps = 0;                     /* longer than the mean: a share of 1/e of exponential gaps */
    for (int i = 1; i < 4000; i++) {
        double gap = workload.requests[i].arrival_s - workload.requests[i - 1].arrival_s;
        CPA_ASSERT_ORDER(gap, >=, 0);
        long_gaps += gap > 0.05;
        CU_ASSERT_EQUAL(workload.requests[i].arrival_s, again.requests[i].arrival_s);
    }
    CU_ASSERT_DOUBLE_EQUAL(long_gaps / 3999.0, exp(-1), 0.05);
    settings.seed = 4;
    cpa_workload_release(&again);
    CU_ASSERT_EQUAL_FATAL(load(&settings, &again, &err), CPA_OK);
    CU_ASSERT_NOT_EQUAL(again.requests[3999].arrival_s, last);
    cpa_workload_release(&again);
    cpa_workload_release(&workload);
}

static void the_mixed_run_is_for_those_who_ask_for_nothing(void) {
    cpa_settings nothing = settings_of(3, (const char *[]){"cp_attn", "--verify", "0.5"});
    CU_ASSERT(cpa_job_is_mixed(&nothing));
    cpa_settings some = settings_of(3, (const char *[]){"cp_attn", "--output-len", "5"});
    CU_ASSERT(!cpa_job_is_mixed(&some));
}

static cpa_cache_limits limits_of(int32_t cp_size, int32_t interleave, int64_t blocks) {
    cpa_cache_limits limits = {
        .model = {.layers = 3,
                  .attention.q_heads = 4,
                  .attention.kv_heads = 2,
                  .attention.k_dim = 8,
                  .attention.v_dim = 4,
                  .attention.kv_dtype = CPA_BF16},
        .block_size = 16,
        .map = {cp_size, interleave},
        .max_num_seqs = 2,
    };
    limits.memory_bytes = blocks * cpa_cache_block_bytes(&limits) + 7;
    return limits;
}

static void a_cache_holds_just_the_tokens_it_is_made_for(void) {
    for (int32_t cp_size = 1; cp_size <= 5; cp_size++) {
        static const int32_t interleaves[] = {1, 8, 16, 32, 48};
        for (size_t i = 0; i < sizeof interleaves / sizeof interleaves[0]; i++) {
            cpa_cache_limits limits = limits_of(cp_size, interleaves[i], 0);
            for (int64_t blocks = 1; blocks < 40; blocks++) {
                int64_t tokens = cpa_cache_tokens_of(&limits, blocks);
                CPA_ASSERT_ORDER(cpa_cache_blocks_of(&limits, tokens), <=, blocks);
                CPA_ASSERT_ORDER(cpa_cache_blocks_of(&limits, tokens + 1), >, blocks);
            }
        }
    }
}

static void the_cache_is_sized_for_the_largest_requests_that_run_together(void) {
    cpa_cache_limits limits = limits_of(2, 16, 1000);
    CU_ASSERT_EQUAL(cpa_cache_block_bytes(&limits), 3 * 16 * 2 * (8 + 4) * 2);
    cpa_request requests[3] = {{.id = 1, .prompt_tokens = 16, .output_tokens = 1},
                               {.id = 2, .prompt_tokens = 60, .output_tokens = 5},
                               {.id = 3, .prompt_tokens = 33, .output_tokens = 1}};
    int64_t blocks = 0;
    cpa_error err;
    CU_ASSERT_EQUAL(cpa_cache_size_for(&limits, requests, 3, &blocks, &err), CPA_OK);
    CU_ASSERT_EQUAL(blocks, 2 + 2); /* 64 tokens in 4 blocks on 2 ranks, 33 in 3 */
    limits.local_tokens = 63;       /* the one of 33 may be whole, 3 blocks on a rank instead of 2 */
    CU_ASSERT_EQUAL(cpa_cache_size_for(&limits, requests, 3, &blocks, &err), CPA_OK);
    CU_ASSERT_EQUAL(blocks, 2 + 2 + 1);
    limits = limits_of(2, 16, 3);
    CU_ASSERT_EQUAL(cpa_cache_size_for(&limits, requests, 3, &blocks, &err), CPA_OK);
    CU_ASSERT_EQUAL(blocks, 3);
    limits = limits_of(2, 16, 1);
    blocks = -1;
    CU_ASSERT_EQUAL(cpa_cache_size_for(&limits, requests, 3, &blocks, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(blocks, -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "request 2: found 64 tokens, which need 2 blocks"));
}

static const cpa_test tests[] = {
    {"a trace is read line by line", a_trace_is_read_line_by_line},
    {"only the requests asked for are read and checked", only_the_requests_asked_for_are_read_and_checked},
    {"what a trace costs is bounded", what_a_trace_costs_is_bounded},
    {"a bad line is refused with its number", a_bad_line_is_refused_with_its_number},
    {"without hash ids a prompt shares nothing", without_hash_ids_a_prompt_shares_nothing},
    {"a trace without requests is refused", a_trace_without_requests_is_refused},
    {"a length too large for its scale is refused", a_length_too_large_for_its_scale_is_refused},
    {"shared prefixes stay shared at any scale", shared_prefixes_stay_shared_at_any_scale},
    {"tokens differ where blocks, positions or requests do", tokens_differ_where_blocks_positions_or_requests_do},
    {"trace times are used only when asked for", trace_times_are_used_only_when_asked_for},
    {"random arrivals have the rate and follow the seed", random_arrivals_have_the_rate_and_follow_the_seed},
    {"the mixed run is for those who ask for nothing", the_mixed_run_is_for_those_who_ask_for_nothing},
    {"a cache holds just the tokens it is made for", a_cache_holds_just_the_tokens_it_is_made_for},
    {"the cache is sized for the largest requests that run together",
     the_cache_is_sized_for_the_largest_requests_that_run_together},
};
CPA_TEST_MAIN("trace", tests)
