/* Everything that a cache can be, at once: each seed draws dtype and scales, layout, blocks, masks of layers, precise
 * first tokens, algorithm, sharing, preemption, quota, policy and requests. Every request finishes, the sampled check
 * finds nothing, and where the back end promises bits they are those of the same requests run plainly.
 *
 * CPATTN_TEST_SEEDS=FIRST:LAST chooses the seeds. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/min_max.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LAYERS = 3, MOST_REQUESTS = 14, AMPLE_BLOCKS = 600 };

/* What one seed stands for. */
typedef struct combination {
    uint64_t state; /* of the generator */
    cpa_engine_options options;
    cpa_mask masks[LAYERS];
    int n_requests;
    cpa_request requests[MOST_REQUESTS];
    int prompts[MOST_REQUESTS];    /* requests with the same one have the same prompt */
    int64_t common[MOST_REQUESTS]; /* first tokens of a prompt that its family has in common */
} combination;

/* What the seeds came across, all together. */
static cpa_engine_stats seen;

static int64_t draw(combination *c, int64_t first, int64_t last) {
    c->state += CPA_GOLDEN;
    return first + (int64_t)(cpa_mix64(c->state) % (uint64_t)(last - first + 1));
}

/* Prompts of one family begin alike; what a request emits is its own. */
static uint32_t token_at(void *ctx, uint64_t request, int64_t position) {
    const combination *c = ctx;
    int i = (int)request, prompt = c->prompts[i];
    uint64_t text = 1000 + request;
    if (position < c->requests[i].prompt_tokens) text = position < c->common[prompt] ? prompt % 2 : 100 + prompt;
    return (uint32_t)cpa_mix64(text << 32 ^ (uint64_t)position);
}

static void draw_cache(combination *c) {
    static const cpa_dtype model_dtypes[] = {CPA_F32, CPA_BF16, CPA_F16};
    static const cpa_dtype cache_dtypes[] = {CPA_F32, CPA_BF16, CPA_F16, CPA_FP8_E4M3, CPA_FP8_E4M3, CPA_INT8};
    cpa_engine_options *o = &c->options;
    o->model = (cpa_model_shape){.layers = LAYERS,
                                 .attention.q_heads = 4,
                                 .attention.kv_heads = (int32_t)draw(c, 1, 2) * 2,
                                 .attention.k_dim = draw(c, 0, 1) ? 32 : 24,
                                 .attention.v_dim = draw(c, 0, 1) ? 32 : 16,
                                 .attention.dtype = model_dtypes[draw(c, 0, 2)],
                                 .mask = {.causal = 1}};
    int64_t dtype = draw(c, 0, 6);
    o->model.attention.kv_dtype = dtype == 6 ? o->model.attention.dtype : cache_dtypes[dtype];
    if (dtype == 4) o->model.attention.k_scale = 0.03125f, o->model.attention.v_scale = 0.0625f;
    o->model.attention.layout = draw(c, 0, 1) ? CPA_HEAD_MAJOR : CPA_TOKEN_MAJOR;
    o->block_size = 16 << draw(c, 0, 1);
    o->interleave = draw(c, 0, 2) ? o->block_size << draw(c, 0, 2) : 1 << draw(c, 0, 3);
}

static void draw_masks(combination *c) {
    int64_t kind = draw(c, 0, 3);
    if (kind == 0) return;
    for (int layer = 0; layer < LAYERS; layer++) {
        c->masks[layer] = (cpa_mask){.causal = 1, .window = draw(c, 5, 90), .sinks = (int32_t)draw(c, 0, 40)};
        if (kind == 1) c->masks[layer] = c->masks[0];            /* blocks are freed in the run */
        if (kind == 2 && layer == 1) c->masks[layer].window = 0; /* one layer sees everything */
        if (kind == 3 && layer == 1) c->masks[layer].sinks = 0;
    }
    c->options.model.layer_masks = c->masks;
}

static void draw_requests(combination *c) {
    static const char *const salts[] = {NULL, "one", "two"};
    c->n_requests = (int)draw(c, 6, MOST_REQUESTS);
    int64_t tenants = draw(c, 0, 2), arrivals = draw(c, 0, 2), longest = draw(c, 0, 1) ? 120 : 300;
    for (int i = 0; i < c->n_requests; i++) {
        cpa_request *r = &c->requests[i];
        int sample = i > 0 && draw(c, 0, 3) == 0;
        *r = (cpa_request){.size = sizeof *r,
                           .id = (uint64_t)i,
                           .prompt_tokens = draw(c, 1, longest),
                           .output_tokens = draw(c, 1, 40),
                           .arrival_s = (double)arrivals * 0.002 * (double)draw(c, 0, i),
                           .priority = (int32_t)draw(c, -1, 1),
                           .salt = salts[draw(c, 0, tenants)]};
        c->prompts[i] = i;
        c->common[i] = draw(c, 0, 1) ? longest : draw(c, 0, longest);
        if (!sample) continue;
        cpa_request *first = &c->requests[c->prompts[i] = c->prompts[i - 1]];
        r->prompt_tokens = first->prompt_tokens;
        r->salt = first->salt;
        r->group = first->group = (uint64_t)c->prompts[i] + 1;
    }
}

/* Blocks that the longest request fills on one rank, at most. */
static int64_t blocks_of_longest(const combination *c, int ranks) {
    const int64_t run = cpa_max64(c->options.interleave, c->options.block_size);
    int64_t longest = 0, deal = run * ranks;
    for (int i = 0; i < c->n_requests; i++) {
        int64_t tokens = c->requests[i].prompt_tokens + c->requests[i].output_tokens;
        if (tokens > longest) longest = tokens;
    }
    return (longest + deal - 1) / deal * run / c->options.block_size;
}

static void draw_service(combination *c, int ranks) {
    static const int64_t swap_bytes[] = {0, 64 << 10, 16 << 20};
    static const cpa_algorithm algorithms[] = {CPA_AUTO, CPA_PASS_KV, CPA_PASS_Q};
    cpa_engine_options *o = &c->options;
    int64_t least = blocks_of_longest(c, ranks);
    o->num_blocks = least + draw(c, 0, draw(c, 0, 3) * least);
    o->tenant_block_quota = draw(c, 0, 2) ? 0 : least + draw(c, 0, least);
    /* What a rank can hold whole, also under the quota: a plain run has to place it alike. */
    int64_t whole =
        o->tenant_block_quota && o->tenant_block_quota < o->num_blocks ? o->tenant_block_quota : o->num_blocks;
    o->local_context = draw(c, 0, 1) ? draw(c, 1, whole * o->block_size) : CPA_LOCAL_CONTEXT_NONE;
    o->max_num_batched_tokens = draw(c, 8, 160);
    o->max_num_seqs = (int32_t)draw(c, 1, 8);
    o->algorithm = algorithms[draw(c, 0, 2)];
    o->no_prefix_caching = draw(c, 0, 3) == 0;
    o->preemption = (cpa_preemption_mode)draw(c, CPA_PREEMPT_RECOMPUTE, CPA_PREEMPT_AUTO);
    o->swap_bytes = swap_bytes[draw(c, 0, 2)];
    o->keep_evicted = !o->no_prefix_caching && o->swap_bytes == swap_bytes[2];
    o->policy = draw(c, 0, 1) ? CPA_POLICY_FCFS : CPA_POLICY_PRIORITY;
    o->ageing_s = draw(c, 0, 1) ? 0.001 : 0;
    o->long_prefill_token_threshold = draw(c, 0, 1) ? draw(c, 1, 50) : 0;
    o->adaptive_chunks = (int32_t)draw(c, 0, 1);
}

/* Last, as they do not go with all that is drawn before; pass-KV gives way to them. */
static void draw_precise(combination *c) {
    cpa_engine_options *o = &c->options;
    const int64_t blocks = draw(c, 0, 4);
    if (!cpa_dtype_is_quantised(o->model.attention.kv_dtype) || o->interleave < o->block_size) return;
    o->precise_tokens = blocks * o->block_size;
    if (blocks > 0 && o->algorithm == CPA_PASS_KV) o->algorithm = CPA_AUTO;
}

static void draw_all(combination *c, uint64_t seed, int ranks) {
    memset(c, 0, sizeof *c);
    c->state = seed << 8;
    c->options = (cpa_engine_options){.size = sizeof c->options,
                                      .device = cpa_test_device_options(0),
                                      .staging_bytes = 8 << 20,
                                      .verify = 0.05,
                                      .skip_self_test = 1,
                                      .seed = seed,
                                      .token_at = token_at,
                                      .token_ctx = c};
    draw_cache(c);
    draw_masks(c);
    draw_requests(c);
    draw_service(c, ranks);
    draw_precise(c);
}

/* The same without anything that shares, saves, moves or bounds memory. */
static cpa_engine_options plain(cpa_engine_options o) {
    o.num_blocks = AMPLE_BLOCKS;
    o.tenant_block_quota = o.long_prefill_token_threshold = o.swap_bytes = 0;
    o.max_num_batched_tokens = 2048;
    o.max_num_seqs = MOST_REQUESTS;
    o.adaptive_chunks = o.keep_evicted = 0;
    o.algorithm = CPA_PASS_Q;
    o.no_prefix_caching = 1;
    o.model.attention.layout = CPA_TOKEN_MAJOR;
    o.verify = 0;
    return o;
}

static void describe(const combination *c, uint64_t seed, int ranks) {
    const cpa_engine_options *o = &c->options;
    printf(
        "seed %llu on %d ranks: dtype %d in %d, scale %g, layout %d, blocks of %d, interleave %d, masks %d, %lld "
        "precise tokens, algorithm %d, %lld blocks, local context %lld, quota %lld, caching %d, preemption %d, %lld "
        "swap bytes, evicted blocks kept %d\n",
        (unsigned long long)seed, ranks, (int)o->model.attention.dtype, (int)o->model.attention.kv_dtype,
        (double)o->model.attention.k_scale, (int)o->model.attention.layout, o->block_size, o->interleave,
        o->model.layer_masks != NULL, (long long)o->precise_tokens, (int)o->algorithm, (long long)o->num_blocks,
        (long long)o->local_context, (long long)o->tenant_block_quota, !o->no_prefix_caching, (int)o->preemption,
        (long long)o->swap_bytes, o->keep_evicted);
}

/* Runs the requests of a combination with these options; whether all is well. */
static int run(const combination *c, const cpa_engine_options *options, int samples, cpa_engine_stats *stats) {
    cpa_request requests[MOST_REQUESTS];
    memcpy(requests, c->requests, sizeof requests);
    for (int i = 0; i < c->n_requests && !samples; i++) requests[i].group = 0;
    return cpa_test_engine_run(options, requests, c->n_requests, NULL, NULL, stats) && stats->swap_failures == 0;
}

static void add_seen(const cpa_engine_stats *stats) {
    seen.prefix_hits += stats->prefix_hits;
    seen.evictions += stats->evictions;
    seen.preemptions += stats->preemptions;
    seen.swapped_in += stats->swapped_in;
    seen.fetched_blocks += stats->fetched_blocks;
    seen.cow_copies += stats->cow_copies;
    seen.verify_rows += stats->verify_rows;
    seen.precise_bytes += stats->precise_bytes;
}

static void every_combination_gives_what_a_plain_run_gives(void) {
    const char *text = getenv("CPATTN_TEST_SEEDS");
    unsigned long long first = 0, last = 15;
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (text) CU_ASSERT_EQUAL_FATAL(sscanf(text, "%llu:%llu", &first, &last), 2);
    for (uint64_t seed = first; seed <= last; seed++) {
        combination c;
        cpa_engine_stats mixed = {0}, reference = {0};
        draw_all(&c, seed, ranks);
        int well = run(&c, &c.options, 1, &mixed);
        add_seen(&mixed);
        if (well && cpa_test_promises_bits()) {
            cpa_engine_options options = plain(c.options);
            well = run(&c, &options, 0, &reference) && mixed.output_digest == reference.output_digest;
        }
        if (!well) describe(&c, seed, ranks);
        CU_ASSERT(well);
    }
}

static void the_combinations_shared_evicted_fetched_preempted_swapped_and_copied(void) {
    CPA_ASSERT_ORDER(seen.prefix_hits, >, 0);
    CPA_ASSERT_ORDER(seen.evictions, >, 0);
    CPA_ASSERT_ORDER(seen.preemptions, >, 0);
    CPA_ASSERT_ORDER(seen.swapped_in, >, 0);
    CPA_ASSERT_ORDER(seen.fetched_blocks, >, 0);
    CPA_ASSERT_ORDER(seen.cow_copies, >, 0);
    CPA_ASSERT_ORDER(seen.verify_rows, >, 1000);
    CPA_ASSERT_ORDER(seen.precise_bytes, >, 0);
}

static const cpa_test tests[] = {
    {"every combination gives what a plain run gives", every_combination_gives_what_a_plain_run_gives},
    {"the combinations shared, evicted, fetched, preempted, swapped and copied",
     the_combinations_shared_evicted_fetched_preempted_swapped_and_copied},
};
CPA_MPI_DEVICE_TEST_MAIN("combinations", tests)
