#include "src/grammar/number_range.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

enum { DIGITS = 15, MOST_NODES = 100000 };

static const int64_t most_integer = 999999999999999; /* of 15 digits */

int cpa_number_range_has(const cpa_number_range *r, double x) {
    if (r->above_min ? x <= r->min : x < r->min) return 0;
    if (r->below_max ? x >= r->max : x > r->max) return 0;
    return r->multiple_of == 0 || fmod(x, (double)r->multiple_of) == 0;
}

/* ---- Pieces ---- */

static void add_digits(cpa_graph *g, uint32_t from, int lo, int hi, uint32_t to) {
    if (lo <= hi) cpa_graph_bytes(g, from, (uint8_t)('0' + lo), (uint8_t)('0' + hi), to);
}

/* Numbers as long as both bounds, between them: three ways at most for each digit, along either bound or free. */
static void add_between(cpa_graph *g, uint32_t from, const char *lo, const char *hi, uint32_t to) {
    enum { BOTH, LOW, HIGH, FREE, WAYS };
    const size_t n = strlen(lo);
    uint32_t at[WAYS] = {from, from, from, from}, next[WAYS];
    int is_there[WAYS] = {1, 0, 0, 0};
    for (size_t i = 0; i < n; i++) {
        const int l = lo[i] - '0', h = hi[i] - '0';
        for (int w = 0; w < WAYS; w++) next[w] = i + 1 < n ? cpa_graph_node(g) : to;
        int goes_on[WAYS] = {0, 0, 0, 0};
        if (is_there[BOTH] && l == h) {
            add_digits(g, at[BOTH], l, l, next[BOTH]);
            goes_on[BOTH] = 1;
        } else if (is_there[BOTH]) {
            add_digits(g, at[BOTH], l, l, next[LOW]);
            add_digits(g, at[BOTH], l + 1, h - 1, next[FREE]);
            add_digits(g, at[BOTH], h, h, next[HIGH]);
            goes_on[LOW] = goes_on[FREE] = goes_on[HIGH] = 1;
        }
        if (is_there[LOW]) {
            add_digits(g, at[LOW], l, l, next[LOW]);
            add_digits(g, at[LOW], l + 1, 9, next[FREE]);
            goes_on[LOW] = goes_on[FREE] = 1;
        }
        if (is_there[HIGH]) {
            add_digits(g, at[HIGH], h, h, next[HIGH]);
            add_digits(g, at[HIGH], 0, h - 1, next[FREE]);
            goes_on[HIGH] = goes_on[FREE] = 1;
        }
        if (is_there[FREE]) {
            add_digits(g, at[FREE], 0, 9, next[FREE]);
            goes_on[FREE] = 1;
        }
        memcpy(at, next, sizeof at);
        memcpy(is_there, goes_on, sizeof is_there);
    }
}

/* Integers from lo, at least 0, to hi. */
static void add_integers(cpa_graph *g, uint32_t from, int64_t lo, int64_t hi, uint32_t to) {
    int64_t first = 0, last = 9; /* of so many digits */
    for (int n = 1; n <= DIGITS; n++, first = last + 1, last = last * 10 + 9) {
        char low[24], high[24];
        if (lo > last || hi < first || lo > hi) continue;
        snprintf(low, sizeof low, "%" PRId64, lo > first ? lo : first);
        snprintf(high, sizeof high, "%" PRId64, hi < last ? hi : last);
        add_between(g, from, low, high, to);
    }
}

/* Nothing, or a point and digits. */
static void add_any_fraction(cpa_graph *g, uint32_t from, uint32_t to) {
    const uint32_t point = cpa_graph_node(g), digits = cpa_graph_node(g);
    cpa_graph_empty(g, from, to);
    cpa_graph_bytes(g, from, '.', '.', point);
    add_digits(g, point, 0, 9, digits);
    add_digits(g, digits, 0, 9, digits);
    cpa_graph_empty(g, digits, to);
}

/* A bound in decimals: its integer, and the digits behind the point, the last of which is not 0. */
typedef struct bound {
    int64_t integer;
    char fraction[DIGITS + 1];
} bound;

/* Of x, at least 0; 0 if the decimals that there is room for are not x. */
static int read_bound(double x, bound *out) {
    char text[40];
    const int digits = snprintf(text, sizeof text, "%.0f", floor(x));
    if (digits > DIGITS) return 0;
    snprintf(text, sizeof text, "%.*f", DIGITS - digits, x);
    if (strtod(text, NULL) != x) return 0;
    const char *point = strchr(text, '.');
    size_t n = point ? strlen(point + 1) : 0;
    while (n > 0 && point[n] == '0') n--;
    out->integer = strtoll(text, NULL, 10);
    memcpy(out->fraction, point ? point + 1 : "", n);
    out->fraction[n] = 0;
    return 1;
}

/* Numbers of at least 0 that are at least a bound, or greater with `strict`. */
static void add_at_least(cpa_graph *g, uint32_t from, const bound *b, int strict, uint32_t to) {
    char integer[24];
    const uint32_t greater = cpa_graph_node(g), equal = cpa_graph_node(g), free_digits = cpa_graph_node(g);
    add_integers(g, from, b->integer + 1, most_integer, greater);
    add_any_fraction(g, greater, to);
    add_digits(g, free_digits, 0, 9, free_digits);
    cpa_graph_empty(g, free_digits, to);
    snprintf(integer, sizeof integer, "%" PRId64, b->integer);
    cpa_graph_text(g, from, integer, strlen(integer), equal);
    uint32_t at = cpa_graph_node(g);
    cpa_graph_bytes(g, equal, '.', '.', at);
    if (!*b->fraction && !strict) cpa_graph_empty(g, equal, to);
    for (const char *f = b->fraction; *f; f++) {
        const uint32_t next = cpa_graph_node(g);
        add_digits(g, at, *f - '0' + 1, 9, free_digits);
        add_digits(g, at, *f - '0', *f - '0', next);
        at = next;
    }
    if (strict) { /* zeros and a digit that is none */
        add_digits(g, at, 0, 0, at);
        add_digits(g, at, 1, 9, free_digits);
    } else if (*b->fraction) {
        cpa_graph_empty(g, at, free_digits);
    } else {
        add_digits(g, at, 0, 9, free_digits);
    }
}

/* Numbers of at least 0 that are at most a bound, or less with `strict`. */
static void add_at_most(cpa_graph *g, uint32_t from, const bound *b, int strict, uint32_t to) {
    char integer[24];
    const uint32_t less = cpa_graph_node(g), equal = cpa_graph_node(g), free_digits = cpa_graph_node(g);
    add_integers(g, from, 0, b->integer - 1, less);
    add_any_fraction(g, less, to);
    add_digits(g, free_digits, 0, 9, free_digits);
    cpa_graph_empty(g, free_digits, to);
    snprintf(integer, sizeof integer, "%" PRId64, b->integer);
    cpa_graph_text(g, from, integer, strlen(integer), equal);
    uint32_t at = cpa_graph_node(g);
    cpa_graph_bytes(g, equal, '.', '.', at);
    if (*b->fraction || !strict) cpa_graph_empty(g, equal, to);
    for (const char *f = b->fraction; *f; f++) {
        const uint32_t next = cpa_graph_node(g);
        add_digits(g, at, 0, *f - '0' - 1, free_digits);
        add_digits(g, at, *f - '0', *f - '0', next);
        at = next;
        if (f[1]) cpa_graph_empty(g, at, to); /* less, since the last digit is not 0 */
    }
    if (strict) return;
    const uint32_t zeros = cpa_graph_node(g);
    if (*b->fraction) cpa_graph_empty(g, at, to);
    add_digits(g, at, 0, 0, zeros);
    add_digits(g, zeros, 0, 0, zeros);
    cpa_graph_empty(g, zeros, to);
}

/* ---- Automata ---- */

static cpa_status close_graph(cpa_graph *g, uint32_t from, uint32_t to, cpa_effort *effort, cpa_dfa *out,
                              cpa_error *err) {
    cpa_status status = g->status == CPA_OK ? cpa_dfa_of_graph(g, from, to, effort, out, err)
                                            : cpa_fail(err, g->status, "no room for a range of numbers");
    cpa_graph_release(g);
    return status;
}

/* Numbers above, or with `below` below, a bound. */
static cpa_status side(double x, int strict, int below, cpa_effort *effort, cpa_dfa *out, cpa_error *err) {
    cpa_graph g = {.most_nodes = MOST_NODES};
    const uint32_t from = cpa_graph_node(&g), to = cpa_graph_node(&g), minus = cpa_graph_node(&g);
    bound b;
    if (!read_bound(fabs(x), &b)) {
        cpa_graph_release(&g);
        return cpa_fail(err, CPA_UNSUPPORTED, "the bound %.17g has more than %d digits", x, DIGITS);
    }
    const bound zero = {.integer = 0};
    /* Behind a minus sign is 0 or less, and before it 0 or more. */
    const int negative = below ? x < 0 || (x == 0 && strict) : x < 0;
    cpa_graph_bytes(&g, from, '-', '-', minus);
    if (below && negative) {
        add_at_least(&g, minus, &b, strict, to);
    } else if (below) {
        add_at_most(&g, from, &b, strict, to);
        add_at_least(&g, minus, &zero, 0, to);
    } else if (negative) {
        add_at_least(&g, from, &zero, 0, to);
        add_at_most(&g, minus, &b, strict, to);
    } else {
        add_at_least(&g, from, &b, strict, to);
    }
    return close_graph(&g, from, to, effort, out, err);
}

/* All that may be written: so many digits at most. */
static cpa_status all(int integers_alone, cpa_effort *effort, cpa_dfa *out, cpa_error *err) {
    static const char integers[] = "-?[1-9][0-9]{0,14}|0", numbers[] = "-?(?:0|[1-9][0-9]{0,14})(?:\\.[0-9]{1,14})?";
    const char *expression = integers_alone ? integers : numbers;
    CPA_TRY(cpa_dfa_of_regex(expression, strlen(expression), 1, effort, out, err));
    cpa_dfa few = {0};
    cpa_status status = cpa_dfa_of_regex("[-.]*(?:[0-9][-.]*){1,15}", 25, 1, effort, &few, err);
    if (status == CPA_OK) status = cpa_dfa_narrow(out, &few, 0, effort, err);
    if (status != CPA_OK) cpa_dfa_release(out);
    return status;
}

static cpa_status multiples(int64_t of, cpa_effort *effort, cpa_dfa *out, cpa_error *err) {
    cpa_graph g = {.most_nodes = MOST_NODES};
    const uint32_t from = cpa_graph_node(&g), first = cpa_graph_node(&g);
    for (int64_t r = 1; r < of; r++) cpa_graph_node(&g); /* first + r: the digits so far leave r */
    cpa_graph_empty(&g, from, first);
    cpa_graph_bytes(&g, from, '-', '-', first);
    for (int64_t r = 0; r < of; r++) {
        for (int d = 0; d < 10; d++) {
            add_digits(&g, first + (uint32_t)r, d, d, first + (uint32_t)((r * 10 + d) % of));
        }
    }
    return close_graph(&g, from, first, effort, out, err);
}

cpa_status cpa_number_range_dfa(const cpa_number_range *range, int integers_alone, cpa_effort *effort, cpa_dfa *out,
                                cpa_error *err) {
    cpa_dfa dfa = {0}, part = {0};
    cpa_status status = all(integers_alone || range->multiple_of > 0, effort, &dfa, err);
    /* Bounds beyond what is written at all: 10^15. */
    const double most = (double)most_integer;
    if (status == CPA_OK && (range->min > most || range->max < -most)) cpa_dfa_release(&dfa);
    if (status == CPA_OK && range->min >= -most && range->min <= most) {
        status = side(range->min, range->above_min, 0, effort, &part, err);
        if (status == CPA_OK) status = cpa_dfa_narrow(&dfa, &part, 0, effort, err);
    }
    if (status == CPA_OK && range->max >= -most && range->max <= most) {
        status = side(range->max, range->below_max, 1, effort, &part, err);
        if (status == CPA_OK) status = cpa_dfa_narrow(&dfa, &part, 0, effort, err);
    }
    if (status == CPA_OK && range->multiple_of > 1) {
        status = multiples(range->multiple_of, effort, &part, err);
        if (status == CPA_OK) status = cpa_dfa_narrow(&dfa, &part, 0, effort, err);
    }
    if (status == CPA_OK) {
        *out = dfa;
    } else {
        cpa_dfa_release(&dfa);
    }
    return status;
}
