"""What passes inside chosen layers, kept for a loss: it rides through the layers as state of a Packed call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import register
from fdel.ops.shard import shard


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


@register
@dataclass(frozen=True)
class AttentionWeights:
    """What the state {"pages": attention_weights(...)} brings back: the softmax of each of `layers`, in float32.

    Only layers that attend are counted, as by transformers' `attentions`. All of [N T S] is held for every layer that is
    watched: memory and time go with the square of a row's length, which attention in blocks is there to avoid.
    """

    layers: tuple[int, ...] = field(metadata={"static": True})
    values: Float[Array, "watched B N T S"]


def attention_weights(layers: Sequence[int], heads: int, tokens: tuple[int, ...]) -> AttentionWeights:
    """Begin to watch `layers` of a model with so many heads, in a Packed call with tokens of shape (B, T)."""
    b, t = tokens
    return AttentionWeights(tuple(layers), _laid_out(jnp.zeros((len(layers), b, heads, t, t))))


def watch_attention(state: Any, layer: Any, weights: Callable[[], Float[Array, "B N T S"]]) -> Any:
    """Keep weights() if its layer is one of those that state, or state["pages"], wants; else they are not computed.

    Where a model keeps what its attention remembers, the watch stands; other state is returned as it is.
    """
    if isinstance(state, Mapping) and isinstance(state.get("pages"), AttentionWeights):
        return {**state, "pages": watch_attention(state["pages"], layer, weights)}
    if not isinstance(state, AttentionWeights):
        return state
    keep = lambda values, i: _laid_out(jax.lax.dynamic_update_index_in_dim(values, weights(), i, 0))
    if isinstance(layer, int):
        return replace(state, values=keep(state.values, state.layers.index(layer))) if layer in state.layers else state
    here = jnp.asarray(state.layers) == layer
    values = jax.lax.cond(here.any(), keep, lambda values, i: values, state.values, jnp.argmax(here))
    return replace(state, values=values)


def _laid_out(values: Array) -> Array:
    return shard(values, "watched rows attending tokens keys")
