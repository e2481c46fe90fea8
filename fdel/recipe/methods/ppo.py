"""PPO: own samples are learnt by a policy with a critic, a head on the policy's own hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdel import models
from fdel.recipe.methods.method import Method, Objective, Samples
from fdel.recipe.methods.samples import Rewarded, check_rewards, correction
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.rollout import Rewards, Sample, advantages


@dataclass(frozen=True)
class Ppo(Rewarded):
    """Keys of trainer_type ppo (arXiv:1707.06347, 2203.02155); defaults are TRL's."""

    num_generations: int = key(1, "samples of each prompt", least=1)
    temperature: float = key(0.7, "of sampling, and of the log-probabilities that are learnt", positive=True)
    num_iterations: int = key(4, "times that the samples of a step are learnt", positive=True)
    kl_coef: float = key(
        0.05, "weight of the divergence from the reference, which is taken off tokens' rewards", least=0
    )
    kl_estimator: str = key("k1", "how that is estimated", choices=("k1", "k3"))
    missing_eos_penalty: float | None = key(
        None, "taken off the reward of a sample that did not end by itself", least=0
    )
    whiten_rewards: bool = key(False, "divide rewards by their standard deviation over all tokens of a step")
    gamma: float = key(1.0, "what a reward counts a token earlier", least=0, most=1)
    lam: float = key(0.95, "of the advantages' estimate (GAE): 0 trusts the critic, 1 the rewards", least=0, most=1)
    vf_coef: float = key(0.1, "weight of the critic's loss", least=0)
    cliprange_value: float = key(0.2, "most by which values move away from those before the step", positive=True)


def options(k: Ppo) -> losses.Policy:
    """Say which policy loss keys ask for; ValueError for keys that do not go together."""
    check_rewards(k)
    if k.lora is not None:
        raise ValueError("lora: ppo trains all weights in this version, its critic's among them; remove it")
    clip = (None, k.importance_sampling_cap)
    return losses.Policy(epsilon=k.epsilon, epsilon_high=k.epsilon_high, correction=correction(k), correction_clip=clip)


def objective(k: Ppo, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of policy and critic."""
    how: dict[str, Any] = dict(vf_coef=k.vf_coef, cliprange_value=k.cliprange_value, **k.drawn, **k.routers)
    return Objective(losses.ppo(*model[:2], options(k), remat=remat, **how))


def scored(k: Ppo, samples: Sequence[Sample], rewards: Rewards, put: Callable) -> dict[str, Any]:
    """Put each sample's reward at its tokens; those without one are left out."""
    ended = np.array([s.finish == "stop" for s in samples])
    total = rewards.total - np.where(ended, 0.0, k.missing_eos_penalty or 0.0)
    learn = ~np.isnan(total) & (ended | (not k.mask_truncated_completions))
    return put(samples, np.nan_to_num(total), learn=learn)


def before(k: Ppo, model: models.Model) -> Callable[..., dict[str, Any]]:
    """Compute, by the weights before a step: the policy's log-probabilities, the critic's values, the divergence."""
    both = losses.token_values(*model[:2], **k.drawn)
    logps = losses.token_logps(*model[:2], **k.drawn, remat=None)

    def first(params: Any, batch: Any, given: Any) -> dict[str, Any]:
        old, values = both(params, batch)
        log_ratio = old - logps(models.heads.inner(given["reference"]), batch)
        kl = log_ratio if k.kl_estimator == "k1" else jnp.expm1(-log_ratio) + log_ratio
        return {"old": old, "values": values, "kl": jnp.where(batch["mask"], kl, 0)}

    return first


def estimate(k: Ppo, batch: dict[str, Any]) -> dict[str, Any]:
    """Make advantages and returns of a whole batch: the divergence is taken off rewards, which come with the last token."""
    mask = batch["mask"].astype(jnp.float32)
    last = (mask > 0) & (jnp.cumsum(mask[:, ::-1], 1)[:, ::-1] == 1)
    rewards = jnp.where(last, batch["advantages"], 0) - k.kl_coef * batch["kl"]
    if k.whiten_rewards:
        rewards = advantages.whiten(rewards, mask, shift_mean=False)
    gained, returns = advantages.gae(rewards, batch["values"], mask, gamma=k.gamma, lam=k.lam)
    return {**batch, "advantages": advantages.whiten(gained, mask), "returns": returns}


METHODS = (
    Method(
        "ppo",
        Ppo,
        3e-6,
        objective,
        options,
        lambda k: {"kind": "prompt"},
        reference=True,
        head=lambda k: ("value", 1),
        samples=Samples(scored, first=before, then=estimate),
    ),
)
