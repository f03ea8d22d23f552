/* Rows of an indexer's queries over keys of a few sequences, whole and as shards of an owner map, in poisoned pages of a
 * device, and what index_logits gives for them: for the tests of logits and of reserved plans. */
#ifndef CPA_TESTS_INDEX_CASES_H
#define CPA_TESTS_INDEX_CASES_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/cpattn.h>

#include "base/convert.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum { SEQUENCES = 6, MOST_ROWS = 80, MOST_KEYS = 4420 };
/* Tokens of sequences, of which the last ones are queries: decode of one row, of two, and chunks. */
static const int64_t LENGTHS[SEQUENCES] = {1, 64, 4413, 517, 130, 890}, QUERIES[SEQUENCES] = {1, 2, 1, 2, 5, 40};

typedef struct form {
    int32_t heads, dim;
    cpa_dtype dtype;
    int weighed;
    int32_t block_size, tokens_per_key, unit;
    int scales_apart, tables_on_device;
} form;

/* Rows of queries and keys of all sequences, as they are in memory and as numbers. */
typedef struct problem {
    const form *form;
    int64_t rows;
    int64_t sequence[MOST_ROWS], position[MOST_ROWS];
    char *q;        /* [rows, heads, dim] */
    float *weights; /* [rows, heads] */
    char *keys[SEQUENCES];
    float *scales[SEQUENCES];
    double *expected, *magnitude; /* [rows, MOST_KEYS]: L of each key, seen or not; the same of absolute values */
} problem;

static inline int64_t keys_of(const form *f, int64_t sequence) {
    return LENGTHS[sequence] / f->tokens_per_key;
}
static inline int64_t element_bytes(const form *f) {
    return f->dtype == CPA_BF16 ? 2 : 1;
}
static inline double element(const form *f, const char *row, int64_t i) {
    return f->dtype == CPA_BF16 ? (double)cpa_from_bf16(((const uint16_t *)(const void *)row)[i])
                                : (double)cpa_from_e4m3((uint8_t)row[i]);
}

/* Numbers of size 1 with few that are large. */
static inline void fill(const form *f, char *row, int64_t seed) {
    for (int32_t d = 0; d < f->dim; d++) {
        const float x = sinf((float)((seed * 7919 + d * 104729) % 100003)) * ((seed + d) % 29 == 0 ? 12.0f : 1.0f);
        if (f->dtype == CPA_BF16)
            ((uint16_t *)(void *)row)[d] = cpa_to_bf16(x);
        else /* a code of the same sign and about that size: 0x38 is 1 */
            row[d] = (char)((x < 0 ? 0x80 : 0) | (x == 0 ? 0 : (int)fmaxf(0, 0x38 + 8 * log2f(fabsf(x)))));
    }
}

/* n rows as numbers. */
static inline double *widen(const form *f, const char *rows, int64_t n) {
    double *wide = malloc((size_t)(n * f->dim + 1) * sizeof *wide);
    for (int64_t i = 0; i < n * f->dim; i++) wide[i] = element(f, rows, i);
    return wide;
}

/* The L of a row of queries and a key, and what its terms add up to without their signs. */
static inline double score(const problem *p, int64_t row, const double *q, const double *key, double *magnitude) {
    const form *f = p->form;
    double sum = 0;
    *magnitude = 0;
    for (int32_t h = 0; h < f->heads; h++, q += f->dim) {
        const double weight = f->weighed ? (double)p->weights[row * f->heads + h] : 1;
        double dot = 0, most = 0;
        for (int32_t d = 0; d < f->dim; d++) dot += q[d] * key[d], most += fabs(q[d] * key[d]);
        sum += (dot > 0 ? dot : 0) * weight, *magnitude += most * fabs(weight);
    }
    return sum;
}

static inline void expect(problem *p) {
    const form *f = p->form;
    double *q = widen(f, p->q, p->rows * f->heads), *keys = NULL;
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t s = p->sequence[row];
        if (row == 0 || s != p->sequence[row - 1]) free(keys), keys = widen(f, p->keys[s], keys_of(f, s));
        for (int64_t k = 0; k < keys_of(f, s); k++) {
            const double scale = f->dtype == CPA_BF16 ? 1 : (double)p->scales[s][k];
            double *magnitude = &p->magnitude[row * MOST_KEYS + k];
            p->expected[row * MOST_KEYS + k] =
                score(p, row, q + row * f->heads * f->dim, keys + k * f->dim, magnitude) * scale;
            *magnitude *= scale;
        }
    }
    free(keys);
    free(q);
}

static inline problem make_problem(const form *f) {
    problem p = {.form = f};
    const int64_t bytes = element_bytes(f) * f->dim;
    for (int64_t s = 0; s < SEQUENCES; s++) {
        const int64_t n = keys_of(f, s);
        p.keys[s] = malloc((size_t)(n * bytes + 1)), p.scales[s] = malloc((size_t)(n + 1) * sizeof(float));
        for (int64_t k = 0; k < n; k++) {
            fill(f, p.keys[s] + k * bytes, s * 1000 + k + 1);
            p.scales[s][k] = ldexpf(1 + (float)(k % 7) / 8, (int)(k % 5) - 4);
        }
        for (int64_t i = 0; i < QUERIES[s]; i++, p.rows++)
            p.sequence[p.rows] = s, p.position[p.rows] = LENGTHS[s] - QUERIES[s] + i;
    }
    p.q = malloc((size_t)(p.rows * f->heads * bytes));
    p.weights = malloc((size_t)(p.rows * f->heads) * sizeof *p.weights);
    p.expected = malloc(sizeof *p.expected * (size_t)(p.rows * MOST_KEYS));
    p.magnitude = malloc(sizeof *p.magnitude * (size_t)(p.rows * MOST_KEYS));
    for (int64_t i = 0; i < p.rows * f->heads; i++) {
        fill(f, p.q + i * bytes, 50000 + i);
        p.weights[i] = cosf((float)(i * 13)) * (i % 17 == 0 ? 8.0f : 1.0f);
    }
    expect(&p);
    return p;
}

static inline void free_problem(problem *p) {
    void *const memory[] = {p->q, p->weights, p->expected, p->magnitude};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
    for (int s = 0; s < SEQUENCES; s++) free(p->keys[s]), free(p->scales[s]);
}

/* ---- a shard of it on the device ---- */

/* The keys of one shard in poisoned pages, and the rows of all shards as items: row `i` of q is row rows[i] of the
 * problem, -1 for one that no item has. */
typedef struct shard {
    cpa_owner_map map;
    int32_t index;
    cpa_attend_item items[4 * SEQUENCES];
    int64_t n_items, n_rows, rows[MOST_ROWS + 4];
    int32_t *tables;
    int64_t n_entries, num_blocks, columns;
    void *q, *weights, *pool, *scales, *device_tables;
} shard;

enum { SPARE = 3, PAD = 5, UNTOUCHED = 77 };

static inline cpa_owner_map map_of_keys(const shard *s, const form *f) {
    return (cpa_owner_map){s->map.cp_size, s->map.interleave / f->tokens_per_key};
}

static inline void make_items(shard *s, const problem *p) {
    const form *f = p->form;
    int64_t first_row = 0, table = 0;
    s->tables = malloc(SEQUENCES * (MOST_KEYS + 2 * SPARE) * sizeof *s->tables);
    for (int64_t seq = 0; seq < SEQUENCES; first_row += QUERIES[seq++]) {
        const int64_t keys = cpa_shard_len(map_of_keys(s, f), s->index, keys_of(f, seq));
        const int64_t blocks = (keys + f->block_size - 1) / f->block_size;
        int32_t *own = cpa_test_block_table(keys, f->block_size, s->num_blocks + 1, SPARE);
        memcpy(s->tables + table, own, (size_t)(blocks + SPARE) * sizeof *own);
        free(own);
        for (int32_t q = 0; q < s->map.cp_size; q++) {
            const int64_t first = cpa_shard_len(s->map, q, LENGTHS[seq] - QUERIES[seq]);
            const int64_t count = cpa_shard_len(s->map, q, LENGTHS[seq]) - first;
            s->items[s->n_items++] = (cpa_attend_item){.q_row = s->n_rows,
                                                       .q_count = count,
                                                       .q_first = first,
                                                       .k_count = keys,
                                                       .table = table,
                                                       .q_set = {CPA_TOKENS_SHARD, q},
                                                       .k_set = {CPA_TOKENS_SHARD, s->index}};
            for (int64_t i = 0; i < count; i++)
                s->rows[s->n_rows++] = first_row + cpa_shard_pos(s->map, q, first + i) - (LENGTHS[seq] - QUERIES[seq]);
        }
        if (seq == 1) s->rows[s->n_rows++] = -1;
        table += blocks + SPARE, s->num_blocks += blocks + 1;
        s->columns = keys > s->columns ? keys : s->columns;
    }
    s->n_entries = table, s->num_blocks += 1;
}

static inline cpa_index_cache cache_of(const form *f, const shard *s) {
    return (cpa_index_cache){.kv = {.k = s->pool,
                                    .dtype = f->dtype,
                                    .block_size = f->block_size,
                                    .num_blocks = s->num_blocks,
                                    .kv_heads = 1,
                                    .k_dim = f->dim,
                                    .v_dim = f->dim,
                                    .k_scale = f->scales_apart ? 1 : 0,
                                    .v_in_k = 1}};
}

static inline void send_keys(shard *s, const problem *p) {
    const form *f = p->form;
    const int64_t row = element_bytes(f) * f->dim;
    const float tensor = f->scales_apart ? 1.0f : 0.0f;
    const int64_t block = cpa_kv_block_bytes(f->dtype, CPA_KEYS, tensor, f->block_size, 1, f->dim);
    char *pool = cpa_test_poisoned(s->num_blocks, block);
    float *apart = cpa_test_poisoned(s->num_blocks * f->block_size, sizeof *apart);
    for (int64_t seq = 0; seq < SEQUENCES; seq++) {
        const cpa_attend_item *item = &s->items[seq * s->map.cp_size];
        for (int64_t i = 0; i < item->k_count; i++) {
            const int64_t key = cpa_shard_pos(map_of_keys(s, f), s->index, i), offset = i % f->block_size;
            const int64_t id = s->tables[item->table + i / f->block_size];
            char *at = pool + id * block;
            memcpy(at + offset * row, p->keys[seq] + key * row, (size_t)row);
            apart[id * f->block_size + offset] = p->scales[seq][key];
            if (f->dtype == CPA_FP8_E4M3 && !f->scales_apart)
                memcpy(at + block - 4 * (f->block_size - offset), &p->scales[seq][key], sizeof(float));
        }
    }
    s->pool = cpa_test_upload(stream, pool, s->num_blocks * block);
    s->scales = cpa_test_upload(stream, apart, s->num_blocks * f->block_size * (int64_t)sizeof *apart);
    free(apart);
    free(pool);
}

static inline void send_rows(shard *s, const problem *p) {
    const form *f = p->form;
    const int64_t row = f->heads * f->dim * element_bytes(f), weights = f->heads * (int64_t)sizeof(float);
    char *q = cpa_test_poisoned(s->n_rows, row), *w = cpa_test_poisoned(s->n_rows, weights);
    for (int64_t i = 0; i < s->n_rows; i++) {
        if (s->rows[i] < 0) continue;
        memcpy(q + i * row, p->q + s->rows[i] * row, (size_t)row);
        memcpy(w + i * weights, p->weights + s->rows[i] * f->heads, (size_t)weights);
    }
    s->q = cpa_test_upload(stream, q, s->n_rows * row);
    s->weights = cpa_test_upload(stream, w, s->n_rows * weights);
    free(w);
    free(q);
}

static inline shard make_shard(const problem *p, cpa_owner_map map, int32_t index) {
    shard s = {.map = map, .index = index};
    make_items(&s, p);
    send_keys(&s, p);
    send_rows(&s, p);
    s.columns = (s.columns + p->form->unit - 1) / p->form->unit + 2;
    s.device_tables = cpa_test_upload(stream, s.tables, s.n_entries * (int64_t)sizeof *s.tables);
    return s;
}

static inline void free_shard(shard *s) {
    void *const memory[] = {s->q, s->weights, s->pool, s->scales, s->device_tables};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    free(s->tables);
}

static inline cpa_attend_batch batch_of(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
    return (cpa_attend_batch){
        .size = sizeof(cpa_attend_batch),
        .map = s->map,
        .shape = {.q_heads = 8, .kv_heads = 1, .k_dim = 64, .v_dim = 64, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
        .block_size = f->block_size,
        .items = items,
        .n_items = n_items,
        .block_tables = f->tables_on_device ? s->device_tables : s->tables,
        .n_table_entries = s->n_entries,
        .block_tables_on_device = f->tables_on_device,
        .num_blocks = f->tables_on_device ? s->num_blocks : 0};
}

static inline cpa_index_plan *make_plan(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
    cpa_error err = {0};
    cpa_index_plan *plan;
    const cpa_attend_batch batch = batch_of(f, s, items, n_items);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_set(plan, &batch, f->tokens_per_key, &err), CPA_OK);
    return plan;
}

static inline cpa_index_logits_args args_of(const form *f, const shard *s, void *logits) {
    return (cpa_index_logits_args){.size = sizeof(cpa_index_logits_args),
                                   .heads = f->heads,
                                   .q = s->q,
                                   .weights = f->weighed ? s->weights : NULL,
                                   .cache = cache_of(f, s),
                                   .logits = logits,
                                   .width = s->columns,
                                   .row_stride = s->columns + PAD,
                                   .unit = f->unit,
                                   .k_scales = f->scales_apart ? s->scales : NULL};
}

/* [n_rows, columns + PAD], UNTOUCHED where nothing was written. */
static inline float *run(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
    const int64_t n = s->n_rows * (s->columns + PAD), bytes = n * (int64_t)sizeof(float);
    float *logits = malloc((size_t)bytes);
    for (int64_t i = 0; i < n; i++) logits[i] = UNTOUCHED;
    void *memory = cpa_test_upload(stream, logits, bytes);
    cpa_index_plan *plan = make_plan(f, s, items, n_items);
    const cpa_index_logits_args args = args_of(f, s, memory);
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &args, stream), CPA_OK);
    cpa_test_download(stream, logits, memory, bytes);
    cpa_index_plan_destroy(plan);
    cpa_test_free(stream, memory);
    return logits;
}

#endif
