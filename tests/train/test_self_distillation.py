"""Self-distillation on models: samples told elsewhere are found at their places, against plain forward passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import llama
from fdel.train import losses
from fdel.train.losses.distillation import student_top_k
from fdel.train.losses.forward import learnt_places
from fdel.train.losses.policy import Policy

CFG = llama.Config(vocab=23, embed=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, rope=ops.Rope(8, 1e4))
JSD = lambda s, t: losses.generalized_jsd(s, t, beta=0.3)
TOP = lambda s, t: student_top_k(s, t, k=5, beta=1.0, tail=True)
OPTIONS = {"grpo": Policy(loss_type="grpo"), "dapo": Policy(loss_type="dapo", epsilon=0.05)}


def made(seed: int):
    drawn = params.init(llama.spec(CFG), jax.random.key(seed), dtype=jnp.float32)
    return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, drawn)


@pytest.fixture(scope="module")
def texts():
    """Prompt, what the teacher is asked instead (None: nothing), and what was drawn; one with tokens of a tool between."""
    r = np.random.default_rng(0)
    ids = lambda n: r.integers(1, 23, n).tolist()
    found = [(ids(3), ids(7), ids(4)), (ids(5), ids(2), ids(6)), (ids(2), None, ids(3))]
    return [(*x, np.array([True, True, i != 1, *[True] * 3])[: len(x[2])]) for i, x in enumerate(found)]


def batch_of(texts) -> dict:
    def rows(prompts):
        there = [[] if p is None else [*p, *said] for p, (_, _, said, _) in zip(prompts, texts, strict=True)]
        tokens = np.array([x + [0] * (16 - len(x)) for x in there], np.int32)
        mask = np.zeros(tokens.shape, bool)
        for i, (p, (_, _, said, drawn)) in enumerate(zip(prompts, texts, strict=True)):
            if p is not None:
                mask[i, len(p) : len(p) + len(said)] = drawn
        found = {"tokens": tokens, "mask": mask, "lengths": np.array([len(x) for x in there], np.int32)}
        return found | {"places": learnt_places(found, 6)}

    mine, told = rows([x[0] for x in texts]), rows([x[1] for x in texts])
    r = np.random.default_rng(1)
    more = {"advantages": r.normal(size=(3, 1)) * mine["mask"], "old": r.normal(-3, 0.3, (3, 16)) * mine["mask"]}
    return mine | {k: np.float32(x) for k, x in more.items()} | {f"told_{k}": x for k, x in told.items()}


def expected(weights, teacher, texts, batch, target, how):
    """The same, of one text at a time: no padding, no places."""
    logits = lambda p, ids: llama.forward(p, jnp.asarray([ids]), CFG)[0][0] / how.get("temperature", 1.0)
    c, each, far, gain = how["options"], [], [], []
    for i, (prompt, asked, said, drawn) in enumerate(texts):
        at = np.flatnonzero(drawn)
        z = logits(weights, [*prompt, *said])[len(prompt) - 1 + at]
        logp = jax.nn.log_softmax(z)[np.arange(len(at)), np.array(said)[at]]
        ratio = jnp.exp(logp - batch["old"][i, len(prompt) + at])
        a = batch["advantages"][i, len(prompt) + at]
        gain.append(-jnp.minimum(ratio * a, jnp.clip(ratio, 1 - c.epsilon, 1 + c.epsilon) * a))
        if asked is None:
            far.append(0 * logp)
            continue
        y = jax.lax.stop_gradient(logits(teacher, [*asked, *said])[len(asked) - 1 + at])
        told = jax.nn.log_softmax(y)[np.arange(len(at)), np.array(said)[at]]
        d = jax.lax.stop_gradient(logp - told) * logp if target is None else target(z, y)
        far.append(d * jax.lax.stop_gradient(jnp.minimum(ratio, 2.0)))
    each = [
        how.get("weights", (1, 0))[0] * f + how.get("weights", (1, 0))[1] * g for f, g in zip(far, gain, strict=True)
    ]
    means = jnp.stack([x.mean() for x in each]) if c.loss_type == "grpo" else jnp.concatenate(each)
    return means.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "how"),
    [
        pytest.param(None, {"options": OPTIONS["grpo"]}, marks=pytest.mark.matrix),
        (None, {"options": OPTIONS["dapo"], "weights": (0.5, 1.0), "temperature": 0.7}),
        pytest.param(
            JSD, {"options": OPTIONS["grpo"], "weights": (1.0, 1.0), "temperature": 0.7}, marks=pytest.mark.matrix
        ),
        pytest.param(TOP, {"options": OPTIONS["dapo"], "weights": (2.0, 0.0)}, marks=pytest.mark.matrix),
    ],
    ids=["drawn", "drawn-hybrid", "whole-hybrid", "likeliest"],
)
def test_as_texts_alone(target, how, texts) -> None:
    """Loss and gradient within 1e-5 of the largest value; the teacher that is given, and the model itself."""
    batch, weights, teacher = batch_of(texts), made(0), made(1)
    loss = losses.self_distill(llama, CFG, target=target, **how)

    def mean(p, given):
        total, sums = loss(p, batch, given)
        return total / sums["weight"]

    for theirs, given in ((teacher, {"reference": teacher}), (weights, {})):
        value, grad = jax.jit(jax.value_and_grad(mean))(weights, given)
        truth = lambda p, theirs=theirs: expected(p, theirs, texts, batch, target, how)
        want, slope = jax.value_and_grad(truth)(weights)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(slope), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def test_what_does_not_fit(texts) -> None:
    for options in (Policy(loss_type="luspo"), Policy(beta=0.1), Policy(entropy_coef=0.1, loss_type="grpo")):
        with pytest.raises(ValueError, match="self-distillation has none of the three"):
            losses.self_distill(llama, CFG, options=options)
    batch = {k: x for k, x in batch_of(texts).items() if not k.startswith("told")}
    with pytest.raises(ValueError, match="expected places, and told_tokens"):
        losses.self_distill(llama, CFG)(made(0), batch, {})
