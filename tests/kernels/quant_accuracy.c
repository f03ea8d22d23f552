/* What a narrow cache costs: attention over a cache of each dtype against attention over the fp32 cache, on peaky
 * inputs with outlier channels; and fp8 over inputs without outliers, whose elements are uniform in [0, 1), up to 32768
 * keys. Prints the tables of docs/ACCURACY.md; exits 1 if a dtype is worse than that page allows.
 *
 *     quant_accuracy [LONGEST]     lengths 128, 512, .. up to LONGEST (131072) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "tests/fixtures/kv_fixture.h"

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 128, QUERIES = 16, BLOCK_SIZE = 64, OUTLIER_EVERY = 37 };

typedef struct cache_kind {
    const char *name;
    cpa_dtype dtype;
    int tensor_scale;
    double least_cosine;
} cache_kind;

static const cache_kind KINDS[] = {{"bf16", CPA_BF16, 0, 0.999},
                                   {"fp8_e4m3, scale per tensor", CPA_FP8_E4M3, 1, 0.95},
                                   {"fp8_e4m3, scale per token and head", CPA_FP8_E4M3, 0, 0.98},
                                   {"fp8_e5m2, scale per token and head", CPA_FP8_E5M2, 0, 0.9},
                                   {"int8", CPA_INT8, 0, 0.98},
                                   {"tq_k8v4", CPA_TQ_K8V4, 0, 0.9},
                                   {"tq_4bit", CPA_TQ_4BIT, 0, 0.6},
                                   {"tq_k3v4", CPA_TQ_K3V4, 0, 0.05},
                                   {"tq_3bit", CPA_TQ_3BIT, 0, 0.01}};
enum { N_KINDS = sizeof KINDS / sizeof KINDS[0] };

static cpa_device *device;
static cpa_stream *stream;

static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "quant_accuracy: %s\n", message);
    exit(2);
}

/* A few channels of keys and values are eight times as large, as trained models have them; queries weigh those of keys
 * a quarter as much, so that they decide no score alone. */
static void add_outliers(cpa_case_sequence *s) {
    for (int64_t i = 0; i < s->length * KV_HEADS * DIM; i++) {
        if (i % DIM % OUTLIER_EVERY == 5) s->k[i] *= 8, s->v[i] *= 8;
    }
    for (int64_t i = 0; i < s->length * Q_HEADS * DIM; i++) {
        if (i % DIM % OUTLIER_EVERY == 5) s->q[i] /= 4;
    }
}

static float largest(const float *x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}

/* The results of the last QUERIES tokens over a cache of the dtype, [QUERIES, Q_HEADS, DIM]. */
static void attend(const cpa_case_sequence *s, const cache_kind *kind, float *out) {
    int64_t blocks = (s->length + BLOCK_SIZE - 1) / BLOCK_SIZE;
    cpa_kv_fixture cache;
    cpa_kv_view view = {.dtype = kind->dtype,
                        .block_size = BLOCK_SIZE,
                        .num_blocks = blocks,
                        .kv_heads = KV_HEADS,
                        .k_dim = DIM,
                        .v_dim = DIM};
    if (kind->tensor_scale) {
        view.k_scale = largest(s->k, s->length * KV_HEADS * DIM) / 448;
        view.v_scale = largest(s->v, s->length * KV_HEADS * DIM) / 448;
    }
    cpa_kv_fixture_init_view(&cache, view, 0);
    int32_t *table = cpa_test_block_table(s->length, BLOCK_SIZE, 0, 0);
    cpa_test_store_shard(&cache, s, (cpa_owner_map){1, BLOCK_SIZE}, (cpa_token_set){CPA_TOKENS_ALL, 0}, s->length,
                         table);
    cpa_error err = {CPA_OK, ""};
    cpa_attend_plan *plan;
    cpa_attend_item item = {.q_count = QUERIES, .q_first = s->length - QUERIES, .k_count = s->length};
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = {1, BLOCK_SIZE},
                              .shape.q_heads = Q_HEADS,
                              .shape.kv_heads = KV_HEADS,
                              .shape.k_dim = DIM,
                              .shape.v_dim = DIM,
                              .block_size = BLOCK_SIZE,
                              .items = &item,
                              .n_items = 1,
                              .block_tables = table,
                              .n_table_entries = blocks,
                              .shape.kv_dtype = cache.view.dtype};
    cpa_attend_args args = {.size = sizeof args,
                            .q = s->q + (s->length - QUERIES) * Q_HEADS * DIM,
                            .kv = cache.view,
                            .mask = {.causal = 1},
                            .out = out};
    require(cpa_attend_plan_create(device, &plan, &err), err.message);
    require(cpa_attend_plan_set(plan, &batch, &err), err.message);
    require(cpa_attend(plan, &args, stream), cpa_stream_error(stream));
    cpa_attend_plan_destroy(plan);
    free(table);
    cpa_kv_fixture_destroy(&cache);
}

/* The least cosine over rows, NaN if a row has a NaN, which fmin would drop; and the largest error relative to the
 * largest element of the exact results. */
static void compare(const float *exact, const float *got, double *cosine, double *error) {
    double most = (double)largest(exact, QUERIES * Q_HEADS * DIM);
    *cosine = 1;
    *error = 0;
    for (int row = 0; row < QUERIES * Q_HEADS; row++, exact += DIM, got += DIM) {
        double dot = 0, a = 0, b = 0;
        for (int d = 0; d < DIM; d++) {
            dot += (double)exact[d] * (double)got[d];
            a += (double)exact[d] * (double)exact[d];
            b += (double)got[d] * (double)got[d];
            *error = fmax(*error, fabs((double)exact[d] - (double)got[d]) / most);
        }
        double of_row = dot / sqrt(a * b);
        if (isnan(of_row) || of_row < *cosine) *cosine = of_row;
    }
}

/* Elements uniform in [0, 1). */
static void make_even(cpa_case_sequence *s, int64_t length) {
    uint64_t random = 9;
    *s = (cpa_case_sequence){.length = length, .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM};
    s->q = cpa_test_poisoned(length * Q_HEADS * DIM, sizeof *s->q);
    s->k = cpa_test_poisoned(length * KV_HEADS * DIM, sizeof *s->k);
    s->v = cpa_test_poisoned(length * KV_HEADS * DIM, sizeof *s->v);
    float *const tensors[] = {s->q, s->k, s->v};
    for (int t = 0; t < 3; t++) {
        for (int64_t i = 0; i < length * (t ? KV_HEADS : Q_HEADS) * DIM; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            tensors[t][i] = (float)(random >> 40) * 0x1p-24f;
        }
    }
}

/* fp8 over even inputs; the least cosine of a row goes from 0.9999 over 128 keys to 0.9980 over 32768, in equal steps
 * for equal factors. Returns 1 if one is lower. */
static int print_even(void) {
    int bad = 0;
    printf("\n| keys | %s | %s | at least |\n|---:|---:|---:|---:|\n", KINDS[1].name, KINDS[2].name);
    for (int step = 0; step < 5; step++) {
        static float exact[QUERIES * Q_HEADS * DIM], got[QUERIES * Q_HEADS * DIM];
        static const cache_kind exact_kind = {"fp32", CPA_F32, 0, 1};
        const double least = 0.9999 - 0.0019 * step / 4;
        const int64_t length = (int64_t)128 << 2 * step;
        cpa_case_sequence s;
        make_even(&s, length);
        attend(&s, &exact_kind, exact);
        printf("| %lld |", (long long)length);
        for (int k = 1; k <= 2; k++) {
            double cosine, error;
            attend(&s, &KINDS[k], got);
            compare(exact, got, &cosine, &error);
            printf(" %.6f |", cosine);
            if (!(cosine >= least)) bad = 1;
        }
        printf(" %.4f |\n", least);
        cpa_case_sequence_release(&s);
    }
    return bad;
}

int main(int argc, char **argv) {
    static const cache_kind exact_kind = {"fp32", CPA_F32, 0, 1};
    const int64_t longest = argc > 1 ? atoll(argv[1]) : 131072;
    cpa_device_options options = {.size = sizeof options};
    cpa_error err = {CPA_OK, ""};
    int bad = 0;
    require(cpa_device_open(&options, &device, &err), err.message);
    require(cpa_stream_create(device, &stream, &err), err.message);
    printf("| keys |");
    for (int k = 0; k < N_KINDS; k++) printf(" %s |", KINDS[k].name);
    printf("\n|---:");
    for (int kind = 0; kind < N_KINDS; kind++) printf("|---:");
    printf("|\n");
    for (int64_t length = 128; length <= longest; length *= 4) {
        static float exact[QUERIES * Q_HEADS * DIM], got[QUERIES * Q_HEADS * DIM];
        cpa_case_sequence s = {length, Q_HEADS, KV_HEADS, DIM, DIM, NULL, NULL, NULL, 0};
        if (cpa_case_sequence_make(&s, 3, 0, CPA_F32, NULL) != CPA_OK) abort();
        add_outliers(&s);
        attend(&s, &exact_kind, exact);
        printf("| %lld |", (long long)length);
        for (int k = 0; k < N_KINDS; k++) {
            double cosine, error;
            attend(&s, &KINDS[k], got);
            compare(exact, got, &cosine, &error);
            printf(" %.6f, %.2g |", cosine, error);
            if (!(cosine >= KINDS[k].least_cosine)) bad = 1;
        }
        printf("\n");
        cpa_case_sequence_release(&s);
    }
    bad |= print_even();
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    return bad;
}
