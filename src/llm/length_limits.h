/* What an engine for requests that are not known yet is made for: the size of its cache, and its longest request. */
#ifndef CPA_LLM_LENGTH_LIMITS_H
#define CPA_LLM_LENGTH_LIMITS_H

#include "src/llm/cache_size.h"

typedef struct cpa_length_limits {
    int64_t num_blocks;    /* blocks of one rank */
    int64_t max_model_len; /* tokens of a request, prompt and answer */
} cpa_length_limits;

/* What they follow from. */
typedef struct cpa_length_wishes {
    cpa_length_limits asked; /* 0: not asked for */
    int on_cuda;             /* on devices, else on the host */
    int64_t positions;       /* positions that the model is made for; 0: any */
    const char *model;       /* the model's name, for messages, and the names of the options */
    const char *num_blocks_option, *max_model_len_option;
} cpa_length_wishes;

/* Chooses both. Blocks that are not asked for: on devices what memory holds and can be of use, on the host enough for the
 * longest request or many short ones, if memory holds that. CPA_INVALID, with the numbers, if the longest request is
 * to be longer than the model is made for, or than the cache holds. *out is set only on success. */
cpa_status cpa_length_limits_find(const cpa_length_wishes *wishes, const cpa_cache_limits *limits,
                                  cpa_length_limits *out, cpa_error *err);

#endif
