/* The kernels that copy boxes of keys and values by tensor maps, on compute capability 9.0, and the maps. */
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/cuda/attend/attend_blocks.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_skip.h"
#include "kernels/cuda/attend/attend_source.h"

/* Packed rows of a warpgroup, which a box of queries of the persistent kernel brings. */
enum { GROUP_ROWS = 64 };

/* ---- what they take ---- */

/* With rules it takes smaller pieces of some heads than plans have of tensors without pages. (A bias is read element by
 * element, in more code than the kernel has registers for.) */
static const char *hopper_refuses(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    const int32_t rows = cpa_cuda_hopper_rows(shape->k_dim, shape->v_dim, spec->block_size, spec->call.rules != 0);
    if (spec->call.oddities & CPA_CUDA_NO_BLOCKS) return "a cache of no blocks";
    return spec->tile_rows > rows ? "score rules over tiles that are cut for more rows" : NULL;
}

static const char *hopper_skip_refuses(const cpa_cuda_attend_spec *spec) {
    enum { LEAST_COLUMNS = 97 };
    const cpa_attention_shape *shape = spec->shape;
    if (spec->block_size < CPA_CUDA_LEAST_BOX) return "blocks of fewer than 8 tokens";
    if (shape->k_dim < LEAST_COLUMNS && shape->v_dim < LEAST_COLUMNS) return "heads of 96 columns and fewer";
    return hopper_refuses(spec);
}

/* CTAs that stay gain where pieces begin and end. In between the two warpgroups of those for wider heads take 1 - 3%
 * longer than those of a CTA a piece (H200), which are better where pieces have many keys. */
static const char *persistent_refuses(const cpa_cuda_attend_spec *spec) {
    enum { LEAST_BLOCK = 16, MOST_KEYS = 12 << 10 }; /* tokens of a box; keys of a piece */
    const int32_t odd = spec->call.oddities, group = spec->shape->q_heads / spec->shape->kv_heads;
    const int64_t keys = odd & CPA_CUDA_FULL ? spec->most_keys : spec->most_keys / 2;
    const char *why = hopper_refuses(spec);
    if (why) return why;
    if (spec->block_size < LEAST_BLOCK) return "blocks of fewer than 16 tokens";
    if (spec->reserved) return "a reserved plan, whose pieces the host does not count";
    if (GROUP_ROWS % group != 0) return "groups of query heads that are no part of 64";
    if (odd & (CPA_CUDA_STATE | CPA_CUDA_OUT_CODES)) return "results in a state or in fp8";
    if (spec->cp_size > 1 || odd & CPA_CUDA_GAP) return "keys of one rank of several, or a window beside sinks";
    if (odd & CPA_CUDA_FAR_ROWS || spec->rows > INT32_MAX) return "2^31 rows of queries, or elements of one";
    const int many = keys > MOST_KEYS && spec->block_size != CPA_TENSOR_BLOCK && spec->width != CPA_CUDA_64;
    return many ? "so many keys that a CTA a piece is faster" : NULL;
}

static int widens(const cpa_cuda_attend_spec *spec) {
    return cpa_cuda_has_codes(spec) || cpa_cuda_in_runs(spec);
}

/* Few rows are left to other kernels: unless a state is gone on from to those of decode, over what is widened to the
 * plain one then. */
static const char *blocks_refuse(const cpa_cuda_attend_spec *spec) {
    const int32_t prefill = spec->pieces & 1 << CPA_CUDA_PREFILL, shared = spec->pieces & 1 << CPA_CUDA_SHARED;
    const int resumed = (spec->call.oddities & CPA_CUDA_RESUMED) != 0, widened = widens(spec);
    if (shared && resumed && !(widened && prefill)) return "keys by blocks for rows that share keys, from a state on";
    if (widened && resumed && !prefill) return "keys by blocks over codes, or over rows in runs, from a state on";
    if (widened && prefill && !spec->prepared) return "keys by blocks that there is no memory to widen in";
    if ((!widened && spec->block_size < CPA_CUDA_LEAST_BOX) || spec->block_size == CPA_TENSOR_BLOCK)
        return "keys by blocks over a cache in blocks of fewer than 8 tokens";
    if (spec->call.oddities & CPA_CUDA_NO_BLOCKS) return "a cache of no blocks";
    if (spec->call.oddities & CPA_CUDA_FAR_ROWS || spec->rows > INT32_MAX)
        return "2^31 rows of queries, or elements of one";
    return spec->reserved ? "keys by blocks over a reserved plan" : NULL;
}

static cpa_cuda_attend_geometry hopper_geometry(const cpa_attention_shape *shape, int32_t block_size) {
    return (cpa_cuda_attend_geometry){
        .rows = cpa_cuda_hopper_rows(shape->k_dim, shape->v_dim, block_size, 0), .heads = 1, .ctas = 1};
}

const char *cpa_cuda_latent_codes_refuse(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    const int tiled = spec->call.kv_dtype == CPA_FP8_T128;
    if (shape->k_dim < CPA_CUDA_LATENT_K_DIM || shape->v_dim < CPA_CUDA_LATENT_V_DIM)
        return "codes of latents of fewer than 576 columns";
    if (tiled && spec->call.q_dtype != CPA_BF16) return "queries in fp16 over rotated elements in bf16";
    return spec->call.oddities & CPA_CUDA_ROW_SCALES ? "latents with a scale each" : NULL;
}

/* Latents: one KV head, as all query heads share them. */
static const char *latent_refuses(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    if (shape->kv_heads > 1) return "latents of several KV heads";
    if (shape->k_dim > CPA_CUDA_LATENT_K_DIM || shape->v_dim > CPA_CUDA_LATENT_V_DIM)
        return "latents of more columns than 576, or 512 of values";
    if (spec->call.oddities & CPA_CUDA_NO_BLOCKS) return "a cache of no blocks";
    if (cpa_cuda_has_codes(spec)) return cpa_cuda_latent_codes_refuse(spec);
    return spec->block_size < CPA_CUDA_LEAST_BOX ? "latents in blocks of fewer than 8 tokens" : NULL;
}

/* Heads of latents' widths whose values lie apart. */
static const char *wide_refuses(const cpa_cuda_attend_spec *spec) {
    const cpa_attention_shape *shape = spec->shape;
    if (shape->k_dim > CPA_CUDA_LATENT_V_DIM || shape->v_dim > CPA_CUDA_LATENT_V_DIM)
        return "heads of more than 512 columns";
    if (spec->call.oddities & CPA_CUDA_NO_BLOCKS) return "a cache of no blocks";
    return spec->block_size < CPA_CUDA_LEAST_BOX ? "wide heads in blocks of fewer than 8 tokens" : NULL;
}

/* ---- maps ---- */

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

static cpa_status launch_hopper(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_attend_args *a = launch->args;
    const int32_t block_size = launch->kv->block_size;
    cpa_cuda_hopper_maps maps = {0};
    if (!cpa_cuda_hopper_takes_rows(block_size)) {
        const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, block_size, a->score.any);
        const int32_t tail = a->k_scales ? 0 : cpa_cuda_hopper_tail(a->k_dim, a->v_dim);
        CPA_TRY(encode_pools(launch->kv, box, tail, &maps, stream));
    }
    return cpa_cuda_attend_hopper(a, &maps, launch->count, stream);
}

static cpa_status launch_hopper_skip(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_attend_args *a = launch->args;
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, launch->kv->block_size, 0);
    cpa_cuda_hopper_maps maps = {0};
    CPA_TRY(encode_pools(launch->kv, box, 0, &maps, stream));
    return cpa_cuda_attend_hopper_skip(a, &maps, launch->skip, launch->count, stream);
}

/* Rows that q holds: those that are ready are placed there too, and what a graph bakes in is for all that it may get. */
static int64_t query_rows(const cpa_attend_plan *plan) {
    const cpa_attend_fusion *fusion = &plan->fusion;
    const int64_t ready_end = fusion->ready_rows > 0 ? fusion->ready_row + fusion->ready_rows : 0;
    return cpa_max64(cpa_max64(plan->rows, fusion->padded_items), ready_end);
}

/* The queries as a tensor, for boxes of a warpgroup's rows, those of so many heads of a token being neighbours. */
static cpa_status encode_queries(const cpa_cuda_attend_launch *launch, int32_t heads, int32_t tail,
                                 cpa_cuda_persistent_maps *maps, cpa_stream *stream) {
    const cpa_cuda_attend_args *a = launch->args;
    const cuuint64_t row_bytes = (cuuint64_t)(a->q_row_stride * cpa_dtype_bytes(a->q_dtype)),
                     head_bytes = (cuuint64_t)(a->q_head_stride * cpa_dtype_bytes(a->q_dtype));
    const mapped_tensor q = {
        .memory = (void *)(uintptr_t)a->q,
        .dtype = a->q_dtype,
        .dims = {(cuuint64_t)a->k_dim, (cuuint64_t)a->q_heads, (cuuint64_t)query_rows(&launch->plan->base), 1},
        .strides = {head_bytes, row_bytes, row_bytes}};
    CPA_TRY(encode_map(&q, 64, heads, GROUP_ROWS / heads, &maps->q, stream));
    return tail ? encode_map(&q, tail, heads, GROUP_ROWS / heads, &maps->q_tail, stream) : CPA_OK;
}

static uint32_t *tickets_of(const cpa_cuda_plan *plan) {
    return (uint32_t *)(plan->memory->image + plan->tickets_at);
}

static cpa_status launch_persistent(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_cuda_attend_args *a = launch->args;
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, launch->kv->block_size, 0),
                  tail = cpa_cuda_hopper_tail(a->k_dim, a->v_dim);
    cpa_cuda_persistent_maps maps = {0};
    CPA_TRY(encode_queries(launch, a->group, tail, &maps, stream));
    CPA_TRY(encode_pools(launch->kv, box, tail, &maps.pools, stream));
    return cpa_cuda_attend_persistent(a, &maps, launch->count, tickets_of(launch->plan), stream);
}

/* Rows of the items that are left to other kernels, at most; 0: none are, where it takes the whole plan. */
static int32_t few_rows(const cpa_cuda_attend_launch *launch) {
    const cpa_cuda_plan *plan = launch->plan;
    return launch->pieces == CPA_CUDA_PREFILL || widens(launch->spec) ? plan->decode_rows / launch->args->group : 0;
}

/* The items of a pass, or with NULL all, by query heads. */
static cpa_status launch_items(const cpa_cuda_attend_launch *launch, const cpa_cuda_pass *pass, cpa_stream *stream) {
    const cpa_cuda_attend_args *a = launch->args;
    const cpa_cuda_plan *plan = launch->plan;
    const int32_t box = cpa_cuda_blocks_box(a->k_dim, a->v_dim, launch->kv->block_size);
    cpa_cuda_block_items items = {.n = plan->base.n_items, .rows = plan->rows / a->group};
    cpa_cuda_persistent_maps maps = {0};
    if (pass) {
        items = (cpa_cuda_block_items){.first = pass->first_item, .n = pass->n_items, .rows = pass->rows};
        items.is_cut = pass->is_cut;
        items.cut = (cpa_cuda_item){.item = pass->item, .state_shift = pass->state_shift};
    }
    items.few = few_rows(launch);
    items.leaves_all = widens(launch->spec);
    CPA_TRY(encode_queries(launch, 1, 0, &maps, stream));
    CPA_TRY(encode_pools(launch->kv, box, 0, &maps.pools, stream));
    return cpa_cuda_attend_blocks(a, &maps, launch->selection->blocks, &items, tickets_of(plan), stream);
}

/* Codes, and rows in runs, are widened first: all keys, of which the tiles of a head take some; not those of few rows,
 * which the plain kernel has: if they select blocks, or where no kernel of decode had them. */
static cpa_status launch_blocks(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    static const cpa_cuda_attend_kernel widened = {
        .name = "widen+blocks", .prepares = &cpa_cuda_widen_scaled, .over = &cpa_cuda_kernel_blocks};
    const cpa_cuda_few_by_blocks few = {few_rows(launch), launch->pieces != CPA_CUDA_PREFILL};
    cpa_cuda_attend_launch own = *launch;
    if (!widens(launch->spec)) return launch_items(launch, NULL, stream);
    own.kernel = &widened;
    CPA_TRY(cpa_cuda_launch_passes_by(&own, &launch->plan->memory->source->prefill, launch_items, stream));
    return launch->plan->decode_ctas > 0
               ? cpa_cuda_attend_few_by_blocks(launch->args, launch->selection->blocks, few, stream)
               : CPA_OK;
}

/* Latents, or wide heads. The rows of a token may be those of a team of two CTAs. */
static cpa_status launch_latent(const cpa_cuda_attend_launch *launch, cpa_stream *stream) {
    const cpa_attention_shape *shape = launch->spec->shape;
    const int codes = cpa_cuda_has_codes(launch->spec), decode = launch->pieces == CPA_CUDA_DECODE;
    const cpa_cuda_team team = cpa_cuda_team_of(shape, launch->kv->block_size);
    const cpa_cuda_latent_form form = {shape->v_in_k, shape->v_in_k && !codes && decode && team.ctas == 2};
    const int32_t box = cpa_cuda_latent_box(form, launch->kv->block_size);
    cpa_cuda_attend_args a = *launch->args;
    cpa_cuda_hopper_maps maps = {0};
    const int few = decode && shape->v_in_k && launch->plan->decode_row_tiles == 1 && cpa_cuda_latent_few_takes(&a);
    if (!codes && !few) CPA_TRY(encode_pools(launch->kv, box, 0, &maps, stream));
    /* Else half of the device is left to what waits for other devices. */
    a.early =
        a.early && (a.alone || 2 * (int64_t)launch->count * a.kv_heads <= cpa_cuda_device_of(stream)->multiprocessors);
    if (few) return cpa_cuda_attend_latent_few(&a, launch->count, stream);
    return cpa_cuda_attend_latent(&a, &maps, form, launch->count, stream);
}

const cpa_cuda_attend_kernel cpa_cuda_kernel_hopper = {
    .name = "hopper",
    .takes = {1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED, CPA_CUDA_ROWS, CPA_CUDA_ALL_RULES - CPA_CUDA_BIAS,
              CPA_CUDA_HOPPER, CPA_CUDA_256},
    .refuses = hopper_refuses,
    .geometry = hopper_geometry,
    .launch = launch_hopper,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_hopper_skip = {
    .name = "hopper_skip",
    .takes = {.pieces = 1 << CPA_CUDA_PREFILL,
              .caches = CPA_CUDA_ROWS,
              .path = CPA_CUDA_HOPPER,
              .width = CPA_CUDA_128,
              .skips = 1},
    .refuses = hopper_skip_refuses,
    .geometry = hopper_geometry,
    .launch = launch_hopper_skip,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_blocks = {
    .name = "blocks",
    .takes = {1 << CPA_CUDA_DECODE | 1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED, CPA_CUDA_ALL_CACHES, CPA_CUDA_BLOCKS,
              CPA_CUDA_HOPPER, CPA_CUDA_256},
    .refuses = blocks_refuse,
    .launch = launch_blocks,
    .whole = 1,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_persistent = {
    .name = "persistent",
    .takes = {1 << CPA_CUDA_PREFILL, CPA_CUDA_ROWS, 0, CPA_CUDA_HOPPER, CPA_CUDA_128},
    .refuses = persistent_refuses,
    .geometry = hopper_geometry,
    .launch = launch_persistent,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_latent = {
    .name = "latent",
    .takes = {1 << CPA_CUDA_DECODE | 1 << CPA_CUDA_PREFILL | 1 << CPA_CUDA_SHARED, CPA_CUDA_ALL_CACHES, 0,
              CPA_CUDA_HOPPER, CPA_CUDA_576, 1},
    .refuses = latent_refuses,
    .geometry = cpa_cuda_decode_geometry,
    .launch = launch_latent,
    .leaves_units = 1,
};
const cpa_cuda_attend_kernel cpa_cuda_kernel_wide = {
    .name = "wide",
    .takes = {1 << CPA_CUDA_DECODE | 1 << CPA_CUDA_PREFILL, CPA_CUDA_ROWS, 0, CPA_CUDA_HOPPER, CPA_CUDA_576, 0,
              CPA_CUDA_576},
    .refuses = wide_refuses,
    .geometry = cpa_cuda_decode_geometry,
    .launch = launch_latent,
    .leaves_units = 1,
};
