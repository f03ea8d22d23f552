/* Keys that lists name: the rows of the table of kernels that take them, for a selection of attend and for
 * sparse_attend alike. They take whole plans, row by row, since each row has keys of its own. */
#include "kernels/cuda/attend/sparse.h"

enum {
    ALL_PIECES = 1 << CPA_CUDA_DECODE | 1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED,
    MOST_GROUP = 16 /* query heads of a KV head: the rows of mma.sync */
};

static const char *latent_refuses(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    if (shape->kv_heads > 1) return "keys by lists over latents of several KV heads";
    if (shape->v_dim > CPA_CUDA_LATENT_V_DIM) return "latents of more columns than 576, or 512 of values";
    if (spec->call.kv_dtype == CPA_FP8_T64)
        return spec->call.q_dtype == CPA_BF16 ? NULL : "queries in fp16 over rotated elements in bf16";
    return cpa_cuda_has_codes(spec) ? cpa_cuda_latent_codes_refuse(spec) : NULL;
}

static const char *heads_refuse(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    if (spec->pieces & 1 << CPA_CUDA_SHARED) return "keys by lists for rows that share keys";
    if (cpa_cuda_has_codes(spec)) return "keys by lists over codes";
    if (cpa_cuda_in_runs(spec)) return "keys by lists over rows in runs";
    if (shape->q_heads / shape->kv_heads > MOST_GROUP) return "keys by lists for groups of more than 16 heads";
    return (shape->k_dim | shape->v_dim) % 16 ? "keys by lists for heads off 16 columns" : NULL;
}

/* The rows of a plan, with a selection's lists of indices. */
static cpa_cuda_sparse_args args_of(const cpa_cuda_attend_launch *launch) {
    const cpa_key_indices *lists = launch->selection->indices;
    cpa_cuda_sparse_args args = {.n_scopes = 1, .rows = launch->plan->rows / launch->args->group};
    args.a[0] = *launch->args;
    args.lists[0] = (cpa_cuda_lists){.entries = lists->indices,
                                     .counts = lists->counts,
                                     .row_map = lists->row_map,
                                     .row_stride = lists->row_stride,
                                     .head_stride = lists->head_stride,
                                     .width = lists->width,
                                     .unit = lists->unit ? lists->unit : 1};
    return args;
}

static cpa_status launch_latent(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_sparse_args args = args_of(launch);
    return cpa_cuda_sparse_latent(&args, stream);
}

static cpa_status launch_heads(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    if (launch->count == 0) return cpa_cuda_sparse_heads_fit(launch->spec->shape, stream) ? CPA_OK : CPA_UNSUPPORTED;
    const cpa_cuda_sparse_args args = args_of(launch);
    return cpa_cuda_sparse_heads(&args, stream);
}

const cpa_cuda_attend_kernel cpa_cuda_kernel_lists_latent = {
    .name = "lists_latent",
    .takes = {ALL_PIECES, CPA_CUDA_ALL_CACHES, CPA_CUDA_LISTS, CPA_CUDA_HOPPER, CPA_CUDA_576, 1},
    .refuses = latent_refuses,
    .launch = launch_latent,
    .whole = 1,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_lists = {
    .name = "lists",
    .takes = {ALL_PIECES, CPA_CUDA_ALL_CACHES, CPA_CUDA_LISTS, CPA_CUDA_PORTABLE, CPA_CUDA_256},
    .refuses = heads_refuse,
    .launch = launch_heads,
    .whole = 1,
};
