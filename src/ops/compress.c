/* Operators of compressed entries: every argument is checked here and strides are filled in, then the table of the back
 * end runs. */
#include <cpattn/compress.h>

#include <math.h>

#include "base/struct_size.h"
#include "kernels/kv_view.h"
#include "kernels/nn.h"
#include "src/ops/nn_check.h"
#include "src/ops/nn_rope.h"

enum { ACCESS = 16 }; /* bytes that rows are read and written at once */

/* Rows that begin at multiples of 16 bytes; *stride is filled in. `stride_name` NULL: they are contiguous. */
static cpa_status check_rows(const char *where, cpa_nn_tensor t, cpa_error *err) {
    CPA_TRY(cpa_nn_check_tensor(where, t, err));
    const int64_t stride = (t.stride ? *t.stride : t.width) * t.element_bytes;
    REQUIRE(err, (uintptr_t)t.memory % ACCESS == 0 && (t.rows <= 1 || stride % ACCESS == 0),
            "%s: %s at %p has rows %lld bytes apart, expected multiples of %d", where, t.name, t.memory,
            (long long)stride, ACCESS);
    return CPA_OK;
}

/* Pairs of neighbours within a head of `dim`, by one position a row. */
static cpa_status check_rotation(const char *where, const cpa_rope *rope, int32_t dim, const int64_t *positions,
                                 int64_t rows, cpa_error *err) {
    REQUIRE(err, rope->table, "%s: rope.table is NULL", where);
    CPA_TRY(cpa_nn_check_rope(where, rope, "the head", dim, err));
    REQUIRE(err, rope->interleaved == 1 && rope->first % 2 == 0 && rope->inverse == 0,
            "%s: rope has interleaved %d, first %d and inverse %d, expected 1, an even number and 0", where,
            rope->interleaved, rope->first, rope->inverse);
    REQUIRE(err, !rope->sections[0] && !rope->sections[1] && !rope->sections[2],
            "%s: rope.sections are %d, %d and %d, expected none", where, rope->sections[0], rope->sections[1],
            rope->sections[2]);
    return cpa_nn_check_positions(where, rope, positions, rows, err);
}

static cpa_status check_each(const char *where, const char *name, const void *memory, int64_t tokens, int64_t bytes,
                             cpa_error *err) {
    return cpa_nn_check_tensor(where, (cpa_nn_tensor){name, NULL, memory, NULL, 1, tokens, bytes, 0}, err);
}

/* The cache of entries of `dim`. */
static cpa_status check_cache(const char *where, const cpa_kv_view *kv, int32_t dim, cpa_error *err) {
    CPA_TRY(cpa_check_view(where, kv, err));
    REQUIRE(err, kv->v_in_k == 1 && kv->kv_heads == 1 && kv->k_dim == dim && kv->v_dim == dim,
            "%s: the cache has v_in_k %d, %d KV heads, k_dim %d and v_dim %d, expected 1, 1 and twice %d", where,
            kv->v_in_k, kv->kv_heads, kv->k_dim, kv->v_dim, dim);
    REQUIRE(err, kv->dtype == CPA_FP8_T64 || kv->dtype == CPA_BF16 || kv->dtype == CPA_FP8_E4M3,
            "%s: the cache is of %s, expected fp8_t64, bf16 or fp8_e4m3", where, cpa_dtype_name(kv->dtype));
    REQUIRE(err, !kv->k_scales, "%s: the cache has k_scales, expected one k_scale, or none", where);
    const cpa_kv_view full = cpa_kv_view_resolve(*kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&full, CPA_KEYS);
    REQUIRE(err, ((uintptr_t)pool.memory | (uintptr_t)pool.block_stride | (uintptr_t)pool.token_stride) % ACCESS == 0,
            "%s: the cache at %p has rows %lld and blocks %lld bytes apart, expected multiples of %d", where,
            (const void *)pool.memory, (long long)pool.token_stride, (long long)pool.block_stride, ACCESS);
    return CPA_OK;
}

/* ---- inverse_rope_quant ---- */

static cpa_status check_inverse(cpa_inverse_rope_quant_args *a, cpa_error *err) {
    const char *where = "inverse_rope_quant";
    CPA_TRY(cpa_nn_check_count(where, "rows", a->rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "heads", a->heads, 1, CPA_MOST_HEADS, err));
    REQUIRE(err, a->groups >= 1 && a->heads % a->groups == 0, "%s: groups is %d, expected a divisor of the %d heads",
            where, a->groups, a->heads);
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    CPA_TRY(cpa_nn_check_flag(where, "packed", a->packed, err));
    const int64_t width = (int64_t)a->heads * CPA_ENTRY_DIM;
    CPA_TRY(check_rows(
        where, (cpa_nn_tensor){"o", "o_stride", a->o, &a->o_stride, a->rows, width, cpa_dtype_bytes(a->dtype), 0},
        err));
    CPA_TRY(check_rotation(where, &a->rope, CPA_ENTRY_DIM, a->positions, a->rows, err));
    CPA_TRY(check_rows(where, (cpa_nn_tensor){"codes", NULL, a->codes, NULL, a->rows, width, 1, 0}, err));
    return cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"scales", NULL, a->scales, NULL, (a->rows + 3) / 4 * 4, 4 * (int64_t)a->heads, 4, 0},
        err);
}

cpa_status cpa_inverse_rope_quant(const cpa_inverse_rope_quant_args *given, cpa_stream *stream) {
    cpa_inverse_rope_quant_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("inverse_rope_quant", given, cpa_inverse_rope_quant_args, packed, &args, &stream->error));
    CPA_TRY(check_inverse(&args, &stream->error));
    return args.rows ? stream->device->nn->inverse_rope_quant(&args, stream) : CPA_OK;
}

/* ---- the state of a compressor ---- */

static cpa_status check_state(const char *where, const cpa_compress_state *s, cpa_error *err) {
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*s), "%s: the reserved bytes of state are not zero", where);
    REQUIRE(err, s->head == 128 || s->head == 256 || s->head == 512, "%s: state.head is %d, expected 128, 256 or 512",
            where, s->head);
    CPA_TRY(cpa_nn_check_count(where, "state.ratio", s->ratio, 1, CPA_COMPRESS_MOST_RATIO, err));
    CPA_TRY(cpa_nn_check_flag(where, "state.overlap", s->overlap, err));
    CPA_TRY(cpa_nn_check_count(where, "state.block_size", s->block_size, 1, CPA_MOST_BLOCK_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "state.num_blocks", s->num_blocks, 0, INT32_MAX, err));
    const int64_t width = 2 * (int64_t)s->head * (1 + s->overlap);
    return check_rows(
        where, (cpa_nn_tensor){"state.rows", NULL, s->rows, NULL, s->num_blocks * s->block_size, width, 4, 0}, err);
}

static cpa_status check_state_write(cpa_compress_state_write_args *a, cpa_error *err) {
    const char *where = "compress_state_write";
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_state(where, &a->state, err));
    const int64_t width = (int64_t)a->state.head * (1 + a->state.overlap);
    CPA_TRY(check_rows(where, (cpa_nn_tensor){"kv", "kv_stride", a->kv, &a->kv_stride, a->tokens, width, 4, 0}, err));
    CPA_TRY(check_rows(
        where, (cpa_nn_tensor){"score", "score_stride", a->score, &a->score_stride, a->tokens, width, 4, 0}, err));
    CPA_TRY(check_rows(where, (cpa_nn_tensor){"ape", NULL, a->ape, NULL, a->state.ratio, width, 4, 0}, err));
    CPA_TRY(check_each(where, "positions", a->positions, a->tokens, sizeof *a->positions, err));
    return check_each(where, "slots", a->slots, a->tokens, sizeof *a->slots, err);
}

cpa_status cpa_compress_state_write(const cpa_compress_state_write_args *given, cpa_stream *stream) {
    cpa_compress_state_write_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(
        CPA_STRUCT_TAKE("compress_state_write", given, cpa_compress_state_write_args, slots, &args, &stream->error));
    CPA_TRY(check_state_write(&args, &stream->error));
    return args.tokens ? stream->device->nn->compress_state_write(&args, stream) : CPA_OK;
}

/* ---- compress_halo_pack ---- */

static cpa_status check_halo_pack(const cpa_compress_halo_pack_args *a, cpa_error *err) {
    const char *where = "compress_halo_pack";
    CPA_TRY(cpa_nn_check_count(where, "halos", a->halos, 0, INT32_MAX, err));
    CPA_TRY(check_state(where, &a->state, err));
    REQUIRE(err, a->state.overlap == 1, "%s: state.overlap is 0, expected 1: nothing travels without", where);
    const int64_t rows = a->halos * a->state.ratio;
    CPA_TRY(check_each(where, "slots", a->slots, rows, sizeof *a->slots, err));
    return check_rows(where, (cpa_nn_tensor){"out", NULL, a->out, NULL, rows, 2 * (int64_t)a->state.head, 4, 0}, err);
}

cpa_status cpa_compress_halo_pack(const cpa_compress_halo_pack_args *given, cpa_stream *stream) {
    cpa_compress_halo_pack_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("compress_halo_pack", given, cpa_compress_halo_pack_args, out, &args, &stream->error));
    CPA_TRY(check_halo_pack(&args, &stream->error));
    return args.halos ? stream->device->nn->compress_halo_pack(&args, stream) : CPA_OK;
}

/* ---- compress_write ---- */

static cpa_status check_halo(const char *where, const cpa_compress_write_args *a, cpa_error *err) {
    CPA_TRY(cpa_nn_check_count(where, "n_halos", a->n_halos, 0, INT32_MAX, err));
    REQUIRE(err, a->state.overlap || !a->halo_slots, "%s: halo_slots are given without overlap, where no halo is read",
            where);
    CPA_TRY(check_rows(
        where,
        (cpa_nn_tensor){"halo", NULL, a->halo, NULL, a->n_halos * a->state.ratio, 2 * (int64_t)a->state.head, 4, 0},
        err));
    return cpa_check_aligned(where, "halo_slots", a->halo_slots, sizeof *a->halo_slots, err);
}

/* Where entries of MXFP4 go. */
static cpa_status check_mxfp4(const char *where, const cpa_compress_write_args *a, cpa_error *err) {
    const int32_t of_scale = 32;
    REQUIRE(err, !a->kv.k, "%s: kv.k and mxfp4 are both set, expected one", where);
    CPA_TRY(cpa_nn_check_count(where, "mxfp4_rows", a->mxfp4_rows, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_check_aligned(where, "mxfp4", a->mxfp4, 4, err));
    return cpa_nn_check_tensor(
        where,
        (cpa_nn_tensor){"mxfp4_scales", NULL, a->mxfp4_scales, NULL, a->mxfp4_rows, a->state.head / of_scale, 1, 0},
        err);
}

static cpa_status check_compress(cpa_compress_write_args *a, cpa_error *err) {
    const char *where = "compress_write";
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(check_state(where, &a->state, err));
    CPA_TRY(check_rotation(where, &a->rope, a->state.head, a->positions, a->tokens, err));
    CPA_TRY(cpa_check_aligned(where, "indices", a->indices, sizeof *a->indices, err));
    CPA_TRY(check_each(where, "sequences", a->sequences, a->tokens, sizeof *a->sequences, err));
    CPA_TRY(cpa_nn_check_count(where, "n_sequences", a->n_sequences, 1, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_count(where, "table_stride", a->table_stride, 1, INT32_MAX, err));
    CPA_TRY(cpa_nn_check_tensor(
        where, (cpa_nn_tensor){"tables", NULL, a->tables, NULL, a->n_sequences, a->table_stride, 4, 0}, err));
    CPA_TRY(check_halo(where, a, err));
    CPA_TRY(check_rows(where, (cpa_nn_tensor){"weight", NULL, a->weight, NULL, 1, a->state.head, 4, 0}, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(check_each(where, "slots", a->slots, a->tokens, sizeof *a->slots, err));
    return a->mxfp4 ? check_mxfp4(where, a, err) : check_cache(where, &a->kv, a->state.head, err);
}

cpa_status cpa_compress_write(const cpa_compress_write_args *given, cpa_stream *stream) {
    cpa_compress_write_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("compress_write", given, cpa_compress_write_args, kv, &args, &stream->error));
    CPA_TRY(check_compress(&args, &stream->error));
    return args.tokens ? stream->device->nn->compress_write(&args, stream) : CPA_OK;
}

/* ---- q_norm_rope_kv_write ---- */

static cpa_status check_q(cpa_q_norm_rope_kv_write_args *a, cpa_error *err) {
    const char *where = "q_norm_rope_kv_write";
    CPA_TRY(cpa_nn_check_count(where, "tokens", a->tokens, 0, CPA_MOST_TOKENS, err));
    CPA_TRY(cpa_nn_check_count(where, "heads", a->heads, 1, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_nn_check_count(where, "out_heads", a->out_heads, a->heads, CPA_MOST_HEADS, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    const int64_t bytes = cpa_dtype_bytes(a->dtype), dim = CPA_ENTRY_DIM;
    CPA_TRY(check_rows(where, (cpa_nn_tensor){"q", "q_stride", a->q, &a->q_stride, a->tokens, a->heads * dim, bytes, 0},
                       err));
    CPA_TRY(check_rows(
        where, (cpa_nn_tensor){"kv_rows", "kv_stride", a->kv_rows, &a->kv_stride, a->tokens, dim, bytes, 0}, err));
    CPA_TRY(cpa_nn_check_finite(where, "eps", a->eps, 0, err));
    CPA_TRY(check_rotation(where, &a->rope, CPA_ENTRY_DIM, a->positions, a->tokens, err));
    CPA_TRY(check_rows(
        where,
        (cpa_nn_tensor){"q_out", "q_out_stride", a->q_out, &a->q_out_stride, a->tokens, a->out_heads * dim, bytes, 0},
        err));
    CPA_TRY(check_each(where, "slots", a->slots, a->tokens, sizeof *a->slots, err));
    CPA_TRY(check_cache(where, &a->kv, CPA_ENTRY_DIM, err));
    REQUIRE(err, a->kv.dtype != CPA_FP8_E4M3 || a->kv.k_scale > 0,
            "%s: the cache is of fp8_e4m3 without k_scale, expected one", where);
    REQUIRE(err, a->tokens == 0 || a->q_out != a->q, "%s: q_out is q, expected memory of its own", where);
    return CPA_OK;
}

cpa_status cpa_q_norm_rope_kv_write(const cpa_q_norm_rope_kv_write_args *given, cpa_stream *stream) {
    cpa_q_norm_rope_kv_write_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("q_norm_rope_kv_write", given, cpa_q_norm_rope_kv_write_args, kv, &args, &stream->error));
    CPA_TRY(check_q(&args, &stream->error));
    return args.tokens ? stream->device->nn->q_norm_rope_kv_write(&args, stream) : CPA_OK;
}
