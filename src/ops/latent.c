/* latent_gather and latent_expand: every argument is checked here and strides are filled in, then the table of the back
 * end runs. */
#include <cpattn/latent.h>

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_spans.h"

/* ---- latent_gather ---- */

static cpa_status check_latents(const cpa_kv_view *kv, cpa_error *err) {
    CPA_TRY(cpa_check_view("latent_gather: src", kv, err));
    REQUIRE(err, kv->v_in_k == 1 && kv->kv_heads == 1,
            "latent_gather: src has v_in_k %d and %d KV heads, expected a cache of latents, with 1 of each", kv->v_in_k,
            kv->kv_heads);
    return CPA_OK;
}

/* dst, whose stride is filled in. */
static cpa_status check_dst(cpa_latent_gather_args *args, cpa_error *err) {
    const cpa_kv_view *kv = &args->src;
    const int64_t width = args->raw ? cpa_kv_row_bytes(kv->dtype, CPA_KEYS, kv->k_dim) : kv->k_dim;
    REQUIRE(err, args->raw == 0 || args->raw == 1, "latent_gather: raw is %d, expected 0 or 1", args->raw);
    REQUIRE(err, !args->raw || !cpa_kv_scale_bytes(kv->dtype, CPA_KEYS, cpa_kv_tensor_scale(kv, CPA_KEYS)),
            "latent_gather: raw is 1 for a cache of %s whose scales lie behind its rows", cpa_dtype_name(kv->dtype));
    if (!args->raw) CPA_TRY(cpa_check_dtype("latent_gather", "dst_dtype", args->dst_dtype, err));
    const int64_t bytes = args->raw ? 1 : cpa_dtype_bytes(args->dst_dtype);
    REQUIRE(err, args->dst_rows >= 0 && (args->dst || args->dst_rows == 0), "latent_gather: dst is %s with %lld rows",
            args->dst ? "set" : "NULL", (long long)args->dst_rows);
    CPA_TRY(cpa_check_aligned("latent_gather", "dst", args->dst, bytes, err));
    CPA_TRY(cpa_check_rows("latent_gather", "dst_row_stride", args->dst_rows, args->dst_row_stride, width, bytes, err));
    if (!args->dst_row_stride) args->dst_row_stride = width;
    return CPA_OK;
}

static cpa_status check_gather(cpa_latent_gather_args *args, cpa_error *err) {
    CPA_TRY(check_latents(&args->src, err));
    CPA_TRY(check_dst(args, err));
    const cpa_checked_spans spans = {&args->src,  args->block_tables, args->n_table_entries,
                                     args->spans, args->n_spans,      args->dst_rows};
    return cpa_check_spans("latent_gather", &spans, err);
}

cpa_status cpa_latent_gather(const cpa_latent_gather_args *given, cpa_stream *stream) {
    cpa_latent_gather_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("latent_gather", given, cpa_latent_gather_args, raw, &args, &stream->error));
    CPA_TRY(check_gather(&args, &stream->error));
    return stream->device->operators->latent_gather(&args, stream);
}

/* ---- latent_expand ---- */

/* A tensor of the call's tokens; *stride is filled in. */
static cpa_status check_rows(const cpa_latent_expand_args *args, const char *name, const void *rows,
                             const char *stride_name, int64_t *stride, int64_t width, cpa_error *err) {
    const int64_t bytes = cpa_dtype_bytes(args->dtype);
    REQUIRE(err, rows || args->tokens == 0, "latent_expand: %s is NULL", name);
    CPA_TRY(cpa_check_aligned("latent_expand", name, rows, bytes, err));
    CPA_TRY(cpa_check_rows("latent_expand", stride_name, args->tokens, *stride, width, bytes, err));
    if (!*stride) *stride = width;
    return CPA_OK;
}

static cpa_status check_expand(cpa_latent_expand_args *a, cpa_error *err) {
    enum { MOST_LATENT = 1 << 16 };
    const char *where = "latent_expand";
    REQUIRE(err, a->tokens >= 0 && a->tokens <= CPA_MOST_TOKENS, "%s: tokens is %lld, expected 0 to 2^44", where,
            (long long)a->tokens);
    CPA_TRY(cpa_check_dtype(where, "dtype", a->dtype, err));
    CPA_TRY(cpa_check_heads(where, a->heads, 1, err));
    REQUIRE(err, a->latent_dim >= 1 && a->latent_dim <= MOST_LATENT && a->rope_dim >= 0 && a->rope_dim <= MOST_LATENT,
            "%s: latent_dim is %d and rope_dim is %d, expected 1..%d and 0..%d", where, a->latent_dim, a->rope_dim,
            (int)MOST_LATENT, (int)MOST_LATENT);
    CPA_TRY(cpa_check_dim(where, "nope_dim", a->nope_dim, err));
    CPA_TRY(cpa_check_dim(where, "v_dim", a->v_dim, err));
    CPA_TRY(check_rows(a, "latents", a->latents, "latent_row_stride", &a->latent_row_stride,
                       (int64_t)a->latent_dim + a->rope_dim, err));
    REQUIRE(err, a->w_kv_b || a->tokens == 0, "%s: w_kv_b is NULL", where);
    CPA_TRY(cpa_check_aligned(where, "w_kv_b", a->w_kv_b, cpa_dtype_bytes(a->dtype), err));
    CPA_TRY(check_rows(a, "k", a->k, "k_row_stride", &a->k_row_stride, (int64_t)a->heads * (a->nope_dim + a->rope_dim),
                       err));
    return check_rows(a, "v", a->v, "v_row_stride", &a->v_row_stride, (int64_t)a->heads * a->v_dim, err);
}

cpa_status cpa_latent_expand(const cpa_latent_expand_args *given, cpa_stream *stream) {
    cpa_latent_expand_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("latent_expand", given, cpa_latent_expand_args, v_row_stride, &args, &stream->error));
    CPA_TRY(check_expand(&args, &stream->error));
    return args.tokens ? stream->device->operators->latent_expand(&args, stream) : CPA_OK;
}
