#include "program/metrics_options.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "program/field.h"

const char *const cpa_metric_names[CPA_METRIC_COUNT] = {"ttft", "tpot", "itl", "e2el"};

static cpa_status refuse(const char *where, const char *text, const char *expected, cpa_error *err) {
    char found[64];
    cpa_text_quote(text, strlen(text), found, sizeof found);
    return cpa_fail(err, CPA_INVALID, "%s: found '%s', expected %s", where, found, expected);
}

cpa_status cpa_percentiles_parse(const char *where, const char *text, cpa_metrics_options *out, cpa_error *err) {
    static const char expected[] = "up to 16 numbers from 0 to 100, such as 50,90,99";
    cpa_metrics_options options = *out;
    const char *at = text;
    for (options.n_percentiles = 0; options.n_percentiles < CPA_MAX_PERCENTILES; at++) {
        char *end;
        double value = strtod(at, &end);
        if (!isdigit((unsigned char)*at) || !(value >= 0 && value <= 100)) break;
        options.percentiles[options.n_percentiles++] = value;
        at = end;
        if (*at == 0) {
            *out = options;
            return CPA_OK;
        }
        if (*at != ',') break;
    }
    return refuse(where, text, expected, err);
}

/* Reads "NAME:MS" at *text and moves it behind. */
static int read_objective(const char **text, cpa_metrics_options *options) {
    const size_t length = strcspn(*text, ":");
    for (int m = 0; m < CPA_METRIC_COUNT; m++) {
        if (m == CPA_ITL || strlen(cpa_metric_names[m]) != length || strncmp(*text, cpa_metric_names[m], length) != 0)
            continue;
        char *end = NULL;
        const char *number = *text + length + ((*text)[length] == ':');
        const double value = strtod(number, &end);
        if (!isdigit((unsigned char)*number) || !isfinite(value) || value <= 0) return 0;
        if (*end && !strchr(" ,", *end)) return 0;
        options->goodput_ms[m] = value;
        options->has_goodput = 1;
        *text = end;
        return 1;
    }
    return 0;
}

cpa_status cpa_goodput_parse(const char *where, const char *text, cpa_metrics_options *out, cpa_error *err) {
    cpa_metrics_options options = *out;
    for (const char *at = text + strspn(text, " ,"); *at; at += strspn(at, " ,")) {
        if (!read_objective(&at, &options))
            return refuse(where, text, "milliseconds above 0 of ttft, tpot or e2el, such as ttft:200,tpot:50", err);
    }
    *out = options;
    return CPA_OK;
}
