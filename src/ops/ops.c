/* The public device functions and operators: every argument is checked here, then the table of the back end runs. */
#include <cpattn/device.h>
#include <cpattn/ops.h>

#include "base/check.h"
#include "kernels/operators.h"

/* Fails with CPA_INVALID and a formatted line unless the condition holds. */
#define REQUIRE(err, condition, ...)                                                                                   \
    do {                                                                                                               \
        if (!(condition)) return cpa_fail(err, CPA_INVALID, __VA_ARGS__);                                              \
    } while (0)

#define REQUIRE_SIZE(err, where, args)                                                                                 \
    do {                                                                                                               \
        REQUIRE(err, args, "%s: the arguments are NULL", where);                                                       \
        REQUIRE(err, (args)->size == sizeof *(args), "%s: struct size is %zu, expected %zu", where, (args)->size,      \
                sizeof *(args));                                                                                       \
    } while (0)

enum { MAX_THREADS = 4096 };

/* The table of a back end; NULL if this build does not have it. */
static const cpa_backend_table *backend_of(cpa_backend backend) {
#ifdef CPA_HAVE_CUDA
    if (backend == CPA_BACKEND_CUDA) return &cpa_backend_cuda;
#endif
    return backend == CPA_BACKEND_HOST ? &cpa_backend_host : NULL;
}

int32_t cpa_device_count(cpa_backend backend) {
    const cpa_backend_table *table = backend_of(backend);
    return table ? table->device_count() : 0;
}

int64_t cpa_device_free_memory(cpa_backend backend, int32_t ordinal) {
    const cpa_backend_table *table = backend_of(backend);
    return table ? table->free_memory(ordinal) : 0;
}

void cpa_device_pci_address(cpa_backend backend, int32_t ordinal, char out[CPA_PCI_ADDRESS_BYTES]) {
    const cpa_backend_table *table = backend_of(backend);
    out[0] = 0;
    if (table) table->pci_address(ordinal, out);
}

cpa_status cpa_device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err) {
    REQUIRE_SIZE(err, "device", options);
    REQUIRE(err, out, "device: out is NULL");
    const cpa_backend_table *table = backend_of(options->backend);
    REQUIRE(err, table, "device: backend is %d, which this build does not have", (int)options->backend);
    REQUIRE(err, options->threads >= 0 && options->threads <= MAX_THREADS, "device: threads is %d, expected 0..%d",
            options->threads, MAX_THREADS);
    REQUIRE(err, options->n_cpus >= 0 && (options->n_cpus == 0 || options->cpus), "device: n_cpus is %d and cpus is %s",
            options->n_cpus, options->cpus ? "set" : "NULL");
    return table->open(options, out, err);
}

void cpa_device_close(cpa_device *device) {
    if (device) device->table->close(device);
}

const char *cpa_device_description(const cpa_device *device) {
    return device->description;
}

cpa_status cpa_device_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    REQUIRE(err, device && out, "device alloc: %s is NULL", device ? "out" : "device");
    REQUIRE(err, bytes >= 0, "device alloc: bytes is %lld, expected at least 0", (long long)bytes);
    return device->table->alloc(device, bytes, out, err);
}

void cpa_device_free(cpa_device *device, void *memory) {
    if (memory) device->table->free(device, memory);
}

cpa_status cpa_stream_create(cpa_device *device, cpa_stream **out, cpa_error *err) {
    REQUIRE(err, device && out, "stream: %s is NULL", device ? "out" : "device");
    return device->table->stream_create(device, out, err);
}

void cpa_stream_destroy(cpa_stream *stream) {
    if (stream) stream->device->table->stream_destroy(stream);
}

void *cpa_stream_native(const cpa_stream *stream) {
    return stream->native;
}

cpa_status cpa_stream_sync(cpa_stream *stream) {
    return stream->device->table->stream_sync(stream);
}

const char *cpa_stream_error(const cpa_stream *stream) {
    return stream->error.message;
}

int64_t cpa_attend_split_tokens(const cpa_device *device) {
    return device->caps.split_tokens;
}

static cpa_status check_heads(const char *where, int32_t q_heads, int32_t kv_heads, cpa_error *err) {
    REQUIRE(err, kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0,
            "%s: q_heads is %d, expected a positive multiple of kv_heads, %d", where, q_heads, kv_heads);
    return CPA_OK;
}

static cpa_status check_dim(const char *where, const char *name, int32_t dim, cpa_error *err) {
    REQUIRE(err, dim >= 1 && dim <= CPA_MAX_HEAD_DIM, "%s: %s is %d, expected 1..%d", where, name, dim,
            CPA_MAX_HEAD_DIM);
    return CPA_OK;
}

static cpa_status check_dtype(const char *where, const char *name, cpa_dtype dtype, cpa_error *err) {
    REQUIRE(err, cpa_dtype_is_plain(dtype), "%s: %s is %d, expected fp32, bf16 or fp16", where, name, (int)dtype);
    return CPA_OK;
}

static cpa_status check_block_size(const char *where, int32_t block_size, cpa_error *err) {
    REQUIRE(err, block_size > 0 && (block_size & (block_size - 1)) == 0,
            "%s: block_size is %d, expected a power of two", where, block_size);
    return CPA_OK;
}

static cpa_status check_stride(const char *where, const char *name, int64_t stride, int64_t least, cpa_error *err) {
    REQUIRE(err, stride == 0 || stride >= least, "%s: %s is %lld, expected 0 or at least %lld", where, name,
            (long long)stride, (long long)least);
    return CPA_OK;
}

/* The scales of keys or of values. */
static cpa_status check_scales(const char *where, const cpa_kv_view *kv, cpa_kv_part part, cpa_error *err) {
    const void *pool = part == CPA_KEYS ? kv->k : kv->v;
    const float scale = part == CPA_KEYS ? kv->k_scale : kv->v_scale;
    const int32_t dim = part == CPA_KEYS ? kv->k_dim : kv->v_dim;
    const int64_t block_stride = part == CPA_KEYS ? kv->k_block_stride : kv->v_block_stride;
    REQUIRE(err, scale >= 0 && scale - scale == 0 && (scale == 0 || cpa_dtype_traits_of(kv->dtype)->tensor_scale),
            "%s: a scale is %g for a cache of dtype %d, expected 0, or more than 0 for fp8_e4m3", where, (double)scale,
            (int)kv->dtype);
    if (!cpa_kv_scale_bytes(kv->dtype, part, scale)) return CPA_OK;
    int64_t least = cpa_kv_block_bytes(kv->dtype, part, scale, kv->block_size, kv->kv_heads, dim);
    REQUIRE(err, block_stride == 0 || (block_stride >= least && block_stride % 4 == 0),
            "%s: a block stride is %lld, expected a multiple of 4 and at least %lld, scales included", where,
            (long long)block_stride, (long long)least);
    REQUIRE(err, (uintptr_t)pool % 4 == 0, "%s: the pool at %p is not a multiple of 4", where, pool);
    return CPA_OK;
}

static cpa_status check_view(const char *where, const cpa_kv_view *kv, cpa_error *err) {
    REQUIRE(err, kv->num_blocks >= 0, "%s: num_blocks is %lld, expected at least 0", where, (long long)kv->num_blocks);
    REQUIRE(err, kv->num_blocks == 0 || (kv->k && kv->v), "%s: the %s pool is NULL", where, kv->k ? "value" : "key");
    REQUIRE(err, cpa_dtype_traits_of(kv->dtype), "%s: the dtype of the cache is %d, which is none", where,
            (int)kv->dtype);
    CPA_TRY(check_block_size(where, kv->block_size, err));
    REQUIRE(err, kv->kv_heads > 0, "%s: kv_heads is %d, expected at least 1", where, kv->kv_heads);
    CPA_TRY(check_dim(where, "k_dim", kv->k_dim, err));
    CPA_TRY(check_dim(where, "v_dim", kv->v_dim, err));
    CPA_TRY(check_stride(where, "k_block_stride", kv->k_block_stride, kv->k_dim, err));
    CPA_TRY(check_stride(where, "k_token_stride", kv->k_token_stride, kv->k_dim, err));
    CPA_TRY(check_stride(where, "k_head_stride", kv->k_head_stride, kv->k_dim, err));
    CPA_TRY(check_stride(where, "v_block_stride", kv->v_block_stride, kv->v_dim, err));
    CPA_TRY(check_stride(where, "v_token_stride", kv->v_token_stride, kv->v_dim, err));
    CPA_TRY(check_stride(where, "v_head_stride", kv->v_head_stride, kv->v_dim, err));
    REQUIRE(err, (kv->k_scale == 0) == (kv->v_scale == 0), "%s: k_scale is %g and v_scale is %g, expected both or none",
            where, (double)kv->k_scale, (double)kv->v_scale);
    CPA_TRY(check_scales(where, kv, CPA_KEYS, err));
    return check_scales(where, kv, CPA_VALUES, err);
}

static cpa_status check_same_shape(const char *where, const cpa_kv_view *a, const cpa_kv_view *b, cpa_error *err) {
    REQUIRE(err,
            a->dtype == b->dtype && a->block_size == b->block_size && a->kv_heads == b->kv_heads &&
                a->k_dim == b->k_dim && a->v_dim == b->v_dim,
            "%s: src has dtype %d, block_size %d, kv_heads %d, k_dim %d, v_dim %d, but dst has %d, %d, %d, %d, %d",
            where, (int)a->dtype, a->block_size, a->kv_heads, a->k_dim, a->v_dim, (int)b->dtype, b->block_size,
            b->kv_heads, b->k_dim, b->v_dim);
    REQUIRE(err, a->k_scale == b->k_scale && a->v_scale == b->v_scale,
            "%s: src has the scales %g and %g, but dst has %g and %g", where, (double)a->k_scale, (double)a->v_scale,
            (double)b->k_scale, (double)b->v_scale);
    return CPA_OK;
}

static cpa_status check_kv_write(const cpa_kv_write_args *args, cpa_error *err) {
    REQUIRE_SIZE(err, "kv_write", args);
    REQUIRE(err, args->tokens >= 0, "kv_write: tokens is %lld, expected at least 0", (long long)args->tokens);
    CPA_TRY(check_dtype("kv_write", "dtype", args->dtype, err));
    CPA_TRY(check_view("kv_write", &args->kv, err));
    REQUIRE(err, args->tokens == 0 || (args->k && args->v && args->slot_mapping), "kv_write: %s is NULL",
            !args->k   ? "k"
            : !args->v ? "v"
                       : "slot_mapping");
    return CPA_OK;
}

cpa_status cpa_kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    CPA_TRY(check_kv_write(args, &stream->error));
    return stream->device->operators->kv_write(args, stream);
}

static cpa_status check_kv_copy(const cpa_kv_copy_args *args, cpa_error *err) {
    REQUIRE_SIZE(err, "kv_copy", args);
    CPA_TRY(check_view("kv_copy: src", &args->src, err));
    CPA_TRY(check_view("kv_copy: dst", &args->dst, err));
    CPA_TRY(check_same_shape("kv_copy", &args->src, &args->dst, err));
    REQUIRE(err, args->n_pairs >= 0 && (args->n_pairs == 0 || args->pairs), "kv_copy: n_pairs is %lld and pairs is %s",
            (long long)args->n_pairs, args->pairs ? "set" : "NULL");
    for (int64_t i = 0; i < args->n_pairs; i++) {
        int64_t src = args->pairs[i][0], dst = args->pairs[i][1];
        REQUIRE(err, src >= 0 && src < args->src.num_blocks && dst >= 0 && dst < args->dst.num_blocks,
                "kv_copy: pairs[%lld] copies block %lld of %lld to block %lld of %lld", (long long)i, (long long)src,
                (long long)args->src.num_blocks, (long long)dst, (long long)args->dst.num_blocks);
    }
    return CPA_OK;
}

cpa_status cpa_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream) {
    CPA_TRY(check_kv_copy(args, &stream->error));
    return stream->device->operators->kv_copy(args, stream);
}

static cpa_status check_span(const cpa_kv_pack_args *args, int64_t index, cpa_error *err) {
    cpa_kv_span span = args->spans[index];
    int64_t block_size = args->src.block_size;
    REQUIRE(err, span.table >= 0 && span.count >= 0 && span.first >= 0 && span.first % block_size == 0,
            "kv_pack: spans[%lld] has table %lld, first %lld, count %lld; expected none negative and first a multiple "
            "of block_size, %lld",
            (long long)index, (long long)span.table, (long long)span.first, (long long)span.count,
            (long long)block_size);
    int64_t blocks = span.count / block_size + (span.count % block_size > 0);
    REQUIRE(err, span.dst_block >= 0 && blocks <= args->dst.num_blocks - span.dst_block,
            "kv_pack: spans[%lld] fills staging blocks [%lld, %lld) of %lld", (long long)index,
            (long long)span.dst_block, (long long)(span.dst_block + blocks), (long long)args->dst.num_blocks);
    for (int64_t i = 0; i < blocks; i++) {
        int64_t entry = span.table + span.first / block_size + i;
        REQUIRE(err, args->block_tables[entry] >= 0 && args->block_tables[entry] < args->src.num_blocks,
                "kv_pack: spans[%lld] reads block %d through table entry %lld, expected 0..%lld", (long long)index,
                args->block_tables[entry], (long long)entry, (long long)args->src.num_blocks - 1);
    }
    return CPA_OK;
}

static cpa_status check_kv_pack(const cpa_kv_pack_args *args, cpa_error *err) {
    REQUIRE_SIZE(err, "kv_pack", args);
    CPA_TRY(check_view("kv_pack: src", &args->src, err));
    CPA_TRY(check_view("kv_pack: dst", &args->dst, err));
    CPA_TRY(check_same_shape("kv_pack", &args->src, &args->dst, err));
    REQUIRE(err, args->n_spans >= 0, "kv_pack: n_spans is %lld, expected at least 0", (long long)args->n_spans);
    REQUIRE(err, args->n_spans == 0 || (args->spans && args->block_tables), "kv_pack: %s is NULL",
            args->spans ? "block_tables" : "spans");
    for (int64_t i = 0; i < args->n_spans; i++) CPA_TRY(check_span(args, i, err));
    return CPA_OK;
}

cpa_status cpa_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream) {
    CPA_TRY(check_kv_pack(args, &stream->error));
    return stream->device->operators->kv_pack(args, stream);
}

cpa_status cpa_attend_plan_create(cpa_device *device, cpa_attend_plan **out, cpa_error *err) {
    REQUIRE(err, device && out, "attend plan: %s is NULL", device ? "out" : "device");
    return device->operators->plan_create(device, out, err);
}

void cpa_attend_plan_destroy(cpa_attend_plan *plan) {
    if (plan) plan->device->operators->plan_destroy(plan);
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

/* Checks one item; raises *max_block to the largest block id that it reads. */
static cpa_status check_item(const cpa_attend_batch *batch, int64_t index, int64_t *max_block, cpa_error *err) {
    cpa_attend_item item = batch->items[index];
    long long i = (long long)index;
    REQUIRE(err, item.q_row >= 0 && item.q_count >= 0 && item.q_first >= 0,
            "attend plan: items[%lld] has q_row %lld, q_count %lld, q_first %lld; expected none negative", i,
            (long long)item.q_row, (long long)item.q_count, (long long)item.q_first);
    REQUIRE(err, item.k_count >= 0 && item.k_first >= 0 && item.k_first % batch->block_size == 0,
            "attend plan: items[%lld] has k_count %lld and k_first %lld; expected none negative and k_first a multiple "
            "of block_size, %d",
            i, (long long)item.k_count, (long long)item.k_first, batch->block_size);
    CPA_TRY(check_token_set(batch, i, "q_set", item.q_set, 0, err));
    CPA_TRY(check_token_set(batch, i, "k_set", item.k_set, 1, err));
    REQUIRE(err, item.q_set.kind != CPA_TOKENS_ALL || item.k_set.kind == CPA_TOKENS_ALL,
            "attend plan: items[%lld] has the queries of all tokens and k_set.kind %d; expected all keys too, %d", i,
            (int)item.k_set.kind, CPA_TOKENS_ALL);
    int64_t entries = item.k_count / batch->block_size + (item.k_count % batch->block_size > 0);
    REQUIRE(err, item.table >= 0 && item.table <= batch->n_table_entries - entries,
            "attend plan: items[%lld] uses table entries [%lld, %lld) of %lld", i, (long long)item.table,
            (long long)(item.table + entries), (long long)batch->n_table_entries);
    for (int64_t e = item.table; e < item.table + entries; e++) {
        REQUIRE(err, batch->block_tables[e] >= 0, "attend plan: table entry %lld of items[%lld] is %d", (long long)e, i,
                batch->block_tables[e]);
        if (batch->block_tables[e] > *max_block) *max_block = batch->block_tables[e];
    }
    return CPA_OK;
}

cpa_status cpa_attend_plan_set(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_error *err) {
    int64_t max_block = -1;
    REQUIRE(err, plan, "attend plan: the plan is NULL");
    REQUIRE_SIZE(err, "attend plan", batch);
    REQUIRE(err, batch->map.cp_size >= 1 && batch->map.interleave >= 1,
            "attend plan: the map has cp_size %d and interleave %d, expected at least 1", batch->map.cp_size,
            batch->map.interleave);
    CPA_TRY(check_heads("attend plan", batch->q_heads, batch->kv_heads, err));
    CPA_TRY(check_dim("attend plan", "k_dim", batch->k_dim, err));
    CPA_TRY(check_dim("attend plan", "v_dim", batch->v_dim, err));
    CPA_TRY(check_block_size("attend plan", batch->block_size, err));
    REQUIRE(err, batch->n_items >= 0 && (batch->n_items == 0 || batch->items),
            "attend plan: n_items is %lld and items is %s", (long long)batch->n_items, batch->items ? "set" : "NULL");
    REQUIRE(err, batch->n_table_entries >= 0 && (batch->n_table_entries == 0 || batch->block_tables),
            "attend plan: n_table_entries is %lld and block_tables is %s", (long long)batch->n_table_entries,
            batch->block_tables ? "set" : "NULL");
    for (int64_t i = 0; i < batch->n_items; i++) CPA_TRY(check_item(batch, i, &max_block, err));
    CPA_TRY(plan->device->operators->plan_set(plan, batch, err));
    plan->device->table->release(plan->device);
    plan->max_block = max_block;
    return CPA_OK;
}

static cpa_status check_state(const char *where, const cpa_partial *state, int32_t heads, int32_t v_dim,
                              cpa_error *err) {
    CPA_TRY(check_stride(where, "o_row_stride", state->o_row_stride, (int64_t)heads * v_dim, err));
    return check_stride(where, "lse_row_stride", state->lse_row_stride, heads, err);
}

static cpa_status check_attend(const cpa_attend_plan *plan, const cpa_attend_args *args, const cpa_stream *stream,
                               cpa_error *err) {
    REQUIRE_SIZE(err, "attend", args);
    REQUIRE(err, plan, "attend: the plan is NULL");
    REQUIRE(err, plan->device == stream->device, "attend: the plan and the stream belong to different devices");
    if (plan->n_items == 0) return CPA_OK;
    CPA_TRY(check_dtype("attend", "q_dtype", args->q_dtype, err));
    CPA_TRY(check_view("attend", &args->kv, err));
    const cpa_kv_view *kv = &args->kv;
    REQUIRE(err,
            kv->kv_heads == plan->kv_heads && kv->k_dim == plan->k_dim && kv->v_dim == plan->v_dim &&
                kv->block_size == plan->block_size,
            "attend: the cache has kv_heads %d, k_dim %d, v_dim %d, block_size %d, but the plan has %d, %d, %d, %d",
            kv->kv_heads, kv->k_dim, kv->v_dim, kv->block_size, plan->kv_heads, plan->k_dim, plan->v_dim,
            plan->block_size);
    REQUIRE(err, plan->max_block < kv->num_blocks, "attend: the plan reads block %lld, but the cache has %lld blocks",
            (long long)plan->max_block, (long long)kv->num_blocks);
    REQUIRE(err, args->q, "attend: q is NULL");
    CPA_TRY(check_stride("attend", "q_row_stride", args->q_row_stride, (int64_t)plan->q_heads * plan->k_dim, err));
    CPA_TRY(check_state("attend", &args->state, plan->q_heads, plan->v_dim, err));
    REQUIRE(err, args->mask.window >= 0 && args->mask.sinks >= 0, "attend: window is %lld and sinks is %d",
            (long long)args->mask.window, args->mask.sinks);
    REQUIRE(err, args->scale - args->scale == 0, "attend: scale is %g, expected a finite number", (double)args->scale);
    REQUIRE(err, (args->out && !args->resume) || (args->state.o && args->state.lse),
            "attend: state.%s is NULL; expected a state unless out is set and resume is 0",
            args->state.o ? "lse" : "o");
    return CPA_OK;
}

cpa_status cpa_attend(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_stream *stream) {
    CPA_TRY(check_attend(plan, args, stream, &stream->error));
    return stream->device->operators->attend(plan, args, stream);
}

static cpa_status check_merge(const cpa_merge_args *args, cpa_error *err) {
    REQUIRE_SIZE(err, "merge", args);
    REQUIRE(err, args->rows >= 0, "merge: rows is %lld, expected at least 0", (long long)args->rows);
    REQUIRE(err, args->heads >= 1, "merge: heads is %d, expected at least 1", args->heads);
    CPA_TRY(check_dim("merge", "v_dim", args->v_dim, err));
    REQUIRE(err, args->n_states >= 1 && args->n_states <= CPA_MERGE_MAX_STATES, "merge: n_states is %d, expected 1..%d",
            args->n_states, CPA_MERGE_MAX_STATES);
    CPA_TRY(check_dtype("merge", "out_dtype", args->out_dtype, err));
    REQUIRE(err, args->states, "merge: states is NULL");
    for (int32_t i = 0; i < args->n_states; i++) {
        REQUIRE(err, args->rows == 0 || (args->states[i].o && args->states[i].lse), "merge: states[%d].%s is NULL", i,
                args->states[i].o ? "lse" : "o");
        CPA_TRY(check_state("merge", &args->states[i], args->heads, args->v_dim, err));
    }
    REQUIRE(err, args->rows == 0 || args->out, "merge: out is NULL");
    CPA_TRY(check_stride("merge", "out_row_stride", args->out_row_stride, (int64_t)args->heads * args->v_dim, err));
    return check_stride("merge", "out_lse_row_stride", args->out_lse_row_stride, args->heads, err);
}

cpa_status cpa_merge(const cpa_merge_args *args, cpa_stream *stream) {
    CPA_TRY(check_merge(args, &stream->error));
    return stream->device->operators->merge(args, NULL, stream);
}
