#include "bench/serve/tenants.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/hash_table.h"
#include "program/metrics_json.h"
#include "program/metrics_report.h"
#include "program/report_line.h"

/* So many are printed; the file has all of them. */
enum { MOST_PRINTED = 8 };

struct cpa_serve_tenant {
    UT_hash_handle hh;
    const char *salt;
    int64_t requests;
    cpa_metrics metrics;
};

static const char *salt_of(const cpa_request *request) {
    return request->salt ? request->salt : "";
}

static cpa_serve_tenant *find(const cpa_serve_tenants *tenants, const char *salt) {
    cpa_serve_tenant *tenant;
    HASH_FIND_STR(tenants->by_salt, salt, tenant);
    return tenant;
}

static cpa_serve_tenant *add(cpa_serve_tenants *tenants, const char *salt, const cpa_metrics_options *options) {
    cpa_serve_tenant *tenant = calloc(1, sizeof *tenant);
    if (!tenant) return NULL;
    tenant->salt = salt;
    tenant->metrics.options = *options;
    HASH_ADD_KEYPTR(hh, tenants->by_salt, salt, strlen(salt), tenant);
    if (tenant->hh.tbl) return tenant;
    free(tenant);
    return NULL;
}

cpa_status cpa_serve_tenants_find(const cpa_workload *workload, const cpa_metrics_options *options,
                                  cpa_serve_tenants *out, cpa_error *err) {
    cpa_serve_tenants found = {0};
    for (int64_t i = 0; i < workload->count; i++) {
        const char *salt = salt_of(&workload->requests[i]);
        cpa_serve_tenant *tenant = find(&found, salt);
        if (!tenant) tenant = add(&found, salt, options);
        if (!tenant) {
            cpa_serve_tenants_release(&found);
            return cpa_fail(err, CPA_NO_MEMORY, "bench serve: no memory for tenants");
        }
        tenant->requests++;
    }
    if (HASH_COUNT(found.by_salt) < 2) cpa_serve_tenants_release(&found);
    *out = found;
    return CPA_OK;
}

void cpa_serve_tenants_add(cpa_serve_tenants *tenants, const cpa_request *request, const cpa_request_times *times) {
    cpa_serve_tenant *tenant = find(tenants, salt_of(request));
    if (tenant) cpa_metrics_add_request(&tenant->metrics, times);
}

void cpa_serve_tenants_print(cpa_serve_tenants *tenants, double duration_s, FILE *out) {
    int number = 0;
    for (cpa_serve_tenant *tenant = tenants->by_salt; tenant; tenant = tenant->hh.next) {
        char label[32];
        if (number == MOST_PRINTED) {
            cpa_report_line(out, "tenants", "%u more", HASH_COUNT(tenants->by_salt) - MOST_PRINTED);
            break;
        }
        snprintf(label, sizeof label, "tenant %d", ++number);
        cpa_report_line(out, label, "%" PRId64 " of %" PRId64 " requests completed", tenant->metrics.completed,
                        tenant->requests);
        cpa_metrics_print_throughput(&tenant->metrics, duration_s, out);
        cpa_metrics_print_latencies(&tenant->metrics, out);
    }
}

int cpa_serve_tenants_put(json_t *root, cpa_serve_tenants *tenants, double duration_s) {
    int bad = 0;
    if (!tenants->by_salt) return 0;
    json_t *array = json_array();
    for (cpa_serve_tenant *tenant = tenants->by_salt; tenant; tenant = tenant->hh.next) {
        json_t *object = json_object();
        bad |= cpa_metrics_put_figures(object, &tenant->metrics, tenant->requests, duration_s, 1) |
               json_array_append_new(array, object);
    }
    return bad | json_object_set_new(root, "tenants", array);
}

void cpa_serve_tenants_release(cpa_serve_tenants *tenants) {
    cpa_serve_tenant *tenant, *next;
    HASH_ITER(hh, tenants->by_salt, tenant, next) {
        HASH_DEL(tenants->by_salt, tenant);
        cpa_metrics_release(&tenant->metrics);
        free(tenant);
    }
}
