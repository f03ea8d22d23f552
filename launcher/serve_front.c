#include "launcher/serve_front.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/limits.h"
#include "launcher/output/live_page.h"
#include "launcher/settings/api_keys_file.h"
#include "program/chart/pairs.h"

_Static_assert((int)CPA_CHART_MOST_RANKS >= (int)CPA_COMM_MAX_RANKS,
               "the history of the status page has room for every rank");

/* Token ids of the synthetic model, which takes any. */
#define SYNTHETIC_VOCABULARY ((int64_t)1 << 31)

/* For clients to take an error before the process ends. */
#define FAIL_S 0.3

/* ---- text ---- */

static cpa_status open_tokenizer(const cpa_job *job, cpa_serve_front *front, cpa_error *err) {
    if (!job->has_network) return CPA_OK;
    const cpa_status status = cpa_tokenizer_open(job->settings.model_dir, &front->tokenizer, err);
    if (status != CPA_UNSUPPORTED) return status == CPA_IO ? CPA_INVALID : status;
    cpa_log(CPA_LOG_WARN, "%s", err->message);
    return CPA_OK;
}

static cpa_status open_chat(const cpa_job *job, cpa_serve_front *front, cpa_error *err) {
    const char *folder = job->settings.model_dir, *name = job->settings.chat_template;
    if (!front->tokenizer) {
        if (!name[0]) return CPA_OK;
        return cpa_fail(err, CPA_INVALID, "--chat-template: found without a tokenizer in %s, expected one",
                        job->has_network ? folder : "any --model-dir");
    }
    const cpa_status status = cpa_chat_template_open(folder, name[0] ? name : NULL, &front->chat, err);
    if (status != CPA_OK && name[0]) {
        char why[sizeof err->message];
        snprintf(why, sizeof why, "%s", err->message);
        return cpa_fail(err, CPA_INVALID, "--chat-template: %.480s", why);
    }
    if (status != CPA_UNSUPPORTED) return status == CPA_IO ? CPA_INVALID : status;
    cpa_log(CPA_LOG_WARN, "%s", err->message);
    return CPA_OK;
}

/* By name, or as the template shows; a template with tools whose calls are in no form that is known is told of. */
static cpa_status choose_forms(const cpa_job *job, cpa_serve_front *front, cpa_error *err) {
    const char *tools = job->settings.tool_call_parser, *thoughts = job->settings.reasoning_parser, *known;
    const char *source = front->chat ? cpa_chat_template_source(front->chat) : "";
    const int tool_form = tools[0] ? cpa_tool_form_named(tools, &known) : (int)cpa_tool_form_of(source);
    if (tool_form < 0)
        return cpa_fail(err, CPA_INVALID, "--tool-call-parser: found '%.40s', expected %s", tools, known);
    const int thought_form = thoughts[0] ? cpa_thought_form_named(thoughts, &known) : (int)cpa_thought_form_of(source);
    if (thought_form < 0)
        return cpa_fail(err, CPA_INVALID, "--reasoning-parser: found '%.40s', expected %s", thoughts, known);
    front->tool_form = (cpa_tool_form)tool_form;
    front->thought_form = (cpa_thought_form)thought_form;
    if (!tools[0] && tool_form == CPA_TOOLS_NONE && strstr(source, "tools"))
        cpa_log(CPA_LOG_WARN,
                "the chat template takes tools, but shows no form of calls that is known: calls are text; "
                "see --tool-call-parser");
    return CPA_OK;
}

static void describe(const cpa_job *job, cpa_serve_front *front) {
    char *out = front->says;
    const size_t bytes = sizeof front->says;
    if (!job->has_network) {
        snprintf(out, bytes, "token ids alone, of the synthetic model");
    } else if (!front->tokenizer) {
        snprintf(out, bytes, "token ids alone: no tokenizer that is known in the model's folder");
    } else if (!front->chat) {
        snprintf(out, bytes, "text and token ids; no chat: no template that can be run in the model's folder");
    } else {
        snprintf(out, bytes, "text, token ids, and chat by the template %s", cpa_chat_template_name(front->chat));
    }
}

/* ---- the server ---- */

/* From any thread of the server. */
static char *render_metrics(void *ctx) {
    cpa_serve_front *front = ctx;
    cpa_engine *engine = atomic_load(&front->engine);
    cpa_engine_stats stats = {0};
    if (engine) cpa_engine_get_stats(engine, &stats, sizeof stats);
    return cpa_exposition_render(front->exposition, &stats);
}

/* From any thread of the server. */
static char *render_status(void *ctx) {
    const cpa_serve_front *front = ctx;
    char title[256];
    snprintf(title, sizeof title, "cp_attn: %s", front->name);
    return cpa_live_page_render(front->history, title, cpa_clock_now());
}

/* The keys of --api-keys, and that of --api-key behind them. */
static cpa_status read_keys(const cpa_settings *settings, cpa_api_keys_file *keys, cpa_error *err) {
    if (settings->api_keys[0]) CPA_TRY(cpa_api_keys_file_read(settings->api_keys, keys, err));
    if (!settings->api_key[0]) return CPA_OK;
    const cpa_status status = cpa_api_keys_file_add(keys, "--api-key", settings->api_key, err);
    if (status != CPA_OK) cpa_api_keys_file_release(keys);
    return status;
}

static cpa_status start(const cpa_job *job, const cpa_api_keys_file *keys, cpa_serve_front *front, cpa_error *err) {
    const cpa_settings *settings = &job->settings;
    front->name = settings->served_model_name[0] ? settings->served_model_name : job->model.name;
    front->exposition = cpa_exposition_create(front->name, settings->block_size);
    front->history = cpa_live_history_create(front->ranks, cpa_clock_now());
    if (!front->exposition || !front->history)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the figures of the server");
    const cpa_server_options options = {
        .host = settings->host,
        .port = (int)settings->port,
        .api_keys = (const char *const *)keys->keys,
        .n_api_keys = keys->count,
        .model_name = front->name,
        .tokenizer = front->tokenizer,
        .chat = front->chat,
        .tool_form = front->tool_form,
        .thought_form = front->thought_form,
        .transfer = (int32_t)settings->block_transfer,
        .has_block_store = settings->block_store[0] != 0,
        .seed = (uint64_t)settings->seed,
        .max_body_bytes = settings->max_body_bytes,
        .max_connections = settings->max_connections,
        .idle_timeout_s = settings->idle_timeout,
        .metrics = render_metrics,
        .metrics_ctx = front,
        .status_page = render_status,
        .status_ctx = front,
    };
    return cpa_server_start(&options, &front->server, err);
}

cpa_status cpa_serve_front_open(const cpa_job *job, int32_t ranks, cpa_serve_front *front, cpa_error *err) {
    front->ranks = ranks;
    cpa_status status = open_tokenizer(job, front, err);
    if (status == CPA_OK) status = open_chat(job, front, err);
    if (status == CPA_OK) status = choose_forms(job, front, err);
    cpa_api_keys_file keys = {NULL, 0, 0};
    if (status == CPA_OK) status = read_keys(&job->settings, &keys, err);
    if (status == CPA_OK) status = start(job, &keys, front, err);
    cpa_api_keys_file_release(&keys);
    if (status == CPA_OK) {
        describe(job, front);
    } else {
        cpa_serve_front_close(front);
    }
    return status;
}

void cpa_serve_front_close(cpa_serve_front *front) {
    cpa_server_stop(front->server, 0);
    cpa_live_history_release(front->history);
    cpa_exposition_release(front->exposition);
    cpa_chat_template_close(front->chat);
    cpa_tokenizer_close(front->tokenizer);
    memset(front, 0, sizeof *front);
}

static cpa_status submit(void *engine, const cpa_request *request, cpa_error *err) {
    const cpa_status status = cpa_engine_submit(engine, request);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", cpa_engine_error(engine));
}

static cpa_status cancel(void *engine, uint64_t id) {
    return cpa_engine_cancel(engine, id);
}

cpa_status cpa_serve_front_attach(cpa_serve_front *front, const cpa_job *job, cpa_engine *engine, int64_t max_model_len,
                                  cpa_error *err) {
    const cpa_server_engine attached = {
        .ctx = engine,
        .submit = submit,
        .cancel = cancel,
        .vocabulary = job->has_network ? job->network.vocabulary : SYNTHETIC_VOCABULARY,
        .max_model_len = max_model_len,
        .end_ids = job->network.end_ids,
        .n_end_ids = job->network.n_end_ids,
    };
    atomic_store(&front->engine, engine);
    return cpa_server_attach(front->server, &attached, err);
}

void cpa_serve_front_on_finish(cpa_serve_front *front, const cpa_request_result *result) {
    cpa_server_on_finish(front->server, result);
    cpa_exposition_add_result(front->exposition, result);
    cpa_live_history_add_result(front->history, result, cpa_clock_now());
}

void cpa_serve_front_on_step(cpa_serve_front *front, const cpa_engine_stats *stats) {
    const cpa_engine *engine = atomic_load(&front->engine);
    cpa_rank_stats rank;
    int64_t bytes_to[CPA_COMM_MAX_RANKS];
    cpa_exposition_add_step(front->exposition, stats);
    cpa_live_history_add_step(front->history, stats, cpa_clock_now());
    for (int32_t r = 0; r < front->ranks; r++)
        if (cpa_engine_get_rank_stats(engine, r, &rank, sizeof rank, bytes_to) == CPA_OK)
            cpa_live_history_add_rank(front->history, r, &rank, bytes_to);
}

uint32_t cpa_serve_front_token_at(void *front, uint64_t request, int64_t position) {
    return cpa_server_token_at(((cpa_serve_front *)front)->server, request, position);
}

void cpa_serve_front_fail(cpa_serve_front *front, const char *why) {
    if (!front->server) return;
    cpa_server_fail(front->server, why);
    (void)cpa_server_wait(front->server, FAIL_S);
}
