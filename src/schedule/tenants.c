#include "src/schedule/tenants.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/min_max.h"

/* What a token of an output counts, where one of a prompt counts 1: computed one by one it takes a device for longer.
 * The weights of the paper. */
enum { OUTPUT_WEIGHT = 2 };

static void free_tenant(cpa_tenant *tenant) {
    free(tenant->held);
    free(tenant);
}

static void forget_absent(cpa_tenants *tenants, cpa_absent_tenant *absent) {
    HASH_DEL(tenants->absent, absent);
    free(absent);
}

void cpa_tenants_destroy(cpa_tenants *tenants) {
    cpa_tenant *tenant, *next;
    HASH_ITER(hh, tenants->by_name, tenant, next) {
        HASH_DEL(tenants->by_name, tenant);
        free_tenant(tenant);
    }
    while (tenants->absent) forget_absent(tenants, tenants->absent);
    free(tenants->free_numbers);
}

/* What is remembered of a tenant that was there before passes over to it. */
static void recall(cpa_tenants *tenants, cpa_tenant *tenant) {
    cpa_absent_tenant *absent;
    HASH_FIND(hh, tenants->absent, tenant->name, strlen(tenant->name), absent);
    if (!absent) return;
    tenant->service = absent->service;
    tenant->seen = absent->seen;
    forget_absent(tenants, absent);
}

/* Without memory it is not remembered. */
static void remember(cpa_tenants *tenants, const cpa_tenant *tenant) {
    const size_t length = strlen(tenant->name);
    if (HASH_COUNT(tenants->absent) == CPA_MOST_ABSENT_TENANTS) forget_absent(tenants, tenants->absent);
    cpa_absent_tenant *absent = calloc(1, sizeof *absent + length + 1);
    if (!absent) return;
    absent->service = tenant->service;
    absent->seen = tenant->seen;
    memcpy(absent->name, tenant->name, length);
    HASH_ADD_KEYPTR(hh, tenants->absent, absent->name, length, absent);
    if (!absent->hh.tbl) free(absent);
}

static cpa_tenant *add(cpa_tenants *tenants, const char *name, size_t length, int32_t n_pools) {
    /* Room for every number, so that leaving never lacks it. */
    if (!cpa_array_reserve(&tenants->free_numbers, &tenants->capacity, tenants->numbers + 1, sizeof(int32_t)))
        return NULL;
    cpa_tenant *tenant = calloc(1, sizeof *tenant + length + 1);
    if (!tenant) return NULL;
    tenant->all = tenants;
    memcpy(tenant->name, name, length);
    tenant->held = calloc((size_t)n_pools, sizeof *tenant->held);
    if (tenant->held) HASH_ADD_KEYPTR(hh, tenants->by_name, tenant->name, length, tenant);
    if (!tenant->hh.tbl) {
        free_tenant(tenant);
        return NULL;
    }
    tenant->number = tenants->n_free > 0 ? tenants->free_numbers[--tenants->n_free] : tenants->numbers++;
    tenant->seen = -INFINITY;
    tenant->room_s = INFINITY;
    recall(tenants, tenant);
    return tenant;
}

cpa_tenant *cpa_tenant_join(cpa_tenants *tenants, const char *name, int32_t n_pools) {
    const size_t length = strlen(name);
    cpa_tenant *tenant;
    HASH_FIND(hh, tenants->by_name, name, length, tenant);
    if (!tenant) tenant = add(tenants, name, length, n_pools);
    if (tenant) tenant->sequences++;
    return tenant;
}

void cpa_tenant_leave(cpa_tenant *tenant) {
    cpa_tenants *tenants = tenant->all;
    if (--tenant->sequences > 0) return;
    HASH_DEL(tenants->by_name, tenant);
    tenants->free_numbers[tenants->n_free++] = tenant->number;
    remember(tenants, tenant);
    free_tenant(tenant);
}

int cpa_tenant_is_active(const cpa_tenant *tenant) {
    return tenant->running + tenant->waiting > 0;
}

int64_t cpa_tenants_active(const cpa_tenants *tenants) {
    int64_t active = 0;
    for (const cpa_tenant *tenant = tenants->by_name; tenant; tenant = tenant->hh.next)
        active += cpa_tenant_is_active(tenant);
    return active;
}

void cpa_tenant_arrive(cpa_tenant *tenant) {
    int64_t least = INT64_MAX;
    if (cpa_tenant_is_active(tenant)) return;
    for (const cpa_tenant *other = tenant->all->by_name; other; other = other->hh.next)
        if (cpa_tenant_is_active(other)) least = cpa_min64(least, other->service);
    if (least == INT64_MAX) least = tenant->all->last_service;
    tenant->service = cpa_max64(tenant->service, least);
}

void cpa_tenant_serve(cpa_tenant *tenant, int64_t prompt_tokens, int64_t output_tokens) {
    tenant->service += prompt_tokens + OUTPUT_WEIGHT * output_tokens;
    tenant->all->last_service = tenant->service;
}
