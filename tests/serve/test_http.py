"""The server over a socket: the official client, and the protocol's bytes."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
import threading

import jax
import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fdel import cli, params, serve, text
from fdel.ops.weights import LowRank
from fdel.serve.engine.reply import Delta, DeltaQueue
from fdel.serve.server import answer, auth, keyfile, launch, openai, reasoning
from fdel.serve.server import http as server_http
from fdel.serve.server.openai.schema import SCHEMAS
from tests.serve import small, wire
from tests.serve.wire import CHAT, call, chat, frames, open_chat, sample, wait_for

client_library = pytest.importorskip("openai", reason="the oracle")


@pytest.fixture
def client(running):
    return client_library.OpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key=running.secrets["user"], max_retries=0
    )


def naive(running, ids, n):
    """What a full forward per token says."""
    return serve.naive_generate(running.served.engine.model, ids, n, eos=[small.EOS])


# ---- answers -------------------------------------------------------------------------------------------------------


def test_completion_is_the_models(running, client):
    tok = running.served.tokenizer
    ids = text.encode(tok, "the music")
    want = naive(running, ids, 10)
    got = client.completions.create(model="small", prompt="the music", max_tokens=10, temperature=0, logprobs=0)
    assert got.choices[0].text == text.decode(tok, [t for t in want.tokens if t != small.EOS])
    np.testing.assert_allclose(got.choices[0].logprobs.token_logprobs, want.logprobs, atol=1e-4)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), len(want.tokens))
    assert got.choices[0].finish_reason == want.finish_reason


def test_echo_scores_the_prompt(running, client):
    """What lm_eval reads: the prompt's log-probabilities are those of a full forward, the first is null."""
    prompt = text.encode(running.served.tokenizer, "the weather in Paris")
    got = client.completions.create(
        model="small", prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
    ).choices[0]
    want = small.scores(running.served.engine.model, prompt[:1], prompt[1:])
    assert got.logprobs.token_logprobs[0] is None and got.logprobs.top_logprobs[0] is None
    np.testing.assert_allclose(got.logprobs.token_logprobs[1 : len(prompt)], want, atol=1e-4)
    assert len(got.logprobs.tokens) == len(prompt) + 1 and got.text.startswith("the weather in Paris")
    for value, top in zip(got.logprobs.token_logprobs[1:], got.logprobs.top_logprobs[1:], strict=True):
        assert value <= max(top.values())
    alone = client.completions.create(model="small", prompt=prompt, max_tokens=0, logprobs=1, echo=True).choices[0]
    assert alone.logprobs.token_logprobs == got.logprobs.token_logprobs[:-1]


def test_an_echoed_prompt_that_is_too_long(client, running):
    """Of the whole context it is scored; of one token more, or with ids that the model lacks, it is refused."""
    ask = lambda prompt: client.completions.create(model="small", prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    context = running.served.engine.limit
    got = ask([9] * context).choices[0].logprobs.token_logprobs
    assert len(got) == context and all(isinstance(x, float) and x < 0 for x in got[1:])
    with pytest.raises(client_library.BadRequestError) as e:
        ask([9] * (context + 1))
    assert e.value.code == "context_length_exceeded"


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer(client, n):
    asked = CHAT | dict(temperature=1.0, seed=5, n=n, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**asked)
    said, ids, ends, logprobs, used = [""] * n, set(), {}, [[] for _ in range(n)], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        jsonschema.validate(json.loads(chunk.model_dump_json(exclude_unset=True)), SCHEMAS["chat_chunk"])
        ids.add((chunk.id, chunk.created))
        used = chunk.usage or used
        for c in chunk.choices:
            said[c.index] += c.delta.content or ""
            logprobs[c.index] += c.logprobs.content if c.logprobs else []
            if c.finish_reason:
                ends[c.index] = c.finish_reason
    assert len(ids) == 1 and used == whole.usage
    assert said == [c.message.content for c in whole.choices]
    assert [ends[i] for i in range(n)] == [c.finish_reason for c in whole.choices]
    for streamed, at_once in zip(logprobs, whole.choices, strict=True):  # other company: equal to rounding
        assert [x.token for x in streamed] == [x.token for x in at_once.logprobs.content]
        np.testing.assert_allclose(
            [[x.logprob, *(t.logprob for t in x.top_logprobs)] for x in streamed],
            [[x.logprob, *(t.logprob for t in x.top_logprobs)] for x in at_once.logprobs.content],
            atol=1e-5,
        )


def test_many_prompts_keep_their_order(client):
    prompts = ["the", "the music", "weather in", "a b"]
    whole = client.completions.create(model="small", prompt=prompts, n=2, max_tokens=5, temperature=1.0, seed=3)
    assert [c.index for c in whole.choices] == list(range(8))
    for i, p in enumerate(prompts):
        alone = client.completions.create(model="small", prompt=p, n=2, max_tokens=5, temperature=1.0, seed=3)
        assert [c.text for c in alone.choices] == [c.text for c in whole.choices[2 * i : 2 * i + 2]]


def test_best_of_returns_the_likeliest(client):
    asked = dict(model="small", prompt="the", max_tokens=6, temperature=1.0, seed=1, logprobs=0)
    every = client.completions.create(**asked, n=4).choices
    likely = sorted(every, key=lambda c: -sum(c.logprobs.token_logprobs))[:2]
    best = client.completions.create(**asked, n=2, best_of=4).choices
    assert [c.text for c in best] == [c.text for c in likely] and [c.index for c in best] == [0, 1]


@pytest.mark.slow
def test_structured_output(client):
    properties = {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "ab", "schema": schema}}
    for seed in range(3):
        said = client.chat.completions.create(
            **CHAT | dict(temperature=1.0, seed=seed, max_tokens=100), response_format=form
        )
        assert said.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(said.choices[0].message.content), schema)


def test_a_required_call_is_made(client):
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
                  "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    asked = CHAT | dict(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=120, seed=1)
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls[0].function.name == "weather"
    jsonschema.validate(json.loads(whole.message.tool_calls[0].function.arguments), parameters)
    with client.chat.completions.stream(**asked) as stream:
        last = stream.get_final_completion().choices[0].message
    assert last.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


def test_responses_stream_is_the_whole_answer(client):
    asked = dict(model="small", input="the weather", temperature=0, max_output_tokens=8)
    whole = client.responses.create(**asked)
    kinds, said = [], ""
    for event in client.responses.create(**asked, stream=True):
        kinds.append(event.type)
        said += event.delta if event.type == "response.output_text.delta" else ""
    assert said == whole.output_text and kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"


def test_embeddings_are_hidden_states(running, client):
    """float and base64 are the same, of unit length, and those of the model's last token."""
    engine, tok = running.served.engine, running.served.tokenizer
    got = client.embeddings.create(model="small", input=["the music", "weather"])
    other = client.embeddings.create(model="small", input=["the music", "weather"], encoding_format="float")
    for a, b, said in zip(got.data, other.data, ["the music", "weather"], strict=True):
        want = engine.embed(text.encode(tok, said))
        np.testing.assert_allclose(a.embedding, want / np.linalg.norm(want), atol=1e-6)
        np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-7)
    status, said, _ = call(
        running, "POST", "/v1/rerank", {"model": "small", "query": "weather", "documents": ["a b", "weather"]}
    )
    assert status == 200 and said["results"][0]["index"] == 1 and abs(said["results"][0]["relevance_score"] - 1) < 1e-5


def test_tokens_and_back(running):
    status, said, _ = call(running, "POST", "/tokenize", {"model": "small", "prompt": "the music"})
    assert status == 200 and said["tokens"] == text.encode(running.served.tokenizer, "the music")
    jsonschema.validate(said, SCHEMAS["tokens"])
    assert (said["count"], said["max_model_len"]) == (len(said["tokens"]), running.served.engine.limit)
    status, back, _ = call(running, "POST", "/detokenize", {"tokens": said["tokens"]})
    assert back["prompt"] == "the music"
    assert call(running, "GET", "/tokenizer_info")[1]["eos_token"] == running.served.tokenizer.special["eos_token"]


# ---- the protocol on the wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nothing"])
def test_other_methods(running, method, path):
    status, said, headers = call(running, method, path)
    assert status == (404 if path == "/nothing" else 405) and headers["x-request-id"].startswith("req_")
    if method == "HEAD":
        assert said == ""
    else:
        jsonschema.validate(said, SCHEMAS["error"])
    assert status == 404 or headers["Allow"] in ("GET", "POST")


def test_every_answer_has_an_id_of_the_servers(running):
    answers = [chat(running), chat(running, {"n": 0}), chat(running, role=None), chat(running, {"stream": True}),
               call(running, "GET", "/nothing"), call(running, "GET", "/health", role=None),
               chat(running, headers={"x-request-id": "mine"})]  # fmt: skip
    ids = [headers["x-request-id"] for _, _, headers in answers]
    assert [a[0] for a in answers] == [200, 400, 401, 200, 404, 200, 200]
    assert all(i.startswith("req_") for i in ids) and len(set(ids)) == len(ids)
    assert not any("mine" in str(headers) for _, _, headers in answers)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_frames_of_a_stream(running, path, options):
    """Bytes as the protocol has them: headers, one line of JSON each, usage if asked, one reason per output, [DONE]."""
    asked = (
        CHAT
        | {"n": 2, "stream": True, "seed": 1, "temperature": 1.0}
        | ({} if options is None else {"stream_options": options})
    )
    if path == "/v1/completions":
        asked = {k: v for k, v in asked.items() if k != "messages"} | {"prompt": ["the", "music"]}
    status, said, headers = call(running, "POST", path, asked)
    assert status == 200 and headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache" and headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in headers and "Content-Encoding" not in headers
    *lines, done, end = said.split("\n\n")
    assert (done, end) == ("data: [DONE]", "") and all(x.startswith("data: {") and "\n" not in x for x in lines)
    chunks = frames(said)
    kind = "chat_chunk" if "chat" in path else "completion_chunk"
    for chunk in chunks:
        jsonschema.validate(chunk, SCHEMAS[kind])
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    count = 2 if "chat" in path else 4
    for i in range(count):
        mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == i]
        assert [c["finish_reason"] is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        if "chat" in path:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""} and mine[-1]["delta"] == {}
            assert not any("role" in c["delta"] for c in mine[1:])
    if options == {"include_usage": True}:
        assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        prompt, completion = (chunks[-1]["usage"][f"{k}_tokens"] for k in ("prompt", "completion"))
        whole = call(running, "POST", path, {k: v for k, v in asked.items() if k not in ("stream", "stream_options")})[
            1
        ]
        assert chunks[-1]["choices"] == [] and (prompt, completion) == (
            whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])  # fmt: skip
    else:
        assert not any("usage" in c for c in chunks)


def test_a_stream_that_waits_is_pinged(running, monkeypatch):
    """Comments keep it alive, and clients do not see them."""
    monkeypatch.setattr(answer, "PING", 0.05)
    engine = running.served.engine
    engine.pause()
    try:
        connection = open_chat(running, {"stream": True})
        response = connection.getresponse()
        said = b""
        while b": ping\n\n" not in said:
            said += response.read1(100)
    finally:
        engine.resume()
    said += response.read()
    whole = chat(running)[1]["choices"][0]["message"]["content"]
    got = "".join(c["choices"][0]["delta"].get("content", "") for c in frames(said.decode()))
    assert got == whole and said.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_stop_strings_are_not_told(running, cut):
    """Nor their beginnings, also where they span tokens; streamed and whole."""
    whole = chat(running, {"max_tokens": 40, "ignore_eos": True})[1]["choices"][0]["message"]["content"]
    stop = whole[15 : 15 + 2 * cut]
    want = whole[: whole.index(stop)]
    asked = {"max_tokens": 40, "ignore_eos": True, "stop": [stop]}
    choice = chat(running, asked)[1]["choices"][0]
    assert choice["message"]["content"] == want and choice["finish_reason"] == "stop"
    said = chat(running, asked | {"stream": True})[1]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in frames(said)) == want


def test_usage_counts_a_prompt_once(running):
    one, three = (chat(running, {"n": n, "ignore_eos": True})[1]["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"] and three["completion_tokens"] == 36
    assert set(one["prompt_tokens_details"]) == {"cached_tokens"}
    assert one["completion_tokens_details"] == {"reasoning_tokens": 0}


THOUGHTS = {
    "begun by the template": (True, "", "the weather in Paris", "</think>", "is fine"),
    "begun by the model": (False, "<think>", "the weather in Paris", "</think>", "is fine"),
    "with white space": (True, "", "\nthe weather\n\n", "</think>", "\n\nis fine"),
    "none": (False, "", "", "", "the weather is fine"),
    "cut off": (True, "", "the weather in", "", ""),
    "of no length": (True, "", "", "</think>", "is fine"),
}  # fmt: skip


@pytest.mark.parametrize("case", THOUGHTS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_the_reasoning_are_counted(running, case, size):
    """As many as stand between the marks, however many arrive together."""
    inside, start, thought, end, answer = THOUGHTS[case]
    tok = dataclasses.replace(text.train_bpe(wire.WORDS, 290, ["<think>", "</think>"]), eos_ids=(small.EOS,))
    served = dataclasses.replace(running.served, tokenizer=tok, thinking=reasoning.FAMILIES["think"], format=None)
    asked = openai.parse_chat(CHAT, served.limits)
    reader = served.reader(asked, inside)
    parts = [text.encode(tok, part, special=False) for part in (start, thought, end, answer)]
    ids = [i for part in parts for i in part]
    state = text.Detokenizer(tok, skip_special=False)
    for i in range(0, len(ids), size):
        state, said = text.step(state, ids[i : i + size])
        last = "stop" if i + size >= len(ids) else None
        reader.push(Delta(ids[i : i + size], said, last))
    assert reader.reasoning == len(parts[1])
    assert reader.message().reasoning.strip() == thought.strip()


def test_tokens_of_the_reasoning_are_in_the_usage(running):
    tok = running.served.tokenizer
    thinker = dataclasses.replace(tok, templates={"default": tok.templates["default"] + "<think>"})
    served = dataclasses.replace(
        running.served, name="thinker", tokenizer=thinker, thinking=reasoning.FAMILIES["think"], format=None
    )
    asked = {"model": "thinker", "ignore_eos": True, "n": 2}
    with wire.also(running, served):
        for said in (
            chat(running, asked)[1]["usage"],
            frames(chat(running, asked | {"stream": True, "stream_options": {"include_usage": True}})[1])[-1]["usage"],
        ):
            assert said["completion_tokens_details"]["reasoning_tokens"] == said["completion_tokens"] == 24
        body = {"model": "thinker", "input": "the weather", "max_output_tokens": 5}
        used = call(running, "POST", "/v1/responses", body)[1]["usage"]
    assert used["output_tokens_details"]["reasoning_tokens"] == used["output_tokens"] > 0


def test_models_by_name(running, monkeypatch):
    """Names may have slashes; nobody deletes a model."""
    monkeypatch.setattr(running.state, "models", {"org/small": dataclasses.replace(running.served, name="org/small")})
    status, said, _ = call(running, "GET", "/v1/models/org/small")
    facts = {"created": 1, "owned_by": "fdel", "input_modalities": ["text"]}
    assert status == 200 and said == {"id": "org/small", "object": "model"} | facts
    assert call(running, "GET", "/v1/models")[1] == {"object": "list", "data": [said]}
    jsonschema.validate({"object": "list", "data": [said]}, SCHEMAS["models"])
    assert call(running, "DELETE", "/v1/models/org/small", role="admin")[0] == 405
    assert call(running, "GET", "/v1/models/small")[1]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("asked", [{"dimensions": 8}, {"input": ["a"] * 2049}, {"encoding_format": "hex"}])
def test_embeddings_that_cannot_be(running, asked):
    status, said, _ = call(running, "POST", "/v1/embeddings", {"model": "small", "input": "a"} | asked)
    assert status == 400 and said["error"]["param"] == next(iter(asked))


# ---- administration --------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters(running, model, tmp_path, monkeypatch):
    """A folder with an adapter `good`, under the root of adapters, and one outside of it; the adapted parameters."""
    root = tmp_path / "root"
    spec = params.unstack(model.family.spec(model.cfg))
    adapted = params.lora.add(model.params, 4, 8, r"\.(q|v)$", key=jax.random.key(1), spec=spec)
    noise = iter(jax.random.split(jax.random.key(2), 100))
    loud = lambda w: dataclasses.replace(w, b=jax.random.normal(next(noise), w.b.shape))
    is_adapted = lambda w: isinstance(w, LowRank)
    adapted = jax.tree.map(lambda w: loud(w) if is_adapted(w) else w, adapted, is_leaf=is_adapted)
    params.save_peft(spec, adapted, root / "good")
    params.save_peft(spec, adapted, tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "bad").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "bad" / name).symlink_to(tmp_path / "outside" / name)
    monkeypatch.setattr(running.state, "adapter_root", root)
    return root, adapted


def load(running, name="new", path="good", role="admin", **more):
    return call(running, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | more, role=role)


def unload(running, name="new", role="admin"):
    return call(running, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, role=role)


def test_adapters_come_and_go(running, model, client, adapters):
    root, adapted = adapters
    base = client.completions.create(model="small", prompt="the music", max_tokens=8, temperature=0).choices[0].text
    assert load(running)[0] == 200
    assert load(running)[1]["error"]["code"] == "exists" and load(running, "small")[0] == 409
    assert [m.id for m in client.models.list()] == ["small", "new"]
    assert call(running, "GET", "/v1/models/new")[1]["parent"] == "small"
    ids = text.encode(running.served.tokenizer, "the music")
    want = serve.naive_generate(model._replace(params=adapted), ids, 8, eos=[small.EOS])
    got = client.completions.create(model="new", prompt="the music", max_tokens=8, temperature=0, logprobs=0).choices[0]
    np.testing.assert_allclose(got.logprobs.token_logprobs, want.logprobs, atol=1e-4)
    assert got.text != base
    assert sample(running, "fdel_requests_total", model="new", finished_reason=got.finish_reason) >= 1
    again = client.completions.create(model="small", prompt="the music", max_tokens=8, temperature=0).choices[0].text
    assert again == base
    assert unload(running)[0] == 200 and unload(running)[0] == 404 and unload(running, "small")[0] == 404
    with pytest.raises(client_library.NotFoundError):
        client.completions.create(model="new", prompt="a")
    assert load(running, path=str(root / "good"))[0] == 200 and unload(running)[0] == 200
    assert chat(running)[0] == 200 and 'model="new"' not in call(running, "GET", "/metrics", role="readonly")[1]


def test_what_uses_an_adapter_that_goes_is_counted_for_its_base(running, adapters):
    """Its own series are gone by then."""
    assert load(running)[0] == 200
    running.served.engine.pause()
    try:
        ended = sample(running, "fdel_requests_total", model="small", finished_reason="error")
        held = open_chat(running, {"model": "new"})
        wait_for(lambda: running.served.engine.stats()["waiting"] == 1)
        assert unload(running)[0] == 200
    finally:
        running.served.engine.resume()
    assert held.getresponse().status == 500
    assert sample(running, "fdel_requests_total", model="small", finished_reason="error") == ended + 1


OUTSIDE = ["..", "../outside", "good/../../outside", "/etc", "", ".", "good/adapter_config.json", "link", "bad", "nothing",
           "a\0b", "~", "good/" * 2000, "//etc", "..\\outside"]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: repr(p)[:20])
def test_adapters_come_from_their_root_alone(running, adapters, path):
    """Outside of it nothing is read, and nothing is told of what is there."""
    status, said, _ = load(running, path=path)
    assert status in (400, 404) and "outside" not in said["error"]["message"]
    if status == 404:
        assert said["error"]["message"] == "there is no adapter of this path"
    assert [*running.state.models] == ["small"]


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a" * 65, "a b", None, 3, "small"])
def test_names_of_adapters(running, adapters, name):
    assert load(running, name)[0] in (400, 409) and [*running.state.models] == ["small"]


def test_adapters_that_do_not_fit(running, adapters):
    root, _ = adapters
    (root / "good" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert load(running)[0] == 400
    (root / "good" / "adapter_config.json").write_text("[]")
    assert load(running)[0] == 400
    (root / "good" / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    assert load(running)[0] == 400
    assert load(running, model="other")[0] == 404 and chat(running)[0] == 200


def overwrite(folder, **changes):
    """Change the settings of an adapter's file, and all values of its tensors."""
    file = folder / "adapter_config.json"
    values = changes.pop("values", None)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if values is not None:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({k: np.full_like(v, values) for k, v in tensors.items()}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"values": np.nan}, "lora_A.weight holds values that are not finite"),
        ({"values": np.inf}, "lora_A.weight holds values that are not finite"),
        ({"values": 1e20, "lora_alpha": 1e29}, "layers.0.q"),
        ({"alpha_pattern": {"(": 1}}, "pattern '(' cannot be used"),
        ({"alpha_pattern": {"[" * 30_000: 1}}, "most are"),
        ({"lora_alpha": "a"}, "expected a finite number"),
        ({"r": 1, "use_dora": [[[]]]}, "use_dora"),
    ],
    ids=["nan", "inf", "overflow", "regex", "long regex", "alpha", "dora"],
)
def test_adapters_of_strangers(running, adapters, changes, said):
    """Refused at once, by name, and nobody's answers change."""
    before = chat(running)[1]["choices"]
    overwrite(adapters[0] / "good", **changes)
    status, got, headers = load(running)
    assert status == 400 and said in got["error"]["message"] and "x-request-id" in headers
    assert [*running.state.models] == ["small"] and chat(running)[1]["choices"] == before


def test_a_rank_above_the_limit(running, model, adapters):
    spec = params.unstack(model.family.spec(model.cfg))
    large = params.lora.add(model.params, 5, 8, r"\.q$", key=jax.random.key(1), spec=spec)
    params.save_peft(spec, jax.tree.map(lambda x: x + 1, large), adapters[0] / "large")
    status, got, _ = load(running, path="large")
    assert status == 400 and "rank 5; the most is 4 here" in got["error"]["message"]


def test_a_slow_adapter_holds_up_nobody(running, adapters, monkeypatch):
    """While the file of one is read, others come and go."""
    begun, go = threading.Event(), threading.Event()
    real = params.load_peft

    def slow(spec, tree, path, **kwargs):
        if path.name == "slow":
            begun.set()
            assert go.wait(60)
        return real(spec, tree, path, **kwargs)

    monkeypatch.setattr("fdel.params.load_peft", slow)
    shutil.copytree(adapters[0] / "good", adapters[0] / "slow")
    found = []
    thread = threading.Thread(target=lambda: found.append(load(running, "slow", "slow")[0]))
    thread.start()
    try:
        assert begun.wait(60) and load(running)[0] == 200 and unload(running)[0] == 200
    finally:
        go.set()
        thread.join(60)
    assert found == [200] and unload(running, "slow")[0] == 200


def test_adapters_are_for_admins_and_where_a_root_is_given(running, adapters, monkeypatch):
    for role in ("user", "service", "readonly"):
        assert load(running, role=role)[0] == unload(running, role=role)[0] == 403
    monkeypatch.setattr(running.state, "adapter_root", None)
    assert load(running)[1]["error"]["code"] == "no_adapter_root"


def test_two_admins_load_one_name(running, adapters):
    """One of them wins, and the engine has what the list says."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(running)[0])) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(found) == [200, 409, 409, 409] and unload(running)[0] == 200


def test_options_are_checked_once(tmp_path):
    """The keys that were checked are those that are served."""
    key, _ = auth.create("a", "user", 0.0)
    keyfile.save(tmp_path / "keys", [key])
    assert launch.check(launch.ServerOptions(key_file=tmp_path / "keys")) == {key.hash: key}
    assert launch.check(launch.ServerOptions()) is None
    with pytest.raises(ValueError, match="no directory"):
        launch.check(launch.ServerOptions(adapter_root=tmp_path / "none"))
    for seconds in (0, -1.0, float("inf"), float("nan")):  # 0 would be no limit
        with pytest.raises(ValueError, match="video_cpu=.*more than 0"):
            launch.check(launch.ServerOptions(video_cpu=seconds))


def test_limits_reach_the_server(monkeypatch):
    """Of each option that is a limit of media, the value; hosts are names without case."""
    found = []

    async def run(server, *rest):
        found.append((server, *rest[:3]))

    monkeypatch.setattr(server_http, "run", run)
    monkeypatch.setattr(server_http.audit, "propagate", True)  # `listen` changes it
    names = "audio_seconds audio_bytes image_bytes image_pixels video_bytes video_pixels video_cpu".split()
    limits = {name: i + 1 for i, name in enumerate(names)}
    options = launch.ServerOptions(port=9, grace=2.0, media_hosts=["Media.Test:80"], image_memory=2**20, **limits)
    launch.listen([], options, None)
    ((server, host, port, grace),) = found
    assert {name: getattr(server, name) for name in names} == limits and (host, port, grace) == ("127.0.0.1", 9, 2.0)
    assert server.media_hosts == {"media.test:80"} and server.pictures.total == 2**20


def test_the_protocol_needs_no_jax():
    code = "import sys, fdel.serve.server.openai; sys.exit('jax' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("role", sorted(auth.ROLES))
def test_roles(running, role):
    for method, path, scope in ((r.method, r.path, r.scope) for r in server_http.ROUTES):
        if scope is not None and path != "/admin/drain":
            path = path.replace("{id:.+}", "small").replace("{id}", "nobody")
            status = call(running, method, path, {} if method == "POST" else None, role=role)[0]
            assert (status == 403) == (scope not in auth.ROLES[role]), (role, path, status)


# ---- life ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_metrics_tell_what_happened(late, running, client, monkeypatch):
    from prometheus_client.parser import text_string_to_metric_families as read

    def value(name, **labels):
        said = call(running, "GET", "/metrics", role="readonly")[1]
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in read(said) for s in f.samples}[
            name, tuple(sorted(labels.items()))
        ]

    async def get(
        queue, every=None, read=DeltaQueue.get
    ):  # all tokens in one delta, when they are drawn before it is read
        await asyncio.sleep(late)
        return await read(queue, every)

    monkeypatch.setattr(DeltaQueue, "get", get)
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    sums = lambda: [value(f"fdel_{name}_seconds_sum") for name in (*parts, "request_inference_time")]
    before, then = value("fdel_generation_tokens_total", model="small"), sums()
    used = client.chat.completions.create(**CHAT | {"max_tokens": 5}).usage.completion_tokens
    assert value("fdel_generation_tokens_total", model="small") - before == used
    for name in ("request_decode_time_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert value(f"fdel_{name}_count") > 0 and value(f"fdel_{name}_sum") > 0
    queue, prefill, decode, whole, inference = np.subtract(sums(), then)
    np.testing.assert_allclose([queue + prefill + decode, prefill + decode], [whole, inference], rtol=1e-6)
    assert min(queue, prefill, decode) > 0
    compiled = value("fdel_compilations_total")
    client.chat.completions.create(**CHAT | {"max_tokens": 30, "temperature": 1.0})
    assert value("fdel_compilations_total") == compiled


def test_keys_are_managed_by_admins_alone(running):
    status, made, _ = call(running, "POST", "/admin/keys", {"role": "readonly", "name": "new"}, role="admin")
    assert status == 201 and made["secret"] not in running.path.read_text()
    running.secrets["new"] = made["secret"]
    assert call(running, "GET", "/v1/models", role="new")[0] == 200
    listed = call(running, "GET", "/admin/keys", role="admin")[1]["data"]
    assert made["id"] in [k["id"] for k in listed] and not any("hash" in k for k in listed)
    assert call(running, "DELETE", f"/admin/keys/{made['id']}", role="admin")[0] == 200
    assert call(running, "GET", "/v1/models", role="new")[0] == 401
    assert call(running, "POST", "/admin/keys", {"role": "root"}, role="admin")[0] == 400


def test_the_server_and_the_command_line_have_the_same_keys(running, capsys):
    """What one adds or removes is so for the other, and nothing comes back."""
    own = len(keyfile.load(running.path))
    asks = lambda role: call(running, "GET", "/v1/models", role=role)[0]

    def keys(*args: str) -> str:
        assert cli.main(["keys", str(running.path), *args]) == 0
        return capsys.readouterr().out.strip()

    running.secrets["cli"] = keys("add", "made outside", "--role", "readonly")
    wire.wait_for(lambda: asks("cli") == 200)
    made = call(running, "POST", "/admin/keys", {"role": "readonly", "name": "inside"}, role="admin")[1]
    running.secrets["api"] = made["secret"]
    assert asks("cli") == asks("api") == 200 and len(keyfile.load(running.path)) == own + 2
    line = next(line for line in keys("list").splitlines() if line.endswith("made outside"))
    keys("remove", line.split()[0])
    wire.wait_for(lambda: asks("cli") == 401)
    other = call(running, "POST", "/admin/keys", {"role": "readonly"}, role="admin")[1]
    assert asks("cli") == 401 and asks("api") == 200 and len(keyfile.load(running.path)) == own + 2
    for id in (made["id"], other["id"]):
        assert call(running, "DELETE", f"/admin/keys/{id}", role="admin")[0] == 200
    assert asks("api") == 401 and keyfile.load(running.path) == running.state.keys
    del running.secrets["cli"], running.secrets["api"]


def test_the_page_is_its_own_and_needs_a_key(running):
    status, login, headers = call(running, "GET", "/", role=None)
    assert status == 401 and "API key" in login and "/v1/chat/completions" not in login
    status, page, headers = call(running, "GET", "/")
    assert status == 200 and "/v1/chat/completions" in page
    assert "http://" not in page + login and "https://" not in page + login
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_drain(running):
    """Last: new work is refused with a time to come back, the rest goes on, and readiness ends."""
    assert call(running, "GET", "/ready", role=None)[0] == 200
    assert call(running, "POST", "/admin/drain", {}, role="admin")[0] == 200
    try:
        status, said, headers = call(running, "POST", "/v1/chat/completions", CHAT)
        assert status == 503 and "Retry-After" in headers
        assert (
            call(running, "GET", "/ready", role=None)[0] == 503 and call(running, "GET", "/health", role=None)[0] == 200
        )
        assert call(running, "GET", "/v1/models")[0] == 200
    finally:
        running.state.draining = False


def test_the_document_describes_every_route(running):
    import jsonschema

    status, said, _ = call(running, "GET", "/openapi.json")
    listed = {(m.upper(), path) for path, methods in said["paths"].items() for m in methods}
    assert status == 200 and listed == {(r.method, r.path.replace(":.+", "")) for r in server_http.ROUTES}
    for methods in said["paths"].values():
        for about in methods.values():
            for kind in about.get("requestBody", {}).get("content", {}).values():
                jsonschema.Draft202012Validator.check_schema(kind["schema"])


@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_too_long_prompts_are_cut_where_the_server_says_so(running, monkeypatch, where):
    """The answer is that of the cut prompt, which leaves room for max_tokens, at most a quarter of the context."""
    n = small.CONTEXT
    ids = [8 + i % 40 for i in range(n + 5)]
    ask = lambda prompt, **more: call(
        running, "POST", "/v1/completions",
        {"model": "small", "prompt": prompt, "temperature": 0, "ignore_eos": True} | more,
    )[:2]  # fmt: skip
    status, body = ask(ids, max_tokens=6)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    monkeypatch.setitem(running.state.models, "small", dataclasses.replace(running.served, truncate=where))
    kept = lambda k: {"left": ids[-k:], "right": ids[:k], "middle": ids[: (k + 1) // 2] + ids[len(ids) - k // 2 :]}[
        where
    ]
    for more, room in (({"max_tokens": 6}, 6), ({"max_tokens": n}, n // 4)):
        status, body = ask(ids, **more)
        want = ask(kept(n - room), max_tokens=room)[1]
        assert status == 200 and body["choices"] == want["choices"]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (n - room, room)
    used = ask(ids[: n - 3], max_tokens=6)[1]["usage"]  # what fits is not cut: the answer is shorter instead
    assert (used["prompt_tokens"], used["completion_tokens"]) == (n - 3, 3)
    status, body, _ = chat(running, {"messages": [{"role": "user", "content": "stop it " * n}], "max_tokens": 4})
    assert status == 200 and body["usage"]["prompt_tokens"] == n - 4
