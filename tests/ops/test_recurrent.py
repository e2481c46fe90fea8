"""What all recurrent ops owe both batch kinds: segments, padding, slots, blocks, decode, causality, memory.

The values themselves are held against published recurrences in test_conv, test_delta, test_ssd and test_mamba1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.batch import Packed, Paged, Slots, State, packed, paged
from fdel.ops.carry import Carry
from fdel.ops.conv import causal_conv
from fdel.ops.delta import gated_delta_rule
from fdel.ops.ssm import selective_scan, ssd

N, H, S, C, K, G = 4, 6, 5, 7, 4, 2
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.normal(size=(C, K)), RNG.normal(size=C)
A_HEAD, D_HEAD = -RNG.uniform(0.1, 4, N), RNG.normal(size=N)
A, D = -RNG.uniform(0.1, 4, (C, S)), RNG.normal(size=C)


@dataclass(frozen=True)
class Case:
    """An op, its inputs per token, and the state that one sequence keeps."""

    inputs: Callable  # (rng, tokens) -> tuple of arrays [tokens ...]
    call: Callable  # (batch, carry, layer, inputs, chunk) -> (y, carry)
    field: str
    state: tuple[int, ...]


def delta_inputs(rng: np.random.Generator, t: int, gate: tuple[int, ...]) -> tuple:
    q, k = rng.normal(size=(2, t, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return q, k, rng.normal(size=(t, N, S)), -rng.uniform(0, 2, (t, *gate)), rng.uniform(0, 1, (t, N))


def delta(batch, carry, layer, inputs, chunk):
    return gated_delta_rule(batch, carry, layer, *inputs, chunk=chunk)


CASES = {
    "conv": Case(
        lambda rng, t: (rng.normal(size=(t, C)),),
        lambda batch, carry, layer, inputs, chunk: causal_conv(batch, carry, layer, *inputs, WEIGHT, BIAS),
        "conv",
        (K - 1, C),
    ),
    "delta": Case(lambda rng, t: delta_inputs(rng, t, (N,)), delta, "ssm", (N, H, S)),
    "kda": Case(lambda rng, t: delta_inputs(rng, t, (N, H)), delta, "ssm", (N, H, S)),
    "ssd": Case(
        lambda rng, t: (
            rng.normal(size=(t, N, H)),
            rng.uniform(0, 1, (t, N)),
            *rng.normal(size=(2, t, G, S)),
        ),
        lambda batch, carry, layer, inputs, chunk: ssd(
            batch, carry, layer, *inputs[:2], A_HEAD, *inputs[2:], d=D_HEAD, chunk=chunk
        ),
        "ssm",
        (N, H, S),
    ),
    "mamba1": Case(
        lambda rng, t: (rng.normal(size=(t, C)), rng.uniform(0, 1, (t, C)), *rng.normal(size=(2, t, S))),
        lambda batch, carry, layer, inputs, chunk: selective_scan(
            batch, carry, layer, *inputs[:2], A, *inputs[2:], d=D, chunk=chunk
        ),
        "ssm",
        (C, S),
    ),
}
every_op = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs_of(case: Case, t: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(x.astype(np.float32) for x in case.inputs(np.random.default_rng(seed), t))


@partial(jax.jit, static_argnums=(0, 4))
def call(case: Case, batch: Packed | Paged, carry: Carry | None, layer: int, chunk: int, inputs: tuple) -> tuple:
    return case.call(batch, carry, layer, inputs, chunk)


def alone(case: Case, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """Run one sequence by itself, from zero state; the other row of the call is empty."""
    t = len(inputs[0])
    padded = tuple(np.pad(x[None], [(0, 1), (0, 64 - t), *[(0, 0)] * (x.ndim - 1)]) for x in inputs)
    return np.asarray(call(case, packed(np.zeros((2, 64), int), np.array([t, 0])), None, 0, 16, padded)[0][0, :t])


def slots_of(case: Case, layers: int, rows: int) -> Carry:
    """State full of NaN: what a slot holds before a sequence begins must not matter."""
    nan = lambda *shape: jnp.full((layers, rows, *shape), jnp.nan)
    slots = Slots(nan(*case.state), nan(1)) if case.field == "conv" else Slots(nan(1), nan(*case.state))
    return Carry(State(slots=slots))


def assert_close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.slow
@every_op
def test_packed_segments_are_separate(case):
    """Two rows hold three sequences; padding, between them and at the end, holds NaN."""
    sequences = [inputs_of(case, t, t) for t in (9, 21, 33)]
    segments, places = np.full((2, 64), -1), [(0, 0), (0, 12), (1, 3)]
    rows = [np.full((2, 64, *x.shape[1:]), np.nan, np.float32) for x in sequences[0]]
    for i, ((row, start), sequence) in enumerate(zip(places, sequences, strict=True)):
        part = (row, slice(start, start + len(sequence[0])))
        segments[part] = i
        for x, new in zip(rows, sequence, strict=True):
            x[part] = new
    y, carry = call(case, Packed(np.zeros_like(segments), segments), None, 0, 16, tuple(rows))
    assert carry.state is None
    for i, sequence in enumerate(sequences):
        assert_close(y[segments == i], alone(case, sequence))
    assert np.isfinite(y).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "block", "chunk"),  # a block is one chunk; for one op also three chunks of gcd(24, 16)
    [*[pytest.param(case, 8, 64, id=name) for name, case in CASES.items()], pytest.param(CASES["delta"], 24, 16)],
)
def test_paged_equals_packed(case, block, chunk):
    """Two sequences, prefilled in interleaved blocks over two calls and then decoded, equal two Packed calls."""
    layer, rows, table, size = 1, {"a": 3, "b": 0}, np.zeros((5, 1), int), 10 * block
    sequences = {"a": inputs_of(case, 61, 1), "b": inputs_of(case, 40, 2)}
    want = {name: alone(case, x) for name, x in sequences.items()}
    calls = [
        (block, size, [("a", 0, block), ("b", 0, 13), ("a", block, 27), ("b", 13, 18)]),
        (block, size, [("b", 18, 33), ("a", 27, 57)]),
        *[(1, 4, [("b", 33 + i, 34 + i), ("a", 57 + i, 58 + i)]) for i in range(4)],
    ]
    before = carry = slots_of(case, 3, 5)
    for block, size, parts in calls:
        chunks = [(rows[name], start, [0] * (end - start)) for name, start, end in parts]
        _, batch = paged(chunks, table, block=block, size=size)
        first, at = 0, []
        for _, start, end in parts:
            at.append(slice(first * block, first * block + end - start))
            first += -(-(end - start) // block)
        flat = tuple(np.full((size, *x.shape[1:]), np.nan, np.float32) for x in sequences["a"])
        for (name, start, end), where in zip(parts, at, strict=True):
            for x, source in zip(flat, sequences[name], strict=True):
                x[where] = source[start:end]
        y, carry = call(case, batch, carry, layer, chunk, flat)
        for (name, start, end), where in zip(parts, at, strict=True):
            assert_close(y[where], want[name][start:end])
        assert np.isfinite(y).all()
    old, new = (np.array(getattr(c.slots, case.field)) for c in (before, carry))
    assert np.isfinite(new[layer, [0, 3]]).all()
    new[layer, [0, 3]] = old[layer, [0, 3]]
    np.testing.assert_array_equal(new, old)  # other layers and slots keep what they held


@pytest.mark.slow
@every_op
@pytest.mark.parametrize("block", [1, 8])
def test_a_row_that_is_no_slot_is_neither_read_nor_written(case, block):
    """Negative ones, too: what begins with the call starts from zero, and so does what says that it goes on."""
    inputs, table, before = inputs_of(case, 3 * block, 4), np.zeros((3, 1), int), slots_of(case, 2, 4)
    starts = np.array([0, block, 0])  # the second block's sequence began in another call, says its position
    positions = (starts[:, None] + np.arange(block)).ravel()
    for row in (-1, -4, 4):
        batch = Paged(positions, table, np.array([row - 5 * (row < 0) + (row > 0), row, 2]), block)
        y, carry = call(case, batch, before, 1, 16, inputs)
        for i in range(3):
            mine = slice(i * block, (i + 1) * block)
            assert_close(y[mine], alone(case, tuple(x[mine] for x in inputs)))
        old, new = (np.array(getattr(c.slots, case.field)) for c in (before, carry))
        assert np.isfinite(new[1, 2]).all()
        new[1, 2] = old[1, 2]
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
@every_op
def test_gradient_stays_where_it_belongs(case):
    """Token 12 depends on tokens 9 to 12 of its segment only, and no gradient depends on what padding holds."""
    segments = np.array([[0] * 9 + [1] * 8 + [-1] * 3])
    batch, inputs = Packed(np.zeros_like(segments), segments), tuple(x[None] for x in inputs_of(case, 20, 5))

    @jax.jit
    @jax.grad
    def gradient(inputs, at):
        y = case.call(batch, None, 0, inputs, 8)[0]
        return jnp.sum(jnp.sin(y) * at.reshape(1, 20, *(1,) * (y.ndim - 2)))

    one = sum(np.abs(g[0]).reshape(20, -1).max(1) for g in gradient(inputs, np.eye(20)[12]))
    np.testing.assert_array_equal(one > 1e-6 * one.max(), [9 <= t <= 12 for t in range(20)])
    want = gradient(inputs, segments[0] >= 0)
    for x in inputs:
        x[:, 17:] = np.nan
    for w, g in zip(want, gradient(inputs, segments[0] >= 0), strict=True):
        np.testing.assert_array_equal(g, w)
        np.testing.assert_array_equal(g[:, 17:], 0)
        assert np.abs(g).max() > 0


@pytest.mark.slow
@every_op
def test_bfloat16_in_bfloat16_out(case):
    """Inputs in bfloat16 give what the same values give in float32, rounded once at the end; state stays float32."""
    inputs = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs_of(case, 2, 8))
    _, batch = paged([(0, 0, [0]), (1, 0, [0])], np.zeros((2, 1), int))
    y, carry = call(case, batch, slots_of(case, 1, 2), 0, 16, inputs)
    want, _ = call(case, batch, slots_of(case, 1, 2), 0, 16, tuple(x.astype(jnp.float32) for x in inputs))
    np.testing.assert_array_equal(y, want.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and getattr(carry.slots, case.field).dtype == jnp.float32
    rows = tuple(x[None] for x in inputs)
    assert jax.eval_shape(lambda: case.call(packed(np.zeros((1, 2), int)), None, 0, rows, 16)[0]).dtype == jnp.bfloat16


@every_op
def test_paged_without_fitting_slots_says_what_is_missing(case):
    batch, inputs = paged([(0, 0, [0])], np.zeros((1, 1), int))[1], inputs_of(case, 1, 9)
    shape = ", ".join(map(str, case.state))
    with pytest.raises(ValueError, match=rf"slots\.{case.field} of shape \(layers, slots, {shape}\), found None"):
        case.call(batch, None, 0, inputs, 16)
    with pytest.raises(ValueError, match=r"found \(1, 1, 2\)"):
        case.call(batch, Carry(State(slots=Slots(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 2))))), 0, inputs, 16)


@every_op
@pytest.mark.parametrize(("block", "walk"), [(1, "list"), (16, "scan")])
def test_state_is_updated_in_place(case, block, walk):
    """Two layers with donated state: temporaries stay far below the state, and the output reuses its memory."""
    layers, rows = 2, 8192
    slots = jax.eval_shape(lambda: slots_of(case, layers, rows))
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Paged(spec(2 * block), spec(2, 1), spec(2), block)

    def step(slots, batch, inputs):
        def layer(slots, i):
            y, slots = case.call(batch, slots, i, inputs, 16)
            return slots, y.sum()

        if walk == "scan":
            return jax.lax.scan(layer, slots, jnp.arange(layers))
        sums = []
        for i in range(layers):
            slots, y = layer(slots, i)
            sums.append(y)
        return slots, sums

    compiled = jax.jit(step, donate_argnums=0).lower(slots, batch, inputs_of(case, 2 * block, 3)).compile()
    memory, size = compiled.memory_analysis(), 4 * layers * rows * int(np.prod(case.state))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 16
