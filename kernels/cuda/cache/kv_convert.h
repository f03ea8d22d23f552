/* Tokens of blocks from one form of cache to another, on the device. */
#ifndef CPA_CUDA_KV_CONVERT_H
#define CPA_CUDA_KV_CONVERT_H

#include <cpattn/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `tokens` tokens of a block from the `first` on, which become the first ones of the other. */
typedef struct cpa_cuda_block_move {
    int32_t src, dst, tokens, first;
} cpa_cuda_block_move;

/* Enqueues moves between views of one shape but for dtype, scales and layout; what lies past the tokens stays. Elements
 * and the scales of rows keep their bits if keep_bits, for which the dtypes are equal; else each element becomes what
 * it stands for in the other form. The device is selected. */
cpa_status cpa_cuda_kv_move_tokens(const cpa_kv_view *src, const cpa_kv_view *dst, const cpa_cuda_block_move *moves,
                                   int64_t n, int keep_bits, const char *operation, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
