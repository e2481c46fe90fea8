"""Metrics that are the largest or the smallest of something: they are compared where all others are added up."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.ops.contraction import widen


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["largest"])
@dataclass(frozen=True)
class Extreme:
    """The largest number of all microbatches, devices and batches, or the smallest; infinite where there is none.

    It stands among the sums of a loss.
    >>> Extreme(jnp.float32(1)).of(Extreme(jnp.float32(3)))
    Extreme(value=Array(3., dtype=float32), largest=True)
    """

    value: Float[Array, ""]
    largest: bool = True

    def of(self, *others: Any) -> Any:
        """Compare with the values of others."""
        pick: Any = jnp.maximum if self.largest else jnp.minimum
        found: Any = self.value
        for x in others:
            found = pick(found, x.value)
        return Extreme(found, self.largest)


def among(x: Float[Array, "..."], where: Bool[Array, "..."], *, largest: bool = True) -> Extreme:
    """Find the largest or the smallest number of an array where `where` is."""
    none = -jnp.inf if largest else jnp.inf
    return Extreme((jnp.max if largest else jnp.min)(jnp.where(where, x, none)), largest)


def is_extreme(x: Any) -> bool:
    """Tell whether this is one, for `jax.tree.map`'s is_leaf."""
    return isinstance(x, Extreme)


def zero(tree: Any) -> Any:
    """Give what changes nothing when it is added to a tree of these shapes."""

    def one(x: Any) -> Any:
        if isinstance(x, Extreme):
            return Extreme(jnp.full(x.value.shape, -jnp.inf if x.largest else jnp.inf, x.value.dtype), x.largest)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree.map(one, tree, is_leaf=is_extreme)


def added(a: Any, b: Any) -> Any:
    """Add two trees up; extremes are compared."""
    return jax.tree.map(lambda x, y: x.of(y) if isinstance(x, Extreme) else jnp.add(x, y), a, b, is_leaf=is_extreme)


def over_axis(tree: Any, axis: str) -> Any:
    """Add up over a mesh axis, inside of a `shard_map`, in float32; extremes are compared."""

    def one(x: Any) -> Any:
        if isinstance(x, Extreme):
            return Extreme((jax.lax.pmax if x.largest else jax.lax.pmin)(x.value, axis), x.largest)
        return jax.lax.psum(widen(x), axis)

    return jax.tree.map(one, tree, is_leaf=is_extreme)


def number(x: Extreme) -> Array:
    """Give it as a metric, 0 where there is none."""
    return jnp.where(jnp.isfinite(x.value), x.value, 0)


def last(found: Sequence[Extreme]) -> float:
    """Compare those of several batches, on the host."""
    return float(number(found[0].of(*found[1:])))
