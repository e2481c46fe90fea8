"""The first half of experts on TPUs: products of groups of rows with two matrices each, gate and up, and what joins them.

The kernel of `grouped_matmul_tpu` with two matrices: a tile of rows is read once for both, biases are added and the
product of gate and up (an activation times the other) is computed in float32 before anything is stored, so that x gate
and x up are not written. For a backward pass they are, as residuals (`moe_gate` and `moe_up` to a policy of
rematerialization); it is made of that file's pieces, with one kernel for the sum of the two gradients of rows.

Bytes: each pair of matrices with rows once, rows once for each block of outputs, the result. FLOPs: 4 * rows * inputs *
outputs. Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fdel.kernels import grouped_matmul_tpu
from fdel.kernels.elementwise import KNOWN, unknown
from fdel.kernels.grouped_matmul_tpu import tiling, tiling_of_matrices, too_wide
from fdel.kernels.grouped_program_tpu import matrices_of, rows_times
from fdel.ops.weights import is_weight

# What Mosaic TPU compiles of a product's operations, and what holds others.
TPU = KNOWN | {"copy", "stop_gradient"}
HOLDING = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def unsupported(
    x: Array, gate: Any, up: Any, sizes: Array, product: Callable, gate_bias: Any = None, up_bias: Any = None
) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    for w in (gate, up):
        if is_weight(w):
            return f"gate and up are arrays; found {type(w).__name__}, with which two products are computed"
        if why := grouped_matmul_tpu.unsupported(x, w, sizes):
            return why
    if gate.shape != up.shape:
        return f"gate {gate.shape} and up {up.shape} are alike"
    if (gate_bias is None) != (up_bias is None):
        return "gate and up both have a bias, or none"
    return unknown(product, TPU, HOLDING) or too_wide(x, gate, 2)


def call(
    x: Float[Array, "M K"], gate: Float[Array, "E N K"], up: Float[Array, "E N K"], sizes: Int[Array, " E"],
    product: Callable[[Array, Array], Array], gate_bias: Float[Array, "E N"] | None = None,
    up_bias: Float[Array, "E N"] | None = None,
) -> Float[Array, "M N"]:  # fmt: skip
    """Compute `ops.grouped_glu`; sums are float32. Rows past the sum of `sizes` are 0."""
    biases = () if gate_bias is None or up_bias is None else (gate_bias, up_bias)
    return _glu(product, x, (gate, up), biases, sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _glu(product: Callable, x: Array, w: tuple, biases: tuple, sizes: Array) -> Array:
    return _run(product, x, w, biases, sizes, 1)[0]


def _run(product: Callable, x: Array, w: tuple, biases: tuple, sizes: Array, outs: int) -> list[Array]:
    """Give the product, and with three `outs` what it was made of."""

    def join(gate: Array, up: Array, *biases: Array) -> list[Array]:
        gate, up = (y + b for y, b in zip((gate, up), biases, strict=True)) if biases else (gate, up)
        return [product(gate, up), gate, up][:outs]

    return rows_times(tiling(x, w[0], matrices=2, outs=outs), (x,), w, biases, sizes, join, outs)


def _forward(product: Callable, x: Array, w: tuple, biases: tuple, sizes: Array) -> tuple[Array, tuple]:
    y, gate, up = _run(product, x, w, biases, sizes, 3)
    made = checkpoint_name(gate, "moe_gate"), checkpoint_name(up, "moe_up")
    return y, (x, w, biases, sizes, made)


def _backward(product: Callable, saved: tuple, dy: Array) -> tuple:
    x, w, biases, sizes, made = saved
    parts = jax.vjp(product, *made)[1](dy)
    how = tiling(dy, w[0], xs=2, matrices=2, turned=False)
    dx = rows_times(how, parts, w, (), sizes, lambda gate, up: [gate + up])[0]
    how = tiling_of_matrices(dy, x, len(sizes))
    dw = tuple(matrices_of(how, part, x, sizes) for part in parts)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right", method="compare_all")
    of_group = lambda part, bias: jax.ops.segment_sum(part.astype(jnp.float32), group, len(sizes)).astype(bias.dtype)
    return dx, dw, tuple(of_group(part, bias) for part, bias in zip(parts, biases, strict=False)), None


_glu.defvjp(_forward, _backward)
