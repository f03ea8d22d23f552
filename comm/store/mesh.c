/* How ranks find each other. Each connects to rank 0 and says on which port it listens itself; rank 0 tells all of them
 * where all are; then each connects to those between. The connections to rank 0 stay those of the mesh. */
#include "comm/store/mesh.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"

#define HELLO_MAGIC UINT64_C(0x63706174746e3031) /* "cpattn01" */

/* How long somebody who connects may take to say who he is. */
#define HELLO_S 5.0

typedef struct hello {
    uint64_t magic;
    int32_t rank, size;
    int32_t port; /* where the rank listens for others */
    int32_t reserved;
} hello;

/* One rank that listens. */
typedef struct place {
    char address[CPA_ADDRESS_BYTES];
    int32_t port;
} place;

/* Of rank 0: where everybody is, or why it has given up. */
typedef struct directory {
    cpa_error failure;
    place places[CPA_COMM_MAX_RANKS];
} directory;

typedef struct joining {
    cpa_mesh mesh;
    int own_listener;
    int32_t own_port;
    double deadline;
} joining;

void cpa_mesh_close(cpa_mesh *mesh) {
    for (int32_t rank = 0; rank < mesh->size; rank++) cpa_socket_close(&mesh->peers[rank]);
}

static cpa_status greet(const joining *j, int fd, cpa_error *err) {
    const hello own = {HELLO_MAGIC, j->mesh.rank, j->mesh.size, j->own_port, 0};
    return cpa_socket_send(fd, &own, sizeof own, j->deadline, err);
}

/* Somebody has connected: a rank that is missing, or a stranger, who is sent away. */
static cpa_status admit(joining *j, int fd, place *where, int *admitted, cpa_error *err) {
    hello theirs;
    double limit = cpa_clock_now() + HELLO_S;
    *admitted = 0;
    if (cpa_socket_receive(fd, &theirs, sizeof theirs, limit, NULL) != CPA_OK || theirs.magic != HELLO_MAGIC) {
        cpa_socket_close(&fd);
        return CPA_OK;
    }
    const int32_t rank = theirs.rank;
    if (theirs.size != j->mesh.size || rank <= 0 || rank >= j->mesh.size || j->mesh.peers[rank] >= 0) {
        cpa_socket_close(&fd);
        return cpa_fail(err, CPA_INVALID, "rank %d: found rank %d of %d, expected each of %d ranks once", j->mesh.rank,
                        rank, theirs.size, j->mesh.size);
    }
    j->mesh.peers[rank] = fd;
    if (where) {
        cpa_socket_peer(fd, where[rank].address);
        where[rank].port = theirs.port;
    }
    *admitted = 1;
    return CPA_OK;
}

/* Takes the ranks that connect here, from `first` on, until all have come. */
static cpa_status gather(joining *j, int listener, int32_t first, place *where, cpa_error *err) {
    for (int32_t missing = j->mesh.size - first; missing > 0;) {
        int fd, admitted;
        CPA_TRY(cpa_socket_accept(listener, j->deadline, &fd, err));
        if (fd < 0) {
            int32_t r = first;
            while (j->mesh.peers[r] >= 0) r++;
            return cpa_fail(err, CPA_COMM, "rank %d: %d of %d ranks have not come in time, the first of them rank %d",
                            j->mesh.rank, missing, j->mesh.size, r);
        }
        CPA_TRY(admit(j, fd, where, &admitted, err));
        missing -= admitted;
    }
    return CPA_OK;
}

/* Rank 0: waits for all and tells them where they are. */
static cpa_status lead(joining *j, int listener, cpa_error *err) {
    directory all = {.failure = {.status = CPA_OK}};
    cpa_status status = gather(j, listener, 1, all.places, &all.failure);
    for (int32_t rank = 1; rank < j->mesh.size; rank++) {
        if (j->mesh.peers[rank] < 0) continue;
        cpa_status sent = cpa_socket_send(j->mesh.peers[rank], &all, sizeof all, j->deadline + HELLO_S, &all.failure);
        if (status == CPA_OK) status = sent;
    }
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", all.failure.message);
}

/* Other ranks: meets rank 0, connects to the ranks between, and takes those behind. */
static cpa_status follow(joining *j, const cpa_endpoint *meeting, cpa_error *err) {
    directory all;
    cpa_error why;
    const int32_t own = j->mesh.rank;
    CPA_TRY(cpa_socket_connect(meeting, j->deadline, &j->mesh.peers[0], err));
    CPA_TRY(greet(j, j->mesh.peers[0], err));
    if (cpa_socket_receive(j->mesh.peers[0], &all, sizeof all, j->deadline + HELLO_S, &why) != CPA_OK) {
        return cpa_fail(err, CPA_COMM, "rank %d: waiting for all ranks at rank 0: %.200s", own, why.message);
    }
    if (all.failure.status != CPA_OK) return cpa_fail(err, all.failure.status, "%.500s", all.failure.message);
    for (int32_t rank = 1; rank < own; rank++) {
        cpa_endpoint there = {.n_addresses = 1, .port = all.places[rank].port};
        snprintf(there.addresses[0], CPA_ADDRESS_BYTES, "%.*s", CPA_ADDRESS_BYTES - 1, all.places[rank].address);
        CPA_TRY(cpa_socket_connect(&there, j->deadline, &j->mesh.peers[rank], err));
        CPA_TRY(greet(j, j->mesh.peers[rank], err));
    }
    return gather(j, j->own_listener, own + 1, NULL, err);
}

cpa_status cpa_mesh_join(const cpa_endpoint *meeting, int listener, int32_t rank, int32_t size, double seconds,
                         cpa_mesh *out, cpa_error *err) {
    joining j = {.mesh = {.rank = rank, .size = size}, .own_listener = -1, .deadline = cpa_clock_now() + seconds};
    for (int32_t r = 0; r < size; r++) j.mesh.peers[r] = -1;
    cpa_status status = CPA_OK;
    if (rank > 0) status = cpa_socket_listen(0, &j.own_listener, &j.own_port, err);
    if (status == CPA_OK) status = rank == 0 ? lead(&j, listener, err) : follow(&j, meeting, err);
    cpa_socket_close(&j.own_listener);
    if (status != CPA_OK) {
        cpa_mesh_close(&j.mesh);
        return status;
    }
    *out = j.mesh;
    return CPA_OK;
}
