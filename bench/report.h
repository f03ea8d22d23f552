/* The table of a benchmark on the terminal, and its JSON. */
#ifndef CPA_LAUNCHER_BENCH_REPORT_H
#define CPA_LAUNCHER_BENCH_REPORT_H

#include <jansson.h>

#include "bench/bench.h"

enum { CPA_BENCH_DATE_BYTES = 32 };

/* The time now, in UTC. */
void cpa_bench_date(char date[CPA_BENCH_DATE_BYTES]);

/* The lines above the table: version, device, shape, bandwidths. */
void cpa_bench_print_preamble(const cpa_bench_site *site, const char *name, const char *date);
/* The heading of the table, and one line of it. */
void cpa_bench_print_heading(const cpa_bench *bench);
void cpa_bench_print_row(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                         const cpa_bench_row *row);
json_t *cpa_bench_row_to_json(const cpa_bench_site *site, const cpa_bench *bench, const char *name,
                              const cpa_bench_row *row);

/* Whether the file of --result-json may be created. */
cpa_status cpa_bench_check_json(const cpa_bench_options *options, cpa_error *err);
/* Writes what the preamble says, and the rows, to the file of --result-json, which must not exist. */
cpa_status cpa_bench_write_json(const cpa_bench_site *site, const char *name, const char *date, json_t *rows,
                                cpa_error *err);

#endif
