/* cuBLAS, loaded at run time: a program that uses it for its self-test also starts where it is missing. */
#ifndef CPA_CUDA_CUBLAS_H
#define CPA_CUDA_CUBLAS_H

#include <cublas_v2.h>

#include <cpattn/status.h>

/* The functions in use; X(member, name) for each. */
#define CPA_CUBLAS_FUNCTIONS(X)                                                                                        \
    X(create, cublasCreate_v2)                                                                                         \
    X(destroy, cublasDestroy_v2)                                                                                       \
    X(set_stream, cublasSetStream_v2)                                                                                  \
    X(set_math_mode, cublasSetMathMode)                                                                                \
    X(sgemm, cublasSgemm_v2)

typedef struct cpa_cublas {
#define CPA_CUBLAS_MEMBER(member, name) __typeof__(&name) member;
    CPA_CUBLAS_FUNCTIONS(CPA_CUBLAS_MEMBER)
#undef CPA_CUBLAS_MEMBER
} cpa_cublas;

/* Loads the first of the libraries, a list that NULL ends, for the life of the process and finds its functions.
 * CPA_UNSUPPORTED when there is none, with what to do. */
cpa_status cpa_cublas_load(const char *const *sonames, cpa_cublas *out, cpa_error *err);

#endif
