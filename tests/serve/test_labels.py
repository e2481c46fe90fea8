"""A model that names the classes of sounds, through the whole server: transformers' feature extractor and model."""

from types import SimpleNamespace

import numpy as np
import pytest

from fdel.serve.server import http as server_http
from fdel.serve.server import labels, launch, metrics
from fdel.serve.server.call import Server
from tests.serve import wire

pytest.importorskip("aiohttp", reason="needs the serve extra")
torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
from tests.models.test_whisper_classes import make  # noqa: E402
from tests.serve.test_films import b64, heard, wav  # noqa: E402


@pytest.fixture(scope="module")
def ear(tmp_path_factory):
    """transformers' tiny model, which hears 0.4 seconds and sums its layers' states, and a server of its files alone."""
    directory = tmp_path_factory.mktemp("labels")
    oracle = make(directory, use_weighted_layer_sum=True)
    model = labels.label_model(directory, "ear", sounds=2)
    state = Server({}, metrics.Metrics(metrics.serving(["ear"], server_http.PATHS)), labels={"ear": model})
    with wire.listening(state) as port:
        yield SimpleNamespace(port=port, state=state, secrets={}, oracle=oracle, model=model, directory=directory)


def ask(ear, content, **more):
    said = {"model": "ear", "messages": [{"role": "user", "content": content}]} | more
    return wire.call(ear, "POST", "/v1/classify", said, role=None)[:2]


@pytest.mark.slow
def test_classes_are_those_of_transformers(ear):
    """Of a sound that fills the window and of a shorter one, probabilities to 1e-4; scores on request."""
    from transformers import WhisperFeatureExtractor

    sounds = [wav(0.4, 1), wav(0.25, 2)]
    samples = [np.frombuffer(s[44:], "<i2").astype(np.float32) / 2**15 for s in sounds]
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    extractor.n_samples = 6400
    features = [extractor(x, sampling_rate=16000, max_length=6400, return_tensors="pt").input_features for x in samples]
    with torch.no_grad():
        want = ear.oracle(torch.cat(features)).logits
    url = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + b64(sounds[1])}}
    status, found = ask(ear, [heard(sounds[0]), url], use_activation=False)
    assert status == 200, found
    np.testing.assert_allclose([d["probs"] for d in found["data"]], want, atol=1e-3)
    status, found = ask(ear, [heard(sounds[0]), url])
    np.testing.assert_allclose([d["probs"] for d in found["data"]], want.softmax(-1), atol=1e-4)
    names = ear.oracle.config.id2label
    assert [d["label"] for d in found["data"]] == [names[int(row.argmax())] for row in want]
    assert want.softmax(-1).std() > 0.05 and found["usage"]["prompt_tokens"] == 40
    assert wire.call(ear, "GET", "/v1/models", role=None)[1]["data"][0]["input_modalities"] == ["audio"]
    assert wire.call(ear, "GET", "/v1/models/ear", role=None)[1]["id"] == "ear"
    assert wire.call(ear, "GET", "/openapi.json", role=None)[0] == 200


@pytest.mark.slow
def test_what_is_refused(ear):
    short, text = heard(wav(0.2)), {"type": "text", "text": "a"}
    cut = {"type": "input_audio", "input_audio": {"data": b64(wav(0.2)[:30]), "format": "wav"}}
    broken = {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}
    for content, more, why in (
        ([short, text], {}, "expected one, of sounds alone"),
        ("a", {}, "expected one, of sounds alone"),
        ([short] * 3, {}, "found 3 sounds, expected at most 2"),
        ([heard(wav(0.5))], {}, "expected more than 0 and at most 0.4"),
        ([cut], {}, "the WAV file"),
        ([broken], {}, "expected base64"),
        ([short], {"candidate_labels": ["a"]}, "has labels of its own, speech, music"),
    ):
        status, answer = ask(ear, content, **more)
        assert status == 400 and why in answer["error"]["message"], answer
    status, answer, _ = wire.call(ear, "POST", "/v1/embeddings", {"model": "ear", "input": "a"}, role=None)
    assert status == 404 and "names the classes of sounds: ask /v1/classify" in answer["error"]["message"]


@pytest.mark.slow
def test_a_directory_that_names_classes_is_served_as_such(ear, tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(launch, "listen", lambda *args: served.extend(args))
    launch.main([ear.directory], launch.ServerOptions(names=["s"], sounds=3))
    assert served[0] == [] == served[3] == served[4] and [(m.name, m.sounds) for m in served[5]] == [("s", 3)]
    with pytest.raises(ValueError, match="names no classes of sounds; expected a WhisperForAudioClassification"):
        labels.label_model(tmp_path, "none")
