"""Calls of tools in what models write: the families' formats, any cut into pieces, broken and hostile output."""

import json
import random
import re
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fdel import text
from fdel.serve.engine.reply import Delta
from fdel.serve.server import grammar as structured
from fdel.serve.server import reasoning, scan, tools
from fdel.serve.server.served import ServedModel
from fdel.serve.server.tools import FORMATS, Message, Output

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"type": "array", "items": {"type": "number"}},
            "options": {"type": "object"},
        },
        "required": ["city", "days"],
    },
    "now": {"type": "object", "properties": {}},
    "get-time.utc": {"type": "object", "properties": {"zone": {"type": "string", "enum": ["a", "b c"]}}},
}
NAMES = list(FORMATS)


def fmt(name: str):
    return FORMATS[name]


def plain(message: Message) -> tuple:
    """A message without its ids, which are random."""
    return message.content, message.reasoning, [(c.name, c.arguments) for c in message.calls]


def read(name: str, pieces: Sequence[str], **options) -> Message:
    output = Output(fmt(name), TOOLS, **options)
    deltas = [d for piece in pieces for d in output.push(piece)] + output.finish()
    named = set()
    for delta in deltas:  # a call's name comes first, once, then its arguments
        assert delta.text or delta.kind == "arguments"
        if delta.kind == "call":
            assert delta.index == len(named) and delta.id
            named.add(delta.index)
        elif delta.kind == "arguments":
            assert delta.index == len(named) - 1
    return tools.message(deltas)


def cut(said: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    ends = sorted(rng.randrange(len(said) + 1) for _ in range(rng.randrange(1, 30)))
    return [said[a:b] for a, b in zip([0, *ends], [*ends, len(said)], strict=True)]


# ---- what the families' templates write ----------------------------------------------------------------------------


def python(value) -> str:
    return f"({', '.join(map(python, value))},)" if isinstance(value, list) and value else repr(value)


def as_text(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write(name: str, calls: Sequence[tuple[str, dict]]) -> str:
    """The calls as the chat templates of the families render them."""
    if name == "hermes":
        return "\n".join(
            f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in calls
        )
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)
    if name == "pythonic":
        written = [f"{n}({', '.join(f'{k}={python(v)}' for k, v in a.items())})" for n, a in calls]
        return f"[{', '.join(written)}]" if calls else ""
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    if name == "mistral_v3":
        return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls]) if calls else ""
    if name.startswith("deepseek"):
        v3 = lambda n, a: f"function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```"
        v31 = lambda n, a: f"{n}<｜tool▁sep｜>{json.dumps(a)}"
        body = v3 if name == "deepseek_v3" else v31
        written = [f"<｜tool▁call▁begin｜>{body(n, a)}<｜tool▁call▁end｜>" for n, a in calls]
        join = "\n" if name == "deepseek_v3" else ""
        return f"<｜tool▁calls▁begin｜>{join.join(written)}<｜tool▁calls▁end｜>" if calls else ""
    if name == "qwen3_coder":
        tags = lambda a: "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in a.items())
        return "\n".join(f"<tool_call>\n<function={n}>\n{tags(a)}</function>\n</tool_call>" for n, a in calls)
    if name == "glm4":
        tags = lambda a: "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in a.items())
        return "\n".join(f"<tool_call>{n}\n{tags(a)}</tool_call>" for n, a in calls)
    if name == "kimi_k2":
        begin, args = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
        written = [f"{begin}{n}:{i}{args}{json.dumps(a)}<|tool_call_end|>" for i, (n, a) in enumerate(calls)]
        return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>" if calls else ""
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls
    )


words = st.text(st.sampled_from(list("ab ,:\"'\\{}[]()é😀\n\t<>/=0")), max_size=12)
cities = words.filter(lambda w: w == w.strip("\n"))  # tags cannot tell a newline at the ends from their own
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False, width=32)
leaves = st.none() | st.booleans() | numbers | words
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6)
optional = {"exact": st.booleans(), "where": st.lists(numbers, max_size=3), "options": st.dictionaries(words, values)}
arguments = st.fixed_dictionaries({"city": cities, "days": st.integers()}, optional=optional)
all_calls = st.lists(st.tuples(st.just("weather"), arguments) | st.just(("now", {})), min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(calls=all_calls, seed=st.integers(0, 2**32))
@example(
    calls=[("weather", {"city": "</x>", "days": 1, "options": {"a": {"b": [1, [2, {}], "}]"]}}}), ("now", {})], seed=1
)
def test_calls_in_any_pieces(name: str, calls: list, seed: int) -> None:
    said = write(name, calls)
    before = "" if name in ("llama3_json", "pythonic") else "Let me see.\n"
    if name == "harmony":
        before = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    message = read(name, cut(before + said, seed))
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == calls
    assert (message.content, message.reasoning) == (("", "Let me see.") if name == "harmony" else (before.strip(), ""))
    ids = [c.id for c in message.calls]
    assert len(set(ids)) == len(ids)
    assert plain(read(name, list(before + said))) == plain(message) == plain(read(name, [before + said]))


MARKS = sorted({m for f in FORMATS.values() for m in (f.marker, f.end, f.opener, *f.sections, *f.writes) if m})
MARKS += ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "analysis", " to=functions.now", "<think>",
          "</think>", '{"name": "now"', '"arguments"', ": {}", "now(", "weather", "(city='", "<function=now>",
          "<parameter=city>", "</parameter>", "functions.now:0", "function", "\n", " ", "x", "{", "}", "[", "]", '"',
          "\\", "\\u12", "1e9", ",", "[ARGS]", "<arg_key>"]  # fmt: skip
broken = st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=20)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80)
@given(parts=broken, seed=st.integers(0, 2**32), thinking=st.booleans(), inside=st.booleans())
def test_broken_output(name: str, parts: list, seed: int, thinking: bool, inside: bool) -> None:
    """Nothing raises, and the result does not depend on the pieces."""
    said = "".join(parts)
    options = {"thinking": reasoning.FAMILIES["think"] if thinking else None, "inside": inside}
    whole = plain(read(name, [said], **options))
    assert plain(read(name, list(said), **options)) == whole == plain(read(name, cut(said, seed), **options))


@pytest.mark.parametrize("name", NAMES)
@given(said=st.text(st.sampled_from(list("ab \n\t.,;'é😀!?")), max_size=40), seed=st.integers(0, 99))
def test_text_without_calls_stays(name: str, said: str, seed: int) -> None:
    assert read(name, cut(said, seed)) == Message(said)
    assert "".join(d.text for d in Output(None).push(said)).rstrip() == said.rstrip()


FALLBACK = [
    ("hermes", '<tool_call>{"name": "gone", "arguments": {}}</tool_call>!'),  # no such tool
    ("hermes", '<tool_call>{"name": "now" "arguments": {}}'),
    ("hermes", "a <tool_call> b"),
    ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "now"}'),
    ("hermes", '<tool_call>{"arguments": ' + "[" * 200),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'x {"name": "now", "parameters": {}}'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[note] hello"),
    ("mistral", "[TOOL_CALLS]now{}"),
    ("kimi_k2", "<|tool_call_begin|>now"),
    ("qwen3_coder", "<function=gone>\n</function>"),
    ("harmony", "<|channel|>final"),
]


@pytest.mark.parametrize(("name", "said"), FALLBACK)
def test_broken_call_is_content(name: str, said: str) -> None:
    assert read(name, list(said)) == Message(said)


def test_after_a_broken_call() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = read("hermes", [f'<tool_call>{{"name": {call} and {call}'])
    assert plain(message) == ('<tool_call>{"name":and', "", [("now", "{}"), ("now", "{}")])


def test_cut_off_in_the_arguments() -> None:
    """The name was told: what came of the arguments stays, and is no valid JSON, as from OpenAI."""
    message = read("hermes", list('<tool_call>{"name": "weather", "arguments": {"city": "Par'))
    assert plain(message) == ("", "", [("weather", '{"city": "Par')])


def test_arguments_stream() -> None:
    output = Output(FORMATS["hermes"], TOOLS)
    deltas = output.push('<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    assert [(d.kind, d.text) for d in deltas] == [("call", "weather"), ("arguments", '{"city": "Par')]
    assert [(d.kind, d.text) for d in output.push("is\\n, Fran")] == [("arguments", "is\\n, Fran")]


def test_lenient_values() -> None:
    call = '{"name": "weather", "arguments": {"city": "a\nb\\d\\\'", "days": 1,}, }'
    for wrong, right in [(call.replace(", }", "}"), {"city": "a\nb\\d'", "days": 1})]:
        message = read("hermes", [f"<tool_call>{wrong}"])
        assert json.loads(message.calls[0].arguments) == right
    quoted = read("hermes", ['<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}'])
    assert quoted.calls[0].arguments == '{"a": 1}'


def test_most_calls() -> None:
    said = write("hermes", [("now", {})] * 3)
    assert len(read("hermes", [said], most=1).calls) == 1


def test_ids() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", read("mistral", ["[TOOL_CALLS]now[ARGS]{}"]).calls[0].id)
    assert read("mistral", ["[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"]).calls[0].id == "abcdefghi"
    assert read("kimi_k2", [write("kimi_k2", [("now", {})])]).calls[0].id == "functions.now:0"
    assert re.fullmatch("call_[0-9a-f]{24}", read("hermes", [write("hermes", [("now", {})])]).calls[0].id)


VARIANTS = [
    ("glm4", "<tool_call>weather<arg_key>city</arg_key><arg_value>a b</arg_value></tool_call>"),  # 4.7
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.weather:0 <|tool_call_argument_begin|> {"city": "a b"} <|tool_call_end|>',
    ),
    ("deepseek_v31", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>\n{"city": "a b"}<｜tool▁call▁end｜>'),
    ("qwen3_coder", "<function=weather>\n<parameter=city>a b</parameter>\n</function>"),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a b"}}]'),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "a b"}}'),
    ("pythonic", "<|python_start|>[weather(city='a b')]<|python_end|>"),
    ("harmony", '<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{"city": "a b"}'),
    ("hermes", '<tool_call>{"arguments": {"city": "a b"}, "name": "weather"}'),
]


@pytest.mark.parametrize(("name", "said"), VARIANTS)
def test_variants(name: str, said: str) -> None:
    """Other versions of the families, and what models leave out."""
    assert plain(read(name, list(said))) == ("", "", [("weather", '{"city": "a b"}')])


def test_harmony_channels() -> None:
    said = ("<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final<|message|>It is <b> 12.<|return|>")  # fmt: skip
    message = read("harmony", list(said))
    assert plain(message) == ("I look.It is <b> 12.", "think", [("now", "{}")])


@pytest.mark.parametrize("name", NAMES)
def test_detect(name: str) -> None:
    """From what a template writes around a call."""
    template = write(name, [("now", {}), ("weather", {"city": "a", "days": 1})])
    template += {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}.get(name, "")
    assert tools.detect(template) == name
    assert tools.detect("{{ messages }}") is None


# ---- work ----------------------------------------------------------------------------------------------------------

HOSTILE = ['<tool_call>{"name": "now"}', "[TOOL_CALLS]now[ARGS]{}", "<tool_call>",
           "[[[[", "[TOOL_CALLS][", '<tool_call>{"arguments": [', "<function=weather>\n<parameter=city>",
           "<tool_call>weather\n<arg_key>", "<|tool_call_begin|>functions.now:1",
           "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
           "<|channel|>", "<|start|>assistant<|channel|>commentary to=functions.now<|message|>", "\n", " <",
           '{"name": "now",',
           "[now(", "<think>", "\\", '"', "<tool_call>\n{", '{"name":"now","arguments":{"a":"']  # fmt: skip


def work(name: str, said: str, piece: int) -> int:
    """Count calls of functions, and characters that are copied when text waits."""
    count = 0
    more = scan.Source.more

    def counted(self):
        nonlocal count
        result = yield from more(self)
        count += len(self.text)
        return result

    def profile(frame, event: str, arg) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    output = Output(fmt(name), TOOLS, reasoning.FAMILIES["think"])
    scan.Source.more = counted
    sys.setprofile(profile)
    try:
        for i in range(0, len(said), piece):
            output.push(said[i : i + piece])
        output.finish()
    finally:
        sys.setprofile(None)
        scan.Source.more = more
    return count


def hostile(name: str) -> list[str]:
    """The units that mean something in this format, and some that do in any."""
    marks = (
        ("<|channel|>",)
        if name == "harmony"
        else (fmt(name).marker, fmt(name).leading or "<think>", *fmt(name).sections)
    )
    return [u for u in HOSTILE if any(m in u for m in marks)] + ["\n", " <", "\\"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_work_is_linear(name: str) -> None:
    for unit in hostile(name):
        for piece in (1, 10**6):
            once, twice = (work(name, unit * (n // len(unit)), piece) for n in (1_500, 3_000))
            assert twice <= 2.1 * once + 1_000, (unit, piece, once, twice)


@pytest.mark.parametrize("name", NAMES)
def test_large_hostile_output(name: str) -> None:
    for unit in hostile(name):
        message = tools.parse(Output(fmt(name), TOOLS), unit * (100_000 // len(unit)))
        assert len(message.calls) <= 128


# ---- grammars ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary() -> structured.Vocabulary:
    """A tokenizer of bytes, with the special tokens of all families."""
    special = [
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ]
    special += [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
    ]
    tok = text.train_bpe(["a"], 256 + 14, [*special, "<|tool_call_argument_begin|>"])
    return structured.Vocabulary(tok, tok.backend.get_vocab_size())


SMALL = {
    "weather": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "city": {"type": "string", "maxLength": 3},
            "unit": {"enum": ["C", "F", None]},
            "at": {"$ref": "#/$defs/point"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


CLOSE = [
    "\n</parameter>",
    "</arg_value>",
    "</think>",
    "<|end|>",
]  # ends of free text, which chance never writes


def draw(matcher: structured.Matcher, rng: random.Random, most: int = 400) -> str | None:
    """A random output: plain characters, mostly those that close something."""
    tok, out = matcher.vocabulary.tokenizer, []
    close = {i for i in range(matcher.vocabulary.width) if text.token_bytes(tok, i) in (b'"', b"}", b"]", b"<", b")")}
    printable = {i for i in range(matcher.vocabulary.width) if b" " <= text.token_bytes(tok, i) < b"\x7f"}
    while not matcher.done and len(out) < most:
        ids = np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))[0].tolist()
        ids = [i for i in ids if i == 0 or i in printable] or ids
        good = [i for i in ids if i in close] if rng.random() < 0.5 else ids
        closing = text.encode(tok, rng.choice(CLOSE)) if len(ids) > 50 and rng.random() < 0.3 else []
        if not closing or matcher.state.validate_tokens(closing) < len(closing):
            closing = [0 if 0 in ids and rng.random() < 0.7 else rng.choice(good or ids)]
        for token in closing:
            matcher.commit(token)
        out += closing
    return text.decode(tok, [i for i in out if i], skip_special=False) if matcher.done else None


@pytest.mark.parametrize(("name", "thinking"), [*((n, False) for n in NAMES), ("hermes", True), ("mistral", True)])
def test_grammar_makes_calls(name: str, thinking: bool, vocabulary: structured.Vocabulary) -> None:
    """What random logits write under the grammar is calls of the tools, with arguments of their schemas."""
    family = reasoning.FAMILIES["think"] if thinking else None
    spec = tools.grammar(fmt(name), SMALL, vocabulary.tokenizer, thinking=family)
    rng, cache, complete, names = random.Random(0), structured.Cache(), 0, set()
    for _ in range(10):
        said = draw(structured.compile(vocabulary, spec, cache), rng)
        if said is None:
            continue
        message = tools.parse(Output(fmt(name), SMALL, family), said)
        assert message.calls and not message.content, said
        for call in message.calls:
            jsonschema.validate(json.loads(call.arguments), SMALL[call.name])
            names.add(call.name)
        complete += 1
    assert complete >= 5 and names == {"weather", "now"}


@pytest.mark.parametrize("name", NAMES)
def test_grammar_of_one_call(name: str, vocabulary: structured.Vocabulary) -> None:
    spec = tools.grammar(fmt(name), {"now": SMALL["now"]}, vocabulary.tokenizer, several=False)
    for seed in range(3):
        said = draw(structured.compile(vocabulary, spec), random.Random(seed))
        message = tools.parse(Output(fmt(name), SMALL), said)
        assert [(c.name, c.arguments) for c in message.calls] == [("now", "{}")] and not message.content


@pytest.mark.parametrize("name", NAMES)
def test_grammar_of_strict_tools(name: str, vocabulary: structured.Vocabulary) -> None:
    """Text is free, a valid call is allowed, and one with wrong arguments is not."""
    tok = vocabulary.tokenizer
    compiled = structured.compile(vocabulary, tools.grammar(fmt(name), SMALL, tok, required=False))

    def accepted(said: str) -> int:
        """Characters that the grammar takes; all of them and an end: one more."""
        matcher = compiled.copy()
        ids = [*text.encode(tok, said), 0]
        return matcher.state.validate_tokens(ids)

    size = lambda said: len(text.encode(tok, said))
    free = "Hello, {world}!"
    before = "" if name == "harmony" or fmt(name).leading else "Hi. "
    said = f"<|channel|>final<|message|>{free}" if name == "harmony" else free
    assert accepted(said) == size(said) + 1
    right, wrong = (before + write(name, [("weather", {"city": city, **more})]) for city, more in
                    [("abc", {}), ("abcd", {"days": 10})])  # fmt: skip
    right = right.replace("'", '"')  # values are JSON's, in Python too
    matcher = compiled.copy()
    took = matcher.state.try_consume_tokens(text.encode(tok, right))
    assert took == size(right.removesuffix("<|call|>")) and matcher.state.is_accepting()
    assert accepted(wrong) < size(wrong)


STRUCTURES = [
    (structured.json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                             "additionalProperties": False}), lambda said: isinstance(json.loads(said)["a"], bool)),
    (structured.Spec("regex", "[a-c]{2}/\\/[0-9]"), lambda said: re.fullmatch("[a-c]{2}//[0-9]", said)),
    (structured.choice(["yes", "a/b"]), lambda said: said in ("yes", "a/b")),
]  # fmt: skip


@pytest.mark.parametrize("harmony", [False, True])
@pytest.mark.parametrize("i", range(len(STRUCTURES)))
def test_structured_answer_after_reasoning(i: int, harmony: bool, vocabulary: structured.Vocabulary) -> None:
    spec, check = STRUCTURES[i]
    family = None if harmony else reasoning.FAMILIES["think"]
    whole = tools.answer(spec, vocabulary.tokenizer, thinking=family, harmony=harmony)
    thoughts = 0
    for seed in range(8):
        said = draw(structured.compile(vocabulary, whole), random.Random(seed))
        if said is not None:
            message = tools.parse(Output(FORMATS["harmony"] if harmony else None, {}, family), said)
            assert check(message.content), said
            thoughts += bool(message.reasoning)
    assert thoughts
    inside = tools.answer(spec, vocabulary.tokenizer, thinking=reasoning.FAMILIES["think"], inside=True)
    matcher = structured.compile(vocabulary, inside)
    assert matcher.state.try_consume_tokens(text.encode(vocabulary.tokenizer, "so: {}</think>\n\n")) == 16
    assert tools.answer(spec, vocabulary.tokenizer) is spec


def test_grammar_refuses() -> None:
    tok = text.train_bpe(["a"], 257)
    with pytest.raises(ValueError, match="no tools"):
        tools.grammar(FORMATS["hermes"], {}, tok)
    with pytest.raises(ValueError, match="the parameter 'a b'"):
        tools.grammar(FORMATS["glm4"], {"f": {"properties": {"a b": {}}}}, tok)
    for wrong in ({"properties": [1]}, {"required": 1}, {"properties": {"a": {"type": "string", "maxLength": "}/"}}}):
        with pytest.raises(ValueError, match="expected"):
            tools.grammar(FORMATS["qwen3_coder"], {"f": wrong}, tok)
    with pytest.raises(ValueError, match="Lark"):
        tools.answer(structured.Spec("lark", "start: A"), tok, harmony=True)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("name", [*NAMES, "thinking"])
def test_markers_are_what_the_tokenizer_says(name: str, special: bool, whole: bool) -> None:
    """Calls and reasoning are found whether the markers are special tokens or text, in one delta or token by token."""
    thinking = reasoning.FAMILIES["think"] if name == "thinking" else None
    syntax = fmt("hermes" if thinking else name)
    said = write("hermes" if thinking else name, [("weather", {"city": "Rome", "days": 2})])
    said = f"<think>warm</think>{said}" if thinking else said
    marks = re.findall(r"<\|[^|>]+\|>|<｜[^｜>]+｜>|</?(?:tool_call|think|arg_key|arg_value)>|\[[A-Z_]+\]", said)
    tok = text.train_bpe(["a"], 256 + 30, ["<|endoftext|>", *(dict.fromkeys(marks) if special else ())])
    engine = SimpleNamespace(eos=(0,))
    specials = tuple(tok.backend.id_to_token(i) for i in tok.special_ids)
    served = SimpleNamespace(
        tokenizer=tok,
        engine=engine,
        syntax=syntax,
        thinking=thinking,
        encoder=SimpleNamespace(specials=specials),
        format=name,
    )
    tool = SimpleNamespace(name="weather", parameters=TOOLS["weather"])
    asked = SimpleNamespace(tools=[tool], callable=["weather"], parallel=True)
    reader = ServedModel.reader(served, asked, False)
    ids, words = tok.backend.encode(said).ids, text.Detokenizer(tok)
    for cut in [ids] if whole else [[i] for i in ids]:
        words, shown = text.step(words, cut)
        reader.push(Delta(cut, shown, None))
    reader.push(Delta([0], text.flush(words), "stop"))
    found = reader.message()
    assert [(c.name, json.loads(c.arguments)) for c in found.calls] == [("weather", {"city": "Rome", "days": 2})]
    assert found.content.strip() == "" and found.reasoning == ("warm" if thinking else "")
