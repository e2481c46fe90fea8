"""Norms, rotary embeddings, feed-forwards, the layer walk and batch constructors, each against an outside oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import config
from fdel.ops.batch import sequence_lengths
from fdel.ops.layers import POLICIES, remat_policy
from fdel.params.spec import Param, layers, runs, zeros

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e3},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
                    "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
                       "attention_factor": 0.9, "truncate": False},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.2, 1.4, 2.0, 2.5, 3.0, 3.5, 4.0],
                 "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "original_max_position_embeddings": 24},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("length", [20, 50])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_equals_transformers(name, length):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import LlamaConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    d = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 48, "rope_parameters": ROPES[name]}
    cfg = LlamaConfig(**d, head_dim=16)
    x = np.random.default_rng(0).normal(size=(2, length, 3, 16)).astype(np.float32)
    positions = torch.arange(length)[None].repeat(2, 1)
    with torch.no_grad():
        cos, sin = Phi3RotaryEmbedding(cfg)(torch.tensor(x), positions)
        rotated = cos.shape[-1]
        part = torch.tensor(x[..., :rotated])
        half = torch.cat([-part[..., rotated // 2 :], part[..., : rotated // 2]], -1)
        want = torch.cat([part * cos[:, :, None] + half * sin[:, :, None], torch.tensor(x[..., rotated:])], -1).numpy()
    r = config.rope(cfg.to_dict(), 16)
    rotate = jax.jit(lambda x: ops.rope(x, ops.rotation(r, ops.packed(jnp.zeros((2, length), int)))))
    np.testing.assert_allclose(rotate(x), want, atol=1e-5)
    assert config.rope({"rope_parameters": config.rope_to_hf(r), "max_position_embeddings": 48}, 16) == r


def test_interleaved_pairs_are_complex_multiplication():
    x = np.random.default_rng(0).normal(size=(7, 2, 12))
    _, batch = ops.paged([(0, 3, [0] * 7)], np.zeros((1, 9), int), block=7)
    rot = ops.rotation(ops.Rope(8, 100.0), batch)
    z = (x[..., 0:8:2] + 1j * x[..., 1:8:2]) * np.exp(1j * np.outer(np.arange(3, 10), 100.0 ** -(np.arange(4) / 4)))[
        :, None
    ]
    got = np.asarray(ops.rope_interleaved(jnp.asarray(x, jnp.float32), rot))
    np.testing.assert_allclose(got[..., 0:8:2] + 1j * got[..., 1:8:2], z, atol=1e-5)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:].astype(np.float32))


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"rope_type": "spiral"}, "'rope_type': found 'spiral'"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "need 8 numbers"),
    ],
)
def test_unknown_rope_is_refused(bad, message):
    with pytest.raises(config.ConfigError, match=message):
        config.rope({"rope_parameters": bad, "max_position_embeddings": 8}, 16)


def test_norms_equal_float64():
    r = np.random.default_rng(0)
    x, w, b = r.normal(size=(3, 5, 16)), r.normal(size=16), r.normal(size=16)
    f = lambda a: jnp.asarray(a, jnp.float32)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(ops.rms_norm(f(x), f(w), 1e-3), rms * w, atol=2e-6)
    np.testing.assert_allclose(ops.rms_norm(f(x), f(w), 1e-3, offset=1.0), rms * (1 + w), atol=2e-6)
    np.testing.assert_allclose(ops.rms_norm(f(x), None, 1e-3), rms, atol=2e-6)
    centred = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(ops.layer_norm(f(x), f(w), f(b), 1e-3), centred * w + b, atol=3e-6)
    assert ops.rms_norm(f(x).astype(jnp.bfloat16), f(w), 1e-3).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ops.ACTIVATIONS)
def test_activations_equal_transformers(name):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.activations import ACT2FN

    x = np.linspace(-6, 6, 101, dtype=np.float32)
    np.testing.assert_allclose(ops.ACTIVATIONS[name](jnp.asarray(x)), ACT2FN[name](torch.tensor(x)).numpy(), atol=2e-6)


def test_feed_forwards_equal_float64():
    r = np.random.default_rng(0)
    p = {
        k: r.normal(size=s)
        for k, s in {"gate": (9, 6), "up": (9, 6), "down": (6, 9), "gate_bias": 9, "up_bias": 9, "down_bias": 6}.items()
    }
    x = r.normal(size=(4, 6))
    relu = lambda a: np.maximum(a, 0)
    f = {k: jnp.asarray(v, jnp.float32) for k, v in p.items()}
    gate, up = x @ p["gate"].T + p["gate_bias"], x @ p["up"].T + p["up_bias"]
    gated = (relu(gate) * up) @ p["down"].T + p["down_bias"]
    np.testing.assert_allclose(ops.glu(jnp.asarray(x, jnp.float32), f, jax.nn.relu), gated, rtol=1e-4, atol=1e-4)
    plain = relu(up) @ p["down"].T + p["down_bias"]
    np.testing.assert_allclose(ops.mlp(jnp.asarray(x, jnp.float32), f, jax.nn.relu), plain, rtol=1e-4, atol=1e-4)


# ---- layer walk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["aaaa", "abababa", "aabaabaab", "baaaa", "aabbccab"])
def test_layer_walk_visits_each_layer_once_in_order_in_every_form(kinds):
    kinds = tuple(kinds)
    leaf = {k: {"w": Param("embed", (3,), zeros, "l.{layers}." + k)} for k in set(kinds)}
    spec = {"layers": layers(lambda kind: leaf[kind], kinds)}
    names = [n for p in jax.tree.leaves(params.unstack(spec)) for n in params.hf_names(p)]
    assert names == [f"l.{i}.{k}" for i, k in enumerate(kinds)]
    listed = {"layers": [{"w": jnp.full(3, float(i))} for i in range(len(kinds))]}
    stacked = params.restack(listed, spec)
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(lambda p: p.shape, spec)
    again = params.unstack(stacked)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(listed), strict=True))

    def block(kind):
        def apply(x, carry, p, layer):  # a value that depends on order, kind, weight and index
            return x * 1.5 + p["w"] * ord(kind) + layer, carry.remember(slots=carry.slots.at[layer].add(p["w"][0]))

        return apply

    @partial(jax.jit, static_argnames="remat")
    def run(tree, remat=None):
        blocks = {k: block(k) for k in "abc"}
        carry = ops.Carry(ops.State(slots=jnp.zeros(len(kinds))))
        x, carry = ops.layers(blocks, jnp.ones(3), carry, tree["layers"], kinds, remat=remat)
        return x, carry.slots

    want, order = run(listed)
    np.testing.assert_array_equal(order, np.arange(len(kinds)))
    for tree, remat in ((stacked, None), (stacked, "nothing_saveable"), (listed, "DOTS_SAVEABLE")):
        got, order = run(tree, remat=remat)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_array_equal(order, np.arange(len(kinds)))


def test_runs_cover_patterns_with_the_shortest_period():
    assert runs(tuple("sssssf" * 4 + "ss")) == [(0, 6, 4), (24, 1, 2)]
    assert runs(tuple("dddmmmmm")) == [(0, 1, 3), (3, 1, 5)]
    assert runs(tuple("lllf" * 12)) == [(0, 4, 12)]


def test_pool_index_counts_layers_of_a_pool():
    kinds = tuple("llfllf")
    assert [ops.pool_index(kinds, {"f"}, i) for i in (2, 5)] == [0, 1]
    np.testing.assert_array_equal(ops.pool_index(kinds, {"l"}, jnp.array([0, 1, 3, 4])), [0, 1, 2, 3])


def test_unknown_remat_policy_is_refused():
    assert all(callable(remat_policy(p.upper())) for p in POLICIES)
    with pytest.raises(ValueError, match="'everything' is not a policy; use None or one of everything_saveable"):
        remat_policy("everything")


# ---- batches -------------------------------------------------------------------------------------------------------


def test_pack_fills_rows_first_fit():
    tokens, batch = ops.pack([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], 4)
    np.testing.assert_array_equal(tokens, [[1, 2, 3, 6], [4, 5, 0, 0], [7, 8, 9, 10]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3]])
    np.testing.assert_array_equal(batch.segment_ids, [[0, 0, 0, 1], [0, 0, -1, -1], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="a sequence of 5 tokens does not fit a row of 4"):
        ops.pack([[1] * 5], 4)


def test_paged_pads_chunks_to_blocks():
    table = np.array([[3, 4], [7, 8]])
    tokens, batch = ops.paged([(1, 2, [5, 6, 7]), (0, 0, [9])], table, block=2, size=8)
    np.testing.assert_array_equal(tokens, [5, 6, 7, 0, 9, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions, [2, 3, 4, -1, 0, -1, -1, -1])
    np.testing.assert_array_equal(batch.page_table[:3], [[7, 8], [7, 8], [3, 4]])
    np.testing.assert_array_equal(batch.rows[:3], [1, 1, 0])
    assert batch.rows[3] > 1 << 30 and batch.page_table[3, 0] > 1 << 30
    np.testing.assert_array_equal(sequence_lengths(batch), [4, 4, 5, 5, 1, 1, 0, 0])
    with pytest.raises(ValueError, match="block=1 is for decode"):
        ops.paged([(0, 0, [1, 2])], table)
    with pytest.raises(ValueError, match="2 blocks of 2 tokens do not fit size=2"):
        ops.paged([(0, 0, [1, 2, 3])], table, block=2, size=2)


def test_sequence_lengths_of_packed_segments():
    _, batch = ops.pack([[1, 2, 3], [4, 5]], 6)
    np.testing.assert_array_equal(sequence_lengths(jax.tree.map(jnp.asarray, batch)), [[3, 3, 3, 2, 2, 1]])
