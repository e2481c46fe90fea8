"""Training: losses, composed steps, the loop around them; `optim`, `schedules`, `parallel` and `precision` beside them."""

from . import data, extras, losses, optim, parallel, precision, schedules
from .evaluation import evaluator
from .extras import ema, minibatches, sync_reference
from .loop import Event, Loop, fit
from .optim import optimizer
from .routing import balance, count_choices, route
from .schedules import schedule
from .steps import TrainState, accumulate, compiler_options, gradcache, grads, init_state, normalize, update

__all__ = [
    "grads", "accumulate", "gradcache", "normalize", "update", "TrainState", "init_state", "compiler_options", "ema",
    "minibatches", "sync_reference", "fit", "Loop", "Event", "evaluator", "optimizer", "schedule", "count_choices",
    "balance",
    "route",
    "data", "extras", "losses", "optim", "parallel", "precision", "schedules",
]  # fmt: skip
