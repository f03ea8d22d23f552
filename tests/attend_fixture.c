#include "attend_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/convert.h"
#include "src/reference.h"

enum { SPARE_ENTRIES = 3, SPARE_BLOCKS = 2 };

/* The keys and values of a slot become what the quantised cache holds of them. */
static void read_back(cpa_attend_fixture *fixture, int32_t slot, const int32_t *table) {
    const cpa_attend_case *shape = &fixture->shape;
    for (int64_t i = 0; i < fixture->k_tokens[slot]; i++) {
        int64_t row = cpa_shard_pos(fixture->map, slot, i) * shape->kv_heads;
        for (int32_t head = 0; head < shape->kv_heads; head++, row++) {
            cpa_kv_fixture_load(&fixture->kv, table[i / shape->block_size], i % shape->block_size, head,
                                fixture->sequence.k + row * shape->k_dim, fixture->sequence.v + row * shape->v_dim);
        }
    }
}

static void build_cache(cpa_attend_fixture *fixture) {
    const cpa_attend_case *shape = &fixture->shape;
    int64_t entries = 0, blocks = 0;
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        fixture->k_tokens[slot] = cpa_shard_len(fixture->map, slot, shape->length);
        fixture->table[slot] = entries;
        entries += (fixture->k_tokens[slot] + shape->block_size - 1) / shape->block_size + SPARE_ENTRIES;
    }
    fixture->n_table_entries = entries;
    fixture->tables = cpa_test_poisoned(entries, sizeof *fixture->tables);
    cpa_kv_view view = {.dtype = shape->kv_dtype,
                        .block_size = shape->block_size,
                        .num_blocks = entries + SPARE_BLOCKS,
                        .kv_heads = shape->kv_heads,
                        .k_dim = shape->k_dim,
                        .v_dim = shape->v_dim,
                        .k_scale = shape->k_scale,
                        .v_scale = shape->v_scale};
    cpa_kv_fixture_init_view(&fixture->kv, view, shape->head_major);
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        int64_t used = (fixture->k_tokens[slot] + shape->block_size - 1) / shape->block_size;
        int32_t *table = cpa_test_block_table(fixture->k_tokens[slot], shape->block_size, blocks, SPARE_ENTRIES);
        memcpy(fixture->tables + fixture->table[slot], table, (size_t)(used + SPARE_ENTRIES) * sizeof *table);
        cpa_test_store_shard(&fixture->kv, &fixture->sequence, fixture->map, slot, shape->length, table);
        if (cpa_dtype_is_quantised(shape->kv_dtype)) read_back(fixture, slot, table);
        blocks += used;
        free(table);
    }
}

static void build_queries(cpa_attend_fixture *fixture) {
    const cpa_attend_case *shape = &fixture->shape;
    int64_t width = (int64_t)shape->q_heads * shape->k_dim, bytes = cpa_dtype_bytes(shape->q_dtype);
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        fixture->q_first[slot] = cpa_shard_len(fixture->map, slot, shape->start);
        fixture->q_count[slot] = fixture->k_tokens[slot] - fixture->q_first[slot];
        fixture->q_row[slot] = fixture->rows;
        fixture->rows += fixture->q_count[slot];
    }
    fixture->q = cpa_test_poisoned(fixture->rows * width, bytes);
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        for (int64_t i = 0; i < fixture->q_count[slot]; i++) {
            int64_t position = cpa_shard_pos(fixture->map, slot, fixture->q_first[slot] + i);
            cpa_narrow((char *)fixture->q + (fixture->q_row[slot] + i) * width * bytes,
                       fixture->sequence.q + position * width, shape->q_dtype, width);
        }
    }
}

void cpa_attend_fixture_init(cpa_attend_fixture *fixture, const cpa_attend_case *shape, int32_t threads) {
    *fixture = (cpa_attend_fixture){.shape = *shape, .map = {shape->cp_size, shape->interleave}};
    cpa_test_device_open(threads, &fixture->device, &fixture->stream);
    if (cpa_attend_plan_create(fixture->device, &fixture->plan, NULL) != CPA_OK) abort();
    /* Queries and keys are representable in both dtypes only where these agree; each side rounds again as it is stored,
     * so the sequence keeps what both can hold. */
    cpa_test_sequence_init(&fixture->sequence, 11, shape->length, shape->q_heads, shape->kv_heads, shape->k_dim,
                           shape->v_dim, cpa_dtype_is_quantised(shape->kv_dtype) ? CPA_F32 : shape->kv_dtype);
    build_cache(fixture);
    build_queries(fixture);
    fixture->device_kv = cpa_kv_fixture_upload(&fixture->kv, fixture->stream);
    fixture->device_q = cpa_test_upload(
        fixture->stream, fixture->q, fixture->rows * shape->q_heads * shape->k_dim * cpa_dtype_bytes(shape->q_dtype));
}

void cpa_attend_fixture_destroy(cpa_attend_fixture *fixture) {
    cpa_test_free(fixture->stream, fixture->device_q);
    cpa_kv_view_free(&fixture->device_kv, fixture->stream);
    free(fixture->q);
    free(fixture->tables);
    cpa_kv_fixture_destroy(&fixture->kv);
    cpa_test_sequence_destroy(&fixture->sequence);
    cpa_attend_plan_destroy(fixture->plan);
    cpa_test_device_close(fixture->device, fixture->stream);
}

void cpa_attend_result_init(cpa_attend_result *result, const cpa_attend_fixture *fixture) {
    int64_t heads = fixture->rows * fixture->shape.q_heads;
    result->o_bytes = heads * fixture->shape.v_dim * (int64_t)sizeof *result->o;
    result->lse_bytes = heads * (int64_t)sizeof *result->lse;
    result->out_bytes = heads * fixture->shape.v_dim * cpa_dtype_bytes(fixture->shape.q_dtype);
    result->o = cpa_test_poisoned(result->o_bytes, 1);
    result->lse = cpa_test_poisoned(result->lse_bytes, 1);
    result->out = cpa_test_poisoned(result->out_bytes, 1);
}

void cpa_attend_result_destroy(cpa_attend_result *result) {
    free(result->o);
    free(result->lse);
    free(result->out);
}

int cpa_attend_result_same(const cpa_attend_result *a, const cpa_attend_result *b) {
    return memcmp(a->o, b->o, (size_t)a->o_bytes) == 0 && memcmp(a->lse, b->lse, (size_t)a->lse_bytes) == 0 &&
           memcmp(a->out, b->out, (size_t)a->out_bytes) == 0;
}

cpa_attend_item cpa_attend_fixture_item(const cpa_attend_fixture *fixture, int32_t q_slot, int64_t q_begin,
                                        int64_t q_count, int32_t k_slot, int64_t k_begin, int64_t k_end) {
    return (cpa_attend_item){.q_row = fixture->q_row[q_slot] + q_begin,
                             .q_count = q_count,
                             .q_first = fixture->q_first[q_slot] + q_begin,
                             .k_first = k_begin,
                             .k_count = k_end - k_begin,
                             .table = fixture->table[k_slot] + k_begin / fixture->shape.block_size,
                             .q_slot = q_slot,
                             .k_slot = k_slot};
}

/* The state and the output of a call on the device. */
typedef struct device_result {
    int64_t stride, bytes; /* floats of a row of O and LSE together, and bytes of all rows */
    float *memory;         /* host: O, LSE and padding as they lie on the device */
    cpa_partial state;
    void *out;
} device_result;

/* Where O and LSE of a row lie in the memory of the state. */
static int64_t o_at(const cpa_attend_fixture *fixture, const device_result *r, int64_t row) {
    return row * (fixture->padding ? r->stride : (int64_t)fixture->shape.q_heads * fixture->shape.v_dim);
}

static int64_t lse_at(const cpa_attend_fixture *fixture, const device_result *r, int64_t row) {
    int64_t heads = fixture->shape.q_heads, o_floats = heads * fixture->shape.v_dim;
    return fixture->padding ? row * r->stride + o_floats : fixture->rows * o_floats + row * heads;
}

static void upload_result(const cpa_attend_fixture *fixture, const cpa_attend_result *result, device_result *r) {
    int64_t heads = fixture->shape.q_heads, o_floats = heads * fixture->shape.v_dim, unit = 4; /* 16 bytes */
    r->stride = o_floats + heads;
    if (fixture->padding) r->stride = (r->stride + fixture->padding + unit - 1) / unit * unit;
    r->bytes = fixture->rows * r->stride * (int64_t)sizeof(float);
    r->memory = cpa_test_poisoned(r->bytes, 1);
    for (int64_t row = 0; row < fixture->rows; row++) {
        memcpy(r->memory + o_at(fixture, r, row), result->o + row * o_floats, (size_t)o_floats * sizeof(float));
        memcpy(r->memory + lse_at(fixture, r, row), result->lse + row * heads, (size_t)heads * sizeof(float));
    }
    float *base = cpa_test_upload(fixture->stream, r->memory, r->bytes);
    int64_t row_stride = fixture->padding ? r->stride : 0;
    r->state = (cpa_partial){base, row_stride, base + lse_at(fixture, r, 0), row_stride};
    r->out = cpa_test_upload(fixture->stream, result->out, result->out_bytes);
}

/* Returns whether the padding is as it was. */
static int download_result(const cpa_attend_fixture *fixture, device_result *r, cpa_attend_result *result) {
    int64_t heads = fixture->shape.q_heads, o_floats = heads * fixture->shape.v_dim, touched = 0;
    const uint32_t poison = UINT32_MAX;
    cpa_test_download(fixture->stream, r->memory, r->state.o, r->bytes);
    cpa_test_download(fixture->stream, result->out, r->out, result->out_bytes);
    for (int64_t row = 0; row < fixture->rows; row++) {
        memcpy(result->o + row * o_floats, r->memory + o_at(fixture, r, row), (size_t)o_floats * sizeof(float));
        memcpy(result->lse + row * heads, r->memory + lse_at(fixture, r, row), (size_t)heads * sizeof(float));
        for (int64_t i = o_floats + heads; i < r->stride; i++)
            touched += memcmp(r->memory + row * r->stride + i, &poison, sizeof poison) != 0;
    }
    cpa_test_free(fixture->stream, r->out);
    cpa_test_free(fixture->stream, r->state.o);
    free(r->memory);
    return touched == 0;
}

cpa_status cpa_attend_fixture_run(cpa_attend_fixture *fixture, const cpa_attend_item *items, int64_t n_items,
                                  int resume, cpa_attend_result *result) {
    const cpa_attend_case *shape = &fixture->shape;
    cpa_error err = {0};
    device_result r;
    upload_result(fixture, result, &r);
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = fixture->map,
                              .q_heads = shape->q_heads,
                              .kv_heads = shape->kv_heads,
                              .k_dim = shape->k_dim,
                              .v_dim = shape->v_dim,
                              .block_size = shape->block_size,
                              .items = items,
                              .n_items = n_items,
                              .block_tables = fixture->tables,
                              .n_table_entries = fixture->n_table_entries,
                              .kv_dtype = fixture->device_kv.dtype};
    cpa_attend_args args = {.size = sizeof args,
                            .q = fixture->device_q,
                            .q_dtype = shape->q_dtype,
                            .kv = fixture->device_kv,
                            .mask = shape->mask,
                            .scale = shape->scale,
                            .resume = resume,
                            .state = r.state,
                            .out = resume ? NULL : r.out};
    cpa_status status = cpa_attend_plan_set(fixture->plan, &batch, &err);
    for (int i = 0; status == CPA_OK && i <= fixture->again; i++)
        status = cpa_attend(fixture->plan, &args, fixture->stream);
    if (status == CPA_OK) status = cpa_stream_sync(fixture->stream);
    if (status != CPA_OK) fprintf(stderr, "attend: %s%s\n", err.message, cpa_stream_error(fixture->stream));
    if (!download_result(fixture, &r, result)) status = CPA_INTERNAL;
    return status;
}

cpa_status cpa_attend_fixture_run_slot(cpa_attend_fixture *fixture, int32_t k_slot, cpa_attend_result *result) {
    cpa_attend_item items[CPA_TEST_MAX_SLOTS];
    for (int32_t slot = 0; slot < fixture->shape.cp_size; slot++)
        items[slot] =
            cpa_attend_fixture_item(fixture, slot, 0, fixture->q_count[slot], k_slot, 0, fixture->k_tokens[k_slot]);
    return cpa_attend_fixture_run(fixture, items, fixture->shape.cp_size, 0, result);
}

/* Whether one row and head agrees with the reference. */
static int check_row(const cpa_attend_fixture *fixture, int32_t q_slot, int64_t i, int32_t head, int32_t k_slot,
                     const cpa_attend_result *result, double *worst) {
    const cpa_attend_case *shape = &fixture->shape;
    cpa_reference_row row;
    float q[CPA_MAX_HEAD_DIM], out[CPA_MAX_HEAD_DIM];
    double want[CPA_MAX_HEAD_DIM], lse, tolerance;
    int32_t kv_head = head / (shape->q_heads / shape->kv_heads), k_dim = shape->k_dim, v_dim = shape->v_dim;
    int64_t at = (fixture->q_row[q_slot] + i) * shape->q_heads + head, bytes = cpa_dtype_bytes(shape->q_dtype);
    int64_t position = cpa_shard_pos(fixture->map, q_slot, fixture->q_first[q_slot] + i);
    cpa_dtype coarser = shape->q_dtype == CPA_F32 ? shape->kv_dtype : shape->q_dtype;
    cpa_widen(q, (const char *)fixture->q + at * k_dim * bytes, shape->q_dtype, k_dim);
    cpa_reference_begin(&row, q, k_dim, v_dim, coarser, shape->scale);
    for (int64_t key = 0; key < shape->length; key++) {
        if (k_slot >= 0 && cpa_owner_rank(fixture->map, 0, key) != k_slot) continue;
        if (!cpa_reference_sees(shape->mask, position, key)) continue;
        cpa_reference_add(&row, fixture->sequence.k + (key * shape->kv_heads + kv_head) * k_dim,
                          fixture->sequence.v + (key * shape->kv_heads + kv_head) * v_dim);
    }
    cpa_reference_end(&row, want, &lse, &tolerance);
    cpa_widen(out, (const char *)result->out + at * v_dim * bytes, shape->q_dtype, v_dim);
    double error = cpa_reference_error(result->o + at * v_dim, want, v_dim);
    double out_error = cpa_reference_error(out, want, v_dim);
    if (worst) *worst = fmax(*worst, error / tolerance);
    if (isinf(lse)) return result->lse[at] == -INFINITY && error == 0 && out_error == 0;
    return error <= tolerance && out_error <= tolerance &&
           fabs((double)result->lse[at] - lse) <= cpa_reference_lse_tolerance(coarser);
}

int64_t cpa_attend_fixture_check(const cpa_attend_fixture *fixture, int32_t k_slot, int64_t stride,
                                 const cpa_attend_result *result, double *worst) {
    int64_t wrong = 0;
    for (int32_t q_slot = 0; q_slot < fixture->shape.cp_size; q_slot++) {
        for (int64_t i = 0; i < fixture->q_count[q_slot]; i++) {
            /* The last row of a slot sees the most keys. */
            if (i % stride && i != fixture->q_count[q_slot] - 1) continue;
            for (int32_t head = 0; head < fixture->shape.q_heads; head++)
                wrong += !check_row(fixture, q_slot, i, head, k_slot, result, worst);
        }
    }
    return wrong;
}
