#include "src/schedule/waiting_lines.h"

#include <stdlib.h>

#include "base/array.h"

static int goes_before(const cpa_waiting_lines *lines, const cpa_waiting_line *a, const cpa_waiting_line *b) {
    if (lines->is_fair && a->tenant->service != b->tenant->service) return a->tenant->service < b->tenant->service;
    return cpa_sequence_before(cpa_sequence_queue_first(&a->queue), cpa_sequence_queue_first(&b->queue));
}

static void put(cpa_waiting_line *line, int64_t at) {
    line->class->heap[at] = line;
    line->heap_index = at + 1;
}

/* Moves a line from `at` towards the first or the last, to where it belongs. */
static void settle(const cpa_waiting_lines *lines, cpa_waiting_line *line, int64_t at) {
    cpa_waiting_line **heap = line->class->heap;
    const int64_t count = line->class->count;
    for (; at > 0 && goes_before(lines, line, heap[(at - 1) / 2]); at = (at - 1) / 2) put(heap[(at - 1) / 2], at);
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && goes_before(lines, heap[child + 1], heap[child])) child++;
        if (!goes_before(lines, heap[child], line)) break;
        put(heap[child], at);
        at = child;
    }
    put(line, at);
}

/* Out of the heap. */
static void withdraw(const cpa_waiting_lines *lines, cpa_waiting_line *line) {
    const int64_t at = line->heap_index - 1;
    cpa_waiting_line *last = line->class->heap[--line->class->count];
    line->heap_index = 0;
    if (last != line) settle(lines, last, at);
}

/* After its queue or its service has changed: the line stands where it belongs, or nowhere. */
static void place(const cpa_waiting_lines *lines, cpa_waiting_line *line) {
    if (line->is_aside) return;
    if (line->queue.count == 0) {
        if (line->heap_index > 0) withdraw(lines, line);
    } else if (line->heap_index == 0) {
        settle(lines, line, line->class->count++);
    } else {
        settle(lines, line, line->heap_index - 1);
    }
}

static cpa_waiting_class *find_class(cpa_waiting_lines *lines, int32_t priority) {
    cpa_waiting_class *class;
    HASH_FIND(hh, lines->classes, &priority, sizeof priority, class);
    if (class) return class;
    class = calloc(1, sizeof *class);
    if (!class) return NULL;
    class->priority = priority;
    HASH_ADD(hh, lines->classes, priority, sizeof class->priority, class);
    if (class->hh.tbl) return class;
    free(class);
    return NULL;
}

static void free_class_if_empty(cpa_waiting_lines *lines, cpa_waiting_class *class) {
    if (class->lines > 0) return;
    HASH_DEL(lines->classes, class);
    free(class->heap);
    free(class);
}

/* The line of a tenant in a class. NULL without memory. */
static cpa_waiting_line *find_line(cpa_tenant *tenant, cpa_waiting_class *class) {
    cpa_waiting_line *line = tenant->lines;
    while (line && line->class != class) line = line->next_of_tenant;
    if (line) return line;
    if (!cpa_array_reserve(&class->heap, &class->capacity, class->lines + 1, sizeof(cpa_waiting_line *))) return NULL;
    line = calloc(1, sizeof *line);
    if (!line) return NULL;
    *line = (cpa_waiting_line){
        .tenant = tenant, .class = class, .queue.before = cpa_sequence_before, .next_of_tenant = tenant->lines};
    tenant->lines = line;
    class->lines++;
    return line;
}

static void free_line_if_empty(cpa_waiting_lines *lines, cpa_waiting_line *line) {
    if (line->members > 0) return;
    cpa_waiting_line **at = &line->tenant->lines;
    while (*at != line) at = &(*at)->next_of_tenant;
    *at = line->next_of_tenant;
    line->class->lines--;
    free_class_if_empty(lines, line->class);
    cpa_sequence_queue_destroy(&line->queue);
    free(line);
}

int cpa_waiting_join(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_waiting_class *class = find_class(lines, lines->is_fair ? sequence->request.priority : 0);
    if (!class) return 0;
    cpa_waiting_line *line = find_line(sequence->tenant, class);
    if (!line) {
        free_class_if_empty(lines, class);
        return 0;
    }
    const int has_room = cpa_sequence_queue_reserve(&line->queue, line->members + 1);
    line->members += has_room;
    if (has_room) sequence->line = line;
    free_line_if_empty(lines, line);
    return has_room;
}

void cpa_waiting_forget(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_waiting_line *line = sequence->line;
    if (line) {
        line->members--;
        free_line_if_empty(lines, line);
    }
    cpa_sequence_destroy(sequence);
}

void cpa_waiting_push(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_sequence_queue_push(&sequence->line->queue, sequence);
    sequence->tenant->waiting++;
    lines->count++;
    place(lines, sequence->line);
}

void cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    cpa_waiting_line *line = sequence->line;
    /* A line without anyone cannot be compared: it leaves before. */
    if (line->queue.count == 1 && line->heap_index > 0) withdraw(lines, line);
    cpa_sequence_queue_remove(&line->queue, sequence);
    sequence->tenant->waiting--;
    lines->count--;
    place(lines, line);
}

void cpa_waiting_reorder(cpa_waiting_lines *lines, cpa_tenant *tenant) {
    for (cpa_waiting_line *line = tenant->lines; line; line = line->next_of_tenant)
        if (line->heap_index > 0) settle(lines, line, line->heap_index - 1);
}

/* Priorities are few. */
cpa_sequence *cpa_waiting_first(const cpa_waiting_lines *lines) {
    cpa_sequence *best = NULL;
    for (const cpa_waiting_class *class = lines->classes; class; class = class->hh.next) {
        if (class->count == 0) continue;
        cpa_sequence *first = cpa_sequence_queue_first(&class->heap[0]->queue);
        if (!best || cpa_sequence_before(first, best)) best = first;
    }
    return best;
}

void cpa_waiting_set_aside(cpa_waiting_lines *lines, cpa_waiting_line *line) {
    withdraw(lines, line);
    line->is_aside = 1;
    line->next_aside = lines->aside;
    lines->aside = line;
}

void cpa_waiting_return_all(cpa_waiting_lines *lines) {
    for (cpa_waiting_line *line = lines->aside; line; line = lines->aside) {
        lines->aside = line->next_aside;
        line->is_aside = 0;
        place(lines, line);
    }
}
