#include "bench/serve/drive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>

#include "base/check.h"
#include "base/clock.h"
#include "bench/serve/body.h"
#include "bench/serve/interrupt.h"
#include "bench/serve/stream_answer.h"
#include "program/progress_line.h"

/* A signal and the line of progress wait no longer than this. */
static const double LONGEST_WAIT_S = 0.1;

enum { REFUSAL_BYTES = 2048 };

typedef struct drive drive;

/* A request under way. */
typedef struct flight {
    drive *owner;
    struct flight *previous, *next;
    const cpa_request *request;
    CURL *easy;
    char *body;
    double start_s;
    long status; /* HTTP status, once the body begins */
    cpa_stream_answer answer;
    char refusal[REFUSAL_BYTES]; /* the beginning of a body that is no stream of events */
    size_t refusal_bytes;
    bool is_stream;
} flight;

struct drive {
    const cpa_target *target;
    cpa_workload *workload;
    cpa_metrics *metrics;
    cpa_serve_tenants *tenants;
    cpa_vocabulary_tokens tokens;
    CURLM *multi;
    flight *flights; /* a list, the last one first */
    int64_t n_flights, started, tokens_done;
    double began;
};

/* ---- one request ---- */

/* Once the head of the answer is there: whether events follow. */
static void look_at_head(flight *f) {
    static const char events[] = "text/event-stream";
    const char *type = NULL;
    curl_easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &f->status);
    curl_easy_getinfo(f->easy, CURLINFO_CONTENT_TYPE, &type);
    f->is_stream = f->status == 200 && type && strncasecmp(type, events, sizeof events - 1) == 0;
}

static size_t take_body(char *bytes, size_t size, size_t count, void *ctx) {
    flight *f = ctx;
    const size_t n = size * count;
    const double now = cpa_clock_now() - f->owner->began;
    const int64_t before = f->answer.n_times;
    if (f->status == 0) look_at_head(f);
    if (f->is_stream) {
        const bool is_good = cpa_stream_answer_feed(&f->answer, bytes, n, now);
        f->owner->tokens_done += f->answer.n_times - before;
        return is_good ? n : 0;
    }
    const size_t room = REFUSAL_BYTES - f->refusal_bytes, kept = n < room ? n : room;
    memcpy(f->refusal + f->refusal_bytes, bytes, kept);
    f->refusal_bytes += kept;
    return room > 0 ? n : 0; /* the beginning is enough */
}

/* Why the request failed, in `out`; empty if it did not. */
static void judge(flight *f, CURLcode code, char *out, size_t bytes) {
    char said[128];
    out[0] = 0;
    if (code == CURLE_OK && f->status == 0) look_at_head(f); /* no body came */
    if (f->answer.error[0]) {
        snprintf(out, bytes, "%s", f->answer.error);
    } else if (f->status != 0 && !f->is_stream) {
        cpa_answer_refusal(f->refusal, f->refusal_bytes, said, sizeof said);
        snprintf(out, bytes, "HTTP %ld%s%s", f->status, f->status == 200 ? ", no stream of events: " : ": ", said);
    } else if (code != CURLE_OK && !f->answer.is_done) {
        snprintf(out, bytes, "%s%s", f->answer.n_times > 0 ? "cut in the middle: " : "", curl_easy_strerror(code));
    } else {
        cpa_stream_answer_end(&f->answer);
        snprintf(out, bytes, "%s", f->answer.error);
    }
}

static void record(const flight *f, const char *error) {
    const int64_t asked = f->request->prompt_tokens, counted = f->answer.prompt_tokens;
    const cpa_request_times times = {.id = f->request->id,
                                     .prompt_tokens = counted > 0 ? counted : asked,
                                     .output_tokens = error[0] ? 0 : cpa_stream_answer_tokens(&f->answer),
                                     .start_s = f->start_s,
                                     .token_s = f->answer.token_s,
                                     .n_times = f->answer.n_times,
                                     .error = error[0] ? error : NULL};
    cpa_metrics_add_request(f->owner->metrics, &times);
    cpa_serve_tenants_add(f->owner->tenants, f->request, &times);
}

static void release(flight *f) {
    drive *d = f->owner;
    if (f->previous) f->previous->next = f->next;
    if (f->next) f->next->previous = f->previous;
    if (d->flights == f) d->flights = f->next;
    d->n_flights--;
    if (f->easy) curl_multi_remove_handle(d->multi, f->easy);
    curl_easy_cleanup(f->easy);
    cpa_stream_answer_release(&f->answer);
    free(f->body);
    free(f);
}

static CURLcode prepare(flight *f, size_t body_bytes) {
    const cpa_target *target = f->owner->target;
    CURLcode code = cpa_target_prepare(target, f->easy, target->completions);
    if (code == CURLE_OK) code = curl_easy_setopt(f->easy, CURLOPT_POSTFIELDS, f->body);
    if (code == CURLE_OK) code = curl_easy_setopt(f->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body_bytes);
    if (code == CURLE_OK) code = curl_easy_setopt(f->easy, CURLOPT_WRITEFUNCTION, take_body);
    if (code == CURLE_OK) code = curl_easy_setopt(f->easy, CURLOPT_WRITEDATA, f);
    if (code == CURLE_OK) code = curl_easy_setopt(f->easy, CURLOPT_PRIVATE, f);
    if (code == CURLE_OK)
        code = curl_easy_setopt(f->easy, CURLOPT_TIMEOUT_MS, (long)ceil(1e3 * target->options->timeout_s));
    return code;
}

static cpa_status start(drive *d, const cpa_request *request, cpa_error *err) {
    size_t bytes = 0;
    flight *f = calloc(1, sizeof *f);
    if (!f) return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for a request");
    *f = (flight){.owner = d, .next = d->flights, .request = request, .easy = curl_easy_init()};
    f->answer.is_chat = d->target->options->endpoint == CPA_SERVE_CHAT;
    if (f->next) f->next->previous = f;
    d->flights = f;
    d->n_flights++;
    f->body = cpa_serve_body(d->target, &d->tokens, request, &bytes);
    if (!f->easy || !f->body || prepare(f, bytes) != CURLE_OK) {
        release(f);
        return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for a request of %zu bytes", bytes);
    }
    f->start_s = cpa_clock_now() - d->began;
    const CURLMcode added = curl_multi_add_handle(d->multi, f->easy);
    if (added == CURLM_OK) return CPA_OK;
    release(f);
    return cpa_fail(err, CPA_IO, "bench serve: a request could not be started (%s)", curl_multi_strerror(added));
}

/* ---- all of them ---- */

/* Starts what is due and finds room; *wait_s is the time until the next one is, at most LONGEST_WAIT_S. */
static cpa_status start_due(drive *d, double *wait_s, cpa_error *err) {
    const int64_t most = d->target->options->max_concurrency;
    *wait_s = LONGEST_WAIT_S;
    while (d->started < d->workload->count && (most == 0 || d->n_flights < most)) {
        const cpa_request *request = &d->workload->requests[d->started];
        const double left = request->arrival_s - (cpa_clock_now() - d->began);
        if (left > 0) {
            *wait_s = fmin(left, LONGEST_WAIT_S);
            break;
        }
        CPA_TRY(start(d, request, err));
        d->started++;
    }
    return CPA_OK;
}

/* Whether any has ended. */
static bool take_ended(drive *d) {
    CURLMsg *message;
    int left;
    bool any = false;
    while ((message = curl_multi_info_read(d->multi, &left))) {
        char error[256], *private = NULL;
        if (message->msg != CURLMSG_DONE) continue;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &private);
        flight *f = (flight *)(void *)private;
        judge(f, message->data.result, error, sizeof error);
        record(f, error);
        release(f);
        any = true;
    }
    return any;
}

static cpa_status run(drive *d, cpa_error *err) {
    cpa_progress_line progress =
        cpa_progress_line_start(d->workload->prompt_tokens + d->workload->output_tokens, d->workload->count);
    cpa_status status = CPA_OK;
    while ((d->started < d->workload->count || d->n_flights > 0) && !cpa_interrupt_received()) {
        double wait_s;
        int running;
        CPA_TRY_GOTO(start_due(d, &wait_s, err), done);
        CURLMcode code = curl_multi_perform(d->multi, &running);
        /* Where one has ended there may be room for the next, which does not wait. */
        if (!take_ended(d) && code == CURLM_OK)
            code = curl_multi_poll(d->multi, NULL, 0, (int)ceil(1e3 * wait_s), NULL);
        if (code != CURLM_OK) {
            status = cpa_fail(err, CPA_IO, "bench serve: the transfers cannot go on (%s)", curl_multi_strerror(code));
            break;
        }
        cpa_progress_line_update(&progress, d->metrics->input_tokens + d->tokens_done,
                                 d->metrics->completed + d->metrics->failed, cpa_clock_now() - d->began);
    }
done:
    cpa_progress_line_finish(&progress);
    return status;
}

/* So many connections at once as the system allows. */
static void raise_open_files(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

cpa_status cpa_serve_drive(const cpa_target *target, cpa_workload *workload, cpa_metrics *metrics,
                           cpa_serve_tenants *tenants, double *duration_s, cpa_error *err) {
    drive d = {.target = target, .workload = workload, .metrics = metrics, .tenants = tenants};
    d.multi = curl_multi_init();
    d.tokens = (cpa_vocabulary_tokens){workload, (uint64_t)target->options->seed, target->vocabulary};
    if (!d.multi) return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for transfers");
    raise_open_files();
    d.began = cpa_clock_now();
    cpa_status status = run(&d, err);
    *duration_s = cpa_clock_now() - d.began;
    while (d.flights) {
        record(d.flights, "stopped");
        release(d.flights);
    }
    curl_multi_cleanup(d.multi);
    return status;
}
