#include "src/model/synthetic.h"

#include "base/check.h"
#include "base/hash.h"
#include "kernels/operators.h"
#include "kernels/synthesize.h"

static cpa_synth_args args_for(const cpa_synthetic *synthetic, cpa_synth_tensor tensor, int32_t layer) {
    cpa_synth_args args = cpa_synth_of(&synthetic->shape, tensor);
    args.seed = synthetic->seed;
    args.layer = layer;
    return args;
}

/* Rows of one tensor from row `first` of the step on. */
static cpa_status synthesize(const cpa_synthetic *synthetic, cpa_synth_args args, const cpa_model_step *step,
                             int64_t first, int64_t rows, void *out, cpa_stream *stream) {
    args.rows = rows;
    args.tokens = step->rows.tokens_device + first;
    args.positions = step->rows.positions_device + first;
    args.out = out;
    return rows > 0 ? synthetic->device->operators->synthesize(&args, stream) : CPA_OK;
}

/* The queries of each form. */
static cpa_status give_queries(const cpa_synthetic *synthetic, int32_t layer, const cpa_model_step *step, char *q,
                               cpa_stream *stream) {
    cpa_synth_args args = args_for(synthetic, CPA_SYNTH_Q, layer);
    if (synthetic->n_forms == 0) return synthesize(synthetic, args, step, 0, step->rows.count, q, stream);
    for (int32_t f = 0; f < synthetic->n_forms; f++) {
        const cpa_step_form *form = &step->forms[f];
        args.dim = synthetic->forms[f].k_dim;
        CPA_TRY(synthesize(synthetic, args, step, form->first, form->rows, q + form->q_bytes, stream));
    }
    return CPA_OK;
}

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *layer_args,
                           cpa_stream *stream) {
    const cpa_synthetic *synthetic = ctx;
    const int64_t rows = step->rows.count;
    CPA_TRY(give_queries(synthetic, layer, step, layer_args->q, stream));
    CPA_TRY(synthesize(synthetic, args_for(synthetic, CPA_SYNTH_K, layer), step, 0, rows, layer_args->k, stream));
    if (synthetic->shape.v_in_k) return CPA_OK;
    return synthesize(synthetic, args_for(synthetic, CPA_SYNTH_V, layer), step, 0, rows, layer_args->v, stream);
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    const cpa_synthetic *synthetic = ctx;
    const int last = synthetic->shape.v_in_k ? CPA_SYNTH_K : CPA_SYNTH_V;
    for (int tensor = CPA_SYNTH_K; tensor <= last; tensor++) {
        cpa_synth_args args = args_for(ctx, (cpa_synth_tensor)tensor, layer);
        args.rows = n;
        args.tokens = tokens;
        args.positions = positions;
        cpa_synthesize_rows(&args, kv_head, 0, n, tensor == CPA_SYNTH_K ? k : v, args.dim);
    }
}

cpa_model cpa_synthetic_model(cpa_synthetic *synthetic) {
    return (cpa_model){
        .size = sizeof(cpa_model), .ctx = synthetic, .layer_in = layer_in, .recall = recall, .capturable = 1};
}

cpa_status cpa_synthetic_take_forms(cpa_synthetic *synthetic, cpa_model_shape *model, cpa_error *err) {
    if (model->n_forms == 0) return CPA_OK;
    CPA_TRY(cpa_synthetic_expansion_make(&synthetic->expansion, synthetic->device, model, synthetic->seed, err));
    synthetic->n_forms = model->n_forms;
    for (int32_t f = 0; f < model->n_forms; f++) {
        const int32_t k_dim = model->forms[f].widths.k_dim;
        synthetic->forms[f] = synthetic->shape;
        if (k_dim > 0) synthetic->forms[f].k_dim = k_dim;
    }
    model->forms = synthetic->expansion.forms;
    return CPA_OK;
}

void cpa_synthetic_free(cpa_synthetic *synthetic) {
    cpa_synthetic_expansion_free(&synthetic->expansion, synthetic->device);
}

uint32_t cpa_synthetic_token(void *seed, uint64_t request, int64_t position) {
    uint64_t x = *(const uint64_t *)seed ^ (request + 1) * CPA_GOLDEN ^ (uint64_t)position * 0xd1b54a32d192ed03u;
    return (uint32_t)(cpa_mix64(x) >> 32);
}
