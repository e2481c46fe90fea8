"""Embeddings of texts: neighbours by meaning, with negatives of the batch or of the row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fdel import models
from fdel.recipe.methods.method import Adapted, Method, Objective
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Keys(Adapted):
    """Keys of trainer_type embedding."""

    loss_type: str = key("info_nce", "variant of the loss, as in TRL")
    temperature: float | None = key(None, "of the cosines; default: 0.05")
    negatives: int = key(1, "hard negatives of a row, at the most", least=0)
    pooling: str = key("last", "which hidden states embed a text", choices=("last", "mean", "cls"))
    margin: float = key(0.2, "of loss_type triplet, in cosine distance")
    matryoshka_dims: tuple[int, ...] | None = key(None, "learn prefixes of these sizes as well")


def loss(k: Keys) -> Callable:
    """Choose the loss over embeddings."""
    if k.loss_type not in ("info_nce", "triplet"):
        raise ValueError(f"loss_type={k.loss_type!r}; expected info_nce or triplet")
    if k.loss_type == "triplet" and (k.temperature is not None or not k.negatives):
        raise ValueError("loss_type='triplet' has no temperature, and needs negatives of at least 1")
    if k.loss_type == "info_nce" and k.margin != 0.2:
        raise ValueError(f"margin={k.margin}: loss_type='info_nce' does not read it; remove it, or use triplet")
    one = partial(losses.info_nce, temperature=0.05 if k.temperature is None else k.temperature)
    if k.loss_type == "triplet":
        one = partial(losses.triplet, margin=k.margin)
    return one if k.matryoshka_dims is None else losses.matryoshka(one, k.matryoshka_dims)


def objective(k: Keys, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the embeddings and their loss, in which rows are each other's negatives."""
    pool = {"mean": losses.mean_token, "last": losses.last_token, "cls": losses.first_token}[k.pooling]
    return Objective(*losses.embedding(*model[:2], loss=loss(k), pool=pool, remat=remat), coupled=True)


METHODS = (
    Method("embedding", Keys, 2e-5, objective, loss, lambda k: {"kind": "embedding", "negatives": k.negatives},
           column="anchor", keeps_dropout=True, pooling=lambda k: models.pooling.Pooling((k.pooling,))),
)  # fmt: skip
