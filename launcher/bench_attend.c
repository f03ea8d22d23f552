/* bench attend: the new tokens of some sequences against their whole contexts, causal, over a paged KV cache whose
 * blocks lie in random order and whose unused memory is poisoned. */
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "base/check.h"
#include "base/clock.h"
#include "launcher/bench.h"
#include "launcher/bench_attend.h"

enum { WRITE_TOKENS = 1024 };                             /* tokens given to one kv_write */
static const int64_t read_probe_bytes = (int64_t)1 << 30; /* larger than any cache */

typedef struct attend_state {
    cpa_bench_site *site;
    cpa_bench_attend_case shape;
    cpa_kv_view kv;
    int32_t *block_tables;
    cpa_attend_plan *plan;
    void *q, *out;
    float *lse;
} attend_state;

static int64_t blocks_per_sequence(const attend_state *s) {
    return (s->shape.context + s->kv.block_size - 1) / s->kv.block_size;
}

static int64_t rows(const attend_state *s) {
    return s->shape.sequences * s->shape.new_tokens;
}

/* A random permutation of the pool's blocks, sequence after sequence. */
static cpa_status make_block_tables(attend_state *s, cpa_error *err) {
    int64_t n = s->kv.num_blocks;
    s->block_tables = malloc((size_t)n * sizeof *s->block_tables);
    if (!s->block_tables) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for block tables");
    for (int64_t i = 0; i < n; i++) {
        int64_t j = (int64_t)(cpa_bench_hash((uint64_t)i) % (uint64_t)(i + 1));
        s->block_tables[i] = s->block_tables[j];
        s->block_tables[j] = (int32_t)i;
    }
    return CPA_OK;
}

static cpa_status make_cache(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    cpa_kv_view *kv = &s->kv;
    int64_t head = o->head_dim, token = head * o->kv_heads, block = token * o->block_size;
    *kv = (cpa_kv_view){
        .dtype = o->dtype,
        .block_size = (int32_t)o->block_size,
        .kv_heads = (int32_t)o->kv_heads,
        .k_dim = (int32_t)o->head_dim,
        .v_dim = (int32_t)o->head_dim,
        .k_block_stride = block,
        .k_token_stride = token,
        .k_head_stride = head,
        .v_block_stride = block,
        .v_token_stride = token,
        .v_head_stride = head,
    };
    int64_t blocks = s->shape.sequences * blocks_per_sequence(s);
    if (blocks > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "bench attend: %lld blocks, at most %d", (long long)blocks, INT32_MAX);
    }
    kv->num_blocks = blocks;
    int64_t bytes = blocks * block * cpa_dtype_bytes(o->dtype);
    CPA_TRY(cpa_device_alloc(s->site->device, bytes, &kv->k, err));
    CPA_TRY(cpa_device_alloc(s->site->device, bytes, &kv->v, err));
    memset(kv->k, 0xff, (size_t)bytes); /* all ones are a NaN in every dtype */
    memset(kv->v, 0xff, (size_t)bytes);
    return make_block_tables(s, err);
}

static cpa_status write_cache(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    int64_t width = (int64_t)o->kv_heads * o->head_dim, block_size = o->block_size;
    float *k = malloc((size_t)(WRITE_TOKENS * width) * sizeof *k);
    float *v = malloc((size_t)(WRITE_TOKENS * width) * sizeof *v);
    int64_t *slots = malloc(WRITE_TOKENS * sizeof *slots);
    cpa_status status = k && v && slots ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for tokens");
    for (int64_t sequence = 0; status == CPA_OK && sequence < s->shape.sequences; sequence++) {
        const int32_t *table = s->block_tables + sequence * blocks_per_sequence(s);
        for (int64_t first = 0; status == CPA_OK && first < s->shape.context; first += WRITE_TOKENS) {
            int64_t n = s->shape.context - first < WRITE_TOKENS ? s->shape.context - first : WRITE_TOKENS;
            for (int64_t i = 0; i < n; i++) {
                cpa_bench_attend_token(o, CPA_BENCH_K, sequence, first + i, k + i * width);
                cpa_bench_attend_token(o, CPA_BENCH_V, sequence, first + i, v + i * width);
                slots[i] = table[(first + i) / block_size] * block_size + (first + i) % block_size;
            }
            cpa_kv_write_args args = {
                .size = sizeof args, .tokens = n, .dtype = CPA_F32, .k = k, .v = v, .slot_mapping = slots, .kv = s->kv};
            status = cpa_kv_write(&args, s->site->stream);
            if (status != CPA_OK) cpa_fail(err, status, "%s", cpa_stream_error(s->site->stream));
        }
    }
    free(slots);
    free(v);
    free(k);
    return status;
}

/* The bits of a float that the 16-bit dtype can hold exactly. */
static uint16_t narrow(float value, cpa_dtype dtype) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == CPA_BF16) return (uint16_t)(bits >> 16);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t smallest_normal = 113u << 23; /* 2^-14; smaller values are multiples of 2^-24 */
    if (magnitude < smallest_normal) return (uint16_t)(sign | (uint32_t)((value < 0 ? -value : value) * 0x1p24f));
    return (uint16_t)(sign | ((magnitude - (112u << 23)) >> 13));
}

static cpa_status make_rows(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    int64_t width = (int64_t)o->q_heads * o->head_dim, bytes = rows(s) * width * cpa_dtype_bytes(o->dtype);
    CPA_TRY(cpa_device_alloc(s->site->device, bytes, &s->q, err));
    CPA_TRY(cpa_device_alloc(s->site->device, bytes, &s->out, err));
    CPA_TRY(cpa_device_alloc(s->site->device, rows(s) * o->q_heads * (int64_t)sizeof *s->lse, (void **)&s->lse, err));
    memset(s->out, 0xff, (size_t)bytes);
    float *row = malloc((size_t)width * sizeof *row);
    if (!row) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for queries");
    for (int64_t r = 0; r < rows(s); r++) {
        int64_t position = s->shape.context - s->shape.new_tokens + r % s->shape.new_tokens;
        cpa_bench_attend_token(o, CPA_BENCH_Q, r / s->shape.new_tokens, position, row);
        for (int64_t i = 0; i < width; i++) {
            if (o->dtype == CPA_F32) {
                ((float *)s->q)[r * width + i] = row[i];
            } else {
                ((uint16_t *)s->q)[r * width + i] = narrow(row[i], o->dtype);
            }
        }
    }
    free(row);
    return CPA_OK;
}

static cpa_status make_plan(attend_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    cpa_attend_item *items = calloc((size_t)s->shape.sequences, sizeof *items);
    if (!items) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory for items");
    for (int64_t i = 0; i < s->shape.sequences; i++) {
        items[i] = (cpa_attend_item){
            .q_row = i * s->shape.new_tokens,
            .q_count = s->shape.new_tokens,
            .q_first = s->shape.context - s->shape.new_tokens,
            .k_count = s->shape.context,
            .table = i * blocks_per_sequence(s),
        };
    }
    cpa_attend_batch batch = {
        .size = sizeof batch,
        .map = {.cp_size = 1, .interleave = (int32_t)o->block_size},
        .q_heads = (int32_t)o->q_heads,
        .kv_heads = (int32_t)o->kv_heads,
        .k_dim = (int32_t)o->head_dim,
        .v_dim = (int32_t)o->head_dim,
        .block_size = (int32_t)o->block_size,
        .items = items,
        .n_items = s->shape.sequences,
        .block_tables = s->block_tables,
        .n_table_entries = s->kv.num_blocks,
    };
    cpa_status status = cpa_attend_plan_create(s->site->device, &s->plan, err);
    if (status == CPA_OK) status = cpa_attend_plan_set(s->plan, &batch, err);
    free(items);
    return status;
}

/* Bytes/s that this thread reads from memory too large for the caches: the best of three passes. memchr looks at every
 * byte with the widest loads of the CPU. */
static cpa_status measure_read_bandwidth(cpa_bench_site *site, double *out, cpa_error *err) {
    void *memory;
    CPA_TRY(cpa_device_alloc(site->device, read_probe_bytes, &memory, err));
    memset(memory, 1, (size_t)read_probe_bytes);
    double best = 0;
    for (int pass = 0; pass < 3; pass++) {
        double start = cpa_clock_now();
        const void *volatile found = memchr(memory, 2, (size_t)read_probe_bytes);
        double rate = (double)read_probe_bytes / (cpa_clock_now() - start);
        if (!found && rate > best) best = rate;
    }
    cpa_device_free(site->device, memory);
    *out = best;
    return CPA_OK;
}

/* Multiply-adds of Q K^T and P V over the pairs that the mask shows, and every operand moved once. */
static void count_work(const attend_state *s, cpa_bench_row *row) {
    const cpa_bench_options *o = &s->site->options;
    double sequences = (double)s->shape.sequences, t = (double)s->shape.new_tokens, context = (double)s->shape.context;
    double pairs = t * (context - t) + 0.5 * t * (t + 1);
    double element = (double)cpa_dtype_bytes(o->dtype);
    row->flops = sequences * pairs * o->q_heads * 4.0 * o->head_dim;
    row->bytes = sequences * 2.0 * o->head_dim * element * (context * o->kv_heads + t * o->q_heads);
}

static cpa_status prepare(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                          cpa_error *err) {
    attend_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench attend: no memory");
    *state = s;
    s->site = site;
    s->shape = (cpa_bench_attend_case){.sequences = shape[0], .new_tokens = shape[1], .context = shape[2]};
    if (s->shape.new_tokens > s->shape.context) {
        return cpa_fail(err, CPA_INVALID, "bench attend: %lld new tokens in a context of %lld",
                        (long long)s->shape.new_tokens, (long long)s->shape.context);
    }
    count_work(s, row);
    if (s->shape.new_tokens == 1) CPA_TRY(measure_read_bandwidth(site, &row->read_bandwidth, err));
    CPA_TRY(make_cache(s, err));
    CPA_TRY(write_cache(s, err));
    CPA_TRY(make_rows(s, err));
    return make_plan(s, err);
}

static cpa_status run(void *state, cpa_error *err) {
    attend_state *s = state;
    cpa_attend_args args = {
        .size = sizeof args,
        .q = s->q,
        .q_dtype = s->site->options.dtype,
        .kv = s->kv,
        .mask = {.causal = 1},
        .state = {.lse = s->lse, .lse_row_stride = s->site->options.q_heads},
        .out = s->out,
    };
    cpa_status status = cpa_attend(s->plan, &args, s->site->stream);
    if (status == CPA_OK) status = cpa_stream_sync(s->site->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_stream_error(s->site->stream));
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    attend_state *s = state;
    return cpa_bench_attend_check(&s->site->options, &s->shape, s->out, s->lse, &row->checked, &row->wrong, err);
}

static void release(void *state) {
    attend_state *s = state;
    if (!s) return;
    cpa_attend_plan_destroy(s->plan);
    cpa_device_free(s->site->device, s->lse);
    cpa_device_free(s->site->device, s->out);
    cpa_device_free(s->site->device, s->q);
    free(s->block_tables);
    cpa_device_free(s->site->device, s->kv.v);
    cpa_device_free(s->site->device, s->kv.k);
    free(s);
}

const cpa_bench cpa_bench_attend = {
    .name = "attend",
    .dims = "sequences x new tokens x context (causal)",
    .n_dims = 3,
    .default_shapes = "1x1Kx1K,1x2Kx2K,1x8Kx8K,4x1x64K",
    .checked = "sampled rows, a token and head each",
    .min_ranks = 1,
    .prepare = prepare,
    .run = run,
    .check = check,
    .release = release,
};
