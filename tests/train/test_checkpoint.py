"""The checkpoints of a run: which stay, what damage does, what a full disk does."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.params import CheckpointError, store
from fdel.train import checkpoint
from fdel.train.loop import _progress

STATE = {"w": jnp.arange(20_000, dtype=jnp.float32), "n": jnp.int32(0)}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def notes(step, **metrics):
    return {"progress": {"step": step}, "metrics": metrics, "processes": 1}


def saved(directory, *steps, keep=0, **values):
    """Save checkpoints whose state holds their step, with the metric `m` where one is given."""
    saver = checkpoint.Saver(directory, keep=keep, keep_best=values.pop("keep_best", 0), metric="m", **values)
    for step, metric in steps:
        more = {} if metric is None else {"m": metric}
        assert saver.save(step, STATE | {"n": jnp.int32(step)}, notes(step, **more)) is None
    assert saver.wait() is None
    return saver


@pytest.mark.parametrize(
    "keep,best,greater,want",
    [
        (0, 0, False, [1, 2, 3, 4, 5]),
        (2, 0, False, [4, 5]),
        (1, 2, False, [1, 3, 5]),  # 3 and 1 are the lowest; 5 is the latest
        (1, 2, True, [2, 4, 5]),
    ],
)
def test_the_latest_and_the_best_stay(tmp_path, keep, best, greater, want):
    steps = [(1, 0.5), (2, 2.0), (3, 0.25), (4, 0.75), (5, float("nan"))]
    saved(tmp_path, *steps, keep=keep, keep_best=best, greater=greater)
    assert checkpoint.steps(tmp_path) == want
    assert checkpoint.ranked(tmp_path, "other") == []


def test_a_checkpoint_without_the_metric_is_only_ever_the_latest(tmp_path):
    saved(tmp_path, (1, 0.5), (2, None), (3, None), keep=1, keep_best=1)
    assert checkpoint.steps(tmp_path) == [1, 3]


def damage(path, kind):
    file = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    if kind == "lost":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1  # orbax itself reads the wrong number without a word
        file.write_bytes(data)


@pytest.mark.parametrize("kind,digests", [("lost", True), ("flipped", True), ("lost", False), ("cut", False)])
def test_damage_falls_back_to_the_checkpoint_before_and_says_so(tmp_path, kind, digests, caplog):
    saved(tmp_path, (1, None), (2, None), (3, None))
    damage(tmp_path / "3", kind)
    if not digests:  # as after a kill right after the save
        (tmp_path / "3" / "digests.0.json").unlink()
    (tmp_path / "2" / "notes" / "process_0.json").write_text('{"half')
    state, kept = checkpoint.restore(tmp_path, LIKE)
    assert int(state["n"]) == 1 == kept["progress"]["step"]
    np.testing.assert_array_equal(state["w"], STATE["w"])
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "fdel" in r.name]
    assert "3 cannot be restored" in messages[0] and "2 cannot be restored" in messages[1]
    assert "going on from step 1, the last good checkpoint" in messages[2]
    assert checkpoint.steps(tmp_path) == [1] and (tmp_path / "3.damaged").is_dir()
    saved(tmp_path, (2, None), (3, None))  # their places are free again
    assert int(checkpoint.restore(tmp_path, LIKE)[0]["n"]) == 3


NOTES = {"data": {"json": {"next_index": 2}}, "processes": 1, "progress": {"step": 2}, "config": None, "versions": {}}


class Place:
    """An iterator with a place, which checks nothing that grain does not."""

    state: dict = {"next_index": 0}  # noqa: RUF012

    def get_state(self) -> dict:
        return self.state

    def set_state(self, state: dict) -> None:
        self.state = {"next_index": state["next_index"]}


@pytest.mark.parametrize("text", [
    "[" * 100_000, "[]", "null", "3", '"x"', "{}", "\x00",
    *(json.dumps({k: v for k, v in NOTES.items() if k != name}) for name in ("data", "processes", "progress")),
    *(json.dumps(NOTES | {"data": x}) for x in (None, [], {}, {"json": {}}, {"json": None}, {"base64": "a"})),
    *(json.dumps(NOTES | {"data": {"json": {"next_index": x}}}) for x in ("2", 1.5, None, [2])),
    *(json.dumps(NOTES | {"processes": x}) for x in ("one", None, [])),
    *(json.dumps(NOTES | {"progress": x}) for x in (None, [], {"step": "2"}, {"stop": 2}, {"step": 2, "best": "a"})),
], ids=lambda text: text[:60])  # fmt: skip
def test_damaged_notes_fall_back_too(tmp_path, text):
    """Whatever is wrong with them: the checkpoint before is read, and the place in the data is its."""
    for step in (1, 2):
        (tmp_path / f"{step}/notes").mkdir(parents=True)
    (tmp_path / "1/notes/process_0.json").write_text(json.dumps(NOTES | {"data": {"json": {"next_index": 1}}}))
    (tmp_path / "2/notes/process_0.json").write_text(text)
    place = Place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "restore", lambda path, like: path.name)
        state, progress = checkpoint.resume(tmp_path, lambda: 0, place, None, False, _progress)
        assert (state, progress.step, place.state) == ("1", 2, {"next_index": 1})
        assert [p.name for p in sorted(tmp_path.iterdir())] == ["1", "2.damaged"]
        assert checkpoint.ranked(tmp_path, "m") == []
        (tmp_path / "1/notes/process_0.json").write_text(text)
        with pytest.raises(CheckpointError, match="move the checkpoints away to start over"):
            checkpoint.resume(tmp_path, lambda: 0, place, None, False, _progress)


def test_nothing_is_renamed_or_begun_anew_if_none_fits(tmp_path):
    saved(tmp_path, (1, None), (2, None))
    other = LIKE | {"w": jax.ShapeDtypeStruct((7, 3), jnp.float32, sharding=LIKE["w"].sharding)}
    with pytest.raises(CheckpointError, match=r"(?s)2: .*1: .*move the checkpoints away to start over"):
        checkpoint.restore(tmp_path, other)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_interrupted_saves_and_deletions_are_cleaned_away(tmp_path):
    saved(tmp_path, (1, None), (2, None))
    for name in ("3.orbax-checkpoint-tmp", "0.orbax-checkpoint-tmp-old"):
        (tmp_path / name / "state").mkdir(parents=True)
    assert checkpoint.steps(tmp_path) == [1, 2]
    checkpoint.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [40_000, 100])  # the arrays do not fit; the notes do not either
def test_a_full_disk_is_reported_and_the_last_good_checkpoint_stays(tmp_path, full_disk, caplog, size, background):
    saver = saved(tmp_path, (1, None))
    saver.background = background
    full_disk(size)
    failure = saver.save(2, STATE, notes(2, text="x" * 200))
    assert (failure is None) == background
    assert isinstance(failure or saver.wait(), OSError | ValueError)
    full_disk(10_000_000)
    assert "checkpoint of step 2 was not saved" in caplog.text and "the last good one is of step 1" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert saver.save(2, STATE, notes(2)) is None and saver.wait() is None and saver.saved == 2
    store.verify(tmp_path / "2")
