/* Bytes that grow in number. */
#ifndef CPA_TEXT_BYTES_H
#define CPA_TEXT_BYTES_H

#include <stddef.h>
#include <stdint.h>

/* One of zeros is empty. */
typedef struct cpa_bytes {
    char *data;
    int64_t count, capacity;
} cpa_bytes;

/* Room for n bytes more; 0 without memory, else 1. */
int cpa_bytes_reserve(cpa_bytes *bytes, size_t n);
/* Adds n bytes; 0 without memory, else 1. */
int cpa_bytes_add(cpa_bytes *bytes, const void *data, size_t n);
void cpa_bytes_release(cpa_bytes *bytes);

#endif
