/* The operators of an indexer: every argument is checked here, then the table of the back end runs. */
#include <cpattn/indexer.h>

#include <math.h>

#include "base/struct_size.h"
#include "kernels/indexer.h"
#include "kernels/nn.h"
#include "kernels/operators.h"
#include "src/ops/attend.h"
#include "src/ops/nn_check.h"
#include "src/ops/nn_rope.h"

static const float DEFAULT_FLOOR = 1e-4f;
static const float LEAST_FLOOR = 1e-30f; /* scales of less are no normal numbers */

static cpa_status check_dim(const char *where, const char *name, int32_t dim, int32_t hadamard, cpa_error *err) {
    REQUIRE(err, dim >= 8 && dim <= CPA_INDEX_MOST_DIM && dim % 8 == 0,
            "%s: %s is %d, expected a multiple of 8 up to %d", where, name, dim, CPA_INDEX_MOST_DIM);
    REQUIRE(err, hadamard == 0 || hadamard == 1, "%s: hadamard is %d, expected 0 or 1", where, hadamard);
    REQUIRE(err, !hadamard || (dim & (dim - 1)) == 0, "%s: %s is %d, expected a power of two for a Hadamard transform",
            where, name, dim);
    return CPA_OK;
}

static cpa_status check_key_dtype(const char *where, const char *name, cpa_dtype dtype, cpa_error *err) {
    REQUIRE(err, dtype == CPA_FP8_E4M3 || dtype == CPA_BF16 || dtype == CPA_F32,
            "%s: %s is %s, expected fp8_e4m3, bf16 or fp32", where, name, cpa_dtype_name(dtype));
    return CPA_OK;
}

static cpa_status check_cache(const char *where, const cpa_index_cache *cache, cpa_error *err) {
    const cpa_kv_view *kv = &cache->kv;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*cache), "%s: the reserved bytes of the cache are not zero", where);
    REQUIRE(err, kv->k || kv->num_blocks == 0, "%s: the cache of index keys is NULL", where);
    CPA_TRY(cpa_check_view(where, kv, err));
    REQUIRE(err, kv->kv_heads == 1 && kv->v_in_k == 1 && kv->v_dim == kv->k_dim,
            "%s: the cache has %d KV heads, v_in_k %d, k_dim %d and v_dim %d; expected one head of keys alone, with "
            "v_in_k 1 and v_dim equal to k_dim",
            where, kv->kv_heads, kv->v_in_k, kv->k_dim, kv->v_dim);
    CPA_TRY(check_key_dtype(where, "the cache", kv->dtype, err));
    REQUIRE(err, kv->layout != CPA_VLLM_X && !kv->k_scales,
            "%s: the cache has layout %d and scales of heads %s; expected rows in one piece and no such scales", where,
            (int)kv->layout, kv->k_scales ? "given" : "not given");
    return check_dim(where, "k_dim", kv->k_dim, cache->hadamard, err);
}

static cpa_status take_floor(const char *where, float *floor, cpa_error *err) {
    if (*floor == 0) *floor = DEFAULT_FLOOR;
    return cpa_nn_check_finite(where, "floor", *floor, LEAST_FLOOR, err);
}

/* ---- index_write ---- */

static cpa_status check_index_write(cpa_index_write_args *a, cpa_error *err) {
    const char *where = "index_write";
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    CPA_TRY(check_cache(where, &a->cache, err));
    const cpa_kv_view *kv = &a->cache.kv;
    REQUIRE(err, kv->k_scale == 0, "%s: k_scale of the cache is %g, expected 0: each row gets its own scale", where,
            (double)kv->k_scale);
    CPA_TRY(cpa_nn_check_tensor(where,
                                (cpa_nn_tensor){"k", "k_row_stride", a->k, &a->k_row_stride, a->tokens, kv->k_dim,
                                                cpa_dtype_bytes(a->dtype), 0},
                                err));
    REQUIRE(err, !a->gamma == !a->beta, "%s: %s is NULL and %s is not; expected both or neither", where,
            a->gamma ? "beta" : "gamma", a->gamma ? "gamma" : "beta");
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"gamma", NULL, a->gamma, NULL, 1, kv->k_dim, 4, 1}, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"beta", NULL, a->beta, NULL, 1, kv->k_dim, 4, 1}, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(cpa_nn_check_rope(where, &a->rope, "k_dim", kv->k_dim, err));
    CPA_TRY(cpa_nn_check_positions(where, &a->rope, a->positions, a->tokens, err));
    CPA_TRY(cpa_nn_check_tensor(where, (cpa_nn_tensor){"slot_mapping", NULL, a->slot_mapping, NULL, a->tokens, 1, 8, 0},
                                err));
    CPA_TRY(cpa_nn_check_flag(where, "scales_pow2", a->scales_pow2, err));
    return take_floor(where, &a->floor, err);
}

cpa_status cpa_index_write(const cpa_index_write_args *given, cpa_stream *stream) {
    cpa_index_write_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("index_write", given, cpa_index_write_args, cache, &args, &stream->error));
    CPA_TRY(check_index_write(&args, &stream->error));
    return args.tokens ? stream->device->nn->index_write(&args, stream) : CPA_OK;
}

/* ---- index_q ---- */

static cpa_status check_weights(const char *where, cpa_index_q_args *a, cpa_error *err) {
    REQUIRE(err, a->weights || a->format == CPA_INDEX_BF16 || a->format == CPA_INDEX_F32 || a->tokens == 0,
            "%s: weights is NULL, expected weights for queries in codes, whose scales go into them", where);
    REQUIRE(err, !a->weights == !a->weights_out || a->tokens == 0,
            "%s: %s is NULL and %s is not; expected both or neither", where, a->weights ? "weights_out" : "weights",
            a->weights ? "weights" : "weights_out");
    CPA_TRY(cpa_check_dtype(where, "weight_dtype", a->weight_dtype, err));
    CPA_TRY(cpa_nn_check_tensor(where,
                                (cpa_nn_tensor){"weights", "weight_row_stride", a->weights, &a->weight_row_stride,
                                                a->tokens, a->heads, cpa_dtype_bytes(a->weight_dtype), 1},
                                err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"weights_out", NULL, a->weights_out, NULL, a->tokens, a->heads, 4, 1}, err));
    if (a->softmax_scale == 0) a->softmax_scale = (float)(1 / sqrt((double)a->dim));
    if (a->head_scale == 0) a->head_scale = (float)(1 / sqrt((double)a->heads));
    CPA_TRY(cpa_nn_check_finite(where, "softmax_scale", a->softmax_scale, 0, err));
    return cpa_nn_check_finite(where, "head_scale", a->head_scale, 0, err);
}

static cpa_status check_format(const char *where, const cpa_index_q_args *a, cpa_error *err) {
    const int has_scales = a->format == CPA_INDEX_MXFP4;
    REQUIRE(err, (uint32_t)a->format < CPA_INDEX_FORMAT_COUNT,
            "%s: format is %d, expected FP8 (0), BF16 (1), MXFP4 (2) or F32 (3)", where, (int)a->format);
    REQUIRE(err, !has_scales || a->dim % CPA_INDEX_MXFP4_BLOCK == 0,
            "%s: dim is %d, expected a multiple of the %d elements that share a scale", where, a->dim,
            CPA_INDEX_MXFP4_BLOCK);
    REQUIRE(err, !a->scales == !has_scales || a->tokens == 0,
            "%s: scales is %s, expected it for MXFP4 and for no other", where, a->scales ? "given" : "NULL");
    return CPA_OK;
}

static cpa_status check_index_q(cpa_index_q_args *a, cpa_error *err) {
    const char *where = "index_q";
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "heads", a->heads, 1, CPA_INDEX_MOST_HEADS, err));
    CPA_TRY(check_dim(where, "dim", a->dim, a->hadamard, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    CPA_TRY(check_format(where, a, err));
    const int64_t width = (int64_t)a->heads * a->dim;
    CPA_TRY(cpa_nn_check_tensor(
        where,
        (cpa_nn_tensor){"q", "q_row_stride", a->q, &a->q_row_stride, a->tokens, width, cpa_dtype_bytes(a->dtype), 0},
        err));
    CPA_TRY(cpa_nn_check_rope(where, &a->rope, "dim", a->dim, err));
    CPA_TRY(cpa_nn_check_positions(where, &a->rope, a->positions, a->tokens, err));
    CPA_TRY(cpa_nn_check_tensor(
        where,
        (cpa_nn_tensor){"out", NULL, a->out, NULL, a->tokens, a->format == CPA_INDEX_MXFP4 ? width / 2 : width,
                        a->format == CPA_INDEX_F32    ? 4
                        : a->format == CPA_INDEX_BF16 ? 2
                                                      : 1,
                        0},
        err));
    CPA_TRY(check_weights(where, a, err));
    return take_floor(where, &a->floor, err);
}

cpa_status cpa_index_q(const cpa_index_q_args *given, cpa_stream *stream) {
    cpa_index_q_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("index_q", given, cpa_index_q_args, out, &args, &stream->error));
    CPA_TRY(check_index_q(&args, &stream->error));
    return args.tokens ? stream->device->nn->index_q(&args, stream) : CPA_OK;
}

/* ---- the plan ---- */

cpa_status cpa_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err) {
    REQUIRE(err, device && out, "index plan: %s is NULL", device ? "out" : "device");
    return device->operators->index_plan_create(device, out, err);
}

void cpa_index_plan_destroy(cpa_index_plan *plan) {
    if (plan) plan->device->operators->index_plan_destroy(plan);
}

cpa_status cpa_index_plan_reserve(cpa_index_plan *plan, const cpa_index_limits *given, cpa_error *err) {
    const int64_t most_keys = (int64_t)1 << 30;
    cpa_index_limits l;
    REQUIRE(err, plan, "index plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("index plan", given, cpa_index_limits, keys, &l, err));
    REQUIRE(err, l.items >= 1 && l.items <= INT32_MAX, "index plan: reserved for %lld items, expected 1..%d",
            (long long)l.items, INT32_MAX);
    REQUIRE(err, l.rows >= 1 && l.rows <= INT32_MAX, "index plan: reserved for %lld rows, expected 1..%d",
            (long long)l.rows, INT32_MAX);
    REQUIRE(err, l.item_rows >= 1 && l.item_rows <= l.rows,
            "index plan: reserved for %lld rows an item, expected 1..%lld, all rows", (long long)l.item_rows,
            (long long)l.rows);
    REQUIRE(err, l.keys >= 0 && l.keys <= most_keys, "index plan: reserved for %lld keys an item, expected 0 to 2^30",
            (long long)l.keys);
    REQUIRE(err, l.table_entries >= 0 && l.table_entries <= CPA_MOST_TOKENS,
            "index plan: reserved for %lld table entries, expected 0 to 2^44", (long long)l.table_entries);
    plan->is_set = 0;
    CPA_TRY(plan->device->operators->index_plan_reserve(plan, &l, err));
    plan->device->table->release(plan->device);
    return CPA_OK;
}

cpa_status cpa_index_plan_upload(const cpa_index_plan *plan, cpa_stream *stream) {
    if (!stream) return CPA_INVALID;
    REQUIRE(&stream->error, plan && plan->device == stream->device, "index plan: %s is uploaded",
            plan ? "a plan of another device" : "NULL");
    REQUIRE(&stream->error, plan->limits.items > 0 && plan->is_set, "index plan: an upload of a plan that is not %s",
            plan->limits.items > 0 ? "set" : "reserved");
    return plan->device->operators->index_plan_upload(plan, stream);
}

cpa_status cpa_index_plan_set(cpa_index_plan *plan, const cpa_attend_batch *given, int32_t tokens_per_key,
                              cpa_error *err) {
    cpa_attend_batch batch;
    cpa_batch_reach reach;
    REQUIRE(err, plan, "index plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("index plan", given, cpa_attend_batch, n_table_entries, &batch, err));
    CPA_TRY(cpa_check_batch(plan->device, &batch, &reach, err));
    REQUIRE(err, tokens_per_key >= 1 && (batch.map.cp_size == 1 || batch.map.interleave % tokens_per_key == 0),
            "index plan: tokens_per_key is %d, expected a divisor of the interleave, %d", tokens_per_key,
            batch.map.interleave);
    plan->is_set = 0;
    CPA_TRY(plan->device->operators->index_plan_set(plan, &batch, tokens_per_key, err));
    plan->device->table->release(plan->device);
    plan->max_block = reach.max_block;
    plan->is_set = 1;
    return CPA_OK;
}

/* ---- index_logits ---- */

static cpa_status check_key_scales(const char *where, const cpa_index_logits_args *a, cpa_error *err) {
    const cpa_kv_view *kv = &a->cache.kv;
    if (!a->k_scales) return CPA_OK;
    REQUIRE(err, kv->dtype == CPA_FP8_E4M3 && kv->k_scale != 0,
            "%s: k_scales is given for a cache of %s with k_scale %g; expected fp8_e4m3 whose blocks have no scales, "
            "with k_scale 1",
            where, cpa_dtype_name(kv->dtype), (double)kv->k_scale);
    return cpa_check_aligned(where, "k_scales", a->k_scales, sizeof *a->k_scales, err);
}

static cpa_status check_columns(const char *where, const cpa_index_plan *plan, cpa_index_logits_args *a,
                                cpa_error *err) {
    if (a->unit == 0) a->unit = 1;
    REQUIRE(err, a->unit >= 1 && a->unit <= CPA_INDEX_MOST_UNIT && (a->unit & (a->unit - 1)) == 0,
            "%s: unit is %d, expected a power of two up to %d", where, a->unit, CPA_INDEX_MOST_UNIT);
    const int64_t least = (plan->most_keys + a->unit - 1) / a->unit;
    REQUIRE(err, a->width >= least && a->width <= CPA_MOST_TOKENS / CPA_INDEX_MOST_UNIT,
            "%s: width is %lld, expected at least the %lld columns of the longest item, and at most 2^40", where,
            (long long)a->width, (long long)least);
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"logits", "row_stride", a->logits, &a->row_stride, plan->rows, a->width, 4, 0}, err);
}

static cpa_status check_index_logits(const cpa_index_plan *plan, cpa_index_logits_args *a, cpa_error *err) {
    const char *where = "index_logits";
    const cpa_kv_view *kv = &a->cache.kv;
    REQUIRE(err, plan->is_set, "%s: the plan has not been set", where);
    CPA_TRY(check_cache(where, &a->cache, err));
    CPA_TRY(cpa_nn_check_count(where, "heads", a->heads, 1, CPA_INDEX_MOST_HEADS, err));
    REQUIRE(err, a->hadamard == a->cache.hadamard,
            "%s: the queries have hadamard %d, but the cache %d; expected both or neither transformed", where,
            a->hadamard, a->cache.hadamard);
    REQUIRE(err, kv->block_size == plan->block_size, "%s: the cache has blocks of %d tokens, but the plan of %d", where,
            kv->block_size, plan->block_size);
    REQUIRE(err, plan->max_block < kv->num_blocks, "%s: the plan reads block %lld, but the cache has %lld blocks",
            where, (long long)plan->max_block, (long long)kv->num_blocks);
    CPA_TRY(cpa_nn_check_tensor(where,
                                (cpa_nn_tensor){"q", "q_row_stride", a->q, &a->q_row_stride, plan->rows,
                                                (int64_t)a->heads * kv->k_dim, cpa_dtype_bytes(kv->dtype), 0},
                                err));
    REQUIRE(err, a->weights || kv->dtype != CPA_FP8_E4M3 || plan->rows == 0,
            "%s: weights is NULL, expected those that index_q made of queries in codes", where);
    CPA_TRY(cpa_nn_check_tensor(
        where,
        (cpa_nn_tensor){"weights", "weight_row_stride", a->weights, &a->weight_row_stride, plan->rows, a->heads, 4, 1},
        err));
    CPA_TRY(check_key_scales(where, a, err));
    return check_columns(where, plan, a, err);
}

cpa_status cpa_index_logits(const cpa_index_plan *plan, const cpa_index_logits_args *given, cpa_stream *stream) {
    cpa_index_logits_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("index_logits", given, cpa_index_logits_args, width, &args, &stream->error));
    REQUIRE(&stream->error, plan, "index_logits: the plan is NULL");
    REQUIRE(&stream->error, plan->device == stream->device,
            "index_logits: the plan and the stream belong to different devices");
    CPA_TRY(check_index_logits(plan, &args, &stream->error));
    if (plan->items.n == 0 || args.width == 0) return CPA_OK;
    return stream->device->operators->index_logits(plan, &args, stream);
}
