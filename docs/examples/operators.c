/* The operators of libcpattn on one process: keys and values go into pages by slot mapping, queries attend over block
 * tables, and the partial states of two halves of the context merge into exactly the whole.
 *
 * Prints the largest difference and exits 1 if it is more than rounding. */
#include <cpattn/cpattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    TOKENS = 1000,
    Q_HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    BLOCK_SIZE = 16,
    BLOCKS = (TOKENS + BLOCK_SIZE - 1) / BLOCK_SIZE,
    HALF_BLOCKS = BLOCKS / 2,
    HALF = HALF_BLOCKS * BLOCK_SIZE, /* where the context is cut; at a block */
};

/* Ends the program with the library's message. */
static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "operators: %s: %s\n", cpa_status_name(status), message);
    exit(1);
}

static float *new_floats(cpa_device *device, long n) {
    void *memory = NULL;
    cpa_error err;
    require(cpa_device_alloc(device, n * (long)sizeof(float), &memory, &err), err.message);
    return memory;
}

static void fill_random(float *x, long n) {
    for (long i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
}

/* A cache of BLOCKS blocks, [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM]. */
static cpa_kv_view new_cache(cpa_device *device) {
    long elements = (long)BLOCKS * BLOCK_SIZE * KV_HEADS * DIM;
    cpa_kv_view kv = {0};
    kv.k = new_floats(device, elements);
    kv.v = new_floats(device, elements);
    kv.dtype = CPA_F32;
    kv.block_size = BLOCK_SIZE;
    kv.num_blocks = BLOCKS;
    kv.kv_heads = KV_HEADS;
    kv.k_dim = kv.v_dim = DIM;
    kv.k_head_stride = kv.v_head_stride = DIM;
    kv.k_token_stride = kv.v_token_stride = KV_HEADS * DIM;
    kv.k_block_stride = kv.v_block_stride = BLOCK_SIZE * KV_HEADS * DIM;
    return kv;
}

/* Writes all tokens: token i of the sequence goes to slot table[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE. */
static void write_tokens(cpa_device *device, const int32_t *table, cpa_kv_view kv, cpa_stream *stream) {
    long elements = (long)TOKENS * KV_HEADS * DIM;
    float *k = new_floats(device, elements), *v = new_floats(device, elements);
    static int64_t slots[TOKENS];
    fill_random(k, elements);
    fill_random(v, elements);
    for (int i = 0; i < TOKENS; i++) slots[i] = (int64_t)table[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE;

    cpa_kv_write_args args = {.size = sizeof args, .tokens = TOKENS, .k = k, .v = v, .slot_mapping = slots, .kv = kv};
    require(cpa_kv_write(&args, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream)); /* before k and v are freed */
    cpa_device_free(device, k);
    cpa_device_free(device, v);
}

/* The state of every query over the keys [first, first + count), causal. */
static cpa_partial attend(cpa_device *device, const float *q, cpa_kv_view kv, const int32_t *table, int64_t first,
                          int64_t count, cpa_stream *stream) {
    cpa_partial state = {.o_row_stride = Q_HEADS * DIM, .lse_row_stride = Q_HEADS};
    state.o = new_floats(device, (long)TOKENS * Q_HEADS * DIM);
    state.lse = new_floats(device, (long)TOKENS * Q_HEADS);

    cpa_attend_item item = {.q_count = TOKENS, .k_first = first, .k_count = count, .table = first / BLOCK_SIZE};
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = {.cp_size = 1, .interleave = BLOCK_SIZE}, /* one rank: local index = position */
                              .shape.q_heads = Q_HEADS,
                              .shape.kv_heads = KV_HEADS,
                              .shape.k_dim = DIM,
                              .shape.v_dim = DIM,
                              .block_size = BLOCK_SIZE,
                              .items = &item,
                              .n_items = 1,
                              .block_tables = table,
                              .n_table_entries = BLOCKS};
    cpa_attend_plan *plan = NULL;
    cpa_error err;
    require(cpa_attend_plan_create(device, &plan, &err), err.message);
    require(cpa_attend_plan_set(plan, &batch, &err), err.message); /* once a step; good for every layer */

    cpa_attend_args args = {.size = sizeof args, .q = q, .kv = kv, .mask = {.causal = 1}, .state = state};
    require(cpa_attend(plan, &args, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream));
    cpa_attend_plan_destroy(plan);
    return state;
}

int main(void) {
    cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 1};
    cpa_device *device = NULL;
    cpa_stream *stream = NULL;
    cpa_error err;
    require(cpa_device_open(&options, &device, &err), err.message);
    require(cpa_stream_create(device, &stream, &err), err.message);

    /* A sequence whose pages lie in reverse order. */
    int32_t table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = BLOCKS - 1 - i;
    cpa_kv_view kv = new_cache(device);
    write_tokens(device, table, kv, stream);
    float *q = new_floats(device, (long)TOKENS * Q_HEADS * DIM);
    fill_random(q, (long)TOKENS * Q_HEADS * DIM);

    /* Attention over everything, and over the two halves. Queries before the second half see no key of it: their state
     * there is empty (LSE = -inf), and the merge leaves them alone. */
    cpa_partial whole = attend(device, q, kv, table, 0, TOKENS, stream);
    cpa_partial halves[2] = {attend(device, q, kv, table, 0, HALF, stream),
                             attend(device, q, kv, table, HALF, TOKENS - HALF, stream)};
    float *merged = new_floats(device, (long)TOKENS * Q_HEADS * DIM);
    cpa_merge_args merge = {.size = sizeof merge,
                            .rows = TOKENS,
                            .heads = Q_HEADS,
                            .v_dim = DIM,
                            .states = halves,
                            .n_states = 2,
                            .out_dtype = CPA_F32,
                            .out = merged};
    require(cpa_merge(&merge, stream), cpa_stream_error(stream));
    require(cpa_stream_sync(stream), cpa_stream_error(stream));

    double difference = 0;
    for (long i = 0; i < (long)TOKENS * Q_HEADS * DIM; i++) {
        double d = fabs((double)merged[i] - (double)whole.o[i]);
        if (!(d <= difference)) difference = d; /* keeps a NaN */
    }
    printf("operators: merged halves differ from the whole by at most %.2g on %s\n", difference,
           cpa_device_description(device));

    float *const memory[] = {kv.k,        kv.v,          q,           merged,       whole.o, whole.lse,
                             halves[0].o, halves[0].lse, halves[1].o, halves[1].lse};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_device_free(device, memory[i]);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    return difference <= 1e-5 ? 0 : 1;
}
