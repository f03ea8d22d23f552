#include "src/reply/reply_forms.h"

#include <stddef.h>
#include <string.h>

enum { MOST_MARKS = 6 };

#define MISTRAL_MARKS "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
#define DEEPSEEK_MARKS                                                                                                 \
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

/* The first mark is what calls begin with. */
static const char *const tool_marks[][MOST_MARKS] = {
    [CPA_TOOLS_NONE] = {""},
    [CPA_TOOLS_HERMES] = {"<tool_call>", "</tool_call>"},
    [CPA_TOOLS_LLAMA3] = {"<|python_tag|>"},
    [CPA_TOOLS_MISTRAL] = {MISTRAL_MARKS},
    [CPA_TOOLS_MISTRAL_ARGS] = {MISTRAL_MARKS},
    [CPA_TOOLS_DEEPSEEK_V3] = {DEEPSEEK_MARKS},
    [CPA_TOOLS_DEEPSEEK_V31] = {DEEPSEEK_MARKS},
};

static const char *const thought_marks[][2] = {
    [CPA_THOUGHTS_NONE] = {"", ""},
    [CPA_THOUGHTS_THINK] = {"<think>", "</think>"},
    [CPA_THOUGHTS_MISTRAL] = {"[THINK]", "[/THINK]"},
};

typedef struct form_name {
    const char *name;
    int form;
} form_name;

static int find(const form_name *names, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(names[i].name, name) == 0) return names[i].form;
    }
    return -1;
}

int cpa_tool_form_named(const char *name, const char **known) {
    static const form_name names[] = {
        {"none", CPA_TOOLS_NONE},
        {"hermes", CPA_TOOLS_HERMES},
        {"llama3_json", CPA_TOOLS_LLAMA3},
        {"mistral", CPA_TOOLS_MISTRAL},
        {"deepseek_v3", CPA_TOOLS_DEEPSEEK_V3},
        {"deepseek_v31", CPA_TOOLS_DEEPSEEK_V31},
    };
    *known = "none, hermes, llama3_json, mistral, deepseek_v3 and deepseek_v31";
    return find(names, sizeof names / sizeof *names, name);
}

int cpa_thought_form_named(const char *name, const char **known) {
    static const form_name names[] = {{"none", CPA_THOUGHTS_NONE},
                                      {"deepseek_r1", CPA_THOUGHTS_THINK},
                                      {"qwen3", CPA_THOUGHTS_THINK},
                                      {"mistral", CPA_THOUGHTS_MISTRAL}};
    *known = "none, deepseek_r1, qwen3 and mistral";
    return find(names, sizeof names / sizeof *names, name);
}

cpa_tool_form cpa_tool_form_of(const char *text) {
    if (strstr(text, "<｜tool▁calls▁begin｜>"))
        return strstr(text, "```json") ? CPA_TOOLS_DEEPSEEK_V3 : CPA_TOOLS_DEEPSEEK_V31;
    if (strstr(text, "[TOOL_CALLS]")) return strstr(text, "[ARGS]") ? CPA_TOOLS_MISTRAL_ARGS : CPA_TOOLS_MISTRAL;
    if (strstr(text, "<function=") || strstr(text, "<arg_key>")) return CPA_TOOLS_NONE; /* calls that are no JSON */
    if (strstr(text, "<tool_call>")) return CPA_TOOLS_HERMES;
    if (strstr(text, "<|python_tag|>") || (strstr(text, "\"parameters\": ") && strstr(text, "ipython")))
        return CPA_TOOLS_LLAMA3;
    return CPA_TOOLS_NONE;
}

cpa_thought_form cpa_thought_form_of(const char *text) {
    if (strstr(text, "</think>")) return CPA_THOUGHTS_THINK;
    return strstr(text, "[/THINK]") ? CPA_THOUGHTS_MISTRAL : CPA_THOUGHTS_NONE;
}

const char *cpa_tool_form_mark(cpa_tool_form form) {
    return tool_marks[form][0];
}

const char *cpa_thought_form_begin(cpa_thought_form form) {
    return thought_marks[form][0];
}

const char *cpa_thought_form_end(cpa_thought_form form) {
    return thought_marks[form][1];
}

static int is_mark(const char *mark, const char *text, size_t bytes) {
    return *mark && strlen(mark) == bytes && memcmp(mark, text, bytes) == 0;
}

int cpa_forms_have_mark(cpa_tool_form tools, cpa_thought_form thoughts, const char *text, size_t bytes) {
    for (int i = 0; i < MOST_MARKS && tool_marks[tools][i]; i++) {
        if (is_mark(tool_marks[tools][i], text, bytes)) return 1;
    }
    return is_mark(thought_marks[thoughts][0], text, bytes) || is_mark(thought_marks[thoughts][1], text, bytes);
}
