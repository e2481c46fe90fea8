"""Self-distillation: a model learns its own samples from itself, told more than it was asked (SDPO, arXiv:2601.20802).

    loss = losses.self_distill(llama, cfg)
    step = train.sync_reference(train.update(train.normalize(train.grads(loss)), optimizer, reads=("reference",)), 0.05, 1)

Beside the columns of `losses.sampled`, "places" among them, a batch has "told_tokens", "told_mask", "told_lengths" and
"told_places": rows in which each sample's drawn tokens stand after another prompt, such as the task with a solution of it.
Where a row's mask is False nobody was told more, and nothing is distilled.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from fdel import ops
from fdel.ops.shard import row_lookup
from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Activations, Batch, forward_pass, next_tokens, place_stats, rows
from fdel.train.losses.head import CHUNK, logits_sum
from fdel.train.losses.on_policy import sampled_kl
from fdel.train.losses.policy import TERMS, Policy, policy
from fdel.train.losses.sampled import Sums, routers_of, sampled_tokens
from fdel.train.losses.sequences import sequence_sum
from fdel.train.losses.stats import IGNORE, check_call, check_range

TOLD = "told_"
AVERAGES = {"means": "sequences", "tokens": "tokens"}  # of `policy.TERMS`, and of `sampled_kl`


def self_distill(
    family: ModuleType, cfg: Any, *, target: Callable[[Array, Array], Array] | None = None,
    weights: tuple[float, float] = (1.0, 0.0), clip: float | None = 2.0, options: Policy | None = None,
    temperature: float = 1.0, chunk: int = CHUNK, remat: str | None = None, **routers: float,
) -> Callable[..., tuple[Array, Sums]]:  # fmt: skip
    """Build `loss(params, batch, given) -> (sum, sums)`: how far the model is from itself, told more, and the policy loss.

    `weights` are those of the two. The teacher's parameters are given as "reference"; without one they are the model's own,
    without gradient. `target` compares whole distributions per token, as in `losses.distillation`; None compares drawn
    tokens (`sampled_kl`). `clip` is that of `sampled_kl`. Both are means over what `options` say, samples or tokens, also
    those of which nobody was told more. `routers` are the coefficients of `policy_objective`, for the samples' rows alone.
    ValueError for options that have no such means.
    """
    options = Policy(loss_type="grpo") if options is None else options
    average = _average(options)
    numbers: dict[str, Any] = {f"weights[{i}]": x for i, x in enumerate(weights)}
    check_range(**numbers)
    check_range(above=True, clip=clip, temperature=temperature)
    if target is not None:
        check_call(target, *[(1, getattr(cfg, "vocab", 1000))] * 2)
    next_tokens(family, cfg)
    router, with_routers = routers_of(**routers)
    forward, teach = forward_pass(family, cfg, router=router, remat=remat), forward_pass(family, cfg)

    def head(params: Any) -> ops.Head:
        return replace(family.head(params, cfg), temperature=temperature)

    def distance(z: Array, stats: Any, share: Array, old: Array, y: Array, teacher: ops.Head) -> tuple[Array, Sums]:
        found = jnp.where(share > 0, target(z, ops.logits(y, teacher)), 0)  # type: ignore[misc]
        return (share * _ratio(stats.logp, old, clip) * found).sum(), {}

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        told = {k.removeprefix(TOLD): x for k, x in batch.items() if k.startswith(TOLD)}
        if not told or not all("places" in b for b in (batch, told)):
            raise ValueError(
                f"the batch has {sorted(batch)}; expected places, and told_tokens, told_mask and told_places"
            )
        teacher = stop_gradient(given["reference"] if "reference" in given else params)
        labels, (hidden, balance, *_) = _read(forward, params, batch)
        wanted, (told_hidden, *_) = _read(teach, teacher, told)
        stats = place_stats(hidden, head(params), labels, batch, chunk)
        t = sampled_tokens({"logp": stats.logp, "entropy": stats.entropy}, batch)
        total, sums = policy(t, options)
        there = _moved((wanted >= 0).astype(jnp.float32), told, batch)
        if target is None:
            told_logp = place_stats(told_hidden, head(teacher), wanted, told, chunk).logp
            known = jnp.where(there > 0, _moved(told_logp, told, batch), stop_gradient(t.logp))
            far, kl = sampled_kl(t, known, average=average, clip=clip)
            sums |= {"kl": kl["kl"]}
        else:
            share = t.mask * there / (1 if average == "tokens" else jnp.maximum(sequence_sum(t.mask, t.segments), 1))
            at = lambda x, b, fill=0: _taken(x, b["places"], fill)
            data = at(share, batch), at(t.old, batch), at(told_hidden, told)
            how: dict[str, Any] = {"fixed": (head(teacher),), "chunk": chunk}
            far, _ = logits_sum(distance, at(hidden, batch), head(params), at(labels, batch, IGNORE), *data, **how)
        sums |= {"distillation_loss": far, "self_distillation/told": (there.sum(), t.mask.sum())}
        total = weights[0] * far + (weights[1] * total if weights[1] else 0)
        return with_routers(total, sums, {} if balance is None else {"balance": balance[None]})

    return loss


def _average(options: Policy) -> str:
    """Say of what the loss is a mean, as `sampled_kl` does; ValueError if that is neither samples nor tokens."""
    average = AVERAGES.get(TERMS[options.loss_type][1])
    if average is None or options.coupled or options.beta:
        raise ValueError(
            f"loss_type={options.loss_type!r} with entropy_coef={options.entropy_coef}, beta={options.beta} and "
            f"top_entropy_quantile={options.top_entropy_quantile}; self-distillation has none of the three, and a "
            "mean over samples ('grpo') or tokens ('dapo')"
        )
    return average


def _read(forward: Callable, params: Any, batch: Batch) -> tuple[Array, Activations]:
    """Give what is to be predicted at each token of a batch, and what the forward pass leaves there."""
    tokens, packed, labels = rows(batch)
    return labels, forward(params, tokens, packed)


def _ratio(logp: Array, old: Array, clip: float | None) -> Array:
    """Weigh a token by new / old, at most `clip`, without gradient."""
    if clip is None:
        return jnp.ones_like(logp)
    return stop_gradient(jnp.minimum(jnp.exp(jnp.clip(logp - old, -20, 20)), clip))


def _taken(x: Array, places: Array, fill: Any = 0) -> Array:
    """Take what stands at the places of rows, [R K ...]; `fill` where a place is none."""

    def take(x: Array, places: Array) -> Array:
        at = jnp.minimum(places, x.shape[1] - 1).reshape(*places.shape, *(1,) * (x.ndim - 2))
        none = (places >= x.shape[1]).reshape(at.shape)
        return jnp.where(none, jnp.asarray(fill, x.dtype), jnp.take_along_axis(x, at, 1))

    return row_lookup(take, x, places)


def _moved(x: Array, told: Batch, batch: Batch) -> Array:
    """Move numbers from the places of told rows to those of the samples, whose tokens they are about; else 0."""
    shape = batch["tokens"].shape

    def put(x: Array, places: Array) -> Array:
        return jnp.zeros((len(x), shape[1]), x.dtype).at[jnp.arange(len(x))[:, None], places].set(x, mode="drop")

    return row_lookup(put, _taken(x, told["places"]), batch["places"])
