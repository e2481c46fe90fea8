"""Training: losses, composed steps, optimizers."""

from fdel.train import losses
from fdel.train.optim import adamw, decay_mask, warmup_cosine
from fdel.train.steps import TrainState, accumulate, grads, init_state, normalize, skip_nonfinite, update

__all__ = [
    "TrainState",
    "accumulate",
    "adamw",
    "decay_mask",
    "grads",
    "init_state",
    "losses",
    "normalize",
    "skip_nonfinite",
    "update",
    "warmup_cosine",
]
