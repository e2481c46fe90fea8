"""The algebra of a product of activations with a weight: axes that it sums over, keeps and adds, and dtypes of sums."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fdel.ops.weights import merge

# Letters of inputs that mesh axis `tp` divides, where they come first: heads, and groups of them, hidden units, channels.
ALONG_TP = tuple("nhgfi")


@dataclass(frozen=True)
class Plan:
    """An einsum with one character per axis and no ellipsis."""

    x: str
    w: str
    out: str

    # The axes that are summed over, those that the weight adds, those that all three have: in the weight's order.
    contracted = property(lambda self: "".join(c for c in self.w if c not in self.out))
    outputs = property(lambda self: "".join(c for c in self.w if c not in self.x))
    batch = property(lambda self: "".join(c for c in self.w if c in self.x and c in self.out))
    rows = property(lambda self: "".join(c for c in self.x if c not in self.w))  # those that the weight lacks
    summed = property(
        lambda self: self.contracted.startswith(ALONG_TP)
    )  # over devices too: each has a part of the inputs


def wide(dtype: Any) -> jnp.dtype:
    """Give the dtype that sums are kept in: float32, float64 for float64, int32 for integers."""
    return jnp.promote_types(dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)


def widen(x: Any) -> Array:
    """Cast a floating array to float32 or wider, and leave others as they are."""
    x = jnp.asarray(x)
    return x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def ordered(x: Array, axes: str, wanted: str) -> Array:
    """Transpose an array with these axes to the wanted order."""
    return x.transpose([axes.index(c) for c in wanted])


def inputs_last(plan: Plan, x: Array) -> tuple[Plan, Array]:
    """Make the contracted axes, which are neighbours in the weight, one axis; it is the last one of x."""
    inputs, kept = plan.contracted, "".join(c for c in plan.x if c not in plan.contracted)
    x = merge(ordered(x, plan.x, kept + inputs), len(inputs))
    return Plan(kept + inputs[0], plan.w.replace(inputs, inputs[0]), plan.out), x


def product(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """Contract two arrays of one dtype with one dot product; the result has `dtype`.

    GPU and TPU accumulate in float32 whatever the result, and a float32 result has a float32 product as its gradient:
    so float32 is asked for only where the result is wider than x.
    """
    at = lambda axes, names: tuple(axes.index(c) for c in names)
    summed, batch = ((at(plan.x, names), at(plan.w, names)) for names in (plan.contracted, plan.batch))
    result = wide(x.dtype) if dtype.itemsize > x.dtype.itemsize else None
    y = lax.dot_general(x, w, (summed, batch), preferred_element_type=result)
    return ordered(y.astype(dtype), plan.batch + plan.rows + plan.outputs, plan.out)
