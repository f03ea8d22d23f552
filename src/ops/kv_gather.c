/* kv_gather: every argument is checked here, then the table of the back end runs. */
#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_spans.h"

/* One of the tensors, of which the part is; `follow`: some of its rows are filled one behind the other. */
static cpa_status check_tensor(const cpa_kv_gather_args *a, cpa_kv_part part, int follow, cpa_error *err) {
    const int keys = part == CPA_KEYS;
    const int64_t bytes = cpa_dtype_bytes(a->dst_dtype);
    const void *memory = keys ? a->k : a->v;
    const cpa_checked_heads of = {.row_name = keys ? "k_row_stride" : "v_row_stride",
                                  .head_name = keys ? "k_head_stride" : "v_head_stride",
                                  .rows = a->dst_rows,
                                  .row_stride = keys ? a->k_row_stride : a->v_row_stride,
                                  .head_stride = keys ? a->k_head_stride : a->v_head_stride,
                                  .bytes = bytes,
                                  .heads = a->src.kv_heads,
                                  .dim = keys ? a->src.k_dim : a->src.v_dim};
    REQUIRE(err, memory || a->dst_rows == 0, "kv_gather: %s is NULL", keys ? "k" : "v");
    CPA_TRY(cpa_check_aligned("kv_gather", keys ? "k" : "v", memory, bytes, err));
    return cpa_check_written_heads("kv_gather", &of, follow, err);
}

static cpa_status check_gather(const cpa_kv_gather_args *args, cpa_error *err) {
    CPA_TRY(cpa_check_view("kv_gather: src", &args->src, err));
    if (args->src.v_in_k)
        return cpa_fail(err, CPA_UNSUPPORTED, "kv_gather: src has v_in_k 1; latents are for cpa_latent_gather");
    CPA_TRY(cpa_check_dtype("kv_gather", "dst_dtype", args->dst_dtype, err));
    REQUIRE(err, args->dst_rows >= 0 && args->dst_rows <= INT32_MAX, "kv_gather: dst_rows is %lld, expected 0..%d",
            (long long)args->dst_rows, INT32_MAX);
    const cpa_checked_spans spans = {&args->src,  args->block_tables, args->n_table_entries,
                                     args->spans, args->n_spans,      args->dst_rows};
    CPA_TRY(cpa_check_spans("kv_gather", &spans, err));
    int follow = 0;
    for (int64_t i = 0; i < args->n_spans; i++) follow |= args->spans[i].count > 1;
    CPA_TRY(check_tensor(args, CPA_KEYS, follow, err));
    return check_tensor(args, CPA_VALUES, follow, err);
}

/* The tensors as a cache whose block b begins at row b. */
static cpa_kv_view rows_of(const cpa_kv_gather_args *a) {
    const int32_t heads = a->src.kv_heads, k_dim = a->src.k_dim, v_dim = a->src.v_dim;
    const int64_t k_row = a->k_row_stride ? a->k_row_stride : (int64_t)heads * k_dim;
    const int64_t v_row = a->v_row_stride ? a->v_row_stride : (int64_t)heads * v_dim;
    return (cpa_kv_view){.k = a->k,
                         .v = a->v,
                         .dtype = a->dst_dtype,
                         .block_size = a->src.block_size,
                         .num_blocks = a->dst_rows,
                         .kv_heads = heads,
                         .k_dim = k_dim,
                         .v_dim = v_dim,
                         .k_block_stride = k_row,
                         .k_token_stride = k_row,
                         .k_head_stride = a->k_head_stride ? a->k_head_stride : k_dim,
                         .v_block_stride = v_row,
                         .v_token_stride = v_row,
                         .v_head_stride = a->v_head_stride ? a->v_head_stride : v_dim};
}

cpa_status cpa_kv_gather(const cpa_kv_gather_args *given, cpa_stream *stream) {
    cpa_kv_gather_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("kv_gather", given, cpa_kv_gather_args, dst_dtype, &args, &stream->error));
    CPA_TRY(check_gather(&args, &stream->error));
    const cpa_kv_view rows = rows_of(&args);
    return stream->device->operators->kv_gather(&args, &rows, stream);
}
