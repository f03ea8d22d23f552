/* The server: requests come over HTTP while it runs (server/server.h), until a signal drains it. */
#ifndef CPA_LAUNCHER_SERVE_H
#define CPA_LAUNCHER_SERVE_H

#include "launcher/service.h"

/* Collective. The service has its ranks and its job, and is closed but for its ranks. Returns the same code on every
 * rank: CPA_EXIT_DONE if a signal came and every answer was delivered. A fault that the other ranks cannot learn of
 * ends them all (cpa_job_ranks_abort), after clients have been told. */
cpa_exit_code cpa_serve(cpa_service *service);

#endif
