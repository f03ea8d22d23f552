/* A model's folder through libcpattn_llm, by its public header: the tokens of transformers, text, stops, cancelling,
 * many requests by one thread, two ranks, and what is refused. */
#include <cpattn/llm.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/fixtures/free_port.h"
#include "tests/fixtures/unit.h"
#include "tests/llm/answers.h"

/* The model of most tests, opened once. */
static cpa_llm *llm;

static cpa_llm_request *submit(const cpa_llm_prompt *prompt, int64_t max_tokens, const cpa_sampling *sampling) {
    const cpa_llm_request_options options = {.size = sizeof options, .max_tokens = max_tokens, .sampling = sampling};
    cpa_llm_request *request = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, prompt, &options, &request, &err), CPA_OK);
    return request;
}

static const cpa_sampling without_end = {.size = sizeof without_end, .ignore_eos = 1, .logprobs = 1};

/* Ids of `name` of prompt i in the file of what transformers has given. */
static uint32_t *expected_ids(const char *name, size_t i, int64_t *n) {
    json_t *file = json_load_file(FOLDER "/expected.json", 0, NULL);
    const json_t *list = json_array_get(json_object_get(file, name), i);
    *n = (int64_t)json_array_size(list);
    uint32_t *ids = malloc((size_t)*n * sizeof *ids + 1);
    for (int64_t k = 0; k < *n; k++) ids[k] = (uint32_t)json_integer_value(json_array_get(list, (size_t)k));
    json_decref(file);
    return ids;
}

static void check_expected(cpa_llm *of, size_t i) {
    int64_t n, wanted;
    uint32_t *ids = expected_ids("prompts", i, &n), *outputs = expected_ids("output_ids", i, &wanted);
    const cpa_llm_prompt prompt = {.size = sizeof prompt, .ids = ids, .n_ids = n};
    const cpa_llm_request_options options = {.size = sizeof options, .max_tokens = wanted, .sampling = &without_end};
    cpa_llm_request *request = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(of, &prompt, &options, &request, NULL), CPA_OK);
    cpa_test_answer *a = cpa_test_read_answer(request);
    CU_ASSERT_EQUAL(a->n, wanted);
    CU_ASSERT_EQUAL(memcmp(a->tokens, outputs, (size_t)wanted * sizeof *outputs), 0);
    CU_ASSERT_EQUAL(a->reason, CPA_FINISH_LENGTH);
    CU_ASSERT(a->logprobs[0] < 0);
    free(a);
    free(ids);
    free(outputs);
}

static void greedy_tokens_are_those_of_transformers(void) {
    for (size_t i = 0; i < 3; i++) check_expected(llm, i);
}

/* ---- text ---- */

static cpa_test_answer *say(const char *text, const char *const *stops, int32_t n_stops, int keeps_stop) {
    const cpa_llm_prompt prompt = cpa_test_prompt_of(text);
    const cpa_llm_request_options options = {.size = sizeof options,
                                             .max_tokens = 40,
                                             .sampling = &without_end,
                                             .stops = stops,
                                             .n_stops = n_stops,
                                             .keeps_stop = keeps_stop};
    cpa_llm_request *request = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_llm_submit(llm, &prompt, &options, &request, NULL), CPA_OK);
    return cpa_test_read_answer(request);
}

static int64_t now_running(cpa_engine_stats *stats) {
    CU_ASSERT_EQUAL(cpa_engine_get_stats(cpa_llm_engine(llm), stats, sizeof *stats), CPA_OK);
    return stats->requests_running + stats->requests_waiting;
}

/* Until nothing runs, for ten seconds at most. */
static cpa_engine_stats wait_for_quiet(void) {
    cpa_engine_stats stats = {0};
    const struct timespec pause = {.tv_nsec = 1000000};
    for (int i = 0; i < 10000 && (now_running(&stats) > 0 || stats.kv_used > 0); i++) nanosleep(&pause, NULL);
    return stats;
}

static void answers_end_at_texts_that_stop_them(void) {
    cpa_test_answer *whole = say("Hello", NULL, 0, 0);
    CU_ASSERT_EQUAL(whole->n, 40);
    CU_ASSERT_EQUAL(whole->reason, CPA_FINISH_LENGTH);
    CPA_ASSERT_ORDER(whole->bytes, >, 20);
    char stop[4] = {0}; /* a text of the answer, not at its beginning */
    for (int64_t i = 8; i < 16 && strlen(stop) < 3; i++) memcpy(stop, whole->text + i, 3);
    const char *const stops[] = {"\x01never", stop};
    const char *found = memmem(whole->text, (size_t)whole->bytes, stop, 3);
    const int64_t at = found - whole->text;
    for (int keeps = 0; keeps < 2; keeps++) {
        cpa_test_answer *a = say("Hello", stops, 2, keeps);
        CU_ASSERT_EQUAL(a->reason, CPA_FINISH_STOP);
        CU_ASSERT_STRING_EQUAL(a->stop, stop);
        CU_ASSERT_EQUAL(a->bytes, at + (keeps ? 3 : 0));
        CU_ASSERT_EQUAL(memcmp(a->text, whole->text, (size_t)a->bytes), 0);
        CPA_ASSERT_ORDER(a->n, <, 40);
        free(a);
    }
    CU_ASSERT_EQUAL(wait_for_quiet().requests_running, 0);
    free(whole);
}

static void a_chat_is_the_text_of_its_template(void) {
    cpa_llm_info info;
    CU_ASSERT_EQUAL(cpa_llm_get_info(llm, &info, sizeof info), CPA_OK);
    CU_ASSERT_TRUE(info.has_text && info.has_chat);
    const cpa_llm_prompt chat = {.size = sizeof chat, .messages = "[{\"role\": \"user\", \"content\": \"Hello\"}]"};
    const cpa_llm_prompt text = cpa_test_prompt_of("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
    cpa_test_answer *of_chat = cpa_test_read_answer(submit(&chat, 12, &without_end)),
                    *of_text = cpa_test_read_answer(submit(&text, 12, &without_end));
    CU_ASSERT_EQUAL(of_chat->n, 12);
    /* A tokenizer puts the token of the beginning around a text, which a template spells out or leaves away. */
    CPA_ASSERT_ORDER(of_chat->prompt_tokens, <=, of_text->prompt_tokens);
    CPA_ASSERT_ORDER(of_chat->prompt_tokens, >=, of_text->prompt_tokens - 1);
    free(of_chat);
    free(of_text);
}

/* ---- several at once, and cancelling ---- */

static void one_thread_reads_many(void) {
    enum { N = 5 };
    const char *const texts[N] = {"Hello", "Once upon a time", "1 2 3", "def f(", "Hello"};
    cpa_test_answer *alone[N], *together[N];
    cpa_llm_request *requests[N];
    for (int i = 0; i < N; i++) {
        const cpa_llm_prompt prompt = cpa_test_prompt_of(texts[i]);
        alone[i] = cpa_test_read_answer(submit(&prompt, 20 + i, &without_end));
        together[i] = calloc(1, sizeof **together);
    }
    for (int i = 0; i < N; i++) {
        const cpa_llm_prompt prompt = cpa_test_prompt_of(texts[i]);
        requests[i] = submit(&prompt, 20 + i, &without_end);
    }
    for (int left = N; left > 0;) {
        cpa_llm_request *request = NULL;
        cpa_llm_piece piece;
        int i = 0;
        CU_ASSERT_EQUAL_FATAL(cpa_llm_wait(llm, 60, &request, NULL), CPA_OK);
        while (requests[i] != request) i++;
        CU_ASSERT_EQUAL_FATAL(cpa_llm_next(request, 0, &piece, sizeof piece, NULL), CPA_OK);
        cpa_test_add_piece(together[i], &piece);
        left -= piece.has_ended;
    }
    for (int i = 0; i < N; i++) {
        CU_ASSERT_EQUAL(together[i]->n, 20 + i);
        CU_ASSERT_EQUAL(memcmp(together[i]->tokens, alone[i]->tokens, (size_t)(20 + i) * sizeof(uint32_t)), 0);
        CU_ASSERT_EQUAL(together[i]->bytes, alone[i]->bytes);
        CU_ASSERT_EQUAL(memcmp(together[i]->text, alone[i]->text, (size_t)alone[i]->bytes), 0);
        cpa_llm_release(requests[i]);
        free(alone[i]);
        free(together[i]);
    }
    cpa_llm_request *none;
    CU_ASSERT_EQUAL(cpa_llm_wait(llm, 0.01, &none, NULL), CPA_BUSY);
}

static void cancelled_requests_give_their_blocks_back(void) {
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Once upon a time");
    cpa_llm_request *read = submit(&prompt, 2000, &without_end), *unread = submit(&prompt, 2000, &without_end);
    cpa_llm_piece piece;
    cpa_engine_stats stats;
    do { /* statistics are those of the last step */
        CU_ASSERT_EQUAL_FATAL(cpa_llm_next(read, 60, &piece, sizeof piece, NULL), CPA_OK);
        CPA_ASSERT_ORDER(piece.n_tokens, >=, 1);
        (void)now_running(&stats);
    } while (!piece.has_ended && stats.requests_running < 2);
    CU_ASSERT_EQUAL(stats.requests_running, 2);
    CPA_ASSERT_ORDER(stats.kv_used, >, 0);
    cpa_llm_release(unread);
    cpa_llm_cancel(read);
    cpa_test_answer *a = cpa_test_read_answer(read);
    CU_ASSERT_EQUAL(a->reason, CPA_FINISH_CANCELLED);
    CPA_ASSERT_ORDER(a->n, <, 1990);
    stats = wait_for_quiet();
    CU_ASSERT_EQUAL(stats.kv_used, 0);
    CU_ASSERT_EQUAL(stats.requests_running, 0);
    free(a);
}

static void nothing_comes_of_a_request_after_its_end(void) {
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_llm_request *request = submit(&prompt, 3, &without_end);
    cpa_llm_piece piece = {.has_ended = 0};
    while (!piece.has_ended) CU_ASSERT_EQUAL_FATAL(cpa_llm_next(request, 60, &piece, sizeof piece, NULL), CPA_OK);
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(cpa_llm_next(request, 0, &piece, sizeof piece, NULL), CPA_OK);
        CU_ASSERT_EQUAL(piece.n_tokens, 0);
        CU_ASSERT_TRUE(piece.has_ended);
        CU_ASSERT_EQUAL(piece.reason, CPA_FINISH_LENGTH);
    }
    cpa_llm_cancel(request);
    cpa_llm_release(request);
}

/* ---- what is refused ---- */

static void refuse(const cpa_llm_prompt *prompt, const cpa_llm_request_options *options, const char *line) {
    cpa_llm_request *request = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_llm_submit(llm, prompt, options, &request, &err), CPA_INVALID);
    CU_ASSERT_TRUE(request == NULL);
    if (!strstr(err.message, line)) CU_ASSERT_STRING_EQUAL(err.message, line);
}

static void bad_requests_are_refused_by_one_line(void) {
    static const uint32_t beyond[] = {1, 400000};
    const cpa_llm_request_options longer = {.size = sizeof longer, .max_tokens = 5000};
    const cpa_llm_request_options negative = {.size = sizeof negative, .max_tokens = -1};
    const cpa_sampling wrong = {.size = sizeof wrong, .top_p = 2};
    const cpa_llm_request_options sampled = {.size = sizeof sampled, .sampling = &wrong};
    const char *const empty[] = {""};
    const cpa_llm_request_options stopped = {.size = sizeof stopped, .stops = empty, .n_stops = 1};
    cpa_llm_prompt prompt = {.size = sizeof prompt};
    refuse(&prompt, NULL, "prompt: found 0 of ids, text and messages, expected one");
    prompt.ids = beyond;
    refuse(&prompt, NULL, "prompt: found no token, expected at least one");
    prompt.n_ids = 2;
    refuse(&prompt, NULL, "prompt: found token 400000, expected ids from 0 to");
    prompt = cpa_test_prompt_of("Hello");
    refuse(&prompt, &longer, "tokens and 5000 of the answer, expected at most");
    refuse(&prompt, &negative, "max_tokens: found -1, expected 0 or more");
    refuse(&prompt, &sampled, "top_p");
    refuse(&prompt, &stopped, "stops: text 0 is empty");
    prompt = cpa_test_prompt_of("\xff");
    refuse(&prompt, NULL, "UTF-8");
    prompt = (cpa_llm_prompt){.size = sizeof prompt, .messages = "[{]"};
    refuse(&prompt, NULL, "messages: no JSON");
    prompt.messages = "[]";
    refuse(&prompt, NULL, "messages: found no message");
    prompt.messages = "[{\"content\": \"Hello\"}]";
    refuse(&prompt, NULL, "messages: element 0 is no object with a text \"role\"");
    prompt.messages = "[{\"role\": \"user\", \"content\": \"Hello\"}]";
    prompt.tools = "{}";
    refuse(&prompt, NULL, "tools: expected JSON of an array");
    prompt = cpa_test_prompt_of("Hello");
    prompt.tools = "[{}]";
    refuse(&prompt, NULL, "prompt: found tools without messages");
    prompt.tools = NULL;
    prompt.template_kwargs = "{}";
    refuse(&prompt, NULL, "prompt: found template_kwargs without messages");
    prompt.template_kwargs = NULL;
    prompt.continues_last = 1;
    refuse(&prompt, NULL, "prompt: found continues_last without messages");
}

static void refuse_folder(const char *folder, const cpa_llm_options *options, const char *line) {
    cpa_llm *none = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_NOT_EQUAL(cpa_llm_open(folder, options, &none, &err), CPA_OK);
    CU_ASSERT_TRUE(none == NULL);
    if (!strstr(err.message, line)) CU_ASSERT_STRING_EQUAL(err.message, line);
}

static void bad_folders_and_options_are_refused_by_one_line(void) {
    cpa_engine_options engine = cpa_test_engine_options();
    cpa_llm_options options = {.size = sizeof options, .engine = &engine, .max_model_len = 100000};
    refuse_folder("none", &options, "none/config.json: No such file");
    refuse_folder(FOLDER, &options, "max_model_len: found 100000, expected at most the 4096 positions of");
    options.max_model_len = 0;
    engine.block_size = 24;
    refuse_folder(FOLDER, &options, "block_size");
    engine.block_size = 0;
    engine.drafter = CPA_DRAFT_MODEL;
    refuse_folder(FOLDER, &options, "drafter: found that of the model, expected another");
    engine.drafter = CPA_DRAFT_NONE;
    options.chat_template = "no such family";
    refuse_folder(FOLDER, &options, "chat_template: ");
    options.chat_template = NULL;
    options.gpu_memory_utilization = 2;
    refuse_folder(FOLDER, &options, "gpu_memory_utilization: found 2, expected 0 to 1");
}

/* ---- first tokens that are precise ---- */

/* All tokens precise beside a cache of codes: those of transformers. */
static void precise_tokens_are_those_of_no_codes(void) {
    cpa_engine_options engine = cpa_test_engine_options();
    const cpa_llm_options options = {.size = sizeof options,
                                     .engine = &engine,
                                     .has_dtype = 1,
                                     .dtype = CPA_F32,
                                     .has_kv_dtype = 1,
                                     .kv_dtype = CPA_FP8_E5M2};
    cpa_llm *of = NULL;
    cpa_engine_stats stats;
    cpa_error err = {CPA_OK, ""};
    engine.precise_tokens = 1024;
    CU_ASSERT_EQUAL(cpa_llm_open(FOLDER, &options, &of, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL_FATAL(err.message, "");
    for (size_t i = 0; i < 3; i++) check_expected(of, i);
    CU_ASSERT_EQUAL(cpa_engine_get_stats(cpa_llm_engine(of), &stats, sizeof stats), CPA_OK);
    CPA_ASSERT_ORDER(stats.precise_bytes, >, 0);
    cpa_llm_close(of);
}

/* Most blocks that memory holds, as the line says that refuses more. */
static long long most_blocks(cpa_engine_options engine, int64_t precise) {
    const cpa_llm_options options = {
        .size = sizeof options, .engine = &engine, .has_dtype = 1, .has_kv_dtype = 1, .kv_dtype = CPA_INT8};
    cpa_llm *none = NULL;
    cpa_error err = {CPA_OK, ""};
    long long most = 0;
    engine.num_blocks = INT32_MAX;
    engine.window_seqs = 1 << 20;
    engine.precise_tokens = precise;
    CU_ASSERT_EQUAL(cpa_llm_open(FOLDER, &options, &none, &err), CPA_INVALID);
    const char *number = strstr(err.message, "num_blocks: found 2147483647, expected at most ");
    CU_ASSERT_PTR_NOT_NULL(number);
    if (number) sscanf(strstr(number, "most "), "most %lld", &most);
    return most;
}

/* Each block has one in fp32 beside it then. Free memory may change in between. */
static void memory_holds_fewer_blocks_beside_precise_tokens(void) {
    const cpa_engine_options engine = cpa_test_engine_options();
    const long long without = most_blocks(engine, 0), with = most_blocks(engine, 32);
    CPA_ASSERT_ORDER(with, >, 0);
    CPA_ASSERT_ORDER(with, <, without / 2);
}

/* ---- the end, and ranks ---- */

static void stopping_ends_what_is_unfinished(void) {
    const cpa_engine_options engine = cpa_test_engine_options();
    const cpa_llm_options options = {.size = sizeof options, .engine = &engine};
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_llm *kept = llm;
    cpa_llm_request *again = NULL;
    cpa_error err;
    CU_ASSERT_EQUAL_FATAL(cpa_llm_open(FOLDER, &options, &llm, &err), CPA_OK);
    cpa_llm_request *read = submit(&prompt, 0, &without_end), *left = submit(&prompt, 0, &without_end);
    cpa_llm_stop(llm);
    cpa_test_answer *a = cpa_test_read_answer(read);
    CU_ASSERT_EQUAL(a->reason, CPA_FINISH_CANCELLED);
    CU_ASSERT_EQUAL(cpa_llm_submit(llm, &prompt, NULL, &again, &err), CPA_STOPPED);
    CU_ASSERT_EQUAL(cpa_llm_wait(llm, 60, &again, &err), CPA_OK);
    CU_ASSERT_TRUE(again == left);
    CU_ASSERT_EQUAL(cpa_llm_wait(llm, 60, &again, &err), CPA_STOPPED);
    cpa_llm_close(llm); /* and what was not released */
    llm = kept;
    free(a);
}

static cpa_llm *open_rank(int32_t port, int32_t rank, cpa_comm **comm) {
    const cpa_comm_options told = {.size = sizeof told, .secret = "sixteen letters at least"};
    const cpa_engine_options engine = cpa_test_engine_options();
    cpa_llm_options options = {.size = sizeof options, .engine = &engine};
    cpa_llm *out = NULL;
    if (cpa_comm_from_store("127.0.0.1", port, rank, 2, &told, comm, NULL) != CPA_OK) return NULL;
    options.comm = *comm;
    return cpa_llm_open(FOLDER, &options, &out, NULL) == CPA_OK ? out : NULL;
}

/* The other rank, in a process of its own, which serves until the first one closes. */
static int serve_as_rank_1(int32_t port) {
    cpa_comm *comm = NULL;
    cpa_llm *of = open_rank(port, 1, &comm);
    const cpa_llm_prompt prompt = cpa_test_prompt_of("Hello");
    cpa_llm_request *request = NULL;
    if (!of) return 1;
    const int refuses = cpa_llm_submit(of, &prompt, NULL, &request, NULL) == CPA_STOPPED;
    cpa_llm_close(of);
    cpa_comm_destroy(comm);
    return refuses ? 0 : 2;
}

static void two_ranks_give_the_same_tokens(void) {
    char port[16];
    cpa_comm *comm = NULL;
    int status = -1;
    snprintf(port, sizeof port, "%d", cpa_test_free_port());
    const pid_t other = fork();
    if (other == 0) {
        execl("/proc/self/exe", "test_llm", "rank-1", port, (char *)NULL);
        _exit(3);
    }
    cpa_llm *of = open_rank(atoi(port), 0, &comm);
    CU_ASSERT_PTR_NOT_NULL_FATAL(of);
    for (size_t i = 0; i < 3; i++) check_expected(of, i);
    cpa_llm_close(of);
    cpa_comm_destroy(comm);
    CU_ASSERT_EQUAL(waitpid(other, &status, 0), other);
    CU_ASSERT_EQUAL(status, 0);
}

static const cpa_test tests[] = {
    {"greedy tokens are those of transformers", greedy_tokens_are_those_of_transformers},
    {"answers end at texts that stop them", answers_end_at_texts_that_stop_them},
    {"a chat is the text of its template", a_chat_is_the_text_of_its_template},
    {"one thread reads many", one_thread_reads_many},
    {"cancelled requests give their blocks back", cancelled_requests_give_their_blocks_back},
    {"nothing comes of a request after its end", nothing_comes_of_a_request_after_its_end},
    {"bad requests are refused by one line", bad_requests_are_refused_by_one_line},
    {"bad folders and options are refused by one line", bad_folders_and_options_are_refused_by_one_line},
    {"precise tokens are those of no codes", precise_tokens_are_those_of_no_codes},
    {"memory holds fewer blocks beside precise tokens", memory_holds_fewer_blocks_beside_precise_tokens},
    {"stopping ends what is unfinished", stopping_ends_what_is_unfinished},
    {"two ranks give the same tokens", two_ranks_give_the_same_tokens},
};

/* What does not depend on the bits of a batch. */
static const cpa_test device_tests[] = {
    {"greedy tokens are those of transformers", greedy_tokens_are_those_of_transformers},
    {"cancelled requests give their blocks back", cancelled_requests_give_their_blocks_back},
    {"nothing comes of a request after its end", nothing_comes_of_a_request_after_its_end},
    {"stopping ends what is unfinished", stopping_ends_what_is_unfinished},
};

static int run_tests(int argc, char **argv) {
    if (cpa_test_llm_is_on_cuda())
        return cpa_test_main(argc, argv, "models of folders", device_tests,
                             (int)(sizeof device_tests / sizeof device_tests[0]));
    return cpa_test_main(argc, argv, "models of folders", tests, (int)(sizeof tests / sizeof tests[0]));
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "rank-1") == 0) return serve_as_rank_1(atoi(argv[2]));
    const cpa_engine_options engine = cpa_test_engine_options();
    const cpa_llm_options options = {
        .size = sizeof options, .engine = &engine, .has_dtype = 1, .dtype = CPA_F32, .chat_template = "chatml"};
    cpa_error err;
    if (cpa_test_llm_is_on_cuda() && cpa_device_count(CPA_BACKEND_CUDA) == 0) {
        printf("skipped: no CUDA device\n");
        return 77;
    }
    if (cpa_llm_open(FOLDER, &options, &llm, &err) != CPA_OK) {
        fprintf(stderr, "test_llm: %s\n", err.message);
        return 1;
    }
    const int code = run_tests(argc, argv);
    cpa_llm_close(llm);
    return code;
}
