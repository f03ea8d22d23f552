/* The unfused fp32 reference of attend: S = Q K^T by cuBLAS, masked softmax, O = P V by cuBLAS, head after head. cuBLAS
 * is loaded at run time: a program that uses it for its self-test also starts where it is missing. */
#include <cublas_v2.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/check/reference.h"

/* The functions in use; X(member, name) for each. */
#define FUNCTIONS(X)                                                                                                   \
    X(create, cublasCreate_v2)                                                                                         \
    X(destroy, cublasDestroy_v2)                                                                                       \
    X(set_stream, cublasSetStream_v2)                                                                                  \
    X(set_math_mode, cublasSetMathMode)                                                                                \
    X(sgemm, cublasSgemm_v2)

typedef struct cublas_functions {
#define MEMBER(member, name) __typeof__(&name) member;
    FUNCTIONS(MEMBER)
#undef MEMBER
} cublas_functions;

struct cpa_reference_blas {
    cpa_device *device;
    cublas_functions blas;
    cublasHandle_t handle;
};

static cpa_status load(cublas_functions *out, cpa_error *err) {
    static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12"};
    cpa_cuda_library library;
    cublas_functions blas;
    CPA_TRY(cpa_cuda_library_open("cuBLAS", sonames, (int)(sizeof sonames / sizeof *sonames), &library, err));
#define FIND(member, name) CPA_TRY(cpa_cuda_library_find(&library, #name, &blas.member, err));
    FUNCTIONS(FIND)
#undef FIND
    *out = blas;
    return CPA_OK;
}

static cpa_status check(cpa_error *err, cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return CPA_OK;
    return cpa_fail(err, CPA_DEVICE, "reference: %s failed with cuBLAS error %d", what, (int)status);
}

cpa_status cpa_cuda_reference_open(cpa_device *device, cpa_reference_blas **out, cpa_error *err) {
    cpa_status status;
    CPA_TRY(cpa_cuda_select(device, err));
    cpa_reference_blas *ref = calloc(1, sizeof *ref);
    if (!ref) return cpa_fail(err, CPA_NO_MEMORY, "reference: no memory");
    ref->device = device;
    CPA_TRY_GOTO(load(&ref->blas, err), failed);
    CPA_TRY_GOTO(check(err, ref->blas.create(&ref->handle), "cublasCreate"), failed);
    CPA_TRY_GOTO(check(err, ref->blas.set_math_mode(ref->handle, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode"), failed);
    *out = ref;
    return CPA_OK;
failed:
    cpa_cuda_reference_close(ref);
    return status;
}

void cpa_cuda_reference_close(cpa_reference_blas *ref) {
    if (!ref) return;
    if (ref->handle) (void)ref->blas.destroy(ref->handle);
    free(ref);
}

/* Both products in cuBLAS's column-major order: a row-major [a, b] matrix is its [b, a] matrix. */
static cpa_status run(cpa_reference_blas *ref, const cpa_reference_attend_args *a, float *scores, float *magnitude,
                      cpa_stream *stream) {
    const int rows = (int)a->rows, keys = (int)a->keys, group = a->shape.q_heads / a->shape.kv_heads;
    const int k_lead = a->shape.kv_heads * a->shape.k_dim, v_lead = a->shape.kv_heads * a->shape.v_dim;
    const int q_lead = a->shape.q_heads * a->shape.k_dim, o_lead = a->shape.q_heads * a->shape.v_dim;
    const float zero = 0, one = 1;
    cpa_error *err = &stream->error;
    CPA_TRY(check(err, ref->blas.set_stream(ref->handle, cpa_cuda_handle(stream)), "cublasSetStream"));
    CPA_TRY(cpa_cuda_reference_magnitude(magnitude, a->v, a->keys * v_lead, stream));
    for (int h = 0; h < a->shape.q_heads; h++) {
        CPA_TRY(check(err,
                      ref->blas.sgemm(ref->handle, CUBLAS_OP_T, CUBLAS_OP_N, keys, rows, a->shape.k_dim, &a->scale,
                                      a->k + h / group * a->shape.k_dim, k_lead, a->q + h * a->shape.k_dim, q_lead,
                                      &zero, scores + (int64_t)h * rows * keys, keys),
                      "Q K^T"));
    }
    CPA_TRY(cpa_cuda_reference_softmax(a, scores, stream));
    for (int h = 0; h < a->shape.q_heads; h++) {
        const float *p = scores + (int64_t)h * rows * keys;
        const int v_at = h / group * a->shape.v_dim, o_at = h * a->shape.v_dim;
        CPA_TRY(check(err,
                      ref->blas.sgemm(ref->handle, CUBLAS_OP_N, CUBLAS_OP_N, a->shape.v_dim, rows, keys, &one,
                                      a->v + v_at, v_lead, p, keys, &zero, a->o + o_at, o_lead),
                      "P V"));
        CPA_TRY(check(err,
                      ref->blas.sgemm(ref->handle, CUBLAS_OP_N, CUBLAS_OP_N, a->shape.v_dim, rows, keys, &one,
                                      magnitude + v_at, v_lead, p, keys, &zero, a->mass + o_at, o_lead),
                      "P |V|"));
    }
    return CPA_OK;
}

cpa_status cpa_cuda_reference_attend(cpa_reference_blas *ref, const cpa_reference_attend_args *args,
                                     cpa_stream *stream) {
    const cpa_device_table *table = ref->device->table;
    void *scores = NULL, *magnitude = NULL;
    cpa_status status;
    const int64_t element = (int64_t)sizeof(float);
    CPA_TRY_GOTO(
        table->alloc(ref->device, args->shape.q_heads * args->rows * args->keys * element, &scores, &stream->error),
        done);
    CPA_TRY_GOTO(table->alloc(ref->device, args->keys * args->shape.kv_heads * args->shape.v_dim * element, &magnitude,
                              &stream->error),
                 done);
    CPA_TRY_GOTO(run(ref, args, scores, magnitude, stream), done);
    status = table->stream_sync(stream);
done:
    table->free(ref->device, magnitude);
    table->free(ref->device, scores);
    return status;
}
