"""Write quantised matrices as others read them: compressed-tensors, GPTQ, float8 in blocks, and bitsandbytes.

A writer turns a matrix [outputs inputs] of a checkpoint into the tensors that stand for it in the file; `formats` has the
readers. Each `Scheme` also gives the `quantization_config` that belongs into config.json.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from fdel.ops.weights import NF4

from .rounding import gptq, nearest, scales

Tensors = dict[str, np.ndarray]
E4M3 = ml_dtypes.float8_e4m3fn
HEAD = "lm_head"
BLOCKS = tuple(2**i for i in range(6, 13))  # of bitsandbytes' nf4, on all devices


@dataclass(frozen=True)
class Scheme:
    """A way to write matrices: `write(scheme, name, w, dtype, gram)`, and `describe(scheme, modules left alone)`.

    `group` is the number of inputs with one scale, None: all; `dynamic`: who serves it rounds activations too, row by row.
    With a `gram` (see `rounding.gptq`) integers are found by GPTQ; `calibrated`: the writer can use one.
    """

    write: Callable[["Scheme", str, np.ndarray, np.dtype, Any], Tensors]
    describe: Callable[["Scheme", Sequence[str]], dict[str, Any]]
    bits: int = 8
    group: int | None = None
    dynamic: bool = False
    calibrated: bool = False
    act_order: bool = False


def _integers(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> tuple[np.ndarray, np.ndarray]:
    group = s.group or w.shape[1]
    if w.shape[1] % group:
        raise ValueError(f"{name} has {w.shape[1]} inputs, no multiple of groups of {group}; choose another --group")
    if gram is not None:
        return gptq(w, gram, s.bits, group, dtype, act_order=s.act_order)
    scale = scales(w, s.bits, group, dtype)
    return nearest(w, scale, s.bits), scale


def _words(x: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned integers along the last axis in int32, the first in the lowest bits."""
    per = 32 // bits
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % per))).astype(np.uint32).reshape(len(x), -1, per)
    return np.bitwise_or.reduce(x << (np.arange(per, dtype=np.uint32) * np.uint32(bits)), -1).view(np.int32)


def _unsigned(q: np.ndarray, bits: int) -> np.ndarray:
    return q.astype(np.int16) + 2 ** (bits - 1)


def _plain(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    q, scale = _integers(s, name, w, dtype, gram)
    return {name: q, f"{name}_scale": scale}


def _packed(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    q, scale = _integers(s, name, w, dtype, gram)
    words = _words(_unsigned(q, s.bits), s.bits)
    return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": np.array(w.shape, np.int64)}


def _gptq(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    if w.shape[0] % (32 // s.bits) or w.shape[1] % (32 // s.bits):
        raise ValueError(f"{name} is {w.shape[0]} x {w.shape[1]}; GPTQ's words hold {32 // s.bits}; use w4a16 or w8a16")
    q, scale = _integers(s, name, w, dtype, gram)
    stem = name.removesuffix("weight")
    zeros = np.full(scale.T.shape, 2 ** (s.bits - 1) - 1)  # stored less one
    index = np.arange(w.shape[1], dtype=np.int32) // (s.group or w.shape[1])
    words = _words(_unsigned(q, s.bits), s.bits).T
    return {
        stem + "qweight": words,
        stem + "qzeros": _words(zeros, s.bits),
        stem + "scales": scale.T,
        stem + "g_idx": index,
    }


def _e4m3(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(w / scale.astype(np.float32), -448, 448).astype(E4M3)


def _fp8(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    """A scale per output, or with s.group = 0 one for all."""
    greatest = np.abs(w).max() if s.group == 0 else np.abs(w).max(1, keepdims=True)
    scale = (greatest / 448).astype(dtype)
    scale = np.where(scale == 0, np.ones((), dtype), scale)  # a float16 may be too coarse for a row of tiny numbers
    return {name: _e4m3(w, scale), f"{name}_scale": scale.reshape(1) if s.group == 0 else scale}


def _fp8_blocks(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    n = s.group or 128
    if ".experts." in name and len(w) % n:
        why = f"no multiple of blocks of {n}, which readers put below another expert's or gate's"
        raise ValueError(f"{name} has {len(w)} outputs, {why}; choose another --group, or fp8")
    (outputs, inputs), x = w.shape, np.pad(w, [(0, -size % n) for size in w.shape])
    greatest = np.abs(x.reshape(len(x) // n, n, -1, n)).max((1, 3))
    scale = np.where(greatest == 0, 1, greatest / 448).astype(np.float32)
    full = np.repeat(np.repeat(scale, n, 0), n, 1)[:outputs, :inputs]
    return {name: _e4m3(w, full), f"{name}_scale_inv": scale}


def _nf4(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    """Blocks of one row after the other, two values in a byte."""
    n = s.group or 64
    if n not in BLOCKS:
        raise ValueError(f"group={n}: bitsandbytes has blocks of {', '.join(map(str, BLOCKS))}")
    if w.size % 2:
        raise ValueError(f"{name} has {w.shape[0]} x {w.shape[1]} numbers; bitsandbytes' nf4 takes an even number")
    x = np.pad(w.reshape(-1), (0, -w.size % n)).reshape(-1, n)
    absmax = np.abs(x).max(1)
    x = x / np.where(absmax == 0, 1, absmax)[:, None]
    middles = (np.float32((a + b) / 2) for a, b in itertools.pairwise(NF4))
    index = np.sum([(x > middle).astype(np.uint8) for middle in middles], 0, np.uint8).reshape(-1)[: w.size]
    state = {"quant_type": "nf4", "blocksize": n, "dtype": str(dtype), "shape": list(w.shape)}
    return {
        name: (index[::2] << 4 | index[1::2])[:, None], f"{name}.absmax": absmax,
        f"{name}.quant_map": np.array(NF4, np.float32),
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }  # fmt: skip


def _rows(s: Scheme, name: str, w: np.ndarray, dtype: np.dtype, gram: Any) -> Tensors:
    """LLM.int8 (arXiv 2208.07339): int8 and the greatest magnitude of each row."""
    if ".experts." in name:
        raise ValueError(f"{name} is an expert's, which neither vLLM nor transformers reads so; use w8a16")
    greatest = np.abs(w).max(1)
    q = np.rint(w * (127 / np.where(greatest == 0, 1, greatest))[:, None]).astype(np.int8)
    stem = name.removesuffix("weight")
    return {name: q, stem + "SCB": greatest, stem + "weight_format": np.zeros((), np.uint8)}


def _compressed(s: Scheme, skipped: Sequence[str], format: str, kind: str) -> dict[str, Any]:
    strategy = "tensor" if s.group == 0 else "group" if s.group else "channel"
    base = {"num_bits": s.bits, "type": kind, "symmetric": True, "observer": "minmax", "observer_kwargs": {}}
    base |= {"block_structure": None, "actorder": None, "group_size": None, "dynamic": False}
    weights = base | {"strategy": strategy, "group_size": s.group or None}
    weights |= {"actorder": "weight"} if s.act_order else {}
    inputs = base | {"strategy": "token", "dynamic": True, "observer": None} if s.dynamic else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    ignored = [f"re:.*{HEAD}" if name == HEAD else name for name in skipped]  # alone a name is that of one whole module
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ignored,
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def _describe_gptq(s: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
    out = {
        "quant_method": "gptq", "bits": s.bits, "group_size": s.group or -1, "sym": True, "lm_head": False,
        "desc_act": False, "static_groups": s.act_order, "damp_percent": 0.01, "checkpoint_format": "gptq",
        "true_sequential": False,
    }  # fmt: skip
    names = [name for name in skipped if name != HEAD]
    return out | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in names}} if names else {})


def _describe_blocks(s: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
    size = [s.group or 128] * 2
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": size,
        "modules_to_not_convert": [*skipped],
    }  # fmt: skip


def _describe_bnb(s: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
    few = s.bits == 4
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": few, "load_in_8bit": not few, "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": [*skipped], "llm_int8_has_fp16_weight": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "llm_int8_enable_fp32_cpu_offload": False,
    }  # fmt: skip


_as = lambda format, kind: functools.partial(_compressed, format=format, kind=kind)
SCHEMES: Mapping[str, Scheme] = {
    "w8a16": Scheme(_packed, _as("pack-quantized", "int"), calibrated=True),
    "w8a8": Scheme(_plain, _as("int-quantized", "int"), dynamic=True, calibrated=True),
    "w4a16": Scheme(_packed, _as("pack-quantized", "int"), bits=4, group=128, calibrated=True),
    "fp8": Scheme(_fp8, _as("float-quantized", "float"), dynamic=True),
    "fp8_tensor": Scheme(_fp8, _as("float-quantized", "float"), group=0, dynamic=True),
    "fp8_block": Scheme(_fp8_blocks, _describe_blocks, group=128, dynamic=True),
    "gptq": Scheme(_gptq, _describe_gptq, bits=4, group=128, calibrated=True),
    "gptq_8": Scheme(_gptq, _describe_gptq, group=128, calibrated=True),
    "nf4": Scheme(_nf4, _describe_bnb, bits=4, group=64),
    "bnb_8": Scheme(_rows, _describe_bnb),
}
ALIASES = {"int8": "w8a16", "8bit": "w8a16", "a8bit": "w8a8", "a8q": "w8a8", "int4": "w4a16", "fp8_channel": "fp8"}
REFUSED = {
    "a4q": "no published file has activations of 4 bits; use w4a16, or w8a8",
    "mxfp4": "it is published for experts of gpt_oss alone, which have it already; use w4a16 or nf4",
}


def scheme(name: str, group: int | None = None, act_order: bool = False) -> Scheme:
    """Find a way of writing by name; a ValueError says what there is, and which option does not belong to it."""
    if name in REFUSED:
        raise ValueError(f"format {name!r}: {REFUSED[name]}")
    found = SCHEMES.get(ALIASES.get(name, name))
    if found is None:
        raise ValueError(f"format {name!r} is unknown; use one of {', '.join([*SCHEMES, *ALIASES])}")
    if group is not None and (not found.group or group < 1):
        raise ValueError(f"group={group}: format {name!r} {'has groups of a size > 0' if found.group else 'has none'}")
    if act_order and not found.calibrated:
        raise ValueError(f"act_order belongs to GPTQ, which format {name!r} has no use for; leave it out")
    return replace(found, group=group or found.group, act_order=act_order)


def written(s: Scheme, name: str, w: Float[np.ndarray, "outputs inputs"], dtype: Any, gram: Any = None) -> Tensors:
    """Give the tensors that stand for a matrix in a file; scales have `dtype`. A ValueError says what does not fit."""
    if not np.isfinite(w).all():
        raise ValueError(f"{name} has numbers that are not finite; quantize a model that is whole")
    return s.write(s, name, w.astype(np.float32), np.dtype(dtype), gram)
