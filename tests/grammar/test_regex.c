/* Regular expressions and the automata that are made of them. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "src/grammar/dfa.h"
#include "tests/fixtures/unit.h"

static void check(const char *expression, int is_whole, const char *text, int expected) {
    cpa_dfa dfa = {0};
    cpa_effort effort = {CPA_EFFORT_MOST};
    cpa_error err = {.message = ""};
    const cpa_status status = cpa_dfa_of_regex(expression, strlen(expression), is_whole, &effort, &dfa, &err);
    CU_ASSERT_EQUAL(status, CPA_OK);
    const int takes = cpa_dfa_takes(&dfa, text, strlen(text));
    if (takes != expected) printf("\n    %s on %s: %d, not %d ", expression, text, takes, expected);
    CU_ASSERT_EQUAL(takes, expected);
    cpa_dfa_release(&dfa);
}

static void whole_expressions_take_their_texts(void) {
    static const struct {
        const char *expression, *taken, *not_taken;
    } cases[] = {
        {"abc", "abc", "abcd"},
        {"a|bc|", "", "b"},
        {"(?:ab)+", "abab", "aba"},
        {"(ab?){2,3}", "aaba", "a"},
        {"a{2}", "aa", "aaa"},
        {"a{2,}", "aaaa", "a"},
        {"a{0,2}b", "b", "aaab"},
        {"(?<year>\\d{4})-\\d\\d", "2024-05", "24-05"},
        {"[a-c\\-x]+", "a-x", "d"},
        {"[^a-c]", "\xc3\xa9", "b"},
        {"[\\]\\\\]", "]", "["},
        {".", "\xf0\x9f\x98\x80", "\n"},
        {"\\w+\\s\\S", "a_1 x", "a  "},
        {"\\S", "a", "\xef\xbb\xbf"},
        {"\\W", "\xe2\x82\xac", "\xc3\xa9"}, /* a letter for Python, not for ECMA-262 */
        {"[^\\w]", "-", "\xc3\xa9"},
        {"\\w", "e", "\xc3\xa9"},
        {"\\D", "a", "\xd9\xa1"},
        {"[^\\W]", "_", "\xc3\xa9"},
        {"[^\\s]", "a", "\xc2\x85"},
        {"\\x41\\u0042\\u{43}", "ABC", "abc"},
        {"\\ud83d\\ude00", "\xf0\x9f\x98\x80", "\xef\xbf\xbd"},
        {"\\p{Lu}\\p{L}*", "\xc3\x89t\xc3\xa9", "\xc3\xa9t"},
        {"\\P{L}", "1", "a"},
        {"^a$", "a", "b"},
        {"a*?b+?", "aab", "aa"},
        {"x*", "xxx", "xy"},
        {"(a*)*b", "aab", "aac"},
        {"[\xc3\xa0-\xc3\xbf]", "\xc3\xa9", "e"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check(cases[i].expression, 1, cases[i].taken, 1);
        check(cases[i].expression, 1, cases[i].not_taken, 0);
    }
}

static void patterns_are_found_anywhere_unless_they_are_anchored(void) {
    check("b+", 0, "abba", 1);
    check("b+", 0, "aca", 0);
    check("^b", 0, "ab", 0);
    check("^b", 0, "ba", 1);
    check("b$", 0, "ab", 1);
    check("b$", 0, "ba", 0);
    check("^(a|b)$|^$", 0, "", 1);
    check("^(a|b)$|^$", 0, "ab", 0);
    check("^a|b$", 0, "cb", 1);
    check("^a|b$", 0, "bc", 0);
    check("a^b", 0, "ab", 0);
    check("", 0, "anything", 1);
}

static void what_is_no_regular_language_is_refused_by_its_byte(void) {
    static const struct {
        const char *expression, *line;
    } cases[] = {
        {"a(?=b)", "at byte 3: looking ahead"},
        {"(?i)a", "at byte 2: flags"},
        {"(a)\\1", "at byte 4: references"},
        {"\\bword", "at byte 1: word boundaries"},
        {"a)", "at byte 1: )"},
        {"(a", "at byte 2: expected )"},
        {"[a", "at byte 2: expected ]"},
        {"*a", "at byte 0: a quantifier"},
        {"a{3,2}", "at byte 6: expected no"},
        {"[z-a]", "at byte 4: expected a range"},
        {"a++", "at byte 2: two quant"},
        {"\\p{Greek}", "at byte 2: \\p of"},
        {"\\q", "at byte 1: an escape"},
        {"a{200000}", "more than 100000"},
        {"(a|b)*a(a|b){20}", "states"},
        {"((((a{999}){999}){999}){999}){999}", "too large"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpa_dfa dfa = {0};
        cpa_effort effort = {CPA_EFFORT_MOST};
        cpa_error err = {.message = ""};
        CU_ASSERT_NOT_EQUAL(cpa_dfa_of_regex(cases[i].expression, strlen(cases[i].expression), 1, &effort, &dfa, &err),
                            CPA_OK);
        if (!strstr(err.message, cases[i].line)) printf("\n    %s: %s ", cases[i].expression, err.message);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, cases[i].line));
    }
}

static size_t write_code(uint32_t code, char *out) {
    if (code < 0x80) return out[0] = (char)code, 1;
    const int tail = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    for (int i = tail; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((tail == 1 ? 0xc0 : tail == 2 ? 0xe0 : 0xf0) | code);
    return (size_t)tail + 1;
}

/* Ranges with ends in all places: what an automaton takes is what lies in between. */
static void ranges_of_characters_are_those_of_utf8(void) {
    static const uint32_t edges[] = {1,       0x40,    0x7f,    0x80,    0xbf,     0xc0,     0x7ff,   0x800,
                                     0xfff,   0x1000,  0x2028,  0xd7ff,  0xe000,   0xfffe,   0xffff,  0x10000,
                                     0x1f600, 0x3ffff, 0x40000, 0xfffff, 0x100000, 0x10fffe, 0x10ffff};
    enum { EDGES = sizeof edges / sizeof *edges };
    for (int i = 0; i < EDGES; i++) {
        for (int j = i; j < EDGES; j++) {
            cpa_graph graph = {.most_nodes = 1000};
            const uint32_t from = cpa_graph_node(&graph), to = cpa_graph_node(&graph);
            cpa_dfa dfa = {0};
            cpa_effort effort = {CPA_EFFORT_MOST};
            cpa_graph_characters(&graph, from, edges[i], edges[j], to);
            CU_ASSERT_EQUAL(graph.status, CPA_OK);
            CU_ASSERT_EQUAL(cpa_dfa_of_graph(&graph, from, to, &effort, &dfa, NULL), CPA_OK);
            for (int k = 0; k < 2 * EDGES; k++) {
                const uint32_t code = k < EDGES ? edges[k] : cpa_mix64((uint64_t)(i * 1000 + j * 30 + k)) % 0x110000;
                char text[4];
                if (code == 0 || (code >= 0xd800 && code <= 0xdfff)) continue;
                const size_t n = write_code(code, text);
                CU_ASSERT_EQUAL(cpa_dfa_takes(&dfa, text, n), code >= edges[i] && code <= edges[j]);
            }
            cpa_dfa_release(&dfa);
            cpa_graph_release(&graph);
        }
    }
}

static void automata_are_joined(void) {
    cpa_dfa a = {0}, b = {0}, both = {0}, rest = {0};
    cpa_effort effort = {CPA_EFFORT_MOST};
    CU_ASSERT_EQUAL(cpa_dfa_of_regex("[a-m]{2,4}", 10, 1, &effort, &a, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_dfa_of_regex(".*c.*", 5, 1, &effort, &b, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_dfa_join(&a, &b, 0, &effort, &both, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_dfa_join(&a, &b, 1, &effort, &rest, NULL), CPA_OK);
    static const struct {
        const char *text;
        int in_both, in_rest;
    } cases[] = {{"ac", 1, 0}, {"ab", 0, 1}, {"c", 0, 0}, {"abcd", 1, 0}, {"zc", 0, 0}, {"abdef", 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(cpa_dfa_takes(&both, cases[i].text, strlen(cases[i].text)), cases[i].in_both);
        CU_ASSERT_EQUAL(cpa_dfa_takes(&rest, cases[i].text, strlen(cases[i].text)), cases[i].in_rest);
    }
    cpa_dfa nothing = {0};
    CU_ASSERT_EQUAL(cpa_dfa_join(&both, &rest, 0, &effort, &nothing, NULL), CPA_OK);
    CU_ASSERT_EQUAL(nothing.n_states, 0);
    cpa_dfa_release(&a);
    cpa_dfa_release(&b);
    cpa_dfa_release(&both);
    cpa_dfa_release(&rest);
}

static const cpa_test tests[] = {
    {"whole expressions take their texts", whole_expressions_take_their_texts},
    {"patterns are found anywhere unless they are anchored", patterns_are_found_anywhere_unless_they_are_anchored},
    {"what is no regular language is refused by its byte", what_is_no_regular_language_is_refused_by_its_byte},
    {"ranges of characters are those of UTF-8", ranges_of_characters_are_those_of_utf8},
    {"automata are joined", automata_are_joined},
};
CPA_TEST_MAIN("regex", tests)
