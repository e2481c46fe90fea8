"""The proof of the suite: each planted mistake must make it fail.

A suite that compares default-initialised models passes most of these mistakes; this one must not.
"""

import jax.numpy as jnp
import pytest
import suite

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")

from fdel import ops  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled_anew():
    """No program from before a mistake is planted, and none with it afterwards."""
    suite.whole.cache_clear()
    yield
    suite.whole.cache_clear()


linear, attend, mask_type, glu, norm = ops.linear, ops.attend, ops.Mask, ops.glu, ops.rms_norm


def zero_q(batch, carry, layer, q, k, v, **kwargs):
    return attend(batch, carry, layer, jnp.zeros_like(q), k, v, **kwargs)


def swap_gate_and_up(x, p, act):
    return glu(x, p | {"gate": p["up"], "up": p["gate"]}, act)


def other_offset(x, w, eps, *, offset=0.0):
    return norm(x, w, eps, offset=1.0 - offset)


def skip_bias(which):
    """Drop one bias: the `which`-th call to ops.linear that has one."""

    def apply(subscripts, x, w, bias=None):
        calls.append(bias is not None)
        return linear(subscripts, x, w, None if sum(calls) == which and bias is not None else bias)

    calls: list[bool] = []
    return apply


def shift_window(scale, **kwargs):
    if kwargs.get("window"):
        kwargs["window"] += 1
    return mask_type(scale, **kwargs)


# name -> (what is replaced in fdel.ops, how to make the replacement, entries whose logits must change)
MUTATIONS = {
    "no_rope": ("rope", lambda: lambda x, rot: x, ["llama", "qwen3", "gemma3_text", "mixtral"]),
    "zero_q": ("attend", lambda: zero_q, ["llama", "gpt2", "qwen3", "gemma3_text"]),
    "swap_gate_up": ("glu", lambda: swap_gate_and_up, ["llama", "qwen3", "gemma3_text"]),
    "shift_window": ("Mask", lambda: shift_window, ["gemma3_text", "mixtral", "qwen3:sliding"]),
    "skip_first_bias": ("linear", lambda: skip_bias(1), ["gpt2", "llama:bias_llama3", "qwen3:sliding"]),
    "skip_fourth_bias": ("linear", lambda: skip_bias(4), ["gpt2", "llama:bias_llama3", "qwen3:sliding"]),
    "norm_offset": ("rms_norm", lambda: other_offset, ["llama", "gemma3_text"]),
}


@pytest.mark.parametrize("mutation,name", [(m, n) for m, (_, _, names) in MUTATIONS.items() for n in names])
def test_the_suite_finds_a_planted_mistake(mutation, name, tmp_path, monkeypatch):
    where, make, _ = MUTATIONS[mutation]
    case = suite.make_case(name, tmp_path)
    assert suite.logits_error(case) < 2e-5
    suite.whole.cache_clear()
    monkeypatch.setattr(ops, where, make())
    assert suite.logits_error(case) > 1e-3


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.matrix)])
def test_the_suite_finds_leaks_between_segments_and_from_the_future(name, tmp_path, monkeypatch):
    case = suite.make_case(name, tmp_path)

    def leak(batch, carry, layer, q, k, v, **kwargs):
        batch = ops.Packed(batch.positions, jnp.zeros_like(batch.segment_ids))
        return attend(batch, carry, layer, q, k, v, **kwargs)

    def future(batch, carry, layer, q, k, v, *, mask, **kwargs):
        return attend(batch, carry, layer, q, k, v, mask=mask_type(mask.scale, causal=False), **kwargs)

    suite.whole.cache_clear()
    monkeypatch.setattr(ops, "attend", leak)
    assert suite.packing_error(case) > 1e-3
    monkeypatch.setattr(ops, "attend", future)
    assert suite.future_gradient(case)[0] > 0


def test_the_suite_finds_a_stale_cache(tmp_path, monkeypatch):
    case = suite.make_case("llama", tmp_path)

    def late(batch, carry, layer, q, k, v, **kwargs):
        """Attend one position short in paged batches."""
        if isinstance(batch, ops.Paged):
            import dataclasses

            batch = dataclasses.replace(
                batch, positions=jnp.where(batch.positions > 0, batch.positions - 1, batch.positions)
            )
        return attend(batch, carry, layer, q, k, v, **kwargs)

    suite.whole.cache_clear()
    monkeypatch.setattr(ops, "attend", late)
    assert not suite.serving_error(case, 7, 4) < 1e-3
