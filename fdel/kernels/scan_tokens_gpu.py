"""What both passes of `selective_scan_gpu` share: how tokens are laid out, read, and what they do to a state."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fdel.ops.batch import Packed

CHANNELS, STATES = 128, 16  # of a program; with more states the gradient's do not fit in registers
CHUNK, UNROLL = 32, 8  # tokens of a copy and between kept states, and of a round of the loop
DEPTH = 2  # copies on their way, and results
FLOOR, VALID, NUMBERS = 2 * STATES, 2 * STATES + 1, 2 * STATES + 4  # what a token's numbers are beside b and c
ENDLESS = 3e38  # a step after which nothing is left


def prepared(batch: Packed, inputs: tuple[Array, ...]) -> list[Array]:
    """Lay out x and dt in whole chunks, exponents to the base 2 [S C], the numbers of each token, and d, in float32.

    A token's numbers [NUMBERS] are b, c, the least step of its decay, and whether it is one: b and c of padding are 0.
    """
    x, dt, a, b, c, d = inputs
    fill = -x.shape[1] % CHUNK
    padded = lambda y: jnp.pad(y, ((0, 0), (0, fill), (0, 0))) if fill else y
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, fill)), constant_values=-1)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    valid = (segments >= 0)[..., None]
    floor = jnp.where(starts, ENDLESS, -ENDLESS)[..., None]
    shared = jnp.concatenate([padded(y).astype(jnp.float32) for y in (b, c)], -1)
    rest = jnp.pad(jnp.concatenate([floor, valid], -1), ((0, 0), (0, 0), (0, NUMBERS - FLOOR - 2)))
    numbers = jnp.concatenate([jnp.where(valid, shared, 0), rest], -1)
    return [padded(x), padded(dt), a.T.astype(jnp.float32) * np.log2(np.e), numbers, d.astype(jnp.float32)]


def parameters() -> Any:
    """Give the compiler's: a thread reads what it wrote itself, and what others read is committed by the programs."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    lane = gpu.LoweringSemantics.Lane
    return gpu.CompilerParams(lowering_semantics=lane, approx_math=True, unsafe_no_auto_barriers=True)


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
