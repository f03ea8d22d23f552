/* What the library calls of a context beyond the public header: a transport of choice, spans, waiting. */
#ifndef CPA_SRC_CONTEXT_H
#define CPA_SRC_CONTEXT_H

#include <cpattn/context.h>

#include "comm/comm.h"
#include "comm/limits.h"
#include "src/trace/spans.h"

/* cpa_context_create over a transport that the caller has chosen; NULL: the one for the device. */
cpa_status cpa_context_create_over(cpa_comm *comm, cpa_device *device, const cpa_transport_table *transport,
                                   const cpa_context_options *options, cpa_context **out, cpa_error *err);
/* The spans of its steps, to which the caller may add its own. */
cpa_spans *cpa_context_spans(cpa_context *c);
/* Who has the rows of the steps that are planned from now on, in the place of what the options say. */
void cpa_context_set_rows(cpa_context *c, cpa_row_placement rows);
/* Whether the layers of the steps that are planned from now on have a selection: then all that it needs is planned
 * and uploaded with the step, as for a graph of it, and devices share no keys whose kernels for these know no masks. */
void cpa_context_set_masked(cpa_context *c, int masked);
/* Whatever blocks the selections of layers have from now on (cpa_key_blocks), rows of chunks of fewer tokens attend all
 * keys, and are attended as without a selection where they are alone; 0: any may select blocks. */
void cpa_context_set_least_blocks(cpa_context *c, int64_t tokens);
/* Keys and values of so many first tokens of every sequence, whole blocks on every rank, are kept in the dtype of queries
 * beside a quantised cache, in the blocks of that set of tables, behind those of layers; 0: none are. Rows of the steps
 * that are planned from now on attend these and then the rest of the cache, on the rank that has them. Not over latents,
 * nor through a ring; no chunk goes by pass-KV over several ranks. */
void cpa_context_set_precise(cpa_context *c, int64_t tokens, int32_t table_set);
/* Those of the layer at hand. */
void cpa_context_use_precise(cpa_context *c, const cpa_kv_view *kv);
/* Whether what is enqueued from now on is captured in a graph: then nothing is measured. The same is enqueued. */
void cpa_context_capture(cpa_context *c, int capturing);
/* Device seconds of the steps that were launched as graphs, from before their first kernel to behind their last: all of
 * their work, of which the statistics of the context say no more. */
double cpa_context_replayed_seconds(const cpa_context *c);
/* Device seconds of spans of CPA_SPAN_ESTIMATE. */
double cpa_context_estimate_seconds(const cpa_context *c);
/* [ranks]: of the bytes that this rank has sent since the context was created, those to each rank. Lives as long as the
 * context. */
const int64_t *cpa_context_bytes_to(const cpa_context *c);
/* What the layers of a step count on this rank. */
typedef struct cpa_context_account {
    cpa_context_stats before;
    int64_t bytes_sent, row_bytes_sent, index_bytes_sent, plain_rows;
    int64_t bytes_to[CPA_COMM_MAX_RANKS]; /* before end: as they were before */
    int32_t layers;
} cpa_context_account;
/* The layers between begin and end are captured, not run: end takes what they counted back. Each launch of the capture
 * adds it. */
void cpa_context_account_begin(cpa_context *c, cpa_context_account *account);
void cpa_context_account_end(cpa_context *c, cpa_context_account *account);
void cpa_context_account_add(cpa_context *c, const cpa_context_account *account);
/* All ranks get the parts of all: `parts` is device memory of as many parts of `bytes` bytes as there are ranks, and
 * this rank has filled its own. Collective, in the order of the layers. */
cpa_status cpa_context_share(cpa_context *c, void *parts, int64_t bytes, cpa_stream *stream);
/* Waits until the stream is idle, with what its progress has for idle times; an exchange that stands still, or fails, is
 * given up and named. */
cpa_status cpa_context_sync(cpa_context *c, cpa_stream *stream);

#endif
