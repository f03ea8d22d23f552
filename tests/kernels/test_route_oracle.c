/* expert_route against the routing vectors of tests/data/oracle, which were computed from the definition alone. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/oracle_fixture.h"
#include "tests/fixtures/unit.h"

/* The columns of `ints`, in the order of the oracle's README. */
enum { TOKENS, EXPERTS, TOP_K, SCORING, HAS_BIAS, N_GROUP, TOPK_GROUP, GROUP_SCORE, RENORMALISE, COLUMNS };

static cpa_device *device;
static cpa_stream *stream;

static void *upload(const cpa_tensor *tensor) {
    return tensor ? cpa_test_upload(stream, tensor->data, tensor->bytes) : NULL;
}

/* Experts that differ, and weights that are more than a few roundings off. */
static int64_t wrong_in(const cpa_test_oracle *oracle, int64_t number, const int32_t *ints, double scaling) {
    const int64_t n = (int64_t)ints[TOKENS] * ints[TOP_K];
    const cpa_tensor *ids = cpa_test_oracle_find(oracle, number, "ids"),
                     *weights = cpa_test_oracle_find(oracle, number, "weights");
    void *logits = upload(cpa_test_oracle_find(oracle, number, "logits")), *bias = NULL;
    void *device_ids = upload(weights), *device_weights = upload(ids); /* of the right sizes, and wrong */
    int32_t *got = malloc((size_t)n * 4), want_id;
    float *got_weights = malloc((size_t)n * 4), want;
    int64_t wrong = 0;
    if (ints[HAS_BIAS]) bias = upload(cpa_test_oracle_find(oracle, number, "bias"));
    const cpa_expert_route_args args = {.size = sizeof args,
                                        .rows = ints[TOKENS],
                                        .experts = ints[EXPERTS],
                                        .top_k = ints[TOP_K],
                                        .logits = logits,
                                        .scores = ints[SCORING] ? CPA_SCORES_SIGMOID : CPA_SCORES_SOFTMAX,
                                        .group_scores = ints[GROUP_SCORE] ? CPA_GROUP_BEST_TWO : CPA_GROUP_BEST,
                                        .n_group = ints[N_GROUP],
                                        .topk_group = ints[TOPK_GROUP],
                                        .bias = bias,
                                        .normalise = ints[RENORMALISE],
                                        .scale = (float)scaling,
                                        .ids = device_ids,
                                        .weights = device_weights};
    CU_ASSERT_EQUAL(cpa_expert_route(&args, stream), CPA_OK);
    cpa_test_download(stream, got, device_ids, n * 4);
    cpa_test_download(stream, got_weights, device_weights, n * 4);
    for (int64_t i = 0; i < n; i++) {
        memcpy(&want_id, (const char *)ids->data + i * 4, 4);
        memcpy(&want, (const char *)weights->data + i * 4, 4);
        wrong += got[i] != want_id || !(fabsf(got_weights[i] - want) <= 0x1p-21f * fabsf(want));
    }
    void *const on_device[] = {logits, bias, device_ids, device_weights};
    for (int i = 0; i < 4; i++) {
        if (on_device[i]) cpa_test_free(stream, on_device[i]);
    }
    free(got_weights);
    free(got);
    return wrong;
}

static void tokens_go_where_the_oracle_says(void) {
    cpa_test_oracle oracle = cpa_test_oracle_open("routing.safetensors");
    CPA_ASSERT_ORDER(oracle.cases, >=, 10);
    cpa_test_device_open(1, &device, &stream);
    for (int64_t i = 0; i < oracle.cases; i++) {
        int32_t row[COLUMNS];
        double scaling;
        cpa_test_oracle_ints(&oracle, i, COLUMNS, row);
        cpa_test_oracle_floats(&oracle, i, 1, &scaling);
        const int64_t wrong = wrong_in(&oracle, i, row, scaling);
        if (wrong) printf("  case %lld: %lld wrong\n", (long long)i, (long long)wrong);
        CU_ASSERT_EQUAL(wrong, 0);
    }
    cpa_test_device_close(device, stream);
    cpa_test_oracle_close(&oracle);
}

static const cpa_test tests[] = {
    {"tokens go where the oracle says", tokens_go_where_the_oracle_says},
};
CPA_DEVICE_TEST_MAIN("routing by the oracle", tests)
