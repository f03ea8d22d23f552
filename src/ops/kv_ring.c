#include "src/ops/kv_ring.h"

#include <stdlib.h>

#include "base/min_max.h"
#include "base/struct_size.h"
#include "kernels/event_order.h"
#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_shape.h"
#include "src/ops/kv_piece.h"

/* Tokens at multiples of which keys are cut on devices that promise no bits: whole tiles of their kernels. */
enum { DEVICE_STEP = 256 };

/* ---- life ---- */

/* The least multiple of blocks that a cut may fall on. */
static int64_t step_of(const cpa_device *device, int32_t block_size) {
    const int64_t unit = device->caps.bit_exact ? device->caps.split_tokens : DEVICE_STEP;
    int64_t step = unit;
    while (step % block_size != 0) step += unit;
    return step;
}

static cpa_status take_options(const cpa_device *device, const cpa_kv_ring_options *given, cpa_kv_ring_options *o,
                               cpa_error *err) {
    REQUIRE(err, device, "ring: the device is NULL");
    CPA_TRY(CPA_STRUCT_TAKE("ring", given, cpa_kv_ring_options, bytes, o, err));
    CPA_TRY(cpa_check_attend("ring", device, &o->shape, NULL, err));
    CPA_TRY(cpa_check_block_size("ring", o->block_size, err));
    if (o->segments == 0) o->segments = 2;
    REQUIRE(err, o->segments >= 2 && o->segments <= CPA_MOST_RING_SEGMENTS, "ring: %d segments, expected 2..%d",
            o->segments, CPA_MOST_RING_SEGMENTS);
    return CPA_OK;
}

static int64_t least_bytes(const cpa_device *device, const cpa_kv_ring_options *o) {
    return o->segments * (step_of(device, o->block_size) / o->block_size) *
           cpa_block_layout_of(&o->shape, o->block_size).bytes;
}

int64_t cpa_kv_ring_least_bytes(const cpa_device *device, const cpa_kv_ring_options *options) {
    cpa_kv_ring_options o;
    return take_options(device, options, &o, NULL) == CPA_OK ? least_bytes(device, &o) : 0;
}

/* What plans widen the keys of a segment in, to two bytes an element with a scale for each row. */
static void open_workspace(cpa_kv_ring *ring) {
    const cpa_attention_shape *s = &ring->options.shape;
    const int64_t least = ring->device->operators->least_workspace(s, ring->options.block_size);
    const int64_t token_bytes = s->kv_heads * (2 * (int64_t)(s->k_dim + s->v_dim) + (int64_t)sizeof(float));
    const int64_t bytes = least + ring->stats.segment_tokens * token_bytes;
    if (least == 0) return;
    ring->workspace = cpa_key_workspace_open(ring->device, cpa_min64(bytes, CPA_KEY_WORKSPACE_BYTES + least), least);
    if (!ring->workspace.memory)
        cpa_log(CPA_LOG_WARN, "ring: no memory for %lld bytes to widen keys in", (long long)least);
}

/* Room for the copies of a segment: keys and values of each block. */
static cpa_status reserve_list(cpa_kv_ring *ring, cpa_error *err) {
    const size_t most = 2 * (size_t)ring->segment_blocks;
    ring->timed_bytes = calloc(CPA_RING_TIMED, sizeof *ring->timed_bytes);
    ring->list = (cpa_copy_list){.dsts = calloc(most, sizeof *ring->list.dsts),
                                 .srcs = calloc(most, sizeof *ring->list.srcs),
                                 .bytes = calloc(most, sizeof *ring->list.bytes)};
    if (ring->timed_bytes && ring->list.dsts && ring->list.srcs && ring->list.bytes) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "ring: no memory for the copies of %lld blocks",
                    (long long)ring->segment_blocks);
}

static cpa_status open(cpa_kv_ring *ring, int with_workspace, cpa_error *err) {
    const cpa_device_table *table = ring->device->table;
    const cpa_kv_ring_options *o = &ring->options;
    ring->layout = cpa_block_layout_of(&o->shape, o->block_size);
    ring->step = step_of(ring->device, o->block_size);
    ring->segment_blocks = cpa_min64(o->bytes / o->segments / ring->layout.bytes, INT32_MAX);
    const int64_t bytes = o->segments * ring->segment_blocks * ring->layout.bytes;
    void *memory;
    CPA_TRY(table->alloc(ring->device, bytes, &memory, err));
    ring->memory = memory;
    ring->stats.segment_tokens = ring->segment_blocks * o->block_size;
    if (with_workspace) open_workspace(ring);
    ring->stats.device_bytes = bytes + ring->workspace.bytes;
    CPA_TRY(reserve_list(ring, err));
    CPA_TRY(table->events_create(ring->device, &ring->events, err));
    return table->stream_create(ring->device, &ring->copies, err);
}

cpa_status cpa_kv_ring_open(cpa_device *device, const cpa_kv_ring_options *options, int with_workspace,
                            cpa_kv_ring **out, cpa_error *err) {
    cpa_kv_ring_options o;
    CPA_TRY(take_options(device, options, &o, err));
    REQUIRE(err, out, "ring: out is NULL");
    REQUIRE(err, o.bytes >= least_bytes(device, &o) && o.bytes <= CPA_MOST_BYTES,
            "ring: bytes is %lld, expected at least %lld: %d segments of %lld tokens", (long long)o.bytes,
            (long long)least_bytes(device, &o), o.segments, (long long)step_of(device, o.block_size));
    cpa_kv_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return cpa_fail(err, CPA_NO_MEMORY, "ring: no memory");
    ring->device = device;
    ring->options = o;
    const cpa_status status = open(ring, with_workspace, err);
    if (status != CPA_OK) {
        cpa_kv_ring_destroy(ring);
        return status;
    }
    *out = ring;
    return CPA_OK;
}

cpa_status cpa_kv_ring_create(cpa_device *device, const cpa_kv_ring_options *options, cpa_kv_ring **out,
                              cpa_error *err) {
    return cpa_kv_ring_open(device, options, 1, out, err);
}

void cpa_kv_ring_destroy(cpa_kv_ring *ring) {
    if (!ring) return;
    const cpa_device_table *table = ring->device->table;
    if (ring->copies) table->stream_destroy(ring->copies);
    table->events_destroy(ring->events);
    table->free(ring->device, ring->workspace.memory);
    table->free(ring->device, ring->memory);
    free(ring->list.dsts);
    free(ring->list.srcs);
    free(ring->list.bytes);
    free(ring->timed_bytes);
    free(ring);
}

/* ---- blocks ---- */

cpa_status cpa_kv_ring_check_view(const cpa_kv_ring *ring, const cpa_kv_view *kv, cpa_error *err) {
    const cpa_kv_view view = cpa_kv_view_resolve(*kv);
    const cpa_cache_form cache = cpa_cache_form_of("the cache", kv),
                         own = {"the ring", ring->options.shape, ring->options.block_size};
    CPA_TRY(cpa_check_same_cache("attend", &cache, &own, 0, err));
    for (int part = CPA_KEYS; part < cpa_kv_parts(&view); part++)
        if (!cpa_kv_piece_bytes(&view, (cpa_kv_part)part))
            return cpa_fail(err, CPA_UNSUPPORTED,
                            "attend: blocks of %s on the host have strides of tokens and heads of %lld and %lld "
                            "elements, expected blocks in one piece",
                            part == CPA_KEYS ? "keys" : "values",
                            (long long)(part == CPA_KEYS ? view.k_token_stride : view.v_token_stride),
                            (long long)(part == CPA_KEYS ? view.k_head_stride : view.v_head_stride));
    return CPA_OK;
}

cpa_kv_view cpa_kv_ring_view(const cpa_kv_ring *ring, int64_t turn, const cpa_kv_view *of) {
    const int64_t segment = turn % ring->options.segments, bytes = ring->segment_blocks * ring->layout.bytes;
    const cpa_kv_view at =
        cpa_block_layout_view(&ring->layout, ring->memory + segment * bytes, ring->segment_blocks, 0);
    cpa_kv_view kv = cpa_kv_view_resolve(*of);
    kv.k = at.k;
    kv.v = at.v;
    kv.num_blocks = at.num_blocks;
    kv.k_block_stride = at.k_block_stride;
    kv.v_block_stride = at.v_block_stride;
    return kv;
}

/* ---- order, and times ---- */

/* Events of a ring: what copies follow; of each segment when it is filled, and when it is given back; and of each timed
 * turn when its copies begin and end, and when attention comes to it and finds it filled. */
enum { FOLLOWED = 0, FIRST_FILLED = 1, FIRST_TIME = FIRST_FILLED + 2 * CPA_MOST_RING_SEGMENTS };
enum { COPY_BEGIN = 0, COPY_END, WAIT_BEGIN, WAIT_END, TIMES };

static int32_t filled(const cpa_kv_ring *ring, int64_t turn) {
    return (int32_t)(FIRST_FILLED + turn % ring->options.segments);
}

static int32_t given_back(const cpa_kv_ring *ring, int64_t turn) {
    return filled(ring, turn) + ring->options.segments;
}

static const cpa_event_order_table *order_of(const cpa_device *device) {
#ifdef CPA_HAVE_CUDA
    if (device->backend == CPA_BACKEND_CUDA) return &cpa_cuda_event_order;
#endif
    (void)device;
    return &cpa_host_event_order;
}

static cpa_status await(const cpa_kv_ring *ring, int32_t event, cpa_stream *stream) {
    return order_of(ring->device)->await(ring->events, event, stream);
}

static int32_t time_of(int64_t turn, int32_t what) {
    return (int32_t)(FIRST_TIME + turn % CPA_RING_TIMED * TIMES + what);
}

/* Counts the times of a turn, if it is over. */
static void count_times(cpa_kv_ring *ring, int64_t turn) {
    const cpa_device_table *table = ring->device->table;
    int64_t *bytes = &ring->timed_bytes[turn % CPA_RING_TIMED];
    double copied, waited;
    if (*bytes == 0 || !table->event_reached(ring->events, time_of(turn, WAIT_END))) return;
    if (table->event_seconds(ring->events, time_of(turn, COPY_BEGIN), time_of(turn, COPY_END), &copied, NULL) ==
            CPA_OK &&
        table->event_seconds(ring->events, time_of(turn, WAIT_BEGIN), time_of(turn, WAIT_END), &waited, NULL) ==
            CPA_OK) {
        ring->stats.copy_s += copied;
        ring->stats.waited_s += waited;
        ring->stats.timed_bytes += *bytes;
    }
    *bytes = 0;
}

cpa_status cpa_kv_ring_get_stats(cpa_kv_ring *ring, cpa_kv_ring_stats *out, size_t size) {
    if (!ring) return CPA_INVALID;
    for (int64_t turn = cpa_max64(ring->turn - CPA_RING_TIMED, 0); turn < ring->turn; turn++) count_times(ring, turn);
    return cpa_struct_give(&ring->stats, sizeof ring->stats, out, size);
}

/* A failure of the copies' stream becomes one of the attend's. */
static cpa_status tell(const cpa_kv_ring *ring, cpa_status status, cpa_stream *stream) {
    return status == CPA_OK ? CPA_OK : cpa_fail(&stream->error, status, "attend: %s", ring->copies->error.message);
}

cpa_status cpa_kv_ring_follow(cpa_kv_ring *ring, cpa_stream *stream) {
    CPA_TRY(ring->device->table->event_record(ring->events, FOLLOWED, stream));
    return tell(ring, await(ring, FOLLOWED, ring->copies), stream);
}

static const cpa_copy_list_table *copies_of(const cpa_device *device) {
#ifdef CPA_HAVE_CUDA
    if (device->backend == CPA_BACKEND_CUDA) return &cpa_cuda_copy_list;
#endif
    (void)device;
    return &cpa_host_copy_list;
}

static void add_copy(cpa_kv_ring *ring, char *dst, const char *src, int64_t bytes) {
    const int64_t i = ring->list.n++;
    ring->list.dsts[i] = dst;
    ring->list.srcs[i] = src;
    ring->list.bytes[i] = (size_t)bytes;
    ring->stats.bytes_read += bytes;
}

/* Lists the copies of a run: all at once where blocks are the bytes of the ring's, one behind the other; else of each
 * block, keys and values together where they lie so. */
static void list_run(cpa_kv_ring *ring, const cpa_kv_view *from, const cpa_kv_view *to, const cpa_ring_run *run) {
    const int is_whole = cpa_block_layout_matches(&ring->layout, from), parts = is_whole ? 1 : cpa_kv_parts(from);
    for (int part = CPA_KEYS; part < parts; part++) {
        const cpa_kv_pool src = cpa_kv_pool_of(from, (cpa_kv_part)part), dst = cpa_kv_pool_of(to, (cpa_kv_part)part);
        const int64_t bytes = is_whole ? ring->layout.bytes : cpa_kv_piece_bytes(from, (cpa_kv_part)part);
        const int64_t joined = src.block_stride == bytes && dst.block_stride == bytes ? run->count : 1;
        for (int64_t i = 0; i < run->count; i += joined)
            add_copy(ring, dst.memory + (run->place + i) * dst.block_stride,
                     src.memory + (run->block + i) * src.block_stride, joined * bytes);
    }
}

/* The copies of a turn, and their times. */
static cpa_status copy_runs(cpa_kv_ring *ring, int64_t turn, const cpa_kv_view *from, const cpa_ring_run *runs,
                            int64_t n, int clears) {
    const cpa_device_table *table = ring->device->table;
    const cpa_kv_view to = cpa_kv_ring_view(ring, turn, from);
    const int64_t before = ring->stats.bytes_read;
    count_times(ring, turn);
    ring->timed_bytes[turn % CPA_RING_TIMED] = 0;
    CPA_TRY(await(ring, given_back(ring, turn), ring->copies));
    CPA_TRY(table->event_record(ring->events, time_of(turn, COPY_BEGIN), ring->copies));
    if (clears) CPA_TRY(copies_of(ring->device)->clear(to.k, ring->segment_blocks * ring->layout.bytes, ring->copies));
    ring->list.n = 0;
    for (int64_t i = 0; i < n; i++) list_run(ring, from, &to, &runs[i]);
    CPA_TRY(copies_of(ring->device)->copy(&ring->list, ring->copies));
    CPA_TRY(table->event_record(ring->events, time_of(turn, COPY_END), ring->copies));
    ring->stats.passes++;
    ring->timed_bytes[turn % CPA_RING_TIMED] = ring->stats.bytes_read - before;
    return table->event_record(ring->events, filled(ring, turn), ring->copies);
}

cpa_status cpa_kv_ring_fill(cpa_kv_ring *ring, const cpa_kv_view *kv, const cpa_ring_run *runs, int64_t n, int clears,
                            cpa_stream *stream) {
    const int64_t turn = ring->turn++;
    return tell(ring, copy_runs(ring, turn, kv, runs, n, clears), stream);
}

cpa_status cpa_kv_ring_take(cpa_kv_ring *ring, int64_t turn, cpa_stream *stream) {
    const cpa_device_table *table = ring->device->table;
    CPA_TRY(table->event_record(ring->events, time_of(turn, WAIT_BEGIN), stream));
    CPA_TRY(await(ring, filled(ring, turn), stream));
    return table->event_record(ring->events, time_of(turn, WAIT_END), stream);
}

cpa_status cpa_kv_ring_give_back(cpa_kv_ring *ring, int64_t turn, cpa_stream *stream) {
    return ring->device->table->event_record(ring->events, given_back(ring, turn), stream);
}
