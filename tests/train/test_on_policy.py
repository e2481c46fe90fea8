"""Distillation of sampled tokens against TRL 1.16's SDPO and IW-OPD, on fixtures that `fixtures/make_policy.py` made."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import llama
from fdel.train import losses
from fdel.train.losses.distillation import student_top_k
from fdel.train.losses.on_policy import prefix_weighted, sampled_kl
from fdel.train.losses.policy import Policy, policy
from fdel.train.losses.sequences import Tokens

DATA = np.load(Path(__file__).parent / "fixtures" / "policy_trl116.npz")
CASES = [(i, c) for i, c in enumerate(json.loads(str(DATA["cases"]))) if c["kind"] != "policy"]


def of_labels(z):
    return jnp.take_along_axis(jax.nn.log_softmax(z), jnp.asarray(DATA["ids"])[..., None], -1)[..., 0]


@pytest.mark.parametrize(("index", "case"), CASES, ids=[f"{c['kind']}{i}" for i, c in CASES])
def test_as_trl(index, case) -> None:
    """Loss and gradient in the student's logits within 1e-5 of the largest value."""
    teacher, before, mask = (jnp.asarray(DATA[k], jnp.float32) for k in ("teacher", "before", "drawn"))
    told = of_labels(teacher)

    def loss(z):
        if case["kind"] == "top_k":
            return (mask * student_top_k(z, teacher, **case["options"])).sum() / mask.sum()
        t = Tokens(of_labels(z), 0 * mask, mask, 0 * mask, before)
        if case["kind"] == "iw_opd":
            t = t._replace(advantages=prefix_weighted(told - before, mask, **case["options"]))
            total, sums = policy(t, Policy(loss_type="reinforce"))
        else:
            total, sums = sampled_kl(t, told, **case["options"])
        return total / sums["weight"]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(DATA["student"]))
    want = DATA[f"{index}/student"]
    np.testing.assert_allclose(value, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(grad, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_packed_prefixes() -> None:
    """Each sequence of a packed row begins anew, holes count for nothing."""
    a = jnp.array([[1.0, -1.0, 7.0, 2.0, 2.0]])
    mask, ids = jnp.array([[1.0, 1, 0, 1, 1]]), jnp.array([[0, 0, 1, 1, 1]])
    np.testing.assert_allclose(prefix_weighted(a, mask, segments=ids), [[1.5, -1.25, 0, 3.0, 2.5]], rtol=1e-6)


CFG = llama.Config(vocab=23, embed=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, rope=ops.Rope(8, 1e4))


@pytest.mark.slow
def test_on_models() -> None:
    """A teacher that is given, or its log-probabilities as a column; in expectation the gradient is the reverse KL's."""
    r = np.random.default_rng(0)
    student, teacher = (params.init(llama.spec(CFG), jax.random.key(i), dtype=jnp.float32) for i in (0, 1))
    student, teacher = (jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, t) for t in (student, teacher))
    prompt = np.repeat(r.integers(0, 23, (1, 3)), 23, 0)
    tokens = jnp.asarray(np.concatenate([prompt, np.arange(23)[:, None]], 1), jnp.int32)  # each next token once
    batch = {"tokens": tokens, "mask": jnp.broadcast_to(jnp.arange(4) == 3, (23, 4))}
    logps = jax.jit(losses.token_logps(llama, CFG))
    told = {**batch, "teacher_logps": logps(teacher, batch)}
    p = jnp.exp(logps(student, batch))[:, 3]
    # The mean over what the student would draw: each token as often as it is likely.
    given = lambda q, b: losses.sampled_distill(llama, CFG, llama, CFG)(q, b, {"teacher": teacher})[0]
    each = jax.jit(jax.vmap(given, (None, 0)))
    rows = jax.tree.map(lambda x: x[:, None], batch)
    column = losses.sampled_distill(llama, CFG)
    np.testing.assert_allclose(each(student, rows).sum(), jax.jit(column)(student, told)[0], rtol=1e-4)
    kl = losses.distill(llama, CFG, llama, CFG, target=lambda s, t: losses.generalized_jsd(s, t, beta=1.0))
    one = jax.tree.map(lambda x: x[:1], batch)
    want = jax.jit(jax.grad(lambda q: kl(q, one, {"teacher": teacher})[0]))(student)
    got = jax.jit(jax.grad(lambda q: (p * each(q, rows)).sum()))(student)
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max() + 1e-3))
    jax.tree.map(same, got, want)


@pytest.mark.slow
def test_a_teacher_gives_advantages() -> None:
    """IW-OPD's loss and gradient as of advantages that come with the batch; rows in two parts add up."""
    student, teacher = (params.init(llama.spec(CFG), jax.random.key(i), dtype=jnp.float32) for i in (0, 1))
    r = np.random.default_rng(1)
    tokens = jnp.asarray(r.integers(0, 23, (4, 6)), jnp.int32)
    batch = {"tokens": tokens, "mask": jnp.broadcast_to(jnp.arange(6) > 1, (4, 6))}
    mask = batch["mask"].astype(jnp.float32)
    logps = jax.jit(losses.token_logps(llama, CFG))
    told = prefix_weighted(logps(teacher, batch) - logps(student, batch), mask)
    one, reinforce = {**batch, "advantages": 0.5 * mask}, Policy(loss_type="reinforce")
    advantage = lambda d, t: prefix_weighted(d, t.mask, segments=t.segments)
    taught = losses.taught_gradient(llama, CFG, llama, CFG, advantage, reinforce)
    value = jax.jit(jax.value_and_grad(lambda q, b: taught(q, b, {"teacher": teacher})[0]))
    plain = losses.policy_gradient(llama, CFG, reinforce)
    total, grad = value(student, one)
    want = jax.jit(jax.value_and_grad(lambda q: plain(q, {**batch, "advantages": told + 0.5 * mask})[0]))(student)
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max() + 1e-3))
    jax.tree.map(same, (total, grad), want)
    halves = [value(student, {k: x[i : i + 2] for k, x in one.items()}) for i in (0, 2)]
    jax.tree.map(lambda a, b, whole: same(a + b, whole), *halves, want)
    with pytest.raises(ValueError, match="a teacher's advantages are per row"):
        losses.taught_gradient(llama, CFG, llama, CFG, advantage, Policy(top_entropy_quantile=0.5))


def test_what_does_not_fit() -> None:
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="expected one of tokens, sequences"):
        sampled_kl(Tokens(*[one] * 5), one, average="rows")
    with pytest.raises(ValueError, match="expected a column 'teacher_logps'"):
        weights = jax.eval_shape(lambda: params.init(llama.spec(CFG), jax.random.key(0)))
        jax.eval_shape(losses.sampled_distill(llama, CFG), weights, {"tokens": jnp.ones((1, 3), jnp.int32)})
