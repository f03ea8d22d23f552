/* How ranks find each other. Each connects to rank 0 and tells it on which port it listens itself; rank 0 tells all of
 * them where all are; then each connects to those between. The connections to rank 0 stay those of the mesh. */
#include "comm/store/mesh.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/store/reception.h"

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
    const cpa_job_key *key;
    double seconds, deadline;
} joining;

void cpa_mesh_close(cpa_mesh *mesh) {
    for (int32_t rank = 0; rank < mesh->size; rank++) cpa_socket_close(&mesh->peers[rank]);
}

/* A rank of the job has come: is it one that is missing? */
static cpa_status admit(joining *j, int fd, const cpa_hello *who, cpa_error *err) {
    const int32_t rank = who->rank;
    if (who->size == j->mesh.size && rank > 0 && rank < j->mesh.size && j->mesh.peers[rank] < 0) {
        j->mesh.peers[rank] = fd;
        return CPA_OK;
    }
    cpa_socket_close(&fd);
    return cpa_fail(err, CPA_INVALID, "rank %d: found rank %d of %d, expected each of %d ranks once", j->mesh.rank,
                    rank, who->size, j->mesh.size);
}

/* Names the ranks from `first` on that have not come. */
static cpa_status name_missing(const joining *j, int32_t first, const cpa_reception *reception, cpa_error *err) {
    char missing[256] = "", strangers[CPA_RECEPTION_LAST_BYTES + 64] = "";
    size_t used = 0;
    int n = 0;
    for (int32_t rank = first; rank < j->mesh.size; rank++) {
        if (j->mesh.peers[rank] >= 0 || used >= sizeof missing) continue;
        used += (size_t)snprintf(missing + used, sizeof missing - used, n++ ? ", %d" : "%d", rank);
    }
    if (reception->turned_away > 0)
        snprintf(strangers, sizeof strangers, "; %" PRId64 " strangers were turned away, the last %s",
                 reception->turned_away, reception->last);
    return cpa_fail(err, CPA_COMM, "rank %d: rank%s %s of %d %s not come in %.0f s%s", j->mesh.rank, n > 1 ? "s" : "",
                    missing, j->mesh.size, n > 1 ? "have" : "has", j->seconds, strangers);
}

/* Takes the ranks that connect here, from `first` on, until all have come. */
static cpa_status gather(joining *j, int listener, cpa_purpose purpose, int32_t first, cpa_error *err) {
    cpa_reception reception;
    cpa_status status = CPA_OK;
    cpa_reception_open(listener, purpose, j->mesh.rank, j->mesh.size, j->key, &reception);
    for (int32_t missing = j->mesh.size - first; missing > 0 && status == CPA_OK; missing--) {
        cpa_hello who;
        int fd;
        status = cpa_reception_next(&reception, j->deadline, &fd, &who, err);
        if (status == CPA_OK) status = fd < 0 ? name_missing(j, first, &reception, err) : admit(j, fd, &who, err);
    }
    cpa_reception_close(&reception);
    return status;
}

/* Rank 0: where the others are. Each says its port as soon as it is let in. */
static cpa_status hear_places(const joining *j, place *places, cpa_error *err) {
    for (int32_t rank = 1; rank < j->mesh.size; rank++) {
        const int fd = j->mesh.peers[rank];
        cpa_error why;
        cpa_socket_peer(fd, places[rank].address);
        if (cpa_socket_receive(fd, &places[rank].port, sizeof places[rank].port, j->deadline, &why) == CPA_OK) continue;
        return cpa_fail(err, CPA_COMM, "rank %d has not said where it listens: %.200s", rank, why.message);
    }
    return CPA_OK;
}

/* Rank 0: waits for all and tells them where they are. */
static cpa_status lead(joining *j, int listener, cpa_error *err) {
    directory all = {.failure = {.status = CPA_OK}};
    cpa_status status = gather(j, listener, CPA_PURPOSE_MEET, 1, &all.failure);
    if (status == CPA_OK) status = hear_places(j, all.places, &all.failure);
    for (int32_t rank = 1; rank < j->mesh.size; rank++) {
        if (j->mesh.peers[rank] < 0) continue;
        const double deadline = j->deadline + CPA_HANDSHAKE_S;
        cpa_status sent = cpa_socket_send(j->mesh.peers[rank], &all, sizeof all, deadline, &all.failure);
        if (status == CPA_OK) status = sent;
    }
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", all.failure.message);
}

/* Connects to rank `peer`, which listens there. */
static cpa_status visit(joining *j, int32_t peer, cpa_purpose purpose, const cpa_endpoint *there, cpa_error *err) {
    const cpa_caller caller = {
        .hello = {.purpose = (int32_t)purpose, .rank = j->mesh.rank, .to = peer, .size = j->mesh.size}, .key = j->key};
    cpa_error why;
    const cpa_status status = cpa_handshake_connect(&caller, there, j->deadline, &j->mesh.peers[peer], &why);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "rank %d: %.400s", j->mesh.rank, why.message);
}

/* Listens where this rank is seen from rank 0, and says so there. */
static cpa_status open_place(joining *j, cpa_error *err) {
    cpa_endpoint here;
    CPA_TRY(cpa_endpoint_of(j->mesh.peers[0], &here, err));
    CPA_TRY(cpa_socket_listen(here.addresses[0], 0, &j->own_listener, err));
    CPA_TRY(cpa_endpoint_of(j->own_listener, &here, err));
    return cpa_socket_send(j->mesh.peers[0], &here.port, sizeof here.port, j->deadline, err);
}

/* Whether what rank 0 has sent may be believed. */
static cpa_status check_directory(const joining *j, directory *all, cpa_error *err) {
    all->failure.message[sizeof all->failure.message - 1] = 0;
    if (all->failure.status != CPA_OK) {
        const cpa_status said = cpa_status_from((int64_t)all->failure.status);
        return cpa_fail(err, said, "%.500s", all->failure.message);
    }
    for (int32_t rank = 1; rank < j->mesh.rank; rank++) {
        place *p = &all->places[rank];
        p->address[sizeof p->address - 1] = 0;
        if (p->port < 1 || p->port > 65535)
            return cpa_fail(err, CPA_COMM, "rank %d: rank 0 says that rank %d listens at port %d", j->mesh.rank, rank,
                            p->port);
    }
    return CPA_OK;
}

/* Other ranks: meets rank 0, connects to the ranks between, and takes those behind. */
static cpa_status follow(joining *j, const cpa_endpoint *meeting, cpa_error *err) {
    directory all;
    cpa_error why;
    const int32_t own = j->mesh.rank;
    CPA_TRY(visit(j, 0, CPA_PURPOSE_MEET, meeting, err));
    CPA_TRY(open_place(j, err));
    if (cpa_socket_receive(j->mesh.peers[0], &all, sizeof all, j->deadline + CPA_HANDSHAKE_S, &why) != CPA_OK) {
        return cpa_fail(err, CPA_COMM, "rank %d: waiting for all ranks at rank 0: %.200s", own, why.message);
    }
    CPA_TRY(check_directory(j, &all, err));
    for (int32_t rank = 1; rank < own; rank++) {
        cpa_endpoint there = {.n_addresses = 1, .port = all.places[rank].port};
        memcpy(there.addresses[0], all.places[rank].address, sizeof there.addresses[0]);
        CPA_TRY(visit(j, rank, CPA_PURPOSE_MESSAGES, &there, err));
    }
    return gather(j, j->own_listener, CPA_PURPOSE_MESSAGES, own + 1, err);
}

cpa_status cpa_mesh_join(const cpa_endpoint *meeting, int listener, int32_t rank, int32_t size, const cpa_job_key *key,
                         double seconds, cpa_mesh *out, cpa_error *err) {
    joining j = {.mesh = {.rank = rank, .size = size},
                 .own_listener = -1,
                 .key = key,
                 .seconds = seconds,
                 .deadline = cpa_clock_now() + seconds};
    for (int32_t r = 0; r < size; r++) j.mesh.peers[r] = -1;
    cpa_status status = rank == 0 ? lead(&j, listener, err) : follow(&j, meeting, err);
    cpa_socket_close(&j.own_listener);
    if (status != CPA_OK) {
        cpa_mesh_close(&j.mesh);
        return status;
    }
    *out = j.mesh;
    return CPA_OK;
}
