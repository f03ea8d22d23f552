/* Operators of compressed entries, byte for byte against an fp32 oracle that does what cpattn/compress.h says in its
 * order, over whole sequences: it knows no blocks, states or halos. The grid of positions is that of vLLM's tests of
 * DeepSeek-V4's compressor. What no call may touch is poison and stays. */
#include <cpattn/compress.h>
#include <cpattn/owner_map.h>

#include <stdlib.h>

#include "kernels/kv_view.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/entry_oracle.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_SEQUENCES = 4, POSITIONS = 1200, ROPE = 64, STATE_BLOCK = 16, CACHE_BLOCK = 16, UNUSED = 2147480000 };
static const float EPS = 1e-6f;

static cpa_device *device;
static cpa_stream *stream;
static float *table, *device_table; /* [POSITIONS, ROPE] */

static void open_device(void) {
    const cpa_rope_config config = {.size = sizeof config, .dim = ROPE, .theta = 160000, .max_position = POSITIONS};
    cpa_test_device_open(2, &device, &stream);
    table = malloc(sizeof *table * POSITIONS * ROPE);
    CU_ASSERT_EQUAL_FATAL(cpa_rope_table(&config, table, NULL), CPA_OK);
    device_table = cpa_test_upload(stream, table, POSITIONS * ROPE * (int64_t)sizeof *table);
}

static void close_device(void) {
    cpa_test_free(stream, device_table);
    free(table);
    cpa_test_device_close(device, stream);
}

static cpa_rope rope_of(int32_t head) {
    return (cpa_rope){
        .table = device_table, .max_position = POSITIONS, .dim = ROPE, .first = head - ROPE, .interleaved = 1};
}

/* Peaky: sizes differ by channel and token, scores have a winner here and there, others are far below. */
static float noise(int64_t i, int64_t seed) {
    uint64_t x = (uint64_t)(i * 2654435761 + seed * 40503 + 12345);
    x ^= x >> 29, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 32;
    const float size = x % 29 == 3 ? 30 : 1;
    return size * ((float)(int64_t)(x >> 40 & 0xffff) / 32768 - 1);
}

/* ---- whole sequences and what they become ---- */

typedef struct form {
    int32_t ratio, overlap, head;
    cpa_dtype dtype;
    float scale;
} form;

/* Of one sequence: [length, width] each. */
typedef struct sequence {
    int64_t length;
    float *kv, *score; /* score: before APE */
} sequence;

typedef struct model {
    form of;
    int32_t width, n;
    sequence list[MOST_SEQUENCES];
    float *ape, *weight;
} model;

static void make_model(model *m, form of, const int64_t *lengths, int32_t n) {
    *m = (model){.of = of, .width = of.head * (1 + of.overlap), .n = n};
    m->ape = malloc(sizeof *m->ape * (size_t)(of.ratio * m->width));
    m->weight = malloc(sizeof *m->weight * (size_t)of.head);
    for (int64_t i = 0; i < (int64_t)of.ratio * m->width; i++) m->ape[i] = noise(i, 7);
    for (int64_t i = 0; i < of.head; i++) m->weight[i] = 1 + noise(i, 9) / 4;
    for (int32_t s = 0; s < n; s++) {
        sequence *q = &m->list[s];
        const size_t elements = (size_t)(lengths[s] * m->width);
        *q = (sequence){lengths[s], malloc(sizeof(float) * elements), malloc(sizeof(float) * elements)};
        for (size_t i = 0; i < elements; i++)
            q->kv[i] = noise((int64_t)i, 20 + s), q->score[i] = noise((int64_t)i, 60 + s);
    }
}

static void free_model(model *m) {
    for (int32_t s = 0; s < m->n; s++) free(m->list[s].kv), free(m->list[s].score);
    free(m->ape);
    free(m->weight);
}

/* The entry that the token at a position ends. */
static void oracle_entry(const model *m, int32_t s, int64_t position, float *x) {
    const int32_t ratio = m->of.ratio, head = m->of.head, rows = ratio * (1 + m->of.overlap);
    for (int32_t d = 0; d < head; d++) {
        float score[256], kv[256], most = -INFINITY, total[4] = {0}, sum[4] = {0};
        for (int32_t w = 0; w < rows; w++) {
            const int64_t at = position - rows + 1 + w;
            const int32_t column = d + (m->of.overlap && w >= ratio ? head : 0);
            if (at < 0) continue;
            kv[w] = m->list[s].kv[at * m->width + column];
            score[w] = m->list[s].score[at * m->width + column] + m->ape[at % ratio * m->width + column];
            most = score[w] > most ? score[w] : most;
        }
        for (int32_t w = 0; w < rows; w++)
            if (position - rows + 1 + w >= 0) total[w % 4] += cpa_test_entry_exp(score[w] - most);
        const float all = (total[0] + total[1]) + (total[2] + total[3]);
        for (int32_t w = 0; w < rows; w++) {
            if (position - rows + 1 + w < 0) continue;
            const float weight = cpa_test_entry_exp(score[w] - most) / all, product = weight * kv[w];
            sum[w % 4] += product;
        }
        x[d] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    cpa_test_entry_norm(x, head, EPS);
    for (int32_t d = 0; d < head; d++) x[d] *= m->weight[d];
    cpa_test_entry_turn(x, head, table, POSITIONS, ROPE, head - ROPE, position / ratio * ratio, 1);
}

/* The same in float64, as what is the softmax: no more than some units in the last place away. */
static int is_the_softmax(const model *m, int32_t s, int64_t position, const float *x) {
    const int32_t ratio = m->of.ratio, head = m->of.head, rows = ratio * (1 + m->of.overlap);
    double c[512], squares = 0;
    for (int32_t d = 0; d < head; d++) {
        double total = 0, sum = 0, most = -INFINITY;
        for (int pass = 0; pass < 2; pass++) {
            for (int32_t w = 0; w < rows; w++) {
                const int64_t at = position - rows + 1 + w;
                const int32_t column = d + (m->of.overlap && w >= ratio ? head : 0);
                if (at < 0) continue;
                const double score =
                    (double)m->list[s].score[at * m->width + column] + (double)m->ape[at % ratio * m->width + column];
                if (pass == 0) most = fmax(most, score);
                if (pass == 1)
                    total += exp(score - most),
                        sum += exp(score - most) * (double)m->list[s].kv[at * m->width + column];
            }
        }
        c[d] = sum / total;
        squares += c[d] * c[d];
    }
    for (int32_t d = 0; d < head - ROPE; d++) {
        const double y = c[d] / sqrt(squares / head + (double)EPS) * (double)m->weight[d];
        if (!(fabs(y - (double)x[d]) <= 1e-4 * (1 + fabs(y)))) return 0;
    }
    return 1;
}

/* An entry to its place in a cache in host memory. */
static void oracle_store(const cpa_kv_view *view, int64_t slot, const float *x) {
    const cpa_kv_view kv = cpa_kv_view_resolve(*view);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    char *block = pool.memory + slot / kv.block_size * pool.block_stride;
    uint8_t *row = (uint8_t *)block + slot % kv.block_size * pool.token_stride;
    char *words = block + pool.scales_at + slot % kv.block_size * pool.scale_bytes;
    float rounded[512];
    for (int32_t d = 0; d < kv.k_dim; d++) rounded[d] = cpa_reference_round(x[d], CPA_BF16);
    if (kv.dtype == CPA_FP8_T64) {
        cpa_test_t64_row(x, row, (uint8_t *)words);
    } else if (kv.dtype == CPA_BF16) {
        cpa_narrow(row, rounded, CPA_BF16, kv.k_dim);
    } else {
        const float scale = kv.k_scale != 0 ? kv.k_scale : ldexpf(1, cpa_test_power(rounded, kv.k_dim, 1e-4f));
        for (int32_t d = 0; d < kv.k_dim; d++) row[d] = cpa_test_nearest_code(rounded[d] / scale);
        if (kv.k_scale == 0) memcpy(words, &scale, sizeof scale);
    }
}

/* ---- one rank ---- */

typedef struct token {
    int32_t sequence;
    int64_t position;
    int32_t is_padding;
} token;

/* A rank's state and cache, which is told of tokens in calls; on the host what the cache has to hold. */
typedef struct site {
    const model *m;
    cpa_owner_map map;
    int32_t rank;
    cpa_compress_state state;
    int32_t *tables, *device_tables; /* [MOST_SEQUENCES, stride] */
    int64_t stride, state_bytes;
    cpa_kv_fixture want;
    cpa_kv_view view; /* on the device */
    float *halo;
    int64_t n_halos;
} site;

static int64_t index_of(const site *s, int64_t position) {
    const int64_t run = s->map.interleave, all = run * s->map.cp_size;
    return position / all * run + position % run;
}
static int32_t owner_of(const site *s, int64_t position) {
    return (int32_t)(position / s->map.interleave % s->map.cp_size);
}

static void open_site(site *s, const model *m, cpa_owner_map map, int32_t rank) {
    const int64_t blocks = MOST_SEQUENCES * (POSITIONS / STATE_BLOCK) + 3;
    *s = (site){.m = m, .map = map, .rank = rank, .stride = POSITIONS / STATE_BLOCK + 2};
    s->state = (cpa_compress_state){.num_blocks = blocks,
                                    .block_size = STATE_BLOCK,
                                    .ratio = m->of.ratio,
                                    .overlap = m->of.overlap,
                                    .head = m->of.head};
    s->state_bytes = blocks * STATE_BLOCK * 2 * m->width * (int64_t)sizeof(float);
    char *poison = cpa_test_poisoned(s->state_bytes / 4, 4);
    s->state.rows = cpa_test_upload(stream, poison, s->state_bytes);
    free(poison);
    s->tables = malloc(sizeof *s->tables * (size_t)(MOST_SEQUENCES * s->stride));
    for (int64_t i = 0; i < MOST_SEQUENCES * s->stride; i++) s->tables[i] = UNUSED;
    for (int32_t q = 0; q < m->n; q++)
        for (int64_t b = 0; b * STATE_BLOCK < m->list[q].length; b++)
            s->tables[q * s->stride + b] = (int32_t)((b * MOST_SEQUENCES + q) * 7 % (blocks - 3) + 2);
    s->device_tables = cpa_test_upload(stream, s->tables, MOST_SEQUENCES * s->stride * (int64_t)sizeof *s->tables);
    cpa_kv_fixture_init_view(&s->want,
                             (cpa_kv_view){.dtype = m->of.dtype,
                                           .block_size = CACHE_BLOCK,
                                           .num_blocks = MOST_SEQUENCES * (POSITIONS / CACHE_BLOCK / m->of.ratio + 2),
                                           .kv_heads = 1,
                                           .k_dim = m->of.head,
                                           .v_dim = m->of.head,
                                           .k_scale = m->of.scale,
                                           .v_in_k = 1},
                             0);
    s->view = cpa_kv_fixture_upload(&s->want, stream);
}

static void close_site(site *s) {
    cpa_kv_view_free(&s->view, stream);
    cpa_kv_fixture_destroy(&s->want);
    cpa_test_free(stream, s->halo);
    cpa_test_free(stream, s->device_tables);
    cpa_test_free(stream, s->state.rows);
    free(s->tables);
}

static int64_t slot_of(const site *s, const token *t) {
    const int64_t entry = t->position / s->m->of.ratio;
    return t->sequence * (s->view.num_blocks / MOST_SEQUENCES) * CACHE_BLOCK + entry;
}

static int64_t state_slot(const site *s, const token *t) {
    const int64_t index = index_of(s, t->position);
    return (int64_t)s->tables[t->sequence * s->stride + index / STATE_BLOCK] * STATE_BLOCK + index % STATE_BLOCK;
}

/* Both calls for n tokens, whose rows lie in one product [kv | score | pad]. halo_slots: NULL, or of each. */
static void run_tokens(site *s, const token *tokens, int64_t n, const int32_t *halo_slots, int writes_state,
                       int writes_entries) {
    const model *m = s->m;
    const int64_t row = 2 * m->width + 4;
    float *rows = malloc(sizeof *rows * (size_t)(n * row + 1));
    int64_t *positions = malloc(sizeof *positions * (size_t)n * 4), *indices = positions + n, *state = indices + n,
            *slots = state + n;
    int32_t *sequences = malloc(sizeof *sequences * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const token *t = &tokens[i];
        const sequence *q = &m->list[t->sequence];
        sequences[i] = t->is_padding ? UNUSED : t->sequence;
        positions[i] = t->position;
        indices[i] = index_of(s, t->position);
        state[i] = t->is_padding ? -1 : state_slot(s, t);
        slots[i] = t->is_padding ? -7 : (t->position + 1) % m->of.ratio ? UNUSED * (int64_t)9 : slot_of(s, t);
        for (int64_t d = 0; d < row; d++) rows[i * row + d] = NAN;
        if (t->is_padding) continue;
        memcpy(rows + i * row, q->kv + t->position * m->width, sizeof *rows * (size_t)m->width);
        memcpy(rows + i * row + m->width, q->score + t->position * m->width, sizeof *rows * (size_t)m->width);
    }
    float *device_rows = cpa_test_upload(stream, rows, n * row * (int64_t)sizeof *rows);
    int64_t *device_positions = cpa_test_upload(stream, positions, n * 4 * (int64_t)sizeof *positions);
    int32_t *device_sequences = cpa_test_upload(stream, sequences, n * (int64_t)sizeof *sequences);
    int32_t *device_halos = halo_slots ? cpa_test_upload(stream, halo_slots, n * (int64_t)sizeof *halo_slots) : NULL;
    float *ape = cpa_test_upload(stream, m->ape, m->of.ratio * m->width * (int64_t)sizeof *ape);
    float *weight = cpa_test_upload(stream, m->weight, m->of.head * (int64_t)sizeof *weight);
    const cpa_compress_state_write_args write = {.size = sizeof write,
                                                 .tokens = n,
                                                 .state = s->state,
                                                 .kv = device_rows,
                                                 .score = device_rows + m->width,
                                                 .kv_stride = row,
                                                 .score_stride = row,
                                                 .ape = ape,
                                                 .positions = device_positions,
                                                 .slots = device_positions + 2 * n};
    const cpa_compress_write_args compress = {.size = sizeof compress,
                                              .tokens = n,
                                              .state = s->state,
                                              .positions = device_positions,
                                              .indices = s->map.cp_size > 1 ? device_positions + n : NULL,
                                              .sequences = device_sequences,
                                              .tables = s->device_tables,
                                              .n_sequences = MOST_SEQUENCES,
                                              .table_stride = s->stride,
                                              .halo = s->halo,
                                              .n_halos = s->n_halos,
                                              .halo_slots = device_halos,
                                              .weight = weight,
                                              .eps = EPS,
                                              .rope = rope_of(m->of.head),
                                              .slots = device_positions + 3 * n,
                                              .kv = s->view};
    if (writes_state) CU_ASSERT_EQUAL(cpa_compress_state_write(&write, stream), CPA_OK);
    if (writes_entries && cpa_compress_write(&compress, stream) != CPA_OK) CU_FAIL(cpa_stream_error(stream));
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    void *const memory[] = {device_rows, device_positions, device_sequences, device_halos, ape, weight};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    free(sequences);
    free(positions);
    free(rows);
}

/* What the cache has to hold once these tokens were compressed. */
static void expect_entries(site *s, const token *tokens, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float x[512];
        if (tokens[i].is_padding || (tokens[i].position + 1) % s->m->of.ratio) continue;
        oracle_entry(s->m, tokens[i].sequence, tokens[i].position, x);
        if (i % 16 == 0 || tokens[i].position < 300)
            CU_ASSERT(is_the_softmax(s->m, tokens[i].sequence, tokens[i].position, x));
        oracle_store(&s->want.view, slot_of(s, &tokens[i]), x);
    }
}

static int64_t wrong_bytes(site *s) {
    cpa_kv_fixture got;
    int64_t wrong = 0;
    cpa_kv_fixture_init_view(&got, s->want.view, 0);
    cpa_kv_fixture_download(&got, &s->view, stream);
    for (int64_t b = 0; b < got.k_bytes; b++) wrong += ((char *)got.view.k)[b] != ((char *)s->want.view.k)[b];
    cpa_kv_fixture_destroy(&got);
    return wrong;
}

static const form FORMS[] = {{4, 1, 512, CPA_FP8_T64, 0},        {128, 0, 512, CPA_FP8_T64, 0},
                             {4, 1, 128, CPA_FP8_E4M3, 0},       {4, 1, 512, CPA_BF16, 0},
                             {128, 0, 512, CPA_FP8_E4M3, 0.25f}, {3, 0, 256, CPA_BF16, 0},
                             {1, 0, 128, CPA_FP8_E4M3, 0},       {128, 1, 512, CPA_FP8_T64, 0}};
enum { N_FORMS = sizeof FORMS / sizeof *FORMS };

/* The tokens of sequences from `first` on, `chunk` at a time, with tokens that are padding behind. */
static void prefill(form of, const int64_t *lengths, int32_t n, int64_t chunk, int64_t padding) {
    model m;
    site s;
    make_model(&m, of, lengths, n);
    open_site(&s, &m, (cpa_owner_map){1, 128}, 0);
    int64_t longest = 0;
    for (int32_t q = 0; q < n; q++) longest = lengths[q] > longest ? lengths[q] : longest;
    token *tokens = malloc(sizeof *tokens * (size_t)(n * chunk + padding));
    for (int64_t first = 0; first < longest; first += chunk) {
        int64_t count = 0;
        for (int32_t q = 0; q < n; q++)
            for (int64_t p = first; p < first + chunk && p < lengths[q]; p++) tokens[count++] = (token){q, p, 0};
        expect_entries(&s, tokens, count);
        for (int64_t i = 0; i < padding; i++) tokens[count++] = (token){0, of.ratio - 1, 1};
        run_tokens(&s, tokens, count, NULL, 1, 1);
    }
    CU_ASSERT_EQUAL(wrong_bytes(&s), 0);
    free(tokens);
    close_site(&s);
    free_model(&m);
}

static void entries_have_the_bytes_of_an_oracle(void) {
    static const int64_t ragged[][3] = {{256, 512, 0}, {257, 1024, 384}};
    open_device();
    for (int f = 0; f < N_FORMS; f++) {
        prefill(FORMS[f], ragged[f % 2], 2 + f % 2, 1024, 4);
        prefill(FORMS[f], (const int64_t[]){257, 130}, 2, 100, 0);
    }
    prefill(FORMS[0], (const int64_t[]){1025}, 1, 1025, 0);
    prefill(FORMS[1], (const int64_t[]){129}, 1, 129, 0);
    close_device();
}

/* Single tokens over states that are there: those of decode. */
static void single_positions(void) {
    static const int64_t grid[2][4] = {{127, 255, 383, 511}, {127, 255, 200, 383}};
    open_device();
    for (int f = 0; f < N_FORMS; f++) {
        for (int g = 0; g < 2; g++) {
            model m;
            site s;
            token tokens[4], *all = malloc(sizeof *all * 4 * 512);
            int64_t lengths[4], count = 0;
            for (int q = 0; q < 4; q++) lengths[q] = grid[g][q] + 1;
            make_model(&m, FORMS[f], lengths, 4);
            open_site(&s, &m, (cpa_owner_map){1, 128}, 0);
            for (int q = 0; q < 4; q++) {
                tokens[q] = (token){q, grid[g][q], 0};
                for (int64_t p = 0; p < grid[g][q]; p++) all[count++] = (token){q, p, 0};
            }
            run_tokens(&s, all, count, NULL, 1, 0);
            expect_entries(&s, tokens, 4);
            run_tokens(&s, tokens, 4, NULL, 1, 1);
            CU_ASSERT_EQUAL(wrong_bytes(&s), 0);
            free(all);
            close_site(&s);
            free_model(&m);
        }
    }
    close_device();
}

/* The state's rows themselves; those of skipped tokens, and all others, stay poison. */
static void states_are_written_where_asked(void) {
    open_device();
    for (int f = 0; f < 2; f++) {
        model m;
        site s;
        enum { N = 40 };
        token tokens[N];
        make_model(&m, FORMS[2 * f], (const int64_t[]){64, 30}, 2);
        open_site(&s, &m, (cpa_owner_map){1, 128}, 0);
        float *want = malloc((size_t)s.state_bytes), *got = malloc((size_t)s.state_bytes);
        cpa_test_download(stream, want, s.state.rows, s.state_bytes);
        for (int i = 0; i < N; i++) {
            tokens[i] = (token){i % 2, i / 2 + 3, i % 7 == 5};
            float *row = want + state_slot(&s, &tokens[i]) * 2 * m.width;
            const int64_t at = tokens[i].position * m.width, line = tokens[i].position % m.of.ratio * m.width;
            for (int64_t d = 0; !tokens[i].is_padding && d < m.width; d++) {
                row[d] = m.list[i % 2].kv[at + d];
                row[m.width + d] = m.list[i % 2].score[at + d] + m.ape[line + d];
            }
        }
        run_tokens(&s, tokens, N, NULL, 1, 0);
        cpa_test_download(stream, got, s.state.rows, s.state_bytes);
        CU_ASSERT_EQUAL(memcmp(got, want, (size_t)s.state_bytes), 0);
        free(got);
        free(want);
        close_site(&s);
        free_model(&m);
    }
    close_device();
}

/* ---- several ranks ---- */

/* Halo b of a rank is that of its b-th run of a sequence, 0 that of none: the first halves of the last ratio rows of
 * the run in front, which another rank has. */
static void fill_halos(site *to, const site *ranks, int32_t sequence_at) {
    const model *m = to->m;
    const int32_t ratio = m->of.ratio, head = m->of.head;
    const int64_t runs = (m->list[sequence_at].length + to->map.interleave - 1) / to->map.interleave;
    const int64_t row = 2 * head, one = ratio * row, bytes = (runs + 1) * one * (int64_t)sizeof(float);
    char *poison = cpa_test_poisoned(bytes / 4, 4);
    to->halo = cpa_test_upload(stream, poison, bytes);
    to->n_halos = runs + 1;
    free(poison);
    for (int64_t run = 1; run < runs; run++) {
        const int64_t first = run * to->map.interleave;
        const site *from = &ranks[owner_of(to, first - 1)];
        int64_t slots[CPA_COMPRESS_MOST_RATIO];
        if (owner_of(to, first) != to->rank) continue;
        for (int32_t w = 0; w < ratio; w++) slots[w] = state_slot(from, &(token){sequence_at, first - ratio + w, 0});
        int64_t *device_slots = cpa_test_upload(stream, slots, ratio * (int64_t)sizeof *slots);
        const cpa_compress_halo_pack_args args = {sizeof args, 1, from->state, device_slots, to->halo + run * one};
        CU_ASSERT_EQUAL(cpa_compress_halo_pack(&args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
        cpa_test_free(stream, device_slots);
    }
}

/* All entries of all ranks together are those of one. */
static void ranks_have_the_entries_of_one(void) {
    static const int32_t interleaves[] = {16, 64, 128};
    open_device();
    for (int i = 0; i < 3 * 3; i++) {
        const form of = FORMS[i % 3 == 1 ? 2 : i % 3 == 2 ? 3 : 0];
        const cpa_owner_map map = {i / 3 == 0 ? 1 : i / 3 == 1 ? 2 : 4, interleaves[i % 3]};
        const int64_t length = 700;
        model m;
        site ranks[4];
        make_model(&m, of, &length, 1);
        for (int32_t r = 0; r < map.cp_size; r++) {
            token tokens[700];
            int64_t n = 0;
            open_site(&ranks[r], &m, map, r);
            for (int64_t p = 0; p < length; p++)
                if (owner_of(&ranks[r], p) == r) tokens[n++] = (token){0, p, 0};
            run_tokens(&ranks[r], tokens, n, NULL, 1, 0);
        }
        for (int32_t r = 0; r < map.cp_size; r++) {
            token tokens[700];
            int32_t halo_slots[700];
            int64_t n = 0;
            if (map.cp_size > 1) fill_halos(&ranks[r], ranks, 0);
            for (int64_t p = 0; p < length; p++) {
                if (owner_of(&ranks[r], p) != r) continue;
                const int64_t run = p / map.interleave, in_run = p % map.interleave;
                halo_slots[n] = map.cp_size > 1 && run > 0 && in_run < of.ratio ? (int32_t)run : -1;
                tokens[n++] = (token){0, p, 0};
            }
            expect_entries(&ranks[r], tokens, n);
            run_tokens(&ranks[r], tokens, n, halo_slots, 0, 1);
            CU_ASSERT_EQUAL(wrong_bytes(&ranks[r]), 0);
        }
        for (int32_t r = 0; r < map.cp_size; r++) close_site(&ranks[r]);
        free_model(&m);
    }
    close_device();
}

/* ---- bad input ---- */

static void refuse_state(cpa_compress_state_write_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_state_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void refuse_entries(cpa_compress_write_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_write(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void refuse_halos(cpa_compress_halo_pack_args args, const char *line) {
    CU_ASSERT_EQUAL(cpa_compress_halo_pack(&args, stream), CPA_INVALID);
    if (!strstr(cpa_stream_error(stream), line)) CU_FAIL(line);
}

static void bad_calls_are_refused(void) {
    static _Alignas(16) float rows[16 * 512], kv[4 * 256], cache[4096];
    static const int64_t positions[4] = {3, 7, 11, 15}, slots[4] = {0, 1, 2, 3};
    static const int32_t sequences[4], tables[2] = {0, 9};
    open_device();
    const cpa_compress_state state = {
        .rows = rows, .num_blocks = 1, .block_size = 16, .ratio = 4, .overlap = 1, .head = 128};
    cpa_compress_state_write_args good = {sizeof good, 4, state, kv, kv, 0, 0, kv, positions, slots}, bad = good;
    bad.state.head = 64, refuse_state(bad, "state.head is 64, expected 128, 256 or 512");
    bad = good, bad.state.ratio = 129, refuse_state(bad, "state.ratio is 129, expected 1 to 128");
    bad = good, bad.state.overlap = 2, refuse_state(bad, "state.overlap is 2");
    bad = good, bad.state.block_size = 0, refuse_state(bad, "state.block_size is 0");
    bad = good, bad.state.reserved[3] = 1, refuse_state(bad, "the reserved bytes of state");
    bad = good, bad.kv_stride = 257, refuse_state(bad, "kv at");
    bad = good, bad.score = kv + 1, refuse_state(bad, "score at");
    bad = good, bad.ape = NULL, refuse_state(bad, "ape is NULL");
    bad = good, bad.slots = NULL, refuse_state(bad, "slots is NULL");
    cpa_compress_halo_pack_args halos = {sizeof halos, 1, state, slots, rows}, other = halos;
    other.state.overlap = 0, refuse_halos(other, "state.overlap is 0, expected 1");
    other = halos, other.halos = -1, refuse_halos(other, "halos is -1");
    other = halos, other.out = rows + 1, refuse_halos(other, "out at");
    cpa_compress_write_args entries = {.size = sizeof entries,
                                       .tokens = 1,
                                       .state = state,
                                       .positions = positions,
                                       .sequences = sequences,
                                       .tables = tables,
                                       .n_sequences = 1,
                                       .table_stride = 1,
                                       .weight = kv,
                                       .rope = rope_of(128),
                                       .slots = slots,
                                       .kv = {.k = cache,
                                              .dtype = CPA_FP8_E4M3,
                                              .block_size = 16,
                                              .num_blocks = 1,
                                              .kv_heads = 1,
                                              .k_dim = 128,
                                              .v_dim = 128,
                                              .v_in_k = 1}},
                            wrong = entries;
    wrong.rope.interleaved = 0, refuse_entries(wrong, "rope has interleaved 0");
    wrong = entries, wrong.rope.first = 63, refuse_entries(wrong, "first 63");
    wrong = entries, wrong.rope.table = NULL, refuse_entries(wrong, "rope.table is NULL");
    wrong = entries, wrong.kv.v_dim = 64, refuse_entries(wrong, "k_dim 128 and v_dim 64, expected 1, 1 and twice 128");
    wrong = entries, wrong.kv.dtype = CPA_F16, refuse_entries(wrong, "the cache is of fp16, expected fp8_t64, bf16");
    wrong = entries, wrong.n_sequences = 0, refuse_entries(wrong, "n_sequences is 0");
    wrong = entries, wrong.halo_slots = sequences, wrong.state.overlap = 0;
    refuse_entries(wrong, "halo_slots are given without overlap");
    wrong = entries, wrong.weight = kv + 2, refuse_entries(wrong, "weight at");
    wrong = entries, wrong.eps = -1, refuse_entries(wrong, "eps is -1");
    CU_ASSERT_EQUAL(cpa_compress_write(&(cpa_compress_write_args){.size = sizeof wrong,
                                                                  .state = state,
                                                                  .tables = tables,
                                                                  .n_sequences = 1,
                                                                  .table_stride = 1,
                                                                  .weight = kv,
                                                                  .rope = entries.rope,
                                                                  .kv = entries.kv},
                                       stream),
                    CPA_OK);
    if (cpa_test_promises_bits()) { /* a device says so when it is waited for */
        wrong = entries, wrong.tables = tables + 1,
        refuse_entries(wrong, "the block of the state of row 4 of the window");
        wrong = entries, wrong.positions = positions + 3, wrong.indices = positions;
        refuse_entries(wrong, "the index of the window of row 0 of the window of token 0, at position 15");
        wrong = entries, wrong.slots = (const int64_t[]){16},
        refuse_entries(wrong, "slots[0] is 16, expected at most 15");
        bad = good, bad.slots = (const int64_t[]){0, 16, 2, 3},
        refuse_state(bad, "slots[1] is 16, expected at most 15");
    }
    close_device();
}

static const cpa_test tests[] = {
    {"rows of states are written where they are asked for", states_are_written_where_asked},
    {"entries have the bytes of an oracle", entries_have_the_bytes_of_an_oracle},
    {"tokens of decode end entries", single_positions},
    {"ranks have the entries of one", ranks_have_the_entries_of_one},
    {"bad calls are refused", bad_calls_are_refused},
};
CPA_DEVICE_TEST_MAIN("compress", tests)
