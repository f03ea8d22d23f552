/* Defaults and bounds of the engine's options, and what they mean to the scheduler. */
#include <math.h>
#include <stdio.h>

#include <cpattn/ngram.h>

#include "base/check.h"
#include "base/struct_size.h"
#include "src/engine/engine_options.h"
#include "src/engine/head_scales.h"
#include "src/engine/model_forms.h"
#include "src/model/synthetic.h"
#include "src/ops/check_args.h"
#include "src/ops/check_score.h"
#include "src/ops/check_shape.h"
#include "src/schedule/default_sizes.h"

enum { MAX_BLOCK_SIZE = 512, DEFAULT_DRAFTS = 4, MAX_DRAFTS = 1024 };

static int is_power_of_two(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

/* Layers whose cache is not quantised lie beside others whose cache is. */
static cpa_status check_unquantised(const cpa_model_shape *m, cpa_error *err) {
    int32_t layer = 0;
    while (layer < m->layers && !cpa_model_leaves_layer(m, layer)) layer++;
    if (layer == m->layers || (cpa_dtype_is_quantised(m->attention.kv_dtype) && !m->attention.v_in_k)) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "layer %d: unquantised in a cache of %s with v_in_k %d, expected a quantised one with v_in_k 0",
                    layer, cpa_dtype_name(m->attention.kv_dtype), m->attention.v_in_k);
}

/* First tokens that are precise lie in blocks of their own beside a quantised cache, which attends and copies of blocks
 * alone know of. */
static cpa_status check_precise(const cpa_engine_options *o, cpa_error *err) {
    const cpa_model_shape *m = &o->model;
    cpa_layer_groups groups;
    if (o->precise_tokens == 0) return CPA_OK;
    cpa_layer_groups_of(m, o->block_size, &groups);
    const struct {
        int is_there;
        const char *found;
    } others[] = {{m->attention.v_in_k, "a cache of latents"},
                  {m->index != NULL, "an indexer"},
                  {m->n_forms > 0, "forms of rows"},
                  {o->sparse_stride > 0, "sparse_stride"},
                  {o->ring_bytes > 0, "ring_bytes, a cache on the host"},
                  {o->block_store != NULL, "block_store"},
                  {o->algorithm == CPA_PASS_KV, "algorithm pass-KV"},
                  {o->interleave < o->block_size, "an interleave below the block size"},
                  {groups.count == CPA_MAX_LAYER_GROUPS, "as many masks of layers as there are groups"}};
    if (o->precise_tokens < 0 || o->precise_tokens % o->block_size != 0)
        return cpa_fail(err, CPA_INVALID, "precise_tokens: %lld, expected a multiple of the block size %d",
                        (long long)o->precise_tokens, o->block_size);
    if (!cpa_dtype_is_quantised(m->attention.kv_dtype))
        return cpa_fail(err, CPA_INVALID, "precise_tokens: %lld with a cache of %s, expected a quantised one",
                        (long long)o->precise_tokens, cpa_dtype_name(m->attention.kv_dtype));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].is_there)
            return cpa_fail(err, CPA_INVALID, "precise_tokens: %lld with %s, expected one of the two",
                            (long long)o->precise_tokens, others[i].found);
    return CPA_OK;
}

static cpa_status check_model(const cpa_model_shape *m, int has_network, cpa_error *err) {
    if (m->layers < 1) return cpa_fail(err, CPA_INVALID, "layers: %d, expected at least 1", m->layers);
    if (m->draft_layers < 0 || m->draft_layers >= m->layers) {
        return cpa_fail(err, CPA_INVALID, "draft_layers: %d, expected 0 or more, and fewer than all layers, %d",
                        m->draft_layers, m->layers);
    }
    CPA_TRY(cpa_check_shape("model", &m->attention, err));
    CPA_TRY(check_unquantised(m, err));
    for (int32_t layer = 0; layer < m->layers; layer++) {
        cpa_mask mask = cpa_model_mask(m, layer);
        char where[32];
        snprintf(where, sizeof where, "layer %d", layer);
        CPA_TRY(cpa_check_layer_mask(where, &mask, err));
        CPA_TRY(cpa_check_score(where, cpa_model_rules(m, layer), NULL, NULL, err));
    }
    return cpa_model_forms_check(m, has_network, err);
}

/* A number that is none of an enum comes from a caller in another language, or from memory that was not cleared. */
static cpa_status check_choices(const cpa_engine_options *o, cpa_error *err) {
    const struct {
        const char *name;
        int value, last;
    } choices[] = {
        {"algorithm", (int)o->algorithm, CPA_PASS_Q},
        {"preemption", (int)o->preemption, CPA_PREEMPT_AUTO},
        {"policy", (int)o->policy, CPA_POLICY_FCFS},
        {"transport", (int)o->transport, CPA_TRANSPORT_HOST},
        {"drafter", (int)o->drafter, CPA_DRAFT_MODEL},
        {"cascade_attention", (int)o->cascade_attention, CPA_CASCADE_ALWAYS},
        {"short_prompts", (int)o->short_prompts, CPA_SHORT_PROMPTS_ABSORB},
    };
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        if (choices[i].value >= 0 && choices[i].value <= choices[i].last) continue;
        return cpa_fail(err, CPA_INVALID, "%s: %d is none, expected 0 to %d", choices[i].name, choices[i].value,
                        choices[i].last);
    }
    return CPA_OK;
}

/* Which keys are attended, where these are not all. */
static cpa_status check_sparse(const cpa_engine_options *o, cpa_error *err) {
    const int32_t stride = o->sparse_stride;
    if (stride != 0 && stride != 4 && stride != 8 && stride != 16)
        return cpa_fail(err, CPA_INVALID, "sparse_stride: %d, expected 4, 8 or 16, or 0", stride);
    if (stride != 0 && !(o->sparse_tau > 0 && o->sparse_tau <= 1))
        return cpa_fail(err, CPA_INVALID, "sparse_tau: %g, expected above 0 and at most 1", (double)o->sparse_tau);
    if (!(o->skip_tiles >= 0) || isinf(o->skip_tiles))
        return cpa_fail(err, CPA_INVALID, "skip_tiles: %g, expected 0 (none) or more", (double)o->skip_tiles);
    return CPA_OK;
}

static void fill_defaults(cpa_engine_options *o) {
    if (o->device.size == 0) o->device.size = sizeof o->device;
    if (o->model.attention.v_dim == 0) o->model.attention.v_dim = o->model.attention.k_dim;
    cpa_engine_default_sizes(o);
    if (o->draft_tokens == 0) o->draft_tokens = DEFAULT_DRAFTS;
}

/* The model, if there is one, can be called. */
static cpa_status check_network(const cpa_model *given, const cpa_index_form *index, cpa_error *err) {
    cpa_model network;
    if (!given) return CPA_OK;
    CPA_TRY(CPA_STRUCT_TAKE("network", given, cpa_model, layer_in, &network, err));
    if (!network.layer_in) return cpa_fail(err, CPA_INVALID, "network: layer_in is NULL, expected a function");
    if (network.n_end_ids < 0 || (network.n_end_ids > 0 && !network.end_ids)) {
        return cpa_fail(err, CPA_INVALID, "network: %lld end_ids at %p", (long long)network.n_end_ids,
                        (const void *)network.end_ids);
    }
    if (network.select_width < 0)
        return cpa_fail(err, CPA_INVALID, "network: select_width %d, expected 0 or more", network.select_width);
    if (index && (!network.select || network.select_width < index->k))
        return cpa_fail(err, CPA_INVALID, "network: an indexer of lists of %d, but %s %d, expected select, and no less",
                        index->k, network.select ? "select_width" : "no select and select_width", network.select_width);
    if ((int)network.slices < CPA_SLICES_NONE || network.slices > CPA_SLICES_ALL) {
        return cpa_fail(err, CPA_INVALID, "network: slices %d is none, expected 0 to %d", (int)network.slices,
                        (int)CPA_SLICES_ALL);
    }
    if (!CPA_RESERVED_IS_ZERO(network)) return cpa_fail(err, CPA_INVALID, "network: its reserved bytes are not zero");
    return CPA_OK;
}

/* Layers that draft are of a network that draws, and whose drafts are asked for. */
static cpa_status check_draft_layers(const cpa_engine_options *o, const cpa_model *network, cpa_error *err) {
    const int32_t n = o->model.draft_layers;
    if (!network->end_draft || !network->end_step)
        return cpa_fail(err, CPA_INVALID, "draft_layers: %d without a network that has end_step and end_draft", n);
    if (o->drafter != CPA_DRAFT_MODEL)
        return cpa_fail(err, CPA_INVALID, "draft_layers: %d with drafter %d, expected %d, the network", n,
                        (int)o->drafter, (int)CPA_DRAFT_MODEL);
    return CPA_OK;
}

/* The store, if there is one, can be called. */
static cpa_status check_store(const cpa_block_store *given, cpa_error *err) {
    cpa_block_store store;
    if (!given) return CPA_OK;
    CPA_TRY(CPA_STRUCT_TAKE("block_store", given, cpa_block_store, get, &store, err));
    if (store.put && store.get) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "block_store: %s is NULL, expected a function", store.put ? "get" : "put");
}

/* Whether anybody drafts, and with what. */
static cpa_status check_drafter(const cpa_engine_options *o, cpa_error *err) {
    cpa_model network = {.size = 0};
    cpa_ngram *tried;
    if (o->draft_tokens < 0 || o->draft_tokens > MAX_DRAFTS) {
        return cpa_fail(err, CPA_INVALID, "draft_tokens: %d, expected 1 to %d, or 0 (%d)", o->draft_tokens, MAX_DRAFTS,
                        DEFAULT_DRAFTS);
    }
    const cpa_ngram_options ngram = {sizeof ngram, o->ngram_min, o->ngram_max, o->ngram_branches};
    CPA_TRY(cpa_ngram_create(&ngram, &tried, err));
    cpa_ngram_destroy(tried);
    if (o->network) CPA_TRY(CPA_STRUCT_TAKE("network", o->network, cpa_model, layer_in, &network, err));
    if (o->model.draft_layers > 0) return check_draft_layers(o, &network, err);
    if (o->drafter == CPA_DRAFT_MODEL && !network.draft)
        return cpa_fail(err, CPA_INVALID, "drafter: the network drafts, but its draft is NULL, expected a function");
    return CPA_OK;
}

/* What is evicted has a place to stay in. */
static cpa_status check_kept(const cpa_engine_options *o, cpa_error *err) {
    if (o->keep_evicted && (o->no_prefix_caching || o->swap_bytes == 0))
        return cpa_fail(err, CPA_INVALID, "keep_evicted: found with %s, expected %s",
                        o->no_prefix_caching ? "no_prefix_caching" : "swap_bytes 0",
                        o->no_prefix_caching ? "blocks that can be found" : "host memory for blocks");
    if (o->swap_folder && (!o->keep_evicted || o->swap_folder_bytes < 1))
        return cpa_fail(err, CPA_INVALID,
                        "swap_folder: found with keep_evicted %d and swap_folder_bytes %lld, expected "
                        "1 and room for blocks",
                        o->keep_evicted, (long long)o->swap_folder_bytes);
    return CPA_OK;
}

cpa_status cpa_engine_resolve(const cpa_engine_options *given, cpa_engine_options *out, cpa_error *err) {
    cpa_engine_options o;
    CPA_TRY(CPA_STRUCT_TAKE("engine", given, cpa_engine_options, num_blocks, &o, err));
    fill_defaults(&o);
    CPA_TRY(check_model(&o.model, o.network != NULL, err));
    CPA_TRY(check_choices(&o, err));
    CPA_TRY(check_sparse(&o, err));
    CPA_TRY(cpa_head_scales_check(&o, err));
    if (!is_power_of_two(o.block_size) || o.block_size > MAX_BLOCK_SIZE) {
        return cpa_fail(err, CPA_INVALID, "block_size: %d, expected a power of two up to %d", o.block_size,
                        MAX_BLOCK_SIZE);
    }
    if (!cpa_interleave_fits(o.interleave, o.block_size)) {
        return cpa_fail(err, CPA_INVALID, "interleave: %d, expected a divisor or a multiple of the block size %d",
                        o.interleave, o.block_size);
    }
    CPA_TRY(check_precise(&o, err));
    if (o.num_blocks < 1 || o.num_blocks > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "num_blocks: %lld, expected 1 to %d", (long long)o.num_blocks, INT32_MAX);
    }
    if (o.max_num_batched_tokens < 1 || o.max_num_batched_tokens > INT32_MAX) {
        return cpa_fail(err, CPA_INVALID, "max_num_batched_tokens: %lld, expected 1 to %d",
                        (long long)o.max_num_batched_tokens, INT32_MAX);
    }
    if (o.max_num_seqs < 1) return cpa_fail(err, CPA_INVALID, "max_num_seqs: %d, expected at least 1", o.max_num_seqs);
    if (o.window_seqs < 1) return cpa_fail(err, CPA_INVALID, "window_seqs: %d, expected at least 1", o.window_seqs);
    if (o.timeline_spans < 0) {
        return cpa_fail(err, CPA_INVALID, "timeline_spans: %lld, expected 0 (none) or more",
                        (long long)o.timeline_spans);
    }
    if (!((o.verify >= 0 && o.verify <= 1) || o.verify == CPA_VERIFY_AUTO)) {
        return cpa_fail(err, CPA_INVALID, "verify: %g, expected 0 to 1, or %g", o.verify, CPA_VERIFY_AUTO);
    }
    if (o.swap_bytes < 0 || !(o.ageing_s >= 0) || !isfinite(o.ageing_s) || o.long_prefill_token_threshold < 0 ||
        o.tenant_block_quota < 0) {
        return cpa_fail(err, CPA_INVALID,
                        "swap_bytes %lld, ageing_s %g, long_prefill_token_threshold %lld, tenant_block_quota %lld: "
                        "expected finite numbers, none negative",
                        (long long)o.swap_bytes, o.ageing_s, (long long)o.long_prefill_token_threshold,
                        (long long)o.tenant_block_quota);
    }
    if (o.max_queued_requests < 0 || o.max_queued_tokens < 0) {
        return cpa_fail(err, CPA_INVALID,
                        "max_queued_requests %lld, max_queued_tokens %lld: expected 0 (no bound) or more",
                        (long long)o.max_queued_requests, (long long)o.max_queued_tokens);
    }
    if (o.local_context < CPA_LOCAL_CONTEXT_NONE) {
        return cpa_fail(err, CPA_INVALID, "local_context: %lld, expected tokens, 0 (automatic) or %d (none)",
                        (long long)o.local_context, CPA_LOCAL_CONTEXT_NONE);
    }
    if (o.state_dtype != CPA_F32 && o.state_dtype != o.model.attention.dtype)
        return cpa_fail(err, CPA_INVALID, "state_dtype is %s, expected fp32, or %s as the model",
                        cpa_dtype_name(o.state_dtype), cpa_dtype_name(o.model.attention.dtype));
    CPA_TRY(check_network(o.network, o.model.index, err));
    CPA_TRY(check_store(o.block_store, err));
    CPA_TRY(check_drafter(&o, err));
    CPA_TRY(check_kept(&o, err));
    *out = o;
    return CPA_OK;
}

int64_t cpa_engine_block_bytes(const cpa_engine_options *o) {
    return cpa_layer_groups_block_bytes(&o->model, o->block_size);
}

cpa_layer_groups cpa_engine_groups(const cpa_engine_options *o, int32_t cp_size) {
    const cpa_layer_groups_load load = {.map = {cp_size, o->interleave},
                                        .block_size = o->block_size,
                                        .sequences = o->window_seqs,
                                        .step_tokens = o->max_num_batched_tokens};
    cpa_layer_groups groups;
    cpa_layer_groups_of(&o->model, o->block_size, &groups);
    cpa_layer_groups_add_precise(&groups, &o->model, o->block_size, o->precise_tokens);
    cpa_layer_groups_size(&groups, &load, o->num_blocks);
    if (o->preemption != CPA_PREEMPT_RECOMPUTE || o->keep_evicted) cpa_layer_groups_size_host(&groups, o->swap_bytes);
    if (o->swap_folder) cpa_layer_groups_size_disk(&groups, o->swap_folder_bytes);
    return groups;
}

cpa_status cpa_engine_check_room(const cpa_engine_options *o, const cpa_layer_groups *groups, cpa_error *err) {
    for (int32_t g = 0; o->keep_evicted && g < groups->count; g++) {
        const cpa_layer_group *group = &groups->list[g];
        if (group->host_blocks > 0 && (!o->swap_folder || group->disk_blocks > 0)) continue;
        const int is_host = group->host_blocks == 0;
        return cpa_fail(
            err, CPA_INVALID, "%s: %lld bytes hold no block of %lld bytes, of %d layers of a window; expected more",
            is_host ? "swap_bytes" : "swap_folder_bytes", (long long)(is_host ? o->swap_bytes : o->swap_folder_bytes),
            (long long)group->block_bytes, group->layers);
    }
    return CPA_OK;
}

cpa_planner cpa_engine_planner(const cpa_engine_options *o, int32_t cp_size) {
    return (cpa_planner){
        .forced = o->precise_tokens > 0 ? CPA_PASS_Q : o->algorithm, /* what is precise stays where it is */
        .cp_size = cp_size,
        .shape = o->model.attention,
        .state_dtype = o->state_dtype,
    };
}

#define FORMAT_OF(value) _Generic((value), float : "%g", default : "%d")

/* Fails with the values of all fields that reach the draw, if one of them is out of its bounds, as a NaN is. */
static cpa_status check_drawing(uint64_t request, const cpa_sampling *s, cpa_error *err) {
    char found[320] = "";
    int is_right = 1, used = 0;
#define DRAWING(type, field, least, most, none)                                                                        \
    is_right &= (double)s->field >= (double)(least) && (double)s->field <= (double)(most);                             \
    used += snprintf(found + used, sizeof found - (size_t)used, "%s" #field " ", used > 0 ? ", " : "");                \
    used += snprintf(found + used, sizeof found - (size_t)used, FORMAT_OF(s->field), s->field);
    CPA_DRAWING_FIELDS(DRAWING)
#undef DRAWING
    if (is_right) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "request %llu: %s; expected none negative but the last two, top_p and min_p up to 1, all finite",
                    (unsigned long long)request, found);
}

static cpa_status check_logprobs(uint64_t request, const char *of, int32_t wanted, int32_t top, cpa_error *err) {
    if (top >= 0 && top <= CPA_MOST_TOP_LOGPROBS && (top == 0 || wanted)) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "request %llu: top_%slogprobs %d with %slogprobs %d, expected 0, or up to %d with 1",
                    (unsigned long long)request, of, top, of, wanted, CPA_MOST_TOP_LOGPROBS);
}

cpa_status cpa_engine_check_sampling(uint64_t request, const cpa_sampling *given, cpa_sampling *out, cpa_error *err) {
    cpa_sampling s = {.size = sizeof s};
    if (given) CPA_TRY(CPA_STRUCT_TAKE("sampling", given, cpa_sampling, seed, &s, err));
    CPA_TRY(check_drawing(request, &s, err));
    CPA_TRY(check_logprobs(request, "", s.logprobs, s.top_logprobs, err));
    CPA_TRY(check_logprobs(request, "prompt_", s.prompt_logprobs, s.top_prompt_logprobs, err));
    if (s.n_stop_ids < 0 || s.n_stop_ids > INT32_MAX || (s.n_stop_ids > 0 && !s.stop_ids)) {
        return cpa_fail(err, CPA_INVALID, "request %llu: %lld stop_ids at %p", (unsigned long long)request,
                        (long long)s.n_stop_ids, (const void *)s.stop_ids);
    }
    if (!CPA_RESERVED_IS_ZERO(s)) {
        return cpa_fail(err, CPA_INVALID, "request %llu: the reserved bytes of its sampling are not zero",
                        (unsigned long long)request);
    }
    *out = s;
    return CPA_OK;
}

cpa_plan_sampling cpa_engine_planned_sampling(const cpa_sampling *sampling) {
    cpa_plan_sampling planned = {
        .seed = sampling->seed,
        .logprobs = sampling->logprobs != 0,
        .top_logprobs = sampling->top_logprobs,
        .prompt_logprobs = sampling->prompt_logprobs != 0,
        .top_prompt_logprobs = sampling->top_prompt_logprobs,
    };
#define DRAWING(type, field, least, most, none) planned.field = sampling->field != 0 ? sampling->field : (type)(none);
    CPA_DRAWING_FIELDS(DRAWING)
#undef DRAWING
    return planned;
}

cpa_scheduler_request cpa_engine_scheduled(const cpa_request *r) {
    return (cpa_scheduler_request){
        .id = r->id,
        .prompt_tokens = r->prompt_tokens,
        .output_tokens = r->output_tokens,
        .arrival = r->arrival_s,
        .priority = r->priority,
        .salt = r->salt,
        .tenant = r->tenant,
        .group = r->group,
        .imports = (r->transfer & CPA_TRANSFER_IMPORT) != 0,
        .exports = (r->transfer & CPA_TRANSFER_EXPORT) != 0,
        .sampling = {.top_p = 1, .repetition_penalty = 1},
    };
}

/* Whether a layer tells keys by their places, which those of a tree of drafts have beside each other. */
static int counts_places(const cpa_model_shape *model) {
    if (model->index) return 1; /* drafts of another branch would be chosen, and then not seen */
    for (int32_t layer = 0; layer < model->layers; layer++) {
        const cpa_score_rules *rules = cpa_model_rules(model, layer);
        if (cpa_model_form_mask(model, model->decode_form, layer).window > 0) return 1;
        if (rules && (rules->alibi_slopes || rules->temperature_len > 0)) return 1;
    }
    return 0;
}

cpa_scheduler_options cpa_engine_scheduler_options(cpa_engine_options *o, const cpa_layer_groups *groups,
                                                   cpa_planner planner, uint64_t scales,
                                                   char identity[CPA_IDENTITY_BYTES]) {
    cpa_engine_describe_cache(o, scales, identity);
    return (cpa_scheduler_options){
        .map = {planner.cp_size, o->interleave},
        .block_size = o->block_size,
        .groups = *groups,
        .max_num_batched_tokens = o->max_num_batched_tokens,
        .max_num_seqs = o->max_num_seqs,
        .planner = planner,
        .token_at = o->token_at ? o->token_at : cpa_synthetic_token,
        .token_ctx = o->token_at ? o->token_ctx : &o->seed,
        .prefix_caching = !o->no_prefix_caching,
        .keep_evicted = o->keep_evicted,
        .confirms = 1,
        .identity = identity,
        .store_layers = cpa_engine_hash_store_layers(&o->model),
        .preemption = o->preemption,
        .policy = o->policy,
        .ageing_s = o->ageing_s,
        .long_prefill_threshold = o->long_prefill_token_threshold,
        .adaptive_chunks = o->adaptive_chunks,
        .tenant_block_quota = o->tenant_block_quota,
        .local_context = o->local_context,
        .on_block_event = o->on_block_event,
        .block_event_ctx = o->block_event_ctx,
        .drafting = {.most = o->drafter == CPA_DRAFT_NONE ? 0 : o->draft_tokens,
                     .is_told = o->model.draft_layers > 0,
                     .chains_alone = counts_places(&o->model),
                     .ngram_min = o->ngram_min,
                     .ngram_max = o->ngram_max,
                     .ngram_branches = o->ngram_branches},
    };
}

void cpa_engine_describe_groups(const cpa_layer_groups *groups, cpa_engine_stats *s) {
    _Static_assert((int)CPA_ENGINE_KV_GROUPS == (int)CPA_MAX_LAYER_GROUPS, "each group is told of");
    s->kv_blocks = groups->list[0].num_blocks;
    s->kv_groups = groups->count;
    for (int32_t g = 0; g < groups->count; g++) {
        const cpa_layer_group *group = &groups->list[g];
        s->kv_group[g] = (cpa_engine_kv_group){.layers = group->layers,
                                               .window = group->window,
                                               .sinks = group->sinks,
                                               .block_bytes = group->block_bytes,
                                               .blocks = group->num_blocks};
        if (group->is_precise) s->precise_bytes = group->num_blocks * group->block_bytes;
    }
}

void cpa_engine_take_stats(const cpa_scheduler_stats *scheduled, cpa_engine_stats *s) {
    for (int32_t g = 0; g < s->kv_groups; g++) {
        s->kv_group[g].peak = scheduled->peak_blocks[g];
        s->kv_group[g].used = scheduled->used_blocks[g];
    }
    s->kv_peak = scheduled->peak_blocks[0];
    s->preemptions = scheduled->preemptions;
    s->prefix_queries = scheduled->prefix_queries;
    s->prefix_hits = scheduled->prefix_hits;
    s->evictions = scheduled->evictions;
    s->swapped_out = scheduled->swapped_out;
    s->swapped_in = scheduled->swapped_in;
    s->swap_failures = scheduled->swap_failures;
    s->kept_blocks = scheduled->kept_blocks;
    s->stored_blocks = scheduled->stored_blocks;
    s->fetched_blocks = scheduled->fetched_blocks;
    s->loaded_blocks = scheduled->loaded_blocks;
    s->damaged_blocks = scheduled->damaged_blocks;
    s->restored_blocks = scheduled->restored_blocks;
    s->host_blocks = scheduled->blocks_in_host;
    s->folder_blocks = scheduled->blocks_on_disk;
    s->imported_tokens = scheduled->imported_tokens;
    s->import_failures = scheduled->import_failures;
    s->cow_copies = scheduled->cow_copies;
    s->rank_local = scheduled->rank_local;
    s->requests_waiting = scheduled->waiting;
    s->requests_running = scheduled->running;
    s->tenants_active = scheduled->tenants;
    s->cut_chunks = scheduled->cut_chunks;
    s->held_back = scheduled->held_back;
    s->kv_used = scheduled->used_blocks[0];
    int64_t *const planned[] = {[CPA_PASS_KV] = &s->planned_pass_kv, [CPA_PASS_Q] = &s->planned_pass_q};
    s->planned_local = 0;
    for (int algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        const int64_t *chunks = scheduled->chunks[algorithm];
        *planned[algorithm] = 0;
        for (int reason = 0; reason < CPA_REASON_COUNT; reason++)
            *(reason == CPA_REASON_LOCAL ? &s->planned_local : planned[algorithm]) += chunks[reason];
    }
}
