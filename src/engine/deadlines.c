#include "src/engine/deadlines.h"

#include "base/array.h"

static void put(cpa_deadlines *d, cpa_deadline *entry, int64_t at) {
    d->heap[at] = entry;
    entry->heap_index = at + 1;
}

/* Moves an entry from `at` towards the root or the leaves, to where it belongs. */
static void settle(cpa_deadlines *d, cpa_deadline *entry, int64_t at) {
    for (; at > 0 && entry->at < d->heap[(at - 1) / 2]->at; at = (at - 1) / 2) put(d, d->heap[(at - 1) / 2], at);
    for (int64_t child = 2 * at + 1; child < d->count; child = 2 * at + 1) {
        if (child + 1 < d->count && d->heap[child + 1]->at < d->heap[child]->at) child++;
        if (d->heap[child]->at >= entry->at) break;
        put(d, d->heap[child], at);
        at = child;
    }
    put(d, entry, at);
}

int cpa_deadlines_add(cpa_deadlines *d, cpa_deadline *entry) {
    if (!cpa_array_reserve(&d->heap, &d->capacity, d->count + 1, sizeof(cpa_deadline *))) return 0;
    d->count++;
    settle(d, entry, d->count - 1);
    return 1;
}

void cpa_deadlines_remove(cpa_deadlines *d, cpa_deadline *entry) {
    if (entry->heap_index == 0) return;
    const int64_t at = entry->heap_index - 1;
    cpa_deadline *last = d->heap[--d->count];
    entry->heap_index = 0;
    if (last != entry) settle(d, last, at);
}

cpa_deadline *cpa_deadlines_first(const cpa_deadlines *d) {
    return d->count > 0 ? d->heap[0] : NULL;
}
