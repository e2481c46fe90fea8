"""The TPU kernels for recurrences over Paged batches, interpreted, against float64."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from fdel import ops
from fdel.kernels import gated_delta_rule_tpu
from fdel.ops.batch import Paged, Slots, State
from fdel.ops.carry import Carry
from fdel.ops.platform import tracing_for

N, H, CHANNELS, STATES = 8, 128, 64, 16  # heads; channels of a delta rule's and states of ssd; of ssd; states of a scan
R = np.random.default_rng(5)
A, D, RATES, SKIP = -R.uniform(0.1, 4, N), R.normal(size=N), -np.exp(R.normal(size=(H, STATES))), R.normal(size=H)
F32, BF16, MATRIX = jnp.float32, jnp.bfloat16, pytest.mark.matrix


@dataclass(frozen=True)
class Case:
    """An operation: its arrays of tokens (the last of float32), a step in float64, the state, and what is no token's."""

    op: str
    inputs: Any
    step: Any
    state: tuple[int, ...]
    floats: tuple[int, ...]
    rest: tuple[np.ndarray, ...] = ()


def delta_inputs(r, t: int, gate: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in r.normal(size=(2, t, N, H)))
    return q, k, r.normal(size=(t, N, H)), -np.exp(r.normal(size=(t, N, *gate)) * 2 - 2), r.uniform(0, 1, (t, N))


def delta_step(state, q, k, v, g, beta):
    state = state * np.exp(g).reshape(N, -1, 1)
    delta = beta[:, None] * (v - np.einsum("nk,nkv->nv", k, state))
    state = state + k[:, :, None] * delta[:, None]
    return state, np.einsum("nk,nkv->nv", q, state)


def ssd_inputs(r, t: int) -> tuple[np.ndarray, ...]:
    b, c = r.normal(size=(2, t, 1, H))
    return r.normal(size=(t, N, CHANNELS)), np.exp(r.normal(size=(t, N)) - 2), b / H**0.5, c


def ssd_step(state, x, dt, b, c):
    state = state * np.exp(dt * A)[:, None, None] + (dt[:, None] * x)[..., None] * b
    return state, state @ c[0] + D[:, None] * x


def scan_inputs(r, t: int) -> tuple[np.ndarray, ...]:
    return r.normal(size=(t, H)), np.exp(r.normal(size=(t, H)) - 2), *r.normal(size=(2, t, STATES))


def scan_step(state, x, dt, b, c):
    state = np.exp(dt[:, None] * RATES) * state + (dt * x)[:, None] * b
    return state, state @ c + SKIP * x


CASES = {
    "head": Case("gated_delta_rule", lambda r, t: delta_inputs(r, t, ()), delta_step, (N, H, H), (3, 4)),
    "channel": Case("gated_delta_rule", lambda r, t: delta_inputs(r, t, (H,)), delta_step, (N, H, H), (3, 4)),
    "ssd": Case("ssd", ssd_inputs, ssd_step, (N, CHANNELS, H), (1,), (A, D)),
    "scan": Case("selective_scan", scan_inputs, scan_step, (H, STATES), (1,), (RATES, SKIP)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(case: str, impl: str, batch: Paged, states: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
    """Call an operation in layer 1."""
    about, carry = CASES[case], Carry(State(slots=Slots(None, states)))
    with tracing_for("tpu"), ops.use(**{about.op: impl}):
        if about.rest:
            a, d = (jnp.asarray(x, F32) for x in about.rest)
            y, carry = getattr(ops, about.op)(batch, carry, 1, *inputs[:2], a, *inputs[2:], d=d)
        else:
            y, carry = getattr(ops, about.op)(batch, carry, 1, *inputs)
    return y, carry.slots.ssm


def serve(case: str, calls: list, sequences: list, dtype, impl: str = "mosaic") -> tuple[list[np.ndarray], np.ndarray]:
    """Run calls (block, size, pieces of sequences in order): all outputs of each sequence, and the states after all.

    Sequence i has slot i. Padding and slots hold NaN at first.
    """
    about = CASES[case]
    states, at = jnp.full((2, len(sequences) + 2, *about.state), jnp.nan), [0] * len(sequences)
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    for block, size, pieces in calls:
        _, batch = ops.paged(
            [(i, 0, [0] * n) for i, n in pieces], np.zeros((len(sequences) + 2, 1)), block=block, size=size
        )
        positions, places, first = batch.positions.copy(), [], 0
        inputs = [np.full((size, *x.shape[1:]), np.nan) for x in sequences[0]]
        for i, n in pieces:
            here, there = slice(first, first + n), slice(at[i], at[i] + n)
            positions[here] = np.arange(at[i], at[i] + n)
            for x, source in zip(inputs, sequences[i], strict=True):
                x[here] = source[there]
            places.append((i, here))
            at[i], first = at[i] + n, first + -(-n // block) * block
        batch = Paged(positions, batch.page_table, batch.rows, block)
        flat = tuple(jnp.asarray(x, F32 if j in about.floats else dtype) for j, x in enumerate(inputs))
        y, states = run(case, impl, batch, states, flat)
        y = np.array(y, np.float64)
        assert np.isfinite(y).all()
        for i, here in places:
            found[i].append(y[here].copy())
            y[here] = 0
        assert (y[np.repeat(batch.rows, block) >= len(sequences)] == 0).all()
    return [np.concatenate(x) for x in found], np.asarray(states, np.float64)


def recurrence(case: str, sequence: tuple, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Run one sequence in float64, from rounded inputs: outputs and the state at its end."""
    about, out = CASES[case], []
    rounded = [
        np.asarray(jnp.asarray(x, F32 if j in about.floats else dtype), np.float64) for j, x in enumerate(sequence)
    ]
    state = np.zeros(about.state)
    for token in zip(*rounded, strict=True):
        state, y = about.step(state, *token)
        out.append(y)
    return np.stack(out), state


def error(got, want) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.fixture
def interpreted(monkeypatch):
    """One head in a step: a sequence's state has several parts."""
    monkeypatch.setattr(gated_delta_rule_tpu, "HEADS", {True: 1, False: 1})
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


# Blocks of 32: a chunk has four of one sequence. Pieces shorter than a block, of several chunks, none at
# all, and one between others'.
PIECES = [
    (32, 512, [(0, 150), (1, 5), (2, 64)]),
    (32, 512, []),
    (32, 512, [(1, 40), (0, 33), (2, 1), (0, 20)]),
    (64, 256, [(2, 66)]),
]
DECODED = [(1, 5, []), (1, 5, [(2, 1), (0, 1)]), (1, 5, [(0, 1), (1, 1), (2, 1)])]
LENGTHS = 205, 46, 133


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype", "most"),
    [
        ("ssd", F32, 2e-6),
        *[pytest.param(case, F32, 2e-6, marks=MATRIX) for case in ("head", "channel", "scan")],
        *[pytest.param(case, BF16, 1e-2, marks=MATRIX) for case in CASES],
    ],
)
def test_prefill_in_pieces_and_decoding_equal_float64(case, dtype, most, interpreted):
    """NaN in padding, in slots before a sequence begins, and in those of nobody (seen: 5e-7)."""
    r = np.random.default_rng(0)
    sequences = [CASES[case].inputs(r, n) for n in LENGTHS]
    got, states = serve(case, PIECES + DECODED, sequences, dtype)
    for i, sequence in enumerate(sequences):
        want, state = recurrence(case, sequence, dtype)
        assert error(got[i], want) < most and error(states[1, i], state) < most
    assert np.isnan(states[0]).all() and np.isnan(states[1, len(LENGTHS) :]).all()
