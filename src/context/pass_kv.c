/* pass-KV: keys and values travel to the queries, in transfers of a bounded size.
 *
 * A transfer holds pieces of the shards of several sequences, packed into blocks, which the receiver reads through a
 * block table, as it reads a cache. The exchange of a transfer runs under the attention over the one before, that of
 * the first under the attention over the own shard.
 *
 * There are two ways to plan the transfers. Where attend promises bits, peers come one by one: each peer's shard is
 * attended from the empty state, resumed from segment to segment, and then merged, which is the arithmetic of pass-Q,
 * so that both give the same bits (shards are cut only where it allows). Elsewhere all peers come at once: a row takes
 * one pass over what they sent, with the keys of the own shard among theirs, or behind a pass over the own shard. That
 * takes whole blocks in the order of positions; where runs are shorter than blocks there are none, and peers come one
 * by one there too. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "src/context/pass_kv.h"
#include "src/context/pass_kv_gather.h"
#include "src/context/pass_kv_rounds.h"

/* Tokens that staging has room for in a segment where no bits are promised, at least: every segment rounds the state
 * once more. */
#define LEAST_SEGMENT 1024

/* By default. On a device segments are to be few: at the end of each the states of its rows go to memory and come back.
 */
#define HOST_STAGING_BYTES ((int64_t)64 << 20)
#define DEVICE_STAGING_BYTES ((int64_t)2 << 30)

/* ---- life ---- */

int cpa_pass_kv_gathers(const cpa_device_caps *caps, const cpa_context_options *o) {
    return !caps->bit_exact && o->interleave >= o->block_size;
}

/* Tokens that a shard may be cut at. */
static int64_t split_of(const cpa_device_caps *caps, const cpa_context_options *o) {
    const int64_t step = caps->bit_exact ? caps->split_tokens : LEAST_SEGMENT, run = o->interleave;
    int64_t split = cpa_pass_kv_gathers(caps, o) ? (LEAST_SEGMENT + run - 1) / run * run : step;
    while (split % o->block_size != 0) split += step;
    return split;
}

/* What a block takes, and how many segments there are. */
static cpa_kv_staging segments_of(const cpa_device_caps *caps, const cpa_context_options *o, int32_t ranks) {
    cpa_kv_staging staging = {.regions = cpa_pass_kv_gathers(caps, o) && ranks > 1 ? ranks - 1 : 1};
    cpa_attention_shape shapes[CPA_KV_STAGED] = {o->shape, cpa_shape_unquantised(&o->shape)};
    for (int of = CPA_KV_OF_SHAPE; of <= (o->has_unquantised ? CPA_KV_UNQUANTISED : CPA_KV_OF_SHAPE); of++) {
        shapes[of].layout = CPA_TOKEN_MAJOR;
        staging.layouts[of] = cpa_block_layout_of(&shapes[of], o->block_size);
        staging.block_bytes = cpa_max64(staging.block_bytes, staging.layouts[of].bytes);
    }
    staging.segments = CPA_KV_BUFFERS * (1 + staging.regions);
    return staging;
}

static int64_t least_segments(const cpa_device *device, const cpa_context_options *o, int32_t ranks) {
    const cpa_kv_staging staging = segments_of(&device->caps, o, ranks);
    return staging.segments * (split_of(&device->caps, o) / o->block_size) * staging.block_bytes;
}

/* Of the workspace that keys are prepared or expanded in, what the form that needs most of it has to have; 0: there is none. */
static int64_t least_workspace(const cpa_device *device, const cpa_context_options *o, const cpa_forms *forms) {
    int64_t least = 0;
    for (int32_t f = 0; f < forms->count; f++) {
        const cpa_form *form = &forms->list[f];
        least = cpa_max64(least, form->is_expanded ? cpa_expanded_keys_least(o, form, split_of(&device->caps, o))
                                                   : device->operators->least_workspace(&form->shape, o->block_size));
    }
    return least;
}

int64_t cpa_pass_kv_least_staging(const cpa_device *device, const cpa_context_options *options, const cpa_forms *forms,
                                  int32_t ranks) {
    return least_segments(device, options, ranks) + least_workspace(device, options, forms);
}

/* What of the bound goes to the workspace: half, as a segment takes twice its bytes when it is prepared, but no more than
 * is of use. Whether it is there in the end or not: all ranks have segments alike. */
static int64_t workspace_share(const cpa_device *device, const cpa_context_options *o, int32_t ranks, int64_t least,
                               int64_t bound) {
    const int64_t most = bound - least_segments(device, o, ranks);
    if (least == 0) return 0;
    return cpa_max64(cpa_min64(cpa_min64(bound / 2, most), CPA_KEY_WORKSPACE_BYTES), least);
}

/* How a shard may be cut, how many blocks a segment has, and the bytes of the workspace. */
static cpa_status size_staging(cpa_pass_kv *kv, cpa_kv_staging *out, int64_t *workspace) {
    const cpa_context_options *o = &kv->ops->options;
    const cpa_device *device = kv->ops->device;
    const int32_t ranks = kv->ops->map.cp_size;
    cpa_context_stats *stats = &kv->ops->stats;
    cpa_kv_staging staging = segments_of(&device->caps, o, ranks);
    kv->ops->split = split_of(&device->caps, o);
    const int64_t least_prepared = least_workspace(device, o, &kv->ops->forms);
    const int64_t usual = device->caps.bit_exact ? HOST_STAGING_BYTES : DEVICE_STAGING_BYTES;
    const int64_t least = least_segments(device, o, ranks) + least_prepared;
    stats->staging_bound = o->staging_bytes ? o->staging_bytes : cpa_max64(usual, least);
    if (stats->staging_bound < least) {
        return cpa_fail(&kv->ops->error, CPA_INVALID,
                        "context: staging_bytes: found %" PRId64 ", expected at least %" PRId64 ": %" PRId64
                        " segments of %" PRId64 " tokens, and %" PRId64 " to prepare keys in",
                        stats->staging_bound, least, staging.segments, kv->ops->split, least_prepared);
    }
    *workspace = workspace_share(device, o, ranks, least_prepared, stats->staging_bound);
    const int64_t capacity = (stats->staging_bound - *workspace) / staging.segments / staging.block_bytes;
    staging.capacity = cpa_min64(capacity, INT32_MAX / staging.segments);
    *out = staging;
    return CPA_OK;
}

/* Without a workspace plans attend keys as they lie, if slowly, but those that are expanded lie nowhere else. */
static cpa_status check_workspace(cpa_context_ops *ops) {
    for (int32_t f = 0; f < ops->forms.count; f++) {
        if (ops->forms.list[f].is_expanded && !ops->workspace.memory)
            return cpa_fail(&ops->error, CPA_NO_MEMORY,
                            "context: no memory for %" PRId64 " bytes to expand keys in, expected the least of form %d",
                            cpa_expanded_keys_least(&ops->options, &ops->forms.list[f], ops->split), f);
    }
    return CPA_OK;
}

cpa_status cpa_pass_kv_create(cpa_pass_kv *kv, cpa_context_ops *ops, const cpa_planned_step *step) {
    cpa_kv_staging staging;
    int64_t workspace = 0;
    kv->ops = ops;
    kv->step = step;
    CPA_TRY(size_staging(kv, &staging, &workspace));
    cpa_context_open_workspace(ops, workspace, least_workspace(ops->device, &ops->options, &ops->forms));
    CPA_TRY(check_workspace(ops));
    if (ops->map.cp_size == 1) return CPA_OK;
    cpa_kv_wanted_create(&kv->wanted, ops, step);
    /* The staging first: where it does not fit, its table is not filled, which is long too. */
    CPA_TRY(cpa_kv_transfers_create(&kv->transfers, ops, &staging));
    const int64_t blocks = staging.segments * staging.capacity;
    CPA_TRY(cpa_context_ensure_array(ops, &kv->table, &kv->table_capacity, blocks, sizeof *kv->table));
    for (int64_t i = 0; i < blocks; i++) kv->table[i] = (int32_t)i;
    return CPA_OK;
}

void cpa_pass_kv_destroy(cpa_pass_kv *kv) {
    if (!kv->ops) return;
    cpa_kv_wanted_destroy(&kv->wanted);
    cpa_kv_transfers_destroy(&kv->transfers);
    for (int32_t f = 0; f < CPA_MOST_ROW_FORMS; f++) {
        cpa_context_free(kv->ops, &kv->rows[f].shard_memory);
        free(kv->rows[f].runs);
    }
    cpa_context_free(kv->ops, &kv->empty_memory);
    cpa_kv_pieces_destroy(&kv->received);
    cpa_kv_pieces_destroy(&kv->sent);
    free(kv->schedules);
    free(kv->table);
}

/* ---- the transfers of a step ---- */

static cpa_status plan_runs(cpa_pass_kv *kv) {
    for (int64_t i = 0; i < kv->step->n_chunks; i++) {
        const cpa_planned_chunk *chunk = &kv->step->chunks[i];
        const int64_t rows = cpa_planned_share(kv->step, chunk, kv->ops->rank).rows;
        if (chunk->algorithm != CPA_PASS_KV || rows == 0) continue;
        cpa_kv_rows *of = &kv->rows[chunk->form];
        cpa_row_run *last = of->n_runs ? &of->runs[of->n_runs - 1] : NULL;
        if (last && last->row + last->rows == chunk->row) {
            last->rows += rows;
            continue;
        }
        CPA_TRY(cpa_context_ensure_array(kv->ops, &of->runs, &of->runs_capacity, of->n_runs + 1, sizeof *of->runs));
        of->runs[of->n_runs++] = (cpa_row_run){chunk->row, rows};
    }
    return CPA_OK;
}

/* What empties the states of so many own rows. */
static cpa_status ensure_empty(cpa_pass_kv *kv, int64_t rows) {
    int64_t heads = rows * kv->ops->options.shape.q_heads;
    if (heads * (int64_t)sizeof(float) <= kv->empty_memory.bytes) return CPA_OK;
    CPA_TRY(cpa_context_ensure(kv->ops, &kv->empty_memory, heads * (int64_t)sizeof(float)));
    int64_t n = kv->empty_memory.bytes / (int64_t)sizeof(float);
    float *empty = malloc((size_t)n * sizeof *empty);
    cpa_status status =
        empty ? CPA_OK : cpa_fail(&kv->ops->error, CPA_NO_MEMORY, "no memory for %" PRId64 " rows", rows);
    for (int64_t i = 0; empty && i < n; i++) empty[i] = -INFINITY;
    if (empty) status = cpa_context_upload(kv->ops, kv->empty_memory.memory, empty, n * (int64_t)sizeof *empty);
    free(empty);
    if (status != CPA_OK) kv->empty_memory.bytes = 0; /* the next step fills it */
    kv->empty = kv->empty_memory.memory;
    return status;
}

cpa_status cpa_pass_kv_plan(cpa_pass_kv *kv) {
    cpa_kv_transfers_clear(&kv->transfers);
    cpa_kv_wanted_forget(&kv->wanted);
    kv->n_schedules = 0;
    for (int32_t f = 0; f < kv->ops->forms.count; f++) kv->rows[f].n_runs = 0;
    if (!cpa_step_exchanges(kv->step)) return CPA_OK;
    CPA_TRY(plan_runs(kv));
    for (int32_t f = 0; f < kv->ops->forms.count; f++) {
        const int32_t v_dim = kv->ops->forms.list[f].shape.v_dim;
        cpa_kv_rows *of = &kv->rows[f];
        if (of->n_runs == 0) continue;
        CPA_TRY(ensure_empty(kv, kv->step->rows[f]));
        if (!kv->step->gathers)
            CPA_TRY(cpa_context_ensure_state(kv->ops, &of->shard_memory, kv->step->rows[f], v_dim, &of->shard));
    }
    return CPA_OK;
}

static int same_masks(const cpa_pass_kv *kv, const cpa_kv_schedule *schedule, const cpa_mask *masks) {
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        if (!cpa_mask_equals(schedule->masks[f], masks[f])) return 0;
    return 1;
}

cpa_status cpa_pass_kv_select(cpa_pass_kv *kv, const cpa_mask masks[CPA_MOST_ROW_FORMS],
                              const cpa_key_selection *selection) {
    const int wants_blocks = cpa_kv_wanted_by(kv->ops, selection);
    if (!cpa_step_exchanges(kv->step)) return CPA_OK;
    for (int64_t i = 0; i < kv->n_schedules; i++) {
        kv->now = kv->schedules[i];
        if (kv->now.table_set == kv->ops->table_set && kv->now.wants_blocks == wants_blocks &&
            same_masks(kv, &kv->now, masks))
            return CPA_OK;
    }
    CPA_TRY(cpa_context_ensure_array(kv->ops, &kv->schedules, &kv->schedules_capacity, kv->n_schedules + 1,
                                     sizeof *kv->schedules));
    kv->now =
        (cpa_kv_schedule){.table_set = kv->ops->table_set, .wants_blocks = wants_blocks, .begin = kv->transfers.count};
    for (int32_t f = 0; f < kv->ops->forms.count; f++) kv->now.masks[f] = masks[f];
    CPA_TRY(kv->step->gathers ? cpa_pass_kv_plan_gather(kv) : cpa_pass_kv_plan_rounds(kv));
    kv->now.end = kv->transfers.count;
    kv->schedules[kv->n_schedules++] = kv->now;
    return CPA_OK;
}

/* ---- one layer ---- */

static cpa_status empty_rows(cpa_pass_kv *kv, cpa_partial state, cpa_row_run run, cpa_stream *stream) {
    const int64_t heads = kv->ops->options.shape.q_heads;
    if (run.rows == 0) return CPA_OK;
    cpa_status status = kv->ops->device->table->copy(state.lse + run.row * heads, kv->empty,
                                                     run.rows * heads * (int64_t)sizeof(float), stream);
    return cpa_context_check(kv->ops, status, stream);
}

static cpa_status empty_shard(cpa_pass_kv *kv, const cpa_kv_rows *rows, cpa_stream *stream) {
    for (int64_t i = 0; i < rows->n_runs; i++) CPA_TRY(empty_rows(kv, rows->shard, rows->runs[i], stream));
    return CPA_OK;
}

static cpa_status merge_shard(cpa_pass_kv *kv, const cpa_form *form, cpa_partial own, cpa_stream *stream) {
    const cpa_kv_rows *rows = &kv->rows[form->index];
    for (int64_t i = 0; i < rows->n_runs; i++) {
        cpa_row_run run = rows->runs[i];
        cpa_partial acc = cpa_context_state_at(own, run.row);
        cpa_partial shard = cpa_context_state_at(rows->shard, run.row);
        cpa_merge_args merge = {
            .size = sizeof merge,
            .rows = run.rows,
            .heads = form->shape.q_heads,
            .v_dim = form->shape.v_dim,
            .states = (cpa_partial[]){acc, shard},
            .n_states = 2,
            .out_dtype = CPA_F32,
            .out = acc.o,
            .out_row_stride = acc.o_row_stride,
            .out_lse = acc.lse,
            .out_lse_row_stride = acc.lse_row_stride,
        };
        CPA_TRY(cpa_context_run_merge(kv->ops, &merge, NULL, stream));
    }
    return CPA_OK;
}

static const cpa_kv_transfer *transfer_at(const cpa_pass_kv *kv, int64_t index) {
    return &kv->transfers.list[index];
}

/* What a transfer brings, for the rows of one form. */
static cpa_status attend_transfer(cpa_pass_kv *kv, int64_t index, const cpa_kv_layer *layer, const cpa_form *form,
                                  cpa_stream *stream) {
    const cpa_kv_transfer *transfer = transfer_at(kv, index);
    const cpa_kv_attended *attended = &transfer->attended[form->index];
    const cpa_form_layer *of = &layer->layer->forms[form->index];
    const cpa_partial own = layer->own[form->index];
    if (transfer->begins) CPA_TRY(empty_shard(kv, &kv->rows[form->index], stream));
    if (attended->rows > 0) {
        const int completes = index + 1 == kv->now.end && layer->open_rows[form->index] < kv->step->rows[form->index];
        const cpa_kv_view staging = cpa_kv_transfers_view(&kv->transfers);
        cpa_attend_args attend = cpa_context_attend_args(kv->ops, form, of, CPA_SCORE_OWN);
        attend.kv = cpa_form_view(form, &staging);
        attend.resume = 1;
        attend.state = kv->step->gathers ? own : kv->rows[form->index].shard;
        attend.out = completes ? of->rows.out : NULL;
        attend.out_scale = completes ? of->rows.out_scale : NULL;
        CPA_TRY(cpa_row_plan_attend(attended->plan, kv->ops, form, of, &attend, NULL, CPA_SPAN_ATTEND_RECEIVED,
                                    transfer->round, stream));
    }
    return transfer->ends ? merge_shard(kv, form, own, stream) : CPA_OK;
}

int64_t cpa_pass_kv_open_rows(const cpa_pass_kv *kv, int32_t form) {
    const int64_t rows = kv->step->rows[form];
    if (!kv->step->gathers || kv->now.begin == kv->now.end) return rows;
    const cpa_kv_attended *last = &transfer_at(kv, kv->now.end - 1)->attended[form];
    return last->first_row + last->rows == rows ? last->first_row : rows;
}

static cpa_status pack(cpa_pass_kv *kv, int64_t index, const cpa_kv_layer *layer, cpa_stream *stream) {
    return cpa_kv_transfers_pack(&kv->transfers, index, &layer->layer->kv,
                                 cpa_block_tables_host((cpa_table_set){kv->step->tables, kv->now.table_set}), stream);
}

static int leaves_out(const cpa_pass_kv *kv) {
    return kv->now.wants_blocks && kv->now.begin < kv->now.end;
}

cpa_status cpa_pass_kv_find_wanted(cpa_pass_kv *kv, const cpa_layer *layer, cpa_stream *stream) {
    return leaves_out(kv) ? cpa_kv_wanted_find(&kv->wanted, layer->selection, stream) : CPA_OK;
}

cpa_status cpa_pass_kv_start(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream) {
    const int64_t first = kv->now.begin;
    cpa_kv_transfers_begin(&kv->transfers, &layer->layer->kv, leaves_out(kv) ? &kv->wanted : NULL);
    if (first == kv->now.end) return CPA_OK;
    CPA_TRY(pack(kv, first, layer, stream));
    CPA_TRY(cpa_kv_transfers_start(&kv->transfers, first, stream));
    /* Rows among them that go over the own shard first are attended there after this, from the empty state anyway. */
    for (int32_t f = 0; f < kv->ops->forms.count; f++)
        CPA_TRY(empty_rows(kv, layer->own[f], (cpa_row_run){0, kv->now.own[f].one_pass_rows}, stream));
    return CPA_OK;
}

cpa_status cpa_pass_kv_attend_own(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream) {
    for (int32_t f = 0; f < kv->ops->forms.count; f++) {
        if (!kv->now.own[f].plan) continue;
        CPA_TRY(cpa_row_plan_attend_own(kv->now.own[f].plan, kv->ops, &kv->ops->forms.list[f], &layer->layer->forms[f],
                                        CPA_SCORE_OWN, layer->own[f], NULL, stream));
    }
    return CPA_OK;
}

cpa_status cpa_pass_kv_run(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream) {
    for (int64_t i = kv->now.begin; i < kv->now.end; i++) {
        int more = i + 1 < kv->now.end;
        if (more) CPA_TRY(pack(kv, i + 1, layer, stream));
        CPA_TRY(cpa_kv_transfers_finish(&kv->transfers, i, stream));
        if (more) CPA_TRY(cpa_kv_transfers_start(&kv->transfers, i + 1, stream));
        for (int32_t f = 0; f < kv->ops->forms.count; f++)
            CPA_TRY(attend_transfer(kv, i, layer, &kv->ops->forms.list[f], stream));
        cpa_kv_transfers_release(&kv->transfers, i);
    }
    return CPA_OK;
}
