"""Calls of attention that a kernel is tried with, and their formula in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdel import ops
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


OUTPUTS = [
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


def error(c: Case, forward: Callable, dtype: Any = jnp.bfloat16) -> list[float]:
    """Of outputs and of log-sum-exps of a pass that is called as `mask.Passes` says.

    A key with huge scores stands where nobody sees it, NaN nowhere.
    """
    r, (heads, kv_heads), (width, values), rows = np.random.default_rng(0), c.heads, c.channels, len(c.lengths)
    draw = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), dtype), np.float64)
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
    q, k, v = (np.array(jnp.asarray(x, dtype), np.float64) for x in (q, k, v))
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
    half = (jnp.asarray(x, dtype) for x in (q, k, v))
    out, sums = forward(c.mask, *half, where, jnp.asarray(sinks, jnp.float32) if c.sinks else None, None)
    differ = lambda a, b: float((np.abs(np.asarray(a, np.float64) - b) / np.maximum(1, np.abs(b))).max())
    return [differ(out, want), differ(sums, lse)]


class Drawn(NamedTuple):
    """Query heads, key heads, channels of keys and of values, tokens; where sequences of the first row begin."""

    heads: int
    kv_heads: int
    width: int
    values: int
    tokens: int
    begins: tuple[int, ...]
    mask: ops.Mask
    sinks: bool = False
    parts: int = 1  # of a row, each with its queries and its keys
    hidden: bool = False  # some keys are of no segment, and queries have two
    dtype: Any = jnp.bfloat16
    rows: int = 2
    ahead: bool = False  # some tokens see later ones


def sight(c: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Segments of queries [2 T] or [2 T 2] and of keys [2 T]; the second row is one sequence and padding."""
    q = np.full((2, c.tokens), -1, np.int32)
    for i, begin in enumerate(c.begins):
        q[0, begin:] = i
    q[0, -9:] = -1
    q[1, :-50] = 7
    if not c.hidden:
        return q[: c.rows], q[: c.rows]
    k = q.copy()
    k[:, 20:50], k[0, 64:] = (
        -3,
        -3,
    )  # so that queries of the first row's second sequence see one key of another, or none
    second = np.where((np.arange(c.tokens) % 3 == 0) & (q == 1), 0, q)
    return np.stack([q, second], -1), k


def ahead(c: Drawn) -> np.ndarray:
    """How many later tokens each sees."""
    return np.arange(c.tokens) * 7 % 4 * c.ahead


def formula(c: Drawn, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp of all pairs, in the dtype of q; 0 and `NEG` where nothing is seen."""
    qs, ks = sight(c)
    seen = (qs.reshape(c.rows, c.tokens, 1, -1) == ks[:, None, :, None]).any(-1)
    distance = np.arange(c.tokens)[:, None] - np.arange(c.tokens)
    seen &= distance + ahead(c)[:, None] >= 0 if c.mask.causal else True
    seen &= np.abs(distance) < (c.mask.window or math.inf)
    k, v = (jnp.repeat(x, c.heads // c.kv_heads, 2) for x in (k, v))
    s = jnp.einsum("bqnh,bknh->bnqk", q, k) * c.mask.scale
    s = s if c.mask.softcap is None else c.mask.softcap * jnp.tanh(s / c.mask.softcap)
    s = jnp.where(seen[:, None], s, -jnp.inf)
    s = s if sinks is None else jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], 3)
    any_seen = jnp.isfinite(s).any(-1)
    safe = jnp.where(any_seen[..., None], s, 0.0)
    lse = jax.nn.logsumexp(safe, -1)
    p = jnp.where(jnp.isfinite(s), jnp.exp(s - lse[..., None]), 0)[..., : c.tokens]
    return jnp.einsum("bnqk,bknh->bqnh", p, v), jnp.where(any_seen, lse, NEG).swapaxes(1, 2)


def errors(c: Drawn, backward: Callable, forward: Callable | None = None) -> list[float]:
    """Of gradients, or of outputs, log-sum-exps and gradients, relative to the largest number of each; NaN if any is.

    Both are called as `mask.Passes` says, for each part of a row with the keys of each. Cotangents are random.
    """
    r = np.random.default_rng(0)
    half = lambda *shape: np.asarray(jnp.asarray(r.normal(size=shape), c.dtype), np.float64)
    rows = c.rows, c.tokens
    q, k = half(*rows, c.heads, c.width), half(*rows, c.kv_heads, c.width)
    v, dout = half(*rows, c.kv_heads, c.values), half(*rows, c.heads, c.values)
    dlse, sinks = r.normal(size=(*rows, c.heads)), r.normal(size=c.heads) if c.sinks else None
    with jax.enable_x64(True):
        inputs = tuple(map(jnp.asarray, (q, k, v, *([] if sinks is None else [sinks]))))
        call = lambda *x: formula(c, *x[:3], x[3] if c.sinks else None)
        (out, lse), vjp = jax.vjp(call, *inputs)
        want = [np.asarray(x) for x in vjp((jnp.asarray(dout), jnp.asarray(dlse)))]
        out, lse = np.asarray(out), np.asarray(lse)
    found = [np.zeros(x.shape) for x in want]
    whole, sums = np.zeros(out.shape), np.full(lse.shape, NEG)
    half_of = lambda x: jnp.asarray(x, c.dtype)
    size = c.tokens // c.parts
    qs, ks = sight(c)
    for i in range(c.parts):
        for j in range(c.parts):
            a, b = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            where = Where(jnp.asarray(qs[:, a]), None if c.parts == 1 and not c.hidden else jnp.asarray(ks[:, b]),
                          *([] if c.parts == 1 else [jnp.int32(i * size), jnp.int32(j * size)]))  # fmt: skip
            if c.ahead:
                where = replace(where, ahead=jnp.tile(jnp.asarray(ahead(c), jnp.int32), (c.rows, 1)))
            single = lambda x: jnp.asarray(x, jnp.float32)
            given = half_of(q[:, a]), half_of(k[:, b]), half_of(v[:, b])
            after = half_of(out[:, a]), single(lse[:, a]), half_of(dout[:, a]), single(dlse[:, a])
            sink = None if sinks is None else single(sinks)
            if forward is not None:
                new, new_sums = (np.asarray(x, np.float64) for x in forward(c.mask, *given, where, sink, None))
                both = np.logaddexp(sums[:, a], new_sums)
                share = [np.exp(x - both)[..., None] for x in (sums[:, a], new_sums)]
                whole[:, a], sums[:, a] = whole[:, a] * share[0] + new * share[1], both
            got = backward(c.mask, *given, where, sink, None, *after)
            for to, some, x in zip(found, (a, b, b), got[:3], strict=False):
                to[:, some] += np.asarray(x, np.float64)
            if sinks is not None:
                found[3] += np.asarray(got[3], np.float64)
    pairs = [*zip(found, want, strict=True)]
    if forward is not None:
        assert (out[lse == NEG] == whole[lse == NEG]).all() and np.allclose(sums[lse == NEG], NEG)
        pairs = [(whole, out), (sums[lse != NEG], lse[lse != NEG]), *pairs]
    return [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs]
