/* Status codes and error messages shared by every part of libcpattn. */
#ifndef CPATTN_STATUS_H
#define CPATTN_STATUS_H

#include <cpattn/api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cpa_status {
    CPA_OK = 0,
    CPA_INVALID,      /* an argument, option or input is wrong; nothing was changed */
    CPA_UNSUPPORTED,  /* valid, but this back end cannot do it */
    CPA_NO_MEMORY,    /* host or device memory ran out */
    CPA_IO,           /* a file could not be read or written */
    CPA_COMM,         /* a transport or another rank failed */
    CPA_DEVICE,       /* the device or its driver failed */
    CPA_CHECK_FAILED, /* a result disagrees with its float64 reference */
    CPA_STOPPED,      /* the caller asked to stop before the work was done */
    CPA_INTERNAL,     /* a bug in this library */
    CPA_BUSY          /* there is too much to do already; later it may work */
} cpa_status;

/* A status and one line that says what was wrong, where, and what was expected. Functions that take a
 * `cpa_error *` accept NULL and write to it only when they fail. */
typedef struct cpa_error {
    cpa_status status;
    char message[512];
} cpa_error;

/* The name of a status, such as "invalid"; never NULL. Thread-safe. */
CPA_API const char *cpa_status_name(cpa_status status);

/* The version of the library that is linked, "major.minor.patch". Thread-safe. */
CPA_API const char *cpa_version(void);

typedef enum cpa_log_level { CPA_LOG_ERROR = 0, CPA_LOG_WARN, CPA_LOG_INFO, CPA_LOG_DEBUG } cpa_log_level;

/* Receives one complete line without a line end. May be called from any thread of the library. */
typedef void (*cpa_log_fn)(void *ctx, cpa_log_level level, const char *line);

/* Sends the library's log lines up to `level` to `fn`; NULL (the default) silences the library. Process-wide: call it
 * before any other function of the library, from one thread. */
CPA_API void cpa_log_set(cpa_log_fn fn, void *ctx, cpa_log_level level);

#ifdef __cplusplus
}
#endif
#endif
