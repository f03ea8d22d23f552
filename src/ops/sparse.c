/* sparse_attend: every argument is checked here and what is 0 by default is filled in, then the table of the back end
 * runs. */
#include <cpattn/sparse.h>

#include <math.h>

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

static const char *const WHERE = "sparse_attend";
enum { MOST_KEYS = 1 << 30 }; /* of a row and scope */

/* The lists of a scope; its view has been checked. */
static cpa_status check_lists(const cpa_sparse_scope *scope, int32_t i, cpa_error *err) {
    const cpa_kv_view *kv = &scope->kv;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*scope), "%s: the reserved bytes of scopes[%d] are not zero", WHERE, i);
    REQUIRE(err, scope->width >= 0 && (scope->slots || scope->width == 0),
            "%s: scopes[%d] has lists of %d slots at %p, expected 0 or more, and not NULL", WHERE, i, scope->width,
            (const void *)scope->slots);
    const int32_t unit = scope->unit;
    REQUIRE(err, unit >= 0 && (unit & (unit - 1)) == 0 && (unit <= kv->block_size || kv->block_size == 1),
            "%s: scopes[%d].unit is %d, expected 0 or a power of two up to the block of %d tokens", WHERE, i, unit,
            kv->block_size);
    REQUIRE(err, (int64_t)scope->width * (unit ? unit : 1) <= MOST_KEYS,
            "%s: scopes[%d] has %d entries of %d tokens, expected at most 2^30 tokens", WHERE, i, scope->width, unit);
    REQUIRE(err,
            scope->row_stride >= 0 && scope->row_stride <= CPA_MOST_BYTES / 4 && scope->head_stride >= 0 &&
                scope->head_stride <= CPA_MOST_BYTES / 4,
            "%s: scopes[%d] has row_stride %lld and head_stride %lld, expected 0 to 2^58", WHERE, i,
            (long long)scope->row_stride, (long long)scope->head_stride);
    CPA_TRY(cpa_check_aligned(WHERE, "slots", scope->slots, sizeof *scope->slots, err));
    return cpa_check_aligned(WHERE, "counts", scope->counts, sizeof *scope->counts, err);
}

/* Views and lists; scopes are one attention. */
static cpa_status check_scopes(const cpa_sparse_attend_args *args, cpa_error *err) {
    REQUIRE(err, args->n_scopes >= 1 && args->n_scopes <= CPA_SPARSE_MOST_SCOPES && args->scopes,
            "%s: n_scopes is %d and scopes is %s, expected 1 to %d", WHERE, args->n_scopes,
            args->scopes ? "set" : "NULL", (int)CPA_SPARSE_MOST_SCOPES);
    CPA_TRY(cpa_check_aligned(WHERE, "scopes", args->scopes, _Alignof(cpa_sparse_scope), err));
    for (int32_t i = 0; i < args->n_scopes; i++) {
        const cpa_kv_view *kv = &args->scopes[i].kv, *first = &args->scopes[0].kv;
        CPA_TRY(cpa_check_view(WHERE, kv, err));
        CPA_TRY(check_lists(&args->scopes[i], i, err));
        REQUIRE(err,
                kv->kv_heads == first->kv_heads && kv->k_dim == first->k_dim && kv->v_dim == first->v_dim &&
                    kv->v_in_k == first->v_in_k,
                "%s: scopes[%d] has %d KV heads of %d and %d columns with v_in_k %d, but scopes[0] has %d of %d and %d "
                "with %d",
                WHERE, i, kv->kv_heads, kv->k_dim, kv->v_dim, kv->v_in_k, first->kv_heads, first->k_dim, first->v_dim,
                first->v_in_k);
    }
    return CPA_OK;
}

static cpa_status check_tensors(const cpa_sparse_attend_args *args, cpa_error *err) {
    const cpa_kv_view *kv = &args->scopes[0].kv;
    const int64_t bytes = cpa_dtype_bytes(args->q_dtype);
    REQUIRE(err, args->q, "%s: q is NULL", WHERE);
    CPA_TRY(cpa_check_aligned(WHERE, "q", args->q, bytes, err));
    CPA_TRY(cpa_check_aligned(WHERE, "out", args->out, bytes, err));
    CPA_TRY(cpa_check_aligned(WHERE, "sink_logits", args->sink_logits, sizeof *args->sink_logits, err));
    CPA_TRY(cpa_check_aligned(WHERE, "max_logits", args->max_logits, sizeof *args->max_logits, err));
    CPA_TRY(cpa_check_rows(WHERE, "q_row_stride", args->rows, args->q_row_stride, (int64_t)args->q_heads * kv->k_dim,
                           bytes, err));
    CPA_TRY(cpa_check_rows(WHERE, "out_row_stride", args->rows, args->out_row_stride,
                           (int64_t)args->q_heads * kv->v_dim, bytes, err));
    CPA_TRY(cpa_check_state(WHERE, &args->state, args->rows, args->q_heads, kv->v_dim, 0, err));
    REQUIRE(err, (args->out && !args->resume) || (args->state.o && args->state.lse),
            "%s: state.%s is NULL; expected a state unless out is set and resume is 0", WHERE,
            args->state.o ? "lse" : "o");
    REQUIRE(err, !args->sink_logits || args->out, "%s: sink_logits is set and out is NULL, in which alone they count",
            WHERE);
    return CPA_OK;
}

static cpa_status check(const cpa_sparse_attend_args *args, cpa_error *err) {
    REQUIRE(err, args->rows >= 0 && args->rows <= CPA_MOST_TOKENS, "%s: rows is %lld, expected 0 to 2^44", WHERE,
            (long long)args->rows);
    CPA_TRY(cpa_check_dtype(WHERE, "q_dtype", args->q_dtype, err));
    CPA_TRY(check_scopes(args, err));
    const cpa_kv_view *kv = &args->scopes[0].kv;
    CPA_TRY(cpa_check_heads(WHERE, args->q_heads, kv->kv_heads, err));
    REQUIRE(err, args->scale - args->scale == 0, "%s: scale is %g, expected a finite number", WHERE,
            (double)args->scale);
    REQUIRE(err, args->scale != 0 || !kv->v_in_k,
            "%s: scale is 0 over latents, expected that of the model: %d columns are no head's", WHERE, kv->k_dim);
    REQUIRE(err, args->resume == 0 || args->resume == 1, "%s: resume is %d, expected 0 or 1", WHERE, args->resume);
    return args->rows ? check_tensors(args, err) : CPA_OK;
}

/* What is 0 by default; the scopes become those at `scopes`. */
static void resolve(cpa_sparse_attend_args *args, cpa_sparse_scope scopes[CPA_SPARSE_MOST_SCOPES]) {
    for (int32_t i = 0; i < args->n_scopes; i++) {
        scopes[i] = args->scopes[i];
        scopes[i].kv = cpa_kv_view_resolve(scopes[i].kv);
        if (scopes[i].unit == 0) scopes[i].unit = 1;
    }
    args->scopes = scopes;
    const cpa_kv_view *kv = &scopes[0].kv;
    if (args->scale == 0) args->scale = (float)(1 / sqrt(kv->k_dim));
    if (!args->q_row_stride) args->q_row_stride = (int64_t)args->q_heads * kv->k_dim;
    if (!args->out_row_stride) args->out_row_stride = (int64_t)args->q_heads * kv->v_dim;
    if (!args->state.o_row_stride) args->state.o_row_stride = (int64_t)args->q_heads * kv->v_dim;
    if (!args->state.lse_row_stride) args->state.lse_row_stride = args->q_heads;
}

cpa_status cpa_sparse_attend(const cpa_sparse_attend_args *given, cpa_stream *stream) {
    cpa_sparse_attend_args args;
    cpa_sparse_scope scopes[CPA_SPARSE_MOST_SCOPES];
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE(WHERE, given, cpa_sparse_attend_args, state, &args, &stream->error));
    CPA_TRY(check(&args, &stream->error));
    resolve(&args, scopes);
    return args.rows ? stream->device->operators->sparse_attend(&args, stream) : CPA_OK;
}
