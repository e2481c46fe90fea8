"""Who draws the second sample of each prompt, where a type compares the policy's with another model's."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fdel import models, text
from fdel.ops.weights import LowRank, is_weight
from fdel.params import lora
from fdel.recipe import build, parse, seeing
from fdel.recipe.settled import Settled
from fdel.serve import Engine, SamplingParams, Settings
from fdel.serve.engine import weights
from fdel.train.rollout import Sample, Task, Turn, mixture, rollout


def check(s: Settled) -> None:
    """Raise RecipeError for what has no rival in this version."""
    if jax.process_count() > 1:
        raise parse.RecipeError(
            f"trainer.trainer_type: {s.method.name} samples in one process in this version; start one"
        )
    if s.keys.sampling_devices:
        raise parse.RecipeError(f"trainer.sampling_devices: {s.method.name} samples from two models; set it to 0")
    if s.format:
        raise parse.RecipeError(f"quantization: {s.method.name} samples from two models in full precision; remove it")


def build_rival(s: Settled, model: models.Model, engine: Any, settings: Settings, tok: text.Tokenizer) -> Engine | None:
    """Make the engine of the mixture of policy and reference that a type asks for, None if it asks for none.

    The reference alone has an engine of its own too, unless it is the base of the policy's adapters; so has a teacher that
    writes texts.
    """
    if s.method.samples is not None and s.method.samples.writes(s.keys) is not None:
        check(s)
        teacher: Any = build.build_teacher(s)
        sees = seeing.seeing(s.recipe) if hasattr(teacher.family, "encode") else None
        return Engine(weights.placed(teacher, s.serve_rules), settings, tokenizer=tok, sight=sees)
    if s.method.samples is None or s.method.samples.rival is None:
        return None
    check(s)
    share = s.method.samples.rival(s.keys)
    if share == 1 and s.reference == "base":
        return engine.engine
    reference = build.load_reference(s, model) if s.reference == "reference_model" else lora.unload(model.params)
    told = jax.jit(build.cast(s, model, lambda p, *_: p))
    mixed = model._replace(params=told(reference))
    if share < 1:
        policy = lora.merge(model.params) if s.lora else told(model.params)
        both = {**policy, "reference": mixed.params}
        try:
            mixed = models.Model(mixture, mixture.Config(model.family, model.cfg, share), both)
            jax.eval_shape(lambda p: mixture.head(p, mixed.cfg).weight, both)
        except ValueError as e:
            raise parse.RecipeError(f"trainer.trainer_type: {s.method.name} samples a mixture, and {e}") from e
    return Engine(weights.placed(mixed, s.serve_rules), settings, tokenizer=tok, sight=seeing.seeing(s.recipe))


def publish(rival: Engine | None, new: Any) -> None:
    """Give a mixture the policy's newest weights, adapters or all; the reference's stay."""
    if rival is None or rival.model.family is not mixture:
        return
    adapted = any(isinstance(w, LowRank) for w in jax.tree.leaves(new, is_leaf=is_weight))
    policy = jax.jit(lora.merge)(new) if adapted else new
    rival.update_params({**policy, "reference": rival.model.params["reference"]}, reshard=True, cast=True)


class Draws(NamedTuple):
    """Who draws how many of a prompt: all the policy, or with a rival so many on each of two sides, the policy's first.

    With a `share`, one of them draws all samples of a step: the policy in that share of the steps.
    """

    samples: int
    sides: tuple[int, int] = (1, 1)
    share: float | None = None


def draw(
    engine: Any, rival: Engine | None, tasks: Sequence[Task], ask: SamplingParams, *, who: Draws, seed: int,
    deadline: float | None, turn: Turn | None = None,
) -> list[Sample]:  # fmt: skip
    """Draw the samples of each task."""
    sides, share = who.sides, who.share
    if rival is None or share is not None:
        drawing = engine if rival is None or share is None or writes(share, tasks, seed) else rival
        return rollout(drawing, tasks, ask, samples=who.samples, seed=seed, deadline=deadline, turn=turn)
    draw = partial(rollout, tasks=tasks, ask=ask, deadline=deadline, turn=turn)
    found = [draw(e, samples=n, seed=seed + i) for i, (e, n) in enumerate(zip((engine, rival), sides, strict=True))]
    each = [[x[i * n : (i + 1) * n] for i in range(len(tasks))] for x, n in zip(found, sides, strict=True)]
    return [sample for mine, theirs in zip(*each, strict=True) for sample in (*mine, *theirs)]


def writes(share: float, tasks: Sequence[Task], seed: int) -> bool:
    """Tell whether the policy draws the samples of this step: it depends on the seed and the step's tasks alone."""
    return bool(np.random.default_rng((seed, tasks[0].number)).random() < share)
