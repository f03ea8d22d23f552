/* linear: few rows by a kernel of our own, which reads weights at the speed of memory; more by cuBLASLt.
 *
 * What cuBLASLt needs belongs to the stream, as what one product leaves in the work space the next one overwrites.
 * Which of its algorithms makes a product is asked once for each shape and number of rows, rounded up to a power of
 * two, and is the same ever after. */
#include <cublasLt.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/experts/expert_linear.h"
#include "kernels/cuda/nn/linear.h"
#include "kernels/cuda/nn/nn.h"

enum { BUCKETS = 64, MOST_BATCH = 65535 /* products that a grid has in y */ };
static const cpa_linear_fusion ALONE = {.norm_weight = NULL};
static const int64_t WORKSPACE_BYTES = (int64_t)32 << 20; /* what NVIDIA advises for compute capability 9.0 */

/* The functions in use; X(member, name) for each. */
#define FUNCTIONS(X)                                                                                                   \
    X(create, cublasLtCreate)                                                                                          \
    X(destroy, cublasLtDestroy)                                                                                        \
    X(matmul, cublasLtMatmul)                                                                                          \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)                                                                       \
    X(desc_create, cublasLtMatmulDescCreate)                                                                           \
    X(desc_set, cublasLtMatmulDescSetAttribute)                                                                        \
    X(desc_destroy, cublasLtMatmulDescDestroy)                                                                         \
    X(layout_create, cublasLtMatrixLayoutCreate)                                                                       \
    X(layout_set, cublasLtMatrixLayoutSetAttribute)                                                                    \
    X(layout_destroy, cublasLtMatrixLayoutDestroy)                                                                     \
    X(preference_create, cublasLtMatmulPreferenceCreate)                                                               \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute)                                                            \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy)

typedef struct lt_functions {
#define MEMBER(member, name) __typeof__(&name) member;
    FUNCTIONS(MEMBER)
#undef MEMBER
} lt_functions;

/* What products have in common that one algorithm makes. */
typedef struct product_key {
    int64_t rows; /* a power of two */
    int64_t x_stride, weight_stride, out_stride;
    int64_t x_batch_stride, weight_batch_stride, out_batch_stride;
    int32_t inputs, outputs, batch;
    cpa_dtype dtype, out_dtype;
    uint32_t alignment; /* alignment of all tensors, bytes */
    int32_t bias;       /* not 0: the product adds a bias */
} product_key;

typedef struct product {
    struct product *next; /* next product in its bucket; NULL: none */
    product_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t weight, x, out;
    cublasLtMatmulAlgo_t algorithm;
    int unsupported; /* cuBLASLt has no algorithm, as for a bias at an odd place */
} product;

struct cpa_cuda_products {
    lt_functions lt;
    cublasLtHandle_t handle;
    void *workspace;
    product *buckets[BUCKETS];
};

static cpa_status load(lt_functions *out, cpa_error *err) {
    static const char *const sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    cpa_cuda_library library;
    lt_functions lt;
    CPA_TRY(cpa_cuda_library_open("cuBLASLt", sonames, (int)(sizeof sonames / sizeof *sonames), &library, err));
#define FIND(member, name) CPA_TRY(cpa_cuda_library_find(&library, #name, &lt.member, err));
    FUNCTIONS(FIND)
#undef FIND
    *out = lt;
    return CPA_OK;
}

static cpa_status check(cpa_error *err, cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return CPA_OK;
    return cpa_fail(err, CPA_DEVICE, "linear: %s failed with cuBLAS error %d", what, (int)status);
}

static void free_product(const lt_functions *lt, product *p) {
    if (!p) return;
    if (p->desc) (void)lt->desc_destroy(p->desc);
    if (p->weight) (void)lt->layout_destroy(p->weight);
    if (p->x) (void)lt->layout_destroy(p->x);
    if (p->out) (void)lt->layout_destroy(p->out);
    free(p);
}

static void free_products(cpa_device *device, struct cpa_cuda_products *products) {
    for (int b = 0; b < BUCKETS; b++) {
        for (product *p = products->buckets[b], *next; p; p = next) {
            next = p->next;
            free_product(&products->lt, p);
        }
    }
    if (products->handle) (void)products->lt.destroy(products->handle);
    cpa_cuda_free(device, products->workspace);
    free(products);
}

void cpa_cuda_products_destroy(cpa_cuda_stream *stream) {
    if (stream->products) free_products(stream->base.device, stream->products);
    stream->products = NULL;
}

/* What the stream's products need, made by the first of them. */
static cpa_status open_products(cpa_cuda_stream *stream, struct cpa_cuda_products **out) {
    cpa_error *err = &stream->base.error;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cpa_status status;
    *out = stream->products;
    if (*out) return CPA_OK;
    CPA_TRY(cpa_cuda_check(err, cudaStreamIsCapturing(stream->handle, &capture), "linear"));
    if (capture != cudaStreamCaptureStatusNone)
        return cpa_fail(err, CPA_INVALID,
                        "linear: the first product of more than %d rows, or of fp32, on a stream allocates; "
                        "make one before a capture",
                        (int)CPA_CUDA_FEW_ROWS);
    struct cpa_cuda_products *products = calloc(1, sizeof *products);
    if (!products) return cpa_fail(err, CPA_NO_MEMORY, "linear: no memory");
    CPA_TRY_GOTO(load(&products->lt, err), failed);
    CPA_TRY_GOTO(check(err, products->lt.create(&products->handle), "cublasLtCreate"), failed);
    CPA_TRY_GOTO(cpa_cuda_alloc(stream->base.device, WORKSPACE_BYTES, &products->workspace, err), failed);
    *out = stream->products = products;
    return CPA_OK;
failed:
    free_products(stream->base.device, products);
    return status;
}

static cudaDataType_t type_of(cpa_dtype dtype) {
    return dtype == CPA_F32 ? CUDA_R_32F : dtype == CPA_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* A matrix of each product of the batch, a stride apart. */
static cpa_status describe_batch(const lt_functions *lt, cublasLtMatrixLayout_t layout, int32_t batch, int64_t stride,
                                 cpa_error *err) {
    CPA_TRY(check(err, lt->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
                  "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT"));
    return check(err, lt->layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
                 "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET");
}

/* In cuBLAS's column-major order: a row-major [a, b] matrix is its [b, a] matrix, so that out = weight^T x there. */
static cpa_status describe(const lt_functions *lt, product *p, cpa_error *err) {
    const product_key *key = &p->key;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue = key->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    const uintptr_t place = key->alignment;
    const uint64_t inputs = (uint64_t)key->inputs, outputs = (uint64_t)key->outputs, rows = (uint64_t)key->rows;
    CPA_TRY(check(err, lt->desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate"));
    CPA_TRY(check(err, lt->desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
                  "CUBLASLT_MATMUL_DESC_TRANSA"));
    CPA_TRY(check(err, lt->desc_set(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
                  "CUBLASLT_MATMUL_DESC_EPILOGUE"));
    if (key->bias) /* what is chosen depends on the alignment of the place, at which nothing is read yet */
        CPA_TRY(check(err, lt->desc_set(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &place, sizeof place),
                      "CUBLASLT_MATMUL_DESC_BIAS_POINTER"));
    CPA_TRY(check(err, lt->layout_create(&p->weight, type_of(key->dtype), inputs, outputs, key->weight_stride),
                  "cublasLtMatrixLayoutCreate"));
    CPA_TRY(check(err, lt->layout_create(&p->x, type_of(key->dtype), inputs, rows, key->x_stride),
                  "cublasLtMatrixLayoutCreate"));
    CPA_TRY(check(err, lt->layout_create(&p->out, type_of(key->out_dtype), outputs, rows, key->out_stride),
                  "cublasLtMatrixLayoutCreate"));
    CPA_TRY(describe_batch(lt, p->weight, key->batch, key->weight_batch_stride, err));
    CPA_TRY(describe_batch(lt, p->x, key->batch, key->x_batch_stride, err));
    return describe_batch(lt, p->out, key->batch, key->out_batch_stride, err);
}

static cpa_status set_preference(const lt_functions *lt, cublasLtMatmulPreference_t preference, uint32_t alignment,
                                 cpa_error *err) {
    const uint64_t workspace = (uint64_t)WORKSPACE_BYTES;
    const uint32_t in_fp32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* parts of a sum are not rounded */
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    CPA_TRY(check(
        err, lt->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace),
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"));
    CPA_TRY(check(err,
                  lt->preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &in_fp32, sizeof in_fp32),
                  "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK"));
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++)
        CPA_TRY(check(err, lt->preference_set(preference, alignments[i], &alignment, sizeof alignment),
                      "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES"));
    return CPA_OK;
}

static cpa_status choose_algorithm(const struct cpa_cuda_products *products, product *p, cpa_error *err) {
    const lt_functions *lt = &products->lt;
    const product_key *key = &p->key;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cpa_status status = check(err, lt->preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    if (status != CPA_OK) return status;
    CPA_TRY_GOTO(set_preference(lt, preference, key->alignment, err), done);
    const cublasStatus_t answer =
        lt->heuristic(products->handle, p->desc, p->weight, p->x, p->out, p->out, preference, 1, &result, &found);
    p->unsupported = answer != CUBLAS_STATUS_SUCCESS || found == 0 || result.state != CUBLAS_STATUS_SUCCESS;
    if (!p->unsupported) p->algorithm = result.algo;
done:
    (void)lt->preference_destroy(preference);
    return status;
}

static int same_key(const product_key *a, const product_key *b) {
    return a->rows == b->rows && a->x_stride == b->x_stride && a->weight_stride == b->weight_stride &&
           a->out_stride == b->out_stride && a->x_batch_stride == b->x_batch_stride &&
           a->weight_batch_stride == b->weight_batch_stride && a->out_batch_stride == b->out_batch_stride &&
           a->inputs == b->inputs && a->outputs == b->outputs && a->batch == b->batch && a->dtype == b->dtype &&
           a->out_dtype == b->out_dtype && a->alignment == b->alignment && a->bias == b->bias;
}

static product **bucket_of(struct cpa_cuda_products *products, const product_key *key) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    const uint64_t mixed = ((uint64_t)key->rows * golden + (uint64_t)key->inputs) * golden + (uint64_t)key->outputs;
    return &products->buckets[mixed * golden >> 58];
}

static cpa_status find_product(struct cpa_cuda_products *products, const product_key *key, product **out,
                               cpa_error *err) {
    product **bucket = bucket_of(products, key);
    cpa_status status;
    for (*out = *bucket; *out; *out = (*out)->next) {
        if (same_key(&(*out)->key, key)) return CPA_OK;
    }
    product *p = calloc(1, sizeof *p);
    if (!p) return cpa_fail(err, CPA_NO_MEMORY, "linear: no memory");
    p->key = *key;
    CPA_TRY_GOTO(describe(&products->lt, p, err), failed);
    CPA_TRY_GOTO(choose_algorithm(products, p, err), failed);
    p->next = *bucket;
    *out = *bucket = p;
    return CPA_OK;
failed:
    free_product(&products->lt, p);
    return status;
}

/* The largest power of two, up to 16, by which all tensors are aligned, those of a batch too. */
static uint32_t alignment_of(const cpa_linear_args *a) {
    uintptr_t steps = (uintptr_t)(a->x_batch_stride | a->weight_batch_stride) * cpa_dtype_bytes(a->dtype) |
                      (uintptr_t)a->out_batch_stride * cpa_dtype_bytes(a->out_dtype);
    if (a->batch <= 1) steps = 0;
    const uintptr_t bits = (uintptr_t)a->x | (uintptr_t)a->weight | (uintptr_t)a->bias | (uintptr_t)a->out | steps | 16;
    return (uint32_t)(bits & -bits);
}

/* Few rows after few rows, which reads the weights again for each of them. */
static cpa_status in_parts(const cpa_linear_args *a, cpa_stream *stream) {
    const int64_t bytes = cpa_dtype_bytes(a->dtype), out_bytes = cpa_dtype_bytes(a->out_dtype);
    if (a->dtype == CPA_F32)
        return cpa_fail(&stream->error, CPA_UNSUPPORTED,
                        "linear: cuBLASLt has no algorithm for %d inputs and %d outputs in fp32", a->inputs,
                        a->outputs);
    for (int64_t item = 0; item == 0 || item < a->batch; item++) {
        for (int64_t row = 0; row < a->rows; row += CPA_CUDA_FEW_ROWS) {
            cpa_linear_args part = *a;
            part.batch = 1;
            part.rows = a->rows - row < CPA_CUDA_FEW_ROWS ? a->rows - row : CPA_CUDA_FEW_ROWS;
            part.x = (const char *)a->x + (item * a->x_batch_stride + row * a->x_stride) * bytes;
            part.weight = (const char *)a->weight + item * a->weight_batch_stride * bytes;
            part.out = (char *)a->out + (item * a->out_batch_stride + row * a->out_stride) * out_bytes;
            CPA_TRY(cpa_cuda_linear_few(&part, &ALONE, stream));
        }
    }
    return CPA_OK;
}

static cpa_status by_cublas(const cpa_linear_args *a, cpa_cuda_stream *stream) {
    cpa_error *err = &stream->base.error;
    const float one = 1, zero = 0;
    const uint64_t rows = (uint64_t)a->rows;
    /* cuBLASLt adds a bias of the result's dtype alone. */
    const int bias = a->bias && a->dtype == a->out_dtype, under = a->bias && !bias;
    struct cpa_cuda_products *products;
    product *p;
    const int many = a->batch > 1;
    product_key key = {.rows = 1,
                       .x_stride = a->x_stride,
                       .weight_stride = a->weight_stride,
                       .out_stride = a->out_stride,
                       .x_batch_stride = many ? a->x_batch_stride : 0,
                       .weight_batch_stride = many ? a->weight_batch_stride : 0,
                       .out_batch_stride = many ? a->out_batch_stride : 0,
                       .inputs = a->inputs,
                       .outputs = a->outputs,
                       .batch = many ? a->batch : 1,
                       .dtype = a->dtype,
                       .out_dtype = a->out_dtype,
                       .alignment = alignment_of(a),
                       .bias = bias};
    while (key.rows < a->rows) key.rows *= 2;
    CPA_TRY(open_products(stream, &products));
    CPA_TRY(find_product(products, &key, &p, err));
    const lt_functions *lt = &products->lt;
    if (bias)
        CPA_TRY(check(err, lt->desc_set(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias),
                      "CUBLASLT_MATMUL_DESC_BIAS_POINTER"));
    CPA_TRY(check(err, lt->layout_set(p->x, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows),
                  "CUBLASLT_MATRIX_LAYOUT_COLS"));
    CPA_TRY(check(err, lt->layout_set(p->out, CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows),
                  "CUBLASLT_MATRIX_LAYOUT_COLS"));
    if (p->unsupported) return in_parts(a, &stream->base);
    if (under) CPA_TRY(cpa_cuda_linear_bias(a, &stream->base));
    const cublasStatus_t answer =
        lt->matmul(products->handle, p->desc, &one, a->weight, p->weight, a->x, p->x, under ? &one : &zero, a->out,
                   p->out, a->out, p->out, &p->algorithm, products->workspace, (size_t)WORKSPACE_BYTES, stream->handle);
    p->unsupported = answer == CUBLAS_STATUS_NOT_SUPPORTED || answer == CUBLAS_STATUS_INVALID_VALUE;
    return p->unsupported ? in_parts(a, &stream->base) : check(err, answer, "cublasLtMatmul");
}

/* Weights in FP8: as those of a single expert. */
static cpa_status by_codes(const cpa_linear_args *a, cpa_stream *stream) {
    const cpa_cuda_expert_product of_codes = {
        .args = {.experts = 1,
                 .rows = a->rows,
                 .inputs = a->inputs,
                 .outputs = a->outputs,
                 .dtype = a->dtype,
                 .out_dtype = a->out_dtype,
                 .x = a->x,
                 .x_rows = a->rows,
                 .x_stride = a->x_stride,
                 .weight = a->weight,
                 .weight_stride = a->weight_stride,
                 .out = a->out,
                 .out_stride = a->out_stride,
                 .weight_scale = a->weight_scale,
                 .weight_scale_rows = a->weight_scale_rows,
                 .weight_scale_columns = a->weight_scale_columns},
        .bias = a->bias,
    };
    if (a->rows > INT32_MAX) return cpa_cuda_unsupported(stream, "linear: rows of a product with FP8 weights", a->rows);
    return cpa_cuda_expert_multiply(&of_codes, stream);
}

cpa_status cpa_cuda_linear(const cpa_linear_args *args, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    const int few = args->rows <= CPA_CUDA_FEW_ROWS && args->dtype != CPA_F32;
    if (args->weight_scale) return by_codes(args, stream);
    if (few && args->batch <= MOST_BATCH) return cpa_cuda_linear_few(args, &ALONE, stream);
    return by_cublas(args, (cpa_cuda_stream *)stream);
}
