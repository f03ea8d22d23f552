/* Attends over keys that are prepared: pass by pass, each with the launches of a plan that has them as they lie. */
#include "base/check.h"
#include "kernels/cuda/attend/attend_source.h"
#include "kernels/key_source.h"

cpa_status cpa_cuda_launch_prefill(const cpa_cuda_attend_launch *launch, const cpa_cuda_prefill *pieces,
                                   cpa_stream *stream) {
    const char *image = launch->plan->memory->image;
    cpa_cuda_attend_args a = *launch->args;
    cpa_cuda_attend_launch own = *launch;
    a.pieces = (const cpa_cuda_piece *)(image + pieces->pieces_at);
    a.splits = (const cpa_cuda_split *)(image + pieces->splits_at);
    a.by_head = pieces->by_head;
    own.args = &a;
    own.count = pieces->n_pieces;
    CPA_TRY(own.kernel->launch(&own, stream));
    return pieces->n_splits > 0 ? cpa_cuda_attend_combine(&a, pieces->n_splits, stream) : CPA_OK;
}

/* What a pass has is prepared and attended, with the arguments of the launch but for the keys. */
static cpa_status run_pass(const cpa_cuda_attend_launch *launch, const cpa_cuda_pass *pass,
                           cpa_cuda_pass_launcher *attend, cpa_stream *stream) {
    const cpa_cuda_plan *plan = launch->plan;
    const char *image = plan->memory->image;
    const int32_t *blocks = (const int32_t *)(image + plan->listed_blocks_at) + pass->first_place;
    cpa_cuda_attend_args a = *launch->args;
    cpa_kv_view kv;
    CPA_TRY(launch->kernel->prepares->prepare(launch, blocks, pass->n_places, plan->memory->source->workspace->memory,
                                              &a, &kv, stream));
    a.tables = (const int32_t *)(image + plan->place_tables_at);
    cpa_cuda_attend_launch own = *launch;
    own.kernel = launch->kernel->over;
    own.args = &a;
    own.kv = &kv;
    return attend(&own, pass, stream);
}

/* ---- rows whose keys are in several passes ---- */

/* Where row 0 would be if the rows from `row` on lay at `memory`. */
static float *rows_at(char *memory, int64_t row, int64_t row_stride) {
    return (float *)((uintptr_t)memory - (uintptr_t)(row * row_stride * (int64_t)sizeof(float)));
}

/* States of the rows at the end of the workspace, as far as the caller has none. */
static void place_states(const cpa_cuda_attend_launch *launch, const cpa_attend_item *item, cpa_cuda_attend_args *a) {
    const cpa_key_workspace *workspace = launch->plan->memory->source->workspace;
    const int64_t width = (int64_t)a->q_heads * a->v_dim, alignment = 64;
    const int64_t bytes = item->q_count * (width + a->q_heads) * (int64_t)sizeof(float);
    char *states = workspace->memory + (workspace->bytes - bytes) / alignment * alignment;
    if (!a->o) {
        a->o = rows_at(states, item->q_row, width);
        a->o_row_stride = width;
    }
    if (!a->lse) {
        a->lse = rows_at(states + item->q_count * width * (int64_t)sizeof(float), item->q_row, a->q_heads);
        a->lse_row_stride = a->q_heads;
        a->lse_head_stride = 1;
    }
}

/* The results of some heads of rows whose states are whole. */
static cpa_status round_heads(const cpa_cuda_attend_args *a, const cpa_attend_item *item, int32_t head, int32_t heads,
                              cpa_stream *stream) {
    const int64_t out_at = item->q_row * a->out_row_stride + head * a->out_head_stride;
    const cpa_partial state = {.o = a->o + item->q_row * a->o_row_stride + (int64_t)head * a->v_dim,
                               .o_row_stride = a->o_row_stride,
                               .lse = a->lse + item->q_row * a->lse_row_stride + head * a->lse_head_stride,
                               .lse_row_stride = a->lse_row_stride};
    const cpa_merge_args merge = {
        .size = sizeof merge,
        .rows = item->q_count,
        .heads = heads,
        .v_dim = a->v_dim,
        .states = &state,
        .n_states = 1,
        .out_dtype = a->out_scale ? CPA_FP8_E4M3 : a->q_dtype,
        .out = a->out + out_at * (a->out_scale ? 1 : cpa_dtype_bytes(a->q_dtype)),
        .out_row_stride = a->out_row_stride,
        .out_scale = a->out_scale,
        .sink_logits = a->score.sink_logits ? a->score.sink_logits + head : NULL,
    };
    return cpa_cuda_merge(&merge, NULL, stream);
}

/* The results of rows whose states are whole: of all heads at once where a merge takes them as they lie. */
static cpa_status round_states(const cpa_cuda_attend_args *a, const cpa_attend_item *item, cpa_stream *stream) {
    const int dense = a->out_head_stride == a->v_dim && a->lse_head_stride == 1;
    const int32_t heads = dense ? a->q_heads : 1;
    for (int32_t head = 0; head < a->q_heads; head += heads) CPA_TRY(round_heads(a, item, head, heads, stream));
    return CPA_OK;
}

static int sees(const cpa_cuda_attend_args *a, const cpa_cuda_pass *pass) {
    return cpa_key_item_sees(a->map, a->mask, a->score.custom.bits != NULL, &pass->item);
}

/* The same rows over all their keys, in n passes. What no row sees is not prepared. Each pass goes on from the states of
 * the one before; the last leaves results, unless the state has to be whole too, which a resumed one is not then. */
static cpa_status run_rows(const cpa_cuda_attend_launch *launch, const cpa_cuda_pass *passes, int64_t n,
                           cpa_cuda_pass_launcher *attend, cpa_stream *stream) {
    const cpa_cuda_attend_args *given = launch->args;
    int64_t first = 0, last = n - 1;
    while (first < last && !sees(given, &passes[first])) first++;
    while (last > first && !sees(given, &passes[last])) last--;
    const int keeps = first < last && given->out && given->o && !given->resume;
    cpa_cuda_attend_args a = *given;
    cpa_cuda_attend_launch own = *launch;
    own.args = &a;
    if (first < last) place_states(launch, &passes[first].item, &a);
    for (int64_t i = first; i <= last; i++) {
        if (first < last && !sees(given, &passes[i])) continue;
        a.resume = given->resume || i > first;
        a.out = i < last || keeps ? NULL : given->out;
        CPA_TRY(run_pass(&own, &passes[i], attend, stream));
    }
    a.out = given->out;
    return keeps ? round_states(&a, &passes[first].item, stream) : CPA_OK;
}

cpa_status cpa_cuda_launch_passes_by(const cpa_cuda_attend_launch *launch, const cpa_cuda_passes *passes,
                                     cpa_cuda_pass_launcher *attend, cpa_stream *stream) {
    for (int64_t i = 0, n = 1; i < passes->n; i += n, n = 1) {
        const cpa_cuda_pass *pass = &passes->list[i];
        if (pass->is_cut && launch->args->rows == NULL) {
            while (!pass[n - 1].ends) n++;
            CPA_TRY(run_rows(launch, pass, n, attend, stream));
        } else {
            CPA_TRY(run_pass(launch, pass, attend, stream));
        }
    }
    return CPA_OK;
}

static cpa_status launch_pieces(const cpa_cuda_attend_launch *launch, const cpa_cuda_pass *pass, cpa_stream *stream) {
    return cpa_cuda_launch_prefill(launch, &pass->pieces, stream);
}

cpa_status cpa_cuda_launch_passes(const cpa_cuda_attend_launch *launch, const cpa_cuda_passes *passes,
                                  cpa_stream *stream) {
    return cpa_cuda_launch_passes_by(launch, passes, launch_pieces, stream);
}
