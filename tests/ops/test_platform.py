"""The platform that a program is traced for is that of an override, the mesh, the default device: in this order."""

import re
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from fdel import ops
from fdel.ops import platform, shard
from fdel.params import make_mesh

pytestmark = pytest.mark.of_cpu("it sets targets itself")


def _abstract(name):
    """A mesh without devices, of a platform that nobody here has."""
    kind = type(jax.make_mesh((1,), ("x",)).abstract_mesh.abstract_device)
    device = kind(device_kind="some chip", num_cores=None, platform=name)
    return jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)


def test_the_default_device_answers_where_nothing_is_set():
    assert platform.target() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform.target() == "cpu"
    with jax.default_device("cpu"):
        assert platform.target() == "cpu"


def test_the_mesh_that_is_set_answers_before_the_default_device():
    with jax.sharding.use_abstract_mesh(_abstract("tpu")):
        assert platform.target() == "tpu"
        with platform.tracing_for("gpu"):
            assert platform.target() == "gpu"
    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])):
        assert platform.target() == "cpu"
    bare = jax.sharding.AbstractMesh((2,), ("x",))
    with jax.sharding.use_abstract_mesh(bare):  # a mesh that says nothing of its devices
        assert platform.target() == jax.default_backend()


def test_the_mesh_answers_inside_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:1])
    seen = []

    def f(x):
        seen.append(platform.target())
        return x

    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(f, in_specs=jax.P("x"), out_specs=jax.P("x"), axis_names={"x"})).lower(jnp.ones(2))
    assert set(seen) == {"cpu"}


def test_a_jitted_function_is_traced_again_for_another_target_and_kept_for_each():
    seen = []

    @jax.jit
    def f(x):
        seen.append(platform.target())
        return jax.lax.scan(lambda c, _: (c, seen.append(platform.target())), x, None, length=2)[0]

    for name in ("cpu", "tpu", "gpu", "cpu", "tpu"):
        with platform.tracing_for(name):
            f(1.0)
    assert [*dict.fromkeys(seen)] == ["cpu", "tpu", "gpu"]
    assert seen.count("tpu") == seen.count("gpu") == seen.count("cpu")


def test_the_override_is_of_one_thread_and_ends_with_its_block():
    seen = {}
    with platform.tracing_for("tpu"):
        thread = threading.Thread(target=lambda: seen.update(other=platform.target()))
        thread.start()
        thread.join()
        assert platform.target() == "tpu"
    assert seen == {"other": jax.default_backend()} and platform.target() == jax.default_backend()


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match='expected "cpu", "gpu" or "tpu", found \'cuda\''):
        platform.tracing_for("cuda")


# ---- between devices -----------------------------------------------------------------------------------------------

ACROSS = {  # operation -> (mesh, lines of the traced program, shape there, its dtypes if the target is no CPU)
    "embed": ({"tp": 8}, "psum", "8,64,16", {"bf16"}),
    "attend": ({"sp": 8}, "shard_map", "8,64,2,8", {"bf16"}),
    "moe": (
        {"ep": 8},
        "all_gather|reduce_scatter",
        "[81],64,16",
        {"bf16", "f32"},
    ),  # the experts' parts add up in float32
}


def run(name, x, table, experts):
    """Operations of half precision that send activations between devices."""
    if name == "embed":
        return ops.embed(table, jnp.zeros(x.shape[:2], int))
    if name == "attend":
        q = x.reshape(*x.shape[:2], 2, -1)
        return ops.attend(ops.packed(jnp.zeros(x.shape[:2], int)), None, 0, q, q, q, mask=ops.Mask(1.0))[0]
    chosen = ops.route_softmax(jnp.zeros((*x.shape[:2], 8)), 2, normalize=True)
    return ops.moe(x, experts, *chosen, jax.nn.silu)


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("target", ["cpu", "gpu", "tpu"])
def test_half_precision_crosses_between_devices_as_it_is_but_on_cpu(name, target):
    """Forward and backward: XLA:CPU cannot compile some sums of half precision, others send half as many bytes."""
    mesh, lines, shape, dtypes = ACROSS[name]
    x, table = jax.ShapeDtypeStruct((8, 64, 16), jnp.bfloat16), jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)
    experts = {part: jax.ShapeDtypeStruct((8, 16, 16), jnp.bfloat16) for part in ("gate", "up", "down")}
    loss = lambda *a: run(name, *a).astype(jnp.float32).sum()
    with platform.tracing_for(target), jax.set_mesh(make_mesh(mesh)):
        program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, table, experts))
    crossing = [line for line in program.splitlines() if re.search(rf"= ({lines})\[", line)]
    found = re.findall(rf":(\w+)\[{shape}\]", "\n".join(crossing))
    assert len(found) > 1 and set(found) == ({"f32"} if target == "cpu" else dtypes)


def test_keys_and_integers_cross_between_devices_as_they_are():
    """Without jit, too: on a CPU only floating arrays become float32 on the way, and come back."""
    add = lambda x, key, n: (x + jax.random.uniform(key, (1, 4), x.dtype), key, n)
    x, key = jnp.arange(32.0, dtype=jnp.bfloat16).reshape(8, 4), jax.random.key(1)
    with jax.set_mesh(mesh := make_mesh({"dp": 8})):
        rows = (P("dp"), P(), P())
        got = shard.divided(add, {*mesh.axis_names}, rows, rows)(x, key, jnp.int32(3))
    want = add(x, key, jnp.int32(3))
    assert [a.dtype for a in got] == [a.dtype for a in want] and (got[0] == want[0]).all() and got[2] == 3
    assert (jax.random.key_data(got[1]) == jax.random.key_data(key)).all()
