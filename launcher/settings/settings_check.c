#include "launcher/settings/settings_check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include <cpattn/engine.h>

#include "base/check.h"
#include "launcher/settings/head_scales.h"
#include "launcher/settings/settings_table.h"

/* What says which requests a batch run has. */
static const char *const of_runs[] = {"trace",     "requests",   "length-scale", "time-scale", "request-rate",
                                      "input-len", "output-len", "dry-run",      NULL};

/* Requests of a server bring their salt. */
static const char *const of_no_server[] = {"check-logits", "cache-salt", NULL};

static int is_listed(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name) != 0) names++;
    return *names != NULL;
}

int cpa_setting_is_of_command(const cpa_settings *settings, const cpa_field *field) {
    if (strcmp(field->group, CPA_SETTINGS_GENERATE) == 0) return settings->generate != 0;
    if (strcmp(field->group, CPA_SETTINGS_SERVE) == 0) return settings->serve != 0;
    if (settings->serve && is_listed(of_no_server, field->name)) return 0;
    return !(settings->serve || settings->generate) || !is_listed(of_runs, field->name);
}

/* Options of another command. */
static cpa_status check_command(const cpa_settings *settings, cpa_error *err) {
    for (int f = 0; f < cpa_settings_n_rows; f++) {
        const cpa_field *field = &cpa_settings_rows[f];
        if (settings->source[f].origin == CPA_FROM_DEFAULT || cpa_setting_is_of_command(settings, field)) continue;
        const char *group = field->group;
        if (strcmp(group, CPA_SETTINGS_GENERATE) == 0 || strcmp(group, CPA_SETTINGS_SERVE) == 0)
            return cpa_fail(err, CPA_INVALID, "--%s: found without '%s', expected with it", field->name,
                            strcmp(group, CPA_SETTINGS_SERVE) == 0 ? "serve" : "generate");
        return cpa_fail(err, CPA_INVALID, "--%s: found with '%s', expected without it", field->name,
                        settings->serve ? "serve" : "generate");
    }
    return CPA_OK;
}

/* What needs a prompt of text, and a chat. */
static cpa_status check_text(const cpa_settings *settings, cpa_error *err) {
    static const char *const of_text[] = {"chat", "stop"};
    for (int i = 0; i < 2; i++) {
        if (cpa_settings_given(settings, of_text[i]) && !cpa_settings_given(settings, "prompt"))
            return cpa_fail(err, CPA_INVALID, "--%s: found without --prompt, expected with it", of_text[i]);
    }
    if (cpa_settings_given(settings, "system") && !settings->chat)
        return cpa_fail(err, CPA_INVALID, "--system: found without --chat, expected with it");
    return CPA_OK;
}

static cpa_status check_generate(const cpa_settings *settings, cpa_error *err) {
    if (!settings->generate) return CPA_OK;
    if (settings->given_ids && cpa_settings_given(settings, "max-tokens"))
        return cpa_fail(err, CPA_INVALID, "--max-tokens: found with --given-ids, expected without it");
    if (settings->given_ids && (settings->logit_bias || settings->min_tokens > 0))
        return cpa_fail(err, CPA_INVALID, "--%s: found with --given-ids, expected without it: nothing is drawn",
                        settings->logit_bias ? "logit-bias" : "min-tokens");
    if (settings->min_tokens > settings->max_tokens)
        return cpa_fail(err, CPA_INVALID, "--min-tokens: found %" PRId64 ", expected at most --max-tokens, %" PRId64,
                        settings->min_tokens, settings->max_tokens);
    if (settings->help || settings->version || settings->print_config) return CPA_OK;
    if (!settings->model_dir[0]) return cpa_fail(err, CPA_INVALID, "generate: found no --model-dir, expected one");
    if (cpa_settings_given(settings, "prompt") && settings->prompt_ids)
        return cpa_fail(err, CPA_INVALID, "--prompt-ids: found with --prompt, expected one of them");
    if (!cpa_settings_given(settings, "prompt") && !settings->prompt_ids)
        return cpa_fail(err, CPA_INVALID, "generate: found no --prompt and no --prompt-ids, expected one of them");
    return check_text(settings, err);
}

cpa_status cpa_settings_metrics(const cpa_settings *settings, cpa_metrics_options *out, cpa_error *err) {
    cpa_metrics_options options = {0};
    CPA_TRY(cpa_percentiles_parse("--percentiles", settings->percentiles, &options, err));
    CPA_TRY(cpa_goodput_parse("--goodput", settings->goodput, &options, err));
    *out = options;
    return CPA_OK;
}

static const char *kv_dtype_name(const cpa_settings *settings) {
    return cpa_settings_rows[cpa_settings_index("kv-cache-dtype")].choices[settings->kv_cache_dtype];
}

/* Files that the run writes: of computing, and each its own. */
static cpa_status check_outputs(const cpa_settings *settings, cpa_error *err) {
    const struct {
        const char *option, *path;
        int tells_of_computing;
    } files[] = {{"result-json", settings->result_json, 0},
                 {"timeline", settings->timeline, 1},
                 {"metrics-file", settings->metrics_file, 1}};
    for (int i = 0; i < 3; i++) {
        if (!files[i].path[0]) continue;
        if (settings->dry_run && files[i].tells_of_computing) {
            return cpa_fail(err, CPA_INVALID, "--%s: found with --dry-run, expected without it: nothing is computed",
                            files[i].option);
        }
        for (int j = 0; j < i; j++) {
            if (strcmp(files[i].path, files[j].path) == 0)
                return cpa_fail(err, CPA_INVALID, "--%s: found the file of --%s, expected another", files[i].option,
                                files[j].option);
        }
    }
    return CPA_OK;
}

cpa_status cpa_settings_speculative(const cpa_settings *settings, cpa_speculative *out, cpa_error *err) {
    return cpa_speculative_parse("--speculative", settings->speculative, out, err);
}

cpa_status cpa_settings_sparse(const cpa_settings *settings, cpa_sparse_prompts *out, cpa_error *err) {
    return cpa_sparse_prompts_parse("--sparse", settings->sparse, out, err);
}

/* What is evicted stays in host memory, and goes from there to a folder. */
static cpa_status check_kept(const cpa_settings *settings, cpa_error *err) {
    const char *option = settings->swap_folder[0] ? "swap-folder" : "keep-evicted";
    if (!settings->swap_folder[0] && cpa_settings_given(settings, "swap-folder-size"))
        return cpa_fail(err, CPA_INVALID, "--swap-folder-size: found without --swap-folder, expected with it");
    if (!settings->keep_evicted && !settings->swap_folder[0]) return CPA_OK;
    if (settings->swap_space == 0)
        return cpa_fail(err, CPA_INVALID, "--%s: found without --swap-space, expected host memory for blocks", option);
    if (!settings->prefix_caching)
        return cpa_fail(err, CPA_INVALID, "--%s: found with --no-enable-prefix-caching, expected blocks to be found",
                        option);
    return CPA_OK;
}

/* What the engine refuses besides depends on the model. */
static cpa_status check_precise(const cpa_settings *settings, cpa_error *err) {
    cpa_sparse_prompts sparse;
    if (settings->precise_tokens == 0) return CPA_OK;
    CPA_TRY(cpa_settings_sparse(settings, &sparse, err));
    const struct {
        const char *name;
        int given;
    } others[] = {{"sparse", sparse.stride > 0},
                  {"host-cache", settings->host_cache > 0},
                  {"block-store", settings->block_store[0] != 0}};
    if (settings->precise_tokens % settings->block_size != 0)
        return cpa_fail(err, CPA_INVALID,
                        "--precise-first-tokens: found %lld, expected a multiple of the block size %lld",
                        (long long)settings->precise_tokens, (long long)settings->block_size);
    if (settings->algorithm == CPA_PASS_KV)
        return cpa_fail(err, CPA_INVALID, "--precise-first-tokens: found with --algorithm pass-kv, expected pass-q");
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].given)
            return cpa_fail(err, CPA_INVALID, "--%s: found with --precise-first-tokens, expected one of the two",
                            others[i].name);
    return CPA_OK;
}

static cpa_status check_drafts(const cpa_settings *settings, cpa_error *err) {
    const struct {
        const char *name;
        int given;
    } without[] = {{"dry-run", settings->dry_run != 0}, {"given-ids", settings->given_ids != NULL}};
    enum { WITHOUT = sizeof without / sizeof *without };
    cpa_speculative speculative;
    CPA_TRY(cpa_settings_speculative(settings, &speculative, err));
    cpa_sparse_prompts sparse;
    CPA_TRY(cpa_settings_sparse(settings, &sparse, err));
    if (speculative.drafter == CPA_DRAFT_MODEL && (!settings->model_dir[0] || settings->layers > 0))
        return cpa_fail(err, CPA_INVALID,
                        "--speculative: found mtp:1 %s, expected a --model-dir whose model drafts with all its layers",
                        settings->model_dir[0] ? "with --layers" : "without --model-dir");
    for (int i = 0; speculative.drafter != CPA_DRAFT_NONE && i < WITHOUT; i++) {
        if (without[i].given)
            return cpa_fail(err, CPA_INVALID,
                            "--speculative: found with --%s, expected without it: no token is drawn, by which drafts "
                            "would be accepted",
                            without[i].name);
    }
    return CPA_OK;
}

cpa_status cpa_settings_check(const cpa_settings *settings, cpa_error *err) {
    static const char *const with_trace[] = {"length-scale", "time-scale"};
    static const char *const without_trace[] = {"input-len", "output-len"};
    static const char *const without_folder[] = {"model",           "window", "sinks",      "softcap",
                                                 "temperature-len", "alibi",  "sink-logits"};
    CPA_TRY(check_command(settings, err));
    CPA_TRY(check_generate(settings, err));
    if (settings->chat_template[0] && !settings->serve && !settings->chat)
        return cpa_fail(err, CPA_INVALID, "--chat-template: found without 'serve' or --chat, expected with one");
    for (int i = 0; i < 2; i++) {
        if (!settings->trace[0] && cpa_settings_given(settings, with_trace[i])) {
            return cpa_fail(err, CPA_INVALID, "--%s: found without --trace, expected with it", with_trace[i]);
        }
        if (settings->trace[0] && cpa_settings_given(settings, without_trace[i])) {
            return cpa_fail(err, CPA_INVALID, "--%s: found with --trace, expected without it", without_trace[i]);
        }
    }
    const int n_without_folder = (int)(sizeof without_folder / sizeof *without_folder);
    for (int i = 0; settings->model_dir[0] && i < n_without_folder; i++) {
        if (cpa_settings_given(settings, without_folder[i]))
            return cpa_fail(err, CPA_INVALID, "--%s: found with --model-dir, expected without it", without_folder[i]);
    }
    if (settings->check_logits > 0) {
        if (!settings->model_dir[0])
            return cpa_fail(err, CPA_INVALID, "--check-logits: found without --model-dir, expected with it");
        if (settings->kv_cache_dtype > CPA_DTYPE_COUNT)
            return cpa_fail(err, CPA_INVALID,
                            "--check-logits: found with --kv-cache-dtype %s, expected no quantised cache",
                            kv_dtype_name(settings));
        if (settings->dry_run)
            return cpa_fail(err, CPA_INVALID, "--check-logits: found with --dry-run, expected without");
    }
    if (settings->time_scale > 0 && !isinf(settings->request_rate)) {
        return cpa_fail(err, CPA_INVALID, "--request-rate: found with --time-scale, expected one of the two");
    }
    CPA_TRY(cpa_head_scales_read(settings, err));
    if (cpa_head_scales_given(settings->k_scale) && settings->kv_cache_dtype != CPA_FP8_E4M3 + 1 &&
        settings->kv_cache_dtype != CPA_FP8_E5M2 + 1) {
        return cpa_fail(err, CPA_INVALID, "--k-scale: found with --kv-cache-dtype %s, expected fp8_e4m3 or fp8_e5m2",
                        kv_dtype_name(settings));
    }
    if (settings->preemption_mode == CPA_PREEMPT_SWAP && settings->swap_space == 0)
        return cpa_fail(err, CPA_INVALID,
                        "--preemption-mode: found swap without --swap-space, expected room to swap to");
    CPA_TRY(check_kept(settings, err));
    if (settings->host_cache == 0 && cpa_settings_given(settings, "device-ring"))
        return cpa_fail(err, CPA_INVALID, "--device-ring: found without --host-cache, expected with it");
    if (settings->host_cache > 0 && settings->swap_space > 0)
        return cpa_fail(err, CPA_INVALID, "--swap-space: found with --host-cache, expected one of the two");
    if (settings->host_cache > 0 && settings->skip_layers[0])
        return cpa_fail(err, CPA_INVALID,
                        "--kv-cache-dtype-skip-layers: found with --host-cache, expected one of the two");
    CPA_TRY(check_precise(settings, err));
    CPA_TRY(check_drafts(settings, err));
    CPA_TRY(check_outputs(settings, err));
    cpa_metrics_options ignored;
    CPA_TRY(cpa_settings_metrics(settings, &ignored, err));
    if (settings->interleave != 0 &&
        !cpa_interleave_fits((int32_t)settings->interleave, (int32_t)settings->block_size)) {
        return cpa_fail(err, CPA_INVALID,
                        "--cp-kv-cache-interleave-size: found %lld, expected a divisor or a multiple of the block size "
                        "%lld",
                        (long long)settings->interleave, (long long)settings->block_size);
    }
    return CPA_OK;
}
