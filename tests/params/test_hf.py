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
from fdel.params import files, place
from fdel.params.spec import Param, layers, named_leaves, normal, ones, parts, stack, unstack

W = normal(0.02)
V, D, F, L, N, K, H = 96, 32, 48, 4, 4, 2, 8


def read(path, name):
    return P.tensors(path)[name].read()


def llama_spec() -> dict:
    """A llama, as its family would declare it."""
    m, a = "model.layers.{layers}.", "model.layers.{layers}.self_attn."
    layer = {
        "attn_norm": Param("embed", (D,), ones, m + "input_layernorm.weight"),
        "q": Param("heads head_dim embed", (N, H, D), W, a + "q_proj.weight", "(heads head_dim) embed"),
        "k": Param("kv_heads head_dim embed", (K, H, D), W, a + "k_proj.weight", "(kv_heads head_dim) embed"),
        "v": Param("kv_heads head_dim embed", (K, H, D), W, a + "v_proj.weight", "(kv_heads head_dim) embed"),
        "o": Param("embed heads head_dim", (D, N, H), W, a + "o_proj.weight", "embed (heads head_dim)"),
        "mlp_norm": Param("embed", (D,), ones, m + "post_attention_layernorm.weight"),
        "gate": Param("ffn embed", (F, D), W, m + "mlp.gate_proj.weight"),
        "up": Param("ffn embed", (F, D), W, m + "mlp.up_proj.weight"),
        "down": Param("embed ffn", (D, F), W, m + "mlp.down_proj.weight"),
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
            "q": stacked(lambda i: name(i, "self_attn.q_proj").reshape(N, H, D)),
            "k": stacked(lambda i: name(i, "self_attn.k_proj").reshape(K, H, D)),
            "v": stacked(lambda i: name(i, "self_attn.v_proj").reshape(K, H, D)),
            "o": stacked(lambda i: name(i, "self_attn.o_proj").reshape(D, N, H)),
            "mlp_norm": stacked(lambda i: name(i, "post_attention_layernorm")),
            "gate": stacked(lambda i: name(i, "mlp.gate_proj")),
            "up": stacked(lambda i: name(i, "mlp.up_proj")),
            "down": stacked(lambda i: name(i, "mlp.down_proj")),
        },
        "norm": t["model.norm.weight"],
        "head": t["lm_head.weight"],
    }


def mixed_spec() -> dict:
    """Fused tensors, experts in a layer pattern, a scalar, axes of size one, an integer array and a fixed dtype."""
    qkv, up = parts(q=12, k=6), parts(gate=6, up=6)

    def layer(kind: int) -> dict:
        m = "h.{layers}."
        group = {
            "q": Param(
                "kv_heads rep head_dim embed", (2, 3, 3, 4), W, m + "qkv", "(kv_heads [rep head_dim]) embed", (0, 12)
            ),
            "k": Param("kv_heads head_dim embed", (2, 3, 4), W, m + "qkv", "(kv_heads [head_dim]) embed", (9, 12)),
        }
        flat = {
            "q": Param("heads head_dim embed", (4, 3, 4), W, m + "attn", "embed [heads head_dim]", qkv["q"]),
            "k": Param("kv_heads head_dim embed", (2, 3, 4), W, m + "attn", "embed [kv_heads head_dim]", qkv["k"]),
        }
        experts = {
            "gate": Param("ffn embed", (6, 4), W, m + "mlp.{experts}.gate_up", "[ffn] embed", up["gate"]),
            "up": Param("ffn embed", (6, 4), W, m + "mlp.{experts}.gate_up", "[ffn] embed", up["up"]),
        }
        conv = Param("kernel channels", (4, 6), W, m + "conv", "channels 1 kernel")
        bias = Param("experts", (2,), W, m + "bias", dtype="float32")
        rest = {"conv": conv, "bias": bias, "scale": Param("", (), W, m + "scale")}
        return (group if kind else flat) | stack(experts, "experts", range(2)) | rest

    order = Param("vocab", (6,), W, "order", dtype="int32")
    return {
        "order": order,
        "one": Param("rep", (1,), W, "one"),
        "lead": Param("embed", (4,), W, "lead", "1 1 embed"),
        "layers": layers(layer, (0, 0, 1, 0, 0, 1, 0, 0)),
    }


def tensors_of(spec: dict, dtype: np.dtype, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors for each name that a spec declares, made without the loader."""
    rng = np.random.default_rng(seed)
    out = {}
    for _, p in named_leaves(spec):
        for name in P.hf_names(p):
            x = rng.integers(0, 99, P.layout(p).file_shape)
            out[name] = np.asarray(x, p.dtype) if p.dtype else np.asarray(x / 7 - 6, dtype)
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
        save_file({n: x for n, x in tensors.items() if where[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# ---- every way of loading gives the same arrays --------------------------------------------------------------------

WAYS = [
    *[(way, chunk) for way in ("plain", "sharded", "sharded layers") for chunk in (1, 200, 1 << 20)],
    *[
        (way, 200)
        for way in ("listed", "listed sharded", "device", "device listed", "device sharded", "device sharded layers")
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "chunk"), WAYS)
@pytest.mark.parametrize("make", [llama_spec, mixed_spec])
def test_load(make: Callable, way: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make()
    tensors = tensors_of(spec, np.float32)
    save_shards(tensors, tmp_path, 3)
    expected = params_of(spec, tensors)
    if "listed" in way:
        spec, expected = unstack(spec), unstack(expected)
    rules = P.TRAIN | ({"layers": "dp"} if "layers" in way else {})
    shardings = P.shardings(spec, P.make_mesh({"fsdp": 2, "tp": 2, "dp": 2}), rules) if "sharded" in way else None
    monkeypatch.setattr(place, "CHUNK", chunk)
    if "device" in way:  # as on an accelerator
        monkeypatch.setattr(place, "on_cpu", lambda sharding: False)
    got = P.load(spec, tmp_path, shardings=shardings)
    same(got, expected)
    if shardings:
        for x, s in zip(jax.tree.leaves(got), jax.tree.leaves(shardings), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim)


UNLIKE = {  # parts whose sizes forbid or restrict reading in rows
    "rows": [
        Param("embed heads head_dim", (4, 3, 2), W, "x", "[heads head_dim] embed", (0, 10)),
        Param("embed kv_heads rope_dim", (4, 2, 2), W, "x", "[kv_heads rope_dim] embed", (6, 10)),
    ],
    "sizes without a common divisor": [
        Param("embed heads head_dim", (4, 2, 3), W, "x", "[heads head_dim] embed", (0, 14)),
        Param("embed kv_heads rope_dim", (4, 2, 4), W, "x", "[kv_heads rope_dim] embed", (6, 14)),
    ],
    "other axes in front": [
        Param("groups rep ffn", (2, 3, 2), W, "x", "(groups rep) [ffn]", (0, 5)),
        Param("heads ffn", (6, 3), W, "x", "heads [ffn]", (2, 5)),
    ],
    "one of each": [
        Param("groups rep", (1, 4), W, "x", "[groups rep]", (0, 5)),
        Param("ffn", (1,), W, "x", "[ffn]", (4, 5)),
    ],
}


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
def test_parts_of_unlike_sizes(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = UNLIKE[case]
    tensor = np.random.default_rng(0).normal(size=P.layout(a).file_shape).astype(np.float32)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    monkeypatch.setattr(place, "CHUNK", chunk)
    same(P.load([a, b], tmp_path), [P.layout(a).read(tensor), P.layout(b).read(tensor)])


@pytest.mark.parametrize("listed", [False, True])
def test_arrays_are_the_memory_that_was_read_into(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = unstack(llama_spec()) if listed else llama_spec()
    save_shards(tensors_of(spec, np.float32), tmp_path, 1)
    aligned, made = place._aligned, set()

    def recording(shape: tuple, dtype: np.dtype) -> np.ndarray:
        out = aligned(shape, dtype)
        made.add(out.ctypes.data)
        return out

    monkeypatch.setattr(place, "_aligned", recording)
    params = P.load(spec, tmp_path)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)} == made
    before = jax.tree.map(np.array, params)
    held = [np.asarray(x) for x in jax.tree.leaves(params)]  # the same memory
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(params)
    same(doubled, jax.tree.map(lambda x: 2 * x, before))
    for x, y in zip(held, jax.tree.leaves(before), strict=True):  # donation does not write into it
        np.testing.assert_array_equal(x, y)


def test_a_single_file_and_a_scratch_directory(tmp_path: Path) -> None:
    spec = llama_spec()
    tensors = tensors_of(spec, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = params_of(spec, tensors)
    same(P.load(spec, tmp_path), expected)
    same(P.load(spec, str(tmp_path / "model.safetensors")), expected)
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors.*found \['other'\]"):
        (tmp_path / "empty" / "other").mkdir(parents=True)
        P.load(spec, tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no such directory"):
        P.load(spec, tmp_path / "nowhere")


# ---- dtypes --------------------------------------------------------------------------------------------------------

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_are_kept_or_cast(dtype: type, tmp_path: Path) -> None:
    spec = mixed_spec()
    tensors = tensors_of(spec, dtype)
    files.write_checkpoint(tmp_path, {n: (x.shape, x.dtype) for n, x in tensors.items()}, tensors.get, 10**9, {})
    same(P.load(spec, tmp_path), params_of(spec, tensors))
    for target in (jnp.float32, jnp.bfloat16):
        cast = {n: x.astype(target) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in tensors.items()}
        expected = params_of(spec, cast)
        for run in expected["layers"]:  # the leaf with a dtype of its own
            for group in run:
                group["bias"] = group["bias"].astype(np.float32)
        same(P.load(spec, tmp_path, dtype=target), expected)


def test_dtype_names_are_those_of_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    names = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    names += ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64"]
    rng = np.random.default_rng(0)
    made = {n: torch.tensor(rng.integers(0, 2, (3, 5))).to(getattr(torch, n)) for n in names}
    from safetensors.torch import save_file as save_torch

    save_torch(made, tmp_path / "model.safetensors")
    found = P.tensors(tmp_path)
    assert {n: t.dtype.name for n, t in found.items()} == {n: n for n in names}
    for n, x in made.items():
        assert read(tmp_path, n).tobytes() == bytes(x.contiguous().view(torch.uint8).numpy())


def test_load_wants_a_floating_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a floating one"):
        P.load(llama_spec(), tmp_path, dtype=jnp.int8)


# ---- names ---------------------------------------------------------------------------------------------------------


def test_rename_and_ignore(tmp_path: Path) -> None:
    spec = llama_spec()
    tensors = tensors_of(spec, np.float32)
    extra = {"old.norm.weight": tensors["model.norm.weight"], "x.rotary_emb.inv_freq": np.ones(3, np.float32)}
    named = {f"old.{n}": x for n, x in tensors.items()} | extra
    named.pop("old.model.norm.weight")
    save_file(named, tmp_path / "model.safetensors")

    def rename(name: str) -> str | None:
        name = name.removeprefix("old.")
        return {"norm.weight": "model.norm.weight", "x.rotary_emb.inv_freq": None}.get(name, name)

    same(P.load(spec, tmp_path, rename=rename), params_of(spec, tensors))
    drop = lambda name: rename(name) or name
    same(P.load(spec, tmp_path, rename=drop, ignore=[r"inv_freq$"]), params_of(spec, tensors))
    with pytest.raises(P.CheckpointError, match=r"rename gives x, which another tensor has already"):
        P.load(spec, tmp_path, rename=lambda name: "x")


# ---- what does not fit ---------------------------------------------------------------------------------------------


def test_one_error_lists_every_offender_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = mixed_spec()
    tensors = tensors_of(spec, np.float32)
    del tensors["one"]
    tensors["strange"] = np.zeros((2, 3), np.float32)
    tensors["h.3.conv"] = tensors["h.3.conv"].reshape(6, 4)
    tensors["h.4.scale"] = tensors["h.4.scale"].astype(np.int32)
    tensors["order"] = tensors["order"].astype(np.float32)
    tensors["h.5.qkv"] = tensors["h.5.qkv"].astype(np.float16)
    tensors["h.1.scale"] = tensors["h.1.scale"].astype(np.float64)
    save_shards(tensors, tmp_path, 2)

    def refuse(*args: object) -> None:
        pytest.fail("read before the check")

    monkeypatch.setattr(files, "_readinto", refuse)
    with pytest.raises(P.CheckpointError) as e:
        P.load(spec, tmp_path)
    text = str(e.value)
    for message in [
        "9 problems",
        "missing: one (for one)",
        "unexpected: strange [2, 3]; name it in ignore=",
        "h.3.conv: the shape is [6, 4], layers.0.0.conv (channels 1 kernel) wants [6, 1, 4]",
        "h.4.scale: the dtype is int32, layers.0.1.scale is floating",
        "order: the dtype is float32, order is not floating",
        "h.1.scale: the dtype float64 needs jax_enable_x64",
        "layers.0.2.q: its tensors have different dtypes ['float16', 'float32']; pass dtype=",
        "layers.0.2.k: its tensors",
    ]:
        assert message in text, text
    assert len(e.value.problems) == 9


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_file({f"x{i}": np.zeros(1, np.float32) for i in range(100)}, tmp_path / "model.safetensors")
    with pytest.raises(P.CheckpointError) as e:
        P.load(llama_spec(), tmp_path)
    total = 100 + 3 + 9 * L
    assert f"{total} problems" in str(e.value) and f"... and {total - 20} more" in str(e.value)
    assert len(e.value.problems) == total and len(str(e.value).splitlines()) == 22


def raw(header: object, data: int = 16) -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(begin: object, end: object, shape: object = (2,), dtype: object = "F32") -> dict:
    """A header entry of 8 bytes by default."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
DAMAGED = {
    "empty file": (b"", "0 bytes cannot hold a header"),
    "short": (b"abc", "3 bytes cannot hold a header"),
    "giant header": ((1 << 62).to_bytes(8, "little") + b"{}", "cannot hold a header of 4611686018427387904"),
    "header cut": (raw({"a": entry(0, 8)})[:20], "cannot hold a header"),
    "no JSON": (raw(b"{{{{"), "not valid JSON"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (raw(b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "a list": (raw([]), "expected a JSON object, found list"),
    "twice": (raw(TWICE), "a key occurs twice"),
    "no entry": (raw({"a": 3}), "a: expected dtype, shape and data_offsets"),
    "no shape": (raw({"a": {"dtype": "F32", "data_offsets": [0, 16]}}), "a: expected dtype, shape"),
    "negative shape": (raw({"a": entry(0, 16, (-4,))}), "a: expected dtype, shape"),
    "float shape": (raw({"a": entry(0, 16, (4.0,))}), "a: expected dtype, shape"),
    "negative offset": (raw({"a": entry(-8, 8, (4,))}), "a: expected dtype, shape"),
    "three offsets": (raw({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}), "offsets [0, 8, 16]"),
    "unknown dtype": (raw({"a": entry(0, 16, (4,), "F31")}), "dtype 'F31'"),
    "odd dtype": (raw({"a": entry(0, 16, (4,), ["F32"])}), "dtype ['F32']"),
    "wrong size": (raw({"a": entry(0, 16, (3,))}), "F32[3] does not take bytes 0 to 16"),
    "reversed": (raw({"a": entry(16, 0, (4,))}), "does not take bytes 16 to 0"),
    "overlap": (raw({"a": entry(0, 12, (3,)), "b": entry(8, 16)}), "b begins at byte 8, expected 12 (overlap or hole)"),
    "hole": (raw({"a": entry(0, 4, (1,)), "b": entry(8, 16)}), "b begins at byte 8, expected 4"),
    "late start": (raw({"a": entry(8, 16)}), "a begins at byte 8, expected 0"),
    "rest": (raw({"a": entry(0, 8)}), "8 bytes follow the last tensor"),
    "truncated": (raw({"a": entry(0, 8), "b": entry(8, 16)}, 10), "b ends at byte 16, the file at 10: truncated"),
    "huge": (raw({"a": entry(0, 4 << 60, (1 << 60,))}), "truncated"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(safetensors.SafetensorError):  # the library refuses them too
        safetensors.safe_open(file, "np")
    for reader in (P.tensors, lambda path: P.load(llama_spec(), path)):
        with pytest.raises(P.CheckpointError) as e:
            reader(tmp_path)
        assert message in str(e.value)


def test_every_truncated_tensor_is_listed_with_what_else_is_wrong(tmp_path: Path) -> None:
    spec = llama_spec()
    save_shards(tensors_of(spec, np.float32) | {"strange": np.zeros(3, np.float32)}, tmp_path, 2)
    for file in tmp_path.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - D * 4 - 1)
    with pytest.raises(P.CheckpointError) as e:
        P.load(spec, tmp_path)
    cut = [p for p in e.value.problems if "truncated" in p]
    assert {p.partition(":")[0] for p in cut} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert any("unexpected: strange" in p for p in e.value.problems)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a weight_map"),
        ('{"weight_map": ["a"]}', "expected a weight_map"),
        ('{"weight_map": {"a": 3}}', "expected a weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "files in the same directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "files in the same directory"),
        ('{"weight_map": {"a": ".."}}', "does not exist"),
        (
            '{"weight_map": {"a": "gone.safetensors"}}',
            "gone.safetensors does not exist, but model.safetensors.index.json",
        ),
        (
            '{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}',
            "places b in x.safetensors, which does not hold it",
        ),
    ],
)
def test_damaged_indices_are_refused(index: str, message: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(P.CheckpointError) as e:
        P.tensors(tmp_path)
    assert message in str(e.value)


def test_the_index_decides_between_two_files(tmp_path: Path) -> None:
    for i in range(2):
        save_file({"a": np.full(3, i, np.float32), f"b{i}": np.zeros(1, np.float32)}, tmp_path / f"{i}.safetensors")
    for i in range(2):
        where = {"a": f"{i}.safetensors", "b0": "0.safetensors", "b1": "1.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        assert read(tmp_path, "a").tolist() == [i] * 3


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": np.arange(9, dtype=np.float32)}, tmp_path / "model.safetensors")
    tensor = P.tensors(tmp_path)["a"]
    np.testing.assert_array_equal(tensor.read(), np.arange(9))
    os.truncate(tmp_path / "model.safetensors", 80)
    with pytest.raises(P.CheckpointError, match="ended while it was being read"):
        tensor.read()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"a": Param("embed", (3,), W)}, "a has no checkpoint name"),
        (
            {"a": Param("embed", (3,), W, "x"), "b": Param("embed", (3,), W, "x")},
            r"x: the parts a \[0, 1\], b \[0, 1\]",
        ),
        ({"a": Param("ffn", (3,), W, "x", "[ffn]", (0, 6))}, r"x: the parts a \[0, 3\] do not cover"),
        (
            {"a": Param("ffn", (3,), W, "x", "[ffn]", (0, 6)), "b": Param("ffn", (3,), W, "x", "[ffn]", (2, 6))},
            r"a \[0, 3\], b \[2, 5\]",
        ),
        (stack({"a": Param("embed", (3,), W, "x")}, "layers", range(2)), "x: placeholders and stacked axes"),
    ],
)
def test_a_spec_must_cover_each_tensor_once(spec: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        P.load(spec, tmp_path)
    with pytest.raises(ValueError, match=message):
        P.save(spec, jax.tree.map(lambda p: np.zeros(p.shape, np.float32), spec), tmp_path)


# ---- save ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [llama_spec, mixed_spec])
def test_round_trip_keeps_every_byte(make: Callable, dtype: type, tmp_path: Path) -> None:
    spec, tensors = make(), tensors_of(make(), dtype)
    files.write_checkpoint(tmp_path / "a", {n: (x.shape, x.dtype) for n, x in tensors.items()}, tensors.get, 3000, {})
    P.save(spec, P.load(spec, tmp_path / "a"), tmp_path / "b", shard_bytes=2000)
    with pytest.raises(ValueError, match="files of 0 bytes; expected 1 or more"):
        P.save(spec, P.load(spec, tmp_path / "a"), tmp_path / "b", shard_bytes=0)
    found = P.tensors(tmp_path / "b")
    assert set(found) == set(tensors)
    for name, x in tensors.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].read().tobytes() == x.tobytes(), name


def test_the_file_is_what_the_library_writes(tmp_path: Path) -> None:
    spec, tensors = llama_spec(), tensors_of(llama_spec(), np.float32)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    P.save(spec, params_of(spec, tensors), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "theirs"]


def test_tensors_are_aligned_in_the_file(tmp_path: Path) -> None:
    spec = {x: Param("ffn", (3,), W, x) for x in "abc"}
    made = {"a": np.ones(3, np.int8), "b": np.ones(3, np.float32), "c": np.ones(3, np.float16)}
    P.save(spec, made, tmp_path)
    same(load_file(tmp_path / "model.safetensors"), made)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0 and all(entries[n]["data_offsets"][0] % x.itemsize == 0 for n, x in made.items())


def test_shards_and_index(tmp_path: Path) -> None:
    spec, tensors = llama_spec(), tensors_of(llama_spec(), np.float32)
    P.save(spec, params_of(spec, tensors), tmp_path, shard_bytes=20_000, metadata={"format": "pt", "who": "me"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for shard in shards:
        held = load_file(tmp_path / shard)
        assert set(held) == {n for n, f in index["weight_map"].items() if f == shard}
        assert sum(x.nbytes for x in held.values()) <= 20_000
        for name, x in held.items():
            np.testing.assert_array_equal(x, tensors[name])
        with safetensors.safe_open(tmp_path / shard, "np") as f:
            assert f.metadata() == {"format": "pt", "who": "me"}
    sizes = [sum(x.nbytes for x in load_file(tmp_path / shard).values()) for shard in shards]
    assert all(a + b > 20_000 for a, b in zip(sizes, sizes[1:], strict=False))  # none is nearly empty


@pytest.mark.parametrize("make", [llama_spec, mixed_spec])
@pytest.mark.parametrize(
    "way", ["plain", "listed spec", "listed params", "both listed", "sharded", "device", "device sharded"]
)
def test_save_takes_either_form(make: Callable, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tensors = make(), tensors_of(make(), np.float32)
    params = params_of(spec, tensors)
    if "sharded" in way:
        rules = P.TRAIN | {"layers": "dp"}
        params = jax.device_put(params, P.shardings(spec, P.make_mesh({"fsdp": 2, "tp": 2, "dp": 2}), rules))
    if "device" in way:  # as on an accelerator
        params = jax.tree.map(jnp.asarray, params)
        monkeypatch.setattr(place, "on_cpu", lambda sharding: False)
    spec = unstack(spec) if way in ("listed spec", "both listed") else spec
    params = unstack(params) if way in ("listed params", "both listed") else params
    P.save(spec, params, tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    same(got, tensors)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed8:
    """Stands for any weight that is not a plain array."""

    values: jax.Array
    scale: jax.Array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p | {"norm": Packed8(jnp.ones(D), jnp.ones(1))}, "norm are Packed8, not plain: merge or dequantize"),
        (lambda p: {k: v for k, v in p.items() if k != "head"} | {"hat": 1.0}, "params lack head; the spec lacks hat"),
        (
            lambda p: p | {"norm": np.ones((D, 1), np.float32)},
            r"norm has shape \[32, 1\], the spec says \[32\] \(embed\)",
        ),
        (lambda p: p | {"norm": jnp.ones(D, jnp.int4)}, "norm has dtype int4, which safetensors cannot hold"),
        (lambda p: p | {"layers": p["layers"] | {"q": p["layers"]["q"][:2]}}, r"layers.q has shape \[2, 4, 8, 32\]"),
    ],
)
def test_save_refuses(change: Callable, message: str, tmp_path: Path) -> None:
    spec = llama_spec()
    params = params_of(spec, tensors_of(spec, np.float32))
    with pytest.raises(ValueError, match=message):
        P.save(spec, change(params), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_save_refuses_parts_of_different_dtypes(tmp_path: Path) -> None:
    spec = {x: Param("ffn", (3,), W, "up", "[ffn]", part) for x, part in parts(a=3, b=3).items()}
    with pytest.raises(ValueError, match="different dtypes: up"):
        P.save(spec, {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float16)}, tmp_path)


class Unreadable:
    """An array that fails when it is fetched, as a device that is lost."""

    shape, dtype, ndim = (D,), np.dtype(np.float32), 1

    def __array__(self, *args: object, **kw: object) -> np.ndarray:
        raise RuntimeError("device lost")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    spec = llama_spec()
    old = params_of(spec, tensors_of(spec, np.float32))
    P.save(spec, old, tmp_path, shard_bytes=20_000)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(RuntimeError, match="device lost"):
        P.save(spec, old | {"norm": Unreadable()}, tmp_path, shard_bytes=20_000)
    assert sorted(os.listdir(tmp_path)) == before
    same(P.load(spec, tmp_path), old)


@pytest.mark.parametrize(("first", "second"), [(20_000, 20_000), (20_000, 30_000), (20_000, 10**9), (10**9, 20_000)])
def test_a_save_replaces_a_checkpoint_wholly(
    first: int, second: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the step at which a save dies, what loads is the old or the new checkpoint, never a mixture."""
    spec = llama_spec()
    old, new = (params_of(spec, tensors_of(spec, np.float32, seed)) for seed in (0, 1))
    replace, unlink = os.replace, Path.unlink
    for steps in range(40):
        target = tmp_path / str(steps)
        P.save(spec, old, target, shard_bytes=first)
        left = steps

        def dying(do: Callable) -> Callable:
            def step(*args: object, **kw: object) -> None:
                nonlocal left
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                do(*args, **kw)

            return step

        with monkeypatch.context() as m:
            m.setattr(os, "replace", dying(replace))
            m.setattr(Path, "unlink", dying(unlink))
            try:
                P.save(spec, new, target, shard_bytes=second)
            except KeyboardInterrupt:
                pass
        done = left > 0
        try:
            got = P.load(spec, target)
        except (FileNotFoundError, P.CheckpointError):
            assert not done
            continue
        want = new if np.array_equal(got["norm"], new["norm"]) else old
        same(got, want)
        if done:
            assert want is new
            names = {"model.safetensors"} if second > 10**6 else None
            assert names is None or set(os.listdir(target)) == names
            return
    pytest.fail("the save never came to its end")


# ---- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_checkpoints_both_ways(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=L, num_attention_heads=N,
        num_key_value_heads=K, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    state = {n: x.float().numpy().astype(dtype) for n, x in model.state_dict().items()}
    spec = llama_spec()
    params = P.load(spec, tmp_path / "theirs")
    same(params, llama_arrays(state))

    P.save(spec, params, tmp_path / "ours", shard_bytes=20_000)
    theirs, ours = (json.loads((tmp_path / x / "model.safetensors.index.json").read_text()) for x in ("theirs", "ours"))
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert set(ours["weight_map"]) == set(theirs["weight_map"])
    config.save_pretrained(tmp_path / "ours")
    back, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    for name, x in model.state_dict().items():
        assert x.dtype == back.state_dict()[name].dtype and torch.equal(x, back.state_dict()[name]), name


# ---- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, jax, jax.numpy as jnp
from fdel import params as P
from test_hf_memory_spec import spec
status = lambda key: 1024 * int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
path, way, out = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 8)
shardings = None
if way == "sharded":
    shardings = P.shardings(spec, P.make_mesh({"fsdp": 2, "tp": 2, "dp": 2}))
jnp.zeros(()).block_until_ready()
base = status("VmHWM")
params = jax.block_until_ready(P.load(spec, path, shardings=shardings))
loaded = status("VmHWM") - base
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
P.save(spec, params, out)
print(loaded / P.nbytes(params), (status("VmHWM") - base) / P.nbytes(params))
"""

MEMORY_SPEC = """
from fdel.params import Param, layers, normal
w = normal(1.0)
layer = {
    "up": Param("embed ffn", (1024, 2048), w, "l.{layers}.up", "ffn embed"),
    "down": Param("ffn embed", (2048, 1024), w, "l.{layers}.down"),
}
spec = {"embed": Param("vocab embed", (8192, 1024), w, "e"), "layers": layers(lambda kind: layer, (0,) * 10)}
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory counters")
@pytest.mark.parametrize("way", ["plain", "sharded"])
def test_peak_memory(way: str, tmp_path: Path) -> None:
    """Loading 201 MB takes at most 1.2 times the weights (measured 1.01), saving at most one tensor more (17 %)."""
    entries = {"e": (8192, 1024)} | {f"l.{i}.{n}": (2048, 1024) for i in range(10) for n in ("up", "down")}
    one = np.ones((8192, 1024), np.float32)
    fetch = lambda name: one[: entries[name][0]]
    shapes = {n: (s, one.dtype) for n, s in entries.items()}
    files.write_checkpoint(tmp_path / "in", shapes, fetch, 10**9, {})
    (tmp_path / "test_hf_memory_spec.py").write_text(MEMORY_SPEC)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "in"), way, str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded, saved = map(float, run.stdout.split())
    assert 0.95 < loaded < 1.2, loaded
    assert saved < 0.25, saved


def test_headers_without_bound_are_refused_at_once(tmp_path):
    """More tensors than any checkpoint has in a file, or more axes than an array can have."""

    def written(header):
        raw = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(P.CheckpointError) as e:
            files.tensors(tmp_path)
        return str(e.value)

    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    found = written({str(i): empty for i in range(files.MAX_TENSORS + 1)})
    assert "the header names 262145 tensors, expected at most 262144" in found and "1 problem" in found
    assert "x: 100000 axes, expected at most 64" in written({"x": empty | {"shape": [2**62] * 100_000}})
