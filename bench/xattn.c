/* bench xattn: the last queries of a prompt over its keys by XAttention, the estimate and attention over the blocks that
 * it selects; xattn_estimate, the former alone; attend_blocks, the latter over blocks at random; and attend_beside, that
 * beside rows of decode of other sequences, which attend all keys of their own. Work is that of the pairs that are
 * attended, and of the estimate both passes over its scores: what a dense attend would need, times the density plus
 * 2 / (2 stride). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <cpattn/ops.h>
#include <cpattn/xattn.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/min_max.h"
#include "bench/attend.h"
#include "bench/inputs.h"
#include "bench/memory.h"
#include "bench/noise.h"
#include "src/check/cases/judge.h"

enum { BLOCK = CPA_XATTN_MOST_BLOCK, SAMPLED_ROWS = 8, SAMPLED_HEADS = 2 };

typedef struct xattn_state {
    cpa_bench_site *site;
    int64_t queries, keys, q_blocks, k_blocks, words;
    int64_t decodes, decode_keys; /* rows of decode before the queries, and keys of each */
    int estimates, attends;
    cpa_xattn_shape shape;
    float tau;
    cpa_kv_view kv;
    cpa_attend_plan *plan;
    void *q, *out, *table, *packed_q, *packed_k, *bits, *row_word;
    float *max, *sum, *sums, *lse;
    int32_t *counts;
} xattn_state;

static cpa_status device_floats(xattn_state *s, int64_t bytes, float **out, cpa_error *err) {
    return cpa_bench_poisoned(s->site, bytes, (void **)out, err);
}

static int64_t pages_of(const xattn_state *s, int64_t keys) {
    return (keys + s->site->options.block_size - 1) / s->site->options.block_size;
}
/* Of all rows. */
static int64_t rows_of(const xattn_state *s) {
    return s->decodes + s->queries;
}

/* The keys of a sequence and its last queries, in pages from one on, to rows from one on; and its item. */
static cpa_status make_sequence(xattn_state *s, int64_t sequence, cpa_attend_item *item, const int32_t *table,
                                cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t row_bytes = o->q_heads * o->k_dim * cpa_dtype_bytes((cpa_dtype)o->dtype);
    int64_t *positions = cpa_bench_positions(0, item->k_count);
    cpa_status status = positions ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for positions");
    if (status == CPA_OK)
        status = cpa_bench_fill_cache(s->site, sequence, positions, item->k_count, table + item->table, &s->kv, err);
    if (status == CPA_OK)
        status = cpa_bench_synthesize(s->site, CPA_SYNTH_Q, sequence, positions + item->q_first, item->q_count,
                                      (char *)s->q + item->q_row * row_bytes, err);
    free(positions);
    return status;
}

/* The prompt is sequence 0, and the last item. */
static void list_items(const xattn_state *s, cpa_attend_item *items) {
    const int64_t pages = pages_of(s, s->decode_keys);
    for (int64_t i = 0; i < s->decodes; i++)
        items[i] = (cpa_attend_item){
            .q_row = i, .q_count = 1, .q_first = s->decode_keys - 1, .k_count = s->decode_keys, .table = i * pages};
    items[s->decodes] = (cpa_attend_item){.q_row = s->decodes,
                                          .q_count = s->queries,
                                          .q_first = s->keys - s->queries,
                                          .k_count = s->keys,
                                          .table = s->decodes * pages};
}

static cpa_status set_plan(xattn_state *s, const cpa_attend_item *items, const int32_t *table, int64_t pages,
                           cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {.cp_size = 1, .interleave = (int32_t)o->block_size},
                                    .shape = cpa_bench_shape(o),
                                    .block_size = (int32_t)o->block_size,
                                    .items = items,
                                    .n_items = s->decodes + 1,
                                    .block_tables = table,
                                    .n_table_entries = pages};
    CPA_TRY(cpa_attend_plan_create(s->site->device, &s->plan, err));
    return cpa_attend_plan_set(s->plan, &batch, err);
}

/* The keys in pages, the queries, and the plan. */
static cpa_status make_prompt(xattn_state *s, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t pages = s->decodes * pages_of(s, s->decode_keys) + pages_of(s, s->keys);
    const int64_t element = cpa_dtype_bytes((cpa_dtype)o->dtype), heads = rows_of(s) * o->q_heads;
    cpa_attend_item *items = malloc((size_t)(s->decodes + 1) * sizeof *items);
    int32_t *table = NULL;
    cpa_status status = items ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for items");
    if (status == CPA_OK) status = cpa_bench_block_order(o, pages, &table, err);
    if (status == CPA_OK) status = cpa_bench_make_cache(s->site, pages, &s->kv, err);
    if (status == CPA_OK) status = cpa_device_alloc(s->site->device, heads * o->k_dim * element, &s->q, err);
    if (status == CPA_OK) list_items(s, items);
    for (int64_t i = 0; status == CPA_OK && i <= s->decodes; i++)
        status = make_sequence(s, s->decodes - i, &items[i], table, err);
    if (status == CPA_OK)
        status = cpa_bench_upload(s->site, table + items[s->decodes].table,
                                  pages_of(s, s->keys) * (int64_t)sizeof *table, &s->table, err);
    if (status == CPA_OK) status = set_plan(s, items, table, pages, err);
    free(items);
    free(table);
    CPA_TRY(status);
    CPA_TRY(cpa_bench_poisoned(s->site, heads * o->v_dim * element, &s->out, err));
    return device_floats(s, heads * (int64_t)sizeof *s->lse, &s->lse, err);
}

static cpa_status make_estimate(xattn_state *s, cpa_error *err) {
    const cpa_xattn_shape *shape = &s->shape;
    if (!s->estimates) return CPA_OK;
    CPA_TRY(cpa_bench_poisoned(s->site, cpa_xattn_packed_bytes(shape, shape->q_heads, s->queries), &s->packed_q, err));
    CPA_TRY(cpa_bench_poisoned(s->site, cpa_xattn_packed_bytes(shape, shape->kv_heads, s->keys), &s->packed_k, err));
    CPA_TRY(device_floats(s, cpa_xattn_stats_bytes(shape, s->queries) / 2, &s->max, err));
    CPA_TRY(device_floats(s, cpa_xattn_stats_bytes(shape, s->queries) / 2, &s->sum, err));
    return device_floats(s, cpa_xattn_sums_bytes(shape, s->queries, s->keys), &s->sums, err);
}

/* Bits of blocks at random, besides the first and its own of each row; none behind it. */
static cpa_status make_bits(xattn_state *s, int64_t percent, cpa_error *err) {
    const int64_t rows = s->shape.q_heads * s->q_blocks, first = s->k_blocks - s->q_blocks;
    uint32_t *bits = calloc((size_t)(rows * s->words), sizeof *bits);
    int64_t *row_word = malloc((size_t)rows_of(s) * sizeof *row_word);
    cpa_status status = bits && row_word ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for bits");
    for (int64_t row = 0; status == CPA_OK && row < rows; row++)
        for (int64_t block = 0, own = first + row % s->q_blocks; block <= own; block++) {
            const int taken = (int64_t)(cpa_bench_hash((uint64_t)(row * s->k_blocks + block)) % 100) < percent;
            if (taken || block == 0 || block == own) bits[row * s->words + block / 32] |= 1u << block % 32;
        }
    for (int64_t row = 0; status == CPA_OK && row < rows_of(s); row++)
        row_word[row] = row < s->decodes ? -1 : (row - s->decodes) / BLOCK * s->words;
    if (status == CPA_OK) status = cpa_bench_upload(s->site, bits, rows * s->words * 4, &s->bits, err);
    if (status == CPA_OK) status = cpa_bench_upload(s->site, row_word, rows_of(s) * 8, &s->row_word, err);
    if (status == CPA_OK) status = cpa_bench_poisoned(s->site, rows * 4, (void **)&s->counts, err);
    free(bits);
    free(row_word);
    return status;
}

static cpa_status estimate(xattn_state *s, cpa_error *err) {
    const cpa_xattn_chunks chunks = {.map = {.cp_size = 1, .interleave = BLOCK},
                                     .q_set = {CPA_TOKENS_ALL, 0},
                                     .k_set = {CPA_TOKENS_ALL, 0},
                                     .q_first = s->keys - s->queries,
                                     .q_tokens = s->queries,
                                     .k_tokens = s->keys,
                                     .q = s->packed_q,
                                     .k = s->packed_k};
    const cpa_xattn_pack_q_args q = {
        .size = sizeof q, .shape = s->shape, .tokens = s->queries, .q = s->q, .out = s->packed_q};
    const cpa_xattn_pack_k_args k = {
        .size = sizeof k, .shape = s->shape, .tokens = s->keys, .kv = s->kv, .table = s->table, .out = s->packed_k};
    const cpa_xattn_stats_args stats = {
        .size = sizeof stats, .shape = s->shape, .chunks = chunks, .max = s->max, .sum = s->sum};
    const cpa_xattn_block_sums_args sums = {
        .size = sizeof sums, .shape = s->shape, .chunks = chunks, .max = s->max, .sum = s->sum, .sums = s->sums};
    const cpa_xattn_select_args select = {.size = sizeof select,
                                          .shape = s->shape,
                                          .map = chunks.map,
                                          .q_set = chunks.q_set,
                                          .q_first = chunks.q_first,
                                          .q_blocks = s->q_blocks,
                                          .k_blocks = s->k_blocks,
                                          .sums = s->sums,
                                          .tau = s->tau,
                                          .bits = s->bits,
                                          .words = s->words,
                                          .counts = s->counts};
    cpa_stream *stream = s->site->stream;
    CPA_TRY(cpa_bench_enqueued(s->site, cpa_xattn_pack_q(&q, stream), err));
    CPA_TRY(cpa_bench_enqueued(s->site, cpa_xattn_pack_k(&k, stream), err));
    CPA_TRY(cpa_bench_enqueued(s->site, cpa_xattn_stats(&stats, stream), err));
    CPA_TRY(cpa_bench_enqueued(s->site, cpa_xattn_block_sums(&sums, stream), err));
    return cpa_bench_enqueued(s->site, cpa_xattn_select(&select, stream), err);
}

static cpa_key_blocks blocks_of(const xattn_state *s) {
    return (cpa_key_blocks){.bits = s->bits,
                            .row_word = s->row_word,
                            .head_stride = s->q_blocks * s->words,
                            .width = (int32_t)s->k_blocks,
                            .block = BLOCK};
}

static cpa_attend_args attend_args(const xattn_state *s, const cpa_key_selection *selection) {
    return (cpa_attend_args){.size = sizeof(cpa_attend_args),
                             .q = s->q,
                             .q_dtype = (cpa_dtype)s->site->options.dtype,
                             .kv = s->kv,
                             .mask = {.causal = 1},
                             .state = {.lse = s->lse},
                             .out = s->out,
                             .selection = selection};
}

static cpa_status run(void *state, int64_t call, cpa_error *err) {
    xattn_state *s = state;
    const cpa_key_blocks blocks = blocks_of(s);
    const cpa_key_selection selection = {.blocks = &blocks};
    const cpa_attend_args args = attend_args(s, &selection);
    (void)call;
    if (s->estimates) CPA_TRY(estimate(s, err));
    return s->attends ? cpa_bench_enqueued(s->site, cpa_attend(s->plan, &args, s->site->stream), err) : CPA_OK;
}

static cpa_status read_bits(const xattn_state *s, uint32_t **out, cpa_error *err) {
    const int64_t bytes = s->shape.q_heads * s->q_blocks * s->words * (int64_t)sizeof **out;
    *out = malloc((size_t)bytes);
    if (!*out) return cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for bits");
    return cpa_bench_copy(s->site, *out, s->bits, bytes, err);
}

/* Pairs that a dense attend has of a head, and those that the bits leave of all. */
static double dense_pairs(const xattn_state *s) {
    const double t = (double)s->queries, first = (double)(s->keys - s->queries);
    return t * first + 0.5 * t * (t + 1);
}
static double attended_pairs(const xattn_state *s, const uint32_t *bits) {
    const int64_t first = s->k_blocks - s->q_blocks;
    double pairs = 0;
    for (int64_t row = 0; row < s->shape.q_heads * s->q_blocks; row++)
        for (int64_t block = 0; block < s->k_blocks; block++)
            if (bits[row * s->words + block / 32] >> block % 32 & 1)
                pairs += block == first + row % s->q_blocks ? 0.5 * BLOCK * (BLOCK + 1) : (double)BLOCK * BLOCK;
    return pairs;
}

static cpa_status count_work(xattn_state *s, cpa_bench_row *row, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const double dense = dense_pairs(s) * (double)o->q_heads, widths = 2.0 * (double)(o->k_dim + o->v_dim);
    uint32_t *bits = NULL;
    cpa_status status = read_bits(s, &bits, err);
    if (status == CPA_OK) {
        const double pairs = attended_pairs(s, bits);
        const double decoded = (double)(s->decodes * s->decode_keys) * (double)o->q_heads;
        row->flops = (s->attends ? (pairs + decoded) * widths : 0) +
                     (s->estimates ? 2 * dense * 2.0 * (double)o->k_dim / s->shape.stride : 0);
        row->bytes = -1;
        printf("# %lld x %lld: density %.4f\n", (long long)s->queries, (long long)s->keys, pairs / dense);
    }
    free(bits);
    return status;
}

static cpa_status prepare(cpa_bench_site *site, int estimates, int attends, int decodes, const int64_t *shape,
                          cpa_bench_row *row, void **state, cpa_error *err) {
    const cpa_bench_options *o = &site->options;
    xattn_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory");
    *state = s;
    if (shape[0] > shape[1] || shape[0] % BLOCK != 0 || shape[1] % BLOCK != 0)
        return cpa_fail(err, CPA_INVALID, "bench xattn: %lld queries over %lld keys, expected multiples of %d",
                        (long long)shape[0], (long long)shape[1], BLOCK);
    *s = (xattn_state){.site = site,
                       .queries = shape[0],
                       .keys = shape[1],
                       .q_blocks = shape[0] / BLOCK,
                       .k_blocks = shape[1] / BLOCK,
                       .decodes = decodes ? shape[3] : 0,
                       .decode_keys = decodes ? shape[4] : 0,
                       .estimates = estimates,
                       .attends = attends,
                       .shape = {.stride = estimates ? (int32_t)shape[2] : 8,
                                 .block = BLOCK,
                                 .q_heads = (int32_t)o->q_heads,
                                 .kv_heads = (int32_t)o->kv_heads,
                                 .dim = (int32_t)o->k_dim,
                                 .dtype = (cpa_dtype)o->dtype,
                                 .causal = 1},
                       .tau = estimates ? (float)shape[3] / 100 : 1};
    s->words = cpa_mask_words(s->k_blocks);
    CPA_TRY(make_prompt(s, err));
    CPA_TRY(make_estimate(s, err));
    CPA_TRY(make_bits(s, estimates ? 0 : shape[2], err));
    if (estimates) CPA_TRY(estimate(s, err));
    CPA_TRY(cpa_bench_enqueued(site, cpa_stream_sync(site->stream), err));
    CPA_TRY(count_work(s, row, err));
    const cpa_key_blocks blocks = blocks_of(s);
    const cpa_key_selection selection = {.blocks = &blocks};
    const cpa_attend_args args = attend_args(s, &selection);
    return attends ? cpa_bench_note_kernels(s->plan, &args, row, err) : CPA_OK;
}

static cpa_status prepare_whole(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                cpa_error *err) {
    return prepare(site, 1, 1, 0, shape, row, state, err);
}

static cpa_status prepare_estimate(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                   cpa_error *err) {
    return prepare(site, 1, 0, 0, shape, row, state, err);
}

static cpa_status prepare_blocks(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    return prepare(site, 0, 1, 0, shape, row, state, err);
}

static cpa_status prepare_beside(cpa_bench_site *site, const int64_t *shape, cpa_bench_row *row, void **state,
                                 cpa_error *err) {
    return prepare(site, 0, 1, 1, shape, row, state, err);
}

/* ---- checks ---- */

typedef struct recalled {
    cpa_kv_view kv; /* all keys, on the host */
    uint32_t *bits;
    float *k, *v; /* room for the keys of a row */
} recalled;

/* A row and head of attention over the first `end` of the keys, or those of them that bits show, if there are any. */
static cpa_status check_row(xattn_state *s, recalled *r, const uint32_t *bits, int64_t at, int64_t end, int64_t head,
                            cpa_bench_row *row, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t element = cpa_dtype_bytes((cpa_dtype)o->dtype), kv_head = head / (o->q_heads / o->kv_heads);
    const int64_t place = at * o->q_heads + head;
    char q[CPA_MAX_HEAD_DIM * sizeof(float)], out[CPA_MAX_HEAD_DIM * sizeof(float)];
    float lse;
    cpa_case_expected expected;
    int64_t n = 0;
    for (int64_t key = 0; key < end; key++) {
        if (bits && !(bits[key / BLOCK / 32] >> key / BLOCK % 32 & 1)) continue;
        cpa_bench_recalled_row(&r->kv, CPA_SYNTH_K, key, kv_head, r->k + n * o->k_dim);
        cpa_bench_recalled_row(&r->kv, CPA_SYNTH_V, key, kv_head, r->v + n++ * o->v_dim);
    }
    CPA_TRY(cpa_bench_copy(s->site, q, (char *)s->q + place * o->k_dim * element, o->k_dim * element, err));
    CPA_TRY(cpa_bench_copy(s->site, out, (char *)s->out + place * o->v_dim * element, o->v_dim * element, err));
    CPA_TRY(cpa_bench_copy(s->site, &lse, s->lse + place, sizeof lse, err));
    cpa_case_expect(&(cpa_case_row){.dtype = (cpa_dtype)o->dtype,
                                    .k_dim = (int32_t)o->k_dim,
                                    .v_dim = (int32_t)o->v_dim,
                                    .q = q,
                                    .q_dtype = (cpa_dtype)o->dtype,
                                    .k = r->k,
                                    .v = r->v,
                                    .k_stride = o->k_dim,
                                    .v_stride = o->v_dim,
                                    .n_keys = n},
                    &expected);
    const cpa_case_result got = {.lse = &lse, .out = out, .out_dtype = (cpa_dtype)o->dtype};
    row->wrong += !cpa_case_is_right(&expected, &got, NULL);
    row->checked++;
    return CPA_OK;
}

/* The same of a query of the prompt. */
static cpa_status check_query(xattn_state *s, recalled *r, int64_t at, int64_t head, cpa_bench_row *row,
                              cpa_error *err) {
    const uint32_t *bits = r->bits + (head * s->q_blocks + at / BLOCK) * s->words;
    return check_row(s, r, bits, s->decodes + at, s->keys - s->queries + at + 1, head, row, err);
}

/* The statistics of a group of queries beside float64. */
static cpa_status check_group(xattn_state *s, const recalled *r, int64_t group, int64_t head, cpa_bench_row *row,
                              cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    const int64_t width = cpa_xattn_width(&s->shape), groups = cpa_xattn_groups(&s->shape, s->queries);
    const int64_t element = cpa_dtype_bytes((cpa_dtype)o->dtype), kv_head = head / (o->q_heads / o->kv_heads);
    const int64_t seen = (s->keys - s->queries) / s->shape.stride + group + 1, at = head * groups + group;
    char *packed = malloc((size_t)(width * element));
    float *q = malloc((size_t)width * sizeof *q), max, sum;
    double *z = malloc((size_t)seen * sizeof *z), most = -INFINITY, total = 0;
    cpa_status status = packed && q && z ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for scores");
    if (status == CPA_OK)
        status = cpa_bench_copy(s->site, packed, (char *)s->packed_q + at * width * element, width * element, err);
    if (status == CPA_OK) status = cpa_bench_copy(s->site, &max, s->max + at, sizeof max, err);
    if (status == CPA_OK) status = cpa_bench_copy(s->site, &sum, s->sum + at, sizeof sum, err);
    if (status == CPA_OK) cpa_widen(q, packed, (cpa_dtype)o->dtype, width);
    for (int64_t j = 0; status == CPA_OK && j < seen; j++) {
        z[j] = 0;
        for (int32_t t = 0; t < s->shape.stride; t++) {
            cpa_bench_recalled_row(&r->kv, CPA_SYNTH_K, j * s->shape.stride + t, kv_head, r->k);
            for (int64_t d = 0; d < o->k_dim; d++) z[j] += (double)q[t * o->k_dim + d] * (double)r->k[d];
        }
        z[j] /= sqrt((double)o->k_dim) * s->shape.stride;
        most = fmax(most, z[j]);
    }
    for (int64_t j = 0; status == CPA_OK && j < seen; j++) total += exp(z[j] - most);
    if (status == CPA_OK) {
        row->wrong += fabs((double)max - most) > 1e-5 * (1 + fabs(most)) || fabs((double)sum - total) > 1e-4 * total;
        row->checked++;
    }
    free(packed), free(q), free(z);
    return status;
}

/* Rows of decode, each with keys of its own. */
static cpa_status check_decodes(xattn_state *s, cpa_bench_row *row, cpa_error *err) {
    const cpa_bench_options *o = &s->site->options;
    recalled r = {.k = malloc((size_t)(s->decode_keys * o->k_dim) * sizeof(float)),
                  .v = malloc((size_t)(s->decode_keys * o->v_dim) * sizeof(float))};
    cpa_status status = r.k && r.v ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for keys");
    for (int64_t at = 0; status == CPA_OK && at < s->decodes; at += 1 + s->decodes / SAMPLED_ROWS) {
        status = cpa_bench_recall(s->site, s->decodes - at, 0, s->decode_keys, &r.kv, err);
        for (int64_t head = 0; status == CPA_OK && head < o->q_heads; head += o->q_heads / SAMPLED_HEADS)
            status = check_row(s, &r, NULL, at, s->decode_keys, head, row, err);
        free(r.kv.k), free(r.kv.v);
        r.kv = (cpa_kv_view){0};
    }
    free(r.k), free(r.v);
    return status;
}

static cpa_status check(void *state, cpa_bench_row *row, cpa_error *err) {
    xattn_state *s = state;
    const cpa_bench_options *o = &s->site->options;
    recalled r = {.k = malloc((size_t)(s->keys * o->k_dim) * sizeof(float)),
                  .v = malloc((size_t)(s->keys * o->v_dim) * sizeof(float))};
    cpa_status status = r.k && r.v ? cpa_bench_recall(s->site, 0, 0, s->keys, &r.kv, err)
                                   : cpa_fail(err, CPA_NO_MEMORY, "bench xattn: no memory for keys");
    if (status == CPA_OK) status = read_bits(s, &r.bits, err);
    row->checked = row->wrong = 0;
    for (int64_t i = 0; status == CPA_OK && i < SAMPLED_ROWS * SAMPLED_HEADS; i++) {
        const int64_t at = (i / SAMPLED_HEADS + 1) * s->queries / SAMPLED_ROWS - 1 - 37 * (i / SAMPLED_HEADS);
        const int64_t head = (i % SAMPLED_HEADS + 1) * o->q_heads / SAMPLED_HEADS - 1;
        if (s->attends) status = check_query(s, &r, cpa_max64(at, 0), head, row, err);
        if (status == CPA_OK && s->estimates && i / SAMPLED_HEADS % 4 == 3)
            status = check_group(s, &r, cpa_max64(at, 0) / s->shape.stride, head, row, err);
    }
    void *const made[] = {r.k, r.v, r.bits, r.kv.k, r.kv.v};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    return status == CPA_OK ? check_decodes(s, row, err) : status;
}

static void release(void *state) {
    xattn_state *s = state;
    if (!s) return;
    void *const used[] = {s->q,   s->out, s->table, s->packed_q, s->packed_k, s->bits, s->row_word,
                          s->max, s->sum, s->sums,  s->lse,      s->counts,   s->kv.k, s->kv.v};
    for (size_t i = 0; s->site && i < sizeof used / sizeof *used; i++) cpa_device_free(s->site->device, used[i]);
    cpa_attend_plan_destroy(s->plan);
    free(s);
}

const cpa_bench cpa_bench_xattn = {
    .name = "xattn",
    .dims = "queries x keys x stride x tau in %",
    .n_dims = 4,
    .shapes_host = "2Kx2Kx8x90",
    .shapes_cuda = "64Kx64Kx8x90,64Kx64Kx16x90,128Kx128Kx8x90,128Kx128Kx16x90,8Kx128Kx8x90",
    .checked = "sampled rows and groups, of some heads",
    .min_ranks = 1,
    .prepare = prepare_whole,
    .run = run,
    .check = check,
    .release = release,
};

const cpa_bench cpa_bench_xattn_estimate = {
    .name = "xattn_estimate",
    .dims = "queries x keys x stride x tau in %",
    .n_dims = 4,
    .shapes_host = "2Kx2Kx8x90",
    .shapes_cuda = "64Kx64Kx8x90,64Kx64Kx16x90,128Kx128Kx8x90,128Kx128Kx16x90,8Kx128Kx8x90",
    .checked = "sampled groups, of some heads",
    .min_ranks = 1,
    .prepare = prepare_estimate,
    .run = run,
    .check = check,
    .release = release,
};

const cpa_bench cpa_bench_attend_blocks = {
    .name = "attend_blocks",
    .dims = "queries x keys x density in %",
    .n_dims = 3,
    .shapes_host = "2Kx2Kx20",
    .shapes_cuda = "64Kx64Kx10,64Kx64Kx30,64Kx64Kx100,128Kx128Kx10,8Kx128Kx10",
    .checked = "sampled rows, of some heads",
    .min_ranks = 1,
    .prepare = prepare_blocks,
    .run = run,
    .check = check,
    .release = release,
};

const cpa_bench cpa_bench_attend_beside = {
    .name = "attend_beside",
    .dims = "queries x keys x density in % x rows of decode x keys of each",
    .n_dims = 5,
    .shapes_host = "1Kx2Kx20x3x2K",
    .shapes_cuda = "16Kx64Kx25x63x16K",
    .checked = "sampled rows, of some heads",
    .min_ranks = 1,
    .prepare = prepare_beside,
    .run = run,
    .check = check,
    .release = release,
};
