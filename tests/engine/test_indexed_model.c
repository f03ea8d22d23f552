/* A model whose indexer chooses keys through the engine: in every step and layer, on every rank, the lists are those of
 * the scores of whole sequences, and rows are checked by them. Index keys and queries are small integers that follow
 * from the layer and the position, so that scores are exact. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/hash.h"
#include "kernels/device.h"
#include "src/model/synthetic.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/topk_fixture.h"

enum {
    REQUESTS = 9,
    LAYERS = 3,
    HEADS = 2,
    DIM = 16,
    K = 20,
    MANY = 1024,
    MOST_ROWS = 1024,
    MOST_TOKENS = 1024,
    MOST_RANKS = 4
};

typedef struct indexed_model {
    cpa_model model, synthetic_model;
    cpa_index_form index;
    cpa_synthetic synthetic;
    cpa_device *device;
    void *keys, *queries, *weights; /* of the own rows, on the device */
    cpa_key_indices lists;
    int64_t rows_compared, wrong;
    /* Not 0: lists, of MANY, are not compared; keys in them are counted by which of so many ranks owns them, in runs
     * of the interleave, counted from that of a sequence's first token. */
    int32_t owners, interleave;
    int64_t owned[MOST_RANKS];
} indexed_model;

static int element(int what, int32_t layer, int64_t position, int i) {
    return (int)(cpa_mix64((uint64_t)(position * 131 + layer * 17 + what) * CPA_GOLDEN + (uint64_t)i) >> 40) % 5 - 2;
}

static float weight(int32_t layer, int64_t position, int h) {
    return (float)(element(2, layer, position, h) + 1);
}

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    indexed_model *m = ctx;
    m->device = m->synthetic.device = stream->device;
    return m->synthetic_model.layer_in(&m->synthetic, layer, step, args, stream);
}

static void recall(void *ctx, int32_t layer, int32_t kv_head, int64_t n, const uint32_t *tokens,
                   const int64_t *positions, void *k, void *v) {
    indexed_model *m = ctx;
    m->synthetic_model.recall(&m->synthetic, layer, kv_head, n, tokens, positions, k, v);
}

static cpa_status open_rows(indexed_model *m, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    if (m->keys) return CPA_OK;
    CPA_TRY(table->alloc(m->device, MOST_ROWS * DIM * 2, &m->keys, &stream->error));
    CPA_TRY(table->alloc(m->device, MOST_ROWS * HEADS * DIM * 2, &m->queries, &stream->error));
    return table->alloc(m->device, MOST_ROWS * HEADS * 4, &m->weights, &stream->error);
}

/* Keys of the own rows to their slots in the cache, queries and weights to the device. */
static cpa_status give_rows(indexed_model *m, int32_t layer, const cpa_model_step *step, const cpa_kv_view *index,
                            cpa_stream *stream) {
    static uint16_t keys[MOST_ROWS][DIM], q[MOST_ROWS][HEADS][DIM];
    static float weights[MOST_ROWS][HEADS];
    const cpa_device_table *table = stream->device->table;
    const int64_t rows = step->rows.count, *positions = step->rows.positions;
    for (int64_t row = 0; row < rows; row++) {
        for (int d = 0; d < DIM; d++) keys[row][d] = cpa_to_bf16((float)element(0, layer, positions[row], d));
        for (int h = 0; h < HEADS; h++) {
            weights[row][h] = weight(layer, positions[row], h);
            for (int d = 0; d < DIM; d++)
                q[row][h][d] = cpa_to_bf16((float)element(1, layer, positions[row], h * DIM + d));
        }
    }
    CPA_TRY(table->copy(m->keys, keys, rows * DIM * 2, stream));
    CPA_TRY(table->copy(m->queries, q, rows * HEADS * DIM * 2, stream));
    CPA_TRY(table->copy(m->weights, weights, rows * HEADS * 4, stream));
    CPA_TRY(table->stream_sync(stream));
    const cpa_index_write_args write = {.size = sizeof write,
                                        .tokens = rows,
                                        .dtype = CPA_BF16,
                                        .k = m->keys,
                                        .slot_mapping = step->rows.slots_device,
                                        .cache.kv = *index};
    return cpa_index_write(&write, stream);
}

static int32_t expect(int32_t layer, int64_t position, int32_t *list) {
    static float scores[MOST_TOKENS];
    for (int64_t t = 0; t <= position; t++) {
        scores[t] = 0;
        for (int h = 0; h < HEADS; h++) {
            int product = 0;
            for (int d = 0; d < DIM; d++) product += element(1, layer, position, h * DIM + d) * element(0, layer, t, d);
            if (product > 0) scores[t] += (float)product * weight(layer, position, h);
        }
    }
    return cpa_test_topk(scores, 0, (int32_t)position + 1, 0, (int32_t)position, K, list);
}

/* Compares the lists of the rows of the step with those of whole sequences. */
static cpa_status compare(indexed_model *m, int32_t layer, const cpa_select_args *args, cpa_stream *stream) {
    static int64_t indices[MOST_ROWS];
    static int32_t lists[MOST_ROWS][K], counts[MOST_ROWS];
    const cpa_device_table *table = stream->device->table;
    int32_t wanted[K];
    CPA_TRY(table->copy(indices, args->indices, args->rows * 8, stream));
    CPA_TRY(table->copy(lists, m->lists.indices, args->rows * K * 4, stream));
    CPA_TRY(table->copy(counts, m->lists.counts, args->rows * 4, stream));
    CPA_TRY(table->stream_sync(stream));
    for (int64_t row = 0; row < args->rows; row++) {
        const int32_t count = expect(layer, indices[row], wanted);
        const int elsewhere = counts[row] == 0; /* a sequence that lies on another rank */
        m->wrong += !elsewhere && (counts[row] != count || memcmp(lists[row], wanted, sizeof wanted) != 0);
        m->rows_compared += !elsewhere;
    }
    return CPA_OK;
}

/* Counts the keys of the lists of the step. */
static cpa_status count_owned(indexed_model *m, const cpa_select_args *args, cpa_stream *stream) {
    static int32_t lists[MOST_ROWS][MANY];
    const cpa_device_table *table = stream->device->table;
    CPA_TRY(table->copy(lists, m->lists.indices, args->rows * MANY * 4, stream));
    CPA_TRY(table->stream_sync(stream));
    for (int64_t row = 0; row < args->rows; row++)
        for (int i = 0; i < MANY; i++)
            if (lists[row][i] >= 0) m->owned[lists[row][i] / m->interleave % m->owners]++;
    return CPA_OK;
}

static cpa_status select_keys(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_select_args *args,
                              cpa_key_selection *selection, cpa_stream *stream) {
    indexed_model *m = ctx;
    if (args->rows > MOST_ROWS || step->rows.count > MOST_ROWS || !args->chooser) return CPA_INVALID;
    CPA_TRY(open_rows(m, stream));
    CPA_TRY(give_rows(m, layer, step, &args->index, stream));
    const cpa_context_select_args choice = {
        .size = sizeof choice, .q = m->queries, .weights = m->weights, .cache.kv = args->index};
    CPA_TRY(args->chooser->choose(args->chooser->ctx, &choice, &m->lists, stream));
    selection->indices = &m->lists;
    return m->owners > 0 ? count_owned(m, args, stream) : compare(m, layer, args, stream);
}

static void model_open(indexed_model *m, const cpa_engine_options *options) {
    *m = (indexed_model){.synthetic = {.shape = options->model.attention, .seed = options->seed}};
    m->synthetic_model = cpa_synthetic_model(&m->synthetic);
    m->model = m->synthetic_model;
    m->model.ctx = m;
    m->model.layer_in = layer_in;
    m->model.recall = recall;
    m->model.select = select_keys;
    m->model.select_width = K;
    m->index =
        (cpa_index_form){.heads = HEADS, .dim = DIM, .dtype = CPA_BF16, .has_weights = 1, .k = K, .forced_last = 1};
}

static uint64_t run(cpa_engine_options *options) {
    static indexed_model model;
    cpa_request requests[REQUESTS];
    cpa_engine_stats stats;
    cpa_test_mixed_requests(requests, REQUESTS);
    model_open(&model, options);
    options->network = &model.model;
    options->model.index = &model.index;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CU_ASSERT_EQUAL(model.wrong, 0);
    CPA_ASSERT_ORDER(model.rows_compared, >, 1000);
    CPA_ASSERT_ORDER(stats.verify_rows, >, 500);
    CU_ASSERT_EQUAL(stats.index_bytes_sent > 0, cpa_comm_size(cpa_test_comm()) > 1);
    return stats.output_digest;
}

static void lists_are_those_of_whole_sequences(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.local_context = 1; /* all sequences lie on all ranks, whatever is measured */
    const uint64_t digest = run(&options);
    options.algorithm = CPA_PASS_KV;
    options.max_num_batched_tokens = 33;
    const uint64_t pass_kv = run(&options);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(pass_kv, digest);
    options.algorithm = CPA_PASS_Q;
    options.block_size = 16;
    options.interleave = 64;
    run(&options);
}

/* Of a prompt of some thousand tokens and what it decodes: the keys of its rows' lists that each rank owns, and
 * attends as queries travel. */
static void ranks_attend_chosen_keys_evenly(void) {
    static indexed_model model;
    cpa_engine_options options = cpa_test_engine_options();
    const int32_t ranks = cpa_comm_size(cpa_test_comm());
    cpa_request request = {.size = sizeof request, .prompt_tokens = 4500, .output_tokens = 30};
    cpa_engine_stats stats;
    int64_t busiest = 0, all = 0;
    model_open(&model, &options);
    options.block_size = 16;
    options.interleave = 64;
    options.num_blocks = 5000 / 16;
    options.max_num_batched_tokens = 512;
    model.model.select_width = model.index.k = MANY;
    model.owners = ranks;
    model.interleave = options.interleave;
    options.network = &model.model;
    options.model.index = &model.index;
    options.algorithm = CPA_PASS_Q;
    options.local_context = 1;
    options.enforce_eager = 1; /* the model waits for its copies, which graphs do not take */
    options.verify = 0;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    for (int32_t rank = 0; rank < ranks; rank++) {
        busiest = busiest > model.owned[rank] ? busiest : model.owned[rank];
        all += model.owned[rank];
    }
    CPA_ASSERT_ORDER(all, >, (4500 - MANY) * (int64_t)MANY * options.model.layers);
    CPA_ASSERT_ORDER((double)busiest * ranks, <=, 1.1 * (double)all);
}

static void an_indexer_wants_select(void) {
    static indexed_model model;
    cpa_engine_options options = cpa_test_engine_options();
    cpa_request requests[REQUESTS];
    cpa_engine *engine = NULL;
    cpa_error err = {0};
    cpa_test_mixed_requests(requests, REQUESTS);
    model_open(&model, &options);
    model.model.select_width = K - 1;
    options.network = &model.model;
    options.model.index = &model.index;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "an indexer of lists of 20, but select_width 19"));
}

static const cpa_test tests[] = {
    {"lists are those of whole sequences", lists_are_those_of_whole_sequences},
    {"ranks attend chosen keys evenly", ranks_attend_chosen_keys_evenly},
    {"an indexer wants select", an_indexer_wants_select},
};
CPA_MPI_DEVICE_TEST_MAIN("indexed_model", tests)
