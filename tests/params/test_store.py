"""Checkpoints of a tree: exact on any mesh, while the arrays are donated, and damage is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel.params import CheckpointError, make_mesh, store


def tree_of(mesh=None, axes=("fsdp", None)):
    at = lambda *spec: None if mesh is None else NamedSharding(mesh, P(*spec))
    key = jax.random.key(3)
    tree = {
        "w": jax.random.normal(key, (64, 48)),
        "half": jax.random.normal(key, (16, 8), jnp.bfloat16),
        "step": jnp.int32(7),
    }
    return jax.device_put(tree, {"w": at(*axes), "half": at(*axes), "step": at()}) if mesh else tree


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


@pytest.mark.parametrize("shape,axes", [({"fsdp": 8}, ("fsdp", None)), ({"fsdp": 2, "tp": 4}, ("tp", "fsdp"))])
def test_a_tree_is_restored_exactly_to_another_mesh(tmp_path, shape, axes):
    tree = tree_of(make_mesh({"fsdp": 4, "tp": 2}), ("fsdp", "tp"))
    store.save(tmp_path / "a", tree)
    target = tree_of(make_mesh(shape), axes)
    got = store.restore(tmp_path / "a", like(target))
    assert same(got, tree) and got["w"].sharding == target["w"].sharding


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    tree = tree_of()
    want = jax.tree.map(np.array, tree)
    move = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    saving = store.save_async(tmp_path / "a", tree, {"place": [1, 2.5, None]})
    for _ in range(5):
        tree = move(tree)
    saving.result()
    assert same(store.restore(tmp_path / "a", like(tree)), want)
    assert store.read_notes(tmp_path / "a") == {"place": [1, 2.5, None]}


def test_what_does_not_fit_is_named(tmp_path):
    store.save(tmp_path / "a", tree_of())
    wrong = like(tree_of()) | {"other": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises((KeyError, ValueError), match="other"):
        store.restore(tmp_path / "a", wrong)
    with pytest.raises(ValueError, match="exists"):
        store.save(tmp_path / "a", tree_of())


def test_every_changed_or_lost_byte_is_found(tmp_path):
    store.save(tmp_path / "a", tree_of())
    store.verify(tmp_path / "a")
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.stat().st_size and "digests" not in p.name]
    assert any("/d/" in str(p) for p in files) and len(files) > 5
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                store.verify(tmp_path / "a")
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
            store.verify(tmp_path / "a")
        path.write_bytes(whole)
    store.verify(tmp_path / "a")
