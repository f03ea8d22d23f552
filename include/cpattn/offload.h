/* Attention over a cache that lies in memory of the host, and may be larger than that of the device. Its blocks go
 * through a ring of segments in device memory: copy engines fill one while attention goes over the one before, and the
 * states of rows are resumed from segment to segment, as cpa_attend resumes them.
 *
 * On the host back end the results have the bits of cpa_attend; on a device they differ as those of resumed calls do.
 * A segment costs its rows one reading and one writing of their states (O in fp32): rows and keys of many segments are
 * worth few large ones. */
#ifndef CPATTN_OFFLOAD_H
#define CPATTN_OFFLOAD_H

#include <cpattn/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Segments in device memory. Used by one thread at a time; attends of all its plans are ordered on one stream, or by the
 * caller. The device outlives it. */
typedef struct cpa_kv_ring cpa_kv_ring;

enum { CPA_MOST_RING_SEGMENTS = 8 };

typedef struct cpa_kv_ring_options {
    size_t size;
    /* Heads, widths, and dtype, layout and scales of the caches that go through the ring. */
    cpa_attention_shape shape;
    int32_t block_size;
    int32_t segments; /* 2 to CPA_MOST_RING_SEGMENTS; 0 = 2 */
    int64_t bytes;    /* bound on the memory of all segments; at least cpa_kv_ring_least_bytes */
} cpa_kv_ring_options;

/* The least `bytes` that these options can have: a segment holds cpa_attend_split_tokens tokens, on a device 256, whole
 * blocks. 0 if they are not valid. Pure; thread-safe. */
CPA_API int64_t cpa_kv_ring_least_bytes(const cpa_device *device, const cpa_kv_ring_options *options);

/* Allocates the segments and, for caches whose keys are widened before prefill (cpattn/ops.h), memory of about twice a
 * segment for that. *out is set only on success. */
CPA_API cpa_status cpa_kv_ring_create(cpa_device *device, const cpa_kv_ring_options *options, cpa_kv_ring **out,
                                      cpa_error *err);
/* Waits for its copies. NULL does nothing. */
CPA_API void cpa_kv_ring_destroy(cpa_kv_ring *ring);

/* What a ring holds, and what has gone through it. */
typedef struct cpa_kv_ring_stats {
    int64_t device_bytes;   /* of the segments, and of what keys are widened in */
    int64_t segment_tokens; /* most tokens of a segment */
    int64_t bytes_read;     /* read from memory of the host, as the copies count them */
    int64_t passes;         /* segments that were filled */
    /* On the clock of the device, of segments whose attention is done: what their copies took, how many bytes they
     * were, and for how long attention waited for them. Segments that are not looked at for some thousand of others are
     * left out of all three. */
    double copy_s, waited_s;
    int64_t timed_bytes;
    int64_t reserved[1]; /* zero */
} cpa_kv_ring_stats;

/* Fills the `size` bytes at `out`. */
CPA_API cpa_status cpa_kv_ring_get_stats(cpa_kv_ring *ring, cpa_kv_ring_stats *out, size_t size);

/* As cpa_attend_plan: the work of an attend, split once a step into the passes of segments, and used for every layer.
 * What cpa_attend_plan_set says holds for cpa_ring_plan_set, but that block tables are on the host. Several items whose
 * keys fit one segment share it, and blocks that they share are copied once; the keys of a longer one go through
 * segments of their own. A pass has a plan of its own, and memory of that: some bytes for each tile of rows and each
 * block. Where an item has several passes the plan also holds a state of its rows, q_heads * (v_dim + 1) floats a row,
 * for attends that have none. Not for plans of graphs. */
typedef struct cpa_ring_plan cpa_ring_plan;
CPA_API cpa_status cpa_ring_plan_create(cpa_kv_ring *ring, cpa_ring_plan **out, cpa_error *err);
CPA_API cpa_status cpa_ring_plan_set(cpa_ring_plan *plan, const cpa_attend_batch *batch, cpa_error *err);
CPA_API void cpa_ring_plan_destroy(cpa_ring_plan *plan);

/* cpa_attend over args->kv in memory of the host, page-locked where the device is to copy while it computes: other memory
 * is waited for. Blocks lie in one piece (as cpa_kv_swap asks). Copies begin behind the work enqueued on the stream so
 * far, which may write the cache, and the memory stays as it is until the attend is done. Passes of which no row sees a
 * key are neither copied nor attended. With blocks of keys in args->selection, blocks of which no row and head of an item
 * attends a key are not read; the host waits until what is enqueued, which may make the bits, is done. With `out`, state.o and resume = 0 the state is whole at the end, as there. */
CPA_API cpa_status cpa_ring_attend(cpa_ring_plan *plan, const cpa_attend_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
