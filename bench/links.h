/* What would carry tensors between the ranks of a benchmark, and what joins these. */
#ifndef CPA_BENCH_LINKS_H
#define CPA_BENCH_LINKS_H

#include "bench/site.h"

/* Sets transport and links of the site. Collective; measures transports of devices. */
cpa_status cpa_bench_find_links(cpa_bench_site *site, cpa_error *err);

#endif
