/* Times the operations of the CUDA back end with device events: cuda_bench [copy|prefill|portable|decode|merge|kv ...].
 * Each line says what was measured, the median time, the rate, and for attend how many sampled rows disagree with the
 * float64 reference. Inputs are those of synthesize; block tables are random permutations. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_fixture.h"
#include "src/reference.h"

enum { WARM_UP = 3, REPEATS = 9 };

void cuda_bench_read(const void *from, int64_t bytes, void *to, cudaStream_t stream);

static cpa_cuda_site site;
static const cpa_kernel_table *ops;
static double copy_bandwidth, read_bandwidth; /* bytes/s; of a copy, read and written */

static void check(cpa_status status) {
    if (status == CPA_OK) return;
    printf("failed: %s\n", cpa_stream_error(site.stream));
    exit(1);
}

static void *allocate(int64_t bytes) {
    void *memory = NULL;
    cpa_error err = {0};
    if (cpa_device_alloc(site.device, bytes, &memory, &err) != CPA_OK) {
        printf("failed: %s\n", err.message);
        exit(1);
    }
    return memory;
}

static uint64_t mixed(uint64_t counter) {
    uint64_t z = counter * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int compare_floats(const void *a, const void *b) {
    return *(const float *)a < *(const float *)b ? -1 : *(const float *)a > *(const float *)b;
}

/* `calls` calls as one graph, without what the host does for each. */
static cudaGraphExec_t graph_of(void (*run)(void *ctx), void *ctx, int calls) {
    cudaStream_t stream = cpa_cuda_handle(site.stream);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < calls; i++) run(ctx);
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    return executable;
}

/* The median time of a call, in seconds. Short calls are timed several at a time, in a graph. */
static double time_of(void (*run)(void *ctx), void *ctx) {
    const float enough_ms = 0.3f;
    const int many = 20;
    cudaStream_t stream = cpa_cuda_handle(site.stream);
    cudaGraphExec_t graph = NULL;
    cudaEvent_t begin, end;
    float ms[REPEATS];
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = -WARM_UP; i < REPEATS; i++) {
        float elapsed;
        cudaEventRecord(begin, stream);
        if (graph) {
            cudaGraphLaunch(graph, stream);
        } else {
            run(ctx);
        }
        cudaEventRecord(end, stream);
        check(cpa_stream_sync(site.stream));
        cudaEventElapsedTime(&elapsed, begin, end);
        if (i >= 0) ms[i] = graph ? elapsed / (float)many : elapsed;
        if (i == -WARM_UP && elapsed < enough_ms) graph = graph_of(run, ctx, many);
    }
    qsort(ms, REPEATS, sizeof *ms, compare_floats);
    if (graph) cudaGraphExecDestroy(graph);
    cudaEventDestroy(end);
    cudaEventDestroy(begin);
    return ms[REPEATS / 2] * 1e-3;
}

/* rows of a tensor on the device; row i is token mixed(i) at position i mod period. */
static void *synthesized(cpa_synth_tensor tensor, int64_t rows, int64_t period, int32_t heads, int32_t kv_heads,
                         int32_t dim, cpa_dtype dtype) {
    uint32_t *tokens = malloc((size_t)rows * sizeof *tokens);
    int64_t *positions = malloc((size_t)rows * sizeof *positions);
    for (int64_t i = 0; i < rows; i++) tokens[i] = (uint32_t)mixed((uint64_t)i), positions[i] = i % period;
    cpa_synth_args args = {.tensor = tensor, .seed = 1, .heads = heads, .kv_heads = kv_heads, .dim = dim, .rows = rows};
    args.tokens = cpa_cuda_upload(&site, tokens, rows * (int64_t)sizeof *tokens);
    args.positions = cpa_cuda_upload(&site, positions, rows * (int64_t)sizeof *positions);
    args.dtype = dtype;
    args.out = allocate(rows * heads * dim * cpa_dtype_bytes(dtype));
    check(ops->synthesize(&args, site.stream));
    check(cpa_stream_sync(site.stream));
    cudaFree((void *)(uintptr_t)args.tokens);
    cudaFree((void *)(uintptr_t)args.positions);
    free(positions);
    free(tokens);
    return args.out;
}

typedef struct bytes_case {
    void *from, *to;
    int64_t bytes;
} bytes_case;

static void run_copy(void *ctx) {
    bytes_case *c = ctx;
    check(ops->copy(c->to, c->from, c->bytes, site.stream));
}

static void run_read(void *ctx) {
    bytes_case *c = ctx;
    cuda_bench_read(c->from, c->bytes, c->to, cpa_cuda_handle(site.stream));
}

/* The memory stays: what is allocated in the place of large buffers that were freed can be up to 15% slower (seen on an
 * H100), and the parts that follow are to be compared with each other. */
static void bench_copy(void) {
    bytes_case c = {.bytes = (int64_t)4 << 30};
    c.from = allocate(c.bytes), c.to = allocate(c.bytes);
    cudaMemset(c.from, 7, (size_t)c.bytes);
    copy_bandwidth = 2.0 * (double)c.bytes / time_of(run_copy, &c);
    read_bandwidth = (double)c.bytes / time_of(run_read, &c);
    printf("copy %.0f GB/s read and written, read %.0f GB/s\n", copy_bandwidth * 1e-9, read_bandwidth * 1e-9);
}

typedef struct attend_shape {
    cpa_dtype dtype;
    int32_t q_heads, kv_heads, k_dim, v_dim, block_size;
    int64_t sequences, queries, length; /* the last `queries` tokens of each sequence of `length` */
    int32_t causal;
    int32_t ragged; /* sequence i has length * (i % 8 + 1) / 8 tokens */
    int32_t ranks;  /* queries and keys are the shards at slots 0 and 1 of a sequence of length * ranks; 0: no shards */
    cpa_dtype kv_dtype; /* a quantised one, or the cache has the dtype of the queries */
    float tensor_scale; /* fp8: of keys and of values; 0: each row has its own */
} attend_shape;

typedef struct attend_run {
    cpa_attend_plan *plan;
    cpa_attend_args args;
} attend_run;

static void run_attend(void *ctx) {
    attend_run *r = ctx;
    check(cpa_attend(r->plan, &r->args, site.stream));
}

static int64_t length_of(const attend_shape *s, int64_t sequence) {
    int64_t length = s->ragged ? s->length * (sequence % 8 + 1) / 8 : s->length;
    return length > s->queries ? length : s->queries;
}

/* Compares some rows of the result with the reference; returns how many are wrong. */
static int wrong_rows(const attend_shape *s, const attend_run *r, const int32_t *tables, int64_t table_stride,
                      const float *lse, int samples) {
    int64_t k_row = s->kv_heads * (int64_t)s->k_dim, v_row = s->kv_heads * (int64_t)s->v_dim;
    int64_t row_bytes = s->q_heads * (int64_t)s->v_dim * 2;
    uint16_t *k = malloc((size_t)(s->length * k_row * 2)), *v = malloc((size_t)(s->length * v_row * 2));
    uint16_t *out = malloc((size_t)row_bytes), q[CPA_MAX_HEAD_DIM];
    int wrong = 0;
    for (int i = 0; i < samples; i++) {
        int64_t sequence = (int64_t)(mixed((uint64_t)i) % (uint64_t)s->sequences), length = length_of(s, sequence);
        int64_t query = i == 0 ? s->queries - 1 : (int64_t)(mixed((uint64_t)i + 50) % (uint64_t)s->queries);
        int32_t head = (int32_t)(mixed((uint64_t)i + 100) % (uint64_t)s->q_heads);
        int32_t kv_head = head / (s->q_heads / s->kv_heads);
        int64_t row = sequence * s->queries + query, last = s->causal ? length - s->queries + query : length - 1;
        if (s->ranks > 1) last = (last / s->block_size) * s->block_size - 1; /* slot 1 of a round comes after slot 0 */
        for (int64_t t = 0; t <= last; t += s->block_size) {
            int64_t block = tables[sequence * table_stride + t / s->block_size];
            cudaMemcpy(k + t * k_row, (char *)r->args.kv.k + block * s->block_size * k_row * 2,
                       (size_t)(s->block_size * k_row * 2), cudaMemcpyDeviceToHost);
            cudaMemcpy(v + t * v_row, (char *)r->args.kv.v + block * s->block_size * v_row * 2,
                       (size_t)(s->block_size * v_row * 2), cudaMemcpyDeviceToHost);
        }
        cpa_reference_row ref;
        float wide_q[CPA_MAX_HEAD_DIM], wide_k[CPA_MAX_HEAD_DIM], wide_v[CPA_MAX_HEAD_DIM], got_lse;
        double want[CPA_MAX_HEAD_DIM], want_lse, tolerance;
        cudaMemcpy(q, (const char *)r->args.q + (row * s->q_heads + head) * s->k_dim * 2, (size_t)s->k_dim * 2,
                   cudaMemcpyDeviceToHost);
        cpa_reference_widen(q, s->dtype, s->k_dim, wide_q);
        cpa_reference_begin(&ref, wide_q, s->k_dim, s->v_dim, s->dtype, 0);
        for (int64_t t = 0; t <= last; t++) {
            cpa_reference_widen(k + t * k_row + kv_head * s->k_dim, s->dtype, s->k_dim, wide_k);
            cpa_reference_widen(v + t * v_row + kv_head * s->v_dim, s->dtype, s->v_dim, wide_v);
            cpa_reference_add(&ref, wide_k, wide_v);
        }
        cpa_reference_end(&ref, want, &want_lse, &tolerance);
        cudaMemcpy(out, (const char *)r->args.out + row * row_bytes, (size_t)row_bytes, cudaMemcpyDeviceToHost);
        cudaMemcpy(&got_lse, lse + row * s->q_heads + head, sizeof got_lse, cudaMemcpyDeviceToHost);
        cpa_reference_widen(out + head * s->v_dim, s->dtype, s->v_dim, wide_v);
        double error = cpa_reference_error(wide_v, want, s->v_dim);
        wrong += !(error <= tolerance && fabs((double)got_lse - want_lse) <= cpa_reference_lse_tolerance(s->dtype));
    }
    free(out);
    free(v);
    free(k);
    return wrong;
}

/* Moves the keys and values of a run into a quantised cache. */
static void quantise(const attend_shape *s, attend_run *r, int64_t tokens) {
    cpa_kv_view *kv = &r->args.kv;
    cpa_kv_write_args write = {.size = sizeof write, .tokens = tokens, .dtype = s->dtype, .k = kv->k, .v = kv->v};
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    int64_t *device_slots = cpa_cuda_upload(&site, slots, tokens * (int64_t)sizeof *slots);
    kv->dtype = s->kv_dtype;
    kv->k_scale = kv->v_scale = s->tensor_scale;
    kv->k =
        allocate(kv->num_blocks * cpa_kv_block_bytes(kv->dtype, kv->k_scale, kv->block_size, kv->kv_heads, kv->k_dim));
    kv->v =
        allocate(kv->num_blocks * cpa_kv_block_bytes(kv->dtype, kv->v_scale, kv->block_size, kv->kv_heads, kv->v_dim));
    write.slot_mapping = device_slots;
    write.kv = *kv;
    check(cpa_kv_write(&write, site.stream));
    check(cpa_stream_sync(site.stream));
    cudaFree(device_slots);
    cudaFree((void *)(uintptr_t)write.v);
    cudaFree((void *)(uintptr_t)write.k);
    free(slots);
}

static void bench_attend(const attend_shape *s, cpa_cuda_path path, const char *name) {
    int64_t table_stride = (s->length + s->block_size - 1) / s->block_size, blocks = s->sequences * table_stride;
    int64_t tokens = blocks * s->block_size, rows = s->sequences * s->queries;
    cpa_attend_item *items = malloc((size_t)s->sequences * sizeof *items);
    int32_t *tables = malloc((size_t)blocks * sizeof *tables);
    double flops = 0, bytes = 0;
    for (int64_t i = 0; i < blocks; i++) tables[i] = (int32_t)i;
    for (int64_t i = blocks - 1; i > 0; i--) {
        int64_t j = (int64_t)(mixed((uint64_t)i) % (uint64_t)(i + 1));
        int32_t swapped = tables[i];
        tables[i] = tables[j], tables[j] = swapped;
    }
    for (int64_t i = 0; i < s->sequences; i++) {
        int64_t length = length_of(s, i);
        items[i] = (cpa_attend_item){.q_row = i * s->queries,
                                     .q_count = s->queries,
                                     .q_first = length - s->queries,
                                     .k_count = length,
                                     .table = i * table_stride};
        double pairs = s->causal ? (double)s->queries * ((double)length - ((double)s->queries - 1) / 2)
                                 : (double)s->queries * (double)length;
        flops += 2.0 * s->q_heads * (s->k_dim + s->v_dim) * pairs;
        bytes += 2.0 * s->kv_heads * (s->k_dim + s->v_dim) * (double)length;
    }
    attend_run r = {.args = {.size = sizeof r.args, .q_dtype = s->dtype}};
    float *lse = allocate(rows * s->q_heads * 4);
    r.args.q = synthesized(CPA_SYNTH_Q, rows, s->queries, s->q_heads, s->kv_heads, s->k_dim, s->dtype);
    r.args.kv = (cpa_kv_view){.dtype = s->dtype,
                              .block_size = s->block_size,
                              .num_blocks = blocks,
                              .kv_heads = s->kv_heads,
                              .k_dim = s->k_dim,
                              .v_dim = s->v_dim};
    r.args.kv.k = synthesized(CPA_SYNTH_K, tokens, s->length, s->kv_heads, s->kv_heads, s->k_dim, s->dtype);
    r.args.kv.v = synthesized(CPA_SYNTH_V, tokens, s->length, s->kv_heads, s->kv_heads, s->v_dim, s->dtype);
    const int quantised = cpa_dtype_is_quantised(s->kv_dtype);
    if (quantised) {
        quantise(s, &r, tokens);
        bytes = bytes / 2 + (double)s->kv_heads * (double)(bytes / 2 / s->kv_heads / (s->k_dim + s->v_dim)) *
                                (double)(2 * cpa_kv_scale_bytes(s->kv_dtype, s->tensor_scale));
    }
    r.args.mask.causal = s->causal;
    r.args.state.lse = lse;
    r.args.out = allocate(rows * s->q_heads * s->v_dim * 2);
    cpa_error err = {0};
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = {1, s->block_size},
                              .q_heads = s->q_heads,
                              .kv_heads = s->kv_heads,
                              .k_dim = s->k_dim,
                              .v_dim = s->v_dim,
                              .block_size = s->block_size,
                              .items = items,
                              .n_items = s->sequences,
                              .block_tables = tables,
                              .n_table_entries = blocks};
    cpa_cuda_site_use(&site, path);
    if (cpa_attend_plan_create(site.device, &r.plan, &err) != CPA_OK ||
        cpa_attend_plan_set(r.plan, &batch, &err) != CPA_OK) {
        printf("failed: %s\n", err.message);
        exit(1);
    }
    double seconds = time_of(run_attend, &r);
    int samples = quantised ? 0 : s->queries > 1 ? 3 : 4; /* tests check quantised caches */
    int wrong = wrong_rows(s, &r, tables, table_stride, lse, samples);
    printf(
        "%-8s %-8s %s d %3d/%3d heads %d/%d page %3d %s %4lld x %5lld of %6lld %s: %9.1f us %7.1f TFLOP/s %6.0f GB/s",
        name, cpa_cuda_path_name(path),
        s->kv_dtype == CPA_INT8       ? "int8"
        : s->kv_dtype == CPA_FP8_E4M3 ? (s->tensor_scale != 0 ? "fp8t" : "fp8r")
        : s->dtype == CPA_BF16        ? "bf16"
                                      : "fp16",
        s->k_dim, s->v_dim, s->q_heads, s->kv_heads, s->block_size, s->causal ? "causal" : "full",
        (long long)s->sequences, (long long)s->queries, (long long)s->length, s->ragged ? "ragged" : "", seconds * 1e6,
        flops / seconds * 1e-12, bytes / seconds * 1e-9);
    if (read_bandwidth > 0) printf(" %5.1f%% of read", 100 * bytes / seconds / read_bandwidth);
    printf(" wrong %d/%d\n", wrong, samples);
    fflush(stdout);
    cpa_attend_plan_destroy(r.plan);
    cudaFree(r.args.out);
    cudaFree(r.args.kv.v);
    cudaFree(r.args.kv.k);
    cudaFree((void *)(uintptr_t)r.args.q);
    cudaFree(lse);
    free(tables);
    free(items);
}

static void bench_prefill(cpa_cuda_path path) {
    attend_shape s = {.dtype = CPA_BF16,
                      .q_heads = 32,
                      .kv_heads = 8,
                      .k_dim = 128,
                      .v_dim = 128,
                      .block_size = 64,
                      .sequences = 1,
                      .causal = 1};
    for (int64_t length = 8192; length <= 65536; length *= 2) {
        s.queries = s.length = length;
        bench_attend(&s, path, "prefill");
    }
    if (path != site.best) return;
    s.queries = s.length = 16384;
    for (int32_t page = 16; page <= 256; page *= 16) {
        s.block_size = page;
        bench_attend(&s, path, "prefill");
    }
    s.block_size = 64;
    s.causal = 0;
    bench_attend(&s, path, "prefill");
    s.causal = 1;
    static const int32_t widths[][2] = {{64, 64}, {96, 96}, {192, 128}, {256, 256}};
    for (int i = 0; i < 4; i++) {
        s.k_dim = widths[i][0], s.v_dim = widths[i][1];
        bench_attend(&s, path, "prefill");
    }
    s.k_dim = s.v_dim = 128;
    s.dtype = CPA_F16;
    bench_attend(&s, path, "prefill");
    s.dtype = CPA_BF16;
    s.ranks = 4;
    bench_attend(&s, path, "shard");
    s.ranks = 0;
    s.queries = 8192, s.length = 131072;
    bench_attend(&s, path, "chunk");
    s.queries = 64, s.length = 131072;
    bench_attend(&s, path, "chunk");
    s.sequences = 16, s.queries = 1024, s.length = 8192, s.ragged = 1;
    bench_attend(&s, path, "chunk");
}

static void bench_decode(cpa_cuda_path path) {
    static const int64_t cases[][3] = {{64, 16384, 0}, {64, 16384, 1}, {1, 1024, 0},   {1, 16384, 0},
                                       {1, 131072, 0}, {16, 1024, 0},  {16, 16384, 0}, {16, 131072, 0},
                                       {128, 1024, 0}, {128, 16384, 0}};
    attend_shape s = {.dtype = CPA_BF16,
                      .q_heads = 32,
                      .kv_heads = 8,
                      .k_dim = 128,
                      .v_dim = 128,
                      .block_size = 64,
                      .queries = 1,
                      .causal = 1};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        s.sequences = cases[i][0], s.length = cases[i][1], s.ragged = (int32_t)cases[i][2];
        bench_attend(&s, path, "decode");
    }
    s.sequences = 64, s.length = 16384;
    s.block_size = 16;
    bench_attend(&s, path, "decode");
    s.block_size = 64;
    s.queries = 4;
    bench_attend(&s, path, "decode");
    s.queries = 1;
    s.q_heads = 64;
    bench_attend(&s, path, "decode");
    s.q_heads = 32;
    static const int32_t widths[][2] = {{64, 64}, {192, 128}, {256, 256}};
    for (int i = 0; i < 3; i++) {
        s.k_dim = widths[i][0], s.v_dim = widths[i][1];
        bench_attend(&s, path, "decode");
    }
}

/* bf16 beside caches of int8 and fp8 (a scale a row, a scale a tensor), decode and prefill. */
static void bench_quantised(void) {
    static const int64_t cases[][3] = {{64, 16384, 1}, {16, 131072, 1}, {1, 131072, 1}, {1, 16384, 16384}};
    static const struct {
        cpa_dtype dtype;
        float scale;
    } kinds[] = {{CPA_BF16, 0}, {CPA_INT8, 0}, {CPA_FP8_E4M3, 0}, {CPA_FP8_E4M3, 0.0625f}};
    attend_shape s = {
        .dtype = CPA_BF16, .q_heads = 32, .kv_heads = 8, .k_dim = 128, .v_dim = 128, .block_size = 64, .causal = 1};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int k = 0; k < 4; k++) {
            s.sequences = cases[i][0], s.length = cases[i][1], s.queries = cases[i][2];
            s.kv_dtype = kinds[k].dtype, s.tensor_scale = kinds[k].scale;
            bench_attend(&s, site.best, s.queries > 1 ? "prefill" : "decode");
        }
    }
}

static void run_merge(void *ctx) {
    check(cpa_merge(ctx, site.stream));
}

static void bench_merge(void) {
    enum { MOST = 8 };
    int64_t rows = 32768;
    int32_t heads = 32, v_dim = 128;
    cpa_partial states[MOST];
    for (int i = 0; i < MOST; i++) {
        states[i] = (cpa_partial){.o = allocate(rows * heads * v_dim * 4), .lse = allocate(rows * heads * 4)};
        cudaMemset(states[i].o, 0x3e + i, (size_t)(rows * heads * v_dim * 4));
        cudaMemset(states[i].lse, 0x3e + i % 2, (size_t)(rows * heads * 4));
    }
    void *out = allocate(rows * heads * v_dim * 4);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        for (int n = 2; n <= MOST; n *= 2) {
            cpa_merge_args args = {.size = sizeof args,
                                   .rows = rows,
                                   .heads = heads,
                                   .v_dim = v_dim,
                                   .states = states,
                                   .n_states = n,
                                   .out_dtype = bf16 ? CPA_BF16 : CPA_F32,
                                   .out = out};
            args.out_lse = states[0].lse;
            double bytes = (double)(rows * heads) * (n * (v_dim * 4.0 + 4) + v_dim * (bf16 ? 2.0 : 4.0) + 4);
            double seconds = time_of(run_merge, &args);
            printf("merge %lld rows of %d heads, %d states to %s: %.1f us %.0f GB/s %.1f%% of copy\n", (long long)rows,
                   heads, n, bf16 ? "bf16" : "fp32", seconds * 1e6, bytes / seconds * 1e-9,
                   100 * bytes / seconds / copy_bandwidth);
        }
    }
    cudaFree(out);
    for (int i = 0; i < MOST; i++) cudaFree(states[i].o), cudaFree(states[i].lse);
}

static void run_kv_write(void *ctx) {
    check(cpa_kv_write(ctx, site.stream));
}
static void run_kv_copy(void *ctx) {
    check(cpa_kv_copy(ctx, site.stream));
}
static void run_kv_pack(void *ctx) {
    check(cpa_kv_pack(ctx, site.stream));
}

static void bench_kv(void) {
    enum { BLOCK_SIZE = 64, BLOCKS = 2048 };
    int64_t tokens = (int64_t)BLOCKS * BLOCK_SIZE, heads = 8, dim = 128, floats = tokens * heads * dim;
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    int64_t(*pairs)[2] = malloc(BLOCKS * sizeof *pairs);
    int32_t *table = malloc(BLOCKS * sizeof *table);
    for (int64_t i = 0; i < BLOCKS; i++) {
        table[i] = (int32_t)((i * 773) % BLOCKS);
        pairs[i][0] = i, pairs[i][1] = table[i];
    }
    for (int64_t i = 0; i < tokens; i++) slots[i] = (int64_t)table[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE;
    cpa_kv_view view = {
        .dtype = CPA_BF16, .block_size = BLOCK_SIZE, .num_blocks = BLOCKS, .kv_heads = 8, .k_dim = 128, .v_dim = 128};
    cpa_kv_view other = view;
    view.k = allocate(floats * 2), view.v = allocate(floats * 2);
    other.k = allocate(floats * 2), other.v = allocate(floats * 2);
    for (int dtype = 0; dtype < 2; dtype++) {
        int64_t from = cpa_dtype_bytes((cpa_dtype)dtype);
        cpa_kv_write_args write = {.size = sizeof write, .tokens = tokens, .dtype = (cpa_dtype)dtype, .kv = view};
        write.k = allocate(floats * from), write.v = allocate(floats * from);
        cudaMemset((void *)(uintptr_t)write.k, 7, (size_t)(floats * from));
        cudaMemset((void *)(uintptr_t)write.v, 7, (size_t)(floats * from));
        write.slot_mapping = cpa_cuda_upload(&site, slots, tokens * (int64_t)sizeof *slots);
        double bytes = 2.0 * (double)floats * (double)(from + 2), seconds = time_of(run_kv_write, &write);
        printf("kv_write %lld tokens from %s: %.1f us %.0f GB/s %.1f%% of copy\n", (long long)tokens,
               dtype ? "bf16" : "fp32", seconds * 1e6, bytes / seconds * 1e-9, 100 * bytes / seconds / copy_bandwidth);
        cudaFree((void *)(uintptr_t)write.k);
        cudaFree((void *)(uintptr_t)write.v);
    }
    bytes_case plain = {view.k, other.k, floats * 2};
    double plain_seconds = time_of(run_copy, &plain);
    printf("copy of %lld bytes: %.1f us %.0f GB/s\n", (long long)plain.bytes, plain_seconds * 1e6,
           2 * (double)plain.bytes / plain_seconds * 1e-9);
    double bytes = 2.0 * (double)floats * 4;
    cpa_kv_copy_args copy = {.size = sizeof copy, .src = view, .dst = other, .n_pairs = BLOCKS};
    copy.pairs = (const int64_t(*)[2])pairs;
    double seconds = time_of(run_kv_copy, &copy);
    printf("kv_copy %d blocks: %.1f us %.0f GB/s %.1f%% of copy\n", BLOCKS, seconds * 1e6, bytes / seconds * 1e-9,
           100 * bytes / seconds / copy_bandwidth);
    cpa_kv_span span = {.count = tokens};
    cpa_kv_pack_args pack = {.size = sizeof pack, .src = view, .dst = other, .block_tables = table, .spans = &span};
    pack.n_spans = 1;
    seconds = time_of(run_kv_pack, &pack);
    printf("kv_pack %lld tokens: %.1f us %.0f GB/s %.1f%% of copy\n", (long long)tokens, seconds * 1e6,
           bytes / seconds * 1e-9, 100 * bytes / seconds / copy_bandwidth);
    cudaFree(other.v);
    cudaFree(other.k);
    cudaFree(view.v);
    cudaFree(view.k);
    free(table);
    free(pairs);
    free(slots);
}

int main(int argc, char **argv) {
    if (!cpa_cuda_site_open(&site)) return CPA_TEST_SKIPPED;
    ops = site.device->kernels;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "copy") == 0) bench_copy();
        if (strcmp(argv[i], "prefill") == 0) bench_prefill(site.best);
        if (strcmp(argv[i], "portable") == 0) bench_prefill(CPA_CUDA_PORTABLE);
        if (strcmp(argv[i], "decode") == 0) bench_decode(site.best);
        if (strcmp(argv[i], "quant") == 0) bench_quantised();
        if (strcmp(argv[i], "merge") == 0) bench_merge();
        if (strcmp(argv[i], "kv") == 0) bench_kv();
        fflush(stdout);
    }
    cpa_cuda_site_close(&site);
    return 0;
}
