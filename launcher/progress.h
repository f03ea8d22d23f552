/* A line on the terminal that says how far a run is. */
#ifndef CPA_LAUNCHER_PROGRESS_H
#define CPA_LAUNCHER_PROGRESS_H

#include <stdint.h>

typedef struct cpa_progress {
    int shown;      /* stderr ends at a terminal */
    int64_t tokens; /* prompt and output, in the whole run */
    int64_t requests;
    double next_s; /* when the line is due again */
} cpa_progress;

/* A progress line for a run of so many tokens and requests; silent unless stderr ends at a terminal. */
cpa_progress cpa_progress_start(int64_t tokens, int64_t requests);
void cpa_progress_update(cpa_progress *progress, int64_t tokens, int64_t requests, double elapsed_s);

/* Erases the line. */
void cpa_progress_finish(cpa_progress *progress);

#endif
