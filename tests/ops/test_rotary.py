"""Rotary embeddings of three components (time, row, column) against float64 and transformers, and their parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import config, llama
from fdel.models.rope import rope, rope_to_hf
from tests.serve.small import CFG

CHUNKED = ops.Rope(16, 1e4, sections=(2, 3, 3))
ALTERNATING = ops.Rope(16, 1e4, sections=(3, 3, 2), interleaved=True)
RNG = np.random.default_rng(0)
ROTARY = RNG.integers(0, 500, (2, 7, 3))
BATCH = replace(ops.packed(jnp.zeros((2, 7), int)), rotary=jnp.array(ROTARY))


@pytest.mark.parametrize(
    ("r", "of"),
    [(CHUNKED, [0, 0, 1, 1, 1, 2, 2, 2]), (ALTERNATING, [0, 1, 2, 0, 1, 2, 0, 1])],
    ids=["chunks", "in turn"],
)
def test_each_pair_turns_by_its_component(r, of):
    angles = ROTARY[:, :, of] * 1e4 ** (-np.arange(8) / 8)
    cos, sin = jax.jit(lambda b: ops.rotation(r, b))(BATCH)
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-5)  # of float32 at angles up to 500
    np.testing.assert_allclose(sin, np.sin(angles), atol=5e-5)
    text = replace(BATCH, rotary=None)
    same = replace(BATCH, rotary=jnp.repeat(text.positions[..., None], 3, -1))
    for a, b in zip(ops.rotation(r, text), ops.rotation(r, same), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.of_cpu("elsewhere they are cheap beside what reads them")
def test_two_listed_layers_turn_by_one_cosine():
    """XLA:CPU would compute it four times, within the loops that turn queries and keys of each layer, for each head."""
    listed = params.unstack(params.init(llama.spec(CFG), jax.random.key(0)))
    tokens = np.arange(40)[None]
    text = jax.jit(lambda p: llama.hidden(p, tokens, CFG, ops.packed(tokens))[0]).lower(listed).compile().as_text()
    assert CFG.layers == 2 and text.count(" cosine(") == text.count(" sine(") == 1


def test_a_paged_batch_turns_its_tokens():
    _, batch = ops.paged([(0, 2, [0] * 7)], np.zeros((1, 9), int), block=7)
    got = ops.rotation(CHUNKED, replace(batch, rotary=jnp.array(ROTARY[1])))
    for a, b in zip(got, ops.rotation(CHUNKED, BATCH), strict=True):
        np.testing.assert_array_equal(a, b[1])


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}], ids=str)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_rotations_equal_transformers(name, scaling):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.models.qwen2_vl import modeling_qwen2_vl as two
    from transformers.models.qwen3_vl import modeling_qwen3_vl as three

    parameters = scaling | {"rope_theta": 1e4, "mrope_section": [2, 3, 3] if name == "qwen2_vl" else [3, 3, 2]}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    if name == "qwen2_vl":
        oracle = two.Qwen2VLRotaryEmbedding(two.Qwen2VLTextConfig(**sizes, rope_parameters=parameters))
    else:
        parameters["mrope_interleaved"] = True
        oracle = three.Qwen3VLTextRotaryEmbedding(
            three.Qwen3VLTextConfig(**sizes, head_dim=16, rope_parameters=parameters)
        )
    with torch.no_grad():
        want = oracle(torch.zeros(1), torch.tensor(ROTARY).permute(2, 0, 1))
    r = rope({"rope_parameters": parameters, "max_position_embeddings": 64}, 16)
    for a, b in zip(ops.rotation(r, BATCH), want, strict=True):
        np.testing.assert_allclose(a, b[..., :8], atol=5e-5)


@pytest.mark.parametrize("r", [CHUNKED, ALTERNATING, replace(CHUNKED, kind="yarn", factor=4.0, original=64)])
def test_parameters_are_read_and_written(r):
    written = rope_to_hf(r)
    assert written["mrope_section"] == list(r.sections) and written.get("mrope_interleaved", False) == r.interleaved
    assert rope({"rope_parameters": written, "max_position_embeddings": 64}, 16) == replace(r, original=64)


def test_the_spelling_of_older_files():
    d = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert rope(d, 16) == CHUNKED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mrope_section": [2, 3, 4]}, "three numbers of pairs, 8 together"),
        ({"mrope_section": [4, 4]}, "three numbers of pairs, 8 together"),
        ({"mrope_section": [2, 3, -3]}, "three numbers of pairs, 8 together"),
        ({"mrope_section": "2,3,3"}, "three numbers of pairs, 8 together"),
        ({"mrope_section": [2, 3, 3], "mrope_interleaved": True}, "room for those that alternate"),
        ({"mrope_section": [2, 3, 3], "mrope_interleaved": 1}, "mrope_interleaved': found 1, expected true or false"),
    ],
)
def test_sections_that_do_not_fit_are_refused(given, message):
    with pytest.raises(config.ConfigError, match=message):
        rope({"rope_parameters": given}, 16)


def test_a_rope_without_sections_refuses_components():
    with pytest.raises(ValueError, match="batch.rotary: the rope has no sections"):
        ops.rotation(ops.Rope(16, 1e4), BATCH)
