"""Classes of sounds against transformers' WhisperForAudioClassification, every weight random; float32, 2e-5."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fdel import models
from fdel.models import heads, whisper_classes
from tests.models.tiny import randomise
from tests.models.tiny import whisper as tiny


def make(directory, **more):
    """transformers' model, which is saved in a directory."""
    transformers = pytest.importorskip("transformers")
    names = {i: name for i, name in enumerate(["speech", "music", "rain", "bells", "wind"])}
    cfg = transformers.WhisperConfig(**tiny.VALUES, classifier_proj_size=24, id2label=names, **more)
    cfg.label2id = {v: k for k, v in names.items()}
    oracle = transformers.WhisperForAudioClassification(cfg).eval()
    randomise(oracle, 0)
    oracle.save_pretrained(directory)
    return oracle


@pytest.mark.parametrize("weighted", [False, True], ids=["last", "weighted"])
def test_logits_are_those_of_transformers(tmp_path, weighted):
    """`weighted`: a learnt sum of all hidden states goes to the head; without the last one's share it fails."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
    oracle = make(tmp_path, use_weighted_layer_sum=weighted)
    features = np.random.default_rng(0).standard_normal((3, 16, 40)).astype(np.float32)
    with torch.no_grad():
        want = oracle(torch.tensor(features)).logits.numpy()
    assert models.labelling(tmp_path) is whisper_classes and models.hearing(tmp_path) is None
    model = models.load(tmp_path, family=whisper_classes)
    got = jax.jit(lambda p, x: whisper_classes.logits(p, x, model.cfg))(model.params, features)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max() and want.std() > 0.1
    assert heads.label_names(model.cfg, model.cfg.labels) == ["speech", "music", "rain", "bells", "wind"]
    models.save(model, tmp_path / "again")
    again = models.load(tmp_path / "again", family=whisper_classes)
    assert again.cfg == model.cfg
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    files = [load_file(d / "model.safetensors") for d in (tmp_path, tmp_path / "again")]
    assert files[0].keys() == files[1].keys() and ("layer_weights" in files[0]) == weighted
    assert all(x.tobytes() == files[1][name].tobytes() for name, x in files[0].items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["use_weighted_layer_sum"] is weighted
    if weighted:
        unequal = model.params | {"shares": model.params["shares"] + np.arange(3, dtype=np.float32)}
        assert np.abs(whisper_classes.logits(unequal, features, model.cfg) - want).max() > 1e-2
