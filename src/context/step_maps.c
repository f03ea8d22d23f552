#include "src/context/step_maps.h"

#include "base/check.h"
#include "base/min_max.h"

cpa_status cpa_step_maps_renew(cpa_step_maps *maps, cpa_context_ops *ops, int64_t entries) {
    const cpa_device_table *table = ops->device->table;
    const int turn = maps->turn ^= 1;
    if (entries > maps->capacities[turn]) {
        const int64_t grown = cpa_max64(entries, 2 * maps->capacities[turn]);
        void *set;
        CPA_TRY(table->alloc_host(ops->device, grown * (int64_t)sizeof *maps->host, &set, &ops->error));
        table->free_host(ops->device, maps->sets[turn]);
        maps->sets[turn] = set;
        maps->capacities[turn] = grown;
    }
    maps->host = maps->sets[turn];
    maps->entries = entries;
    maps->uploaded = NULL;
    return cpa_context_ensure(ops, &maps->device, entries * (int64_t)sizeof *maps->host);
}

cpa_status cpa_step_maps_upload(cpa_step_maps *maps, cpa_context_ops *ops, cpa_stream *stream) {
    if (maps->entries == 0 || maps->uploaded == stream) return CPA_OK;
    cpa_status status =
        ops->device->table->copy(maps->device.memory, maps->host, maps->entries * (int64_t)sizeof *maps->host, stream);
    maps->uploaded = stream;
    return cpa_context_check(ops, status, stream);
}

void cpa_step_maps_free(cpa_step_maps *maps, cpa_context_ops *ops) {
    cpa_context_free(ops, &maps->device);
    ops->device->table->free_host(ops->device, maps->sets[0]);
    ops->device->table->free_host(ops->device, maps->sets[1]);
}
