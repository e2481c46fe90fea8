"""The gated delta rule on TPUs, with decays of heads and of key channels: a Pallas Mosaic TPU kernel.

The program is `delta_program_tpu`; here arguments are laid out for it. Inputs are read as [B T N*H], a head beside the
other, once; see `chunks_tpu` for the decays and the precision. The backward pass is in `delta_backward_tpu`: it reads
the states before each chunk and the inverses, which are kept where gradients are wanted. Paged batches: see `slots_tpu`.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels import delta_backward_tpu as backward
from fdel.kernels import delta_program_tpu as program
from fdel.kernels import recurrent_decode_tpu as decode
from fdel.kernels import slots, slots_tpu
from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry

HEADS = {True: 8, False: 4}  # of 128 channels in a step at most, of one decay each and of a decay for each channel


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    chunk: int = 64,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := chunks.unsupported(batch, q, k, v):
        return why
    if q.shape[-1] % chunks.LANES or v.shape[-1] % chunks.LANES:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} channels; expected multiples of {chunks.LANES}"
    if isinstance(batch, Paged) and batch.block == 1 and not decode.heads_of(k.shape[-2]):
        return f"{k.shape[-2]} heads, of one token each; expected a multiple of 8"
    return slots_tpu.unsupported(batch, carry, (*k.shape[-2:], v.shape[-1]))


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    q: Float[Array, "... T N Hk"], k: Float[Array, "... T N Hk"], v: Float[Array, "... T N Hv"],
    g: Float[Array, "... T N"] | Float[Array, "... T N Hk"], beta: Float[Array, "... T N"], *, chunk: int = 64,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`, in chunks of its own size; see `unsupported` for what it can serve."""
    if carry is None or isinstance(batch, Packed):
        return _rule(batch, q, k, v, g, beta), carry or Carry()
    if batch.block == 1:
        return decode.delta(batch, carry, layer, q, k, v, g, beta)
    states = carry.slots.ssm
    plan = slots.plan(batch, states.shape[1], layer, chunks.CHUNK)
    wide = [x[None] for x in (q, k, v, *[g] * (g.ndim == 3))]
    small = [slots.laid(plan, x) for x in ([beta] if g.ndim == 3 else [g, beta])]
    about, *laid = _prepared(plan.valid, jnp.zeros_like(plan.valid), *wide, *small)
    shape = about.heads, about.keys, about.values
    served = slots_tpu.Served(plan, tuple("qkvg"[: len(wide)]), states, shape, lambda n: (n, 0, 0))
    out, states = program.run(about, *laid, keep=False, served=served)
    return slots.taken(plan, out).reshape(v.shape), slots.remembered(carry, states)


@jax.custom_vjp
def _rule(batch: Packed, *inputs: Array) -> Array:
    v = inputs[2]
    return program.run(*_prepared(*chunks.tokens(batch), *inputs), keep=False)[0][:, : v.shape[1]].reshape(v.shape)


def _prepared(
    valid: Array, starts: Array, q: Array, k: Array, v: Array, g: Array, beta: Array
) -> tuple[Any, ...]:  # fmt: skip
    of_channels = g.ndim == 4
    most = max(1, HEADS[not of_channels] * chunks.LANES // max(k.shape[-1], v.shape[-1]))
    heads = next(n for n in range(most, 0, -1) if q.shape[2] % n == 0)
    numbers = [chunks.cleared(beta, valid)]
    if not of_channels:
        numbers += chunks.sums(chunks.cleared(g, valid), starts)
    whole, rows = chunks.rows_of(numbers, heads, valid, starts)
    about = program.About(heads, k.shape[-1], v.shape[-1], of_channels)
    inputs = (q, k, v, g.astype(jnp.float32)) if of_channels else (q, k, v)
    return about, whole, rows, list(map(chunks.flat, inputs))


def _forward(batch: Packed, *inputs: Array) -> tuple[Array, tuple]:
    v = inputs[2]
    out, *kept = program.run(*_prepared(*chunks.tokens(batch), *inputs), keep=True)
    return out[:, : v.shape[1]].reshape(v.shape), (batch, inputs, kept)


def _backward(saved: tuple[Packed, tuple, list[Array]], dy: Array) -> tuple[Any, ...]:
    batch, inputs, kept = saved
    q, k, v, g, beta = inputs
    about, whole, rows, laid = _prepared(*chunks.tokens(batch), *inputs)
    laid.insert(3, chunks.flat(dy.astype(v.dtype)))
    dq, dk, dv, *of_channels, numbers = backward.run(about, whole, rows, kept, laid)
    of_beta, *parts = chunks.of_heads(numbers, backward.NUMBERS[about.channels], about.heads)
    dg = of_channels[0] if about.channels else chunks.of_tokens(chunks.decay_gradient(*parts))
    wide = zip((dq, dk, dv, dg, chunks.of_tokens(of_beta)), inputs, strict=True)
    dq, dk, dv, dg, dbeta = (y[:, : v.shape[1]].reshape(x.shape) for y, x in wide)
    valid, starts = (y[:, : v.shape[1]].reshape(*v.shape[:2], *[1] * (g.ndim - 2)) for y in chunks.tokens(batch))
    found = dq, dk, dv, jnp.where(valid & ~starts, dg, 0), dbeta
    return None, *(y.astype(x.dtype) for y, x in zip(found, inputs, strict=True))


_rule.defvjp(_forward, _backward)
