#include "launcher/generate/prompt_text.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "launcher/generate/text_argument.h"
#include "launcher/settings/settings_table.h"
#include "src/text/chat_template.h"

static int add_message(json_t *messages, const char *role, const char *content) {
    return json_array_append_new(messages, json_pack("{s:s, s:s}", "role", role, "content", content)) == 0;
}

/* The messages of a chat; NULL with the failure in *err. */
static json_t *make_messages(const cpa_settings *settings, const char *prompt, cpa_error *err) {
    char *system = NULL;
    if (cpa_settings_given(settings, "system") &&
        cpa_text_argument_read("--system", settings->system, &system, err) != CPA_OK)
        return NULL;
    json_t *messages = json_array();
    const int is_made =
        messages && (!system || add_message(messages, "system", system)) && add_message(messages, "user", prompt);
    free(system);
    if (is_made) return messages;
    json_decref(messages);
    cpa_fail(err, CPA_INVALID, "--chat: the messages are no UTF-8, or there is no memory for them");
    return NULL;
}

/* The text of a chat in place of the prompt. */
static cpa_status render(const cpa_settings *settings, const char *prompt, cpa_bytes *out, cpa_error *err) {
    cpa_chat_template *template = NULL;
    const char *name = settings->chat_template;
    CPA_TRY(cpa_chat_template_open(settings->model_dir, name[0] ? name : NULL, &template, err));
    if (!template)
        return cpa_fail(err, CPA_INVALID, "--chat: found no chat template in %s, expected one, or --chat-template",
                        settings->model_dir);
    json_t *messages = make_messages(settings, prompt, err);
    cpa_status status = messages ? CPA_OK : CPA_INVALID;
    if (messages) {
        const cpa_chat chat = {.messages = messages, .add_generation_prompt = 1, .now = time(NULL)};
        status = cpa_chat_template_render(template, &chat, out, err);
    }
    json_decref(messages);
    cpa_chat_template_close(template);
    return status;
}

/* The text as it goes through the tokenizer. */
static cpa_status read_text(const cpa_settings *settings, cpa_bytes *out, cpa_error *err) {
    char *text = NULL;
    CPA_TRY(cpa_text_argument_read("--prompt", settings->prompt ? settings->prompt : "", &text, err));
    cpa_status status = CPA_OK;
    if (settings->chat) {
        status = render(settings, text, out, err);
    } else if (!cpa_bytes_add(out, text, strlen(text))) {
        status = cpa_fail(err, CPA_NO_MEMORY, "--prompt: no memory for it");
    }
    free(text);
    return status;
}

static cpa_status check_ids(const cpa_token_list *ids, int64_t vocabulary, cpa_error *err) {
    if (ids->count == 0) return cpa_fail(err, CPA_INVALID, "--prompt: found no token, expected at least one");
    for (int64_t i = 0; i < ids->count; i++) {
        if (ids->ids[i] < vocabulary) continue;
        return cpa_fail(err, CPA_INVALID,
                        "--prompt: the tokenizer gave id %" PRIu32 ", expected ids from 0 to %" PRId64
                        ", those of the model",
                        ids->ids[i], vocabulary - 1);
    }
    return CPA_OK;
}

cpa_status cpa_prompt_text_read(const cpa_settings *settings, const cpa_tokenizer *tokenizer, int64_t vocabulary,
                                cpa_ids *out, cpa_error *err) {
    cpa_bytes text = {.count = 0};
    cpa_token_list ids = {.count = 0};
    cpa_error why = {CPA_OK, ""};
    cpa_status status = read_text(settings, &text, err);
    if (status == CPA_OK) {
        const int add_special = !settings->chat; /* a template spells them out */
        status =
            cpa_tokenizer_encode(tokenizer, text.data ? text.data : "", (size_t)text.count, add_special, &ids, &why);
        if (status != CPA_OK) cpa_fail(err, status, "--prompt: %.480s", why.message);
    }
    cpa_bytes_release(&text);
    if (status == CPA_OK) status = check_ids(&ids, vocabulary, err);
    if (status == CPA_OK) {
        *out = (cpa_ids){ids.ids, ids.count};
    } else {
        free(ids.ids);
    }
    return status;
}
