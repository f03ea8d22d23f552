#include "src/schedule/waiting_lines.h"

#include <stdlib.h>

#include "base/array.h"

void cpa_waiting_destroy(cpa_waiting_lines *lines) {
    free(lines->heap);
    lines->heap = NULL;
    lines->tenants = lines->capacity = 0;
}

int cpa_waiting_reserve(cpa_waiting_lines *lines, int64_t tenants, cpa_tenant *tenant, int64_t sequences) {
    return cpa_array_reserve(&lines->heap, &lines->capacity, tenants, sizeof(cpa_tenant *)) &&
           cpa_sequence_queue_reserve(&tenant->waiting, sequences);
}

static int goes_before(const cpa_tenant *a, const cpa_tenant *b) {
    return cpa_sequence_before(cpa_sequence_queue_first(&a->waiting), cpa_sequence_queue_first(&b->waiting));
}

static void put(cpa_waiting_lines *lines, cpa_tenant *tenant, int64_t at) {
    lines->heap[at] = tenant;
    tenant->place = at + 1;
}

/* Moves a tenant from `at` towards the first or the last, to where it belongs. */
static void settle(cpa_waiting_lines *lines, cpa_tenant *tenant, int64_t at) {
    for (; at > 0 && goes_before(tenant, lines->heap[(at - 1) / 2]); at = (at - 1) / 2)
        put(lines, lines->heap[(at - 1) / 2], at);
    for (int64_t child = 2 * at + 1; child < lines->tenants; child = 2 * at + 1) {
        if (child + 1 < lines->tenants && goes_before(lines->heap[child + 1], lines->heap[child])) child++;
        if (!goes_before(lines->heap[child], tenant)) break;
        put(lines, lines->heap[child], at);
        at = child;
    }
    put(lines, tenant, at);
}

static void leave(cpa_waiting_lines *lines, cpa_tenant *tenant) {
    const int64_t at = tenant->place - 1;
    cpa_tenant *last = lines->heap[--lines->tenants];
    tenant->place = 0;
    if (last != tenant) settle(lines, last, at);
}

/* After its line has changed: the tenant stands where its first belongs, or nowhere. */
static void place(cpa_waiting_lines *lines, cpa_tenant *tenant) {
    if (tenant->is_aside) return;
    if (tenant->waiting.count == 0) {
        if (tenant->place > 0) leave(lines, tenant);
    } else if (tenant->place == 0) {
        settle(lines, tenant, lines->tenants++);
    } else {
        settle(lines, tenant, tenant->place - 1);
    }
}

void cpa_waiting_push(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_tenant *tenant = sequence->tenant;
    lines->count -= tenant->waiting.count;
    cpa_sequence_queue_push(&tenant->waiting, sequence);
    lines->count += tenant->waiting.count;
    place(lines, tenant);
}

void cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_tenant *tenant = sequence->tenant;
    /* A tenant without anyone waiting cannot be compared: it leaves before. */
    if (tenant->waiting.count == 1 && tenant->place > 0) leave(lines, tenant);
    cpa_sequence_queue_remove(&tenant->waiting, sequence);
    lines->count--;
    place(lines, tenant);
}

cpa_sequence *cpa_waiting_first(const cpa_waiting_lines *lines) {
    return lines->tenants > 0 ? cpa_sequence_queue_first(&lines->heap[0]->waiting) : NULL;
}

void cpa_waiting_set_aside(cpa_waiting_lines *lines) {
    cpa_tenant *tenant = lines->heap[0];
    leave(lines, tenant);
    tenant->is_aside = 1;
    tenant->next_aside = lines->aside;
    lines->aside = tenant;
}

void cpa_waiting_return_all(cpa_waiting_lines *lines) {
    for (cpa_tenant *tenant = lines->aside; tenant; tenant = lines->aside) {
        lines->aside = tenant->next_aside;
        tenant->is_aside = 0;
        place(lines, tenant);
    }
}
