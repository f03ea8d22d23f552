/* Cascade attention against attention without it and against float64: trees of depth 1 to 3, several ranks, several rows
 * a sequence, windows, plans for graphs, queries that are ready elsewhere; of ordinary heads and of latents. Page tails,
 * unused blocks and entries are poisoned. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/attend_plan.h"
#include "kernels/operators.h"
#include "src/check/cases/judge.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_SEQUENCES = 12, SPARE_ENTRIES = 3 };

/* With --whole, and on devices, every case; the host, whose code is the same for many, else takes every other one. */
static int whole;

typedef struct cascade_case {
    cpa_dtype dtype, kv_dtype;
    cpa_kv_layout layout;
    int32_t q_heads, kv_heads, dim, block_size, ranks, interleave, threads;
    int32_t sequences, rows; /* rows: most of a sequence */
    int64_t prefix;          /* tokens that each level of the tree shares, in steps of ranks * 1024 */
    cpa_mask mask;
    int32_t ruled; /* scores have a softcap and ALiBi, or rows a mask of bits */
    int32_t v_dim; /* not 0: of latents, whose first elements are the values; 0: values are as wide as keys */
    float k_scale;
} cascade_case;

enum { NO_RULES, SCORE_RULES, MASK_OF_BITS };

/* (128 + 64)^-1/2: that of the heads for which latents of 512 + 64 stand. */
static const float LATENT_SCALE = 0.0721687824f;

static int is_latent(const cascade_case *c) {
    return c->v_dim > 0;
}

static int32_t v_dim_of(const cascade_case *c) {
    return is_latent(c) ? c->v_dim : c->dim;
}

/* Decode of sequences that begin alike, over the shard of one rank. */
typedef struct cascade_fixture {
    cascade_case shape;
    cpa_owner_map map;
    int32_t rank;
    cpa_device *device;
    cpa_stream *stream;
    cpa_attend_plan *plan;
    cpa_case_sequence sequences[MOST_SEQUENCES];
    cpa_attend_item items[MOST_SEQUENCES];
    cpa_kv_fixture kv;
    int32_t *tables;
    int64_t stride, rows;
    char *q;
    cpa_case_score score;
} cascade_fixture;

static cpa_token_set shard_of(const cascade_fixture *f) {
    return (cpa_token_set){CPA_TOKENS_SHARD, f->rank};
}

/* Sequence i goes along with an earlier one for a number of whole prefixes, of at most three. */
static void deal_sequences(cascade_fixture *f) {
    const cascade_case *c = &f->shape;
    int64_t next_block = 0;
    f->tables = cpa_test_poisoned(c->sequences * f->stride, sizeof *f->tables);
    for (int64_t e = 0; e < c->sequences * f->stride; e++) f->tables[e] = 2147480000;
    for (int64_t i = 0; i < c->sequences; i++) {
        const int64_t levels = 1 + cpa_test_random_below(3), with = cpa_test_random_below(i + (i == 0));
        cpa_case_sequence *own = &f->sequences[i];
        const cpa_case_sequence *other = &f->sequences[with];
        const int64_t rows = 1 + cpa_test_random_below(c->rows);
        int64_t along = i == 0 ? 0 : levels * c->prefix;
        if (i > 0 && along > other->length) along = other->length / c->prefix * c->prefix;
        const int64_t more = cpa_test_random_below(4 - along / c->prefix);
        const int64_t length = along + (i == 0 ? 3 : more) * c->prefix + rows + cpa_test_random_below(300);
        *own = (cpa_case_sequence){length,          .q_heads = c->kv_heads, .kv_heads = c->kv_heads,
                                   .k_dim = c->dim, .v_dim = v_dim_of(c),   .v_in_k = is_latent(c)};
        if (cpa_case_sequence_make(own, 100 + (uint64_t)i, 0, c->dtype, NULL) != CPA_OK) abort();
        const size_t width = (size_t)c->kv_heads * (size_t)c->dim * sizeof(float);
        if (along > 0) {
            memcpy(own->k, other->k, (size_t)along * width);
            if (own->v) memcpy(own->v, other->v, (size_t)along * width);
        }
        const int64_t keys = cpa_tokens_before(f->map, shard_of(f), length),
                      used = (keys + c->block_size - 1) / c->block_size;
        const int64_t shared = cpa_tokens_before(f->map, shard_of(f), along) / c->block_size;
        int32_t *table = f->tables + i * f->stride;
        memcpy(table, f->tables + with * f->stride, (size_t)shared * sizeof *table);
        for (int64_t e = used - 1; e >= shared; e--) table[e] = (int32_t)next_block++;
        /* The rows of all sequences lie on whichever rank has their last token, as those of its peers would. */
        const int32_t owner = cpa_owner_rank(f->map, (cpa_placement){CPA_SHARDED, 0}, length - 1);
        const cpa_token_set theirs = {CPA_TOKENS_SHARD, owner};
        const int64_t q_end = cpa_tokens_before(f->map, theirs, length);
        const int64_t count = rows < q_end ? rows : q_end;
        f->items[i] = (cpa_attend_item){.q_row = f->rows,
                                        .q_count = count,
                                        .q_first = q_end - count,
                                        .k_count = keys,
                                        .table = i * f->stride,
                                        .q_set = theirs,
                                        .k_set = shard_of(f)};
        f->rows += count;
    }
}

/* The queries of an item's rows, of all heads. */
static void synthesize_queries(const cascade_fixture *f, int64_t sequence) {
    const cascade_case *c = &f->shape;
    const cpa_attend_item *item = &f->items[sequence];
    const int64_t row = (int64_t)c->q_heads * c->dim, n = item->q_count * row;
    int64_t *positions = malloc((size_t)item->q_count * sizeof *positions);
    float *q = cpa_test_poisoned(n, sizeof *q);
    for (int64_t i = 0; i < item->q_count; i++)
        positions[i] = cpa_token_position(f->map, item->q_set, item->q_first + i);
    const cpa_synth_args args = {.tensor = CPA_SYNTH_Q,
                                 .seed = 100 + (uint64_t)sequence,
                                 .heads = c->q_heads,
                                 .kv_heads = c->kv_heads,
                                 .dim = c->dim,
                                 .rows = item->q_count,
                                 .positions = positions,
                                 .dtype = CPA_F32};
    if (cpa_case_synthesize(args, q, NULL) != CPA_OK) abort();
    cpa_narrow(f->q + item->q_row * row * cpa_dtype_bytes(c->dtype), q, c->dtype, n);
    free(q);
    free(positions);
}

static void fixture_init(cascade_fixture *f, const cascade_case *shape, int32_t rank) {
    *f = (cascade_fixture){.shape = *shape, .map = {shape->ranks, shape->interleave}, .rank = rank};
    const int64_t most = 5 * shape->prefix + 400, width = (int64_t)shape->q_heads * shape->dim;
    const int64_t element = cpa_dtype_bytes(shape->dtype);
    f->stride = cpa_shard_len(f->map, 0, most) / shape->block_size + 1 + SPARE_ENTRIES;
    deal_sequences(f);
    const cpa_kv_view view = {.dtype = shape->kv_dtype,
                              .block_size = shape->block_size,
                              .num_blocks = shape->sequences * f->stride,
                              .kv_heads = shape->kv_heads,
                              .k_dim = shape->dim,
                              .v_dim = v_dim_of(shape),
                              .v_in_k = is_latent(shape),
                              .k_scale = shape->k_scale};
    cpa_kv_fixture_init_layout(&f->kv, view, shape->layout);
    f->q = cpa_test_poisoned(f->rows * width, element);
    for (int64_t i = 0; i < shape->sequences; i++) {
        cpa_test_store_shard(&f->kv, &f->sequences[i], f->map, shard_of(f), f->sequences[i].length,
                             f->tables + i * f->stride);
        cpa_test_read_shard(&f->kv, &f->sequences[i], f->map, shard_of(f), f->sequences[i].length,
                            f->tables + i * f->stride);
        synthesize_queries(f, i);
    }
    f->score = (cpa_case_score){.q_heads = shape->q_heads, .rows = f->rows};
    if (shape->ruled == SCORE_RULES) {
        f->score.softcap = 2;
        cpa_case_score_add_slopes(&f->score, NULL);
    }
    if (shape->ruled == MASK_OF_BITS) cpa_case_score_add_bits(&f->score, 0, (int32_t)most, NULL);
    cpa_test_device_open(shape->threads, &f->device, &f->stream);
    if (cpa_attend_plan_create(f->device, &f->plan, NULL) != CPA_OK) abort();
}

static void fixture_destroy(cascade_fixture *f) {
    cpa_attend_plan_destroy(f->plan);
    cpa_case_score_release(&f->score);
    for (int64_t i = 0; i < f->shape.sequences; i++) cpa_case_sequence_release(&f->sequences[i]);
    cpa_kv_fixture_destroy(&f->kv);
    free(f->tables);
    free(f->q);
    cpa_test_device_close(f->device, f->stream);
}

/* O of all rows, then LSE. `fused`: as in a decode step that is exchanged, in a plan for graphs where all items have
 * one row, with the queries of the last two items elsewhere. */
static float *attend(cascade_fixture *f, cpa_cascade_attention cascade, int fused) {
    const cascade_case *c = &f->shape;
    const int64_t width = (int64_t)c->q_heads * c->dim, o_floats = f->rows * c->q_heads * v_dim_of(c);
    const int64_t bytes = (o_floats + f->rows * c->q_heads) * (int64_t)sizeof(float);
    const cpa_attention_shape shape = {.q_heads = c->q_heads,
                                       .kv_heads = c->kv_heads,
                                       .k_dim = c->dim,
                                       .v_dim = v_dim_of(c),
                                       .v_in_k = is_latent(c),
                                       .dtype = c->dtype,
                                       .kv_dtype = c->kv_dtype,
                                       .k_scale = c->k_scale,
                                       .layout = c->layout};
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = f->map,
                                    .shape = shape,
                                    .block_size = c->block_size,
                                    .items = f->items,
                                    .n_items = c->sequences,
                                    .block_tables = f->tables,
                                    .n_table_entries = c->sequences * f->stride,
                                    .cascade_attention = cascade};
    const int64_t row_bytes = width * cpa_dtype_bytes(c->dtype), ready_row = f->items[c->sequences - 2].q_row;
    const cpa_attend_fusion fusion = {.padded_items = c->rows == 1 ? c->sequences + 3 : 0,
                                      .ready_items = 2,
                                      .ready_row = ready_row,
                                      .ready_rows = f->rows - ready_row};
    float *result = cpa_test_poisoned(bytes, 1);
    float *state = cpa_test_upload(f->stream, result, bytes);
    char *sent = malloc((size_t)(f->rows * row_bytes));
    memcpy(sent, f->q, (size_t)(f->rows * row_bytes));
    if (fused) memset(sent + ready_row * row_bytes, 0xff, (size_t)((f->rows - ready_row) * row_bytes));
    void *q = cpa_test_upload(f->stream, sent, f->rows * row_bytes);
    void *ready_q = cpa_test_upload(f->stream, f->q + ready_row * row_bytes, (f->rows - ready_row) * row_bytes);
    const cpa_kv_view kv = cpa_kv_fixture_upload(&f->kv, f->stream);
    cpa_case_score_on_device score;
    CU_ASSERT_EQUAL(cpa_case_score_upload(&f->score, f->stream, &score, NULL), CPA_OK);
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = q,
                                  .q_dtype = c->dtype,
                                  .kv = kv,
                                  .scale = is_latent(c) ? LATENT_SCALE : 0,
                                  .mask = c->mask,
                                  .state = {.o = state, .lse = state + o_floats},
                                  .rules = c->ruled == SCORE_RULES ? &score.rules : NULL,
                                  .selection = c->ruled == MASK_OF_BITS ? cpa_case_score_selection(&score) : NULL};
    if (fused) {
        const cpa_operator_table *operators = f->device->operators;
        CU_ASSERT_EQUAL(operators->plan_set(f->plan, &batch, fusion, NULL), CPA_OK);
        CU_ASSERT_EQUAL(operators->attend(f->plan, &args, ready_q, f->stream), CPA_OK);
    } else {
        CU_ASSERT_EQUAL(cpa_attend_plan_set(f->plan, &batch, NULL), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend(f->plan, &args, f->stream), CPA_OK);
    }
    CU_ASSERT_EQUAL(cpa_stream_sync(f->stream), CPA_OK);
    cpa_test_download(f->stream, result, state, bytes);
    cpa_case_score_free(&score, f->device);
    cpa_test_free(f->stream, state);
    cpa_test_free(f->stream, ready_q);
    cpa_test_free(f->stream, q);
    free(sent);
    cpa_kv_view_free(&kv, f->stream);
    return result;
}

/* What a sequence's cache has of the keys. */
typedef struct cached_keys {
    cpa_owner_map map;
    const cpa_attend_item *item;
} cached_keys;

static int is_cached(const void *ctx, int64_t key) {
    const cached_keys *c = ctx;
    const int64_t before = cpa_tokens_before(c->map, c->item->k_set, key);
    return before < c->item->k_count && cpa_tokens_before(c->map, c->item->k_set, key + 1) > before;
}

static int row_is_right(const cascade_fixture *f, int64_t sequence, int64_t row, int32_t head, const float *got) {
    const cascade_case *c = &f->shape;
    const cpa_attend_item *item = &f->items[sequence];
    const int64_t position = cpa_token_position(f->map, item->q_set, item->q_first + row);
    const int64_t at = (item->q_row + row) * c->q_heads + head;
    const cached_keys cached = {f->map, item};
    cpa_case_row question =
        cpa_case_row_of(&f->sequences[sequence], position, head / (c->q_heads / c->kv_heads), c->dtype);
    cpa_case_expected expected;
    question.head = head;
    question.q = f->q + at * c->dim * cpa_dtype_bytes(c->dtype);
    question.q_dtype = c->dtype;
    question.mask = c->mask;
    if (is_latent(c)) question.scale = (double)LATENT_SCALE;
    question.score = &f->score;
    question.score_row = item->q_row + row;
    question.given = is_cached;
    question.given_ctx = &cached;
    cpa_case_expect(&question, &expected);
    const float *lses = got + f->rows * c->q_heads * v_dim_of(c);
    return cpa_case_is_right(&expected, &(cpa_case_result){.o = got + at * v_dim_of(c), .lse = &lses[at]}, NULL);
}

/* Rows and heads of `got` that disagree with float64. Of many heads some in each tile of 16 rows are looked at. */
static int64_t wrong_rows(const cascade_fixture *f, const float *got) {
    const int64_t step = f->shape.q_heads > 16 ? 5 : 1;
    int64_t wrong = 0;
    for (int64_t i = 0; i < f->shape.sequences; i++)
        for (int64_t at = i % step; at < f->items[i].q_count * f->shape.q_heads; at += step)
            wrong += !row_is_right(f, i, at / f->shape.q_heads, (int32_t)(at % f->shape.q_heads), got);
    return wrong;
}

/* What sharing gives: the bits of what it is without, or the reference's numbers. */
static void attend_along(const cascade_case *shape, int64_t *read, int64_t *attended) {
    for (int32_t rank = 0; rank < shape->ranks; rank++) {
        cascade_fixture f;
        fixture_init(&f, shape, rank);
        float *alone = attend(&f, CPA_CASCADE_OFF, 0), *together = attend(&f, CPA_CASCADE_ALWAYS, 0),
              *fused = attend(&f, CPA_CASCADE_ALWAYS, 1);
        const size_t bytes = (size_t)(f.rows * shape->q_heads * (v_dim_of(shape) + 1)) * sizeof(float);
        *read += f.plan->keys_read;
        *attended += f.plan->keys_attended;
        CU_ASSERT_EQUAL(wrong_rows(&f, together), 0);
        if (cpa_test_promises_bits()) {
            CU_ASSERT_EQUAL(memcmp(alone, together, bytes), 0);
            CU_ASSERT_EQUAL(memcmp(fused, together, bytes), 0);
        } else {
            CU_ASSERT_EQUAL(wrong_rows(&f, fused), 0);
        }
        free(fused);
        free(alone);
        free(together);
        fixture_destroy(&f);
    }
}

static const cpa_mask CAUSAL = {.causal = 1}, WINDOW = {.causal = 1, .sinks = 4, .window = 1500};

/* The cases, for `plain` of which devices have no tensor cores: these share nothing there; nor do any where there is no
 * kernel for it. */
static void attend_cases(const cascade_case *cases, int n_cases, int plain) {
    int64_t read = 0, attended = 0;
    int shared = 0, taken = 0;
    for (int i = 0; i < n_cases; i += whole ? 1 : 2, taken++) {
        const int64_t saved = attended - read;
        attend_along(&cases[i], &read, &attended);
        shared += attended - read > saved;
    }
    printf("%d cases, in %d %lld of %lld keys read ", taken, shared, (long long)read, (long long)attended);
    if (cpa_test_promises_bits()) CPA_ASSERT_ORDER(2 * read, <, attended + read / 2);
    CU_ASSERT(shared == taken || (!cpa_test_promises_bits() && (shared == 0 || shared == n_cases - plain)));
}

static void sequences_that_begin_alike(void) {
    const cascade_case cases[] = {
        {CPA_F32, CPA_F32, CPA_TOKEN_MAJOR, 4, 2, 32, 16, 1, 16, 1, 6, 1, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 8, 2, 64, 64, 1, 64, 2, 12, 1, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 4, 1, 128, 16, 1, 16, 3, 8, 3, 2048, CAUSAL, NO_RULES, 0, 0},
        {CPA_F16, CPA_F16, CPA_TOKEN_MAJOR, 6, 3, 80, 32, 2, 32, 1, 8, 1, 2048, CAUSAL, NO_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 4, 2, 128, 256, 1, 256, 1, 8, 2, 1024, WINDOW, NO_RULES, 0, 0},
        {CPA_F32, CPA_F32, CPA_TOKEN_MAJOR, 2, 2, 16, 16, 3, 48, 1, 9, 1, 3072, WINDOW, NO_RULES, 0, 0},
        {CPA_F16, CPA_F16, CPA_TOKEN_MAJOR, 8, 2, 64, 16, 1, 16, 1, 8, 2, 1024, {.causal = 0}, NO_RULES, 0, 0},
        {CPA_BF16, CPA_FP8_E4M3, CPA_TOKEN_MAJOR, 4, 2, 128, 16, 1, 16, 1, 6, 1, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_F16, CPA_INT8, CPA_TOKEN_MAJOR, 4, 2, 64, 8, 2, 8, 2, 5, 2, 2048, WINDOW, NO_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_VLLM_X, 4, 1, 64, 32, 1, 32, 1, 6, 3, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_F16, CPA_FP8_E4M3, CPA_VLLM_X, 2, 1, 128, 16, 1, 16, 1, 6, 1, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_F32, CPA_INT8, CPA_VLLM_X, 2, 1, 32, 16, 1, 16, 1, 6, 1, 1024, CAUSAL, NO_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 8, 2, 64, 64, 1, 64, 2, 12, 1, 1024, CAUSAL, SCORE_RULES, 0, 0},
        {CPA_F16, CPA_F16, CPA_TOKEN_MAJOR, 4, 1, 128, 16, 2, 32, 1, 8, 3, 2048, WINDOW, SCORE_RULES, 0, 0},
        {CPA_BF16, CPA_FP8_E4M3, CPA_TOKEN_MAJOR, 8, 2, 128, 16, 1, 16, 1, 6, 2, 1024, CAUSAL, SCORE_RULES, 0, 0},
        {CPA_F16, CPA_F16, CPA_TOKEN_MAJOR, 4, 2, 64, 4, 1, 4, 1, 6, 1, 1024, CAUSAL, SCORE_RULES, 0, 0},
        {CPA_BF16, CPA_BF16, CPA_TOKEN_MAJOR, 4, 1, 128, 16, 1, 16, 1, 8, 3, 1024, CAUSAL, MASK_OF_BITS, 0, 0},
        {CPA_F16, CPA_INT8, CPA_TOKEN_MAJOR, 4, 2, 64, 16, 2, 16, 1, 5, 2, 2048, WINDOW, MASK_OF_BITS, 0, 0},
    };
    attend_cases(cases, sizeof cases / sizeof *cases, 3);
}

/* A case of latents of 512 + 64 columns. */
#define LATENTS(q, kv, scale, heads, block, n_ranks, n, most_rows, begin, masked)                                      \
    {                                                                                                                  \
        .dtype = q, .kv_dtype = kv, .k_scale = scale, .q_heads = heads, .kv_heads = 1, .dim = 576, .v_dim = 512,       \
        .block_size = block, .ranks = n_ranks, .interleave = 2 * (block), .threads = 1, .sequences = n,                \
        .rows = most_rows, .prefix = begin, .mask = masked                                                             \
    }

/* Few heads, of which a tile has the rows of several tokens; more, of which it has one token's; and so many that a
 * token's are in several tiles. */
static void latents_that_begin_alike(void) {
    const cascade_case cases[] = {
        LATENTS(CPA_BF16, CPA_BF16, 0, 16, 64, 1, 12, 1, 1024, CAUSAL),
        LATENTS(CPA_BF16, CPA_BF16, 0, 5, 16, 1, 8, 3, 1024, CAUSAL),
        LATENTS(CPA_F16, CPA_F16, 0, 16, 16, 2, 8, 4, 2048, CAUSAL),
        LATENTS(CPA_BF16, CPA_BF16, 0, 8, 64, 1, 8, 2, 1024, WINDOW),
        LATENTS(CPA_BF16, CPA_FP8_E4M3, 0.1f, 16, 64, 1, 8, 1, 1024, CAUSAL),
        LATENTS(CPA_F16, CPA_FP8_E4M3, 3, 4, 16, 1, 6, 3, 1024, WINDOW),
        LATENTS(CPA_BF16, CPA_FP8_T128, 0, 16, 64, 1, 8, 1, 1024, CAUSAL),
        LATENTS(CPA_BF16, CPA_FP8_T128, 0, 12, 16, 2, 6, 2, 2048, CAUSAL),
        LATENTS(CPA_F16, CPA_F16, 0, 40, 64, 1, 12, 1, 1024, CAUSAL),
        LATENTS(CPA_BF16, CPA_BF16, 0, 40, 8, 1, 5, 1, 1024, WINDOW),
        LATENTS(CPA_BF16, CPA_BF16, 0, 128, 64, 1, 6, 1, 1024, CAUSAL),
        LATENTS(CPA_F16, CPA_F16, 0, 70, 16, 2, 4, 1, 2048, WINDOW),
        LATENTS(CPA_BF16, CPA_FP8_T128, 0, 128, 64, 1, 4, 1, 1024, CAUSAL),
        LATENTS(CPA_F32, CPA_F32, 0, 4, 16, 1, 4, 1, 1024, CAUSAL),
        LATENTS(CPA_BF16, CPA_INT8, 0, 4, 16, 1, 4, 2, 1024, CAUSAL),
    };
    attend_cases(cases, sizeof cases / sizeof *cases, 2);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"sequences that begin alike", sequences_that_begin_alike},
        {"latents that begin alike", latents_that_begin_alike},
    };
    whole = cpa_test_take_option(&argc, argv, "--whole") || !cpa_test_promises_bits();
    return cpa_test_main(argc, argv, "cascade", tests, (int)(sizeof tests / sizeof *tests));
}
