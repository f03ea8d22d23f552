#include "src/model/draft_layer.h"

#include <cpattn/nn.h>

#include "base/check.h"

int64_t cpa_draft_layer_wide(const cpa_model_config *config) {
    return 2 * (int64_t)config->hidden;
}

cpa_status cpa_draft_layer_begin(const cpa_model_config *config, const cpa_weights *weights, cpa_dtype dtype,
                                 const cpa_draft_layer_args *args, cpa_stream *stream) {
    const int32_t hidden = config->hidden;
    const int64_t rows = args->step->rows.count;
    const cpa_draft_weights *w = &weights->draft;
    cpa_rmsnorm_args norm = {.size = sizeof norm,
                             .rows = rows,
                             .width = hidden,
                             .dtype = dtype,
                             .x = args->x,
                             .residual = args->residual,
                             .weight = weights->final_norm,
                             .eps = config->norm_eps,
                             .out = args->x};
    const cpa_embed_args embed = {.size = sizeof embed,
                                  .rows = rows,
                                  .width = hidden,
                                  .dtype = dtype,
                                  .vocabulary = config->vocabulary,
                                  .table = weights->embedding,
                                  .tokens = args->step->next_tokens,
                                  .out = args->residual};
    const cpa_linear_args join = {.size = sizeof join,
                                  .rows = rows,
                                  .inputs = 2 * hidden,
                                  .outputs = hidden,
                                  .dtype = dtype,
                                  .out_dtype = dtype,
                                  .x = args->wide,
                                  .weight = w->join,
                                  .out = args->residual};
    CPA_TRY(cpa_rmsnorm(&norm, stream)); /* h */
    norm.residual = NULL;
    norm.weight = w->hidden_norm;
    norm.out = (char *)args->wide + hidden * cpa_dtype_bytes(dtype);
    norm.out_stride = 2 * (int64_t)hidden;
    CPA_TRY(cpa_rmsnorm(&norm, stream));
    CPA_TRY(cpa_embed(&embed, stream));
    norm.x = args->residual;
    norm.weight = w->token_norm;
    norm.out = args->wide;
    CPA_TRY(cpa_rmsnorm(&norm, stream));
    return cpa_linear(&join, stream);
}
