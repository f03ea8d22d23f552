/* attend of few rows over tokens of a cache of CPA_TQ_ that lie whole: the rows of their KV heads side by side, so that
 * a CTA brings those of CPA_CUDA_TOKEN_HEADS heads to shared memory at once. C and CUDA C++. */
#ifndef CPA_CUDA_ATTEND_TOKENS_H
#define CPA_CUDA_ATTEND_TOKENS_H

#include "kernels/cuda/attend/attend_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CPA_CUDA_TOKEN_HEADS = 8, /* of a CTA: of so many, rows of all widths fill whole chunks of 16 bytes */
    CPA_CUDA_TOKEN_ROWS = 8,  /* packed rows of a piece, at most */
    /* How long a key of all heads takes, and a state that is joined with others, in keys of a CTA that has one head. */
    CPA_CUDA_TOKEN_COST = 6,
    CPA_CUDA_TOKEN_STATE_COST = 32
};

/* Whether plans may be cut for CTAs that take whole tokens, as far as their shape tells. Keys of 8 bits, whose tokens
 * would all begin in the same bank, lie in long enough rows. */
static inline int cpa_cuda_takes_tokens(const cpa_attention_shape *shape, int32_t block_size) {
    return cpa_dtype_is_turboquant(shape->kv_dtype) && shape->kv_dtype != CPA_TQ_K8V4 &&
           shape->layout == CPA_TOKEN_MAJOR && shape->k_dim == 128 && shape->v_dim == 128 &&
           shape->kv_heads % CPA_CUDA_TOKEN_HEADS == 0 && block_size >= CPA_CUDA_DECODE_RUN;
}

/* How the rows of a call lie: not so; keys apart from values; or of each head the key, then the value. */
typedef enum cpa_cuda_tokens { CPA_CUDA_TOKENS_PARTED, CPA_CUDA_TOKENS_APART, CPA_CUDA_TOKENS_PAIRED } cpa_cuda_tokens;
cpa_cuda_tokens cpa_cuda_tokens_of(const cpa_cuda_attend_args *args);
cpa_cuda_attend_launcher cpa_cuda_attend_decode_tokens;

#ifdef __cplusplus
}
#endif
#endif
