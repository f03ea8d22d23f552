/* The feed-forward of a layer, (silu(x Wgate) * x Wup) Wdown, of rows of one rank or, in steps with slices, of all
 * ranks. */
#ifndef CPA_MODEL_FEED_FORWARD_H
#define CPA_MODEL_FEED_FORWARD_H

#include <cpattn/model.h>

#include "src/model/weights.h"

/* What the feed-forwards of all layers have in common. */
typedef struct cpa_feed_forward {
    const cpa_model_config *config;
    cpa_dtype dtype;
    /* Room for rows, shared with whoever computes before and behind. */
    void *wide;  /* [rows, 2 * intermediate]; with slices also for parts of sums, [rows, hidden] in fp32 */
    void *inner; /* [rows, intermediate] */
} cpa_feed_forward;

typedef struct cpa_feed_forward_rows {
    int64_t rows;
    const cpa_slices *slices; /* those of the step */
    const void *x;            /* [rows, hidden] */
    void *out;                /* [rows, hidden]; may be x */
} cpa_feed_forward_rows;

cpa_status cpa_feed_forward_run(const cpa_feed_forward *feed_forward, const cpa_feed_forward_weights *weights,
                                const cpa_feed_forward_rows *rows, cpa_stream *stream);

#endif
