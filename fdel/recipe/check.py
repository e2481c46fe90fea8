"""What of a recipe cannot be done: keys that this version does not honour, that nothing reads, or that disagree."""

from collections.abc import Iterator
from typing import Any

from fdel import ops, params, train
from fdel.ops.layers import remat_policy
from fdel.params.quantize import fits
from fdel.recipe import methods, names, parse
from fdel.recipe.read import Recipe
from fdel.recipe.settled import Settled, settle


def faults(recipe: Recipe) -> list[str]:
    """List what cannot be done, each with the key's path; no file is looked at."""
    other: list[str] = []
    s: Settled | None = None
    try:
        s = settle(recipe)
    except parse.RecipeError as e:
        other += e.faults if recipe.trainer.trainer_type in methods.METHODS else ()
    found = [*_actions(recipe), *_keys(recipe, s and s.keys), *other]
    found += [*_kernels(s), *_quantization(s)] if s is not None else ()
    if s is not None and s.trains:
        found += [*_models(s), *_data(s), *_trainer(s)]
    return list(dict.fromkeys([*found, *_devices(recipe)]))


def when(*rows: tuple[Any, str]) -> list[str]:
    """List the texts of the rows whose condition holds."""
    return [text for wrong, text in rows if wrong]


def _keys(recipe: Recipe, keys: Any) -> Iterator[str]:
    """Say which keys are not honoured, which nothing reads, and which numbers are too small or too large."""
    kind = recipe.trainer.trainer_type
    for path, f, section in recipe.keys():
        m, value = f.metadata, getattr(section, f.name)
        if value == f.default or not m:
            continue
        if m["refuse"] and value not in m["honours"]:
            yield f"{path}: {parse.shown(value)} cannot be honoured: {m['refuse']}"
        elif m["by"] and kind in methods.METHODS and kind not in m["by"]:
            yield f"{path}: trainer_type {kind} does not read it ({', '.join(m['by'])}: yes); remove it"
        elif other := m["needs"]:
            found = getattr(keys if section is recipe.trainer and hasattr(keys, other) else section, other)
            found = found if isinstance(found, tuple) else (found,)
            if not m["of"] and not any(found):
                yield f"{path}: nothing reads it without {other}; set that too, or remove this"
            elif m["of"] and not set(m["of"]) & set(found):
                have = ", ".join(map(str, found))
                yield f"{path}: {other} {have} does not read it ({', '.join(m['of'])}: yes); remove it"
        least, most = m.get("least"), m.get("most")
        if isinstance(value, int | float) and m.get("positive") and value <= 0:
            yield f"{path}: found {value}, expected a positive number"
        elif value is not None and least is not None and not (least <= value and (most is None or value <= most)):
            yield f"{path}: found {value}, expected {least:g}{' or more' if most is None else f' to {most:g}'}"
    share = recipe.esurge.hbm_utilization
    if not 0 < share <= 1:
        yield f"esurge.hbm_utilization: found {share:g}, expected a share above 0, of 1 at the most"


def _actions(recipe: Recipe) -> Iterator[str]:
    trained = any(a.name == "train" for a in recipe.actions)
    for i, a in enumerate(recipe.actions):
        if a.name in ("eval", "serve") and not trained and recipe.model.config is not None:
            yield f"model.config: random weights have nothing to say to {a.name}; train them first"
        elif a.name in ("eval", "serve") and not trained and not recipe.model.name_or_path:
            yield "model.name_or_path: missing; give a directory or a Hub id"
        if a.name == "eval" and not a.settings.tasks:
            yield f"actions[{i}].eval.tasks: missing; name some, such as [hellaswag]"
        if a.name in ("to_json", "to_yaml") and not a.settings.path:
            yield f"actions[{i}]: {a.name}: no path; write `- {a.name}: FILE`"


def _kernels(s: Settled) -> Iterator[str]:
    try:
        with ops.use(**s.kernels):
            pass
    except ValueError as e:
        yield f"loader.kernels: {e}"


def _quantization(s: Settled) -> Iterator[str]:
    q, through = s.recipe.quantization, "quantization.straight_through"
    yield from when(
        (s.format and q.model.group_size and not fits(s.format, q.model.group_size),
         f"quantization.model.group_size: {q.model.group_size} is odd, but two values of {s.format} share a byte; make it "
         "even"),
        (q.straight_through and not s.format,
         f"{through}: nothing reads it without model.quantization_method; set that too, or remove this"),
        (s.rounds and s.lora, f"{through}: adapters learn beside frozen weights; remove it, or trainer.lora"),
        (s.rounds and s.sampling,
         f"{through}: trainer_type {s.method.name} learns samples of the weights as they are; remove it"),
    )  # fmt: skip


def _models(s: Settled) -> Iterator[str]:
    recipe, kind, load = s.recipe, s.method.name, s.recipe.loader
    m, t = recipe.model, recipe.trainer
    missing = "missing; give a directory or a Hub id"
    yield from when(
        (not m.name_or_path and m.config is None,
         f"model.name_or_path: {missing}, or model.config to start from random weights"),
        (m.name_or_path and m.config is not None,
         "model.config: model.name_or_path has a config of its own, changed by base_config.values; give one of the two"),
        (m.config is not None and not m.tokenizer,
         "model.tokenizer: missing; random weights have none, give a directory or a Hub id"),
    )  # fmt: skip
    for name, fact in (("teacher_model", "teacher"), ("reference_model", "reference")):
        if (other := getattr(recipe, name)) is not None:
            types = ", ".join(methods.types(**{fact: True}))
            yield from when(
                (other.config is not None, f"{name}.config: random weights teach nothing; give name_or_path"),
                (not getattr(s.method, fact), f"{name}: trainer_type {kind} has none ({types}: yes); remove it"),
                (not other.name_or_path, f"{name}.name_or_path: {missing}"),
                (other.tokenizer, f"{name}.tokenizer: all models read the tokens of model.tokenizer; remove it"),
            )
    differ = load.dtype and load.param_dtype and load.dtype[:2] != load.param_dtype[:2]
    yield from when(
        (s.method.teacher and recipe.teacher_model is None,
         f"teacher_model: missing; trainer_type {kind} learns from one"),
        ({"fp16", "float16"} & {load.dtype, load.param_dtype},
         "loader: fp16 needs scaled losses (train.precision.scaled), which no recipe has; use bf16"),
        (s.lora and differ,
         "loader.param_dtype: with adapters, the frozen weights are kept in loader.dtype; give one of the two"),
        (s.lora and s.moves,
         f"trainer.{'sync_ref_model' if t.sync_ref_model else 'teacher_model_kind'}: with adapters, the reference is the "
         f"model without them; {'remove one of the two' if t.sync_ref_model else 'set it to base or live'}"),
        (s.frozen and t.router_bias_update_speed,
         "trainer.router_bias_update_speed: with adapters or trainer.trainable, routers are frozen; remove it"),
        (t.trainable is not None and s.moves,
         f"trainer.{'sync_ref_model' if t.sync_ref_model else 'teacher_model_kind'}: moves with all weights, and "
         "trainer.trainable freezes some; remove one of the two"),
        (t.trainable is not None and s.lora and s.sampling,
         "trainer.trainable: the sampler is given the adapter alone; train adapters, or these weights, not both"),
        (t.optimizer == "schedule_free" and t.router_bias_update_speed,
         "trainer.router_bias_update_speed: schedule_free would undo what moves; use another optimizer"),
        (s.lora and t.optimizer in ("adafactor", "muon"),
         f"trainer.optimizer: {t.optimizer} has no form for adapters; use adamw or lion"),
    )  # fmt: skip


def _devices(recipe: Recipe) -> Iterator[str]:
    s, d = recipe.sharding, recipe.distributed
    for dims in (s.axis_dims, s.dcn_axis_dims):
        if dims is not None and (sorted(s.axis_names) != sorted(params.AXES) or len(dims) != len(s.axis_names)):
            wanted = "expected the axes dp, fsdp, ep, tp, sp, a size for each"
            yield f"sharding: found {list(s.axis_names)} of {list(dims)}, {wanted}"
    if s.dcn_axis_dims is not None and min(s.dcn_axis_dims, default=1) < 1:
        yield f"sharding.dcn_axis_dims: found {list(s.dcn_axis_dims)}, expected sizes of 1 or more"
    for axis, rule in (s.rules or {}).items():
        if axis not in params.TRAIN:
            near = names.hint("sharding.rules", axis, list(params.TRAIN))
            yield f"sharding.rules.{axis}: no weight has that axis; {near}"
        over = (rule,) if isinstance(rule, str) else () if rule is None else rule
        if not isinstance(over, tuple) or any(name not in params.AXES for name in over):
            yield f"sharding.rules.{axis}: found {parse.plain(rule)!r}, expected null, or of {', '.join(params.AXES)}"
    if d.coordinator not in (None, "auto"):
        if not d.coordinator.rpartition(":")[2].isdecimal() or ":" not in d.coordinator:
            yield f"distributed.coordinator: found {d.coordinator!r}, expected host:port, or auto"
        if d.processes != 1 and not 0 <= (-1 if d.process_id is None else d.process_id) < (d.processes or 0):
            found = f"found processes {d.processes} and process_id {d.process_id}"
            yield f"distributed: {found}, expected 0 <= process_id < processes"
    elif d.process_id is not None or d.processes not in (None, 1):
        yield "distributed.coordinator: missing; give the host:port of process 0, or leave out processes and process_id"


def _data(s: Settled) -> Iterator[str]:
    m, t = s.recipe.mixture, s.recipe.trainer
    if not m.informs:
        yield "mixture.informs: empty; give at least one data set"
    for where, informs in (("informs", m.informs), ("eval_informs", m.eval_informs)):
        for i, x in enumerate(informs):
            if x.type == "visual":
                yield f"mixture.{where}[{i}].type: visual: rows with images are of any type, as json or parquet"
            if x.split and x.dataset_split_name and x.split != x.dataset_split_name:
                yield f"mixture.{where}[{i}]: split and dataset_split_name differ; they are one thing, give one"
    known = [x.name for x in m.informs if x.name]
    for name in m.mixture_weights or ():
        if name not in known:
            yield f"mixture.mixture_weights.{name}: no data set has that name; the names are {', '.join(known) or 'none'}"
    weighted = sum(x.weight is not None for x in m.informs)
    moved, one = s.shuffled or m.mixture_weights or weighted, "they are one thing, give one"
    weightless = "there are no weights; give mixture_weights, or remove it"
    other, parts = m.tokenization.max_length, t.gradient_accumulation_steps
    yield from when(
        (m.mixture_weights and len(known) < len(m.informs),
         "mixture.mixture_weights: some data sets have no name; give each of mixture.informs one"),
        (m.mixture_weights and weighted,
         "mixture.mixture_weights: the data sets have weights of their own; give one of the two"),
        (None not in (m.pack_tokens, t.packing) and m.pack_tokens != t.packing,
         f"mixture.pack_tokens: differs from trainer.packing; {one}"),
        (m.pack_tokens and not hasattr(s.keys, "packing"),
         f"mixture.pack_tokens: rows of trainer_type {s.method.name} cannot be packed; remove it"),
        (m.mixture_block_size and m.block_mixture is False,
         "mixture.mixture_block_size: block_mixture is false; remove one of the two"),
        (m.pack_on_the_fly and (m.block_mixture or m.mixture_block_size or m.save.path),
         "mixture.pack_on_the_fly: a stream keeps nothing and has no blocks; remove save and block_mixture, or this"),
        (moved and s.precomputed and s.kl,
         "trainer.precompute_ref_log_probs: loss_type kto compares each prompt with the completion of the row before: "
         "keep the rows' order, set mixture.shuffle_buffer_size: 0 and no weights"),
        (m.pack_on_the_fly and s.precomputed,
         "trainer.precompute_ref_log_probs: a stream keeps nothing; remove it, or mixture.pack_on_the_fly"),
        (0 < weighted < len(m.informs),
         "mixture.informs: some data sets have a weight and some have none; give all one"),
        *((value and not (weighted or m.mixture_weights), f"mixture.{name}: {weightless}") for name, value in (
            ("block_mixture", m.block_mixture), ("mixture_block_size", m.mixture_block_size),
            ("stop_strategy", m.stop_strategy != "first_exhausted"),
        )),
        (t.packing_strategy != "bfd" and not s.packed,
         "trainer.packing_strategy: nothing is packed; set packing, or remove it"),
        (t.assistant_only_loss and t.completion_only_loss is not None,
         "trainer.completion_only_loss: assistant_only_loss alone says what is learnt; remove one of the two"),
        (m.pack_seq_length and not s.packed,
         "mixture.pack_seq_length: nothing is packed; set pack_tokens, or remove it"),
        (t.max_length and other and t.max_length != other,
         f"mixture.tokenization.max_length: differs from trainer.max_length; {one}"),
        ((t.evaluation_steps is not None) != bool(m.eval_informs),
         "trainer.evaluation_steps and mixture.eval_informs: evaluation needs both; one is missing"),
        (t.eval_batch_size and not (m.eval_informs or s.precomputed),
         "trainer.eval_batch_size: nothing is evaluated; give mixture.eval_informs and evaluation_steps, or remove it"),
        (t.total_batch_size and m.batch_size and t.total_batch_size != m.batch_size,
         f"mixture.batch_size: {m.batch_size} differs from trainer.total_batch_size {t.total_batch_size}; both are the "
         "rows of a step, give one"),
        (s.rows % max(parts, 1),
         f"trainer.gradient_accumulation_steps: {parts} does not divide the {s.rows} rows of a step"),
    )  # fmt: skip


def _trainer(s: Settled) -> Iterator[str]:
    t = s.recipe.trainer
    for name, known in (("optimizer", train.optim.OPTIMIZERS), ("scheduler", train.schedules.SCHEDULES)):
        value, path = getattr(t, name), f"trainer.{name}"
        if value not in known:
            yield f"{path}: found {value!r}; {names.hint(path, value, known)}"
    yield from when(
        (t.warmup_steps and t.warmup_ratio, "trainer.warmup_ratio: warmup_steps is given too; give one"),
        (t.learning_rate_end is not None and t.scheduler in ("constant", "inverse_sqrt"),
         f"trainer.learning_rate_end: scheduler {t.scheduler} does not read it; remove it"),
        (t.metric_for_best_model is not None and t.evaluation_steps is None,
         "trainer.metric_for_best_model: nothing is evaluated; set evaluation_steps and mixture.eval_informs"),
        (s.precomputed and t.sync_ref_model,
         "trainer.precompute_ref_log_probs: sync_ref_model changes the reference; remove one of the two"),
    )  # fmt: skip
    try:
        if s.remat:
            remat_policy(s.remat)
    except ValueError as e:
        yield f"trainer.gradient_checkpointing: {str(e).removeprefix('remat=')}"
    if s.sampling:
        yield from _samples(s)
    try:
        s.method.loss(s.keys)
    except ValueError as e:
        yield f"trainer: {str(e).replace('f_divergence=', 'f_divergence_type=').replace('wpo ', 'use_weighting ')}"


def _samples(s: Settled) -> Iterator[str]:
    """Say what does not go together in types that learn from own samples."""
    k, m, parts = s.keys, s.recipe.mixture, s.recipe.trainer.gradient_accumulation_steps
    updates, each = getattr(k, "steps_per_generation", 1), getattr(s.method.samples, "each", 1)
    together = getattr(k, "samples_per_row", 1)
    yield from when(
        (s.rows % k.num_generations,
         f"trainer.num_generations: {k.num_generations} does not divide the {s.rows} samples of a step"),
        (s.rows % (parts * updates * each),
         f"trainer.steps_per_generation: {updates} updates of {parts} parts do not divide the {s.rows} "
         f"samples of a step{', two in a row' * (each > 1)}"),
        (k.num_generations % together or s.rows // together % (parts * updates),
         f"trainer.samples_per_row: {together} does not divide num_generations {k.num_generations}, or leaves "
         f"{s.rows / together:g} rows for {updates} updates of {parts} parts"),
        (together > 1 and k.pack_samples, "trainer.pack_samples: samples_per_row packs those of one prompt; remove one"),
        (k.max_completion_length >= s.length,
         f"trainer.max_completion_length: {k.max_completion_length} tokens leave no room for a prompt in max_length "
         f"{s.length}; raise that, or lower this"),
        (m.eval_informs and s.sampling == 1 and not hasattr(k, "reward_functions"),
         f"mixture.eval_informs: samples are evaluated by their rewards, and {s.method.name} has none; remove it"),
        (k.sampler_sleeps and (k.rollout_ahead or k.sampling_devices),
         "trainer.sampler_sleeps: the sampler works while samples are learnt, or has devices of its own; remove it"),
        (s.recipe.trainer.eval_batch_size and s.sampling == 1,
         "trainer.eval_batch_size: all samples of evaluation are drawn at once; remove it"),
        ((e := k.environment) and (e.tools is None) == (e.path is None),
         "trainer.environment: expected one of tools and path"),
        (m.pack_on_the_fly, "mixture.pack_on_the_fly: tasks are read before the first step; remove it"),
        (m.save.path, "mixture.save: tasks are read anew; remove it"),
        (m.mixture_weights or any(x.weight for x in m.informs),
         "mixture: tasks of all data sets come once in an epoch; remove the weights"),
    )  # fmt: skip
