"""A process that interprets the Hopper kernel for attention in training batches: prints the largest errors against float64.

`race` plants one; a number chooses one of `CASES`. See `interpreted_pages`.
"""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import flash_attention_gpu as kernel
from fdel.ops.mask import HIDDEN, NEG, Mask, Where


class Case(NamedTuple):
    """Tokens, heads and channels of a call, its mask, and what else there is. `lengths`: of the segments of each row."""

    mask: Mask
    queries: int = 200
    keys: int = 200
    heads: tuple[int, int] = (2, 1)
    channels: tuple[int, int] = (64, 64)
    lengths: tuple[tuple[int, ...], ...] = ((70, 61, 40, 29),)
    sinks: bool = False
    starts: tuple[int, int] | None = None  # of a part of a row
    prompts: bool = False  # each segment sees the first one, too
    hidden: bool = False  # some keys are seen by nobody
    ahead: bool = False


CASES = [
    Case(Mask(0.3, window=90, softcap=20.0), lengths=((70, 61, 40),), sinks=True),
    Case(Mask(0.3), 130, 300, starts=(200, 32), lengths=((250, 50, 100),)),
    Case(Mask(0.3), 300, 130, starts=(0, 190), lengths=((400,),)),
    Case(Mask(0.3), 600, 600, lengths=((560, 40),), hidden=True),
    Case(Mask(0.3), prompts=True, lengths=((70, 61, 40, 29), (150, 20))),
    Case(Mask(0.3, causal=False, window=50), ahead=True),
    Case(Mask(0.3, causal=False), 250, 250, heads=(2, 2), lengths=((10, 230, 10),)),
    Case(Mask(0.3, window=60), lengths=((100, 100),), ahead=True),
    Case(Mask(0.2, softcap=20.0), 140, 140, channels=(256, 256), heads=(1, 1), lengths=((20, 110),)),
    Case(Mask(0.2), 140, 270, channels=(192, 128), heads=(1, 1), starts=(130, 0), lengths=((90, 180),)),
    Case(Mask(0.2), 140, 140, channels=(128, 128), heads=(2, 1), lengths=((60, 80),)),
]


def plant_a_race() -> None:
    """Leave out the wait for the values of the first tile: the fifth, in the order of tracing."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if (
            len(calls) != 5
        ):  # of who copies: keys, values free; of who multiplies: queries, keys, values, then the loop's
            wait(barrier)

    mosaic_gpu.barrier_wait = some


def error(c: Case) -> list[float]:
    """Of outputs and of log-sum-exps; a key with huge scores stands where nobody sees it, NaN nowhere."""
    r, (heads, kv_heads), (width, values), rows = np.random.default_rng(0), c.heads, c.channels, len(c.lengths)
    draw = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), jnp.bfloat16), np.float64)
    q, k, v = (draw(rows, n, h, w) for n, h, w in (
        (c.queries, heads, width), (c.keys, kv_heads, width), (c.keys, kv_heads, values)))  # fmt: skip
    q, k = q / np.sqrt(width) * 8, k.copy()
    starts = c.starts or (0, 0)
    end = max(starts[0] + c.queries, starts[1] + c.keys)
    ids = np.full((rows, end), -1)
    for row, lengths in zip(ids, c.lengths, strict=True):
        some = np.repeat(np.arange(len(lengths)), lengths)
        row[: len(some)] = some[:end]
    qs, ks = (ids[:, start : start + n] for start, n in zip(starts, (c.queries, c.keys), strict=True))
    if c.prompts:
        qs = np.stack([qs, np.where(qs > 0, 0, -2)], -1)
    if c.hidden:
        ks = np.where(r.random(ks.shape) < 0.1, HIDDEN, ks)
        ks[:, 128:256] = ids[:, 128:256]
    ahead = r.integers(0, 9, qs.shape[:2]) if c.ahead else None
    qi, ki = (start + np.arange(n) for start, n in zip(starts, (c.queries, c.keys), strict=True))
    distance = ki[None, None, :] - qi[None, :, None]
    same = (ks[:, None, :, None] == qs.reshape(rows, c.queries, 1, -1)).any(-1)
    forth = 0 if c.mask.causal else c.mask.window
    look = ahead[..., None] if c.ahead and c.mask.causal else (end if forth is None else max(forth - 1, 0))
    seen = same & (distance <= look) & ((distance > -c.mask.window) if c.mask.window else True)
    k[:, ~seen.any((0, 1))] = 1e4
    q, k, v = (np.array(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (q, k, v))
    sinks = r.normal(size=heads) * 3 if c.sinks else np.full(heads, -np.inf)
    s = np.einsum("bthd,bshd->bhts", q, np.repeat(k, heads // kv_heads, 2)) * c.mask.scale
    s = s if c.mask.softcap is None else c.mask.softcap * np.tanh(s / c.mask.softcap)
    s = np.where(seen[:, None], s, -np.inf)
    top = np.maximum(np.maximum(s.max(-1), sinks[:, None]), -1e9)
    p = np.exp(s - top[..., None])
    total = p.sum(-1) + np.exp(sinks[:, None] - top)
    want = np.einsum("bhts,bshd->bthd", p / np.maximum(total, 1e-300)[..., None], np.repeat(v, heads // kv_heads, 2))
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, NEG, top + np.log(total)).swapaxes(1, 2)
    ints = lambda x: None if x is None else jnp.asarray(x, jnp.int32)
    at = (None, None) if c.starts is None else map(jnp.int32, c.starts)
    where = Where(ints(qs), ints(ks), *at, ints(ahead))
    half = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        out, sums = kernel.forward(
            c.mask, *half, where, jnp.asarray(sinks, jnp.float32) if c.sinks else None, None, interpreted=True
        )
    differ = lambda a, b: float((np.abs(np.asarray(a, np.float64) - b) / np.maximum(1, np.abs(b))).max())
    return [differ(out, want), differ(sums, lse)]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "race" in sys.argv:
        plant_a_race()
        print(*error(Case(Mask(0.3), 128, 400, heads=(1, 1), lengths=((400,),), starts=(272, 0))))
    else:
        for case in [CASES[int(n)] for n in sys.argv[1:]] or CASES:
            print(*error(case), flush=True)
