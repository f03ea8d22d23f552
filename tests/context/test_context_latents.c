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
#include "tests/fixtures/latent_site.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/transport_fixture.h"

enum { BLOCK = CPA_TEST_LATENT_BLOCK };
enum { LIES = CPA_TEST_AS_THEY_LIE, MATRIX = CPA_TEST_TIMES_VALUES, EXPANDED = CPA_TEST_EXPANDED };

/* Decode of one to three tokens, of sequences that not every rank has. */
static const cpa_test_latent_chunk DECODE[] = {{0, 419, 1, CPA_PASS_Q, LIES},
                                               {1, 229, 1, CPA_PASS_Q, LIES},
                                               {2, 89, 1, CPA_PASS_Q, LIES},
                                               {3, 332, 1, CPA_PASS_Q, LIES},
                                               {4, 2, 1, CPA_PASS_Q, LIES}};
static const cpa_test_latent_chunk DRAFTS[] = {{0, 417, 3, CPA_PASS_Q, MATRIX},
                                               {1, 228, 2, CPA_PASS_Q, MATRIX},
                                               {3, 331, 2, CPA_PASS_Q, LIES},
                                               {4, 1, 2, CPA_PASS_Q, MATRIX}};
static const cpa_test_latent_chunk BY_KEYS[] = {{0, 380, 40, CPA_PASS_KV, LIES}, {3, 300, 33, CPA_PASS_KV, MATRIX}};

static void open_site(cpa_test_latent_site *s, cpa_test_latent_shape shape, cpa_context_options *options) {
    cpa_test_latent_open(s, shape, CPA_TEST_LATENT_SEQUENCES, CPA_ABSORB_NEVER, options);
}

static void run_all(cpa_test_latent_site *s, double slack) {
    cpa_test_latent_run(s, cpa_test_latent_prompts, slack, NULL);
    cpa_test_latent_run(s, CPA_TEST_LATENT_STEP(DECODE), slack, NULL);
    cpa_test_latent_run(s, CPA_TEST_LATENT_STEP(DRAFTS), slack, NULL);
    cpa_test_latent_run(s, cpa_test_latent_mixed, slack, NULL);
    cpa_test_latent_run(s, CPA_TEST_LATENT_STEP(BY_KEYS), slack, NULL);
}

/* ---- tests ---- */

static void prompts_and_decode_attend_every_form_of_cache(void) {
    for (int i = 0; i < CPA_TEST_LATENT_SHAPES; i++) {
        cpa_test_latent_site s;
        open_site(&s, cpa_test_latent_shapes[i], NULL);
        run_all(&s, 0);
        cpa_test_latent_close(&s);
    }
}

static void windows_hide_latents(void) {
    cpa_test_latent_site s;
    open_site(&s, cpa_test_latent_shapes[0], NULL);
    s.mask = (cpa_mask){.causal = 1, .window = 70, .sinks = 3};
    run_all(&s, 0);
    cpa_test_latent_close(&s);
}

static void ranks_have_all_rows(void) {
    for (int i = 0; i < 2; i++) {
        cpa_context_options options = {.rows = CPA_ROWS_REPLICATED};
        cpa_test_latent_site s;
        open_site(&s, cpa_test_latent_shapes[i], &options);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(DECODE), 0, NULL);
        cpa_test_latent_run(&s, cpa_test_latent_mixed, 0, NULL);
        cpa_test_latent_close(&s);
    }
}

/* Stands for a device, which takes the keys of all peers at once. */
static void prompts_take_latents_of_all_peers_at_once(void) {
    for (int i = 0; i < 2; i++) {
        cpa_test_latent_site s;
        open_site(&s, cpa_test_latent_shapes[i], NULL);
        const cpa_context_options options = cpa_test_latent_options(&s.latents);
        cpa_error err;
        cpa_context_destroy(s.context);
        s.device->caps.bit_exact = 0, s.device->caps.split_tokens = 1;
        CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
        run_all(&s, 0);
        cpa_test_latent_close(&s);
    }
}

/* Both algorithms expand the same keys and fold the same states. */
static void both_algorithms_give_the_same_bits(void) {
    cpa_test_latent_chunk by_queries[CPA_TEST_MOST_LATENT_CHUNKS];
    char *by_kv[CPA_TEST_LATENT_FORMS], *by_q[CPA_TEST_LATENT_FORMS];
    cpa_test_latent_site s;
    open_site(&s, cpa_test_latent_shapes[0], NULL);
    const int64_t n = cpa_test_latent_prompts.n;
    for (int64_t i = 0; i < n; i++)
        by_queries[i] = cpa_test_latent_prompts.chunks[i], by_queries[i].algorithm = CPA_PASS_Q;
    cpa_test_latent_run(&s, cpa_test_latent_prompts, 0, by_kv);
    cpa_test_latent_run(&s, ((cpa_test_latent_step){by_queries, n}), 0, by_q);
    int64_t chunk = 0, position = -1, rows = 0;
    while (cpa_test_latent_next_row(&s, cpa_test_latent_prompts, EXPANDED, &chunk, &position)) rows++;
    const int64_t bytes = rows * s.latents.shape.heads * s.latents.shape.value * (int64_t)sizeof(float);
    if (cpa_test_promises_bits() && rows > 0)
        CU_ASSERT_EQUAL(memcmp(by_kv[EXPANDED], by_q[EXPANDED], (size_t)bytes), 0);
    for (int f = 0; f < CPA_TEST_LATENT_FORMS; f++) free(by_kv[f]), free(by_q[f]);
    cpa_test_latent_close(&s);
}

/* Keys that the least workspace does not hold at once go through it in passes. */
static void long_prompts_go_through_the_least_workspace(void) {
    static const int64_t lengths[] = {5000, 300};
    static const cpa_test_latent_chunk chunks[] = {{0, 4960, 40, CPA_PASS_KV, EXPANDED},
                                                   {1, 280, 20, CPA_PASS_Q, EXPANDED}};
    cpa_test_latent_shape shape = cpa_test_latent_shapes[0];
    cpa_error err;
    cpa_test_latent_site s = {.mask = {.causal = 1}};
    shape.heads = 2;
    cpa_test_device_open(1, &s.device, &s.stream);
    cpa_test_latents_init(&s.latents, shape, 5, lengths, cpa_test_latent_placements, 2, s.stream);
    cpa_context_options options = cpa_test_latent_options(&s.latents);
    options.staging_bytes = cpa_context_least_staging(s.device, &options, cpa_test_ranks());
    CU_ASSERT_EQUAL_FATAL(cpa_context_create(cpa_test_comm(), s.device, &options, &s.context, &err), CPA_OK);
    cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(chunks), 0, NULL);
    cpa_context_stats stats;
    CU_ASSERT_EQUAL(cpa_context_get_stats(s.context, &stats, sizeof stats), CPA_OK);
    CPA_ASSERT_ORDER(stats.staging_bytes, <=, options.staging_bytes);
    s.mask.window = 1500; /* passes that no row sees are left out, the first among them */
    cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(chunks), 0, NULL);
    cpa_test_latent_close(&s);
}

/* Each state of another rank is rounded once: by half a unit in the last place of bf16. */
static void states_travel_in_16_bits(void) {
    for (int rows = CPA_ROWS_OWNED; rows <= CPA_ROWS_REPLICATED; rows++) {
        cpa_context_options options = {.rows = (cpa_row_placement)rows, .state_dtype = CPA_BF16};
        cpa_test_latent_site s;
        open_site(&s, cpa_test_latent_shapes[0], &options);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(DECODE), 0.02, NULL);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(DRAFTS), 0.05, NULL);
        cpa_test_latent_run(&s, cpa_test_latent_mixed, 0.02, NULL);
        cpa_test_latent_close(&s);
    }
}

/* As vLLM's tests of decode context parallel have them: so many heads a rank, one to three tokens a request, and ranks
 * that have no key of some. */
static void heads_are_scattered_as_peers_scatter_them(void) {
    static const int32_t heads_of_ranks[][2] = {{2, 8}, {16, 8}, {4, 4}, {1, 2}}; /* heads a rank, ranks */
    static const cpa_test_latent_chunk chunks[] = {{0, 417, 3, CPA_PASS_Q, LIES},
                                                   {1, 229, 1, CPA_PASS_Q, LIES},
                                                   {2, 88, 2, CPA_PASS_Q, LIES},
                                                   {4, 0, 3, CPA_PASS_Q, LIES}};
    for (size_t i = 0; i < sizeof heads_of_ranks / sizeof *heads_of_ranks; i++) {
        cpa_test_latent_shape shape = cpa_test_latent_shapes[1];
        if (heads_of_ranks[i][1] != cpa_test_ranks()) continue;
        shape.heads = heads_of_ranks[i][0] * cpa_test_ranks();
        for (int state = CPA_F32; state <= CPA_BF16; state++) {
            cpa_context_options options = {.rows = CPA_ROWS_REPLICATED, .state_dtype = (cpa_dtype)state};
            cpa_test_latent_site s;
            open_site(&s, shape, &options);
            cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(chunks), state == CPA_F32 ? 0 : 0.05, NULL);
            cpa_test_latent_close(&s);
        }
    }
}

static int64_t bytes_sent(const cpa_test_latent_site *s) {
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
    static const cpa_test_latent_chunk decode[] = {{0, 419, 1, CPA_PASS_Q, LIES}},
                                       matrix[] = {{0, 419, 1, CPA_PASS_Q, MATRIX}},
                                       narrow_q[] = {{0, 419, 1, CPA_PASS_Q, EXPANDED}};
    const int64_t ranks = cpa_test_ranks(), heads = 4, others = ranks - 1;
    /* Two blocks of every rank, all of which have rows: of the second, a rank's is seen by those behind it alone. On
     * devices all others get the same message. */
    const int64_t tokens = BLOCK * ranks * 2, seen = cpa_test_promises_bits() ? tokens * 3 / 4 : tokens;
    const cpa_test_latent_chunk prompt[] = {{0, 0, tokens, CPA_PASS_KV, EXPANDED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const cpa_test_latent_shape shape = {.heads = (int32_t)heads,
                                             CPA_TEST_REAL_LATENTS,
                                             .dtype = CPA_BF16,
                                             .kv_dtype = cases[i].kv_dtype,
                                             .k_scale = cases[i].k_scale,
                                             .block_size = BLOCK,
                                             .interleave = BLOCK};
        cpa_context_options options = {.state_dtype = cases[i].state_dtype};
        cpa_test_latent_site s;
        cpa_test_latent_open(&s, shape, 1, CPA_ABSORB_ALWAYS, &options);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(decode), 0.05, NULL);
        int64_t sent = bytes_sent(&s);
        CU_ASSERT_EQUAL(sent, others * heads * (576 * 2 + cases[i].state));
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(matrix), 0.05, NULL);
        const int64_t narrow = cases[i].state_dtype == CPA_F32 ? 4 : 2;
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * heads * (576 * 2 + 128 * narrow + 4));
        sent = bytes_sent(&s);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(narrow_q), 0.05, NULL);
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * heads * (192 * 2 + 128 * narrow + 4));
        sent = bytes_sent(&s);
        cpa_test_latent_run(&s, CPA_TEST_LATENT_STEP(prompt), 0.05, NULL);
        CU_ASSERT_EQUAL(bytes_sent(&s) - sent, others * seen * cases[i].token);
        cpa_test_latent_close(&s);
    }
}

/* ---- the reserved step ---- */

enum { RESERVED = 3, MOST_TOKENS = 420, STRIDE = MOST_TOKENS / BLOCK + 2, HUGE_ENTRY = 0x7fffffff };
static const int64_t SHARDED[RESERVED] = {0, 1, 3};

static cpa_attend_update_args upload_update(const cpa_test_latent_site *s) {
    int32_t lengths[RESERVED], ranks[RESERVED], tables[RESERVED * STRIDE];
    for (int i = 0; i < RESERVED * STRIDE; i++) tables[i] = HUGE_ENTRY;
    for (int i = 0; i < RESERVED; i++) {
        const cpa_placement placement = s->latents.placements[SHARDED[i]];
        const cpa_token_set here = cpa_tokens_on(s->latents.map, placement, s->latents.rank);
        const int64_t tokens = cpa_tokens_before(s->latents.map, here, cpa_test_latent_lengths[SHARDED[i]]);
        lengths[i] = (int32_t)cpa_test_latent_lengths[SHARDED[i]];
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
static void run_reserved(cpa_test_latent_site *s, int form, double slack) {
    const cpa_test_latents *t = &s->latents;
    const cpa_context_limits limits = {sizeof limits, RESERVED, MOST_TOKENS, t->kv.num_blocks, form, 1};
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
        const int64_t sequence = SHARDED[i], position = cpa_test_latent_lengths[sequence] - 1;
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
        const cpa_case_expected expected =
            cpa_test_latent_expect(t, form, s->mask, sequence, cpa_test_latent_lengths[sequence] - 1,
                                   cpa_test_latent_lengths[sequence], (int32_t)(at % heads));
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
        cpa_test_latent_site s;
        open_site(&s, cpa_test_latent_shapes[i % 3], &options);
        run_reserved(&s, i % 2 ? MATRIX : LIES, i < 3 ? 0 : 0.05);
        cpa_test_latent_run(&s, cpa_test_latent_mixed, i < 3 ? 0 : 0.05, NULL); /* planned steps go on beside it */
        cpa_test_latent_close(&s);
    }
}

/* ---- refusals ---- */

static void refuse_form(const cpa_test_latent_site *s, cpa_row_form form, const char *says) {
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

static void refuse_layer(const cpa_test_latent_site *s, const cpa_form_rows *rows, const char *says) {
    static const cpa_test_latent_chunk chunks[] = {{0, 0, 420, CPA_PASS_KV, EXPANDED}};
    cpa_form_rows all[CPA_TEST_LATENT_FORMS] = {{.q = NULL}};
    const cpa_context_args args = {.size = sizeof args, .kv = s->latents.kv, .rows = all};
    all[EXPANDED] = *rows;
    CU_ASSERT_EQUAL(cpa_test_latent_plan(s, CPA_TEST_LATENT_STEP(chunks)), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &args, s->stream), CPA_INVALID);
    if (!strstr(cpa_context_error(s->context), says))
        printf("\n    '%s' does not say '%s'", cpa_context_error(s->context), says);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s->context), says));
}

static void what_cannot_be_expanded_is_refused(void) {
    cpa_test_latent_site s;
    open_site(&s, cpa_test_latent_shapes[0], NULL);
    refuse_form(&s, (cpa_row_form){.k_dim = 16, .v_dim = 8, .expanded = 1}, "k_dim is 16, expected 17 to 576");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .expanded = 1}, "v_dim is 0, expected 1 to 576");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .v_dim = 8, .expanded = 2}, "expanded is 2, expected 0 or 1");
    refuse_form(&s, (cpa_row_form){.k_dim = 40, .v_dim = 8, .expanded = 1, .absorbs = (cpa_absorb)3},
                "absorbs is 3, expected never (0), counted (1) or always (2)");
    refuse_form(&s, (cpa_row_form){.absorbs = CPA_ABSORB_COUNTED}, "absorbs is 1 without expanded");
    const cpa_context_limits limits = {sizeof limits, 4, 100, s.latents.kv.num_blocks, EXPANDED, 1};
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
    cpa_test_latent_close(&s);
    cpa_test_latent_open(&s, cpa_test_latent_shapes[0], 1, CPA_ABSORB_COUNTED, NULL);
    rows.expansion = s.latents.expansion, rows.fold = s.latents.fold;
    refuse_layer(&s, &rows, "and unfold (nil), expected both, as the form absorbs");
    rows.unfold = (const char *)s.latents.matrix + 2;
    refuse_layer(&s, &rows, "form 2: unfold at 0x");
    cpa_test_latent_close(&s);
}

static void scores_over_latents_need_a_scale(void) {
    static const cpa_test_latent_chunk chunks[] = {{0, 0, 420, CPA_PASS_KV, LIES}};
    char place[16];
    cpa_test_latent_site s;
    open_site(&s, cpa_test_latent_shapes[0], NULL);
    cpa_form_rows rows[CPA_TEST_LATENT_FORMS] = {{.q = place, .out = place, .mask = {.causal = 1}}};
    const cpa_context_args args = {.size = sizeof args, .kv = s.latents.kv, .rows = rows};
    CU_ASSERT_EQUAL(cpa_test_latent_plan(&s, CPA_TEST_LATENT_STEP(chunks)), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_attend(s.context, &args, s.stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s.context), "form 0: scale is 0 over latents"));
    cpa_test_latent_close(&s);
}

static const cpa_test TESTS[] = {
    {"prompts and decode attend every form of cache", prompts_and_decode_attend_every_form_of_cache},
    {"windows hide latents", windows_hide_latents},
    {"ranks have all rows", ranks_have_all_rows},
    {"prompts take latents of all peers at once", prompts_take_latents_of_all_peers_at_once},
    {"both algorithms give the same bits", both_algorithms_give_the_same_bits},
    {"long prompts go through the least workspace", long_prompts_go_through_the_least_workspace},
    {"states travel in 16 bits", states_travel_in_16_bits},
    {"heads are scattered as peers scatter them", heads_are_scattered_as_peers_scatter_them},
    {"what travels is counted to the byte", what_travels_is_counted_to_the_byte},
    {"latents are attended in a reserved step", latents_are_attended_in_a_reserved_step},
    {"what cannot be expanded is refused", what_cannot_be_expanded_is_refused},
    {"scores over latents need a scale", scores_over_latents_need_a_scale},
};
CPA_MPI_TEST_MAIN_UNLESS(cpa_test_transport_missing(), "context_latents", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]))
