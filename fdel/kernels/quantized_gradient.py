"""Gradients of products with quantized weights, which are frozen: of the rows alone, by the reference."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel.ops.contraction import Plan
from fdel.ops.weights import Quantized


def of_rows(product: Callable) -> Callable:
    """Give product(plan, dtype, x, w), a kernel for `quantized_matmul`, the gradient that the reference has in x."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    @functools.wraps(product)
    def with_gradient(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
        return product(plan, dtype, x, w)

    def backward(plan: Plan, dtype: jnp.dtype, saved: tuple[Array, Quantized], dy: Array) -> tuple[Array, None]:
        from fdel.ops.dispatch import TABLES

        x, w = saved
        reference = TABLES["quantized_matmul"].implementations["xla"].call
        return jax.vjp(lambda x: reference(plan, x, w, dtype), x)[1](dy)[0], None

    with_gradient.defvjp(lambda plan, dtype, x, w: (product(plan, dtype, x, w), (x, w)), backward)
    return with_gradient
