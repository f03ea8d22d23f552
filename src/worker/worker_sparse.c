#include "src/worker/worker_sparse.h"

#include <stdlib.h>

#include <cpattn/selection.h>
#include <cpattn/xattn.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/xattn.h"
#include "src/context/context_plan.h"

enum { BLOCK = CPA_XATTN_MOST_BLOCK };
/* Keys whose groups lie packed at once. */
static const int64_t KEYS_AT_ONCE = 32768;

/* The rows of a chunk on a rank, from its first whole block on: of the tokens that the rank holds. */
typedef struct sparse_part {
    int64_t first, tokens; /* local index of the first, a multiple of a block, and how many */
    int64_t groups, q_blocks;
    int64_t group;       /* groups of the parts before, times heads */
    int64_t block;       /* block rows of the parts before, times heads */
    int64_t word, count; /* where its bits, and the counts of a layer, begin */
} sparse_part;

/* A chunk that takes part. */
typedef struct sparse_chunk {
    int32_t seq;
    cpa_placement placement;
    int64_t row;                 /* of worker->q, of the first of own rows */
    int64_t keys, k_blocks;      /* of the sequence, up to the end of the chunk */
    int64_t own_keys, most_keys; /* of this rank, and of the rank with the most */
    int64_t groups, q_blocks;    /* of all parts, times heads */
    int64_t part;                /* the first of its parts, one a rank */
} sparse_chunk;

typedef struct buffer {
    void *memory;
    int64_t bytes;
} buffer;

/* On the device. STATS are those of own keys, the maxima of all parts and then the sums; ALL_STATS those of each rank. A
 * rank alone has no others. */
enum { PACKED_OWN, PACKED_Q, PACKED_K, STATS, ALL_STATS, MERGED, SUMS, ALL_SUMS, BITS, ROW_WORD, COUNTS, N_BUFFERS };

struct cpa_worker_sparse {
    cpa_xattn_shape shape;
    sparse_chunk *chunks;
    sparse_part *parts;
    int64_t n_chunks, cap_chunks, cap_parts;
    int64_t rows, words, head_words, layer_counts; /* of the step; of a block row, of a head; counts of a layer */
    int64_t seen;                                  /* blocks that the block rows of the step see, in a layer */
    int32_t layers;                                /* of the step that have selected so far */
    int64_t k_blocks;
    buffer buffers[N_BUFFERS];
    int64_t *row_word; /* page-locked, [cap_rows] */
    int32_t *counts;   /* page-locked, [layers, layer_counts] */
    int64_t cap_rows, cap_counts;
    cpa_key_blocks blocks;
    cpa_worker_sparse_stats totals;
};

static int32_t ranks_of(const cpa_worker *worker) {
    return worker->options.map.cp_size;
}
/* So many floats as are whole vectors of 16 bytes, of which messages are. */
static int64_t in_vectors(int64_t floats) {
    return (floats + 3) / 4 * 4;
}
static float *floats_at(const cpa_worker_sparse *s, int which, int64_t at) {
    return (float *)s->buffers[which].memory + at;
}

/* ---- what is taken ---- */

/* Devices widen codes for attention by blocks. Through a ring, where states are gone on from, they do not beside rows of
 * decode: the plain kernel would have both, hundreds of times slower than over all keys. */
static int widens_codes(const cpa_worker *worker) {
    return !worker->device->caps.bit_exact && cpa_dtype_is_quantised(worker->options.model.attention.kv_dtype);
}
static const char *device_refuses_codes(const cpa_worker_options *o) {
    const cpa_attention_shape *shape = &o->model.attention;
    if (o->map.cp_size > 1) return "a quantised cache on several devices";
    return shape->k_dim > 192 || shape->v_dim > 128 ? "a quantised cache of wide heads on a device" : NULL;
}

static cpa_status check_worker(const cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const char *why = NULL;
    if (o->map.cp_size > 1 && o->map.interleave % BLOCK != 0)
        return cpa_fail(err, CPA_INVALID,
                        "sparse: the interleave is %d, expected a multiple of the %d tokens of a block of XAttention",
                        o->map.interleave, BLOCK);
    if (o->model.attention.v_in_k || worker->forms.count > 1) why = "latents";
    if (!why && widens_codes(worker)) why = device_refuses_codes(o);
    if (!cpa_xattn_reads(o->model.attention.kv_dtype)) why = "a cache of several scales a row";
    if (worker->network->select) why = "a model that selects keys itself";
    if (o->model.attention.k_dim > CPA_XATTN_MOST_DIM || o->model.attention.k_dim % 8 != 0)
        why = "heads that are no multiple of 8 columns up to 256";
    for (int32_t layer = 0; layer < o->model.layers && !why; layer++) {
        const cpa_score_rules *rules = cpa_model_rules(&o->model, layer);
        if (rules && (rules->softcap > 0 || rules->temperature_len > 0 || rules->alibi_slopes))
            why = "rules that change scores, which the estimate does not follow";
    }
    if (!why) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "sparse: XAttention with %s, expected none", why);
}

/* The first token of a whole block. */
static int64_t first_of(const cpa_plan_chunk *chunk) {
    return (chunk->start + BLOCK - 1) / BLOCK * BLOCK;
}

/* Prompts of fewer keys than stride blocks attend all, as do sequences that lie on one rank of several, which are short,
 * and what of a chunk is no whole block. */
static int takes_chunk(const cpa_worker *worker, const cpa_plan_chunk *chunk) {
    const int64_t end = chunk->start + chunk->count;
    return chunk->drafts == 0 && end >= (int64_t)worker->options.sparse_stride * BLOCK &&
           end - first_of(chunk) >= BLOCK && end <= (int64_t)CPA_XATTN_MOST_BLOCKS * BLOCK &&
           (ranks_of(worker) == 1 || chunk->placement.kind == CPA_SHARDED);
}

int cpa_worker_sparse_takes(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_worker_rows *rows = worker->rows;
    int takes = 0;
    if (!worker->sparse || rows->sizes.masked_rows > 0 || (rows->replicated && ranks_of(worker) > 1)) return 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        if (widens_codes(worker) && worker->options.ring_bytes > 0 && plan->chunks[i].count < BLOCK) return 0;
        takes |= takes_chunk(worker, &plan->chunks[i]);
    }
    return takes;
}

static int takes_layer(const cpa_worker *worker, int32_t layer) {
    const cpa_mask mask = cpa_model_mask(&worker->options.model, layer);
    return mask.causal && mask.window == 0;
}

/* The tokens of a chunk's sequence that a rank has. */
static cpa_token_set set_of(const cpa_worker *worker, cpa_placement placement, int32_t rank) {
    const cpa_token_set all = {CPA_TOKENS_ALL, 0};
    return ranks_of(worker) == 1 ? all : cpa_tokens_on(worker->options.map, placement, rank);
}
static int64_t tokens_before(const cpa_worker *worker, cpa_placement placement, int32_t rank, int64_t index) {
    return cpa_tokens_before(worker->options.map, set_of(worker, placement, rank), index);
}

/* ---- room ---- */

static cpa_status reserve(cpa_worker *worker, int which, int64_t bytes, cpa_error *err) {
    buffer *of = &worker->sparse->buffers[which];
    if (bytes <= of->bytes) return CPA_OK;
    worker->device->table->free(worker->device, of->memory);
    *of = (buffer){NULL, 0};
    CPA_TRY(worker->device->table->alloc(worker->device, bytes + bytes / 4, &of->memory, err));
    of->bytes = bytes + bytes / 4;
    return CPA_OK;
}

static cpa_status reserve_host(cpa_worker *worker, void **memory, int64_t *capacity, int64_t n, int64_t bytes,
                               cpa_error *err) {
    if (n <= *capacity) return CPA_OK;
    worker->device->table->free_host(worker->device, *memory);
    *memory = NULL, *capacity = 0;
    CPA_TRY(worker->device->table->alloc_host(worker->device, n * bytes, memory, err));
    *capacity = n;
    return CPA_OK;
}

/* The chunks of a step share what a chunk needs by itself. */
static cpa_status make_room_for(cpa_worker *worker, const sparse_chunk *c, cpa_error *err) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t n = ranks_of(worker), element = cpa_dtype_bytes(s->shape.dtype), number = (int64_t)sizeof(float);
    const int64_t keys = cpa_min64(c->own_keys, KEYS_AT_ONCE), row = cpa_xattn_width(&s->shape) * element;
    const int64_t sums = in_vectors(c->q_blocks * cpa_xattn_blocks(&s->shape, c->most_keys)) * number;
    const int64_t stats = in_vectors(2 * c->groups) * number;
    CPA_TRY(reserve(worker, PACKED_Q, c->groups * row, err));
    CPA_TRY(reserve(worker, PACKED_K, cpa_xattn_packed_bytes(&s->shape, s->shape.kv_heads, keys), err));
    CPA_TRY(reserve(worker, STATS, stats, err));
    CPA_TRY(reserve(worker, SUMS, sums, err));
    if (n == 1) return CPA_OK;
    CPA_TRY(reserve(worker, PACKED_OWN, s->parts[c->part + worker->rank].groups * s->shape.q_heads * row, err));
    CPA_TRY(reserve(worker, ALL_STATS, n * stats, err));
    CPA_TRY(reserve(worker, MERGED, stats, err));
    return reserve(worker, ALL_SUMS, n * sums, err);
}

static cpa_status make_room(cpa_worker *worker, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    const int64_t counts = worker->options.model.layers * s->layer_counts;
    for (int64_t i = 0; i < s->n_chunks; i++) CPA_TRY(make_room_for(worker, &s->chunks[i], err));
    CPA_TRY(reserve(worker, BITS, s->shape.q_heads * s->head_words * (int64_t)sizeof(uint32_t), err));
    CPA_TRY(reserve(worker, ROW_WORD, s->rows * (int64_t)sizeof *s->row_word, err));
    CPA_TRY(reserve(worker, COUNTS, counts * (int64_t)sizeof *s->counts, err));
    CPA_TRY(reserve_host(worker, (void **)&s->counts, &s->cap_counts, counts, sizeof *s->counts, err));
    return reserve_host(worker, (void **)&s->row_word, &s->cap_rows, s->rows, sizeof *s->row_word, err);
}

/* ---- a step ---- */

/* The parts of a chunk, and what is counted of all. */
static void list_parts(cpa_worker *worker, const cpa_plan_chunk *chunk, sparse_chunk *c) {
    cpa_worker_sparse *s = worker->sparse;
    const int64_t end = chunk->start + chunk->count, first = first_of(chunk), heads = s->shape.q_heads;
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) {
        sparse_part *part = &s->parts[c->part + rank];
        const int64_t keys = tokens_before(worker, c->placement, rank, end);
        *part = (sparse_part){.first = tokens_before(worker, c->placement, rank, first)};
        part->tokens = keys - part->first;
        part->groups = cpa_xattn_groups(&s->shape, part->tokens);
        part->q_blocks = cpa_xattn_blocks(&s->shape, part->tokens);
        part->group = c->groups, part->block = c->q_blocks;
        c->groups += heads * part->groups;
        c->q_blocks += heads * part->q_blocks;
        if (keys > c->most_keys) c->most_keys = keys;
        if (rank == worker->rank) c->own_keys = keys;
        for (int64_t block = 0; block < part->q_blocks; block++)
            s->seen += heads * (cpa_token_index(worker->options.map, set_of(worker, c->placement, rank),
                                                part->first + block * BLOCK) /
                                    BLOCK +
                                1);
    }
}

static cpa_status list_chunks(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    const int32_t n = ranks_of(worker);
    int64_t own_row = 0;
    s->n_chunks = s->rows = s->k_blocks = s->seen = 0;
    if (!cpa_array_reserve(&s->chunks, &s->cap_chunks, plan->n_chunks, sizeof *s->chunks) ||
        !cpa_array_reserve(&s->parts, &s->cap_parts, plan->n_chunks * n, sizeof *s->parts))
        return cpa_fail(err, CPA_NO_MEMORY, "sparse: no memory for %lld chunks", (long long)plan->n_chunks);
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int64_t end = chunk->start + chunk->count;
        const int64_t before = tokens_before(worker, chunk->placement, worker->rank, chunk->start);
        const int64_t row = own_row + tokens_before(worker, chunk->placement, worker->rank, first_of(chunk)) - before;
        own_row += tokens_before(worker, chunk->placement, worker->rank, end) - before;
        s->rows += chunk->count;
        if (!takes_chunk(worker, chunk)) continue;
        sparse_chunk *c = &s->chunks[s->n_chunks];
        *c = (sparse_chunk){.seq = chunk->seq,
                            .placement = chunk->placement,
                            .row = row,
                            .keys = end,
                            .k_blocks = cpa_xattn_blocks(&s->shape, end),
                            .part = s->n_chunks++ * n};
        list_parts(worker, chunk, c);
        s->k_blocks = cpa_max64(s->k_blocks, c->k_blocks);
    }
    s->words = cpa_mask_words(s->k_blocks);
    s->head_words = s->layer_counts = 0;
    for (int64_t i = 0; i < s->n_chunks * n; i++) {
        s->parts[i].word = s->head_words;
        s->parts[i].count = s->layer_counts;
        s->head_words += s->parts[i].q_blocks * s->words;
        s->layer_counts += s->shape.q_heads * s->parts[i].q_blocks;
    }
    return CPA_OK;
}

/* The words of all rows of the step, chunk after chunk. */
static void list_words(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_worker_sparse *s = worker->sparse;
    const cpa_owner_map map = worker->options.map;
    int64_t row = 0, taken = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int takes = takes_chunk(worker, chunk);
        for (int64_t t = chunk->start; t < chunk->start + chunk->count; t++, row++) {
            s->row_word[row] = -1;
            if (!takes || t < first_of(chunk)) continue;
            const int32_t rank = ranks_of(worker) == 1 ? 0 : cpa_owner_rank(map, chunk->placement, t);
            const sparse_part *part = &s->parts[s->chunks[taken].part + rank];
            const int64_t local = tokens_before(worker, chunk->placement, rank, t) - part->first;
            s->row_word[row] = part->word + local / BLOCK * s->words;
        }
        taken += takes;
    }
}

cpa_status cpa_worker_sparse_begin(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return CPA_OK;
    s->layers = 0;
    s->n_chunks = 0;
    if (!cpa_worker_sparse_takes(worker, plan)) return CPA_OK;
    CPA_TRY(list_chunks(worker, plan, err));
    CPA_TRY(make_room(worker, err));
    list_words(worker, plan);
    s->blocks = (cpa_key_blocks){.bits = s->buffers[BITS].memory,
                                 .row_word = s->buffers[ROW_WORD].memory,
                                 .head_stride = s->head_words,
                                 .width = (int32_t)s->k_blocks,
                                 .block = BLOCK};
    return worker->device->table->copy(s->buffers[ROW_WORD].memory, s->row_word, s->rows * (int64_t)sizeof *s->row_word,
                                       worker->stream);
}

int64_t cpa_worker_sparse_word(const cpa_worker *worker, int64_t row) {
    return worker->sparse->row_word[row];
}

/* ---- a layer ---- */

/* What each rank has goes to all: `rows` of so many bytes of each, in the order of the ranks. */
static cpa_status share(cpa_worker *worker, const void *own, void *all, const int64_t *rows, int64_t row_bytes) {
    int64_t send[CPA_MERGE_MAX_STATES];
    const cpa_row_exchange *exchange = &worker->row_exchange;
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) send[rank] = rows[worker->rank];
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
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) each[rank] = rows;
    return share(worker, s->buffers[from].memory, s->buffers[to].memory, each, row_bytes);
}

/* The groups of queries of all parts, on all ranks. */
static cpa_status pack_queries(cpa_worker *worker, const sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    const sparse_part *own = &s->parts[c->part + worker->rank];
    const int32_t n = ranks_of(worker);
    const int64_t row_bytes = cpa_shape_q_bytes(&worker->options.model.attention);
    int64_t rows[CPA_MERGE_MAX_STATES];
    const cpa_xattn_pack_q_args q = {.size = sizeof q,
                                     .shape = s->shape,
                                     .tokens = own->tokens,
                                     .q = (const char *)worker->q + c->row * row_bytes,
                                     .out = s->buffers[n > 1 ? PACKED_OWN : PACKED_Q].memory};
    CPA_TRY(cpa_xattn_pack_q(&q, worker->stream));
    if (n == 1) return CPA_OK;
    for (int32_t rank = 0; rank < n; rank++) rows[rank] = s->parts[c->part + rank].groups * s->shape.q_heads;
    return share(worker, s->buffers[PACKED_OWN].memory, s->buffers[PACKED_Q].memory, rows,
                 cpa_xattn_width(&s->shape) * cpa_dtype_bytes(s->shape.dtype));
}

/* The groups of own keys [first, first + tokens) of a chunk's sequence. */
static cpa_status pack_keys(cpa_worker *worker, const sparse_chunk *c, const cpa_kv_view *kv, int32_t group,
                            int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const cpa_table_set tables = {worker->tables, group};
    const int32_t *table = cpa_block_tables_device(tables) + cpa_block_tables_place(worker->tables, c->seq);
    const cpa_xattn_pack_k_args args = {.size = sizeof args,
                                        .shape = s->shape,
                                        .tokens = tokens,
                                        .kv = *kv,
                                        .table = table + first / kv->block_size,
                                        .out = s->buffers[PACKED_K].memory};
    return cpa_xattn_pack_k(&args, worker->stream);
}

/* A part of the queries against packed keys. */
static cpa_xattn_chunks chunks_of(const cpa_worker *worker, const sparse_chunk *c, int32_t rank, int64_t first,
                                  int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const sparse_part *part = &s->parts[c->part + rank];
    const int64_t width = cpa_xattn_width(&s->shape) * cpa_dtype_bytes(s->shape.dtype);
    return (cpa_xattn_chunks){.map = worker->options.map,
                              .q_set = set_of(worker, c->placement, rank),
                              .k_set = set_of(worker, c->placement, worker->rank),
                              .q_first = part->first,
                              .k_first = first,
                              .q_tokens = part->tokens,
                              .k_tokens = tokens,
                              .q = (const char *)s->buffers[PACKED_Q].memory + part->group * width,
                              .k = s->buffers[PACKED_K].memory};
}

static cpa_status add_stats(cpa_worker *worker, const sparse_chunk *c, int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) {
        const int64_t at = s->parts[c->part + rank].group;
        const cpa_xattn_stats_args args = {.size = sizeof args,
                                           .shape = s->shape,
                                           .chunks = chunks_of(worker, c, rank, first, tokens),
                                           .max = floats_at(s, STATS, at),
                                           .sum = floats_at(s, STATS, c->groups + at),
                                           .resume = first > 0};
        CPA_TRY(cpa_xattn_stats(&args, worker->stream));
    }
    return CPA_OK;
}

static cpa_status add_sums(cpa_worker *worker, const sparse_chunk *c, int64_t first, int64_t tokens) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t width = cpa_xattn_blocks(&s->shape, c->most_keys);
    const int stats = ranks_of(worker) > 1 ? MERGED : STATS;
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) {
        const sparse_part *part = &s->parts[c->part + rank];
        const cpa_xattn_block_sums_args args = {.size = sizeof args,
                                                .shape = s->shape,
                                                .chunks = chunks_of(worker, c, rank, first, tokens),
                                                .max = floats_at(s, stats, part->group),
                                                .sum = floats_at(s, stats, c->groups + part->group),
                                                .sums = floats_at(s, SUMS, part->block * width + first / BLOCK),
                                                .row_stride = width};
        CPA_TRY(cpa_xattn_block_sums(&args, worker->stream));
    }
    return CPA_OK;
}

/* The statistics over own keys, or once those of all are there the sums, by chunks of keys. */
static cpa_status walk_keys(cpa_worker *worker, const sparse_chunk *c, const cpa_kv_view *kv, int32_t group,
                            int for_sums) {
    int64_t first = 0;
    do {
        const int64_t tokens = cpa_min64(KEYS_AT_ONCE, c->own_keys - first);
        if (!for_sums || c->own_keys > KEYS_AT_ONCE) CPA_TRY(pack_keys(worker, c, kv, group, first, tokens));
        CPA_TRY(for_sums ? add_sums(worker, c, first, tokens) : add_stats(worker, c, first, tokens));
        first += KEYS_AT_ONCE;
    } while (first < c->own_keys); /* without keys, too: statistics of none */
    return CPA_OK;
}

/* Statistics over the keys of all ranks, joined in the order of these. */
static cpa_status join_stats(cpa_worker *worker, const sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    if (ranks_of(worker) == 1) return CPA_OK;
    const int64_t stats = in_vectors(2 * c->groups);
    CPA_TRY(share_evenly(worker, STATS, ALL_STATS, stats, (int64_t)sizeof(float)));
    const cpa_xattn_merge_stats_args merge = {.size = sizeof merge,
                                              .rows = c->groups,
                                              .n = ranks_of(worker),
                                              .part_max = floats_at(s, ALL_STATS, 0),
                                              .part_sum = floats_at(s, ALL_STATS, c->groups),
                                              .part_stride = stats,
                                              .max = floats_at(s, MERGED, 0),
                                              .sum = floats_at(s, MERGED, c->groups)};
    return cpa_xattn_merge_stats(&merge, worker->stream);
}

/* All ranks have the same sums, and so the same bits. */
static cpa_status select_parts(cpa_worker *worker, const sparse_chunk *c) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t width = cpa_xattn_blocks(&s->shape, c->most_keys), of_rank = in_vectors(c->q_blocks * width);
    const int several = ranks_of(worker) > 1;
    if (several) CPA_TRY(share_evenly(worker, SUMS, ALL_SUMS, of_rank, (int64_t)sizeof(float)));
    for (int32_t rank = 0; rank < ranks_of(worker); rank++) {
        const sparse_part *part = &s->parts[c->part + rank];
        const cpa_xattn_select_args args = {
            .size = sizeof args,
            .shape = s->shape,
            .map = worker->options.map,
            .q_set = set_of(worker, c->placement, rank),
            .q_first = part->first,
            .q_blocks = part->q_blocks,
            .k_blocks = c->k_blocks,
            .sums = floats_at(s, several ? ALL_SUMS : SUMS, part->block * width),
            .row_stride = width,
            .shard_stride = several ? of_rank : 0,
            .first_rank = several ? c->placement.rank : 0,
            .tau = worker->options.sparse_tau,
            .bits = (uint32_t *)s->buffers[BITS].memory + part->word,
            .words = s->words,
            .bits_stride = s->head_words,
            .counts = (int32_t *)s->buffers[COUNTS].memory + s->layers * s->layer_counts + part->count};
        CPA_TRY(cpa_xattn_select(&args, worker->stream));
    }
    return CPA_OK;
}

static cpa_status select_chunk(cpa_worker *worker, const sparse_chunk *c, int32_t layer, const cpa_kv_view *kv) {
    const int32_t group = worker->places[layer].group;
    CPA_TRY(pack_queries(worker, c));
    CPA_TRY(walk_keys(worker, c, kv, group, 0));
    CPA_TRY(join_stats(worker, c));
    CPA_TRY(walk_keys(worker, c, kv, group, 1));
    return select_parts(worker, c);
}

static cpa_status copy_counts(cpa_worker *worker) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t at = s->layers * s->layer_counts;
    return worker->device->table->copy(s->counts + at, (const int32_t *)s->buffers[COUNTS].memory + at,
                                       s->layer_counts * (int64_t)sizeof *s->counts, worker->stream);
}

cpa_status cpa_worker_sparse_select(cpa_worker *worker, int32_t layer, const cpa_kv_view *kv,
                                    const cpa_key_blocks **out, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    *out = NULL;
    if (!s || s->n_chunks == 0 || !takes_layer(worker, layer)) return CPA_OK;
    cpa_status status = cpa_context_upload_tables(worker->context, worker->stream);
    for (int64_t i = 0; status == CPA_OK && i < s->n_chunks; i++)
        status = select_chunk(worker, &s->chunks[i], layer, kv);
    if (status == CPA_OK) status = copy_counts(worker);
    if (status != CPA_OK) return cpa_fail(err, status, "layer %d: sparse: %s", layer, worker->stream->error.message);
    s->layers++;
    *out = &s->blocks;
    return CPA_OK;
}

/* What the rows of each rank have kept in a layer. */
static void count_layer(cpa_worker *worker, const int32_t *counts) {
    cpa_worker_sparse *s = worker->sparse;
    const int32_t n = ranks_of(worker);
    int64_t busiest = 0;
    for (int32_t rank = 0; rank < n; rank++) {
        int64_t kept = 0;
        for (int64_t chunk = 0; chunk < s->n_chunks; chunk++) {
            const sparse_part *part = &s->parts[chunk * n + rank];
            for (int64_t i = 0; i < s->shape.q_heads * part->q_blocks; i++) kept += counts[part->count + i];
        }
        s->totals.kept += kept;
        busiest = cpa_max64(busiest, kept);
    }
    s->totals.busiest += busiest;
}

void cpa_worker_sparse_end(cpa_worker *worker) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return;
    for (int32_t layer = 0; layer < s->layers; layer++) count_layer(worker, s->counts + layer * s->layer_counts);
    s->totals.seen += s->layers * s->seen;
    s->layers = 0;
}

cpa_worker_sparse_stats cpa_worker_sparse_totals(const cpa_worker *worker) {
    cpa_worker_sparse_stats totals = {0};
    if (!worker->sparse) return totals;
    totals = worker->sparse->totals;
    for (int i = 0; i < N_BUFFERS; i++) totals.bytes += worker->sparse->buffers[i].bytes;
    return totals;
}

/* ---- for the life of a worker ---- */

cpa_status cpa_worker_sparse_create(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape *shape = &o->model.attention;
    if (o->sparse_stride == 0) return CPA_OK;
    CPA_TRY(check_worker(worker, err));
    worker->sparse = calloc(1, sizeof *worker->sparse);
    if (!worker->sparse) return cpa_fail(err, CPA_NO_MEMORY, "sparse: no memory");
    worker->sparse->shape = (cpa_xattn_shape){.stride = o->sparse_stride,
                                              .block = BLOCK,
                                              .q_heads = shape->q_heads,
                                              .kv_heads = shape->kv_heads,
                                              .dim = shape->k_dim,
                                              .dtype = shape->dtype,
                                              .causal = 1};
    return CPA_OK;
}

void cpa_worker_sparse_destroy(cpa_worker *worker) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return;
    for (int i = 0; i < N_BUFFERS; i++) worker->device->table->free(worker->device, s->buffers[i].memory);
    worker->device->table->free_host(worker->device, s->row_word);
    worker->device->table->free_host(worker->device, s->counts);
    free(s->chunks);
    free(s->parts);
    free(s);
    worker->sparse = NULL;
}
