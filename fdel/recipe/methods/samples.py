"""Learning from own samples by rewards: GRPO and its kin, and RLOO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fdel import models
from fdel.recipe.methods.method import Generating, Method, Objective, Samples, Synced
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.rollout import Rewards, Sample, advantages, select

Chosen = tuple[np.ndarray, np.ndarray | None]  # advantages, and which samples are learnt
VERIFIERS = (
    "exact", "boxed", "hashes", "think_format", "pattern", "overlong", "length_penalty", "json_schema", "unit_tests",
)  # fmt: skip


@dataclass(frozen=True)
class RewardFunction:
    """One function that says how good samples are; all of them are added up."""

    name: str | None = key(None, "of fdel.train.rollout: verify, form and programs", choices=VERIFIERS)
    path: str | None = key(None, "a Python function of yours, as rewards.py:length; called as TRL does: "
        "f(prompts=..., completions=..., completion_ids=..., column=...) gives a number or None for each")  # fmt: skip
    isolated: bool = key(False, "run it in a process of its own each time, which is killed if it hangs", needs="path")
    model: str | None = key(None, "a directory or Hub id of a reward model, as trainer_type reward makes them")
    judge: str | None = key(None, "a directory or Hub id of a model that writes how good samples are, from 1 to 10")
    endpoint: str | None = key(None, "the same by a server that speaks OpenAI's protocol: its URL, up to /v1")
    options: Mapping[str, Any] | None = key(None, "arguments of the named function, as {regex: ...}; of a judge: template, "
        "low, high, max_tokens; of an endpoint: template, low, high, model, key_file, timeout, at_once, tries")  # fmt: skip
    weight: float = key(1.0, "of its rewards in the sum")
    column: str | None = key(None, "what the answer of a row is called; default: answer", needs="name")


@dataclass(frozen=True)
class Environment:
    """What answers the model within a sample: tools that it calls, or a function of one's own."""

    tools: str | None = key(None, "Python functions that it may call: one, or a list, as tools.py:TOOLS")
    parser: str = key("auto", "how calls are written; auto: as the chat template shows", needs="tools")
    max_turns: int = key(8, "replies of a sample at the most", needs="tools", positive=True)
    tool_timeout: float = key(30.0, "seconds for the calls of a reply", needs="tools", positive=True)
    path: str | None = key(None, "a function of yours, as env.py:turn; it is given a sample so far and gives a "
        "rollout.Said")  # fmt: skip


@dataclass(frozen=True)
class Sampling(Generating):
    """Keys of the types that learn from own samples: what is drawn."""

    num_generations: int = key(8, "samples of each prompt", least=1)
    max_prompt_length: int | None = key(None, "longer prompts are left out; default: max_length less "
        "max_completion_length", positive=True)  # fmt: skip
    max_completion_length: int = key(256, "tokens of a sample at the most", positive=True)
    temperature: float = key(1.0, "of sampling, and of the log-probabilities that are learnt", positive=True)
    top_p: float = key(1.0, "of sampling: share of the probability that is kept", positive=True, least=0, most=1)
    top_k: int = key(0, "of sampling: tokens that are kept; 0: all", least=0)
    min_p: float = key(0.0, "of sampling: least probability, of the likeliest one's", least=0, most=1)
    repetition_penalty: float = key(1.0, "of sampling, and of the log-probabilities of policy losses: divides positive "
        "logits of tokens that stand there already, and multiplies others", positive=True)  # fmt: skip
    presence_penalty: float = key(0.0, "likewise: taken off the logits of tokens that were drawn in this turn already",
        least=-2, most=2)  # fmt: skip
    frequency_penalty: float = key(0.0, "likewise: taken off for each time that they were drawn", least=-2, most=2)
    sampling_timeout: float | None = key(None, "seconds, after which samples of a step are cut where they are; a run "
        "is then not repeated bit by bit", positive=True)  # fmt: skip
    rollout_ahead: int = key(0, "steps by which samples are drawn before they are learnt, in a thread meanwhile; "
        "importance_sampling_mode then corrects them", least=0)  # fmt: skip
    sampling_devices: int = key(0, "the last so many devices sample, divided along tp, and the others train; 0: all do "
        "both, in turn", least=0)  # fmt: skip
    sampler_sleeps: bool = key(False, "free the sampler's cache while samples are learnt")
    mask_truncated_completions: bool = key(False, "learn only samples that ended by themselves")
    environment: Environment | None = key(None, "what answers the model; a sample then has several replies")
    log_completions: bool = key(False, "print some samples at each log_steps")
    num_completions_to_print: int = key(4, "how many", needs="log_completions", positive=True)

    @property
    def drawn(self) -> dict[str, Any]:
        """What losses are told of the distribution that samples were drawn from."""
        return {"temperature": self.temperature, **self.penalties}

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are asked for, by their keys."""
        asked = losses.penalties.Penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return {f.name: x for f in fields(asked) if (x := getattr(asked, f.name)) != f.default}


@dataclass(frozen=True)
class Scored(Sampling):
    """Keys of the types whose samples are rewarded: how they are."""

    reward_functions: tuple[RewardFunction, ...] = key((), "what rewards samples; at least one")
    reward_timeout: float = key(60.0, "seconds for all rewards of a step; who is late abstains", positive=True)


@dataclass(frozen=True)
class Rewarded(Scored):
    """Keys of the types that learn rewards by a policy loss: how samples are learnt."""

    steps_per_generation: int = key(1, "updates into which the samples of a step are divided", positive=True)
    num_iterations: int = key(1, "times that the samples of a step are learnt", positive=True)
    epsilon: float = key(0.2, "ratios are clipped to 1 - epsilon", least=0)
    epsilon_high: float | None = key(None, "and to 1 + epsilon_high; default: epsilon", least=0)
    importance_sampling_mode: str | None = key(None, "weights by trainer / sampler: token_truncate, token_mask, "
        "sequence_truncate or sequence_mask; default: none, or sequence_mask with rollout_ahead",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))  # fmt: skip
    importance_sampling_cap: float = key(3.0, "of these weights", positive=True)

    @property
    def updates(self) -> int:
        """Optimizer steps of one step of the run."""
        return self.steps_per_generation * self.num_iterations


@dataclass(frozen=True)
class Weighed(Rewarded):
    """Keys of the types that weigh each sample by its advantage: how samples are put into rows."""

    samples_per_row: int = key(1, "samples of a prompt that are learnt in one row, which has their prompt once; long "
        "prompts are then computed that much less", least=1)  # fmt: skip
    pack_samples: bool = key(False, "samples of any prompts share rows of max_length tokens, so that less of them is "
        "padding")  # fmt: skip


@dataclass(frozen=True)
class Grpo(Synced, Weighed):
    """Keys of trainer_type grpo: TRL's variants of the loss are settings of it."""

    loss_type: str = key("dapo", "variant of the loss, as in TRL", choices=tuple(losses.policy.TERMS))
    importance_sampling_level: str = key("token", "what a ratio is of", choices=losses.policy.LEVELS)
    delta: float | None = key(None, "largest ratio", positive=True)
    beta: float = key(0.0, "weight of the divergence from the reference", least=0)
    use_bias_correction_kl: bool | None = key(None, "weigh the divergence by the ratio; default: as in TRL, but for gmpo",
        needs="beta")  # fmt: skip
    scale_rewards: str = key("group", "standard deviation that advantages are divided by",
        choices=advantages.SCALES)  # fmt: skip
    multi_objective_aggregation: str = key("sum_then_normalize", "order, with several rewards",
        choices=("sum_then_normalize", "normalize_then_sum"))  # fmt: skip
    entropy_coef: float = key(0.0, "weight of the mean entropy, which is raised", least=0)
    top_entropy_quantile: float = key(1.0, "share of the tokens, the most uncertain ones, that is learnt", positive=True,
        most=1, least=0)  # fmt: skip
    off_policy_mask_threshold: float | None = key(None, "leave out samples worse than the mean whose log-probability "
        "has fallen by more than this per token")  # fmt: skip


@dataclass(frozen=True)
class Gspo(Grpo):
    """Keys of trainer_type gspo (arXiv:2507.18071)."""

    loss_type: str = key("grpo", "variant of the loss, as in TRL", choices=tuple(losses.policy.TERMS))
    importance_sampling_level: str = key("sequence", "what a ratio is of", choices=losses.policy.LEVELS)
    epsilon: float = key(3e-4, "ratios are clipped to 1 - epsilon", least=0)
    epsilon_high: float | None = key(4e-4, "and to 1 + epsilon_high; default: epsilon", least=0)


@dataclass(frozen=True)
class Gfpo(Grpo):
    """Keys of trainer_type gfpo (arXiv:2508.09726)."""

    num_remains_in_group: int = key(4, "samples of each prompt that are learnt: the best by filter_by", positive=True)
    filter_by: str = key("length", "what is best: shortness, reward per token, or half of each",
        choices=("length", "efficiency", "both"))  # fmt: skip


@dataclass(frozen=True)
class Rlvr(Grpo):
    """Keys of trainer_type rlvr: grpo on rewards that are verified."""

    mask_truncated_completions: bool = key(True, "learn only samples that ended by themselves")
    difficulty_column: str | None = key(None, "column of rows with a difficulty from 0 to 1, by which advantages are "
        "weighed from 0.5 to 2")  # fmt: skip


@dataclass(frozen=True)
class Rloo(Weighed):
    """Keys of trainer_type rloo (arXiv:2402.14740)."""

    num_generations: int = key(2, "samples of each prompt", least=2)
    beta: float = key(0.05, "weight of the divergence from the reference, which is taken off the rewards", least=0)
    normalize_advantages: bool = key(False, "scale advantages over the batch")


def check_rewards(k: Scored) -> None:
    """Raise ValueError for reward functions that are none."""
    if not (k.reward_functions or k.environment):
        raise ValueError("reward_functions: none; give at least one, as [{name: boxed}]")
    for i, f in enumerate(k.reward_functions):
        if sum(x is not None for x in (f.name, f.path, f.model, f.judge, f.endpoint)) != 1:
            raise ValueError(f"reward_functions[{i}]: expected one of name, path, model, judge and endpoint")


def options(k: Rewarded) -> losses.Policy:
    """Say which policy loss keys ask for; ValueError for keys that do not go together."""
    check_rewards(k)
    known = {f.name for f in fields(losses.Policy)} - {"max_completion_length"}
    given: dict[str, Any] = {f.name: getattr(k, f.name) for f in fields(k) if f.name in known}
    if isinstance(k, Rloo):
        given |= {"loss_type": "grpo", "importance_sampling_level": "sequence_sum", "beta": 0.0}  # in the rewards
    if isinstance(k, Gfpo) and not k.num_remains_in_group <= k.num_generations:
        raise ValueError(
            f"num_remains_in_group={k.num_remains_in_group} of num_generations={k.num_generations}; lower it"
        )
    given |= {"max_completion_length": k.max_completion_length} if given["loss_type"] == "dr_grpo" else {}
    return losses.Policy(**given, correction=correction(k), correction_clip=(None, k.importance_sampling_cap))


def correction(k: Rewarded) -> str | None:
    """How the sampler's distribution is corrected for: as keys say, always where samples are drawn ahead."""
    return k.importance_sampling_mode or ("sequence_mask" if k.rollout_ahead else None)


def objective(k: Rewarded, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss."""
    o = options(k)
    rows = losses.policy_outputs(*model[:2], reference=o.beta > 0, router=bool(k.routers), remat=remat, **k.drawn)
    return Objective(rows, losses.policy_objective(o, **k.routers), o.coupled)


# ---- advantages ----------------------------------------------------------------------------------------------------


def grpo(k: Grpo, samples: Sequence[Sample], rewards: Rewards) -> Chosen:
    """Compare each sample with its group."""
    if k.multi_objective_aggregation == "normalize_then_sum":
        weights = np.array([f.weight for f in k.reward_functions])
        return advantages.normalize_then_sum(rewards.each, k.num_generations, weights), None
    return advantages.grouped(rewards.total, k.num_generations, scale=k.scale_rewards), None


def gfpo(k: Gfpo, samples: Sequence[Sample], rewards: Rewards) -> Chosen:
    """Compare the best samples of each group, by length or reward per token, with each other."""
    length, efficiency = {"length": (1.0, 0.0), "efficiency": (0.0, 1.0), "both": (0.5, 0.5)}[k.filter_by]
    lengths, n = np.array([s.length for s in samples]), k.num_generations
    scores = select.conciseness(rewards.total, lengths, n, length=length, efficiency=efficiency)
    chosen = select.best(scores, n, k.num_remains_in_group)
    kept = rewards._replace(total=np.where(chosen, rewards.total, np.nan), each=np.where(chosen, rewards.each, np.nan))
    return grpo(k, samples, kept)[0], chosen


def rlvr(k: Rlvr, samples: Sequence[Sample], rewards: Rewards) -> Chosen:
    """Compare each sample with its group, and weigh by the task's difficulty."""
    found, chosen = grpo(k, samples, rewards)
    if k.difficulty_column is not None:
        told = np.array([s.task.row.get(k.difficulty_column, np.nan) for s in samples], np.float64)
        found = found * select.difficulty_weights(told)
    return found, chosen


def rloo(k: Rloo, samples: Sequence[Sample], rewards: Rewards) -> Chosen:
    """Compare each sample with the others of its group."""
    return advantages.leave_one_out(rewards.total, k.num_generations, normalize=k.normalize_advantages), None


# ---- the types -----------------------------------------------------------------------------------------------------


def weighed(choose: Callable[[Any, Sequence[Sample], Rewards], Chosen]) -> Samples:
    """Learn each sample by its advantage; `choose` gives advantages, and which samples are learnt.

    Those without a reward are left out, and cut ones if keys say so.
    """

    def batch(k: Sampling, samples: Sequence[Sample], rewards: Rewards, put: Callable) -> dict[str, Any]:
        found, learn = choose(k, samples, rewards)
        ended = np.array([s.finish == "stop" for s in samples]) | (not k.mask_truncated_completions)
        return put(samples, found, learn=ended & ~np.isnan(rewards.total) & (True if learn is None else learn))

    return Samples(batch)


def sampling(name: str, keys: type, choose: Callable[[Any, Sequence[Sample], Rewards], Chosen]) -> Method:
    """Declare a type that learns rewards by a policy loss; `choose` gives advantages, and which samples are learnt."""
    data = lambda k: {"kind": "prompt"}
    refers = lambda k: k.beta > 0
    return Method(name, keys, 1e-6, objective, options, data, samples=weighed(choose), reference=refers)


METHODS = (
    sampling("grpo", Grpo, grpo),
    sampling("gspo", Gspo, grpo),
    sampling("gfpo", Gfpo, gfpo),
    sampling("rlvr", Rlvr, rlvr),
    sampling("rloo", Rloo, rloo),
)
