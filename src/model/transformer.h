/* A decoder-only transformer behind the engine: the Llama, Mistral, Qwen and DeepSeek families, with or without experts.
 * Every rank has all weights and computes the rows of a step that it owns; or, in steps with slices (cpattn/model.h), its
 * slice of every product of the rows of all ranks, so that it reads a part of the weights, or has no more than that.
 *
 *     begin_step    residual = embedding of the tokens
 *     layer_in      norm of the residual, one product for queries, keys and values, norms of heads, rotary positions,
 *                   keys and values to the cache; or latents (latent_attention.h)
 *     layer_out     output product, added to the residual; norm, gates, down product, which the next norm adds
 *     end_step      of the rows that yield a token: the last sum and norm, logits in fp32, a draw
 *     end_draft     the same behind the layer that drafts (draft_layer.h), if config.draft_layers says that it is used
 *
 * Everything between products is rounded to the dtype of the model. */
#ifndef CPA_MODEL_TRANSFORMER_H
#define CPA_MODEL_TRANSFORMER_H

#include <cpattn/model.h>

#include "src/model/model_config.h"
#include "src/model/safetensors.h"

/* Where the experts of a layer lie, of several ranks. */
typedef enum cpa_experts_over_ranks {
    CPA_EXPERTS_REPLICATED = 0, /* all on each */
    /* Each on one (cpa_first_expert): */
    CPA_EXPERTS_SENT,    /* rows go to the ranks of their experts and come back, with the same bits; on the host */
    CPA_EXPERTS_GATHERED /* all rows of a step go to all ranks that have experts; on any device */
} cpa_experts_over_ranks;

typedef struct cpa_transformer_options {
    cpa_dtype dtype;
    int64_t max_rows;      /* rows of one step on this rank, at most */
    int64_t max_sequences; /* sequences that run at once, at most */
    int64_t logit_rows;    /* emissions whose logits are computed at once; 0 = 256 */
    /* Steps of several ranks with slices: decode, or all steps, where this rank has its slice of the weights alone. */
    cpa_model_slices slices;
    int32_t rank, ranks; /* this rank, and how many there are; with slices or experts that are not replicated */
    cpa_experts_over_ranks experts;
    int64_t
        expert_rows; /* rows whose experts are computed at once, on all ranks together if those are spread; 0 = 4096 */
} cpa_transformer_options;

typedef struct cpa_transformer cpa_transformer;

/* Loads the weights and allocates all that steps need, on a device that must outlive the transformer: that of the
 * engine, or another cpa_device over the same memory. *out is set only on success. */
cpa_status cpa_transformer_create(cpa_device *device, const cpa_model_config *config, const cpa_safetensors *files,
                                  const cpa_transformer_options *options, cpa_transformer **out, cpa_error *err);
/* NULL does nothing. */
void cpa_transformer_destroy(cpa_transformer *transformer);

/* Bytes of the device that cpa_transformer_create allocates. */
int64_t cpa_transformer_bytes(const cpa_model_config *config, const cpa_transformer_options *options);

/* The model for the engine; the transformer must outlive it. Where there are fewer heads, experts, or outputs of some
 * product, than ranks, it takes no steps with slices, and with CPA_SLICES_ALL it is not created. */
cpa_model cpa_transformer_model(cpa_transformer *transformer);

/* The forms of the model's rows, in the shape of its attention (cpa_model_config_shape): they point into the transformer.
 * With ordinary attention there are none. */
void cpa_transformer_give_forms(const cpa_transformer *transformer, cpa_model_shape *shape);

/* Sees the logits, fp32 [count, vocabulary] on the device, of the emissions [first, first + count) of a step before
 * their tokens are drawn; it may synchronise. Steps are not captured in graphs while there is one. */
typedef cpa_status (*cpa_logits_fn)(void *ctx, const cpa_model_step *step, int64_t first, int64_t count,
                                    const float *logits, cpa_stream *stream);
/* NULL: nobody. Before cpa_transformer_model. */
void cpa_transformer_set_observer(cpa_transformer *transformer, cpa_logits_fn observe, void *ctx);

#endif
