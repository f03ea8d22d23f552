/* Attention without a cache over ranks. Whole segments are attended where they are. Of one that is cut every rank gets
 * all keys and values, each row's key beside its value, and attends its own rows over them in one pass: what it gives
 * does not depend on the number of ranks. */
#include <cpattn/varlen.h>

#include <inttypes.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/struct_size.h"
#include "src/context/context.h"
#include "src/context/context_internal.h"
#include "src/ops/varlen.h"

enum {
    PACKED_ROWS = 64, /* a block of kv_pack: rows that are copied at once */
    CONTEXT_BLOCK = 16
};

/* The plan of some items of this rank's. */
typedef struct part_plan {
    cpa_attend_plan *plan;
    cpa_attend_item *items;
    int32_t *first_keys;
    int64_t n;
} part_plan;

/* A segment that is cut: its keys are staged from row `staged` on, of which this rank has those of `part`; its own lie
 * from row `own` of k and v on. */
typedef struct cut_segment {
    int64_t keys, staged, own;
    cpa_varlen_part part;
} cut_segment;

struct cpa_varlen_context {
    cpa_context *exchange; /* the ranks, their transport and what is known of failures; no cache */
    cpa_attention_shape shape;
    part_plan whole, cut;
    cut_segment *cuts;
    int64_t n_cuts;
    int32_t *tables; /* scratch of packing */
    int64_t tables_capacity;
    cpa_context_buffer staging;
    int planned;
};

static cpa_error *error_of(cpa_varlen_context *v) {
    return &v->exchange->ops.error;
}

/* ---- life ---- */

cpa_status cpa_varlen_context_create(cpa_comm *comm, cpa_device *device, const cpa_varlen_context_options *given,
                                     cpa_varlen_context **out, cpa_error *err) {
    cpa_varlen_context_options o;
    cpa_error none = {0};
    if (!comm) return cpa_fail(err, CPA_INVALID, "varlen context: the communicator is NULL");
    cpa_varlen_context *v = calloc(1, sizeof *v);
    cpa_status status = CPA_STRUCT_TAKE("varlen context", given, cpa_varlen_context_options, v_dim, &o, &none);
    if (status != CPA_OK) o = (cpa_varlen_context_options){0};
    cpa_context_options options = {.size = sizeof options,
                                   .shape = {.q_heads = o.q_heads,
                                             .kv_heads = o.kv_heads,
                                             .k_dim = o.k_dim,
                                             .v_dim = o.v_dim,
                                             .dtype = o.dtype,
                                             .kv_dtype = o.dtype},
                                   .block_size = CONTEXT_BLOCK,
                                   .max_rows = v && out ? 1 : 0}; /* refused on all ranks alike */
    if (device) options.staging_bytes = cpa_context_least_staging(device, &options, cpa_comm_size(comm));
    cpa_context *exchange;
    const cpa_status made = cpa_context_create(comm, device, &options, &exchange, err);
    if (made == CPA_OK) {
        *v = (cpa_varlen_context){.exchange = exchange, .shape = options.shape};
        exchange->ops.spans.disabled = 1; /* nobody reads them */
        *out = v;
        return CPA_OK;
    }
    free(v);
    return status != CPA_OK ? cpa_fail(err, status, "%s", none.message) : made;
}

static void destroy_plan(part_plan *p) {
    cpa_attend_plan_destroy(p->plan);
    free(p->first_keys);
    free(p->items);
}

void cpa_varlen_context_destroy(cpa_varlen_context *v) {
    if (!v) return;
    destroy_plan(&v->whole);
    destroy_plan(&v->cut);
    cpa_context_free(&v->exchange->ops, &v->staging);
    free(v->tables);
    free(v->cuts);
    cpa_context_destroy(v->exchange);
    free(v);
}

const char *cpa_varlen_context_error(const cpa_varlen_context *v) {
    return v ? cpa_context_error(v->exchange) : "";
}

/* ---- planning ---- */

static cpa_status reserve_plan(cpa_varlen_context *v, part_plan *p, int64_t n) {
    if (!p->plan) CPA_TRY(cpa_attend_plan_create(v->exchange->ops.device, &p->plan, error_of(v)));
    free(p->items);
    free(p->first_keys);
    p->items = malloc((size_t)(n + 1) * sizeof *p->items);
    p->first_keys = malloc((size_t)(n + 1) * sizeof *p->first_keys);
    p->n = 0;
    if (p->items && p->first_keys) return CPA_OK;
    return cpa_fail(error_of(v), CPA_NO_MEMORY, "varlen plan: no memory for %" PRId64 " segments", n);
}

static void add_item(part_plan *p, cpa_attend_item item, int64_t first_key) {
    item.table = p->n;
    p->first_keys[p->n] = (int32_t)first_key;
    p->items[p->n++] = item;
}

/* The items of this rank, and what it exchanges. */
static cpa_status set_plans(cpa_varlen_context *v, const cpa_varlen_batch *batch, const int32_t *owners) {
    cpa_context_ops *ops = &v->exchange->ops;
    int64_t rows = 0, keys = 0, staged = 0;
    CPA_TRY(reserve_plan(v, &v->whole, batch->n_segments));
    CPA_TRY(reserve_plan(v, &v->cut, batch->n_segments));
    free(v->cuts);
    v->cuts = malloc((size_t)(batch->n_segments + 1) * sizeof *v->cuts);
    v->n_cuts = 0;
    if (!v->cuts) return cpa_fail(&ops->error, CPA_NO_MEMORY, "varlen plan: no memory");
    for (int64_t s = 0; s < batch->n_segments; s++) {
        const cpa_varlen_part all = cpa_varlen_part_of(batch, 0, s, 1, 0);
        const cpa_varlen_part part = cpa_varlen_part_of(batch, owners[s], s, ops->map.cp_size, ops->rank);
        const cpa_attend_item item = cpa_varlen_item(&part, rows, all.q_count, all.k_count, 0);
        if (owners[s] == CPA_VARLEN_CUT && ops->map.cp_size > 1) {
            add_item(&v->cut, item, staged);
            v->cuts[v->n_cuts++] = (cut_segment){all.k_count, staged, keys, part};
            staged += all.k_count;
        } else if (owners[s] == ops->rank || owners[s] == CPA_VARLEN_CUT) {
            add_item(&v->whole, item, keys);
        }
        rows += part.q_count;
        keys += part.k_count;
    }
    const int64_t row_bytes = cpa_shape_k_bytes(&v->shape) + cpa_shape_v_bytes(&v->shape);
    CPA_TRY(cpa_context_ensure(ops, &v->staging, staged * row_bytes));
    CPA_TRY(cpa_varlen_set_items(v->whole.plan, &v->shape, v->whole.items, v->whole.first_keys, v->whole.n, rows, keys,
                                 batch->causal, &ops->error));
    return cpa_varlen_set_items(v->cut.plan, &v->shape, v->cut.items, v->cut.first_keys, v->cut.n, rows, staged,
                                batch->causal, &ops->error);
}

static cpa_status check_batch(cpa_varlen_context *v, const cpa_varlen_batch *given, const int32_t *owners,
                              cpa_varlen_batch *batch) {
    const cpa_attention_shape *own = &v->shape;
    cpa_attention_shape shape;
    CPA_TRY(cpa_varlen_check_batch(v->exchange->ops.device, given, batch, &shape, error_of(v)));
    if (shape.q_heads != own->q_heads || shape.kv_heads != own->kv_heads || shape.k_dim != own->k_dim ||
        shape.v_dim != own->v_dim) {
        return cpa_fail(error_of(v), CPA_INVALID,
                        "varlen plan: heads %d/%d of %d/%d, expected those of the context, %d/%d of %d/%d",
                        shape.q_heads, shape.kv_heads, shape.k_dim, shape.v_dim, own->q_heads, own->kv_heads,
                        own->k_dim, own->v_dim);
    }
    if (!owners && batch->n_segments > 0) return cpa_fail(error_of(v), CPA_INVALID, "varlen plan: owners is NULL");
    for (int64_t s = 0; s < batch->n_segments; s++) {
        if (owners[s] >= CPA_VARLEN_CUT && owners[s] < v->exchange->ops.map.cp_size) continue;
        return cpa_fail(error_of(v), CPA_INVALID,
                        "varlen plan: owners[%" PRId64 "] is %d, expected a rank below %d, or %d", s, owners[s],
                        v->exchange->ops.map.cp_size, CPA_VARLEN_CUT);
    }
    return CPA_OK;
}

/* Exchanges follow from the batch: all ranks must have the same. */
static cpa_status agree_on_batch(cpa_varlen_context *v, const cpa_varlen_batch *batch, const int32_t *owners) {
    const size_t n = (size_t)batch->n_segments, starts = n ? (n + 1) * sizeof(int64_t) : 0;
    uint64_t hash = cpa_hash_bytes(CPA_HASH_START, batch->q_starts, starts);
    hash = cpa_hash_bytes(hash, batch->k_starts, starts);
    hash = cpa_hash_bytes(hash, owners, n * sizeof *owners);
    for (int64_t s = 0; s < batch->n_segments; s++) {
        const cpa_varlen_part whole = cpa_varlen_part_of(batch, 0, s, 1, 0);
        const int64_t counts[] = {whole.q_count, whole.k_count};
        hash = cpa_hash_bytes(hash, counts, sizeof counts);
    }
    const cpa_named_value values[] = {{"segments", (double)n},
                                      {"the hash of starts, counts and owners, upper half", (double)(hash >> 32)},
                                      {"lower half", (double)(hash & UINT32_MAX)}};
    return cpa_control_same(&v->exchange->control, "varlen plan", values, sizeof values / sizeof values[0],
                            error_of(v));
}

cpa_status cpa_varlen_context_plan(cpa_varlen_context *v, const cpa_varlen_batch *given, const int32_t *owners) {
    cpa_varlen_batch batch;
    if (!v) return CPA_INVALID;
    v->planned = 0;
    CPA_TRY(cpa_context_check_whole(v->exchange));
    cpa_status status = check_batch(v, given, owners, &batch);
    CPA_TRY(cpa_control_agree(&v->exchange->control, status, error_of(v)));
    CPA_TRY(agree_on_batch(v, &batch, owners));
    status = set_plans(v, &batch, owners);
    CPA_TRY(cpa_control_agree(&v->exchange->control, status, error_of(v)));
    v->planned = 1;
    return CPA_OK;
}

/* ---- one layer ---- */

/* The staged keys and values as tensors of one, from a row on. */
static cpa_varlen_attend_args staged_rows(const cpa_varlen_context *v, const cpa_varlen_attend_args *args,
                                          int64_t row) {
    cpa_varlen_attend_args staged = *args;
    staged.k_row_stride = staged.v_row_stride = (int64_t)v->shape.kv_heads * (v->shape.k_dim + v->shape.v_dim);
    staged.k = (char *)v->staging.memory + row * staged.k_row_stride * cpa_dtype_bytes(args->dtype);
    staged.v = (const char *)staged.k + cpa_shape_k_bytes(&v->shape);
    return staged;
}

/* Rows of tensors in blocks of PACKED_ROWS that are `block_rows` rows apart. */
static cpa_kv_view blocks_of(const cpa_varlen_context *v, const cpa_varlen_attend_args *rows, int64_t block_rows,
                             int64_t blocks) {
    return (cpa_kv_view){.k = (void *)(uintptr_t)rows->k,
                         .v = (void *)(uintptr_t)rows->v,
                         .dtype = rows->dtype,
                         .block_size = PACKED_ROWS,
                         .num_blocks = blocks,
                         .kv_heads = v->shape.kv_heads,
                         .k_dim = v->shape.k_dim,
                         .v_dim = v->shape.v_dim,
                         .k_block_stride = block_rows * rows->k_row_stride,
                         .k_token_stride = rows->k_row_stride,
                         .k_head_stride = v->shape.k_dim,
                         .v_block_stride = block_rows * rows->v_row_stride,
                         .v_token_stride = rows->v_row_stride,
                         .v_head_stride = v->shape.v_dim};
}

/* This rank's rows of a segment take their place among all. */
static cpa_status stage_own(cpa_varlen_context *v, const cut_segment *cut, const cpa_varlen_attend_args *args,
                            cpa_stream *stream) {
    cpa_context_ops *ops = &v->exchange->ops;
    const int64_t blocks = (cut->part.k_count + PACKED_ROWS - 1) / PACKED_ROWS;
    if (blocks == 0) return CPA_OK;
    const cpa_varlen_attend_args to = staged_rows(v, args, cut->staged + cut->part.k_first);
    CPA_TRY(cpa_context_ensure_array(ops, &v->tables, &v->tables_capacity, blocks, sizeof *v->tables));
    for (int64_t i = 0; i < blocks; i++) v->tables[i] = (int32_t)(cut->own + i * PACKED_ROWS);
    const cpa_kv_range range = {.count = cut->part.k_count};
    const cpa_kv_pack_args pack = {.size = sizeof pack,
                                   .src = blocks_of(v, args, 1, cut->own + cut->part.k_count),
                                   .dst = blocks_of(v, &to, PACKED_ROWS, blocks),
                                   .block_tables = v->tables,
                                   .n_table_entries = blocks,
                                   .ranges = &range,
                                   .n_ranges = 1};
    return cpa_context_check(ops, ops->device->operators->kv_pack(&pack, stream), stream);
}

static cpa_status start_exchange(cpa_varlen_context *v, const cut_segment *cut, const cpa_varlen_attend_args *args,
                                 cpa_stream *stream, cpa_context_exchange *out) {
    cpa_context_ops *ops = &v->exchange->ops;
    const int64_t row_bytes = cpa_shape_k_bytes(&v->shape) + cpa_shape_v_bytes(&v->shape);
    char *keys = (char *)(uintptr_t)staged_rows(v, args, cut->staged).k;
    int32_t n = 0;
    for (int32_t peer = 0; peer < ops->map.cp_size; peer++) {
        const int64_t begin = cpa_slice_begin(cut->keys, ops->map.cp_size, peer);
        const int64_t end = cpa_slice_begin(cut->keys, ops->map.cp_size, peer + 1);
        if (peer == ops->rank) continue;
        ops->messages[n++] = (cpa_message){peer, keys + cut->part.k_first * row_bytes, cut->part.k_count * row_bytes,
                                           keys + begin * row_bytes, (end - begin) * row_bytes};
    }
    return cpa_context_start(ops, n, CPA_SPAN_EXCHANGE_KV, 0, stream, out);
}

/* The segments travel while those that are whole are attended. */
static cpa_status attend_exchanging(cpa_varlen_context *v, const cpa_varlen_attend_args *args, cpa_stream *stream) {
    cpa_context_ops *ops = &v->exchange->ops;
    cpa_context_exchange exchanges[CPA_TRANSPORT_MAX_IN_FLIGHT];
    for (int64_t i = 0; i < v->n_cuts; i++) CPA_TRY(stage_own(v, &v->cuts[i], args, stream));
    for (int64_t i = 0; i < v->n_cuts; i++) {
        cpa_context_exchange *exchange = &exchanges[i % CPA_TRANSPORT_MAX_IN_FLIGHT];
        if (i >= CPA_TRANSPORT_MAX_IN_FLIGHT) CPA_TRY(cpa_context_finish(ops, stream, exchange));
        CPA_TRY(start_exchange(v, &v->cuts[i], args, stream, exchange));
    }
    CPA_TRY(cpa_context_check(ops, cpa_varlen_attend(v->whole.plan, args, stream), stream));
    const int64_t finished = v->n_cuts > CPA_TRANSPORT_MAX_IN_FLIGHT ? v->n_cuts - CPA_TRANSPORT_MAX_IN_FLIGHT : 0;
    for (int64_t i = finished; i < v->n_cuts; i++)
        CPA_TRY(cpa_context_finish(ops, stream, &exchanges[i % CPA_TRANSPORT_MAX_IN_FLIGHT]));
    const cpa_varlen_attend_args staged = staged_rows(v, args, 0);
    return cpa_context_check(ops, cpa_varlen_attend(v->cut.plan, &staged, stream), stream);
}

/* What this rank finds out by itself before it begins; the arguments, with their strides, in *out. */
static cpa_status check_args(cpa_varlen_context *v, const cpa_varlen_attend_args *given, const cpa_stream *stream,
                             cpa_varlen_attend_args *out) {
    cpa_error *err = error_of(v);
    CPA_TRY(cpa_context_check_whole(v->exchange));
    CPA_TRY(CPA_STRUCT_TAKE("varlen", given, cpa_varlen_attend_args, v, out, err));
    if (!v->planned) return cpa_fail(err, CPA_INVALID, "varlen: no batch is planned");
    if (!stream || stream->device != v->exchange->ops.device)
        return cpa_fail(err, CPA_INVALID, "varlen: the stream is %s, expected one of the context's device",
                        stream ? "of another device" : "NULL");
    if (out->dtype != v->shape.dtype)
        return cpa_fail(err, CPA_INVALID, "varlen: %s, expected the dtype of the context, %s",
                        cpa_dtype_name(out->dtype), cpa_dtype_name(v->shape.dtype));
    if (out->resume || out->state.o || !out->out)
        return cpa_fail(err, CPA_INVALID, "varlen: resume is %d, state.o %p, out %p; expected 0, none and a place",
                        out->resume, (void *)out->state.o, out->out);
    if (out->q_head_stride || out->k_head_stride || out->v_head_stride || out->out_row_stride || out->out_head_stride ||
        out->lse_head_stride)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "varlen: heads, or rows of out, have strides; expected none over several ranks");
    if (!out->k_row_stride) out->k_row_stride = (int64_t)v->shape.kv_heads * v->shape.k_dim;
    if (!out->v_row_stride) out->v_row_stride = (int64_t)v->shape.kv_heads * v->shape.v_dim;
    return cpa_varlen_check_args(v->whole.plan, out, stream, err);
}

cpa_status cpa_varlen_context_attend(cpa_varlen_context *v, const cpa_varlen_attend_args *given, cpa_stream *stream) {
    cpa_varlen_attend_args args;
    if (!v) return CPA_INVALID;
    cpa_context *c = v->exchange;
    const int64_t call = c->calls++;
    const int exchanges = v->planned && v->n_cuts > 0;
    cpa_comm_begin_wait(c->control.comm, (cpa_calls){c->control.channel, call, call});
    cpa_status status = check_args(v, given, stream, &args);
    if (status == CPA_OK && !exchanges) {
        status = cpa_context_check(&c->ops, cpa_varlen_attend(v->whole.plan, &args, stream), stream);
    } else if (status == CPA_OK) {
        cpa_progress_hook messages = cpa_context_hook(&c->ops);
        c->exchanging = (cpa_calls){c->control.channel, c->exchanging.channel < 0 ? call : c->exchanging.first, call};
        cpa_comm_begin_wait(c->control.comm, c->exchanging);
        cpa_progress_add(&stream->progress, &c->awaiting);
        cpa_progress_add(&stream->progress, &messages);
        status = attend_exchanging(v, &args, stream);
        cpa_progress_remove(&messages);
        c->broken = status != CPA_OK;
    }
    if (status != CPA_OK && exchanges) {
        c->broken = 1; /* the others exchange without this rank */
        cpa_comm_refuse(c->control.comm, c->control.channel, call, 1, &c->ops.error);
    }
    cpa_comm_end_wait(c->control.comm);
    return status;
}
