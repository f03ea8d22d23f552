/* An agent of NIXL (https://github.com/ai-dynamo/nixl): lets other processes read memory of this one, and reads theirs,
 * over what its back ends reach (UCX: shared memory, RDMA, TCP). By the C interface of libnixl_capi.so, which is opened
 * at run time. Used by one thread at a time. */
#ifndef CPA_CACHE_NIXL_AGENT_H
#define CPA_CACHE_NIXL_AGENT_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_nixl_agent cpa_nixl_agent;

/* CPA_UNSUPPORTED without the library or its functions, CPA_COMM where NIXL refuses, such as a back end that it
 * lacks. */
cpa_status cpa_nixl_agent_create(const char *library, const char *backend, const char *name, cpa_nixl_agent **out,
                                 cpa_error *err);
/* Nobody reads memory of this agent any more. NULL does nothing. */
void cpa_nixl_agent_destroy(cpa_nixl_agent *agent);

/* Lets others read that memory of the host, until the agent is destroyed. */
cpa_status cpa_nixl_agent_offer(cpa_nixl_agent *agent, void *memory, int64_t bytes, cpa_error *err);
/* What another agent reaches this one by, and its memory that was offered before; free() it. */
cpa_status cpa_nixl_agent_describe(cpa_nixl_agent *agent, void **out, size_t *n, cpa_error *err);

/* Takes what the agent of that name has described; CPA_IO for what is no such description. */
cpa_status cpa_nixl_agent_meet(cpa_nixl_agent *agent, const char *peer, const void *description, size_t n,
                               cpa_error *err);
/* Reads n bytes at that address of the peer. CPA_COMM where that fails, or takes more than 10 seconds. */
cpa_status cpa_nixl_agent_read(cpa_nixl_agent *agent, const char *peer, uint64_t address, void *bytes, int64_t n,
                               cpa_error *err);

#endif
