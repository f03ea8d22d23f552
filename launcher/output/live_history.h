/* What has happened lately on a server, in memory of a fixed size: figures of the last ten minutes, the latencies of
 * the last tokens and requests, the last steps of each rank, and the bytes between ranks.
 *
 * Any thread may call any function at any time, but for create and release; each holds the lock for a copy at most.
 * Times are those of cpa_clock_now, in seconds, where nothing else is said. */
#ifndef CPA_LAUNCHER_LIVE_HISTORY_H
#define CPA_LAUNCHER_LIVE_HISTORY_H

#include <cpattn/engine.h>

#include "program/chart/pairs.h"

enum {
    CPA_LIVE_PERIODS = 300,
    CPA_LIVE_PERIOD_S = 2,
    CPA_LIVE_SAMPLES = CPA_LIVE_PERIODS + 1, /* with the one before these */
    CPA_LIVE_LATENCIES = 4096,               /* the last ones, of each kind */
    CPA_LIVE_STEPS = 32                      /* the last ones, of each rank */
};

/* Figures that are kept of each period. */
typedef enum cpa_live_figure {
    CPA_LIVE_RUNNING = 0, /* requests */
    CPA_LIVE_WAITING,
    CPA_LIVE_CACHE,         /* share of the blocks of the cache that requests have, from 0 to 1 */
    CPA_LIVE_OUTPUT_TOKENS, /* from here on since the start */
    CPA_LIVE_PROMPT_TOKENS, /* of prompts that have got their first token */
    CPA_LIVE_BYTES_SENT,
    CPA_LIVE_EXPOSED_COMM_S,
    CPA_LIVE_VERIFY_ROWS,
    CPA_LIVE_VIOLATIONS,
    CPA_LIVE_COMPLETED, /* requests */
    CPA_LIVE_TTFT_S,    /* sum over these */
    CPA_LIVE_E2E_S,
    CPA_LIVE_FIGURES
} cpa_live_figure;

/* Figures at the end of period number `period` of those since the start, or so far in it. */
typedef struct cpa_live_sample {
    int64_t period;
    double values[CPA_LIVE_FIGURES];
} cpa_live_sample;

/* The last CPA_LIVE_LATENCIES of `added`, in ms, in no order. */
typedef struct cpa_live_latencies {
    double ms[CPA_LIVE_LATENCIES];
    int64_t added;
} cpa_live_latencies;

/* A step of a rank, or the last one of several that were told at once; times of the engine. */
typedef struct cpa_live_step {
    double begin_s, end_s;
    double attend_s, wait_s, graph_s; /* within it */
} cpa_live_step;

typedef struct cpa_live_rank {
    cpa_live_step steps[CPA_LIVE_STEPS]; /* step i of `told` lies at i % CPA_LIVE_STEPS */
    int64_t told;
    cpa_rank_stats last;
} cpa_live_rank;

typedef struct cpa_live_figures {
    double start_s;
    cpa_live_sample samples[CPA_LIVE_SAMPLES]; /* sample i of n_samples lies at i % CPA_LIVE_SAMPLES */
    int64_t n_samples;                         /* periods in which something happened */
    cpa_live_latencies ttft, itl;              /* of requests that were completed */
    int32_t n_ranks;
    cpa_live_rank ranks[CPA_CHART_MOST_RANKS];
    int64_t bytes[CPA_CHART_MOST_RANKS][CPA_CHART_MOST_RANKS]; /* by sender and receiver */
} cpa_live_figures;

typedef struct cpa_live_history cpa_live_history;

/* Nothing has happened so far, on so many ranks. NULL without memory. */
cpa_live_history *cpa_live_history_create(int32_t ranks, double now_s);
/* NULL does nothing. */
void cpa_live_history_release(cpa_live_history *history);

/* A request has ended, for whatever reason: from cpa_finish_fn. */
void cpa_live_history_add_result(cpa_live_history *history, const cpa_request_result *result, double now_s);
/* A step is done, and these are the statistics after it: from cpa_progress_fn, each time. */
void cpa_live_history_add_step(cpa_live_history *history, const cpa_engine_stats *stats, double now_s);
/* The same of each rank, by cpa_engine_get_rank_stats. */
void cpa_live_history_add_rank(cpa_live_history *history, int32_t rank, const cpa_rank_stats *stats,
                               const int64_t *bytes_to);

/* A copy of everything, for free(). NULL without memory. */
cpa_live_figures *cpa_live_history_copy(cpa_live_history *history);

/* What the figures were at the end of a period: those of the last one before, where nothing happened in it. Of one that
 * is more than CPA_LIVE_PERIODS ago it may be NULL, and is so before anything happened: then all were 0. */
const cpa_live_sample *cpa_live_figures_at(const cpa_live_figures *figures, int64_t period);

#endif
