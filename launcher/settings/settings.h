/* The settings of a run. One table (settings_table.c) gives each its name, type, bounds, default and help; the command
 * line, the environment (CPATTN_<NAME>), the settings file, --help and --print-config all come from it. */
#ifndef CPA_LAUNCHER_SETTINGS_H
#define CPA_LAUNCHER_SETTINGS_H

#include <stdint.h>
#include <stdio.h>

#include <cpattn/context.h>
#include <cpattn/types.h>

#include "program/field.h"

#define CPA_SETTINGS_MAX 128

typedef enum cpa_origin { CPA_FROM_DEFAULT = 0, CPA_FROM_FILE, CPA_FROM_ENVIRONMENT, CPA_FROM_COMMAND_LINE } cpa_origin;

/* Which steps multiply by slices of the weights. */
typedef enum cpa_slice_weights { CPA_SLICE_AUTO = 0, CPA_SLICE_OFF, CPA_SLICE_DECODE, CPA_SLICE_ALL } cpa_slice_weights;

/* Values as the table parses them; choices are indices. Rank 0 broadcasts it as plain memory; long texts, which are
 * pointers, are those of rank 0 alone. */
typedef struct cpa_settings {
    int64_t generate; /* cp_attn generate */
    char *prompt;
    char *prompt_ids;
    int64_t chat;
    char *system;
    int64_t max_tokens;
    double temperature;
    int64_t top_k; /* 0 = all */
    double top_p, min_p;
    double repetition_penalty, presence_penalty, frequency_penalty;
    char *logit_bias;
    int64_t min_tokens;
    char stop_ids[CPA_TEXT_BYTES];
    char stop[CPA_TEXT_BYTES];
    char *given_ids;
    int64_t ignore_eos;
    int64_t logprobs;
    int64_t json;

    int64_t serve; /* cp_attn serve */
    char host[CPA_TEXT_BYTES];
    int64_t port; /* 0 = a free one */
    char api_key[CPA_TEXT_BYTES];
    char api_keys[CPA_TEXT_BYTES];
    char served_model_name[CPA_TEXT_BYTES];                                  /* "" = the model's */
    char chat_template[CPA_TEXT_BYTES];                                      /* "" = the folder's */
    char tool_call_parser[CPA_TEXT_BYTES], reasoning_parser[CPA_TEXT_BYTES]; /* "" = auto */
    int64_t max_model_len;                                                   /* 0 = auto */
    double gpu_memory_utilization;
    int64_t max_connections;
    int64_t max_body_bytes;
    double idle_timeout;                            /* seconds */
    int64_t max_queued_requests, max_queued_tokens; /* bounds of a server's queue; 0 = no bound */

    char trace[CPA_TEXT_BYTES];
    int64_t requests; /* 0 = all of the trace */
    double length_scale;
    double time_scale; /* 0 = trace times are not used */
    double request_rate;
    int64_t input_len;
    int64_t output_len;
    int64_t seed;

    char model[CPA_TEXT_BYTES];
    char model_dir[CPA_TEXT_BYTES];
    int64_t slice_weights;  /* cpa_slice_weights */
    int64_t spread_experts; /* 0 or 1 */
    int64_t dtype;          /* 0 = the model's, else cpa_dtype + 1 */
    int64_t layers;         /* 0 = all of the model */
    int64_t window;         /* -1 = the model's */
    int64_t sinks;          /* -1 = the model's */
    double softcap;         /* 0 = none */
    double temperature_len; /* 0 = none */
    int64_t alibi, sink_logits;

    char skip_layers[CPA_TEXT_BYTES];
    int64_t precise_tokens;                                /* 0 = none */
    int64_t kv_cache_dtype;                                /* 0 = the dtype of the model, else cpa_dtype + 1 */
    char k_scale[CPA_TEXT_BYTES], v_scale[CPA_TEXT_BYTES]; /* "auto": each token and head has its own */
    int64_t kv_layout;                                     /* cpa_kv_layout */
    int64_t block_size;
    int64_t num_blocks;    /* 0 = enough for the run */
    int64_t window_seqs;   /* 0 = as many as can run at once */
    int64_t interleave;    /* 0 = block_size */
    int64_t local_context; /* -1 = auto */
    int64_t prefix_caching;
    int64_t cascade_attention; /* cpa_cascade_attention */
    char cache_salt[CPA_TEXT_BYTES];
    char block_store[CPA_TEXT_BYTES];
    double block_store_size; /* GiB */
    int64_t block_transfer;  /* of cpa_transfer, or'ed */
    int64_t preemption_mode; /* cpa_preemption_mode */
    double swap_space;       /* GiB */
    int64_t keep_evicted;
    char swap_folder[CPA_TEXT_BYTES];
    double swap_folder_size; /* GiB */
    double host_cache;       /* GiB; 0: the cache lies on the device */
    double device_ring;      /* GiB */
    int64_t tenant_block_quota;

    int64_t max_num_batched_tokens;
    int64_t max_num_seqs;
    int64_t policy; /* cpa_policy */
    double priority_ageing;
    int64_t long_prefill_token_threshold;
    int64_t adaptive_chunks;
    int64_t short_prompts; /* cpa_short_prompts */
    char speculative[CPA_TEXT_BYTES];
    char sparse[CPA_TEXT_BYTES];
    double skip_tiles; /* 0: off */
    int64_t algorithm; /* cpa_algorithm */
    int64_t transport; /* cpa_transport_kind */
    int64_t staging_bytes;
    int64_t state_dtype; /* cpa_dtype */

    double verify;
    char violation_dump[CPA_TEXT_BYTES];
    int64_t check_logits;
    int64_t skip_self_test;

    int64_t device;  /* cpa_device_choice */
    int64_t threads; /* 0 = cores / ranks */
    int64_t bind;

    int64_t enforce_eager;
    double rank_timeout; /* seconds */
    double join_timeout; /* seconds; read by each rank for itself, before the others, as is job_secret_file */
    char job_secret_file[CPA_TEXT_BYTES];
    double shutdown_timeout; /* seconds; never "auto" once the settings are loaded */
    int64_t fail_on_nonfinite;

    char result_json[CPA_TEXT_BYTES];
    char percentiles[CPA_TEXT_BYTES];
    char goodput[CPA_TEXT_BYTES];
    char timeline[CPA_TEXT_BYTES];
    char metrics_file[CPA_TEXT_BYTES];
    int64_t log_level; /* cpa_log_level */
    char config[CPA_TEXT_BYTES];
    int64_t dry_run;
    int64_t print_config;
    int64_t version;
    int64_t help;

    struct {
        cpa_origin origin;
        int line; /* in the settings file */
    } source[CPA_SETTINGS_MAX];
} cpa_settings;

/* Fills *out from the defaults, then the settings file, the environment and the command line, each over the last.
 * Otherwise CPA_INVALID and one line that names the option, the variable or the file and line. With --help or --version
 * only the command line is read. */
cpa_status cpa_settings_load(int argc, char **argv, cpa_settings *out, cpa_error *err);
/* Frees the long texts. */
void cpa_settings_release(cpa_settings *settings);
/* Settings that came from another rank: they have no long texts. */
void cpa_settings_receive(cpa_settings *settings);

/* Takes out what the other ranks do not need to know: API keys and the like. */
void cpa_settings_hide_secrets(cpa_settings *settings);

/* Text for --help, of a subcommand what goes with it, and for --print-config. The latter may be read again as a
 * settings file: defaults are comments in it, and `auto_dtype` says there what the dtype "auto" stands for. */
void cpa_settings_print_help(const cpa_settings *settings, FILE *out);
void cpa_settings_print(const cpa_settings *settings, const char *auto_dtype, FILE *out);

#endif
