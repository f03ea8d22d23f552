/* Blocks that were evicted come back, from host memory and from a folder, also to the engine after: on any number of
 * ranks tokens and digests are those of an engine that never evicts, whatever is damaged or full. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cpattn/mpi.h>

#include "src/engine/engine_internal.h"
#include "src/engine/engine_options.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/shared_folder.h"

enum { PROMPTS = 3, ROUNDS = 2, REQUESTS = PROMPTS * ROUNDS, PROMPT = 150, OUTPUTS = 4 };

typedef struct job {
    cpa_engine_options options;
    cpa_status created; /* what cpa_engine_create said */
    cpa_engine_stats stats;
    char message[sizeof((cpa_error *)NULL)->message];
} job;

static int32_t ranks(void) {
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

/* Requests id and id + PROMPTS have one prompt. */
static uint32_t token_at(void *ctx, uint64_t request, int64_t position) {
    (void)ctx;
    const uint64_t text = position < PROMPT ? request % PROMPTS : 100 + request;
    return (uint32_t)(text * 1000003 + (uint64_t)position * 7919);
}

/* One request at a time, in a cache with room for little more than that one. */
static job job_of(int32_t interleave) {
    job j = {.options = cpa_test_engine_options()};
    cpa_engine_options *o = &j.options;
    const int64_t tokens = PROMPT + OUTPUTS, unit = (int64_t)16 * ranks();
    o->token_at = token_at;
    o->block_size = 16;
    o->interleave = interleave;
    o->num_blocks = (tokens + unit - 1) / unit + 3;
    o->max_num_seqs = 1;
    o->local_context = CPA_LOCAL_CONTEXT_NONE;
    return j;
}

/* The same, which keeps so many blocks of a rank in host memory. */
static void keep(job *j, int64_t host_blocks) {
    j->options.swap_bytes = host_blocks * cpa_engine_block_bytes(&j->options);
    j->options.keep_evicted = 1;
}

static void use_folder(job *j, const cpa_test_folder *folder, int64_t blocks) {
    j->options.swap_folder = folder->path;
    j->options.swap_folder_bytes = blocks * cpa_engine_block_bytes(&j->options);
}

static void run_requests(cpa_engine *engine, int n) {
    for (int i = 0; cpa_test_rank() == 0 && i < n; i++) {
        const cpa_request request = {
            .size = sizeof request, .id = (uint64_t)i, .prompt_tokens = PROMPT, .output_tokens = OUTPUTS};
        CU_ASSERT_EQUAL(cpa_engine_submit(engine, &request), CPA_OK);
    }
    const cpa_status status = cpa_engine_run(engine, NULL, NULL, NULL);
    CU_ASSERT_EQUAL(status, CPA_OK);
    if (status != CPA_OK) printf("\n    %s\n", cpa_engine_error(engine));
}

/* Runs the first n requests in an engine of their own. */
static void run_some(job *j, int n) {
    cpa_comm *comm = NULL;
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    memset(&j->stats, 0, sizeof j->stats);
    CU_ASSERT_EQUAL(cpa_comm_from_mpi(MPI_COMM_WORLD, NULL, &comm, &err), CPA_OK);
    j->created = cpa_engine_create(comm, &j->options, &engine, &err);
    snprintf(j->message, sizeof j->message, "%s", err.message);
    if (engine) {
        run_requests(engine, n);
        cpa_engine_get_stats(engine, &j->stats, sizeof j->stats);
    }
    cpa_engine_destroy(engine);
    cpa_comm_destroy(comm);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void run(job *j) {
    run_some(j, REQUESTS);
    CU_ASSERT_EQUAL(j->created, CPA_OK);
    if (j->created != CPA_OK) printf("\n    %s\n", j->message);
    CU_ASSERT_EQUAL(j->stats.requests_finished, REQUESTS);
    CU_ASSERT_EQUAL(j->stats.verify_violations, 0);
}

/* What an engine computes that forgets what it evicts; of jobs of one interleave and mask it is the same. */
static uint64_t plain_digest(const job *like) {
    static uint64_t known[64];
    job plain = *like;
    plain.options.keep_evicted = 0;
    plain.options.swap_folder = NULL;
    if (!like->options.model.layer_masks && known[like->options.interleave]) return known[like->options.interleave];
    run(&plain);
    CPA_ASSERT_ORDER(plain.stats.prefix_hits, <=, PROMPTS);
    CPA_ASSERT_ORDER(plain.stats.evictions, >, 0);
    if (!like->options.model.layer_masks) known[like->options.interleave] = plain.stats.output_digest;
    return plain.stats.output_digest;
}

static void expect_digest(const job *j, uint64_t digest) {
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(j->stats.output_digest, digest);
}

/* Full blocks of a prompt, as they are counted: those of all ranks where units span them. */
static int64_t blocks_of_a_prompt(const job *j) {
    const int64_t unit = j->options.interleave < 16 ? (int64_t)16 * ranks() : 16;
    return PROMPT / unit * (unit / 16);
}

static const int32_t INTERLEAVES[] = {16, 4};

static void what_was_evicted_comes_back_from_host_memory(void) {
    for (int i = 0; i < 2; i++) {
        job j = job_of(INTERLEAVES[i]);
        const uint64_t digest = plain_digest(&j);
        keep(&j, 40);
        run(&j);
        expect_digest(&j, digest);
        const int64_t blocks = blocks_of_a_prompt(&j);
        CU_ASSERT_EQUAL(j.stats.prefix_hits, PROMPTS * blocks);
        CPA_ASSERT_ORDER(j.stats.kept_blocks, >=, PROMPTS * blocks / 2);
        CPA_ASSERT_ORDER(j.stats.fetched_blocks, >, 0);
        CU_ASSERT_EQUAL(j.stats.damaged_blocks, 0);
        CPA_ASSERT_ORDER(j.stats.computed_tokens, <=, REQUESTS * (PROMPT + OUTPUTS - 1) - PROMPTS * 16 * blocks);
    }
}

/* Layers of two windows have blocks of their own, and each what its next query sees. */
static void windows_come_back_too(void) {
    static const cpa_mask masks[] = {
        {.causal = 1}, {.causal = 1, .window = 40, .sinks = 2}, {.causal = 1, .window = 40}};
    job j = job_of(16);
    j.options.model.layer_masks = masks;
    j.options.model.layers = 3;
    const uint64_t digest = plain_digest(&j);
    keep(&j, 200);
    run(&j);
    expect_digest(&j, digest);
    CPA_ASSERT_ORDER(j.stats.prefix_hits, >=, PROMPTS * (blocks_of_a_prompt(&j) - 2));
}

/* First tokens that are precise lie in blocks of their own, of another size, and come back from the folder with the rest:
 * the prompts are found again whole. */
static void precise_tokens_come_back_too(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job j = job_of(16);
    j.options.model.attention.kv_dtype = CPA_INT8;
    run(&j);
    const uint64_t quantised = j.stats.output_digest;
    j.options.precise_tokens = 2 * 16;
    run(&j);
    const uint64_t digest = j.stats.output_digest;
    CU_ASSERT_NOT_EQUAL(digest, quantised);
    keep(&j, 200);
    use_folder(&j, &folder, 400);
    for (int i = 0; i < 2; i++) {
        run(&j);
        expect_digest(&j, digest);
        CU_ASSERT_EQUAL(j.stats.damaged_blocks, 0);
        CU_ASSERT_EQUAL(j.stats.restored_blocks > 0, i);
        CU_ASSERT_EQUAL(j.stats.prefix_hits, (i == 0 ? PROMPTS : REQUESTS) * blocks_of_a_prompt(&j));
    }
    CPA_ASSERT_ORDER(j.stats.loaded_blocks, >=, PROMPTS * blocks_of_a_prompt(&j));
    cpa_test_shared_folder_remove(&folder);
}

/* Host memory has room for less than a prompt: what was evicted last is there, and the rest is computed. */
static void what_does_not_fit_is_computed(void) {
    job j = job_of(16);
    const uint64_t digest = plain_digest(&j);
    keep(&j, 2);
    run(&j);
    expect_digest(&j, digest);
    CPA_ASSERT_ORDER(j.stats.prefix_hits, <, PROMPTS * blocks_of_a_prompt(&j));
    CPA_ASSERT_ORDER(j.stats.host_blocks, <=, 2 * ranks());
}

/* The folder has more than host memory, which has what a prompt needs on the way. */
static void the_next_engine_finds_what_is_in_the_folder(void) {
    for (int i = 0; i < 2; i++) {
        const cpa_test_folder folder = cpa_test_shared_folder_make();
        job j = job_of(INTERLEAVES[i]);
        const uint64_t digest = plain_digest(&j);
        const int64_t blocks = blocks_of_a_prompt(&j);
        keep(&j, 14);
        use_folder(&j, &folder, 100);
        run(&j);
        expect_digest(&j, digest);
        CU_ASSERT_EQUAL(j.stats.restored_blocks, 0);
        CPA_ASSERT_ORDER(j.stats.stored_blocks, >=, PROMPTS * blocks);
        CU_ASSERT_EQUAL(j.stats.damaged_blocks, 0);
        const int64_t stored = j.stats.stored_blocks;
        run(&j);
        expect_digest(&j, digest);
        CU_ASSERT_EQUAL(j.stats.restored_blocks, stored);
        CU_ASSERT_EQUAL(j.stats.prefix_hits, REQUESTS * blocks);
        CU_ASSERT_EQUAL(j.stats.damaged_blocks, 0);
        CPA_ASSERT_ORDER(j.stats.loaded_blocks, >=, PROMPTS * blocks);
        CU_ASSERT_EQUAL(j.stats.folder_bytes_read, j.stats.loaded_blocks * cpa_engine_block_bytes(&j.options));
        CPA_ASSERT_ORDER(j.stats.folder_blocks, >=, stored);
        cpa_test_shared_folder_remove(&folder);
    }
}

/* Nothing was evicted: what an engine can find when it has done its work is saved then. */
static void an_engine_saves_what_it_has_when_it_ends(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job j = job_of(16);
    keep(&j, 40);
    use_folder(&j, &folder, 100);
    run_some(&j, 1);
    CU_ASSERT_EQUAL(j.stats.evictions, 0);
    CPA_ASSERT_ORDER(j.stats.stored_blocks, >=, blocks_of_a_prompt(&j));
    run_some(&j, 1);
    CU_ASSERT_EQUAL(j.stats.prefix_hits, blocks_of_a_prompt(&j));
    CU_ASSERT_EQUAL(j.stats.stored_blocks, 0);
    cpa_test_shared_folder_remove(&folder);
}

/* In the middle of every block of a rank's file. */
static void damage_file(const cpa_test_folder *folder, int32_t rank, int64_t block_bytes, int64_t blocks) {
    char path[600];
    snprintf(path, sizeof path, "%s/rank-%d-group-0.blocks", folder->path, rank);
    const int fd = open(path, O_WRONLY);
    CU_ASSERT_FATAL(fd >= 0);
    for (int64_t i = 0; i < blocks; i++) CU_ASSERT(pwrite(fd, "damaged", 7, i * block_bytes + block_bytes / 2) == 7);
    close(fd);
}

static void what_is_damaged_is_computed_again(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job j = job_of(16);
    const uint64_t digest = plain_digest(&j);
    keep(&j, 14);
    use_folder(&j, &folder, 100);
    run(&j);
    if (cpa_test_rank() == 0) damage_file(&folder, ranks() - 1, cpa_engine_block_bytes(&j.options), 40);
    MPI_Barrier(MPI_COMM_WORLD);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    run(&j);
    expect_digest(&j, digest);
    CPA_ASSERT_ORDER(j.stats.damaged_blocks, >, 0);
    CPA_ASSERT_ORDER(j.stats.prefix_hits, <, REQUESTS * blocks_of_a_prompt(&j));
    /* It was written anew. */
    run(&j);
    expect_digest(&j, digest);
    CU_ASSERT_EQUAL(j.stats.damaged_blocks, 0);
    CU_ASSERT_EQUAL(j.stats.prefix_hits, REQUESTS * blocks_of_a_prompt(&j));
    cpa_test_shared_folder_remove(&folder);
}

/* Every rank's files may have so many bytes. */
static void bound_files(rlim_t bytes) {
    struct rlimit limit;
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void with_a_full_disk_the_engine_goes_on(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job j = job_of(16);
    const uint64_t digest = plain_digest(&j);
    keep(&j, 40);
    use_folder(&j, &folder, 100);
    cpa_log_set(NULL, NULL, CPA_LOG_ERROR);
    if (cpa_test_rank() == ranks() - 1) bound_files((rlim_t)(5 * cpa_engine_block_bytes(&j.options) / 2));
    run(&j);
    bound_files(RLIM_INFINITY);
    expect_digest(&j, digest);
    CU_ASSERT_EQUAL(j.stats.prefix_hits, PROMPTS * blocks_of_a_prompt(&j)); /* from host memory */
    run(&j);
    expect_digest(&j, digest);
    cpa_test_shared_folder_remove(&folder);
}

typedef struct refusal {
    const char *message;
    void (*change)(cpa_engine_options *options);
} refusal;

static void change_seed(cpa_engine_options *o) {
    o->seed++;
}

static void change_salt(cpa_engine_options *o) {
    o->swap_salt = "pepper";
}

static void change_layout(cpa_engine_options *o) {
    o->model.attention.layout = CPA_HEAD_MAJOR;
}

static void change_dtype(cpa_engine_options *o) {
    o->model.attention.kv_dtype = CPA_INT8;
}

/* Over the quantised cache that the folder is of. */
static void change_precise(cpa_engine_options *o) {
    o->precise_tokens = 16;
}

static void a_folder_of_another_job_is_refused(void) {
    static const refusal refusals[] = {{"of seed 0; expected seed 1", change_seed},
                                       {"; expected salt ", change_salt},
                                       {"of layout 0; expected layout 1", change_layout},
                                       {"; expected dtype ", change_dtype},
                                       {"; expected precise 16", change_precise}};
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    job j = job_of(16);
    j.options.seed = 0;
    j.options.model.attention.kv_dtype = CPA_FP8_E4M3;
    keep(&j, 14);
    use_folder(&j, &folder, 100);
    run(&j);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        job other = j;
        refusals[i].change(&other.options);
        run_some(&other, 0);
        CU_ASSERT_EQUAL(other.created, CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(other.message, refusals[i].message));
        CU_ASSERT_PTR_NULL(strstr(other.message, "pepper"));
        if (!strstr(other.message, refusals[i].message)) printf("\n    %s\n", other.message);
    }
    run(&j); /* it has taken no harm */
    CU_ASSERT_EQUAL(j.stats.prefix_hits, REQUESTS * blocks_of_a_prompt(&j));
    cpa_test_shared_folder_remove(&folder);
}

static void options_that_keep_nothing_are_refused(void) {
    const cpa_test_folder folder = cpa_test_shared_folder_make();
    const struct {
        const char *message;
        int64_t host, disk;
        int no_prefixes, no_keep;
    } bad[] = {{"keep_evicted: found with swap_bytes 0", 0, 0, 0, 0},
               {"keep_evicted: found with no_prefix_caching", 10, 0, 1, 0},
               {"swap_folder: found with keep_evicted 0", 10, 10, 0, 1},
               {"swap_folder: found with keep_evicted 1 and swap_folder_bytes -", 10, -1, 0, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        job j = job_of(16);
        keep(&j, bad[i].host);
        j.options.keep_evicted = !bad[i].no_keep;
        j.options.no_prefix_caching = bad[i].no_prefixes;
        if (bad[i].disk != 0) use_folder(&j, &folder, bad[i].disk);
        run_some(&j, 0);
        CU_ASSERT_EQUAL(j.created, CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(j.message, bad[i].message));
    }
    job j = job_of(16);
    keep(&j, 10);
    use_folder(&j, &folder, 10);
    j.options.swap_folder_bytes = 100;
    run_some(&j, 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(j.message, "swap_folder_bytes: 100 bytes hold no block of "));
    cpa_test_shared_folder_remove(&folder);
    run_some(&j, 0);
    CU_ASSERT_EQUAL(j.created, CPA_INVALID);
    j.options.swap_folder_bytes = 1 << 20;
    run_some(&j, 0);
    CU_ASSERT_EQUAL(j.created, CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(j.message, "cannot be opened: No such file or directory"));
}

static const cpa_test tests[] = {
    {"what was evicted comes back from host memory", what_was_evicted_comes_back_from_host_memory},
    {"windows come back too", windows_come_back_too},
    {"precise tokens come back too", precise_tokens_come_back_too},
    {"what does not fit is computed", what_does_not_fit_is_computed},
    {"the next engine finds what is in the folder", the_next_engine_finds_what_is_in_the_folder},
    {"an engine saves what it has when it ends", an_engine_saves_what_it_has_when_it_ends},
    {"what is damaged is computed again", what_is_damaged_is_computed_again},
    {"with a full disk the engine goes on", with_a_full_disk_the_engine_goes_on},
    {"a folder of another job is refused", a_folder_of_another_job_is_refused},
    {"options that keep nothing are refused", options_that_keep_nothing_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("evicted blocks", tests)
