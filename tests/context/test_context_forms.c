/* Rows of several forms in one step: other widths, masks and scales over one cache, with and without a matrix, by
 * pass-KV, by pass-Q, on one rank and replicated, against the float64 reference of whole sequences. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/device.h"
#include "kernels/operators.h"
#include "src/check/cases/judge.h"
#include "src/context/context_plan.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { FORMS = 3, LONG = 1200, HUGE_ENTRY = 0x7fffffff };

/* A cache, and the forms that attend it: all of it; fewer columns under a window, with a matrix; and fewer columns of
 * keys, or with a matrix that widens states. */
typedef struct forms_case {
    cpa_test_shape shape;
    cpa_row_form forms[FORMS];
} forms_case;

static const forms_case CASES[] = {
    {{.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 48, .block_size = 16, .interleave = 16},
     {{0}, {.k_dim = 32, .v_dim = 16, .out_dim = 24}, {.k_dim = 40}}},
    {{.q_heads = 8,
      .kv_heads = 2,
      .k_dim = 128,
      .v_dim = 128,
      .block_size = 16,
      .interleave = 32,
      .dtype = CPA_BF16,
      .head_major = 1},
     {{0}, {.k_dim = 64, .v_dim = 64}, {.v_dim = 64, .out_dim = 128}}},
};
enum { N_CASES = sizeof CASES / sizeof *CASES };

static const cpa_mask MASKS[FORMS] = {
    {.causal = 1}, {.causal = 1, .window = 70, .sinks = 3}, {.causal = 1, .window = 200}};
static const float SCALES[FORMS] = {0, 0.3f, 0};

static const cpa_placement PLACEMENTS[] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 1},
                                           {CPA_SHARDED, 2}, {CPA_SHARDED, 3}, {CPA_ON_RANK, 0}};
static const int64_t LENGTHS[] = {420, 230, 90, 333, 150, 60};
enum { N_SEQUENCES = sizeof LENGTHS / sizeof *LENGTHS };

typedef struct form_chunk {
    cpa_test_chunk chunk;
    int32_t form;
} form_chunk;

/* Prefill beside decode, by either algorithm; all of it by pass-Q; decode of one form, and of all; prefill of one. */
static const form_chunk MIXED[] = {{{0, 250, 170, CPA_PASS_KV}, 0}, {{1, 229, 1, CPA_PASS_Q}, 1},
                                   {{2, 0, 90, CPA_PASS_KV}, 0},    {{3, 300, 33, CPA_PASS_KV}, 1},
                                   {{4, 120, 30, CPA_PASS_Q}, 2},   {{5, 59, 1, CPA_PASS_Q}, 1}};
static const form_chunk BY_QUERIES[] = {{{0, 380, 40, CPA_PASS_Q}, 0},
                                        {{1, 229, 1, CPA_PASS_Q}, 2},
                                        {{3, 332, 1, CPA_PASS_Q}, 1},
                                        {{4, 149, 1, CPA_PASS_Q}, 1}};
static const form_chunk DECODE[] = {{{0, 419, 1, CPA_PASS_Q}, 1},
                                    {{1, 229, 1, CPA_PASS_Q}, 1},
                                    {{2, 89, 1, CPA_PASS_Q}, 1},
                                    {{3, 332, 1, CPA_PASS_Q}, 1}};
static const form_chunk DECODES[] = {{{0, 419, 1, CPA_PASS_Q}, 0},
                                     {{1, 229, 1, CPA_PASS_Q}, 1},
                                     {{2, 89, 1, CPA_PASS_Q}, 2}, /* lies on one rank */
                                     {{3, 332, 1, CPA_PASS_Q}, 1}};
static const form_chunk PREFILL[] = {{{0, 0, 420, CPA_PASS_KV}, 2}, {{5, 0, 60, CPA_PASS_KV}, 2}};

typedef struct step {
    const form_chunk *chunks;
    int64_t n;
} step;
#define STEP(chunks) ((step){chunks, sizeof(chunks) / sizeof *(chunks)})

/* Who has the rows; where each rank has its own, whether keys come from all peers at once, as on a device. */
typedef enum site_kind { OWNED, REPLICATED, GATHERED } site_kind;

typedef struct site {
    const forms_case *is;
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_context *context;
    void *matrices[FORMS]; /* of forms that have one; on the device */
    site_kind kind;
    int64_t padded_rows; /* of steps that are planned ahead; 0: they are not */
} site;

static int32_t k_dim_of(const site *s, int f) {
    return s->is->forms[f].k_dim ? s->is->forms[f].k_dim : s->is->shape.k_dim;
}
static int32_t v_dim_of(const site *s, int f) {
    return s->is->forms[f].v_dim ? s->is->forms[f].v_dim : s->is->shape.v_dim;
}
static int32_t out_dim_of(const site *s, int f) {
    return s->is->forms[f].out_dim ? s->is->forms[f].out_dim : v_dim_of(s, f);
}

/* An element of a matrix: some four of a column are not 0, so that results are as large as states, and each head has
 * another. */
static float matrix_at(const site *s, int f, int32_t head, int32_t row, int32_t column) {
    const int32_t place = (7 * row + 3 * column + 5 * head) % (v_dim_of(s, f) / 4);
    return place ? 0 : (row + column + head) % 3 ? 0.5f : -0.75f;
}

static void upload_matrix(site *s, int f) {
    const int32_t heads = s->is->shape.q_heads, v_dim = v_dim_of(s, f), out_dim = out_dim_of(s, f);
    const int64_t n = (int64_t)heads * v_dim * out_dim, element = cpa_dtype_bytes(s->is->shape.dtype);
    float *wide = cpa_test_poisoned(n, sizeof *wide), *at = wide;
    void *matrix = cpa_test_poisoned(n, element);
    for (int32_t h = 0; h < heads; h++)
        for (int32_t d = 0; d < v_dim; d++)
            for (int32_t i = 0; i < out_dim; i++) *at++ = matrix_at(s, f, h, d, i);
    cpa_narrow(matrix, wide, s->is->shape.dtype, n);
    s->matrices[f] = cpa_test_upload(s->stream, matrix, n * element);
    free(matrix);
    free(wide);
}

static cpa_context_options options_of(const site *s) {
    cpa_context_options options = cpa_test_context_options(&s->is->shape, 0);
    options.forms = s->is->forms;
    options.n_forms = FORMS;
    if ((s->kind == REPLICATED)) options.rows = CPA_ROWS_REPLICATED;
    return options;
}

static void open_site(site *s, const forms_case *is, const int64_t *lengths, const cpa_placement *placements, int64_t n,
                      site_kind kind) {
    *s = (site){.is = is, .kind = kind};
    cpa_test_device_open(1, &s->device, &s->stream);
    if (kind == GATHERED) s->device->caps.bit_exact = 0, s->device->caps.split_tokens = 1;
    cpa_test_cache_init(&s->cache, is->shape, 23, lengths, placements, n);
    const cpa_context_options options = options_of(s);
    cpa_error err = {0};
    CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s->device, &options, &s->context, &err), CPA_OK);
    for (int f = 0; f < FORMS; f++)
        if (is->forms[f].out_dim) upload_matrix(s, f);
}

static void close_site(site *s) {
    cpa_context_destroy(s->context);
    for (int f = 0; f < FORMS; f++) cpa_test_free(s->stream, s->matrices[f]);
    cpa_test_cache_destroy(&s->cache);
    cpa_test_device_close(s->device, s->stream);
}

/* ---- the rows of a form ---- */

static int32_t first_head(const site *s) {
    return (s->kind == REPLICATED) ? (int32_t)cpa_slice_begin(s->is->shape.q_heads, cpa_test_ranks(), s->cache.rank)
                                   : 0;
}
static int32_t heads_of(const site *s) {
    const int32_t heads = s->is->shape.q_heads;
    if (!(s->kind == REPLICATED)) return heads;
    return (int32_t)cpa_slice_begin(heads, cpa_test_ranks(), s->cache.rank + 1) - first_head(s);
}

/* Calls back for each row that this rank has of a form, in their order: its chunk, its row in the step, its position. */
typedef void row_visitor(const site *s, int f, int64_t row, const form_chunk *chunk, int64_t step_row, int64_t position,
                         void *ctx);
static int64_t visit_rows(const site *s, step of, int f, row_visitor *visit, void *ctx) {
    int64_t row = 0, step_row = 0;
    for (int64_t i = 0; i < of.n; i++) {
        const cpa_test_chunk *c = &of.chunks[i].chunk;
        for (int64_t at = c->start; at < c->start + c->count; at++, step_row++) {
            const int is_own = cpa_owner_rank(s->cache.map, s->cache.placements[c->sequence], at) == s->cache.rank ||
                               (s->kind == REPLICATED);
            if (!is_own || of.chunks[i].form != f) continue;
            if (visit) visit(s, f, row, &of.chunks[i], step_row, at, ctx);
            row++;
        }
    }
    return row;
}

static void copy_query(const site *s, int f, int64_t row, const form_chunk *chunk, int64_t step_row, int64_t position,
                       void *to) {
    const int32_t heads = s->is->shape.q_heads, all = s->is->shape.k_dim, k_dim = k_dim_of(s, f);
    const float *from = s->cache.sequences[chunk->chunk.sequence].q + position * heads * all;
    char *q = (char *)to + row * heads * k_dim * cpa_dtype_bytes(s->is->shape.dtype);
    (void)step_row;
    for (int32_t h = 0; h < heads; h++)
        cpa_narrow(q + h * k_dim * cpa_dtype_bytes(s->is->shape.dtype), from + h * all, s->is->shape.dtype, k_dim);
}

/* What float64 makes of a row. */
static cpa_case_expected expect(const site *s, int f, const form_chunk *chunk, int64_t step_row, int64_t position,
                                int32_t head) {
    const cpa_test_chunk *c = &chunk->chunk;
    cpa_case_row row = cpa_case_row_of(&s->cache.sequences[c->sequence], position, head, s->is->shape.dtype);
    cpa_case_expected state, expected;
    row.k_dim = k_dim_of(s, f);
    row.v_dim = v_dim_of(s, f);
    row.scale = (double)SCALES[f];
    row.n_keys = c->start + c->count;
    row.mask = MASKS[f];
    row.score = s->cache.score;
    row.score_row = step_row;
    cpa_case_expect(&row, &state);
    if (!s->matrices[f]) return state;
    expected = state;
    expected.v_dim = out_dim_of(s, f);
    expected.out_tolerance = 0;
    for (int32_t i = 0; i < expected.v_dim; i++) {
        double sum = 0, weight = 0;
        for (int32_t d = 0; d < row.v_dim; d++) {
            const double factor = (double)matrix_at(s, f, head, d, i);
            sum += state.out[d] * factor;
            weight += fabs(factor);
        }
        expected.out[i] = sum;
        const double rounding = cpa_reference_unit_roundoff(s->is->shape.dtype) * fabs(sum);
        expected.out_tolerance = fmax(expected.out_tolerance, weight * state.out_tolerance + 2 * rounding);
    }
    return expected;
}

/* The results of a form, and how many (row, head) of them are wrong. */
typedef struct form_result {
    char *out;
    float *lse;
    int64_t rows, out_bytes, wrong;
} form_result;

static void judge_row(const site *s, int f, int64_t row, const form_chunk *chunk, int64_t step_row, int64_t position,
                      void *ctx) {
    form_result *result = ctx;
    const int64_t every = s->cache.check_every > 0 ? s->cache.check_every : 1;
    for (int32_t h = (int32_t)(row % every); h < heads_of(s); h += (int32_t)every) {
        const int64_t at = row * heads_of(s) + h;
        const cpa_case_expected expected = expect(s, f, chunk, step_row, position, first_head(s) + h);
        const cpa_case_result got = {.out = result->out + at * out_dim_of(s, f) * cpa_dtype_bytes(s->is->shape.dtype),
                                     .out_dtype = s->is->shape.dtype,
                                     .lse = result->lse ? &result->lse[at] : NULL};
        result->wrong += !cpa_case_is_right(&expected, &got, NULL);
    }
}

/* ---- steps ---- */

static cpa_status plan(const site *s, step of) {
    cpa_context_chunk planned[N_SEQUENCES];
    for (int64_t i = 0; i < of.n; i++) {
        const cpa_test_chunk *c = &of.chunks[i].chunk;
        planned[i] = (cpa_context_chunk){.start = c->start,
                                         .count = c->count,
                                         .placement = s->cache.placements[c->sequence],
                                         .algorithm = c->algorithm,
                                         .block_table = s->cache.tables[c->sequence],
                                         .form = of.chunks[i].form};
    }
    for (int f = 0; f < FORMS; f++)
        CU_ASSERT_EQUAL(cpa_context_rows_of(s->context, planned, of.n, f), visit_rows(s, of, f, NULL, NULL));
    if (!s->padded_rows) return cpa_context_plan(s->context, planned, of.n);
    cpa_context_begin(s->context);
    return cpa_context_plan_ahead(s->context, planned, of.n, NULL, NULL, s->padded_rows);
}

/* The tensors of a layer on the device; those of a form without rows are NULL. */
typedef struct layer {
    cpa_context_args args;
    cpa_form_rows rows[FORMS];
    form_result results[FORMS];
    cpa_case_score_on_device score;
} layer;

static void upload_layer(const site *s, step of, int want_lse, layer *l) {
    const int64_t element = cpa_dtype_bytes(s->is->shape.dtype), heads = s->is->shape.q_heads;
    *l = (layer){.args = {.size = sizeof l->args,
                          .kv = s->is->shape.head_major ? cpa_kv_fixture_upload(&s->cache.pool, s->stream)
                                                        : cpa_kv_fixture_upload_blocks(&s->cache.pool, s->stream),
                          .rows = l->rows}};
    for (int f = 0; f < FORMS; f++) {
        form_result *r = &l->results[f];
        l->rows[f] = (cpa_form_rows){.mask = MASKS[f], .scale = SCALES[f], .matrix = s->matrices[f]};
        r->rows = visit_rows(s, of, f, NULL, NULL);
        const int64_t padded = s->padded_rows && of.chunks[0].form == f ? s->padded_rows : r->rows;
        if (padded == 0) continue;
        const int64_t q_bytes = padded * heads * k_dim_of(s, f) * element;
        char *q = cpa_test_poisoned(q_bytes, 1);
        visit_rows(s, of, f, copy_query, q);
        l->rows[f].q = cpa_test_upload(s->stream, q, q_bytes);
        free(q);
        r->out_bytes = padded * heads_of(s) * out_dim_of(s, f) * element;
        r->out = cpa_test_poisoned(r->out_bytes + 1, 1);
        l->rows[f].out = cpa_test_upload(s->stream, r->out, r->out_bytes + 1);
        if (!want_lse) continue;
        r->lse = cpa_test_poisoned(padded * heads_of(s) + 1, sizeof *r->lse);
        l->rows[f].lse = cpa_test_upload(s->stream, r->lse, (padded * heads_of(s) + 1) * (int64_t)sizeof *r->lse);
    }
    if (!s->cache.score) return;
    CU_ASSERT_EQUAL(cpa_case_score_upload(s->cache.score, s->stream, &l->score, NULL), CPA_OK);
    l->args.rules = &l->score.rules;
    l->args.selection = cpa_case_score_selection(&l->score);
    l->args.bias = s->cache.score->bias ? &l->score.bias : NULL;
}

/* Counts what is wrong, and frees what is on the device. */
static int64_t judge_layer(const site *s, step of, layer *l) {
    int64_t wrong = 0;
    for (int f = 0; f < FORMS; f++) {
        form_result *r = &l->results[f];
        if (!r->out) continue;
        cpa_test_download(s->stream, r->out, l->rows[f].out, r->out_bytes);
        if (r->lse)
            cpa_test_download(s->stream, r->lse, l->rows[f].lse, r->rows * heads_of(s) * (int64_t)sizeof *r->lse);
        visit_rows(s, of, f, judge_row, r);
        if (r->wrong) printf("\n    rank %d: form %d: %lld wrong", s->cache.rank, f, (long long)r->wrong);
        wrong += r->wrong;
        cpa_test_free(s->stream, (void *)(uintptr_t)l->rows[f].q);
        cpa_test_free(s->stream, l->rows[f].out);
        cpa_test_free(s->stream, l->rows[f].lse);
    }
    cpa_kv_view_free(&l->args.kv, s->stream);
    if (s->cache.score) cpa_case_score_free(&l->score, s->device);
    return wrong;
}

static void free_results(layer *l) {
    for (int f = 0; f < FORMS; f++) {
        free(l->results[f].out);
        free(l->results[f].lse);
    }
}

/* Plans and attends a step, whose results are the caller's. */
static void run(const site *s, step of, int want_lse, layer *l) {
    upload_layer(s, of, want_lse, l);
    CU_ASSERT_EQUAL(plan(s, of), CPA_OK);
    if (s->padded_rows) CU_ASSERT_EQUAL(cpa_context_upload_plan(s->context, s->stream), CPA_OK);
    const cpa_status status = cpa_context_attend(s->context, &l->args, s->stream);
    if (status != CPA_OK) printf("\n    rank %d: %s", s->cache.rank, cpa_context_error(s->context));
    CU_ASSERT_EQUAL(status, CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
    CU_ASSERT_EQUAL(judge_layer(s, of, l), 0);
}

static void run_steps(const site *s, const step *steps, int n) {
    for (int i = 0; i < 2 * n; i++) {
        layer l;
        run(s, steps[i / 2], i % 2, &l);
        free_results(&l);
    }
}

/* ---- tests ---- */

static void run_cases(site_kind kind) {
    const step steps[] = {STEP(MIXED),   STEP(DECODE), STEP(BY_QUERIES), STEP(DECODES),
                          STEP(PREFILL), {NULL, 0},    STEP(MIXED)};
    for (int i = 0; i < N_CASES; i++) {
        site s;
        open_site(&s, &CASES[i], LENGTHS, PLACEMENTS, N_SEQUENCES, kind);
        run_steps(&s, steps, sizeof steps / sizeof *steps);
        close_site(&s);
    }
}

static void forms_meet_in_one_step(void) {
    run_cases(OWNED);
}

static void forms_take_keys_of_all_peers_at_once(void) {
    run_cases(GATHERED);
}

static void ranks_have_the_rows_of_all_forms(void) {
    run_cases(REPLICATED);
}

/* Enough rows of two forms for pass-Q to send states in parts, beside transfers of pass-KV. */
static void states_of_several_forms_go_in_parts(void) {
    static const int64_t lengths[] = {LONG, LONG, 700};
    static const form_chunk chunks[] = {
        {{0, 100, LONG - 100, CPA_PASS_Q}, 1}, {{1, 60, LONG - 60, CPA_PASS_Q}, 2}, {{2, 0, 700, CPA_PASS_KV}, 0}};
    static const cpa_placement placements[] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_SHARDED, 1}};
    site s;
    open_site(&s, &CASES[0], lengths, placements, 3, OWNED);
    s.cache.check_every = 16;
    layer l;
    run(&s, STEP(chunks), 0, &l);
    free_results(&l);
    close_site(&s);
}

/* On the host; of forms without a matrix, whose sums have one order. */
static void both_algorithms_give_the_same_bits(void) {
    form_chunk kv[sizeof MIXED / sizeof *MIXED], q[sizeof MIXED / sizeof *MIXED];
    memcpy(kv, MIXED, sizeof kv);
    memcpy(q, MIXED, sizeof q);
    for (size_t i = 0; i < sizeof kv / sizeof *kv; i++) {
        kv[i].chunk.algorithm = CPA_PASS_KV;
        q[i].chunk.algorithm = CPA_PASS_Q;
    }
    for (int i = 0; i < N_CASES && cpa_test_promises_bits(); i++) {
        site s;
        layer a, b;
        open_site(&s, &CASES[i], LENGTHS, PLACEMENTS, N_SEQUENCES, OWNED);
        run(&s, STEP(kv), 1, &a);
        run(&s, STEP(q), 1, &b);
        for (int f = 0; f < FORMS; f++) {
            if (s.matrices[f] || a.results[f].rows == 0) continue;
            CU_ASSERT_EQUAL(memcmp(a.results[f].out, b.results[f].out, (size_t)a.results[f].out_bytes), 0);
        }
        free_results(&a);
        free_results(&b);
        close_site(&s);
    }
}

/* Keys and values become NaN past the columns that forms 1 and 2 attend, and with them what is packed and sent. */
static void columns_past_a_form_are_not_read(void) {
    static const form_chunk chunks[] = {{{0, 100, 320, CPA_PASS_KV}, 1},
                                        {{1, 190, 40, CPA_PASS_Q}, 1},
                                        {{2, 0, 90, CPA_PASS_KV}, 1},
                                        {{3, 332, 1, CPA_PASS_Q}, 1}};
    for (int i = 0; i < N_CASES; i++) {
        site s;
        open_site(&s, &CASES[i], LENGTHS, PLACEMENTS, N_SEQUENCES, OWNED);
        const cpa_test_shape *shape = &s.is->shape;
        for (int64_t n = 0; n < N_SEQUENCES; n++) {
            cpa_case_sequence *of = &s.cache.sequences[n];
            const cpa_token_set here = cpa_tokens_on(s.cache.map, s.cache.placements[n], s.cache.rank);
            for (int64_t at = 0; at < of->length * shape->kv_heads; at++) {
                for (int32_t d = k_dim_of(&s, 1); d < shape->k_dim; d++) of->k[at * shape->k_dim + d] = NAN;
                for (int32_t d = v_dim_of(&s, 1); d < shape->v_dim; d++) of->v[at * shape->v_dim + d] = NAN;
            }
            cpa_test_store_shard(&s.cache.pool, of, s.cache.map, here, of->length, s.cache.tables[n]);
        }
        const step steps[] = {STEP(chunks), STEP(DECODE)};
        run_steps(&s, steps, 2);
        close_site(&s);
    }
}

/* A bias and bits of rows of the step, and rules of heads, whatever the form of a row. */
static void scores_of_rows_of_all_forms(void) {
    for (int i = 0; i < 2 * N_CASES; i++) {
        site s;
        open_site(&s, &CASES[i / 2], LENGTHS, PLACEMENTS, N_SEQUENCES, i % 2 ? REPLICATED : OWNED);
        const step of = STEP(MIXED);
        cpa_case_score score = {.q_heads = s.is->shape.q_heads, .softcap = 1.5f};
        for (int64_t c = 0; c < of.n; c++) score.rows += of.chunks[c].chunk.count;
        cpa_case_score_add_slopes(&score, NULL);
        cpa_case_score_add_bias(&score, CPA_F32, 1, 20, 300, NULL);
        cpa_case_score_add_bits(&score, 0, 420, NULL);
        for (int64_t c = 0, row = 0; c < of.n; c++)
            for (int64_t j = 0; j < of.chunks[c].chunk.count; j++, row++)
                score.width[row] = (int32_t)(of.chunks[c].chunk.start + of.chunks[c].chunk.count);
        cpa_test_score_unmap(&score);
        s.cache.score = &score;
        run_steps(&s, &of, 1);
        cpa_case_score_release(&score);
        close_site(&s);
    }
}

/* Each form in turn, with and without a matrix, filled up to as many rows on every rank. */
static void padded_steps_of_each_form(void) {
    form_chunk chunks[sizeof DECODE / sizeof *DECODE];
    memcpy(chunks, DECODE, sizeof chunks);
    for (int i = 0; i < 2 * N_CASES; i++) {
        site s;
        open_site(&s, &CASES[i / 2], LENGTHS, PLACEMENTS, N_SEQUENCES, i % 2 ? REPLICATED : OWNED);
        s.padded_rows = 7;
        for (int f = 0; f < FORMS; f++) {
            for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) chunks[c].form = f;
            const step of = STEP(chunks);
            run_steps(&s, &of, 1);
        }
        chunks[1].form = 0;
        CU_ASSERT_EQUAL(plan(&s, STEP(chunks)), CPA_INTERNAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "of a padded step has form 0, expected 2"));
        close_site(&s);
    }
}

/* ---- the reserved step ---- */

enum { RESERVED = 5, MOST_TOKENS = 420 };

/* Decode of one form over the first sequences, a row each, whose lengths and tables lie on the device. */
static void run_reserved(site *s, int f) {
    const cpa_context_limits limits = {sizeof limits, RESERVED, MOST_TOKENS, s->cache.pool.view.num_blocks, f, 1};
    const int64_t stride = MOST_TOKENS / s->is->shape.block_size + 2;
    form_chunk chunks[RESERVED];
    int32_t lengths[RESERVED], ranks[RESERVED], tables[RESERVED * (MOST_TOKENS / 16 + 2)];
    CU_ASSERT_EQUAL(cpa_context_reserve(s->context, &limits), CPA_OK);
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) tables[i] = HUGE_ENTRY;
    for (int i = 0; i < RESERVED; i++) {
        const cpa_token_set here = cpa_tokens_on(s->cache.map, s->cache.placements[i], s->cache.rank);
        const int64_t tokens = cpa_tokens_before(s->cache.map, here, LENGTHS[i]);
        chunks[i] = (form_chunk){{i, LENGTHS[i] - 1, 1, CPA_PASS_Q}, f};
        lengths[i] = (int32_t)LENGTHS[i];
        ranks[i] = s->cache.placements[i].rank;
        memcpy(tables + i * stride, s->cache.tables[i],
               (size_t)((tokens + s->is->shape.block_size - 1) / s->is->shape.block_size) * sizeof *tables);
    }
    const step of = STEP(chunks);
    layer l;
    s->padded_rows = RESERVED; /* every rank has a row of each sequence */
    upload_layer(s, of, 1, &l);
    /* A rank's rows are those of its sequences, and lie where those do. */
    const int64_t element = cpa_dtype_bytes(s->is->shape.dtype), heads = s->is->shape.q_heads;
    char *q = cpa_test_poisoned(RESERVED * heads * k_dim_of(s, f), element);
    for (int i = 0; i < RESERVED; i++) copy_query(s, f, i, &chunks[i], 0, chunks[i].chunk.start, q);
    cpa_test_free(s->stream, (void *)(uintptr_t)l.rows[f].q);
    l.rows[f].q = cpa_test_upload(s->stream, q, RESERVED * heads * k_dim_of(s, f) * element);
    const cpa_attend_update_args update = {.size = sizeof update,
                                           .sequences = RESERVED,
                                           .lengths = cpa_test_upload(s->stream, lengths, sizeof lengths),
                                           .block_tables = cpa_test_upload(s->stream, tables, sizeof tables),
                                           .table_stride = stride,
                                           .first_ranks = cpa_test_upload(s->stream, ranks, sizeof ranks)};
    CU_ASSERT_EQUAL(cpa_context_update(s->context, &update, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &l.args, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
    /* The results move to where the visits of rows expect them. */
    form_result *r = &l.results[f];
    const int64_t row_bytes = heads * out_dim_of(s, f) * element;
    char *out = cpa_test_poisoned(RESERVED * row_bytes, 1);
    float *lse = cpa_test_poisoned(RESERVED * heads, sizeof *lse);
    cpa_test_download(s->stream, out, l.rows[f].out, RESERVED * row_bytes);
    cpa_test_download(s->stream, lse, l.rows[f].lse, RESERVED * heads * (int64_t)sizeof *lse);
    for (int64_t i = 0, row = 0; i < RESERVED; i++) {
        if (cpa_owner_rank(s->cache.map, s->cache.placements[i], LENGTHS[i] - 1) != s->cache.rank) {
            CU_ASSERT_EQUAL(lse[i * heads], -INFINITY);
            continue;
        }
        memcpy(r->out + row * row_bytes, out + i * row_bytes, (size_t)row_bytes);
        memcpy(r->lse + row++ * heads, lse + i * heads, (size_t)heads * sizeof *lse);
    }
    visit_rows(s, of, f, judge_row, r);
    CU_ASSERT_EQUAL(r->wrong, 0);
    const void *used[] = {update.lengths, update.block_tables, update.first_ranks,
                          l.rows[f].q,    l.rows[f].out,       l.rows[f].lse};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(s->stream, (void *)(uintptr_t)used[i]);
    cpa_kv_view_free(&l.args.kv, s->stream);
    free_results(&l);
    free(lse);
    free(out);
    free(q);
}

static void a_step_of_each_form_is_reserved(void) {
    cpa_placement placements[N_SEQUENCES];
    for (int i = 0; i < N_SEQUENCES; i++) placements[i] = (cpa_placement){CPA_SHARDED, i};
    for (int i = 0; i < N_CASES * FORMS; i++) {
        site s;
        layer l;
        open_site(&s, &CASES[i / FORMS], LENGTHS, placements, N_SEQUENCES, OWNED);
        run_reserved(&s, i % FORMS);
        s.padded_rows = 0;
        run(&s, STEP(MIXED), 0, &l); /* planned steps go on beside it */
        free_results(&l);
        close_site(&s);
    }
}

/* ---- refusals ---- */

static void refuse_forms(const site *s, const cpa_context_options *options, const char *says) {
    cpa_context *context = NULL;
    cpa_error err = {0};
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), s->device, options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    if (!strstr(err.message, says)) printf("\n    '%s' does not say '%s'", err.message, says);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
}

static void forms_that_the_cache_has_not_are_refused(void) {
    static const cpa_row_form bad[][2] = {{{0}, {.k_dim = 65}},
                                          {{0}, {.v_dim = 49}},
                                          {{.out_dim = 577}, {0}},
                                          {{.k_dim = -1}, {0}},
                                          {{.v_dim = 16, .reserved = {1}}, {0}}};
    static const char *const says[] = {
        "context: form 1: k_dim is 65, expected 0 to 64", "context: form 1: v_dim is 49, expected 0 to 48",
        "context: form 0: out_dim is 577, expected 0 to 576", "context: form 0: k_dim is -1, expected 0 to 64",
        "context: form 0: the reserved bytes are not zero"};
    site s;
    open_site(&s, &CASES[0], LENGTHS, PLACEMENTS, N_SEQUENCES, OWNED);
    cpa_context_options o = options_of(&s);
    o.n_forms = CPA_MOST_ROW_FORMS + 1, refuse_forms(&s, &o, "n_forms is 4, expected 0 to 3");
    o.n_forms = 0, refuse_forms(&s, &o, "expected both or none");
    o.n_forms = 2;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) o.forms = bad[i], refuse_forms(&s, &o, says[i]);
    o = options_of(&s), o.shape.kv_dtype = CPA_INT8;
    refuse_forms(&s, &o, "form 1: attends fewer columns than the rows of the cache have");
    o = options_of(&s), o.shape.layout = CPA_VLLM_X;
    refuse_forms(&s, &o, "form 1: attends fewer columns than the rows of the cache have");
    o = options_of(&s);
    const cpa_row_form other[FORMS] = {{0}, {.k_dim = 32, .v_dim = 16, .out_dim = 16}, {.k_dim = 40}};
    if (cpa_test_is_last_rank()) o.forms = other;
    if (cpa_test_ranks() > 1) refuse_forms(&s, &o, "out_dim");
    close_site(&s);
}

/* By all ranks alike, as all have rows of every form; a layer that is refused ends the step. */
static void refuse_layer(const site *s, step of, const cpa_context_args *args, const char *says) {
    CU_ASSERT_EQUAL(plan(s, of), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, args, s->stream), CPA_INVALID);
    if (!strstr(cpa_context_error(s->context), says))
        printf("\n    '%s' does not say '%s'", cpa_context_error(s->context), says);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s->context), says));
}

static void steps_and_layers_that_lack_a_form_are_refused(void) {
    static const form_chunk chunks[] = {{{0, 100, 320, CPA_PASS_KV}, 0}, {{3, 100, 233, CPA_PASS_Q}, 1}};
    static const form_chunk first[] = {{{0, 100, 320, CPA_PASS_KV}, 0}};
    const step of = STEP(chunks);
    site s;
    layer l;
    open_site(&s, &CASES[0], LENGTHS, PLACEMENTS, N_SEQUENCES, OWNED);
    cpa_context_chunk chunk = {.count = 20, .algorithm = CPA_PASS_Q, .block_table = s.cache.tables[0], .form = FORMS};
    CU_ASSERT_EQUAL(cpa_context_plan(s.context, &chunk, 1), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "chunk 0 has form 3, expected 0..2"));
    CU_ASSERT_EQUAL(cpa_context_rows(s.context, &chunk, 1), 0);
    chunk.form = -1;
    CU_ASSERT_EQUAL(cpa_context_plan(s.context, &chunk, 1), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "chunk 0 has form -1, expected 0..2"));
    CU_ASSERT_EQUAL(cpa_context_rows_of(s.context, &chunk, 1, -1), 0);
    const cpa_context_limits limits = {sizeof limits, 1, 20, s.cache.pool.view.num_blocks, FORMS, 1};
    CU_ASSERT_EQUAL(cpa_context_reserve(s.context, &limits), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "rows of form 3, expected 0..2"));

    upload_layer(&s, of, 1, &l);
    const cpa_form_rows good = l.rows[1];
    cpa_context_args args = l.args;
    args.q = l.rows[0].q, args.out = l.rows[0].out, args.mask = MASKS[0], args.rows = NULL;
    refuse_layer(&s, of, &args, "the step has rows of form 1, but rows is NULL");
    CU_ASSERT_EQUAL(plan(&s, STEP(first)), CPA_OK); /* of the first form alone it is a layer */
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, s.stream), CPA_OK);
    l.rows[1].out = NULL, refuse_layer(&s, of, &l.args, "attend: form 1: "), l.rows[1] = good;
    l.rows[1].q = NULL, refuse_layer(&s, of, &l.args, "but q (nil) and out"), l.rows[1] = good;
    l.rows[1].matrix = NULL, refuse_layer(&s, of, &l.args, "form 1: the matrix is (nil)"), l.rows[1] = good;
    l.rows[1].scale = NAN, refuse_layer(&s, of, &l.args, "form 1: scale is nan"), l.rows[1] = good;
    l.rows[1].mask.causal = 2, refuse_layer(&s, of, &l.args, "form 1: causal is 2"), l.rows[1] = good;
    l.rows[1].reserved[0] = 1, refuse_layer(&s, of, &l.args, "form 1: the reserved bytes"), l.rows[1] = good;
    l.rows[0].matrix = good.matrix, refuse_layer(&s, of, &l.args, "form 0: the matrix is 0x");
    l.rows[0].matrix = NULL;
    CU_ASSERT_EQUAL(plan(&s, of), CPA_OK); /* and after all of that */
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &l.args, s.stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(s.stream), CPA_OK);
    CU_ASSERT_EQUAL(judge_layer(&s, of, &l), 0);
    free_results(&l);
    close_site(&s);
}

static int64_t no_keys_are_prepared(const cpa_attention_shape *shape, int32_t block_size) {
    (void)shape;
    (void)block_size;
    return 0;
}

/* Stands for a device whose kernels take 40 columns but not 64: keys of those are prepared. */
static int64_t narrow_keys_are_prepared(const cpa_attention_shape *shape, int32_t block_size) {
    (void)block_size;
    return shape->k_dim == 40 ? 4096 : shape->k_dim == 32 ? 1024 : 0;
}

/* The workspace is as large as the form that needs most of it has to have, whatever the shape of the cache needs. */
static void keys_are_prepared_for_all_forms(void) {
    site s;
    open_site(&s, &CASES[0], LENGTHS, PLACEMENTS, N_SEQUENCES, OWNED);
    cpa_context_options o = options_of(&s);
    const cpa_operator_table *const own = s.device->operators;
    cpa_operator_table operators = *own;
    operators.least_workspace = no_keys_are_prepared;
    s.device->operators = &operators;
    const int64_t none = cpa_context_least_staging(s.device, &o, cpa_test_ranks());
    operators.least_workspace = narrow_keys_are_prepared;
    CU_ASSERT_EQUAL(cpa_context_least_staging(s.device, &o, cpa_test_ranks()), none + 4096);
    o.n_forms = 2;
    CU_ASSERT_EQUAL(cpa_context_least_staging(s.device, &o, cpa_test_ranks()), none + 1024);
    o.staging_bytes = none + 1023;
    refuse_forms(&s, &o, "and 1024 to prepare keys in");
    o.n_forms = 1;
    CU_ASSERT_EQUAL(cpa_context_least_staging(s.device, &o, cpa_test_ranks()), none);
    s.device->operators = own;
    close_site(&s);
}

static const cpa_test TESTS[] = {
    {"forms meet in one step", forms_meet_in_one_step},
    {"forms take keys of all peers at once", forms_take_keys_of_all_peers_at_once},
    {"ranks have the rows of all forms", ranks_have_the_rows_of_all_forms},
    {"states of several forms go in parts", states_of_several_forms_go_in_parts},
    {"both algorithms give the same bits", both_algorithms_give_the_same_bits},
    {"columns past a form are not read", columns_past_a_form_are_not_read},
    {"scores of rows of all forms", scores_of_rows_of_all_forms},
    {"padded steps of each form", padded_steps_of_each_form},
    {"a step of each form is reserved", a_step_of_each_form_is_reserved},
    {"forms that the cache has not are refused", forms_that_the_cache_has_not_are_refused},
    {"keys are prepared for all forms", keys_are_prepared_for_all_forms},
    {"steps and layers that lack a form are refused", steps_and_layers_that_lack_a_form_are_refused},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context_forms", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
