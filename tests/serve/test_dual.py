"""Models that score images and texts, asked by OpenAI's client: transformers' features and its pipeline of labels."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import text
from fdel.serve.server import dual, launch, metrics
from fdel.serve.server import http as server_http
from fdel.serve.server.call import Server
from fdel.serve.server.openai.schema import SCHEMAS
from tests.serve import small, wire

openai = pytest.importorskip("openai")
pytest.importorskip("torch", reason="needs the torch extra")
PIL = pytest.importorskip("PIL.Image", reason="needs the media extra")
import jsonschema  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.models.tiny import randomise  # noqa: E402
from tests.models.tiny import sight as tiny  # noqa: E402
from tests.serve.test_images import file, part, rgb, said, url  # noqa: E402

TEXT = dict(vocab_size=small.VOCAB, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64)  # fmt: skip
LABELS = ["the weather", "music", "a b c d e"]


def tokenizer(directory, ends: str) -> transformers.PreTrainedTokenizerFast:
    """Write a tokenizer that ends texts as the family's does, and give transformers' of its file."""
    from tokenizers.processors import TemplateProcessing

    tok = text.train_bpe(wire.WORDS, small.VOCAB - 10, ["<s>", "</s>", "<pad>"])
    ids = [(t, tok.backend.token_to_id(t)) for t in ("<s>", "</s>")]
    tok.backend.post_processor = TemplateProcessing(single=ends, special_tokens=ids)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok.backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_input_names=["input_ids"] + ["attention_mask"] * (ends[0] == "<"),  # SigLIP's gives no mask
    )
    fast.save_pretrained(directory)
    return fast


def make(kind: str, directory) -> SimpleNamespace:
    """transformers' tiny model with every weight random, its files, and the server's model of them."""
    clip = kind == "clip"
    tok = tokenizer(directory, "<s> $A </s>" if clip else "$A </s>")
    ends = dict(bos_token_id=1, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    if clip:
        cfg = transformers.CLIPConfig(text_config=TEXT | ends, vision_config=tiny.CLIP, projection_dim=24)
        oracle = transformers.CLIPModel._from_config(cfg, attn_implementation="eager").eval()
        processor = transformers.CLIPImageProcessor(**tiny.EDGE)
    else:
        cfg = transformers.SiglipConfig(text_config=TEXT | ends | dict(projection_size=32), vision_config=tiny.SIGLIP)
        oracle = transformers.SiglipModel._from_config(cfg, attn_implementation="eager").eval()
        processor = transformers.SiglipImageProcessor(size=dict(height=16, width=16))
    randomise(oracle, 0)
    with torch.no_grad():
        oracle.logit_scale.fill_(1.5)
    oracle.save_pretrained(directory)
    processor.save_pretrained(directory)
    return SimpleNamespace(
        oracle=oracle, tok=tok, processor=processor, directory=directory, model=dual.dual_model(directory, kind)
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A server of a tiny CLIP and a tiny SigLIP, and OpenAI's client of it."""
    made = {kind: make(kind, tmp_path_factory.mktemp(kind)) for kind in ("clip", "siglip")}
    state = Server(
        {}, metrics.Metrics(metrics.serving(list(made), server_http.PATHS)), dual={k: m.model for k, m in made.items()}
    )
    with wire.listening(state) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(port=port, state=state, secrets={}, client=client, **made)


def post(two, path: str, body: dict, shape: str) -> dict:
    status, answer, _ = wire.call(two, "POST", path, body, role=None)
    assert status == 200, answer
    jsonschema.validate(answer, SCHEMAS[shape])
    return answer


def refused(two, path: str, body: dict) -> dict:
    status, answer, _ = wire.call(two, "POST", path, body, role=None)
    jsonschema.validate(answer, SCHEMAS["error"])
    assert 400 <= status < 500
    return answer["error"]


def unit(x: torch.Tensor) -> np.ndarray:
    return (x / x.norm(dim=-1, keepdim=True)).numpy()


def texts_of(m, kind: str, texts: list[str]) -> torch.Tensor:
    """What transformers gives of texts, padded as the family's processor does it."""
    how = dict(padding=True) if kind == "clip" else dict(padding="max_length", max_length=64)
    with torch.no_grad():
        ids = m.tok(texts, return_tensors="pt", **how)["input_ids"]
        return m.oracle.get_text_features(input_ids=ids).pooler_output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_embeddings_are_transformers_features(two, kind):
    """Of texts, token ids and images, of length 1, or as they are if that is asked for; 2e-5."""
    m = getattr(two, kind)
    words = ["the weather in Paris is fine", *LABELS]
    want = texts_of(m, kind, words)
    found = two.client.embeddings.create(model=kind, input=words, encoding_format="float")
    got = np.array([d.embedding for d in found.data])
    np.testing.assert_allclose(got, unit(want), atol=2e-5)
    assert found.usage.prompt_tokens == sum(len(m.tok(w)["input_ids"]) for w in words)
    packed = two.client.embeddings.create(model=kind, input=[m.tok(w)["input_ids"] for w in words])  # base64
    np.testing.assert_array_equal(np.array([d.embedding for d in packed.data], np.float32), got.astype(np.float32))
    one = post(two, "/v1/embeddings", {"model": kind, "messages": said(words[0])}, "embeddings")
    np.testing.assert_allclose(one["data"][0]["embedding"], got[0], atol=1e-6)

    images = [rgb(0), rgb(1, 40, 17)]
    with torch.no_grad():
        pixels = m.processor(images, return_tensors="pt")["pixel_values"]
        want = m.oracle.get_image_features(pixel_values=pixels).pooler_output
    body = {"model": kind, "messages": said(*(url(file(x)) for x in images))}
    found = post(two, "/v1/embeddings", body, "embeddings")
    np.testing.assert_allclose([d["embedding"] for d in found["data"]], unit(want), atol=2e-5)
    assert found["usage"]["prompt_tokens"] == 32
    found = post(two, "/v1/embeddings", body | {"use_activation": False}, "embeddings")
    np.testing.assert_allclose([d["embedding"] for d in found["data"]], want.numpy(), atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_labels_of_images_are_those_of_transformers_pipeline(two, kind):
    """Probabilities (softmax of CLIP, sigmoid of SigLIP) with its template and another, of several images; logits; 2e-5."""
    m = getattr(two, kind)
    images = [rgb(0), rgb(1, 40, 17)]
    pipe = transformers.pipeline(
        "zero-shot-image-classification", model=m.oracle, tokenizer=m.tok, image_processor=m.processor
    )
    body = {"model": kind, "messages": said(*(url(file(x)) for x in images)), "candidate_labels": LABELS}
    for more in ({}, {"hypothesis_template": "a {} b"}):
        found = post(two, "/v1/classify", body | more, "classes")
        for row, x in zip(found["data"], images, strict=True):
            want = pipe(PIL.fromarray(x), candidate_labels=LABELS, **more)
            scores = {w["label"]: w["score"] for w in want}
            np.testing.assert_allclose(row["probs"], [scores[label] for label in LABELS], atol=2e-5)
            assert row["label"] == want[0]["label"] and row["num_classes"] == 3
    assert (abs(sum(row["probs"]) - 1) < 1e-5) == (kind == "clip")
    logits = post(two, "/v1/classify", body | {"use_activation": False}, "classes")["data"][0]["probs"]
    sentences = [f"This is a photo of {label}." for label in LABELS]
    with torch.no_grad():
        how = dict(padding=True) if kind == "clip" else dict(padding="max_length", max_length=64)
        pixels = m.processor(images[:1], return_tensors="pt")["pixel_values"]
        want = m.oracle(**m.tok(sentences, return_tensors="pt", **how), pixel_values=pixels).logits_per_image[0]
    np.testing.assert_allclose(logits, want.numpy(), atol=1e-4)
    kept = len(m.model.labels.held)
    assert kept == 6 and post(two, "/v1/classify", body, "classes") and len(m.model.labels.held) == kept


@pytest.mark.slow
def test_what_two_towers_do_not_do_is_refused(two):
    seen = {"model": "clip", "messages": said(url(file(rgb(0))))}
    for path, body, why in (
        ("/v1/chat/completions", seen, "scores images and texts: ask /v1/embeddings"),
        ("/v1/score", {"model": "clip", "text_1": "a", "text_2": "b"}, "scores images and texts"),
        ("/v1/embeddings", {"model": "clip"}, "input: expected either input or messages"),
        ("/v1/embeddings", seen | {"messages": said("a", url(file(rgb(0))))}, "found a text and images"),
        ("/v1/embeddings", seen | {"messages": seen["messages"] * 2}, "one message, of images alone"),
        ("/v1/embeddings", seen | {"messages": said("a") * 2}, "this model embeds no conversations"),
        ("/v1/embeddings", seen | {"messages": said("http://example.com/a.png")}, "fetches no images"),
        ("/v1/embeddings", seen | {"messages": said(url(b"no image"))}, "no image of a known format"),
        ("/v1/embeddings", {"model": "clip", "input": "a b " * 60}, "this model reads at most 64"),
        ("/v1/embeddings", {"model": "clip", "input": "a", "dimensions": 7}, "found 7, this model has 24"),
        ("/v1/embeddings", {"model": "clip", "input": [[9999]]}, "9999"),
        ("/v1/classify", seen, "candidate_labels: missing"),
        ("/v1/classify", {"model": "clip", "input": "a", "candidate_labels": ["b"]}, "messages: expected images"),
        ("/v1/classify", seen | {"candidate_labels": ["b"], "hypothesis_template": "a"}, "one {}"),
        ("/v1/classify", seen | {"candidate_labels": []}, "candidate_labels"),
        ("/v1/classify", seen | {"candidate_labels": ["a b " * 60]}, "candidate_labels: found a text of"),
        ("/v1/chat/completions", seen | {"messages": [{"role": "system", "content": [part("data:")]}]}, "scores images"),
    ):  # fmt: skip
        assert why in refused(two, path, body)["message"], (path, body, refused(two, path, body))
    status, listed, _ = wire.call(two, "GET", "/v1/models", role=None)
    assert [(m["id"], m["input_modalities"]) for m in listed["data"]] == [
        ("clip", ["text", "image"]), ("siglip", ["text", "image"]),
    ]  # fmt: skip
    assert wire.call(two, "GET", "/v1/models/clip", role=None)[1]["id"] == "clip"
    assert wire.call(two, "GET", "/openapi.json", role=None)[0] == wire.call(two, "GET", "/ready", role=None)[0] == 200


@pytest.mark.slow
def test_a_directory_that_scores_is_served_as_such(two, tmp_path, monkeypatch):
    """`fdel serve` finds it by config.json, which may say little; without a processor's file it reads texts alone."""
    served = []
    monkeypatch.setattr(launch, "listen", lambda *args: served.extend(args))
    launch.main([two.siglip.directory], launch.ServerOptions(names=["s"], images=3))
    assert served[0] == [] == served[3] and [(m.name, m.images) for m in served[4]] == [("s", 3)]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 224, "width": 224}}))
    found = dual.read_sight(tmp_path)
    assert (found.kind, found.settings.patch, found.settings.mean) == ("siglip_vision_model", 16, (0.5,) * 3)
    (tmp_path / "preprocessor_config.json").unlink()
    assert dual.read_sight(tmp_path) is None
    with pytest.raises(ValueError, match="scores no images; expected a model of clip, siglip"):
        dual.dual_model(tmp_path.parent, "none")


def test_the_longest_unused_labels_make_room():
    kept, vector = dual.Recent(2), np.zeros(3)
    kept.add({(1,): vector, (2,): vector})
    found, new = kept.split([[1], [3], [3]])
    assert list(found) == [(1,)] and new == [(3,)]
    kept.add({(3,): vector})
    assert list(kept.held) == [(1,), (3,)]
