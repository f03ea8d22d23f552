#include "kernels/cuda/attend/attend_source.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/key_workspace.h"

enum {
    STEADY_PLACES = 256, /* places of shared keys of a padded plan come in multiples of so many */
    WHOLE = 1 << 30      /* blocks of a pass of whole items: more than there are */
};

/* ---- the workspace ---- */

/* The rows of a part are too many for the kernels of decode, as those of the item are. */
static cpa_key_room room_of(const cpa_attention_shape *shape, int32_t block_size, int64_t bytes) {
    const int64_t alignment = 64, unit = cpa_cuda_wide_block(block_size), group = shape->q_heads / shape->kv_heads;
    return (cpa_key_room){.bytes = bytes - alignment, /* of the states */
                          .token_bytes = cpa_cuda_prepared_token_bytes(shape),
                          .row_bytes = shape->q_heads * (shape->v_dim + 1) * (int64_t)sizeof(float),
                          .least_rows = 2 * (cpa_cuda_most_decode_rows(shape, block_size) / group + 1),
                          .unit = unit,
                          .step = cpa_max64(unit, CPA_CUDA_PREFILL_KEYS)};
}

int64_t cpa_cuda_least_workspace(const cpa_attention_shape *shape, int32_t block_size) {
    const cpa_key_room none = room_of(shape, block_size, 0);
    return none.token_bytes > 0 ? cpa_key_room_least(&none) - none.bytes : 0;
}

int cpa_cuda_source_prepares(const cpa_device *device, const cpa_attention_shape *shape) {
    const int hopper = ((const cpa_cuda_device *)device)->path == CPA_CUDA_HOPPER;
    return cpa_cuda_prepared_token_bytes(shape) > 0 && (hopper || !cpa_dtype_is_quantised(shape->kv_dtype));
}

/* A plan's own workspace grows up to the bound, as far as there is memory. What it had before is let go at the end alone:
 * shared keys may have been cut for it. */
static void grow_own(cpa_device *device, struct cpa_cuda_source *source, int64_t wanted, int64_t least) {
    const int64_t bound = cpa_max64(((cpa_cuda_device *)device)->workspace_bytes, least);
    const int64_t needed = cpa_min64(cpa_max64(wanted, least), bound);
    cpa_key_workspace *own = &source->own;
    const int64_t bytes = cpa_min64(cpa_max64(needed, 2 * own->bytes), bound);
    if (source->is_short || needed <= own->bytes) return;
    const cpa_key_workspace more = cpa_key_workspace_open(device, bytes, cpa_max64(least, own->bytes));
    const int is_more = more.bytes > own->bytes;
    source->is_short = more.bytes < bytes;
    cpa_cuda_retire(device, is_more ? own->memory : more.memory);
    if (is_more) *own = more;
    if (own->bytes < needed)
        cpa_log(CPA_LOG_WARN, "attend plan: no memory for %lld bytes to prepare keys in, there are %lld",
                (long long)needed, (long long)own->bytes);
}

/* Room for so many tokens of a batch, or as many as there is memory for. */
static cpa_key_room reserve_room(cpa_cuda_plan *plan, const cpa_attend_batch *batch, int64_t tokens) {
    struct cpa_cuda_source *source = plan->memory->source;
    const int64_t least = cpa_cuda_least_workspace(&batch->shape, batch->block_size);
    const int64_t wanted = tokens * cpa_cuda_prepared_token_bytes(&batch->shape) + least;
    if (source->workspace == &source->own) grow_own(plan->base.device, source, wanted, least);
    return room_of(&batch->shape, batch->block_size, source->workspace->bytes);
}

/* ---- passes, and the places of their blocks ---- */

static cpa_status no_memory(int64_t n, cpa_error *err) {
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld items or passes", (long long)n);
}

static cpa_status add_keys(cpa_cuda_prepared *p, int64_t rows, int64_t keys, cpa_error *err) {
    if (!cpa_array_reserve(&p->keys, &p->capacity, p->n + 1, sizeof *p->keys)) return no_memory(p->n + 1, err);
    p->keys[p->n++] = (cpa_key_item){rows, keys};
    return CPA_OK;
}

static int64_t tokens_of(const cpa_cuda_prepared *p, int64_t unit) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < p->n; i++) tokens += cpa_cuda_ceil_div(p->keys[i].keys, unit) * unit;
    return tokens;
}

static int64_t places_for(int32_t block_size, int64_t keys) {
    return cpa_cuda_wide_places(block_size, cpa_cuda_ceil_div(keys, block_size));
}

/* Gives what a pass has its entries from *next on, which moves behind them. */
static void place_pass(cpa_cuda_prepared *p, const cpa_key_pass *cut, int32_t block_size, cpa_cuda_pass *pass,
                       int64_t *next) {
    if (cut->is_cut) {
        cpa_cuda_key_place *to = &p->places[cut->item];
        if (cut->row == 0 && cut->key == 0) {
            *to = (cpa_cuda_key_place){(int32_t)*next, 0, (int32_t)(cut->keys / block_size)};
            *next += places_for(block_size, p->keys[cut->item].keys);
        }
        pass->first_place = to->place + cut->key / block_size;
        pass->n_places = places_for(block_size, cut->keys);
        return;
    }
    pass->first_place = *next;
    for (int64_t i = cut->item; i < cut->item + cut->n_items; i++) {
        p->places[i] = (cpa_cuda_key_place){(int32_t)*next, (int32_t)(*next - pass->first_place), WHOLE};
        *next += places_for(block_size, p->keys[i].keys);
    }
    pass->n_places = *next - pass->first_place;
}

/* Cuts what there is into passes: none if the room is too small. */
static cpa_status cut_passes(cpa_cuda_prepared *p, const cpa_key_room *room, int32_t block_size,
                             cpa_cuda_passes *passes, int64_t *next, cpa_error *err) {
    const int64_t n = cpa_key_passes(room, p->keys, p->n, NULL), first = *next;
    passes->n = 0;
    if (!cpa_array_reserve(&p->cut, &p->cut_capacity, n, sizeof *p->cut) ||
        !cpa_array_reserve(&passes->list, &passes->capacity, n, sizeof *passes->list) ||
        !cpa_array_reserve(&p->places, &p->places_capacity, p->n, sizeof *p->places))
        return no_memory(cpa_max64(n, p->n), err);
    cpa_key_passes(room, p->keys, p->n, p->cut);
    for (int64_t i = 0; i < n; i++) {
        const cpa_key_pass *cut = &p->cut[i];
        cpa_cuda_pass *pass = &passes->list[i];
        *pass = (cpa_cuda_pass){.is_cut = cut->is_cut};
        place_pass(p, cut, block_size, pass, next);
        pass->ends = cut->is_cut && cut->key + cut->keys == p->keys[cut->item].keys;
    }
    if (*next > INT32_MAX) {
        *next = first;
        return CPA_OK;
    }
    passes->n = n;
    return CPA_OK;
}

/* ---- shared keys ---- */

/* The pieces of a pass: those of whole nodes, or of a range of keys of one, where tiles of the same keys stand side by
 * side. */
static int64_t take_pieces(const cpa_cuda_plan_builder *b, const cpa_cuda_prepared *nodes, const cpa_key_pass *cut,
                           int64_t first, cpa_cuda_pass *pass) {
    const int64_t tile_entries = cpa_cuda_tile_entries(b->given, b->tile_rows);
    int64_t n = 0;
    for (int64_t i = cut->item; i < cut->item + cut->n_items; i++) {
        const int64_t keys = cut->is_cut ? cut->keys : nodes->keys[i].keys;
        n += cpa_cuda_ceil_div(keys, b->cut.split_keys) * cpa_cuda_ceil_div(nodes->keys[i].rows, tile_entries);
    }
    pass->pieces.pieces_at = first * (int64_t)sizeof(cpa_cuda_piece);
    pass->pieces.n_pieces = (int32_t)n;
    return first + n;
}

/* The least keys that whole pieces and whole blocks both come to. */
static int64_t shared_step(const cpa_key_room *room, int64_t split_keys) {
    int64_t step = split_keys;
    while (step % room->unit != 0) step += split_keys;
    return step;
}

cpa_status cpa_cuda_source_cut_shared(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, cpa_error *err) {
    struct cpa_cuda_source *s = plan->memory->source;
    const cpa_cascade *tree = &b->cascade->tree;
    const int32_t block_size = b->given->block_size;
    const int64_t steady = b->padded_items > 0 ? STEADY_PLACES : 1;
    int64_t n_pieces = 0;
    if (!cpa_cuda_source_prepares(plan->base.device, &b->given->shape)) return CPA_OK;
    for (int64_t i = 0; i < tree->n_nodes; i++) {
        const cpa_cascade_node *node = &tree->nodes[i];
        CPA_TRY(add_keys(&s->nodes, cpa_cuda_tokens_of_node(tree, b->given, node), node->k_end - node->k_begin, err));
    }
    const int64_t tokens = tokens_of(&s->nodes, cpa_cuda_wide_block(block_size));
    cpa_key_room room = reserve_room(plan, b->given, tokens + steady * block_size);
    room.bytes -= steady * block_size * room.token_bytes; /* what fills the last pass up */
    room.row_bytes = 0;
    room.step = shared_step(&room, b->cut.split_keys);
    CPA_TRY(cut_passes(&s->nodes, &room, block_size, &s->shared, &b->n_places, err));
    if (s->shared.n == 0) {
        b->cut = (cpa_cuda_cascade_cut){0};
        return CPA_OK;
    }
    cpa_cuda_pass *last = &s->shared.list[s->shared.n - 1];
    for (int64_t i = 0; i < s->shared.n; i++)
        n_pieces = take_pieces(b, &s->nodes, &s->nodes.cut[i], n_pieces, &s->shared.list[i]);
    b->n_places = cpa_cuda_ceil_div(b->n_places, steady) * steady;
    last->n_places = b->n_places - last->first_place;
    return CPA_OK;
}

/* ---- prefill ---- */

/* A builder of the pieces of a pass, whose items lie from `first` on; how many these are. */
static cpa_status begin_pass(const cpa_cuda_plan_builder *b, struct cpa_cuda_source *s, int64_t index, int64_t first,
                             cpa_error *err) {
    const cpa_key_pass *cut = &s->items.cut[index];
    cpa_cuda_pass *pass = &s->prefill.list[index];
    cpa_cuda_plan_builder *own = &s->builders[index];
    for (int64_t i = 0; i < cut->n_items; i++) {
        const int64_t of_batch = s->indices[cut->item + i];
        s->pass_items[first + i] = b->batch->items[of_batch];
        s->pass_shifts[first + i] = b->state_shifts ? b->state_shifts[of_batch] : 0;
    }
    if (cut->is_cut) {
        cpa_attend_item *item = &s->pass_items[first];
        item->q_row += cut->row;
        item->q_first += cut->row;
        item->q_count = cut->rows;
        item->k_first += cut->key;
        item->k_count = cut->keys;
        item->table += cut->key / cpa_cuda_wide_block(b->batch->block_size);
        pass->item = *item;
        pass->state_shift = s->pass_shifts[first];
        pass->rows = cut->rows;
    }
    *own = (cpa_cuda_plan_builder){.own = *b->batch,
                                   .state_shifts = b->state_shifts ? s->pass_shifts + first : NULL,
                                   .first_ready = cut->n_items,
                                   .full = b->full,
                                   .masked = b->masked,
                                   .group = b->group,
                                   .multiprocessors = b->multiprocessors,
                                   .wide_fits = b->wide_fits,
                                   .tile_rows = b->tile_rows,
                                   .decode_rows = b->decode_rows,
                                   .team = b->team};
    own->own.items = s->pass_items + first;
    own->own.n_items = cut->n_items;
    own->given = own->batch = &own->own;
    CPA_TRY(cpa_cuda_plan_count_work(own, err));
    cpa_cuda_plan_choose_splits(own);
    return CPA_OK;
}

static cpa_status begin_passes(const cpa_cuda_plan_builder *b, struct cpa_cuda_source *s, cpa_error *err) {
    const int64_t n = s->prefill.n;
    int64_t first = 0, n_items = 0;
    for (int64_t i = 0; i < n; i++) n_items += s->items.cut[i].n_items;
    if (!cpa_array_reserve(&s->builders, &s->builders_capacity, n, sizeof *s->builders) ||
        !cpa_array_reserve(&s->pass_items, &s->pass_items_capacity, n_items, sizeof *s->pass_items) ||
        !cpa_array_reserve(&s->pass_shifts, &s->pass_shifts_capacity, n_items, sizeof *s->pass_shifts))
        return no_memory(n_items, err);
    for (int64_t i = 0; i < n; first += s->items.cut[i++].n_items) CPA_TRY(begin_pass(b, s, i, first, err));
    s->n_builders = n;
    return CPA_OK;
}

/* The items of a pass, and what lies between them. */
static void list_items(const cpa_cuda_plan_builder *b, const struct cpa_cuda_source *s, int64_t index) {
    const cpa_key_pass *cut = &s->items.cut[index];
    cpa_cuda_pass *pass = &s->prefill.list[index];
    const int64_t first = s->indices[cut->item], last = s->indices[cut->item + cut->n_items - 1];
    pass->first_item = first, pass->n_items = last - first + 1, pass->rows = 0;
    for (int64_t i = first; i <= last; i++) pass->rows += b->batch->items[i].q_count;
}

cpa_status cpa_cuda_source_cut_prefill(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, cpa_error *err) {
    struct cpa_cuda_source *s = plan->memory->source;
    const int32_t block_size = b->batch->block_size;
    if (b->n_tiles == 0 || !cpa_cuda_source_prepares(plan->base.device, &b->batch->shape)) return CPA_OK;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        if (cpa_cuda_packed_rows(b->batch, item) == 0 || cpa_cuda_is_decode(b, item)) continue;
        CPA_TRY(add_keys(&s->items, item->q_count, item->k_count, err));
        if (!cpa_array_reserve(&s->indices, &s->indices_capacity, s->items.n, sizeof *s->indices))
            return no_memory(s->items.n, err);
        s->indices[s->items.n - 1] = i;
    }
    const int64_t tokens = tokens_of(&s->items, cpa_cuda_wide_block(block_size));
    const cpa_key_room room = reserve_room(plan, b->batch, tokens);
    CPA_TRY(cut_passes(&s->items, &room, block_size, &s->prefill, &b->n_places, err));
    for (int64_t i = 0; i < s->prefill.n; i++) list_items(b, s, i);
    const int is_one = s->prefill.n == 1 && !s->prefill.list[0].is_cut;
    return s->prefill.n == 0 || is_one ? CPA_OK : begin_passes(b, s, err);
}

/* ---- what is written ---- */

void cpa_cuda_source_clear(struct cpa_cuda_source *source) {
    source->prefill.n = source->shared.n = source->n_builders = 0;
    source->items.n = source->nodes.n = 0;
}

void cpa_cuda_source_place(struct cpa_cuda_source *source, int64_t *end) {
    for (int64_t i = 0; i < source->n_builders; i++)
        cpa_cuda_plan_place_prefill(&source->builders[i], &source->prefill.list[i].pieces, end);
}

int64_t cpa_cuda_source_most_pieces(const struct cpa_cuda_source *source, int64_t pieces) {
    for (int64_t i = 0; i < source->n_builders; i++) pieces = cpa_max64(pieces, source->builders[i].n_pieces);
    return pieces;
}

/* The blocks of an item, whose table begins at `table`. */
static void write_item(const cpa_attend_batch *batch, int64_t table, int64_t keys, cpa_cuda_key_place to,
                       int32_t *tables, int32_t *blocks) {
    const int64_t entries = cpa_cuda_ceil_div(keys, batch->block_size), places = places_for(batch->block_size, keys);
    const int32_t ratio = cpa_cuda_wide_block(batch->block_size) / batch->block_size;
    for (int64_t i = 0; i < places; i++) blocks[to.place + i] = i < entries ? batch->block_tables[table + i] : -1;
    for (int64_t i = 0; i < places; i += ratio) tables[table + i / ratio] = (int32_t)((to.at + i % to.part) / ratio);
}

void cpa_cuda_source_write_blocks(const struct cpa_cuda_source *s, const cpa_cuda_plan_builder *b, int32_t *tables,
                                  int32_t *blocks, cpa_cuda_table_source *sources) {
    for (int64_t i = 0; i < s->items.n && s->prefill.n > 0; i++) {
        const int64_t index = s->indices[i];
        if (sources) {
            sources[index].to = s->items.places[i];
        } else {
            write_item(b->batch, b->batch->items[index].table, s->items.keys[i].keys, s->items.places[i], tables,
                       blocks);
        }
    }
    if (s->shared.n == 0) return;
    const cpa_cascade *tree = &b->cascade->tree;
    const cpa_cuda_pass *last = &s->shared.list[s->shared.n - 1];
    for (int64_t place = last->first_place; place < last->first_place + last->n_places; place++) blocks[place] = -1;
    for (int64_t i = 0; i < s->nodes.n; i++) { /* as its first item's tables have them */
        const cpa_cascade_node *node = &tree->nodes[i];
        const cpa_attend_item *item = &b->given->items[tree->items[node->first].index];
        write_item(b->given, item->table + node->k_begin / b->given->block_size, s->nodes.keys[i].keys,
                   s->nodes.places[i], tables, blocks);
    }
}

void cpa_cuda_source_write_pieces(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, int64_t partial_rows) {
    struct cpa_cuda_source *s = plan->memory->source;
    if (s->prefill.n == 1 && s->n_builders == 0) s->prefill.list[0].pieces = plan->prefill;
    for (int64_t i = 0; i < s->n_builders; i++) {
        cpa_cuda_plan_builder *own = &s->builders[i];
        own->in_order = b->in_order;
        own->partial_rows = partial_rows;
        cpa_cuda_plan_write_prefill(own, plan->memory->staging, &s->prefill.list[i].pieces);
        b->partial_rows = cpa_max64(b->partial_rows, own->partial_rows);
    }
    for (int64_t i = 0, moved = 0; i < s->shared.n; i++) {
        cpa_cuda_prefill *pieces = &s->shared.list[i].pieces;
        pieces->pieces_at += plan->shared_at;
        moved += pieces->n_pieces;
        if (i + 1 == s->shared.n) pieces->n_pieces += (int32_t)(b->n_shared - moved); /* those that fill up */
    }
}

uint64_t cpa_cuda_source_shape(const struct cpa_cuda_source *source) {
    uint64_t hash = CPA_HASH_START;
    for (int64_t i = 0; i < source->shared.n; i++) {
        const cpa_cuda_pass *pass = &source->shared.list[i];
        const int64_t shape[] = {(int64_t)(intptr_t)source->workspace->memory, pass->first_place, pass->n_places,
                                 pass->pieces.pieces_at, pass->pieces.n_pieces};
        hash = cpa_hash_bytes(hash, shape, sizeof shape);
    }
    return hash;
}

static void free_prepared(cpa_cuda_prepared *p) {
    free(p->keys);
    free(p->cut);
    free(p->places);
}

void cpa_cuda_source_destroy(cpa_device *device, struct cpa_cuda_source *source) {
    cpa_cuda_free(device, source->own.memory);
    free(source->prefill.list);
    free(source->shared.list);
    free_prepared(&source->items);
    free_prepared(&source->nodes);
    free(source->indices);
    free(source->builders);
    free(source->pass_items);
    free(source->pass_shifts);
    free(source);
}
