"""State-space duality (Mamba-2) on NVIDIA Hopper: a Pallas Mosaic GPU kernel for Packed batches in bfloat16.

Algorithm: the chunked form of arXiv 2405.21060, section 6, as in `ssd_tpu`, whose formulas hold here. A program takes 64
channels of a head of a row and walks chunks of 64 tokens, `DEPTH` on their way; the state [64 S] stays in registers in
float32, and is written to shared memory in bfloat16 for the product that reads it. For each chunk: scores c b^T, scores
that are decayed and times dt, from registers, times x; c times the state; and b^T times what is new. Channels are
independent but for scores, so wider heads are several programs; more states are several calls, whose results are added.

Bytes, for each token and 64 channels: x and y once; b and c from the second-level cache, where the row's other programs
find them; 12 of sums, steps and places, which XLA prepares. FLOPs: 2 C (S + 64) of pairs and 256 S of states. The gradient
is in `ssd_backward_gpu`: it reads the states before each chunk, kept in bfloat16 where gradients are wanted.
Interpreted, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels import recurrent_decode_gpu as decode
from fdel.kernels import ssd_backward_gpu, ssd_slots_gpu
from fdel.kernels import ssd_program_gpu as program
from fdel.kernels.device import no_hopper, unmeasured
from fdel.kernels.ssd_program_gpu import CHUNK, LOG2E, STATES, WIDTH, About
from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, x: Array, dt: Array, a: Array, b: Array, c: Array, *,
    d: Array | None = None, chunk: int = 128,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if isinstance(batch, Paged):
        why = decode.unsupported_ssd(batch, carry, x, b, c)
        return why or (ssd_slots_gpu.unsupported(batch, x, b, c) if batch.block > 1 else None)
    if batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches without key_segment_ids and prefix_ids"
    if found := {str(y.dtype) for y in (x, b, c)} - {"bfloat16"}:
        return f"it multiplies bfloat16; found {', '.join(sorted(found))}"
    (heads, channels), (groups, states) = x.shape[-2:], b.shape[-2:]
    if channels % WIDTH or states % STATES[-1]:
        return f"heads of {channels} channels with {states} states; expected multiples of {WIDTH} and of {STATES[-1]}"
    return f"{heads} heads do not divide into {groups} groups" if heads % groups else None


def unproven(batch: Batch, _: Carry | None, __: Any, x: Array, *___: Any, **____: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    return unmeasured(x)


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    x: Float[Array, "... T N H"], dt: Float[Array, "... T N"], a: Float[Array, " N"],
    b: Float[Array, "... T G S"], c: Float[Array, "... T G S"], *, d: Float[Array, " N"] | None = None, chunk: int = 128,
) -> tuple[Float[Array, "... T N H"], Carry]:  # fmt: skip
    """Compute as `ssd`, in chunks of its own size; see `unsupported` for what it can serve."""
    d = jnp.zeros_like(a) if d is None else d
    if isinstance(batch, Paged):
        way = decode.ssd if batch.block == 1 else functools.partial(ssd_slots_gpu.call, False)
        return way(batch, carry or Carry(), layer, x, dt, a, b, c, d)
    return in_parts(False, batch, x, dt, a, b, c, d), carry or Carry()


def in_parts(
    interpreted: bool, batch: Packed, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array
) -> Float[Array, "B T N H"]:
    """Add up what parts of the states give: scores and outputs are sums over states."""
    size = next(n for n in STATES if b.shape[-1] % n == 0)
    if b.shape[-1] == size:
        return ssd(interpreted, batch, x, dt, a, b, c, d)
    cut = lambda y, i: y[..., i : i + size]
    skips = [d, *[jnp.zeros_like(d)] * (b.shape[-1] // size - 1)]
    parts = (ssd(interpreted, batch, x, dt, a, cut(b, i * size), cut(c, i * size), d) for i, d in enumerate(skips))
    total: Array = sum((y.astype(jnp.float32) for y in parts), start=jnp.zeros(()))
    return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ssd(interpreted: bool, batch: Packed, *inputs: Array) -> Float[Array, "B T N H"]:
    """Run over x, dt, a, b, c and d; the interpreter, which is meant by `interpreted`, knows no operands in registers."""
    x = inputs[0]
    return program.run(*_prepared(interpreted, batch, *inputs), keep=False)[0][:, : x.shape[1]].reshape(x.shape)


def _prepared(
    interpreted: bool, batch: Packed, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array
) -> tuple[About, Array, Array, list[Array]]:
    """Give what programs read: numbers of each chunk and head, d, and x, b and c of whole chunks."""
    valid, starts = chunks.tokens(batch, CHUNK)
    step = chunks.cleared(dt, valid)
    log = jnp.maximum(step * (a.astype(jnp.float32) * LOG2E), -program.NOTHING)
    log = jnp.where(starts[..., None], -program.NOTHING, log)
    numbers = program.numbers_of(valid, step, log)
    about = About(x.shape[3], b.shape[3], x.shape[2] // b.shape[2], interpreted)
    flat = lambda y: chunks.padded(y.reshape(*y.shape[:2], -1), valid.shape[1] - y.shape[1])
    return about, numbers, d.astype(jnp.float32), list(map(flat, (x, b, c)))


def _forward(interpreted: bool, batch: Packed, *inputs: Array) -> tuple[Array, tuple]:
    x = inputs[0]
    y, kept = program.run(*_prepared(interpreted, batch, *inputs), keep=True)
    return y[:, : x.shape[1]].reshape(x.shape), (batch, inputs, kept)


def _backward(interpreted: bool, saved: tuple[Packed, tuple, Array], dy: Array) -> tuple[Any, ...]:
    batch, inputs, kept = saved
    x, dt, a, b, _, d = inputs
    t, groups = x.shape[1], b.shape[2]
    about, numbers, skip, (x_flat, *shared) = _prepared(interpreted, batch, *inputs)
    dy_flat = chunks.padded(dy.astype(x.dtype).reshape(*dy.shape[:2], -1), x_flat.shape[1] - t)
    dx, db, dc, found = ssd_backward_gpu.run(about, numbers, skip, kept, [x_flat, dy_flat, *shared])
    found = found.reshape(*x.shape[::2], -1, *found.shape[2:]).sum(2)  # of a head's 64 channels each
    of_step, last, skips, pairs, first, of_state = jnp.moveaxis(found, 3, 0)  # [B N chunks C]
    first = first.at[..., -1].add(of_state.sum(-1))
    of_token = lambda y: chunks.of_tokens(y[:, :, None])[:, :t]
    valid, starts = (y[:, :t, None] for y in chunks.tokens(batch, CHUNK))
    decay = jnp.where(valid & ~starts, of_token(chunks.decay_gradient(pairs, first, last)), 0)
    ddt = jnp.where(valid, of_token(of_step) + decay * a, 0)
    da = (decay * jnp.where(valid, dt, 0)).sum((0, 1))
    total = lambda y: y.reshape(*y.shape[:2], groups, -1, about.states).sum(3)[:, :t]
    grads = dx[:, :t].reshape(x.shape), ddt, da, total(db), total(dc), of_token(skips).sum((0, 1))
    return None, *(y.astype(z.dtype) for y, z in zip(grads, inputs, strict=True))


ssd.defvjp(_forward, _backward)
