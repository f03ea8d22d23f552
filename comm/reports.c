/* Reports of all ranks to rank 0 that travel while the ranks do something else: a head with what most reports consist
 * of, and the rest behind it if there is more. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "comm/comm.h"

enum { HEAD_BYTES = 128 };

typedef struct report_head {
    int64_t bytes;
    char first[HEAD_BYTES];
} report_head;

/* What is on its way to, or from, one rank. */
typedef struct report_pair {
    cpa_comm_request *head, *rest;
    report_head text;
    char *all; /* the whole report */
    int64_t capacity;
} report_pair;

struct cpa_reports {
    cpa_control *control;
    int expected; /* rank 0: messages of the others are */
    report_pair pairs[CPA_COMM_MAX_RANKS];
};

static int32_t tag_of(const cpa_reports *reports) {
    return reports->control->tag + CPA_CONTROL_TAG_REPORT;
}

cpa_status cpa_reports_open(cpa_control *control, cpa_reports **out, cpa_error *err) {
    cpa_reports *reports = calloc(1, sizeof *reports);
    if (!reports) return cpa_fail(err, CPA_NO_MEMORY, "no memory for reports to rank 0");
    reports->control = control;
    *out = reports;
    return CPA_OK;
}

/* What is sent is let go for a second: rank 0 may take no part in it any more. */
static void settle(cpa_reports *reports) {
    enum { SECONDS = 1 };
    cpa_comm *comm = reports->control->comm;
    report_pair *pair = &reports->pairs[0];
    for (const double begin = cpa_clock_now(); cpa_clock_now() - begin < SECONDS; sched_yield()) {
        int head = 0, rest = 0;
        if (cpa_comm_test(comm, &pair->head, &head, NULL) != CPA_OK) return;
        if (cpa_comm_test(comm, &pair->rest, &rest, NULL) != CPA_OK || (head && rest)) return;
    }
}

void cpa_reports_close(cpa_reports *reports) {
    if (!reports) return;
    if (reports->control->rank != 0) settle(reports);
    for (int32_t rank = 0; rank < reports->control->size; rank++) {
        report_pair *pair = &reports->pairs[rank];
        cpa_comm_cancel(reports->control->comm, &pair->head);
        cpa_comm_cancel(reports->control->comm, &pair->rest);
        free(pair->all);
    }
    free(reports);
}

static int reserve(report_pair *pair, int64_t bytes) {
    return bytes <= HEAD_BYTES || cpa_array_reserve(&pair->all, &pair->capacity, bytes, 1);
}

cpa_status cpa_reports_send(cpa_reports *reports, const void *data, int64_t bytes, cpa_error *err) {
    cpa_comm *comm = reports->control->comm;
    report_pair *pair = &reports->pairs[0];
    /* Rank 0 has the report before this one, or is about to take it. */
    CPA_TRY(cpa_comm_wait(comm, &pair->head, 0, err));
    CPA_TRY(cpa_comm_wait(comm, &pair->rest, 0, err));
    if (!reserve(pair, bytes))
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for a report of %lld bytes", (long long)bytes);
    pair->text = (report_head){.bytes = bytes};
    if (bytes > HEAD_BYTES) {
        memcpy(pair->all, data, (size_t)bytes);
    } else if (bytes > 0) {
        memcpy(pair->text.first, data, (size_t)bytes);
    }
    CPA_TRY(cpa_comm_start_send(comm, 0, tag_of(reports), &pair->text, sizeof pair->text, &pair->head, err));
    if (bytes <= HEAD_BYTES) return CPA_OK;
    return cpa_comm_start_send(comm, 0, tag_of(reports), pair->all, bytes, &pair->rest, err);
}

static cpa_status expect(cpa_reports *reports, cpa_error *err) {
    for (int32_t rank = 1; rank < reports->control->size; rank++) {
        report_pair *pair = &reports->pairs[rank];
        CPA_TRY(cpa_comm_start_receive(reports->control->comm, rank, tag_of(reports), &pair->text, sizeof pair->text,
                                       &pair->head, err));
    }
    reports->expected = 1;
    return CPA_OK;
}

static cpa_status look(cpa_comm *comm, cpa_comm_request **request, int32_t rank, int wait, int *done, cpa_error *err) {
    if (wait) CPA_TRY(cpa_comm_wait(comm, request, rank, err));
    return cpa_comm_test(comm, request, done, err);
}

/* Whether the report of a rank is there: neither its head nor its rest is on its way. Moves it along. */
static cpa_status take(cpa_reports *reports, int32_t rank, int wait, int *done, cpa_error *err) {
    cpa_comm *comm = reports->control->comm;
    report_pair *pair = &reports->pairs[rank];
    if (pair->head) {
        CPA_TRY(look(comm, &pair->head, rank, wait, done, err));
        if (!*done) return CPA_OK;
        const int64_t bytes = pair->text.bytes;
        if (bytes < 0 || bytes > CPA_MAILBOX_MOST_BYTES || !reserve(pair, bytes)) {
            return cpa_fail(err, CPA_COMM, "a report of rank %d has %lld bytes, expected 0 to %lld", rank,
                            (long long)bytes, (long long)CPA_MAILBOX_MOST_BYTES);
        }
        if (bytes > HEAD_BYTES)
            CPA_TRY(cpa_comm_start_receive(comm, rank, tag_of(reports), pair->all, bytes, &pair->rest, err));
    }
    return look(comm, &pair->rest, rank, wait, done, err);
}

cpa_status cpa_reports_receive(cpa_reports *reports, int wait, int *arrived, cpa_error *err) {
    int done;
    *arrived = 0;
    if (!reports->expected) CPA_TRY(expect(reports, err));
    for (int32_t rank = 1; rank < reports->control->size; rank++) {
        CPA_TRY(take(reports, rank, wait, &done, err));
        if (!done) return CPA_OK;
    }
    reports->expected = 0;
    *arrived = 1;
    return CPA_OK;
}

const void *cpa_reports_of(const cpa_reports *reports, int32_t rank, int64_t *bytes) {
    const report_pair *pair = &reports->pairs[rank];
    *bytes = pair->text.bytes;
    return *bytes > HEAD_BYTES ? pair->all : pair->text.first;
}
