#include "src/worker/worker_transfer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/cache/parcel.h"

/* Rows that are on the host at once. */
enum { BATCH_BYTES = 8 << 20 };

/* The blocks of one group that a transfer has on this rank, as rows, some of them at a time; and the parcel at hand. */
typedef struct transfer {
    cpa_worker *worker;
    const cpa_step_plan *plan;
    const cpa_plan_transfer *of;
    int32_t group;
    cpa_token_set held; /* tokens of the request on this rank */
    cpa_kv_view *layers;
    int32_t n_layers;
    int64_t row_bytes;
    int32_t *ids; /* [n] blocks */
    int32_t *entries;
    int64_t n, batch;  /* blocks, and how many of them are rows at once */
    char *rows;        /* [batch * block_size, row_bytes] */
    int64_t parcel;    /* the one at hand; -1: none */
    uint32_t bits;     /* bit i: its token i is there */
    uint8_t *part;     /* a part as it lies in a store */
    char *parcel_rows; /* [CPA_PARCEL_TOKENS, row_bytes] */
} transfer;

/* ---- the blocks ---- */

static void list_blocks(transfer *t) {
    for (int64_t i = t->of->blocks; i < t->of->blocks + t->of->n_blocks; i++) {
        const cpa_plan_transfer_block *block = &t->plan->transfer_blocks[i];
        if (block->group != t->group || block->rank != t->worker->rank) continue;
        t->ids[t->n] = block->block;
        t->entries[t->n++] = block->entry;
    }
}

static void close_transfer(transfer *t) {
    free(t->parcel_rows);
    free(t->part);
    free(t->rows);
    free(t->entries);
    free(t->ids);
    free(t->layers);
}

static cpa_status open_transfer(transfer *t, cpa_error *err) {
    const cpa_worker_options *o = &t->worker->options;
    const size_t blocks = (size_t)t->of->n_blocks;
    t->held = cpa_tokens_on(o->map, t->of->placement, t->worker->rank);
    t->parcel = -1;
    const int32_t layers = o->groups.list[t->group].layers;
    t->n_layers = o->model.index ? 2 * layers : layers;
    t->layers = calloc((size_t)t->n_layers, sizeof *t->layers);
    t->ids = calloc(blocks, sizeof *t->ids);
    t->entries = calloc(blocks, sizeof *t->entries);
    if (!t->layers || !t->ids || !t->entries) goto no_memory;
    const cpa_kv_cache *cache = t->worker->caches[t->group];
    for (int32_t i = 0; i < t->n_layers; i++)
        t->layers[i] = i < layers ? cpa_kv_cache_view(cache, i) : cpa_kv_cache_index_view(cache, i - layers);
    t->row_bytes = cpa_blocks_row_bytes(t->layers, t->n_layers);
    list_blocks(t);
    t->batch = cpa_max64(1, cpa_min64(t->n, BATCH_BYTES / (o->block_size * t->row_bytes)));
    t->rows = calloc((size_t)(t->batch * o->block_size), (size_t)t->row_bytes);
    t->part = malloc((size_t)cpa_part_most_bytes(t->row_bytes));
    t->parcel_rows = malloc((size_t)(CPA_PARCEL_TOKENS * t->row_bytes));
    if (t->rows && t->part && t->parcel_rows) return CPA_OK;
no_memory:
    return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory to move its blocks", t->of->request);
}

static cpa_status move_batch(transfer *t, int64_t first, int64_t n, cpa_error *err) {
    const cpa_blocks_args args = {.size = sizeof args,
                                  .layers = t->layers,
                                  .n_layers = t->n_layers,
                                  .ids = t->ids + first,
                                  .n = n,
                                  .rows = t->rows};
    cpa_stream *stream = t->worker->stream;
    const cpa_status status = t->of->imports ? cpa_blocks_import(&args, stream) : cpa_blocks_export(&args, stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", stream->error.message);
}

/* The position of a token of block number `index` of the list; -1: the transfer has none there. */
static int64_t position_of(const transfer *t, int64_t index, int64_t offset) {
    const cpa_owner_map map = t->worker->options.map;
    const int64_t local = (int64_t)t->entries[index] * t->worker->options.block_size + offset;
    const int64_t position = cpa_token_position(map, t->held, local);
    return position < t->of->tokens ? position : -1;
}

/* ---- the parcel at hand ---- */

static cpa_block_key key_of(const transfer *t, int32_t part) {
    cpa_block_key key = {.group = t->group, .part = part};
    memcpy(key.digest, t->plan->token_ids + t->of->digests + t->parcel * CPA_PLAN_DIGEST_WORDS, sizeof key.digest);
    return key;
}

static int32_t owner_of(const transfer *t, int64_t position) {
    return cpa_owner_rank(t->worker->options.map, t->of->placement, position);
}

/* How many ranks have tokens of the parcel, and how many of these come before this one. */
static void number_part(const transfer *t, int32_t *part, int32_t *parts) {
    const int64_t first = t->parcel * CPA_PARCEL_TOKENS, end = cpa_min64(first + CPA_PARCEL_TOKENS, t->of->tokens);
    *part = *parts = 0;
    for (int64_t i = first; i < end; i++) {
        int64_t j = first;
        while (owner_of(t, j) != owner_of(t, i)) j++;
        if (j < i) continue; /* counted */
        ++*parts;
        *part += owner_of(t, i) < t->worker->rank;
    }
}

/* Puts what there is of the parcel. */
static cpa_status put_parcel(transfer *t, cpa_error *err) {
    const cpa_block_store *store = t->worker->options.store;
    cpa_part part = {.bits = t->bits, .row_bytes = t->row_bytes};
    int32_t number, at = 0;
    if (t->parcel < 0) return CPA_OK;
    number_part(t, &number, &part.parts);
    for (int32_t i = 0; i < CPA_PARCEL_TOKENS; i++)
        if (t->bits >> i & 1)
            memcpy(t->part + CPA_PART_HEADER_BYTES + at++ * t->row_bytes, t->parcel_rows + i * t->row_bytes,
                   (size_t)t->row_bytes);
    const cpa_block_key key = key_of(t, number);
    if (!cpa_part_seal(&key, &part, t->part)) return cpa_fail(err, CPA_INTERNAL, "OpenSSL gives no SHA-256");
    return store->put(store->ctx, &key, t->part, cpa_part_bytes(&part), err);
}

/* Takes a part of the parcel; 0: the store has none, or what it has is damaged. */
static int take_part(transfer *t, int32_t number, cpa_part *part) {
    const cpa_block_store *store = t->worker->options.store;
    const cpa_block_key key = key_of(t, number);
    const int64_t most = cpa_part_most_bytes(t->row_bytes);
    cpa_error why = {CPA_OK, ""};
    int64_t n = 0, at = 0;
    cpa_status status = store->get(store->ctx, &key, t->part, most, &n, &why);
    if (status == CPA_OK && n == 0) return 0;
    if (status == CPA_OK && n > most)
        status = cpa_fail(&why, CPA_INVALID, "%" PRId64 " bytes, expected %" PRId64 " at most", n, most);
    if (status == CPA_OK) status = cpa_part_open(&key, t->row_bytes, t->part, n, part, &why);
    if (status != CPA_OK) {
        cpa_log(CPA_LOG_WARN,
                "request %" PRIu64 ": part %" PRId32 " of tokens %" PRId64 " to %" PRId64
                " of its prompt is refused, and they are computed: %s",
                t->of->request, number, t->parcel * CPA_PARCEL_TOKENS, (t->parcel + 1) * CPA_PARCEL_TOKENS - 1,
                why.message);
        return 0;
    }
    for (int32_t i = 0; i < CPA_PARCEL_TOKENS; i++)
        if (part->bits >> i & 1)
            memcpy(t->parcel_rows + i * t->row_bytes, t->part + CPA_PART_HEADER_BYTES + at++ * t->row_bytes,
                   (size_t)t->row_bytes);
    return 1;
}

/* Takes what this rank is to have of the parcel, as far as it is there. */
static void take_parcel(transfer *t) {
    const int64_t first = t->parcel * CPA_PARCEL_TOKENS, end = cpa_min64(first + CPA_PARCEL_TOKENS, t->of->tokens);
    uint32_t wanted = 0;
    int32_t parts = CPA_PARCEL_TOKENS;
    for (int64_t i = first; i < end; i++) wanted |= (uint32_t)(owner_of(t, i) == t->worker->rank) << (i - first);
    for (int32_t number = 0; number < parts && (t->bits & wanted) != wanted; number++) {
        cpa_part part;
        if (!take_part(t, number, &part)) continue;
        t->bits |= part.bits;
        parts = part.parts;
    }
}

/* The row of a position in the parcel that has it, which becomes the one at hand. */
static char *row_in_parcel(transfer *t, int64_t position) {
    return t->parcel_rows + position % CPA_PARCEL_TOKENS * t->row_bytes;
}

/* ---- out, and in ---- */

static cpa_status export_row(transfer *t, int64_t position, const char *row, cpa_error *err) {
    if (position / CPA_PARCEL_TOKENS != t->parcel) {
        CPA_TRY(put_parcel(t, err));
        t->parcel = position / CPA_PARCEL_TOKENS;
        t->bits = 0;
    }
    t->bits |= 1U << position % CPA_PARCEL_TOKENS;
    memcpy(row_in_parcel(t, position), row, (size_t)t->row_bytes);
    return CPA_OK;
}

/* 0: it is not there. */
static int import_row(transfer *t, int64_t position, char *row) {
    if (position / CPA_PARCEL_TOKENS != t->parcel) {
        t->parcel = position / CPA_PARCEL_TOKENS;
        t->bits = 0;
        take_parcel(t);
    }
    if (!(t->bits >> position % CPA_PARCEL_TOKENS & 1)) return 0;
    memcpy(row, row_in_parcel(t, position), (size_t)t->row_bytes);
    return 1;
}

static cpa_status export_batch(transfer *t, int64_t first, int64_t n, cpa_error *err) {
    const int64_t block_size = t->worker->options.block_size;
    for (int64_t i = 0; i < n * block_size; i++) {
        const int64_t position = position_of(t, first + i / block_size, i % block_size);
        if (position >= 0) CPA_TRY(export_row(t, position, t->rows + i * t->row_bytes, err));
    }
    return CPA_OK;
}

/* Lowers *arrived to the position of the first token that is not there. */
static void import_batch(transfer *t, int64_t first, int64_t n, int64_t *arrived) {
    const int64_t block_size = t->worker->options.block_size;
    for (int64_t i = 0; i < n * block_size; i++) {
        const int64_t position = position_of(t, first + i / block_size, i % block_size);
        if (position < 0 || position >= *arrived) return;
        if (!import_row(t, position, t->rows + i * t->row_bytes)) *arrived = position;
    }
}

/* The blocks of one group. What the store does not take is logged, and no fault of the step: it lowers *put to the
 * position of the first token of that. */
static cpa_status export_blocks(transfer *t, int64_t *put, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    cpa_status status = CPA_OK;
    for (int64_t first = 0; first < t->n && status == CPA_OK; first += t->batch) {
        const int64_t n = cpa_min64(t->batch, t->n - first);
        CPA_TRY(move_batch(t, first, n, err));
        status = export_batch(t, first, n, &why);
    }
    if (status == CPA_OK) status = put_parcel(t, &why);
    if (status == CPA_OK) return CPA_OK;
    *put = cpa_min64(*put, t->parcel * CPA_PARCEL_TOKENS);
    cpa_log(CPA_LOG_WARN, "request %" PRIu64 ": from token %" PRId64 " on its prompt is not exported: %s",
            t->of->request, t->parcel * CPA_PARCEL_TOKENS, why.message);
    return CPA_OK;
}

static cpa_status import_blocks(transfer *t, int64_t *arrived, cpa_error *err) {
    for (int64_t first = 0; first < t->n; first += t->batch) {
        const int64_t n = cpa_min64(t->batch, t->n - first);
        import_batch(t, first, n, arrived);
        CPA_TRY(move_batch(t, first, n, err));
    }
    return CPA_OK;
}

/* Lowers *moved to the position of the first token that is not moved. */
static cpa_status run_transfer(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_transfer *of,
                               int64_t *moved, cpa_error *err) {
    cpa_status status = CPA_OK;
    for (int32_t g = 0; g < worker->options.groups.count && status == CPA_OK; g++) {
        transfer t = {.worker = worker, .plan = plan, .of = of, .group = g};
        status = open_transfer(&t, err);
        if (status == CPA_OK && t.n > 0)
            status = of->imports ? import_blocks(&t, moved, err) : export_blocks(&t, moved, err);
        close_transfer(&t);
    }
    return status;
}

cpa_status cpa_worker_import(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    if (!cpa_array_reserve(&worker->arrived, &worker->cap_arrived, plan->n_transfers, sizeof *worker->arrived))
        return cpa_fail(err, CPA_NO_MEMORY, "worker: no memory for %" PRId64 " transfers", plan->n_transfers);
    for (int64_t i = 0; i < plan->n_transfers; i++) {
        worker->arrived[i] = plan->transfers[i].tokens;
        if (plan->transfers[i].imports)
            CPA_TRY(run_transfer(worker, plan, &plan->transfers[i], &worker->arrived[i], err));
    }
    return CPA_OK;
}

int cpa_worker_is_spoiled(const cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_transfer *of) {
    for (int64_t i = 0; i < plan->n_chunks; i++)
        if (plan->chunks[i].request == of->request) return worker->spoiled[plan->chunks[i].seq];
    return 0;
}

cpa_status cpa_worker_export(cpa_worker *worker, const cpa_step_plan *plan, const cpa_plan_transfer *of, int64_t *put,
                             cpa_error *err) {
    *put = of->tokens;
    return run_transfer(worker, plan, of, put, err);
}
