/* The kernels that an attend launches on a device are those that its plan tells: nodes of a graph that captures it. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device/cuda.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { HEADS = 32, KV_HEADS = 8, TOKENS = 512, MOST_ROWS = TOKENS, POOL = 64 << 20 };
enum { LATENT = 576, LATENT_VALUES = 512 }; /* the width of keys that hold their values, and of these */

static cpa_device *device;
static cpa_stream *stream;

/* An attend of `rows` last tokens of a sequence. */
typedef struct launch_case {
    cpa_dtype q_dtype, kv_dtype;
    cpa_kv_layout layout;
    int32_t block_size, dim;
    int64_t rows;
    int with_state, softcap;
} launch_case;

/* What begins the mangled names of the kernels that a row of the table launches: the length of a name, and it. */
static const struct {
    const char *name, *kernels[2];
} LAUNCHES[] = {{"latent", {"13attend_latentI"}},
                {"wide", {"13attend_latentI"}},
                {"decode_blocks", {"20attend_decode_blocksI"}},
                {"decode_packed", {"20attend_decode_packedI"}},
                {"decode", {"13attend_decodeI"}},
                {"decode_ruled", {"13attend_decodeI"}},
                {"decode_ruled_caches", {"13attend_decodeI"}},
                {"persistent", {"17attend_persistentI"}},
                {"hopper", {"13attend_hopperI"}},
                {"widen+hopper", {"13attend_hopperI", "attend_widen"}},
                {"portable_ruled_codes", {"15attend_portableI"}},
                {"portable", {"15attend_portableI"}},
                {"widen+portable", {"15attend_portableI", "attend_widen"}},
                {"simple", {"13attend_simpleI"}}};
enum { N_LAUNCHES = sizeof LAUNCHES / sizeof *LAUNCHES };

/* ---- what is launched ---- */

enum { MOST_NODES = 64 };
typedef struct launched {
    char names[MOST_NODES][512];
    size_t n;
} launched;

/* The kernels of the graph that the stream is captured in, less those that join states. */
static void list_kernels(cudaStream_t handle, launched *out) {
    enum cudaStreamCaptureStatus status;
    cudaGraph_t graph;
    cudaGraphNode_t nodes[MOST_NODES];
    size_t n = sizeof nodes / sizeof *nodes;
    out->n = 0;
    CU_ASSERT_EQUAL_FATAL(cudaStreamGetCaptureInfo(handle, &status, NULL, &graph, NULL, NULL, NULL), cudaSuccess);
    CU_ASSERT_EQUAL_FATAL(cudaGraphGetNodes(graph, nodes, &n), cudaSuccess);
    for (size_t i = 0; i < n; i++) {
        enum cudaGraphNodeType type;
        struct cudaKernelNodeParams params;
        const char *name;
        CU_ASSERT_EQUAL_FATAL(cudaGraphNodeGetType(nodes[i], &type), cudaSuccess);
        if (type != cudaGraphNodeTypeKernel) continue;
        CU_ASSERT_EQUAL_FATAL(cudaGraphKernelNodeGetParams(nodes[i], &params), cudaSuccess);
        CU_ASSERT_EQUAL_FATAL(cudaFuncGetName(&name, params.func), cudaSuccess);
        if (strstr(name, "combine")) continue;
        (void)snprintf(out->names[out->n++], sizeof out->names[0], "%s", name);
    }
}

static size_t count(const launched *kernels, const char *part) {
    size_t n = 0;
    for (size_t i = 0; i < kernels->n; i++) n += strstr(kernels->names[i], part) != NULL;
    return n;
}

/* Those of the told row are there, and no others. */
static int is_as_told(const launched *kernels, const cpa_attend_kernel *told) {
    for (int i = 0; i < N_LAUNCHES; i++) {
        if (strcmp(LAUNCHES[i].name, told->name) != 0) continue;
        const size_t n = LAUNCHES[i].kernels[1] ? 2 : 1;
        for (size_t k = 0; k < n; k++)
            if (count(kernels, LAUNCHES[i].kernels[k]) == 0) return 0;
        return kernels->n == n;
    }
    return 0;
}

/* ---- an attend ---- */

static void *memory_of(int64_t bytes) {
    void *memory = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_device_alloc(device, bytes, &memory, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cudaMemset(memory, 0, (size_t)bytes), cudaSuccess);
    return memory;
}

static int32_t kv_heads_of(const launch_case *c) {
    return c->dim == LATENT ? 1 : KV_HEADS;
}
static int32_t v_dim_of(const launch_case *c) {
    return c->dim == LATENT ? LATENT_VALUES : c->dim;
}

static cpa_attend_plan *plan_of(const launch_case *c) {
    const int64_t blocks = TOKENS / c->block_size;
    const cpa_attend_item item = {.q_count = c->rows, .q_first = TOKENS - c->rows, .k_count = TOKENS};
    int32_t *tables = calloc((size_t)blocks, sizeof *tables);
    const cpa_attend_batch batch = {.size = sizeof batch,
                                    .map = {.cp_size = 1, .interleave = c->block_size},
                                    .shape = {.dtype = c->q_dtype,
                                              .kv_dtype = c->kv_dtype,
                                              .layout = c->layout,
                                              .q_heads = HEADS,
                                              .kv_heads = kv_heads_of(c),
                                              .k_dim = c->dim,
                                              .v_dim = v_dim_of(c),
                                              .v_in_k = c->dim == LATENT},
                                    .block_size = c->block_size,
                                    .items = &item,
                                    .n_items = 1,
                                    .block_tables = tables,
                                    .n_table_entries = blocks};
    cpa_attend_plan *plan;
    for (int64_t i = 0; i < blocks; i++) tables[i] = (int32_t)i;
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    free(tables);
    return plan;
}

/* What an attend is told to launch, and launches. */
static void attend_case(const launch_case *c, void *const (*memory)[5], cpa_attend_kernels *told, launched *kernels) {
    static const cpa_score_rules rules = {.softcap = 30};
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = (*memory)[0],
                                  .q_dtype = c->q_dtype,
                                  .kv = {.k = (*memory)[1],
                                         .v = (*memory)[2],
                                         .dtype = c->kv_dtype,
                                         .layout = c->layout,
                                         .block_size = c->block_size,
                                         .num_blocks = TOKENS / c->block_size,
                                         .kv_heads = kv_heads_of(c),
                                         .k_dim = c->dim,
                                         .v_dim = v_dim_of(c),
                                         .v_in_k = c->dim == LATENT},
                                  .mask = {.causal = 1},
                                  .scale = 0.0625f,
                                  .state = {.o = c->with_state ? (*memory)[4] : NULL,
                                            .lse = c->with_state ? (float *)(*memory)[4] + (POOL >> 3) : NULL},
                                  .out = (*memory)[3],
                                  .rules = c->softcap ? &rules : NULL};
    cpa_attend_plan *plan = plan_of(c);
    cpa_graph *graph;
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_kernel(plan, &args, told, sizeof *told, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_attend(plan, &args, stream), CPA_OK); /* uploads the plan */
    CU_ASSERT_EQUAL_FATAL(device->graphs->begin(stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_OK);
    list_kernels(cpa_stream_native(stream), kernels);
    CU_ASSERT_EQUAL_FATAL(device->graphs->end(stream, &graph), CPA_OK);
    device->graphs->destroy(graph);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_attend_plan_destroy(plan);
}

static void check_case(const launch_case *c, void *const (*memory)[5]) {
    cpa_attend_kernels told;
    launched kernels;
    attend_case(c, memory, &told, &kernels);
    const cpa_attend_kernel *kind = told.decode.name ? &told.decode : &told.prefill;
    CU_ASSERT(!told.decode.name != !told.prefill.name);
    if (!is_as_told(&kernels, kind)) {
        printf("\n    %s is told, and launched:", kind->name);
        for (size_t i = 0; i < kernels.n; i++) printf("\n        %s", kernels.names[i]);
    }
    CU_ASSERT(is_as_told(&kernels, kind));
}

static void what_is_told_is_launched(void) {
    static const cpa_dtype cached[] = {CPA_F32, CPA_BF16, CPA_F16, CPA_FP8_E4M3, CPA_INT8};
    static const int32_t blocks[] = {8, 16, 64}, dims[] = {64, 128, 256, 512, LATENT};
    void *const memory[5] = {memory_of(POOL), memory_of(POOL), memory_of(POOL), memory_of(POOL), memory_of(POOL)};
    const char *path;
    for (int32_t p = 0; (path = device->self_test->attend_path(device, p)); p++) {
        for (int i = 0; i < 5 * 3 * 5 * 2 * 2 * 2 * 2; i++) {
            const cpa_dtype kv_dtype = cached[i % 5];
            const launch_case c = {.q_dtype = cpa_dtype_is_quantised(kv_dtype) ? CPA_BF16 : kv_dtype,
                                   .kv_dtype = kv_dtype,
                                   .block_size = blocks[i / 5 % 3],
                                   .dim = dims[i / 15 % 5],
                                   .layout = i / 75 % 2 ? CPA_VLLM_X : 0,
                                   .rows = i / 150 % 2 ? MOST_ROWS : 1,
                                   .with_state = i / 300 % 2,
                                   .softcap = i / 600};
            /* There are no such caches. */
            if (c.layout == CPA_VLLM_X && (kv_dtype == CPA_INT8 || c.dim == LATENT)) continue;
            check_case(&c, &memory);
        }
    }
    (void)device->self_test->attend_path(device, 0);
    for (int i = 0; i < 5; i++) cpa_device_free(device, memory[i]);
}

/* What fits the workspace of a plan is one pass, and what does not, several: with the same kernels. */
static void keys_go_through_the_workspace_in_as_many_passes_as_it_takes(void) {
    enum { LITTLE = 2 << 20 }; /* of 512 keys of 4128 bytes, and 64 rows of states of 16512 */
    const launch_case c = {CPA_BF16, CPA_FP8_E4M3, CPA_TOKEN_MAJOR, 64, 128, 64, 0, 0};
    void *const memory[5] = {memory_of(POOL), memory_of(POOL), memory_of(POOL), memory_of(POOL), memory_of(POOL)};
    cpa_cuda_device *cuda = (cpa_cuda_device *)device;
    const int64_t usual = cuda->workspace_bytes;
    cpa_attend_kernels told;
    launched kernels;
    if (cuda->path == CPA_CUDA_HOPPER) {
        attend_case(&c, &memory, &told, &kernels);
        CU_ASSERT_STRING_EQUAL(told.prefill.name, "widen+hopper");
        CU_ASSERT_EQUAL(count(&kernels, "attend_widen"), 1);
        CU_ASSERT_EQUAL(count(&kernels, "13attend_hopperI"), 1);
        cuda->workspace_bytes = LITTLE;
        attend_case(&c, &memory, &told, &kernels);
        cuda->workspace_bytes = usual;
        CU_ASSERT_STRING_EQUAL(told.prefill.name, "widen+hopper");
        CPA_ASSERT_ORDER((int64_t)count(&kernels, "attend_widen"), >, 1);
        CU_ASSERT_EQUAL(count(&kernels, "attend_widen"), count(&kernels, "13attend_hopperI"));
        CU_ASSERT_EQUAL(count(&kernels, "attend_widen") + count(&kernels, "13attend_hopperI"), kernels.n);
    }
    for (int i = 0; i < 5; i++) cpa_device_free(device, memory[i]);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {{"what is told is launched", what_is_told_is_launched},
                                     {"keys go through the workspace in as many passes as it takes",
                                      keys_go_through_the_workspace_in_as_many_passes_as_it_takes}};
    const int missing = cpa_test_cuda_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    cpa_test_device_open(1, &device, &stream);
    const int failed = cpa_test_main(argc, argv, "cuda_launches", tests, (int)(sizeof tests / sizeof *tests));
    cpa_test_device_close(device, stream);
    return failed;
}
