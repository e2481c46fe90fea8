"""What a function of two arrays, number by number, is made of: whether a compiler of kernels knows its operations."""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp

# What Mosaic compiles for TPUs and for GPUs alike.
KNOWN = frozenset((
    "abs", "add", "and", "clamp", "convert_element_type", "div", "eq", "exp", "ge", "gt", "integer_pow", "le", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "not", "or", "select_n", "sign", "square", "sub", "tanh",
))  # fmt: skip


def unknown(product: Callable, known: Set[str], holding: Set[str]) -> str | None:
    """Say which operations of `product` are not among the known, and in none that are `holding` others; or None."""
    some = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    other = _operations(jax.make_jaxpr(product)(some, some), holding) - known
    if not other:
        return None
    return f"the product of gate and up has {', '.join(sorted(other))}; known are {', '.join(sorted(known))}"


def _operations(jaxpr: Any, holding: Set[str]) -> set[str]:
    """Name the operations of a program and of those that it holds; arrays that it captures are "constants"."""
    found = {"constants"} if getattr(jaxpr, "consts", ()) else set()
    for equation in jaxpr.eqns:
        inner = [x for x in equation.params.values() if hasattr(x, "eqns")]
        if equation.primitive.name in holding and inner:
            found |= set().union(*(_operations(x, holding) for x in inner))
        else:
            found.add(equation.primitive.name)
    return found
