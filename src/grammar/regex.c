#include "src/grammar/regex.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "src/grammar/code_set.h"

enum { MOST_GROUPS_DEEP = 100, MOST_REPEATS = 100000, UNBOUNDED = -1, CATEGORY_BYTES = 40, MOST_CATEGORIES = 40 };

typedef struct parser {
    const char *begin, *at, *end;
    cpa_graph *graph;
    cpa_effort *effort;
    int depth;
    int is_inverted; /* the class that is being read */
    struct {
        char name[CATEGORY_BYTES];
        cpa_code_set set;
    } categories[MOST_CATEGORIES]; /* categories met so far: an atom is read again for each time that it is repeated */
    int n_categories;
    cpa_error *err;
} parser;

static int fail(const parser *p, cpa_status status, const char *what) {
    cpa_fail(p->err, status, "at byte %td: %s", p->at - p->begin, what);
    return 0;
}

static int unsupported(const parser *p, const char *what) {
    return fail(p, CPA_UNSUPPORTED, what);
}

static int invalid(const parser *p, const char *what) {
    return fail(p, CPA_INVALID, what);
}

static int no_memory(const parser *p) {
    return fail(p, CPA_NO_MEMORY, "no memory for the expression");
}

static int is_next(const parser *p, const char *text) {
    const size_t n = strlen(text);
    return (size_t)(p->end - p->at) >= n && memcmp(p->at, text, n) == 0;
}

static int take(parser *p, const char *text) {
    if (!is_next(p, text)) return 0;
    p->at += strlen(text);
    return 1;
}

/* A character of the expression, which is valid UTF-8. */
static uint32_t take_code(parser *p) {
    const unsigned char lead = (unsigned char)*p->at++;
    if (lead < 0x80) return lead;
    const int tail = lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    uint32_t code = lead & (0x3fu >> tail);
    for (int i = 0; i < tail; i++) code = code << 6 | ((unsigned char)*p->at++ & 0x3f);
    return code;
}

static int take_hex(parser *p, int digits, uint32_t *out) {
    *out = 0;
    for (int i = 0; i < digits; i++, p->at++) {
        const char c = p->at < p->end ? *p->at : 0;
        const int is_digit = c >= '0' && c <= '9', is_letter = (c | 32) >= 'a' && (c | 32) <= 'f';
        if (!is_digit && !is_letter) return invalid(p, "expected a hexadecimal digit");
        *out = *out * 16 + (uint32_t)(is_digit ? c - '0' : (c | 32) - 'a' + 10);
    }
    return 1;
}

/* What follows \u: four digits, twice for a pair of surrogates, or {digits}. */
static int take_unicode(parser *p, uint32_t *out) {
    if (take(p, "{")) {
        const char *close = memchr(p->at, '}', (size_t)(p->end - p->at));
        if (!close || close == p->at || close - p->at > 6) return invalid(p, "expected \\u{1 to 6 digits}");
        if (!take_hex(p, (int)(close - p->at), out)) return 0;
        p->at++;
        return *out <= CPA_LAST_CODE ? 1 : invalid(p, "expected a code point up to 10FFFF");
    }
    if (!take_hex(p, 4, out)) return 0;
    uint32_t low;
    if (*out < 0xd800 || *out > 0xdbff || !take(p, "\\u")) return 1;
    if (!take_hex(p, 4, &low)) return 0;
    if (low < 0xdc00 || low > 0xdfff) return invalid(p, "expected the second of a pair of surrogates");
    *out = 0x10000 + ((*out - 0xd800) << 10) + (low - 0xdc00);
    return 1;
}

static int add_ranges(const parser *p, cpa_code_set *set, const uint32_t (*ranges)[2], size_t n) {
    int is_made = 1;
    for (size_t i = 0; is_made && i < n; i++) is_made = cpa_code_set_add(set, ranges[i][0], ranges[i][1]);
    return is_made ? 1 : no_memory(p);
}

/* The characters of a general category; NULL where it fails. */
static const cpa_code_set *find_category(parser *p, const char name[CATEGORY_BYTES]) {
    int i = 0, is_known = 0;
    while (i < p->n_categories && strcmp(p->categories[i].name, name) != 0) i++;
    if (i < p->n_categories) return &p->categories[i].set;
    if (i == MOST_CATEGORIES) return unsupported(p, "\\p of more than 40 names"), NULL;
    if (!cpa_effort_spend(p->effort, CPA_LAST_CODE / 2)) return unsupported(p, "too much work"), NULL;
    const int is_made = cpa_code_set_add_category(&p->categories[i].set, name, &is_known);
    if (!is_made) return no_memory(p), NULL;
    if (!is_known) return unsupported(p, "\\p of anything but a general category of Unicode"), NULL;
    memcpy(p->categories[i].name, name, CATEGORY_BYTES);
    return &p->categories[p->n_categories++].set;
}

/* \p{...} and \P{...}, behind the letter. */
static int take_category(parser *p, cpa_code_set *set, int inverted) {
    char name[CATEGORY_BYTES] = "";
    const char *close = is_next(p, "{") ? memchr(p->at, '}', (size_t)(p->end - p->at)) : NULL;
    if (!close || close - p->at > CATEGORY_BYTES) return unsupported(p, "expected the {general category} of \\p");
    const size_t n = (size_t)(close - p->at - 1);
    memcpy(name, p->at + 1, n);
    name[n] = 0;
    const cpa_code_set *category = find_category(p, name);
    if (!category) return 0;
    cpa_code_set added = {0};
    int is_made = cpa_code_set_add_set(&added, category);
    if (is_made && inverted) is_made = cpa_code_set_invert(&added);
    if (is_made) is_made = cpa_code_set_add_set(set, &added);
    cpa_code_set_release(&added);
    p->at = close + 1;
    return is_made ? 1 : no_memory(p);
}

/* All of some categories. */
static int add_categories(parser *p, cpa_code_set *set, const char *const *names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char name[CATEGORY_BYTES] = "";
        strcpy(name, names[i]);
        const cpa_code_set *category = find_category(p, name);
        if (!category) return 0;
        if (!cpa_code_set_add_set(set, category)) return no_memory(p);
    }
    return 1;
}

/* What \d, \w, \s, \D, \W and \S stand for. ECMA-262, Python and Rust do not agree on that: \d, \w and \s have what all
 * of them take, and the others nothing that one of them does not; within an inverted class it is the other way around. */
static int add_named(parser *p, cpa_code_set *set, char name) {
    static const uint32_t digits[][2] = {{'0', '9'}}, joiners[][2] = {{0x200c, 0x200d}};
    static const uint32_t letters[][2] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
    static const char *const all_digits[] = {"Nd"}, *const all_letters[] = {"L", "M", "N", "Pc"};
    static const uint32_t spaces[][2] = {{9, 13},          {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680},
                                         {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                                         {0x3000, 0x3000}, {0x1c, 0x1f},     {0x85, 0x85},     {0xfeff, 0xfeff}};
    enum { SPACES = 9, ALL_SPACES = 12 };
    const int is_rest = name < 'a', is_wide = is_rest != p->is_inverted;
    cpa_code_set added = {0};
    int is_made = name == 's' || name == 'S'   ? add_ranges(p, &added, spaces, is_wide ? ALL_SPACES : SPACES)
                  : name == 'd' || name == 'D' ? add_ranges(p, &added, digits, 1)
                                               : add_ranges(p, &added, letters, 4);
    if (is_made && is_wide && (name == 'd' || name == 'D')) is_made = add_categories(p, &added, all_digits, 1);
    if (is_made && is_wide && (name == 'w' || name == 'W')) {
        is_made = add_categories(p, &added, all_letters, 4) && add_ranges(p, &added, joiners, 1);
    }
    if (is_made && is_rest && !cpa_code_set_invert(&added)) is_made = no_memory(p);
    if (is_made && !cpa_code_set_add_set(set, &added)) is_made = no_memory(p);
    cpa_code_set_release(&added);
    return is_made;
}

/* Adds what an escape stands for, behind the backslash. *single is the character if it is one, else stays. */
static int take_escape(parser *p, cpa_code_set *set, int64_t *single) {
    static const char names[] = "tnvfr", codes[] = "\t\n\v\f\r";
    if (p->at == p->end) return invalid(p, "expected a character behind the backslash");
    const char c = *p->at;
    uint32_t code;
    if (c && strchr("dwsDWS", c)) return p->at++, add_named(p, set, c);
    if (c == 'p' || c == 'P') return p->at++, take_category(p, set, c == 'P');
    if (c == 'b' || c == 'B') return unsupported(p, "word boundaries are not supported");
    if ((c >= '1' && c <= '9') || c == 'k') return unsupported(p, "references back are not supported");
    if (c && strchr(names, c)) {
        code = (uint32_t)codes[strchr(names, c) - names];
        p->at++;
    } else if (c == 'x' || c == 'u') {
        p->at++;
        if (c == 'x' ? !take_hex(p, 2, &code) : !take_unicode(p, &code)) return 0;
    } else if (c == 'c' && p->at + 1 < p->end && (p->at[1] | 32) >= 'a' && (p->at[1] | 32) <= 'z') {
        code = (uint32_t)p->at[1] & 31;
        p->at += 2;
    } else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '0') {
        return unsupported(p, "an escape that is not known everywhere");
    } else {
        code = take_code(p);
    }
    *single = code;
    return cpa_code_set_add(set, code, code) ? 1 : no_memory(p);
}

/* A member of a class: a character, or an escape for several. */
static int take_member(parser *p, cpa_code_set *set, int64_t *single) {
    *single = -1;
    if (is_next(p, "[:") || is_next(p, "&&")) return unsupported(p, "[: and && in classes are not supported");
    if (take(p, "\\b")) {
        *single = '\b';
        return cpa_code_set_add(set, '\b', '\b') ? 1 : no_memory(p);
    }
    if (take(p, "\\")) return take_escape(p, set, single);
    *single = take_code(p);
    return cpa_code_set_add(set, (uint32_t)*single, (uint32_t)*single) ? 1 : no_memory(p);
}

/* Behind the bracket that opens it. */
static int take_class(parser *p, cpa_code_set *set) {
    const int inverted = take(p, "^");
    p->is_inverted = inverted;
    while (p->at < p->end && *p->at != ']') {
        int64_t lo, hi;
        if (!take_member(p, set, &lo)) return 0;
        if (!is_next(p, "-") || p->at + 1 == p->end || p->at[1] == ']') continue;
        p->at++;
        if (!take_member(p, set, &hi)) return 0;
        if (lo < 0 || hi < lo) return invalid(p, "expected a range from one character to another, not before it");
        if (!cpa_code_set_add(set, (uint32_t)lo, (uint32_t)hi)) return no_memory(p);
    }
    p->is_inverted = 0;
    if (!take(p, "]")) return invalid(p, "expected ] at the end of a class");
    return !inverted || cpa_code_set_invert(set) ? 1 : no_memory(p);
}

static int build_alternatives(parser *p, uint32_t from, uint32_t to);

static int build_group(parser *p, uint32_t from, uint32_t to) {
    if (take(p, "?")) {
        const int is_plain = take(p, ":");
        if (!is_plain && (is_next(p, "=") || is_next(p, "!") || is_next(p, "<=") || is_next(p, "<!"))) {
            return unsupported(p, "looking ahead and behind is not supported");
        }
        if (!is_plain && (take(p, "P<") || take(p, "<"))) {
            const char *close = memchr(p->at, '>', (size_t)(p->end - p->at));
            if (!close) return invalid(p, "expected > behind the name of a group");
            p->at = close + 1;
        } else if (!is_plain) {
            return unsupported(p, "flags and other forms of groups are not supported");
        }
    }
    if (++p->depth > MOST_GROUPS_DEEP) return unsupported(p, "groups more than 100 deep");
    if (!build_alternatives(p, from, to)) return 0;
    p->depth--;
    return take(p, ")") ? 1 : invalid(p, "expected ) at the end of a group");
}

static int build_set(parser *p, uint32_t from, uint32_t to, int (*read)(parser *, cpa_code_set *)) {
    cpa_code_set set = {0};
    const int is_read = read(p, &set);
    if (is_read) cpa_code_set_build(&set, p->graph, from, to);
    cpa_code_set_release(&set);
    return is_read;
}

static int take_any(parser *p, cpa_code_set *set) {
    static const uint32_t line_ends[][2] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
    if (!add_ranges(p, set, line_ends, 3)) return 0;
    return cpa_code_set_invert(set) ? 1 : no_memory(p);
}

static int take_one_escape(parser *p, cpa_code_set *set) {
    int64_t single;
    return take_escape(p, set, &single);
}

static int take_character(parser *p, cpa_code_set *set) {
    const uint32_t code = take_code(p);
    return cpa_code_set_add(set, code, code) ? 1 : no_memory(p);
}

static int build_atom(parser *p, uint32_t from, uint32_t to) {
    if (p->graph->status != CPA_OK) return unsupported(p, "the expression is too large");
    if (take(p, "(")) return build_group(p, from, to);
    if (take(p, "[")) return build_set(p, from, to, take_class);
    if (take(p, ".")) return build_set(p, from, to, take_any);
    if (take(p, "\\")) return build_set(p, from, to, take_one_escape);
    if (is_next(p, "^") || is_next(p, "$")) {
        cpa_graph_edge(p->graph, from, (cpa_edge){.kind = *p->at++ == '^' ? CPA_EDGE_BEGIN : CPA_EDGE_END, .to = to});
        return 1;
    }
    if (strchr("*+?{", *p->at)) return invalid(p, "a quantifier with nothing in front");
    return build_set(p, from, to, take_character);
}

static int take_count(parser *p, int64_t *out) {
    if (p->at == p->end || *p->at < '0' || *p->at > '9') return invalid(p, "expected a number of times");
    for (*out = 0; p->at < p->end && *p->at >= '0' && *p->at <= '9'; p->at++) {
        *out = *out * 10 + (*p->at - '0');
        if (*out > MOST_REPEATS) return unsupported(p, "more than 100000 times");
    }
    return 1;
}

static int take_quantifier(parser *p, int64_t *least, int64_t *most) {
    *least = *most = 1;
    if (take(p, "*")) {
        *least = 0, *most = UNBOUNDED;
    } else if (take(p, "+")) {
        *most = UNBOUNDED;
    } else if (take(p, "?")) {
        *least = 0;
    } else if (take(p, "{")) {
        if (!take_count(p, least)) return 0;
        *most = *least;
        if (take(p, ",")) {
            *most = UNBOUNDED;
            if (!is_next(p, "}") && !take_count(p, most)) return 0;
        }
        if (!take(p, "}")) return invalid(p, "expected } behind a number of times");
        if (*most != UNBOUNDED && *most < *least) return invalid(p, "expected no more times at least than at most");
    } else {
        return 1;
    }
    take(p, "?"); /* lazy: the same language */
    return is_next(p, "+") || is_next(p, "*") || is_next(p, "?") ? unsupported(p, "two quantifiers in a row") : 1;
}

/* An atom and how often: its text is read anew for each time. */
static int build_repeated(parser *p, uint32_t from, uint32_t to) {
    const char *atom = p->at;
    const uint32_t first = cpa_graph_node(p->graph);
    if (!build_atom(p, from, first)) return 0;
    int64_t least, most;
    if (!take_quantifier(p, &least, &most)) return 0;
    const char *end = p->at;
    if (least == 0) cpa_graph_empty(p->graph, from, to);
    if (most == 0) return 1;
    uint32_t begin = from, at = first; /* of the last time */
    for (int64_t i = 1; i < least || i < most; i++) {
        if (i >= least) cpa_graph_empty(p->graph, at, to);
        begin = at;
        at = cpa_graph_node(p->graph);
        p->at = atom;
        if (!build_atom(p, begin, at)) return 0;
    }
    if (most == UNBOUNDED) cpa_graph_empty(p->graph, at, begin);
    cpa_graph_empty(p->graph, at, to);
    p->at = end;
    return 1;
}

static int build_alternatives(parser *p, uint32_t from, uint32_t to) {
    do {
        uint32_t at = cpa_graph_node(p->graph);
        cpa_graph_empty(p->graph, from, at);
        while (p->at < p->end && *p->at != '|' && *p->at != ')') {
            const uint32_t next = cpa_graph_node(p->graph);
            if (!build_repeated(p, at, next)) return 0;
            at = next;
        }
        cpa_graph_empty(p->graph, at, to);
    } while (take(p, "|"));
    return 1;
}

cpa_status cpa_regex_build(const char *expression, size_t bytes, cpa_graph *graph, uint32_t from, uint32_t to,
                           cpa_effort *effort, cpa_error *err) {
    cpa_error own;
    parser p = {.begin = expression,
                .at = expression,
                .end = expression + bytes,
                .graph = graph,
                .effort = effort,
                .err = &own};
    const int is_built = build_alternatives(&p, from, to);
    for (int i = 0; i < MOST_CATEGORIES; i++) cpa_code_set_release(&p.categories[i].set);
    if (!is_built) {
        if (err) *err = own;
        return own.status;
    }
    if (p.at < p.end) return cpa_fail(err, CPA_INVALID, "at byte %td: ) without a group", p.at - p.begin);
    return CPA_OK;
}
