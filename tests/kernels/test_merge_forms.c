/* merge in the forms of other libraries: states in bf16 and fp16, LSEs by head and to the base of 2, rows that one
 * state alone has, results in fp8. The grid is that of vLLM's tests/kernels/attention/test_merge_attn_states.py, with
 * every tenth LSE +inf; on the host the smaller half of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/ops.h>

#include "kernels/host/cache/quantise.h"
#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static uint64_t random_state = 5;
static float uniform(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 33) / 0x1p30 - 1);
}

/* ---- the peer's grid ---- */

enum { APART = 8192, LSE_APART = 4096 }; /* elements from the first state to the second, in the same numbers */

/* Elements and LSEs that all cases share, on the host and on the device. */
typedef struct pools {
    int64_t elements, lses;
    float *wide[CPA_DTYPE_COUNT]; /* what the elements of each dtype stand for */
    void *o[CPA_DTYPE_COUNT], *device_o[CPA_DTYPE_COUNT];
    float *lse, *device_lse;
} pools;

static void pools_init(pools *p, int64_t elements, int64_t lses) {
    float *base = malloc((size_t)elements * sizeof *base);
    *p = (pools){.elements = elements, .lses = lses};
    for (int64_t i = 0; i < elements; i++) base[i] = 3 * uniform();
    for (int d = 0; d < CPA_DTYPE_COUNT; d++) {
        const int64_t bytes = elements * cpa_dtype_bytes((cpa_dtype)d);
        p->o[d] = malloc((size_t)bytes);
        p->wide[d] = malloc((size_t)elements * sizeof *base);
        cpa_narrow(p->o[d], base, (cpa_dtype)d, elements);
        cpa_reference_widen(p->o[d], (cpa_dtype)d, elements, p->wide[d]);
        p->device_o[d] = cpa_test_upload(stream, p->o[d], bytes);
    }
    p->lse = malloc((size_t)lses * sizeof *p->lse);
    for (int64_t i = 0; i < lses; i++) p->lse[i] = uniform() < -0.8f ? INFINITY : 5 * uniform();
    p->device_lse = cpa_test_upload(stream, p->lse, lses * (int64_t)sizeof *p->lse);
    free(base);
}

static void pools_destroy(pools *p) {
    cpa_test_free(stream, p->device_lse);
    free(p->lse);
    for (int d = 0; d < CPA_DTYPE_COUNT; d++) {
        cpa_test_free(stream, p->device_o[d]);
        free(p->wide[d]);
        free(p->o[d]);
    }
}

typedef struct grid_case {
    int64_t tokens, tail;
    int32_t heads, dim;
    cpa_dtype dtype;
    int fp8;
} grid_case;

static const float out_scale = 0.05f;

/* Whether a row of a head is the merge of its two states, in float64, or the second of them as it is. */
static int row_is_right(const pools *p, const grid_case *c, int64_t row, int32_t head, const char *out, float out_lse) {
    const int64_t at = (row * c->heads + head) * c->dim, lse_at = head * c->tokens + row;
    const float *a = p->wide[c->dtype] + at, *b = a + APART;
    const float raw[2] = {p->lse[lse_at], p->lse[lse_at + LSE_APART]};
    const int64_t element = c->dtype == CPA_F32 ? 4 : 2;
    const int tail = row >= c->tokens - c->tail;
    const double lse_a = isinf(raw[0]) || tail ? -INFINITY : (double)raw[0];
    const double lse_b = isinf(raw[1]) && !tail ? -INFINITY : (double)raw[1], max = fmax(lse_a, lse_b);
    double w_a = max == -INFINITY ? 0 : exp(lse_a - max), w_b = max == -INFINITY ? 0 : exp(lse_b - max);
    const double sum = w_a + w_b, want_lse = sum > 0 ? max + log(sum) : -INFINITY;
    if (tail) w_a = 0, w_b = 1;
    if (tail              ? memcmp(&out_lse, &raw[1], sizeof out_lse) != 0
        : isinf(want_lse) ? (double)out_lse != want_lse
                          : fabs((double)out_lse - want_lse) > 1e-5)
        return 0;
    if (tail && !c->fp8)
        return memcmp(out, (char *)p->o[c->dtype] + (at + APART) * element, (size_t)(c->dim * element)) == 0;
    float got[CPA_MAX_HEAD_DIM];
    for (int32_t d = 0; c->fp8 && d < c->dim; d++) got[d] = out_scale * cpa_from_e4m3((uint8_t)out[d]);
    if (!c->fp8) cpa_reference_widen(out, c->dtype, c->dim, got);
    for (int32_t d = 0; d < c->dim; d++) {
        const double want = sum > 0 || tail ? (w_a * (double)a[d] + w_b * (double)b[d]) / (tail ? 1 : sum) : 0;
        const float inverse = 1 / out_scale,
                    rounded = c->fp8 ? out_scale * cpa_from_e4m3(cpa_to_e4m3((float)want * inverse))
                                     : cpa_reference_round((float)want, c->dtype);
        if (fabs((double)got[d] - want) > 2 * fabs((double)rounded - want) + 1e-5) return 0;
    }
    return 1;
}

/* Rows in full where they are few, else some hundred, those around the first that is not merged among them. */
static int64_t wrong_rows(const pools *p, const grid_case *c, const char *out, const float *lse) {
    const int64_t bytes = c->fp8 ? 1 : cpa_dtype_bytes(c->dtype), n = c->tokens * c->heads, step = n / 400 + 1;
    const int64_t edge = (c->tokens - c->tail) * c->heads;
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i += i >= edge - 2 && i < edge + 2 ? 1 : step) {
        const int64_t row = i / c->heads;
        const int32_t head = (int32_t)(i % c->heads);
        wrong += !row_is_right(p, c, row, head, out + i * c->dim * bytes, lse[head * c->tokens + row]);
        if (i < edge - 2 && i + step > edge - 2) i = edge - 2 - step;
    }
    return wrong;
}

static int64_t run_case(const pools *p, const grid_case *c) {
    const int64_t n = c->tokens * c->heads, bytes = n * c->dim * (c->fp8 ? 1 : cpa_dtype_bytes(c->dtype));
    char *out = cpa_test_poisoned(bytes, 1);
    float *lse = cpa_test_poisoned(n, sizeof *lse);
    char *o = p->device_o[c->dtype];
    const cpa_partial states[2] = {
        {.o = (float *)(void *)o, .lse = p->device_lse},
        {.o = (float *)(void *)(o + APART * cpa_dtype_bytes(c->dtype)), .lse = p->device_lse + LSE_APART}};
    cpa_merge_args args = {.size = sizeof args,
                           .rows = c->tokens,
                           .heads = c->heads,
                           .v_dim = c->dim,
                           .states = states,
                           .n_states = 2,
                           .state_dtype = c->dtype,
                           .out_dtype = c->fp8 ? CPA_FP8_E4M3 : c->dtype,
                           .tail_rows = c->tail,
                           .lse_head_stride = c->tokens,
                           .out_lse_head_stride = c->tokens};
    float *scale = cpa_test_upload(stream, &out_scale, sizeof out_scale);
    args.out_scale = c->fp8 ? scale : NULL;
    args.out = cpa_test_upload(stream, out, bytes);
    args.out_lse = cpa_test_upload(stream, lse, n * (int64_t)sizeof *lse);
    CU_ASSERT_EQUAL(cpa_merge(&args, stream), CPA_OK);
    cpa_test_download(stream, out, args.out, bytes);
    cpa_test_download(stream, lse, args.out_lse, n * (int64_t)sizeof *lse);
    cpa_test_free(stream, args.out_lse);
    cpa_test_free(stream, args.out);
    cpa_test_free(stream, scale);
    const int64_t wrong = wrong_rows(p, c, out, lse);
    free(lse);
    free(out);
    return wrong;
}

static void the_peers_grid_equals_the_formula(void) {
    static const int64_t tokens[] = {256, 512, 613, 1024, 1536, 4096};
    static const int32_t heads[] = {4, 8, 16, 32, 48, 64}, dims[] = {32, 48, 64, 96, 128, 256};
    const int whole = !cpa_test_promises_bits(), n_tokens = whole ? 6 : 3, n_heads = whole ? 6 : 2;
    const int64_t most = tokens[n_tokens - 1] * heads[n_heads - 1];
    pools p;
    int64_t cases = 0, failed = 0;
    cpa_test_device_open(2, &device, &stream);
    pools_init(&p, most * CPA_MAX_HEAD_DIM + APART, most + LSE_APART);
    for (int i = 0; i < n_tokens * n_heads * 6 * CPA_DTYPE_COUNT * 4; i++) {
        const int options = i % 4, at = i / 4;
        const grid_case c = {.tokens = tokens[at / 18 / n_heads],
                             .heads = heads[at / 18 % n_heads],
                             .dim = dims[at / 3 % 6],
                             .dtype = (cpa_dtype)(at % 3),
                             .tail = options & 1 ? tokens[at / 18 / n_heads] - 128 : 0,
                             .fp8 = options >> 1};
        const int64_t wrong = run_case(&p, &c);
        if (wrong && ++failed < 5)
            printf("  %lld wrong rows: %lld tokens, %d heads of %d, %s%s, %lld rows at the end\n", (long long)wrong,
                   (long long)c.tokens, c.heads, c.dim, cpa_dtype_name(c.dtype), c.fp8 ? " to fp8" : "",
                   (long long)c.tail);
        cases++;
    }
    printf("  %lld cases of 2592\n", (long long)cases);
    CU_ASSERT_EQUAL(failed, 0);
    pools_destroy(&p);
    cpa_test_device_close(device, stream);
}

/* ---- options by themselves ---- */

enum { ROWS = 23, HEADS = 3, WIDTH = 20, STATES = 5, LSES = ROWS * HEADS, ELEMENTS = LSES * WIDTH };

/* Fp32 states with every fourth empty, in rows and columns that allow no vectors. */
typedef struct fixture {
    float o[STATES][ELEMENTS], lse[STATES][LSES];
    float *device_o[STATES], *device_lse[STATES];
    cpa_partial states[STATES];
} fixture;

static void fixture_init(fixture *f) {
    cpa_test_device_open(2, &device, &stream);
    for (int s = 0; s < STATES; s++) {
        for (int i = 0; i < ELEMENTS; i++) f->o[s][i] = uniform();
        for (int i = 0; i < LSES; i++) f->lse[s][i] = (i + s) % 4 == 0 || i == 7 ? -INFINITY : 20 * uniform();
        f->device_o[s] = cpa_test_upload(stream, f->o[s], sizeof f->o[s]);
        f->device_lse[s] = cpa_test_upload(stream, f->lse[s], sizeof f->lse[s]);
        f->states[s] = (cpa_partial){.o = f->device_o[s], .lse = f->device_lse[s]};
    }
}

static void fixture_destroy(fixture *f) {
    for (int s = 0; s < STATES; s++) {
        cpa_test_free(stream, f->device_lse[s]);
        cpa_test_free(stream, f->device_o[s]);
    }
    cpa_test_device_close(device, stream);
}

/* Merges to the host; both outputs are contiguous. */
static void merge(cpa_merge_args args, const cpa_partial *states, void *out, float *lse) {
    const int64_t bytes = ELEMENTS * cpa_dtype_bytes(args.out_dtype);
    args.size = sizeof args;
    args.rows = ROWS, args.heads = HEADS, args.v_dim = WIDTH;
    args.states = states, args.n_states = STATES;
    memset(out, 0xff, (size_t)bytes);
    memset(lse, 0xff, LSES * sizeof *lse);
    args.out = cpa_test_upload(stream, out, bytes);
    args.out_lse = cpa_test_upload(stream, lse, LSES * (int64_t)sizeof *lse);
    CU_ASSERT_EQUAL(cpa_merge(&args, stream), CPA_OK);
    cpa_test_download(stream, out, args.out, bytes);
    cpa_test_download(stream, lse, args.out_lse, LSES * (int64_t)sizeof *lse);
    cpa_test_free(stream, args.out_lse);
    cpa_test_free(stream, args.out);
}

static void lses_by_head_and_to_the_base_of_2_give_the_same_result(void) {
    static fixture f;
    static float want[ELEMENTS], out[ELEMENTS];
    float want_lse[LSES], lse[LSES], turned[LSES];
    cpa_partial states[STATES];
    fixture_init(&f);
    merge((cpa_merge_args){0}, f.states, want, want_lse);
    for (int options = 1; options < 8; options++) {
        const int by_head = options & 1, out_by_head = options >> 1 & 1, base2 = options >> 2;
        memcpy(states, f.states, sizeof states);
        for (int s = 0; s < STATES; s++) {
            for (int i = 0; i < LSES; i++)
                turned[by_head ? i % HEADS * ROWS + i / HEADS : i] = base2 ? f.lse[s][i] * (float)M_LOG2E : f.lse[s][i];
            states[s].lse = cpa_test_upload(stream, turned, sizeof turned);
        }
        merge((cpa_merge_args){.lse_head_stride = by_head ? ROWS : 0,
                               .out_lse_head_stride = out_by_head ? ROWS : 0,
                               .lse_base2 = base2},
              states, out, lse);
        for (int i = 0; i < ELEMENTS; i++)
            CU_ASSERT(base2 ? fabsf(out[i] - want[i]) <= 2e-5f : memcmp(&out[i], &want[i], sizeof *out) == 0);
        for (int i = 0; i < LSES; i++) {
            const float have = lse[out_by_head ? i % HEADS * ROWS + i / HEADS : i];
            if (want_lse[i] == -INFINITY)
                CU_ASSERT_EQUAL(have, -INFINITY);
            else if (base2)
                CPA_ASSERT_ORDER(fabsf(have * (float)M_LN2 - want_lse[i]), <=, 1e-5f);
            else
                CU_ASSERT_EQUAL(memcmp(&have, &want_lse[i], sizeof have), 0);
        }
        for (int s = 0; s < STATES; s++) cpa_test_free(stream, states[s].lse);
    }
    fixture_destroy(&f);
}

/* NaN and infinities of O as the codes say; the last rows keep an LSE of NaN or +inf. */
static void codes_saturate_and_nan_is_zero(void) {
    static fixture f;
    static uint8_t out[ELEMENTS];
    float lse[LSES];
    const float scale = 0.25f;
    fixture_init(&f);
    f.o[4][0] = NAN, f.o[4][1] = INFINITY, f.o[4][2] = -1e9f, f.o[4][3] = 0.3f;
    f.o[4][WIDTH] = 112; /* 448 * 0.25 */
    f.lse[4][0] = NAN, f.lse[4][1] = INFINITY;
    cpa_test_free(stream, f.device_o[4]);
    cpa_test_free(stream, f.device_lse[4]);
    f.states[4].o = f.device_o[4] = cpa_test_upload(stream, f.o[4], sizeof f.o[4]);
    f.states[4].lse = f.device_lse[4] = cpa_test_upload(stream, f.lse[4], sizeof f.lse[4]);
    float *device_scale = cpa_test_upload(stream, &scale, sizeof scale);
    merge((cpa_merge_args){.out_dtype = CPA_FP8_E4M3, .out_scale = device_scale, .tail_rows = ROWS}, f.states, out,
          lse);
    CU_ASSERT_EQUAL(out[0], 0);
    CU_ASSERT_EQUAL(out[1], 0x7e);
    CU_ASSERT_EQUAL(out[2], 0xfe);
    CU_ASSERT_EQUAL(out[3], cpa_to_e4m3(1.2f));
    CU_ASSERT_EQUAL(out[WIDTH], 0x7e);
    for (int i = 0; i < ELEMENTS; i++) CU_ASSERT_EQUAL(out[i], cpa_to_e4m3(f.o[4][i] * 4));
    CU_ASSERT_EQUAL(memcmp(lse, f.lse[4], sizeof lse), 0);
    cpa_test_free(stream, device_scale);
    fixture_destroy(&f);
}

static void wrong_options_are_named(void) {
    static fixture f;
    static const struct {
        const char *what;
        cpa_merge_args args;
    } wrong[] = {
        {"out_dtype is fp8_e4m3 and out_scale is NULL", {.out_dtype = CPA_FP8_E4M3}},
        {"out_dtype is 4, expected fp32, bf16, fp16 or fp8_e4m3", {.out_dtype = CPA_INT8}},
        {"state_dtype is 3, expected fp32, bf16 or fp16", {.state_dtype = CPA_FP8_E4M3}},
        {"tail_rows is 24, expected 0 to the 23 rows", {.tail_rows = ROWS + 1}},
        {"tail_rows is -1, expected 0 to the 23 rows", {.tail_rows = -1}},
        {"lse_base2 is 2, expected 0 or 1", {.lse_base2 = 2}},
        {"out_lse_row_stride is 3 and out_lse_head_stride is 23",
         {.out_lse_row_stride = 3, .out_lse_head_stride = ROWS}},
        {"lse_head_stride is -5, expected 0 or at least 1", {.lse_head_stride = -5}},
    };
    fixture_init(&f);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cpa_merge_args args = wrong[i].args;
        args.size = sizeof args;
        args.rows = ROWS, args.heads = HEADS, args.v_dim = WIDTH;
        args.states = f.states, args.n_states = STATES;
        args.out = f.device_o[0];
        CU_ASSERT_EQUAL(cpa_merge(&args, stream), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), wrong[i].what));
    }
    fixture_destroy(&f);
}

static const cpa_test tests[] = {
    {"the peer's grid equals the formula", the_peers_grid_equals_the_formula},
    {"LSEs by head and to the base of 2 give the same result", lses_by_head_and_to_the_base_of_2_give_the_same_result},
    {"codes saturate, and NaN is zero", codes_saturate_and_nan_is_zero},
    {"wrong options are named", wrong_options_are_named},
};
CPA_DEVICE_TEST_MAIN("merge forms", tests)
