/* The memory of a CUDA attend plan: the image of what its kernels read, and their work spaces. */
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "kernels/cuda/attend/attend_cascade.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_source.h"

/* Room in the pinned images and their twin on the device; what was there is lost when they grow, but for the attends
 * that are enqueued. */
cpa_status cpa_cuda_plan_reserve_image(cpa_cuda_plan *plan, int64_t bytes, cpa_error *err) {
    cpa_cuda_plan_memory *memory = plan->memory;
    cpa_device *device = plan->base.device;
    if (bytes <= memory->image_capacity) return CPA_OK;
    int64_t capacity = bytes > 2 * memory->image_capacity ? bytes : 2 * memory->image_capacity;
    cpa_cuda_retire(device, memory->image);
    memory->image = memory->staging = NULL;
    memory->image_capacity = 0;
    for (int i = 0; i < 2; i++) {
        cpa_cuda_retire_host(device, memory->stagings[i]);
        memory->stagings[i] = NULL;
    }
    for (int i = 0; i < 2; i++)
        CPA_TRY(cpa_cuda_check(err, cudaHostAlloc((void **)&memory->stagings[i], (size_t)capacity, 0), "attend plan"));
    CPA_TRY(cpa_cuda_check(err, cpa_cuda_malloc(device, capacity, (void **)&memory->image), "attend plan"));
    memory->image_capacity = capacity;
    return CPA_OK;
}

cpa_status cpa_cuda_plan_allocate_image(cpa_cuda_plan *plan, int64_t bytes, cpa_error *err) {
    cpa_cuda_plan_memory *memory = plan->memory;
    CPA_TRY(cpa_cuda_check(err, cpa_cuda_malloc(plan->base.device, bytes, (void **)&memory->image), "attend plan"));
    memory->image_capacity = bytes;
    return CPA_OK;
}

cpa_status cpa_cuda_plan_reserve_partial(cpa_cuda_plan *plan, int64_t floats, cpa_error *err) {
    cpa_cuda_plan_memory *memory = plan->memory;
    if (floats <= memory->partial_capacity) return CPA_OK;
    int64_t capacity = floats > 2 * memory->partial_capacity ? floats : 2 * memory->partial_capacity;
    cpa_cuda_retire(plan->base.device, memory->partial);
    memory->partial = NULL;
    memory->partial_capacity = 0;
    const int64_t bytes = capacity * (int64_t)sizeof(float);
    CPA_TRY(cpa_cuda_check(err, cpa_cuda_malloc(plan->base.device, bytes, (void **)&memory->partial),
                           "attend plan: work space"));
    memory->partial_capacity = capacity;
    return CPA_OK;
}

cpa_status cpa_cuda_plan_reserve_in_order(cpa_cuda_plan_memory *memory, int64_t n, cpa_error *err) {
    if (cpa_array_reserve(&memory->in_order, &memory->in_order_capacity, n, sizeof *memory->in_order)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld tiles", (long long)n);
}

cpa_status cpa_cuda_plan_create(cpa_device *device, const cpa_key_workspace *workspace, cpa_attend_plan **out,
                                cpa_error *err) {
    cpa_cuda_plan *plan = calloc(1, sizeof *plan);
    cpa_cuda_plan_memory *memory = calloc(1, sizeof *memory);
    cpa_cuda_cascade *cascade = calloc(1, sizeof *cascade);
    struct cpa_cuda_attend_choices *choices = calloc(1, sizeof *choices);
    struct cpa_cuda_source *source = calloc(1, sizeof *source);
    if (!plan || !memory || !cascade || !choices || !source) {
        free(source);
        free(choices);
        free(cascade);
        free(memory);
        free(plan);
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory");
    }
    plan->base.device = device;
    plan->memory = memory;
    memory->cascade = cascade;
    memory->choices = choices;
    memory->source = source;
    source->workspace = workspace ? workspace : &source->own;
    *out = &plan->base;
    return CPA_OK;
}

void cpa_cuda_plan_destroy(cpa_attend_plan *base) {
    cpa_cuda_plan *plan = (cpa_cuda_plan *)base;
    if (!plan) return;
    (void)cpa_cuda_select(base->device, NULL);
    cpa_cuda_source_destroy(base->device, plan->memory->source);
    cpa_cuda_free(base->device, plan->memory->partial);
    cpa_cuda_free(base->device, plan->memory->image);
    (void)cudaFreeHost(plan->refusal);
    (void)cudaFreeHost(plan->memory->stagings[0]);
    (void)cudaFreeHost(plan->memory->stagings[1]);
    free(plan->memory->in_order);
    free(plan->memory->packed);
    free(plan->memory->packed_tables);
    cpa_cuda_cascade_destroy(plan->memory->cascade);
    free(plan->memory->choices);
    free(plan->memory);
    free(plan);
}
