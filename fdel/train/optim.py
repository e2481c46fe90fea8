"""Optimizers, built from optax: a direction, and what `descend` makes of it. `optimizer(name, ...)` finds one by name."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import ScalarOrSchedule as Rate

from fdel.ops.contraction import widen
from fdel.params.hf_layout import layout
from fdel.params.spec import path_name
from fdel.train import matrices
from fdel.train.given import NOTHING
from fdel.train.moments import scale_by_adam
from fdel.train.steps import TrainState


def decay_mask(spec: Any) -> Any:
    """Tell which arrays of a spec tree decay: those stored with two axes or more, except norms.

    The axes that count are those in the checkpoint: a bias that we keep as [heads head_dim] is a vector there.
    >>> mask = train.optim.decay_mask(spec)
    >>> mask["embed"], mask["norm"]
    (True, False)
    """
    return jax.tree.map(lambda p: len(layout(p).file_shape) > 1 and "norm" not in p.hf, spec)


# ---- around a direction --------------------------------------------------------------------------------------------


def descend(
    direction: optax.GradientTransformation,
    learning_rate: Rate,
    *,
    weight_decay: float = 0.0,
    mask: Any = None,
    clip: float | None = 1.0,
    rates: Mapping[str, float] | None = None,
) -> optax.GradientTransformation:
    """Make an optimizer of any `optax.scale_by_*`: params -= learning_rate * rate * (direction + weight_decay * params).

    Gradients' global norm is clipped to `clip` first. `mask` tells which arrays decay, as from `decay_mask`; None: all.
    `rates` multiplies the rate of arrays by their path's first match, as in {r"\\bembed$": 0.1}; a pattern without any is
    a ValueError. All moments are float32 whatever the parameters are: in bfloat16 the second one stops short of its value.
    """
    chain = optax.chain(
        optax.identity() if clip is None else _clip(clip),
        direction,
        optax.add_decayed_weights(weight_decay, mask),
        optax.identity() if not rates else _multiply(rates),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.GradientTransformationExtraArgs(lambda params: chain.init(jax.tree.map(widen, params)), chain.update)


def _clip(limit: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm, by torch's formula. A factor: optax divides arrays in passes of their own."""

    def update(updates: Any, params: Any) -> Any:
        factor = jnp.minimum(1, limit / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda u: u * factor, updates)

    return optax.stateless(update)


def _multiply(rates: Mapping[str, float]) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: _by_path(lambda u, p: u * rates.get(p, 1.0), updates, *rates))


def _by_path(f: Callable[[Any, str], Any], tree: Any, *patterns: str) -> Any:
    """Map f(leaf, the first pattern that its path matches, or ""); ValueError for a pattern that matches none."""
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    idle = [pattern for pattern in patterns if not any(re.search(pattern, path) for path in paths)]
    if idle:
        raise ValueError(f"no parameter's path matches {idle[0]!r}; there are {', '.join(paths[:20])}")
    first = lambda path: next((p for p in patterns if re.search(p, path_name(path))), "")
    return jax.tree_util.tree_map_with_path(lambda path, x: f(x, first(path)), tree)


def freeze(optimizer: optax.GradientTransformation, where: str) -> optax.GradientTransformation:
    """Leave the arrays whose path matches `where` as they are, and keep no state for them.

    `stop_gradient(loss, where)` saves their gradients too.
    """
    labels = lambda params: _by_path(lambda _, matched: "frozen" if matched else "", params, where)
    return optax.partition({"": optimizer, "frozen": optax.set_to_zero()}, labels)


def stop_gradient(loss: Callable, where: str) -> Callable:
    """Take the arrays whose path matches `where` for constants in a loss: no gradient is computed."""
    hold = lambda x, matched: jax.lax.stop_gradient(x) if matched else x
    return lambda params, batch, given=NOTHING: loss(_by_path(hold, params, where), batch, given)


# ---- the optimizers ------------------------------------------------------------------------------------------------
# Keywords that are not named go to `descend`.


def adamw(
    learning_rate: Rate, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, moments: str = "float32", **rest: Any
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101): torch's formula, HF's defaults.

    `moments` are kept in "float32" (8 bytes per parameter), "bfloat16" (4) or "int8" (2.03, arXiv:2110.02861).
    >>> step = train.optim.adamw(0.1)
    >>> step.update(jnp.ones(2), step.init(jnp.ones(2)), jnp.ones(2))[0]
    Array([-0.09999933, -0.09999933], dtype=float32)
    """
    return descend(scale_by_adam(b1, b2, eps, moments), learning_rate, **rest)


def lion(learning_rate: Rate, *, b1: float = 0.9, b2: float = 0.99, **rest: Any) -> optax.GradientTransformation:
    """Lion (arXiv:2302.06675): the sign of a momentum. Take a third to a tenth of AdamW's rate, and as much more decay.
    >>> step = train.optim.lion(0.1)
    >>> step.update(jnp.array([3.0, -4.0]), step.init(jnp.ones(2)), jnp.ones(2))[0]
    Array([-0.1,  0.1], dtype=float32)
    """
    return descend(optax.scale_by_lion(b1, b2), learning_rate, **rest)


def adafactor(
    learning_rate: Rate,
    *,
    spec: Any,
    decay: float = 0.8,
    eps: tuple[float, float] = (1e-30, 1e-3),
    threshold: float = 1.0,
    **rest: Any,
) -> optax.GradientTransformation:
    """Adafactor (arXiv:1804.04235) without momentum, as torch's: rates are relative to a parameter's size (1e-2).

    State is a row and a column per matrix of `spec`, the parameters' spec tree. The schedule alone sets the rate; torch
    bounds it by 1/sqrt(t) too.
    """
    direction = matrices.scale_by_adafactor(spec, decay=decay, eps=eps, threshold=threshold)
    return descend(direction, learning_rate, **rest)


def muon(
    learning_rate: Rate,
    *,
    spec: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    rms: float | None = 0.2,
    dtype: Any = jnp.bfloat16,
    **rest: Any,
) -> optax.GradientTransformation:
    """Muon for hidden matrices, as torch's ("match_rms_adamw", or "original" if rms is None); Adam for everything else.

    `spec` is the parameters' spec tree: it says which arrays are matrices, stacked or in [heads head_dim].
    """
    param = matrices.declared(spec)
    hidden = matrices.scale_by_muon(spec, momentum=momentum, nesterov=nesterov, steps=steps, rms=rms, dtype=dtype)
    label = lambda path, _: "muon" if matrices.is_hidden(param(path)) else "adam"
    labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
    direction = optax.partition({"muon": hidden, "adam": scale_by_adam(0.9, 0.999, 1e-8)}, labels)
    return descend(direction, learning_rate, **rest)


def sophia(
    learning_rate: Rate,
    *,
    b1: float = 0.965,
    b2: float = 0.99,
    gamma: float = 0.01,
    interval: int = 10,
    seed: int = 0,
    **rest: Any,
) -> optax.GradientTransformation:
    """Sophia-H (arXiv:2305.14342): momentum over the Hessian's diagonal, bounded by 1.

    The diagonal is estimated every `interval` steps as u * (H u) for random signs u, from the gradient function that
    `update` passes on; such a step costs about three.
    """
    options = {"weight_decay": 0.0, "gamma": gamma, "update_interval": interval}
    rule = optax.contrib.sophia(1.0, b1, b2, hessian_diagonal_fn=_hutchinson(seed), **options)
    return descend(optax.chain(rule, optax.scale(-1.0)), learning_rate, **rest)  # a rate of 1, undone


def _hutchinson(seed: int) -> optax.GradientTransformationExtraArgs:
    def update(grads: Any, count: Any, params: Any = None, *, grad_fn: Callable | None = None, **_: Any) -> tuple:
        if grad_fn is None:
            wanted = "call its update with grad_fn, as train.update does"
            raise ValueError(f"sophia needs gradients at other points: {wanted}")
        key = jax.random.fold_in(jax.random.key(seed), count)
        signs = optax.tree.random_like(key, params, jax.random.rademacher)
        return jax.tree.map(jnp.multiply, jax.jvp(grad_fn, (params,), (signs,))[1], signs), count + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros((), jnp.int32), update)


def schedule_free(
    learning_rate: Rate, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, clip: float | None = 1.0, **rest: Any
) -> optax.GradientTransformation:
    """Schedule-free AdamW (arXiv:2405.15682); the rate is constant after its warm-up. Parameters must be float32.

    The state's parameters are the points where gradients are taken; evaluate and save `averaged(state)`.
    """
    adam = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
    rate = (lambda count: learning_rate(count - 1)) if callable(learning_rate) else learning_rate  # optax counts from 1
    free = optax.contrib.schedule_free(descend(adam, learning_rate, clip=None, **rest), rate, b1)
    return free if clip is None else optax.chain(optax.clip_by_global_norm(clip), free)


def averaged(state: TrainState) -> Any:
    """Give the averaged parameters of a schedule-free run, those to evaluate and to save."""
    is_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)
    found = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_free) if is_free(x)]
    if len(found) != 1:
        parts = f"the optimizer's state has {len(found)} schedule-free parts"
        raise ValueError(f"{parts}; expected one, from schedule_free(...)")
    return optax.contrib.schedule_free_eval_params(found[0], state.params)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "adamw_8bit": partial(adamw, moments="int8"),
    "adamw_bf16": partial(adamw, moments="bfloat16"),
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "sophia": sophia,
    "schedule_free": schedule_free,
}


def optimizer(name: str, learning_rate: Rate, *, spec: Any, **options: Any) -> optax.GradientTransformation:
    """Build an optimizer by its name in `OPTIMIZERS` for the parameters of `spec`; matrices decay, as `decay_mask` says.

    `options` are those of the optimizer and of `descend`.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}")
    needs = {"spec": spec} if name in ("adafactor", "muon") else {}
    return OPTIMIZERS[name](learning_rate, **{"mask": decay_mask(spec)} | needs | options)
