#include "program/workload.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "program/field.h"
#include "src/model/synthetic.h"

#define MADE_UP_REQUESTS 16

uint32_t cpa_vocabulary_token(void *ctx, uint64_t request, int64_t position) {
    cpa_vocabulary_tokens *tokens = ctx;
    const cpa_told_tokens *prompt = &tokens->workload->prompt, *given = &tokens->workload->given;
    if (position < prompt->count) return prompt->ids[position];
    if (position - prompt->count < given->count) return given->ids[position - prompt->count];
    const uint32_t token = tokens->workload->trace.count > 0
                               ? cpa_trace_token(&tokens->workload->trace, request, position)
                               : cpa_synthetic_token(&tokens->seed, request, position);
    return token % tokens->vocabulary;
}

/* A number in (0, 1] from a seed and a counter. */
static double uniform(uint64_t seed, uint64_t counter) {
    uint64_t z = cpa_mix64(seed * 0xd1342543de82ef95u + (counter + 1) * CPA_GOLDEN);
    return (double)((z >> 11) + 1) * 0x1p-53;
}

/* Gives requests that have no arrival times of their own a Poisson process of `rate` a second. */
static void set_arrivals(cpa_workload *workload, double rate, uint64_t seed) {
    double now = 0;
    for (int64_t i = 0; i < workload->count && !isinf(rate); i++) {
        workload->requests[i].arrival_s = now;
        now -= log(uniform(seed, (uint64_t)i)) / rate;
    }
}

/* Allocates requests and numbers them from 1. */
static cpa_status allocate(cpa_workload *workload, int64_t count, cpa_error *err) {
    workload->requests = calloc((size_t)count, sizeof *workload->requests);
    if (!workload->requests) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %" PRId64 " requests", count);
    workload->count = count;
    for (int64_t i = 0; i < count; i++) {
        workload->requests[i] = (cpa_request){.size = sizeof(cpa_request), .id = (uint64_t)i + 1};
    }
    return CPA_OK;
}

static void add_up(cpa_workload *workload) {
    for (int64_t i = 0; i < workload->count; i++) {
        workload->prompt_tokens += workload->requests[i].prompt_tokens;
        workload->output_tokens += workload->requests[i].output_tokens;
    }
}

static int by_arrival(const void *a, const void *b) {
    const cpa_request *left = a, *right = b;
    if (left->arrival_s != right->arrival_s) return left->arrival_s < right->arrival_s ? -1 : 1;
    return left->id < right->id ? -1 : 1;
}

static double earliest_timestamp(const cpa_trace *trace) {
    double earliest = INFINITY;
    for (int64_t i = 0; i < trace->count; i++) earliest = fmin(earliest, trace->requests[i].timestamp_ms);
    return earliest;
}

static cpa_status load_trace(const cpa_workload_options *options, cpa_workload *out, cpa_error *err) {
    CPA_TRY(cpa_trace_open(options->trace, options->requests, options->length_scale, &out->trace, err));
    int64_t count = 0;
    for (int64_t i = 0; i < out->trace.count; i++) count += out->trace.requests[i].samples;
    CPA_TRY(allocate(out, count, err));
    double earliest = earliest_timestamp(&out->trace);
    cpa_request *request = out->requests;
    for (int64_t i = 0; i < out->trace.count; i++) {
        const cpa_trace_request *from = &out->trace.requests[i];
        for (int64_t k = 0; k < from->samples; k++, request++) {
            request->id = from->id | (uint64_t)k << CPA_TRACE_SAMPLE_SHIFT;
            request->prompt_tokens = from->prompt_tokens;
            request->output_tokens = from->output_tokens;
            request->priority = from->priority;
            request->arrival_s = (from->timestamp_ms - earliest) * 1e-3 * options->time_scale;
            request->salt = from->salt ? from->salt : options->cache_salt;
            request->group = from->samples > 1 ? from->id : 0;
        }
    }
    out->token_at = cpa_trace_token;
    const char *slash = strrchr(options->trace, '/');
    char name[128];
    cpa_text_quote(slash ? slash + 1 : options->trace, strlen(slash ? slash + 1 : options->trace), name, sizeof name);
    int used = snprintf(out->title, sizeof out->title, "%" PRId64 " requests of %s", out->trace.count, name);
    if (out->count > out->trace.count)
        used += snprintf(out->title + used, sizeof out->title - (size_t)used, ", %" PRId64 " samples", out->count);
    if (options->requests > out->trace.count) {
        used += snprintf(out->title + used, sizeof out->title - (size_t)used,
                         " (all there are; %" PRId64 " were asked for)", options->requests);
    }
    if (options->length_scale != 1) {
        snprintf(out->title + used, sizeof out->title - (size_t)used, ", lengths scaled by %g", options->length_scale);
    }
    return CPA_OK;
}

static cpa_status make_up(const cpa_workload_options *options, cpa_workload *out, cpa_error *err) {
    CPA_TRY(allocate(out, options->requests ? options->requests : MADE_UP_REQUESTS, err));
    for (int64_t i = 0; i < out->count; i++) {
        out->requests[i].prompt_tokens = options->input_len;
        out->requests[i].output_tokens = options->output_len;
        out->requests[i].salt = options->cache_salt;
    }
    snprintf(out->title, sizeof out->title, "%" PRId64 " made-up requests of %" PRId64 " + %" PRId64 " tokens",
             out->count, options->input_len, options->output_len);
    return CPA_OK;
}

cpa_status cpa_workload_of_prompt(cpa_told_tokens prompt, cpa_told_tokens given, int64_t output_tokens,
                                  const char *cache_salt, cpa_workload *out, cpa_error *err) {
    cpa_workload workload = {.prompt = prompt, .given = given};
    CPA_TRY(allocate(&workload, 1, err));
    workload.requests[0].prompt_tokens = prompt.count;
    workload.requests[0].output_tokens = output_tokens;
    workload.requests[0].salt = cache_salt;
    snprintf(workload.title, sizeof workload.title, "a prompt of %" PRId64 " tokens", prompt.count);
    add_up(&workload);
    *out = workload;
    return CPA_OK;
}

cpa_status cpa_workload_load(const cpa_workload_options *options, cpa_workload *out, cpa_error *err) {
    cpa_workload workload = {0};
    cpa_status status = options->trace[0] ? load_trace(options, &workload, err) : make_up(options, &workload, err);
    if (status != CPA_OK) {
        cpa_workload_release(&workload);
        return status;
    }
    set_arrivals(&workload, options->request_rate, (uint64_t)options->seed);
    qsort(workload.requests, (size_t)workload.count, sizeof *workload.requests, by_arrival);
    add_up(&workload);
    *out = workload;
    return CPA_OK;
}

/* Of the ten seconds, what the long context may take; the rest is for the short requests and for what the estimate
 * leaves out. */
#define LONG_CONTEXT_SECONDS 6.0
#define SHORT_REQUESTS 12
#define SHORT_AT_ONCE 6 /* the others arrive one by one */
#define SHORT_EVERY_SECONDS 0.5

/* The longest context whose prefill takes at most `seconds`. */
static int64_t tokens_within(const cpa_engine *engine, double seconds, int64_t least, int64_t most) {
    while (least < most) {
        int64_t middle = least + (most - least + 1) / 2;
        if (cpa_engine_estimate(engine, middle) <= seconds) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    return least;
}

cpa_status cpa_workload_mixed(const cpa_engine *engine, int64_t max_tokens, cpa_workload *out, cpa_error *err) {
    cpa_workload workload = {0};
    CPA_TRY(allocate(&workload, 1 + SHORT_REQUESTS, err));
    int64_t half = max_tokens / 2 > 1 ? max_tokens / 2 : 1;
    int64_t context = tokens_within(engine, LONG_CONTEXT_SECONDS, half < 256 ? half : 256, half);
    int64_t shortest = context / 64 + 1, longest = shortest;
    workload.requests[0].prompt_tokens = context;
    workload.requests[0].output_tokens = 16;
    workload.requests[0].priority = 1; /* the short ones that are there go first, and decode beside it */
    for (int i = 0; i < SHORT_REQUESTS; i++) {
        cpa_request *request = &workload.requests[1 + i];
        /* Lengths from 1/64 to 1/16 of the context, short and long in turn. */
        request->prompt_tokens = shortest + i * 5 % SHORT_REQUESTS * shortest * 3 / (SHORT_REQUESTS - 1);
        request->output_tokens = 16 + i * 7 % SHORT_REQUESTS * 4;
        request->arrival_s = i < SHORT_AT_ONCE ? 0 : (i - SHORT_AT_ONCE + 1) * SHORT_EVERY_SECONDS;
        if (request->prompt_tokens > longest) longest = request->prompt_tokens;
    }
    snprintf(workload.title, sizeof workload.title,
             "a mixed run of about ten seconds: one context of %" PRId64 " tokens, and %d requests of %" PRId64
             " to %" PRId64 " tokens, half of which arrive while it is computed",
             context, SHORT_REQUESTS, shortest, longest);
    add_up(&workload);
    *out = workload;
    return CPA_OK;
}

void cpa_workload_release(cpa_workload *workload) {
    free(workload->requests);
    cpa_trace_close(&workload->trace);
    *workload = (cpa_workload){0};
}
