/* The whole engine of libcpattn: rank 0 submits three requests, every rank runs them, rank 0 prints what happened.
 *
 *     mpirun -np 4 ./engine
 *
 * Queries, keys and values come from the library's synthetic model; a serving stack gives its own cpa_model in
 * cpa_engine_options. Exits 1 if a sampled check failed or a request was lost. */
#include <cpattn/cpattn.h>
#include <cpattn/mpi.h>
#include <stdio.h>

static void print_request(void *ctx, const cpa_request_result *result) {
    (void)ctx;
    printf("request %llu: %lld prompt tokens, first token after %.3f s, %lld tokens after %.3f s\n",
           (unsigned long long)result->id, (long long)result->prompt_tokens, result->first_token_s - result->arrival_s,
           (long long)result->output_tokens, result->finish_s - result->arrival_s);
}

/* Rank 0: one long context and two short ones. */
static cpa_status submit_all(cpa_engine *engine) {
    const int64_t prompts[3] = {3000, 500, 120};
    for (uint64_t i = 0; i < 3; i++) {
        cpa_request request = {.size = sizeof request, .id = i, .prompt_tokens = prompts[i], .output_tokens = 8};
        cpa_status status = cpa_engine_submit(engine, &request);
        if (status != CPA_OK) return status;
    }
    return CPA_OK;
}

int main(int argc, char **argv) {
    int rank, level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level); /* the engine has threads; they call no MPI */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);

    cpa_engine_options options = {.size = sizeof options};
    options.device.size = sizeof options.device;
    options.device.threads = 1;
    options.model.layers = 2;
    options.model.attention.q_heads = 8;
    options.model.attention.kv_heads = 2;
    options.model.attention.k_dim = 64;
    options.model.attention.dtype = CPA_F32;
    options.model.mask.causal = 1;
    options.model.attention.kv_dtype = CPA_F32;
    options.num_blocks = 512;
    options.verify = 0.01; /* recompute 1% of all (token, head, layer) rows in float64 */

    cpa_comm *comm = NULL;
    cpa_engine *engine = NULL;
    cpa_error err;
    cpa_status status = cpa_comm_from_mpi(MPI_COMM_WORLD, NULL, &comm, &err);
    if (status == CPA_OK) status = cpa_engine_create(comm, &options, &engine, &err);
    if (status != CPA_OK) {
        if (rank == 0) fprintf(stderr, "engine: %s\n", err.message);
        cpa_comm_destroy(comm);
        MPI_Finalize();
        return 1;
    }

    /* Every rank runs, whatever happened on rank 0, so that none waits for another. */
    cpa_status submitted = rank == 0 ? submit_all(engine) : CPA_OK;
    if (submitted != CPA_OK) fprintf(stderr, "engine: %s\n", cpa_engine_error(engine));
    status = cpa_engine_run(engine, print_request, NULL, NULL);
    if (status != CPA_OK) fprintf(stderr, "engine: rank %d: %s\n", rank, cpa_engine_error(engine));
    if (status != CPA_OK && status != CPA_CHECK_FAILED)
        MPI_Abort(MPI_COMM_WORLD, 1); /* others may wait for this rank */

    cpa_engine_stats stats;
    cpa_engine_get_stats(engine, &stats, sizeof stats);
    if (rank == 0) {
        printf("engine: %lld requests in %lld steps on %s; %lld rows verified, %lld violations, largest error %.2g\n",
               (long long)stats.requests_finished, (long long)stats.steps, cpa_engine_device(engine),
               (long long)stats.verify_rows, (long long)stats.verify_violations, stats.verify_max_error);
    }
    cpa_engine_destroy(engine);
    cpa_comm_destroy(comm);
    MPI_Finalize();
    return status == CPA_OK && submitted == CPA_OK && stats.requests_finished == 3 ? 0 : 1;
}
