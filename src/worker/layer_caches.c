#include "src/worker/layer_caches.h"

#include <stdlib.h>

#include "base/check.h"
#include "src/context/planned_step.h"

static cpa_status create_cache(cpa_worker *worker, int32_t group, int32_t layers, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const cpa_index_rows none = {.dim = 0};
    cpa_attention_shape *shapes = calloc((size_t)layers, sizeof *shapes);
    if (!shapes) return cpa_fail(err, CPA_NO_MEMORY, "KV cache: no memory for %d layers", layers);
    const int is_precise = o->groups.list[group].is_precise;
    for (int32_t layer = 0; layer < o->model.layers; layer++) {
        const cpa_layer_place place = worker->places[layer];
        if (is_precise) shapes[layer] = cpa_shape_unquantised(&o->model.attention);
        if (place.group == group) shapes[place.layer] = cpa_model_layer_shape(&o->model, layer);
    }
    const cpa_kv_cache_options cache = {.shapes = shapes,
                                        .n_shapes = layers,
                                        .index = is_precise ? none : cpa_layer_groups_index(&o->model),
                                        .layers = layers,
                                        .block_size = o->block_size,
                                        .num_blocks = o->groups.list[group].num_blocks,
                                        .host_blocks = o->groups.list[group].host_blocks,
                                        .on_host = o->ring_bytes > 0,
                                        .group = group};
    const cpa_status status = cpa_kv_cache_create(&cache, worker->stream, &worker->caches[group], err);
    free(shapes);
    return status;
}

cpa_status cpa_layer_caches_create(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    int32_t layers[CPA_MAX_LAYER_GROUPS] = {0};
    _Static_assert((int)CPA_MAX_LAYER_GROUPS <= (int)CPA_MOST_TABLE_SETS, "each group has its tables");
    for (int32_t layer = 0; layer < o->model.layers; layer++) {
        const cpa_mask mask = cpa_model_mask(&o->model, layer);
        const int32_t group = cpa_layer_groups_find(&o->groups, &mask);
        worker->places[layer] = (cpa_layer_place){group, layers[group]++};
    }
    const int32_t precise = cpa_layer_groups_precise(&o->groups);
    if (precise >= 0) layers[precise] = o->model.layers;
    for (int32_t g = 0; g < o->groups.count; g++) CPA_TRY(create_cache(worker, g, layers[g], err));
    return CPA_OK;
}

void cpa_layer_caches_destroy(cpa_worker *worker) {
    for (int32_t g = 0; g < CPA_MAX_LAYER_GROUPS; g++) cpa_kv_cache_destroy(worker->caches[g]);
}

cpa_kv_view cpa_worker_kv(const cpa_worker *worker, int32_t layer) {
    const cpa_layer_place place = worker->places[layer];
    return cpa_kv_cache_view(worker->caches[place.group], place.layer);
}

cpa_kv_view cpa_worker_index(const cpa_worker *worker, int32_t layer) {
    const cpa_layer_place place = worker->places[layer];
    return cpa_kv_cache_index_view(worker->caches[place.group], place.layer);
}

cpa_kv_view cpa_worker_precise(const cpa_worker *worker, int32_t layer) {
    const int32_t precise = cpa_layer_groups_precise(&worker->options.groups);
    if (precise < 0) return (cpa_kv_view){.k = NULL};
    return cpa_kv_cache_view(worker->caches[precise], layer);
}
