/* A communicator of the ranks of an ncclComm_t: NCCL takes to all of them where rank 0 listens, and they meet there
 * over TCP. Memory that runs out on one rank before that leaves the others to NCCL's own time-outs. */
#include <cpattn/comm.h>

#include "comm/device/driver.h"
#include "comm/nccl/library.h"
#include "comm/store/mesh.h"

static cpa_status check_result(const cpa_nccl *nccl, ncclResult_t result, const char *call, cpa_error *err) {
    if (result == ncclSuccess) return CPA_OK;
    return cpa_fail(err, CPA_COMM, "%s: %s", call, nccl->ncclGetErrorString(result));
}

/* Where rank 0 listens, and the key of who may connect there. */
typedef struct meeting {
    cpa_endpoint endpoint;
    cpa_job_key key;
} meeting;

/* What rank 0 has in *where, on every rank, through `memory` of the device. */
static cpa_status broadcast(const cpa_nccl *nccl, ncclComm_t comm, meeting *where, void *memory, cudaStream_t stream,
                            cpa_error *err) {
    const size_t bytes = sizeof *where;
    cudaError_t error = cudaMemcpyAsync(memory, where, bytes, cudaMemcpyHostToDevice, stream);
    CPA_TRY(cpa_runtime_check(error, "cudaMemcpyAsync", err));
    ncclResult_t result = nccl->ncclBroadcast(memory, memory, bytes, ncclInt8, 0, comm, stream);
    CPA_TRY(check_result(nccl, result, "ncclBroadcast", err));
    error = cudaMemcpyAsync(where, memory, bytes, cudaMemcpyDeviceToHost, stream);
    CPA_TRY(cpa_runtime_check(error, "cudaMemcpyAsync", err));
    return cpa_runtime_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", err);
}

static cpa_status share(const cpa_nccl *nccl, ncclComm_t comm, meeting *where, cpa_error *err) {
    void *memory = NULL;
    cudaStream_t stream = NULL;
    cpa_status status;
    CPA_TRY_GOTO(cpa_runtime_check(cudaMalloc(&memory, sizeof *where), "cudaMalloc", err), done);
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    CPA_TRY_GOTO(cpa_runtime_check(error, "cudaStreamCreateWithFlags", err), done);
    status = broadcast(nccl, comm, where, memory, stream, err);
done:
    if (stream) cudaStreamDestroy(stream);
    cudaFree(memory);
    return status;
}

/* Rank 0 listens; where it cannot, its endpoint has no address, and all ranks fail. */
static cpa_status meet(const cpa_nccl *nccl, ncclComm_t comm, int32_t rank, int32_t size, double join_s, cpa_mesh *out,
                       cpa_error *err) {
    meeting where = {.endpoint = {.n_addresses = 0}};
    cpa_error why = {.status = CPA_COMM, .message = "rank 0 cannot listen"};
    int listener = -1;
    if (rank == 0 && (cpa_random_fill(&where.key, sizeof where.key, &why) != CPA_OK ||
                      cpa_socket_listen(NULL, 0, &listener, &why) != CPA_OK ||
                      cpa_endpoint_of(listener, &where.endpoint, &why) != CPA_OK))
        where.endpoint.n_addresses = 0;
    cpa_status status = share(nccl, comm, &where, err);
    if (status == CPA_OK && where.endpoint.n_addresses == 0) status = cpa_fail(err, CPA_COMM, "%s", why.message);
    if (status == CPA_OK) status = cpa_mesh_join(&where.endpoint, listener, rank, size, &where.key, join_s, out, err);
    cpa_socket_close(&listener);
    return status;
}

cpa_status cpa_comm_from_nccl(void *nccl_comm, const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    cpa_comm_options own;
    cpa_nccl nccl;
    cpa_mesh mesh;
    int rank, size;
    if (!nccl_comm || !out)
        return cpa_fail(err, CPA_INVALID, "cpa_comm_from_nccl: nccl_comm %p, out %p", nccl_comm, (void *)out);
    CPA_TRY(cpa_comm_take_options(options, &own, err));
    CPA_TRY(cpa_nccl_load(CPA_NCCL_SONAME, &nccl, err));
    CPA_TRY(check_result(&nccl, nccl.ncclCommCount(nccl_comm, &size), "ncclCommCount", err));
    CPA_TRY(check_result(&nccl, nccl.ncclCommUserRank(nccl_comm, &rank), "ncclCommUserRank", err));
    if (size > CPA_COMM_MAX_RANKS) {
        return cpa_fail(err, CPA_INVALID, "communicator of NCCL: %d ranks, expected at most %d", size,
                        CPA_COMM_MAX_RANKS);
    }
    CPA_TRY(meet(&nccl, nccl_comm, rank, size, own.join_s, &mesh, err));
    cpa_status status = cpa_mesh_comm(&mesh, NULL, options, out, err);
    if (status != CPA_OK) cpa_mesh_close(&mesh);
    return status;
}
