#include "base/array.h"

#include <stdlib.h>
#include <string.h>

enum { LEAST = 16 };

int cpa_array_reserve(void *array, int64_t *capacity, int64_t n, size_t size) {
    void *old, *moved;
    memcpy(&old, array, sizeof old);
    if (old && n <= *capacity) return 1;
    int64_t grown = *capacity + *capacity / 2 + LEAST;
    if (grown < n) grown = n;
    if ((uint64_t)grown > SIZE_MAX / size) return 0;
    moved = realloc(old, (size_t)grown * size);
    if (!moved) return 0;
    memcpy(array, &moved, sizeof moved);
    *capacity = grown;
    return 1;
}
