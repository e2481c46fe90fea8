"""Mamba's selective scan on TPUs: a Pallas Mosaic TPU kernel for Packed batches.

Algorithm: the recurrence itself (arXiv 2312.00752, eq. 2), token by token: h <- exp(dt a) h + dt x b^T; y = h c + d x.
Channels lie in lanes, a channel's states in sublanes. A step of the grid takes a chunk of tokens of some channels; steps
of a row follow each other, with the state in fast memory. Each number of b is spread over lanes once for a chunk. The
states of all tokens are kept in fast memory, and read in products with c, for `BLOCK` tokens at once: a row of the left
matrix is zero but at its token's states. In bfloat16 that product is of bfloat16 with float32 sums, as XLA:TPU multiplies
float32 by default; all else is float32. Where a sequence begins the state is replaced by zeros, whatever it holds: what is
not finite reaches the tokens of its sequence and those of its blocks, and no more.

Bytes: x, dt and y once, b and c once for each step's channels. For each token, channel and state: one exponential, three
products and a sum, and the product with c. The backward pass is that of the reference, computed again.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels.chunks_tpu import CHUNK, LANES, NN, dot, padded, places
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry

CHANNELS, TILE = 2560, 512  # of a step and of a round in it, at most
BLOCK = 16  # tokens of a round


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, x: Array, dt: Array, a: Array, b: Array, c: Array, *,
    d: Array | None = None, chunk: int = 16,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := chunks.unsupported(batch, x, b, c):
        return why
    channels, states = a.shape
    if channels % LANES or states % BLOCK or states > LANES:
        return f"{channels} channels of {states} states; expected multiples of {LANES} and of {BLOCK}, at most {LANES}"
    return None


def call(
    batch: Packed, carry: Carry | None, layer: Any,
    x: Float[Array, "B T C"], dt: Float[Array, "B T C"], a: Float[Array, "C S"],
    b: Float[Array, "B T S"], c: Float[Array, "B T S"], *, d: Float[Array, " C"] | None = None, chunk: int = 16,
) -> tuple[Float[Array, "B T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, in chunks of its own size; see `unsupported` for what it can serve."""
    return _scan(batch, x, dt, a, b, c, jnp.zeros_like(a[:, 0]) if d is None else d), carry or Carry()


@jax.custom_vjp
def _scan(batch: Packed, *inputs: Array) -> Array:
    return _run(batch, *inputs)


def _backward(saved: tuple[Packed, tuple], dy: Array) -> tuple[Any, ...]:
    from fdel.ops.dispatch import TABLES

    batch, inputs = saved
    reference = TABLES["selective_scan"].implementations["xla"].call
    return None, *jax.vjp(lambda *x: reference(batch, None, 0, *x[:-1], d=x[-1])[0], *inputs)[1](dy)


_scan.defvjp(lambda batch, *inputs: (_scan(batch, *inputs), (batch, inputs)), _backward)


def _widest(channels: int, most: int) -> int:
    """Give the most channels, in whole tiles of lanes, that divide all."""
    return next(n for n in range(most, 0, -LANES) if channels % n == 0)


def _run(batch: Packed, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array) -> Float[Array, "B T C"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (rows, t, channels), states = x.shape, b.shape[-1]
    valid, starts = chunks.tokens(batch)
    length = valid.shape[1]
    whole = valid.reshape(-1, CHUNK).all(1).astype(jnp.int32)
    begins = (starts.reshape(-1, BLOCK) << np.arange(BLOCK)).sum(1).astype(jnp.int32)  # a bit for each token
    of_tokens = jnp.broadcast_to(valid[:, None].astype(jnp.float32), (rows, 8, length))
    exponents = a.T.astype(jnp.float32) * np.log2(np.e)
    keys, c = jnp.swapaxes(chunks.cleared(b, valid), 1, 2), chunks.cleared(c, valid).astype(c.dtype)
    x, dt = (padded(y, max(0, CHUNK - t)) for y in (x, dt))

    width = _widest(channels, CHANNELS)
    tile = _widest(width, TILE)
    block = pl.BlockSpec((None, CHUNK, width), lambda b, n, c, *_: (b, c, n))
    call = pl.pallas_call(
        functools.partial(_program, tile),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, channels // width, length // CHUNK),
            in_specs=[
                pl.BlockSpec((None, 8, CHUNK), lambda b, n, c, *_: (b, 0, c)),
                block,
                block,
                pl.BlockSpec((states, width), lambda b, n, c, *_: (0, n)),
                pl.BlockSpec((None, states, CHUNK), lambda b, n, c, *_: (b, 0, c)),
                pl.BlockSpec((None, CHUNK, states), lambda b, n, c, *_: (b, c, 0)),
                pl.BlockSpec((1, width), lambda b, n, c, *_: (0, n)),
            ],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((states, width), jnp.float32),
                pltpu.VMEM((CHUNK // BLOCK, BLOCK * states, LANES), jnp.float32),
                pltpu.VMEM((CHUNK // BLOCK, BLOCK, BLOCK * states), x.dtype),
                pltpu.VMEM((BLOCK, tile), jnp.float32),
                pltpu.VMEM((BLOCK, tile), jnp.float32),
                pltpu.VMEM((CHUNK // BLOCK, tile // LANES, BLOCK * states, LANES), x.dtype),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=chunks.VMEM
        ),
        name="selective_scan",
    )
    return call(whole, begins, of_tokens, x, dt, exponents, keys, c, d.astype(jnp.float32)[None])[:, :t]


NAMES = "whole begins valid x dt a b c d out state keys reads step add states"


def _program(tile: int, *refs: Any) -> None:
    """Compute a chunk of some channels, tile by tile."""
    from jax.experimental import pallas as pl

    r = SimpleNamespace(**dict(zip(NAMES.split(), refs, strict=True)))
    dtype, (n, width) = r.x.dtype, r.state.shape
    chunks.begin(r, jnp.transpose(r.valid[...])[:, :1] > 0, ["x", "dt"])
    blocks = CHUNK // BLOCK

    def spread(at: Array, _: None) -> None:
        keys, lane = r.b[...], places((n, CHUNK))[1]
        keys = jnp.concatenate([jnp.where(lane == at * BLOCK + i, keys, 0.0) for i in range(BLOCK)])
        r.keys[at] = dot(keys, jnp.ones((CHUNK, LANES)), NN, dtype)  # a token's b, in all lanes

    jax.lax.fori_loop(0, blocks, spread, None)
    row, lane = places((n, BLOCK * n))
    reads = dot(r.c[...], jnp.where(lane % n == row, 1.0, 0.0), NN, dtype)  # a token's c, again and again
    row, lane = places(reads.shape)
    r.reads[...] = jnp.where(row % BLOCK == lane // n, reads, 0).reshape(r.reads.shape).astype(dtype)
    first = (pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)) * blocks

    def tiles(i: Array, _: None) -> None:
        here = pl.ds(pl.multiple_of(i * tile, tile), tile)

        def tokens(at: Array, state: Array) -> Array:
            begins = r.begins[first + at]
            run = lambda begins: functools.partial(_tokens, r, here, at, begins)
            return jax.lax.cond(begins != 0, run(begins), run(None), state)

        r.state[:, here] = jax.lax.fori_loop(0, blocks, tokens, r.state[:, here])
        for at in range(blocks):
            there = pl.ds(at * BLOCK, BLOCK)
            y = [dot(r.reads[at], r.states[at, j], NN, dtype) for j in range(tile // LANES)]
            y = jnp.concatenate(y, 1) + r.d[:, here] * r.x[there, here].astype(jnp.float32)
            r.out[there, here] = y.astype(dtype)

    jax.lax.fori_loop(0, width // tile, tiles, None)


def _tokens(r: SimpleNamespace, here: Any, at: Array, begins: Array | None, state: Float[Array, "S tile"]) -> Array:
    """Run over a block of tokens in a tile of channels; the state is zero before those whose bit is set in `begins`."""
    from jax.experimental import pallas as pl

    n, a = len(state), r.a[:, here]
    there = pl.ds(pl.multiple_of(at * BLOCK, BLOCK), BLOCK)
    r.step[...] = r.dt[there, here].astype(jnp.float32)
    r.add[...] = r.step[...] * r.x[there, here].astype(jnp.float32)
    parts = [slice(i, i + LANES) for i in range(0, state.shape[1], LANES)]
    now, keys, states = [state[:, part] for part in parts], r.keys.at[at], r.states.at[at]
    for i in range(BLOCK):
        token = slice(i * n, (i + 1) * n)
        key = keys[token]
        for j, part in enumerate(parts):
            last = now[j] if begins is None else jnp.where((begins >> i) & 1 > 0, 0.0, now[j])
            step, add = r.step[i : i + 1, part], r.add[i : i + 1, part]
            now[j] = jnp.exp2(step * a[:, part]) * last + add * key
            states[j, token] = now[j].astype(states.dtype)
    return jnp.concatenate(now, 1)
