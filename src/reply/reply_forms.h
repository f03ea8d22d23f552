/* How models write what is not text in their answers: calls of tools, and thoughts. The two forms of Mistral are read
 * alike, and so are those of DeepSeek. */
#ifndef CPA_REPLY_FORMS_H
#define CPA_REPLY_FORMS_H

#include <stddef.h>

typedef enum cpa_tool_form {
    CPA_TOOLS_NONE = 0,
    CPA_TOOLS_HERMES,       /* <tool_call>{"name", "arguments"}</tool_call>, one after the other: Hermes, Qwen */
    CPA_TOOLS_LLAMA3,       /* {"name", "parameters"} in place of text, also behind <|python_tag|>; with ";" between */
    CPA_TOOLS_MISTRAL,      /* [TOOL_CALLS] [{"name", "arguments"}, ...] */
    CPA_TOOLS_MISTRAL_ARGS, /* [TOOL_CALLS]NAME[ARGS]{...}, for each */
    CPA_TOOLS_DEEPSEEK_V3,  /* between marks of calls the type "function", and NAME with the JSON fenced: also R1 */
    CPA_TOOLS_DEEPSEEK_V31  /* between marks of calls NAME, another mark, and the JSON */
} cpa_tool_form;

typedef enum cpa_thought_form {
    CPA_THOUGHTS_NONE = 0,
    CPA_THOUGHTS_THINK,  /* <think>...</think> */
    CPA_THOUGHTS_MISTRAL /* [THINK]...[/THINK] */
} cpa_thought_form;

/* By the names that vLLM gives to its parsers. -1 for a name that is not known; *known then lists those that are. */
int cpa_tool_form_named(const char *name, const char **known);
int cpa_thought_form_named(const char *name, const char **known);

/* What the text of a chat template shows of them. */
cpa_tool_form cpa_tool_form_of(const char *chat_template);
cpa_thought_form cpa_thought_form_of(const char *chat_template);

/* What calls begin with, and thoughts begin and end with; "" where there are none. */
const char *cpa_tool_form_mark(cpa_tool_form form);
const char *cpa_thought_form_begin(cpa_thought_form form);
const char *cpa_thought_form_end(cpa_thought_form form);

/* Whether a token of this text is a mark of one of the forms, and counts also where special tokens are left out. */
int cpa_forms_have_mark(cpa_tool_form tools, cpa_thought_form thoughts, const char *text, size_t bytes);

#endif
