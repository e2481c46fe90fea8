"""Causal convolution against torch, float64 numpy, and transformers' own prefill and update functions."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fdel import params
from fdel.ops.batch import Packed, Slots, State, packed, paged
from fdel.ops.carry import Carry
from fdel.ops.conv import causal_conv

C = 5


def draw(b: int, t: int, k: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(t)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((b, t, C), (C, k), (C,)))


def written_out(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """y_t = sum_k weight[:, k] x_{t-K+1+k} + bias, in float64."""
    x, k = x.astype(np.float64), weight.shape[1]
    y = np.zeros_like(x) + bias
    for t in range(x.shape[1]):
        for j in range(k):
            if t - k + 1 + j >= 0:
                y[:, t] += weight[:, j] * x[:, t - k + 1 + j]
    return y


@pytest.mark.parametrize("t", [1, 2, 17])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_written_out(t, k):
    x, weight, bias = draw(2, t, k)
    batch = packed(np.zeros((2, t), int))
    run = jax.jit(lambda *p: causal_conv(batch, None, 0, *p)[0])
    y = run(x, weight, bias)
    np.testing.assert_allclose(y, written_out(x, weight, bias), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(x, weight), y - bias, rtol=1e-5, atol=1e-6)


def test_segments_that_touch_are_apart():
    x, weight, bias = draw(1, 9, 4)
    batch = Packed(np.zeros((1, 9), int), np.array([[0] * 5 + [1] * 2 + [0] * 2]))
    y = causal_conv(batch, None, 0, x, weight, bias)[0]
    want = np.concatenate([written_out(x[:, i:j], weight, bias) for i, j in ((0, 5), (5, 7), (7, 9))], 1)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_gradient_equals_torch():
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    x, weight, bias = draw(2, 9, 4)
    probe = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    batch = packed(np.zeros((2, 9), int))
    got = jax.jit(jax.grad(lambda p: (causal_conv(batch, None, 0, *p)[0] * probe).sum()))((x, weight, bias))
    leaves = [torch.tensor(p, requires_grad=True) for p in (x, weight, bias)]
    y = torch.nn.functional.conv1d(leaves[0].mT, leaves[1][:, None], leaves[2], padding=3, groups=C)[..., :9].mT
    (y * torch.tensor(probe)).sum().backward()
    for g, leaf in zip(got, leaves, strict=True):
        np.testing.assert_allclose(g, leaf.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_decode_equals_transformers():
    """Prefill of 6 tokens, then decode of one: outputs and the kept inputs equal transformers' functions."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, weight, bias = draw(1, 7, 4)
    tx, tw, tb = (torch.tensor(p) for p in (x, weight, bias))
    want = mamba2.causal_conv1d_fn(tx[:, :6].mT, tw, tb).mT
    state = tx[:, 3:6].mT.clone()
    want_next = mamba2.causal_conv1d_update(tx[:, 6:].mT, state, tw, tb).mT  # updates `state`

    table, slots = np.zeros((2, 1), int), Slots(np.full((1, 2, 3, C), np.nan, np.float32), None)
    carry = jax.tree.map(jax.numpy.asarray, Carry(State(slots=slots)))
    prefill = np.concatenate([x[0, :6], np.zeros((2, C), np.float32)])
    run = jax.jit(lambda batch, carry, x: causal_conv(batch, carry, 0, x, weight, bias))
    y, carry = run(paged([(1, 0, [0] * 6)], table, block=8)[1], carry, prefill)
    np.testing.assert_allclose(y[:6], want[0].numpy(), rtol=1e-5, atol=1e-6)
    y, carry = run(paged([(1, 6, [0])], table)[1], carry, x[0, 6:])
    np.testing.assert_allclose(y, want_next[0].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(carry.slots.conv[0, 1], state[0].mT.numpy())


@pytest.mark.parametrize("block", [2, 4, 16])
def test_a_tree_of_channels_over_pages(block):
    """Channels along two axes beside others along one, pieces of drawn lengths, a slot that passes to another sequence."""
    rng, shapes = np.random.default_rng(block), {"a": (2, 3), "b": (4,)}
    sequences = [
        {i: rng.normal(size=(int(t), *s)).astype(np.float32) for i, s in shapes.items()} for t in (31, 1, 19, 23, 64)
    ]
    weight, bias = ({i: rng.normal(size=(*s, *k)).astype(np.float32) for i, s in shapes.items()} for k in ((4,), ()))
    alone = lambda x, w, b: written_out(x.reshape(1, len(x), -1), w.reshape(-1, 4), b.ravel()).reshape(x.shape)
    want = [{i: alone(x[i], weight[i], bias[i]) for i in shapes} for x in sequences]
    # The second sequence and the third have one slot, the last has none; it ends with the others.
    rows, done, size = (0, 1, 1, 2, -1), [0] * 5, 14 * block
    carry = Carry(State(slots=Slots({i: jax.numpy.full((2, 3, 3, *s), np.nan) for i, s in shapes.items()}, None)))
    run = jax.jit(lambda batch, carry, x: causal_conv(batch, carry, 1, x, weight, bias))
    while any(d < len(x["b"]) for d, x in zip(done[:4], sequences[:4], strict=True)):
        flat, pieces, room = {i: np.full((size, *s), np.nan, np.float32) for i, s in shapes.items()}, [], 0
        for n in (0, 1, 2, 3, 0, 3, 4):
            most = min(len(sequences[n]["b"]) - done[n], 2 * block if n < 4 else 1)
            length = most if n in (1, 2, 4) else int(rng.integers(1, most + 1)) if most else 0
            length -= length % block if length < most else 0  # only the last piece of a call ends within a block
            if length and room + -(-length // block) <= size // block:
                pieces.append((n, done[n], length, room * block))
                done[n], room = done[n] + length, room + -(-length // block)
        for n, start, length, at in pieces:
            for i in shapes:
                flat[i][at : at + length] = sequences[n][i][start : start + length]
        chunks = [(rows[n], start, [0] * length) for n, start, length, _ in pieces]
        y, carry = run(paged(chunks, np.zeros((3, 1), int), block=block, size=size)[1], carry, flat)
        for n, start, length, at in (p for p in pieces if rows[p[0]] >= 0):
            for i in shapes:
                np.testing.assert_allclose(
                    y[i][at : at + length], want[n][i][start : start + length], rtol=1e-5, atol=1e-5
                )
    assert all(np.isnan(x[0]).all() for x in carry.slots.conv.values())


def test_channels_that_devices_divide_are_not_sent():
    mesh = params.make_mesh({"dp": 2, "tp": 4})
    over = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    put = lambda at, *shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=at)
    x = {"heads": put(over(None, "tp"), 16, 4, 8), "beside": put(over(), 16, 6)}
    weight = {"heads": put(over("tp"), 4, 8, 4), "beside": put(over(), 6, 4)}
    slots = {"heads": put(over(None, None, None, "tp"), 1, 2, 3, 4, 8), "beside": put(over(), 1, 2, 3, 6)}
    batch = paged([(0, 0, [0] * 7), (1, 8, [0] * 8)], np.zeros((2, 1), int), block=8)[1]
    run = lambda carry, x, weight: causal_conv(batch, carry, 0, x, weight)
    with jax.set_mesh(mesh):
        text = jax.jit(run).lower(Carry(State(slots=Slots(slots, None))), x, weight).compile().as_text()
    assert "f32[16,1,8]" in text and not re.search("all-gather|all-to-all|collective-permute|all-reduce", text)
