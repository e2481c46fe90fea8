"""How products with weights in few bits are cut on Hopper, and what arrays `quantized_program_gpu` is given for that."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels.words_gpu import WORD
from fdel.ops.weights import PACKED, Quantized, scales

GROUPS, EACH = 2, 64  # groups of warps that multiply, and outputs of each: what one product takes
ROWS = (8, 16, 32, 64, 128)  # of x in a program
NARROW = (8, 16)  # bytes of narrow groups
SHARED, PIECE = (
    16,
    32,
)  # rows up to which two programs share a multiprocessor; bytes of narrow groups then decoded at once


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: rows of x in a program, bytes of a chunk, chunks on their way, parts of the inputs.

    `groups`: in a chunk, or `inner`: chunks of a group. `outputs`: of each of several matrices, for whose rows there is a
    table of tiles. `ahead`: chunks whose scales are on their way to registers; one is multiplied in less time than memory
    answers. `in_memory`: decoded weights go through shared memory, which alone the interpreter knows.
    """

    rows: int
    chunk: int
    depth: int
    splits: int
    format: str
    groups: int = 1
    inner: int = 1
    outputs: int = 0
    ahead: int = 1
    in_memory: bool = False

    few = property(lambda self: self.rows < ROWS[-1])
    halves = property(lambda self: 2 if self.format in PACKED else 1)
    parts = property(lambda self: self.halves if self.inner > 1 else 1)  # of a chunk's inputs
    narrow = property(lambda self: self.chunk // self.groups in NARROW)

    @property
    def piece(self) -> int:
        """Bytes of a chunk that are decoded at once."""
        if not self.narrow:
            return self.chunk // self.groups
        return PIECE if self.rows <= SHARED else self.chunk


class Stored(NamedTuple):
    """A weight's arrays as matrices: a row for each output."""

    values: Array
    scale: Array
    zero: Array | None
    outer: Array | None  # of scales that are numbers of fp8 themselves
    kind: str  # of scales: see `kind_of`


def kind_of(w: Quantized) -> str:
    """Say how scales are read: see `scale_of` and `scales_of`. Of those that are themselves quantized only NVFP4's are."""
    scale: Any = w.scale
    if not isinstance(scale, Quantized):
        return "exponent" if scale.dtype == jnp.uint8 else "float"
    narrow, one = w.values.shape[-1] // scale.shape[-1] in NARROW, scale.scale.shape[-1] == 1
    return "fp8" if narrow and one and scale.format == "fp8" and scale.zero is None else "float"


def stored(w: Quantized, t: Tiling) -> Stored:
    """Give a weight's arrays. Only scales that are in few bits, but for NVFP4's, are copied, as numbers.

    Scales of 8 bits of narrow groups are joined in words, as many as divide a row's and a chunk's.
    """
    flat: Any = lambda a: None if a is None else a.reshape(-1, a.shape[-1])
    scale: Any = w.scale
    kind, outer = kind_of(w), None
    if kind == "fp8":
        scale, outer = scale.values, scales(scale)
    elif isinstance(scale, Quantized):
        scale = scales(w)
    if t.narrow and kind != "float":
        size = math.gcd(WORD, t.groups, scale.shape[-1])
        scale = jax.lax.bitcast_convert_type(scale.reshape(*scale.shape[:-1], -1, size), f"uint{8 * size}")
    values = jax.lax.bitcast_convert_type(w.values, jnp.int8) if w.format in ("int8", "uint8") else w.values
    return Stored(flat(values), flat(scale), flat(w.zero), flat(outer), kind)


def laid(x: Float[Array, "M K"], w: Quantized, t: Tiling) -> Float[Array, "M stored"]:
    """Pad inputs to whole groups and chunks; of narrow ones order them as a piece has its numbers: high bits, then low."""
    lanes, some = w.values.shape[-1], t.groups * t.piece // t.chunk
    full = (-(-lanes // t.chunk) * t.chunk if t.groups > 1 else lanes) * t.halves
    x = jnp.pad(x, ((0, 0), (0, full - x.shape[1])))
    if not t.narrow:
        return x
    return x.reshape(len(x), -1, some, t.halves, t.piece // some).swapaxes(2, 3).reshape(len(x), full)
