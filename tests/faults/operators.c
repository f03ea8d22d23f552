/* Deliberate bugs of attend, merge, kv_write and of what lies in host memory, put around the operators of a device. The
 * linker lets every cpa_device_open of the test twin come here first. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "comm/comm.h"
#include "kernels/operators.h"
#include "src/cache/kv_cache.h"
#include "tests/faults/fault.h"
#include "tests/faults/latents.h"

cpa_status __real_cpa_device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err);
cpa_status __wrap_cpa_device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err);

/* By cpa_backend: the operators of the back end, and those with the bugs around them. */
static const cpa_operator_table *real[2];
static cpa_operator_table faulty[2];

/* What is known of a plan beside itself. */
typedef struct fault_plan {
    struct fault_plan *next;
    const cpa_attend_plan *plan;
    cpa_attend_plan *blind; /* the same without some keys; NULL: never set so */
    int is_blind;           /* as the plan is set now */
    int from_peers;         /* keys came from peers, and the state over others is resumed */
    int stores_away;        /* some rows go elsewhere than their index says */
    int64_t rows;           /* the end of those of its items */
} fault_plan;

static fault_plan *plans;

static const cpa_operator_table *real_of(const cpa_device *device) {
    return real[device->backend];
}

/* The entry of a plan; NULL without memory. */
static fault_plan *find_plan(const cpa_attend_plan *plan) {
    fault_plan *p = plans;
    while (p && p->plan != plan) p = p->next;
    if (p) return p;
    p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->plan = plan;
    p->next = plans;
    plans = p;
    return p;
}

static void plan_destroy(cpa_attend_plan *plan) {
    const cpa_operator_table *table = real_of(plan->device);
    for (fault_plan **at = &plans; *at; at = &(*at)->next) {
        fault_plan *p = *at;
        if (p->plan != plan) continue;
        *at = p->next;
        if (p->blind) table->plan_destroy(p->blind);
        free(p);
        break;
    }
    table->plan_destroy(plan);
}

/* ---- off-by-one-mask: a causal query does not see its own key; dropped-shard where all peers' keys come at once
 * ---- */

/* Row `row` of an item as the armed fault has it: over the keys before its position alone, or without what came from
 * peers. */
static cpa_attend_item blind_row(const cpa_attend_batch *batch, const cpa_attend_item *item, int64_t row) {
    cpa_attend_item one = *item;
    const int from_peers = item->k_set.kind == CPA_TOKENS_OTHERS ||
                           (item->k_set.kind == CPA_TOKENS_ALL && item->q_set.kind == CPA_TOKENS_SHARD);
    const int64_t position = cpa_token_position(batch->map, item->q_set, item->q_first + row);
    const int64_t keys = cpa_tokens_before(batch->map, item->k_set, position) - item->k_first;
    one.q_row += row;
    one.q_first += row;
    one.q_count = 1;
    if (cpa_fault_is(CPA_FAULT_DROPPED_SHARD)) {
        one.k_count = from_peers ? 0 : item->k_count;
    } else if (one.k_count > keys) {
        one.k_count = keys > 0 ? keys : 0;
    }
    return one;
}

/* Sets the blind plan: an item for each row. */
static cpa_status set_blind(fault_plan *p, const cpa_attend_plan *plan, const cpa_attend_batch *batch,
                            cpa_attend_fusion fusion, cpa_error *err) {
    const cpa_operator_table *table = real_of(plan->device);
    const int64_t first_ready = batch->n_items - fusion.ready_items;
    cpa_status status = CPA_NO_MEMORY;
    int64_t rows = 0, n = 0, ready = 0;
    for (int64_t i = 0; i < batch->n_items; i++) rows += batch->items[i].q_count;
    cpa_attend_item *items = calloc((size_t)rows + 1, sizeof *items);
    int64_t *shifts = calloc((size_t)rows + 1, sizeof *shifts);
    if (!items || !shifts) goto done;
    for (int64_t i = 0; i < batch->n_items; i++) {
        for (int64_t row = 0; row < batch->items[i].q_count; row++) {
            if (fusion.state_shifts) shifts[n] = fusion.state_shifts[i];
            ready += i >= first_ready;
            items[n++] = blind_row(batch, &batch->items[i], row);
        }
    }
    cpa_attend_batch blind = *batch;
    blind.items = items;
    blind.n_items = n;
    if (fusion.state_shifts) fusion.state_shifts = shifts;
    fusion.ready_items = ready;
    status = p->blind ? CPA_OK : table->plan_create(plan->device, NULL, &p->blind, err);
    if (status == CPA_OK) status = table->plan_set(p->blind, &blind, fusion, err);
    p->is_blind = status == CPA_OK;
done:
    free(shifts);
    free(items);
    return status;
}

static cpa_status plan_set(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                           cpa_error *err) {
    CPA_TRY(real_of(plan->device)->plan_set(plan, batch, fusion, err));
    fault_plan *p = find_plan(plan);
    if (!p) return cpa_fail(err, CPA_NO_MEMORY, "fault: no memory for a plan");
    p->is_blind = p->stores_away = p->from_peers = 0;
    p->rows = fusion.ready_rows > 0 ? fusion.ready_row + fusion.ready_rows : 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t end = batch->items[i].q_row + batch->items[i].q_count;
        if (end > p->rows) p->rows = end;
        if (fusion.state_shifts && fusion.state_shifts[i] != 0) p->stores_away = 1;
        if (batch->items[i].k_set.kind == CPA_TOKENS_OTHERS) p->from_peers = 1;
    }
    const int is_blind =
        cpa_fault_is(CPA_FAULT_OFF_BY_ONE_MASK) || (cpa_fault_is(CPA_FAULT_DROPPED_SHARD) && p->from_peers);
    return is_blind ? set_blind(p, plan, batch, fusion, err) : CPA_OK;
}

static cpa_status plan_upload(const cpa_attend_plan *plan, cpa_stream *stream) {
    const fault_plan *p = find_plan(plan);
    CPA_TRY(real_of(plan->device)->plan_upload(plan, stream));
    return p && p->is_blind ? real_of(plan->device)->plan_upload(p->blind, stream) : CPA_OK;
}

/* ---- swapped-kv-head: queries read the keys and values of the KV head before theirs ---- */

/* Memory for rotated copies; the streams of a process follow each other. It stays until the process ends. */
static char *rotated;
static int64_t rotated_bytes;

static cpa_status reserve_rotated(cpa_device *device, int64_t bytes, cpa_error *err) {
    void *memory;
    if (bytes <= rotated_bytes) return CPA_OK;
    CPA_TRY(device->table->alloc(device, bytes, &memory, err));
    device->table->retire(device, rotated);
    rotated = memory;
    rotated_bytes = bytes;
    return CPA_OK;
}

/* Rows of heads, `unit` bytes each, at a pitch. */
typedef struct head_rows {
    char *memory;
    int64_t pitch;
} head_rows;

/* Copies rows so that head h of src becomes head (h + by) mod heads of dst. */
static cpa_status rotate(head_rows dst, head_rows src, int64_t rows, int32_t heads, int32_t by, int64_t unit,
                         cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    const int64_t stay = (heads - by) * unit, wrap = by * unit;
    CPA_TRY(table->copy_rows(dst.memory + wrap, dst.pitch, src.memory, src.pitch, stay, rows, stream));
    return table->copy_rows(dst.memory, dst.pitch, src.memory + stay, src.pitch, wrap, rows, stream);
}

/* What an attend reads and writes, and where its rotated copies lie. */
typedef struct rotation {
    head_rows from[4], to[4]; /* q; o, lse, out, which come back */
    int64_t unit[4];
    int32_t heads, by;
} rotation;

static rotation rotation_of(const cpa_attend_plan *plan, const cpa_attend_args *args, int64_t rows, int64_t *bytes) {
    const int32_t heads = plan->shape.q_heads;
    const cpa_partial state = cpa_partial_resolve(args->state, heads, plan->shape.v_dim);
    const int64_t element = cpa_dtype_bytes(args->q_dtype), width = (int64_t)heads * plan->shape.v_dim;
    const int64_t q_stride = args->q_row_stride ? args->q_row_stride : (int64_t)heads * plan->shape.k_dim;
    const int64_t four = (int64_t)sizeof(float), line = 256;
    rotation r = {
        .from = {{(char *)(uintptr_t)args->q, q_stride * element},
                 {(char *)state.o, state.o_row_stride * four},
                 {(char *)state.lse, state.lse_row_stride * four},
                 {args->out, width * element}},
        .unit = {plan->shape.k_dim * element, plan->shape.v_dim * four, four, plan->shape.v_dim * element},
        .heads = heads,
        .by = heads / plan->shape.kv_heads,
    };
    *bytes = 0;
    for (int i = 0; i < 4; i++) {
        r.to[i] = (head_rows){r.from[i].memory ? rotated + *bytes : NULL, heads * r.unit[i]};
        *bytes += (rows * r.to[i].pitch + line - 1) / line * line;
    }
    return r;
}

/* Attends with the query heads moved one group back, and moves the results forth again. Where rows are stored in the
 * memory of a peer only the queries move: the results are as wrong. */
static cpa_status attend_swapped(const fault_plan *p, const cpa_attend_args *args, const void *ready_q,
                                 cpa_stream *stream) {
    const cpa_attend_fusion *fusion = &p->plan->fusion;
    int64_t bytes;
    (void)rotation_of(p->plan, args, p->rows, &bytes);
    CPA_TRY(reserve_rotated(stream->device, bytes, &stream->error));
    const rotation r = rotation_of(p->plan, args, p->rows, &bytes);
    const int32_t back = r.heads - r.by;
    const int results = p->stores_away ? 1 : 4;
    cpa_attend_args moved = *args;
    head_rows ready = {(char *)(uintptr_t)ready_q, r.from[0].pitch};
    head_rows place = {r.to[0].memory + fusion->ready_row * r.to[0].pitch, r.to[0].pitch};
    for (int i = 0; i < results; i++)
        if (r.from[i].memory) CPA_TRY(rotate(r.to[i], r.from[i], p->rows, r.heads, back, r.unit[i], stream));
    if (fusion->ready_rows > 0) CPA_TRY(rotate(place, ready, fusion->ready_rows, r.heads, back, r.unit[0], stream));
    moved.q = r.to[0].memory;
    moved.q_row_stride = 0;
    if (results > 1) {
        moved.state = (cpa_partial){.o = (float *)(void *)r.to[1].memory, .lse = (float *)(void *)r.to[2].memory};
        moved.out = r.to[3].memory;
    }
    CPA_TRY(real_of(stream->device)->attend(p->plan, &moved, place.memory, stream));
    for (int i = 1; i < results; i++)
        if (r.from[i].memory) CPA_TRY(rotate(r.from[i], r.to[i], p->rows, r.heads, r.by, r.unit[i], stream));
    return CPA_OK;
}

/* ---- wrong-scale: quantised keys are read with twice their scale ---- */

static cpa_status attend_scaled(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                cpa_stream *stream) {
    cpa_attend_args doubled = *args;
    doubled.scale = 2 * (args->scale != 0 ? args->scale : 1 / sqrtf((float)plan->shape.k_dim));
    return real_of(stream->device)->attend(plan, &doubled, ready_q, stream);
}

/* ---- lost-rules: scores stay as they are; merges have no sinks ---- */

static cpa_status attend_without_rules(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                       cpa_stream *stream) {
    cpa_attend_args bare = *args;
    bare.rules = NULL;
    bare.selection = NULL;
    return real_of(stream->device)->attend(plan, &bare, ready_q, stream);
}

/* ---- rows-for-runs: CPA_VLLM_X keys and values are read as rows in one piece ---- */

static cpa_status attend_rows(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                              cpa_stream *stream) {
    cpa_attend_args rows = *args;
    rows.kv.layout = CPA_HEAD_MAJOR;
    rows.kv.k_token_stride = rows.kv.k_head_stride = rows.kv.v_token_stride = rows.kv.v_head_stride = 0;
    return real_of(stream->device)->attend(plan, &rows, ready_q, stream);
}

/* ---- base2-lse, dropped-shard: of the states that are merged, all but the first or the second ---- */

/* The LSE of the first `rows` rows of a state goes to base 2. Through the host: not in graphs. */
static cpa_status spoil_lse(cpa_partial state, int64_t rows, int32_t heads, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    const float log2_e = 1.44269504f;
    const int64_t width = heads * (int64_t)sizeof(float), pitch = state.lse_row_stride * (int64_t)sizeof(float);
    float *lse = malloc((size_t)(rows * width) + 1);
    if (!lse) return cpa_fail(&stream->error, CPA_NO_MEMORY, "fault: no memory for %lld rows", (long long)rows);
    cpa_status status;
    CPA_TRY_GOTO(table->copy_rows(lse, width, state.lse, pitch, width, rows, stream), done);
    CPA_TRY_GOTO(table->stream_sync(stream), done);
    for (int64_t i = 0; i < rows * heads; i++) lse[i] *= log2_e;
    CPA_TRY_GOTO(table->copy_rows(state.lse, pitch, lse, width, width, rows, stream), done);
    status = table->stream_sync(stream);
done:
    free(lse);
    return status;
}

/* How many rows of a state a merge reads, at most. */
static cpa_status rows_read(const cpa_merge_args *args, int32_t state, int64_t *rows, cpa_stream *stream) {
    const int32_t *map = args->row_maps ? args->row_maps[state] : NULL;
    *rows = args->rows;
    if (!map || args->rows == 0) return CPA_OK;
    const cpa_device_table *table = stream->device->table;
    int32_t *host = malloc((size_t)args->rows * sizeof *host);
    if (!host) return cpa_fail(&stream->error, CPA_NO_MEMORY, "fault: no memory for a map");
    cpa_status status = table->copy(host, map, args->rows * (int64_t)sizeof *host, stream);
    if (status == CPA_OK) status = table->stream_sync(stream);
    *rows = 0;
    for (int64_t i = 0; status == CPA_OK && i < args->rows; i++)
        if (host[i] >= *rows) *rows = host[i] + 1;
    free(host);
    return status;
}

static cpa_status merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream) {
    cpa_merge_args changed = *args;
    cpa_partial states[CPA_MERGE_MAX_STATES];
    const int32_t *maps[CPA_MERGE_MAX_STATES];
    if (cpa_fault_is(CPA_FAULT_LOST_RULES)) changed.sink_logits = NULL;
    if (cpa_fault_is(CPA_FAULT_DROPPED_SHARD) && args->n_states > 1) {
        changed.n_states = 0;
        for (int32_t i = 0; i < args->n_states; i++) {
            if (i == 1) continue;
            maps[changed.n_states] = args->row_maps ? args->row_maps[i] : NULL;
            states[changed.n_states++] = args->states[i];
        }
        changed.states = states;
        changed.row_maps = maps;
    }
    for (int32_t i = 1; cpa_fault_is(CPA_FAULT_BASE2_LSE) && i < args->n_states; i++) {
        int64_t rows;
        CPA_TRY(rows_read(args, i, &rows, stream));
        CPA_TRY(spoil_lse(cpa_partial_resolve(args->states[i], args->heads, args->v_dim), rows, args->heads, stream));
    }
    return real_of(stream->device)->merge(&changed, awaited, stream);
}

/* ---- stale-block: some tokens are not written; failed-rank: the last rank alone fails ---- */

static int on_last_rank;

static cpa_status kv_write(const cpa_kv_write_args *args, cpa_stream *stream) {
    enum { PERIOD = 8, LOST = 5 }; /* the sixth of eight */
    const cpa_operator_table *table = real_of(stream->device);
    if (cpa_fault_is(CPA_FAULT_FAILED_RANK) && on_last_rank)
        return cpa_fail(&stream->error, CPA_DEVICE, "a step fails on this rank alone");
    if (!cpa_fault_is(CPA_FAULT_STALE_BLOCK)) return table->kv_write(args, stream);
    const int64_t k_bytes = args->kv.kv_heads * args->kv.k_dim * cpa_dtype_bytes(args->dtype);
    const int64_t v_bytes = args->kv.kv_heads * args->kv.v_dim * cpa_dtype_bytes(args->dtype);
    for (int64_t begin = 0, end; begin < args->tokens; begin = end + 1) {
        end = begin / PERIOD * PERIOD + LOST + (begin % PERIOD > LOST ? PERIOD : 0);
        if (end > args->tokens) end = args->tokens;
        cpa_kv_write_args part = *args;
        part.tokens = end - begin;
        part.k = (const char *)args->k + begin * k_bytes;
        part.v = (const char *)args->v + begin * v_bytes;
        part.slot_mapping = args->slot_mapping + begin;
        part.nonfinite = args->nonfinite ? args->nonfinite + begin : NULL;
        if (part.tokens > 0) CPA_TRY(table->kv_write(&part, stream));
    }
    return CPA_OK;
}

cpa_status __real_cpa_control_open(cpa_comm *comm, cpa_control *out, cpa_error *err);
cpa_status __wrap_cpa_control_open(cpa_comm *comm, cpa_control *out, cpa_error *err);

cpa_status __wrap_cpa_control_open(cpa_comm *comm, cpa_control *out, cpa_error *err) {
    CPA_TRY(__real_cpa_control_open(comm, out, err));
    on_last_rank = out->rank == out->size - 1;
    return CPA_OK;
}

/* ---- damaged-swap: bits of blocks flip in host memory ---- */

/* Where the move at hand copies the first layer to; its `first` is NULL before. */
static cpa_block_place first_copy;

static cpa_status copy_blocks(const cpa_copy_blocks_args *args, cpa_stream *stream) {
    if (!first_copy.first) first_copy = args->dst;
    return real_of(stream->device)->copy_blocks(args, stream);
}

cpa_status __real_cpa_kv_cache_move(cpa_kv_cache *cache, cpa_kv_tier from, cpa_kv_tier to, int32_t rank,
                                    const cpa_block_move *moves, int64_t n, uint64_t *damaged, cpa_stream *stream);
cpa_status __wrap_cpa_kv_cache_move(cpa_kv_cache *cache, cpa_kv_tier from, cpa_kv_tier to, int32_t rank,
                                    const cpa_block_move *moves, int64_t n, uint64_t *damaged, cpa_stream *stream);

cpa_status __wrap_cpa_kv_cache_move(cpa_kv_cache *cache, cpa_kv_tier from, cpa_kv_tier to, int32_t rank,
                                    const cpa_block_move *moves, int64_t n, uint64_t *damaged, cpa_stream *stream) {
    enum { PERIOD = 3 };
    first_copy.first = NULL;
    CPA_TRY(__real_cpa_kv_cache_move(cache, from, to, rank, moves, n, damaged, stream));
    if (!cpa_fault_is(CPA_FAULT_DAMAGED_SWAP) || to != CPA_TIER_HOST || !first_copy.first) return CPA_OK;
    for (int64_t i = 0; i < n; i++) {
        if (moves[i].rank != rank || moves[i].to % PERIOD != 0) continue;
        first_copy.first[moves[i].to * first_copy.stride + first_copy.stride / 2] ^= 4;
    }
    return CPA_OK;
}

/* ---- the table ---- */

static cpa_status attend(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                         cpa_stream *stream) {
    const fault_plan *p = find_plan(plan);
    if (!p) return cpa_fail(&stream->error, CPA_NO_MEMORY, "fault: no memory for a plan");
    if (cpa_fault_is(CPA_FAULT_WRONG_SCALE) && cpa_dtype_is_quantised(args->kv.dtype))
        return attend_scaled(plan, args, ready_q, stream);
    if (cpa_fault_is(CPA_FAULT_ROWS_FOR_RUNS) && args->kv.layout == CPA_VLLM_X)
        return attend_rows(plan, args, ready_q, stream);
    if (cpa_fault_is_of_latents() && args->kv.v_in_k)
        return cpa_fault_attend_latents(real_of(stream->device), plan, p->rows, args, ready_q, stream);
    if (cpa_fault_is(CPA_FAULT_SWAPPED_KV_HEAD) && plan->shape.kv_heads > 1 && p->rows > 0)
        return attend_swapped(p, args, ready_q, stream);
    if (cpa_fault_is(CPA_FAULT_LOST_RULES)) return attend_without_rules(plan, args, ready_q, stream);
    if (cpa_fault_is(CPA_FAULT_BASE2_LSE) && p->from_peers && args->resume) {
        const cpa_partial state = cpa_partial_resolve(args->state, plan->shape.q_heads, plan->shape.v_dim);
        CPA_TRY(spoil_lse(state, p->rows, plan->shape.q_heads, stream));
    }
    const int is_blind = p->is_blind && (cpa_fault_is(CPA_FAULT_DROPPED_SHARD) ||
                                         (cpa_fault_is(CPA_FAULT_OFF_BY_ONE_MASK) && args->mask.causal));
    return real_of(stream->device)->attend(is_blind ? p->blind : plan, args, ready_q, stream);
}

cpa_status __wrap_cpa_device_open(const cpa_device_options *options, cpa_device **out, cpa_error *err) {
    CPA_TRY(__real_cpa_device_open(options, out, err));
    const cpa_backend backend = (*out)->backend;
    real[backend] = (*out)->operators;
    faulty[backend] = *real[backend];
    faulty[backend].plan_set = plan_set;
    faulty[backend].plan_upload = plan_upload;
    faulty[backend].plan_destroy = plan_destroy;
    faulty[backend].attend = attend;
    faulty[backend].merge = merge;
    faulty[backend].kv_write = kv_write;
    faulty[backend].copy_blocks = copy_blocks;
    (*out)->operators = &faulty[backend];
    if (cpa_fault_named == CPA_FAULT_BASE2_LSE || cpa_fault_is_named_of_latents()) (*out)->caps.has_graphs = 0;
    return CPA_OK;
}
