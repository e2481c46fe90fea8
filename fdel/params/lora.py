"""Low-rank adapters (LoRA): add them to a params tree, train them alone, merge them into it or drop them."""

import math
import zlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fdel.ops.weights import LowRank, dense, is_weight

from .quantize import MATRICES, change, targets
from .spec import named_leaves

Tree = Any


def add(
    params: Tree,
    rank: int,
    alpha: float,
    where: str = MATRICES,
    *,
    key: jax.Array,
    spec: Tree,
    rslora: bool = False,
    dtype: Any = jnp.float32,
) -> Tree:
    """Give the matrices whose path matches `where` a LowRank update of zero: W + alpha/rank (or alpha/sqrt(rank)) b a.

    a is uniform within 1/sqrt(inputs), b is zero, as in PEFT. Quantized bases stay so
    (QLoRA, arXiv 2305.14314). As in `init`, an array's key is folded in from its path. Pure: jit it to keep shardings.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1")
    found = targets(params, spec, where)

    def one(path: str, w: Any) -> Any:
        if path not in found:
            return w
        if isinstance(w, LowRank):
            raise ValueError(f"{path} has an adapter; merge or unload it first, or leave it out of where={where!r}")
        batch, outputs, inputs = found[path].cut(w.shape)
        bound = 1 / math.sqrt(math.prod(inputs))
        k = jax.random.fold_in(key, zlib.crc32(path.encode()))
        a = jax.random.uniform(k, (*batch, rank, *inputs), dtype, -bound, bound)
        b = jnp.zeros((*batch, *outputs, rank), dtype)
        return LowRank(w, a, b, jnp.full(batch, alpha / (math.sqrt(rank) if rslora else rank), jnp.float32))

    return change(one, params)


def merge(params: Tree) -> Tree:
    """Add every adapter to its weight in float32 and round to the weight's dtype; a Quantized base becomes an array."""
    return change(lambda _, w: dense(w) if isinstance(w, LowRank) else w, params)


def unload(params: Tree) -> Tree:
    """Drop every adapter; the weights are what they were before `add`."""
    return change(lambda _, w: w.base if isinstance(w, LowRank) else w, params)


def split(params: Tree) -> tuple[Tree, Tree]:
    """Part params into (trainable, frozen) trees of one structure, with None for what the other holds.

    The factors of adapters are trainable; everything else, their scale included, is frozen. `jax.grad` and optimizers
    skip None: `jax.grad(lambda t: loss(join(t, frozen)))(trainable)`. Params without an adapter: ValueError.
    """
    if not any(isinstance(w, LowRank) for _, w in named_leaves(params, is_leaf=is_weight)):
        raise ValueError("params have no adapter, so nothing would be trained; call lora.add first")
    absent: Any = None
    trainable = change(lambda _, w: replace(w, base=absent, scale=absent) if isinstance(w, LowRank) else None, params)
    frozen = change(lambda _, w: replace(w, a=absent, b=absent) if isinstance(w, LowRank) else w, params)
    return trainable, frozen


def join(trainable: Tree, frozen: Tree) -> Tree:
    """Undo `split`."""
    return jax.tree.map(lambda t, f: f if t is None else t, trainable, frozen, is_leaf=lambda x: x is None)
