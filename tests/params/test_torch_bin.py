"""PyTorch checkpoints: the same arrays as from safetensors, and no code of a file is ever run."""

import json
import os
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from fdel import params as P
from fdel.params.spec import Param, layers, normal

W = normal(0.02)


def spec() -> dict:
    """An embedding and three stacked matrices."""
    up = Param("embed ffn", (4, 6), W, "l.{layers}.up", "ffn embed")
    return {"embed": Param("vocab embed", (5, 4), W, "embed"), "layers": layers(lambda kind: {"up": up}, (0,) * 3)}


@pytest.fixture
def torch() -> object:
    return pytest.importorskip("torch", reason="needs the torch extra")


def state(torch: object, dtype: str = "float32") -> dict:
    """Random tensors; one is not contiguous."""
    torch.manual_seed(0)
    t = {f"l.{i}.up": torch.randn(6, 4).to(getattr(torch, dtype)) for i in range(3)}
    return t | {"embed": torch.randn(4, 5).to(getattr(torch, dtype)).T}


def expected(t: dict, dtype: str) -> dict:
    """Our arrays, written out by hand."""
    t = {n: x.float().numpy().astype(dtype) for n, x in t.items()}
    return {"embed": t["embed"], "layers": {"up": np.stack([t[f"l.{i}.up"].T for i in range(3)])}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("form", ["zip", "legacy", "shards"])
def test_load(form: str, dtype: str, torch: object, tmp_path: Path) -> None:
    if (form, dtype) == ("legacy", "float8_e4m3fn"):
        pytest.skip("torch itself cannot read that")
    t = state(torch, dtype)
    if form == "shards":
        where = {n: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, n in enumerate(t)}
        for file in set(where.values()):
            torch.save({n: x for n, x in t.items() if where[n] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        torch.save(t, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "zip")
    got = P.load(spec(), tmp_path)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected(t, dtype)), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == y.tobytes()
    P.save(spec(), got, tmp_path)  # safetensors are preferred where both exist
    torch.save({}, tmp_path / "pytorch_model.bin")
    chex.assert_trees_all_equal(P.load(spec(), tmp_path), got)


def test_the_same_checks(torch: object, tmp_path: Path) -> None:
    t = state(torch)
    torch.save(t | {"l.1.up": t["l.1.up"].T, "x": torch.ones(2), "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(P.CheckpointError) as e:
        P.load(spec(), tmp_path)
    text = str(e.value)
    assert "l.1.up: the shape is [4, 6]" in text and "unexpected: x" in text and "step is int" in text


class Malice:
    """Makes a file that creates another one when it is unpickled."""

    def __init__(self, target: str):
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_is_refused(new: bool, torch: object, tmp_path: Path) -> None:
    target = tmp_path / "made"
    torch.save({"x": Malice(str(target))}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(P.CheckpointError, match="weights_only=True. refused it"):
        P.load(spec(), tmp_path)
    assert not target.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert target.exists()  # it would have run


@pytest.mark.parametrize("keep", [0, 10, 500])
def test_a_truncated_file(keep: int, torch: object, tmp_path: Path) -> None:
    torch.save(state(torch), tmp_path / "pytorch_model.bin")
    os.truncate(tmp_path / "pytorch_model.bin", keep)
    with pytest.raises(P.CheckpointError, match="refused it"):
        P.load(spec(), tmp_path)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pytorch_model.bin needs PyTorch: pip install 'fdel\[torch\]', or convert"):
        P.load(spec(), tmp_path)
