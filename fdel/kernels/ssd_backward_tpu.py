"""The gradient of state-space duality (Mamba-2) on TPUs, for `ssd_tpu`: chunks from the last to the first.

Algorithm: with P_ij = D_ij (j <= i) the decays of `ssd_tpu`, E_ij = dy_i^T x_j, S the state before the chunk, kept by the
forward pass, G the gradient of the state after it, and D_i and D'_j the decays from the chunk's begin to token i and from
token j to its end,
  z_j = sum_i P_ij (c_i^T b_j) dy_i + D'_j b_j G;  dx_j = dt_j z_j + d dy_j;  G <- D G + sum_i D_i c_i dy_i^T
  dc_i = sum_j P_ij E_ij dt_j b_j + D_i S dy_i;  db_j = sum_i P_ij E_ij dt_j c_i + dt_j D'_j G x_j
A log decay of token k is in all D_ij with j < k <= i, so its gradient is a sum of their parts of y^T dy: no difference of
large sums. It, and that of dt, come as numbers of each token and head.

Bytes: x, dy, dx and the kept states once; b and c once for each step's heads, db and dc in float32. FLOPs, for each token
and head: 2 C (3 max(H, 128) + 2 S + C) of pairs, 10 S H of states.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels.chunks_tpu import CHUNK, LANES, NN, NT, decay_pairs, dot, places

NUMBERS = 5  # of a token and a head


def run(
    about: Any, whole: Int[Array, " chunks"], rows: Float[Array, "B groups numbers T"],
    kept: Float[Array, "B chunks S NH"], inputs: list[Array],
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Run over x, dy [B T N*H], b and c [B T G*S]: dx, db and dc [B groups T S] of each step's heads, and `NUMBERS` rows.

    The rows [B groups numbers T], `about.heads` of each kind: the gradient of dt beside decays, of log decays what pairs of
    tokens of a chunk give, what its first and its last state give before they are summed over tokens, and dy^T x.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows_b, groups, numbers, t = rows.shape
    width, states, steps = about.heads * about.channels, about.states, t // CHUNK
    block = pl.BlockSpec((None, CHUNK, width), lambda b, n, c, _: (b, steps - 1 - c, n))
    shared = pl.BlockSpec((None, CHUNK, states), lambda b, n, c, _: (b, steps - 1 - c, n // about.share))
    of_rows = lambda n: pl.BlockSpec((None, None, n, CHUNK), lambda b, n, c, _: (b, n, 0, steps - 1 - c))
    parts = pl.BlockSpec((None, None, CHUNK, states), lambda b, n, c, _: (b, n, steps - 1 - c, 0))
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((rows_b, *sizes), dtype)
    found = NUMBERS * about.heads + -NUMBERS * about.heads % 8
    call = pl.pallas_call(
        functools.partial(_program, about),
        out_shape=(
            shape(*inputs[0].shape[1:], dtype=inputs[0].dtype),
            *[shape(groups, t, states)] * 2,
            shape(groups, found, t),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows_b, groups, steps),
            in_specs=[
                of_rows(numbers),
                block,
                block,
                shared,
                shared,
                pl.BlockSpec((None, None, states, width), lambda b, n, c, _: (b, steps - 1 - c, 0, n)),
            ],
            out_specs=(block, parts, parts, of_rows(found)),
            scratch_shapes=[pltpu.VMEM((states, width), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=chunks.VMEM
        ),
        name="ssd_backward",
    )
    x, dy, b, c = inputs
    return call(whole.reshape(rows_b, -1)[:, ::-1].reshape(-1), rows, x, dy, b, c, kept)


def _program(about: Any, *refs: Any) -> None:
    """Compute a chunk of some heads; `state` is the gradient of the state after it."""
    names = ["whole", "rows", "x", "dy", "b", "c", "kept", "dx", "db", "dc", "numbers", "state"]
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    n, channels, dtype, rows = about.heads, about.channels, r.x.dtype, r.rows[...]
    columns = jnp.transpose(rows)
    chunks.begin(r, columns[:, 4 * n : 4 * n + 1] > 0, ["x", "dy", "b", "c"])
    b, c = r.b[...], r.c[...]
    scores = dot(c, b, NT, dtype)
    queries = jnp.transpose(c.astype(jnp.float32))  # [S C]
    i, j = places((CHUNK, CHUNK))
    before = jnp.where(i < j, 1.0, 0.0)
    tile = max(LANES, channels)
    of_head = places((CHUNK, tile))[1] // channels
    sides = jnp.where(places((8, tile))[0] == places((8, tile))[1] // channels, 1.0, 0.0)
    head_sums = lambda x: dot(sides, x, NT, dtype)  # [8 C], of the channels of each head
    column_sums = lambda x: jnp.sum(x, 0, keepdims=True)
    r.numbers[...] = jnp.zeros_like(r.numbers)
    db = dc = jnp.zeros((CHUNK, about.states))
    all_weights = jnp.zeros((CHUNK, CHUNK))
    for first in range(0, n, tile // channels):
        here = slice(first * channels, first * channels + tile)
        kept, state = r.kept[:, here], r.state[:, here]
        x, dy = (y[:, here].astype(jnp.float32) for y in (r.x, r.dy))
        from_first, from_last = dot(c, kept, NN, dtype), dot(b, state, NN, dtype)
        z, since, later, step, skip = (jnp.zeros((CHUNK, tile)) for _ in range(5))
        of_pairs = []
        for head in range(first, first + tile // channels):
            ours = of_head == head - first
            dy_here = jnp.where(ours, dy, 0)
            high, low = ((columns[:, k : k + 1], rows[k : k + 1]) for k in (n + head, 2 * n + head))
            decay, from_begin, _ = decay_pairs(high, low)
            since = jnp.where(ours, from_begin[:, :1], since)
            later = jnp.where(ours, jnp.exp((high[0][-1:] - high[0]) + (low[0][-1:] - low[0])), later)
            step = jnp.where(ours, columns[:, head : head + 1], step)
            skip = jnp.where(ours, rows[3 * n + head, 0], skip)
            pairs = dot(dy_here, x, NT, dtype)
            seen = scores * decay
            z = z + dot(jnp.transpose(seen), dy_here, NN, dtype)
            weights = decay * pairs * rows[head : head + 1]
            all_weights = all_weights + weights
            parts = jnp.where(i >= j, dot(scores * weights, before, NN, dtype), 0)
            of_pairs.append([column_sums(y) for y in (seen * pairs, parts, jnp.where(i == j, pairs, 0))])
        z, begun = z + later * from_last, dy * since
        r.dx[:, here] = (step * z + skip * dy).astype(dtype)
        dc, db = dc + dot(begun, kept, NT, dtype), db + dot(x * later * step, state, NT, dtype)
        first_parts, last_parts = head_sums(begun * from_first), head_sums(x * later * from_last)
        of_states = since[-1:] * column_sums(state * kept.astype(jnp.float32))
        for at, (of_step, parts, skips) in enumerate(of_pairs):
            head, last = first + at, last_parts[at : at + 1]
            of_state = jnp.where(of_head[:1] == at, of_states, 0).sum(keepdims=True)
            begin = first_parts[at : at + 1] + jnp.where(j[:1] == CHUNK - 1, of_state, 0)
            for k, row in enumerate((of_step + last, parts, begin, rows[head : head + 1] * last, skips)):
                r.numbers[k * n + head : k * n + head + 1] = row
        r.state[:, here] = since[-1:] * state + dot(queries, begun, NN, dtype)
    r.dc[...] = dc + dot(all_weights, b, NN, dtype)
    r.db[...] = db + dot(jnp.transpose(all_weights), c, NN, dtype)
