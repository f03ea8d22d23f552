/* pass-KV: keys and values travel to the queries, in transfers of a bounded size.
 *
 * A transfer holds pieces of the shards of several sequences, packed into blocks, each K then V, which the receiver
 * reads through a block table, as it reads a cache. The exchange of a transfer runs under the attention over the one
 * before, that of the first under the attention over the own shard.
 *
 * There are two ways to plan the transfers. Where attend promises bits, peers come one by one: each peer's shard is
 * attended from the empty state, resumed from segment to segment, and then merged, which is the arithmetic of pass-Q,
 * so that both give the same bits (shards are cut only where it allows). Elsewhere all peers come at once: a row takes
 * one pass over what they sent, with the keys of the own shard among theirs, or behind a pass over the own shard. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/fault.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/context/pass_kv.h"

/* Tokens that staging has room for in a segment when all peers come at once, at least: every segment rounds the state
 * once more. */
#define LEAST_SEGMENT 1024

/* By default. On a device segments are to be few: at the end of each the states of its rows go to memory and come back.
 */
#define HOST_STAGING_BYTES ((int64_t)64 << 20)
#define DEVICE_STAGING_BYTES ((int64_t)2 << 30)

/* ---- life ---- */

/* Two to send from and two to receive in, so that one transfer is packed and one arrives while one is attended. */
enum { BUFFERS = 2 };

/* How a shard may be cut, what a block takes, and how many blocks a segment has. */
static cpa_status size_staging(cpa_context *c) {
    const cpa_context_options *o = &c->options;
    cpa_pass_kv *kv = &c->kv;
    kv->k_bytes = cpa_shape_block_bytes(&o->shape, CPA_KEYS, o->block_size);
    kv->block_bytes = kv->k_bytes + cpa_shape_block_bytes(&o->shape, CPA_VALUES, o->block_size);

    const int64_t step = c->device->caps.split_tokens;
    kv->gather = !c->device->caps.bit_exact;
    kv->regions = kv->gather && c->map.cp_size > 1 ? c->map.cp_size - 1 : 1;
    kv->split = kv->gather ? (LEAST_SEGMENT + o->interleave - 1) / o->interleave * o->interleave : step;
    while (kv->split % o->block_size != 0) kv->split += step;

    const int64_t least_blocks = kv->split / o->block_size;
    kv->segments = BUFFERS * (1 + kv->regions);
    const int64_t usual = kv->gather ? DEVICE_STAGING_BYTES : HOST_STAGING_BYTES;
    const int64_t least = kv->segments * least_blocks * kv->block_bytes;
    c->stats.staging_bound = o->staging_bytes ? o->staging_bytes : cpa_max64(usual, least);
    if (c->stats.staging_bound < least) {
        return cpa_fail(&c->error, CPA_INVALID,
                        "context: staging_bytes: found %" PRId64 ", expected at least %" PRId64 ": %" PRId64
                        " segments of %" PRId64 " tokens",
                        c->stats.staging_bound, least, kv->segments, kv->split);
    }
    const int64_t capacity = c->stats.staging_bound / kv->segments / kv->block_bytes, most = INT32_MAX / kv->segments;
    kv->capacity = capacity < most ? capacity : most;
    return CPA_OK;
}

cpa_status cpa_pass_kv_create(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    CPA_TRY(size_staging(c));
    if (c->map.cp_size == 1) return CPA_OK;
    kv->region_of = calloc((size_t)c->map.cp_size, sizeof *kv->region_of);
    const int64_t blocks = kv->segments * kv->capacity;
    kv->table = cpa_context_grow(c, NULL, &kv->table_capacity, blocks, sizeof *kv->table);
    if (!kv->region_of || !kv->table) {
        return cpa_fail(&c->error, CPA_NO_MEMORY, "context: no memory for %" PRId64 " blocks", blocks);
    }
    for (int64_t i = 0; i < blocks; i++) kv->table[i] = (int32_t)i;
    for (int32_t round = 1; kv->gather && round < c->map.cp_size; round++) {
        kv->region_of[cpa_round_recv_peer(c->map.cp_size, c->control.rank, round)] = round - 1;
    }
    void *staging;
    CPA_TRY(c->device->table->alloc(c->device, blocks * kv->block_bytes, &staging, &c->error));
    kv->staging = staging;
    return CPA_OK;
}

void cpa_pass_kv_destroy(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    if (c->device) {
        for (int64_t i = 0; i < kv->n_plans; i++) c->device->operators->plan_destroy(kv->plans[i]);
        c->device->table->free(c->device, kv->staging);
        c->device->table->free(c->device, kv->shard_memory.memory);
        c->device->table->free(c->device, kv->empty_memory.memory);
    }
    free(kv->plans);
    free(kv->runs);
    free(kv->received.data);
    free(kv->sent.data);
    free(kv->spans);
    free(kv->transfers);
    free(kv->routes);
    free(kv->schedules);
    free(kv->table);
    free(kv->region_of);
}

/* ---- the transfers of a step ---- */

/* Whether two transfers send the same tokens. */
static int same_spans(const cpa_pass_kv *kv, const cpa_kv_transfer *a, const cpa_kv_transfer *b) {
    if (a->n_spans != b->n_spans) return 0;
    for (int64_t i = 0; i < a->n_spans; i++) {
        const cpa_kv_span *x = &kv->spans[a->span + i], *y = &kv->spans[b->span + i];
        if (x->table != y->table || x->first != y->first || x->count != y->count || x->dst_block != y->dst_block)
            return 0;
    }
    return 1;
}

/* Which half of the send staging a transfer uses: one where an earlier transfer left the same tokens, else the one that
 * the transfer before does not use. */
static void choose_send_buffer(cpa_pass_kv *kv, cpa_kv_transfer *transfer) {
    transfer->packs = transfer->send_blocks > 0;
    transfer->send_buffer = 0;
    int seen[2] = {0, 0};
    for (const cpa_kv_transfer *earlier = transfer;
         earlier-- > kv->transfers + kv->now.begin && !(seen[0] && seen[1]);) {
        if (earlier == transfer - 1) transfer->send_buffer = 1 - earlier->send_buffer;
        if (!earlier->packs || seen[earlier->send_buffer]++) continue;
        if (!same_spans(kv, transfer, earlier)) continue;
        transfer->send_buffer = earlier->send_buffer;
        transfer->packs = 0;
        return;
    }
}

cpa_status cpa_pass_kv_take_plan(cpa_context *c, cpa_attend_plan **out) {
    cpa_pass_kv *kv = &c->kv;
    if (kv->plans_in_use == kv->n_plans) {
        cpa_attend_plan **plans =
            cpa_context_grow(c, kv->plans, &kv->plans_capacity, kv->n_plans + 1, sizeof(cpa_attend_plan *));
        if (!plans) return CPA_NO_MEMORY;
        kv->plans = plans;
        CPA_TRY(c->device->operators->plan_create(c->device, &plans[kv->n_plans], &c->error));
        kv->n_plans++;
    }
    *out = kv->plans[kv->plans_in_use++];
    return CPA_OK;
}

cpa_status cpa_pass_kv_add_transfer(cpa_context *c, cpa_kv_transfer **out) {
    cpa_pass_kv *kv = &c->kv;
    cpa_kv_transfer *transfers =
        cpa_context_grow(c, kv->transfers, &kv->transfers_capacity, kv->n_transfers + 1, sizeof *transfers);
    if (!transfers) return CPA_NO_MEMORY;
    kv->transfers = transfers;
    *out = &transfers[kv->n_transfers];
    **out = (cpa_kv_transfer){.span = kv->n_spans, .route = kv->n_routes};
    CPA_TRY(cpa_pass_kv_take_plan(c, &(*out)->plan));
    kv->n_transfers++;
    return CPA_OK;
}

cpa_status cpa_pass_kv_add_span(cpa_context *c, cpa_kv_span span) {
    cpa_pass_kv *kv = &c->kv;
    cpa_kv_span *spans = cpa_context_grow(c, kv->spans, &kv->spans_capacity, kv->n_spans + 1, sizeof *spans);
    if (!spans) return CPA_NO_MEMORY;
    kv->spans = spans;
    spans[kv->n_spans++] = span;
    return CPA_OK;
}

cpa_status cpa_pass_kv_add_route(cpa_context *c, cpa_kv_route route) {
    cpa_pass_kv *kv = &c->kv;
    cpa_kv_route *routes = cpa_context_grow(c, kv->routes, &kv->routes_capacity, kv->n_routes + 1, sizeof *routes);
    if (!routes) return CPA_NO_MEMORY;
    kv->routes = routes;
    routes[kv->n_routes++] = route;
    return CPA_OK;
}

void cpa_pass_kv_close_transfer(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    cpa_kv_transfer *transfer = &kv->transfers[kv->n_transfers - 1];
    transfer->n_spans = kv->n_spans - transfer->span;
    transfer->n_routes = (int32_t)(kv->n_routes - transfer->route);
    for (int64_t i = transfer->route; i < kv->n_routes; i++) {
        transfer->send_blocks = cpa_max64(transfer->send_blocks, kv->routes[i].send_blocks);
        transfer->recv_blocks += kv->routes[i].recv_blocks;
    }
    choose_send_buffer(kv, transfer);
}

cpa_status cpa_pass_kv_add_piece(cpa_context *c, cpa_kv_pieces *pieces, cpa_kv_piece piece) {
    cpa_kv_piece *data = cpa_context_grow(c, pieces->data, &pieces->capacity, pieces->count + 1, sizeof *data);
    if (!data) return CPA_NO_MEMORY;
    pieces->data = data;
    data[pieces->count++] = piece;
    return CPA_OK;
}

/* The rows of pass-KV chunks, neighbours joined. */
static cpa_status plan_runs(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    for (int64_t i = 0; i < c->n_chunks; i++) {
        int64_t rows = cpa_context_share(c, &c->chunks[i], c->control.rank).rows;
        if (c->chunks[i].algorithm != CPA_PASS_KV || rows == 0) continue;
        cpa_row_run *last = kv->n_runs ? &kv->runs[kv->n_runs - 1] : NULL;
        if (last && last->row + last->rows == c->chunks[i].row) {
            last->rows += rows;
            continue;
        }
        cpa_row_run *runs = cpa_context_grow(c, kv->runs, &kv->runs_capacity, kv->n_runs + 1, sizeof *runs);
        if (!runs) return CPA_NO_MEMORY;
        kv->runs = runs;
        runs[kv->n_runs++] = (cpa_row_run){c->chunks[i].row, rows};
    }
    return CPA_OK;
}

/* What empties the states of own rows. */
static cpa_status ensure_empty(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    int64_t heads = c->rows * c->options.shape.q_heads;
    if (heads * (int64_t)sizeof(float) <= kv->empty_memory.bytes) return CPA_OK;
    CPA_TRY(cpa_context_ensure(c, &kv->empty_memory, heads * (int64_t)sizeof(float)));
    int64_t n = kv->empty_memory.bytes / (int64_t)sizeof(float);
    float *empty = malloc((size_t)n * sizeof *empty);
    cpa_status status = empty ? CPA_OK : cpa_fail(&c->error, CPA_NO_MEMORY, "no memory for %" PRId64 " rows", c->rows);
    for (int64_t i = 0; empty && i < n; i++) empty[i] = -INFINITY;
    if (empty) status = cpa_context_upload(c, kv->empty_memory.memory, empty, n * (int64_t)sizeof *empty);
    free(empty);
    if (status != CPA_OK) kv->empty_memory.bytes = 0; /* the next step fills it */
    kv->empty = kv->empty_memory.memory;
    return status;
}

int cpa_pass_kv_takes_own(const cpa_context *c, const cpa_planned_chunk *chunk) {
    return c->shared && c->kv.gather && chunk->algorithm == CPA_PASS_KV;
}

cpa_status cpa_pass_kv_plan(cpa_context *c) {
    cpa_pass_kv *kv = &c->kv;
    kv->n_schedules = kv->n_transfers = kv->n_spans = kv->n_routes = 0;
    kv->plans_in_use = kv->n_runs = 0;
    if (!c->shared) return CPA_OK;
    CPA_TRY(plan_runs(c));
    if (kv->n_runs == 0) return CPA_OK;
    CPA_TRY(ensure_empty(c));
    return kv->gather ? CPA_OK : cpa_context_ensure_state(c, &kv->shard_memory, c->rows, &kv->shard);
}

cpa_status cpa_pass_kv_select(cpa_context *c, cpa_mask mask) {
    cpa_pass_kv *kv = &c->kv;
    if (!c->shared) return CPA_OK;
    for (int64_t i = 0; i < kv->n_schedules; i++) {
        kv->now = kv->schedules[i];
        if (cpa_mask_equals(kv->now.mask, mask)) return CPA_OK;
    }
    cpa_kv_schedule *schedules =
        cpa_context_grow(c, kv->schedules, &kv->schedules_capacity, kv->n_schedules + 1, sizeof *schedules);
    if (!schedules) return CPA_NO_MEMORY;
    kv->schedules = schedules;
    kv->now = (cpa_kv_schedule){.mask = mask, .begin = kv->n_transfers};
    CPA_TRY(kv->gather ? cpa_pass_kv_plan_gather(c) : cpa_pass_kv_plan_rounds(c));
    kv->now.end = kv->n_transfers;
    schedules[kv->n_schedules++] = kv->now;
    return CPA_OK;
}

/* ---- one layer ---- */

int64_t cpa_pass_kv_send_block(const cpa_pass_kv *kv, int64_t transfer) {
    return kv->transfers[transfer].send_buffer * kv->capacity;
}

int64_t cpa_pass_kv_recv_block(const cpa_pass_kv *kv, int64_t transfer, int32_t region) {
    return (BUFFERS + transfer % BUFFERS * kv->regions + region) * kv->capacity;
}

static void use_staging(cpa_context *c, int64_t blocks) {
    c->kv.staging_in_use += blocks * c->kv.block_bytes;
    if (c->kv.staging_in_use > c->stats.staging_bytes) c->stats.staging_bytes = c->kv.staging_in_use;
}

static char *staging_at(const cpa_pass_kv *kv, int64_t block) {
    return kv->staging + block * kv->block_bytes;
}

/* Blocks of staging as a cache, each K then V. */
static cpa_kv_view staging_view(const cpa_context *c, int64_t first, int64_t blocks) {
    cpa_attention_shape shape = c->options.shape;
    shape.layout = CPA_TOKEN_MAJOR; /* whatever that of the cache, so that all ranks agree on it */
    cpa_kv_view view = cpa_kv_view_of(&shape, c->options.block_size, blocks);
    view.k = staging_at(&c->kv, first);
    view.v = staging_at(&c->kv, first) + c->kv.k_bytes;
    view.k_block_stride = view.v_block_stride = c->kv.block_bytes / cpa_dtype_bytes(shape.kv_dtype);
    return view;
}

static cpa_status pack(cpa_context *c, int64_t index, const cpa_context_args *args, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &c->kv.transfers[index];
    use_staging(c, transfer->send_blocks);
    if (!transfer->packs) return CPA_OK;
    cpa_kv_pack_args packing = {
        .size = sizeof packing,
        .src = args->kv,
        .dst = staging_view(c, cpa_pass_kv_send_block(&c->kv, index), transfer->send_blocks),
        .block_tables = c->block_tables,
        .spans = c->kv.spans + transfer->span,
        .n_spans = transfer->n_spans,
    };
    int64_t span = cpa_spans_begin(&c->spans, CPA_SPAN_PACK, transfer->round, stream);
    cpa_status status = c->device->operators->kv_pack(&packing, stream);
    cpa_spans_end(&c->spans, span, stream);
    return cpa_context_check(c, status, stream);
}

static cpa_status start_transfer(cpa_context *c, int64_t index, cpa_stream *stream) {
    cpa_pass_kv *kv = &c->kv;
    const cpa_kv_transfer *transfer = &kv->transfers[index];
    for (int32_t i = 0; i < transfer->n_routes; i++) {
        const cpa_kv_route *route = &kv->routes[transfer->route + i];
        c->messages[i] = (cpa_message){
            .peer = route->peer,
            .send = staging_at(kv, cpa_pass_kv_send_block(kv, index)),
            .send_bytes = route->send_blocks * kv->block_bytes,
            .recv = staging_at(kv, cpa_pass_kv_recv_block(kv, index, route->region)),
            .recv_bytes = route->recv_blocks * kv->block_bytes,
        };
    }
    use_staging(c, transfer->recv_blocks);
    return cpa_context_start(c, transfer->n_routes, CPA_SPAN_EXCHANGE_KV, transfer->round, stream, &kv->exchange);
}

static cpa_status empty_rows(cpa_context *c, cpa_partial state, cpa_row_run run, cpa_stream *stream) {
    const int64_t heads = c->options.shape.q_heads;
    if (run.rows == 0) return CPA_OK;
    cpa_status status = c->device->table->copy(state.lse + run.row * heads, c->kv.empty,
                                               run.rows * heads * (int64_t)sizeof(float), stream);
    return cpa_context_check(c, status, stream);
}

static cpa_status empty_shard(cpa_context *c, cpa_stream *stream) {
    for (int64_t i = 0; i < c->kv.n_runs; i++) CPA_TRY(empty_rows(c, c->kv.shard, c->kv.runs[i], stream));
    return CPA_OK;
}

static cpa_status merge_shard(cpa_context *c, cpa_stream *stream) {
    for (int64_t i = 0; i < c->kv.n_runs; i++) {
        cpa_row_run run = c->kv.runs[i];
        cpa_partial acc = cpa_context_state_at(c->states[0], run.row);
        cpa_partial shard = cpa_context_state_at(c->kv.shard, run.row);
        if (cpa_fault_is(CPA_FAULT_BASE2_LSE)) CPA_TRY(cpa_context_spoil_lse(c, shard, run.rows, stream));
        cpa_merge_args merge = {
            .size = sizeof merge,
            .rows = run.rows,
            .heads = c->options.shape.q_heads,
            .v_dim = c->options.shape.v_dim,
            .states = (cpa_partial[]){acc, shard},
            .n_states = 2,
            .out_dtype = CPA_F32,
            .out = acc.o,
            .out_row_stride = acc.o_row_stride,
            .out_lse = acc.lse,
            .out_lse_row_stride = acc.lse_row_stride,
        };
        CPA_TRY(cpa_context_run_merge(c, &merge, NULL, stream));
    }
    return CPA_OK;
}

static int64_t first_received(const cpa_pass_kv *kv) {
    int64_t first = kv->now.begin;
    while (first < kv->now.end && kv->transfers[first].recv_blocks == 0) first++;
    return first;
}

/* CPA_FAULT_DROPPED_SHARD: the first shard that arrives in the step, or all where they come at once. */
static int is_dropped(const cpa_pass_kv *kv, int64_t index) {
    if (!cpa_fault_is(CPA_FAULT_DROPPED_SHARD)) return 0;
    if (kv->gather) return 1;
    const cpa_kv_transfer *first = &kv->transfers[first_received(kv)];
    return kv->routes[first->route].peer == kv->routes[kv->transfers[index].route].peer;
}

/* CPA_FAULT_BASE2_LSE where no shard is merged: the state of the own shard, which is resumed. */
static cpa_status spoil_resumed(cpa_context *c, cpa_stream *stream) {
    for (int64_t i = 0; i < c->kv.n_runs; i++) {
        cpa_row_run run = c->kv.runs[i];
        CPA_TRY(cpa_context_spoil_lse(c, cpa_context_state_at(c->states[0], run.row), run.rows, stream));
    }
    return CPA_OK;
}

static cpa_status attend_transfer(cpa_context *c, int64_t index, const cpa_context_args *args, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &c->kv.transfers[index];
    if (transfer->rows == 0) return CPA_OK;
    if (transfer->begins) CPA_TRY(empty_shard(c, stream));
    cpa_attend_args attend = {
        .size = sizeof attend,
        .q = args->q,
        .q_dtype = c->options.shape.dtype,
        .q_row_stride = (int64_t)c->options.shape.q_heads * c->options.shape.k_dim,
        .kv = staging_view(c, 0, c->kv.segments * c->kv.capacity),
        .mask = args->mask,
        .scale = args->scale,
        .resume = 1,
        .state = c->kv.gather ? c->states[0] : c->kv.shard,
        .out = index + 1 == c->kv.now.end && cpa_pass_kv_open_rows(c, args) < c->rows ? args->out : NULL,
    };
    if (cpa_fault_is(CPA_FAULT_BASE2_LSE) && c->kv.gather && index == first_received(&c->kv))
        CPA_TRY(spoil_resumed(c, stream));
    if (!is_dropped(&c->kv, index)) {
        CPA_TRY(cpa_context_run_attend(c, transfer->plan, &attend, NULL, CPA_SPAN_ATTEND_RECEIVED, transfer->round,
                                       stream));
    }
    return transfer->ends ? merge_shard(c, stream) : CPA_OK;
}

cpa_status cpa_pass_kv_start(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    c->kv.staging_in_use = 0;
    int64_t first = c->kv.now.begin;
    if (first == c->kv.now.end) return CPA_OK;
    CPA_TRY(pack(c, first, args, stream));
    CPA_TRY(start_transfer(c, first, stream));
    /* Rows among them that do not join are attended over the own shard after this, from the empty state anyway. */
    return empty_rows(c, c->states[0], (cpa_row_run){0, c->kv.now.joined_rows}, stream);
}

cpa_status cpa_pass_kv_attend_own(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    const cpa_attend_plan *own = c->kv.now.own;
    return own ? cpa_context_attend_own(c, own, args, c->states[0], NULL, stream) : CPA_OK;
}

int64_t cpa_pass_kv_open_rows(const cpa_context *c, const cpa_context_args *args) {
    const cpa_pass_kv *kv = &c->kv;
    if (!kv->gather || kv->now.begin == kv->now.end || c->q.active || args->lse) return c->rows;
    if (cpa_fault_is(CPA_FAULT_DROPPED_SHARD)) return c->rows;
    const cpa_kv_transfer *last = &kv->transfers[kv->now.end - 1];
    return last->first_row + last->rows == c->rows ? last->first_row : c->rows;
}

cpa_status cpa_pass_kv_run(cpa_context *c, const cpa_context_args *args, cpa_stream *stream) {
    cpa_pass_kv *kv = &c->kv;
    for (int64_t i = kv->now.begin; i < kv->now.end; i++) {
        int more = i + 1 < kv->now.end;
        if (more) CPA_TRY(pack(c, i + 1, args, stream));
        CPA_TRY(cpa_context_finish(c, stream, &kv->exchange));
        if (more) CPA_TRY(start_transfer(c, i + 1, stream));
        CPA_TRY(attend_transfer(c, i, args, stream));
        use_staging(c, -kv->transfers[i].send_blocks - kv->transfers[i].recv_blocks);
    }
    return CPA_OK;
}
