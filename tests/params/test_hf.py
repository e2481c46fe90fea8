"""Checkpoints in hub layout: against safetensors and transformers, by every way of loading, and with damaged files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from fdel import params as P
from fdel.params import files, hf, mesh, place
from fdel.params.spec import Param, layers, named_leaves, normal, ones, parts, stack, unstack

W = normal(0.02)
V, D, F, L, N, K, H = 96, 32, 48, 3, 4, 2, 8


def llama_spec() -> dict:
    """A llama, as its family would declare it."""
    m, a = "model.layers.{layers}.", "model.layers.{layers}.self_attn."
    layer = {
        "attn_norm": Param("embed", (D,), ones, m + "input_layernorm.weight"),
        "q": Param("embed heads head_dim", (D, N, H), W, a + "q_proj.weight", "(heads head_dim) embed"),
        "k": Param("embed kv_heads head_dim", (D, K, H), W, a + "k_proj.weight", "(kv_heads head_dim) embed"),
        "v": Param("embed kv_heads head_dim", (D, K, H), W, a + "v_proj.weight", "(kv_heads head_dim) embed"),
        "o": Param("heads head_dim embed", (N, H, D), W, a + "o_proj.weight", "embed (heads head_dim)"),
        "mlp_norm": Param("embed", (D,), ones, m + "post_attention_layernorm.weight"),
        "gate": Param("embed ffn", (D, F), W, m + "mlp.gate_proj.weight", "ffn embed"),
        "up": Param("embed ffn", (D, F), W, m + "mlp.up_proj.weight", "ffn embed"),
        "down": Param("ffn embed", (F, D), W, m + "mlp.down_proj.weight", "embed ffn"),
    }
    return {
        "embed": Param("vocab embed", (V, D), W, "model.embed_tokens.weight"),
        "layers": layers(lambda kind: layer, (0,) * L),
        "norm": Param("embed", (D,), ones, "model.norm.weight"),
        "head": Param("vocab embed", (V, D), W, "lm_head.weight"),
    }


def llama_arrays(t: dict[str, np.ndarray]) -> dict:
    """What the spec says of transformers' tensors, written out by hand."""
    name = lambda i, rest: t[f"model.layers.{i}.{rest}.weight"]
    stacked = lambda f: np.stack([f(i) for i in range(L)])
    return {
        "embed": t["model.embed_tokens.weight"],
        "layers": {
            "attn_norm": stacked(lambda i: name(i, "input_layernorm")),
            "q": stacked(lambda i: name(i, "self_attn.q_proj").reshape(N, H, D).transpose(2, 0, 1)),
            "k": stacked(lambda i: name(i, "self_attn.k_proj").reshape(K, H, D).transpose(2, 0, 1)),
            "v": stacked(lambda i: name(i, "self_attn.v_proj").reshape(K, H, D).transpose(2, 0, 1)),
            "o": stacked(lambda i: name(i, "self_attn.o_proj").T.reshape(N, H, D)),
            "mlp_norm": stacked(lambda i: name(i, "post_attention_layernorm")),
            "gate": stacked(lambda i: name(i, "mlp.gate_proj").T),
            "up": stacked(lambda i: name(i, "mlp.up_proj").T),
            "down": stacked(lambda i: name(i, "mlp.down_proj").T),
        },
        "norm": t["model.norm.weight"],
        "head": t["lm_head.weight"],
    }


def mixed_spec() -> dict:
    """Fused tensors, experts in a layer pattern, a scalar, axes of size one, an integer array and a fixed dtype."""
    qkv, up = parts(q=12, k=6), parts(gate=5, up=5)

    def layer(kind: int) -> dict:
        m = "h.{layers}."
        group = {
            "q": Param("embed kv_heads rep head_dim", (4, 2, 3, 3), W, m + "qkv", "(kv_heads [rep head_dim]) embed", (0, 12)),
            "k": Param("embed kv_heads head_dim", (4, 2, 3), W, m + "qkv", "(kv_heads [head_dim]) embed", (9, 12)),
        }
        flat = {
            "q": Param("embed heads head_dim", (4, 4, 3), W, m + "attn", "embed [heads head_dim]", qkv["q"]),
            "k": Param("embed kv_heads head_dim", (4, 2, 3), W, m + "attn", "embed [kv_heads head_dim]", qkv["k"]),
        }
        experts = {
            "gate": Param("embed ffn", (4, 5), W, m + "mlp.{experts}.gate_up", "[ffn] embed", up["gate"]),
            "up": Param("embed ffn", (4, 5), W, m + "mlp.{experts}.gate_up", "[ffn] embed", up["up"]),
        }
        conv = Param("kernel channels", (4, 6), W, m + "conv", "channels 1 kernel")
        bias = Param("experts", (2,), W, m + "bias", dtype="float32")
        rest = {"conv": conv, "bias": bias, "scale": Param("", (), W, m + "scale")}
        return (group if kind else flat) | stack(experts, "experts", range(2)) | rest

    order = Param("vocab", (5,), W, "order", dtype="int32")
    return {"order": order, "one": Param("embed", (1,), W, "one"), "layers": layers(layer, (0, 0, 1, 0, 0, 1, 0))}


def tensors_of(spec: dict, dtype: np.dtype, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors for each name that a spec declares, made without the loader."""
    rng = np.random.default_rng(seed)
    out = {}
    for _, p in named_leaves(spec):
        for name in P.hf_names(p):
            x = rng.integers(0, 99, P.layout(p).file_shape)
            out[name] = x.astype(p.dtype) if p.dtype else (x / 7 - 6).astype(dtype)
    return out


def params_of(spec: dict, tensors: dict[str, np.ndarray]) -> dict:
    """The params of a spec from whole tensors, by the layouts that test_spec checks."""

    def leaf(p: Param) -> np.ndarray:
        items = np.stack([P.layout(p).read(tensors[name]) for name in P.hf_names(p)])
        return items.reshape(p.shape)

    return jax.tree.map(leaf, spec)


def same(a: dict, b: dict) -> None:
    """Equal structures, dtypes, shapes and bytes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(named_leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), path


def save_shards(tensors: dict[str, np.ndarray], path: Path, count: int) -> None:
    """Write shards and an index with the safetensors library."""
    path.mkdir(exist_ok=True)
    where = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: np.ascontiguousarray(x) for n, x in tensors.items() if where[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# ---- every way of loading gives the same arrays --------------------------------------------------------------------

MESH = {"fsdp": 2, "tp": 2, "dp": 2}
RULES = mesh.TRAIN | {"kv_heads": None, "ffn": None, "vocab": None, "inner": None}
WAYS = ["plain", "listed", "sharded", "listed sharded", "sharded layers", "device", "device sharded", "device sharded layers"]


@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [llama_spec, mixed_spec])
def test_load(make: Callable, way: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" in way and chunk != 200:
        pytest.skip("chunks do not depend on the device")
    spec = make()
    tensors = tensors_of(spec, np.float32)
    save_shards(tensors, tmp_path, 3)
    expected = params_of(spec, tensors)
    if "listed" in way:
        spec, expected = unstack(spec), unstack(expected)
    rules = RULES | ({"layers": "dp"} if "layers" in way else {})
    if make is mixed_spec:
        rules = rules | {"heads": "tp", "layers": None}
    shardings = mesh.shardings(fit(spec, rules), mesh.make_mesh(MESH), rules) if "sharded" in way else None
    monkeypatch.setattr(place, "CHUNK", chunk)
    if "device" in way:
        monkeypatch.setattr(hf, "on_cpu", lambda sharding: False)
    got = P.load(spec, tmp_path, shardings=shardings)
    same(got, expected)
    if shardings:
        jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding} {s}"), got, shardings)
