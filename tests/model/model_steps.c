#include "tests/model/model_steps.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "comm/limits.h"
#include "kernels/kv_view.h"
#include "src/context/context.h"
#include "src/context/row_exchange.h"
#include "src/context/tensor_slices.h"
#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"

enum { MAX_ROWS = 512 };

static void need(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "%s: %s\n", cpa_status_name(status), message);
    abort();
}

/* Keeps the logits of this rank's emissions. */
static cpa_status keep_logits(void *ctx, const cpa_model_step *step, int64_t first, int64_t count, const float *logits,
                              cpa_stream *stream) {
    cpa_test_model *m = ctx;
    if (m->also_observe) need(m->also_observe(m->also_ctx, step, first, count, logits, stream), "observer");
    const int64_t vocabulary = m->config.vocabulary;
    cpa_test_download(stream, m->seen + first * vocabulary, logits, count * vocabulary * (int64_t)sizeof *logits);
    return CPA_OK;
}

/* Keys of a layer's indexer, in memory of their own. */
static void open_index_cache(cpa_test_model *m, int32_t layer, int64_t blocks) {
    const cpa_attention_shape shape = {.q_heads = 1,
                                       .kv_heads = 1,
                                       .k_dim = m->shape.index->dim,
                                       .v_dim = m->shape.index->dim,
                                       .v_in_k = 1,
                                       .kv_dtype = m->shape.index->dtype};
    cpa_error err;
    m->index_views[layer] = cpa_kv_view_of(&shape, CPA_TEST_BLOCK, blocks);
    need(cpa_device_alloc(m->device, blocks * cpa_shape_block_bytes(&shape, CPA_KEYS, CPA_TEST_BLOCK),
                          &m->index_views[layer].k, &err),
         err.message);
}

static void open_cache(cpa_test_model *m) {
    const int64_t blocks = CPA_TEST_SEQUENCES * CPA_TEST_SEQUENCE_BLOCKS;
    m->views = calloc((size_t)m->shape.layers, sizeof *m->views);
    m->index_views = calloc((size_t)m->shape.layers, sizeof *m->index_views);
    for (int32_t layer = 0; layer < m->shape.layers; layer++) {
        cpa_kv_view view = cpa_kv_view_of(&m->shape.attention, CPA_TEST_BLOCK, blocks);
        cpa_error err;
        if (m->shape.index) open_index_cache(m, layer, blocks);
        const int64_t bytes = blocks * cpa_shape_block_bytes(&m->shape.attention, CPA_KEYS, CPA_TEST_BLOCK);
        need(cpa_device_alloc(m->device, bytes, &view.k, &err), err.message);
        if (!view.v_in_k) need(cpa_device_alloc(m->device, bytes, &view.v, &err), err.message);
        m->views[layer] = view;
    }
}

/* Bytes of the queries, and of the results, of MAX_ROWS rows of any form. */
static int64_t most_bytes(const cpa_test_model *m, int queries) {
    const cpa_attention_shape *shape = &m->shape.attention;
    int64_t width = queries ? shape->k_dim : shape->v_dim;
    for (int32_t f = 0; f < m->shape.n_forms; f++) {
        const cpa_row_form *form = &m->shape.forms[f].widths;
        width = cpa_max64(width, queries ? form->k_dim : cpa_max64(form->v_dim, form->out_dim));
    }
    return MAX_ROWS * width * shape->q_heads * cpa_dtype_bytes(shape->dtype);
}

static void open_context(cpa_test_model *m) {
    cpa_error err;
    cpa_row_form forms[CPA_MOST_ROW_FORMS];
    for (int32_t f = 0; f < m->shape.n_forms; f++) forms[f] = m->shape.forms[f].widths;
    const cpa_context_options options = {.size = sizeof options,
                                         .shape = m->shape.attention,
                                         .block_size = CPA_TEST_BLOCK,
                                         .interleave = m->map.interleave,
                                         .max_rows = MAX_ROWS,
                                         .forms = m->shape.n_forms > 0 ? forms : NULL,
                                         .n_forms = m->shape.n_forms,
                                         .index = m->shape.index ? *m->shape.index : (cpa_index_form){.heads = 0}};
    need(cpa_context_create(cpa_test_comm(), m->device, &options, &m->context, &err), err.message);
}

static void open_model(cpa_test_model *m, const char *folder, cpa_dtype dtype, int sliced,
                       cpa_experts_over_ranks experts) {
    cpa_error err;
    cpa_safetensors *files = NULL;
    memset(m, 0, sizeof *m);
    m->rank = cpa_comm_rank(cpa_test_comm());
    m->map = (cpa_owner_map){cpa_comm_size(cpa_test_comm()), CPA_TEST_BLOCK};
    cpa_test_device_open(1, &m->device, &m->stream);
    need(cpa_model_config_load(folder, &m->config, &err), err.message);
    m->config.index.dtype = cpa_index_dtype_beside(dtype, dtype);
    need(cpa_safetensors_open(folder, &files, &err), err.message);
    const cpa_transformer_options options = {.dtype = dtype,
                                             .max_rows = MAX_ROWS,
                                             .max_sequences = CPA_TEST_SEQUENCES,
                                             .logit_rows = 2, /* two tiles of logits */
                                             .slices = sliced ? CPA_SLICES_DECODE : CPA_SLICES_NONE,
                                             .rank = m->rank,
                                             .ranks = m->map.cp_size,
                                             .experts = experts,
                                             .expert_rows = experts == CPA_EXPERTS_REPLICATED ? 100 : 48};
    need(cpa_transformer_create(m->device, &m->config, files, &options, &m->transformer, &err), err.message);
    cpa_safetensors_close(files);
    m->seen = calloc(CPA_TEST_SEQUENCES * CPA_TEST_MAX_VOCABULARY, sizeof *m->seen);
    cpa_transformer_set_observer(m->transformer, keep_logits, m);
    m->model = cpa_transformer_model(m->transformer);
    m->shape = cpa_model_config_shape(&m->config, dtype, m->masks);
    cpa_transformer_give_forms(m->transformer, &m->shape);
    open_cache(m);
    open_context(m);
    m->slices = cpa_context_slices(m->context);
    m->row_exchange = cpa_context_row_exchange(m->context);
    need(cpa_device_alloc(m->device, most_bytes(m, 1), &m->q, &err), err.message);
    need(cpa_device_alloc(m->device, most_bytes(m, 0), &m->out, &err), err.message);
}

void cpa_test_model_open(cpa_test_model *m, const char *name, cpa_dtype dtype) {
    open_model(m, cpa_test_model_folder(name), dtype, 0, CPA_EXPERTS_REPLICATED);
}

void cpa_test_model_open_folder(cpa_test_model *m, const char *folder, cpa_dtype dtype) {
    open_model(m, folder, dtype, 0, CPA_EXPERTS_REPLICATED);
}

void cpa_test_model_open_sliced(cpa_test_model *m, const char *name, cpa_dtype dtype) {
    open_model(m, cpa_test_model_folder(name), dtype, 1, CPA_EXPERTS_REPLICATED);
}

void cpa_test_model_open_spread(cpa_test_model *m, const char *name, cpa_dtype dtype, cpa_experts_over_ranks experts) {
    open_model(m, cpa_test_model_folder(name), dtype, 0, experts);
}

void cpa_test_model_close(cpa_test_model *m) {
    cpa_context_destroy(m->context);
    cpa_transformer_destroy(m->transformer);
    for (int32_t layer = 0; layer < m->shape.layers; layer++) {
        cpa_device_free(m->device, m->views[layer].k);
        cpa_device_free(m->device, m->views[layer].v);
        cpa_device_free(m->device, m->index_views[layer].k);
    }
    free(m->views);
    free(m->index_views);
    free(m->seen);
    cpa_device_free(m->device, m->q);
    cpa_device_free(m->device, m->out);
    cpa_test_device_close(m->device, m->stream);
}

int cpa_test_model_add(cpa_test_model *m, const uint32_t *prompt, int64_t tokens, cpa_placement placement) {
    cpa_test_answer *answer = &m->answers[m->n_answers];
    if (m->n_answers == CPA_TEST_SEQUENCES || tokens + CPA_TEST_OUTPUTS > CPA_TEST_MAX_TOKENS) abort();
    memset(answer, 0, sizeof *answer);
    memcpy(answer->tokens, prompt, (size_t)tokens * sizeof *prompt);
    answer->known = answer->prompt = tokens;
    answer->placement = placement;
    return m->n_answers++;
}

void cpa_test_model_clear(cpa_test_model *m) {
    m->n_answers = 0;
}

/* The rows of a step on this rank, and its emissions. */
typedef struct step_rows {
    int64_t count, emissions;
    int sliced;                           /* they are those of all ranks */
    int64_t of_ranks[CPA_COMM_MAX_RANKS]; /* rows of each rank */
    int64_t of_forms[CPA_MOST_ROW_FORMS]; /* rows of each form, which follow each other */
    uint64_t requests[MAX_ROWS];
    uint32_t tokens[MAX_ROWS];
    int64_t positions[MAX_ROWS], slots[MAX_ROWS];
    int emitting[CPA_TEST_SEQUENCES]; /* answers */
    int32_t rows[CPA_TEST_SEQUENCES], seqs[CPA_TEST_SEQUENCES];
    float temperatures[CPA_TEST_SEQUENCES];
    uint64_t seeds[CPA_TEST_SEQUENCES];
    int64_t drawn_positions[CPA_TEST_SEQUENCES], given[CPA_TEST_SEQUENCES];
} step_rows;

static void add_emission(const cpa_test_answer *answer, int index, step_rows *rows) {
    const int64_t e = rows->emissions++;
    rows->emitting[e] = rows->seqs[e] = index;
    rows->rows[e] = (int32_t)rows->count - 1;
    rows->temperatures[e] = answer->temperature;
    rows->seeds[e] = answer->seed;
    rows->drawn_positions[e] = answer->known;
    rows->given[e] = answer->given ? (int64_t)answer->given[answer->known - answer->prompt] : -1;
}

/* The form of a part's rows; 0 without forms. */
static int32_t form_of(const cpa_test_model *m, const cpa_test_part *part) {
    return part->count == 1 ? m->shape.decode_form : m->shape.prefill_form;
}

static void add_part(const cpa_test_model *m, const cpa_test_part *part, step_rows *rows) {
    const cpa_test_answer *answer = &m->answers[part->answer];
    const cpa_token_set own = cpa_tokens_on(m->map, answer->placement, m->rank);
    const int64_t start = answer->computed, end = start + part->count;
    const cpa_token_set listed = rows->sliced ? (cpa_token_set){CPA_TOKENS_ALL, 0} : own;
    for (int32_t r = 0; r < m->map.cp_size; r++) {
        const cpa_token_set of_rank = cpa_tokens_on(m->map, answer->placement, r);
        rows->of_ranks[r] += cpa_tokens_before(m->map, of_rank, end) - cpa_tokens_before(m->map, of_rank, start);
    }
    for (int64_t i = cpa_tokens_before(m->map, listed, start); i < cpa_tokens_before(m->map, listed, end); i++) {
        rows->of_forms[form_of(m, part)]++;
        const int64_t row = rows->count++, position = cpa_token_position(m->map, listed, i);
        const int64_t at = cpa_tokens_before(m->map, own, position);
        const int is_own = cpa_owner_rank(m->map, answer->placement, position) == m->rank;
        rows->requests[row] = (uint64_t)part->answer;
        rows->tokens[row] = answer->tokens[position];
        rows->positions[row] = position;
        rows->slots[row] = is_own ? (int64_t)part->answer * CPA_TEST_SEQUENCE_BLOCKS * CPA_TEST_BLOCK + at : -1;
        if (position + 1 == answer->known) add_emission(answer, part->answer, rows);
    }
}

static int is_sliced(const cpa_test_model *m, const cpa_test_part *parts, int n) {
    for (int i = 0; i < n; i++)
        if (parts[i].count != 1) return 0;
    return m->model.slices && m->map.cp_size > 1;
}

static void plan(cpa_test_model *m, const cpa_test_part *parts, int n) {
    cpa_context_chunk chunks[CPA_TEST_SEQUENCES] = {{0}};
    int32_t tables[CPA_TEST_SEQUENCES][CPA_TEST_SEQUENCE_BLOCKS];
    for (int i = 0; i < n; i++) {
        const cpa_test_answer *answer = &m->answers[parts[i].answer];
        for (int block = 0; block < CPA_TEST_SEQUENCE_BLOCKS; block++)
            tables[i][block] = parts[i].answer * CPA_TEST_SEQUENCE_BLOCKS + block;
        chunks[i].start = answer->computed;
        chunks[i].count = parts[i].count;
        chunks[i].placement = answer->placement;
        chunks[i].algorithm = parts[i].algorithm;
        chunks[i].block_table = tables[i];
        chunks[i].form = form_of(m, &parts[i]);
    }
    cpa_context_set_rows(m->context, is_sliced(m, parts, n) ? CPA_ROWS_REPLICATED : CPA_ROWS_OWNED);
    need(cpa_context_plan(m->context, chunks, n), cpa_context_error(m->context));
}

static cpa_form_rows rows_of_form(const cpa_test_model *m, int32_t layer, int32_t form, const cpa_step_form *at) {
    return (cpa_form_rows){.q = (char *)m->q + at->q_bytes,
                           .out = (char *)m->out + at->out_bytes,
                           .mask = cpa_model_form_mask(&m->shape, form, layer),
                           .scale = cpa_model_form_scale(&m->shape, form, layer),
                           .matrix = cpa_model_form_matrix(&m->shape, form, layer),
                           .expansion = cpa_model_form_expansion(&m->shape, form, layer)};
}

/* Where the rows of each form lie, one form behind the other. */
static void place_forms(const cpa_test_model *m, const step_rows *rows, cpa_step_form *out) {
    const cpa_attention_shape *shape = &m->shape.attention;
    const int64_t bytes = shape->q_heads * cpa_dtype_bytes(shape->dtype);
    int64_t first = 0, q = 0, to = 0;
    for (int32_t f = 0; f < m->shape.n_forms; f++) {
        const cpa_row_form *form = &m->shape.forms[f].widths;
        const int64_t n = rows->of_forms[f], out_dim = form->out_dim ? form->out_dim : form->v_dim;
        out[f] = (cpa_step_form){first, n, q, to};
        first += n;
        q += n * bytes * (form->k_dim ? form->k_dim : shape->k_dim);
        to += n * bytes * out_dim;
    }
}

static cpa_status choose_keys(void *ctx, const cpa_context_select_args *args, cpa_key_indices *out,
                              cpa_stream *stream) {
    return cpa_context_select(ctx, args, out, stream);
}

static void run_layers(cpa_test_model *m, const cpa_model_step *step) {
    const cpa_model *model = &m->model;
    need(model->begin_step(model->ctx, step, m->stream), cpa_stream_error(m->stream));
    for (int32_t layer = 0; layer < m->shape.layers; layer++) {
        const cpa_layer_args in = {.size = sizeof in, .q = m->q, .kv = m->views[layer], .index = m->index_views[layer]};
        cpa_key_selection selection = {.bits = NULL};
        cpa_form_rows rows[CPA_MOST_ROW_FORMS];
        for (int32_t f = 0; f < m->shape.n_forms; f++) rows[f] = rows_of_form(m, layer, f, &step->forms[f]);
        const cpa_context_args args = {.size = sizeof args,
                                       .q = m->q,
                                       .kv = m->views[layer],
                                       .mask = cpa_model_mask(&m->shape, layer),
                                       .out = m->out,
                                       .selection = model->select ? &selection : NULL,
                                       .rows = m->shape.n_forms > 0 ? rows : NULL};
        need(model->layer_in(model->ctx, layer, step, &in, m->stream), cpa_stream_error(m->stream));
        if (model->select) {
            const cpa_key_chooser chooser = {sizeof chooser, m->context, choose_keys};
            const cpa_select_args select = {.size = sizeof select, .index = m->index_views[layer], .chooser = &chooser};
            need(model->select(model->ctx, layer, step, &select, &selection, m->stream), cpa_stream_error(m->stream));
        }
        need(cpa_context_attend(m->context, &args, m->stream), cpa_context_error(m->context));
        need(model->layer_out(model->ctx, layer, step, m->out, m->stream), cpa_stream_error(m->stream));
    }
}

/* The rows on the device; the lists of uploads are freed with them. */
static void run(cpa_test_model *m, const step_rows *rows, cpa_drawn *drawn) {
    enum { UPLOADS = 10 };
    const int64_t n = rows->count, e = rows->emissions;
    const struct {
        const void *host;
        int64_t bytes;
    } lists[UPLOADS] = {
        {rows->tokens, n * 4}, {rows->positions, n * 8},
        {rows->slots, n * 8},  {rows->rows, e * 4},
        {rows->seqs, e * 4},   {rows->temperatures, e * 4},
        {rows->seeds, e * 8},  {rows->drawn_positions, e * 8},
        {rows->given, e * 8},  {drawn, e * 8},
    };
    void *on[UPLOADS];
    for (int i = 0; i < UPLOADS; i++)
        on[i] = lists[i].bytes ? cpa_test_upload(m->stream, lists[i].host, lists[i].bytes) : NULL;
    cpa_step_form forms[CPA_MOST_ROW_FORMS];
    place_forms(m, rows, forms);
    const cpa_model_step step = {
        .size = sizeof step,
        .forms = m->shape.n_forms > 0 ? forms : NULL,
        .rows = {n, rows->requests, rows->tokens, rows->positions, on[0], on[1], on[2]},
        .emissions = {.count = e,
                      .rows = on[3],
                      .sample = {.seq = on[4], .temperature = on[5], .seed = on[6], .position = on[7], .given = on[8]},
                      .wants = CPA_WANTS_LOGITS | CPA_WANTS_TEMPERATURE | CPA_WANTS_LOGPROBS},
        .slices = rows->sliced ? &m->slices : NULL,
        .row_exchange = &m->row_exchange,
        .rank_rows = rows->of_ranks,
    };
    run_layers(m, &step);
    need(m->model.end_step(m->model.ctx, &step, on[9], m->stream), cpa_stream_error(m->stream));
    if (e) cpa_test_download(m->stream, drawn, on[9], e * (int64_t)sizeof *drawn);
    need(cpa_stream_sync(m->stream), cpa_stream_error(m->stream));
    for (int i = 0; i < UPLOADS; i++)
        if (on[i]) cpa_test_free(m->stream, on[i]);
}

/* What the owner of an answer's last token drew, on every rank. */
static void share(cpa_test_model *m, cpa_test_answer *answer, const step_rows *rows, const cpa_drawn *drawn) {
    const int32_t owner = cpa_owner_rank(m->map, answer->placement, answer->known - 1);
    const int64_t output = answer->known - answer->prompt;
    const int vocabulary = m->config.vocabulary;
    cpa_drawn token = {0, 0};
    if (output >= CPA_TEST_OUTPUTS) abort();
    for (int64_t e = 0; e < rows->emissions; e++) {
        if (&m->answers[rows->emitting[e]] != answer) continue;
        token = drawn[e];
        memcpy(answer->logits[output], m->seen + e * vocabulary, (size_t)vocabulary * sizeof *m->seen);
    }
    const uint32_t own = token.id;
    MPI_Bcast(&token, sizeof token, MPI_BYTE, owner, MPI_COMM_WORLD);
    if (rows->sliced && token.id != own) abort(); /* all ranks draw the same */
    MPI_Bcast(answer->logits[output], vocabulary, MPI_FLOAT, owner, MPI_COMM_WORLD);
    answer->logprobs[output] = token.logprob;
    answer->tokens[answer->known++] = token.id;
}

void cpa_test_model_step(cpa_test_model *m, const cpa_test_part *given, int n) {
    step_rows rows = {.sliced = is_sliced(m, given, n)};
    cpa_drawn drawn[CPA_TEST_SEQUENCES] = {{0, 0}};
    cpa_test_part parts[CPA_TEST_SEQUENCES];
    int at = 0;
    for (int32_t form = 0; form < CPA_MOST_ROW_FORMS; form++)
        for (int i = 0; i < n; i++)
            if (form_of(m, &given[i]) == form) parts[at++] = given[i];
    for (int i = 0; i < n; i++) add_part(m, &parts[i], &rows);
    plan(m, parts, n);
    run(m, &rows, drawn);
    for (int i = 0; i < n; i++) {
        cpa_test_answer *answer = &m->answers[parts[i].answer];
        answer->computed += parts[i].count;
        if (answer->computed == answer->known) share(m, answer, &rows, drawn);
    }
}
