/* Texts at which an answer ends, found as the answer comes. */
#ifndef CPA_TEXT_STOP_TEXT_H
#define CPA_TEXT_STOP_TEXT_H

#include <stddef.h>
#include <stdint.h>

typedef struct cpa_stop_text {
    char *text;
    size_t bytes; /* at least one */
} cpa_stop_text;

/* The first place in text[0..bytes), not before `from`, where one of n texts stands, which is *which; or -1. */
int64_t cpa_stop_text_find(const cpa_stop_text *stops, int n, const char *text, int64_t bytes, int64_t from,
                           int *which);

/* How many bytes at the end of text[0..bytes) are the beginning of one of them, which may go on: the most. */
int64_t cpa_stop_text_begun(const cpa_stop_text *stops, int n, const char *text, int64_t bytes);

#endif
