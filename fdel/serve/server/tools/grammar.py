"""Grammars that make a model call tools: `required`, or one by name, in the words of its family."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fdel import text
from fdel.serve.server.grammar import JSON_OPTIONS, Spec
from fdel.serve.server.reasoning import CHANNELS, Thinking
from fdel.serve.server.tools.formats import Format, Tags


def grammar(
    fmt: Format, tools: Mapping[str, Mapping[str, Any]], tokenizer: text.Tokenizer, *,
    required: bool = True, several: bool = True, thinking: Thinking | None = None, inside: bool = False,
) -> Spec:  # fmt: skip
    """Build the Lark grammar of an output that calls one of these tools, or several times one of them.

    `tools` gives each tool's parameters as a JSON schema. Without `required` the output may also be, or begin with,
    text, but what begins as a call is one: for tools that are strict. With `thinking`, it may reason first (and goes on
    to, if the prompt opened the reasoning: `inside`). ValueError without tools, and for properties that no tag can name.
    """
    if not tools:
        raise ValueError("no tools to call; expected at least one")
    begin, before, between, after, join, finish = fmt.writes
    lit = lambda s: literal(tokenizer, s)
    rules: list[str] = []
    for i, (name, schema) in enumerate(tools.items()):
        if fmt.tags is not None:
            arguments, more = _tagged(f"a{i}", schema, fmt.tags)
        elif fmt.arguments == "python":
            arguments, more = _pythonic(f"a{i}", schema)
        else:
            arguments, more = _schema(schema, {}), []
        rules += [f"call{i}: {lit(before)} body{i}", f"body{i}: {lit(name + between)} {arguments} {lit(after)}", *more]
    each = lambda kind: "(" + " | ".join(f"{kind}{i}" for i in range(len(tools))) + ")"
    rest = f"({lit(join)} {each('call')})*" if several and not fmt.channels else ""  # a call ends a turn of gpt-oss
    start = f"{lit(begin)} {each('call')} {rest} {lit(finish)}"
    if not required:
        sign, free = _free(fmt, tokenizer, begin or before)
        rules += free
        if sign:  # text that ends with the sign of a call, and what is left of it
            left, kind = (begin, "call") if begin else (before, "body")
            start = f"text | text_sign {lit(left[len(sign) :])} {each(kind)} {rest} {lit(finish)}"
        else:
            start = f"text | {start}" if fmt.channels or fmt.leading else f"text | text {start}"
    thought, more = _thought(tokenizer, CHANNELS if fmt.channels else thinking, inside)
    return Spec("lark", "\n".join([f"start: {thought} ({start})", *rules, *more]))


def _free(fmt: Format, tokenizer: text.Tokenizer, begins: str) -> tuple[str, list[str]]:
    """Return the sign of a call, if it is text, and the rules of text without one."""
    if fmt.channels:
        return "", [f"text: {literal(tokenizer, '<|channel|>final<|message|>')} /(?s:.*)/"]
    if fmt.leading:
        return "", [rf"text: /([^\s{re.escape(fmt.leading)}](?s:.*))?/"]
    marks = (fmt.marker, *fmt.sections)
    sign = next(m for m in marks if begins.startswith(m))
    if literal(tokenizer, sign).startswith("<["):
        return "", ["text: /(?s:.*)/"]  # no special token is text
    any_mark = "|".join(map(re.escape, marks)).replace("/", r"\/")
    without = f"text: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({any_mark})(?s:.*)/"
    return sign, [without, f"text_sign[suffix={json.dumps(sign)}]: TEXT"]


def answer(
    spec: Spec, tokenizer: text.Tokenizer, *, thinking: Thinking | None = None, inside: bool = False, harmony: bool = False
) -> Spec:  # fmt: skip
    """Let a model reason before an answer of this structure; with `harmony`, in the channels of gpt-oss.

    ValueError for a Lark grammar, which must say itself where the reasoning stands.
    """
    if thinking is None and not harmony:
        return spec
    if spec.kind in ("json_schema", "json_object"):
        schema = json.loads(spec.body) if spec.kind == "json_schema" else {"type": "object"}
        body = _schema({} if schema is True else schema, {})
    elif spec.kind == "choice":
        body = "(" + " | ".join(map(json.dumps, json.loads(spec.body))) + ")"
    elif spec.kind == "regex":
        body = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", spec.body).replace("\n", r"\n") + "/"
    else:
        raise ValueError("a Lark grammar cannot follow the reasoning of this model; write the reasoning into it")
    thought, rules = _thought(tokenizer, CHANNELS if harmony else thinking, inside)
    channel = literal(tokenizer, "<|channel|>final<|message|>") if harmony else ""
    return Spec("lark", "\n".join([f"start: {thought} {channel} {body}", *rules]))


def literal(tokenizer: text.Tokenizer, said: str) -> str:
    """Write text for a Lark grammar: strings, and the ids of special tokens; {index} is a number."""
    special = {t.content: i for i, t in tokenizer.backend.get_added_tokens_decoder().items() if t.special}
    marks = [r"\{index\}", *map(re.escape, sorted(special, key=len, reverse=True))]
    pieces = re.split(f"({'|'.join(marks)})", said)
    write = lambda p: "/[0-9]{1,3}/" if p == "{index}" else f"<[{special[p]}]>" if p in special else json.dumps(p)
    return " ".join(write(p) for p in pieces if p)


def _thought(tokenizer: text.Tokenizer, thinking: Thinking | None, inside: bool) -> tuple[str, list[str]]:
    """What may, or must, stand before the calls."""
    if thinking is None:
        return "", []
    ends, space = literal(tokenizer, thinking.end), " SPACE" if thinking.spaced else ""
    thought = f"/(?s:.*)/ {ends}" if ends.startswith("<[") else "thought"
    rules = [] if ends.startswith("<[") else [f"thought[suffix={ends}]: /(?s:.*)/"]
    rules += [r"SPACE: /[ \n]{0,4}/"] if space else []
    return f"{thought}{space}" if inside else f"({literal(tokenizer, thinking.start)} {thought}{space})?", rules


def _schema(schema: Any, whole: Mapping[str, Any]) -> str:
    """A value of a schema that may refer to definitions of the whole one."""
    shared = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
    schema = {**schema, **shared} if isinstance(schema, Mapping) else schema
    options = {"x-guidance": JSON_OPTIONS} if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**schema, **options} if options else schema)}"


def _properties(schema: Mapping[str, Any]) -> Iterable[tuple[str, Any, bool]]:
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        raise ValueError("parameters: expected a JSON schema with `properties`, an object, and `required`, a list")
    for key, value in properties.items():
        if not re.fullmatch(r"[\w.-]+", key):
            raise ValueError(f"the parameter {key!r} has characters that this model's format of calls cannot write")
        yield key, value, key in required


def _tagged(rule: str, schema: Mapping[str, Any], tags: Tags) -> tuple[str, list[str]]:
    """Arguments in tags: the required ones and any of the others, in the order of the schema.

    Of strings, which stand there without quotes, choices and length are enforced, patterns and formats are not.
    """
    out, rules = [], []
    for i, (key, value, required) in enumerate(_properties(schema)):
        before = ("\n" if tags.value[0] else "") + tags.value[0]
        head = json.dumps(tags.key[0] + key + tags.key[1] + before + tags.newline)
        tail = tags.newline + tags.value[1]
        if isinstance(value, Mapping) and value.get("type") == "string" and "enum" not in value:
            least, most = value.get("minLength", 0), value.get("maxLength", "")
            if not isinstance(least, int) or not (isinstance(most, int) or most == ""):
                raise ValueError(f"the parameter {key!r} has the length {least!r} to {most!r}; expected integers")
            rules.append(f"{rule}_{i}[suffix={json.dumps(tail)}]: /(?s:.){{{least},{most}}}/")
            said = f"{rule}_{i}"
        elif isinstance(value, Mapping) and value.get("type") == "string":
            said = "(" + " | ".join(map(json.dumps, value["enum"])) + ") " + json.dumps(tail)
        else:
            said = f"{_schema(value, schema)} {json.dumps(tail)}"
        out.append(f'({head} {said} "\\n")' + ("" if required else "?"))
    return " ".join(out), rules


def _pythonic(rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Arguments by keyword; JSON's values, which the reader takes too. Rule i writes those from the i-th on."""
    rules, properties = [], list(_properties(schema))
    for lead in ("", ", "):  # rules _f: nothing was written yet; _t: something was
        kind = "t" if lead else "f"
        for i, (key, value, required) in enumerate(properties):
            written = f"{json.dumps(f'{lead}{key}=')} {_schema(value, schema)} {rule}t{i + 1}"
            rules.append(f"{rule}{kind}{i}: {written}" + ("" if required else f" | {rule}{kind}{i + 1}"))
        rules.append(f'{rule}{kind}{len(properties)}: ""')
    return f"{rule}f0", rules
