/* What is sent: the body of a request in OpenAI's interface, as vLLM understands it. */
#ifndef CPA_BENCH_SERVE_BODY_H
#define CPA_BENCH_SERVE_BODY_H

#include <stddef.h>

#include "bench/serve/target.h"
#include "program/workload.h"

/* The body of a request of the workload whose prompts `tokens` gives: text for free(), *bytes long; NULL without
 * memory. Prompts of text have a common English word for each token. */
char *cpa_serve_body(const cpa_target *target, cpa_vocabulary_tokens *tokens, const cpa_request *request,
                     size_t *bytes);

#endif
