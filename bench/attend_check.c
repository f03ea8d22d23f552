/* The reference of bench attend: unfused attention on OpenBLAS, in float64 for the result and in fp32, with
 * probabilities and result rounded to the dtype, for the tolerance. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "bench/attend.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/rules.h"
#include "src/check/reference.h"

enum {
    MAX_SAMPLED_PIECES = 4,
    MAX_SAMPLED_TOKENS = 64, /* of a piece, with all query heads of a sampled KV head */
};
static const int64_t max_scores = 1 << 21; /* elements of one score matrix, one KV head */
static const int64_t max_keys = 1 << 19;   /* of all sampled pieces and KV heads */

/* One KV head of one sequence in float64 and fp32, with the sampled queries that read it. */
typedef struct head_reference {
    int64_t context, rows, k_dim, v_dim; /* a row is one sampled token and one query head */
    double *k, *v, *q, *scores, *out, *lse;
    float *k32, *v32, *q32, *scores32, *out32;
    float *abs32, *mass32; /* |v|, and sum(p |v|) of a row */
    float *score_size;     /* of a row, as in src/check/reference.h */
} head_reference;

static void free_head(head_reference *r) {
    void *const all[] = {r->k,   r->v,   r->q,        r->scores, r->out,   r->lse,    r->k32,
                         r->v32, r->q32, r->scores32, r->out32,  r->abs32, r->mass32, r->score_size};
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
        .score_size = malloc((size_t)rows * sizeof(float)),
    };
    if (r->k && r->v && r->q && r->scores && r->out && r->lse && r->k32 && r->v32 && r->q32 && r->scores32 &&
        r->out32 && r->abs32 && r->mass32 && r->score_size) {
        return CPA_OK;
    }
    return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for the reference of %lld x %lld scores",
                    (long long)rows, (long long)context);
}

/* scale * sum |q k| of the key with the highest score. */
static float score_size(const head_reference *r, int64_t row, int64_t key) {
    const float *q = r->q32 + row * r->k_dim, *k = r->k32 + key * r->k_dim;
    float size = 0;
    for (int64_t d = 0; d < r->k_dim; d++) size += fabsf(q[d] * k[d]);
    return size / sqrtf((float)r->k_dim);
}

/* Softmax of the row over its first `visible` keys, zero beyond; the probabilities in fp32 are rounded to the dtype. */
static void softmax_row(head_reference *r, const cpa_bench_options *o, int64_t row, int64_t visible, int64_t head,
                        int64_t position) {
    const cpa_dtype dtype = (cpa_dtype)o->dtype;
    double *s = r->scores + row * r->context, max = -INFINITY, sum = 0;
    float *s32 = r->scores32 + row * r->context, max32, sum32 = 0;
    int64_t top = 0;
    for (int64_t k = 0; k < visible; k++) {
        s[k] = cpa_bench_ruled(o, head, position, k, s[k]);
        s32[k] = (float)cpa_bench_ruled(o, head, position, k, (double)s32[k]);
        max = fmax(max, s[k]);
        if (s32[k] > s32[top]) top = k;
    }
    max32 = s32[top];
    r->score_size[row] = score_size(r, row, top);
    for (int64_t k = 0; k < r->context; k++) {
        sum += s[k] = k < visible ? exp(s[k] - max) : 0;
        sum32 += s32[k] = k < visible ? expf(s32[k] - max32) : 0;
    }
    r->lse[row] = max + log(sum);
    const double kept = cpa_bench_kept(o, head, r->lse[row]);
    for (int64_t k = 0; k < visible; k++) {
        s[k] *= kept / sum;
        s32[k] = cpa_reference_round(s32[k] / sum32 * (float)kept, dtype);
    }
}

/* The whole of softmax(Q K^T / sqrt(k_dim)) V; visible[row / group] keys are seen by a row, whose query has the
 * position of that index; first_head: the query head of row 0. */
static void attend_head(head_reference *r, const cpa_bench_options *o, const int64_t *visible, const int64_t *positions,
                        int64_t first_head) {
    const int64_t group = o->q_heads / o->kv_heads;
    blasint m = (blasint)r->rows, n = (blasint)r->context, k = (blasint)r->k_dim, v = (blasint)r->v_dim;
    double scale = 1 / sqrt((double)r->k_dim);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, scale, r->q, k, r->k, k, 0, r->scores, n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, (float)scale, r->q32, k, r->k32, k, 0, r->scores32,
                n);
    for (int64_t row = 0; row < r->rows; row++)
        softmax_row(r, o, row, visible[row / group], first_head + row % group, positions[row / group]);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores, n, r->v, v, 0, r->out, v);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores32, n, r->v32, v, 0, r->out32, v);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, v, n, 1, r->scores32, n, r->abs32, v, 0, r->mass32, v);
}

/* Whether a result row differs from the reference row by more than the tolerance of src/check/reference.h. */
static bool row_is_wrong(const head_reference *r, int64_t row, const float *got, float got_lse, cpa_dtype dtype) {
    const double *want = r->out + row * r->v_dim;
    double error = cpa_reference_error(got, want, (int32_t)r->v_dim), plain_error = 0, mass = 0;
    for (int64_t d = 0; d < r->v_dim; d++) {
        double plain = cpa_reference_round(r->out32[row * r->v_dim + d], dtype);
        plain_error = fmax(plain_error, fabs(plain - want[d]));
        mass = fmax(mass, (double)r->mass32[row * r->v_dim + d]);
    }
    const double tolerance =
        cpa_reference_tolerance(dtype, (int32_t)r->k_dim, plain_error, mass, (double)r->score_size[row]);
    const double lse_error = fabs((double)got_lse - r->lse[row]);
    return !(error <= tolerance) || !(lse_error <= cpa_reference_lse_tolerance(dtype, r->lse[row]));
}

/* Token i of n sampled ones among `tokens`, evenly spaced, the last one included. */
static int64_t sample(int64_t i, int64_t n, int64_t tokens) {
    return (i + 1) * tokens / n - 1;
}

/* The sampled tokens of one piece on the host: keys and values of its context, queries, and results. */
typedef struct sample_of_piece {
    cpa_kv_view kv, common; /* of the sequence, and of the tokens that are those of sequence 0 */
    int64_t shared;         /* so many */
    char *q, *out;          /* [sampled, q_heads, dim] */
    float *lse;             /* [sampled, q_heads] */
    int64_t context, sampled;
    int64_t row[MAX_SAMPLED_TOKENS], visible[MAX_SAMPLED_TOKENS], positions[MAX_SAMPLED_TOKENS];
} sample_of_piece;

static void free_sample(sample_of_piece *in) {
    free(in->lse);
    free(in->out);
    free(in->q);
    free(in->common.v);
    free(in->common.k);
    free(in->kv.v);
    free(in->kv.k);
}

static cpa_status load_queries(cpa_bench_site *site, int64_t sequence, const int64_t *positions, sample_of_piece *in,
                               cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t bytes = in->sampled * o->q_heads * o->k_dim * cpa_dtype_bytes((cpa_dtype)o->dtype);
    void *q = NULL;
    cpa_status status = cpa_device_alloc(site->device, bytes, &q, err);
    if (status == CPA_OK) {
        status = cpa_bench_synthesize(site, CPA_SYNTH_Q, sequence, positions, in->sampled, q, err);
    }
    if (status == CPA_OK) status = cpa_bench_copy(site, in->q, q, bytes, err);
    cpa_device_free(site->device, q);
    return status;
}

static cpa_status load_results(cpa_bench_site *site, const void *out, const float *lse, sample_of_piece *in,
                               cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t out_bytes = o->q_heads * o->v_dim * cpa_dtype_bytes((cpa_dtype)o->dtype);
    int64_t lse_bytes = o->q_heads * (int64_t)sizeof *lse;
    for (int64_t i = 0; i < in->sampled; i++) {
        const char *from = (const char *)out + in->row[i] * out_bytes;
        CPA_TRY(cpa_bench_copy(site, in->out + i * out_bytes, from, out_bytes, err));
        CPA_TRY(cpa_bench_copy(site, in->lse + i * o->q_heads, lse + in->row[i] * o->q_heads, lse_bytes, err));
    }
    return CPA_OK;
}

/* Fills *in, which is to be freed whatever the status. */
static cpa_status load_sample(cpa_bench_site *site, const cpa_bench_piece *piece, int64_t shared, int64_t sampled,
                              const void *out, const float *lse, sample_of_piece *in, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    size_t heads = (size_t)(sampled * o->q_heads), element = (size_t)cpa_dtype_bytes((cpa_dtype)o->dtype);
    *in = (sample_of_piece){
        .q = malloc(heads * (size_t)o->k_dim * element),
        .out = malloc(heads * (size_t)o->v_dim * element),
        .lse = malloc(heads * sizeof *in->lse),
        .context = piece->first + piece->count,
        .sampled = sampled,
        .shared = shared,
    };
    if (!in->q || !in->out || !in->lse) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for samples");
    for (int64_t i = 0; i < sampled; i++) {
        int64_t token = sample(i, sampled, piece->count);
        in->positions[i] = piece->first + token;
        in->row[i] = piece->row + token;
        in->visible[i] = o->full ? in->context : in->positions[i] + 1;
    }
    CPA_TRY(load_results(site, out, lse, in, err));
    CPA_TRY(load_queries(site, piece->sequence, in->positions, in, err));
    if (in->shared > 0) CPA_TRY(cpa_bench_recall(site, 0, 0, in->shared, &in->common, err));
    return cpa_bench_recall(site, piece->sequence, 0, in->context, &in->kv, err);
}

/* The keys or values of one head in both precisions. */
static void load_keys(const sample_of_piece *in, cpa_synth_tensor tensor, int64_t head, int64_t dim, double *dst64,
                      float *dst32) {
    for (int64_t t = 0; t < in->context; t++) {
        cpa_bench_recalled_row(t < in->shared ? &in->common : &in->kv, tensor, t, head, dst32 + t * dim);
        for (int64_t d = 0; d < dim; d++) dst64[t * dim + d] = dst32[t * dim + d];
    }
}

static void load_head(const cpa_bench_options *o, const sample_of_piece *in, int64_t kv_head, head_reference *r) {
    int64_t wide = o->q_heads / o->kv_heads * o->k_dim; /* the heads of a group lie side by side, as one wide head */
    cpa_dtype dtype = (cpa_dtype)o->dtype;
    load_keys(in, CPA_SYNTH_K, kv_head, o->k_dim, r->k, r->k32);
    load_keys(in, CPA_SYNTH_V, kv_head, o->v_dim, r->v, r->v32);
    for (int64_t i = 0; i < in->context * o->v_dim; i++) r->abs32[i] = fabsf(r->v32[i]);
    for (int64_t t = 0; t < in->sampled; t++) {
        const char *row = in->q + (t * o->kv_heads + kv_head) * wide * cpa_dtype_bytes(dtype);
        cpa_reference_widen(row, dtype, wide, r->q32 + t * wide);
        for (int64_t d = 0; d < wide; d++) r->q[t * wide + d] = r->q32[t * wide + d];
    }
}

static int64_t count_wrong(const cpa_bench_options *o, const sample_of_piece *in, int64_t kv_head,
                           const head_reference *r) {
    int64_t group = o->q_heads / o->kv_heads, wrong = 0;
    cpa_dtype dtype = (cpa_dtype)o->dtype;
    float got[CPA_MAX_HEAD_DIM];
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t head_row = row / group * o->q_heads + kv_head * group + row % group;
        cpa_reference_widen(in->out + head_row * o->v_dim * cpa_dtype_bytes(dtype), dtype, o->v_dim, got);
        wrong += row_is_wrong(r, row, got, in->lse[head_row], dtype);
    }
    return wrong;
}

/* Checks one piece in `heads` KV heads from `head` on. */
static cpa_status check_piece(cpa_bench_site *site, const cpa_bench_piece *piece, int64_t shared, int64_t head,
                              int64_t heads, const void *out, const float *lse, int64_t *checked, int64_t *wrong,
                              cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    int64_t group = o->q_heads / o->kv_heads, context = piece->first + piece->count;
    int64_t affordable = cpa_min64(MAX_SAMPLED_TOKENS, max_scores / (group * context) + 1);
    int64_t tokens = cpa_min64(piece->count, affordable);
    sample_of_piece in = {0};
    head_reference r = {0};
    cpa_status status = alloc_head(&r, context, tokens * group, o, err);
    if (status == CPA_OK) status = load_sample(site, piece, shared, tokens, out, lse, &in, err);
    for (int64_t i = 0; status == CPA_OK && i < heads; i++) {
        int64_t kv_head = (head + i) % o->kv_heads;
        load_head(o, &in, kv_head, &r);
        attend_head(&r, o, in.visible, in.positions, kv_head * group);
        *wrong += count_wrong(o, &in, kv_head, &r);
        *checked += r.rows;
    }
    free_sample(&in);
    free_head(&r);
    return status;
}

cpa_status cpa_bench_attend_check(cpa_bench_site *site, const cpa_bench_attend_work *work, const void *out,
                                  const float *lse, int64_t *checked, int64_t *wrong, cpa_error *err) {
    int64_t kv_heads = site->options.kv_heads, n = cpa_min64(work->n_pieces, MAX_SAMPLED_PIECES), head = 0;
    *checked = *wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        const cpa_bench_piece *piece = &work->pieces[sample(i, n, work->n_pieces)];
        int64_t affordable = max_keys / (n * (piece->first + piece->count));
        int64_t heads = cpa_max64(1, cpa_min64(kv_heads, affordable));
        const int64_t shared = cpa_bench_shared_tokens(&site->options, work, piece->sequence);
        CPA_TRY(check_piece(site, piece, shared, head, heads, out, lse, checked, wrong, err));
        head += heads;
    }
    return CPA_OK;
}
