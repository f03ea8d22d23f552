#include "src/check/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/selection.h>
#include <cpattn/xattn.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "kernels/device.h"
#include "src/check/verify_internal.h"
#include "src/worker/worker_forms.h"
#include "src/worker/worker_rows.h"
#include "src/worker/worker_sparse.h"

/* splitmix64: one stream of random numbers for each (seed, step, layer), the same on every rank. */
static uint64_t next_random(uint64_t *state) {
    return cpa_mix64(*state += CPA_GOLDEN);
}

/* The distance to the next sampled row: geometric, so that each row is sampled with probability `rate`. */
static int64_t next_gap(uint64_t *state, double rate) {
    if (rate >= 1) return 1;
    if (rate <= 0) return INT64_MAX / 2;
    double u = ((double)(next_random(state) >> 11) + 1) * 0x1p-53;
    double gap = 1 + floor(log(u) / log1p(-rate));
    return gap < 0x1p62 ? (int64_t)gap : INT64_MAX / 2;
}

cpa_status cpa_verify_reserve(cpa_verify *verify, cpa_verify_memory *memory, int64_t need, int64_t used,
                              cpa_error *err) {
    cpa_device *device = verify->worker->device;
    int64_t grown = 2 * memory->capacity > need ? 2 * memory->capacity : need;
    void *bytes = NULL;
    if (need <= memory->capacity) return CPA_OK;
    /* Copies to the memory that moves may still be on their way. */
    if (used > 0) CPA_TRY(device->table->stream_sync(verify->worker->stream));
    CPA_TRY(device->table->alloc_host(device, grown, &bytes, err));
    if (used > 0) memcpy(bytes, memory->bytes, (size_t)used);
    device->table->free_host(device, memory->bytes);
    *memory = (cpa_verify_memory){bytes, grown};
    return CPA_OK;
}

static cpa_status add_sample(cpa_verify *verify, cpa_verify_sample sample, cpa_error *err) {
    if (!cpa_array_reserve(&verify->samples, &verify->cap_samples, verify->n_samples + 1, sizeof *verify->samples))
        return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %lld samples", (long long)verify->n_samples + 1);
    int64_t used = verify->n_samples * verify->sample_bytes;
    CPA_TRY(cpa_verify_reserve(verify, &verify->data, used + verify->sample_bytes, used, err));
    sample.data = verify->n_samples;
    verify->samples[verify->n_samples++] = sample;
    return CPA_OK;
}

/* The layer whose turn it is to have a row checked in any case: one after the other, and every other time the last one,
 * whose rows the graph of a decode step leaves to be seen. */
static int32_t layer_in_turn(uint64_t turn, int32_t layers) {
    return turn % 2 ? layers - 1 : (int32_t)(turn / 2 % (uint64_t)layers);
}

/* Chooses the rows of one layer by walking the (token, head) rows of all chunks with random gaps. */
static cpa_status choose_samples(cpa_verify *verify, const cpa_step_plan *plan, int32_t layer, cpa_error *err) {
    int32_t heads = verify->worker->options.model.attention.q_heads, layers = verify->worker->options.model.layers;
    uint64_t random = verify->seed ^ (plan->step * 0x100000001b3u + (uint64_t)layer) * 0xd6e8feb86659fd93u;
    double rate = verify->budget.rate;
    int64_t total = 0, first = 0;
    for (int64_t c = 0; c < plan->n_chunks; c++) {
        total += plan->chunks[c].count * heads;
        cpa_verify_budget_attend(&verify->budget, plan->chunks[c].count, heads, plan->chunks[c].start + 1);
    }
    int64_t next = next_gap(&random, rate) - 1;
    const uint64_t step = verify->steps;
    int forced = step % VERIFY_FORCED_STEPS == 0 && layer_in_turn(step / VERIFY_FORCED_STEPS, layers) == layer;
    int due = verify->budget.due && layer_in_turn(step, layers) == layer;
    if ((forced || due) && next >= total) next = (int64_t)(next_random(&random) % (uint64_t)total);
    for (int64_t c = 0; c < plan->n_chunks; c++) {
        const cpa_plan_chunk *chunk = &plan->chunks[c];
        for (; next < first + chunk->count * heads; next += next_gap(&random, rate)) {
            cpa_verify_sample sample = {.chunk = c,
                                        .position = chunk->start + (next - first) / heads,
                                        .layer = layer,
                                        .head = (int32_t)((next - first) % heads),
                                        .form = cpa_worker_form_of(verify->worker, chunk)};
            if (!cpa_verify_budget_spend(&verify->budget, sample.position + 1, due || (step == 0 && forced))) continue;
            CPA_TRY(add_sample(verify, sample, err));
        }
        first += chunk->count * heads;
    }
    return CPA_OK;
}

int32_t cpa_verify_keeper(const cpa_verify *verify, const cpa_step_plan *plan, const cpa_verify_sample *sample) {
    const cpa_worker_options *o = &verify->worker->options;
    const int32_t ranks = o->map.cp_size;
    int32_t keeper = 0;
    if (!verify->replicated) return cpa_owner_rank(o->map, plan->chunks[sample->chunk].placement, sample->position);
    while (cpa_slice_begin(o->model.attention.q_heads, ranks, keeper + 1) <= sample->head) keeper++;
    return keeper;
}

/* Keeps the query and the result of one sample, of a row of its form. */
static cpa_status keep_sample(cpa_verify *verify, int64_t index, int64_t row, const void *q, const void *out,
                              cpa_stream *stream) {
    const cpa_form *form = cpa_verify_form(verify, &verify->samples[index]);
    const cpa_step_form *at = &verify->worker->rows->forms[form->index];
    const cpa_attention_shape *shape = &form->shape;
    const cpa_device_table *table = verify->worker->device->table;
    const int32_t ranks = verify->replicated ? verify->control->size : 1;
    const int32_t rank = verify->replicated ? verify->control->rank : 0;
    /* Results are those of the heads from `first` on. */
    const int64_t first = cpa_slice_begin(shape->q_heads, ranks, rank);
    const int64_t heads = cpa_slice_begin(shape->q_heads, ranks, rank + 1) - first;
    const int64_t element = cpa_dtype_bytes(shape->dtype), sampled = verify->samples[index].head;
    const int64_t head = row * shape->q_heads + sampled, result = row * heads + sampled - first;
    char *data = verify->data.bytes + index * verify->sample_bytes;
    const int64_t q_bytes = shape->k_dim * element, out_bytes = form->out_dim * element;
    CPA_TRY(table->copy(data, (const char *)q + at->q_bytes + head * q_bytes, q_bytes, stream));
    return table->copy(data + verify->result_at, (const char *)out + at->out_bytes + result * out_bytes, out_bytes,
                       stream);
}

/* Keeps what an indexer chose by, of a row of this rank. */
static cpa_status keep_choice(cpa_verify *verify, char *to, int64_t row, cpa_stream *stream) {
    const cpa_context_select_args *by = verify->worker->chosen_by;
    const cpa_index_form *index = verify->worker->options.model.index;
    const cpa_device_table *table = verify->worker->device->table;
    const int64_t q_bytes = index->heads * index->dim * cpa_dtype_bytes(index->dtype);
    CPA_TRY(table->copy(to, (const char *)by->q + row * q_bytes, q_bytes, stream));
    if (!index->has_weights) return CPA_OK;
    return table->copy(to + q_bytes, by->weights + row * index->heads, verify->index_bytes - q_bytes, stream);
}

/* Keeps the bits of the blocks of a sample. */
static cpa_status keep_blocks(cpa_verify *verify, int64_t index, int64_t row, cpa_stream *stream) {
    const cpa_key_blocks *blocks = verify->worker->selection->blocks;
    const int64_t word = cpa_worker_sparse_word(verify->worker, row);
    char *data = verify->data.bytes + index * verify->sample_bytes + verify->list_at;
    const cpa_verify_list list = {
        .unit = blocks->block, .count = word < 0 ? -1 : blocks->width, .width = blocks->width, .is_bits = 1};
    memcpy(data, &list, sizeof list);
    if (word < 0) return CPA_OK;
    return verify->worker->device->table->copy(data + sizeof list,
                                               blocks->bits + word + verify->samples[index].head * blocks->head_stride,
                                               cpa_mask_words(blocks->width) * (int64_t)sizeof *blocks->bits, stream);
}

/* Keeps the list of a sample, whose row is one of those of the whole step. */
static cpa_status keep_list(cpa_verify *verify, int64_t index, int64_t row, cpa_stream *stream, cpa_error *err) {
    const cpa_attention_shape *shape = &verify->worker->options.model.attention;
    const cpa_device_table *table = verify->worker->device->table;
    const cpa_key_selection *selection = verify->worker->selection;
    const cpa_key_indices *lists = selection ? selection->indices : NULL;
    char *data = verify->data.bytes + index * verify->sample_bytes + verify->list_at;
    const cpa_verify_list list = {.unit = lists && lists->unit > 0 ? lists->unit : 1,
                                  .count = lists ? lists->width : -1,
                                  .width = lists ? lists->width : 0,
                                  .is_chosen = verify->worker->chosen_by != NULL};
    if (selection && selection->blocks && verify->worker->sparse) return keep_blocks(verify, index, row, stream);
    if (selection && selection->blocks)
        return cpa_fail(err, CPA_UNSUPPORTED, "layer %d: the model selects keys by blocks, whose rows are not checked",
                        verify->samples[index].layer);
    memcpy(data, &list, sizeof list);
    if (!lists) return CPA_OK;
    const int64_t kv_head = verify->samples[index].head / (shape->q_heads / shape->kv_heads);
    const int32_t *entries = lists->indices + row * lists->row_stride + kv_head * lists->head_stride;
    CPA_TRY(table->copy(data + sizeof list, entries, lists->width * (int64_t)sizeof *entries, stream));
    if (!lists->counts) return CPA_OK;
    return table->copy(data + offsetof(cpa_verify_list, count), lists->counts + row, sizeof list.count, stream);
}

static cpa_status begin(void *ctx, const cpa_step_plan *plan, int32_t *first, cpa_error *err) {
    cpa_verify *verify = ctx;
    const int32_t layers = verify->worker->options.model.layers;
    if (verify->start_s == 0) verify->start_s = cpa_clock_now();
    verify->n_samples = verify->next = 0;
    verify->replicated = cpa_worker_replicates(verify->worker, plan);
    for (int32_t layer = 0; layer < layers; layer++) {
        CPA_TRY(choose_samples(verify, plan, layer, err));
    }
    verify->budget.due = 0;
    verify->steps++;
    *first = verify->n_samples > 0 ? verify->samples[0].layer : layers;
    return CPA_OK;
}

/* The rows of a chunk on this rank. */
static int64_t rows_of(const cpa_verify *verify, const cpa_plan_chunk *chunk) {
    cpa_owner_map map = verify->worker->options.map;
    const cpa_token_set tokens =
        cpa_worker_listed(verify->worker, verify->replicated, chunk->placement, verify->worker->rank);
    return cpa_tokens_before(map, tokens, chunk->start + chunk->count) - cpa_tokens_before(map, tokens, chunk->start);
}

static cpa_status layer_done(void *ctx, const cpa_step_plan *plan, int32_t layer, const void *q, const void *out,
                             cpa_stream *stream, cpa_error *err) {
    cpa_verify *verify = ctx;
    int64_t chunk = -1, first_row[CPA_MOST_ROW_FORMS] = {0}, first_of_step = 0;
    cpa_owner_map map = verify->worker->options.map;
    for (; verify->next < verify->n_samples && verify->samples[verify->next].layer == layer; verify->next++) {
        const cpa_verify_sample *sample = &verify->samples[verify->next];
        /* Rows of a form lie chunk after chunk; the samples are in the order of the chunks. */
        for (; chunk < sample->chunk; chunk++) {
            if (chunk < 0) continue;
            const int32_t form = cpa_worker_form_of(verify->worker, &plan->chunks[chunk]);
            first_row[form] += rows_of(verify, &plan->chunks[chunk]);
            first_of_step += plan->chunks[chunk].count;
        }
        const cpa_plan_chunk *in = &plan->chunks[chunk];
        if (cpa_verify_keeper(verify, plan, sample) != verify->worker->rank) continue;
        const cpa_token_set tokens =
            cpa_worker_listed(verify->worker, verify->replicated, in->placement, verify->worker->rank);
        const int64_t row = first_row[sample->form] + cpa_tokens_before(map, tokens, sample->position) -
                            cpa_tokens_before(map, tokens, in->start);
        CPA_TRY(keep_sample(verify, verify->next, row, q, out, stream));
        if (verify->list_bytes > 0)
            CPA_TRY(keep_list(verify, verify->next, first_of_step + sample->position - in->start, stream, err));
        if (verify->index_bytes > 0 && verify->worker->chosen_by)
            CPA_TRY(keep_choice(
                verify, verify->data.bytes + verify->next * verify->sample_bytes + verify->list_at + verify->list_bytes,
                verify->worker->rows->forms[sample->form].first + row, stream));
    }
    return CPA_OK;
}

/* The rules of a sample's layer, for its head. */
static cpa_reference_rules rules_of(const cpa_verify *verify, const cpa_verify_sample *sample) {
    const cpa_score_rules *rules = cpa_model_rules(&verify->worker->options.model, sample->layer);
    cpa_reference_rules result = {.index = sample->position};
    if (!rules) return result;
    result.softcap = (double)rules->softcap;
    result.temperature_len = (double)rules->temperature_len;
    if (rules->alibi_slopes) result.slope = (double)rules->alibi_slopes[sample->head];
    result.has_sink = rules->sink_logits != NULL;
    if (result.has_sink) result.sink = (double)rules->sink_logits[sample->head];
    return result;
}

void cpa_verify_begin_row(const cpa_verify *verify, const cpa_verify_sample *sample, cpa_reference_row *row,
                          const char *data) {
    const cpa_form *form = cpa_verify_form(verify, sample);
    const cpa_attention_shape *shape = &form->shape;
    const float scale = cpa_model_form_scale(&verify->worker->options.model, sample->form, sample->layer);
    float q[CPA_MAX_HEAD_DIM];
    cpa_reference_widen(data, shape->dtype, shape->k_dim, q);
    const cpa_reference_rules rules = rules_of(verify, sample);
    cpa_reference_begin(row, q, shape->k_dim, shape->v_dim, shape->dtype, (double)scale);
    cpa_reference_set_rules(row, &rules);
    cpa_reference_set_skip(row, (double)verify->worker->options.skip_tiles);
    cpa_reference_widen(data + verify->result_at, shape->dtype, form->out_dim, row->got);
}

/* The scales of heads come from the device, once. */
static cpa_status read_scales(cpa_verify *verify, cpa_error *err) {
    const cpa_attention_shape *shape = &verify->worker->options.model.attention;
    const cpa_device_table *table = verify->worker->device->table;
    const int32_t heads = shape->kv_heads, n = shape->n_scales;
    cpa_stream *stream = verify->worker->stream;
    verify->scales = malloc(2 * (size_t)heads * sizeof *verify->scales);
    if (!verify->scales) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for %d heads", heads);
    for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
        float *to = verify->scales + part * heads;
        cpa_status status = CPA_OK;
        to[0] = part == CPA_KEYS ? shape->k_scale : shape->v_scale;
        if (n > 0) {
            status =
                table->copy(to, part == CPA_KEYS ? shape->k_scales : shape->v_scales, n * (int64_t)sizeof *to, stream);
            if (status == CPA_OK) status = table->stream_sync(stream);
        }
        if (status != CPA_OK) return cpa_fail(err, status, "verify: %s", stream->error.message);
        for (int32_t head = n > 1 ? n : 1; head < heads; head++) to[head] = to[0];
    }
    return CPA_OK;
}

/* How large what is kept of a sample is: with the widest query and the widest result of all forms. */
static void size_samples(cpa_verify *verify) {
    const cpa_worker *worker = verify->worker;
    int32_t k_dim = 0, out_dim = 0;
    for (int32_t f = 0; f < worker->forms.count; f++) {
        const cpa_form *form = &worker->forms.list[f];
        if (form->shape.k_dim > k_dim) k_dim = form->shape.k_dim;
        if (form->out_dim > out_dim) out_dim = form->out_dim;
    }
    if (worker->network->select)
        verify->list_bytes =
            (int64_t)sizeof(cpa_verify_list) + worker->network->select_width * (int64_t)sizeof(int32_t);
    if (worker->sparse)
        verify->list_bytes = (int64_t)sizeof(cpa_verify_list) + cpa_mask_words(CPA_XATTN_MOST_BLOCKS) * 4;
    const cpa_index_form *index = worker->options.model.index;
    if (index && verify->list_bytes > 0)
        verify->index_bytes = index->heads * (index->dim * cpa_dtype_bytes(index->dtype) +
                                              (index->has_weights ? (int64_t)sizeof(float) : 0));
    const int64_t element = cpa_dtype_bytes(worker->options.model.attention.dtype);
    verify->result_at = k_dim * element;
    verify->list_at = verify->result_at + out_dim * element;
    verify->sample_bytes = verify->list_at + verify->list_bytes + verify->index_bytes;
}

cpa_status cpa_verify_create(cpa_control *control, cpa_worker *worker, double rate, uint64_t seed,
                             const cpa_device_options *device, cpa_verify **out, cpa_error *err) {
    cpa_verify *verify = calloc(1, sizeof *verify);
    if (!verify) return cpa_fail(err, CPA_NO_MEMORY, "verify: no memory");
    verify->control = control;
    verify->worker = worker;
    verify->seed = seed;
    size_samples(verify);
    verify->n_threads = device && device->threads > 1 ? device->threads : 1;
    cpa_verify_budget_begin(&verify->budget, rate);
    /* The calling thread is bound to the first of the host's CPUs already. */
    int on_host = device && device->backend == CPA_BACKEND_HOST;
    cpa_status status = cpa_threads_create(verify->n_threads, on_host ? device->cpus : NULL,
                                           on_host ? device->n_cpus : 0, &verify->threads, err);
    if (status == CPA_OK) status = read_scales(verify, err);
    if (status != CPA_OK) {
        cpa_verify_destroy(verify);
        return status;
    }
    *out = verify;
    return CPA_OK;
}

cpa_status cpa_verify_keep_violations(cpa_verify *verify, const char *folder, cpa_error *err) {
    verify->dump_folder = strdup(folder ? folder : "");
    return verify->dump_folder ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for a path");
}

void cpa_verify_destroy(cpa_verify *verify) {
    if (!verify) return;
    cpa_device *device = verify->worker->device;
    device->table->free_host(device, verify->recv.bytes);
    device->table->free_host(device, verify->send.bytes);
    device->table->free_host(device, verify->data.bytes);
    cpa_threads_destroy(verify->threads);
    cpa_verify_matrix_free(&verify->matrix);
    free(verify->dump_folder);
    free(verify->scales);
    free(verify->samples);
    free(verify);
}

cpa_worker_observer cpa_verify_observer(cpa_verify *verify) {
    return (cpa_worker_observer){verify, begin, layer_done};
}

void cpa_verify_get_stats(const cpa_verify *verify, cpa_verify_stats *out) {
    *out = verify->stats;
}
