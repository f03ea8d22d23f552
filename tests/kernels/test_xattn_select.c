/* xattn_select: the blocks that rows of A keep, beside a sort in float64, and beside the selection that others have; and
 * calls of XAttention's operators that are refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/xattn.h>

#include "base/hash.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum { PEAKS, FEW_VALUES, EQUAL, ZEROS, ONE_BLOCK, KINDS };

static float sum_of(int kind, uint64_t seed, int64_t i) {
    const uint64_t bits = cpa_mix64(seed * 7919 + (uint64_t)i);
    const double x = (double)(bits % 1000003) / 1000003;
    if (kind == FEW_VALUES) return (float)(bits % 4) * 0.25f;
    if (kind == EQUAL) return 0.125f;
    if (kind == ZEROS) return 0;
    if (kind == ONE_BLOCK) return i % 13 == 5 ? 16 : 0;
    return (float)(16 * x * x * x * x * x * x);
}

/* Block rows [first, first + rows) of `heads` heads, over k_blocks. */
typedef struct select_case {
    int32_t heads;
    int64_t first, rows, k_blocks;
    int32_t causal, recent;
    float tau;
    const float *taus;
} select_case;

typedef struct selected {
    float *sums, *kept;
    uint32_t *bits;
    int32_t *counts;
    int64_t n, words;
} selected;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

static selected run(const select_case *c, const float *sums) {
    selected s = {.n = c->heads * c->rows, .words = (c->k_blocks + 31) / 32};
    s.sums = allocate(s.n * c->k_blocks, sizeof *s.sums);
    s.bits = allocate(s.n * s.words, sizeof *s.bits);
    s.counts = allocate(s.n, sizeof *s.counts);
    s.kept = allocate(s.n, sizeof *s.kept);
    memcpy(s.sums, sums, (size_t)(s.n * c->k_blocks) * sizeof *sums);
    memset(s.bits, 0x77, (size_t)(s.n * s.words) * sizeof *s.bits);
    void *const used[] = {cpa_test_upload(stream, sums, s.n * c->k_blocks * 4),
                          cpa_test_upload(stream, s.bits, s.n * s.words * 4),
                          cpa_test_upload(stream, s.counts, s.n * 4), cpa_test_upload(stream, s.kept, s.n * 4),
                          c->taus ? cpa_test_upload(stream, c->taus, c->heads * 4) : NULL};
    const cpa_xattn_select_args args = {
        .size = sizeof args,
        .shape = {.stride = 8, .q_heads = c->heads, .kv_heads = 1, .dim = 64, .dtype = CPA_BF16, .causal = c->causal},
        .map = {1, 128},
        .q_set = {CPA_TOKENS_ALL, 0},
        .q_first = c->first * 128,
        .q_blocks = c->rows,
        .k_blocks = c->k_blocks,
        .sums = used[0],
        .tau = c->tau,
        .taus = used[4],
        .recent = c->recent,
        .bits = used[1],
        .counts = used[2],
        .kept = used[3]};
    CU_ASSERT_EQUAL(cpa_xattn_select(&args, stream), CPA_OK);
    cpa_test_download(stream, s.bits, used[1], s.n * s.words * 4);
    cpa_test_download(stream, s.counts, used[2], s.n * 4);
    cpa_test_download(stream, s.kept, used[3], s.n * 4);
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i]) cpa_test_free(stream, used[i]);
    return s;
}

static void selected_free(selected *s) {
    free(s->sums), free(s->bits), free(s->counts), free(s->kept);
}

static int has(const selected *s, int64_t row, int64_t block) {
    return s->bits[row * s->words + block / 32] >> block % 32 & 1;
}

/* The largest block that is not taken yet, of equal ones the first; -1: none. */
static int64_t largest(const float *sums, const uint8_t *taken, int64_t end) {
    int64_t best = -1;
    for (int64_t j = 0; j < end; j++)
        if (!taken[j] && (best < 0 || sums[j] > sums[best])) best = j;
    return best;
}

static int row_is_sorted(const select_case *c, const selected *s, int64_t row) {
    const int64_t place = c->first + row % c->rows, recent = c->recent > 1 ? c->recent : 1;
    const int64_t end = c->causal && place + 1 < c->k_blocks ? place + 1 : c->k_blocks;
    const float *sums = s->sums + row * c->k_blocks;
    const double tau = (double)(c->taus ? c->taus[row / c->rows] : c->tau);
    uint8_t *taken = allocate(c->k_blocks, 1), *wanted = allocate(c->k_blocks, 1);
    double total = 0, kept = 0;
    int32_t count = 0;
    for (int64_t j = 0; j < end; j++) {
        total += (double)sums[j];
        taken[j] = wanted[j] = c->causal && (j == 0 || j > place - recent);
        if (wanted[j]) kept += (double)sums[j], count++;
    }
    for (int64_t j; kept < tau * total && (j = largest(sums, taken, end)) >= 0; count++) {
        taken[j] = wanted[j] = 1;
        kept += (double)sums[j];
    }
    int right = s->counts[row] == count && fabs((double)s->kept[row] - (total > 0 ? kept / total : 1)) < 1e-6;
    for (int64_t j = 0; j < 32 * s->words; j++) right &= has(s, row, j) == (j < c->k_blocks && wanted[j]);
    free(taken), free(wanted);
    return right;
}

static void rows_are_as_sorted(void) {
    static const select_case cases[] = {{3, 0, 40, 40, 1, 0, 0.9f, NULL},     {2, 33, 7, 40, 1, 3, 0.5f, NULL},
                                        {2, 0, 9, 77, 0, 0, 0.95f, NULL},     {1, 0, 1, 1, 1, 0, 0.9f, NULL},
                                        {2, 500, 24, 524, 1, 1, 0.8f, NULL},  {1, 1020, 4, 1024, 1, 2, 0.9999f, NULL},
                                        {1, 2990, 2, 2999, 1, 0, 0.9f, NULL}, {1, 16380, 2, 16384, 1, 0, 0.7f, NULL},
                                        {2, 3, 5, 60, 1, 100, 0.9f, NULL}};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int kind = 0; kind < KINDS; kind++) {
            const select_case *c = &cases[i];
            const int64_t n = c->heads * c->rows;
            float *sums = allocate(n * c->k_blocks, sizeof *sums);
            for (int64_t row = 0; row < n; row++)
                for (int64_t j = 0; j < c->k_blocks; j++) /* what lies behind the row's own block is not read */
                    sums[row * c->k_blocks + j] =
                        c->causal && j > c->first + row % c->rows ? NAN : sum_of(kind, (uint64_t)row + 31 * i, j);
            selected s = run(c, sums);
            int64_t wrong = 0;
            for (int64_t row = 0; row < n; row++) wrong += !row_is_sorted(c, &s, row);
            if (wrong) printf("  case %d, kind %d\n", (int)i, kind);
            CU_ASSERT_EQUAL(wrong, 0);
            selected_free(&s);
            free(sums);
        }
    cpa_test_device_close(device, stream);
}

static void heads_have_shares_of_their_own(void) {
    static const float taus[] = {0.3f, 0.99f, 0.9f, 0.75f};
    const select_case c = {4, 0, 64, 64, 1, 0, 0, taus};
    float *sums = allocate(4 * 64 * 64, sizeof *sums);
    cpa_test_device_open(2, &device, &stream);
    for (int64_t i = 0; i < 4 * 64 * 64; i++) sums[i] = sum_of(PEAKS, 5, i);
    selected s = run(&c, sums);
    for (int64_t row = 0; row < s.n; row++) CU_ASSERT(row_is_sorted(&c, &s, row));
    selected_free(&s);
    free(sums);
    cpa_test_device_close(device, stream);
}

/* ---- beside the selection of others ---- */

/* find_blocks_chunked as x-attention has it, over one row of a chunk of queries whose first row is block `current`: the
 * blocks that are marked come first, then the others by their sums, and those are kept before which less than tau is:
 * nothing before the first two places, the marked before the third, the first other as well before the fourth. What is
 * not kept falls on block 0. In the first chunk a unit matrix is laid over the mark of block 0: one block is marked. */
static void select_as_others(const float *sums, int64_t n, int64_t row, int64_t current, double tau, uint8_t *kept) {
    uint8_t *taken = allocate(n, 1);
    float *others = allocate(n, sizeof *others);
    double total = 0, before = (double)sums[row] + (current > 0 ? (double)sums[0] : 0);
    const int64_t marked = current > 0 ? 2 : 1;
    for (int64_t j = 0; j <= row; j++) total += (double)sums[j];
    taken[row] = kept[row] = kept[0] = 1;
    if (current > 0) taken[0] = 1;
    for (int64_t place = marked; place <= row; place++) {
        const int64_t j = largest(sums, taken, row + 1);
        if (place > 2) before += (double)others[place - 3];
        if (place >= 2 && before >= tau * total) break;
        others[place - marked] = sums[j];
        taken[j] = kept[j] = 1;
    }
    free(taken), free(others);
}

static void others_keep_the_same_but_in_their_first_chunk(void) {
    enum { BLOCKS = 48, CHUNK = 8, HEADS = 24 };
    const select_case c = {HEADS, 0, BLOCKS, BLOCKS, 1, 0, 0.9f, NULL};
    float *sums = allocate((int64_t)HEADS * BLOCKS * BLOCKS, sizeof *sums);
    int64_t later_wrong = 0, first_rows = 0, more[4] = {0}, less = 0;
    cpa_test_device_open(2, &device, &stream);
    for (int64_t i = 0; i < (int64_t)HEADS * BLOCKS * BLOCKS; i++) sums[i] = sum_of(PEAKS, 99, i);
    selected s = run(&c, sums);
    for (int64_t row = 0; row < s.n; row++) {
        uint8_t kept[BLOCKS] = {0};
        int extra = 0;
        const int64_t place = row % BLOCKS;
        select_as_others(sums + row * BLOCKS, BLOCKS, place, place / CHUNK * CHUNK, (double)c.tau, kept);
        for (int64_t j = 0; j < BLOCKS; j++) {
            extra += kept[j] && !has(&s, row, j);
            less += !kept[j] && has(&s, row, j);
        }
        if (place >= CHUNK)
            later_wrong += extra != 0;
        else
            first_rows++, more[extra < 3 ? extra : 3]++;
    }
    CU_ASSERT_EQUAL(later_wrong, 0);
    CU_ASSERT_EQUAL(less, 0);
    CU_ASSERT_EQUAL(more[3], 0);
    CU_ASSERT_EQUAL(more[0] + more[1] + more[2], first_rows);
    CPA_ASSERT_ORDER(more[1] + more[2], >, 0);
    selected_free(&s);
    free(sums);
    cpa_test_device_close(device, stream);
}

/* ---- calls that are refused ---- */

#define REFUSE(call, line)                                                                                             \
    do {                                                                                                               \
        CU_ASSERT_EQUAL(call, CPA_INVALID);                                                                            \
        if (!strstr(cpa_stream_error(stream), line)) printf("  %s\n", cpa_stream_error(stream));                       \
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), line));                                                \
    } while (0)

static void bad_calls_are_refused(void) {
    static _Alignas(16) float memory[4096];
    static const int32_t table[2];
    static uint32_t bits[64];
    cpa_test_device_open(1, &device, &stream);
    const cpa_xattn_shape shape = {.stride = 8, .q_heads = 2, .kv_heads = 1, .dim = 8, .dtype = CPA_F32, .causal = 1};
    const cpa_xattn_pack_q_args q = {.size = sizeof q, .shape = shape, .tokens = 9, .q = memory, .out = memory};
    cpa_xattn_pack_q_args bad_q = q;
    bad_q.shape.stride = 12;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "stride is 12, expected a divisor of the block, 128, from 4 to 16");
    bad_q = q, bad_q.shape.stride = 2;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "stride is 2");
    bad_q = q, bad_q.shape.block = 256;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "block is 256, expected 1 to 128");
    bad_q = q, bad_q.shape.dim = 12;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "dim is 12, expected a multiple of 8 up to 256");
    bad_q = q, bad_q.shape.scale = -1;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "scale is -1");
    bad_q = q, bad_q.q = NULL;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "q is NULL");
    bad_q = q, bad_q.q_row_stride = 9;
    REFUSE(cpa_xattn_pack_q(&bad_q, stream), "q_row_stride");
    const cpa_xattn_pack_k_args k = {.size = sizeof k,
                                     .shape = shape,
                                     .tokens = 9,
                                     .kv = {.k = memory,
                                            .v = memory,
                                            .dtype = CPA_F32,
                                            .block_size = 8,
                                            .num_blocks = 1,
                                            .kv_heads = 1,
                                            .k_dim = 8,
                                            .v_dim = 8},
                                     .table = table,
                                     .out = memory};
    cpa_xattn_pack_k_args bad_k = k;
    bad_k.kv.k_dim = 16;
    REFUSE(cpa_xattn_pack_k(&bad_k, stream), "the cache has 1 KV heads of 16 columns, but the shape 1 of 8");
    bad_k = k, bad_k.table = NULL;
    REFUSE(cpa_xattn_pack_k(&bad_k, stream), "table is NULL");
    const cpa_xattn_stats_args stats = {.size = sizeof stats,
                                        .shape = shape,
                                        .chunks = {.map = {2, 128},
                                                   .q_set = {CPA_TOKENS_ALL, 0},
                                                   .k_set = {CPA_TOKENS_SHARD, 1},
                                                   .q_tokens = 8,
                                                   .k_tokens = 8,
                                                   .q = memory,
                                                   .k = memory},
                                        .max = memory,
                                        .sum = memory};
    cpa_xattn_stats_args bad_stats = stats;
    bad_stats.chunks.map.interleave = 64;
    REFUSE(cpa_xattn_stats(&bad_stats, stream), "the interleave is 64, expected a multiple of the block, 128");
    bad_stats = stats, bad_stats.chunks.q_first = 8;
    REFUSE(cpa_xattn_stats(&bad_stats, stream), "q_first is 8, expected a multiple of the block, 128");
    bad_stats = stats, bad_stats.chunks.k_set.shard = 2;
    REFUSE(cpa_xattn_stats(&bad_stats, stream), "the shard of k_set is 2");
    bad_stats = stats, bad_stats.sum = NULL;
    REFUSE(cpa_xattn_stats(&bad_stats, stream), "sum is NULL");
    const cpa_xattn_select_args select = {.size = sizeof select,
                                          .shape = shape,
                                          .map = {1, 128},
                                          .q_set = {CPA_TOKENS_ALL, 0},
                                          .q_blocks = 2,
                                          .k_blocks = 33,
                                          .sums = memory,
                                          .tau = 0.9f,
                                          .bits = bits};
    cpa_xattn_select_args bad = select;
    const float wrong[] = {0, -0.5f, 1.5f, NAN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        bad.tau = wrong[i];
        REFUSE(cpa_xattn_select(&bad, stream), "expected above 0 and at most 1");
    }
    bad = select, bad.words = 1;
    REFUSE(cpa_xattn_select(&bad, stream), "words is 1");
    bad = select, bad.k_blocks = 16385;
    REFUSE(cpa_xattn_select(&bad, stream), "k_blocks is 16385, expected 1 to 16384");
    bad = select, bad.shape.causal = 0, bad.recent = 2;
    REFUSE(cpa_xattn_select(&bad, stream), "recent is 2 where causal is 0");
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"rows are as sorted", rows_are_as_sorted},
    {"heads have shares of their own", heads_have_shares_of_their_own},
    {"others keep the same but in their first chunk", others_keep_the_same_but_in_their_first_chunk},
    {"bad calls are refused", bad_calls_are_refused},
};
CPA_DEVICE_TEST_MAIN("xattn_select", tests)
