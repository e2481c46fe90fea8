"""What the kernels for selective scans share: how tokens are laid out, read, and what they do to a state."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.ops.batch import Packed

CHANNELS, STATES = 128, 16  # of a program; with more states the gradient's do not fit in registers
CHUNK, UNROLL = 32, 8  # tokens of a copy and between kept states, and of a round of the loop
DEPTH = 2  # copies on their way, and results
FLOOR, VALID, NUMBERS = 2 * STATES, 2 * STATES + 1, 2 * STATES + 4  # what a token's numbers are beside b and c
ENDLESS = 3e38  # a step after which nothing is left


def prepared(batch: Packed, inputs: tuple[Array, ...]) -> list[Array]:
    """Lay out x and dt in whole chunks, `rates` [S C], the numbers of each token, and d in float32."""
    x, dt, a, b, c, d = inputs
    fill = -x.shape[1] % CHUNK
    padded = lambda y: jnp.pad(y, ((0, 0), (0, fill), (0, 0))) if fill else y
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, fill)), constant_values=-1)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    numbers = numbers_of(segments >= 0, starts, padded(b), padded(c))
    return [padded(x), padded(dt), rates(a), numbers, d.astype(jnp.float32)]


def rates(a: Float[Array, "C S"]) -> Float[Array, "S C"]:
    """Give exponents to the base 2, in float32."""
    return a.T.astype(jnp.float32) * np.log2(np.e)


def numbers_of(valid: Array, starts: Array, b: Array, c: Array) -> Float[Array, "... T numbers"]:
    """Give what all channels read of a token: b, c, the least step of its decay, and whether it is one.

    b and c of padding, which may hold anything, are 0. A token that starts a sequence leaves nothing of a finite state.
    """
    floor, valid = jnp.where(starts, ENDLESS, -ENDLESS)[..., None], valid[..., None]
    shared = jnp.where(valid, jnp.concatenate([b.astype(jnp.float32), c.astype(jnp.float32)], -1), 0)
    spare = jnp.zeros((*valid.shape[:-1], NUMBERS - VALID - 1), jnp.float32)
    return jnp.concatenate([shared, floor, valid.astype(jnp.float32), spare], -1)


def parameters() -> Any:
    """Give the compiler's: a thread reads what it wrote itself, and what others read is committed by the programs."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    lane = gpu.LoweringSemantics.Lane
    return gpu.CompilerParams(lowering_semantics=lane, approx_math=True, unsafe_no_auto_barriers=True)


def memory(dtype: Any, size: int) -> dict[str, Any]:
    """Give a forward program's shared memory: so many tokens a copy, `DEPTH` chunks on their way, and results."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    depth = DEPTH * CHUNK // size
    tile, barriers = (depth, size, CHANNELS), gpu.Barrier(num_arrivals=3, num_barriers=depth)
    numbers = gpu.SMEM((depth, size, NUMBERS), jnp.float32)
    x, dt, y = (gpu.SMEM(tile, kind) for kind in (dtype, jnp.float32, dtype))
    return {"x_s": x, "dt_s": dt, "y_s": y, "n_s": numbers, "full": barriers}


def nothing() -> Array:
    """Give a zero for each channel."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.zeros(CHANNELS, jnp.float32), gpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1))


def token(r: SimpleNamespace, slot: Any, at: Any) -> tuple[Array, Array, Array, Array]:
    """Read x of a token, whether it is one, its step, and that of its decay, in float32; padding may hold anything."""
    valid = r.n_s[slot, at, VALID] > 0
    x = jnp.where(valid, r.x_s[slot, at].astype(jnp.float32), 0.0)
    step = jnp.where(valid, r.dt_s[slot, at], 0.0)
    return x, valid, step, jnp.maximum(step, r.n_s[slot, at, FLOOR])


def advance(numbers: Any, a: list[Array], decay: Array, add: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    """Give the states after a token: `decay` is its step for them, `add` what b of its numbers is multiplied with."""
    return tuple(jnp.exp2(decay * a[n]) * states[n] + add * numbers[n] for n in range(STATES))


def outputs(r: SimpleNamespace, slot: Any, a: list[Array], d: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    """Write y of the tokens in a place of shared memory to that of `y_s`, and give the states after them."""

    def several(j: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
        for k in range(UNROLL):
            at = j * UNROLL + k
            x, _, step, decay = token(r, slot, at)
            states = advance(r.n_s.at[slot, at], a, decay, step * x, states)
            y = [d * x, jnp.zeros_like(x)]
            for n in range(STATES):
                y[n % 2] = y[n % 2] + states[n] * r.n_s[slot, at, STATES + n]
            r.y_s.at[slot, at][...] = (y[0] + y[1]).astype(r.y_s.dtype)
        return states

    return jax.lax.fori_loop(0, r.x_s.shape[1] // UNROLL, several, states)
