/* expert_route against its definition in float64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "base/hash.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static void *allocate(int64_t bytes) {
    void *memory = malloc((size_t)bytes + 1);
    if (!memory) abort();
    return memory;
}

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

static const cpa_test tests[] = {
    {"tokens go where the definition says", tokens_go_where_the_definition_says},
    {"a normalised softmax is that of the chosen", a_normalised_softmax_is_that_of_the_chosen},
    {"a wild logit spoils its token alone", a_wild_logit_spoils_its_token_alone},
};
CPA_DEVICE_TEST_MAIN("expert route", tests)
