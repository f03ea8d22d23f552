/* The memory and the inputs of the self-test of operations, and its test of kv_write and kv_pack. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/block_layout.h"
#include "src/check/cases/inputs.h"
#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "src/check/self_test_pages.h"

cpa_status cpa_self_test_host(cpa_kernel_test *t, int64_t bytes, void *out, cpa_error *err) {
    void *memory = malloc((size_t)bytes + 1);
    if (!memory) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld bytes", (long long)bytes);
    t->host_memory[t->n_host++] = memory;
    memcpy(out, &memory, sizeof memory);
    return CPA_OK;
}

cpa_status cpa_self_test_device(cpa_kernel_test *t, int64_t bytes, const void *from, void *out, cpa_error *err) {
    const int nan_byte = 0xff;
    void *memory = NULL, *poison = from ? NULL : malloc((size_t)bytes + 1);
    if (!from && !poison) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %lld bytes", (long long)bytes);
    if (poison) memset(poison, nan_byte, (size_t)bytes);
    cpa_status status = t->device->table->alloc(t->device, bytes, &memory, err);
    if (status == CPA_OK) {
        t->device_memory[t->n_device++] = memory;
        status = t->device->table->copy(memory, from ? from : poison, bytes, t->stream);
        if (status == CPA_OK) status = t->device->table->stream_sync(t->stream);
    }
    free(poison);
    memcpy(out, &memory, sizeof memory);
    return status;
}

/* Rows of one tensor from the generator, [n, heads, dim], in the model's dtype and as floats. */
static cpa_status generate(cpa_kernel_test *t, cpa_synth_tensor tensor, int64_t n, const int64_t *positions, char **raw,
                           float **wide, cpa_error *err) {
    cpa_synth_args args = cpa_synth_of(&t->options->model.attention, tensor);
    const int64_t elements = n * args.heads * args.dim;
    args.seed = t->seed;
    args.rows = n;
    args.positions = positions;
    CPA_TRY(cpa_self_test_host(t, elements * cpa_dtype_bytes(args.dtype), raw, err));
    CPA_TRY(cpa_self_test_host(t, elements * (int64_t)sizeof **wide, wide, err));
    CPA_TRY(cpa_case_synthesize(args, *raw, err));
    cpa_reference_widen(*raw, args.dtype, elements, *wide);
    return CPA_OK;
}

static void set_positions(cpa_kernel_test *t, int64_t prefill) {
    for (int64_t i = 0; i < cpa_self_test_total_keys(t); i++)
        t->k_positions[i] = i < t->keys[0] ? cpa_shard_pos(t->map, 0, i) : cpa_shard_pos(t->map, 1, i - t->keys[0]);
    /* Decode rows: all of shard 1, a part of it that ends within a page, none of it. */
    const int64_t given[CPA_SELF_TEST_DECODE_ROWS] = {t->keys[1], t->keys[1] - 3, 0};
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t local = r < prefill ? t->keys[0] - prefill + r : t->keys[0] - CPA_SELF_TEST_DECODE_ROWS + (r - prefill);
        t->q_positions[r] = t->k_positions[local];
        t->limits[r] = r < prefill ? t->keys[1] : given[r - prefill];
    }
}

static int64_t values_of_token(const cpa_kernel_test *t) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    return (int64_t)shape->kv_heads * shape->v_dim;
}

cpa_status cpa_self_test_make_inputs(cpa_kernel_test *t, int64_t prefill, cpa_error *err) {
    const int64_t n = cpa_self_test_total_keys(t), rows = t->rows, index = (int64_t)sizeof(int64_t);
    CPA_TRY(cpa_self_test_host(t, n * index, &t->k_positions, err));
    CPA_TRY(cpa_self_test_host(t, rows * index, &t->q_positions, err));
    CPA_TRY(cpa_self_test_host(t, rows * index, &t->limits, err));
    set_positions(t, prefill);
    CPA_TRY(generate(t, CPA_SYNTH_Q, rows, t->q_positions, &t->q_raw, &t->q, err));
    CPA_TRY(generate(t, CPA_SYNTH_K, n, t->k_positions, &t->k_raw, &t->k, err));
    if (t->options->model.attention.v_in_k)
        CPA_TRY(cpa_self_test_host(t, n * values_of_token(t) * (int64_t)sizeof *t->v, &t->v, err));
    else
        CPA_TRY(generate(t, CPA_SYNTH_V, n, t->k_positions, &t->v_raw, &t->v, err));
    return cpa_self_test_device(t, rows * cpa_shape_q_bytes(&t->options->model.attention), t->q_raw, &t->q_device, err);
}

/* Blocks of the layout that the engine's caches have. */
static cpa_block_layout layout_of(const cpa_kernel_test *t) {
    cpa_attention_shape shape = t->options->model.attention;
    shape.k_scales = shape.v_scales = NULL; /* rows have their own in their place */
    shape.n_scales = 0;
    return cpa_block_layout_of(&shape, t->options->block_size);
}

static cpa_status make_pool(cpa_kernel_test *t, cpa_kv_view *view, cpa_error *err) {
    const cpa_block_layout layout = layout_of(t);
    void *memory = NULL;
    CPA_TRY(cpa_self_test_device(t, t->n_blocks * layout.bytes, NULL, &memory, err));
    *view = cpa_block_layout_view(&layout, memory, t->n_blocks, 0);
    return CPA_OK;
}

cpa_status cpa_self_test_write_pages(cpa_kernel_test *t, cpa_error *err) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    const int64_t n = cpa_self_test_total_keys(t), block = t->options->block_size,
                  element = cpa_dtype_bytes(shape->dtype);
    int64_t used[CPA_SELF_TEST_SHARDS], *slots = NULL, *slots_device = NULL;
    void *k_device = NULL, *v_device = NULL;
    for (int s = 0; s < CPA_SELF_TEST_SHARDS; s++) used[s] = (t->keys[s] + block - 1) / block;
    t->n_blocks = used[0] + used[1] + CPA_SELF_TEST_SPARE_BLOCKS;
    t->first_entry[1] = used[0];
    CPA_TRY(cpa_self_test_host(t, (used[0] + used[1]) * (int64_t)sizeof *t->tables, &t->tables, err));
    for (int64_t i = 0; i < used[0] + used[1]; i++) t->tables[i] = (int32_t)(t->n_blocks - 1 - i);
    CPA_TRY(cpa_self_test_host(t, n * (int64_t)sizeof *slots, &slots, err));
    for (int64_t i = 0; i < n; i++) {
        int shard = i >= t->keys[0];
        int64_t local = shard ? i - t->keys[0] : i;
        slots[i] = t->tables[t->first_entry[shard] + local / block] * block + local % block;
    }
    CPA_TRY(make_pool(t, &t->kv, err));
    CPA_TRY(cpa_self_test_device(t, n * (int64_t)sizeof *slots, slots, &slots_device, err));
    CPA_TRY(cpa_self_test_device(t, n * shape->kv_heads * shape->k_dim * element, t->k_raw, &k_device, err));
    if (!shape->v_in_k) CPA_TRY(cpa_self_test_device(t, n * values_of_token(t) * element, t->v_raw, &v_device, err));
    cpa_kv_write_args args = {sizeof args, n, shape->dtype, k_device, v_device, slots_device, t->kv, NULL, 0, 0, 0, 0};
    return cpa_kv_write(&args, t->stream);
}

static cpa_status wrong_pages(const cpa_kernel_test *t, int values, int64_t at, int32_t dim, float got, float want,
                              cpa_error *err) {
    const cpa_worker_options *o = t->options;
    int64_t row = at / dim, heads = o->model.attention.kv_heads;
    return cpa_fail(err, CPA_CHECK_FAILED,
                    "kv_write and kv_pack, %s to %s, blocks of %d, %d KV heads: %s of token %lld, head %lld, element "
                    "%lld is %g, expected %g",
                    cpa_dtype_name(o->model.attention.dtype), cpa_dtype_name(o->model.attention.kv_dtype),
                    o->block_size, o->model.attention.kv_heads, values ? "value" : "key", (long long)(row / heads),
                    (long long)(row % heads), (long long)(at % dim), (double)got, (double)want);
}

/* Compares `rows` rows of a block, which lies at t->got, with what was written. What a quantised cache holds is then
 * what the results are compared with. */
static cpa_status check_block(cpa_kernel_test *t, const cpa_kv_view *view, cpa_kv_part part, int64_t rows,
                              int64_t first_row, cpa_error *err) {
    const cpa_kv_pool pool = cpa_kv_pool_of(view, part);
    const int32_t dim = pool.dim, heads = view->kv_heads;
    for (int64_t r = 0; r < rows; r++) {
        float got[CPA_MAX_HEAD_DIM], *want = (part == CPA_KEYS ? t->k : t->v) + (first_row + r) * dim;
        char row[CPA_MAX_HEAD_DIM * sizeof(float)];
        const int64_t token = r / heads, head = r % heads;
        for (int32_t run = 0; run < pool.runs; run++)
            memcpy(row + run * pool.run_bytes,
                   t->got + token * pool.token_stride + head * pool.head_stride + run * pool.run_stride,
                   (size_t)pool.run_bytes);
        cpa_reference_read_rows(row, t->got + pool.scales_at + (head * view->block_size + token) * pool.scale_bytes,
                                view->dtype, part, pool.tensor_scale, 1, dim, got);
        int32_t worst = 0;
        for (int32_t d = 1; d < dim; d++) {
            if (!(fabsf(got[d] - want[d]) <= fabsf(got[worst] - want[worst]))) worst = d;
        }
        if (!cpa_reference_may_hold(got, want, view->dtype, part, pool.tensor_scale, dim))
            return wrong_pages(t, part == CPA_VALUES, (first_row + r) * dim + worst, dim, got[worst], want[worst], err);
        memcpy(want, got, (size_t)dim * sizeof *got);
    }
    return CPA_OK;
}

/* Values that lie in keys are the first elements of what the cache holds of these. */
static void take_values_of_keys(cpa_kernel_test *t) {
    const cpa_attention_shape *shape = &t->options->model.attention;
    for (int64_t i = 0; i < cpa_self_test_total_keys(t) * shape->kv_heads; i++)
        memcpy(t->v + i * shape->v_dim, t->k + i * shape->k_dim, (size_t)shape->v_dim * sizeof *t->v);
}

cpa_status cpa_self_test_check_pages(cpa_kernel_test *t, cpa_error *err) {
    const int64_t block = t->options->block_size, heads = t->options->model.attention.kv_heads;
    const cpa_block_layout layout = layout_of(t);
    cpa_kv_view packed;
    cpa_kv_range ranges[CPA_SELF_TEST_SHARDS] = {
        {.count = t->keys[0]}, {.table = t->first_entry[1], .count = t->keys[1], .dst_block = t->first_entry[1]}};
    CPA_TRY(make_pool(t, &packed, err));
    cpa_kv_pack_args args = {
        sizeof args, t->kv, packed, t->tables, t->n_blocks - CPA_SELF_TEST_SPARE_BLOCKS, ranges, CPA_SELF_TEST_SHARDS};
    CPA_TRY(cpa_kv_pack(&args, t->stream));
    const int parts = cpa_kv_parts(&packed);
    for (int i = 0; i < parts * CPA_SELF_TEST_SHARDS; i++) {
        const cpa_kv_part part = (cpa_kv_part)(i % parts);
        const cpa_kv_pool pool = cpa_kv_pool_of(&packed, part);
        const int shard = i / parts;
        const int64_t bytes = layout.sections[part].bytes, before = shard ? t->keys[0] : 0;
        for (int64_t done = 0; done < t->keys[shard]; done += block) {
            int64_t left = t->keys[shard] - done;
            const char *from = pool.memory + (ranges[shard].dst_block + done / block) * pool.block_stride;
            CPA_TRY(t->device->table->copy(t->got, from, bytes, t->stream));
            CPA_TRY(t->device->table->stream_sync(t->stream));
            CPA_TRY(check_block(t, &packed, part, (left < block ? left : block) * heads, (before + done) * heads, err));
        }
    }
    if (packed.v_in_k) take_values_of_keys(t);
    return CPA_OK;
}
