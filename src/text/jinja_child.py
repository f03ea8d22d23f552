# Renders chat templates of Jinja in a process of its own, which jinja_child.c starts. A template is a program from
# somewhere else: it runs in the sandbox of Jinja, and the process has given up what it does not need. What a template
# meets is what apply_chat_template of transformers 5 has for it.
#
# Both directions are frames: 8 bytes of length, the low one first, and so many bytes. This file is the first frame; then
# come JSON objects: {memory, seconds, templates, tokens}, and one a chat. Each frame is answered by "=" and a text, by "!"
# and why there is none, or by "#" and why, if the process is not to be used again.
import codecs
import ctypes
import datetime
import json
import os
import resource
import struct
import sys

# Loaded while files can be opened, since filters and errors would do so later.
import pprint  # noqa: F401
import random  # noqa: F401
import textwrap  # noqa: F401


def read():
    pipe = sys.stdin.buffer
    length = pipe.read(8)
    data = pipe.read(int.from_bytes(length, "little")) if len(length) == 8 else b""
    if not data:
        os._exit(0)  # the other end is gone
    return data


def answer(kind, text):
    data = kind + text
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
    sys.stdout.buffer.flush()


def reason(error):
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, (jinja2.TemplateError, Refusal)):
        return str(error)
    return "it takes too much memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"


def answer_by(make):
    """The text that a function makes, or why it does not."""
    try:
        answer(b"=", make().encode())
    except Exception as error:
        answer(b"#" if isinstance(error, MemoryError) else b"!", reason(error)[:300].encode(errors="replace"))


try:
    import jinja2
    import jinja2.constants  # noqa: F401
    import jinja2.debug  # noqa: F401
    import jinja2.ext
    import jinja2.sandbox
except ImportError as missing:
    answer(b"!", str(missing).encode())
    os._exit(0)


# ---- What the process keeps ----

# The kernel's name of the processor, and the numbers of the calls that an interpreter makes once it is loaded: to read
# and write what is open, and for memory, locks, signals, clocks, its own limits and its end.
CALLS = {
    "x86_64": (0xC000003E, (0, 1, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 39, 60, 96, 97, 98, 186, 201, 202, 228, 230, 231,
                            302, 318)),
    "aarch64": (0xC00000B7, (63, 64, 93, 94, 98, 113, 115, 124, 134, 135, 139, 163, 165, 169, 172, 178, 214, 215, 216,
                             222, 226, 233, 261, 278)),
}


def filter_calls():
    """All other calls fail with EPERM from now on (seccomp). Where the kernel has no filter the limits hold alone."""
    architecture, calls = CALLS.get(os.uname().machine, (0, ()))
    if not calls or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    load, jump_if, give, refuse, allow = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000
    steps = [(load, 0, 0, 4), (jump_if, 0, len(calls) + 1, architecture), (load, 0, 0, 0)]
    steps += [(jump_if, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    steps += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    prctl(22, 2, ctypes.addressof(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def give_up(memory):
    os.chdir("/")
    datetime.datetime.now().astimezone()  # reads the time zone,
    codecs.lookup("unicode-escape")  # and this what texts in templates are read by
    for what, most in (("AS", memory), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0), ("NOFILE", 3)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
    filter_calls()


def allow_time(seconds):
    """Of the processor, from now on: an end even where nobody is left who would kill the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, most))


# ---- What a template meets ----

class Refusal(Exception):
    """What is refused before the template sees it."""


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model is trained on, and changes no text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("give"), [], [], body).set_lineno(line)

    def give(self, caller):
        return caller()


class Dict:
    """dict() without the attributes of the class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class Namespace(jinja2.utils.Namespace):
    """Takes no names with an underscore in front."""

    def __init__(*args, **kwargs):
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name}")


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message):
    raise jinja2.TemplateError(message)


def environment(clock):
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=refuse, strftime_now=lambda form: clock().strftime(form), dict=Dict(),
                       namespace=Namespace)
    return env


# ---- Chats ----

REASONING = ("reasoning_content", "thinking", "reasoning")


def joined(content):
    """The texts of parts, line by line, for a template that takes strings alone."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def call_of(call):
    """A call of a tool whose arguments, which OpenAI's interface has as the text of JSON, are an object."""
    function = call.get("function", {})
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise Refusal("the arguments of a tool call are expected to be the JSON of an object")
    return {**call, "function": {**function, "arguments": arguments}}


def message_of(message, takes_parts, parses):
    """What a template sees of a message: nothing of what is null, and reasoning under each of its names."""
    message = {key: value for key, value in message.items() if value is not None}
    if not takes_parts and "content" in message:
        message["content"] = joined(message["content"])
    if parses and "tool_calls" in message:
        message["tool_calls"] = [call_of(call) for call in message["tool_calls"]]
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


MARK = "TO BE CONTINUED HERE "


def mark_end(message, source):
    """Puts a mark behind the content of the last message, and returns the text that is to be continued."""
    content = message.get("content")
    if content is None or "content" not in source:
        raise Refusal("continue_final_message: the last message has no content that the template writes")
    if isinstance(content, str):
        message["content"] = content + MARK
        return content
    if not content:
        raise Refusal("continue_final_message: the last message has no text")
    message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + MARK}]
    return content[-1]["text"]


def cut_at_mark(text, continued):
    at = text.rfind(MARK.strip())
    if at < 0 or continued.strip() not in text:
        raise Refusal("continue_final_message: the template does not write the last message as it is")
    # A template that strips what it writes would have stripped it without the mark, too.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()


class Chats:
    def __init__(self, sources, tokens):
        self.now = 0
        env = environment(lambda: datetime.datetime.fromtimestamp(self.now))
        self.sources, self.tokens = sources, tokens
        self.templates = {name: env.from_string(source) for name, source in sources.items()}
        self.takes_parts = {name: self.writes_parts(name) for name in sources}

    def write(self, name, messages, chat):
        return self.templates[name].render({
            **self.tokens, **(chat["kwargs"] or {}), "messages": messages, "tools": chat["tools"],
            "documents": chat["documents"], "add_generation_prompt": chat["add_generation_prompt"]})

    def writes_parts(self, name):
        """Whether a template writes the texts of parts, and not the parts as they stand in Python or in JSON."""
        parts = [{"type": "text", "text": text} for text in ("The first.", "The second.")]
        chat = {"kwargs": None, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self.write(name, [{"role": "user", "content": parts}], chat)
        except Exception:
            return False
        return all(part["text"] in text for part in parts) and "'type'" not in text and '"type"' not in text

    def render_with(self, name, chat, parses):
        messages = [message_of(message, self.takes_parts[name], parses) for message in chat["messages"]]
        if not chat["continue_final_message"]:
            return self.write(name, messages, chat)
        continued = mark_end(messages[-1], self.sources[name])
        return cut_at_mark(self.write(name, messages, chat), continued)

    def render(self, chat):
        self.now = chat["now"]
        name = "tool_use" if chat["tools"] and "tool_use" in self.templates else "default"
        try:
            return self.render_with(name, chat, True)
        except TypeError:
            # A template that puts text around arguments wants them as the text that they came as.
            if not any(message.get("tool_calls") for message in chat["messages"]):
                raise
            return self.render_with(name, chat, False)


def serve():
    settings = json.loads(read())
    chats = None

    def begin():
        nonlocal chats
        give_up(settings["memory"])
        allow_time(settings["seconds"])
        chats = Chats(settings["templates"], settings["tokens"])
        return ""

    answer_by(begin)
    while chats:
        data = read()
        allow_time(settings["seconds"])
        answer_by(lambda: chats.render(json.loads(data)))


answer(b"=", b"")
serve()
