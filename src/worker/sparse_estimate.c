#include "src/worker/sparse_estimate.h"

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/kv_view.h"

static float *floats_at(const cpa_worker_sparse *s, int which, int64_t at) {
    return (float *)s->buffers[which].memory + at;
}

/* What each rank has goes to all: `rows` of so many bytes of each, in the order of the ranks. */
static cpa_status share(cpa_worker *worker, const void *own, void *all, const int64_t *rows, int64_t row_bytes) {
    int64_t send[CPA_MERGE_MAX_STATES];
    const cpa_row_exchange *exchange = &worker->row_exchange;
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) send[rank] = rows[worker->rank];
    const cpa_row_exchange_args args = {.size = sizeof args,
                                        .row_bytes = row_bytes,
                                        .send_rows = send,
                                        .receive_rows = rows,
                                        .send = own,
                                        .receive = all,
                                        .to_all = 1};
    return exchange->exchange(exchange->ctx, &args, worker->stream);
}
static cpa_status share_evenly(cpa_worker *worker, int from, int to, int64_t rows, int64_t row_bytes) {
    int64_t each[CPA_MERGE_MAX_STATES];
    const cpa_worker_sparse *s = worker->sparse;
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) each[rank] = rows;
    return share(worker, s->buffers[from].memory, s->buffers[to].memory, each, row_bytes);
}

/* The groups of queries of all parts, on all ranks. */
static cpa_status pack_queries(cpa_worker *worker, const cpa_sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    const cpa_sparse_part *own = &s->parts[c->part + worker->rank];
    const int32_t n = cpa_sparse_ranks(worker);
    const int64_t row_bytes = cpa_shape_q_bytes(&worker->options.model.attention);
    int64_t rows[CPA_MERGE_MAX_STATES];
    const cpa_xattn_pack_q_args q = {.size = sizeof q,
                                     .shape = s->shape,
                                     .tokens = own->tokens,
                                     .q = (const char *)worker->q + c->row * row_bytes,
                                     .out = s->buffers[n > 1 ? CPA_SPARSE_PACKED_OWN : CPA_SPARSE_PACKED_Q].memory};
    CPA_TRY(cpa_xattn_pack_q(&q, worker->stream));
    if (n == 1) return CPA_OK;
    for (int32_t rank = 0; rank < n; rank++) rows[rank] = s->parts[c->part + rank].groups * s->shape.q_heads;
    return share(worker, s->buffers[CPA_SPARSE_PACKED_OWN].memory, s->buffers[CPA_SPARSE_PACKED_Q].memory, rows,
                 cpa_xattn_width(&s->shape) * cpa_dtype_bytes(s->shape.dtype));
}

/* Keys of a cache on the host are read as they lie there, each time: what belongs to a key, of all heads. */
static void count_read(cpa_worker *worker, const cpa_kv_view *kv, int64_t tokens) {
    const cpa_kv_view resolved = cpa_kv_view_resolve(*kv);
    const cpa_kv_pool keys = cpa_kv_pool_of(&resolved, CPA_KEYS);
    if (worker->options.ring_bytes > 0)
        worker->sparse->totals.host_bytes += tokens * kv->kv_heads * (keys.row_bytes + keys.scale_bytes);
}

/* The groups of own keys [first, first + tokens) of a chunk's sequence. */
static cpa_status pack_keys(cpa_worker *worker, const cpa_sparse_chunk *c, const cpa_kv_view *kv, int32_t group,
                            int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const cpa_table_set tables = {worker->tables, group};
    const int32_t *table = cpa_block_tables_device(tables) + cpa_block_tables_place(worker->tables, c->seq);
    const cpa_xattn_pack_k_args args = {.size = sizeof args,
                                        .shape = s->shape,
                                        .tokens = tokens,
                                        .kv = *kv,
                                        .table = table + first / kv->block_size,
                                        .out = s->buffers[CPA_SPARSE_PACKED_K].memory};
    count_read(worker, kv, tokens);
    return cpa_xattn_pack_k(&args, worker->stream);
}

/* A part of the queries against packed keys. */
static cpa_xattn_chunks chunks_of(const cpa_worker *worker, const cpa_sparse_chunk *c, int32_t rank, int64_t first,
                                  int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const cpa_sparse_part *part = &s->parts[c->part + rank];
    const int64_t width = cpa_xattn_width(&s->shape) * cpa_dtype_bytes(s->shape.dtype);
    return (cpa_xattn_chunks){.map = worker->options.map,
                              .q_set = cpa_sparse_chunk_set(worker, c->placement, rank),
                              .k_set = cpa_sparse_chunk_set(worker, c->placement, worker->rank),
                              .q_first = part->first,
                              .k_first = first,
                              .q_tokens = part->tokens,
                              .k_tokens = tokens,
                              .q = (const char *)s->buffers[CPA_SPARSE_PACKED_Q].memory + part->group * width,
                              .k = s->buffers[CPA_SPARSE_PACKED_K].memory};
}

static cpa_status add_stats(cpa_worker *worker, const cpa_sparse_chunk *c, int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) {
        const int64_t at = s->parts[c->part + rank].group;
        const cpa_xattn_stats_args args = {.size = sizeof args,
                                           .shape = s->shape,
                                           .chunks = chunks_of(worker, c, rank, first, tokens),
                                           .max = floats_at(s, CPA_SPARSE_STATS, at),
                                           .sum = floats_at(s, CPA_SPARSE_STATS, c->groups + at),
                                           .resume = first > 0};
        CPA_TRY(cpa_xattn_stats(&args, worker->stream));
    }
    return CPA_OK;
}

static cpa_status add_sums(cpa_worker *worker, const cpa_sparse_chunk *c, int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t width = cpa_xattn_blocks(&s->shape, c->most_keys);
    const int stats = cpa_sparse_ranks(worker) > 1 ? CPA_SPARSE_MERGED : CPA_SPARSE_STATS;
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) {
        const cpa_sparse_part *part = &s->parts[c->part + rank];
        const cpa_xattn_block_sums_args args = {
            .size = sizeof args,
            .shape = s->shape,
            .chunks = chunks_of(worker, c, rank, first, tokens),
            .max = floats_at(s, stats, part->group),
            .sum = floats_at(s, stats, c->groups + part->group),
            .sums = floats_at(s, CPA_SPARSE_SUMS, part->block * width + first / CPA_SPARSE_BLOCK),
            .row_stride = width};
        CPA_TRY(cpa_xattn_block_sums(&args, worker->stream));
    }
    return CPA_OK;
}

/* The statistics over own keys, or once those of all are there the sums, by chunks of keys. */
static cpa_status walk_keys(cpa_worker *worker, const cpa_sparse_chunk *c, const cpa_kv_view *kv, int32_t group,
                            int for_sums) {
    int64_t first = 0;
    do {
        const int64_t tokens = cpa_min64(CPA_SPARSE_KEYS_AT_ONCE, c->own_keys - first);
        if (!for_sums || c->own_keys > CPA_SPARSE_KEYS_AT_ONCE) CPA_TRY(pack_keys(worker, c, kv, group, first, tokens));
        CPA_TRY(for_sums ? add_sums(worker, c, first, tokens) : add_stats(worker, c, first, tokens));
        first += CPA_SPARSE_KEYS_AT_ONCE;
    } while (first < c->own_keys); /* without keys, too: statistics of none */
    return CPA_OK;
}

/* Statistics over the keys of all ranks, joined in the order of these. */
static cpa_status join_stats(cpa_worker *worker, const cpa_sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    if (cpa_sparse_ranks(worker) == 1) return CPA_OK;
    const int64_t stats = cpa_sparse_in_vectors(2 * c->groups);
    CPA_TRY(share_evenly(worker, CPA_SPARSE_STATS, CPA_SPARSE_ALL_STATS, stats, (int64_t)sizeof(float)));
    const cpa_xattn_merge_stats_args merge = {.size = sizeof merge,
                                              .rows = c->groups,
                                              .n = cpa_sparse_ranks(worker),
                                              .part_max = floats_at(s, CPA_SPARSE_ALL_STATS, 0),
                                              .part_sum = floats_at(s, CPA_SPARSE_ALL_STATS, c->groups),
                                              .part_stride = stats,
                                              .max = floats_at(s, CPA_SPARSE_MERGED, 0),
                                              .sum = floats_at(s, CPA_SPARSE_MERGED, c->groups)};
    return cpa_xattn_merge_stats(&merge, worker->stream);
}

/* All ranks have the same sums, and so the same bits. */
static cpa_status select_parts(cpa_worker *worker, const cpa_sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t width = cpa_xattn_blocks(&s->shape, c->most_keys),
                  of_rank = cpa_sparse_in_vectors(c->q_blocks * width);
    const int several = cpa_sparse_ranks(worker) > 1;
    if (several) CPA_TRY(share_evenly(worker, CPA_SPARSE_SUMS, CPA_SPARSE_ALL_SUMS, of_rank, (int64_t)sizeof(float)));
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) {
        const cpa_sparse_part *part = &s->parts[c->part + rank];
        const cpa_xattn_select_args args = {
            .size = sizeof args,
            .shape = s->shape,
            .map = worker->options.map,
            .q_set = cpa_sparse_chunk_set(worker, c->placement, rank),
            .q_first = part->first,
            .q_blocks = part->q_blocks,
            .k_blocks = c->k_blocks,
            .sums = floats_at(s, several ? CPA_SPARSE_ALL_SUMS : CPA_SPARSE_SUMS, part->block * width),
            .row_stride = width,
            .shard_stride = several ? of_rank : 0,
            .first_rank = several ? c->placement.rank : 0,
            .tau = worker->options.sparse_tau,
            .bits = (uint32_t *)s->buffers[CPA_SPARSE_BITS].memory + part->word,
            .words = s->words,
            .bits_stride = s->head_words,
            .counts = (int32_t *)s->buffers[CPA_SPARSE_COUNTS].memory + s->layers * s->layer_counts + part->count};
        CPA_TRY(cpa_xattn_select(&args, worker->stream));
    }
    return CPA_OK;
}

cpa_status cpa_sparse_select_chunk(cpa_worker *worker, const cpa_sparse_chunk *c, int32_t layer,
                                   const cpa_kv_view *kv) {
    const int32_t group = worker->places[layer].group;
    CPA_TRY(pack_queries(worker, c));
    CPA_TRY(walk_keys(worker, c, kv, group, 0));
    CPA_TRY(join_stats(worker, c));
    CPA_TRY(walk_keys(worker, c, kv, group, 1));
    return select_parts(worker, c);
}
