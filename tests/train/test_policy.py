"""Policy losses against TRL 1.16 (GSPO-token: 1.12), on fixtures that `fixtures/make_policy.py` made.

Losses, metrics and gradients agree within 1e-5 of their largest value (seen: 2e-6), rows packed or padded.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdel import ops, params, train
from fdel.models import llama
from fdel.train import extremes, losses
from fdel.train.losses.policy import Policy, policy
from fdel.train.losses.sequences import Tokens, sequence_mean, sequence_sum, starts

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {name: np.load(FIXTURES / f"policy_{name}.npz") for name in ("trl112", "trl116")}
CASES = [(f, i, c) for f in FILES for i, c in enumerate(json.loads(str(FILES[f]["cases"]))) if c["kind"] == "policy"]
NOT_OURS = {"entropy_coef"}  # TRL's that we do not have


def close(got, want, rtol=1e-5):
    """Compare relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and np.isfinite(want).all() and np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * np.abs(want).max())


def padded(x, fill):
    """TRL's rows, and others that fill up the batch, whose numbers mean nothing."""
    return jnp.pad(jnp.asarray(x), ((1, 2), (0, 0)), constant_values=fill)


def packed(x, fill):
    """TRL's rows in pairs, with padding before, between and after."""
    x = jnp.pad(jnp.asarray(x), ((0, 0), (1, 2)), constant_values=fill)
    return x.reshape(len(x) // 2, -1)


LAYOUTS = {
    "padded": (padded, None),
    "packed": (
        packed,
        jnp.broadcast_to(jnp.repeat(jnp.array([-1, 4, 5, 7, 8, 9]), jnp.array([1, 9, 2, 1, 9, 2])), (3, 24)),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("file", "index", "case"), CASES, ids=[f"{c['options']['loss_type']}{i}" for _, i, c in CASES])
def test_as_trl(file, index, case, layout) -> None:
    form, segments = LAYOUTS[layout]
    data = FILES[file]
    columns = {k: data[k] for k in ("old", "sampled", "reference")}
    columns["advantages"] = np.broadcast_to(data["advantages"][:, None], data["mask"].shape)
    if "correction" not in case["options"]:
        columns["sampled"] = columns["old"]  # what TRL masks by where it has no sampler's
    columns = {k: form(v, 7.0) for k, v in columns.items()}
    mask = form(data["mask"], 0.0)
    o = case["options"]
    options = Policy(**o | ({"correction_clip": tuple(o["correction_clip"])} if "correction_clip" in o else {}))

    def loss(logp, entropy):
        total, sums = policy(Tokens(form(logp, 0), form(entropy, 0), mask, **columns, segments=segments), options)
        ratio = lambda v: v[0] / v[1] if isinstance(v, tuple) else v / sums["weight"]
        ratio = lambda v, ratio=ratio: v.value if isinstance(v, extremes.Extreme) else ratio(v)
        return total / sums["weight"], {k: ratio(v) for k, v in sums.items()}

    arguments = jnp.asarray(data["logp"]), jnp.asarray(data["entropy"])
    (value, metrics), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
    close(value, case["loss"])
    for name, grad in zip(("logp", "entropy"), grads, strict=True):
        if f"{index}/{name}" in data:
            close(grad * data["mask"], data[f"{index}/{name}"] * data["mask"])
        else:
            assert not grad.any()
    for name in case["metrics"].keys() - NOT_OURS:
        np.testing.assert_allclose(metrics[name], case["metrics"][name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_signs_by_hand() -> None:
    """A token that did better than expected becomes likelier, one that did worse less so, within the ratio's range."""
    one = jnp.ones((1, 1))
    slope = lambda advantage, ratio, **o: jax.grad(
        lambda x: policy(Tokens(x, 0 * one, one, advantage * one, x * 0 - 1), Policy(**o))[0]
    )(jnp.log(ratio) * one - 1)[0, 0]
    for t in ("dapo", "cispo", "sapo", "vespo", "gmpo"):
        assert slope(1.0, 1.0, loss_type=t) < 0 < slope(-1.0, 1.0, loss_type=t)
    assert slope(1.0, 1.3) == 0 and slope(-1.0, 0.7) == 0  # far enough
    assert slope(-1.0, 1.3) == pytest.approx(1.3) and slope(1.0, 0.7) == pytest.approx(
        -0.7
    )  # the wrong way: pulled back
    assert slope(-1.0, 5.0, delta=4.0) == 0
    away = lambda **o: jax.grad(
        lambda x: policy(Tokens(x, 0 * one, one, 0 * one, x * 0 - 1, reference=x * 0 - 3), Policy(beta=0.5, **o))[0]
    )(-one)[0, 0]
    assert all(
        away(kl_estimator=k, use_bias_correction_kl=True) > 0 for k in ("k1", "k2", "k3")
    )  # down, to the reference


def test_kl_estimators() -> None:
    """Against their formulas in float64, drawn tokens' mean being the divergence for k1 and k3."""
    r = np.random.default_rng(0)
    p, q = (np.exp(z) / np.exp(z).sum() for z in r.normal(size=(2, 6)))
    d = np.log(q / p)
    want = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}
    kl = (p * -d).sum()
    for name, x in want.items():
        got = losses.policy.KL[name](jnp.asarray(d, jnp.float32))
        close(got, x)
        assert name == "k2" or abs((p * np.asarray(got)).sum() - kl) < 1e-6


def test_sequence_sums() -> None:
    """Against loops in numpy."""
    r = np.random.default_rng(0)
    segments = np.cumsum(r.random((3, 11)) < 0.4, -1) - 1
    x, mask = r.normal(size=(3, 11)), (r.random((3, 11)) < 0.6) * 1.0
    total, mean = np.zeros_like(x), np.zeros_like(x)
    for i, j in np.ndindex(x.shape):
        there = segments[i] == segments[i, j]
        total[i, j] = x[i, there].sum()
        mean[i, j] = (x[i] * mask[i])[there].sum() / max(mask[i, there].sum(), 1)
    close(sequence_sum(jnp.asarray(x), jnp.asarray(segments)), total)
    close(sequence_mean(jnp.asarray(x), jnp.asarray(mask), jnp.asarray(segments)), mean)
    assert starts(jnp.asarray(segments), x.shape).sum() == sum(len(set(row)) for row in segments)


def test_nan_of_the_sampler_weighs_one() -> None:
    one = jnp.ones((1, 2))
    t = Tokens(-one, one, one, one, -one, sampled=jnp.array([[jnp.nan, -2.0]]))
    total, sums = policy(t, Policy(correction="token_truncate", correction_clip=(None, 2.0)))
    assert float(total) == -3 and float(sums["sampling/importance_sampling_ratio/bounded"][0]) == 1
    for name, want in (("logp_difference/max", 1), ("ratio/min", np.e), ("ratio/max", np.e)):  # of the other token
        (found,) = (v for k, v in sums.items() if k.startswith("sampling/") and k.endswith(name))
        assert isinstance(found, extremes.Extreme) and float(found.value) == pytest.approx(want)
    total, sums = policy(t, Policy(correction="sequence_mask", correction_clip=(None, 2.0)))  # e > 2: nothing is learnt
    assert float(total) == 0 and float(sums["weight"]) == 2
    assert float(sums["sampling/importance_sampling_ratio/mean"][0]) == pytest.approx(np.e)


def test_options_that_do_not_fit() -> None:
    for wrong, message in (
        (dict(loss_type="ppo"), "expected one of grpo"),
        (dict(importance_sampling_level="row"), "expected one of token"),
        (dict(correction="mask"), "token_truncate"),
        (dict(epsilon=-0.1), "epsilon=-0.1"),
        (dict(top_entropy_quantile=0.0), "top_entropy_quantile"),
        (dict(loss_type="dr_grpo"), "max_completion_length"),
        (dict(loss_type="vespo", correction="sequence_mask"), "token_mask"),
        (dict(loss_type="gmpo", importance_sampling_level="sequence"), "use 'token'"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy(**wrong)
    x = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="'ref_logps', or the step reference=params"):
        policy(Tokens(-x, x, x, x, -x), Policy(beta=0.1))
    with pytest.raises(ValueError, match="'logps', the sampler's"):
        policy(Tokens(-x, x, x, x, -x), Policy(correction="token_mask"))


def test_entropy_follows_a_target() -> None:
    """TRL's controller in plain Python, step by step, and what the loss takes of it."""
    seen = [0.1, 0.2, 0.3, 0.9, 0.1, 0.05]
    metrics = iter(seen)
    inner = lambda state, batch, **given: (state, {"entropy_of_learnt": jnp.float32(next(metrics))})
    step = losses.adaptive_entropy(inner, target=0.2, delta=0.01, low=0.0, high=0.03)
    state = train.init_state({}, optax.identity(), entropy=losses.start_entropy(0.02))
    coef = 0.02
    for x in seen:
        state, _ = step(state, {})
        coef = min(coef + 0.01, 0.03) if x <= 0.2 else max(coef - 0.01, 0.0)
        found = state.extra["entropy"]
        assert float(found["coef"]) == pytest.approx(coef)
        assert float(found["applied"]) == pytest.approx(coef if x <= 0.2 else 0.0)
    one = jnp.ones((1, 2))
    o, batch = {"logp": -one, "entropy": 3 * one}, {"tokens": jnp.ones((1, 2), jnp.int32), "advantages": 0 * one}
    objective = losses.policy_objective(Policy(entropy_coef=0.5))
    assert float(objective(o, batch, {})[0]) == -1.5  # of one drawn token
    assert float(objective(o, batch, {"entropy": {"applied": 0.1}})[0]) == pytest.approx(-0.3)
    assert float(losses.start_entropy(0.1)["applied"]) == 0


# ---- on a model ----------------------------------------------------------------------------------------------------

CFG = llama.Config(vocab=23, embed=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, rope=ops.Rope(8, 1e4))


@pytest.fixture(scope="module")
def weights():
    """Random everywhere, so that tokens differ."""
    tree = params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    leaves, shape = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        shape, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


@pytest.fixture(scope="module")
def batch(weights):
    """Four samples of 2 to 8 drawn tokens; what nobody may read is NaN."""
    r = np.random.default_rng(3)
    lengths = np.array([12, 6, 9, 11])
    at = np.arange(12)
    mask = (at >= np.array([4, 3, 7, 3])[:, None]) & (at < lengths[:, None])
    b = {"tokens": r.integers(0, 23, mask.shape), "mask": mask, "lengths": lengths}
    b = {k: jnp.asarray(v, jnp.bool_ if k == "mask" else jnp.int32) for k, v in b.items()}
    now = np.asarray(jax.jit(losses.token_logps(llama, CFG, temperature=0.7))(weights, b))
    hidden = np.where(mask, 0, np.nan)
    near = lambda scale: jnp.asarray(now + scale * r.normal(size=now.shape) + hidden, jnp.float32)
    b |= {"old": near(0.2), "logps": near(0.1), "ref_logps": near(0.3)}
    return b | {"advantages": jnp.asarray(r.normal(size=(4, 1)) + hidden, jnp.float32)}


@pytest.mark.slow
def test_columns_stand_at_their_tokens(weights, batch) -> None:
    """Log-probabilities at a temperature against softmax by hand; with them as "old", each ratio is 1 and the loss -A."""
    logits, _ = llama.forward(weights, batch["tokens"], CFG)
    want = jax.nn.log_softmax(logits / 0.7)[:, :-1]
    want = np.take_along_axis(np.asarray(want), np.asarray(batch["tokens"])[:, 1:, None], -1)[..., 0]
    now = losses.token_logps(llama, CFG, temperature=0.7)(weights, batch)
    mask = np.asarray(batch["mask"])
    close(np.asarray(now)[:, 1:] * mask[:, 1:], want * mask[:, 1:])
    exact = {**batch, "old": now, "logps": now - 0.25, "kept": jnp.full(now.shape, 0.25)}
    options = Policy(correction="token_mask")
    total, sums = losses.policy_gradient(llama, CFG, options, temperature=0.7)(weights, exact, {})
    close(total, -np.nansum(np.where(mask, batch["advantages"], 0)))
    assert float(sums["weight"]) == mask.sum() and float(sums["sampling/sampling_logp_difference/mean"][0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        Policy(loss_type="grpo", beta=0.1, correction="sequence_truncate"),
        Policy(loss_type="dr_grpo", max_completion_length=9, importance_sampling_level="sequence"),
        Policy(loss_type="grpo", entropy_coef=0.3, top_entropy_quantile=0.4),
    ],
    ids=["means", "length", "coupled"],
)
def test_microbatches_and_packing_change_nothing(weights, batch, options) -> None:
    """Two microbatches of other weight give the whole batch's gradient, and so do packed rows."""
    if options.coupled:
        halves = losses.policy_outputs(llama, CFG), losses.policy_objective(options)
        g = lambda n: train.normalize(train.gradcache(*halves, n))
        with pytest.raises(ValueError, match="gradcache"):
            losses.policy_gradient(llama, CFG, options)
    else:
        loss = losses.policy_gradient(llama, CFG, options)
        g = lambda n: train.normalize(train.accumulate(train.grads(loss), n))
    whole, metrics = jax.jit(g(1))(weights, batch)
    width = {k: v.reshape(2, 24) for k, v in batch.items() if k not in ("lengths", "mask")}
    at, lengths = np.arange(12), np.asarray(batch["lengths"])
    ids = np.where(at < lengths[:, None], 0, 1) + 2 * (np.arange(4) % 2)[:, None]
    joined = ops.Packed(jnp.tile(jnp.arange(12), (2, 2)), jnp.asarray(ids.reshape(2, 24), jnp.int32))
    packed = width | {"mask": batch["mask"].reshape(2, 24), "packed": joined}
    for n, b in ((2, batch), (1, packed)):
        other, means = jax.jit(g(n))(weights, b)
        assert metrics.keys() == means.keys()
        for name in metrics:
            np.testing.assert_allclose(means[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max())), other, whole
        )


@pytest.mark.slow
def test_head_at_learnt_places_alone(weights, batch) -> None:
    """The same loss and gradient, for a fraction of the head's work; every learnt place must be named."""
    g = jax.jit(train.grads(losses.policy_gradient(llama, CFG, Policy(beta=0.1))))
    few = {**batch, "places": jnp.asarray(losses.forward.learnt_places(batch, 8))}
    assert few["places"].shape == (4, 8) and few["places"].max() == 12
    (want, sums), (got, few_sums) = g(weights, batch), g(weights, few)
    jax.tree.map(lambda x, y: close(x, y, 2e-6), got, want)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), few_sums, sums)
    cost = lambda b: g.lower(weights, b).cost_analysis()["flops"]
    head = 6 * 4 * 23 * 16  # of one place in each row: three products
    assert cost(batch) - cost(few) > 0.9 * (12 - 8) * head
    with pytest.raises(ValueError, match="most=7, but a row has 8"):
        losses.forward.learnt_places(batch, 7)


def test_reference_is_given(weights, batch) -> None:
    """The reference of the step, without a column: what `token_logps` says with its parameters."""
    other = jax.tree.map(lambda x: 1.1 * x, weights)
    without = {k: v for k, v in batch.items() if k != "ref_logps"}
    loss = losses.policy_gradient(llama, CFG, Policy(beta=0.2))
    given = loss(weights, without, {"reference": other})
    column = loss(weights, {**without, "ref_logps": losses.token_logps(llama, CFG)(other, batch)}, {})
    close(given[0], column[0])
    assert float(given[1]["kl"][0]) > 0.1
    with pytest.raises(ValueError, match="expected a column 'advantages'"):
        loss(weights, {"tokens": batch["tokens"]}, {"reference": other})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [Policy(loss_type="grpo"), Policy(top_entropy_quantile=0.4)], ids=["once", "coupled"]
)
def test_on_a_mesh(options) -> None:
    """Eight devices and two microbatches give one device's loss, metrics and gradients, of packed rows and few places."""
    cfg = llama.Config(vocab=24, embed=16, ffn=24, layers=2, heads=2, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    r, shape = np.random.default_rng(0), (16, 20)
    first = r.integers(4, 16, (16, 1))
    at = np.broadcast_to(np.arange(20), shape)
    ids = np.where(at < first, 0, np.where(at < first + 3, 1, 2)).astype(np.int32)
    positions = np.where(ids == 0, at, np.where(ids == 1, at - first, at - first - 3)).astype(np.int32)
    mask = r.random(shape) < np.where(np.arange(16) % 3, 0.2, 0.5)[:, None]
    b = {k: r.normal(size=shape).astype(np.float32) for k in ("advantages", "old")} | {"mask": mask}
    b |= {"tokens": r.integers(0, 24, shape).astype(np.int32), "packed": ops.Packed(positions, ids)}
    b["old"] = b["old"] / 5 - 3
    b["places"] = losses.forward.learnt_places(b, 16)
    spec = llama.spec(cfg)
    tree = params.init(spec, jax.random.key(0), dtype=jnp.float32)
    if options.coupled:
        g = train.gradcache(losses.policy_outputs(llama, cfg), losses.policy_objective(options), 2)
    else:
        g = train.parallel.reduce_once(train.accumulate(train.grads(losses.policy_gradient(llama, cfg, options)), 2))
    g = jax.jit(train.normalize(g))
    want, means = g(tree, jax.tree.map(jnp.asarray, b))
    mesh = params.make_mesh(params.parse_mesh("dp=2,fsdp=2,tp=2"))
    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("dp", "fsdp")))
        tree = jax.device_put(tree, params.shardings(spec, mesh))
        got, others = g(tree, jax.device_put(b, rows))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), others, means)
    jax.tree.map(lambda x, y: close(x, y, 1e-5), got, want)
