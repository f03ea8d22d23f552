/* Which of many requests expires first: a binary heap whose entries know where they stand. One thread at a time. */
#ifndef CPA_DEADLINES_H
#define CPA_DEADLINES_H

#include <stdint.h>

/* A member of what expires. */
typedef struct cpa_deadline {
    double at;          /* the moment */
    int64_t heap_index; /* index in the heap, counted from 1; 0: the entry is not in it; set by the heap alone */
} cpa_deadline;

typedef struct cpa_deadlines {
    cpa_deadline **heap; /* free() it */
    int64_t count, capacity;
} cpa_deadlines;

/* Adds an entry, which must stay where it is until it is removed; 0 without memory. */
int cpa_deadlines_add(cpa_deadlines *deadlines, cpa_deadline *entry);
/* Removes an entry; nothing if it is not there. */
void cpa_deadlines_remove(cpa_deadlines *deadlines, cpa_deadline *entry);
/* The entry with the earliest moment; NULL: there is none. */
cpa_deadline *cpa_deadlines_first(const cpa_deadlines *deadlines);

#endif
