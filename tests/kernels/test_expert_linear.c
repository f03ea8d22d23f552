/* expert_linear, and linear with weights in FP8, against float64; on the host against linear, to the last bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/experts.h>

#include "base/convert.h"
#include "base/hash.h"
#include "kernels/host/cache/quantise.h"
#include "kernels/host/device/host.h"
#include "kernels/nn.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* The weights of all experts: of the dtype, or codes with a scale for each block or output. */
typedef enum weight_kind { PLAIN, BLOCKS, OUTPUTS } weight_kind;

/* Where places come from: random experts for top_k choices of each token, or all of them the same one. */
typedef struct shape {
    int64_t tokens;
    int32_t experts, top_k, inputs, outputs;
    cpa_dtype dtype, out_dtype;
    weight_kind kind;
    int gathered, strided, all_on_one;
} shape;

typedef struct product {
    shape s;
    int64_t places, spare; /* places that experts have, and those behind them */
    int32_t *offsets;      /* [experts + 1] */
    uint32_t *tokens;      /* [places + spare] */
    int32_t *expert;       /* [places] expert of each place */
    cpa_test_tensor x, weight, out;
    uint8_t *codes; /* [experts * outputs, stride of weight] */
    float *scales;  /* [experts, scale_rows, scale_columns] */
    int32_t scale_rows, scale_columns;
    void *device_codes, *device_scales, *device_offsets, *device_tokens;
    cpa_expert_linear_args args;
} product;

static void *allocate(int64_t bytes) {
    void *memory = malloc((size_t)bytes + 1);
    if (!memory) abort();
    return memory;
}

/* Places in the order of experts; behind them some that nobody has, whose tokens do not exist. */
static void make_places(product *p) {
    const shape *s = &p->s;
    const int64_t choices = s->tokens * s->top_k;
    p->places = choices, p->spare = 5;
    p->offsets = calloc((size_t)s->experts + 1, sizeof *p->offsets);
    p->tokens = allocate((choices + p->spare) * 4);
    p->expert = allocate(choices * 4);
    int64_t place = 0;
    for (int32_t e = 0; e < s->experts; e++) {
        for (int64_t i = 0; i < choices; i++) {
            const uint64_t h = cpa_mix64((uint64_t)i * CPA_GOLDEN + (uint64_t)s->experts);
            if ((s->all_on_one ? s->experts / 2 : (int32_t)(h % (uint64_t)s->experts)) != e) continue;
            p->expert[place] = e;
            p->tokens[place] = s->gathered ? (uint32_t)(i / s->top_k) : (uint32_t)place;
            place++;
        }
        p->offsets[e + 1] = (int32_t)place;
    }
    for (int64_t i = 0; i < p->spare; i++) p->tokens[choices + i] = UINT32_MAX;
    p->device_offsets = cpa_test_upload(stream, p->offsets, (s->experts + 1) * 4);
    p->device_tokens = cpa_test_upload(stream, p->tokens, (choices + p->spare) * 4);
}

/* Codes of all numbers, and scales that differ much. */
static void make_codes(product *p) {
    const shape *s = &p->s;
    const int64_t n = s->experts * s->outputs * p->weight.stride;
    const int32_t block = 128;
    p->scale_rows = s->kind == OUTPUTS ? s->outputs : (s->outputs + block - 1) / block;
    p->scale_columns = s->kind == OUTPUTS ? 1 : (s->inputs + block - 1) / block;
    const int64_t n_scales = (int64_t)s->experts * p->scale_rows * p->scale_columns;
    p->codes = allocate(n);
    p->scales = allocate(n_scales * 4);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t code = (uint8_t)cpa_mix64((uint64_t)i + 77), nan = 0x7f;
        const int is_pad = i % p->weight.stride >= s->inputs;
        p->codes[i] = is_pad ? nan : (code & nan) == nan ? 0x38 : code;
    }
    for (int64_t i = 0; i < n_scales; i++)
        p->scales[i] = 0x1p-12f * (1 + (float)(cpa_mix64((uint64_t)i) % 1000) / 300) * (i % 5 == 2 ? 20 : 1);
    p->device_codes = cpa_test_upload(stream, p->codes, n);
    p->device_scales = cpa_test_upload(stream, p->scales, n_scales * 4);
}

static void make(product *p, const shape *s) {
    const int pad = s->strided ? 16 : 0;
    *p = (product){.s = *s};
    make_places(p);
    const int64_t x_rows = s->gathered ? s->tokens : p->places, rows = p->places + p->spare;
    p->x = cpa_test_tensor_make(stream, s->dtype, x_rows, s->inputs, s->inputs + pad, 1);
    p->weight = cpa_test_tensor_make(stream, s->dtype, (int64_t)s->experts * s->outputs, s->inputs, s->inputs + pad, 2);
    p->out = cpa_test_tensor_blank(stream, s->out_dtype, rows, s->outputs, s->outputs + pad);
    if (s->kind != PLAIN) make_codes(p);
    p->args = (cpa_expert_linear_args){
        .size = sizeof p->args,
        .experts = s->experts,
        .rows = rows,
        .inputs = s->inputs,
        .outputs = s->outputs,
        .dtype = s->dtype,
        .out_dtype = s->out_dtype,
        .offsets = p->device_offsets,
        .x = p->x.device,
        .x_rows = x_rows,
        .x_stride = p->x.stride,
        .weight = s->kind == PLAIN ? p->weight.device : p->device_codes,
        .weight_stride = p->weight.stride,
        .out = p->out.device,
        .out_stride = p->out.stride,
        .tokens = s->gathered ? p->device_tokens : NULL,
        .weight_scale = p->device_scales,
        .weight_scale_rows = p->scale_rows,
        .weight_scale_columns = p->scale_columns,
    };
}

static void destroy(product *p) {
    void *const on_device[] = {p->device_offsets, p->device_tokens, p->device_codes, p->device_scales};
    void *const own[] = {p->offsets, p->tokens, p->expert, p->codes, p->scales};
    for (int i = 0; i < 4; i++) {
        if (on_device[i]) cpa_test_free(stream, on_device[i]);
    }
    for (int i = 0; i < 5; i++) free(own[i]);
    cpa_test_tensor_free(&p->out, stream);
    cpa_test_tensor_free(&p->weight, stream);
    cpa_test_tensor_free(&p->x, stream);
}

static double weight_of(const product *p, int32_t expert, int32_t output, int32_t i) {
    const int64_t row = (int64_t)expert * p->s.outputs + output;
    if (p->s.kind == PLAIN) return (double)cpa_test_row(&p->weight, row)[i];
    const float *scales = p->scales + (int64_t)expert * p->scale_rows * p->scale_columns;
    const float scale = p->s.kind == OUTPUTS ? scales[output] : scales[output / 128 * p->scale_columns + i / 128];
    return (double)scale * (double)cpa_from_e4m3(p->codes[row * p->weight.stride + i]);
}

/* An fp32 sum of n products is off by some sqrt(n) roundings of what is summed. */
static int is_right(const product *p, int64_t place, int32_t output) {
    const float *x = cpa_test_row(&p->x, p->tokens[place]);
    double want = 0, size = 0;
    for (int32_t i = 0; i < p->s.inputs; i++) {
        const double term = (double)x[i] * weight_of(p, p->expert[place], output, i);
        want += term, size += fabs(term);
    }
    const double slack = 0x1p-23 * (2 + 0.5 * sqrt((double)p->s.inputs)) * size;
    return cpa_test_is_near(cpa_test_row(&p->out, place)[output], want, p->s.out_dtype, slack);
}

/* Results that are wrong, of about `most` that are looked at, and whatever is written behind the last place. */
static int64_t wrong_results(product *p, int64_t most) {
    const int64_t n = p->places * p->s.outputs, step = n / most + 1;
    int64_t wrong = 0;
    CU_ASSERT_EQUAL(cpa_expert_linear(&p->args, stream), CPA_OK);
    cpa_test_tensor_fetch(&p->out, stream);
    for (int64_t i = 0; i < n; i += step) wrong += !is_right(p, i / p->s.outputs, (int32_t)(i % p->s.outputs));
    for (int64_t i = 0; i < n; i++) wrong += isnan(cpa_test_row(&p->out, i / p->s.outputs)[i % p->s.outputs]);
    for (int64_t i = 0; i < p->spare * p->s.outputs; i++)
        wrong += !isnan(cpa_test_row(&p->out, p->places + i / p->s.outputs)[i % p->s.outputs]);
    return wrong + !cpa_test_tensor_pads_are_poison(&p->out);
}

static void check(const shape *s) {
    product p;
    make(&p, s);
    const int64_t wrong = wrong_results(&p, 1500);
    if (wrong)
        printf("  %lld tokens, %d experts, top %d, %d x %d, dtype %d, kind %d: %lld wrong\n", (long long)s->tokens,
               s->experts, s->top_k, s->inputs, s->outputs, (int)s->dtype, (int)s->kind, (long long)wrong);
    CU_ASSERT_EQUAL(wrong, 0);
    destroy(&p);
}

static void products_are_those_of_float64(void) {
    static const shape shapes[] = {
        {1, 1, 1, 1, 1, CPA_F32, CPA_F32, PLAIN, 0, 0, 0},
        {5, 4, 2, 17, 130, CPA_F32, CPA_F32, PLAIN, 1, 1, 0},
        {9, 3, 1, 300, 5, CPA_F16, CPA_F32, PLAIN, 0, 1, 0},
        {40, 4, 2, 1032, 264, CPA_BF16, CPA_BF16, PLAIN, 1, 1, 0},
        {70, 2, 1, 264, 136, CPA_F16, CPA_F16, PLAIN, 1, 0, 0},
        {300, 3, 1, 96, 200, CPA_BF16, CPA_BF16, PLAIN, 0, 0, 0},
        {210, 2, 1, 1032, 300, CPA_BF16, CPA_BF16, PLAIN, 1, 1, 0},
        {333, 8, 2, 64, 256, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 1},
        {9, 8, 2, 1416, 4104, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0},
        {30, 16, 4, 1032, 264, CPA_F16, CPA_F32, PLAIN, 1, 1, 0},
        {20, 8, 2, 520, 136, CPA_BF16, CPA_BF16, PLAIN, 0, 0, 1},
        {256, 2, 1, 136, 257, CPA_F16, CPA_F32, PLAIN, 1, 0, 0},
        {340, 2, 1, 8, 520, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0},
        {3, 4, 2, 7, 9, CPA_BF16, CPA_BF16, BLOCKS, 1, 0, 0},
        {20, 4, 2, 400, 264, CPA_BF16, CPA_BF16, BLOCKS, 1, 1, 0},
        {150, 2, 1, 272, 144, CPA_BF16, CPA_F32, BLOCKS, 0, 0, 1},
        {160, 2, 1, 528, 300, CPA_BF16, CPA_BF16, BLOCKS, 1, 1, 0},
        {270, 2, 1, 144, 513, CPA_BF16, CPA_BF16, BLOCKS, 1, 0, 0},
        {190, 2, 1, 336, 272, CPA_BF16, CPA_F32, OUTPUTS, 1, 0, 1},
        {33, 3, 1, 640, 257, CPA_F16, CPA_F16, OUTPUTS, 1, 0, 0},
        {4, 5, 3, 129, 127, CPA_F32, CPA_F32, BLOCKS, 1, 1, 0},
        {18, 2, 2, 291, 141, CPA_F32, CPA_F32, OUTPUTS, 0, 0, 0},
    };
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check(&shapes[i]);
    cpa_test_device_close(device, stream);
}

/* Most experts have nothing where tokens are few. */
static void the_grid_of_tokens_experts_and_choices_is_right(void) {
    static const int64_t tokens[] = {1, 2, 17, 64, 333};
    static const int32_t experts[] = {4, 8, 64, 160, 256}, top_ks[] = {1, 2, 6, 8};
    cpa_test_device_open(2, &device, &stream);
    for (int t = 0; t < 5; t++) {
        for (int e = 0; e < 5; e++) {
            for (int k = 0; k < 4; k++) {
                const shape s = {tokens[t], experts[e], top_ks[k],           16, 24, CPA_BF16, CPA_BF16, PLAIN,
                                 1,         t % 2 == 1, (t + e + k) % 7 == 0};
                check(&s);
            }
        }
    }
    cpa_test_device_close(device, stream);
}

static void every_instruction_set_multiplies_right(void) {
    if (!cpa_test_promises_bits()) return;
    for (int set = 0; cpa_attend_isas[set]; set++) {
        if (!cpa_attend_isas[set]->supported()) continue;
        for (int kind = PLAIN; kind <= OUTPUTS; kind++) {
            const shape s = {23, 2, 1, 291, 141, (cpa_dtype)kind, CPA_F32, (weight_kind)kind, 1, 1, 0};
            cpa_test_device_open(1, &device, &stream);
            cpa_host_use_isa((cpa_host_device *)device, cpa_attend_isas[set]);
            check(&s);
            cpa_test_device_close(device, stream);
        }
    }
}

/* A place's row by linear with the weights of its expert. */
static int has_bits_of_linear(const product *p, int64_t place) {
    const shape *s = &p->s;
    const int64_t row = p->tokens[place], matrix = p->expert[place] * s->outputs * p->weight.stride;
    cpa_test_tensor out = cpa_test_tensor_blank(stream, s->out_dtype, 1, s->outputs, 0);
    const int64_t weight_bytes = s->kind == PLAIN ? cpa_dtype_bytes(s->dtype) : 1;
    const cpa_linear_args args = {
        .size = sizeof args,
        .rows = 1,
        .inputs = s->inputs,
        .outputs = s->outputs,
        .dtype = s->dtype,
        .out_dtype = s->out_dtype,
        .x = (const char *)p->x.device + row * p->x.stride * cpa_dtype_bytes(s->dtype),
        .weight = (const char *)p->args.weight + matrix * weight_bytes,
        .weight_stride = p->weight.stride,
        .out = out.device,
        .weight_scale = s->kind == PLAIN ? NULL
                                         : (const float *)p->device_scales +
                                               (int64_t)p->expert[place] * p->scale_rows * p->scale_columns,
        .weight_scale_rows = p->scale_rows,
        .weight_scale_columns = p->scale_columns,
    };
    int same = cpa_linear(&args, stream) == CPA_OK;
    cpa_test_tensor_fetch(&out, stream);
    same = same && memcmp(out.values, cpa_test_row(&p->out, place), (size_t)s->outputs * 4) == 0;
    cpa_test_tensor_free(&out, stream);
    return same;
}

static void a_row_has_the_bits_of_linear_alone(void) {
    static const shape shapes[] = {{45, 3, 2, 700, 150, CPA_BF16, CPA_BF16, PLAIN, 1, 1, 0},
                                   {45, 3, 2, 333, 150, CPA_BF16, CPA_F32, BLOCKS, 1, 0, 0},
                                   {20, 2, 1, 333, 130, CPA_F32, CPA_F32, OUTPUTS, 0, 0, 0}};
    if (!cpa_test_promises_bits()) return;
    for (int i = 0; i < 3; i++) {
        product p;
        cpa_test_device_open(2, &device, &stream);
        make(&p, &shapes[i]);
        CU_ASSERT_EQUAL(wrong_results(&p, 1000), 0);
        for (int64_t place = 0; place < p.places; place++) CU_ASSERT_TRUE(has_bits_of_linear(&p, place));
        destroy(&p);
        cpa_test_device_close(device, stream);
    }
}

/* A product beside those of experts: of all tokens, with weights that all of them have. */
typedef struct beside_product {
    product p;
    cpa_test_tensor want, got;
    cpa_linear_args args;
} beside_product;

static const cpa_expert_fusion ALONE = {.gated = 0};

/* What the product of a single expert gives, and swiglu where it is gated; or the sum of it and what is there. */
static void make_beside(beside_product *b, const shape *s, int gated) {
    const shape alone = {s->tokens, 1, 1, s->inputs + 520, s->outputs + 40, s->dtype, s->dtype, PLAIN, 0, 0, 0};
    const int32_t width = gated ? alone.outputs / 2 : alone.outputs;
    make(&b->p, &alone);
    b->p.args.rows = s->tokens;
    b->want = cpa_test_tensor_make(stream, s->dtype, s->tokens, width, 0, 7);
    b->got = cpa_test_tensor_make(stream, s->dtype, s->tokens, width, 0, 7);
    const cpa_swiglu_args gate = {.size = sizeof gate,
                                  .rows = s->tokens,
                                  .width = width,
                                  .dtype = s->dtype,
                                  .gate_up = b->p.out.device,
                                  .out = b->want.device};
    CU_ASSERT_EQUAL(device->nn->expert_fused(&b->p.args, &ALONE, stream), CPA_OK);
    if (gated) CU_ASSERT_EQUAL(cpa_swiglu(&gate, stream), CPA_OK);
    cpa_test_tensor_fetch(&b->p.out, stream);
    if (gated) cpa_test_tensor_fetch(&b->want, stream);
    for (int64_t i = 0; !gated && i < s->tokens * width; i++) {
        const float sum = cpa_test_row(&b->want, i / width)[i % width] + cpa_test_row(&b->p.out, i / width)[i % width];
        float narrow;
        cpa_narrow(&narrow, &sum, s->dtype, 1);
        cpa_widen(&cpa_test_row(&b->want, i / width)[i % width], &narrow, s->dtype, 1);
    }
    b->args = (cpa_linear_args){.size = sizeof b->args,
                                .rows = s->tokens,
                                .inputs = alone.inputs,
                                .outputs = alone.outputs,
                                .dtype = s->dtype,
                                .out_dtype = s->dtype,
                                .x = b->p.x.device,
                                .x_stride = b->p.x.stride,
                                .weight = b->p.weight.device,
                                .weight_stride = b->p.weight.stride,
                                .out = b->got.device,
                                .out_stride = width};
}

static int64_t wrong_beside(beside_product *b) {
    cpa_test_tensor_fetch(&b->got, stream);
    const int64_t n = b->args.rows * b->args.out_stride;
    const int64_t wrong = memcmp(b->got.values, b->want.values, (size_t)n * sizeof *b->got.values) != 0;
    cpa_test_tensor_free(&b->want, stream);
    cpa_test_tensor_free(&b->got, stream);
    destroy(&b->p);
    return wrong;
}

/* They take no product of few places to fuse, whatever its shape. */
static int on_plain_kernels(void) {
    const char *name = getenv("CPATTN_TEST_DEVICE");
    return name && strcmp(name, "cuda:simple") == 0;
}

/* Of the places that experts have, the results that are not those of float64, or differ from those of the product alone,
 * and swiglu, in turn, and whether the product beside does. */
static int64_t wrong_fused(const shape *s, int gated) {
    const int32_t width = gated ? s->outputs / 2 : s->outputs;
    product p;
    beside_product beside;
    int64_t wrong = 0;
    make(&p, s);
    make_beside(&beside, s, gated);
    const int64_t rows = p.places + p.spare;
    cpa_test_tensor want = cpa_test_tensor_blank(stream, s->dtype, rows, width, 0);
    cpa_test_tensor got = cpa_test_tensor_blank(stream, s->dtype, rows, width, 0);
    const cpa_swiglu_args gate = {.size = sizeof gate,
                                  .rows = rows,
                                  .width = width,
                                  .dtype = s->dtype,
                                  .gate_up = p.out.device,
                                  .out = want.device};
    const cpa_expert_fusion fusion = {.gated = gated, .beside = &beside.args, .beside_adds = !gated};
    cpa_expert_linear_args fused = p.args;
    fused.expert_stride = s->outputs * fused.weight_stride;
    fused.out = got.device;
    fused.out_stride = width;
    p.args.expert_stride = s->outputs * p.args.weight_stride;
    CU_ASSERT_EQUAL(device->nn->expert_fused(&p.args, &ALONE, stream), CPA_OK);
    if (gated) CU_ASSERT_EQUAL(cpa_swiglu(&gate, stream), CPA_OK);
    CU_ASSERT_EQUAL(device->nn->fuses_experts(&fused, stream) != 0, !on_plain_kernels());
    CU_ASSERT_EQUAL(device->nn->expert_fused(&fused, &fusion, stream), CPA_OK);
    cpa_test_tensor_fetch(&p.out, stream);
    if (gated) cpa_test_tensor_fetch(&want, stream);
    cpa_test_tensor_fetch(&got, stream);
    for (int64_t i = 0; i < p.places * s->outputs; i += p.places * s->outputs / 1500 + 1)
        wrong += !is_right(&p, i / s->outputs, (int32_t)(i % s->outputs));
    for (int64_t place = 0; place < rows; place++) {
        const float *right = cpa_test_row(gated ? &want : &p.out, place), *is = cpa_test_row(&got, place);
        wrong += place < p.places ? memcmp(is, right, (size_t)width * sizeof *is) != 0 : !isnan(is[0]);
    }
    cpa_test_tensor_free(&want, stream);
    cpa_test_tensor_free(&got, stream);
    destroy(&p);
    return wrong + wrong_beside(&beside);
}

/* More pieces than CTAs, tiles that are not whole, experts with more places than a tile. */
static void fused_products_are_the_operators_in_turn(void) {
    static const shape shapes[] = {
        {1, 64, 6, 2048, 2816, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0},
        {8, 16, 6, 264, 272, CPA_F16, CPA_F16, PLAIN, 1, 0, 0},
        {7, 4, 4, 1032, 80, CPA_BF16, CPA_BF16, PLAIN, 0, 0, 1},
        {5, 16, 2, 72, 528, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0},
        {3, 4, 2, 8, 2, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0},
    };
    cpa_test_device_open(1, &device, &stream);
    for (size_t i = 0; device->nn->fuses_experts && i < sizeof shapes / sizeof *shapes; i++) {
        for (int gated = 0; gated < 2; gated++) CU_ASSERT_EQUAL(wrong_fused(&shapes[i], gated), 0);
    }
    cpa_test_device_close(device, stream);
}

/* What no place names is not read; a token that x does not have, and a row of NaN, stay alone. */
static void what_is_not_there_stays_alone(void) {
    for (int i = 0; i < 2; i++) {
        const shape s = {40 + 170 * i, 3 - i, 1, 64, 136, CPA_BF16, CPA_BF16, PLAIN, 1, 0, 0};
        product p;
        cpa_test_device_open(1, &device, &stream);
        make(&p, &s);
        for (int32_t e = 0; e < s.inputs; e++) cpa_test_row(&p.x, p.tokens[6])[e] = NAN;
        cpa_test_tensor_send(&p.x, stream);
        p.args.x = p.x.device;
        p.tokens[9] = (uint32_t)s.tokens;
        p.tokens[11] = UINT32_MAX;
        cpa_test_free(stream, p.device_tokens);
        p.device_tokens = cpa_test_upload(stream, p.tokens, (p.places + p.spare) * 4);
        p.args.tokens = p.device_tokens;
        CU_ASSERT_EQUAL(cpa_expert_linear(&p.args, stream), CPA_OK);
        cpa_test_tensor_fetch(&p.out, stream);
        for (int64_t place = 0; place < p.places; place++) {
            for (int32_t o = 0; o < s.outputs; o++)
                CU_ASSERT_EQUAL(isnan(cpa_test_row(&p.out, place)[o]) != 0, place == 6 || place == 9 || place == 11);
        }
        destroy(&p);
        cpa_test_device_close(device, stream);
    }
}

static void a_weight_of_nan_spoils_its_output_alone(void) {
    static const uint8_t nans[] = {0x7f, 0xff};
    for (int i = 0; i < 3; i++) { /* few places, some, many */
        const shape s = {20 + 30 * i * (1 + i), 3, 1, 144, 136, CPA_BF16, CPA_F32, BLOCKS, 1, 0, 0};
        product p;
        cpa_test_device_open(1, &device, &stream);
        make(&p, &s);
        p.codes[(s.outputs + 130) * p.weight.stride + 5] = nans[i % 2]; /* output 130 of expert 1 */
        cpa_test_free(stream, p.device_codes);
        p.device_codes = cpa_test_upload(stream, p.codes, s.experts * s.outputs * p.weight.stride);
        p.args.weight = p.device_codes;
        CU_ASSERT_EQUAL(cpa_expert_linear(&p.args, stream), CPA_OK);
        cpa_test_tensor_fetch(&p.out, stream);
        for (int64_t place = 0; place < p.places; place++) {
            for (int32_t o = 0; o < s.outputs; o++)
                CU_ASSERT_EQUAL(isnan(cpa_test_row(&p.out, place)[o]) != 0, o == 130 && p.expert[place] == 1);
        }
        destroy(&p);
        cpa_test_device_close(device, stream);
    }
}

/* ---- linear ---- */

typedef struct linear_shape {
    int64_t rows;
    int32_t inputs, outputs;
    cpa_dtype dtype, out_dtype;
    weight_kind kind;
    int strided, bias;
} linear_shape;

/* As the product of a single expert that has all rows, and a bias. */
static int64_t wrong_rows_of_linear(const linear_shape *l) {
    const shape s = {l->rows, 1, 1, l->inputs, l->outputs, l->dtype, l->out_dtype, l->kind, 0, l->strided, 0};
    product p;
    int64_t wrong = 0;
    make(&p, &s);
    cpa_test_tensor bias = cpa_test_tensor_make(stream, l->dtype, 1, l->outputs, 0, 3);
    const cpa_linear_args args = {
        .size = sizeof args,
        .rows = l->rows,
        .inputs = l->inputs,
        .outputs = l->outputs,
        .dtype = l->dtype,
        .out_dtype = l->out_dtype,
        .x = p.x.device,
        .x_stride = p.x.stride,
        .weight = p.args.weight,
        .weight_stride = p.weight.stride,
        .bias = l->bias ? bias.device : NULL,
        .out = p.out.device,
        .out_stride = p.out.stride,
        .weight_scale = p.args.weight_scale,
        .weight_scale_rows = p.scale_rows,
        .weight_scale_columns = p.scale_columns,
    };
    CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&p.out, stream);
    for (int64_t row = 0; row < l->rows; row++) {
        for (int32_t o = 0; o < l->outputs; o++) {
            double want = l->bias ? (double)bias.values[o] : 0, size = fabs(want);
            for (int32_t i = 0; i < l->inputs; i++) {
                const double term = (double)cpa_test_row(&p.x, row)[i] * weight_of(&p, 0, o, i);
                want += term, size += fabs(term);
            }
            const double slack = 0x1p-23 * (2 + 0.5 * sqrt((double)l->inputs)) * size;
            wrong += !cpa_test_is_near(cpa_test_row(&p.out, row)[o], want, l->out_dtype, slack);
        }
    }
    cpa_test_tensor_free(&bias, stream);
    destroy(&p);
    return wrong;
}

static void linear_takes_weights_in_fp8(void) {
    static const linear_shape shapes[] = {
        {1, 256, 128, CPA_BF16, CPA_BF16, BLOCKS, 0, 0}, {7, 400, 200, CPA_BF16, CPA_F32, BLOCKS, 1, 1},
        {40, 272, 136, CPA_F16, CPA_F16, OUTPUTS, 1, 1}, {3, 77, 300, CPA_F32, CPA_F32, BLOCKS, 0, 1},
        {17, 129, 1, CPA_BF16, CPA_BF16, OUTPUTS, 0, 0},
    };
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) CU_ASSERT_EQUAL(wrong_rows_of_linear(&shapes[i]), 0);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"products are those of float64", products_are_those_of_float64},
    {"the grid of tokens, experts and choices is right", the_grid_of_tokens_experts_and_choices_is_right},
    {"every instruction set multiplies right", every_instruction_set_multiplies_right},
    {"a row has the bits of linear alone", a_row_has_the_bits_of_linear_alone},
    {"fused products are the operators in turn", fused_products_are_the_operators_in_turn},
    {"what is not there stays alone", what_is_not_there_stays_alone},
    {"a weight of NaN spoils its output alone", a_weight_of_nan_spoils_its_output_alone},
    {"linear takes weights in FP8", linear_takes_weights_in_fp8},
};
CPA_DEVICE_TEST_MAIN("expert linear", tests)
