/* `cp_attn bench`: measures one operation at a time. */
#ifndef CPA_BENCH_BENCH_H
#define CPA_BENCH_BENCH_H

#include "program/placement.h"

/* Runs `cp_attn bench NAME [options]`; argv[0] is "bench". Collective over `comm`. Chooses the device of the placement.
 * Prints on rank 0; returns the exit code, the same on every rank. */
int cpa_bench_main(cpa_comm *comm, int argc, char **argv, cpa_rank_placement *placement);

#endif
