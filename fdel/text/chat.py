"""Chat templates: render messages to text, and find the tokens that the assistant wrote."""

import functools
import json
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fdel.text.tokenizer import Tokenizer, encoding

MAX_CHARS = 2**24  # the longest text that a template may write, and the largest string, list or number it may build
MAX_SECONDS = 10.0  # the longest time that it may run
Rows = Sequence[Mapping[str, Any]]  # messages, tools, documents, as JSON has them

# What neither a request nor a row of data may set in a template: it comes from elsewhere, or from nowhere.
RESERVED = frozenset(
    "messages tools template chat_template tokenize add_generation_prompt documents continue_final_message return_dict tok "
    "special self written".split()
)

_OPEN = "THE_FINAL_MESSAGE_STAYS_OPEN "  # the space at its end shows whether the template trims messages
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing, under the names that chats give it
_GROWING = ("ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join")  # methods of strings
_PLAIN: dict[type, Callable] = {bool: bool, str: str.__str__, int: int.__int__, float: float.__float__}


class ChatError(ValueError):
    """A chat that its template cannot render: the template complains, has a bug, or goes past a limit."""


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Give the variables back that a request or a row of data sets in a template; ChatError for a name it may not set."""
    for name in given:
        if not isinstance(name, str) or name in RESERVED or not name.isidentifier():
            raise ChatError(f"chat_template_kwargs: the name {name!r:.64} cannot be set there")
    return dict(given)


def render_chat(
    tok: Tokenizer, messages: Rows, *, tools: Rows | None = None, add_generation_prompt: bool = False,
    continue_final_message: bool | str = False, template: str | None = None, documents: Rows | None = None,
    **variables: Any,
) -> str:  # fmt: skip
    """Render messages with the tokenizer's chat template, as transformers' `apply_chat_template` does.

    `tools` are JSON schemas; `template` is a template, or the name of one in `tok.templates`; `variables` go to it.
    `continue_final_message` leaves the last message open after its content (or after the field it names). Encode the
    result with `special=False`, for templates write bos themselves. Raises ChatError, also for what the template
    raises.

    A template is code of a stranger. It runs in Jinja's sandbox on plain JSON values, so it reaches no internals of
    Python and changes no list or dict. Bounded: the text that it writes and what `+`, `*`, `**` and methods of strings
    build (`MAX_CHARS`), ranges (100,000), and the time (`MAX_SECONDS`), looked at in each call and each turn of a loop. Not
    bounded: the compilation of a long template, and what a filter or format width allocates (`'%9999999999d'`). Render
    templates that come from clients in a process with a memory limit.
    """
    source, chat = _source(tok, template, tools), _messages(messages)
    variables = {"add_generation_prompt": add_generation_prompt, "documents": documents} | variables
    if not continue_final_message:
        return _render(tok, source, chat, tools, variables)[0]
    if add_generation_prompt:
        raise ChatError("continue_final_message and add_generation_prompt exclude each other; set one of them")
    final = _open_last(chat, "content" if continue_final_message is True else str(continue_final_message), source)
    text = _render(tok, source, chat, tools, variables)[0]
    head, mark, tail = text.rpartition(_OPEN.strip())
    if not mark or final.strip() not in text:
        raise ChatError(f"continue_final_message: the template drops or changes the final message {final!r:.100}")
    return head if tail.startswith(" ") else head.rstrip()


def chat_tokens(
    tok: Tokenizer, messages: Rows, *, tools: Rows | None = None, template: str | None = None,
    documents: Rows | None = None, written: Callable[[str], str] | None = None, **variables: Any,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Tokenize a chat for training: (ids, mask), the mask 1 on tokens of which a `{% generation %}` block wrote a part.

    `written` changes the text before, each block and what is between two by itself, as an image processor does around
    placeholders. Without an assistant turn the mask is all 0. ChatError as in `render_chat`, and if the template has no
    such block (nothing would be trained), or has it where its place in the text cannot be known.
    """
    source = _source(tok, template, tools)
    if not re.search(r"{%[-+]?\s*generation\b", source):
        raise ChatError("the chat template has no {% generation %} block, so nothing would be trained; put one around "
                        "what the assistant writes, with its end-of-turn token")  # fmt: skip
    variables = {"add_generation_prompt": False, "documents": documents} | variables
    text, blocks = _render(tok, source, _messages(messages), tools, variables)
    for start, block in blocks:
        if not text.startswith(block, start):
            raise ChatError("a {% generation %} block is inside a macro, a filter, a {% set %} block or a recursive "
                            "loop, where its place in the text is unknown; move it out")  # fmt: skip
    if written is not None:
        text, blocks = _changed(text, blocks, written)
    tokens = encoding(tok, text, special=False)
    starts, ends, mask = [a for a, _ in tokens.offsets], [b for _, b in tokens.offsets], [0] * len(tokens.ids)
    for start, block in blocks:
        first, last = bisect_right(ends, start), bisect_left(starts, start + len(block))
        mask[first:last] = [1] * (last - first)
    return tokens.ids, mask


def _changed(
    text: str, blocks: Sequence[tuple[int, str]], written: Callable[[str], str]
) -> tuple[str, list[tuple[int, str]]]:
    """Change a text in its blocks and around them: the text, and the blocks where they stand then."""
    out, at, moved = "", 0, list[tuple[int, str]]()
    for start, block in sorted(blocks, key=lambda b: (b[0], -len(b[1]))):
        if start >= at:  # else it is inside of the one before
            out += written(text[at:start])
            moved.append((len(out), written(block)))
            out, at = out + moved[-1][1], start + len(block)
    return out + written(text[at:]), moved


def _source(tok: Tokenizer, template: str | None, tools: Any) -> str:
    name = template or ("tool_use" if tools is not None and "tool_use" in tok.templates else "default")
    if template is None and name not in tok.templates:
        raise ChatError(f"no default chat template, found {sorted(tok.templates)}; pass template= (text or a name)")
    return tok.templates.get(name, name)


def _messages(messages: Rows) -> list[dict]:
    """Copy messages as plain values, without keys that are None, with reasoning under the names that templates read."""
    chat = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ChatError(f"expected messages to be dicts with a role and content, found {message!r:.100}")
        plain = {k: v for k, v in _plain(message).items() if v is not None}
        thought = next((plain[k] for k in _REASONING if k in plain), None)
        chat.append(plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought})
    if not chat:
        raise ChatError("the chat is empty; expected at least one message")
    return chat


def _open_last(chat: list[dict], field: str, source: str) -> str:
    """Mark the end of a field of the last message, under all its names; return what the field says."""
    said = chat[-1].get(field)
    fields = [f for f in _REASONING if chat[-1].get(f) == said] if field in _REASONING else [field]
    if said is None or not any(f in source for f in fields):
        raise ChatError(f"continue_final_message: {field!r} is not both in the final message and in the template")
    if isinstance(said, str):
        chat[-1] |= {f: said + _OPEN for f in fields}
        return said
    for block in reversed(said if isinstance(said, list) else []):
        if "text" in block:
            said, block["text"] = block["text"], block["text"] + _OPEN
            return said
    raise ChatError(f"continue_final_message: {field!r} of the final message has no text to continue")


def _plain(value: Any) -> Any:
    """Rebuild a value from JSON types: an object with methods of its own would be a way out of the sandbox."""
    if isinstance(value, np.generic):
        value = value.item()
    for kind, convert in _PLAIN.items():
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value] if isinstance(value, list) else tuple(_plain(v) for v in value)
    return None if value is None else f"<{type(value).__name__}>"  # templates ask only whether an image is there


def _render(tok: Tokenizer, source: str, chat: list, tools: Any, variables: dict) -> tuple[str, list[tuple[int, str]]]:
    """Return the text, and the (start, text) of each generation block."""
    if not all(isinstance(t, Mapping) for t in tools or ()):
        raise ChatError("tools must be JSON schemas (dicts); a Python function needs its schema written out")
    if not all(isinstance(d, Mapping) for d in variables["documents"] or ()):
        raise ChatError("documents must be dicts, as {'title': ..., 'text': ...}")
    env, parts = _Sandbox(), []
    values = {**tok.special, "messages": chat, "tools": _plain(tools), **_plain(variables)}
    try:
        template = jinja2.Template.from_code(env, _compile(source), env.make_globals(None))
        for part in template.generate(values):
            env.written += len(part)
            env.check(env.written)
            parts.append(part)
    except ChatError:
        raise
    except Exception as e:  # whatever the template does wrong, and limits of Python such as its depth
        raise ChatError(f"the chat template failed: {type(e).__name__}: {e}") from e
    return "".join(parts), env.blocks


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> CodeType:
    """Compile a template, with a look at the clock in each turn of its loops."""
    env = _Sandbox()
    tree = env.parse(source)
    for loop in tree.find_all(nodes.For):
        look = nodes.Call(nodes.EnvironmentAttribute("check"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(look).set_lineno(loop.lineno))
    return env.compile(tree)


class _Generation(Extension):
    """The `{% generation %}` block: note what it writes, and how much was written before it."""

    tags = {"generation"}
    environment: "_Sandbox"

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = caller()
        self.environment.blocks.append((self.environment.written, text))
        return text


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names such as `__call__`, which Jinja would look for on the object and find inside."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: B902 (a namespace may have a name "self")
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"the namespace name {name!r} begins with an underscore; rename it")
        super().__setitem__(name, value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering. It counts and keeps time, so that threads share nothing."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # `dict.update` would change its argument
        self.deadline, self.written = time.monotonic() + MAX_SECONDS, 0
        self.blocks: list[tuple[int, str]] = []

    def check(self, size: int = 0) -> None:
        if time.monotonic() > self.deadline:
            raise ChatError(f"the chat template runs for more than {MAX_SECONDS:g} seconds")
        if size > MAX_CHARS:
            raise ChatError(f"the chat template builds something of more than {MAX_CHARS} characters, items or bits")

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.check(_grown(getattr(function, "__self__", None), getattr(function, "__name__", ""), args))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        both, sizes = (left, right), [len(x) for x in (left, right) if isinstance(x, Sized)]
        if isinstance(left, int) and isinstance(right, int):
            self.check(left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length())
        elif operator == "+":
            self.check(sum(sizes))
        elif operator == "*" and sizes:
            self.check(sizes[0] * max((x for x in both if isinstance(x, int)), default=0))
        return super().call_binop(context, operator, left, right)


def _grown(said: Any, method: str, args: tuple) -> int:
    """Say how long the result of a string's method may become."""
    if not isinstance(said, str) or method not in _GROWING:
        return 0
    if method == "replace":
        return len(said) + said.count(args[0]) * len(args[1]) if len(args) > 1 else 0
    if method == "join":
        parts = args[0] if isinstance(args[0], list | tuple) else ()
        return sum(len(x) + len(said) for x in parts if isinstance(x, str))
    widths = [x for x in args if isinstance(x, int)]
    return max(len(said), *widths, 0) * (1 + said.count("\t") if method == "expandtabs" else 1) if widths else 0


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
