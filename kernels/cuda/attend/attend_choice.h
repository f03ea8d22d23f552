/* Which kernels of attend take what a call asks for, and why no faster one does. Nothing is launched here. */
#ifndef CPA_CUDA_ATTEND_CHOICE_H
#define CPA_CUDA_ATTEND_CHOICE_H

#include "kernels/cuda/attend/attend.h"

typedef enum cpa_cuda_attend_kernel {
    CPA_CUDA_NO_KERNEL,           /* there are no such pieces */
    CPA_CUDA_PLAIN,               /* attend_simple.cu, for the whole call */
    CPA_CUDA_DECODE,              /* attend_decode.cu */
    CPA_CUDA_DECODE_BLOCKS,       /* attend_decode_blocks.cu */
    CPA_CUDA_DECODE_RULED,        /* attend_decode_ruled.cu */
    CPA_CUDA_DECODE_RULED_CACHES, /* attend_decode_ruled_caches.cu */
    CPA_CUDA_PERSISTENT,          /* attend_persistent.cu */
    CPA_CUDA_BOXES,               /* attend_hopper.cu */
    CPA_CUDA_WIDENED_BOXES,       /* the same over widened blocks */
    CPA_CUDA_MMA,                 /* attend_portable.cu */
    CPA_CUDA_WIDENED_MMA,         /* the same over widened blocks */
    CPA_CUDA_MMA_RULED_CODES      /* attend_portable_ruled_codes.cu */
} cpa_cuda_attend_kernel;

/* What decides, beside what the kernels are told. */
typedef struct cpa_cuda_attend_spec {
    cpa_cuda_path path;
    int wide_fits; /* CTAs may have CPA_CUDA_WIDE_BYTES of shared memory, or what the kernels for such heads take */
    int has_decode, has_prefill, has_shared; /* pieces of few rows, of many, and over keys that rows share */
    int has_widened;                         /* there is room for blocks in the dtype of the queries */
    int has_blocks;                          /* the cache has any */
    int knows_runs;                          /* the plan was made for rows in runs */
    int32_t tile_rows;                       /* of prefill pieces */
    int64_t rows;                            /* of queries */
    int64_t most_keys;                       /* of a sequence with prefill pieces */
} cpa_cuda_attend_spec;

typedef struct cpa_cuda_attend_choice {
    cpa_cuda_attend_kernel decode, prefill, shared;
    const char *why; /* of the plain kernel: what those on tensor cores would need; NULL: they run */
} cpa_cuda_attend_choice;

/* Of args before the scales of rules are in place (pre_scale is the call's). */
cpa_cuda_attend_choice cpa_cuda_choose_attend(const cpa_cuda_attend_spec *spec, const cpa_cuda_attend_args *args);

/* As its file is called, for tables and logs. */
const char *cpa_cuda_attend_kernel_name(cpa_cuda_attend_kernel kernel);

#endif
