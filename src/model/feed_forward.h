/* The feed-forward of a layer, of the rows of one rank or, in steps with slices, of all ranks: dense, (silu(x Wgate) *
 * x Wup) Wdown, or a mixture of experts (mixture.h). */
#ifndef CPA_MODEL_FEED_FORWARD_H
#define CPA_MODEL_FEED_FORWARD_H

#include <cpattn/model.h>

#include "src/model/mixture.h"
#include "src/model/weights.h"

/* What the feed-forwards of all layers have in common. */
typedef struct cpa_feed_forward {
    const cpa_model_config *config;
    cpa_dtype dtype;
    /* Room for rows, shared with whoever computes before and behind. */
    void *wide;          /* [rows, cpa_feed_forward_wide]; with slices also for parts of sums, [rows, hidden] in fp32 */
    void *inner;         /* [rows, cpa_feed_forward_inner] */
    cpa_mixture mixture; /* of the layers that have experts */
} cpa_feed_forward;

/* Elements of a row that there is to be room for. */
int64_t cpa_feed_forward_wide(const cpa_model_config *config);
int64_t cpa_feed_forward_inner(const cpa_model_config *config);

/* out [rows, hidden] of the step's rows x [rows, hidden]; may be x. */
cpa_status cpa_feed_forward_run(const cpa_feed_forward *feed_forward, const cpa_feed_forward_weights *weights,
                                const cpa_model_step *step, const void *x, void *out, cpa_stream *stream);
/* Of a layer with experts, what those give that its rows choose, wherever they lie; shared experts take no part. */
cpa_status cpa_feed_forward_mix(const cpa_feed_forward *feed_forward, const cpa_feed_forward_weights *weights,
                                const cpa_mixture_rows *rows, cpa_stream *stream);

/* residual [rows, hidden] += what a layer with experts, shared ones too, gives for x, of rows that linear_fused of
 * kernels/nn.h takes. */
cpa_status cpa_feed_forward_add(const cpa_feed_forward *feed_forward, const cpa_feed_forward_weights *weights,
                                const cpa_model_step *step, const void *x, void *residual, cpa_stream *stream);

#endif
