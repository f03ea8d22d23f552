/* expert_route, expert_permute and expert_combine against plain definitions in float64. */
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

/* ---- expert_route ---- */

typedef struct routing {
    int64_t rows;
    int32_t experts, top_k;
    cpa_expert_scores scores;
    cpa_group_scores group_scores;
    int32_t n_group, topk_group;
    int with_bias, normalise;
    float scale;
    int ties; /* logits and biases are multiples of 1/4 */
} routing;

/* A token's experts and weights. */
typedef struct choice {
    int32_t ids[CPA_MOST_TOP_K];
    double weights[CPA_MOST_TOP_K];
} choice;

static float noise_of(uint64_t seed, int64_t i, int ties) {
    const uint64_t h = cpa_mix64(cpa_mix64(seed) + (uint64_t)i * CPA_GOLDEN);
    const float noise = 4 * ((float)(int32_t)(h >> 40) * 0x1p-23f - 1), peaky = h % 29 == 0 ? 5 * noise : noise;
    return ties ? rintf(peaky * 4) / 4 : peaky;
}

/* How many of the others go before number i. */
static int32_t rank_of(const double *keys, int32_t n, int32_t i) {
    int32_t rank = 0;
    for (int32_t j = 0; j < n; j++) rank += keys[j] > keys[i] || (keys[j] == keys[i] && j < i);
    return rank;
}

static void expect_scores(const routing *r, const float *logits, double *scores) {
    double sum = 0, largest = -INFINITY;
    for (int32_t e = 0; e < r->experts; e++) largest = fmax(largest, (double)logits[e]);
    for (int32_t e = 0; e < r->experts; e++) sum += exp((double)logits[e] - largest);
    for (int32_t e = 0; e < r->experts; e++)
        scores[e] = r->scores == CPA_SCORES_SOFTMAX ? exp((double)logits[e] - largest) / sum
                                                    : 1 / (1 + exp(-(double)logits[e]));
}

/* Keys of groups that are not among the best become -infinity. `biased`: what group scores are made of. */
static void expect_groups(const routing *r, const double *biased, double *keys) {
    const int32_t of_group = r->experts / r->n_group;
    double groups[CPA_MOST_EXPERTS];
    for (int32_t g = 0; g < r->n_group; g++) {
        const double *own = biased + g * of_group;
        double best = 0, second = 0;
        for (int32_t i = 0; i < of_group; i++) {
            if (rank_of(own, of_group, i) == 0) best = own[i];
            if (rank_of(own, of_group, i) == 1) second = own[i];
        }
        groups[g] = r->group_scores == CPA_GROUP_BEST_TWO ? (double)(float)(best + second) : best;
    }
    for (int32_t g = 0; g < r->n_group; g++) {
        const int takes_part = rank_of(groups, r->n_group, g) < r->topk_group;
        for (int32_t i = 0; i < of_group && !takes_part; i++) keys[g * of_group + i] = -INFINITY;
    }
}

static choice expect_choice(const routing *r, const float *logits, const float *bias) {
    double scores[CPA_MOST_EXPERTS], biased[CPA_MOST_EXPERTS], keys[CPA_MOST_EXPERTS], sum = 0;
    choice want = {{0}, {0}};
    expect_scores(r, logits, scores);
    for (int32_t e = 0; e < r->experts; e++) {
        biased[e] = bias ? (double)((float)scores[e] + bias[e]) : (double)(float)scores[e];
        keys[e] = bias ? biased[e] : (double)logits[e];
    }
    if (r->n_group > 1) expect_groups(r, r->group_scores == CPA_GROUP_BEST ? keys : biased, keys);
    for (int32_t e = 0; e < r->experts; e++) {
        const int32_t rank = rank_of(keys, r->experts, e);
        if (rank < r->top_k) want.ids[rank] = e, sum += scores[e];
    }
    for (int32_t k = 0; k < r->top_k; k++) {
        const double score = scores[want.ids[k]];
        want.weights[k] = (double)r->scale * (r->normalise ? score / (sum + 1e-20) : score);
    }
    return want;
}

/* What an operator made of logits, on any device. */
typedef struct routed {
    int32_t *ids;
    float *weights;
} routed;

static routed route(const routing *r, const float *logits, const float *bias, cpa_stream *on) {
    const int64_t n = r->rows * r->top_k, pad = 3, stride = r->experts + pad;
    routed out = {allocate(n * 4), allocate(n * 4)};
    float *strided = allocate(r->rows * stride * 4);
    for (int64_t i = 0; i < r->rows * stride; i++) {
        const int64_t e = i % stride;
        strided[i] = e < r->experts ? logits[i / stride * r->experts + e] : NAN;
    }
    memset(out.ids, 0xff, (size_t)n * 4);
    memset(out.weights, 0xff, (size_t)n * 4);
    float *device_logits = cpa_test_upload(on, strided, r->rows * stride * 4);
    float *device_bias = bias ? cpa_test_upload(on, bias, r->experts * 4) : NULL;
    int32_t *ids = cpa_test_upload(on, out.ids, n * 4);
    float *weights = cpa_test_upload(on, out.weights, n * 4);
    const cpa_expert_route_args args = {
        .size = sizeof args,
        .rows = r->rows,
        .experts = r->experts,
        .top_k = r->top_k,
        .logits = device_logits,
        .logits_stride = stride,
        .scores = r->scores,
        .group_scores = r->group_scores,
        .n_group = r->n_group,
        .topk_group = r->topk_group,
        .bias = device_bias,
        .normalise = r->normalise,
        .scale = r->scale,
        .ids = ids,
        .weights = weights,
    };
    CU_ASSERT_EQUAL(cpa_expert_route(&args, on), CPA_OK);
    cpa_test_download(on, out.ids, ids, n * 4);
    cpa_test_download(on, out.weights, weights, n * 4);
    cpa_test_free(on, weights);
    cpa_test_free(on, ids);
    if (bias) cpa_test_free(on, device_bias);
    cpa_test_free(on, device_logits);
    free(strided);
    return out;
}

static void free_routed(routed *r) {
    free(r->ids);
    free(r->weights);
}

static float *make_noise(int64_t n, uint64_t seed, int ties) {
    float *noise = allocate(n * 4);
    for (int64_t i = 0; i < n; i++) noise[i] = noise_of(seed, i, ties);
    return noise;
}

/* Of some rows. */
static int64_t wrong_choices(const routing *r, const float *logits, const float *bias, const routed *got) {
    const int64_t step = r->rows / 8 + 1;
    int64_t wrong = 0;
    for (int64_t row = 0; row < r->rows; row += step) {
        const choice want = expect_choice(r, logits + row * r->experts, bias);
        for (int32_t k = 0; k < r->top_k; k++) {
            const int64_t i = row * r->top_k + k;
            const double slack = 0x1p-21 * fabs(want.weights[k]);
            wrong += got->ids[i] != want.ids[k] || !cpa_test_is_near(got->weights[i], want.weights[k], CPA_F32, slack);
        }
    }
    return wrong;
}

/* Right, with the bits of the host, and for a token alone with those that it has among others. */
static void check_routing(const routing *r, cpa_stream *host) {
    const uint64_t seed = (uint64_t)(r->experts * 31 + r->top_k * 7 + r->n_group);
    float *logits = make_noise(r->rows * r->experts, seed, r->ties), *bias = NULL;
    if (r->with_bias) bias = make_noise(r->experts, seed + 1, r->ties);
    routing last = *r;
    last.rows = 1;
    routed got = route(r, logits, bias, stream), of_host = route(r, logits, bias, host);
    routed alone = route(&last, logits + (r->rows - 1) * r->experts, bias, stream);
    const int64_t n = r->rows * r->top_k, before = n - r->top_k;
    CU_ASSERT_EQUAL(wrong_choices(r, logits, bias, &got), 0);
    CU_ASSERT_EQUAL(memcmp(got.ids, of_host.ids, (size_t)n * 4), 0);
    CU_ASSERT_EQUAL(memcmp(got.weights, of_host.weights, (size_t)n * 4), 0);
    CU_ASSERT_EQUAL(memcmp(got.ids + before, alone.ids, (size_t)r->top_k * 4), 0);
    CU_ASSERT_EQUAL(memcmp(got.weights + before, alone.weights, (size_t)r->top_k * 4), 0);
    free_routed(&alone);
    free_routed(&of_host);
    free_routed(&got);
    free(bias);
    free(logits);
}

static void open_host(cpa_device **host, cpa_stream **host_stream) {
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 1};
    cpa_error err;
    if (cpa_device_open(&options, host, &err) != CPA_OK) abort();
    if (cpa_stream_create(*host, host_stream, &err) != CPA_OK) abort();
}

/* The families' routers over the grid; each case takes the next number of tokens. */
static void tokens_go_where_the_definition_says(void) {
    static const int64_t tokens[] = {1, 2, 17, 64, 333};
    static const int32_t experts[] = {4, 8, 64, 160, 256}, top_ks[] = {1, 2, 6, 8}, groups[] = {1, 4, 8};
    static const routing families[] = {
        {.scores = CPA_SCORES_SOFTMAX, .normalise = 1, .scale = 1},
        {.scores = CPA_SCORES_SOFTMAX, .scale = 16},
        {.scores = CPA_SCORES_SIGMOID,
         .group_scores = CPA_GROUP_BEST_TWO,
         .with_bias = 1,
         .normalise = 1,
         .scale = 2.5f},
        {.scores = CPA_SCORES_SIGMOID, .group_scores = CPA_GROUP_BEST_TWO, .scale = 1, .ties = 1},
        {.scores = CPA_SCORES_SOFTMAX, .with_bias = 1, .normalise = 1, .scale = 0.5f, .ties = 1},
    };
    cpa_device *host;
    cpa_stream *host_stream;
    int cases = 0;
    cpa_test_device_open(2, &device, &stream);
    open_host(&host, &host_stream);
    for (int e = 0; e < 5; e++) {
        for (int k = 0; k < 4; k++) {
            for (int g = 0; g < 3; g++) {
                for (int f = 0; f < 5; f++) {
                    routing r = families[f];
                    r.rows = tokens[cases % 5], r.experts = experts[e], r.top_k = top_ks[k], r.n_group = groups[g];
                    r.topk_group = (r.n_group + 1) / 2;
                    if (r.experts % r.n_group != 0 || r.top_k > r.experts / r.n_group * r.topk_group) continue;
                    check_routing(&r, host_stream);
                    cases++;
                }
            }
        }
    }
    CPA_ASSERT_ORDER(cases, >, 200);
    cpa_stream_destroy(host_stream);
    cpa_device_close(host);
    cpa_test_device_close(device, stream);
}

/* Mixtral's softmax is over the chosen logits alone. */
static void a_normalised_softmax_is_that_of_the_chosen(void) {
    const routing r = {.rows = 17, .experts = 8, .top_k = 2, .normalise = 1, .scale = 1};
    float *logits = make_noise(r.rows * r.experts, 5, 0);
    cpa_test_device_open(1, &device, &stream);
    routed got = route(&r, logits, NULL, stream);
    for (int64_t row = 0; row < r.rows; row++) {
        const float *l = logits + row * r.experts;
        const double distance = (double)l[got.ids[row * 2]] - (double)l[got.ids[row * 2 + 1]];
        CU_ASSERT_TRUE(fabs((double)got.weights[row * 2] - 1 / (1 + exp(-distance))) < 0x1p-22);
    }
    free_routed(&got);
    free(logits);
    cpa_test_device_close(device, stream);
}

static void a_wild_logit_spoils_its_token_alone(void) {
    const float wild[] = {NAN, INFINITY, -INFINITY};
    const routing r = {.rows = 5, .experts = 40, .top_k = 3, .scores = CPA_SCORES_SIGMOID, .with_bias = 1, .scale = 1};
    cpa_test_device_open(1, &device, &stream);
    for (int w = 0; w < 3; w++) {
        float *logits = make_noise(r.rows * r.experts, 9, 0), *bias = make_noise(r.experts, 10, 0);
        routed clean = route(&r, logits, bias, stream);
        logits[2 * r.experts + 39] = wild[w];
        routed got = route(&r, logits, bias, stream);
        for (int32_t k = 0; k < r.top_k; k++) {
            CU_ASSERT_EQUAL(got.ids[2 * r.top_k + k], k);
            CU_ASSERT_TRUE(isnan(got.weights[2 * r.top_k + k]));
            clean.ids[2 * r.top_k + k] = k;
            clean.weights[2 * r.top_k + k] = got.weights[2 * r.top_k + k];
        }
        CU_ASSERT_EQUAL(memcmp(got.ids, clean.ids, (size_t)(r.rows * r.top_k) * 4), 0);
        CU_ASSERT_EQUAL(memcmp(got.weights, clean.weights, (size_t)(r.rows * r.top_k) * 4), 0);
        bias[7] = wild[w];
        routed all = route(&r, logits, bias, stream);
        for (int64_t i = 0; i < r.rows * r.top_k; i++) CU_ASSERT_TRUE(isnan(all.weights[i]));
        free_routed(&all);
        free_routed(&got);
        free_routed(&clean);
        free(bias);
        free(logits);
    }
    cpa_test_device_close(device, stream);
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
    cpa_test_tensor out = cpa_test_tensor_blank(stream, c->dtype, c->rows, c->width, 0);
    int32_t *places = allocate(n * 4);
    float *weights = make_noise(n, 3, 0);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) { /* the first row of y is NaN, and nobody's */
        places[i] = 1 + (int32_t)(cpa_mix64((uint64_t)i) % (uint64_t)(c->y_rows - 1));
        if (i % 7 == 3) places[i] = i % 2 ? -1 : (int32_t)c->y_rows, weights[i] = NAN;
    }
    for (int32_t i = 0; i < c->width; i++) cpa_test_row(&y, 0)[i] = NAN;
    cpa_test_tensor_send(&y, stream);
    int32_t *device_places = cpa_test_upload(stream, places, n * 4);
    float *device_weights = cpa_test_upload(stream, weights, n * 4);
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
                                          .weights = device_weights,
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
                product = weights[at] * cpa_test_row(&y, places[at])[i];
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
    cpa_test_free(stream, device_weights);
    cpa_test_free(stream, device_places);
    free(weights);
    free(places);
    cpa_test_tensor_free(&out, stream);
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
    {"tokens go where the definition says", tokens_go_where_the_definition_says},
    {"a normalised softmax is that of the chosen", a_normalised_softmax_is_that_of_the_chosen},
    {"a wild logit spoils its token alone", a_wild_logit_spoils_its_token_alone},
    {"choices are sorted stably", choices_are_sorted_stably},
    {"ranks have all experts once", ranks_have_all_experts_once},
    {"a choice at once is the operators in turn", a_choice_at_once_is_the_operators_in_turn},
    {"results are summed in order and rounded once", results_are_summed_in_order_and_rounded_once},
};
CPA_DEVICE_TEST_MAIN("experts", tests)
