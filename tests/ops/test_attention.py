"""Attention against float64 numpy written from the formula; masked keys carry huge scores, so that a leak shows."""

import contextlib
import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.batch import Packed, Pages
from fdel.ops.flash import Schedule, flash_attention
from fdel.ops.mask import HIDDEN, Mask, Where
from fdel.params import init
from fdel.params.mesh import make_mesh
from fdel.params.spec import Param, zeros
from fdel.serve.engine.step import quantized

VARIANTS = {
    "causal": {},
    "window": {"window": 5},
    "window_one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "window": 4},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "everything": {"window": 7, "softcap": 3.0, "sinks": True, "alibi": True},
}


SHORT = pytest.param("short", marks=pytest.mark.of_cpu("short attention is written for CPU"))
BLOCKED = pytest.mark.parametrize(
    "attention",
    [
        lambda q, k, v, s, block, loop=loop, **n: flash_attention(
            q, k, v, Where(s), schedule=Schedule(block, loop), **n
        )[0]
        for loop in (True, False)
    ],
    ids=["flash", "short"],
)


def inputs(t=23, heads=4, kv=2, dim=8, v_dim=6, seed=0):
    r = np.random.default_rng(seed)
    q, k, v = r.normal(size=(2, t, heads, dim)), r.normal(size=(2, t, kv, dim)), r.normal(size=(2, t, kv, v_dim))
    segments = np.stack([np.repeat([0, 1, -1], [9, t - 12, 3]), np.zeros(t, int)])
    return q, k, v, segments, r.normal(size=heads), 0.1 + r.random(heads)


def oracle(q, k, v, segments, mask, sinks=None, alibi=None, bias=None, keys=None, dout=None, prefix=None):
    """Token by token in float64; with dout also the gradients of (q, k, v), derived by hand."""
    out, keys = np.zeros((*q.shape[:3], v.shape[-1])), segments if keys is None else keys
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, i, n in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        h = n // (q.shape[2] // k.shape[2])
        seen = [
            j
            for j in range(k.shape[1])
            if (segments[b, i] == keys[b, j] or (prefix is not None and prefix[b, i] == keys[b, j]))
            and (j <= i or not mask.causal)
            and (mask.window is None or abs(i - j) < mask.window)
        ]
        s, slope = np.array([q[b, i, n] @ k[b, j, h] for j in seen]) * mask.scale, 1
        if mask.softcap:
            s = mask.softcap * np.tanh(s / mask.softcap)
            slope = 1 - (s / mask.softcap) ** 2
        if alibi is not None:
            s = s + alibi[n] * (np.array(seen) - i)
        if bias is not None:
            s = s + bias[n, i, seen]
        total = np.exp(s).sum() + (0 if sinks is None else np.exp(sinks[n]))
        p = np.exp(s) / (total or 1)
        out[b, i, n] = p @ v[b, seen, h]
        if dout is not None:
            ds = p * (v[b, seen, h] @ dout[b, i, n] - out[b, i, n] @ dout[b, i, n]) * slope * mask.scale
            dq[b, i, n] = ds @ k[b, seen, h]
            dk[b, seen, h] += ds[:, None] * q[b, i, n]
            dv[b, seen, h] += p[:, None] * dout[b, i, n]
    return out if dout is None else (out, dq, dk, dv)


def case(variant, t=23):
    spec = dict(VARIANTS[variant])
    q, k, v, segments, sinks, alibi = inputs(t)
    sinks = sinks if spec.pop("sinks", False) else None
    alibi = alibi if spec.pop("alibi", False) else None
    mask = Mask(0.4, **spec)
    return mask, (q, k, v), segments, sinks, alibi, oracle(q, k, v, segments, mask, sinks, alibi)


f32 = lambda x: None if x is None else jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("impl", [SHORT, "flash", "dense"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_equals_the_formula(variant, impl):
    mask, qkv, segments, sinks, alibi, want = case(variant)
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    got, state = ops.attend(batch, None, 0, *map(f32, qkv), mask=mask, sinks=f32(sinks), alibi=f32(alibi), impl=impl)
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert state == ops.Carry()


@pytest.mark.slow
@BLOCKED
@pytest.mark.parametrize("block", [4, 8, 16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_do_not_change_values_or_gradients(variant, block, attention):
    mask, qkv, segments, sinks, alibi, want = case(variant)
    weight = f32(np.random.default_rng(1).normal(size=want.shape))

    def blocked(q, k, v, sinks):
        return attention(q, k, v, jnp.asarray(segments), mask=mask, sinks=sinks, alibi=f32(alibi), block=block)

    def dense(q, k, v, sinks):
        batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
        return ops.attend(batch, None, 0, q, k, v, mask=mask, sinks=sinks, alibi=f32(alibi), impl="dense")[0]

    args = (*map(f32, qkv), f32(sinks))
    np.testing.assert_allclose(blocked(*args), want, atol=2e-6)
    argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    grad = lambda f: jax.grad(lambda *a: (f(*a) * weight).sum(), argnums)(*args)
    for a, b in zip(grad(blocked), grad(dense), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.of_cpu("heads one after the other are for CPU")
def test_rows_without_padding_are_attended_to_head_by_head():
    """In two blocks of queries; segments are not looked at, a causal mask is. Float64 numpy: 2e-6; gradients: 2e-5."""
    q, k, v, *_ = inputs(t=300)
    zeros, dout = np.zeros((2, 300), np.int32), np.random.default_rng(1).normal(size=(2, 300, 4, 6))
    s = np.einsum("btkgh,bskh->bkgts", q.reshape(2, 300, 2, 2, 8), k) * 0.4
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    want = np.einsum("bkgts,bskh->btkgh", p, v).reshape(dout.shape)
    mask, given = Mask(0.4, causal=False), [f32(x) for x in (q, k, v)]
    run = lambda segments, mask: lambda *a: flash_attention(*a, Where(segments, full=True), mask=mask)
    (out, lse), back = jax.vjp(run(zeros, mask), *given)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)).reshape(2, 4, 300).swapaxes(1, 2), atol=2e-6)
    np.testing.assert_array_equal(run(np.tile(np.arange(300), (2, 1)), mask)(*given)[0], out)
    dense = lambda mask: lambda *a: ops.attend(Packed(zeros, zeros), None, 0, *a, mask=mask, impl="dense")[0]
    for got, want in zip(
        back((f32(dout), jnp.zeros_like(lse))), jax.vjp(dense(mask), *given)[1](f32(dout)), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)
    causal = Mask(0.4)
    np.testing.assert_allclose(run(zeros, causal)(*given)[0], dense(causal)(*given), atol=2e-6)


@pytest.mark.of_cpu("XLA:CPU cannot run the products of bfloat16 that other targets take")
@BLOCKED
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block", [16, 64])
def test_half_precision_has_the_gradients_of_float32(attention, dtype, block):
    """XLA:CPU multiplies half precision in some forms alone: 2e-2 of the largest value."""
    mask, qkv, segments, *_ = case("causal", t=64)

    def gradients(dtype):
        args = [f32(x).astype(dtype) for x in qkv]
        loss = lambda *a: (attention(*a, jnp.asarray(segments), mask=mask, block=block).astype(jnp.float32) ** 2).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2)))(*args)

    for got, want in zip(gradients(dtype), gradients(jnp.float32), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2 * np.abs(want).max())


@pytest.mark.slow
def test_log_sum_exp_and_its_gradient():
    mask, qkv, segments, *_ = case("window")
    q, k, v = map(f32, qkv)

    def dense(q, k):
        s = jnp.einsum("btkgh,bskh->btkgs", q.reshape(2, 23, 2, 2, 8), k) * mask.scale
        i = jnp.arange(23)
        seen = (i <= i[:, None]) & (i > i[:, None] - 5) & (segments[:, :, None] == segments[:, None])
        return jax.nn.logsumexp(jnp.where(seen[:, :, None, None], s, -jnp.inf), -1).reshape(2, 23, 4)

    where = Where(jnp.asarray(segments))
    blocked = lambda q, k: flash_attention(q, k, v, where, mask=mask, schedule=Schedule(8))[1]
    np.testing.assert_allclose(blocked(q, k), dense(q, k), atol=2e-6)
    for a, b in zip(
        *(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1))(q, k) for f in (blocked, dense)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


@BLOCKED
def test_a_huge_masked_key_does_not_leak(attention):
    q, k, v, segments, *_ = inputs()
    mask = Mask(1.0)
    before = attention(f32(q), f32(k), f32(v), jnp.asarray(segments), mask=mask, block=8)
    k[:, 20:], v[:, 20:] = 1e6, 1e6
    after = attention(f32(q), f32(k), f32(v), jnp.asarray(segments), mask=mask, block=8)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])


@pytest.mark.slow
@pytest.mark.parametrize("page,block", [(4, 1), (4, 3), (16, 8), (256, 8)])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "bidirectional" not in v])
def test_paged_equals_the_formula(variant, page, block):
    """Two sequences in shuffled pages full of NaN: a long prefill in blocks, then (block 1) single tokens."""
    spec = dict(VARIANTS[variant])
    t = 1200 if page == 256 else 23
    q, k, v, _, sinks, alibi = inputs(t=t)
    sinks, alibi = (sinks if spec.pop("sinks", False) else None), (alibi if spec.pop("alibi", False) else None)
    mask = Mask(0.4, **spec)
    width = -(-t // page)
    table = np.random.default_rng(2).permutation(2 * width + 3)[: 2 * width].reshape(2, width)
    pages = jnp.full((2, 2 * width + 3, 2, page, 8), jnp.nan)
    state = ops.Carry(ops.State(Pages(pages, jnp.full((*pages.shape[:-1], 6), jnp.nan))))
    got = np.zeros((2, t, 4, 6))
    step = jax.jit(
        lambda b, s, q, k, v: ops.attend(b, s, 1, q, k, v, mask=mask, sinks=f32(sinks), alibi=f32(alibi)),
        donate_argnums=1,
    )
    for start in range(0, t, chunk := 1 if block == 1 else 400):
        n = min(chunk, t - start)
        _, batch = ops.paged(
            [(i, start, [0] * n) for i in range(2)], table, block=block, size=2 * -(-n // block) * block + block
        )
        where = np.asarray(batch.positions)
        row = np.repeat([0, 1, 0], [-(-n // block) * block] * 2 + [block])
        pick = lambda x, where=where, row=row: f32(np.where((where >= 0)[:, None, None], x[row, where], np.nan))
        out, state = step(batch, state, pick(q), pick(k), pick(v))
        for i in range(2):
            rows = (row == i) & (where >= 0)
            got[i, where[rows]] = np.asarray(out)[rows]
    sample = slice(t - 23, t)
    if t == 23:
        want = oracle(q, k, v, np.zeros((2, t), int), mask, sinks, alibi)
    else:
        batch = Packed(jnp.zeros((2, t), int), jnp.zeros((2, t), int))
        want = ops.attend(
            batch, None, 0, f32(q), f32(k), f32(v), mask=mask, sinks=f32(sinks), alibi=f32(alibi), impl="dense"
        )[0]
    np.testing.assert_allclose(got[:, sample], np.asarray(want)[:, sample], atol=5e-6)


def test_decode_does_not_copy_the_cache():
    state = ops.Carry(ops.State(Pages(*(jax.ShapeDtypeStruct((4, 64, 2, 64, 32), jnp.float32),) * 2)))
    _, batch = ops.paged([(0, 70, [0])], np.arange(4)[None])
    q, kv = jax.ShapeDtypeStruct((1, 4, 32), jnp.float32), jax.ShapeDtypeStruct((1, 2, 32), jnp.float32)

    def step(b, s, q, k, v):
        for layer in range(4):
            q, s = ops.attend(b, s, layer, q, k + q[:, :2], v + q[:, 2:], mask=Mask(1.0))
        return q, s

    memory = jax.jit(step, donate_argnums=1).lower(batch, state, q, kv, kv).compile().memory_analysis()
    one_layer = 2 * 64 * 2 * 64 * 32 * 4
    assert memory.alias_size_in_bytes >= 4 * one_layer
    assert memory.temp_size_in_bytes < one_layer


@pytest.mark.of_cpu("a TPU takes a kernel that does not run here")
def test_long_inputs_never_hold_all_scores():
    t = 4096
    q = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
    batch = Packed(jnp.zeros((1, t), int), jnp.zeros((1, t), int))
    f = jax.grad(lambda q, k, v: ops.attend(batch, None, 0, q, k, v, mask=Mask(1.0))[0].sum(), (0, 1, 2))
    memory = jax.jit(f).lower(q, q, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * t * t * 4 / 4


@pytest.mark.of_cpu("it tells what a CPU takes")
def test_the_choice_is_explained_and_a_named_one_works_or_raises():
    q, k, v, segments, *_ = map(f32, inputs())
    bias = jnp.zeros((1, 4, 23, 23))
    batch = Packed(segments, segments)
    explain = lambda *a, **k: ops.explain(ops.attend, *a, mask=Mask(1.0), **k)
    text = explain(batch, None, 0, q, k, v, bias=bias)
    assert "flash: an additive bias needs all scores in memory" in text and "dense: chosen" in text
    assert "short: chosen" in explain(batch, None, 0, q, k, v)
    long = jax.ShapeDtypeStruct((1, 1025, 4, 8), jnp.float32)
    text = explain(ops.packed(jnp.zeros((1, 1025), int)), None, 0, long, long, long)
    assert "short: rows of 1025 tokens are longer than 1024" in text and "flash: chosen" in text
    with pytest.raises(ValueError, match="impl='flash' cannot serve this call: an additive bias"):
        ops.attend(batch, None, 0, q, k, v, mask=Mask(1.0), bias=bias, impl="flash")
    with pytest.raises(
        ValueError,
        match="impl='fast' is unknown; .* one of ring, cudnn, hopper, hopper_ordered, splash, mosaic, short, flash, dense",
    ):
        ops.attend(batch, None, 0, q, k, v, mask=Mask(1.0), impl="fast")
    _, paged = ops.paged([(0, 0, [1])], np.zeros((1, 1), int))
    with pytest.raises(ValueError, match="needs state"):
        ops.attend(paged, None, 0, q[0, :1], k[0, :1], v[0, :1], mask=Mask(1.0))


def test_additive_bias_equals_alibi():
    mask, qkv, segments, _, alibi, want = case("alibi")
    i = np.arange(23)
    bias = alibi[:, None, None] * (i[None, :] - i[:, None])
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    got, _ = ops.attend(batch, None, 0, *map(f32, qkv), mask=mask, bias=f32(bias)[None])
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize(("variant", "layer"), [*((v, np.int32(2)) for v in VARIANTS), ("everything", 2)])
def test_watched_weights_equal_the_formula(variant, layer):
    """With the identity as values the formula's output is its weights; layers that nobody chose leave them as they are."""
    mask, (q, k, v), segments, sinks, alibi, want_out = case(variant)
    eye = np.broadcast_to(np.eye(q.shape[1])[:, None], (2, q.shape[1], k.shape[2], q.shape[1]))
    want = oracle(q, k, eye, segments, mask, sinks, alibi).swapaxes(1, 2)
    batch, given = Packed(jnp.zeros(segments.shape, int), segments), dict(sinks=f32(sinks), alibi=f32(alibi))
    carry = ops.Carry(taps=ops.Taps(attention=ops.attention_weights((0, 2), q.shape[2], segments.shape)))
    call = jax.jit(lambda carry, i: ops.attend(batch, carry, i, f32(q), f32(k), f32(v), mask=mask, **given))
    if isinstance(layer, int):  # a list of layers, outside of a scan
        call = lambda carry, i: jax.jit(
            lambda carry: ops.attend(batch, carry, i, f32(q), f32(k), f32(v), mask=mask, **given)
        )(carry)
    out, seen = call(carry, layer)
    np.testing.assert_allclose(seen.taps.attention.values, np.stack([0 * want, want]), atol=2e-6)
    again, same = call(seen, layer - 1)
    np.testing.assert_array_equal(same.taps.attention.values, seen.taps.attention.values)
    for x in (out, again):
        np.testing.assert_allclose(x, want_out, atol=2e-6)


# ---- nothing that a call says is ignored ---------------------------------------------------------------------------

T = 16
CHANGES = {  # each field of Mask and each argument of `attend`, with a value that changes the output
    "scale": 0.9, "causal": False, "window": 3, "softcap": 0.5, "sinks": np.full(4, 2.0), "alibi": np.full(4, 0.4),
    "bias": np.random.default_rng(4).normal(size=(4, T, T)), "impl": "nonesuch", "chunk": 5,
}  # fmt: skip
PACKED_KINDS = {"short": {}, "flash": {}, "dense": {}, "ring": {"sp": 8}}
PACKED = [SHORT if kind == "short" else kind for kind in PACKED_KINDS]
PAGED_KINDS = {"paged": None, "paged int8": "int8", "paged fp8": "fp8"}
REFUSED = {(kind, name) for kind in PAGED_KINDS for name in ("causal", "bias", "impl")}
REFUSED |= {(kind, name) for kind in PACKED_KINDS for name in ("bias", "impl")} - {("dense", "bias")}


def attended(kind, mask, **given):
    """One row of T tokens through one implementation: [T 4 8]."""
    q, k, v, *_ = (x[:1] if i < 3 else x for i, x in enumerate(inputs(t=T, v_dim=8)))
    given = {name: x if isinstance(x, str) else f32(x) for name, x in given.items()}
    if kind in PACKED_KINDS:
        shape = PACKED_KINDS[kind]
        run = jax.jit(lambda *a: ops.attend(batch, None, 0, *a, mask=mask, **({"impl": kind} | given))[0])
        batch = Packed(jnp.arange(T)[None], jnp.zeros((1, T), int))
        with jax.set_mesh(make_mesh(shape)) if shape else contextlib.nullcontext():
            return np.asarray(run(*map(f32, (q, k, v)))[0])
    page = Param("layers pages kv_heads page head_dim", (1, 4, 2, 4, 8), zeros)
    spec = quantized(ops.State(Pages(page, page)), PAGED_KINDS[kind])
    state = ops.Carry(init(spec, jax.random.key(0), dtype=jnp.float32))
    _, batch = ops.paged([(0, 0, [0] * T)], np.arange(4)[None], block=T)
    return np.asarray(ops.attend(batch, state, 0, *(f32(x[0]) for x in (q, k, v)), mask=mask, **given)[0])


def test_the_table_of_changes_is_whole():
    arguments = {"bias", "sinks", "alibi", "impl"}
    assert set(CHANGES) == {f.name for f in dataclasses.fields(Mask)} | arguments
    assert arguments == set(inspect.signature(ops.attend).parameters) - set("qkv") - {"batch", "carry", "layer", "mask"}


@pytest.mark.parametrize("kind", [*PACKED, *PAGED_KINDS])
@pytest.mark.parametrize("name", CHANGES)
def test_each_argument_is_honoured_or_refused(kind, name):
    """Against the formula: 2e-6, keys and values in 8 bits: 0.2."""
    q, k, v, *_ = (x[:1] if i < 3 else x for i, x in enumerate(inputs(t=T, v_dim=8)))
    field = name in {f.name for f in dataclasses.fields(Mask)}
    mask = dataclasses.replace(Mask(0.4), **({name: CHANGES[name]} if field else {}))
    given = {} if field else {name: CHANGES[name]}
    if (kind, name) in REFUSED:
        with pytest.raises(ValueError, match=name):
            attended(kind, mask, **given)
        return
    segments = np.arange(T)[None] // (mask.chunk or T)
    want = oracle(q, k, v, segments, mask, given.get("sinks"), given.get("alibi"), given.get("bias"))[0]
    got, before = attended(kind, mask, **given), attended(kind, Mask(0.4))
    assert np.abs(want - before).max() > 0.25
    np.testing.assert_allclose(got, want, atol=0.2 if "8" in kind else 2e-6)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("variant", ["causal", "window_one", "bidirectional_window", "everything"])
def test_hidden_keys_are_seen_by_no_query(kind, variant):
    """Values and gradients against the formula; with a window of one a hidden key leaves its query nothing to see."""
    mask, (q, k, v), segments, sinks, alibi, _ = case(variant, T)
    keys = np.where((np.random.default_rng(3).random(segments.shape) < 0.5) & (np.arange(T) % 9 > 0), HIDDEN, segments)
    dout = np.random.default_rng(1).normal(size=(*q.shape[:3], v.shape[-1]))
    want, *grads = oracle(q, k, v, segments, mask, sinks, alibi, keys=keys, dout=dout)
    assert np.abs(want - oracle(q, k, v, segments, mask, sinks, alibi)).max() > 0.25
    batch, given = (
        Packed(*(jnp.asarray(x, jnp.int32) for x in (0 * keys, segments, keys))),
        dict(sinks=f32(sinks), alibi=f32(alibi)),
    )
    run = lambda *a: ops.attend(batch, None, 0, *a, mask=mask, impl=kind, **given)[0]
    with jax.set_mesh(make_mesh(PACKED_KINDS[kind])) if PACKED_KINDS[kind] else contextlib.nullcontext():
        got = jax.jit(lambda *a: (run(*a), *jax.vjp(run, *a)[1](f32(dout))))(*map(f32, (q, k, v)))
    for a, b in zip(got, (want, *grads), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)
    if kind == "dense":
        eye = np.broadcast_to(np.eye(T)[:, None], (2, T, k.shape[2], T))
        weights = oracle(q, k, eye, segments, mask, sinks, alibi, keys=keys).swapaxes(1, 2)
        taps = ops.Taps(attention=ops.attention_weights((0,), q.shape[2], segments.shape))
        _, seen = ops.attend(batch, ops.Carry(taps=taps), 0, *map(f32, (q, k, v)), mask=mask, **given)
        np.testing.assert_allclose(seen.taps.attention.values[0], weights, atol=2e-6)


@pytest.mark.parametrize("kind", PACKED)
def test_samples_go_on_from_one_prompt(kind):
    """Segments 1 and 2 see segment 0 too, 4 sees 3; values and gradients against the formula."""
    mask, (q, k, v), _, sinks, *_ = case("sinks", T)
    mask = dataclasses.replace(mask, softcap=2.0)
    segments = np.stack([np.repeat([0, 1, 2, 3, 4, -1], [4, 3, 2, 2, 3, 2]), np.zeros(T, int)])
    prefix = np.select([np.isin(segments, (1, 2)), segments == 4], [0, 3], -2)
    prefix[1] = -2
    dout = np.random.default_rng(1).normal(size=(*q.shape[:3], v.shape[-1]))
    want, *grads = oracle(q, k, v, segments, mask, sinks, dout=dout, prefix=prefix)
    assert np.abs(want - oracle(q, k, v, segments, mask, sinks)).max() > 0.25
    batch = Packed(*(jnp.asarray(x, jnp.int32) for x in (0 * segments, segments)), prefix_ids=jnp.asarray(prefix))
    run = lambda *a, **more: ops.attend(batch, None, 0, *a, mask=mask, impl=kind, sinks=f32(sinks), **more)[0]
    with jax.set_mesh(make_mesh(PACKED_KINDS[kind])) if PACKED_KINDS[kind] else contextlib.nullcontext():
        got = jax.jit(lambda *a: (run(*a), *jax.vjp(run, *a)[1](f32(dout))))(*map(f32, (q, k, v)))
    for a, b in zip(got, (want, *grads), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)
    with pytest.raises(ValueError, match="alibi"):
        run(*map(f32, (q, k, v)), alibi=f32(np.ones(4)))


@pytest.mark.parametrize("change", [{"causal": False}, {"window": 3}, {"chunk": 4}])
def test_what_cannot_go_on_from_a_prompt_says_so(change):
    mask, qkv, segments, *_ = case("causal", T)
    batch = Packed(jnp.zeros((2, T), int), jnp.asarray(segments), prefix_ids=jnp.full((2, T), -2))
    with pytest.raises(ValueError, match=r"Packed.prefix_ids: .*leave prefix_ids out"):
        ops.attend(batch, None, 0, *map(f32, qkv), mask=dataclasses.replace(mask, **change))


@pytest.mark.parametrize("impl", ["flash", SHORT])
def test_blocks_see_no_hidden_key(impl):
    """Rows of several blocks, the last one not full: flash and short as dense, which is the formula."""
    mask, qkv, segments, *_ = case("causal", 300)
    keys = np.where((np.random.default_rng(3).random(segments.shape) < 0.5) & (np.arange(300) > 0), HIDDEN, segments)
    batch = Packed(jnp.zeros(segments.shape, int), segments, keys)
    run = lambda *a, impl: (ops.attend(batch, None, 0, *a, mask=mask, impl=impl)[0] ** 2).sum()
    of = lambda impl: jax.jit(jax.value_and_grad(functools.partial(run, impl=impl), (0, 1, 2)))(*map(f32, qkv))
    for a, b in zip(jax.tree.leaves(of(impl)), jax.tree.leaves(of("dense")), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("field,value", [("window", 0), ("window", -3), ("softcap", 0.0), ("scale", float("nan"))])
def test_a_mask_that_cannot_be_meant_is_refused(field, value):
    with pytest.raises(ValueError, match=f"Mask.{field}={value}"):
        dataclasses.replace(Mask(0.4), **{field: value})


def test_state_that_a_batch_has_no_use_for_is_refused():
    """Pages would stay empty in a Packed call, and weights that are watched unseen in a Paged one."""
    q, k, v, *_ = (f32(x[0, :4]) for x in inputs()[:3])
    _, batch = ops.paged([(0, 0, [0] * 4)], np.arange(1)[None], block=4)
    taps = ops.Taps(attention=ops.attention_weights((0,), 4, (1, 4)))
    with pytest.raises(ValueError, match="taps.attention with a Paged batch"):
        ops.attend(batch, ops.Carry(taps=taps), 0, q, k, v, mask=Mask(0.4))
    with pytest.raises(ValueError, match="needs state, Pages .* found none"):
        ops.attend(batch, None, 0, q, k, v, mask=Mask(0.4))
    with pytest.raises(ValueError, match="Pages.*Paged"):
        state = ops.Carry(ops.State(Pages(jnp.zeros((1, 1, 2, 4, 8)), jnp.zeros((1, 1, 2, 4, 6)))))
        ops.attend(ops.packed(jnp.zeros((1, 4), int)), state, 0, q[None], k[None], v[None], mask=Mask(0.4))
