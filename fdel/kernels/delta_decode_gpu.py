"""One token of each sequence through a delta rule on NVIDIA Hopper: a Pallas Mosaic GPU kernel.

As `recurrent_decode_gpu`, which says what is common. A program takes the state of one head for 128 columns of values, one
in each thread, which walks down the keys twice: what the state predicts, then what is new and the output. So nothing is
summed between threads, and nothing waits but for the copy; three programs of 64 KiB share a multiprocessor's memory.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import recurrent_decode_gpu
from fdel.kernels.recurrent_decode_gpu import COLUMNS, GRID, call
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

KEYS, UNROLL = 128, 8  # channels of keys at most, of which a round of the loop takes so many


def unsupported(batch: Paged, carry: Carry | None, q: Array, k: Array, v: Array) -> str | None:
    """Say why `delta` cannot serve a call of one token of each sequence, or None."""
    if why := recurrent_decode_gpu.unsupported(batch, carry, (*k.shape[-2:], v.shape[-1]), q, k, v):
        return why
    if k.shape[-1] > KEYS or k.shape[-1] % UNROLL or v.shape[-1] % COLUMNS:
        found = f"{k.shape[-1]} channels of keys and {v.shape[-1]} of values"
        return f"{found}; expected a multiple of {UNROLL} up to {KEYS}, and of {COLUMNS}"
    return None


def delta(
    batch: Paged, carry: Carry, layer: Any, q: Float[Array, "T N Hk"], k: Float[Array, "T N Hk"],
    v: Float[Array, "T N Hv"], g: Float[Array, "T N"] | Float[Array, "T N Hk"], beta: Float[Array, "T N"],
) -> tuple[Float[Array, "T N Hv"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`: keys of a multiple of 8 channels up to 128, values of a multiple of 128."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    (_, heads, keys), decay = k.shape, jnp.exp(g.astype(jnp.float32))
    ins = {"q": q, "k": k, "v": v, "beta": beta.astype(jnp.float32), "decay": decay}
    own = ("q", "k", "decay")[: g.ndim]  # what a program copies beside the state

    def program(r: SimpleNamespace) -> None:
        t, head, block = map(jax.lax.axis_index, GRID)
        some = pl.ds(block * COLUMNS, COLUMNS)
        place, out = r.places[0, t], r.out.at[t, head, some]
        state = r.states.at[pl.ds((place * heads + head) * keys, keys), some]
        nothing = gpu.layout_cast(jnp.zeros(COLUMNS, jnp.float32), gpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1))

        @pl.when(place < 0)
        def _() -> None:
            out[...] = nothing.astype(out.dtype)

        @pl.when(place >= 0)
        def _() -> None:
            gpu.copy_gmem_to_smem(state, r.state_s, r.full)
            for name in own:
                gpu.copy_gmem_to_smem(getattr(r, name).at[t, head], getattr(r, f"{name}_s"), r.full)
            value, beta = r.v[t, head, some].astype(jnp.float32), r.beta[t, head]
            decay = r.decay_s if "decay" in own else r.decay[t, head]
            y = _corrected(r, value, beta, decay, r.places[1, t] == 0, nothing)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(r.state_s, state)
            out[...] = y.astype(out.dtype)
            gpu.wait_smem_to_gmem(0)

    scratch = {"state_s": gpu.SMEM((keys, COLUMNS), jnp.float32), "full": gpu.Barrier(num_arrivals=1 + len(own))}
    scratch |= {f"{name}_s": gpu.SMEM((keys,), ins[name].dtype) for name in own}
    grid = len(v), heads, v.shape[-1] // COLUMNS
    return call(program, "gated_delta_rule_decode", grid, batch, carry, layer, ins, v, scratch)


def _corrected(r: SimpleNamespace, value: Array, beta: Any, decay: Any, goes_on: Any, nothing: Array) -> Array:
    """Give the output of a delta rule's columns, whose state in shared memory is changed, once it has come."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    keep = lambda i: decay if getattr(decay, "ndim", 0) == 0 else decay[i]
    numbers = lambda ref, j: [ref[j * UNROLL + i].astype(jnp.float32) for i in range(UNROLL)]

    def rows(j: Any) -> list[Array]:
        places = [j * UNROLL + i for i in range(UNROLL)]
        return [keep(i) * jnp.where(goes_on, r.state_s[i], 0.0) for i in places]

    def seen(j: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        for key, state in zip(numbers(r.k_s, j), rows(j), strict=True):
            sums = sums[1], sums[0] + key * state
        return sums

    def changed(j: Any, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        miss, a, b = carried
        new = [state + key * miss for key, state in zip(numbers(r.k_s, j), rows(j), strict=True)]
        for query, state in zip(numbers(r.q_s, j), new, strict=True):  # all loads before the first store
            a, b = b, a + query * state
        for i, state in enumerate(new):
            r.state_s.at[j * UNROLL + i][...] = state
        return miss, a, b

    gpu.barrier_wait(r.full)
    rounds = r.state_s.shape[0] // UNROLL
    a, b = jax.lax.fori_loop(0, rounds, seen, (nothing, nothing))
    _, a, b = jax.lax.fori_loop(0, rounds, changed, (beta * (value - (a + b)), nothing, nothing))
    return a + b
