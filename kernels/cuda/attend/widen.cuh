/* What the kernels that widen blocks are told, attend_widen.cu and attend_widen_runs.cu. */
#ifndef CPA_CUDA_WIDEN_CUH
#define CPA_CUDA_WIDEN_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/cache/quant.cuh"

/* Keys or values; strides in bytes. Rows lie in one piece, or in runs of 1 << run_shift elements. */
struct widen_tensor {
    const char *from;
    char *to;
    int64_t block_stride, token_stride, head_stride, run_stride, words_at;
    int32_t dim, run_shift;
    float scale; /* scale of the tensor */
    const float *head_scales;
};

struct widen_args {
    widen_tensor tensors[2];
    const int32_t *blocks;
    float *k_scales;
    int32_t n_blocks, kv_heads, block_shift, head_scale_step;
    int32_t wide_shift; /* log2 of the tokens of a block of scales */

    widen_args(const cpa_cuda_attend_args &a, const int32_t *from, int32_t count, int32_t wide_block, void *k, void *v,
               float *scales)
        : blocks(from), k_scales(scales), n_blocks(count), kv_heads(a.kv_heads), block_shift(a.block_shift),
          head_scale_step(a.head_scale_step), wide_shift(cpa_cuda_log2(wide_block)) {
        const int64_t bytes = cpa_dtype_bytes(a.kv_dtype);
        tensors[0] = {a.k, (char *)k, a.k_block_stride * bytes, a.k_token_stride * bytes, a.k_head_stride * bytes,
                      a.k_run_stride * bytes, a.k_words_at, a.k_dim, a.k_run_shift, a.k_scale, a.k_head_scales};
        tensors[1] = {a.v, (char *)v, a.v_block_stride * bytes, a.v_token_stride * bytes, a.v_head_stride * bytes,
                      a.v_run_stride * bytes, a.v_words_at, a.v_dim, a.v_run_shift, a.v_scale, a.v_head_scales};
    }
    __device__ float scale_of(const widen_tensor &t, int32_t head) const {
        return head_scale(t.scale, t.head_scales, head_scale_step, head);
    }
    /* Where the scale of a key goes. `token`: of the work space, counted from its first. */
    __device__ float &key_scale(int64_t token, int32_t head) const {
        const int64_t within = token & ((1 << wide_shift) - 1);
        return k_scales[(((token >> wide_shift) * kv_heads + head) << wide_shift) + within];
    }
};

#endif
