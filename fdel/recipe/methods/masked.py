"""Masked language modelling: an encoder, as roberta, learns to fill in tokens that were hidden from it."""

from dataclasses import dataclass

from fdel import models
from fdel.recipe.methods.method import Adapted, Method, Objective, Rows, texts
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Keys(Rows, Adapted):
    """Keys of trainer_type masked_lm."""

    mask_token_id: int | None = key(None, "id of the token that stands for a hidden one; needed", least=0)
    mlm_probability: float = key(0.15, "share of the tokens that are asked for", positive=True)


def objective(k: Keys, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss."""
    if k.mask_token_id is None:
        raise ValueError("mask_token_id: missing; give the id of the tokenizer's mask token")
    return Objective(losses.masked_lm(*model[:2], k.mask_token_id, probability=k.mlm_probability, remat=remat))


METHODS = (Method("masked_lm", Keys, 5e-5, objective, data=texts, column="text"),)
