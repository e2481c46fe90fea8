"""Supervised fine-tuning: the next token of texts, or of their completions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fdel import models
from fdel.recipe.methods.method import Method, Objective, Text, texts
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.data.settings import check_ratios


@dataclass(frozen=True)
class Keys(Text):
    """Keys of trainer_type sft."""

    fcm_max_ratio: float = key(0.0,
        "forgetful causal masking: the largest share of a row's tokens that attention does not see")  # fmt: skip
    fcm_min_ratio: float = key(0.0, "the least share; each row draws its own", needs="fcm_max_ratio")
    loss_type: str = key("nll", "variant of the loss, as in TRL")
    label_smoothing: float = key(0.0, "share of wrong labels")
    z_loss: float = key(0.0, "weight of the squared log of the softmax's denominator")


def loss(k: Keys) -> Callable:
    """Choose the loss over tokens."""
    if k.loss_type not in ("nll", "dft") or (k.loss_type == "dft" and (k.label_smoothing or k.z_loss)):
        raise ValueError(f"loss_type={k.loss_type!r}; expected nll, or dft without label_smoothing and z_loss")
    check_ratios(k.fcm_min_ratio, k.fcm_max_ratio)
    nll = partial(losses.nll, label_smoothing=k.label_smoothing, z_loss=k.z_loss)
    return losses.dft if k.loss_type == "dft" else nll


def objective(k: Keys, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss; keys of attention are not hidden from layers that have none."""
    state = model.family.state_spec(model.cfg, pages=1, rows=1) if k.fcm_max_ratio else None
    if state is not None and state.slots is not None:
        name, ratio = model.family.__name__.rpartition(".")[2], f"fcm_max_ratio={k.fcm_max_ratio:g}"
        raise ValueError(f"{ratio}: {name} has recurrent layers, which hide no key; remove it")
    return Objective(losses.sft(*model[:2], loss=loss(k), remat=remat, **k.routers))


def data(k: Keys) -> dict[str, Any]:
    """Give the data settings."""
    return texts(k) | {"fcm_min_ratio": k.fcm_min_ratio, "fcm_max_ratio": k.fcm_max_ratio}


METHODS = (Method("sft", Keys, 2e-5, objective, loss, data, column="text", keeps_dropout=True),)
