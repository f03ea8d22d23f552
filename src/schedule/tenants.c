#include "src/schedule/tenants.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

static void free_tenant(cpa_tenant *tenant) {
    cpa_sequence_queue_destroy(&tenant->waiting);
    free(tenant->held);
    free(tenant);
}

void cpa_tenants_destroy(cpa_tenants *tenants) {
    cpa_tenant *tenant, *next;
    HASH_ITER(hh, tenants->by_salt, tenant, next) {
        HASH_DEL(tenants->by_salt, tenant);
        free_tenant(tenant);
    }
    free(tenants->free_numbers);
}

static cpa_tenant *add(cpa_tenants *tenants, const char *salt, size_t length, int32_t cp_size) {
    /* Room for every number, so that leaving never lacks it. */
    if (!cpa_array_reserve(&tenants->free_numbers, &tenants->capacity, tenants->numbers + 1, sizeof(int32_t)))
        return NULL;
    cpa_tenant *tenant = calloc(1, sizeof *tenant + length + 1);
    if (!tenant) return NULL;
    tenant->all = tenants;
    memcpy(tenant->salt, salt, length);
    tenant->waiting.before = tenants->before;
    tenant->held = calloc((size_t)cp_size, sizeof *tenant->held);
    if (tenant->held) HASH_ADD_KEYPTR(hh, tenants->by_salt, tenant->salt, length, tenant);
    if (!tenant->hh.tbl) {
        free_tenant(tenant);
        return NULL;
    }
    tenant->number = tenants->n_free > 0 ? tenants->free_numbers[--tenants->n_free] : tenants->numbers++;
    return tenant;
}

cpa_tenant *cpa_tenant_join(cpa_tenants *tenants, const char *salt, int32_t cp_size) {
    const size_t length = strlen(salt);
    cpa_tenant *tenant;
    HASH_FIND(hh, tenants->by_salt, salt, length, tenant);
    if (!tenant) tenant = add(tenants, salt, length, cp_size);
    if (tenant) tenant->sequences++;
    return tenant;
}

void cpa_tenant_leave(cpa_tenant *tenant) {
    cpa_tenants *tenants = tenant->all;
    if (--tenant->sequences > 0) return;
    HASH_DEL(tenants->by_salt, tenant);
    tenants->free_numbers[tenants->n_free++] = tenant->number;
    free_tenant(tenant);
}
