/* The CUDA attend plan: rows become tiles, keys are split until every multiprocessor has work (attend_plan_pieces.c),
 * and everything that the kernels read about a step goes to the device in one copy. Keys that decode items share go to
 * pieces of their own, of the prefill kernels (attend_cascade.c). */
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_plan.h"
#include "kernels/cuda/attend/attend_source.h"

enum {
    LEAST_STEADY_ENTRIES = 256, /* table entries that a padded plan has room for; then powers of two */
    STEADY_SHARED = 8,          /* pieces over shared keys of a padded plan come in multiples of so many */
    /* Keys of all items and KV heads up to which wide groups are padded: a team reads them once a tile of rows, prefill
     * tiles once, which takes 0.2 ns a key less on an H200 (64 x 1K tokens, 128 heads over one: 34 and 23 us). */
    WIDE_STEADY_KEYS = 1 << 14
};

/* The most splits of decode units, for each CTA of a team: a cut lies between two teams, or before the unit's own
 * keys. */
static int64_t most_decode_splits(const cpa_cuda_plan_builder *b, int64_t units) {
    return units < b->shares.teams || b->cut.split_keys > 0 ? units : b->shares.teams;
}

/* The sections of block tables, of a plan that has some of its own. */
static void place_tables(cpa_cuda_plan *plan, const cpa_cuda_plan_builder *b, int64_t entries, int64_t *end) {
    const int64_t places = b->n_places > 0 ? entries : 0;
    plan->tables_at = cpa_cuda_place_section(end, entries * (int64_t)sizeof(int32_t));
    plan->place_tables_at = cpa_cuda_place_section(end, places * (int64_t)sizeof(int32_t));
    plan->listed_blocks_at = cpa_cuda_place_section(end, b->n_places * (int64_t)sizeof(int32_t));
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
    plan->decode_at =
        cpa_cuda_place_section(&end, (units + b->shares.teams) * b->team.ctas * (int64_t)sizeof(cpa_cuda_piece));
    plan->counters_at = cpa_cuda_place_section(
        &end, most_decode_splits(b, units) * b->team.ctas * b->batch->shape.kv_heads * (int64_t)sizeof(uint32_t));
    plan->tickets_at = cpa_cuda_place_section(&end, (int64_t)sizeof(uint32_t));
    cpa_cuda_plan_place_prefill(b, &plan->prefill, &end);
    cpa_cuda_source_place(plan->memory->source, &end);
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
        sources[i] = (cpa_cuda_table_source){.from = batch->items[i].table, .to = {-1, 0, 1}};
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

/* Whether the kernel of latents is one for listed pieces, as far as the batch tells. */
static int may_share_latents(const cpa_attend_batch *batch, const cpa_cuda_device *device) {
    const cpa_attention_shape *shape = &batch->shape;
    const cpa_cuda_attend_spec spec = {
        .call = cpa_cuda_planned_call(&device->base, shape, batch->block_size, (cpa_attend_fusion){0}),
        .shape = shape,
        .block_size = batch->block_size,
        .width = cpa_cuda_width_of(shape->k_dim, shape->v_dim)};
    return !cpa_cuda_kernel_refuses(&cpa_cuda_kernel_latent, &spec);
}

/* Whether there is a kernel for listed pieces. */
static int may_share(const cpa_cuda_plan_builder *b, const cpa_cuda_device *device) {
    const cpa_attention_shape *shape = &b->given->shape;
    const int runs_fit = shape->kv_dtype != CPA_INT8 && b->given->block_size >= CPA_CUDA_DECODE_RUN;
    const int tensor_cores =
        shape->kv_dtype != CPA_F32 && shape->kv_dtype != CPA_FP8_E5M2 && (shape->layout != CPA_VLLM_X || runs_fit);
    const int is_one_for_it =
        shape->v_in_k ? may_share_latents(b->given, device) : tensor_cores && !cpa_cuda_is_wide(shape);
    return b->given->cascade_attention != CPA_CASCADE_OFF && device->path == CPA_CUDA_HOPPER && b->n_decode > 1 &&
           !b->full && !b->masked && is_one_for_it;
}

/* Finds what items share, where that pays, and leaves each with the keys that are its own. */
static cpa_status share_keys(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, const cpa_cuda_device *device,
                             cpa_error *err) {
    if (!may_share(b, device)) return CPA_OK;
    CPA_TRY(cpa_cuda_cascade_plan(b->cascade, b->given, b->tables, b->tile_rows, b->multiprocessors, &b->cut, err));
    if (b->cut.split_keys == 0) return CPA_OK;
    CPA_TRY(cpa_cuda_source_cut_shared(b, plan, err));
    if (b->cut.split_keys == 0) return CPA_OK;
    b->own = *b->given;
    b->own.items = b->cascade->own;
    b->batch = &b->own;
    b->n_shared = b->cut.pieces;
    b->n_listed = b->cut.rows;
    if (b->padded_items == 0) return CPA_OK;
    b->n_shared = cpa_cuda_ceil_div(b->n_shared, STEADY_SHARED) * STEADY_SHARED;
    b->n_listed = b->n_shared * cpa_cuda_tile_entries(b->given, b->tile_rows);
    return CPA_OK;
}

/* Shares keys, and says by which tables the kernels read: those that stay as they are, but where keys are prepared,
 * whose places follow from the entries of the plan's own; or the plan's own, which the batch then is of. */
static cpa_status take_tables(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, const cpa_attend_batch *given,
                              cpa_attend_batch *packed, cpa_table_set stay, cpa_error *err) {
    const cpa_cuda_device *device = (const cpa_cuda_device *)plan->base.device;
    const int prepares = b->n_tiles > 0 && cpa_cuda_source_prepares(plan->base.device, &given->shape);
    if (stay.tables && !prepares) {
        b->tables = stay;
        packed->n_table_entries = 0;
        CPA_TRY(share_keys(b, plan, device, err));
        if (b->n_places == 0) return CPA_OK;
        cpa_cuda_source_clear(plan->memory->source);
        b->tables = (cpa_table_set){0};
        b->batch = b->given;
        b->n_places = b->n_shared = b->n_listed = 0;
        b->cut = (cpa_cuda_cascade_cut){0};
    }
    /* Items over one table are prepared apart, each at places of its own. */
    if (stay.tables || prepares || cpa_cuda_plan_packs_tables(given))
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
 * there are fewer than two for each team; beside shared keys, each unit has one too. */
static void fill_up(cpa_cuda_plan_builder *b, int64_t teams, cpa_cuda_item *items, int64_t *rows) {
    for (int64_t i = b->shares.teams * b->team.ctas; i < teams * b->team.ctas; i++)
        b->decode[i] = (cpa_cuda_piece){.partial = -1, .next = -1};
    b->shares.teams = teams;
    const int64_t alone = b->n_shared > 0 && b->padded_items > teams ? b->padded_items : teams;
    const int64_t partial_rows = (teams + alone) * b->unit_rows + b->n_shared * b->tile_rows;
    if (b->partial_rows < partial_rows) b->partial_rows = partial_rows;
    for (int64_t i = b->batch->n_items; i < b->padded_items; i++) items[i] = (cpa_cuda_item){.begin = *rows};
    *rows = b->padded_items * b->group;
}

/* Which items go to decode; and whether the launches of the plan are to stay the same: where all items go there, of
 * most_rows rows together or less. Few different ones may be the most rows of a unit, since what lies where depends on
 * that. */
static cpa_status choose_decode(cpa_cuda_plan_builder *b, int64_t most_rows, cpa_error *err) {
    const cpa_attention_shape *shape = &b->batch->shape;
    const int64_t most_padded = cpa_cuda_most_padded_rows(shape, b->batch->block_size);
    int64_t rows = 0, keys = 0, most = 1, longest = 0;
    b->team = cpa_cuda_team_of(shape, b->batch->block_size);
    b->decode_rows = cpa_cuda_most_decode_rows(shape, b->batch->block_size);
    if (most_rows == 0 || b->group > most_padded) return CPA_OK;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const int64_t count = b->batch->items[i].q_count;
        rows += count;
        keys += b->batch->items[i].k_count;
        longest = cpa_max64(longest, count);
    }
    if (rows > most_rows)
        return cpa_fail(err, CPA_INTERNAL, "attend plan: %lld rows, expected at most the %lld of a padded step",
                        (long long)rows, (long long)most_rows);
    if (longest * b->group > most_padded) return CPA_OK;
    if (b->group > b->decode_rows && keys * shape->kv_heads > WIDE_STEADY_KEYS) return CPA_OK;
    while (most < longest) most *= 2;
    b->decode_rows = most_padded;
    b->unit_rows = cpa_min64(most * b->group, b->team.rows);
    b->padded_items = most_rows;
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
    cpa_cuda_source_clear(memory->source);
    CPA_TRY(choose_decode(&b, fusion.padded_items, err));
    CPA_TRY(cpa_cuda_plan_count_work(&b, err));
    plan->device_tables = given->block_tables_on_device ? given->block_tables : NULL;
    plan->num_blocks = given->num_blocks;
    CPA_TRY(take_tables(&b, plan, given, &packed, fusion.tables, err));
    fusion.tables = b.tables;
    cpa_cuda_plan_choose_splits(&b);
    const int64_t most_teams = b.shares.teams;
    CPA_TRY(cpa_cuda_source_cut_prefill(&b, plan, err));
    place_sections(plan, &b);
    CPA_TRY(cpa_cuda_plan_reserve_image(plan, plan->image_bytes, err));
    memory->staging = memory->stagings[memory->staging == memory->stagings[0]];
    CPA_TRY(cpa_cuda_plan_reserve_in_order(memory, cpa_cuda_source_most_pieces(memory->source, b.n_pieces), err));
    b.decode = (cpa_cuda_piece *)(memory->staging + plan->decode_at);
    b.in_order = memory->in_order;
    memset(memory->staging + plan->counters_at, 0, (size_t)(plan->prefill.pieces_at - plan->counters_at));
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
    cpa_cuda_source_write_blocks(memory->source, &b, (int32_t *)(memory->staging + plan->place_tables_at),
                                 (int32_t *)(memory->staging + plan->listed_blocks_at), sources);
    cpa_cuda_plan_write_decode(&b);
    const int64_t decode_partial_rows = b.partial_rows;
    cpa_cuda_plan_write_prefill(&b, memory->staging, &plan->prefill);
    cpa_cuda_source_write_pieces(&b, plan, decode_partial_rows);
    if (b.padded_items) fill_up(&b, most_teams, items, &plan->rows);
    CPA_TRY(write_shared(&b, memory->staging, plan, err));
    if (b.partial_rows > INT32_MAX)
        return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: %lld rows of split keys, at most %d",
                        (long long)b.partial_rows, INT32_MAX);
    CPA_TRY(
        cpa_cuda_plan_reserve_partial(plan, b.partial_rows * batch->shape.kv_heads * (batch->shape.v_dim + 1), err));
    memory->current = 0;
    plan->map = batch->map;
    plan->tile_rows = b.tile_rows;
    plan->decode_ctas = (int32_t)(b.shares.teams * b.team.ctas);
    plan->decode_rows = (int32_t)b.decode_rows;
    plan->decode_wide = b.shares.wide;
    plan->decode_row_tiles = b.shares.row_tiles;
    plan->most_keys = b.most_keys * CPA_CUDA_PREFILL_KEYS;
    plan->n_places = b.n_places;
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
        (uint64_t)base->n_items,
        (uint64_t)plan->rows,
        (uint64_t)base->fusion.ready_row,
        (uint64_t)base->fusion.ready_rows,
        (uint64_t)plan->decode_ctas,
        (uint64_t)plan->decode_wide,
        (uint64_t)plan->decode_row_tiles,
        (uint64_t)plan->tile_rows,
        (uint64_t)plan->prefill.n_pieces,
        (uint64_t)plan->prefill.by_head,
        (uint64_t)plan->prefill.n_splits,
        (uint64_t)plan->partial_rows,
        (uint64_t)plan->image_bytes,
        (uint64_t)plan->tables_at,
        (uint64_t)plan->decode_at,
        (uint64_t)plan->counters_at,
        (uint64_t)plan->prefill.pieces_at,
        (uint64_t)plan->prefill.splits_at,
        (uint64_t)plan->place_tables_at,
        (uint64_t)plan->listed_blocks_at,
        (uint64_t)plan->n_shared,
        (uint64_t)plan->shared_at,
        (uint64_t)plan->rows_at,
        (uintptr_t)plan->memory->image,
        (uintptr_t)plan->memory->partial,
        cpa_cuda_source_shape(plan->memory->source),
        (uintptr_t)cpa_cuda_plan_tables(plan),
    };
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}
