/* The attend plan, attend and merge: every argument is checked here, then the table of the back end runs. */
#include "src/ops/attend.h"

#include <stdlib.h>

#include "base/min_max.h"
#include "base/struct_size.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"

int64_t cpa_attend_split_tokens(const cpa_device *device) {
    return device ? device->caps.split_tokens : 0;
}

cpa_status cpa_attend_supported(const cpa_device *device, const cpa_attention_shape *shape, const cpa_mask *mask,
                                cpa_error *err) {
    REQUIRE(err, device && shape, "attend: the %s is NULL", device ? "shape" : "device");
    return cpa_check_attend("attend", device, shape, mask, err);
}

/* ---- the plan ---- */

cpa_status cpa_attend_plan_create(cpa_device *device, cpa_attend_plan **out, cpa_error *err) {
    REQUIRE(err, device && out, "attend plan: %s is NULL", device ? "out" : "device");
    return device->operators->plan_create(device, NULL, out, err);
}

void cpa_attend_plan_destroy(cpa_attend_plan *plan) {
    if (plan) plan->device->operators->plan_destroy(plan);
}

static cpa_status check_keys(const cpa_attend_batch *batch, int64_t index, cpa_batch_reach *reach, cpa_error *err) {
    const cpa_attend_item *item = &batch->items[index];
    const long long i = index;
    REQUIRE(err, item->k_count >= 0 && item->k_first >= 0 && item->k_first % batch->block_size == 0,
            "attend plan: items[%lld] has k_count %lld and k_first %lld; expected none negative and k_first a multiple "
            "of block_size, %d",
            i, (long long)item->k_count, (long long)item->k_first, batch->block_size);
    int64_t entries = item->k_count / batch->block_size + (item->k_count % batch->block_size > 0);
    REQUIRE(err, item->table >= 0 && item->table <= batch->n_table_entries - entries,
            "attend plan: items[%lld] uses table entries [%lld, +%lld) of %lld", i, (long long)item->table,
            (long long)entries, (long long)batch->n_table_entries);
    REQUIRE(err, item->k_first <= CPA_MOST_TOKENS - item->k_count,
            "attend plan: items[%lld] has k_count %lld and k_first %lld; expected at most 2^44 keys", i,
            (long long)item->k_count, (long long)item->k_first);
    for (int64_t e = item->table; e < item->table + entries && !reach->on_device; e++) {
        REQUIRE(err, batch->block_tables[e] >= 0, "attend plan: table entry %lld of items[%lld] is %d", (long long)e, i,
                batch->block_tables[e]);
        if (batch->block_tables[e] > reach->max_block) reach->max_block = batch->block_tables[e];
    }
    return CPA_OK;
}

/* The end in its sequence of a set's first `tokens` tokens. */
static int64_t end_of(cpa_owner_map map, cpa_token_set set, int64_t tokens) {
    return tokens == 0 || map.cp_size == 1 ? tokens : cpa_token_index(map, set, tokens - 1) + 1;
}

/* Queries and keys are of one shard or all, keys also of all shards but one. */
static cpa_status check_token_set(const cpa_attend_batch *batch, long long index, const char *name, cpa_token_set set,
                                  int may_be_others, cpa_error *err) {
    const int known =
        set.kind == CPA_TOKENS_SHARD || set.kind == CPA_TOKENS_ALL || (set.kind == CPA_TOKENS_OTHERS && may_be_others);
    REQUIRE(err, known, "attend plan: items[%lld] has %s.kind %d, expected one shard (%d)%s or all (%d)", index, name,
            (int)set.kind, CPA_TOKENS_SHARD, may_be_others ? ", all but one (1)" : "", CPA_TOKENS_ALL);
    REQUIRE(err, set.kind == CPA_TOKENS_ALL || (set.shard >= 0 && set.shard < batch->map.cp_size),
            "attend plan: items[%lld] has %s.shard %d, expected 0..%d", index, name, set.shard, batch->map.cp_size - 1);
    return CPA_OK;
}

static cpa_status check_item(const cpa_attend_batch *batch, int64_t index, cpa_batch_reach *reach, cpa_error *err) {
    const cpa_attend_item *item = &batch->items[index];
    const long long i = index;
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*item), "attend plan: the reserved bytes of items[%lld] are not zero", i);
    REQUIRE(err,
            item->q_row >= 0 && item->q_count >= 0 && item->q_first >= 0 && item->q_count <= CPA_MOST_TOKENS &&
                item->q_row <= CPA_MOST_TOKENS - item->q_count && item->q_first <= CPA_MOST_TOKENS - item->q_count,
            "attend plan: items[%lld] has q_row %lld, q_count %lld, q_first %lld; expected none negative, and rows and "
            "queries below 2^44",
            i, (long long)item->q_row, (long long)item->q_count, (long long)item->q_first);
    CPA_TRY(check_token_set(batch, i, "q_set", item->q_set, 0, err));
    CPA_TRY(check_token_set(batch, i, "k_set", item->k_set, 1, err));
    REQUIRE(err, item->q_set.kind != CPA_TOKENS_ALL || item->k_set.kind == CPA_TOKENS_ALL,
            "attend plan: items[%lld] has the queries of all tokens and k_set.kind %d; expected all keys too, %d", i,
            (int)item->k_set.kind, CPA_TOKENS_ALL);
    CPA_TRY(check_keys(batch, index, reach, err));
    if (item->q_count == 0) return CPA_OK;
    reach->end = cpa_max64(reach->end, end_of(batch->map, item->q_set, item->q_first + item->q_count));
    reach->end = cpa_max64(reach->end, end_of(batch->map, item->k_set, item->k_first + item->k_count));
    return CPA_OK;
}

/* No row belongs to two items. */
static cpa_status check_rows_once(const cpa_attend_batch *batch, cpa_error *err) {
    int64_t n = 0;
    cpa_checked_range *rows = malloc((size_t)(batch->n_items + 1) * sizeof *rows);
    if (!rows) {
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for the check of %lld items",
                        (long long)batch->n_items);
    }
    for (int64_t i = 0; i < batch->n_items; i++) {
        const cpa_attend_item *item = &batch->items[i];
        if (item->q_count > 0) rows[n++] = (cpa_checked_range){item->q_row, item->q_row + item->q_count, i};
    }
    cpa_status status = cpa_check_disjoint("attend plan", "items", "row", rows, n, err);
    free(rows);
    return status;
}

cpa_status cpa_check_batch(const cpa_device *device, const cpa_attend_batch *batch, cpa_batch_reach *reach,
                           cpa_error *err) {
    *reach = (cpa_batch_reach){.max_block = -1};
    CPA_TRY(cpa_check_map("attend plan", batch->map, err));
    CPA_TRY(cpa_check_attend("attend plan", device, &batch->shape, NULL, err));
    CPA_TRY(cpa_check_block_size("attend plan", batch->block_size, err));
    REQUIRE(err, batch->n_items >= 0 && batch->n_items <= INT32_MAX && (batch->n_items == 0 || batch->items),
            "attend plan: n_items is %lld and items is %s", (long long)batch->n_items, batch->items ? "set" : "NULL");
    REQUIRE(err,
            batch->n_table_entries >= 0 && batch->n_table_entries <= CPA_MOST_TOKENS &&
                (batch->n_table_entries == 0 || batch->block_tables),
            "attend plan: n_table_entries is %lld and block_tables is %s", (long long)batch->n_table_entries,
            batch->block_tables ? "set" : "NULL");
    CPA_TRY(cpa_check_aligned("attend plan", "items", batch->items, sizeof batch->items->q_row, err));
    CPA_TRY(cpa_check_aligned("attend plan", "block_tables", batch->block_tables, sizeof(int32_t), err));
    REQUIRE(err, batch->cascade_attention >= CPA_CASCADE_AUTO && batch->cascade_attention <= CPA_CASCADE_ALWAYS,
            "attend plan: cascade_attention is %d, expected auto (0), off (1) or always (2)",
            (int)batch->cascade_attention);
    REQUIRE(err, batch->block_tables_on_device == 0 || batch->block_tables_on_device == 1,
            "attend plan: block_tables_on_device is %d, expected 0 or 1", batch->block_tables_on_device);
    REQUIRE(err, batch->num_blocks >= batch->block_tables_on_device && batch->num_blocks <= INT32_MAX,
            "attend plan: num_blocks is %lld, expected %d..%d", (long long)batch->num_blocks,
            batch->block_tables_on_device, INT32_MAX);
    if (batch->block_tables_on_device) {
        reach->on_device = device->caps.own_memory;
        reach->max_block = batch->num_blocks - 1;
    }
    for (int64_t i = 0; i < batch->n_items; i++) CPA_TRY(check_item(batch, i, reach, err));
    REQUIRE(err, !batch->block_tables_on_device || reach->max_block < batch->num_blocks,
            "attend plan: a table entry is %lld, expected below the %lld blocks of num_blocks",
            (long long)reach->max_block, (long long)batch->num_blocks);
    return check_rows_once(batch, err);
}

cpa_status cpa_attend_plan_set(cpa_attend_plan *plan, const cpa_attend_batch *given, cpa_error *err) {
    cpa_attend_batch batch;
    cpa_batch_reach reach;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    REQUIRE(err, plan->reservation.sequences == 0, "attend plan: the plan is reserved and cannot be set");
    CPA_TRY(CPA_STRUCT_TAKE("attend plan", given, cpa_attend_batch, n_table_entries, &batch, err));
    CPA_TRY(cpa_check_batch(plan->device, &batch, &reach, err));
    plan->is_set = 0;
    CPA_TRY(plan->device->operators->plan_set(plan, &batch, (cpa_attend_fusion){0}, err));
    plan->device->table->release(plan->device);
    plan->max_block = reach.max_block;
    plan->end = reach.end;
    plan->is_set = 1;
    return CPA_OK;
}

/* ---- attend ---- */

cpa_status cpa_check_attend_args(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_error *err) {
    cpa_device *device = plan->device;
    REQUIRE(err, plan->is_set, "attend: the plan has not been set");
    REQUIRE(err, plan->block_size != CPA_TENSOR_BLOCK, "attend: the plan was set by cpa_varlen_plan_set");
    if (plan->n_items == 0) return CPA_OK;
    CPA_TRY(cpa_check_dtype("attend", "q_dtype", args->q_dtype, err));
    CPA_TRY(cpa_check_view("attend", &args->kv, err));
    const cpa_kv_view *kv = &args->kv;
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv),
                         planned = {"the plan", plan->shape, plan->block_size};
    CPA_TRY(cpa_check_same_cache("attend", &cache, &planned, 1, err));
    REQUIRE(err, plan->max_block < kv->num_blocks, "attend: the plan reads block %lld, but the cache has %lld blocks",
            (long long)plan->max_block, (long long)kv->num_blocks);
    REQUIRE(err, args->q, "attend: q is NULL");
    REQUIRE(err, !args->out_scale || args->out, "attend: out_scale is set and out is NULL");
    const int64_t bytes = cpa_dtype_bytes(args->q_dtype), out_bytes = args->out_scale ? 1 : bytes;
    const cpa_attention_shape *s = &plan->shape;
    const cpa_checked_heads q = {"q_row_stride",      "q_head_stride", plan->rows, args->q_row_stride,
                                 args->q_head_stride, bytes,           s->q_heads, s->k_dim};
    const cpa_checked_heads out = {"out_row_stride",      "out_head_stride", plan->rows, args->out_row_stride,
                                   args->out_head_stride, out_bytes,         s->q_heads, s->v_dim};
    CPA_TRY(cpa_check_aligned("attend", "q", args->q, bytes, err));
    CPA_TRY(cpa_check_aligned("attend", "out", args->out, out_bytes, err));
    CPA_TRY(cpa_check_aligned("attend", "out_scale", args->out_scale, sizeof *args->out_scale, err));
    CPA_TRY(cpa_check_heads_of_rows("attend", &q, err));
    CPA_TRY(cpa_check_written_heads("attend", &out, args->out && cpa_rows_follow(plan), err));
    CPA_TRY(cpa_check_state("attend", &args->state, plan->rows, s->q_heads, s->v_dim, args->lse_head_stride, err));
    CPA_TRY(cpa_check_mask("attend", &args->mask, err));
    CPA_TRY(cpa_check_score("attend", args->rules, args->selection, args->bias, err));
    CPA_TRY(cpa_check_score_reach("attend", device, plan->end, args->rules, args->selection, args->bias, err));
    REQUIRE(err, args->scale - args->scale == 0, "attend: scale is %g, expected a finite number", (double)args->scale);
    REQUIRE(err, args->scale != 0 || !kv->v_in_k,
            "attend: scale is 0 over latents, expected that of the model: %d columns are no head's", kv->k_dim);
    CPA_TRY(cpa_check_skip_tiles("attend", args->skip_tiles, err));
    CPA_TRY(cpa_check_aligned("attend", "tile_counts", args->tile_counts, sizeof *args->tile_counts, err));
    REQUIRE(err, args->resume == 0 || args->resume == 1, "attend: resume is %d, expected 0 or 1", args->resume);
    REQUIRE(err, (args->out && !args->resume) || (args->state.o && args->state.lse),
            "attend: state.%s is NULL; expected a state unless out is set and resume is 0",
            args->state.o ? "lse" : "o");
    cpa_attention_shape shape = *s;
    shape.dtype = args->q_dtype;
    shape.kv_dtype = kv->dtype;
    return device->operators->attend_supported(device, "attend", &shape, &args->mask, err);
}

cpa_status cpa_attend(const cpa_attend_plan *plan, const cpa_attend_args *given, cpa_stream *stream) {
    cpa_attend_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("attend", given, cpa_attend_args, state, &args, &stream->error));
    REQUIRE(&stream->error, plan, "attend: the plan is NULL");
    REQUIRE(&stream->error, plan->device == stream->device,
            "attend: the plan and the stream belong to different devices");
    CPA_TRY(cpa_check_attend_args(plan, &args, &stream->error));
    return stream->device->operators->attend(plan, &args, NULL, stream);
}

cpa_status cpa_attend_plan_kernel(const cpa_attend_plan *plan, const cpa_attend_args *given, cpa_attend_kernels *out,
                                  size_t size, cpa_error *err) {
    cpa_attend_args args;
    cpa_attend_kernels kernels;
    REQUIRE(err, plan && out, "attend: %s is NULL", plan ? "out" : "the plan");
    REQUIRE(err, plan->is_set, "attend: the plan has not been set");
    if (given) {
        CPA_TRY(CPA_STRUCT_TAKE("attend", given, cpa_attend_args, state, &args, err));
        CPA_TRY(cpa_check_attend_args(plan, &args, err));
    }
    plan->device->operators->attend_kernels(plan, given ? &args : NULL, &kernels);
    return cpa_struct_give(&kernels, sizeof kernels, out, size);
}

/* ---- merge ---- */

/* The LSEs of a state or of the result: [rows, heads], or [heads, rows] with head_stride. */
static cpa_status check_merge_lse(const cpa_merge_args *args, const char *row_name, int64_t row_stride,
                                  const char *head_name, int64_t head_stride, cpa_error *err) {
    const int64_t bytes = sizeof(float);
    if (head_stride == 0) return cpa_check_rows("merge", row_name, args->rows, row_stride, args->heads, bytes, err);
    REQUIRE(err, row_stride == 0 || row_stride == 1, "merge: %s is %lld and %s is %lld; expected 0 or 1 for the first",
            row_name, (long long)row_stride, head_name, (long long)head_stride);
    return cpa_check_rows("merge", head_name, args->heads, head_stride, 1, bytes, err);
}

static cpa_status check_merge_state(const cpa_merge_args *args, int32_t i, cpa_error *err) {
    const cpa_partial *state = &args->states[i];
    const int64_t bytes = cpa_dtype_bytes(args->state_dtype);
    REQUIRE(err, CPA_RESERVED_IS_ZERO(*state), "merge: the reserved bytes of a partial state are not zero");
    REQUIRE(err, args->rows == 0 || (state->o && state->lse), "merge: states[%d].%s is NULL", i,
            state->o ? "lse" : "o");
    CPA_TRY(cpa_check_aligned("merge", "o", state->o, bytes, err));
    CPA_TRY(cpa_check_aligned("merge", "lse", state->lse, sizeof(float), err));
    CPA_TRY(cpa_check_rows("merge", "o_row_stride", args->rows, state->o_row_stride, (int64_t)args->heads * args->v_dim,
                           bytes, err));
    CPA_TRY(
        check_merge_lse(args, "lse_row_stride", state->lse_row_stride, "lse_head_stride", args->lse_head_stride, err));
    return args->row_maps ? cpa_check_aligned("merge", "a row map", args->row_maps[i], sizeof(int32_t), err) : CPA_OK;
}

static cpa_status check_merge_options(const cpa_merge_args *args, cpa_error *err) {
    REQUIRE(err, args->foreign_lse == 0 || args->foreign_lse == 1, "merge: foreign_lse is %d, expected 0 or 1",
            args->foreign_lse);
    REQUIRE(err, args->lse_base2 == 0 || args->lse_base2 == 1, "merge: lse_base2 is %d, expected 0 or 1",
            args->lse_base2);
    CPA_TRY(cpa_check_out_scale("merge", args->out_dtype, args->out_scale, err));
    REQUIRE(err, args->tail_rows >= 0 && args->tail_rows <= args->rows,
            "merge: tail_rows is %lld, expected 0 to the %lld rows", (long long)args->tail_rows, (long long)args->rows);
    return CPA_OK;
}

static cpa_status check_merge(const cpa_merge_args *args, cpa_error *err) {
    REQUIRE(err, args->rows >= 0 && args->rows <= CPA_MOST_TOKENS, "merge: rows is %lld, expected 0 to 2^44",
            (long long)args->rows);
    REQUIRE(err, args->heads >= 1 && args->heads <= CPA_MOST_HEADS, "merge: heads is %d, expected 1..%d", args->heads,
            CPA_MOST_HEADS);
    CPA_TRY(cpa_check_dim("merge", "v_dim", args->v_dim, err));
    REQUIRE(err, args->n_states >= 1 && args->n_states <= CPA_MERGE_MAX_STATES, "merge: n_states is %d, expected 1..%d",
            args->n_states, CPA_MERGE_MAX_STATES);
    REQUIRE(err, cpa_dtype_is_plain(args->out_dtype) || args->out_dtype == CPA_FP8_E4M3,
            "merge: out_dtype is %d, expected fp32, bf16, fp16 or fp8_e4m3", (int)args->out_dtype);
    CPA_TRY(cpa_check_dtype("merge", "state_dtype", args->state_dtype, err));
    CPA_TRY(check_merge_options(args, err));
    REQUIRE(err, args->states, "merge: states is NULL");
    CPA_TRY(cpa_check_aligned("merge", "states", args->states, sizeof args->states->o, err));
    CPA_TRY(cpa_check_aligned("merge", "row_maps", args->row_maps, sizeof *args->row_maps, err));
    for (int32_t i = 0; i < args->n_states; i++) CPA_TRY(check_merge_state(args, i, err));
    REQUIRE(err, args->rows == 0 || args->out, "merge: out is NULL");
    const int64_t bytes = cpa_dtype_bytes(args->out_dtype);
    CPA_TRY(cpa_check_aligned("merge", "out", args->out, bytes, err));
    CPA_TRY(cpa_check_aligned("merge", "out_lse", args->out_lse, sizeof(float), err));
    CPA_TRY(cpa_check_aligned("merge", "sink_logits", args->sink_logits, sizeof(float), err));
    CPA_TRY(cpa_check_rows("merge", "out_row_stride", args->rows, args->out_row_stride,
                           (int64_t)args->heads * args->v_dim, bytes, err));
    return check_merge_lse(args, "out_lse_row_stride", args->out_lse_row_stride, "out_lse_head_stride",
                           args->out_lse_head_stride, err);
}

cpa_status cpa_merge(const cpa_merge_args *given, cpa_stream *stream) {
    cpa_merge_args args;
    if (!stream) return CPA_INVALID;
    CPA_TRY(CPA_STRUCT_TAKE("merge", given, cpa_merge_args, out, &args, &stream->error));
    CPA_TRY(check_merge(&args, &stream->error));
    return stream->device->operators->merge(&args, NULL, stream);
}
