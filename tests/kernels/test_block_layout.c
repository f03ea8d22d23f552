/* Blocks as bytes with sections: sections lie apart and fill a block, rows that are written land in theirs, attend reads
 * nothing between them, and copies of bytes keep them all. */
#include <stdlib.h>
#include <string.h>

#include "kernels/block_layout.h"
#include "kernels/operators.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* Every dtype but that of latents alone, with scales of rows and of the tensor, in every layout and many sizes of blocks
 * and heads. */
enum { FORMS = CPA_FP8_T128 + 1, LAYOUTS = 3, BLOCK_SIZES = 5, HEADS = 3, WIDTHS = 4 };
enum { SHAPES = FORMS * LAYOUTS * BLOCK_SIZES * HEADS * WIDTHS };

static cpa_block_layout layout_of(int i) {
    static const int32_t block_sizes[BLOCK_SIZES] = {1, 2, 8, 16, 64}, heads[HEADS] = {1, 3, 8};
    static const int32_t widths[WIDTHS][2] = {{64, 32}, {16, 7}, {48, 80}, {5, 3}};
    const int form = i % FORMS, width = i / FORMS % WIDTHS;
    cpa_attention_shape shape = {.kv_dtype = form < CPA_FP8_T128 ? (cpa_dtype)form : CPA_FP8_E4M3,
                                 .layout = (cpa_kv_layout)(i / (FORMS * WIDTHS) % LAYOUTS),
                                 .kv_heads = heads[i / (FORMS * WIDTHS * LAYOUTS) % HEADS],
                                 .k_dim = widths[width][0],
                                 .v_dim = widths[width][1]};
    shape.q_heads = shape.kv_heads;
    if (form == CPA_FP8_T128) shape.k_scale = shape.v_scale = 0.5f;
    /* Keys of that layout are whole runs of 16 bytes. */
    if (shape.layout == CPA_VLLM_X && shape.k_dim == 5) shape.k_dim = 16;
    return cpa_block_layout_of(&shape, block_sizes[i / (FORMS * WIDTHS * LAYOUTS * HEADS)]);
}

static void sections_lie_apart_and_fill_the_block(void) {
    for (int i = 0; i < SHAPES; i++) {
        const cpa_block_layout layout = layout_of(i);
        int64_t end = 0;
        CU_ASSERT_EQUAL_FATAL(layout.n_sections, 2);
        for (int s = 0; s < layout.n_sections; s++) {
            const cpa_block_section *section = &layout.sections[s];
            const int64_t rows = (int64_t)section->heads * layout.block_size;
            CU_ASSERT_EQUAL(section->kind, (cpa_section_kind)s);
            CU_ASSERT_EQUAL(section->at % CPA_SECTION_ALIGNMENT, 0);
            CU_ASSERT(section->at >= end && section->at < end + CPA_SECTION_ALIGNMENT);
            CU_ASSERT(section->bytes >= rows * (section->row_bytes + section->scale_bytes));
            end = section->at + section->bytes;
        }
        CU_ASSERT_EQUAL(layout.bytes % CPA_SECTION_ALIGNMENT, 0);
        CU_ASSERT(layout.bytes >= end && layout.bytes < end + CPA_SECTION_ALIGNMENT);
    }
}

/* Latents are one section, whose first columns are the values. */
static void latents_are_one_section(void) {
    const cpa_attention_shape shape = {.q_heads = 128,
                                       .kv_heads = 1,
                                       .k_dim = 576,
                                       .v_dim = 512,
                                       .v_in_k = 1,
                                       .dtype = CPA_BF16,
                                       .kv_dtype = CPA_BF16};
    const cpa_block_layout layout = cpa_block_layout_of(&shape, 64);
    char memory[16];
    CU_ASSERT_EQUAL(layout.n_sections, 1);
    CU_ASSERT_EQUAL(layout.sections[0].kind, CPA_SECTION_LATENTS);
    CU_ASSERT_EQUAL(layout.sections[0].row_bytes, 1152);
    CU_ASSERT_EQUAL(layout.bytes, 64 * 1152);
    CU_ASSERT_PTR_NULL(cpa_block_section_of(&layout, CPA_SECTION_VALUES));
    const cpa_kv_view view = cpa_block_layout_view(&layout, memory, 1, 0);
    CU_ASSERT_PTR_EQUAL(view.v, view.k);
}

/* A poisoned pool of the blocks of a layout, on the host, after a kv_write of the keys and values of all tokens of block
 * 1 of 3. free() it. */
static char *write_block(const cpa_block_layout *layout, uint8_t poison, float key, float value) {
    enum { BLOCKS = 3 };
    const cpa_attention_shape *shape = &layout->shape;
    const int64_t bytes = BLOCKS * layout->bytes, tokens = layout->block_size;
    const int64_t n[2] = {tokens * shape->kv_heads * shape->k_dim, tokens * shape->kv_heads * shape->v_dim};
    char *pool = memset(malloc((size_t)bytes), poison, (size_t)bytes);
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    void *rows[2];
    for (int64_t i = 0; i < tokens; i++) slots[i] = tokens + i;
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        float *x = malloc((size_t)n[part] * sizeof *x);
        for (int64_t i = 0; i < n[part]; i++) x[i] = (part == CPA_KEYS ? key : value) * (float)(i % 5 + 1);
        rows[part] = cpa_test_upload(stream, x, n[part] * (int64_t)sizeof *x);
        free(x);
    }
    void *on_device = cpa_test_upload(stream, pool, bytes), *device_slots = cpa_test_upload(stream, slots, tokens * 8);
    const cpa_kv_write_args args = {.size = sizeof args,
                                    .tokens = tokens,
                                    .k = rows[CPA_KEYS],
                                    .v = rows[CPA_VALUES],
                                    .slot_mapping = device_slots,
                                    .kv = cpa_block_layout_view(layout, on_device, BLOCKS, 0)};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_test_download(stream, pool, on_device, bytes);
    cpa_test_free(stream, device_slots);
    cpa_test_free(stream, on_device);
    cpa_test_free(stream, rows[CPA_VALUES]);
    cpa_test_free(stream, rows[CPA_KEYS]);
    free(slots);
    return pool;
}

/* What two poisons have in common was written: so many bytes as rows and scales have, in the sections of block 1 alone.
 * Other values change the section of values alone. */
static void rows_land_in_their_sections(void) {
    cpa_test_device_open(1, &device, &stream);
    for (int i = 0; i < SHAPES; i++) {
        const cpa_block_layout layout = layout_of(i);
        char *a = write_block(&layout, 0xa5, 1, 3), *b = write_block(&layout, 0x5a, 1, 3),
             *c = write_block(&layout, 0xa5, 1, -3);
        int64_t written[2] = {0, 0}, elsewhere = 0, strays = 0;
        for (int64_t at = 0; at < 3 * layout.bytes; at++) {
            int inside = -1;
            for (int s = 0; s < layout.n_sections; s++) {
                const int64_t in_section = at - layout.bytes - layout.sections[s].at;
                if (in_section >= 0 && in_section < layout.sections[s].bytes) inside = s;
            }
            if (a[at] == b[at] && inside >= 0) written[inside]++;
            elsewhere += a[at] == b[at] && inside < 0;
            strays += a[at] != c[at] && inside != CPA_VALUES;
        }
        CU_ASSERT_EQUAL(elsewhere + strays, 0);
        for (int s = 0; s < layout.n_sections; s++) {
            const cpa_block_section *section = &layout.sections[s];
            CU_ASSERT_EQUAL(written[s],
                            (int64_t)section->heads * layout.block_size * (section->row_bytes + section->scale_bytes));
        }
        free(c);
        free(b);
        free(a);
    }
    cpa_test_device_close(device, stream);
}

/* The same bits over pools of keys and of values, and over blocks of both with poison between the sections. */
static void attend_reads_sections_alone(void) {
    static const int32_t widths[][2] = {{64, 64}, {128, 128}, {192, 128}, {16, 24}, {5, 3}};
    for (int i = 0; i < (int)(sizeof widths / sizeof *widths) * FORMS * LAYOUTS * 3; i++) {
        const int form = i % FORMS, layout = i / FORMS % LAYOUTS, size = i / (FORMS * LAYOUTS) % 3;
        const int32_t *width = widths[i / (FORMS * LAYOUTS * 3)];
        cpa_attend_case shape = {.q_dtype = form < CPA_DTYPE_COUNT ? (cpa_dtype)form : CPA_BF16,
                                 .kv_dtype = form < CPA_FP8_T128 ? (cpa_dtype)form : CPA_FP8_E4M3,
                                 .q_heads = 6,
                                 .kv_heads = 3,
                                 .k_dim = width[0],
                                 .v_dim = width[1],
                                 .block_size = size == 0   ? 1
                                               : size == 1 ? 16
                                                           : 64,
                                 .cp_size = 1,
                                 .interleave = 64,
                                 .start = i % 2 ? 40 : 149, /* prefill, or decode */
                                 .length = 150,
                                 .mask = {.causal = 1},
                                 .layout = (cpa_kv_layout)layout};
        if (layout == CPA_VLLM_X && (width[0] == 5 || shape.block_size == 1)) continue;
        if (form == CPA_FP8_T128) shape.k_scale = shape.v_scale = 0.5f;
        cpa_attend_fixture f;
        cpa_attend_result apart, together;
        cpa_attend_fixture_init(&f, &shape, 2);
        cpa_attend_result_init(&apart, &f);
        cpa_attend_result_init(&together, &f);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &apart), CPA_OK);
        const cpa_kv_view pools = f.device_kv;
        const cpa_attention_shape spec = {.q_heads = 6,
                                          .kv_heads = 3,
                                          .k_dim = width[0],
                                          .v_dim = width[1],
                                          .dtype = shape.q_dtype,
                                          .kv_dtype = shape.kv_dtype,
                                          .layout = pools.layout,
                                          .k_scale = shape.k_scale,
                                          .v_scale = shape.v_scale};
        const cpa_block_layout blocks = cpa_block_layout_of(&spec, shape.block_size);
        const int64_t bytes = pools.num_blocks * blocks.bytes;
        void *poison = cpa_test_poisoned(bytes, 1), *memory = cpa_test_upload(f.stream, poison, bytes);
        int64_t(*pairs)[2] = malloc((size_t)pools.num_blocks * sizeof *pairs);
        for (int64_t b = 0; b < pools.num_blocks; b++) pairs[b][0] = pairs[b][1] = b;
        f.device_kv = cpa_block_layout_view(&blocks, memory, pools.num_blocks, 0);
        const cpa_kv_copy_args copy = {sizeof copy, pools, f.device_kv, (const int64_t(*)[2])pairs, pools.num_blocks};
        CU_ASSERT_EQUAL(cpa_kv_copy(&copy, f.stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&f, 0, &together), CPA_OK);
        CU_ASSERT(cpa_attend_result_same(&apart, &together));
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 7, &together, NULL), 0);
        f.device_kv = pools;
        free(pairs);
        cpa_test_free(f.stream, memory);
        free(poison);
        cpa_attend_result_destroy(&together);
        cpa_attend_result_destroy(&apart);
        cpa_attend_fixture_destroy(&f);
    }
}

static void a_view_of_other_bytes_does_not_match(void) {
    static char memory[1 << 16];
    const cpa_attention_shape shape = {
        .q_heads = 2, .kv_heads = 2, .k_dim = 16, .v_dim = 8, .dtype = CPA_BF16, .kv_dtype = CPA_BF16};
    const cpa_block_layout layout = cpa_block_layout_of(&shape, 16);
    const cpa_kv_view same = cpa_block_layout_view(&layout, memory, 4, 0);
    cpa_kv_view other = same;
    CU_ASSERT(cpa_block_layout_matches(&layout, &same));
    other = cpa_block_layout_view(&layout, memory, 4, layout.bytes + 64);
    CU_ASSERT(cpa_block_layout_matches(&layout, &other));
    other = cpa_block_layout_view(&layout, memory, 4, layout.bytes + 8);
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = cpa_block_layout_view(&layout, memory + 2, 4, 0);
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.v = (char *)same.v + 16;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.v_block_stride += 8;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.k_block_stride = other.v_block_stride = layout.bytes / 4;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.dtype = CPA_F16;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.block_size = 8;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.k_head_stride = 16 * 16, other.k_token_stride = 16;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    other = same, other.v_token_stride += 8;
    CU_ASSERT(!cpa_block_layout_matches(&layout, &other));
    /* Blocks that are filled up behind their last row: the last of a view need not be. */
    const cpa_attention_shape odd = {.q_heads = 1, .kv_heads = 1, .k_dim = 16, .v_dim = 3, .kv_dtype = CPA_BF16};
    const cpa_block_layout filled = cpa_block_layout_of(&odd, 1);
    other = cpa_block_layout_view(&filled, memory, 4, 0);
    CU_ASSERT(!cpa_block_layout_matches(&filled, &other));
}

/* Blocks of three layers, of one vector up to more than a CTA takes, farther apart than they are long on both sides, and
 * more of them than go into one launch. */
static void copied_blocks_keep_every_byte(void) {
    static const struct {
        int64_t bytes, pairs;
    } cases[] = {{16, 1}, {48, 2500}, {4112, 70}, {65536, 3}, {65552, 3}, {200000, 2}};
    enum { LAYERS = 3, GAP = 32 };
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t bytes = cases[i].bytes, n = cases[i].pairs;
        const cpa_block_place at = {NULL, bytes + GAP, (bytes + GAP) * (n + 1)},
                              to = {NULL, LAYERS * bytes + GAP, bytes};
        const int64_t src_bytes = LAYERS * at.layer_stride, dst_bytes = (n + 1) * to.stride;
        char *src = malloc((size_t)src_bytes), *dst = memset(malloc((size_t)dst_bytes), 0x5a, (size_t)dst_bytes);
        char *want = memcpy(malloc((size_t)dst_bytes), dst, (size_t)dst_bytes);
        int64_t(*pairs)[2] = malloc((size_t)n * sizeof *pairs);
        for (int64_t b = 0; b < src_bytes; b++) src[b] = (char)(b * 7 + b / 253);
        for (int64_t p = 0; p < n; p++) {
            pairs[p][0] = n - p, pairs[p][1] = p;
            for (int layer = 0; layer < LAYERS; layer++)
                memcpy(want + p * to.stride + layer * to.layer_stride,
                       src + (n - p) * at.stride + layer * at.layer_stride, (size_t)bytes);
        }
        char *device_src = cpa_test_upload(stream, src, src_bytes),
             *device_dst = cpa_test_upload(stream, dst, dst_bytes);
        cpa_copy_blocks_args args = {
            .src = at, .dst = to, .bytes = bytes, .layers = LAYERS, .pairs = (const int64_t(*)[2])pairs, .n_pairs = n};
        args.src.first = device_src, args.dst.first = device_dst;
        CU_ASSERT_EQUAL(device->operators->copy_blocks(&args, stream), CPA_OK);
        memset(pairs, 0xff, (size_t)n * sizeof *pairs);
        cpa_test_download(stream, dst, device_dst, dst_bytes);
        CU_ASSERT(memcmp(dst, want, (size_t)dst_bytes) == 0);
        cpa_test_free(stream, device_dst);
        cpa_test_free(stream, device_src);
        free(pairs);
        free(want);
        free(dst);
        free(src);
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"sections lie apart and fill the block", sections_lie_apart_and_fill_the_block},
    {"latents are one section", latents_are_one_section},
    {"rows land in their sections", rows_land_in_their_sections},
    {"attend reads sections alone", attend_reads_sections_alone},
    {"a view of other bytes does not match", a_view_of_other_bytes_does_not_match},
    {"copied blocks keep every byte", copied_blocks_keep_every_byte},
};
CPA_DEVICE_TEST_MAIN("block_layout", tests)
