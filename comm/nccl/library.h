/* NCCL, loaded at run time: a program that could use it also starts where it is missing. */
#ifndef CPA_NCCL_LIBRARY_H
#define CPA_NCCL_LIBRARY_H

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cpattn/status.h>

/* The functions in use; X(name) for each. */
#define CPA_NCCL_FUNCTIONS(X)                                                                                          \
    X(ncclGetUniqueId)                                                                                                 \
    X(ncclCommInitRankConfig)                                                                                          \
    X(ncclCommCount)                                                                                                   \
    X(ncclCommUserRank)                                                                                                \
    X(ncclBroadcast)                                                                                                   \
    X(ncclCommDestroy)                                                                                                 \
    X(ncclCommAbort)                                                                                                   \
    X(ncclCommGetAsyncError)                                                                                           \
    X(ncclGroupStart)                                                                                                  \
    X(ncclGroupEnd)                                                                                                    \
    X(ncclSend)                                                                                                        \
    X(ncclRecv)                                                                                                        \
    X(ncclGetErrorString)                                                                                              \
    X(ncclGetLastError)

typedef struct cpa_nccl {
#define CPA_NCCL_MEMBER(name) __typeof__(&name) name;
    CPA_NCCL_FUNCTIONS(CPA_NCCL_MEMBER)
#undef CPA_NCCL_MEMBER
} cpa_nccl;

#define CPA_NCCL_SONAME "libnccl.so.2"

/* Loads the library of that name for the life of the process and finds its functions. CPA_COMM when it is missing or
 * too old, with what to do. */
cpa_status cpa_nccl_load(const char *soname, cpa_nccl *out, cpa_error *err);

#endif
