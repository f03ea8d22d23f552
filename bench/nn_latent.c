/* bench rmsnorm_codes, rmsnorm2, rotate and latent_norm_rope: norms and rotations of layers with latents and 8-bit
 * products, which only move memory. */
#include <math.h>
#include <stdlib.h>

#include "base/check.h"
#include "bench/memory.h"
#include "bench/nn_rows.h"

/* Widths of DeepSeek V3: the latents of queries and of keys, and the rotated part of a head behind the other. */
enum { Q_LATENT = 1536, LATENT = 512, ROTATED = 64, NOPE = 128, GROUP = 128 };
static const float eps = 1e-6f;

/* ---- rmsnorm_codes: FP8 codes of groups of 128, of rows with a residual ---- */

static cpa_status call_codes(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    /* The residual has grown by x in each call: what is normed is what the last one left. */
    const cpa_rmsnorm_args args = {.size = sizeof args,
                                   .rows = on_host ? s->period : s->rows,
                                   .width = (int32_t)s->in.width,
                                   .dtype = s->in.dtype,
                                   .x = on_host ? s->residual.host : s->in.device,
                                   .residual = on_host ? NULL : s->residual.device,
                                   .weight = cpa_bench_memory_of(&s->weight, on_host),
                                   .eps = eps,
                                   .out = cpa_bench_memory_of(&s->out, on_host),
                                   .codes = CPA_NORM_FP8_GROUP,
                                   .group = GROUP,
                                   .scales = cpa_bench_memory_of(&s->scales, on_host)};
    return cpa_rmsnorm(&args, stream);
}

static cpa_status prepare_codes(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    const int64_t width = shape[1], groups = (width + GROUP - 1) / GROUP;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_codes, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, width, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->residual, dtype, s->rows, width, 1, 2, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, dtype, 1, width, 1, 3, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->scales, CPA_F32, s->rows, groups, 1, 4, err));
    row->bytes = (double)s->rows * (double)(3 * cpa_bench_row_bytes(&s->in) + width + 4 * groups);
    return cpa_bench_make_out(s, CPA_FP8_E4M3, width, err);
}

/* Whether two codes, as signed magnitudes, are at most one apart. */
static bool are_neighbours(uint8_t a, uint8_t b) {
    const int x = a & 0x80 ? -(a & 0x7f) : a, y = b & 0x80 ? -(b & 0x7f) : b;
    return abs(x - y) <= 1;
}

/* Rows whose codes are more than a step from the host's: a step apart are those beside a tie. */
static cpa_status check_codes(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    const uint8_t *got = s->host_out, *want = s->out.host;
    CPA_TRY(cpa_bench_copy(s->site, s->residual.host, s->residual.device, s->period * cpa_bench_row_bytes(&s->residual),
                           err));
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++) {
        bool is_wrong = false;
        for (int64_t c = 0; c < s->out.width; c++)
            is_wrong |= !are_neighbours(got[i * s->out.width + c], want[i * s->out.width + c]);
        row->wrong += is_wrong;
    }
    return CPA_OK;
}

const cpa_bench cpa_bench_rmsnorm_codes = {
    .name = "rmsnorm_codes",
    .dims = "rows x width",
    .n_dims = 2,
    .shapes_host = "64x4K",
    .shapes_cuda = "1x7K,64x7K,8Kx4K,8Kx7K,32Kx7K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_codes,
    .run = cpa_bench_nn_run,
    .check = check_codes,
    .release = cpa_bench_nn_release,
};

/* ---- rmsnorm2: latents of queries and keys, slices of one product ---- */

static cpa_status call_rmsnorm2(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const int32_t widths[2] = {Q_LATENT, LATENT};
    cpa_rmsnorm2_args args = {
        .size = sizeof args, .rows = on_host ? s->period : s->rows, .dtype = s->in.dtype, .eps = eps};
    for (int i = 0; i < 2; i++) {
        const int64_t first = i * Q_LATENT * cpa_dtype_bytes(s->in.dtype);
        args.parts[i] = (cpa_norm_rows){.x = (char *)cpa_bench_memory_of(&s->in, on_host) + first,
                                        .x_stride = s->in.width,
                                        .weight = cpa_bench_memory_of(&s->weight, on_host),
                                        .out = (char *)cpa_bench_memory_of(&s->out, on_host) + first,
                                        .out_stride = s->out.width,
                                        .width = widths[i]};
    }
    return cpa_rmsnorm2(&args, stream);
}

static cpa_status prepare_rmsnorm2(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                   cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_rmsnorm2, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, Q_LATENT + LATENT + ROTATED, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, dtype, 1, Q_LATENT, 1, 2, err));
    CPA_TRY(cpa_bench_make_out(s, dtype, Q_LATENT + LATENT, err));
    row->bytes = 2.0 * (double)(s->rows * cpa_bench_row_bytes(&s->out));
    return CPA_OK;
}

const cpa_bench cpa_bench_rmsnorm2 = {
    .name = "rmsnorm2",
    .dims = "rows",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,8K,32K",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_rmsnorm2,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};

/* ---- rotate: the last 64 elements of the heads of queries, to another place ---- */

static cpa_status call_rotate(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_rotate_args args = {
        .size = sizeof args,
        .rows = on_host ? s->period : s->rows,
        .heads = s->shape.q_heads,
        .dim = ROTATED,
        .dtype = s->in.dtype,
        .x = (char *)cpa_bench_memory_of(&s->in, on_host) + NOPE * cpa_dtype_bytes(s->in.dtype),
        .x_stride = s->in.width,
        .x_head_stride = NOPE + ROTATED,
        .rope = {.table = cpa_bench_memory_of(&s->table, on_host),
                 .max_position = s->rows,
                 .dim = ROTATED,
                 .interleaved = 1},
        .positions = cpa_bench_memory_of(&s->positions, on_host),
        .out = cpa_bench_memory_of(&s->out, on_host),
    };
    return cpa_rotate(&args, stream);
}

static cpa_status prepare_rotate(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_rotate, &s, state, err));
    s->shape.q_heads = (int32_t)shape[1];
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, shape[1] * (NOPE + ROTATED), 1, 1, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    CPA_TRY(cpa_bench_make_out(s, dtype, shape[1] * ROTATED, err));
    row->bytes = 2.0 * (double)(s->rows * cpa_bench_row_bytes(&s->out));
    return CPA_OK;
}

const cpa_bench cpa_bench_rotate = {
    .name = "rotate",
    .dims = "rows x heads",
    .n_dims = 2,
    .shapes_host = "64x16",
    .shapes_cuda = "1x128,64x128,8Kx128,32Kx16",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_rotate,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};

/* ---- latent_norm_rope: rows of latents into pages of the cache dtype ---- */

static cpa_status call_latent(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_latent_norm_rope_args args = {
        .size = sizeof args,
        .rows = on_host ? s->period : s->rows,
        .shape = s->shape,
        .x = cpa_bench_memory_of(&s->in, on_host),
        .weight = cpa_bench_memory_of(&s->weight, on_host),
        .eps = eps,
        .rope = {.table = cpa_bench_memory_of(&s->table, on_host),
                 .max_position = s->rows,
                 .dim = ROTATED,
                 .interleaved = 1},
        .positions = cpa_bench_memory_of(&s->positions, on_host),
        .out = cpa_bench_memory_of(&s->out, on_host),
        .slot_mapping = on_host ? NULL : s->positions.device,
        .kv = s->cache,
    };
    return cpa_latent_norm_rope(&args, stream);
}

static cpa_status prepare_latent(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    const int64_t blocks = (shape[0] + o->block_size - 1) / o->block_size;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_latent, &s, state, err));
    s->shape = (cpa_attention_shape){.kv_heads = 1,
                                     .k_dim = LATENT + ROTATED,
                                     .v_dim = LATENT,
                                     .v_in_k = 1,
                                     .dtype = (cpa_dtype)o->dtype,
                                     .kv_dtype = (cpa_dtype)o->kv_dtype};
    s->cache = (cpa_kv_view){.dtype = s->shape.kv_dtype,
                             .block_size = (int32_t)o->block_size,
                             .num_blocks = blocks,
                             .kv_heads = 1,
                             .k_dim = s->shape.k_dim,
                             .v_dim = LATENT,
                             .v_in_k = 1};
    CPA_TRY(cpa_bench_make_noise(s, &s->in, s->shape.dtype, s->rows, LATENT + ROTATED, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, s->shape.dtype, 1, LATENT, 1, 2, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    const int64_t block = cpa_shape_block_bytes(&s->shape, CPA_KEYS, (int32_t)o->block_size);
    CPA_TRY(cpa_bench_poisoned(site, blocks * block, &s->cache.k, err));
    CPA_TRY(cpa_bench_make_out(s, s->shape.dtype, LATENT + ROTATED, err));
    row->bytes = (double)s->rows * (double)(2 * cpa_bench_row_bytes(&s->in) + cpa_shape_row_bytes(&s->shape, CPA_KEYS));
    return CPA_OK;
}

const cpa_bench cpa_bench_latent_norm_rope = {
    .name = "latent_norm_rope",
    .dims = "rows",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,8K,64K,64K:kv-cache-dtype=fp8_t128",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_latent,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};
