#include <stdarg.h>
#include <stdio.h>

#include "base/check.h"
#include "base/text.h"

static cpa_log_fn log_sink;
static void *log_ctx;
static cpa_log_level log_level;

void cpa_log_set(cpa_log_fn fn, void *ctx, cpa_log_level level) {
    log_sink = fn;
    log_ctx = ctx;
    log_level = level;
}

int cpa_log_enabled(cpa_log_level level) {
    return log_sink && level <= log_level;
}

void cpa_log(cpa_log_level level, const char *format, ...) {
    if (!cpa_log_enabled(level)) return;
    char text[1024], line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cpa_text_escape(text, line, sizeof line);
    log_sink(log_ctx, level, line);
}
