"""The TPU kernels for attention in training batches, interpreted, with a detector of races, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from fdel import ops
from fdel.kernels import flash_attention_tpu as kernel
from fdel.ops.batch import Packed
from fdel.ops.mask import Mask, Where
from fdel.ops.platform import tracing_for
from tests.ops.flash_cases import OUTPUTS, Drawn, error, errors

SINGLE = jnp.float32
# Query heads, key heads, channels of keys and of values, tokens, begins of sequences; see `flash_cases.Drawn`.
CASES = [
    Drawn(4, 2, 64, 64, 140, (0, 30, 75), Mask(0.2, window=50, softcap=15.0), sinks=True, dtype=SINGLE),
    Drawn(2, 1, 64, 64, 256, (0, 64), Mask(0.1), parts=2, hidden=True, dtype=SINGLE),
    Drawn(2, 1, 64, 64, 200, (0, 64), Mask(0.2, causal=False), hidden=True, sinks=True, dtype=SINGLE),
    Drawn(3, 1, 64, 64, 150, (0, 90), Mask(0.1, window=50), ahead=True, dtype=SINGLE),
    Drawn(4, 2, 192, 128, 300, (0, 70, 75, 130), Mask(0.1, window=60), sinks=True, dtype=SINGLE),
    Drawn(2, 2, 256, 256, 140, (0,), Mask(0.06), dtype=jnp.bfloat16),
    Drawn(16, 1, 64, 64, 130, (0, 60), Mask(0.1), dtype=SINGLE),  # query heads of a key head in two programs
]
MATRIX = functools.partial(pytest.param, marks=pytest.mark.matrix)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, capfd):
    """Interpret the kernels, in small tiles; no test may have a race."""
    monkeypatch.setattr(kernel, "TILE", (128, 128))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("case", [4, *map(MATRIX, (0, 1, 2, 3, *range(5, len(OUTPUTS))))])
def test_outputs_equal_float64(case):
    """A key with huge scores stands where nobody sees it: 2e-5 of values near 1 in float32 (seen: 3e-6)."""
    assert max(error(OUTPUTS[case], kernel.forward, SINGLE)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1, *map(MATRIX, range(2, len(CASES)))])
def test_outputs_and_gradients_equal_float64(case):
    """Of q, k, v and sinks, with cotangents of the log-sum-exps, of each part of a row too."""
    found = errors(CASES[case], kernel.backward, kernel.forward)
    assert len(found) >= 5 and max(found) < (2e-5 if CASES[case].dtype == SINGLE else 2e-2)


def test_tiles_that_do_not_meet_are_not_walked():
    """Of a row of many sequences, those on the diagonal; the list is as long as its bound where the mask alone decides."""
    q, k = jnp.zeros((1, 1024, 2, 64)), jnp.zeros((1, 1024, 2, 64))
    one, many = (jnp.repeat(jnp.arange(n, dtype=jnp.int32), 1024 // n)[None] for n in (1, 8))
    for of_keys in (False, True):
        for segments, pairs in ((one, 36), (many, 8)):
            walk = kernel._walked(Mask(0.1), Where(segments), q, k, of_keys)[0]
            owner, partner = (np.asarray(x[: int(walk.total)]) for x in (walk.owner, walk.partner))
            assert int(walk.total) == pairs and len(walk.owner) == 36
            first, last = (np.flatnonzero(partner & flag) for flag in (1, 2))
            assert (owner[first] == range(8)).all() and (owner[last] == range(8)).all()
            assert ((owner >= partner >> 3) if not of_keys else (owner <= partner >> 3)).all()
            assert not (partner[owner == partner >> 3] & 4).any()  # of a diagonal one nothing is seen wholly


REASONS = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"dtype": jnp.float16}, "it attends in bfloat16 and float32"),
    ({"dim": 80}, "heads of 80 and 80 channels"),
    ({"dim": 320}, "of at most 256"),
    ({"alibi": jnp.ones(4)}, "alibi slopes"),
    ({"bias": jnp.ones((4, 256, 256))}, "a bias"),
    ({"length": 2**16}, "up to 131328 pairs of tiles; expected at most 65536"),
    ({}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_says_what_it_cannot_serve(call, reason):
    length, dtype, dim = call.get("length", 256), call.get("dtype", jnp.bfloat16), call.get("dim", 64)
    x, batch = jax.ShapeDtypeStruct((1, length, 4, dim), dtype), ops.packed(jnp.zeros((1, length), int))
    given = {name: call[name] for name in ("alibi", "bias") if name in call}
    with tracing_for(call.get("platform", "tpu")), ops.use(attend="mosaic"):
        explain = lambda: ops.explain(ops.attend, batch, None, 0, x, x, x, mask=Mask(0.1), **given)
        if reason is None:
            assert "mosaic: chosen" in explain()
        else:
            with pytest.raises(ValueError, match=reason):
                explain()


@pytest.mark.of_cpu("with --target the references are named")
def test_it_is_taken_where_splash_cannot_serve():
    """Keys with segments of their own, rows that are no multiple of 128; splash comes first where it can."""
    call = lambda n, keys: Packed(jnp.zeros((1, n), int), jnp.zeros((1, n), int), keys)
    for n, keys, expected in ((256, None, "splash"), (256, jnp.zeros((1, 256), int), "mosaic"), (200, None, "mosaic")):
        x = jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16)
        with tracing_for("tpu"):
            assert f"{expected}: chosen" in ops.explain(ops.attend, call(n, keys), None, 0, x, x, x, mask=Mask(0.1))
