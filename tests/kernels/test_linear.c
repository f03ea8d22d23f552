/* linear against float64, and the bits of a row in any batch and place. */
#include <math.h>
#include <stdlib.h>

#include "base/convert.h"
#include "kernels/host/device/host.h"
#include "kernels/nn.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

typedef struct shape {
    int64_t rows;
    int32_t inputs, outputs;
    cpa_dtype dtype, out_dtype;
    int strided, bias;
} shape;

static const shape SHAPES[] = {{1, 1, 1, CPA_F32, CPA_F32, 0, 1},       {5, 17, 130, CPA_F32, CPA_F32, 1, 0},
                               {33, 300, 5, CPA_F32, CPA_F32, 1, 1},    {16, 1025, 129, CPA_F32, CPA_F32, 0, 0},
                               {1, 64, 1, CPA_BF16, CPA_BF16, 1, 1},    {20, 1025, 300, CPA_BF16, CPA_BF16, 1, 0},
                               {3, 256, 128, CPA_BF16, CPA_F32, 0, 1},  {40, 5137, 7, CPA_BF16, CPA_F32, 1, 1},
                               {2, 7, 64, CPA_F16, CPA_F16, 1, 1},      {17, 1000, 257, CPA_F16, CPA_F32, 1, 0},
                               {7, 2056, 33, CPA_F16, CPA_F16, 1, 0},   {12, 1032, 70, CPA_BF16, CPA_BF16, 1, 1},
                               {18, 264, 51, CPA_BF16, CPA_BF16, 1, 1}, {64, 1024, 1024, CPA_BF16, CPA_BF16, 0, 1}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

typedef struct product {
    cpa_test_tensor x, weight, bias, out;
    cpa_linear_args args;
} product;

static void make(product *p, const shape *s) {
    const int pad = s->strided ? 8 : 0;
    p->x = cpa_test_tensor_make(stream, s->dtype, s->rows, s->inputs, s->inputs + pad, 1);
    p->weight = cpa_test_tensor_make(stream, s->dtype, s->outputs, s->inputs, s->inputs + 2 * pad, 2);
    p->bias = cpa_test_tensor_make(stream, s->dtype, 1, s->outputs, 0, 3);
    p->out = cpa_test_tensor_blank(stream, s->out_dtype, s->rows, s->outputs, s->outputs + pad);
    p->args = (cpa_linear_args){.size = sizeof p->args,
                                .rows = s->rows,
                                .inputs = s->inputs,
                                .outputs = s->outputs,
                                .dtype = s->dtype,
                                .out_dtype = s->out_dtype,
                                .x = p->x.device,
                                .x_stride = s->strided ? p->x.stride : 0,
                                .weight = p->weight.device,
                                .weight_stride = s->strided ? p->weight.stride : 0,
                                .bias = s->bias ? p->bias.device : NULL,
                                .out = p->out.device,
                                .out_stride = s->strided ? p->out.stride : 0};
}

static void destroy(product *p) {
    cpa_test_tensor_free(&p->out, stream);
    cpa_test_tensor_free(&p->bias, stream);
    cpa_test_tensor_free(&p->weight, stream);
    cpa_test_tensor_free(&p->x, stream);
}

/* An fp32 sum of n products is off by some sqrt(n) roundings of what is summed. */
static int is_right(const product *p, int64_t row, int64_t output) {
    const float *x = cpa_test_row(&p->x, row), *w = cpa_test_row(&p->weight, output);
    double want = p->args.bias ? (double)p->bias.values[output] : 0, size = fabs(want);
    for (int32_t i = 0; i < p->args.inputs; i++) {
        want += (double)x[i] * (double)w[i];
        size += fabs((double)x[i] * (double)w[i]);
    }
    const double slack = 0x1p-23 * (2 + 0.5 * sqrt((double)p->args.inputs)) * size;
    return cpa_test_is_near(cpa_test_row(&p->out, row)[output], want, p->args.out_dtype, slack);
}

static int64_t wrong_outputs(product *p) {
    int64_t wrong = 0;
    CU_ASSERT_EQUAL(cpa_linear(&p->args, stream), CPA_OK);
    cpa_test_tensor_fetch(&p->out, stream);
    for (int64_t row = 0; row < p->args.rows; row++) {
        for (int64_t output = 0; output < p->args.outputs; output++) wrong += !is_right(p, row, output);
    }
    return wrong;
}

static void products_are_those_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < N_SHAPES; i++) {
        product p;
        make(&p, &SHAPES[i]);
        CU_ASSERT_EQUAL(wrong_outputs(&p), 0);
        CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&p.out));
        destroy(&p);
    }
    cpa_test_device_close(device, stream);
}

/* A batch over interleaved heads of rows: outputs of each are those of the product alone, to the bit on the host. */
static void products_of_a_batch_are_those_alone(void) {
    enum { HEADS = 5, ROWS = 19, IN = 24, OUT = 40, WIDE_IN = 33, WIDE_OUT = 41 };
    static const cpa_dtype dtypes[] = {CPA_F32, CPA_BF16};
    cpa_test_device_open(2, &device, &stream);
    for (int i = 0; i < 2; i++) {
        const cpa_dtype dtype = dtypes[i];
        const int64_t bytes = cpa_dtype_bytes(dtype);
        cpa_test_tensor x = cpa_test_tensor_make(stream, dtype, ROWS, HEADS * WIDE_IN, 0, 1);
        cpa_test_tensor weight = cpa_test_tensor_make(stream, dtype, HEADS * OUT, IN, 0, 2);
        cpa_test_tensor out = cpa_test_tensor_blank(stream, dtype, ROWS, HEADS * WIDE_OUT, 0);
        cpa_test_tensor alone = cpa_test_tensor_blank(stream, dtype, ROWS, HEADS * WIDE_OUT, 0);
        cpa_linear_args args = {.size = sizeof args,
                                .rows = ROWS,
                                .inputs = IN,
                                .outputs = OUT,
                                .dtype = dtype,
                                .out_dtype = dtype,
                                .x = x.device,
                                .x_stride = HEADS * WIDE_IN,
                                .weight = weight.device,
                                .out = out.device,
                                .out_stride = HEADS * WIDE_OUT,
                                .batch = HEADS,
                                .x_batch_stride = WIDE_IN,
                                .weight_batch_stride = OUT * IN,
                                .out_batch_stride = WIDE_OUT};
        CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_OK);
        args.batch = 0;
        for (int head = 0; head < HEADS; head++) {
            args.x = (const char *)x.device + head * WIDE_IN * bytes;
            args.weight = (const char *)weight.device + head * OUT * IN * bytes;
            args.out = (char *)alone.device + head * WIDE_OUT * bytes;
            CU_ASSERT_EQUAL(cpa_linear(&args, stream), CPA_OK);
        }
        cpa_test_tensor_fetch(&out, stream);
        cpa_test_tensor_fetch(&alone, stream);
        int64_t wrong = 0;
        for (int64_t at = 0; at < ROWS * HEADS * WIDE_OUT; at++) {
            const float a = out.values[at], b = alone.values[at];
            const int is_pad = at % WIDE_OUT >= OUT;
            wrong += is_pad ? a == a : cpa_test_promises_bits() ? a != b : fabsf(a - b) > 0.02f * (1 + fabsf(b));
        }
        CU_ASSERT_EQUAL(wrong, 0);
        cpa_test_tensor_free(&alone, stream);
        cpa_test_tensor_free(&out, stream);
        cpa_test_tensor_free(&weight, stream);
        cpa_test_tensor_free(&x, stream);
    }
    cpa_test_device_close(device, stream);
}

static void a_row_of_nan_stays_alone(void) {
    const shape s = {21, 200, 40, CPA_BF16, CPA_BF16, 1, 1};
    product p;
    cpa_test_device_open(1, &device, &stream);
    make(&p, &s);
    for (int32_t i = 0; i < s.inputs; i++) cpa_test_row(&p.x, 6)[i] = NAN;
    cpa_test_row(&p.x, 20)[3] = INFINITY;
    cpa_test_tensor_send(&p.x, stream);
    p.args.x = p.x.device;
    CU_ASSERT_EQUAL(wrong_outputs(&p), 0); /* want is NaN, or infinite, in these rows alone */
    destroy(&p);
    cpa_test_device_close(device, stream);
}

/* ---- bits, which the host promises ---- */

enum { INPUTS = 700, OUTPUTS = 150, MOST_ROWS = 40 };

/* Whether the outputs of a row that lies at `place` of a batch have the bits `want` [OUTPUTS]. */
static int has_bits(const product *p, const cpa_test_tensor *row, int64_t batch, int64_t place, const float *want) {
    cpa_test_tensor x = cpa_test_tensor_make(stream, row->dtype, batch, INPUTS, 0, (uint64_t)(100 + batch));
    cpa_test_tensor out = cpa_test_tensor_blank(stream, CPA_F32, batch, OUTPUTS, 0);
    memcpy(cpa_test_row(&x, place), row->values, INPUTS * sizeof *row->values);
    cpa_test_tensor_send(&x, stream);
    cpa_linear_args args = p->args;
    args.rows = batch, args.x = x.device, args.out = out.device;
    int same = cpa_linear(&args, stream) == CPA_OK;
    cpa_test_tensor_fetch(&out, stream);
    same = same && memcmp(cpa_test_row(&out, place), want, OUTPUTS * sizeof *want) == 0;
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&x, stream);
    return same;
}

static void a_row_has_its_bits_in_any_batch_and_place(void) {
    if (!cpa_test_promises_bits()) return;
    for (cpa_dtype dtype = CPA_F32; dtype <= CPA_BF16; dtype++) {
        const shape s = {1, INPUTS, OUTPUTS, dtype, CPA_F32, 0, 1};
        product p;
        cpa_test_device_open(2, &device, &stream);
        make(&p, &s);
        CU_ASSERT_EQUAL(wrong_outputs(&p), 0);
        for (int64_t batch = 1; batch <= MOST_ROWS; batch++)
            CU_ASSERT_TRUE(has_bits(&p, &p.x, batch, batch - 1, p.out.values));
        for (int64_t place = 0; place < 16; place++) CU_ASSERT_TRUE(has_bits(&p, &p.x, MOST_ROWS, place, p.out.values));
        destroy(&p);
        cpa_test_device_close(device, stream);
    }
}

/* ---- fused with what lies beside it ---- */

typedef struct fused_shape {
    int64_t rows;
    int32_t inputs, outputs;
    cpa_dtype dtype;
    int normed, gated, adds, bias;
} fused_shape;

/* What the operators make in turn: z of norm, product and swiglu, and the residual that z is added to. */
static void make_in_turn(const fused_shape *s, product *p, const cpa_test_tensor *norm, cpa_test_tensor *normed,
                         cpa_test_tensor *z, cpa_test_tensor *residual) {
    const int64_t out = s->gated ? s->outputs / 2 : s->outputs;
    cpa_linear_args linear = p->args;
    const cpa_rmsnorm_args first = {
        sizeof first,         s->rows, s->inputs, s->dtype, .x = p->x.device, .weight = norm->device, .eps = 1e-5f,
        .out = normed->device};
    const cpa_swiglu_args gate = {sizeof gate, s->rows, (int32_t)out, s->dtype, p->out.device, z->device};
    const cpa_rmsnorm_args add = {sizeof add,
                                  s->rows,
                                  (int32_t)out,
                                  s->dtype,
                                  .x = s->gated ? z->device : p->out.device,
                                  .residual = residual->device,
                                  .weight = residual->device,
                                  .eps = 1,
                                  .out = z->device};
    if (s->normed) {
        CU_ASSERT_EQUAL(cpa_rmsnorm(&first, stream), CPA_OK);
        linear.x = normed->device;
    }
    CU_ASSERT_EQUAL(cpa_linear(&linear, stream), CPA_OK);
    if (s->gated) CU_ASSERT_EQUAL(cpa_swiglu(&gate, stream), CPA_OK);
    if (s->adds) CU_ASSERT_EQUAL(cpa_rmsnorm(&add, stream), CPA_OK);
    cpa_test_tensor_fetch(s->adds ? residual : s->gated ? z : &p->out, stream);
}

static void check_fused(const fused_shape *s) {
    const shape whole = {s->rows, s->inputs, s->outputs, s->dtype, s->dtype, 0, s->bias};
    const int64_t width = s->gated ? s->outputs / 2 : s->outputs;
    product p;
    make(&p, &whole);
    cpa_test_tensor norm = cpa_test_tensor_make(stream, s->dtype, 1, s->inputs, 0, 4);
    cpa_test_tensor residual = cpa_test_tensor_make(stream, s->dtype, s->rows, width, 0, 5);
    cpa_test_tensor out = cpa_test_tensor_make(stream, s->dtype, s->rows, width, 0, 5);
    cpa_test_tensor normed = cpa_test_tensor_blank(stream, s->dtype, s->rows, s->inputs, 0);
    cpa_test_tensor z = cpa_test_tensor_blank(stream, s->dtype, s->rows, width, 0);
    const cpa_linear_fusion fusion = {s->normed ? norm.device : NULL, 1e-5f, s->gated, s->adds};
    make_in_turn(s, &p, &norm, &normed, &z, &residual);
    p.args.x_stride = p.args.weight_stride = s->inputs;
    p.args.out = out.device, p.args.out_stride = width;
    CU_ASSERT_EQUAL(device->nn->linear_fused(&p.args, &fusion, stream), CPA_OK);
    cpa_test_tensor_fetch(&out, stream);
    const cpa_test_tensor *want = s->adds ? &residual : s->gated ? &z : &p.out;
    CU_ASSERT_EQUAL(memcmp(out.values, want->values, (size_t)(s->rows * width) * sizeof *out.values), 0);
    cpa_test_tensor *const tensors[] = {&norm, &residual, &out, &normed, &z};
    for (int i = 0; i < 5; i++) cpa_test_tensor_free(tensors[i], stream);
    destroy(&p);
}

/* More tiles than CTAs, the last ones not whole, rows in one group and in two, and heads of norms that few threads
 * share. */
static void a_fused_product_is_the_operators_in_turn(void) {
    const fused_shape shapes[] = {
        {1, 4096, 6152, CPA_BF16, 1, 0, 0, 1},  {1, 4096, 9616, CPA_BF16, 1, 1, 0, 0},
        {1, 72, 40, CPA_F16, 1, 1, 1, 1},       {1, 14336, 520, CPA_BF16, 0, 0, 1, 0},
        {5, 264, 72, CPA_BF16, 0, 1, 0, 1},     {8, 1032, 4300, CPA_F16, 0, 0, 1, 1},
        {16, 2056, 9000, CPA_BF16, 0, 1, 1, 0}, {3, 77, 34, CPA_BF16, 0, 1, 1, 1},
    };
    cpa_test_device_open(1, &device, &stream);
    for (int i = 0; device->nn->linear_fused && i < (int)(sizeof shapes / sizeof *shapes); i++) check_fused(&shapes[i]);
    cpa_test_device_close(device, stream);
}

static void every_instruction_set_multiplies_right(void) {
    if (!cpa_test_promises_bits()) return;
    for (int set = 0; cpa_attend_isas[set]; set++) {
        if (!cpa_attend_isas[set]->supported()) continue;
        for (cpa_dtype dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
            const shape s = {19, 291, 141, dtype, dtype, 1, 1};
            product p;
            cpa_test_device_open(1, &device, &stream);
            cpa_host_use_isa((cpa_host_device *)device, cpa_attend_isas[set]);
            make(&p, &s);
            CU_ASSERT_EQUAL(wrong_outputs(&p), 0);
            destroy(&p);
            cpa_test_device_close(device, stream);
        }
    }
}

/* Few rows go through loops of their own. */
static void few_rows_have_the_bits_of_many_with_every_instruction_set(void) {
    static const int64_t batches[] = {1, 2, 3, 4, 5, 8, 9, 16};
    if (!cpa_test_promises_bits()) return;
    for (int set = 0; cpa_attend_isas[set]; set++) {
        if (!cpa_attend_isas[set]->supported()) continue;
        for (cpa_dtype dtype = CPA_F32; dtype <= CPA_BF16; dtype++) {
            const shape s = {1, INPUTS, OUTPUTS, dtype, CPA_F32, 0, 0};
            product p;
            cpa_test_device_open(1, &device, &stream);
            cpa_host_use_isa((cpa_host_device *)device, cpa_attend_isas[set]);
            make(&p, &s);
            CU_ASSERT_EQUAL(wrong_outputs(&p), 0);
            for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
                CU_ASSERT_TRUE(has_bits(&p, &p.x, batches[i], batches[i] - 1, p.out.values));
            destroy(&p);
            cpa_test_device_close(device, stream);
        }
    }
}

static const cpa_test tests[] = {
    {"products are those of float64", products_are_those_of_float64},
    {"products of a batch are those alone", products_of_a_batch_are_those_alone},
    {"a row of NaN stays alone", a_row_of_nan_stays_alone},
    {"a row has its bits in any batch and place", a_row_has_its_bits_in_any_batch_and_place},
    {"a fused product is the operators in turn", a_fused_product_is_the_operators_in_turn},
    {"every instruction set multiplies right", every_instruction_set_multiplies_right},
    {"few rows have the bits of many, with every instruction set",
     few_rows_have_the_bits_of_many_with_every_instruction_set},
};
CPA_DEVICE_TEST_MAIN("linear", tests)
