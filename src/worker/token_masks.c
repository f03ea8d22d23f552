#include "src/worker/token_masks.h"

#include "base/check.h"
#include "kernels/device.h"

/* Beyond those that one step may need: masks that come back. */
enum { SPARE_SLOTS = 256 };

cpa_status cpa_token_masks_open(cpa_worker *worker, cpa_error *err) {
    const cpa_device_table *table = worker->device->table;
    cpa_token_masks *masks = &worker->token_masks;
    if (worker->network->vocabulary <= 0) return CPA_OK;
    masks->slots = worker->options.max_seqs + SPARE_SLOTS;
    masks->words = (worker->network->vocabulary + 31) / 32;
    const int64_t bytes = masks->slots * masks->words * (int64_t)sizeof *masks->host;
    const int64_t index_bytes = worker->options.max_tokens * (int64_t)sizeof *masks->index;
    CPA_TRY(table->alloc_host(worker->device, bytes, (void **)&masks->host, err));
    CPA_TRY(table->alloc_host(worker->device, index_bytes, (void **)&masks->index_host, err));
    CPA_TRY(table->alloc(worker->device, bytes, (void **)&masks->device, err));
    return table->alloc(worker->device, index_bytes, (void **)&masks->index, err);
}

void cpa_token_masks_close(cpa_worker *worker) {
    const cpa_device_table *table = worker->device->table;
    cpa_token_masks *masks = &worker->token_masks;
    table->free(worker->device, masks->index);
    table->free(worker->device, masks->device);
    table->free_host(worker->device, masks->index_host);
    table->free_host(worker->device, masks->host);
}

int64_t cpa_token_masks_wanted(const cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    int64_t n = 0;
    for (int64_t i = 0; i < rows->n_emissions; i++) n += rows->emissions[i].is_constrained;
    return n;
}

uint32_t *cpa_token_masks_words(const cpa_worker *worker, int64_t slot) {
    return worker->token_masks.host + slot * worker->token_masks.words;
}

static cpa_status check_slot(const cpa_token_masks *masks, int32_t slot, cpa_error *err) {
    if (slot >= 0 && slot < masks->slots) return CPA_OK;
    return cpa_fail(err, CPA_INTERNAL, "a mask has slot %d, of %lld", slot, (long long)masks->slots);
}

/* Those that follow each other go together. */
static cpa_status upload_slots(cpa_worker *worker, const int32_t *fresh, int64_t n_fresh) {
    const cpa_token_masks *masks = &worker->token_masks;
    for (int64_t i = 0, n; i < n_fresh; i += n) {
        for (n = 1; i + n < n_fresh && fresh[i + n] == fresh[i] + n;) n++;
        const int64_t at = fresh[i] * masks->words, bytes = n * masks->words * (int64_t)sizeof *masks->host;
        CPA_TRY(worker->device->table->copy(masks->device + at, masks->host + at, bytes, worker->stream));
    }
    return CPA_OK;
}

cpa_status cpa_token_masks_take(cpa_worker *worker, const int32_t *slots, const int32_t *fresh, int64_t n_fresh,
                                cpa_error *err) {
    const cpa_worker_rows *rows = worker->rows;
    const cpa_token_masks *masks = &worker->token_masks;
    const int64_t n = rows->sizes.emissions;
    for (int64_t i = 0; i < n; i++) masks->index_host[i] = -1;
    for (int64_t i = 0; i < rows->n_emissions; i++) {
        const cpa_worker_emission *e = &rows->emissions[i];
        if (!e->is_constrained) continue;
        const int32_t slot = *slots++;
        if (slot != -1) CPA_TRY(check_slot(masks, slot, err));
        if (e->rank == worker->rank || rows->replicated) masks->index_host[e->index] = slot;
    }
    CPA_TRY(upload_slots(worker, fresh, n_fresh));
    return worker->device->table->copy(masks->index, masks->index_host, n * (int64_t)sizeof *masks->index,
                                       worker->stream);
}
