/* A model that selects keys for each row and KV head: its rows are checked by their lists, and on the host the bits of
 * the results depend neither on the algorithm nor on how steps are cut. */
#include <string.h>

#include "base/check.h"
#include "base/hash.h"
#include "kernels/device.h"
#include "src/model/synthetic.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 9, KV_HEADS = 2, UNIT = 4, WIDTH = 24, MOST_ROWS = 1024 };

/* What is wrong with what it selects, if anything. */
typedef enum selecting { RIGHTLY, ALL_KEYS, TOO_MANY, BLOCKS, FAILS, OTHER_BITS } selecting;

typedef struct selecting_model {
    cpa_model model, synthetic_model;
    cpa_synthetic synthetic;
    cpa_device *device;
    selecting how;
    int64_t calls, trees; /* of select, and those with the bits of trees */
    int64_t index[MOST_ROWS];
    int32_t lists[MOST_ROWS * KV_HEADS * WIDTH], counts[MOST_ROWS];
    void *lists_device, *counts_device;
    cpa_key_indices indices;
    cpa_key_blocks blocks;
    cpa_key_bits bits;
} selecting_model;

static cpa_status open_on_device(selecting_model *m, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    m->device = m->synthetic.device = stream->device;
    CPA_TRY(table->alloc(m->device, sizeof m->lists, &m->lists_device, &stream->error));
    return table->alloc(m->device, sizeof m->counts, &m->counts_device, &stream->error);
}

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    selecting_model *m = ctx;
    if (!m->device) CPA_TRY(open_on_device(m, stream));
    return m->synthetic_model.layer_in(&m->synthetic, layer, step, args, stream);
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    selecting_model *m = ctx;
    m->synthetic_model.recall(&m->synthetic, layer, kv_head, n, tokens, positions, k, v);
}

/* A third of the units up to the row's own, which it always has, as far as there is room; short rows attend all keys. */
static void fill_list(selecting_model *m, int64_t row, int32_t layer) {
    const int64_t own = m->index[row] / UNIT;
    m->counts[row] = own < 4 ? -1 : WIDTH;
    for (int32_t head = 0; head < KV_HEADS; head++) {
        int32_t *list = m->lists + (row * KV_HEADS + head) * WIDTH, n = 0;
        for (int64_t unit = 0; unit < own && n < WIDTH - 1; unit++)
            if (cpa_mix64((uint64_t)(unit * 977 + own * 31 + layer * 7 + head)) % 3 == 0) list[n++] = (int32_t)unit;
        list[n++] = (int32_t)own;
        for (; n < WIDTH; n++) list[n] = -1;
    }
}

static cpa_status select_keys(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_select_args *args,
                              cpa_key_selection *selection, cpa_stream *stream) {
    selecting_model *m = ctx;
    const cpa_device_table *table = stream->device->table;
    const int64_t rows = args->rows, row_bytes = KV_HEADS * WIDTH * (int64_t)sizeof(int32_t);
    m->calls++;
    m->trees += selection->bits != NULL;
    if (m->how == ALL_KEYS) return CPA_OK;
    if (m->how == FAILS || rows > MOST_ROWS || rows < step->rows.count) return CPA_INVALID;
    CPA_TRY(table->copy(m->index, args->indices, rows * (int64_t)sizeof *m->index, stream));
    CPA_TRY(table->stream_sync(stream));
    for (int64_t row = 0; row < rows; row++) fill_list(m, row, layer);
    CPA_TRY(table->copy(m->lists_device, m->lists, rows * row_bytes, stream));
    CPA_TRY(table->copy(m->counts_device, m->counts, rows * (int64_t)sizeof *m->counts, stream));
    m->indices = (cpa_key_indices){.indices = m->lists_device,
                                   .counts = m->counts_device,
                                   .row_stride = KV_HEADS * WIDTH,
                                   .head_stride = WIDTH,
                                   .width = WIDTH + (m->how == TOO_MANY),
                                   .unit = UNIT};
    selection->indices = &m->indices;
    m->blocks = (cpa_key_blocks){.bits = m->lists_device, .row_word = (const int64_t *)args->indices, .block = 128};
    if (m->how == BLOCKS) selection->blocks = &m->blocks;
    if (m->how == OTHER_BITS) selection->bits = &m->bits;
    return CPA_OK;
}

static void model_open(selecting_model *m, const cpa_engine_options *options) {
    memset(m, 0, sizeof *m);
    m->synthetic = (cpa_synthetic){.shape = options->model.attention, .seed = options->seed};
    m->synthetic_model = cpa_synthetic_model(&m->synthetic);
    m->model = m->synthetic_model;
    m->model.ctx = m;
    m->model.layer_in = layer_in;
    m->model.recall = recall;
    m->model.capturable = 0;
    m->model.select = select_keys;
    m->model.select_width = WIDTH;
}

static selecting_model model;

static cpa_engine_stats run(cpa_engine_options *options, selecting how) {
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    cpa_test_mixed_requests(requests, REQUESTS);
    model_open(&model, options);
    model.how = how;
    options->network = &model.model;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(model.calls, >, 0);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
    CPA_ASSERT_ORDER(stats.selection_rows, <=, stats.verify_rows);
    CU_ASSERT_EQUAL(stats.selection_rows > 100, how == RIGHTLY);
    CU_ASSERT_EQUAL(stats.selection_mass_left_out_mean > 0.1, how == RIGHTLY);
    CPA_ASSERT_ORDER(stats.selection_mass_left_out_mean, <=, stats.selection_mass_left_out_max);
    CPA_ASSERT_ORDER(stats.selection_mass_left_out_max, <=, 1.0);
    return stats;
}

static void rows_are_checked_by_their_lists(void) {
    cpa_engine_options options = cpa_test_engine_options();
    const uint64_t digest = run(&options, RIGHTLY).output_digest;
    options.algorithm = CPA_PASS_KV;
    const uint64_t pass_kv = run(&options, RIGHTLY).output_digest;
    options.algorithm = CPA_PASS_Q;
    options.max_num_batched_tokens = 33;
    const uint64_t pass_q = run(&options, RIGHTLY).output_digest;
    if (cpa_test_promises_bits()) {
        CU_ASSERT_EQUAL(pass_kv, digest);
        CU_ASSERT_EQUAL(pass_q, digest);
    }
}

/* A select that adds nothing gives the results of a model without. */
static void all_keys_are_those_of_no_selection(void) {
    cpa_engine_options options = cpa_test_engine_options();
    const uint64_t selected = run(&options, RIGHTLY).output_digest, all = run(&options, ALL_KEYS).output_digest;
    cpa_request requests[REQUESTS];
    cpa_engine_stats plain;
    cpa_test_mixed_requests(requests, REQUESTS);
    options.network = NULL;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &plain));
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(plain.output_digest, all);
    CU_ASSERT_NOT_EQUAL(selected, all);
}

/* Two guesses side by side, and one behind the first. */
static int64_t draft_tree(void *ctx, const cpa_draft_args *args) {
    (void)ctx;
    const int64_t n = args->max_drafts < 3 ? args->max_drafts : 3;
    for (int64_t i = 0; i < n; i++) {
        args->drafts[i] = (uint32_t)(args->n_tokens + i);
        args->parents[i] = i < 2 ? -1 : 0;
    }
    return n;
}

/* Rows of drafts attend what their lists and the bits of their tree both name. */
static void lists_go_with_trees_of_drafts(void) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    cpa_test_mixed_requests(requests, REQUESTS);
    model_open(&model, &options);
    model.model.draft = draft_tree;
    options.network = &model.model;
    options.drafter = CPA_DRAFT_MODEL;
    options.draft_tokens = 3;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.draft_tokens, >, 100);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
    CPA_ASSERT_ORDER(model.trees, >, 0);
}

/* The last test: over several ranks no engine can be made behind one that failed. */
static void what_may_not_be_selected_is_told(void) {
    static const struct {
        selecting how;
        const char *says;
    } cases[] = {{TOO_MANY, "layer 0: the model's select gave lists of 25, expected at most 24"},
                 {BLOCKS, "the model selects keys by blocks, whose rows are not checked"},
                 {FAILS, "layer 0: the model's select returned invalid"},
                 {OTHER_BITS, "layer 0: the model's select changed the bits of the selection"}};
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (size_t i = 0; i < (ranks == 1 ? sizeof cases / sizeof *cases : 1); i++) {
        cpa_engine_options options = cpa_test_engine_options();
        cpa_request requests[REQUESTS];
        cpa_test_mixed_requests(requests, REQUESTS);
        model_open(&model, &options);
        model.how = cases[i].how;
        options.network = &model.model;
        options.verify = 1;
        cpa_engine *engine = cpa_test_engine(&options, requests, REQUESTS);
        CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
        CU_ASSERT_NOT_EQUAL(cpa_engine_run(engine, NULL, NULL, NULL), CPA_OK);
        CU_ASSERT_PTR_NOT_NULL(strstr(cpa_engine_error(engine), cases[i].says));
        cpa_engine_destroy(engine);
    }
}

static const cpa_test tests[] = {
    {"rows are checked by their lists", rows_are_checked_by_their_lists},
    {"all keys are those of no selection", all_keys_are_those_of_no_selection},
    {"lists go with trees of drafts", lists_go_with_trees_of_drafts},
    {"what may not be selected is told", what_may_not_be_selected_is_told},
};
CPA_MPI_DEVICE_TEST_MAIN("selecting_model", tests)
