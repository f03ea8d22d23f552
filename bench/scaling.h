/* bench scaling: context attention of long prefills and of decode batches, on all ranks and on one alone. */
#ifndef CPA_BENCH_SCALING_H
#define CPA_BENCH_SCALING_H

#include "bench/site.h"

/* Measures, prints on rank 0 and writes the JSON. Collective; *wrong counts wrong results. */
cpa_status cpa_bench_scaling(cpa_bench_site *site, int64_t *wrong, cpa_error *err);

#endif
