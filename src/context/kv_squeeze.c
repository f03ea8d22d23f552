#include "src/context/kv_squeeze.h"

#include "base/check.h"
#include "base/min_max.h"

/* Lists the places in the segment, ascending, of what is wanted of a rank's keys; -1 in *n: more than pays. */
static cpa_status list_places(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, int32_t rank, int64_t blocks,
                              int64_t *n) {
    const int64_t block_size = t->ops->options.block_size;
    *n = 0;
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->squeeze.places, &t->squeeze.places_capacity, blocks,
                                     sizeof *t->squeeze.places));
    for (int64_t i = transfer->stretch; i < transfer->stretch + transfer->n_stretches; i++) {
        const cpa_kv_stretch *of = &t->stretches[i];
        if (of->rank != rank) continue;
        const cpa_token_set tokens = cpa_tokens_on(t->ops->map, t->wanted->step->chunks[of->chunk].placement, of->rank);
        for (int64_t at = 0; at < of->count; at += block_size) {
            const int64_t key = cpa_token_index(t->ops->map, tokens, of->first + at);
            if (cpa_kv_wanted_has(t->wanted, of->chunk, rank, key))
                t->squeeze.places[(*n)++] = of->block + at / block_size;
        }
    }
    if (100 * *n > CPA_KV_MOST_SQUEEZED * blocks) *n = -1;
    return CPA_OK;
}

/* The part of the transfer's ranges that is wanted, one behind the other. */
static cpa_status list_ranges(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, int64_t *n_ranges) {
    const int64_t block_size = t->ops->options.block_size;
    int64_t n = 0, next = 0;
    CPA_TRY(cpa_context_ensure_array(t->ops, &t->squeeze.ranges, &t->squeeze.ranges_capacity, transfer->going,
                                     sizeof *t->squeeze.ranges));
    for (int64_t i = transfer->range; i < transfer->range + transfer->n_ranges; i++) {
        const cpa_kv_range *of = &t->ranges[i];
        const int64_t end = of->dst_block + cpa_ceil_div(of->count, block_size);
        for (int64_t last = -2; next < transfer->going && t->squeeze.places[next] < end; next++) {
            const int64_t place = t->squeeze.places[next], at = (place - of->dst_block) * block_size;
            const int64_t count = cpa_min64(block_size, of->count - at);
            if (place == last + 1)
                t->squeeze.ranges[n - 1].count += count;
            else
                t->squeeze.ranges[n++] =
                    (cpa_kv_range){.table = of->table, .first = of->first + at, .count = count, .dst_block = next};
            last = place;
        }
    }
    *n_ranges = n;
    return CPA_OK;
}

static cpa_status ensure_pairs(cpa_kv_transfers *t, int64_t n) {
    return cpa_context_ensure_array(t->ops, &t->squeeze.pairs, &t->squeeze.pairs_capacity, n, sizeof *t->squeeze.pairs);
}

cpa_status cpa_kv_squeeze_send(cpa_kv_transfers *t, cpa_kv_transfer *transfer, const cpa_kv_range **ranges,
                               int64_t *n_ranges) {
    int64_t n = -1;
    *ranges = t->ranges + transfer->range;
    *n_ranges = transfer->n_ranges;
    if (t->wanted && transfer->send_blocks > 0)
        CPA_TRY(list_places(t, transfer, t->ops->rank, transfer->send_blocks, &n));
    transfer->going = n < 0 ? transfer->send_blocks : n;
    if (n <= 0 || !transfer->packs) return CPA_OK;
    CPA_TRY(ensure_pairs(t, n));
    CPA_TRY(list_ranges(t, transfer, n_ranges));
    *ranges = t->squeeze.ranges;
    return CPA_OK;
}

cpa_status cpa_kv_squeeze_count(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, cpa_kv_route *route) {
    int64_t n = -1;
    if (t->wanted && route->recv_blocks > 0) CPA_TRY(list_places(t, transfer, route->peer, route->recv_blocks, &n));
    route->coming = n < 0 ? route->recv_blocks : n;
    return CPA_OK;
}

cpa_status cpa_kv_squeeze_spread(cpa_kv_transfers *t, const cpa_kv_transfer *transfer, const cpa_kv_route *route,
                                 char *region, cpa_stream *stream) {
    const int64_t from = route->recv_blocks - route->coming;
    int64_t n;
    if (from == 0 || route->coming == 0) return CPA_OK;
    CPA_TRY(list_places(t, transfer, route->peer, route->recv_blocks, &n));
    CPA_TRY(ensure_pairs(t, n));
    const int64_t *places = t->squeeze.places;
    /* Those whose places are free at once: they lie before the first block that has not moved. */
    for (int64_t first = 0, end; first < n; first = end) {
        cpa_copy_blocks_args copy = {.src = {region, t->layout->bytes, 0},
                                     .dst = {region, t->layout->bytes, 0},
                                     .bytes = t->layout->bytes,
                                     .layers = 1,
                                     .pairs = (const int64_t(*)[2])t->squeeze.pairs};
        for (end = first; end < n && places[end] < from + first; end++, copy.n_pairs++) {
            t->squeeze.pairs[copy.n_pairs][0] = from + end;
            t->squeeze.pairs[copy.n_pairs][1] = places[end];
        }
        if (end == first) return CPA_OK; /* it lies in its place, as do all behind it */
        CPA_TRY(cpa_context_check(t->ops, t->ops->device->operators->copy_blocks(&copy, stream), stream));
    }
    return CPA_OK;
}
