"""Training on eight devices: the same curve as on one, and what the compiled program holds and sends."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import params as fp
from fdel import plan, train
from fdel.models import llama, qwen3_moe
from fdel.train import parallel

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
             num_key_value_heads=4)  # fmt: skip
FAMILIES = {
    "llama": (llama, SIZES),
    "one_key": (llama, SIZES | dict(num_key_value_heads=1)),
    "qwen3_moe": (qwen3_moe, SIZES | dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
                                          head_dim=8, norm_topk_prob=True)),
}  # fmt: skip
MESHES = {
    "llama": ["dp=8", "fsdp=8", "tp=4,dp=2", "sp=8", "dp=2,fsdp=2,tp=2", "fsdp=2,sp=4", "dp=2,sp=2,tp=2", "dp=4,tp=2",
              "fsdp=4,tp=2", "fsdp=2,tp=2,sp=2", "tp=8"],
    "one_key": ["dp=2,tp=4", "fsdp=2,tp=2,sp=2"],
    "qwen3_moe": ["dp=8", "fsdp=8", "ep=8", "ep=2,fsdp=2,tp=2", "ep=4,dp=2", "ep=2,sp=2,dp=2", "ep=2,tp=4",
                  "fsdp=4,ep=2", "tp=2,sp=4", "dp=2,fsdp=2,sp=2"],
}  # fmt: skip
ALL = [(family, mesh) for family, meshes in MESHES.items() for mesh in meshes]
FAST = {("llama", "dp=2,fsdp=2,tp=2")}
DEAR = [  # whose axes others have together
    *(
        ("llama", mesh)
        for mesh in ("dp=8", "sp=8", "tp=8", "fsdp=2,sp=4", "fsdp=2,tp=2,sp=2", "dp=4,tp=2", "tp=4,dp=2", "fsdp=4,tp=2")
    ),
    ("one_key", "fsdp=2,tp=2,sp=2"),
    *(
        ("qwen3_moe", mesh)
        for mesh in (
            "dp=8",
            "fsdp=8",
            "ep=2,fsdp=2,tp=2",
            "ep=2,tp=4",
            "tp=2,sp=4",
            "fsdp=4,ep=2",
            "ep=8",
            "ep=4,dp=2",
            "dp=2,fsdp=2,sp=2",
        )
    ),
]
MARKS = {case: [pytest.mark.slow, *[pytest.mark.matrix] * (case in DEAR)] for case in ALL if case not in FAST}
cases = [pytest.param(*case, marks=MARKS.get(case, [])) for case in ALL]
ROWS, LENGTH, MICROBATCHES = 16, 32, 2


def step_of(name, mesh=None):
    """(initialiser, step, shardings of the state) of a family."""
    family, sizes = FAMILIES[name]
    cfg = family.Config.from_hf(sizes)
    # With the usual eps, Adam's first updates are the signs of gradients, of rounding errors where there is no gradient.
    spec, optimizer = family.spec(cfg), train.optim.adamw(1e-2, eps=1e-3)
    g = train.grads(train.losses.sft(family, cfg, chunk=8))
    init = lambda key: train.init_state(fp.init(spec, key, dtype=jnp.float32), optimizer)
    at = None
    if mesh is not None:
        shardings = fp.shardings(spec, mesh)
        g = parallel.constrain(g, shardings)
        at = parallel.state_shardings(jax.eval_shape(init, jax.random.key(0)), shardings)
    g = parallel.reduce_once(train.accumulate(g, MICROBATCHES))
    return init, train.update(train.normalize(g), optimizer), at


def batch_of(i):
    """Ragged rows, so that devices and microbatches weigh differently."""
    r = np.random.default_rng(i)
    # A walk through the vocabulary that can be learnt.
    tokens = (np.cumsum(r.integers(1, 4, (ROWS, LENGTH)), 1) + r.integers(0, 64, (ROWS, 1))) % 64
    return {"tokens": jnp.asarray(tokens, jnp.int32), "lengths": jnp.asarray(r.integers(2, LENGTH + 1, ROWS))}


def curve(name, mesh=None, steps=20):
    init, step, at = step_of(name, mesh)
    state = jax.jit(init, out_shardings=at)(jax.random.key(0))
    step = jax.jit(step, donate_argnums=0, out_shardings=None if at is None else (at, None))
    losses = []
    for i in range(steps):
        batch = batch_of(i)
        if mesh is not None:
            batch = jax.device_put(batch, fp.batch_sharding(mesh))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


single = functools.cache(curve)


@pytest.mark.slow
@pytest.mark.parametrize("name,shape", cases)
def test_twenty_steps_equal_one_devices(name, shape):
    mesh = fp.make_mesh(fp.parse_mesh(shape))
    want = single(name)
    with jax.set_mesh(mesh):
        got = curve(name, mesh)
    assert want[-1] < 0.8 * want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)


HALF = [
    ("llama", "dp=2,sp=2,tp=2"),
    ("qwen3_moe", "ep=2,fsdp=2,tp=2"),
    *(pytest.param(*c, marks=pytest.mark.matrix) for c in (("llama", "fsdp=4,tp=2"), ("qwen3_moe", "ep=8"))),
]


@functools.cache
def half(name, shape=None):
    """The gradient of all parameters, in bfloat16, in one vector, and the loss."""
    family, sizes = FAMILIES[name]
    cfg, mesh = family.Config.from_hf(sizes), shape and fp.make_mesh(fp.parse_mesh(shape))
    spec, g, batch = family.spec(cfg), train.grads(train.losses.sft(family, cfg, chunk=8)), batch_of(0)
    at = mesh and fp.shardings(spec, mesh)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        weights = jax.jit(lambda key: fp.init(spec, key, dtype=jnp.bfloat16), out_shardings=at)(jax.random.key(0))
        if mesh:
            g, batch = parallel.constrain(g, at), jax.device_put(batch, fp.batch_sharding(mesh))
        grad, sums = jax.jit(parallel.reduce_once(train.accumulate(g, MICROBATCHES)))(weights, batch)
    return np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(grad)]), float(sums["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name,shape", HALF)
def test_half_precision_gives_one_devices_gradients(name, shape):
    """To the rounding of bfloat16: 2^-8 for each number. XLA:CPU ends the process for sums in it over some mesh axes."""
    (want, loss), (got, found) = half(name), half(name, shape)
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    np.testing.assert_allclose(found, loss, rtol=1e-4)


# ---- the compiled program ------------------------------------------------------------------------------------------


@functools.cache
def compiled(name, shape, other=None):
    mesh = fp.make_mesh(fp.parse_mesh(shape))
    with contextlib.nullcontext() if other == "" else jax.set_mesh(fp.make_mesh(fp.parse_mesh(other or shape))):
        init, step, at = step_of(name, mesh)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init, jax.random.key(0)), at
        )
        one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fp.batch_sharding(mesh))
        step = jax.jit(step, donate_argnums=0, out_shardings=(at, None))
        return step.lower(state, jax.tree.map(one, batch_of(0))).compile().as_text()


@pytest.mark.parametrize("part", ["whole", "grads", "gradcache", "reduce_once", "constrain"])
@pytest.mark.parametrize("other", ["", "dp=8", "fsdp=4,tp=2"])
def test_a_step_outside_of_its_mesh_is_refused(part, other):
    """It would run, and send activations in place of weights."""
    found = f"set_mesh.*found arrays on .*fsdp.*: 8.*{'dp' if other == 'dp=8' else 'tp' if other else 'no mesh'}"
    mesh = fp.make_mesh({"fsdp": 8})
    weights = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("fsdp")))}
    total = lambda p, batch, _: ((p["w"] @ batch).sum(), {"weight": jnp.float32(1)})
    out = lambda p, batch, _: batch @ p["w"]
    own = lambda p, batch, _: (p, {"loss": jnp.float32(0), "weight": jnp.float32(1)})
    parts = {
        "grads": train.grads(total), "gradcache": train.gradcache(out, lambda o, b, _: (o.sum(), {}), 2),
        "reduce_once": parallel.reduce_once(own), "constrain": parallel.constrain(own, {"w": weights["w"].sharding}),
    }  # fmt: skip
    with pytest.raises(ValueError, match=found):
        if part == "whole":
            compiled("llama", "fsdp=8", other)
        else:
            with jax.set_mesh(fp.make_mesh(fp.parse_mesh(other))) if other else contextlib.nullcontext():
                jax.jit(parts[part])(weights, jnp.ones((8, 8)))


@pytest.mark.slow
def test_weights_are_fetched_and_activations_stay():
    """10 all-reduces; compiled without the mesh set, the same step had 181."""
    assert sum(c.count for c in plan.collectives(compiled("llama", "fsdp=8")) if c.kind == "all-reduce") <= 10


@pytest.mark.slow
def test_data_parallel_devices_exchange_gradients_once_a_step():
    """One reduction, after the last microbatch; nothing else is sent."""
    found = plan.collectives(compiled("llama", "dp=8"))
    assert [(c.kind, c.count, c.devices) for c in found] == [("all-reduce", 1, 8)]
    weights = fp.nbytes(llama.spec(llama.Config.from_hf(SIZES)), jnp.float32)
    assert weights <= found[0].nbytes <= weights + 100


@pytest.mark.slow
def test_replicas_of_a_divided_model_exchange_gradients_once_a_step():
    """Of the gradients, only what the shards of one replica need goes round in each microbatch."""
    text = compiled("llama", "dp=2,fsdp=2,tp=2")
    weights = fp.nbytes(llama.spec(llama.Config.from_hf(SIZES)), jnp.float32)
    last = [c for c in plan.collectives(text) if c.source == "jit(step)/shard_map/psum" and c.nbytes > 100]
    assert [(c.kind, c.count, c.devices) for c in last] == [("all-reduce", 1, 2)]
    assert last[0].nbytes < 0.3 * weights  # a replica's device holds a quarter of most arrays, and reduces that


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dp=8", "fsdp=8", "dp=2,fsdp=2,tp=2"])
def test_no_device_fetches_the_batch(shape):
    for c in plan.collectives(compiled("llama", shape)):
        assert not (c.kind == "all-gather" and any(s.startswith(f"s32[{ROWS},{LENGTH}") for s in c.shapes)), c


@pytest.mark.slow
@pytest.mark.parametrize("name,shape", [("llama", "fsdp=8"), ("llama", "dp=2,fsdp=2,tp=2"), ("qwen3_moe", "ep=8")])
def test_no_device_holds_a_whole_stack_of_gradients_or_moments(name, shape):
    """Whole matrices of one layer are fetched when it runs; of all layers together no device ever holds one."""
    family, sizes = FAMILIES[name]
    layers = family.spec(family.Config.from_hf(sizes))["layers"]
    shardings = jax.tree.leaves(fp.shardings(layers, fp.make_mesh(fp.parse_mesh(shape))))
    stacks = [(p.shape, s) for (_, p), s in zip(fp.named_leaves(layers), shardings, strict=True) if len(p.shape) > 2]
    divided = {f"f32[{','.join(map(str, s))}]" for s, at in stacks if at.shard_shape(s) != s}
    held = set(re.findall(r"\w+\[[\d,]*\]", compiled(name, shape)))
    assert divided and not divided & held


@pytest.mark.slow
def test_the_head_exchanges_its_gradient_once_a_microbatch():
    """Chunks of tokens add up on their device; the reduction follows the last one."""
    found = plan.collectives(compiled("llama", "fsdp=8"))
    head = [
        c
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and re.search(r"f32\[(32,64|64,32)\]", str(c.shapes))
    ]
    assert sum(c.count for c in head) <= 2 * MICROBATCHES, head  # the embedding's gradient has the same shape
