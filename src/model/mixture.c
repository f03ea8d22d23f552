#include "src/model/mixture.h"

#include <cpattn/experts.h>
#include <cpattn/nn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/nn.h"

/* Of a piece in memory: as aligned as any operator asks for. */
#define ALIGNMENT 256

cpa_mixture cpa_mixture_of(const cpa_model_config *config, cpa_dtype dtype, cpa_weights_part held, int32_t spread_over,
                           int gathers, int64_t piece) {
    return (cpa_mixture){
        .config = config,
        .dtype = dtype,
        .held = cpa_own_experts(config->moe.experts, held.expert_ranks, held.expert_rank),
        .spread_over = spread_over,
        .gathers = gathers && spread_over > 1,
        .piece = piece,
    };
}

/* Gives out `bytes` of a memory; without one it only counts them. */
static void *take(char *memory, int64_t *used, int64_t bytes) {
    void *piece = memory ? memory + *used : NULL;
    *used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
}

static cpa_sorted_choices take_choices(char *memory, int64_t *used, int64_t experts, int64_t places) {
    cpa_sorted_choices choices;
    choices.offsets = take(memory, used, (experts + 1) * (int64_t)sizeof *choices.offsets);
    choices.tokens = take(memory, used, places * (int64_t)sizeof *choices.tokens);
    choices.places = take(memory, used, places * (int64_t)sizeof *choices.places);
    return choices;
}

int64_t cpa_mixture_place(cpa_mixture *m, void *memory) {
    const cpa_moe_config *moe = &m->config->moe;
    const int64_t row = m->config->hidden * cpa_dtype_bytes(m->dtype), inner = moe->intermediate;
    const int64_t all = m->spread_over * m->piece, rows = m->gathers ? all : m->piece, choices = rows * moe->top_k;
    const int64_t places = all * cpa_min64(moe->top_k, m->held.count);
    int64_t used = 0;
    if (moe->experts == 0) return 0;
    m->logits = take(memory, &used, rows * moe->experts * (int64_t)sizeof *m->logits);
    m->ids = take(memory, &used, choices * (int64_t)sizeof *m->ids);
    m->weights = take(memory, &used, choices * (int64_t)sizeof *m->weights);
    m->choices = take_choices(memory, &used, moe->experts, choices);
    m->wide = take(memory, &used, places * cpa_max64(row, 2 * inner * cpa_dtype_bytes(m->dtype)));
    m->inner = take(memory, &used, places * inner * cpa_dtype_bytes(m->dtype));
    if (m->spread_over == 1) return used;
    if (m->gathers) {
        m->gathered = take(memory, &used, all * row);
        m->part = take(memory, &used, all * m->config->hidden * (int64_t)sizeof *m->part);
        m->received = take(memory, &used, all * m->config->hidden * (int64_t)sizeof *m->received);
        return used;
    }
    m->sorted = take(memory, &used, choices * row);
    m->arrived = take(memory, &used, places * row);
    m->arrived_ids = take(memory, &used, places * (int64_t)sizeof *m->arrived_ids);
    m->arrivals = take_choices(memory, &used, m->held.count, places);
    return used;
}

/* The router's product is not rounded to the dtype: which experts are taken hangs on it. */
cpa_status cpa_mixture_route(const cpa_mixture *m, const cpa_feed_forward_weights *w, const void *x, int64_t rows,
                             cpa_stream *stream) {
    const cpa_moe_config *moe = &m->config->moe;
    const cpa_linear_args product = {
        .size = sizeof product,
        .rows = rows,
        .inputs = m->config->hidden,
        .outputs = moe->experts,
        .dtype = m->dtype,
        .out_dtype = CPA_F32,
        .x = x,
        .weight = w->router,
        .out = m->logits,
    };
    const cpa_expert_route_args route = {
        .size = sizeof route,
        .rows = rows,
        .experts = moe->experts,
        .top_k = moe->top_k,
        .logits = m->logits,
        .scores = moe->scores,
        .group_scores = moe->group_scores,
        .n_group = moe->n_group,
        .topk_group = moe->topk_group,
        .bias = w->router_bias,
        .normalise = moe->renormalise,
        .scale = moe->scale,
        .ids = m->ids,
        .weights = m->weights,
    };
    CPA_TRY(cpa_linear(&product, stream));
    return cpa_expert_route(&route, stream);
}

cpa_status cpa_mixture_multiply(const cpa_mixture *m, const cpa_feed_forward_weights *w, cpa_slice experts,
                                const cpa_sorted_choices *choices, int64_t places, const void *x, int64_t x_rows,
                                cpa_stream *stream) {
    const int32_t hidden = m->config->hidden, inner = m->config->moe.intermediate;
    const int64_t matrix = (int64_t)hidden * inner * cpa_dtype_bytes(m->dtype), skipped = experts.begin - m->held.begin;
    const cpa_expert_linear_args gate_up = {
        .size = sizeof gate_up,
        .experts = (int32_t)experts.count,
        .rows = places,
        .inputs = hidden,
        .outputs = 2 * inner,
        .dtype = m->dtype,
        .out_dtype = m->dtype,
        .offsets = choices->offsets,
        .x = x,
        .x_rows = x_rows,
        .weight = (const char *)w->expert_gate_up + 2 * skipped * matrix,
        .out = m->wide,
        .tokens = choices->tokens,
    };
    const cpa_swiglu_args activate = {
        .size = sizeof activate,
        .rows = places,
        .width = inner,
        .dtype = m->dtype,
        .gate_up = m->wide,
        .out = m->inner,
    };
    cpa_expert_linear_args down = gate_up;
    const cpa_nn_table *nn = stream->device->nn;
    cpa_expert_linear_args gated = gate_up;
    gated.x_stride = gated.weight_stride = hidden;
    gated.expert_stride = 2 * (int64_t)inner * hidden;
    gated.out = m->inner;
    gated.out_stride = inner;
    down.inputs = inner;
    down.outputs = hidden;
    down.x = m->inner;
    down.x_rows = places;
    down.weight = (const char *)w->expert_down + skipped * matrix;
    down.tokens = NULL;
    if (places > 0 && nn->gates_experts && nn->gates_experts(&gated, stream)) {
        CPA_TRY(nn->expert_gated(&gated, stream));
    } else {
        CPA_TRY(cpa_expert_linear(&gate_up, stream));
        CPA_TRY(cpa_swiglu(&activate, stream));
    }
    return cpa_expert_linear(&down, stream);
}

cpa_status cpa_mixture_compute(const cpa_mixture *m, const cpa_feed_forward_weights *w, cpa_slice experts,
                               const cpa_mixture_piece *piece, cpa_stream *stream) {
    const cpa_moe_config *moe = &m->config->moe;
    const int64_t places = piece->rows * cpa_min64(moe->top_k, experts.count); /* at most */
    const cpa_expert_permute_args permute = {
        .size = sizeof permute,
        .rows = piece->rows,
        .top_k = moe->top_k,
        .first_expert = (int32_t)experts.begin,
        .experts = (int32_t)experts.count,
        .ids = m->ids,
        .offsets = m->choices.offsets,
        .tokens = m->choices.tokens,
        .places = m->choices.places,
    };
    const cpa_expert_combine_args combine = {
        .size = sizeof combine,
        .rows = piece->rows,
        .top_k = moe->top_k,
        .width = m->config->hidden,
        .dtype = piece->dtype,
        .y_dtype = m->dtype,
        .y = m->wide,
        .y_rows = places,
        .places = m->choices.places,
        .weights = m->weights,
        .out = piece->out,
        .shared = piece->added,
    };
    CPA_TRY(cpa_mixture_route(m, w, piece->x, piece->rows, stream));
    CPA_TRY(cpa_expert_permute(&permute, stream));
    CPA_TRY(cpa_mixture_multiply(m, w, experts, &m->choices, places, piece->x, piece->rows, stream));
    return cpa_expert_combine(&combine, stream);
}

cpa_status cpa_mixture_run(const cpa_mixture *m, const cpa_feed_forward_weights *w, const cpa_mixture_rows *at,
                           cpa_stream *stream) {
    const cpa_slices *slices = at->step->slices;
    const int64_t rows = at->step->rows.count, bytes = cpa_dtype_bytes(m->dtype);
    const cpa_slice experts = slices ? cpa_own_experts(m->config->moe.experts, slices->ranks, slices->rank) : m->held;
    for (int64_t first = 0; first < rows; first += m->piece) {
        const int64_t before = first * m->config->hidden;
        const cpa_mixture_piece piece = {
            .rows = cpa_min64(m->piece, rows - first),
            .x = (const char *)at->x + before * bytes,
            .out = slices ? (void *)(at->part + before) : (char *)at->out + before * bytes,
            .dtype = slices ? CPA_F32 : m->dtype, /* parts of sums are not rounded */
            .added = at->added ? (const char *)at->added + before * bytes : NULL,
        };
        CPA_TRY(cpa_mixture_compute(m, w, experts, &piece, stream));
    }
    if (!slices) return CPA_OK;
    const cpa_slice_sum sum = {.size = sizeof sum,
                               .rows = rows,
                               .width = m->config->hidden,
                               .dtype = m->dtype,
                               .part = at->part,
                               .out = at->out};
    return slices->sum(slices->ctx, &sum, stream);
}
