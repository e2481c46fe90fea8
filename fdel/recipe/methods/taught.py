"""Own samples, each token of which a teacher judges: IW-OPD, and MiniLLM, which adds rewards where there are any."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fdel import models
from fdel.recipe.methods.method import Method, Objective
from fdel.recipe.methods.samples import Chosen, Rewarded, Sampling, correction, weighed
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.rollout import Rewards, Sample, advantages

AVERAGED = tuple(name for name, (_, over) in losses.policy.TERMS.items() if over == "tokens")


@dataclass(frozen=True)
class IwOpd(Sampling):
    """Keys of trainer_type iw_opd (arXiv:2606.22600); defaults are TRL's."""

    num_generations: int = key(1, "samples of each prompt", least=1)
    iw_opd_gamma: float = key(0.5, "by how much the first token weighs more than the last", least=0)
    iw_opd_epsilon: float = key(1e-8, "least sum of a sample's absolute advantages", positive=True)


@dataclass(frozen=True)
class MiniLlm(Rewarded):
    """Keys of trainer_type minillm (arXiv:2306.08543); defaults are TRL's. Rewards may be left out."""

    loss_type: str = key("dapo", "variant of the loss, as in TRL", choices=AVERAGED)
    scale_rewards: str = key("group", "standard deviation that advantages are divided by",
        choices=advantages.SCALES)  # fmt: skip
    rkl_advantage: bool = key(True, "add log teacher / student of each token, and what follows it, to its advantage")
    gamma: float = key(0.0, "what a reward counts a token earlier", least=0, most=1)
    length_normalization: bool = key(True, "divide what follows a token by its number, with gamma", needs="gamma")
    single_step_decomposition: bool = key(True, "add the reverse KL divergence of whole distributions to the loss")


def iw_opd(k: IwOpd, model: models.Model, *, remat: str | None, teacher: models.Model) -> Objective:
    """Compose the loss: log teacher / student of each token, early ones more."""

    def advantage(drift: Any, t: Any) -> Any:
        return losses.prefix_weighted(drift, t.mask, gamma=k.iw_opd_gamma, eps=k.iw_opd_epsilon, segments=t.segments)

    how: dict[str, Any] = {**k.drawn, **k.routers, "remat": remat}
    reinforce = losses.Policy(loss_type="reinforce")
    return Objective(losses.taught_gradient(*model[:2], *teacher[:2], advantage, reinforce, **how))


def minillm_options(k: MiniLlm) -> losses.Policy:
    """Say which policy loss keys ask for; ValueError for keys that do not go together."""
    for name, x in k.penalties.items() if k.single_step_decomposition else ():
        raise ValueError(
            f"{name}={x} with single_step_decomposition, which compares whole distributions without it; set "
            "single_step_decomposition: false, or remove it"
        )
    return losses.Policy(
        loss_type=k.loss_type, epsilon=k.epsilon, epsilon_high=k.epsilon_high, correction=correction(k),
        correction_clip=(None, k.importance_sampling_cap),
    )  # fmt: skip


def minillm(k: MiniLlm, model: models.Model, *, remat: str | None, teacher: models.Model) -> Objective:
    """Compose the policy loss, and the divergence of whole distributions."""

    def advantage(drift: Any, t: Any) -> Any:
        if not k.rkl_advantage:
            return 0 * drift
        return advantages.reward_to_go(drift, t.mask, gamma=k.gamma, mean=k.length_normalization)

    how: dict[str, Any] = {**k.drawn, **k.routers, "remat": remat}
    gradient = losses.taught_gradient(*model[:2], *teacher[:2], advantage, minillm_options(k), **how)
    if not k.single_step_decomposition:
        return Objective(gradient)
    target = partial(losses.generalized_jsd, beta=1.0, temperature=k.temperature)
    whole = losses.distill(*model[:2], *teacher[:2], target=target, remat=remat)

    def loss(params: Any, batch: Any, given: Any) -> tuple[Any, dict[str, Any]]:
        (total, sums), (divergence, _) = gradient(params, batch, given), whole(params, batch, given)
        return total + divergence, sums | {"single_step_kl": divergence}

    return Objective(loss)


def grouped(k: MiniLlm, samples: Sequence[Sample], rewards: Rewards) -> Chosen:
    """Compare rewards within groups; without any, only the teacher says what is good."""
    return advantages.grouped(rewards.total, k.num_generations, scale=k.scale_rewards), None


prompts = lambda k: {"kind": "prompt"}
unrewarded = weighed(lambda k, samples, rewards: (np.zeros(len(samples)), None))
METHODS = (
    Method("iw_opd", IwOpd, 1e-6, iw_opd, lambda k: None, prompts, teacher=True, samples=unrewarded),
    Method("minillm", MiniLlm, 1e-6, minillm, minillm_options, prompts, teacher=True, samples=weighed(grouped)),
)
