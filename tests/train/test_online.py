"""Online preferences and PPO: against TRL 1.12 on fixtures (`fixtures/make_policy.py`), and its lines in torch, in float64.

Losses and gradients agree within 1e-5 of their largest value.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, train
from fdel.models import heads, llama
from fdel.train import losses
from fdel.train.losses import online
from fdel.train.losses.policy import Policy, Tokens
from fdel.train.losses.value import clipped_square
from fdel.train.rollout import advantages

torch = pytest.importorskip("torch", reason="the oracle is TRL's lines in torch (extra `test`)")
F = torch.nn.functional
DATA = np.load(Path(__file__).parent / "fixtures" / "policy_trl112.npz")
CASES = list(enumerate(json.loads(str(DATA["cases"]))))


def close(got, want, rtol=1e-5):
    """Compare relative to the largest value."""
    got, want = (np.asarray(x.detach() if torch.is_tensor(x) else x, np.float64) for x in (got, want))
    assert got.shape == want.shape and np.isfinite(want).all() and np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * np.abs(want).max())


def of_kind(kind):
    found = [(i, c) for i, c in CASES if c["kind"] == kind]
    return pytest.mark.parametrize(("index", "case"), found, ids=[str(i) for i, _ in found])


def outputs(logps, ref, lengths) -> dict:
    """What `completion_logps` gives, for [B k T] of log-probabilities that are 0 where nothing is drawn."""
    total = logps.sum(-1)
    zero = jnp.zeros_like(total)
    o = {"logps": total, "ref_logps": ref, "lengths": lengths, "nll": -total}
    return o | {k: zero for k in ("entropy", "logits", "top1")}


@of_kind("xpo")
def test_xpo_as_trl(index, case) -> None:
    masks = np.stack([DATA["mask"], DATA["theirs/mask"]], 1)
    ref = (np.stack([DATA["reference"], DATA["theirs/reference"]], 1) * masks).sum(-1)
    options = case["options"]
    objective = losses.online_dpo_objective if options["alpha"] == 0 else losses.xpo_objective
    options = {k: v for k, v in options.items() if k != "alpha" or v}
    fill = lambda x, value: jnp.pad(jnp.asarray(x), [(0, 2)] + [(0, 0)] * (x.ndim - 1), constant_values=value)

    def loss(a, b):
        logps = jnp.stack([a, b], 1) * masks
        o = outputs(fill(logps, 0), fill(ref, 5.0), fill(masks.sum(-1), 0))
        total, sums = objective(**options)(o, {"better": fill(DATA["better"], True)})
        return total / sums["weight"], {k: v / sums["weight"] for k, v in sums.items() if not isinstance(v, tuple)}

    arguments = jnp.asarray(DATA["logp"]), jnp.asarray(DATA["theirs/logp"])
    (value, metrics), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
    close(value, case["loss"])
    close(grads[0], DATA[f"{index}/logp"])
    close(grads[1], DATA[f"{index}/theirs"])
    for name in metrics.keys() & case["metrics"].keys():
        np.testing.assert_allclose(metrics[name], case["metrics"][name], rtol=1e-5, err_msg=name)


@of_kind("nash_md")
def test_nash_md_as_trl(index, case) -> None:
    mask, wins = DATA["mask"], DATA["probability"][:, None] - 0.5

    def loss(logp):
        t = Tokens(logp, logp * 0, jnp.asarray(mask), jnp.asarray(wins * mask), logp, reference=DATA["reference"])
        total, sums = online.nash_md(t, case["options"]["beta"])
        return total / sums["weight"], {k: sums[k] / sums["weight"] for k in case["metrics"]}

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(DATA["logp"]))
    close(value, case["loss"])
    close(grad, DATA[f"{index}/logp"])
    for name, want in case["metrics"].items():
        np.testing.assert_allclose(metrics[name], want, rtol=1e-5, err_msg=name)


def test_a2po() -> None:
    """(beta2 log(policy / reference) - (R - V*))^2, by torch; a row without tokens counts for nothing."""
    r = np.random.default_rng(0)
    logps, ref = -r.uniform(1, 9, (2, 6, 1))
    rewards = r.normal(size=6)
    target = rewards - advantages.optimal_value(rewards, 3)
    x = torch.tensor(logps[:5, 0], requires_grad=True)
    want = ((0.03 * (x - torch.tensor(ref[:5, 0])) - torch.tensor(target[:5])) ** 2).mean()
    want.backward()

    def loss(logps):
        o = outputs(logps, jnp.asarray(ref[:, 0]), jnp.array([3.0, 1, 4, 2, 2, 0]))
        total, sums = losses.a2po_objective(beta2=0.03)(o, {"advantage": jnp.asarray(target)})
        return total / sums["weight"]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(logps, jnp.float32))
    close(value, want)
    close(grad[:5, 0], x.grad)
    assert not grad[5:].any()


@pytest.mark.parametrize(
    ("options", "term"),
    [
        (dict(beta=0.2), lambda d, m: -F.logsigmoid(0.2 * d)),
        (dict(beta=0.2, label_smoothing=0.1), lambda d, m: -0.9 * F.logsigmoid(0.2 * d) - 0.1 * F.logsigmoid(-0.2 * d)),
        (dict(beta=0.2, loss_type="hinge"), lambda d, m: torch.relu(1 - 0.2 * d)),
        (dict(beta=0.2, loss_type="ipo"), lambda d, m: (m - 2.5) ** 2),
        (dict(beta=2.0, loss_type="tpo-l", gamma=0.5, tpo_alpha=0.0), lambda d, m: -F.logsigmoid(2 * (m - 0.25))),
    ],
)
def test_tpo(options, term) -> None:
    """TRL's lines: chosen against rejected, and the mean NLL of all tokens of the gold ones."""
    r = np.random.default_rng(0)
    lengths = r.integers(1, 8, (4, 3))
    mask = np.arange(8) < lengths[..., None]
    logp = -r.uniform(0.1, 2, mask.shape) * mask
    x = torch.tensor(logp, requires_grad=True)
    sums, means = x.sum(-1), x.sum(-1) / torch.tensor(lengths)
    pairs = term(sums[:, 0] - sums[:, 1], means[:, 0] - means[:, 1]).mean()
    want = pairs + options.get("tpo_alpha", 1.0) * -sums[:, 2].sum() / lengths[:, 2].sum()
    want.backward()

    def loss(logp):
        o = outputs(logp, None, jnp.asarray(lengths, jnp.float32))
        del o["ref_logps"]
        total, sums = losses.tpo_objective(**options)(o, {})
        return total / sums["weight"]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(logp, jnp.float32))
    close(value, want)
    close(grad, x.grad)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected 'sigmoid' or 'ipo'"):
        losses.xpo_objective(loss_type="hinge")
    with pytest.raises(ValueError, match=r"TPO needs \[B 3\]"):
        losses.tpo_objective()(outputs(jnp.ones((2, 2, 3)), None, jnp.ones((2, 2))), {})
    with pytest.raises(ValueError, match="needs a reference"):
        online.nash_md(Tokens(*[jnp.ones((1, 1))] * 5))
    with pytest.raises(ValueError, match="no mean over tokens"):
        losses.ppo(llama, CFG, Policy(loss_type="grpo"))
    with pytest.raises(ValueError, match="expected a head of one"):
        losses.token_values(llama, CFG)({"model": {}}, {"tokens": jnp.ones((1, 3), jnp.int32)})


# ---- PPO -----------------------------------------------------------------------------------------------------------

CFG = llama.Config(vocab=23, embed=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, rope=ops.Rope(8, 1e4))


def test_values_by_hand() -> None:
    """The gradient ends where the value has gone far enough towards the return, and never away from it."""
    at = lambda x: jnp.full((1, 1), x)
    slope = lambda v, *clip: jax.grad(lambda v: clipped_square(at(v), at(0.0), at(1.0), *clip)[0].sum())(v)
    assert slope(0.1) == pytest.approx(-0.9)  # free
    assert slope(0.5) == 0  # far enough
    assert slope(-0.5) == pytest.approx(-1.5)  # the wrong way: pulled back
    assert slope(0.5, None) == pytest.approx(-0.5)


def random(tree, seed: int):
    leaves, shape = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        shape, [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


@pytest.fixture(scope="module")
def batch():
    r = np.random.default_rng(3)
    lengths = np.array([12, 6, 9, 11])
    at = np.arange(12)
    mask = (at >= np.array([4, 3, 7, 3])[:, None]) & (at < lengths[:, None])
    columns = {k: r.normal(size=mask.shape) for k in ("advantages", "returns", "values")}
    b = {"tokens": r.integers(0, 23, mask.shape).astype(np.int32), "mask": mask, "lengths": lengths}
    b |= {k: np.where(mask, v, np.nan).astype(np.float32) for k, v in columns.items()}
    return {k: jnp.asarray(v) for k, v in b.items()}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "critic"])
def test_ppo(batch, apart) -> None:
    """Value, gradients in logits and values, and two microbatches, against PPO's lines in torch."""
    one = params.init(heads.spec(llama, CFG, "value"), jax.random.key(0), dtype=jnp.float32)
    critic = params.init(heads.spec(llama, CFG, "sequence", 1), jax.random.key(1), dtype=jnp.float32)
    weights = random({"policy": one["model"], "critic": critic} if apart else one, 2)
    settings = {"temperature": 0.7} | ({"critic": (llama, CFG)} if apart else {})
    look = jax.jit(losses.token_values(llama, CFG, **settings))
    logps, values = look(weights, batch)
    mask = np.asarray(batch["mask"])
    if not apart:  # what a value is: the head on the hidden state before the token
        x, *_ = llama.hidden(
            one := weights["model"], batch["tokens"], CFG, ops.packed(batch["tokens"], batch["lengths"])
        )
        want = x @ weights["value"]["weight"][0] + weights["value"]["bias"][0]
        close(values, np.where(mask, np.roll(want, 1, 1), 0))
    r = np.random.default_rng(5)
    near = lambda x, scale: jnp.asarray(np.where(mask, x + scale * r.normal(size=mask.shape), np.nan), jnp.float32)
    b = {**batch, "old": near(logps, 0.3), "values": near(values, 0.4)}
    loss = losses.ppo(llama, CFG, vf_coef=0.3, **settings)
    whole, metrics = jax.jit(train.normalize(train.grads(loss)))(weights, b)

    drawn = {
        k: torch.tensor(np.asarray(b[k])[mask], dtype=torch.float64) for k in ("advantages", "returns", "values", "old")
    }
    lp, v = (torch.tensor(np.asarray(x)[mask], dtype=torch.float64, requires_grad=True) for x in (logps, values))
    ratio, a, ret, old = torch.exp(lp - drawn["old"]), drawn["advantages"], drawn["returns"], drawn["values"]
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    kept = torch.clamp(v, old - 0.2, old + 0.2)
    errors = torch.maximum((v - ret) ** 2, (kept - ret) ** 2)
    want = policy.mean() + 0.3 * 0.5 * errors.mean()
    want.backward()
    close(metrics["loss"], want)
    close(metrics["loss/policy_avg"], policy.mean())
    close(metrics["loss/value_avg"], 0.5 * errors.mean())
    close(metrics["policy/approxkl_avg"], 0.5 * ((lp - drawn["old"]) ** 2).mean())
    close(metrics["val/clipfrac_avg"], ((kept - ret) ** 2 > (v - ret) ** 2).double().mean())

    def linear(p):  # the same gradient, from torch's in log-probabilities and values
        logps, values = look(p, batch)
        return (logps[mask] * lp.grad.numpy()).sum() + (values[mask] * v.grad.numpy()).sum()

    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))
    jax.tree.map(same, whole, jax.grad(linear)(weights))
    if apart:
        return
    halves, _ = jax.jit(train.normalize(train.accumulate(train.grads(loss), 2)))(weights, b)
    jax.tree.map(same, halves, whole)
