"""One suite for every implementation in every table: values, gradients and vmap are those of a plain formula.

A name that is entered in a table is entered here. What cannot run here is skipped with the reason that its `unsupported`
gives. The same cases show that an implementation that XLA cannot partition gets each device's part.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdel.train  # noqa: F401 (its head has a table)
from fdel import ops
from fdel.ops import dispatch
from fdel.ops.batch import Packed, Pages, Slots, State
from fdel.ops.weights import dense
from fdel.params.mesh import make_mesh
from fdel.train import losses
from tests.ops import test_delta, test_mamba1, test_mla, test_ssd
from tests.ops.test_einsum import CASES as PRODUCTS
from tests.ops.test_einsum import quantized
from tests.train import test_head

EIGHT = {"dp": 2, "tp": 2, "sp": 2}
B, T, N, K, H, HV = 2, 32, 4, 2, 8, 6


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@dataclass(frozen=True)
class Case:
    """A call of one operation: `call(*args)` gives what `formula(*args)` does, of which gradients and vmap are taken."""

    op: str
    call: Callable
    args: tuple
    formula: Callable | None = None  # None: the reference on one device
    tolerance: float = 2e-5  # of the largest element
    paged: bool = False  # serving: no gradient, no vmap
    mesh: dict = field(default_factory=dict)  # that it is called on
    sees: dict[int, tuple] = field(default_factory=dict)  # shapes of a device's part, by the operation's arguments


# ---- attention -----------------------------------------------------------------------------------------------------

SEGMENTS = np.stack([np.repeat([0, 1, -1], [12, 17, 3]), np.zeros(T, int)])
MASK, ALIBI = ops.Mask(0.4, window=7, softcap=3.0), np.linspace(0.1, 1, N)


def softmax_attention(q, k, v, sinks, segments=SEGMENTS):
    k, v = (jnp.repeat(x, N // K, 2) for x in (k, v))
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    s = 3 * jnp.tanh(jnp.einsum("bqnh,bsnh->bnqs", q, k) * 0.4 / 3) - ALIBI[:, None, None] * distance
    seen = (distance >= 0) & (distance < 7) & (segments[:, :, None] == segments[:, None])
    s = jnp.where(seen[:, None], s, -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    return jnp.einsum("bnqs,bsnh->bqnh", jax.nn.softmax(s)[..., :-1], v)


def attend(q, k, v, sinks):
    batch = Packed(jnp.zeros(SEGMENTS.shape, int), jnp.asarray(SEGMENTS))
    return ops.attend(batch, None, 0, q, k, v, mask=MASK, sinks=sinks, alibi=jnp.asarray(ALIBI, jnp.float32))[0]


def attend_pages(q, k, v, sinks):
    table = np.array([[1, 5, 4, 7], [0, 2, 6, 3]])
    _, batch = ops.paged([(i, 0, [0] * T) for i in range(B)], table, block=8)
    carry = ops.Carry(State(Pages(*(jnp.full((2, 8, K, 8, n), jnp.nan) for n in (H, HV)))))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    given = dict(mask=MASK, sinks=sinks, alibi=jnp.asarray(ALIBI, jnp.float32))
    return ops.attend(batch, carry, 1, *flat, **given)[0].reshape(q.shape[:-1] + v.shape[-1:])


QKV = normal(B, T, N, H), normal(B, T, K, H, seed=1), normal(B, T, K, HV, seed=2), normal(N, seed=3)
in_whole = functools.partial(softmax_attention, segments=np.zeros((B, T)))
CASES = {
    "attend": Case("attend", attend, QKV, softmax_attention, sees={0: (1, T, 2, H), 1: (1, T, 1, H)}),
    "attend in a ring": Case("attend", attend, QKV, softmax_attention, mesh={"sp": 2}),
    "attend_part": Case("attend_part", attend, QKV, softmax_attention, mesh={"sp": 2}),
    "paged_attention": Case(
        "paged_attention", attend_pages, QKV, in_whole, paged=True, sees={1: (2, 8, 1, 8, H), 3: (B * T, 2, H)}
    ),
    "write_pages": Case("write_pages", attend_pages, QKV, in_whole, paged=True, sees={3: (B * T, 1, H)}),
}


# ---- latent attention ----------------------------------------------------------------------------------------------

M = test_mla
LATENT = normal(B, M.T, N, M.HN + M.R), normal(B, M.T, M.C + M.R, seed=1)
LATENT += ({"k": normal(N, M.HN, M.C, seed=2) / 3, "v": normal(N, M.HV, M.C, seed=3) / 3},)


def mla(q, kv, w):
    return ops.mla(ops.packed(jnp.zeros(q.shape[:2], int)), None, 0, q, kv, w["k"], w["v"], mask=ops.Mask(0.3))[0]


def mla_watched(q, kv, w):
    """Weights and hidden states that are watched: the former are of each device's rows and heads."""
    taps = ops.Taps(ops.HiddenStates((0,), (kv,)), None, ops.attention_weights((0, 1), N, q.shape[:2]))
    batch = ops.packed(jnp.zeros(q.shape[:2], int))
    return ops.mla(batch, ops.Carry(taps=taps), 1, q, kv, w["k"], w["v"], mask=ops.Mask(0.3))


def mla_pages(q, kv, w):
    _, batch = ops.paged([(i, 0, [0] * M.T) for i in range(B)], np.array([[1, 5, 4, 7], [0, 2, 6, 3]]), block=M.T)
    carry = ops.Carry(State(Pages(jnp.zeros((2, 8, 1, 4, M.C + M.R)), None)))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, kv))
    out, carry = ops.mla(batch, carry, 1, *flat, w["k"], w["v"], mask=ops.Mask(0.3))
    return out.reshape(B, M.T, N, -1), carry.pages.k


part = {3: (1, M.T, 2, M.HN + M.R), 4: (1, M.T, M.C + M.R), 5: (2, M.HN, M.C)}
CASES |= {
    "mla": Case("mla", mla, LATENT, M.plain, 1e-5, sees=part),
    "mla watched": Case("mla", mla_watched, LATENT, paged=True, sees=part),
    "paged_attention of latents": Case(
        "paged_attention", mla_pages, LATENT, paged=True, sees={1: (2, 8, 1, 4, M.C + M.R), 3: (B * M.T, 2, M.C + M.R)}
    ),
    "mla in pages": Case("mla", mla_pages, LATENT, paged=True, sees={3: (B * M.T, 2, M.HN + M.R), 5: part[5]}),
}


# ---- recurrent mixers ----------------------------------------------------------------------------------------------


def rows(inputs: Any) -> Any:
    """Two rows of one draw: its tokens, and the same tokens in the other order."""
    return jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), inputs)


def packed_call(op: Callable, *given: Any, chunk: int, **named: Any) -> jax.Array:
    return op(ops.packed(jnp.zeros(given[0].shape[:2], int)), None, 0, *given, chunk=chunk, **named)[0]


def slots_call(op: Callable, state: tuple, *given: Any, **named: Any) -> tuple:
    """Prefill of both rows in blocks, from slots full of NaN, beside pages that are none of its business."""
    t = given[0].shape[1]
    _, batch = ops.paged([(1, 0, [0] * t), (2, 0, [0] * t)], np.zeros((3, 1), int), block=t // 2)
    cache = Pages(jnp.ones((1, 3, 3, 2, 5)), None)
    carry = ops.Carry(State(cache, Slots(jnp.zeros((2, 3, 1, 1)), jnp.full((2, 3, *state), jnp.nan))))
    flat = [x.reshape(-1, *x.shape[2:]) if x.shape[:2] == (2, t) else x for x in given]
    out, carry = op(batch, carry, 1, *flat, **named)
    return out.reshape(2, t, *out.shape[1:]), carry.slots.ssm[1, 1:], carry.pages


def delta(gate: str, extreme: bool) -> dict[str, Case]:
    d, args = test_delta, rows(tuple(map(jnp.asarray, test_delta.draw(100, gate, extreme))))
    name, state = f"gated_delta_rule of a {gate}" + ", extreme" * extreme, (d.N, d.HK, d.HV)
    formula = lambda *x: jax.vmap(lambda *row: d.recurrence(*row, xp=jnp))(*x)
    call = functools.partial(packed_call, ops.gated_delta_rule, chunk=64)
    serve = functools.partial(slots_call, ops.gated_delta_rule, state)
    sees = {3: (1, 100, d.N // 2, d.HK), 6: (1, 100, d.N // 2, *d.GATES[gate][1:])}
    paged = {3: (200, d.N // 2, d.HK), 7: (200, d.N // 2)}
    return {
        name: Case("gated_delta_rule", call, args, formula, 5e-5, sees=sees),
        name + ", slots": Case("gated_delta_rule", serve, args, None, 5e-5, True, sees=paged),
    }


def scanned(module: Any, op: Callable, chunk: int, state: tuple, part: tuple, extreme: bool) -> dict[str, Case]:
    """Of x, dt, b, c, two rows; of a and d, one."""
    p = {k: jnp.asarray(v) for k, v in module.draw(90, extreme).items()}
    args = *rows((p["x"], p["dt"])), p["a"], *rows((p["b"], p["c"])), p["d"]
    call = lambda *x: packed_call(op, *x[:-1], chunk=chunk, d=x[-1])
    serve = lambda *x: slots_call(op, state, *x[:-1], d=x[-1])
    by_row = jax.vmap(functools.partial(module.recurrence, xp=jnp), (0, 0, None, 0, 0, None))
    name = op.__name__ + ", extreme" * extreme
    return {
        name: Case(
            op.__name__, call, args, by_row, 5e-5, sees={3: (1, 90, *part), 5: (len(args[2]) // 2, *args[2].shape[1:])}
        ),
        name + ", slots": Case(op.__name__, serve, args, None, 5e-5, True, sees={3: (180, *part)}),
    }


for extreme in (False, True):
    for gate in test_delta.GATES:
        CASES |= delta(gate, extreme)
    s, m = test_ssd, test_mamba1
    CASES |= scanned(s, ops.ssd, 32, (s.N, s.H, s.S), (s.N // 2, s.H), extreme)
    CASES |= scanned(m, ops.selective_scan, 16, (m.C, m.S), (m.C // 2,), extreme)


# ---- products, norms, the head -------------------------------------------------------------------------------------

SIZES = (5, 0, 20, 1, 10)


def by_group(x, w):
    expert = np.repeat(np.arange(6), [*SIZES, 4])
    return jnp.einsum("mk,mnk->mn", x, jnp.concatenate([w, 0 * w[:1]])[expert])


def glu_by_group(x, gate, up, gate_bias, up_bias):
    each = (by_group(x, w) + by_group(1 + 0 * x[:, :1], b[..., None]) for w, b in ((gate, gate_bias), (up, up_bias)))
    return jnp.sin(next(each)) * next(each)


def rms(x, w):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * (1 + w)


def centred(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * w + b


def head(x, w, bias):
    return ops.Head(w, 3.0, 0.5, bias)


CHOSEN = jnp.asarray(np.random.default_rng(5).integers(0, 4, (4, 6, 2)))
EXPERTS = normal(4, 8, 12, seed=1), normal(4, 8, 12, seed=2), normal(4, 12, 8, seed=3)


def mixture(x, gate, up, down):
    p = {"gate": gate, "up": up, "down": down}
    return ops.moe(x, p, jnp.ones(CHOSEN.shape) / 2, CHOSEN, jax.nn.silu)


INT8, FULL = quantized(PRODUCTS["q"], "int8", 3)
LABELS = jnp.asarray(np.random.default_rng(4).integers(-1, 37, (2, 6)))
floats = lambda stats: {name: stats[name] for name in test_head.FIELDS}
X, W = normal(2, 3, 16), normal(16, seed=1)
CASES |= {
    "grouped_matmul": Case(
        "grouped_matmul",
        lambda x, w: ops.grouped_matmul(x, w, jnp.array(SIZES)),
        (normal(40, 12), normal(5, 8, 12, seed=1)),
        by_group,
        sees={0: (40, 12), 1: (5, 4, 12)},
    ),
    "grouped_glu": Case(
        "grouped_glu",
        lambda x, gate, up, *b: ops.grouped_glu(x, gate, up, jnp.array(SIZES), lambda g, u: jnp.sin(g) * u, *b),
        (
            normal(40, 12),
            normal(5, 8, 12, seed=1),
            normal(5, 8, 12, seed=2),
            normal(5, 8, seed=3),
            normal(5, 8, seed=4),
        ),
        glu_by_group,
        sees={0: (40, 12), 1: (5, 4, 12), 2: (5, 4, 12), 5: (5, 4), 6: (5, 4)},
    ),
    "moe": Case("moe", mixture, (normal(4, 6, 12), *EXPERTS)),
    "expert_parallel": Case("expert_parallel", mixture, (normal(4, 6, 12), *EXPERTS), None, 1e-5, mesh={"ep": 2}),
    "quantized_matmul": Case(
        "quantized_matmul",
        lambda x: ops.einsum("...d,nhd->...nh", x, INT8),
        (normal(2, 6, 24),),
        lambda x: jnp.einsum("...d,nhd->...nh", x, jnp.asarray(FULL, jnp.float32)),
        sees={1: (1, 3, 24), 2: (2, 6, 24)},
    ),
    "rms_norm": Case("rms_norm", lambda x, w: ops.rms_norm(x, w, 1e-3, offset=1.0), (X, W), rms, sees={0: (1, 3, 16)}),
    "layer_norm": Case(
        "layer_norm", lambda x, w, b: ops.layer_norm(x, w, b, 1e-3), (X, W, W[::-1]), centred, sees={0: (1, 3, 16)}
    ),
    "token_stats": Case(
        "token_stats",
        lambda *a: floats(losses.token_stats(a[0], head(*a), LABELS, chunk=4)._asdict()),
        (normal(2, 6, 16), normal(37, 16, seed=1), normal(37, seed=2)),
        lambda *a: floats(test_head.oracle(a[0], head(*a), LABELS)),
        sees={0: (1, 3, 16), 2: (1, 3)},
    ),
}


# ---- the suite -----------------------------------------------------------------------------------------------------


def test_every_table_has_a_case():
    assert {case.op for case in CASES.values()} == set(dispatch.TABLES) - {"twice"}  # of docs/kernels.md


def on(mesh: dict, f: Callable, *args: Any) -> Any:
    with (
        jax.set_mesh(make_mesh(mesh, jax.devices()[: np.prod([*mesh.values()])])) if mesh else contextlib.nullcontext()
    ):
        return jax.jit(f)(*args)


def probed(f: Callable) -> Callable:
    """A scalar of all that f gives, and its gradients in all arguments beside its value."""

    def scalar(*args):
        out = f(*args)
        return sum((normal(*x.shape, seed=9) * x).sum() for x in jax.tree.leaves(out)), out

    return lambda *args: jax.grad(scalar, range(len(args)), has_aux=True)(*args)


def close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1e-3, float(jnp.abs(b).max())))


def reference(case: Case, wrap: Callable = lambda f: f) -> Any:
    if case.formula is not None:
        return on({}, wrap(case.formula), *case.args)
    with ops.use(**{case.op: [*dispatch.TABLES[case.op].implementations][-1]}):
        return on({}, wrap(case.call), *case.args)


@pytest.fixture
def named(request):
    """Name an implementation of a case's operation, or skip with the reason why it cannot serve the call."""

    @contextlib.contextmanager
    def name(case: Case, impl: str):
        elsewhere = dispatch.TABLES[case.op].implementations[impl].local or impl == "ragged_all_to_all"
        if elsewhere and request.config.getoption("--target"):
            pytest.skip("it would run here, on another platform; see test_kernels")
        ring = {"attend": "ring"} if case.op == "attend_part" else {}
        with ops.use(**{case.op: impl, **ring}):
            try:
                yield
            except ValueError as e:
                if "cannot serve this call" not in str(e):
                    raise
                pytest.skip(str(e))

    return name


def pairs(serving: bool) -> list:
    return [
        (name, impl)
        for name, case in CASES.items()
        for impl in dispatch.TABLES[case.op].implementations
        if serving or not case.paged
    ]


@pytest.mark.parametrize(("name", "impl"), pairs(serving=True))
def test_values_and_gradients(name, impl, named):
    case = CASES[name]
    wrap = (lambda f: f) if case.paged else probed
    with named(case, impl):
        close(on(case.mesh, wrap(case.call), *case.args), reference(case, wrap), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl"), pairs(serving=False))
def test_vmap(name, impl, named):
    """Of two calls at once, the second with other numbers."""
    case = CASES[name]
    both = jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), case.args)
    with named(case, impl):
        one = [on(case.mesh, case.call, *jax.tree.map(lambda x, i=i: x[i], both)) for i in (0, 1)]
        got = on(case.mesh, jax.vmap(case.call), *both)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *one), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sees])
def test_a_local_implementation_gets_each_devices_part(name, monkeypatch):
    """The reference in a kernel's place: on eight devices it sees their parts, and the results are those of one."""
    case, seen = CASES[name], []
    table = dispatch.TABLES[case.op]
    *_, last = table.implementations.values()

    def call(*args, **kwargs):
        first = lambda x: jax.tree.leaves(x)[0].shape
        seen.append({i: first(args[i]) for i in case.sees})
        return last.call(*args, **kwargs)

    monkeypatch.setitem(table.implementations, "opaque", dispatch.Implementation(call, local=True))
    wrap = (lambda f: f) if case.paged else probed
    with ops.use(**{case.op: "opaque"}):
        got = on(EIGHT, wrap(case.call), *case.args)
    assert seen and all(shapes == case.sees for shapes in seen)
    close(got, reference(case, wrap), case.tolerance)


def test_what_a_mesh_does_not_divide_stays_whole_together(monkeypatch):
    """Five outputs of experts: neither they nor a low-rank factor are divided; the other factor's rank is no output."""
    table, seen = dispatch.TABLES["grouped_matmul"], []

    def call(x, w, sizes):
        seen.append([a.shape for a in jax.tree.leaves(w)])
        return table.implementations["xla"].call(x, w, sizes)

    monkeypatch.setitem(table.implementations, "opaque", dispatch.Implementation(call, local=True))
    for n, here in ((8, 4), (5, 5)):
        w = ops.weights.LowRank(normal(5, n, 12), normal(5, 2, 12), normal(5, n, 2), jnp.ones(5))
        run = lambda x, w: ops.grouped_matmul(x, w, jnp.array(SIZES))
        with ops.use(grouped_matmul="opaque"):
            got = on(EIGHT, run, normal(40, 12), w)
        assert seen.pop() == [(5, here, 12), (5, 2, 12), (5, here, 2), (5,)]
        close(got, by_group(normal(40, 12), dense(w)), 2e-5)


def test_groups_of_heads_are_divided_with_them_or_one_is_whole(monkeypatch):
    """Of six heads on two devices three each, with their one group, or with one of two; three groups divide no heads."""
    table, seen, x = dispatch.TABLES["ssd"], [], {k: jnp.asarray(v)[None] for k, v in test_ssd.draw(40, False).items()}
    plain = table.implementations["xla"].call

    def call(*args, **kwargs):
        seen.append((args[3].shape[2], args[6].shape[2]))
        return plain(*args, **kwargs)

    monkeypatch.setitem(table.implementations, "opaque", dispatch.Implementation(call, local=True))
    for groups, here in ((1, (3, 1)), (2, (3, 1)), (3, (6, 3))):
        b, c = (jnp.tile(x[k], (1, 1, 2, 1))[:, :, :groups] for k in "bc")
        run = lambda u, b, c: packed_call(ops.ssd, u, x["dt"], x["a"][0], b, c, chunk=16, d=x["d"][0])
        with ops.use(ssd="opaque"):
            got = on(EIGHT, probed(run), x["x"], b, c)
        assert {*seen} == {here} and not seen.clear()
        close(got, probed(run)(x["x"], b, c), 2e-5)
