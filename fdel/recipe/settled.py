"""A recipe is settled once: what its keys decide together. Whatever takes part in a run reads that, and derives nothing."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fdel import ops, params
from fdel.recipe import methods, parse
from fdel.recipe.methods import Lora, Method
from fdel.recipe.read import Recipe
from fdel.recipe.schema import DTYPES, FORMATS


@dataclass(frozen=True)
class Settled:
    """A recipe with every fact that depends on several of its keys, or on a default that depends on others."""

    recipe: Recipe
    method: Method  # the trainer type
    keys: Any  # those that the trainer type declares, with its defaults
    rate: float  # peak of the learning rate
    rows: int  # of a step on all devices, in all its parts together
    eval_rows: int  # of a step of evaluation
    length: int  # tokens of a row
    shuffled: bool  # rows come in another order in every epoch
    kl: bool  # batches have prompts with other rows' completions too, for KTO's own loss
    packed: bool  # several texts share a row
    lora: Lora | None  # adapters that are trained, which a quantized model needs; None: weights are
    frozen: bool  # there are weights that are not trained
    format: str | None  # of the quantized weights of a model
    rounds: bool  # its weights are trained whole, rounded to `format` in each step
    cache_format: str | None  # of keys and values
    dtype: Any  # of the computation; None: the parameters'
    param_dtype: Any  # of the parameters; None: the checkpoint's
    reference: str | None  # "reference_model", "base" (the frozen part alone), "start" (a copy), or there is none
    moves: tuple[float, int] | None  # the reference follows the model: by this share, after so many steps each
    precomputed: bool  # the reference's numbers are in the batches
    remat: str | None  # what a backward pass saves of a layer; None: everything
    train_rules: params.Rules  # where axes of weights lie
    serve_rules: params.Rules
    sampling: float  # share of the steps that learn own samples; the others learn rows of the data
    trains: bool  # its actions say so, or there are none that want another thing, and data
    kernels: Mapping[str, str]  # implementations of operations, by their names

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute with the precision and the implementations that `loader` names. ValueError for unknown ones."""
        with jax.default_matmul_precision(self.recipe.loader.precision), ops.use(**self.kernels):
            yield


def settle(recipe: Recipe | Settled) -> Settled:
    """Settle a recipe; one that is settled stays as it is. RecipeError if its trainer type has other keys, or is none."""
    if isinstance(recipe, Settled):
        return recipe
    t, m, load, q = recipe.trainer, recipe.mixture, recipe.loader, recipe.quantization
    try:
        method, keys = methods.read(t)
    except ValueError as e:
        raise parse.RecipeError(f"trainer: {e}") from e
    format = FORMATS.get(q.model.quantization_method or "") if q.apply_quantization else None
    lora = getattr(keys, "lora", None) or (Lora() if format and not q.straight_through else None)
    alone = "base" if lora and t.trainable is None else "start"
    reference = "reference_model" if recipe.reference_model else alone
    dtype, param_dtype = (None if name is None else jnp.dtype(DTYPES[name]) for name in (load.dtype, load.param_dtype))
    policy = t.gradient_checkpointing  # true saves nothing, as in TRL; "none" is no policy
    actions = {a.name for a in recipe.actions}
    rows = t.total_batch_size or m.batch_size or 32
    return Settled(
        recipe=recipe, method=method, keys=keys, rate=method.rate if t.learning_rate is None else t.learning_rate,
        rows=rows, eval_rows=t.eval_batch_size or rows,
        length=m.pack_seq_length or t.max_length or m.tokenization.max_length or 1024,
        kl=method.data(keys).get("kl", False),
        shuffled=m.pack_shuffle and m.shuffle_buffer_size != 0, packed=bool(m.pack_tokens or t.packing),
        lora=lora, frozen=bool(lora or t.trainable is not None),
        format=format, rounds=bool(format and q.straight_through),
        cache_format=FORMATS.get(q.kv_cache.quantization_method or ""),
        dtype=dtype, param_dtype=param_dtype or (dtype if lora else None),
        reference=reference if _refers(method, keys) else None,
        moves=getattr(keys, "moves", None), precomputed=t.precompute_ref_log_probs,
        remat="nothing_saveable" if policy is True else None if policy == "none" else policy or None,
        train_rules={**params.TRAIN, **(recipe.sharding.rules or {})},
        serve_rules={**params.SERVE, **(recipe.sharding.rules or {})},
        kernels=({"expert_parallel": "ring"} if recipe.sharding.use_ring_of_experts else {}) | dict(load.kernels or {}),
        sampling=method.samples.share(keys) if method.samples else 0.0,
        trains="train" in actions or not actions or (not actions & {"eval", "serve"} and bool(m.informs)),
    )  # fmt: skip


def _refers(method: Method, keys: Any) -> bool:
    """Tell whether a reference model is compared with."""
    return method.reference(keys) if callable(method.reference) else method.reference
