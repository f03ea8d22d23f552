/* The reference of bench attend: unfused attention on OpenBLAS, in float64 for the result and in fp32, with
 * probabilities and result rounded to the dtype, for the tolerance. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "launcher/bench_attend.h"
#include "launcher/bench_inputs.h"
#include "launcher/bench_memory.h"
#include "src/reference.h"

enum {
    MAX_SAMPLED_SEQUENCES = 2,
    MAX_SAMPLED_TOKENS = 64, /* of a sequence, all heads of each */
};
static const int64_t max_scores = 1 << 21; /* elements of one score matrix, one KV head */

/* One KV head of one sequence in float64 and fp32, with the sampled queries that read it. */
typedef struct head_reference {
    int64_t context, rows, k_dim, v_dim; /* a row is one sampled token and one query head */
    double *k, *v, *q, *scores, *out, *lse;
    float *k32, *v32, *q32, *scores32, *out32;
    float *abs32, *mass32; /* |v|, and sum(p |v|) of a row */
} head_reference;

static void free_head(head_reference *r) {
    void *const all[] = {r->k,   r->v,   r->q,        r->scores, r->out,   r->lse,   r->k32,
                         r->v32, r->q32, r->scores32, r->out32,  r->abs32, r->mass32};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static cpa_status alloc_head(head_reference *r, int64_t context, int64_t rows, const cpa_bench_options *o,
                             cpa_error *err) {
    size_t k = (size_t)(context * o->k_dim), v = (size_t)(context * o->v_dim), q = (size_t)(rows * o->k_dim);
    size_t out = (size_t)(rows * o->v_dim), scores = (size_t)(rows * context);
    *r = (head_reference){
        .context = context,
        .rows = rows,
        .k_dim = o->k_dim,
        .v_dim = o->v_dim,
        .k = malloc(k * sizeof(double)),
        .v = malloc(v * sizeof(double)),
        .q = malloc(q * sizeof(double)),
        .scores = malloc(scores * sizeof(double)),
        .out = malloc(out * sizeof(double)),
        .lse = malloc((size_t)rows * sizeof(double)),
        .k32 = malloc(k * sizeof(float)),
        .v32 = malloc(v * sizeof(float)),
        .q32 = malloc(q * sizeof(float)),
        .scores32 = malloc(scores * sizeof(float)),
        .out32 = malloc(out * sizeof(float)),
        .abs32 = malloc(v * sizeof(float)),
        .mass32 = malloc(out * sizeof(float)),
    };
    if (r->k && r->v && r->q && r->scores && r->out && r->lse && r->k32 && r->v32 && r->q32 && r->scores32 &&
        r->out32 && r->abs32 && r->mass32) {
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

/* The whole of softmax(Q K^T / sqrt(k_dim)) V; visible[row / group] keys are seen by a row. */
static void attend_head(head_reference *r, const int64_t *visible, int64_t group, cpa_dtype dtype) {
    blasint m = (blasint)r->rows, n = (blasint)r->context, k = (blasint)r->k_dim, v = (blasint)r->v_dim;
    double scale = 1 / sqrt((double)r->k_dim);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, scale, r->q, k, r->k, k, 0, r->scores, n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, (float)scale, r->q32, k, r->k32, k, 0, r->scores32,
                n);
    for (int64_t row = 0; row < r->rows; row++) softmax_row(r, row, visible[row / group], dtype);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores, n, r->v, v, 0, r->out, v);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores32, n, r->v32, v, 0, r->out32, v);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores32, n, r->abs32, v, 0, r->mass32, v);
}

/* Whether a result row differs from the reference row by more than the tolerance of src/reference.h. */
static bool row_is_wrong(const head_reference *r, int64_t row, const float *got, float got_lse, cpa_dtype dtype) {
    const double *want = r->out + row * r->v_dim;
    double error = cpa_reference_error(got, want, (int32_t)r->v_dim), plain_error = 0, mass = 0;
    for (int64_t d = 0; d < r->v_dim; d++) {
        double plain = cpa_reference_round(r->out32[row * r->v_dim + d], dtype);
        plain_error = fmax(plain_error, fabs(plain - want[d]));
        mass = fmax(mass, (double)r->mass32[row * r->v_dim + d]);
    }
    bool close = error <= 2 * fmax(plain_error, cpa_reference_unit_roundoff(dtype) * mass) + 1e-5;
    return !close || !(fabs(got_lse - r->lse[row]) <= cpa_reference_lse_tolerance(dtype));
}

/* Token i of n sampled ones among `tokens`, evenly spaced, the last one included. */
static int64_t sample(int64_t i, int64_t n, int64_t tokens) {
    return (i + 1) * tokens / n - 1;
}

/* Rows of one head of a tensor [tokens, heads, dim] in both precisions. */
static void widen_head(const void *tensor, cpa_dtype dtype, int64_t tokens, int64_t heads, int64_t head, int64_t dim,
                       double *dst64, float *dst32) {
    for (int64_t t = 0; t < tokens; t++) {
        const char *row = (const char *)tensor + (t * heads + head) * dim * cpa_dtype_bytes(dtype);
        cpa_reference_widen(row, dtype, dim, dst32 + t * dim);
        for (int64_t d = 0; d < dim; d++) dst64[t * dim + d] = dst32[t * dim + d];
    }
}

/* The inputs of one sequence, all heads, on the host; q are the queries of its sampled tokens. */
typedef struct sequence_inputs {
    void *k, *v, *q;
    int64_t context, sampled;
    int64_t token[MAX_SAMPLED_TOKENS], visible[MAX_SAMPLED_TOKENS];
} sequence_inputs;

static void free_inputs(sequence_inputs *in) {
    free(in->q);
    free(in->v);
    free(in->k);
}

static cpa_status load_queries(cpa_bench_site *site, int64_t sequence, const int64_t *positions, sequence_inputs *in,
                               cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t bytes = in->sampled * o->q_heads * o->k_dim * cpa_dtype_bytes((cpa_dtype)o->dtype);
    void *q = NULL;
    in->q = malloc((size_t)bytes);
    cpa_status status = in->q ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for queries");
    if (status == CPA_OK) status = cpa_device_alloc(site->device, bytes, &q, err);
    if (status == CPA_OK) {
        status = cpa_bench_synthesize(site, CPA_SYNTH_Q, sequence, positions, in->sampled, q, err);
    }
    if (status == CPA_OK) status = cpa_bench_copy(site, in->q, q, bytes, err);
    cpa_device_free(site->device, q);
    return status;
}

static cpa_status load_sequence(cpa_bench_site *site, const cpa_bench_attend_case *shape, int64_t sequence,
                                int64_t sampled, sequence_inputs *in, cpa_error *err) {
    int64_t positions[MAX_SAMPLED_TOKENS];
    *in = (sequence_inputs){.context = cpa_bench_attend_context(&site->options, shape, sequence), .sampled = sampled};
    for (int64_t i = 0; i < sampled; i++) {
        in->token[i] = sample(i, sampled, shape->new_tokens);
        positions[i] = in->context - shape->new_tokens + in->token[i];
        in->visible[i] = site->options.full ? in->context : positions[i] + 1;
    }
    CPA_TRY(load_queries(site, sequence, positions, in, err));
    CPA_TRY(cpa_bench_recall(site, CPA_SYNTH_K, sequence, 0, in->context, &in->k, err));
    return cpa_bench_recall(site, CPA_SYNTH_V, sequence, 0, in->context, &in->v, err);
}

static void load_head(const cpa_bench_options *o, const sequence_inputs *in, int64_t kv_head, head_reference *r) {
    int64_t group = o->q_heads / o->kv_heads;
    cpa_dtype dtype = (cpa_dtype)o->dtype, kv_dtype = (cpa_dtype)o->kv_dtype;
    r->context = in->context;
    widen_head(in->k, kv_dtype, in->context, o->kv_heads, kv_head, o->k_dim, r->k, r->k32);
    widen_head(in->v, kv_dtype, in->context, o->kv_heads, kv_head, o->v_dim, r->v, r->v32);
    for (int64_t i = 0; i < in->context * o->v_dim; i++) r->abs32[i] = fabsf(r->v32[i]);
    /* the heads of a group lie side by side, as one wide head */
    widen_head(in->q, dtype, in->sampled, o->kv_heads, kv_head, group * o->k_dim, r->q, r->q32);
}

static int64_t count_wrong(const cpa_bench_options *o, const cpa_bench_attend_case *shape, const sequence_inputs *in,
                           int64_t sequence, int64_t kv_head, const head_reference *r, const void *out,
                           const float *lse) {
    int64_t group = o->q_heads / o->kv_heads, wrong = 0;
    cpa_dtype dtype = (cpa_dtype)o->dtype;
    float got[CPA_MAX_HEAD_DIM];
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t token = sequence * shape->new_tokens + in->token[row / group];
        int64_t head_row = token * o->q_heads + kv_head * group + row % group;
        cpa_reference_widen((const char *)out + head_row * o->v_dim * cpa_dtype_bytes(dtype), dtype, o->v_dim, got);
        wrong += row_is_wrong(r, row, got, lse[head_row], dtype);
    }
    return wrong;
}

cpa_status cpa_bench_attend_check(cpa_bench_site *site, const cpa_bench_attend_case *shape, const void *out,
                                  const float *lse, int64_t *checked, int64_t *wrong, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t group = o->q_heads / o->kv_heads;
    int64_t affordable = max_scores / (group * shape->context) + 1;
    int64_t tokens = shape->new_tokens < MAX_SAMPLED_TOKENS ? shape->new_tokens : MAX_SAMPLED_TOKENS;
    if (tokens > affordable) tokens = affordable;
    int64_t sequences = shape->sequences < MAX_SAMPLED_SEQUENCES ? shape->sequences : MAX_SAMPLED_SEQUENCES;
    head_reference r;
    CPA_TRY(alloc_head(&r, shape->context, tokens * group, o, err));
    cpa_status status = CPA_OK;
    *checked = *wrong = 0;
    for (int64_t i = 0; status == CPA_OK && i < sequences; i++) {
        int64_t sequence = sample(i, sequences, shape->sequences);
        sequence_inputs in;
        status = load_sequence(site, shape, sequence, tokens, &in, err);
        for (int64_t kv_head = 0; status == CPA_OK && kv_head < o->kv_heads; kv_head++) {
            load_head(o, &in, kv_head, &r);
            attend_head(&r, in.visible, group, (cpa_dtype)o->dtype);
            *wrong += count_wrong(o, shape, &in, sequence, kv_head, &r, out, lse);
            *checked += r.rows;
        }
        free_inputs(&in);
    }
    free_head(&r);
    return status;
}
