"""Mixture of experts against transformers' routers and blocks, and loops over tokens and experts in float64."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, plan
from fdel.ops import cpu
from fdel.ops.grouped import grouped_matmul
from fdel.ops.platform import tracing_for
from fdel.ops.weights import LowRank, Quantized, dense
from fdel.params import Param

D, F, E = 24, 40, 6
SHAPES = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
AXES = {"gate": "experts ffn embed", "up": "experts ffn embed", "down": "experts embed ffn"}
SPEC = {"experts": {k: Param(AXES[k], SHAPES[k], params.spec.zeros) for k in SHAPES}}


def rng(seed=0):
    return np.random.default_rng(seed)


def weights(seed=1):
    r = rng(seed)
    return {k: jnp.asarray(r.normal(size=s) / s[2] ** 0.5, jnp.float32) for k, s in SHAPES.items()}


def close(got, want, tol=2e-6):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tol * np.abs(want).max()


def loops(x, p, routing, experts):
    """The formula, one token and one expert at a time, in float64."""
    x, routing = np.asarray(x, np.float64), np.asarray(routing, np.float64)
    gate, up, down = (np.asarray(p[k], np.float64) for k in SHAPES)
    out = np.zeros_like(x)
    for t, (row, es) in enumerate(zip(routing, np.asarray(experts), strict=True)):
        for w, e in zip(row, es, strict=True):
            g = gate[e] @ x[t]
            out[t] += w * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[t])))
    return out


# name -> expert indices [T k]
ROUTINGS = {
    "random": np.stack([rng(i).permutation(E)[:2] for i in range(71)]),
    "one_token": np.array([[4, 1]]),
    "one_expert": np.full((50, 1), 3),
    "first_and_last": np.tile([[0, E - 1]], (33, 1)),
    "all": np.tile([np.arange(E)], (5, 1)),
    "empty": np.zeros((0, 2), int),
}


def routing_of(experts):
    return jnp.asarray(rng(3).uniform(0.1, 1, experts.shape), jnp.float32)


# ---- routers -------------------------------------------------------------------------------------------------------


def spread(w, experts, n):
    """Weights at their experts, whose order is free."""
    out = np.zeros((*w.shape[:-1], n))
    np.put_along_axis(out, np.asarray(experts), np.asarray(w), -1)
    return out


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_router_equals_transformers(normalize):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    logits = 2 * rng().normal(size=(50, 8)).astype(np.float32)
    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=8, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize)
    )
    router.weight.data = torch.eye(8)
    _, want, chosen = router(torch.tensor(logits))
    got, experts = ops.route_softmax(jnp.asarray(logits).reshape(5, 10, 8), 3, normalize=normalize)
    assert got.shape == experts.shape == (5, 10, 3) and got.dtype == jnp.float32
    want = spread(want.detach().numpy(), chosen.numpy(), 8)
    close(spread(got.reshape(50, 3), experts.reshape(50, 3), 8), want, 1e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups,kept,k", [(4, 2, 3), (4, 1, 2), (1, 1, 5), (2, 2, 8)])
def test_sigmoid_router_equals_transformers(groups, kept, k, normalize):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    logits, bias = 2 * rng().normal(size=(60, 8)).astype(np.float32), rng(1).normal(size=8).astype(np.float32)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=8,
            n_routed_experts=8,
            num_experts_per_tok=k,
            n_group=groups,
            topk_group=kept,
            norm_topk_prob=normalize,
            routed_scaling_factor=2.5,
        )  # fmt: skip
    )
    router.weight.data, router.e_score_correction_bias.data = torch.eye(8), torch.tensor(bias)
    _, want, chosen = router(torch.tensor(logits))
    got, experts = ops.route_sigmoid(
        jnp.asarray(logits), k, bias=jnp.asarray(bias), groups=groups, topk_groups=kept, scale=2.5, normalize=normalize
    )
    assert got.dtype == jnp.float32
    close(spread(got, experts, 8), spread(want.detach().numpy(), chosen.numpy(), 8), 1e-6)


@pytest.mark.parametrize("groups,kept,k", [(3, 1, 1), (8, 2, 1), (4, 1, 3), (2, 3, 1)])
def test_sigmoid_router_refuses_sizes_that_do_not_fit(groups, kept, k):
    with pytest.raises(ValueError, match=f"cannot choose {k} of 8 experts from {kept} of {groups} groups"):
        ops.route_sigmoid(
            jnp.zeros((1, 8)), k, bias=jnp.zeros(8), groups=groups, topk_groups=kept, scale=1.0, normalize=True
        )


# ---- forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTINGS)
def test_moe_equals_loops(name):
    experts = ROUTINGS[name]
    x, p, routing = rng(5).normal(size=(len(experts), D)), weights(), routing_of(experts)
    got = jax.jit(partial(ops.moe, act=jax.nn.silu))(jnp.asarray(x, jnp.float32), p, routing, jnp.asarray(experts))
    if experts.size:
        close(got, loops(x, p, routing, experts))
    assert got.shape == x.shape


@pytest.mark.parametrize("x,w,e", [((4, D), (4, 1), (4, 2)), ((3, D), (4, 2), (4, 2)), ((4, D), (4, 2), (4,))])
def test_choices_of_other_tokens_or_without_a_weight_each_are_refused(x, w, e):
    """A weight for k experts would be that of each of them."""
    with pytest.raises(ValueError, match=re.escape(f"moe: x {x}, weights {w}, experts {e}; expected [... D] and")):
        ops.moe(jnp.ones(x), weights(), jnp.ones(w), jnp.zeros(e, int), jax.nn.silu)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_moe_equals_transformers(family):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import DeepseekV3Config, MixtralConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    if family == "mixtral":
        block = MixtralExperts(MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E))
    else:
        block = DeepseekV3Experts(DeepseekV3Config(hidden_size=D, moe_intermediate_size=F, n_routed_experts=E))
    block.config._experts_implementation = "eager"
    p, experts = weights(), ROUTINGS["random"]
    block.gate_up_proj.data = torch.tensor(np.concatenate([p["gate"], p["up"]], 1))
    block.down_proj.data = torch.tensor(np.asarray(p["down"]))
    x, routing = rng(5).normal(size=(len(experts), D)).astype(np.float32), routing_of(experts)
    want = block(torch.tensor(x), torch.tensor(experts), torch.tensor(np.asarray(routing))).detach().numpy()
    close(jax.jit(partial(ops.moe, act=jax.nn.silu))(jnp.asarray(x), p, routing, jnp.asarray(experts)), want)


@pytest.mark.of_cpu("XLA:CPU cannot run the products of bfloat16 that other targets take")
def test_moe_in_bfloat16_accumulates_in_float32():
    experts, p = ROUTINGS["random"], jax.tree.map(lambda c: c.astype(jnp.bfloat16), weights())
    x = jnp.asarray(rng(5).normal(size=(len(experts), D)), jnp.bfloat16)
    got = jax.jit(partial(ops.moe, act=jax.nn.silu))(x, p, routing_of(experts), jnp.asarray(experts))
    assert got.dtype == jnp.bfloat16
    close(got, loops(x, p, routing_of(experts), experts), 1e-2)


SIZES = {"ragged": [5, 0, 33, 1, 64, 2], "short": [3, 0, 0, 40, 0, 1], "none": [0] * 6, "last": [0, 0, 0, 0, 0, 105]}


def by_group(x, w, sizes):
    out, start = np.zeros((x.shape[0], w.shape[1])), 0
    for e, n in enumerate(sizes):
        out[start : start + n] = np.asarray(x, np.float64)[start : start + n] @ np.asarray(w, np.float64)[e].T
        start += n
    return out


@pytest.mark.parametrize("tile", [1 << 20, pytest.param(64, marks=pytest.mark.of_cpu("only a CPU copies in tiles"))])
@pytest.mark.parametrize("name", SIZES)
def test_grouped_matmul_equals_loop_over_groups(name, tile, monkeypatch):
    monkeypatch.setattr(cpu, "COPY", tile)  # 64: an expert's weight is cut into tiles
    w, x = weights()["gate"], jnp.asarray(rng(5).normal(size=(105, D)), jnp.float32)
    assert cpu.expert_tiles(w) == (1 if tile > 64 else 20)
    got = jax.jit(lambda x, w, sizes: grouped_matmul(x, w, sizes))(x, w, jnp.asarray(SIZES[name]))
    want = by_group(x, w, SIZES[name])
    np.testing.assert_allclose(got, want, atol=5e-6)
    assert not np.asarray(got)[sum(SIZES[name]) :].any()  # rows past the groups are exactly 0


def test_grouped_matmul_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"x \(4, 3\), w \(6, 40, 24\), sizes \(6,\); expected \[M K\]"):
        grouped_matmul(jnp.zeros((4, 3)), weights()["gate"], jnp.zeros(6, int))


def test_groups_do_not_leak():
    """A NaN in one expert's row or weight stays there, and weights of experts without rows are never read."""
    sizes, w = np.array([7, 0, 9, 0, 0, 3]), weights()["gate"]
    x = jnp.asarray(rng(5).normal(size=(19, D)), jnp.float32)
    bad_x, bad_w = x.at[6].set(jnp.nan), w.at[jnp.array([1, 3, 4, 5])].set(jnp.nan)
    f = lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes))
    y, (dx, dw) = jax.jit(lambda *a: (lambda y, vjp: (y, vjp(jnp.ones_like(y))))(*jax.vjp(f, *a)))(bad_x, bad_w)
    finite = np.isfinite(y).all(-1)
    np.testing.assert_array_equal(finite, ~np.isin(np.arange(19), [6, 16, 17, 18]))
    np.testing.assert_allclose(np.asarray(y)[finite], by_group(x, w, sizes)[finite], atol=5e-6)
    np.testing.assert_array_equal(np.isfinite(dx).all(-1), ~np.isin(np.arange(19), [16, 17, 18]))
    np.testing.assert_array_equal(np.isfinite(dw).all((1, 2)), np.arange(E) != 0)
    assert not np.asarray(dw)[[1, 3, 4]].any()


# ---- gradients -----------------------------------------------------------------------------------------------------


def every_expert(x, p, routing, experts):
    """The same sum with every expert applied to every token: plain einsums, which jax differentiates."""
    full = (jax.nn.one_hot(experts, E) * routing[..., None]).sum(-2)
    h = jax.nn.silu(jnp.einsum("td,efd->tef", x, p["gate"])) * jnp.einsum("td,efd->tef", x, p["up"])
    return jnp.einsum("tef,edf,te->td", h, p["down"], full)


@pytest.mark.parametrize("name", [n for n in ROUTINGS if n != "empty"])
def test_gradients_equal_those_of_the_dense_formula(name):
    experts = jnp.asarray(ROUTINGS[name])
    x, dy = (jnp.asarray(rng(i).normal(size=(len(experts), D)), jnp.float32) for i in (5, 6))
    loss = lambda f: lambda x, p, routing: (f(x, p, routing, experts) * dy).sum()
    args = x, weights(), routing_of(experts)
    got = jax.jit(jax.grad(loss(partial(ops.moe, act=jax.nn.silu)), (0, 1, 2)))(*args)
    want = jax.jit(jax.grad(loss(every_expert), (0, 1, 2)))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(a, b, 5e-6)


def test_gradients_of_sorted_rows_are_rows_in_order():
    """No device adds rows up one by one (XLA's gradient of a gather), and those of a token are summed in float32."""
    experts = jnp.asarray(ROUTINGS["random"][:64])
    args = jnp.ones((64, D), jnp.bfloat16), routing_of(experts), weights()
    with tracing_for("tpu"), ops.use(moe="fused"):
        f = lambda x, w, p: ops.moe(x, p, w, experts, jax.nn.silu).sum()
        text = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(*args))
    rows = re.findall(rf"\w+:bf16\[\d+,{D}\] = scatter-add", text)
    assert not rows, rows


def test_gradient_reaches_the_router():
    logits = jnp.asarray(rng(7).normal(size=(9, E)), jnp.float32)
    x = jnp.asarray(rng(5).normal(size=(9, D)), jnp.float32)

    def loss(f, logits):
        routing, experts = ops.route_sigmoid(
            logits, 2, bias=jnp.arange(E) / 10, groups=3, topk_groups=2, scale=1.5, normalize=True
        )
        return (f(x, weights(), routing, experts) ** 2).sum()

    got = jax.jit(jax.grad(partial(loss, partial(ops.moe, act=jax.nn.silu))))(logits)
    close(got, jax.jit(jax.grad(partial(loss, every_expert)))(logits), 5e-6)
    assert np.abs(got).max() > 1e-3


# ---- other kinds of weight -----------------------------------------------------------------------------------------


def adapted(p, rank=3):
    r = rng(8)
    factor = lambda *s: jnp.asarray(r.normal(size=s) / 3, jnp.float32)
    scale = jnp.asarray(r.uniform(0.5, 2, E), jnp.float32)
    return {k: LowRank(w, factor(E, rank, w.shape[2]), factor(E, w.shape[1], rank), scale) for k, w in p.items()}


@pytest.mark.slow
@pytest.mark.parametrize("form,rank", [("int8", 0), ("fp8", 0), ("nf4", 3)])
def test_quantized_and_low_rank_experts_equal_their_dense_arrays(form, rank):
    p = params.quantize({"experts": weights()}, form, r"experts", spec=SPEC)["experts"]
    assert all(isinstance(w, Quantized) for w in p.values())
    p = adapted(p, rank) if rank else p
    full = {k: dense(w) for k, w in p.items()}
    experts = jnp.asarray(ROUTINGS["random"])
    x, routing = jnp.asarray(rng(5).normal(size=(len(experts), D)), jnp.float32), routing_of(experts)

    def value_and_gradient(f, p):
        loss = lambda x: (lambda y: ((y**2).sum(), y))(f(x, p, routing, experts))
        return jax.jit(jax.grad(loss, has_aux=True))(x)

    got, want = value_and_gradient(partial(ops.moe, act=jax.nn.silu), p), value_and_gradient(every_expert, full)
    close(got[1], loops(x, full, routing, experts), 5e-6)
    close(got[0], want[0], 1e-5)


@pytest.mark.parametrize("form", [None, "int8"])
def test_gradient_reaches_the_factors_and_not_the_frozen_base(form):
    base = weights()
    if form:
        base = params.quantize({"experts": base}, form, r"experts", spec=SPEC)["experts"]
    p, experts = adapted(base), jnp.asarray(ROUTINGS["random"])
    x, routing = jnp.asarray(rng(5).normal(size=(len(experts), D)), jnp.float32), routing_of(experts)
    factors = {k: (w.a, w.b) for k, w in p.items()}

    def loss(f, unwrap, factors):
        q = {k: unwrap(replace(p[k], a=a, b=b)) for k, (a, b) in factors.items()}
        return (f(x, q, routing, experts) ** 2).sum()

    sparse = jax.jit(jax.grad(partial(loss, partial(ops.moe, act=jax.nn.silu), lambda w: w)))
    want = jax.jit(jax.grad(partial(loss, every_expert, dense)))(factors)
    for a, b in zip(jax.tree.leaves(sparse(factors)), jax.tree.leaves(want), strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_compute_a_few_tokens_by_all_experts_to_the_same_numbers(platform):
    """What an expert makes of tokens that did not choose it has no effect, even where it is not finite."""
    p, experts = weights(), jnp.asarray(ROUTINGS["random"][:64])
    experts = jnp.where(experts == 0, 1, experts)
    p["up"] = p["up"].at[0].set(jnp.inf)
    x = jnp.asarray(rng(5).normal(size=(64, D)), jnp.float32)
    run = lambda: jax.jit(lambda x, w: ops.moe(x, p, w, experts, jax.nn.silu))
    args = x, routing_of(experts)
    want = run()(*args)
    with tracing_for(platform):
        text, got = run().lower(*args).as_text(), run()(*args)
    assert "while" not in text and np.isfinite(want).all()
    close(got, want, 1e-5)


# ---- eight devices -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape,rows",
    [
        ({"ep": 2, "fsdp": 2, "tp": 2}, (8, 8)),
        ({"ep": 2, "dp": 2, "sp": 2}, (4, 16)),
        ({"ep": 2, "tp": 4}, (1, 64)),  # rows that ep does not divide
        ({"ep": 2, "tp": 4}, (64,)),  # serving's flat tokens
        ({"fsdp": 4, "dp": 2}, (16, 4)),
        ({"fsdp": 2, "tp": 4}, (4, 16)),
    ],
)
def test_sharded_experts_give_the_same_values_and_gradients(shape, rows):
    mesh = params.make_mesh(shape)
    p, experts = weights(), jnp.asarray(ROUTINGS["random"][:64])
    placed = jax.tree.map(jax.device_put, p, params.shardings(SPEC, mesh)["experts"])
    biases = {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)}
    biases = {name: jnp.asarray(rng(9).normal(size=shape), jnp.float32) for name, shape in biases.items()}
    p, placed = p | biases, placed | biases
    args = jnp.asarray(rng(5).normal(size=(64, D)), jnp.float32), routing_of(experts), experts
    args = [c.reshape(*rows, -1) for c in args]
    f = lambda p, x, routing, experts: ops.moe(x, p, routing, experts, jax.nn.silu)
    loss = lambda p, x, routing, experts: (f(p, x, routing, experts) ** 2).sum()
    both = lambda p: (jax.jit(f)(p, *args), jax.jit(jax.grad(loss, (0, 1, 2)))(p, *args))
    want = both(p)
    with jax.set_mesh(mesh):
        got = both(placed)
        text = jax.jit(f).lower(placed, *args).compile().as_text()
    jax.tree.map(partial(close, tol=5e-6), got, want)
    assert "ep" not in shape or len(rows) == 1 or f"f32[{E},{D},{F}]" not in text  # no device holds every expert
    # Along tp what experts add is summed, and neither their hidden units nor their weights are sent.
    assert shape.get("tp") != 4 or not re.search(rf"all-to-all|all-gather.*\[[\d,]*{F}[\],]", text)


@pytest.mark.parametrize("rows", [(4, 4), (3, 4)])
def test_where_ep_does_not_divide_the_experts_each_device_has_all(rows):
    """As the error of `params.shardings` says to place them: {"experts": None}."""
    mesh = params.make_mesh({"ep": 4}, jax.devices()[:4])
    p, experts = weights(), jnp.asarray(ROUTINGS["random"][: rows[0] * rows[1]])
    x, routing = rng(5).normal(size=(len(experts), D)), routing_of(experts)
    placed = params.reshard({"experts": p}, SPEC, mesh, params.TRAIN | {"experts": None})["experts"]
    args = [c.reshape(*rows, -1) for c in (jnp.asarray(x, jnp.float32), routing, experts)]
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, p, w, e: ops.moe(x, p, w, e, jax.nn.silu))(args[0], placed, *args[1:])
    close(got.reshape(-1, D), loops(x, p, routing, experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "form,group,rank",
    [
        ("int8", None, 0),
        ("int4", 10, 0),
        ("int4", F, 0),
        ("int4", 8, 0),
        ("nf4", 8, 3),
        (None, None, 3),
        ("a8q", None, 0),
        ("a4q", 10, 3),
    ],
)
def test_devices_along_tp_share_quantized_and_adapted_experts(form, group, rank):
    """Values, and gradients of the rows and of factors: those of one device; no weight is sent, and no unit.

    One group of four bits cannot be shared, as its bytes hold inputs that are half of all apart, and five groups not by
    four devices: then `down` is shared by its outputs, and units are sent.
    """
    biases = {f"{k}_bias": jnp.asarray(rng(6).normal(size=v[:2]), jnp.float32) for k, v in SHAPES.items()}
    p = weights()
    if form is not None:
        p = params.quantize({"experts": p}, form, r"experts", spec=SPEC, group=group)["experts"]
    p = adapted(p, rank) if rank else p
    experts, mesh = jnp.asarray(ROUTINGS["random"][:64]), params.make_mesh({"tp": 4}, jax.devices()[:4])
    x, routing = jnp.asarray(rng(5).normal(size=(4, 16, D)), jnp.float32), routing_of(experts).reshape(4, 16, -1)

    def loss(factors, x, p):
        p = {k: replace(w, a=factors[k][0], b=factors[k][1]) if rank else w for k, w in p.items()}
        y = ops.moe(x, p | biases, routing, experts.reshape(4, 16, -1), jax.nn.silu)
        return (y**2).sum(), y

    factors = {k: (w.a, w.b) for k, w in p.items()} if rank else {}
    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    want = run(factors, x, p)
    with jax.set_mesh(mesh):
        placed = params.reshard({"experts": p}, SPEC, mesh)["experts"]
        got, text = run(factors, x, placed), run.lower(factors, x, placed).compile().as_text()
    jax.tree.map(partial(close, tol=5e-6), got, want)
    sent = [x for x in plan.collectives(text, narrow=False) if x.kind not in ("all-reduce", "reduce-scatter")]
    shapes = [shape for x in sent for shape in x.shapes]
    assert rank or not shapes or group in (F, 8) and all(s.endswith((f",{F}]", f",{D}]")) for s in shapes)
    assert not any(s.startswith((f"u8[{E}", f"f32[{E},")) for s in shapes)


@pytest.mark.parametrize(
    "form,group,rank,width,tp", [("int4", F, 0, D, 2), ("nf4", 16, 3, D, 2), ("int4", F, 0, D - 2, 4)]
)
def test_nothing_is_sent_in_loops_over_rows(form, group, rank, width, tp):
    """Rows along dp go to as many experts as they choose: devices would wait forever. Four do not share 22 outputs."""
    p = {k: w[:, :width] if k == "down" else w[..., :width] for k, w in weights().items()}
    p = params.quantize({"experts": p}, form, r"experts", spec=SPEC, group=group)["experts"]
    p = adapted(p, rank) if rank else p
    experts = np.stack([np.zeros((32, 2), int), ROUTINGS["random"][:32]])
    x, routing = jnp.asarray(rng(5).normal(size=(2, 32, width)), jnp.float32), routing_of(experts)
    run = jax.jit(
        jax.value_and_grad(lambda x, p: (ops.moe(x, p, routing, jnp.asarray(experts), jax.nn.silu) ** 2).sum())
    )
    want, mesh = run(x, p), params.make_mesh({"dp": 2, "tp": tp}, jax.devices()[: 2 * tp])
    with jax.set_mesh(mesh):
        placed = params.reshard({"experts": p}, SPEC, mesh)["experts"]
        got = run(x, placed)
    jax.tree.map(partial(close, tol=5e-6), got, want)
