/* A priority queue of sequences: a binary heap under an order given at its start. */
#ifndef CPA_SEQUENCE_QUEUE_H
#define CPA_SEQUENCE_QUEUE_H

#include <stdint.h>

typedef struct cpa_sequence cpa_sequence;

typedef struct cpa_sequence_queue {
    int (*before)(const cpa_sequence *a, const cpa_sequence *b);
    cpa_sequence **heap;
    int64_t count, capacity;
} cpa_sequence_queue;

/* Frees the queue's memory, not the sequences. */
void cpa_sequence_queue_destroy(cpa_sequence_queue *queue);
/* Makes room for n sequences in all; 0 without memory. */
int cpa_sequence_queue_reserve(cpa_sequence_queue *queue, int64_t n);
/* Adds a sequence; there must be room. */
void cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence);
/* The sequence that goes before all others, or NULL. */
cpa_sequence *cpa_sequence_queue_first(const cpa_sequence_queue *queue);
/* Removes a sequence that is in this queue. */
void cpa_sequence_queue_remove(cpa_sequence_queue *queue, cpa_sequence *sequence);
/* Removes the first of a queue that is not empty, and returns it. */
cpa_sequence *cpa_sequence_queue_pop(cpa_sequence_queue *queue);

#endif
