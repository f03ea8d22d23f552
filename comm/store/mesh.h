/* Every two of some ranks, connected by TCP. */
#ifndef CPA_STORE_MESH_H
#define CPA_STORE_MESH_H

#include "comm/communicator.h"
#include "comm/store/handshake.h"

typedef struct cpa_mesh {
    int32_t rank, size;
    int peers[CPA_COMM_MAX_RANKS]; /* a socket for each other rank; -1 for this one */
} cpa_mesh;

/* Collective: rank 0, which listens on `listener`, is at `meeting`; only who knows `key` is let in. Fails after `seconds`,
 * naming the ranks that have not come. On failure nothing is left open; `listener` (-1 on other ranks) stays the
 * caller's. */
cpa_status cpa_mesh_join(const cpa_endpoint *meeting, int listener, int32_t rank, int32_t size, const cpa_job_key *key,
                         double seconds, cpa_mesh *out, cpa_error *err);
void cpa_mesh_close(cpa_mesh *mesh);

/* What carries messages over the mesh: a table for cpa_comm_create and its state, which closes the mesh with itself. On
 * failure the mesh is the caller's. */
cpa_status cpa_mesh_messages(const cpa_mesh *mesh, cpa_comm_ops *ops, void **state, cpa_error *err);
/* A communicator over the mesh, which it closes with itself; `host` as in cpa_comm_create_at. On failure the mesh is the
 * caller's. */
cpa_status cpa_mesh_comm(const cpa_mesh *mesh, const char *host, const cpa_comm_options *options, cpa_comm **out,
                         cpa_error *err);

#endif
