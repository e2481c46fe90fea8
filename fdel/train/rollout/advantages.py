"""Advantages: by how much a sample was better than expected. Pure functions of rewards, and of values for PPO.

Groups are n samples of one prompt, one after the other. A reward of NaN says nothing: its sample counts in no mean, and its
advantage is 0. Formulas and defaults are those of TRL 1.16; PPO's those of 1.12.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fdel.train.losses.policy import KL
from fdel.train.losses.sequences import Segments, recurrence, starts
from fdel.train.losses.stats import check_range

Rewards = Float[np.ndarray, " B"]
PerToken = Float[Array, "R T"]
SCALES = ("group", "batch", "none")


# ---- of whole samples, on the host ---------------------------------------------------------------------------------


def weighted_sum(each: Float[np.ndarray, "F B"], weights: Float[np.ndarray, " weights"] | None = None) -> Rewards:
    """Add up several rewards, with weights (ones if None); NaN ones abstain, and a sample of which all do has NaN.
    >>> weighted_sum(np.array([[1.0, np.nan], [2.0, np.nan]]), np.array([1.0, 0.5]))
    array([ 2., nan])
    """
    each = np.asarray(each, np.float64)
    weights = np.ones(len(each)) if weights is None else np.asarray(weights, np.float64)
    if each.ndim != 2 or weights.shape != each.shape[:1]:
        raise ValueError(
            f"rewards {each.shape} and weights {weights.shape}; expected [functions samples] and [functions]"
        )
    return np.where(np.isnan(each).all(0), np.nan, np.nansum(weights[:, None] * each, 0))


def grouped(total: Rewards, n: int, *, scale: str = "group", eps: float = 1e-4) -> Rewards:
    """Compute (reward - mean of its group) / (standard deviation + eps), of n - 1 degrees of freedom.

    `scale` says of what the deviation is (GRPO, arXiv:2402.03300): the "group", the "batch" (arXiv:2508.08221), or "none",
    without a division (Dr. GRPO). Where all rewards of a group are equal, advantages are exactly 0.
    >>> grouped(np.array([0.0, 1.0, 3.0, 3.0]), 2, scale="none")
    array([-0.5,  0.5,  0. ,  0. ])
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r}; expected one of {', '.join(SCALES)}")
    groups = _groups(total, n)
    centred = np.where(_equal(groups), 0, groups - _mean(groups, 1))
    spread = {"group": lambda: _std(groups, 1), "batch": lambda: _std(groups.reshape(1, -1), 1)}
    return _finished(centred if scale == "none" else centred / (spread[scale]() + eps))


def normalize_then_sum(
    each: Float[np.ndarray, "F B"], n: int, weights: Float[np.ndarray, " F"] | None = None, *, eps: float = 1e-4
) -> Rewards:
    """Scale each reward within its group, add them up with weights, and scale the sum over the batch (GDPO).

    So no reward drowns another one by its size alone (arXiv:2601.05242).
    """
    scaled = [(g - _mean(g, 1)) / (_std(g, 1) + eps) for g in (_groups(x, n) for x in each)]
    scaled = [np.where(_equal(_groups(x, n)), g * 0, g).reshape(-1) for x, g in zip(each, scaled, strict=True)]
    total = weighted_sum(np.stack(scaled), weights)[None]
    return _finished((total - _mean(total, 1)) / (_std(total, 1) + eps))


def leave_one_out(total: Rewards, n: int, *, normalize: bool = False, eps: float = 1e-4) -> Rewards:
    """Compute reward - mean of the others of its group (RLOO, arXiv:2402.14740); `normalize` scales over the batch.
    >>> leave_one_out(np.array([0.0, 1.0, 5.0]), 3)
    array([-3. , -1.5,  4.5])
    """
    groups = _groups(total, n)
    count = (~np.isnan(groups)).sum(1, keepdims=True)
    others = (np.nansum(groups, 1, keepdims=True) - groups) / np.maximum(count - 1, 1)
    a = np.where(count > 1, np.where(_equal(groups), groups * 0, groups - others), np.nan)
    if normalize:
        a = a.reshape(1, -1)
        a = (a - _mean(a, 1)) / (_std(a, 1) + eps)
    return _finished(a)


def equal_groups(total: Rewards, n: int) -> Bool[np.ndarray, " groups"]:
    """Tell which groups teach nothing: all of their rewards are equal, or NaN."""
    return _equal(_groups(total, n))[:, 0]


def kl_penalty(total: Rewards, kl: Rewards, beta: float = 0.05) -> Rewards:
    """Subtract beta times each sample's log policy / reference, summed over its tokens, from its reward (RLOO)."""
    check_range(beta=beta)
    return np.asarray(total, np.float64) - beta * np.asarray(kl, np.float64)


def optimal_value(total: Rewards, n: int, beta: float = 0.5) -> Rewards:
    """Estimate beta log mean exp(reward / beta) of each group, A*PO's value of the prompt (arXiv:2505.20686), per sample.
    >>> optimal_value(np.array([1.0, 1.0]), 2)
    array([1., 1.])
    """
    check_range(above=True, beta=beta)
    groups = _groups(total, n) / beta
    there = ~np.isnan(groups)
    top = np.max(groups, 1, where=there, initial=-np.inf, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    mean = np.where(there, np.exp(np.where(there, groups, top) - top), 0).sum(1, keepdims=True) / np.maximum(
        _count(groups), 1
    )
    value = beta * (np.log(np.where(mean > 0, mean, np.nan)) + top)
    return np.broadcast_to(value, groups.shape).reshape(-1).copy()


def discounted(rewards: Float[np.ndarray, " turns"], gamma: float = 0.95) -> Float[np.ndarray, " turns"]:
    """Compute what each turn gains from there on: its reward and gamma times what the next one gains.
    >>> discounted(np.array([0.0, 0.0, 1.0]), 0.5)
    array([0.25, 0.5 , 1.  ])
    """
    check_range(0, 1, gamma=gamma)
    gains, gain = np.zeros(len(rewards)), 0.0
    for i in reversed(range(len(rewards))):
        gains[i] = gain = rewards[i] + gamma * gain
    return gains


def _groups(total: Rewards, n: int) -> np.ndarray:
    total = np.asarray(total, np.float64)
    if n < 1 or total.ndim != 1 or len(total) % n:
        raise ValueError(f"rewards of shape {total.shape}; expected a number of samples that groups of {n} divide")
    return total.reshape(-1, n)


def _count(x: np.ndarray) -> np.ndarray:
    return (~np.isnan(x)).sum(1, keepdims=True)


def _mean(x: np.ndarray, axis: int) -> np.ndarray:
    return np.nansum(x, axis, keepdims=True) / np.maximum(_count(x), 1)


def _std(x: np.ndarray, axis: int) -> np.ndarray:
    return np.sqrt(np.nansum((x - _mean(x, axis)) ** 2, axis, keepdims=True) / np.maximum(_count(x) - 1, 1))


def _equal(groups: np.ndarray) -> np.ndarray:
    """By comparison: the deviation of equal numbers is rounding noise, which a division by 1e-4 makes large."""
    there = ~np.isnan(groups)
    ends = [f(groups, 1, where=there, initial=x, keepdims=True) for f, x in ((np.max, -np.inf), (np.min, np.inf))]
    return ends[0] <= ends[1]


def _finished(x: np.ndarray) -> Rewards:
    return np.nan_to_num(x, nan=0.0).reshape(-1)


# ---- per token -----------------------------------------------------------------------------------------------------


def token_rewards(
    scores: Float[Array, "R T"],
    logps: PerToken,
    ref_logps: PerToken,
    mask: PerToken,
    *,
    beta: float = 0.05,
    kl: str = "k1",
) -> PerToken:
    """Subtract beta times the KL estimate of each drawn token from `scores`, which stand at samples' last drawn tokens."""
    if kl not in KL:
        raise ValueError(f"kl={kl!r}; expected one of {', '.join(KL)}")
    return jnp.where(mask > 0, scores - beta * KL[kl](jnp.where(mask > 0, ref_logps - logps, 0)), 0)


def gae(
    rewards: PerToken,
    values: PerToken,
    mask: PerToken,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    segments: Segments = None,
) -> tuple[PerToken, PerToken]:
    """Compute (advantages, returns) by generalized advantage estimation (arXiv:1506.02438), 0 where mask is.

    `values` are of what stands before each token. What comes after a drawn token is the next drawn one of its sequence,
    whatever an environment says between them; after the last one comes nothing, of value 0. `segments` tell the sequences
    of packed rows. It takes log T steps.
    >>> gae(*jnp.array([[[0.0, 1.0]], [[0.5, 0.5]], [[1.0, 1.0]]]), lam=1.0)
    (Array([[0.5, 0.5]], dtype=float32), Array([[1., 1.]], dtype=float32))
    """
    check_range(0, 1, gamma=gamma, lam=lam)
    drawn = mask > 0
    last = jnp.pad(starts(segments, mask.shape)[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    # Where nothing was drawn, what comes from behind passes unchanged; nothing passes into another sequence.
    coming = lambda factor, x: recurrence(
        jnp.where(last, 0, jnp.where(drawn, factor, 1)), jnp.where(drawn, x, 0), reverse=True
    )
    following = coming(0.0, values)  # the value of this or the next drawn token
    after = jnp.where(last, 0, jnp.pad(following[:, 1:], ((0, 0), (0, 1))))
    advantages = jnp.where(drawn, coming(gamma * lam, rewards + gamma * after - values), 0)
    return advantages, jnp.where(drawn, advantages + values, 0)


def reward_to_go(rewards: PerToken, mask: PerToken, *, gamma: float = 1.0, mean: bool = False) -> PerToken:
    """Sum each token's and all later rewards of its row, gamma to the power of their distance.

    With `mean` the sum is divided by that of the powers: of log teacher - log student, MiniLLM's advantages
    (arXiv:2306.08543).
    """
    check_range(0, 1, gamma=gamma)
    factor = jnp.where(mask > 0, gamma, 1.0)
    total, powers = (
        recurrence(factor, jnp.where(mask > 0, x, 0), reverse=True) for x in (rewards, jnp.ones_like(rewards))
    )
    return jnp.where(mask > 0, total / jnp.where(powers > 0, powers, 1) if mean else total, 0)


def whiten(x: PerToken, mask: PerToken, *, shift_mean: bool = True, eps: float = 1e-8) -> PerToken:
    """Scale x to variance 1 and mean 0 over all tokens where mask is 1; shift_mean=False lets it keep its mean."""
    count = mask.sum()
    mean = jnp.where(mask > 0, x, 0).sum() / jnp.maximum(count, 1)
    variance = jnp.where(mask > 0, (x - mean) ** 2, 0).sum() / jnp.maximum(count - 1, 1)
    scaled = (x - mean) * jax.lax.rsqrt(variance + eps)
    return jnp.where(mask > 0, scaled if shift_mean else scaled + mean, 0)
