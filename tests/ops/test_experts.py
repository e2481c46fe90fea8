"""Experts with biases, products of their own and scaled inputs, against a loop over tokens and experts in float64; routers
against transformers'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.platform import tracing_for

T, D, F, E = 40, 12, 20, 6
CHOSEN = np.stack([np.random.default_rng(i).permutation(E - 1)[:2] for i in range(T)])  # the last expert has no token
SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F), "gate_bias": (F,), "up_bias": (F,), "down_bias": (D,)}
CASES = [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]


def clipped(gate, up, m=np):
    """gpt-oss's product."""
    gate, up = m.minimum(gate, 0.7), m.clip(up, -0.7, 0.7)
    return (up + 1) * gate / (1 + m.exp(-1.702 * gate))


def silu(gate, up, m=np):
    return gate / (1 + m.exp(-gate)) * up


def drawn(biased):
    r = np.random.default_rng(0)
    draw = lambda *shape: r.normal(size=shape).astype(np.float32)
    p = {name: draw(E, *shape) for name, shape in SHAPES.items() if biased or not name.endswith("bias")}
    return draw(T, D), p, r.uniform(0.2, 1, (T, 2)).astype(np.float32)


def loops(x, p, weights, product, scaled):
    """The formula, one token and one expert at a time."""
    p = {name: w.astype(np.float64) for name, w in p.items()}
    bias = lambda name, e: p[name][e] if name in p else 0.0
    out = np.zeros(x.shape)
    for t, j in np.ndindex(CHOSEN.shape):
        e, w = CHOSEN[t, j], float(weights[t, j])
        row = x[t] * w if scaled else x[t]
        gate, up = (p[i][e] @ row + bias(f"{i}_bias", e) for i in ("gate", "up"))
        out[t] += (1.0 if scaled else w) * (p["down"][e] @ product(gate, up) + bias("down_bias", e))
    return out


def run(x, p, weights, own, scaled):
    """`ops.moe` of a case; `own` takes the clipped product."""
    gated = (lambda gate, up: clipped(gate, up, jnp)) if own else None
    return ops.moe(x, p, weights, jnp.asarray(CHOSEN), jax.nn.silu, gated=gated, scale_inputs=scaled)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("biased,own,scaled", CASES)
def test_moe_equals_loops(platform, biased, own, scaled):
    """The expert that no token chose is full of infinities. For few tokens a TPU has no loop over experts."""
    x, p, weights = drawn(biased)
    want = loops(x, p, weights, clipped if own else silu, scaled)
    p = {name: jnp.asarray(w).at[E - 1].set(jnp.inf) for name, w in p.items()}
    with tracing_for(platform):
        f = jax.jit(lambda x, p, w: run(x, p, w, own, scaled))
        assert ("while" in f.lower(x, p, weights).as_text()) == (platform == "cpu")
        got = f(x, p, weights)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("biased,own,scaled", [(True, True, False), (False, False, True)])
def test_gradients_equal_those_of_the_dense_formula(platform, biased, own, scaled):
    """Of inputs, weights, biases and the router's weights; every expert of every token, which jax differentiates."""
    x, p, weights = drawn(biased)
    chosen = jax.nn.one_hot(CHOSEN, E)

    def dense(x, p, weights):
        share = (chosen * weights[..., None]).sum(1)  # [T E]
        rows = x[:, None] * share[..., None] if scaled else jnp.repeat(x[:, None], E, 1)
        bias = lambda name: p.get(name, 0.0)
        gate, up = (jnp.einsum("ted,efd->tef", rows, p[i]) + bias(f"{i}_bias") for i in ("gate", "up"))
        y = jnp.einsum("tef,edf->ted", (clipped if own else silu)(gate, up, jnp), p["down"]) + bias("down_bias")
        return (y * (chosen.sum(1) if scaled else share)[..., None]).sum(1)

    loss = lambda f: lambda *args: (jnp.sin(jnp.arange(D)) * f(*args)).sum()
    want = jax.grad(loss(dense), (0, 1, 2))(x, p, weights)
    with tracing_for(platform):
        got = jax.jit(jax.grad(loss(lambda x, p, w: run(x, p, w, own, scaled)), (0, 1, 2)))(x, p, weights)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * np.abs(b).max())


# ---- routers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [0.01, 0.2, 0.6])
def test_sparse_mixer_is_that_of_transformers(band):
    """Weights, experts and gradients, of logits near and far from each other, positive and negative: 1e-6."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32) - np.linspace(-3, 3, 200)[:, None]
    logits = logits.astype(np.float32)
    given = torch.tensor(logits, requires_grad=True)
    want, chosen = sparsemixer(given, jitter_eps=band, training=False)
    (want * torch.tensor([1.0, 2.0])).sum().backward()
    got, experts = ops.route_sparsemixer(jnp.asarray(logits), 2, band=band)
    np.testing.assert_array_equal(experts, chosen.numpy())
    np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-6)
    grad = jax.grad(lambda x: (ops.route_sparsemixer(x, 2, band=band)[0] * jnp.array([1.0, 2.0])).sum())(logits)
    np.testing.assert_allclose(grad, given.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("groups,kept,k", [(4, 2, 3), (4, 1, 2), (2, 2, 8)])
def test_softmax_router_of_groups_is_that_of_transformers(groups, kept, k):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    cfg = DeepseekV2Config(hidden_size=8, num_attention_heads=1, n_routed_experts=8, num_experts_per_tok=k,
                           n_group=groups, topk_group=kept, topk_method="group_limited_greedy")  # fmt: skip
    router, logits = DeepseekV2TopkRouter(cfg), 2 * np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    router.weight.data = torch.eye(8)
    _, want, chosen = router(torch.tensor(logits))
    got, experts = ops.route_softmax(jnp.asarray(logits), k, normalize=False, groups=groups, topk_groups=kept)
    spread = lambda w, e: np.asarray(jnp.zeros((50, 8)).at[jnp.arange(50)[:, None], jnp.asarray(e)].set(jnp.asarray(w)))
    np.testing.assert_allclose(spread(got, experts), spread(want.detach().numpy(), chosen.numpy()), atol=1e-6)
