#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/text.h"
#include "base/version.h"

cpa_status cpa_fail(cpa_error *err, cpa_status status, const char *format, ...) {
    if (err) {
        char message[sizeof err->message]; /* err->message may be among the arguments */
        va_list args;
        va_start(args, format);
        vsnprintf(message, sizeof message, format, args);
        va_end(args);
        cpa_text_escape(message, err->message, sizeof err->message);
        err->status = status;
    }
    return status;
}

cpa_status cpa_status_from(int64_t number) {
    return number >= CPA_OK && number <= CPA_BUSY ? (cpa_status)number : CPA_COMM;
}

const char *cpa_status_name(cpa_status status) {
    switch (status) {
        case CPA_OK: return "ok";
        case CPA_INVALID: return "invalid";
        case CPA_UNSUPPORTED: return "unsupported";
        case CPA_NO_MEMORY: return "no memory";
        case CPA_IO: return "input/output";
        case CPA_COMM: return "communication";
        case CPA_DEVICE: return "device";
        case CPA_CHECK_FAILED: return "check failed";
        case CPA_STOPPED: return "stopped";
        case CPA_INTERNAL: return "internal";
        case CPA_BUSY: return "busy";
    }
    return "unknown";
}

const char *cpa_version(void) {
    return CPA_VERSION;
}
