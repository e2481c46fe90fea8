"""How published files keep quantised matrices: each reader finds the tensors of one, and gives them as `Quantized`.

A reader takes from `found` what belongs to the matrix `name` [outputs inputs] and returns a `Quantized` of `Tensor`, or
None where the file has a plain matrix. Nothing is expanded: values keep their bits, in the order that `Quantized` wants,
and a scale keeps its dtype. A ValueError says which variant was found, and what is understood.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from fdel.ops.weights import Quantized

from .tensor import CheckpointError, Tensor

Found = dict[str, Tensor]
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")  # how activations are rounded is not computed
UNORDERED = "understood are groups of neighbours in one order of the inputs: quantize it with desc_act=False"


def derived(like: Tensor, shape: tuple[int, ...], dtype: Any, make: Callable[[], np.ndarray]) -> Tensor:
    """A tensor that is computed from others when it is read, in one piece."""

    def readinto(out: np.ndarray, at: int) -> None:
        try:
            x = np.ascontiguousarray(make(), dtype)
            if x.size * x.itemsize != out.size:
                raise ValueError(f"{list(x.shape)}, expected {list(shape)}")
        except (ValueError, TypeError, LookupError, ArithmeticError) as e:
            raise CheckpointError(like.file, [f"the parts of a quantized matrix do not fit each other: {e}"]) from e
        out[...] = x.reshape(-1).view(np.uint8)

    return Tensor(shape, np.dtype(dtype), like.file, readinto, whole=True)


def leaf(
    format: str, values: Any, scale: Any, zero: Any = None, inputs: tuple[int, ...] = (), order: Any = None
) -> Quantized:
    """Make a `Quantized` of tensors; `inputs` only of one that is the scale of another."""
    return Quantized(values, scale, zero, format, inputs, np.dtype(np.float32), order)


def take(found: Found, *names: str) -> list[Tensor]:
    """Take tensors out of those of a module, by name. ValueError names the ones that are not there."""
    lacking = [name for name in names if name not in found]
    if lacking:
        raise ValueError(f"quantized, but the file lacks {', '.join(lacking)}")
    return [found.pop(name) for name in names]


def in_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the numbers in int32 words along the last axis, from the lowest bits up."""
    x = np.ascontiguousarray(words).view(np.uint8)
    if bits in (4, 8):
        return x if bits == 8 else np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1)
    each = np.unpackbits(x, axis=-1, bitorder="little").reshape(*x.shape[:-1], -1, bits)  # some lie in two words
    return np.packbits(each, axis=-1, bitorder="little")[..., 0]


def by_group(x: np.ndarray, group: int) -> np.ndarray:
    """Pack numbers of four bits by two in a byte, as `Quantized` does: r with r + group / 2."""
    x = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % group)])
    x = x.reshape(*x.shape[:-1], -1, 2, group // 2)
    return (x[..., 0, :] << 4 | x[..., 1, :]).reshape(*x.shape[:-3], -1)


def integers(like: Tensor, shape: tuple[int, int], bits: int, group: int, make: Callable[[], np.ndarray]) -> Tensor:
    """Give unsigned integers [outputs inputs] of 8 bits, or of 4 at most, as they are stored."""
    if bits == 8:
        return derived(like, shape, np.uint8, make)
    if group % 2:
        raise ValueError(f"groups of {group} inputs; understood are even ones")
    width = -(-shape[1] // group) * group // 2
    return derived(like, (shape[0], width), np.uint8, lambda: by_group(make(), group))


def _blocks(values: Tensor, scale: Tensor, format: str, block: Any, zero: Tensor | None = None) -> Quantized:
    """Give a matrix of 8 bits [... outputs inputs] with a scale per tensor, output, group, or block of both."""
    *batch, outputs, inputs = values.shape
    flat = math.prod(scale.shape) in (1, outputs) and not batch
    size = (math.prod(scale.shape), 1) if flat and len(scale.shape) < 2 else scale.shape[-2:]
    if len(scale.shape) not in ((0, 1, 2) if not batch else (len(values.shape),)) or 0 in size:
        raise ValueError(
            f"{values.shape} values with {scale.shape} scales; expected a scale per tensor, output or block"
        )
    given = block or (0, 0)
    rows, group = (
        n if c == 1 else 1 if c == n else b or n // c for n, c, b in zip((outputs, inputs), size, given, strict=True)
    )
    if (-(-outputs // rows), -(-inputs // group)) != tuple(size) or (given == (0, 0) and inputs % group):
        raise ValueError(f"{values.shape} values with {scale.shape} scales; expected blocks of {rows} by {group}")
    dtype = np.uint8 if scale.dtype == ml_dtypes.float8_e8m0fnu else scale.dtype
    width = size[1] * group

    def spread(t: Tensor, dtype: Any) -> Tensor:
        make = lambda: np.repeat(t.read().reshape(*batch, *size), rows, -2)[..., :outputs, :].view(dtype)
        return derived(t, (*batch, outputs, size[1]), dtype, make)

    if format in ("fp8", "e5m2"):
        values = replace(values, dtype=np.dtype(np.uint8))
    if width > inputs:
        raw, pad = values, [*[(0, 0)] * (len(batch) + 1), (0, width - inputs)]
        values = derived(raw, (*batch, outputs, width), raw.dtype, lambda: np.pad(raw.read(), pad))
    return leaf(format, values, spread(scale, dtype), None if zero is None else spread(zero, zero.dtype))


def fp8(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """float8_e4m3fn or e5m2 with scales per tensor, output or block (arXiv 2412.19437, section 3.3.2)."""
    scales = [key for key in (name + "_scale_inv", name + "_scale") if key in found]
    if name not in found or found[name].dtype.itemsize != 1 or not scales:
        return None
    kinds = {ml_dtypes.float8_e4m3fn: "fp8", ml_dtypes.float8_e5m2: "e5m2"}
    if (kind := kinds.get(found[name].dtype.type)) is None:
        raise ValueError(f"{found[name].dtype} with scales; understood are float8_e4m3fn and float8_e5m2")
    values, scale = take(found, name, scales[0])
    return _blocks(values, scale, kind, how.get("weight_block_size"))


def mxfp4(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """e2m1 in blocks of 32 with an exponent each (OCP Microscaling Formats v1.0), two neighbours in a byte."""
    if name + "_blocks" not in found:
        return None
    values, scale = take(found, name + "_blocks", name + "_scales")
    *outer, groups, half = values.shape
    if (half, values.dtype, scale.dtype, scale.shape) != (16, np.uint8, np.uint8, values.shape[:-1]):
        found_ = f"blocks {values.dtype}{list(values.shape)} and scales {scale.dtype}{list(scale.shape)}"
        raise ValueError(f"{found_}; expected uint8 [... groups 16] and [... groups]")

    def make() -> np.ndarray:
        x = values.read()
        x = np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], 32)
        return x[..., :16] << 4 | x[..., 16:]

    return leaf("e2m1", derived(values, (*outer, groups * 16), np.uint8, make), scale)


def _order(found: Found, name: str, inputs: int, group: int) -> Tensor | None:
    """Give the order of inputs in which groups are neighbours; None where they are, or the file numbers no groups.

    It has the group's number of each input where columns were quantized in the order of their activations.
    """
    index = found.pop(name, None)
    if index is None or (x := index.read()).min() < 0 or (x == np.arange(inputs) // group).all():
        return None
    order = np.argsort(x, kind="stable")
    if (x[order] != np.arange(inputs) // group).any():
        raise ValueError(f"groups of other sizes than {group}; {UNORDERED}")
    return derived(index, (inputs,), np.int32, lambda: order)


def _sorted(x: np.ndarray, order: Tensor | None) -> np.ndarray:
    """Bring the last axis into an order."""
    return x if order is None else x[..., order.read()]


def gptq(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """GPTQ (arXiv 2210.17323): words along inputs; zero points are stored less one, except in "gptq_v2".

    Two and three bits take four here.
    """
    stem, bits, layout = name.removesuffix("weight"), how.get("bits"), how.get("checkpoint_format", "gptq")
    if stem + "qweight" not in found:
        return None
    if bits not in (2, 3, 4, 8) or layout not in ("gptq", "gptq_v2"):
        known = "2, 3, 4 and 8 bits as 'gptq' and 'gptq_v2'"
        raise ValueError(f"GPTQ of {bits} bits as {layout!r}; understood are {known}")
    words, zeros, scale = take(found, stem + "qweight", stem + "qzeros", stem + "scales")
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    group = min(how.get("group_size", -1), inputs) if how.get("group_size", -1) > 0 else inputs
    order = _order(found, stem + "g_idx", inputs, group)
    one, kind = int(layout == "gptq"), "int16" if bits == 8 else "uint8"
    return leaf(
        f"uint{max(bits, 4)}",
        integers(words, (outputs, inputs), bits, group, lambda: _sorted(in_words(words.read().T, bits), order)),
        derived(scale, scale.shape[::-1], scale.dtype, lambda: scale.read().T),
        derived(zeros, scale.shape[::-1], kind, lambda: np.add(in_words(zeros.read(), bits), one, dtype=kind).T),
        order=order,
    )


def compressed(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """compressed-tensors: float8 and int8 as they are, integers of 4 and 8 bits in words along inputs, NVFP4 and MXFP4."""
    schemes = [g["weights"] for g in how.get("config_groups", {}).values() if g.get("weights")]
    block = next((s["block_structure"] for s in schemes if s.get("block_structure")), None)
    if name + "_packed" in found:
        floats = any(s.get("type") == "float" for s in schemes)
        if floats and found[name + "_packed"].dtype == np.uint8:
            return e2m1(found, name, take(found, name + "_packed")[0], name + "_global_scale")
        return _packed(found, name, {s.get("num_bits") for s in schemes})
    if name not in found or name + "_scale" not in found:
        return None
    if found[name].dtype != np.int8:
        return fp8(found, name, {"weight_block_size": block})
    values, scale = take(found, name, name + "_scale")
    if _order(found, name + "_g_idx", values.shape[1], values.shape[1] // (scale.shape or (1,))[-1]) is not None:
        raise ValueError(f"int8 in another order of its inputs; {UNORDERED}")
    return _blocks(values, scale, "int8", block, found.pop(name + "_zero_point", None))


def e2m1(found: Found, name: str, values: Tensor, outer: str) -> Quantized:
    """Floats of four bits, two neighbours in a byte: NVFP4's groups of 16 with e4m3 scales, MXFP4's of 32 with exponents.

    NVFP4's scales are divided by the number `outer`. With one that is called weight_scale_2 they are multiplied.
    """
    (scale,), (*batch, outputs, half) = take(found, name + "_scale"), values.shape
    groups = scale.shape[-1]
    nv, group = scale.dtype == ml_dtypes.float8_e4m3fn, 2 * half // max(groups, 1)
    if values.dtype != np.uint8 or (group, scale.dtype.itemsize) != (16 if nv else 32, 1) or group * groups != 2 * half:
        found_ = f"{values.dtype}{list(values.shape)} with scales {scale.dtype}{list(scale.shape)}"
        raise ValueError(
            f"four-bit floats {found_}; understood are groups of 16 with e4m3 scales, of 32 with exponents"
        )

    def make() -> np.ndarray:
        x = values.read()
        return by_group(np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1), group)

    stored = derived(values, values.shape, np.uint8, make)
    if not nv:
        return leaf("e2m1", stored, replace(scale, dtype=np.dtype(np.uint8)))
    (whole,) = take(found, outer)
    number = lambda: np.float32(whole.read().reshape(-1)[0])
    share = number if outer.endswith("_scale_2") else lambda: 1 / number()
    one = derived(whole, (*batch, outputs, 1), np.float32, lambda: np.full((*batch, outputs, 1), share(), np.float32))
    return leaf("e2m1", stored, leaf("fp8", replace(scale, dtype=np.dtype(np.uint8)), one, None, (groups,)))


def modelopt(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """NVIDIA's ModelOpt: float8 with a scale per tensor or output, and NVFP4 with a second scale per tensor."""
    if (algorithm := how.get("quant_algo")) not in MODELOPT:
        raise ValueError(f"ModelOpt's {algorithm!r:.100}; understood are {', '.join(MODELOPT)}")
    if name + "_scale_2" in found:
        return e2m1(found, name, take(found, name)[0], name + "_scale_2")
    return fp8(found, name, how)


def _packed(found: Found, name: str, widths: set) -> Quantized:
    words, scale, size = take(found, name + "_packed", name + "_scale", name + "_shape")
    outputs, inputs = map(int, size.read())
    bits = [b for b in (4, 8) if b in widths and -(-inputs * b // 32) == words.shape[-1]]
    if words.dtype != np.int32 or len(bits) != 1 or scale.shape[0] != outputs or inputs % scale.shape[1]:
        found_ = (
            f"{words.dtype}{list(words.shape)} of {sorted(widths)} bits for {outputs} x {inputs}, scales {scale.shape}"
        )
        raise ValueError(f"{found_}; understood are 4 and 8 bits in int32, with scales per output or group")
    (n,), shape, group = bits, scale.shape, inputs // scale.shape[1]
    order = _order(found, name + "_g_idx", inputs, group)
    zeros = found.pop(name + "_zero_point", None)
    middle = lambda: np.full(shape, 1 << n - 1)
    points = middle if zeros is None else lambda: in_words(zeros.read().T, n)[:, :outputs].T
    values = integers(words, (outputs, inputs), n, group, lambda: _sorted(in_words(words.read(), n)[:, :inputs], order))
    return leaf(f"uint{n}", values, scale, derived(scale, shape, np.uint8, points), order=order)


READERS: dict[str, Callable[[Found, str, Mapping[str, Any]], Quantized | None]] = {
    "fp8": fp8, "fbgemm_fp8": fp8, "mxfp4": mxfp4, "gptq": gptq, "compressed-tensors": compressed,
    "modelopt": modelopt,
}  # fmt: skip
