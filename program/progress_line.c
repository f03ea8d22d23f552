#include "program/progress_line.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define REDRAW_PERIOD_S 0.1
#define LINE_PERIOD_S 30.0
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

cpa_progress_line cpa_progress_line_start(int64_t tokens, int64_t requests) {
    int terminal = ends_at_terminal();
    return (cpa_progress_line){stderr, terminal, tokens, requests, terminal ? 0 : LINE_PERIOD_S};
}

/* "3 s", "4 min" or "2.5 h". */
static void format_time(double seconds, char *out, size_t bytes) {
    if (seconds < 100) {
        snprintf(out, bytes, "%.0f s", seconds);
    } else if (seconds < 6000) {
        snprintf(out, bytes, "%.0f min", seconds / 60);
    } else {
        snprintf(out, bytes, "%.1f h", seconds / 3600);
    }
}

void cpa_progress_line_update(cpa_progress_line *progress, int64_t tokens, int64_t requests, double elapsed_s) {
    if (elapsed_s < progress->next_s) return;
    char left[32] = "?";
    double share = progress->tokens ? (double)tokens / (double)progress->tokens : 0;
    double rate = elapsed_s > 0 ? (double)tokens / elapsed_s : 0;
    if (share > 1) share = 1;
    if (share > 0) format_time(elapsed_s / share - elapsed_s, left, sizeof left);
    progress->next_s = elapsed_s + (progress->terminal ? REDRAW_PERIOD_S : LINE_PERIOD_S);
    fprintf(progress->out,
            "%s%3.0f%%  %" PRId64 "/%" PRId64 " tokens  %" PRId64 "/%" PRId64
            " requests  %.1f s  %.1f tokens/s  %s left%s",
            progress->terminal ? ERASE_LINE : "", 100 * share, tokens, progress->tokens, requests, progress->requests,
            elapsed_s, rate, left, progress->terminal ? "" : "\n");
    fflush(progress->out);
}

void cpa_progress_line_finish(cpa_progress_line *progress) {
    if (progress->terminal && progress->next_s > 0) fputs(ERASE_LINE, progress->out);
}
