#include "src/ops/ring_blocks.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"

void cpa_ring_blocks_reset(cpa_ring_blocks *b, int64_t items) {
    b->items = items;
    b->rows = -1;
}

static void free_rows(cpa_ring_blocks *b, cpa_device *device) {
    device->table->free_host(device, b->item_of_row);
    device->table->free(device, b->device_item_of_row);
    b->item_of_row = b->device_item_of_row = NULL;
    b->most_rows = 0;
}

static void free_bits(cpa_ring_blocks *b, cpa_device *device) {
    device->table->free_host(device, b->bits);
    device->table->free(device, b->device_bits);
    b->bits = b->device_bits = NULL;
    b->most_words = 0;
}

void cpa_ring_blocks_free(cpa_ring_blocks *b, cpa_device *device) {
    free_rows(b, device);
    free_bits(b, device);
    free(b->passes);
    free(b->runs);
    free(b->attended);
}

/* ---- the union ---- */

/* So many entries of four bytes, page-locked and on the device. */
static cpa_status alloc_both(cpa_device *device, int64_t n, void **host, void **on_device, cpa_error *err) {
    CPA_TRY(device->table->alloc_host(device, n * (int64_t)sizeof(uint32_t), host, err));
    return device->table->alloc(device, n * (int64_t)sizeof(uint32_t), on_device, err);
}

static cpa_status ensure_rows(cpa_ring_blocks *b, int64_t n, cpa_stream *stream) {
    void *host = NULL, *on_device = NULL;
    if (n <= b->most_rows) return CPA_OK;
    free_rows(b, stream->device);
    const cpa_status status = alloc_both(stream->device, n, &host, &on_device, &stream->error);
    b->item_of_row = host;
    b->device_item_of_row = on_device;
    if (status == CPA_OK) b->most_rows = n;
    return status;
}

static cpa_status ensure_bits(cpa_ring_blocks *b, int64_t n, cpa_stream *stream) {
    void *host = NULL, *on_device = NULL;
    if (n <= b->most_words) return CPA_OK;
    free_bits(b, stream->device);
    const cpa_status status = alloc_both(stream->device, n, &host, &on_device, &stream->error);
    b->bits = host;
    b->device_bits = on_device;
    if (status == CPA_OK) b->most_words = n;
    return status;
}

/* The number in the batch of an item of a pass. */
static int64_t given_item(const cpa_ring_pass *pass, int64_t i) {
    return pass->given + (pass->is_cut ? 0 : i);
}

/* The items of all rows, once a setting. The attends before have waited for what read those of the last one. */
static cpa_status list_rows(cpa_ring_blocks *b, const cpa_ring_passes *p, cpa_stream *stream) {
    int64_t rows = 0;
    if (b->rows >= 0) return CPA_OK;
    for (int64_t i = 0; i < p->n_items; i++) rows = cpa_max64(rows, p->items[i].q_row + p->items[i].q_count);
    CPA_TRY(ensure_rows(b, cpa_max64(rows, 1), stream));
    for (int64_t row = 0; row < rows; row++) b->item_of_row[row] = -1;
    for (int64_t n = 0; n < p->n; n++)
        for (int64_t i = 0; i < p->list[n].n_items; i++) {
            const cpa_attend_item *item = &p->items[p->list[n].first_item + i];
            for (int64_t row = 0; row < item->q_count; row++)
                b->item_of_row[item->q_row + row] = (int32_t)given_item(&p->list[n], i);
        }
    CPA_TRY(stream->device->table->copy(b->device_item_of_row, b->item_of_row, rows * (int64_t)sizeof *b->item_of_row,
                                        stream));
    b->rows = rows;
    return CPA_OK;
}

/* The union of all rows and heads of each item, as a block of the cache holds all heads. */
static cpa_status unite(cpa_ring_blocks *b, const cpa_attend_plan *head, const cpa_key_blocks *of, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    const int64_t words = b->items * cpa_mask_words(of->width);
    CPA_TRY(ensure_bits(b, words, stream));
    const cpa_block_union_args args = {.blocks = *of,
                                       .q_heads = head->shape.q_heads,
                                       .kv_heads = 1,
                                       .rows = b->rows,
                                       .set = b->device_item_of_row,
                                       .sets = b->items,
                                       .out = b->device_bits};
    CPA_TRY(stream->device->operators->block_union(&args, stream));
    CPA_TRY(table->copy(b->bits, b->device_bits, words * (int64_t)sizeof *b->bits, stream));
    return cpa_stream_sync(stream);
}

/* ---- the blocks of a pass ---- */

/* The bits of an item. */
typedef struct item_bits {
    const uint32_t *words;
    int32_t width, block;
    int is_full; /* all bits are set, as where some row attends all keys, of which there may be more */
} item_bits;

static item_bits bits_of(const cpa_ring_blocks *b, const cpa_key_blocks *of, int64_t item) {
    item_bits bits = {b->bits + item * cpa_mask_words(of->width), of->width, of->block, 1};
    for (int64_t w = 0; w < cpa_mask_words(of->width); w++)
        bits.is_full &= bits.words[w] == cpa_block_union_all(of->width, w);
    return bits;
}

/* Whether one of `n` keys of the sequence is attended. */
static int attends_keys(const item_bits *bits, int64_t first, int64_t n) {
    const int64_t end = cpa_min64((first + n - 1) / bits->block + 1, bits->width);
    for (int64_t block = first / bits->block; block < end; block++)
        if (bits->words[block / 32] >> (block % 32) & 1) return 1;
    return 0;
}

/* Whether a key of the block of a table's entry is. */
static int attends_block(const item_bits *bits, cpa_owner_map map, const cpa_attend_item *item, int32_t block_size,
                         int64_t entry) {
    const int64_t begin = entry * block_size, end = cpa_min64(begin + block_size, item->k_count);
    const int is_alone = map.cp_size == 1 || item->k_set.kind == CPA_TOKENS_ALL;
    const int64_t step = is_alone || map.interleave % block_size == 0 ? block_size : 1; /* tokens in a row */
    if (bits->is_full) return 1;
    for (int64_t key = begin; key < end; key += step) {
        const int64_t token = item->k_first + key;
        const int64_t index = is_alone ? token : cpa_token_index(map, item->k_set, token);
        if (attends_keys(bits, index, cpa_min64(step, end - key))) return 1;
    }
    return 0;
}

/* Marks the blocks of a pass, at their places in the segment. */
static void mark_blocks(cpa_ring_blocks *b, const cpa_ring_passes *p, const cpa_ring_pass *pass, int32_t block_size,
                        cpa_owner_map map, const cpa_key_blocks *of) {
    const int64_t distinct = pass->is_cut ? 1 : pass->n_items; /* both items of a cut pass have the same keys */
    memset(b->attended, 0, (size_t)pass->n_entries);
    for (int64_t i = 0; i < distinct; i++) {
        const cpa_attend_item *item = &p->items[pass->first_item + i];
        const item_bits bits = bits_of(b, of, given_item(pass, i));
        for (int64_t e = 0; e * block_size < item->k_count; e++)
            if (attends_block(&bits, map, item, block_size, e))
                b->attended[p->tables[pass->first_entry + item->table + e]] = 1;
    }
}

/* The parts of a run that are marked. */
static void add_run(cpa_ring_blocks *b, const cpa_ring_run *run, cpa_ring_selected *selected) {
    int is_open = 0;
    for (int64_t i = 0; i < run->count; i++) {
        const int attended = b->attended[run->place + i];
        if (attended && is_open) b->runs[b->n_runs - 1].count++;
        if (attended && !is_open) b->runs[b->n_runs++] = (cpa_ring_run){run->block + i, run->place + i, 1};
        selected->lacks |= !attended;
        is_open = attended;
    }
}

cpa_status cpa_ring_blocks_select(cpa_ring_blocks *b, const cpa_ring_passes *p, const cpa_attend_plan *head,
                                  cpa_owner_map map, const cpa_key_blocks *of, cpa_stream *stream) {
    b->is_selected = 0;
    if (!of || b->items == 0) return CPA_OK;
    if (!cpa_array_reserve(&b->passes, &b->passes_capacity, p->n, sizeof *b->passes) ||
        !cpa_array_reserve(&b->runs, &b->runs_capacity, p->n_entries, sizeof *b->runs) ||
        !cpa_array_reserve(&b->attended, &b->attended_capacity, p->n_entries, 1))
        return cpa_fail(&stream->error, CPA_NO_MEMORY, "attend: no memory for %lld blocks", (long long)p->n_entries);
    CPA_TRY(list_rows(b, p, stream));
    CPA_TRY(unite(b, head, of, stream));
    b->n_runs = 0;
    for (int64_t n = 0; n < p->n; n++) {
        const cpa_ring_pass *pass = &p->list[n];
        b->passes[n] = (cpa_ring_selected){.first_run = b->n_runs};
        mark_blocks(b, p, pass, head->block_size, map, of);
        for (int64_t i = 0; i < pass->n_runs; i++) add_run(b, &p->runs[pass->first_run + i], &b->passes[n]);
        b->passes[n].n_runs = b->n_runs - b->passes[n].first_run;
    }
    b->is_selected = 1;
    return CPA_OK;
}
