#include "src/text/chat_template.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/file.h"
#include "src/text/chat_family.h"
#include "src/text/jinja_form.h"
#include "src/text/json_part.h"
#include "src/text/utf8.h"

struct cpa_chat_template {
    const cpa_chat_family *family;
    cpa_chat_details details;
    char *bos, *eos, *default_system; /* which the details point to */
};

/* ---- Which it is ---- */

/* The default system message in the form of a template. CPA_UNSUPPORTED if it is put together from parts. */
static cpa_status default_system(const char *form, char **out) {
    static const char before[] = "'<|im_start|>system\\n", after[] = "<|im_end|>";
    const char *at = strstr(form, before), *end;
    while (at && strncmp(at + strlen(before), "You are", 7) != 0) at = strstr(at + 1, before);
    if (!at || !(end = strstr(at, after))) return CPA_UNSUPPORTED;
    at += strlen(before);
    char *text = malloc((size_t)(end - at) + 1), *to = text;
    if (!text) return CPA_NO_MEMORY;
    for (; at < end && *at != '\''; at++) {
        const int escaped = *at == '\\' && at + 1 < end;
        at += escaped;
        *to++ = (char)(escaped && *at == 'n' ? '\n' : *at);
    }
    *to = 0;
    *out = text;
    return at == end ? CPA_OK : CPA_UNSUPPORTED;
}

static int fits(const cpa_chat_family *family, const char *form) {
    for (int i = 0; i < 4 && family->has[i]; i++) {
        if (!strstr(form, family->has[i])) return 0;
    }
    for (int i = 0; i < 4 && family->has_not[i]; i++) {
        if (strstr(form, family->has_not[i])) return 0;
    }
    return 1;
}

/* The family whose template this is, and its details. */
static cpa_status recognise(const char *path, const char *source, cpa_chat_template *out, cpa_error *err) {
    cpa_bytes form = {.count = 0};
    const cpa_chat_family *family = cpa_chat_families;
    cpa_status status = CPA_OK;
    if (!cpa_jinja_form(source, &form)) {
        cpa_bytes_release(&form);
        return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a template", path);
    }
    while (family->name && !fits(family, form.data)) family++;
    out->family = family;
    out->details.starts_with_bos = strstr(form.data, "{{bos_token}}") != NULL;
    out->details.always_asks = strstr(form.data, "add_generation_prompt") == NULL;
    out->details.uses_today = strstr(form.data, "strftime_now(") != NULL;
    out->details.skips_empty_system = strstr(form.data, "=='system'andmessage['content']") != NULL;
    if (!family->name) status = CPA_UNSUPPORTED;
    if (family->name && family->details.default_system) status = default_system(form.data, &out->default_system);
    out->details.default_system = out->default_system;
    cpa_bytes_release(&form);
    if (status == CPA_NO_MEMORY) return cpa_fail(err, status, "%s: no memory for a template", path);
    if (status != CPA_OK)
        return cpa_fail(err, status, "%s: chat_template: found one that is not known, expected one of", path);
    return CPA_OK;
}

/* The names that there are, behind a message. */
static void add_names(cpa_error *err) {
    if (!err) return;
    for (const cpa_chat_family *family = cpa_chat_families; family->name; family++) {
        const size_t n = strlen(err->message);
        snprintf(err->message + n, sizeof err->message - n, "%s%s", family == cpa_chat_families ? " " : ", ",
                 family->name);
    }
}

static cpa_status choose(const char *name, cpa_chat_template *out, cpa_error *err) {
    const cpa_chat_family *family = cpa_chat_families;
    while (family->name && strcmp(family->name, name) != 0) family++;
    if (!family->name) {
        cpa_fail(err, CPA_UNSUPPORTED, "chat template: found '%.40s', expected one of", name);
        add_names(err);
        return CPA_UNSUPPORTED;
    }
    out->family = family;
    out->details = family->details;
    return CPA_OK;
}

/* ---- Its files ---- */

/* A token of tokenizer_config.json: a text, or an object with its content; "" if there is none. */
static cpa_status read_token(const cpa_json *config, const char *key, char **out, cpa_error *err) {
    const json_t *value = cpa_json_get(config, key);
    const json_t *text = json_is_object(value) ? json_object_get(value, "content") : value;
    if (text && !json_is_string(text)) return cpa_json_refuse(config, key, "a token", err);
    *out = strdup(text ? json_string_value(text) : "");
    return *out ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a token", config->path);
}

/* "chat_template": a text, or a list of named ones, of which "default" is taken; NULL if there is none. */
static cpa_status template_of(const cpa_json *config, const char **out, cpa_error *err) {
    const json_t *value = cpa_json_get(config, "chat_template");
    *out = json_string_value(value);
    if (!value || *out) return CPA_OK;
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *entry = json_array_get(value, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0) *out = json_string_value(json_object_get(entry, "template"));
    }
    return *out ? CPA_OK
                : cpa_json_refuse(config, "chat_template", "a template, or a list with one named default", err);
}

/* All of a file; *out is NULL if there is none. */
static cpa_status read_file(const char *path, char **out, cpa_error *err) {
    const char *why = NULL;
    cpa_bytes bytes = {.count = 0};
    char part[4096];
    size_t n;
    *out = NULL;
    if (access(path, F_OK) != 0) return CPA_OK;
    FILE *file = cpa_file_open(path, &why);
    if (!file) return cpa_fail(err, CPA_IO, "%s: %s", path, why);
    int ok = 1;
    while (ok && (n = fread(part, 1, sizeof part, file)) > 0) ok = cpa_bytes_add(&bytes, part, n);
    const int lost = ferror(file);
    fclose(file);
    if (lost || !ok || !cpa_bytes_add(&bytes, "", 1)) {
        cpa_bytes_release(&bytes);
        return lost ? cpa_fail(err, CPA_IO, "%s: could not be read", path)
                    : cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for it", path);
    }
    *out = bytes.data;
    return CPA_OK;
}

/* By the folder's own files. */
static cpa_status find(const char *jinja_path, const cpa_json *config, cpa_chat_template *out, cpa_error *err) {
    char *jinja = NULL;
    const char *source = NULL, *path = jinja_path;
    CPA_TRY(read_file(jinja_path, &jinja, err));
    source = jinja;
    cpa_status status = CPA_OK;
    if (!source && config->object) {
        path = config->path;
        status = template_of(config, &source, err);
    }
    if (status == CPA_OK && source) status = recognise(path, source, out, err);
    if (status == CPA_UNSUPPORTED) add_names(err);
    free(jinja);
    return status;
}

static cpa_status open_template(const char *folder, const char *name, cpa_chat_template *chat, cpa_error *err) {
    char jinja_path[PATH_MAX], config_path[PATH_MAX];
    cpa_json config = {.path = config_path, .prefix = ""};
    json_t *object = NULL;
    const int a = snprintf(jinja_path, sizeof jinja_path, "%s/chat_template.jinja", folder);
    const int b = snprintf(config_path, sizeof config_path, "%s/tokenizer_config.json", folder);
    if (a >= (int)sizeof jinja_path || b >= (int)sizeof config_path)
        return cpa_fail(err, CPA_INVALID, "%.80s...: the path is too long", folder);
    if (access(config_path, F_OK) == 0) CPA_TRY(cpa_json_load(config_path, &object, err));
    config.object = object;
    cpa_status status = name ? choose(name, chat, err) : find(jinja_path, &config, chat, err);
    if (status == CPA_OK && chat->family) status = read_token(&config, "bos_token", &chat->bos, err);
    if (status == CPA_OK && chat->family) status = read_token(&config, "eos_token", &chat->eos, err);
    json_decref(object);
    chat->details.bos = chat->bos;
    chat->details.eos = chat->eos;
    return status;
}

cpa_status cpa_chat_template_open(const char *folder, const char *name, cpa_chat_template **out, cpa_error *err) {
    cpa_chat_template *chat = calloc(1, sizeof *chat);
    if (!chat) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a template", folder);
    cpa_status status = open_template(folder, name, chat, err);
    if (status != CPA_OK || !chat->family) {
        cpa_chat_template_close(chat);
        chat = NULL;
    }
    if (status == CPA_OK) *out = chat;
    return status;
}

void cpa_chat_template_close(cpa_chat_template *chat) {
    if (!chat) return;
    free(chat->bos);
    free(chat->eos);
    free(chat->default_system);
    free(chat);
}

const char *cpa_chat_template_name(const cpa_chat_template *chat) {
    return chat->family->name;
}

cpa_status cpa_chat_template_render(const cpa_chat_template *chat, const cpa_chat_message *messages, size_t n,
                                    int add_generation_prompt, char **text, cpa_error *err) {
    cpa_bytes out = {.count = 0};
    const char *refusal = NULL;
    if (n == 0) return cpa_fail(err, CPA_INVALID, "messages: found none, expected at least one");
    for (size_t i = 0; i < n; i++) {
        const size_t bytes = strlen(messages[i].content);
        if (cpa_utf8_valid(messages[i].content, bytes) < bytes)
            return cpa_fail(err, CPA_INVALID, "messages[%zu].content: the text is not UTF-8", i);
    }
    const int ok = chat->family->write(&chat->details, messages, n, add_generation_prompt, &out, &refusal) &&
                   cpa_bytes_add(&out, "", 1);
    if (ok && !refusal) {
        *text = out.data;
        return CPA_OK;
    }
    cpa_bytes_release(&out);
    if (!refusal) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a chat of %zu messages", n);
    return cpa_fail(err, CPA_INVALID, "messages: %s (chat template %s)", refusal, chat->family->name);
}
