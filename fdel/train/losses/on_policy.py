"""On-policy distillation of sampled tokens: what a teacher says of the tokens that the student drew, and of no others.

    g = train.accumulate(train.grads(losses.sampled_distill(llama, cfg, llama, teacher_cfg)), n)
    step(state, batch, teacher=weights)

Its other forms are losses that stand elsewhere, on samples of the student (GKD: of both) or the teacher (seq_kd):
the whole distributions' divergence with any beta is `distill`, a stored part of the teacher's `sparse_distill`. IW-OPD is
`taught_gradient` with Policy(loss_type="reinforce") and `prefix_weighted` advantages; MiniLLM has those of
`rollout.advantages.reward_to_go(..., mean=True)`, and `distill` with beta=1 added to the loss. A
teacher that is the model itself, told more: `self_distillation`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from fdel.train.given import NOTHING, Given, lookup
from fdel.train.losses.forward import Batch, still, undisturbed
from fdel.train.losses.policy import Policy, policy
from fdel.train.losses.sampled import Sums, at_next, policy_outputs, routers_of, sampled_tokens
from fdel.train.losses.sequences import PerToken, Segments, Tokens, sequence_sum, starts
from fdel.train.losses.stats import check_range

AVERAGES = ("tokens", "sequences")


def sampled_kl(
    t: Tokens, teacher: PerToken, *, average: str = "tokens", clip: float | None = None
) -> tuple[Array, Sums]:
    """Sum (log student - log teacher) * log student over drawn tokens, the first factor without gradient.

    Its gradient is that of the reverse KL divergence, estimated from the student's own samples. `clip` corrects for samples
    of older weights: each token weighs new / old, at most `clip` (SDPO: 2). `average` says of what the loss is the mean:
    all tokens, or sequences, each the mean of its tokens (SDPO).
    >>> one = jnp.ones((1, 2))
    >>> sampled_kl(Tokens(-one, one, one, one, -one), -2 * one)[0]
    Array(-2., dtype=float32)
    """
    if average not in AVERAGES:
        raise ValueError(f"average={average!r}; expected one of {', '.join(AVERAGES)}")
    check_range(above=True, clip=clip)
    drift = stop_gradient(jnp.where(t.mask > 0, t.logp - teacher, 0))
    term = drift * t.logp
    if clip is not None:
        ratio = jnp.exp(jnp.clip(jnp.where(t.mask > 0, t.logp - t.old, 0), -20, 20))
        term = term * stop_gradient(jnp.minimum(ratio, clip))
    lengths = sequence_sum(t.mask, t.segments)
    sequences = (starts(t.segments, t.mask.shape) & (lengths > 0)).sum(dtype=jnp.float32)
    share = t.mask if average == "tokens" else t.mask / jnp.maximum(lengths, 1)
    tokens = t.mask.sum()
    sums: Sums = {"weight": tokens if average == "tokens" else sequences}
    sums |= {"kl": (drift.sum(), tokens), "entropy": ((t.mask * t.entropy).sum(), tokens)}
    return jnp.where(t.mask > 0, share * term, 0).sum(), sums


def sampled_distill(
    family: ModuleType,
    cfg: Any,
    teacher: ModuleType | None = None,
    teacher_cfg: Any = None,
    *,
    average: str = "tokens",
    clip: float | None = None,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
    **settings: Any,
) -> Callable[..., tuple[Array, Sums]]:
    """Build `loss(params, batch, given) -> (sum, sums)` of `sampled_kl`; `settings` are those of `policy_outputs`.

    Routers' coefficients are those of `policy_objective`. The teacher's parameters are given as "teacher"; without a
    teacher, batch["teacher_logps"] are its log-probabilities, as tokens, each at its token. The batch is that of
    `losses.sampled`, without advantages.
    """
    alone: dict[str, Any] = settings | {"reference": False}
    router, with_routers = routers_of(router_aux_loss_coef, router_z_loss_coef)
    outputs = policy_outputs(family, cfg, **alone | {"router": router})
    told = None if teacher is None else policy_outputs(teacher, still(teacher_cfg), **alone)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        o = outputs(params, batch, given)
        t = sampled_tokens(o, {"advantages": jnp.zeros(o["logp"].shape), **batch})
        if told is None:
            theirs = at_next(batch, "teacher_logps", t.mask)
        else:
            theirs = told(stop_gradient(lookup(given, "teacher")), undisturbed(batch))["logp"]
        return with_routers(*sampled_kl(t, theirs, average=average, clip=clip), o)

    return loss


def taught_gradient(
    family: ModuleType, cfg: Any, teacher: ModuleType, teacher_cfg: Any, advantage: Callable[[PerToken, Tokens], PerToken],
    options: Policy | None = None, router_aux_loss_coef: float = 0.0, router_z_loss_coef: float = 0.0, **settings: Any,
) -> Callable[..., tuple[Array, Sums]]:  # fmt: skip
    """Build `loss(params, batch, given) -> (sum, sums)` of `losses.policy` whose advantages a teacher adds to.

    `advantage(d, tokens)` makes them of d = log teacher - log student of drawn tokens, both without gradient, the student's
    by the weights before the first step on this batch. Teacher, batch and `settings` are as in `sampled_distill`, the
    batch's "advantages" 0 where there are none; routers' coefficients are those of `policy_objective`. ValueError for
    options that are `coupled`.
    """
    options = Policy() if options is None else options
    if options.coupled:
        raise ValueError(
            "top_entropy_quantile and such an entropy_coef couple rows; a teacher's advantages are per row"
        )
    router, with_routers = routers_of(router_aux_loss_coef, router_z_loss_coef)
    outputs = policy_outputs(family, cfg, **settings | {"reference": options.beta > 0, "router": router})
    told = policy_outputs(teacher, still(teacher_cfg), **settings | {"reference": False})

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        o = outputs(params, batch, given)
        t = sampled_tokens(o, batch if "advantages" in batch else {"advantages": jnp.zeros(o["logp"].shape), **batch})
        theirs = stop_gradient(told(lookup(given, "teacher"), undisturbed(batch))["logp"])
        drift = jnp.where(t.mask > 0, theirs - stop_gradient(t.old), 0)
        total, sums = policy(t._replace(advantages=t.advantages + advantage(drift, t)), options)
        return with_routers(total, sums | {"kl": (-drift.sum(), t.mask.sum())}, o)

    return loss


def prefix_weighted(
    advantages: PerToken, mask: PerToken, *, gamma: float = 0.5, eps: float = 1e-8, segments: Segments = None
) -> PerToken:
    """Weigh advantages log teacher - log student, early tokens more (IW-OPD, arXiv:2606.22600).

    A token weighs 1 + gamma * (1 - share), the share of its sequence's absolute advantages that came before it. All are
    as `mask`, 1 at drawn tokens.
    >>> prefix_weighted(jnp.array([[1.0, -1.0]]), jnp.ones((1, 2)))
    Array([[ 1.5 , -1.25]], dtype=float32)
    """
    check_range(gamma=gamma)
    check_range(above=True, eps=eps)
    size = jnp.where(mask > 0, jnp.abs(advantages), 0)
    running = jnp.cumsum(size, -1) - size
    begun = sequence_sum(jnp.where(starts(segments, mask.shape), running, 0), segments)  # what earlier sequences had
    share = (running - begun) / jnp.maximum(sequence_sum(size, segments), eps)
    return jnp.where(mask > 0, (1 + gamma * (1 - share)) * advantages, 0)
