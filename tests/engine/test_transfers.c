/* Prompts that one job computes and another goes on with, through a folder: jobs of any number of ranks, interleave,
 * block size, layout and dtype of cache. All of the ranks of mpirun take part in a job, or its first ones. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/mpi.h>

#include "base/hash.h"
#include "src/engine/engine_internal.h"
#include "src/model/synthetic.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/shared_folder.h"

enum { REQUESTS = 4, OUTPUTS = 5 };

static const int64_t PROMPTS[REQUESTS] = {100, 33, 16, 1};

typedef struct job {
    int ranks;
    cpa_engine_options options;
    cpa_request requests[REQUESTS];
    const char *folder; /* NULL: no store */
    const char *model;
    int32_t full_on;        /* the rank whose store takes nothing; -1: none */
    cpa_engine_stats stats; /* after it, on every rank of mpirun */
} job;

static int world_size(void) {
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

/* A job of so many ranks, or of as many as there are, that does nothing with a store. */
static job job_of(int ranks) {
    job j = {.ranks = ranks < world_size() ? ranks : world_size(), .options = cpa_test_engine_options(), .full_on = -1};
    j.options.local_context = CPA_LOCAL_CONTEXT_NONE;
    for (int i = 0; i < REQUESTS; i++)
        j.requests[i] = (cpa_request){
            .size = sizeof j.requests[i], .id = (uint64_t)i, .prompt_tokens = PROMPTS[i], .output_tokens = OUTPUTS + i};
    return j;
}

/* The same with a folder. */
static job job_with(job j, const cpa_test_folder *folder, uint32_t transfer) {
    j.folder = folder->path;
    for (int i = 0; i < REQUESTS; i++) j.requests[i].transfer = transfer;
    return j;
}

/* The synthetic model, on the host, with a NaN in a key of request 0. */
static struct {
    cpa_synthetic synthetic;
    cpa_model real, model;
    int64_t position; /* of the NaN */
} poison;

static cpa_status layer_in(void *ctx, int32_t layer, const cpa_model_step *step, const cpa_layer_args *args,
                           cpa_stream *stream) {
    const cpa_attention_shape *shape = &poison.synthetic.shape;
    const cpa_status status = poison.real.layer_in(ctx, layer, step, args, stream);
    for (int64_t row = 0; layer == 1 && row < step->rows.count; row++)
        if (step->rows.requests[row] == 0 && step->rows.positions[row] == poison.position)
            ((float *)args->k)[row * shape->kv_heads * shape->k_dim] = NAN;
    return status;
}

static void use_poison(job *j, int64_t position) {
    poison.position = position;
    poison.synthetic = (cpa_synthetic){.shape = j->options.model.attention, .seed = j->options.seed};
    poison.synthetic.shape.kv_dtype = CPA_F32;
    poison.model = poison.real = cpa_synthetic_model(&poison.synthetic);
    poison.model.layer_in = layer_in;
    poison.model.recall = NULL;
    j->options.network = &poison.model;
    j->options.verify = 0;
}

static cpa_status refuse(void *ctx, const cpa_block_key *key, const void *bytes, int64_t n, cpa_error *err) {
    (void)ctx, (void)key, (void)bytes, (void)n;
    snprintf(err->message, sizeof err->message, "it is full");
    return err->status = CPA_IO;
}

/* On the ranks of the job. */
static void run_here(job *j, MPI_Comm ranks) {
    cpa_comm *comm = NULL;
    cpa_folder_store *folder = NULL;
    cpa_block_store store;
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    int rank;
    MPI_Comm_rank(ranks, &rank);
    CU_ASSERT_EQUAL(cpa_comm_from_mpi(ranks, NULL, &comm, &err), CPA_OK);
    if (j->folder) {
        CU_ASSERT_EQUAL(cpa_folder_store_create(j->folder, &folder, &err), CPA_OK);
        cpa_folder_store_table(folder, &store);
        store.model = j->model;
        if (rank == j->full_on) store.put = refuse;
        j->options.block_store = &store;
    }
    if (cpa_engine_create(comm, &j->options, &engine, &err) != CPA_OK) printf("%s\n", err.message);
    if (engine) poison.synthetic.device = engine->device;
    for (int i = 0; engine && rank == 0 && i < REQUESTS; i++)
        CU_ASSERT_EQUAL(cpa_engine_submit(engine, &j->requests[i]), CPA_OK);
    if (engine && cpa_engine_run(engine, NULL, NULL, NULL) == CPA_OK)
        cpa_engine_get_stats(engine, &j->stats, sizeof j->stats);
    else
        printf("%s\n", cpa_engine_error(engine));
    cpa_engine_destroy(engine);
    cpa_folder_store_destroy(folder);
    cpa_comm_destroy(comm);
    j->options.block_store = NULL;
}

/* What rank 0 has, on every rank; those that have no part in a job leave the processor to the others meanwhile. */
static void share(void *bytes, int n) {
    MPI_Request request;
    int done = 0;
    MPI_Ibcast(bytes, n, MPI_BYTE, 0, MPI_COMM_WORLD, &request);
    for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done; MPI_Test(&request, &done, MPI_STATUS_IGNORE)) usleep(500);
}

static void run_to_the_end(job *j) {
    MPI_Comm ranks;
    j->stats = (cpa_engine_stats){0};
    MPI_Comm_split(MPI_COMM_WORLD, cpa_test_rank() < j->ranks ? 0 : MPI_UNDEFINED, 0, &ranks);
    if (ranks != MPI_COMM_NULL) {
        run_here(j, ranks);
        MPI_Comm_free(&ranks);
    }
    share(&j->stats, sizeof j->stats);
}

static void run(job *j) {
    run_to_the_end(j);
    CU_ASSERT_EQUAL(j->stats.requests_finished, REQUESTS);
    CU_ASSERT_EQUAL(j->stats.verify_violations, 0);
}

static int64_t sum_of_prompts(int64_t less) {
    int64_t sum = 0;
    for (int i = 0; i < REQUESTS; i++) sum += PROMPTS[i] - less;
    return sum;
}

/* All of the prompts came, and what followed is what the job would have computed by itself. */
static void expect_import(job *importing, uint64_t digest) {
    run(importing);
    CU_ASSERT_EQUAL(importing->stats.imported_tokens, sum_of_prompts(1));
    CU_ASSERT_EQUAL(importing->stats.import_failures, 0);
    CU_ASSERT_EQUAL(importing->stats.computed_tokens, REQUESTS * OUTPUTS + REQUESTS * (REQUESTS - 1) / 2);
    CPA_ASSERT_ORDER(importing->stats.verify_rows, >, 0);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(importing->stats.output_digest, digest);
}

/* A job that differs from others in all that a cache may be but its dtype. */
static job job_of_form(int form, const cpa_attention_shape *shape) {
    static const struct {
        int32_t block_size, interleave;
        cpa_kv_layout layout;
        int64_t local_context;
    } forms[4] = {{16, 16, CPA_TOKEN_MAJOR, CPA_LOCAL_CONTEXT_NONE},
                  {8, 1, CPA_HEAD_MAJOR, CPA_LOCAL_CONTEXT_NONE},
                  {32, 32, CPA_VLLM_X, 60}, /* some on one rank */
                  {16, 48, CPA_HEAD_MAJOR, CPA_LOCAL_CONTEXT_NONE}};
    job j = job_of(1 + form);
    j.options.model.attention = *shape;
    j.options.model.attention.layout = shape->v_in_k ? CPA_TOKEN_MAJOR : forms[form].layout;
    j.options.block_size = forms[form].block_size;
    j.options.interleave = forms[form].interleave;
    j.options.local_context = forms[form].local_context;
    return j;
}

static const cpa_attention_shape SHAPES[] = {
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 16, .dtype = CPA_F32},
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 16, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 16, .dtype = CPA_BF16, .kv_dtype = CPA_INT8},
    {.q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .dtype = CPA_F32, .kv_dtype = CPA_FP8_E4M3},
};

/* What a job of `from` + 1 ranks has computed goes on in those of `first` + 1 to `last` + 1 ranks, which have the form
 * of another job. */
static void go_on(const cpa_attention_shape *shape, int from, int first, int last) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of_form(from, shape), &folder, CPA_TRANSFER_EXPORT);
    for (int i = 0; i < REQUESTS; i++) exporting.requests[i].output_tokens = 1;
    run(&exporting);
    CU_ASSERT_EQUAL(exporting.stats.exported_tokens, sum_of_prompts(0));
    for (int to = first; to <= last; to++) {
        job alone = job_of_form((to + from) % 4, shape);
        alone.ranks = job_of(1 + to).ranks;
        run(&alone);
        job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
        expect_import(&importing, alone.stats.output_digest);
    }
    cpa_test_shared_folder_remove(&folder);
}

static void prompts_go_on_elsewhere(void) {
    for (int from = 0; from < 4; from++) go_on(&SHAPES[from], from, (from + 3) % 4, (from + 3) % 4);
}

static void every_pair_of_jobs_goes_on(void) {
    for (int i = 0; i < 4; i++)
        for (int from = 0; from < 4; from++) go_on(&SHAPES[i], from, 0, 3);
}

static void latents_go_on_elsewhere(void) {
    static const float scales[] = {0.2f, 0.15f, 0.25f};
    static const cpa_model_form form = {.layer_scales = scales};
    const cpa_attention_shape shape = {
        .q_heads = 4, .kv_heads = 1, .k_dim = 48, .v_dim = 32, .v_in_k = 1, .dtype = CPA_BF16, .kv_dtype = CPA_BF16};
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of_form(1, &shape), &folder, CPA_TRANSFER_EXPORT), alone = job_of_form(2, &shape);
    exporting.options.model.forms = alone.options.model.forms = &form;
    exporting.options.model.n_forms = alone.options.model.n_forms = 1;
    run(&exporting);
    run(&alone);
    job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
    expect_import(&importing, alone.stats.output_digest);
    cpa_test_shared_folder_remove(&folder);
}

/* Layers with a window have only what the next token sees. */
static void windows_export_what_is_seen(void) {
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .window = 20, .sinks = 2}, {.causal = 1, .window = 40}};
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(3), &folder, CPA_TRANSFER_EXPORT), alone = job_of(2);
    exporting.options.model.layer_masks = alone.options.model.layer_masks = masks;
    exporting.options.max_num_batched_tokens = 32;
    alone.options.block_size = 8;
    run(&exporting);
    run(&alone);
    CU_ASSERT_EQUAL(exporting.stats.output_digest != 0, 1);
    job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
    expect_import(&importing, alone.stats.output_digest);
    cpa_test_shared_folder_remove(&folder);
}

/* Every layer has a window, so that nothing is kept of what lies before it. */
static void a_window_of_all_layers_exports_what_is_seen(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(2), &folder, CPA_TRANSFER_EXPORT), alone = job_of(3);
    exporting.options.model.mask.window = alone.options.model.mask.window = 24;
    exporting.options.max_num_batched_tokens = 16;
    run(&exporting);
    run(&alone);
    job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
    expect_import(&importing, alone.stats.output_digest);
    cpa_test_shared_folder_remove(&folder);
}

/* Rank 0 changes the files of a folder whose names begin with a digit below `end`: a byte of their rows, or their
 * length, or they are gone. */
static void damage(const cpa_test_folder *folder, char end, int way) {
    DIR *files = opendir(folder->path);
    for (struct dirent *file; (file = readdir(files));) {
        char path[600];
        if (file->d_name[0] == '.' || file->d_name[0] >= end) continue;
        snprintf(path, sizeof path, "%s/%s", folder->path, file->d_name);
        if (way == 0) CU_ASSERT_EQUAL(unlink(path), 0);
        if (way == 1) CU_ASSERT_EQUAL(truncate(path, 100), 0);
        if (way < 2) continue;
        FILE *at = fopen(path, "r+b");
        fseek(at, 200, SEEK_SET);
        const int byte = fgetc(at);
        fseek(at, 200, SEEK_SET);
        fputc(byte ^ 4, at);
        fclose(at);
    }
    closedir(files);
}

static void what_is_damaged_or_missing_is_computed(void) {
    job alone = job_of(2);
    run(&alone);
    for (int way = 0; way < 3; way++) {
        const int all = way == 1;
        const cpa_test_folder folder = cpa_test_shared_folder_make();
        job exporting = job_with(job_of(3), &folder, CPA_TRANSFER_EXPORT);
        run(&exporting);
        if (cpa_test_rank() == 0) damage(&folder, all ? 'g' : '8', way);
        MPI_Barrier(MPI_COMM_WORLD);
        job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
        run(&importing);
        CPA_ASSERT_ORDER(importing.stats.import_failures, >, 0);
        CPA_ASSERT_ORDER(importing.stats.import_failures, <=, REQUESTS);
        CPA_ASSERT_ORDER(importing.stats.imported_tokens, <, sum_of_prompts(1));
        CU_ASSERT_EQUAL((importing.stats.imported_tokens == 0), all);
        if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(importing.stats.output_digest, alone.stats.output_digest);
        cpa_test_shared_folder_remove(&folder);
    }
}

static void nothing_comes_from_another_salt_model_or_cache(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(2), &folder, CPA_TRANSFER_EXPORT);
    exporting.model = "a";
    run(&exporting);
    for (int way = 0; way < 3; way++) {
        job importing = job_with(job_of(2), &folder, CPA_TRANSFER_IMPORT);
        importing.model = way == 0 ? "b" : "a";
        for (int i = 0; way == 1 && i < REQUESTS; i++) importing.requests[i].salt = "theirs";
        if (way == 2) importing.options.model.attention.kv_dtype = CPA_BF16;
        run(&importing);
        CU_ASSERT_EQUAL(importing.stats.imported_tokens, 0);
    }
    cpa_test_shared_folder_remove(&folder);
}

static uint32_t same_for_all(void *ctx, uint64_t request, int64_t position) {
    (void)ctx, (void)request;
    return (uint32_t)cpa_mix64((uint64_t)position);
}

/* The second request has computed 33 tokens that the first begins with, two full blocks, before that comes. */
static void what_is_found_here_does_not_come(void) {
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .window = 20}, {.causal = 1, .window = 70, .sinks = 3}};
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(3), &folder, CPA_TRANSFER_EXPORT), alone = job_of(2);
    exporting.options.token_at = alone.options.token_at = same_for_all;
    alone.options.block_size = alone.options.interleave = 16;
    for (int windows = 0; windows < 2; windows++) {
        exporting.options.model.layer_masks = alone.options.model.layer_masks = windows ? masks : NULL;
        run(&exporting);
        run(&alone);
        job importing = job_with(alone, &folder, 0);
        importing.requests[0].transfer = CPA_TRANSFER_IMPORT;
        importing.requests[0].arrival_s = 0.05;
        run(&importing);
        CU_ASSERT_EQUAL(importing.stats.imported_tokens, PROMPTS[0] - 1 - 32);
        CU_ASSERT_EQUAL(importing.stats.import_failures, 0);
        if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(importing.stats.output_digest, alone.stats.output_digest);
    }
    cpa_test_shared_folder_remove(&folder);
}

/* Parts in the folder, as every rank sees them. */
static int count_parts(const cpa_test_folder *folder) {
    int parts = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    DIR *files = opendir(folder->path);
    for (struct dirent *file; (file = readdir(files));) parts += file->d_name[0] != '.';
    closedir(files);
    return parts;
}

/* One rank finds the row that is not finite, in the step before the export, of which it has no rows; those of the other
 * do not see it. */
static void no_rank_exports_what_is_not_finite_on_another(void) {
    if (!cpa_test_promises_bits() || world_size() < 2) return;
    const cpa_mask masks[] = {{.causal = 1}, {.causal = 1, .window = 8}, {.causal = 1}};
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_of(2);
    exporting.folder = folder.path;
    exporting.options.model.layer_masks = masks;
    exporting.options.block_size = exporting.options.interleave = exporting.options.max_num_batched_tokens = 16;
    exporting.requests[0].prompt_tokens = 17;
    exporting.requests[0].transfer = CPA_TRANSFER_EXPORT;
    use_poison(&exporting, 1000);
    run(&exporting);
    CU_ASSERT_EQUAL(exporting.stats.exported_tokens, 17);
    CU_ASSERT_EQUAL(count_parts(&folder), 4); /* of each rank one a group of layers */
    cpa_test_shared_folder_remove(&folder);
    const cpa_test_folder empty = cpa_test_shared_folder_make();
    exporting.folder = empty.path;
    use_poison(&exporting, 5);
    run_to_the_end(&exporting);
    CU_ASSERT_EQUAL(exporting.stats.requests_failed, 1);
    CU_ASSERT_EQUAL(exporting.stats.exported_tokens, 0);
    CU_ASSERT_EQUAL(count_parts(&empty), 0);
    cpa_test_shared_folder_remove(&empty);
}

static void what_a_store_does_not_take_is_not_counted(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(1), &folder, CPA_TRANSFER_EXPORT);
    exporting.full_on = 0;
    run(&exporting);
    CU_ASSERT_EQUAL(exporting.stats.exported_tokens, 0);
    exporting = job_with(job_of(2), &folder, CPA_TRANSFER_EXPORT);
    exporting.options.block_size = exporting.options.interleave = 16;
    exporting.full_on = exporting.ranks - 1;
    run(&exporting);
    /* Sixteen tokens at most are on the first rank before the first of the other. */
    CPA_ASSERT_ORDER(exporting.stats.exported_tokens, <=, REQUESTS * 16);
    cpa_test_shared_folder_remove(&folder);
}

/* Prompts that come from elsewhere take blocks as others do: they wait for them, and give way. */
static void imports_wait_for_blocks_and_give_way(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job exporting = job_with(job_of(3), &folder, CPA_TRANSFER_EXPORT), alone = job_of(2);
    run(&exporting);
    for (int i = 0; i < REQUESTS; i++) alone.requests[i].output_tokens = 40 + 10 * i;
    alone.options.num_blocks = 20 / alone.ranks;
    alone.options.block_size = alone.options.interleave = 8;
    run(&alone);
    for (int swaps = 0; swaps < 2; swaps++) {
        job importing = job_with(alone, &folder, CPA_TRANSFER_IMPORT);
        importing.options.preemption = swaps ? CPA_PREEMPT_SWAP : CPA_PREEMPT_RECOMPUTE;
        importing.options.swap_bytes = swaps ? 1 << 20 : 0;
        run(&importing);
        CPA_ASSERT_ORDER(importing.stats.preemptions, >, 0);
        CPA_ASSERT_ORDER(importing.stats.imported_tokens, >=, sum_of_prompts(1));
        CU_ASSERT_EQUAL(importing.stats.import_failures, 0);
        if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(importing.stats.output_digest, alone.stats.output_digest);
    }
    cpa_test_shared_folder_remove(&folder);
}

static const cpa_test tests[] = {
    {"every pair of jobs goes on", every_pair_of_jobs_goes_on},
    {"prompts go on elsewhere", prompts_go_on_elsewhere},
    {"latents go on elsewhere", latents_go_on_elsewhere},
    {"windows export what is seen", windows_export_what_is_seen},
    {"a window of all layers exports what is seen", a_window_of_all_layers_exports_what_is_seen},
    {"what is damaged or missing is computed", what_is_damaged_or_missing_is_computed},
    {"nothing comes from another salt, model or cache", nothing_comes_from_another_salt_model_or_cache},
    {"no rank exports what is not finite on another", no_rank_exports_what_is_not_finite_on_another},
    {"what a store does not take is not counted", what_a_store_does_not_take_is_not_counted},
    {"what is found here does not come", what_is_found_here_does_not_come},
    {"imports wait for blocks, and give way", imports_wait_for_blocks_and_give_way},
};

CPA_MPI_DEVICE_TEST_MAIN("transfers", tests)
