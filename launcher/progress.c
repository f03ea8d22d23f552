#include "launcher/progress.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PERIOD_S 0.1
#define ERASE_LINE "\r\033[K"

/* Under mpirun, stderr is a pipe to it; what counts is where mpirun's own stderr goes. */
static int ends_at_terminal(void) {
    if (isatty(STDERR_FILENO)) return 1;
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)getppid(), STDERR_FILENO);
    int descriptor = open(path, O_WRONLY | O_NOCTTY | O_CLOEXEC);
    if (descriptor < 0) return 0;
    int terminal = isatty(descriptor);
    close(descriptor);
    return terminal;
}

cpa_progress cpa_progress_start(int64_t tokens, int64_t requests) {
    return (cpa_progress){.shown = ends_at_terminal(), .tokens = tokens, .requests = requests};
}

void cpa_progress_update(cpa_progress *progress, int64_t tokens, int64_t requests, double elapsed_s) {
    if (!progress->shown || elapsed_s < progress->next_s) return;
    progress->next_s = elapsed_s + PERIOD_S;
    double share = progress->tokens ? (double)tokens / (double)progress->tokens : 0;
    fprintf(stderr, ERASE_LINE "%3.0f%%  %" PRId64 "/%" PRId64 " tokens  %" PRId64 "/%" PRId64 " requests  %.1f s",
            100 * (share < 1 ? share : 1), tokens, progress->tokens, requests, progress->requests, elapsed_s);
    fflush(stderr);
}

void cpa_progress_finish(cpa_progress *progress) {
    if (progress->shown && progress->next_s > 0) fputs(ERASE_LINE, stderr);
}
