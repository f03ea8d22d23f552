/* xattn_stats, xattn_block_sums and xattn_scores: which kernel takes a pass over chunks. */
#include "kernels/cuda/xattn/xattn.h"

#include "base/check.h"
#include "kernels/cuda/nn/nn.h"

static cpa_cuda_xattn_pass pass_of(cpa_cuda_xattn_kind kind, const cpa_xattn_shape *shape,
                                   const cpa_xattn_chunks *chunks) {
    return (cpa_cuda_xattn_pass){
        .kind = kind,
        .shape = *shape,
        .chunks = *chunks,
        .of_block = shape->block / shape->stride,
        .group = shape->q_heads / shape->kv_heads,
        .q_groups = (int32_t)cpa_xattn_groups(shape, chunks->q_tokens),
        .k_groups = (int32_t)cpa_xattn_groups(shape, chunks->k_tokens),
        .q_blocks = (int32_t)cpa_xattn_blocks(shape, chunks->q_tokens),
        .k_blocks = (int32_t)cpa_xattn_blocks(shape, chunks->k_tokens),
        .width = (int32_t)cpa_xattn_width(shape),
    };
}

static cpa_status run(const cpa_cuda_xattn_pass *pass, cpa_stream *stream) {
    enum { MOST_HEADS = 65535 }; /* CTAs of a grid in its second dimension */
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (pass->shape.q_heads > MOST_HEADS)
        return cpa_cuda_unsupported(stream, "xattn: more query heads than a grid has CTAs", pass->shape.q_heads);
    return cpa_cuda_xattn_hopper_takes(pass, stream) ? cpa_cuda_xattn_hopper(pass, stream)
                                                     : cpa_cuda_xattn_simple(pass, stream);
}

cpa_status cpa_cuda_xattn_stats(const cpa_xattn_stats_args *args, cpa_stream *stream) {
    cpa_cuda_xattn_pass pass = pass_of(CPA_CUDA_XATTN_STATS, &args->shape, &args->chunks);
    pass.max = args->max, pass.sum = args->sum;
    pass.resume = args->resume;
    return run(&pass, stream);
}

cpa_status cpa_cuda_xattn_block_sums(const cpa_xattn_block_sums_args *args, cpa_stream *stream) {
    cpa_cuda_xattn_pass pass = pass_of(CPA_CUDA_XATTN_SUMS, &args->shape, &args->chunks);
    pass.max = (float *)(uintptr_t)args->max, pass.sum = (float *)(uintptr_t)args->sum;
    pass.out = args->sums;
    pass.row_stride = args->row_stride;
    return run(&pass, stream);
}

cpa_status cpa_cuda_xattn_scores(const cpa_xattn_scores_args *args, cpa_stream *stream) {
    cpa_cuda_xattn_pass pass = pass_of(CPA_CUDA_XATTN_SCORES, &args->shape, &args->chunks);
    pass.out = args->scores;
    pass.row_stride = pass.k_groups;
    return run(&pass, stream);
}
