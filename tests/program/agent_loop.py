"""An agent that calls tools for some turns: agent_loop.py URL CLIENT TURNS.

CLIENT is "openai", the package of that name (exit code 77 where there is none), or "plain", HTTP by the standard library. Every
turn must call a tool, in turn a named one and any, as a stream and not; what comes is checked, the tool's result goes back, and
the prompt of the next turn has to be found in the cache as far as this turn has left it there.
"""

import itertools
import json
import sys
import urllib.request

MODEL = "tiny-llama"
BLOCK = 16
LEAST_HITS = 0.95

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
        "type": "object", "required": ["a", "b"], "additionalProperties": False, "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer", "minimum": -9, "maximum": 9}}}}},
    {"type": "function", "function": {"name": "find", "parameters": {
        "type": "object", "required": ["in"], "additionalProperties": False, "properties": {
            "in": {"enum": ["notes", "mail"]}, "word": {"type": "string", "minLength": 1, "maxLength": 5},
            "exact": {"type": "boolean"}}}}},
]


def check(condition, *what):
    if not condition:
        sys.exit(f"FAILED: {' '.join(map(str, what))}")


class Plain:
    def __init__(self, url):
        self.url = url

    def ask(self, **fields):
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(fields).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if not fields["stream"]:
                return json.load(answer)
            lines = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
        check(lines[-1] == b"[DONE]", "a stream's last event is", lines[-1])
        return [json.loads(line) for line in lines[:-1]]


class Package:
    def __init__(self, url):
        import openai
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, **fields):
        extra = {key: fields.pop(key) for key in ("cache_salt",) if key in fields}
        answer = self.client.chat.completions.create(**fields, extra_body=extra)
        if not fields["stream"]:
            return answer.to_dict()
        return [event.to_dict() for event in answer]


def joined(events):
    """The answer that a stream's events make up."""
    message, reason, usage = {"role": None, "content": None, "tool_calls": []}, None, None
    check(len({event["id"] for event in events}) == 1, "ids of a stream's events", [event["id"] for event in events])
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            check(reason is None, "an event behind the last one", event)
            delta, reason = choice["delta"], choice.get("finish_reason")
            message["role"] = delta.get("role") or message["role"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for part in delta.get("tool_calls") or []:
                calls = message["tool_calls"]
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": {
                        "name": part["function"]["name"], "arguments": ""}})
                check(part["index"] == len(calls) - 1, "a part of call", part["index"], "of", len(calls))
                calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def is_of(schema, value):
    """Whether a value is one of the schema, as far as schemas of TOOLS go."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (isinstance(value, dict) and all(key in value for key in schema["required"])
                and all(key in known and is_of(known[key], value[key]) for key in value))
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    return isinstance(value, bool)


def result_of(name, arguments):
    return str(arguments["a"] + arguments["b"]) if name == "add" else f"1 in {arguments['in']}"


def check_calls(calls, wanted, seen):
    check(len(calls) == 1, "calls", calls)
    for call in calls:
        name = call["function"]["name"]
        check(call["type"] == "function" and call["id"] and call["id"] not in seen, "a call", call)
        check(wanted in (None, name), "a call of", name, "for", wanted)
        schemas = [tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name]
        check(len(schemas) == 1 and is_of(schemas[0], json.loads(call["function"]["arguments"])), "arguments", call)
        seen.add(call["id"])


def found_tokens(url):
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("cpattn_prefix_cache_hits_total{"):
                return int(float(line.split()[-1]))
    return check(False, "no prefix_cache_hits_total")


def main(url, kind, turns):
    try:
        client = Package(url) if kind == "openai" else Plain(url)
    except ImportError:
        print("skipped: no Python package openai")
        return 77
    messages, seen, found, findable, left = [{"role": "user", "content": "Go on."}], set(), 0, 0, 0
    for turn, wanted in zip(range(turns), itertools.cycle(["add", None, "find"])):
        stream = turn % 2 == 1
        fields = {"stream_options": {"include_usage": True}} if stream else {}
        choice = {"type": "function", "function": {"name": wanted}} if wanted else "required"
        before = found_tokens(url)
        answer = client.ask(model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
                            max_tokens=300, seed=turn, temperature=1, cache_salt=kind, stream=stream, **fields)
        answer = joined(answer) if stream else answer
        (one,) = answer["choices"]
        message, usage = one["message"], answer["usage"]
        check(one["finish_reason"] == "tool_calls", "turn", turn, "ended by", one["finish_reason"])
        check(message["role"] == "assistant" and not message.get("content"), "a message", message)
        check_calls(message["tool_calls"], wanted, seen)
        found += found_tokens(url) - before
        findable += left // BLOCK * BLOCK
        left = usage["prompt_tokens"] + usage["completion_tokens"] - 1  # the last token is never an input
        messages.append({"role": "assistant", "content": None, "tool_calls": message["tool_calls"]})
        for call in message["tool_calls"]:
            result = result_of(call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    answer = client.ask(model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8, stream=False)
    (one,) = answer["choices"]
    check(one["finish_reason"] in ("stop", "length") and not one["message"].get("tool_calls"), "without tools", one)
    print(f"{turns} turns, {left} tokens at the end, {found} of {findable} tokens found")
    check(found >= LEAST_HITS * findable, found, "tokens found of", findable)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
