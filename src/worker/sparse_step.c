#include "src/worker/sparse_step.h"

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"

/* The first token of a whole block. */
static int64_t first_of(const cpa_plan_chunk *chunk) {
    return cpa_ceil_div(chunk->start, CPA_SPARSE_BLOCK) * CPA_SPARSE_BLOCK;
}

int cpa_sparse_takes_chunk(const cpa_worker *worker, const cpa_plan_chunk *chunk) {
    const int64_t end = chunk->start + chunk->count;
    return chunk->drafts == 0 && end >= (int64_t)worker->options.sparse_stride * CPA_SPARSE_BLOCK &&
           end - first_of(chunk) >= CPA_SPARSE_BLOCK && end <= (int64_t)CPA_XATTN_MOST_BLOCKS * CPA_SPARSE_BLOCK &&
           (cpa_sparse_ranks(worker) == 1 || chunk->placement.kind == CPA_SHARDED);
}

cpa_token_set cpa_sparse_chunk_set(const cpa_worker *worker, cpa_placement placement, int32_t rank) {
    const cpa_token_set all = {CPA_TOKENS_ALL, 0};
    return cpa_sparse_ranks(worker) == 1 ? all : cpa_tokens_on(worker->options.map, placement, rank);
}
static int64_t tokens_before(const cpa_worker *worker, cpa_placement placement, int32_t rank, int64_t index) {
    return cpa_tokens_before(worker->options.map, cpa_sparse_chunk_set(worker, placement, rank), index);
}

static cpa_status reserve(cpa_worker *worker, int which, int64_t bytes, cpa_error *err) {
    cpa_sparse_buffer *of = &worker->sparse->buffers[which];
    if (bytes <= of->bytes) return CPA_OK;
    worker->device->table->free(worker->device, of->memory);
    *of = (cpa_sparse_buffer){NULL, 0};
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
static cpa_status make_room_for(cpa_worker *worker, const cpa_sparse_chunk *c, cpa_error *err) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t n = cpa_sparse_ranks(worker), number = (int64_t)sizeof(float);
    const int64_t keys = cpa_min64(c->own_keys, CPA_SPARSE_KEYS_AT_ONCE);
    const int64_t row = cpa_xattn_width(&s->shape) * cpa_dtype_bytes(s->shape.dtype);
    const int64_t sums = cpa_sparse_in_vectors(c->q_blocks * cpa_xattn_blocks(&s->shape, c->most_keys)) * number;
    const int64_t stats = cpa_sparse_in_vectors(2 * c->groups) * number;
    CPA_TRY(reserve(worker, CPA_SPARSE_PACKED_Q, c->groups * row, err));
    CPA_TRY(reserve(worker, CPA_SPARSE_PACKED_K, cpa_xattn_packed_bytes(&s->shape, s->shape.kv_heads, keys), err));
    CPA_TRY(reserve(worker, CPA_SPARSE_STATS, stats, err));
    CPA_TRY(reserve(worker, CPA_SPARSE_SUMS, sums, err));
    if (n == 1) return CPA_OK;
    const int64_t own_groups = s->shape.q_heads * s->parts[c->part + worker->rank].groups;
    CPA_TRY(reserve(worker, CPA_SPARSE_PACKED_OWN, own_groups * row, err));
    CPA_TRY(reserve(worker, CPA_SPARSE_ALL_STATS, n * stats, err));
    CPA_TRY(reserve(worker, CPA_SPARSE_MERGED, stats, err));
    return reserve(worker, CPA_SPARSE_ALL_SUMS, n * sums, err);
}

cpa_status cpa_sparse_make_room(cpa_worker *worker, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    const int64_t counts = worker->options.model.layers * s->layer_counts;
    for (int64_t i = 0; i < s->n_chunks; i++) CPA_TRY(make_room_for(worker, &s->chunks[i], err));
    CPA_TRY(reserve(worker, CPA_SPARSE_BITS, s->shape.q_heads * s->head_words * (int64_t)sizeof(uint32_t), err));
    CPA_TRY(reserve(worker, CPA_SPARSE_ROW_WORD, s->rows * (int64_t)sizeof *s->row_word, err));
    CPA_TRY(reserve(worker, CPA_SPARSE_COUNTS, counts * (int64_t)sizeof *s->counts, err));
    CPA_TRY(reserve_host(worker, (void **)&s->counts, &s->cap_counts, counts, sizeof *s->counts, err));
    return reserve_host(worker, (void **)&s->row_word, &s->cap_rows, s->rows, sizeof *s->row_word, err);
}

/* The parts of a chunk, and what is counted of all. */
static void list_parts(cpa_worker *worker, const cpa_plan_chunk *chunk, cpa_sparse_chunk *c) {
    cpa_worker_sparse *s = worker->sparse;
    const int64_t end = chunk->start + chunk->count, first = first_of(chunk), heads = s->shape.q_heads;
    for (int32_t rank = 0; rank < cpa_sparse_ranks(worker); rank++) {
        cpa_sparse_part *part = &s->parts[c->part + rank];
        const int64_t keys = tokens_before(worker, c->placement, rank, end);
        *part = (cpa_sparse_part){.first = tokens_before(worker, c->placement, rank, first)};
        part->tokens = keys - part->first;
        part->groups = cpa_xattn_groups(&s->shape, part->tokens);
        part->q_blocks = cpa_xattn_blocks(&s->shape, part->tokens);
        part->group = c->groups, part->block = c->q_blocks;
        c->groups += heads * part->groups;
        c->q_blocks += heads * part->q_blocks;
        if (keys > c->most_keys) c->most_keys = keys;
        if (rank == worker->rank) c->own_keys = keys;
        for (int64_t block = 0; block < part->q_blocks; block++)
            s->seen += heads * (cpa_token_index(worker->options.map, cpa_sparse_chunk_set(worker, c->placement, rank),
                                                part->first + block * CPA_SPARSE_BLOCK) /
                                    CPA_SPARSE_BLOCK +
                                1);
    }
}

cpa_status cpa_sparse_list_chunks(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    const int32_t n = cpa_sparse_ranks(worker);
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
        if (!cpa_sparse_takes_chunk(worker, chunk)) continue;
        cpa_sparse_chunk *c = &s->chunks[s->n_chunks];
        *c = (cpa_sparse_chunk){.seq = chunk->seq,
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

void cpa_sparse_list_words(cpa_worker *worker, const cpa_step_plan *plan) {
    cpa_worker_sparse *s = worker->sparse;
    const cpa_owner_map map = worker->options.map;
    int64_t row = 0, taken = 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int takes = cpa_sparse_takes_chunk(worker, chunk);
        for (int64_t t = chunk->start; t < chunk->start + chunk->count; t++, row++) {
            s->row_word[row] = -1;
            if (!takes || t < first_of(chunk)) continue;
            const int32_t rank = cpa_sparse_ranks(worker) == 1 ? 0 : cpa_owner_rank(map, chunk->placement, t);
            const cpa_sparse_part *part = &s->parts[s->chunks[taken].part + rank];
            const int64_t local = tokens_before(worker, chunk->placement, rank, t) - part->first;
            s->row_word[row] = part->word + local / CPA_SPARSE_BLOCK * s->words;
        }
        taken += takes;
    }
}
