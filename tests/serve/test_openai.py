"""The protocol: what requests may say, and answers that clients read; the oracles are the openai package and jsonschema."""

import base64
import copy
import json
import typing

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdel import text
from fdel.serve.server import openai
from fdel.serve.server.openai import APIError, Limits, body, responses
from fdel.serve.server.openai.schema import SCHEMAS
from fdel.serve.server.openai.tables import requests
from fdel.serve.server.tools import Call, Delta, Message

client = pytest.importorskip("openai", reason="the oracle")
pydantic = pytest.importorskip("pydantic")

LIMITS = Limits(vocab=1000, context=512)
FUNCTION = {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOL = {"type": "function", "function": FUNCTION}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
EMBED = {"model": "m", "input": "hi"}
RESPOND = {"model": "m", "input": "hi"}
SCORE = {"model": "m", "text_1": "a", "text_2": ["b", "c"]}
RERANK = {"model": "m", "query": "a", "documents": ["b", "c"]}
PARSE = {
    "chat": (openai.parse_chat, CHAT),
    "text": (openai.parse_completion, TEXT),
    "embed": (openai.parse_embeddings, EMBED),
    "respond": (responses.parse, RESPOND),
    "score": (openai.parse_score, SCORE),
    "rerank": (openai.parse_rerank, RERANK),
    "tokenize": (openai.parse_tokenize, {"prompt": "hi"}),
    "detokenize": (openai.parse_detokenize, {"tokens": [1]}),
}


def parse(kind: str, **change: object):
    """Parse a request of this kind with some fields changed (absent if the value is ...)."""
    function, base = PARSE[kind]
    given = {k: v for k, v in (base | change).items() if v is not ...}
    return function(openai.load(json.dumps(given).encode()), LIMITS)


def refused(kind: str, **change: object) -> APIError:
    with pytest.raises(APIError) as e:
        parse(kind, **change)
    error = e.value
    assert error.status == 400 and error.type == "invalid_request_error" and len(error.message) < 600
    jsonschema.validate(body.error(error), SCHEMAS["error"])
    return error


def valid(kind: str, value: dict) -> dict:
    jsonschema.validate(value, SCHEMAS[kind])
    return json.loads(body.dump(value))


# ---- bodies of requests --------------------------------------------------------------------------------------------

BAD = {
    b"": "not JSON",
    b"{": "not JSON",
    b"[1]": "a list; expected an object",
    b'"a"': "a string; expected an object",
    b"null": "null; expected an object",
    b'\xef\xbb\xbf{"a": 1}': "not JSON",
    b'{"a": "\xff"}': "not UTF-8, at byte 7",
    b'{"a": NaN}': "NaN, which is not JSON",
    b'{"a": -Infinity}': "-Infinity, which is not JSON",
    b'{"a": 1e999}': "the number 1e999, which is too large",
    b'{"a": ' + b"9" * 5000 + b"}": "an integer of 5000 digits",
    b'{"a": "\\ud800"}': "lone surrogate",
    b'{"\\udfff": 1}': "lone surrogate",
    b'{"a": 1, "b": {"a": 1, "a": 2}}': "key 'a' twice",
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}": "nested too deep",
    b"[" * 200_000: "nested too deep",
    b'{"a":' * 50_000: "nested too deep",
    b'{"a": 1} x': "not JSON",
}


@pytest.mark.parametrize("raw", BAD, ids=lambda raw: raw[:20].decode("latin-1"))
def test_bad_bodies(raw: bytes) -> None:
    with pytest.raises(APIError, match=BAD[raw]) as e:
        openai.load(raw)
    assert e.value.status == 400


def test_good_bodies() -> None:
    assert openai.load(b'{"a": "\\ud83d\\ude00\\u0000", "b": 1e3, "c": [-18446744073709551615]}') == {
        "a": "😀\0", "b": 1e3, "c": [-(2**64) + 1]
    }  # fmt: skip
    assert openai.load(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")


INTEGERS = [-(2**63) - 1, 2**63, 2**64, True, "1", 1.5, [], {}]
# kind, parameter, values that are refused besides
WRONG = [
    ("chat", "n", [0, -1, 129, 10**9]),
    ("chat", "max_tokens", [0, -1]),
    ("chat", "max_completion_tokens", [0, -1]),
    ("chat", "min_tokens", [-1, 2**31]),
    ("chat", "top_logprobs", [-1, 21, 10**6]),
    ("chat", "seed", []),
    ("chat", "top_k", [-2, 2**31]),
    ("text", "n", [0, -1, 129, 2**31]),
    ("text", "max_tokens", [-1]),
    ("text", "logprobs", [-1, 21, 2**31]),
    ("text", "best_of", [0, -1, 129, 2**31]),
    ("embed", "dimensions", [0, -1, 2**31]),
    ("respond", "max_output_tokens", [0, -1]),
    ("respond", "top_logprobs", [-1, 21]),
    ("rerank", "top_n", [0, -1, 2**31]),
]
NUMBERS = [("temperature", -0.1, 2.1), ("top_p", 0, 1.1), ("min_p", -0.1, 1.1), ("repetition_penalty", 0, 101),
           ("presence_penalty", -2.1, 2.1), ("frequency_penalty", -2.1, 2.1)]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "more"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_every_integer(kind: str, name: str, more: list) -> None:
    for value in [*INTEGERS, *more]:
        assert refused(kind, **{name: value}).param == name, value


@pytest.mark.parametrize(("name", "low", "high"), NUMBERS)
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_number(kind: str, name: str, low: float, high: float) -> None:
    for value in (low, high, -(2**63), 2**63, 1e300, True, "1", [], {}):
        assert refused(kind, **{name: value}).param == name, value


def tool(**function: object) -> dict:
    return {"type": "function", "function": function}


def called(arguments: str) -> dict:
    return {"id": "a", "function": {"name": "f", "arguments": arguments}}


IDS = [[1000], [1001], [-1], [2**31], [2**63], [True], [1.0], ["1"], "1", 1, {}]
REFUSED = [
    ("chat", "messages", [[], {}, "hi", [{}], [{"role": "bot", "content": ""}], [{"role": "user"}],
                          [{"role": "user", "content": []}], [{"role": "user", "content": 1}],
                          [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a"}}]}],
                          [{"role": "user", "content": "a", "x": 1}], [{"role": "tool", "content": "a"}],
                          [{"role": "assistant"}], [{"role": "assistant", "tool_calls": []}],
                          [{"role": "assistant", "tool_calls": [called("[1]")]}],
                          [{"role": "assistant", "tool_calls": [called("{")]}],
                          [{"role": "assistant", "tool_calls": [called('{"a": NaN}')]}],
                          [{"role": "function", "content": "a", "name": "f"}], [CHAT["messages"][0]] * 4097]),
    ("chat", "stop", ["", [""], ["a"] * 17, ["a"] * 10_000, "a" * 1025, 1, [1], {}]),
    ("chat", "logit_bias", [{"1000": 1}, {"-1": 1}, {"a": 1}, {"1": 101}, {"1": True}, {"1.0": 1}, {"9" * 30: 1}, [1],
                            {str(i): 1 for i in range(301)}]),
    ("chat", "stop_token_ids", [*IDS, [1] * 33]),
    ("chat", "allowed_token_ids", [*IDS, [], [1] * 1001]),
    ("text", "prompt", ["", [], [""], [[]], [1000], [-1], [[1], [1000]], [1, "a"], ["a", 1], [True], 1, {},
                        [1] * (2**16 + 1), ["a"] * 257, [[1.0]]]),
    ("text", "suffix", ["a"]),
    ("embed", "input", ["", [], [""], [[]], [1000], ["a"] * 2049, {}]),
    ("embed", "encoding_format", ["int8", 1]),
    ("score", "text_2", ["", [], [""], [1]]),
    ("rerank", "documents", [[], [""], "a", [1], ["a"] * 2049]),
    ("detokenize", "tokens", IDS),
    ("tokenize", "prompt", [1, ["a"], {}]),
    ("chat", "stream", [1, "true", 0]),
    ("chat", "logprobs", [1, "true"]),
    ("chat", "model", ["", 1, "m" * 257]),
    ("chat", "tools", [[], {}, [{}], [{"type": "function"}], [{"type": "web_search"}], [tool()], [tool(name="a b")],
                       [tool(name="")], [TOOL, TOOL], [TOOL] * 129, [tool(name="f", parameters={"type": "array"})],
                       [tool(name="f", parameters={"properties": []})], [tool(name="f", parameters={"required": "a"})],
                       [tool(name="f", parameters={"properties": {"a": 1}})]]),
    ("chat", "tool_choice", ["auto", "required", "any", 1, {}, {"type": "function"},
                             {"type": "function", "function": {"name": "now"}}]),
    ("chat", "response_format", ["json", {}, {"type": "xml"}, {"type": "json_schema"},
                                 {"type": "json_schema", "json_schema": {"name": "a"}},
                                 {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}]),
    ("chat", "guided_choice", [[], [""], [1], "a", ["a" * 4096] * 300]),
    ("chat", "guided_json", ["{", "[1]", 1, {"a": "a" * 2**20}]),
    ("chat", "guided_regex", [1, "a" * (2**20 + 1)]),
    ("chat", "structured_outputs", [{"json": {}, "regex": "a"}, {"x": 1}]),
    ("chat", "stream_options", [{"include_usage": True}, {}]),  # without stream
    ("chat", "store", [True, "false", 0]),
    ("chat", "modalities", [["audio"], "text"]),
    ("chat", "chat_template", ["{{ messages }}"]),
    ("chat", "chat_template_kwargs", [{"tokenize": False}, {"messages": []}, {"chat_template": ""}, {"tools": []},
                                      {"add_generation_prompt": False}, {"a b": 1}, {"self": 1}, 1]),
    ("chat", "cache_salt", ["", "a b", "a" * 65, "é", 1]),
    ("chat", "reasoning_effort", ["huge", 1]),
    ("chat", "prediction", [{"type": "content", "content": "a"}]),
    ("chat", "functions", [[FUNCTION]]),
    ("respond", "input", ["", [], [{}], [{"type": "image"}], [{"role": "user", "content": [{"type": "input_image"}]}],
                          [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "1"}]]),
    ("respond", "tools", [[{"type": "mcp", "server_url": "http://169.254.169.254"}], [{"type": "function"}]]),
    ("respond", "previous_response_id", ["resp_1"]),
    ("respond", "store", [True]),
    ("respond", "background", [True]),
    ("respond", "include", [["reasoning.encrypted_content"], ["file_search_call.results"]]),
    ("respond", "truncation", ["auto"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "values"), REFUSED, ids=[f"{k}-{n}" for k, n, _ in REFUSED])
def test_refused(kind: str, name: str, values: list) -> None:
    for value in values:
        assert (refused(kind, **{name: value}).param or name).startswith(name), value


@pytest.mark.parametrize("kind", PARSE)
def test_unknown_and_missing_parameters(kind: str) -> None:
    error = refused(kind, foo=1)
    assert error.param == "foo" and error.code == "unknown_parameter"
    for name in PARSE[kind][1]:
        error = refused(kind, **{name: ...})
        assert error.param == name and error.code == "missing_required_parameter"
        assert refused(kind, **{name: None}).param == name


COMBINED = [
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ("chat", {"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ("chat", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
    ("text", {"n": 3, "best_of": 2}, "best_of"),
    ("text", {"best_of": 2, "stream": True}, "best_of"),
    ("text", {"max_tokens": 0}, "max_tokens"),
    ("text", {"prompt": ["a"] * 100, "n": 3}, "prompt"),
    ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
]


@pytest.mark.parametrize(("kind", "change", "param"), COMBINED)
def test_combinations(kind: str, change: dict, param: str) -> None:
    assert refused(kind, **change).param == param


TABLE = {"text": "completion", "embed": "embeddings", "respond": "response"}
KEYS = ["type", "role", "content", "function", "name", "schema", "json_schema", "tools", "mode", "parameters", "1"]


@pytest.mark.slow
@settings(max_examples=120)
@given(st.data())
def test_no_value_breaks_the_parser(data: st.DataObject) -> None:
    """Whatever stands in a field: a record, or an APIError."""
    kind = data.draw(st.sampled_from(list(PARSE)))
    names = list(requests(LIMITS)[TABLE.get(kind, kind)].schema["properties"])
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
        | st.sampled_from(["function", "user", "json_schema", "auto", "text"]),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(KEYS), v),
    )  # fmt: skip
    change = data.draw(st.dictionaries(st.sampled_from(names), json_values, max_size=4))
    function, base = PARSE[kind]
    try:
        function(base | change, LIMITS)
    except APIError as e:
        assert e.status == 400 and e.param is not None


def test_every_parameter_of_the_protocol_is_known() -> None:
    """Implemented or refused by name: what the official client can send is in the tables."""
    from openai.types import completion_create_params as text_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params as response_params

    known = lambda t: set(typing.get_type_hints(t))
    listed = lambda kind: set(requests(LIMITS)[kind].schema["properties"])
    assert known(chat_params.CompletionCreateParamsStreaming) <= listed("chat")
    assert known(text_params.CompletionCreateParamsStreaming) <= listed("completion")
    assert known(response_params.ResponseCreateParamsStreaming) <= listed("response")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARSE)
def test_schemas_of_requests(kind: str) -> None:
    """What is taken is valid by the published schema; most of what is refused is not."""
    schema = requests(LIMITS)[TABLE.get(kind, kind)].schema
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(PARSE[kind][1], schema)
    wrong = [(n, v) for k, n, values in REFUSED if k == kind for v in values]
    wrong += [(n, v) for k, n, values in WRONG if k == kind for v in [*INTEGERS, *values]]
    validator = jsonschema.Draft202012Validator(schema)
    invalid = [not validator.is_valid(PARSE[kind][1] | {name: value}) for name, value in wrong]
    assert not wrong or sum(invalid) / len(invalid) > 0.7
    assert not validator.is_valid(PARSE[kind][1] | {"foo": 1})


# ---- records -------------------------------------------------------------------------------------------------------


def test_chat_defaults_are_openais() -> None:
    chat = parse("chat", temperature=None, stream=None)
    s = chat.sampling
    assert (s.temperature, s.top_p, s.n, s.top_k, s.seed, s.logprobs) == (1.0, 1.0, 1, 0, None, 0)
    assert s.max_tokens >= 10**9 and openai.cap_max_tokens(s, 500, 512).max_tokens == 12
    assert not chat.stream and not chat.logprobs and chat.tool_choice == "none" and chat.grammar is None
    assert chat.messages == [{"role": "user", "content": "hi"}]


def test_chat_parameters() -> None:
    chat = parse(
        "chat", max_tokens=5, max_completion_tokens=7, temperature=0, top_p=0.5, n=3, stop=["a", "b"], seed=-1,
        logprobs=True, top_logprobs=2, logit_bias={"5": -100, "6": 1}, presence_penalty=1, stream=True,
        stream_options={"include_usage": True}, min_tokens=2, top_k=-1, stop_token_ids=[9], reasoning_effort="low",
        user="u", chat_template_kwargs={"thinking": True},
    )  # fmt: skip
    s = chat.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.n, s.stops, s.seed) == (7, 0.0, 0.5, 3, ("a", "b"), 2**64 - 1)
    assert (s.logprobs, s.logit_bias, s.presence_penalty, s.min_tokens, s.top_k) == (2, {5: -100.0, 6: 1.0}, 1, 2, 0)
    assert (
        chat.stream and chat.usage and chat.logprobs and chat.template == {"thinking": True, "reasoning_effort": "low"}
    )
    assert parse("chat", max_tokens=10**18).sampling.max_tokens == 2**31 - 1


def test_messages_for_templates() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    given_ = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ]
    system, assistant, tool = parse("chat", messages=given_).messages
    assert system == {"role": "system", "content": "a\nb"}
    assert assistant["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
    assert tool == given_[2]


def test_tool_choice() -> None:
    other = {"type": "function", "function": {"name": "then", "strict": True}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "then"}}]}
    cases = [(None, "auto", ("now", "then")), ("none", "none", ()), ("required", "required", ("now", "then")),
             ({"type": "function", "function": {"name": "now"}}, "named", ("now",)),
             ({"type": "allowed_tools", "allowed_tools": allowed}, "required", ("then",))]  # fmt: skip
    for chosen, mode, names in cases:
        chat = parse("chat", tools=[TOOL, other], tool_choice=chosen, parallel_tool_calls=False)
        assert (chat.tool_choice, chat.callable, chat.parallel) == (mode, names, False)
        assert [t.spec for t in chat.tools] == ([] if mode == "none" else [TOOL, other])
    assert [t.strict for t in chat.tools] == [False, True] and chat.tools[0].parameters == FUNCTION["parameters"]


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SHAPES = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "json_schema",
        SCHEMA,
    ),
    ({"response_format": {"type": "json_object"}}, "json_object", None),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"guided_grammar": "start: A"}, "lark", "start: A"),
]


@pytest.mark.parametrize(("change", "kind", "want"), SHAPES)
@pytest.mark.parametrize("request_kind", ["chat", "text"])
def test_structures(request_kind: str, change: dict, kind: str, want: object) -> None:
    if request_kind == "text" and "response_format" in change:
        assert refused("text", **change).param == "response_format"
        return
    spec = parse(request_kind, **change).grammar
    assert spec.kind == kind
    if want is not None:
        assert (spec.body if isinstance(want, str) else json.loads(spec.body)) == want
    if want is SCHEMA:
        assert list(json.loads(spec.body)["properties"]) == ["b", "a"]


def test_completions() -> None:
    request = parse("text", prompt=["a", [1, 2]], n=2, best_of=3, echo=True, logprobs=0, max_tokens=0)
    assert request.prompts == ["a", [1, 2]] and request.scored and request.logprobs == 0
    assert (request.sampling.n, request.sampling.best_of, request.sampling.prompt_logprobs) == (2, 3, 0)
    assert parse("text", prompt=[1, 2]).prompts == [[1, 2]] and parse("text").sampling.max_tokens == 16
    assert (
        parse("text", logprobs=5).sampling.prompt_logprobs is None and parse("text", logprobs=5).sampling.logprobs == 5
    )


def test_the_rest() -> None:
    asked = {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}
    assert parse("embed", **asked) == openai.Pooled("m", ["a", "b"], base64=True, dimensions=8, labels=[])
    assert parse("embed", dimensions=None) == openai.Pooled("m", ["hi"], labels=[])
    assert parse("score").pairs == [("a", "b"), ("a", "c")]
    assert parse("rerank", top_n=1).top == 1 and parse("rerank").pairs == [("a", "b"), ("a", "c")]
    assert parse("tokenize", add_special_tokens=False) == ("hi", False)
    assert openai.parse_tokenize(CHAT, LIMITS).messages == CHAT["messages"]
    assert parse("detokenize", tokens=[]) == []


def test_context_length() -> None:
    s = parse("chat", max_tokens=10, min_tokens=4).sampling
    assert openai.cap_max_tokens(s, 508, 512).max_tokens == 4
    for prompt in (509, 512, 10**9):
        with pytest.raises(APIError, match=f"context length is 512 tokens; the prompt has {prompt}, so no room") as e:
            openai.cap_max_tokens(s, prompt, 512)
        assert e.value.code == "context_length_exceeded" and e.value.status == 400


# ---- answers -------------------------------------------------------------------------------------------------------

META = body.Meta("chatcmpl-1", 123, "m", usage=True)
USED = body.Usage(5, 7, cached=2, reasoning=1)
CALLS = (Call("call_1", "now", '{"a": 1}'), Call("call_2", "now", "{}"))


@pytest.fixture(scope="module")
def tok() -> text.Tokenizer:
    return text.train_bpe(["the fox é😀"], 270)


def strict(model: type, value: dict):
    """Validate with the official client's types, without conversions."""
    parsed = model.model_validate(value, strict=True)
    assert json.loads(parsed.model_dump_json(exclude_unset=True)) == value
    return parsed


MESSAGES = [Message("hi é"), Message(), Message("", "thought", CALLS), Message("a", "b"), Message("a", "", CALLS[:1])]


@pytest.mark.parametrize("message", MESSAGES)
def test_chat_body(message: Message, tok: text.Tokenizer) -> None:
    from openai.types.chat import ChatCompletion

    rows = body.chat_logprobs(tok, [5, 6], [-0.5, -np.inf], [{5: -0.5, 6: -1.0}, {7: -0.1, 6: -9.0}], 1)
    choices = [(message, body.finish("stop", bool(message.calls), "auto"), lp) for lp in (None, rows)]
    value = valid("chat", body.chat(META, choices, USED))
    parsed = strict(ChatCompletion, value)
    first = parsed.choices[0].message
    assert first.content == (message.content or (None if message.calls else ""))
    assert [(c.id, c.function.name, c.function.arguments) for c in first.tool_calls or []] == [
        (c.id, c.name, c.arguments) for c in message.calls
    ]
    assert {"content", "refusal", "role"} <= set(value["choices"][0]["message"]) and "logprobs" in value["choices"][0]
    assert [c.index for c in parsed.choices] == [0, 1] and parsed.usage.total_tokens == 12
    assert parsed.usage.prompt_tokens_details.cached_tokens == 2
    second = parsed.choices[1].logprobs.content
    assert [(t.logprob, len(t.top_logprobs)) for t in second] == [(-0.5, 1), (-9999.0, 1)]
    assert bytes(second[0].bytes) == text.token_bytes(tok, 5)


def test_finish_reasons() -> None:
    table = {("stop", True, "auto"): "tool_calls", ("stop", True, "required"): "tool_calls",
             ("stop", True, "named"): "stop", ("length", True, "auto"): "length", ("stop", False, "auto"): "stop",
             ("length", False, "none"): "length"}  # fmt: skip
    assert {k: body.finish(*k) for k in table} == table


def chat_stream(usage: bool) -> list[dict]:
    """Two outputs in turns, one of them with reasoning and two calls."""
    m = body.Meta("chatcmpl-1", 123, "m", usage)
    one = [Delta("reasoning", "hm"), Delta("content", "a"), Delta("content", "b"), Delta("call", "now", 0, "call_1"),
           Delta("arguments", '{"a"', 0), Delta("arguments", ": 1}", 0), Delta("call", "now", 1, "call_2"),
           Delta("arguments", "{}", 1)]  # fmt: skip
    two = [Delta("content", piece) for piece in "é 😀"]
    chunks = [body.chat_chunk(m, i, body.FIRST) for i in (0, 1)]
    for i in range(len(one)):
        chunks.append(body.chat_chunk(m, 0, body.chat_delta(one[i])))
        chunks += [body.chat_chunk(m, 1, body.chat_delta(two[i]))] if i < len(two) else []
    chunks += [body.chat_chunk(m, 1, {}, "stop"), body.chat_chunk(m, 0, {}, "tool_calls")]
    return chunks + ([body.usage_chunk(m, USED)] if usage else [])


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream(usage: bool) -> None:
    """The official client's accumulator builds the messages; frames are what its decoder reads."""
    from openai._streaming import SSEDecoder
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    raw = b"".join(body.sse(chunk) for chunk in chat_stream(usage)) + body.PING + body.DONE
    events = list(SSEDecoder().iter_bytes(iter([raw[:100], raw[100:]])))
    assert events[-1].data == "[DONE]"
    state, ends = ChatCompletionStreamState(), []
    for i, event in enumerate(events[:-1]):
        value = valid("chat_chunk", json.loads(event.data))
        state.handle_chunk(strict(ChatCompletionChunk, value))
        ends += [c["finish_reason"] for c in value["choices"] if c["finish_reason"]]
        last = usage and i == len(events) - 2
        assert ("usage" in value) == usage and bool(value.get("usage")) == last == (not value["choices"])
    assert ends == ["stop", "tool_calls"]
    final = state.get_final_completion()
    first, second = (c.message for c in final.choices)
    assert (first.content, second.content, first.reasoning_content) == ("ab", "é 😀", "hm")
    assert [(c.id, c.function.name, c.function.arguments) for c in first.tool_calls] == [
        ("call_1", "now", '{"a": 1}'), ("call_2", "now", "{}")
    ]  # fmt: skip
    assert (final.usage.completion_tokens if usage else 7) == 7


def test_errors_for_clients() -> None:
    value = valid("error", body.error(APIError("no", param="n", code="c", status=404)))
    assert value == {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}}
    assert body.sse({"a": "b\nc\ud800"}) == b'data: {"a":"b\\nc?"}\n\n'
    assert body.sse({"type": "x"}, "x").startswith(b"event: x\ndata: {")


def test_completion_body(tok: text.Tokenizer) -> None:
    from openai.types import Completion

    ids = text.encode(tok, "the fox é😀")
    logprobs = [None, *np.linspace(-1, -3, len(ids) - 1).tolist()]
    top: list[dict] = [{}]
    for i, (t, lp) in enumerate(zip(ids[1:], logprobs[1:], strict=True)):
        top.append({3: -0.5, t: lp} if i % 2 else {t: lp, 3: lp - 1})
    rows = body.completion_logprobs(tok, ids, logprobs, top, 1)
    choices = [body.completion_choice(0, "the fox é😀", "length", rows), body.completion_choice(1, "", "stop")]
    value = valid("completion", body.completion(META, choices, USED))
    given_ = value["choices"][0]["logprobs"]
    assert (
        given_["token_logprobs"][0] is None and given_["top_logprobs"][0] is None and len(given_["tokens"]) == len(ids)
    )
    given_["token_logprobs"][0], given_["top_logprobs"][0] = (
        0.0,
        {},
    )  # the client's types lack the null that OpenAI sends
    legacy = strict(Completion, value).choices[0].logprobs
    # As lm_eval asks whether a token is the likeliest: by equality of floats.
    greedy = [
        lp == max(best.values()) for lp, best in zip(legacy.token_logprobs[1:], legacy.top_logprobs[1:], strict=True)
    ]
    assert greedy == [i % 2 == 0 for i in range(len(ids) - 1)]
    assert all(len(best) <= 2 for best in legacy.top_logprobs[1:])
    assert legacy.text_offset[0] == 0 and legacy.text_offset == sorted(legacy.text_offset)
    said, state = "", text.Detokenizer(tok)
    for token, offset in zip(ids, legacy.text_offset, strict=True):
        assert offset == len(said) and "the fox é😀".startswith(said)
        state, more = text.step(state, [token])
        said += more
    chunk = body.completion(META, [body.completion_choice(0, "a", None)], None)
    strict(
        Completion, valid("completion_chunk", chunk) | {"choices": [chunk["choices"][0] | {"finish_reason": "stop"}]}
    )
    valid("completion_chunk", body.usage_chunk(META, USED, "text_completion"))
    only = body.completion_logprobs(tok, [5], [-1.0], [], 0, offset=3)
    assert only["top_logprobs"] == [{only["tokens"][0]: -1.0}] and only["text_offset"] == [3]


def test_embeddings_body() -> None:
    from openai.types import CreateEmbeddingResponse

    vectors = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    plain = strict(CreateEmbeddingResponse, valid("embeddings", body.embeddings("m", list(vectors), False, 9)))
    assert np.array_equal(np.array([d.embedding for d in plain.data], np.float32), vectors)
    coded = valid("embeddings", body.embeddings("m", list(vectors), True, 9))
    decoded = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in coded["data"]]
    assert np.array_equal(decoded, vectors) and coded["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_other_bodies(tok: text.Tokenizer) -> None:
    from openai.types import Model

    listed = valid(
        "models", {"object": "list", "data": [body.model("a/b", 12.5), body.model("lora", 13, parent="a/b")]}
    )
    assert [strict(Model, m).id for m in listed["data"]] == ["a/b", "lora"]
    valid("scores", body.scores(META, [0.5, -1.0], 9))
    ranked = valid("ranking", body.ranking(META, [0.1, 0.9, 0.9, 0.2], ["a", "b", "c", "d"], 3, 9))
    assert [(r["index"], r["document"]["text"]) for r in ranked["results"]] == [(1, "b"), (2, "c"), (3, "d")]
    assert "document" not in valid("ranking", body.ranking(META, [0.1], None, 9, 9))["results"][0]
    valid("detokenized", {"prompt": "a"})
    info = json.loads(body.dump(body.tokenizer_info(tok)))
    assert (
        info["eos_token"] == "<|endoftext|>"
        and info["eos_token_id"] == 0
        and info["vocab_size"] == tok.backend.get_vocab_size()
    )


# ---- the Responses API ---------------------------------------------------------------------------------------------


def test_response_request() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "what time?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"a": 1}', "id": "fc_1",
         "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "12"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "It is 12.", "annotations": []}]},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    items[5]["content"][0].pop("annotations")
    flat = {"type": "function"} | FUNCTION
    request = parse("respond", input=items, instructions="sys", tools=[flat], max_output_tokens=9,
                    tool_choice={"type": "function", "name": "now"}, reasoning={"effort": "low"},
                    metadata={"a": "b"})  # fmt: skip
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    assert request.messages == [
        {"role": "system", "content": "sys"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what time?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        {"role": "assistant", "content": "It is 12."},
        {"role": "user", "content": "thanks"},
    ]
    assert request.tool_choice == "named" and request.tools[0].spec == TOOL
    assert request.sampling.max_tokens == 9 and request.template == {"reasoning_effort": "low"}
    assert request.echo["tools"] == [flat] and request.echo["metadata"] == {"a": "b"} and request.echo["top_p"] == 1.0
    shaped = parse("respond", text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}})
    assert json.loads(shaped.grammar.body) == SCHEMA


DELTAS = [Delta("reasoning", "h"), Delta("reasoning", "m"), Delta("content", "a"), Delta("content", "é"),
          Delta("call", "now", 0, "call_1"), Delta("arguments", '{"a"', 0), Delta("arguments", ": 1}", 0),
          Delta("call", "now", 1, "call_2"), Delta("arguments", "{}", 1)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_response_events(reason: str) -> None:
    """Each event is one of the official types; put together by them, they are the body of the last event."""
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import ResponseStreamEvent

    echo = parse("respond", tools=[{"type": "function", **FUNCTION}]).echo
    out = responses.Response(body.Meta("resp_1", 123, "m"), echo)
    events = copy.deepcopy(out.start())
    for delta in DELTAS:
        events += copy.deepcopy(out.push([delta]))
    events += out.finish(reason, USED)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    order = [e["type"].removeprefix("response.") for e in events]
    item = lambda *middle: ["output_item.added", *middle, "output_item.done"]
    part = lambda kind, n: item("content_part.added", *[f"{kind}.delta"] * n, f"{kind}.done", "content_part.done")
    call = lambda n: item(*["function_call_arguments.delta"] * n, "function_call_arguments.done")
    status = {"stop": "completed", "length": "incomplete"}[reason]
    assert order == [
        "created",
        "in_progress",
        *part("reasoning_text", 2),
        *part("output_text", 2),
        *call(2),
        *call(1),
        status,
    ]
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    state = ResponseStreamState(input_tools=client.omit, text_format=client.omit)
    for event in events:
        value = valid("response_event", event)
        parsed = adapter.validate_python(value)
        assert parsed.type == value["type"] and type(parsed).__name__ != "BaseModel"
        if reason == "stop":
            state.handle_event(parsed)
    final = valid("response", events[-1]["response"])
    assert final["status"] == status and (final["incomplete_details"] is None) == (reason == "stop")
    assert [i["type"] for i in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][1]["content"][0]["text"] == "aé" and final["output"][2]["arguments"] == '{"a": 1}'
    assert [i["status"] for i in final["output"]] == ["completed"] * 3 + [status]
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 2 and final["usage"]["total_tokens"] == 12
    for event in events:  # done events say what the deltas said
        if event["type"].endswith(("text.done", "arguments.done")):
            pieces = [e["delta"] for e in events if e["type"] == event["type"].replace(".done", ".delta")
                      and e["item_id"] == event["item_id"]]  # fmt: skip
            assert "".join(pieces) == event.get("text", event.get("arguments"))
            assert event["type"] != "response.function_call_arguments.done" or event["name"] == "now"


def test_response_body_and_failure() -> None:
    from openai.types.responses import Response, ResponseErrorEvent

    echo = parse("respond").echo
    out = responses.Response(body.Meta("resp_1", 123, "m"), echo)
    out.push(DELTAS)
    value = valid("response", out.finish("stop", USED)[-1]["response"])
    parsed = Response.model_validate(value)
    assert parsed.output_text == "aé" and parsed.status == "completed" and parsed.usage.total_tokens == 12
    empty = responses.Response(body.Meta("resp_1", 123, "m"), echo).finish("stop", USED)[-1]["response"]
    assert valid("response", empty)["output"] == []
    out = responses.Response(body.Meta("resp_1", 123, "m"), echo)
    out.start()
    event = out.fail(APIError("broken", status=500, code="server_error"))[0]
    assert ResponseErrorEvent.model_validate(event).sequence_number == 2


def test_response_logprobs(tok: text.Tokenizer) -> None:
    rows = body.chat_logprobs(tok, [5], [-0.5], [{5: -0.5}], 1)["content"]
    out = responses.Response(META, {})
    events = out.push([Delta("content", "a")], rows)
    assert events[-1]["logprobs"] == rows
    assert out.finish("stop", USED)[-1]["response"]["output"][0]["content"][0]["logprobs"] == rows
