/* What the files of the host back end share. */
#ifndef CPA_HOST_HOST_H
#define CPA_HOST_HOST_H

#include "base/threads.h"
#include "kernels/host/attend/attend_isa.h"
#include "kernels/operators.h"
#include "kernels/self_test.h"

enum {
    /* Local key indices over which attend accumulates one state before it folds it into the row's; see attend.c. */
    CPA_HOST_SPLIT_TOKENS = 1024,
    /* Rows of a unit of attend's work; a multiple of every instruction set's group. */
    CPA_HOST_UNIT_ROWS = 480
};

typedef struct cpa_attend_workspace cpa_attend_workspace;

typedef struct cpa_host_device {
    cpa_device base;
    int32_t thread_count;
    cpa_threads *threads;
    const cpa_attend_isa *isa;
    const cpa_attend_isa *pair_isa;    /* instruction set for bf16 over bf16, with at least as many rows; NULL: isa */
    cpa_attend_workspace **workspaces; /* [thread_count]; in use by the run that holds the threads */
} cpa_host_device;

/* Makes the device use an instruction set, and one that multiplies pairs for bf16 alone. */
static inline void cpa_host_use_isa(cpa_host_device *device, const cpa_attend_isa *isa) {
    if (!isa->pairs) device->isa = isa;
    device->pair_isa = isa->pairs ? isa : NULL;
}

static inline cpa_host_device *cpa_host_device_of(const cpa_stream *stream) {
    return (cpa_host_device *)stream->device;
}

/* Runs items on the threads of the stream's device. */
static inline void cpa_host_run(cpa_stream *stream, int64_t items, cpa_threads_work work, void *ctx) {
    cpa_threads_run(cpa_host_device_of(stream)->threads, items, work, ctx, &stream->progress);
}

/* Copies the first `tokens` tokens of a block, keys and values. Strides are resolved. */
void cpa_host_copy_tokens(const cpa_kv_view *dst, int64_t dst_block, const cpa_kv_view *src, int64_t src_block,
                          int64_t tokens);

cpa_status cpa_host_events_create(cpa_device *device, cpa_events **out, cpa_error *err);
void cpa_host_events_destroy(cpa_events *events);
cpa_status cpa_host_event_record(cpa_events *events, int32_t index, cpa_stream *stream);
cpa_status cpa_host_event_seconds(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err);
int cpa_host_event_reached(const cpa_events *events, int32_t index);
cpa_status cpa_host_kv_write(const cpa_kv_write_args *args, cpa_stream *stream);
cpa_status cpa_host_kv_copy(const cpa_kv_copy_args *args, cpa_stream *stream);
cpa_status cpa_host_kv_move(const cpa_kv_move_args *args, cpa_stream *stream);
cpa_status cpa_host_kv_convert(const cpa_kv_convert_args *args, cpa_stream *stream);
cpa_status cpa_host_kv_pack(const cpa_kv_pack_args *args, cpa_stream *stream);
cpa_status cpa_host_kv_gather(const cpa_kv_gather_args *args, const cpa_kv_view *rows, cpa_stream *stream);
cpa_status cpa_host_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream);
cpa_status cpa_host_latent_expand(const cpa_latent_expand_args *args, cpa_stream *stream);
cpa_status cpa_host_copy_blocks(const cpa_copy_blocks_args *args, cpa_stream *stream);
int64_t cpa_host_least_workspace(const cpa_attention_shape *shape, int32_t block_size);
cpa_status cpa_host_plan_create(cpa_device *device, const cpa_key_workspace *workspace, cpa_attend_plan **out,
                                cpa_error *err);
cpa_status cpa_host_plan_set(cpa_attend_plan *plan, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                             cpa_error *err);
cpa_status cpa_host_plan_reserve(cpa_attend_plan *plan, const cpa_attend_reservation *reservation, cpa_error *err);
cpa_status cpa_host_plan_update(cpa_attend_plan *plan, const cpa_attend_update *update, cpa_stream *stream);
void cpa_host_plan_destroy(cpa_attend_plan *plan);
cpa_status cpa_host_attend_supported(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                                     const cpa_mask *mask, cpa_error *err);
void cpa_host_attend_kernels_of(const cpa_attend_plan *plan, const cpa_attend_args *args, cpa_attend_kernels *out);
cpa_status cpa_host_attend(const cpa_attend_plan *plan, const cpa_attend_args *args, const void *ready_q,
                           cpa_stream *stream);
cpa_status cpa_host_sparse_attend(const cpa_sparse_attend_args *args, cpa_stream *stream);
cpa_status cpa_host_merge(const cpa_merge_args *args, const cpa_store_batch *awaited, cpa_stream *stream);
cpa_status cpa_host_state_pack(const cpa_state_pack_args *args, cpa_stream *stream);
cpa_status cpa_host_state_merge_packed(const cpa_state_merge_packed_args *args, cpa_stream *stream);
cpa_status cpa_host_project_states(const cpa_project_states_args *args, cpa_stream *stream);
cpa_status cpa_host_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err);
cpa_status cpa_host_index_plan_set(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err);
cpa_status cpa_host_index_plan_reserve(cpa_index_plan *plan, const cpa_index_limits *limits, cpa_error *err);
cpa_status cpa_host_index_plan_upload(const cpa_index_plan *plan, cpa_stream *stream);
void cpa_host_index_plan_destroy(cpa_index_plan *plan);
cpa_status cpa_host_index_logits(const cpa_index_plan *plan, const cpa_index_logits_args *args, cpa_stream *stream);
cpa_status cpa_host_hash_rows(const cpa_hash_rows_args *args, cpa_stream *stream);
cpa_status cpa_host_join_columns(const cpa_join_columns_args *args, cpa_stream *stream);
cpa_status cpa_host_sum_parts(const cpa_sum_parts_args *args, cpa_stream *stream);
cpa_status cpa_host_take_tokens(const cpa_take_tokens_args *args, cpa_stream *stream);
cpa_status cpa_host_block_union(const cpa_block_union_args *args, cpa_stream *stream);
cpa_status cpa_host_synthesize(const cpa_synth_args *args, cpa_stream *stream);

#endif
