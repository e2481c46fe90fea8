"""From a recipe to batches of own samples: tasks, the engine that answers them, rewards, and what is shown of it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdel import models, params, text, train
from fdel.params import lora
from fdel.recipe import build, parse, rival, seeing, serving
from fdel.recipe.check import when
from fdel.recipe.data import build_settings, build_sources
from fdel.recipe.methods.samples import Rloo
from fdel.recipe.read import Recipe
from fdel.recipe.rewards import build_turn, tools
from fdel.recipe.rows import placing
from fdel.recipe.settled import Settled, settle
from fdel.recipe.shown import Shown, statistics
from fdel.serve import Engine, SamplingParams
from fdel.serve.engine import weights
from fdel.train import data, losses, processes
from fdel.train.data.files import sources
from fdel.train.evaluation import place
from fdel.train.metrics import Row
from fdel.train.rollout import Adapter, Rewards, Sample, Source, Task, advantages, collate, rewards, run, turns
from fdel.train.rollout.local import local, mean
from fdel.train.steps import Step

NAME = "policy"  # of the adapter that is learnt
DECODE_STEPS = 8
HELD_OUT = 1 << 20  # added to the seed of a run, for samples of evaluation
NO_MESH = Mesh(np.empty((), object), ())  # set beside a trainer's, arrays themselves say where they are


class Policy(NamedTuple):
    """An engine, or its adapter, what of the trained weights it is given, the model without any, a mesh to set, a rival."""

    engine: Any
    served: Callable[[Any], Any]
    model: models.Model
    mesh: jax.sharding.Mesh
    rival: Engine | None = None


def build_tasks(
    recipe: Recipe | Settled, tok: text.Tokenizer, rows: Any = None, *, held_out: bool = False
) -> data.Tasks | None:
    """Read the tasks, `rows` if they are given; those of evaluation if `held_out`, None if there are none."""
    s = settle(recipe)
    informs = s.recipe.mixture.eval_informs if held_out else s.recipe.mixture.informs
    if held_out and rows is None and not informs:
        return None
    given = sources(build_sources(s, informs) if rows is None else rows)
    if offered := [turns.schema(f) for f in tools(s.keys.environment)]:
        given = [replace(x, transform=partial(_with_tools, offered, x.transform)) for x in given]
    build_turn(s.keys.environment, tok)  # now, if there is none
    try:
        settings = replace(task_settings(s), sight=seeing.seeing(s.recipe))
        found = data.tasks(given, replace(settings, batch=1) if held_out else settings, tok)
    except ValueError as e:
        raise parse.RecipeError(f"mixture.{'eval_' * held_out}informs: {e}") from e
    return seeing.checked(s, found)


def _with_tools(offered: list[dict], before: Callable | None, row: Any) -> Any:
    """Show a task's tools to the chat template."""
    row = row if before is None else before(row)
    return None if row is None else {"tools": offered, **row}


def task_settings(recipe: Recipe | Settled) -> data.Settings:
    """Say how rows become tasks: as many of a step as `num_generations` samples of each make its rows."""
    s = settle(recipe)
    k, room = s.keys, s.length - s.keys.max_completion_length
    length = min(k.max_prompt_length or room, room)
    return replace(build_settings(s), batch=s.rows // k.num_generations, length=length)


def several_processes(s: Settled) -> Iterator[str]:
    """Say what each process, which knows its own samples alone, cannot do."""
    k, parts = s.keys, processes.share(build.build_mesh(s))[1]
    yield from when(
        (k.rollout_ahead, "trainer.rollout_ahead: several processes sample in step in this version; set it to 0"),
        (k.sampling_devices, "trainer.sampling_devices: each of several processes samples on its own devices; set it to 0"),
        (getattr(k, "scale_rewards", "") == "batch",
         "trainer.scale_rewards: batch is over the samples of all processes, which know their own; use group or none"),
        (getattr(k, "normalize_advantages", False),
         "trainer.normalize_advantages: is over the samples of all processes, which know their own; remove it"),
        (s.rows // k.num_generations % parts,
         f"trainer.total_batch_size: {s.rows // k.num_generations} tasks of a step are not divisible by {parts} processes"),
    )  # fmt: skip


def build_policy(recipe: Recipe | Settled, model: models.Model, tok: text.Tokenizer) -> Policy:
    """Make the engine that samples `model`, a copy of it in the dtype of the computation; adapters are served as one.

    With several processes each has its own, of the whole model on its own devices; `sampling_devices` have nothing else.
    """
    s, inner = settle(recipe), models.heads.inner  # a critic's head stays with the trainer
    wanted, bare = serving.settings(s), model._replace(params=None)
    wanted = replace(wanted, max_length=s.length, rows=min(wanted.rows, s.rows))
    if not wanted.drafts:  # nobody reads along, so that several tokens may come at a time
        wanted = replace(wanted, decode_steps=min(DECODE_STEPS, s.keys.max_completion_length))
    several, mesh, here = jax.process_count() > 1, build.build_mesh(s).local_mesh, lambda tree: tree
    apart, put = s.keys.sampling_devices, local if several else jax.device_put
    if apart:
        mesh = params.make_mesh({"tp": apart}, jax.devices()[-apart:])
    if several or apart:
        here = partial(params.reshard, spec=inner(build.spec_of(s, model)), mesh=mesh, rules=s.serve_rules, put=put)
    cast = jax.jit(build.cast(s, model, lambda trained, *_: inner(trained)))
    whole = here(model.params if s.lora else cast(model.params))
    alike, mesh = NamedSharding(mesh, PartitionSpec()), NO_MESH if apart else mesh
    how: dict[str, Any] = {"tokenizer": tok, "sight": seeing.seeing(s.recipe)}
    with jax.set_mesh(mesh):  # what it computes with is here alone
        if not s.lora:
            engine = Engine(weights.placed(model._replace(params=whole), s.serve_rules), wanted, **how)
            other = rival.build_rival(s, model, engine, wanted, tok)
            frozen = lora.split(model.params, build.trained_whole(s, model))[1] if s.frozen else None
            full = lambda trained: lora.join(trained, frozen) if s.frozen else trained
            whole_of = lambda trained: here(cast(full(trained))) if several else inner(full(trained))
            return Policy(engine, whole_of, bare, mesh, other)
        adapted = params.unstack(whole)
        base = weights.placed(model._replace(params=lora.unload(adapted)), s.serve_rules)
        on_base = lora.graft(adapted, base.params)  # the engine knows its own arrays, and holds them once
        adapter = Adapter(Engine(base, wanted, adapters={NAME: on_base}, **how), NAME)
        other = rival.build_rival(s, model, adapter, wanted, tok)
    frozen = lora.split(on_base)[1]

    def served(trained: Any) -> Any:
        here = put(trained, alike) if several or apart else trained
        with jax.set_mesh(mesh):
            return lora.join(lora.listed(here, frozen), frozen)

    return Policy(adapter, served, bare, mesh, other)


def build_source(
    recipe: Recipe | Settled, policy: Policy, training: Any, tok: text.Tokenizer, tasks: data.Tasks,
    functions: Mapping[str, rewards.Reward],
) -> Source:  # fmt: skip
    """Join what `train.fit` draws batches from, for what is trained; `functions` are those of `build_rewards`."""
    s = settle(recipe)
    k, t = s.keys, s.recipe.trainer
    how: Any = s.method.samples
    mine, parts = processes.share(build.build_mesh(s)) if jax.process_count() > 1 else (0, 1)
    most = k.max_completion_length if parts > 1 else None
    media = seeing.media(s.recipe, tasks, more=k.environment is not None)
    put: Callable = partial(collate, length=s.length, rows=s.rows // parts, most=most, media=media)
    shared = placing(s, put)
    who = rival.Draws(k.num_generations, how.sides(k), how.writes(k))
    turn = build_turn(k.environment, tok, policy.engine)
    how_many: Any = dict(who=who, seed=t.seed, deadline=k.sampling_timeout, turn=turn)
    first, each = how.sides(k) if how.rival else (k.num_generations, 0)
    draw = lambda batch: rival.draw(policy.engine, policy.rival, batch, asked(k), **how_many)
    decode = lambda ids: text.decode(tok, ids)
    told = build_score(s, functions, decode)
    divergence = build_divergence(s, policy.model, training) if isinstance(k, Rloo) and k.beta else None
    count = k.num_completions_to_print * k.log_completions
    show = Shown(Path(t.save_directory) / "completions.jsonl", t.log_steps, count)

    def sample(batch: Sequence[Task]) -> tuple[dict[str, Any], Row]:
        begun, n = time.monotonic(), len(batch) // parts
        with jax.set_mesh(policy.mesh):  # samples may be drawn in another thread
            samples = draw(batch[mine * n :][:n])
            if k.sampler_sleeps:
                [e.sleep() for e in engines(policy)]
        drawn = time.monotonic()
        found = told(samples)
        drew = np.arange(len(samples)) % (first + each) < first if each > 1 else np.ones(len(samples), bool)
        of = found._replace(total=found.total[drew], each=found.each[:, drew])
        row = {**statistics(of, first if each > 1 else k.num_generations)}
        row |= run.metrics([x for x, mine in zip(samples, drew, strict=True) if mine])
        if who.share is not None:
            row["own_samples"] = float(rival.writes(who.share, batch, t.seed))
        show(samples, found, decode)
        if divergence is not None:
            kl = divergence(put(samples, np.zeros(len(samples))))
            found = found._replace(total=advantages.kl_penalty(found.total, kl, k.beta))
            row["kl"] = float(kl.sum() / max(1, sum(x.length for x in samples)))
        row |= {"time/rollout": drawn - begun, "time/reward": time.monotonic() - drawn}
        row["rollout/tokens_per_second"] = sum(x.length for x in samples) / max(drawn - begun, 1e-9)
        more = {"tok": tok, "sight": policy.engine.sight} if how.reads else {}
        return how.batch(k, samples, found, shared, **more), row if parts == 1 else mean(row)

    def publish(state: train.TrainState) -> None:
        show.step = int(state.step) // getattr(k, "updates", 1) + 1
        hand_over(policy, state.params)

    return Source(tasks, publish, sample, ahead=k.rollout_ahead)


def asked(k: Any) -> SamplingParams:
    """Say what a sample is drawn with."""
    return SamplingParams(
        max_tokens=k.max_completion_length, temperature=k.temperature, top_p=k.top_p, top_k=k.top_k, min_p=k.min_p,
        **k.penalties,
    )  # fmt: skip


def hand_over(policy: Policy, trained: Any) -> None:
    """Sample with other weights from now on."""
    new = policy.served(trained)
    with jax.set_mesh(policy.mesh):
        # In the program that copies: no copy between; and nobody else asks the sampler.
        policy.engine.update_params(new, reshard=True, cast=True, reuse=True)
        rival.publish(policy.rival, new)
        [e.wake() for e in engines(policy)]


def engines(policy: Policy) -> list[Any]:
    """List what samples: an adapter's engine may be the rival too."""
    mine = policy.engine.engine if isinstance(policy.engine, Adapter) else policy.engine
    return [mine, *([] if policy.rival in (None, mine) else [policy.rival])]


def build_evaluate(
    recipe: Recipe | Settled, policy: Policy, source: Source, tok: text.Tokenizer, tasks: data.Tasks,
    functions: Mapping[str, rewards.Reward],
) -> Callable[[train.TrainState], Row]:  # fmt: skip
    """Build `evaluate(state)` for `loop.fit`: rewards of the policy's samples of other tasks.

    All evaluations draw with the same noise, so that their numbers compare. With several processes each samples a part of
    the tasks. RecipeError if they cannot be divided.
    """
    s = settle(recipe)
    k, t, every = s.keys, s.recipe.trainer, [x._replace(number=i) for i, x in enumerate(tasks.rows)]
    mine, parts = processes.share(build.build_mesh(s)) if jax.process_count() > 1 else (0, 1)
    if len(every) % parts:
        raise parse.RecipeError(f"mixture.eval_informs: {len(every)} tasks are not divisible by {parts} processes")
    steps = -(-len(every) * k.num_generations // s.rows)
    score = build_score(s, functions, lambda ids: text.decode(tok, ids), steps=steps)
    turn = build_turn(k.environment, tok, policy.engine)

    def evaluate(state: train.TrainState) -> Row:
        source.wait()
        hand_over(policy, state.params)
        with jax.set_mesh(policy.mesh):
            samples = run.rollout(
                policy.engine,
                every[mine::parts],
                asked(k),
                samples=k.num_generations,
                seed=t.seed + HELD_OUT,
                turn=turn,
            )
        row = {**statistics(score(samples), k.num_generations), **run.metrics(samples)}
        return {f"eval_{name}": x for name, x in (row if parts == 1 else mean(row)).items()}

    return evaluate


def build_score(
    s: Settled, functions: Mapping[str, rewards.Reward], decode: Callable[[Sequence[int]], str], *, steps: int = 1
) -> Callable[[Sequence[Sample]], Rewards]:
    """Build what rewards samples, as many as of so many steps; of types that have no rewards, they are 0."""
    if not (getattr(s.keys, "reward_functions", ()) or hasattr(s.keys, "reward_functions") and s.keys.environment):
        return lambda samples: Rewards(np.zeros((0, len(samples))), np.zeros(len(samples)), ())
    weights = [f.weight for f in s.keys.reward_functions]
    return partial(rewards.score, functions, decode=decode, weights=weights, timeout=steps * s.keys.reward_timeout)


def build_divergence(s: Settled, model: models.Model, training: Any) -> Callable[[dict[str, Any]], np.ndarray]:
    """Build `kl(batch)`: log policy / reference of each row's tokens, summed, as they were drawn."""
    told = losses.token_logps(model.family, losses.forward.still(model.cfg), **s.keys.drawn)
    logps = jax.jit(build.cast(s, model, told))
    reference = lora.unload(training.given["base"]) if s.reference == "base" else training.given["reference"]
    mesh = build.build_mesh(s)

    def kl(batch: dict[str, Any]) -> np.ndarray:
        with jax.set_mesh(mesh):  # samples drawn ahead are looked at in another thread
            told = np.asarray(logps(reference, place(batch, params.batch_sharding(mesh))))
        return np.where(batch["mask"], batch["logps"] + batch["kept"] - told, 0).sum(1)

    return kl


def learning(s: Settled, model: models.Model, step: Step) -> Step:
    """Compute what a step needs once of its samples, then learn them, in one update or several."""
    k, parts, how = s.keys, s.recipe.trainer.gradient_accumulation_steps, s.method.samples
    if how is None or (getattr(k, "updates", 1) == 1 and how.first is None):
        return step
    logps = losses.token_logps(*model[:2], **k.drawn, remat=None)
    old: Callable = lambda p, batch, given: {"old": logps(p, batch)}
    found = build.cast(s, model, old if how.first is None else how.first(k, model))
    whole = (lambda p, given: lora.join(p, given["base"])) if s.frozen else lambda p, given: p
    before = lambda p, batch, given: found(whole(p, given), batch, given)
    then, apart = how.then and partial(how.then, k), k.steps_per_generation
    return train.minibatches(step, apart, times=k.num_iterations, first=before, then=then, chunks=parts * apart)
