#include "launcher/settings/settings_table.h"

#include <assert.h>
#include <ctype.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include <cpattn/engine.h>

#include "comm/transports.h"
#include "launcher/settings/model_file.h"
#include "program/names.h"
#include "program/trace.h"

static const char *const dtypes[] = {"auto", "fp32", "bf16", "fp16", NULL};
static const char *const state_dtypes[] = {"fp32", "bf16", "fp16", NULL};
static const char *const prompt_ways[] = {"auto", "expand", "absorb", NULL};
static const char *const kv_dtypes[] = {"auto",     "fp32",    "bf16",    "fp16",    "fp8_e4m3", "int8",    "fp8_t128",
                                        "fp8_e5m2", "fp8_t64", "tq_k8v4", "tq_4bit", "tq_k3v4",  "tq_3bit", NULL};
static const char *const layouts[] = {"token-major", "head-major", "vllm-x", NULL};
static const char *const algorithms[] = {"auto", "pass-kv", "pass-q", NULL};
static const char *const devices[] = {"auto", "host", "cuda", NULL};
static const char *const slice_modes[] = {"auto", "off", "decode", "all", NULL};
static const char *const expert_places[] = {"replicated", "spread", NULL};
static const char *const cascade_modes[] = {"auto", "off", NULL};
static const char *const transfers[] = {"none", "import", "export", "both", NULL};
static const char *const preemption_modes[] = {"recompute", "swap", "auto", NULL};
static const char *const policies[] = {"priority", "fcfs", NULL};
static const char *const log_levels[] = {"error", "warn", "info", "debug", NULL};

#define TOKENS_MAX 0x1p40 /* longest sequence, and most tokens of one kind */
#define SEED_MAX 0x1p62
#define ACTIONS "Program" /* these make no sense in a file */
#define GENERATE CPA_SETTINGS_GENERATE
#define SERVE CPA_SETTINGS_SERVE
#define BODY_MAX 0x1p31

#define TEXT(member) CPA_FIELD_TEXT, offsetof(cpa_settings, member), ""
#define LONG_TEXT(member) CPA_FIELD_LONG_TEXT, offsetof(cpa_settings, member), ""
#define FLAG(member, initial) CPA_FIELD_FLAG, offsetof(cpa_settings, member), initial
#define INT(member, initial, min, max) CPA_FIELD_INT, offsetof(cpa_settings, member), initial, min, max
#define REAL(member, initial, min, max) CPA_FIELD_REAL, offsetof(cpa_settings, member), initial, min, max
#define CHOICE(member, initial, choices) CPA_FIELD_CHOICE, offsetof(cpa_settings, member), initial, 0, 0, choices

/* One row a setting, in the order of --help. */
const cpa_field cpa_settings_rows[] = {
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
    {GENERATE, "prompt", "TEXT", LONG_TEXT(prompt),
     .help = "the prompt, for the tokenizer of --model-dir: a text, or @FILE, a file of text"},
    {GENERATE, "prompt-ids", "IDS", LONG_TEXT(prompt_ids),
     .help = "the prompt: ids with commas between them, or @FILE, a file of ids"},
    {GENERATE, "chat", NULL, FLAG(chat, "false"),
     .help = "--prompt is a user's message, and goes through the chat template of the model's folder"},
    {GENERATE, "system", "TEXT", LONG_TEXT(system), .help = "with --chat: the system's message before it; or @FILE"},
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
    {GENERATE, "frequency-penalty", "R", REAL(frequency_penalty, "0", -1e6, 1e6),
     .help = "subtracted from them for each time that they are there"},
    {GENERATE, "logit-bias", "ID:BIAS,...", LONG_TEXT(logit_bias),
     .help = "added to the logits of these tokens; or @FILE, a file of such"},
    {GENERATE, "min-tokens", "N", INT(min_tokens, "0", 0, 0x1p24),
     .help = "neither an end token nor --stop ends the answer before it has N tokens"},
    {GENERATE, "stop-ids", "IDS", TEXT(stop_ids), .help = "tokens that end the answer, beside those of the model"},
    {GENERATE, "stop", "TEXT", TEXT(stop), .help = "a text at which the answer ends; it is left out"},
    {GENERATE, "given-ids", "IDS", LONG_TEXT(given_ids),
     .help = "the answer's tokens are these, as --prompt-ids; --json then has the most probable ones beside them"},
    {GENERATE, "ignore-eos", NULL, FLAG(ignore_eos, "false"), .help = "the model's own end tokens do not end it"},
    {GENERATE, "logprobs", NULL, FLAG(logprobs, "false"), .help = "print the log-probability of each token"},
    {GENERATE, "json", NULL, FLAG(json, "false"),
     .help = "print ids, log-probabilities and times as one JSON object at the end"},
    {SERVE, "host", "ADDRESS", CPA_FIELD_TEXT, offsetof(cpa_settings, host), "127.0.0.1",
     .help = "address to listen at; 0.0.0.0: every one of this host"},
    {SERVE, "port", "N", INT(port, "8000", 0, 65535), .help = "port to listen at; 0: one that is free"},
    {SERVE, "api-key", "TEXT", TEXT(api_key), .secret = 1,
     .help = "requests have to bring it, as 'Authorization: Bearer TEXT'; others see it in a command line, but not in "
             "the environment"},
    {SERVE, "api-keys", "FILE", TEXT(api_keys),
     .help = "further keys, one a line, each of a tenant of its own: fair shares, and no cached prefixes in common"},
    {SERVE, "served-model-name", "NAME", TEXT(served_model_name),
     .help = "of the model in requests and answers; without it, the name of its folder or shape"},
    {SERVE, "tool-call-parser", "NAME", TEXT(tool_call_parser),
     .help = "how the model writes calls of tools: hermes, llama3_json, mistral, deepseek_v3, deepseek_v31, or none; "
             "without it, as its chat template shows"},
    {SERVE, "reasoning-parser", "NAME", TEXT(reasoning_parser),
     .help = "how it writes thoughts: deepseek_r1, qwen3, mistral, or none; without it, as its chat template shows"},
    {SERVE, "max-model-len", "N", INT(max_model_len, "auto", 1, TOKENS_MAX), .word = "auto",
     .help = "most tokens of a request, prompt and answer; auto: what the model is made for, if the cache holds that"},
    {SERVE, "gpu-memory-utilization", "R", REAL(gpu_memory_utilization, "0.9", 0.01, 1),
     .help = "share of a device's memory for weights, cache and the rest, where --num-blocks is auto"},
    {SERVE, "max-connections", "N", INT(max_connections, "4096", 1, 1 << 20),
     .help = "most connections at a time; further ones are closed"},
    {SERVE, "max-body-bytes", "N", INT(max_body_bytes, "16777216", 1024, BODY_MAX),
     .help = "longest body of a request"},
    {SERVE, "idle-timeout", "S", REAL(idle_timeout, "60", 1, 1e6),
     .help = "a connection on which nothing moves for S seconds, though the client could read or write, is closed"},
    {SERVE, "max-queued-requests", "N", INT(max_queued_requests, "none", 1, 0x1p31), .word = "none",
     .help = "most requests that wait to be run; further ones are refused for the time being"},
    {SERVE, "max-queued-tokens", "N", INT(max_queued_tokens, "67108864", 1, TOKENS_MAX), .word = "none",
     .help = "most prompt tokens that wait; likewise"},
    {"Model", "model", "FILE", TEXT(model),
     .help = "shape of the model, YAML as in configs/; without it, that of configs/small.yaml"},
    {"Model", "model-dir", "DIR", TEXT(model_dir),
     .help = "a model with its weights, a Hugging Face folder: Llama, Mistral, Mixtral, Qwen 2, 2.5, 3 or 3-MoE, "
             "DeepSeek V2 or V3; in place "
             "of --model"},
    {"Model", "layers", "N", INT(layers, "model", 1, CPA_MODEL_MAX_LAYERS), .word = "model",
     .help = "the first N layers of a deeper model alone; model: all of them"},
    {"Model", "chat-template", "NAME|FILE", TEXT(chat_template),
     .help = "of chats: one known by name, or a file with one, in place of that of the folder"},
    {"Model", "slice-weights", NULL, CHOICE(slice_weights, "auto", slice_modes),
     .help =
         "with --model-dir and several ranks, which exchange the outcome: in decode each reads a slice of the weights; "
         "all: it loads no more than that, for prefill too; auto: decode on GPUs, off on the host"},
    {"Model", "experts", NULL, CHOICE(spread_experts, "replicated", expert_places),
     .help = "of a model with experts, on several ranks: replicated: each has all; spread: each has some, and tokens "
             "travel "
             "to the ranks of their experts"},
    {"Model", "dtype", NULL, CHOICE(dtype, "auto", dtypes), .named = cpa_named_dtype,
     .help = "of weights, queries, keys, values and results; auto: as the model says; without a model bf16 on CUDA, "
             "fp32 on the host, there with --model-dir too"},
    {"Model", "window", "N", INT(window, "model", 0, TOKENS_MAX), .word = "model", .word_value = -1,
     .help = "a query sees the last N keys; 0: all of them; model: as the model says"},
    {"Model", "sinks", "N", INT(sinks, "model", 0, 0x1p30), .word = "model", .word_value = -1,
     .help = "the first N keys stay visible whatever the window"},
    {"Model", "softcap", "C", REAL(softcap, "0", 0, 1e6),
     .help = "scores become C tanh(score / C), 0: they do not; without --model-dir, as the next three"},
    {"Model", "temperature-len", "N", REAL(temperature_len, "0", 0, 1e9),
     .help = "scores of a query at position p > N are multiplied by log(p) / log(N); 0: none are"},
    {"Model", "alibi", NULL, FLAG(alibi, "false"),
     .help = "scores fall with the distance of a key, a slope for each head"},
    {"Model", "sink-logits", NULL, FLAG(sink_logits, "false"),
     .help = "each head has a sink: one more term of every sum"},
    {"Cache", "kv-cache-dtype", NULL, CHOICE(kv_cache_dtype, "auto", kv_dtypes), .named = cpa_named_dtype,
     .help = "of the KV cache, here and in --dtype by the names of others as well (bfloat16, half, fp8); auto: that of "
             "the model; fp32, bf16, fp16; fp8_e4m3, fp8_e5m2 and int8 have a scale for each token and head, "
             "fp8_t128, of latents alone, four for each token, and fp8_t64, of latents of 512, seven; "
             "tq_k8v4, tq_4bit, tq_k3v4 and tq_3bit are TurboQuant's: keys in 8, 4 or 3 bits, values in 4 or 3"},
    {"Cache", "kv-cache-dtype-skip-layers", "LAYERS", TEXT(skip_layers),
     .help = "0,-1: the first and the last layer of a quantised cache keep the model's dtype, and so on for others; "
             "sliding_window: those with a window do"},
    {"Cache", "precise-first-tokens", "N", INT(precise_tokens, "0", 0, 0x1p30),
     .help = "the first N tokens of every sequence, a multiple of the block size, are also kept in the model's dtype "
             "beside a quantised cache, and attended so; prompts go by pass-q over several ranks"},
    {"Cache", "k-scale", "S,...", CPA_FIELD_TEXT, offsetof(cpa_settings, k_scale), "auto",
     .help =
         "keys in fp8_e4m3 or fp8_e5m2 are multiples of S, one scale for all of them, or of one for each KV head; with "
         "--v-scale, but over latents, where it is that of values too; auto: see above"},
    {"Cache", "v-scale", "S,...", CPA_FIELD_TEXT, offsetof(cpa_settings, v_scale), "auto",
     .help = "the same of values"},
    {"Cache", "kv-layout", NULL, CHOICE(kv_layout, "token-major", layouts), .named = cpa_named_layout,
     .help = "order in a block of the cache: [tokens, heads], also NHD, or [heads, tokens], HND"},
    {"Cache", "block-size", "N", INT(block_size, "16", 1, 512), .power_of_two = 1,
     .help = "tokens in a block of the cache"},
    {"Cache", "num-blocks", "N", INT(num_blocks, "auto", 0, 0x1p31 - 1), .word = "auto",
     .help = "blocks of one rank, for the layers that keep most (those with the widest window, or with none); auto: "
             "enough for the run, or as serve is told, if memory allows"},
    {"Cache", "window-seqs", "N", INT(window_seqs, "auto", 0, 0x1p31 - 1), .word = "auto",
     .help = "the other layers have blocks for what N sequences can need of their windows, at most as many; auto: "
             "those that can run at once"},
    {"Cache", "cp-kv-cache-interleave-size", "N", INT(interleave, "auto", 0, 0x1p30), .word = "auto",
     .alias = "interleave",
     .help =
         "tokens in a row that one rank owns, a multiple or a divisor of the block size; auto: the block size; also "
         "--interleave"},
    {"Cache", "local-context", "N", INT(local_context, "auto", 0, TOKENS_MAX), .word = "auto", .word_value = -1,
     .help = "requests of up to N tokens stay on one rank and decode without any exchange; 0: none; auto: on GPUs "
             "those that are sooner done like that, on the host none"},
    {"Cache", "enable-prefix-caching", NULL, FLAG(prefix_caching, "true"),
     .help = "requests that begin alike share the blocks of what they have in common"},
    {"Cache", "cascade-attention", NULL, CHOICE(cascade_attention, "auto", cascade_modes),
     .help = "blocks that decoding requests share are read once for all of them: auto, where that takes less time, or "
             "off"},
    {"Cache", "cache-salt", "TEXT", TEXT(cache_salt), .secret = 1,
     .help = "requests share with those of the same salt only; a trace may have one in each line"},
    {"Cache", "block-store", "STORE", TEXT(block_store),
     .help = "where keys and values of prompts go to, and come from, between jobs of whatever ranks, interleave, block "
             "size and layout: a folder that all ranks reach, and whoever owns it empties; nixl:FOLDER, memory of the "
             "jobs, which NIXL reads and which meet in that folder; or mooncake:FILE, Mooncake's store, by its "
             "configuration file"},
    {"Cache", "block-store-size", "GIB", REAL(block_store_size, "1", 0.001, 0x1p20),
     .help = "with --block-store nixl:FOLDER and exports: memory of one rank for them, the oldest forgotten first"},
    {"Cache", "block-transfer", NULL, CHOICE(block_transfer, "none", transfers),
     .help = "with --block-store: prompts are computed as far as they are not there (import), are put there when they "
             "are computed (export), or both; requests to a server may always ask for an import (kv_transfer_params)"},
    {"Cache", "preemption-mode", NULL, CHOICE(preemption_mode, "auto", preemption_modes),
     .help = "the cache of who gives way: computed again, moved to host memory, or what takes less time"},
    {"Cache", "swap-space", "GIB", REAL(swap_space, "0", 0, 0x1p20),
     .help = "host memory of one rank for the cache of preempted requests, and for blocks that are evicted"},
    {"Cache", "keep-evicted", NULL, FLAG(keep_evicted, "false"),
     .help = "blocks that can be found by their prefix and have to make room stay in --swap-space, and come back for "
             "requests that begin with them"},
    {"Cache", "swap-folder", "FOLDER", TEXT(swap_folder),
     .help = "with --swap-space: they are also written to a folder, where the next job of the same model, ranks and "
             "cache finds them; turns --keep-evicted on"},
    {"Cache", "swap-folder-size", "GIB", REAL(swap_folder_size, "1", 1e-6, 0x1p20),
     .help = "with --swap-folder: what one rank keeps there, the least recently used blocks the shortest"},
    {"Cache", "host-cache", "GIB", REAL(host_cache, "0", 0, 0x1p20),
     .help = "the cache lies in host memory, so much of one rank, and attention reads it through --device-ring: for "
             "contexts larger than the memory of the GPUs; 0: it lies on the device"},
    {"Cache", "device-ring", "GIB", REAL(device_ring, "1", 1e-6, 0x1p20),
     .help = "with --host-cache: device memory of one rank for what is on its way from there"},
    {"Cache", "tenant-block-quota", "N", INT(tenant_block_quota, "none", 0, 0x1p31 - 1), .word = "none",
     .help = "most blocks of one rank that the running requests of one tenant, a salt or an API key, hold"},
    {"Scheduling", "max-num-batched-tokens", "N", INT(max_num_batched_tokens, "2048", 1, 0x1p24),
     .help = "most new tokens in one step"},
    {"Scheduling", "max-num-seqs", "N", INT(max_num_seqs, "256", 1, 0x1p20), .help = "most sequences in one step"},
    {"Scheduling", "policy", NULL, CHOICE(policy, "priority", policies),
     .help = "who goes first: by priority, then arrival; or by arrival alone"},
    {"Scheduling", "priority-ageing", "S", REAL(priority_ageing, "60", 0, 1e9), .word = "off",
     .help = "waiting S seconds counts as one level of priority"},
    {"Scheduling", "long-prefill-token-threshold", "N", INT(long_prefill_token_threshold, "none", 0, 0x1p24),
     .word = "none", .help = "most tokens of one prefill in a step"},
    {"Scheduling", "adaptive-chunks", NULL, FLAG(adaptive_chunks, "false"),
     .help =
         "where blocks are short, cut prefill to what is free, so that nobody has to give way; --log-level info says "
         "when; else only tokens bound it"},
    {"Scheduling", "short-prompts", NULL, CHOICE(short_prompts, "auto", prompt_ways),
     .help = "over latents, chunks of prompts of few tokens against what is cached: expand keys as the others do, or "
             "absorb, "
             "attending latents as decode does, where that is less work; auto: absorb on a GPU"},
    {"Scheduling", "sparse", "METHOD", CPA_FIELD_TEXT, offsetof(cpa_settings, sparse), "off",
     .help =
         "prompts attend the blocks of 128 keys that XAttention estimates to have the share TAU of their attention, "
         "by sums over antidiagonals of S tokens, 8 where it is not said: xattn:TAU or xattn:TAU,S; short prompts and "
         "decode attend all keys"},
    {"Scheduling", "skip-tiles", "T", REAL(skip_tiles, "off", 0, 1000), .word = "off",
     .help = "attention leaves out tiles of keys all of whose scores lie more than T below the largest that their rows "
             "have met: n of them have at most n exp(-T) of the weight of a row, which the check allows for"},
    {"Scheduling", "speculative", "METHOD", CPA_FIELD_TEXT, offsetof(cpa_settings, speculative), "off",
     .help = "ngram:K, ngram:KxB or these with :MIN..MAX: a step may draw 1 + K tokens of a request, of which K were "
             "guessed: what followed the last time that its MAX (or fewer, down to MIN) last tokens were there before, "
             "or up "
             "to B continuations as a tree; mtp:1: the model's own module for the token after next guesses it "
             "(num_nextn_predict_layers); tokens are those without it"},
    {"Exchange", "algorithm", NULL, CHOICE(algorithm, "auto", algorithms),
     .help = "move keys and values (pass-kv), or queries (pass-q); auto: the cheaper one, chunk by chunk"},
    {"Exchange", "staging-bytes", "N", INT(staging_bytes, "auto", 0, 0x1p40), .word = "auto",
     .help = "bound on the memory of one rank for keys and values on their way; auto: 64 MiB, on a GPU 2 GiB"},
    {"Exchange", "state-dtype", NULL, CHOICE(state_dtype, "fp32", state_dtypes), .named = cpa_named_dtype,
     .help =
         "of partial results that travel between ranks: fp32, or that of the model in 16 bits, half the bytes, where "
         "results depend on --algorithm by as much as it rounds"},
    {"Exchange", "transport", NULL, CHOICE(transport, "auto", cpa_transport_names),
     .help = "what carries tensors between ranks: on GPUs NCCL, or peer memory of one host; auto: the faster one"},
    {"Checks", "verify", "R", REAL(verify, "auto", 0, 1), .word = "auto", .word_value = CPA_VERIFY_AUTO,
     .help =
         "share of the results (token, head, layer) that are checked against float64; auto: at most 0.001, and what "
         "2% of the run time pays for"},
    {"Checks", "violation-dump", "FOLDER", TEXT(violation_dump),
     .help =
         "keep what a row that the check finds wrong had, its keys and values too, in a file there, for cp_attn check; "
         "on the rank that found it"},
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
     .help = "the run ends when a rank has not been heard of for S seconds, or keeps the others from ending"},
    {"Device", "join-timeout", "S", REAL(join_timeout, "60", 1, 1e6), .early = 1,
     .help = "how long all ranks may take to come"},
    {"Device", "job-secret-file", "FILE", TEXT(job_secret_file), .early = 1,
     .help = "of ranks that meet at MASTER_ADDR without mpirun: its first line is what all of them know and nobody "
             "else; or CPATTN_JOB_SECRET in the environment"},
    {"Device", "shutdown-timeout", "S", REAL(shutdown_timeout, "auto", 0, 1e6), .word = "auto", .word_value = -1,
     .help = "after a signal requests that have arrived may finish for S seconds; 0: the step in flight; auto: 30 of "
             "serve, else 0"},
    {"Output", "result-json", "FILE", TEXT(result_json),
     .help = "write the results there as JSON as well; an older file becomes FILE.old"},
    {"Output", "percentiles", "LIST", CPA_FIELD_TEXT, offsetof(cpa_settings, percentiles), "99",
     .help = "percentiles of the latencies in the report and the results, such as 50,90,99"},
    {"Output", "goodput", "LIST", TEXT(goodput),
     .help = "most milliseconds of TTFT, TPOT, E2EL of a good request, such as ttft:200; good ones are counted"},
    {"Output", "timeline", "FILE", TEXT(timeline),
     .help = "write what each rank did when, and what became of each request, as a Chrome trace (Perfetto shows it); "
             "as --result-json"},
    {"Output", "metrics-file", "FILE", TEXT(metrics_file),
     .help = "write metrics there for Prometheus when the run begins, every 5 s and at its end, whole at any moment; "
             "as --result-json"},
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
enum { N_ROWS = sizeof cpa_settings_rows / sizeof cpa_settings_rows[0] };
_Static_assert(N_ROWS <= CPA_SETTINGS_MAX, "CPA_SETTINGS_MAX is too small");

const int cpa_settings_n_rows = N_ROWS;

void cpa_setting_variable(const cpa_field *field, char *out, size_t bytes) {
    int length = snprintf(out, bytes, CPA_VARIABLE_PREFIX "%s", field->name);
    for (int i = 0; i < length; i++) out[i] = out[i] == '-' ? '_' : (char)toupper((unsigned char)out[i]);
}

int cpa_setting_is_action(const cpa_field *field) {
    return strcmp(field->group, ACTIONS) == 0;
}

int cpa_settings_index(const char *name) {
    const cpa_field *field = cpa_field_find(cpa_settings_rows, N_ROWS, name, strlen(name));
    assert(field);
    return (int)(field - cpa_settings_rows);
}

int cpa_settings_given(const cpa_settings *settings, const char *name) {
    return settings->source[cpa_settings_index(name)].origin != CPA_FROM_DEFAULT;
}
