/* The sequences that wait: a line for each tenant and priority, in the order of cpa_sequence_before. Of the lines of a
 * priority the one goes first whose tenant has been served least (tenants.h); of the priorities, that whose first
 * sequence goes before the others. Or, where tenants count for nothing (CPA_POLICY_FCFS), all lines are of one priority
 * and go in the order of their first sequences. A line can be set aside. Pure logic. */
#ifndef CPA_WAITING_LINES_H
#define CPA_WAITING_LINES_H

#include "src/schedule/sequence.h"

typedef struct cpa_waiting_line cpa_waiting_line;

/* The lines of one priority in which somebody waits and that are not set aside, as a binary heap. */
typedef struct cpa_waiting_class {
    int32_t priority;
    cpa_waiting_line **heap;
    int64_t count, capacity;
    int64_t lines; /* lines of the class, those without waiting sequences too */
    UT_hash_handle hh;
} cpa_waiting_class;

struct cpa_waiting_line {
    cpa_tenant *tenant;
    cpa_waiting_class *class;
    cpa_sequence_queue queue;
    int64_t members;    /* sequences that have this line, waiting or not */
    int64_t heap_index; /* index in heap, counted from 1; 0: the line is not in it */
    int is_aside;
    int skipped; /* sequences of the line that the plan being made has skipped */
    cpa_waiting_line *next_aside, *next_of_tenant;
};

typedef struct cpa_waiting_lines {
    int is_fair;                /* tenants go by their service; set at the start */
    cpa_waiting_class *classes; /* hash table by priority */
    int64_t count;              /* sequences that wait, in all lines */
    cpa_waiting_line *aside;
} cpa_waiting_lines;

/* Gives a sequence, which has its tenant, its line, and makes room for it there; 0 without memory. */
int cpa_waiting_join(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* The sequence, which does not wait, leaves its line, if it has one, and is destroyed. */
void cpa_waiting_forget(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* Adds a sequence to its line. */
void cpa_waiting_push(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* Removes a sequence that waits. */
void cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* The service of the tenant has changed. */
void cpa_waiting_reorder(cpa_waiting_lines *lines, cpa_tenant *tenant);
/* The sequence that goes before all others whose lines are not set aside, or NULL. */
cpa_sequence *cpa_waiting_first(const cpa_waiting_lines *lines);
/* Sets a line, in which somebody waits, aside until cpa_waiting_return_all. */
void cpa_waiting_set_aside(cpa_waiting_lines *lines, cpa_waiting_line *line);
void cpa_waiting_return_all(cpa_waiting_lines *lines);

#endif
