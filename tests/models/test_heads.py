"""Heads beyond their values: answers of questions; on a mesh, in few bits, with adapters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import heads, llama, roberta

CFG = llama.Config(vocab=64, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))


@pytest.mark.parametrize("null", [None, 0])
def test_answers_are_the_best_spans(null):
    """SQuAD's rule by all pairs of tokens: first <= last, at most `most` tokens, in the context; no answer's own span.

    Of transformers' pipeline: probabilities over the context and the first token, and its order.
    """
    rng, most = np.random.default_rng(0), 4
    context = np.arange(13) > 4
    seen = context | (np.arange(13) == null)
    for _ in range(20):
        logits = rng.normal(size=(13, 2)) * 3
        p = np.exp(logits) * seen[:, None]
        p /= p.sum(0)
        pairs = [(i, j) for i, j in itertools.product(range(5, 13), repeat=2) if i <= j < i + most]
        want = {(i, j): p[i, 0] * p[j, 1] for i, j in [*pairs, *([] if null is None else [(null, null)])]}
        got = heads.spans(logits, context, most=most, count=5, null=null)
        assert [s[:2] for s in got] == sorted(want, key=want.__getitem__)[:-6:-1]
        np.testing.assert_allclose([s.score for s in got], sorted(want.values())[:-6:-1], rtol=1e-12)


@pytest.mark.wrong_shapes
def test_spans_need_a_context():
    for logits, context, more in ((np.zeros((3, 2)), [0, 0, 0], {}), (np.zeros((3, 1)), [1, 1, 1], {}),
                                  (np.zeros((3, 2)), [1, 1, 1], {"most": 0})):  # fmt: skip
        with pytest.raises(ValueError, match="expected logits"):
            heads.spans(logits, np.array(context, bool), **more)


def made(family, cfg, kind: str, labels: int):
    """Random parameters of a model with a head, biases and scales too."""
    spec = heads.spec(family, cfg, kind, labels)
    weights = params.init(spec, jax.random.key(0), dtype=jnp.float32)
    leaves, tree = jax.tree.flatten(weights)
    rng = np.random.default_rng(0)
    noisy = [x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return spec, jax.tree.unflatten(tree, noisy)


TOKENS = np.random.default_rng(1).integers(3, 64, (8, 16))


def answer(family, cfg):
    def f(p, tokens):
        return heads.outputs(p, family.hidden(heads.inner(p), tokens, cfg)[0])

    return jax.jit(f)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "labels"), [(llama, "token", 3), (llama, "sequence", 1), (roberta, "sequence", 4)]
)
def test_a_head_on_eight_devices_in_few_bits_and_with_adapters(family, kind, labels):
    """fsdp=2, tp=2, dp=2: one device's outputs; int8 weights of layers: near; adapters without effect, then with one.

    A head stays as it is: its labels need not divide among devices, and it is no layer's matrix.
    """
    cfg = CFG if family is llama else roberta.Config(
        vocab=64, embed=32, ffn=48, layers=1, heads=4, rows=40, types=2, pad=1
    )  # fmt: skip
    spec, weights = made(family, cfg, kind, labels)
    f = answer(family, cfg)
    want = f(weights, TOKENS)
    mesh = params.make_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    with jax.set_mesh(mesh):
        there = params.reshard(weights, spec, mesh, params.TRAIN)
        got = f(there, jax.device_put(TOKENS, params.batch_sharding(mesh)))
    np.testing.assert_allclose(got, want, atol=2e-5)
    few = params.quantize(weights, "int8", spec=spec)
    assert isinstance(few[kind]["weight"], jax.Array)
    error = float(jnp.abs(f(few, TOKENS) - want).mean() / jnp.abs(want).mean())
    assert 1e-5 < error < 0.1
    adapted = params.lora.add(weights, 4, 8.0, key=jax.random.key(2), spec=spec)
    np.testing.assert_allclose(f(adapted, TOKENS), want, atol=1e-5)
    trained, frozen = params.lora.split(adapted)
    moved = params.lora.join(jax.tree.map(lambda x: x + 0.1, trained), frozen)
    merged = params.lora.merge(moved)
    assert float(jnp.abs(f(moved, TOKENS) - want).max()) > 1e-2
    np.testing.assert_allclose(f(moved, TOKENS), f(merged, TOKENS), atol=1e-4)
