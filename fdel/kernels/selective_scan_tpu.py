"""Mamba's selective scan on TPUs: a Pallas Mosaic TPU kernel.

Algorithm: the recurrence itself (arXiv 2312.00752, eq. 2), token by token: h <- exp(dt a) h + dt x b^T; y = h c + d x.
Channels lie in lanes, a channel's states in sublanes. A step of the grid takes a chunk of tokens of some channels; steps
of a row follow each other, with the state in fast memory. Each number of b is spread over lanes once for a chunk. The
states of all tokens are kept in fast memory, and read in products with c, for `BLOCK` tokens at once: a row of the left
matrix is zero but at its token's states. In bfloat16 that product is of bfloat16 with float32 sums, as XLA:TPU multiplies
float32 by default; all else is float32. Where a sequence begins the state is replaced by zeros, whatever it holds: what is
not finite reaches the tokens of its sequence and those of its blocks, and no more.

Bytes: x, dt and y once, b and c once for each step's channels. For each token, channel and state: one exponential, three
products and a sum, and the product with c. The backward pass is in `selective_scan_backward_tpu`: it reads the states
before each chunk, which are kept where gradients are wanted. Paged batches: see `slots_tpu`.
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
from fdel.kernels import recurrent_decode_tpu as decode
from fdel.kernels import selective_scan_backward_tpu as backward
from fdel.kernels import slots, slots_tpu
from fdel.kernels.chunks_tpu import CHUNK, LANES, NN, dot, padded
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry

CHANNELS, TILE = 2560, 512  # of a step and of a round in it, at most
STATES = 16  # of more the gradient is the reference's: a chunk's states would not fit in fast memory
BLOCK = backward.BLOCK  # tokens of a round


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
    return slots_tpu.unsupported(batch, carry, a.shape)


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    x: Float[Array, "... T C"], dt: Float[Array, "... T C"], a: Float[Array, "C S"],
    b: Float[Array, "... T S"], c: Float[Array, "... T S"], *, d: Float[Array, " C"] | None = None, chunk: int = 16,
) -> tuple[Float[Array, "... T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, in chunks of its own size; see `unsupported` for what it can serve."""
    d = jnp.zeros_like(a[:, 0]) if d is None else d
    if carry is None or isinstance(batch, Packed):
        return _scan(batch, x, dt, a, b, c, d), carry or Carry()
    if batch.block == 1:
        return decode.scan(batch, carry, layer, x, dt, a, b, c, d, _widest(x.shape[1], CHANNELS))
    states = jnp.swapaxes(carry.slots.ssm, 2, 3)  # as XLA:TPU lays them out: nothing moves
    plan = slots.plan(batch, states.shape[1], layer, CHUNK)
    shape = states.shape[2], _widest(x.shape[1], CHANNELS)
    served = slots_tpu.Served(plan, ("x", "dt"), states, shape, lambda n: (0, n))
    b, c = (slots.laid(plan, y) for y in (b, c))
    tokens = plan.valid, jnp.zeros_like(plan.valid)
    y, states = _run(tokens, (x[None], dt[None], a, b, c, d), keep=False, served=served)
    return slots.taken(plan, y), slots.remembered(carry, jnp.swapaxes(states, 2, 3))


@jax.custom_vjp
def _scan(batch: Packed, *inputs: Array) -> Array:
    return _run(chunks.tokens(batch), inputs, keep=False)[0]


def _forward(batch: Packed, *inputs: Array) -> tuple[Array, tuple]:
    y, *kept = _run(chunks.tokens(batch), inputs, keep=inputs[2].shape[1] <= STATES)
    return y, (batch, inputs, kept)


def _backward(saved: tuple[Packed, tuple, list[Array]], dy: Array) -> tuple[Any, ...]:
    from fdel.ops.dispatch import TABLES

    batch, inputs, kept = saved
    if not kept:
        reference = TABLES["selective_scan"].implementations["xla"].call
        return None, *jax.vjp(lambda *x: reference(batch, None, 0, *x[:-1], d=x[-1])[0], *inputs)[1](dy)
    x, dt, a, b, c, d = inputs
    t = x.shape[1]
    whole, begins, of_tokens, exponents, valid = _prepared(*chunks.tokens(batch), a)
    keys, queries = (chunks.cleared(y, valid) for y in (b, c))
    laid = [padded(y, max(0, CHUNK - t)) for y in (x, dt, dy.astype(x.dtype))]
    turned = [jnp.swapaxes(y, 1, 2) for y in (keys, queries)]
    laid = [of_tokens, *laid, exponents, *turned, keys.astype(b.dtype), d.astype(jnp.float32)[None]]
    width = _widest(x.shape[2], CHANNELS)
    dx, ddt, da, dd, db, dc = backward.run(width, _widest(width, TILE), whole, begins, kept[0], laid)
    found = dx[:, :t], ddt[:, :t], da.sum(0).T, db.sum(1)[:, :t], dc.sum(1)[:, :t], dd.sum((0, 1))
    return None, *(y.astype(z.dtype) for y, z in zip(found, inputs, strict=True))


_scan.defvjp(_forward, _backward)


def _prepared(valid: Array, starts: Array, a: Array) -> tuple[Array, ...]:
    """Give which chunks have no padding, a bit for each token that begins a sequence, which are none, a, which are none."""
    whole = valid.reshape(-1, CHUNK).all(1).astype(jnp.int32)
    begins = (starts.reshape(-1, BLOCK) << np.arange(BLOCK)).sum(1).astype(jnp.int32)
    of_tokens = jnp.broadcast_to(valid[:, None].astype(jnp.float32), (len(valid), 8, valid.shape[1]))
    return whole, begins, of_tokens, a.T.astype(jnp.float32) * np.log2(np.e), valid


def _widest(channels: int, most: int) -> int:
    """Give the most channels, in whole tiles of lanes, that divide all."""
    return next(n for n in range(most, 0, -LANES) if channels % n == 0)


def _run(
    tokens: tuple[Array, Array], inputs: tuple[Array, ...], *, keep: bool, served: slots_tpu.Served | None = None
) -> list[Array]:
    """Give y [B T C]; with `keep` also the states before each chunk [B chunks S C], in float32, or those in slots."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    x, dt, a, b, c, d = inputs
    (rows, t, channels), states, dtype = x.shape, b.shape[-1], x.dtype
    whole, begins, of_tokens, exponents, valid = _prepared(*tokens, a)
    length = valid.shape[1]
    keys, c = jnp.swapaxes(chunks.cleared(b, valid), 1, 2), chunks.cleared(c, valid).astype(c.dtype)
    x, dt = (padded(y, max(0, CHUNK - t)) for y in (x, dt))

    width = _widest(channels, CHANNELS)
    tile = _widest(width, TILE)
    of = lambda *shape, place: pl.BlockSpec(shape, place)
    block = of(None, CHUNK, width, place=lambda b, n, c, *_: (b, c, n))
    lanes = lambda n: of(None, n, CHUNK, place=lambda b, n, c, *_: (b, 0, c))
    ins = {
        "valid": (of_tokens, lanes(8)), "x": (x, block), "dt": (dt, block),
        "a": (exponents, of(states, width, place=lambda b, n, c, *_: (0, n))), "b": (keys, lanes(states)),
        "c": (c, of(None, CHUNK, states, place=lambda b, n, c, *_: (b, c, 0))),
        "d": (d.astype(jnp.float32)[None], of(1, width, place=lambda b, n, c, *_: (0, n))),
    }  # fmt: skip
    put = jax.ShapeDtypeStruct
    outs = {"out": (put((rows, length if served else x.shape[1], channels), dtype), block)}
    if keep:
        kept = of(None, None, states, width, place=lambda b, n, c, *_: (b, c, 0, n))
        outs["kept"] = put((rows, length // CHUNK, states, channels), jnp.float32), kept
    scratch = {
        "state": pltpu.VMEM((states, width), jnp.float32),
        "keys": pltpu.VMEM((CHUNK // BLOCK, BLOCK * states, LANES), jnp.float32),
        "reads": pltpu.VMEM((CHUNK // BLOCK, BLOCK, BLOCK * states), dtype),
        "step": pltpu.VMEM((BLOCK, tile), jnp.float32),
        "add": pltpu.VMEM((BLOCK, tile), jnp.float32),
        "states": pltpu.VMEM((CHUNK // BLOCK, tile // LANES, BLOCK * states, LANES), dtype),
    }
    run, grid = functools.partial(_program, tile), (rows, channels // width, length // CHUNK)
    scalars = {"whole": whole, "begins": begins}
    y, *more = slots_tpu.call(run, "selective_scan", grid, scalars, ins, outs, scratch, served)
    return [y if served else y[:, :t], *more]


def _program(tile: int, r: SimpleNamespace) -> None:
    """Compute a chunk of some channels, tile by tile."""
    from jax.experimental import pallas as pl

    dtype, width = r.x.dtype, r.state.shape[1]
    chunks.begin(r, jnp.transpose(r.valid[...])[:, :1] > 0, ["x", "dt"])
    blocks = CHUNK // BLOCK

    if hasattr(r, "kept"):
        r.kept[...] = r.state[...]
    backward.spread(r.b, r.keys, dtype)
    r.reads[...] = backward.diagonal(r.c[...], dtype)
    first = chunks.number(r) * blocks

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
