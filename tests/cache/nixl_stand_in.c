/* The functions of NIXL's C interface that a store over it calls, between processes of one host: an agent is described
 * by its process and what it offers, and a read takes that from the memory of the process. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OK = 0, IN_PROGRESS = 1, BAD = -1, BACKEND = -2, MOST = 64, NAME = 64 };

typedef struct range {
    uint64_t address, n;
} range;

typedef struct agent {
    char name[NAME];
    int64_t process, n_offers, n_peers;
    range offers[MOST];
    struct agent *peers[MOST];
} agent;

typedef struct request {
    const agent *peer;
    range local, remote;
} request;

#define EXPORTED __attribute__((visibility("default")))

EXPORTED bool nixl_capi_is_stub(void);
bool nixl_capi_is_stub(void) {
    return getenv("NIXL_STAND_IN_IS_STUB") != NULL;
}

EXPORTED int nixl_capi_create_agent(const char *name, void **out);
int nixl_capi_create_agent(const char *name, void **out) {
    agent *a = calloc(1, sizeof *a);
    snprintf(a->name, sizeof a->name, "%s", name);
    a->process = getpid();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* or others may not read, on many systems */
    *out = a;
    return OK;
}

EXPORTED int nixl_capi_destroy_agent(agent *a);
int nixl_capi_destroy_agent(agent *a) {
    for (int64_t i = 0; i < a->n_peers; i++) free(a->peers[i]);
    free(a);
    return OK;
}

EXPORTED int nixl_capi_get_plugin_params(agent *a, const char *plugin, void **memories, void **params);
int nixl_capi_get_plugin_params(agent *a, const char *plugin, void **memories, void **params) {
    (void)a;
    if (strcmp(plugin, "UCX") != 0) return BACKEND;
    *memories = malloc(1);
    *params = malloc(1);
    return OK;
}

EXPORTED int nixl_capi_destroy_mem_list(void *memories);
int nixl_capi_destroy_mem_list(void *memories) {
    free(memories);
    return OK;
}

EXPORTED int nixl_capi_destroy_params(void *params);
int nixl_capi_destroy_params(void *params) {
    free(params);
    return OK;
}

EXPORTED int nixl_capi_create_backend(agent *a, const char *plugin, void *params, void **out);
int nixl_capi_create_backend(agent *a, const char *plugin, void *params, void **out) {
    (void)a, (void)plugin;
    *out = malloc(1);
    return params ? OK : BAD;
}

EXPORTED int nixl_capi_destroy_backend(void *backend);
int nixl_capi_destroy_backend(void *backend) {
    free(backend);
    return OK;
}

/* Lists have one range. */
EXPORTED int nixl_capi_create_reg_dlist(int memory, void **out);
int nixl_capi_create_reg_dlist(int memory, void **out) {
    *out = calloc(1, sizeof(range));
    return memory == 0 ? OK : BAD;
}

EXPORTED int nixl_capi_reg_dlist_add_desc(range *list, uintptr_t address, size_t n, uint64_t device,
                                          const void *metadata, size_t bytes);
int nixl_capi_reg_dlist_add_desc(range *list, uintptr_t address, size_t n, uint64_t device, const void *metadata,
                                 size_t bytes) {
    *list = (range){address, n};
    return device == 0 && !metadata && bytes == 0 ? OK : BAD;
}

EXPORTED int nixl_capi_destroy_reg_dlist(void *list);
int nixl_capi_destroy_reg_dlist(void *list) {
    free(list);
    return OK;
}

EXPORTED int nixl_capi_register_mem(agent *a, const range *list, void *optional);
int nixl_capi_register_mem(agent *a, const range *list, void *optional) {
    if (a->n_offers == MOST || optional) return BAD;
    a->offers[a->n_offers++] = *list;
    return OK;
}

EXPORTED int nixl_capi_get_local_md(agent *a, void **out, size_t *n);
int nixl_capi_get_local_md(agent *a, void **out, size_t *n) {
    *out = malloc(sizeof *a);
    memcpy(*out, a, sizeof *a);
    *n = sizeof *a;
    return OK;
}

EXPORTED int nixl_capi_load_remote_md(agent *a, const void *bytes, size_t n, char **name);
int nixl_capi_load_remote_md(agent *a, const void *bytes, size_t n, char **name) {
    if (n != sizeof *a || a->n_peers == MOST) return BAD;
    agent *peer = malloc(sizeof *peer);
    memcpy(peer, bytes, n);
    peer->n_peers = 0;
    a->peers[a->n_peers++] = peer;
    *name = strdup(peer->name);
    return OK;
}

EXPORTED int nixl_capi_create_xfer_dlist(int memory, void **out);
int nixl_capi_create_xfer_dlist(int memory, void **out) {
    return nixl_capi_create_reg_dlist(memory, out);
}

EXPORTED int nixl_capi_xfer_dlist_add_desc(range *list, uintptr_t address, size_t n, uint64_t device);
int nixl_capi_xfer_dlist_add_desc(range *list, uintptr_t address, size_t n, uint64_t device) {
    return nixl_capi_reg_dlist_add_desc(list, address, n, device, NULL, 0);
}

EXPORTED int nixl_capi_destroy_xfer_dlist(void *list);
int nixl_capi_destroy_xfer_dlist(void *list) {
    free(list);
    return OK;
}

static int is_offered(const agent *a, const range *r) {
    for (int64_t i = 0; i < a->n_offers; i++)
        if (r->address >= a->offers[i].address && r->address + r->n <= a->offers[i].address + a->offers[i].n) return 1;
    return 0;
}

EXPORTED int nixl_capi_create_xfer_req(agent *a, int operation, const range *local, const range *remote,
                                       const char *name, void **out, void *optional);
int nixl_capi_create_xfer_req(agent *a, int operation, const range *local, const range *remote, const char *name,
                              void **out, void *optional) {
    const agent *peer = NULL;
    for (int64_t i = 0; i < a->n_peers; i++)
        if (strcmp(a->peers[i]->name, name) == 0) peer = a->peers[i];
    if (operation != 0 || optional || !peer || !is_offered(a, local) || !is_offered(peer, remote)) return BACKEND;
    request *r = malloc(sizeof *r);
    *r = (request){peer, *local, *remote};
    *out = r;
    return OK;
}

EXPORTED int nixl_capi_post_xfer_req(agent *a, request *r, void *optional);
int nixl_capi_post_xfer_req(agent *a, request *r, void *optional) {
    (void)a, (void)r;
    return optional ? BAD : IN_PROGRESS;
}

EXPORTED int nixl_capi_get_xfer_status(agent *a, request *r);
int nixl_capi_get_xfer_status(agent *a, request *r) {
    struct iovec to = {(void *)(uintptr_t)r->local.address, r->local.n};
    struct iovec from = {(void *)(uintptr_t)r->remote.address, r->remote.n};
    (void)a;
    return process_vm_readv((pid_t)r->peer->process, &to, 1, &from, 1, 0) == (ssize_t)r->local.n ? OK : BACKEND;
}

EXPORTED int nixl_capi_release_xfer_req(agent *a, request *r);
int nixl_capi_release_xfer_req(agent *a, request *r) {
    (void)a, (void)r;
    return OK;
}

EXPORTED int nixl_capi_destroy_xfer_req(void *r);
int nixl_capi_destroy_xfer_req(void *r) {
    free(r);
    return OK;
}
