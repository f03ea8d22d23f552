#include "launcher/settings.h"

#include <assert.h>
#include <ctype.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cpattn/engine.h>

#include "base/check.h"
#include "base/text.h"
#include "comm/transports.h"
#include "launcher/trace.h"
#include "launcher/yaml_file.h"

static const char *const dtypes[] = {"auto", "fp32", "bf16", "fp16", NULL};
static const char *const kv_dtypes[] = {"auto", "fp32", "bf16", "fp16", "fp8_e4m3", "int8", NULL};
static const char *const layouts[] = {"token-major", "head-major", NULL};
static const char *const algorithms[] = {"auto", "pass-kv", "pass-q", NULL};
static const char *const devices[] = {"auto", "host", "cuda", NULL};
static const char *const slice_modes[] = {"auto", "off", "decode", "all", NULL};
static const char *const preemption_modes[] = {"recompute", "swap", "auto", NULL};
static const char *const policies[] = {"priority", "fcfs", NULL};
static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};

#define TOKENS_MAX 0x1p40 /* longest sequence, and most tokens of one kind */
#define SEED_MAX 0x1p62
#define ACTIONS "Program"                /* these make no sense in a file */
#define GENERATE "Generate, with --seed" /* of cp_attn generate alone */

#define VARIABLE_PREFIX "CPATTN_"

#define TEXT(member) CPA_FIELD_TEXT, offsetof(cpa_settings, member), ""
#define FLAG(member, initial) CPA_FIELD_FLAG, offsetof(cpa_settings, member), initial
#define INT(member, initial, min, max) CPA_FIELD_INT, offsetof(cpa_settings, member), initial, min, max
#define REAL(member, initial, min, max) CPA_FIELD_REAL, offsetof(cpa_settings, member), initial, min, max
#define CHOICE(member, initial, choices) CPA_FIELD_CHOICE, offsetof(cpa_settings, member), initial, 0, 0, choices

/* One row a setting, in the order of --help. */
static const cpa_field table[] = {
    {"Requests", "trace", "FILE", TEXT(trace), .help = "requests to run, Mooncake format: one JSON object a line"},
    {"Requests", "requests", "N", INT(requests, "all", 1, CPA_TRACE_MAX_REQUESTS), .word = "all",
     .help = "only the first N of the trace; without a trace, how many to make up (all: 16)"},
    {"Requests", "length-scale", "S", REAL(length_scale, "1", 1e-9, 1e6),
     .help = "multiplies the input and output lengths of the trace, to at least 1 token"},
    {"Requests", "time-scale", "S", REAL(time_scale, "off", 0, 1e6), .word = "off",
     .help = "requests arrive at the times of the trace, multiplied by S"},
    {"Requests", "request-rate", "R", REAL(request_rate, "inf", 1e-6, INFINITY),
     .help = "requests arrive at random, R a second (Poisson); inf: all at once"},
    {"Requests", "input-len", "N", INT(input_len, "1024", 1, TOKENS_MAX),
     .help = "prompt tokens of a request, without a trace"},
    {"Requests", "output-len", "N", INT(output_len, "128", 1, TOKENS_MAX),
     .help = "output tokens of a request, without a trace"},
    {"Requests", "seed", "N", INT(seed, "0", 0, SEED_MAX),
     .help = "of keys, values, queries, arrivals, draws and the choice of checked rows"},
    {GENERATE, "prompt-ids", "IDS", TEXT(prompt_ids),
     .help = "the prompt: ids with commas between them, or @FILE, a file of ids"},
    {GENERATE, "max-tokens", "N", INT(max_tokens, "16", 1, 0x1p24), .help = "most tokens of the answer"},
    {GENERATE, "temperature", "T", REAL(temperature, "0", 0, 1e6),
     .help = "logits are divided by T; 0: the most probable token every time"},
    {GENERATE, "top-k", "N", INT(top_k, "all", 1, INT_MAX), .word = "all",
     .help = "draw among the N most probable tokens"},
    {GENERATE, "top-p", "P", REAL(top_p, "1", 0, 1), .help = "of these the most probable that hold P together"},
    {GENERATE, "min-p", "P", REAL(min_p, "0", 0, 1), .help = "of these those with at least P of the best probability"},
    {GENERATE, "repetition-penalty", "R", REAL(repetition_penalty, "1", 1e-6, 1e6),
     .help = "tokens of prompt and answer: logits above 0 are divided by R, others multiplied"},
    {GENERATE, "presence-penalty", "R", REAL(presence_penalty, "0", -1e6, 1e6),
     .help = "subtracted from the logits of tokens of the answer"},
    {GENERATE, "stop-ids", "IDS", TEXT(stop_ids), .help = "tokens that end the answer, beside those of the model"},
    {GENERATE, "given-ids", "IDS", TEXT(given_ids),
     .help = "the answer's tokens are these, as --prompt-ids; --json then has the most probable ones beside them"},
    {GENERATE, "ignore-eos", NULL, FLAG(ignore_eos, "false"), .help = "the model's own end tokens do not end it"},
    {GENERATE, "logprobs", NULL, FLAG(logprobs, "false"), .help = "print the log-probability of each token"},
    {GENERATE, "json", NULL, FLAG(json, "false"),
     .help = "print ids, log-probabilities and times as one JSON object at the end"},
    {"Model", "model", "FILE", TEXT(model),
     .help = "shape of the model, YAML as in configs/; without it, that of configs/small.yaml"},
    {"Model", "model-dir", "DIR", TEXT(model_dir),
     .help = "a model with its weights, a Hugging Face folder: Llama, Mistral, Qwen 2, 2.5 or 3; in place of --model"},
    {"Model", "slice-weights", NULL, CHOICE(slice_weights, "auto", slice_modes),
     .help =
         "with --model-dir and several ranks, which exchange the outcome: in decode each reads a slice of the weights; "
         "all: it loads no more than that, for prefill too; auto: decode on GPUs, off on the host"},
    {"Model", "dtype", NULL, CHOICE(dtype, "auto", dtypes),
     .help = "of weights, queries, keys, values and results; auto: as the model says; without a model bf16 on CUDA, "
             "fp32 on the host, there with --model-dir too"},
    {"Model", "window", "N", INT(window, "model", 0, TOKENS_MAX), .word = "model", .word_value = -1,
     .help = "a query sees the last N keys; 0: all of them; model: as the model says"},
    {"Model", "sinks", "N", INT(sinks, "model", 0, 0x1p30), .word = "model", .word_value = -1,
     .help = "the first N keys stay visible whatever the window"},
    {"Cache", "kv-cache-dtype", NULL, CHOICE(kv_cache_dtype, "auto", kv_dtypes),
     .help = "of the KV cache; auto: that of the model; fp8_e4m3 and int8 have a scale for each token and head"},
    {"Cache", "k-scale", "S", REAL(k_scale, "auto", FLT_MIN, 1e30), .word = "auto",
     .help = "fp8_e4m3 keys are multiples of S, one scale for all of them (with --v-scale); auto: see above"},
    {"Cache", "v-scale", "S", REAL(v_scale, "auto", FLT_MIN, 1e30), .word = "auto", .help = "the same of values"},
    {"Cache", "kv-layout", NULL, CHOICE(kv_layout, "token-major", layouts),
     .help = "order in a block of the cache: [tokens, heads] or [heads, tokens]"},
    {"Cache", "block-size", "N", INT(block_size, "16", 16, 512), .power_of_two = 1,
     .help = "tokens in a block of the cache"},
    {"Cache", "num-blocks", "N", INT(num_blocks, "auto", 0, 0x1p31 - 1), .word = "auto",
     .help = "blocks of one rank, each with all layers; auto: enough for the run, if memory allows"},
    {"Cache", "cp-kv-cache-interleave-size", "N", INT(interleave, "auto", 0, 0x1p30), .word = "auto",
     .help = "tokens in a row that one rank owns, a multiple of the block size; auto: the block size"},
    {"Cache", "local-context", "N", INT(local_context, "auto", 0, TOKENS_MAX), .word = "auto", .word_value = -1,
     .help = "requests of up to N tokens stay on one rank and decode without any exchange; 0: none; auto: on GPUs "
             "those that are sooner done like that, on the host none"},
    {"Cache", "enable-prefix-caching", NULL, FLAG(prefix_caching, "true"),
     .help = "requests that begin alike share the blocks of what they have in common"},
    {"Cache", "cache-salt", "TEXT", TEXT(cache_salt), .secret = 1,
     .help = "requests share with those of the same salt only; a trace may have one in each line"},
    {"Cache", "preemption-mode", NULL, CHOICE(preemption_mode, "auto", preemption_modes),
     .help = "the cache of who gives way: computed again, moved to host memory, or what takes less time"},
    {"Cache", "swap-space", "GIB", REAL(swap_space, "0", 0, 0x1p20),
     .help = "host memory of one rank for the cache of preempted requests"},
    {"Cache", "tenant-block-quota", "N", INT(tenant_block_quota, "none", 0, 0x1p31 - 1), .word = "none",
     .help = "most blocks of one rank that the running requests of one salt hold"},
    {"Scheduling", "max-num-batched-tokens", "N", INT(max_num_batched_tokens, "2048", 1, 0x1p24),
     .help = "most new tokens in one step"},
    {"Scheduling", "max-num-seqs", "N", INT(max_num_seqs, "256", 1, 0x1p20), .help = "most sequences in one step"},
    {"Scheduling", "policy", NULL, CHOICE(policy, "priority", policies),
     .help = "who goes first: by priority, then arrival; or by arrival alone"},
    {"Scheduling", "priority-ageing", "S", REAL(priority_ageing, "60", 0, 1e9), .word = "off",
     .help = "waiting S seconds counts as one level of priority"},
    {"Scheduling", "long-prefill-token-threshold", "N", INT(long_prefill_token_threshold, "none", 0, 0x1p24),
     .word = "none", .help = "most tokens of one prefill in a step"},
    {"Exchange", "algorithm", NULL, CHOICE(algorithm, "auto", algorithms),
     .help = "move keys and values (pass-kv), or queries (pass-q); auto: the cheaper one, chunk by chunk"},
    {"Exchange", "staging-bytes", "N", INT(staging_bytes, "auto", 0, 0x1p40), .word = "auto",
     .help = "bound on the memory of one rank for keys and values on their way; auto: 64 MiB, on a GPU 2 GiB"},
    {"Exchange", "transport", NULL, CHOICE(transport, "auto", cpa_transport_names),
     .help = "what carries tensors between ranks: on GPUs NCCL, or peer memory of one host; auto: the faster one"},
    {"Checks", "verify", "R", REAL(verify, "auto", 0, 1), .word = "auto", .word_value = CPA_VERIFY_AUTO,
     .help =
         "share of the results (token, head, layer) that are checked against float64; auto: at most 0.001, and what "
         "2% of the run time pays for"},
    {"Checks", "check-logits", "N", INT(check_logits, "0", 0, 1 << 16),
     .help = "with --model-dir: the logits of N output tokens, chosen at random, are compared at the end with a plain "
             "forward in fp32 on the host; not with a quantised cache"},
    {"Checks", "fail-on-nonfinite", NULL, FLAG(fail_on_nonfinite, "false"),
     .help = "end the run with exit code 1 once a key, a value or a result is NaN or infinite; else they are counted"},
    {"Checks", "skip-self-test", NULL, FLAG(skip_self_test, "false"), .help = "start without the self-test"},
    {"Device", "device", NULL, CHOICE(device, "auto", devices),
     .help = "where to run; auto: CUDA devices, one a rank, where there are any, else the host"},
    {"Device", "threads", "N", INT(threads, "auto", 0, 1024), .word = "auto",
     .help = "threads of one rank; auto: cores / ranks of the host"},
    {"Device", "bind", NULL, FLAG(bind, "true"),
     .help = "give each rank cores of its own, near its device, when there are enough"},
    {"Device", "enforce-eager", NULL, FLAG(enforce_eager, "false"),
     .help = "launch every operation by itself; else decode steps are captured in CUDA graphs"},
    {"Device", "rank-timeout", "S", REAL(rank_timeout, "10", 1, 1e6),
     .help = "the run ends when a rank has not been heard of for S seconds"},
    {"Device", "shutdown-timeout", "S", REAL(shutdown_timeout, "0", 0, 1e6),
     .help = "after a signal requests that have arrived may finish for S seconds; 0: the step in flight"},
    {"Output", "result-json", "FILE", TEXT(result_json),
     .help = "write the results there as JSON as well; an older file becomes FILE.old"},
    {"Output", "percentiles", "LIST", CPA_FIELD_TEXT, offsetof(cpa_settings, percentiles), "99",
     .help = "percentiles of the latencies in the report and the results, such as 50,90,99"},
    {"Output", "goodput", "LIST", TEXT(goodput),
     .help = "most milliseconds of TTFT, TPOT, E2EL of a good request, such as ttft:200; good ones are counted"},
    {"Output", "timeline", "FILE", TEXT(timeline),
     .help = "write what each rank did when, as a Chrome trace (Perfetto shows it); as --result-json"},
    {"Output", "log-level", NULL, CHOICE(log_level, "warn", log_levels),
     .help = "most detailed lines that are logged to stderr"},
    {ACTIONS, "config", "FILE", TEXT(config),
     .help = "settings file: YAML, 'name: value' with the names of these options; paths in it are relative to it"},
    {ACTIONS, "dry-run", NULL, FLAG(dry_run, "false"),
     .help = "plan every step without computing, on any number of ranks, and report"},
    {ACTIONS, "print-config", NULL, FLAG(print_config, "false"),
     .help = "print every setting and where it comes from, and stop"},
    {ACTIONS, "version", NULL, FLAG(version, "false"), .help = "print the version and stop"},
    {ACTIONS, "help", NULL, FLAG(help, "false"), .help = "print this text and stop"},
};
enum { N_FIELDS = sizeof table / sizeof table[0] };
_Static_assert(N_FIELDS <= CPA_SETTINGS_MAX, "CPA_SETTINGS_MAX is too small");

const cpa_field *cpa_settings_table(int *n_fields) {
    *n_fields = N_FIELDS;
    return table;
}

int cpa_setting_is_action(const cpa_field *field) {
    return strcmp(field->group, ACTIONS) == 0;
}

static int index_of(const char *name) {
    const cpa_field *field = cpa_field_find(table, N_FIELDS, name, strlen(name));
    assert(field);
    return (int)(field - table);
}

int cpa_settings_given(const cpa_settings *settings, const char *name) {
    return settings->source[index_of(name)].origin != CPA_FROM_DEFAULT;
}

/* The environment variable of a setting: CPATTN_BLOCK_SIZE for "block-size". */
static void variable_name(const cpa_field *field, char *out, size_t bytes) {
    int length = snprintf(out, bytes, VARIABLE_PREFIX "%s", field->name);
    for (int i = 0; i < length; i++) out[i] = out[i] == '-' ? '_' : (char)toupper((unsigned char)out[i]);
}

static cpa_status unknown_option(const char *arg, size_t length, cpa_error *err) {
    char found[64];
    cpa_text_quote(arg, length, found, sizeof found);
    const cpa_field *nearest = length > 2 ? cpa_field_nearest(table, N_FIELDS, arg + 2, length - 2) : NULL;
    if (nearest) {
        return cpa_fail(err, CPA_INVALID, "found unknown option '%s', expected '--%s'? (--help lists all)", found,
                        nearest->name);
    }
    return cpa_fail(err, CPA_INVALID, "found unknown option '%s', expected one of those in --help", found);
}

/* Reads the option at argv[*i] into texts[field]; advances *i over a value that stands apart. */
static cpa_status read_option(int argc, char **argv, int *i, const char **texts, cpa_error *err) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    if (strncmp(arg, "--", 2) != 0) {
        char found[64];
        cpa_text_quote(arg, strlen(arg), found, sizeof found);
        return cpa_fail(err, CPA_INVALID, "found '%s', expected an option (--help lists them), 'generate' or 'bench'",
                        found);
    }
    const char *name = arg + 2;
    size_t length = strcspn(name, "=");
    const char *value = name[length] == '=' ? name + length + 1 : NULL;
    const cpa_field *field = cpa_field_find(table, N_FIELDS, name, length);
    if (!field && !value && length > 3 && strncmp(name, "no-", 3) == 0) {
        field = cpa_field_find(table, N_FIELDS, name + 3, length - 3);
        if (field && field->type != CPA_FIELD_FLAG) field = NULL;
        value = "false";
    }
    if (!field) return unknown_option(arg, length + 2, err);
    if (!value && field->type == CPA_FIELD_FLAG) value = "true";
    if (!value) {
        if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0) {
            return cpa_fail(err, CPA_INVALID, "--%s: found no value, expected one after it", field->name);
        }
        value = argv[++*i];
    }
    texts[field - table] = value;
    return CPA_OK;
}

static cpa_status set(cpa_settings *settings, int f, const char *where, const char *text, cpa_origin origin, int line,
                      cpa_error *err) {
    CPA_TRY(cpa_field_set(&table[f], settings, where, text, err));
    settings->source[f].origin = origin;
    settings->source[f].line = line;
    return CPA_OK;
}

static int is_path(const cpa_field *field) {
    return field->type == CPA_FIELD_TEXT &&
           (strcmp(field->value_name, "FILE") == 0 || strcmp(field->value_name, "DIR") == 0);
}

/* A path in the settings file means a file beside it, as `path` is relative to the folder of `config`. */
static cpa_status set_path(cpa_settings *settings, int f, const char *where, const char *path, int line,
                           cpa_error *err) {
    char joined[2 * CPA_TEXT_BYTES];
    const char *slash = strrchr(settings->config, '/');
    int folder = slash && path[0] != '/' && path[0] ? (int)(slash - settings->config) + 1 : 0;
    snprintf(joined, sizeof joined, "%.*s%s", folder, settings->config, path);
    return set(settings, f, where, joined, CPA_FROM_FILE, line, err);
}

static cpa_status read_file(cpa_settings *settings, cpa_error *err) {
    cpa_yaml_file file;
    CPA_TRY(cpa_yaml_open(settings->config, table, N_FIELDS, &file, err));
    cpa_status status = CPA_OK;
    for (int i = 0; i < file.n_entries && status == CPA_OK; i++) {
        const cpa_yaml_entry *entry = &file.entries[i];
        int f = (int)(entry->field - table);
        char where[CPA_TEXT_BYTES + 64];
        snprintf(where, sizeof where, "%s:%d: %s", settings->config, entry->line, entry->field->name);
        if (cpa_setting_is_action(entry->field)) {
            status = cpa_fail(err, CPA_INVALID, "%s: found in a file, expected on the command line only", where);
        } else if (is_path(entry->field)) {
            status = set_path(settings, f, where, entry->value, entry->line, err);
        } else {
            status = set(settings, f, where, entry->value, CPA_FROM_FILE, entry->line, err);
        }
    }
    cpa_yaml_close(&file);
    return status;
}

/* CPATTN_BLOK_SIZE is more likely a mistake than somebody else's. */
static cpa_status unknown_variable(const char *variable, size_t length, cpa_error *err) {
    char shown[64], plain[64], nearest_name[64];
    cpa_text_quote(variable, length, shown, sizeof shown);
    const size_t prefix = sizeof VARIABLE_PREFIX - 1;
    size_t n = 0;
    for (; n + prefix < length && n < sizeof plain; n++) plain[n] = (char)tolower((unsigned char)variable[prefix + n]);
    const cpa_field *nearest = cpa_field_nearest(table, N_FIELDS, plain, n);
    if (!nearest || cpa_setting_is_action(nearest))
        return cpa_fail(err, CPA_INVALID, "%s: found an unknown variable, expected one named like an option of --help",
                        shown);
    variable_name(nearest, nearest_name, sizeof nearest_name);
    return cpa_fail(err, CPA_INVALID, "%s: found an unknown variable, expected %s?", shown, nearest_name);
}

/* Whether a variable, `length` bytes of "NAME=value", is one that is read here or in the test suite. */
static int is_known_variable(const char *variable, size_t length) {
    static const char fault[] = "CPATTN_FAULT", config[] = "CPATTN_CONFIG", tests[] = "CPATTN_TEST_";
    if (strncmp(variable, tests, sizeof tests - 1) == 0) return 1;
    for (int f = -2; f < N_FIELDS; f++) {
        char name[64];
        if (f >= 0) variable_name(&table[f], name, sizeof name);
        const char *known = f == -2 ? fault : f == -1 ? config : cpa_setting_is_action(&table[f]) ? "" : name;
        if (strlen(known) == length && strncmp(known, variable, length) == 0) return 1;
    }
    return 0;
}

static cpa_status check_variables(cpa_error *err) {
    for (char **variable = environ; *variable; variable++) {
        size_t length = strcspn(*variable, "=");
        if (strncmp(*variable, VARIABLE_PREFIX, sizeof VARIABLE_PREFIX - 1) != 0) continue;
        if (!is_known_variable(*variable, length)) return unknown_variable(*variable, length, err);
    }
    return CPA_OK;
}

static cpa_status read_environment(cpa_settings *settings, cpa_error *err) {
    CPA_TRY(check_variables(err));
    for (int f = 0; f < N_FIELDS; f++) {
        char name[64];
        variable_name(&table[f], name, sizeof name);
        const char *text = cpa_setting_is_action(&table[f]) ? NULL : getenv(name);
        if (text && text[0]) CPA_TRY(set(settings, f, name, text, CPA_FROM_ENVIRONMENT, 0, err));
    }
    return CPA_OK;
}

static cpa_status read_command_line(cpa_settings *settings, const char *const *texts, cpa_error *err) {
    for (int f = 0; f < N_FIELDS; f++) {
        char where[64];
        snprintf(where, sizeof where, "--%s", table[f].name);
        if (texts[f]) CPA_TRY(set(settings, f, where, texts[f], CPA_FROM_COMMAND_LINE, 0, err));
    }
    return CPA_OK;
}

/* What belongs to cp_attn generate, and what it has no use for. */
static cpa_status check_generate(const cpa_settings *settings, cpa_error *err) {
    static const char *const of_runs[] = {"trace",        "requests",  "length-scale", "time-scale",
                                          "request-rate", "input-len", "output-len",   "dry-run"};
    for (int f = 0; f < N_FIELDS && !settings->generate; f++) {
        if (strcmp(table[f].group, GENERATE) == 0 && settings->source[f].origin != CPA_FROM_DEFAULT)
            return cpa_fail(err, CPA_INVALID, "--%s: found without 'generate', expected with it", table[f].name);
    }
    if (!settings->generate) return CPA_OK;
    for (size_t i = 0; i < sizeof of_runs / sizeof *of_runs; i++) {
        if (cpa_settings_given(settings, of_runs[i]))
            return cpa_fail(err, CPA_INVALID, "--%s: found with 'generate', expected without it", of_runs[i]);
    }
    if (settings->given_ids[0] && cpa_settings_given(settings, "max-tokens"))
        return cpa_fail(err, CPA_INVALID, "--max-tokens: found with --given-ids, expected without it");
    if (settings->help || settings->version || settings->print_config) return CPA_OK;
    if (!settings->model_dir[0]) return cpa_fail(err, CPA_INVALID, "generate: found no --model-dir, expected one");
    if (!settings->prompt_ids[0]) return cpa_fail(err, CPA_INVALID, "generate: found no --prompt-ids, expected them");
    return CPA_OK;
}

cpa_status cpa_settings_metrics(const cpa_settings *settings, cpa_metrics_options *out, cpa_error *err) {
    cpa_metrics_options options = {0};
    CPA_TRY(cpa_percentiles_parse("--percentiles", settings->percentiles, &options, err));
    CPA_TRY(cpa_goodput_parse("--goodput", settings->goodput, &options, err));
    *out = options;
    return CPA_OK;
}

/* Settings that only mean something with others, or without them. */
static cpa_status check_together(const cpa_settings *settings, cpa_error *err) {
    static const char *const with_trace[] = {"length-scale", "time-scale"};
    static const char *const without_trace[] = {"input-len", "output-len"};
    static const char *const without_folder[] = {"model", "window", "sinks"};
    CPA_TRY(check_generate(settings, err));
    for (int i = 0; i < 2; i++) {
        if (!settings->trace[0] && cpa_settings_given(settings, with_trace[i])) {
            return cpa_fail(err, CPA_INVALID, "--%s: found without --trace, expected with it", with_trace[i]);
        }
        if (settings->trace[0] && cpa_settings_given(settings, without_trace[i])) {
            return cpa_fail(err, CPA_INVALID, "--%s: found with --trace, expected without it", without_trace[i]);
        }
    }
    for (int i = 0; settings->model_dir[0] && i < 3; i++) {
        if (cpa_settings_given(settings, without_folder[i]))
            return cpa_fail(err, CPA_INVALID, "--%s: found with --model-dir, expected without it", without_folder[i]);
    }
    if (settings->check_logits > 0) {
        if (!settings->model_dir[0])
            return cpa_fail(err, CPA_INVALID, "--check-logits: found without --model-dir, expected with it");
        if (settings->kv_cache_dtype > CPA_DTYPE_COUNT)
            return cpa_fail(err, CPA_INVALID,
                            "--check-logits: found with --kv-cache-dtype %s, expected no quantised cache",
                            kv_dtypes[settings->kv_cache_dtype]);
        if (settings->dry_run)
            return cpa_fail(err, CPA_INVALID, "--check-logits: found with --dry-run, expected without");
    }
    if (settings->time_scale > 0 && !isinf(settings->request_rate)) {
        return cpa_fail(err, CPA_INVALID, "--request-rate: found with --time-scale, expected one of the two");
    }
    if ((settings->k_scale > 0) != (settings->v_scale > 0)) {
        return cpa_fail(err, CPA_INVALID, "--%c-scale: found without --%c-scale, expected both or none",
                        settings->k_scale > 0 ? 'k' : 'v', settings->k_scale > 0 ? 'v' : 'k');
    }
    if (settings->k_scale > 0 && settings->kv_cache_dtype != CPA_FP8_E4M3 + 1) {
        return cpa_fail(err, CPA_INVALID, "--k-scale: found with --kv-cache-dtype %s, expected fp8_e4m3",
                        kv_dtypes[settings->kv_cache_dtype]);
    }
    if (settings->preemption_mode == CPA_PREEMPT_SWAP && settings->swap_space == 0)
        return cpa_fail(err, CPA_INVALID,
                        "--preemption-mode: found swap without --swap-space, expected room to swap to");
    if (settings->dry_run && settings->timeline[0]) {
        return cpa_fail(err, CPA_INVALID, "--timeline: found with --dry-run, expected without it: nothing is computed");
    }
    if (settings->timeline[0] && strcmp(settings->timeline, settings->result_json) == 0) {
        return cpa_fail(err, CPA_INVALID, "--timeline: found the file of --result-json, expected another");
    }
    cpa_metrics_options ignored;
    CPA_TRY(cpa_settings_metrics(settings, &ignored, err));
    if (settings->interleave % settings->block_size != 0) {
        return cpa_fail(err, CPA_INVALID,
                        "--cp-kv-cache-interleave-size: found %lld, expected a multiple of the block size %lld",
                        (long long)settings->interleave, (long long)settings->block_size);
    }
    return CPA_OK;
}

cpa_status cpa_settings_load(int argc, char **argv, cpa_settings *out, cpa_error *err) {
    cpa_settings settings = {0};
    const char *texts[N_FIELDS] = {NULL};
    settings.generate = argc > 1 && strcmp(argv[1], "generate") == 0;
    for (int i = 1 + (int)settings.generate; i < argc; i++) CPA_TRY(read_option(argc, argv, &i, texts, err));
    for (int f = 0; f < N_FIELDS; f++)
        CPA_TRY(set(&settings, f, "default", table[f].initial, CPA_FROM_DEFAULT, 0, err));
    const char *config = texts[index_of("config")];
    if (!config) config = getenv("CPATTN_CONFIG");
    int stop_early = texts[index_of("help")] || texts[index_of("version")];
    if (config && !stop_early) {
        CPA_TRY(cpa_field_set(&table[index_of("config")], &settings, "--config", config, err));
        if (settings.config[0]) CPA_TRY(read_file(&settings, err));
    }
    if (!stop_early) CPA_TRY(read_environment(&settings, err));
    CPA_TRY(read_command_line(&settings, texts, err));
    CPA_TRY(check_together(&settings, err));
    *out = settings;
    return CPA_OK;
}

void cpa_settings_print_help(FILE *out) {
    fprintf(out,
            "usage: mpirun -np N cp_attn [options]    serve requests on N ranks; without options, a mixed run\n"
            "       mpirun -np N cp_attn generate --model-dir DIR --prompt-ids IDS [options]    answer a prompt\n"
            "       mpirun -np N cp_attn bench ...    measure one operation; 'cp_attn bench --help' says which\n"
            "\n"
            "A value comes from the command line, else the environment (CPATTN_BLOCK_SIZE for --block-size),\n"
            "else the file of --config, else the default in brackets. --no-NAME turns a flag off.\n");
    for (int f = 0; f < N_FIELDS; f++) {
        if (f == 0 || strcmp(table[f].group, table[f - 1].group) != 0) fprintf(out, "\n%s\n", table[f].group);
        cpa_field_print_help(&table[f], !cpa_setting_is_action(&table[f]), out);
    }
    fprintf(out,
            "\nExit codes: 0 done; 1 a check failed or a request was lost; 2 bad usage, configuration or input;\n"
            "3 a fault at run time; 130 or 143 stopped by SIGINT or SIGTERM.\n");
}

/* Prints text as it stands between double quotes in YAML; returns its length. */
static int print_escaped(const char *text, FILE *out) {
    char quoted[2 * CPA_TEXT_BYTES], line[8 * CPA_TEXT_BYTES];
    size_t n = 0;
    for (; *text && n + 2 < sizeof quoted; text++) {
        if (*text == '"' || *text == '\\') quoted[n++] = '\\';
        quoted[n++] = *text;
    }
    quoted[n] = 0;
    cpa_text_escape(quoted, line, sizeof line);
    return fprintf(out, "%s", line);
}

/* Prints text as a YAML value, texts in double quotes; paths whole, so that they mean the same in any file. Returns its
 * length. */
static int print_value(const cpa_field *field, const char *text, FILE *out) {
    char folder[PATH_MAX];
    if (field->type != CPA_FIELD_TEXT) return fprintf(out, "%s", text);
    int n = fprintf(out, "\"");
    if (is_path(field) && text[0] && text[0] != '/' && getcwd(folder, sizeof folder)) {
        n += print_escaped(folder, out);
        n += fprintf(out, "/");
    }
    n += print_escaped(text, out);
    return n + fprintf(out, "\"");
}

void cpa_settings_print(const cpa_settings *settings, const char *auto_dtype, FILE *out) {
    for (int f = 0; f < N_FIELDS; f++) {
        char text[CPA_TEXT_BYTES], name[64];
        if (cpa_setting_is_action(&table[f])) continue;
        cpa_origin origin = settings->source[f].origin;
        cpa_field_format(&table[f], settings, text, sizeof text);
        const int is_hidden = table[f].secret && text[0];
        if (is_hidden) snprintf(text, sizeof text, "(not shown)");
        int width = fprintf(out, "%s%s: ", origin == CPA_FROM_DEFAULT || is_hidden ? "# " : "", table[f].name);
        width += print_value(&table[f], text, out);
        fprintf(out, "%*s # ", width < 42 ? 42 - width : 0, "");
        variable_name(&table[f], name, sizeof name);
        switch (origin) {
            case CPA_FROM_DEFAULT: fprintf(out, "default"); break;
            case CPA_FROM_FILE:
                cpa_text_escape(settings->config, text, sizeof text);
                fprintf(out, "%s:%d", text, settings->source[f].line);
                break;
            case CPA_FROM_ENVIRONMENT: fprintf(out, "environment %s", name); break;
            case CPA_FROM_COMMAND_LINE: fprintf(out, "command line"); break;
        }
        if (f == index_of("dtype") && settings->dtype == 0) fprintf(out, "; auto: %s", auto_dtype);
        fprintf(out, "\n");
    }
}
