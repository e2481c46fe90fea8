"""What makes attention fast under XLA:CPU: rows one after the other, and products in the forms that it does well."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.shard import context

CHUNK = 128  # prompt tokens that take about as long as three steps of 8 sequences that decode


def here() -> bool:
    """Tell whether programs run on CPU."""
    return jax.default_backend() == "cpu"


def each_row(f: Callable, *arrays: Array, loop: bool) -> Any:
    """Compute f(*arrays) for arrays [B ...], on CPU with a `loop` over the rows: what a row needs stays in cache.

    Not where a mesh divides the rows: a loop over them would gather them first.
    """
    if not loop or not here() or len(arrays[0]) == 1 or context("dp", "fsdp", "ep", "tp", "sp"):
        return f(*arrays)
    row = lambda xs: jax.tree.map(lambda x: x[0], f(*(x[None] for x in xs)))
    return jax.lax.map(row, arrays)


def row_dots(x: Float[Array, "... H"], y: Float[Array, "... H"]) -> Float[Array, "... 1"]:
    """Sum x y over the last axis, in float32. As a product: XLA:CPU sums over short axes at a crawl."""
    wide = x.astype(jnp.float32) * y.astype(jnp.float32)
    return jnp.einsum("...h,hx->...x", wide, jnp.ones((wide.shape[-1], 1)), precision=jax.lax.Precision.HIGHEST)


def over_queries(x: Float[Array, "B K G T H"], y: Float[Array, "B K G T S"]) -> Float[Array, "B K H S"]:
    """Sum x y over queries, in float32.

    The smaller matrix is left, since XLA:CPU turns that one round with all that it is computed from. It cannot multiply
    half precision so: there the factors become float32 first.
    """
    if here():
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum("bkgqh,bkgqs->bkhs", x, y, preferred_element_type=jnp.float32)
