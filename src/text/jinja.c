#include "src/text/jinja.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "src/text/jinja_child.h"

struct cpa_jinja {
    cpa_jinja_limits limits;
    char *settings; /* the first object that a child is sent, as JSON */
    pthread_mutex_t lock;
    cpa_jinja_child child; /* by the lock */
};

static cpa_status start_by(cpa_jinja *jinja, const char *python, cpa_error *err) {
    cpa_bytes nothing = {.count = 0};
    CPA_TRY(cpa_jinja_child_start(python, &jinja->child, err));
    const cpa_status status = cpa_jinja_child_ask(&jinja->child, jinja->settings, strlen(jinja->settings),
                                                  jinja->limits.seconds, &nothing, err);
    cpa_bytes_release(&nothing);
    if (status != CPA_OK) cpa_jinja_child_end(&jinja->child);
    return status;
}

/* Debian's packages belong to its own interpreter, whatever else is in PATH. */
static cpa_status start(cpa_jinja *jinja, cpa_error *err) {
    static const char *const pythons[] = {"/usr/bin/python3", "python3"};
    if (jinja->limits.python) return start_by(jinja, jinja->limits.python, err);
    const cpa_status status = start_by(jinja, pythons[0], err);
    return status == CPA_UNSUPPORTED ? start_by(jinja, pythons[1], err) : status;
}

cpa_status cpa_jinja_open(const json_t *templates, const json_t *tokens, const cpa_jinja_limits *limits,
                          cpa_jinja **out, cpa_error *err) {
    json_t *settings = json_pack("{s:I,s:f,s:O,s:O}", "memory", (json_int_t)limits->memory, "seconds", limits->seconds,
                                 "templates", templates, "tokens", tokens);
    cpa_jinja *jinja = calloc(1, sizeof *jinja);
    if (jinja) {
        jinja->limits = *limits;
        jinja->settings = json_dumps(settings, JSON_COMPACT);
        pthread_mutex_init(&jinja->lock, NULL);
    }
    json_decref(settings);
    cpa_status status = CPA_NO_MEMORY;
    if (!jinja || !jinja->settings) {
        cpa_fail(err, status, "no memory for a template");
    } else {
        status = start(jinja, err);
    }
    if (status == CPA_OK) {
        *out = jinja;
    } else {
        cpa_jinja_close(jinja);
    }
    return status;
}

void cpa_jinja_close(cpa_jinja *jinja) {
    if (!jinja) return;
    cpa_jinja_child_end(&jinja->child);
    pthread_mutex_destroy(&jinja->lock);
    free(jinja->settings);
    free(jinja);
}

/* Takes the lock, or gives up in time. */
static int take_turn(cpa_jinja *jinja) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)jinja->limits.seconds + 1;
    return pthread_mutex_timedlock(&jinja->lock, &until) == 0;
}

cpa_status cpa_jinja_render(cpa_jinja *jinja, const json_t *chat, cpa_bytes *out, cpa_error *err) {
    char *frame = json_dumps(chat, JSON_COMPACT);
    if (!frame) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a chat");
    cpa_status status = CPA_OK;
    if (!take_turn(jinja)) {
        free(frame);
        return cpa_fail(err, CPA_BUSY, "other chats are being rendered for more than %g s", jinja->limits.seconds);
    }
    if (!cpa_jinja_child_runs(&jinja->child)) status = start(jinja, err);
    if (status == CPA_OK)
        status = cpa_jinja_child_ask(&jinja->child, frame, strlen(frame), jinja->limits.seconds, out, err);
    pthread_mutex_unlock(&jinja->lock);
    free(frame);
    return status;
}
