"""Environments: what answers a generation, before the next one. Tools that a model calls are one of them.

An environment is a function of the trajectory so far. It answers in token ids, which are appended as they are: what was
drawn is never decoded and encoded again. `suffix` renders messages to them with the chat template that serving uses,
`answer` messages whose contents show and play.
"""

import inspect
import json
import time
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fdel import text
from fdel.media import image
from fdel.media import sight as sights
from fdel.media.sight import Sight
from fdel.serve.server import tools as parsing
from fdel.serve.server.tools import FORMATS, Call
from fdel.text.chat import ChatError
from fdel.train.data import images
from fdel.train.data.images import Shown
from fdel.train.rollout.aside import aside
from fdel.train.rollout.records import Sample

MARK = "fdelCompletionStandsHere"  # in place of what was drawn, when a template is rendered
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
Messages = Sequence[Mapping[str, Any]]


class Said(NamedTuple):
    """What an environment says after a generation."""

    tokens: Sequence[int] = ()  # appended to the trajectory as they are
    done: bool = False  # the trajectory ends here
    reward: float | None = None  # so far: the last one counts
    info: Mapping[str, float] = {}  # counters, summed over turns
    images: Sequence[Shown] = ()  # what the tokens show and play; `start` counts from the first of them


Turn = Callable[[Sample], Said | Awaitable[Said]]  # a function of the trajectory so far


# ---- messages ------------------------------------------------------------------------------------------------------


def generations(sample: Sample) -> list[list[int]]:
    """List what the policy drew, turn by turn."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.drawn, [False]]).astype(np.int8)))
    return [sample.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]


def suffix(
    tok: text.Tokenizer, prompt: Messages, new: Messages, drawn: Sequence[int], *, tools: Any = None
) -> list[int]:
    """Render what stands between a drawn reply and the next one: new messages, and what begins a reply, as token ids.

    `prompt` are the messages before the reply. Where the template ends a reply with a token that was drawn already, it is
    not repeated. ChatError for a template that cannot have such messages after a reply.
    """
    return _ids(tok, _after(tok, [*prompt, {"role": "assistant", "content": MARK}, *new], tools), drawn)


def answer(
    tok: text.Tokenizer, prompt: Messages, new: Messages, drawn: Sequence[int], *, tools: Any = None,
    sight: Sight | None = None,
) -> Said:  # fmt: skip
    """Say messages whose contents may show and play, as `suffix` renders them: tokens, with those of each in its place.

    An image stands in a message as in rows (`data.images`): {"type": "image", "image": X}; X is none of a path, for the
    messages lie in no folder. Give a model that sees its `sight`. ValueError for what it does not take, or cannot be read.
    """
    listed = sight is not None and not images.takes_texts(tok)
    said, shown = images.taken({"messages": list(new)}, None, "sft", sight, tok, listed)
    reply = {"role": "assistant", "content": MARK}
    before = [_plain(m, listed) for m in (*prompt, reply)]
    written = _after(tok, [*before, *said["messages"]], tools)
    ids = _ids(tok, sights.written(sight, written) if shown else written, drawn)
    if sight is None or not shown:
        return Said(ids)
    tokens, _, placed = images.expanded(sight, ids, shown[0])
    return Said(tokens, images=tuple(placed))


def _plain(message: Mapping[str, Any], listed: bool) -> Mapping[str, Any]:
    """Give a message with places alone, {"type": "image"}; its text as a list of parts, if it is to be `listed`."""
    parts = message.get("content")
    if isinstance(parts, str) and listed:
        parts = [{"type": "text", "text": parts}]
    if not isinstance(parts, list):
        return message
    return {**message, "content": [{"type": images.KINDS[k]} if (k := images.kind_of(p)) else p for p in parts]}


def _after(tok: text.Tokenizer, messages: Messages, tools: Any) -> str:
    """Render messages: what stands behind the mark in them."""
    _, mark, rest = text.render_chat(tok, messages, tools=tools, add_generation_prompt=True).rpartition(MARK)
    if not mark:
        raise ChatError("the chat template drops a reply that others follow; an environment needs one that keeps it")
    return rest


def _ids(tok: text.Tokenizer, rest: str, drawn: Sequence[int]) -> list[int]:
    """Encode what stands behind a drawn reply, without the token that ends it if it was drawn."""
    ids = text.encode(tok, rest, special=False)
    special = {i for i, token in tok.backend.get_added_tokens_decoder().items() if token.special}
    ended = drawn[-1:] and drawn[-1] in special
    return ids[1:] if ended and ids[:1] and ids[0] in special else ids


def messages_of(sample: Sample) -> Messages:
    """Give a task's prompt as messages; ValueError if it is a text."""
    prompt = sample.task.row.get("prompt")
    if not isinstance(prompt, list):
        raise ValueError(f"the row's prompt is {prompt!r:.60}; an environment in messages needs a list of messages")
    return prompt


# ---- tools ---------------------------------------------------------------------------------------------------------


def schema(function: Callable) -> dict[str, Any]:
    """Describe a function as chat templates want tools: a JSON schema of its annotated parameters, and its docstring.
    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    >>> from fdel.train.rollout.turns import schema
    >>> schema(add)["function"]["parameters"]["required"]
    ['a']
    """
    hints, known = typing.get_type_hints(function), inspect.signature(function).parameters
    for name in known:
        if (typing.get_origin(hints.get(name)) or hints.get(name)) not in TYPES:
            found = f"parameter {name} of {function.__name__} is annotated with {hints.get(name)}"
            raise ValueError(f"{found}; expected one of {', '.join(t.__name__ for t in TYPES)}")
    properties = {name: {"type": TYPES[typing.get_origin(hints[name]) or hints[name]]} for name in known}
    required = [name for name, p in known.items() if p.default is p.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": about}


def tools(
    tok: text.Tokenizer, functions: Sequence[Callable], *, parser: str = "auto", timeout: float = 30.0, most: int = 8,
    sight: Sight | None = None,
) -> Turn:  # fmt: skip
    """Make the environment that calls functions, sync or async, for the model; rows have their `schema`s as "tools".

    Calls are read by the parser of a format that serving knows, by default the one that the chat template shows; those of
    one turn run side by side. One that raises, has wrong arguments, or is not done after `timeout` seconds is answered with
    what went wrong. A reply without a call of a function that is known, or after `most` turns, ends the trajectory. A
    model that sees, of which `sight` is given, is shown what a function gives as an image (uint8[H W 3], or pillow's) or as
    a list of parts, {"type": "text", "text": ...} and {"type": "image", "image": ...}. No part may name a path or a URL;
    one that does, or holds what is no image, ends the sample with the reason. It counts "tools/calls" and
    "tools/failures". ValueError for an unknown parser.
    """
    known = {f.__name__: f for f in functions}
    schemas = [schema(f) for f in functions]
    name = (
        parsing.detect(tok.templates.get("tool_use", tok.templates.get("default", ""))) if parser == "auto" else parser
    )
    if name is None or name not in FORMATS:
        raise ValueError(f"parser={parser!r} ({name}); expected one of {', '.join(FORMATS)}")
    format, parameters = FORMATS[name], {s["function"]["name"]: s["function"]["parameters"] for s in schemas}

    def turn(sample: Sample) -> Said:
        drawn = generations(sample)
        output = parsing.Output(format, parameters)
        calls = parsing.parse(output, text.decode(tok, drawn[-1], skip_special=False)).calls
        if not calls or len(drawn) >= most:
            return Said(done=True)
        answers = _answers(calls, known, timeout, sight)
        new = [
            {"role": "tool", "name": c.name, "tool_call_id": c.id, "content": a}
            for c, (a, _) in zip(calls, answers, strict=True)
        ]
        said = answer(tok, messages_of(sample), new, drawn[-1], tools=schemas, sight=sight)
        return said._replace(info={"tools/calls": len(calls), "tools/failures": sum(bad for _, bad in answers)})

    return turn


def _answers(
    calls: Sequence[Call], known: Mapping[str, Callable], timeout: float, sight: Sight | None
) -> list[tuple[Any, bool]]:
    """Call functions side by side: what each says, as a message's content, and whether it failed."""

    def call(c: Call) -> str:
        arguments = json.loads(c.arguments or "{}")
        inspect.signature(known[c.name]).bind(**arguments)
        return known[c.name](**arguments)

    running, end, found = [aside(call, c) for c in calls], time.monotonic() + timeout, list[tuple[Any, bool]]()
    for one in running:
        try:
            found.append((_content(one.result(max(0.0, end - time.monotonic())), sight), False))
        except TimeoutError:
            found.append((f"error: not done after {timeout:g} s", True))
        except BaseException as e:
            found.append((f"error: {type(e).__name__}: {e}", True))
    return found


def _content(said: Any, sight: Sight | None) -> Any:
    """Write what a function gave as a message's content: a text, parts with images as files, or JSON."""
    if isinstance(said, str):
        return said
    if isinstance(said, np.ndarray) or hasattr(said, "save"):
        said = [{"type": "image", "image": said}]
    kinds = (
        [images.kind_of(p) or p.get("type") for p in said if isinstance(p, Mapping)] if isinstance(said, list) else []
    )
    if not kinds or len(kinds) < len(said) or not {*kinds} <= {"text", *images.KINDS}:
        return json.dumps(said)
    if sight is None and {*kinds} != {"text"}:
        raise ValueError("it gives images, and this model reads text alone")
    file = lambda x: {"bytes": image.encode(x)} if isinstance(x, np.ndarray) or hasattr(x, "save") else x
    return [{**p, "image": file(p["image"])} if "image" in p else p for p in said]
