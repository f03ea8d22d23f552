/* The logits of a whole sequence, computed plainly on the host: one layer after the other over all its tokens, in fp32,
 * straight from the files, with none of the operators, caches and exchanges that they are to be compared with. */
#ifndef CPA_MODEL_PLAIN_FORWARD_H
#define CPA_MODEL_PLAIN_FORWARD_H

#include "src/model/model_config.h"
#include "src/model/plain_choice.h"
#include "src/model/safetensors.h"

typedef struct cpa_plain_question {
    const cpa_model_config *config;
    const cpa_safetensors *files;
    /* CPA_F32: the reference. Another dtype: weights and every intermediate result are rounded to it, which shows how
     * far from the reference a right computation in that dtype is. */
    cpa_dtype dtype;
    const uint32_t *tokens; /* [count], each of the vocabulary, at positions 0 to count - 1 of the model's */
    int64_t count;
    const int64_t *positions; /* [n_positions] positions of tokens; the logits of the next token at each are wanted */
    int64_t n_positions;
    cpa_plain_choices choices;
} cpa_plain_question;

/* Fills logits [n_positions, vocabulary]. Takes time that grows with the square of `count`, and memory for some
 * matrices of the model in fp32. */
cpa_status cpa_plain_forward(const cpa_plain_question *question, float *logits, cpa_error *err);

#endif
