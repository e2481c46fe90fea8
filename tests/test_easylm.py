"""Streams of EasyLM's GPT-J, OPT and RoBERTa are the checkpoints that they were made of."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
msgpack = pytest.importorskip("msgpack")

import transformers  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from fdel import easylm  # noqa: E402
from fdel.models import ConfigError  # noqa: E402
from fdel.params import CheckpointError  # noqa: E402
from tests.models import tiny  # noqa: E402

LAST = {torch.nn.Linear: "kernel", torch.nn.Embedding: "embedding", torch.nn.LayerNorm: "scale"}


def stream(model, file, extra=()):
    """Write a torch model as EasyLM does: Flax calls weights by what they are of, and has those of matrices [in out]."""
    with file.open("wb") as f:
        for name, p in [*model.named_parameters(), *extra]:
            module, _, leaf = name.rpartition(".")
            kind = next((k for k in LAST if isinstance(model.get_submodule(module), k)), None)
            array = p.detach().numpy()
            array = array.T.copy() if leaf == "weight" and kind is torch.nn.Linear else array
            last = LAST[kind] if leaf == "weight" else leaf
            data = msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
            key = ("params", "params", *module.split("."), last)
            f.write(msgpack.packb((key, msgpack.packb(msgpack.ExtType(1, data)))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_j", "opt:after", "roberta"])
def test_streams_of_flax_models_are_converted(name, tmp_path):
    oracle = tiny.checkpoint(name, tmp_path / "torch")
    stream(oracle, tmp_path / "stream")
    count = easylm.convert(tmp_path / "stream", tmp_path / "torch", tmp_path / "out", shard_bytes=10**9)
    got, want = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "torch"))
    assert got.keys() == want.keys() and count == sum(x.size for x in want.values())
    for key, x in want.items():
        np.testing.assert_array_equal(got[key], x, err_msg=key)
    again = getattr(transformers, tiny.TINY[name].model).from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, oracle(ids).logits, rtol=1e-5, atol=1e-5)


def test_streams_that_do_not_fit_are_refused(tmp_path):
    oracle = tiny.checkpoint("gpt_j", tmp_path / "torch")
    stream(oracle, tmp_path / "stream", [("lm_head.mean", oracle.lm_head.bias)])
    with pytest.raises(CheckpointError, match="(?s)lm_head.mean.*ends in none of kernel, scale, embedding, bias"):
        easylm.convert(tmp_path / "stream", tmp_path / "torch", tmp_path / "out", shard_bytes=10**9)
    tiny.checkpoint("gpt2", tmp_path / "gpt2")
    with pytest.raises(
        ConfigError, match="found model_type gpt2, EasyLM's checkpoints are of llama, gptj, opt, roberta"
    ):
        easylm.convert(tmp_path / "stream", tmp_path / "gpt2", tmp_path / "out", shard_bytes=10**9)
