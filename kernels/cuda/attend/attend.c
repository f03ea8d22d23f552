/* attend: what its kernels are told, and their launches in order. */
#include <math.h>

#include "base/check.h"
#include "kernels/attend_log.h"
#include "kernels/cuda/attend/attend_source.h"

/* Copies the plan to the device the first time that a stream uses it, and has its tables taken from the caller's if
 * these lie there. Another stream copies the same bytes again rather than wait for the first one. What was copied in a
 * capture is not there outside of it, and comes again with each launch of the graph; what was copied outside of
 * captures, whose count is even there, holds in them too. */
static cpa_status upload(const cpa_cuda_plan *plan, cpa_stream *stream, int *takes_tables) {
    cpa_cuda_plan_memory *memory = plan->memory;
    *takes_tables = 0;
    if (plan->base.reservation.sequences > 0) return CPA_OK; /* written there by its updates */
    cudaStream_t handle = cpa_cuda_handle(stream);
    const uint64_t captures = ((const cpa_cuda_stream *)stream)->captures;
    const int holds = memory->captures == captures || memory->captures % 2 == 0;
    if (memory->current && memory->uploaded == handle && holds) return CPA_OK;
    CPA_TRY(cpa_cuda_check(
        &stream->error,
        cudaMemcpyAsync(memory->image, memory->staging, (size_t)plan->upload_bytes, cudaMemcpyHostToDevice, handle),
        "attend: plan"));
    if (plan->device_tables) CPA_TRY(cpa_cuda_take_tables(plan, stream));
    *takes_tables = plan->device_tables != NULL;
    memory->uploaded = handle;
    memory->captures = captures;
    memory->current = 1;
    return CPA_OK;
}

/* Where row 0 would be if all queries were with those that are ready. */
static const char *ready_queries(const cpa_cuda_plan *plan, const void *ready_q, int64_t row_bytes) {
    return (const char *)((uintptr_t)ready_q - (uintptr_t)(plan->base.fusion.ready_row * row_bytes));
}

void cpa_cuda_take_view(cpa_cuda_attend_args *a, const cpa_kv_view *kv) {
    a->k = kv->k;
    a->v = kv->v;
    a->k_block_stride = kv->k_block_stride;
    a->k_token_stride = kv->k_token_stride;
    a->k_head_stride = kv->k_head_stride;
    a->v_block_stride = kv->v_block_stride;
    a->v_token_stride = kv->v_token_stride;
    a->v_head_stride = kv->v_head_stride;
    a->k_run_shift = cpa_kv_run_shift(kv, CPA_KEYS);
    a->v_run_shift = cpa_kv_run_shift(kv, CPA_VALUES);
    a->k_run_stride = (int64_t)kv->block_size * cpa_kv_key_run(kv->dtype);
    a->v_run_stride = kv->block_size;
    a->kv_dtype = kv->dtype;
    a->block_shift = cpa_cuda_log2(kv->block_size);
}

static void fill_args(const cpa_cuda_plan *plan, const cpa_attend_args *given, cpa_kv_view kv, const void *ready_q,
                      cpa_cuda_attend_args *a) {
    int32_t q_heads = plan->base.shape.q_heads;
    cpa_attend_args resolved = *given;
    cpa_attend_resolve_rows(&resolved, &plan->base.shape);
    const cpa_attend_args *args = &resolved;
    const cpa_partial state = args->state;
    const char *image = plan->memory->image;
    float scale = args->scale != 0 ? args->scale : 1.0f / sqrtf((float)kv.k_dim);
    *a = (cpa_cuda_attend_args){
        .q = args->q,
        .ready_q = plan->base.fusion.ready_rows > 0
                       ? ready_queries(plan, ready_q, args->q_row_stride * cpa_dtype_bytes(args->q_dtype))
                       : NULL,
        .q_row_stride = args->q_row_stride,
        .q_head_stride = args->q_head_stride,
        .q_dtype = args->q_dtype,
        .k_scale = cpa_kv_tensor_scale(&kv, CPA_KEYS),
        .v_scale = cpa_kv_tensor_scale(&kv, CPA_VALUES),
        .k_head_scales = kv.k_scales,
        .v_head_scales = kv.v_scales,
        .head_scale_step = kv.n_scales > 1,
        .k_words_at = cpa_kv_words_at(&kv, CPA_KEYS),
        .v_words_at = cpa_kv_words_at(&kv, CPA_VALUES),
        .q_heads = q_heads,
        .kv_heads = kv.kv_heads,
        .group = q_heads / kv.kv_heads,
        .k_dim = kv.k_dim,
        .v_dim = kv.v_dim,
        .resume = args->resume,
        .map = plan->map,
        .mask = args->mask,
        .scale = scale,
        .scale_log2 = scale * (float)M_LOG2E,
        .o = state.o,
        .lse = state.lse,
        .o_row_stride = state.o_row_stride,
        .lse_row_stride = state.lse_row_stride,
        .lse_head_stride = args->lse_head_stride,
        .out = args->out,
        .out_row_stride = args->out_row_stride,
        .out_head_stride = args->out_head_stride,
        .out_scale = args->out_scale,
        .tables = cpa_cuda_plan_tables(plan),
        .items = (const cpa_cuda_item *)(image + plan->items_at),
        .n_items = plan->base.n_items,
        .counters = (uint32_t *)(plan->memory->image + plan->counters_at),
        .partial_o = plan->memory->partial,
        .partial_lse = plan->memory->partial + plan->partial_rows * kv.kv_heads * kv.v_dim,
        .partial_rows = plan->partial_rows,
    };
    cpa_cuda_take_view(a, &kv);
}

/* What is asked of scores. */
static void fill_score(const cpa_attend_args *args, cpa_cuda_attend_args *a) {
    cpa_cuda_score *score = &a->score;
    if (args->selection && args->selection->bits) score->custom = *args->selection->bits;
    if (args->bias && args->bias->width > 0) score->bias = *args->bias;
    if (args->rules) {
        score->softcap = args->rules->softcap;
        score->temperature_len = args->rules->temperature_len;
        score->alibi_slopes = args->rules->alibi_slopes;
        score->sink_logits = args->rules->sink_logits;
    }
    if (score->temperature_len > 0) score->temperature_inverse = 1 / log2f(score->temperature_len);
    score->transforms =
        score->softcap > 0 || score->temperature_len > 0 || score->alibi_slopes != NULL || score->bias.values != NULL;
    score->indexed = score->alibi_slopes || score->bias.values || score->custom.bits;
    score->any = score->transforms || score->custom.bits;
    score->pre_scale = a->scale;
    if (score->softcap > 0) {
        score->tanh = cpa_cuda_tanh_of((double)a->scale / (double)score->softcap);
        score->tanh_line = cpa_cuda_tanh_line_of(1, 0);
        score->capped = cpa_cuda_capped_of((double)score->softcap);
    }
}

/* The scales become those of what the rules give. */
static void scale_what_rules_give(cpa_cuda_attend_args *a) {
    if (!a->score.transforms) return;
    a->scale = 1;
    a->scale_log2 = (float)M_LOG2E;
}

/* For kernels that take all queries from one place. */
static cpa_status place_ready_queries(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, const void *ready_q,
                                      cpa_stream *stream) {
    const cpa_attend_fusion *fusion = &plan->base.fusion;
    const int64_t row_bytes = a->q_row_stride * cpa_dtype_bytes(a->q_dtype);
    return cpa_cuda_gather_rows((char *)(uintptr_t)a->q + fusion->ready_row * row_bytes, ready_q, NULL,
                                fusion->ready_rows, row_bytes, stream);
}

static int is_empty(const cpa_cuda_plan *plan) {
    return plan->base.n_items == 0 || plan->rows == 0;
}

cpa_status cpa_cuda_plan_upload(const cpa_attend_plan *base, cpa_stream *stream) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    int takes_tables;
    if (is_empty(plan)) return CPA_OK;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return upload(plan, stream, &takes_tables);
}

/* Whether the decode kernel may be placed before what it comes behind is over. One rank has nothing that waits for
 * other devices, and a padded step has that on this stream alone. */
static void allow_early(const cpa_cuda_plan *plan, cpa_cuda_attend_args *a, const cpa_stream *stream) {
    a->early = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
    a->alone = plan->map.cp_size == 1 || plan->base.fusion.padded_items > 0;
}

/* A graph of the caller's would hold what the plan says now, and replay that whatever it says by then; a plan that is
 * reserved says it in memory of the device. */
static cpa_status check_capture(const cpa_cuda_plan *plan, cpa_stream *stream) {
    if (plan->base.reservation.sequences > 0 || !stream->device->table->stream_is_captured(stream)) return CPA_OK;
    return cpa_fail(&stream->error, CPA_UNSUPPORTED,
                    "attend: the stream is in a capture of the caller's, and the plan is not reserved");
}

cpa_status cpa_cuda_attend_supported(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                                     const cpa_mask *mask, cpa_error *err) {
    enum { MOST_KV_HEADS = 65535 }; /* CTAs of a grid in its second dimension */
    (void)device, (void)mask;
    if (shape->kv_heads > MOST_KV_HEADS)
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %d KV heads, on CUDA devices at most %d", where, shape->kv_heads,
                        MOST_KV_HEADS);
    return CPA_OK;
}

/* What an attend of a plan is told, and runs. */
typedef struct attend_call {
    cpa_kv_view kv;
    cpa_cuda_attend_args args;
    const cpa_key_selection *selection;
    const cpa_cuda_attend_choice *choice;
    cpa_cuda_attend_choice few; /* what few rows have, and keys that they share: the same, or that of no blocks */
    int leaves_few;             /* not 0: the latter; the kernel of blocks has the other rows */
    cpa_cuda_tile_skip skip;
} attend_call;

/* Beside rows that select blocks, few ones mostly attend all keys, by the kernels that they have without a selection.
 * Those of them that do select are attended again, which a state that is gone on from does not allow. Without rows
 * beside them, few that share no keys are taken by the kernel of blocks where they mostly select, over elements. */
static int leaves_few(const cpa_cuda_plan *plan, const cpa_attend_args *args) {
    const int over_elements = !cpa_dtype_is_quantised(args->kv.dtype) && args->kv.layout != CPA_VLLM_X;
    const int alone = plan->prefill.n_pieces == 0 && plan->n_shared == 0 && over_elements;
    return args->selection && args->selection->blocks && !args->resume && plan->decode_ctas > 0 && !alone &&
           plan->base.reservation.sequences == 0;
}

static void choose_kernels(const cpa_cuda_plan *plan, const cpa_attend_args *args, const cpa_cuda_attend_call *asked,
                           attend_call *call) {
    call->choice = cpa_cuda_plan_choice(plan, asked);
    if (!call->choice->plain && leaves_few(plan, args)) {
        cpa_cuda_attend_call of_few = *asked;
        of_few.rules &= ~CPA_CUDA_BLOCKS;
        const cpa_cuda_attend_choice *few = cpa_cuda_plan_choice(plan, &of_few);
        call->few = *few;
        call->leaves_few = !few->plain;
        call->choice = few->plain ? few : cpa_cuda_plan_choice(plan, asked);
    } else {
        call->few = *call->choice;
    }
}

static attend_call call_of(const cpa_cuda_plan *plan, const cpa_attend_args *args, const void *ready_q) {
    attend_call call = {.kv = cpa_kv_view_resolve(args->kv), .selection = args->selection};
    fill_args(plan, args, call.kv, ready_q, &call.args);
    fill_score(args, &call.args);
    cpa_cuda_attend_call asked =
        cpa_cuda_call_of(((const cpa_cuda_device *)plan->base.device)->path, &call.args, &call.kv, args->selection);
    if (args->skip_tiles > 0) asked.oddities |= CPA_CUDA_TILES_SKIP;
    choose_kernels(plan, args, &asked, &call);
    call.skip = (cpa_cuda_tile_skip){args->skip_tiles / call.args.scale, (unsigned long long *)args->tile_counts};
    scale_what_rules_give(&call.args);
    return call;
}

static cpa_attend_kernel named(const cpa_cuda_chosen *chosen) {
    if (!chosen->kernel) return (cpa_attend_kernel){0};
    return (cpa_attend_kernel){chosen->kernel->name, chosen->fastest->name, chosen->why};
}

void cpa_cuda_attend_kernels_of(const cpa_attend_plan *base, const cpa_attend_args *args, cpa_attend_kernels *out) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    const cpa_cuda_attend_call planned =
        cpa_cuda_planned_call(base->device, &base->shape, base->block_size, base->fusion);
    *out = (cpa_attend_kernels){0};
    if (is_empty(plan) || cpa_cuda_select(base->device, NULL) != CPA_OK) return;
    attend_call call = {.choice = args ? NULL : cpa_cuda_plan_choice(plan, &planned)};
    if (args)
        call = call_of(plan, args, NULL);
    else
        call.few = *call.choice;
    out->decode = named(&call.few.of[CPA_CUDA_DECODE]);
    out->prefill = named(&call.choice->of[CPA_CUDA_PREFILL]);
    out->shared = named(&call.few.of[CPA_CUDA_SHARED]);
}

/* What the kernel of some pieces is told; how many they are is left. */
static cpa_cuda_attend_launch launch_of(const cpa_cuda_plan *plan, const attend_call *call,
                                        const cpa_cuda_attend_args *a, cpa_cuda_pieces pieces) {
    const cpa_cuda_attend_choice *choice = pieces == CPA_CUDA_PREFILL ? call->choice : &call->few;
    return (cpa_cuda_attend_launch){.kernel = choice->of[pieces].kernel,
                                    .plan = plan,
                                    .spec = &choice->spec,
                                    .args = a,
                                    .kv = &call->kv,
                                    .selection = call->selection,
                                    .pieces = pieces,
                                    .skip = call->skip};
}

static cpa_status launch_decode(const cpa_cuda_plan *plan, const attend_call *call, cpa_cuda_attend_args *a,
                                cpa_stream *stream) {
    cpa_cuda_attend_launch launch = launch_of(plan, call, a, CPA_CUDA_DECODE);
    a->pieces = (const cpa_cuda_piece *)(plan->memory->image + plan->decode_at);
    launch.count = plan->decode_ctas;
    CPA_TRY(launch.kernel->launch(&launch, stream));
    return launch.kernel->leaves_units && plan->partial_rows > 0
               ? cpa_cuda_attend_combine_units(a, plan->decode_ctas, stream)
               : CPA_OK;
}

/* Pieces over keys as they lie, or over keys that are prepared. */
static cpa_status launch_prefill(const cpa_cuda_plan *plan, const attend_call *call, cpa_cuda_attend_args *a,
                                 cpa_stream *stream) {
    const cpa_cuda_attend_launch launch = launch_of(plan, call, a, CPA_CUDA_PREFILL);
    a->early = 0;
    return launch.kernel->over ? cpa_cuda_launch_passes(&launch, &plan->memory->source->prefill, stream)
                               : cpa_cuda_launch_prefill(&launch, &plan->prefill, stream);
}

/* The kernel of blocks: the rows that are not few, and of those the ones that select blocks, over what decode has left. */
static cpa_status launch_selecting(const cpa_cuda_plan *plan, const attend_call *call, cpa_cuda_attend_args *a,
                                   cpa_stream *stream) {
    cpa_cuda_attend_launch launch = launch_of(plan, call, a, CPA_CUDA_PREFILL);
    launch.kernel = call->choice->of[CPA_CUDA_DECODE].kernel; /* that of all pieces */
    a->early = 0;
    return launch.kernel->launch(&launch, stream);
}

/* Rows of several items over the keys that they share; the states are left to the decode kernel, which comes next and
 * takes the multiprocessors as they are left. */
static cpa_status launch_shared(const cpa_cuda_plan *plan, const attend_call *call, cpa_stream *stream) {
    cpa_cuda_attend_args a = call->args;
    const cpa_cuda_attend_launch launch = launch_of(plan, call, &a, CPA_CUDA_SHARED);
    const cpa_cuda_prefill pieces = {.pieces_at = plan->shared_at, .n_pieces = plan->n_shared};
    a.rows = (const cpa_cuda_listed_row *)(plan->memory->image + plan->rows_at);
    if (launch.kernel->over) return cpa_cuda_launch_passes(&launch, &plan->memory->source->shared, stream);
    a.early = a.early && a.alone;
    return cpa_cuda_launch_prefill(&launch, &pieces, stream);
}

/* By a kernel that takes the whole plan. */
static cpa_status launch_whole(const cpa_cuda_plan *plan, const attend_call *call, const cpa_cuda_attend_kernel *kernel,
                               cpa_stream *stream) {
    cpa_cuda_attend_launch launch = launch_of(plan, call, &call->args, CPA_CUDA_DECODE);
    launch.kernel = kernel;
    launch.count = 1;
    return kernel->launch(&launch, stream);
}

/* The kernel that takes the whole plan, or NULL: pieces of all kinds have it then. */
static const cpa_cuda_attend_kernel *whole_kernel(const attend_call *call) {
    for (int i = 0; i < CPA_CUDA_PIECE_KINDS; i++) {
        const cpa_cuda_attend_kernel *kernel = call->choice->of[i].kernel;
        if (kernel && kernel->whole) return kernel;
    }
    return NULL;
}

static cpa_status launch_plain(const cpa_cuda_plan *plan, const attend_call *call, cpa_stream *stream) {
    const cpa_cuda_device *device = cpa_cuda_device_of(stream);
    /* Tests and the self-test lower the path on purpose. */
    if (device->path == device->best && !device->path_is_set) cpa_attend_log_plain(call->choice->plain);
    stream->plain_rows += plan->base.rows_attended;
    return launch_whole(plan, call, &cpa_cuda_kernel_simple, stream);
}

cpa_status cpa_cuda_attend(const cpa_attend_plan *base, const cpa_attend_args *args, const void *ready_q,
                           cpa_stream *stream) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    int takes_tables;
    if (is_empty(plan)) return CPA_OK;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    CPA_TRY(check_capture(plan, stream));
    CPA_TRY(upload(plan, stream, &takes_tables));
    cpa_attend_log_kernels(base, args);
    attend_call call = call_of(plan, args, ready_q);
    cpa_cuda_attend_args *a = &call.args;
    const cpa_cuda_attend_kernel *whole = call.choice->plain || call.leaves_few ? NULL : whole_kernel(&call);
    if (call.choice->plain || whole || call.leaves_few || plan->prefill.n_pieces > 0)
        CPA_TRY(place_ready_queries(plan, a, ready_q, stream));
    if (call.choice->plain) return launch_plain(plan, &call, stream);
    if (whole) return launch_whole(plan, &call, whole, stream);
    if (plan->decode_ctas > 0) {
        /* It would read tables, or the bits of a selection, before they are there. */
        if (!takes_tables && !a->score.custom.bits) allow_early(plan, a, stream);
        if (plan->n_shared > 0) CPA_TRY(launch_shared(plan, &call, stream));
        a->beside_shared = plan->n_shared > 0;
        CPA_TRY(launch_decode(plan, &call, a, stream));
    }
    if (call.leaves_few) return launch_selecting(plan, &call, a, stream);
    return plan->prefill.n_pieces > 0 ? launch_prefill(plan, &call, a, stream) : CPA_OK;
}
