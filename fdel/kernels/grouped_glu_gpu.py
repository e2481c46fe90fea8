"""The first half of experts on NVIDIA Hopper: products of groups of rows with gate and up, and what joins them, in one.

The kernel of `grouped_matmul_gpu` with two matrices: a tile of rows is copied once for both, both sums of a tile lie in
registers, and what joins them is computed there in float32, so that x gate and x up are not written. A tile has half as
many outputs of each matrix. For a backward pass both are written instead, as residuals (`moe_gate` and `moe_up` to a
policy of rematerialization), and XLA joins them, since three results leave too few registers; it is made of that file's
kernels. Quantized matrices are two products of that file, with biases if there are any, and XLA joins them.

Bytes: each group's matrices for every 1,024 of its rows, and these for every 16 tiles of outputs. FLOPs: 4 * rows *
inputs * outputs. Interpreted, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fdel.kernels import grouped_matmul_gpu
from fdel.kernels.elementwise import KNOWN, unknown
from fdel.kernels.grouped_matmul_gpu import gradient_of_matrices, rows_times, tiling
from fdel.ops.dispatch import TABLES, use
from fdel.ops.weights import Weight, is_weight


def unsupported(
    x: Array, gate: Any, up: Any, sizes: Array, product: Callable, gate_bias: Any = None, up_bias: Any = None
) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    for w in (gate, up):
        if why := grouped_matmul_gpu.unsupported(x, w, sizes):
            return why
    if gate.shape != up.shape:
        return f"gate {gate.shape} and up {up.shape} are alike"
    if not _arrays(gate, up):
        return None
    if gate_bias is not None or up_bias is not None:
        return "it adds no biases"
    return unknown(product, KNOWN, {"jit", "pjit"})


def unproven(x: Array, gate: Any, up: Any, sizes: Array, *_: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    return grouped_matmul_gpu.unproven(x, gate, sizes) or grouped_matmul_gpu.unproven(x, up, sizes)


def _arrays(gate: Any, up: Any) -> bool:
    return not (is_weight(gate) or is_weight(up))


def call(
    x: Float[Array, "M K"], gate: Weight, up: Weight, sizes: Int[Array, " E"],
    product: Callable[[Array, Array], Array], gate_bias: Array | None = None, up_bias: Array | None = None,
) -> Float[Array, "M N"]:  # fmt: skip
    """Compute `ops.grouped_glu`; sums are float32. Rows past the sum of `sizes` are what `product` makes of zeros."""
    if not _arrays(gate, up):  # the reference, which is two products
        with use(grouped_matmul="hopper"):
            reference = TABLES["grouped_glu"].implementations["xla"].call
            return reference(x, gate, up, sizes, product, gate_bias, up_bias)
    return glu(False, product, x, (gate, up), sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def glu(interpreted: bool, product: Callable, x: Array, w: tuple, sizes: Array) -> Array:
    """Multiply and join; see `call`. `interpreted`: leave out what the interpreter lacks."""
    how = tiling(x, w[0], True, interpreted, matrices=2)
    return rows_times(x, w, sizes, how, (product,))[0]


def _forward(interpreted: bool, product: Callable, x: Array, w: tuple, sizes: Array) -> tuple[Array, tuple]:
    how = tiling(x, w[0], True, interpreted, matrices=2)
    gate, up = rows_times(x, w, sizes, how, (lambda gate, up: gate, lambda gate, up: up))
    return product(gate, up), (x, w, sizes, (checkpoint_name(gate, "moe_gate"), checkpoint_name(up, "moe_up")))


def _backward(interpreted: bool, product: Callable, saved: tuple, dy: Array) -> tuple:
    x, w, sizes, made = saved
    parts = jax.vjp(product, *made)[1](dy)
    back = lambda part, w: rows_times(part, (w,), sizes, tiling(part, w, False, interpreted))[0]
    dx = functools.reduce(jnp.add, map(back, parts, w))
    return dx, tuple(gradient_of_matrices(x, part, sizes, interpreted) for part in parts), None


glu.defvjp(_forward, _backward)
