/* bench varlen_attend: attention without a cache over segments of one length, as encoders of images and sound have it.
 * Calls take turns over copies of keys and values, so that they come from memory. */
#include <stdlib.h>

#include <cpattn/varlen.h>

#include "base/check.h"
#include "bench/attend.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "kernels/self_test.h"

typedef struct varlen_state {
    cpa_bench_site *site;
    cpa_bench_attend_work work;
    int64_t keys, copies, k_bytes, v_bytes; /* rows of keys of a copy, how many copies, and bytes of one */
    cpa_attend_plan *plan;
    char *q, *k, *v, *out;
    float *lse;
} varlen_state;

/* Rows of a tensor, for the positions from `first` on, of each sequence one behind the other. */
static cpa_status make_tensor(varlen_state *s, cpa_synth_tensor tensor, int64_t first, int64_t count, int64_t row_bytes,
                              char *memory, cpa_error *err) {
    int64_t *positions = cpa_bench_positions(first, count);
    cpa_status status = positions ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench varlen_attend: no memory");
    for (int64_t i = 0; status == CPA_OK && i < s->work.n_sequences; i++)
        status = cpa_bench_synthesize(s->site, tensor, i, positions, count, memory + i * count * row_bytes, err);
    free(positions);
    return status;
}

static cpa_status make_tensors(varlen_state *s, cpa_error *err) {
    const cpa_attention_shape shape = cpa_bench_shape(&s->site->options);
    const int64_t count = s->work.pieces[0].count, context = s->work.lengths[0], rows = s->work.rows;
    s->keys = s->work.n_sequences * context;
    s->k_bytes = s->keys * cpa_shape_k_bytes(&shape);
    s->v_bytes = s->keys * cpa_shape_v_bytes(&shape);
    s->copies = cpa_bench_copies(s->site, s->k_bytes + s->v_bytes);
    CPA_TRY(cpa_device_alloc(s->site->device, rows * cpa_shape_q_bytes(&shape), (void **)&s->q, err));
    CPA_TRY(cpa_device_alloc(s->site->device, s->copies * s->k_bytes, (void **)&s->k, err));
    CPA_TRY(cpa_device_alloc(s->site->device, s->copies * s->v_bytes, (void **)&s->v, err));
    CPA_TRY(cpa_bench_poisoned(s->site, rows * cpa_shape_out_bytes(&shape), (void **)&s->out, err));
    CPA_TRY(cpa_bench_poisoned(s->site, rows * shape.q_heads * (int64_t)sizeof *s->lse, (void **)&s->lse, err));
    CPA_TRY(make_tensor(s, CPA_SYNTH_Q, context - count, count, cpa_shape_q_bytes(&shape), s->q, err));
    CPA_TRY(make_tensor(s, CPA_SYNTH_K, 0, context, cpa_shape_k_bytes(&shape), s->k, err));
    CPA_TRY(make_tensor(s, CPA_SYNTH_V, 0, context, cpa_shape_v_bytes(&shape), s->v, err));
    CPA_TRY(cpa_bench_replicate(s->site, s->k, s->k_bytes, s->copies * s->k_bytes, err));
    return cpa_bench_replicate(s->site, s->v, s->v_bytes, s->copies * s->v_bytes, err);
}

static cpa_status make_plan(varlen_state *s, cpa_error *err) {
    const cpa_attention_shape shape = cpa_bench_shape(&s->site->options);
    const int64_t n = s->work.n_sequences;
    int64_t *q_starts = calloc((size_t)n + 1, sizeof *q_starts), *k_starts = calloc((size_t)n + 1, sizeof *k_starts);
    cpa_status status = q_starts && k_starts ? cpa_attend_plan_create(s->site->device, &s->plan, err)
                                             : cpa_fail(err, CPA_NO_MEMORY, "bench varlen_attend: no memory");
    for (int64_t i = 0; status == CPA_OK && i < n; i++) {
        q_starts[i + 1] = q_starts[i] + s->work.pieces[i].count;
        k_starts[i + 1] = k_starts[i] + s->work.lengths[i];
    }
    const cpa_varlen_batch batch = {.size = sizeof batch,
                                    .q_heads = shape.q_heads,
                                    .kv_heads = shape.kv_heads,
                                    .k_dim = shape.k_dim,
                                    .v_dim = shape.v_dim,
                                    .n_segments = n,
                                    .q_starts = q_starts,
                                    .k_starts = k_starts,
                                    .causal = !s->site->options.full};
    if (status == CPA_OK) status = cpa_varlen_plan_set(s->plan, &batch, err);
    free(k_starts);
    free(q_starts);
    return status;
}

/* As for attend over pages: multiply-adds of the pairs that the mask shows, and every operand moved once. */
static void count_work(const varlen_state *s, cpa_bench_row *row) {
    const cpa_attention_shape shape = cpa_bench_shape(&s->site->options);
    const double t = (double)s->work.pieces[0].count, context = (double)s->work.lengths[0];
    const double pairs = s->site->options.full ? t * context : t * (context - t) + 0.5 * t * (t + 1);
    row->flops = 2.0 * (double)((shape.k_dim + shape.v_dim) * shape.q_heads * s->work.n_sequences) * pairs;
    row->bytes = (double)s->work.rows * (double)(cpa_shape_q_bytes(&shape) + cpa_shape_out_bytes(&shape)) +
                 (double)(s->k_bytes + s->v_bytes);
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    varlen_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench varlen_attend: no memory");
    *state = s;
    s->site = site;
    site->options.kv_dtype = site->options.dtype;
    CPA_TRY(cpa_bench_attend_work_equal(&site->options, shape, &s->work, err));
    CPA_TRY(cpa_bench_use_path(site, err));
    CPA_TRY(make_tensors(s, err));
    count_work(s, row);
    return make_plan(s, err);
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    varlen_state *s = state;
    const int64_t copy = call % s->copies;
    const cpa_varlen_attend_args args = {.size = sizeof args,
                                         .dtype = (cpa_dtype)s->site->options.dtype,
                                         .q = s->q,
                                         .k = s->k + copy * s->k_bytes,
                                         .v = s->v + copy * s->v_bytes,
                                         .causal = !s->site->options.full,
                                         .state = {.lse = s->lse},
                                         .out = s->out};
    return cpa_bench_enqueued(s->site, cpa_varlen_attend(s->plan, &args, s->site->stream), err);
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    varlen_state *s = state;
    const cpa_bench_attend_check_args args = {.work = &s->work, .out = s->out, .lse = s->lse};
    return cpa_bench_attend_check(s->site, &args, &row->checked, &row->wrong, err);
}

static void release(void *state) {
    varlen_state *s = state;
    if (!s) return;
    cpa_attend_plan_destroy(s->plan);
    void *const used[] = {s->lse, s->out, s->v, s->k, s->q};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_device_free(s->site->device, used[i]);
    cpa_bench_attend_work_release(&s->work);
    free(s);
}

#define ENCODER(shape, dim) shape ":mask=full:q-heads=16:kv-heads=16:head-dim=" #dim

const cpa_bench cpa_bench_varlen_attend = {
    .name = "varlen_attend",
    .dims = "segments x rows x keys",
    .n_dims = 3,
    .shapes_host = "4x577x577:mask=full:head-dim=64,4x729x729:mask=full:head-dim=72,4x1x1500:mask=full:head-dim=64",
    .shapes_cuda = ENCODER("16x4Kx4K", 64) "," ENCODER("16x4Kx4K", 72) "," ENCODER("16x4Kx4K", 80) "," ENCODER(
        "16x4Kx4K", 96) "," ENCODER("16x4Kx4K", 128) "," ENCODER("64x577x577", 64) "," ENCODER("64x729x729", 72),
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
