/* Traces of requests in the Mooncake format: JSON Lines, each
 *     {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one id per 512 prompt tokens]}
 * with an optional "priority" (lower runs first), "salt" (a text; prefixes are shared with equal ones only) and "n"
 * (how many samples of the prompt); other keys are ignored. Without hash_ids a prompt shares nothing. Token ids follow
 * from hash_ids, so prompts that share a prefix of hash blocks share tokens. At a length scale s, hash block k covers
 * the tokens
 *     floor(512 k s) .. floor(512 (k+1) s) - 1
 * and a length n becomes max(1, floor(n s)), so shared prefixes stay shared. */
#ifndef CPA_PROGRAM_TRACE_H
#define CPA_PROGRAM_TRACE_H

#include <stdint.h>

#include <cpattn/status.h>

#define CPA_TRACE_BLOCK_TOKENS 512

/* The id of sample k of a request: samples after the first have ids of their own. */
#define CPA_TRACE_SAMPLE_SHIFT 40

/* Bounds on what a file may ask for: samples of a prompt, requests with all their samples, and the length of a line. */
#define CPA_TRACE_MAX_SAMPLES 128
#define CPA_TRACE_MAX_REQUESTS ((int64_t)1 << 20)
#define CPA_TRACE_MAX_LINE_BYTES ((size_t)1 << 24)

typedef struct cpa_trace_request {
    uint64_t id; /* the line of the request in the file, from 1 */
    double timestamp_ms;
    int64_t prompt_tokens; /* scaled */
    int64_t output_tokens; /* scaled */
    int32_t priority;
    int64_t samples;
    char *salt;       /* NULL: none */
    int64_t n_hashes; /* hash blocks of the prompt */
    uint64_t *hashes; /* NULL: it shares nothing */
} cpa_trace_request;

typedef struct cpa_trace {
    double length_scale;
    int64_t count;
    cpa_trace_request *requests; /* by line */
} cpa_trace;

/* Reads the first `limit` lines (0: all), one at a time, and checks them. Otherwise CPA_INVALID, "PATH:LINE: found ...,
 * expected ...". *out is set only on success and released by cpa_trace_close. */
cpa_status cpa_trace_open(const char *path, int64_t limit, double length_scale, cpa_trace *out, cpa_error *err);
void cpa_trace_close(cpa_trace *trace);

/* The token at a position of a request (or of another sample of it), prompt and output alike; a cpa_token_at_fn with a
 * cpa_trace as its ctx. */
uint32_t cpa_trace_token(void *trace, uint64_t request, int64_t position);

#endif
