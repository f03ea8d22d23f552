/* The reserved step of a context: lengths and block tables from memory of the device, step after step, beside steps
 * that are planned; on devices in a graph of the caller's too. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef CPA_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "base/convert.h"
#include "kernels/device.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { SEQUENCES = 7, MOST = 600, HUGE_ENTRY = 0x7fffffff, MOST_ROWS = 8, MOST_WORDS = MOST / 32 + 1 };
static const cpa_mask CAUSAL = {.causal = 1}, WINDOW = {.causal = 1, .window = 100, .sinks = 4};
static cpa_test_shape SHAPE = {
    .q_heads = 8, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 32, .dtype = CPA_BF16};
/* New tokens of a sequence, as they are reserved; if they are more than one, steps have any number of them. */
static int32_t ROWS = 1;
static int has_bits; /* 1: steps have a mask of bits over their new tokens, as trees of drafts have */

typedef struct site {
    cpa_device *device;
    cpa_stream *stream;
    cpa_context *context;
    cpa_test_cache cache;
    int64_t stride; /* of tables */
    int32_t lengths[SEQUENCES], first_ranks[SEQUENCES];
    int32_t *tables;
    int32_t counts[SEQUENCES]; /* of new tokens */
    /* On the device: ROWS rows a sequence. */
    void *device_lengths, *device_tables, *device_ranks, *q, *out;
    int32_t *device_indptr; /* which counts them */
    float *lse;
    cpa_key_bits bits; /* of the step */
    cpa_kv_view kv;
    void *graph; /* of the caller's, to launch in the place of an update and an attend */
    void *busy;  /* memory that the default stream of the device clears while the step is reserved */
} site;

static int64_t row_floats(void) {
    return (int64_t)SHAPE.q_heads * SHAPE.k_dim;
}

static int64_t row_bytes(void) {
    return row_floats() * cpa_dtype_bytes(SHAPE.dtype);
}

static int64_t all_rows(void) {
    return SEQUENCES * ROWS;
}

static void copy(const site *s, void *to, const void *from, int64_t bytes) {
    CU_ASSERT_EQUAL(s->device->table->copy(to, from, bytes, s->stream), CPA_OK);
}

/* Keeps the default stream of the device busy for some milliseconds: a process has other users of it, and nothing of a
 * context may be ordered by it. */
static void occupy_default_stream(site *s) {
#ifdef CPA_HAVE_CUDA
    enum { BUSY_BYTES = 64 << 20, TIMES = 400 };
    if (cpa_test_promises_bits()) return; /* on the host */
    CU_ASSERT_EQUAL_FATAL(cudaMalloc(&s->busy, BUSY_BYTES), cudaSuccess);
    for (int i = 0; i < TIMES; i++)
        CU_ASSERT_EQUAL(cudaMemsetAsync(s->busy, i, BUSY_BYTES, cudaStreamLegacy), cudaSuccess);
#else
    (void)s;
#endif
}

static void begin(site *s) {
    int64_t lengths[SEQUENCES];
    cpa_placement placements[SEQUENCES];
    *s = (site){.graph = NULL};
    cpa_test_device_open(1, &s->device, &s->stream);
    for (int i = 0; i < SEQUENCES; i++) {
        lengths[i] = MOST;
        placements[i] = (cpa_placement){CPA_SHARDED, i};
    }
    cpa_test_cache_init(&s->cache, SHAPE, 5, lengths, placements, SEQUENCES);
    for (int i = 0; i < SEQUENCES; i++) s->first_ranks[i] = s->cache.placements[i].rank;
    s->context = cpa_test_context(s->device, &SHAPE, 0);
    const cpa_context_limits limits = {sizeof limits,      SEQUENCES, MOST, s->cache.pool.view.num_blocks, 0,
                                       ROWS > 1 ? ROWS : 0};
    occupy_default_stream(s);
    CU_ASSERT_EQUAL(cpa_context_reserve(s->context, &limits), CPA_OK);
    s->stride = MOST / SHAPE.block_size + 3;
    const int64_t entries = SEQUENCES * s->stride * (int64_t)sizeof *s->tables;
    s->tables = cpa_test_poisoned(entries, 1);
    s->device_tables = cpa_test_upload(s->stream, s->tables, entries);
    s->device_lengths = cpa_test_upload(s->stream, s->lengths, sizeof s->lengths);
    s->device_ranks = cpa_test_upload(s->stream, s->first_ranks, sizeof s->first_ranks);
    const int32_t indptr[SEQUENCES + 1] = {0};
    s->device_indptr = cpa_test_upload(s->stream, indptr, sizeof indptr);
    char *nothing = cpa_test_poisoned(all_rows() * row_bytes(), 1);
    s->q = cpa_test_upload(s->stream, nothing, all_rows() * row_bytes());
    s->out = cpa_test_upload(s->stream, nothing, all_rows() * row_bytes());
    s->lse = cpa_test_upload(s->stream, nothing, all_rows() * SHAPE.q_heads * (int64_t)sizeof(float));
    s->bits =
        (cpa_key_bits){.bits = cpa_test_upload(s->stream, nothing, all_rows() * MOST_WORDS * (int64_t)sizeof(uint32_t)),
                       .row_word = cpa_test_upload(s->stream, nothing, all_rows() * (int64_t)sizeof(int64_t)),
                       .first = cpa_test_upload(s->stream, nothing, all_rows() * (int64_t)sizeof(int64_t)),
                       .width = cpa_test_upload(s->stream, nothing, all_rows() * (int64_t)sizeof(int32_t))};
    s->kv = cpa_kv_fixture_upload(&s->cache.pool, s->stream);
    free(nothing);
}

static void end(site *s) {
#ifdef CPA_HAVE_CUDA
    if (s->busy) CU_ASSERT_EQUAL(cudaFree(s->busy), cudaSuccess);
#endif
    cpa_context_destroy(s->context);
    cpa_kv_view_free(&s->kv, s->stream);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->bits.width);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->bits.first);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->bits.row_word);
    cpa_test_free(s->stream, (void *)(uintptr_t)s->bits.bits);
    cpa_test_free(s->stream, s->lse);
    cpa_test_free(s->stream, s->out);
    cpa_test_free(s->stream, s->q);
    cpa_test_free(s->stream, s->device_indptr);
    cpa_test_free(s->stream, s->device_ranks);
    cpa_test_free(s->stream, s->device_lengths);
    cpa_test_free(s->stream, s->device_tables);
    free(s->tables);
    cpa_test_cache_destroy(&s->cache);
    cpa_test_device_close(s->device, s->stream);
}

/* ---- a step ---- */

/* Lengths, and as many new tokens as follow from them: sometimes more than there are, or than are reserved. */
static void set_lengths(site *s, const int32_t *lengths) {
    memcpy(s->lengths, lengths, sizeof s->lengths);
    for (int i = 0; i < SEQUENCES; i++)
        s->counts[i] = lengths[i] == 96 ? ROWS + (ROWS > 1) : 1 + (lengths[i] + i) % ROWS;
}

static int is_refused(const site *s, int i) {
    return s->lengths[i] < 0 || s->lengths[i] > MOST || s->counts[i] > ROWS ||
           (s->lengths[i] > 0 && s->lengths[i] < s->counts[i]);
}

/* New tokens of a sequence that this rank owns; it puts them in the first of its rows of the sequence. */
static int own_rows(const site *s, int i) {
    if (s->lengths[i] <= 0 || is_refused(s, i)) return 0;
    const cpa_token_set own = cpa_tokens_on(s->cache.map, s->cache.placements[i], s->cache.rank);
    return (int)(cpa_tokens_before(s->cache.map, own, s->lengths[i]) -
                 cpa_tokens_before(s->cache.map, own, s->lengths[i] - s->counts[i]));
}

/* The chunks that a plan would have; which sequence each is of is its `sequence`. */
static int64_t chunks_of(const site *s, cpa_test_chunk *chunks) {
    int64_t n = 0;
    for (int i = 0; i < SEQUENCES; i++)
        if (s->lengths[i] > 0 && !is_refused(s, i))
            chunks[n++] = (cpa_test_chunk){i, s->lengths[i] - s->counts[i], s->counts[i], CPA_PASS_Q};
    return n;
}

/* Copies the rows of chunks, one behind the other, to the rows of their sequences, or back. */
static void spread_rows(const site *s, char *rows, char *packed, int64_t bytes, int back) {
    int64_t at = 0;
    for (int i = 0; i < SEQUENCES; i++) {
        const int64_t own = own_rows(s, i);
        char *first = rows + i * ROWS * bytes, *other = packed + at * bytes;
        if (own > 0) copy(s, back ? other : first, back ? first : other, own * bytes);
        at += own;
    }
}

/* Bits of every new token over those of its sequence, itself among them; every seventh row has none. */
static cpa_case_score score_of(const cpa_test_chunk *chunks, int64_t n) {
    cpa_case_score score = {.q_heads = SHAPE.q_heads};
    for (int64_t i = 0; i < n; i++) score.rows += chunks[i].count;
    if (score.rows > 0) CU_ASSERT_EQUAL_FATAL(cpa_case_score_add_bits(&score, 0, MOST, NULL), CPA_OK);
    cpa_test_score_trees(&score, chunks, n);
    cpa_test_score_unmap(&score);
    return score;
}

/* The bits of a step whose rows are those of its chunks, for rows as they are reserved. */
static void put_bits(const site *s, const cpa_case_score *score, const cpa_test_chunk *chunks, int64_t n) {
    int64_t row_word[SEQUENCES * MOST_ROWS], first[SEQUENCES * MOST_ROWS];
    int32_t width[SEQUENCES * MOST_ROWS];
    for (int64_t i = 0; i < all_rows(); i++) row_word[i] = 0x7fffffffffff, first[i] = -1, width[i] = -1;
    for (int64_t i = 0, row = 0; i < n; i++) {
        for (int64_t j = 0; j < chunks[i].count; j++, row++) {
            const int64_t to = chunks[i].sequence * ROWS + j;
            row_word[to] = score->row_word[row], first[to] = score->first[row], width[to] = score->width[row];
        }
    }
    CU_ASSERT_FATAL(score->n_words <= all_rows() * MOST_WORDS);
    if (score->n_words > 0)
        copy(s, (void *)(uintptr_t)s->bits.bits, score->bits, score->n_words * (int64_t)sizeof *score->bits);
    copy(s, (void *)(uintptr_t)s->bits.row_word, row_word, all_rows() * (int64_t)sizeof *row_word);
    copy(s, (void *)(uintptr_t)s->bits.first, first, all_rows() * (int64_t)sizeof *first);
    copy(s, (void *)(uintptr_t)s->bits.width, width, all_rows() * (int64_t)sizeof *width);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
}

static void put(site *s, const int32_t *lengths, const cpa_test_layer *layer) {
    char *nothing = cpa_test_poisoned(all_rows() * row_bytes(), 1);
    int32_t indptr[SEQUENCES + 1] = {100};
    set_lengths(s, lengths);
    for (int i = 0; i < SEQUENCES; i++) indptr[i + 1] = indptr[i] + s->counts[i];
    for (int64_t i = 0; i < SEQUENCES * s->stride; i++) s->tables[i] = HUGE_ENTRY;
    for (int i = 0; i < SEQUENCES; i++) {
        const cpa_token_set own = cpa_tokens_on(s->cache.map, s->cache.placements[i], s->cache.rank);
        const int64_t keys = is_refused(s, i) ? 0 : cpa_tokens_before(s->cache.map, own, lengths[i]);
        const int64_t used = (keys + SHAPE.block_size - 1) / SHAPE.block_size;
        memcpy(s->tables + i * s->stride, s->cache.tables[i], (size_t)used * sizeof *s->tables);
    }
    copy(s, s->device_lengths, s->lengths, sizeof s->lengths);
    copy(s, s->device_tables, s->tables, SEQUENCES * s->stride * (int64_t)sizeof *s->tables);
    copy(s, s->device_indptr, indptr, sizeof indptr);
    copy(s, s->q, nothing, all_rows() * row_bytes());
    copy(s, s->out, nothing, all_rows() * row_bytes());
    copy(s, s->lse, nothing, all_rows() * SHAPE.q_heads * (int64_t)sizeof(float));
    spread_rows(s, s->q, (char *)(uintptr_t)layer->args.q, row_bytes(), 0);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
    free(nothing);
}

static void update(site *s, cpa_stream *stream) {
    const cpa_attend_update_args args = {.size = sizeof args,
                                         .sequences = SEQUENCES,
                                         .lengths = s->device_lengths,
                                         .block_tables = s->device_tables,
                                         .table_stride = s->stride,
                                         .first_ranks = s->device_ranks,
                                         .qo_indptr = ROWS > 1 ? s->device_indptr : NULL};
    CU_ASSERT_EQUAL(cpa_context_update(s->context, &args, stream), CPA_OK);
}

static void attend(site *s, cpa_mask mask, cpa_stream *stream) {
    const cpa_key_selection selection = {.bits = &s->bits};
    const cpa_context_args args = {.size = sizeof args,
                                   .q = s->q,
                                   .kv = s->kv,
                                   .mask = mask,
                                   .out = s->out,
                                   .lse = s->lse,
                                   .selection = has_bits ? &selection : NULL};
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &args, stream), CPA_OK);
}

/* Rows that this rank has no token for are empty, or left alone on one rank, and refused ones NaN. */
static int64_t count_wrong_fillers(const site *s) {
    char *out = cpa_test_poisoned(all_rows() * row_bytes(), 1);
    float *lse = cpa_test_poisoned(all_rows() * SHAPE.q_heads, sizeof(float)), wide[1];
    int64_t wrong = 0;
    cpa_test_download(s->stream, out, s->out, all_rows() * row_bytes());
    cpa_test_download(s->stream, lse, s->lse, all_rows() * SHAPE.q_heads * (int64_t)sizeof(float));
    for (int64_t row = 0; row < all_rows(); row++) {
        const int i = (int)(row / ROWS), of_sequence = (int)(row % ROWS);
        const int is_left = cpa_test_ranks() == 1 && of_sequence >= s->counts[i]; /* as it was: NaN */
        const int is_nan = is_left || (is_refused(s, i) && of_sequence < s->counts[i]);
        if (of_sequence < own_rows(s, i)) continue;
        for (int64_t j = 0; j < row_floats(); j++) {
            cpa_widen(wide, out + row * row_bytes() + j * 2, SHAPE.dtype, 1);
            wrong += is_nan ? !isnan(wide[0]) : wide[0] != 0;
        }
        for (int h = 0; h < SHAPE.q_heads; h++) {
            const float of_row = lse[row * SHAPE.q_heads + h];
            wrong += is_nan ? !isnan(of_row) : of_row != -INFINITY;
        }
    }
    free(lse);
    free(out);
    return wrong;
}

/* The first sequence that is refused is told of, and why. */
static void check_refused(const site *s) {
    char says[64] = "";
    int i = 0;
    while (i < SEQUENCES && !is_refused(s, i)) i++;
    CU_ASSERT_EQUAL(cpa_context_refused(s->context), i < SEQUENCES ? CPA_INVALID : CPA_OK);
    if (i == SEQUENCES) return;
    snprintf(says, sizeof says, "the update refused sequence %d: it%s", i,
             s->counts[i] > ROWS ? " has more" : "s length");
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s->context), says));
}

/* Runs a step by `run`, and again as one that is planned: how many rows are wrong, and whether bits differ. */
static void run_step(site *s, const int32_t *lengths, cpa_mask mask, void (*run)(site *s, cpa_mask mask)) {
    cpa_test_chunk chunks[SEQUENCES];
    cpa_test_layer layer;
    cpa_test_result planned;
    set_lengths(s, lengths);
    const int64_t n = chunks_of(s, chunks);
    cpa_case_score score = {0};
    if (has_bits) {
        score = score_of(chunks, n);
        s->cache.score = &score;
        put_bits(s, &score, chunks, n);
    }
    cpa_test_layer_upload(&s->cache, mask, chunks, n, 1, s->stream, &layer);
    put(s, lengths, &layer);
    run(s, mask);
    CU_ASSERT_EQUAL(count_wrong_fillers(s), 0);
    check_refused(s);
    spread_rows(s, s->out, layer.args.out, row_bytes(), 1);
    spread_rows(s, (char *)s->lse, (char *)layer.args.lse, SHAPE.q_heads * (int64_t)sizeof(float), 1);
    cpa_test_layer_download(&layer, s->stream);
    CU_ASSERT_EQUAL(cpa_test_count_wrong(&s->cache, mask, chunks, n, &layer.result), 0);
    CU_ASSERT_EQUAL(cpa_test_plan(s->context, &s->cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(s->context, &s->cache, mask, chunks, n, s->stream, &planned), CPA_OK);
    CU_ASSERT_TRUE(cpa_test_same_bits_or_right(&s->cache, mask, chunks, n, &layer.result, &planned));
    cpa_test_result_destroy(&planned);
    cpa_test_result_destroy(&layer.result);
    s->cache.score = NULL;
    cpa_case_score_release(&score);
}

static void update_and_attend(site *s, cpa_mask mask) {
    update(s, s->stream);
    for (int l = 0; l < 2; l++) attend(s, mask, s->stream);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
}

static const int32_t STEPS[][SEQUENCES] = {{1, 33, 64, 65, 600, 100, 7},
                                           {600, 599, 300, 1, 2, 3, 512},
                                           {0, 32, 0, 601, -1, 96, 0},
                                           {0, 0, 0, 0, 0, 0, 0},
                                           {31, 32, 33, 34, 35, 36, 37}};

static void lengths_change_with(int32_t interleave) {
    site s;
    SHAPE.interleave = interleave;
    begin(&s);
    for (size_t i = 0; i < sizeof STEPS / sizeof *STEPS; i++) {
        run_step(&s, STEPS[i], CAUSAL, update_and_attend);
        run_step(&s, STEPS[i], WINDOW, update_and_attend);
    }
    end(&s);
}

/* Runs shorter than a block, and longer. */
static void lengths_change(void) {
    lengths_change_with(1);
    lengths_change_with(8);
    lengths_change_with(32);
}

/* Has a test run with more query heads a KV head than a CTA of decode has rows. */
static void with_wide_groups(void (*test)(void)) {
    const cpa_test_shape small = SHAPE;
    SHAPE.q_heads = 72;
    SHAPE.kv_heads = 1;
    test();
    SHAPE = small;
}

static void interleaved(void) {
    lengths_change_with(32);
}

static void a_token_a_rank(void) {
    lengths_change_with(1);
}

/* Several new tokens of a sequence, which lie on one rank or on several; and masks of bits over them. */
static void with_rows(int32_t rows, int bits, void (*test)(void)) {
    ROWS = rows;
    has_bits = bits;
    test();
    ROWS = 1;
    has_bits = 0;
}

static void several_rows(void) {
    with_rows(MOST_ROWS, 0, a_token_a_rank);
}

static void masks_of_one_row(void) {
    with_rows(1, 1, interleaved);
}

static void masks_of_several_rows(void) {
    with_rows(MOST_ROWS, 1, lengths_change);
}

static void wide_groups(void) {
    with_wide_groups(interleaved);
}

/* More rows than decode takes: those of a wide group are prefill tiles on devices. */
static void tiles_of_wide_groups(void) {
    if (cpa_test_promises_bits()) return; /* on the host */
    with_rows(MOST_ROWS, 0, wide_groups);
    with_rows(MOST_ROWS, 1, wide_groups);
}

/* An entry that is no block makes the row NaN at its owner, whichever rank it is of. */
static void a_bad_entry(void) {
    site s;
    cpa_test_chunk chunks[SEQUENCES];
    cpa_test_layer layer;
    float lse[SEQUENCES * 8];
    begin(&s);
    set_lengths(&s, STEPS[0]);
    cpa_test_layer_upload(&s.cache, CAUSAL, chunks, chunks_of(&s, chunks), 1, s.stream, &layer);
    put(&s, STEPS[0], &layer);
    cpa_test_layer_download(&layer, s.stream);
    cpa_test_result_destroy(&layer.result);
    s.tables[4 * s.stride] = (int32_t)s.cache.pool.view.num_blocks; /* rank 0's alone */
    if (s.cache.rank == 0) copy(&s, s.device_tables, s.tables, SEQUENCES * s.stride * (int64_t)sizeof *s.tables);
    update_and_attend(&s, CAUSAL);
    cpa_test_download(s.stream, lse, s.lse, sizeof lse);
    for (int i = 0; i < SEQUENCES; i++) {
        if (own_rows(&s, i)) CU_ASSERT_EQUAL(isnan(lse[i * 8]) != 0, i == 4);
    }
    end(&s);
}

#define REFUSE(s, says, call)                                                                                          \
    do {                                                                                                               \
        CU_ASSERT_EQUAL(call, CPA_INVALID);                                                                            \
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error((s)->context), says));                                         \
    } while (0)

static void misuse(void) {
    site s;
    cpa_context_limits limits = {sizeof limits, SEQUENCES, MOST, 10, 0, 0};
    cpa_attend_update_args args = {.size = sizeof args, .sequences = SEQUENCES + 1};
    begin(&s);
    REFUSE(&s, "of 8 sequences, expected 0..7", cpa_context_update(s.context, &args, s.stream));
    args.sequences = 1;
    REFUSE(&s, "lengths is NULL", cpa_context_update(s.context, &args, s.stream));
    REFUSE(&s, "stream of an update is NULL", cpa_context_update(s.context, &args, NULL));
    const int32_t indptr[2] = {0, 1};
    args.block_tables = indptr;
    args.kv_indptr = indptr;
    REFUSE(&s, "kv_indptr counts the pages of one rank", cpa_context_update(s.context, &args, s.stream));
    REFUSE(&s, "reserved already", cpa_context_reserve(s.context, &limits));
    CU_ASSERT_EQUAL(cpa_context_reserve(NULL, &limits), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_context_update(NULL, &args, s.stream), CPA_INVALID);
    cpa_context *other = cpa_test_context(s.device, &SHAPE, 0);
    s.context = (cpa_context_destroy(s.context), other);
    REFUSE(&s, "an update of what is not reserved", cpa_context_update(s.context, &args, s.stream));
    REFUSE(&s, "no step is reserved", cpa_context_refused(s.context));
    limits.tokens = 0;
    REFUSE(&s, "0 tokens a sequence", cpa_context_reserve(s.context, &limits));
    limits.tokens = MOST;
    limits.sequences = (int64_t)1 << 30;
    REFUSE(&s, "expected at most max_rows", cpa_context_reserve(s.context, &limits));
    limits.sequences = SEQUENCES;
    limits.rows = 1 << 24;
    REFUSE(&s, "16777216 rows a sequence", cpa_context_reserve(s.context, &limits));
    limits.rows = 0;
    limits.sequences = 1 + s.cache.rank; /* not the same on all ranks */
    if (cpa_test_ranks() > 1) REFUSE(&s, "sequences", cpa_context_reserve(s.context, &limits));
    limits.sequences = SEQUENCES;
    limits.num_blocks = s.cache.pool.view.num_blocks;
    CU_ASSERT_EQUAL(cpa_context_reserve(s.context, &limits), CPA_OK); /* none of them did any harm */
    run_step(&s, STEPS[0], CAUSAL, update_and_attend);
    end(&s);
}

/* ---- graphs of the caller's ---- */

#ifdef CPA_HAVE_CUDA
static void launch(site *s, cpa_mask mask) {
    (void)mask;
    CU_ASSERT_EQUAL(cudaGraphLaunch(s->graph, cpa_stream_native(s->stream)), cudaSuccess);
    CU_ASSERT_EQUAL(cpa_stream_sync(s->stream), CPA_OK);
}

/* A planned step is not captured; all ranks refuse it, and nothing comes of the capture. */
static void refuse_a_planned_step(site *s, cpa_stream *stream) {
    cpa_test_chunk chunks[SEQUENCES];
    cpa_test_layer layer;
    cudaGraph_t graph = NULL;
    size_t nodes = 1;
    set_lengths(s, STEPS[0]);
    const int64_t n = chunks_of(s, chunks);
    cpa_test_layer_upload(&s->cache, CAUSAL, chunks, n, 1, s->stream, &layer);
    CU_ASSERT_EQUAL(cpa_test_plan(s->context, &s->cache, chunks, n), CPA_OK);
    CU_ASSERT_EQUAL(cudaStreamBeginCapture(cpa_stream_native(stream), cudaStreamCaptureModeRelaxed), cudaSuccess);
    CU_ASSERT_EQUAL(cpa_context_attend(s->context, &layer.args, stream), CPA_UNSUPPORTED);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(s->context), "is not the reserved one"));
    CU_ASSERT_EQUAL(cudaStreamEndCapture(cpa_stream_native(stream), &graph), cudaSuccess);
    CU_ASSERT_EQUAL(cudaGraphGetNodes(graph, NULL, &nodes), cudaSuccess);
    CU_ASSERT_EQUAL(nodes, 0);
    if (graph) (void)cudaGraphDestroy(graph);
    cpa_test_layer_download(&layer, s->stream);
    cpa_test_result_destroy(&layer.result);
}

static void captured(void) {
    site s;
    cudaStream_t handle;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    cpa_stream *own, *wrapped = NULL;
    if (cpa_test_promises_bits()) return; /* on the host */
    begin(&s);
    CU_ASSERT_EQUAL(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), cudaSuccess);
    CU_ASSERT_EQUAL(cpa_stream_wrap(s.device, handle, &wrapped, NULL), CPA_OK);
    own = s.stream;
    s.stream = wrapped;
    run_step(&s, STEPS[0], CAUSAL, update_and_attend);
    run_step(&s, STEPS[1], CAUSAL, update_and_attend);
    CU_ASSERT_EQUAL(cudaStreamBeginCapture(handle, cudaStreamCaptureModeRelaxed), cudaSuccess);
    update(&s, wrapped);
    for (int l = 0; l < 3; l++) attend(&s, CAUSAL, wrapped);
    CU_ASSERT_EQUAL(cudaStreamEndCapture(handle, &graph), cudaSuccess);
    CU_ASSERT_EQUAL(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    s.graph = executable;
    for (size_t i = 0; i < 2 * sizeof STEPS / sizeof *STEPS; i++)
        run_step(&s, STEPS[i % (sizeof STEPS / sizeof *STEPS)], CAUSAL, launch);
    refuse_a_planned_step(&s, wrapped);
    refuse_a_planned_step(&s, own);
    (void)cudaGraphExecDestroy(executable);
    (void)cudaGraphDestroy(graph);
    cpa_stream_destroy(wrapped);
    (void)cudaStreamDestroy(handle);
    s.stream = own;
    end(&s);
}

static void several_rows_captured(void) {
    with_rows(MOST_ROWS, 0, captured);
}

static void masks_captured(void) {
    with_rows(1, 1, captured);
    with_rows(MOST_ROWS, 1, captured);
}

static void wide_groups_captured(void) {
    with_wide_groups(captured);
}
#endif

static const cpa_test TESTS[] = {
    {"lengths and tables change from step to step", lengths_change},
    {"wide groups", wide_groups},
    {"several new tokens of a sequence", several_rows},
    {"masks of one new token", masks_of_one_row},
    {"masks of drafts", masks_of_several_rows},
    {"prefill tiles of wide groups", tiles_of_wide_groups},
    {"an entry that is no block", a_bad_entry},
    {"misuse", misuse},
#ifdef CPA_HAVE_CUDA
    {"graphs of the caller's", captured},
    {"wide groups in graphs of the caller's", wide_groups_captured},
    {"several new tokens in graphs of the caller's", several_rows_captured},
    {"masks in graphs of the caller's", masks_captured},
#endif
};

CPA_MPI_DEVICE_TEST_MAIN("the reserved step of a context", TESTS)
