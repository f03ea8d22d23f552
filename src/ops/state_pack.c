/* state_pack and state_merge_packed: every argument is checked here, then the table of the back end runs. */
#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

/* What both have. */
static cpa_status check_shape(const char *where, int64_t rows, int32_t heads, int32_t least_heads, int32_t v_dim,
                              cpa_dtype dtype, cpa_error *err) {
    REQUIRE(err, rows >= 0 && rows <= CPA_MOST_TOKENS, "%s: rows is %lld, expected 0 to 2^44", where, (long long)rows);
    REQUIRE(err, heads >= least_heads && heads <= CPA_MOST_HEADS, "%s: heads is %d, expected %d..%d", where, heads,
            least_heads, CPA_MOST_HEADS);
    CPA_TRY(cpa_check_dim(where, "v_dim", v_dim, err));
    CPA_TRY(cpa_check_dtype(where, "dtype", dtype, err));
    return cpa_check_rows(where, "rows of a slice", rows, 0, heads * cpa_packed_width(v_dim, dtype),
                          cpa_dtype_bytes(dtype), err);
}

static cpa_status check_pack(const cpa_state_pack_args *args, cpa_error *err) {
    const char *where = "state_pack";
    CPA_TRY(check_shape(where, args->rows, args->heads, 1, args->v_dim, args->dtype, err));
    REQUIRE(err, args->o_dtype == CPA_F32 || args->o_dtype == args->dtype,
            "state_pack: o_dtype is %d, expected that of the slices, %s, or fp32", (int)args->o_dtype,
            cpa_dtype_name(args->dtype));
    const int64_t o_bytes = cpa_dtype_bytes(args->o_dtype), bytes = cpa_dtype_bytes(args->dtype);
    REQUIRE(err, args->rows == 0 || (args->o && args->lse), "state_pack: %s is NULL", args->o ? "lse" : "o");
    CPA_TRY(cpa_check_aligned(where, "o", args->o, o_bytes, err));
    CPA_TRY(cpa_check_aligned(where, "lse", args->lse, sizeof(float), err));
    CPA_TRY(cpa_check_aligned(where, "row_map", args->row_map, sizeof(int32_t), err));
    CPA_TRY(cpa_check_rows(where, "o_row_stride", args->rows, args->o_row_stride, (int64_t)args->heads * args->v_dim,
                           o_bytes, err));
    CPA_TRY(cpa_check_rows(where, "lse_row_stride", args->rows, args->lse_row_stride, args->heads, sizeof(float), err));
    REQUIRE(err, args->n_slices >= 1 && args->n_slices <= CPA_MERGE_MAX_STATES,
            "state_pack: n_slices is %d, expected 1..%d", args->n_slices, CPA_MERGE_MAX_STATES);
    REQUIRE(err, args->slices, "state_pack: slices is NULL");
    CPA_TRY(cpa_check_aligned(where, "slices", args->slices, sizeof *args->slices, err));
    for (int32_t i = 0; i < args->n_slices; i++)
        CPA_TRY(cpa_check_aligned(where, "a slice", args->slices[i], bytes, err));
    return CPA_OK;
}

cpa_status cpa_state_pack(const cpa_state_pack_args *given, cpa_stream *stream) {
    cpa_state_pack_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("state_pack", given, cpa_state_pack_args, slices, &args, &stream->error));
    CPA_TRY(check_pack(&args, &stream->error));
    if (!args.o_row_stride) args.o_row_stride = (int64_t)args.heads * args.v_dim;
    if (!args.lse_row_stride) args.lse_row_stride = args.heads;
    return args.rows ? stream->device->operators->state_pack(&args, stream) : CPA_OK;
}

static cpa_status check_merge(const cpa_state_merge_packed_args *args, cpa_error *err) {
    const char *where = "state_merge_packed";
    CPA_TRY(check_shape(where, args->rows, args->heads, 0, args->v_dim, args->dtype, err));
    const int fp8 = args->out_dtype == CPA_FP8_E4M3;
    REQUIRE(err, fp8 || cpa_dtype_is_plain(args->out_dtype),
            "state_merge_packed: out_dtype is %d, expected fp32, bf16, fp16 or fp8_e4m3", (int)args->out_dtype);
    CPA_TRY(cpa_check_out_scale(where, args->out_dtype, args->out_scale, err));
    REQUIRE(err, args->n_parts >= 1 && args->n_parts <= CPA_MERGE_MAX_STATES,
            "state_merge_packed: n_parts is %d, expected 1..%d", args->n_parts, CPA_MERGE_MAX_STATES);
    REQUIRE(err, args->parts, "state_merge_packed: parts is NULL");
    CPA_TRY(cpa_check_aligned(where, "parts", args->parts, sizeof *args->parts, err));
    const int nothing = args->rows == 0 || args->heads == 0;
    for (int32_t i = 0; i < args->n_parts; i++) {
        REQUIRE(err, nothing || args->parts[i], "state_merge_packed: parts[%d] is NULL", i);
        CPA_TRY(cpa_check_aligned(where, "a part", args->parts[i], cpa_dtype_bytes(args->dtype), err));
    }
    REQUIRE(err, nothing || args->out, "state_merge_packed: out is NULL");
    REQUIRE(err, args->foreign_lse == 0 || args->foreign_lse == 1,
            "state_merge_packed: foreign_lse is %d, expected 0 or 1", args->foreign_lse);
    const int64_t bytes = cpa_dtype_bytes(args->out_dtype);
    CPA_TRY(cpa_check_aligned(where, "out", args->out, bytes, err));
    CPA_TRY(cpa_check_aligned(where, "out_lse", args->out_lse, sizeof(float), err));
    CPA_TRY(cpa_check_aligned(where, "order", args->order, sizeof(int32_t), err));
    CPA_TRY(cpa_check_aligned(where, "sink_logits", args->sink_logits, sizeof(float), err));
    CPA_TRY(cpa_check_rows(where, "out_row_stride", args->rows, args->out_row_stride,
                           (int64_t)args->heads * args->v_dim, bytes, err));
    return cpa_check_rows(where, "out_lse_row_stride", args->rows, args->out_lse_row_stride, args->heads, sizeof(float),
                          err);
}

cpa_status cpa_state_merge_packed(const cpa_state_merge_packed_args *given, cpa_stream *stream) {
    cpa_state_merge_packed_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("state_merge_packed", given, cpa_state_merge_packed_args, out, &args, &stream->error));
    CPA_TRY(check_merge(&args, &stream->error));
    if (!args.out_row_stride) args.out_row_stride = (int64_t)args.heads * args.v_dim;
    if (!args.out_lse_row_stride) args.out_lse_row_stride = args.heads;
    return args.rows && args.heads ? stream->device->operators->state_merge_packed(&args, stream) : CPA_OK;
}
