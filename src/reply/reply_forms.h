/* How models write what is not text in their answers: calls of tools, and thoughts. */
#ifndef CPA_REPLY_FORMS_H
#define CPA_REPLY_FORMS_H

typedef enum cpa_tool_form {
    CPA_TOOLS_NONE = 0,
    CPA_TOOLS_HERMES,  /* <tool_call>{"name", "arguments"}</tool_call>, one after the other: Hermes, Qwen */
    CPA_TOOLS_LLAMA3,  /* {"name", "parameters"} in place of text, also behind <|python_tag|>; with ";" between */
    CPA_TOOLS_MISTRAL, /* [TOOL_CALLS] [{"name", "arguments"}, ...], or [TOOL_CALLS]NAME[ARGS]{...} */
    CPA_TOOLS_DEEPSEEK /* NAME<|tool_sep|>{...}, or of type "function" with the JSON fenced, between marks of calls */
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

/* Whether a token of this text belongs to one of the forms, also where special tokens are left out of a text. */
int cpa_forms_have_mark(cpa_tool_form tools, cpa_thought_form thoughts, const char *text);

#endif
