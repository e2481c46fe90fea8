"""The gated delta rule against its definition in float64 numpy, and transformers' Qwen3-Next and Kimi-Linear code."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.batch import Slots, State, packed, paged
from fdel.ops.carry import Carry
from fdel.ops.delta import gated_delta_rule, l2norm

N, HK, HV = 4, 32, 20
GATES = {"head": (N,), "channel": (N, HK)}


def draw(t: int, gate: str, extreme: bool = False) -> tuple[np.ndarray, ...]:
    """Unit keys, decays from none to nearly all; if extreme, a tenth of them exp(-50) and many equal keys."""
    rng = np.random.default_rng(t)
    q, k = rng.normal(size=(2, t, N, HK))
    g = -np.exp(rng.normal(size=(t, *GATES[gate])) * 2 - 2)
    beta = rng.uniform(0, 1, (t, N))
    if extreme:
        g[rng.random(g.shape) < 0.1] = -50
        k[t // 3 : 2 * t // 3], beta[::2] = k[t // 3], 1
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    return tuple(x.astype(np.float32) for x in (unit(q) * HK**-0.5, unit(k), rng.normal(size=(t, N, HV)), g, beta))


def recurrence(q, k, v, g, beta, xp=np):
    """One token: S <- exp(g) S; S <- S + k (beta (v - k^T S))^T; o = q^T S."""

    def step(state, token):
        q, k, v, g, beta = token
        state = state * xp.exp(g).reshape(N, -1, 1)
        delta = (v - xp.einsum("nk,nkv->nv", k, state)) * beta[:, None]
        state = state + k[:, :, None] * delta[:, None, :]
        return state, xp.einsum("nk,nkv->nv", q, state)

    tokens, state = (q, k, v, g, beta), xp.zeros((N, HK, HV))
    if xp is jnp:
        return jax.lax.scan(step, state, tokens)[1]
    outs = []
    for token in zip(*(x.astype(np.float64) for x in tokens), strict=True):
        state, out = step(state, token)
        outs.append(out)
    return np.stack(outs), state


@partial(jax.jit, static_argnums=1)
def chunked(inputs, chunk):
    batch = packed(np.zeros((1, len(inputs[0])), int))
    return gated_delta_rule(batch, None, 0, *(x[None] for x in inputs), chunk=chunk)[0][0]


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


run = jax.jit(gated_delta_rule)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("t", "chunk"), [(100, 64), (37, 12)])
def test_definition(t, chunk, gate):
    for extreme in (False, True):
        inputs = draw(t, gate, extreme)
        assert_close(chunked(inputs, chunk), recurrence(*inputs)[0], 2e-5)


def test_precision_after_a_strong_decay():
    """Forty tokens of exp(-50), then mild decays: differences of one running sum would be off by 1e-4 here."""
    q, k, v, g, beta = draw(100, "head")
    g[:40] = -50
    assert_close(chunked((q, k, v, g, beta), 64), recurrence(q, k, v, g, beta)[0], 3e-6)


@pytest.mark.parametrize(
    ("gate", "module", "name"),
    [
        ("head", "qwen3_next", "torch_chunk_gated_delta_rule"),
        ("head", "qwen3_next", "torch_recurrent_gated_delta_rule"),
        ("channel", "kimi_linear", "chunk_kimi_delta_attention"),
        ("channel", "kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
def test_transformers(gate, module, name):
    """Outputs and final state equal transformers', from zero state and from a given one (70 tokens, then one)."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    reference = getattr(pytest.importorskip(f"transformers.models.{module}.modeling_{module}"), name)
    inputs = draw(71, gate)
    raw = (inputs[0] * 3 * HK**0.5, inputs[1] * 2, *inputs[2:])  # transformers normalises and scales by itself
    flags = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    tensors = [torch.tensor(x[None]) for x in raw]
    want, state = reference(*(x[:, :70] for x in tensors), initial_state=None, **flags)
    want_next, state_next = reference(*(x[:, 70:] for x in tensors), initial_state=state, **flags)

    q, k, *rest = raw
    ours = [np.asarray(l2norm(jnp.asarray(q))) * HK**-0.5, np.asarray(l2norm(jnp.asarray(k))), *rest]
    table = np.zeros((3, 1), int)
    carry = Carry(State(slots=Slots(None, jnp.full((2, 3, N, HK, HV), jnp.nan))))
    first = [np.concatenate([x[:70], np.zeros_like(x[:26])]) for x in ours]
    o, carry = run(paged([(2, 0, [0] * 70)], table, block=32)[1], carry, 1, *first)
    assert_close(o[:70], want[0].numpy(), 2e-5)
    assert_close(carry.slots.ssm[1, 2], state[0].numpy(), 2e-5)
    o, carry = run(paged([(2, 70, [0])], table)[1], carry, 1, *(x[70:] for x in ours))
    assert_close(o, want_next[0].numpy(), 2e-5)
    assert_close(carry.slots.ssm[1, 2], state_next[0].numpy(), 2e-5)
