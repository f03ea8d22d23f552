#include "src/schedule/sequence_queue.h"

#include <stdlib.h>

#include "base/array.h"

void cpa_sequence_queue_destroy(cpa_sequence_queue *queue) {
    free(queue->heap);
    queue->heap = NULL;
    queue->count = queue->capacity = 0;
}

int cpa_sequence_queue_reserve(cpa_sequence_queue *queue, int64_t n) {
    return cpa_array_reserve(&queue->heap, &queue->capacity, n, sizeof(cpa_sequence *));
}

void cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence) {
    int64_t at = queue->count++;
    while (at > 0 && queue->before(sequence, queue->heap[(at - 1) / 2])) {
        queue->heap[at] = queue->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->heap[at] = sequence;
}

cpa_sequence *cpa_sequence_queue_first(const cpa_sequence_queue *queue) {
    return queue->count > 0 ? queue->heap[0] : NULL;
}

cpa_sequence *cpa_sequence_queue_pop(cpa_sequence_queue *queue) {
    cpa_sequence *first = queue->heap[0], *last = queue->heap[--queue->count];
    int64_t at = 0;
    for (int64_t child = 1; child < queue->count; child = 2 * at + 1) {
        if (child + 1 < queue->count && queue->before(queue->heap[child + 1], queue->heap[child])) child++;
        if (!queue->before(queue->heap[child], last)) break;
        queue->heap[at] = queue->heap[child];
        at = child;
    }
    queue->heap[at] = last;
    return first;
}
