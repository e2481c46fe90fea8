"""Discrete diffusion: a bidirectional model, as gidd, learns to restore tokens that were masked or replaced."""

from dataclasses import dataclass

from fdel import models
from fdel.ops.diffusion import Noise
from fdel.recipe.methods.method import Adapted, Method, Objective, Rows, texts
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Keys(Rows, Adapted):
    """Keys of trainer_type diffusion."""

    mask_token_id: int | None = key(None, "id of the token that stands for a hidden one; needed", least=0)
    weighting: str = key("log_snr", "elbo: the loss is the negative ELBO; log_snr: as GIDD was trained",
        choices=("log_snr", "elbo"))  # fmt: skip
    max_loss_weight: float = key(1e3, "where the weight of a token is cut off", positive=True)


def objective(k: Keys, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss; the noise is the config's, where it has one."""
    c, like = model.cfg, Noise(2, 0)
    if k.mask_token_id is None or not k.mask_token_id < c.vocab:
        raise ValueError(f"mask_token_id={k.mask_token_id}; expected the id of the mask token, below {c.vocab}")
    shift, low, high = (
        getattr(c, name, default)
        for name, default in (("noise_type", like.shift), ("min_log_snr", like.low), ("max_log_snr", like.high))
    )
    noise = Noise(c.vocab, k.mask_token_id, shift, low, high)
    loss = losses.diffusion(model.family, c, noise, weighting=k.weighting, most=k.max_loss_weight, remat=remat)
    return Objective(loss)


METHODS = (Method("diffusion", Keys, 1e-4, objective, data=texts, column="text"),)
