/* The worker of one rank: applies step plans to its sequences and its shard of the KV cache, and runs their layers.
 *
 * For each layer of a step: the model gives q, k, v of the rank's rows, kv_write stores k and v, context attention
 * computes the results, what yields output tokens enters the digest, and the model takes the results. One thread; every
 * rank calls cpa_worker_run with the same plans. */
#ifndef CPA_WORKER_H
#define CPA_WORKER_H

#include <cpattn/engine.h>

#include "comm/comm.h"
#include "kernels/block_tables.h"
#include "src/cache/disk_blocks.h"
#include "src/cache/kv_cache.h"
#include "src/context/forms.h"
#include "src/schedule/step_plan.h"
#include "src/trace/timeline.h"
#include "src/worker/graphs.h"
#include "src/worker/nonfinite.h"
#include "src/worker/step_arrays.h"

/* A running sequence as a rank knows it. */
typedef struct cpa_worker_seq {
    int32_t active;
    uint64_t request;
    cpa_placement placement;
    int64_t len;      /* tokens in the cache, over all ranks */
    uint32_t *tokens; /* [cap_tokens]: len tokens, and one more that was drawn since, once its step is done */
    int64_t cap_tokens;
    cpa_plan_sampling sampling; /* how tokens are drawn */
    cpa_plan_bias *biases;      /* [cap_biases] biases that `sampling` adds to logits */
    int64_t cap_biases;
    int64_t right;      /* tokens of `len` before the first wrong draft, or before one that lies off its place */
    uint64_t began;     /* number of the plan that introduced the sequence, of plans with chunks */
    uint64_t emitted;   /* number of the last plan that emits a token for the sequence; 0: none yet */
    int64_t drawn;      /* index of the token of `emitted` among those that its step draws */
    int64_t in_history; /* with penalties: tokens that have been in a step's history */
} cpa_worker_seq;

/* Masks over the vocabulary, in slots that stay as they are until they are written over, and which of them each emission
 * of the step draws by. Without slots where the model draws by none. */
typedef struct cpa_token_masks {
    int64_t slots, words;
    uint32_t *host;      /* page-locked, [slots, words] */
    uint32_t *device;    /* `host` on the device */
    int32_t *index_host; /* page-locked, [max_tokens]: the slot of each emission */
    int32_t *index;      /* `index_host` on the device */
} cpa_token_masks;

typedef struct cpa_worker_options {
    cpa_model_shape model;
    cpa_owner_map map;
    int32_t block_size;
    cpa_layer_groups groups; /* groups of the model's layers, with the blocks of their pools */
    int64_t max_tokens;      /* most tokens of one step */
    int32_t max_seqs;
    int32_t enforce_eager; /* decode steps are not captured in graphs */
    int64_t staging_bytes;
    int64_t ring_bytes; /* as those of cpa_engine_options */
    int32_t ring_segments;
    cpa_cascade_attention cascade_attention;
    cpa_dtype state_dtype; /* as that of cpa_context_options */
    int32_t sparse_stride; /* as those of cpa_engine_options */
    float sparse_tau;
    float skip_tiles;
    int absorb_prompts; /* not 0: short chunks of prompts over latents may take the form of those that decode */
    const cpa_transport_table *transport; /* what carries messages between devices of this kind */
    /* Where blocks go with the stores of plans (src/cache/disk_blocks.h), and what they depend on; NULL: plans have no
     * stores and loads. */
    const char *disk_folder, *disk_identity;
    const cpa_block_store *store; /* where requests are exported to and imported from; NULL: nowhere */
} cpa_worker_options;

typedef struct cpa_worker cpa_worker;

/* Where a layer's keys and values are: in the cache of its group, as one of the layers of that. */
typedef struct cpa_layer_place {
    int32_t group, layer;
} cpa_layer_place;

/* A token that a step yields, on whatever rank. */
typedef struct cpa_worker_emission {
    uint64_t request;
    int32_t seq;
    uint64_t began;     /* number of the plan that introduced the sequence */
    int32_t rank;       /* the rank whose row yields it; 0 where rows are replicated */
    int64_t index;      /* index among the emissions of that rank */
    int64_t cached_at;  /* index in its sequence of the row, as the cache has it */
    int64_t position;   /* index in its sequence of the token that is yielded */
    int64_t given;      /* the token; -1: it is drawn */
    int is_constrained; /* drawn by a mask */
    int is_judged;      /* whether the token counts shows when the step is done, as its chunk has drafts */
    int is_wrong;       /* does not count, as a draft before it was wrong */
} cpa_worker_emission;

/* A step as its plan makes it. What is the same on every rank: the sizes of a padded step, the emissions, the flags, and
 * how many rows each rank has. */
typedef struct cpa_worker_rows {
    int replicated; /* the rows and emissions are those of all ranks, the same on each: the model takes slices */
    cpa_step_sizes sizes;
    int64_t rank_rows[CPA_MERGE_MAX_STATES]; /* `sizes.rows` on each rank */
    cpa_step_form forms[CPA_MOST_ROW_FORMS]; /* rows of each form; without forms all are in the first */
    int64_t layer_bytes;                     /* bytes of the results of a layer, of all forms */
    cpa_step_arrays host; /* page-locked, in a block that is on its way to the device when the next step is prepared */
    uint64_t *requests;   /* [max_tokens] the request of each row */
    cpa_worker_emission *emissions; /* [max_tokens], in the order of the chunks and of their rows */
    int64_t n_emissions;
    int64_t n_scored; /* rows of prompts whose log-probabilities are wanted, in `emissions` after n_emissions */
    int64_t drafts;   /* rows whose tokens are guesses */
    uint32_t wants;   /* what the rows want, as CPA_WANTS_... */
    int draws;        /* not every token is given, so that ranks exchange what they have drawn */
    int takes;        /* rows, or the history, go on with what the step before has drawn */
    void *block;      /* page-locked */
    int64_t block_bytes;
} cpa_worker_rows;

/* Sees the tensors of each layer right after its attention, in a replayed step those of the last one alone; the sampled
 * check takes its copies here. */
typedef struct cpa_worker_observer {
    void *ctx;
    /* Before the layers: *first is the first one that is to be seen, or how many there are if none is. The same on
     * every rank. */
    cpa_status (*begin)(void *ctx, const cpa_step_plan *plan, int32_t *first, cpa_error *err);
    cpa_status (*layer_done)(void *ctx, const cpa_step_plan *plan, int32_t layer, const void *q, const void *out,
                             cpa_stream *stream, cpa_error *err);
} cpa_worker_observer;

struct cpa_worker {
    cpa_worker_options options;
    int32_t rank;
    cpa_device *device;
    cpa_stream *stream;
    cpa_score_rules *score; /* [layers] the model's rules on the device; NULL: none */
    void *score_memory;
    cpa_context *context;
    int64_t graph_steps; /* steps launched as graphs */
    cpa_graphs *graphs;  /* NULL: every step runs eagerly */
    const cpa_model *network;
    const cpa_key_selection *selection;         /* selection of the layer that an observer is told of; NULL: none */
    const cpa_context_select_args *chosen_by;   /* what an indexer chose its lists by; NULL: none did */
    cpa_slices slices;                          /* the context's exchange of parts of sliced products */
    cpa_row_exchange row_exchange;              /* the context's exchange of rows of the network */
    cpa_kv_cache *caches[CPA_MAX_LAYER_GROUPS]; /* cache of each group of layers */
    cpa_layer_place *places;                    /* [layers] */
    cpa_worker_seq *seqs;                       /* [max_seqs] */
    cpa_block_tables *tables; /* blocks of each sequence on this rank, a set for each group of layers */

    /* Moves of the step. */
    uint64_t *damaged; /* [swap_ins]: 1 where this rank's block came back damaged */
    int64_t cap_damaged;
    int64_t *arrived; /* [transfers]: how many of the first tokens of each are there */
    int64_t cap_arrived;
    cpa_disk_blocks *disk; /* NULL: there is none */
    uint64_t *lost;        /* [loads + 1]: 1 where this rank's block did not come; then whether it stores no more */
    int64_t cap_lost;

    cpa_worker_rows row_sets[2]; /* one of the step that runs, one of the step that is prepared */
    cpa_worker_rows *rows;       /* rows of the step that was prepared last */
    cpa_worker_rows *ran;        /* rows of the step that ran last */
    uint64_t plans;              /* plans with chunks that have been prepared so far */
    int padded;                  /* whether the step that was prepared last may be captured */
    /* On the device: arrays of the step prepared last, in `block`, or long ones in `wide_block`. */
    cpa_step_arrays arrays;
    void *block, *wide_block;
    int64_t block_bytes, wide_bytes;
    cpa_drawn *drawn;       /* device [cp_size][emissions]: tokens drawn by the step that ran last */
    cpa_drawn *drawn_host;  /* page-locked [cp_size][emissions]: copy of `drawn`, complete once that step is done */
    cpa_token_ranks *ranks; /* device: ranks and log-probabilities of the tokens in `drawn`, where wanted */
    cpa_token_ranks *ranks_host; /* page-locked: copy of `ranks`, complete once that step is done */
    uint32_t *guesses;           /* device [cp_size][emissions]: what layers that draft expect behind `drawn` */
    uint32_t *guesses_host;      /* page-locked: copy of `guesses`, complete once that step is done */
    uint64_t *digest_device;     /* device, one running sum: the digest of the results of all steps */
    uint64_t *sums_host; /* page-locked, [max_tokens]: what each row of a step with drafts has added to the digest */
    uint64_t *discarded; /* page-locked, [n_discarded]: parts of the digest that are to be taken off */
    int64_t n_discarded;
    uint64_t digest_off; /* sum of the parts of the digest that have been taken off */
    cpa_nonfinite nonfinite;
    uint8_t *spoiled;     /* [max_seqs] not 0: of the sequence, since it was introduced, a row here was not finite */
    cpa_forms forms;      /* forms of rows */
    int forms_may_change; /* see cpa_worker_forms_may_change */
    void *q, *k, *v;      /* queries of each form, keys and values of the layer at hand */
    void *out;            /* results of each form, of one layer or of several */
    int64_t out_bytes;    /* bytes of the memory at `out` */
    cpa_context_chunk *chunks;
    int64_t cap_chunks;
    int64_t *table_rows; /* [chunks]: rows of `tables` that chunks use */
    int64_t cap_table_rows;

    cpa_token_masks token_masks;
    struct cpa_worker_sparse *sparse; /* worker_sparse.h; NULL: prompts attend all keys */

    cpa_status (*give_masks)(void *ctx, cpa_error *err); /* see cpa_worker_set_token_masks */
    void *masks_ctx;
};

/* The blocks of a sequence, which has its number as a row, in a group of layers. */
static inline const int32_t *cpa_worker_blocks(const cpa_worker *worker, int32_t group, int32_t seq) {
    return cpa_block_tables_host((cpa_table_set){worker->tables, group}) + cpa_block_tables_place(worker->tables, seq);
}

/* Those of a context for steps of up to so many rows of such a worker. */
cpa_context_options cpa_worker_context_options(const cpa_worker_options *options, int64_t max_rows);

/* Collective. The device, the control channel and the model must outlive the worker. */
cpa_status cpa_worker_create(cpa_control *control, cpa_device *device, const cpa_model *network,
                             const cpa_worker_options *options, cpa_worker **out, cpa_error *err);
void cpa_worker_destroy(cpa_worker *worker);

/* Applies a plan to sequences and tables, plans its attention, and enqueues what brings rows and plans to the device.
 * The layers of the step before may still run, if they are enqueued and nobody needs the tables as that step left them.
 * No other rank takes part. */
cpa_status cpa_worker_prepare(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                              cpa_error *err);
/* Executes the plan that was prepared last; returns when its results are there. */
cpa_status cpa_worker_run(cpa_worker *worker, const cpa_step_plan *plan, const cpa_worker_observer *observer,
                          cpa_error *err);

/* What moves while cpa_worker_run runs a step, as a progress has it (base/progress.h). Its hooks are idle once the layers
 * of a step are enqueued, and then again and again while these are waited for: they may prepare the next step. */
cpa_progress *cpa_worker_progress(cpa_worker *worker);

/* What cpa_worker_run calls when the layers of a step with constrained emissions are enqueued, and before it draws: it
 * calls cpa_token_masks_take (token_masks.h). */
void cpa_worker_set_token_masks(cpa_worker *worker, cpa_status (*give_masks)(void *ctx, cpa_error *err), void *ctx);

/* Keeps the spans of the steps to come in the timeline, which must outlive the worker. */
void cpa_worker_set_timeline(cpa_worker *worker, cpa_timeline *timeline);

/* The sum over this rank's output rows so far, but those that were discarded. */
cpa_status cpa_worker_digest(cpa_worker *worker, uint64_t *out, cpa_error *err);

#endif
