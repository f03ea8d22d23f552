/* The figures of each tenant, where the requests of a workload have several salts. A salt may be a secret: tenants are
 * told by number, counted from 1 in the order of their first requests. */
#ifndef CPA_BENCH_SERVE_TENANTS_H
#define CPA_BENCH_SERVE_TENANTS_H

#include <jansson.h>
#include <stdio.h>

#include "program/metrics.h"
#include "program/workload.h"

typedef struct cpa_serve_tenant cpa_serve_tenant;

/* Zeros to begin with. */
typedef struct cpa_serve_tenants {
    cpa_serve_tenant *by_salt; /* hash table, in the order of the numbers; NULL: all requests have one salt, or none */
} cpa_serve_tenants;

/* Those of a workload, which must outlive them. */
cpa_status cpa_serve_tenants_find(const cpa_workload *workload, const cpa_metrics_options *options,
                                  cpa_serve_tenants *out, cpa_error *err);

/* A request of the workload has ended so. */
void cpa_serve_tenants_add(cpa_serve_tenants *tenants, const cpa_request *request, const cpa_request_times *times);

/* For each of the first tenants the lines of a report, none where there is only one tenant. */
void cpa_serve_tenants_print(cpa_serve_tenants *tenants, double duration_s, FILE *out);

/* Puts "tenants" into `root`, an object of figures for each; nothing where there is only one. 0, or -1 without memory. */
int cpa_serve_tenants_put(json_t *root, cpa_serve_tenants *tenants, double duration_s);

void cpa_serve_tenants_release(cpa_serve_tenants *tenants);

#endif
