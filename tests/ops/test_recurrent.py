"""What all recurrent ops owe both batch kinds: segments, padding, slots, blocks, decode, causality, memory.

The values themselves are held against published recurrences in test_conv, test_delta, test_ssd and test_mamba1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.batch import Packed, Paged, Slots, packed, paged
from fdel.ops.conv import causal_conv
from fdel.ops.delta import gated_delta_rule
from fdel.ops.mamba1 import selective_scan
from fdel.ops.ssd import ssd

N, H, S, C, K, G = 4, 6, 5, 7, 4, 2
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.normal(size=(C, K)), RNG.normal(size=C)
A_HEAD, D_HEAD = -RNG.uniform(0.1, 4, N), RNG.normal(size=N)
A, D = -RNG.uniform(0.1, 4, (C, S)), RNG.normal(size=C)


@dataclass(frozen=True)
class Case:
    """An op, its inputs per token, and the state that one sequence keeps."""

    inputs: Callable  # (rng, tokens) -> tuple of arrays [tokens ...]
    call: Callable  # (batch, slots, layer, inputs, chunk) -> (y, slots)
    field: str
    state: tuple[int, ...]


def delta_inputs(rng: np.random.Generator, t: int, gate: tuple[int, ...]) -> tuple:
    q, k = rng.normal(size=(2, t, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, rng.normal(size=(t, N, S)), -rng.uniform(0, 2, (t, *gate)), rng.uniform(0, 1, (t, N))


def delta(batch, slots, layer, inputs, chunk):
    return gated_delta_rule(batch, slots, layer, *inputs, chunk=chunk)


CASES = {
    "conv": Case(
        lambda rng, t: (rng.normal(size=(t, C)),),
        lambda batch, slots, layer, inputs, chunk: causal_conv(batch, slots, layer, *inputs, WEIGHT, BIAS),
        "conv",
        (C, K - 1),
    ),
    "delta": Case(lambda rng, t: delta_inputs(rng, t, (N,)), delta, "ssm", (N, H, S)),
    "kda": Case(lambda rng, t: delta_inputs(rng, t, (N, H)), delta, "ssm", (N, H, S)),
    "ssd": Case(
        lambda rng, t: (
            rng.normal(size=(t, N, H)),
            rng.uniform(0, 1, (t, N)),
            *rng.normal(size=(2, t, G, S)),
        ),
        lambda batch, slots, layer, inputs, chunk: ssd(
            batch, slots, layer, *inputs[:2], A_HEAD, *inputs[2:], d=D_HEAD, chunk=chunk
        ),
        "ssm",
        (N, H, S),
    ),
    "mamba1": Case(
        lambda rng, t: (rng.normal(size=(t, C)), rng.uniform(0, 1, (t, C)), *rng.normal(size=(2, t, S))),
        lambda batch, slots, layer, inputs, chunk: selective_scan(
            batch, slots, layer, *inputs[:2], A, *inputs[2:], d=D, chunk=chunk
        ),
        "ssm",
        (C, S),
    ),
}
every_op = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs_of(case: Case, t: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(x.astype(np.float32) for x in case.inputs(np.random.default_rng(seed), t))


def run(case: Case, batch: Packed, inputs: tuple, chunk: int = 16) -> np.ndarray:
    """Run a Packed call; state is neither needed nor made."""
    y, slots = jax.jit(lambda batch, inputs: case.call(batch, None, 0, inputs, chunk))(batch, inputs)
    assert slots is None
    return np.asarray(y)


def alone(case: Case, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """Run one sequence by itself, from zero state."""
    return run(case, packed(np.zeros((1, len(inputs[0])), int)), tuple(x[None] for x in inputs))[0]


def slots_of(case: Case, layers: int, rows: int) -> Slots:
    """State full of NaN: what a slot holds before a sequence begins must not matter."""
    nan = lambda *shape: jnp.full((layers, rows, *shape), jnp.nan)
    return Slots(nan(*case.state), nan(1)) if case.field == "conv" else Slots(nan(1), nan(*case.state))


def assert_close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@every_op
def test_packed_segments_are_separate(case):
    """Two rows hold three sequences; padding, between them and at the end, holds NaN."""
    sequences = [inputs_of(case, t, t) for t in (9, 21, 33)]
    segments = np.full((2, 40), -1)
    places = [(0, 0), (0, 12), (1, 3)]
    rows = [np.full((2, 40, *x.shape[1:]), np.nan, np.float32) for x in sequences[0]]
    for i, ((row, start), sequence) in enumerate(zip(places, sequences, strict=True)):
        part = (row, slice(start, start + len(sequence[0])))
        segments[part] = i
        for x, new in zip(rows, sequence, strict=True):
            x[part] = new
    y = run(case, Packed(np.zeros_like(segments), segments), tuple(rows))
    for i, sequence in enumerate(sequences):
        assert_close(y[segments == i], alone(case, sequence))
    assert np.isfinite(y).all()


@every_op
@pytest.mark.parametrize(("block", "chunk"), [(8, 64), (24, 16)])  # a block is one chunk, or three of gcd(24, 16)
def test_paged_equals_packed(case, block, chunk):
    """Two sequences, prefilled in interleaved blocks over two calls and then decoded, equal two Packed calls."""
    layer, rows, table = 1, {"a": 3, "b": 0}, np.zeros((5, 1), int)
    sequences = {"a": inputs_of(case, 61, 1), "b": inputs_of(case, 40, 2)}
    want = {name: alone(case, x) for name, x in sequences.items()}
    calls = [
        (block, 9 * block, [("a", 0, block), ("b", 0, 13), ("a", block, 27), ("b", 13, 18)]),
        (block, 6 * block, [("b", 18, 33), ("a", 27, 57)]),
        *[(1, 4, [("b", 33 + i, 34 + i), ("a", 57 + i, 58 + i)]) for i in range(4)],
    ]
    step = jax.jit(lambda batch, slots, layer, inputs: case.call(batch, slots, layer, inputs, chunk))
    before = slots = slots_of(case, 3, 5)
    for size, total, parts in calls:
        _, batch = paged(
            [(rows[n], start, [0] * (end - start)) for n, start, end in parts], table, block=size, size=total
        )
        first, at = 0, []
        for _, start, end in parts:
            at.append(slice(first * size, first * size + end - start))
            first += -(-(end - start) // size)
        flat = [np.full((total, *x.shape[1:]), np.nan, np.float32) for x in sequences["a"]]
        for (name, start, end), where in zip(parts, at, strict=True):
            for x, source in zip(flat, sequences[name], strict=True):
                x[where] = source[start:end]
        y, slots = step(batch, slots, layer, tuple(flat))
        for (name, start, end), where in zip(parts, at, strict=True):
            assert_close(y[where], want[name][start:end])
        assert np.isfinite(y).all()
    old, new = np.array(getattr(before, case.field)), np.array(getattr(slots, case.field))
    assert np.isfinite(new[layer, [0, 3]]).all()
    new[layer, [0, 3]] = old[layer, [0, 3]]
    np.testing.assert_array_equal(new, old)  # other layers and slots keep what they held


@every_op
def test_gradient_is_causal_and_stays_in_its_segment(case):
    """The output at token 12 depends on tokens 9 to 12 of its segment, and on nothing else, whatever padding holds."""
    segments = np.array([[0] * 9 + [1] * 8 + [-1] * 3])
    inputs = tuple(np.where(segments[0].reshape(-1, *(1,) * (x.ndim - 1)) < 0, np.nan, x)[None].astype(np.float32)
                   for x in inputs_of(case, 20, 5))  # fmt: skip
    probe = np.random.default_rng(6).normal(size=100).astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(inputs):
        y = case.call(Packed(np.zeros_like(segments), segments), None, 0, inputs, 8)[0][0, 12].ravel()
        return y @ probe[: y.size]

    size = sum(np.abs(g[0]).reshape(20, -1).max(1) for g in gradient(inputs))
    np.testing.assert_array_equal(size > 0, [9 <= t <= 12 for t in range(20)])


@every_op
def test_gradient_ignores_nan_in_padding(case):
    inputs = tuple(x[None] for x in inputs_of(case, 24, 7))
    dirty = tuple(np.concatenate([x, np.full_like(x[:, :6], np.nan)], 1) for x in inputs)
    mean = lambda batch: lambda x: jnp.mean(jnp.square(case.call(batch, None, 0, x, 8)[0])[:, :24])
    want = jax.jit(jax.grad(mean(packed(np.zeros((1, 24), int)))))(inputs)
    got = jax.jit(jax.grad(mean(packed(np.zeros((1, 30), int), np.array([24])))))(dirty)
    for w, g in zip(want, got, strict=True):
        assert_close(g[:, :24], w)
        np.testing.assert_array_equal(g[:, 24:], 0)


@every_op
def test_bfloat16_in_bfloat16_out(case):
    """Inputs in bfloat16 give what the same values give in float32, rounded once at the end."""
    inputs = tuple(jnp.asarray(x[None], jnp.bfloat16) for x in inputs_of(case, 24, 8))
    batch = packed(np.zeros((1, 24), int))
    y, want = run(case, batch, inputs), run(case, batch, tuple(x.astype(jnp.float32) for x in inputs))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, want.astype(jnp.bfloat16))


@every_op
def test_paged_without_fitting_slots_says_what_is_missing(case):
    batch, inputs = paged([(0, 0, [0])], np.zeros((1, 1), int))[1], inputs_of(case, 1, 9)
    shape = ", ".join(map(str, case.state))
    with pytest.raises(ValueError, match=rf"slots\.{case.field} of shape \(layers, slots, {shape}\), found None"):
        case.call(batch, None, 0, inputs, 16)
    with pytest.raises(ValueError, match=r"found \(1, 1, 2\)"):
        case.call(batch, Slots(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2))), 0, inputs, 16)


@every_op
@pytest.mark.parametrize(("block", "walk"), [(1, "list"), (1, "scan"), (16, "scan")])
def test_state_is_updated_in_place(case, block, walk):
    """A step over 4 layers, state donated: temporaries stay far below one layer's state, the output reuses the input."""
    layers, rows = 4, 4096
    slots = jax.eval_shape(lambda: slots_of(case, layers, rows))
    size = 4 * layers * rows * int(np.prod(case.state))
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Paged(spec(2 * block), spec(2, 1), spec(2), block)

    def layer(carry, i):
        slots, total = carry
        y, slots = case.call(batch_of, slots, i, inputs, 16)
        return (slots, total + y.sum()), None

    def step(slots, batch, tokens):
        nonlocal batch_of, inputs
        batch_of, inputs, carry = batch, tokens, (slots, 0.0)
        if walk == "scan":
            return jax.lax.scan(layer, carry, jnp.arange(layers))[0]
        for i in range(layers):
            carry, _ = layer(carry, i)
        return carry

    batch_of = inputs = None
    compiled = jax.jit(step, donate_argnums=0).lower(slots, batch, inputs_of(case, 2 * block, 3)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / layers / 8
