"""SDPO: own samples are learnt from the model itself, which is told a sample that succeeded, or what was wrong."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from fdel import models, text
from fdel.media.sight import Sight
from fdel.recipe.methods.method import Method, Objective, Samples
from fdel.recipe.methods.samples import Rewarded, check_rewards, correction
from fdel.recipe.parse import key
from fdel.train import data, losses
from fdel.train.data import images
from fdel.train.data.encode import encode_rows
from fdel.train.data.images import Shown
from fdel.train.losses import distillation
from fdel.train.losses.forward import SEEN
from fdel.train.losses.self_distillation import TOLD
from fdel.train.rollout import Rewards, Sample, advantages

FEEDBACK = "privileged_context"  # the column of rows that says what is wrong with an answer
MARK = "\0"  # stands for the prompt while a template is filled in
THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Sdpo(Rewarded):
    """Keys of trainer_type sdpo (arXiv:2601.20802); names and defaults are TRL's."""

    loss_type: str = key("grpo", "variant of the loss: grpo, a mean over samples, or dapo, over tokens",
        choices=("grpo", "dapo"))  # fmt: skip
    scale_rewards: str = key("group", "standard deviation that advantages are divided by",
        choices=advantages.SCALES)  # fmt: skip
    sdpo_policy_loss_mode: str = key("distillation_only", "hybrid: add the policy loss of the rewards",
        choices=("distillation_only", "hybrid"))  # fmt: skip
    distillation_weight: float = key(1.0, "weight of the distance from the model that is told more", positive=True)
    distillation_mode: str = key("sampled_token", "what of the distributions is compared: the tokens that were drawn, the "
        "likeliest ones, or all", choices=("sampled_token", "topk_logits", "full_logits"))  # fmt: skip
    distillation_alpha: float = key(1.0, "from forward (0) to reverse KL (1)", least=0, most=1)
    distillation_topk: int = key(100, "how many tokens, the student's likeliest", needs="distillation_mode",
        of=("topk_logits",), positive=True)  # fmt: skip
    distillation_add_tail: bool = key(False, "all others are one more", needs="distillation_mode", of=("topk_logits",))
    distillation_is_clip: float = key(2.0, "most that a token weighs whose probability rises while it is learnt",
        positive=True)  # fmt: skip
    teacher_model_kind: str = key("ema", "who is told more: a running mean of the model, the model of before the first "
        "step (base), or as it is now (live)", choices=("ema", "base", "live"))  # fmt: skip
    teacher_update_rate: float = key(0.05, "share of the model in that mean", needs="teacher_model_kind", of=("ema",),
        positive=True, least=0, most=1)  # fmt: skip
    teacher_sync_steps: int = key(1, "steps between two of its changes", needs="teacher_model_kind", of=("ema",),
        positive=True)  # fmt: skip
    use_successful_as_teacher: bool = key(True, "tell the first sample of a group that succeeded")
    success_reward_threshold: float = key(1.0, "least reward of such a sample", needs="use_successful_as_teacher")
    dont_reprompt_on_self_success: bool = key(True, "never tell a sample itself", needs="use_successful_as_teacher")
    remove_thinking_from_demonstration: bool = key(
        False, "without its <think> parts", needs="use_successful_as_teacher"
    )
    include_environment_feedback: bool = key(False, f"tell the column {FEEDBACK} of a row, where it has text")
    environment_feedback_only_without_solution: bool = key(False, "only where no sample succeeded",
        needs="include_environment_feedback")  # fmt: skip
    reprompt_template: str = key("{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "what the model is asked then, in place of the prompt or the last message of it")  # fmt: skip
    solution_template: str = key("\nCorrect solution:\n\n{successful_previous_attempt}\n\n", "how it reads a solution")
    feedback_template: str = key(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "how it reads that column")  # fmt: skip
    max_reprompt_len: int = key(10240, "tokens of such a prompt, which loses its start", positive=True)

    @property
    def hybrid(self) -> bool:
        """Whether rewards are learnt too."""
        return self.sdpo_policy_loss_mode == "hybrid"

    @property
    def moves(self) -> tuple[float, int] | None:
        """How the teacher follows the model, as of a reference (`Synced.moves`)."""
        return (self.teacher_update_rate, self.teacher_sync_steps) if self.teacher_model_kind == "ema" else None


def options(k: Sdpo) -> losses.Policy:
    """Say which policy loss keys ask for; ValueError for keys that do not go together."""
    check_rewards(k)
    plain = {f.name: f.default for f in fields(k)}
    ours = ("epsilon", "epsilon_high", "importance_sampling_mode", "importance_sampling_cap", "scale_rewards")
    if not k.hybrid and (idle := [n for n in ours if getattr(k, n) != plain[n]]):
        raise ValueError(f"{idle[0]}: rewards are not learnt; set sdpo_policy_loss_mode: hybrid, or remove it")
    if k.distillation_mode == "sampled_token" and k.distillation_alpha != 1:
        raise ValueError(f"distillation_alpha={k.distillation_alpha}: of the drawn tokens alone there is only the reverse "
                         "KL, 1; set distillation_mode: full_logits or topk_logits, or remove it")  # fmt: skip
    if not (k.use_successful_as_teacher or k.include_environment_feedback):
        raise ValueError(
            "use_successful_as_teacher and include_environment_feedback: nothing is told; set one of the two"
        )
    if k.loss_type not in ("grpo", "dapo"):
        raise ValueError(f"loss_type={k.loss_type!r}; expected 'grpo' or 'dapo'")
    for name, x in k.penalties.items():
        raise ValueError(
            f"{name}={x}: the models' own distributions are compared, and by a repetition_penalty the one that is told a "
            "solution would be kept from repeating it; remove it"
        )
    for name, known in (("reprompt", ("prompt", "solution", "feedback")), ("solution", ("successful_previous_attempt",)),
                        ("feedback", ("feedback_raw",))):  # fmt: skip
        try:
            getattr(k, f"{name}_template").format(**dict.fromkeys(known, ""))
        except (KeyError, IndexError, ValueError, AttributeError) as e:
            raise ValueError(f"{name}_template: {e} cannot be filled in; known are {', '.join(known)}") from e
    clip = (None, k.importance_sampling_cap)
    return losses.Policy(
        loss_type=k.loss_type,
        epsilon=k.epsilon,
        epsilon_high=k.epsilon_high,
        correction=correction(k),
        correction_clip=clip,
    )


def objective(k: Sdpo, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss."""
    beta = k.distillation_alpha
    target: Callable | None = {
        "sampled_token": None,
        "full_logits": partial(losses.generalized_jsd, beta=beta),
        "topk_logits": partial(
            distillation.student_top_k, k=k.distillation_topk, beta=beta, tail=k.distillation_add_tail
        ),
    }[k.distillation_mode]
    how: dict[str, Any] = {"temperature": k.temperature, "clip": k.distillation_is_clip, "remat": remat, **k.routers}
    weights = k.distillation_weight, float(k.hybrid)
    return Objective(losses.self_distill(*model[:2], target=target, weights=weights, options=options(k), **how))


# ---- what the teacher is told ------------------------------------------------------------------------------------------


def told(
    k: Sdpo, samples: Sequence[Sample], rewards: Rewards, decode: Callable[[list[int]], str]
) -> list[dict[str, Any] | None]:
    """Give the row that each sample's teacher is asked, in place of its task's; None where there is nothing to tell.

    It shows and plays what the task does.
    """
    n, found = k.num_generations, list[dict[str, Any] | None]()
    good = (rewards.total >= k.success_reward_threshold) & k.use_successful_as_teacher
    for i, s in enumerate(samples):
        group = range(i // n * n, i // n * n + n)
        solved = next((j for j in group if good[j] and not (k.dont_reprompt_on_self_success and j == i)), None)
        feedback = s.task.row.get(FEEDBACK) if k.include_environment_feedback else None
        if not (isinstance(feedback, str) and feedback.strip()):
            feedback = None
        if k.environment_feedback_only_without_solution and solved is not None:
            feedback = None
        if solved is None and feedback is None:
            found.append(None)
            continue
        said = "" if solved is None else decode(samples[solved].completion)
        said = THOUGHTS.sub("", said).strip() if k.remove_thinking_from_demonstration else said
        solution = "" if solved is None else k.solution_template.format(successful_previous_attempt=said)
        hint = "" if feedback is None else k.feedback_template.format(feedback_raw=feedback)
        ask = lambda prompt, a=solution, b=hint: k.reprompt_template.format(prompt=prompt, solution=a, feedback=b)
        prompt = s.task.row["prompt"]
        if isinstance(prompt, list):
            prompt = [*prompt[:-1], {**prompt[-1], "content": _around(prompt[-1]["content"], ask)}]
        else:
            prompt = ask(prompt)
        found.append({**_without_files(s.task.row), **_columns(s.task.images), "prompt": prompt})
    return found


def _around(content: Any, ask: Callable[[str], str]) -> Any:
    """Write a message's content anew; of a list of parts all stand where its text would, what is no text once."""
    if not isinstance(content, list):
        return ask(content)
    say = lambda said: [{"type": "text", "text": said}] * bool(said)
    words = [p for p in content if isinstance(p, dict) and p.get("type", "text") == "text"]
    before, *after = ask(MARK).split(MARK)
    if not after:  # a template without the prompt
        return [*(p for p in content if p not in words), *say(before)]
    parts = [*say(before), *content, *say(after[0])]
    return parts + [p for said in after[1:] for p in (*words, *say(said))]


def _columns(shown: Sequence[Shown]) -> dict[str, list[Shown]]:
    """Give what a task shows and plays as the columns of a row, which fill its places in order."""
    return {names[0]: here for k, names in images.COLUMNS.items() if (here := [s for s in shown if s.kind == k])}


def _without_files(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the columns that hold files."""
    return {k: v for k, v in row.items() if not any(k in names for names in images.COLUMNS.values())}


def taught(
    k: Sdpo, samples: Sequence[Sample], rewards: Rewards, put: Callable, *, tok: text.Tokenizer, sight: Sight | None = None
) -> dict[str, Any]:  # fmt: skip
    """Make a step's batch: the samples, and beside each the same after what its teacher is asked."""
    ended = np.array([s.finish == "stop" for s in samples]) | (not k.mask_truncated_completions)
    learn = ended & ~np.isnan(rewards.total)
    batch = put(samples, advantages.grouped(rewards.total, k.num_generations, scale=k.scale_rewards), learn=learn)
    asked = told(k, samples, rewards, lambda ids: text.decode(tok, ids))
    lines = [("a prompt of sdpo", {**row, TOLD: i}) for i, row in enumerate(asked) if row is not None]
    settings = data.Settings(kind="prompt", length=1 << 24, sight=sight)
    examples = encode_rows(lines, tok, settings)[0] if lines else []
    prompts = {e.numbers["row"][TOLD]: _ending(e, k.max_reprompt_len) for e in examples}
    again = [_after(s, *prompts.get(i, (None, ()))) for i, s in enumerate(samples)]
    known = learn & np.array([i in prompts for i in range(len(samples))])
    length = k.max_reprompt_len + put.keywords["length"]  # type: ignore[attr-defined]
    rows = put(again, np.zeros(len(samples)), learn=known, length=length)
    short = batch["places"].shape[1] - rows["places"].shape[1]
    rows["places"] = np.pad(rows["places"], ((0, 0), (0, short)), constant_values=rows["tokens"].shape[1])
    return batch | {TOLD + name: rows[name] for name in ("tokens", "mask", "lengths", "places", *SEEN) if name in rows}


def _ending(e: data.Example, most: int) -> tuple[np.ndarray, tuple[Shown, ...]]:
    """Give the last tokens of a prompt, and what they show: of an image, a video or a sound all of its tokens, or none."""
    (shown,) = e.images or ((),)
    first = max(0, len(e.ids[0]) - most)
    first = max([first, *(s.start + len(s.run) for s in shown if s.start < first)])
    return e.ids[0][first:], tuple(replace(s, start=s.start - first) for s in shown if s.start >= first)


def _after(s: Sample, prompt: np.ndarray | None, shown: tuple[Shown, ...]) -> Sample:
    """The sample after another prompt, which shows this."""
    if prompt is None:
        return s
    start = len(s.task.prompt)
    moved = lambda x: np.concatenate([np.zeros(len(prompt), x.dtype), x[start:]])
    return replace(
        s, task=s.task._replace(prompt=tuple(prompt.tolist()), images=shown),
        tokens=np.concatenate([prompt, s.tokens[start:]]),
        drawn=moved(s.drawn), logps=moved(s.logps), kept=moved(s.kept), versions=moved(s.versions),
        asked=None if s.asked is None else tuple(at - start + len(prompt) for at in s.asked),
        images=tuple(replace(x, start=x.start - start + len(prompt)) for x in s.images),
    )  # fmt: skip


METHODS = (
    Method(
        "sdpo", Sdpo, 1e-6, objective, options, lambda k: {"kind": "prompt"},
        reference=lambda k: k.teacher_model_kind != "live", samples=Samples(taught, reads=True),
    ),
)  # fmt: skip
