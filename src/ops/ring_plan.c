/* Attends whose keys go through a ring: the plans of their passes, and the order of copies, attends and states. */
#include "src/ops/ring_plan.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/min_max.h"
#include "base/struct_size.h"
#include "src/ops/attend.h"
#include "src/ops/check_args.h"

/* ---- life ---- */

cpa_status cpa_ring_plan_create_within(cpa_kv_ring *ring, const cpa_key_workspace *workspace, cpa_ring_plan **out,
                                       cpa_error *err) {
    cpa_ring_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(err, CPA_NO_MEMORY, "ring: no memory for a plan");
    plan->ring = ring;
    plan->workspace = workspace;
    plan->head.device = ring->device;
    *out = plan;
    return CPA_OK;
}

cpa_status cpa_ring_plan_create(cpa_kv_ring *ring, cpa_ring_plan **out, cpa_error *err) {
    REQUIRE(err, ring && out, "ring plan: %s is NULL", ring ? "out" : "the ring");
    return cpa_ring_plan_create_within(ring, &ring->workspace, out, err);
}

void cpa_ring_plan_destroy(cpa_ring_plan *plan) {
    if (!plan) return;
    cpa_device *device = plan->head.device;
    for (int64_t i = 0; i < plan->n_plans; i++)
        if (plan->plans[i]) device->operators->plan_destroy(plan->plans[i]);
    device->table->free(device, plan->state);
    cpa_ring_blocks_free(&plan->blocks, device);
    cpa_ring_passes_free(&plan->passes);
    free(plan->plans);
    free(plan->turns);
    free(plan);
}

/* ---- a setting ---- */

/* Plans of passes, and which of them are the second of a pass: made when one needs them. */
enum { PLANS = 2, SEEING = 0, BLIND = 1 };

static cpa_status ensure_plans(cpa_ring_plan *plan, int64_t n, cpa_error *err) {
    if (!cpa_array_reserve(&plan->plans, &plan->plans_capacity, PLANS * n, sizeof(cpa_attend_plan *)) ||
        !cpa_array_reserve(&plan->turns, &plan->turns_capacity, n, sizeof *plan->turns))
        return cpa_fail(err, CPA_NO_MEMORY, "ring plan: no memory for %lld passes", (long long)n);
    while (plan->n_plans < PLANS * n) plan->plans[plan->n_plans++] = NULL;
    return CPA_OK;
}

static cpa_status ensure_state(cpa_ring_plan *plan, int64_t rows, cpa_error *err) {
    const cpa_attention_shape *s = &plan->head.shape;
    const int64_t bytes = rows * s->q_heads * (s->v_dim + 1) * (int64_t)sizeof(float);
    const cpa_device_table *table = plan->head.device->table;
    void *memory;
    if (bytes <= plan->state_bytes) return CPA_OK;
    CPA_TRY(table->alloc(plan->head.device, bytes, &memory, err));
    table->retire(plan->head.device, plan->state);
    plan->state = memory;
    plan->state_bytes = bytes;
    return CPA_OK;
}

static cpa_status set_items(cpa_ring_plan *plan, int64_t pass_index, int which, int64_t first, int64_t n,
                            const cpa_attend_batch *given, cpa_attend_fusion fusion, cpa_error *err) {
    const cpa_device *device = plan->head.device;
    const cpa_ring_pass *pass = &plan->passes.list[pass_index];
    cpa_attend_plan **of_items = &plan->plans[PLANS * pass_index + which];
    const cpa_attend_fusion own = {.full = fusion.full, .masked = fusion.masked};
    cpa_attend_batch batch = *given;
    batch.items = plan->passes.items + pass->first_item + first;
    batch.n_items = n;
    batch.block_tables = plan->passes.tables + pass->first_entry;
    batch.n_table_entries = pass->n_entries;
    if (!*of_items) CPA_TRY(device->operators->plan_create(plan->head.device, plan->workspace, of_items, err));
    return device->operators->plan_set(*of_items, &batch, own, err);
}

static cpa_status set_pass(cpa_ring_plan *plan, int64_t index, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                           cpa_error *err) {
    const cpa_ring_pass *pass = &plan->passes.list[index];
    const int64_t first_blind = pass->is_cut ? 1 : pass->n_items;
    CPA_TRY(set_items(plan, index, SEEING, 0, first_blind, batch, fusion, err));
    if (first_blind == pass->n_items) return CPA_OK;
    return set_items(plan, index, BLIND, first_blind, 1, batch, fusion, err);
}

cpa_status cpa_ring_plan_set_within(cpa_ring_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                                    int64_t settled, cpa_error *err) {
    cpa_attend_plan_describe(&plan->head, batch, fusion);
    plan->map = batch->map;
    plan->is_begun = 0;
    CPA_TRY(cpa_ring_passes_cut(&plan->passes, plan->ring, batch, settled, err));
    cpa_ring_blocks_reset(&plan->blocks, batch->n_items);
    CPA_TRY(ensure_plans(plan, plan->passes.n, err));
    CPA_TRY(ensure_state(plan, plan->passes.most_state_rows, err));
    for (int64_t i = 0; i < plan->passes.n; i++) CPA_TRY(set_pass(plan, i, batch, fusion, err));
    return CPA_OK;
}

cpa_status cpa_ring_plan_set(cpa_ring_plan *plan, const cpa_attend_batch *given, cpa_error *err) {
    cpa_attend_batch batch;
    cpa_batch_reach reach;
    REQUIRE(err, plan, "ring plan: the plan is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("ring plan", given, cpa_attend_batch, n_table_entries, &batch, err));
    CPA_TRY(cpa_check_batch(plan->head.device, &batch, &reach, err));
    REQUIRE(err, !batch.block_tables_on_device, "ring plan: block_tables_on_device is 1, expected tables on the host");
    const cpa_kv_ring_options *o = &plan->ring->options;
    const cpa_cache_form planned = {"the batch", batch.shape, batch.block_size},
                         own = {"the ring", o->shape, o->block_size};
    CPA_TRY(cpa_check_same_cache("ring plan", &planned, &own, 1, err));
    plan->head.is_set = 0;
    CPA_TRY(cpa_ring_plan_set_within(plan, &batch, (cpa_attend_fusion){0}, 0, err));
    plan->head.device->table->release(plan->head.device);
    plan->head.max_block = reach.max_block;
    plan->head.end = reach.end;
    plan->head.is_set = 1;
    return CPA_OK;
}

/* ---- which passes an attend runs ---- */

/* The rows of a pass of several over the same rows: those that see some of its keys under a causal mask, and those that
 * see none, NULL without such. */
static const cpa_attend_item *rows_of(const cpa_ring_plan *plan, int64_t pass, int which) {
    const cpa_ring_pass *p = &plan->passes.list[pass];
    return which < p->n_items ? &plan->passes.items[p->first_item + which] : NULL;
}

static int rows_see(const cpa_ring_plan *plan, const cpa_attend_args *args, const cpa_attend_item *rows) {
    const int has_bits = args->selection && args->selection->bits;
    return rows && cpa_key_item_sees(plan->map, args->mask, has_bits, rows);
}

static int sees(const cpa_ring_plan *plan, const cpa_attend_args *args, int64_t pass) {
    if (plan->blocks.is_selected && plan->blocks.passes[pass].n_runs == 0) return 0;
    return rows_see(plan, args, rows_of(plan, pass, SEEING)) || rows_see(plan, args, rows_of(plan, pass, BLIND));
}

/* All rows of a cut pass, as an item of no keys. */
static cpa_attend_item all_rows(const cpa_ring_plan *plan, int64_t pass) {
    cpa_attend_item all = *rows_of(plan, pass, SEEING);
    const cpa_attend_item *blind = rows_of(plan, pass, BLIND);
    all.k_count = 0;
    if (!blind) return all;
    all.q_row = blind->q_row;
    all.q_count += blind->q_count;
    return all;
}

/* The turns of the passes [first, end) of the same rows, from turn n on; returns where they end. Passes of which no row
 * sees a key are left out, but for one, as states are written in any case. */
static int64_t add_rows(const cpa_ring_plan *plan, const cpa_attend_args *args, int64_t first, int64_t end, int64_t n) {
    while (first < end - 1 && !sees(plan, args, first)) first++;
    while (end - 1 > first && !sees(plan, args, end - 1)) end--;
    for (int64_t i = first; i < end; i++) {
        if (end > first + 1 && !sees(plan, args, i)) continue;
        plan->turns[n++] = (cpa_ring_turn){i, args->resume || i > first, end > first + 1, i + 1 == end};
    }
    return n;
}

static int64_t choose_turns(const cpa_ring_plan *plan, const cpa_attend_args *args) {
    const cpa_ring_passes *passes = &plan->passes;
    int64_t n = 0;
    for (int64_t i = 0, end; i < passes->n; i = end) {
        end = i + 1;
        if (passes->list[i].is_cut) {
            while (!passes->list[end - 1].ends) end++;
            n = add_rows(plan, args, i, end, n);
        } else {
            plan->turns[n++] = (cpa_ring_turn){i, args->resume, 0, 1};
        }
    }
    return n;
}

/* ---- states and results ---- */

/* Where row 0 would be if the rows from `row` on lay at `memory`. */
static float *rows_at(float *memory, int64_t row, int64_t row_stride) {
    return (float *)((uintptr_t)memory - (uintptr_t)(row * row_stride * (int64_t)sizeof(float)));
}

/* The rows of an item have states of the plan, as far as the caller has none. */
static void place_states(const cpa_ring_plan *plan, const cpa_attend_item *item, cpa_attend_args *args) {
    const int64_t heads = plan->head.shape.q_heads, width = heads * plan->head.shape.v_dim;
    if (!args->state.o) {
        args->state.o = rows_at(plan->state, item->q_row, width);
        args->state.o_row_stride = width;
    }
    if (!args->state.lse) {
        args->state.lse = rows_at(plan->state + item->q_count * width, item->q_row, heads);
        args->state.lse_row_stride = heads;
        args->lse_head_stride = 0;
    }
}

/* A state that the caller wants whole is not what is left of one that results have been made of. */
static int keeps_state(const cpa_attend_args *args) {
    return args->out && args->state.o && !args->resume;
}

/* The results of some heads of rows whose states are whole; strides are resolved. */
static cpa_status round_heads(const cpa_attend_args *a, const cpa_attend_item *item, int32_t v_dim, int32_t head,
                              int32_t heads, cpa_stream *stream) {
    const int64_t out_at = item->q_row * a->out_row_stride + head * a->out_head_stride;
    const cpa_partial state = {
        .o = a->state.o + item->q_row * a->state.o_row_stride + (int64_t)head * v_dim,
        .o_row_stride = a->state.o_row_stride,
        .lse = a->state.lse + item->q_row * a->state.lse_row_stride + head * a->lse_head_stride,
        .lse_row_stride = a->state.lse_row_stride,
    };
    const cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = item->q_count,
        .heads = heads,
        .v_dim = v_dim,
        .states = &state,
        .n_states = 1,
        .out_dtype = a->out_scale ? CPA_FP8_E4M3 : a->q_dtype,
        .out = (char *)a->out + out_at * (a->out_scale ? 1 : cpa_dtype_bytes(a->q_dtype)),
        .out_row_stride = a->out_row_stride,
        .out_scale = a->out_scale,
        .sink_logits = a->rules && a->rules->sink_logits ? a->rules->sink_logits + head : NULL,
    };
    return stream->device->operators->merge(&merge, NULL, stream);
}

/* Of all heads at once where a merge takes them as they lie. */
static cpa_status round_states(const cpa_ring_plan *plan, const cpa_attend_args *args, const cpa_attend_item *item,
                               cpa_stream *stream) {
    const cpa_attention_shape *s = &plan->head.shape;
    cpa_attend_args a = *args;
    cpa_attend_resolve_rows(&a, s);
    const int32_t heads = a.out_head_stride == s->v_dim && a.lse_head_stride == 1 ? s->q_heads : 1;
    for (int32_t head = 0; head < s->q_heads; head += heads)
        CPA_TRY(round_heads(&a, item, s->v_dim, head, heads, stream));
    return CPA_OK;
}

/* ---- attend ---- */

/* Enqueues the copies of a turn. What is fresh follows the work that wrote it, all of a setting's first attend does. */
static cpa_status fill(cpa_ring_plan *plan, const cpa_kv_view *kv, const cpa_ring_turn *turn, int *follows,
                       cpa_stream *stream) {
    const cpa_ring_pass *pass = &plan->passes.list[turn->pass];
    if (!*follows && (pass->is_fresh || !plan->is_begun)) {
        CPA_TRY(cpa_kv_ring_follow(plan->ring, stream));
        *follows = 1;
    }
    if (!plan->blocks.is_selected)
        return cpa_kv_ring_fill(plan->ring, kv, plan->passes.runs + pass->first_run, pass->n_runs, 0, stream);
    const cpa_ring_selected *of = &plan->blocks.passes[turn->pass];
    return cpa_kv_ring_fill(plan->ring, kv, plan->blocks.runs + of->first_run, of->n_runs, of->lacks, stream);
}

/* The attends of a turn. Blind rows begin their states in it, or end with results, or are under a mask that shows them
 * something. */
static cpa_status attend_rows(const cpa_ring_plan *plan, const cpa_ring_turn *turn, const cpa_attend_args *args,
                              cpa_stream *stream) {
    const cpa_operator_table *operators = stream->device->operators;
    cpa_attend_plan *const *plans = &plan->plans[PLANS * turn->pass];
    CPA_TRY(operators->attend(plans[SEEING], args, NULL, stream));
    if (!plan->passes.list[turn->pass].is_cut || !rows_of(plan, turn->pass, BLIND)) return CPA_OK;
    if (turn->is_resumed && !args->out && !rows_see(plan, args, rows_of(plan, turn->pass, BLIND))) return CPA_OK;
    return operators->attend(plans[BLIND], args, NULL, stream);
}

/* Attends a turn's keys, in their segment. */
static cpa_status attend(cpa_ring_plan *plan, const cpa_attend_args *given, const cpa_ring_turn *turn, int64_t segment,
                         cpa_stream *stream) {
    const int keeps = turn->is_split && keeps_state(given);
    cpa_attend_args args = *given;
    args.kv = cpa_kv_ring_view(plan->ring, segment, &given->kv);
    args.resume = turn->is_resumed;
    if (!turn->is_split) return attend_rows(plan, turn, &args, stream);
    const cpa_attend_item all = all_rows(plan, turn->pass);
    place_states(plan, &all, &args);
    if (keeps || !turn->is_last) args.out = NULL, args.out_scale = NULL;
    CPA_TRY(attend_rows(plan, turn, &args, stream));
    if (!keeps || !turn->is_last) return CPA_OK;
    args.out = given->out;
    args.out_scale = given->out_scale;
    return round_states(plan, &args, &all, stream);
}

/* Queries of ready rows join the others. */
static cpa_status place_ready_queries(const cpa_ring_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                      cpa_stream *stream) {
    const cpa_attend_fusion *fusion = &plan->head.fusion;
    cpa_attend_args a = *args;
    if (fusion->ready_rows == 0) return CPA_OK;
    cpa_attend_resolve_rows(&a, &plan->head.shape);
    const int64_t row_bytes = a.q_row_stride * cpa_dtype_bytes(a.q_dtype);
    return stream->device->table->copy((char *)(uintptr_t)a.q + fusion->ready_row * row_bytes, ready_q,
                                       fusion->ready_rows * row_bytes, stream);
}

cpa_status cpa_ring_plan_attend(cpa_ring_plan *plan, const cpa_attend_args *args, const void *ready_q,
                                cpa_stream *stream) {
    cpa_kv_ring *ring = plan->ring;
    const cpa_kv_view kv = cpa_kv_view_resolve(args->kv);
    CPA_TRY(cpa_ring_blocks_select(&plan->blocks, &plan->passes, &plan->head, plan->map,
                                   args->selection ? args->selection->blocks : NULL, stream));
    const int64_t n = choose_turns(plan, args), first = ring->turn;
    int follows = 0;
    CPA_TRY(place_ready_queries(plan, args, ready_q, stream));
    for (int64_t i = 0; i < cpa_min64(n, ring->options.segments); i++)
        CPA_TRY(fill(plan, &kv, &plan->turns[i], &follows, stream));
    for (int64_t i = 0; i < n; i++) {
        const int64_t next = i + ring->options.segments;
        CPA_TRY(cpa_kv_ring_take(ring, first + i, stream));
        CPA_TRY(attend(plan, args, &plan->turns[i], first + i, stream));
        CPA_TRY(cpa_kv_ring_give_back(ring, first + i, stream));
        if (next < n) CPA_TRY(fill(plan, &kv, &plan->turns[next], &follows, stream));
    }
    plan->is_begun = 1;
    return CPA_OK;
}

cpa_status cpa_ring_attend(cpa_ring_plan *plan, const cpa_attend_args *given, cpa_stream *stream) {
    cpa_attend_args args;
    if (!stream) return CPA_INVALID;
    cpa_error *err = &stream->error;
    CPA_TRY(CPA_STRUCT_TAKE("attend", given, cpa_attend_args, state, &args, err));
    REQUIRE(err, plan, "attend: the ring plan is NULL");
    REQUIRE(err, plan->head.device == stream->device, "attend: the plan and the stream belong to different devices");
    CPA_TRY(cpa_check_attend_args(&plan->head, &args, err));
    if (plan->head.n_items == 0) return CPA_OK;
    CPA_TRY(cpa_kv_ring_check_view(plan->ring, &args.kv, err));
    if (stream->device->table->stream_is_captured(stream))
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "attend: the stream is in a capture of the caller's, and keys go through a ring");
    return cpa_ring_plan_attend(plan, &args, NULL, stream);
}
