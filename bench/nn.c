/* bench rmsnorm, swiglu, qk_norm_rope and sample: operators beside attention that only move memory. */
#include "base/check.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/nn_rows.h"

static const float temperature = 0.7f, top_p = 0.9f;
static const int32_t top_k = 50;

/* ---- rmsnorm ---- */

static cpa_status call_rmsnorm(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    /* The residual has grown by x in each call: what is normed is what the last one left. */
    const cpa_rmsnorm_args args = {.size = sizeof args,
                                   .rows = on_host ? s->period : s->rows,
                                   .width = (int32_t)s->in.width,
                                   .dtype = s->in.dtype,
                                   .x = on_host ? s->residual.host : s->in.device,
                                   .residual = on_host ? NULL : s->residual.device,
                                   .weight = cpa_bench_memory_of(&s->weight, on_host),
                                   .eps = 1e-5f,
                                   .out = cpa_bench_memory_of(&s->out, on_host)};
    return cpa_rmsnorm(&args, stream);
}

static cpa_status prepare_rmsnorm(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                  cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    const int64_t width = shape[1];
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_rmsnorm, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, width, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->residual, dtype, s->rows, width, 1, 2, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, dtype, 1, width, 1, 3, err));
    row->bytes = 4.0 * (double)(s->rows * cpa_bench_row_bytes(&s->in));
    return cpa_bench_make_out(s, dtype, width, err);
}

static cpa_status check_rmsnorm(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    CPA_TRY(cpa_bench_copy(s->site, s->residual.host, s->residual.device, s->period * cpa_bench_row_bytes(&s->residual),
                           err));
    return cpa_bench_nn_check(s, row, err);
}

const cpa_bench cpa_bench_rmsnorm = {
    .name = "rmsnorm",
    .dims = "rows x width",
    .n_dims = 2,
    .shapes_host = "64x4K",
    .shapes_cuda = "1x4K,64x4K,8Kx4K,32Kx4K,16Kx8K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_rmsnorm,
    .run = cpa_bench_nn_run,
    .check = check_rmsnorm,
    .release = cpa_bench_nn_release,
};

/* ---- swiglu ---- */

static cpa_status call_swiglu(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_swiglu_args args = {.size = sizeof args,
                                  .rows = on_host ? s->period : s->rows,
                                  .width = (int32_t)s->out.width,
                                  .dtype = s->out.dtype,
                                  .gate_up = cpa_bench_memory_of(&s->in, on_host),
                                  .out = cpa_bench_memory_of(&s->out, on_host)};
    return cpa_swiglu(&args, stream);
}

static cpa_status prepare_swiglu(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_swiglu, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, 2 * shape[1], 2, 1, err));
    row->bytes = 1.5 * (double)(s->rows * cpa_bench_row_bytes(&s->in));
    return cpa_bench_make_out(s, dtype, shape[1], err);
}

const cpa_bench cpa_bench_swiglu = {
    .name = "swiglu",
    .dims = "rows x width",
    .n_dims = 2,
    .shapes_host = "64x4K",
    .shapes_cuda = "1x14K,64x14K,4Kx14K,16Kx14K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_swiglu,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};

/* ---- qk_norm_rope ---- */

static cpa_status call_qk_norm_rope(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_qk_norm_rope_args args = {
        .size = sizeof args,
        .rows = on_host ? s->period : s->rows,
        .shape = s->shape,
        .qkv = cpa_bench_memory_of(&s->in, on_host),
        .q_weight = cpa_bench_memory_of(&s->weight, on_host),
        .k_weight = cpa_bench_memory_of(&s->weight, on_host),
        .eps = 1e-5f,
        .rope = {.table = cpa_bench_memory_of(&s->table, on_host), .max_position = s->rows, .dim = s->shape.k_dim},
        .positions = cpa_bench_memory_of(&s->positions, on_host),
        .q = cpa_bench_memory_of(&s->out, on_host),
        .slot_mapping = on_host ? NULL : s->positions.device,
        .kv = s->cache,
    };
    return cpa_qk_norm_rope(&args, stream);
}

static cpa_status prepare_qk_norm_rope(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                       cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_qk_norm_rope, &s, state, err));
    s->shape = cpa_bench_shape(&site->options);
    const int64_t q = (int64_t)s->shape.q_heads * s->shape.k_dim;
    const int64_t kv = (int64_t)s->shape.kv_heads * (s->shape.k_dim + s->shape.v_dim);
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, q + kv, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, dtype, 1, s->shape.k_dim, 1, 2, err));
    CPA_TRY(cpa_bench_make_positions(s, s->shape.k_dim, err));
    const int64_t blocks = (s->rows + site->options.block_size - 1) / site->options.block_size;
    CPA_TRY(cpa_bench_make_cache(site, blocks, &s->cache, err));
    row->bytes = (double)s->rows * (double)((2 * q + kv) * cpa_dtype_bytes(dtype) +
                                            cpa_shape_row_bytes(&s->shape, CPA_KEYS) * s->shape.kv_heads +
                                            cpa_shape_row_bytes(&s->shape, CPA_VALUES) * s->shape.kv_heads);
    return cpa_bench_make_out(s, dtype, q, err);
}

const cpa_bench cpa_bench_qk_norm_rope = {
    .name = "qk_norm_rope",
    .dims = "rows",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,8K,32K,32K:kv-cache-dtype=fp8_e4m3",
    .checked = "queries of up to 16 rows",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_qk_norm_rope,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};

/* ---- sample ---- */

static cpa_status call_sample(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_sample_args args = {.size = sizeof args,
                                  .rows = on_host ? s->period : s->rows,
                                  .vocabulary = s->in.width,
                                  .logits = cpa_bench_memory_of(&s->in, on_host),
                                  .temperature = cpa_bench_memory_of(&s->numbers[0], on_host),
                                  .top_p = cpa_bench_memory_of(&s->numbers[1], on_host),
                                  .top_k = cpa_bench_memory_of(&s->counts, on_host),
                                  .tokens = cpa_bench_memory_of(&s->out, on_host)};
    return cpa_sample(&args, stream);
}

static cpa_status prepare_sample(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_sample, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, CPA_F32, s->rows, shape[1], 3, 1, err));
    CPA_TRY(cpa_bench_make_numbers(s, &s->numbers[0], &temperature, err));
    CPA_TRY(cpa_bench_make_numbers(s, &s->numbers[1], &top_p, err));
    CPA_TRY(cpa_bench_make_numbers(s, &s->counts, &top_k, err));
    row->bytes = (double)(s->rows * cpa_bench_row_bytes(&s->in));
    return cpa_bench_make_out(s, CPA_F32, 1, err); /* tokens, of as many bytes */
}

static cpa_status check_sample(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    const uint32_t *got = s->host_out, *want = s->out.host;
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++) row->wrong += got[i] != want[i];
    return CPA_OK;
}

const cpa_bench cpa_bench_sample = {
    .name = "sample",
    .dims = "rows x vocabulary",
    .n_dims = 2,
    .shapes_host = "1x32K",
    .shapes_cuda = "1x128256,32x128256,256x128256",
    .checked = "tokens of up to 16 rows",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_sample,
    .run = cpa_bench_nn_run,
    .check = check_sample,
    .release = cpa_bench_nn_release,
};
