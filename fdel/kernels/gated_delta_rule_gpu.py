"""The gated delta rule on NVIDIA Hopper, with decays of heads or of key channels: Pallas Mosaic GPU kernels for Packed.

The programs are `delta_program_gpu` (a decay of each head) and `delta_channels_gpu` (of each key channel); here arguments
are laid out for them. Inputs are read as [B T N*128], a head beside the other. The backward passes are in
`delta_backward_gpu` and `delta_channels_backward_gpu`: they read the states before each chunk, which are kept where
gradients are wanted, and with decays of heads the inverses.

Log decays of heads are summed within a chunk in units of log2, each at least `NEVER`, whose power is 0: so sums stay below
2^14, and a difference of two has an error of 2^-10 at most, a quarter of bfloat16's.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import delta_backward_gpu as backward
from fdel.kernels import delta_channels_backward_gpu as channels_backward
from fdel.kernels import delta_channels_gpu as channels
from fdel.kernels import delta_channels_walk_gpu as channels_walk
from fdel.kernels import delta_decode_gpu as decode
from fdel.kernels import delta_program_gpu as program
from fdel.kernels import delta_slots_gpu as prompts
from fdel.kernels.delta_walk_gpu import CHUNK, WIDTH, place_of, rows_of
from fdel.kernels.device import no_hopper, unmeasured
from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    chunk: int = 64,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if isinstance(batch, Paged):
        return (decode if batch.block == 1 else prompts).unsupported(batch, carry, q, k, v)
    if batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches without key_segment_ids and prefix_ids"
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"it multiplies bfloat16; found {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} channels; expected {WIDTH}"
    return None


def unproven(
    batch: Batch, _: Carry | None, __: Any, q: Array, k: Any, v: Any, g: Array, *___: Any, **____: Any
) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    if why := unmeasured(q):
        return why
    ran = batch.block == 1 if isinstance(batch, Paged) else g.ndim < q.ndim
    return None if ran else "prompts, and training with decays of channels, have not run on an H100; `use` can name it"


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    q: Float[Array, "... T N Hk"], k: Float[Array, "... T N Hk"], v: Float[Array, "... T N Hv"],
    g: Float[Array, "... T N"] | Float[Array, "... T N Hk"], beta: Float[Array, "... T N"], *, chunk: int = 64,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`, in chunks of its own size; see `unsupported` for what it can serve."""
    if isinstance(batch, Paged):
        way = decode.delta if batch.block == 1 else prompts.call
        return way(batch, carry or Carry(), layer, q, k, v, g, beta)
    return rule(False, batch, q, k, v, g, beta), carry or Carry()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rule(interpreted: bool, batch: Packed, q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
    """Run the kernel; see `call`. `interpreted`: leave out what the interpreter lacks."""
    return _run(interpreted, batch, (q, k, v, g, beta), keep=False)[0]


def _run(interpreted: bool, batch: Packed, inputs: tuple[Array, ...], keep: bool) -> tuple[Array, ...]:
    """Give outputs, and what is kept for the gradient."""
    v = inputs[2]
    if inputs[3].ndim == 3:
        out, *kept = program.run(*_laid(batch, *inputs), keep=keep)
    else:
        prepared, filled, valid, whole = _prepared(batch, *inputs, keys=False)
        out, *kept = channels_walk.walk(prepared, filled[2], valid, whole, keep=keep, interpreted=interpreted)
    return out[:, : v.shape[1]].reshape(v.shape), *kept


def _tokens(batch: Packed) -> tuple[Array, Array, Array]:
    """Tell which tokens of whole chunks are no padding, and begin a sequence, and which chunks have no padding."""
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, -batch.segment_ids.shape[1] % CHUNK)), constant_values=-1)
    valid, change = segments >= 0, segments[:, 1:] != segments[:, :-1]
    start = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
    return valid, start, valid.reshape(len(valid), -1, CHUNK).all(2).astype(jnp.int32)


def _filled(x: Array) -> Array:
    """Lay heads beside each other and fill chunks."""
    return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, -x.shape[1] % CHUNK), (0, 0)))


def _laid(batch: Packed, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, ...]:
    """Lay heads beside each other, fill chunks, and give numbers of tokens, as `delta_program_gpu.run` wants them."""
    valid, start, whole = _tokens(batch)
    clear = lambda x: jnp.where(valid[..., None], _filled(x.astype(jnp.float32)), 0)
    decays = channels_backward.log2_decays(_filled(g.astype(jnp.float32)), valid[..., None], start[..., None])
    return _filled(q), _filled(k), _filled(v), program.numbers_of(valid, decays, clear(beta)), whole


def _prepared(
    batch: Packed, q: Array, k: Array, v: Array, g: Array, beta: Array, *, keys: bool
) -> tuple[channels.Prepared, list[Array], Array, Array]:
    """Prepare chunks with decays of channels; and q, k, v and g in whole chunks, which tokens and chunks are no padding."""
    valid, start, whole = _tokens(batch)
    filled = [_filled(x) for x in (q, k, v, g.astype(jnp.float32))]
    beta = jnp.where(valid[..., None], _filled(beta), 0)
    each = [start[..., None], beta, place_of(valid.shape[1]), valid[..., None]]
    prepared = channels.prepare(filled[0], filled[1], filled[3], rows_of(each, beta.shape), whole, keys=keys)
    return prepared, filled, valid.astype(jnp.float32), whole


def _forward(interpreted: bool, batch: Packed, *inputs: Array) -> tuple[Array, tuple[Any, ...]]:
    out, *kept = _run(interpreted, batch, inputs, keep=True)
    return out, (batch, inputs, kept)


def _backward(interpreted: bool, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    batch, inputs, kept = saved
    shape = inputs[2].shape
    dy, of = _filled(dy.astype(inputs[2].dtype)), _of_heads if inputs[3].ndim == 3 else _of_channels
    real = batch.segment_ids >= 0
    start = jnp.pad(batch.segment_ids[:, 1:] != batch.segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    found = zip(of(interpreted, batch, inputs, kept, dy), inputs, strict=True)
    dq, dk, dv, dg, dbeta = (y[:, : shape[1]].reshape(x.shape).astype(x.dtype) for y, x in found)
    mask = (real & ~start).reshape(*shape[:2], *[1] * (dg.ndim - 2))
    return None, dq, dk, dv, jnp.where(mask, dg, 0), dbeta


def _of_heads(
    interpreted: bool, batch: Packed, inputs: tuple[Array, ...], kept: list[Array], dy: Array
) -> tuple[Array, ...]:
    """Give the gradients of the inputs, in whole chunks, with decays of heads."""
    q, k, v, numbers, whole = _laid(batch, *inputs)
    states, solve = kept
    dv, gradients = backward.run(q, k, dy, numbers, whole, solve, interpreted=interpreted)
    dq, dk, dg, dbeta = backward.others([q, k, v, dy, dv], numbers, solve, (states, gradients))
    return dq, dk, dv, dg, dbeta


def _of_channels(
    interpreted: bool, batch: Packed, inputs: tuple[Array, ...], kept: list[Array], dy: Array
) -> tuple[Array, ...]:
    """Give the gradients of the inputs, in whole chunks, with decays of channels."""
    prepared, (q, k, v, g), valid, whole = _prepared(batch, *inputs, keys=True)
    walk = functools.partial(channels_walk.walk, keep=True, back=True, interpreted=interpreted)
    dv, gradients = walk(prepared, dy, valid, whole)
    wide, tokens = [g, q, k, v, dy, dv], _tokens(batch)[:2]
    dq, dk, dg, dbeta = channels_backward.gradients(wide, *tokens, prepared, (kept[0], gradients))
    return dq, dk, dv, dg, dbeta


rule.defvjp(_forward, _backward)
