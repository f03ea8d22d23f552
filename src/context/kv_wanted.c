#include "src/context/kv_wanted.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Devices read keys by tiles of so many; and list those that somebody attends of sequences of so many keys, of heads of
 * 128 columns and of wider ones: of longer sequences they read all tiles (kernels/cuda/attend/attend_blocks.cu). */
#define DEVICE_TILE 128
#define DEVICE_LISTED ((int64_t)8192 * DEVICE_TILE)
#define DEVICE_LISTED_WIDE ((int64_t)2560 * DEVICE_TILE)

void cpa_kv_wanted_create(cpa_kv_wanted *w, cpa_context_ops *ops, const cpa_planned_step *step) {
    w->ops = ops;
    w->step = step;
}

void cpa_kv_wanted_destroy(cpa_kv_wanted *w) {
    if (!w->ops) return;
    cpa_context_free(w->ops, &w->device_sets);
    cpa_context_free(w->ops, &w->device_bits);
    w->ops->device->table->free_host(w->ops->device, w->by_rank);
    free(w->bits);
    free(w->sets);
}

/* Whether a device reads no key of a block that nobody attends. */
static int device_leaves_out(const cpa_attention_shape *shape, const cpa_key_blocks *blocks) {
    const int64_t listed = shape->k_dim > 128 || shape->v_dim > 128 ? DEVICE_LISTED_WIDE : DEVICE_LISTED;
    return blocks->block % DEVICE_TILE == 0 && (int64_t)blocks->width * blocks->block <= listed;
}

int cpa_kv_wanted_by(const cpa_context_ops *ops, const cpa_key_selection *selection) {
    const cpa_key_blocks *blocks = selection ? selection->blocks : NULL;
    if (!blocks || blocks->width == 0 || blocks->block % ops->options.block_size != 0) return 0;
    for (int32_t f = 0; f < ops->forms.count; f++)
        if (ops->forms.list[f].is_expanded) return 0;
    return ops->map.interleave % blocks->block == 0 &&
           (ops->device->caps.bit_exact || device_leaves_out(&ops->options.shape, blocks));
}

/* ---- the rows of each rank ---- */

static int64_t step_rows(const cpa_planned_step *step) {
    int64_t rows = 0;
    for (int64_t i = 0; i < step->n_chunks; i++) rows += step->chunks[i].end - step->chunks[i].start;
    return rows;
}

static cpa_status list_sets(cpa_kv_wanted *w) {
    const cpa_planned_step *step = w->step;
    w->rows = step_rows(step);
    const int64_t bytes = w->rows * (int64_t)sizeof *w->sets;
    CPA_TRY(cpa_context_ensure_array(w->ops, &w->sets, &w->sets_capacity, w->rows, sizeof *w->sets));
    CPA_TRY(cpa_context_ensure(w->ops, &w->device_sets, bytes));
    for (int64_t i = 0, row = 0; i < step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &step->chunks[i];
        const int travels = chunk->algorithm == CPA_PASS_KV;
        for (int64_t t = chunk->start; t < chunk->end; t++, row++)
            w->sets[row] =
                travels ? (int32_t)(i * step->map.cp_size) + cpa_owner_rank(step->map, chunk->placement, t) : -1;
    }
    CPA_TRY(cpa_context_upload(w->ops, w->device_sets.memory, w->sets, bytes));
    w->listed = 1;
    return CPA_OK;
}

/* ---- a layer ---- */

static cpa_status make_room(cpa_kv_wanted *w, int64_t words) {
    const cpa_device_table *table = w->ops->device->table;
    const int64_t bytes = words * (int64_t)sizeof *w->by_rank;
    CPA_TRY(cpa_context_ensure(w->ops, &w->device_bits, bytes));
    CPA_TRY(cpa_context_ensure_array(w->ops, &w->bits, &w->bits_capacity, words, sizeof *w->bits));
    if (bytes <= w->by_rank_bytes) return CPA_OK;
    void *memory;
    CPA_TRY(table->alloc_host(w->ops->device, bytes, &memory, &w->ops->error));
    table->free_host(w->ops->device, w->by_rank);
    w->by_rank = memory;
    w->by_rank_bytes = bytes;
    return CPA_OK;
}

/* Brings the union of the rows of each rank to the host. */
static cpa_status unite_rows(cpa_kv_wanted *w, const cpa_key_blocks *blocks, int64_t sets, cpa_stream *stream) {
    cpa_context_ops *ops = w->ops;
    const cpa_block_union_args args = {.blocks = *blocks,
                                       .q_heads = ops->options.shape.q_heads,
                                       .kv_heads = 1, /* a block travels with all of its heads */
                                       .rows = w->rows,
                                       .set = w->device_sets.memory,
                                       .sets = sets,
                                       .out = w->device_bits.memory};
    CPA_TRY(cpa_context_check(ops, ops->device->operators->block_union(&args, stream), stream));
    const int64_t bytes = sets * w->words * (int64_t)sizeof *w->by_rank;
    CPA_TRY(cpa_context_check(ops, ops->device->table->copy(w->by_rank, w->device_bits.memory, bytes, stream), stream));
    return cpa_context_check(ops, cpa_stream_sync(stream), stream);
}

cpa_status cpa_kv_wanted_find(cpa_kv_wanted *w, const cpa_key_selection *selection, cpa_stream *stream) {
    const cpa_key_blocks *blocks = selection->blocks;
    const int32_t ranks = w->step->map.cp_size;
    const int64_t sets = w->step->n_chunks * ranks;
    w->words = cpa_mask_words(blocks->width);
    w->width = blocks->width;
    w->block = blocks->block;
    if (!w->listed) CPA_TRY(list_sets(w));
    CPA_TRY(make_room(w, sets * w->words));
    CPA_TRY(unite_rows(w, blocks, sets, stream));
    memset(w->bits, 0, (size_t)(sets * w->words) * sizeof *w->bits);
    for (int64_t set = 0; set < sets; set++) {
        const int64_t first = set / ranks * ranks; /* of the chunk */
        for (int64_t other = first; other < first + ranks; other++)
            for (int64_t i = 0; other != set && i < w->words; i++)
                w->bits[set * w->words + i] |= w->by_rank[other * w->words + i];
    }
    return CPA_OK;
}

int cpa_kv_wanted_has(const cpa_kv_wanted *w, int64_t chunk, int32_t owner, int64_t key) {
    const uint32_t *bits = w->bits + (chunk * w->step->map.cp_size + owner) * w->words;
    const int64_t block = key / w->block;
    if (block >= w->width) return 1; /* rows that attend all keys may lie in chunks that are longer than the bits */
    return bits[block / 32] >> block % 32 & 1;
}
