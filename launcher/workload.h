/* What a run serves: the requests of a trace, made-up requests of one size, or, when nothing is asked for, a mixed run
 * that is sized to the device. */
#ifndef CPA_LAUNCHER_WORKLOAD_H
#define CPA_LAUNCHER_WORKLOAD_H

#include <cpattn/engine.h>

#include "launcher/generate/generate.h"
#include "launcher/settings/settings.h"
#include "program/trace.h"

typedef struct cpa_workload {
    cpa_request *requests; /* by arrival */
    int64_t count;
    int64_t prompt_tokens; /* sums */
    int64_t output_tokens;
    cpa_trace trace;              /* .count = 0: none */
    cpa_prompt_answer generation; /* of `generate`; without a prompt: none */
    char title[256];              /* what it is, in words */
    cpa_token_at_fn token_at;     /* for the engine; NULL: tokens of its own */
} cpa_workload;

/* The tokens of a workload's requests within a vocabulary: those of the trace or the
 * prompt, or made up from the seed. */
typedef struct cpa_vocabulary_tokens {
    cpa_workload *workload;
    uint64_t seed;
    uint32_t vocabulary;
} cpa_vocabulary_tokens;

/* A cpa_token_at_fn with cpa_vocabulary_tokens as its ctx. */
uint32_t cpa_vocabulary_token(void *tokens, uint64_t request, int64_t position);

/* Whether the settings leave the choice of requests to the program. */
int cpa_workload_is_mixed(const cpa_settings *settings);

/* Reads or makes up the requests that the settings ask for. CPA_INVALID, naming file and line, for a bad trace. *out is
 * set only on success, must not move while an engine uses it, and is released by cpa_workload_release. */
cpa_status cpa_workload_load(const cpa_settings *settings, cpa_workload *out, cpa_error *err);

/* The same for the prompt of `generate`, in ids of a vocabulary. */
cpa_status cpa_workload_of_prompt(const cpa_settings *settings, int64_t vocabulary, cpa_workload *out, cpa_error *err);

/* The mixed run: one long context, and short requests before it and while it is computed, sized by the rates that the
 * engine measured to take about ten seconds, on at most `max_tokens` tokens of cache. */
cpa_status cpa_workload_mixed(const cpa_engine *engine, int64_t max_tokens, cpa_workload *out, cpa_error *err);

void cpa_workload_release(cpa_workload *workload);

#endif
