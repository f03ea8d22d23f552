/* What stands in front of the layer that drafts: the multi-token prediction module of DeepSeek-V3 (DeepSeek-AI,
 * arXiv:2412.19437, section 2.2), of depth 1. Row i, with the token t(i + 1) behind it, goes into a layer like the
 * others, at position i, as
 *
 *     h'(i) = W [norm_e(embedding of t(i + 1)) | norm_h(h(i))]         W = eh_proj, norm_e = enorm, norm_h = hnorm
 *
 * where h(i) is what the head of the model reads: the sum of its layers behind the final norm. The paper leaves open
 * which side of that norm it is; the code that comes with the weights hands on the normed one, as vLLM
 * (deepseek_mtp.py) and SGLang (deepseek_nextn.py) do. The paper's order in W is the other one; the files have this one.
 * A norm of its own (shared_head.norm) and the model's head follow that layer. */
#ifndef CPA_MODEL_DRAFT_LAYER_H
#define CPA_MODEL_DRAFT_LAYER_H

#include <cpattn/model.h>

#include "src/model/weights.h"

/* Rows of a step behind the model's last layer, on the device. */
typedef struct cpa_draft_layer_args {
    const cpa_model_step *step; /* with next_tokens */
    void *x;                    /* [rows, hidden] what the last layer gave, not added yet; overwritten */
    void *residual;             /* [rows, hidden] what the layers before have added up; becomes h' */
    void *wide;                 /* [rows, cpa_draft_layer_wide] room */
} cpa_draft_layer_args;

/* Elements of a row that there is to be room for. */
int64_t cpa_draft_layer_wide(const cpa_model_config *config);

cpa_status cpa_draft_layer_begin(const cpa_model_config *config, const cpa_weights *weights, cpa_dtype dtype,
                                 const cpa_draft_layer_args *args, cpa_stream *stream);

#endif
