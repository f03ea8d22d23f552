/* pass-KV: keys and values travel to the queries. See pass_kv.c.
 *
 *   pass_kv.c         the transfers of a step and of a layer
 *   pass_kv_rounds.c  planning them, peer by peer
 *   pass_kv_gather.c  planning them, all peers at once
 *   kv_transfers.c    what a transfer sends, and where in staging it lies
 *   kv_pieces.c       pieces of shards in segments */
#ifndef CPA_PASS_KV_H
#define CPA_PASS_KV_H

#include "src/context/kv_pieces.h"
#include "src/context/kv_transfers.h"
#include "src/context/planned_step.h"

/* A range of rows. */
typedef struct cpa_row_run {
    int64_t row, rows;
} cpa_row_run;

/* The transfers of layers with one mask and one set of block tables. */
typedef struct cpa_kv_schedule {
    cpa_mask mask;
    int32_t table_set;
    int64_t begin, end; /* indices of transfers */
    /* All peers at once: the rows of pass-KV before this one take the keys of the own shard from the transfers, in one
     * pass with those of the peers; the others begin with the own shard, while the first transfer is on its way. */
    int64_t one_pass_rows;
    cpa_attend_plan *own; /* of the others; NULL: there are none */
} cpa_kv_schedule;

typedef struct cpa_pass_kv {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    int64_t split; /* where a shard may be cut, in tokens; all peers at once: least tokens of a segment */
    cpa_kv_transfers transfers;
    int32_t *table; /* the block table of a transfer in staging; peer by peer the identity */
    int64_t table_capacity;
    cpa_kv_schedule *schedules; /* that the step has met; layers may alternate between them */
    int64_t n_schedules, schedules_capacity;
    cpa_kv_schedule now;          /* that of the layer at hand */
    cpa_kv_pieces sent, received; /* scratch of one round; all peers at once: of the step, in `received` */
    cpa_row_run *runs;            /* the rows of pass-KV chunks */
    int64_t n_runs, runs_capacity;
    cpa_context_buffer shard_memory, empty_memory;
    cpa_partial shard;  /* of all own rows over one peer's shard */
    const float *empty; /* an LSE of -inf for each own row and head */
} cpa_pass_kv;

/* What the calls of a layer share. */
typedef struct cpa_kv_layer {
    const cpa_context_args *args;
    cpa_partial own;   /* the states of the own rows: over the own shard, and what has come */
    int64_t open_rows; /* so many first rows are states when the layer is run; those behind are results */
} cpa_kv_layer;

/* Whether the keys of all peers come at once, else peer by peer; options with their defaults filled in. */
int cpa_pass_kv_gathers(const cpa_device_caps *caps, const cpa_context_options *options);
/* The least staging_bytes of options with their defaults filled in: of the segments, and of the workspace that keys are
 * prepared in. */
int64_t cpa_pass_kv_least_staging(const cpa_device *device, const cpa_context_options *options, int32_t ranks);
cpa_status cpa_pass_kv_create(cpa_pass_kv *kv, cpa_context_ops *ops, const cpa_planned_step *step);
void cpa_pass_kv_destroy(cpa_pass_kv *kv);
/* Forgets the last step and prepares for the planned chunks. */
cpa_status cpa_pass_kv_plan(cpa_pass_kv *kv);
/* Takes the transfers of the planned chunks under a mask by the tables of the layer at hand, planning them when they are
 * new to the step. */
cpa_status cpa_pass_kv_select(cpa_pass_kv *kv, cpa_mask mask);
/* How many of the first rows of a layer are states after cpa_pass_kv_run: where the last transfer completes all that
 * come behind, its attend rounds those. */
int64_t cpa_pass_kv_open_rows(const cpa_pass_kv *kv);
/* The first transfer goes on its way. */
cpa_status cpa_pass_kv_start(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);
/* Own rows against the own shard, as far as they do not take it from the transfers. */
cpa_status cpa_pass_kv_attend_own(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);
/* The shards of the peers, joined with the own states; or the results. */
cpa_status cpa_pass_kv_run(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);

#endif
