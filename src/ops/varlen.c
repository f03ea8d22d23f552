/* Attention without a cache: segments become items of an attend plan, and tensors a cache whose blocks begin at any
 * row (CPA_TENSOR_BLOCK in kernels/attend_plan.h). */
#include <cpattn/varlen.h>

#include <stdlib.h>

#include "base/struct_size.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"
#include "src/ops/varlen.h"

/* ---- the plan ---- */

static cpa_status check_starts(const char *name, const int64_t *starts, int64_t n, int64_t most, cpa_error *err) {
    CPA_TRY(cpa_check_aligned("varlen plan", name, starts, sizeof *starts, err));
    REQUIRE(err, starts[0] >= 0, "varlen plan: %s[0] is %lld, expected at least 0", name, (long long)starts[0]);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(err, starts[i + 1] >= starts[i], "varlen plan: %s[%lld] is %lld and %s[%lld] is %lld, expected no less",
                name, (long long)i, (long long)starts[i], name, (long long)(i + 1), (long long)starts[i + 1]);
    REQUIRE(err, starts[n] <= most, "varlen plan: %s[%lld] is %lld, expected at most %lld rows", name, (long long)n,
            (long long)starts[n], (long long)most);
    return CPA_OK;
}

static cpa_status check_counts(const char *name, const int64_t *counts, const int64_t *starts, int64_t n,
                               cpa_error *err) {
    CPA_TRY(cpa_check_aligned("varlen plan", name, counts, sizeof *counts, err));
    for (int64_t i = 0; counts && i < n; i++)
        REQUIRE(err, counts[i] >= 0 && counts[i] <= starts[i + 1] - starts[i],
                "varlen plan: %s[%lld] is %lld, expected 0 to the %lld rows before the next start", name, (long long)i,
                (long long)counts[i], (long long)(starts[i + 1] - starts[i]));
    return CPA_OK;
}

static cpa_status check_batch(const cpa_device *device, const cpa_varlen_batch *batch, cpa_attention_shape *shape,
                              cpa_error *err) {
    shape->q_heads = batch->q_heads;
    shape->kv_heads = batch->kv_heads;
    shape->k_dim = batch->k_dim;
    shape->v_dim = batch->v_dim;
    CPA_TRY(device ? cpa_check_attend("varlen plan", device, shape, NULL, err)
                   : cpa_check_shape("varlen plan", shape, err));
    REQUIRE(err, batch->n_segments >= 0 && batch->n_segments < INT32_MAX,
            "varlen plan: n_segments is %lld, expected 0 to %d", (long long)batch->n_segments, INT32_MAX - 1);
    REQUIRE(err, batch->n_segments == 0 || batch->q_starts, "varlen plan: q_starts is NULL");
    REQUIRE(err, batch->causal == 0 || batch->causal == 1, "varlen plan: causal is %d, expected 0 or 1", batch->causal);
    if (batch->n_segments == 0) return CPA_OK;
    CPA_TRY(check_starts("q_starts", batch->q_starts, batch->n_segments,
                         batch->k_starts ? CPA_MOST_TOKENS : CPA_TENSOR_BLOCK, err));
    CPA_TRY(check_counts("q_counts", batch->q_counts, batch->q_starts, batch->n_segments, err));
    if (batch->k_starts) CPA_TRY(check_starts("k_starts", batch->k_starts, batch->n_segments, CPA_TENSOR_BLOCK, err));
    const int64_t *k_starts = batch->k_starts ? batch->k_starts : batch->q_starts;
    return check_counts("k_counts", batch->k_counts, k_starts, batch->n_segments, err);
}

cpa_status cpa_varlen_check_batch(const cpa_device *device, const cpa_varlen_batch *given, cpa_varlen_batch *out,
                                  cpa_attention_shape *shape, cpa_error *err) {
    *shape = (cpa_attention_shape){0};
    CPA_TRY(CPA_STRUCT_TAKE("varlen plan", given, cpa_varlen_batch, q_starts, out, err));
    CPA_TRY(check_batch(device, out, shape, err));
    if (!out->k_starts && !out->k_counts) out->k_counts = out->q_counts;
    if (!out->k_starts) out->k_starts = out->q_starts;
    return CPA_OK;
}

cpa_status cpa_varlen_set_items(cpa_attend_plan *plan, const cpa_attention_shape *shape, const cpa_attend_item *items,
                                const int32_t *first_keys, int64_t n, int64_t rows, int64_t keys, int causal,
                                cpa_error *err) {
    const cpa_attend_batch paged = {.size = sizeof paged,
                                    .map = {.cp_size = 1, .interleave = CPA_TENSOR_BLOCK},
                                    .shape = *shape,
                                    .block_size = CPA_TENSOR_BLOCK,
                                    .items = items,
                                    .n_items = n,
                                    .block_tables = first_keys,
                                    .n_table_entries = n};
    plan->is_set = 0;
    CPA_TRY(plan->device->operators->plan_set(plan, &paged, (cpa_attend_fusion){.full = !causal}, err));
    plan->device->table->release(plan->device);
    plan->rows = rows;
    plan->k_rows = keys;
    plan->is_set = 1;
    return CPA_OK;
}

static cpa_status set_plan(cpa_attend_plan *plan, const cpa_varlen_batch *batch, const cpa_attention_shape *shape,
                           cpa_attend_item *items, int32_t *first_keys, cpa_error *err) {
    const int64_t n = batch->n_segments;
    int64_t rows = 0, keys = 0; /* up to the last that a segment has: the next start may lie past the tensors */
    for (int64_t i = 0; i < n; i++) {
        const cpa_varlen_part whole = cpa_varlen_part_of(batch, 0, i, 1, 0);
        items[i] = cpa_varlen_item(&whole, batch->q_starts[i], whole.q_count, whole.k_count, i);
        first_keys[i] = (int32_t)batch->k_starts[i];
        if (whole.q_count > 0) rows = batch->q_starts[i] + whole.q_count;
        if (whole.k_count > 0) keys = batch->k_starts[i] + whole.k_count;
    }
    return cpa_varlen_set_items(plan, shape, items, first_keys, n, rows, keys, batch->causal, err);
}

cpa_status cpa_varlen_plan_set(cpa_attend_plan *plan, const cpa_varlen_batch *given, cpa_error *err) {
    cpa_varlen_batch batch;
    cpa_attention_shape shape;
    REQUIRE(err, plan, "varlen plan: the plan is NULL");
    REQUIRE(err, plan->reservation.sequences == 0, "varlen plan: the plan is reserved and cannot be set");
    CPA_TRY(cpa_varlen_check_batch(plan->device, given, &batch, &shape, err));
    cpa_attend_item *items = malloc((size_t)(batch.n_segments + 1) * sizeof *items);
    int32_t *first_keys = malloc((size_t)(batch.n_segments + 1) * sizeof *first_keys);
    const cpa_status status =
        items && first_keys
            ? set_plan(plan, &batch, &shape, items, first_keys, err)
            : cpa_fail(err, CPA_NO_MEMORY, "varlen plan: no memory for %lld segments", (long long)batch.n_segments);
    free(first_keys);
    free(items);
    return status;
}

/* ---- attend ---- */

/* Rows of one of the tensors that are read. */
static cpa_status check_rows(const char *name, const void *rows, const cpa_checked_heads *of, cpa_error *err) {
    REQUIRE(err, rows || of->rows == 0, "varlen: %s is NULL", name);
    CPA_TRY(cpa_check_aligned("varlen", name, rows, of->bytes, err));
    return cpa_check_heads_of_rows("varlen", of, err);
}

static cpa_status check_tensors(const cpa_attend_plan *plan, const cpa_varlen_attend_args *a, cpa_error *err) {
    const cpa_attention_shape *s = &plan->shape;
    const int64_t bytes = cpa_dtype_bytes(a->dtype), rows = plan->rows, keys = plan->k_rows;
    const cpa_checked_heads q = {"q_row_stride",   "q_head_stride", rows,       a->q_row_stride,
                                 a->q_head_stride, bytes,           s->q_heads, s->k_dim};
    const cpa_checked_heads k = {"k_row_stride",   "k_head_stride", keys,        a->k_row_stride,
                                 a->k_head_stride, bytes,           s->kv_heads, s->k_dim};
    const cpa_checked_heads v = {"v_row_stride",   "v_head_stride", keys,        a->v_row_stride,
                                 a->v_head_stride, bytes,           s->kv_heads, s->v_dim};
    const cpa_checked_heads out = {
        "out_row_stride", "out_head_stride", rows, a->out_row_stride, a->out_head_stride, bytes, s->q_heads, s->v_dim};
    CPA_TRY(check_rows("q", a->q, &q, err));
    CPA_TRY(check_rows("k", a->k, &k, err));
    CPA_TRY(check_rows("v", a->v, &v, err));
    CPA_TRY(cpa_check_aligned("varlen", "out", a->out, bytes, err));
    CPA_TRY(cpa_check_written_heads("varlen", &out, a->out && cpa_rows_follow(plan), err));
    return cpa_check_state("varlen", &a->state, rows, s->q_heads, s->v_dim, a->lse_head_stride, err);
}

static cpa_mask mask_of(const cpa_varlen_attend_args *args) {
    return (cpa_mask){.causal = args->causal, .window = args->left, .right = args->right};
}

cpa_status cpa_varlen_check_args(const cpa_attend_plan *plan, const cpa_varlen_attend_args *args,
                                 const cpa_stream *stream, cpa_error *err) {
    const cpa_mask mask = mask_of(args);
    REQUIRE(err, plan->device == stream->device, "varlen: the plan and the stream belong to different devices");
    REQUIRE(err, plan->is_set && plan->block_size == CPA_TENSOR_BLOCK,
            "varlen: the plan has not been set by cpa_varlen_plan_set");
    if (plan->n_items == 0) return CPA_OK;
    CPA_TRY(cpa_check_dtype("varlen", "dtype", args->dtype, err));
    CPA_TRY(check_tensors(plan, args, err));
    REQUIRE(err, args->left >= 0 && args->left <= CPA_MOST_TOKENS, "varlen: left is %lld, expected 0 to 2^44",
            (long long)args->left);
    CPA_TRY(cpa_check_mask("varlen", &mask, err));
    REQUIRE(err, args->scale - args->scale == 0, "varlen: scale is %g, expected a finite number", (double)args->scale);
    CPA_TRY(cpa_check_score("varlen", &(cpa_score_rules){.softcap = args->softcap}, NULL, NULL, err));
    REQUIRE(err, args->resume == 0 || args->resume == 1, "varlen: resume is %d, expected 0 or 1", args->resume);
    REQUIRE(err, (args->out && !args->resume) || (args->state.o && args->state.lse),
            "varlen: state.%s is NULL; expected a state unless out is set and resume is 0",
            args->state.o ? "lse" : "o");
    return CPA_OK;
}

/* The tensors as a cache of overlapping blocks. */
static cpa_kv_view view_of(const cpa_attend_plan *plan, const cpa_varlen_attend_args *args) {
    const cpa_attention_shape *s = &plan->shape;
    const int64_t k_row = args->k_row_stride ? args->k_row_stride : (int64_t)s->kv_heads * s->k_dim;
    const int64_t v_row = args->v_row_stride ? args->v_row_stride : (int64_t)s->kv_heads * s->v_dim;
    return (cpa_kv_view){.k = (void *)(uintptr_t)args->k,
                         .v = (void *)(uintptr_t)args->v,
                         .dtype = args->dtype,
                         .block_size = CPA_TENSOR_BLOCK,
                         .num_blocks = plan->k_rows,
                         .kv_heads = s->kv_heads,
                         .k_dim = s->k_dim,
                         .v_dim = s->v_dim,
                         .k_block_stride = k_row,
                         .k_token_stride = k_row,
                         .k_head_stride = args->k_head_stride ? args->k_head_stride : s->k_dim,
                         .v_block_stride = v_row,
                         .v_token_stride = v_row,
                         .v_head_stride = args->v_head_stride ? args->v_head_stride : s->v_dim};
}

cpa_status cpa_varlen_attend(const cpa_attend_plan *plan, const cpa_varlen_attend_args *given, cpa_stream *stream) {
    cpa_varlen_attend_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("varlen", given, cpa_varlen_attend_args, v, &args, &stream->error));
    REQUIRE(&stream->error, plan, "varlen: the plan is NULL");
    CPA_TRY(cpa_varlen_check_args(plan, &args, stream, &stream->error));
    if (plan->n_items == 0) return CPA_OK;
    const cpa_score_rules rules = {.softcap = args.softcap};
    const cpa_attend_args over_pages = {.size = sizeof over_pages,
                                        .q = args.q,
                                        .q_dtype = args.dtype,
                                        .q_row_stride = args.q_row_stride,
                                        .kv = view_of(plan, &args),
                                        .mask = mask_of(&args),
                                        .scale = args.scale,
                                        .resume = args.resume,
                                        .state = args.state,
                                        .out = args.out,
                                        .rules = args.softcap > 0 ? &rules : NULL,
                                        .q_head_stride = args.q_head_stride,
                                        .out_row_stride = args.out_row_stride,
                                        .out_head_stride = args.out_head_stride,
                                        .lse_head_stride = args.lse_head_stride};
    return stream->device->operators->attend(plan, &over_pages, NULL, stream);
}
