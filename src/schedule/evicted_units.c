#include "src/schedule/evicted_units.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/evicted_tier.h"
#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/unconfirmed.h"

/* What a rank reads from disk for one plan: the step that follows waits for it. */
enum { LOAD_BYTES = 64 << 20 };

/* A unit on its way. */
typedef struct arrival {
    cpa_prefix_digest id; /* another one in each group: see id_in */
    cpa_stored_unit unit;
    int32_t party;
    uint64_t request, step;
    int is_load; /* not 0: from disk to host memory */
    int failed;
    UT_hash_handle hh;
    int32_t blocks[]; /* [cp_size] where it goes */
} arrival;

struct cpa_evicted {
    cpa_evicted_tier host, disk;
    arrival *arrivals;  /* hash table by id, in the order of their plans */
    int32_t *unit;      /* [cp_size], scratch: the blocks that a unit moves down to, */
    int32_t *coming;    /* and those that one moves up to, for which others may move down */
    int64_t load_bytes; /* what this plan may still load */
    int stores_no_more;
};

/* ---- both ---- */

static int has_disk(const cpa_scheduler_options *o) {
    for (int32_t g = 0; g < o->groups.count; g++)
        if (o->groups.list[g].disk_blocks == 0) return 0;
    return 1;
}

static cpa_status create_disk(cpa_scheduler *s, cpa_evicted *e, cpa_error *err) {
    cpa_block_pool **pools = calloc((size_t)s->n_pools, sizeof(cpa_block_pool *));
    if (!pools) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for what is evicted");
    e->disk.pools = pools;
    for (int32_t p = 0; p < s->n_pools; p++)
        CPA_TRY(cpa_block_pool_create(cpa_pool_group(&s->options, p)->disk_blocks, &pools[p], err));
    return cpa_tier_create(s, pools, 1, &e->disk, err);
}

cpa_status cpa_evicted_create(cpa_scheduler *s, cpa_error *err) {
    if (!s->options.keep_evicted || !s->options.prefix_caching || !s->host_pools) return CPA_OK;
    cpa_evicted *e = s->evicted = calloc(1, sizeof *e);
    if (e) e->unit = calloc(2 * (size_t)s->options.map.cp_size, sizeof *e->unit);
    if (!e || !e->unit) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for what is evicted");
    e->coming = e->unit + s->options.map.cp_size;
    CPA_TRY(cpa_tier_create(s, s->host_pools, 0, &e->host, err));
    return has_disk(&s->options) ? create_disk(s, e, err) : CPA_OK;
}

void cpa_evicted_destroy(cpa_scheduler *s) {
    cpa_evicted *e = s->evicted;
    arrival *a, *next;
    if (!e) return;
    HASH_ITER(hh, e->arrivals, a, next) {
        HASH_DEL(e->arrivals, a);
        free(a);
    }
    for (int32_t p = 0; e->disk.pools && p < s->n_pools; p++) cpa_block_pool_destroy(e->disk.pools[p]);
    free(e->disk.pools);
    cpa_tier_destroy(s, &e->disk);
    cpa_tier_destroy(s, &e->host);
    free(e->unit);
    free(e);
    s->evicted = NULL;
}

/* The same unit has another id in each group: its key, with the group in the last byte. */
static cpa_prefix_digest id_in(int32_t group, const cpa_prefix_digest *key) {
    cpa_prefix_digest id = *key;
    id.bytes[sizeof id.bytes - 1] ^= (uint8_t)group;
    return id;
}

cpa_evicted_place cpa_evicted_where(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key) {
    const cpa_evicted *e = s->evicted;
    const arrival *coming;
    if (!e) return CPA_EVICTED_NOWHERE;
    const cpa_prefix_digest id = id_in(group, key);
    HASH_FIND(hh, e->arrivals, &id, sizeof id, coming);
    if (coming) return CPA_EVICTED_COMING;
    if (cpa_tier_find(&e->host, group, key)) return CPA_EVICTED_IN_HOST;
    return cpa_tier_find(&e->disk, group, key) ? CPA_EVICTED_ON_DISK : CPA_EVICTED_NOWHERE;
}

const int32_t *cpa_evicted_spread(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key) {
    const int32_t *unit = cpa_tier_find(&s->evicted->host, group, key);
    return unit ? unit : cpa_tier_find(&s->evicted->disk, group, key);
}

/* ---- down ---- */

static int count_blocks(const cpa_scheduler *s, const int32_t *unit) {
    int n = 0;
    for (int32_t r = 0; r < s->options.map.cp_size; r++) n += unit[r] >= 0;
    return n;
}

static cpa_disk_move disk_move(const cpa_scheduler *s, int32_t group, int32_t rank, const int32_t *host,
                               const int32_t *slots, const cpa_prefix_digest *key) {
    cpa_disk_move move = {.group = group,
                          .rank = rank,
                          .host = host[rank],
                          .slot = slots[rank],
                          .ranks = (uint32_t)count_blocks(s, slots)};
    memcpy(move.digest, key->bytes, sizeof move.digest);
    return move;
}

/* Writes a unit, which is in these host blocks when the plan has run its swap_outs, to disk, unless it is there. */
static void store_unit(cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key, const int32_t *host,
                       int32_t party) {
    cpa_evicted *e = s->evicted;
    const int32_t size = s->options.map.cp_size;
    if (!e->disk.pools || e->stores_no_more) return;
    if (cpa_tier_find(&e->disk, group, key)) {
        cpa_tier_touch(s, &e->disk, group, key);
        return;
    }
    if (!cpa_step_plan_reserve_disk(s->plan, s->plan->n_stores + size, s->plan->n_loads) ||
        !cpa_unit_take(s, e->disk.pools, group, host, e->unit))
        return;
    if (cpa_unit_keep(s, e->disk.caches[group], e->disk.pools, group, key, e->unit, party))
        for (int32_t r = 0; r < size; r++)
            if (e->unit[r] >= 0) {
                *cpa_step_plan_add_store(s->plan) = disk_move(s, group, r, host, e->unit, key);
                s->stats.stored_blocks++;
            }
    cpa_unit_release(s, e->disk.pools, group, e->unit);
}

/* Moves the blocks of a unit to host blocks, which nobody takes before the next plan. */
static void move_out(cpa_scheduler *s, int32_t group, const int32_t *from, const int32_t *to) {
    const int32_t size = s->options.map.cp_size;
    for (int32_t r = 0; r < size; r++) {
        if (to[r] < 0) continue;
        *cpa_step_plan_add_swap_out(s->plan) = (cpa_block_move){0, group, r, from[r], to[r]};
        (void)cpa_scheduler_pin(s, s->host_pools[group * size + r], to[r], NULL); /* there is room for it */
        s->stats.kept_blocks++;
    }
}

void cpa_evicted_put(cpa_scheduler *s, int32_t pool, int32_t block, int32_t party) {
    cpa_evicted *e = s->evicted;
    const int32_t size = s->options.map.cp_size, group = pool / size;
    const cpa_prefix_digest *found = e ? cpa_prefix_cache_digest(s->caches[group], pool % size, block) : NULL;
    if (!found || !s->plan || cpa_unconfirmed_has(s, group, found)) return;
    const cpa_prefix_digest key = *found;
    const int32_t *from = cpa_prefix_cache_find(s->caches[group], &key);
    if (cpa_tier_find(&e->host, group, &key)) {
        cpa_tier_touch(s, &e->host, group, &key);
        return;
    }
    if (!cpa_step_plan_reserve_moves(s->plan, s->plan->n_swap_outs + size, s->plan->n_swap_ins, s->plan->n_copies,
                                     s->plan->n_nulled) ||
        !cpa_scheduler_reserve_pins(s, size) || !cpa_unit_take(s, e->host.pools, group, from, e->unit))
        return;
    if (!cpa_unit_keep(s, e->host.caches[group], e->host.pools, group, &key, e->unit, party)) {
        cpa_unit_release(s, e->host.pools, group, e->unit);
        return;
    }
    move_out(s, group, from, e->unit);
    store_unit(s, group, &key, cpa_tier_find(&e->host, group, &key), party);
}

/* ---- up ---- */

cpa_status cpa_evicted_pin(cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key, cpa_error *err) {
    const int32_t size = s->options.map.cp_size, *unit = cpa_tier_find(&s->evicted->host, group, key);
    for (int32_t r = 0; unit && r < size; r++) {
        if (unit[r] < 0) continue;
        CPA_TRY(cpa_block_pool_retain(s->host_pools[group * size + r], unit[r], err));
        CPA_TRY(cpa_scheduler_pin(s, s->host_pools[group * size + r], unit[r], err));
    }
    return CPA_OK;
}

cpa_status cpa_evicted_hold(cpa_scheduler *s, int32_t pool, int32_t block, cpa_error *err) {
    if (!cpa_array_reserve(&s->holds, &s->cap_holds, s->n_holds + 1, sizeof *s->holds))
        return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    s->holds[s->n_holds++] = (cpa_hold){pool, block, s->step};
    return CPA_OK;
}

/* Notes that a unit is on its way to the blocks in e->coming. */
static cpa_status add_arrival(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit, int is_load,
                              cpa_error *err) {
    cpa_evicted *e = s->evicted;
    const size_t bytes = (size_t)s->options.map.cp_size * sizeof *e->coming;
    arrival *a = calloc(1, sizeof *a + bytes);
    if (!a) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
    a->id = id_in(unit->group, &unit->key);
    a->unit = *unit;
    a->party = sequence->tenant->number;
    a->request = sequence->request.id;
    a->step = s->step;
    a->is_load = is_load;
    memcpy(a->blocks, e->coming, bytes);
    HASH_ADD(hh, e->arrivals, id, sizeof a->id, a);
    if (a->hh.tbl) return CPA_OK;
    free(a);
    return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
}

cpa_status cpa_evicted_fetch(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit, int *started,
                             cpa_error *err) {
    cpa_evicted *e = s->evicted;
    const int32_t *host = cpa_tier_find(&e->host, unit->group, &unit->key);
    *started = cpa_unit_take(s, s->pools, unit->group, host, e->coming);
    if (!*started) return CPA_OK;
    CPA_TRY(add_arrival(s, sequence, unit, 0, err));
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        if (host[r] < 0) continue;
        cpa_block_move *move = cpa_step_plan_add_swap_in(s->plan);
        if (!move) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        *move = (cpa_block_move){sequence->request.id, unit->group, r, host[r], e->coming[r]};
        s->stats.fetched_blocks++;
    }
    return CPA_OK;
}

cpa_status cpa_evicted_load(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit, int *started,
                            cpa_error *err) {
    cpa_evicted *e = s->evicted;
    const int64_t bytes = s->options.groups.list[unit->group].block_bytes;
    const int32_t *slots = cpa_tier_find(&e->disk, unit->group, &unit->key);
    *started = 0;
    /* One at least, however long its blocks are. */
    if (!slots || (e->load_bytes < LOAD_BYTES && e->load_bytes < bytes)) return CPA_OK;
    *started = cpa_unit_take(s, s->host_pools, unit->group, slots, e->coming);
    if (!*started) return CPA_OK;
    e->load_bytes -= bytes;
    cpa_tier_touch(s, &e->disk, unit->group, &unit->key);
    CPA_TRY(add_arrival(s, sequence, unit, 1, err));
    for (int32_t r = 0; r < s->options.map.cp_size; r++) {
        if (slots[r] < 0) continue;
        cpa_disk_move *load = cpa_step_plan_add_load(s->plan);
        if (!load) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        *load = disk_move(s, unit->group, r, e->coming, slots, &unit->key);
        s->stats.loaded_blocks++;
    }
    return CPA_OK;
}

/* ---- what has come ---- */

/* Lets others find what has come to the device, as long as who it was fetched for can tell its tokens. */
static void find_arrived(cpa_scheduler *s, const arrival *a) {
    cpa_sequence *sequence;
    HASH_FIND(hh, s->by_id, &a->request, sizeof a->request, sequence);
    if (sequence &&
        cpa_unit_keep(s, s->caches[a->unit.group], s->pools, a->unit.group, &a->unit.key, a->blocks, a->party))
        cpa_block_events_stored(s, sequence, &a->unit);
}

/* What a unit has come to is no longer owned by its way. */
static void end_arrival(cpa_scheduler *s, arrival *a) {
    cpa_evicted *e = s->evicted;
    cpa_block_pool **pools = a->is_load ? s->host_pools : s->pools;
    HASH_DEL(e->arrivals, a);
    if (a->failed) {
        cpa_tier_forget(s, a->is_load ? &e->disk : &e->host, a->unit.group, &a->unit.key);
    } else if (a->is_load) {
        (void)cpa_unit_keep(s, e->host.caches[a->unit.group], pools, a->unit.group, &a->unit.key, a->blocks, a->party);
    } else {
        find_arrived(s, a);
    }
    cpa_unit_release(s, pools, a->unit.group, a->blocks);
    free(a);
}

cpa_status cpa_evicted_settle(cpa_scheduler *s, cpa_error *err) {
    cpa_evicted *e = s->evicted;
    arrival *a, *next;
    int64_t left = 0;
    if (!e) return CPA_OK;
    e->load_bytes = LOAD_BYTES;
    HASH_ITER(hh, e->arrivals, a, next)
    if (a->step + 2 <= s->step) end_arrival(s, a);
    for (int64_t i = 0; i < s->n_holds; i++) {
        const cpa_hold held = s->holds[i];
        if (held.step + 2 > s->step) {
            s->holds[left++] = held;
        } else {
            CPA_TRY(cpa_block_pool_release(s->pools[held.pool], held.block, err));
        }
    }
    s->n_holds = left;
    return CPA_OK;
}

void cpa_evicted_count(const cpa_scheduler *s, int64_t *in_host, int64_t *on_disk) {
    const cpa_evicted *e = s->evicted;
    *in_host = *on_disk = 0;
    for (int32_t p = 0; e && p < s->n_pools; p++) {
        *in_host += cpa_block_pool_kept_count(s->host_pools[p]);
        if (e->disk.pools) *on_disk += cpa_block_pool_kept_count(e->disk.pools[p]);
    }
}

int cpa_evicted_is_moving(const cpa_scheduler *s) {
    return s->evicted && s->evicted->arrivals;
}

/* The arrival in a block of a rank; NULL: there is none. */
static arrival *arriving_in(const cpa_scheduler *s, int is_load, int32_t group, int32_t rank, int32_t block) {
    arrival *a, *next;
    if (!s->evicted) return NULL;
    HASH_ITER(hh, s->evicted->arrivals, a, next)
    if (a->is_load == is_load && a->unit.group == group && a->blocks[rank] == block) return a;
    return NULL;
}

int cpa_evicted_fetch_failed(cpa_scheduler *s, const cpa_block_move *move) {
    arrival *a = arriving_in(s, 0, move->group, move->rank, move->to);
    if (!a) return 0;
    a->failed = 1;
    s->stats.damaged_blocks++;
    return 1;
}

void cpa_evicted_load_failed(cpa_scheduler *s, const cpa_disk_move *load) {
    arrival *a = arriving_in(s, 1, load->group, load->rank, load->host);
    if (!a) return;
    a->failed = 1;
    s->stats.damaged_blocks++;
}

void cpa_evicted_stop_stores(cpa_scheduler *s) {
    if (s->evicted) s->evicted->stores_no_more = 1;
}

/* ---- from one engine to the next ---- */

void cpa_evicted_save(cpa_scheduler *s, cpa_step_plan *plan) {
    if (!s->evicted || !s->evicted->disk.pools || s->evicted->stores_no_more) return;
    s->plan = plan;
    for (int32_t p = 0; p < s->n_pools; p++)
        for (int64_t b = 0; b < cpa_block_pool_total(s->pools[p]); b++) cpa_evicted_put(s, p, (int32_t)b, 0);
    s->plan = NULL;
}

/* Takes every slot of a pool, so that those of a unit can be chosen; or lets go of those that are no unit's. */
static cpa_status own_all(cpa_block_pool *pool, cpa_error *err) {
    const int64_t n = cpa_block_pool_total(pool);
    int32_t *all = malloc((size_t)n * sizeof *all);
    if (!all) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for %lld slots", (long long)n);
    (void)cpa_block_pool_take(pool, n, all); /* nobody has taken any yet */
    free(all);
    return CPA_OK;
}

static void disown_rest(cpa_block_pool *pool) {
    for (int64_t i = 0; i < cpa_block_pool_total(pool); i++)
        if (cpa_block_pool_owners(pool, (int32_t)i) > 0) (void)cpa_block_pool_release(pool, (int32_t)i, NULL);
}

/* Whether the slots are there, and no other unit's. */
static int are_free(const cpa_scheduler *s, const cpa_restored_unit *unit) {
    const int32_t size = s->options.map.cp_size;
    for (int32_t r = 0; r < size; r++)
        if (unit->slots[r] >= 0 &&
            cpa_block_pool_owners(s->evicted->disk.pools[unit->group * size + r], unit->slots[r]) != 1)
            return 0;
    return 1;
}

cpa_status cpa_evicted_restore(cpa_scheduler *s, const cpa_restored_unit *units, int64_t n, cpa_error *err) {
    cpa_evicted_tier *disk = s->evicted ? &s->evicted->disk : NULL;
    if (n == 0 || !disk || !disk->pools) return CPA_OK;
    for (int32_t p = 0; p < s->n_pools; p++) CPA_TRY(own_all(disk->pools[p], err));
    for (int64_t i = 0; i < n; i++) {
        const cpa_restored_unit *u = &units[i];
        if (!are_free(s, u) || !cpa_unit_keep(s, disk->caches[u->group], disk->pools, u->group, &u->key, u->slots, 0))
            continue;
        cpa_unit_release(s, disk->pools, u->group, u->slots);
        s->stats.restored_blocks += count_blocks(s, u->slots);
    }
    for (int32_t p = 0; p < s->n_pools; p++) disown_rest(disk->pools[p]);
    return CPA_OK;
}
