"""Optimizers against torch, bitsandbytes and the papers' formulas in float64; their state, its size and its sharding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import params, train
from fdel.models import llama
from fdel.params.hf_layout import hf_names, layout
from fdel.params.spec import Param, normal, ones, stack, zeros
from fdel.train import losses, matrices, moments, parallel
from tests.serve import small

LAYER = {
    "q": Param("heads head_dim embed", (2, 3, 8), normal(1), "l.{layers}.q.weight", "(heads head_dim) embed"),
    "q_bias": Param("heads head_dim", (2, 3), zeros, "l.{layers}.q.bias", "(heads head_dim)"),
    "q_norm": Param("head_dim", (3,), ones, "l.{layers}.q_norm.weight"),
    "o": Param("embed heads head_dim", (8, 2, 3), normal(1), "l.{layers}.o.weight", "embed (heads head_dim)"),
    "router": Param("experts embed", (2, 8), normal(1), "l.{layers}.router.weight"),
    "up": stack(Param("ffn embed", (20, 8), normal(1), "l.{layers}.{experts}.up.weight"), "experts", range(2)),
}  # fmt: skip
SPEC = {
    "embed": Param("vocab embed", (11, 8), normal(1), "embed.weight"),
    "layers": stack(LAYER, "layers", range(3)),
    "head": Param("vocab embed", (11, 8), normal(1), "head.weight"),
}
MATRICES = {"q", "o", "router", "up"}  # by their names in the checkpoint, each layer's and expert's on its own


def random(seed, spec=SPEC, dtype=jnp.float32):
    """A tree of normal numbers of different sizes."""
    r = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(r.normal(size=p.shape) * 10 ** r.uniform(-2, 0), dtype), spec)


def tensors(tree, spec=SPEC):
    """What a checkpoint would hold: {name: float64 tensor in the file's layout}."""
    out = {}
    for p, x in zip(jax.tree.leaves(spec), jax.tree.leaves(tree), strict=True):
        items = np.asarray(x, np.float64).reshape(-1, *x.shape[len(p.stacked) :])
        for name, item in zip(hf_names(p), items, strict=True):
            out[name] = np.zeros(layout(p).file_shape)
            layout(p).write(out[name], item)
    return out


def descend(optimizer, start, grads, every=lambda p: None):
    """Take one jitted step per tree of gradients."""
    one = jax.jit(lambda g, s, p: (lambda u, s: (optax.apply_updates(p, u), s))(*optimizer.update(g, s, p)))
    p, s = start, jax.jit(optimizer.init)(start)
    for g in grads:
        p, s = one(g, s, p)
        every(p)
    return p, s


def torch_descend(make, start, grads):
    """The same for torch optimizers, on what a checkpoint holds; `make(weights)` gives a list of them."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    weights = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in tensors(start).items()}
    optimizers = make(torch.optim, weights)
    for tree in grads:
        for name, g in tensors(tree).items():
            weights[name].grad = torch.tensor(g)
        for optimizer in optimizers:
            optimizer.step()
    return {name: w.detach().numpy() for name, w in weights.items()}


def moved(got, want, start, rtol):
    """Compare how far each tensor went, relative to its largest change."""
    got, start = tensors(got), tensors(start)
    assert got.keys() == want.keys()
    for name in want:
        change = want[name] - start[name]
        assert np.abs(change).max() > 0
        np.testing.assert_allclose(
            got[name] - start[name], change, atol=rtol * np.abs(change).max(), rtol=0, err_msg=name
        )


def groups(weights, weight_decay):
    """torch's parameter groups: matrices decay, all else does not."""
    decayed = [w for name, w in weights.items() if w.ndim > 1 and "norm" not in name]
    others = [w for name, w in weights.items() if w.ndim == 1 or "norm" in name]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


START, GRADS = random(0), [random(i) for i in range(1, 8)]


# ---- against torch -------------------------------------------------------------------------------------------------


def test_adamw() -> None:
    """Seven steps with decay on matrices: 1e-5 of the largest change."""
    optimizer = train.optimizer("adamw", 0.01, spec=SPEC, b2=0.99, weight_decay=0.1, clip=None)
    got, _ = descend(optimizer, START, GRADS)
    adam = lambda optim, w: [optim.AdamW(groups(w, 0.1), lr=0.01, betas=(0.9, 0.99), eps=1e-8)]
    moved(got, torch_descend(adam, START, GRADS), START, 1e-5)


@pytest.mark.slow
def test_adafactor() -> None:
    """Each layer's checkpoint matrix is factored and bounded on its own: 1e-4; and a zero gradient stays one."""
    optimizer = train.optimizer("adafactor", 0.01, spec=SPEC, weight_decay=0.1, clip=None)
    got, state = descend(optimizer, START, GRADS)
    factor = lambda optim, w: [optim.Adafactor(groups(w, 0.1), lr=0.01, eps=(1e-30, 1e-3))]
    moved(got, torch_descend(factor, START, GRADS), START, 1e-4)
    shapes = {x.shape for x in jax.tree.leaves(state)}
    assert {(3, 8), (3, 2, 3)} < shapes and (3, 2, 3, 8) not in shapes
    still, _ = descend(train.optim.adafactor(0.01, spec=SPEC), START, [jax.tree.map(jnp.zeros_like, START)])
    chex.assert_trees_all_equal(still, START)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rms", "adjust", "dtype", "rtol"),
    [
        (0.2, "match_rms_adamw", "float32", 1e-4),
        (None, "original", "bfloat16", 0.1),
    ],
)
def test_muon(rms: float | None, adjust: str, dtype: str, rtol: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden matrices by torch.optim.Muon, all else by Adam; iterations in bfloat16 as torch's, or both in more bits."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    if dtype == "float32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    optimizer = train.optimizer("muon", 0.01, spec=SPEC, weight_decay=0.1, clip=None, rms=rms, dtype=dtype)
    got, state = descend(optimizer, START, GRADS)
    hidden = lambda name: name.split(".")[-2] in MATRICES and not name.endswith("bias")

    def make(optim, w):
        matrices, rest = {n: x for n, x in w.items() if hidden(n)}, {n: x for n, x in w.items() if not hidden(n)}
        assert len(matrices) == 3 * 3 + 6 and {"embed.weight", "head.weight"} < rest.keys()
        return [
            optim.Muon(matrices.values(), lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust),
            optim.AdamW(groups(rest, 0.1), lr=0.01),
        ]

    moved(got, torch_descend(make, START, GRADS), START, rtol)
    assert params.count(state) < 1.5 * params.count(START)  # one moment for matrices


def test_orthogonalize() -> None:
    """In float32, against float64 numpy for tall, wide and batched matrices (1e-5); singular values between 0.6 and 1.3."""
    r = np.random.default_rng(4)
    for shape in ((3, 12, 5), (3, 5, 12)):
        x = r.normal(size=shape)
        got = matrices.orthogonalize(jnp.asarray(x, jnp.float32))
        for one, matrix in zip(np.asarray(got), x, strict=True):
            u, s, vt = np.linalg.svd(matrix, full_matrices=False)
            s = s / np.linalg.norm(s)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            np.testing.assert_allclose(one, u * s @ vt, atol=1e-5)
            assert 0.6 < s.min() and s.max() < 1.3


# ---- against formulas ----------------------------------------------------------------------------------------------


def test_lion() -> None:
    """The paper's algorithm 2 in float64: 1e-6."""
    got, _ = descend(train.optim.lion(0.01, weight_decay=0.1, clip=None), START, GRADS)
    want = {}
    for name, x in tensors(START).items():
        m = 0.0
        for g in (tensors(tree)[name] for tree in GRADS):
            x = x - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * x)
            m = 0.99 * m + 0.01 * g
        want[name] = x
    moved(got, want, START, 1e-5)


@pytest.mark.slow
def test_sophia() -> None:
    """On a quadratic whose Hessian is a diagonal the estimate is exact: the paper's algorithm 3 in float64, 1e-5.

    The step gives the optimizer its gradient function; a plain call does not, and is refused.
    """
    r = np.random.default_rng(5)
    h, x = r.uniform(0.1, 100, 6), r.normal(size=6)
    optimizer = train.optim.sophia(0.01, interval=3, gamma=0.02, weight_decay=0.1, clip=None)
    loss = lambda p, b, _: ((b["h"] * p**2 / 2).sum(0).sum(), {"weight": jnp.float32(4)})
    step = jax.jit(train.update(train.normalize(train.accumulate(train.grads(loss), 2)), optimizer))
    state = train.init_state(jnp.asarray(x, jnp.float32), optimizer)
    m, nu, bounded = np.zeros(6), np.zeros(6), 0
    for t in range(10):
        state, _ = step(state, {"h": jnp.tile(jnp.asarray(h, jnp.float32), (4, 1))})
        g = h * x
        m = 0.965 * m + 0.035 * g
        ratio = m / (1 - 0.965 ** (t + 1)) / np.maximum(0.02 * nu, 1e-8)
        bounded += (np.abs(ratio) > 1).sum() if t else 0
        x = x - 0.01 * (np.clip(ratio, -1, 1) + 0.1 * x)
        if t % 3 == 0:
            nu = 0.99 * nu + 0.01 * h
        np.testing.assert_allclose(state.params, x, rtol=1e-5, atol=1e-6)
    assert bounded > 0
    with pytest.raises(ValueError, match="call its update with grad_fn"):
        optimizer.update(state.params, state.opt_state, state.params)


@pytest.mark.slow
def test_schedule_free() -> None:
    """The paper's sequences x, y, z in float64, with a warm-up and decay at y: 1e-5."""
    schedule = train.schedules.constant(0.02, warmup=3)
    optimizer = train.optim.schedule_free(schedule, b1=0.8, b2=0.99, weight_decay=0.1, clip=None)
    got, state = descend(optimizer, START, GRADS)
    means, points = {}, {}
    for name, x in tensors(START).items():
        y, z, v, total = x, x, 0.0, 0.0
        for t, g in enumerate(tensors(tree)[name] for tree in GRADS):
            rate = 0.02 * min(1, t / 3)
            v = 0.99 * v + 0.01 * g**2
            z = z - rate * (g / (np.sqrt(v / (1 - 0.99 ** (t + 1))) + 1e-8) + 0.1 * y)
            total += rate**2
            c = rate**2 / total if total else 0.0
            x = (1 - c) * x + c * z
            y = 0.2 * z + 0.8 * x
        means[name], points[name] = x, y
    moved(got, points, START, 1e-5)
    moved(train.optim.averaged(train.TrainState(0, got, state)), means, START, 1e-5)
    with pytest.raises(ValueError, match="has 0 schedule-free parts"):
        train.optim.averaged(train.init_state(START, train.optim.adamw(0.1)))


# ---- moments in fewer bits -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_blocks(signed: bool) -> None:
    """bitsandbytes' map and its nearest codes; ragged, narrow and zero blocks keep their shape and their largest value."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    code = bnb.functional.create_dynamic_map(signed).numpy()
    np.testing.assert_allclose(moments.codebook(signed), code, rtol=1e-6, atol=1e-12)
    r = np.random.default_rng(6)
    x = (r.normal(size=(8, 512)) * 10 ** r.uniform(-6, 2, (8, 512))).astype(np.float32)
    x = x if signed else np.abs(x)
    encode = jax.jit(moments.encode, static_argnums=1)
    got = encode(jnp.asarray(x), signed)
    want, stats = bnb.functional.quantize_blockwise(torch.tensor(x), torch.tensor(code), blocksize=256)
    np.testing.assert_array_equal(got.scale.reshape(-1), stats.absmax.numpy())
    relative = np.abs(x) / np.repeat(np.asarray(got.scale), 256, -1)
    same = np.asarray(got.codes == want.numpy())
    assert (
        same[relative > 1e-3].mean() > 0.98
    )  # it looks codes up in steps of 3e-5, and so misses the nearest of small ones
    ours, theirs = (np.abs(code[codes] - x / np.repeat(got.scale, 256, -1)) for codes in (got.codes, want.numpy()))
    assert (ours <= theirs + 1e-7).all()
    for shape in ((3, 300), (2, 3, 64), (1,)):
        x = np.abs(r.normal(size=shape)).astype(np.float32)
        x[0] = 0
        back = moments.decode(encode(jnp.asarray(x), signed), signed)
        assert back.shape == shape and (back[0] == 0).all()
        np.testing.assert_allclose(back, x, atol=0.02 * x.max(), rtol=0)


WIDE = {"w": Param("ffn embed", (16, 512), normal(1), "w.weight"), "b": Param("ffn", (512,), zeros, "b.bias")}


def test_adamw_8bit_equals_bitsandbytes() -> None:
    """Ten steps of AdamW8bit: nine tenths within 1e-4 of the largest change, all within 2e-2 in norm.

    The rest differs as `test_blocks` says: small relative values get another code there.
    """
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    start, grads = random(0, WIDE), [random(i, WIDE) for i in range(1, 11)]
    got, _ = descend(train.optimizer("adamw_8bit", 0.01, spec=WIDE, weight_decay=0.1, clip=None), start, grads)
    w = {k: torch.nn.Parameter(torch.tensor(np.asarray(v))) for k, v in start.items()}
    group = [{"params": [w["w"]], "weight_decay": 0.1}, {"params": [w["b"]], "weight_decay": 0.0}]
    adam = bnb.optim.AdamW8bit(group, lr=0.01)
    for tree in grads:
        for name in w:
            w[name].grad = torch.tensor(np.asarray(tree[name]))
        adam.step()
    for name in w:
        want = w[name].detach().numpy()
        error = np.abs(got[name] - want) / np.abs(want - start[name]).max()
        assert (error < 1e-4).mean() > 0.9
        assert np.linalg.norm(got[name] - want) < 0.02 * np.linalg.norm(want - start[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drift", "size"), [("adamw_8bit", 0.1, 2.1), ("adamw_bf16", 0.02, 4.01)])
def test_drift_and_size(name: str, drift: float, size: float) -> None:
    """Fifty steps towards a noisy optimum stay within `drift` of float32 AdamW's path; bytes per parameter of moments."""
    spec = {"w": Param("ffn embed", (64, 512), normal(1), "w.weight")}
    start, aim = random(0, spec), random(1, spec)
    grad = lambda p, i: jax.tree.map(lambda p, a, n: p - a + 0.3 * n, p, aim, random(100 + i, spec))
    paths = []
    for optimizer in (train.optim.adamw(0.02, clip=None), train.optimizer(name, 0.02, spec=spec, clip=None)):
        one = jax.jit(optimizer.update)
        p, s = start, optimizer.init(start)
        for i in range(50):
            u, s = one(grad(p, i), s, p)
            p = optax.apply_updates(p, u)
        paths.append(p["w"] - start["w"])
    assert 0 < np.linalg.norm(paths[1] - paths[0]) < drift * np.linalg.norm(paths[0])
    assert params.nbytes(s) <= size * params.count(start)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_moments_do_not_get_stuck(kind: str) -> None:
    """3000 equal gradients for a bfloat16 weight: the second moment comes to 1 - 0.999^3000 of its limit (0.95)."""
    optimizer = train.optim.adamw(1e-3, moments=kind)
    weights = jnp.ones(64, jnp.bfloat16)
    grad = jnp.full(64, 0.5**0.5)
    body = lambda i, s: optimizer.update(grad / 8, s, weights)[1]
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 3000, body, s))(optimizer.init(weights))
    (nu,) = jax.tree.leaves(optax.tree.get(state, "nu"))
    assert nu.dtype == kind
    nu = np.asarray(nu, np.float32)
    np.testing.assert_allclose(nu.mean(), 0.5 / 64 * (1 - 0.999**3000), rtol=1e-4 if kind == "float32" else 0.02)
    assert train.init_state(weights, optimizer).params.dtype == jnp.bfloat16


# ---- groups --------------------------------------------------------------------------------------------------------


def test_decay_mask() -> None:
    """Matrices decay; norms and biases do not, however many axes we give them."""
    layer = {"q": True, "q_bias": False, "q_norm": False, "o": True, "router": True, "up": True}
    assert train.optim.decay_mask(SPEC) == {"embed": True, "layers": layer, "head": True}


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free"])
def test_rates_and_freezing(name: str) -> None:
    """A rate multiplies a group's change, first match first; frozen arrays stay as they are, without state."""
    spec = {"embed": SPEC["embed"], "layers": {k: SPEC["layers"][k] for k in ("up", "q_norm")}}
    start, grads = random(0, spec), random(1, spec)
    make = lambda **kw: train.optimizer(name, 0.01, spec=spec, weight_decay=0.1, clip=None, **kw)
    change = lambda optimizer: jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, start)
    want, whole = change(make())
    got, _ = change(make(rates={"up|embed": 0.5, "layers": 2.0}))
    factor = {"embed": 0.5, "layers": {"up": 0.5, "q_norm": 2.0}}
    scaled = jax.tree.map(lambda f, w: f * w, factor, want)
    chex.assert_trees_all_close(got, scaled, rtol=1e-4, atol=1e-7)
    got, state = change(train.optim.freeze(make(), "^layers"))
    assert all((x == 0).all() for x in jax.tree.leaves(got["layers"]))
    np.testing.assert_allclose(got["embed"], want["embed"], rtol=1e-6)
    assert not {p.shape for p in spec["layers"].values()} & {x.shape for x in jax.tree.leaves(state)}
    for bad in (lambda: train.optim.freeze(make(), "nothing"), lambda: make(rates={"nothing": 0.0})):
        with pytest.raises(ValueError, match="no parameter's path matches 'nothing'; there are embed, layers.q_norm"):
            change(bad())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_adapters(name: str) -> None:
    """Adapters alone are stepped and have state, by optimizers that know the whole tree's spec."""
    adapted = params.lora.add(START, 2, 4.0, key=jax.random.key(0), spec=SPEC)
    trainable, _ = params.lora.split(adapted)
    grads = jax.tree.map(jnp.ones_like, trainable)
    got, state = descend(train.optimizer(name, 0.01, spec=SPEC, weight_decay=0.1), trainable, [grads])
    assert jax.tree.structure(got) == jax.tree.structure(trainable)
    assert all((a != b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(trainable), strict=True))
    assert params.count(state) <= 2 * params.count(trainable) + 9


def test_stop_gradient() -> None:
    """Held arrays have no part in the gradient norm, and the backward pass does not compute their gradients."""
    loss = lambda p, b, _: (jnp.tanh(jnp.tanh(b @ p["w"]) @ p["v"]).sum(), {"weight": 1.0})
    p = random(0, {k: Param("ffn embed", (64, 64), normal(1)) for k in "wv"})
    whole, part = (jax.jit(train.grads(f)) for f in (loss, train.optim.stop_gradient(loss, "^w$")))
    batch = jnp.ones((8, 64)) / 5
    (want, _), (got, _) = whole(p, batch), part(p, batch)
    np.testing.assert_array_equal(got["v"], want["v"])
    assert (got["w"] == 0).all() and (want["w"] != 0).any()
    flops = [f.lower(p, batch).compile().cost_analysis()["flops"] for f in (whole, part)]
    assert flops[1] < 0.7 * flops[0]


def test_names() -> None:
    with pytest.raises(ValueError, match="'adam' is not one of adamw, adamw_8bit, adamw_bf16, lion"):
        train.optimizer("adam", 0.1, spec=SPEC)
    with pytest.raises(ValueError, match="'fp8' is not one of float32, bfloat16, int8"):
        train.optim.adamw(0.1, moments="fp8")


# ---- sharding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(train.optim.OPTIMIZERS))
def test_state_is_sharded_as_parameters(name: str) -> None:
    """On eight devices, arrays of a parameter's shape lie as it does, 8-bit codes' scales too, through init and a step."""
    spec = {"w": stack(Param("ffn embed", (512, 1024), normal(1), "l.{layers}.weight"), "layers", range(2)),
            "n": Param("embed", (1024,), ones, "n.weight")}  # fmt: skip
    mesh = params.make_mesh({"fsdp": 4, "tp": 2})
    shardings = params.shardings(spec, mesh)
    start = jax.jit(lambda k: params.init(spec, k), out_shardings=shardings)(jax.random.key(0))
    optimizer = train.optimizer(name, 0.1, spec=spec)
    init = lambda p: train.init_state(p, optimizer, ema=p)
    at = parallel.state_shardings(jax.eval_shape(init, start), shardings)
    state = jax.jit(init, out_shardings=at)(start)
    want = {x.shape: x.sharding.spec for x in start.values()} | {(2, 512, 4): P(None, "tp", "fsdp")}
    want |= dict.fromkeys([(2, 512), (2, 1024)], P())  # Adafactor's rows and columns
    arrays = [x for x in jax.tree.leaves((state.opt_state, state.extra)) if x.ndim]
    assert len(arrays) >= 4
    for x in arrays:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, want[x.shape]), x.ndim), (x.shape, x.sharding)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["sum", "statistics", "cached"])
def test_gradients_of_a_model_can_be_differentiated(head) -> None:
    """What sophia does: H u of a llama's loss, through attention, the chunked head, gradcache; central differences."""
    r = np.random.default_rng(0)
    tokens = r.integers(0, small.VOCAB, (2, 160))
    total = losses.sft(llama, small.CFG)

    def logps(p, batch, given):
        x, *_ = llama.hidden(p, batch["tokens"], small.CFG)
        stats = losses.token_stats(x, llama.head(p, small.CFG), jnp.roll(batch["tokens"], -1, 1))
        return {"logps": stats.logp.sum(-1), "known": batch["tokens"][:, 0] > 0}

    both = lambda out, *_: (out["logps"].prod(), {"weight": out["known"].sum()})
    gradient = {
        "sum": train.grads(total),
        "statistics": train.grads(lambda p, batch, _: both(logps(p, batch, _))),
        "cached": train.gradcache(logps, both, 2),
    }[head]

    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
        p = wide(params.init(llama.spec(small.CFG), jax.random.key(0)))
        u = wide(jax.tree.map(lambda x: r.normal(size=x.shape), p))
        plain = lambda p: gradient(p, {"tokens": tokens})[0]
        grad = jax.jit(plain)
        got = jax.jit(lambda p, u: jax.jvp(plain, (p,), (u,))[1])(p, u)
        above, below = (grad(jax.tree.map(lambda x, y, e=e: x + e * y, p, u)) for e in (1e-5, -1e-5))
        for name, g in params.named_leaves(got):
            want = (dict(params.named_leaves(above))[name] - dict(params.named_leaves(below))[name]) / 2e-5
            assert np.abs(g - want).max() < 1e-3 * np.abs(want).max(), name
