/* swapped-halves: the halves of the rotated elements of keys change places; wrong-tile: the second tile of a latent has
 * the scale of the first; late-values: values begin where the rotated elements are wide further on, so that columns of
 * keys and queries turn by as many. Attend gets a copy of the cache with that done to its rows. */
#include "tests/faults/latents.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "tests/faults/fault.h"

static int is_of_latents(cpa_fault fault) {
    return fault == CPA_FAULT_SWAPPED_HALVES || fault == CPA_FAULT_WRONG_TILE || fault == CPA_FAULT_LATE_VALUES;
}

int cpa_fault_is_of_latents(void) {
    return is_of_latents(cpa_fault_armed);
}

int cpa_fault_is_named_of_latents(void) {
    return is_of_latents(cpa_fault_named);
}

/* Memory of a process that grows, and stays until it ends. */
typedef struct kept_memory {
    void *memory;
    int64_t bytes;
} kept_memory;

static cpa_status reserve(kept_memory *kept, int64_t bytes, cpa_stream *stream) {
    cpa_device *device = stream->device;
    void *memory;
    if (bytes <= kept->bytes) return CPA_OK;
    CPA_TRY(device->table->alloc(device, bytes, &memory, &stream->error));
    device->table->retire(device, kept->memory);
    *kept = (kept_memory){memory, bytes};
    return CPA_OK;
}

/* The last `n` bytes of a row come first. */
static void turn(char *row, int64_t bytes, int64_t n) {
    char turned[2 * CPA_MAX_HEAD_DIM * sizeof(float)];
    memcpy(turned, row + bytes - n, (size_t)n);
    memcpy(turned + n, row, (size_t)(bytes - n));
    memcpy(row, turned, (size_t)bytes);
}

/* `words`: where scales that lie behind the rows of the block have those of the row. */
static void spoil_row(char *row, char *words, const cpa_kv_view *kv) {
    const cpa_row_traits *traits = &cpa_dtype_traits_of(kv->dtype)->rows[CPA_KEYS];
    const int64_t bytes = cpa_kv_row_bytes(kv->dtype, CPA_KEYS, kv->k_dim), rope = kv->k_dim - kv->v_dim;
    const int64_t element = traits->tail > 0 ? 2 : cpa_dtype_bytes(kv->dtype), rope_bytes = rope * element;
    char *scales = traits->scale_in_row ? row + kv->k_dim - traits->tail : words;
    const int64_t scale_bytes = traits->scale_in_row ? traits->scale_bytes : 1; /* of a tile */
    if (cpa_fault_is(CPA_FAULT_SWAPPED_HALVES)) turn(row + bytes - rope_bytes, rope_bytes, rope_bytes / 2);
    if (cpa_fault_is(CPA_FAULT_WRONG_TILE) && traits->tile > 0)
        memcpy(scales + scale_bytes, scales, (size_t)scale_bytes);
    if (cpa_fault_is(CPA_FAULT_LATE_VALUES) && traits->tile == 0) turn(row, bytes, bytes - rope_bytes);
}

/* A copy of a cache whose rows are spoiled. */
static cpa_status spoil_cache(cpa_kv_view *kv, cpa_stream *stream) {
    static kept_memory kept;
    const cpa_device_table *table = stream->device->table;
    const cpa_kv_view given = cpa_kv_view_resolve(*kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&given, CPA_KEYS);
    const int64_t bytes = given.num_blocks * pool.block_stride;
    cpa_status status;
    CPA_TRY(reserve(&kept, bytes, stream));
    char *memory = malloc((size_t)bytes + 1);
    if (!memory) return cpa_fail(&stream->error, CPA_NO_MEMORY, "fault: no memory for a cache");
    CPA_TRY_GOTO(table->copy(memory, given.k, bytes, stream), done);
    CPA_TRY_GOTO(table->stream_sync(stream), done);
    for (int64_t block = 0; block < given.num_blocks; block++)
        for (int64_t t = 0; t < given.block_size; t++)
            spoil_row(memory + block * pool.block_stride + t * pool.token_stride,
                      memory + block * pool.block_stride + pool.scales_at + t * pool.scale_bytes, &given);
    CPA_TRY_GOTO(table->copy(kept.memory, memory, bytes, stream), done);
    CPA_TRY_GOTO(table->stream_sync(stream), done);
    *kv = given;
    kv->k = kept.memory;
done:
    free(memory);
    return status;
}

/* Queries whose last columns come first, as those of the cache do, for rows of `heads` heads. */
static cpa_status turn_queries(void *to, const void *q, int64_t heads, const cpa_attend_plan *plan, cpa_dtype dtype,
                               cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    const int64_t bytes = plan->shape.k_dim * cpa_dtype_bytes(dtype);
    const int64_t first = (plan->shape.k_dim - plan->shape.v_dim) * cpa_dtype_bytes(dtype), rest = bytes - first;
    CPA_TRY(table->copy_rows(to, bytes, (const char *)q + first, bytes, rest, heads, stream));
    return table->copy_rows((char *)to + rest, bytes, q, bytes, first, heads, stream);
}

cpa_status cpa_fault_attend_latents(const cpa_operator_table *real, const cpa_attend_plan *plan, int64_t rows,
                                    const cpa_attend_args *args, const void *ready_q, cpa_stream *stream) {
    static kept_memory turned;
    const cpa_attend_fusion *fusion = &plan->fusion;
    const int64_t q_row = cpa_shape_q_bytes(&plan->shape), ready = fusion->ready_rows;
    cpa_attend_args spoiled = *args;
    CPA_TRY(spoil_cache(&spoiled.kv, stream));
    const int turns = cpa_fault_is(CPA_FAULT_LATE_VALUES) && !cpa_dtype_has_tiles(args->kv.dtype);
    if (!turns || rows == 0) return real->attend(plan, &spoiled, ready_q, stream);
    CPA_TRY(reserve(&turned, rows * q_row, stream));
    const int64_t heads = plan->shape.q_heads;
    CPA_TRY(turn_queries(turned.memory, args->q, rows * heads, plan, args->q_dtype, stream));
    char *place = (char *)turned.memory + fusion->ready_row * q_row;
    if (ready > 0) CPA_TRY(turn_queries(place, ready_q, ready * heads, plan, args->q_dtype, stream));
    spoiled.q = turned.memory;
    return real->attend(plan, &spoiled, ready > 0 ? place : ready_q, stream);
}
