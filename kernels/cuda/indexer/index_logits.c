/* The plan of an indexer on the device, and which kernel takes which of its items. Of a reserved plan both follow
 * from its limits: items of no rows fill it up, and CTAs that find no rows leave. */
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/hash.h"
#include "base/min_max.h"
#include "kernels/cuda/indexer/index_logits.h"

typedef struct cuda_plan {
    cpa_index_plan base;
    char *image; /* device: items, tiles in front of each by the rows of a tile, and tables */
    int64_t image_capacity;
    char *staging; /* host: what goes there */
    int64_t staging_capacity;
    /* Of a reserved plan, page-locked, as large as the image, in turn: one may be on its way as the next is filled. */
    char *stagings[2];
    int turn;
    int64_t bytes;                   /* of the image that are used */
    int64_t starts_at, tables_at;    /* bytes from the image's beginning */
    const int32_t *tables_of_caller; /* on the device; NULL: they are in the image */
} cuda_plan;

cpa_status cpa_cuda_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err) {
    cuda_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(err, CPA_NO_MEMORY, "index plan: no memory");
    plan->base.device = device;
    *out = &plan->base;
    return CPA_OK;
}

void cpa_cuda_index_plan_destroy(cpa_index_plan *base) {
    cuda_plan *plan = (cuda_plan *)base;
    if (plan->image && cpa_cuda_select(base->device, NULL) == CPA_OK) cpa_cuda_free(base->device, plan->image);
    cpa_index_plan_release(base);
    for (int i = 0; i < 2; i++) (void)cudaFreeHost(plan->stagings[i]);
    free(plan->staging);
    free(plan);
}

/* Tiles in front of each item, where a tile has up to so many rows. */
static const int32_t *starts_of(const cuda_plan *plan, const char *image, int tiling) {
    return (const int32_t *)(const void *)(image + plan->starts_at) + tiling * (plan->base.items.n + 1);
}

static cpa_status count_tiles(const cpa_index_plan *plan, int32_t *starts, cpa_error *err) {
    for (int tiling = 0; tiling < CPA_CUDA_INDEX_TILINGS; tiling++) {
        const int64_t rows = 1 << tiling;
        int64_t tiles = 0;
        for (int64_t i = 0; i < plan->items.n; i++) {
            *starts++ = (int32_t)tiles;
            tiles += (plan->items.items[i].q_count + rows - 1) / rows;
            if (tiles > INT32_MAX)
                return cpa_fail(err, CPA_UNSUPPORTED, "index plan: %lld rows and more, expected fewer than 2^31",
                                (long long)tiles);
        }
        *starts++ = (int32_t)tiles;
    }
    return CPA_OK;
}

static cpa_status reserve_image(cuda_plan *plan, int64_t bytes, cpa_error *err) {
    cpa_device *device = plan->base.device;
    if (bytes <= plan->image_capacity) return CPA_OK;
    const int64_t capacity = cpa_max64(bytes, 2 * plan->image_capacity);
    cpa_cuda_retire(device, plan->image);
    plan->image = NULL, plan->image_capacity = 0;
    for (int i = 0; i < 2; i++) {
        cpa_cuda_retire_host(device, plan->stagings[i]);
        plan->stagings[i] = NULL;
    }
    CPA_TRY(cpa_cuda_check(err, cpa_cuda_malloc(device, capacity, (void **)&plan->image), "index plan"));
    plan->image_capacity = capacity;
    return CPA_OK;
}

/* Where the sections of so many items and table entries lie. */
static void place_sections(cuda_plan *plan, int64_t items, int64_t entries) {
    plan->starts_at = items * (int64_t)sizeof(cpa_attend_item);
    plan->tables_at = plan->starts_at + CPA_CUDA_INDEX_TILINGS * (items + 1) * (int64_t)sizeof(int32_t);
    plan->bytes = plan->tables_at + entries * (int64_t)sizeof(int32_t);
}

cpa_status cpa_cuda_index_plan_reserve(cpa_index_plan *base, const cpa_index_limits *limits, cpa_error *err) {
    cuda_plan *plan = (cuda_plan *)base;
    CPA_TRY(cpa_cuda_select(base->device, err));
    base->limits.items = 0; /* until there is room */
    place_sections(plan, limits->items, limits->table_entries);
    CPA_TRY(reserve_image(plan, plan->bytes, err));
    for (int i = 0; i < 2; i++) {
        if (plan->stagings[i]) continue;
        CPA_TRY(cpa_cuda_check(err, cudaHostAlloc((void **)&plan->stagings[i], (size_t)plan->image_capacity, 0),
                               "index plan"));
    }
    base->limits = *limits;
    return CPA_OK;
}

/* What an image is to have of the items, and of the entries of tables on the host. */
static cpa_status fill_staging(const cuda_plan *plan, char *staging, const cpa_attend_batch *batch, int64_t entries,
                               cpa_error *err) {
    const cpa_index_items *items = &plan->base.items;
    if (items->n) memcpy(staging, items->items, (size_t)items->n * sizeof *items->items);
    CPA_TRY(count_tiles(&plan->base, (int32_t *)(void *)(staging + plan->starts_at), err));
    if (entries) memcpy(staging + plan->tables_at, batch->block_tables, (size_t)entries * sizeof *batch->block_tables);
    return CPA_OK;
}

cpa_status cpa_cuda_index_plan_set(cpa_index_plan *base, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err) {
    cuda_plan *plan = (cuda_plan *)base;
    CPA_TRY(cpa_cuda_select(base->device, err));
    CPA_TRY(cpa_index_plan_describe(base, batch, tokens_per_key, err));
    if (base->most_keys > INT32_MAX / 2)
        return cpa_fail(err, CPA_UNSUPPORTED, "index plan: an item has %lld keys, expected at most 2^30",
                        (long long)base->most_keys);
    const int64_t entries = batch->block_tables_on_device ? 0 : batch->n_table_entries;
    plan->tables_of_caller = batch->block_tables_on_device ? batch->block_tables : NULL;
    if (base->limits.items > 0) {
        plan->turn = !plan->turn;
        return fill_staging(plan, plan->stagings[plan->turn], batch, entries, err);
    }
    place_sections(plan, base->items.n, entries);
    CPA_TRY(reserve_image(plan, plan->bytes, err));
    if (!cpa_array_reserve(&plan->staging, &plan->staging_capacity, plan->bytes, 1))
        return cpa_fail(err, CPA_NO_MEMORY, "index plan: no memory for %lld bytes", (long long)plan->bytes);
    CPA_TRY(fill_staging(plan, plan->staging, batch, entries, err));
    const cudaError_t error =
        cudaMemcpyAsync(plan->image, plan->staging, (size_t)plan->bytes, cudaMemcpyHostToDevice, NULL);
    return cpa_cuda_check(err, error == cudaSuccess ? cudaStreamSynchronize(NULL) : error, "index plan");
}

cpa_status cpa_cuda_index_plan_upload(const cpa_index_plan *base, cpa_stream *stream) {
    const cuda_plan *plan = (const cuda_plan *)base;
    CPA_TRY(cpa_cuda_select(base->device, &stream->error));
    return cpa_cuda_check(&stream->error,
                          cudaMemcpyAsync(plan->image, plan->stagings[plan->turn], (size_t)plan->bytes,
                                          cudaMemcpyHostToDevice, cpa_cuda_handle(stream)),
                          "index plan");
}

uint64_t cpa_cuda_index_plan_shape(const cpa_index_plan *base) {
    const cuda_plan *plan = (const cuda_plan *)base;
    const cpa_index_limits *l = &base->limits;
    const uint64_t shape[] = {(uint64_t)l->items,
                              (uint64_t)l->item_rows,
                              (uint64_t)l->rows,
                              (uint64_t)l->keys,
                              (uint64_t)l->table_entries,
                              (uint64_t)base->block_size,
                              (uint64_t)base->items.map.cp_size,
                              (uint64_t)base->items.map.interleave,
                              (uint64_t)base->items.tokens_per_key,
                              (uintptr_t)plan->image,
                              (uintptr_t)plan->tables_of_caller};
    return cpa_hash_bytes(CPA_HASH_START, shape, sizeof shape);
}

/* ---- logits ---- */

static cpa_cuda_index_work work_of(const cuda_plan *plan, const cpa_index_logits_args *a) {
    const cpa_kv_view *kv = &a->cache.kv;
    const int64_t bytes = cpa_dtype_bytes(kv->dtype);
    cpa_cuda_index_work work = {
        .items = plan->base.items,
        .tables = plan->tables_of_caller ? plan->tables_of_caller
                                         : (const int32_t *)(const void *)(plan->image + plan->tables_at),
        .heads = a->heads,
        .dim = kv->k_dim,
        .dtype = kv->dtype,
        .q = a->q,
        .q_row_stride = a->q_row_stride * bytes,
        .weights = a->weights,
        .weight_row_stride = a->weight_row_stride,
        .keys = cpa_index_keys_of(a),
        .block_shift = cpa_cuda_log2(kv->block_size),
        .unit_shift = cpa_cuda_log2(a->unit),
        .logits = a->logits,
        .row_stride = a->row_stride,
        .width = a->width,
    };
    work.items.items = (const cpa_attend_item *)(const void *)plan->image;
    return work;
}

/* The most tiles of so many rows that a reserved plan has. */
static int32_t most_tiles(const cpa_index_limits *most, int64_t rows) {
    const int64_t of_items = most->items * ((most->item_rows + rows - 1) / rows);
    const int64_t of_rows = (most->rows + most->items * (rows - 1)) / rows;
    return (int32_t)cpa_min64(cpa_min64(of_items, of_rows), INT32_MAX);
}

/* The items [first, end) in tiles of so many rows; of a reserved plan they are all. */
static cpa_cuda_index_work part_of(const cuda_plan *plan, const cpa_cuda_index_work *whole, int64_t first, int64_t end,
                                   int tiling) {
    cpa_cuda_index_work part = *whole;
    const cpa_index_limits *limits = &plan->base.limits;
    part.starts = starts_of(plan, plan->image, tiling);
    part.first_item = (int32_t)first, part.end_item = (int32_t)end;
    part.rows = 1 << tiling;
    if (limits->items > 0) {
        part.tiles = most_tiles(limits, part.rows);
        part.most_keys = (int32_t)limits->keys;
        return part;
    }
    const int32_t *starts = starts_of(plan, plan->staging, tiling);
    part.first_tile = starts[first], part.tiles = starts[end] - starts[first];
    for (int64_t i = first; i < end; i++)
        part.most_keys = (int32_t)cpa_max64(part.most_keys, plan->base.items.items[i].k_count);
    return part;
}

/* How many items have more rows than that: they come first. All or none of a reserved plan. */
static int64_t items_of_more(const cpa_index_plan *plan, int64_t rows) {
    const cpa_index_items *items = &plan->items;
    int64_t low = 0, high = items->n;
    if (plan->limits.items > 0) return plan->limits.item_rows > rows ? items->n : 0;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (items->items[middle].q_count > rows)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Items by how many rows they have: with many each warpgroup of a CTA has as many as 128 columns hold; with few it has
 * those of 64 columns, and with fewer they are those of both. Heads of 65 and more take 128 columns a row. */
static cpa_status run_hopper(const cuda_plan *plan, const cpa_cuda_index_work *whole, cpa_stream *stream) {
    const int wide = whole->heads > 64, of_64 = whole->heads <= 32 ? 1 : 0; /* log2 of the rows in 64 columns */
    const int32_t few_columns = wide ? 128 : 64;
    const struct {
        int tiling, split;
        int32_t columns;
        int64_t above; /* the items with more rows than that, and than those in front */
    } parts[] = {{wide ? 1 : of_64 + 2, 0, 128, wide ? 1 : 2 << of_64},
                 {wide ? 1 : of_64 + 1, 0, few_columns, 1 << of_64},
                 {of_64, 1, few_columns, 0}};
    int64_t first = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const int64_t end = items_of_more(&plan->base, parts[i].above);
        if (end <= first) continue;
        cpa_cuda_index_work part = part_of(plan, whole, first, end, parts[i].tiling);
        part.split = parts[i].split;
        CPA_TRY(cpa_cuda_index_logits_hopper(&part, parts[i].columns, stream));
        first = end;
    }
    return CPA_OK;
}

/* Whether rows of keys and queries are vectors of 16 bytes at multiples of 16. */
static int in_vectors(const cpa_cuda_index_work *w) {
    const int64_t vector = 16, head = w->dim * cpa_dtype_bytes(w->dtype);
    const int64_t places = (int64_t)(uintptr_t)w->q | w->q_row_stride | head | (int64_t)(uintptr_t)w->keys.rows |
                           w->keys.block_stride | w->keys.token_stride;
    return places % vector == 0;
}

cpa_status cpa_cuda_index_logits(const cpa_index_plan *base, const cpa_index_logits_args *args, cpa_stream *stream) {
    const cuda_plan *plan = (const cuda_plan *)base;
    const cpa_cuda_path path = cpa_cuda_device_of(stream)->path;
    const cpa_cuda_index_work work = work_of(plan, args);
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (args->width * args->unit > INT32_MAX)
        return cpa_cuda_unsupported(stream, "index_logits: more columns than kernels count", args->width);
    const int fits = in_vectors(&work) && path != CPA_CUDA_SIMPLE && work.dtype != CPA_F32;
    const int has_tiles = work.dim == 64 || work.dim == 128;
    if (fits && path == CPA_CUDA_HOPPER && (has_tiles || work.dim == 32)) return run_hopper(plan, &work, stream);
    const cpa_cuda_index_work all = part_of(plan, &work, 0, base->items.n, CPA_CUDA_INDEX_TILINGS - 1);
    return fits && has_tiles ? cpa_cuda_index_logits_tiles(&all, stream) : cpa_cuda_index_logits_simple(&all, stream);
}
