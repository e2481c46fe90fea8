"""Meshes and sharding rules: sizes, shards, and errors that say what to change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fdel.params import mesh as M
from fdel.params import spec as S
from fdel.params.spec import Param, normal

W = normal(0.02)
# The vocabulary that the families may use.
AXES = """vocab positions embed heads kv_heads head_dim ffn experts shared_ffn layers latent rope_dim q_latent inner
state kernel labels groups rep channels pages page scales slots index_heads frames
height width filters""".split()


def spec(kv_heads: int = 4) -> dict:
    """A mixture-of-experts layer and an embedding, sizes divisible by 2 and 4."""
    layer = {
        "q": Param("embed heads head_dim", (8, 4, 2), W),
        "k": Param("embed kv_heads head_dim", (8, kv_heads, 2), W),
        "v": Param("embed kv_heads head_dim", (8, kv_heads, 2), W),
        "up": Param("experts embed ffn", (4, 8, 16), W),
        "norm": Param("embed", (8,), W),
    }
    return {"embed": Param("vocab embed", (32, 8), W), "layers": S.stack(layer, "layers", range(3))}


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (None, (1, 8, 1, 1, 1)),
        ({"dp": 2, "tp": 4}, (2, 1, 1, 4, 1)),
        ({"dp": 2, "fsdp": -1, "tp": 2}, (2, 2, 1, 2, 1)),
        ({"tp": 8, "sp": -1}, (1, 1, 1, 8, 1)),
        ({"dp": 2, "fsdp": 1, "ep": 2, "tp": 1, "sp": 2}, (2, 1, 2, 1, 2)),
    ],
)
def test_make_mesh(shape: dict | None, sizes: tuple) -> None:
    mesh = M.make_mesh(shape)
    assert mesh.axis_names == ("dp", "fsdp", "ep", "tp", "sp") and mesh.devices.shape == sizes
    assert set(mesh.devices.flat) == set(jax.devices()) and set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_over_some_devices() -> None:
    mesh = M.make_mesh({"tp": -1}, jax.devices()[:2])
    assert mesh.shape["tp"] == 2 and list(mesh.devices.flat) == jax.devices()[:2]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"tp": 3, "dp": -1}, r"multiple of 3 devices, found 8"),
        ({"tp": 4}, r"found 8; set one axis to -1 or pass 4 devices"),
        ({"tp": 16}, r"multiple of 16 devices, found 8"),
        ({"tp": -1, "dp": -1}, r"at most one is -1"),
        ({"tp": 0}, r"at least 1"),
        ({"tp": -2}, r"at least 1"),
        ({"model": 8}, r"\['model'\] are unknown; the axes are dp, fsdp, ep, tp, sp"),
    ],
)
def test_make_mesh_errors(shape: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        M.make_mesh(shape)


class Fake:
    """A device of some slice and process, as far as a mesh asks."""

    platform = device_kind = "cpu"

    def __init__(self, i: int, process: int, slice_index: int | None = None):
        self.id, self.process_index = i, process
        if slice_index is not None:
            self.slice_index = slice_index


@pytest.mark.parametrize("sliced", [True, False])
def test_slices_are_the_outer_part_of_their_axis(sliced: bool) -> None:
    """Two slices (or processes) of four devices, listed in turn: neighbours along dp are in one slice first."""
    devices = [Fake(i, i % 2 if not sliced else i, i % 2 if sliced else None) for i in range(8)]
    mesh = M.make_mesh({"fsdp": -1, "tp": 2}, devices, slices={"dp": 2})
    assert dict(mesh.shape) == {"dp": 2, "fsdp": 2, "ep": 1, "tp": 2, "sp": 1}
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids[0].ravel().tolist() == [0, 2, 4, 6] and ids[1].ravel().tolist() == [1, 3, 5, 7]
    mesh = M.make_mesh({"dp": 4}, devices, slices={"dp": 2})
    assert [d.id for d in mesh.devices.ravel()] == [0, 2, 4, 6, 1, 3, 5, 7]
    kind = "slices" if sliced else "processes"
    with pytest.raises(ValueError, match=f"are 4, found 2 {kind}"):
        M.make_mesh({"fsdp": -1}, devices, slices={"dp": 4})
    with pytest.raises(ValueError, match="needs a multiple of 3 devices, found 4"):
        M.make_mesh({"fsdp": 3}, devices, slices={"dp": 2})


def test_devices_without_slices_make_no_mesh_of_slices() -> None:
    with pytest.raises(ValueError, match=r"found 1 processes \(these devices have no slices\)"):
        M.make_mesh(slices={"dp": 2})


def test_parse_mesh() -> None:
    assert M.parse_mesh("fsdp=2,tp=4") == {"fsdp": 2, "tp": 4}
    assert M.parse_mesh(" dp = -1 , tp=2,") == {"dp": -1, "tp": 2}
    assert M.parse_mesh("") == {}
    for text in ("tp", "tp=", "tp=two", "tp=2,tp=2", "x=2", "tp=0", "tp=-1,dp=-1", "tp=2.0", "tp=--1"):
        with pytest.raises(ValueError, match="mesh"):
            M.parse_mesh(text)


@pytest.mark.parametrize("rules", [M.TRAIN, M.SERVE])
def test_rules_know_the_vocabulary(rules: M.Rules) -> None:
    assert set(rules) == set(AXES)
    used = {name for rule in rules.values() for name in M._mesh_axes(rule)}
    assert used <= set(M.AXES) and ("fsdp" in used) == (rules is M.TRAIN)
    with pytest.raises(TypeError):
        rules["embed"] = "tp"


def test_shardings_put_shards_where_the_rules_say() -> None:
    mesh = M.make_mesh({"fsdp": 2, "ep": 2, "tp": 2})
    tree = M.shardings(spec(), mesh)
    assert tree["layers"]["q"] == NamedSharding(mesh, P(None, "fsdp", "tp", None))
    params = jax.device_put(jax.tree.map(lambda p: np.zeros(p.shape, np.float32), spec()), tree)
    shard = lambda x: x.addressable_shards[0].data.shape
    assert jax.tree.map(shard, params) == {
        "embed": (16, 4),
        "layers": {"q": (3, 4, 2, 2), "k": (3, 4, 2, 2), "v": (3, 4, 2, 2), "up": (3, 2, 4, 8), "norm": (3, 4)},
    }
    serve = M.shardings(S.unstack(spec()), mesh, M.SERVE)
    assert serve["layers"][2]["q"].spec == P(None, "tp", None) and serve["embed"].spec == P("tp", None)


def test_arrays_are_created_sharded_with_the_same_values() -> None:
    init = partial(S.init, {"w": Param("embed ffn", (8, 16), W)})
    tree = M.shardings({"w": Param("embed ffn", (8, 16), W)}, M.make_mesh({"fsdp": 2, "tp": 4}))
    x = jax.jit(init, out_shardings=tree)(jax.random.key(0))["w"]
    assert {s.data.shape for s in x.addressable_shards} == {(4, 4)}
    np.testing.assert_array_equal(x, jax.jit(init)(jax.random.key(0))["w"])


def test_a_rule_may_name_several_mesh_axes() -> None:
    mesh = M.make_mesh({"fsdp": 2, "tp": 2, "dp": 2})
    rules = M.TRAIN | {"ffn": ("fsdp", "tp"), "embed": None}
    tree = M.shardings({"w": Param("embed ffn", (8, 16), W)}, mesh, rules)
    assert tree["w"].shard_shape((8, 16)) == (8, 4)


def test_indivisible_sizes_are_listed_with_the_fix() -> None:
    mesh = M.make_mesh({"tp": 4, "dp": 2})
    with pytest.raises(ValueError) as e:
        M.shardings({"layers": {name: Param("embed heads head_dim", (8, 6, 2), W) for name in "qk"}}, mesh)
    text = str(e.value)
    assert "axis 'heads' of size 6 is not divisible by tp=4; use rules | {'heads': None}" in text
    assert "in a run file sharding.rules: {heads: null}" in text and "at layers.k, layers.q" in text


@pytest.mark.parametrize(("kv_heads", "own", "copies"), [(4, 1, 1), (2, 1, 2), (6, 3, 2), (1, 1, 4), (3, 3, 4)])
def test_devices_share_key_value_heads_where_there_are_too_few(kv_heads: int, own: int, copies: int) -> None:
    """tp=4: neighbours hold the same part, that of their query heads; the mesh has the same devices in the same order."""
    mesh = M.make_mesh({"tp": 4, "dp": 2})
    tree = M.shardings(spec(kv_heads), mesh)
    k = tree["layers"]["k"]
    assert k.spec == P(None, "fsdp", "tp", None) and list(k.mesh.devices.flat) == list(mesh.devices.flat)
    assert k.shard_shape((3, 8, kv_heads, 2)) == (3, 8, own, 2)
    held = k.devices_indices_map((3, 8, kv_heads, 2))
    assert [held[d][2].start or 0 for d in mesh.devices.flat] == [i // copies * own for i in range(4)] * 2
    cache = ", each has 2 of its own in the cache" if kv_heads in (3, 6) else " and cache"
    said = f"kv_heads: {kv_heads} on tp=4: {copies} devices hold the same {own} of {kv_heads} in weights{cache}"
    assert M.shared(spec(kv_heads), mesh) == ([] if copies == 1 else [said])
    tree = M.shardings(spec(kv_heads=2), mesh, M.TRAIN | {"kv_heads": None})
    assert tree["layers"]["k"].spec == P(None, "fsdp", None, None)


@pytest.mark.parametrize(
    ("rows", "devices", "own"), [(10, 8, 2), (10, 4, 3), (6, 4, 2), (8, 4, 0), (2, 8, 0), (1, 1, 0)]
)
def test_a_cache_has_the_key_heads_that_the_query_heads_of_a_device_need(rows: int, devices: int, own: int) -> None:
    """Counted from 12 query heads to each device; a cache that can be divided stays as it is, and so do latents."""
    heads = rows * devices * 12
    needed = [
        {n * rows // heads for n in range(i * heads // devices, (i + 1) * heads // devices)} for i in range(devices)
    ]
    assert own in (0, max(map(len, needed)))
    p = Param("layers pages kv_heads page head_dim", (2, 3, rows, 4, 5), W)
    latent = Param("layers pages groups page latent", (2, 3, 1, 4, 5), W)
    mesh = M.make_mesh({"tp": devices}, jax.devices()[:devices])
    found = M.spread({"k": p, "latent": latent}, mesh)
    assert found["k"].shape[2] == (own * devices or rows) and found["latent"] == latent and M.spread(p, None) == p


@pytest.mark.parametrize(
    ("p", "rules", "messages"),
    [
        (
            Param("embed hads", (8, 4), W),
            M.TRAIN,
            ["axis 'hads' has no rule; add it: rules | {'hads': None}", "at a.w"],
        ),
        (
            Param("heads ffn", (8, 4), W),
            M.TRAIN,
            ["mesh axis 'tp' is used twice, by 'heads' and 'ffn'", "{'ffn': None}"],
        ),
        (Param("embed ffn", (8, 4), W), M.TRAIN | {"ffn": "model"}, ["wants mesh axis 'model'", "{'ffn': None}"]),
        (Param("embed ffn", (8, 4), W), M.TRAIN | {"ffn": ("tp", "tp")}, ["used twice, by 'ffn' and 'ffn'"]),
    ],
)
def test_shardings_errors(p: Param, rules: M.Rules, messages: list[str]) -> None:
    mesh = M.make_mesh({"fsdp": 2, "tp": 2, "dp": 2})
    with pytest.raises(ValueError) as e:
        M.shardings({"a": {"w": p}}, mesh, rules)
    assert all(m in str(e.value) for m in messages), str(e.value)


def test_all_faults_in_one_error() -> None:
    tree = {"b": Param("embed wrong", (7, 4), W), "c": [Param("embed", (7,), W) for _ in range(9)]}
    with pytest.raises(ValueError) as e:
        M.shardings(tree, M.make_mesh())
    text = str(e.value)
    assert "'wrong' has no rule" in text and "of size 7 is not divisible by fsdp=8" in text
    assert "b, c.0, c.1, c.2, c.3 and 5 more" in text


def test_partition_spec() -> None:
    assert M.partition_spec(Param("experts embed ffn", (4, 8, 16), W), M.TRAIN) == P("ep", "fsdp", "tp")
    assert M.partition_spec(Param("", (), W), M.TRAIN) == P()
    with pytest.raises(ValueError, match=r"x\.w.*'hads' has no rule"):
        M.partition_spec(Param("hads", (4,), W, "x.w"), M.TRAIN)


def test_batch_sharding_splits_rows_over_data_axes() -> None:
    mesh = M.make_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    x = jax.device_put(jnp.arange(8 * 3).reshape(8, 3), M.batch_sharding(mesh))
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}
    assert len({str(s.index) for s in x.addressable_shards}) == 4
