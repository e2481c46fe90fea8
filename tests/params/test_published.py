"""Published quantised checkpoints against the formulas of their formats in numpy, bitsandbytes and transformers."""

import functools
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fdel import models, ops, params
from fdel.models import llama
from fdel.ops.weights import NF4, Quantized, dense, is_weight
from fdel.params import CheckpointError, Param, named_leaves
from fdel.params.spec import normal

E4M3 = ml_dtypes.float8_e4m3fn
BASE = dict(model_type="llama", vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, dtype="float16",
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, 32, (2, 9))


# ---- writers: from integers and scales at random, the tensors of a file and the matrix that they stand for ---------------


def words(x: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of unsigned integers in int32, the first in the lowest bits, one by one; those of 3 bits in three words."""
    words, per = (3, 32) if bits == 3 else (1, 32 // bits)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % per)))
    out = np.zeros((x.shape[0], words * x.shape[1] // per), np.uint32)
    for i in range(x.shape[1]):
        at, shift = divmod(bits * i, 32)
        out[:, at] |= x[:, i].astype(np.uint32) << np.uint32(shift)
        if shift + bits > 32:  # the rest of the bits of number 10 or 21
            out[:, at + 1] |= x[:, i].astype(np.uint32) >> np.uint32(32 - shift)
    return out.view(np.int32)


def draw(rng, outputs: int, inputs: int, group: int, bits: int, dtype=np.float16, at=None) -> tuple:
    """Integers, zero points, scales, and (integer - zero point) * scale; `at` is the group of each input."""
    groups = -(-inputs // group)
    q = rng.integers(0, 2**bits, (outputs, inputs))
    z = rng.integers(1, 2**bits, (outputs, groups))
    s = rng.uniform(0.01, 0.03, (outputs, groups)).astype(dtype)
    at = np.arange(inputs) // group if at is None else at
    return q, z, s, (q - z[:, at]) * s.astype(np.float32)[:, at]


def gptq(rng, name, outputs, inputs, *, bits=4, v2=False, group=32, sorted=False):
    at = rng.permutation(np.arange(inputs) // group) if sorted else np.arange(inputs) // group
    q, z, s, w = draw(rng, outputs, inputs, group, bits, at=at)
    stem = name.removesuffix("weight")
    return {
        stem + "qweight": words(q, bits).T, stem + "qzeros": words((z - (not v2)).T, bits), stem + "scales": s.T,
        stem + "g_idx": at.astype(np.int32), stem + "bias": np.zeros(outputs, np.float16),
    }, w  # fmt: skip


def awq(rng, name, outputs, inputs):
    q, z, s, w = draw(rng, outputs, inputs, 32, 4)
    stem = name.removesuffix("weight")
    mixed = lambda x: x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(x), -1)
    return {
        stem + "qweight": words(mixed(q.T), 4), stem + "qzeros": words(mixed(z.T), 4), stem + "scales": s.T
    }, w  # fmt: skip


def filled(x: np.ndarray) -> np.ndarray:
    """Fill columns up as AutoAWQ does for groups of 32: to whole words of eight, and to four of these."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))


def gemv(rng, name, outputs, inputs):
    """AutoAWQ's WQLinear_GEMV: words along inputs, in order."""
    q, z, s, w = draw(rng, outputs, inputs, 32, 4)
    stem = name.removesuffix("weight")
    return {stem + "qweight": words(q, 4), stem + "qzeros": words(filled(z), 4), stem + "scales": filled(s)}, w


def gemv_fast(rng, name, outputs, inputs):
    """AutoAWQ's WQLinear_GEMVFast (pack_intweight): four outputs in a word of 16 bits, its numbers in the order that its
    comments give, and rounded zeros that a kernel adds."""
    q, z, s, _ = draw(rng, outputs, inputs, 32, 4)
    mixed = [8 * a + 2 * b + c for b in range(4) for c in range(2) for a in range(4)]
    x = q.reshape(outputs, -1, 32)[..., mixed].reshape(outputs // 4, 4, inputs // 64, 64)
    x = x.swapaxes(1, 2).reshape(outputs // 4, inputs, 4).astype(np.uint16)
    packed = x[..., 0] | x[..., 1] << 4 | x[..., 2] << 8 | x[..., 3] << 12
    zeros = -(s * z.astype(np.float32)).astype(np.float16)
    stem, each = name.removesuffix("weight"), lambda x: np.repeat(x.astype(np.float32), 32, 1)
    zero = "scaled_zeros" if "q_proj" in name else "qzeros"  # as early versions have it, and later ones
    return {stem + "qweight": packed.view(np.int16), stem + "scales": filled(s).T, stem + zero: filled(zeros).T,
            }, q * each(s) + each(zeros)  # fmt: skip


def packed(rng, name, outputs, inputs, *, bits=4, symmetric=True, group=32, sorted=False):
    """compressed-tensors' "pack-quantized"."""
    group = group or inputs
    at = rng.permutation(np.arange(inputs) // group) if sorted else np.arange(inputs) // group
    q, z, s, w = draw(rng, outputs, inputs, group, bits, ml_dtypes.bfloat16, at)
    out = {name + "_packed": words(q, bits), name + "_scale": s, name + "_shape": np.array([outputs, inputs])}
    out |= {name + "_g_idx": at.astype(np.int32)} if sorted else {}
    if symmetric:
        return out, (q - 2 ** (bits - 1)) * np.repeat(s.astype(np.float32), group, 1)
    return out | {name + "_zero_point": words(z.T, bits).T}, w


def int8(rng, name, outputs, inputs, *, group=None):
    q = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    s = rng.uniform(1e-3, 2e-3, (outputs, inputs // (group or inputs))).astype(ml_dtypes.bfloat16)
    return {name: q, name + "_scale": s}, q * np.repeat(s.astype(np.float32), group or inputs, 1)


def fp8(rng, name, outputs, inputs, *, block=None, scale="_scale_inv", dtype=np.float32, kind=E4M3):
    """Blocks; None: a scale per tensor; (1, 0): per output."""
    q = rng.normal(0, 40, (outputs, inputs)).astype(kind)
    q[:, :2] = np.array([2.0**-16, -0.0], kind)  # below the normal numbers of e5m2
    rows, columns = block or (outputs, inputs)
    columns = columns or inputs
    s = np.exp2(rng.integers(-9, -6, (-(-outputs // rows), -(-inputs // columns)))).astype(dtype)
    if dtype == np.float32:
        s *= rng.uniform(1, 2, s.shape).astype(dtype)
    full = s.astype(np.float32)[np.arange(outputs)[:, None] // rows, np.arange(inputs) // columns]
    activations = {name.removesuffix("weight") + "input_scale": np.ones(1, np.float32)}
    return {name: q, name + scale: s if block else s.reshape(())} | activations, q.astype(np.float32) * full


def bnb4(rng, name, outputs, inputs, *, double, blocksize=64):
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    w = torch.tensor(rng.normal(0, 0.2, (outputs, inputs)), dtype=torch.float32)
    stored, state = bnb.quantize_4bit(w, blocksize=blocksize, compress_statistics=double, quant_type="nf4")
    parts = {f"{name}.{key}": t.numpy() for key, t in state.as_dict(packed=True).items()}
    state.shape = torch.Size([outputs * inputs])  # else its CPU kernel, unlike the others, begins a block with each row
    return {name: stored.numpy()} | parts, bnb.dequantize_4bit(stored, state).numpy().reshape(outputs, inputs)


def bnb_fp4(rng, name, outputs, inputs):
    """Values by the table that bitsandbytes writes beside them; its CPU kernel has another one, rounded to four digits."""
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    w = torch.tensor(rng.normal(0, 0.2, (outputs, inputs)), dtype=torch.float32)
    stored, state = bnb.quantize_4bit(w, blocksize=64, quant_type="fp4")
    parts = {f"{name}.{key}": t.numpy() for key, t in state.as_dict(packed=True).items()}
    bits = stored.numpy().reshape(-1)
    table = state.code.numpy()[np.stack([bits >> 4, bits & 15], -1).reshape(-1, 64)]
    values = (table * state.absmax.numpy()[:, None]).reshape(outputs, inputs)
    state.shape = torch.Size([outputs * inputs])  # as above
    near = bnb.dequantize_4bit(stored, state).numpy().reshape(outputs, inputs)
    assert np.abs(near - values).max() < 1e-3 * np.abs(values).max()
    return {name: stored.numpy()} | parts, values


def nvfp4(rng, name, outputs, inputs, *, nv=True):
    """compressed-tensors' "nvfp4-pack-quantized" and "mxfp4-pack-quantized": what its own compressors decompress."""
    torch, ct = pytest.importorskip("torch"), pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import base as mx
    from compressed_tensors.compressors.nvfp4 import base as nvidia

    by = (nvidia.NVFP4PackedCompressor if nv else mx.MXFP4PackedCompressor).decompress
    group = 16 if nv else 32
    if nv:
        scale = torch.tensor(rng.uniform(0.5, 448, (outputs, inputs // group))).to(torch.float8_e4m3fn)
    else:
        scale = torch.tensor(rng.integers(115, 126, (outputs, inputs // group)), dtype=torch.uint8)
    tensors = {"weight_packed": torch.tensor(rng.integers(0, 256, (outputs, inputs // 2)), dtype=torch.uint8),
               "weight_scale": scale}  # fmt: skip
    tensors |= {"weight_global_scale": torch.tensor([rng.uniform(900, 2000)], dtype=torch.float32)} if nv else {}
    args = ct.quantization.QuantizationArgs(
        num_bits=4, type="float", group_size=group, strategy="tensor_group" if nv else "group"
    )
    how = ct.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    exact = tensors | {"weight_scale": scale.float() if nv else scale}
    plain = by(exact, how)["weight"].float().numpy() if not nv else None
    if nv:  # its own way is bfloat16: the same formula on float32
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        values = unpack_fp4_from_uint8(tensors["weight_packed"], outputs, inputs, torch.float32)
        share = (scale.float() / tensors["weight_global_scale"]).repeat_interleave(group, 1)
        plain = (values * share).numpy()
        near = by(exact, how)["weight"].float().numpy()
        assert np.abs(near - plain).max() < 2e-2 * np.abs(plain).max()
    stem = name.removesuffix("weight")
    array = lambda t: t.view(torch.uint8).numpy().view(E4M3) if t.dtype == torch.float8_e4m3fn else t.numpy()
    more = {stem + "input_global_scale": np.ones(1, np.float32)} if nv else {}
    return {stem + key: array(t) for key, t in tensors.items()} | more, plain


def modelopt_fp4(rng, name, outputs, inputs):
    """NVIDIA's names of the same: the second scale is a factor."""
    parts, plain = nvfp4(rng, name, outputs, inputs)
    stem = name.removesuffix("weight")
    second = np.float32(1) / parts[stem + "weight_global_scale"][0]
    return {name: parts[stem + "weight_packed"], name + "_scale": parts[stem + "weight_scale"],
            name + "_scale_2": np.asarray(second), stem + "input_scale": np.ones((), np.float32)}, plain  # fmt: skip


def bnb8(rng, name, outputs, inputs):
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    w = torch.tensor(rng.normal(0, 0.2, (outputs, inputs)), dtype=torch.float16)
    stored, scale, _ = bnb.int8_vectorwise_quant(w)
    parts = {
        name.removesuffix("weight") + key: x for key, x in (("SCB", scale.numpy()), ("weight_format", np.uint8(0)))
    }
    return {name: stored.numpy()} | parts, bnb.int8_vectorwise_dequant(stored, scale).numpy()


def scheme(**weights) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


GPTQ, DEEPSEEK = {"quant_method": "gptq", "group_size": 32}, {"quant_method": "fp8", "weight_block_size": [40, 24]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
part = functools.partial
# name: writer of a matrix, quantization_config, format, bits per weight with scales (at most), relative tolerance
KINDS = {
    "gptq": (gptq, GPTQ | {"bits": 4}, "uint4", 4.8, 0),
    "gptq_v2": (part(gptq, v2=True), GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, "uint4", 4.8, 0),
    "gptq_8": (part(gptq, bits=8, group=96), {"quant_method": "gptq", "bits": 8, "group_size": -1}, "uint8", 9, 0),
    "gptq_sorted": (part(gptq, sorted=True), GPTQ | {"bits": 4, "desc_act": True}, "uint4", 5.5, 0),
    "gptq_3": (part(gptq, bits=3), GPTQ | {"bits": 3}, "uint4", 4.8, 0),
    "gptq_2": (part(gptq, bits=2, v2=True), GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"}, "uint4", 4.8, 0),
    "awq": (awq, AWQ | {"version": "gemm"}, "uint4", 4.8, 0),
    "awq_gemv": (gemv, AWQ | {"version": "gemv"}, "uint4", 4.8, 0),
    "awq_gemv_fast": (gemv_fast, AWQ | {"version": "GEMV_FAST"}, "uint4", 5.1, 0),
    "ct_4": (packed, scheme(num_bits=4), "uint4", 4.8, 0),
    "ct_4_zeros": (part(packed, symmetric=False), scheme(num_bits=4), "uint4", 4.8, 0),
    "ct_4_sorted": (part(packed, symmetric=False, sorted=True), scheme(num_bits=4, actorder="group"), "uint4", 5.5, 0),
    "ct_8_packed": (part(packed, bits=8, group=0), scheme(num_bits=8), "uint8", 9, 0),
    "ct_int8": (int8, scheme(num_bits=8), "int8", 8.5, 0),
    "ct_int8_groups": (part(int8, group=16), scheme(num_bits=8), "int8", 9.1, 0),
    "ct_fp8": (part(fp8, block=(1, 0), scale="_scale"), scheme(num_bits=8, type="float"), "fp8", 8.6, 0),
    "fp8_tensor": (fp8, {"quant_method": "fp8"}, "fp8", 8.6, 0),
    "fp8_blocks": (part(fp8, block=(40, 24)), DEEPSEEK, "fp8", 10.4, 0),
    "e5m2": (part(fp8, block=(1, 0), kind=ml_dtypes.float8_e5m2), {"quant_method": "fp8"}, "e5m2", 8.6, 0),
    "fp8_e8m0": (part(fp8, block=(40, 24), dtype=ml_dtypes.float8_e8m0fnu), DEEPSEEK, "fp8", 9.5, 0),
    "nf4": (part(bnb4, double=False), BNB, "nf4", 5.1, 1e-6),
    "nf4_double": (part(bnb4, double=True), BNB, "nf4", 6, 1e-6),
    "fp4": (bnb_fp4, BNB, "fp4", 5.1, 1e-6),
    "nvfp4": (nvfp4, scheme(num_bits=4, type="float", group_size=16), "e2m1", 5.3, 1e-6),
    "mxfp4": (part(nvfp4, nv=False), scheme(num_bits=4, type="float", group_size=32), "e2m1", 4.3, 0),
    "modelopt_fp4": (modelopt_fp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "e2m1", 5.3, 1e-6),
    "modelopt_fp8": (
        part(fp8, scale="_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8.6, 0
    ),
    "bnb_int8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", 8.6, 1e-6),
}  # fmt: skip


def checkpoint(path: Path, kind: str, only: str = "", config: dict = BASE, matrix: str = r"_proj") -> tuple[dict, dict]:
    """Write a model whose layers' matrices (those with `only` in their name) are quantised; give its tensors and theirs."""
    write, how, *_ = KINDS[kind]
    family = models.family(config["model_type"])
    rng, spec, plain, stored = np.random.default_rng(0), family.spec(family.Config.from_hf(config)), {}, {}
    for p in jax.tree.leaves(spec):  # float16 all
        shape = params.layout(p).file_shape
        plain |= {name: rng.normal(0, 0.2, shape).astype(np.float16).astype(np.float32) for name in params.hf_names(p)}
    for name, x in dict(plain).items():
        if re.search(matrix, name) and only in name:
            group = {"group": x.shape[1]} if kind == "gptq_8" else {}
            parts, plain[name] = write(rng, name, *x.shape, **group)
            stored |= parts
        else:
            stored[name] = x.astype(np.float16)
    save(path, stored, config | {"quantization_config": how})
    return stored, plain


def save(path: Path, tensors: dict, config: dict) -> None:
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file({k: np.ascontiguousarray(x) for k, x in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


def plain_model(model: models.Model, plain: dict) -> dict:
    """The params of the plain matrices, by path, by the spec's layouts."""
    read = lambda p: np.stack([params.layout(p).read(plain[name]) for name in params.hf_names(p)]).reshape(p.shape)
    return {path: read(p) for path, p in named_leaves(params.unstack(models.spec_of(model)))}


@jax.jit
def dequantized(tree):
    return params.dequantize(tree, jnp.float32)


def check_leaves(model: models.Model, plain: dict, rtol: float) -> None:
    got = dict(named_leaves(params.unstack(dequantized(model.params))))
    for path, want in plain_model(model, plain).items():
        assert got[path].shape == want.shape
        np.testing.assert_allclose(got[path], want, rtol=rtol, atol=0, err_msg=path)


def quantized_leaves(tree) -> dict:
    return {path: w for path, w in named_leaves(tree, is_leaf=is_weight) if isinstance(w, Quantized)}


# ---- what is read ----------------------------------------------------------------------------------------------------


SLOW = ("nf4", "nf4_double", "bnb_int8", "fp4", "nvfp4", "mxfp4", "modelopt_fp4")  # for torch


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def test_a_checkpoint_becomes_quantized_leaves_of_its_exact_values(kind, tmp_path):
    """Bit for bit; bitsandbytes', whose scales are products of three numbers, to 1e-6 of each value."""
    _, how, format, bits, rtol = KINDS[kind]
    sizes = {"intermediate_size": 128} if kind == "awq_gemv_fast" else {}  # in whole pieces of 64
    stored, plain = checkpoint(tmp_path, kind, config=BASE | sizes)
    model = models.load(tmp_path)
    check_leaves(model, plain, rtol)
    found = quantized_leaves(model.params)
    assert sorted(found) == sorted("layers." + n for n in ("q", "k", "v", "o", "gate", "up", "down"))
    assert {w.format for w in found.values()} == {format} and {w.dtype for w in found.values()} == {np.dtype("float16")}
    count = sum(math.prod(w.shape) for w in found.values())
    assert params.nbytes(found) * 8 / count < bits
    x = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)  # the product that models use, 1e-5
    product = lambda x, w: ops.einsum("td,nhd->tnh", x, jax.tree.map(lambda c: c[1], w))
    got, pull = jax.vjp(jax.jit(product), x, found["layers.q"])
    matrix = plain["model.layers.1.self_attn.q_proj.weight"].astype(np.float64)
    for y, want in ((got, x @ matrix.T), (pull(jnp.ones_like(got))[0], np.ones((3, len(matrix))) @ matrix)):
        assert np.abs(y.reshape(want.shape) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq_sorted", "fp8_blocks"])
def test_logits_on_one_device_and_on_a_mesh(kind, tmp_path):
    """Those of the plain matrices, to 1e-5 of the greatest; on a mesh each device holds its part of the leaves."""
    _, plain = checkpoint(tmp_path, kind)
    model = models.load(tmp_path, dtype=jnp.float32)
    listed = params.unstack(models.spec_of(model))
    want = jax.tree.map(lambda p: jnp.asarray(params.layout(p).read(plain[p.hf])), listed)
    run = jax.jit(lambda p: llama.forward(p, jnp.asarray(TOKENS), model.cfg)[0])
    reference = np.asarray(run(want))
    close = lambda got: np.abs(np.asarray(got) - reference).max() < 1e-5 * np.abs(reference).max()
    assert close(run(params.unstack(model.params)))
    mesh = params.make_mesh({"fsdp": 2, "tp": 2}, jax.devices()[:4])
    spread = models.load(tmp_path, dtype=jnp.float32, mesh=mesh)
    up = spread.params["layers"]["up"].values
    whole = kind == "gptq_sorted"  # groups; three of fp8's cannot be divided by two, so outputs are
    assert up.sharding.shard_shape(up.shape) == ((2, 48, up.shape[-1] // 2) if whole else (2, 24, up.shape[-1]))
    for a, b in zip(jax.tree.leaves(spread.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.set_mesh(mesh):
        assert close(run(spread.params))


MOE = {
    "mixtral": (BASE | dict(model_type="mixtral", num_local_experts=3, num_experts_per_tok=2), r"_proj|\.w\d\."),
    "deepseek_v3": (BASE | dict(
        model_type="deepseek_v3", kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=20,
        num_key_value_heads=4, moe_intermediate_size=40, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, num_nextn_predict_layers=1), r"_proj"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE)
def test_experts_and_parts_of_fused_matrices(family, tmp_path):
    """Each expert's blocks; DeepSeek's kv_b_proj, whose blocks of 40 rows cross heads of 32; no third layer."""
    config, matrix = MOE[family]
    stored, plain = checkpoint(tmp_path, "fp8_blocks", config=config, matrix=matrix)
    if family == "deepseek_v3":
        more = fp8(np.random.default_rng(4), "model.layers.2.eh_proj.weight", 64, 128, block=(40, 24))[0]
        save(tmp_path, stored | more, json.loads((tmp_path / "config.json").read_text()))
    model = models.load(tmp_path, stacked=family == "mixtral")
    check_leaves(model, plain, 0)
    count = len(quantized_leaves(params.unstack(model.params)))
    assert count == {"mixtral": 2 * 7, "deepseek_v3": 2 * 6 + 3 + 6}[family]


@pytest.mark.slow
def test_nf4_whose_blocks_cross_rows(tmp_path):
    """Blocks of 64 and rows of 96: groups of 32, 1e-6."""
    _, plain = checkpoint(tmp_path, "nf4_double")
    w = models.load(tmp_path).params["layers"]["down"]
    assert w.inputs == (96,) and w.scale.values.shape == (2, 64, 3) and w.values.shape == (2, 64, 48)
    np.testing.assert_allclose(dense(w, jnp.float32)[1], plain["model.layers.1.mlp.down_proj.weight"], rtol=1e-6)
    assert len(NF4) == 16


@pytest.mark.slow
def test_mxfp4_of_experts_equals_transformers(tmp_path):
    """gpt_oss's blocks [experts outputs groups 16], where a plain file has inputs first, and gate and up in turn: equal."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (2, 3, 12, 2, 16), dtype=np.uint8)
    exponents = rng.integers(110, 135, (2, 3, 12, 2), dtype=np.uint8)
    name = "model.layers.{}.mlp.experts.gate_up_proj"
    tensors = {
        f"{name.format(i)}_{part}": x[i] for i in range(2) for part, x in (("blocks", blocks), ("scales", exponents))
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    one = lambda i: Param(
        "experts ffn embed", (3, 6, 64), normal(1.0), name.format("{layers}"), "experts embed (ffn [1])", (i, 2)
    )
    spec = {"layers": params.spec.stack({"gate": one(0), "up": one(1)}, "layers", range(2))}
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    got = params.load(spec, tmp_path, quantization=how)["layers"]
    assert got["gate"].format == "e2m1" and params.nbytes(got) == blocks.nbytes + exponents.nbytes
    assert got["up"].dtype == jnp.bfloat16  # as nothing plain says another
    for i in range(2):
        args = torch.tensor(blocks[i]), torch.tensor(exponents[i])
        want = convert_moe_packed_tensors(*args, dtype=torch.float32).numpy()  # [experts embed 2 ffn]
        for part_, at in ("gate", 0), ("up", 1):
            w = jax.tree.map(lambda c, i=i: c[i], got[part_])
            np.testing.assert_array_equal(dense(w, jnp.float32), want[..., at::2].transpose(0, 2, 1))
            x = rng.normal(size=(7, 64)).astype(np.float32)
            sizes = jnp.array([3, 0, 4])
            rows = np.repeat([0, 1, 2], sizes)
            reference = np.einsum("mk,mnk->mn", x, np.asarray(dense(w, jnp.float32))[rows])
            assert np.abs(ops.grouped_matmul(x, w, sizes) - reference).max() < 1e-5 * np.abs(reference).max()


def test_layers_that_stay_plain_need_leaves_of_their_own(tmp_path):
    """A stacked leaf is of one kind, so the file of such a model is loaded with a list of layers."""
    _, plain = checkpoint(tmp_path, "fp8_blocks", only="layers.1.")
    with pytest.raises(CheckpointError, match=r"layers\.q: 1 of its 2 tensors are quantized.*stacked=False"):
        models.load(tmp_path)
    model = models.load(tmp_path, stacked=False)
    check_leaves(model, plain, 0)
    kinds = [type(layer["q"]).__name__ for layer in model.params["layers"]]
    assert kinds[1] == "Quantized" and kinds[0] != "Quantized"


# ---- what is refused, and what is written ------------------------------------------------------------------------------


REFUSED = {
    "method": ("gptq", {"quant_method": "aqlm"}, None, "quant_method is 'aqlm'; understood are fp8.*compressed-tensors"),
    "bits": ("gptq", {"bits": 5}, None, "GPTQ of 5 bits as 'gptq'; understood are 2, 3, 4 and 8"),
    "layout": ("gptq", {"checkpoint_format": "marlin"}, None, "as 'marlin'; understood"),
    "act_order": ("gptq", {}, ("q_proj.g_idx", lambda x: x // 2), "groups of other sizes than 32; .*desc_act=False"),
    "bias": ("gptq", {}, ("q_proj.bias", lambda x: x + 1), r"unexpected: model.layers.0.self_attn.q_proj.bias"),
    "awq": ("awq", {"version": "llm-awq"}, None, "AWQ of 4 bits as 'llm-awq'; understood are 4 bits as 'gemm', 'gemv'"),
    "awq_bits": ("awq_gemv", {"bits": 3}, None, "AWQ of 3 bits as 'gemv'; understood"),
    "awq_group": ("awq_gemv", {"group_size": 48}, None, "group_size is 48; expected a divisor of 64 inputs, or -1"),
    "awq_scales": ("awq_gemv", {"group_size": 1}, None, r"scales for \[64, 32\], expected at least \[64, 64\]"),
    "awq_other": ("awq", {"version": "gemv_fast"}, None, "AWQ's gemv_fast: qweight is int32"),
    "awq_words": ("awq_gemv", {}, ("q_proj.qweight", lambda x: x.astype(np.int16)), r"int32 \[outputs / 1, inputs / 8"),
    "awq_stride": ("awq_gemv_fast", {}, ("q_proj.qweight", lambda x: x[:, :32]), "in whole pieces of 64 inputs"),
    "e4m3": ("fp8_blocks", {}, ("q_proj.weight", lambda x: x.astype(ml_dtypes.float8_e4m3fnuz)), "e4m3fnuz"),
    "blocks": ("fp8_blocks", {"weight_block_size": [64, 64]}, None, r"expected blocks of 64 by 64"),
    "lacks": ("gptq", {}, ("q_proj.scales", None), "q_proj.weight: quantized, but the file lacks .*q_proj.scales"),
    "shape": ("gptq", {}, ("k_proj.scales", lambda x: x[:, :5]), r"k_proj.weight:\d: the shape is"),
    "words": ("ct_4", {}, ("q_proj.weight_packed", lambda x: x.view(np.uint8)), "uint8.*4 and 8 bits in int32"),
    "nvfp4": ("nvfp4", {}, ("q_proj.weight_scale", lambda x: x[:, ::2]), "four-bit floats.*understood are groups of 16"),
    "algorithm": ("modelopt_fp4", {"quant_algo": "W4A16_AWQ"}, ("q_proj.weight_scale_2", None), "W4A16_AWQ.*FP8, .*NVFP4"),
    "parts": ("gptq", {}, ("q_proj.qzeros", lambda x: x[:1]), "parts of a quantized matrix do not fit each other"),
    "malformed": ("ct_4", {"config_groups": {"a": 3}}, None, "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_variants_are_refused_by_name(case, tmp_path):
    kind, how, change, message = REFUSED[case]
    config = BASE | ({"intermediate_size": 128} if kind == "awq_gemv_fast" else {})
    tensors, _ = checkpoint(tmp_path, kind, config=config)
    if change:
        name, f = change
        tensors = {k: f(x) if f and k.endswith(name) else x for k, x in tensors.items() if f or not k.endswith(name)}
    save(tmp_path, tensors, config | {"quantization_config": KINDS[kind][1] | how})
    with pytest.raises(CheckpointError, match=message):
        models.load(tmp_path)


def test_experts_sorted_by_activations_are_refused(tmp_path):
    config, matrix = MOE["mixtral"]
    checkpoint(tmp_path, "gptq_sorted", config=config, matrix=matrix)
    with pytest.raises(
        CheckpointError, match="layers.experts.gate: experts whose inputs are sorted by activation order"
    ):
        models.load(tmp_path)


def test_what_is_saved_is_plain(tmp_path):
    """Quantised leaves are refused; dequantised ones make a checkpoint that says nothing of quantisation."""
    _, plain = checkpoint(tmp_path / "a", "awq")
    model = models.load(tmp_path / "a", dtype=jnp.float32)
    with pytest.raises(ValueError, match="are Quantized, not plain: merge or dequantize them first"):
        models.save(model, tmp_path / "b")
    models.save(model._replace(params=params.dequantize(model.params)), tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    check_leaves(models.load(tmp_path / "b"), plain, 0)


def test_info_says_what_a_file_is_and_convert_makes_it_plain(tmp_path, capsys):
    """Format, group and which matrices stay plain; the cache is counted in the dtype of plain tensors."""
    from fdel import cli

    _, plain = checkpoint(tmp_path / "a", "gptq", only="layers.0.")
    assert cli.main(["info", str(tmp_path / "a")]) == 0
    lines = {k.strip(): v for k, v in (line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())}
    assert lines["matrices in uint4, a scale per 32 inputs"] == "7" and "cache bytes per token (float16)" in lines
    assert lines["plain matrices"].startswith("embed, head, layers.1.") and lines["plain matrices"].endswith(
        "and 3 more"
    )
    checkpoint(tmp_path / "b", "gptq")
    assert cli.main(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--dtype", "float32"]) == 0
    check_leaves(models.load(tmp_path / "c"), checkpoint(tmp_path / "b", "gptq")[1], 0)


# ---- GGUF ------------------------------------------------------------------------------------------------------------

GGML = {"f32": 0, "f16": 1, "q8_0": 8, "q4_k": 12, "q6_k": 14}


def gguf_file(path: Path, keys: dict, tensors: dict, vocabulary: bool = True) -> None:
    """Write a GGUF file: version 3, tensors of bytes [rows, bytes of a row] with their type and shape."""
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    kinds = {str: (8, text), int: (4, part(struct.pack, "<I")), float: (6, part(struct.pack, "<f"))}
    kinds |= {bool: (7, part(struct.pack, "<?"))}

    def listed(xs: list) -> bytes:
        kind, pack = kinds[type(xs[0])]
        return struct.pack("<IQ", kind, len(xs)) + b"".join(map(pack, xs))

    kinds |= {list: (9, listed)}
    keys = ({"tokenizer.ggml.tokens": ["a"] * 32} if vocabulary else {}) | keys
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys.items():
        kind, pack = kinds[type(value)]
        head += text(key) + struct.pack("<I", kind) + pack(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], GGML[kind], len(data))
        data += raw
    path.mkdir(exist_ok=True)
    (path / "model.gguf").write_bytes(head + bytes(-len(head) % 32) + data)


def gguf_llama(path: Path, changed: Mapping = MappingProxyType({})) -> dict:
    """Write a Llama of all types with random blocks; give its plain matrices, by transformers' reading of the blocks."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.gguf.dequant import dequantize, row_bytes

    rng, e = np.random.default_rng(5), 256
    keys = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in {
        "embedding_length": e, "feed_forward_length": e, "block_count": 1, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "context_length": 64,
        "rope.freq_base": 5e5}.items()}  # fmt: skip
    kinds = {"token_embd": ("q8_0", 32), "output": ("q6_k", 32), "blk.0.attn_q": ("q4_k", e), "blk.0.attn_k": ("q8_0", 128),
             "blk.0.attn_v": ("q6_k", 128), "blk.0.attn_output": ("f16", e), "blk.0.ffn_gate": ("q4_k", e),
             "blk.0.ffn_up": ("f32", e), "blk.0.ffn_down": ("q4_k", e)}  # fmt: skip
    tensors, plain = {}, {}
    hub = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for (name, (kind, rows)), ours in zip(kinds.items(), hub, strict=True):
        if kind in ("f32", "f16"):
            x = rng.normal(0, 0.05, (rows, e)).astype("float32" if kind == "f32" else "float16")
            raw, w = x.tobytes(), x.astype(np.float32)
        else:
            x = rng.integers(0, 256, (rows, row_bytes(GGML[kind], e)), np.uint8)
            at = {
                "q8_0": [(i * 34, 1e-3) for i in range(e // 32)],
                "q4_k": [(0, 1e-4), (2, 1e-3)],
                "q6_k": [(208, 1e-5)],
            }
            for where, size in at[kind]:
                x[:, where : where + 2] = (size * rng.uniform(1, 2, (rows, 1))).astype(np.float16).view(np.uint8)
            raw, w = x.tobytes(), dequantize(torch.tensor(x), GGML[kind]).numpy().reshape(rows, e)
        if ours in ("q_proj", "k_proj"):  # llama.cpp's order: pairs beside each other
            w = w.reshape(rows // 64, 32, 2, e).swapaxes(1, 2).reshape(rows, e)
        tensors[f"{name}.weight"], plain[ours] = (kind, (rows, e), raw), w
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = "f32", (e,), rng.normal(1, 0.1, e).astype(np.float32).tobytes()
    gguf_file(path, keys | changed, tensors)
    return plain


@pytest.mark.slow
def test_a_gguf_file_is_a_model(tmp_path, capsys):
    """Config, names, the order of q and k, and the values of every type: transformers' of its blocks, to 1e-6."""
    plain = gguf_llama(tmp_path)
    model = models.load(tmp_path)
    assert (model.cfg.head_dim, model.cfg.rope.theta, model.cfg.tied, model.cfg.vocab) == (64, 5e5, False, 32)
    found = dequantized(model.params)
    layer = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
             "down": "down_proj"}  # fmt: skip
    got = {ours: found["layers"][path][0] for path, ours in layer.items()}
    for name, x in (got | {"embed_tokens": found["embed"], "lm_head": found["head"]}).items():
        want = plain[name]
        assert np.abs(x.reshape(want.shape) - want).max() <= 1e-6 * np.abs(want).max(), name
    assert params.nbytes(model.params["layers"]["gate"]) * 8 / 256**2 < 4.7
    x = np.random.default_rng(6).normal(size=(3, 256)).astype(np.float32)
    y = ops.einsum("td,fd->tf", x, jax.tree.map(lambda c: c[0], model.params["layers"]["gate"]))
    assert np.abs(y - x @ plain["gate_proj"].T).max() < 1e-5 * np.abs(y).max()
    from fdel import cli

    assert (
        cli.main(["info", str(tmp_path)]) == 0 and "matrices in uint4, a scale per 32 inputs" in capsys.readouterr().out
    )
    raw = (tmp_path / "model.gguf").read_bytes()
    refused = {
        "truncated": raw[:-5], "ends inside its header": raw[:300], "expected GGUF": b"GGML" + raw[4:],
        "general.architecture is 'mamba'": raw.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
        "is of ggml's type 16": raw.replace(struct.pack("<QQI", 256, 128, 14), struct.pack("<QQI", 256, 128, 16)),
    }  # fmt: skip
    for message, changed in refused.items():
        (tmp_path / "model.gguf").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            models.load(tmp_path)
