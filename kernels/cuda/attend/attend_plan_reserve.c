/* Reserved attend plans: the image has room for all that the limits allow, and kernels write it. A plan of this kind
 * has decode units alone, as many CTAs as the device runs at once, and a work space for as many cuts as lie between
 * them. */
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_split.h"

/* Teams of decode for as many sequences as there can be, each as long as it can be. */
static cpa_status share_most(const cpa_cuda_plan *plan, const cpa_attend_reservation *r, int64_t keys,
                             cpa_cuda_decode_shares *shares, cpa_error *err) {
    const cpa_cuda_device *device = (const cpa_cuda_device *)plan->base.device;
    cpa_attend_item *items = calloc((size_t)r->sequences, sizeof *items);
    if (!items)
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld sequences", (long long)r->sequences);
    for (int64_t s = 0; s < r->sequences; s++) items[s] = (cpa_attend_item){.q_count = r->rows, .k_count = keys};
    const cpa_attend_batch batch = {
        .shape = r->shape, .block_size = r->block_size, .items = items, .n_items = r->sequences};
    *shares = cpa_cuda_share_decode(&batch, CPA_CUDA_MOST_DECODE_ROWS, device->multiprocessors,
                                    device->base.caps.shared_bytes >= CPA_CUDA_WIDE_BYTES);
    free(items);
    return CPA_OK;
}

static void place_sections(cpa_cuda_plan *plan, const cpa_attend_reservation *r, int64_t units, int64_t teams,
                           int64_t ctas) {
    const int64_t sequences = r->sequences, cuts = units + teams, splits = units < teams ? units : teams;
    int64_t end = 0;
    plan->counters_bytes = splits * ctas * r->shape.kv_heads * (int64_t)sizeof(uint32_t);
    plan->items_at = cpa_cuda_place_section(&end, sequences * (int64_t)sizeof(cpa_cuda_item));
    plan->tables_at = cpa_cuda_place_section(&end, sequences * r->table_stride * (int64_t)sizeof(int32_t));
    plan->decode_at = cpa_cuda_place_section(&end, cuts * ctas * (int64_t)sizeof(cpa_cuda_piece));
    plan->counters_at = cpa_cuda_place_section(&end, plan->counters_bytes);
    plan->units_at = cpa_cuda_place_section(&end, units * (int64_t)sizeof(cpa_cuda_unit));
    plan->cuts_at = cpa_cuda_place_section(&end, cuts * (int64_t)sizeof(cpa_cuda_cut));
    plan->places_at = cpa_cuda_place_section(&end, r->map.cp_size * (int64_t)sizeof(cpa_attend_place));
    plan->image_bytes = end;
}

static cpa_status check_limits(const cpa_attend_reservation *r, int64_t packed_rows, int64_t keys, cpa_error *err) {
    if (packed_rows > CPA_CUDA_MOST_DECODE_ROWS)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "attend plan: reserved for %d rows of %d query heads a KV head, at most %d in all", r->rows,
                        r->shape.q_heads / r->shape.kv_heads, CPA_CUDA_MOST_DECODE_ROWS);
    if (keys > INT32_MAX / 2)
        return cpa_fail(err, CPA_UNSUPPORTED, "attend plan: reserved for %lld keys a sequence, at most %d",
                        (long long)keys, INT32_MAX / 2);
    return CPA_OK;
}

/* The first contents: each sequence is empty. All of it on one stream: what is cleared on the default stream of the
 * device is not ordered with the others, and on a busy device would clear the places after they are there. */
static cpa_status begin_empty(cpa_cuda_plan *plan, const cpa_attend_reservation *r, cpa_error *err) {
    const cpa_device_table *table = plan->base.device->table;
    const cpa_attend_update empty = {.sequences = r->sequences, .length_bytes = sizeof(int32_t)};
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

cpa_status cpa_cuda_plan_reserve(cpa_attend_plan *base, const cpa_attend_reservation *reservation, cpa_error *err) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    const cpa_attend_reservation *r = reservation;
    const int64_t packed_rows = (int64_t)r->rows * (r->shape.q_heads / r->shape.kv_heads);
    const int64_t keys = cpa_shard_len(r->map, 0, r->tokens); /* no shard has more */
    const cpa_cuda_team team = cpa_cuda_team_of(&r->shape, r->block_size);
    cpa_cuda_decode_shares shares;
    cpa_status status = CPA_OK;
    CPA_TRY(check_limits(r, packed_rows, keys, err));
    CPA_TRY(cpa_cuda_select(base->device, err));
    CPA_TRY(share_most(plan, r, keys, &shares, err));
    plan->map = r->map;
    plan->tile_rows = CPA_CUDA_PREFILL_ROWS;
    plan->rows = r->sequences * packed_rows;
    plan->decode_ctas = (int32_t)(shares.teams * team.ctas);
    plan->decode_wide = shares.wide;
    plan->decode_row_tiles = shares.row_tiles;
    plan->partial_rows = 2 * shares.teams * cpa_min64(packed_rows, team.rows); /* a cut leaves a state on each side */
    place_sections(plan, r, r->sequences * cpa_cuda_decode_units(team, packed_rows), shares.teams, team.ctas);
    base->reservation = *r;
    base->fusion =
        (cpa_attend_fusion){.padded_items = r->sequences, .ready_row = r->ready_row, .ready_rows = r->ready_rows};
    base->n_items = r->sequences;
    base->rows_attended = r->sequences * r->rows;
    base->shape = r->shape;
    base->block_size = r->block_size;
    CPA_TRY_GOTO(cpa_cuda_plan_allocate_image(plan, plan->image_bytes, err), failed);
    CPA_TRY_GOTO(
        cpa_cuda_plan_reserve_partial(plan, plan->partial_rows * r->shape.kv_heads * (r->shape.v_dim + 1), err),
        failed);
    CPA_TRY_GOTO(begin_empty(plan, r, err), failed);
    base->reservation.places = NULL;
    return CPA_OK;
failed:
    cpa_cuda_free(base->device, plan->memory->image);
    plan->memory->image = NULL;
    plan->memory->image_capacity = 0;
    base->n_items = base->reservation.sequences = 0;
    return status;
}

/* What comes behind the memset does not begin before the kernels are over, even if it is placed early behind a kernel
 * and reads the plan before it waits (base/dependent.cuh). */
cpa_status cpa_cuda_plan_update(cpa_attend_plan *base, const cpa_attend_update *update, cpa_stream *stream) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    const cpa_attend_reservation *r = &base->reservation;
    const cpa_cuda_team team = cpa_cuda_team_of(&r->shape, r->block_size);
    char *image = plan->memory->image;
    cpa_cuda_update_args args = {
        .update = *update,
        .reservation = *r,
        .group = r->shape.q_heads / r->shape.kv_heads,
        .teams = plan->decode_ctas / team.ctas,
        .team = team,
        .heads = cpa_cuda_decode_geometry(&r->shape, r->block_size).heads,
        .tables = (int32_t *)(image + plan->tables_at),
        .items = (cpa_cuda_item *)(image + plan->items_at),
        .units = (cpa_cuda_unit *)(image + plan->units_at),
        .cuts = (cpa_cuda_cut *)(image + plan->cuts_at),
        .pieces = (cpa_cuda_piece *)(image + plan->decode_at),
    };
    args.reservation.places = (const cpa_attend_place *)(image + plan->places_at);
    CPA_TRY(cpa_cuda_select(base->device, &stream->error));
    CPA_TRY(cpa_cuda_read_sequences(&args, stream));
    CPA_TRY(cpa_cuda_assign_pieces(&args, stream));
    return cpa_cuda_check(
        &stream->error,
        cudaMemsetAsync(image + plan->counters_at, 0, (size_t)plan->counters_bytes, cpa_cuda_handle(stream)),
        "attend plan");
}
