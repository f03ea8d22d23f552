/* Attention without a cache over ranks: rows of segments that are whole on a rank, or cut over all, are what one rank
 * gives for all segments: on the host to the bit, and elsewhere within the tolerance of the float64 reference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/varlen.h>

#include "base/convert.h"
#include "src/check/cases/judge.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST = 16, LAYERS = 2, PAD = 8 };

typedef struct varlen_case {
    cpa_dtype dtype;
    int32_t q_heads, kv_heads, dim;
    int32_t causal;
    int64_t left, right;
    int32_t n;
    int64_t rows[MOST], keys[MOST];
    int32_t owners[MOST]; /* ranks count modulo the ranks */
} varlen_case;

#define CUT CPA_VARLEN_CUT
static const varlen_case CASES[] = {
    {CPA_F32, 2, 2, 24, 0, 0, 0, 5, {7, 300, 1, 130, 64}, {7, 300, 1, 130, 64}, {0, CUT, 1, CUT, 2}},
    {CPA_BF16, 4, 2, 80, 1, 0, 0, 4, {200, 3, 77, 150}, {200, 3, 77, 150}, {CUT, 3, CUT, 0}},
    {CPA_F16, 3, 1, 64, 0, 40, 30, 4, {100, 2, 0, 250}, {130, 90, 20, 3}, {CUT, CUT, CUT, CUT}},
    {CPA_F32, 1, 1, 16, 0, 0, 0, 3, {20, 30, 40}, {20, 30, 40}, {0, 1, 1}},
    {CPA_BF16,
     2,
     1,
     64,
     0,
     0,
     0,
     12,
     {9, 8, 7, 6, 5, 4, 30, 20, 10, 3, 2, 1},
     {9, 8, 7, 6, 5, 4, 30, 20, 10, 3, 2, 1},
     {CUT, CUT, CUT, CUT, CUT, CUT, CUT, CUT, CUT, CUT, CUT, CUT}},
};
enum { N_CASES = sizeof CASES / sizeof CASES[0] };

/* A batch, its tensors of all segments on this rank's device, and their result there. */
typedef struct whole {
    cpa_varlen_batch batch;
    int64_t q_starts[MOST + 1], k_starts[MOST + 1];
    int32_t owners[MOST];
    int64_t q_row, kv_row; /* elements; keys and values beside each other, with room that nothing may touch */
    char *q, *kv, *out;    /* host */
    float *lse;
} whole;

static void fill(char *to, int64_t n, uint64_t seed, float size, cpa_dtype dtype) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (seed + (uint64_t)i) * 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
        const float value = size * (float)((double)((x ^ x >> 32) & 0xffffff) / 0x1p23 - 1);
        cpa_narrow(to + i * cpa_dtype_bytes(dtype), &value, dtype, 1);
    }
}

static void make_whole(const varlen_case *c, int layer, whole *w) {
    const int64_t bytes = cpa_dtype_bytes(c->dtype);
    *w = (whole){.q_row = (int64_t)c->q_heads * c->dim, .kv_row = 2 * (int64_t)c->kv_heads * c->dim + PAD};
    for (int32_t s = 0; s < c->n; s++) {
        w->q_starts[s + 1] = w->q_starts[s] + c->rows[s];
        w->k_starts[s + 1] = w->k_starts[s] + c->keys[s];
        w->owners[s] = c->owners[s] == CUT ? CUT : c->owners[s] % cpa_test_ranks();
    }
    w->batch = (cpa_varlen_batch){.size = sizeof w->batch,
                                  .q_heads = c->q_heads,
                                  .kv_heads = c->kv_heads,
                                  .k_dim = c->dim,
                                  .v_dim = c->dim,
                                  .n_segments = c->n,
                                  .q_starts = w->q_starts,
                                  .k_starts = w->k_starts,
                                  .causal = c->causal};
    w->q = cpa_test_poisoned(w->q_starts[c->n] * w->q_row, bytes);
    w->kv = cpa_test_poisoned(w->k_starts[c->n] * w->kv_row, bytes);
    fill(w->q, w->q_starts[c->n] * w->q_row, (uint64_t)layer << 50, 4, c->dtype);
    for (int64_t i = 0; i < w->k_starts[c->n]; i++)
        fill(w->kv + i * w->kv_row * bytes, w->kv_row - PAD, (uint64_t)layer << 50 | 1u << 30 | (uint64_t)i << 16, 1,
             c->dtype);
}

static void free_whole(whole *w) {
    free(w->lse);
    free(w->out);
    free(w->kv);
    free(w->q);
}

static cpa_varlen_attend_args args_of(const varlen_case *c, const whole *w, char *q, char *kv) {
    return (cpa_varlen_attend_args){.size = sizeof(cpa_varlen_attend_args),
                                    .dtype = c->dtype,
                                    .q = q,
                                    .k = kv,
                                    .v = kv + (int64_t)c->kv_heads * c->dim * cpa_dtype_bytes(c->dtype),
                                    .k_row_stride = w->kv_row,
                                    .v_row_stride = w->kv_row,
                                    .causal = c->causal,
                                    .left = c->left,
                                    .right = c->right};
}

/* Rows of tensors on the device, and a call over them: `rows` of q, `keys` of k and v. plan NULL: the context's. */
static void attend_rows(const varlen_case *c, const whole *w, int64_t rows, int64_t keys, const char *q, const char *kv,
                        cpa_attend_plan *plan, cpa_varlen_context *context, cpa_stream *stream, char **out,
                        float **lse) {
    const int64_t bytes = cpa_dtype_bytes(c->dtype), out_bytes = rows * w->q_row * bytes;
    const int64_t lse_bytes = rows * c->q_heads * (int64_t)sizeof(float);
    *out = cpa_test_poisoned(out_bytes + 1, 1), *lse = cpa_test_poisoned(lse_bytes + 1, 1);
    char *device_q = cpa_test_upload(stream, q, rows * w->q_row * bytes);
    char *device_kv = cpa_test_upload(stream, kv, keys * w->kv_row * bytes);
    cpa_varlen_attend_args args = args_of(c, w, device_q, device_kv);
    args.out = cpa_test_upload(stream, *out, out_bytes + 1);
    args.state.lse = cpa_test_upload(stream, *lse, lse_bytes + 1);
    const cpa_status status =
        plan ? cpa_varlen_attend(plan, &args, stream) : cpa_varlen_context_attend(context, &args, stream);
    CU_ASSERT_EQUAL(status, CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_test_download(stream, *out, args.out, out_bytes);
    cpa_test_download(stream, *lse, args.state.lse, lse_bytes);
    cpa_test_free(stream, args.state.lse);
    cpa_test_free(stream, args.out);
    cpa_test_free(stream, device_kv);
    cpa_test_free(stream, device_q);
}

/* Whether a row, i of its segment, and head is what the reference says. */
static int is_right(const varlen_case *c, const whole *w, int32_t segment, int64_t i, int32_t head, const char *got,
                    float got_lse) {
    const int64_t bytes = cpa_dtype_bytes(c->dtype), n_q = c->rows[segment], n_k = c->keys[segment];
    const int32_t kv_head = head / (c->q_heads / c->kv_heads);
    const char *keys = w->kv + (w->k_starts[segment] * w->kv_row + (int64_t)kv_head * c->dim) * bytes;
    cpa_case_expected expected;
    cpa_case_expect(
        &(cpa_case_row){.dtype = c->dtype,
                        .k_dim = c->dim,
                        .v_dim = c->dim,
                        .q = w->q + ((w->q_starts[segment] + i) * w->q_row + (int64_t)head * c->dim) * bytes,
                        .k = keys,
                        .v = keys + (int64_t)c->kv_heads * c->dim * bytes,
                        .q_dtype = c->dtype,
                        .kv_dtype = c->dtype,
                        .k_stride = w->kv_row,
                        .v_stride = w->kv_row,
                        .n_keys = n_k,
                        .index = i + n_k - n_q,
                        .mask = {.causal = c->causal, .window = c->left, .right = c->right}},
        &expected);
    return cpa_case_is_right(&expected, &(cpa_case_result){.out = got, .out_dtype = c->dtype, .lse = &got_lse}, NULL);
}

/* The rows of this rank beside those that one rank gives, and some beside the reference. */
static int64_t count_wrong(const varlen_case *c, const whole *w, const char *out, const float *lse) {
    const int64_t row_bytes = w->q_row * cpa_dtype_bytes(c->dtype), head_bytes = row_bytes / c->q_heads;
    int64_t wrong = 0, local = 0;
    for (int32_t s = 0; s < c->n; s++) {
        const cpa_varlen_part part = cpa_varlen_part_of(&w->batch, w->owners[s], s, cpa_test_ranks(), cpa_test_rank());
        for (int64_t i = part.q_first; i < part.q_first + part.q_count; i++, local++) {
            const int64_t row = w->q_starts[s] + i;
            const int same =
                memcmp(out + local * row_bytes, w->out + row * row_bytes, (size_t)row_bytes) == 0 &&
                memcmp(lse + local * c->q_heads, w->lse + row * c->q_heads, (size_t)c->q_heads * sizeof *lse) == 0;
            if (cpa_test_promises_bits()) wrong += !same;
            for (int32_t head = 0; head < c->q_heads && i % 5 == 0; head++)
                wrong += !is_right(c, w, s, i, head, out + local * row_bytes + head * head_bytes,
                                   lse[local * c->q_heads + head]);
        }
    }
    return wrong;
}

/* This rank's rows of a tensor, one behind the other. */
static char *gather(const varlen_case *c, const whole *w, int keys, int64_t *count) {
    const int64_t row_bytes = (keys ? w->kv_row : w->q_row) * cpa_dtype_bytes(c->dtype);
    const int64_t *starts = keys ? w->k_starts : w->q_starts;
    char *to = cpa_test_poisoned(starts[c->n] * row_bytes + 1, 1);
    *count = 0;
    for (int32_t s = 0; s < c->n; s++) {
        const cpa_varlen_part part = cpa_varlen_part_of(&w->batch, w->owners[s], s, cpa_test_ranks(), cpa_test_rank());
        const int64_t first = starts[s] + (keys ? part.k_first : part.q_first);
        const int64_t rows = keys ? part.k_count : part.q_count;
        memcpy(to + *count * row_bytes, (keys ? w->kv : w->q) + first * row_bytes, (size_t)(rows * row_bytes));
        *count += rows;
    }
    return to;
}

static int64_t wrong_rows(const varlen_case *c, cpa_varlen_context *context, cpa_device *device, cpa_stream *stream) {
    cpa_attend_plan *plan;
    int64_t wrong = 0;
    CU_ASSERT_EQUAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    for (int layer = 0; layer < LAYERS; layer++) {
        whole w;
        int64_t rows, keys;
        float *lse;
        char *out;
        make_whole(c, layer, &w);
        CU_ASSERT_EQUAL(cpa_varlen_plan_set(plan, &w.batch, NULL), CPA_OK);
        attend_rows(c, &w, w.q_starts[c->n], w.k_starts[c->n], w.q, w.kv, plan, NULL, stream, &w.out, &w.lse);
        if (layer == 0) CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), CPA_OK);
        char *q = gather(c, &w, 0, &rows), *kv = gather(c, &w, 1, &keys);
        attend_rows(c, &w, rows, keys, q, kv, NULL, context, stream, &out, &lse);
        wrong += count_wrong(c, &w, out, lse);
        free(lse);
        free(out);
        free(kv);
        free(q);
        free_whole(&w);
    }
    cpa_attend_plan_destroy(plan);
    return wrong;
}

static cpa_varlen_context *context_of(const varlen_case *c, cpa_device *device) {
    const cpa_varlen_context_options options = {.size = sizeof options,
                                                .q_heads = c->q_heads,
                                                .kv_heads = c->kv_heads,
                                                .k_dim = c->dim,
                                                .v_dim = c->dim,
                                                .dtype = c->dtype};
    cpa_varlen_context *context = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_varlen_context_create(cpa_test_comm(), device, &options, &context, NULL), CPA_OK);
    return context;
}

static void any_ranks_give_the_same(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(1, &device, &stream);
    for (int i = 0; i < N_CASES; i++) {
        cpa_varlen_context *context = context_of(&CASES[i], device);
        const int64_t wrong = wrong_rows(&CASES[i], context, device, stream);
        if (wrong) printf("\n    case %d: %lld wrong ", i, (long long)wrong);
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_varlen_context_destroy(context);
    }
    cpa_test_device_close(device, stream);
}

/* Ranks whose batches differ all hear of it, and may go on with another. */
static void batches_that_differ(void) {
    cpa_device *device;
    cpa_stream *stream;
    whole w;
    cpa_test_device_open(1, &device, &stream);
    cpa_varlen_context *context = context_of(&CASES[0], device);
    make_whole(&CASES[0], 0, &w);
    const cpa_status differ = cpa_test_ranks() > 1 ? CPA_INVALID : CPA_OK;
    if (cpa_test_is_last_rank() && cpa_test_ranks() > 1) w.owners[3] = 0;
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), differ);
    w.owners[3] = CUT;
    int64_t counts[MOST]; /* of all rows, which is what no counts say */
    memcpy(counts, CASES[0].rows, sizeof counts);
    w.batch.q_counts = cpa_test_is_last_rank() ? counts : NULL;
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), CPA_OK);
    if (cpa_test_is_last_rank() && cpa_test_ranks() > 1) counts[1]--;
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), differ);
    w.batch.k_counts = w.batch.q_counts, w.batch.q_counts = NULL;
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), differ);
    w.batch.k_counts = NULL;
    w.owners[0] = cpa_test_is_last_rank() ? cpa_test_ranks() : 0;
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(context, &w.batch, w.owners), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_varlen_context_error(context), "owners[0] is"));
    const cpa_varlen_attend_args none = args_of(&CASES[0], &w, NULL, NULL);
    CU_ASSERT_EQUAL(cpa_varlen_context_attend(context, &none, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_varlen_context_error(context), "varlen: no batch is planned");
    CU_ASSERT_EQUAL(wrong_rows(&CASES[0], context, device, stream), 0);
    cpa_varlen_attend_args apart = none;
    apart.out = &w, apart.k_head_stride = CASES[0].dim;
    CU_ASSERT_EQUAL(cpa_varlen_context_attend(context, &apart, stream), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_varlen_context_error(context), "have strides"));
    free_whole(&w);
    cpa_varlen_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static void what_is_refused(void) {
    cpa_device *device;
    cpa_stream *stream;
    cpa_varlen_context *context = NULL;
    cpa_varlen_context_options options = {.size = sizeof options, .q_heads = 3, .kv_heads = 2, .k_dim = 8, .v_dim = 8};
    cpa_test_device_open(1, &device, &stream);
    CU_ASSERT_EQUAL(cpa_varlen_context_create(cpa_test_comm(), device, &options, &context, NULL), CPA_INVALID);
    options.size = 3;
    CU_ASSERT_EQUAL(cpa_varlen_context_create(cpa_test_comm(), device, &options, &context, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_varlen_context_create(cpa_test_comm(), NULL, &options, &context, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_varlen_context_create(NULL, device, &options, &context, NULL), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    CU_ASSERT_EQUAL(cpa_varlen_context_plan(NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_varlen_context_attend(NULL, NULL, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_varlen_context_error(NULL), "");
    cpa_varlen_context_destroy(NULL);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {{"any ranks give the same", any_ranks_give_the_same},
                                 {"batches that differ", batches_that_differ},
                                 {"what is refused", what_is_refused}};
CPA_MPI_DEVICE_TEST_MAIN("varlen context", tests)
