/* First tokens that are kept in the model's dtype beside a quantised cache (cpa_engine_options.precise_tokens): where
 * rows attend sinks there, the error that quantisation makes shrinks to that of the other keys; all of them precise is
 * no quantisation; and what does not go with it is refused. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/hash.h"
#include "kernels/device.h"
#include "src/cache/layer_groups.h"
#include "src/check/reference.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LAYERS = 3, Q_HEADS = 4, KV_HEADS = 2, K_DIM = 64, V_DIM = 32, BLOCK = 16, PRECISE = 2 * BLOCK };

static const cpa_mask MIXED[LAYERS] = {
    {.causal = 1, .window = 50, .sinks = 3}, {.causal = 1}, {.causal = 1, .window = 33}};

static cpa_engine_options options_over(cpa_dtype dtype, cpa_dtype kv_dtype) {
    cpa_engine_options options = cpa_test_engine_options();
    options.algorithm = CPA_PASS_Q;
    options.model.attention.k_dim = K_DIM;
    options.model.attention.v_dim = V_DIM;
    options.model.attention.dtype = dtype;
    options.model.attention.kv_dtype = kv_dtype;
    return options;
}

/* ---- the error of results ---- */

/* A model whose rows attend SINKS of the first tokens next to alone: their keys, and all queries, lie along one vector
 * of +-1, to scores of SINK_SCORE. Each row is compared with float64 over keys and values before quantisation. */
enum { SINKS = 4, MOST_ROWS = 96, FIRST_ROW = 2 * PRECISE };
static const int64_t SINK_AT[SINKS] = {0, 1, BLOCK + 1, PRECISE - 1};
#define SINK_SCORE 10.0

typedef struct sink_model {
    cpa_dtype dtype;
    float q[MOST_ROWS * Q_HEADS * K_DIM], k[MOST_ROWS * KV_HEADS * K_DIM], v[MOST_ROWS * KV_HEADS * V_DIM];
    float out[MOST_ROWS * Q_HEADS * V_DIM];
    double squares, elements; /* of errors */
    double most_behind;       /* the most of a softmax behind the precise tokens */
} sink_model;

/* Uniform in [-1, 1]. */
static float noise(int64_t position, int64_t head, int64_t column, int which) {
    const uint64_t at = (uint64_t)((position * 16 + head) * 1024 + column) * 4 + (uint64_t)which;
    return (float)((double)(cpa_mix64(at + 12345) >> 11) * 0x1p-52 - 1);
}

static float along(int64_t kv_head, int64_t column) {
    return noise(-1, kv_head, column, 0) > 0 ? 1.0f : -1.0f;
}

/* SINK_SCORE = length^2 * K_DIM / sqrt(K_DIM). */
static double sink_length(void) {
    return sqrt(SINK_SCORE / sqrt(K_DIM));
}

static int is_sink(int64_t position) {
    for (int i = 0; i < SINKS; i++)
        if (SINK_AT[i] == position) return 1;
    return 0;
}

/* Elements of variance 1, but for those of sinks. */
static void key_of(cpa_dtype dtype, int64_t position, int64_t head, float *k) {
    const double length = is_sink(position) ? sink_length() : 0, other = length > 0 ? 0.25 : sqrt(3);
    for (int64_t c = 0; c < K_DIM; c++)
        k[c] = cpa_reference_round((float)(length * along(head, c) + other * noise(position, head, c, 1)), dtype);
}

static void value_of(cpa_dtype dtype, int64_t position, int64_t head, float *v) {
    for (int64_t c = 0; c < V_DIM; c++) v[c] = cpa_reference_round(noise(position, head, c, 2), dtype);
}

static void query_of(cpa_dtype dtype, int64_t position, int64_t head, float *q) {
    for (int64_t c = 0; c < K_DIM; c++)
        q[c] = cpa_reference_round(
            (float)(sink_length() * along(head / (Q_HEADS / KV_HEADS), c) + 0.25 * noise(position, head, c, 3)), dtype);
}

static cpa_status put(void *to, const float *values, int64_t n, cpa_dtype dtype, cpa_stream *stream) {
    uint8_t narrow[MOST_ROWS * Q_HEADS * K_DIM * sizeof(float)];
    cpa_narrow(narrow, values, dtype, n);
    CPA_TRY(stream->device->table->copy(to, narrow, n * cpa_dtype_bytes(dtype), stream));
    return stream->device->table->stream_sync(stream);
}

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    sink_model *m = ctx;
    (void)layer;
    if (step->rows.count > MOST_ROWS) return CPA_INVALID;
    for (int64_t row = 0; row < step->rows.count; row++) {
        const int64_t at = step->rows.positions[row];
        for (int64_t h = 0; h < Q_HEADS; h++) query_of(m->dtype, at, h, m->q + (row * Q_HEADS + h) * K_DIM);
        for (int64_t h = 0; h < KV_HEADS; h++) {
            key_of(m->dtype, at, h, m->k + (row * KV_HEADS + h) * K_DIM);
            value_of(m->dtype, at, h, m->v + (row * KV_HEADS + h) * V_DIM);
        }
    }
    CPA_TRY(put(args->q, m->q, step->rows.count * Q_HEADS * K_DIM, m->dtype, stream));
    CPA_TRY(put(args->k, m->k, step->rows.count * KV_HEADS * K_DIM, m->dtype, stream));
    return put(args->v, m->v, step->rows.count * KV_HEADS * V_DIM, m->dtype, stream);
}

/* Softmax over the keys up to the row's own, in float64. */
static void compare_row(sink_model *m, int64_t position, int64_t head, const float *got) {
    float q[K_DIM], k[K_DIM], v[V_DIM];
    double o[V_DIM] = {0}, sum = 0, behind = 0;
    query_of(m->dtype, position, head, q);
    for (int64_t key = 0; key <= position; key++) {
        double score = 0;
        key_of(m->dtype, key, head / (Q_HEADS / KV_HEADS), k);
        value_of(m->dtype, key, head / (Q_HEADS / KV_HEADS), v);
        for (int c = 0; c < K_DIM; c++) score += (double)q[c] * (double)k[c];
        const double weight = exp(score / sqrt(K_DIM));
        sum += weight;
        if (key >= PRECISE) behind += weight;
        for (int c = 0; c < V_DIM; c++) o[c] += weight * (double)v[c];
    }
    for (int c = 0; c < V_DIM; c++) m->squares += pow((double)got[c] - o[c] / sum, 2);
    m->elements += V_DIM;
    m->most_behind = fmax(m->most_behind, behind / sum);
}

static cpa_status layer_out(void *ctx, int32_t layer, const cpa_model_step *step, const void *out, cpa_stream *stream) {
    sink_model *m = ctx;
    const int64_t n = step->rows.count * Q_HEADS * V_DIM;
    uint8_t narrow[sizeof m->out];
    if (layer > 0) return CPA_OK;
    CPA_TRY(stream->device->table->copy(narrow, out, n * cpa_dtype_bytes(m->dtype), stream));
    CPA_TRY(stream->device->table->stream_sync(stream));
    cpa_reference_widen(narrow, m->dtype, n, m->out);
    for (int64_t row = 0; row < step->rows.count; row++)
        for (int64_t h = 0; step->rows.positions[row] >= FIRST_ROW && h < Q_HEADS; h++)
            compare_row(m, step->rows.positions[row], h, m->out + (row * Q_HEADS + h) * V_DIM);
    return CPA_OK;
}

/* The root mean square of the error of elements, over rows of a prompt and of its answer on all ranks. */
static double error_of(cpa_engine_options options, int64_t precise, double *most_behind) {
    static sink_model m;
    const cpa_request request = {.size = sizeof request, .prompt_tokens = 300, .output_tokens = 20};
    const cpa_model model = {.size = sizeof model, .ctx = &m, .layer_in = layer_in, .layer_out = layer_out};
    cpa_engine_stats stats;
    m = (sink_model){.dtype = options.model.attention.dtype};
    options.network = &model;
    options.precise_tokens = precise;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >, 100);
    double sums[] = {m.squares, m.elements};
    MPI_Allreduce(MPI_IN_PLACE, sums, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(&m.most_behind, most_behind, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    CU_ASSERT_EQUAL(sums[1], (double)(319 - FIRST_ROW) * Q_HEADS * V_DIM);
    return sqrt(sums[0] / sums[1]);
}

/* Root mean squares of what rounding does to an element of a row, each that of its step / sqrt(12): of 2^bits - 1 steps
 * over the range of the V_DIM values of a row; of an fp8 code, whose step is 2^-mantissa of the power of two below, for
 * values up to 1.75 of one; of the levels of Lloyd and Max for elements of variance 1 (Max 1960), by their table. Keys
 * have variance 1, as noise in [-sqrt(3), sqrt(3)] has. */
static double of_steps(int bits) {
    return 2.0 * (V_DIM - 1) / (V_DIM + 1) / (ldexp(1, bits) - 1) / sqrt(12);
}
static double of_fp8(int mantissa) {
    double mean_square = 0, top = 1;
    for (double power = 1 / 1.75; power > 1e-3; top = power, power /= 2)
        mean_square += (top - power) * pow(ldexp(power, -mantissa), 2) / 12;
    return sqrt(mean_square);
}
static double of_levels(int bits) {
    return bits == 3 ? sqrt(0.03454) : sqrt(0.009497);
}

/* Without precise tokens the error is at least that of the values of the sinks, whose weights are 1 / SINKS or more in
 * the mean square. With them the rounding of values, and that of scores (sink_length times that of keys), which moves
 * weight between values of up to 1, have no more weight than what lies behind. Results are rounded to the dtype too. */
static void precise_sinks_lower_the_error(void) {
    const struct {
        cpa_dtype dtype, kv_dtype;
        double of_values, of_keys;
    } caches[] = {{CPA_F16, CPA_FP8_E4M3, of_fp8(3), sqrt(3) * of_fp8(3)},
                  {CPA_F16, CPA_FP8_E5M2, of_fp8(2), sqrt(3) * of_fp8(2)},
                  {CPA_F32, CPA_INT8, of_steps(8), sqrt(3) * of_steps(8)},
                  {CPA_F16, CPA_TQ_K8V4, of_steps(4), sqrt(3) * of_fp8(3)},
                  {CPA_BF16, CPA_TQ_4BIT, of_steps(4), of_levels(4)},
                  {CPA_F16, CPA_TQ_K3V4, of_steps(4), of_levels(3)},
                  {CPA_BF16, CPA_TQ_3BIT, of_steps(3), of_levels(3)}};
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        double behind;
        const cpa_engine_options options = options_over(caches[i].dtype, caches[i].kv_dtype);
        const double all = error_of(options, 0, &behind), others = error_of(options, PRECISE, &behind);
        const double least = 0.9 * (1 - behind) * caches[i].of_values / sqrt(SINKS);
        const double most = behind * (caches[i].of_values + sink_length() * caches[i].of_keys) +
                            cpa_reference_unit_roundoff(caches[i].dtype) + 8 * FLT_EPSILON;
        CPA_ASSERT_ORDER(behind, <, 0.05);
        CPA_ASSERT_ORDER(least, >, 2 * most);
        CPA_ASSERT_ORDER(all, >, least);
        CPA_ASSERT_ORDER(others, <, most);
    }
}

/* ---- the bits of results ---- */

/* The digest, whatever the steps, and whether requests give way to each other and share. */
static uint64_t common_digest(cpa_engine_options options, int64_t precise) {
    options.precise_tokens = precise;
    const uint64_t digest = cpa_test_mixed_digest(&options);
    options.max_num_batched_tokens = 37;
    cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), digest);
    options.model.attention.layout = CPA_HEAD_MAJOR;
    options.swap_bytes = 1 << 20;
    options.preemption = CPA_PREEMPT_SWAP;
    cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), digest);
    return digest;
}

/* If all tokens of a request are precise, results have the bits of a cache that is not quantised. */
static void precise_tokens_are_attended_as_they_were_computed(void) {
    static const cpa_dtype dtypes[][2] = {{CPA_BF16, CPA_FP8_E4M3}, {CPA_F32, CPA_INT8}, {CPA_BF16, CPA_TQ_3BIT}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        cpa_engine_options options = options_over(dtypes[i][0], dtypes[i][0]);
        const uint64_t plain = cpa_test_mixed_digest(&options);
        options.model.attention.kv_dtype = dtypes[i][1];
        options.skip_self_test = 0;
        const uint64_t quantised = cpa_test_mixed_digest(&options);
        options.skip_self_test = 1;
        const uint64_t first = common_digest(options, PRECISE);
        CU_ASSERT_NOT_EQUAL(first, quantised);
        CU_ASSERT_NOT_EQUAL(first, plain);
        options.precise_tokens = 1024;
        cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), plain);
        options.model.layer_masks = MIXED;
        if (i == 0) CU_ASSERT_NOT_EQUAL(common_digest(options, PRECISE), first);
    }
}

/* They have blocks of their own, in all layers of the model's dtype, no more than the cache has, and are told of. */
static void precise_tokens_take_the_bytes_of_their_dtype(void) {
    const cpa_request request = {.size = sizeof request, .prompt_tokens = 40, .output_tokens = 2};
    const int64_t row = KV_HEADS * (K_DIM + V_DIM) * (int64_t)sizeof(uint16_t);
    cpa_engine_options options = options_over(CPA_BF16, CPA_TQ_3BIT);
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    CU_ASSERT_EQUAL(stats.kv_groups, 1);
    CU_ASSERT_EQUAL(stats.precise_bytes, 0);
    options.precise_tokens = PRECISE;
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    const cpa_engine_kv_group *precise = &stats.kv_group[1];
    CU_ASSERT_EQUAL(stats.kv_groups, 2);
    CU_ASSERT_EQUAL(precise->block_bytes, BLOCK * LAYERS * row);
    CU_ASSERT_EQUAL(precise->sinks, PRECISE);
    CPA_ASSERT_ORDER(precise->blocks, <=, options.num_blocks);
    CPA_ASSERT_ORDER(precise->peak, >, 0);
    CPA_ASSERT_ORDER(stats.precise_bytes, ==, precise->blocks * precise->block_bytes);
}

/* ---- what is refused ---- */

typedef enum refusal {
    NO_BLOCKS = 0,
    NEGATIVE,
    NOT_QUANTISED,
    LATENTS,
    INDEXER,
    FORMS,
    SPARSE_PROMPTS,
    CACHE_ON_THE_HOST,
    STORE,
    PASS_KV,
    SHORT_RUNS,
    ALL_GROUPS,
    REFUSALS
} refusal;

static cpa_engine_options refused_options(refusal what) {
    enum { MANY = CPA_ENGINE_KV_GROUPS };
    static cpa_mask masks[MANY];
    static const float scales[LAYERS] = {0.1f, 0.1f, 0.1f};
    static const cpa_model_form form = {.layer_scales = scales};
    static const cpa_index_form index = {.heads = 1, .dim = 128, .k = 64, .dtype = CPA_F32};
    static const cpa_block_store store = {.size = sizeof store};
    cpa_engine_options options = options_over(CPA_F32, what == NOT_QUANTISED ? CPA_F32 : CPA_INT8);
    options.algorithm = what == PASS_KV ? CPA_PASS_KV : CPA_AUTO;
    options.precise_tokens = what == NO_BLOCKS ? PRECISE + 1 : what == NEGATIVE ? -PRECISE : PRECISE;
    if (what == LATENTS) options.model.attention.kv_heads = options.model.attention.v_in_k = 1;
    if (what == INDEXER) options.model.index = &index;
    if (what == FORMS || what == LATENTS) options.model.forms = &form, options.model.n_forms = 1;
    if (what == SPARSE_PROMPTS) options.sparse_stride = 8, options.sparse_tau = 0.9f;
    if (what == CACHE_ON_THE_HOST) options.ring_bytes = 1 << 20;
    if (what == STORE) options.block_store = &store;
    if (what == SHORT_RUNS) options.block_size = BLOCK, options.interleave = BLOCK / 2;
    for (int i = 0; i < MANY; i++) masks[i] = (cpa_mask){.causal = 1, .window = 16 * i};
    if (what == ALL_GROUPS) options.model.layers = MANY, options.model.layer_masks = masks;
    return options;
}

/* One line each, and the ranks go on. */
static void what_precise_tokens_do_not_go_with_is_refused(void) {
    static const char *const lines[REFUSALS] = {
        [NO_BLOCKS] = "precise_tokens: 33, expected a multiple of the block size 16",
        [NEGATIVE] = "precise_tokens: -32, expected a multiple of the block size 16",
        [NOT_QUANTISED] = "precise_tokens: 32 with a cache of fp32, expected a quantised one",
        [LATENTS] = "precise_tokens: 32 with a cache of latents, expected one of the two",
        [INDEXER] = "precise_tokens: 32 with an indexer, expected one of the two",
        [FORMS] = "precise_tokens: 32 with forms of rows, expected one of the two",
        [SPARSE_PROMPTS] = "precise_tokens: 32 with sparse_stride, expected one of the two",
        [CACHE_ON_THE_HOST] = "precise_tokens: 32 with ring_bytes, a cache on the host, expected one of the two",
        [STORE] = "precise_tokens: 32 with block_store, expected one of the two",
        [PASS_KV] = "precise_tokens: 32 with algorithm pass-KV, expected one of the two",
        [SHORT_RUNS] = "precise_tokens: 32 with an interleave below the block size, expected one of the two",
        [ALL_GROUPS] = "precise_tokens: 32 with as many masks of layers as there are groups, expected one of the two"};
    for (int what = 0; what < REFUSALS; what++) {
        const cpa_engine_options options = refused_options((refusal)what);
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
        CU_ASSERT_PTR_NULL(engine);
        CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, lines[what]));
        if (!strstr(err.message, lines[what])) printf("%s\n", err.message);
    }
    cpa_engine_options options = options_over(CPA_F32, CPA_INT8);
    options.precise_tokens = PRECISE;
    cpa_test_mixed_digest(&options);
}

static const cpa_test tests[] = {
    {"precise sinks lower the error", precise_sinks_lower_the_error},
    {"precise tokens are attended as they were computed", precise_tokens_are_attended_as_they_were_computed},
    {"precise tokens take the bytes of their dtype", precise_tokens_take_the_bytes_of_their_dtype},
    {"what precise tokens do not go with is refused", what_precise_tokens_do_not_go_with_is_refused},
};
CPA_MPI_DEVICE_TEST_MAIN("precise_tokens", tests)
