"""The blocks of GGUF's quantised matrices, as `Quantized`. Layouts: ggml-common.h; values: ggml-quants.c (of ggml).

    q4_0, q5_0, q8_0    d q                 32 numbers, less 8, 16 or nothing
    q4_1, q5_1          d q + m             32 numbers
    q2_k, q4_k, q5_k    d s q - e m         256 numbers in groups of 16 or 32, each with an s and an m of 4 or 6 bits
    q3_k, q6_k          d s q               256 numbers in groups of 16, each with an s of 6 or 8 bits

Numbers of five and six bits are kept in eight, those of two and three in four.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from fdel.ops.weights import Quantized

from .formats import Found, by_group, derived, leaf

# A type's name, and how many numbers and bytes a block has.
BLOCKS = {
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210),
}  # fmt: skip


def blocks(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """Read the blocks of one matrix [outputs inputs]; None where it has none. Small scales stay small integers."""
    label, numbers, width = next((b for b in BLOCKS.values() if f"{name}:{b[0]}" in found), ("", 1, 1))
    if not label:
        return None
    t = found.pop(f"{name}:{label}")
    rows, n = t.shape[0], t.shape[-1] // width
    part = lambda a, b, dtype=np.uint8: np.ascontiguousarray(t.read().reshape(rows, n, width)[..., a:b]).view(dtype)
    of = lambda count, dtype, make: derived(t, (rows, n * count), dtype, make)
    half = lambda at, sign=1: of(1, np.float16, lambda: sign * part(at, at + 2, np.float16))
    small = lambda count, make, d, dtype=np.uint8: leaf(
        np.dtype(dtype).name, of(count, dtype, make), d, None, (n * count,)
    )
    fours = lambda group, make: of(numbers // 2, np.uint8, lambda: by_group(make().reshape(rows, -1), group))
    match label:
        case "q8_0":
            return leaf("int8", of(32, np.int8, lambda: part(2, 34, np.int8)), half(0))
        case "q4_0":
            return leaf("int4", fours(32, lambda: _fields(part(2, 18), 4)), half(0))
        case "q4_1":
            return leaf("uint4", fours(32, lambda: _fields(part(4, 20), 4)), half(0), half(2))
        case "q5_0":
            return leaf("int8", of(32, np.int8, lambda: _five(part(6, 22), part(2, 6)).view(np.int8) - 16), half(0))
        case "q5_1":
            return leaf("uint8", of(32, np.uint8, lambda: _five(part(8, 24), part(4, 8))), half(0), half(2))
        case "q2_k":
            values = fours(16, lambda: _fields(part(16, 80), 2, 32))
            least = small(16, lambda: part(0, 16) >> 4, half(82, -1))
            return leaf("uint4", values, small(16, lambda: part(0, 16) & 15, half(80)), least)
        case "q3_k":
            values = fours(16, lambda: _fields(part(32, 96), 2, 32) + 4 + 4 * _fields(part(0, 32), 1))
            return leaf("int4", values, small(16, lambda: _sixteen(part(96, 108)), half(108), np.int8))
        case "q6_k":
            values = of(256, np.int8, lambda: _six(part(0, 128), part(128, 192)))
            return leaf("int8", values, small(16, lambda: part(192, 208, np.int8), half(208), np.int8))
    scale, least = (small(8, partial(_eight, part, at), half(at // 2, sign)) for at, sign in ((0, 1), (4, -1)))
    if label == "q4_k":
        return leaf("uint4", fours(32, lambda: _fields(part(16, 144), 4, 32)), scale, least)
    five = lambda: _fields(part(48, 176), 4, 32) | _fields(part(16, 48), 1) << 4
    return leaf("uint8", of(256, np.uint8, five), scale, least)


def _fields(x: np.ndarray, bits: int, run: int = 0) -> np.ndarray:
    """Take bytes [... m] apart: of each run, 16 by default all, first the lowest bits of its bytes, then the next."""
    x = x.reshape(*x.shape[:-1], -1, 1, run or x.shape[-1])
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (x >> shifts & np.uint8(2**bits - 1)).reshape(*x.shape[:-3], -1)


def _five(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Put numbers of five bits together, of four low ones in 16 bytes and one high one in a word of 32 bits."""
    return _fields(low, 4) | np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)


def _six(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Put numbers of six bits together, of 4 low ones [.. 128] and 2 high ones [.. 64] per block; minus 32."""
    return (_fields(low, 4, 64) | _fields(high, 2, 32) << 4).view(np.int8) - 32


def _eight(part: Callable[..., np.ndarray], low: int) -> np.ndarray:
    """Give eight scales (0) or minima (4) of six bits of q4_k or q5_k, of which the last four are in two places."""
    x, high = part(4 + low, 8 + low), part(12, 16)
    return np.concatenate([x & 63, (high >> low & 15) | (x >> 2 & 48)], -1)


def _sixteen(x: np.ndarray) -> np.ndarray:
    """Give sixteen scales of q3_k: four low bits in eight bytes, two high ones in four; minus 32."""
    return (_fields(x[..., :8], 4) | _fields(x[..., 8:], 2) << 4).view(np.int8) - 32
