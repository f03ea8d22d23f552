/* Context attention over latents: rows that attend them as they lie, times the matrix of values, and rows whose keys and
 * values are expanded from them, in one step, by either algorithm, on one rank and replicated, over every cache form,
 * against float64. What travels is counted to the byte. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/device.h"
#include "src/context/context.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/latent_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { BLOCK = 16, MOST_CHUNKS = 8 };
enum { LIES = CPA_TEST_AS_THEY_LIE, MATRIX = CPA_TEST_TIMES_VALUES, EXPANDED = CPA_TEST_EXPANDED };

/* The widths of DeepSeek's models, and small ones. */
#define REAL_WIDTHS .latent = 512, .rope = 64, .nope = 128, .value = 128
#define SMALL_WIDTHS .latent = 32, .rope = 16, .nope = 24, .value = 40

static const cpa_test_latent_shape SHAPES[] = {
    {.heads = 6, SMALL_WIDTHS, .dtype = CPA_F32, .kv_dtype = CPA_F32, .block_size = BLOCK, .interleave = BLOCK},
    {.heads = 4, SMALL_WIDTHS, .dtype = CPA_BF16, .kv_dtype = CPA_BF16, .block_size = BLOCK, .interleave = 4 * BLOCK},
    {.heads = 4,
     SMALL_WIDTHS,
     .dtype = CPA_BF16,
     .kv_dtype = CPA_FP8_E4M3,
     .k_scale = 0.05f,
     .block_size = BLOCK,
     .interleave = BLOCK},
    {.heads = 2,
     REAL_WIDTHS,
     .dtype = CPA_BF16,
     .kv_dtype = CPA_FP8_T128,
     .block_size = BLOCK,
     .interleave = 4 * BLOCK},
    {.heads = 2, REAL_WIDTHS, .dtype = CPA_BF16, .kv_dtype = CPA_BF16, .block_size = BLOCK, .interleave = BLOCK},
};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

static const int64_t LENGTHS[] = {420, 230, 90, 333, 3};
static const cpa_placement PLACEMENTS[] = {
    {CPA_SHARDED, 1}, {CPA_SHARDED, 0}, {CPA_ON_RANK, 1}, {CPA_SHARDED, 2}, {CPA_SHARDED, 3}};
enum { N_SEQUENCES = sizeof LENGTHS / sizeof *LENGTHS };

typedef struct latent_chunk {
    int64_t sequence, start, count;
    cpa_algorithm algorithm;
    int form;
} latent_chunk;

typedef struct step {
    const latent_chunk *chunks;
    int64_t n;
} step;
#define STEP(chunks) ((step){chunks, sizeof(chunks) / sizeof *(chunks)})

/* Prompts without, behind one and behind three chunks of context, whole and in the middle of a block; decode of one to
 * three tokens, of sequences that not every rank has; all of it together, by either algorithm. */
static const latent_chunk PROMPTS[] = {{0, 0, 105, CPA_PASS_KV, EXPANDED},
                                       {1, 115, 115, CPA_PASS_KV, EXPANDED},
                                       {3, 249, 84, CPA_PASS_KV, EXPANDED},
                                       {2, 30, 60, CPA_PASS_KV, EXPANDED}};
static const latent_chunk DECODE[] = {{0, 419, 1, CPA_PASS_Q, LIES},
                                      {1, 229, 1, CPA_PASS_Q, LIES},
                                      {2, 89, 1, CPA_PASS_Q, LIES},
                                      {3, 332, 1, CPA_PASS_Q, LIES},
                                      {4, 2, 1, CPA_PASS_Q, LIES}};
static const latent_chunk DRAFTS[] = {{0, 417, 3, CPA_PASS_Q, MATRIX},
                                      {1, 228, 2, CPA_PASS_Q, MATRIX},
                                      {3, 331, 2, CPA_PASS_Q, LIES},
                                      {4, 1, 2, CPA_PASS_Q, MATRIX}};
static const latent_chunk MIXED[] = {{0, 300, 120, CPA_PASS_KV, EXPANDED},
                                     {1, 227, 3, CPA_PASS_Q, LIES},
                                     {2, 0, 90, CPA_PASS_KV, EXPANDED},
                                     {3, 300, 33, CPA_PASS_Q, EXPANDED},
                                     {4, 2, 1, CPA_PASS_Q, MATRIX}};
/* Rows of decode that ask as narrow as heads are. */
static const latent_chunk NARROW[] = {{0, 419, 1, CPA_PASS_Q, EXPANDED},
                                      {1, 227, 3, CPA_PASS_Q, EXPANDED},
                                      {2, 89, 1, CPA_PASS_Q, EXPANDED},
                                      {3, 332, 1, CPA_PASS_KV, EXPANDED},
                                      {4, 2, 1, CPA_PASS_Q, EXPANDED}};
static const latent_chunk BY_KEYS[] = {{0, 380, 40, CPA_PASS_KV, LIES}, {3, 300, 33, CPA_PASS_KV, MATRIX}};

typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_latents latents;
    cpa_context *context;
    cpa_mask mask;
    int replicated;
} site;

/* With the first n sequences. */
static void open_site_of(site *s, cpa_test_latent_shape shape, int64_t n, cpa_absorb absorbs,
                         cpa_context_options *options) {
    cpa_error err = {0};
    cpa_test_device_open(1, &s->device, &s->stream);
    s->mask = (cpa_mask){.causal = 1};
    cpa_test_latents_init(&s->latents, shape, 31, LENGTHS, PLACEMENTS, n, s->stream);
    s->latents.forms[EXPANDED].absorbs = absorbs;
    const cpa_context_options own = cpa_test_latent_options(&s->latents);
    if (options) {
        options->size = own.size, options->shape = own.shape, options->block_size = own.block_size;
        options->interleave = own.interleave, options->max_rows = own.max_rows;
        options->forms = own.forms, options->n_forms = own.n_forms;
    }
    s->replicated = options && options->rows == CPA_ROWS_REPLICATED;
    const cpa_status status =
        cpa_context_create(cpa_test_comm(), s->device, options ? options : &own, &s->context, &err);
    if (status != CPA_OK) printf("%s\n", err.message);
    CU_ASSERT_EQUAL_FATAL(status, CPA_OK);
}

static void open_site(site *s, cpa_test_latent_shape shape, cpa_context_options *options) {
    open_site_of(s, shape, N_SEQUENCES, CPA_ABSORB_NEVER, options);
}

static void close_site(site *s) {
    cpa_context_destroy(s->context);
    cpa_test_latents_destroy(&s->latents, s->stream);
    cpa_test_device_close(s->device, s->stream);
}

/* ---- rows ---- */

static int32_t first_head(const site *s) {
    return s->replicated ? (int32_t)cpa_slice_begin(s->latents.shape.heads, cpa_test_ranks(), s->latents.rank) : 0;
}
static int32_t heads_of(const site *s) {
    const int32_t heads = s->latents.shape.heads;
    return s->replicated ? (int32_t)cpa_slice_begin(heads, cpa_test_ranks(), s->latents.rank + 1) - first_head(s)
                         : heads;
}

/* The next row of a form that this rank has, from (*chunk, *position) on; 0: there is none. */
static int next_row(const site *s, step of, int form, int64_t *chunk, int64_t *position) {
    for (; *chunk < of.n; ++*chunk, *position = -1) {
        const latent_chunk *c = &of.chunks[*chunk];
        if (c->form != form) continue;
        *position = *position < 0 ? c->start : *position + 1;
        for (; *position < c->start + c->count; ++*position)
            if (s->replicated ||
                cpa_owner_rank(s->latents.map, s->latents.placements[c->sequence], *position) == s->latents.rank)
                return 1;
    }
    return 0;
}

/* The tensors of a form in a layer. */
typedef struct form_tensors {
    int64_t rows, out_bytes, lse_bytes;
    char *out;
    float *lse;
} form_tensors;

static form_tensors upload_form(const site *s, step of, int form, cpa_form_rows *rows) {
    const cpa_test_latents *t = &s->latents;
    const int64_t element = cpa_dtype_bytes(t->shape.dtype), k_dim = cpa_test_latent_q_dim(t, form);
    const int64_t q_row = t->shape.heads * k_dim;
    form_tensors f = {.rows = 0};
    int64_t chunk = 0, position = -1, row = 0;
    *rows = (cpa_form_rows){.mask = s->mask,
                            .scale = t->scale,
                            .matrix = form == MATRIX ? t->matrix : NULL,
                            .expansion = form == EXPANDED ? t->expansion : NULL,
                            .fold = t->forms[form].absorbs ? t->fold : NULL,
                            .unfold = t->forms[form].absorbs ? t->matrix : NULL};
    while (next_row(s, of, form, &chunk, &position)) f.rows++;
    if (f.rows == 0) return f;
    char *q = cpa_test_poisoned(f.rows * q_row, element);
    for (chunk = 0, position = -1; next_row(s, of, form, &chunk, &position); row++)
        cpa_narrow(q + row * q_row * element, cpa_test_latent_query(t, form, of.chunks[chunk].sequence, position, 0),
                   t->shape.dtype, q_row);
    rows->q = cpa_test_upload(s->stream, q, f.rows * q_row * element);
    free(q);
    f.out_bytes = f.rows * heads_of(s) * cpa_test_latent_out_dim(t, form) * element;
    f.lse_bytes = f.rows * heads_of(s) * (int64_t)sizeof *f.lse;
    f.out = cpa_test_poisoned(f.out_bytes + 1, 1);
    f.lse = cpa_test_poisoned(f.lse_bytes + 1, 1);
    rows->out = cpa_test_upload(s->stream, f.out, f.out_bytes + 1);
    rows->lse = cpa_test_upload(s->stream, f.lse, f.lse_bytes + 1);
    return f;
}

/* The form that rows attend in: where they absorb, that of the matrix. */
static int attended_form(const site *s, int form) {
    return s->latents.forms[form].absorbs == CPA_ABSORB_ALWAYS ? MATRIX : form;
}

/* How many (row, head) are wrong; each row's heads are looked at in turn. `slack` as in a case. */
static int64_t count_wrong(const site *s, step of, int form, const form_tensors *f, double slack) {
    const cpa_test_latents *t = &s->latents;
    const int64_t out_row = cpa_test_latent_out_dim(t, form) * cpa_dtype_bytes(t->shape.dtype);
    int64_t chunk = 0, position = -1, wrong = 0;
    for (int64_t row = 0; next_row(s, of, form, &chunk, &position); row++) {
        const latent_chunk *c = &of.chunks[chunk];
        for (int32_t h = (int32_t)(row % 2); h < heads_of(s); h += 2) {
            const int64_t at = row * heads_of(s) + h;
            const cpa_case_expected expected = cpa_test_latent_expect(t, attended_form(s, form), s->mask, c->sequence,
                                                                      position, c->start + c->count, first_head(s) + h);
            const cpa_case_result got = {.out = f->out + at * out_row,
                                         .out_dtype = t->shape.dtype,
                                         .lse = slack > 0 ? NULL : &f->lse[at],
                                         .out_slack = slack};
            double worst = 0;
            if (cpa_case_is_right(&expected, &got, &worst)) continue;
            if (wrong++ == 0)
                printf("\n    rank %d: form %d, sequence %lld, position %lld, head %d: %g of the tolerance", t->rank,
                       form, (long long)c->sequence, (long long)position, first_head(s) + h, worst);
        }
    }
    return wrong;
}

static cpa_status plan(const site *s, step of) {
    cpa_context_chunk planned[MOST_CHUNKS];
    for (int64_t i = 0; i < of.n; i++) {
        const latent_chunk *c = &of.chunks[i];
        planned[i] = (cpa_context_chunk){.start = c->start,
                                         .count = c->count,
                                         .placement = s->latents.placements[c->sequence],
                                         .algorithm = c->algorithm,
                                         .block_table = s->latents.tables[c->sequence],
                                         .form = c->form};
    }
    return cpa_context_plan(s->context, planned, of.n);
}

/* One layer of a step; all of its results, form after form, to `results` unless it is NULL. */
static void run(site *s, step of, double slack, char **results) {
    cpa_form_rows rows[CPA_TEST_LATENT_FORMS];
    form_tensors tensors[CPA_TEST_LATENT_FORMS];
    const cpa_context_args args = {.size = sizeof args, .kv = s->latents.kv, .rows = rows};
    for (int f = 0; f < CPA_TEST_LATENT_FORMS; f++) tensors[f] = upload_form(s, of, f, &rows[f]);
    CU_ASSERT_EQUAL(plan(s, of), CPA_OK);
    cpa_status status = cpa_context_attend(s->context, &args, s->stream);
    if (status == CPA_OK) status = cpa_stream_sync(s->stream);
    if (status != CPA_OK) printf("\n    %s", cpa_context_error(s->context));
    CU_ASSERT_EQUAL(status, CPA_OK);
    for (int f = 0; f < CPA_TEST_LATENT_FORMS; f++) {
        form_tensors *t = &tensors[f];
        if (t->rows > 0) {
            cpa_test_download(s->stream, t->out, rows[f].out, t->out_bytes);
            cpa_test_download(s->stream, t->lse, rows[f].lse, t->lse_bytes);
            CU_ASSERT_EQUAL(count_wrong(s, of, f, t, slack), 0);
            cpa_test_free(s->stream, (void *)(uintptr_t)rows[f].q);
            cpa_test_free(s->stream, rows[f].out);
            cpa_test_free(s->stream, rows[f].lse);
        }
        free(t->lse);
        if (results)
            results[f] = t->out;
        else
            free(t->out);
    }
}

static void run_all(site *s, double slack) {
    run(s, STEP(PROMPTS), slack, NULL);
    run(s, STEP(DECODE), slack, NULL);
    run(s, STEP(DRAFTS), slack, NULL);
    run(s, STEP(MIXED), slack, NULL);
    run(s, STEP(BY_KEYS), slack, NULL);
}

/* ---- tests ---- */

static void prompts_and_decode_attend_every_form_of_cache(void) {
    for (int i = 0; i < N_SHAPES; i++) {
        site s;
        open_site(&s, SHAPES[i], NULL);
        run_all(&s, 0);
        close_site(&s);
    }
}

static void windows_hide_latents(void) {
    site s;
    open_site(&s, SHAPES[0], NULL);
    s.mask = (cpa_mask){.causal = 1, .window = 70, .sinks = 3};
    run_all(&s, 0);
    close_site(&s);
}

static void ranks_have_all_rows(void) {
    for (int i = 0; i < 2; i++) {
        cpa_context_options options = {.rows = CPA_ROWS_REPLICATED};
        site s;
        open_site(&s, SHAPES[i], &options);
        run(&s, STEP(DECODE), 0, NULL);
        run(&s, STEP(MIXED), 0, NULL);
        close_site(&s);
    }
}

/* Stands for a device, which takes the keys of all peers at once. */
static void prompts_take_latents_of_all_peers_at_once(void) {
    for (int i = 0; i < 2; i++) {
        site s;
        open_site(&s, SHAPES[i], NULL);
        const cpa_context_options options = cpa_test_latent_options(&s.latents);
        cpa_error err;
        cpa_context_destroy(s.context);
        s.device->caps.bit_exact = 0, s.device->caps.split_tokens = 1;
        CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
        run_all(&s, 0);
        close_site(&s);
    }
}

/* Both algorithms expand the same keys and fold the same states. */
static void both_algorithms_give_the_same_bits(void) {
    latent_chunk by_queries[sizeof PROMPTS / sizeof *PROMPTS];
    char *by_kv[CPA_TEST_LATENT_FORMS], *by_q[CPA_TEST_LATENT_FORMS];
    site s;
    open_site(&s, SHAPES[0], NULL);
    for (size_t i = 0; i < sizeof PROMPTS / sizeof *PROMPTS; i++)
        by_queries[i] = PROMPTS[i], by_queries[i].algorithm = CPA_PASS_Q;
    run(&s, STEP(PROMPTS), 0, by_kv);
    run(&s, STEP(by_queries), 0, by_q);
    int64_t chunk = 0, position = -1, rows = 0;
    while (next_row(&s, STEP(PROMPTS), EXPANDED, &chunk, &position)) rows++;
    const int64_t bytes = rows * s.latents.shape.heads * s.latents.shape.value * (int64_t)sizeof(float);
    if (cpa_test_promises_bits() && rows > 0)
        CU_ASSERT_EQUAL(memcmp(by_kv[EXPANDED], by_q[EXPANDED], (size_t)bytes), 0);
    for (int f = 0; f < CPA_TEST_LATENT_FORMS; f++) free(by_kv[f]), free(by_q[f]);
    close_site(&s);
}

/* Keys that the least workspace does not hold at once go through it in passes. */
static void long_prompts_go_through_the_least_workspace(void) {
    static const int64_t lengths[] = {5000, 300};
    static const latent_chunk chunks[] = {{0, 4960, 40, CPA_PASS_KV, EXPANDED}, {1, 280, 20, CPA_PASS_Q, EXPANDED}};
    cpa_test_latent_shape shape = SHAPES[0];
    cpa_error err;
    site s = {.mask = {.causal = 1}};
    shape.heads = 2;
    cpa_test_device_open(1, &s.device, &s.stream);
    cpa_test_latents_init(&s.latents, shape, 5, lengths, PLACEMENTS, 2, s.stream);
    cpa_context_options options = cpa_test_latent_options(&s.latents);
    options.staging_bytes = cpa_context_least_staging(s.device, &options, cpa_test_ranks());
    CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
    run(&s, STEP(chunks), 0, NULL);
    cpa_context_stats stats;
    CU_ASSERT_EQUAL(cpa_context_get_stats(s.context, &stats, sizeof stats), CPA_OK);
    CPA_ASSERT_ORDER(stats.staging_bytes, <=, options.staging_bytes);
    s.mask.window = 1500; /* passes that no row sees are left out, the first among them */
    run(&s, STEP(chunks), 0, NULL);
    close_site(&s);
}

static void run_absorbing(site *s, double slack) {
    run(s, STEP(PROMPTS), slack, NULL);
    run(s, STEP(NARROW), slack, NULL);
    run(s, STEP(MIXED), slack, NULL);
}

/* What is folded at the rank that has the keys is the attention of rows that come folded; but for sums in another order,
 * where that decides how a folded query is rounded to 16 bits. */
static void narrow_queries_absorb_where_the_keys_are(void) {
    for (int i = 0; i < N_SHAPES; i += 2) {
        site s;
        open_site_of(&s, SHAPES[i], N_SEQUENCES, CPA_ABSORB_ALWAYS, NULL);
        run_absorbing(&s, i == 0 ? 0 : 0.01);
        s.mask = (cpa_mask){.causal = 1, .window = 70, .sinks = 3};
        if (i == 0) run_absorbing(&s, 0);
        close_site(&s);
    }
    cpa_context_options options = {.rows = CPA_ROWS_REPLICATED};
    site s;
    open_site_of(&s, SHAPES[0], N_SEQUENCES, CPA_ABSORB_ALWAYS, &options);
    run(&s, STEP(NARROW), 0, NULL);
    run(&s, STEP(MIXED), 0, NULL);
    close_site(&s);
}

/* Segments that come one after the other, and those of all peers at once, join what was there. */
static void absorbed_rows_go_on_from_segment_to_segment(void) {
    for (int gathers = 0; gathers < 2; gathers++) {
        site s;
        cpa_error err;
        open_site_of(&s, SHAPES[0], N_SEQUENCES, CPA_ABSORB_ALWAYS, NULL);
        cpa_context_options options = cpa_test_latent_options(&s.latents);
        cpa_context_destroy(s.context);
        if (gathers) s.device->caps.bit_exact = 0, s.device->caps.split_tokens = 1;
        options.staging_bytes = cpa_context_least_staging(s.device, &options, cpa_test_ranks());
        CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
        run_absorbing(&s, 0);
        close_site(&s);
    }
}

/* The results of a step, and how many bytes they have. */
static int64_t results_of(site *s, step of, char **results) {
    int64_t chunk = 0, position = -1, rows = 0;
    run(s, of, 0.05, results);
    while (next_row(s, of, EXPANDED, &chunk, &position)) rows++;
    return rows * s->latents.shape.heads * s->latents.shape.value * cpa_dtype_bytes(s->latents.shape.dtype);
}

/* With latents of 64 + 16 for heads of 4 + 16 and 4 it is the bytes of what is expanded that count: some 120 rows over a
 * long context are worth it (latent_work.h). On one rank a plan has them all. */
static void it_is_counted_who_absorbs(void) {
    static const latent_chunk few[] = {{0, 380, 40, CPA_PASS_Q, EXPANDED}},
                              many[] = {{0, 30, 390, CPA_PASS_Q, EXPANDED}};
    cpa_test_latent_shape shape = SHAPES[1];
    char *results[3][2][CPA_TEST_LATENT_FORMS];
    int64_t bytes[2] = {0};
    shape.latent = 64, shape.nope = shape.value = 4;
    for (int absorbs = CPA_ABSORB_NEVER; absorbs <= CPA_ABSORB_ALWAYS; absorbs++) {
        site s;
        open_site_of(&s, shape, 1, (cpa_absorb)absorbs, NULL);
        bytes[0] = results_of(&s, STEP(few), results[absorbs][0]);
        bytes[1] = results_of(&s, STEP(many), results[absorbs][1]);
        close_site(&s);
    }
    for (int is_many = 0; is_many < 2 && cpa_test_promises_bits(); is_many++) {
        const char *never = results[CPA_ABSORB_NEVER][is_many][EXPANDED],
                   *counted = results[CPA_ABSORB_COUNTED][is_many][EXPANDED],
                   *always = results[CPA_ABSORB_ALWAYS][is_many][EXPANDED];
        if (is_many && cpa_test_ranks() > 1) continue;
        if (bytes[is_many] == 0) continue;
        CU_ASSERT_NOT_EQUAL(memcmp(never, always, (size_t)bytes[is_many]), 0);
        CU_ASSERT_EQUAL(memcmp(counted, is_many ? never : always, (size_t)bytes[is_many]), 0);
    }
    for (int i = 0; i < 3 * 2 * CPA_TEST_LATENT_FORMS; i++) free((&results[0][0][0])[i]);
}

/* Each state of another rank is rounded once: by half a unit in the last place of bf16. */
static void states_travel_in_16_bits(void) {
    for (int rows = CPA_ROWS_OWNED; rows <= CPA_ROWS_REPLICATED; rows++) {
        cpa_context_options options = {.rows = (cpa_row_placement)rows, .state_dtype = CPA_BF16};
        site s;
        open_site(&s, SHAPES[0], &options);
        run(&s, STEP(DECODE), 0.02, NULL);
        run(&s, STEP(DRAFTS), 0.05, NULL);
        run(&s, STEP(MIXED), 0.02, NULL);
        close_site(&s);
    }
}

/* As vLLM's tests of decode context parallel have them: so many heads a rank, one to three tokens a request, and ranks
 * that have no key of some. */
static void heads_are_scattered_as_peers_scatter_them(void) {
    static const int32_t heads_of_ranks[][2] = {{2, 8}, {16, 8}, {4, 4}, {1, 2}}; /* heads a rank, ranks */
    static const latent_chunk chunks[] = {{0, 417, 3, CPA_PASS_Q, LIES},
                                          {1, 229, 1, CPA_PASS_Q, LIES},
                                          {2, 88, 2, CPA_PASS_Q, LIES},
                                          {4, 0, 3, CPA_PASS_Q, LIES}};
    for (size_t i = 0; i < sizeof heads_of_ranks / sizeof *heads_of_ranks; i++) {
        cpa_test_latent_shape shape = SHAPES[1];
        if (heads_of_ranks[i][1] != cpa_test_ranks()) continue;
        shape.heads = heads_of_ranks[i][0] * cpa_test_ranks();
        for (int state = CPA_F32; state <= CPA_BF16; state++) {
            cpa_context_options options = {.rows = CPA_ROWS_REPLICATED, .state_dtype = (cpa_dtype)state};
            site s;
            open_site(&s, shape, &options);
            run(&s, STEP(chunks), state == CPA_F32 ? 0 : 0.05, NULL);
            close_site(&s);
        }
    }
}

static int64_t bytes_sent(const site *s) {
    cpa_context_stats stats;
    CU_ASSERT_EQUAL(cpa_context_get_stats(s->context, &stats, sizeof stats), CPA_OK);
    int64_t sent = stats.bytes_sent;
    MPI_Allreduce(MPI_IN_PLACE, &sent, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    return sent;
}

/* Of all ranks together: a row's query goes to each other rank, and a state comes back from it; a token's latent goes to
 * each other rank that has rows. */
static void what_travels_is_counted_to_the_byte(void) {
    static const struct {
        cpa_dtype kv_dtype, state_dtype;
        float k_scale;
        int64_t token, state; /* bytes a token, and a head's state */
    } cases[] = {{CPA_BF16, CPA_F32, 0, 1152, 512 * 4 + 4},
                 {CPA_FP8_T128, CPA_BF16, 0, 656, 512 * 2 + 4},
                 {CPA_FP8_E4M3, CPA_F16, 0.05f, 576, 512 * 2 + 4}};
    static const latent_chunk decode[] = {{0, 419, 1, CPA_PASS_Q, LIES}}, matrix[] = {{0, 419, 1, CPA_PASS_Q, MATRIX}},
                              narrow_q[] = {{0, 419, 1, CPA_PASS_Q, EXPANDED}};
    const int64_t ranks = cpa_test_ranks(), heads = 4, others = ranks - 1;
    /* Two blocks of every rank, all of which have rows: of the second, a rank's is seen by those behind it alone. */
    const int64_t tokens = BLOCK * ranks * 2, seen = tokens * 3 / 4;
    const latent_chunk prompt[] = {{0, 0, tokens, CPA_PASS_KV, EXPANDED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const cpa_test_latent_shape shape = {.heads = (int32_t)heads,
                                             REAL_WIDTHS,
                                             .dtype = CPA_BF16,
                                             .kv_dtype = cases[i].kv_dtype,
                                             .k_scale = cases[i].k_scale,
                                             .block_size = BLOCK,
                                             .interleave = BLOCK};
        cpa_context_options options = {.state_dtype = cases[i].state_dtype};
        site s;
        open_site_of(&s, shape, 1, CPA_ABSORB_ALWAYS, &options);
        run(&s, STEP(decode), 0.05, NULL);
        int64_t sent = bytes_sent(&s);
        CU_ASSERT_EQUAL(sent, others * heads * (576 * 2 + cases[i].state));
        run(&s, STEP(matrix), 0.05, NULL);
        const int64_t narrow = cases[i].state_dtype == CPA_F32 ? 4 : 2;
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * heads * (576 * 2 + 128 * narrow + 4));
        sent = bytes_sent(&s);
        run(&s, STEP(narrow_q), 0.05, NULL);
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * heads * (192 * 2 + 128 * narrow + 4));
        sent = bytes_sent(&s);
        run(&s, STEP(prompt), 0.05, NULL);
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * seen * cases[i].token);
        close_site(&s);
    }
}

/* ---- the reserved step ---- */

enum { RESERVED = 3, MOST_TOKENS = 420, STRIDE = MOST_TOKENS / BLOCK + 2, HUGE_ENTRY = 0x7fffffff };
static const int64_t SHARDED[RESERVED] = {0, 1, 3};

static cpa_attend_update_args upload_update(const site *s) {
    int32_t lengths[RESERVED], ranks[RESERVED], tables[RESERVED * STRIDE];
    for (int i = 0; i < RESERVED * STRIDE; i++) tables[i] = HUGE_ENTRY;
    for (int i = 0; i < RESERVED; i++) {
        const cpa_placement placement = s->latents.placements[SHARDED[i]];
        const cpa_token_set here = cpa_tokens_on(s->latents.map, placement, s->latents.rank);
        const int64_t tokens = cpa_tokens_before(s->latents.map, here, LENGTHS[SHARDED[i]]);
        lengths[i] = (int32_t)LENGTHS[SHARDED[i]];
        ranks[i] = placement.rank;
        memcpy(tables + (ptrdiff_t)i * STRIDE, s->latents.tables[SHARDED[i]],
               (size_t)((tokens + BLOCK - 1) / BLOCK) * sizeof *tables);
    }
    return (cpa_attend_update_args){.size = sizeof(cpa_attend_update_args),
                                    .sequences = RESERVED,
                                    .lengths = cpa_test_upload(s->stream, lengths, sizeof lengths),
                                    .block_tables = cpa_test_upload(s->stream, tables, sizeof tables),
                                    .table_stride = STRIDE,
                                    .first_ranks = cpa_test_upload(s->stream, ranks, sizeof ranks)};
}

/* Decode of a row of each sequence, whose lengths and tables lie on the device: right on the owner, empty elsewhere. */
static void run_reserved(site *s, int form, double slack) {
    const cpa_test_latents *t = &s->latents;
    const cpa_context_limits limits = {sizeof limits, RESERVED, MOST_TOKENS, t->kv.num_blocks, form};
    const int64_t element = cpa_dtype_bytes(t->shape.dtype), q_row = t->shape.heads * cpa_test_latent_q_dim(t, form);
    const int64_t out_head = cpa_test_latent_out_dim(t, form) * element, heads = t->shape.heads;
    cpa_form_rows rows[CPA_TEST_LATENT_FORMS] = {{.q = NULL}};
    const cpa_context_args args = {.size = sizeof args, .kv = t->kv, .rows = rows};
    CU_ASSERT_EQUAL(cpa_context_reserve(s->context, &limits), CPA_OK);
    const cpa_attend_update_args update = upload_update(s);
    char *q = cpa_test_poisoned(RESERVED * q_row, element), *out = cpa_test_poisoned(RESERVED * heads * out_head, 1);
    float *lse = cpa_test_poisoned(RESERVED * heads, sizeof *lse);
    int is_own[RESERVED];
    for (int i = 0; i < RESERVED; i++) {
        const int64_t sequence = SHARDED[i], position = LENGTHS[sequence] - 1;
        is_own[i] = cpa_owner_rank(t->map, t->placements[sequence], position) == t->rank;
        if (is_own[i])
            cpa_narrow(q + i * q_row * element, cpa_test_latent_query(t, form, sequence, position, 0), t->shape.dtype,
                       q_row);
    }
    rows[form] = (cpa_form_rows){.q = cpa_test_upload(s->stream, q, RESERVED * q_row * element),
                                 .out = cpa_test_upload(s->stream, out, RESERVED * heads * out_head),
                                 .lse = cpa_test_upload(s->stream, lse, RESERVED * heads * (int64_t)sizeof *lse),
                                 .mask = s->mask,
                                 .scale = t->scale,
                                 .matrix = form == MATRIX ? t->matrix : NULL};
    CU_ASSERT_EQUAL(cpa_context_update(s->context, &update, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &args, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
    cpa_test_download(s->stream, out, rows[form].out, RESERVED * heads * out_head);
    cpa_test_download(s->stream, lse, rows[form].lse, RESERVED * heads * (int64_t)sizeof *lse);
    for (int64_t at = 0; at < RESERVED * heads; at++) {
        const int64_t i = at / heads, sequence = SHARDED[i];
        const cpa_case_expected expected = cpa_test_latent_expect(t, form, s->mask, sequence, LENGTHS[sequence] - 1,
                                                                  LENGTHS[sequence], (int32_t)(at % heads));
        const cpa_case_result got = {.out = out + at * out_head,
                                     .out_dtype = t->shape.dtype,
                                     .lse = slack > 0 ? NULL : &lse[at],
                                     .out_slack = slack};
        if (is_own[i]) CU_ASSERT(cpa_case_is_right(&expected, &got, NULL));
        if (!is_own[i]) CU_ASSERT_EQUAL(lse[at], -INFINITY);
    }
    const void *used[] = {update.lengths, update.block_tables, update.first_ranks,
                          rows[form].q,   rows[form].out,      rows[form].lse};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(s->stream, (void *)(uintptr_t)used[i]);
    free(lse);
    free(out);
    free(q);
}

static void latents_are_attended_in_a_reserved_step(void) {
    for (int i = 0; i < 6; i++) {
        cpa_context_options options = {.state_dtype = i < 3 ? CPA_F32 : CPA_BF16};
        site s;
        open_site(&s, SHAPES[i % 3], &options);
        run_reserved(&s, i % 2 ? MATRIX : LIES, i < 3 ? 0 : 0.05);
        run(&s, STEP(MIXED), i < 3 ? 0 : 0.05, NULL); /* planned steps go on beside it */
        close_site(&s);
    }
}

/* ---- refusals ---- */

static void refuse_form(const site *s, cpa_row_form form, const char *says) {
    cpa_context_options options = cpa_test_latent_options(&s->latents);
    cpa_context *context = NULL;
    cpa_error err = {0};
    options.forms = &form;
    options.n_forms = 1;
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), s->device, &options, &context, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(context);
    if (!strstr(err.message, says)) printf("\n    '%s' does not say '%s'", err.message, says);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
}

static void refuse_layer(const site *s, const cpa_form_rows *rows, const char *says) {
    static const latent_chunk chunks[] = {{0, 0, 420, CPA_PASS_KV, EXPANDED}};
    cpa_form_rows all[CPA_TEST_LATENT_FORMS] = {{.q = NULL}};
    const cpa_context_args args = {.size = sizeof args, .kv = s->latents.kv, .rows = all};
    all[EXPANDED] = *rows;
    CU_ASSERT_EQUAL(plan(s, STEP(chunks)), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &args, s->stream), CPA_INVALID);
    if (!strstr(cpa_context_error(s->context), says))
        printf("\n    '%s' does not say '%s'", cpa_context_error(s->context), says);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s->context), says));
}

static void what_cannot_be_expanded_is_refused(void) {
    site s;
    open_site(&s, SHAPES[0], NULL);
    refuse_form(&s, (cpa_row_form){.k_dim = 16, .v_dim = 8, .expanded = 1}, "k_dim is 16, expected 17 to 576");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .expanded = 1}, "v_dim is 0, expected 1 to 576");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .v_dim = 8, .expanded = 2}, "expanded is 2, expected 0 or 1");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .v_dim = 8, .expanded = 1, .absorbs = (cpa_absorb)3},
                "absorbs is 3, expected never (0), counted (1) or always (2)");
    refuse_form(&s, (cpa_row_form){.absorbs = CPA_ABSORB_COUNTED}, "absorbs is 1 without expanded");
    const cpa_context_limits limits = {sizeof limits, 4, 100, s.latents.kv.num_blocks, EXPANDED};
    CU_ASSERT_EQUAL(cpa_context_reserve(s.context, &limits), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(cpa_context_error(s.context), "reserved for rows of form 2, whose keys are expanded"));
    char place[16];
    cpa_form_rows rows = {.q = place, .out = place, .mask = {.causal = 1}, .expansion = NULL};
    refuse_layer(&s, &rows, "form 2: the expansion is (nil), expected one");
    rows.expansion = s.latents.expansion, rows.matrix = s.latents.matrix;
    refuse_layer(&s, &rows, "form 2: the matrix is 0x");
    rows.matrix = NULL, rows.fold = s.latents.fold;
    refuse_layer(&s, &rows, "expected NULL, as the form does not absorb");
    close_site(&s);
    open_site_of(&s, SHAPES[0], 1, CPA_ABSORB_COUNTED, NULL);
    rows.expansion = s.latents.expansion, rows.fold = s.latents.fold;
    refuse_layer(&s, &rows, "and unfold (nil), expected both, as the form absorbs");
    rows.unfold = (const char *)s.latents.matrix + 2;
    refuse_layer(&s, &rows, "form 2: unfold at 0x");
    close_site(&s);
}

static void scores_over_latents_need_a_scale(void) {
    static const latent_chunk chunks[] = {{0, 0, 420, CPA_PASS_KV, LIES}};
    char place[16];
    site s;
    open_site(&s, SHAPES[0], NULL);
    cpa_form_rows rows[CPA_TEST_LATENT_FORMS] = {{.q = place, .out = place, .mask = {.causal = 1}}};
    const cpa_context_args args = {.size = sizeof args, .kv = s.latents.kv, .rows = rows};
    CU_ASSERT_EQUAL(plan(&s, STEP(chunks)), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, s.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "form 0: scale is 0 over latents"));
    close_site(&s);
}

static const cpa_test TESTS[] = {
    {"prompts and decode attend every form of cache", prompts_and_decode_attend_every_form_of_cache},
    {"windows hide latents", windows_hide_latents},
    {"ranks have all rows", ranks_have_all_rows},
    {"prompts take latents of all peers at once", prompts_take_latents_of_all_peers_at_once},
    {"both algorithms give the same bits", both_algorithms_give_the_same_bits},
    {"long prompts go through the least workspace", long_prompts_go_through_the_least_workspace},
    {"narrow queries absorb where the keys are", narrow_queries_absorb_where_the_keys_are},
    {"absorbed rows go on from segment to segment", absorbed_rows_go_on_from_segment_to_segment},
    {"it is counted who absorbs", it_is_counted_who_absorbs},
    {"states travel in 16 bits", states_travel_in_16_bits},
    {"heads are scattered as peers scatter them", heads_are_scattered_as_peers_scatter_them},
    {"what travels is counted to the byte", what_travels_is_counted_to_the_byte},
    {"latents are attended in a reserved step", latents_are_attended_in_a_reserved_step},
    {"what cannot be expanded is refused", what_cannot_be_expanded_is_refused},
    {"scores over latents need a scale", scores_over_latents_need_a_scale},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context_latents", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
