/* The steps of a transformer: the functions of its cpa_model, whose ctx it is (cpattn/model.h), and a first product. */
#ifndef CPA_MODEL_TRANSFORMER_STEP_H
#define CPA_MODEL_TRANSFORMER_STEP_H

#include <cpattn/model.h>

#include "src/model/transformer.h"

/* The first product by a library loads all its kernels, which takes seconds on CUDA: that is not for the first request
 * to wait for. Multiplies some weights by themselves. */
cpa_status cpa_transformer_warm_up(const cpa_transformer *transformer, cpa_stream *stream, cpa_error *err);

cpa_status cpa_transformer_begin_step(void *transformer, const cpa_model_step *step, cpa_stream *stream);
cpa_status cpa_transformer_layer_in(void *transformer, int32_t layer, const cpa_model_step *step,
                                    const cpa_layer_args *layer_args, cpa_stream *stream);
cpa_status cpa_transformer_select_keys(void *transformer, int32_t layer, const cpa_model_step *step,
                                       const cpa_select_args *args, cpa_key_selection *selection, cpa_stream *stream);
cpa_status cpa_transformer_layer_out(void *transformer, int32_t layer, const cpa_model_step *step, const void *out,
                                     cpa_stream *stream);
cpa_status cpa_transformer_end_step(void *transformer, const cpa_model_step *step, cpa_drawn *drawn,
                                    cpa_stream *stream);
cpa_status cpa_transformer_end_draft(void *transformer, const cpa_model_step *step, uint32_t *guesses,
                                     cpa_stream *stream);

#endif
