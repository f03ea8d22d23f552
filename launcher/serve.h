/* The main job: serves the requests that the settings ask for and reports what happened. */
#ifndef CPA_LAUNCHER_SERVE_H
#define CPA_LAUNCHER_SERVE_H

#include <cpattn/comm.h>

#include "launcher/exit_code.h"

/* Called where the fault points of the test build are armed: before the engine is created, and after. */
typedef void (*cpa_arm_fn)(int engine_started);

/* Collective over `comm`. Rank 0 reads the command line, the files and the environment, and prints; returns the same
 * code on every rank. A fault that the other ranks cannot learn of ends them all (cpa_ranks_abort). `arm` may be NULL. */
cpa_exit_code cpa_serve(cpa_comm *comm, int argc, char **argv, cpa_arm_fn arm);

#endif
