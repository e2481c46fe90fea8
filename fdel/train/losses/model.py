"""From a batch to what losses read: the model's hidden states, the labels, and the statistics of every token.

A batch is a dict of arrays with the rows in front, so that `accumulate` can divide it. Its keys:

    tokens  int[B T], or int[B 2 T] for pairs: [:, 0] the chosen and [:, 1] the rejected sequence
    mask    bool, as tokens: the tokens to be learnt (the completion's); absent: all of them
    lengths int, as tokens without T: the real tokens of each row, the rest is padding at its end; absent: all
    packed  ops.Packed for tokens [B T] with several sequences in a row; it replaces `lengths`
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.ops.layers import remat_policy
from fdel.train.losses.head import CHUNK, token_stats
from fdel.train.losses.stats import IGNORE, TokenStats, check_range

Batch = Mapping[str, Any]


def shift(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
) -> Int[Array, "B T"]:
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
    return tokens, packed, shift(tokens, packed.segment_ids, mask)


class Ran(NamedTuple):
    """What running a model leaves: its final hidden states [R T D], and what was asked for beside them."""

    hidden: Array
    balance: Array | None  # `ops.load_balancing` of its router
    states: tuple[Array, ...]  # hidden states at the places asked for
    attention: tuple[Float[Array, "R N T S"], ...]  # softmax of the layers asked for, in float32


def run(
    family: ModuleType,
    cfg: Any,
    *,
    router: bool = False,
    places: Sequence[int] = (),
    attention: Sequence[int] = (),
    **options: Any,
) -> Callable[[Any, Array, ops.Packed], Ran]:
    """Build `run(params, tokens int[R T], packed) -> Ran`, the forward pass of every loss.

    `router` asks for the balance of a mixture of experts, in which padding does not count; a model without experts is then
    a ValueError. `places` are transformers' indices of hidden states: 0 enters the first layer, i > 0 is what layer
    i - 1 returns, the last one the final hidden states; negative ones count from there. `attention` names layers whose
    softmax is wanted, [N T S] for each row, among those that attend; a model without any is a ValueError. `options` go to
    `family.hidden`. A router with jitter is a ValueError: its noise would need random numbers in every layer.
    """
    if router and not hasattr(cfg, "experts"):
        raise ValueError(f"router_aux_loss_coef is not 0, but {family.__name__} has no experts; set it to 0")
    if getattr(cfg, "jitter", 0):
        raise ValueError(
            f"router_jitter_noise={cfg.jitter} in the model's config.json: training with noise on the router's input is "
            "not in this version; set it to 0 to train without"
        )
    if options.get("remat") is not None:
        remat_policy(options["remat"])
    known = inspect.signature(family.hidden).parameters
    if wrong := [] if any(p.kind == p.VAR_KEYWORD for p in known.values()) else sorted(options.keys() - known.keys()):
        raise ValueError(f"unknown options {', '.join(wrong)}; the model's hidden takes {', '.join(known)}")
    inside = _indices("hidden states", places, cfg.layers + 1, f"{cfg.layers} layers") if places else ()
    attending = attention_layers(family, cfg) if attention else 0
    among = _indices("attention weights", attention, attending, f"{attending} layers that attend")
    watch = tuple(sorted(set(among)))

    def ran(params: Any, tokens: Array, packed: ops.Packed) -> Ran:
        watched: dict[str, Any] = {"load": ops.router_load(cfg.experts)} if router else {}
        watched |= {"hidden": ops.HiddenStates(inside)} if inside else {}
        watched |= {"pages": ops.attention_weights(watch, cfg.heads, tokens.shape)} if watch else {}
        x, state = family.hidden(params, tokens, cfg, packed, *((watched,) if watched else ()), **options)
        states = state["hidden"].values if inside else ()
        states = tuple(x if place == cfg.layers else s for place, s in zip(inside, states, strict=True))
        weights = tuple(state["pages"].values[watch.index(i)] for i in among)
        return Ran(x, ops.load_balancing(state) if router else None, states, weights)

    return ran


def attention_layers(family: ModuleType, cfg: Any) -> int:
    """Count the layers that attend, with one softmax per head; ValueError for a family that has none."""
    state = family.state_spec(cfg, pages=1, rows=1)
    pages = state.get("pages") if isinstance(state, Mapping) else state
    if not isinstance(pages, ops.Pages):
        name = family.__name__.rpartition(".")[2]
        raise ValueError(f"{name} has no attention weights, its layers are recurrent; match hidden states instead")
    return pages.k.shape[0]


def _indices(what: str, asked: Sequence[int], n: int, layers: str) -> tuple[int, ...]:
    wrong = [i for i in asked if not -n <= i < n]
    if wrong:
        raise ValueError(f"{what} {wrong} of a model of {layers}; expected indices from {-n} to {n - 1}")
    return tuple(i % n for i in asked)


def add_balance(total: Array, sums: Mapping[str, Any], balance: Array | None, coef: float) -> tuple[Array, dict]:
    """Add coef times the router's balance to each unit of weight, as transformers and TRL do; "aux_loss" is its sum."""
    if balance is None:
        return total, dict(sums)
    aux = balance * sums["weight"]
    return total + coef * aux, {**sums, "aux_loss": aux}


class Scored(NamedTuple):
    """Statistics of every token and its weight, 1 if it is to be learnt or 0, as a batch's tokens; `Ran.balance`."""

    stats: TokenStats
    weights: Float[Array, "... T"]
    balance: Array | None


def score(family: ModuleType, cfg: Any, *, chunk: int = CHUNK, **options: Any) -> Callable[[Any, Batch], Scored]:
    """Build `score(params, batch) -> Scored`; `options` go to `run`.

    Place t holds what the model says there of token t + 1; statistics are 0 where the weight is.
    """
    check_range(1, chunk=chunk)
    forward = run(family, cfg, **options)

    def scored(params: Any, batch: Batch) -> Scored:
        tokens, packed, labels = rows(batch)
        out = forward(params, tokens, packed)
        stats = token_stats(out.hidden, family.head(params, cfg), labels, chunk=chunk)
        back = lambda a: a.reshape(batch["tokens"].shape)
        return Scored(jax.tree.map(back, stats), back(labels >= 0).astype(jnp.float32), out.balance)

    return scored
