/* attend: picks the kernels for a plan and its arguments, and launches them. */
#include <math.h>
#include <stdatomic.h>

#include "base/check.h"
#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_choice.h"

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

static void fill_args(const cpa_cuda_plan *plan, const cpa_attend_args *args, const void *ready_q,
                      cpa_cuda_attend_args *a) {
    cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    int32_t q_heads = plan->base.shape.q_heads;
    cpa_partial state = cpa_partial_resolve(args->state, q_heads, kv.v_dim);
    const char *image = plan->memory->image;
    const int64_t q_row_stride = args->q_row_stride ? args->q_row_stride : (int64_t)q_heads * kv.k_dim;
    float scale = args->scale != 0 ? args->scale : 1.0f / sqrtf((float)kv.k_dim);
    *a = (cpa_cuda_attend_args){
        .q = args->q,
        .ready_q = plan->base.fusion.ready_rows > 0
                       ? ready_queries(plan, ready_q, q_row_stride * cpa_dtype_bytes(args->q_dtype))
                       : NULL,
        .k = kv.k,
        .v = kv.v,
        .q_row_stride = q_row_stride,
        .k_block_stride = kv.k_block_stride,
        .k_token_stride = kv.k_token_stride,
        .k_head_stride = kv.k_head_stride,
        .v_block_stride = kv.v_block_stride,
        .v_token_stride = kv.v_token_stride,
        .v_head_stride = kv.v_head_stride,
        .q_dtype = args->q_dtype,
        .kv_dtype = kv.dtype,
        .k_run_shift = cpa_kv_run_shift(&kv, CPA_KEYS),
        .v_run_shift = cpa_kv_run_shift(&kv, CPA_VALUES),
        .k_run_stride = (int64_t)kv.block_size * cpa_kv_key_run(kv.dtype),
        .v_run_stride = kv.block_size,
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
        .block_shift = cpa_cuda_log2(kv.block_size),
        .resume = args->resume,
        .map = plan->map,
        .mask = args->mask,
        .scale = scale,
        .scale_log2 = scale * (float)M_LOG2E,
        .o = state.o,
        .lse = state.lse,
        .o_row_stride = state.o_row_stride,
        .lse_row_stride = state.lse_row_stride,
        .out = args->out,
        .out_scale = args->out_scale,
        .tables = (const int32_t *)(image + plan->tables_at),
        .items = (const cpa_cuda_item *)(image + plan->items_at),
        .n_items = plan->base.n_items,
        .splits = (const cpa_cuda_split *)(image + plan->splits_at),
        .counters = (uint32_t *)(plan->memory->image + plan->counters_at),
        .partial_o = plan->memory->partial,
        .partial_lse = plan->memory->partial + plan->partial_rows * kv.kv_heads * kv.v_dim,
        .by_head = plan->by_head,
        .partial_rows = plan->partial_rows,
    };
}

/* What is asked of scores. */
static void fill_score(const cpa_attend_args *args, cpa_cuda_attend_args *a) {
    cpa_cuda_score *score = &a->score;
    if (args->custom) score->custom = *args->custom;
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

/* For wide heads the kernels take more shared memory than some devices have for a CTA. */
static int shared_memory_suffices(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, cpa_stream *stream) {
    const int32_t wide = plan->decode_wide, row_tiles = plan->decode_row_tiles;
    if (stream->device->caps.shared_bytes >= CPA_CUDA_WIDE_BYTES) return 1;
    return (a->score.any ? cpa_cuda_attend_decode_ruled(a, 0, wide, row_tiles, stream)
                         : cpa_cuda_attend_decode(a, 0, wide, row_tiles, stream)) == CPA_OK &&
           cpa_cuda_attend_portable(a, 0, plan->tile_rows, stream) == CPA_OK;
}

static cpa_cuda_attend_choice choose(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, const cpa_kv_view *kv,
                                     cpa_stream *stream) {
    const cpa_cuda_attend_spec spec = {
        .path = cpa_cuda_device_of(stream)->path,
        .wide_fits = shared_memory_suffices(plan, a, stream),
        .has_decode = plan->decode_ctas > 0,
        .has_prefill = plan->n_prefill > 0,
        .has_shared = plan->n_shared > 0,
        .has_widened = plan->n_widened > 0,
        .has_blocks = kv->num_blocks > 0,
        .knows_runs = plan->base.shape.layout == CPA_VLLM_X,
        .tile_rows = plan->tile_rows,
        .rows = plan->base.rows,
        .most_keys = plan->most_keys,
    };
    return cpa_cuda_choose_attend(&spec, a);
}

/* Says once for each reason that no tensor cores are used. Tests and the self-test lower the path on purpose. */
static void tell_plain(const cpa_cuda_attend_choice *choice, const cpa_stream *stream) {
    enum { MOST_REASONS = 64 };
    static _Atomic(const char *) told[MOST_REASONS]; /* reasons are literals */
    const cpa_cuda_device *device = (const cpa_cuda_device *)stream->device;
    if (!choice->why || device->path != device->best) return;
    for (int i = 0; i < MOST_REASONS; i++) {
        const char *other = NULL;
        if (atomic_compare_exchange_strong(&told[i], &other, choice->why)) break;
        if (other == choice->why) return;
    }
    cpa_log(CPA_LOG_WARN, "attend runs without tensor cores, often 100 to 1,000 times slower: they do not take %s",
            choice->why);
}

/* A tensor of elements with up to four dimensions, the innermost first; those but that one have strides in bytes. */
typedef struct mapped_tensor {
    void *memory;
    cpa_dtype dtype;
    cuuint64_t dims[4], strides[3];
} mapped_tensor;

/* A map of boxes of `columns`, 64 or fewer, by `rows` and `next` of the dimensions behind. What of a box lies past the
 * tensor reads zeros. */
static cpa_status encode_map(const mapped_tensor *tensor, int32_t columns, int32_t rows, int32_t next, CUtensorMap *out,
                             cpa_stream *stream) {
    const cuuint32_t boxes[] = {(cuuint32_t)columns, (cuuint32_t)rows, (cuuint32_t)next, 1}, steps[] = {1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUtensorMapDataType type =
        tensor->dtype == CPA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUresult result = cpa_cuda_device_of(stream)->encode(
        out, type, 4, tensor->memory, tensor->dims, tensor->strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return cpa_fail(&stream->error, CPA_DEVICE, "attend: cuTensorMapEncodeTiled failed with error %d", (int)result);
    return CPA_OK;
}

/* The pools of keys and of values as tensors of (dim, token, head, block), with boxes of `box` tokens. What has no
 * pages is one block of all rows. */
static cpa_status encode_pools(const cpa_kv_view *kv, int32_t box, int32_t tail, cpa_cuda_hopper_maps *maps,
                               cpa_stream *stream) {
    const int flat = kv->block_size == CPA_TENSOR_BLOCK;
    for (cpa_kv_part part = CPA_KEYS; part <= CPA_VALUES; part++) {
        const cpa_kv_pool pool = cpa_kv_pool_of(kv, part);
        const mapped_tensor tensor = {
            .memory = pool.memory,
            .dtype = kv->dtype,
            .dims = {(cuuint64_t)pool.dim, (cuuint64_t)(flat ? kv->num_blocks : kv->block_size),
                     (cuuint64_t)kv->kv_heads, (cuuint64_t)(kv->num_blocks > 0 && !flat ? kv->num_blocks : 1)},
            .strides = {(cuuint64_t)pool.token_stride, (cuuint64_t)pool.head_stride, (cuuint64_t)pool.block_stride}};
        CPA_TRY(encode_map(&tensor, 64, box, 1, part == CPA_KEYS ? &maps->k : &maps->v, stream));
        if (tail) CPA_TRY(encode_map(&tensor, tail, box, 1, part == CPA_KEYS ? &maps->k_tail : &maps->v_tail, stream));
    }
    return CPA_OK;
}

static cpa_status run_hopper(const cpa_cuda_attend_args *a, const cpa_kv_view *view, int32_t n_pieces,
                             cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(*view);
    cpa_cuda_hopper_maps maps = {0};
    if (cpa_cuda_hopper_takes_rows(kv.block_size)) return cpa_cuda_attend_hopper(a, &maps, n_pieces, stream);
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, kv.block_size, a->score.any);
    const int32_t tail = a->k_scales ? 0 : cpa_cuda_hopper_tail(a->k_dim, a->v_dim);
    CPA_TRY(encode_pools(&kv, box, tail, &maps, stream));
    return cpa_cuda_attend_hopper(a, &maps, n_pieces, stream);
}

static cpa_status run_persistent(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, const cpa_kv_view *view,
                                 cpa_stream *stream) {
    enum { ROWS = 64 }; /* of a box of queries */
    const cpa_kv_view kv = cpa_kv_view_resolve(*view);
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, kv.block_size, 0),
                  tail = cpa_cuda_hopper_tail(a->k_dim, a->v_dim);
    const cuuint64_t row_bytes = (cuuint64_t)(a->q_row_stride * cpa_dtype_bytes(a->q_dtype)),
                     head_bytes = (cuuint64_t)(a->k_dim * cpa_dtype_bytes(a->q_dtype));
    const mapped_tensor q = {.memory = (void *)(uintptr_t)a->q,
                             .dtype = a->q_dtype,
                             .dims = {(cuuint64_t)a->k_dim, (cuuint64_t)a->q_heads, (cuuint64_t)plan->base.rows, 1},
                             .strides = {head_bytes, row_bytes, row_bytes}};
    cpa_cuda_persistent_maps maps = {0};
    CPA_TRY(encode_map(&q, 64, a->group, ROWS / a->group, &maps.q, stream));
    if (tail) CPA_TRY(encode_map(&q, tail, a->group, ROWS / a->group, &maps.q_tail, stream));
    CPA_TRY(encode_pools(&kv, box, tail, &maps.pools, stream));
    uint32_t *tickets = (uint32_t *)(plan->memory->image + plan->tickets_at);
    return cpa_cuda_attend_persistent(a, &maps, plan->n_prefill, tickets, stream);
}

/* Where the blocks of a quantised cache, or of rows that lie in runs, are as rows of elements. Those of few tokens then
 * lie side by side, as blocks that are copied at once. */
static cpa_kv_view widened_view(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a) {
    const int32_t wide_block = cpa_cuda_wide_block(1 << a->block_shift);
    const int64_t rows = (int64_t)plan->n_widened * a->kv_heads << a->block_shift;
    return cpa_kv_view_resolve((cpa_kv_view){
        .k = plan->memory->widened,
        .v = plan->memory->widened + rows * a->k_dim * cpa_dtype_bytes(a->q_dtype),
        .dtype = a->q_dtype,
        .block_size = wide_block,
        .num_blocks = (int64_t)plan->n_widened * (1 << a->block_shift) / wide_block,
        .kv_heads = a->kv_heads,
        .k_dim = a->k_dim,
        .v_dim = a->v_dim,
    });
}

static float *widened_scales(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, const cpa_kv_view *wide) {
    const int64_t rows = (int64_t)plan->n_widened * a->kv_heads << a->block_shift;
    return (float *)((char *)wide->v + rows * a->v_dim * cpa_dtype_bytes(a->q_dtype));
}

/* Widens the blocks of the plan: little beside the products of a prefill, or the reading by every sequence that shares
 * them. */
static cpa_status widen_blocks(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a, cpa_stream *stream) {
    const int32_t *blocks = (const int32_t *)(plan->memory->image + plan->widened_blocks_at);
    const cpa_kv_view wide = widened_view(plan, a);
    float *scales = widened_scales(plan, a, &wide);
    return a->k_run_shift < 30
               ? cpa_cuda_attend_widen_runs(a, blocks, plan->n_widened, wide.block_size, wide.k, wide.v, scales, stream)
               : cpa_cuda_attend_widen(a, blocks, plan->n_widened, wide.block_size, wide.k, wide.v, scales, stream);
}

/* What the kernels over widened blocks are told. */
static cpa_cuda_attend_args over_widened(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *a,
                                         const cpa_kv_view *wide) {
    cpa_cuda_attend_args over = *a;
    over.k = wide->k;
    over.v = wide->v;
    over.k_block_stride = wide->k_block_stride;
    over.k_token_stride = wide->k_token_stride;
    over.k_head_stride = wide->k_head_stride;
    over.v_block_stride = wide->v_block_stride;
    over.v_token_stride = wide->v_token_stride;
    over.v_head_stride = wide->v_head_stride;
    over.k_run_shift = over.v_run_shift = 30;
    over.k_scales = cpa_dtype_is_quantised(a->kv_dtype) ? widened_scales(plan, a, wide) : NULL;
    over.kv_dtype = a->q_dtype;
    over.block_shift = cpa_cuda_log2(wide->block_size);
    over.tables = (const int32_t *)(plan->memory->image + plan->widened_tables_at);
    return over;
}

/* Where keys are shared, their blocks have been widened together with those of the prefill. */
static cpa_status run_widened(const cpa_cuda_plan *plan, cpa_cuda_attend_kernel kernel, const cpa_cuda_attend_args *a,
                              cpa_stream *stream) {
    const cpa_kv_view wide = widened_view(plan, a);
    const cpa_cuda_attend_args over = over_widened(plan, a, &wide);
    if (plan->n_shared == 0) CPA_TRY(widen_blocks(plan, a, stream));
    if (kernel == CPA_CUDA_WIDENED_BOXES) return run_hopper(&over, &wide, plan->n_prefill, stream);
    return cpa_cuda_attend_portable(&over, plan->n_prefill, plan->tile_rows, stream);
}

static cpa_status run_decode(const cpa_cuda_plan *plan, cpa_cuda_attend_kernel kernel, const cpa_cuda_attend_args *a,
                             cpa_stream *stream) {
    const int32_t ctas = plan->decode_ctas, wide = plan->decode_wide, row_tiles = plan->decode_row_tiles;
    switch (kernel) {
        case CPA_CUDA_DECODE_BLOCKS: return cpa_cuda_attend_decode_blocks(a, ctas, stream);
        case CPA_CUDA_DECODE_RULED: return cpa_cuda_attend_decode_ruled(a, ctas, wide, row_tiles, stream);
        case CPA_CUDA_DECODE_RULED_CACHES: return cpa_cuda_attend_decode_ruled_caches(a, ctas, stream);
        default: return cpa_cuda_attend_decode(a, ctas, wide, row_tiles, stream);
    }
}

static cpa_status run_prefill(const cpa_cuda_plan *plan, cpa_cuda_attend_kernel kernel, const cpa_cuda_attend_args *a,
                              const cpa_kv_view *kv, cpa_stream *stream) {
    const int32_t n = plan->n_prefill, tile_rows = plan->tile_rows;
    switch (kernel) {
        case CPA_CUDA_PERSISTENT: return run_persistent(plan, a, kv, stream);
        case CPA_CUDA_BOXES: return run_hopper(a, kv, n, stream);
        case CPA_CUDA_WIDENED_BOXES:
        case CPA_CUDA_WIDENED_MMA: return run_widened(plan, kernel, a, stream);
        case CPA_CUDA_MMA_RULED_CODES: return cpa_cuda_attend_portable_ruled_codes(a, n, tile_rows, stream);
        default: return cpa_cuda_attend_portable(a, n, tile_rows, stream);
    }
}

/* Rows of several items over the keys that they share; the states are left to the decode kernel, which comes next and
 * takes the multiprocessors as they are left. */
static cpa_status run_shared(const cpa_cuda_plan *plan, const cpa_cuda_attend_args *decode, const cpa_kv_view *kv,
                             cpa_stream *stream) {
    cpa_cuda_attend_args a = *decode;
    a.rows = (const cpa_cuda_listed_row *)(plan->memory->image + plan->rows_at);
    a.pieces = (const cpa_cuda_piece *)(plan->memory->image + plan->shared_at);
    a.by_head = 0;
    if (plan->n_widened > 0) {
        const cpa_kv_view wide = widened_view(plan, &a);
        const cpa_cuda_attend_args over = over_widened(plan, &a, &wide);
        CPA_TRY(widen_blocks(plan, &a, stream));
        return run_hopper(&over, &wide, plan->n_shared, stream);
    }
    a.early = a.early && a.alone;
    return run_hopper(&a, kv, plan->n_shared, stream);
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
    if (shape->v_in_k) {
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "%s: v_in_k is 1: values that are the first %d elements of their keys of %d are not supported "
                        "by CUDA devices",
                        where, shape->v_dim, shape->k_dim);
    }
    if (shape->kv_heads > MOST_KV_HEADS)
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %d KV heads, on CUDA devices at most %d", where, shape->kv_heads,
                        MOST_KV_HEADS);
    return CPA_OK;
}

cpa_status cpa_cuda_attend(const cpa_attend_plan *base, const cpa_attend_args *args, const void *ready_q,
                           cpa_stream *stream) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    cpa_cuda_attend_args a;
    int takes_tables;
    if (is_empty(plan)) return CPA_OK;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    CPA_TRY(check_capture(plan, stream));
    CPA_TRY(upload(plan, stream, &takes_tables));
    fill_args(plan, args, ready_q, &a);
    fill_score(args, &a);
    const cpa_cuda_attend_choice choice = choose(plan, &a, &args->kv, stream);
    scale_what_rules_give(&a);
    tell_plain(&choice, stream);
    if (choice.why || plan->n_prefill > 0) CPA_TRY(place_ready_queries(plan, &a, ready_q, stream));
    if (choice.why) return cpa_cuda_attend_simple(&a, plan->rows, stream);
    if (plan->decode_ctas > 0) {
        /* It would read tables, or the bits of a custom mask, before they are there. */
        if (!takes_tables && !a.score.custom.bits) allow_early(plan, &a, stream);
        if (plan->n_shared > 0) CPA_TRY(run_shared(plan, &a, &args->kv, stream));
        a.beside_shared = plan->n_shared > 0;
        a.pieces = (const cpa_cuda_piece *)(plan->memory->image + plan->decode_at);
        CPA_TRY(run_decode(plan, choice.decode, &a, stream));
    }
    if (plan->n_prefill > 0) {
        a.early = 0;
        a.pieces = (const cpa_cuda_piece *)(plan->memory->image + plan->prefill_at);
        CPA_TRY(run_prefill(plan, choice.prefill, &a, &args->kv, stream));
    }
    return plan->n_splits > 0 ? cpa_cuda_attend_combine(&a, plan->n_splits, stream) : CPA_OK;
}
