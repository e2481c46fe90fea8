"""Weights with several adapters: each token's result against float64 numpy, in every kind of product that models do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.ops.weights import Adapters, LowRank
from fdel.params import lora

T, D, N, H, C = 7, 12, 3, 4, 10
CHOICES = np.array([0, 2, -1, 1, 2, 0, -1])
# subscripts: (x without tokens, the weight, its outputs); the last two multiply latents (MLA) from either side.
PRODUCTS = {
    "...d,fd->...f": ((D,), (C, D), 1),
    "...d,nhd->...nh": ((D,), (N, H, D), 2),
    "...nh,dnh->...d": ((N, H), (D, N, H), 1),
    "...nc,nhc->...nh": ((N, C), (N, H, C), 2),
    "...nh,nhc->...nc": ((N, H), (N, H, C), 2),
}


def made(subscripts: str, ranks=(2, 5, 3), slots: int = 4, quantized: bool = False):
    """x, the base, and the listed trees of three adapters of different rank on it."""
    rows, shape, outputs = PRODUCTS[subscripts]
    r = np.random.default_rng(0)
    f = lambda *s: jnp.asarray(r.normal(size=s), jnp.float32)
    base = f(*shape)
    if quantized:
        axes = "heads head_dim embed"
        spec = {"layers": [{"w": params.Param(axes, shape, params.spec.zeros, "w", "(heads head_dim) embed")}]}
        base = params.quantize({"layers": [{"w": base}]}, "int8", spec=spec)["layers"][0]["w"]
    low = [
        LowRank(base, f(k, *shape[outputs:]), f(*shape[:outputs], k), jnp.float32(0.5 + i)) for i, k in enumerate(ranks)
    ]
    trees = [{"layers": [{"w": w}]} for w in low]
    tree = lora.stack({"layers": [{"w": base}]}, dict(enumerate(trees)), slots, max(ranks) + 1)
    return f(T, *rows), base, low, tree


def leaf(tree, choice) -> Adapters:
    return lora.choose(tree, jnp.asarray(choice))["layers"][0]["w"]


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_each_token_has_its_own_weight(subscripts: str) -> None:
    x, base, low, tree = made(subscripts)
    got = jax.jit(lambda x, w: ops.einsum(subscripts, x, w))(x, leaf(tree, CHOICES))
    dense = lambda w: (
        np.asarray(w.base, np.float64)
        + float(w.scale) * np.tensordot(np.asarray(w.b, np.float64), np.asarray(w.a, np.float64), 1)
    )
    for t, c in enumerate(CHOICES):
        w = np.asarray(base, np.float64) if c < 0 else dense(low[c])
        np.testing.assert_allclose(got[t], np.einsum(subscripts, np.asarray(x, np.float64)[t], w), atol=2e-5)


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_tokens_without_an_adapter_get_the_base_bit_by_bit(subscripts: str) -> None:
    """Even beside tokens and factors that are not finite."""
    x, base, _, tree = made(subscripts)
    x = x.at[0].set(jnp.inf)
    got = ops.einsum(subscripts, x, leaf(tree, CHOICES))
    want = ops.einsum(subscripts, x, base)
    np.testing.assert_array_equal(np.asarray(got)[CHOICES < 0], np.asarray(want)[CHOICES < 0])
    assert np.isfinite(np.asarray(want)[CHOICES < 0]).all()


@pytest.mark.slow
def test_a_quantized_base_and_half_precision() -> None:
    x, base, low, tree = made("...d,nhd->...nh", quantized=True)
    got = ops.einsum("...d,nhd->...nh", x, leaf(tree, CHOICES))
    for t, c in enumerate(CHOICES):
        want = ops.einsum("...d,nhd->...nh", x[t : t + 1], base if c < 0 else low[c])[0]
        np.testing.assert_allclose(got[t], want, atol=1e-5)
    half = ops.einsum("...d,nhd->...nh", x.astype(jnp.bfloat16), leaf(tree, CHOICES))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), got, atol=0.25)


def test_one_choice_for_all() -> None:
    x, _, low, tree = made("...d,fd->...f")
    got = ops.einsum("...d,fd->...f", x[None], leaf(tree, [1]))
    np.testing.assert_allclose(got, ops.einsum("...d,fd->...f", x[None], low[1]), atol=1e-5)


def test_errors_say_what_to_do() -> None:
    x, base, low, tree = made("...d,fd->...f")
    with pytest.raises(ValueError, match="needs each token's choice"):
        ops.einsum("...d,fd->...f", x, tree["layers"][0]["w"])
    with pytest.raises(ValueError, match="needs each token's choice, tokens first"):
        ops.einsum("d,fd->f", x[0], leaf(tree, CHOICES))
    with pytest.raises(TypeError, match="another one for each token"):
        ops.weights.dense(leaf(tree, CHOICES))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("factor", ["a", "b", "scale"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_factors_that_are_not_finite_harm_their_own_tokens_alone(subscripts, dtype, factor, value) -> None:
    """In either factor, which are multiplied in either order; also what overflows by its scale or in half precision."""
    x, base, low, _ = made(subscripts)
    listed = lambda w: {"layers": [{"w": w}]}
    bad = dataclasses.replace(low[2], **{factor: jnp.full_like(getattr(low[2], factor), value)})
    stacked = [
        lora.stack(listed(base), {0: listed(low[0]), 2: listed(w)}, 3, 5, dtype=jnp.dtype(dtype)) for w in (low[2], bad)
    ]
    want, got = (np.asarray(ops.einsum(subscripts, x.astype(dtype), leaf(t, CHOICES))) for t in stacked)
    others = CHOICES != 2
    np.testing.assert_array_equal(got[others], want[others])
    assert np.isfinite(want).all() and not (got[~others] == want[~others]).any()
