/* What a run serves, or a client asks of a server: the requests of a trace, made-up requests of one size, a prompt, or a
 * mixed run that is sized to the device. */
#ifndef CPA_PROGRAM_WORKLOAD_H
#define CPA_PROGRAM_WORKLOAD_H

#include <cpattn/engine.h>

#include "program/trace.h"

/* What requests are asked for. Texts are the caller's, and outlive the workload. */
typedef struct cpa_workload_options {
    const char *trace;      /* a file; empty: made-up requests */
    int64_t requests;       /* number of requests; 0: all of the trace, or a few */
    double length_scale;    /* multiplies the lengths of the trace */
    double time_scale;      /* multiplies the trace's times; 0: they are not used */
    double request_rate;    /* requests a second, arriving at random; INFINITY: all are there at once */
    int64_t input_len;      /* prompt tokens of a made-up request */
    int64_t output_len;     /* output tokens of a made-up request */
    int64_t seed;           /* seed of random arrivals */
    const char *cache_salt; /* cache salt of requests that have none of their own */
} cpa_workload_options;

/* Tokens that are told to the program, for whoever has them. */
typedef struct cpa_told_tokens {
    const uint32_t *ids;
    int64_t count;
} cpa_told_tokens;

typedef struct cpa_workload {
    cpa_request *requests; /* by arrival */
    int64_t count;
    int64_t prompt_tokens;    /* prompt tokens of all requests */
    int64_t output_tokens;    /* output tokens of all requests */
    cpa_trace trace;          /* the trace; count 0: none */
    cpa_told_tokens prompt;   /* prompt of the only request, where its tokens are told */
    cpa_told_tokens given;    /* tokens of the only request's answer, if imposed */
    char title[256];          /* a description in words */
    cpa_token_at_fn token_at; /* tokens for the engine; NULL: the engine makes its own */
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

/* Reads or makes up the requests that are asked for. CPA_INVALID, naming file and line, for a bad trace. *out is set only
 * on success, must not move while an engine uses it, and is released by cpa_workload_release. */
cpa_status cpa_workload_load(const cpa_workload_options *options, cpa_workload *out, cpa_error *err);

/* The same for one request whose tokens are told; they are the caller's. */
cpa_status cpa_workload_of_prompt(cpa_told_tokens prompt, cpa_told_tokens given, int64_t output_tokens,
                                  const char *cache_salt, cpa_workload *out, cpa_error *err);

/* The mixed run: one long context, and short requests before it and while it is computed, sized by the rates that the
 * engine measured to take about ten seconds, on at most `max_tokens` tokens of cache. */
cpa_status cpa_workload_mixed(const cpa_engine *engine, int64_t max_tokens, cpa_workload *out, cpa_error *err);

void cpa_workload_release(cpa_workload *workload);

#endif
