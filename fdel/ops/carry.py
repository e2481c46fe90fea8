"""What goes from layer to layer beside the activations: what is remembered (`State`), and what is watched (`Taps`).

A tap brings back what passes inside a model in a Packed call, for a loss. Models hand the carry on; ops read and write it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Batch, Media, Packed, Routing, State, packed, register
from fdel.ops.shard import shard


@register
@dataclass(frozen=True)
class HiddenStates:
    """The residual stream at each of `places`; place 0 enters the first layer, place i is what layer i - 1 returns.

    So transformers counts its hidden states, but for the last: there it means the normalised one.
    """

    places: tuple[int, ...] = field(metadata={"static": True})
    values: tuple[Float[Array, "B T D"], ...] = ()


@register
@dataclass(frozen=True)
class RouterLoad:
    """How evenly routers spread tokens over experts: sums over tokens and layers, without padding (segment id below 0)."""

    chosen: Float[Array, " E"]  # how often each expert was chosen
    probability: Float[Array, " E"]  # what the router gave each
    tokens: Float[Array, ""]
    z: Float[Array, ""]  # logsumexp(logits)^2
    dropped: Float[Array, ""] | None = None  # choices among `chosen` that came after their expert was full


@register
@dataclass(frozen=True)
class AttentionWeights:
    """The softmax of each of `layers`, in float32. Only layers that attend are counted, as by transformers' `attentions`.

    All of [N T S] is held for every layer that is watched: memory and time go with the square of a row's length, which
    attention in blocks is there to avoid.
    """

    layers: tuple[int, ...] = field(metadata={"static": True})
    values: Float[Array, "watched B N T S"]


@register
@dataclass(frozen=True)
class Taps:
    """What a Packed call is to bring back from inside a model; None is not watched and costs nothing."""

    hidden: HiddenStates | None = None
    router: RouterLoad | None = None
    attention: AttentionWeights | None = None


@register
@dataclass(frozen=True)
class Carry:
    """State and taps on their way through the layers; ops take it and return it. None in its place is an empty one."""

    state: State | None = None
    taps: Taps | None = None
    kept: Any = None  # a family's own, of a Packed call: keys and values that later layers attend to
    media: Media | None = None  # of the batch, encoded
    routing: Routing | None = None  # of the batch

    pages = property(lambda self: None if self.state is None else self.state.pages)  # the cache of keys and values
    slots = property(lambda self: None if self.state is None else self.state.slots)  # the recurrent state

    def remember(self, **parts: Any) -> "Carry":
        """Replace parts of the state: pages, slots."""
        return replace(self, state=replace(self.state or State(), **parts))

    def watch(self, **taps: Any) -> "Carry":
        """Replace taps: hidden, router, attention."""
        return replace(self, taps=replace(self.taps or Taps(), **taps))


def begin(
    tokens: Int[Array, "..."], batch: Batch | None, state: State | None, taps: Taps | None, has: Sequence[str],
    takes: Sequence[str] = (),
) -> tuple[Batch, Carry]:  # fmt: skip
    """Give the batch of a call (one sequence per row if None) and the carry that enters its first layer.

    `has` names the taps that the model has, `takes` what it takes of a batch: "media", "rotary". What cannot be given is a
    ValueError: another tap, a tap of a Paged call, state in a Packed one, which would neither read nor write it, media of a
    model of text, and turns of three components of one that turns by positions.
    """
    batch = packed(tokens) if batch is None else batch
    for name in ("media", "rotary"):
        if name not in takes and getattr(batch, name) is not None:
            why = "turns tokens by their positions" if takes else "takes text alone"
            fix = "" if takes else ", or load a model that sees or hears"
            raise ValueError(f"batch.{name}: the model {why}; leave it out{fix}")
    wanted = [name for name in ("hidden", "router", "attention") if getattr(taps, name, None) is not None]
    if not isinstance(batch, Packed):
        if wanted:
            raise ValueError(f"taps.{wanted[0]} with a Paged batch: taps watch Packed calls; leave them out")
        return batch, Carry(state, media=batch.media)
    if state is not None:
        raise ValueError("a Packed batch leaves nothing in State (Pages, Slots); use a Paged batch, or state None")
    lacking = [name for name in wanted if name not in has]
    if lacking:
        why = {"router": "no experts", "attention": "no attention weights, its layers are recurrent"}[lacking[0]]
        raise ValueError(f"taps.{lacking[0]}: the model has {why}; its taps are {', '.join(has)}")
    routing = batch.routing
    if routing is not None:
        if "router" not in has:
            raise ValueError("batch.routing: the model has no experts; leave it out (`train.route`)")
        routing = replace(routing, routers=jnp.zeros((), jnp.int32))
    return batch, Carry(None, taps, media=batch.media, routing=routing)


def watch_hidden(carry: Carry, x: Float[Array, "... D"], place: Any) -> Carry:
    """Keep x if its place is one of those that are watched."""
    seen = carry.taps and carry.taps.hidden
    if not seen:
        return carry
    values = seen.values or tuple(jnp.zeros_like(x) for _ in seen.places)
    values = tuple(jnp.where(place == p, x, v) for p, v in zip(seen.places, values, strict=True))
    return carry.watch(hidden=replace(seen, values=values))


def router_load(experts: int) -> RouterLoad:
    """Watch the routers of a model with so many experts, from no tokens on."""
    return RouterLoad(jnp.zeros(experts), jnp.zeros(experts), jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))


def watch_router(
    batch: Batch, carry: Carry, logits: Float[Array, "... E"], probability: Float[Array, "... E"],
    experts: Int[Array, "... k"],
) -> Carry:  # fmt: skip
    """Add one layer's routing to the `RouterLoad` that is watched.

    `probability` sums to 1 over experts: softmax(logits), or sigmoid(logits) over its sum (arXiv:2412.19437, eq. 19).
    """
    load = carry.taps and carry.taps.router
    if not (load and isinstance(batch, Packed)):
        return carry
    real = (batch.segment_ids >= 0).astype(jnp.float32)
    total = lambda x: jnp.einsum("bte,bt->e", x, real)
    sums = choices(batch, experts, probability.shape[-1]), total(probability), real.sum()
    z = (jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2 * real).sum()
    none = None if load.dropped is None else jnp.zeros(())
    return carry.watch(router=jax.tree.map(jnp.add, load, RouterLoad(*sums, z, none)))


def choices(batch: Packed, experts: Int[Array, "B T k"], n: int) -> Float[Array, " E"]:
    """Count how often each of n experts was chosen, without padding."""
    real = (batch.segment_ids >= 0).astype(jnp.float32)
    return jnp.einsum("bte,bt->e", jax.nn.one_hot(experts, n).sum(-2), real)


def load_balancing(load: RouterLoad) -> Float[Array, ""]:
    """Compute E sum_e f_e P_e: f_e the share of tokens that chose e, P_e its mean probability.

    arXiv:2101.03961, equations 4 to 6, over all layers at once as in transformers; k for an even load of k experts.
    """
    share = jnp.maximum(load.tokens, 1)
    return (load.chosen / share * (load.probability / share)).sum() * load.chosen.size


def attention_weights(layers: Sequence[int], heads: int, tokens: tuple[int, ...]) -> AttentionWeights:
    """Watch `layers` of a model with so many heads, in a Packed call with tokens of shape (B, T)."""
    b, t = tokens
    return AttentionWeights(tuple(layers), _laid_out(jnp.zeros((len(layers), b, heads, t, t))))


def watch_attention(carry: Carry, layer: Any, weights: Callable[[], Float[Array, "B N T S"]]) -> Carry:
    """Keep weights() if its layer is one of those that are watched; else they are not computed."""
    seen = carry.taps and carry.taps.attention
    if not seen:
        return carry
    keep = lambda values, i: _laid_out(jax.lax.dynamic_update_index_in_dim(values, weights(), i, 0))
    if isinstance(layer, int):
        values = keep(seen.values, seen.layers.index(layer)) if layer in seen.layers else seen.values
    else:
        here = jnp.asarray(seen.layers) == layer
        values = jax.lax.cond(here.any(), keep, lambda values, i: values, seen.values, jnp.argmax(here))
    return carry.watch(attention=replace(seen, values=values))


def _laid_out(values: Array) -> Array:
    return shard(values, "watched rows attending tokens keys")
