/* What a server is made for: the size of its cache, and its longest request. */
#ifndef CPA_LAUNCHER_SERVE_LIMITS_H
#define CPA_LAUNCHER_SERVE_LIMITS_H

#include "launcher/job.h"

typedef struct cpa_serve_limits {
    int64_t num_blocks;    /* blocks of one rank */
    int64_t max_model_len; /* tokens of a request, prompt and answer */
} cpa_serve_limits;

/* Chooses both. --num-blocks auto: on devices what memory holds and can be of use, on the host enough for the longest
 * request or many short ones, if memory holds that. CPA_INVALID, with the numbers, if --max-model-len is more than the
 * model is made for, or than the cache holds. *out is set only on success. */
cpa_status cpa_serve_limits_find(const cpa_job *job, const cpa_cache_limits *limits, cpa_serve_limits *out,
                                 cpa_error *err);

#endif
