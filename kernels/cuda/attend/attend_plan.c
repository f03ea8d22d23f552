/* The CUDA attend plan: rows become tiles, keys are split until every multiprocessor has work (attend_plan_pieces.c),
 * and everything that the kernels read about a step goes to the device in one copy. Keys that decode items share go to
 * pieces of their own, of the prefill kernels (attend_cascade.c). */
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_plan.h"

enum {
    LEAST_STEADY_ENTRIES = 256, /* table entries that a padded plan has room for; then powers of two */
    STEADY_SHARED = 8           /* pieces over shared keys of a padded plan come in multiples of so many */
};

/* How many units, tiles and keys there are. */
static cpa_status count_work(cpa_cuda_plan_builder *b, cpa_error *err) {
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        int64_t rows = cpa_cuda_packed_rows(b->batch, item);
        if (rows > INT32_MAX / 2 || item->k_count > INT32_MAX / 2)
            return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: items[%lld] has %lld rows and %lld keys, at most %d",
                            (long long)i, (long long)rows, (long long)item->k_count, INT32_MAX / 2);
        if (rows == 0) continue;
        if (cpa_cuda_is_decode(b, item)) {
            b->n_decode++;
        } else {
            int64_t tiles = cpa_cuda_prefill_tiles(b->batch, item, b->tile_rows),
                    keys = cpa_cuda_ceil_div(item->k_count, CPA_CUDA_PREFILL_KEYS);
            b->n_tiles += tiles;
            b->tile_keys += tiles * keys;
            if (cpa_cuda_may_widen(b->batch)) b->n_widened += cpa_cuda_places_of(b->batch, item);
            if (keys > b->most_keys) b->most_keys = keys;
        }
    }
    return CPA_OK;
}

/* The most splits of decode units: a cut lies between two CTAs, or before the unit's own keys. */
static int64_t most_decode_splits(const cpa_cuda_plan_builder *b, int64_t units) {
    return units < b->shares.ctas || b->cut.split_keys > 0 ? units : b->shares.ctas;
}

/* The sections of block tables, of a plan that has some of its own. */
static void place_tables(cpa_cuda_plan *plan, const cpa_cuda_plan_builder *b, int64_t entries, int64_t *end) {
    const int64_t widened = b->n_widened > 0 ? entries : 0;
    plan->tables_at = cpa_cuda_place_section(end, entries * (int64_t)sizeof(int32_t));
    plan->widened_tables_at = cpa_cuda_place_section(end, widened * (int64_t)sizeof(int32_t));
    plan->widened_blocks_at = cpa_cuda_place_section(end, b->n_widened * (int64_t)sizeof(int32_t));
}

/* Places the sections of the image, those that are filled on the device last, each large enough for what the splits may
 * come to. */
static void place_sections(cpa_cuda_plan *plan, const cpa_cuda_plan_builder *b) {
    int64_t end = 0, items = b->batch->n_items, units = b->n_decode, entries = b->batch->n_table_entries;
    if (b->padded_items) items = units = b->padded_items;
    if (b->padded_items && !b->tables.tables) {
        int64_t room = LEAST_STEADY_ENTRIES;
        while (room < entries) room *= 2;
        entries = room;
    }
    plan->items_at = cpa_cuda_place_section(&end, items * (int64_t)sizeof(cpa_cuda_item));
    if (!plan->device_tables) place_tables(plan, b, entries, &end);
    plan->decode_at = cpa_cuda_place_section(&end, (units + b->shares.ctas) * (int64_t)sizeof(cpa_cuda_piece));
    plan->counters_at = cpa_cuda_place_section(
        &end, most_decode_splits(b, units) * b->batch->shape.kv_heads * (int64_t)sizeof(uint32_t));
    plan->tickets_at = cpa_cuda_place_section(&end, (int64_t)sizeof(uint32_t));
    plan->prefill_at = cpa_cuda_place_section(&end, (b->n_pieces + b->tail_pieces) * (int64_t)sizeof(cpa_cuda_piece));
    plan->splits_at = cpa_cuda_place_section(&end, b->n_tiles * (int64_t)sizeof(cpa_cuda_split));
    plan->shared_at = cpa_cuda_place_section(&end, b->n_shared * (int64_t)sizeof(cpa_cuda_piece));
    plan->rows_at = cpa_cuda_place_section(&end, b->n_listed * (int64_t)sizeof(cpa_cuda_listed_row));
    plan->sources_at =
        cpa_cuda_place_section(&end, plan->device_tables ? items * (int64_t)sizeof(cpa_cuda_table_source) : 0);
    plan->upload_bytes = end;
    if (plan->device_tables) place_tables(plan, b, entries, &end);
    plan->image_bytes = end;
}

/* Where the tables of the items of a batch lie on the device. */
static void find_tables(const cpa_attend_batch *batch, cpa_cuda_table_source *sources) {
    for (int64_t i = 0; i < batch->n_items; i++)
        sources[i] = (cpa_cuda_table_source){.from = batch->items[i].table, .place = -1};
}

static void copy_items(const cpa_cuda_plan_builder *b, cpa_cuda_item *items, int64_t *rows) {
    *rows = 0;
    for (int64_t i = 0; i < b->given->n_items; i++) {
        const cpa_attend_item *item = &b->given->items[i];
        items[i] =
            (cpa_cuda_item){.item = *item, .state_shift = b->state_shifts ? b->state_shifts[i] : 0, .begin = *rows};
        *rows += cpa_cuda_packed_rows(b->given, item);
    }
}

/* Whether there is a kernel for listed pieces, as far as the batch tells. */
static int may_share(const cpa_cuda_plan_builder *b, const cpa_cuda_device *device) {
    const cpa_attention_shape *shape = &b->given->shape;
    const int runs_fit = shape->kv_dtype != CPA_INT8 && b->given->block_size >= CPA_CUDA_DECODE_RUN;
    const int tensor_cores = shape->kv_dtype != CPA_F32 && (shape->layout != CPA_VLLM_X || runs_fit);
    return b->given->cascade_attention != CPA_CASCADE_OFF && device->path == CPA_CUDA_HOPPER && b->n_decode > 1 &&
           tensor_cores && !b->full && !b->masked;
}

/* Finds what items share, where that pays, and leaves each with the keys that are its own. */
static cpa_status share_keys(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, const cpa_cuda_device *device,
                             cpa_error *err) {
    if (!may_share(b, device)) return CPA_OK;
    CPA_TRY(cpa_cuda_cascade_plan(b->cascade, b->given, b->tables, b->tile_rows, b->multiprocessors, &b->cut, err));
    if (b->cut.split_keys > 0 && !cpa_cuda_plan_widens_shared(b, plan)) b->cut = (cpa_cuda_cascade_cut){0};
    if (b->cut.split_keys == 0) return CPA_OK;
    b->own = *b->given;
    b->own.items = b->cascade->own;
    b->batch = &b->own;
    b->n_shared = b->cut.pieces;
    b->n_listed = b->cut.rows;
    if (b->padded_items == 0) return CPA_OK;
    b->n_shared = cpa_cuda_ceil_div(b->n_shared, STEADY_SHARED) * STEADY_SHARED;
    b->n_listed = b->n_shared * cpa_cuda_tile_tokens(b->given, b->tile_rows);
    return CPA_OK;
}

/* Shares keys, and says by which tables the kernels read: those that stay as they are, but where blocks are widened,
 * whose places follow from the entries of the plan's own; or the plan's own, which the batch then is of. */
static cpa_status take_tables(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, const cpa_attend_batch *given,
                              cpa_attend_batch *packed, cpa_table_set stay, cpa_error *err) {
    const cpa_cuda_device *device = (const cpa_cuda_device *)plan->base.device;
    if (stay.tables && b->n_widened == 0) {
        b->tables = stay;
        packed->n_table_entries = 0;
        CPA_TRY(share_keys(b, plan, device, err));
        if (b->n_widened == 0) return CPA_OK;
        b->tables = (cpa_table_set){0};
        b->batch = b->given;
        b->n_widened = b->n_shared = b->n_listed = 0;
        b->cut = (cpa_cuda_cascade_cut){0};
    }
    if (stay.tables || cpa_cuda_plan_packs_tables(given))
        CPA_TRY(cpa_cuda_plan_pack_items(plan->memory, given, packed, &plan->most_entries, err));
    return share_keys(b, plan, device, err);
}

/* The pieces over shared keys; those that fill up have no rows. */
static cpa_status write_shared(const cpa_cuda_plan_builder *b, char *staging, const cpa_cuda_plan *plan,
                               cpa_error *err) {
    cpa_cuda_piece *pieces = (cpa_cuda_piece *)(staging + plan->shared_at);
    if (b->n_shared == 0) return CPA_OK;
    for (int64_t i = b->cut.pieces; i < b->n_shared; i++) pieces[i] = (cpa_cuda_piece){.partial = -1, .next = -1};
    return cpa_cuda_cascade_write(b->cascade, b->given, b->tile_rows, &b->cut, b->first_ready, pieces,
                                  (cpa_cuda_listed_row *)(staging + plan->rows_at), err);
}

/* Fills a padded plan up with CTAs and items that have nothing to do. A cut leaves a partial state on each side, so
 * there are fewer than two for each CTA; beside shared keys, each unit has one too. */
static void fill_up(cpa_cuda_plan_builder *b, int64_t ctas, cpa_cuda_item *items, int64_t *rows) {
    for (int64_t i = b->shares.ctas; i < ctas; i++) b->decode[i] = (cpa_cuda_piece){.partial = -1, .next = -1};
    b->shares.ctas = ctas;
    const int64_t alone = b->n_shared > 0 && b->padded_items > ctas ? b->padded_items : ctas;
    const int64_t partial_rows = (ctas + alone) * b->unit_rows + b->n_shared * b->tile_rows;
    if (b->partial_rows < partial_rows) b->partial_rows = partial_rows;
    for (int64_t i = b->batch->n_items; i < b->padded_items; i++) items[i] = (cpa_cuda_item){.begin = *rows};
    *rows = b->padded_items * b->group;
}

/* Whether the launches of the plan are to stay the same: all its items are decode units, of most_rows rows together or
 * less. Few different ones may be the most rows of a unit, since what lies where depends on that. */
static cpa_status choose_padded(cpa_cuda_plan_builder *b, int64_t most_rows, cpa_error *err) {
    int64_t rows = 0, most = 1;
    if (most_rows == 0 || b->group > cpa_cuda_most_decode_rows(&b->batch->shape, b->batch->block_size)) return CPA_OK;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const int64_t count = b->batch->items[i].q_count;
        rows += count;
        while (most < count) most *= 2;
    }
    if (rows > most_rows)
        return cpa_fail(err, CPA_INTERNAL, "attend plan: %lld rows, expected at most the %lld of a padded step",
                        (long long)rows, (long long)most_rows);
    b->unit_rows = most * b->group;
    if (b->n_tiles == 0) b->padded_items = most_rows;
    return CPA_OK;
}

cpa_status cpa_cuda_plan_set(cpa_attend_plan *base, const cpa_attend_batch *given, cpa_attend_fusion fusion,
                             cpa_error *err) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    cpa_cuda_plan_memory *memory = plan->memory;
    cpa_attend_batch packed = *given;
    const cpa_attend_batch *batch = &packed;
    const cpa_cuda_device *device = (const cpa_cuda_device *)base->device;
    cpa_cuda_plan_builder b = {.given = batch,
                               .batch = batch,
                               .cascade = memory->cascade,
                               .state_shifts = fusion.state_shifts,
                               .first_ready = batch->n_items - fusion.ready_items,
                               .full = fusion.full,
                               .masked = fusion.masked,
                               .group = batch->shape.q_heads / batch->shape.kv_heads,
                               .multiprocessors = device->multiprocessors,
                               .wide_fits = device->base.caps.shared_bytes >= CPA_CUDA_WIDE_BYTES,
                               .tile_rows = cpa_cuda_plan_tile_rows(base->device, &batch->shape, batch->block_size)};
    CPA_TRY(cpa_cuda_select(base->device, err));
    plan->base.n_items = 0; /* until the plan is whole again */
    packed.cascade_attention = given->block_tables_on_device ? CPA_CASCADE_OFF : given->cascade_attention;
    CPA_TRY(count_work(&b, err));
    plan->device_tables = given->block_tables_on_device ? given->block_tables : NULL;
    plan->num_blocks = given->num_blocks;
    CPA_TRY(choose_padded(&b, fusion.padded_items, err));
    CPA_TRY(take_tables(&b, plan, given, &packed, fusion.tables, err));
    fusion.tables = b.tables;
    cpa_cuda_plan_choose_splits(&b);
    const int64_t most_ctas = b.shares.ctas;
    if (!cpa_cuda_plan_reserve_blocks(plan, batch, b.n_widened)) b.n_widened = 0;
    place_sections(plan, &b);
    CPA_TRY(cpa_cuda_plan_reserve_image(plan, plan->image_bytes, err));
    memory->staging = memory->stagings[memory->staging == memory->stagings[0]];
    CPA_TRY(cpa_cuda_plan_reserve_in_order(memory, b.n_pieces, err));
    b.decode = (cpa_cuda_piece *)(memory->staging + plan->decode_at);
    b.prefill = (cpa_cuda_piece *)(memory->staging + plan->prefill_at);
    b.splits = (cpa_cuda_split *)(memory->staging + plan->splits_at);
    b.in_order = memory->in_order;
    memset(memory->staging + plan->counters_at, 0, (size_t)(plan->prefill_at - plan->counters_at));
    cpa_cuda_table_source *sources = NULL;
    if (plan->device_tables) {
        sources = (cpa_cuda_table_source *)(memory->staging + plan->sources_at);
        find_tables(given, sources);
    } else if (batch->n_table_entries) {
        memcpy(memory->staging + plan->tables_at, batch->block_tables,
               (size_t)batch->n_table_entries * sizeof(int32_t));
    }
    cpa_cuda_item *items = (cpa_cuda_item *)(memory->staging + plan->items_at);
    copy_items(&b, items, &plan->rows);
    cpa_cuda_plan_place_blocks(&b, (int32_t *)(memory->staging + plan->widened_tables_at),
                               (int32_t *)(memory->staging + plan->widened_blocks_at), sources);
    cpa_cuda_plan_write_decode(&b);
    cpa_cuda_plan_write_prefill(&b);
    if (b.padded_items) fill_up(&b, most_ctas, items, &plan->rows);
    CPA_TRY(write_shared(&b, memory->staging, plan, err));
    if (b.partial_rows > INT32_MAX)
        return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: %lld rows of split keys, at most %d",
                        (long long)b.partial_rows, INT32_MAX);
    CPA_TRY(
        cpa_cuda_plan_reserve_partial(plan, b.partial_rows * batch->shape.kv_heads * (batch->shape.v_dim + 1), err));
    memory->current = 0;
    plan->map = batch->map;
    plan->tile_rows = b.tile_rows;
    plan->decode_ctas = (int32_t)b.shares.ctas;
    plan->decode_wide = b.shares.wide;
    plan->decode_row_tiles = b.shares.row_tiles;
    plan->n_prefill = (int32_t)b.n_pieces;
    plan->most_keys = b.most_keys * CPA_CUDA_PREFILL_KEYS;
    plan->by_head = (int32_t)b.by_head;
    plan->n_splits = (int32_t)b.n_splits;
    plan->n_widened = (int32_t)b.n_widened;
    plan->n_shared = (int32_t)b.n_shared;
    plan->partial_rows = b.partial_rows;
    cpa_attend_plan_describe(base, batch, fusion);
    if (b.n_shared > 0) base->keys_read -= cpa_cascade_keys_saved(&b.cascade->tree);
    if (b.padded_items) base->n_items = b.padded_items;
    memory->choices->n = memory->choices->next = 0;
    const cpa_cuda_attend_call call = cpa_cuda_planned_call(base->device, &base->shape, base->block_size, fusion);
    if (plan->rows > 0) (void)cpa_cuda_plan_choice(plan, &call);
    return CPA_OK;
}

const int32_t *cpa_cuda_plan_tables(const cpa_cuda_plan *plan) {
    const cpa_table_set stay = plan->base.fusion.tables;
    if (stay.tables) return cpa_block_tables_device(stay);
    return (const int32_t *)(plan->memory->image + plan->tables_at);
}

uint64_t cpa_cuda_plan_shape(const cpa_attend_plan *base) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    const uint64_t shape[] = {
        (uint64_t)base->n_items,           (uint64_t)plan->rows,
        (uint64_t)base->fusion.ready_row,  (uint64_t)base->fusion.ready_rows,
        (uint64_t)plan->decode_ctas,       (uint64_t)plan->decode_wide,
        (uint64_t)plan->tile_rows,         (uint64_t)plan->n_prefill,
        (uint64_t)plan->by_head,           (uint64_t)plan->n_splits,
        (uint64_t)plan->partial_rows,      (uint64_t)plan->image_bytes,
        (uint64_t)plan->tables_at,         (uint64_t)plan->decode_at,
        (uint64_t)plan->counters_at,       (uint64_t)plan->prefill_at,
        (uint64_t)plan->splits_at,         (uint64_t)plan->widened_tables_at,
        (uint64_t)plan->widened_blocks_at, (uint64_t)plan->n_widened,
        (uint64_t)plan->n_shared,          (uint64_t)plan->shared_at,
        (uint64_t)plan->rows_at,           (uintptr_t)plan->memory->image,
        (uintptr_t)plan->memory->partial,  (uintptr_t)plan->memory->widened,
        (uint64_t)plan->decode_row_tiles,  (uintptr_t)cpa_cuda_plan_tables(plan),
    };
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}
