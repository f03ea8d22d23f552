/* What the parts of context attention act through: the device, the transport and the memory of one context, and the
 * operations and messages that they enqueue. Functions that can fail write the message to ops->error. */
#ifndef CPA_CONTEXT_OPS_H
#define CPA_CONTEXT_OPS_H

#include <cpattn/context.h>

#include "comm/comm.h"
#include "comm/limits.h"
#include "kernels/operators.h"
#include "src/context/forms.h"
#include "src/trace/spans.h"

/* Device memory that grows from plan to plan. */
typedef struct cpa_context_buffer {
    void *memory;
    int64_t bytes;
} cpa_context_buffer;

/* A range of rows. */
typedef struct cpa_row_run {
    int64_t row, rows;
} cpa_row_run;

/* An exchange in flight, and its span. */
typedef struct cpa_context_exchange {
    cpa_exchange *handle;
    int64_t span;
    int32_t round;
} cpa_context_exchange;

/* What the layer at hand does to scores: for own rows, for those of pass-Q's attend, and for own rows that pass-KV does
 * not take over the own shard, of each form. */
typedef enum cpa_score_side { CPA_SCORE_OWN = 0, CPA_SCORE_REMOTE, CPA_SCORE_KEPT, CPA_SCORE_SIDES } cpa_score_side;
typedef struct cpa_context_score {
    const cpa_score_rules *rules; /* rules of the layer; NULL: none */
    int has_selection, has_bias;
    /* Keys selected for each form and side; made of the next three. */
    cpa_key_selection selection[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES];
    cpa_key_bits bits[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES];
    cpa_key_indices indices[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES];
    cpa_key_blocks blocks[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES];
    cpa_score_bias bias[CPA_MOST_ROW_FORMS][CPA_SCORE_SIDES];
} cpa_context_score;

/* Keys and values of first tokens that are kept in the dtype of queries beside a quantised cache. */
typedef struct cpa_precise_keys {
    int64_t tokens;    /* the first tokens of every sequence, a multiple of the block size on every rank; 0: none */
    int32_t table_set; /* set of block tables that their blocks are in, behind those of layers */
    cpa_kv_view kv;    /* those of the layer at hand */
} cpa_precise_keys;

typedef struct cpa_context_ops {
    cpa_context_options options; /* the given options; their list of forms is in `forms` */
    cpa_forms forms;
    cpa_owner_map map;
    int32_t rank;
    cpa_device *device;
    cpa_stream *upload;          /* for copies outside any layer */
    cpa_key_workspace workspace; /* workspace of all plans; empty: they prepare no keys */
    cpa_kv_ring *ring;           /* through which the own shard comes from the host; NULL: it is on the device */
    int64_t settled;             /* tokens at positions below it are none of the planned step's */
    struct {
        cpa_context_buffer q, over_latents, unfolded;
    } absorbed;    /* memory of absorbed_rows.h, of the plan with the most rows */
    int64_t split; /* shards are cut at multiples of this many tokens; all peers at once: least tokens of a segment */
    cpa_transport *transport;
    cpa_message *messages;  /* [cp_size], scratch: what cpa_context_start sends */
    cpa_attend_item *items; /* scratch: what cpa_row_plan_set plans */
    int64_t items_capacity;
    int64_t *counts; /* scratch: keys of items before their precise ones were taken away */
    int64_t counts_capacity;
    int32_t table_set; /* set of block tables that the layer at hand reads */
    cpa_precise_keys precise;
    int masked;                       /* not 0: layers of the planned step come with a selection */
    int64_t least_blocks;             /* rows of chunks of fewer tokens select no blocks; 0: any may */
    int64_t keys_attended, keys_read; /* keys of a layer, by the plans set since these were 0 */
    char decode_kernels[CPA_KERNEL_NAMES], prefill_kernels[CPA_KERNEL_NAMES]; /* as the statistics have them */
    cpa_error error;
    cpa_context_stats stats;
    int64_t bytes_to[CPA_COMM_MAX_RANKS]; /* of stats.bytes_sent, those to each rank */
    cpa_spans spans;
    cpa_context_score score;
    int64_t *tile_counts; /* device [2], of all attends; NULL without skip_tiles */
    const int32_t
        *chosen_lists; /* those of cpa_context_select, empty where rows lie on another rank alone; NULL: none */
} cpa_context_ops;

/* Everything but the transport, which is the caller's to open and close. cpa_context_ops_destroy cleans up after a
 * failure too. */
cpa_status cpa_context_ops_create(cpa_context_ops *ops);
void cpa_context_ops_destroy(cpa_context_ops *ops);

/* The statistics take the tile_counts of the attends that are done. */
cpa_status cpa_context_read_tiles(cpa_context_ops *ops);

/* Makes room for n elements in the array at that address; see cpa_array_reserve. */
cpa_status cpa_context_ensure_array(cpa_context_ops *ops, void *array, int64_t *capacity, int64_t n, size_t element);
/* Room for `bytes` in a buffer; what was there is lost when it grows. */
cpa_status cpa_context_ensure(cpa_context_ops *ops, cpa_context_buffer *buffer, int64_t bytes);
void cpa_context_free(cpa_context_ops *ops, cpa_context_buffer *buffer);
/* The workspace, of so many bytes, or as many as there are (cpa_key_workspace_open). */
void cpa_context_open_workspace(cpa_context_ops *ops, int64_t bytes, int64_t least);
/* Copies host memory to the device, outside any layer. */
cpa_status cpa_context_upload(cpa_context_ops *ops, void *dst, const void *src, int64_t bytes);
/* States of `rows` rows of so many columns a head: O, then LSE. */
cpa_status cpa_context_ensure_state(cpa_context_ops *ops, cpa_context_buffer *buffer, int64_t rows, int32_t v_dim,
                                    cpa_partial *out);
cpa_partial cpa_context_state_at(cpa_partial state, int64_t row);
/* The message of a failed operation of the stream becomes that of the context. */
cpa_status cpa_context_check(cpa_context_ops *ops, cpa_status status, const cpa_stream *stream);
/* An attend of rows of a form: all but where its queries and states lie, for rows of the own side. */
cpa_attend_args cpa_context_attend_args(const cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer,
                                        cpa_score_side side);
/* The sinks that what finishes a row of the layer has; NULL: none. */
static inline const float *cpa_context_sinks(const cpa_context_ops *ops) {
    return ops->score.rules ? ops->score.rules->sink_logits : NULL;
}
/* The first `rows` states times the matrix of their form. */
cpa_status cpa_context_run_project(cpa_context_ops *ops, const cpa_form *form, const cpa_form_layer *layer,
                                   int64_t rows, cpa_partial from, cpa_partial to, cpa_stream *stream);
/* `awaited` as in the kernel table. */
cpa_status cpa_context_run_merge(cpa_context_ops *ops, const cpa_merge_args *args, const cpa_store_batch *awaited,
                                 cpa_stream *stream);
/* An exchange of ops->messages after the work enqueued on the stream so far, and its end before the work to come. */
cpa_status cpa_context_start(cpa_context_ops *ops, int32_t n_messages, cpa_span_kind kind, int32_t round,
                             cpa_stream *stream, cpa_context_exchange *out);
cpa_status cpa_context_finish(cpa_context_ops *ops, cpa_stream *stream, cpa_context_exchange *exchange);

/* A hook that moves the messages of the transport along while work of a stream runs. */
cpa_progress_hook cpa_context_hook(cpa_context_ops *ops);

#endif
