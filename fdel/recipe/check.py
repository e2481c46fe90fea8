"""What of a recipe cannot be done: keys that this version does not honour, that nothing reads, or that disagree."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from fdel import params, train
from fdel.ops.layers import remat_policy
from fdel.recipe import names, objective, parse
from fdel.recipe.read import Recipe
from fdel.recipe.schema import EvalAction, Inform
from fdel.recipe.trainer import HEADED, REFERENCE, TEACHER, TEXT, TYPES, Trainer


def given(recipe: Recipe, **rows: Any) -> Recipe:
    """Give a recipe with a data set in each section, `informs` or `eval_informs`, whose rows come from memory instead."""
    found: dict[str, Any] = {name: (Inform(data_files="memory"),) for name, x in rows.items() if x is not None}
    parse.fail(
        [f"mixture.{name}: there are rows from memory too; give one" for name in found if getattr(recipe.mixture, name)]
    )
    return dataclasses.replace(recipe, mixture=dataclasses.replace(recipe.mixture, **found))


def faults(recipe: Recipe) -> list[str]:
    """List what cannot be done, each with the key's path; no file is looked at."""
    found = [*_refused(recipe), *_actions(recipe), *_engine(recipe)]
    if trains(recipe):
        found += [*_models(recipe), *_data(recipe), *_sizes(recipe), *_method(recipe.trainer)]
    return list(dict.fromkeys([*found, *_placement(recipe)]))


def trains(recipe: Recipe) -> bool:
    """Whether a run trains: its actions say so, or there are none that want another thing, and data."""
    names = {a.name for a in recipe.actions}
    return "train" in names or not names or (not names & {"eval", "serve"} and bool(recipe.mixture.informs))


def _refused(recipe: Recipe) -> Iterator[str]:
    kind = recipe.trainer.trainer_type
    for path, f, section in recipe.keys():
        m, value = f.metadata, getattr(section, f.name)
        if value == f.default or not m:
            continue
        if m["refuse"] and value not in m["honours"]:
            yield f"{path}: {parse.shown(value)} cannot be honoured: {m['refuse']}"
        elif m["by"] and kind in TYPES and kind not in m["by"]:
            yield f"{path}: trainer_type {kind} does not read it ({', '.join(m['by'])}: yes); remove it"
        elif other := m["needs"]:
            found = objective.loss_types(section) if other == "loss_type" else (getattr(section, other),)
            if not m["of"] and not any(found):
                yield f"{path}: nothing reads it without {other}; set that too, or remove this"
            elif m["of"] and not set(m["of"]) & set(found):
                have = ", ".join(map(str, found))
                yield f"{path}: {other} {have} does not read it ({', '.join(m['of'])}: yes); remove it"


def _actions(recipe: Recipe) -> Iterator[str]:
    trained = any(a.name == "train" for a in recipe.actions)
    for i, a in enumerate(recipe.actions):
        if a.name in ("eval", "serve") and not trained and recipe.model.config is not None:
            yield f"model.config: random weights have nothing to say to {a.name}; train them first"
        elif a.name in ("eval", "serve") and not trained and not recipe.model.name_or_path:
            yield "model.name_or_path: missing; give a directory or a Hub id"
        if a.name == "eval":
            yield from _evaluation(recipe, a.settings, f"actions[{i}].eval")
        if a.name in ("to_json", "to_yaml") and not a.settings.path:
            yield f"actions[{i}]: {a.name}: no path; write `- {a.name}: FILE`"


def _engine(recipe: Recipe) -> Iterator[str]:
    e = recipe.esurge
    for name in ("max_model_len", "max_num_seqs", "draft_tokens"):
        value = getattr(e, name)
        if value is not None and value < 1:
            yield f"esurge.{name}: found {value}, expected 1 or more"
    if not 0 < e.hbm_utilization <= 1:
        yield f"esurge.hbm_utilization: found {e.hbm_utilization:g}, expected a share above 0, of 1 at the most"


def _evaluation(recipe: Recipe, action: EvalAction, where: str) -> Iterator[str]:
    e, few = recipe.eval, action.num_fewshot
    if not action.tasks:
        yield f"{where}.tasks: missing; name some, such as [hellaswag]"
    if few is not None and few < 0:
        yield f"{where}.num_fewshot: found {few}, expected 0 or more"
    for name, low, high in (
        ("batch_size", 1, None), ("max_new_tokens", 1, None), ("temperature", 0, 100), ("top_p", 1e-9, 1),
    ):  # fmt: skip
        value = getattr(e, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            yield f"eval.{name}: found {value}, expected {low:g}{' or more' if high is None else f' to {high:g}'}"
    if e.limit is not None and e.limit <= 0:
        yield f"eval.limit: found {e.limit}, expected a positive number"


def adapters(recipe: Recipe) -> bool:
    """Whether only adapters are trained: LoRA, which a quantized model needs."""
    return recipe.trainer.lora is not None or weights_format(recipe) is not None


def shuffled(recipe: Recipe) -> bool:
    """Whether the rows of training come in another order in every epoch."""
    return recipe.mixture.pack_shuffle and recipe.mixture.shuffle_buffer_size != 0


def mismatched(recipe: Recipe) -> bool:
    """Whether the loss is KTO's own, which also reads prompts with other rows' completions."""
    return recipe.trainer.trainer_type == "kto" and "kto" in objective.loss_types(recipe.trainer)


def weights_format(recipe: Recipe) -> str | None:
    """The quantization_method of the model's weights, None if they stay as they are."""
    q = recipe.quantization
    return q.model.quantization_method if q.apply_quantization else None


def _models(recipe: Recipe) -> Iterator[str]:
    t, kind = recipe.trainer, recipe.trainer.trainer_type
    yield from _sources(recipe)
    for name, types in (("teacher_model", TEACHER), ("reference_model", REFERENCE)):
        other = getattr(recipe, name)
        if other is not None and kind not in types:
            yield f"{name}: trainer_type {kind} has none ({', '.join(types)}: yes); remove it"
        if other is not None and not other.name_or_path:
            yield f"{name}.name_or_path: missing; give a directory or a Hub id"
        if other is not None and other.tokenizer:
            yield f"{name}.tokenizer: all models read the tokens of model.tokenizer; remove it"
    if kind in TEACHER and recipe.teacher_model is None:
        yield f"teacher_model: missing; trainer_type {kind} learns from one"
    load = recipe.loader
    if load.dtype in ("fp16", "float16") or load.param_dtype in ("fp16", "float16"):
        yield "loader: fp16 needs scaled losses (train.scaled), which no recipe has; use bf16"
    if adapters(recipe):
        if kind in HEADED:
            yield f"quantization.model: trainer_type {kind} trains all weights, which cannot be quantized; remove it"
        if load.dtype and load.param_dtype and load.dtype[:2] != load.param_dtype[:2]:
            yield "loader.param_dtype: with adapters, the frozen weights are kept in loader.dtype; give one of the two"
        if t.sync_ref_model:
            yield "trainer.sync_ref_model: with adapters, the reference is the model without them; remove one of the two"
        if t.optimizer in ("adafactor", "muon"):
            yield f"trainer.optimizer: {t.optimizer} has no form for adapters; use adamw or lion"


def _sources(recipe: Recipe) -> Iterator[str]:
    m = recipe.model
    if not m.name_or_path and m.config is None:
        yield "model.name_or_path: missing; give a directory or a Hub id, or model.config to start from random weights"
    if m.name_or_path and m.config is not None:
        yield "model.config: model.name_or_path has a config of its own, changed by base_config.values; give one of the two"
    if m.config is not None and not m.tokenizer:
        yield "model.tokenizer: missing; random weights have none, give a directory or a Hub id"
    for name in ("teacher_model", "reference_model"):
        if (other := getattr(recipe, name)) is not None and other.config is not None:
            yield f"{name}.config: random weights teach nothing; give name_or_path"


def _placement(recipe: Recipe) -> Iterator[str]:
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


def _data(recipe: Recipe) -> Iterator[str]:
    m, t = recipe.mixture, recipe.trainer
    if not m.informs:
        yield "mixture.informs: empty; give at least one data set"
    for where, informs in (("informs", m.informs), ("eval_informs", m.eval_informs)):
        for i, x in enumerate(informs):
            if x.type == "visual":
                yield f"mixture.{where}[{i}].type: visual: images are not in this version"
            if x.split and x.dataset_split_name and x.split != x.dataset_split_name:
                yield f"mixture.{where}[{i}]: split and dataset_split_name differ; they are one thing, give one"
    given = [x.name for x in m.informs if x.name]
    for name in m.mixture_weights or ():
        if name not in given:
            yield f"mixture.mixture_weights.{name}: no data set has that name; the names are {', '.join(given) or 'none'}"
    if m.mixture_weights and len(given) < len(m.informs):
        yield "mixture.mixture_weights: some data sets have no name; give each of mixture.informs one"
    if m.mixture_weights and any(x.weight is not None for x in m.informs):
        yield "mixture.mixture_weights: the data sets have weights of their own; give one of the two"
    if m.pack_tokens is not None and t.packing is not None and m.pack_tokens != t.packing:
        yield "mixture.pack_tokens: differs from trainer.packing; they are one thing, give one"
    if m.pack_tokens and t.trainer_type not in TEXT:
        yield f"mixture.pack_tokens: rows of trainer_type {t.trainer_type} cannot be packed; remove it"
    if m.mixture_block_size and m.block_mixture is False:
        yield "mixture.mixture_block_size: block_mixture is false; remove one of the two"
    if m.pack_on_the_fly and (m.block_mixture or m.mixture_block_size or m.save.path):
        yield "mixture.pack_on_the_fly: a stream keeps nothing and has no blocks; remove save and block_mixture, or this"
    moved = shuffled(recipe) or m.mixture_weights or any(x.weight is not None for x in m.informs)
    if moved and t.precompute_ref_log_probs and mismatched(recipe):
        yield (
            "trainer.precompute_ref_log_probs: loss_type kto compares each prompt with the completion of the row before: "
            "keep the rows' order, set mixture.shuffle_buffer_size: 0 and no weights"
        )
    if m.pack_on_the_fly and t.precompute_ref_log_probs:
        yield "trainer.precompute_ref_log_probs: a stream keeps nothing; remove it, or mixture.pack_on_the_fly"
    weighted = sum(x.weight is not None for x in m.informs)
    if 0 < weighted < len(m.informs):
        yield "mixture.informs: some data sets have a weight and some have none; give all one"
    for name, value in (
        ("block_mixture", m.block_mixture), ("mixture_block_size", m.mixture_block_size),
        ("stop_strategy", m.stop_strategy != "first_exhausted"),
    ):  # fmt: skip
        if value and not (weighted or m.mixture_weights):
            yield f"mixture.{name}: there are no weights; give mixture_weights, or remove it"
    if t.packing_strategy != "bfd" and not (m.pack_tokens or t.packing):
        yield "trainer.packing_strategy: nothing is packed; set packing, or remove it"
    if t.assistant_only_loss and t.completion_only_loss is not None:
        yield "trainer.completion_only_loss: assistant_only_loss alone says what is learnt; remove one of the two"
    if m.pack_seq_length and not (m.pack_tokens or t.packing):
        yield "mixture.pack_seq_length: nothing is packed; set pack_tokens, or remove it"
    if t.max_length and m.tokenization.max_length and t.max_length != m.tokenization.max_length:
        yield "mixture.tokenization.max_length: differs from trainer.max_length; they are one thing, give one"
    if (t.evaluation_steps is not None) != bool(m.eval_informs):
        yield "trainer.evaluation_steps and mixture.eval_informs: evaluation needs both; one is missing"
    if t.eval_batch_size and not (m.eval_informs or t.precompute_ref_log_probs):
        yield "trainer.eval_batch_size: nothing is evaluated; give mixture.eval_informs and evaluation_steps, or remove it"


def _sizes(recipe: Recipe) -> Iterator[str]:
    t, m = recipe.trainer, recipe.mixture
    if t.total_batch_size and m.batch_size and t.total_batch_size != m.batch_size:
        yield (
            f"mixture.batch_size: {m.batch_size} differs from trainer.total_batch_size {t.total_batch_size}; both are the "
            "rows of a step, give one"
        )
    for name in (
        "total_batch_size", "eval_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_training_steps",
        "max_prompt_length", "max_completion_length", "log_steps", "save_steps", "evaluation_steps", "save_total_limit",
        "learning_rate",
    ):  # fmt: skip
        value = getattr(t, name)
        if value is not None and value <= 0:
            yield f"trainer.{name}: found {value}, expected a positive number"
    if t.gradient_accumulation_steps > 0 and batch_rows(recipe) % t.gradient_accumulation_steps:
        n = t.gradient_accumulation_steps
        yield f"trainer.gradient_accumulation_steps: {n} does not divide the {batch_rows(recipe)} rows of a step"


def batch_rows(recipe: Recipe) -> int:
    """Rows of a step on all devices, in all its parts together."""
    return recipe.trainer.total_batch_size or recipe.mixture.batch_size or 32


def row_length(recipe: Recipe) -> int:
    """Tokens of a row."""
    m = recipe.mixture
    return m.pack_seq_length or recipe.trainer.max_length or m.tokenization.max_length or 1024


def _method(t: Trainer) -> Iterator[str]:
    for name, known in (("optimizer", train.OPTIMIZERS), ("scheduler", train.SCHEDULES)):
        value, path = getattr(t, name), f"trainer.{name}"
        if value not in known:
            yield f"{path}: found {value!r}; {names.hint(path, value, known)}"
    if t.warmup_steps and t.warmup_ratio:
        yield "trainer.warmup_ratio: warmup_steps is given too; give one"
    if t.learning_rate_end is not None and t.scheduler in ("constant", "inverse_sqrt"):
        yield f"trainer.learning_rate_end: scheduler {t.scheduler} does not read it; remove it"
    if t.metric_for_best_model is not None and t.evaluation_steps is None:
        yield "trainer.metric_for_best_model: nothing is evaluated; set evaluation_steps and mixture.eval_informs"
    if t.lambda_orpo is not None and t.beta is not None and t.lambda_orpo != t.beta:
        yield "trainer.lambda_orpo: differs from beta; they are one thing, give one"
    if t.negatives < 0 or not t.step_separator:
        yield f"trainer: negatives={t.negatives}, step_separator={t.step_separator!r}; expected 0 or more, and a text"
    if policy := objective.remat(t):
        try:
            remat_policy(policy)
        except ValueError as e:
            yield f"trainer.gradient_checkpointing: {str(e).removeprefix('remat=')}"
    if t.precompute_ref_log_probs and t.sync_ref_model:
        yield "trainer.precompute_ref_log_probs: sync_ref_model changes the reference; remove one of the two"
    if t.trainer_type in TYPES:
        try:
            objective.check(t)
        except ValueError as e:
            yield f"trainer: {str(e).replace('f_divergence=', 'f_divergence_type=').replace('wpo ', 'use_weighting ')}"
