"""Learning rates: `schedule(step)` is the rate of a step, a traced scalar. All rise linearly from 0 over `warmup` steps.

With the defaults each equals transformers' `get_*_schedule` of the name; `final` is a fraction of the peak.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

Decay = Callable[[Any], Any]


def _warm(peak: float, warmup: int, decay: Decay) -> optax.Schedule:
    """Rise to `peak`, then follow peak * decay(steps since)."""
    if warmup < 0:
        raise ValueError(f"warmup={warmup}; expected a number of steps, at least 0")
    return lambda step: peak * jnp.where(step < warmup, step / max(warmup, 1), decay(jnp.maximum(step - warmup, 0)))


def _progress(warmup: int, steps: int) -> Decay:
    """Map steps since the warm-up to 0...1."""
    if steps <= warmup:
        raise ValueError(f"steps={steps} end before the warm-up of {warmup} does; the schedule needs more steps")
    return lambda t: jnp.clip(t / (steps - warmup), 0, 1)


def _half_cosine(x: Any) -> Any:
    return 0.5 * (1 + jnp.cos(jnp.pi * x))


def constant(peak: float, *, warmup: int = 0) -> optax.Schedule:
    """Stay at `peak`.
    >>> train.schedules.constant(1.0, warmup=4)(jnp.arange(6))
    Array([0.  , 0.25, 0.5 , 0.75, 1.  , 1.  ], dtype=float32)
    """
    return _warm(peak, warmup, lambda t: 1.0)


def linear(peak: float, *, warmup: int = 0, steps: int, final: float = 0.0) -> optax.Schedule:
    """Fall along a line to final * peak at `steps`.
    >>> train.schedules.linear(1.0, warmup=2, steps=6)(jnp.arange(7))
    Array([0.  , 0.5 , 1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)
    """
    x = _progress(warmup, steps)
    return _warm(peak, warmup, lambda t: 1 - (1 - final) * x(t))


def cosine(peak: float, *, warmup: int = 0, steps: int, final: float = 0.0) -> optax.Schedule:
    """Fall along half a cosine to final * peak at `steps` (arXiv:1608.03983).
    >>> train.schedules.cosine(1.0, steps=2)(jnp.arange(3))
    Array([1.        , 0.49999997, 0.        ], dtype=float32)
    """
    return restarts(peak, warmup=warmup, steps=steps, final=final, cycles=1)


def restarts(peak: float, *, warmup: int = 0, steps: int, final: float = 0.0, cycles: int = 1) -> optax.Schedule:
    """Fall along half a cosine to final * peak, `cycles` times, starting each time from `peak` (arXiv:1608.03983).
    >>> train.schedules.restarts(1.0, steps=4, cycles=2)(jnp.arange(5))
    Array([1.        , 0.49999997, 1.        , 0.49999997, 0.        ], dtype=float32)
    """
    if cycles < 1:
        raise ValueError(f"cycles={cycles}; expected at least 1")
    x = _progress(warmup, steps)
    phase = lambda t: jnp.where(x(t) < 1, cycles * x(t) % 1, 1)
    return _warm(peak, warmup, lambda t: final + (1 - final) * _half_cosine(phase(t)))


def wsd(
    peak: float, *, warmup: int = 0, steps: int, decay: int | None = None, final: float = 0.0, shape: str = "linear"
) -> optax.Schedule:
    """Stay at `peak` and fall to final * peak over the last `decay` steps, a tenth of all if None (arXiv:2404.06395).

    `shape` of the fall: "linear", "cosine" or "1-sqrt" (arXiv:2405.18392).
    >>> train.schedules.wsd(1.0, steps=8, decay=4)(jnp.arange(9))
    Array([1.  , 1.  , 1.  , 1.  , 1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)
    """
    shapes: dict[str, Decay] = {"linear": lambda x: 1 - x, "cosine": _half_cosine, "1-sqrt": lambda x: 1 - jnp.sqrt(x)}
    if shape not in shapes:
        raise ValueError(f"shape={shape!r} is not one of {', '.join(shapes)}")
    decay = max(1, steps // 10) if decay is None else decay
    if decay < 1 or steps - decay < warmup:
        found = f"warmup={warmup} and decay={decay} do not fit in steps={steps}"
        raise ValueError(f"{found}; decay takes one step at least")
    x = _progress(steps - decay, steps)
    return _warm(peak, warmup, lambda t: final + (1 - final) * shapes[shape](x(t - (steps - decay - warmup))))


def inverse_sqrt(peak: float, *, warmup: int = 0, timescale: int | None = None) -> optax.Schedule:
    """Fall as 1 / sqrt(1 + t / timescale), t steps after the warm-up; `timescale` is `warmup` if None, or 10 000.

    With the default it is peak * sqrt(warmup / step) (arXiv:1706.03762).
    >>> train.schedules.inverse_sqrt(1.0, warmup=4)(jnp.arange(0, 20, 4))
    Array([0.        , 1.        , 0.70710677, 0.57735026, 0.5       ], dtype=float32)
    """
    scale = timescale or warmup or 10_000
    return _warm(peak, warmup, lambda t: 1 / jnp.sqrt(1 + t / scale))


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    f.__name__: f for f in (constant, linear, cosine, restarts, wsd, inverse_sqrt)
}


def schedule(name: str, peak: float, *, warmup: int = 0, steps: int | None = None, **options: Any) -> optax.Schedule:
    """Build a schedule by its name in `SCHEDULES`; `steps` is the whole run's, unused by those that never end.
    >>> train.schedule("linear", 1.0, steps=4)(jnp.arange(5))
    Array([1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(SCHEDULES)}")
    endless = name in ("constant", "inverse_sqrt")
    if not endless and steps is None:
        raise ValueError(f"schedule {name!r} needs steps, the length of the run")
    return SCHEDULES[name](peak, warmup=warmup, **({} if endless else {"steps": steps}), **options)
