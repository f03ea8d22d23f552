/* What prompts attend: --sparse. */
#ifndef CPA_SETTINGS_SPARSE_PROMPTS_H
#define CPA_SETTINGS_SPARSE_PROMPTS_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_sparse_prompts {
    int32_t stride; /* tokens of a group of XAttention; 0: prompts attend all keys */
    float tau;      /* share of the estimated attention that is kept */
} cpa_sparse_prompts;

/* "off", "xattn:TAU" or "xattn:TAU,S"; `where` begins the line that says what is wrong. */
cpa_status cpa_sparse_prompts_parse(const char *where, const char *text, cpa_sparse_prompts *out, cpa_error *err);

#endif
