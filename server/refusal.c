#include "server/refusal.h"

#include <microhttpd.h>
#include <stdarg.h>
#include <stdio.h>

int cpa_refuse(cpa_refusal *refusal, unsigned status, const char *code, const char *param, const char *format, ...) {
    refusal->status = status;
    refusal->code = code;
    refusal->quotes = 0;
    snprintf(refusal->param, sizeof refusal->param, "%s", param ? param : "");
    va_list args;
    va_start(args, format);
    vsnprintf(refusal->message, sizeof refusal->message, format, args);
    va_end(args);
    return 0;
}

int cpa_refuse_failure(cpa_refusal *refusal, const char *param, const cpa_error *err) {
    unsigned status = MHD_HTTP_INTERNAL_SERVER_ERROR;
    const char *code = NULL;
    if (err->status == CPA_INVALID || err->status == CPA_UNSUPPORTED) status = MHD_HTTP_BAD_REQUEST;
    if (err->status == CPA_STOPPED) status = MHD_HTTP_SERVICE_UNAVAILABLE;
    if (err->status == CPA_BUSY) {
        status = MHD_HTTP_TOO_MANY_REQUESTS;
        code = "rate_limit_exceeded";
    }
    return cpa_refuse(refusal, status, code, param, "%s", err->message);
}

static const char *type_of(unsigned status) {
    if (status == MHD_HTTP_TOO_MANY_REQUESTS) return "rate_limit_error";
    return status >= 500 ? "server_error" : "invalid_request_error";
}

/* Messages may hold pieces of others' texts, cut somewhere: what is not ASCII is left out where it is no UTF-8. */
static json_t *text_or_ascii(const char *text) {
    json_t *value = json_string(text);
    if (value) return value;
    char ascii[sizeof((cpa_refusal *)0)->message];
    size_t n = 0;
    for (const char *c = text; *c && n + 1 < sizeof ascii; c++) {
        if ((unsigned char)*c < 0x80) ascii[n++] = *c;
    }
    return json_stringn(ascii, n);
}

json_t *cpa_refusal_json(const cpa_refusal *refusal) {
    json_t *param = refusal->param[0] ? text_or_ascii(refusal->param) : NULL;
    return json_pack("{s:{s:o,s:s,s:o?,s:s?}}", "error", "message", text_or_ascii(refusal->message), "type",
                     type_of(refusal->status), "param", param, "code", refusal->code);
}
