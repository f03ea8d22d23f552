/* Constraints by their masks: what may come next is what is accepted, and there is always something. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/fixtures/unit.h"
#include "tests/grammar/walk.h"

static const char *const constraints[] = {
    "{\"json_object\": true}",
    "{\"regex\": \"(?:[a-z]{1,9}@)?\\\\d{1,3}(?:\xe2\x82\xac|\\\\.\\\\d{2})\"}",
    "{\"choice\": [\"the name\", \"the\", \"abcABC\", \"\xf0\x9f\x98\x80\"]}",
    "{\"sequence\": [{\"token\": \"<tool_call>\"}, {\"text\": \"{\\\"name\\\":\"}, {\"json_schema\": {\"type\": "
    "\"string\", \"maxLength\": 3}}, {\"text\": \"}\"}, {\"token\": \"</tool_call>\"}]}",
    "{\"repeat\": {\"any_of\": [{\"text\": \"ab\"}, {\"text\": \"12\"}]}, \"separator\": {\"text\": \", \"}}",
    "{\"json_schema\": {\"type\": \"array\", \"items\": {\"anyOf\": [{\"type\": \"integer\"}, {\"$ref\": \"#\"}]}}}",
    "{\"json_schema\": {\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\", \"minLength\": 2}, "
    "\"b\": {\"type\": [\"boolean\", \"null\"]}}, \"required\": [\"b\"]}}",
};
enum { CONSTRAINTS = sizeof constraints / sizeof *constraints };

static cpa_constraint *open_answer(const cpa_walk_vocabulary *v, const char *text) {
    cpa_constraint *answer = NULL;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(cpa_constraint_open(v->constraints, text, strlen(text), &answer, &err), CPA_OK);
    if (!answer) printf("\n    %s: %s ", text, err.message);
    return answer;
}

static int is_allowed(const uint32_t *words, uint32_t token) {
    return words[token / 32] >> token % 32 & 1;
}

/* At each state of a walk every token is tried on an answer of its own that has come as far. */
static void masks_allow_what_is_accepted(void) {
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 0));
    uint32_t words[16], way[40], random = 5;
    for (int c = 0; c < CONSTRAINTS; c++) {
        cpa_constraint *answer = open_answer(&v, constraints[c]);
        for (int n = 0, has_ended = 0; n < 12 && !has_ended; n++) {
            CU_ASSERT_EQUAL(cpa_constraint_mask(answer, words, NULL), CPA_OK);
            uint32_t chosen = v.end_id;
            for (uint32_t token = 0; token < v.n; token++) {
                cpa_constraint *other = open_answer(&v, constraints[c]);
                for (int i = 0; i < n; i++) CU_ASSERT_EQUAL(cpa_constraint_accept(other, way[i], NULL), CPA_OK);
                CU_ASSERT_EQUAL(cpa_constraint_key(other), cpa_constraint_key(answer));
                const int is_taken = cpa_constraint_accept(other, token, NULL) == CPA_OK;
                CU_ASSERT_EQUAL(is_taken, is_allowed(words, token));
                random = random * 1664525 + 1013904223;
                if (is_taken && token != v.end_id && (chosen == v.end_id || random >> 28 == 0)) chosen = token;
                cpa_constraint_close(other);
            }
            way[n] = chosen;
            has_ended = chosen == v.end_id;
            CU_ASSERT_EQUAL(cpa_constraint_accept(answer, chosen, NULL), CPA_OK);
        }
        cpa_constraint_close(answer);
    }
    cpa_walk_vocabulary_release(&v);
}

static void every_walk_comes_to_its_end(void) {
    char *text = malloc(CPA_WALK_TEXT);
    for (int bytes_alone = 0; bytes_alone < 2; bytes_alone++) {
        cpa_walk_vocabulary v;
        CU_ASSERT_FATAL(text && cpa_walk_vocabulary_make(&v, bytes_alone));
        for (int c = 0; c < CONSTRAINTS; c++) {
            for (uint64_t seed = 0; seed < 60; seed++) {
                cpa_error err = {.message = ""};
                const cpa_walk_result result = cpa_walk(&v, constraints[c], seed, text, &err);
                if (result != CPA_WALK_WHOLE) printf("\n    %s, %d: %.80s ", constraints[c], (int)result, text);
                CU_ASSERT_EQUAL(result, CPA_WALK_WHOLE);
            }
        }
        cpa_walk_vocabulary_release(&v);
    }
    free(text);
}

static void an_ended_answer_allows_ends_alone(void) {
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 0));
    uint32_t words[16];
    cpa_constraint *answer = open_answer(&v, "{\"text\": \"a\"}");
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, v.end_id, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, 'a', NULL), CPA_OK);
    const uint64_t before = cpa_constraint_key(answer);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, v.end_id, NULL), CPA_OK);
    CU_ASSERT_NOT_EQUAL(cpa_constraint_key(answer), before);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, 'a', NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, words, NULL), CPA_OK);
    for (uint32_t token = 0; token < v.n; token++) CU_ASSERT_EQUAL(is_allowed(words, token), token == v.end_id);
    cpa_constraint_close(answer);
    cpa_walk_vocabulary_release(&v);
}

/* Where a special token must come, only that may: no tokens of bytes that add up to what stands for it in a grammar. */
static void special_tokens_are_not_spelt(void) {
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 0));
    uint32_t words[16];
    cpa_constraint *answer = open_answer(&v, "{\"token\": \"<tool_call>\"}");
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, words, NULL), CPA_OK);
    for (uint32_t token = 0; token < v.n; token++) CU_ASSERT_EQUAL(is_allowed(words, token), token == v.n - 4);
    cpa_constraint_close(answer);
    cpa_walk_vocabulary_release(&v);
}

/* A vocabulary without some bytes: nothing begins that could not go on. */
static void bytes_without_a_token_are_left_out(void) {
    static const char *const texts[] = {"{\"", "a", "\"", ":", "1", "}", "\xc3", "{", "2", ",", "</s>"};
    enum { N = sizeof texts / sizeof *texts };
    cpa_grammar_token tokens[N];
    const uint32_t end_id = N - 1;
    for (int i = 0; i < N; i++) tokens[i] = (cpa_grammar_token){texts[i], strlen(texts[i]), i == N - 1};
    cpa_constraints *c = NULL;
    cpa_constraint *answer = NULL;
    cpa_error err = {.message = ""};
    uint32_t word;
    CU_ASSERT_EQUAL_FATAL(cpa_constraints_open(tokens, N, &end_id, 1, 1 << 20, &c, NULL), CPA_OK);
    static const char text[] =
        "{\"json_schema\": {\"type\": \"object\", \"additionalProperties\": {\"type\": \"integer\"}}}";
    CU_ASSERT_EQUAL_FATAL(cpa_constraint_open(c, text, strlen(text), &answer, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, 0, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, &word, NULL), CPA_OK);
    CU_ASSERT_FALSE(word >> 6 & 1); /* the first half of a character of which there is no second */
    CU_ASSERT(word >> 1 & 1);
    cpa_constraint_close(answer);
    static const char names_z[] = "{\"json_schema\": {\"enum\": [\"z\", \"a\"]}}", only_z[] = "{\"choice\": [\"z\"]}";
    CU_ASSERT_EQUAL_FATAL(cpa_constraint_open(c, names_z, strlen(names_z), &answer, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, 2, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, &word, NULL), CPA_OK);
    CU_ASSERT_EQUAL(word, 1u << 1);
    cpa_constraint_close(answer);
    CU_ASSERT_EQUAL(cpa_constraint_open(c, only_z, strlen(only_z), &answer, &err), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "tokens cannot write"));
    cpa_constraints_close(c);
}

/* More states than are kept: they are forgotten, and two answers that are in use go on as before. */
static void long_answers_outlive_the_memory_of_states(void) {
    static const char text[] = "{\"json_schema\": {\"type\": \"string\", \"maxLength\": 40000}}";
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    cpa_constraint *answer = open_answer(&v, text), *other = open_answer(&v, text);
    CU_ASSERT_EQUAL(cpa_constraint_accept(other, '"', NULL), CPA_OK);
    const uint64_t key = cpa_constraint_key(other);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, '"', NULL), CPA_OK);
    for (int i = 0; i < 40000; i++) {
        if (cpa_constraint_accept(answer, 'a', NULL) != CPA_OK) CU_FAIL("a character is refused");
    }
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, 'a', NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_constraint_accept(answer, '"', NULL), CPA_OK);
    CU_ASSERT(cpa_constraint_is_whole(answer));
    CU_ASSERT_NOT_EQUAL(cpa_constraint_key(other), key); /* numbers are not used again */
    CU_ASSERT_EQUAL(cpa_constraint_accept(other, 'a', NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_constraint_accept(other, '"', NULL), CPA_OK);
    CU_ASSERT(cpa_constraint_is_whole(other));
    cpa_constraint_close(answer);
    cpa_constraint_close(other);
    cpa_walk_vocabulary_release(&v);
}

/* Two grammars of more than half of the room: the second comes in when the first has no answer any more. */
static void grammars_have_a_bound_together(void) {
    static const char *const texts[] = {"{\"json_schema\": {\"type\": \"array\", \"minItems\": 5000}}",
                                        "{\"json_schema\": {\"type\": \"array\", \"minItems\": 5001}}"};
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    cpa_constraints_close(v.constraints);
    CU_ASSERT_EQUAL_FATAL(cpa_constraints_open(v.tokens, v.n, &v.end_id, 1, 600000, &v.constraints, NULL), CPA_OK);
    cpa_constraint *answer = open_answer(&v, texts[0]), *other = open_answer(&v, texts[0]), *third = NULL;
    cpa_error err = {.message = ""};
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(cpa_constraint_open(v.constraints, texts[1], strlen(texts[1]), &third, &err), CPA_BUSY);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "leave no room"));
        cpa_constraint_close(i == 0 ? other : answer);
    }
    third = open_answer(&v, texts[1]);
    cpa_constraint_close(third);
    cpa_walk_vocabulary_release(&v);
}

static void nesting_ends_where_it_would_be_too_deep(void) {
    static const char text[] = "{\"json_schema\": {\"type\": \"array\"}}";
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    cpa_constraint *answer = open_answer(&v, text);
    int n = 0;
    while (n < 1000 && cpa_constraint_accept(answer, '[', NULL) == CPA_OK) n++;
    CU_ASSERT(n > 60 && n < 200);
    uint32_t words[16];
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, words, NULL), CPA_OK);
    CU_ASSERT_FALSE(is_allowed(words, '['));
    for (int i = 0; i < n; i++) CU_ASSERT_EQUAL(cpa_constraint_accept(answer, ']', NULL), CPA_OK);
    CU_ASSERT(cpa_constraint_is_whole(answer));
    cpa_constraint_close(answer);
    cpa_walk_vocabulary_release(&v);
}

static void what_is_no_constraint_is_refused(void) {
    static const struct {
        const char *text, *line;
    } cases[] = {
        {"", "no JSON"},
        {"[]", "expected an object with one of"},
        {"{\"regex\": 1}", "regex: expected a string"},
        {"{\"regex\": \"(\"}", "regex: at byte 1"},
        {"{\"choice\": []}", "choice: expected"},
        {"{\"grammar\": \"\"}", "expected an object with one of"},
        {"{\"json_schema\": 1}", "json_schema: #: expected a schema"},
        {"{\"json_schema\": {\"not\": {}}}", "json_schema: #: the keyword not"},
        {"{\"json_schema\": false}", "no answer of at most"},
    };
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_constraint *answer = NULL;
        cpa_error err = {.message = ""};
        CU_ASSERT_NOT_EQUAL(cpa_constraint_open(v.constraints, cases[i].text, strlen(cases[i].text), &answer, &err),
                            CPA_OK);
        if (!strstr(err.message, cases[i].line)) printf("\n    %s: %s ", cases[i].text, err.message);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].line));
    }
    cpa_walk_vocabulary_release(&v);
}

/* `n` times a text, with a separator in between, in a buffer that the caller frees. */
static char *repeat(const char *begin, const char *part, int n, const char *end) {
    const size_t bytes = strlen(begin) + (strlen(part) + 1) * (size_t)n + strlen(end) + 1;
    char *out = malloc(bytes);
    CU_ASSERT_PTR_NOT_NULL_FATAL(out);
    char *at = stpcpy(out, begin);
    for (int i = 0; i < n; i++) at = stpcpy(stpcpy(at, i > 0 ? "," : ""), part);
    stpcpy(at, end);
    return out;
}

/* Small texts of much work: each is refused when its effort is spent, and so are states of very many places. */
static void hostile_constraints_are_refused_in_bounded_work(void) {
    static const char pairs[] = "{\"anyOf\": [{\"minLength\": 1}, {\"minLength\": 2}]}";
    struct {
        char *text;
        const char *line;
    } cases[] = {
        {repeat("{\"regex\": \"", "((a{0,100}){0,100}){0,19}", 1, "\"}"), "too much work"},
        {repeat("{\"json_schema\": {\"type\": \"integer\", \"allOf\": [{\"anyOf\": [{\"type\": \"null\"}]},", pairs, 30,
                "]}}"),
         "too much work"},
        {repeat("{\"sequence\": [", "{\"regex\": \".*\"}", 3000, "]}"), "too many ways"},
        {repeat("{\"json_schema\": {\"enum\": [", "[[[[[[[[[[[[[[[[[[\"a\"]]]]]]]]]]]]]]]]]]", 1,
                "], \"items\": {\"$ref\": \"#\"}}}"),
         "no answer"},
        {repeat("{\"choice\": [\"", "a", 600000, "\"]}"), "at most 1048576"},
    };
    cpa_walk_vocabulary v;
    CU_ASSERT_FATAL(cpa_walk_vocabulary_make(&v, 1));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_constraint *answer = NULL;
        cpa_error err = {.message = ""};
        CU_ASSERT_EQUAL(cpa_constraint_open(v.constraints, cases[i].text, strlen(cases[i].text), &answer, &err),
                        CPA_UNSUPPORTED);
        if (!strstr(err.message, cases[i].line)) printf("\n    %.60s: %s ", cases[i].text, err.message);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].line));
        cpa_constraint_close(answer);
        free(cases[i].text);
    }
    cpa_walk_vocabulary_release(&v);
}

/* Every value of a long list can be begun, and written. */
static void all_of_many_choices_can_be_chosen(void) {
    enum { N = 10000 };
    cpa_walk_vocabulary v;
    char *text = malloc(N * 16), *at = text;
    uint32_t words[16];
    CU_ASSERT_FATAL(text && cpa_walk_vocabulary_make(&v, 1));
    at += sprintf(at, "{\"json_schema\": {\"enum\": [");
    for (int i = 0; i < N; i++) at += sprintf(at, "%s%d", i > 0 ? "," : "", (int)(i * 7919LL % N) * 10 + 3);
    sprintf(at, "]}}");
    cpa_constraint *answer = open_answer(&v, text);
    CU_ASSERT_EQUAL(cpa_constraint_mask(answer, words, NULL), CPA_OK);
    for (char c = '1'; c <= '9'; c++) CU_ASSERT(is_allowed(words, (uint8_t)c));
    for (const char *c = "99993"; *c; c++) CU_ASSERT_EQUAL(cpa_constraint_accept(answer, (uint8_t)*c, NULL), CPA_OK);
    CU_ASSERT(cpa_constraint_is_whole(answer));
    cpa_constraint_close(answer);
    free(text);
    cpa_walk_vocabulary_release(&v);
}

/* Bytes changed, left out, doubled and taken from elsewhere: each is refused by a line, or walked to its end.
 * CPATTN_MUTATIONS: how many. */
static void mutations_of_constraints_do_no_harm(void) {
    static const char *const schemas[] = {
        "{\"json_schema\": {\"type\": [\"string\", \"number\"], \"pattern\": \"^[a-f]{1,3}\\\\d+$\", \"maxLength\": 9, "
        "\"minimum\": -1.5, \"exclusiveMaximum\": 20, \"multipleOf\": 2}}",
        "{\"json_schema\": {\"$defs\": {\"a\": {\"oneOf\": [{\"const\": 1}, {\"type\": \"array\", \"items\": "
        "{\"$ref\": "
        "\"#/$defs/a\"}}]}}, \"properties\": {\"x\": {\"$ref\": \"#/$defs/a\"}, \"y\": {\"format\": \"date\"}}, "
        "\"patternProperties\": {\"^z\": {\"enum\": [null, {\"k\": [0.5]}]}}, \"required\": [\"x\"]}}",
    };
    enum { SCHEMAS = 2, ALL = CONSTRAINTS + SCHEMAS, MOST = 2000 };
    const char *wanted = getenv("CPATTN_MUTATIONS");
    const int64_t n = wanted ? strtoll(wanted, NULL, 10) : 1000;
    cpa_walk_vocabulary v;
    char *text = malloc(CPA_WALK_TEXT);
    CU_ASSERT_FATAL(text && cpa_walk_vocabulary_make(&v, 0));
    uint64_t random = 11;
    for (int64_t i = 0; i < n; i++) {
        char line[MOST];
        const int64_t pick = i % ALL;
        snprintf(line, sizeof line, "%s", pick < CONSTRAINTS ? constraints[pick] : schemas[pick - CONSTRAINTS]);
        for (int64_t m = 0; m <= i % 4; m++) {
            const size_t bytes = strlen(line);
            random = cpa_mix64(random + CPA_GOLDEN);
            const size_t at = random % bytes, from = (random >> 20) % bytes, some = (random >> 40) % 8;
            if (random >> 60 < 6) line[at] = line[from];
            if (random >> 60 == 6 && at > 0) line[at] = (char)(random >> 50 | 1);
            if (random >> 60 > 6 && random >> 60 < 11) memmove(line + at, line + at + 1, bytes - at);
            if (random >> 60 >= 11 && bytes + some < MOST && from + some <= bytes) {
                char piece[8];
                memcpy(piece, line + from, some);
                memmove(line + at + some, line + at, bytes - at + 1);
                memcpy(line + at, piece, some);
            }
        }
        cpa_error err = {.message = ""};
        const cpa_walk_result result = line[0] ? cpa_walk(&v, line, random, text, &err) : CPA_WALK_WHOLE;
        const int is_fine = result == CPA_WALK_WHOLE || result == CPA_WALK_ENDLESS ||
                            (result == CPA_WALK_REFUSED && err.message[0] && !strchr(err.message, '\n'));
        if (!is_fine) printf("\n    %d: %s %s ", (int)result, line, err.message);
        CU_ASSERT(is_fine);
    }
    free(text);
    cpa_walk_vocabulary_release(&v);
}

static const cpa_test tests[] = {
    {"masks allow what is accepted", masks_allow_what_is_accepted},
    {"every walk comes to its end", every_walk_comes_to_its_end},
    {"an ended answer allows ends alone", an_ended_answer_allows_ends_alone},
    {"special tokens are not spelt", special_tokens_are_not_spelt},
    {"bytes without a token are left out", bytes_without_a_token_are_left_out},
    {"long answers outlive the memory of states", long_answers_outlive_the_memory_of_states},
    {"grammars have a bound together", grammars_have_a_bound_together},
    {"nesting ends where it would be too deep", nesting_ends_where_it_would_be_too_deep},
    {"hostile constraints are refused in bounded work", hostile_constraints_are_refused_in_bounded_work},
    {"all of many choices can be chosen", all_of_many_choices_can_be_chosen},
    {"mutations of constraints do no harm", mutations_of_constraints_do_no_harm},
    {"what is no constraint is refused", what_is_no_constraint_is_refused},
};
CPA_TEST_MAIN("constraints", tests)
