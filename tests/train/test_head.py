"""The chunked head against full logits in float64 (through `jax.nn`), its memory, its shardings, and the SFT loss."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import ops
from fdel.ops.weights import LowRank, Quantized
from fdel.params import make_mesh, parse_mesh
from fdel.train import losses

B, T, D, V = 2, 7, 16, 37
FIELDS = ("logp", "entropy", "logsumexp", "logsumsq", "mean_logit")


def case(seed: int = 0, *, softcap=None, scale=1.0, bias=False, dtype=np.float32, gain=1.0, temperature=1.0):
    """Random hidden states, a head, labels (three of them ignored) and one cotangent per statistic."""
    r = np.random.default_rng(seed)
    x = gain * r.normal(size=(B, T, D))
    w = r.normal(size=(V, D))
    labels = r.integers(0, V, (B, T))
    labels[0, -1] = labels[1, 2] = -100
    labels[1, 0] = -1
    ct = {k: r.normal(size=(B, T)) for k in FIELDS}
    b = jnp.asarray(r.normal(size=V), dtype) if bias else None
    return jnp.asarray(x, dtype), ops.Head(jnp.asarray(w, dtype), softcap, scale, b, temperature), labels, ct


def oracle(x, head: ops.Head, labels):
    """The statistics by their textbook formulas on all logits at once."""
    z = head.scale * jnp.einsum("btd,vd->btv", x, head.weight)
    z = z if head.bias is None else z + head.bias
    z = z if head.softcap is None else head.softcap * jnp.tanh(z / head.softcap)
    z = z / head.temperature
    logp, p = jax.nn.log_softmax(z), jax.nn.softmax(z)
    out = {
        "logp": jnp.sum(jax.nn.one_hot(labels, V) * logp, -1),
        "entropy": -jnp.sum(p * logp, -1),
        "logsumexp": jax.nn.logsumexp(z, -1),
        "logsumsq": jnp.log(jnp.sum(p**2, -1)),
        "mean_logit": jnp.mean(z, -1),
        "top1": jnp.argmax(z, -1) == labels,
    }
    return {k: jnp.where(labels >= 0, v, 0) for k, v in out.items()}


def weighted(stats, ct):
    """A scalar that depends on every statistic."""
    return sum((ct[k] * stats[k]).sum() for k in FIELDS)


def both(stats, ct):
    """Jit the statistics and the gradients, in hidden states and head, of a weighted sum of them."""
    scalar = lambda x, head: (weighted(stats(x, head), ct), stats(x, head))

    def f(x, head):
        (_, out), grads = jax.value_and_grad(scalar, (0, 1), has_aux=True)(x, head)
        return out, grads

    return jax.jit(f)


def expected(x, head, labels, ct):
    """Values and gradients of `oracle`, in float64."""
    with jax.enable_x64(True):
        x, head = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, head))
        return jax.tree.map(np.asarray, both(functools.partial(oracle, labels=labels), ct)(x, head))


def close(got, want, rtol):
    """Compare trees leaf by leaf, relative to the leaf's largest value or to 1."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=rtol * max(1, np.abs(b).max()), rtol=0)


HEADS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "all": {"softcap": 5.0, "scale": 0.3, "bias": True, "temperature": 0.7},
    "peaked": {"gain": 50.0, "bias": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 7])  # 3 does not divide T
@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients(kind: str, chunk: int) -> None:
    """Float32 against float64: 2e-6 of the largest value. With logits of +-800, 1e-4: there floats are 6e-5 apart."""
    x, head, labels, ct = case(**HEADS[kind])
    want, want_grads = expected(x, head, labels, ct)
    got, grads = both(lambda x, head: losses.token_stats(x, head, labels, chunk=chunk)._asdict(), ct)(x, head)
    assert got["logp"].dtype == got["top1"].dtype == jnp.float32
    np.testing.assert_array_equal(got.pop("top1"), want.pop("top1"))
    tolerance = 1e-4 if kind == "peaked" else 2e-6
    close(got, want, tolerance)
    close(grads, want_grads, tolerance)
    for v in got.values():
        assert (np.asarray(v)[labels < 0] == 0).all()


def test_top1_counts_the_first_of_equal_logits() -> None:
    head = ops.Head(jnp.array([[1.0], [2.0], [2.0], [0.0]]))
    stats = losses.token_stats(jnp.ones((1, 4, 1)), head, jnp.array([[0, 1, 2, -100]]))
    np.testing.assert_array_equal(stats.top1, [[0, 1, 0, 0]])


def some_loss(stats, weights):
    """A sum over tokens that is not linear in the statistics."""
    per_token = weights * (jnp.exp(0.1 * stats.logp) + stats.logsumexp**2 - 0.5 * stats.entropy)
    sums = {"top1": (weights * stats.top1).sum(), "count": (weights > 0).sum()}
    return per_token.sum() + stats.mean_logit.sum(), sums


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 7])
def test_token_sum_equals_the_loss_of_token_stats(chunk: int) -> None:
    """One pass and two passes: 1e-6 relative, with a factor on the result so that its cotangent is not 1."""
    x, head, labels, _ = case(bias=True)
    weights = jnp.asarray(np.random.default_rng(1).random((B, T)), jnp.float32)

    def two(x, head):
        total, sums = some_loss(losses.token_stats(x, head, labels), weights)
        return 3 * total, sums

    def one(x, head):
        total, sums = losses.token_sum(some_loss, x, head, labels, weights, chunk=chunk)
        return 3 * total, sums

    want = jax.jit(jax.value_and_grad(two, (0, 1), has_aux=True))(x, head)
    close(jax.jit(jax.value_and_grad(one, (0, 1), has_aux=True))(x, head), want, 1e-6)
    close(jax.jit(one)(x, head), want[0], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "chunk"), [(512, 1), (3, 257)])
def test_bfloat16_weight_gradient_adds_up_in_float32(chunks: int, chunk: int) -> None:
    """Half a unit per token. In bfloat16, ones stick at 128, and a chunk of 257 tokens gives 128 instead of 128.5."""
    n = chunks * chunk
    x = jnp.ones((1, n, 1), jnp.bfloat16)
    head = ops.Head(jnp.zeros((2, 1), jnp.bfloat16))
    labels = jnp.zeros((1, n), jnp.int32)
    logp = lambda stats: (stats.logp.sum(), None)
    two = lambda head: logp(losses.token_stats(x, head, labels, chunk=chunk))[0]
    one = lambda head: losses.token_sum(logp, x, head, labels, chunk=chunk)[0]
    want = jnp.array([[n / 2], [-n / 2]], jnp.bfloat16)
    for f in (one, two):
        np.testing.assert_array_equal(jax.jit(jax.grad(f))(head).weight, want)


@pytest.mark.slow
def test_low_rank_weight() -> None:
    """A LoRA head gives the values and gradients of the merged weight (2e-6)."""
    x, head, labels, ct = case()
    r = np.random.default_rng(3)
    a, b = (jnp.asarray(r.normal(size=s), jnp.float32) for s in ((2, D), (V, 2)))
    merged = lambda a, b: dataclasses.replace(head, weight=head.weight + 0.5 * b @ a)
    low = lambda a, b: dataclasses.replace(head, weight=LowRank(head.weight, a, b, jnp.float32(0.5)))
    loss = lambda make: lambda x, a, b: weighted(losses.token_stats(x, make(a, b), labels, chunk=3)._asdict(), ct)
    want = jax.jit(jax.value_and_grad(loss(merged), (0, 1, 2)))(x, a, b)
    close(jax.jit(jax.value_and_grad(loss(low), (0, 1, 2)))(x, a, b), want, 5e-6)


@pytest.mark.slow
def test_quantized_weight() -> None:
    """An int8 head gives the values and gradients of the weight that it stands for (2e-6), and gets none itself."""
    x, head, labels, ct = case(bias=True)
    r = np.random.default_rng(4)
    values, scale = (
        jnp.asarray(r.integers(-127, 128, (V, D)), jnp.int8),
        jnp.asarray(0.01 * r.random((V, 1)), jnp.float32),
    )
    int8 = dataclasses.replace(head, weight=Quantized(values, scale, None, "int8", (D,), jnp.dtype(jnp.float32)))
    loss = lambda x, head: weighted(losses.token_stats(x, head, labels, chunk=3)._asdict(), ct)
    f = jax.jit(jax.value_and_grad(loss, (0, 1), allow_int=True))
    want, (want_x, want_head) = f(x, dataclasses.replace(head, weight=values * scale))
    got, (got_x, got_head) = f(x, int8)
    close((got, got_x, got_head.bias), (want, want_x, want_head.bias), 5e-6)
    assert got_head.weight.values.dtype == jax.dtypes.float0 and (got_head.weight.scale == 0).all()


@pytest.mark.wrong_shapes
def test_wrong_arguments() -> None:
    x, head, labels, _ = case()
    with pytest.raises(ValueError, match=r"labels \(2, 6\) do not fit hidden states \(2, 7, 16\)"):
        losses.token_stats(x, head, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk=0"):
        losses.token_stats(x, head, labels, chunk=0)


# ---- what is compiled ----------------------------------------------------------------------------------------------


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


@pytest.mark.parametrize("f", ["token_stats", "token_sum"])
def test_memory(f: str) -> None:
    """Gradients of 1024 tokens in chunks of 32 take less than 1/4 of one copy of the logits (here 32 MiB)."""
    t, d, v = 1024, 8, 8192
    x, w, y = (jax.ShapeDtypeStruct(s, k) for s, k in (((1, t, d), "float32"), ((v, d), "float32"), ((1, t), "int32")))

    def loss(x, w, y):
        if f == "token_sum":
            return losses.token_sum(lambda s: (s.logp.sum(), None), x, ops.Head(w), y, chunk=32)[0]
        return losses.token_stats(x, ops.Head(w), y, chunk=32).logp.sum()

    memory = compiled(jax.grad(loss, (0, 1)), x, w, y).memory_analysis().temp_size_in_bytes
    assert memory < t * v * 4 / 4, memory / 2**20


def test_frozen_weight_costs_no_gradient() -> None:
    """Without the weight's gradient the backward pass has one product less."""
    x, w, y = jnp.ones((1, 64, 8)), jnp.ones((128, 8)), jnp.zeros((1, 64), jnp.int32)
    loss = lambda x, w: losses.token_stats(x, ops.Head(w), y, chunk=16).logp.sum()
    dots = [len(re.findall(r" dot\(", compiled(jax.grad(loss, n), x, w).as_text())) for n in ((0, 1), 0)]
    assert dots[1] == dots[0] - 1


@pytest.mark.parametrize("spec", [P(None, None), P("tp", None), P(None, "dp")], ids=["replicated", "tp", "fsdp"])
def test_sharded(spec: P) -> None:
    """Batch over dp, vocabulary over tp: equal results, and no all-gather of anything as large as a chunk's logits."""
    x, head, labels, ct = case()
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    v = 40
    w = jnp.asarray(np.random.default_rng(5).normal(size=(v, D)), jnp.float32)
    loss = lambda x, w, y: weighted(losses.token_stats(x, ops.Head(w), y, chunk=4)._asdict(), ct)
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, labels)
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    args = put(x, P("dp")), put(w, spec), put(labels, P("dp"))
    program = compiled(jax.value_and_grad(loss, (0, 1)), *args)
    close(program(*args), want, 5e-6)
    gathered = [line for line in program.as_text().splitlines() if re.search(r" all-gather(-start)?\(", line)]
    sizes = [np.prod([int(n) for n in re.search(r"\[([\d,]+)\]", g)[1].split(",")]) for g in gathered]
    assert all(s <= v * D for s in sizes), gathered


MESHES = {  # mesh -> tokens of each of 8 rows up to which devices along fsdp share a vocabulary of 64
    "fsdp=8": 8, "dp=2,fsdp=4": 16, "dp=2,fsdp=2,sp=2": 32, "fsdp=2,ep=2,tp=2": 8, "tp=8": 0
}  # fmt: skip


def sums(x, head, labels, ct):
    """What functions of statistics give, of one at a time or of all."""
    stats = losses.token_stats(x, head, labels, chunk=5)
    loss = lambda stats, w: ((w * stats.entropy).sum(), (stats.top1.sum(), w.sum()))
    total, found = losses.token_sum(loss, x, head, labels, ct["logp"], chunk=5)
    return weighted(stats._asdict(), ct) + total, (stats, found)


@pytest.mark.parametrize(
    ("axes", "t"), [(axes, t) for axes, most in MESHES.items() for t in sorted({most, most + 8}) if t]
)
def test_devices_share_a_vocabulary_that_is_larger_than_the_rows(axes, t) -> None:
    """As one device, forward and backward. No device then has the head [64 16], or its gradient, whole; else each has."""
    mesh, r = make_mesh(parse_mesh(axes)), np.random.default_rng(t)
    normal = lambda *shape: jnp.asarray(r.normal(size=shape), jnp.float32)
    head = ops.Head(normal(64, 16), softcap=9.0, bias=normal(64))
    labels = jnp.asarray(np.where(r.random((8, t)) < 0.2, -100, r.integers(0, 64, (8, t))))
    args = normal(8, t, 16), head, labels, {k: normal(8, t) for k in FIELDS}
    rows, weight = NamedSharding(mesh, P(("dp", "fsdp", "ep"), "sp")), NamedSharding(mesh, P("tp", "fsdp"))
    put = lambda head: dataclasses.replace(head, weight=jax.device_put(head.weight, weight))
    placed = [put(x) if isinstance(x, ops.Head) else jax.device_put(x, rows) for x in args]
    f = jax.jit(jax.value_and_grad(sums, (0, 1), has_aux=True))
    want = f(*args)
    with jax.set_mesh(mesh):
        program = f.lower(*placed).compile()
        close(program(*placed), want, 1e-5)
    whole = f"f32[{64 // mesh.shape['tp']},16]"
    assert (whole in program.as_text()) == (t > MESHES[axes])


def test_float32_gradient_does_not_turn_the_logits_round() -> None:
    """Of a chunk's logits [tokens, V], XLA:CPU lays out no gradient as [V, tokens]: that took a tenth of a step."""
    x, w = jax.ShapeDtypeStruct((2, 512, 24), jnp.float32), jax.ShapeDtypeStruct((96, 24), jnp.float32)
    labels = jnp.ones((2, 512), int)
    loss = lambda x, w: losses.token_sum(losses.nll, x, ops.Head(w), labels, jnp.ones((2, 512)), chunk=512)[0]
    program = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert "f32[512,96]" in program and "f32[96,512]" not in program and "f32[96,2,256]" not in program


def test_half_precision_states_do_not_round_a_float32_gradient() -> None:
    """Hidden states in bfloat16 beside a float32 weight: its gradient against float64, 0.1 % of its size (seen 0.04 %)."""
    r = np.random.default_rng(3)
    x, w = jnp.asarray(r.normal(size=(1, 1024, D)), "bfloat16"), jnp.asarray(r.normal(size=(V, D)), "float32")
    labels = r.integers(0, V, (1, 1024))
    loss = lambda w: losses.token_sum(losses.nll, x, ops.Head(w), labels, jnp.ones((1, 1024)), chunk=1024)[0]
    got = np.asarray(jax.grad(loss)(w), np.float64)
    flat, table = np.asarray(x, np.float64)[0], np.asarray(w.astype(x.dtype), np.float64)
    z = flat @ table.T
    p = np.exp(z - z.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True) - np.eye(V)[labels[0]]).T @ flat
    np.testing.assert_allclose(got, want, rtol=0, atol=0.001 * np.abs(want).max())
