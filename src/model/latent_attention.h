/* What comes before attention in a layer of latents (latent_config.h): queries of the forms that rows have, and the rows
 * of the cache.
 *
 *     absorbed   query [W_k_b,h^T q_nope | rotated q_rope] attends [c | r] as it lies; W_v_b follows (cpa_form_rows.matrix)
 *     expanded   query [q_nope | rotated q_rope] attends the keys of its head, which are expanded from the cache
 *
 * Both are the same attention; the first reads the fewest bytes, the second multiplies the least where keys meet many
 * rows. So decode is absorbed and prefill expanded. */
#ifndef CPA_MODEL_LATENT_ATTENTION_H
#define CPA_MODEL_LATENT_ATTENTION_H

#include <cpattn/model.h>

#include "src/model/weights.h"

enum { CPA_LATENT_ABSORBED = 0, CPA_LATENT_EXPANDED, CPA_LATENT_FORMS };

/* What the layers have in common. */
typedef struct cpa_latent_attention {
    const cpa_model_config *config;
    cpa_dtype dtype;
    cpa_rope rope; /* table on the device, and the pairs of the model */
    void *wide;    /* [rows, cpa_latent_wide(config)]: the first product */
    void *inner;   /* [rows, cpa_latent_inner(config)]: queries, where they are a product of their own */
} cpa_latent_attention;

/* With the table of rotary positions, and the room, still to be set. */
cpa_latent_attention cpa_latent_attention_of(const cpa_model_config *config, cpa_dtype dtype);

/* Elements of a row that the first product has, and that of queries. */
int64_t cpa_latent_wide(const cpa_model_config *config);
int64_t cpa_latent_inner(const cpa_model_config *config);

/* Of the normed rows x [rows, hidden]: queries to args->q, form after form, and rows of the cache to args->kv. norm: the
 * weights of a norm that the first product makes of x, which is one row, by itself (kernels/nn.h); NULL: none. */
cpa_status cpa_latent_in(const cpa_latent_attention *attention, const cpa_latent_weights *weights, const void *x,
                         const void *norm, const cpa_model_step *step, const cpa_layer_args *args, cpa_stream *stream);

/* out [rows, hidden] = the product of the results of attention and o [hidden, q_heads * value]; those of each form begin
 * at a place of their own. adds: out += the product, of rows that linear_fused takes. */
cpa_status cpa_latent_out(const cpa_latent_attention *attention, const void *o, const cpa_model_step *step,
                          const void *results, int adds, void *out, cpa_stream *stream);

/* The forms of a model's rows, and what they point to. One that was never opened has only zeros. */
typedef struct cpa_latent_forms {
    cpa_model_form list[CPA_LATENT_FORMS];
    float *scales; /* [cpa_config_all_layers], as the next two */
    const void **matrices, **expansions;
} cpa_latent_forms;
cpa_status cpa_latent_forms_open(const cpa_model_config *config, const cpa_weights *weights, cpa_latent_forms *out,
                                 cpa_error *err);
void cpa_latent_forms_close(cpa_latent_forms *forms);

#endif
