#include "src/text/chat_template.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "src/text/chat_family.h"
#include "src/text/jinja.h"
#include "src/text/special_tokens.h"

struct cpa_chat_template {
    json_t *tokens;                /* special tokens of the folder, by name */
    const cpa_chat_family *family; /* NULL: `jinja` renders */
    cpa_jinja *jinja;
    char *path; /* file of Jinja's template */
    cpa_bytes source;
};

/* ---- Its files ---- */

/* All of a file, as the value of a key; nothing happens if there is none. */
static cpa_status add_file(const char *path, const char *key, json_t *templates, cpa_error *err) {
    const char *why = NULL;
    cpa_bytes bytes = {.count = 0};
    char part[4096];
    size_t n;
    if (access(path, F_OK) != 0) return CPA_OK;
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, cpa_file_failure(CPA_IO), "%s: %s", path, why);
    int ok = 1;
    while (ok && (n = fread(part, 1, sizeof part, file)) > 0) ok = cpa_bytes_add(&bytes, part, n);
    const int lost = ferror(file);
    fclose(file);
    json_t *text = ok && !lost ? json_stringn(bytes.data ? bytes.data : "", (size_t)bytes.count) : NULL;
    cpa_bytes_release(&bytes);
    if (text && json_object_set_new(templates, key, text) == 0) return CPA_OK;
    if (lost) return cpa_fail(err, CPA_IO, "%s: could not be read", path);
    return ok ? cpa_fail(err, CPA_INVALID, "%s: found text that is not UTF-8, expected a template", path)
              : cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for it", path);
}

/* "chat_template": a text, or a list of named ones. */
static cpa_status add_configured(const cpa_json *config, json_t *templates, cpa_error *err) {
    json_t *value = (json_t *)(uintptr_t)cpa_json_get(config, "chat_template");
    if (!value) return CPA_OK;
    if (json_is_string(value)) json_object_set(templates, "default", value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *entry = json_array_get(value, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        json_t *text = json_object_get(entry, "template");
        if (name && json_is_string(text)) json_object_set(templates, name, text);
    }
    if (json_object_get(templates, "default")) return CPA_OK;
    return cpa_json_refuse(config, "chat_template", "a template, or a list with one named default", err);
}

/* The templates of a folder, by name, and where they are from. As with transformers, files go before the configuration. */
static cpa_status find(const char *folder, const cpa_json *config, json_t *templates, char *path, cpa_error *err) {
    char tools[PATH_MAX];
    if (snprintf(path, PATH_MAX, "%s/chat_template.jinja", folder) >= PATH_MAX ||
        snprintf(tools, sizeof tools, "%s/additional_chat_templates/tool_use.jinja", folder) >= (int)sizeof tools)
        return cpa_fail(err, CPA_INVALID, "%.80s...: the path is too long", folder);
    CPA_TRY(add_file(path, "default", templates, err));
    if (json_object_size(templates) > 0) return add_file(tools, "tool_use", templates, err);
    snprintf(path, PATH_MAX, "%s", config->path);
    return config->object ? add_configured(config, templates, err) : CPA_OK;
}

/* ---- Which it is ---- */

static const cpa_chat_family *family_of(const char *name) {
    const cpa_chat_family *family = cpa_chat_families;
    while (family->name && strcmp(family->name, name) != 0) family++;
    return family->name ? family : NULL;
}

static cpa_status refuse_name(const char *name, cpa_error *err) {
    cpa_fail(err, CPA_UNSUPPORTED, "chat template: found '%.40s', expected a file or one of", name);
    for (const cpa_chat_family *family = cpa_chat_families; err && family->name; family++) {
        const size_t n = strlen(err->message);
        snprintf(err->message + n, sizeof err->message - n, "%s%s", family == cpa_chat_families ? " " : ", ",
                 family->name);
    }
    return CPA_UNSUPPORTED;
}

static cpa_status open_jinja(const json_t *templates, const char *path, cpa_chat_template *chat, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    chat->path = strdup(path);
    int ok = chat->path != NULL;
    const char *name;
    json_t *text;
    json_object_foreach((json_t *)(uintptr_t)templates, name, text) {
        ok = ok && cpa_bytes_add(&chat->source, json_string_value(text), json_string_length(text));
    }
    if (!ok || !cpa_bytes_add(&chat->source, "", 1))
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a template", path);
    const cpa_status status = cpa_jinja_open(templates, chat->tokens, &CPA_JINJA_LIMITS, &chat->jinja, &why);
    if (status == CPA_OK) return status;
    return cpa_fail(err, status == CPA_INVALID ? CPA_UNSUPPORTED : status, "%.200s: chat_template: %.300s", path,
                    why.message);
}

static cpa_status choose(const char *folder, const char *name, const cpa_json *config, json_t *templates,
                         cpa_chat_template *chat, cpa_error *err) {
    char path[PATH_MAX];
    if (name) {
        chat->family = family_of(name);
        if (chat->family) return CPA_OK;
        snprintf(path, sizeof path, "%s", name);
        CPA_TRY(add_file(path, "default", templates, err));
        if (json_object_size(templates) == 0) return refuse_name(name, err);
    } else {
        CPA_TRY(find(folder, config, templates, path, err));
    }
    return json_object_size(templates) > 0 ? open_jinja(templates, path, chat, err) : CPA_OK;
}

static cpa_status open_template(const char *folder, const char *name, cpa_chat_template *chat, cpa_error *err) {
    char config_path[PATH_MAX];
    json_t *object = NULL, *templates = json_object();
    cpa_status status = CPA_OK;
    if (snprintf(config_path, sizeof config_path, "%s/tokenizer_config.json", folder) >= (int)sizeof config_path)
        status = cpa_fail(err, CPA_INVALID, "%.80s...: the path is too long", folder);
    if (status == CPA_OK && access(config_path, F_OK) == 0) status = cpa_json_load(config_path, &object, err);
    const cpa_json config = {.path = config_path, .prefix = "", .object = object};
    if (status == CPA_OK) status = cpa_special_tokens_read(folder, &config, &chat->tokens, err);
    if (status == CPA_OK) status = choose(folder, name, &config, templates, chat, err);
    json_decref(object);
    json_decref(templates);
    return status;
}

cpa_status cpa_chat_template_open(const char *folder, const char *name, cpa_chat_template **out, cpa_error *err) {
    cpa_chat_template *chat = calloc(1, sizeof *chat);
    if (!chat) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a template", folder);
    const cpa_status status = open_template(folder, name, chat, err);
    if (status != CPA_OK || (!chat->family && !chat->jinja)) {
        cpa_chat_template_close(chat);
        chat = NULL;
    }
    if (status == CPA_OK) *out = chat;
    return status;
}

void cpa_chat_template_close(cpa_chat_template *chat) {
    if (!chat) return;
    json_decref(chat->tokens);
    cpa_jinja_close(chat->jinja);
    free(chat->path);
    cpa_bytes_release(&chat->source);
    free(chat);
}

const char *cpa_chat_template_name(const cpa_chat_template *chat) {
    if (chat->family) return chat->family->name;
    const char *slash = strrchr(chat->path, '/');
    return slash ? slash + 1 : chat->path;
}

const char *cpa_chat_template_source(const cpa_chat_template *chat) {
    return chat->source.data ? chat->source.data : "";
}

int cpa_chat_template_is_slow(const cpa_chat_template *chat) {
    return chat->jinja != NULL;
}

/* ---- A chat ---- */

/* Lends a value, which may be NULL, to an object that is packed. */
static json_t *lend(const json_t *value) {
    return value ? json_incref((json_t *)(uintptr_t)value) : json_null();
}

static cpa_status render_by_jinja(const cpa_chat_template *chat, const cpa_chat *what, cpa_bytes *out, cpa_error *err) {
    cpa_error why = {CPA_OK, ""};
    json_t *object = json_pack("{s:o,s:o,s:o,s:o,s:b,s:b,s:I}", "messages", lend(what->messages), "tools",
                               lend(what->tools), "documents", lend(what->documents), "kwargs", lend(what->kwargs),
                               "add_generation_prompt", what->add_generation_prompt, "continue_final_message",
                               what->continues_last, "now", (json_int_t)what->now);
    if (!object) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a chat");
    const cpa_status status = cpa_jinja_render(chat->jinja, object, out, &why);
    json_decref(object);
    return status == CPA_OK ? status : cpa_fail(err, status, "messages: the chat template: %.440s", why.message);
}

/* What a family's function does not know. */
static const char *beyond_text(const cpa_chat *what) {
    if (json_array_size(what->tools) > 0) return "tools";
    if (json_array_size(what->documents) > 0) return "documents";
    if (json_object_size(what->kwargs) > 0) return "chat_template_kwargs";
    if (what->continues_last) return "continue_final_message";
    for (size_t i = 0; i < json_array_size(what->messages); i++) {
        const json_t *message = json_array_get(what->messages, i);
        if (json_array_size(json_object_get(message, "tool_calls")) > 0) return "tool_calls";
        if (json_string_length(json_object_get(message, "reasoning_content")) > 0) return "reasoning_content";
        const json_t *content = json_object_get(message, "content");
        if (!json_is_string(content) && !json_is_array(content)) return "a message without a text";
    }
    return NULL;
}

/* Adds a text as a family takes it: strings of C. */
static int add_written(cpa_bytes *out, const json_t *text) {
    const char *at = json_string_value(text), *end = at + json_string_length(text);
    for (const char *nul; (nul = memchr(at, 0, (size_t)(end - at))); at = nul + 1) {
        if (!cpa_bytes_add(out, at, (size_t)(nul - at)) || !cpa_bytes_add(out, CPA_CHAT_NUL, 2)) return 0;
    }
    return cpa_bytes_add(out, at, (size_t)(end - at));
}

/* Makes of what a family has written what was meant. */
static void restore_nuls(cpa_bytes *text) {
    int64_t n = 0;
    for (int64_t i = 0; i < text->count; i++, n++) {
        const int is_nul = i + 1 < text->count && memcmp(text->data + i, CPA_CHAT_NUL, 2) == 0;
        text->data[n] = is_nul ? 0 : text->data[i];
        i += is_nul;
    }
    text->count = n;
}

/* The text of a message, which the caller frees; parts of it follow each other line by line. NULL without memory. */
static char *text_of(const json_t *content) {
    cpa_bytes text = {.count = 0};
    int ok = cpa_bytes_reserve(&text, 1);
    if (json_is_string(content)) ok = ok && add_written(&text, content);
    for (size_t i = 0; i < json_array_size(content); i++) {
        const json_t *part = json_object_get(json_array_get(content, i), "text");
        ok = ok && (i == 0 || cpa_bytes_add(&text, "\n", 1)) && add_written(&text, part);
    }
    if (ok && cpa_bytes_add(&text, "", 1)) return text.data;
    cpa_bytes_release(&text);
    return NULL;
}

static const char *token_of(const cpa_chat_template *chat, const char *name) {
    const char *text = json_string_value(json_object_get(chat->tokens, name));
    return text ? text : "";
}

static cpa_status render_by_family(const cpa_chat_template *chat, const cpa_chat *what, cpa_bytes *out,
                                   cpa_error *err) {
    const cpa_chat_family *family = chat->family;
    const cpa_chat_details details = {.bos = token_of(chat, "bos_token"),
                                      .eos = token_of(chat, "eos_token"),
                                      .default_system = family->default_system};
    const size_t n = json_array_size(what->messages);
    const char *beyond = beyond_text(what), *refusal = NULL;
    if (beyond)
        return cpa_fail(err, CPA_INVALID, "%s: the chat template %s, which was chosen by name, has texts alone", beyond,
                        family->name);
    cpa_chat_message *messages = calloc(n, sizeof *messages);
    int ok = messages != NULL;
    for (size_t i = 0; ok && i < n; i++) {
        const json_t *message = json_array_get(what->messages, i);
        messages[i].role = json_string_value(json_object_get(message, "role"));
        messages[i].content = text_of(json_object_get(message, "content"));
        ok = messages[i].content != NULL;
    }
    ok = ok && family->write(&details, messages, n, what->add_generation_prompt, out, &refusal);
    for (size_t i = 0; messages && i < n; i++) free((void *)(uintptr_t)messages[i].content);
    free(messages);
    if (!ok) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a chat of %zu messages", n);
    restore_nuls(out);
    if (!refusal) return CPA_OK;
    return cpa_fail(err, CPA_INVALID, "messages: %s (chat template %s)", refusal, family->name);
}

cpa_status cpa_chat_template_render(const cpa_chat_template *chat, const cpa_chat *what, cpa_bytes *out,
                                    cpa_error *err) {
    if (json_array_size(what->messages) == 0)
        return cpa_fail(err, CPA_INVALID, "messages: found none, expected at least one");
    return chat->jinja ? render_by_jinja(chat, what, out, err) : render_by_family(chat, what, out, err);
}
