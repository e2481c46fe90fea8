"""AWQ's matrices (arXiv 2306.00978) as `Quantized`, in the three layouts that AutoAWQ writes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fdel.ops.weights import Quantized

from .formats import Found, derived, in_words, integers, leaf, take
from .tensor import Tensor

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word of "gemm" has the column i of its eight
LAYOUTS = ("gemm", "gemv", "gemv_fast")
STRIDE = 64  # inputs of four outputs that lie one behind the other in "gemv_fast"


def awq(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """Read four bits in the layout "gemm", words along outputs, or one of those along inputs, "gemv" and "gemv_fast"."""
    stem, bits, layout = name.removesuffix("weight"), how.get("bits"), str(how.get("version", "gemm")).lower()
    if stem + "qweight" not in found:
        return None
    if bits != 4 or layout not in LAYOUTS:
        known = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"AWQ of {bits} bits as {layout!r}; understood are 4 bits as {known}")
    fast = layout == "gemv_fast"
    early = fast and stem + "scaled_zeros" in found  # as early versions call them
    words, zeros, scale = take(found, stem + "qweight", stem + ("scaled_zeros" if early else "qzeros"), stem + "scales")
    if layout == "gemm":
        return _gemm(words, zeros, scale)
    dtype, outputs, inputs = (np.int16, 4, 1) if fast else (np.int32, 1, 8)  # of one word
    if words.dtype != dtype or len(words.shape) != 2 or (fast and words.shape[1] % STRIDE):
        more = f" in whole pieces of {STRIDE} inputs" if fast else ""
        expected = f"{np.dtype(dtype)} [outputs / {outputs}, inputs / {inputs}]{more}"
        raise ValueError(f"AWQ's {layout}: qweight is {words.dtype}{list(words.shape)}; expected {expected}")
    return (_fast if fast else _gemv)(words, zeros, scale, how.get("group_size", 128))


def _gemm(words: Tensor, zeros: Tensor, scale: Tensor) -> Quantized:
    inputs, outputs = words.shape[0], words.shape[1] * 8
    # The columns of a word, low bits first, are 0, 2, 4, 6, 1, 3, 5, 7 of eight.
    ordered = lambda t: in_words(t.read(), 4).reshape(t.shape[0], -1, 8)[..., ORDER].reshape(t.shape[0], -1).T
    return leaf(
        "uint4",
        integers(words, (outputs, inputs), 4, inputs // scale.shape[0], lambda: ordered(words)),
        derived(scale, scale.shape[::-1], scale.dtype, lambda: scale.read().T),
        derived(zeros, scale.shape[::-1], np.uint8, lambda: ordered(zeros)),
    )


def _gemv(words: Tensor, zeros: Tensor, scale: Tensor, group: Any) -> Quantized:
    """Scales [outputs groups] and zero points in words along groups, both filled up beyond the last group."""
    shape = words.shape[0], words.shape[1] * 8
    count, group = _groups(shape[1], group)
    _hold((shape[0], count), scale, (zeros.shape[0], zeros.shape[-1] * 8))
    return leaf(
        "uint4",
        integers(words, shape, 4, group, lambda: in_words(words.read(), 4)),
        derived(scale, (shape[0], count), scale.dtype, lambda: scale.read()[:, :count]),
        derived(zeros, (shape[0], count), np.uint8, lambda: in_words(zeros.read(), 4)[:, :count]),
    )


def _fast(words: Tensor, zeros: Tensor, scale: Tensor, group: Any) -> Quantized:
    """Scales [groups outputs] and zeros that are added, filled up alike.

    The numbers of `STRIDE` inputs of an output lie behind those of the three outputs before it. 32 of them stand in the
    order 8 a + 2 b + c, for b below 4, c below 2 and a below 4, the last being the fastest.
    """
    outputs, inputs = shape = words.shape[0] * 4, words.shape[1]
    count, group = _groups(inputs, group)
    _hold((count, outputs), scale, zeros.shape)
    if zeros.dtype.itemsize != scale.dtype.itemsize:
        raise ValueError(f"AWQ's gemv_fast: qzeros are {zeros.dtype}, expected {scale.dtype}, as the scales are")

    def values() -> np.ndarray:
        x = in_words(words.read(), 4).reshape(outputs // 4, inputs // STRIDE, 4, STRIDE).swapaxes(1, 2)
        return x.reshape(outputs, inputs // 32, 4, 2, 4).transpose(0, 1, 4, 2, 3).reshape(shape)

    turned = lambda t: derived(t, (outputs, count), t.dtype, lambda: t.read()[:count].T)
    return leaf("uint4", integers(words, shape, 4, group, values), turned(scale), turned(zeros))


def _groups(inputs: int, group: Any) -> tuple[int, int]:
    """Give how many groups there are, and their size; -1 is one of all inputs."""
    size = inputs if group == -1 else group
    if type(size) is not int or size < 1 or inputs % size:
        raise ValueError(
            f"AWQ: group_size is {group!r:.100}; expected a divisor of {inputs} inputs, or -1 for all of them"
        )
    return inputs // size, size


def _hold(least: tuple[int, int], scale: Tensor, zeros: tuple[int, ...]) -> None:
    """Raise a ValueError for scales or zeros that have fewer entries than there are outputs and groups."""
    for what, shape in ("scales", scale.shape), ("zeros", zeros):
        if len(shape) != 2 or shape[0] < least[0] or shape[1] < least[1]:
            raise ValueError(f"AWQ: {what} for {list(shape)}, expected at least {list(least)}; is group_size right?")
