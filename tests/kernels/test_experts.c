/* expert_permute and expert_combine against plain definitions in float64, and the choice of experts at once. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "base/convert.h"
#include "base/hash.h"
#include "kernels/nn.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static void *allocate(int64_t bytes) {
    void *memory = malloc((size_t)bytes + 1);
    if (!memory) abort();
    return memory;
}

/* ---- expert_permute ---- */

typedef struct sorting {
    int64_t rows;
    int32_t top_k, first_expert, experts;
    int32_t *ids; /* [rows, top_k] */
} sorting;

/* Whether places are those of a stable sort; `offsets`, `tokens` and `places` are what the operator made. */
static int is_sorted(const sorting *s, const int32_t *offsets, const uint32_t *tokens, const int32_t *places) {
    const int64_t choices = s->rows * s->top_k;
    int32_t place = 0;
    int wrong = offsets[0] != 0;
    for (int32_t e = 0; e < s->experts; e++) {
        for (int64_t i = 0; i < choices; i++) {
            if (s->ids[i] != s->first_expert + e) continue;
            wrong |= places[i] != place || tokens[place] != (uint32_t)(i / s->top_k);
            place++;
        }
        wrong |= offsets[e + 1] != place;
    }
    for (int64_t i = place; i < choices; i++) wrong |= tokens[i] != UINT32_MAX;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t e = (int64_t)s->ids[i] - s->first_expert;
        if (e < 0 || e >= s->experts) wrong |= places[i] != -1;
    }
    return !wrong;
}

static void check_sorting(const sorting *s) {
    const int64_t choices = s->rows * s->top_k, bytes = choices * 4, offset_bytes = (s->experts + 1) * 4;
    int32_t *offsets = allocate(offset_bytes), *places = allocate(bytes);
    uint32_t *tokens = allocate(bytes);
    memset(offsets, 0x77, (size_t)offset_bytes);
    memset(places, 0x77, (size_t)bytes);
    int32_t *ids = cpa_test_upload(stream, s->ids, bytes), *device_places = cpa_test_upload(stream, places, bytes);
    int32_t *device_offsets = cpa_test_upload(stream, offsets, offset_bytes);
    uint32_t *device_tokens = cpa_test_upload(stream, places, bytes);
    const cpa_expert_permute_args args = {sizeof args, s->rows,        s->top_k,      s->first_expert, s->experts,
                                          ids,         device_offsets, device_tokens, device_places};
    CU_ASSERT_EQUAL(cpa_expert_permute(&args, stream), CPA_OK);
    cpa_test_download(stream, offsets, device_offsets, offset_bytes);
    cpa_test_download(stream, places, device_places, bytes);
    cpa_test_download(stream, tokens, device_tokens, bytes);
    CU_ASSERT_TRUE(is_sorted(s, offsets, tokens, places));
    cpa_test_free(stream, device_tokens);
    cpa_test_free(stream, device_offsets);
    cpa_test_free(stream, device_places);
    cpa_test_free(stream, ids);
    free(tokens);
    free(places);
    free(offsets);
}

/* Random experts, all on one, and, for ranks, ranges of experts beside which others live; numbers that no expert has. */
static void choices_are_sorted_stably(void) {
    static const int64_t rows[] = {0, 1, 2, 17, 64, 333};
    static const int32_t experts[] = {1, 4, 160, 256}, top_ks[] = {1, 2, 8};
    cpa_test_device_open(1, &device, &stream);
    for (int r = 0; r < 6; r++) {
        for (int e = 0; e < 4; e++) {
            for (int k = 0; k < 3; k++) {
                sorting s = {rows[r], top_ks[k], 0, experts[e], allocate(rows[r] * top_ks[k] * 4)};
                const int64_t n = s.rows * s.top_k;
                for (int64_t i = 0; i < n; i++)
                    s.ids[i] = (int32_t)(cpa_mix64((uint64_t)(i + r)) % (uint64_t)s.experts);
                check_sorting(&s);
                s.first_expert = cpa_first_expert(experts[e], 3, 1);
                s.experts = cpa_first_expert(experts[e], 3, 2) - s.first_expert;
                if (n > 1) s.ids[0] = INT32_MIN, s.ids[n - 1] = INT32_MAX;
                if (s.experts > 0) check_sorting(&s);
                s.first_expert = 0, s.experts = experts[e];
                for (int64_t i = 0; i < n; i++) s.ids[i] = s.experts / 2;
                check_sorting(&s);
                free(s.ids);
            }
        }
    }
    cpa_test_device_close(device, stream);
}

static void ranks_have_all_experts_once(void) {
    for (int32_t ranks = 1; ranks <= 9; ranks++) {
        CU_ASSERT_EQUAL(cpa_first_expert(160, ranks, 0), 0);
        CU_ASSERT_EQUAL(cpa_first_expert(160, ranks, ranks), 160);
        for (int32_t r = 0; r < ranks; r++) {
            const int32_t n = cpa_first_expert(160, ranks, r + 1) - cpa_first_expert(160, ranks, r);
            CU_ASSERT_TRUE(n == 160 / ranks || n == 160 / ranks + 1);
        }
    }
}

/* ---- expert_combine ---- */

typedef struct combining {
    int64_t rows, y_rows;
    int32_t top_k, width;
    cpa_dtype dtype, y_dtype;
    int with_shared, strided;
} combining;

static void check_combining(const combining *c) {
    const int64_t n = c->rows * c->top_k, stride = c->strided ? c->width + 8 : 0;
    cpa_test_tensor y = cpa_test_tensor_make(stream, c->y_dtype, c->y_rows, c->width, stride, 1);
    cpa_test_tensor shared = cpa_test_tensor_make(stream, c->dtype, c->rows, c->width, 0, 2);
    cpa_test_tensor weights = cpa_test_tensor_make(stream, CPA_F32, 1, n, 0, 3);
    cpa_test_tensor out = cpa_test_tensor_blank(stream, c->dtype, c->rows, c->width, 0);
    int32_t *places = allocate(n * 4);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) { /* the first row of y is NaN, and nobody's */
        places[i] = 1 + (int32_t)(cpa_mix64((uint64_t)i) % (uint64_t)(c->y_rows - 1));
        if (i % 7 == 3) places[i] = i % 2 ? -1 : (int32_t)c->y_rows, weights.values[i] = NAN;
    }
    for (int32_t i = 0; i < c->width; i++) cpa_test_row(&y, 0)[i] = NAN;
    cpa_test_tensor_send(&y, stream);
    int32_t *device_places = cpa_test_upload(stream, places, n * 4);
    cpa_test_tensor_send(&weights, stream);
    const cpa_expert_combine_args args = {.size = sizeof args,
                                          .rows = c->rows,
                                          .top_k = c->top_k,
                                          .width = c->width,
                                          .dtype = c->dtype,
                                          .y_dtype = c->y_dtype,
                                          .y = y.device,
                                          .y_rows = c->y_rows,
                                          .y_stride = stride,
                                          .places = device_places,
                                          .weights = weights.device,
                                          .out = out.device,
                                          .shared = c->with_shared ? shared.device : NULL};
    CU_ASSERT_EQUAL(cpa_expert_combine(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&out, stream);
    for (int64_t row = 0; row < c->rows; row++) {
        for (int32_t i = 0; i < c->width; i++) {
            float sum = 0; /* the order, and each rounding, are the operator's promise */
            for (int32_t k = 0; k < c->top_k; k++) {
                const int64_t at = row * c->top_k + k;
                volatile float product;
                if (places[at] < 0 || places[at] >= c->y_rows) continue;
                product = weights.values[at] * cpa_test_row(&y, places[at])[i];
                sum += product;
            }
            if (c->with_shared) sum += cpa_test_row(&shared, row)[i];
            uint32_t rounded;
            cpa_narrow(&rounded, &sum, c->dtype, 1);
            cpa_widen(&sum, &rounded, c->dtype, 1);
            wrong += memcmp(&sum, &cpa_test_row(&out, row)[i], sizeof sum) != 0;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_free(stream, device_places);
    free(places);
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&weights, stream);
    cpa_test_tensor_free(&shared, stream);
    cpa_test_tensor_free(&y, stream);
}

static void results_are_summed_in_order_and_rounded_once(void) {
    static const combining cases[] = {{1, 2, 1, 1, CPA_F32, CPA_F32, 0, 0},    {5, 41, 8, 24, CPA_BF16, CPA_BF16, 1, 0},
                                      {17, 35, 2, 77, CPA_F16, CPA_F16, 1, 1}, {3, 19, 6, 520, CPA_BF16, CPA_F32, 1, 1},
                                      {2, 5, 3, 8, CPA_F16, CPA_F32, 0, 0},    {3, 9, 32, 40, CPA_F32, CPA_F32, 1, 1},
                                      {4, 9, 3, 40, CPA_F32, CPA_BF16, 1, 1},  {3, 7, 2, 33, CPA_F32, CPA_F16, 0, 0}};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_combining(&cases[i]);
    cpa_test_device_close(device, stream);
}

/* ---- the router's product, expert_route and expert_permute at once ---- */

typedef struct chosen {
    int64_t rows;
    int32_t experts, top_k, inputs, first, held; /* experts that have places */
    cpa_dtype dtype;
    cpa_expert_scores scores;
} chosen;

/* What is made of logits, on the device and here. */
typedef struct chosen_arrays {
    cpa_expert_route_args route;
    cpa_expert_permute_args permute;
    void *host[5], *on_device[5]; /* ids, weights, offsets, tokens, places */
    int64_t bytes[5];
} chosen_arrays;

static void make_arrays(chosen_arrays *a, const chosen *c, const float *logits) {
    const int64_t n = c->rows * c->top_k * 4, offsets = (c->held + 1) * 4, bytes[] = {n, n, offsets, n, n};
    for (int i = 0; i < 5; i++) {
        a->bytes[i] = bytes[i];
        a->host[i] = allocate(bytes[i]);
        memset(a->host[i], 0xee, (size_t)bytes[i]);
        a->on_device[i] = cpa_test_upload(stream, a->host[i], bytes[i]);
    }
    a->route = (cpa_expert_route_args){.size = sizeof a->route,
                                       .rows = c->rows,
                                       .experts = c->experts,
                                       .top_k = c->top_k,
                                       .logits = logits,
                                       .logits_stride = c->experts,
                                       .scores = c->scores,
                                       .n_group = 1,
                                       .topk_group = 1,
                                       .normalise = 1,
                                       .scale = 1,
                                       .ids = a->on_device[0],
                                       .weights = a->on_device[1]};
    a->permute = (cpa_expert_permute_args){.size = sizeof a->permute,
                                           .rows = c->rows,
                                           .top_k = c->top_k,
                                           .first_expert = c->first,
                                           .experts = c->held,
                                           .ids = a->on_device[0],
                                           .offsets = a->on_device[2],
                                           .tokens = a->on_device[3],
                                           .places = a->on_device[4]};
}

static void fetch_arrays(chosen_arrays *a) {
    for (int i = 0; i < 5; i++) cpa_test_download(stream, a->host[i], a->on_device[i], a->bytes[i]);
}

static void free_arrays(chosen_arrays *a) {
    for (int i = 0; i < 5; i++) {
        cpa_test_free(stream, a->on_device[i]);
        free(a->host[i]);
    }
}

static int64_t wrong_logits(const chosen *c, const cpa_test_tensor *x, const cpa_test_tensor *weight,
                            cpa_test_tensor *logits) {
    int64_t wrong = 0;
    cpa_test_tensor_fetch(logits, stream);
    for (int64_t i = 0; i < c->rows * c->experts; i++) {
        double want = 0, size = 0;
        for (int32_t at = 0; at < c->inputs; at++) {
            const double term =
                (double)cpa_test_row(x, i / c->experts)[at] * (double)cpa_test_row(weight, i % c->experts)[at];
            want += term, size += fabs(term);
        }
        const double slack = 0x1p-23 * (2 + 0.5 * sqrt((double)c->inputs)) * size;
        wrong += !cpa_test_is_near(cpa_test_row(logits, i / c->experts)[i % c->experts], want, CPA_F32, slack);
    }
    return wrong;
}

/* Logits are those of float64, and all else what the operators make of them. */
static void check_chosen(const chosen *c) {
    cpa_test_tensor x = cpa_test_tensor_make(stream, c->dtype, c->rows, c->inputs, c->inputs + 8, 1);
    cpa_test_tensor weight = cpa_test_tensor_make(stream, c->dtype, c->experts, c->inputs, c->inputs + 16, 2);
    cpa_test_tensor logits = cpa_test_tensor_blank(stream, CPA_F32, c->rows, c->experts, 0);
    const cpa_linear_args router = {.size = sizeof router,
                                    .rows = c->rows,
                                    .inputs = c->inputs,
                                    .outputs = c->experts,
                                    .dtype = c->dtype,
                                    .out_dtype = CPA_F32,
                                    .x = x.device,
                                    .x_stride = x.stride,
                                    .weight = weight.device,
                                    .weight_stride = weight.stride,
                                    .out = logits.device,
                                    .out_stride = c->experts};
    chosen_arrays at_once, in_turn;
    make_arrays(&at_once, c, logits.device);
    make_arrays(&in_turn, c, logits.device);
    CU_ASSERT_NOT_EQUAL(device->nn->chooses_experts(&router, stream), 0);
    CU_ASSERT_EQUAL(device->nn->expert_choose(&router, &at_once.route, &at_once.permute, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_expert_route(&in_turn.route, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_expert_permute(&in_turn.permute, stream), CPA_OK);
    CU_ASSERT_EQUAL(wrong_logits(c, &x, &weight, &logits), 0);
    fetch_arrays(&at_once);
    fetch_arrays(&in_turn);
    for (int i = 0; i < 5; i++) CU_ASSERT_EQUAL(memcmp(at_once.host[i], in_turn.host[i], (size_t)at_once.bytes[i]), 0);
    free_arrays(&at_once);
    free_arrays(&in_turn);
    cpa_test_tensor_free(&logits, stream);
    cpa_test_tensor_free(&weight, stream);
    cpa_test_tensor_free(&x, stream);
}

static void a_choice_at_once_is_the_operators_in_turn(void) {
    static const chosen cases[] = {
        {1, 64, 6, 2048, 0, 64, CPA_BF16, CPA_SCORES_SOFTMAX},
        {1, 256, 8, 7168, 64, 128, CPA_BF16, CPA_SCORES_SIGMOID},
        {16, 64, 6, 520, 8, 40, CPA_F16, CPA_SCORES_SOFTMAX},
        {9, 160, 6, 72, 0, 160, CPA_BF16, CPA_SCORES_SIGMOID},
        {3, 1024, 32, 264, 1000, 24, CPA_BF16, CPA_SCORES_SOFTMAX},
        {2, 4, 2, 8, 0, 4, CPA_F16, CPA_SCORES_SIGMOID},
    };
    cpa_test_device_open(1, &device, &stream);
    for (size_t i = 0; device->nn->chooses_experts && i < sizeof cases / sizeof *cases; i++) check_chosen(&cases[i]);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"choices are sorted stably", choices_are_sorted_stably},
    {"ranks have all experts once", ranks_have_all_experts_once},
    {"a choice at once is the operators in turn", a_choice_at_once_is_the_operators_in_turn},
    {"results are summed in order and rounded once", results_are_summed_in_order_and_rounded_once},
};
CPA_DEVICE_TEST_MAIN("experts", tests)
