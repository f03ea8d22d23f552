/* Matrices by which the synthetic model's latents are expanded (cpa_form_rows.expansion). A key of a head is the first
 * columns of the latent and noise of half their size, so that queries find what they look for in expanded keys as they do
 * in keys; a value is noise of the latent's size.
 *
 *     W[i][j] = (i = j, of the rows of keys) + noise / sqrt(latent), half the noise in rows of keys
 *
 * Layers share them, each beginning a head further on. */
#ifndef CPA_SYNTHETIC_EXPANSION_H
#define CPA_SYNTHETIC_EXPANSION_H

#include <cpattn/model.h>

typedef struct cpa_synthetic_expansion {
    void *memory; /* on the device: [q_heads + layers - 1] matrices of a head */
    int32_t n_forms;
    cpa_model_form forms[CPA_MOST_ROW_FORMS]; /* those of the model, with layers[form] where they are expanded */
    const void **layers[CPA_MOST_ROW_FORMS];  /* [layers] */
} cpa_synthetic_expansion;

/* The forms of a model with matrices on the device. At most one of them is expanded. cpa_synthetic_expansion_free after a
 * failure too. */
cpa_status cpa_synthetic_expansion_make(cpa_synthetic_expansion *expansion, cpa_device *device,
                                        const cpa_model_shape *model, uint64_t seed, cpa_error *err);
void cpa_synthetic_expansion_free(cpa_synthetic_expansion *expansion, cpa_device *device);

#endif
