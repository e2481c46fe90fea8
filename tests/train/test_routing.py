"""Biases of selection that follow the load: the same whatever the loss and the microbatches are."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, train
from fdel import params as fp
from fdel.models import deepseek_v3, llama
from fdel.train import losses, parallel
from tests.serve import small

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=0,
    n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    norm_topk_prob=True, routed_scaling_factor=1.0, scoring_func="sigmoid",
)  # fmt: skip
CFG = deepseek_v3.Config.from_hf(SIZES)
SPEC = deepseek_v3.spec(CFG)
SPEED = 0.01


def batch_of(i, rows=16, length=12):
    r = np.random.default_rng(i)
    return {"tokens": r.integers(0, 64, (rows, length)), "lengths": r.integers(2, length + 1, rows)}


@lru_cache
def built(n=1, rate=1e-2, speed=SPEED):
    """A step, which skips what is not finite, and the state before it; compiled once for all tests."""
    optimizer = train.optim.adamw(rate, eps=1e-3)
    fresh = lambda key: train.init_state(fp.init(SPEC, key, dtype=jnp.float32), optimizer)
    g = train.count_choices(train.accumulate(train.grads(losses.sft(deepseek_v3, CFG, chunk=8)), n), SPEC)
    step = train.balance(train.update(train.normalize(g), optimizer, skip_nonfinite=True), speed)
    return jax.jit(step), jax.jit(fresh)(jax.random.key(0))


def biases(state):
    (found,) = [x for path, x in fp.named_leaves(state.params) if path.endswith("router_bias")]
    return np.asarray(found)


def after(step, state, steps=3):
    seen = []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        seen.append(biases(state))
    return np.stack(seen), metrics


@pytest.mark.slow
def test_they_move_by_the_speed_and_have_no_gradient():
    """Nor does an even load move them, or a step that is skipped, and microbatches change nothing.

    That exactly in the first step; later weights differ by rounding, so few experts may tip over. One test, since the step
    takes long to compile.
    """
    step, state = built()
    seen, metrics = after(step, state)
    moves = np.diff(np.concatenate([biases(state)[None], seen]), axis=0) / SPEED
    assert np.allclose(moves, np.round(moves), atol=1e-4) and set(np.round(moves).ravel()) <= {-1, 0, 1}
    assert (np.round(moves) == 1).any() and (np.round(moves) == -1).any()
    assert 1 < metrics["router_busiest"] <= 8 and 0 <= metrics["router_idle"] < 1
    bare = train.grads(losses.sft(deepseek_v3, CFG, chunk=8))
    both = [train.normalize(g) for g in (bare, train.count_choices(bare, SPEC))]
    want, got = jax.jit(lambda p, batch: [g(p, batch, {})[0] for g in both])(state.params, batch_of(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), got, want)
    broken = {**state.params, "norm": state.params["norm"] * np.nan}
    new, metrics = step(train.init_state(broken, train.optim.adamw(1e-2, eps=1e-3)), batch_of(0))
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(biases(new), biases(state))
    choices = jnp.full((2, 7), 3.0)
    np.testing.assert_array_equal(ops.update_router_bias(jnp.ones((2, 7)), choices, 0.1), np.ones((2, 7)))
    got = after(*built(4), 2)[0]
    np.testing.assert_array_equal(got[0], seen[0])
    assert np.isclose(got[1], seen[1], atol=1e-6).mean() > 0.9


@pytest.mark.slow
@pytest.mark.matrix
def test_preferences_count_the_policy_alone():
    """With a reference in microbatches of `gradcache`: the choices on prompts and completions, once."""
    outputs, objective = losses.completion_logps(deepseek_v3, CFG), losses.dpo_objective()
    weights = fp.init(SPEC, jax.random.key(0), dtype=jnp.float32)
    pairs = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch_of(0))
    g = jax.jit(train.count_choices(train.gradcache(outputs, objective, 2), SPEC))
    _, sums = g(weights, pairs, {"reference": weights})
    (counts,) = [x for name, (x, _) in [(k, v) for k, v in sums.items() if k.startswith("choices of ")]]
    np.testing.assert_array_equal(counts.sum(-1), np.full(2, 2 * batch_of(0)["lengths"].sum()))


@pytest.mark.slow
@pytest.mark.matrix
def test_the_load_evens_out():
    """Weights stand still: the busiest expert falls from over 1.5 times the mean load to below 1.25 times."""
    step, state = built(rate=0.0, speed=5e-4)
    first = None
    for _ in range(60):
        state, metrics = step(state, batch_of(0))
        first = first or float(metrics["router_busiest"])
    assert first > 1.5 and metrics["router_busiest"] < 1.25


def test_models_without_such_biases_are_refused():
    with pytest.raises(ValueError, match="no router of the model has a bias of selection"):
        train.count_choices(train.grads(losses.sft(llama, small.CFG)), llama.spec(small.CFG))
    with pytest.raises(ValueError, match="expected a number from 0"):
        train.balance(lambda state, batch: (state, {}), -1.0)
    with pytest.raises(ValueError, match="no counts"):
        train.balance(lambda state, batch: (state, {}), 1.0)(None, {})


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("sizes", [{"dp": 2, "fsdp": 4}, {"ep": 4, "tp": 2}], ids=str)
def test_meshes_move_the_same_biases(sizes):
    """Of the whole batch's load, which replicas add up once: exactly those of one device."""
    mesh = fp.make_mesh(sizes)
    at = fp.shardings(SPEC, mesh)
    optimizer = train.optim.adamw(1e-2, eps=1e-3)
    with jax.set_mesh(mesh):
        weights = jax.device_put(fp.init(SPEC, jax.random.key(0), dtype=jnp.float32), at)
        g = parallel.constrain(train.grads(losses.sft(deepseek_v3, CFG, chunk=8)), at)
        g = train.count_choices(parallel.reduce_once(train.accumulate(g, 2)), SPEC)
        step = jax.jit(train.balance(train.update(train.normalize(g), optimizer), SPEED))
        rows = jax.device_put(batch_of(0), fp.batch_sharding(mesh))
        state, _ = step(train.init_state(weights, optimizer), rows)
    np.testing.assert_array_equal(biases(state), after(*built(), 1)[0][0])
