"""Adam, also with moments in fewer bits: 8-bit codes in blocks (arXiv:2110.02861), or bfloat16 with stochastic rounding."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

from fdel.train.precision import leaf_key, round_stochastic

BLOCK, SMALLEST = 256, 4096  # values that share a scale; arrays of fewer elements stay in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """An array in 8 bits: the indices in `codebook` of the values divided by their block's greatest magnitude.

    A block is BLOCK consecutive values of the last axis, or what is left of them. The codes have the shape of the array,
    and the scales all its axes, so that both can be sharded as it is. Optimizer state is two whole trees, for the same
    reason: their paths end as those of the parameters do. What is not in 8 bits has itself for codes and no scale.
    """

    codes: UInt8[Array, "... N"] | Any
    scale: Float[Array, "... N/BLOCK"] | Any


def codebook(signed: bool) -> np.ndarray:
    """Give the 256 values of the dynamic data type (arXiv:1511.04561), sorted; the unsigned one has no negative values.

    The decade [10^-i/10, 10^-i], i = 0...6, has 2^(6-i) equidistant values, the middles of its parts (unsigned: twice
    as many); zero and one are added.
    """
    decades = []
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (6 - i) * (1 if signed else 2) + 1)
        decades.append(10.0**-i * (edges[:-1] + edges[1:]) / 2)
    values = np.concatenate([*decades, [0.0, 1.0]])
    return np.sort(np.concatenate([values, *(-d for d in decades)]) if signed else values).astype(np.float32)


def encode(x: Float[Array, "... N"], signed: bool) -> Blocks:
    """Round each value to the nearest of its block's scale times the codebook."""
    blocks = _blocked(x)
    scale = jnp.abs(blocks).max(-1)
    return Blocks(_flat(_nearest(blocks / jnp.where(scale > 0, scale, 1)[..., None], signed), x.shape), scale)


def _nearest(x: Array, signed: bool) -> Array:
    """Find the index of each value in -1...1 in the codebook by arithmetic: a search is ten times slower."""
    first = 1 if signed else 2  # values of the least decade; the next ones have twice as many each
    values = codebook(signed)
    values = values[values >= 0]
    middles = (values[1:] + values[:-1]) / 2
    size = jnp.abs(x)
    decade = sum((size > middles[first * (2**d - 1)]).astype(jnp.int32) for d in range(7)) - 1  # -1 is zero
    n = first << jnp.maximum(decade, 0)
    power = jnp.asarray(10.0 ** np.arange(6, -1, -1), x.dtype)[jnp.maximum(decade, 0)]
    place = jnp.clip(jnp.floor((size * power - 0.1) * n / 0.9).astype(jnp.int32), 0, n - 1)
    code = jnp.where(decade < 0, 0, n - first + 1 + place) + (size > middles[-1])
    return (127 + jnp.where(x < 0, -jnp.minimum(code, 127), code) if signed else code).astype(jnp.uint8)


def decode(x: Blocks, signed: bool) -> Float[Array, "... N"]:
    """Undo `encode`, up to its rounding, in float32."""
    if x.scale is None:
        return x.codes.astype(jnp.float32)
    values = jnp.asarray(codebook(signed))[_blocked(x.codes)] * x.scale[..., None]
    return _flat(values, x.codes.shape)


def _blocked(x: Array) -> Array:
    """[... N] -> [... blocks BLOCK], filled up with zeros; one block of N values if N is less."""
    size = min(BLOCK, x.shape[-1])
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % size),))
    return x.reshape(*x.shape[:-1], -1, size)


def _flat(blocks: Array, shape: tuple[int, ...]) -> Array:
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _keep(tree: Any, moments: str, signed: bool, key: Array) -> Blocks:
    def one(path: tuple, x: Array) -> Blocks:
        if moments == "int8":
            return encode(x, signed) if x.size >= SMALLEST else Blocks(x, None)
        # A first moment moves on by a tenth each step, and needs no randomness.
        return Blocks(x.astype(jnp.bfloat16) if signed else round_stochastic(x, leaf_key(key, path)), None)

    kept, is_blocks = jax.tree_util.tree_map_with_path(one, tree), lambda x: isinstance(x, Blocks)
    part = lambda get: jax.tree.map(get, kept, is_leaf=is_blocks)
    return Blocks(part(lambda x: x.codes), part(lambda x: x.scale))


def scale_by_adam(
    b1: float, b2: float, eps: float, moments: str = "float32", seed: int = 0
) -> optax.GradientTransformation:
    """Compute Adam's direction (arXiv:1412.6980) with moments kept in "float32", as "int8" `Blocks` or as "bfloat16".

    The moments are updated and used in float32, and rounded to be kept. Bytes per parameter, both moments: 8, 2 + 8/256, or
    4. Rounding to the nearest bfloat16 would stop the second moment short of its value; its random bits come from `seed`.
    """
    if moments not in ("float32", "int8", "bfloat16"):
        raise ValueError(f"moments={moments!r} is not one of float32, bfloat16, int8")
    whole = moments == "float32"
    load = lambda tree, signed: jax.tree.map(lambda c, s: decode(Blocks(c, s), signed), tree.codes, tree.scale)

    def state(count: Array, mu: Any, nu: Any) -> optax.ScaleByAdamState:
        if whole:
            return optax.ScaleByAdamState(count, mu, nu)
        key = jax.random.fold_in(jax.random.key(seed), count)
        return optax.ScaleByAdamState(count, _keep(mu, moments, True, key), _keep(nu, moments, False, key))

    def init(params: Any) -> optax.ScaleByAdamState:
        zero = lambda: optax.tree.zeros_like(params)
        return state(jnp.zeros((), jnp.int32), zero(), zero())

    def update(grads: Any, old: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        count = old.count + 1
        mu, nu = (old.mu, old.nu) if whole else (load(old.mu, True), load(old.nu, False))
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, grads, nu)
        # Multiplied: XLA:CPU would divide whole arrays in passes of their own.
        first, second = 1 / (1 - b1**count), 1 / (1 - b2**count)
        direction = lambda m, v: (m * first) / (jnp.sqrt(v * second) + eps)
        return jax.tree.map(direction, mu, nu), state(count, mu, nu)

    return optax.GradientTransformation(init, update)
