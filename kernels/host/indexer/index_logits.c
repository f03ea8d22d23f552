/* index_logits and its plan. A piece of work is a run of keys of an item, which are widened once for all of its rows. A
 * product is summed over dim in order, and an L over heads in order, whatever is beside it. */
#include <math.h>
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/indexer/index_row.h"
#include "kernels/indexer.h"

/* Keys of a piece, and those whose products are summed side by side. */
enum { TILE = 64, LANES = 16 };

typedef struct host_plan {
    cpa_index_plan base;
    int32_t *tables;
    int64_t tables_capacity;
} host_plan;

cpa_status cpa_host_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err) {
    host_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(err, CPA_NO_MEMORY, "index plan: no memory");
    plan->base.device = device;
    *out = &plan->base;
    return CPA_OK;
}

cpa_status cpa_host_index_plan_set(cpa_index_plan *base, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err) {
    host_plan *plan = (host_plan *)base;
    CPA_TRY(cpa_index_plan_describe(base, batch, tokens_per_key, err));
    if (!cpa_array_reserve(&plan->tables, &plan->tables_capacity, batch->n_table_entries, sizeof *plan->tables))
        return cpa_fail(err, CPA_NO_MEMORY, "index plan: no memory for %lld table entries",
                        (long long)batch->n_table_entries);
    if (batch->n_table_entries)
        memcpy(plan->tables, batch->block_tables, (size_t)batch->n_table_entries * sizeof *plan->tables);
    return CPA_OK;
}

cpa_status cpa_host_index_plan_reserve(cpa_index_plan *plan, const cpa_index_limits *limits, cpa_error *err) {
    (void)err;
    plan->limits = *limits;
    return CPA_OK;
}

cpa_status cpa_host_index_plan_upload(const cpa_index_plan *plan, cpa_stream *stream) {
    (void)plan, (void)stream;
    return CPA_OK;
}

void cpa_host_index_plan_destroy(cpa_index_plan *base) {
    host_plan *plan = (host_plan *)base;
    cpa_index_plan_release(base);
    free(plan->tables);
    free(plan);
}

/* ---- logits ---- */

typedef struct logits_job {
    const host_plan *plan;
    const cpa_index_logits_args *args;
    cpa_index_keys keys;
    int64_t tiles; /* of an item */
} logits_job;

/* Keys of a tile, transposed, and their scales; zeros beyond the last. */
typedef struct key_tile {
    int64_t first, count;
    float elements[CPA_INDEX_MOST_DIM][TILE];
    float scales[TILE];
} key_tile;

static void widen_codes(float *out, const uint8_t *codes, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = cpa_from_e4m3(codes[i]);
}

static void widen_row(float *out, const void *row, cpa_dtype dtype, int64_t n) {
    if (dtype == CPA_FP8_E4M3)
        widen_codes(out, row, n);
    else
        cpa_widen(out, row, dtype, n);
}

static void read_keys(const logits_job *job, const cpa_attend_item *item, key_tile *tile) {
    const cpa_kv_view *kv = &job->args->cache.kv;
    const cpa_index_keys *keys = &job->keys;
    float wide[CPA_INDEX_MOST_DIM];
    memset(tile->elements, 0, sizeof tile->elements);
    for (int64_t i = 0; i < tile->count; i++) {
        const int64_t key = tile->first + i, offset = key % kv->block_size;
        const int64_t block = job->plan->tables[item->table + key / kv->block_size];
        widen_row(wide, keys->rows + block * keys->block_stride + offset * keys->token_stride, kv->dtype, kv->k_dim);
        for (int32_t d = 0; d < kv->k_dim; d++) tile->elements[d][i] = wide[d];
        tile->scales[i] = keys->scales ? keys->scales[block * keys->scale_stride + offset] * keys->scale : keys->scale;
    }
}

/* sums[l] += max(q . k_l, 0) * weight for LANES keys of a tile from `first` on. */
static void add_head(float sums[LANES], const float *q, float weight, const key_tile *tile, int64_t first,
                     int32_t dim) {
    float products[LANES] = {0};
    for (int32_t d = 0; d < dim; d++) {
        for (int l = 0; l < LANES; l++) products[l] += q[d] * tile->elements[d][first + l];
    }
    for (int l = 0; l < LANES; l++) sums[l] += (products[l] > 0 ? products[l] : 0) * weight;
}

/* The L of a row and all keys of a tile, seen or not. */
static void score_row(const logits_job *job, int64_t row, const key_tile *tile, float *out) {
    const cpa_index_logits_args *a = job->args;
    const cpa_kv_view *kv = &a->cache.kv;
    const int64_t bytes = cpa_dtype_bytes(kv->dtype);
    memset(out, 0, TILE * sizeof *out);
    for (int32_t head = 0; head < a->heads; head++) {
        const float weight = a->weights ? a->weights[row * a->weight_row_stride + head] : 1;
        float q[CPA_INDEX_MOST_DIM];
        widen_row(q, (const char *)a->q + (row * a->q_row_stride + head * kv->k_dim) * bytes, kv->dtype, kv->k_dim);
        for (int64_t first = 0; first < tile->count; first += LANES)
            add_head(out + first, q, weight, tile, first, kv->k_dim);
    }
    for (int64_t i = 0; i < tile->count; i++) out[i] *= tile->scales[i];
}

/* The columns of a row that belong to a tile: `seen` of its keys are. */
static void store_row(const logits_job *job, int64_t row, int64_t first, const float *scores, int64_t seen) {
    const cpa_index_logits_args *a = job->args;
    const int64_t begin = first / a->unit, end = cpa_min64(begin + TILE / a->unit, a->width);
    float *out = a->logits + row * a->row_stride;
    for (int64_t column = begin; column < end; column++) {
        float most = -INFINITY;
        for (int64_t i = (column - begin) * a->unit; i < (column - begin + 1) * a->unit && i < seen; i++)
            most = a->unit == 1 || scores[i] > most ? scores[i] : most;
        out[column] = most;
    }
}

static void run_tile(void *ctx, int64_t index, int32_t thread) {
    const logits_job *job = ctx;
    const cpa_index_items *items = &job->plan->base.items;
    const cpa_attend_item *item = &items->items[index / job->tiles];
    key_tile tile = {.first = index % job->tiles * TILE};
    float scores[TILE];
    (void)thread;
    if (item->q_count == 0) return;
    const int64_t of_last = cpa_index_keys_seen(items, item, item->q_count - 1);
    tile.count = cpa_max64(0, cpa_min64(TILE, of_last - tile.first));
    if (tile.count > 0) read_keys(job, item, &tile);
    for (int64_t r = 0; r < item->q_count; r++) {
        const int64_t seen = cpa_index_keys_seen(items, item, r) - tile.first;
        if (seen > 0) score_row(job, item->q_row + r, &tile, scores);
        store_row(job, item->q_row + r, tile.first, scores, seen);
    }
}

cpa_status cpa_host_index_logits(const cpa_index_plan *plan, const cpa_index_logits_args *args, cpa_stream *stream) {
    logits_job job = {(const host_plan *)plan, args, cpa_index_keys_of(args),
                      (args->width * args->unit + TILE - 1) / TILE};
    cpa_host_run(stream, plan->items.n * job.tiles, run_tile, &job);
    return CPA_OK;
}
