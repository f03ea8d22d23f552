/* Logits of an indexer against float64 that knows no pages, shards or limits but those of positions: forms of heads and
 * widths, pages, shards of an owner map, keys that stand for several tokens, largest scores of units of keys; the
 * columns that are -inf, exactly; what is not to be read is NaN. */
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

static int64_t keys_of(const form *f, int64_t sequence) {
    return LENGTHS[sequence] / f->tokens_per_key;
}
static int64_t element_bytes(const form *f) {
    return f->dtype == CPA_BF16 ? 2 : 1;
}
static double element(const form *f, const char *row, int64_t i) {
    return f->dtype == CPA_BF16 ? (double)cpa_from_bf16(((const uint16_t *)(const void *)row)[i])
                                : (double)cpa_from_e4m3((uint8_t)row[i]);
}

/* Numbers of size 1 with few that are large. */
static void fill(const form *f, char *row, int64_t seed) {
    for (int32_t d = 0; d < f->dim; d++) {
        const float x = sinf((float)((seed * 7919 + d * 104729) % 100003)) * ((seed + d) % 29 == 0 ? 12.0f : 1.0f);
        if (f->dtype == CPA_BF16)
            ((uint16_t *)(void *)row)[d] = cpa_to_bf16(x);
        else /* a code of the same sign and about that size: 0x38 is 1 */
            row[d] = (char)((x < 0 ? 0x80 : 0) | (x == 0 ? 0 : (int)fmaxf(0, 0x38 + 8 * log2f(fabsf(x)))));
    }
}

/* n rows as numbers. */
static double *widen(const form *f, const char *rows, int64_t n) {
    double *wide = malloc((size_t)(n * f->dim + 1) * sizeof *wide);
    for (int64_t i = 0; i < n * f->dim; i++) wide[i] = element(f, rows, i);
    return wide;
}

/* The L of a row of queries and a key, and what its terms add up to without their signs. */
static double score(const problem *p, int64_t row, const double *q, const double *key, double *magnitude) {
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

static void expect(problem *p) {
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

static problem make_problem(const form *f) {
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

static void free_problem(problem *p) {
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

static cpa_owner_map map_of_keys(const shard *s, const form *f) {
    return (cpa_owner_map){s->map.cp_size, s->map.interleave / f->tokens_per_key};
}

static void make_items(shard *s, const problem *p) {
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

static cpa_index_cache cache_of(const form *f, const shard *s) {
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

static void send_keys(shard *s, const problem *p) {
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

static void send_rows(shard *s, const problem *p) {
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

static shard make_shard(const problem *p, cpa_owner_map map, int32_t index) {
    shard s = {.map = map, .index = index};
    make_items(&s, p);
    send_keys(&s, p);
    send_rows(&s, p);
    s.columns = (s.columns + p->form->unit - 1) / p->form->unit + 2;
    s.device_tables = cpa_test_upload(stream, s.tables, s.n_entries * (int64_t)sizeof *s.tables);
    return s;
}

static void free_shard(shard *s) {
    void *const memory[] = {s->q, s->weights, s->pool, s->scales, s->device_tables};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    free(s->tables);
}

static cpa_attend_batch batch_of(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
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

static cpa_index_plan *make_plan(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
    cpa_error err = {0};
    cpa_index_plan *plan;
    const cpa_attend_batch batch = batch_of(f, s, items, n_items);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_set(plan, &batch, f->tokens_per_key, &err), CPA_OK);
    return plan;
}

static cpa_index_logits_args args_of(const form *f, const shard *s, void *logits) {
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
static float *run(const form *f, const shard *s, const cpa_attend_item *items, int64_t n_items) {
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

/* ---- what is expected of it ---- */

typedef struct verdict {
    int64_t pattern, far, cells;
    double xy, xx, yy;
} verdict;

/* The largest expected L of a column's keys that the row sees; -inf: none. */
static double expected_column(const problem *p, const shard *s, int64_t row, int64_t column, double *magnitude) {
    const form *f = p->form;
    const int64_t keys = keys_of(f, p->sequence[row]), in_shard = cpa_shard_len(map_of_keys(s, f), s->index, keys);
    double most = -INFINITY;
    *magnitude = 0;
    for (int64_t i = column * f->unit; i < (column + 1) * f->unit && i < in_shard; i++) {
        const int64_t key = cpa_shard_pos(map_of_keys(s, f), s->index, i);
        if ((key + 1) * f->tokens_per_key - 1 > p->position[row]) continue;
        most = fmax(most, p->expected[row * MOST_KEYS + key]);
        *magnitude = fmax(*magnitude, p->magnitude[row * MOST_KEYS + key]);
    }
    return most;
}

/* Tensor cores of compute capability 9.0 add 32 products of codes at once and cut each to 13 bits below the largest: of the
 * four sums of a width of 128 each may be off by that of 33 terms, 4 * 33 * 2^-14 of the largest at worst. What is off by half
 * of that is not those roundings, which have any sign. */
static void judge_cell(verdict *v, double got, double want, double magnitude) {
    const double bar = cpa_test_promises_bits() ? 2e-6 : 4e-3;
    v->cells++;
    if (isinf(want) || !isfinite(got)) {
        v->pattern += got != want;
        return;
    }
    v->far += fabs(got - want) > bar * magnitude;
    v->xy += got * want, v->xx += got * got, v->yy += want * want;
}

static void judge(const problem *p, const shard *s, const float *logits) {
    verdict v = {0};
    for (int64_t i = 0; i < s->n_rows; i++) {
        const float *row = logits + i * (s->columns + PAD);
        for (int64_t c = 0; c < s->columns + PAD; c++) {
            double magnitude = 0;
            const int is_left_alone = s->rows[i] < 0 || c >= s->columns;
            const double want = is_left_alone ? UNTOUCHED : expected_column(p, s, s->rows[i], c, &magnitude);
            if (is_left_alone)
                v.pattern += row[c] != UNTOUCHED;
            else
                judge_cell(&v, (double)row[c], want, magnitude);
        }
    }
    CU_ASSERT_EQUAL(v.pattern, 0);
    CU_ASSERT_EQUAL(v.far, 0);
    CPA_ASSERT_ORDER(1 - 2 * v.xy / (v.xx + v.yy), <, 5e-6);
}

/* On the host: the bits of each row and key are those of one rank that has all keys. */
static void check_bits_of_one_rank(const problem *p, const shard *s, const float *logits, const shard *one,
                                   const float *all) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < s->n_rows; i++) {
        int64_t of_one = 0;
        while (one->rows[of_one] != s->rows[i]) of_one++;
        for (int64_t c = 0; s->rows[i] >= 0 && c < s->columns; c++) {
            const int64_t key = cpa_shard_pos(map_of_keys(s, p->form), s->index, c);
            const float got = logits[i * (s->columns + PAD) + c];
            if (isinf(got)) continue;
            wrong += got != all[of_one * (one->columns + PAD) + key];
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* ---- tests ---- */

static void check_form(const form *f, int32_t most_ranks, const int32_t *runs, int n_runs) {
    problem p = make_problem(f);
    shard one = make_shard(&p, (cpa_owner_map){1, f->tokens_per_key}, 0);
    float *all = run(f, &one, one.items, one.n_items);
    judge(&p, &one, all);
    for (int32_t n = 2; n <= most_ranks; n++) {
        for (int r = 0; r < n_runs; r++) {
            for (int32_t index = 0; index < n; index++) {
                shard s = make_shard(&p, (cpa_owner_map){n, runs[r]}, index);
                float *logits = run(f, &s, s.items, s.n_items);
                judge(&p, &s, logits);
                if (cpa_test_promises_bits() && f->unit == 1) check_bits_of_one_rank(&p, &s, logits, &one, all);
                free(logits);
                free_shard(&s);
            }
        }
    }
    free(all);
    free_shard(&one);
    free_problem(&p);
}

static void every_shard_has_the_logits_of_its_keys(void) {
    const int32_t heads[] = {32, 64}, dims[] = {32, 64, 128}, runs[] = {64, 256};
    cpa_test_device_open(2, &device, &stream);
    for (size_t h = 0; h < sizeof heads / sizeof *heads; h++) {
        for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
            const form f = {heads[h], dims[d], CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
            check_form(&f, heads[h] + dims[d] == 192 ? 4 : 2, runs, 2);
        }
    }
    cpa_test_device_close(device, stream);
}

static void forms_of_heads_widths_pages_and_units(void) {
    const form forms[] = {
        {4, 128, CPA_BF16, 0, 64, 4, 1, 0, 0}, /* four heads without weights, keys of four tokens */
        {4, 128, CPA_BF16, 0, 16, 1, 4, 0, 0},      {64, 128, CPA_FP8_E4M3, 1, 64, 1, 16, 0, 0},
        {32, 64, CPA_BF16, 1, 128, 1, 1, 0, 0},     {8, 32, CPA_BF16, 1, 32, 2, 2, 0, 0},
        {64, 128, CPA_FP8_E4M3, 1, 1, 1, 1, 1, 0}, /* keys in a tensor */
        {64, 128, CPA_FP8_E4M3, 1, 32, 4, 1, 1, 1}, {128, 128, CPA_FP8_E4M3, 1, 256, 1, 1, 0, 1},
        {1, 64, CPA_FP8_E4M3, 1, 4, 1, 8, 0, 0},    {3, 40, CPA_FP8_E4M3, 1, 8, 1, 1, 0, 0},
        {70, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0}, {5, 256, CPA_BF16, 0, 64, 1, 1, 0, 0},
    };
    const int32_t runs[] = {32};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) check_form(&forms[i], 2, runs, 1);
    cpa_test_device_close(device, stream);
}

/* Of later keys alone, and of rows alone: with the bits of all together. */
static void an_item_has_its_own_keys_and_no_others(void) {
    const form f = {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(3, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    float *all = run(&f, &s, s.items, s.n_items);
    cpa_attend_item item = s.items[SEQUENCES - 1];
    item.q_row += 7, item.q_first += 7, item.q_count = 20;
    item.k_first = 256, item.k_count -= 256 + 11, item.table += 256 / f.block_size;
    float *some = run(&f, &s, &item, 1);
    int64_t wrong = 0;
    for (int64_t i = 0; i < s.n_rows; i++) {
        const int is_of_item = i >= item.q_row && i < item.q_row + item.q_count;
        for (int64_t c = 0; c < s.columns; c++) {
            const float got = some[i * (s.columns + PAD) + c];
            if (!is_of_item) {
                wrong += got != UNTOUCHED;
            } else if (c >= item.k_count || c + 256 > item.q_first + i - item.q_row) {
                wrong += got != -INFINITY;
            } else {
                const float want = all[i * (s.columns + PAD) + c + 256];
                wrong += cpa_test_promises_bits() ? got != want : fabsf(got - want) > 1e-3f * (1 + fabsf(want));
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(some);
    free(all);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

/* So many items that a device cuts their keys into few long pieces, each with the row and the keys of one. */
static void many_items_have_the_logits_of_one(void) {
    enum { ITEMS = 132, LONGEST = 2 };
    const form f = {16, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_attend_item items[ITEMS];
    cpa_test_device_open(2, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0), many = s;
    float *one = run(&f, &s, s.items, s.n_items);
    const int64_t row = s.items[LONGEST].q_row, stride = s.columns + PAD, q_bytes = (int64_t)f.heads * f.dim;
    char *q = malloc((size_t)(ITEMS * q_bytes));
    float *weights = malloc(sizeof *weights * (size_t)(ITEMS * f.heads));
    for (int64_t i = 0; i < ITEMS; i++) {
        items[i] = s.items[LONGEST], items[i].q_row = i;
        memcpy(q + i * q_bytes, p.q + s.rows[row] * q_bytes, (size_t)q_bytes);
        memcpy(weights + i * f.heads, p.weights + s.rows[row] * f.heads, sizeof *weights * (size_t)f.heads);
    }
    many.n_rows = ITEMS;
    many.q = cpa_test_upload(stream, q, ITEMS * q_bytes);
    many.weights = cpa_test_upload(stream, weights, ITEMS * f.heads * (int64_t)sizeof *weights);
    float *got = run(&f, &many, items, ITEMS);
    int64_t wrong = 0;
    for (int64_t i = 0; i < ITEMS * stride; i++) {
        const float want = one[row * stride + i % stride];
        const int is_same = got[i] == want || (!cpa_test_promises_bits() && isfinite(want) &&
                                               fabsf(got[i] - want) <= 1e-3f * (1 + fabsf(want)));
        wrong += !is_same;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    void *const on_device[] = {many.q, many.weights}, *const own[] = {got, weights, q, one};
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) cpa_test_free(stream, on_device[i]);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static void results_repeat_bit_for_bit(void) {
    const form f = {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(2, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    float *first = run(&f, &s, s.items, s.n_items);
    for (int i = 0; i < 20; i++) {
        float *again = run(&f, &s, s.items, s.n_items);
        CU_ASSERT_EQUAL(memcmp(first, again, (size_t)(s.n_rows * (s.columns + PAD)) * sizeof *first), 0);
        free(again);
    }
    free(first);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

/* ---- reserved plans ---- */

enum { STEPS = 5 };

/* Items of a step of a reserved plan: some of those of a shard, with fewer rows and keys, those of the last one none. */
static int64_t items_of_step(const shard *s, int step, cpa_attend_item items[4 * SEQUENCES]) {
    int64_t n = 0;
    for (int64_t i = 0; i < s->n_items; i++) {
        const cpa_attend_item *item = &s->items[i];
        const int64_t cut = step == 0 ? 0 : (i * 3 + step) % 4;
        if (step == STEPS - 1 || (step == 3 && i % 2)) continue;
        items[n] = *item;
        items[n].q_count = cut < item->q_count ? item->q_count - cut : item->q_count;
        items[n].k_count = item->k_count > 300 * cut ? item->k_count - 300 * cut : item->k_count;
        n++;
    }
    return n;
}

static cpa_status set_items(cpa_index_plan *plan, const form *f, const shard *s, const cpa_attend_item *items,
                            int64_t n_items, cpa_error *err) {
    const cpa_attend_batch batch = batch_of(f, s, items, n_items);
    return cpa_index_plan_set(plan, &batch, f->tokens_per_key, err);
}

/* Steps of a plan that is reserved for the rows of a shard, or of those with up to `item_rows`, beside the same of plans
 * of their own: one memory of results, whose bits are the same, and the same are left alone. */
static void check_reserved(const problem *p, int64_t item_rows, cpa_owner_map map, int32_t index) {
    const form *f = p->form;
    cpa_attend_item items[4 * SEQUENCES];
    cpa_index_plan *plan;
    shard s = make_shard(p, map, index);
    int64_t kept = 0;
    for (int64_t i = 0; i < s.n_items; i++)
        if (s.items[i].q_count <= item_rows) s.items[kept++] = s.items[i];
    s.n_items = kept;
    const cpa_index_limits limits = {.size = sizeof limits,
                                     .items = s.n_items + 2,
                                     .item_rows = item_rows,
                                     .rows = s.n_rows,
                                     .keys = s.columns * f->unit,
                                     .table_entries = f->tables_on_device ? 0 : s.n_entries};
    const int64_t n = s.n_rows * (s.columns + PAD), bytes = n * (int64_t)sizeof(float);
    float *got = malloc((size_t)bytes);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_reserve(plan, &limits, NULL), CPA_OK);
    for (int step = 0; step < STEPS; step++) {
        const int64_t n_items = items_of_step(&s, step, items);
        float *want = run(f, &s, items, n_items);
        for (int64_t i = 0; i < n; i++) got[i] = UNTOUCHED;
        void *memory = cpa_test_upload(stream, got, bytes);
        const cpa_index_logits_args args = args_of(f, &s, memory);
        CU_ASSERT_EQUAL(set_items(plan, f, &s, items, n_items, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_index_logits(plan, &args, stream), CPA_OK);
        cpa_test_download(stream, got, memory, bytes);
        CU_ASSERT_EQUAL(memcmp(got, want, (size_t)bytes), 0);
        cpa_test_free(stream, memory);
        free(want);
    }
    free(got);
    cpa_index_plan_destroy(plan);
    free_shard(&s);
}

static void reserved_plans_have_the_bits_of_others(void) {
    const form forms[] = {
        {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 1}, {64, 128, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0},
        {4, 128, CPA_BF16, 0, 16, 1, 4, 0, 1},      {128, 128, CPA_FP8_E4M3, 1, 256, 1, 1, 0, 0},
        {3, 40, CPA_FP8_E4M3, 1, 8, 1, 1, 0, 0},    {8, 64, CPA_BF16, 1, 32, 2, 2, 0, 1},
    };
    const int64_t item_rows[] = {1, 2, 5, 40};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        const cpa_owner_map one = {1, 1}, three = {3, 4 * forms[i].block_size};
        problem p = make_problem(&forms[i]);
        for (size_t r = 0; r < sizeof item_rows / sizeof *item_rows; r++)
            check_reserved(&p, item_rows[r], i % 2 ? three : one, i % 2 ? (int32_t)(r % 3) : 0);
        free_problem(&p);
    }
    cpa_test_device_close(device, stream);
}

static void expect_beyond(cpa_index_plan *plan, const form *f, const shard *s, const cpa_attend_item *items, int64_t n,
                          const char *line) {
    cpa_error err = {0};
    CU_ASSERT_EQUAL(set_items(plan, f, s, items, n, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, line);
}

static void what_is_beyond_the_limits_is_refused(void) {
    const form f = {4, 64, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_index_plan *plan;
    cpa_error err = {0};
    cpa_test_device_open(1, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    cpa_index_limits limits = {.size = sizeof limits, .items = 2, .item_rows = 2, .rows = 3, .keys = 64};
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "index plan: an upload of a plan that is not reserved");
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, NULL, &err), CPA_INVALID);
    limits.items = 0;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: reserved for 0 items, expected 1..2147483647");
    limits.items = 2, limits.item_rows = 4;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(err.message, "index plan: reserved for 4 rows an item, expected 1..3, all rows");
    limits.item_rows = 2, limits.table_entries = s.n_entries;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_upload(plan, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "index plan: an upload of a plan that is not set");
    CU_ASSERT_EQUAL(set_items(plan, &f, &s, s.items, 2, &err), CPA_OK);
    expect_beyond(plan, &f, &s, s.items, 3, "index plan: 3 items with rows, but the plan is reserved for 2");
    expect_beyond(plan, &f, &s, s.items + 4, 1, "index plan: 5 rows of an item, but the plan is reserved for 2");
    expect_beyond(plan, &f, &s, s.items + 2, 1, "index plan: 5 rows, but the plan is reserved for 3");
    cpa_attend_item longer = s.items[3];
    longer.q_row = 0;
    expect_beyond(plan, &f, &s, &longer, 1, "index plan: 517 keys of an item, but the plan is reserved for 64");
    limits.table_entries = 1;
    CU_ASSERT_EQUAL(cpa_index_plan_reserve(plan, &limits, &err), CPA_OK);
    char line[128];
    snprintf(line, sizeof line, "index plan: %d table entries on the host, but the plan is reserved for 1",
             (int)s.n_entries);
    expect_beyond(plan, &f, &s, s.items, 2, line);
    cpa_index_plan_destroy(plan);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static void expect_line(const cpa_index_plan *plan, const cpa_index_logits_args *args, const char *line) {
    CU_ASSERT_EQUAL(cpa_index_logits(plan, args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), line);
}

static void bad_logits_are_refused_in_one_line(void) {
    const form f = {4, 64, CPA_FP8_E4M3, 1, 64, 1, 1, 0, 0};
    cpa_test_device_open(1, &device, &stream);
    problem p = make_problem(&f);
    shard s = make_shard(&p, (cpa_owner_map){1, 1}, 0);
    cpa_index_plan *plan = make_plan(&f, &s, s.items, s.n_items), *unset;
    void *logits = cpa_test_upload(stream, p.q, 1);
    const cpa_index_logits_args good = args_of(&f, &s, logits);
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &unset, NULL), CPA_OK);
    cpa_index_logits_args a = good;
    expect_line(unset, &a, "index_logits: the plan has not been set");
    a.heads = 0;
    expect_line(plan, &a, "index_logits: heads is 0, expected 1 to 128");
    a = good, a.hadamard = 1;
    expect_line(plan, &a,
                "index_logits: the queries have hadamard 1, but the cache 0; expected both or neither transformed");
    a = good, a.cache.kv.k = NULL;
    expect_line(plan, &a, "index_logits: the cache of index keys is NULL");
    a = good, a.weights = NULL;
    expect_line(plan, &a, "index_logits: weights is NULL, expected those that index_q made of queries in codes");
    a = good, a.cache.kv.block_size = 32;
    expect_line(plan, &a, "index_logits: the cache has blocks of 32 tokens, but the plan of 64");
    a = good, a.width = 4412;
    expect_line(
        plan, &a,
        "index_logits: width is 4412, expected at least the 4413 columns of the longest item, and at most 2^40");
    a = good, a.unit = 3;
    expect_line(plan, &a, "index_logits: unit is 3, expected a power of two up to 16");
    a = good, a.k_scales = s.scales;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    a = good, a.row_stride = a.width - 1;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "row_stride is 4414"));
    a = good, a.q_row_stride = 4 * 64 - 1;
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &a, stream), CPA_INVALID);
    cpa_index_plan_destroy(unset);
    cpa_index_plan_destroy(plan);
    cpa_test_free(stream, logits);
    free_shard(&s);
    free_problem(&p);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"every shard has the logits of its keys", every_shard_has_the_logits_of_its_keys},
    {"forms of heads, widths, pages and units", forms_of_heads_widths_pages_and_units},
    {"an item has its own keys and no others", an_item_has_its_own_keys_and_no_others},
    {"many items have the logits of one", many_items_have_the_logits_of_one},
    {"results repeat bit for bit", results_repeat_bit_for_bit},
    {"reserved plans have the bits of others", reserved_plans_have_the_bits_of_others},
    {"what is beyond the limits is refused", what_is_beyond_the_limits_is_refused},
    {"bad logits are refused in one line", bad_logits_are_refused_in_one_line},
};
CPA_DEVICE_TEST_MAIN("index_logits", tests)
