"""What host and device hand each other comes back as it was packed, and what is no call is refused."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.serve.engine import packing
from fdel.serve.engine.packing import Call, Decode, Drawn, Extend, Out
from fdel.serve.engine.rows import Rows
from fdel.serve.engine.sampling import sampling_rows
from fdel.serve.engine.step import admit

rng = np.random.default_rng(0)


@pytest.mark.parametrize("kind", [Extend, Decode])
def test_a_plan_is_unpacked_as_it_was_packed(kind: type) -> None:
    """On the host and under jit; spare lines name a row and pages that do not exist, and nothing else."""
    plan = kind(*rng.integers(0, 9, (len(kind._fields) - 1, 3)), rng.integers(0, 9, (3, 5)))
    packed = packing.pack_plan(plan, 7, 4)
    assert packed.dtype == np.int32 and packed.shape == (7, len(kind._fields) + 4)
    for unpacked in (packing.unpack_plan(kind, packed), jax.jit(lambda x: packing.unpack_plan(kind, x))(packed)):
        for field, want, got in zip(kind._fields, plan, unpacked, strict=True):
            np.testing.assert_array_equal(got[:3], want)
            np.testing.assert_array_equal(got[3:], {"row": 4, "pages": packing.NOWHERE}.get(field, 0))


def test_columns_stand_where_the_table_says() -> None:
    plan = Extend(*(np.array([i]) for i in (1, 2, 3, 4, 5)), np.array([[6, 7]]))
    assert packing.pack_plan(plan, 1, 9).tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert packing.pack_plan(Decode(np.array([1]), np.array([2]), np.array([[3]])), 1, 9).tolist() == [[1, 2, 3]]


def test_admissions_are_unpacked_as_they_were_packed() -> None:
    """Every field of two rows comes back, bit for bit; a spare line names a row that does not exist, and changes none."""
    drawn = lambda x: (rng.integers(0, 2**31, x.shape) if x.dtype != bool else rng.integers(0, 2, x.shape)).astype(
        x.dtype
    )
    asked = jax.tree.map(drawn, sampling_rows([], [], [], [], vocab=40, rows=5))
    again = jax.jit(lambda x: packing.unpack_bits(x, asked))(packing.pack_bits(asked))
    jax.tree.map(np.testing.assert_array_equal, again, asked)
    blank = Rows(
        np.zeros((5, 8), np.int32),
        np.zeros(5, np.int32),
        np.zeros(5, bool),
        packing.pack_bits(asked),
        *[-np.ones(5, np.int32)] * 2,
    )
    every, some = (jax.tree.map(drawn, blank) for _ in range(2))
    one = lambda i: jax.tree.map(lambda x: x[i : i + 1], some)
    packed = packing.pack_admissions([(3, one(0)), (1, one(1))], every, 4)
    assert packed.dtype == np.int32 and packed[:, 0].tolist() == [3, 1, 5, 5]
    rows = jax.jit(admit)(every, packed)
    for before, new, after in zip(*map(jax.tree.leaves, (every, some, rows)), strict=True):
        want = before.copy()
        want[[3, 1]] = new[:2]
        np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("k", [1, 4])
def test_what_was_drawn_is_unpacked_as_it_was_packed(k: int) -> None:
    """Floats bit by bit, NaN and infinities too; tokens behind the length are left out."""
    floats = rng.normal(size=(3, 5, k)).astype(np.float32)
    floats[0, 0], floats[1, 1], floats[1, 2] = np.nan, -np.inf, -0.0
    drawn = Drawn(rng.integers(0, k + 1, 5), rng.integers(0, 999, (5, k)), *floats)
    packed = np.asarray(jax.jit(packing.pack_drawn)(jax.tree.map(jnp.asarray, drawn)))
    assert packed.shape == (5, 1 + 4 * k)
    for want, got in zip(drawn, packing.unpack_drawn(packed), strict=True):
        np.testing.assert_array_equal(got, want)
    ids, logprobs = rng.integers(0, 999, (5 * k, 3)), rng.normal(size=(5 * k, 3))
    for likely in (False, True):
        lines = packing.unpack_out(Out(packed, ids, logprobs), likely)
        assert [len(line) for line in lines] == drawn.length.tolist()
        for i, line in enumerate(lines):
            for j, (token, *three, top) in enumerate(line):
                assert token == drawn.tokens[i, j]
                np.testing.assert_array_equal(three, floats[:, i, j])
                want = zip(ids[i * k + j].tolist(), logprobs[i * k + j].tolist(), strict=True)
                assert list(top) == (list(want) if likely else [])


def test_a_call_arrives_as_it_was_sent() -> None:
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.float32(0.5),
        np.array([True, False]),
        np.zeros((0, 4), "u4"),
    ]
    name, got, adapter, static = packing.unpack_call(packing.pack_call(Call("extend", arrays, "a", {"block": 32})))
    assert (name, adapter, static) == ("extend", "a", {"block": 32})
    for a, b in zip(arrays, got, strict=True):
        assert np.asarray(a).dtype == b.dtype and np.asarray(a).shape == b.shape
        np.testing.assert_array_equal(a, b)


def message(name: str, about: dict, body: bytes = b"") -> bytes:
    """What `pack_call` writes of a call without arguments, with these arrays beside it."""
    text = json.dumps([name, "", {}]).encode()
    every = {"call": {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}}
    for key, (dtype, shape, size) in about.items():
        every[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(text), len(text) + size]}
    header = json.dumps(every).encode()
    return struct.pack("<Q", len(header)) + header + text + body


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("extend", {"0": ("object", [1], 8)}, b"12345678"), "no call .*object"),
        (("extend", {"0": ("I32", [3], 4)}, b"1234"), "no call"),
        (("extend", {"0": ("I32", [3], 12)}, b"1234"), "no call"),
        (("extend", {"0": ("I32", [1], 4)}, b"12345678"), "no call"),
        (("extend", {"1": ("I32", [1], 4)}, b"1234"), "no call .*'0'"),
        (("__class__", {}), "'__class__'; expected one of begin, "),
    ],
)
def test_what_is_no_call_is_refused(given: tuple, said: str) -> None:
    assert packing.unpack_call(message("extend", {"0": ("I32", [1], 4)}, b"1234")).arrays[0].shape == (1,)
    with pytest.raises(ValueError, match=said):
        packing.unpack_call(message(*given))
