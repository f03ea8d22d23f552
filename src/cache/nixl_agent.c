#include "src/cache/nixl_agent.h"

#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/shared_library.h"

/* Of src/bindings/rust/wrapper.h of NIXL 1.5: its handles are pointers, and what its functions return is 0,
 * IN_PROGRESS, or a number below 0 for a failure. */
enum { HOST_MEMORY = 0, READ_OPERATION = 0, IN_PROGRESS = 1 };

#define NIXL_FUNCTIONS(F)                                                                                              \
    F(create_agent, (const char *name, void **agent))                                                                  \
    F(destroy_agent, (void *agent))                                                                                    \
    F(get_plugin_params, (void *agent, const char *plugin, void **memories, void **params))                            \
    F(destroy_mem_list, (void *memories))                                                                              \
    F(destroy_params, (void *params))                                                                                  \
    F(create_backend, (void *agent, const char *plugin, void *params, void **backend))                                 \
    F(destroy_backend, (void *backend))                                                                                \
    F(create_reg_dlist, (int memory, void **list))                                                                     \
    F(reg_dlist_add_desc,                                                                                              \
      (void *list, uintptr_t address, size_t n, uint64_t device, const void *metadata, size_t metadata_bytes))         \
    F(destroy_reg_dlist, (void *list))                                                                                 \
    F(register_mem, (void *agent, void *list, void *optional))                                                         \
    F(get_local_md, (void *agent, void **bytes, size_t *n))                                                            \
    F(load_remote_md, (void *agent, const void *bytes, size_t n, char **name))                                         \
    F(create_xfer_dlist, (int memory, void **list))                                                                    \
    F(xfer_dlist_add_desc, (void *list, uintptr_t address, size_t n, uint64_t device))                                 \
    F(destroy_xfer_dlist, (void *list))                                                                                \
    F(create_xfer_req,                                                                                                 \
      (void *agent, int operation, void *local, void *remote, const char *peer, void **request, void *optional))       \
    F(post_xfer_req, (void *agent, void *request, void *optional))                                                     \
    F(get_xfer_status, (void *agent, void *request))                                                                   \
    F(release_xfer_req, (void *agent, void *request))                                                                  \
    F(destroy_xfer_req, (void *request))

typedef struct nixl {
#define NIXL_POINTER(name, parameters) int(*name) parameters;
    NIXL_FUNCTIONS(NIXL_POINTER)
#undef NIXL_POINTER
} nixl;

/* Memory where reads arrive. One whose read was given up may still be written to: it stays until the agent ends. */
typedef struct landing {
    struct landing *next;
    void *memory;
    int64_t bytes;
} landing;

struct cpa_nixl_agent {
    nixl nixl;
    void *agent, *backend;
    landing *landings; /* the first is the one in use */
    int is_given_up;   /* a read into it was given up */
};

static cpa_status load(const char *file, nixl *out, cpa_error *err) {
    static const char WHAT[] = "nixl store";
    bool (*is_stub)(void);
    void *library;
    CPA_TRY(cpa_library_open(WHAT, file, &library, err));
#define NIXL_FIND(name, parameters) CPA_TRY(cpa_library_find(WHAT, library, file, "nixl_capi_" #name, &out->name, err));
    NIXL_FUNCTIONS(NIXL_FIND)
#undef NIXL_FIND
    CPA_TRY(cpa_library_find(WHAT, library, file, "nixl_capi_is_stub", &is_stub, err));
    return is_stub() ? cpa_fail(err, CPA_UNSUPPORTED, "%s: %s is a stub of NIXL, expected NIXL", WHAT, file) : CPA_OK;
}

/* What a number that NIXL returns stands for. */
static cpa_status check(int status, const char *function, cpa_error *err) {
    static const char *const names[] = {"success",   "invalid parameter", "back end", "invalid state",
                                        "exception", "no telemetry",      "not found"};
    if (status >= 0) return CPA_OK;
    const int known = -status < (int)(sizeof names / sizeof names[0]);
    return cpa_fail(err, CPA_COMM, "nixl store: nixl_capi_%s fails: %d (%s)", function, status,
                    known ? names[-status] : "unknown");
}

#define NIXL_TRY(a, name, ...) CPA_TRY(check((a)->nixl.name(__VA_ARGS__), #name, err))

static cpa_status open_backend(cpa_nixl_agent *a, const char *backend, cpa_error *err) {
    void *memories = NULL, *params = NULL;
    if (a->nixl.get_plugin_params(a->agent, backend, &memories, &params) < 0)
        return cpa_fail(err, CPA_COMM, "nixl store: NIXL has no back end %s (NIXL_PLUGIN_DIR says where it looks)",
                        backend);
    const cpa_status status =
        check(a->nixl.create_backend(a->agent, backend, params, &a->backend), "create_backend", err);
    a->nixl.destroy_mem_list(memories);
    a->nixl.destroy_params(params);
    return status;
}

cpa_status cpa_nixl_agent_create(const char *library, const char *backend, const char *name, cpa_nixl_agent **out,
                                 cpa_error *err) {
    cpa_nixl_agent *a = calloc(1, sizeof *a);
    if (!a) return cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory");
    cpa_status status = load(library, &a->nixl, err);
    if (status == CPA_OK) status = check(a->nixl.create_agent(name, &a->agent), "create_agent", err);
    if (status == CPA_OK) status = open_backend(a, backend, err);
    if (status != CPA_OK) {
        cpa_nixl_agent_destroy(a);
        return status;
    }
    *out = a;
    return CPA_OK;
}

void cpa_nixl_agent_destroy(cpa_nixl_agent *a) {
    landing *next;
    if (!a) return;
    if (a->backend) a->nixl.destroy_backend(a->backend);
    if (a->agent) a->nixl.destroy_agent(a->agent);
    for (landing *l = a->landings; l; l = next) {
        next = l->next;
        munmap(l->memory, (size_t)l->bytes);
        free(l);
    }
    free(a);
}

cpa_status cpa_nixl_agent_offer(cpa_nixl_agent *a, void *memory, int64_t bytes, cpa_error *err) {
    void *list;
    NIXL_TRY(a, create_reg_dlist, HOST_MEMORY, &list);
    cpa_status status = check(a->nixl.reg_dlist_add_desc(list, (uintptr_t)memory, (size_t)bytes, 0, NULL, 0),
                              "reg_dlist_add_desc", err);
    if (status == CPA_OK) status = check(a->nixl.register_mem(a->agent, list, NULL), "register_mem", err);
    a->nixl.destroy_reg_dlist(list);
    return status;
}

cpa_status cpa_nixl_agent_describe(cpa_nixl_agent *a, void **out, size_t *n, cpa_error *err) {
    NIXL_TRY(a, get_local_md, a->agent, out, n);
    return CPA_OK;
}

cpa_status cpa_nixl_agent_meet(cpa_nixl_agent *a, const char *peer, const void *description, size_t n, cpa_error *err) {
    char *name = NULL;
    if (a->nixl.load_remote_md(a->agent, description, n, &name) < 0)
        return cpa_fail(err, CPA_IO, "nixl store: what describes agent %s is refused by NIXL", peer);
    const int same = strcmp(name, peer) == 0;
    if (!same) cpa_fail(err, CPA_IO, "nixl store: what describes agent %s is that of %s", peer, name);
    free(name);
    return same ? CPA_OK : CPA_IO;
}

/* ---- reads ---- */

/* Sees to it that the first landing has n bytes, and is in no use. */
static cpa_status make_landing(cpa_nixl_agent *a, int64_t n, cpa_error *err) {
    enum { LEAST = 4 << 20 };
    if (a->landings && a->landings->bytes >= n && !a->is_given_up) return CPA_OK;
    landing *l = calloc(1, sizeof *l);
    if (!l) return cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory");
    l->bytes = n > LEAST ? n : LEAST;
    l->memory = mmap(NULL, (size_t)l->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cpa_status status = l->memory == MAP_FAILED
                            ? cpa_fail(err, CPA_NO_MEMORY, "nixl store: no memory for %" PRId64 " bytes", l->bytes)
                            : cpa_nixl_agent_offer(a, l->memory, l->bytes, err);
    if (status != CPA_OK) {
        if (l->memory != MAP_FAILED) munmap(l->memory, (size_t)l->bytes);
        free(l);
        return status;
    }
    l->next = a->landings;
    a->landings = l;
    a->is_given_up = 0;
    return CPA_OK;
}

static cpa_status make_list(cpa_nixl_agent *a, uint64_t address, int64_t n, void **out, cpa_error *err) {
    NIXL_TRY(a, create_xfer_dlist, HOST_MEMORY, out);
    const cpa_status status =
        check(a->nixl.xfer_dlist_add_desc(*out, (uintptr_t)address, (size_t)n, 0), "xfer_dlist_add_desc", err);
    if (status != CPA_OK) a->nixl.destroy_xfer_dlist(*out);
    return status;
}

/* Starts the read; *request is to be released. */
static cpa_status start(cpa_nixl_agent *a, const char *peer, uint64_t address, int64_t n, void **request,
                        cpa_error *err) {
    void *local, *remote;
    CPA_TRY(make_list(a, (uintptr_t)a->landings->memory, n, &local, err));
    cpa_status status = make_list(a, address, n, &remote, err);
    if (status == CPA_OK) {
        status = check(a->nixl.create_xfer_req(a->agent, READ_OPERATION, local, remote, peer, request, NULL),
                       "create_xfer_req", err);
        a->nixl.destroy_xfer_dlist(remote);
    }
    a->nixl.destroy_xfer_dlist(local);
    return status;
}

/* Until the read is done: a little while without a pause. */
static cpa_status wait(cpa_nixl_agent *a, const char *peer, void *request, int status, cpa_error *err) {
    const double begin = cpa_clock_now(), limit = 10, pause_after = 1e-3;
    while (status == IN_PROGRESS) {
        const double passed = cpa_clock_now() - begin;
        if (passed > limit) {
            a->is_given_up = 1;
            return cpa_fail(err, CPA_COMM, "nixl store: agent %s gives no answer in %.0f s", peer, limit);
        }
        if (passed > pause_after)
            usleep(20);
        else
            sched_yield();
        status = a->nixl.get_xfer_status(a->agent, request);
    }
    return check(status, "get_xfer_status", err);
}

cpa_status cpa_nixl_agent_read(cpa_nixl_agent *a, const char *peer, uint64_t address, void *bytes, int64_t n,
                               cpa_error *err) {
    void *request;
    CPA_TRY(make_landing(a, n, err));
    CPA_TRY(start(a, peer, address, n, &request, err));
    const cpa_status status = wait(a, peer, request, a->nixl.post_xfer_req(a->agent, request, NULL), err);
    if (status == CPA_OK) memcpy(bytes, a->landings->memory, (size_t)n);
    if (a->nixl.release_xfer_req(a->agent, request) >= 0) a->nixl.destroy_xfer_req(request);
    return status;
}
