/* A long prompt through one layer of attention whose cache is sharded over ranks: prefill in chunks, then one token of
 * decode. Each rank computes, keeps and attends the tokens that it owns.
 *
 *     for rank in 0 1; do
 *         RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./long_prompt 8192 &
 *     done; wait
 *
 * All keys are alike and the value of token t is t, so the row of token p is the mean of 0 ... p, which is p / 2 whoever
 * has which token. Exits with 1 if a row is anything else. */
#include <cpattn/cpattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { Q_HEADS = 4, KV_HEADS = 2, DIM = 64, BLOCK = 16, CHUNK = 2048 };
enum { Q_ROW = Q_HEADS * DIM, KV_ROW = KV_HEADS * DIM };

static const cpa_placement placement = {CPA_SHARDED, 0}; /* over all ranks, from rank 0 on */
static int rank, ranks;
static cpa_device *device;
static cpa_stream *stream;

static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "long_prompt: rank %d: %s: %s\n", rank, cpa_status_name(status), message);
    exit(1); /* which ends the waits of the others */
}

static float *new_floats(int64_t n) {
    void *memory = NULL;
    cpa_error err;
    require(cpa_device_alloc(device, n * (int64_t)sizeof(float), &memory, &err), err.message);
    return memory;
}

/* [blocks, BLOCK, KV_HEADS, DIM] of keys, and as much of values. */
static cpa_kv_view new_cache(int64_t blocks) {
    const int64_t block_stride = BLOCK * KV_ROW;
    return (cpa_kv_view){.k = new_floats(blocks * block_stride),
                         .v = new_floats(blocks * block_stride),
                         .dtype = CPA_F32,
                         .block_size = BLOCK,
                         .num_blocks = blocks,
                         .kv_heads = KV_HEADS,
                         .k_dim = DIM,
                         .v_dim = DIM,
                         .k_block_stride = block_stride,
                         .k_token_stride = KV_ROW,
                         .k_head_stride = DIM,
                         .v_block_stride = block_stride,
                         .v_token_stride = KV_ROW,
                         .v_head_stride = DIM};
}

/* What a model would compute of this rank's tokens of a chunk: [n, heads, DIM], and where in the cache they go. */
typedef struct own_rows {
    int64_t n;
    int64_t position[CHUNK], slot[CHUNK];
    float *q, *k, *v, *out;
} own_rows;

/* Local token i of a rank lies in its block i / BLOCK, as its table has the blocks in order. */
static void compute_rows(own_rows *own, cpa_owner_map map, int64_t start, int64_t end) {
    const cpa_token_set mine = cpa_tokens_on(map, placement, rank);
    const int64_t first = cpa_tokens_before(map, mine, start);
    own->n = cpa_tokens_before(map, mine, end) - first;
    for (int64_t i = 0; i < own->n; i++) {
        own->slot[i] = first + i;
        own->position[i] = cpa_token_position(map, mine, first + i);
        for (int d = 0; d < Q_ROW; d++) own->q[i * Q_ROW + d] = 1;
        for (int d = 0; d < KV_ROW; d++) {
            own->k[i * KV_ROW + d] = 0.5f;
            own->v[i * KV_ROW + d] = (float)own->position[i];
        }
    }
}

/* The new tokens [start, end): into the cache, and attended over all that came before. The rows that are wrong. */
static int64_t step(cpa_context *context, const cpa_kv_view *cache, const int32_t *table, own_rows *own,
                    cpa_owner_map map, int64_t start, int64_t end) {
    compute_rows(own, map, start, end);
    const cpa_kv_write_args write = {
        .size = sizeof write, .tokens = own->n, .k = own->k, .v = own->v, .slot_mapping = own->slot, .kv = *cache};
    require(cpa_kv_write(&write, stream), cpa_stream_error(stream));

    const cpa_context_chunk chunk = {.start = start,
                                     .count = end - start,
                                     .placement = placement,
                                     .algorithm = end - start > 1 ? CPA_PASS_KV : CPA_PASS_Q,
                                     .block_table = table};
    require(cpa_context_plan(context, &chunk, 1), cpa_context_error(context)); /* once a step */

    const cpa_context_args args = {
        .size = sizeof args, .q = own->q, .kv = *cache, .mask = {.causal = 1}, .out = own->out};
    require(cpa_context_attend(context, &args, stream), cpa_context_error(context)); /* once a layer, on every rank */
    require(cpa_stream_sync(stream), cpa_stream_error(stream));

    int64_t wrong = 0;
    for (int64_t i = 0; i < own->n; i++) {
        const double want = 0.5 * (double)own->position[i];
        int off = 0;
        for (int d = 0; d < Q_ROW; d++) off |= !(fabs((double)own->out[i * Q_ROW + d] - want) <= 1e-4 * (want + 1));
        wrong += off;
    }
    return wrong;
}

/* The library never reads the environment: a program does. */
static cpa_comm *join(void) {
    const char *mine = getenv("RANK"), *all = getenv("WORLD_SIZE");
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    const cpa_comm_options options = {.size = sizeof options, .secret = getenv("JOB_SECRET")};
    cpa_comm *comm = NULL;
    cpa_error err;
    if (mine && all && host && port) {
        require(cpa_comm_from_store(host, atoi(port), atoi(mine), atoi(all), &options, &comm, &err), err.message);
    } else {
        require(cpa_comm_alone(&comm, &err), err.message);
    }
    return comm;
}

int main(int argc, char **argv) {
    const int64_t prompt = argc > 1 ? strtoll(argv[1], NULL, 10) : 8192;
    if (prompt < 1) return fprintf(stderr, "usage: long_prompt [TOKENS]\n"), 2;
    cpa_error err;
    cpa_comm *comm = join();
    rank = cpa_comm_rank(comm);
    ranks = cpa_comm_size(comm);
    const cpa_device_options device_options = {.size = sizeof device_options, .threads = 1};
    require(cpa_device_open(&device_options, &device, &err), err.message);
    require(cpa_stream_create(device, &stream, &err), err.message);

    const cpa_context_options options = {.size = sizeof options,
                                         .shape.q_heads = Q_HEADS,
                                         .shape.kv_heads = KV_HEADS,
                                         .shape.k_dim = DIM,
                                         .shape.v_dim = DIM,
                                         .block_size = BLOCK,
                                         .max_rows = CHUNK};
    cpa_context *context = NULL;
    require(cpa_context_create(comm, device, &options, &context, &err), err.message);

    const cpa_owner_map map = {.cp_size = ranks, .interleave = BLOCK};
    const int64_t tokens = cpa_shard_len(map, rank, prompt + 1), blocks = (tokens + BLOCK - 1) / BLOCK;
    const cpa_kv_view cache = new_cache(blocks + 1);
    int32_t *table = calloc((size_t)blocks + 1, sizeof *table);
    require(table ? CPA_OK : CPA_NO_MEMORY, "no memory for a table");
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)i;
    static own_rows own;
    own.q = new_floats(CHUNK * Q_ROW);
    own.k = new_floats(CHUNK * KV_ROW);
    own.v = new_floats(CHUNK * KV_ROW);
    own.out = new_floats(CHUNK * Q_ROW);

    int64_t wrong = 0;
    for (int64_t start = 0; start < prompt; start += CHUNK) {
        const int64_t end = start + CHUNK < prompt ? start + CHUNK : prompt;
        wrong += step(context, &cache, table, &own, map, start, end);
    }
    wrong += step(context, &cache, table, &own, map, prompt, prompt + 1);

    cpa_context_stats stats;
    require(cpa_context_get_stats(context, &stats, sizeof stats), cpa_context_error(context));
    printf("rank %d of %d: %lld of %lld tokens in %lld blocks, %.1f MiB sent, %lld rows wrong\n", rank, ranks,
           (long long)tokens, (long long)prompt + 1, (long long)blocks, (double)stats.bytes_sent / (1 << 20),
           (long long)wrong);

    float *memory[] = {own.q, own.k, own.v, own.out, cache.k, cache.v};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) cpa_device_free(device, memory[i]);
    free(table);
    cpa_context_destroy(context);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    cpa_comm_destroy(comm);
    return wrong > 0;
}
