/* nan-key: in KV head 0 of tokens at position 7 the synthetic keys begin with NaN. */
#include <string.h>

#include "base/check.h"
#include "kernels/operators.h"
#include "src/model/synthetic.h"
#include "tests/faults/fault.h"

enum { NAN_POSITION = 7 };
static const uint32_t NAN_BITS = 0x7fc07fc0; /* as fp32, and as pairs of bf16 or fp16 */

cpa_model __real_cpa_synthetic_model(cpa_synthetic *synthetic);
cpa_model __wrap_cpa_synthetic_model(cpa_synthetic *synthetic);

/* The model without the bug; its context is that of the one with it. */
static cpa_model real;

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    const cpa_synthetic *synthetic = ctx;
    const int64_t row_bytes = cpa_shape_k_bytes(&synthetic->shape);
    CPA_TRY(real.layer_in(ctx, layer, step, args, stream));
    for (int64_t row = 0; cpa_fault_is(CPA_FAULT_NAN_KEY) && row < step->rows.count; row++) {
        if (step->rows.positions[row] != NAN_POSITION) continue;
        void *key = (char *)args->k + row * row_bytes;
        CPA_TRY(synthetic->device->table->copy(key, &NAN_BITS, sizeof NAN_BITS, stream));
    }
    return CPA_OK;
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    const cpa_attention_shape *shape = &((const cpa_synthetic *)ctx)->shape;
    const int64_t key_bytes = shape->k_dim * cpa_dtype_bytes(shape->dtype);
    real.recall(ctx, layer, kv_head, n, tokens, positions, k, v);
    for (int64_t i = 0; cpa_fault_is(CPA_FAULT_NAN_KEY) && kv_head == 0 && i < n; i++)
        if (positions[i] == NAN_POSITION) memcpy((char *)k + i * key_bytes, &NAN_BITS, sizeof NAN_BITS);
}

cpa_model __wrap_cpa_synthetic_model(cpa_synthetic *synthetic) {
    cpa_model model = real = __real_cpa_synthetic_model(synthetic);
    model.layer_in = layer_in;
    model.recall = recall;
    return model;
}
