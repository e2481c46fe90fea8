"""PPO: a policy that learns with a critic, which tells the value of what stands before each token.

    loss = losses.ppo(llama, cfg)  # params: {"model": ..., "value": ...}, see `models.heads`
    g = train.accumulate(train.grads(loss), n)

The critic is a head on the policy's own hidden states, or a model of its own: params are then {"policy": the family's,
"critic": a model with a head of one label}. Beside the keys of `losses.sampled` a batch has, as tokens, at the token before
which the value was taken,

    returns  what was gained from there on (`rollout.advantages.gae`)
    values   the critic's values when it was sampled (`token_values`), from which new ones are clipped
    kl       an estimate of the divergence from the reference, optional: a metric
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from fdel.models import heads
from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Batch, forward_pass, next_tokens, place_stats, rows
from fdel.train.losses.head import CHUNK
from fdel.train.losses.penalties import Penalties
from fdel.train.losses.policy import TERMS, Policy, policy
from fdel.train.losses.sampled import Outputs, Sums, at_next, routers_of, sampled_tokens
from fdel.train.losses.stats import check_range

Critic = tuple[ModuleType, Any] | None  # (family, cfg) of a critic of its own
PerToken = Float[Array, "R T"]


def clipped_square(
    values: PerToken, old: PerToken, returns: PerToken, clip: float | None = 0.2
) -> tuple[PerToken, Bool[Array, "R T"]]:
    """Compute max((V - R)^2, (clip(V, old - clip, old + clip) - R)^2) / 2, and where the second is larger.

    A value moves away from the old one by no more than `clip` (PPO; None: by what it wants).
    >>> clipped_square(jnp.array([[1.0]]), jnp.array([[0.0]]), jnp.array([[1.0]]))[0]  # 0.8 is missing
    Array([[0.32]], dtype=float32)
    """
    free = (values - returns) ** 2
    if clip is None:
        return free / 2, jnp.zeros_like(free, bool)
    bounded = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
    return jnp.maximum(free, bounded) / 2, bounded > free


def value_outputs(
    family: ModuleType,
    cfg: Any,
    *,
    critic: Critic = None,
    temperature: float = 1.0,
    router: bool = False,
    chunk: int = CHUNK,
    remat: str | None = None,
    **penalties: float,
) -> Callable[..., Outputs]:
    """Build `outputs(params, batch, given)`: those of `policy_outputs`, and "value" [R T], the critic's at each place."""
    check_range(1, chunk=chunk)
    check_range(above=True, temperature=temperature)
    asked = Penalties(**penalties)
    next_tokens(family, cfg)
    forward = forward_pass(family, cfg, router=router, remat=remat)
    look = None if critic is None else forward_pass(*critic, remat=remat)

    def outputs(params: Any, batch: Batch, given: Given = NOTHING) -> Outputs:
        tokens, packed, labels = rows(batch)
        mine, judge = (params["model"], params) if look is None else (params["policy"], params["critic"])
        if heads.count(judge) != 1:
            raise ValueError(
                f"the critic has {sorted(judge)}, {heads.count(judge)} labels; expected a head of one, as 'value'"
            )
        x, balance = forward(mine, tokens, packed)[:2]
        seen = x if look is None else look(judge["model"], tokens, replace(packed, routing=None)).hidden
        head = family.head(mine, cfg)
        head = head if temperature == 1.0 else replace(head, temperature=temperature)
        stats = place_stats(x, head, labels, batch, chunk, asked)
        out = {"logp": stats.logp, "entropy": stats.entropy, "value": heads.outputs(judge, seen)[..., 0]}
        return out if balance is None else out | {"balance": jnp.broadcast_to(balance, (len(tokens), *balance.shape))}

    return outputs


def ppo(
    family: ModuleType,
    cfg: Any,
    options: Policy | None = None,
    *,
    vf_coef: float = 0.1,
    cliprange_value: float | None = 0.2,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
    **settings: Any,
) -> Callable[..., tuple[Array, Sums]]:
    """Build `loss(params, batch, given) -> (sum, sums)`: a policy's loss + vf_coef * `clipped_square`, over drawn tokens.

    `options` are a loss that is a mean over tokens, by default TRL's (PPO: epsilon 0.2), `settings` those of
    `value_outputs`, routers' coefficients those of `policy_objective`. Metrics have TRL's names; they are means over
    drawn tokens.
    """
    options = Policy() if options is None else options
    check_range(vf_coef=vf_coef)
    check_range(above=True, cliprange_value=cliprange_value)
    if options.coupled or TERMS[options.loss_type][1] != "tokens":
        raise ValueError(f"loss_type={options.loss_type!r} is no mean over tokens, as values are; use 'dapo'")
    router, with_routers = routers_of(router_aux_loss_coef, router_z_loss_coef)
    outputs = value_outputs(family, cfg, **{"router": router} | settings)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        o = outputs(params, batch, given)
        t = sampled_tokens(o, batch)
        total, sums = policy(t, options)
        old, returns = (at_next(batch, name, t.mask) for name in ("values", "returns"))
        error, clipped = clipped_square(o["value"], old, returns, cliprange_value)
        over = lambda x: jnp.where(t.mask > 0, x, 0).sum()
        d = stop_gradient(t.logp) - t.old
        metrics = {"policy/approxkl_avg": d**2 / 2, "policy/entropy_avg": t.entropy, "val/ratio": jnp.exp(d)}
        metrics |= {"loss/value_avg": error, "val/clipfrac_avg": clipped, "val/mean": o["value"]}
        if "kl" in batch:
            metrics["objective/kl"] = at_next(batch, "kl", t.mask)
        if "clip_ratio/region_mean" in sums:
            sums["policy/clipfrac_avg"] = sums["clip_ratio/region_mean"]
        sums |= {"loss/policy_avg": total} | {k: over(stop_gradient(x)) for k, x in metrics.items()}
        return with_routers(total + vf_coef * over(error), sums, o)

    return loss


def token_values(family: ModuleType, cfg: Any, **settings: Any) -> Callable[[Any, Batch], tuple[PerToken, PerToken]]:
    """Build `f(params, batch) -> (logps, values)` of drawn tokens, as tokens: what "old" and "values" hold."""
    outputs = value_outputs(family, cfg, **settings)

    def both(params: Any, batch: Batch) -> tuple[PerToken, PerToken]:
        o, drawn = outputs(params, batch), rows(batch)[2] >= 0
        at_token = lambda x: jnp.pad(jnp.where(drawn, x, 0)[:, :-1], ((0, 0), (1, 0)))
        return at_token(o["logp"]), at_token(o["value"])

    return both
