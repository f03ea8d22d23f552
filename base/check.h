/* Errors and checks for every part of the project: how a message is written, how a failure is passed on. */
#ifndef CPA_BASE_CHECK_H
#define CPA_BASE_CHECK_H

#include <stdint.h>

#include <cpattn/status.h>

/* Writes `status` and a formatted line to err (which may be NULL) and returns `status`. A line it stays: control
 * characters in it are escaped. */
__attribute__((format(printf, 3, 4))) cpa_status cpa_fail(cpa_error *err, cpa_status status, const char *format, ...);

/* The status that a number from another process stands for; CPA_COMM where it is none. */
cpa_status cpa_status_from(int64_t number);

/* Logs one formatted line, escaped alike, at `level` through the sink of cpa_log_set. */
__attribute__((format(printf, 2, 3))) void cpa_log(cpa_log_level level, const char *format, ...);
int cpa_log_enabled(cpa_log_level level);

/* Return the status of a failing call from this function. */
#define CPA_TRY(call)                                                                                                  \
    do {                                                                                                               \
        cpa_status status_ = (call);                                                                                   \
        if (status_ != CPA_OK) return status_;                                                                         \
    } while (0)

/* Store the status of a failing call in `status` and go to this function's clean-up path. */
#define CPA_TRY_GOTO(call, label)                                                                                      \
    do {                                                                                                               \
        status = (call);                                                                                               \
        if (status != CPA_OK) goto label;                                                                              \
    } while (0)

#endif
