"""Training: losses, composed steps, optimizers, schedules, precision."""

from fdel.train import losses
from fdel.train.evaluation import evaluator
from fdel.train.extras import carry, ema, sync_reference
from fdel.train.loop import Event, Loop, fit
from fdel.train.metrics import reporting
from fdel.train.optim import (
    OPTIMIZERS,
    adafactor,
    adamw,
    averaged,
    decay_mask,
    descend,
    freeze,
    lion,
    muon,
    optimizer,
    schedule_free,
    sophia,
    stop_gradient,
)
from fdel.train.precision import add_stochastic, compute, loss_scale, rescale, round_stochastic, scaled
from fdel.train.schedules import SCHEDULES, constant, cosine, inverse_sqrt, linear, restarts, schedule, wsd
from fdel.train.steps import (
    TrainState,
    accumulate,
    compiler_options,
    gradcache,
    grads,
    init_state,
    normalize,
    update,
    with_extra,
)

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Event",
    "Loop",
    "TrainState",
    "accumulate",
    "adafactor",
    "adamw",
    "add_stochastic",
    "averaged",
    "carry",
    "compiler_options",
    "compute",
    "constant",
    "cosine",
    "decay_mask",
    "descend",
    "ema",
    "evaluator",
    "fit",
    "freeze",
    "gradcache",
    "grads",
    "init_state",
    "inverse_sqrt",
    "linear",
    "lion",
    "loss_scale",
    "losses",
    "muon",
    "normalize",
    "optimizer",
    "reporting",
    "rescale",
    "restarts",
    "round_stochastic",
    "scaled",
    "schedule",
    "schedule_free",
    "sophia",
    "stop_gradient",
    "sync_reference",
    "update",
    "with_extra",
    "wsd",
]
