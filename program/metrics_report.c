#include "program/metrics_report.h"

#include <inttypes.h>
#include <string.h>

#include "program/report_line.h"

static void print_goodput(const cpa_metrics *metrics, double seconds, FILE *out) {
    char within[128] = "";
    for (int m = 0; m < CPA_METRIC_COUNT; m++) {
        const size_t used = strlen(within);
        if (metrics->options.goodput_ms[m] > 0)
            snprintf(within + used, sizeof within - used, "%s%s %g ms", used ? ", " : "", cpa_metric_names[m],
                     metrics->options.goodput_ms[m]);
    }
    cpa_report_line(out, "goodput", "%.2f requests/s: %" PRId64 " of %" PRId64 " within %s",
                    (double)metrics->good / seconds, metrics->good, metrics->completed, within);
}

void cpa_metrics_print_throughput(const cpa_metrics *metrics, double duration_s, FILE *out) {
    const double seconds = duration_s > 0 ? duration_s : 1;
    cpa_report_line(out, "throughput", "%.2f requests/s, %.1f output tokens/s, %.1f tokens/s in all",
                    (double)metrics->completed / seconds, (double)metrics->output_tokens / seconds,
                    (double)(metrics->input_tokens + metrics->output_tokens) / seconds);
    if (metrics->options.has_goodput) print_goodput(metrics, seconds, out);
}

enum { NAME_WIDTH = 6, CELL_WIDTH = 12, CELL_BYTES = 32, MOST_CELLS = 2 + CPA_MAX_PERCENTILES };

/* A row of the table: its name, and n texts. */
static void print_row(const char *label, const char *name, char cells[][CELL_BYTES], int n, FILE *out) {
    char line[NAME_WIDTH + MOST_CELLS * CELL_BYTES];
    int used = snprintf(line, sizeof line, "%-*s", NAME_WIDTH, name);
    for (int c = 0; c < n; c++) used += snprintf(line + used, sizeof line - (size_t)used, "%*s", CELL_WIDTH, cells[c]);
    cpa_report_line(out, label, "%s", line);
}

void cpa_metrics_print_latencies(cpa_metrics *metrics, FILE *out) {
    static const struct {
        cpa_metric metric;
        const char *name;
    } rows[] = {{CPA_TTFT, "TTFT"}, {CPA_TPOT, "TPOT"}, {CPA_ITL, "ITL"}, {CPA_E2E, "E2E"}};
    char cells[MOST_CELLS][CELL_BYTES] = {"mean", "median"};
    const int n = 2 + metrics->options.n_percentiles;
    for (int c = 2; c < n; c++) snprintf(cells[c], CELL_BYTES, "p%g", metrics->options.percentiles[c - 2]);
    print_row("latency", "ms", cells, n, out);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const cpa_summary summary = cpa_metrics_summary(metrics, rows[i].metric);
        for (int c = 0; c < n; c++) {
            const double ms = c == 0 ? summary.mean : c == 1 ? summary.median : summary.percentiles[c - 2];
            snprintf(cells[c], CELL_BYTES, summary.count > 0 ? "%.2f" : "-", ms);
        }
        print_row("", rows[i].name, cells, n, out);
    }
}
