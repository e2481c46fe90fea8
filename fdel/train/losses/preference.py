"""Preference losses of pairs, as functions of log-probabilities: DPO and what grew from it, CPO, SimPO, AlphaPO, ORPO.

All take float[B], one number per pair, and return one loss per pair; their mean is the loss. `losses.pairs` computes the
log-probabilities with a model. Formulas, options and their defaults are those of TRL 1.16.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax.numpy as jnp
from jax.nn import log1mexp, log_sigmoid, relu, sigmoid
from jaxtyping import Array, Bool, Float

from fdel.train.losses.stats import check_range

PerPair = Float[Array, " B"]
LARGEST = 80.0  # exponents end here, so that neither a score nor its gradient overflows float32


class _Pair(NamedTuple):
    """The terms of the DPO losses. Ratios are log policy/reference; scores are ratios seen through the f-divergence."""

    chosen: PerPair  # ratio
    rejected: PerPair
    margin: PerPair  # beta (score of chosen - score of rejected)
    mean_margin: PerPair  # the same per token, without beta
    policy: PerPair  # log-probability of chosen - of rejected
    reference: PerPair
    beta: float
    eps: float
    tau: float
    present: Array  # bool


def _smoothed(margin: PerPair, eps: float) -> PerPair:
    smooth = -eps * log_sigmoid(-margin) if eps else 0.0  # an infinite margin would make 0 * infinity of it
    return -(1 - eps) * log_sigmoid(margin) + smooth


def _square(x: Array) -> Array:
    return jnp.clip(x, -1e18, 1e18) ** 2  # exponential scores can be larger, and their squares infinite


def _exo(p: _Pair) -> PerPair:
    win = sigmoid(p.margin) * (log_sigmoid(p.margin) - math.log1p(-p.eps))
    return win + sigmoid(-p.margin) * (log_sigmoid(-p.margin) - math.log(p.eps))


def _discopop(p: _Pair) -> PerPair:
    # exp(-u) σ(u/τ) as one exponential: the factors alone are infinity times zero at very negative u.
    exponential = jnp.exp(log_sigmoid(p.margin / p.tau) - p.margin)
    return exponential - log_sigmoid(p.margin) * sigmoid(-p.margin / p.tau)


def _sort(x: PerPair, p: _Pair) -> PerPair:
    return jnp.sort(jnp.where(p.present, x, jnp.finfo(x.dtype).max))  # those that do not count come last


DPO: dict[str, Callable[[_Pair], PerPair]] = {
    "sigmoid": lambda p: _smoothed(p.margin, p.eps),  # DPO, arXiv:2305.18290; label_smoothing makes it cDPO
    "hinge": lambda p: relu(1 - p.margin),  # SLiC, arXiv:2305.10425
    "ipo": lambda p: _square(p.mean_margin - 0.5 / p.beta),  # arXiv:2310.12036, per token as its authors advise
    "exo_pair": _exo,  # arXiv:2402.00856, eq. 16
    "nca_pair": lambda p: (  # arXiv:2402.05369
        -log_sigmoid(p.beta * p.chosen) - 0.5 * (log_sigmoid(-p.beta * p.chosen) + log_sigmoid(-p.beta * p.rejected))
    ),
    "robust": lambda p: (  # arXiv:2403.00409
        (p.eps * log_sigmoid(-p.margin) - (1 - p.eps) * log_sigmoid(p.margin)) / (1 - 2 * p.eps)
    ),
    "bco_pair": lambda p: -log_sigmoid(p.beta * p.chosen) - log_sigmoid(-p.beta * p.rejected),  # arXiv:2404.04656
    "sppo_hard": lambda p: _square(p.chosen - 0.5 / p.beta) + _square(p.rejected + 0.5 / p.beta),  # arXiv:2405.00675
    "aot": lambda p: _smoothed(p.beta * (_sort(p.policy, p) - _sort(p.reference, p)), p.eps),  # arXiv:2406.05882
    "aot_unpaired": lambda p: _smoothed(p.beta * (_sort(p.chosen, p) - _sort(p.rejected, p)), p.eps),
    "apo_zero": lambda p: sigmoid(-p.beta * p.chosen) + sigmoid(p.beta * p.rejected),  # arXiv:2408.06266, eq. 7
    "apo_down": lambda p: sigmoid(p.beta * p.chosen) + sigmoid(-p.beta * (p.chosen - p.rejected)),  # eq. 8
    "discopop": _discopop,  # arXiv:2406.08414, eq. 5
    "sigmoid_norm": lambda p: -log_sigmoid(p.beta * p.mean_margin),  # length-normalised, arXiv:2411.15124
}
ON_SCORES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm", "sft")
SORTED = ("aot", "aot_unpaired")  # their i-th loss does not belong to the i-th pair
PER_TOKEN = ("ipo", "sigmoid_norm", "sft")
SMOOTHED: dict[str, tuple[str, Callable[[float], bool]]] = {  # the losses that read label_smoothing, and its range
    "sigmoid": ("a number in [0, 0.5)", lambda eps: 0 <= eps < 0.5),
    "exo_pair": ("a number in (0, 1), as 1e-3", lambda eps: 0 < eps < 1),
    "robust": ("a number in [0, 0.5)", lambda eps: 0 <= eps < 0.5),
    "aot": ("a number in [0, 1]", lambda eps: 0 <= eps <= 1),
    "aot_unpaired": ("a number in [0, 1]", lambda eps: 0 <= eps <= 1),
}

DIVERGENCES: dict[str, Callable[[PerPair, float], PerPair]] = {  # f'(policy/reference), arXiv:2309.16240
    "reverse_kl": lambda ratio, alpha: ratio,
    "forward_kl": lambda ratio, alpha: 1 - jnp.exp(jnp.minimum(-ratio, LARGEST)),
    "js_divergence": lambda ratio, alpha: math.log(2) + log_sigmoid(ratio),
    "alpha_divergence": lambda ratio, alpha: (
        ratio if abs(alpha - 1) < 1e-6 else (jnp.exp(jnp.minimum((alpha - 1) * ratio, LARGEST)) - 1) / (alpha - 1)
    ),
}


def dpo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: PerPair | None = None,
    rejected_lengths: PerPair | None = None,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    tau: float = 0.05,
    present: Bool[Array, " B"] | None = None,
) -> PerPair:
    """Compute a loss of `DPO`, or "sft", from the completions' summed log-probabilities under policy and reference.

    `lengths` are the completions' tokens: "ipo", "sigmoid_norm" and "sft" divide by them. "sft" is -chosen over the mean
    length, so that its mean is that of the tokens. "aot" and "aot_unpaired" sort over the batch, so they must see all of
    it. `f_alpha` belongs to the alpha divergence, `tau` to "discopop". `present` tells which pairs count, all if None: the
    others have loss 0. Options that a loss does not read: ValueError.
    >>> losses.preference.dpo(*jnp.array([[-1.0], [-4.0], [-2.0], [-2.0]]))
    Array([0.55435526], dtype=float32)
    """
    check_dpo(loss_type, label_smoothing, f_divergence)
    check_range(above=True, beta=beta, tau=tau)
    check_range(-math.inf, f_alpha=f_alpha)
    if chosen_lengths is None or rejected_lengths is None:
        if loss_type in PER_TOKEN:
            raise ValueError(f"loss_type={loss_type!r} is per token; give chosen_lengths and rejected_lengths")
        chosen_lengths = rejected_lengths = jnp.ones_like(chosen)
    present = jnp.ones(chosen.shape, bool) if present is None else present
    if loss_type == "sft":
        return mean_nll(-chosen, mean_length(chosen_lengths, present), present)
    ratios = chosen - ref_chosen, rejected - ref_rejected
    scores = [DIVERGENCES[f_divergence](r, f_alpha) for r in ratios]
    mean_margin = scores[0] * _inverse(chosen_lengths) - scores[1] * _inverse(rejected_lengths)
    margin, policy, reference = beta * (scores[0] - scores[1]), chosen - rejected, ref_chosen - ref_rejected
    losses = DPO[loss_type](_Pair(*ratios, margin, mean_margin, policy, reference, beta, label_smoothing, tau, present))
    counts = jnp.arange(len(present)) < present.sum() if loss_type in SORTED else present  # sorted ones come first
    return jnp.where(counts, losses, 0)


def mean_length(lengths: PerPair, present: Bool[Array, " B"]) -> Float[Array, ""]:
    """Average lengths over the pairs that count.
    >>> losses.preference.mean_length(jnp.array([2.0, 4.0, 9.0]), jnp.array([True, True, False]))
    Array(3., dtype=float32)
    """
    return jnp.where(present, lengths, 0).sum() * _inverse(present.sum(dtype=lengths.dtype))


def mean_nll(nll: PerPair, length: Float[Array, "*B"], present: Bool[Array, " B"]) -> PerPair:
    """Divide summed negative log-likelihoods by the mean `length`: the mean over pairs is then that over tokens."""
    return jnp.where(present, nll, 0) * _inverse(length)


def _inverse(lengths: Array) -> Array:
    return 1 / jnp.where(lengths > 0, lengths, 1)


def check_dpo(loss_type: str, label_smoothing: float = 0.0, f_divergence: str = "reverse_kl") -> None:
    """Raise ValueError for options of `dpo` that do not go together."""
    _one_of("loss_type", loss_type, [*DPO, "sft"])
    _one_of("f_divergence", f_divergence, DIVERGENCES)
    if f_divergence != "reverse_kl" and loss_type not in ON_SCORES:
        raise ValueError(
            f"f_divergence={f_divergence!r} with loss_type={loss_type!r}, which is not a function of the difference of "
            f"scores; use 'reverse_kl', or a loss of {', '.join(ON_SCORES)}"
        )
    none = f"0, as only {', '.join(SMOOTHED)} have it", lambda eps: eps == 0
    expected, fits = SMOOTHED.get(loss_type, none)
    if not fits(label_smoothing):
        raise ValueError(f"label_smoothing={label_smoothing} with loss_type={loss_type!r}; expected {expected}")


def ld_weights(weights: Float[Array, "B 2 T"], alpha: float) -> Float[Array, "B 2 T"]:
    """Weigh the tokens of a completion that is longer than the other one of its pair by `alpha` from there on.

    LD-DPO (arXiv:2409.06411): with these weights, the sum of log-probabilities is that of the shared length and `alpha`
    times the rest. `weights` are 1 at the tokens of a completion, 0 elsewhere; alpha in [0, 1], 1 is plain DPO.
    >>> losses.preference.ld_weights(jnp.array([[[1.0, 1, 1, 1], [1, 1, 0, 0]]]), 0.5)[0, 0]
    Array([1. , 1. , 0.5, 0.5], dtype=float32)
    """
    check_range(0, 1, ld_alpha=alpha)
    shared = weights.sum(-1).min(-1)[..., None, None]
    return jnp.where(jnp.cumsum(weights, -1) <= shared, weights, alpha * weights)


CPO: dict[str, Callable[[PerPair, float, float, float], PerPair]] = {
    "sigmoid": lambda margin, beta, eps, gamma: _smoothed(margin, eps),
    "simpo": lambda margin, beta, eps, gamma: _smoothed(margin - gamma, eps),
    "hinge": lambda margin, beta, eps, gamma: relu(1 - margin),
    "ipo": lambda margin, beta, eps, gamma: _square(margin / beta - 0.5 / beta),
}
CPO_MEANS = ("ipo", "simpo")


def cpo(
    chosen: PerPair,
    rejected: PerPair,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
) -> PerPair:
    """Compute CPO (arXiv:2401.08417; "sigmoid", "hinge", "ipo") or SimPO (arXiv:2405.14734; "simpo"), without reference.

    The log-probabilities are sums over the completion, for "ipo" and "simpo" means (`CPO_MEANS`). `gamma` is SimPO's
    margin; alpha != 0 is AlphaPO's shape of the reward (arXiv:2501.03884), with any of the losses.
    >>> losses.preference.cpo(jnp.array([-1.0]), jnp.array([-4.0]))
    Array([0.55435526], dtype=float32)
    """
    _one_of("loss_type", loss_type, CPO)
    if not 0 <= label_smoothing <= 1 or (label_smoothing and loss_type in ("hinge", "ipo")):
        raise ValueError(
            f"label_smoothing={label_smoothing} with loss_type={loss_type!r}; expected a number in [0, 1] for 'sigmoid' "
            "and 'simpo', and 0 for 'hinge' and 'ipo'"
        )
    check_range(above=True, beta=beta)
    check_range(-math.inf, gamma=gamma, alpha=alpha)
    margin = beta * (cpo_reward(chosen, alpha) - cpo_reward(rejected, alpha))
    return CPO[loss_type](margin, beta, label_smoothing, gamma)


def cpo_reward(logp: PerPair, alpha: float) -> PerPair:
    """Compute AlphaPO's reward (1 - p^-alpha) / alpha, without beta; log p for alpha = 0.
    >>> losses.preference.cpo_reward(jnp.array([-1.0]), 0.5)
    Array([-1.2974426], dtype=float32)
    """
    return logp if alpha == 0 else -jnp.expm1(jnp.minimum(-alpha * logp, LARGEST)) / alpha


def orpo(chosen: PerPair, rejected: PerPair, *, beta: float = 0.1) -> PerPair:
    """Compute ORPO's odds-ratio loss (arXiv:2403.07691) of mean log-probabilities; the chosen text's NLL is to be added.
    >>> losses.preference.orpo(jnp.array([-1.0]), jnp.array([-4.0]))
    Array([0.00315555], dtype=float32)
    """
    check_range(above=True, beta=beta)
    return -beta * log_sigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logp: PerPair) -> PerPair:
    """Compute log p / (1 - p).
    >>> losses.preference.log_odds(jnp.log(jnp.array([0.75])))  # log 3
    Array([1.0986124], dtype=float32)
    """
    return logp - log1mexp(jnp.maximum(-logp, 1e-30))  # p = 1 has infinite odds


def _one_of(name: str, found: str, expected: Collection[str]) -> None:
    if found not in expected:
        raise ValueError(f"{name}={found!r}; expected one of {', '.join(expected)}")
