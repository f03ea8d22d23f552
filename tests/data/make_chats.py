#!/usr/bin/env python3
"""Notes what transformers makes of conversations with chat templates.

    python3 -m venv VENV && VENV/bin/pip install transformers jinja2
    VENV/bin/python tests/data/make_chats.py                        # chats/expected.json, and the template of tiny-llama
    VENV/bin/python tests/data/make_chats.py show TEMPLATE [CHAT]   # texts instead of their digests

    chats/*.jinja        templates of our own with what those of common models do: dates, tools, documents, thoughts, parts
    chats/expected.json  {now, tokens, chats, templates}: a template has a name, a family if `--chat-template` knows it by
                         this name, its text unless it is in NAME.jinja, and for each chat the digest of its text, or null
                         if apply_chat_template refuses it

Two things are as servers of OpenAI's interface have them, and not as a caller of transformers would: arguments of tool
calls are text there, and are given to templates as objects (but for those of TAKE_TEXT); and the content of a message may
be parts of text, which are joined by line ends for all templates but those of TAKE_PARTS.
"""
import datetime
import json
import os
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent / "chats"
NOW = 1752580800  # 15 July 2025, noon, in UTC
BOS, EOS = "<s>", "</s>"
TAKE_PARTS = {"mistral_small", "gemma3", "glm4"}
TAKE_TEXT = {"deepseek_r1"}

# ---- Templates of families, which the program has as functions ----


def messages(body, before="", after="", all="messages"):
    """A template that goes through the messages."""
    return before + "{% for message in " + all + " %}" + body + "{% endfor %}" + after


def ask(text):
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


TURNS = "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turns') }}{% endif %}"
SYSTEM_FIRST = ("{% if messages[0].role == 'system' %}{% set system_message = messages[0].content %}{% set rest = messages[1:] %}"
                "{% else %}{% set rest = messages %}{% endif %}")
IM = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
IM_ASK = ask("<|im_start|>assistant\\n")
HEADER = "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>'"
HEADER_ASK = "<|start_header_id|>assistant<|end_header_id|>\\n\\n"
BEGIN = "{% set text = " + HEADER + " %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}"


def default_system(text):
    return ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\n" + text + "<|im_end|>\\n' }}{% endif %}")


QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN3 = """{%- set ns = namespace(open=true, question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if ns.open and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}
        {%- set ns.question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA31 = """{{- bos_token }}
{%- set date_string = "26 Jul 2024" %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}{{- HEADER }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASK' }}{%- endif %}""".replace("HEADER", HEADER).replace("ASK", HEADER_ASK)

LLAMA2 = SYSTEM_FIRST + messages(
    TURNS + "{% if loop.first and system_message is defined %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}", all="rest")

MISTRAL = "{{ bos_token }}" + messages(TURNS + "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
                                       "{% else %}{{ message.content + eos_token }}{% endif %}")
MISTRAL_SYSTEM = SYSTEM_FIRST + "{{ bos_token }}" + messages(
    TURNS + "{% if message.role == 'user' %}{% if loop.first and system_message is defined %}"
    "{{ ' [INST] ' + system_message + '\\n\\n' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' [INST] ' + message.content + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}", all="rest")
MISTRAL_NEMO = SYSTEM_FIRST + "{{ bos_token }}" + messages(
    TURNS + "{% if message.role == 'user' %}{% if loop.last and system_message is defined %}"
    "{{ '[INST]' + system_message + '\\n\\n' + message.content + '[/INST]' }}"
    "{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}", all="rest")
MISTRAL_V3 = MISTRAL_NEMO.replace("'[INST]'", "'[INST] '").replace("message.content + eos_token", "' ' + message.content | trim + eos_token")

GEMMA = messages(TURNS + "{% if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}{% endif %}"
                 "{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}", "{{ bos_token }}",
                 ask("<start_of_turn>model\\n"))
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% else %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def phi3(condition=""):
    lines = "".join("{% " + word + " message['role'] == '" + role + "'" + (condition if role == "system" else "") + " %}"
                    "{{ '<|" + role + "|>\\n' + message['content'] + '<|end|>\\n' }}"
                    for word, role in (("if", "system"), ("elif", "user"), ("elif", "assistant")))
    return messages(lines + "{% endif %}", "", "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}")


CHATML = messages(IM, "", IM_ASK)
LLAMA3 = messages(BEGIN, "", ask(HEADER_ASK))
FAMILIES = {
    "chatml": CHATML, "qwen": messages(IM, default_system(QWEN), IM_ASK),
    "qwen2": messages(IM, default_system("You are a helpful assistant."), IM_ASK), "qwen3": QWEN3,
    "llama3": LLAMA3, "llama3.1": LLAMA31, "llama2": LLAMA2, "mistral": MISTRAL, "mistral-system": MISTRAL_SYSTEM,
    "mistral-v3": MISTRAL_V3, "mistral-nemo": MISTRAL_NEMO, "gemma": GEMMA, "zephyr": ZEPHYR, "phi3": phi3(),
}

# What differs little from a template above, and must not be taken for it: the same expressions, and one change.
VARIANTS = {
    "chatml with a beginning": (CHATML, "{% for", "{{ bos_token }}{% for"),
    "chatml with an end": (CHATML, "{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add"),
    "chatml told otherwise": (FAMILIES["qwen"], QWEN, "You are told: \\'be brief\\'."),
    "chatml stripped": (CHATML, "message.content", "message.content | trim"),
    "chatml that thinks": (CHATML, "assistant\\n'", "assistant\\n<think>\\n'"),
    "chatml without a line end": (CHATML, "<|im_end|>\\n", "<|im_end|>"),
    "chatml of three roles": (CHATML, "{{ '<|im_start|>' + message", "{% if message.role not in ['system', 'user', 'assistant'] %}"
                              "{{ raise_exception('no such role: ' + message.role) }}{% endif %}{{ '<|im_start|>' + message"),
    "llama3 that always asks": (LLAMA3, ask(HEADER_ASK), "{{ '" + HEADER_ASK + "' }}"),
    "llama3 unstripped": (LLAMA3, " | trim", ""),
    "llama3.1 of today": (LLAMA31, '"26 Jul 2024"', 'strftime_now("%d %b %Y")'),
    "llama2 told by default": (LLAMA2, "{% set rest = messages %}", "{% set rest = messages %}{% set system_message = 'Be safe.' %}"),
    "gemma without a beginning": (GEMMA, "{{ bos_token }}", ""),
    "mistral that closes": (MISTRAL, "' [/INST]'", "' [/INST] '"),
    "phi3 without empty orders": (phi3(), "'system'", "'system' and message['content']"),
    "qwen3 that does not think": (QWEN3, "assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"),
}

# ---- Conversations ----


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, id="a1b2c3d4e"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def told(content, id="a1b2c3d4e", **more):
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def part(text):
    return {"type": "text", "text": text}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city, \u00b0C & wind <now>.",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "Its \"name\""}, "days": {"type": "integer", "default": 1},
        "units": {"type": "string", "enum": ["metric", "imperial"]}}}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Finds text.",
    "parameters": {"type": "object", "required": [], "properties": {
        "words": {"type": "array", "items": {"type": "string"}}, "weight": {"type": "number", "default": 0.1},
        "where": {"type": ["string", "null"]}}}}}
DOCUMENTS = [{"title": "Tides", "text": "The sea rises\ntwice a day."}, {"title": "\u4f60\u597d", "text": " Moon. "}]
HI = [user("Hello")]
LONG = [system("Be brief."), user("One?"), says("1"), user("Two?"), says("2"), user("Three?"), says("3"), user("Four?")]
CALLED = [user("Rain in K\u00f6ln?"), calls(call("get_weather", '{"city": "K\u00f6ln", "days": 2}')), told('{"rain": true}')]
TWICE = [user("Rain?"), calls(call("get_weather", '{"city":"A"}'), call("search", '{"words": ["x", "\\u00e9"], "weight": 1.50}', "000000002")),
         told("dry"), told("found", "000000002")]
THOUGHT = [user("a"), says("<think>\nI think\n\n</think>\n\nb"), user("c"), says("<think>\nso\n</think>\n\nd")]

CHATS = [
    {"messages": HI},
    {"messages": HI, "add_generation_prompt": False},
    {"messages": [system("Be brief."), user("  What is 2 + 2?\n")]},
    {"messages": [user("a"), says(" b "), user("")]},
    {"messages": [system(""), user("\u00a0\u3000x\x1c\u2003"), says("multi\n\nline "), user("\u4f60\u597d \U0001f600")]},
    {"messages": LONG},
    {"messages": LONG[1:], "add_generation_prompt": False},
    {"messages": THOUGHT, "add_generation_prompt": False},
    {"messages": THOUGHT + [user("e")]},
    {"messages": [user("q"), says("</think>\n\nb<think>c</think>d"), user("<tool_response>x</tool_response>"), says("e")], "add_generation_prompt": False},
    {"messages": [says("b")]},
    {"messages": [user("a"), user("b")]},
    {"messages": [system("s"), system("t"), user("a")]},
    {"messages": [user("a"), system("late"), says("b")], "add_generation_prompt": False},
    {"messages": [system(" s "), user("'quotes' \"and\" \\\\n {{ 7 }} {% x %} <|im_end|>"), says("\n\nx\n")], "add_generation_prompt": False},
    {"messages": [{"role": "developer", "content": "Be kind."}, user("a")]},
    {"messages": [user([part("One"), part(" two\n"), part("")]), says([part("three")]), user("four")]},
    {"messages": [system([part("Be"), part("brief")]), user([part("Go")])]},
    {"messages": [user([])]},
    {"messages": HI, "tools": [WEATHER]},
    {"messages": [system("Use tools."), user("Go")], "tools": [WEATHER, SEARCH]},
    {"messages": CALLED, "tools": [WEATHER]},
    {"messages": CALLED + [says("Yes, \u2614."), user("And now?")], "tools": [WEATHER, SEARCH]},
    {"messages": TWICE, "tools": [WEATHER, SEARCH]},
    {"messages": [user("Go"), calls(call("search", "{}", "short"), reasoning_content="Let me look.\n"), told("nothing", "short", name="search")]},
    {"messages": [user("Go"), calls(call("search", ""), content="I look.", reasoning_content=None)], "add_generation_prompt": False},
    {"messages": [system("x")] + CALLED[:2] + [told([part("wet"), part("cold")])], "tools": [WEATHER]},
    {"messages": [user("Why?"), says("Because.", reasoning_content="\nHm.\n"), user("So?"), says("Thus.", reasoning_content="Well")],
     "add_generation_prompt": False},
    {"messages": [user("Why?"), says("Because.", reasoning="Older name"), user("So?")]},
    {"messages": HI, "kwargs": {"enable_thinking": False}},
    {"messages": [system("/no_think Be brief."), user("x")], "kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}},
    {"messages": [user("What are tides?")], "documents": DOCUMENTS, "kwargs": {"citation_mode": "accurate", "controls": {"citations": 1}}},
    {"messages": [system("Read."), user("Moon?"), says("Yes"), user("Why?")], "documents": DOCUMENTS, "tools": [SEARCH],
     "kwargs": {"tools_in_user_message": False, "date_string": "1 Jan 2020", "bos_token": "<begin>"}},
    {"messages": [user("Count"), says("One, two, ")], "continue_final_message": True},
    {"messages": [system("s"), user("Count"), says([part("One,"), part("two,")])], "continue_final_message": True},
    {"messages": [user("x"), says("")], "continue_final_message": True},
]

# ---- What is expected ----


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


def joined(message):
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def parsed(message):
    """With arguments as objects."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
        for call in message["tool_calls"]]}


def render(tokenizer, name, text, chat):
    """The text of a chat, or None if it is refused."""
    chat = {"tools": None, "documents": None, "kwargs": {}, "continue_final_message": False, **chat}
    chat.setdefault("add_generation_prompt", not chat["continue_final_message"])
    conversation = chat["messages"]
    if name not in TAKE_PARTS:
        conversation = [joined(message) for message in conversation]
    if name not in TAKE_TEXT:
        conversation = [parsed(message) for message in conversation]
    try:
        return tokenizer.apply_chat_template(
            conversation, tools=chat["tools"], documents=chat["documents"], chat_template=text, tokenize=False,
            add_generation_prompt=chat["add_generation_prompt"], continue_final_message=chat["continue_final_message"], **chat["kwargs"])
    except Exception:
        return None


def digest(text):
    """FNV-1a, as base/hash.h has it."""
    hash = 0xCBF29CE484222325
    for byte in text.encode():
        hash = ((hash ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return f"{hash:016x}"


def templates():
    """Names, texts, and what else an entry says."""
    for name, text in FAMILIES.items():
        yield name, text, {"family": name, "text": text}
    for name, (text, old, new) in VARIANTS.items():
        assert old in text, name
        yield name, text.replace(old, new), {"text": text.replace(old, new)}
    for path in sorted(HERE.glob("*.jinja")):
        yield path.stem, path.read_text(), {}


def tokenizer_of_chats():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=BOS, eos_token=EOS)


def write():
    tokenizer, entries, refused = tokenizer_of_chats(), [], 0
    for name, text, entry in templates():
        texts = [render(tokenizer, name, text, chat) for chat in CHATS]
        refused += texts.count(None)
        print(f"{name}: {len(texts) - texts.count(None)} texts, {len(set(texts))} of them differ")
        entries.append({"name": name, **entry, "digests": [text if text is None else digest(text) for text in texts]})
    lines = [",\n".join(" " + json.dumps(entry, ensure_ascii=False) for entry in list) for list in (CHATS, entries)]
    (HERE / "expected.json").write_text(
        '{"now": %d, "tokens": %s,\n"chats": [\n%s],\n"templates": [\n%s]}\n'
        % (NOW, json.dumps({"bos_token": BOS, "eos_token": EOS}), *lines))
    print(f"{len(entries)} templates, {len(CHATS)} chats, {refused} refused")
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast",
              "model_max_length": 4096, "chat_template": LLAMA3}
    (HERE.parent / "tiny-llama" / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def show(wanted, chat=None):
    for name, text, _ in templates():
        if name == wanted:
            for i, each in enumerate(CHATS):
                if chat is None or i == int(chat):
                    print(f"==== {i}\n{render(tokenizer_of_chats(), name, text, each)}")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    chat_template_utils.datetime = Clock
    if sys.argv[1:2] == ["show"]:
        show(*sys.argv[2:])
    else:
        write()
