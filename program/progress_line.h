/* How far a run is: a line on the terminal that is written anew, elsewhere a line each half a minute. */
#ifndef CPA_PROGRAM_PROGRESS_LINE_H
#define CPA_PROGRAM_PROGRESS_LINE_H

#include <stdint.h>
#include <stdio.h>

typedef struct cpa_progress_line {
    FILE *out;
    int terminal;   /* not 0: `out` is a terminal */
    int64_t tokens; /* prompt and output, in the whole run */
    int64_t requests;
    double next_s; /* when a line is due again */
} cpa_progress_line;

/* Progress on stderr for a run of so many tokens and requests. */
cpa_progress_line cpa_progress_line_start(int64_t tokens, int64_t requests);
/* So many are done after `elapsed_s` seconds: shows that, the rate, and the time left at that rate, if a line is
 * due. */
void cpa_progress_line_update(cpa_progress_line *progress, int64_t tokens, int64_t requests, double elapsed_s);

/* Erases the line on a terminal. */
void cpa_progress_line_finish(cpa_progress_line *progress);

#endif
