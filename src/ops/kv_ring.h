/* The segments of a ring, and the copies that fill them: on a stream of their own, each when what was attended in the
 * segment before is over, while attention goes over the others.
 *
 * Segments are numbered by turns: turn t has segment t modulo their number. Each is filled, taken and given back, in this
 * order; turns are filled in ascending order, and no more of them ahead of what is given back than there are segments. */
#ifndef CPA_OPS_KV_RING_H
#define CPA_OPS_KV_RING_H

#include <cpattn/offload.h>

#include "kernels/block_layout.h"
#include "kernels/copy_list.h"
#include "kernels/key_workspace.h"

/* `count` blocks from `block` of a cache on, and the block of the segment that receives the first of them. */
typedef struct cpa_ring_run {
    int64_t block, place, count;
} cpa_ring_run;

/* Turns whose times are kept until somebody looks. */
enum { CPA_RING_TIMED = 4096 };

struct cpa_kv_ring {
    cpa_device *device;
    cpa_kv_ring_options options; /* the given options, with their defaults */
    cpa_block_layout layout;     /* of the blocks of a segment */
    int64_t segment_blocks;
    int64_t step; /* tokens: keys are cut at multiples of it, which are whole blocks */
    char *memory;
    cpa_key_workspace workspace; /* in which plans widen keys; empty: nothing has to be */
    cpa_stream *copies;
    cpa_events *events;
    cpa_copy_list list;   /* of the copies at hand, with room for those of a segment */
    int64_t turn;         /* the next to be filled */
    int64_t *timed_bytes; /* [CPA_RING_TIMED]: of a turn whose events are set, modulo that; 0: there is none */
    cpa_kv_ring_stats stats;
};

/* A ring; without a workspace, whose plans have one of the caller's (cpa_ring_plan_create_within). */
cpa_status cpa_kv_ring_open(cpa_device *device, const cpa_kv_ring_options *options, int with_workspace,
                            cpa_kv_ring **out, cpa_error *err);

/* Whether blocks of a view can be copied as bytes, and are those that the ring holds. */
cpa_status cpa_kv_ring_check_view(const cpa_kv_ring *ring, const cpa_kv_view *kv, cpa_error *err);

/* Copies from here on run behind what is enqueued on the stream. */
cpa_status cpa_kv_ring_follow(cpa_kv_ring *ring, cpa_stream *stream);
/* Enqueues the copies of some blocks of a resolved view to the segment of the next turn, with `clears` behind zeros in
 * all of it. Failures are those of `stream`. */
cpa_status cpa_kv_ring_fill(cpa_kv_ring *ring, const cpa_kv_view *kv, const cpa_ring_run *runs, int64_t n, int clears,
                            cpa_stream *stream);
/* What is enqueued on the stream from here on finds the segment of a turn filled. */
cpa_status cpa_kv_ring_take(cpa_kv_ring *ring, int64_t turn, cpa_stream *stream);
/* What is enqueued on the stream so far was the last to read it. */
cpa_status cpa_kv_ring_give_back(cpa_kv_ring *ring, int64_t turn, cpa_stream *stream);

/* The segment of a turn, as a cache with the scales and the order of rows of another one. */
cpa_kv_view cpa_kv_ring_view(const cpa_kv_ring *ring, int64_t turn, const cpa_kv_view *of);

#endif
