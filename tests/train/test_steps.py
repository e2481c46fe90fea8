"""Composed steps: independence of the microbatches, partial training, what a step keeps, and what is compiled."""

import functools
import re
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import ops, train
from fdel.train import losses
from fdel.train.losses.forward import shift

V, D, T = 23, 8, 12
tiny = SimpleNamespace(  # what losses need of a model family
    hidden=lambda params, tokens, cfg, batch, state=None, taps=None, remat=None: (
        jnp.tanh(params["embed"][tokens] @ params["w"] + params["b"]),
        None,
        None,
    ),
    head=lambda params, cfg: ops.Head(params["embed"]),
)


def tiny_params(dtype=jnp.float32):
    r = np.random.default_rng(0)
    shapes = {"embed": (V, D), "w": (D, D), "b": (D,)}
    return {k: jnp.asarray(r.normal(size=s), dtype) for k, s in shapes.items()}


def ragged(lengths, seed: int = 0):
    """A batch with one sequence of each length per row, padded to T, of which a random part is to be learnt."""
    r = np.random.default_rng(seed)
    tokens = jnp.asarray(r.integers(0, V, (len(lengths), T)))
    mask = jnp.asarray(r.random((len(lengths), T)) < 0.7)
    return {"tokens": tokens, "packed": ops.packed(tokens, jnp.asarray(lengths)), "mask": mask}


def composed(n: int, optimizer, loss=None, **options):
    loss = losses.sft(tiny, None, chunk=5) if loss is None else loss
    return train.update(train.normalize(train.accumulate(train.grads(loss), n)), optimizer, **options)


@functools.cache
def sgd(n: int):
    """A jitted step of plain gradient descent with n microbatches, compiled once for all tests."""
    return jax.jit(composed(n, optax.sgd(1.0)))


def run(step, params, optimizer, batches, **extra):
    """Take one step per batch; returns the last state and all metrics."""
    step, state, all_metrics = jax.jit(step), train.init_state(params, optimizer, **extra), []
    for batch in batches:
        state, metrics = step(state, batch)
        all_metrics.append(jax.tree.map(np.asarray, metrics))
    return state, all_metrics


def close(got, want, rtol):
    """Compare trees leaf by leaf, relative to the leaf's largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max(), rtol=0)


# ---- accumulation --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.integers(0, T), min_size=8, max_size=8), st.integers(0, 99))
def test_update_does_not_depend_on_microbatches(lengths: list[int], seed: int) -> None:
    """1, 2, 4 and 8 microbatches of ragged weights, one step of gradient descent: 1e-6 of the largest value."""
    batch, state = ragged(lengths, seed), train.init_state(tiny_params(), optax.sgd(1.0))
    want, want_metrics = sgd(1)(state, batch)
    for n in (2, 4, 8):
        close(sgd(n)(state, batch), (want, want_metrics), 1e-6)
    assert want_metrics["weight"] == (np.asarray(shift(*labels_of(batch))) >= 0).sum()


def labels_of(batch):
    return batch["tokens"], batch["packed"].segment_ids, batch["mask"]


@pytest.mark.slow
def test_mean_of_means_would_fail() -> None:
    """The property above is not empty: normalising each microbatch first gives another update."""
    batch, params = ragged([12, 2] * 4), tiny_params()
    g = train.normalize(train.grads(losses.sft(tiny, None)))
    want, _ = jax.jit(g)(params, batch)
    wrong, _ = jax.jit(train.accumulate(g, 2))(params, batch)
    assert np.abs(wrong["w"] / 2 - want["w"]).max() > 0.01 * np.abs(want["w"]).max()


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """512 ones: a bfloat16 sum sticks at 256."""
    loss = lambda p, b, _: ((p * b).sum(), {"weight": b.sum(), "pairs": ((3 * b).sum(), b.sum())})
    batch = jnp.ones(512, jnp.bfloat16)
    grad, sums = train.accumulate(train.grads(loss), 512)(jnp.ones((), jnp.bfloat16), batch)
    assert grad == 512 and sums["weight"] == 512 and grad.dtype == jnp.float32
    grad, metrics = train.normalize(train.accumulate(train.grads(loss), 512))(jnp.ones((), jnp.bfloat16), batch)
    assert grad == 1 and metrics["pairs"] == 3 and metrics["weight"] == 512


def test_nothing_to_learn_changes_nothing() -> None:
    state, metrics = sgd(2)(train.init_state(tiny_params(), optax.sgd(1.0)), ragged([0, 1] * 4))
    chex.assert_trees_all_equal(state.params, tiny_params())
    assert metrics["loss"] == metrics["weight"] == metrics["grad_norm"] == 0


def test_wrong_batches() -> None:
    g = train.grads(lambda p, b, _: (p * b.sum(), {"weight": b.sum()}))
    with pytest.raises(ValueError, match=r"shape \(6,\) has no rows to divide into 4"):
        train.accumulate(g, 4)(jnp.ones(()), jnp.ones(6))
    with pytest.raises(ValueError, match="expected one named 'weight'"):
        train.grads(lambda p, b, _: (p, {"tokens": b}))(1.0, 1.0)


@pytest.mark.slow
def test_accumulation_keeps_the_batch_where_it_is() -> None:
    """Eight devices, batch over dp: no all-gather, and every device multiplies only its own rows."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = lambda s, spec: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec))
    loss = lambda w, x, _: ((jnp.tanh(x @ w) ** 2).sum(), {"weight": jnp.float32(x.shape[0])})
    g = jax.jit(train.normalize(train.accumulate(train.grads(loss), 4)))
    with jax.set_mesh(mesh):
        hlo = g.lower(shape((16, 24), P()), shape((64, 16), P("dp"))).compile().as_text()
    assert not re.search(r" (all-gather|all-to-all|collective-permute)(-start)?\(", hlo)
    assert re.search(r"f32\[2,24\]\S* dot\(", hlo)


# ---- losses that couple rows ---------------------------------------------------------------------------------------


def coupled(params, batch, given):
    """Vectors, an integer and a flag per row, for `objective`."""
    x = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"] + params["b"]).mean(1)
    return {"x": x, "y": x @ given["reference"], "id": batch["tokens"][:, 0], "odd": batch["tokens"][:, 0] % 2 == 1}


def objective(out, batch, given):
    """In-batch negatives, a sort over all rows and a reference, weighted by what carries no gradient."""
    scores = jax.nn.log_softmax(out["x"] @ out["y"].T)
    order = jnp.sort(out["x"][:, 0]) @ jnp.arange(len(scores))
    each = -jnp.diagonal(scores) * (1 + out["odd"]) + 0.1 * batch["weight"]
    return each.sum() + order, {"weight": batch["weight"].sum(), "ids": out["id"].sum(), "top": (scores.max(), 2)}


@pytest.mark.slow
def test_gradcache_is_exact() -> None:
    """Gradients and sums of 1, 2, 4 and 8 microbatches against one `value_and_grad` over all rows: 2e-6."""
    r = np.random.default_rng(3)
    batch = {"tokens": jnp.asarray(r.integers(0, V, (8, T))), "weight": jnp.asarray(r.random(8), jnp.float32)}
    params, reference = tiny_params(), jnp.asarray(r.normal(size=(D, D)), jnp.float32)
    given = {"reference": reference}
    whole = lambda p: objective(coupled(p, batch, given), batch, given)
    (total, sums), want = jax.jit(jax.value_and_grad(whole, has_aux=True))(params)
    for n in (1, 2, 4, 8):
        grad, got = jax.jit(train.gradcache(coupled, objective, n))(params, batch, given)
        close((grad, got), (want, {"loss": total, **sums}), 2e-6)
    apart, _ = jax.jit(train.accumulate(train.gradcache(coupled, objective, 1), 2))(params, batch, given)
    assert np.abs(apart["w"] - want["w"]).max() > 0.1 * np.abs(want["w"]).max()


@pytest.mark.slow
def test_gradcache_adds_up_in_float32() -> None:
    """512 ones for a bfloat16 weight; and outputs that are not one per row are refused."""
    sums = lambda out, batch, _: (out.sum(), {"weight": batch.sum()})
    batch, one = jnp.ones(512, jnp.bfloat16), jnp.ones((), jnp.bfloat16)
    grad, _ = train.gradcache(lambda p, b, _: p * b, sums, 512)(one, batch)
    assert grad == 512 and grad.dtype == jnp.float32
    for outputs in (lambda p, b, _: p * b.sum(), lambda p, b, _: jnp.tile(p * b, 2)):
        with pytest.raises(ValueError, match="expected 64 rows in front"):
            train.gradcache(outputs, sums, 8)(one, batch)
    with pytest.raises(ValueError, match="expected one named 'weight'"):
        train.gradcache(lambda p, b, _: p * b, lambda out, batch, _: (out.sum(), {}), 8)(one, batch)


# ---- the step ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.05])
def test_step_equals_torch(clip: float | None) -> None:
    """Five AdamW steps on one small network, decay on matrices only, with and without clipping: 1e-5."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    r = np.random.default_rng(1)
    w1, b1, w2 = r.normal(size=(5, 7)), r.normal(size=7), r.normal(size=(7, 3))
    xs, ys, ws = r.normal(size=(5, 8, 5)), r.normal(size=(5, 8, 3)), r.random((5, 8))
    params = {k: jnp.asarray(v, jnp.float32) for k, v in {"w1": w1, "b1": b1, "w2": w2}.items()}

    def loss(p, b, given):
        error = ((jnp.tanh(b["x"] @ p["w1"] + p["b1"]) @ p["w2"] - b["y"]) ** 2).sum(-1)
        return (error * b["w"]).sum(), {"weight": b["w"].sum()}

    mask = {"w1": True, "b1": False, "w2": True}
    schedule = train.schedules.cosine(0.05, warmup=2, steps=8)
    optimizer = train.optim.adamw(schedule, b2=0.99, weight_decay=0.1, clip=clip, mask=mask)
    batches = [{k: jnp.asarray(v[i], jnp.float32) for k, v in {"x": xs, "y": ys, "w": ws}.items()} for i in range(5)]
    state, metrics = run(composed(2, optimizer, loss), params, optimizer, batches)

    t1, tb, t2 = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (w1, b1, w2))
    groups = [{"params": [t1, t2], "weight_decay": 0.1}, {"params": [tb], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99), eps=1e-8)
    rates = [0, 0.025] + [0.05 * 0.5 * (1 + np.cos(np.pi * i / 6)) for i in range(3)]
    for x, y, w, rate, m in zip(*map(torch.tensor, (xs, ys, ws)), rates, metrics, strict=True):
        error = ((torch.tanh(x @ t1 + tb) @ t2 - y) ** 2).sum(-1)
        mean = (error * w).sum() / w.sum()
        adam.zero_grad()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_([t1, tb, t2], clip or float("inf"))
        np.testing.assert_allclose([m["loss"], m["grad_norm"]], [mean.item(), norm.item()], rtol=1e-5)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    assert state.step == 5
    close(state.params, {"w1": t1.detach().numpy(), "b1": tb.detach().numpy(), "w2": t2.detach().numpy()}, 1e-5)


@pytest.mark.slow
def test_partial_training() -> None:
    """A part of the tree is trained by joining it with the rest in the loss: same gradient, state only for the part."""
    params, batch = tiny_params(), ragged([12, 5, 7, 9])
    part, rest = {"w": params["w"]}, {k: params[k] for k in ("embed", "b")}
    loss, optimizer = losses.sft(tiny, None), train.optim.adamw(0.1, clip=None)
    step = composed(2, optimizer, lambda part, batch, given: loss(part | given["rest"], batch, given))
    state, metrics = jax.jit(step)(train.init_state(part, optimizer), batch, rest=rest)
    whole, (want,) = run(composed(1, optimizer), params, optimizer, [batch])
    close(state.params, {"w": whole.params["w"]}, 1e-6)
    assert optax.tree.get(state.opt_state, "mu").keys() == {"w"} and 0 < metrics["grad_norm"] < want["grad_norm"]


def test_extras_are_read_and_kept() -> None:
    """What `reads` names is given, undifferentiated and unchanged; a donated state holds no buffer twice."""
    loss = lambda p, b, given: ((p * given["scale"] * b + given["offset"]).sum(), {"weight": jnp.float32(b.size)})
    optimizer = optax.sgd(1.0)
    step = jax.jit(train.update(train.grads(loss), optimizer, reads=("scale",)), donate_argnums=0)
    params = jnp.array([1.0, 2.0])
    state = jax.jit(lambda p: train.init_state(p, optimizer, scale=p, other=p))(params)
    state, metrics = step(state, jnp.ones(2), offset=3.0)
    assert state.params.tolist() == [0, 0] and metrics["loss"] == 11
    assert state.extra["scale"].tolist() == state.extra["other"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"extras are \['scale'\]; add it: init_state\(params, optimizer, ema=...\)"):
        train.update(train.grads(loss), optimizer, reads=("ema",))(train.init_state(params, optimizer, scale=1), 0.0)


@pytest.mark.slow
def test_skip_nonfinite() -> None:
    """A step with an infinite loss, or with a NaN gradient, leaves no trace but the step count, not in extras either."""
    optimizer, params = train.optim.adamw(0.1), tiny_params()
    sft = losses.sft(tiny, None)

    def loss(p, b, given):
        total, sums = sft(p, {"tokens": b["tokens"]}, given)
        return total + b["offset"][0] + jnp.sqrt(b["factor"][0] * (p["b"] ** 2).sum()), sums

    def batch(seed, offset, factor):
        return ragged([12, 12], seed) | {"offset": jnp.full(2, offset), "factor": jnp.full(2, factor)}

    def step(skip):
        moved = train.ema(composed(1, optimizer, loss, skip_nonfinite=skip), 0.9)
        return train.sync_reference(moved, 0.5, every=2)

    extra = {"ema": params, "reference": params}
    good = [batch(0, 0.0, 1.0), batch(3, 0.0, 1.0)]
    bad = [batch(1, np.inf, 1.0), batch(2, 0.0, 0.0)]
    got, metrics = run(step(True), params, optimizer, [good[0], *bad, good[1]], **extra)
    want, others = run(step(False), params, optimizer, good, **extra)
    close((got.params, got.opt_state, got.extra), (want.params, want.opt_state, want.extra), 1e-6)
    assert "skipped" not in others[0]
    assert [m["skipped"] for m in metrics] == [0, 1, 1, 0] and got.step == 4
    assert np.isfinite([metrics[1]["grad_norm"], metrics[2]["loss"]]).all()


def test_compiler_options_are_known_and_change_no_step() -> None:
    """They are what this platform's compiler accepts; a step with them: 1e-6 of the largest value."""
    optimizer = train.optim.adamw(0.1)
    state, batch = train.init_state(tiny_params(), optimizer), ragged([12, 9])
    got, _ = jax.jit(composed(1, optimizer), compiler_options=train.compiler_options())(state, batch)
    close(got.params, jax.jit(composed(1, optimizer))(state, batch)[0].params, 1e-6)
    assert train.compiler_options() == {"xla_cpu_prefer_vector_width": 512}


def test_skipping_copies_no_state() -> None:
    """The donated parameters and moments are changed in place: beside the gradient, next to nothing is held."""
    optimizer, params = train.optim.adamw(0.1), {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    g = train.grads(lambda p, b, _: ((p["w"] @ b).sum(), {"weight": 1.0}))
    state = jax.eval_shape(lambda p: train.init_state(p, optimizer), params)
    step = jax.jit(train.update(g, optimizer, skip_nonfinite=True), donate_argnums=0)
    compiled = step.lower(state, jax.ShapeDtypeStruct((512, 8), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * 4 * 512**2


# ---- what a step keeps ---------------------------------------------------------------------------------------------


def steps_of(wrap, n: int, **extra):
    """The parameters before and after each of n steps of gradient descent, and the last state of `wrap(step)`."""
    optimizer, params, paths = optax.sgd(1.0), tiny_params(), []
    step = jax.jit(wrap(composed(1, optimizer)), donate_argnums=0)
    state = jax.jit(lambda p: train.init_state(p, optimizer, **{k: v(p) for k, v in extra.items()}))(params)
    for seed in range(n):
        paths.append(jax.tree.map(np.asarray, state.params))
        state, metrics = step(state, ragged([12, 9], seed))
    return [*paths, jax.tree.map(np.asarray, state.params)], state, metrics


@pytest.mark.slow
def test_ema() -> None:
    """The average of five steps against its sum in float64: 1e-6."""
    paths, state, _ = steps_of(lambda step: train.ema(step, 0.8), 5, ema=lambda p: p)
    weights = [0.8**5, *(0.2 * 0.8 ** (4 - i) for i in range(5))]
    close(
        state.extra["ema"], jax.tree.map(lambda *xs: sum(w * x for w, x in zip(weights, xs, strict=True)), *paths), 1e-6
    )


@pytest.mark.slow
def test_sync_reference() -> None:
    """The reference moves after steps 2 and 4 of five, by alpha, and keeps its dtype: 1e-6, 1e-2 in bfloat16."""
    for dtype, rtol in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)):
        reference = lambda p, dtype=dtype: jax.tree.map(lambda x: x.astype(dtype), p)
        wrap = lambda step: train.sync_reference(step, alpha=0.6, every=2)
        paths, state, _ = steps_of(wrap, 5, reference=reference)
        want = jax.tree.map(lambda a, b, c: 0.16 * a + 0.24 * b + 0.6 * c, paths[0], paths[2], paths[4])
        close(jax.tree.map(lambda x: x.astype(jnp.float32), state.extra["reference"]), want, rtol)
        assert state.extra["reference"]["w"].dtype == dtype


def test_carry() -> None:
    """A running mean over tokens goes from the metrics into the state and back into the loss; skipped steps do not."""

    def loss(p, b, given):
        return (p * b).sum() + b[0] * 0, {"weight": 1.0, "mean": (b.sum(), 2), "seen": given["seen"]["mean"]}

    def fold(old, metrics):
        count = old["count"] + 2
        return {"count": count, "mean": old["mean"] + 2 / count * (metrics["mean"] - old["mean"])}

    optimizer = optax.sgd(0.1)
    step = train.update(train.normalize(train.grads(loss)), optimizer, reads=("seen",), skip_nonfinite=True)
    step = jax.jit(train.extras.carry(step, "seen", fold))
    state = train.init_state(jnp.ones(()), optimizer, seen={"mean": 0.0, "count": 0})
    batches, seen = [[1.0, 2.0], [jnp.inf, 1.0], [4.0, 5.0], [1.0, 1.0]], []
    for batch in batches:
        state, metrics = step(state, jnp.array(batch))
        seen.append(float(metrics["seen"]))
    np.testing.assert_allclose(seen, [0, 1.5, 1.5, 3])
    np.testing.assert_allclose([state.extra["seen"]["mean"], state.extra["seen"]["count"]], [14 / 6, 6])


# ---- the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sft_counts_next_tokens_inside_segments() -> None:
    """Packed rows against a plain loop over separate sequences in numpy: 1e-6."""
    r = np.random.default_rng(2)
    params = tiny_params()
    sequences = [r.integers(0, V, n).tolist() for n in (5, 4, 1, 9, 3)]
    tokens, packed = ops.pack(sequences, T)
    mask = r.random(tokens.shape) < 0.6
    total, weight, entropy, right = 0.0, 0, 0.0, 0
    embed, w, b = (np.asarray(params[k], np.float64) for k in ("embed", "w", "b"))
    for row, ids in enumerate(np.asarray(packed.segment_ids)):
        for t in range(T - 1):
            if ids[t] != ids[t + 1] or ids[t] < 0 or not mask[row, t + 1]:
                continue
            z = embed @ np.tanh(embed[tokens[row, t]] @ w + b)
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            total -= np.log(p[tokens[row, t + 1]])
            entropy -= (p * np.log(p)).sum()
            right += z.argmax() == tokens[row, t + 1]
            weight += 1
    got, sums = jax.jit(losses.sft(tiny, None, chunk=5))(params, {"tokens": tokens, "packed": packed, "mask": mask})
    assert 0 < weight < sum(map(len, sequences)) and sums["weight"] == weight
    np.testing.assert_allclose(got, total, rtol=1e-6)
    np.testing.assert_allclose([sums["entropy"], sums["mean_token_accuracy"]], [entropy, right], rtol=1e-6)


def test_shift() -> None:
    tokens, ids = jnp.array([[5, 6, 7, 8, 9, 0]]), jnp.array([[0, 0, 0, 1, 1, -1]])
    assert shift(tokens, ids).tolist() == [[6, 7, -100, 9, -100, -100]]
    assert shift(tokens, ids, jnp.array([[1, 0, 1, 1, 1, 1]])).tolist() == [[-100, 7, -100, 9, -100, -100]]
