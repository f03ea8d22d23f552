/* The sequences that wait: a line for each tenant, in the order of cpa_sequence_before, and the tenants in the order of
 * their first. A tenant can be set aside, with all its line. Pure logic. */
#ifndef CPA_WAITING_LINES_H
#define CPA_WAITING_LINES_H

#include "src/schedule/sequence.h"

typedef struct cpa_waiting_lines {
    cpa_tenant **heap; /* of those who have someone waiting and are not set aside */
    int64_t tenants, capacity;
    int64_t count; /* sequences, in all lines */
    cpa_tenant *aside;
} cpa_waiting_lines;

/* Frees the memory of the lines, not the tenants and sequences. */
void cpa_waiting_destroy(cpa_waiting_lines *lines);
/* Makes room for so many tenants in all, and so many sequences of this one; 0 without memory. */
int cpa_waiting_reserve(cpa_waiting_lines *lines, int64_t tenants, cpa_tenant *tenant, int64_t sequences);
/* Adds a sequence to the line of its tenant; there must be room. */
void cpa_waiting_push(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* Removes a sequence that waits. */
void cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence);
/* The sequence that goes before all others whose tenants are not set aside, or NULL. */
cpa_sequence *cpa_waiting_first(const cpa_waiting_lines *lines);
/* Sets the tenant of the first aside, until cpa_waiting_return_all. */
void cpa_waiting_set_aside(cpa_waiting_lines *lines);
void cpa_waiting_return_all(cpa_waiting_lines *lines);

#endif
