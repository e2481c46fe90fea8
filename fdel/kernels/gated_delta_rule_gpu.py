"""The gated delta rule on NVIDIA Hopper, with one decay of each head: a Pallas Mosaic GPU kernel for Packed batches.

The program is `delta_program_gpu`; here arguments are laid out for it. Inputs are read as [B T N*128], a head beside the
other, once. The backward pass is in `delta_backward_gpu`: it reads the states before each chunk and the inverses, which are
kept where gradients are wanted.

Log decays are summed within a chunk in units of log2, each at least `NEVER`, whose power is 0: so sums stay below 2^14, and
a difference of two has an error of 2^-10 at most, a quarter of bfloat16's.
Interpreted on CPU and compiled for H100; it has not run on a GPU.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import delta_backward_gpu as backward
from fdel.kernels import delta_program_gpu as program
from fdel.kernels.delta_program_gpu import CHUNK, WIDTH
from fdel.kernels.device import no_hopper
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry

NEVER = -160.0  # a log2 decay of nothing
LOG2E = math.log2(math.e)


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    chunk: int = 64,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if not isinstance(batch, Packed) or batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches, without key_segment_ids and prefix_ids"
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"it multiplies bfloat16; found {q.dtype}, {k.dtype}, {v.dtype}"
    if g.ndim == 4:
        return "a decay for each channel of keys; expected one for each head"
    if q.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} channels; expected {WIDTH}"
    return None


def call(
    batch: Packed, carry: Carry | None, layer: Any,
    q: Float[Array, "B T N H"], k: Float[Array, "B T N H"], v: Float[Array, "B T N H"],
    g: Float[Array, "B T N"], beta: Float[Array, "B T N"], *, chunk: int = 64,
) -> tuple[Float[Array, "B T N H"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`, in chunks of its own size; see `unsupported` for what it can serve."""
    return rule(False, batch, q, k, v, g, beta), carry or Carry()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rule(interpreted: bool, batch: Packed, q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """Run the kernel; see `call`. `interpreted`: leave out what the interpreter lacks."""
    return program.run(*_laid(batch, q, k, v, g, beta), keep=False)[0][:, : v.shape[1]].reshape(v.shape)


def _laid(batch: Packed, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, ...]:
    """Lay heads beside each other, fill chunks, and give numbers of tokens, as `program.run` wants them."""
    fill = -g.shape[1] % CHUNK
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, fill)), constant_values=-1)
    valid = segments >= 0
    start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    filled = lambda x: jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, fill), (0, 0)))
    clear = lambda x: jnp.where(valid[..., None], filled(x.astype(jnp.float32)), 0)
    decays = jnp.where(start[..., None], NEVER, jnp.maximum(clear(g) * LOG2E, NEVER))
    since = jnp.cumsum(decays.reshape(len(g), -1, CHUNK, g.shape[2]), 2)
    last, place = (jnp.broadcast_to(x, since.shape) for x in (since[:, :, -1:], jnp.arange(CHUNK)[:, None]))
    each = [x.reshape(*valid.shape, -1).astype(jnp.float32) for x in (since, last, clear(beta), place, valid)]
    numbers = jnp.stack([jnp.broadcast_to(x, decays.shape) for x in each]).transpose(1, 3, 0, 2)
    whole = valid.reshape(len(g), -1, CHUNK).all(2).astype(jnp.int32)
    return filled(q), filled(k), filled(v), numbers, whole


def _forward(interpreted: bool, batch: Packed, *inputs: Array) -> tuple[Array, tuple[Any, ...]]:
    v = inputs[2]
    out, *kept = program.run(*_laid(batch, *inputs), keep=True)
    return out[:, : v.shape[1]].reshape(v.shape), (batch, inputs, kept)


def _backward(interpreted: bool, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    batch, inputs, (states, solve) = saved
    shape = inputs[2].shape
    q, k, v, numbers, whole = _laid(batch, *inputs)
    dy = jnp.pad(dy.astype(v.dtype).reshape(*shape[:2], -1), ((0, 0), (0, v.shape[1] - shape[1]), (0, 0)))
    dv, gradients = backward.run(q, k, dy, numbers, whole, solve, interpreted=interpreted)
    dq, dk, dg, dbeta = backward.others([q, k, v, dy, dv], numbers, solve, (states, gradients))
    real = batch.segment_ids >= 0
    start = jnp.pad(batch.segment_ids[:, 1:] != batch.segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    found = zip((dq, dk, dv, dg, dbeta), inputs, strict=True)
    dq, dk, dv, dg, dbeta = (y[:, : shape[1]].reshape(x.shape).astype(x.dtype) for y, x in found)
    return None, dq, dk, dv, jnp.where((real & ~start)[..., None], dg, 0), dbeta


rule.defvjp(_forward, _backward)
