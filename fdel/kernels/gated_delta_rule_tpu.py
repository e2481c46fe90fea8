"""The gated delta rule on TPUs, with decays of heads and of key channels: a Pallas Mosaic TPU kernel for Packed batches.

The program is `delta_program_tpu`; here arguments are laid out for it. Inputs are read as [B T N*H], a head beside the
other, once; what belongs to a token and a head alone (decay, write strength) is laid along the tokens of a chunk.

Log decays of heads are summed within a chunk in two parts: multiples of 2^-6, whose sums and differences are exact, and
the rest, whose sums stay below 1. So a difference of two sums has the digits of the decays between them, whatever came
before. A sequence begins with a decay of exp(-1024), which is 0. In bfloat16 products are of bfloat16 with float32 sums, as
XLA:TPU multiplies float32 by default; decays, the substitution and the state are float32. In float32 all is. The backward
pass is that of the reference, computed again. Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import delta_program_tpu as program
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry
from fdel.ops.platform import target

LANES, CHUNK = 128, 128  # CHUNK: tokens that are solved at once
HEADS = {True: 8, False: 4}  # of a step at most, of one decay each and of a decay for each channel
NOTHING, UNIT = 1024.0, 64.0  # exp(-NOTHING) is 0; sums of CHUNK of them, in steps of 1 / UNIT, are exact in float32
OLD = ("v2", "v3", "v4")  # in the names of TPUs with 16 MiB of fast memory


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, q: Array, k: Array, v: Array, g: Array, beta: Array, *,
    chunk: int = 64,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and any(old in device.device_kind for old in OLD):
        return f"it needs the memory of v5 or later; the mesh is of {device.device_kind}"
    if not isinstance(batch, Packed) or batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches, without key_segment_ids and prefix_ids"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q, k and v are bfloat16 or float32; found {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] % LANES or v.shape[-1] % LANES:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} channels; expected multiples of {LANES}"
    return None


def call(
    batch: Packed, carry: Carry | None, layer: Any,
    q: Float[Array, "B T N Hk"], k: Float[Array, "B T N Hk"], v: Float[Array, "B T N Hv"],
    g: Float[Array, "B T N"] | Float[Array, "B T N Hk"], beta: Float[Array, "B T N"], *, chunk: int = 64,
) -> tuple[Float[Array, "B T N Hv"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`, in chunks of its own size; see `unsupported` for what it can serve."""
    return _rule(batch, q, k, v, g, beta), carry or Carry()


@jax.custom_vjp
def _rule(batch: Packed, *inputs: Array) -> Array:
    q, k, v, g, beta = inputs
    t = q.shape[1]
    pad = lambda x, n, value=0: jnp.pad(x, [(0, 0), (0, n), *[(0, 0)] * (x.ndim - 2)], constant_values=value)
    flat = [x.reshape(*x.shape[:2], -1) for x in (q, k, v, *[g.astype(jnp.float32)] * (g.ndim == 4))]
    if t < CHUNK:  # else the last block reads beyond the end, and is cleared as padding is
        flat = [pad(x, CHUNK - t) for x in flat]
    segments = pad(batch.segment_ids, -t % CHUNK, -1)
    change = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    valid, to_float = segments >= 0, lambda x: x.astype(jnp.float32)
    clear = lambda x: jnp.where(valid[..., None], pad(to_float(x), -t % CHUNK), 0)
    heads = next(n for n in range(HEADS[g.ndim == 3], 0, -1) if q.shape[2] % n == 0)
    group = lambda x: x.reshape(*x.shape[:2], -1, heads).transpose(0, 2, 3, 1)  # [B groups heads T]
    numbers = [group(clear(beta))]
    if g.ndim == 3:
        numbers += map(group, _sums(clear(g), change))
    shared = jnp.stack([to_float(valid), to_float(change)], 1)[:, None]
    numbers.append(jnp.broadcast_to(shared, (len(q), numbers[0].shape[1], *shared.shape[2:])))
    rows = jnp.concatenate(numbers, 2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 8), (0, 0)))
    whole = valid.reshape(-1, CHUNK).all(1).astype(jnp.int32)
    about = program.About(heads, k.shape[-1], v.shape[-1], CHUNK, g.ndim == 4)
    out = program.run(about, whole, rows, flat)
    return out[:, :t].reshape(v.shape)


def _sums(g: Float[Array, "B T N"], starts: Array) -> tuple[Array, Array]:
    """Sum log decays over the tokens of a chunk up to each, in whole steps of 1 / UNIT and the rest."""
    high = jnp.maximum(jnp.round(g * UNIT) / UNIT, -NOTHING)
    low = jnp.where(high > -NOTHING, g - high, 0)
    high, low = jnp.where(starts[..., None], -NOTHING, high), jnp.where(starts[..., None], 0, low)
    total = lambda x: jnp.cumsum(x.reshape(len(x), -1, CHUNK, x.shape[-1]), 2).reshape(x.shape)
    return total(high), total(low)


def _backward(saved: tuple[Packed, tuple], dy: Array) -> tuple[Any, ...]:
    from fdel.ops.dispatch import TABLES

    batch, inputs = saved
    reference = TABLES["gated_delta_rule"].implementations["xla"].call
    return None, *jax.vjp(lambda *x: reference(batch, None, 0, *x)[0], *inputs)[1](dy)


_rule.defvjp(lambda batch, *inputs: (_rule(batch, *inputs), (batch, inputs)), _backward)
