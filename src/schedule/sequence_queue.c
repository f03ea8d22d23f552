#include "src/schedule/sequence_queue.h"

#include <stdlib.h>

#include "base/array.h"
#include "src/schedule/sequence.h"

void cpa_sequence_queue_destroy(cpa_sequence_queue *queue) {
    free(queue->heap);
    queue->heap = NULL;
    queue->count = queue->capacity = 0;
}

int cpa_sequence_queue_reserve(cpa_sequence_queue *queue, int64_t n) {
    return cpa_array_reserve(&queue->heap, &queue->capacity, n, sizeof(cpa_sequence *));
}

static void put(cpa_sequence_queue *queue, cpa_sequence *sequence, int64_t at) {
    queue->heap[at] = sequence;
    sequence->heap_index = at;
}

/* Moves a sequence from `at` towards the first or the last, to where it belongs. */
static void settle(cpa_sequence_queue *queue, cpa_sequence *sequence, int64_t at) {
    for (; at > 0 && queue->before(sequence, queue->heap[(at - 1) / 2]); at = (at - 1) / 2)
        put(queue, queue->heap[(at - 1) / 2], at);
    for (int64_t child = 2 * at + 1; child < queue->count; child = 2 * at + 1) {
        if (child + 1 < queue->count && queue->before(queue->heap[child + 1], queue->heap[child])) child++;
        if (!queue->before(queue->heap[child], sequence)) break;
        put(queue, queue->heap[child], at);
        at = child;
    }
    put(queue, sequence, at);
}

void cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence) {
    queue->count++;
    settle(queue, sequence, queue->count - 1);
}

cpa_sequence *cpa_sequence_queue_first(const cpa_sequence_queue *queue) {
    return queue->count > 0 ? queue->heap[0] : NULL;
}

void cpa_sequence_queue_remove(cpa_sequence_queue *queue, cpa_sequence *sequence) {
    cpa_sequence *last = queue->heap[--queue->count];
    if (last != sequence) settle(queue, last, sequence->heap_index);
}

cpa_sequence *cpa_sequence_queue_pop(cpa_sequence_queue *queue) {
    cpa_sequence *first = queue->heap[0];
    cpa_sequence_queue_remove(queue, first);
    return first;
}
