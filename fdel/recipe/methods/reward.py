"""Models with a head of their own: rewards of pairs, and of the steps of a solution (prm)."""

from dataclasses import dataclass

from fdel import models
from fdel.recipe.methods.method import Adapted, Method, Objective
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Reward(Adapted):
    """Keys of trainer_type reward."""

    center_rewards_coefficient: float = key(0.0, "keeps rewards around 0")


@dataclass(frozen=True)
class Prm(Adapted):
    """Keys of trainer_type prm."""

    step_separator: str = key("\n", "text after each step, at whose end it is judged")
    train_on_last_step_only: bool = key(False, "learn the last step's label alone; evaluation has all")


def separated(k: Prm) -> None:
    """Refuse steps that nothing ends."""
    if not k.step_separator:
        raise ValueError("step_separator: found '', expected a text")


def reward(k: Reward, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of pairs."""
    center = k.center_rewards_coefficient
    return Objective(losses.reward(*model[:2], center_rewards_coefficient=center, remat=remat))


def prm(k: Prm, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of steps."""
    return Objective(losses.process_reward(*model[:2], remat=remat))


METHODS = (
    Method("reward", Reward, 1e-4, reward, data=lambda k: {"kind": "pairs", "overlong": "drop"},
           head=lambda k: ("sequence", 1)),
    Method(  # two classes with a bias, as transformers classifies tokens
        "prm", Prm, 1e-5, prm, separated, head=lambda k: ("token", 2),
        data=lambda k: {"kind": "process", "separator": k.step_separator, "last_only": k.train_on_last_step_only},
    ),
)  # fmt: skip
