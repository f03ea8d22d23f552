/* bench index_write, index_q and index_logits: the indexer of DeepSeek V3.2, 64 heads of 128 over codes of e4m3 in pages.
 * Keys repeat after PERIOD_BLOCKS blocks and rows of queries after PERIOD_ROWS; some logits are computed again, in
 * float64. Of index_logits all rows see all keys. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/indexer.h>

#include "base/check.h"
#include "base/convert.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/nn_rows.h"
#include "bench/noise.h"

enum {
    HEADS = 64,
    DIM = 128,
    ROTATED = 64,
    PERIOD_BLOCKS = 16,
    PERIOD_ROWS = 61,
    CHECKED_ROWS = 16,
    CHECKED_KEYS = 64
};

/* ---- index_write and index_q ---- */

static cpa_rope rope_of(const cpa_bench_nn *s, int on_host) {
    return (cpa_rope){.table = cpa_bench_memory_of(&s->table, on_host), .max_position = s->rows, .dim = ROTATED};
}

static int64_t blocks_of(const cpa_bench_nn *s, int64_t rows) {
    return (rows + s->site->options.block_size - 1) / s->site->options.block_size;
}
static int64_t block_bytes_of(const cpa_bench_nn *s) {
    return cpa_kv_block_bytes(CPA_FP8_E4M3, CPA_KEYS, 0, (int32_t)s->site->options.block_size, 1, DIM);
}

static cpa_status call_write(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    cpa_index_write_args args = {.size = sizeof args,
                                 .tokens = on_host ? s->period : s->rows,
                                 .dtype = s->in.dtype,
                                 .k = cpa_bench_memory_of(&s->in, on_host),
                                 .gamma = cpa_bench_memory_of(&s->weight, on_host),
                                 .beta = cpa_bench_memory_of(&s->weight, on_host),
                                 .eps = 1e-6f,
                                 .rope = rope_of(s, on_host),
                                 .positions = cpa_bench_memory_of(&s->positions, on_host),
                                 .slot_mapping = cpa_bench_memory_of(&s->positions, on_host),
                                 .cache = {.kv = s->cache, .hadamard = 1},
                                 .scales_pow2 = 1};
    args.cache.kv.k = cpa_bench_memory_of(&s->out, on_host);
    if (on_host) args.cache.kv.num_blocks = blocks_of(s, s->period);
    return cpa_index_write(&args, stream);
}

/* s->out: blocks of the cache, poisoned on the device; on the host those of the first period, whose bytes are spread
 * over its rows. */
static cpa_status make_blocks(cpa_bench_nn *s, cpa_error *err) {
    const int64_t block = block_bytes_of(s), bytes = blocks_of(s, s->period) * block;
    s->out = (cpa_bench_tensor){CPA_FP8_E4M3, (bytes + s->period - 1) / s->period, NULL, NULL};
    s->out.host = malloc((size_t)(s->out.width * s->period));
    s->host_out = malloc((size_t)(s->out.width * s->period));
    if (!s->out.host || !s->host_out) return cpa_fail(err, CPA_NO_MEMORY, "bench: no memory for results");
    return cpa_bench_poisoned(s->site, blocks_of(s, s->rows) * block + s->period, &s->out.device, err);
}

static cpa_status prepare_write(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                cpa_error *err) {
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_write, &s, state, err));
    s->cache = (cpa_kv_view){.dtype = CPA_FP8_E4M3,
                             .block_size = (int32_t)site->options.block_size,
                             .num_blocks = blocks_of(s, s->rows),
                             .kv_heads = 1,
                             .k_dim = DIM,
                             .v_dim = DIM,
                             .v_in_k = 1};
    CPA_TRY(cpa_bench_make_noise(s, &s->in, (cpa_dtype)site->options.dtype, s->rows, DIM, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, CPA_F32, 1, DIM, 1, 2, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    /* A row, its codes and their scale, its position and slot, and its angles, which no other row has. */
    row->bytes = (double)s->rows * (double)(cpa_bench_row_bytes(&s->in) + DIM + 4 + 2 * 8 + ROTATED * 4);
    return make_blocks(s, err);
}

static cpa_status call_q(const cpa_bench_nn *s, int on_host, cpa_stream *stream) {
    const cpa_index_q_args args = {.size = sizeof args,
                                   .tokens = on_host ? s->period : s->rows,
                                   .heads = HEADS,
                                   .dim = DIM,
                                   .dtype = s->in.dtype,
                                   .q = cpa_bench_memory_of(&s->in, on_host),
                                   .rope = rope_of(s, on_host),
                                   .positions = cpa_bench_memory_of(&s->positions, on_host),
                                   .hadamard = 1,
                                   .out = cpa_bench_memory_of(&s->out, on_host),
                                   .weights = cpa_bench_memory_of(&s->weight, on_host),
                                   .weight_dtype = s->weight.dtype,
                                   .weights_out = cpa_bench_memory_of(&s->scales, on_host)};
    return cpa_index_q(&args, stream);
}

static cpa_status prepare_q(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                            cpa_error *err) {
    const cpa_dtype dtype = (cpa_dtype)site->options.dtype;
    cpa_bench_nn *s = NULL;
    CPA_TRY(cpa_bench_nn_prepare(site, shape[0], call_q, &s, state, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->in, dtype, s->rows, HEADS * DIM, 1, 1, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->weight, dtype, s->rows, HEADS, 1, 2, err));
    CPA_TRY(cpa_bench_make_noise(s, &s->scales, CPA_F32, s->rows, HEADS, 1, 3, err));
    CPA_TRY(cpa_bench_make_positions(s, ROTATED, err));
    row->bytes = (double)s->rows * (double)(cpa_bench_row_bytes(&s->in) + HEADS * DIM + HEADS * 4 +
                                            cpa_bench_row_bytes(&s->weight) + 8 + ROTATED * 4);
    return cpa_bench_make_out(s, CPA_FP8_E4M3, HEADS * DIM, err);
}

/* Counts the keys of the first period whose codes or scale are not those of the host. */
static cpa_status check_keys(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    const int64_t block = block_bytes_of(s), size = s->cache.block_size, scales = block - size * 4;
    const char *got = s->host_out, *want = s->out.host;
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++) {
        const int64_t codes = i / size * block + i % size * DIM, scale = i / size * block + scales + i % size * 4;
        row->wrong += memcmp(got + codes, want + codes, DIM) != 0 || memcmp(got + scale, want + scale, 4) != 0;
    }
    return CPA_OK;
}

/* Counts the rows of codes that are not those of the host. */
static cpa_status check_codes(void *state, cpa_bench_row *row, cpa_error *err) {
    cpa_bench_nn *s = state;
    const int64_t width = s->out.width;
    const char *got = s->host_out, *want = s->out.host;
    CPA_TRY(cpa_bench_nn_reference(s, err));
    row->checked = s->period;
    row->wrong = 0;
    for (int64_t i = 0; i < s->period; i++) row->wrong += memcmp(got + i * width, want + i * width, (size_t)width) != 0;
    return CPA_OK;
}

const cpa_bench cpa_bench_index_write = {
    .name = "index_write",
    .dims = "tokens",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,8K,256K",
    .checked = "tokens, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_write,
    .run = cpa_bench_nn_run,
    .check = check_keys,
    .release = cpa_bench_nn_release,
};

const cpa_bench cpa_bench_index_q = {
    .name = "index_q",
    .dims = "tokens",
    .n_dims = 1,
    .shapes_host = "64",
    .shapes_cuda = "1,64,4K,8K",
    .checked = "tokens, up to 16",
    .min_ranks = 1,
    .floor = CPA_BENCH_COPY,
    .prepare = prepare_q,
    .run = cpa_bench_nn_run,
    .check = check_codes,
    .release = cpa_bench_nn_release,
};

/* ---- index_logits ---- */

typedef struct logits_state {
    cpa_bench_site *site;
    int64_t sequences, rows, keys; /* rows and keys of each sequence */
    int64_t block_bytes, num_blocks;
    uint8_t *blocks, *q; /* what repeats */
    float *weights;
    int32_t *tables;
    cpa_attend_item *items;
    cpa_index_plan *plan;
    void *device_blocks, *device_q, *device_weights, *logits;
} logits_state;

/* Codes of numbers of about size 1, both signs alike. */
static uint8_t random_code(uint64_t counter) {
    const uint64_t h = cpa_bench_hash(counter);
    return (uint8_t)(0x28 + h % 24 + (h & 0x100 ? 0x80 : 0));
}

static float *scales_of(const logits_state *s, int64_t block) {
    const int64_t scales = s->site->options.block_size * (int64_t)sizeof(float);
    return (float *)(void *)(s->blocks + (block % PERIOD_BLOCKS + 1) * s->block_bytes - scales);
}

static cpa_status make_tensors(logits_state *s, cpa_error *err) {
    const int64_t rows = s->sequences * s->rows, block_size = s->site->options.block_size, row = HEADS * DIM;
    const int64_t blocks = s->num_blocks < PERIOD_BLOCKS ? s->num_blocks : PERIOD_BLOCKS;
    const int64_t period = rows < PERIOD_ROWS ? rows : PERIOD_ROWS, weights = HEADS * (int64_t)sizeof(float);
    s->blocks = calloc(PERIOD_BLOCKS, (size_t)s->block_bytes);
    s->q = malloc(PERIOD_ROWS * (size_t)row);
    s->weights = malloc(PERIOD_ROWS * (size_t)weights);
    if (!s->blocks || !s->q || !s->weights) return cpa_fail(err, CPA_NO_MEMORY, "bench index_logits: no memory");
    for (int64_t b = 0; b < PERIOD_BLOCKS; b++) {
        for (int64_t i = 0; i < block_size * DIM; i++)
            s->blocks[b * s->block_bytes + i] = random_code((uint64_t)(b * block_size * DIM + i));
        for (int64_t i = 0; i < block_size; i++)
            scales_of(s, b)[i] = ldexpf(1, (int)(cpa_bench_hash((uint64_t)(b * block_size + i)) % 4));
    }
    for (int64_t i = 0; i < PERIOD_ROWS * row; i++) s->q[i] = random_code((uint64_t)i + ((uint64_t)1 << 32));
    for (int64_t i = 0; i < PERIOD_ROWS * HEADS; i++) s->weights[i] = cpa_bench_normal(cpa_bench_hash((uint64_t)i));
    CPA_TRY(cpa_bench_upload_period(s->site, s->blocks, blocks * s->block_bytes, s->num_blocks * s->block_bytes,
                                    &s->device_blocks, err));
    CPA_TRY(cpa_bench_upload_period(s->site, s->q, period * row, rows * row, &s->device_q, err));
    CPA_TRY(cpa_bench_upload_period(s->site, s->weights, period * weights, rows * weights, &s->device_weights, err));
    return cpa_bench_poisoned(s->site, rows * s->keys * (int64_t)sizeof(float), &s->logits, err);
}

static cpa_status make_plan(logits_state *s, cpa_error *err) {
    const int64_t blocks = s->num_blocks / s->sequences;
    s->items = calloc((size_t)s->sequences, sizeof *s->items);
    if (!s->items) return cpa_fail(err, CPA_NO_MEMORY, "bench index_logits: no memory");
    for (int64_t i = 0; i < s->sequences; i++)
        s->items[i] = (cpa_attend_item){.q_row = i * s->rows,
                                        .q_count = s->rows,
                                        .q_first = s->keys,
                                        .k_count = s->keys,
                                        .table = i * blocks,
                                        .q_set = {CPA_TOKENS_ALL, 0},
                                        .k_set = {CPA_TOKENS_ALL, 0}};
    const cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {1, 1},
        .shape = {.q_heads = 1, .kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
        .block_size = (int32_t)s->site->options.block_size,
        .items = s->items,
        .n_items = s->sequences,
        .block_tables = s->tables,
        .n_table_entries = s->num_blocks};
    CPA_TRY(cpa_index_plan_create(s->site->device, &s->plan, err));
    return cpa_index_plan_set(s->plan, &batch, 1, err);
}

static cpa_status prepare_logits(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    const int64_t block_size = site->options.block_size;
    logits_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench index_logits: no memory");
    *state = s;
    s->site = site;
    s->sequences = shape[0], s->rows = shape[1], s->keys = shape[2];
    s->num_blocks = s->sequences * ((s->keys + block_size - 1) / block_size);
    s->block_bytes = cpa_kv_block_bytes(CPA_FP8_E4M3, CPA_KEYS, 0, (int32_t)block_size, 1, DIM);
    CPA_TRY(cpa_bench_block_order(&site->options, s->num_blocks, &s->tables, err));
    CPA_TRY(make_tensors(s, err));
    const double pairs = (double)s->sequences * (double)s->rows * (double)s->keys;
    row->flops = 2.0 * pairs * HEADS * DIM;
    row->bytes = (double)s->sequences * (double)s->keys * (DIM + 4) + 4 * pairs;
    return make_plan(s, err);
}

static cpa_index_logits_args args_of(const logits_state *s) {
    return (cpa_index_logits_args){.size = sizeof(cpa_index_logits_args),
                                   .heads = HEADS,
                                   .q = s->device_q,
                                   .weights = s->device_weights,
                                   .cache = {.kv = {.k = s->device_blocks,
                                                    .dtype = CPA_FP8_E4M3,
                                                    .block_size = (int32_t)s->site->options.block_size,
                                                    .num_blocks = s->num_blocks,
                                                    .kv_heads = 1,
                                                    .k_dim = DIM,
                                                    .v_dim = DIM,
                                                    .v_in_k = 1}},
                                   .logits = s->logits,
                                   .width = s->keys};
}

static cpa_status run_logits(void *state, int64_t call, cpa_error *err) {
    const logits_state *s = state;
    const cpa_index_logits_args args = args_of(s);
    (void)call;
    return cpa_bench_enqueued(s->site, cpa_index_logits(s->plan, &args, s->site->stream), err);
}

/* Whether a logit is what float64 gives, but for the bits that sums of codes have on tensor cores. */
static bool is_right(const logits_state *s, int64_t row, int64_t key, float got) {
    const int64_t block_size = s->site->options.block_size;
    const int64_t block = s->tables[row / s->rows * (s->num_blocks / s->sequences) + key / block_size];
    const uint8_t *codes = s->blocks + block % PERIOD_BLOCKS * s->block_bytes + key % block_size * DIM;
    const double scale = (double)scales_of(s, block)[key % block_size];
    double sum = 0, size = 0;
    for (int64_t h = 0; h < HEADS; h++) {
        const uint8_t *q = s->q + (row % PERIOD_ROWS * HEADS + h) * DIM;
        const double weight = (double)s->weights[row % PERIOD_ROWS * HEADS + h];
        double dot = 0, terms = 0;
        for (int64_t d = 0; d < DIM; d++) {
            const double term = (double)cpa_from_e4m3(q[d]) * (double)cpa_from_e4m3(codes[d]);
            dot += term, terms += fabs(term);
        }
        sum += (dot > 0 ? dot : 0) * weight, size += terms * fabs(weight);
    }
    return fabs((double)got - sum * scale) <= 1e-3 * size * scale;
}

/* Of some rows, some keys. */
static cpa_status check_logits(void *state, cpa_bench_row *row, cpa_error *err) {
    const logits_state *s = state;
    const int64_t rows = s->sequences * s->rows, bytes = s->keys * (int64_t)sizeof(float);
    float *logits = malloc((size_t)bytes);
    cpa_status status = logits ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench index_logits: no memory");
    row->checked = row->wrong = 0;
    for (int64_t r = 0; status == CPA_OK && r < rows; r += (rows + CHECKED_ROWS - 1) / CHECKED_ROWS) {
        int64_t wrong = 0;
        status = cpa_bench_copy(s->site, logits, (char *)s->logits + r * bytes, bytes, err);
        for (int64_t k = r % 7; status == CPA_OK && k < s->keys; k += s->keys / CHECKED_KEYS + 1)
            wrong += !is_right(s, r, k, logits[k]);
        row->checked++;
        row->wrong += wrong > 0;
    }
    free(logits);
    return status;
}

static void release_logits(void *state) {
    logits_state *s = state;
    if (!s) return;
    void *const on_device[] = {s->device_blocks, s->device_q, s->device_weights, s->logits};
    void *const own[] = {s->blocks, s->q, s->weights, s->tables, s->items, s};
    cpa_index_plan_destroy(s->plan);
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_device_free(s->site->device, on_device[i]);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
}

const cpa_bench cpa_bench_index_logits = {
    .name = "index_logits",
    .dims = "sequences x rows x keys",
    .n_dims = 3,
    .shapes_host = "1x16x1K:block-size=64,4x1x4K:block-size=64",
    .shapes_cuda =
        "1x4Kx64K:block-size=64,64x1x128K:block-size=64,64x2x128K:block-size=64,"
        "32x4x128K:block-size=64,1x1x1M:block-size=64",
    .checked = "rows, up to 16, of which some keys",
    .min_ranks = 1,
    .floor = CPA_BENCH_READ,
    .prepare = prepare_logits,
    .run = run_logits,
    .check = check_logits,
    .release = release_logits,
};
