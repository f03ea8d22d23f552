#include "launcher/job.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <cpattn/xattn.h>

#include "base/check.h"
#include "base/min_max.h"
#include "launcher/block_store.h"
#include "launcher/output/timeline_json.h"
#include "launcher/settings/head_scales.h"
#include "launcher/settings/settings_check.h"
#include "launcher/settings/settings_table.h"
#include "launcher/settings/skip_layers.h"
#include "program/output_file.h"
#include "src/llm/folder_model.h"
#include "src/schedule/planner.h"
#include "src/schedule/scheduler.h"

/* The mixed run chooses its length after the engine has measured its rates; until then the cache is made for this. */
#define MIXED_RUN_TOKENS ((int64_t)1 << 18)

#define BYTES_PER_GIB ((double)(1 << 30))

/* Whether the run will be on CUDA devices, as cpa_placement_choose decides. */
static int is_on_cuda(const cpa_settings *settings) {
    return settings->device == CPA_DEVICE_CUDA ||
           (settings->device == CPA_DEVICE_AUTO && cpa_device_count(CPA_BACKEND_CUDA) > 0);
}

/* The module of the network drafts, where the settings say so. */
static cpa_status choose_draft_layers(cpa_job *job, cpa_error *err) {
    cpa_speculative speculative = {.drafter = CPA_DRAFT_NONE};
    CPA_TRY(cpa_settings_speculative(&job->settings, &speculative, err));
    job->network.draft_layers = speculative.drafter == CPA_DRAFT_MODEL;
    if (job->network.draft_layers <= job->network.next_modules) return CPA_OK;
    return cpa_fail(err, CPA_INVALID,
                    "--speculative: found mtp:1, expected another way to draft, as %.400s/config.json has no "
                    "num_nextn_predict_layers above 0",
                    job->settings.model_dir);
}

/* The config of --model-dir, and the shape of its attention. fp32 on the host, where it takes no longer than bf16. */
static cpa_status read_network(cpa_job *job, cpa_error *err) {
    const char *folder = job->settings.model_dir;
    cpa_status status = cpa_model_config_load(folder, &job->network, err);
    if (status == CPA_IO) return cpa_fail(err, CPA_INVALID, "--model-dir: %.480s", err->message);
    CPA_TRY(status);
    CPA_TRY(choose_draft_layers(job, err));
    const cpa_dtype said = job->network.has_dtype ? job->network.dtype : CPA_BF16;
    cpa_model_of_config(&job->network, folder, is_on_cuda(&job->settings) ? said : CPA_F32, &job->model);
    job->has_network = 1;
    return CPA_OK;
}

/* The first layers alone, where the settings say so. */
static cpa_status cut_layers(cpa_job *job, cpa_error *err) {
    if (job->settings.layers == 0) return CPA_OK;
    CPA_TRY(cpa_model_cut_layers(&job->model, job->settings.layers, err));
    job->network.layers = job->model.shape.layers;
    return CPA_OK;
}

cpa_status cpa_job_set_rules(cpa_job *job, cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    const cpa_model_rule_choice choice = {settings->softcap, settings->temperature_len, settings->alibi != 0,
                                          settings->sink_logits != 0};
    cpa_model_set_forms(&job->model);
    return cpa_model_set_rules(&job->model, choice, err);
}

static cpa_status read_model(cpa_job *job, cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    cpa_attention_shape *shape = &job->model.shape.attention;
    cpa_model_small(&job->model);
    if (settings->model_dir[0]) {
        CPA_TRY(read_network(job, err));
    } else if (settings->model[0]) {
        CPA_TRY(cpa_model_load(settings->model, &job->model, err));
    } else if (is_on_cuda(settings)) {
        shape->dtype = CPA_BF16; /* fp32 has no tensor cores */
    }
    if (settings->spread_experts && job->network.moe.experts == 0)
        return cpa_fail(err, CPA_INVALID,
                        "--experts: found spread, expected with the --model-dir of a model that has some");
    CPA_TRY(cut_layers(job, err));
    if (settings->dtype) shape->dtype = (cpa_dtype)(settings->dtype - 1);
    if (settings->window >= 0) cpa_model_set_window(&job->model, settings->window);
    if (settings->sinks >= 0) cpa_model_set_sinks(&job->model, (int32_t)settings->sinks);
    shape->kv_dtype = settings->kv_cache_dtype ? (cpa_dtype)(settings->kv_cache_dtype - 1) : shape->dtype;
    job->network.index.dtype = cpa_index_dtype_beside(shape->dtype, shape->kv_dtype);
    CPA_TRY(cpa_head_scales_set(settings, &job->model, err));
    CPA_TRY(cpa_skip_layers("--kv-cache-dtype-skip-layers", settings->skip_layers, &job->model, err));
    shape->layout = (cpa_kv_layout)settings->kv_layout;
    CPA_TRY(cpa_job_set_rules(job, err));
    cpa_sparse_prompts sparse = {0, 0};
    CPA_TRY(cpa_settings_sparse(settings, &sparse, err));
    const int64_t run = sparse.stride ? CPA_XATTN_MOST_BLOCK : 1; /* blocks of XAttention stay whole */
    job->interleave = (int32_t)(settings->interleave         ? settings->interleave
                                : settings->block_size < run ? run
                                                             : settings->block_size);
    return CPA_OK;
}

/* Answers --help and the like; 1 if there was something to answer. */
static int answer(const cpa_settings *settings) {
    if (settings->help) {
        cpa_settings_print_help(settings, stdout);
    } else if (settings->version) {
        printf("cp_attn %s\n", cpa_version());
    } else if (settings->print_config) {
        const char *dtype = is_on_cuda(settings) ? "bf16 on a CUDA device" : "fp32 on the host";
        const int says = settings->model[0] || (settings->model_dir[0] && is_on_cuda(settings));
        cpa_settings_print(settings, says ? "as the model says" : dtype, stdout);
    } else {
        return 0;
    }
    return 1;
}

/* No request goes beyond the positions that the network is made for. */
static cpa_status check_lengths(const cpa_job *job, const cpa_workload *workload, cpa_error *err) {
    for (int64_t i = 0; i < workload->count; i++) {
        const cpa_request *request = &workload->requests[i];
        const int64_t tokens = cpa_cached_tokens(request->prompt_tokens, request->output_tokens);
        if (tokens <= job->network.max_position) continue;
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": found %" PRId64 " tokens, expected at most the %" PRId64
                        " positions of %s (max_position_embeddings)",
                        request->id, tokens, job->network.max_position, job->model.name);
    }
    return CPA_OK;
}

cpa_workload_options cpa_job_workload_options(const cpa_settings *settings) {
    return (cpa_workload_options){
        .trace = settings->trace,
        .requests = settings->requests,
        .length_scale = settings->length_scale,
        .time_scale = settings->time_scale,
        .request_rate = settings->request_rate,
        .input_len = settings->input_len,
        .output_len = settings->output_len,
        .seed = settings->seed,
        .cache_salt = settings->cache_salt,
    };
}

int cpa_job_is_mixed(const cpa_settings *settings) {
    static const char *const asks[] = {"trace", "requests", "input-len", "output-len", "request-rate"};
    for (size_t i = 0; i < sizeof asks / sizeof asks[0]; i++) {
        if (cpa_settings_given(settings, asks[i])) return 0;
    }
    return 1;
}

/* The prompt of `generate`, and its request. */
static cpa_status read_prompt(cpa_job *job, cpa_workload *workload, cpa_prompt_answer *out, cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    CPA_TRY(cpa_prompt_answer_open(settings, job->network.vocabulary, out, err));
    job->kept_logits = out->given.count;
    const cpa_told_tokens prompt = {out->prompt.ids, out->prompt.count}, given = {out->given.ids, out->given.count};
    return cpa_workload_of_prompt(prompt, given, out->most, settings->cache_salt, workload, err);
}

static cpa_status prepare(int argc, char **argv, cpa_job *job, cpa_workload *workload, cpa_prompt_answer *prompt_answer,
                          cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    CPA_TRY(cpa_settings_load(argc, argv, &job->settings, err));
    if (answer(settings)) return cpa_output_flush(err);
    CPA_TRY(read_model(job, err));
    if (settings->result_json[0]) CPA_TRY(cpa_output_check("--result-json", settings->result_json, err));
    if (settings->timeline[0]) CPA_TRY(cpa_output_check("--timeline", settings->timeline, err));
    if (settings->metrics_file[0]) CPA_TRY(cpa_output_check("--metrics-file", settings->metrics_file, err));
    if (settings->violation_dump[0])
        CPA_TRY(cpa_output_check_folder("--violation-dump", settings->violation_dump, err));
    CPA_TRY(cpa_job_store_check(settings, err));
    if (settings->swap_folder[0]) CPA_TRY(cpa_output_check_folder("--swap-folder", settings->swap_folder, err));
    if (settings->block_transfer != 0 && !settings->block_store[0])
        return cpa_fail(err, CPA_INVALID, "--block-transfer: found without --block-store, expected with it");
    if (settings->generate) {
        CPA_TRY(read_prompt(job, workload, prompt_answer, err));
    } else if (!cpa_job_is_mixed(settings)) {
        const cpa_workload_options options = cpa_job_workload_options(settings);
        CPA_TRY(cpa_workload_load(&options, workload, err));
    }
    if (job->has_network) CPA_TRY(check_lengths(job, workload, err));
    job->kept_logits = cpa_max64(job->kept_logits, settings->check_logits);
    if (settings->dry_run && workload->count == 0) {
        return cpa_fail(err, CPA_INVALID, "--dry-run: found without requests, expected --trace or --requests");
    }
    if (settings->result_json[0]) CPA_TRY(cpa_output_retire(settings->result_json, err));
    if (settings->timeline[0]) CPA_TRY(cpa_output_retire(settings->timeline, err));
    if (settings->metrics_file[0]) CPA_TRY(cpa_output_retire(settings->metrics_file, err));
    job->run = 1;
    return CPA_OK;
}

void cpa_job_prepare(int argc, char **argv, int32_t ranks, cpa_job *job, cpa_workload *workload,
                     cpa_prompt_answer *prompt_answer) {
    cpa_error err;
    *job = (cpa_job){.ranks = ranks};
    cpa_status status = prepare(argc, argv, job, workload, prompt_answer, &err);
    job->code = cpa_exit_code_of(status);
    if (status != CPA_OK) fprintf(stderr, "cp_attn: %s\n", err.message);
}

/* The longest sequence that may lie on one rank. */
static int64_t local_tokens(const cpa_settings *settings) {
    if (settings->local_context >= 0) return settings->local_context;
    return is_on_cuda(settings) ? CPA_PLANNER_LOCAL_TOKENS : 0;
}

/* The host promises the same bits for a token in decode and in prefill, which slices in decode alone do not give. */
static cpa_model_slices slices_of(const cpa_settings *settings) {
    switch ((cpa_slice_weights)settings->slice_weights) {
        case CPA_SLICE_AUTO: return is_on_cuda(settings) ? CPA_SLICES_DECODE : CPA_SLICES_NONE;
        case CPA_SLICE_OFF: return CPA_SLICES_NONE;
        case CPA_SLICE_DECODE: return CPA_SLICES_DECODE;
        case CPA_SLICE_ALL: return CPA_SLICES_ALL;
    }
    return CPA_SLICES_NONE;
}

cpa_transformer_options cpa_job_transformer_options(const cpa_job *job) {
    return (cpa_transformer_options){
        .dtype = job->model.shape.attention.dtype,
        .max_rows = job->settings.max_num_batched_tokens,
        .max_sequences = job->settings.max_num_seqs,
        .slices = slices_of(&job->settings),
        .ranks = job->ranks,
        .experts = !job->settings.spread_experts ? CPA_EXPERTS_REPLICATED
                   : is_on_cuda(&job->settings)  ? CPA_EXPERTS_GATHERED
                                                 : CPA_EXPERTS_SENT,
    };
}

static int64_t network_bytes(const cpa_job *job) {
    if (!job->has_network) return 0;
    const cpa_transformer_options options = cpa_job_transformer_options(job);
    return cpa_folder_model_bytes(&job->network, &options);
}

cpa_status cpa_job_check_memory(const cpa_job *job, int64_t memory_bytes, cpa_error *err) {
    const int64_t needed = network_bytes(job);
    if (needed == 0 || needed < memory_bytes) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY,
                    "--model-dir: found %" PRId64 " MiB of free memory a rank, expected more than the %" PRId64
                    " MiB of weights and rows (fewer rows: --max-num-batched-tokens)",
                    memory_bytes >> 20, needed >> 20);
}

/* What the cache may have of a rank's memory. */
static int64_t cache_bytes(const cpa_job *job, int64_t memory_bytes) {
    const cpa_settings *settings = &job->settings;
    if (settings->host_cache > 0) return (int64_t)(settings->host_cache * BYTES_PER_GIB);
    const cpa_cache_memory memory = {
        .memory_bytes = memory_bytes,
        .network_bytes = network_bytes(job),
        .share = settings->serve && is_on_cuda(settings) ? settings->gpu_memory_utilization : 0,
        .num_blocks = settings->num_blocks,
        .staging_bytes = settings->staging_bytes,
    };
    return cpa_cache_memory_bytes(&memory);
}

int32_t cpa_job_window_seqs(const cpa_job *job, int64_t requests) {
    const int64_t most = job->settings.max_num_seqs, asked = job->settings.window_seqs;
    if (asked > 0) return (int32_t)asked;
    return (int32_t)(requests > 0 && requests < most ? requests : most);
}

cpa_cache_limits cpa_job_cache_limits(const cpa_job *job, int32_t cp_size, int64_t memory_bytes) {
    return (cpa_cache_limits){
        .model = cpa_model_shape_of(&job->model),
        .block_size = (int32_t)job->settings.block_size,
        .map = {cp_size, job->interleave},
        .max_num_seqs = (int32_t)job->settings.max_num_seqs,
        .window_seqs = cpa_job_window_seqs(job, 0),
        .precise_tokens = job->settings.precise_tokens,
        .max_num_batched_tokens = job->settings.max_num_batched_tokens,
        .memory_bytes = cache_bytes(job, memory_bytes),
        .local_tokens = local_tokens(&job->settings),
    };
}

cpa_status cpa_job_cache_size(const cpa_job *job, const cpa_cache_limits *given, const cpa_workload *workload,
                              cpa_cache_size *out, cpa_error *err) {
    cpa_cache_limits limits = *given;
    limits.window_seqs = out->window_seqs = cpa_job_window_seqs(job, workload->count);
    out->num_blocks = job->settings.num_blocks;
    if (out->num_blocks) return cpa_cache_check(&limits, "--num-blocks", out->num_blocks, err);
    if (workload->count) return cpa_cache_size_for(&limits, workload->requests, workload->count, &out->num_blocks, err);
    out->num_blocks = cpa_min64(cpa_cache_blocks_of(&limits, MIXED_RUN_TOKENS), cpa_cache_most_blocks(&limits));
    return CPA_OK;
}

cpa_length_wishes cpa_job_length_wishes(const cpa_job *job) {
    return (cpa_length_wishes){
        .asked = {.num_blocks = job->settings.num_blocks, .max_model_len = job->settings.max_model_len},
        .on_cuda = is_on_cuda(&job->settings),
        .positions = job->has_network ? job->network.max_position : 0,
        .model = job->model.name,
        .num_blocks_option = "--num-blocks",
        .max_model_len_option = "--max-model-len",
    };
}

/* Whether `word` stands in `text` by itself, not in a longer name. */
static int has_word(const char *text, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word)) {
        int begins = at == text || !(isalnum((unsigned char)at[-1]) || at[-1] == '_' || at[-1] == '-');
        if (begins && !isalnum((unsigned char)at[length]) && at[length] != '_') return 1;
    }
    return 0;
}

void cpa_job_name_option(cpa_error *err) {
    static const char *const names[][2] = {
        {"precise_tokens", "precise-first-tokens"},
        {"swap_folder", "swap-folder"},
        {"staging_bytes", "staging-bytes"},
        {"state_dtype", "state-dtype"},
        {"num_blocks", "num-blocks"},
        {"block_size", "block-size"},
        {"interleave", "cp-kv-cache-interleave-size"},
        {"max_num_batched_tokens", "max-num-batched-tokens"},
        {"max_num_seqs", "max-num-seqs"},
        {"window_seqs", "window-seqs"},
        {"tenant_block_quota", "tenant-block-quota"},
        {"local_context", "local-context"},
        {"k_scale", "k-scale"},
        {"temperature_len", "temperature-len"},
        {"swap_folder_bytes", "swap-folder-size"},
        {"swap_bytes", "swap-space"},
        {"ring_bytes", "device-ring"},
        {"verify", "verify"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char message[sizeof err->message];
        if (!has_word(err->message, names[i][0])) continue;
        snprintf(message, sizeof message, "%s", err->message);
        cpa_fail(err, err->status, "--%s: %.480s", names[i][1], message);
        return;
    }
}

cpa_engine_options cpa_job_engine_options(const cpa_job *job, cpa_cache_size cache, const cpa_workload *workload) {
    const cpa_settings *settings = &job->settings;
    cpa_speculative speculative = {.drafter = CPA_DRAFT_NONE};
    cpa_sparse_prompts sparse = {0, 0};
    (void)cpa_settings_speculative(settings, &speculative, NULL); /* right, as they are loaded */
    (void)cpa_settings_sparse(settings, &sparse, NULL);
    return (cpa_engine_options){
        .size = sizeof(cpa_engine_options),
        .model = cpa_model_shape_of(&job->model),
        .block_size = (int32_t)settings->block_size,
        .num_blocks = cache.num_blocks,
        .window_seqs = cache.window_seqs,
        .precise_tokens = settings->precise_tokens,
        .interleave = job->interleave,
        .max_num_batched_tokens = settings->max_num_batched_tokens,
        .max_num_seqs = (int32_t)settings->max_num_seqs,
        .algorithm = (cpa_algorithm)settings->algorithm,
        .transport = (cpa_transport_kind)settings->transport,
        .staging_bytes = settings->staging_bytes,
        .state_dtype = (cpa_dtype)settings->state_dtype,
        .verify = settings->verify,
        .violation_dump = settings->violation_dump[0] ? settings->violation_dump : NULL,
        .skip_self_test = (int32_t)settings->skip_self_test,
        .timeline_spans = settings->timeline[0] ? CPA_TIMELINE_SPANS : 0,
        .enforce_eager = (int32_t)settings->enforce_eager,
        .fail_on_nonfinite = (int32_t)settings->fail_on_nonfinite,
        .seed = (uint64_t)settings->seed,
        .token_at = workload->token_at,
        .token_ctx = (void *)(uintptr_t)&workload->trace,
        .no_prefix_caching = !settings->prefix_caching,
        .cascade_attention = (cpa_cascade_attention)settings->cascade_attention,
        .preemption = (cpa_preemption_mode)settings->preemption_mode,
        .swap_bytes = (int64_t)(settings->swap_space * BYTES_PER_GIB),
        .keep_evicted = settings->keep_evicted || settings->swap_folder[0],
        .swap_folder = settings->swap_folder[0] ? settings->swap_folder : NULL,
        .swap_folder_bytes = settings->swap_folder[0] ? (int64_t)(settings->swap_folder_size * BYTES_PER_GIB) : 0,
        .swap_salt = settings->cache_salt,
        .ring_bytes = settings->host_cache > 0 ? (int64_t)(settings->device_ring * BYTES_PER_GIB) : 0,
        .policy = (cpa_policy)settings->policy,
        .ageing_s = settings->priority_ageing,
        .long_prefill_token_threshold = settings->long_prefill_token_threshold,
        .adaptive_chunks = (int32_t)settings->adaptive_chunks,
        .short_prompts = (cpa_short_prompts)settings->short_prompts,
        .tenant_block_quota = settings->tenant_block_quota,
        .max_queued_requests = settings->max_queued_requests,
        .max_queued_tokens = settings->serve ? settings->max_queued_tokens : 0,
        .local_context = settings->local_context < 0   ? 0
                         : settings->local_context > 0 ? settings->local_context
                                                       : CPA_LOCAL_CONTEXT_NONE,
        .sparse_stride = sparse.stride,
        .sparse_tau = sparse.tau,
        .skip_tiles = (float)settings->skip_tiles,
        .scales_on_host = job->model.n_scales > 0,
        .drafter = speculative.drafter,
        .draft_tokens = speculative.draft_tokens,
        .ngram_min = speculative.ngram_min,
        .ngram_max = speculative.ngram_max,
        .ngram_branches = speculative.ngram_branches,
    };
}
