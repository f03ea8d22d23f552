/* Reserved attend plans: the image has room for all that the limits allow, and kernels write it. All rows are those of
 * decode where a sequence may have a few, else those of items of few: as many CTAs as the device runs at once, and a work
 * space for as many cuts as lie between them. Items of more rows are prefill tiles, with a CTA for each that there may
 * be. */
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/attend_update.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_split.h"

/* What follows from the limits. */
typedef struct reserved_room {
    cpa_cuda_team team;
    cpa_cuda_decode_shares shares;
    int64_t group, packed_rows, all_rows; /* rows of a KV head: of a sequence, and of all sequences */
    int64_t items, decode_rows;
    int64_t units;                                   /* of decode */
    int64_t tiled_items, pieces, splits, split_rows; /* of prefill */
    int32_t tile_rows;
} reserved_room;

/* The most packed rows of an item that stays with decode. Rows in runs have no prefill kernel that reads them as they
 * lie. */
static int64_t most_decode_rows(const cpa_attend_reservation *r, int64_t packed_rows) {
    if (packed_rows <= CPA_CUDA_MOST_DECODE_ROWS || r->shape.layout == CPA_VLLM_X) return packed_rows;
    return cpa_cuda_most_decode_rows(&r->shape, r->block_size);
}

/* Teams of decode for as many sequences as there can be, each as long as it can be. Where some items are tiles, CTAs
 * still have full units: of rows that are refused, whatever their number. */
static cpa_status share_most(const cpa_cuda_plan *plan, const cpa_attend_reservation *r, int64_t keys,
                             reserved_room *room, cpa_error *err) {
    const cpa_cuda_device *device = (const cpa_cuda_device *)plan->base.device;
    const int64_t rows =
        room->packed_rows > CPA_CUDA_MOST_DECODE_ROWS ? cpa_cuda_ceil_div(room->team.rows, room->group) : r->rows;
    cpa_attend_item *items = calloc((size_t)r->sequences, sizeof *items);
    if (!items)
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld sequences", (long long)r->sequences);
    for (int64_t s = 0; s < r->sequences; s++) items[s] = (cpa_attend_item){.q_count = rows, .k_count = keys};
    const cpa_attend_batch batch = {
        .shape = r->shape, .block_size = r->block_size, .items = items, .n_items = r->sequences};
    room->shares =
        cpa_cuda_share_decode(&batch, cpa_max64(CPA_CUDA_MOST_DECODE_ROWS, rows * room->group), device->multiprocessors,
                              device->base.caps.shared_bytes >= CPA_CUDA_WIDE_BYTES);
    free(items);
    return CPA_OK;
}

/* The most tiles that rows of items of more than decode_rows come to; and pieces, since tiles are cut into more only
 * where they fill the device fewer than CPA_CUDA_PREFILL_WAVES times, and then into as many at most. */
static void count_tiles(const cpa_cuda_plan *plan, const cpa_attend_reservation *r, reserved_room *room) {
    const int64_t multiprocessors = ((const cpa_cuda_device *)plan->base.device)->multiprocessors;
    const int64_t places = CPA_CUDA_PREFILL_WAVES * multiprocessors / r->shape.kv_heads;
    if (room->packed_rows <= room->decode_rows) return;
    room->tiled_items = cpa_min64(room->items, room->all_rows / (room->decode_rows + 1));
    const int64_t tiles = room->all_rows / room->tile_rows + room->tiled_items;
    room->pieces = cpa_max64(tiles, places);
    room->splits = cpa_min64(tiles, places);
    room->split_rows = places * room->tile_rows;
}

static cpa_status check_limits(const cpa_attend_reservation *r, const reserved_room *room, int64_t keys,
                               cpa_error *err) {
    if (room->all_rows > INT32_MAX / 2)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "attend plan: reserved for %lld rows of %lld query heads a KV head, at most %d in all",
                        (long long)r->total_rows, (long long)room->group, INT32_MAX / 2);
    if (keys > INT32_MAX / 2)
        return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: reserved for %lld keys a sequence, at most %d",
                        (long long)keys, INT32_MAX / 2);
    return CPA_OK;
}

static cpa_status measure(const cpa_cuda_plan *plan, const cpa_attend_reservation *r, reserved_room *room,
                          cpa_error *err) {
    const int64_t keys = cpa_shard_len(r->map, 0, r->tokens); /* no shard has more */
    const int32_t askers = cpa_attend_askers(r);
    *room = (reserved_room){.team = cpa_cuda_team_of(&r->shape, r->block_size),
                            .group = r->shape.q_heads / r->shape.kv_heads,
                            .items = r->sequences * askers,
                            .tile_rows = cpa_cuda_plan_tile_rows(plan->base.device, &r->shape, r->block_size)};
    room->packed_rows = r->rows * room->group;
    room->all_rows = r->total_rows * room->group;
    room->decode_rows = most_decode_rows(r, room->packed_rows);
    CPA_TRY(check_limits(r, room, keys, err));
    room->units = cpa_min64(room->items * cpa_cuda_decode_units(room->team, room->packed_rows),
                            askers * room->all_rows / room->team.rows + room->items);
    count_tiles(plan, r, room);
    return share_most(plan, r, keys, room, err);
}

static void place_sections(cpa_cuda_plan *plan, const cpa_attend_reservation *r, const reserved_room *room) {
    const int64_t units = room->units, teams = room->shares.teams, ctas = room->team.ctas;
    const int64_t cuts = units + teams, splits = cpa_min64(units, teams);
    int64_t end = 0;
    plan->counters_bytes = splits * ctas * r->shape.kv_heads * (int64_t)sizeof(uint32_t);
    plan->items_at = cpa_cuda_place_section(&end, room->items * (int64_t)sizeof(cpa_cuda_item));
    plan->tables_at = cpa_cuda_place_section(&end, r->sequences * r->table_stride * (int64_t)sizeof(int32_t));
    plan->decode_at = cpa_cuda_place_section(&end, cuts * ctas * (int64_t)sizeof(cpa_cuda_piece));
    plan->counters_at = cpa_cuda_place_section(&end, plan->counters_bytes);
    plan->units_at = cpa_cuda_place_section(&end, units * (int64_t)sizeof(cpa_cuda_unit));
    plan->cuts_at = cpa_cuda_place_section(&end, cuts * (int64_t)sizeof(cpa_cuda_cut));
    plan->places_at = cpa_cuda_place_section(&end, r->map.cp_size * (int64_t)sizeof(cpa_attend_place));
    plan->prefill.pieces_at = cpa_cuda_place_section(&end, room->pieces * (int64_t)sizeof(cpa_cuda_piece));
    plan->prefill.splits_at = cpa_cuda_place_section(&end, room->splits * (int64_t)sizeof(cpa_cuda_split));
    plan->tiled_at = cpa_cuda_place_section(&end, room->tiled_items * (int64_t)sizeof(cpa_cuda_tiled_item));
    plan->costs_at = cpa_cuda_place_section(&end, room->pieces * (int64_t)sizeof(int32_t));
    plan->image_bytes = end;
}

/* The first contents: each sequence is empty. All of it on one stream: what is cleared on the default stream of the
 * device is not ordered with the others, and on a busy device would clear the places after they are there. */
static cpa_status begin_empty(cpa_cuda_plan *plan, const cpa_attend_reservation *r, cpa_error *err) {
    const cpa_device_table *table = plan->base.device->table;
    const cpa_attend_update empty = {.sequences = r->total_rows / r->rows, .length_bytes = sizeof(int32_t)};
    const cpa_attend_place origin = {0, 0}, *places = r->places ? r->places : &origin;
    cpa_status status = CPA_OK;
    cpa_stream *stream = NULL;
    CPA_TRY(table->stream_create(plan->base.device, &stream, err));
    CPA_TRY_GOTO(
        cpa_cuda_check(&stream->error,
                       cudaMemsetAsync(plan->memory->image, 0, (size_t)plan->image_bytes, cpa_cuda_handle(stream)),
                       "attend plan"),
        done);
    CPA_TRY_GOTO(
        table->copy(plan->memory->image + plan->places_at, places, r->map.cp_size * (int64_t)sizeof *places, stream),
        done);
    CPA_TRY_GOTO(cpa_cuda_plan_update(&plan->base, &empty, stream), done);
    CPA_TRY_GOTO(table->stream_sync(stream), done);
done:
    if (status != CPA_OK) cpa_fail(err, status, "%s", stream->error.message);
    table->stream_destroy(stream);
    return status;
}

/* What attends of the plan are told. */
static void describe(cpa_cuda_plan *plan, const cpa_attend_reservation *r, const reserved_room *room) {
    cpa_attend_plan *base = &plan->base;
    /* A cut leaves a state on each side. */
    const int64_t decode_partial_rows = 2 * room->shares.teams * cpa_min64(room->packed_rows, room->team.rows);
    plan->map = r->map;
    plan->tile_rows = room->tile_rows;
    plan->rows = room->items > r->sequences ? room->items * room->packed_rows : room->all_rows;
    plan->decode_ctas = (int32_t)(room->shares.teams * room->team.ctas);
    plan->decode_rows = (int32_t)room->decode_rows;
    plan->decode_wide = room->shares.wide;
    plan->decode_row_tiles = room->shares.row_tiles;
    plan->partial_rows = decode_partial_rows + room->split_rows;
    plan->prefill.n_pieces = (int32_t)room->pieces;
    plan->prefill.n_splits = (int32_t)room->splits;
    plan->most_keys = r->tokens;
    plan->reserved_items = room->items;
    plan->reserved_first_partial = (int32_t)decode_partial_rows;
    base->reservation = *r;
    base->fusion =
        (cpa_attend_fusion){.padded_items = r->sequences, .ready_row = r->ready_row, .ready_rows = r->ready_rows};
    base->n_items = room->items;
    base->rows_attended = r->total_rows;
    base->shape = r->shape;
    base->block_size = r->block_size;
}

cpa_status cpa_cuda_plan_reserve(cpa_attend_plan *base, const cpa_attend_reservation *reservation, cpa_error *err) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    const cpa_attend_reservation *r = reservation;
    reserved_room room;
    cpa_status status = CPA_OK;
    CPA_TRY(cpa_cuda_select(base->device, err));
    CPA_TRY(measure(plan, r, &room, err));
    place_sections(plan, r, &room);
    describe(plan, r, &room);
    CPA_TRY_GOTO(cpa_cuda_check(err, cudaHostAlloc((void **)&plan->refusal, sizeof *plan->refusal, 0), "attend plan"),
                 failed);
    CPA_TRY_GOTO(cpa_cuda_plan_allocate_image(plan, plan->image_bytes, err), failed);
    CPA_TRY_GOTO(
        cpa_cuda_plan_reserve_partial(plan, plan->partial_rows * r->shape.kv_heads * (r->shape.v_dim + 1), err),
        failed);
    CPA_TRY_GOTO(begin_empty(plan, r, err), failed);
    base->reservation.places = NULL;
    base->refusal = plan->refusal;
    return CPA_OK;
failed:
    (void)cudaFreeHost(plan->refusal);
    plan->refusal = NULL;
    cpa_cuda_free(base->device, plan->memory->image);
    plan->memory->image = NULL;
    plan->memory->image_capacity = 0;
    base->n_items = base->reservation.sequences = 0;
    return status;
}

/* What the kernels of an update are told. */
static cpa_cuda_update_args args_of(const cpa_cuda_plan *plan, const cpa_attend_update *update) {
    const cpa_attend_reservation *r = &plan->base.reservation;
    const cpa_cuda_team team = cpa_cuda_team_of(&r->shape, r->block_size);
    char *image = plan->memory->image;
    cpa_cuda_update_args args = {
        .update = *update,
        .reservation = *r,
        .n_items = plan->reserved_items,
        .group = r->shape.q_heads / r->shape.kv_heads,
        .decode_rows = plan->decode_rows,
        .teams = plan->decode_ctas / team.ctas,
        .team = team,
        .heads = cpa_cuda_decode_geometry(&r->shape, r->block_size).heads,
        .tables = (int32_t *)(image + plan->tables_at),
        .items = (cpa_cuda_item *)(image + plan->items_at),
        .units = (cpa_cuda_unit *)(image + plan->units_at),
        .cuts = (cpa_cuda_cut *)(image + plan->cuts_at),
        .pieces = (cpa_cuda_piece *)(image + plan->decode_at),
        .tiles = {.rows = plan->tile_rows,
                  .multiprocessors = ((const cpa_cuda_device *)plan->base.device)->multiprocessors,
                  .kv_heads = r->shape.kv_heads,
                  .first_partial = plan->reserved_first_partial,
                  .most_pieces = plan->prefill.n_pieces,
                  .most_splits = plan->prefill.n_splits,
                  .items = (cpa_cuda_tiled_item *)(image + plan->tiled_at),
                  .costs = (int32_t *)(image + plan->costs_at),
                  .pieces = (cpa_cuda_piece *)(image + plan->prefill.pieces_at),
                  .splits = (cpa_cuda_split *)(image + plan->prefill.splits_at)},
    };
    args.refusal = plan->refusal;
    args.reservation.places = (const cpa_attend_place *)(image + plan->places_at);
    return args;
}

/* What comes behind the memset does not begin before the kernels are over, even if it is placed early behind a kernel
 * and reads the plan before it waits (base/dependent.cuh). */
cpa_status cpa_cuda_plan_update(cpa_attend_plan *base, const cpa_attend_update *update, cpa_stream *stream) {
    const cpa_cuda_plan *plan = (const cpa_cuda_plan *)base;
    const cpa_cuda_update_args args = args_of(plan, update);
    CPA_TRY(cpa_cuda_select(base->device, &stream->error));
    CPA_TRY(cpa_cuda_read_sequences(&args, stream));
    CPA_TRY(cpa_cuda_assign_pieces(&args, stream));
    if (args.tiles.most_pieces > 0) CPA_TRY(cpa_cuda_cut_tiles(&args, stream));
    return cpa_cuda_check(&stream->error,
                          cudaMemsetAsync(plan->memory->image + plan->counters_at, 0, (size_t)plan->counters_bytes,
                                          cpa_cuda_handle(stream)),
                          "attend plan");
}
