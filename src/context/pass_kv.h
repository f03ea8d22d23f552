/* pass-KV: keys and values travel to the queries. See pass_kv.c.
 *
 *   pass_kv.c         the transfers of a step and of a layer
 *   pass_kv_rounds.c  planning them, peer by peer
 *   pass_kv_gather.c  planning them, all peers at once
 *   kv_transfers.c    what a transfer sends, and where in staging it lies
 *   kv_wanted.c       which keys of a layer are wanted, and kv_squeeze.c what a transfer sends then
 *   kv_pieces.c       pieces of shards in segments */
#ifndef CPA_PASS_KV_H
#define CPA_PASS_KV_H

#include "src/context/kv_pieces.h"
#include "src/context/kv_transfers.h"
#include "src/context/planned_step.h"

/* The rows of pass-KV of one form over the own shard, where all peers come at once: those before row one_pass_rows take
 * its keys from the transfers, in one pass with those of the peers; the others begin with it, while the first transfer
 * is on its way. */
typedef struct cpa_kv_own {
    int64_t one_pass_rows;
    cpa_row_plan *plan; /* plan of the rows from one_pass_rows on; NULL: there are none */
} cpa_kv_own;

/* The transfers of layers with one mask of each form and one set of block tables. */
typedef struct cpa_kv_schedule {
    cpa_mask masks[CPA_MOST_ROW_FORMS];
    int32_t table_set;
    int wants_blocks;   /* not 0: of layers that want some blocks alone */
    int64_t begin, end; /* indices of transfers */
    cpa_kv_own own[CPA_MOST_ROW_FORMS];
} cpa_kv_schedule;

/* The rows of one form in pass-KV chunks. */
typedef struct cpa_kv_rows {
    cpa_row_run *runs; /* runs of neighbouring rows, joined */
    int64_t n_runs, runs_capacity;
    cpa_context_buffer shard_memory;
    cpa_partial shard; /* partial states of all own rows of the form over one peer's shard */
} cpa_kv_rows;

typedef struct cpa_pass_kv {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    cpa_kv_transfers transfers;
    cpa_kv_wanted wanted;
    int32_t *table; /* the block table of a transfer in staging; peer by peer the identity */
    int64_t table_capacity;
    /* Schedules that layers of the step have asked for, by mask; layers may alternate between them. */
    cpa_kv_schedule *schedules;
    int64_t n_schedules, schedules_capacity;
    cpa_kv_schedule now;          /* the schedule of the layer at hand */
    cpa_kv_pieces sent, received; /* scratch of one round; all peers at once: pieces of the step, in `received` */
    cpa_kv_rows rows[CPA_MOST_ROW_FORMS];
    cpa_context_buffer empty_memory;
    const float *empty; /* an LSE of -inf for each own row, of the form with the most, and head */
} cpa_pass_kv;

/* What the calls of a layer share. */
typedef struct cpa_kv_layer {
    const cpa_layer *layer;
    cpa_partial own[CPA_MOST_ROW_FORMS]; /* states of the own rows over the own shard, and over what has come */
    /* Leading rows of each form that are states when the layer is run; the others are results. */
    int64_t open_rows[CPA_MOST_ROW_FORMS];
} cpa_kv_layer;

/* Whether the keys of all peers come at once, else peer by peer; options with their defaults filled in. */
int cpa_pass_kv_gathers(const cpa_device_caps *caps, const cpa_context_options *options);
/* The least staging_bytes of options with their defaults filled in: of the segments, and of the workspace that keys are
 * prepared in by the forms. */
int64_t cpa_pass_kv_least_staging(const cpa_device *device, const cpa_context_options *options, const cpa_forms *forms,
                                  int32_t ranks);
cpa_status cpa_pass_kv_create(cpa_pass_kv *kv, cpa_context_ops *ops, const cpa_planned_step *step);
void cpa_pass_kv_destroy(cpa_pass_kv *kv);
/* Forgets the last step and prepares for the planned chunks. */
cpa_status cpa_pass_kv_plan(cpa_pass_kv *kv);
/* Takes the transfers of the planned chunks under a mask of each form by the tables of the layer at hand, planning them
 * when they are new to the step. `selection`: that of the layer; NULL: none. */
cpa_status cpa_pass_kv_select(cpa_pass_kv *kv, const cpa_mask masks[CPA_MOST_ROW_FORMS],
                              const cpa_key_selection *selection);
/* How many of the first rows of a form are states after cpa_pass_kv_run: where the last transfer completes all that
 * come behind, its attend rounds those. */
int64_t cpa_pass_kv_open_rows(const cpa_pass_kv *kv, int32_t form);
/* Finds what is wanted of the layer's keys, if that is some of them. It waits for the stream. */
cpa_status cpa_pass_kv_find_wanted(cpa_pass_kv *kv, const cpa_layer *layer, cpa_stream *stream);
/* The first transfer goes on its way. */
cpa_status cpa_pass_kv_start(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);
/* Own rows against the own shard, as far as they do not take it from the transfers. */
cpa_status cpa_pass_kv_attend_own(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);
/* The shards of the peers, joined with the own states; or the results. */
cpa_status cpa_pass_kv_run(cpa_pass_kv *kv, const cpa_kv_layer *layer, cpa_stream *stream);

#endif
