/* bench q_norm_rope_kv_write, inverse_rope_quant and compress_write: attention over entries of 512, which only moves
 * memory. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/compress.h>

#include "base/check.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/nn_rows.h"

enum { DIM = CPA_ENTRY_DIM, ROTATED = 64, ENTRY_BYTES = 584, ROW_BYTES = 576 };
static const float eps = 1e-6f;

static cpa_rope rope_of(const cpa_bench_nn *s, int on_host, int64_t positions) {
    return (cpa_rope){.table = cpa_bench_memory_of(&s->table, on_host),
                      .max_position = positions,
                      .dim = ROTATED,
                      .first = DIM - ROTATED,
                      .interleaved = 1};
}

/* Entries in blocks; on the host none, or as many as are compared. */
static cpa_kv_view cache_of(void *memory, int32_t block_size, int64_t num_blocks) {
    return (cpa_kv_view){.k = memory,
                         .dtype = CPA_FP8_T64,
                         .block_size = block_size,
                         .num_blocks = num_blocks,
                         .kv_heads = 1,
                         .k_dim = DIM,
                         .v_dim = DIM,
                         .v_in_k = 1};
}

/* ---- q_norm_rope_kv_write ---- */

static cpa_status call_q(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    static const int64_t none[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const cpa_q_norm_rope_kv_write_args args = {.size = sizeof args,
                                                .tokens = on_host ? s->period : s->rows,
                                                .heads = s->shape.q_heads,
                                                .out_heads = s->shape.q_heads,
                                                .dtype = s->in.dtype,
                                                .q = cpa_bench_memory_of(&s->in, on_host),
                                                .kv_rows = cpa_bench_memory_of(&s->residual, on_host),
                                                .eps = eps,
                                                .rope = rope_of(s, on_host, s->rows),
                                                .positions = cpa_bench_memory_of(&s->positions, on_host),
                                                .q_out = cpa_bench_memory_of(&s->out, on_host),
                                                .slots = on_host ? none : s->positions.device,
                                                .kv = on_host ? cache_of(NULL, 1, 0) : s->cache};
    return cpa_q_norm_rope_kv_write(&args, stream);
}

static cpa_status prepare_q(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                            cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    const int32_t block_size = (int32_t)site->options.block_size;
    const int64_t blocks = (shape[0] + block_size - 1) / block_size, width = shape[1] * DIM;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_q, &s, state, err));
    s->shape.q_heads = (int32_t)shape[1];
    s->cache = cache_of(NULL, block_size, blocks);
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, width, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->residual, dtype, s->rows, DIM, 1, 2, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    CPA_TRY(cpa_bench_poisoned(site, blocks * cpa_kv_block_bytes(CPA_FP8_T64, CPA_KEYS, 0, block_size, 1, DIM),
                               &s->cache.k, err));
    CPA_TRY(cpa_bench_make_out(s, dtype, width, err));
    row->bytes =
        (double)s->rows * (double)(2 * cpa_bench_row_bytes(&s->in) + cpa_bench_row_bytes(&s->residual) + ENTRY_BYTES);
    return CPA_OK;
}

const cpa_bench cpa_bench_q_norm_rope_kv_write = {
    .name = "q_norm_rope_kv_write",
    .dims = "rows x heads",
    .n_dims = 2,
    .shapes_host = "64x8",
    .shapes_cuda = "1x64,64x64,4Kx64,8Kx128",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_q,
    .run = cpa_bench_nn_run,
    .check = cpa_bench_nn_check,
    .release = cpa_bench_nn_release,
};

/* ---- inverse_rope_quant: one group, so that codes are rows ---- */

static cpa_status call_results(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_inverse_rope_quant_args args = {.size = sizeof args,
                                              .rows = on_host ? s->period : s->rows,
                                              .heads = s->shape.q_heads,
                                              .groups = 1,
                                              .dtype = s->in.dtype,
                                              .o = cpa_bench_memory_of(&s->in, on_host),
                                              .rope = rope_of(s, on_host, s->rows),
                                              .positions = cpa_bench_memory_of(&s->positions, on_host),
                                              .codes = cpa_bench_memory_of(&s->out, on_host),
                                              .scales = cpa_bench_memory_of(&s->scales, on_host)};
    return cpa_inverse_rope_quant(&args, stream);
}

static cpa_status prepare_results(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                  cpa_error *err) {
    const int64_t width = shape[1] * DIM, scales = width / 128;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_results, &s, state, err));
    s->shape.q_heads = (int32_t)shape[1];
    CPA_TRY(cpa_bench_make_noise(s, &s->in, (cpa_dtype)site->options.dtype, s->rows, width, 1, 1, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->scales, CPA_F32, s->rows, 4 * scales, 1, 2, err)); /* for four rows at least */
    CPA_TRY(cpa_bench_make_out(s, CPA_FP8_E4M3, width, err));
    row->bytes = (double)s->rows * (double)(cpa_bench_row_bytes(&s->in) + width + 4 * scales);
    return CPA_OK;
}

/* Counts the rows of the first period that are not the host's, so many bytes each, where either side has them. */
static cpa_status count_others(cpa_bench_nn *s, int64_t bytes, int64_t want_stride, cpa_bench_row *row,
                               cpa_error *err) {
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++)
        row->wrong +=
            memcmp((char *)s->host_out + i * bytes, (char *)s->out.host + i * want_stride, (size_t)bytes) != 0;
    return CPA_OK;
}

static cpa_status check_results(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    return count_others(s, s->out.width, s->out.width, row, err);
}

const cpa_bench cpa_bench_inverse_rope_quant = {
    .name = "inverse_rope_quant",
    .dims = "rows x heads",
    .n_dims = 2,
    .shapes_host = "64x8",
    .shapes_cuda = "1x64,64x64,4Kx64,8Kx128",
    .checked = "rows, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_results,
    .run = cpa_bench_nn_run,
    .check = check_results,
    .release = cpa_bench_nn_release,
};

/* ---- compress_write: all entries of one sequence; with overlap where an entry has 4 tokens ---- */

/* Entries in blocks of 16 on the device, of which the first one is compared; on the host each is a block. */
enum { BLOCK = 16, BLOCK_OF_ONE = 2 * ROW_BYTES };

static cpa_compress_state state_of(const cpa_bench_nn *s, int on_host) {
    const int32_t ratio = s->shape.kv_heads, overlap = ratio == 4;
    const int64_t tokens = s->rows * ratio;
    return (cpa_compress_state){.rows = cpa_bench_memory_of(&s->in, on_host),
                                .num_blocks = on_host ? 1 : (tokens + s->period - 1) / s->period,
                                .block_size = (int32_t)s->period,
                                .ratio = ratio,
                                .overlap = overlap,
                                .head = DIM};
}

/* Rows of the state repeat after a period, which is a block: the tables of the host name the only one. */
static cpa_status call_compress(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_compress_state state = state_of(s, on_host);
    const int64_t tokens = s->rows * state.ratio;
    char *memory = cpa_bench_memory_of(&s->out, on_host);
    const int64_t *positions = cpa_bench_memory_of(&s->positions, on_host);
    const int32_t *tables = cpa_bench_memory_of(&s->counts, on_host);
    const cpa_compress_write_args args = {
        .size = sizeof args,
        .tokens = on_host ? s->period * state.ratio : tokens,
        .state = state,
        .positions = positions,
        .sequences = tables + (tokens + s->period - 1) / s->period,
        .tables = tables,
        .n_sequences = 1,
        .table_stride = (tokens + s->period - 1) / s->period,
        .weight = cpa_bench_memory_of(&s->weight, on_host),
        .eps = eps,
        .rope = rope_of(s, on_host, tokens),
        .slots = positions + tokens,
        .kv = on_host ? cache_of(memory, 1, s->period) : cache_of(memory, BLOCK, (s->rows + BLOCK - 1) / BLOCK)};
    return cpa_compress_write(&args, stream);
}

/* Positions and slots of all tokens; tables, and behind them sequences; the table of angles. */
static cpa_status make_tokens(cpa_bench_nn *s, int64_t tokens, int32_t ratio, cpa_error *err) {
    const int64_t blocks = (tokens + s->period - 1) / s->period, n = blocks + tokens;
    const cpa_rope_config config = {.size = sizeof config, .dim = ROTATED, .theta = 160000, .max_position = tokens};
    int64_t *positions = s->positions.host = malloc((size_t)(2 * tokens) * sizeof *positions);
    int32_t *device_tables = malloc((size_t)n * sizeof *device_tables), *tables = s->counts.host = calloc((size_t)n, 4);
    s->table.host = malloc((size_t)(tokens * ROTATED) * sizeof(float));
    cpa_status status = CPA_OK;
    if (!positions || !tables || !device_tables || !s->table.host)
        CPA_TRY_GOTO(cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for positions"), done);
    for (int64_t i = 0; i < tokens; i++) positions[i] = i, positions[tokens + i] = i / ratio;
    for (int64_t i = 0; i < n; i++) device_tables[i] = i < blocks ? (int32_t)i : 0;
    CPA_TRY_GOTO(cpa_rope_table(&config, s->table.host, err), done);
    CPA_TRY_GOTO(cpa_bench_upload(s->site, s->table.host, tokens * ROTATED * 4, &s->table.device, err), done);
    CPA_TRY_GOTO(cpa_bench_upload(s->site, positions, tokens * 16, &s->positions.device, err), done);
    CPA_TRY_GOTO(cpa_bench_upload(s->site, device_tables, n * 4, &s->counts.device, err), done);
done:
    free(device_tables);
    return status;
}

static cpa_status prepare_compress(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                   cpa_error *err) {
    const int32_t ratio = (int32_t)shape[1];
    const int64_t tokens = shape[0] * ratio;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_compress, &s, state, err));
    s->shape.kv_heads = ratio;
    const int64_t blocks = (tokens + s->period - 1) / s->period, width = ratio == 4 ? 4 * DIM : 2 * DIM;
    CPA_TRY(cpa_bench_make_noise(s, &s->in, CPA_F32, blocks * s->period, width, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, CPA_F32, 1, DIM, 1, 2, err));
    CPA_TRY(make_tokens(s, tokens, ratio, err));
    CPA_TRY(cpa_bench_make_out(s, CPA_FP8_E4M3, BLOCK_OF_ONE, err));
    row->bytes = (double)tokens * (double)cpa_bench_row_bytes(&s->in) + (double)s->rows * ENTRY_BYTES;
    return CPA_OK;
}

static cpa_status check_compress(void *state, cpa_bench_row *row, cpa_error *err) {
    return count_others(state, ROW_BYTES, BLOCK_OF_ONE, row, err);
}

const cpa_bench cpa_bench_compress_write = {
    .name = "compress_write",
    .dims = "entries x ratio",
    .n_dims = 2,
    .shapes_host = "16x4",
    .shapes_cuda = "16x4,2Kx4,16Kx4,256x128,1Kx128",
    .checked = "entries, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_compress,
    .run = cpa_bench_nn_run,
    .check = check_compress,
    .release = cpa_bench_nn_release,
};
