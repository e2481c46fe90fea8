"""Attention over rows divided between devices: values and gradients are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import ops
from fdel.ops import flash, ring
from fdel.ops.batch import Packed
from fdel.params.mesh import make_mesh
from tests.ops.test_attention import VARIANTS, case, f32

CASES = [
    *(({"sp": 8}, 24, variant, "ring") for variant in VARIANTS),
    ({"sp": 2, "tp": 2, "dp": 2}, 40, "everything", "ring"),
    ({"sp": 8}, 48, "causal", "ring"),  # an even number of tokens per device: halves are exchanged
    ({"sp": 4, "dp": 2}, 40, "alibi", "ring"),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape,length,variant,impl", CASES)
def test_divided_rows_equal_the_formula_and_one_devices_gradients(shape, length, variant, impl):
    mask, qkv, segments, sinks, alibi, want = case(variant, length)
    weight = f32(np.random.default_rng(1).normal(size=want.shape))
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))

    def value(q, k, v, sinks, name):
        out = ops.attend(batch, None, 0, q, k, v, mask=mask, sinks=sinks, alibi=f32(alibi), impl=name)[0]
        return (out * weight).sum(), out

    args = (*map(f32, qkv), f32(sinks))
    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    run = lambda name: jax.jit(jax.grad(lambda *a: value(*a, name), argnums, has_aux=True))
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        rows = lambda x: jax.device_put(x, NamedSharding(mesh, P("dp", "sp", "tp")))
        grads, out = run(impl)(*map(rows, args[:3]), args[3])
    np.testing.assert_allclose(out, want, atol=2e-6)
    for a, b in zip(grads, run("dense")(*args)[0], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_no_device_holds_all_keys_in_a_ring():
    """The ring's program moves an eighth of the keys at a time, forward and backward, and gathers none."""
    mesh = make_mesh({"sp": 8})
    q = jax.ShapeDtypeStruct((1, 1024, 4, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, "sp")))
    batch = Packed(jnp.zeros((1, 1024), int), jnp.zeros((1, 1024), int))

    def text(impl):
        f = lambda q, k, v: ops.attend(batch, None, 0, q, k, v, mask=ops.Mask(1.0), impl=impl)[0].sum()
        return jax.jit(jax.grad(f, (0, 1, 2))).lower(q, q, q).compile().as_text()

    with jax.set_mesh(mesh):
        assert "all-gather" in text("dense")
        assert "all-gather" not in text("ring") and "collective-permute" in text("ring")
        text = ops.explain(ops.attend, batch, None, 0, q, q, q, mask=ops.Mask(1.0))
        assert text.startswith("attend\n  ring: chosen") and "flash: chosen" in text.partition("attend_part")[2]
    q = jnp.zeros(q.shape)
    assert "ring: no mesh" in ops.explain(ops.attend, batch, None, 0, q, q, q, mask=ops.Mask(1.0))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_every_half_of_the_row_has_one_place(devices):
    """Halves go where `starts` says, each device gets one of each parity, and `collect` sends them home."""
    circle = ring.Circle(devices, 2, 5)
    held = [[h for h, (_, to) in zip(range(i, 2 * devices, 2), circle._route(i), strict=True) if to == d]
            for d in range(devices) for i in (0, 1)]  # fmt: skip
    starts = np.concatenate([circle.starts(jnp.int32(d)) for d in range(devices)])
    assert [[s // 5] for s in starts.tolist()] == held
    assert sorted(starts // 5) == list(range(2 * devices))


def test_work_is_even_along_a_causal_ring():
    """Pairs of blocks that the slowest device computes, added up over hops: half of what consecutive tokens would cost."""

    def slowest(pieces, n=8, tokens=512, block=64):
        circle = ring.Circle(n, pieces, tokens // pieces)
        blocks = circle.length // block
        ranges = lambda q, k: (x // block for x in flash.span(q - k, block, ops.Mask(1.0).reach, circle.length))
        firsts = [
            [s + i * block for s in circle.starts(jnp.int32(d)).tolist() for i in range(blocks)] for d in range(n)
        ]
        keys = [circle.starts(jnp.int32(d)).tolist() for d in range(n)]
        count = lambda d, e: sum(h - low for q in firsts[d] for k in keys[e] for low, h in [ranges(q, k)])
        return [max(count(d, (d - hop) % n) for d in range(n)) for hop in range(n)]

    consecutive, exchanged = slowest(1), slowest(2)
    assert consecutive == [36] + [64] * 7
    assert exchanged == [36] + [32] * 7
