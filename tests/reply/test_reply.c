/* Answers in the forms of models become their parts, however their text is cut into pieces. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "src/reply/reply.h"
#include "tests/fixtures/unit.h"

/* A reply as one text: thoughts in (...), calls as NAME#ID{ARGUMENTS}, and content in front of both. */
static void show(const cpa_bytes *content, const cpa_bytes *thoughts, const cpa_reply_call *calls, int64_t n,
                 const cpa_bytes *arguments, char *out, size_t room) {
    size_t at = (size_t)snprintf(out, room, "%.*s", (int)content->count, content->data ? content->data : "");
    if (thoughts->count > 0)
        at += (size_t)snprintf(out + at, room - at, "(%.*s)", (int)thoughts->count, thoughts->data);
    for (int64_t i = 0; i < n && at < room; i++) {
        at += (size_t)snprintf(out + at, room - at, "|%s%s%s%.*s", calls[i].name, calls[i].id ? "#" : "",
                               calls[i].id ? calls[i].id : "", (int)arguments[i].count,
                               arguments[i].data ? arguments[i].data : "");
    }
}

/* What comes of a text in pieces; `next` gives the length of each. What is told is forgotten each time. */
static void read_reply(const cpa_reply_options *options, const char *text, size_t bytes, size_t (*next)(void *, size_t),
                       void *ctx, char *out, size_t room) {
    enum { MOST_CALLS = 64 };
    cpa_error err;
    cpa_reply *reply = NULL;
    cpa_bytes content = {.count = 0}, thoughts = {.count = 0}, arguments[MOST_CALLS];
    memset(arguments, 0, sizeof arguments);
    const cpa_reply_call *calls = NULL;
    int64_t n = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_reply_open(options, &reply, &err), CPA_OK);
    for (size_t at = 0; at <= bytes;) {
        const size_t left = bytes - at, asked = left > 0 ? next(ctx, at) : 0, piece = asked < left ? asked : left;
        char *copy = malloc(piece + 1); /* of its own length, for sanitizers */
        if (piece > 0) memcpy(copy, text + at, piece);
        CU_ASSERT_EQUAL(cpa_reply_push(reply, copy, piece, &err), CPA_OK);
        free(copy);
        if (left == 0) CU_ASSERT_EQUAL(cpa_reply_finish(reply, &err), CPA_OK);
        const cpa_bytes *t = cpa_reply_thoughts(reply), *c = cpa_reply_content(reply);
        if (t->count > 0) cpa_bytes_add(&thoughts, t->data, (size_t)t->count);
        if (c->count > 0) cpa_bytes_add(&content, c->data, (size_t)c->count);
        calls = cpa_reply_calls(reply, &n);
        CU_ASSERT_FATAL(n <= MOST_CALLS);
        for (int64_t i = 0; i < n; i++) {
            const cpa_bytes *a = &calls[i].arguments;
            if (a->count > 0) cpa_bytes_add(&arguments[i], a->data, (size_t)a->count);
        }
        cpa_reply_forget(reply);
        if (left == 0) break;
        at += piece;
    }
    show(&content, &thoughts, calls, n, arguments, out, room);
    cpa_bytes_release(&content);
    cpa_bytes_release(&thoughts);
    for (int64_t i = 0; i < n; i++) cpa_bytes_release(&arguments[i]);
    cpa_reply_close(reply);
}

static size_t everything(void *ctx, size_t at) {
    (void)ctx, (void)at;
    return SIZE_MAX;
}

static size_t one_byte(void *ctx, size_t at) {
    (void)ctx, (void)at;
    return 1;
}

static size_t two_pieces(void *ctx, size_t at) {
    const size_t cut = *(const size_t *)ctx;
    return at < cut ? cut : SIZE_MAX;
}

static size_t random_pieces(void *ctx, size_t at) {
    uint64_t *seed = ctx;
    *seed = cpa_mix64(*seed + at + CPA_GOLDEN);
    return 1 + (size_t)(*seed >> 40) % 9;
}

/* Whole, byte by byte, and cut in two at every place. */
static void check_all_cuts(const cpa_reply_options *options, const char *text, size_t bytes, const char *expected) {
    static char whole[1 << 16], cut[1 << 16];
    read_reply(options, text, bytes, everything, NULL, whole, sizeof whole);
    if (expected && strcmp(whole, expected) != 0)
        fprintf(stderr, "\nfrom     %s\nfound    %s\nexpected %s\n", text, whole, expected);
    if (expected) CU_ASSERT_STRING_EQUAL(whole, expected);
    read_reply(options, text, bytes, one_byte, NULL, cut, sizeof cut);
    if (strcmp(whole, cut) != 0) fprintf(stderr, "\nwhole %s\ncut   %s\n", whole, cut);
    CU_ASSERT_STRING_EQUAL(whole, cut);
    for (size_t at = 1; at < bytes && bytes < 2000; at++) {
        read_reply(options, text, bytes, two_pieces, &at, cut, sizeof cut);
        CU_ASSERT_STRING_EQUAL(whole, cut);
    }
}

typedef struct reply_case {
    const char *text, *expected;
} reply_case;

static void check_cases(const cpa_reply_options *options, const reply_case *cases, size_t n) {
    for (size_t i = 0; i < n; i++) check_all_cuts(options, cases[i].text, strlen(cases[i].text), cases[i].expected);
}

static void calls_of_hermes(void) {
    static const reply_case cases[] = {
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>", "|f{\"a\": [1, \"}\"]}"},
        {"Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", "
         "\"arguments\": {\"b\": 2}}\n</tool_call>\n",
         "Let me see.|f{}|g{\"b\": 2}"},
        {"<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", "|f{\"a\": 1}"},
        {"<tool_call>{\"id\": 5, \"x\": [{\"name\": \"no\"}, null, -1e5], \"name\": \"f\"}</tool_call>", "|f{}"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", "|f{}"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"\\u00e9\\\"}\"}</tool_call>",
         "|f{\"a\": \"\xc3\xa9\"}"},
        {"<tool_call>{\"\\u006eame\": \"f\\n\", \"parameters\": {\"a\": \"\\\\\"}}</tool_call>",
         "|f\n{\"a\": \"\\\\\"}"},
        /* What is no call is text. */
        {"  a <tool_cal and <tool_call> b ", "  a <tool_cal and <tool_call> b "},
        {"<tool_call>{\"name\": 5}</tool_call>", "<tool_call>{\"name\": 5}</tool_call>"},
        {"<tool_call>{\"name\": \"\"}</tool_call>", "<tool_call>{\"name\": \"\"}</tool_call>"},
        {"<tool_call>{\"arguments\": {}}</tool_call>", "<tool_call>{\"arguments\": {}}</tool_call>"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
         "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>"},
        {"<tool_call>{\"name\": \"\\ud800\", \"arguments\": {}}x",
         "<tool_call>{\"name\": \"\\ud800\", \"arguments\": {}}x"},
        {"<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>"},
        {"<tool_call>\n{\"name\": \"f\", \"argu", "<tool_call>\n{\"name\": \"f\", \"argu"},
        {"a \n", "a \n"},
        /* A call that is told of stays, and what follows it is text. */
        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": oops}} b", "oops}} b|f{\"a\": "},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, \"b", "|f{\"a\": [1, \"b"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_", "|f{}"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> then", " then|f{}"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}", "|f{}|g{}"},
        {"{\"name\": \"f\", \"arguments\": {}}", "{\"name\": \"f\", \"arguments\": {}}"},
    };
    const cpa_reply_options options = {.tools = CPA_TOOLS_HERMES};
    check_cases(&options, cases, sizeof cases / sizeof *cases);
}

static void calls_of_llama(void) {
    static const reply_case cases[] = {
        {"{\"name\": \"f\", \"parameters\": {\"a\": \"1\"}}", "|f{\"a\": \"1\"}"},
        {"\n<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "|f{}"},
        {"{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"b\": 1}}", "|f{}|g{\"b\": 1}"},
        {"{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "|f{}"},
        {" {\"name\": \"unknown\", \"parameters\": {}}", " {\"name\": \"unknown\", \"parameters\": {}}"},
        {"{\"name\": \"f\", \"parameters\": {}}; {\"a\": 1}", "; {\"a\": 1}|f{}"},
        {"{\"city\": \"Rome\"}", "{\"city\": \"Rome\"}"},
        {"a {\"name\": \"f\", \"parameters\": {}}", "a {\"name\": \"f\", \"parameters\": {}}"},
        {"<|python_tag|>search.call(query=\"a\")", "<|python_tag|>search.call(query=\"a\")"},
        {"  ", "  "},
    };
    json_t *known = json_loads("[{\"function\": {\"name\": \"f\"}}, {\"function\": {\"name\": \"g\"}}]", 0, NULL);
    const cpa_reply_options options = {.tools = CPA_TOOLS_LLAMA3, .known = known};
    check_cases(&options, cases, sizeof cases / sizeof *cases);
    json_decref(known);
}

static void calls_of_mistral(void) {
    static const reply_case cases[] = {
        {"[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"abc\"}]", "|f{\"a\": 1}"},
        {"a [TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"b\": 2}}]",
         "a|f{}|g{\"b\": 2}"},
        {"[TOOL_CALLS]f[ARGS]{\"a\": {\"b\": []}}", "|f{\"a\": {\"b\": []}}"},
        {"[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{\"a\": 1}[TOOL_CALLS]g{}", "|f#abc123xyz{\"a\": 1}|g{}"},
        {"[TOOL_CALLS]f {\"a\": 1}", "[TOOL_CALLS]f {\"a\": 1}"},
        {"[TOOL_CALLS]f[ARGS] none", "[TOOL_CALLS]f[ARGS] none"},
        {"[TOOL_CALLS] []", "[TOOL_CALLS] []"},
        {"[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, 5]", ", 5]|f{}"},
        {"[TOOL_CALLS] {\"name\": \"f\", \"arguments\": {}}", "|f{}"},
        {"[TOOL_CALLS]f[ARGS]{\"a\" 5} b", "5} b|f{\"a\" "},
        {"[TOOL_CALL] [b]", "[TOOL_CALL] [b]"},
        {"[TOOL_CALLS]f[CALL_ID", "[TOOL_CALLS]f[CALL_ID"},
    };
    const cpa_reply_options options = {.tools = CPA_TOOLS_MISTRAL};
    check_cases(&options, cases, sizeof cases / sizeof *cases);
}

static void calls_of_deepseek(void) {
    static const reply_case cases[] = {
        {"a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         "a|f{\"a\": 1}"},
        {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": "
         "1}\n```<｜tool▁call▁end｜>\n"
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> b",
         " b|f{\"a\": 1}|g{}"},
        {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1", "|f{\"a\": 1"},
        {"<｜tool▁calls▁begin｜>oops", "<｜tool▁calls▁begin｜>oops"},
        {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>5",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>5"},
        {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}",
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"},
        {"<｜tool▁calls▁begin", "<｜tool▁calls▁begin"},
    };
    const cpa_reply_options options = {.tools = CPA_TOOLS_DEEPSEEK_V3};
    check_cases(&options, cases, sizeof cases / sizeof *cases);
}

static void thoughts_are_told_apart(void) {
    static const reply_case begun[] = {
        {"a\nb\n</think>\n\nc", "c(a\nb)"},
        {"<think>\na</think>c", "c(a)"},
        {"cut off\n", "(cut off)"},
        {"<thi", "(<thi)"},
        {"</think>\n\nc", "c"},
    };
    static const reply_case fresh[] = {
        {"<think>\n a \n</think>\n\nc\n", "c\n( a)"},
        {"\n<think>a", "(a)"},
        {"<think></think>c", "c"},
        {"b <think>a</think>", "b <think>a</think>"},
        {"<thin", "<thin"},
        {"<think>a</think>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "(a)|f{}"},
        {"<think>a <tool_call>{\"name\": \"f\", \"arguments\": {}}</think>b",
         "b(a <tool_call>{\"name\": \"f\", \"arguments\": {}})"},
    };
    static const reply_case mistral[] = {{"[THINK]a[/THINK]b", "b(a)"}, {"<think>a</think>b", "<think>a</think>b"}};
    cpa_reply_options options = {.tools = CPA_TOOLS_HERMES, .thoughts = CPA_THOUGHTS_THINK, .thinks_already = 1};
    check_cases(&options, begun, sizeof begun / sizeof *begun);
    options.thinks_already = 0;
    check_cases(&options, fresh, sizeof fresh / sizeof *fresh);
    options.thoughts = CPA_THOUGHTS_MISTRAL;
    check_cases(&options, mistral, sizeof mistral / sizeof *mistral);
}

static void calls_beyond_the_most_count_nothing(void) {
    static const reply_case cases[] = {
        {"a<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}b",
         "a|f{}"},
    };
    const cpa_reply_options options = {.tools = CPA_TOOLS_HERMES, .most_calls = 1};
    check_cases(&options, cases, 1);
    cpa_error err;
    cpa_reply *reply = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_reply_open(&options, &reply, &err), CPA_OK);
    const size_t first = (size_t)(strstr(cases[0].text, "}}") - cases[0].text) + 1;
    cpa_reply_push(reply, cases[0].text, first, &err);
    CU_ASSERT(!cpa_reply_is_over(reply));
    cpa_reply_push(reply, cases[0].text + first, 1, &err);
    CU_ASSERT(cpa_reply_is_over(reply));
    cpa_reply_close(reply);
}

/* Pieces of calls in random order, in every form: the same parts however they are cut, and no byte is lost of what makes
 * no call. */
static void garbage_is_read_alike_however_it_is_cut(void) {
    static const char *const pieces[] = {
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\"",
        ", \"arguments\": ",
        "{\"a\": 1}",
        "}",
        "[",
        "]",
        ",",
        ";",
        "\n",
        " ",
        "\"",
        "\\",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "f",
        "<|python_tag|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "```json",
        "```",
        "function",
        "{",
        "\"name\"",
        ":",
        "\xc3\xa9",
        "<",
        "\"arguments\": \"{}\"",
        "null",
        "12",
        "{}",
        "<tool_call>{\"name\": \"f\", \"arguments\": {",
        "[TOOL_CALLS]f[ARGS]{",
        "[TOOL_CALLS] [{\"name\": \"f\"",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"b\": ",
    };
    json_t *known = json_loads("[{\"function\": {\"name\": \"f\"}}]", 0, NULL);
    static char text[1 << 14], whole[1 << 16], cut[1 << 16];
    uint64_t seed = 1;
    for (int i = 0; i < 20000; i++) {
        size_t bytes = 0;
        const int n = 1 + (int)(cpa_mix64(seed) % 14);
        for (int k = 0; k < n; k++) {
            seed = cpa_mix64(seed + CPA_GOLDEN);
            const char *piece = pieces[(seed >> 20) % (sizeof pieces / sizeof *pieces)];
            memcpy(text + bytes, piece, strlen(piece));
            bytes += strlen(piece);
        }
        text[bytes] = 0;
        const cpa_reply_options options = {.tools = (cpa_tool_form)(i % 7),
                                           .thoughts = (cpa_thought_form)(i / 7 % 3),
                                           .thinks_already = i / 21 % 2,
                                           .known = known,
                                           .most_calls = i / 42 % 3};
        read_reply(&options, text, bytes, everything, NULL, whole, sizeof whole);
        read_reply(&options, text, bytes, one_byte, NULL, cut, sizeof cut);
        if (strcmp(whole, cut) != 0)
            fprintf(stderr, "\nfrom  %s (form %d)\nwhole %s\ncut   %s\n", text, i % 7, whole, cut);
        CU_ASSERT_STRING_EQUAL(whole, cut);
        read_reply(&options, text, bytes, random_pieces, &seed, cut, sizeof cut);
        CU_ASSERT_STRING_EQUAL(whole, cut);
        if (options.thoughts == CPA_THOUGHTS_NONE && !strchr(whole, '|')) CPA_ASSERT_ORDER(strlen(whole), <=, bytes);
        if (options.tools == CPA_TOOLS_NONE && options.thoughts == CPA_THOUGHTS_NONE)
            CU_ASSERT_STRING_EQUAL(whole, text);
    }
    json_decref(known);
}

/* Marks without end, and depth without end, take time that grows with the text. */
static void long_replies_are_read_in_one_go(void) {
    enum { BYTES = 2000000 };
    static const char *const begins[] = {"", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"",
                                         "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": "};
    static const char *const pieces[] = {"<tool_call>{\"a\": \"", "b", "["};
    char *text = malloc(BYTES + 100);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    for (int i = 0; i < 3; i++) {
        size_t bytes = strlen(begins[i]);
        memcpy(text, begins[i], bytes);
        for (const size_t n = strlen(pieces[i]); bytes < BYTES; bytes += n) memcpy(text + bytes, pieces[i], n);
        const cpa_reply_options options = {.tools = CPA_TOOLS_HERMES};
        char out[100];
        read_reply(&options, text, bytes, random_pieces, &(uint64_t){7}, out, sizeof out);
        CU_ASSERT_EQUAL(strncmp(out, i == 0 ? "<tool_call>" : i == 1 ? "|f{\"a\": \"b" : "[", i == 2 ? 1 : 9), 0);
    }
    free(text);
}

static void forms_are_known_by_name_and_template(void) {
    static const struct {
        const char *text;
        cpa_tool_form tools;
        cpa_thought_form thoughts;
    } templates[] = {
        {"{{ '<tool_call>\\n' }} ... </think>", CPA_TOOLS_HERMES, CPA_THOUGHTS_THINK},
        {"<tool_call><function=", CPA_TOOLS_NONE, CPA_THOUGHTS_NONE},
        {"[TOOL_CALLS] [/THINK]", CPA_TOOLS_MISTRAL, CPA_THOUGHTS_MISTRAL},
        {"Environment: ipython {\"name\": \"f\", \"parameters\": {}}", CPA_TOOLS_LLAMA3, CPA_THOUGHTS_NONE},
        {"<|python_tag|>", CPA_TOOLS_LLAMA3, CPA_THOUGHTS_NONE},
        {"<｜tool▁calls▁begin｜></think>", CPA_TOOLS_DEEPSEEK_V31, CPA_THOUGHTS_THINK},
        {"<｜tool▁calls▁begin｜> ```json", CPA_TOOLS_DEEPSEEK_V3, CPA_THOUGHTS_NONE},
        {"[TOOL_CALLS] [ARGS]", CPA_TOOLS_MISTRAL_ARGS, CPA_THOUGHTS_NONE},
        {"{{ message.content }}", CPA_TOOLS_NONE, CPA_THOUGHTS_NONE},
    };
    for (size_t i = 0; i < sizeof templates / sizeof *templates; i++) {
        CU_ASSERT_EQUAL(cpa_tool_form_of(templates[i].text), templates[i].tools);
        CU_ASSERT_EQUAL(cpa_thought_form_of(templates[i].text), templates[i].thoughts);
    }
    const char *known = NULL;
    CU_ASSERT_EQUAL(cpa_tool_form_named("llama3_json", &known), CPA_TOOLS_LLAMA3);
    CU_ASSERT_EQUAL(cpa_tool_form_named("pythonic", &known), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(known, "hermes"));
    CU_ASSERT_EQUAL(cpa_thought_form_named("deepseek_r1", &known), CPA_THOUGHTS_THINK);
    CU_ASSERT_EQUAL(cpa_thought_form_named("granite", &known), -1);
    CU_ASSERT(cpa_forms_have_mark(CPA_TOOLS_MISTRAL, CPA_THOUGHTS_THINK, "[ARGS]", 6));
    CU_ASSERT(cpa_forms_have_mark(CPA_TOOLS_NONE, CPA_THOUGHTS_THINK, "</think>", 8));
    CU_ASSERT(!cpa_forms_have_mark(CPA_TOOLS_HERMES, CPA_THOUGHTS_NONE, "</think>", 8));
    CU_ASSERT(!cpa_forms_have_mark(CPA_TOOLS_NONE, CPA_THOUGHTS_NONE, "", 0));
}

static const cpa_test tests[] = {
    {"calls of Hermes", calls_of_hermes},
    {"calls of Llama", calls_of_llama},
    {"calls of Mistral", calls_of_mistral},
    {"calls of DeepSeek", calls_of_deepseek},
    {"thoughts are told apart", thoughts_are_told_apart},
    {"calls beyond the most count nothing", calls_beyond_the_most_count_nothing},
    {"garbage is read alike however it is cut", garbage_is_read_alike_however_it_is_cut},
    {"long replies are read in one go", long_replies_are_read_in_one_go},
    {"forms are known by name and template", forms_are_known_by_name_and_template},
};

CPA_TEST_MAIN("reply", tests)
