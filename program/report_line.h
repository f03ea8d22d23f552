/* A line of a report. */
#ifndef CPA_PROGRAM_REPORT_LINE_H
#define CPA_PROGRAM_REPORT_LINE_H

#include <stdio.h>

/* Prints a label (or none, to go on), text in the column behind it, and the end of the line. */
__attribute__((format(printf, 3, 4))) void cpa_report_line(FILE *out, const char *label, const char *format, ...);

#endif
