/* What Prometheus is told of an engine, in its text format: for GET /metrics of a server, and for --metrics-file.
 *
 * Names are vLLM's where it has the like, with cpattn_ for vllm:, and so are the buckets of histograms. Every sample
 * has the label model_name. Times are seconds. Any thread may call any function at any time, but for create and
 * release. */
#ifndef CPA_LAUNCHER_EXPOSITION_H
#define CPA_LAUNCHER_EXPOSITION_H

#include <cpattn/engine.h>

typedef struct cpa_exposition cpa_exposition;

/* Nothing has happened so far. Keeps a copy of `model`, of any bytes. The tokens of a block of the cache turn blocks
 * into the tokens that vLLM counts. NULL without memory. */
cpa_exposition *cpa_exposition_create(const char *model, int64_t block_size);
/* NULL does nothing. */
void cpa_exposition_release(cpa_exposition *exposition);

/* The ranks are up: by what links[ranks, ranks] (cpa_engine_links) the `transport` joins them. Keeps nothing of either. */
void cpa_exposition_set_links(cpa_exposition *exposition, const char *transport, const cpa_link *links, int32_t ranks);
/* A request has ended, for whatever reason: from cpa_finish_fn. */
void cpa_exposition_add_result(cpa_exposition *exposition, const cpa_request_result *result);
/* A step is done, and these are the statistics after it: from cpa_progress_fn, each time. A step without tokens, or one
 * that was told already, changes nothing. */
void cpa_exposition_add_step(cpa_exposition *exposition, const cpa_engine_stats *stats);

/* The text, with what was added and what the engine counts (zeros: there is none yet), which the caller frees. NULL
 * without memory. */
char *cpa_exposition_render(cpa_exposition *exposition, const cpa_engine_stats *stats);

#endif
