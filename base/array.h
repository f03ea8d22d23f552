/* Arrays that grow. */
#ifndef CPA_ARRAY_H
#define CPA_ARRAY_H

#include <stddef.h>
#include <stdint.h>

/* Makes room for n elements of `size` bytes in the allocated array whose address is `array` (of a pointer of any type;
 * the pointer may be NULL), which has room for *capacity. Grows by half at least, so that adding elements one by one
 * costs constant time each. 0 without memory, and nothing has changed; else 1. free() the array. */
int cpa_array_reserve(void *array, int64_t *capacity, int64_t n, size_t size);

#endif
