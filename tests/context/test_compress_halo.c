/* Entries of a compressor with overlap over sequences that are sharded over the ranks, in steps that end anywhere: byte
 * for byte those that one rank makes of whole sequences, which every rank does for itself. */
#include "src/context/compress_halo.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kv_view.h"
#include "src/context/context.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { HEAD = 128, WIDTH = 2 * HEAD, RATIO = 4, RUN = 16, LENGTH = 150, SEQUENCES = 2, ENTRIES = LENGTH / RATIO };
enum { STATE_BLOCK = 8, STATE_BLOCKS = LENGTH / STATE_BLOCK + 1, MOST = SEQUENCES * LENGTH, ROPE = 64 };
enum { CACHE_BLOCK = 64, MOST_HALOS = SEQUENCES * (LENGTH / RUN + 1) };
enum { HALO = RATIO * 2 * HEAD }; /* floats */

static const cpa_placement PLACEMENTS[SEQUENCES] = {{CPA_SHARDED, 1}, {CPA_SHARDED, 0}};
/* Ends of steps: of prefill, some on runs and some not, and of decode, over the end of a run. */
static const int64_t STEPS[] = {0, 37, 48, 111, 112, 113, 114, 115, 116, 117, 145, LENGTH};
enum { N_STEPS = sizeof STEPS / sizeof *STEPS - 1 };

/* One rank of a map: its state, its cache and the halos it has received. */
typedef struct site {
    cpa_owner_map map;
    int32_t rank;
    cpa_stream *stream;
    cpa_compress_state state;
    cpa_kv_view kv;
    int64_t kv_bytes;
    int32_t *tables; /* device: blocks of a sequence, then of the next */
    float *table, *ape, *weight, *halo, *packed;
    int32_t halo_of[SEQUENCES][LENGTH / RUN + 2]; /* of each run; -1: none has come */
    int64_t n_halos;
} site;

static float noise(int64_t sequence, int64_t position, int64_t d) {
    const uint64_t x = (uint64_t)((sequence * 977 + position) * 7919 + d * 104729 + (d * position) % 31) * 2654435761u;
    return (x >> 13) % 31 == 4 ? 20 : (float)((x >> 20) % 4001) / 1000 - 2;
}

static cpa_placement placement_of(const site *s, int64_t sequence) {
    cpa_placement placement = PLACEMENTS[sequence];
    placement.rank %= s->map.cp_size;
    return placement;
}
static int owns(const site *s, int64_t sequence, int64_t position) {
    return cpa_owner_rank(s->map, placement_of(s, sequence), position) == s->rank;
}
static int64_t index_of(const site *s, int64_t sequence, int64_t position) {
    return cpa_tokens_before(s->map, cpa_tokens_on(s->map, placement_of(s, sequence), s->rank), position);
}
/* Blocks of sequences lie in turn. */
static int64_t state_slot(const site *s, int64_t sequence, int64_t position) {
    const int64_t index = index_of(s, sequence, position);
    return (index / STATE_BLOCK * SEQUENCES + sequence) * STATE_BLOCK + index % STATE_BLOCK;
}

static void *poisoned(cpa_stream *stream, int64_t bytes) {
    char *poison = cpa_test_poisoned(bytes / 4, 4);
    void *memory = cpa_test_upload(stream, poison, bytes);
    free(poison);
    return memory;
}

static void open_site(site *s, cpa_owner_map map, int32_t rank, cpa_stream *stream) {
    const cpa_rope_config config = {.size = sizeof config, .dim = ROPE, .theta = 1e4, .max_position = LENGTH};
    static float table[LENGTH * ROPE], ape[RATIO * WIDTH], weight[HEAD];
    int32_t tables[SEQUENCES * STATE_BLOCKS];
    *s = (site){.map = map, .rank = rank, .stream = stream};
    s->state = (cpa_compress_state){
        .num_blocks = SEQUENCES * STATE_BLOCKS, .block_size = STATE_BLOCK, .ratio = RATIO, .overlap = 1, .head = HEAD};
    s->state.rows = poisoned(stream, SEQUENCES * STATE_BLOCKS * STATE_BLOCK * 2 * WIDTH * (int64_t)sizeof(float));
    for (int i = 0; i < SEQUENCES * STATE_BLOCKS; i++) tables[i] = i % STATE_BLOCKS * SEQUENCES + i / STATE_BLOCKS;
    for (int i = 0; i < RATIO * WIDTH; i++) ape[i] = noise(5, 0, i);
    for (int i = 0; i < HEAD; i++) weight[i] = 1 + noise(6, 0, i) / 8;
    CU_ASSERT_EQUAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    s->tables = cpa_test_upload(stream, tables, sizeof tables);
    s->table = cpa_test_upload(stream, table, sizeof table);
    s->ape = cpa_test_upload(stream, ape, sizeof ape);
    s->weight = cpa_test_upload(stream, weight, sizeof weight);
    s->halo = poisoned(stream, MOST_HALOS * HALO * (int64_t)sizeof(float));
    s->packed = poisoned(stream, MOST_HALOS * HALO * (int64_t)sizeof(float));
    s->kv = (cpa_kv_view){.dtype = CPA_FP8_E4M3,
                          .block_size = CACHE_BLOCK,
                          .num_blocks = SEQUENCES,
                          .kv_heads = 1,
                          .k_dim = HEAD,
                          .v_dim = HEAD,
                          .v_in_k = 1};
    s->kv_bytes = SEQUENCES * cpa_kv_block_bytes(CPA_FP8_E4M3, CPA_KEYS, 0, CACHE_BLOCK, 1, HEAD);
    s->kv.k = poisoned(stream, s->kv_bytes);
    memset(s->halo_of, -1, sizeof s->halo_of);
}

static void close_site(site *s) {
    void *const memory[] = {s->state.rows, s->tables, s->table, s->ape, s->weight, s->halo, s->packed, s->kv.k};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(s->stream, memory[i]);
}

/* The arguments of the rank's tokens of a step, on the device. */
typedef struct tokens {
    int64_t n;
    float *rows;                                        /* [n, kv | score] */
    int64_t *positions, *indices, *state_slots, *slots; /* [n] each */
    int32_t *sequences, *halo_slots;
} tokens;

static tokens take_tokens(const site *s, int64_t start, int64_t end) {
    static float rows[(MOST + 1) * 2 * WIDTH]; /* a rank may have none: what is uploaded is one more */
    static int64_t numbers[4][MOST + 1];
    static int32_t sequences[MOST + 1], halo_slots[MOST + 1];
    int64_t n = 0;
    for (int64_t q = 0; q < SEQUENCES; q++) {
        for (int64_t p = start; p < end; p++) {
            if (!owns(s, q, p)) continue;
            for (int64_t d = 0; d < 2 * WIDTH; d++) rows[n * 2 * WIDTH + d] = noise(q, p, d);
            numbers[0][n] = p;
            numbers[1][n] = index_of(s, q, p);
            numbers[2][n] = state_slot(s, q, p);
            numbers[3][n] = q * CACHE_BLOCK + p / RATIO;
            sequences[n] = (int32_t)q;
            halo_slots[n++] = p % RUN < RATIO ? s->halo_of[q][p / RUN] : -1;
        }
    }
    tokens t = {.n = n, .rows = cpa_test_upload(s->stream, rows, (n + 1) * 2 * WIDTH * (int64_t)sizeof *rows)};
    int64_t **const arrays[] = {&t.positions, &t.indices, &t.state_slots, &t.slots};
    for (int i = 0; i < 4; i++)
        *arrays[i] = cpa_test_upload(s->stream, numbers[i], (n + 1) * (int64_t)sizeof **numbers);
    t.sequences = cpa_test_upload(s->stream, sequences, (n + 1) * (int64_t)sizeof *sequences);
    t.halo_slots = cpa_test_upload(s->stream, halo_slots, (n + 1) * (int64_t)sizeof *halo_slots);
    return t;
}

static void free_tokens(const site *s, tokens *t) {
    void *const memory[] = {t->rows, t->positions, t->indices, t->state_slots, t->slots, t->sequences, t->halo_slots};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(s->stream, memory[i]);
}

static void write_state(const site *s, const tokens *t) {
    const cpa_compress_state_write_args args = {.size = sizeof args,
                                                .tokens = t->n,
                                                .state = s->state,
                                                .kv = t->rows,
                                                .score = t->rows + WIDTH,
                                                .kv_stride = 2 * WIDTH,
                                                .score_stride = 2 * WIDTH,
                                                .ape = s->ape,
                                                .positions = t->positions,
                                                .slots = t->state_slots};
    CU_ASSERT_EQUAL(cpa_compress_state_write(&args, s->stream), CPA_OK);
}

static void write_entries(const site *s, const tokens *t) {
    const cpa_rope rope = {
        .table = s->table, .max_position = LENGTH, .dim = ROPE, .first = HEAD - ROPE, .interleaved = 1};
    const cpa_compress_write_args args = {.size = sizeof args,
                                          .tokens = t->n,
                                          .state = s->state,
                                          .positions = t->positions,
                                          .indices = t->indices,
                                          .sequences = t->sequences,
                                          .tables = s->tables,
                                          .n_sequences = SEQUENCES,
                                          .table_stride = STATE_BLOCKS,
                                          .halo = s->halo,
                                          .n_halos = MOST_HALOS,
                                          .halo_slots = t->halo_slots,
                                          .weight = s->weight,
                                          .eps = 1e-6f,
                                          .rope = rope,
                                          .slots = t->slots,
                                          .kv = s->kv};
    if (cpa_compress_write(&args, s->stream) != CPA_OK) CU_FAIL(cpa_stream_error(s->stream));
}

/* Sends the halos of a step, and notes where those that came are. */
static void exchange(site *s, cpa_context *context, int64_t start, int64_t end) {
    cpa_context_chunk chunks[SEQUENCES] = {{0}};
    int64_t slots[(MOST_HALOS + 1) * RATIO] = {0};
    cpa_halo_plan plan;
    for (int64_t q = 0; q < SEQUENCES; q++)
        chunks[q] = (cpa_context_chunk){.start = start, .count = end - start, .placement = placement_of(s, q)};
    CU_ASSERT_EQUAL_FATAL(cpa_halo_plan_make(&plan, s->map, s->rank, RATIO, chunks, SEQUENCES, NULL), CPA_OK);
    for (int64_t i = 0; i < plan.n_sent * RATIO; i++) {
        const cpa_halo_boundary at = plan.sent[i / RATIO];
        slots[i] = state_slot(s, at.chunk, at.position - RATIO + i % RATIO);
    }
    for (int64_t i = 0; i < plan.n_received; i++)
        s->halo_of[plan.received[i].chunk][plan.received[i].position / RUN] = (int32_t)(s->n_halos + i);
    int64_t *device_slots = cpa_test_upload(s->stream, slots, (plan.n_sent + 1) * RATIO * (int64_t)sizeof *slots);
    const cpa_halo_args args = {s->state, device_slots, s->packed, s->halo + s->n_halos * HALO};
    CU_ASSERT_EQUAL(cpa_context_exchange_halos(context, &plan, &args, s->stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(context, s->stream), CPA_OK);
    s->n_halos += plan.n_received;
    cpa_test_free(s->stream, device_slots);
    cpa_halo_plan_free(&plan);
}

static char *entries_of(const site *s) {
    char *bytes = malloc((size_t)s->kv_bytes);
    cpa_test_download(s->stream, bytes, s->kv.k, s->kv_bytes);
    return bytes;
}

/* Whether an entry has the same codes and scale in both. */
static int is_same(const site *s, const char *a, const char *b, int64_t sequence, int64_t entry) {
    const int64_t block = sequence * s->kv_bytes / SEQUENCES, codes = block + entry * HEAD;
    const int64_t scale = block + CACHE_BLOCK * HEAD + entry * 4;
    return memcmp(a + codes, b + codes, HEAD) == 0 && memcmp(a + scale, b + scale, 4) == 0;
}

static void entries_are_those_of_one_rank(void) {
    static const cpa_test_shape shape = {
        .q_heads = 1, .kv_heads = 1, .k_dim = 8, .v_dim = 8, .block_size = 8, .interleave = RUN, .dtype = CPA_F32};
    cpa_device *device;
    cpa_stream *stream;
    site one, mine;
    cpa_test_device_open(2, &device, &stream);
    cpa_context *context = cpa_test_context(device, &shape, 0);
    open_site(&one, (cpa_owner_map){1, RUN}, 0, stream);
    open_site(&mine, (cpa_owner_map){cpa_test_ranks(), RUN}, cpa_test_rank(), stream);
    tokens all = take_tokens(&one, 0, LENGTH);
    write_state(&one, &all);
    write_entries(&one, &all);
    for (int step = 0; step < N_STEPS; step++) {
        tokens t = take_tokens(&mine, STEPS[step], STEPS[step + 1]);
        write_state(&mine, &t);
        exchange(&mine, context, STEPS[step], STEPS[step + 1]);
        free_tokens(&mine, &t);
        t = take_tokens(&mine, STEPS[step], STEPS[step + 1]); /* which know the halos that came */
        write_entries(&mine, &t);
        free_tokens(&mine, &t);
    }
    char *want = entries_of(&one), *got = entries_of(&mine), *none = cpa_test_poisoned(one.kv_bytes / 4, 4);
    for (int64_t q = 0; q < SEQUENCES; q++)
        for (int64_t e = 0; e < ENTRIES; e++)
            CU_ASSERT(is_same(&one, got, owns(&mine, q, e * RATIO) ? want : none, q, e));
    cpa_context_stats stats;
    int64_t sent = 0;
    for (int64_t q = 0; q < SEQUENCES; q++)
        for (int64_t p = RUN; p <= LENGTH; p += RUN) sent += mine.map.cp_size > 1 && owns(&mine, q, p - 1);
    CU_ASSERT_EQUAL(cpa_context_get_stats(context, &stats, sizeof stats), CPA_OK);
    CU_ASSERT_EQUAL(stats.row_bytes_sent, sent * HALO * (int64_t)sizeof(float));
    free(none);
    free(got);
    free(want);
    free_tokens(&one, &all);
    close_site(&mine);
    close_site(&one);
    cpa_context_destroy(context);
    cpa_test_device_close(device, stream);
}

static void runs_that_are_no_whole_entries_are_refused(void) {
    cpa_halo_plan plan;
    cpa_error err = {0};
    CU_ASSERT_EQUAL(cpa_halo_plan_make(&plan, (cpa_owner_map){2, 18}, 0, 4, NULL, 0, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "the interleave is 18 and an entry has 4 tokens, expected a multiple"));
    CU_ASSERT_EQUAL(cpa_halo_plan_make(&plan, (cpa_owner_map){2, 16}, 2, 4, NULL, 0, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "rank is 2 of 2"));
}

static const cpa_test TESTS[] = {
    {"entries are those of one rank", entries_are_those_of_one_rank},
    {"runs that are no whole entries are refused", runs_that_are_no_whole_entries_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("halos of a compressor", TESTS)
