/* sparse_attend: what its kernels are told, and which one runs. */
#include <math.h>

#include "base/check.h"
#include "kernels/attend_log.h"
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

/* Whether the kernel for lists over such a cache takes a scope; in words why not, else NULL. */
static const char *refusal(const cpa_cuda_attend_kernel *kernel, const cpa_sparse_attend_args *args, int32_t i,
                           const cpa_cuda_attend_args *a, cpa_stream *stream) {
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    const cpa_kv_view *kv = &args->scopes[i].kv;
    const cpa_key_indices lists = {0};
    const cpa_key_selection selection = {.indices = &lists};
    cpa_attention_shape shape = cpa_kv_view_shape(kv);
    shape.q_heads = args->q_heads;
    shape.dtype = args->q_dtype;
    const cpa_cuda_attend_spec spec = {
        .call = cpa_cuda_call_of(device->path, a, kv, &selection),
        .shape = &shape,
        .block_size = kv->block_size,
        .width = cpa_cuda_width_of(kv->k_dim, kv->v_dim),
        .cp_size = 1,
        .rows = args->rows,
    };
    const char *why = cpa_cuda_kernel_refuses(kernel, &spec);
    if (!why && device->base.caps.shared_bytes < CPA_CUDA_WIDE_BYTES && !cpa_cuda_sparse_heads_fit(&shape, stream))
        why = "heads too wide for the shared memory of a CTA";
    return why;
}

/* Scopes that one kernel takes have one form of rows, and one scale of codes. */
static int scopes_are_alike(const cpa_sparse_attend_args *args) {
    for (int32_t i = 1; i < args->n_scopes; i++)
        if (!cpa_kv_same_form(&args->scopes[0].kv, &args->scopes[i].kv)) return 0;
    return 1;
}

/* By the fastest kernel that takes all scopes. Tests lower the path on purpose. */
static cpa_status launch(const cpa_sparse_attend_args *args, const cpa_cuda_sparse_args *sparse, cpa_stream *stream) {
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    const int latents = args->scopes[0].kv.v_in_k;
    const cpa_cuda_attend_kernel *kernel = latents ? &cpa_cuda_kernel_lists_latent : &cpa_cuda_kernel_lists;
    const char *why = !scopes_are_alike(args)          ? "scopes of different dtypes or scales"
                      : !latents && args->n_scopes > 1 ? "two scopes of ordinary heads"
                                                       : NULL;
    for (int32_t i = 0; i < args->n_scopes && !why; i++) why = refusal(kernel, args, i, &sparse->a[i], stream);
    if (!why) return latents ? cpa_cuda_sparse_latent(sparse, stream) : cpa_cuda_sparse_heads(sparse, stream);
    if (device->path == device->best && !device->path_is_set) cpa_attend_log_plain(why);
    return cpa_cuda_sparse_simple(sparse, stream);
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
    return launch(args, &sparse, stream);
}
