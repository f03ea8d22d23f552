/* The main job: runs the requests that the settings ask for and reports what happened. */
#ifndef CPA_LAUNCHER_RUN_H
#define CPA_LAUNCHER_RUN_H

#include <cpattn/comm.h>

#include "launcher/exit_code.h"

/* Collective over `comm`. Rank 0 reads the command line, the files and the environment, and prints; returns the same
 * code on every rank. A fault that the other ranks cannot learn of ends them all (cpa_ranks_abort). */
cpa_exit_code cpa_run_main(cpa_comm *comm, int argc, char **argv);

#endif
