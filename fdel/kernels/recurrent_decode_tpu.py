"""One token of each sequence through a recurrence on TPUs: Pallas Mosaic TPU kernels, for blocks of one token.

A step of the grid takes a token and some heads; their state is read from its slot, changed as the operation's docstring has
it, all in float32, and written back, once each. No product is of matrices: a state is multiplied with columns and rows,
and summed over sublanes (`ssd`: over lanes). Bytes: states, twice; all else is small.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import slots, slots_tpu
from fdel.kernels.chunks_tpu import places
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

HEADS = 16  # of a step, where they divide all


def heads_of(n: int) -> int:
    """Give the heads of a step, in whole sublanes; 0 if there are none."""
    return next((size for size in (HEADS, 8) if n % size == 0), 0)


def delta(
    batch: Paged, carry: Carry, layer: Any, q: Float[Array, "T N Hk"], k: Float[Array, "T N Hk"],
    v: Float[Array, "T N Hv"], g: Float[Array, "T N"] | Float[Array, "T N Hk"], beta: Float[Array, "T N"],
) -> tuple[Float[Array, "T N Hv"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`."""
    n, of_channels = heads_of(k.shape[1]), g.ndim == 3
    decay = jnp.exp(g.astype(jnp.float32))
    ins = {"q": q, "k": k, "v": v, "beta": beta[..., None], "decay": decay if of_channels else decay[..., None]}

    def program(r: SimpleNamespace) -> None:
        queries, keys = (jnp.transpose(x[...].astype(jnp.float32)) for x in (r.q, r.k))
        decays = jnp.transpose(r.decay[...]) if of_channels else r.decay[...]
        for i in range(n):
            key = keys[:, i : i + 1]
            state = (decays[:, i : i + 1] if of_channels else decays[i : i + 1]) * r.state[i]
            miss = r.v[i : i + 1].astype(jnp.float32) - jnp.sum(key * state, 0, keepdims=True)
            state = state + key * (r.beta[i : i + 1].astype(jnp.float32) * miss)
            r.state[i] = state
            r.out[i : i + 1] = jnp.sum(queries[:, i : i + 1] * state, 0, keepdims=True)

    shape = n, k.shape[-1], v.shape[-1]
    y, carry = _heads(program, "gated_delta_rule_decode", batch, carry, layer, ins, v.shape, shape)
    return y.astype(v.dtype), carry


def ssd(
    batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T N H"], dt: Float[Array, "T N"], a: Float[Array, " N"],
    b: Float[Array, "T G S"], c: Float[Array, "T G S"], d: Float[Array, " N"],
) -> tuple[Float[Array, "T N H"], Carry]:  # fmt: skip
    """Compute as `ssd`."""
    n, dt = heads_of(x.shape[1]), dt.astype(jnp.float32)
    wide = lambda y: jnp.repeat(y.astype(jnp.float32), x.shape[1] // y.shape[1], 1)
    ins = {"x": x.astype(jnp.float32), "b": wide(b), "c": wide(c), "dt": dt[..., None]}
    ins["decay"] = jnp.exp(dt * a.astype(jnp.float32))[..., None]

    def program(r: SimpleNamespace) -> None:
        adds = jnp.transpose(r.x[...] * r.dt[...])  # [H heads]
        found = jnp.zeros((x.shape[-1], n), jnp.float32)
        for i in range(n):
            one = slice(i, i + 1)
            state = r.decay[one] * r.state[i] + adds[:, one] * r.b[one]
            r.state[i] = state
            read = jnp.sum(state * r.c[one], 1, keepdims=True)
            found = jnp.where(places(found.shape)[1] == i, read, found)
        r.out[...] = jnp.transpose(found)

    shape = n, x.shape[-1], b.shape[-1]
    y, carry = _heads(program, "ssd_decode", batch, carry, layer, ins, x.shape, shape)
    skip = jnp.where((batch.positions >= 0)[:, None, None], d.astype(jnp.float32)[:, None] * ins["x"], 0)
    return (y + skip).astype(x.dtype), carry


def scan(
    batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T C"], dt: Float[Array, "T C"], a: Float[Array, "C S"],
    b: Float[Array, "T S"], c: Float[Array, "T S"], d: Float[Array, " C"], width: int,
) -> tuple[Float[Array, "T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, `width` channels in a step."""
    from jax.experimental import pallas as pl

    row, column = (lambda y: y.astype(jnp.float32)[:, None]), (lambda y: y.astype(jnp.float32)[..., None])
    lanes = pl.BlockSpec((None, 1, width), lambda b, n, c, *_: (c, 0, n))
    shared = pl.BlockSpec((None, a.shape[1], 1), lambda b, n, c, *_: (c, 0, 0))
    rates = pl.BlockSpec((a.shape[1], width), lambda b, n, c, *_: (0, n))
    ins = {"x": (row(x), lanes), "dt": (row(dt), lanes), "b": (column(b), shared), "c": (column(c), shared)}
    ins["a"] = a.T.astype(jnp.float32), rates

    def program(r: SimpleNamespace) -> None:
        state = jnp.exp(r.dt[...] * r.a[...]) * r.state[...] + r.dt[...] * r.x[...] * r.b[...]
        r.state[...] = state
        r.out[...] = jnp.sum(state * r.c[...], 0, keepdims=True)

    states = jnp.swapaxes(carry.slots.ssm, 2, 3)  # as XLA:TPU lays them out: nothing moves
    plan = slots_tpu.tokens(batch, states.shape[1], layer)
    served = slots_tpu.Served(plan, (), states, (a.shape[1], width), lambda n: (0, n))
    y, states = _call(
        program, "selective_scan_decode", served, ins, (len(x), 1, x.shape[1]), lanes, x.shape[1] // width
    )
    skip = jnp.where((batch.positions >= 0)[:, None], d.astype(jnp.float32) * x.astype(jnp.float32), 0)
    return (y[:, 0] + skip).astype(x.dtype), slots.remembered(carry, jnp.swapaxes(states, 2, 3))


def _heads(
    program: Callable, name: str, batch: Paged, carry: Carry, layer: Any, ins: dict[str, Array], out: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[Array, Carry]:  # fmt: skip
    """Run over inputs [T N ...] with states of `shape`, by heads."""
    from jax.experimental import pallas as pl

    block = lambda w: pl.BlockSpec((None, shape[0], w), lambda b, n, c, *_: (c, n, 0))
    states = carry.slots.ssm
    served = slots_tpu.Served(slots_tpu.tokens(batch, states.shape[1], layer), (), states, shape, lambda n: (n, 0, 0))
    given = {key: (x, block(x.shape[-1])) for key, x in ins.items()}
    y, states = _call(program, name, served, given, out, block(out[-1]), out[1] // shape[0])
    return y, slots.remembered(carry, states)


def _call(
    program: Callable, name: str, served: slots_tpu.Served, ins: dict[str, tuple[Array, Any]], out: tuple[int, ...],
    spec: Any, steps: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Run over tokens: outputs in float32, 0 of those that are none, and the states."""
    from jax.experimental.pallas import tpu as pltpu

    outs = {"out": (jax.ShapeDtypeStruct(out, jnp.float32), spec)}
    scratch = {"state": pltpu.VMEM(served.shape, jnp.float32)}
    y, states = slots_tpu.call(program, name, (1, steps, out[0]), {}, ins, outs, scratch, served)
    return jnp.where(served.plan.valid[0, :, None, None], y, 0), states
