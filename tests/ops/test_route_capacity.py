"""Routers with a capacity against transformers' Switch and loops over tokens and experts; balance against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops

E, T = 5, 24
LOGITS = 2 * np.random.default_rng(0).normal(size=(3, T, E)).astype(np.float32)


def softmax(x):
    x = np.exp(np.float64(x) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("capacity", [1, 4, T])
def test_switch_is_that_of_transformers(capacity):
    """Experts, which tokens are dropped, and the weights of those that are not: 1e-6."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers import modeling_switch_transformers as theirs

    cfg = SwitchTransformersConfig(hidden_size=E, d_model=E, num_experts=E, expert_capacity=capacity, router_bias=False)
    router = theirs.SwitchTransformersTop1Router(cfg).eval()
    router.classifier.weight.data = torch.eye(E)
    probabilities, chosen, _ = router(torch.tensor(LOGITS))
    mask = next(c for c in (probabilities, chosen) if c.shape[-1] == E and set(np.unique(c.detach())) <= {0, 1}).numpy()
    weights, experts = ops.route_switch(jnp.asarray(LOGITS), capacity)
    kept = mask.any(-1)
    np.testing.assert_array_equal(np.asarray(experts)[..., 0], np.where(kept, mask.argmax(-1), -1))
    np.testing.assert_allclose(np.asarray(weights)[..., 0], np.where(kept, softmax(LOGITS).max(-1), 0), atol=1e-6)
    assert kept.all() == (capacity == T)


def test_switch_without_capacity_drops_nothing_and_the_router_learns():
    weights, experts = ops.route_switch(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(experts[..., 0], LOGITS.argmax(-1))
    grad = jax.grad(lambda x: ops.route_switch(x, 3)[0].sum())(jnp.asarray(LOGITS))
    dropped = np.asarray(ops.route_switch(jnp.asarray(LOGITS), 3)[1])[..., 0] < 0
    np.testing.assert_array_equal(np.abs(grad).max(-1) == 0, dropped)
    assert ops.expert_capacity(T, E, 1.25) == 6 and ops.expert_capacity(T, E, 1.0, k=2) == 10
    with pytest.raises(ValueError, match="capacity 0: an expert takes 1 token"):
        ops.route_switch(jnp.asarray(LOGITS), 0)
    assert ops.expert_capacity(100, 10, 1.1) == 11 and ops.expert_capacity(1001, 10, 1.1) == 111


@pytest.mark.parametrize("capacity", [1, 7, T])
def test_experts_choose_as_in_a_loop(capacity):
    weights, experts = ops.route_expert_choice(jnp.asarray(LOGITS), capacity)
    probability = softmax(LOGITS)
    want = np.zeros((3, T, E))
    for b, e in np.ndindex(3, E):
        for t in np.argsort(-probability[b, :, e])[:capacity]:
            want[b, t, e] = probability[b, t, e]
    got = np.zeros((3, T, E + 1))
    np.put_along_axis(got, np.asarray(experts), np.asarray(weights), -1)
    np.testing.assert_allclose(got[..., :E], want, atol=1e-6)
    assert ((np.asarray(experts) >= 0).sum((1, 2)) == capacity * E).all()


def test_expert_choice_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="capacity 25 of 24 tokens"):
        ops.route_expert_choice(jnp.asarray(LOGITS), 25)


def test_dropped_choices_add_nothing_and_are_counted():
    """`ops.moe` of what two routers chose, against a loop over tokens; drops from a tap's counts."""
    r = np.random.default_rng(1)
    p = {
        n: jnp.asarray(r.normal(size=s), jnp.float32)
        for n, s in {"gate": (E, 6, 4), "up": (E, 6, 4), "down": (E, 4, 6)}.items()
    }
    x = r.normal(size=(3, T, 4)).astype(np.float32)
    glu = lambda e, v: p["down"][e] @ (np.maximum(p["gate"][e] @ v, 0) * (p["up"][e] @ v))
    for weights, experts in (ops.route_switch(jnp.asarray(LOGITS), 3), ops.route_expert_choice(jnp.asarray(LOGITS), 3)):
        got = ops.moe(jnp.asarray(x), p, weights, experts, jax.nn.relu)
        want = np.zeros(x.shape)
        for *at, j in zip(*np.nonzero(np.asarray(experts) >= 0), strict=True):
            want[*at] += weights[*at, j] * glu(experts[*at, j], x[*at])
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    weights, experts = ops.route_switch(jnp.asarray(LOGITS), 3)
    carry = ops.Carry(None, ops.Taps(router=ops.router_load(E)))
    batch = ops.packed(jnp.zeros((3, T), int))
    load = ops.watch_router(batch, carry, jnp.asarray(LOGITS), jax.nn.softmax(jnp.asarray(LOGITS)), experts).taps.router
    counted = ops.router_metrics(load, 1)
    assert np.isclose(counted["dropped"], (np.asarray(experts) < 0).mean()) and counted["dropped"] > 0.2
    counts = np.bincount(np.asarray(experts)[experts >= 0], minlength=E)
    assert np.isclose(counted["busiest"], counts.max() / counts.mean())


@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 0.7), (2, 1.25), (3, 5.0)])
def test_choices_over_the_capacity_are_dropped_as_in_a_loop(k, factor):
    """Tokens in order, each row by itself, padding neither counts nor takes a place; drops are counted beside choices."""
    lengths = np.array([T, 7, 0])
    experts = np.argsort(-LOGITS, -1)[..., :k].astype(np.int32)
    want, lost = experts.copy(), 0
    for b, length in enumerate(lengths):
        most, held = ops.expert_capacity(length, E, factor, k), np.zeros(E, int)
        for t, j in np.ndindex(length, k):
            e = experts[b, t, j]
            held[e] += 1
            if held[e] > most:
                want[b, t, j], lost = -1, lost + 1
    batch = ops.packed(jnp.zeros((3, T), int), jnp.asarray(lengths))
    carry = ops.Carry(None, ops.Taps(router=ops.router_load(E)), routing=ops.Routing(capacity=factor))
    logits = jnp.asarray(LOGITS)
    carry = ops.watch_router(batch, carry, logits, jax.nn.softmax(logits), jnp.asarray(experts))
    got, carry = ops.limited(batch, carry, jnp.asarray(experts), E)
    real = np.arange(T) < lengths[:, None]
    np.testing.assert_array_equal(np.asarray(got)[real], want[real])
    load = carry.taps.router
    assert load.dropped == lost
    np.testing.assert_allclose(ops.router_metrics(load, k)["dropped"], lost / (real.sum() * k), atol=1e-6)
    np.testing.assert_array_equal(load.chosen, np.bincount(experts[real].reshape(-1), minlength=E))
    assert (lost == 0) == (factor == 5.0)
    if k == 1:
        capacity = ops.expert_capacity(T, E, factor)
        np.testing.assert_array_equal(got[0], ops.route_switch(logits[0], capacity)[1])


def test_jitter_has_its_bounds_and_its_key():
    x = jnp.full((50, 40), 2.0)
    noisy = ops.router_jitter(x, jax.random.key(0), 0.1) / x
    assert 0.9 <= noisy.min() < 0.905 and 1.095 < noisy.max() <= 1.1 and abs(noisy.mean() - 1) < 5e-3
    assert (noisy == ops.router_jitter(x, jax.random.key(0), 0.1) / x).all()


def test_z_loss_is_its_formula_without_padding():
    real = np.arange(T) < np.array([[T], [5], [0]])
    z = np.log(np.exp(np.float64(LOGITS)).sum(-1)) ** 2
    np.testing.assert_allclose(ops.router_z_loss(jnp.asarray(LOGITS), jnp.asarray(real)), z[real].mean(), rtol=1e-6)
    np.testing.assert_allclose(ops.router_z_loss(jnp.asarray(LOGITS)), z.mean(), rtol=1e-6)


def test_the_bias_evens_out_a_crooked_router():
    """Without an auxiliary loss: the busiest of eight experts falls from over three times the mean to near it."""
    logits = jax.random.normal(jax.random.key(0), (2048, 8)) + jnp.linspace(-2, 2, 8)
    best = dict(groups=1, topk_groups=1, scale=1.0, normalize=True)

    @jax.jit
    def load(bias):
        _, experts = ops.route_sigmoid(logits, 2, bias=bias, **best)
        return jnp.bincount(experts.reshape(-1), length=8).astype(jnp.float32)

    bias, busiest = jnp.zeros(8), lambda c: float(c.max() / c.mean())
    before = busiest(load(bias))
    for _ in range(300):
        bias = ops.update_router_bias(bias, load(bias), 5e-3)
    assert before > 2 and busiest(load(bias)) < 1.1
