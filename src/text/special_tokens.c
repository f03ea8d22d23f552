#include "src/text/special_tokens.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

/* What every tokenizer may have; others end in "_token" too. */
static const char *const standard[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                       "pad_token", "cls_token", "mask_token"};

/* What the classes of tokenizers have where their files are silent. */
static const struct {
    const char *class_begins, *name, *text;
} defaults[] = {
    {"LlamaTokenizer", "bos_token", "<s>"},           {"LlamaTokenizer", "eos_token", "</s>"},
    {"LlamaTokenizer", "unk_token", "<unk>"},         {"CodeLlamaTokenizer", "bos_token", "<s>"},
    {"CodeLlamaTokenizer", "eos_token", "</s>"},      {"CodeLlamaTokenizer", "unk_token", "<unk>"},
    {"GemmaTokenizer", "bos_token", "<bos>"},         {"GemmaTokenizer", "eos_token", "<eos>"},
    {"GemmaTokenizer", "unk_token", "<unk>"},         {"GemmaTokenizer", "pad_token", "<pad>"},
    {"GemmaTokenizer", "mask_token", "<mask>"},       {"Qwen2Tokenizer", "eos_token", "<|endoftext|>"},
    {"Qwen2Tokenizer", "unk_token", "<|endoftext|>"}, {"Qwen2Tokenizer", "pad_token", "<|endoftext|>"},
};

static int is_standard(const char *key) {
    for (size_t i = 0; i < sizeof standard / sizeof *standard; i++) {
        if (strcmp(key, standard[i]) == 0) return 1;
    }
    return 0;
}

static int is_token_name(const char *key) {
    static const char end[] = "_token";
    const size_t n = strlen(key);
    return n >= sizeof end - 1 && strcmp(key + n - (sizeof end - 1), end) == 0;
}

/* Those of a file's object: texts, or objects with their content. One that is null is none. */
static cpa_status take(const cpa_json *file, json_t *tokens, cpa_error *err) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)file->object, key, value) {
        json_t *text = json_is_object(value) ? json_object_get(value, "content") : value;
        if (!is_token_name(key)) continue;
        if (json_is_string(text)) {
            if (json_object_set(tokens, key, text) != 0)
                return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for a token", file->path);
        } else if (json_is_null(value)) {
            json_object_del(tokens, key);
        } else if (is_standard(key)) {
            return cpa_json_refuse(file, key, "a token", err);
        }
    }
    return CPA_OK;
}

static void take_defaults(const cpa_json *config, json_t *tokens) {
    const char *class_name = json_string_value(json_object_get(config->object, "tokenizer_class"));
    for (size_t i = 0; class_name && i < sizeof defaults / sizeof *defaults; i++) {
        if (strncmp(class_name, defaults[i].class_begins, strlen(defaults[i].class_begins)) == 0)
            json_object_set_new(tokens, defaults[i].name, json_string(defaults[i].text));
    }
}

/* Configurations that do not list all added tokens are of before 2024: special tokens lie in a file of their own. */
static cpa_status take_map(const char *folder, const cpa_json *config, json_t *tokens, cpa_error *err) {
    char path[PATH_MAX];
    json_t *object = NULL;
    if (json_object_get(config->object, "added_tokens_decoder")) return CPA_OK;
    if (snprintf(path, sizeof path, "%s/special_tokens_map.json", folder) >= (int)sizeof path) return CPA_OK;
    if (access(path, F_OK) != 0) return CPA_OK;
    CPA_TRY(cpa_json_load(path, &object, err));
    const cpa_json map = {.path = path, .prefix = "", .object = object};
    const cpa_status status = take(&map, tokens, err);
    json_decref(object);
    return status;
}

cpa_status cpa_special_tokens_read(const char *folder, const cpa_json *config, json_t **out, cpa_error *err) {
    json_t *tokens = json_object();
    if (!tokens) return cpa_fail(err, CPA_NO_MEMORY, "%s: no memory for its tokens", folder);
    take_defaults(config, tokens);
    cpa_status status = take(config, tokens, err);
    if (status == CPA_OK) status = take_map(folder, config, tokens, err);
    if (status == CPA_OK) {
        *out = tokens;
    } else {
        json_decref(tokens);
    }
    return status;
}
