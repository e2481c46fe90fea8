"""The Hopper kernel for attention in training batches, interpreted, against float64: see `interpreted_flash`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from fdel import ops
from fdel.kernels import flash_tiles as tiles
from fdel.ops import mask as M
from fdel.ops.mask import HIDDEN, Mask, Where
from fdel.ops.platform import tracing_for
from tests.ops.test_kernels import interpret

MATRIX = pytest.mark.matrix
SOME = [("0",), pytest.param((), marks=MATRIX)]  # segments, a window, softcap, sinks and grouped heads; all cases


@pytest.mark.slow
@pytest.mark.parametrize("cases", SOME, ids=["one", "all"])
def test_attention_on_hopper_equals_float64(cases):
    """Outputs in bfloat16 (seen: 5.2e-3 of values near 1) and log-sum-exps (seen: 4e-6), no race."""
    done = interpret("flash", *cases)
    assert done.returncode == 0, done.stderr
    found = np.array([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    assert len(found) and found[:, 0].max() < 1e-2 and found[:, 1].max() < 1e-5
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.slow
@MATRIX
def test_a_race_planted_in_attention_is_found():
    done = interpret("flash", "race")
    assert "RACE DETECTED" in done.stdout + done.stderr


def rows(r: np.random.Generator, n: int) -> np.ndarray:
    """Two packed rows with padding at their ends."""
    return np.where(np.arange(n) > n - r.integers(0, 20), -1, np.sort(r.integers(0, 4, (2, n)), 1))


SIDES = ["one row", "parts", "hidden keys", "prompts", "ahead"]


@pytest.mark.parametrize(
    "mask", [Mask(1.0), Mask(1.0, window=20), Mask(1.0, causal=False)], ids=["causal", "window", "all"]
)
@pytest.mark.parametrize("kind", SIDES)
def test_tiles_that_meet_are_those_with_a_key_that_is_seen(mask, kind):
    """By `mask.visible`: none is left out, those called whole are, and rows whose ids rise walk none in vain."""
    r, size = np.random.default_rng(SIDES.index(kind)), tiles.Tiles(16, 8)
    t, s = (90, 140) if kind == "parts" else (130, 130)
    qs = rows(r, t)
    ks = rows(r, s) if kind == "parts" else np.where(r.random(qs.shape) < 0.1 * (kind == "hidden keys"), HIDDEN, qs)
    qs = np.stack([qs, np.where(qs > 0, qs - 1, -2)], -1) if kind == "prompts" else qs
    ahead = jnp.asarray(r.integers(0, 5, (2, t))) if kind == "ahead" else None
    starts = (jnp.int32(100), jnp.int32(40)) if kind == "parts" else (None, None)
    where = Where(jnp.asarray(qs), jnp.asarray(ks), *starts, ahead)
    qi, ki = (start + jnp.arange(n) for start, n in zip(where.starts, (t, s), strict=True))
    numbers, segments = tiles.sight(mask, where, t, s, size)
    shape = (2, numbers.shape[2] // 16, 16, segments.shape[1] // 8, 8)
    seen, whole = np.zeros((2, 2, shape[1] * 16, shape[3] * 8), bool)
    seen[:, :t, :s] = M.visible(mask, qi, ki, *where.sides, ahead)
    whole[:, :t, :s], whole[:, t:, :s] = seen[:, :t, :s], True  # queries that fill a tile may see what they like
    meet, whole = seen.reshape(shape).any((2, 4)), whole.reshape(shape).all((2, 4))
    for axis in (1, 2):
        at = np.arange(meet.shape[3 - axis])
        of = [np.asarray(x)[..., None] for x in np.moveaxis(tiles.ranges(numbers, segments, size, axis == 2), -1, 0)]
        walked, plain = (at >= of[0]) & (at < of[3]), (at >= of[1]) & (at < of[2])
        there = meet if axis == 1 else meet.swapaxes(1, 2)
        assert not (there & ~walked).any() and not (plain & ~(whole if axis == 1 else whole.swapaxes(1, 2))).any()
        assert (
            not (plain & ~walked).any() and (of[0] <= of[1]).all() and (of[1] <= of[2]).all() and (of[2] <= of[3]).all()
        )
        assert kind != "one row" or (walked == there).all()


REASONS = [
    ({"platform": "tpu"}, "written for NVIDIA GPUs"),
    ({"dtype": jnp.float32}, "it attends in bfloat16 and float16"),
    ({"dim": 80}, "heads of 80 and 80 channels"),
    ({"alibi": jnp.ones(4)}, "alibi slopes"),
    ({"bias": jnp.ones((4, 256, 256))}, "a bias"),
    ({"mask": Mask(-1.0)}, "scores times -1.0"),
    ({}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_for_attention_on_hopper_says_what_it_cannot_serve(call, reason):
    """On a GPU of which no more is known it is taken where it is named alone; sinks and a softcap it has."""
    call = {"platform": "gpu", "dtype": jnp.bfloat16, "dim": 128, "mask": Mask(0.1, window=9, softcap=20.0), **call}
    x = jax.ShapeDtypeStruct((1, 256, 4, call.pop("dim")), call.pop("dtype"))
    batch, platform = ops.packed(jnp.zeros((1, 256), int)), call.pop("platform")
    explain = lambda: ops.explain(ops.attend, batch, None, 0, x, x, x, sinks=jnp.ones(4), **call)
    with tracing_for(platform):
        if reason is None:
            assert "flash: chosen" in explain()
        with ops.use(attend="hopper"):
            if reason is None:
                assert "hopper: chosen" in explain()
            else:
                with pytest.raises(ValueError, match=reason):
                    explain()


@pytest.mark.of_cpu("with --target the references are named")
def test_a_ring_takes_the_kernel_for_its_parts_where_it_is_named():
    x = jax.ShapeDtypeStruct((1, 256, 4, 128), jnp.bfloat16)
    mesh = AbstractMesh((2,), ("sp",), (AxisType.Auto,))
    run = lambda: ops.explain(ops.attend, ops.packed(jnp.zeros((1, 256), int)), None, 0, x, x, x, mask=Mask(0.1))
    with jax.sharding.use_abstract_mesh(mesh), tracing_for("gpu"):
        parts = run().partition("attend_part")[2]
        assert parts.count("`use` can name it") == 2 and "flash: chosen" in parts
        for name in ("hopper", "hopper_ordered"):
            with ops.use(attend_part=name):
                assert f"{name}: chosen" in run()
