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

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *layer_args,
                           cpa_stream *stream) {
    const cpa_synthetic *synthetic = ctx;
    void *const outs[3] = {layer_args->q, layer_args->k, layer_args->v};
    for (int tensor = CPA_SYNTH_Q; tensor <= CPA_SYNTH_V; tensor++) {
        cpa_synth_args args = args_for(synthetic, (cpa_synth_tensor)tensor, layer);
        args.rows = step->rows.count;
        args.tokens = step->rows.tokens_device;
        args.positions = step->rows.positions_device;
        args.out = outs[tensor];
        CPA_TRY(synthetic->device->operators->synthesize(&args, stream));
    }
    return CPA_OK;
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    for (int tensor = CPA_SYNTH_K; tensor <= CPA_SYNTH_V; tensor++) {
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

uint32_t cpa_synthetic_token(void *seed, uint64_t request, int64_t position) {
    uint64_t x = *(const uint64_t *)seed ^ (request + 1) * CPA_GOLDEN ^ (uint64_t)position * 0xd1b54a32d192ed03u;
    return (uint32_t)(cpa_mix64(x) >> 32);
}
