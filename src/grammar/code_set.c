#include "src/grammar/code_set.h"

#include <stdlib.h>
#include <unictype.h>

#include "base/array.h"

int cpa_code_set_add(cpa_code_set *set, uint32_t lo, uint32_t hi) {
    if (!cpa_array_reserve(&set->ranges, &set->capacity, set->count + 1, sizeof *set->ranges)) return 0;
    set->ranges[set->count++] = (struct cpa_code_range){lo, hi};
    return 1;
}

int cpa_code_set_add_set(cpa_code_set *set, const cpa_code_set *other) {
    for (int64_t i = 0; i < other->count; i++) {
        if (!cpa_code_set_add(set, other->ranges[i].lo, other->ranges[i].hi)) return 0;
    }
    return 1;
}

int cpa_code_set_add_category(cpa_code_set *set, const char *name, int *is_known) {
    const uc_general_category_t category = uc_general_category_byname(name);
    *is_known = category.bitmask != 0;
    for (uint32_t code = 1; *is_known && code <= CPA_LAST_CODE; code++) {
        if (!uc_is_general_category(code, category)) continue;
        const uint32_t lo = code;
        while (code < CPA_LAST_CODE && uc_is_general_category(code + 1, category)) code++;
        if (!cpa_code_set_add(set, lo, code)) return 0;
    }
    return 1;
}

static int compare_ranges(const void *a, const void *b) {
    const struct cpa_code_range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Ranges in their order, none of which touch. */
static void tidy(cpa_code_set *set) {
    if (set->count == 0) return;
    qsort(set->ranges, (size_t)set->count, sizeof *set->ranges, compare_ranges);
    int64_t last = 0;
    for (int64_t i = 1; i < set->count; i++) {
        const struct cpa_code_range range = set->ranges[i];
        if (range.lo > set->ranges[last].hi + 1) {
            set->ranges[++last] = range;
        } else if (range.hi > set->ranges[last].hi) {
            set->ranges[last].hi = range.hi;
        }
    }
    set->count = last + 1;
}

int cpa_code_set_invert(cpa_code_set *set) {
    cpa_code_set rest = {0};
    uint32_t next = 0;
    int is_made = 1;
    tidy(set);
    for (int64_t i = 0; is_made && i < set->count; i++) {
        if (set->ranges[i].lo > next) is_made = cpa_code_set_add(&rest, next, set->ranges[i].lo - 1);
        next = set->ranges[i].hi + 1;
    }
    if (is_made && next <= CPA_LAST_CODE) is_made = cpa_code_set_add(&rest, next, CPA_LAST_CODE);
    cpa_code_set_release(set);
    *set = rest;
    return is_made;
}

void cpa_code_set_build(cpa_code_set *set, cpa_graph *graph, uint32_t from, uint32_t to) {
    tidy(set);
    for (int64_t i = 0; i < set->count; i++) {
        cpa_graph_characters(graph, from, set->ranges[i].lo, set->ranges[i].hi, to);
    }
}

void cpa_code_set_release(cpa_code_set *set) {
    free(set->ranges);
    *set = (cpa_code_set){.count = 0};
}
