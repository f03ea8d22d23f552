/* The server that is measured. */
#ifndef CPA_BENCH_SERVE_TARGET_H
#define CPA_BENCH_SERVE_TARGET_H

#include <curl/curl.h>

#include "bench/serve/options.h"

typedef struct cpa_target {
    const cpa_serve_options *options;
    struct curl_slist *headers;           /* headers of each request */
    char completions[2 * CPA_TEXT_BYTES]; /* URL of the endpoint */
    char model[CPA_TEXT_BYTES];
    uint32_t vocabulary; /* ids are below */
} cpa_target;

/* Waits until the server is ready, and asks for its model, as far as the options do not name it. CPA_IO if it does not
 * answer, or not so. *out is set only on success; the options must outlive it. One at a time in a process, after
 * curl_global_init. */
cpa_status cpa_target_open(const cpa_serve_options *options, cpa_target *out, cpa_error *err);
void cpa_target_close(cpa_target *target);

/* What every transfer from the server has in common; 0, or the first error of curl. */
CURLcode cpa_target_prepare(const cpa_target *target, CURL *easy, const char *url);

#endif
