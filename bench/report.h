/* The table of a benchmark on the terminal, and its JSON. */
#ifndef CPA_BENCH_REPORT_H
#define CPA_BENCH_REPORT_H

#include <jansson.h>

#include "bench/benchmark.h"

enum { CPA_BENCH_DATE_BYTES = 32 };

/* The time now, in UTC. */
void cpa_bench_date(char date[CPA_BENCH_DATE_BYTES]);

/* The lines above the table: version, device, shape, bandwidths. */
void cpa_bench_print_preamble(const cpa_bench_site *site, const char *name, const char *date);
/* The heading of the table, for columns that its first line has figures for, and one line of it. */
void cpa_bench_print_heading(const cpa_bench *bench, const cpa_bench_row *first);
void cpa_bench_print_row(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                         const cpa_bench_row *row);
/* The line below the table of a benchmark with bus bandwidths, of which the sum is given, bytes/s. */
void cpa_bench_print_average(double bus_bandwidths, int n_rows);
json_t *cpa_bench_row_to_json(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                              const cpa_bench_row *row);

/* Writes what the preamble says, and the rows, to the file of --result-json. */
cpa_status cpa_bench_write_json(const cpa_bench_site *site, const char *name, const char *date, json_t *rows,
                                cpa_error *err);

#endif
