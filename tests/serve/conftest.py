"""Models that tests of serving share."""

from functools import lru_cache

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
