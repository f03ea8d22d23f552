/* Caches in the layout of vLLM's paged kernels, and scales of heads on the device: what is written lands where the
 * layout says and nowhere else, blocks are copied and packed, and attend equals float64, on the host with the bits that
 * it has over rows in one piece. The grids are those of vLLM's tests/kernels/attention/test_cache.py and
 * test_attention.py, thinner on the host. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "src/check/reference.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

/* With sanitizers, which take eight times as long, every second case of a grid. */
#ifdef __SANITIZE_ADDRESS__
enum { LEAN = 1 };
#else
enum { LEAN = 0 };
#endif

static cpa_device *device;
static cpa_stream *stream;

/* How a cache holds its numbers: dtype, scale of the tensor, and scales of heads: 0 none, 1 one, 2 one for each. */
typedef struct cache_kind {
    cpa_dtype dtype;
    float scale;
    int32_t scales;
} cache_kind;
static const cache_kind KINDS[] = {{CPA_F32, 0, 0},      {CPA_BF16, 0, 0},         {CPA_F16, 0, 0},
                                   {CPA_FP8_E4M3, 0, 0}, {CPA_FP8_E4M3, 0.25f, 0}, {CPA_FP8_E4M3, 0, 1},
                                   {CPA_INT8, 0, 0},     {CPA_FP8_E4M3, 0, 2}};
enum { N_KINDS = sizeof KINDS / sizeof KINDS[0] };

static const float SCALES[2][8] = {{0.5f, 0.02f, 0.1f, 0.03f, 0.25f, 0.01f, 0.3f, 0.04f},
                                   {0.25f, 0.6f, 0.07f, 0.2f, 0.015f, 0.11f, 0.05f, 0.9f}};

static float element(int64_t token, int head, int d, int side) {
    return sinf((float)(token * 131 + head * 17 + d * 3 + side) * 0.37f) * (d == 1 ? 30.0f : 1.0f);
}

/* ---- kv_write, kv_copy, kv_pack ---- */

enum { HEADS = 8, TOKENS = 42 };

typedef struct cache_case {
    cache_kind kind;
    cpa_kv_layout layout;
    int32_t dim, block_size;
    int64_t blocks;
} cache_case;

/* Two caches of a case, all poison, the first with the tokens at `slots` of its pool stored element by element. */
static void make_caches(const cache_case *c, const int64_t *slots, cpa_dtype from, cpa_kv_fixture *want,
                        cpa_kv_fixture *got) {
    const cpa_kv_view view = {.dtype = c->kind.dtype,
                              .block_size = c->block_size,
                              .num_blocks = c->blocks,
                              .kv_heads = HEADS,
                              .k_dim = c->dim,
                              .v_dim = c->dim,
                              .k_scale = c->kind.scale,
                              .v_scale = c->kind.scale * 2,
                              .n_scales = c->kind.scales == 2 ? HEADS : c->kind.scales,
                              .k_scales = c->kind.scales ? SCALES[0] : NULL,
                              .v_scales = c->kind.scales ? SCALES[1] : NULL};
    cpa_kv_fixture_init_layout(want, view, c->layout);
    if (got) cpa_kv_fixture_init_layout(got, view, c->layout);
    for (int64_t t = 0; slots && t < TOKENS; t++) {
        for (int h = 0; h < HEADS && slots[t] >= 0; h++) {
            float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
            for (int d = 0; d < c->dim; d++) {
                k[d] = cpa_reference_round(element(t, h, d, 0), from);
                v[d] = cpa_reference_round(element(t, h, d, 1), from);
            }
            cpa_kv_fixture_store(want, slots[t] / c->block_size, slots[t] % c->block_size, h, k, v);
        }
    }
}

static int same_pools(const cpa_kv_fixture *a, const cpa_kv_fixture *b) {
    return memcmp(a->view.k, b->view.k, (size_t)a->k_bytes) == 0 &&
           memcmp(a->view.v, b->view.v, (size_t)a->v_bytes) == 0;
}

/* The pool on the device, with the scales of heads. */
static cpa_kv_view upload(const cpa_kv_fixture *f) {
    cpa_kv_view view = cpa_kv_fixture_upload(f, stream);
    if (view.n_scales) {
        view.k_scales = cpa_test_upload(stream, SCALES[0], sizeof SCALES[0]);
        view.v_scales = cpa_test_upload(stream, SCALES[1], sizeof SCALES[1]);
    }
    return view;
}

static void free_view(const cpa_kv_view *view) {
    cpa_test_free(stream, (void *)(uintptr_t)view->k_scales);
    cpa_test_free(stream, (void *)(uintptr_t)view->v_scales);
    cpa_kv_view_free(view, stream);
}

/* Some of the pool's slots in no order, and none for every seventh token. */
static void choose_slots(const cache_case *c, int64_t *slots) {
    const int64_t n = c->blocks * c->block_size;
    for (int64_t t = 0; t < TOKENS; t++) slots[t] = t % 7 == 3 ? -1 : (t * 37 + 5) % n;
}

static int writes_where_the_layout_says(const cache_case *c, cpa_dtype from) {
    int64_t slots[TOKENS];
    cpa_kv_fixture want, got;
    const int64_t n = TOKENS * HEADS * (int64_t)c->dim, bytes = cpa_dtype_bytes(from);
    char *rows[2] = {malloc((size_t)(n * bytes)), malloc((size_t)(n * bytes))};
    choose_slots(c, slots);
    make_caches(c, slots, from, &want, &got);
    for (int64_t i = 0; i < n; i++) {
        for (int side = 0; side < 2; side++) {
            const float x = element(i / (HEADS * c->dim), (int)(i / c->dim % HEADS), (int)(i % c->dim), side);
            cpa_narrow(rows[side] + i * bytes, &x, from, 1);
        }
    }
    const cpa_kv_view view = upload(&got);
    cpa_kv_write_args args = {.size = sizeof args, .tokens = TOKENS, .dtype = from, .kv = view};
    void *k = cpa_test_upload(stream, rows[0], n * bytes), *v = cpa_test_upload(stream, rows[1], n * bytes);
    int64_t *mapping = cpa_test_upload(stream, slots, sizeof slots);
    args.k = k, args.v = v, args.slot_mapping = mapping;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(&got, &view, stream);
    const int same = same_pools(&want, &got);
    cpa_test_free(stream, mapping);
    cpa_test_free(stream, v);
    cpa_test_free(stream, k);
    free_view(&view);
    cpa_kv_fixture_destroy(&got);
    cpa_kv_fixture_destroy(&want);
    free(rows[0]);
    free(rows[1]);
    return same;
}

static void the_peers_grid_of_writes_lands_byte_for_byte(void) {
    static const int32_t dims[] = {64, 80, 256}, block_sizes[] = {8, 16, 32};
    int cases = 0, wrong = 0;
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_KINDS * 9 * CPA_DTYPE_COUNT * 2; i++) {
        const int64_t blocks = !cpa_test_promises_bits() && i / 2 % 9 == i / 54 ? 1024 : 12;
        const cache_case c = {KINDS[i / 54], i % 2 ? CPA_TOKEN_MAJOR : CPA_VLLM_X, dims[i / 2 % 3],
                              block_sizes[i / 6 % 3], blocks};
        const cpa_dtype from = (cpa_dtype)(i / 18 % 3);
        if (c.layout == CPA_TOKEN_MAJOR && c.kind.scales == 0) continue; /* test_kv and test_quant have them */
        if (LEAN && i / 2 % 2) continue;
        const int good = writes_where_the_layout_says(&c, from);
        if (!good && ++wrong < 5)
            printf("  %s into %s, layout %d, dim %d, blocks of %d\n", cpa_dtype_name(from),
                   cpa_dtype_name(c.kind.dtype), (int)c.layout, c.dim, c.block_size);
        cases++;
    }
    printf("  %d cases\n", cases);
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_device_close(device, stream);
}

static void blocks_are_copied_and_packed_as_they_lie(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int kind = 0; kind < N_KINDS; kind++) {
        const cache_case c = {KINDS[kind], CPA_VLLM_X, 32, 16, 6};
        /* 16 tokens of block 4, which become blocks 1 of the copy and 2 of the packed ones, and 10 of block 1. */
        int64_t slots[TOKENS], copied[TOKENS], packed[TOKENS];
        cpa_kv_fixture src, want[2], got[2];
        for (int64_t t = 0; t < TOKENS; t++) {
            slots[t] = t < 16 ? 64 + t : t < 32 ? t : -1;
            copied[t] = t < 16 ? 16 + t : -1;
            packed[t] = t < 16 ? 32 + t : t < 26 ? 48 + t - 16 : -1;
        }
        make_caches(&c, slots, CPA_F32, &src, NULL);
        make_caches(&c, copied, CPA_F32, &want[0], &got[0]);
        make_caches(&c, packed, CPA_F32, &want[1], &got[1]);
        const cpa_kv_view from = upload(&src);
        const int64_t pairs[1][2] = {{4, 1}};
        const int32_t table[3] = {INT32_MAX, 4, 1};
        const cpa_kv_range range = {.table = 0, .first = 16, .count = 26, .dst_block = 2};
        for (int way = 0; way < 2; way++) {
            cpa_kv_view to = upload(&got[way]);
            const cpa_kv_view own = to;
            to.k_scales = own.v_scales, to.v_scales = own.k_scales; /* bits are copied, whatever they stand for */
            cpa_kv_copy_args copy = {sizeof copy, from, to, pairs, 1};
            cpa_kv_pack_args pack = {sizeof pack, from, to, table, 3, &range, 1};
            CU_ASSERT_EQUAL(way ? cpa_kv_pack(&pack, stream) : cpa_kv_copy(&copy, stream), CPA_OK);
            cpa_kv_fixture_download(&got[way], &to, stream);
            CU_ASSERT(same_pools(&want[way], &got[way]));
            free_view(&own);
            cpa_kv_fixture_destroy(&want[way]);
            cpa_kv_fixture_destroy(&got[way]);
        }
        free_view(&from);
        cpa_kv_fixture_destroy(&src);
    }
    cpa_test_device_close(device, stream);
}

/* ---- kv_convert ---- */

/* Two blocks of every form into every form; what no pair names stays poison. On the host and on a device the same bytes
 * are expected: those of storing what the source holds. */
static void any_form_becomes_any_other(void) {
    static const int32_t dims[][2] = {{32, 16}, {96, 256}, {64, 7}};
    static const int32_t block_sizes[] = {16, 64, 8};
    int cases = 0, wrong = 0;
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_KINDS * N_KINDS * 9 * 3; i++) {
        const int at = i / 3, layouts = at % 9, shape = i % 3;
        const cache_case forms[2] = {{KINDS[at / 9 % N_KINDS], (cpa_kv_layout)(layouts % 3), 0, 0, 0},
                                     {KINDS[at / 9 / N_KINDS], (cpa_kv_layout)(layouts / 3), 0, 0, 0}};
        if ((cpa_test_promises_bits() && shape != (i / 27) % 3) || (LEAN && at % 2)) continue;
        cpa_kv_fixture f[3]; /* source, expected, converted */
        for (int j = 0; j < 3; j++) {
            const cache_case *c = &forms[j > 0];
            const cpa_kv_view view = {.dtype = c->kind.dtype,
                                      .block_size = block_sizes[shape],
                                      .num_blocks = 4,
                                      .kv_heads = 2,
                                      .k_dim = dims[shape][0],
                                      .v_dim = dims[shape][1],
                                      .k_scale = c->kind.scale,
                                      .v_scale = c->kind.scale,
                                      .n_scales = c->kind.scales,
                                      .k_scales = c->kind.scales ? SCALES[0] : NULL,
                                      .v_scales = c->kind.scales ? SCALES[1] : NULL};
            cpa_kv_fixture_init_layout(&f[j], view, c->layout);
        }
        const int64_t pairs[2][2] = {{2, 0}, {1, 3}};
        for (int64_t t = 0; t < 2 * block_sizes[shape] * 2; t++) {
            const int64_t pair = t / 2 / block_sizes[shape], offset = t / 2 % block_sizes[shape];
            const int head = (int)(t % 2);
            float k[CPA_MAX_HEAD_DIM], v[CPA_MAX_HEAD_DIM];
            for (int d = 0; d < dims[shape][0]; d++) k[d] = element(t, head, d, 0);
            for (int d = 0; d < dims[shape][1]; d++) v[d] = element(t, head, d, 1);
            cpa_kv_fixture_store(&f[0], pairs[pair][0], offset, head, k, v);
            cpa_kv_fixture_load(&f[0], pairs[pair][0], offset, head, k, v);
            cpa_kv_fixture_store(&f[1], pairs[pair][1], offset, head, k, v);
        }
        cpa_kv_view src = upload(&f[0]), dst = upload(&f[2]);
        const float *own[2] = {dst.k_scales, dst.v_scales};
        if (src.n_scales && src.n_scales == dst.n_scales) dst.k_scales = src.k_scales, dst.v_scales = src.v_scales;
        const cpa_kv_convert_args args = {sizeof args, src, dst, pairs, 2};
        CU_ASSERT_EQUAL(cpa_kv_convert(&args, stream), CPA_OK);
        cpa_kv_fixture_download(&f[2], &dst, stream);
        /* Equal forms keep their bits; a row's scale is not that of its rounded elements. */
        const int exact = forms[0].kind.dtype != forms[1].kind.dtype || forms[0].kind.scale != forms[1].kind.scale ||
                          forms[0].kind.scales != forms[1].kind.scales || forms[0].kind.scale || forms[0].kind.scales ||
                          !cpa_dtype_is_quantised(forms[0].kind.dtype);
        if (exact && !same_pools(&f[1], &f[2]) && ++wrong < 6)
            printf("  %s, layout %d, to %s, layout %d, widths %d and %d\n", cpa_dtype_name(forms[0].kind.dtype),
                   (int)forms[0].layout, cpa_dtype_name(forms[1].kind.dtype), (int)forms[1].layout, dims[shape][0],
                   dims[shape][1]);
        for (int64_t t = 0; !exact && t < 2 * block_sizes[shape] * 2; t++) {
            const int64_t pair = t / 2 / block_sizes[shape], offset = t / 2 % block_sizes[shape];
            float k[2][CPA_MAX_HEAD_DIM], v[2][CPA_MAX_HEAD_DIM];
            for (int j = 0; j < 2; j++)
                cpa_kv_fixture_load(&f[2 * j], pairs[pair][j], offset, (int)(t % 2), k[j], v[j]);
            wrong += memcmp(k[0], k[1], (size_t)dims[shape][0] * 4) != 0 ||
                     memcmp(v[0], v[1], (size_t)dims[shape][1] * 4) != 0;
        }
        cases++;
        free_view(&src);
        dst.k_scales = own[0], dst.v_scales = own[1];
        free_view(&dst);
        for (int j = 0; j < 3; j++) cpa_kv_fixture_destroy(&f[j]);
    }
    printf("  %d cases\n", cases);
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_device_close(device, stream);
}

/* ---- attend ---- */

/* Rows that disagree with float64; on the host a cache of rows in one piece has to give the same bits too. */
static int64_t wrong_rows(const cpa_attend_case *shape) {
    cpa_attend_case rows = *shape;
    const int layouts = shape->layout == CPA_VLLM_X && cpa_test_promises_bits() ? 2 : 1;
    cpa_attend_fixture fixtures[2];
    cpa_attend_result results[2];
    int64_t wrong = 0;
    rows.layout = CPA_TOKEN_MAJOR;
    for (int i = 0; i < layouts; i++) {
        cpa_attend_fixture_init(&fixtures[i], i ? &rows : shape, 2);
        cpa_attend_result_init(&results[i], &fixtures[i]);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixtures[i], 0, &results[i]), CPA_OK);
    }
    wrong += cpa_attend_fixture_check(&fixtures[0], 0, fixtures[0].rows / 24 + 1, &results[0], NULL);
    if (layouts == 2) wrong += !cpa_attend_result_same(&results[0], &results[1]);
    for (int i = 0; i < layouts; i++) {
        cpa_attend_result_destroy(&results[i]);
        cpa_attend_fixture_destroy(&fixtures[i]);
    }
    return wrong;
}

static cpa_attend_case attend_case(const cache_kind *kind, cpa_kv_layout layout, int32_t q_heads, int32_t kv_heads,
                                   int32_t dim, int32_t block_size, int64_t length, int64_t rows) {
    cpa_attend_case c = {.kv_dtype = kind->dtype,
                         .q_dtype = cpa_dtype_is_quantised(kind->dtype) ? CPA_BF16 : kind->dtype,
                         .q_heads = q_heads,
                         .kv_heads = kv_heads,
                         .k_dim = dim,
                         .v_dim = dim,
                         .block_size = block_size,
                         .cp_size = 1,
                         .interleave = block_size,
                         .start = length - rows,
                         .length = length,
                         .mask = {.causal = 1},
                         .layout = layout,
                         .k_scale = kind->scale,
                         .v_scale = kind->scale,
                         .n_scales = kind->scales == 2 ? kv_heads : kind->scales};
    return c;
}

static void report(int64_t wrong, const cpa_attend_case *c, int *failed) {
    if (wrong && ++*failed < 6)
        printf("  %lld wrong: cache of %s, layout %d, %d/%d heads of %d, blocks of %d, %lld tokens, %lld rows\n",
               (long long)wrong, cpa_dtype_name(c->kv_dtype), (int)c->layout, c->q_heads, c->kv_heads, c->k_dim,
               c->block_size, (long long)c->length, (long long)(c->length - c->start));
}

/* A sequence of up to 4321 tokens; on the host of 400. */
static void the_peers_grid_of_decodes_equals_float64(void) {
    static const int32_t heads[][2] = {{32, 8}, {40, 40}, {64, 8}}, dims[] = {64, 128}, block_sizes[] = {16, 32, 8};
    static const int kinds[] = {1, 2, 0, 4};
    int cases = 0, failed = 0;
    for (int i = 0; i < 3 * 2 * 3 * 4; i++) {
        const int h = i % 3, d = i / 3 % 2, b = i / 6 % 3;
        if (LEAN && i % 2) continue;
        const int64_t length = 1 + i * 1871 % (cpa_test_promises_bits() ? 400 : 4321);
        const cpa_attend_case c = attend_case(&KINDS[kinds[i / 18]], CPA_VLLM_X, heads[h][0], heads[h][1], dims[d],
                                              block_sizes[b], length, 1);
        report(wrong_rows(&c), &c, &failed);
        cases++;
    }
    printf("  %d cases\n", cases);
    CU_ASSERT_EQUAL(failed, 0);
}

/* Of all widths, in few rows and in many, over several splits, windows and sinks among them. */
static void every_width_and_dtype_is_attended(void) {
    static const int32_t dims[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
    int cases = 0, failed = 0;
    for (int i = 0; i < 9 * N_KINDS * 2; i++) {
        const cache_kind *kind = &KINDS[i / 18];
        const int32_t dim = dims[i % 9], block_size = 8 << (i % 4);
        if (dim % (int32_t)(16 / cpa_dtype_bytes(kind->dtype)) != 0 || (LEAN && i % 2)) continue;
        for (int layout = kind->scales ? CPA_TOKEN_MAJOR : CPA_VLLM_X; layout <= CPA_VLLM_X; layout += 2) {
            cpa_attend_case c =
                attend_case(kind, (cpa_kv_layout)layout, 8, 2, dim, block_size, 270 + i % 40, i / 9 % 2 ? 90 : 2);
            if (i % 4 == 1) c.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 100};
            report(wrong_rows(&c), &c, &failed);
            cases++;
        }
    }
    printf("  %d cases\n", cases);
    CU_ASSERT_EQUAL(failed, 0);
}

static void widths_of_keys_and_values_may_differ(void) {
    static const int32_t dims[][2] = {{64, 128}, {128, 64}, {112, 32}};
    int cases = 0, failed = 0;
    for (int i = 0; i < N_KINDS * 9; i++) {
        const cache_kind *kind = &KINDS[i / 9];
        if (kind->dtype == CPA_INT8 || (LEAN && i % 2)) continue;
        cpa_attend_case c = attend_case(kind, CPA_VLLM_X, 8, 2, dims[i % 3][0], 16 << i / 3 % 3, 300 + i, 2);
        c.v_dim = dims[i % 3][1];
        report(wrong_rows(&c), &c, &failed);
        cases++;
    }
    printf("  %d cases\n", cases);
    CU_ASSERT_EQUAL(failed, 0);
}

/* ---- what is refused ---- */

static void wrong_views_are_named(void) {
    float memory[4096] = {0};
    const int64_t slot = 0;
    static const struct {
        const char *what;
        cpa_kv_view view;
    } wrong[] = {
        {"layout is 3, expected 0, 1 or 2", {.layout = (cpa_kv_layout)3}},
        {"k_dim is 8, expected a multiple of 16", {.layout = CPA_VLLM_X, .dtype = CPA_FP8_E4M3}},
        {"strides of key tokens 8", {.layout = CPA_VLLM_X, .k_token_stride = 8}},
        {"expected multiples of 16 bytes", {.layout = CPA_VLLM_X, .k_block_stride = 130}},
        {"n_scales is 3, expected 1 or the 2 KV heads", {.dtype = CPA_FP8_E4M3, .n_scales = 3}},
        {"expected fp8_e4m3 or fp8_e5m2, and 0", {.dtype = CPA_BF16, .n_scales = 1}},
        {"k_scale is 0.5, expected fp8_e4m3 or fp8_e5m2, and 0",
         {.dtype = CPA_FP8_E4M3, .n_scales = 1, .k_scale = 0.5f, .v_scale = 0.5f}},
    };
    cpa_test_device_open(1, &device, &stream);
    float *pool = cpa_test_upload(stream, memory, sizeof memory);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cpa_kv_view view = wrong[i].view;
        view.k = view.v = pool;
        view.block_size = 8, view.num_blocks = 2, view.kv_heads = 2, view.k_dim = view.v_dim = 8;
        if (view.n_scales) view.k_scales = view.v_scales = pool;
        const cpa_kv_write_args args = {
            .size = sizeof args, .tokens = 1, .k = pool, .v = pool, .slot_mapping = &slot, .kv = view};
        CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
        if (!strstr(cpa_stream_error(stream), wrong[i].what)) printf("  %s\n", cpa_stream_error(stream));
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), wrong[i].what));
    }
    cpa_test_free(stream, pool);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"the peer's grid of writes lands byte for byte", the_peers_grid_of_writes_lands_byte_for_byte},
    {"blocks are copied and packed as they lie", blocks_are_copied_and_packed_as_they_lie},
    {"any form becomes any other", any_form_becomes_any_other},
    {"the peer's grid of decodes equals float64", the_peers_grid_of_decodes_equals_float64},
    {"every width and dtype is attended", every_width_and_dtype_is_attended},
    {"widths of keys and values may differ", widths_of_keys_and_values_may_differ},
    {"wrong views are named", wrong_views_are_named},
};
CPA_DEVICE_TEST_MAIN("layouts", tests)
