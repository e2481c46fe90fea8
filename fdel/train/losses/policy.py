"""Policy gradients of sampled tokens, as functions of log-probabilities: GRPO and its kin, RLOO, PPO's policy term.

A loss is data: `Policy` names the term of a token, the level of its ratio, and what is averaged. `policy` takes [R T], per
token, several sequences to a row or one, and returns sums; `losses.sampled` computes the log-probabilities with a model.
A sequence without any token to be learnt counts for nothing, in no mean. Formulas and defaults are those of TRL 1.16.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from fdel.train.extremes import among
from fdel.train.losses.sequences import PerToken, Tokens, sequence_mean, sequence_sum
from fdel.train.losses.stats import check_range
from fdel.train.losses.totals import summed

Sums = dict[str, Any]
LOWEST = math.log(1e-8)  # sequence ratios of VESPO and their parts stay above this, and below 20


@dataclass(frozen=True)
class Policy:
    """Options of a policy loss; TRL's names where it has them. ValueError for those that do not go together.

    `loss_type` names the term of a token and how terms are averaged, see `TERMS`. `importance_sampling_level` is what the
    ratio new / old is of: "token"; "sequence", its geometric mean (GSPO, arXiv:2507.18071); "sequence_token", the same with
    each token's own gradient; "sequence_sum", the whole sequence's (RLOO: loss_type="grpo"). Ratios are clipped to
    [1 - epsilon, 1 + epsilon_high], and never exceed `delta`.

    `beta` weighs the estimate of the KL divergence from the reference: "k1", "k2" or "k3", times the ratio if
    `use_bias_correction_kl` (None: but for GMPO, as in TRL). `entropy_coef` weighs the mean entropy, `top_entropy_quantile`
    learns from that share of tokens alone, those with the most entropy (arXiv:2506.01939). `off_policy_mask_threshold`
    drops sequences of negative advantage whose mean log old/new is above it (DeepSeek-V3.2). `correction` weighs tokens or
    sequences by trainer / sampler: above the cap, the second of `correction_clip`, or below the first, a weight becomes
    that bound (truncate) or 0 (mask). `max_completion_length` is dr_grpo's constant.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool | None = None
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    correction: str | None = None
    correction_clip: tuple[float | None, float | None] = (None, 3.0)
    max_completion_length: int | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # of positive and of other advantages
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)  # k and lambda, of advantages from 0 on and below

    def __post_init__(self) -> None:
        for name, known in (
            ("loss_type", TERMS),
            ("importance_sampling_level", LEVELS),
            ("kl_estimator", KL),
            ("correction", (None, *CORRECTIONS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(map(str, known))}")
        check_range(
            epsilon=self.epsilon, epsilon_high=self.epsilon_high, beta=self.beta, entropy_coef=self.entropy_coef
        )
        check_range(above=True, delta=self.delta, max_completion_length=self.max_completion_length)
        check_range(0, 1, above=True, top_entropy_quantile=self.top_entropy_quantile)
        check_range(-math.inf, off_policy_mask_threshold=self.off_policy_mask_threshold)
        listed = {k: getattr(self, k) for k in ("correction_clip", "sapo_temperatures", "vespo")}
        numbers: dict[str, Any] = {f"{k}[{i}]": x for k, v in listed.items() for i, x in enumerate(v)}
        check_range(**numbers)
        check_range(above=True, **{k: x for k, x in numbers.items() if "sapo" in k})
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by max_completion_length; give it")
        if self.loss_type == "vespo" and (self.correction or "token").startswith("sequence"):
            raise ValueError(
                f"correction={self.correction!r} with loss_type='vespo', which corrects tokens; use 'token_mask'"
            )
        if self.loss_type in ("vespo", "gmpo") and self.importance_sampling_level != "token":
            found = f"importance_sampling_level={self.importance_sampling_level!r} with loss_type={self.loss_type!r}"
            raise ValueError(f"{found}, which weighs sequences by itself; use 'token'")

    @property
    def high(self) -> float:
        """The upper clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def coupled(self) -> bool:
        """Whether a token's loss depends on other rows than its own, so that microbatches need `train.gradcache`."""
        return self.top_entropy_quantile < 1 or (self.entropy_coef > 0 and TERMS[self.loss_type][1] != "tokens")


class _Ratio(NamedTuple):
    """The terms of the losses: log new / old at the level asked for, the same per token, and what is to be learnt."""

    log: PerToken
    token: PerToken
    keep: PerToken  # mask of the tokens that the policy term learns from
    weight: PerToken  # trainer / sampler


# ---- the losses of tokens ------------------------------------------------------------------------------------------


def _clipped(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    ratio = jnp.exp(r.log)
    clipped = jnp.clip(ratio, 1 - c.epsilon, 1 + c.high)
    ratio = ratio if c.delta is None else jnp.minimum(ratio, c.delta)
    low = (ratio < 1 - c.epsilon) & (t.advantages < 0)
    high = (ratio > 1 + c.high) & (t.advantages > 0)
    return -jnp.minimum(ratio * t.advantages, clipped * t.advantages), _clip_ratios(low, high)


def _cispo(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    ratio = jnp.exp(r.log)
    term = -stop_gradient(jnp.minimum(ratio, c.high)) * t.advantages * t.logp
    return term, {"cispo_clip_ratio": (ratio > c.high) & (t.advantages > 0)}


def _reinforce(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    return -t.advantages * t.logp, {}


def _sapo(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    temperature = jnp.where(t.advantages > 0, *c.sapo_temperatures)
    return -4 / temperature * jax.nn.sigmoid(temperature * (jnp.exp(r.log) - 1)) * t.advantages, {}


def _vespo(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    parts = jnp.clip(r.token, -20, 20) + jnp.clip(jnp.log(r.weight), LOWEST, 20)
    w = jnp.clip(sequence_sum(t.mask * parts, t.segments), LOWEST, 20)
    k, lam = (jnp.where(t.advantages >= 0, *pair) for pair in (c.vespo[::2], c.vespo[1::2]))
    phi = stop_gradient(jnp.exp(lam + k * w - lam * jnp.exp(w)))
    return -phi * t.advantages * t.logp, {"vespo/phi_seq_mean": phi}


def _gmpo(t: Tokens, r: _Ratio, c: Policy) -> tuple[PerToken, Sums]:
    sign = jnp.where(t.advantages > 0, 1.0, -1.0)
    clipped = sign * jnp.minimum(sign * r.token, sign * jnp.clip(r.token, -c.epsilon, c.high))
    mean = sequence_mean(clipped, r.keep, t.segments)
    low, high = (r.token < -c.epsilon) & (t.advantages < 0), (r.token > c.high) & (t.advantages > 0)
    return -jnp.exp(mean) * t.advantages, _clip_ratios(low, high)


def _clip_ratios(low: Array, high: Array) -> Sums:
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


# Each loss type's term per token, and over what it is averaged: the tokens; the sequences, each the mean or the sum of its
# tokens; or the sequences as if all had max_completion_length.
TERMS: dict[str, tuple[Callable[[Tokens, _Ratio, Policy], tuple[PerToken, Sums]], str]] = {
    "grpo": (_clipped, "means"),  # arXiv:2402.03300
    "bnpo": (_clipped, "tokens"),  # arXiv:2506.02864, over all tokens of the step: there is no local mean
    "dr_grpo": (_clipped, "length"),  # arXiv:2503.20783
    "dapo": (_clipped, "tokens"),  # arXiv:2503.14476
    "luspo": (_clipped, "sums"),  # arXiv:2602.05261, with importance_sampling_level="sequence"
    "cispo": (_cispo, "tokens"),  # arXiv:2506.13585
    "reinforce": (_reinforce, "tokens"),  # without a ratio
    "sapo": (_sapo, "means"),  # arXiv:2511.20347
    "vespo": (_vespo, "tokens"),  # arXiv:2602.10693
    "gmpo": (_gmpo, "means"),  # arXiv:2507.20673
}
LEVELS = ("token", "sequence", "sequence_token", "sequence_sum")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
KL: Mapping[str, Callable[[PerToken], PerToken]] = {  # of log reference / policy; joschu.net/blog/kl-approx.html
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: jnp.exp(d) - d - 1,
}


# ---- their parts ---------------------------------------------------------------------------------------------------


def log_ratio(t: Tokens, level: str) -> PerToken:
    """Compute log new / old at a level of `LEVELS`.

    Where it is exactly 0, as in the first step on a batch, the gradient is still that of the new log-probabilities.
    """
    token = jnp.where(t.mask > 0, t.logp - t.old, 0)
    if level == "token":
        return token
    if level == "sequence_sum":
        return sequence_sum(token, t.segments)
    mean = sequence_mean(token, t.mask, t.segments)
    return mean if level == "sequence" else stop_gradient(mean) + t.logp - stop_gradient(t.logp)


def correction(t: Tokens, c: Policy) -> tuple[PerToken, Sums]:
    """Compute the weights trainer / sampler, bounded as `Policy.correction` says, and the sampler's metrics.

    A log-probability of the sampler that is NaN gives its token weight 1.
    """
    if t.sampled is None:
        if c.correction:
            raise ValueError(
                f"correction={c.correction!r}, but the batch has no 'logps', the sampler's log-probabilities"
            )
        return jnp.ones_like(t.logp), {}
    known = (t.mask > 0) & ~jnp.isnan(t.sampled)
    d = jnp.where(known, stop_gradient(t.old) - t.sampled, 0)
    raw = jnp.exp(sequence_sum(d, t.segments) if (c.correction or "").startswith("sequence") else d)
    low, high = ((-jnp.inf, jnp.inf)[i] if x is None else x for i, x in enumerate(c.correction_clip))
    outside = (raw < low) | (raw > high)
    metrics: Sums = {
        "sampling/sampling_logp_difference/mean": jnp.abs(d),
        "sampling/importance_sampling_ratio/mean": raw,
    }
    metrics["sampling/sampling_logp_difference/max"] = among(jnp.abs(d), known)
    for name in ("min", "max"):
        metrics[f"sampling/importance_sampling_ratio/{name}"] = among(raw, known, largest=name == "max")
    if not c.correction:
        return jnp.ones_like(raw), metrics
    bounded = jnp.clip(raw, low, high) if c.correction.endswith("truncate") else jnp.where(outside, 0, raw)
    return bounded, metrics | {"sampling/importance_sampling_ratio/bounded": outside}


def high_entropy(t: Tokens, share: float) -> PerToken:
    """Mask the `share` of the tokens to be learnt that have the most entropy: of all rows, so it must see all of them."""
    threshold = jnp.nanquantile(jnp.where(t.mask > 0, t.entropy, jnp.nan), 1 - share)
    return stop_gradient(t.mask * (t.entropy >= threshold))


def near_policy(t: Tokens, threshold: float) -> PerToken:
    """Mask the sequences of negative advantage whose mean log old / new is above the threshold with 0, others with 1."""
    before = t.old if t.sampled is None else t.sampled
    drift = stop_gradient(jnp.where(jnp.isnan(before), 0, before - t.logp))
    far = sequence_mean(drift, t.mask, t.segments) > threshold
    return 1.0 - ((t.advantages < 0) & far)


def policy(t: Tokens, c: Policy, entropy_coef: Array | float | None = None) -> tuple[Float[Array, ""], Sums]:
    """Compute the loss that the options ask for: (sum, sums), whose "weight" counts tokens or sequences.

    Sums that are not over the weight are pairs (sum, count), or `Extreme`s. With `Policy.coupled` all rows must be here.
    `entropy_coef`
    takes the place of the options', if theirs is not 0.
    >>> x = jnp.zeros((1, 2))
    >>> policy(Tokens(x, x, x + 1, x + 3, x), Policy())[0]  # ratio 1, advantage 3, two tokens
    Array(-6., dtype=float32)
    """
    weight, metrics = correction(t, c)
    keep = t.mask if c.top_entropy_quantile == 1 else high_entropy(t, c.top_entropy_quantile)
    r = _Ratio(log_ratio(t, c.importance_sampling_level), log_ratio(t, "token"), keep, weight)
    term, own = TERMS[c.loss_type][0](t, r, c)
    if c.off_policy_mask_threshold is not None:
        term = term * near_policy(t, c.off_policy_mask_threshold)
    if c.top_entropy_quantile < 1 and c.loss_type != "gmpo":  # GMPO has it in its mean
        term = term * keep
    if c.loss_type != "vespo":
        term = term * weight
    metrics |= own | {"entropy": t.entropy}
    if c.beta:
        if t.reference is None:
            raise ValueError(
                f"beta={c.beta} needs a reference: give the batch 'ref_logps', or the step reference=params"
            )
        kl = KL[c.kl_estimator](jnp.where(t.mask > 0, t.reference - t.logp, 0))
        corrected = c.loss_type != "gmpo" if c.use_bias_correction_kl is None else c.use_bias_correction_kl
        metrics["kl"] = kl = kl * jnp.exp(r.log) if corrected else kl
        term = term + c.beta * kl
    by_sequence = {"vespo/phi_seq_mean"}
    if c.importance_sampling_level in ("sequence", "sequence_sum"):
        by_sequence |= {k for k in metrics if "clip_ratio" in k}
    if (c.correction or "").startswith("sequence"):
        by_sequence |= {k for k in metrics if k.startswith("sampling/importance")}
    total, sums = summed(t, term, metrics, TERMS[c.loss_type][1], c.max_completion_length, by_sequence)
    if c.entropy_coef:
        entropy, count = jnp.where(keep > 0, keep * t.entropy, 0).sum(), keep.sum()
        coef = c.entropy_coef if entropy_coef is None else entropy_coef
        sums |= {"policy_loss": total, "entropy_of_learnt": (stop_gradient(entropy), count)}
        total = total - coef * sums["weight"] * entropy / jnp.maximum(count, 1)
    return total, sums
