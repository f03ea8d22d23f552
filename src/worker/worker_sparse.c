#include "src/worker/worker_sparse.h"

#include <stdlib.h>

#include <cpattn/selection.h>
#include <cpattn/xattn.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/context/context_plan.h"

enum { BLOCK = CPA_XATTN_MOST_BLOCK };
/* Keys whose groups lie packed at once. */
static const int64_t KEYS_AT_ONCE = 32768;

/* A chunk that takes part, from its first whole block on. */
typedef struct sparse_chunk {
    int32_t seq;
    int64_t row; /* of the step */
    int64_t first, tokens, keys;
    int64_t q_blocks, k_blocks;
    int64_t word, count; /* where its bits, and the counts of its rows of a layer, begin */
} sparse_chunk;

typedef struct buffer {
    void *memory;
    int64_t bytes;
} buffer;

/* On the device. */
enum { PACKED_Q, PACKED_K, MAX, SUM, SUMS, BITS, ROW_WORD, COUNTS, N_BUFFERS };

struct cpa_worker_sparse {
    cpa_xattn_shape shape;
    sparse_chunk *chunks;
    int64_t n_chunks, cap_chunks;
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

/* ---- what is taken ---- */

static cpa_status check_worker(const cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const char *why = NULL;
    if (o->map.cp_size > 1) why = "several ranks";
    if (o->model.attention.v_in_k || worker->forms.count > 1) why = "latents";
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

/* Prompts of fewer keys than stride blocks attend all, as a whole of a chunk without a whole block does. */
static int takes_chunk(const cpa_worker *worker, const cpa_plan_chunk *chunk) {
    const int64_t end = chunk->start + chunk->count, first = (chunk->start + BLOCK - 1) / BLOCK * BLOCK;
    return chunk->drafts == 0 && end >= (int64_t)worker->options.sparse_stride * BLOCK && end - first >= BLOCK &&
           end <= (int64_t)CPA_XATTN_MOST_BLOCKS * BLOCK;
}

int cpa_worker_sparse_takes(const cpa_worker *worker, const cpa_step_plan *plan) {
    int takes = 0;
    if (!worker->sparse || worker->rows->sizes.masked_rows > 0) return 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) takes |= takes_chunk(worker, &plan->chunks[i]);
    return takes;
}

static int takes_layer(const cpa_worker *worker, int32_t layer) {
    const cpa_mask mask = cpa_model_mask(&worker->options.model, layer);
    return mask.causal && mask.window == 0;
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
static cpa_status make_room(cpa_worker *worker, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    const cpa_xattn_shape *shape = &s->shape;
    for (int64_t i = 0; i < s->n_chunks; i++) {
        const sparse_chunk *c = &s->chunks[i];
        const int64_t keys = cpa_min64(c->keys, KEYS_AT_ONCE);
        CPA_TRY(reserve(worker, PACKED_Q, cpa_xattn_packed_bytes(shape, shape->q_heads, c->tokens), err));
        CPA_TRY(reserve(worker, PACKED_K, cpa_xattn_packed_bytes(shape, shape->kv_heads, keys), err));
        CPA_TRY(reserve(worker, MAX, cpa_xattn_stats_bytes(shape, c->tokens) / 2, err));
        CPA_TRY(reserve(worker, SUM, cpa_xattn_stats_bytes(shape, c->tokens) / 2, err));
        CPA_TRY(reserve(worker, SUMS, cpa_xattn_sums_bytes(shape, c->tokens, c->keys), err));
    }
    const int64_t counts = worker->options.model.layers * s->layer_counts;
    CPA_TRY(reserve(worker, BITS, shape->q_heads * s->head_words * (int64_t)sizeof(uint32_t), err));
    CPA_TRY(reserve(worker, ROW_WORD, s->rows * (int64_t)sizeof *s->row_word, err));
    CPA_TRY(reserve(worker, COUNTS, counts * (int64_t)sizeof *s->counts, err));
    CPA_TRY(reserve_host(worker, (void **)&s->counts, &s->cap_counts, counts, sizeof *s->counts, err));
    return reserve_host(worker, (void **)&s->row_word, &s->cap_rows, s->rows, sizeof *s->row_word, err);
}

/* ---- a step ---- */

static cpa_status list_chunks(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    s->n_chunks = s->rows = s->words = s->k_blocks = s->seen = 0;
    if (!cpa_array_reserve(&s->chunks, &s->cap_chunks, plan->n_chunks, sizeof *s->chunks))
        return cpa_fail(err, CPA_NO_MEMORY, "sparse: no memory for %lld chunks", (long long)plan->n_chunks);
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        const cpa_plan_chunk *chunk = &plan->chunks[i];
        const int64_t end = chunk->start + chunk->count, first = (chunk->start + BLOCK - 1) / BLOCK * BLOCK;
        const sparse_chunk listed = {.seq = chunk->seq,
                                     .row = s->rows + first - chunk->start,
                                     .first = first,
                                     .tokens = end - first,
                                     .keys = end,
                                     .q_blocks = cpa_xattn_blocks(&s->shape, end - first),
                                     .k_blocks = cpa_xattn_blocks(&s->shape, end)};
        s->rows += chunk->count;
        if (!takes_chunk(worker, chunk)) continue;
        s->chunks[s->n_chunks++] = listed;
        s->k_blocks = cpa_max64(s->k_blocks, listed.k_blocks);
        for (int64_t block = 0; block < listed.q_blocks; block++) s->seen += first / BLOCK + block + 1;
    }
    s->seen *= s->shape.q_heads;
    s->words = cpa_mask_words(s->k_blocks);
    s->head_words = s->layer_counts = 0;
    for (int64_t i = 0; i < s->n_chunks; i++) {
        s->chunks[i].word = s->head_words;
        s->chunks[i].count = s->layer_counts;
        s->head_words += s->chunks[i].q_blocks * s->words;
        s->layer_counts += s->shape.q_heads * s->chunks[i].q_blocks;
    }
    return CPA_OK;
}

cpa_status cpa_worker_sparse_begin(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return CPA_OK;
    s->layers = 0;
    s->n_chunks = 0;
    if (!cpa_worker_sparse_takes(worker, plan)) return CPA_OK;
    CPA_TRY(list_chunks(worker, plan, err));
    CPA_TRY(make_room(worker, err));
    for (int64_t row = 0; row < s->rows; row++) s->row_word[row] = -1;
    for (int64_t i = 0; i < s->n_chunks; i++)
        for (int64_t t = 0; t < s->chunks[i].tokens; t++)
            s->row_word[s->chunks[i].row + t] = s->chunks[i].word + t / BLOCK * s->words;
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

/* The groups of keys [first, first + tokens) of a chunk's sequence. */
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

/* The statistics of all keys, or once they are there the sums, by chunks of keys. */
static cpa_status walk_keys(cpa_worker *worker, const sparse_chunk *c, const cpa_kv_view *kv, int32_t group,
                            int for_sums) {
    const cpa_worker_sparse *s = worker->sparse;
    for (int64_t first = 0; first < c->keys; first += KEYS_AT_ONCE) {
        const int64_t tokens = cpa_min64(KEYS_AT_ONCE, c->keys - first);
        const cpa_xattn_chunks chunks = {.map = {.cp_size = 1, .interleave = BLOCK},
                                         .q_set = {CPA_TOKENS_ALL, 0},
                                         .k_set = {CPA_TOKENS_ALL, 0},
                                         .q_first = c->first,
                                         .k_first = first,
                                         .q_tokens = c->tokens,
                                         .k_tokens = tokens,
                                         .q = s->buffers[PACKED_Q].memory,
                                         .k = s->buffers[PACKED_K].memory};
        const cpa_xattn_stats_args stats = {.size = sizeof stats,
                                            .shape = s->shape,
                                            .chunks = chunks,
                                            .max = s->buffers[MAX].memory,
                                            .sum = s->buffers[SUM].memory,
                                            .resume = first > 0};
        const cpa_xattn_block_sums_args sums = {.size = sizeof sums,
                                                .shape = s->shape,
                                                .chunks = chunks,
                                                .max = s->buffers[MAX].memory,
                                                .sum = s->buffers[SUM].memory,
                                                .sums = (float *)s->buffers[SUMS].memory + first / BLOCK,
                                                .row_stride = c->k_blocks};
        if (!for_sums || c->keys > KEYS_AT_ONCE) CPA_TRY(pack_keys(worker, c, kv, group, first, tokens));
        CPA_TRY(for_sums ? cpa_xattn_block_sums(&sums, worker->stream) : cpa_xattn_stats(&stats, worker->stream));
    }
    return CPA_OK;
}

static cpa_status select_chunk(cpa_worker *worker, const sparse_chunk *c, int32_t layer, const cpa_kv_view *kv) {
    const cpa_worker_sparse *s = worker->sparse;
    const int32_t group = worker->places[layer].group;
    const int64_t row_bytes = cpa_shape_q_bytes(&worker->options.model.attention);
    const cpa_xattn_pack_q_args q = {.size = sizeof q,
                                     .shape = s->shape,
                                     .tokens = c->tokens,
                                     .q = (const char *)worker->q + c->row * row_bytes,
                                     .out = s->buffers[PACKED_Q].memory};
    const cpa_xattn_select_args select = {
        .size = sizeof select,
        .shape = s->shape,
        .map = {.cp_size = 1, .interleave = BLOCK},
        .q_set = {CPA_TOKENS_ALL, 0},
        .q_first = c->first,
        .q_blocks = c->q_blocks,
        .k_blocks = c->k_blocks,
        .sums = s->buffers[SUMS].memory,
        .tau = worker->options.sparse_tau,
        .bits = (uint32_t *)s->buffers[BITS].memory + c->word,
        .words = s->words,
        .bits_stride = s->head_words,
        .counts = (int32_t *)s->buffers[COUNTS].memory + s->layers * s->layer_counts + c->count};
    CPA_TRY(cpa_xattn_pack_q(&q, worker->stream));
    CPA_TRY(walk_keys(worker, c, kv, group, 0));
    CPA_TRY(walk_keys(worker, c, kv, group, 1));
    return cpa_xattn_select(&select, worker->stream);
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

void cpa_worker_sparse_end(cpa_worker *worker) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return;
    for (int64_t i = 0; i < s->layers * s->layer_counts; i++) s->totals.kept += s->counts[i];
    s->totals.seen += s->layers * s->seen;
    s->layers = 0;
}

cpa_worker_sparse_stats cpa_worker_sparse_totals(const cpa_worker *worker) {
    return worker->sparse ? worker->sparse->totals : (cpa_worker_sparse_stats){0, 0};
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
    free(s);
    worker->sparse = NULL;
}
