#include "program/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/json_file.h"
#include "program/field.h"

#define TOKENS_MAX ((int64_t)1 << 40)

/* Where a message is about. */
typedef struct place {
    const char *path;
    int64_t line;
} place;

static cpa_status reject(place at, cpa_error *err, const char *key, const json_t *found, const char *expected) {
    if (!found) {
        return cpa_fail(err, CPA_INVALID, "%s:%" PRId64 ": found no \"%s\", expected %s", at.path, at.line, key,
                        expected);
    }
    char shown[64];
    char *text = json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
    cpa_text_quote(text ? text : "?", text ? strlen(text) : 1, shown, sizeof shown);
    free(text);
    return cpa_fail(err, CPA_INVALID, "%s:%" PRId64 ": found \"%s\": %s, expected %s", at.path, at.line, key, shown,
                    expected);
}

static cpa_status read_length(place at, const json_t *object, const char *key, int64_t *out, cpa_error *err) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value) || json_integer_value(value) < 1 || json_integer_value(value) > TOKENS_MAX) {
        return reject(at, err, key, value, "an integer from 1 to 1099511627776");
    }
    *out = json_integer_value(value);
    return CPA_OK;
}

/* A hash id of a prompt without any, which no line of a trace has. */
static uint64_t own_hash(const cpa_trace_request *request, int64_t index) {
    return (uint64_t)1 << 63 | request->id << 24 | (uint64_t)(index & 0xffffff);
}

static cpa_status read_hashes(place at, const json_t *object, int64_t input_length, cpa_trace_request *request,
                              cpa_error *err) {
    const json_t *value = json_object_get(object, "hash_ids");
    if (value && !json_is_array(value))
        return reject(at, err, "hash_ids", value, "a list of one integer per 512 tokens");
    int64_t listed = (int64_t)json_array_size(value);
    int64_t count = (input_length + CPA_TRACE_BLOCK_TOKENS - 1) / CPA_TRACE_BLOCK_TOKENS;
    if (listed != 0 && listed != count) {
        return cpa_fail(err, CPA_INVALID,
                        "%s:%" PRId64 ": found %" PRId64 " hash_ids for input_length %" PRId64 ", expected %" PRId64
                        " (one per 512 tokens), or none for a prompt that shares nothing",
                        at.path, at.line, listed, input_length, count);
    }
    request->n_hashes = count;
    if (listed == 0) return CPA_OK;
    request->hashes = calloc((size_t)count, sizeof *request->hashes);
    if (!request->hashes) return cpa_fail(err, CPA_NO_MEMORY, "%s:%" PRId64 ": out of memory", at.path, at.line);
    for (int64_t i = 0; i < listed; i++) {
        const json_t *hash = json_array_get(value, (size_t)i);
        if (!json_is_integer(hash) || json_integer_value(hash) < 0) {
            return reject(at, err, "hash_ids", hash, "integers from 0");
        }
        request->hashes[i] = (uint64_t)json_integer_value(hash);
    }
    return CPA_OK;
}

/* max(1, floor(length * scale)). */
static cpa_status scale_length(place at, const char *key, int64_t length, double scale, int64_t *out, cpa_error *err) {
    double scaled = floor((double)length * scale);
    if (scaled > (double)TOKENS_MAX) {
        return cpa_fail(err, CPA_INVALID,
                        "%s:%" PRId64 ": found \"%s\" of %g at this --length-scale, expected at most %" PRId64, at.path,
                        at.line, key, scaled, TOKENS_MAX);
    }
    *out = scaled < 1 ? 1 : (int64_t)scaled;
    return CPA_OK;
}

/* Who shares with whom. */
static cpa_status read_sharing(place at, const json_t *object, cpa_trace_request *request, cpa_error *err) {
    const json_t *salt = json_object_get(object, "salt"), *samples = json_object_get(object, "n");
    if (salt && !json_is_string(salt)) return reject(at, err, "salt", salt, "a text");
    if (samples && (!json_is_integer(samples) || json_integer_value(samples) < 1 ||
                    json_integer_value(samples) > CPA_TRACE_MAX_SAMPLES)) {
        return reject(at, err, "n", samples, "an integer from 1 to 128");
    }
    request->samples = samples ? json_integer_value(samples) : 1;
    if (!salt) return CPA_OK;
    request->salt = strdup(json_string_value(salt));
    return request->salt ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", at.path);
}

static cpa_status read_object(place at, const json_t *object, double scale, cpa_trace_request *request,
                              cpa_error *err) {
    int64_t input_length, output_length;
    if (!json_is_object(object)) {
        return cpa_fail(err, CPA_INVALID, "%s:%" PRId64 ": found JSON that is no object, expected {\"timestamp\": ...}",
                        at.path, at.line);
    }
    const json_t *timestamp = json_object_get(object, "timestamp");
    if (!json_is_number(timestamp) || !(json_number_value(timestamp) >= 0)) {
        return reject(at, err, "timestamp", timestamp, "milliseconds from 0");
    }
    const json_t *priority = json_object_get(object, "priority");
    if (priority && (!json_is_integer(priority) || json_integer_value(priority) < INT32_MIN ||
                     json_integer_value(priority) > INT32_MAX)) {
        return reject(at, err, "priority", priority, "an integer of 32 bits");
    }
    CPA_TRY(read_sharing(at, object, request, err));
    CPA_TRY(read_length(at, object, "input_length", &input_length, err));
    CPA_TRY(read_length(at, object, "output_length", &output_length, err));
    CPA_TRY(scale_length(at, "input_length", input_length, scale, &request->prompt_tokens, err));
    CPA_TRY(scale_length(at, "output_length", output_length, scale, &request->output_tokens, err));
    request->id = (uint64_t)at.line;
    request->timestamp_ms = json_number_value(timestamp);
    request->priority = (int32_t)json_integer_value(priority);
    return read_hashes(at, object, input_length, request, err);
}

static cpa_status read_line(place at, const char *line, size_t length, double scale, cpa_trace_request *request,
                            cpa_error *err) {
    json_error_t error;
    json_t *object;
    const cpa_status parsed = cpa_json_parse(line, length, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &object, &error);
    if (parsed == CPA_NO_MEMORY)
        return cpa_fail(err, parsed, "%s:%" PRId64 ": no memory for the line", at.path, at.line);
    if (parsed != CPA_OK) {
        char text[128];
        cpa_text_quote(error.text, strlen(error.text), text, sizeof text);
        return cpa_fail(err, parsed, "%s:%" PRId64 ": found malformed JSON (%s), expected {\"timestamp\": ...}",
                        at.path, at.line, text);
    }
    cpa_status status = read_object(at, object, scale, request, err);
    json_decref(object);
    return status;
}

/* Room for one more request, cleared. */
static cpa_trace_request *grow(cpa_trace *trace, int64_t *capacity) {
    if (!cpa_array_reserve(&trace->requests, capacity, trace->count + 1, sizeof *trace->requests)) return NULL;
    cpa_trace_request *request = &trace->requests[trace->count++];
    *request = (cpa_trace_request){0};
    return request;
}

/* Memory for a line, which grows with the longest one. */
typedef struct line_buffer {
    char *text;
    size_t capacity;
} line_buffer;

/* Reads a line with its end, *length bytes of it; 0 at the end of the file. */
static cpa_status read_text(place at, FILE *file, line_buffer *line, size_t *length, cpa_error *err) {
    int c = 0;
    for (*length = 0; c != '\n' && (c = getc_unlocked(file)) != EOF;) {
        if (*length == line->capacity) {
            size_t larger = line->capacity ? 2 * line->capacity : 4096;
            char *text = *length < CPA_TRACE_MAX_LINE_BYTES ? realloc(line->text, larger) : NULL;
            if (*length >= CPA_TRACE_MAX_LINE_BYTES)
                return cpa_fail(err, CPA_INVALID, "%s:%" PRId64 ": found a line of more than %zu bytes, expected JSON",
                                at.path, at.line, CPA_TRACE_MAX_LINE_BYTES);
            if (!text) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", at.path);
            *line = (line_buffer){text, larger};
        }
        line->text[(*length)++] = (char)c;
    }
    if (!ferror(file)) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s:%" PRId64 ": found no readable line (%s), expected JSON", at.path, at.line,
                    strerror(errno));
}

static int is_blank(const char *line, size_t length) {
    size_t i = 0;
    while (i < length && memchr(" \t\r\n", line[i], 4)) i++;
    return i == length;
}

/* A request, and with its samples no more than a file may ask for. */
static cpa_status add_request(place at, const char *line, size_t length, cpa_trace *trace, int64_t *capacity,
                              int64_t *samples, cpa_error *err) {
    cpa_trace_request *request = grow(trace, capacity);
    if (!request) return cpa_fail(err, CPA_NO_MEMORY, "%s: out of memory", at.path);
    CPA_TRY(read_line(at, line, length, trace->length_scale, request, err));
    *samples += request->samples;
    if (*samples <= CPA_TRACE_MAX_REQUESTS) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "%s:%" PRId64 ": found %" PRId64 " requests so far, samples included, expected at most %" PRId64,
                    at.path, at.line, *samples, CPA_TRACE_MAX_REQUESTS);
}

static cpa_status read_lines(const char *path, FILE *file, int64_t limit, cpa_trace *trace, cpa_error *err) {
    place at = {path, 1};
    line_buffer line = {NULL, 0};
    int64_t capacity = 0, samples = 0;
    cpa_status status = CPA_OK;
    for (; status == CPA_OK && (limit == 0 || trace->count < limit); at.line++) {
        size_t length = 0;
        CPA_TRY_GOTO(read_text(at, file, &line, &length, err), done);
        if (length == 0) break;
        if (!is_blank(line.text, length)) status = add_request(at, line.text, length, trace, &capacity, &samples, err);
    }
    if (status == CPA_OK && trace->count == 0)
        status = cpa_fail(err, CPA_INVALID, "%s:1: found no request, expected one JSON object a line", path);
done:
    free(line.text);
    return status;
}

cpa_status cpa_trace_open(const char *path, int64_t limit, double length_scale, cpa_trace *out, cpa_error *err) {
    cpa_trace trace = {.length_scale = length_scale};
    FILE *file = fopen(path, "r");
    if (!file) {
        return cpa_fail(err, CPA_INVALID, "%s: found no readable file (%s), expected a trace", path, strerror(errno));
    }
    cpa_status status = read_lines(path, file, limit, &trace, err);
    fclose(file);
    if (status == CPA_OK) {
        *out = trace;
    } else {
        cpa_trace_close(&trace);
    }
    return status;
}

void cpa_trace_close(cpa_trace *trace) {
    for (int64_t i = 0; i < trace->count; i++) {
        free(trace->requests[i].salt);
        free(trace->requests[i].hashes);
    }
    free(trace->requests);
    *trace = (cpa_trace){0};
}

/* The first token of hash block k. */
static int64_t block_start(double scale, int64_t k) {
    return (int64_t)floor((double)CPA_TRACE_BLOCK_TOKENS * (double)k * scale);
}

/* The hash block that covers a position: the only k with block_start(k) <= position < block_start(k + 1). */
static int64_t block_at(double scale, int64_t position) {
    int64_t k = (int64_t)ceil((double)(position + 1) / (CPA_TRACE_BLOCK_TOKENS * scale)) - 1;
    if (k < 0) k = 0;
    while (k > 0 && block_start(scale, k) > position) k--;
    while (block_start(scale, k + 1) <= position) k++;
    return k;
}

/* 32 bits from two numbers. */
static uint32_t mix(uint64_t a, uint64_t b) {
    return (uint32_t)(cpa_mix64(a * CPA_GOLDEN + b) >> 32);
}

/* The request whose line is `id`: requests are ascending in it. */
static const cpa_trace_request *find(const cpa_trace *trace, uint64_t id) {
    int64_t low = 0, high = trace->count - 1;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (trace->requests[middle].id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return &trace->requests[low];
}

uint32_t cpa_trace_token(void *ctx, uint64_t id, int64_t position) {
    const cpa_trace *trace = ctx;
    const cpa_trace_request *request = find(trace, id & (((uint64_t)1 << CPA_TRACE_SAMPLE_SHIFT) - 1));
    if (position >= request->prompt_tokens) {
        /* Outputs have a space of their own, away from the small numbers that hash ids are. */
        return mix(~id, (uint64_t)(position - request->prompt_tokens));
    }
    int64_t k = block_at(trace->length_scale, position);
    /* A prompt of less than a token is rounded up to one; that token belongs to its first block. */
    if (k >= request->n_hashes) k = request->n_hashes - 1;
    uint64_t hash = request->hashes ? request->hashes[k] : own_hash(request, k);
    return mix(hash, (uint64_t)(position - block_start(trace->length_scale, k)));
}
