"""The TPU kernels for recurrences, interpreted, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fdel import ops
from fdel.kernels import chunks_tpu, gated_delta_rule_tpu, selective_scan_gpu, selective_scan_tpu, ssd_tpu
from fdel.ops.batch import Packed
from fdel.ops.platform import tracing_for

N, H, T = 2, 128, 150
PLACES = [(0, 70), (73, 74), (74, 140)]  # of sequences in a row; one goes on in the second chunk of 128 tokens
SEGMENTS = np.full((2, T), -1, np.int32)
SEGMENTS[1] = 7
for i, (start, end) in enumerate(PLACES):
    SEGMENTS[0, start:end] = i


def padded(inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Put NaN where padding may hold it."""
    return tuple(np.where(SEGMENTS.reshape(2, T, *[1] * (x.ndim - 2)) < 0, np.nan, x) for x in inputs)


def recurrence(step, state: tuple, inputs: tuple, segments=SEGMENTS) -> np.ndarray:
    """Run step(state, token) -> (state, output) over the sequences of both rows; padding gives 0."""
    out = None
    for row in range(2):
        for at in range(T):
            if at == 0 or segments[row, at] != segments[row, at - 1]:
                s = np.zeros(state)
            if segments[row, at] >= 0:
                s, y = step(s, [np.asarray(x[row, at], np.float64) for x in inputs])
                out = np.zeros((2, T, *y.shape)) if out is None else out
                out[row, at] = y
    return out


def delta_step(state, token):
    q, k, v, g, beta = token
    state = state * np.exp(g).reshape(N, -1, 1)
    delta = beta[:, None] * (v - np.einsum("nk,nkv->nv", k, state))
    state = state + k[:, :, None] * delta[:, None]
    return state, np.einsum("nk,nkv->nv", q, state)


def delta_inputs(gate: tuple[int, ...], dtype) -> tuple[np.ndarray, ...]:
    """The second row is extreme: decays of exp(-50) and exp(-3000), many equal keys, write strengths of 0 and 1."""
    r = np.random.default_rng(0)
    q, k = r.normal(size=(2, 2, T, N, H))
    g, beta = -np.exp(r.normal(size=(2, T, N, *gate)) * 2 - 2), r.uniform(0, 1, (2, T, N))
    extreme = g[1]  # a view
    extreme[r.random(extreme.shape) < 0.1] = -50
    extreme[:40][r.random(extreme[:40].shape) < 0.02] = -3000
    k[1, 50:100], beta[1, ::2], beta[1, 1::7] = k[1, 50], 1, 0
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    rounded = [jnp.asarray(x, dtype) for x in padded((unit(q) * H**-0.5, unit(k), r.normal(size=(2, T, N, H))))]
    return *rounded, *(jnp.asarray(x, jnp.float32) for x in padded((g, beta)))


def delta(inputs: tuple, segments=SEGMENTS) -> jax.Array:
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    with tracing_for("tpu"), ops.use(gated_delta_rule="mosaic"):
        return jax.jit(lambda *x: ops.gated_delta_rule(batch, None, 0, *x)[0])(*inputs)


CHANNELS, A, D = 64, np.array([-1.0, -2.5]), np.array([0.5, -1.0])  # of two heads, which fill a tile


def ssd_step(state, token):
    x, dt, b, c = token
    state = state * np.exp(dt * A)[:, None, None] + (dt[:, None] * x)[..., None] * b
    return state, state @ c[0] + D[:, None] * x


def ssd_inputs(dtype) -> tuple[np.ndarray, ...]:
    """Steps of the second row are extreme: 0, and such that nothing stays."""
    r = np.random.default_rng(0)
    dt = np.exp(r.normal(size=(2, T, N)) - 2)
    dt[1][r.random((T, N)) < 0.1], dt[1][r.random((T, N)) < 0.05] = 0, 1000
    x, b, c = (r.normal(size=(2, T, *n)) for n in ((N, CHANNELS), (1, H), (1, H)))
    x, b, c = (jnp.asarray(y, dtype) for y in padded((x, b / H**0.5, c)))
    return x, jnp.asarray(padded((dt,))[0], jnp.float32), b, c


def ssd(inputs: tuple, segments=SEGMENTS) -> jax.Array:
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    a, d = jnp.asarray(A, jnp.float32), jnp.asarray(D, jnp.float32)
    with tracing_for("tpu"), ops.use(ssd="mosaic"):
        return jax.jit(lambda x, dt, b, c: ops.ssd(batch, None, 0, x, dt, a, b, c, d=d)[0])(*inputs)


WIDE, STATES = 128, 16  # channels and states of a selective scan
RATES = -np.exp(np.random.default_rng(1).normal(size=(WIDE, STATES)))
SKIP = np.random.default_rng(2).normal(size=WIDE)


def scan_step(state, token):
    x, dt, b, c = token
    state = np.exp(dt[:, None] * RATES) * state + (dt * x)[:, None] * b
    return state, state @ c + SKIP * x


def scan_inputs(dtype) -> tuple[np.ndarray, ...]:
    """Steps of the second row are extreme: 0, and such that nothing stays."""
    r = np.random.default_rng(0)
    dt = np.exp(r.normal(size=(2, T, WIDE)) - 2)
    dt[1][r.random((T, WIDE)) < 0.1], dt[1][r.random((T, WIDE)) < 0.05] = 0, 1000
    x, b, c = (r.normal(size=(2, T, n)) for n in (WIDE, STATES, STATES))
    x, b, c = (jnp.asarray(y, dtype) for y in padded((x, b, c)))
    return x, jnp.asarray(padded((dt,))[0], jnp.float32), b, c


def scan(inputs: tuple, segments=SEGMENTS, impl: str = "mosaic") -> jax.Array:
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    with tracing_for("tpu"), ops.use(selective_scan=impl):
        return scanned(batch, *inputs)


@jax.jit
def scanned(batch, x, dt, b, c):
    a, d = jnp.asarray(RATES, jnp.float32), jnp.asarray(SKIP, jnp.float32)
    return ops.selective_scan(batch, None, 0, x, dt, a, b, c, d=d)[0]


def error(got, want) -> float:
    """The largest difference, relative to the largest number; NaN if any number is, in padding too."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


@pytest.mark.parametrize(("width", "of_heads", "of_channels"), [(128, 8, 4), (256, 4, 2), (512, 2, 1), (2048, 1, 1)])
def test_a_step_has_fewer_of_wider_heads(width, of_heads, of_channels):
    """With decays of channels the gradient of four heads of 256 in float32 did not compile for v5p."""
    shape, found = (lambda *sizes: jax.ShapeDtypeStruct((1, 128, 8, *sizes), jnp.float32)), []
    tokens = jax.ShapeDtypeStruct((1, 128), bool)
    for gate in ((), (width,)):
        inputs = shape(width), shape(width), shape(128), shape(*gate), shape()
        jax.eval_shape(
            lambda *args: found.append(gated_delta_rule_tpu._prepared(*args)[0].heads), tokens, tokens, *inputs
        )
    assert found == [of_heads, of_channels]


@pytest.fixture
def interpreted(monkeypatch):
    """One head in a step, without the detector of races: in a third of the time."""
    monkeypatch.setattr(gated_delta_rule_tpu, "HEADS", {True: 1, False: 1})
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


F32, BF16, MATRIX = jnp.float32, jnp.bfloat16, pytest.mark.matrix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "dtype", "most"),
    [
        ((), F32, 2e-6),
        pytest.param((), BF16, 8e-3, marks=MATRIX),
        pytest.param((H,), F32, 2e-6, marks=MATRIX),
        pytest.param((H,), BF16, 8e-3, marks=MATRIX),
    ],
    ids=["head", "head, bfloat16", "channel", "channel, bfloat16"],
)
def test_the_delta_rule_equals_float64(gate, dtype, most, interpreted):
    """Sequences that end inside of chunks, NaN in padding, extreme decays: relative to the largest (seen: 4e-7, 5e-3)."""
    inputs = delta_inputs(gate, dtype)
    assert error(delta(inputs), recurrence(delta_step, (N, H, H), inputs)) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"), [(F32, 2e-6), pytest.param(BF16, 8e-3, marks=MATRIX)], ids=["float32", "bfloat16"]
)
def test_ssd_equals_float64(dtype, most, interpreted):
    """As above; two heads of 64 channels in a tile."""
    inputs = ssd_inputs(dtype)
    assert error(ssd(inputs), recurrence(ssd_step, (N, CHANNELS, H), inputs)) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"), [(F32, 1e-6), pytest.param(BF16, 8e-3, marks=MATRIX)], ids=["float32", "bfloat16"]
)
def test_the_selective_scan_equals_float64(dtype, most, interpreted):
    """As above (seen: 1e-7, 5e-3). What one sequence holds is nothing to the next: huge numbers, and, beyond the block of
    tokens that is read at once, NaN."""
    inputs = scan_inputs(dtype)
    want = recurrence(scan_step, (WIDE, STATES), inputs)
    assert error(scan(inputs), want) < most
    for at, value, clean in [(69, 1e30, 70), (60, np.nan, 80)]:
        got = np.asarray(scan((inputs[0].at[0, at].set(value), *inputs[1:])), np.float64)
        assert not (np.abs(got[0, at]) < 1e25).any() and error(got[:, clean:], want[:, clean:]) < most


@pytest.mark.matrix
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(-1, 2), min_size=2 * T, max_size=2 * T), st.integers(0, 9), st.sampled_from([0.1, 1.0, 30.0])
)
def test_the_selective_scan_of_any_segments_equals_float64(interpreted, segments, seed, size):
    """Runs of one token and more, which begin anywhere; steps of any size; NaN in padding."""
    r = np.random.default_rng(seed)
    segments = np.repeat(np.asarray(segments, np.int32).reshape(2, T), r.integers(1, 9), 1)[:, :T]
    scale = [1, size, 1, 1]
    inputs = [r.normal(size=(2, T, n)) * s for n, s in zip((WIDE, WIDE, STATES, STATES), scale, strict=True)]
    inputs[1] = np.abs(inputs[1])
    inputs = tuple(jnp.asarray(np.where(segments[..., None] < 0, np.nan, x), F32) for x in inputs)
    want = recurrence(scan_step, (WIDE, STATES), inputs, segments)
    if want is not None:
        assert error(scan(inputs, segments), want) < 1e-6


@pytest.mark.matrix
def test_no_race_is_found(capsys, monkeypatch):
    """The copies are Pallas's own, of a chunk while the one before is solved: two chunks of two rows here."""
    monkeypatch.setattr(gated_delta_rule_tpu, "HEADS", {True: 2, False: 1})
    inputs = delta_inputs((), F32)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
        assert error(delta(inputs), recurrence(delta_step, (N, H, H), inputs)) < 2e-6
        inputs = ssd_inputs(F32)
        assert error(ssd(inputs), recurrence(ssd_step, (N, CHANNELS, H), inputs)) < 2e-6
        assert max(ssd_gradient_errors(SEGMENTS, F32)) < 3e-6
        assert max(delta_gradient_errors(SEGMENTS, (), F32)) < 5e-6
        assert max(scan_gradient_errors(SEGMENTS, F32)) < 5e-6
        inputs = scan_inputs(F32)
        assert error(scan(inputs), recurrence(scan_step, (WIDE, STATES), inputs)) < 1e-6
    assert "RACE" not in "".join(capsys.readouterr())


def delta_loss(q, k, v, g, beta, weights, segments):
    """Sum weights * o, token by token, in the inputs' dtype."""

    def step(state, token):
        q, k, v, g, beta, start, valid = token
        state = jnp.where(start, 0, state)
        new = state * jnp.exp(g).reshape(N, -1, 1)
        delta = beta[:, None] * (v - jnp.einsum("nk,nkv->nv", k, new))
        new = new + k[:, :, None] * delta[:, None]
        return jnp.where(valid, new, state), jnp.where(valid, jnp.einsum("nk,nkv->nv", q, new), 0)

    def row(*tokens):
        return jax.lax.scan(step, jnp.zeros((N, q.shape[-1], v.shape[-1]), q.dtype), tokens)[1]

    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    out = jax.vmap(row)(q, k, v, g, beta, starts, segments >= 0)
    return (jnp.where(segments[..., None, None] >= 0, weights, 0) * out).sum()


@jax.jit
def delta_gradients(inputs, weights, segments):
    batch = Packed(jnp.zeros(segments.shape, int), segments)
    y, back = jax.vjp(lambda *x: ops.gated_delta_rule(batch, None, 0, *x)[0], *inputs)
    return back(weights.astype(y.dtype))


def delta_gradient_errors(segments, gate: tuple[int, ...], dtype, seed: int = 0, keys: int = H) -> list[float]:
    """Compare with float64's; the second row is extreme as in `delta_inputs`, padding is NaN."""
    r = np.random.default_rng(seed)
    inputs = [np.nan_to_num(np.asarray(x, np.float64)) for x in delta_inputs(gate, dtype)]
    if keys != H:
        inputs[:2] = (np.concatenate([x] * (keys // H), -1) / (keys / H) ** 0.5 for x in inputs[:2])
    order = r.permutation(T) if seed else np.arange(T)
    rounded = [jnp.asarray(x[:, order], dtype if i < 3 else F32) for i, x in enumerate(inputs)]
    weights = jnp.asarray(r.normal(size=(2, T, N, H)), dtype)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(y, np.float64)) for y in (*rounded, weights)]
        want = [np.asarray(y) for y in jax.jit(jax.grad(delta_loss, range(5)))(*exact, segments)]
    pad = lambda y: jnp.where((segments < 0).reshape(2, T, *[1] * (y.ndim - 2)), jnp.nan, y).astype(y.dtype)
    with tracing_for("tpu"), ops.use(gated_delta_rule="mosaic"):
        got = delta_gradients([pad(y) for y in rounded], pad(weights), jnp.asarray(segments))
    return [error(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "dtype", "most"),
    [
        ((), F32, 5e-6),
        pytest.param((), BF16, 2e-2, marks=MATRIX),
        pytest.param((H,), F32, 5e-6, marks=MATRIX),
        pytest.param((H,), BF16, 2e-2, marks=MATRIX),
    ],
    ids=["head", "head, bfloat16", "channel", "channel, bfloat16"],
)
def test_the_gradient_of_the_delta_rule_equals_float64(gate, dtype, most, interpreted):
    """Of q, k, v, g and beta; NaN in padding, of inputs and of what comes back."""
    assert max(delta_gradient_errors(SEGMENTS, gate, dtype)) < most


@pytest.mark.matrix
def test_the_gradient_of_the_delta_rule_with_keys_of_256_equals_float64(interpreted):
    assert max(delta_gradient_errors(SEGMENTS, (), F32, keys=256)) < 5e-6


@pytest.mark.matrix
def test_a_gradient_of_decays_without_what_reaches_the_end_of_a_chunk_is_found(interpreted, monkeypatch):
    """A planted fault, of that gradient alone."""
    right = chunks_tpu.decay_gradient
    monkeypatch.setattr(chunks_tpu, "decay_gradient", lambda pairs, first, last: right(pairs, first, 0 * last))
    delta_gradients.clear_cache()  # of a program without it
    *others, decays, beta = delta_gradient_errors(SEGMENTS, (), F32, seed=1)
    delta_gradients.clear_cache()
    assert max(*others, beta) < 5e-6 and decays > 1e-3


def scan_loss(x, dt, a, b, c, d, weights, segments):
    """Sum weights * y, token by token, in the inputs' dtype."""

    def step(state, token):
        x, dt, b, c, start, valid = token
        new = jnp.exp(dt[:, None] * a) * jnp.where(start, 0, state) + (dt * x)[:, None] * b
        return jnp.where(valid, new, 0), jnp.where(valid, new @ c + d * x, 0)

    def row(*tokens):
        return jax.lax.scan(step, jnp.zeros(a.shape, x.dtype), tokens)[1]

    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (jnp.where(segments[..., None] >= 0, weights, 0) * jax.vmap(row)(x, dt, b, c, starts, segments >= 0)).sum()


@jax.jit
def scan_gradients(inputs, weights, segments):
    batch = Packed(jnp.zeros(segments.shape, int), segments)
    y, back = jax.vjp(lambda *x: ops.selective_scan(batch, None, 0, *x[:-1], d=x[-1])[0], *inputs)
    return back(weights.astype(y.dtype))


def scan_gradient_errors(
    segments, dtype, seed: int = 0, size: float | None = None, impl: str = "mosaic", platform: str = "tpu"
) -> list[float]:
    """Compare with float64's; steps are those of `scan_inputs`, or of any `size`, padding is NaN."""
    r = np.random.default_rng(seed)
    x, dt, b, c, weights = (r.normal(size=(2, T, n)) for n in (WIDE, WIDE, STATES, STATES, WIDE))
    dt = np.nan_to_num(np.asarray(scan_inputs(F32)[1])) if size is None else np.abs(dt) * size
    x, b, c, weights = (jnp.asarray(y, dtype) for y in (x, b, c, weights))
    inputs = x, jnp.asarray(dt, F32), jnp.asarray(RATES, F32), b, c, jnp.asarray(SKIP, F32)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(y, np.float64)) for y in (*inputs, weights)]
        want = [np.asarray(y) for y in jax.jit(jax.grad(scan_loss, range(6)))(*exact, segments)]
    pad = lambda y: jnp.where((segments < 0)[..., None], jnp.nan, y).astype(y.dtype)
    inputs = [pad(y) if y.ndim == 3 else y for y in inputs]
    with tracing_for(platform), ops.use(selective_scan=impl):
        got = scan_gradients(inputs, pad(weights), jnp.asarray(segments))
    return [error(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.matrix  # 20 s each, most of them XLA's
@pytest.mark.parametrize(("dtype", "most"), [(F32, 5e-6), (BF16, 2e-2)], ids=["float32", "bfloat16"])
def test_the_gradient_of_the_selective_scan_equals_float64(dtype, most, interpreted):
    """Of x, dt, a, b, c and d; NaN in padding, of inputs and of what comes back."""
    assert max(scan_gradient_errors(SEGMENTS, dtype)) < most


@pytest.mark.matrix
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(-1, 2), min_size=2 * T, max_size=2 * T), st.integers(0, 9), st.sampled_from([0.1, 1.0, 30.0])
)
def test_the_gradients_of_any_segments_equal_float64(interpreted, segments, seed, size):
    """Of scans and of delta rules: runs of one token and more, which begin anywhere."""
    r = np.random.default_rng(seed)
    segments = np.repeat(np.asarray(segments, np.int32).reshape(2, T), r.integers(1, 9), 1)[:, :T]
    segments[0, 0] = 0  # never nothing at all
    assert max(scan_gradient_errors(segments, F32, seed, size)) < 5e-6
    assert max(delta_gradient_errors(segments, (H,) if seed % 2 else (), F32, seed)) < 5e-6


def ssd_loss(x, dt, a, b, c, d, weights, segments):
    """Sum weights * y, token by token, in the inputs' dtype."""

    def step(state, token):
        x, dt, b, c, start, valid = token
        state = jnp.where(start, 0, state)
        new = state * jnp.exp(dt * a)[:, None, None] + (dt[:, None] * x)[..., None] * b
        return jnp.where(valid, new, state), jnp.where(valid, new @ c[0] + d[:, None] * x, 0)

    def row(*tokens):
        return jax.lax.scan(step, jnp.zeros((N, CHANNELS, H), x.dtype), tokens)[1]

    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (
        jnp.where(segments[..., None, None] >= 0, weights, 0) * jax.vmap(row)(x, dt, b, c, starts, segments >= 0)
    ).sum()


@jax.jit
def ssd_gradients(x, dt, a, b, c, d, weights, segments):
    batch = Packed(jnp.zeros(segments.shape, int), segments)
    y, back = jax.vjp(lambda *inputs: ops.ssd(batch, None, 0, *inputs[:-1], d=inputs[-1])[0], x, dt, a, b, c, d)
    return back(weights.astype(y.dtype))


def ssd_gradient_errors(segments, dtype, seed: int = 0, extreme: bool = True) -> list[float]:
    """Compare with float64's; the second row's steps are extreme, inputs and weights of padding are NaN."""
    r = np.random.default_rng(seed)
    x, b, c, weights = (r.normal(size=(2, T, *n)) for n in ((N, CHANNELS), (1, H), (1, H), (N, CHANNELS)))
    dt = np.exp(r.normal(size=(2, T, N)) - 2)
    if extreme:
        dt[1][r.random((T, N)) < 0.1], dt[1][r.random((T, N)) < 0.05] = 0, 1000
    x, b, c, weights = (jnp.asarray(y, dtype) for y in (x, b / H**0.5, c, weights))
    inputs = x, jnp.asarray(dt, F32), jnp.asarray(A, F32), b, c, jnp.asarray(D, F32)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(y, np.float64)) for y in (*inputs, weights)]
        want = jax.jit(jax.grad(ssd_loss, range(6)))(*exact, segments)
        want = [np.asarray(y) for y in want]
    pad = lambda y: jnp.where((segments < 0).reshape(2, T, *[1] * (y.ndim - 2)), jnp.nan, y).astype(y.dtype)
    inputs = [pad(y) if y.ndim > 1 else y for y in inputs]
    with tracing_for("tpu"), ops.use(ssd="mosaic"):
        got = ssd_gradients(*inputs, pad(weights), jnp.asarray(segments))
    return [error(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "most"), [(F32, 3e-6), pytest.param(BF16, 2e-2, marks=MATRIX)], ids=["float32", "bfloat16"]
)
def test_the_gradient_of_ssd_equals_float64(dtype, most, interpreted):
    """Of x, dt, a, b, c and d; NaN in padding, of inputs and of what comes back."""
    assert max(ssd_gradient_errors(SEGMENTS, dtype)) < most


@pytest.mark.matrix
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-1, 2), min_size=2 * T, max_size=2 * T), st.integers(0, 9))
def test_the_gradient_of_ssd_of_any_segments_equals_float64(interpreted, segments, seed):
    r = np.random.default_rng(seed)
    segments = np.repeat(np.asarray(segments, np.int32).reshape(2, T), r.integers(1, 9), 1)[:, :T]
    segments[0, 0] = 0  # never nothing at all
    assert max(ssd_gradient_errors(segments, F32, seed, extreme=bool(seed % 2))) < 5e-6


@pytest.mark.matrix
@pytest.mark.parametrize("channels", [64, 128])
def test_the_gradient_of_ssd_in_groups_of_heads_is_that_of_the_reference(channels, interpreted, monkeypatch):
    """Two groups of heads, each in two steps of two tiles, of one head or two."""
    heads = 256 // channels
    monkeypatch.setattr(ssd_tpu, "HEADS", heads)
    r = np.random.default_rng(3)
    shapes = (4 * heads, channels), (4 * heads,), (2, H), (2, H), (4 * heads, channels)
    x, dt, b, c, weights = (jnp.asarray(r.normal(size=(2, T, *n)), F32) for n in shapes)
    a, d = (jnp.asarray(r.normal(size=4 * heads), F32) for _ in range(2))
    args = x, jnp.exp(dt - 2), -jnp.exp(a), b / H**0.5, c, d, weights, jnp.asarray(SEGMENTS)
    want = ssd_gradients(*args)
    with tracing_for("tpu"), ops.use(ssd="mosaic"):
        got = ssd_gradients(*args)
    for a, b in zip(got, want, strict=True):
        assert error(a, np.asarray(b, np.float64)) < 5e-6


REASONS = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"dtype": jnp.float16}, "all bfloat16 or all float32"),
    ({"dim": 64}, "heads of 64 and 64 channels"),
    ({"paged": True}, "4 heads, of one token each"),
    pytest.param({}, None, marks=pytest.mark.of_cpu("with --target the references are named")),
]


@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_for_the_delta_rule_says_what_it_cannot_serve(call, reason):
    """What it serves it gets, on TPUs."""
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct((1, 256, 4, *sizes), dtype)
    x = shape(call.get("dtype", BF16), call.get("dim", H))
    args = (None, 0, x, x, x, shape(F32), shape(F32))
    tokens = jnp.zeros((1, 256), int)
    batch = ops.paged([(0, 0, [0])], np.zeros((1, 1), int))[1] if "paged" in call else ops.packed(tokens)
    with tracing_for(call.get("platform", "tpu")):
        if reason is None:
            assert "mosaic: chosen" in ops.explain(ops.gated_delta_rule, batch, *args)
        else:
            assert reason in gated_delta_rule_tpu.unsupported(batch, *args)


SSD_REASONS = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"states": 64}, "64 channels and 64 states"),
    ({"channels": 24}, "24 channels and 128 states"),
    ({"heads": 3}, "3 heads of 64 channels in 1 groups"),
    pytest.param({}, None, marks=pytest.mark.of_cpu("with --target the references are named")),
]


@pytest.mark.parametrize(("call", "reason"), SSD_REASONS, ids=str)
def test_the_kernel_for_ssd_says_what_it_cannot_serve(call, reason):
    shape = lambda *sizes: jax.ShapeDtypeStruct((1, 256, *sizes), BF16)
    heads, states = call.get("heads", 4), call.get("states", 128)
    b, a = shape(1, states), jax.ShapeDtypeStruct((heads,), F32)
    args = (
        ops.packed(jnp.zeros((1, 256), int)),
        None,
        0,
        shape(heads, call.get("channels", 64)),
        shape(heads),
        a,
        b,
        b,
    )
    with tracing_for(call.get("platform", "tpu")):
        if reason is None:
            assert "mosaic: chosen" in ops.explain(ops.ssd, *args)
        else:
            assert reason in ssd_tpu.unsupported(*args)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"channels": 192}, "192 channels of 16 states"),
        ({"states": 8}, "128 channels of 8 states"),
        pytest.param({}, None, marks=pytest.mark.of_cpu("with --target the references are named")),
    ],
    ids=str,
)
def test_the_kernel_for_selective_scans_says_what_it_cannot_serve(call, reason):
    channels, states = call.get("channels", 128), call.get("states", 16)
    shape = lambda n: jax.ShapeDtypeStruct((1, 256, n), BF16)
    x, a, b = shape(channels), jax.ShapeDtypeStruct((channels, states), F32), shape(states)
    args = (ops.packed(jnp.zeros((1, 256), int)), None, 0, x, x, a, b, b)
    with tracing_for("tpu"):
        if reason is None:
            assert "mosaic: chosen" in ops.explain(ops.selective_scan, *args)
        else:
            assert reason in selective_scan_tpu.unsupported(*args)


HOPPER_REASONS = [
    ({"channels": 192}, "192 channels of 16 states"),
    ({"states": 32}, "128 channels of 32 states"),
    ({"dtype": jnp.float16}, "all bfloat16 or all float32"),
    ({"dt": BF16}, "dt is float32"),
    ({"paged": True}, "slots.ssm of shape"),
    ({"platform": "tpu"}, "written for NVIDIA GPUs"),
    ({}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), HOPPER_REASONS, ids=str)
def test_the_kernel_for_selective_scans_on_hopper_says_what_it_cannot_serve(call, reason):
    """Of training rows; it is taken only where it is named."""
    channels, states = call.get("channels", 128), call.get("states", 16)
    shape = lambda n, dtype=None: jax.ShapeDtypeStruct((1, 256, n), dtype or call.get("dtype", BF16))
    x, dt, b = shape(channels), shape(channels, call.get("dt", F32)), shape(states)
    batch = ops.packed(jnp.zeros((1, 256), int))
    if "paged" in call:
        batch = ops.paged([(0, 0, [0])], np.zeros((1, 1), int))[1]
    args = batch, None, 0, x, dt, jax.ShapeDtypeStruct((channels, states), F32), b, b
    with tracing_for(call.get("platform", "gpu")):
        if reason is None:
            assert "hopper: the device is not known" in ops.explain(ops.selective_scan, *args)
            with ops.use(selective_scan="hopper"):
                assert "hopper: chosen" in ops.explain(ops.selective_scan, *args)
        else:
            assert reason in selective_scan_gpu.unsupported(*args)
