/* Context attention of libcpattn: two sequences whose caches are sharded over the ranks of a communicator, attended by
 * pass-KV and by pass-Q and compared with a plain computation of the same rows.
 *
 *     for rank in 0 1 2; do
 *         RANK=$rank WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./context &
 *     done; wait
 *
 * The ranks meet over TCP; engine.c shows a communicator from MPI. Without these variables it is one rank.
 *
 * Prints the largest difference over all ranks and exits 1 if it is more than rounding. */
#include <cpattn/cpattn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQUENCES = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 32, BLOCK_SIZE = 16, MAX_TOKENS = 1024, MAX_RANKS = 64 };
enum tensor { Q, K, V };

/* The step: 200 new tokens of sequence 0 behind a prefix of 300, and one token of sequence 1 behind 700 (decode). */
static const int64_t chunk_start[SEQUENCES] = {300, 700};
static const int64_t chunk_count[SEQUENCES] = {200, 1};

static int rank, ranks;

/* Ends all ranks with the library's message. */
static void require(cpa_status status, const char *message) {
    if (status == CPA_OK) return;
    fprintf(stderr, "context: rank %d: %s: %s\n", rank, cpa_status_name(status), message);
    exit(1); /* which ends the waits of the others */
}

static void *new_memory(cpa_device *device, int64_t bytes) {
    void *memory = NULL;
    cpa_error err;
    require(cpa_device_alloc(device, bytes, &memory, &err), err.message);
    return memory;
}

/* Any element of the queries, keys and values, in [-1, 1], the same on every rank. */
static float element(enum tensor tensor, int sequence, int64_t position, int head, int d) {
    uint32_t x = (uint32_t)(((position * 8 + head) * 64 + d) * 8 + sequence * 4 + (int)tensor);
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (float)(x >> 8) / (float)(1 << 23) - 1;
}

static void fill_token(enum tensor tensor, int sequence, int64_t position, int heads, float *dst) {
    for (int h = 0; h < heads; h++) {
        for (int d = 0; d < DIM; d++) dst[h * DIM + d] = element(tensor, sequence, position, h, d);
    }
}

/* softmax(q k / sqrt(DIM)) v over the positions 0..position, in float64; the largest difference from `out`. */
static double difference_of_row(int sequence, int64_t position, int head, const float *out) {
    static double weight[MAX_TOKENS];
    int kv_head = head / (Q_HEADS / KV_HEADS);
    double sum = 0, largest = 0;
    for (int64_t t = 0; t <= position; t++) {
        double score = 0;
        for (int d = 0; d < DIM; d++) {
            score += (double)element(Q, sequence, position, head, d) * (double)element(K, sequence, t, kv_head, d);
        }
        weight[t] = exp(score / sqrt(DIM)); /* scores are small: no maximum is needed */
        sum += weight[t];
    }
    for (int d = 0; d < DIM; d++) {
        double want = 0;
        for (int64_t t = 0; t <= position; t++) want += weight[t] / sum * (double)element(V, sequence, t, kv_head, d);
        double difference = fabs((double)out[d] - want);
        if (!(difference <= largest)) largest = difference; /* keeps a NaN */
    }
    return largest;
}

/* Every sequence is sharded over the ranks, from rank 0 on. */
static const cpa_placement placement = {CPA_SHARDED, 0};

/* The shard of this rank: its blocks, and the keys and values of the tokens that it owns, cached and new. */
typedef struct shard {
    cpa_kv_view kv;
    int32_t tables[SEQUENCES][MAX_TOKENS / BLOCK_SIZE];
} shard;

static void fill_shard(shard *s, cpa_owner_map map, cpa_device *device, cpa_stream *stream) {
    int32_t next_block = 0;
    cpa_kv_view kv = {.dtype = CPA_F32,
                      .block_size = BLOCK_SIZE,
                      .num_blocks = SEQUENCES * MAX_TOKENS / BLOCK_SIZE,
                      .kv_heads = KV_HEADS,
                      .k_dim = DIM,
                      .v_dim = DIM,
                      .k_block_stride = BLOCK_SIZE * KV_HEADS * DIM,
                      .k_token_stride = KV_HEADS * DIM,
                      .k_head_stride = DIM,
                      .v_block_stride = BLOCK_SIZE * KV_HEADS * DIM,
                      .v_token_stride = KV_HEADS * DIM,
                      .v_head_stride = DIM};
    int64_t cache_bytes = kv.num_blocks * kv.k_block_stride * (int64_t)sizeof(float);
    kv.k = new_memory(device, cache_bytes);
    kv.v = new_memory(device, cache_bytes);
    s->kv = kv;

    for (int sequence = 0; sequence < SEQUENCES; sequence++) {
        cpa_token_set own = cpa_tokens_on(map, placement, rank);
        int64_t tokens = cpa_tokens_before(map, own, chunk_start[sequence] + chunk_count[sequence]);
        for (int64_t i = 0; i < tokens; i++) {
            if (i % BLOCK_SIZE == 0) s->tables[sequence][i / BLOCK_SIZE] = next_block++;
            float k[KV_HEADS * DIM], v[KV_HEADS * DIM];
            int64_t position = cpa_token_position(map, own, i);
            fill_token(K, sequence, position, KV_HEADS, k);
            fill_token(V, sequence, position, KV_HEADS, v);
            int64_t cache_slot = (int64_t)s->tables[sequence][i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE;
            cpa_kv_write_args args = {
                .size = sizeof args, .tokens = 1, .k = k, .v = v, .slot_mapping = &cache_slot, .kv = kv};
            require(cpa_kv_write(&args, stream), cpa_stream_error(stream));
            require(cpa_stream_sync(stream), cpa_stream_error(stream)); /* k and v leave scope */
        }
    }
}

/* Attends the step by one algorithm; the largest difference of this rank's rows. */
static double attend(cpa_context *context, const shard *s, cpa_owner_map map, cpa_algorithm algorithm,
                     cpa_device *device, cpa_stream *stream) {
    cpa_context_chunk chunks[SEQUENCES];
    for (int i = 0; i < SEQUENCES; i++) {
        chunks[i] = (cpa_context_chunk){.start = chunk_start[i],
                                        .count = chunk_count[i],
                                        .placement = placement,
                                        .algorithm = algorithm,
                                        .block_table = s->tables[i]};
    }
    require(cpa_context_plan(context, chunks, SEQUENCES), cpa_context_error(context));

    /* This rank's rows: the new tokens that it owns, chunk after chunk, in order. */
    int64_t rows = cpa_context_rows(context, chunks, SEQUENCES), row = 0;
    static int64_t row_position[MAX_TOKENS];
    static int row_sequence[MAX_TOKENS];
    float *q = new_memory(device, (rows + 1) * Q_HEADS * DIM * (int64_t)sizeof(float));
    float *out = new_memory(device, (rows + 1) * Q_HEADS * DIM * (int64_t)sizeof(float));
    cpa_token_set own = cpa_tokens_on(map, placement, rank);
    for (int i = 0; i < SEQUENCES; i++) {
        int64_t end = cpa_tokens_before(map, own, chunk_start[i] + chunk_count[i]);
        for (int64_t local = cpa_tokens_before(map, own, chunk_start[i]); local < end; local++, row++) {
            row_sequence[row] = i;
            row_position[row] = cpa_token_position(map, own, local);
            fill_token(Q, i, row_position[row], Q_HEADS, q + row * Q_HEADS * DIM);
        }
    }

    cpa_context_args args = {.size = sizeof args, .q = q, .kv = s->kv, .mask = {.causal = 1}, .out = out};
    require(cpa_context_attend(context, &args, stream), cpa_context_error(context)); /* collective; once a layer */
    require(cpa_stream_sync(stream), cpa_stream_error(stream));

    double largest = 0;
    for (row = 0; row < rows; row++) {
        for (int head = 0; head < Q_HEADS; head++) {
            const float *got = out + (row * Q_HEADS + head) * DIM;
            double difference = difference_of_row(row_sequence[row], row_position[row], head, got);
            if (!(difference <= largest)) largest = difference;
        }
    }
    cpa_device_free(device, q);
    cpa_device_free(device, out);
    return largest;
}

/* The ranks that the environment names; the library itself never looks there. */
static cpa_status join(cpa_comm **out, cpa_error *err) {
    const char *mine = getenv("RANK"), *all = getenv("WORLD_SIZE");
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    if (!mine || !all || !host || !port) return cpa_comm_alone(out, err);
    /* What all ranks are told and nobody else, so that no stranger takes the place of one. */
    const cpa_comm_options options = {.size = sizeof options, .secret = getenv("JOB_SECRET")};
    return cpa_comm_from_store(host, atoi(port), atoi(mine), atoi(all), &options, out, err);
}

int main(void) {
    cpa_device_options device_options = {.size = sizeof device_options, .threads = 1};
    cpa_context_options options = {.size = sizeof options,
                                   .shape.q_heads = Q_HEADS,
                                   .shape.kv_heads = KV_HEADS,
                                   .shape.k_dim = DIM,
                                   .shape.v_dim = DIM,
                                   .block_size = BLOCK_SIZE,
                                   .max_rows = MAX_TOKENS};
    cpa_device *device = NULL;
    cpa_stream *stream = NULL;
    cpa_comm *comm = NULL;
    cpa_context *context = NULL;
    cpa_error err;
    require(join(&comm, &err), err.message);
    rank = cpa_comm_rank(comm);
    ranks = cpa_comm_size(comm);
    require(cpa_device_open(&device_options, &device, &err), err.message);
    require(cpa_stream_create(device, &stream, &err), err.message);
    require(cpa_context_create(comm, device, &options, &context, &err), err.message);

    cpa_owner_map map = {.cp_size = ranks, .interleave = BLOCK_SIZE};
    static shard s;
    fill_shard(&s, map, device, stream);

    int wrong = 0;
    for (cpa_algorithm algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        double mine = attend(context, &s, map, algorithm, device, stream);
        double all[MAX_RANKS], largest = 0;
        require(cpa_comm_all_gather(comm, &mine, sizeof mine, all, &err), err.message);
        for (int r = 0; r < ranks; r++) {
            if (!(all[r] <= largest)) largest = all[r]; /* keeps a NaN */
        }
        if (rank == 0) {
            printf("context: %s on %d ranks differs from plain attention by at most %.2g\n",
                   cpa_algorithm_name(algorithm), ranks, largest);
        }
        if (!(largest <= 1e-5)) wrong = 1;
    }

    cpa_device_free(device, s.kv.k);
    cpa_device_free(device, s.kv.v);
    cpa_context_destroy(context);
    cpa_stream_destroy(stream);
    cpa_device_close(device);
    cpa_comm_destroy(comm);
    return wrong;
}
