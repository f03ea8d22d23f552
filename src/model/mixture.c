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
static cpa_linear_args router_of(const cpa_mixture *m, const cpa_feed_forward_weights *w, const void *x, int64_t rows) {
    const int32_t hidden = m->config->hidden, experts = m->config->moe.experts;
    return (cpa_linear_args){
        .size = sizeof(cpa_linear_args),
        .rows = rows,
        .inputs = hidden,
        .outputs = experts,
        .dtype = m->dtype,
        .out_dtype = CPA_F32,
        .x = x,
        .x_stride = hidden,
        .weight = w->router,
        .weight_stride = hidden,
        .out = m->logits,
        .out_stride = experts,
    };
}

static cpa_expert_route_args route_of(const cpa_mixture *m, const cpa_feed_forward_weights *w, int64_t rows) {
    const cpa_moe_config *moe = &m->config->moe;
    return (cpa_expert_route_args){
        .size = sizeof(cpa_expert_route_args),
        .rows = rows,
        .experts = moe->experts,
        .top_k = moe->top_k,
        .logits = m->logits,
        .logits_stride = moe->experts,
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
}

cpa_status cpa_mixture_route(const cpa_mixture *m, const cpa_feed_forward_weights *w, const void *x, int64_t rows,
                             cpa_stream *stream) {
    const cpa_linear_args product = router_of(m, w, x, rows);
    const cpa_expert_route_args route = route_of(m, w, rows);
    CPA_TRY(cpa_linear(&product, stream));
    return cpa_expert_route(&route, stream);
}

/* Both, and the choices sorted, at once where the back end can. */
static cpa_status choose(const cpa_mixture *m, const cpa_feed_forward_weights *w, const void *x,
                         const cpa_expert_permute_args *permute, cpa_stream *stream) {
    const cpa_nn_table *nn = stream->device->nn;
    const cpa_linear_args product = router_of(m, w, x, permute->rows);
    const cpa_expert_route_args route = route_of(m, w, permute->rows);
    if (nn->chooses_experts && permute->rows > 0 && nn->chooses_experts(&product, stream))
        return nn->expert_choose(&product, &route, permute, stream);
    CPA_TRY(cpa_mixture_route(m, w, x, permute->rows, stream));
    return cpa_expert_permute(permute, stream);
}

/* The gates' product of experts, to m->wide. */
static cpa_expert_linear_args gate_up_of(const cpa_mixture *m, const cpa_feed_forward_weights *w, cpa_slice experts,
                                         const cpa_sorted_choices *choices, int64_t places, const void *x,
                                         int64_t x_rows) {
    const int32_t hidden = m->config->hidden, inner = m->config->moe.intermediate;
    const int64_t matrix = 2 * (int64_t)hidden * inner;
    return (cpa_expert_linear_args){
        .size = sizeof(cpa_expert_linear_args),
        .experts = (int32_t)experts.count,
        .rows = places,
        .inputs = hidden,
        .outputs = 2 * inner,
        .dtype = m->dtype,
        .out_dtype = m->dtype,
        .offsets = choices->offsets,
        .x = x,
        .x_rows = x_rows,
        .x_stride = hidden,
        .weight =
            (const char *)w->expert_gate_up + (experts.begin - m->held.begin) * matrix * cpa_dtype_bytes(m->dtype),
        .weight_stride = hidden,
        .expert_stride = matrix,
        .out = m->wide,
        .out_stride = 2 * inner,
        .tokens = choices->tokens,
    };
}

/* What comes behind the gates, from m->inner to m->wide. */
static cpa_expert_linear_args down_of(const cpa_mixture *m, const cpa_feed_forward_weights *w, cpa_slice experts,
                                      const cpa_expert_linear_args *gate_up) {
    const int32_t hidden = m->config->hidden, inner = m->config->moe.intermediate;
    const int64_t matrix = (int64_t)hidden * inner;
    cpa_expert_linear_args down = *gate_up;
    down.inputs = inner;
    down.outputs = hidden;
    down.x = m->inner;
    down.x_rows = gate_up->rows;
    down.x_stride = down.weight_stride = inner;
    down.weight = (const char *)w->expert_down + (experts.begin - m->held.begin) * matrix * cpa_dtype_bytes(m->dtype);
    down.expert_stride = matrix;
    down.out_stride = hidden;
    down.tokens = NULL;
    return down;
}

static int is_fused(const cpa_expert_linear_args *args, const cpa_stream *stream) {
    const cpa_nn_table *nn = stream->device->nn;
    return args->rows > 0 && nn->fuses_experts && nn->fuses_experts(args, stream);
}

cpa_status cpa_mixture_multiply(const cpa_mixture *m, const cpa_feed_forward_weights *w, cpa_slice experts,
                                const cpa_sorted_choices *choices, int64_t places, const void *x, int64_t x_rows,
                                const cpa_shared_products *beside, cpa_stream *stream) {
    cpa_expert_linear_args gate_up = gate_up_of(m, w, experts, choices, places, x, x_rows);
    const cpa_expert_linear_args down = down_of(m, w, experts, &gate_up);
    if (is_fused(&gate_up, stream) && is_fused(&down, stream)) {
        const cpa_expert_fusion gates = {.gated = 1, .beside = beside ? &beside->gate_up : NULL};
        const cpa_expert_fusion behind = {.beside = beside ? &beside->down : NULL,
                                          .beside_adds = beside && beside->adds};
        gate_up.out = m->inner;
        gate_up.out_stride = m->config->moe.intermediate;
        CPA_TRY(stream->device->nn->expert_fused(&gate_up, &gates, stream));
        return beside ? stream->device->nn->expert_fused(&down, &behind, stream) : cpa_expert_linear(&down, stream);
    }
    const cpa_swiglu_args activate = {
        .size = sizeof activate,
        .rows = places,
        .width = m->config->moe.intermediate,
        .dtype = m->dtype,
        .gate_up = m->wide,
        .out = m->inner,
    };
    CPA_TRY(cpa_expert_linear(&gate_up, stream));
    CPA_TRY(cpa_swiglu(&activate, stream));
    return cpa_expert_linear(&down, stream);
}

int cpa_mixture_takes(const cpa_mixture *m, const cpa_model_step *step, const cpa_stream *stream) {
    static const cpa_feed_forward_weights none;
    static const cpa_sorted_choices unsorted;
    const int64_t rows = step->rows.count, places = rows * cpa_min64(m->config->moe.top_k, m->held.count);
    const cpa_expert_linear_args gate_up = gate_up_of(m, &none, m->held, &unsorted, places, NULL, rows);
    const cpa_expert_linear_args down = down_of(m, &none, m->held, &gate_up);
    return m->spread_over == 1 && !step->slices && rows <= m->piece && rows <= stream->device->nn->fused_rows &&
           m->config->moe.shared % 8 == 0 && is_fused(&gate_up, stream) && is_fused(&down, stream);
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
    CPA_TRY(choose(m, w, piece->x, &permute, stream));
    CPA_TRY(cpa_mixture_multiply(m, w, experts, &m->choices, places, piece->x, piece->rows, piece->beside, stream));
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
            .beside = at->beside,
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
