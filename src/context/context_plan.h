/* Steps that are planned while the one before runs, for graphs too. */
#ifndef CPA_CONTEXT_PLAN_H
#define CPA_CONTEXT_PLAN_H

#include <cpattn/context.h>

#include "kernels/block_tables.h"

/* The same as cpa_context_plan, except that it waits for nothing and does not touch the spans of the step before, which
 * may still run; the one before that is done. Call cpa_context_begin before the layers. padded_rows > 0: the chunks are
 * of one token, or of few (cpa_graph_table.padded_rows), and go by pass-Q, or lie on one rank, or rows are replicated,
 * and the step is planned with so many rows on every rank, of which those past its own are attended to no use: messages
 * hold so many rows for each pair of ranks, and layers enqueue the same for any such chunks. q and out of its layers
 * have room for them. `tables`, in the place of the one that a chunk has: those of the chunks are their `rows`
 * [n_chunks] of it, with a set for each set of layers. They stay as they are until the layers are enqueued, and may
 * change while these run. NULL: the ones that the chunks have, in one set. A layer reads the first set unless it is told
 * otherwise. */
cpa_status cpa_context_plan_ahead(cpa_context *c, const cpa_context_chunk *chunks, int64_t n_chunks,
                                  cpa_block_tables *tables, const int64_t *rows, int64_t padded_rows);
/* The layers that are attended from now on read their blocks by that set of tables. */
void cpa_context_use_tables(cpa_context *c, int32_t set);
/* Enqueues what brings changed block tables of the planned step to the device. */
cpa_status cpa_context_upload_tables(cpa_context *c, cpa_stream *stream);
/* Enqueues what brings the plan of the step to the device, as far as it is made before the first layer. */
cpa_status cpa_context_upload_plan(cpa_context *c, cpa_stream *stream);
/* The planned step begins. The stream of the one before is idle: its spans are counted if they were not yet. */
void cpa_context_begin(cpa_context *c);
/* A number that two padded plans share only if their layers enqueue the same on this rank. */
uint64_t cpa_context_shape(const cpa_context *c);

#endif
