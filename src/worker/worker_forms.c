#include "src/worker/worker_forms.h"

#include "base/check.h"
#include "base/min_max.h"
#include "src/context/latent_work.h"

/* The tensors of a form, and the results of a layer, begin at multiples of this where there are several forms. */
enum { ALIGNMENT = 256 };

void cpa_worker_give_forms(const cpa_model_shape *model, cpa_row_form widths[CPA_MOST_ROW_FORMS],
                           cpa_context_options *options) {
    if (model->n_forms == 0) return;
    for (int32_t f = 0; f < model->n_forms; f++) widths[f] = model->forms[f].widths;
    options->forms = widths;
    options->n_forms = model->n_forms;
}

int cpa_worker_forms_may_change(const cpa_worker_options *options, const cpa_forms *forms) {
    const cpa_model_shape *model = &options->model;
    const cpa_attention_shape *decode = &forms->list[model->decode_form].shape;
    if (!options->absorb_prompts || !forms->list[model->prefill_form].is_expanded) return 0;
    if (decode->k_dim != model->attention.k_dim || decode->v_dim != model->attention.v_dim) return 0;
    for (int32_t layer = 0; layer < model->layers; layer++)
        if (!cpa_mask_equals(cpa_model_form_mask(model, model->prefill_form, layer),
                             cpa_model_form_mask(model, model->decode_form, layer)))
            return 0;
    return 1;
}

/* pass-KV brings all keys to the rows of each rank, pass-Q all rows to the keys. A row with a list reads its own
 * keys, which are latents of all heads or keys and values of each: of V3 1,152 bytes or 81,920. */
int32_t cpa_worker_form_of(const cpa_worker *worker, const cpa_plan_chunk *chunk) {
    const cpa_model_shape *model = &worker->options.model;
    if (chunk->flags & CPA_CHUNK_DECODE) return model->decode_form;
    if (!worker->forms_may_change) return model->prefill_form;
    if (model->index) return model->decode_form;
    const int32_t ranks = chunk->placement.kind == CPA_ON_RANK ? 1 : worker->options.map.cp_size;
    const int moves_keys = chunk->algorithm != CPA_PASS_Q;
    const cpa_latent_load load =
        cpa_latent_load_of(chunk->count, chunk->start, moves_keys ? ranks : 1, moves_keys ? 1 : ranks);
    return cpa_latents_are_absorbed(&model->attention, &worker->forms.list[model->prefill_form].shape, load)
               ? model->decode_form
               : model->prefill_form;
}

static int64_t q_bytes(const cpa_form *form, int64_t rows) {
    return rows * cpa_shape_q_bytes(&form->shape);
}

static int64_t out_bytes(const cpa_form *form, int64_t rows) {
    return rows * form->shape.q_heads * form->out_dim * cpa_dtype_bytes(form->shape.dtype);
}

static int64_t aligned(const cpa_worker *worker, int64_t bytes) {
    return worker->forms.count == 1 ? bytes : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int64_t most_bytes(const cpa_worker *worker, int64_t rows, int64_t (*bytes)(const cpa_form *, int64_t)) {
    int64_t most = 0;
    for (int32_t f = 0; f < worker->forms.count; f++) most = cpa_max64(most, bytes(&worker->forms.list[f], rows));
    return worker->forms.count == 1 ? most : most + worker->forms.count * ALIGNMENT;
}

int64_t cpa_worker_most_q_bytes(const cpa_worker *worker, int64_t rows) {
    return most_bytes(worker, rows, q_bytes);
}

int64_t cpa_worker_most_out_bytes(const cpa_worker *worker, int64_t rows) {
    return most_bytes(worker, rows, out_bytes);
}

void cpa_worker_place_forms(cpa_worker *worker) {
    int64_t first = 0, q = 0, out = 0;
    for (int32_t f = 0; f < worker->forms.count; f++) {
        const cpa_form *form = &worker->forms.list[f];
        cpa_step_form *at = &worker->rows->forms[f];
        *at = (cpa_step_form){.first = first, .rows = at->rows, .q_bytes = q, .out_bytes = out};
        first += at->rows;
        q = aligned(worker, q + q_bytes(form, at->rows));
        out = aligned(worker, out + out_bytes(form, at->rows));
    }
    worker->rows->layer_bytes = out;
}

void cpa_worker_list_forms(const cpa_worker *worker) {
    const cpa_worker_rows *rows = worker->rows;
    int32_t *to = rows->host.form_rows;
    for (int64_t f = 0; f < rows->sizes.forms; f++) {
        const cpa_step_form *form = &rows->forms[f];
        for (int64_t at = 0; at < rows->sizes.emissions; at++) {
            const int64_t row = rows->host.rows[at] - form->first;
            *to++ = row >= 0 && row < form->rows ? (int32_t)row : -1;
        }
    }
}

void cpa_worker_form_rows(const cpa_worker *worker, int32_t layer, void *out, cpa_form_rows rows[CPA_MOST_ROW_FORMS]) {
    const cpa_model_shape *model = &worker->options.model;
    for (int32_t f = 0; f < worker->forms.count; f++) {
        const cpa_step_form *at = &worker->rows->forms[f];
        rows[f] = (cpa_form_rows){.q = (char *)worker->q + at->q_bytes,
                                  .out = (char *)out + at->out_bytes,
                                  .mask = cpa_model_form_mask(model, f, layer),
                                  .scale = cpa_model_form_scale(model, f, layer),
                                  .matrix = cpa_model_form_matrix(model, f, layer),
                                  .expansion = cpa_model_form_expansion(model, f, layer)};
    }
}
