/* kv_gather: every argument is checked here, then the table of the back end runs. */
#include <stdlib.h>

#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"

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

/* The rows that the span fills. */
static cpa_status check_span(const cpa_kv_gather_args *args, int64_t index, cpa_checked_range *filled, cpa_error *err) {
    const cpa_kv_span span = args->spans[index];
    const int64_t block_size = args->src.block_size, entries = args->n_table_entries;
    const long long i = index;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(span), "kv_gather: the reserved bytes of spans[%lld] are not zero", i);
    REQUIRE(err, span.table >= 0 && span.first >= 0 && span.count >= 0 && span.first <= CPA_MOST_TOKENS - span.count,
            "kv_gather: spans[%lld] has table %lld, first %lld, count %lld; expected none negative, up to 2^44", i,
            (long long)span.table, (long long)span.first, (long long)span.count);
    REQUIRE(err, span.dst_row >= 0 && span.count <= args->dst_rows - span.dst_row,
            "kv_gather: spans[%lld] fills %lld rows from %lld on of %lld", i, (long long)span.count,
            (long long)span.dst_row, (long long)args->dst_rows);
    *filled = (cpa_checked_range){span.dst_row, span.dst_row + span.count, index};
    if (span.count == 0) return CPA_OK;
    const int64_t last = (span.first + span.count - 1) / block_size;
    REQUIRE(err, span.table < entries && last < entries - span.table,
            "kv_gather: spans[%lld] reads table entry %lld + %lld of %lld", i, (long long)span.table, (long long)last,
            (long long)entries);
    for (int64_t entry = span.table + span.first / block_size; entry <= span.table + last; entry++)
        REQUIRE(err, args->block_tables[entry] >= 0 && args->block_tables[entry] < args->src.num_blocks,
                "kv_gather: spans[%lld] reads block %d through table entry %lld, expected 0..%lld", i,
                args->block_tables[entry], (long long)entry, (long long)args->src.num_blocks - 1);
    return CPA_OK;
}

static cpa_status check_spans(const cpa_kv_gather_args *args, cpa_error *err) {
    cpa_status status = CPA_OK;
    int64_t n = 0;
    cpa_checked_range *filled = malloc((size_t)(args->n_spans + 1) * sizeof *filled);
    if (!filled)
        return cpa_fail(err, CPA_NO_MEMORY, "kv_gather: no memory for the check of %lld spans",
                        (long long)args->n_spans);
    for (int64_t i = 0; i < args->n_spans; i++) {
        CPA_TRY_GOTO(check_span(args, i, &filled[n], err), done);
        n += filled[n].end > filled[n].begin;
    }
    status = cpa_check_disjoint("kv_gather", "spans", "row", filled, n, err);
done:
    free(filled);
    return status;
}

static cpa_status check_gather(const cpa_kv_gather_args *args, cpa_error *err) {
    CPA_TRY(cpa_check_view("kv_gather: src", &args->src, err));
    if (args->src.v_in_k)
        return cpa_fail(err, CPA_UNSUPPORTED, "kv_gather: src has v_in_k 1; latents are for cpa_latent_gather");
    CPA_TRY(cpa_check_dtype("kv_gather", "dst_dtype", args->dst_dtype, err));
    REQUIRE(err, args->dst_rows >= 0 && args->dst_rows <= INT32_MAX, "kv_gather: dst_rows is %lld, expected 0..%d",
            (long long)args->dst_rows, INT32_MAX);
    REQUIRE(err, args->n_spans >= 0 && args->n_spans <= INT32_MAX, "kv_gather: n_spans is %lld, expected 0..%d",
            (long long)args->n_spans, INT32_MAX);
    REQUIRE(err, args->n_table_entries >= 0, "kv_gather: n_table_entries is %lld, expected at least 0",
            (long long)args->n_table_entries);
    REQUIRE(err, args->n_spans == 0 || (args->spans && args->block_tables), "kv_gather: %s is NULL",
            args->spans ? "block_tables" : "spans");
    CPA_TRY(cpa_check_aligned("kv_gather", "spans", args->spans, sizeof args->spans->first, err));
    CPA_TRY(cpa_check_aligned("kv_gather", "block_tables", args->block_tables, sizeof *args->block_tables, err));
    CPA_TRY(check_spans(args, err));
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
