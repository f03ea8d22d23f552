/* Every two of some ranks, connected by TCP. */
#ifndef CPA_STORE_MESH_H
#define CPA_STORE_MESH_H

#include "comm/communicator.h"
#include "comm/store/socket.h"

typedef struct cpa_mesh {
    int32_t rank, size;
    int peers[CPA_COMM_MAX_RANKS]; /* a socket for each other rank; -1 for this one */
} cpa_mesh;

/* Collective: rank 0, which listens on `listener`, is at `meeting`. On failure nothing is left open; `listener` (-1 on
 * other ranks) stays the caller's. */
cpa_status cpa_mesh_join(const cpa_endpoint *meeting, int listener, int32_t rank, int32_t size, double seconds,
                         cpa_mesh *out, cpa_error *err);
void cpa_mesh_close(cpa_mesh *mesh);

/* A communicator over the mesh, which it closes with itself; on failure the mesh is the caller's. */
cpa_status cpa_mesh_comm(const cpa_mesh *mesh, const cpa_comm_options *options, cpa_comm **out, cpa_error *err);

#endif
