/* The operators of XAttention: every argument is checked here and strides are filled in, then the table of the back end
 * runs. */
#include <cpattn/xattn.h>

#include <math.h>

#include <cpattn/selection.h>

#include "base/struct_size.h"
#include "kernels/nn.h"
#include "kernels/xattn.h"
#include "src/ops/nn_check.h"

static cpa_status check_shape(const char *where, cpa_xattn_shape *shape, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*shape), "%s: the reserved bytes of the shape are not zero", where);
    if (shape->block == 0) shape->block = CPA_XATTN_MOST_BLOCK;
    REQUIRE(err, shape->block >= 1 && shape->block <= CPA_XATTN_MOST_BLOCK, "%s: block is %d, expected 1 to %d", where,
            shape->block, CPA_XATTN_MOST_BLOCK);
    const int32_t least = (shape->block + CPA_XATTN_MOST_GROUPS - 1) / CPA_XATTN_MOST_GROUPS;
    REQUIRE(err, shape->stride >= least && shape->stride <= CPA_XATTN_MOST_STRIDE && shape->block % shape->stride == 0,
            "%s: stride is %d, expected a divisor of the block, %d, from %d to %d", where, shape->stride, shape->block,
            least, CPA_XATTN_MOST_STRIDE);
    CPA_TRY(cpa_check_heads(where, shape->q_heads, shape->kv_heads, err));
    REQUIRE(err, shape->dim >= 8 && shape->dim <= CPA_XATTN_MOST_DIM && shape->dim % 8 == 0,
            "%s: dim is %d, expected a multiple of 8 up to %d", where, shape->dim, CPA_XATTN_MOST_DIM);
    CPA_TRY(cpa_check_dtype(where, "dtype", shape->dtype, err));
    CPA_TRY(cpa_nn_check_flag(where, "causal", shape->causal, err));
    if (shape->scale == 0) shape->scale = (float)(1 / (sqrt((double)shape->dim) * shape->stride));
    REQUIRE(err, shape->scale > 0 && isfinite(shape->scale), "%s: scale is %g, expected a positive number", where,
            (double)shape->scale);
    return CPA_OK;
}

/* A range of a set, which begins with a block of the mask. */
static cpa_status check_range(const char *where, const char *name, const cpa_xattn_shape *shape, cpa_owner_map map,
                              cpa_token_set set, int64_t first, cpa_error *err) {
    const int one = set.kind == CPA_TOKENS_SHARD || set.kind == CPA_TOKENS_OTHERS;
    CPA_TRY(cpa_check_map(where, map, err));
    REQUIRE(err, one || set.kind == CPA_TOKENS_ALL, "%s: the kind of %s_set is %d, expected tokens, %d to %d", where,
            name, (int)set.kind, CPA_TOKENS_SHARD, CPA_TOKENS_ALL);
    REQUIRE(err, set.shard >= 0 && set.shard < map.cp_size, "%s: the shard of %s_set is %d, expected 0 to %d", where,
            name, set.shard, map.cp_size - 1);
    REQUIRE(err, !one || map.cp_size == 1 || map.interleave % shape->block == 0,
            "%s: the interleave is %d, expected a multiple of the block, %d, whose tokens are on one rank then", where,
            map.interleave, shape->block);
    REQUIRE(err, first >= 0 && first <= CPA_MOST_TOKENS && first % shape->block == 0,
            "%s: %s_first is %lld, expected a multiple of the block, %d", where, name, (long long)first, shape->block);
    return CPA_OK;
}

static cpa_status check_packed(const char *where, const char *name, const void *memory, const cpa_xattn_shape *shape,
                               int32_t heads, int64_t tokens, int64_t *stride, cpa_error *err) {
    const int64_t width = cpa_xattn_groups(shape, tokens) * cpa_xattn_width(shape),
                  element = cpa_dtype_bytes(shape->dtype);
    const cpa_nn_tensor tensor = {
        name, stride ? "the stride of heads" : NULL, memory, stride, tokens ? heads : 0, width, element, 0};
    return cpa_nn_check_tensor(where, tensor, err);
}

/* An array of a number for each group, or each so many of a block row, of all query heads. */
static cpa_status check_numbers(const char *where, const char *name, const void *memory, int64_t rows, int64_t width,
                                int64_t *stride, int optional, cpa_error *err) {
    const cpa_nn_tensor tensor = {name, stride ? "row_stride" : NULL, memory, stride, rows, width, 4, optional};
    return cpa_nn_check_tensor(where, tensor, err);
}

static cpa_status check_chunks(const char *where, cpa_xattn_shape *shape, cpa_xattn_chunks *c, cpa_error *err) {
    CPA_TRY(check_shape(where, shape, err));
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*c), "%s: the reserved bytes of the chunks are not zero", where);
    CPA_TRY(check_range(where, "q", shape, c->map, c->q_set, c->q_first, err));
    CPA_TRY(check_range(where, "k", shape, c->map, c->k_set, c->k_first, err));
    CPA_TRY(cpa_nn_check_count(where, "q_tokens", c->q_tokens, 0, CPA_XATTN_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "k_tokens", c->k_tokens, 0, CPA_XATTN_MOST_TOKENS, err));
    CPA_TRY(check_packed(where, "q", c->q, shape, shape->q_heads, c->q_tokens, NULL, err));
    return check_packed(where, "k", c->k, shape, shape->kv_heads, c->k_tokens, &c->k_stride, err);
}

/* ---- groups ---- */

static cpa_status check_pack_q(cpa_xattn_pack_q_args *a, cpa_error *err) {
    const char *where = "xattn_pack_q";
    CPA_TRY(check_shape(where, &a->shape, err));
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_XATTN_MOST_TOKENS, err));
    const cpa_checked_heads q = {"q_row_stride",   "q_head_stride",  a->tokens,
                                 a->q_row_stride,  a->q_head_stride, cpa_dtype_bytes(a->shape.dtype),
                                 a->shape.q_heads, a->shape.dim};
    REQUIRE(err, a->q || a->tokens == 0, "%s: q is NULL", where);
    CPA_TRY(cpa_check_aligned(where, "q", a->q, q.bytes, err));
    CPA_TRY(cpa_check_heads_of_rows(where, &q, err));
    if (a->q_row_stride == 0) a->q_row_stride = (int64_t)a->shape.q_heads * a->shape.dim;
    if (a->q_head_stride == 0) a->q_head_stride = a->shape.dim;
    return check_packed(where, "out", a->out, &a->shape, a->shape.q_heads, a->tokens, NULL, err);
}

cpa_status cpa_xattn_pack_q(const cpa_xattn_pack_q_args *given, cpa_stream *stream) {
    cpa_xattn_pack_q_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_pack_q", given, cpa_xattn_pack_q_args, out, &args, &stream->error));
    CPA_TRY(check_pack_q(&args, &stream->error));
    return args.tokens ? stream->device->nn->xattn_pack_q(&args, stream) : CPA_OK;
}

static cpa_status check_pack_k(cpa_xattn_pack_k_args *a, cpa_error *err) {
    const char *where = "xattn_pack_k";
    const cpa_kv_view *kv = &a->kv;
    CPA_TRY(check_shape(where, &a->shape, err));
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_XATTN_MOST_TOKENS, err));
    REQUIRE(err, kv->k || kv->num_blocks == 0, "%s: the cache of keys is NULL", where);
    CPA_TRY(cpa_check_view(where, kv, err));
    REQUIRE(err, kv->kv_heads == a->shape.kv_heads && kv->k_dim == a->shape.dim,
            "%s: the cache has %d KV heads of %d columns, but the shape %d of %d", where, kv->kv_heads, kv->k_dim,
            a->shape.kv_heads, a->shape.dim);
    REQUIRE(err, cpa_xattn_reads(kv->dtype), "%s: the cache is %s, expected elements, codes of one scale a row, or tq_",
            where, cpa_dtype_name(kv->dtype));
    REQUIRE(err, a->table || a->tokens == 0, "%s: table is NULL", where);
    CPA_TRY(cpa_check_aligned(where, "table", a->table, sizeof *a->table, err));
    return check_packed(where, "out", a->out, &a->shape, a->shape.kv_heads, a->tokens, &a->out_stride, err);
}

cpa_status cpa_xattn_pack_k(const cpa_xattn_pack_k_args *given, cpa_stream *stream) {
    cpa_xattn_pack_k_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_pack_k", given, cpa_xattn_pack_k_args, out, &args, &stream->error));
    CPA_TRY(check_pack_k(&args, &stream->error));
    return args.tokens ? stream->device->nn->xattn_pack_k(&args, stream) : CPA_OK;
}

/* ---- statistics, sums and scores ---- */

static cpa_status check_stats(cpa_xattn_stats_args *a, cpa_error *err) {
    const char *where = "xattn_stats";
    CPA_TRY(check_chunks(where, &a->shape, &a->chunks, err));
    const int64_t groups = a->shape.q_heads * cpa_xattn_groups(&a->shape, a->chunks.q_tokens);
    CPA_TRY(check_numbers(where, "max", a->max, groups, 1, NULL, 0, err));
    CPA_TRY(check_numbers(where, "sum", a->sum, groups, 1, NULL, 0, err));
    return cpa_nn_check_flag(where, "resume", a->resume, err);
}

cpa_status cpa_xattn_stats(const cpa_xattn_stats_args *given, cpa_stream *stream) {
    cpa_xattn_stats_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_stats", given, cpa_xattn_stats_args, sum, &args, &stream->error));
    CPA_TRY(check_stats(&args, &stream->error));
    return args.chunks.q_tokens ? stream->device->nn->xattn_stats(&args, stream) : CPA_OK;
}

static cpa_status check_merge(cpa_xattn_merge_stats_args *a, cpa_error *err) {
    const char *where = "xattn_merge_stats";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "n", a->n, 1, CPA_MOST_RANKS, err));
    const cpa_nn_tensor parts[] = {
        {"part_max", "part_stride", a->part_max, &a->part_stride, a->rows ? a->n : 0, a->rows, 4, 0},
        {"part_sum", "part_stride", a->part_sum, &a->part_stride, a->rows ? a->n : 0, a->rows, 4, 0}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) CPA_TRY(cpa_nn_check_tensor(where, parts[i], err));
    CPA_TRY(check_numbers(where, "max", a->max, a->rows, 1, NULL, 0, err));
    return check_numbers(where, "sum", a->sum, a->rows, 1, NULL, 0, err);
}

cpa_status cpa_xattn_merge_stats(const cpa_xattn_merge_stats_args *given, cpa_stream *stream) {
    cpa_xattn_merge_stats_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_merge_stats", given, cpa_xattn_merge_stats_args, sum, &args, &stream->error));
    CPA_TRY(check_merge(&args, &stream->error));
    return args.rows ? stream->device->nn->xattn_merge_stats(&args, stream) : CPA_OK;
}

static cpa_status check_block_sums(cpa_xattn_block_sums_args *a, cpa_error *err) {
    const char *where = "xattn_block_sums";
    CPA_TRY(check_chunks(where, &a->shape, &a->chunks, err));
    const int64_t groups = a->shape.q_heads * cpa_xattn_groups(&a->shape, a->chunks.q_tokens);
    const int64_t rows = a->shape.q_heads * cpa_xattn_blocks(&a->shape, a->chunks.q_tokens);
    CPA_TRY(check_numbers(where, "max", a->max, groups, 1, NULL, 0, err));
    CPA_TRY(check_numbers(where, "sum", a->sum, groups, 1, NULL, 0, err));
    return check_numbers(where, "sums", a->sums, rows, cpa_xattn_blocks(&a->shape, a->chunks.k_tokens), &a->row_stride,
                         0, err);
}

cpa_status cpa_xattn_block_sums(const cpa_xattn_block_sums_args *given, cpa_stream *stream) {
    cpa_xattn_block_sums_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_block_sums", given, cpa_xattn_block_sums_args, sums, &args, &stream->error));
    CPA_TRY(check_block_sums(&args, &stream->error));
    if (args.chunks.q_tokens == 0 || args.chunks.k_tokens == 0) return CPA_OK;
    return stream->device->nn->xattn_block_sums(&args, stream);
}

cpa_status cpa_xattn_scores(const cpa_xattn_scores_args *given, cpa_stream *stream) {
    const char *where = "xattn_scores";
    cpa_xattn_scores_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE(where, given, cpa_xattn_scores_args, scores, &args, &stream->error));
    CPA_TRY(check_chunks(where, &args.shape, &args.chunks, &stream->error));
    const int64_t rows = args.shape.q_heads * cpa_xattn_groups(&args.shape, args.chunks.q_tokens);
    CPA_TRY(check_numbers(where, "scores", args.scores, rows, cpa_xattn_groups(&args.shape, args.chunks.k_tokens), NULL,
                          0, &stream->error));
    if (args.chunks.q_tokens == 0 || args.chunks.k_tokens == 0) return CPA_OK;
    return stream->device->nn->xattn_scores(&args, stream);
}

/* ---- selection ---- */

static cpa_status check_tau(const char *where, const cpa_xattn_select_args *a, cpa_error *err) {
    CPA_TRY(cpa_check_aligned(where, "taus", a->taus, sizeof *a->taus, err));
    REQUIRE(err, a->taus || (a->tau > 0 && a->tau <= 1), "%s: tau is %g, expected above 0 and at most 1", where,
            (double)a->tau);
    REQUIRE(err, a->recent >= 0 && (a->shape.causal || a->recent == 0),
            "%s: recent is %d where causal is %d, expected 0 or more blocks, and 0 where queries see all keys", where,
            a->recent, a->shape.causal);
    return CPA_OK;
}

static cpa_status check_select(cpa_xattn_select_args *a, cpa_error *err) {
    const char *where = "xattn_select";
    CPA_TRY(check_shape(where, &a->shape, err));
    CPA_TRY(check_range(where, "q", &a->shape, a->map, a->q_set, a->q_first, err));
    CPA_TRY(cpa_nn_check_count(where, "q_blocks", a->q_blocks, 0, CPA_XATTN_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "k_blocks", a->k_blocks, 1, CPA_XATTN_MOST_BLOCKS, err));
    REQUIRE(err, a->map.cp_size == 1 || a->shard_stride == 0 || a->map.interleave % a->shape.block == 0,
            "%s: the interleave is %d, expected a multiple of the block, %d", where, a->map.interleave, a->shape.block);
    REQUIRE(err, a->first_rank >= 0 && a->first_rank < a->map.cp_size, "%s: first_rank is %d, expected 0 to %d", where,
            a->first_rank, a->map.cp_size - 1);
    CPA_TRY(check_tau(where, a, err));
    const int64_t rows = a->shape.q_heads * a->q_blocks, words = cpa_mask_words(a->k_blocks);
    const int64_t least = a->shard_stride ? 1 : a->k_blocks;
    CPA_TRY(check_numbers(where, "sums", a->sums, rows, least, a->row_stride ? &a->row_stride : NULL, 0, err));
    if (a->row_stride == 0) a->row_stride = a->k_blocks;
    CPA_TRY(cpa_check_rows(where, "shard_stride", a->map.cp_size, a->shard_stride, 0, 4, err));
    const cpa_nn_tensor bits = {"bits", "words", a->bits, &a->words, rows, words, 4, 0};
    CPA_TRY(cpa_nn_check_tensor(where, bits, err));
    CPA_TRY(cpa_check_rows(where, "bits_stride", rows ? a->shape.q_heads : 0, a->bits_stride, a->q_blocks * a->words, 4,
                           err));
    if (a->bits_stride == 0) a->bits_stride = a->q_blocks * a->words;
    CPA_TRY(check_numbers(where, "counts", a->counts, rows, 1, NULL, 1, err));
    return check_numbers(where, "kept", a->kept, rows, 1, NULL, 1, err);
}

cpa_status cpa_xattn_select(const cpa_xattn_select_args *given, cpa_stream *stream) {
    cpa_xattn_select_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("xattn_select", given, cpa_xattn_select_args, bits, &args, &stream->error));
    CPA_TRY(check_select(&args, &stream->error));
    return args.q_blocks ? stream->device->nn->xattn_select(&args, stream) : CPA_OK;
}
