"""Models that tests of serving share."""

from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import models, text
from tests.models import tiny
from tests.serve import small


@pytest.fixture(scope="package")
def model() -> models.Model:
    return small.make_model()


@pytest.fixture(scope="package")
def tokenizer() -> text.Tokenizer:
    return text.train_bpe(["stop the music, stop it"], small.VOCAB)


@pytest.fixture(scope="package")
def pair(tmp_path_factory):
    """name -> (torch model, fdel model) of a tiny checkpoint."""
    pytest.importorskip("torch", reason="needs the torch extra")

    @lru_cache
    def make(name: str):
        path = tmp_path_factory.mktemp(name)
        return tiny.checkpoint(name, path), models.load(path, stacked=False)

    return make


@pytest.fixture(scope="package")
def hearing(tmp_path_factory):
    """transformers' tiny Whisper, the server's model of its files, and features of three windows and a half."""
    pytest.importorskip("torch", reason="needs the torch extra")
    from fdel.serve.server import audio
    from tests.models.tiny import whisper

    directory = tmp_path_factory.mktemp("whisper")
    oracle, model = whisper.make(directory), audio.heard_model(directory, "ear", rows=2)
    model.scribe.start()
    features = np.random.default_rng(0).standard_normal((16, 140)).astype(np.float32) * 2
    yield SimpleNamespace(oracle=oracle, model=model, listener=model.listener, features=features, directory=directory)
    model.scribe.close()


@pytest.fixture(scope="package")
def running(model, tmp_path_factory):
    """A server in a thread: see `wire.server`."""
    pytest.importorskip("aiohttp", reason="needs the serve extra")
    from tests.serve import wire

    with wire.server(model, tmp_path_factory.mktemp("keys")) as found:
        yield found
