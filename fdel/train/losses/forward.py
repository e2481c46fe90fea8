"""From a batch to what losses read: the model's hidden states, the labels, and the statistics of every token.

A batch is a dict of arrays with the rows in front, so that `accumulate` can divide it. Its keys:

    tokens  int[B T], or int[B 2 T] for pairs: [:, 0] the chosen and [:, 1] the rejected sequence
    mask    bool, as tokens: the tokens to be learnt (the completion's); absent: all of them
    lengths int, as tokens without T: the real tokens of each row, the rest is padding at its end; absent: all
    packed  ops.Packed for tokens [B T] with several sequences in a row; it replaces `lengths`
    media   ops.Media, what stands in the place of tokens, each of its arrays with the rows (pairs) in front. Tokens in
            whose place something stands are not learnt
    rotary  int, as tokens with [T 3] in T's place: see `ops.Packed`
    places  int, as tokens with K in T's place, optional (`learnt_places`): where next tokens are learnt. Losses from
            `token_scores` and samples then compute the output projection there alone: long prompts cost none
    routing ops.Routing, what a step does to the trained model's routers; `train.route` adds it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.ops.layers import remat_policy
from fdel.ops.shard import row_lookup
from fdel.train.losses.head import CHUNK, token_stats
from fdel.train.losses.penalties import Penalties, change, turns_since
from fdel.train.losses.stats import IGNORE, TokenStats, check_range

Batch = Mapping[str, Any]
SEEN = ("media", "rotary")  # the keys of a batch that shows something
Ids = Int[Array, "B T"]
NONE = Penalties()


def shift(tokens: Ids, segment_ids: Ids, mask: Bool[Array, "B T"] | Ids | None = None) -> Ids:
    """Label every token with the next one of its segment; IGNORE at the last token of a segment and where id < 0.

    `mask` tells which tokens are to be learnt, all if None: the completion's, or the assistant's.
    """
    following = lambda x, last: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)
    learn = (following(segment_ids, -1) == segment_ids) & (segment_ids >= 0)
    if mask is not None:
        learn &= following(mask, 0) != 0
    return jnp.where(learn, following(tokens, 0), IGNORE)


def rows(batch: Batch) -> tuple[Int[Array, "R T"], ops.Packed, Int[Array, "R T"]]:
    """Flatten a batch's leading axes into rows: (tokens, what each may attend to, labels as from `shift`)."""
    flat = lambda x, rank: x.reshape(-1, *x.shape[x.ndim - rank :])
    tokens = flat(batch["tokens"], 1)
    lengths = flat(batch["lengths"], 0) if "lengths" in batch else None
    packed = batch["packed"] if "packed" in batch else ops.packed(tokens, lengths)
    mask = flat(batch["mask"], 1) if "mask" in batch else None
    if "media" in batch:
        media = jax.tree.map(lambda x: x.reshape(-1, *x.shape[batch["tokens"].ndim - 1 :]), batch["media"])
        packed, own = replace(packed, media=media), media.index < 0
        mask = own if mask is None else own & (mask != 0)
    if "rotary" in batch:
        packed = replace(packed, rotary=flat(batch["rotary"], 2))
    if "routing" in batch:
        packed = replace(packed, routing=_of_rows(batch["routing"], len(tokens)))
    return tokens, packed, shift(tokens, packed.segment_ids, mask)


def _of_rows(routing: ops.Routing, n: int) -> ops.Routing:
    """Give each of n rows of tokens a key, of those of the batch's: a pair has one for each side."""
    if routing.keys is None:
        return routing
    own = lambda data, i: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), i))
    each = jax.vmap(jax.vmap(own, (None, 0)), (0, None))(routing.keys, jnp.arange(n // len(routing.keys)))
    return replace(routing, keys=each.reshape(n, -1))


def undisturbed(batch: Batch) -> Batch:
    """Give the batch for a model that is not trained, a reference or a teacher: nothing is done to its routers."""
    return {name: x for name, x in batch.items() if name != "routing"}


def still(cfg: Any) -> Any:
    """Give the Config for losses, without the noise on routers (`jitter`) that a step adds to them by `train.route`."""
    if not getattr(cfg, "jitter", 0):
        return cfg
    own = "jitter" in type(cfg).__dataclass_fields__  # else it is that of its language model
    return replace(cfg, jitter=0.0) if own else replace(cfg, text=still(cfg.text))


class Activations(NamedTuple):
    """What a forward pass leaves: its final hidden states [R T D], and what was asked for beside them."""

    hidden: Array
    balance: Float[Array, " numbers"] | None  # of its router, see `router_terms`
    states: tuple[Array, ...]  # hidden states at the places asked for
    attention: tuple[Float[Array, "R N T S"], ...]  # softmax of the layers asked for, in float32


def forward_pass(
    family: ModuleType,
    cfg: Any,
    *,
    router: bool = False,
    places: Sequence[int] = (),
    attention: Sequence[int] = (),
    remat: str | None = None,
) -> Callable[[Any, Array, ops.Packed], Activations]:
    """Build `forward(params, tokens int[R T], packed) -> Activations`, the forward pass of every loss.

    `router` asks for the balance of a mixture of experts, in which padding does not count (`router_terms`); a model
    without experts is then a ValueError. `places` are transformers' indices of hidden states: 0 enters the first layer,
    i > 0 is what layer i - 1 returns, the last one the final hidden states; negative ones count from there. `attention`
    names layers whose softmax is wanted, [N T S] for each row, among those that attend; a model without any is a
    ValueError. `remat` is the policy of `family.hidden` ("dots_saveable", ...), by which the backward pass computes
    activations again. A batch whose routers have a capacity gives the balance too. A Config with `jitter` is a ValueError:
    that noise is of a training step, so it comes with the batch (`train.route`), and the Config is to be `still`.
    """
    if router and not getattr(cfg, "experts", None):
        raise ValueError(
            f"router_aux_loss_coef or router_z_loss_coef is not 0, but {family.__name__} has no experts; set it to 0"
        )
    if getattr(cfg, "jitter", 0):
        key = type(getattr(cfg, "text", cfg)).__dataclass_fields__["jitter"].metadata.get("key", "jitter")
        raise ValueError(
            f"{key}={cfg.jitter} in the model's config.json: a loss has no noise on what routers read, a step has. Put "
            f"train.route(g, jitter={cfg.jitter}) around gradients, and give the loss losses.forward.still(cfg)"
        )
    if remat is not None:
        remat_policy(remat)
    inside = _indices("hidden states", places, cfg.layers + 1, f"{cfg.layers} layers") if places else ()
    attending = attention_layers(family, cfg) if attention else 0
    among = _indices("attention weights", attention, attending, f"{attending} layers that attend")
    watch = tuple(sorted(set(among)))

    def forward(params: Any, tokens: Array, packed: ops.Packed) -> Activations:
        drops = packed.routing is not None and packed.routing.capacity is not None
        taps = ops.Taps(
            ops.HiddenStates(inside) if inside else None,
            ops.router_load(cfg.experts) if router or drops else None,
            ops.attention_weights(watch, cfg.heads, tokens.shape) if watch else None,
        )
        x, _, taps = family.hidden(params, tokens, cfg, packed, None, taps, remat=remat)
        states = taps.hidden.values if inside else ()
        states = tuple(x if place == cfg.layers else s for place, s in zip(inside, states, strict=True))
        weights = tuple(taps.attention.values[watch.index(i)] for i in among)
        return Activations(x, _balance(taps.router, drops) if router or drops else None, states, weights)

    return forward


def attention_layers(family: ModuleType, cfg: Any) -> int:
    """Count the layers that attend, with one softmax per head; ValueError for a family that has none."""
    pages = family.state_spec(cfg, pages=1, rows=1).pages
    if pages is None and "attention" in family.hidden.taps:  # an encoder
        return cfg.layers
    if pages is None:
        name = family.__name__.rpartition(".")[2]
        raise ValueError(f"{name} has no attention weights, its layers are recurrent; match hidden states instead")
    return cfg.layers if isinstance(pages, tuple) else pages.k.shape[0]


def next_tokens(family: ModuleType, cfg: Any) -> None:
    """Refuse (ValueError) a model whose tokens see later ones: it would copy the next token, not predict it.

    A family that is `hidden` and `head` alone, which is all that a loss calls, is taken at its word.
    """
    if not hasattr(family, "state_spec"):
        return
    state = family.state_spec(cfg, pages=1, rows=1)
    if state.pages is None and state.slots is None:
        name = family.__name__.rpartition(".")[2]
        why = "its tokens see later ones, so there is no next token to predict"
        raise ValueError(f"{name}: {why}; train it on embeddings or classes, a diffusion model by losses.diffusion")


def _indices(what: str, asked: Sequence[int], n: int, layers: str) -> tuple[int, ...]:
    wrong = [i for i in asked if not -n <= i < n]
    if wrong:
        raise ValueError(f"{what} {wrong} of a model of {layers}; expected indices from {-n} to {n - 1}")
    return tuple(i % n for i in asked)


def _balance(load: ops.RouterLoad, drops: bool) -> Float[Array, " numbers"]:
    n, choices = jnp.maximum(load.tokens, 1), load.chosen.sum()
    busiest = load.chosen.max() * load.chosen.size / jnp.maximum(choices, 1)
    return jnp.stack([ops.load_balancing(load), load.z / n, busiest, *([load.dropped, choices] if drops else ())])


def router_terms(
    total: Array, sums: Mapping[str, Any], balance: Float[Array, " numbers"] | None, aux: float, z: float = 0.0
) -> tuple[Array, dict[str, Any]]:
    """Add aux times `ops.load_balancing` and z times the z-loss to each unit of weight, as transformers and TRL do.

    `balance` holds both, of a microbatch, and the load of the busiest expert over the mean load, all over all layers
    together. The z-loss is the mean of logsumexp(logits)^2 over tokens and layers (arXiv:2202.08906, equation 5). The sums
    "aux_loss", "router_z_loss" and "router_load" are the three times the weight; None adds nothing. Where routers have a
    capacity, two more numbers are "router_dropped": choices that no expert took, and all choices. The other three are of
    what was chosen, as in arXiv:2101.03961.
    """
    if balance is None:
        return total, dict(sums)
    found = balance[:3] * sums["weight"]
    named: dict[str, Any] = dict(zip(("aux_loss", "router_z_loss", "router_load"), found, strict=True))
    if len(balance) > 3:
        named["router_dropped"] = balance[3], balance[4]
    return total + aux * found[0] + z * found[1], {**sums, **named}


def learnt_places(batch: Batch, most: int) -> Int[np.ndarray, "... K"]:
    """Find the places of each row whose next token is learnt, on the host; T, which is none, fills up to `most`.

    A row with more of them is a ValueError: what is not named would count, with a log-probability of 0.
    >>> losses.forward.learnt_places({"tokens": jnp.ones((1, 4)), "mask": jnp.array([[0, 0, 1, 1]])}, 3)
    array([[1, 2, 4]], dtype=int32)
    """
    learnt = np.asarray(rows(batch)[2]) >= 0
    if (found := learnt.sum(-1).max()) > most:
        raise ValueError(f"most={most}, but a row has {found} tokens to be learnt; give at least as many places")
    t = learnt.shape[-1]
    at = np.sort(np.where(learnt, np.arange(t, dtype=np.int32), np.int32(t)), -1)[:, :most]
    at = np.pad(at, ((0, 0), (0, most - at.shape[1])), constant_values=t)
    return at.reshape(*batch["tokens"].shape[:-1], most)


def place_stats(
    hidden: Float[Array, "R T D"], head: ops.Head, labels: Ids, batch: Batch, chunk: int, penalties: Penalties = NONE
) -> TokenStats:
    """Compute `token_stats` at a batch's places, if it names them, and 0 elsewhere, after `losses.penalties`."""
    t = labels.shape[1]

    def stats_at(x: Array, asked: Array, places: Array) -> TokenStats:
        how: dict[str, Any] = {}
        if penalties:
            tokens, packed, _ = rows(batch)
            vocab = jax.eval_shape(ops.logits, x[0, :1], head).shape[-1]
            turns = [batch["turns"].reshape(labels.shape)] if "turns" in batch else []
            since = row_lookup(turns_since, labels, *turns)
            changed = change(penalties, head.temperature, tokens, packed, since, places, vocab)
            how = dict(zip(("change", "data", "beside"), changed, strict=True))
        return token_stats(x, head, asked, chunk=chunk, **how)

    if "places" not in batch:
        return stats_at(hidden, labels, jnp.broadcast_to(jnp.arange(t), labels.shape))
    places = batch["places"].reshape(len(labels), -1)

    def there(hidden: Array, labels: Array, places: Array) -> tuple[Array, Array]:
        at = jnp.minimum(places, t - 1)
        asked = jnp.where(places < t, jnp.take_along_axis(labels, at, 1), IGNORE)
        return jnp.take_along_axis(hidden, at[..., None], 1), asked

    def back(places: Array, *stats: Array) -> tuple[Array, ...]:
        row, zero = jnp.arange(len(places))[:, None], jnp.zeros((len(places), t))
        return tuple(zero.astype(x.dtype).at[row, places].set(x, mode="drop") for x in stats)

    x, asked = row_lookup(there, hidden, labels, places)
    stats = stats_at(x, asked, places)
    return TokenStats(*row_lookup(back, places, *stats))


class TokenScores(NamedTuple):
    """Statistics of every token and its weight, 1 if it is to be learnt or 0, as a batch's tokens; the routers' balance."""

    stats: TokenStats
    weights: Float[Array, "... T"]
    balance: Float[Array, " numbers"] | None


def token_scores(
    family: ModuleType,
    cfg: Any,
    *,
    chunk: int = CHUNK,
    router: bool = False,
    remat: str | None = None,
    temperature: float = 1.0,
    **penalties: float,
) -> Callable[[Any, Batch], TokenScores]:
    """Build `scores(params, batch) -> TokenScores`; `router` and `remat` are those of `forward_pass`.

    Place t holds what the model says there of token t + 1; statistics are 0 where the weight is. They are those of
    softmax(logits / temperature), after the penalties that are fields of `penalties.Penalties`.
    """
    check_range(1, chunk=chunk)
    check_range(above=True, temperature=temperature)
    asked = Penalties(**penalties)
    next_tokens(family, cfg)
    forward = forward_pass(family, cfg, router=router, remat=remat)

    def scores(params: Any, batch: Batch) -> TokenScores:
        tokens, packed, labels = rows(batch)
        out = forward(params, tokens, packed)
        head = family.head(params, cfg)
        head = head if temperature == 1.0 else replace(head, temperature=temperature)
        stats = place_stats(out.hidden, head, labels, batch, chunk, asked)
        back = lambda a: a.reshape(batch["tokens"].shape)
        return TokenScores(jax.tree.map(back, stats), back(labels >= 0).astype(jnp.float32), out.balance)

    return scores
