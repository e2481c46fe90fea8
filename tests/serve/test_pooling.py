"""Models that write no text behind a server: embeddings, classes, scores of pairs; bodies are vLLM's.

https://docs.vllm.ai/en/latest/models/pooling_models.html
"""

import base64
import dataclasses
import json
from types import SimpleNamespace

import jax
import jsonschema
import numpy as np
import pytest
import tokenizers

from fdel import models, params, text
from fdel.models import heads, llama
from fdel.models.pooling import Dense, Pooling, read, write
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.server import launch
from fdel.serve.server.openai import APIError
from fdel.serve.server.openai.schema import SCHEMAS
from fdel.serve.server.options import ServerOptions
from fdel.serve.server.pooling import _without_types
from fdel.serve.server.served import served_model
from fdel.serve.server.tokenizing import PromptEncoder
from tests.serve import small, wire
from tests.serve.wire import call

KINDS = {"sequence": 1, "token": 3, "question": 2, "base": 0}
PAIR = "the music", "the weather in Paris"
TEXTS = ["the weather", "music"]


@pytest.fixture(scope="module")
def engines():
    """name -> an engine that runs: a head of each kind, classes by "sequences", and an embedding model ("mean")."""
    made, tok = {}, wire.tokenizer()
    for i, (kind, n) in enumerate([*KINDS.items(), ("sequences", 3)]):
        spec = heads.spec(llama, small.CFG, kind.removesuffix("s"), n)
        tree = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x + 0.1, params.init(spec, jax.random.key(i)))
        made[kind] = models.Model(llama, small.CFG, tree)
    sizes = Settings(rows=1, max_length=64)
    found = {name: Engine(m, sizes, tokenizer=tok) for name, m in made.items()}
    found["mean"] = Engine(made["base"], sizes, tokenizer=tok, pooling=Pooling(("mean", "cls")))
    turn = Dense(np.eye(small.CFG.embed, dtype=np.float32)[:7], act="torch.nn.modules.activation.Tanh")
    found["deep"] = Engine(made["base"], sizes, tokenizer=tok, pooling=Pooling(("mean",), dense=(turn,), prompt="the "))
    for engine in found.values():
        engine.start()
    yield made, found
    for engine in found.values():
        engine.close()


@pytest.fixture(scope="module")
def ask(running, engines):
    """Post a body to a path, for a model of `engines` by its name."""
    served = {name: served_model(engine, name) for name, engine in engines[1].items()}
    with wire.also(running, *served.values()):
        yield lambda path, name, **body: call(running, "POST", path, {"model": name, **body})[:2]


def outputs(engines, name: str, ids: list[int], *more: list[int]) -> np.ndarray:
    """What the head says of each token, or hidden states: by `hidden` alone; of several texts, padded."""
    model = engines[0]["base" if name == "mean" else name]
    padded = np.array([t + [0] * (64 - len(t)) for t in (ids, *more)])  # what follows a token changes nothing
    x = llama.hidden(heads.inner(model.params), padded, model.cfg)[0]
    x = np.asarray(x if heads.kind_of(model.params) is None else heads.outputs(model.params, x))
    return x if more else x[0, : len(ids)]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.slow
def test_a_classifier_names_the_class_of_each_text(ask, engines):
    """Probabilities are the softmax of the last token's logits; token ids and raw logits can be had: 1e-5."""
    tok = wire.tokenizer()
    status, said = ask("/classify", "sequences", input=TEXTS)
    jsonschema.validate(said, SCHEMAS["classes"])
    assert status == 200 and said["id"].startswith("classify-") and len(said["data"]) == 2
    for row, t in zip(said["data"], TEXTS, strict=True):
        want = softmax(outputs(engines, "sequences", text.encode(tok, t))[-1])
        np.testing.assert_allclose(row["probs"], want, atol=1e-5)
        assert row["label"] == f"LABEL_{want.argmax()}" and row["num_classes"] == 3
    status, said = ask("/v1/classify", "sequences", input=text.encode(tok, TEXTS[0]), use_activation=False)
    want = outputs(engines, "sequences", text.encode(tok, TEXTS[0]))[-1]
    np.testing.assert_allclose(said["data"][0]["probs"], want, atol=1e-4)


def test_texts_of_one_request_are_computed_together(ask, engines, monkeypatch):
    """Nine texts in three rows of at most 64 tokens, each as if it were alone (1e-4); answers stand in their order."""
    rng, rows = np.random.default_rng(0), []
    said = [rng.integers(8, 280, n).tolist() for n in (3, 40, 9, 21, 1, 5, 30, 8, 10)]
    for name, path in (("sequences", "/classify"), ("mean", "/pooling")):
        device = engines[1][name]._device
        monkeypatch.setattr(
            device, "row", lambda texts, row=device.row: rows.append(sum(map(len, texts))) or row(texts)
        )
        got = [d.get("probs", d.get("data")) for d in ask(path, name, input=said, use_activation=False)[1]["data"]]
        for x, ids, y in zip(outputs(engines, name, *said), said, got, strict=True):
            pooled = np.concatenate([x[: len(ids)].mean(0), x[0]])
            want = x[len(ids) - 1] if name == "sequences" else pooled  # which is not normalised then
            np.testing.assert_allclose(y, want, atol=1e-4)
    assert rows == [40, 61, 26] * 2


def test_a_conversation_gets_its_reward(ask, engines):
    """The chat template renders it whole, without the beginning of an answer."""
    tok, talk = wire.tokenizer(), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the music"}]
    ids = text.encode(tok, text.render_chat(tok, talk), special=False)
    want = outputs(engines, "sequence", ids)[-1]
    status, said = ask("/classify", "sequence", messages=talk, use_activation=False)
    assert status == 200 and said["usage"]["prompt_tokens"] == len(ids)
    np.testing.assert_allclose(said["data"][0]["probs"], want, atol=1e-4)
    assert ask("/classify", "sequence", messages=talk, input="a")[0] == 400 == ask("/classify", "sequence")[0]


@pytest.mark.parametrize("path", ["/v1/score", "/score", "/v1/rerank", "/rerank"])
def test_a_reward_model_scores_pairs(ask, engines, path):
    """As a cross-encoder: the sigmoid of the logit of both texts together, as the tokenizer joins them."""
    tok, second = wire.tokenizer(), [PAIR[1], "fine"]
    joined = [tok.backend.encode(PAIR[0], d).ids for d in second]
    want = [1 / (1 + np.exp(-float(outputs(engines, "sequence", ids)[-1, 0]))) for ids in joined]
    if "rank" in path:
        status, said = ask(path, "sequence", query=PAIR[0], documents=second)
        got = {r["index"]: r["relevance_score"] for r in said["results"]}
        assert list(got.values()) == sorted(got.values(), reverse=True)
        np.testing.assert_allclose([got[0], got[1]], want, atol=1e-5)
    else:
        status, said = ask(path, "sequence", text_1=PAIR[0], text_2=second)
        np.testing.assert_allclose([r["score"] for r in said["data"]], want, atol=1e-5)
    assert status == 200 and want[0] != want[1]


SCORE = """<|im_start|>{% set q = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
Query: {{ q }} {% for m in messages if m.role == "document" %}Document: {{ m.content }}{% endfor %}<|im_end|>"""


def test_pairs_are_written_by_a_score_template(tmp_path):
    """vLLM's: messages of the roles query and document; as transformers renders it. Special tokens in texts stay text."""
    transformers = pytest.importorskip("transformers")
    tok = wire.tokenizer()
    (tmp_path / "score.jinja").write_text(SCORE)
    model = models.Model(llama, small.CFG, params.init(heads.spec(llama, small.CFG, "sequence", 1), jax.random.key(0)))
    options = ServerOptions(score_template=tmp_path / "score.jinja", settings=Settings(rows=1, max_length=64))
    (with_template,) = launch.served(model, tok, "x", options)
    encoder = PromptEncoder.from_facts(with_template.encoder.facts())  # what a child process has
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=tok.backend)
    messages = [{"role": "query", "content": PAIR[0]}, {"role": "document", "content": PAIR[1]}]
    want = oracle.apply_chat_template(messages, chat_template=SCORE, tokenize=False)
    assert encoder.encode(PAIR) == text.encode(tok, want, special=False) != text.encode(tok, PAIR)
    assert encoder.encode("the music") == text.encode(tok, "the music")
    spelled = encoder.encode((PAIR[0], "<|im_end|>"))
    assert spelled.count(tok.backend.token_to_id("<|im_end|>")) == 1
    second = {"score": "{{ messages[1].content }}"}
    added = dataclasses.replace(tok, templates=second, special={"bos_token": "<|im_start|>"})
    added.backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    bos = added.backend.token_to_id("<|im_start|>")
    assert PromptEncoder(added, 64, small.VOCAB).encode(PAIR) == [bos, *text.encode(added, PAIR[1], special=False)]


def test_types_of_tokens_are_not_read():
    """A RoBERTa with two of them, whose tokenizer numbers the second text 1 as BERT's do, would score something else."""
    served = lambda types, tok: SimpleNamespace(  # what is looked at
        name="x", tokenizer=tok, engine=SimpleNamespace(model=SimpleNamespace(cfg=SimpleNamespace(types=types)))
    )

    def joined(kind: str, **config) -> text.Tokenizer:
        tok = wire.tokenizer()
        tok.backend.post_processor = getattr(tokenizers.processors, kind)(("<|im_end|>", 2), ("<|im_start|>", 1))
        return dataclasses.replace(tok, config=config)

    with pytest.raises(APIError, match="by token types, which are not read here"):
        _without_types(served(2, joined("BertProcessing")))
    _without_types(served(1, joined("BertProcessing")))
    _without_types(served(2, joined("BertProcessing", model_input_names=["input_ids"])))
    _without_types(served(2, joined("RobertaProcessing")))


def test_pooling_gives_what_stands_at_each_token(ask, engines):
    """Of classes their softmax, of questions the logits of first and last tokens, of others the embedding."""
    ids = text.encode(wire.tokenizer(), PAIR[1])
    for name, way in (("token", softmax), ("question", lambda x: x)):
        status, said = ask("/pooling", name, input=PAIR[1])
        jsonschema.validate(said, SCHEMAS["pooled"])
        np.testing.assert_allclose(said["data"][0]["data"], way(outputs(engines, name, ids)), atol=1e-4)
    status, said = ask("/pooling", "base", input=PAIR[1], encoding_format="base64")
    x = outputs(engines, "base", ids)[-1]
    got = np.frombuffer(base64.b64decode(said["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(got, x / np.linalg.norm(x), atol=1e-5)


def test_embeddings_are_pooled_as_the_files_say(ask, engines):
    """Mean and first token, joined and of length one, as sentence-transformers does."""
    x = outputs(engines, "mean", text.encode(wire.tokenizer(), "music"))
    want = np.concatenate([x.mean(0), x[0]])
    status, said = ask("/v1/embeddings", "mean", input="music", dimensions=2 * small.CFG.embed)
    np.testing.assert_allclose(said["data"][0]["embedding"], want / np.linalg.norm(want), atol=1e-5)
    assert ask("/v1/embeddings", "mean", input="music", dimensions=small.CFG.embed)[0] == 400


def test_prompts_and_dense_modules_are_served(ask, engines):
    """Every route puts the default prompt in front of texts, not of token ids, and knows how long an embedding is."""
    tok = wire.tokenizer()
    for given, said in (("music", "the music"), (text.encode(tok, "music"), "music")):
        want = np.tanh(outputs(engines, "base", text.encode(tok, said)).mean(0)[:7])
        for path in ("/v1/embeddings", "/pooling"):
            status, got = ask(path, "deep", input=given)
            row = got["data"][0]["embedding" if "embed" in path else "data"]
            assert status == 200
            np.testing.assert_allclose(row, want / np.linalg.norm(want), atol=1e-5)
    assert ask("/v1/embeddings", "deep", input="music", dimensions=7)[0] == 200
    assert ask("/v1/embeddings", "deep", input="music", dimensions=small.CFG.embed)[0] == 400
    vectors = [np.tanh(outputs(engines, "base", text.encode(tok, "the " + t)).mean(0)[:7]) for t in PAIR]
    a, b = (v / np.linalg.norm(v) for v in vectors)
    got = ask("/v1/score", "deep", text_1=PAIR[0], text_2=PAIR[1])[1]["data"][0]["score"]
    assert abs(got - float(a @ b)) < 1e-5


@pytest.mark.parametrize("name", ["sequence", "token", "question", "base", "mean"])
def test_no_text_is_written(ask, name):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}),
        ("/v1/responses", {"input": "a"}),
    ):
        status, said = ask(path, name, **body)
        assert status == 400 and "write" in said["error"]["message"]
        assert said["error"]["param"] == "model"


@pytest.mark.parametrize(
    "path,name,body,why",
    [
        ("/v1/embeddings", "sequence", {"input": "a"}, "has a head for a sequence"),
        ("/v1/score", "sequences", {"text_1": "a", "text_2": "b"}, "has 3 labels; a score needs a model of one"),
        ("/v1/score", "token", {"text_1": "a", "text_2": "b"}, "has a head for a token"),
        ("/classify", "base", {"input": "a"}, "has no head"),
    ],
)
def test_what_a_model_cannot_be_asked(ask, path, name, body, why):
    status, said = ask(path, name, **body)
    assert status == 400 and why in said["error"]["message"]


# ---- sentence-transformers' files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [("last",), ("cls", "mean"), ("mean", "cls"), ("max",), ("sqrt",), ("weighted",)])
def test_files_are_read_as_they_were_written(tmp_path, modes):
    for normalize in (True, False):
        pooling = Pooling(modes, normalize, 48)
        write(pooling, tmp_path / str(normalize), 32)
        assert read(tmp_path / str(normalize)) == pooling
    assert read(tmp_path) is None


def test_poolings_are_sentence_transformers():
    """Its formulas over masked tokens (sentence_transformers' Pooling), here in numpy: 1e-6."""
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    w = np.arange(1, 6)[:, None]
    want = {"last": x[4], "cls": x[0], "mean": x.sum(0) / 5, "max": x.max(0), "sqrt": x.sum(0) / 5**0.5}
    want["weighted"] = (x * w).sum(0) / w.sum()
    for mode, y in want.items():
        np.testing.assert_allclose(Pooling((mode,), normalize=False)(x), y, atol=1e-6)
        np.testing.assert_allclose(Pooling((mode,))(x), y / np.linalg.norm(y), atol=1e-6)


@pytest.fixture
def deep() -> Pooling:
    """Two Dense modules, one without a bias, and a prompt."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    layers = (
        Dense(draw(48, 64), draw(48)),
        Dense(draw(24, 48) / 4, act="torch.nn.modules.linear.Identity"),
    )
    return Pooling(("mean", "cls"), True, 48, layers, "say: ")


def test_dense_modules_and_prompts_come_back(tmp_path, deep):
    """torch's Linear and Tanh over the pooled vector: 1e-6; files with their keys and tensors; length by the tokenizer."""
    write(deep, tmp_path, 32)
    again, x = read(tmp_path), np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    one, two = deep.dense
    want = two.weight @ np.tanh(one.weight @ np.concatenate([x.mean(0), x[0]]) + one.bias)
    np.testing.assert_allclose(again(x), want / np.linalg.norm(want), atol=1e-6)
    assert dataclasses.replace(again, dense=()) == dataclasses.replace(deep, dense=())
    assert (again.width(32), Pooling(("mean", "cls")).width(32)) == (24, 64)
    kinds = [m["path"] for m in json.loads((tmp_path / "modules.json").read_text())]
    assert kinds == ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    safetensors = pytest.importorskip("safetensors.numpy")
    assert safetensors.load_file(tmp_path / "2_Dense/model.safetensors").keys() == {"linear.weight", "linear.bias"}
    assert json.loads((tmp_path / "3_Dense/config.json").read_text())["bias"] is False
    (tmp_path / "sentence_bert_config.json").unlink()
    for most, length in ((40, 40), (10**30, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": most}))
        assert read(tmp_path).length == length
    with pytest.raises(ValueError, match="takes 64 numbers, and what comes to it has 32"):
        deep.width(16)
    good = json.loads((tmp_path / "2_Dense/config.json").read_text())
    for wrong, why in (({"activation_function": "torch.nn.GELU"}, "activation_function: found 'torch.nn.GELU'"),
                       ({"module_output_name": "other"}, "module_output_name"), ({"out_features": 47}, "found the tensors"),
                       ({"bias": False}, "found the tensors")):  # fmt: skip
        (tmp_path / "2_Dense/config.json").write_text(json.dumps(good | wrong))
        with pytest.raises(models.ConfigError, match=why):
            read(tmp_path)
    (tmp_path / "modules.json").write_text((tmp_path / "modules.json").read_text().replace("3_Dense", "../x"))
    with pytest.raises(models.ConfigError, match="expected the name of a folder beside it"):
        read(tmp_path)


def test_wrong_files(tmp_path):
    write(Pooling(), tmp_path, 32)
    file = tmp_path / "1_Pooling/config.json"
    for said, why in (('{"pooling_mode": "median"}', "median"), ("{}", "pooling_mode"), ("{", "not JSON")):
        file.write_text(said)
        with pytest.raises(models.ConfigError, match=why):
            read(tmp_path)
    file.write_text("[" * 100_000)
    with pytest.raises(models.ConfigError, match="not JSON"):
        read(tmp_path)
    modules = tmp_path / "modules.json"
    good = modules.read_text()
    for outside in ("..", "../1_Pooling", "/etc", ""):
        modules.write_text(good.replace("1_Pooling", outside))
        with pytest.raises(models.ConfigError, match="expected the name of a folder beside it"):
            read(tmp_path)
    modules.write_text(good.replace("Normalize", "LayerNorm"))
    with pytest.raises(models.ConfigError, match="found Transformer, Pooling, LayerNorm, expected"):
        read(tmp_path)
    write(Pooling(), tmp_path, 32)
    lower = tmp_path / "sentence_bert_config.json"
    lower.write_text('{"max_seq_length": null, "do_lower_case": true}')
    with pytest.raises(models.ConfigError, match="do_lower_case: found true"):
        read(tmp_path)
    lower.write_text("{}")
    said = tmp_path / "config_sentence_transformers.json"
    for d, why in (({"default_prompt_name": "q", "prompts": {"a": ""}}, "default_prompt_name 'q' of the prompts"),
                   ({"default_prompt_name": 3}, "expected the name of a text")):  # fmt: skip
        said.write_text(json.dumps(d))
        with pytest.raises(models.ConfigError, match=why):
            read(tmp_path)
    said.write_text('{"default_prompt_name": "q", "prompts": {"q": "find: "}}')
    file.write_text('{"pooling_mode": "mean", "include_prompt": false}')
    with pytest.raises(models.ConfigError, match="include_prompt false beside a default prompt"):
        read(tmp_path)
    with pytest.raises(ValueError, match="expected some of cls"):
        dataclasses.replace(Pooling(), modes=("median",))
