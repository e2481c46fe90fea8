"""State-space duality (Mamba-2) on TPUs: a Pallas Mosaic TPU kernel.

Algorithm: the chunked form of arXiv 2405.21060, section 6. A step of the grid takes a chunk of C tokens of some heads that
share B and C; steps of a row follow each other, with each head's state in fast memory, as [S H]. With D_ij the decay from
token j to token i, and S the state before the chunk,
  y_i = D_i c_i S + sum_{j<=i} D_ij (c_i^T b_j) dt_j x_j + d x_i;  S <- D S + sum_j D_Cj b_j dt_j x_j^T
Scores c_i^T b_j are one product for all heads of a step. Heads of less than 128 channels lie beside each other in a tile:
their states are read in one product, and each head's pairs are multiplied with the whole tile, whose other lanes are left
out. See `chunks_tpu` for the decays and the precision.

Bytes: x and y once, b and c once for each step's heads. FLOPs, for each token: 2 C S for each step's heads, for each head
2 C max(H, 128) of outputs and 4 S H of the state. The backward pass is in `ssd_backward_tpu`: it reads the states before
each chunk, which are kept where gradients are wanted. Paged batches: see `slots_tpu`.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels import recurrent_decode_tpu as decode
from fdel.kernels import slots, slots_tpu, ssd_backward_tpu
from fdel.kernels.chunks_tpu import CHUNK, LANES, NN, NT, dot, places
from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry

HEADS = 16  # of a step at most


class About(NamedTuple):
    """Heads of a step, their channels, states of a channel, and how many steps' heads share b and c."""

    heads: int
    channels: int
    states: int
    share: int


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, x: Array, dt: Array, a: Array, b: Array, c: Array, *,
    d: Array | None = None, chunk: int = 128,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := chunks.unsupported(batch, x, b, c):
        return why
    heads, channels = x.shape[-2:]
    if b.shape[-1] % LANES or (LANES % channels and channels % LANES):
        return (
            f"{channels} channels and {b.shape[-1]} states; expected such as divide {LANES}, and multiples of {LANES}"
        )
    if heads % b.shape[-2] or not _heads(x, b):
        return f"{heads} heads of {channels} channels in {b.shape[-2]} groups, which fill no tile of {LANES}"
    if isinstance(batch, Paged) and (channels % 8 or (batch.block == 1 and not decode.heads_of(heads))):
        return f"{heads} heads of {channels} channels; expected multiples of 8 where states are read from slots"
    return slots_tpu.unsupported(batch, carry, (heads, channels, b.shape[-1]))


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    x: Float[Array, "... T N H"], dt: Float[Array, "... T N"], a: Float[Array, " N"],
    b: Float[Array, "... T G S"], c: Float[Array, "... T G S"], *, d: Float[Array, " N"] | None = None, chunk: int = 128,
) -> tuple[Float[Array, "... T N H"], Carry]:  # fmt: skip
    """Compute as `ssd`, in chunks of its own size; see `unsupported` for what it can serve."""
    d = jnp.zeros_like(a) if d is None else d
    if carry is None or isinstance(batch, Packed):
        return _ssd(batch, x, dt, a, b, c, d), carry or Carry()
    if batch.block == 1:
        return decode.ssd(batch, carry, layer, x, dt, a, b, c, d)
    states = carry.slots.ssm
    plan = slots.plan(batch, states.shape[1], layer, CHUNK)
    starts, dt = jnp.zeros_like(plan.valid), slots.laid(plan, dt)
    about, *laid = _prepared(plan.valid, starts, x[None], dt, a, b[None], c[None], d)
    shape, tall = (about.heads, about.channels, about.states), (about.heads * about.channels, about.states)
    load, store = lambda slot: jnp.transpose(slot.reshape(tall)), lambda state: jnp.transpose(state).reshape(shape)
    served = slots_tpu.Served(plan, ("x", "b", "c"), states, shape, lambda n: (n, 0, 0), load, store)
    y, states = _run(about, *laid, keep=False, served=served)
    return slots.taken(plan, y).reshape(x.shape), slots.remembered(carry, states)


def _heads(x: Any, b: Any) -> int:
    """Give the heads of a step: whole tiles of one group; 0 if there are none."""
    (heads, channels), groups = x.shape[-2:], b.shape[-2]
    fits = lambda n: heads // groups % n == 0 and n * channels % LANES == 0
    return next((n for n in range(HEADS, 0, -1) if fits(n)), 0)


@jax.custom_vjp
def _ssd(batch: Packed, *inputs: Array) -> Array:
    x = inputs[0]
    return _run(*_prepared(*chunks.tokens(batch), *inputs), keep=False)[0][:, : x.shape[1]].reshape(x.shape)


def _prepared(
    valid: Array, starts: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array
) -> tuple[Any, ...]:  # fmt: skip
    heads, states = _heads(x, b), b.shape[-1]
    step = chunks.cleared(dt, valid)
    decays = chunks.sums(step * a.astype(jnp.float32), starts)
    skip = jnp.broadcast_to(d.astype(jnp.float32), step.shape)
    whole, rows = chunks.rows_of([step, *decays, skip], heads, valid, starts)
    about = About(heads, x.shape[-1], states, x.shape[2] // b.shape[2] // heads)
    return about, whole, rows, list(map(chunks.flat, (x, b, c)))


def _forward(batch: Packed, *inputs: Array) -> tuple[Array, tuple]:
    x = inputs[0]
    y, kept = _run(*_prepared(*chunks.tokens(batch), *inputs), keep=True)
    return y[:, : x.shape[1]].reshape(x.shape), (batch, inputs, kept)


def _backward(saved: tuple[Packed, tuple, Array], dy: Array) -> tuple[Any, ...]:
    batch, inputs, kept = saved
    x, dt, a, b, c, d = inputs
    t, groups = x.shape[1], b.shape[2]
    about, whole, rows, (x_flat, *shared) = _prepared(*chunks.tokens(batch), *inputs)
    dy_flat = chunks.flat(dy.astype(x.dtype))
    dx, db, dc, numbers = ssd_backward_tpu.run(about, whole, rows, kept, [x_flat, dy_flat, *shared])
    of_step, *parts, skip = chunks.of_heads(numbers, ssd_backward_tpu.NUMBERS, about.heads)
    of_token = lambda y: chunks.of_tokens(y)[:, :t]
    valid, starts = (y[:, :t, None] for y in chunks.tokens(batch))
    decay = jnp.where(valid & ~starts, of_token(chunks.decay_gradient(*parts)), 0)
    ddt = jnp.where(valid, of_token(of_step) + decay * a, 0)
    da = (decay * jnp.where(valid, dt, 0)).sum((0, 1))
    total = lambda y: jnp.moveaxis(y.reshape(len(y), groups, -1, *y.shape[2:]).sum(2), 1, 2)[:, :t]
    found = dx[:, :t].reshape(x.shape), ddt, da, total(db), total(dc), of_token(skip).sum((0, 1))
    return None, *(y.astype(z.dtype) for y, z in zip(found, inputs, strict=True))


_ssd.defvjp(_forward, _backward)


def _run(
    about: About, whole: Int[Array, " chunks"], rows: Float[Array, "B groups numbers T"], inputs: list[Array],
    *, keep: bool, served: slots_tpu.Served | None = None,
) -> list[Array]:  # fmt: skip
    """Run over x [B T N*H], b and c [B T G*S], whose groups serve `share` steps' heads: y [B T N*H].

    With `keep` also the states before each chunk [B chunks S N*H], in the inputs' dtype; with `served` those in slots.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows_b, groups, numbers, t = rows.shape
    width, states = about.heads * about.channels, about.states
    of_rows = pl.BlockSpec((None, None, numbers, CHUNK), lambda b, n, c, *_: (b, n, 0, c))
    block = pl.BlockSpec((None, CHUNK, width), lambda b, n, c, *_: (b, c, n))
    shared = pl.BlockSpec((None, CHUNK, states), lambda b, n, c, *_: (b, c, n // about.share))
    put = lambda *shape: jax.ShapeDtypeStruct(shape, inputs[0].dtype)
    outs = {"out": (put(rows_b, t if served else inputs[0].shape[1], groups * width), block)}
    if keep:
        kept = pl.BlockSpec((None, None, states, width), lambda b, n, c, *_: (b, c, 0, n))
        outs["kept"] = put(rows_b, t // CHUNK, states, groups * width), kept
    ins = dict(zip("xbc", zip(inputs, (block, shared, shared), strict=True), strict=True))
    scratch = {"state": pltpu.VMEM((states, width), jnp.float32)}
    grid, run = (rows_b, groups, t // CHUNK), functools.partial(_program, about)
    return slots_tpu.call(run, "ssd", grid, {"whole": whole}, {"rows": (rows, of_rows)} | ins, outs, scratch, served)


def _program(about: About, r: SimpleNamespace) -> None:
    """Compute a chunk of some heads, tile by tile."""
    n, channels, dtype, rows = about.heads, about.channels, r.x.dtype, r.rows[...]
    columns = jnp.transpose(rows)  # [C numbers]
    chunks.begin(r, columns[:, 4 * n : 4 * n + 1] > 0, "xbc")
    if hasattr(r, "kept"):
        r.kept[...] = r.state[...].astype(dtype)
    scores = dot(r.c[...], r.b[...], NT, dtype)
    keys = jnp.transpose(r.b[...].astype(jnp.float32))  # [S C]
    tile = max(LANES, channels)
    for first in range(0, n, tile // channels):
        here = slice(first * channels, first * channels + tile)
        x, state, parts = r.x[:, here], r.state[:, here], []
        for head in range(first, first + tile // channels):
            at = n + head, 2 * n + head
            decay, since, later = chunks.decay_pairs(*((columns[:, i : i + 1], rows[i : i + 1]) for i in at))
            step, skip = rows[head : head + 1], rows[3 * n + head : 3 * n + head + 1, :1]
            y, new = dot(scores * decay * step, x, NN, dtype), dot(keys * (later * step), x, NN, dtype)
            parts.append((y, new, _wide(since, tile), jnp.broadcast_to(skip, y.shape)))
        y, new, since, skip = (_beside(part, channels) for part in zip(*parts, strict=True))
        y = y + since * dot(r.c[...], state, NN, dtype) + skip * x.astype(jnp.float32)
        r.out[:, here] = y.astype(dtype)
        r.state[:, here] = since[-1:] * state + new


def _wide(x: Float[Array, "C C"], width: int) -> Float[Array, "C width"]:
    """Repeat what is the same in all lanes."""
    return jnp.concatenate([x] * (width // CHUNK), 1)


def _beside(parts: tuple[Array, ...], channels: int) -> Array:
    """Take from each head's part of a tile the lanes of its channels."""
    head = places(parts[0].shape)[1] // channels
    found = parts[0]
    for i, part in enumerate(parts[1:], 1):
        found = jnp.where(head == i, part, found)
    return found
