"""How evenly a router spreads tokens over experts: sums that ride through the layers as state of a Packed call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Batch, Packed, register


@register
@dataclass(frozen=True)
class RouterLoad:
    """Sums over tokens and layers; padding (segment id below 0) is left out."""

    chosen: Float[Array, " E"]  # how often each expert was chosen
    probability: Float[Array, " E"]  # what the router gave each
    tokens: Float[Array, ""]


def router_load(experts: int) -> RouterLoad:
    """Begin with no tokens."""
    return RouterLoad(jnp.zeros(experts), jnp.zeros(experts), jnp.zeros(()))


def watch_router(batch: Batch, state: Any, probability: Float[Array, "B T E"], experts: Int[Array, "B T k"]) -> Any:
    """Add one layer's routing to the `RouterLoad` that state is, or holds as "load"; other state is returned as it is.

    `probability` sums to 1 over experts: softmax(logits), or sigmoid(logits) over its sum (arXiv:2412.19437, eq. 19).
    """
    if isinstance(state, Mapping) and "load" in state:
        return {**state, "load": watch_router(batch, state["load"], probability, experts)}
    if not (isinstance(state, RouterLoad) and isinstance(batch, Packed)):
        return state
    real = (batch.segment_ids >= 0).astype(jnp.float32)
    chosen = jax.nn.one_hot(experts, probability.shape[-1]).sum(-2)
    total = lambda x: jnp.einsum("bte,bt->e", x, real)
    return RouterLoad(state.chosen + total(chosen), state.probability + total(probability), state.tokens + real.sum())


def load_balancing(state: Any) -> Float[Array, ""]:
    """Compute E sum_e f_e P_e of a `RouterLoad`: f_e the share of tokens that chose e, P_e its mean probability.

    arXiv:2101.03961, equations 4 to 6, over all layers at once as in transformers; k for an even load of k experts.
    """
    load = state["load"] if isinstance(state, Mapping) else state
    share = jnp.maximum(load.tokens, 1)
    return (load.chosen / share * (load.probability / share)).sum() * load.chosen.size
