#include "plot/results.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "program/chart/pairs.h"
#include "program/chart/shares.h"

/* ---- latencies ---- */

typedef struct numbers {
    double *values; /* ms */
    int64_t n, capacity;
} numbers;

static cpa_status add_number(numbers *list, const cpa_json *file, const char *key, const json_t *value,
                             cpa_error *err) {
    if (!json_is_number(value)) return cpa_json_refuse(file, key, "numbers of seconds", err);
    if (!cpa_array_reserve(&list->values, &list->capacity, list->n + 1, sizeof *list->values))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for %s", file->path, key);
    list->values[list->n++] = 1e3 * json_number_value(value); /* drawn in ms */
    return CPA_OK;
}

/* Latencies of the requests that did not fail. */
static cpa_status read_latencies(const cpa_json *file, numbers *ttft, numbers *itl, cpa_error *err) {
    const json_t *first = cpa_json_get(file, "ttfts"), *gaps = cpa_json_get(file, "itls");
    const json_t *errors = cpa_json_get(file, "errors"), *value;
    size_t i, j;
    if (!json_is_array(first)) return cpa_json_refuse(file, "ttfts", "an array of seconds", err);
    if (!json_is_array(gaps) || json_array_size(gaps) != json_array_size(first))
        return cpa_json_refuse(file, "itls", "an array for each request", err);
    for (i = 0; i < json_array_size(first); i++) {
        const char *error = json_string_value(json_array_get(errors, i));
        const json_t *own = json_array_get(gaps, i);
        if (error && *error) continue;
        if (!json_is_array(own)) return cpa_json_refuse(file, "itls", "an array for each request", err);
        CPA_TRY(add_number(ttft, file, "ttfts", json_array_get(first, i), err));
        json_array_foreach(own, j, value) CPA_TRY(add_number(itl, file, "itls", value, err));
    }
    return CPA_OK;
}

static cpa_status add_latencies(cpa_results *results, const cpa_json *file, const char *label, cpa_error *err) {
    numbers ttft = {0}, itl = {0};
    const cpa_status status = read_latencies(file, &ttft, &itl, err);
    if (status == CPA_OK) {
        cpa_shares_add(&results->ttft, label, ttft.values, ttft.n);
        cpa_shares_add(&results->itl, label, itl.values, itl.n);
    }
    free(ttft.values);
    free(itl.values);
    return status;
}

/* ---- scaling ---- */

static cpa_status add_scaling(cpa_results *results, const cpa_json *file, cpa_error *err) {
    const json_t *rows = cpa_json_get(file, "rows"), *row;
    size_t i;
    if (!json_is_array(rows)) return cpa_json_refuse(file, "rows", "an array", err);
    json_array_foreach(rows, i, row) {
        char prefix[32], label[128];
        int64_t ranks = 0;
        double speedup = 0;
        const char *work = NULL, *shape = NULL;
        snprintf(prefix, sizeof prefix, "rows[%zu].", i);
        const cpa_json one = {file->path, prefix, row};
        CPA_TRY(cpa_json_int(&one, "ranks", CPA_JSON_REQUIRED, 1, CPA_CHART_MOST_RANKS, &ranks, err));
        CPA_TRY(cpa_json_number(&one, "speedup", CPA_JSON_REQUIRED, 0, 1e6, &speedup, err));
        CPA_TRY(cpa_json_text(&one, "work", CPA_JSON_REQUIRED, &work, err));
        CPA_TRY(cpa_json_text(&one, "shape", CPA_JSON_REQUIRED, &shape, err));
        snprintf(label, sizeof label, "%s %s", work, shape);
        cpa_series_add(&results->scaling, label, (double)ranks, speedup);
    }
    return CPA_OK;
}

static int compare_points(const void *a, const void *b) {
    const cpa_point *p = a, *q = b;
    return p->x != q->x ? (p->x > q->x) - (p->x < q->x) : (p->y > q->y) - (p->y < q->y);
}

/* Each file has the point of one rank. */
static void drop_equal(cpa_series *series) {
    int64_t kept = 0;
    for (int64_t i = 0; i < series->n_points; i++)
        if (kept == 0 || compare_points(&series->points[kept - 1], &series->points[i]) != 0)
            series->points[kept++] = series->points[i];
    series->n_points = kept;
}

void cpa_results_finish(cpa_results *results) {
    cpa_series_set *set = &results->scaling;
    double most = 0;
    for (int64_t s = 0; s < set->n; s++) {
        cpa_series *series = &set->series[s];
        qsort(series->points, (size_t)series->n_points, sizeof *series->points, compare_points);
        drop_equal(series);
        if (series->n_points > 0) most = fmax(most, series->points[series->n_points - 1].x);
    }
    if (set->n == 0) return;
    cpa_series_add(set, "ideal", 1, 1);
    cpa_series_add(set, "ideal", most, most);
    cpa_series *ideal = cpa_series_of(set, "ideal");
    if (ideal) ideal->is_guide = 1;
}

/* ---- files ---- */

cpa_status cpa_results_read(cpa_results *results, const cpa_json *file, const char *label, cpa_error *err) {
    const json_t *benchmark = json_object_get(file->object, "benchmark");
    if (json_is_string(benchmark) && strcmp(json_string_value(benchmark), "scaling") == 0)
        return add_scaling(results, file, err);
    if (!json_object_get(file->object, "ttfts"))
        return cpa_fail(err, CPA_INVALID,
                        "%s: found nothing that is drawn, expected the file of --result-json of a run, of bench serve "
                        "or bench scaling, or of --timeline",
                        file->path);
    return cpa_json_get(file, "ttfts") ? add_latencies(results, file, label, err) : CPA_OK;
}

void cpa_results_release(cpa_results *results) {
    cpa_series_release(&results->ttft);
    cpa_series_release(&results->itl);
    cpa_series_release(&results->scaling);
}
