#include "src/llm/prompt_ids.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/json_file.h"

static cpa_status open_tokenizer(const char *folder, cpa_prompt_source *out, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    const cpa_status status = cpa_tokenizer_open(folder, &out->tokenizer, &why);
    if (status != CPA_OK && status != CPA_UNSUPPORTED) return cpa_fail(err, status, "%s", why.message);
    if (status == CPA_UNSUPPORTED)
        snprintf(out->why, sizeof out->why, "%s", why.message);
    else if (!out->tokenizer)
        snprintf(out->why, sizeof out->why, "%.150s has neither tokenizer.json nor tokenizer.model", folder);
    return CPA_OK;
}

static cpa_status open_chat(const char *folder, const char *name, cpa_prompt_source *out, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    if (!out->tokenizer)
        return name ? cpa_fail(err, CPA_INVALID, "chat_template: found without a tokenizer: %s", out->why) : CPA_OK;
    const cpa_status status = cpa_chat_template_open(folder, name, &out->chat, &why);
    if (status != CPA_OK && name) return cpa_fail(err, CPA_INVALID, "chat_template: %s", why.message);
    if (status != CPA_OK && status != CPA_UNSUPPORTED) return cpa_fail(err, status, "%s", why.message);
    if (status == CPA_UNSUPPORTED)
        snprintf(out->why, sizeof out->why, "%s", why.message);
    else if (!out->chat)
        snprintf(out->why, sizeof out->why, "%.200s has no chat template", folder);
    return CPA_OK;
}

cpa_status cpa_prompt_source_open(const char *folder, const char *chat_template, int64_t vocabulary,
                                  cpa_prompt_source *out, cpa_error *err) {
    *out = (cpa_prompt_source){.vocabulary = vocabulary};
    cpa_status status = open_tokenizer(folder, out, err);
    if (status == CPA_OK) status = open_chat(folder, chat_template, out, err);
    if (status != CPA_OK) cpa_prompt_source_close(out);
    return status;
}

void cpa_prompt_source_close(cpa_prompt_source *source) {
    cpa_chat_template_close(source->chat);
    cpa_tokenizer_close(source->tokenizer);
    *source = (cpa_prompt_source){.tokenizer = NULL};
}

/* ---- chats ---- */

/* JSON of a prompt: of that type, or CPA_INVALID. NULL is nothing. */
static cpa_status read_json(const char *name, const char *text, json_type type, json_t **out, cpa_error *err) {
    json_error_t why;
    if (!text) return CPA_OK;
    const cpa_status status = cpa_json_parse(text, strlen(text), 0, out, &why);
    if (status != CPA_OK)
        return cpa_fail(err, status, "%s: no JSON: %s at line %d, column %d", name, why.text, why.line, why.column);
    if (json_typeof(*out) == type) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "%s: expected JSON of %s", name, type == JSON_ARRAY ? "an array" : "an object");
}

static cpa_status check_messages(const json_t *messages, cpa_error *err) {
    size_t i;
    json_t *message;
    if (json_array_size(messages) == 0)
        return cpa_fail(err, CPA_INVALID, "messages: found no message, expected at least one");
    json_array_foreach(messages, i, message) {
        if (json_is_string(json_object_get(message, "role"))) continue;
        return cpa_fail(err, CPA_INVALID, "messages: element %zu is no object with a text \"role\"", i);
    }
    return CPA_OK;
}

static cpa_status check_tools(const json_t *tools, cpa_error *err) {
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) {
        if (!json_is_object(tool)) return cpa_fail(err, CPA_INVALID, "tools: element %zu is no object", i);
    }
    return CPA_OK;
}

/* Adds the text of the chat. */
static cpa_status render(const cpa_prompt_source *source, const cpa_llm_prompt *prompt, cpa_bytes *out,
                         cpa_error *err) {
    json_t *messages = NULL, *tools = NULL, *kwargs = NULL;
    cpa_status status = read_json("messages", prompt->messages, JSON_ARRAY, &messages, err);
    if (status == CPA_OK) status = check_messages(messages, err);
    if (status == CPA_OK) status = read_json("tools", prompt->tools, JSON_ARRAY, &tools, err);
    if (status == CPA_OK) status = check_tools(tools, err);
    if (status == CPA_OK) status = read_json("template_kwargs", prompt->template_kwargs, JSON_OBJECT, &kwargs, err);
    if (status == CPA_OK) {
        const cpa_chat chat = {.messages = messages,
                               .tools = json_array_size(tools) > 0 ? tools : NULL,
                               .kwargs = kwargs,
                               .add_generation_prompt = !prompt->continues_last,
                               .continues_last = prompt->continues_last,
                               .now = time(NULL)};
        status = cpa_chat_template_render(source->chat, &chat, out, err);
    }
    json_decref(messages);
    json_decref(tools);
    json_decref(kwargs);
    return status;
}

static cpa_status encode_chat(const cpa_prompt_source *source, const cpa_llm_prompt *prompt, cpa_token_list *out,
                              cpa_error *err) {
    cpa_bytes text = {.count = 0};
    if (!source->chat) return cpa_fail(err, CPA_UNSUPPORTED, "messages: there is no chat: %s", source->why);
    cpa_status status = render(source, prompt, &text, err);
    if (status == CPA_OK) /* a template spells special tokens out */
        status = cpa_tokenizer_encode(source->tokenizer, text.data ? text.data : "", (size_t)text.count, 0, out, err);
    cpa_bytes_release(&text);
    return status;
}

/* ---- texts and ids ---- */

static cpa_status encode_text(const cpa_prompt_source *source, const cpa_llm_prompt *prompt, cpa_token_list *out,
                              cpa_error *err) {
    if (!source->tokenizer) return cpa_fail(err, CPA_UNSUPPORTED, "prompt: there is no text: %s", source->why);
    if (prompt->text_bytes < 0)
        return cpa_fail(err, CPA_INVALID, "prompt: found %" PRId64 " bytes of text", prompt->text_bytes);
    return cpa_tokenizer_encode(source->tokenizer, prompt->text, (size_t)prompt->text_bytes, 1, out, err);
}

static cpa_status copy_ids(const cpa_llm_prompt *prompt, cpa_token_list *out, cpa_error *err) {
    for (int64_t i = 0; i < prompt->n_ids; i++) {
        if (!cpa_token_list_add(out, prompt->ids[i])) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a prompt");
    }
    return CPA_OK;
}

static cpa_status check_ids(const cpa_token_list *ids, int64_t vocabulary, cpa_error *err) {
    if (ids->count == 0) return cpa_fail(err, CPA_INVALID, "prompt: found no token, expected at least one");
    for (int64_t i = 0; i < ids->count; i++) {
        if (ids->ids[i] < vocabulary) continue;
        return cpa_fail(err, CPA_INVALID,
                        "prompt: found token %" PRIu32 ", expected ids from 0 to %" PRId64 ", those of the model",
                        ids->ids[i], vocabulary - 1);
    }
    return CPA_OK;
}

cpa_status cpa_prompt_ids_of(const cpa_prompt_source *source, const cpa_llm_prompt *prompt, cpa_token_list *out,
                             cpa_error *err) {
    cpa_token_list ids = {.count = 0};
    cpa_status status = CPA_OK;
    const int n = (prompt->ids != NULL) + (prompt->text != NULL) + (prompt->messages != NULL);
    if (n != 1) return cpa_fail(err, CPA_INVALID, "prompt: found %d of ids, text and messages, expected one", n);
    if (!prompt->messages && (prompt->tools || prompt->template_kwargs || prompt->continues_last))
        return cpa_fail(err, CPA_INVALID, "prompt: found %s without messages, which alone have a template",
                        prompt->tools             ? "tools"
                        : prompt->template_kwargs ? "template_kwargs"
                                                  : "continues_last");
    if (prompt->messages)
        status = encode_chat(source, prompt, &ids, err);
    else if (prompt->text)
        status = encode_text(source, prompt, &ids, err);
    else
        status = copy_ids(prompt, &ids, err);
    if (status == CPA_OK) status = check_ids(&ids, source->vocabulary, err);
    if (status == CPA_OK)
        *out = ids;
    else
        cpa_token_list_release(&ids);
    return status;
}
