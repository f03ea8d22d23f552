#include "src/text/bytes.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

int cpa_bytes_reserve(cpa_bytes *bytes, size_t n) {
    return n <= PTRDIFF_MAX / 2 && cpa_array_reserve(&bytes->data, &bytes->capacity, bytes->count + (int64_t)n, 1);
}

int cpa_bytes_add(cpa_bytes *bytes, const void *data, size_t n) {
    if (!cpa_bytes_reserve(bytes, n)) return 0;
    if (n > 0) memcpy(bytes->data + bytes->count, data, n);
    bytes->count += (int64_t)n;
    return 1;
}

void cpa_bytes_release(cpa_bytes *bytes) {
    free(bytes->data);
    *bytes = (cpa_bytes){.count = 0};
}
