#include "src/worker/worker_disk.h"

#include <string.h>

#include "base/array.h"
#include "base/check.h"

cpa_status cpa_worker_disk_open(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    if (!o->disk_folder) return CPA_OK;
    const cpa_disk_blocks_options options = {
        .folder = o->disk_folder, .identity = o->disk_identity, .rank = worker->rank, .groups = &o->groups};
    const cpa_status status = cpa_disk_blocks_open(&options, &worker->disk, err);
    worker->options.disk_folder = worker->options.disk_identity = NULL; /* the caller's */
    return status;
}

void cpa_worker_disk_close(cpa_worker *worker) {
    cpa_disk_blocks_close(worker->disk);
    worker->disk = NULL;
}

static cpa_disk_entry entry_of(const cpa_disk_move *move) {
    cpa_disk_entry entry = {.group = move->group, .slot = move->slot, .ranks = move->ranks};
    memcpy(entry.key, move->digest, sizeof entry.key);
    return entry;
}

static void *host_block(const cpa_worker *worker, const cpa_disk_move *move) {
    return cpa_kv_cache_host_block(worker->caches[move->group], move->host);
}

cpa_status cpa_worker_disk_load(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    if (plan->n_loads + plan->n_stores == 0) return CPA_OK;
    if (!worker->disk)
        return cpa_fail(err, CPA_INTERNAL, "worker: a plan moves blocks to disk, and there is no folder");
    if (!cpa_array_reserve(&worker->lost, &worker->cap_lost, plan->n_loads + 1, sizeof *worker->lost))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for %lld loads", (long long)plan->n_loads);
    memset(worker->lost, 0, (size_t)(plan->n_loads + 1) * sizeof *worker->lost);
    for (int64_t i = 0; i < plan->n_loads; i++) {
        const cpa_disk_move *load = &plan->loads[i];
        const cpa_disk_entry where = entry_of(load);
        if (load->rank == worker->rank)
            cpa_disk_blocks_load(worker->disk, &where, host_block(worker, load), &worker->lost[i]);
    }
    return CPA_OK;
}

void cpa_worker_disk_store(cpa_worker *worker, const cpa_step_plan *plan) {
    for (int64_t i = 0; i < plan->n_stores; i++) {
        const cpa_disk_move *store = &plan->stores[i];
        const cpa_disk_entry where = entry_of(store);
        if (store->rank == worker->rank)
            cpa_disk_blocks_store(worker->disk, &where, host_block(worker, store),
                                  cpa_kv_cache_checksum(worker->caches[store->group], store->host),
                                  (plan->flags & CPA_PLAN_STOP) != 0);
    }
}

void cpa_worker_disk_finish(cpa_worker *worker, const cpa_step_plan *plan) {
    if (plan->n_loads + plan->n_stores == 0) return;
    cpa_disk_blocks_wait(worker->disk);
    for (int64_t i = 0; i < plan->n_loads; i++) {
        const cpa_disk_move *load = &plan->loads[i];
        if (load->rank == worker->rank && !worker->lost[i]) cpa_kv_cache_seal(worker->caches[load->group], load->host);
    }
    worker->lost[plan->n_loads] = (uint64_t)cpa_disk_blocks_is_full(worker->disk);
}
