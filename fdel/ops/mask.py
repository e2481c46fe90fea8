"""What a query may see, for every implementation of attention."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

NEG = -1e30  # finite, so that rows without a visible key stay free of NaN
HIDDEN = -3  # segment id of a key that no query sees; ids of queries are -2 (added to fill a block) or more

Segments = Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B T"]]  # of tokens, or of queries and of keys


@dataclass(frozen=True)
class Mask:
    """What a query may see, as a specification: hashable, so it is static under jit.

    `window` is the number of visible keys including the query's own; `softcap` bounds the scores: c tanh(s / c).
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("scale", -math.inf), ("window", 1), ("softcap", 1e-30)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(
                    f"Mask.{name}={value}: expected a finite number" + f" of at least {least}" * (least > 0)
                )


def sides(segments: Segments) -> tuple[Array, Array]:
    """Give the segment ids of queries and those of keys."""
    return segments if isinstance(segments, tuple) else (segments, segments)


def visible(m: Mask, qi: Array, ki: Array, qs: Array, ks: Array) -> Array:
    """Boolean mask [B q s] from indices [q], [s] and segment ids [B q], [B s]."""
    seen = qs[:, :, None] == ks[:, None, :]
    ahead = ki[None, :] - qi[:, None]
    if m.causal:
        seen &= ahead <= 0
    if m.window is not None:
        seen &= ahead > -m.window if m.causal else jnp.abs(ahead) < m.window
    return seen
