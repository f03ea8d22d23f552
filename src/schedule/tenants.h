/* Those for whom requests are made: by name, a salt or what the request says. Tenants are served in the order of the
 * service that each has had so far, the virtual token counter of Sheng et al., "Fairness in Serving Large Language
 * Models", OSDI 2024: a token of a prompt that is computed counts one, a token of an output two. One who comes back has
 * no claim to what it did not ask for meanwhile: it goes on from the least service of those who are there.
 *
 * A tenant is there as long as it has a sequence, and its name with it; of some that have gone the service is
 * remembered, so that coming and going gains nothing. Pure logic. */
#ifndef CPA_TENANTS_H
#define CPA_TENANTS_H

#include <stdint.h>

#include "base/hash_table.h"
#include "src/schedule/sequence_queue.h"

typedef struct cpa_tenants cpa_tenants;
struct cpa_waiting_line;

typedef struct cpa_tenant {
    cpa_tenants *all;
    UT_hash_handle hh;
    int32_t number;    /* counted from 0; a new tenant gets the number of one who is gone */
    int64_t sequences; /* unfinished sequences, and those whose blocks are about to be given back */
    int64_t running;   /* sequences that run */
    int64_t waiting;   /* sequences that have arrived and do not run */
    int64_t service;
    double seen;                    /* when it was active last, as fair_step.c has noted; -INFINITY: never */
    int is_above_share;             /* as noted last by fair_share.c */
    int64_t *held;                  /* [pools] blocks in the tables of its running sequences */
    struct cpa_waiting_line *lines; /* lines of waiting_lines.c: one for each priority of the tenant's sequences */
    /* Of fair_step.c, for the plan being made: what it may still add, in seconds; tokens that it has added; its sequences
     * that can decode, how many of them may, from which one on, and how many were asked for. */
    double room_s;
    int64_t taken;
    int64_t decoding, turns, next_turn, met;
    char name[];
} cpa_tenant;

/* Most tenants that have gone whose service is remembered. */
enum { CPA_MOST_ABSENT_TENANTS = 1024 };

/* What is remembered of a tenant that has gone. */
typedef struct cpa_absent_tenant {
    UT_hash_handle hh;
    int64_t service;
    double seen;
    char name[];
} cpa_absent_tenant;

struct cpa_tenants {
    cpa_tenant *by_name;       /* hash table */
    cpa_absent_tenant *absent; /* hash table, in the order in which they have gone */
    int64_t last_service;      /* service of the tenant that was served last */
    int32_t numbers;           /* numbers that tenants have ever been given */
    int32_t *free_numbers;
    int64_t n_free, capacity;
};

void cpa_tenants_destroy(cpa_tenants *tenants);
/* One more sequence of the tenant with that name, who may be new; NULL without memory. `tenants` stays where it is. */
cpa_tenant *cpa_tenant_join(cpa_tenants *tenants, const char *name, int32_t n_pools);
/* One less; the last one takes the tenant along. */
void cpa_tenant_leave(cpa_tenant *tenant);

/* Whether some sequence of it waits or runs. */
int cpa_tenant_is_active(const cpa_tenant *tenant);
/* How many tenants are active. */
int64_t cpa_tenants_active(const cpa_tenants *tenants);
/* A sequence of it is about to wait: if it had none that waits or runs, its service is raised to the least of those who
 * have, or where nobody has, to that of who was served last. */
void cpa_tenant_arrive(cpa_tenant *tenant);
/* Some of its tokens are computed, and some are put out. */
void cpa_tenant_serve(cpa_tenant *tenant, int64_t prompt_tokens, int64_t output_tokens);

#endif
