/* A model whose rows have forms, one of prompts and one of decode: other widths, masks and scales, or a matrix, over one
 * cache. Each row is checked by the form that it has. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/device.h"
#include "kernels/operators.h"
#include "src/model/synthetic.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 9, LAYERS = 3, Q_HEADS = 4, PREFILL = 1, DECODE = 0, FORMS = 2, STATE = 48, RESULT = 24 };
enum { BAD_REQUEST = 6, BAD_POSITION = 74, BAD_LAYER = 1 };

static const cpa_mask WINDOWS[LAYERS] = {
    {.causal = 1, .window = 70, .sinks = 3}, {.causal = 1}, {.causal = 1, .window = 9}};
static const float SCALES[LAYERS] = {0.3f, 0, 0.1f};

typedef struct formed_model {
    cpa_model model, synthetic_model;
    cpa_synthetic synthetic;
    cpa_model_form forms[FORMS];
    cpa_model_shape shape;
    cpa_device *device; /* device of the matrices */
    cpa_stream *stream;
    void *matrices[LAYERS];
    int has_nan; /* a query of BAD_REQUEST in BAD_LAYER: that of its last prompt token, beside rows that decode */
    int64_t mixed_layers, wrong; /* with rows of both forms; whose forms are not all rows */
} formed_model;

static cpa_status give_nan(const formed_model *m, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    static const float nan_value = NAN;
    const cpa_step_form *form = &step->forms[PREFILL];
    char *q = (char *)args->q + form->q_bytes;
    const int64_t q_bytes = Q_HEADS * m->shape.attention.k_dim * (int64_t)sizeof nan_value;
    for (int64_t row = form->first; row < form->first + form->rows; row++, q += q_bytes)
        if (step->rows.requests[row] == BAD_REQUEST && step->rows.positions[row] == BAD_POSITION)
            CPA_TRY(stream->device->table->copy(q, &nan_value, sizeof nan_value, stream));
    return CPA_OK;
}

/* Queries of each form, of its width, and keys and values of all rows. */
static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    const formed_model *m = ctx;
    void *const outs[3] = {NULL, args->k, args->v};
    for (int tensor = CPA_SYNTH_K; tensor <= CPA_SYNTH_V; tensor++) {
        cpa_synth_args synth = cpa_synth_of(&m->shape.attention, (cpa_synth_tensor)tensor);
        synth.seed = m->synthetic.seed;
        synth.layer = layer;
        synth.rows = step->rows.count;
        synth.tokens = step->rows.tokens_device;
        synth.positions = step->rows.positions_device;
        synth.out = outs[tensor];
        CPA_TRY(stream->device->operators->synthesize(&synth, stream));
    }
    for (int f = 0; f < m->shape.n_forms; f++) {
        const cpa_step_form *form = &step->forms[f];
        cpa_attention_shape shape = m->shape.attention;
        if (m->forms[f].widths.k_dim) shape.k_dim = m->forms[f].widths.k_dim;
        cpa_synth_args synth = cpa_synth_of(&shape, CPA_SYNTH_Q);
        synth.seed = m->synthetic.seed;
        synth.layer = layer;
        synth.rows = form->rows;
        synth.tokens = step->rows.tokens_device + form->first;
        synth.positions = step->rows.positions_device + form->first;
        synth.out = (char *)args->q + form->q_bytes;
        CPA_TRY(stream->device->operators->synthesize(&synth, stream));
    }
    return m->has_nan && layer == BAD_LAYER ? give_nan(m, step, args, stream) : CPA_OK;
}

static cpa_status layer_out(void *ctx, int32_t layer, const cpa_model_step *step, const void *out, cpa_stream *stream) {
    formed_model *m = ctx;
    (void)layer, (void)out, (void)stream;
    int64_t rows = 0;
    for (int f = 0; f < m->shape.n_forms; f++) {
        m->wrong += step->forms[f].first != rows;
        rows += step->forms[f].rows;
    }
    m->wrong += rows != step->rows.count;
    m->mixed_layers += m->shape.n_forms == FORMS && step->forms[PREFILL].rows > 0 && step->forms[DECODE].rows > 0;
    return CPA_OK;
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    formed_model *m = ctx;
    m->synthetic_model.recall(&m->synthetic, layer, kv_head, n, tokens, positions, k, v);
}

/* A chain where windows count places, else a tree: two guesses side by side, and one behind the first. */
static int64_t draft(void *ctx, const cpa_draft_args *args) {
    (void)ctx;
    const int64_t n = args->max_drafts < 3 ? args->max_drafts : 3;
    for (int64_t i = 0; i < n; i++) {
        args->drafts[i] = (uint32_t)(args->n_tokens + i);
        args->parents[i] = i < 2 ? -1 : 0;
    }
    return n;
}

static void upload_matrices(formed_model *m) {
    const int64_t n = (int64_t)Q_HEADS * STATE * RESULT;
    float *wide = malloc((size_t)n * sizeof *wide);
    CU_ASSERT_PTR_NOT_NULL_FATAL(wide);
    cpa_test_device_open(1, &m->device, &m->stream);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int64_t i = 0; i < n; i++) wide[i] = (float)((i * 7 + i / 5 + layer) % 9 - 4) / 16;
        m->matrices[layer] = cpa_test_upload(m->stream, wide, n * (int64_t)sizeof *wide);
    }
    free(wide);
}

static void close_model(formed_model *m) {
    if (!m->device) return;
    for (int layer = 0; layer < LAYERS; layer++) cpa_test_free(m->stream, m->matrices[layer]);
    cpa_test_device_close(m->device, m->stream);
}

/* What rows of decode have: the first columns, a window and a scale of their own; or a matrix. */
typedef enum decoding { FEWER_COLUMNS, MATRIX } decoding;

static formed_model model;

static cpa_engine_options open_model(formed_model *m, decoding how) {
    cpa_engine_options options = cpa_test_engine_options();
    memset(m, 0, sizeof *m);
    options.model.attention.k_dim = options.model.attention.v_dim = 128;
    options.verify = 1;
    if (how == MATRIX) {
        m->forms[DECODE] = (cpa_model_form){.widths = {.k_dim = 64, .v_dim = STATE, .out_dim = RESULT},
                                            .layer_matrices = (const void *const *)m->matrices};
        upload_matrices(m);
    } else {
        m->forms[DECODE] =
            (cpa_model_form){.widths = {.k_dim = 64, .v_dim = 64}, .layer_masks = WINDOWS, .layer_scales = SCALES};
    }
    options.model.forms = m->forms;
    options.model.n_forms = FORMS;
    options.model.prefill_form = PREFILL;
    options.model.decode_form = DECODE;
    m->synthetic = (cpa_synthetic){.shape = options.model.attention, .seed = options.seed};
    m->synthetic_model = cpa_synthetic_model(&m->synthetic);
    m->model = (cpa_model){.size = sizeof m->model,
                           .ctx = m,
                           .layer_in = layer_in,
                           .layer_out = layer_out,
                           .recall = recall,
                           .capturable = 1};
    options.network = &m->model;
    return options;
}

static cpa_engine_stats run_requests(const cpa_engine_options *options, const cpa_request *requests) {
    cpa_engine_stats stats;
    model.shape = options->model;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >=, stats.computed_tokens * LAYERS * Q_HEADS);
    CU_ASSERT_EQUAL(model.wrong, 0);
    return stats;
}

static cpa_engine_stats run(const cpa_engine_options *options) {
    cpa_request requests[REQUESTS];
    cpa_test_mixed_requests(requests, REQUESTS);
    return run_requests(options, requests);
}

/* Whether some rank had rows of both forms in a layer. */
static int has_mixed(void) {
    int mixed = model.mixed_layers > 0;
    MPI_Allreduce(MPI_IN_PLACE, &mixed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return mixed;
}

static void rows_of_prompts_and_of_decode_have_their_forms(void) {
    cpa_engine_options options = open_model(&model, FEWER_COLUMNS);
    const uint64_t digest = run(&options).output_digest;
    CU_ASSERT_TRUE(has_mixed());
    options.algorithm = CPA_PASS_KV;
    const uint64_t pass_kv = run(&options).output_digest;
    options.algorithm = CPA_PASS_Q;
    options.max_num_batched_tokens = 33;
    const uint64_t pass_q = run(&options).output_digest;
    if (cpa_test_promises_bits()) {
        CU_ASSERT_EQUAL(pass_kv, digest);
        CU_ASSERT_EQUAL(pass_q, digest);
    }
    options.algorithm = CPA_AUTO;
    options.model.decode_form = PREFILL;
    CU_ASSERT_NOT_EQUAL(run(&options).output_digest, digest);
}

/* Forms that are all of the attention, one or two, give the bits of a model without forms. */
static void forms_of_all_columns_give_the_bits_of_no_forms(void) {
    cpa_engine_options options = open_model(&model, FEWER_COLUMNS);
    cpa_request requests[REQUESTS];
    cpa_engine_stats plain;
    model.forms[DECODE] = model.forms[PREFILL];
    const uint64_t two = run(&options).output_digest;
    options.model.n_forms = 1;
    options.model.prefill_form = options.model.decode_form = 0;
    const uint64_t one = run(&options).output_digest;
    cpa_test_mixed_requests(requests, REQUESTS);
    options.network = NULL;
    options.model.forms = NULL;
    options.model.n_forms = 0;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &plain));
    if (!cpa_test_promises_bits()) return;
    CU_ASSERT_EQUAL(plain.output_digest, one);
    CU_ASSERT_EQUAL(plain.output_digest, two);
}

static void results_go_through_the_matrix_of_their_form(void) {
    for (int algorithm = CPA_AUTO; algorithm <= CPA_PASS_Q; algorithm++) {
        cpa_engine_options options = open_model(&model, MATRIX);
        options.algorithm = (cpa_algorithm)algorithm;
        run(&options);
        CU_ASSERT_TRUE(has_mixed());
        close_model(&model);
    }
}

/* Drafts decode: rows of a tree have the matrix, those of a chain the window. */
static void drafts_have_the_form_of_decode(void) {
    for (int how = FEWER_COLUMNS; how <= MATRIX; how++) {
        cpa_engine_options options = open_model(&model, (decoding)how);
        model.model.draft = draft;
        options.drafter = CPA_DRAFT_MODEL;
        options.draft_tokens = 3;
        CPA_ASSERT_ORDER(run(&options).draft_tokens, >, 20);
        close_model(&model);
    }
}

static void replicated_rows_have_forms(void) {
    for (int how = FEWER_COLUMNS; how <= MATRIX; how++) {
        cpa_engine_options options = open_model(&model, (decoding)how);
        for (int slices = CPA_SLICES_DECODE; slices <= CPA_SLICES_ALL; slices++) {
            model.model.slices = (cpa_model_slices)slices;
            run(&options);
        }
        close_model(&model);
    }
}

/* What is computed again behind a preemption is a prompt, whatever form it had. */
static void preempted_requests_are_computed_again(void) {
    cpa_engine_options options = open_model(&model, FEWER_COLUMNS);
    cpa_request requests[REQUESTS];
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 0; i < REQUESTS; i++)
        requests[i] =
            (cpa_request){.size = sizeof *requests, .id = (uint64_t)i, .prompt_tokens = 9 + 3 * i, .output_tokens = 40};
    options.num_blocks = 8 / ranks + 2; /* two or three of the sequences at their full length */
    CPA_ASSERT_ORDER(run_requests(&options, requests).preemptions, >, 0);
}

static void a_row_that_is_not_finite_is_found_by_its_form(void) {
    cpa_engine_options options = open_model(&model, FEWER_COLUMNS);
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    model.model.capturable = 0; /* looks at the rows of each step */
    model.has_nan = 1;
    model.shape = options.model;
    cpa_test_mixed_requests(requests, REQUESTS);
    CU_ASSERT_FALSE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &stats));
    CU_ASSERT_EQUAL(stats.requests_finished, REQUESTS - 1);
    CU_ASSERT_EQUAL(stats.verify_violations, 0);
    CU_ASSERT_TRUE(has_mixed());
    CU_ASSERT_EQUAL(stats.nonfinite_rows, 1);
    CU_ASSERT_EQUAL(stats.nonfinite_request, BAD_REQUEST);
    CU_ASSERT_EQUAL(stats.nonfinite_position, BAD_POSITION);
    CU_ASSERT_EQUAL(stats.nonfinite_layer, BAD_LAYER);
}

static void expect_refusal(const cpa_engine_options *options, const char *says) {
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, says));
    if (!strstr(err.message, says)) printf("%s\nis not\n%s\n", err.message, says);
    cpa_engine_destroy(engine);
}

static void what_forms_may_not_be_is_told(void) {
    cpa_engine_options options = open_model(&model, FEWER_COLUMNS);
    cpa_engine_options other = options;
    cpa_mask windows[LAYERS] = {{.causal = 1, .window = 8}, {.causal = 1, .window = 8}, {.causal = 1, .window = 8}};
    other.model.decode_form = 2;
    expect_refusal(&other, "model: decode_form is 2, expected 0 to 1");
    other.model.decode_form = 0;
    other.model.prefill_form = -1;
    expect_refusal(&other, "model: prefill_form is -1, expected 0 to 1");
    other = options;
    other.model.n_forms = 0;
    expect_refusal(&other, "model: 0 forms at ");
    other.model.n_forms = 4;
    expect_refusal(&other, "model: n_forms is 4, expected 0 to 3");
    other = options;
    other.network = NULL;
    expect_refusal(&other, "form 1: has layer_matrices without a network, expected one that gives them");
    other = options;
    other.model.layer_masks = windows;
    expect_refusal(&other, "form 0, layer 0: the mask shows keys that the mask of the layer hides");
    model.forms[DECODE].widths.out_dim = 16;
    expect_refusal(&options, "form 0: out_dim is 16 with layer_matrices ");
    model.forms[DECODE].widths = (cpa_row_form){.k_dim = 200};
    expect_refusal(&options, "form 0: k_dim is 200, expected 0 to 128, that of the keys of the cache");
    model.forms[DECODE] = (cpa_model_form){.layer_scales = (const float[LAYERS]){0, INFINITY, 0}};
    expect_refusal(&options, "form 0, layer 1: scale is inf, expected a finite number");
}

/* The last test: over several ranks no engine can be made behind one that failed. */
static void a_matrix_that_is_missing_is_told(void) {
    cpa_engine_options options = open_model(&model, MATRIX);
    cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 50, .output_tokens = 4};
    const void *none[LAYERS] = {NULL};
    model.forms[DECODE].layer_matrices = none;
    model.shape = options.model;
    cpa_engine *engine = cpa_test_engine(&options, &request, 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    CU_ASSERT_NOT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(engine), "layer 0: attend: form 0: the matrix is"));
    cpa_engine_destroy(engine);
    close_model(&model);
}

static const cpa_test tests[] = {
    {"rows of prompts and of decode have their forms", rows_of_prompts_and_of_decode_have_their_forms},
    {"forms of all columns give the bits of no forms", forms_of_all_columns_give_the_bits_of_no_forms},
    {"results go through the matrix of their form", results_go_through_the_matrix_of_their_form},
    {"drafts have the form of decode", drafts_have_the_form_of_decode},
    {"replicated rows have forms", replicated_rows_have_forms},
    {"preempted requests are computed again", preempted_requests_are_computed_again},
    {"a row that is not finite is found by its form", a_row_that_is_not_finite_is_found_by_its_form},
    {"what forms may not be is told", what_forms_may_not_be_is_told},
    {"a matrix that is missing is told", a_matrix_that_is_missing_is_told},
};
CPA_MPI_DEVICE_TEST_MAIN("model_forms", tests)
