/* A preparation of keys: blocks of quantised caches, and of rows in runs, become rows of elements of the queries' dtype.
 * And the kernels that attend them then. */
#include "base/check.h"
#include "kernels/cuda/attend/attend_source.h"

enum { ELEMENT = 2 /* bytes, of the queries */ };

/* Keys and values, and scales of keys. The kernel for the widest heads has no registers for those. */
static int64_t token_bytes(const cpa_attention_shape *shape) {
    const int codes = cpa_dtype_is_quantised(shape->kv_dtype);
    const cpa_cuda_width width = cpa_cuda_width_of(shape->k_dim, shape->v_dim),
                         widest = codes ? CPA_CUDA_192_128 : CPA_CUDA_256;
    if (width > widest || shape->v_in_k || (!codes && shape->layout != CPA_VLLM_X)) return 0;
    return shape->kv_heads * ((int64_t)(shape->k_dim + shape->v_dim) * ELEMENT + (int64_t)sizeof(float));
}

typedef cpa_status widener(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                           int32_t wide_block, void *k, void *v, float *k_scales, cpa_stream *stream);

static widener *widener_of(const cpa_cuda_attend_spec *spec) {
    if (spec->call.cache == CPA_CUDA_TURBOQUANT) return cpa_cuda_attend_widen_turboquant;
    return cpa_cuda_in_runs(spec) ? cpa_cuda_attend_widen_runs : cpa_cuda_attend_widen;
}

/* Small beside the products of a prefill, or the reading by every sequence that shares the keys. Widened blocks of few
 * tokens lie side by side, as blocks that are copied at once. apart: codes of keys stay what they are, beside scales;
 * else they are rounded with them. */
static cpa_status widen_keys(const cpa_cuda_attend_launch *launch, const int32_t *blocks, int64_t n_blocks,
                             char *memory, int apart, cpa_cuda_attend_args *args, cpa_kv_view *kv, cpa_stream *stream) {
    const cpa_cuda_attend_args *from = launch->args;
    const int32_t block_size = 1 << from->block_shift, wide_block = cpa_cuda_wide_block(block_size);
    const int64_t row_bytes = n_blocks * block_size * from->kv_heads * ELEMENT;
    char *v = memory + row_bytes * from->k_dim;
    float *scales = apart ? (float *)(v + row_bytes * from->v_dim) : NULL;
    if (n_blocks > 0)
        CPA_TRY(widener_of(launch->spec)(from, blocks, (int32_t)n_blocks, wide_block, memory, v, scales, stream));
    *kv = cpa_kv_view_resolve((cpa_kv_view){
        .k = memory,
        .v = v,
        .dtype = from->q_dtype,
        .block_size = wide_block,
        .num_blocks = n_blocks * block_size / wide_block,
        .kv_heads = from->kv_heads,
        .k_dim = from->k_dim,
        .v_dim = from->v_dim,
    });
    cpa_cuda_take_view(args, kv);
    args->k_scales = cpa_cuda_has_codes(launch->spec) ? scales : NULL;
    return CPA_OK;
}

static cpa_status widen(const cpa_cuda_attend_launch *launch, const int32_t *blocks, int64_t n_blocks, char *memory,
                        cpa_cuda_attend_args *args, cpa_kv_view *kv, cpa_stream *stream) {
    return widen_keys(launch, blocks, n_blocks, memory, 1, args, kv, stream);
}
static cpa_status widen_scaled(const cpa_cuda_attend_launch *launch, const int32_t *blocks, int64_t n_blocks,
                               char *memory, cpa_cuda_attend_args *args, cpa_kv_view *kv, cpa_stream *stream) {
    return widen_keys(launch, blocks, n_blocks, memory, 0, args, kv, stream);
}

const cpa_cuda_preparation cpa_cuda_widen = {.token_bytes = token_bytes, .prepare = widen};
const cpa_cuda_preparation cpa_cuda_widen_scaled = {.token_bytes = token_bytes, .prepare = widen_scaled};

/* ---- the kernels ---- */

/* The widest heads of the Hopper kernel have no registers for scales of keys beside rules; those of 192 columns have
 * their tiles then. */
static const char *widen_hopper_refuses(const cpa_cuda_attend_spec *spec) {
    const int wide_codes = cpa_cuda_has_codes(spec) && spec->width > CPA_CUDA_128;
    return spec->call.rules && wide_codes ? "score rules over codes of heads of more than 128 columns" : NULL;
}

const cpa_cuda_attend_kernel cpa_cuda_kernel_widen_hopper = {
    .name = "widen+hopper",
    .takes = {1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED,
              CPA_CUDA_CODES | CPA_CUDA_RUNS | CPA_CUDA_RUN_CODES | CPA_CUDA_TURBOQUANT, CPA_CUDA_ALL_RULES,
              CPA_CUDA_HOPPER, CPA_CUDA_256},
    .refuses = widen_hopper_refuses,
    .prepares = &cpa_cuda_widen,
    .over = &cpa_cuda_kernel_hopper,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_widen_portable = {
    .name = "widen+portable",
    .takes = {1 << CPA_CUDA_PREFILL, CPA_CUDA_RUNS, CPA_CUDA_ALL_RULES, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .prepares = &cpa_cuda_widen,
    .over = &cpa_cuda_kernel_portable,
};
