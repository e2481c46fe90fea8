"""Hidden states between chosen layers, kept as they pass: they ride through the layers as state of a Packed call."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import register


@register
@dataclass(frozen=True)
class HiddenStates:
    """What the state {"hidden": HiddenStates(places)} brings back: the residual stream at each of `places`.

    Place 0 is what enters the first layer and place i what layer i - 1 returns, as transformers counts its hidden states.
    """

    places: tuple[int, ...] = field(metadata={"static": True})
    values: tuple[Float[Array, "B T D"], ...] = ()


def watch_hidden(state: Any, x: Float[Array, "B T D"], place: Any) -> Any:
    """Keep x if its place is one of those that state wants; state without "hidden" is returned as it is."""
    if not (isinstance(state, Mapping) and "hidden" in state):
        return state
    seen: HiddenStates = state["hidden"]
    values = seen.values or tuple(jnp.zeros_like(x) for _ in seen.places)
    values = tuple(jnp.where(place == p, x, v) for p, v in zip(seen.places, values, strict=True))
    return {**state, "hidden": replace(seen, values=values)}
