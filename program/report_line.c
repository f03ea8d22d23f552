#include "program/report_line.h"

#include <stdarg.h>

#define LABEL_WIDTH 12

void cpa_report_line(FILE *out, const char *label, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(out, "%-*s", LABEL_WIDTH, label);
    vfprintf(out, format, args);
    fputc('\n', out);
    va_end(args);
}
