/* Logits of output tokens chosen at random in a run, kept to be compared with a plain forward (logits_check.h). Those
 * with the least hashes of seed, request and position are kept: the same ones on any number of ranks and in any order.
 * A step with a tree of drafts has several rows for one position, of which one at most is what the request went on
 * with: all of them are kept, or none. */
#ifndef CPA_MODEL_LOGITS_SAMPLE_H
#define CPA_MODEL_LOGITS_SAMPLE_H

#include <cpattn/model.h>

#include "comm/comm.h"

/* Whose logits they are: those of the token behind the position. */
typedef struct cpa_logits_record {
    uint64_t hash;
    uint64_t request;
    int64_t position;
    uint64_t step; /* counts those that drew: of a token that was computed again, after a draft, the last one counts */
} cpa_logits_record;

/* By what tokens are chosen. */
uint64_t cpa_logits_hash(uint64_t seed, uint64_t request, int64_t position);

typedef struct cpa_logits_sample {
    uint64_t seed;
    int64_t vocabulary, most, count;
    cpa_logits_record *records; /* [most] */
    float *logits;              /* [most, vocabulary] */
    uint64_t steps;             /* steps so far, the same number on every rank */
    uint64_t bound;             /* tokens of this hash or a larger one are not kept, as there was no room */
    int32_t *rows;              /* rows of the emissions that are looked at */
    int64_t cap_rows;
} cpa_logits_sample;

/* Keeps at most `most` tokens. *out is set only on success. */
cpa_status cpa_logits_sample_open(int64_t most, int64_t vocabulary, uint64_t seed, cpa_logits_sample *out,
                                  cpa_error *err);
/* One that was never opened has only zeros. */
void cpa_logits_sample_close(cpa_logits_sample *sample);

/* A cpa_logits_fn, with the sample as its ctx. */
cpa_status cpa_logits_sample_take(void *sample, const cpa_model_step *step, int64_t first, int64_t count,
                                  const float *logits, cpa_stream *stream);

/* Makes rank 0's sample that of all ranks; those of the others are as they were. Collective. */
cpa_status cpa_logits_sample_gather(cpa_logits_sample *sample, cpa_control *control, cpa_error *err);

#endif
