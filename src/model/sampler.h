/* Draws the tokens of a step from logits, and keeps which tokens each sequence has, on the device. */
#ifndef CPA_MODEL_SAMPLER_H
#define CPA_MODEL_SAMPLER_H

#include <cpattn/device.h>
#include <cpattn/model.h>

typedef struct cpa_sampler {
    cpa_device *device;
    int64_t vocabulary, sequences;
    uint32_t *in_prompt, *in_output, *output_counts; /* as of cpa_mark_tokens */
} cpa_sampler;

/* Bytes of the device that cpa_sampler_open allocates. */
int64_t cpa_sampler_bytes(int64_t vocabulary, int64_t sequences);

/* For sequences of indices below `sequences`. *out is set only on success. */
cpa_status cpa_sampler_open(cpa_device *device, int64_t vocabulary, int64_t sequences, cpa_sampler *out,
                            cpa_error *err);
/* One that was never opened has only zeros. */
void cpa_sampler_close(cpa_sampler *sampler);

/* Notes the tokens that the sequences of a step go on with. */
cpa_status cpa_sampler_begin(const cpa_sampler *sampler, const cpa_model_step *step, cpa_stream *stream);
/* Draws the tokens of the emissions [first, first + count) from their logits [count, vocabulary] to drawn[first] and
 * on, and fills step->ranks alike. */
cpa_status cpa_sampler_draw(const cpa_sampler *sampler, const cpa_model_step *step, int64_t first, int64_t count,
                            const float *logits, cpa_drawn *drawn, cpa_stream *stream);

#endif
