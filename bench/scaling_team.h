/* One layer of context attention on a team of ranks: what bench scaling measures. */
#ifndef CPA_BENCH_SCALING_TEAM_H
#define CPA_BENCH_SCALING_TEAM_H

#include <cpattn/context.h>

#include "bench/site.h"

/* New tokens at the end of sequences of one length, `chunk` of them a step, in one layer. */
typedef struct cpa_bench_work {
    const char *name;
    cpa_algorithm algorithm;
    int64_t sequences, new_tokens, context;
    int64_t chunk;
    int64_t pass_q_tokens; /* prefill: the last so many tokens of a chunk go by pass-Q, whatever the algorithm */
    bool marks_layers;     /* decode in graphs on one rank: the time of each layer is measured too */
} cpa_bench_work;

enum { CPA_BENCH_MARKED_LAYERS = 128 };

/* What a team of ranks needed for it. */
typedef struct cpa_bench_team_result {
    int32_t ranks;
    int64_t iterations;  /* calls that were timed, over all steps */
    double time_s;       /* time of the layer over all steps: a sum of medians, each of the slowest rank */
    double enqueue_s;    /* what the host needed to start the layer */
    double exposed_s;    /* part of time_s in which the rank that waits most for messages waits */
    double bytes_sent;   /* bytes sent by all ranks */
    double flops, bytes; /* FLOPs and bytes of attention on all ranks */
    double shard_s;      /* decode on several ranks: time in which the rank's shares alone are attended; else 0 */
    double layer_s[CPA_BENCH_MARKED_LAYERS]; /* [n_layers] seconds of each layer, of work that marks layers */
    int32_t n_layers;                        /* 0: none were marked */
    /* Decode on several ranks: how much longer a layer that waits for the slowest rank takes than that rank does on
     * average, without any exchange. */
    double differ_s;
    double checked, wrong;
} cpa_bench_team_result;

/* Runs the work on the ranks of `comm`, this one included. Collective over `comm`. */
cpa_status cpa_bench_team_run(cpa_bench_site *site, cpa_comm *comm, const cpa_bench_work *work,
                              cpa_bench_team_result *out, cpa_error *err);

#endif
