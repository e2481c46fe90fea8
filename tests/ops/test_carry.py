"""What a call cannot give is refused: taps of Paged calls, taps that a model does not have, state in Packed calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params
from fdel.models import gpt2, llama, mamba2
from fdel.ops.platform import target

ROPE = ops.Rope(8, 1e4)
LLAMA = llama.Config(vocab=16, embed=16, ffn=24, layers=2, heads=2, kv_heads=1, head_dim=8, rope=ROPE)
MAMBA = mamba2.Config(vocab=16, embed=16, layers=2, heads=4, head_dim=8, state=4, groups=2, chunk=8, limits=(0.0, 9.0))
TOKENS = jnp.zeros((1, 4), jnp.int32)
HIDDEN, ROUTER = ops.HiddenStates((0, 1)), ops.router_load(4)
WEIGHTS = ops.attention_weights((0,), 2, TOKENS.shape)


def call(family, cfg, *args):
    """Shapes of what `hidden` returns."""
    weights = params.abstract(family.spec(cfg))
    return jax.eval_shape(lambda p: family.hidden(p, TOKENS, cfg, *args), weights)


def test_taps_come_back_and_state_stays_none():
    x, state, taps = call(llama, LLAMA, None, None, ops.Taps(HIDDEN, attention=WEIGHTS))
    assert x.shape == (1, 4, 16) and state is None and taps.router is None
    assert [v.shape for v in taps.hidden.values] == [(1, 4, 16)] * 2 and taps.attention.values.shape == (1, 1, 2, 4, 4)
    assert call(llama, LLAMA)[1:] == (None, None)


@pytest.mark.parametrize(
    ("family", "cfg", "taps", "why"),
    [
        (
            llama,
            LLAMA,
            ops.Taps(router=ROUTER),
            r"taps.router: the model has no experts; its taps are hidden, attention",
        ),
        (mamba2, MAMBA, ops.Taps(attention=WEIGHTS), "taps.attention: the model has no attention weights.* recurrent"),
        (mamba2, MAMBA, ops.Taps(HIDDEN, ROUTER), "taps.router: the model has no experts; its taps are hidden"),
    ],
)
def test_a_tap_that_a_model_does_not_have_is_refused(family, cfg, taps, why):
    with pytest.raises(ValueError, match=why):
        call(family, cfg, None, None, taps)


@pytest.mark.parametrize("name", ["hidden", "router", "attention"])
def test_a_paged_call_has_no_taps(name):
    _, batch = ops.paged([(0, 0, [1, 2])], np.zeros((1, 1), np.int32), block=4)
    taps = ops.Taps(**{name: {"hidden": HIDDEN, "router": ROUTER, "attention": WEIGHTS}[name]})
    with pytest.raises(ValueError, match=f"taps.{name} with a Paged batch"):
        call(llama, LLAMA, batch, None, taps)


@pytest.mark.parametrize(("family", "cfg"), [(llama, LLAMA), (mamba2, MAMBA)])
def test_a_packed_call_has_no_state(family, cfg):
    state = params.abstract(family.state_spec(cfg, pages=1, rows=1))
    with pytest.raises(ValueError, match="a Packed batch leaves nothing in State .*; use a Paged batch, or state None"):
        call(family, cfg, None, state)


def test_places_past_the_last_layer_are_refused():
    with pytest.raises(ValueError, match=r"taps.hidden: places \(0, 3\) of a model of 2 layers; expected 0 to 2"):
        call(llama, LLAMA, None, None, ops.Taps(ops.HiddenStates((0, 3))))


def test_every_family_declares_its_state_as_one_structure():
    kept = {name: models.family(name).state_spec for name in models.families()}
    assert len(kept) == len(models.families())
    pages = gpt2.state_spec(gpt2.Config(ffn=8), pages=2)
    rows = (6, 64, 128) if target() == "tpu" else (12, 64, 64)  # a TPU's cache joins heads to rows of 128
    assert isinstance(pages, ops.State) and pages.slots is None and pages.pages.k.shape == (12, 2, *rows)


def test_layers_of_one_kind_are_traced_once_where_a_program_says_so():
    """In a list of three layers: one trace of the block, or three; the outputs are the same."""
    traced = []

    def block(x, carry, p, layer):
        traced.append(layer)
        return x * p, carry

    def run(context):
        traced.clear()
        walk = lambda x: ops.layers(block, x, ops.Carry(), [1.0, 2.0, 3.0])[0]
        return jax.jit(context(walk))(jnp.ones((2, 3))), len(traced)

    (a, one), (b, three) = run(ops.tracing_once()), run(lambda walk: walk)
    assert (one, three) == (1, 3)
    np.testing.assert_array_equal(a, b)
