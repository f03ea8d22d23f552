/* What the engine counts, each figure told once: where it stands, under which name the result file has it, and as which
 * metric Prometheus is told of it. The sentences of the report are in report.c. */
#ifndef CPA_LAUNCHER_FIGURES_H
#define CPA_LAUNCHER_FIGURES_H

#include <stddef.h>

#include <cpattn/engine.h>

/* The object of the result file that a figure is in. */
typedef enum cpa_figure_object {
    CPA_FIGURE_METRIC_ALONE = 0, /* none */
    CPA_FIGURE_VERIFY,
    CPA_FIGURE_CP,
    CPA_FIGURE_KV,
    CPA_FIGURE_DRAFTS
} cpa_figure_object;

/* What a metric counts, where that is not what the engine counts. */
typedef enum cpa_metric_unit {
    CPA_METRIC_AS_IT_IS = 0,
    CPA_METRIC_TOKENS_OF_BLOCKS,
    CPA_METRIC_SHARE_OF_BLOCKS
} cpa_metric_unit;

typedef struct cpa_figure {
    size_t offset; /* offset in cpa_engine_stats */
    int is_real;   /* not 0: a double; else an int64_t */
    cpa_figure_object object;
    const char *key;                  /* key in the JSON object */
    double scale;                     /* factor from the engine's real to the file's */
    const char *metric, *type, *help; /* name, type and help text for Prometheus; NULL: not among metrics */
    cpa_metric_unit unit;
} cpa_figure;

/* In the order in which file and metrics have them. */
extern const cpa_figure cpa_figures[];
extern const int cpa_n_figures;

int64_t cpa_figure_count(const cpa_figure *figure, const cpa_engine_stats *stats);
double cpa_figure_value(const cpa_figure *figure, const cpa_engine_stats *stats);

/* Share of the blocks of a rank that requests have, from 0 to 1, of the group of layers with the most. */
double cpa_figure_share_of_blocks(const cpa_engine_stats *stats);

#endif
