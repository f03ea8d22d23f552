/* The kernels of prefill over blocks that are made rows of elements of the queries' dtype first: those of quantised
 * caches, and of rows in runs. */
#include "base/check.h"
#include "kernels/cuda/attend/attend_kernels.h"

/* The widest heads of the Hopper kernel have no registers for scales of keys beside rules; those of 192 columns have
 * their tiles then. */
static const char *widen_hopper_refuses(const cpa_cuda_attend_spec *spec) {
    const int wide_codes = cpa_cuda_has_codes(spec) && spec->width > CPA_CUDA_128;
    return spec->call.rules && wide_codes ? "score rules over codes of heads of more than 128 columns" : NULL;
}

/* Where the widened blocks of the plan lie, as a cache, and the scales of their keys behind it. Those of few tokens lie
 * side by side, as blocks that are copied at once. */
static cpa_kv_view widened_view(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, float **scales) {
    const int32_t block_size = 1 << a->block_shift, wide_block = cpa_cuda_wide_block(block_size);
    const int64_t row_bytes = (int64_t)plan->n_widened * block_size * a->kv_heads * cpa_dtype_bytes(a->q_dtype);
    char *v = plan->memory->widened + row_bytes * a->k_dim;
    *scales = (float *)(v + row_bytes * a->v_dim);
    return cpa_kv_view_resolve((cpa_kv_view){
        .k = plan->memory->widened,
        .v = v,
        .dtype = a->q_dtype,
        .block_size = wide_block,
        .num_blocks = (int64_t)plan->n_widened * block_size / wide_block,
        .kv_heads = a->kv_heads,
        .k_dim = a->k_dim,
        .v_dim = a->v_dim,
    });
}

/* Widens the blocks of the plan, all at once by the launch that comes first: little beside the products of a prefill, or
 * the reading by every sequence that shares them. */
static cpa_status launch_over(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_plan *plan = launch->plan;
    const int comes_first = launch->args->rows != NULL || plan->n_shared == 0;
    float *scales;
    const int32_t *blocks = (const int32_t *)(plan->memory->image + plan->widened_blocks_at);
    const cpa_kv_view wide = widened_view(plan, launch->args, &scales);
    if (comes_first)
        CPA_TRY((cpa_cuda_in_runs(launch->spec) ? cpa_cuda_attend_widen_runs : cpa_cuda_attend_widen)(
            launch->args, blocks, plan->n_widened, wide.block_size, wide.k, wide.v, scales, stream));
    const cpa_cuda_attend_kernel *over = launch->kernel->over;
    cpa_cuda_attend_args a = *launch->args;
    cpa_cuda_take_view(&a, &wide);
    a.k_scales = cpa_cuda_has_codes(launch->spec) ? scales : NULL;
    a.tables = (const int32_t *)(plan->memory->image + plan->widened_tables_at);
    cpa_cuda_attend_launch next = *launch;
    next.kernel = over;
    next.args = &a;
    next.kv = &wide;
    return over->launch(&next, stream);
}

const cpa_cuda_attend_kernel cpa_cuda_kernel_widen_hopper = {
    .name = "widen+hopper",
    .takes = {1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED, CPA_CUDA_CODES | CPA_CUDA_RUNS | CPA_CUDA_RUN_CODES,
              CPA_CUDA_ALL_RULES, CPA_CUDA_HOPPER, CPA_CUDA_256},
    .refuses = widen_hopper_refuses,
    .launch = launch_over,
    .over = &cpa_cuda_kernel_hopper,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_widen_portable = {
    .name = "widen+portable",
    .takes = {1 << CPA_CUDA_PREFILL, CPA_CUDA_RUNS, CPA_CUDA_ALL_RULES, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .launch = launch_over,
    .over = &cpa_cuda_kernel_portable,
};
