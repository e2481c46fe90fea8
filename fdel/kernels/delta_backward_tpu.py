"""The gradient of the gated delta rule on TPUs, for `gated_delta_rule_tpu`: chunks from the last to the first.

Algorithm: with the notation of `delta_program_tpu`, Q_ij = D_ij q_i^T k_j (j <= i), T = (I + A)^-1 and S, the state before
the chunk, kept by the forward pass, G the gradient of the state after it, and D'_j the decay from token j to the end,
  w = T (v - D_i k S);  y_j = sum_i Q_ij dy_i + D'_j k_j G;  dv = T^T (b y)
  db_j = w_j^T y_j - sum_i D_ij k_i^T k_j dv_i^T w_j
  dQ_ij = b_j dy_i^T w_j;  dM_ij = -b_j dv_i^T w_j for M_ij = D_ij k_i^T k_j, j < i
  dq_i = D_i S dy_i + sum_j D_ij dQ_ij k_j;  G <- D G + sum_i D_i (q_i dy_i^T - k_i dv_i^T)
  dk_i = -D_i S dv_i + D'_i b_i G w_i + sum_j D_ij dM_ij k_j + sum_j D_ji (dM_ji k_j + dQ_ji q_j)
A log decay of token t is in all D_ij with j < t <= i, so its gradient is a sum of their parts: no difference of large
sums. With one decay they come as numbers of each token and head, to be summed over tokens. With decays of channels the
levels of halves are walked back: a decay to a border or from there hands its part to the sums that it was made of.

Bytes: q, k, v, dy, dq, dk, dv, the kept states and inverses once, decays of channels and their gradients too. FLOPs, for
each token and head: 2 C (6 Hk + 4 Hv + 3 C) of pairs and solutions, 12 Hk Hv of states; decays of channels take four more
products of C x C x Hk for each level of halves.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

import functools
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels import delta_program_tpu as program
from fdel.kernels.chunks_tpu import CHUNK, NEVER, NN, NT, dot, places

TOGETHER = 2  # heads whose stages take turns; of more, more registers are spilled
NUMBERS = {True: 1, False: 4}  # of a token and a head, with decays of channels and without


def run(
    about: program.About, whole: Int[Array, " chunks"], rows: Float[Array, "B groups numbers T"], kept: list[Array],
    inputs: list[Array],
) -> list[Array]:  # fmt: skip
    """Run over q, k, v, dy [B T N*H], and decays of channels: dq, dk, dv, of decays of channels, and `NUMBERS` rows.

    `kept` is what `program.run` keeps. The rows [B groups numbers T], `about.heads` of each kind: the gradient of beta, and
    with one decay of each token those of log decays: what pairs of tokens give, and what decays from the begin and to the
    end give before they are summed over tokens.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, groups, numbers, t = rows.shape
    steps, wide = t // CHUNK, about.heads * about.values
    block = lambda width: pl.BlockSpec((None, CHUNK, about.heads * width), lambda b, n, c, _: (b, steps - 1 - c, n))
    of_rows = lambda n: pl.BlockSpec((None, None, n, CHUNK), lambda b, n, c, _: (b, n, 0, steps - 1 - c))
    of_states = pl.BlockSpec((None, None, about.keys, wide), lambda b, n, c, _: (b, steps - 1 - c, 0, n))
    gates = [block(about.keys)] * about.channels
    qkv = [block(about.keys), block(about.keys), block(about.values)]
    found = NUMBERS[about.channels] * about.heads
    found += -found % 8
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in [*inputs[:3], *inputs[4:]]]
    call = pl.pallas_call(
        functools.partial(_program, about),
        out_shape=[*shapes, jax.ShapeDtypeStruct((b, groups, found, t), jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, groups, steps),
            in_specs=[of_rows(numbers), *qkv, block(about.values), *gates, of_states, block(CHUNK)],
            out_specs=[*qkv, *gates, of_rows(found)],
            scratch_shapes=[pltpu.VMEM((about.heads, about.keys, about.values), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=chunks.VMEM
        ),
        name="gated_delta_rule_backward",
    )
    return call(whole.reshape(b, -1)[:, ::-1].reshape(-1), rows, *inputs, *kept)


class Chunk(NamedTuple):
    """What a chunk of a head has: inputs, beta in a row and in a column, the state before, the gradient of that after."""

    q: Array
    k: Array
    dy: Array
    beta: Array
    beta_column: Array
    state: Array
    gradient: Array


def _program(about: program.About, *refs: Any) -> None:
    """Compute a chunk of some heads; `state` is the gradient of the state after it."""
    gate, dgate = (["g"], ["dg"]) if about.channels else ([], [])
    names = [
        "whole",
        "rows",
        "q",
        "k",
        "v",
        "dy",
        *gate,
        "kept",
        "inverse",
        "dq",
        "dk",
        "dv",
        *dgate,
        "numbers",
        "state",
    ]
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    n, rows = about.heads, r.rows[...]
    columns = jnp.transpose(rows)
    numbers = (1 if about.channels else 3) * n
    valid, start = (columns[:, i : i + 1] > 0 for i in (numbers, numbers + 1))
    chunks.begin(r, valid, ["q", "k", "v", "dy", *gate])
    r.numbers[...] = jnp.zeros_like(r.numbers)
    for first in range(0, n, TOGETHER):
        heads = [_head(about, r, rows, columns, start, i) for i in range(first, min(first + TOGETHER, n))]
        while heads:  # a stage of these heads, then the next: while one product is awaited others run
            heads = [head for head in heads if next(head, False)]


def _head(
    about: program.About, r: SimpleNamespace, rows: Array, columns: Array, start: Array, i: int
) -> Iterator[bool]:
    """Compute a chunk of a head, in stages."""
    n, dtype = about.heads, r.q.dtype
    key, value, token = (slice(i * w, (i + 1) * w) for w in (about.keys, about.values, CHUNK))
    beta = rows[i : i + 1], columns[:, i : i + 1]
    x = Chunk(r.q[:, key], r.k[:, key], r.dy[:, value], *beta, r.kept[:, value], r.state[i])
    factors: list[Array] = []
    if about.channels:
        pairs, factors = program.channel_pairs(x.q, x.k, jnp.where(start, NEVER, r.g[:, key]))
        begin, end = pairs.begin, pairs.end
    else:
        pairs = program.head_pairs(x.q, x.k, rows, columns, n, i)
        begin = jnp.concatenate([pairs.begin] * (about.keys // CHUNK), 1)
        sums = [columns[:, j : j + 1] for j in (n + i, 2 * n + i)]
        end = jnp.broadcast_to(jnp.exp(sum(y[-1:] - y for y in sums)), begin.shape)
    yield True
    dv, w, dbeta, within, reads, writes, state = yield from _solved(
        x, pairs, begin, end, r.v[:, value], r.inverse[:, token]
    )
    r.dv[:, value], r.state[i] = dv.astype(dtype), state
    k, q = x.k.astype(jnp.float32), x.q.astype(jnp.float32)
    dk, dq = writes - reads[0], reads[1]
    first, last = q * reads[1] - k * reads[0], k * writes
    of_state = pairs.decay * x.gradient * x.state.astype(jnp.float32)
    yield True
    if about.channels:
        near, parts = _of_halves(x, within, factors)
        total = jnp.broadcast_to(jnp.sum(jnp.transpose(of_state), 0, keepdims=True), first.shape)
        yield True
        r.dg[:, key] = _of_levels(parts, first, last, jnp.where(places(first.shape)[0] == 0, total, 0))
    else:
        near, *decays = _of_pairs(x, pairs, within, rows, columns, n, i)
        yield True
        first, last = (_row_sums(y, dtype) for y in (first, last))
        first = first + jnp.where(places(first.shape)[1] == CHUNK - 1, jnp.sum(of_state, keepdims=True), 0)
        for j, row in enumerate((*decays, first, last), 1):
            r.numbers[j * n + i : j * n + i + 1] = row
    r.numbers[i : i + 1] = dbeta
    r.dq[:, key], r.dk[:, key] = (dq + near[0]).astype(dtype), (dk + near[1]).astype(dtype)


def _row_sums(x: Float[Array, "C H"], dtype: Any) -> Float[Array, "1 C"]:
    """Sum over channels, tokens to lanes."""
    return dot(jnp.ones((8, x.shape[1])), x, NT, dtype)[:1]


def _solved(
    x: Chunk, pairs: program.Pairs, begin: Float[Array, "C Hk"], end: Float[Array, "C Hk"], v: Array, inverse: Array
) -> Generator[bool, None, tuple[Any, ...]]:
    """Walk back through outputs, solution and state, in stages.

    Gives dv, w, the gradient of beta, those of D_ij k_i^T k_j and D_ij q_i^T k_j, of what k and q read and what k writes
    [C Hk], and of the state before the chunk.
    """
    c, dtype = len(v), v.dtype
    i, j = places((c, c))
    k, q = (y.astype(jnp.float32) for y in (x.k, x.q))
    reads, wrote = k * begin, k * end
    w = dot(inverse, v.astype(jnp.float32) - dot(reads, x.state, NN, dtype), NN, dtype)
    yield True
    y = dot(jnp.transpose(pairs.qk), x.dy, NN, dtype) + dot(wrote, x.gradient, NN, dtype)
    yield True
    dv = dot(jnp.transpose(inverse.astype(jnp.float32)), x.beta_column * y, NN, dtype)
    both = jnp.concatenate([dv, x.dy.astype(jnp.float32)])
    yield True
    within = dot(both, w, NT, dtype)
    dbeta = _row_sums(w * y, dtype) - jnp.sum(pairs.kk * within[:c], 0, keepdims=True)
    of_keys = jnp.where(j < i, -x.beta * within[:c], 0)
    of_queries = jnp.where(j <= i, x.beta * within[c:], 0)
    yield True
    read = dot(both, x.state, NT, dtype) * jnp.concatenate([begin, begin])
    writes = end * dot(x.beta_column * w, x.gradient, NT, dtype)
    sides = jnp.concatenate([jnp.transpose(-reads), jnp.transpose(q * begin)], 1)
    state = pairs.decay * x.gradient + dot(sides, both, NN, dtype)
    return dv, w, dbeta, (of_keys, of_queries), (read[:c], read[c:]), writes, state


def _of_pairs(
    x: Chunk, pairs: program.Pairs, within: tuple[Array, Array], rows: Array, columns: Array, n: int, head: int
) -> tuple[Any, ...]:
    """Walk back through pairs with one decay: what q and k get, and the decays, of each token [1 C]."""
    c, dtype = len(x.k), x.k.dtype
    i, j = places((c, c))
    at = n + head, 2 * n + head
    decay, *_ = chunks.decay_pairs(*((columns[:, y : y + 1], rows[y : y + 1]) for y in at))
    of_keys, of_queries = (decay * y for y in within)
    rights = dot(jnp.concatenate([of_keys, of_queries]), x.k, NN, dtype)
    lefts = jnp.concatenate([jnp.transpose(of_keys), jnp.transpose(of_queries)], 1)
    dk = rights[:c] + dot(lefts, jnp.concatenate([x.k, x.q]), NN, dtype)
    weights = within[0] * pairs.kk + within[1] * pairs.qk
    parts = jnp.where(i >= j, dot(weights, jnp.where(i < j, 1.0, 0.0), NN, dtype), 0)
    return (rights[c:], dk), jnp.sum(parts, 0, keepdims=True)


def _of_halves(
    x: Chunk, within: tuple[Array, Array], factors: list[Float[Array, "C Hk"]]
) -> tuple[tuple[Array, Array], list[Array]]:
    """Walk back through pairs with decays of channels: what q and k get, and the logarithms of the factors."""
    c, dtype = len(x.k), x.k.dtype
    k, q = (y.astype(jnp.float32) for y in (x.k, x.q))
    i, j = places((c, c))
    same = jnp.sum(jnp.where(i == j, within[1], 0), 1, keepdims=True)
    dq, dk, parts = same * k, same * q, []
    for level, factor in enumerate(factors):
        here = program.halves(c, 1 << level)
        of_keys, of_queries = (jnp.where(here, y, 0) for y in within)
        near, query = k * factor, q * factor
        rights = dot(jnp.concatenate([of_keys, of_queries]), near, NN, dtype)
        lefts = jnp.concatenate([jnp.transpose(of_keys), jnp.transpose(of_queries)], 1)
        of_near = rights[:c] + dot(lefts, jnp.concatenate([near, query]), NN, dtype)
        parts.append(of_near * near + rights[c:] * query)
        dq, dk = dq + rights[c:] * factor, dk + of_near * factor
    return (dq, dk), parts


def _of_levels(parts: list[Array], since: Array, later: Array, total: Array) -> Float[Array, "C Hk"]:
    """Hand to each token's log decay the gradients of sums: up to a token, after it, and of all (in any row)."""
    for level, part in reversed(list(enumerate(parts))):
        size = 1 << level
        second = places(part.shape)[0] // size % 2 == 1
        total = total + program.swapped(total + jnp.where(second, since, later), size)
        since, later = since + jnp.where(second, part, 0), later + jnp.where(second, 0, part)
    return since + total
