"""Several processes learn what rows show: run files on two of them are those of one, samples and streams."""

import base64
import json
import time

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are transformers' (extra `test`)")
pytest.importorskip("PIL.Image", reason="extra `media`")

from fdel.train import metrics  # noqa: E402
from tests.test_recipe_images import png, said, seeing  # noqa: E402, F401
from tests.train.test_processes import begin, ended  # noqa: E402

DIMS = (1, -1, 1, 1, 1)
REWARD = "def even(completion_ids, **_):\n    return [sum(i % 2 == 0 for i in c) / len(c) for c in completion_ids]\n"


def image(i: int) -> dict:
    return {"type": "image", "image": {"bytes": base64.b64encode(png(i)).decode()}}


def shows() -> list[list]:
    """What eight rows show: images of several sizes, one or two, and nothing in some that one process has."""
    return [[image(0)], [], [image(1), " and ", image(2)], [image(3)], [image(1)], [], [image(3)], []]


def run(path, folder, count, steps, **keys) -> list[dict]:
    codes, out = ended(begin(path, folder, count, DIMS, steps, **keys))
    assert codes == [0] * count, [err[-2500:] for _, err in out]
    return metrics.read(folder)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "how"),
    [("llava", {}), ("qwen2_vl", {"pack_samples": True}), ("qwen2_vl", {"samples_per_row": 2})],
    ids=["all", "packed", "shared"],
)
def test_processes_sample_tasks_that_show_as_one_does(seeing, name, how, tmp_path):  # noqa: F811
    """The same samples, losses to rounding; killed after a checkpoint, they go on as if nothing were."""
    path, *_ = seeing(name)
    (path / "even.py").write_text(REWARD)
    tasks = [{"prompt": [said("user", *shown, f"{i} ?")]} for i, shown in enumerate(shows())]
    (path / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    keys = {"trainer_type": "grpo", "reward_functions": [{"path": f"{path}/even.py:even"}], "num_generations": 4,
            "max_completion_length": 8, "total_batch_size": 16, "max_length": 96, "rows": "tasks", **how}  # fmt: skip
    one = run(path, tmp_path / "one", 1, 5, **keys)
    running, saved = begin(path, tmp_path / "two", 2, DIMS, 5, **keys), tmp_path / "two" / "checkpoints"
    until = time.monotonic() + 240
    while not any(p.name.isdigit() for p in (saved.iterdir() if saved.is_dir() else ())):
        assert time.monotonic() < until and all(p.poll() is None for p in running), ended(running)
        time.sleep(0.05)
    for p in running:
        p.kill()
    ended(running)
    two = run(path, tmp_path / "two", 2, 5, **keys)
    assert [r["step"] for r in two] == [1, 2, 3, 4, 5]
    for name in ("reward", "completions/mean_length", "loss", "entropy", "sampling/sampling_logp_difference/mean"):
        np.testing.assert_allclose([r[name] for r in one], [r[name] for r in two], rtol=1e-3, atol=1e-5)
    assert one[-1]["sampling/sampling_logp_difference/mean"] < 1e-4


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_stream_of_two_processes_shows_what_that_of_one_shows(seeing, kind, tmp_path):  # noqa: F811
    """Every second row each, so that unshuffled batches hold the same rows: losses to rounding."""
    path, *_ = seeing("qwen2_vl")
    rows = []
    for i, shown in enumerate(shows()):
        ask, told = said("user", *shown, f"{i} ?"), [said("assistant", x) for x in ("a cat", "a mat")]
        rows.append({"messages": [ask, told[0]]} if kind == "sft" else
                    {"prompt": [ask], "chosen": [told[0]], "rejected": [told[1]]})  # fmt: skip
    (path / f"{kind}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    keys = {"trainer_type": kind, "max_length": 96, "rows": kind, "num_train_epochs": None, "total_batch_size": 4,
            "mixture": {"pack_on_the_fly": True, "shuffle_buffer_size": 0}}  # fmt: skip
    one, two = (run(path, tmp_path / str(n), n, 4, **keys) for n in (1, 2))
    np.testing.assert_allclose([r["loss"] for r in one], [r["loss"] for r in two], rtol=1e-4)
