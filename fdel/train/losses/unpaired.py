"""Preference losses of single completions that are labelled desirable or not: KTO, APO and BCO, and their objectives.

The losses take float[B] of summed log-probabilities and bool[B], and return one loss per row; their mean is the loss. What
they need of all rows, KTO's `kl` and BCO's `delta`, is an argument; the objectives compute it, and so belong under
`train.gradcache`. Formulas and defaults are those of TRL 1.16, for BCO those of 1.12.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Bool, Float

from fdel.train.extras import carry
from fdel.train.given import NOTHING, Given, lookup
from fdel.train.losses.completions import Batch, Objective, Outputs, completion_metrics, counted, ref_logps
from fdel.train.losses.stats import check_call, check_range

PerRow = Float[Array, " B"]
Scalar = Float[Array, ""]


def kto(
    logps: PerRow,
    reference: PerRow,
    desirable: Bool[Array, " B"],
    kl: Scalar | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PerRow:
    """Compute KTO (arXiv:2402.01306, eq. 7) against the reference point `kl`, see `kto_kl`.
    >>> kto(jnp.array([-1.0, -1.0]), jnp.array([-2.0, -2.0]), jnp.array([True, False]), 0.0)
    Array([0.4750208, 0.5249792], dtype=float32)
    """
    check_range(above=True, beta=beta)
    check_range(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    above = beta * (logps - reference - kl)
    return jnp.where(desirable, desirable_weight * sigmoid(-above), undesirable_weight * sigmoid(above))


def kto_kl(kl_logps: PerRow, kl_reference: PerRow, present: Bool[Array, " B"] | None = None) -> Scalar:
    """Estimate KTO's reference point, without gradient, from completions that stand after another row's prompt.

    `present` tells which rows count, all if None.
    >>> kto_kl(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0]))
    Array(0.5, dtype=float32)
    """
    return jax.lax.stop_gradient(relu(_mean(kl_logps - kl_reference, present)))


def _mean(x: PerRow, present: Bool[Array, " B"] | None) -> Scalar:
    return x.mean() if present is None else jnp.where(present, x, 0).sum() / jnp.maximum(present.sum(), 1)


def apo_zero_unpaired(
    logps: PerRow, reference: PerRow, desirable: Bool[Array, " B"], *, beta: float = 0.1, **weights: float
) -> PerRow:
    """Compute APO-zero (arXiv:2408.06266, eq. 7) of single completions: `kto` with its reference point at 0.
    >>> apo_zero_unpaired(jnp.array([-1.0, -1.0]), jnp.array([-2.0, -2.0]), jnp.array([True, False]))
    Array([0.4750208, 0.5249792], dtype=float32)
    """
    return kto(logps, reference, desirable, 0.0, beta=beta, **weights)


def bco(
    logps: PerRow,
    reference: PerRow,
    desirable: Bool[Array, " B"],
    delta: Scalar | float,
    *,
    beta: float = 0.1,
    weights: PerRow | float = 1.0,
) -> PerRow:
    """Compute BCO (arXiv:2404.04656) against `delta`, the `running_mean` of all rewards beta * (logps - reference).

    `weights` are those of the undesirable rows, see `udm_weights`.
    """
    check_range(above=True, beta=beta)
    above = beta * (logps - reference) - delta
    return -jnp.where(desirable, log_sigmoid(above), weights * log_sigmoid(-above))


def running_mean(running: dict[str, Array], mean: Scalar, count: Scalar | int) -> dict[str, Array]:
    """Take `count` more numbers with this mean into {"mean", "count"}.
    >>> now = {"mean": jnp.array(1.0), "count": jnp.array(2.0)}
    >>> running_mean(now, jnp.array(4.0), jnp.array(1.0))["mean"]
    Array(2., dtype=float32, weak_type=True)
    """
    total = running["count"] + count
    return {"mean": running["mean"] + (mean - running["mean"]) * count / jnp.maximum(total, 1), "count": total}


def udm_weights(p_desirable: PerRow, low: float = 0.5, high: float = 10.0) -> PerRow:
    """Weigh undesirable rows as if their prompts were distributed like those of desirable ones (BCO's UDM).

    `p_desirable` is a classifier's probability, from the prompt alone, that a row is desirable.
    >>> udm_weights(jnp.array([0.1, 0.75, 0.99]))
    Array([ 0.5,  3. , 10. ], dtype=float32)
    """
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high}; expected numbers from 0, in this order")
    return jnp.clip(p_desirable / (1 - p_desirable + 1e-8), low, high)


# ---- objectives ----------------------------------------------------------------------------------------------------


def kto_objective(*, loss_type: str = "kto", beta: float = 0.1, **weights: float) -> Objective:
    """Build the objective of `kto`, or of "apo_zero_unpaired", which needs no "kl" in the batch."""
    if loss_type not in ("kto", "apo_zero_unpaired"):
        raise ValueError(f"loss_type={loss_type!r}; expected one of kto, apo_zero_unpaired")
    check_call(lambda x: kto(x, x, x > 0, 0.0, beta=beta, **weights), (1,))

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        kl = jnp.zeros(())
        if loss_type == "kto":
            if "kl_logps" not in o:
                raise ValueError("the batch has no 'kl', which KTO needs: see Settings.kl; or use 'apo_zero_unpaired'")
            kl = kto_kl(o["kl_logps"], o["kl_ref_logps"], counted(o))
        losses = kto(o["logps"], ref_logps(o), batch["label"], kl, beta=beta, **weights)
        total, metrics, _ = _sums(o, batch, losses, beta)
        return total, metrics | {"kl": (kl, jnp.ones(()))}

    return objective


def _sums(o: Outputs, batch: Batch, losses: PerRow, beta: float) -> tuple[Array, dict[str, Any], PerRow]:
    """The losses' sum over the rows that count, the metrics, and those rows' rewards."""
    rewards = jnp.where(counted(o), beta * (o["logps"] - ref_logps(o)), 0)
    return jnp.where(counted(o), losses, 0).sum(), completion_metrics(o, o["logps"], rewards, batch["label"]), rewards


def bco_objective(*, beta: float = 0.1) -> Objective:
    """Build the objective of `bco`, given "bco", the {"mean", "count"} of all rewards before.

    The rewards of this batch are taken in at once, as in TRL. `update(..., reads=("bco",))` reads the running mean, and
    `track_rewards` keeps it.
    """
    check_range(above=True, beta=beta)

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        rewards = beta * (o["logps"] - ref_logps(o))
        present = counted(o)
        delta = running_mean(lookup(given, "bco"), _mean(rewards, present), present.sum(dtype=jnp.float32))["mean"]
        delta = jax.lax.stop_gradient(delta)
        weights = batch.get("udm", 1.0)
        losses = bco(o["logps"], ref_logps(o), batch["label"], delta, beta=beta, weights=weights)
        total, metrics, rewards = _sums(o, batch, losses, beta)
        return total, metrics | {"delta": (delta, jnp.ones(())), "rewards/mean": rewards.sum()}

    return objective


def track_rewards(step: Callable) -> Callable:
    """Keep BCO's running mean in the state's extra "bco", {"mean": 0.0, "count": 0.0} at first."""
    return carry(step, "bco", lambda running, m: running_mean(running, m["rewards/mean"], m["weight"]))
