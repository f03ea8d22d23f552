/* Halos of a compressor with overlap (cpattn/compress.h): the first entry of a run of tokens is made of the last tokens
 * of the run in front of it too, which another rank has. Once the last token of a run is written, its owner sends the
 * first halves of the states of the run's last `ratio` tokens to the owner of the next run: all boundaries of a step in
 * one message a layer. */
#ifndef CPA_COMPRESS_HALO_H
#define CPA_COMPRESS_HALO_H

#include <cpattn/compress.h>
#include <cpattn/context.h>

#include "comm/limits.h"

/* Where a run of a sequence ends and the next one begins. */
typedef struct cpa_halo_boundary {
    int64_t chunk;    /* index of the chunk whose tokens end the run */
    int64_t position; /* first position of the next run */
} cpa_halo_boundary;

/* The boundaries that a step crosses, in the order of chunks and positions: those of which this rank has the end, and
 * those whose next run it has. */
typedef struct cpa_halo_plan {
    int32_t rank, ranks, ratio;
    cpa_halo_boundary *sent, *received;
    int64_t n_sent, n_received;
    int64_t n_all;                                                           /* boundaries between any ranks */
    int64_t send_rows[CPA_COMM_MAX_RANKS], receive_rows[CPA_COMM_MAX_RANKS]; /* halos to and from each rank */
} cpa_halo_plan;

/* Of the chunks of a step, on a rank of the map; runs have to be whole entries. To be freed after success. */
cpa_status cpa_halo_plan_make(cpa_halo_plan *plan, cpa_owner_map map, int32_t rank, int32_t ratio,
                              const cpa_context_chunk *chunks, int64_t n_chunks, cpa_error *err);
void cpa_halo_plan_free(cpa_halo_plan *plan);

/* One layer, behind compress_state_write: packs the halos of `sent` and sends them; those of `received` arrive in
 * `halos`, one behind the other. Collective, as exchanges of rows are: also for ranks with nothing to send, and not at
 * all where no rank has. */
typedef struct cpa_halo_args {
    cpa_compress_state state;
    const int64_t *slots; /* device [n_sent, ratio]: of the last `ratio` tokens in front of each boundary */
    float *packed;        /* device [n_sent, ratio, 2 * head] */
    float *halos;         /* device [n_received, ratio, 2 * head] */
} cpa_halo_args;
cpa_status cpa_context_exchange_halos(cpa_context *context, const cpa_halo_plan *plan, const cpa_halo_args *args,
                                      cpa_stream *stream);

#endif
