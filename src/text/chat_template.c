#include "src/text/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

struct cpa_chat_template {
    const char *name;
};

static const cpa_chat_template chatml = {"chatml"};

cpa_status cpa_chat_template_open(const char *folder, const char *name, cpa_chat_template **out, cpa_error *err) {
    (void)folder;
    if (name && strcmp(name, chatml.name) != 0)
        return cpa_fail(err, CPA_UNSUPPORTED, "found chat template '%s', expected %s", name, chatml.name);
    cpa_chat_template *chat = NULL;
    if (name) {
        chat = malloc(sizeof *chat);
        if (!chat) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a chat template");
        *chat = chatml;
    }
    *out = chat;
    return CPA_OK;
}

void cpa_chat_template_close(cpa_chat_template *chat) {
    free(chat);
}

const char *cpa_chat_template_name(const cpa_chat_template *chat) {
    return chat->name;
}

/* <|im_start|>ROLE, a new line, the content, <|im_end|>, a new line. */
cpa_status cpa_chat_template_render(const cpa_chat_template *chat, const cpa_chat_message *messages, size_t n,
                                    int add_generation_prompt, char **text, cpa_error *err) {
    static const char begin[] = "<|im_start|>", end[] = "<|im_end|>\n", answer[] = "<|im_start|>assistant\n";
    size_t bytes = sizeof answer;
    (void)chat;
    for (size_t i = 0; i < n; i++)
        bytes += sizeof begin + sizeof end + strlen(messages[i].role) + strlen(messages[i].content);
    char *out = malloc(bytes), *at = out;
    if (!out) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the text of %zu messages", n);
    *at = 0;
    for (size_t i = 0; i < n; i++) {
        at = stpcpy(stpcpy(at, begin), messages[i].role);
        at = stpcpy(stpcpy(stpcpy(at, "\n"), messages[i].content), end);
    }
    if (add_generation_prompt) stpcpy(at, answer);
    *text = out;
    return CPA_OK;
}
