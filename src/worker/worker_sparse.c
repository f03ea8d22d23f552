#include "src/worker/worker_sparse.h"

#include <stdlib.h>

#include <cpattn/selection.h>

#include "base/check.h"
#include "base/min_max.h"
#include "kernels/xattn.h"
#include "src/context/context_plan.h"
#include "src/worker/sparse_estimate.h"

/* ---- what is taken ---- */

/* Devices widen codes for attention by blocks. Through a ring, where states are gone on from, steps with few rows of a
 * request do not: the plain kernel would have these, hundreds of times slower than over all keys. */
static int widens_codes(const cpa_worker *worker) {
    return !worker->device->caps.bit_exact && cpa_dtype_is_quantised(worker->options.model.attention.kv_dtype);
}
static const char *device_refuses_codes(const cpa_worker_options *o) {
    const cpa_attention_shape *shape = &o->model.attention;
    return shape->k_dim > 192 || shape->v_dim > 128 ? "a quantised cache of wide heads on a device" : NULL;
}

static cpa_status check_worker(const cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const char *why = NULL;
    if (o->map.cp_size > 1 && o->map.interleave % CPA_SPARSE_BLOCK != 0)
        return cpa_fail(err, CPA_INVALID,
                        "sparse: the interleave is %d, expected a multiple of the %d tokens of a block of XAttention",
                        o->map.interleave, CPA_SPARSE_BLOCK);
    if (o->model.attention.v_in_k || worker->forms.count > 1) why = "latents";
    if (!why && widens_codes(worker)) why = device_refuses_codes(o);
    if (!cpa_xattn_reads(o->model.attention.kv_dtype)) why = "a cache of several scales a row";
    if (worker->network->select) why = "a model that selects keys itself";
    if (o->model.attention.k_dim > CPA_XATTN_MOST_DIM || o->model.attention.k_dim % 8 != 0)
        why = "heads that are no multiple of 8 columns up to 256";
    for (int32_t layer = 0; layer < o->model.layers && !why; layer++) {
        const cpa_score_rules *rules = cpa_model_rules(&o->model, layer);
        if (rules && (rules->softcap > 0 || rules->temperature_len > 0 || rules->alibi_slopes))
            why = "rules that change scores, which the estimate does not follow";
    }
    if (!why) return CPA_OK;
    return cpa_fail(err, CPA_UNSUPPORTED, "sparse: XAttention with %s, expected none", why);
}

int cpa_worker_sparse_takes(const cpa_worker *worker, const cpa_step_plan *plan) {
    const cpa_worker_rows *rows = worker->rows;
    int takes = 0;
    if (!worker->sparse || rows->sizes.masked_rows > 0 || (rows->replicated && cpa_sparse_ranks(worker) > 1)) return 0;
    for (int64_t i = 0; i < plan->n_chunks; i++) {
        if (widens_codes(worker) && worker->options.ring_bytes > 0 && plan->chunks[i].count < CPA_SPARSE_BLOCK)
            return 0;
        takes |= cpa_sparse_takes_chunk(worker, &plan->chunks[i]);
    }
    return takes;
}

static int takes_layer(const cpa_worker *worker, int32_t layer) {
    const cpa_mask mask = cpa_model_mask(&worker->options.model, layer);
    return mask.causal && mask.window == 0;
}

/* ---- a step ---- */

cpa_status cpa_worker_sparse_begin(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return CPA_OK;
    s->layers = 0;
    s->n_chunks = 0;
    if (!cpa_worker_sparse_takes(worker, plan)) return CPA_OK;
    CPA_TRY(cpa_sparse_list_chunks(worker, plan, err));
    CPA_TRY(cpa_sparse_make_room(worker, err));
    cpa_sparse_list_words(worker, plan);
    cpa_context_set_least_blocks(worker->context, CPA_SPARSE_BLOCK); /* of a chunk that takes part */
    s->blocks = (cpa_key_blocks){.bits = s->buffers[CPA_SPARSE_BITS].memory,
                                 .row_word = s->buffers[CPA_SPARSE_ROW_WORD].memory,
                                 .head_stride = s->head_words,
                                 .width = (int32_t)s->k_blocks,
                                 .block = CPA_SPARSE_BLOCK};
    const cpa_status status = worker->device->table->copy(s->buffers[CPA_SPARSE_ROW_WORD].memory, s->row_word,
                                                          s->rows * (int64_t)sizeof *s->row_word, worker->stream);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "sparse: %s", worker->stream->error.message);
}

int64_t cpa_worker_sparse_word(const cpa_worker *worker, int64_t row) {
    return worker->sparse->row_word[row];
}

static cpa_status copy_counts(cpa_worker *worker) {
    const cpa_worker_sparse *s = worker->sparse;
    const int64_t at = s->layers * s->layer_counts;
    return worker->device->table->copy(s->counts + at, (const int32_t *)s->buffers[CPA_SPARSE_COUNTS].memory + at,
                                       s->layer_counts * (int64_t)sizeof *s->counts, worker->stream);
}

cpa_status cpa_worker_sparse_select(cpa_worker *worker, int32_t layer, const cpa_kv_view *kv,
                                    const cpa_key_blocks **out, cpa_error *err) {
    cpa_worker_sparse *s = worker->sparse;
    *out = NULL;
    if (!s || s->n_chunks == 0 || !takes_layer(worker, layer)) return CPA_OK;
    cpa_spans *spans = cpa_context_spans(worker->context);
    const int64_t span = cpa_spans_begin(spans, CPA_SPAN_ESTIMATE, 0, worker->stream);
    cpa_status status = cpa_context_upload_tables(worker->context, worker->stream);
    for (int64_t i = 0; status == CPA_OK && i < s->n_chunks; i++)
        status = cpa_sparse_select_chunk(worker, &s->chunks[i], layer, kv);
    if (status == CPA_OK) status = copy_counts(worker);
    if (status != CPA_OK) return cpa_fail(err, status, "layer %d: sparse: %s", layer, worker->stream->error.message);
    cpa_spans_end(spans, span, worker->stream);
    s->layers++;
    *out = &s->blocks;
    return CPA_OK;
}

/* What the rows of each rank have kept in a layer. */
static void count_layer(cpa_worker *worker, const int32_t *counts) {
    cpa_worker_sparse *s = worker->sparse;
    const int32_t n = cpa_sparse_ranks(worker);
    int64_t busiest = 0;
    for (int32_t rank = 0; rank < n; rank++) {
        int64_t kept = 0;
        for (int64_t chunk = 0; chunk < s->n_chunks; chunk++) {
            const cpa_sparse_part *part = &s->parts[chunk * n + rank];
            for (int64_t i = 0; i < s->shape.q_heads * part->q_blocks; i++) kept += counts[part->count + i];
        }
        s->totals.kept += kept;
        busiest = cpa_max64(busiest, kept);
    }
    s->totals.busiest += busiest;
}

void cpa_worker_sparse_end(cpa_worker *worker) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return;
    for (int32_t layer = 0; layer < s->layers; layer++) count_layer(worker, s->counts + layer * s->layer_counts);
    s->totals.seen += s->layers * s->seen;
    s->layers = 0;
}

cpa_worker_sparse_stats cpa_worker_sparse_totals(const cpa_worker *worker) {
    cpa_worker_sparse_stats totals = {0};
    if (!worker->sparse) return totals;
    totals = worker->sparse->totals;
    for (int i = 0; i < CPA_SPARSE_BUFFERS; i++) totals.bytes += worker->sparse->buffers[i].bytes;
    return totals;
}

/* ---- for the life of a worker ---- */

cpa_status cpa_worker_sparse_create(cpa_worker *worker, cpa_error *err) {
    const cpa_worker_options *o = &worker->options;
    const cpa_attention_shape *shape = &o->model.attention;
    if (o->sparse_stride == 0) return CPA_OK;
    CPA_TRY(check_worker(worker, err));
    worker->sparse = calloc(1, sizeof *worker->sparse);
    if (!worker->sparse) return cpa_fail(err, CPA_NO_MEMORY, "sparse: no memory");
    worker->sparse->shape = (cpa_xattn_shape){.stride = o->sparse_stride,
                                              .block = CPA_SPARSE_BLOCK,
                                              .q_heads = shape->q_heads,
                                              .kv_heads = shape->kv_heads,
                                              .dim = shape->k_dim,
                                              .dtype = shape->dtype,
                                              .causal = 1};
    return CPA_OK;
}

void cpa_worker_sparse_destroy(cpa_worker *worker) {
    cpa_worker_sparse *s = worker->sparse;
    if (!s) return;
    for (int i = 0; i < CPA_SPARSE_BUFFERS; i++) worker->device->table->free(worker->device, s->buffers[i].memory);
    worker->device->table->free_host(worker->device, s->row_word);
    worker->device->table->free_host(worker->device, s->counts);
    free(s->chunks);
    free(s->parts);
    free(s);
    worker->sparse = NULL;
}
