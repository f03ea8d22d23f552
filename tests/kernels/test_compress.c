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
    uint8_t *mxfp4, *mxfp4_scales; /* entries go there; NULL: to the cache */
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

/* What calls are told of n tokens, on the device. */
typedef struct told {
    int64_t n, row;   /* elements from a token's row to the next */
    float *rows;      /* [kv | score | pad] of each, as of one product */
    int64_t *numbers; /* positions, indices, slots of the state, slots of the cache */
    int32_t *sequences, *halo_slots;
    float *ape, *weight;
} told;

static told tell(const site *s, const token *tokens, int64_t n, const int32_t *halo_slots) {
    const model *m = s->m;
    told t = {.n = n, .row = 2 * m->width + 4};
    float *rows = malloc(sizeof *rows * (size_t)(n * t.row));
    int64_t *positions = malloc(sizeof *positions * (size_t)n * 4), *indices = positions + n, *state = indices + n,
            *slots = state + n;
    int32_t *sequences = malloc(sizeof *sequences * (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        const token *of = &tokens[i];
        const sequence *q = &m->list[of->sequence];
        sequences[i] = of->is_padding ? UNUSED : of->sequence;
        positions[i] = of->position;
        indices[i] = index_of(s, of->position);
        state[i] = of->is_padding ? -1 : state_slot(s, of);
        slots[i] = of->is_padding ? -7 : (of->position + 1) % m->of.ratio ? UNUSED * (int64_t)9 : slot_of(s, of);
        for (int64_t d = 0; d < t.row; d++) rows[i * t.row + d] = NAN;
        if (of->is_padding) continue;
        memcpy(rows + i * t.row, q->kv + of->position * m->width, sizeof *rows * (size_t)m->width);
        memcpy(rows + i * t.row + m->width, q->score + of->position * m->width, sizeof *rows * (size_t)m->width);
    }
    t.rows = cpa_test_upload(stream, rows, n * t.row * (int64_t)sizeof *rows);
    t.numbers = cpa_test_upload(stream, positions, n * 4 * (int64_t)sizeof *positions);
    t.sequences = cpa_test_upload(stream, sequences, n * (int64_t)sizeof *sequences);
    if (halo_slots) t.halo_slots = cpa_test_upload(stream, halo_slots, n * (int64_t)sizeof *halo_slots);
    t.ape = cpa_test_upload(stream, m->ape, m->of.ratio * m->width * (int64_t)sizeof *t.ape);
    t.weight = cpa_test_upload(stream, m->weight, m->of.head * (int64_t)sizeof *t.weight);
    free(sequences);
    free(positions);
    free(rows);
    return t;
}

/* Both calls for n tokens. halo_slots: NULL, or of each. */
static void run_tokens(site *s, const token *tokens, int64_t n, const int32_t *halo_slots, int writes_state,
                       int writes_entries) {
    const told t = tell(s, tokens, n, halo_slots);
    const cpa_compress_state_write_args write = {.size = sizeof write,
                                                 .tokens = n,
                                                 .state = s->state,
                                                 .kv = t.rows,
                                                 .score = t.rows + s->m->width,
                                                 .kv_stride = t.row,
                                                 .score_stride = t.row,
                                                 .ape = t.ape,
                                                 .positions = t.numbers,
                                                 .slots = t.numbers + 2 * n};
    const cpa_compress_write_args compress = {.size = sizeof compress,
                                              .tokens = n,
                                              .state = s->state,
                                              .positions = t.numbers,
                                              .indices = s->map.cp_size > 1 ? t.numbers + n : NULL,
                                              .sequences = t.sequences,
                                              .tables = s->device_tables,
                                              .n_sequences = MOST_SEQUENCES,
                                              .table_stride = s->stride,
                                              .halo = s->halo,
                                              .n_halos = s->n_halos,
                                              .halo_slots = t.halo_slots,
                                              .weight = t.weight,
                                              .eps = EPS,
                                              .rope = rope_of(s->m->of.head),
                                              .slots = t.numbers + 3 * n,
                                              .kv = s->mxfp4 ? (cpa_kv_view){.k = NULL} : s->view,
                                              .mxfp4 = s->mxfp4,
                                              .mxfp4_scales = s->mxfp4_scales,
                                              .mxfp4_rows = s->mxfp4 ? s->view.num_blocks * CACHE_BLOCK : 0};
    if (writes_state) CU_ASSERT_EQUAL(cpa_compress_state_write(&write, stream), CPA_OK);
    if (writes_entries && cpa_compress_write(&compress, stream) != CPA_OK) CU_FAIL(cpa_stream_error(stream));
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    void *const memory[] = {t.rows, t.numbers, t.sequences, t.halo_slots, t.ape, t.weight};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
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

/* Codes and exponents of entries, beside those that hold nothing; and what they stand for is near the entries. */
static void mxfp4_of_a_head(int32_t head, int32_t ratio, int32_t overlap) {
    enum { LENGTH = 300 };
    const int64_t length = LENGTH;
    const int32_t row = head / 2, scales = head / 32;
    model m;
    site s;
    token tokens[LENGTH];
    double off = 0, size = 0;
    make_model(&m, (form){ratio, overlap, head, CPA_BF16, 0}, &length, 1);
    open_site(&s, &m, (cpa_owner_map){1, 128}, 0);
    const int64_t rows = s.view.num_blocks * CACHE_BLOCK, bytes = rows * (row + scales);
    uint8_t *want = cpa_test_poisoned(bytes, 1), *got = malloc((size_t)bytes);
    uint8_t *const memory = cpa_test_upload(stream, want, bytes);
    s.mxfp4 = memory, s.mxfp4_scales = memory + rows * row;
    for (int64_t p = 0; p < LENGTH; p++) {
        static const double NUMBERS[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        float x[512];
        tokens[p] = (token){0, p, 0};
        if ((p + 1) % ratio) continue;
        const int64_t slot = slot_of(&s, &tokens[p]);
        uint8_t *codes = want + slot * row, *exponents = want + rows * row + slot * scales;
        oracle_entry(&m, 0, p, x);
        for (int32_t d = 0; d < head; d++) x[d] = cpa_reference_round(x[d], CPA_BF16);
        cpa_test_mxfp4(x, codes, exponents, head);
        for (int32_t d = 0; d < head; d++) {
            const int code = codes[d / 2] >> d % 2 * 4 & 15;
            const double value = ldexp(code & 8 ? -NUMBERS[code & 7] : NUMBERS[code & 7], exponents[d / 32] - 127);
            off += fabs(value - (double)x[d]), size += fabs((double)x[d]);
        }
    }
    run_tokens(&s, tokens, LENGTH, NULL, 1, 1);
    cpa_test_download(stream, got, memory, bytes);
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)bytes), 0);
    CPA_ASSERT_ORDER(off, <, 0.3 * size);
    CPA_ASSERT_ORDER(off, >, 0);
    s.mxfp4 = NULL;
    cpa_test_free(stream, memory);
    free(got);
    free(want);
    close_site(&s);
    free_model(&m);
}

static void entries_may_be_mxfp4(void) {
    open_device();
    mxfp4_of_a_head(128, 4, 1);
    mxfp4_of_a_head(512, 128, 0);
    mxfp4_of_a_head(256, 3, 0);
    close_device();
}

static const cpa_test tests[] = {
    {"entries may be MXFP4", entries_may_be_mxfp4},
    {"rows of states are written where they are asked for", states_are_written_where_asked},
    {"entries have the bytes of an oracle", entries_have_the_bytes_of_an_oracle},
    {"tokens of decode end entries", single_positions},
    {"ranks have the entries of one", ranks_have_the_entries_of_one},
};
CPA_DEVICE_TEST_MAIN("compress", tests)
