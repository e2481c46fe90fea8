"""Attention in training batches on NVIDIA Hopper: a Pallas Mosaic GPU kernel, whose program is `flash_program_gpu`.

Packed rows, windows, softcap, sinks, keys with segments of their own, parts of a row; `flash_tiles` tells which tiles
meet. The backward pass is `flash_backward_gpu`. Interpreted, and measured on an H100 (docs/kernels_hopper.md).
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from fdel.kernels import flash_program_gpu as program
from fdel.kernels.device import no_hopper, unmeasured
from fdel.kernels.flash_backward_gpu import JOINT, backward
from fdel.kernels.flash_tiles import END, FIRST, ranges, sight, tests
from fdel.kernels.flash_tiles_gpu import FORWARD
from fdel.ops import mask as M
from fdel.ops.mask import Attended, Keys, Mask, Passes, PerHead, Queries, Values, Where


def unsupported(
    q: Array, k: Array, v: Array, where: Where, *, mask: Mask, sinks: PerHead, alibi: PerHead, bias: Any = None
) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it attends in bfloat16 and float16; found {q.dtype}, {k.dtype}, {v.dtype}"
    if (q.shape[3], v.shape[3]) not in FORWARD:
        return f"heads of {q.shape[3]} and {v.shape[3]} channels; expected one of {', '.join(map(str, FORWARD))}"
    if mask.scale <= 0:
        return f"scores times {mask.scale}; expected a number above 0"
    for name, value in (("alibi slopes", alibi), ("a bias", bias)):
        if value is not None:
            return f"{name}, which it does not have"
    return None


def unproven(q: Array, k: Array, v: Array, *_: Any, **__: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    if (q.shape[3], v.shape[3]) in JOINT:
        return "its backward pass in one kernel has not run on an H100, hopper_ordered's two have; `use` can name it"
    return unmeasured(q)


def call(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: None, bias: None
) -> Attended:
    """Attend within segments: (output, log-sum-exps in float32); see `unsupported` for what it can serve."""
    return M.attention(Passes(forward, backward), mask, q, k, v, where, sinks, alibi)


def forward(
    m: Mask, q: Queries, k: Keys, v: Values, where: Where, sinks: PerHead, alibi: None, *, interpreted: bool = False
) -> Attended:
    """Attend as `mask.Passes` says."""
    tiles = FORWARD[q.shape[3], v.shape[3]]
    numbers, segments = sight(m, where, q.shape[1], k.shape[1], tiles)
    spans = ranges(numbers, segments, tiles)
    spans = spans.at[..., END].max(spans[..., FIRST] + 1)  # one tile at least, of which nothing is seen
    whole = lambda x, size: jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
    how = program.Call(m.scale, m.softcap, tests(m, where), tiles, interpreted)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    arrays = whole(q, tiles.queries), whole(k, tiles.keys), whole(v, tiles.keys)
    out, lse = program.run(how, *arrays, numbers, segments, spans, sinks)
    return out[:, : q.shape[1]], lse.swapaxes(1, 2)[:, : q.shape[1]]
