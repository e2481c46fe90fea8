"""Low-rank adapters (LoRA): add them to a params tree, train them alone, merge, drop, or serve several at a time."""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fdel.ops.weights import Adapters, LowRank, dense, is_weight

from .quantize import MATRICES, change, targets
from .spec import named_leaves, unstack

Tree = Any


def add(
    params: Tree, rank: int, alpha: float, where: str = MATRICES, *, key: jax.Array, spec: Tree, rslora: bool = False,
    dtype: Any = jnp.float32,
) -> Tree:  # fmt: skip
    r"""Give the matrices whose path matches `where` a LowRank update of zero: W + alpha/rank (or alpha/sqrt(rank)) b a.

    By default those of the language model's layers; a tower's are r"^vision\b". a is uniform within 1/sqrt(inputs),
    b is zero, as in PEFT. Quantized bases stay so (QLoRA, arXiv 2305.14314). As in `init`, an array's key is folded in
    from its path. Pure: jit it to keep shardings.
    >>> adapted = params.lora.add(weights, 2, 4.0, key=jax.random.key(2), spec=spec)
    >>> params.count(weights), params.count(adapted)
    (1704, 2230)
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
    """Add every adapter to its weight in float32 and round to the weight's dtype; a Quantized base becomes an array.
    >>> params.count(params.lora.merge(adapted))
    1704
    """
    return change(lambda _, w: dense(w) if isinstance(w, LowRank) else w, params)


def unload(params: Tree) -> Tree:
    """Drop every adapter; the weights are what they were before `add`."""
    return change(lambda _, w: w.base if isinstance(w, LowRank) else w, params)


def factors(w: LowRank, dtype: Any) -> tuple[Array, Array]:
    """Give the factors a and scale * b of an update, computed in float32, in the dtype in which they are multiplied."""
    scale = w.scale.reshape(*w.scale.shape, *[1] * (w.b.ndim - w.scale.ndim))
    return w.a.astype(dtype), (w.b.astype(jnp.float32) * scale).astype(dtype)


def stack(
    base: Tree, adapters: Mapping[int, Tree], slots: int, rank: int, also: Sequence[Tree] = (), dtype: Any = jnp.float32
) -> Tree:
    """Put adapters of one base into one tree: what any of them adapts becomes an `Adapters` leaf of `slots` updates.

    `adapters` are listed trees (`unstack`) by their slot, of `rank` at most; `also` are more trees, for whose adapters
    leaves are made, but not filled. Factors become `dtype`, that of the activations: those that are not finite in it
    become its greatest value, which harms their own tokens alone (0 x NaN would harm all). Give tokens their adapters with
    `choose`.
    """
    leaves = {slot: dict(named_leaves(tree, is_leaf=is_weight)) for slot, tree in adapters.items()}
    others = [dict(named_leaves(tree, is_leaf=is_weight)) for tree in also]
    top = float(jnp.finfo(dtype).max)
    finite = lambda x: jnp.nan_to_num(x, nan=top, posinf=top, neginf=-top)

    def one(path: str, w: Any) -> Any:
        found = [tree[path] for tree in (*leaves.values(), *others) if isinstance(tree.get(path), LowRank)]
        if not found:
            return w
        _, *inputs = found[0].a.shape
        *outputs, _ = found[0].b.shape
        a, b = jnp.zeros((slots, rank, *inputs), dtype), jnp.zeros((*outputs, slots, rank), dtype)
        for slot, tree in leaves.items():
            low = tree[path]
            if isinstance(low, LowRank):
                own, (low_a, low_b) = slice(low.a.shape[0]), factors(low, dtype)
                a, b = a.at[slot, own].set(finite(low_a)), b.at[..., slot, own].set(finite(low_b))
        return Adapters(w, a, b)

    return change(one, base)


def choose(params: Tree, slots: Int[Array, " T"]) -> Tree:
    """Give each token the adapter in its slot, none for slots below zero, in a tree that `stack` has made.

    `slots` belongs to the leading axes of the activations: [T] tokens (Paged), or [1] for all of them.
    """
    return change(lambda _, w: replace(w, chosen=slots) if isinstance(w, Adapters) else w, params)


def split(params: Tree, whole: str | None = None) -> tuple[Tree, Tree]:
    """Part params into (trainable, frozen) trees of one structure, with None for what the other holds.

    The factors of adapters are trainable, and what has a path that matches the regular expression `whole`, such as a new
    head (PEFT's modules_to_save); everything else, scales included, is frozen. `jax.grad` and optimizers skip None:
    `jax.grad(lambda t: loss(join(t, frozen)))(trainable)`. Params of which nothing would be trained: ValueError.
    >>> trainable, frozen = params.lora.split(adapted)
    >>> params.count(trainable)
    512
    """
    absent: Any = None
    own = lambda path: whole is not None and re.search(whole, path)
    if not any(isinstance(w, LowRank) or own(path) for path, w in named_leaves(params, is_leaf=is_weight)):
        raise ValueError("params have no adapter, so nothing would be trained; call lora.add first")
    learnt = lambda w: replace(w, base=absent, scale=absent) if isinstance(w, LowRank) else None
    held = lambda w: replace(w, a=absent, b=absent) if isinstance(w, LowRank) else w
    trainable = change(lambda path, w: w if own(path) else learnt(w), params)
    frozen = change(lambda path, w: None if own(path) else held(w), params)
    return trainable, frozen


def graft(adapted: Tree, base: Tree) -> Tree:
    """Put the adapters of a tree on another's arrays, those of the same params without adapters (`unload`).
    >>> there = params.lora.graft(adapted, weights)
    >>> there["head"] is weights["head"]
    True
    """
    on = lambda w, b: replace(w, base=b) if isinstance(w, LowRank) else b
    return jax.tree.map(on, adapted, base, is_leaf=is_weight)


def listed(trainable: Tree, frozen: Tree) -> Tree:
    """Unstack what `split` gave as trainable, for a frozen part of listed layers; a tower may have no adapter at all."""
    if not jax.tree.leaves(trainable):
        return jax.tree.map(lambda _: None, frozen, is_leaf=is_weight)
    if not isinstance(frozen, Mapping):
        return trainable
    one = lambda k, v: unstack({k: v})[k] if k == "layers" and jax.tree.leaves(v) else listed(v, frozen[k])
    return {k: one(k, v) for k, v in trainable.items()}


def join(trainable: Tree, frozen: Tree) -> Tree:
    """Undo `split`.
    >>> params.count(params.lora.join(*params.lora.split(adapted)))
    2230
    """
    return jax.tree.map(lambda t, f: f if t is None else t, trainable, frozen, is_leaf=lambda x: x is None)
