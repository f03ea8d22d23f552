/* Communicators of ranks that meet at a host and a port. */
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "comm/store/mesh.h"

static cpa_status check_place(const char *host, int32_t port, int32_t rank, int32_t size, cpa_error *err) {
    if (!host || !host[0] || strlen(host) >= CPA_ADDRESS_BYTES || port < 1 || port > 65535) {
        return cpa_fail(err, CPA_INVALID,
                        "store: found '%.100s' port %d, expected a host of at most %d letters and 1..65535",
                        host ? host : "", port, CPA_ADDRESS_BYTES - 1);
    }
    if (size < 1 || size > CPA_COMM_MAX_RANKS || rank < 0 || rank >= size) {
        return cpa_fail(err, CPA_INVALID, "store: rank %d of %d, expected 0..size-1 of at most %d", rank, size,
                        CPA_COMM_MAX_RANKS);
    }
    return CPA_OK;
}

cpa_status cpa_comm_from_store(const char *host, int32_t port, int32_t rank, int32_t size,
                               const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    cpa_comm_options own;
    cpa_job_key key;
    cpa_mesh mesh;
    int listener = -1;
    CPA_TRY(check_place(host, port, rank, size, err));
    CPA_TRY(cpa_comm_take_options(options, &own, err));
    CPA_TRY(cpa_comm_key(&own, &key, err));
    if (!own.secret && rank == 0 && size > 1)
        cpa_log(CPA_LOG_WARN, "store: the job has no secret: whoever reaches %s port %d may take a rank's place", host,
                port);
    if (rank == 0) CPA_TRY(cpa_socket_listen(host, port, &listener, err));
    cpa_endpoint meeting = {.n_addresses = 1, .port = port};
    snprintf(meeting.addresses[0], CPA_ADDRESS_BYTES, "%s", host);
    cpa_status status = cpa_mesh_join(&meeting, listener, rank, size, &key, own.join_s, &mesh, err);
    cpa_socket_close(&listener);
    if (status != CPA_OK) return status;
    status = cpa_mesh_comm(&mesh, host, options, out, err);
    if (status != CPA_OK) cpa_mesh_close(&mesh);
    return status;
}

#ifndef CPA_HAVE_CUDA
cpa_status cpa_comm_from_nccl(void *nccl_comm, const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    (void)nccl_comm, (void)options, (void)out;
    return cpa_fail(err, CPA_UNSUPPORTED, "cpa_comm_from_nccl: this build has no CUDA back end");
}
#endif
