/* What bench attend computes on, and its reference: unfused attention on OpenBLAS, in float64 for the result and in
 * fp32, with probabilities and result rounded to the dtype, for the tolerance: 2 * its error + 1e-5. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "launcher/bench_attend.h"
#include "src/reference.h"

enum {
    FAR_HITTER_EVERY = 512, /* one token in so many draws every query */
    LOCAL_TOKENS = 16,      /* neighbours that share a direction */
    MAX_SAMPLED_SEQUENCES = 2,
    MAX_SAMPLED_TOKENS = 64, /* of a sequence, all heads of each */
};
static const int64_t max_scores = 1 << 24; /* elements of one score matrix */

/* One component of a direction with components of +1 and -1. */
static float direction(uint64_t seed, int32_t d) {
    return cpa_bench_hash(seed + (uint64_t)(d / 64)) >> (d % 64) & 1 ? 1.0f : -1.0f;
}

void cpa_bench_attend_token(const cpa_bench_options *o, cpa_bench_tensor tensor, int64_t sequence, int64_t token,
                            float *dst) {
    int32_t heads = tensor == CPA_BENCH_Q ? o->q_heads : o->kv_heads;
    uint64_t row = cpa_bench_hash(cpa_bench_hash((uint64_t)(sequence * 4 + tensor)) + (uint64_t)token);
    float far_weight = tensor == CPA_BENCH_Q ? 1.0f : token % FAR_HITTER_EVERY == 0 ? 0.75f : 0.0f;
    for (int32_t h = 0; h < heads; h++) {
        uint64_t kv_head = (uint64_t)(h / (heads / o->kv_heads));
        uint64_t far = cpa_bench_hash(kv_head);
        uint64_t local = cpa_bench_hash(far + (uint64_t)(token / LOCAL_TOKENS));
        for (int32_t d = 0; d < o->head_dim; d++) {
            float x = cpa_bench_normal(cpa_bench_hash(row + (uint64_t)(h * o->head_dim + d)));
            if (tensor != CPA_BENCH_V) x += far_weight * direction(far, d) + 0.6f * direction(local, d);
            dst[h * o->head_dim + d] = cpa_reference_round(x, o->dtype);
        }
    }
}

/* One KV head of one sequence in float64 and fp32, with the sampled queries that read it. */
typedef struct head_reference {
    int64_t context, rows, dim; /* a row is one sampled token and one query head */
    double *k, *v, *q, *scores, *out, *lse;
    float *k32, *v32, *q32, *scores32, *out32;
} head_reference;

static void free_head(head_reference *r) {
    void *const all[] = {r->k, r->v, r->q, r->scores, r->out, r->lse, r->k32, r->v32, r->q32, r->scores32, r->out32};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static cpa_status alloc_head(head_reference *r, int64_t context, int64_t rows, int64_t dim, cpa_error *err) {
    size_t keys = (size_t)(context * dim), queries = (size_t)(rows * dim), scores = (size_t)(rows * context);
    *r = (head_reference){
        .context = context,
        .rows = rows,
        .dim = dim,
        .k = malloc(keys * sizeof(double)),
        .v = malloc(keys * sizeof(double)),
        .q = malloc(queries * sizeof(double)),
        .scores = malloc(scores * sizeof(double)),
        .out = malloc(queries * sizeof(double)),
        .lse = malloc((size_t)rows * sizeof(double)),
        .k32 = malloc(keys * sizeof(float)),
        .v32 = malloc(keys * sizeof(float)),
        .q32 = malloc(queries * sizeof(float)),
        .scores32 = malloc(scores * sizeof(float)),
        .out32 = malloc(queries * sizeof(float)),
    };
    if (r->k && r->v && r->q && r->scores && r->out && r->lse && r->k32 && r->v32 && r->q32 && r->scores32 &&
        r->out32) {
        return CPA_OK;
    }
    free_head(r);
    return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for the reference of %lld x %lld scores",
                    (long long)rows, (long long)context);
}

/* Softmax of the row over its first `visible` keys, zero beyond; the probabilities in fp32 are rounded to the dtype. */
static void softmax_row(head_reference *r, int64_t row, int64_t visible, cpa_dtype dtype) {
    double *s = r->scores + row * r->context, max = -INFINITY, sum = 0;
    float *s32 = r->scores32 + row * r->context, max32 = -INFINITY, sum32 = 0;
    for (int64_t k = 0; k < visible; k++) {
        max = fmax(max, s[k]);
        max32 = fmaxf(max32, s32[k]);
    }
    for (int64_t k = 0; k < r->context; k++) {
        sum += s[k] = k < visible ? exp(s[k] - max) : 0;
        sum32 += s32[k] = k < visible ? expf(s32[k] - max32) : 0;
    }
    for (int64_t k = 0; k < visible; k++) {
        s[k] /= sum;
        s32[k] = cpa_reference_round(s32[k] / sum32, dtype);
    }
    r->lse[row] = max + log(sum);
}

/* The whole of softmax(Q K^T / sqrt(dim)) V; visible[row / group] keys are seen by a row. */
static void attend_head(head_reference *r, const int64_t *visible, int64_t group, cpa_dtype dtype) {
    blasint m = (blasint)r->rows, n = (blasint)r->context, d = (blasint)r->dim;
    double scale = 1 / sqrt((double)r->dim);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, d, scale, r->q, d, r->k, d, 0, r->scores, n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, d, (float)scale, r->q32, d, r->k32, d, 0, r->scores32,
                n);
    for (int64_t row = 0; row < r->rows; row++) softmax_row(r, row, visible[row / group], dtype);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, d, n, 1, r->scores, n, r->v, d, 0, r->out, d);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, d, n, 1, r->scores32, n, r->v32, d, 0, r->out32, d);
}

/* Whether a result row differs from the reference row by more than the plain implementation's error allows. */
static bool row_is_wrong(const head_reference *r, int64_t row, const float *got, float got_lse, cpa_dtype dtype) {
    double error = 0, plain_error = 0;
    for (int64_t d = 0; d < r->dim; d++) {
        double want = r->out[row * r->dim + d];
        double plain = cpa_reference_round(r->out32[row * r->dim + d], dtype);
        plain_error = fmax(plain_error, fabs(plain - want));
        error = isnan(got[d]) ? INFINITY : fmax(error, fabs(got[d] - want));
    }
    bool close = error <= 2 * plain_error + 1e-5;
    return !close || !(fabs(got_lse - r->lse[row]) <= cpa_reference_lse_tolerance(dtype));
}

/* Token i of n sampled ones among `tokens`, evenly spaced, the last one included. */
static int64_t sample(int64_t i, int64_t n, int64_t tokens) {
    return (i + 1) * tokens / n - 1;
}

static void widen(const float *src, int64_t n, double *dst64, float *dst32) {
    for (int64_t i = 0; i < n; i++) dst64[i] = dst32[i] = src[i];
}

/* Regenerates one sequence's inputs for one KV head; token is work space for all heads of one token. */
static void load_head(const cpa_bench_options *o, const cpa_bench_attend_case *shape, int64_t sequence, int32_t kv_head,
                      int64_t sampled, float *token, int64_t *visible, head_reference *r) {
    int64_t dim = o->head_dim, group = o->q_heads / o->kv_heads;
    for (int64_t t = 0; t < shape->context; t++) {
        cpa_bench_attend_token(o, CPA_BENCH_K, sequence, t, token);
        widen(token + kv_head * dim, dim, r->k + t * dim, r->k32 + t * dim);
        cpa_bench_attend_token(o, CPA_BENCH_V, sequence, t, token);
        widen(token + kv_head * dim, dim, r->v + t * dim, r->v32 + t * dim);
    }
    for (int64_t i = 0; i < sampled; i++) {
        int64_t position = shape->context - shape->new_tokens + sample(i, sampled, shape->new_tokens);
        cpa_bench_attend_token(o, CPA_BENCH_Q, sequence, position, token);
        widen(token + kv_head * group * dim, group * dim, r->q + i * group * dim, r->q32 + i * group * dim);
        visible[i] = position + 1;
    }
}

static int64_t count_wrong(const cpa_bench_options *o, const cpa_bench_attend_case *shape, int64_t sequence,
                           int32_t kv_head, const head_reference *r, const void *out, const float *lse) {
    int64_t group = o->q_heads / o->kv_heads, dim = o->head_dim, wrong = 0;
    float got[CPA_MAX_HEAD_DIM];
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t token = sample(row / group, r->rows / group, shape->new_tokens);
        int64_t head_row = (sequence * shape->new_tokens + token) * o->q_heads + kv_head * group + row % group;
        const char *at = (const char *)out + head_row * dim * cpa_dtype_bytes(o->dtype);
        cpa_reference_widen(at, o->dtype, dim, got);
        wrong += row_is_wrong(r, row, got, lse[head_row], o->dtype);
    }
    return wrong;
}

cpa_status cpa_bench_attend_check(const cpa_bench_options *o, const cpa_bench_attend_case *shape, const void *out,
                                  const float *lse, int64_t *checked, int64_t *wrong, cpa_error *err) {
    int64_t group = o->q_heads / o->kv_heads;
    int64_t affordable = max_scores / (group * shape->context) + 1;
    int64_t tokens = shape->new_tokens < MAX_SAMPLED_TOKENS ? shape->new_tokens : MAX_SAMPLED_TOKENS;
    if (tokens > affordable) tokens = affordable;
    int64_t sequences = shape->sequences < MAX_SAMPLED_SEQUENCES ? shape->sequences : MAX_SAMPLED_SEQUENCES;
    head_reference r;
    CPA_TRY(alloc_head(&r, shape->context, tokens * group, o->head_dim, err));
    float *token = malloc((size_t)o->q_heads * (size_t)o->head_dim * sizeof *token);
    cpa_status status = token ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for the reference");
    int64_t visible[MAX_SAMPLED_TOKENS];
    *checked = *wrong = 0;
    for (int64_t i = 0; token && i < sequences; i++) {
        int64_t sequence = sample(i, sequences, shape->sequences);
        for (int32_t kv_head = 0; kv_head < o->kv_heads; kv_head++) {
            load_head(o, shape, sequence, kv_head, tokens, token, visible, &r);
            attend_head(&r, visible, group, o->dtype);
            *wrong += count_wrong(o, shape, sequence, kv_head, &r, out, lse);
            *checked += r.rows;
        }
    }
    free(token);
    free_head(&r);
    return status;
}
