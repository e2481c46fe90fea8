"""Fewer bits without bias: compute in half precision, scaled losses for float16, stochastic rounding for bfloat16."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fdel.ops.contraction import widen
from fdel.params.spec import path_name
from fdel.train.given import NOTHING, Batch, Given, Loss, Params, lookup
from fdel.train.steps import Metrics, Step, TrainState, with_extra

# ---- compute dtype -------------------------------------------------------------------------------------------------


def compute(loss: Loss, dtype: Any, spec: Any = None) -> Loss:
    """Cast the floating parameters to `dtype` inside the loss: float32 weights, half-precision arithmetic.

    Works on everything called with (params, batch, given). Gradients come out in the weights' own dtype. Arrays whose
    dtype `spec`, the parameters' spec tree, fixes are left as they are (decay rates, the biases of routers).
    """
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    half = lambda params: jax.tree.map(cast, params)
    if spec is not None:
        half = lambda params: jax.tree.map(lambda p, x: x if p.dtype else jax.tree.map(cast, x), spec, params)

    def cast_first(params: Params, batch: Batch, given: Given = NOTHING) -> Any:
        return loss(half(params), batch, given)

    return cast_first


# ---- loss scaling --------------------------------------------------------------------------------------------------


def loss_scale(initial: float = 2.0**16) -> dict[str, Array]:
    """Make the extra "loss_scale" that `scaled` and `rescale` share: the scale and the good steps since it changed."""
    return {"scale": jnp.float32(initial), "good": jnp.int32(0)}


def scaled(loss: Loss) -> Loss:
    """Multiply all gradients inside `loss` by a scale, and divide by it in float32 where they leave.

    The result reads "loss_scale"; its values, and its gradients but for underflow, are those of `loss`. For float16:
    `update(grads(scaled(compute(loss, jnp.float16))), ..., reads=("loss_scale",))`.
    """

    def f(params: Params, batch: Batch, given: Given = NOTHING) -> Any:
        scale = lookup(given, "loss_scale")["scale"]
        half = [str(x.dtype) for x in jax.tree.leaves(params) if x.dtype in (jnp.float16, jnp.bfloat16)]
        if half:
            advice = "keep them in float32 and cast them with compute(loss, ...)"
            raise ValueError(f"scaled: parameters are {half[0]}; {advice}")
        floats = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
        times = lambda tree, by: jax.tree.map(lambda x: _multiply_gradient(x, by) if floats(x) else x, tree)
        return times(loss(times(params, 1 / scale), batch, given), scale)

    return f


@jax.custom_vjp
def _multiply_gradient(x: Array, factor: Array) -> Array:
    return x


_multiply_gradient.defvjp(lambda x, factor: (x, factor), lambda factor, ct: (ct * factor.astype(ct.dtype), None))


def rescale(step: Step, *, growth: float = 2.0, backoff: float = 0.5, every: int = 2000) -> Step:
    """Multiply the scale by `backoff` after a step that overflows, by `growth` after `every` good steps in a row.

    The rule of torch.amp.GradScaler, around `update(..., skip_nonfinite=True)`; a ValueError around another step. Metrics
    get "loss_scale", that of this step.
    """

    def rescaled(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, **given)
        if "skipped" not in metrics:
            advice = "build it by update(..., skip_nonfinite=True)"
            raise ValueError(f"rescale: the step does not skip what overflows; {advice}")
        scale, good = new.extra["loss_scale"]["scale"], new.extra["loss_scale"]["good"] + 1
        grown = jnp.where(jnp.isfinite(scale * growth), scale * growth, scale)
        fine, full = metrics["skipped"] == 0, good >= every
        changed = jnp.where(fine, jnp.where(full, grown, scale), scale * backoff)
        after = {"scale": changed, "good": jnp.where(fine & ~full, good, 0)}
        return with_extra(new, loss_scale=after), metrics | {"loss_scale": scale}

    return rescaled


# ---- stochastic rounding -------------------------------------------------------------------------------------------


def round_stochastic(x: Float[Array, "..."], key: Key[Array, ""]) -> Float[Array, "..."]:
    """Round float32 to one of the two nearest bfloat16, with the probabilities that make the mean exact.

    What is no number, or would become infinite, is rounded to nearest and towards zero.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = lambda bits: jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    up = cut(bits + noise)
    return jnp.where(jnp.isfinite(x), jnp.where(jnp.isfinite(up), up, cut(bits)), x.astype(jnp.bfloat16))


def leaf_key(key: Key[Array, ""], path: tuple) -> Key[Array, ""]:
    """Fold an array's path into a key, so that adding an array changes no other one's randomness."""
    return jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))


def add_stochastic(seed: int = 0) -> Any:
    """Build an `apply` for `update` that adds updates in float32 and rounds bfloat16 parameters stochastically.

    To nearest, an update below 2^-9 of a weight is lost; so none is, on average. The key is fold_in(key(seed), step).
    """

    def apply(params: Params, updates: Params, step: Int[Array, ""]) -> Params:
        key = jax.random.fold_in(jax.random.key(seed), step)

        def one(path: tuple, p: Array, u: Array) -> Array:
            new = widen(p) + u
            return round_stochastic(new, leaf_key(key, path)) if p.dtype == jnp.bfloat16 else new.astype(p.dtype)

        return jax.tree_util.tree_map_with_path(one, params, updates)

    return apply
