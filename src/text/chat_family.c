#include "src/text/chat_family.h"

#include <string.h>

#include "src/text/utf8.h"

typedef struct writer {
    cpa_bytes *out;
    int ok;
} writer;

static void put_bytes(writer *w, const char *text, size_t n) {
    w->ok = w->ok && cpa_bytes_add(w->out, text, n);
}

static void put(writer *w, const char *text) {
    put_bytes(w, text, strlen(text));
}

static void put3(writer *w, const char *before, const char *text, const char *after) {
    put(w, before);
    put(w, text);
    put(w, after);
}

/* What Python's str.strip() takes away. */
static int is_stripped(const char *at) {
    const uint32_t code = cpa_utf8_code(at);
    return cpa_utf8_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

static void put_stripped(writer *w, const char *text) {
    size_t end = strlen(text);
    while (*text && is_stripped(text)) {
        const size_t n = cpa_utf8_length(*text);
        text += n, end -= n;
    }
    while (end > 0 && is_stripped(text + cpa_utf8_back(text, end))) end = cpa_utf8_back(text, end);
    put_bytes(w, text, end);
}

static int is_role(const cpa_chat_message *message, const char *role) {
    return strcmp(message->role, role) == 0;
}

/* Users and assistants by turns, beginning with a user. */
static int are_in_turns(const cpa_chat_message *messages, size_t n, const char **refusal) {
    for (size_t i = 0; i < n; i++) {
        if (is_role(&messages[i], i % 2 == 0 ? "user" : "assistant")) continue;
        *refusal = is_role(&messages[i], "system")
                       ? "found a system message where the template takes none"
                       : "found roles that do not alternate, expected user, assistant, user, ...";
        return 0;
    }
    return 1;
}

static int are_known(const cpa_chat_message *messages, size_t n, const char **refusal) {
    for (size_t i = 0; i < n; i++) {
        if (is_role(&messages[i], "system") || is_role(&messages[i], "user") || is_role(&messages[i], "assistant"))
            continue;
        *refusal = "found a role that is none of system, user and assistant";
        return 0;
    }
    return 1;
}

/* ---- ChatML, Qwen ---- */

static void put_chatml(writer *w, const char *role, const char *content) {
    put3(w, "<|im_start|>", role, "\n");
    put3(w, content, "<|im_end|>", "\n");
}

static int write_chatml(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                        const char **refusal) {
    writer w = {out, 1};
    if (!are_known(messages, n, refusal)) return 1;
    if (d->default_system && !is_role(&messages[0], "system")) put_chatml(&w, "system", d->default_system);
    for (size_t i = 0; i < n; i++) put_chatml(&w, messages[i].role, messages[i].content);
    if (ask) put(&w, "<|im_start|>assistant\n");
    return w.ok;
}

/* An answer of Qwen 3: its thoughts are kept only behind the last question. */
static void put_qwen3_answer(writer *w, const char *content, int is_behind, int is_last) {
    static const char open[] = "<think>", close[] = "</think>";
    const char *thoughts = "", *thoughts_end = thoughts, *found = strstr(content, close);
    if (found) {
        const char *next;
        thoughts = content, thoughts_end = found;
        while (thoughts_end > thoughts && thoughts_end[-1] == '\n') thoughts_end--;
        while ((next = strstr(thoughts, open)) && next < thoughts_end) thoughts = next + strlen(open);
        while ((next = strstr(found, close))) found = next + strlen(close);
        content = found + strspn(found, "\n");
        while (thoughts < thoughts_end && *thoughts == '\n') thoughts++;
    }
    put(w, "<|im_start|>assistant\n");
    if (is_behind && (is_last || thoughts < thoughts_end)) {
        put(w, "<think>\n");
        put_bytes(w, thoughts, (size_t)(thoughts_end - thoughts));
        put(w, "\n</think>\n\n");
        content += strspn(content, "\n");
    }
    put3(w, content, "<|im_end|>", "\n");
}

static int is_tool_response(const char *content) {
    static const char open[] = "<tool_response>", close[] = "</tool_response>";
    const size_t n = strlen(content);
    return strncmp(content, open, strlen(open)) == 0 && n >= strlen(close) &&
           strcmp(content + n - strlen(close), close) == 0;
}

static int write_qwen3(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                       const char **refusal) {
    writer w = {out, 1};
    size_t last = n;
    (void)d;
    if (!are_known(messages, n, refusal)) return 1;
    while (last > 0 && !(is_role(&messages[last - 1], "user") && !is_tool_response(messages[last - 1].content))) last--;
    const size_t question = last > 0 ? last - 1 : n - 1;
    for (size_t i = 0; i < n; i++) {
        if (is_role(&messages[i], "assistant")) {
            put_qwen3_answer(&w, messages[i].content, i > question, i + 1 == n);
        } else {
            put_chatml(&w, messages[i].role, messages[i].content);
        }
    }
    if (ask) put(&w, "<|im_start|>assistant\n");
    return w.ok;
}

/* ---- Llama ---- */

static int write_llama2(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                        const char **refusal) {
    writer w = {out, 1};
    const int has_system = is_role(&messages[0], "system");
    (void)ask; /* nothing is between a question and its answer */
    if (!are_in_turns(messages + has_system, n - (size_t)has_system, refusal)) return 1;
    for (size_t i = (size_t)has_system; i < n; i++) {
        cpa_bytes content = {.count = 0};
        writer first = {&content, 1};
        if (is_role(&messages[i], "assistant")) {
            put(&w, " ");
            put_stripped(&w, messages[i].content);
            put3(&w, " ", d->eos, "");
            continue;
        }
        if (i == 1 && has_system) put3(&first, "<<SYS>>\n", messages[0].content, "\n<</SYS>>\n\n");
        put_bytes(&first, messages[i].content, strlen(messages[i].content) + 1);
        put3(&w, d->bos, "[INST] ", "");
        if (first.ok) put_stripped(&w, content.data);
        put(&w, " [/INST]");
        w.ok = w.ok && first.ok;
        cpa_bytes_release(&content);
    }
    return w.ok;
}

static void put_llama3(writer *w, const char *role, const char *content) {
    put3(w, "<|start_header_id|>", role, "<|end_header_id|>\n\n");
    put_stripped(w, content);
    put(w, "<|eot_id|>");
}

static int write_llama3(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                        const char **refusal) {
    writer w = {out, 1};
    if (!are_known(messages, n, refusal)) return 1;
    put(&w, d->bos);
    for (size_t i = 0; i < n; i++) put_llama3(&w, messages[i].role, messages[i].content);
    if (ask) put(&w, "<|start_header_id|>assistant<|end_header_id|>\n\n");
    return w.ok;
}

/* Which begins with dates; today's is the same every day. */
static int write_llama31(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                         const char **refusal) {
    writer w = {out, 1};
    const int has_system = is_role(&messages[0], "system");
    if (!are_known(messages, n, refusal)) return 1;
    put3(&w, d->bos, "<|start_header_id|>system<|end_header_id|>\n\n", "Cutting Knowledge Date: December 2023\n");
    put(&w, "Today Date: 26 Jul 2024\n\n");
    if (has_system) put_stripped(&w, messages[0].content);
    put(&w, "<|eot_id|>");
    for (size_t i = (size_t)has_system; i < n; i++) put_llama3(&w, messages[i].role, messages[i].content);
    if (ask) put(&w, "<|start_header_id|>assistant<|end_header_id|>\n\n");
    return w.ok;
}

/* ---- Mistral ---- */

static int write_mistral(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                         const char **refusal) {
    writer w = {out, 1};
    (void)ask;
    if (!are_in_turns(messages, n, refusal)) return 1;
    put(&w, d->bos);
    for (size_t i = 0; i < n; i++) {
        if (is_role(&messages[i], "user")) {
            put3(&w, "[INST] ", messages[i].content, " [/INST]");
        } else {
            put3(&w, messages[i].content, d->eos, "");
        }
    }
    return w.ok;
}

/* The later form, with a system message in front of the first question. */
static int write_mistral_system(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask,
                                cpa_bytes *out, const char **refusal) {
    writer w = {out, 1};
    const int has_system = is_role(&messages[0], "system");
    (void)ask;
    if (!are_in_turns(messages + has_system, n - (size_t)has_system, refusal)) return 1;
    put(&w, d->bos);
    for (size_t i = (size_t)has_system; i < n; i++) {
        if (is_role(&messages[i], "user")) {
            put(&w, " [INST] ");
            if (i == 1 && has_system) put3(&w, messages[0].content, "\n\n", "");
            put3(&w, messages[i].content, " [/INST]", "");
        } else {
            put3(&w, " ", messages[i].content, d->eos);
        }
    }
    return w.ok;
}

/* Of version 3 on: the system message goes in front of the last message, if that is a question. */
static int write_mistral_last(const char *question, const char *answer, int strips, const cpa_chat_details *d,
                              const cpa_chat_message *messages, size_t n, cpa_bytes *out, const char **refusal) {
    writer w = {out, 1};
    const int has_system = is_role(&messages[0], "system");
    if (!are_in_turns(messages + has_system, n - (size_t)has_system, refusal)) return 1;
    put(&w, d->bos);
    for (size_t i = (size_t)has_system; i < n; i++) {
        if (is_role(&messages[i], "user")) {
            put(&w, question);
            if (i + 1 == n && has_system) put3(&w, messages[0].content, "\n\n", "");
            put3(&w, messages[i].content, "[/INST]", "");
            continue;
        }
        put(&w, answer);
        strips ? put_stripped(&w, messages[i].content) : put(&w, messages[i].content);
        put(&w, d->eos);
    }
    return w.ok;
}

static int write_mistral_v3(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask,
                            cpa_bytes *out, const char **refusal) {
    (void)ask;
    return write_mistral_last("[INST] ", " ", 1, d, messages, n, out, refusal);
}

static int write_mistral_nemo(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask,
                              cpa_bytes *out, const char **refusal) {
    (void)ask;
    return write_mistral_last("[INST]", "", 0, d, messages, n, out, refusal);
}

/* ---- Others ---- */

static int write_gemma(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                       const char **refusal) {
    writer w = {out, 1};
    if (!are_in_turns(messages, n, refusal)) return 1;
    put(&w, d->bos);
    for (size_t i = 0; i < n; i++) {
        put3(&w, "<start_of_turn>", is_role(&messages[i], "user") ? "user" : "model", "\n");
        put_stripped(&w, messages[i].content);
        put(&w, "<end_of_turn>\n");
    }
    if (ask) put(&w, "<start_of_turn>model\n");
    return w.ok;
}

static int write_zephyr(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                        const char **refusal) {
    writer w = {out, 1};
    if (!are_known(messages, n, refusal)) return 1;
    for (size_t i = 0; i < n; i++) {
        put3(&w, "<|", messages[i].role, "|>\n");
        put3(&w, messages[i].content, d->eos, "\n");
    }
    if (ask) put(&w, "<|assistant|>\n");
    return w.ok;
}

static int write_phi3(const cpa_chat_details *d, const cpa_chat_message *messages, size_t n, int ask, cpa_bytes *out,
                      const char **refusal) {
    writer w = {out, 1};
    if (!are_known(messages, n, refusal)) return 1;
    for (size_t i = 0; i < n; i++) {
        put3(&w, "<|", messages[i].role, "|>\n");
        put3(&w, messages[i].content, "<|end|>\n", "");
    }
    put(&w, ask ? "<|assistant|>\n" : d->eos);
    return w.ok;
}

const cpa_chat_family cpa_chat_families[] = {
    {"qwen3", NULL, write_qwen3},
    {"qwen", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", write_chatml},
    {"qwen2", "You are a helpful assistant.", write_chatml},
    {"chatml", NULL, write_chatml},
    {"llama3.1", NULL, write_llama31},
    {"llama3", NULL, write_llama3},
    {"llama2", NULL, write_llama2},
    {"mistral", NULL, write_mistral},
    {"mistral-system", NULL, write_mistral_system},
    {"mistral-v3", NULL, write_mistral_v3},
    {"mistral-nemo", NULL, write_mistral_nemo},
    {"gemma", NULL, write_gemma},
    {"zephyr", NULL, write_zephyr},
    {"phi3", NULL, write_phi3},
    {NULL, NULL, NULL},
};
