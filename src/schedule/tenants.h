/* Those who may share blocks with each other: the requests of one salt. A tenant is there as long as it has a sequence,
 * and its salt with it. Pure logic. */
#ifndef CPA_TENANTS_H
#define CPA_TENANTS_H

#include <stdint.h>

#include "base/hash_table.h"
#include "src/schedule/sequence_queue.h"

typedef struct cpa_tenants cpa_tenants;

typedef struct cpa_tenant {
    cpa_tenants *all;
    UT_hash_handle hh;
    int32_t number;             /* counted from 0; the next tenant has that of one who is gone */
    int64_t sequences;          /* unfinished ones, and those whose blocks are about to be given back */
    int64_t *held;              /* [cp_size] entries of the block tables of its running sequences */
    cpa_sequence_queue waiting; /* the rest belongs to waiting_lines.c */
    int64_t place;
    int is_aside;
    struct cpa_tenant *next_aside;
    int skipped; /* of its waiting sequences, in the plan being made */
    char salt[];
} cpa_tenant;

struct cpa_tenants {
    int (*before)(const cpa_sequence *a, const cpa_sequence *b); /* the order of their lines; set at the start */
    cpa_tenant *by_salt;                                         /* hash table */
    int32_t numbers;                                             /* that were ever given */
    int32_t *free_numbers;
    int64_t n_free, capacity;
};

void cpa_tenants_destroy(cpa_tenants *tenants);
/* One more sequence of the tenant with that salt, who may be new; NULL without memory. `tenants` stays where it is. */
cpa_tenant *cpa_tenant_join(cpa_tenants *tenants, const char *salt, int32_t cp_size);
/* One less; the last one takes the tenant along. */
void cpa_tenant_leave(cpa_tenant *tenant);

#endif
