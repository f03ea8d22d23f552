#include "src/context/kv_transfers.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "comm/rounds.h"
#include "src/context/kv_squeeze.h"

cpa_status cpa_kv_transfers_create(cpa_kv_transfers *t, cpa_context_ops *ops, const cpa_kv_staging *staging) {
    const int32_t size = ops->map.cp_size;
    const int64_t blocks = staging->segments * staging->capacity;
    t->ops = ops;
    t->staging = *staging;
    t->layout = &t->staging.layouts[CPA_KV_OF_SHAPE];
    t->region_of = calloc((size_t)size, sizeof *t->region_of);
    if (!t->region_of) return cpa_fail(&ops->error, CPA_NO_MEMORY, "context: no memory for %d ranks", size);
    for (int32_t round = 1; staging->regions > 1 && round < size; round++)
        t->region_of[cpa_round_recv_peer(size, ops->rank, round)] = round - 1;
    void *memory;
    CPA_TRY(ops->device->table->alloc(ops->device, blocks * staging->block_bytes, &memory, &ops->error));
    t->memory = memory;
    return CPA_OK;
}

void cpa_kv_transfers_destroy(cpa_kv_transfers *t) {
    if (!t->ops) return;
    for (int64_t i = 0; i < t->n_plans; i++) cpa_row_plan_destroy(t->plans[i], t->ops);
    t->ops->device->table->free(t->ops->device, t->memory);
    free(t->squeeze.pairs);
    free(t->squeeze.ranges);
    free(t->squeeze.places);
    free(t->stretches);
    free(t->routes);
    free(t->pairs);
    free(t->ranges);
    free(t->plans);
    free(t->list);
    free(t->region_of);
}

/* ---- planning ---- */

void cpa_kv_transfers_clear(cpa_kv_transfers *t) {
    t->count = t->n_ranges = t->n_pairs = t->n_routes = t->n_stretches = t->plans_in_use = 0;
}

cpa_status cpa_kv_transfers_take_plan(cpa_kv_transfers *t, cpa_row_plan **out) {
    if (t->plans_in_use == t->n_plans) {
        CPA_TRY(
            cpa_context_ensure_array(t->ops, &t->plans, &t->plans_capacity, t->n_plans + 1, sizeof(cpa_row_plan *)));
        CPA_TRY(cpa_row_plan_create(t->ops, &t->plans[t->n_plans]));
        t->n_plans++;
    }
    *out = t->plans[t->plans_in_use++];
    return CPA_OK;
}

cpa_kv_transfer cpa_kv_transfers_open(const cpa_kv_transfers *t, int32_t round) {
    return (cpa_kv_transfer){
        .index = t->count, .round = round, .range = t->n_ranges, .route = t->n_routes, .stretch = t->n_stretches};
}

cpa_status cpa_kv_transfers_add_range(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_range range) {
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->ranges, &t->ranges_capacity, t->n_ranges + 1, sizeof *t->ranges));
    t->ranges[t->n_ranges++] = range;
    open->n_ranges++;
    return CPA_OK;
}

cpa_status cpa_kv_transfers_add_route(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_route route) {
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->routes, &t->routes_capacity, t->n_routes + 1, sizeof *t->routes));
    t->routes[t->n_routes++] = route;
    open->n_routes++;
    return CPA_OK;
}

cpa_status cpa_kv_transfers_add_stretch(cpa_kv_transfers *t, cpa_kv_transfer *open, cpa_kv_stretch stretch) {
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->stretches, &t->stretches_capacity, t->n_stretches + 1,
                                     sizeof *t->stretches));
    t->stretches[t->n_stretches++] = stretch;
    open->n_stretches++;
    return CPA_OK;
}

/* Whether two transfers send the same tokens. */
static int same_ranges(const cpa_kv_transfers *t, const cpa_kv_transfer *a, const cpa_kv_transfer *b) {
    if (a->n_ranges != b->n_ranges) return 0;
    for (int64_t i = 0; i < a->n_ranges; i++) {
        const cpa_kv_range *x = &t->ranges[a->range + i], *y = &t->ranges[b->range + i];
        if (x->table != y->table || x->first != y->first || x->count != y->count || x->dst_block != y->dst_block)
            return 0;
    }
    return 1;
}

/* Which half of the send staging a transfer uses: one where an earlier transfer left the same tokens, else the one that
 * the transfer before does not use. */
static void choose_send_buffer(const cpa_kv_transfers *t, cpa_kv_transfer *transfer, int64_t since) {
    transfer->packs = transfer->send_blocks > 0;
    transfer->send_buffer = 0;
    int seen[CPA_KV_BUFFERS] = {0, 0};
    for (int64_t i = transfer->index; i-- > since && !(seen[0] && seen[1]);) {
        const cpa_kv_transfer *earlier = &t->list[i];
        if (i == transfer->index - 1) transfer->send_buffer = 1 - earlier->send_buffer;
        if (!earlier->packs || seen[earlier->send_buffer]++) continue;
        if (!same_ranges(t, transfer, earlier)) continue;
        transfer->send_buffer = earlier->send_buffer;
        transfer->packs = 0;
        return;
    }
}

void cpa_kv_transfers_place(const cpa_kv_transfers *t, cpa_kv_transfer *open, int64_t since, int64_t own_blocks) {
    open->send_blocks = own_blocks;
    for (int64_t i = open->route; i < open->route + open->n_routes; i++) {
        open->send_blocks = cpa_max64(open->send_blocks, t->routes[i].send_blocks);
        open->recv_blocks += t->routes[i].recv_blocks;
    }
    choose_send_buffer(t, open, since);
}

cpa_status cpa_kv_transfers_add(cpa_kv_transfers *t, const cpa_kv_transfer *placed) {
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->list, &t->capacity, t->count + 1, sizeof *t->list));
    cpa_kv_transfer *added = &t->list[t->count];
    *added = *placed;
    added->pair = t->n_pairs;
    if (added->packs) t->n_pairs += added->send_blocks;
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->pairs, &t->pairs_capacity, t->n_pairs, sizeof *t->pairs));
    t->count++;
    return CPA_OK;
}

int64_t cpa_kv_transfers_send_block(const cpa_kv_transfers *t, const cpa_kv_transfer *transfer) {
    return transfer->send_buffer * t->staging.capacity;
}

int64_t cpa_kv_transfers_recv_block(const cpa_kv_transfers *t, const cpa_kv_transfer *transfer, int32_t region) {
    const int64_t buffer = transfer->index % CPA_KV_BUFFERS;
    return (CPA_KV_BUFFERS + buffer * t->staging.regions + region) * t->staging.capacity;
}

/* ---- one layer ---- */

static void use_staging(cpa_kv_transfers *t, int64_t blocks) {
    cpa_context_stats *stats = &t->ops->stats;
    t->bytes_in_use += blocks * t->layout->bytes;
    if (t->bytes_in_use > stats->staging_bytes) stats->staging_bytes = t->bytes_in_use;
}

static char *staging_at(const cpa_kv_transfers *t, int64_t block) {
    return t->memory + block * t->layout->bytes;
}

static cpa_kv_view staging_view(const cpa_kv_transfers *t, int64_t first, int64_t blocks) {
    return cpa_block_layout_view(t->layout, staging_at(t, first), blocks, 0);
}

cpa_kv_view cpa_kv_transfers_view(const cpa_kv_transfers *t) {
    return staging_view(t, 0, t->staging.segments * t->staging.capacity);
}

void cpa_kv_transfers_begin(cpa_kv_transfers *t, const cpa_kv_view *cache, const cpa_kv_wanted *wanted) {
    t->wanted = wanted;
    const int unquantised = cache->dtype != t->staging.layouts[CPA_KV_OF_SHAPE].shape.kv_dtype;
    t->layout = &t->staging.layouts[unquantised ? CPA_KV_UNQUANTISED : CPA_KV_OF_SHAPE];
    t->bytes_in_use = t->ops->workspace.bytes;
}

/* The blocks of ranges, of the cache and of staging; returns how many. */
static int64_t list_pairs(const cpa_kv_range *ranges, int64_t n_ranges, int64_t block_size, const int32_t *block_tables,
                          int64_t (*pairs)[2]) {
    int64_t n = 0;
    for (const cpa_kv_range *range = ranges; range < ranges + n_ranges; range++) {
        const int32_t *table = block_tables + range->table + range->first / block_size;
        for (int64_t block = 0; block * block_size < range->count; block++, n++) {
            pairs[n][0] = table[block];
            pairs[n][1] = range->dst_block + block;
        }
    }
    return n;
}

/* What is packed: all ranges of a transfer, or the wanted parts of them. */
typedef struct packed_ranges {
    const cpa_kv_range *ranges;
    int64_t n;
} packed_ranges;

/* Copies whole blocks out of a cache of the layout of staging; what lies past the tokens of a range goes along. The
 * blocks of whole transfers are listed once for all layers that read by these tables. */
static cpa_status pack_blocks(cpa_kv_transfers *t, cpa_kv_transfer *transfer, packed_ranges of,
                              const cpa_kv_view *cache, const int32_t *block_tables, cpa_stream *stream) {
    const int whole = of.ranges == t->ranges + transfer->range;
    const int64_t bytes = t->layout->bytes;
    const int64_t stride = cpa_kv_view_resolve(*cache).k_block_stride * cpa_dtype_bytes(cache->dtype);
    int64_t(*pairs)[2] = whole ? t->pairs + transfer->pair : t->squeeze.pairs;
    int64_t n = whole ? transfer->n_pairs : 0;
    if (n == 0) n = list_pairs(of.ranges, of.n, cache->block_size, block_tables, pairs);
    if (whole) transfer->n_pairs = n;
    const cpa_copy_blocks_args copy = {
        .src = {cache->k, stride, 0},
        .dst = {staging_at(t, cpa_kv_transfers_send_block(t, transfer)), bytes, 0},
        .bytes = bytes,
        .layers = 1,
        .pairs = (const int64_t(*)[2])pairs,
        .n_pairs = n,
    };
    return t->ops->device->operators->copy_blocks(&copy, stream);
}

static cpa_status pack_rows(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, packed_ranges of,
                            const cpa_kv_view *cache, const int32_t *block_tables, cpa_stream *stream) {
    const cpa_kv_pack_args packing = {
        .size = sizeof packing,
        .src = *cache,
        .dst = staging_view(t, cpa_kv_transfers_send_block(t, transfer), transfer->send_blocks),
        .block_tables = block_tables,
        .ranges = of.ranges,
        .n_ranges = of.n,
    };
    return t->ops->device->operators->kv_pack(&packing, stream);
}

cpa_status cpa_kv_transfers_pack(cpa_kv_transfers *t, int64_t index, const cpa_kv_view *cache,
                                 const int32_t *block_tables, cpa_stream *stream) {
    cpa_kv_transfer *transfer = &t->list[index];
    packed_ranges of;
    use_staging(t, transfer->send_blocks);
    CPA_TRY(cpa_kv_squeeze_send(t, transfer, &of.ranges, &of.n));
    if (!transfer->packs || transfer->going == 0) return CPA_OK;
    int64_t span = cpa_spans_begin(&t->ops->spans, CPA_SPAN_PACK, transfer->round, stream);
    cpa_status status = cpa_block_layout_matches(t->layout, cache)
                            ? pack_blocks(t, transfer, of, cache, block_tables, stream)
                            : pack_rows(t, transfer, of, cache, block_tables, stream);
    cpa_spans_end(&t->ops->spans, span, stream);
    return cpa_context_check(t->ops, status, stream);
}

cpa_status cpa_kv_transfers_start(cpa_kv_transfers *t, int64_t index, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &t->list[index];
    for (int32_t i = 0; i < transfer->n_routes; i++) {
        cpa_kv_route *route = &t->routes[transfer->route + i];
        CPA_TRY(cpa_kv_squeeze_count(t, transfer, route));
        const int64_t at = cpa_kv_transfers_recv_block(t, transfer, route->region);
        t->ops->messages[i] = (cpa_message){
            .peer = route->peer,
            .send = staging_at(t, cpa_kv_transfers_send_block(t, transfer)),
            .send_bytes = cpa_min64(route->send_blocks, transfer->going) * t->layout->bytes,
            .recv = staging_at(t, at + route->recv_blocks - route->coming),
            .recv_bytes = route->coming * t->layout->bytes,
        };
    }
    use_staging(t, transfer->recv_blocks);
    return cpa_context_start(t->ops, transfer->n_routes, CPA_SPAN_EXCHANGE_KV, transfer->round, stream, &t->exchange);
}

cpa_status cpa_kv_transfers_finish(cpa_kv_transfers *t, int64_t index, cpa_stream *stream) {
    const cpa_kv_transfer *transfer = &t->list[index];
    CPA_TRY(cpa_context_finish(t->ops, stream, &t->exchange));
    for (int32_t i = 0; i < transfer->n_routes; i++) {
        const cpa_kv_route *route = &t->routes[transfer->route + i];
        char *region = staging_at(t, cpa_kv_transfers_recv_block(t, transfer, route->region));
        CPA_TRY(cpa_kv_squeeze_spread(t, transfer, route, region, stream));
    }
    return CPA_OK;
}

void cpa_kv_transfers_release(cpa_kv_transfers *t, int64_t index) {
    use_staging(t, -t->list[index].send_blocks - t->list[index].recv_blocks);
}
