/* The check of bench attend: sampled rows beside the float64 reference (src/check/cases/judge.h). */
#include <stdlib.h>

#include "base/check.h"
#include "base/min_max.h"
#include "base/threads.h"
#include "bench/attend.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "src/check/cases/judge.h"

enum {
    MAX_SAMPLED_PIECES = 4,
    MAX_SAMPLED_TOKENS = 64, /* of a piece, with all query heads of a sampled KV head */
};
static const int64_t max_scores = 1 << 21; /* of one KV head of a piece */
static const int64_t max_keys = 1 << 19;   /* of all sampled pieces and KV heads */

/* Token i of n sampled ones among `tokens`, evenly spaced, the last one included. */
static int64_t sample(int64_t i, int64_t n, int64_t tokens) {
    return (i + 1) * tokens / n - 1;
}

/* The sampled tokens of one piece on the host: keys and values of its context, queries, and results. */
typedef struct sample_of_piece {
    cpa_kv_view kv, common; /* keys and values of the sequence; and of the tokens shared with sequence 0 */
    int64_t shared;         /* tokens shared with sequence 0 */
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
static cpa_status load_sample(cpa_bench_site *site, const cpa_bench_attend_check_args *args,
                              const cpa_bench_piece *piece, int64_t sampled, sample_of_piece *in, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    size_t heads = (size_t)(sampled * o->q_heads), element = (size_t)cpa_dtype_bytes((cpa_dtype)o->dtype);
    *in = (sample_of_piece){
        .q = malloc(heads * (size_t)o->k_dim * element),
        .out = malloc(heads * (size_t)o->v_dim * element),
        .lse = malloc(heads * sizeof *in->lse),
        .context = piece->first + piece->count,
        .sampled = sampled,
        .shared = cpa_bench_shared_tokens(o, args->work, piece->sequence),
    };
    if (!in->q || !in->out || !in->lse) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for samples");
    for (int64_t i = 0; i < sampled; i++) {
        int64_t token = sample(i, sampled, piece->count);
        in->positions[i] = piece->first + token;
        in->row[i] = piece->row + token;
        in->visible[i] = o->full ? in->context : in->positions[i] + 1;
    }
    CPA_TRY(load_results(site, args->out, args->lse, in, err));
    CPA_TRY(load_queries(site, piece->sequence, in->positions, in, err));
    if (in->shared > 0) CPA_TRY(cpa_bench_recall(site, 0, 0, in->shared, &in->common, err));
    return cpa_bench_recall(site, piece->sequence, 0, in->context, &in->kv, err);
}

/* A KV head of a piece as floats, and the rows of its query heads. */
typedef struct head_check {
    const cpa_bench_options *options;
    const cpa_case_score *score;
    const cpa_bench_piece *piece;
    const sample_of_piece *in;
    int64_t kv_head, group;
    float *k, *v; /* [context, dim] */
    int *wrong;   /* [sampled, group] whether a row is */
} head_check;

static void load_keys(const sample_of_piece *in, cpa_synth_tensor tensor, int64_t head, int64_t dim, float *out) {
    for (int64_t t = 0; t < in->context; t++)
        cpa_bench_recalled_row(t < in->shared ? &in->common : &in->kv, tensor, t, head, out + t * dim);
}

static void judge_row(void *ctx, int64_t item, int32_t thread) {
    const head_check *c = ctx;
    const cpa_bench_options *o = c->options;
    const int64_t token = item / c->group, head = c->kv_head * c->group + item % c->group;
    const int64_t at = token * o->q_heads + head, element = cpa_dtype_bytes((cpa_dtype)o->dtype);
    cpa_case_expected expected;
    (void)thread;
    cpa_case_expect(&(cpa_case_row){.dtype = (cpa_dtype)o->dtype,
                                    .k_dim = (int32_t)o->k_dim,
                                    .v_dim = (int32_t)o->v_dim,
                                    .q = c->in->q + at * o->k_dim * element,
                                    .q_dtype = (cpa_dtype)o->dtype,
                                    .rounds_rows = cpa_dtype_is_turboquant((cpa_dtype)o->kv_dtype),
                                    .k = c->k,
                                    .v = o->v_in_k ? c->k : c->v,
                                    .k_stride = o->k_dim,
                                    .v_stride = o->v_in_k ? o->k_dim : o->v_dim,
                                    .scale = (double)cpa_bench_scale(o),
                                    .n_keys = c->in->visible[token],
                                    .index = c->in->positions[token],
                                    .score = c->score,
                                    .score_row = c->piece->row + c->in->positions[token] - c->piece->first,
                                    .head = (int32_t)head,
                                    .skip = o->skip_tiles},
                    &expected);
    const cpa_case_result got = {
        .lse = &c->in->lse[at], .out = c->in->out + at * o->v_dim * element, .out_dtype = (cpa_dtype)o->dtype};
    c->wrong[item] = !cpa_case_is_right(&expected, &got, NULL);
}

/* Checks one piece in `heads` KV heads from `head` on. */
static cpa_status check_piece(cpa_bench_site *site, const cpa_bench_attend_check_args *args,
                              const cpa_bench_piece *piece, int64_t head, int64_t heads, cpa_threads *threads,
                              int64_t *checked, int64_t *wrong, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    const int64_t group = o->q_heads / o->kv_heads, context = piece->first + piece->count;
    const int64_t affordable = cpa_min64(MAX_SAMPLED_TOKENS, max_scores / (group * context) + 1);
    const int64_t rows = cpa_min64(piece->count, affordable) * group;
    sample_of_piece in = {0};
    head_check c = {.options = o,
                    .score = args->score,
                    .piece = piece,
                    .in = &in,
                    .group = group,
                    .k = malloc((size_t)(context * o->k_dim) * sizeof *c.k),
                    .v = malloc((size_t)(context * o->v_dim) * sizeof *c.v),
                    .wrong = calloc((size_t)rows, sizeof *c.wrong)};
    cpa_status status = c.k && c.v && c.wrong
                            ? load_sample(site, args, piece, rows / group, &in, err)
                            : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for %lld keys", (long long)context);
    for (int64_t i = 0; status == CPA_OK && i < heads; i++) {
        c.kv_head = (head + i) % o->kv_heads;
        load_keys(&in, CPA_SYNTH_K, c.kv_head, o->k_dim, c.k);
        if (!o->v_in_k) load_keys(&in, CPA_SYNTH_V, c.kv_head, o->v_dim, c.v);
        cpa_threads_run(threads, rows, judge_row, &c, NULL);
        for (int64_t row = 0; row < rows; row++) *wrong += c.wrong[row];
        *checked += rows;
    }
    free_sample(&in);
    free(c.wrong);
    free(c.v);
    free(c.k);
    return status;
}

cpa_status cpa_bench_attend_check(cpa_bench_site *site, const cpa_bench_attend_check_args *args, int64_t *checked,
                                  int64_t *wrong, cpa_error *err) {
    const cpa_bench_attend_work *work = args->work;
    int64_t kv_heads = site->options.kv_heads, n = cpa_min64(work->n_pieces, MAX_SAMPLED_PIECES), head = 0;
    cpa_threads *threads = NULL;
    cpa_status status = cpa_threads_create((int32_t)site->options.threads, NULL, 0, &threads, err);
    *checked = *wrong = 0;
    for (int64_t i = 0; status == CPA_OK && i < n; i++) {
        const cpa_bench_piece *piece = &work->pieces[sample(i, n, work->n_pieces)];
        int64_t affordable = max_keys / (n * (piece->first + piece->count));
        int64_t heads = cpa_max64(1, cpa_min64(kv_heads, affordable));
        status = check_piece(site, args, piece, head, heads, threads, checked, wrong, err);
        head += heads;
    }
    cpa_threads_destroy(threads);
    return status;
}
