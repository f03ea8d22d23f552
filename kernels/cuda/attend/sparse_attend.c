/* sparse_attend: what its kernels are told, and which one runs. */
#include <math.h>

#include "base/check.h"
#include "kernels/cuda/attend/sparse.h"

/* What all scopes have alike. */
static cpa_cuda_attend_args args_of(const cpa_sparse_attend_args *args) {
    const cpa_kv_view *kv = &args->scopes[0].kv;
    return (cpa_cuda_attend_args){
        .q = args->q,
        .q_row_stride = args->q_row_stride,
        .q_head_stride = kv->k_dim,
        .q_dtype = args->q_dtype,
        .q_heads = args->q_heads,
        .kv_heads = kv->kv_heads,
        .group = args->q_heads / kv->kv_heads,
        .k_dim = kv->k_dim,
        .v_dim = kv->v_dim,
        .resume = args->resume,
        .map = {.cp_size = 1, .interleave = 1},
        .scale = args->scale,
        .scale_log2 = args->scale * (float)M_LOG2E,
        .o = args->state.o,
        .lse = args->state.lse,
        .o_row_stride = args->state.o_row_stride,
        .lse_row_stride = args->state.lse_row_stride,
        .lse_head_stride = 1,
        .out = args->out,
        .out_row_stride = args->out_row_stride,
        .out_head_stride = kv->v_dim,
        .score = {.pre_scale = args->scale, .sink_logits = args->sink_logits},
    };
}

static void take_scope(const cpa_sparse_scope *scope, cpa_cuda_attend_args *a, cpa_cuda_lists *lists) {
    const cpa_kv_view *kv = &scope->kv;
    cpa_cuda_take_view(a, kv);
    a->k_scale = cpa_kv_tensor_scale(kv, CPA_KEYS);
    a->v_scale = cpa_kv_tensor_scale(kv, CPA_VALUES);
    a->k_head_scales = kv->k_scales;
    a->v_head_scales = kv->v_scales;
    a->head_scale_step = kv->n_scales > 1;
    a->k_words_at = cpa_kv_words_at(kv, CPA_KEYS);
    a->v_words_at = cpa_kv_words_at(kv, CPA_VALUES);
    *lists = (cpa_cuda_lists){.entries = scope->slots,
                              .counts = scope->counts,
                              .row_stride = scope->row_stride,
                              .head_stride = scope->head_stride,
                              .slots = kv->num_blocks * kv->block_size,
                              .width = kv->num_blocks > 0 ? scope->width : 0,
                              .unit = scope->unit};
    if (lists->slots == 0) lists->slots = 1; /* of an empty pool no list is read */
}

cpa_status cpa_cuda_sparse_attend(const cpa_sparse_attend_args *args, cpa_stream *stream) {
    enum { MOST_KV_HEADS = 65535 }; /* CTAs of a grid in its second dimension */
    cpa_cuda_sparse_args sparse = {.n_scopes = args->n_scopes, .rows = args->rows, .max_logits = args->max_logits};
    if (args->scopes[0].kv.kv_heads > MOST_KV_HEADS)
        return cpa_cuda_unsupported(stream, "sparse_attend: KV heads", args->scopes[0].kv.kv_heads);
    if (args->rows * (args->q_heads / args->scopes[0].kv.kv_heads) > INT32_MAX)
        return cpa_cuda_unsupported(stream, "sparse_attend: rows times heads of a group", args->rows);
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    for (int32_t i = 0; i < args->n_scopes; i++) {
        sparse.a[i] = args_of(args);
        take_scope(&args->scopes[i], &sparse.a[i], &sparse.lists[i]);
    }
    return cpa_cuda_sparse_simple(&sparse, stream);
}
