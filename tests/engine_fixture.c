#include "engine_fixture.h"

#include <stdio.h>

#include "device_fixture.h"
#include "tests/transport_fixture.h"

cpa_engine_options cpa_test_engine_options(void) {
    return (cpa_engine_options){.size = sizeof(cpa_engine_options),
                                .device = cpa_test_device_options(0),
                                .model = {.layers = 3,
                                          .q_heads = 4,
                                          .kv_heads = 2,
                                          .head_dim = 32,
                                          .v_head_dim = 16,
                                          .dtype = CPA_F32,
                                          .mask = {.causal = 1}},
                                .kv_dtype = CPA_F32,
                                .num_blocks = 64,
                                .max_num_batched_tokens = 96,
                                .max_num_seqs = 6,
                                .staging_bytes = 8 << 20,
                                .verify = 0.2,
                                .skip_self_test = 1,
                                .seed = 7};
}

void cpa_test_mixed_requests(cpa_request *requests, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        requests[i] = (cpa_request){.size = sizeof requests[i],
                                    .id = (uint64_t)i * 3,
                                    .prompt_tokens = i == 0 ? 400 : 1 + 37 * i % 90,
                                    .output_tokens = 1 + 5 * i % 13};
    }
}

cpa_engine *cpa_test_engine(const cpa_engine_options *options, const cpa_request *requests, int64_t n) {
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    int rank, refused = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    cpa_engine_options over = *options;
    over.transport = cpa_test_transport_kind();
    if (cpa_engine_create(MPI_COMM_WORLD, &over, &engine, &err) != CPA_OK) {
        printf("%s\n", err.message);
        return NULL;
    }
    for (int64_t i = 0; rank == 0 && i < n; i++) {
        if (cpa_engine_submit(engine, &requests[i]) == CPA_OK) continue;
        printf("%s\n", cpa_engine_error(engine));
        refused = 1;
    }
    MPI_Bcast(&refused, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (!refused) return engine;
    cpa_engine_destroy(engine);
    return NULL;
}

int cpa_test_engine_run(const cpa_engine_options *options, const cpa_request *requests, int64_t n,
                        cpa_finish_fn on_finish, void *ctx, cpa_engine_stats *stats) {
    *stats = (cpa_engine_stats){0};
    cpa_engine *engine = cpa_test_engine(options, requests, n);
    if (!engine) return 0;
    cpa_status status = cpa_engine_run(engine, on_finish, NULL, ctx);
    if (status != CPA_OK) printf("%s\n", cpa_engine_error(engine));
    cpa_engine_get_stats(engine, stats);
    cpa_engine_destroy(engine);
    return status == CPA_OK && stats->requests_finished == n && stats->verify_violations == 0;
}
