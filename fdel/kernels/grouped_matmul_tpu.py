"""Grouped matrix product by megablox, the Pallas kernel that jax ships for TPUs; with its own backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.platform import target

ROWS, WIDTH = 128, 512  # most rows, inputs and outputs of a tile; a tile's rows may be of several groups


def unsupported(x: Array, w: Any, sizes: Array) -> str | None:
    """Say why megablox cannot serve this call, or None."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    if not isinstance(w, jax.Array):
        return f"weights are arrays; found {type(w).__name__}"
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it multiplies bfloat16 or float32; found {x.dtype} and {w.dtype}"
    if w.ndim != 3 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != w.shape[::2]:
        return f"x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]"
    return None


def call(x: Float[Array, "M K"], w: Float[Array, "E N K"], sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Multiply as `ops.grouped_matmul`; sums are float32."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # takes a while to import

    inside = (jnp.arange(x.shape[0]) < sizes.sum())[:, None]  # no tile visits other rows: they would hold anything
    padded = jnp.pad(jnp.where(inside, x, 0), ((0, -x.shape[0] % ROWS), (0, 0)))
    tiling = ROWS, *(min(WIDTH, -(-n // 128) * 128) for n in (w.shape[2], w.shape[1]))
    y = gmm(padded, w, sizes.astype(jnp.int32), x.dtype, tiling, None, None, True)
    return jnp.where(inside, y[: x.shape[0]], 0)
