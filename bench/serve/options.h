/* The command line of `cp_attn bench serve`. */
#ifndef CPA_BENCH_SERVE_OPTIONS_H
#define CPA_BENCH_SERVE_OPTIONS_H

#include <stdint.h>

#include "program/field.h"
#include "program/metrics_options.h"

typedef enum cpa_serve_endpoint { CPA_SERVE_COMPLETIONS = 0, CPA_SERVE_CHAT } cpa_serve_endpoint;
typedef enum cpa_serve_prompts { CPA_SERVE_AUTO = 0, CPA_SERVE_IDS, CPA_SERVE_TEXT } cpa_serve_prompts;

/* Their paths; NULL past the last. */
extern const char *const cpa_serve_endpoints[];

/* Values as the table parses them; choices are indices. */
typedef struct cpa_serve_options {
    char url[CPA_TEXT_BYTES];
    int64_t endpoint;             /* cpa_serve_endpoint */
    char model[CPA_TEXT_BYTES];   /* empty: the first that the server names */
    char api_key[CPA_TEXT_BYTES]; /* empty: none */
    char trace[CPA_TEXT_BYTES];   /* empty: requests of one size */
    int64_t requests;             /* 0: all of the trace */
    double length_scale;
    double time_scale; /* 0: trace times are not used */
    double request_rate;
    int64_t max_concurrency; /* 0: any */
    int64_t input_len, output_len;
    int64_t seed;
    int64_t prompts;    /* cpa_serve_prompts; never CPA_SERVE_AUTO once parsed */
    int64_t vocabulary; /* ids are below; 0: as the server says */
    int64_t ignore_eos;
    double temperature;
    char extra_body[CPA_TEXT_BYTES];
    double timeout_s, ready_timeout_s;
    char percentiles[CPA_TEXT_BYTES], goodput[CPA_TEXT_BYTES];
    cpa_metrics_options metrics; /* `percentiles` and `goodput`, parsed */
    char result_json[CPA_TEXT_BYTES];
    int64_t help;
} cpa_serve_options;

/* Fills *out from the command line; argv[0] is "serve". `api_key` (or NULL) is what --api-key is without being given.
 * Otherwise CPA_INVALID, and one line. */
cpa_status cpa_serve_options_parse(int argc, char **argv, const char *api_key, cpa_serve_options *out, cpa_error *err);

void cpa_serve_options_print_help(void);

/* The table of the options. */
const cpa_field *cpa_serve_options_table(int *n_fields);

#endif
