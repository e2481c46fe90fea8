"""Turn matrices of a params tree into `Quantized` leaves and back, and find out which leaves are matrices."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fdel.ops.weights import E2M1, NF4, PACKED, LowRank, Quantized, dense, exponents, is_weight, merge, split

from .hf_layout import Matrix, matrix
from .spec import Param, named_leaves, path_name, unstack

Tree = Any

# The matrices of a language model's layers. A tower's have its name before theirs, and stay whole in published files and
# under PEFT; routers decide by small differences.
MATRICES = r"^(?!.*\b(vision|hearing)\b).*\blayers\b(?!.*\brouter\b)"


def declarations(params: Tree, spec: Tree) -> dict[str, Param]:
    """Find the Param of each leaf of params, by path; the spec may be stacked or listed, whatever params are.

    Params that the spec lacks are a ValueError.
    """
    declared = dict(named_leaves(spec)) | dict(named_leaves(unstack(spec)))
    paths = [path for path, _ in named_leaves(params, is_leaf=is_weight)]
    unknown = [path for path in paths if path not in declared]
    if unknown:
        raise ValueError(f"the spec has no {', '.join(unknown[:20])}; give the spec that these params were made with")
    return {path: declared[path] for path in paths}


def targets(params: Tree, spec: Tree, where: str) -> dict[str, Matrix]:
    """Find the matrices whose path ("layers.q"; "layers.0.q" in a listed tree) matches the regular expression `where`.

    No match is a ValueError.
    """
    matrices = {path: m for path, p in declarations(params, spec).items() if (m := matrix(p))}
    found = {path: m for path, m in matrices.items() if re.search(where, path)}
    if not found:
        raise ValueError(f"where={where!r} matches no matrix; there are {', '.join(matrices)}")
    return found


def change(f: Callable[[str, Any], Any], params: Tree) -> Tree:
    """Map (dotted path, leaf) to a new leaf; a Quantized or LowRank weight is one leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, w: f(path_name(path), w), params, is_leaf=is_weight)


def quantize(
    params: Tree, format: str, where: str = MATRICES, *, spec: Tree, group: int | None = None, double: bool = True
) -> Tree:
    r"""Quantise the matrices whose path matches `where` to a format of `FORMATS`; the base of a LowRank leaf too.

    By default those of the language model's layers; with r"\blayers\b" a tower's too.

    "int8", "fp8" (e4m3), "nf4", "mxfp4" (e2m1) and "int4" change weights alone. "a8q" (int8), "w4a8" and "a4q" (int4)
    also make products round activations, row by row, to int8, or to four bits, and multiply integers; `NAMES` has what
    else these are called.

    Each output has one scale per `group` inputs: all by default, 64 for four bits, 32 for mxfp4. The greatest magnitude of
    a group becomes the greatest value of the format, but mxfp4 has powers of two (OCP Microscaling Formats v1.0, section
    6.3), which may cut it by a quarter; rounding loses at most half a scale (integers), 2^-4 of a value or 2^-10 of
    a scale (fp8), half the gap between two neighbours in `NF4` times the scale (nf4, arXiv 2305.14314).
    `double` keeps nf4 scales in 8 bits between the least and the greatest of each output, which loses at most 1/510 of
    that range; QLoRA takes 256 scales of any outputs together instead, but then axes could not be sharded or sliced.
    >>> params.nbytes(weights), params.nbytes(params.quantize(weights, "int8", spec=spec))
    (6816, 3872)
    """
    format = NAMES.get(format, format)
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join([*FORMATS, *NAMES])}")
    packed = FORMATS[format][2] in PACKED
    if group is not None and not fits(format, group):
        raise ValueError(f"group={group} must be positive, and even for {format}, if that packs two values in a byte")
    group = group or (32 if format == "mxfp4" else 64 if packed else None)
    found = targets(params, spec, where)

    def one(path: str, w: Any) -> Any:
        if path not in found:
            return w
        if isinstance(w, LowRank):
            return replace(w, base=one(path, w.base))
        if isinstance(w, Quantized):
            fix = f"leave it so, or make it plain first, as `fdel convert` does; where={where!r} chose it"
            raise ValueError(f"{path} is {w.format} already; {fix}")
        m = found[path]
        if not m.batch:
            return _encode(w, m, format, group, double)
        # One layer at a time: float32 copies of a whole stack would be larger than the model.
        return lax.map(lambda x: _encode(x, replace(m, batch=m.batch - 1), format, group, double), w)

    return change(one, params)


def fits(format: str, group: int) -> bool:
    """Tell whether a format can have a scale for each `group` values: two of four bits share a byte."""
    return group > 0 and not (FORMATS[format][2] in PACKED and group % 2)


def straight_through(params: Tree, format: str, where: str = MATRICES, *, spec: Tree, group: int | None = None) -> Tree:
    """Round matrices as `quantize` does and keep them as arrays; gradients pass as if nothing were rounded.

    Call it on the parameters inside a loss to train weights that will be quantized (arXiv 1308.3432, section 4). Formats
    that round activations train for their weights alone.
    """
    rounded = dequantize(quantize(jax.tree.map(lax.stop_gradient, params), format, where, spec=spec, group=group))
    return jax.tree.map(lambda w, r: w + lax.stop_gradient(r - w), params, rounded)


def quantized_paths(params: Tree) -> list[str]:
    """Name the leaves that are quantized, the bases of adapters too."""
    bases = ((path, w.base if isinstance(w, LowRank) else w) for path, w in named_leaves(params, is_leaf=is_weight))
    return [path for path, w in bases if isinstance(w, Quantized)]


def dequantize(params: Tree, dtype: Any = None) -> Tree:
    """Turn every Quantized leaf into an array of `dtype` (by default, the dtype it had); adapters stay.
    >>> near = params.dequantize(params.quantize(weights, "int8", spec=spec))
    >>> bool(jnp.allclose(near["layers"]["q"], weights["layers"]["q"], atol=1e-3))
    True
    """

    def one(path: str, w: Any) -> Any:
        if isinstance(w, LowRank):
            return replace(w, base=one(path, w.base))
        return dense(w, dtype) if isinstance(w, Quantized) else w

    return change(one, params)


def _encode(w: Float[Array, "..."], m: Matrix, format: str, group: int | None, double: bool) -> Quantized:
    inputs = m.cut(w.shape)[2]
    x = merge(w.astype(jnp.float32), len(inputs))
    size = x.shape[-1]
    group = min(group or size, size)
    greatest, store, stored, activations = FORMATS[format]
    group += group % 2 if stored in PACKED else 0
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -size % group)])
    x = split(x, x.shape[-1] // group)
    most = jnp.max(jnp.abs(x), -1)
    # A scale of mxfp4 is an exponent: that of the greatest magnitude, less that of the greatest value; 2^-126 at least.
    kept = jnp.clip(jnp.frexp(most)[1] - 3 + 127, 1, 254).astype(jnp.uint8) if stored == "e2m1" else most / greatest
    scale = exponents(kept) if stored == "e2m1" else kept
    values = merge(store(x / jnp.where(scale == 0, 1, scale)[..., None]))
    shrink = format == "nf4" and double and scale.shape[-1] > 2
    return Quantized(
        values, _affine(scale) if shrink else kept, None, stored, inputs, jnp.dtype(w.dtype), None, activations
    )


def _affine(x: Array) -> Quantized:
    low, high = jnp.min(x, -1, keepdims=True), jnp.max(x, -1, keepdims=True)
    step = (high - low) / 255
    values = jnp.round((x - low) / jnp.where(step == 0, 1, step)).astype(jnp.uint8)
    return Quantized(values, step, low, "uint8", x.shape[-1:], jnp.dtype(x.dtype))


def _nf4(x: Array) -> Array:
    index = (x > (NF4[0] + NF4[1]) / 2).astype(jnp.uint8)
    for a, b in itertools.pairwise(NF4[1:]):
        index += (x > (a + b) / 2).astype(jnp.uint8)
    return _pairs(index)


def _e2m1(x: Array) -> Array:
    """Round to the nearest of `E2M1`, ties to even indices; what is greater becomes 6."""
    size = jnp.abs(x)
    index = jnp.where(x < 0, 8, 0).astype(jnp.uint8)
    for i, (a, b) in enumerate(itertools.pairwise(E2M1[:8])):
        index += (size >= (a + b) / 2 if i % 2 else size > (a + b) / 2).astype(jnp.uint8)
    return _pairs(index)


def _pairs(x: Array) -> Array:
    """Pack the first half of the last axis in the high bits, the second in the low ones."""
    high, low = jnp.split(x, 2, -1)
    return high << 4 | low


_int8 = lambda x: jnp.round(x).astype(jnp.int8)
_int4 = lambda x: _pairs((jnp.round(x) + 8).astype(jnp.uint8))
# The greatest value of each format, how groups (the last axis) of numbers up to it are stored, as what, and to how many
# bits products round activations (0: not at all).
FORMATS: Mapping[str, tuple[float, Callable[[Array], Array], str, int]] = {
    "int8": (127.0, _int8, "int8", 0),
    "fp8": (448.0, lambda x: lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8), "fp8", 0),
    "nf4": (1.0, _nf4, "nf4", 0),
    "mxfp4": (6.0, _e2m1, "e2m1", 0),
    "int4": (7.0, _int4, "int4", 0),
    "a8q": (127.0, _int8, "int8", 8),
    "w4a8": (7.0, _int4, "int4", 8),
    "a4q": (7.0, _int4, "int4", 4),
}
NAMES = {"8bit": "int8", "a8bit": "a8q", "w8a16": "int8", "w8a8": "a8q", "w4a16": "int4", "w4a4": "a4q"}
