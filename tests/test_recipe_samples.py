"""Run files that learn from own samples: rewards rise, a run that is killed goes on bit by bit, keys do something."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, serve, text
from fdel.models import llama
from fdel.recipe import methods, samples, settled
from fdel.recipe import rewards as recipe_rewards
from fdel.recipe import samples as recipe_samples
from fdel.recipe.rewards import build_rewards, build_turn
from fdel.train import metrics
from fdel.train.rollout import Rewards, Sample, Task, collate, rollout
from tests.killed import goes_on, rows_of, shown

CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
EVEN = """def even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, tasks, and a reward function."""
    path = tmp_path_factory.mktemp("samples")
    weights = params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, CFG, weights), path / "model")
    text.save(text.train_bpe(["what is one and one and two", "it is two"] * 3, 300), path / "model")
    rows = [{"prompt": f"what is {a} and {b}", "answer": str(a + b), "completion": " it is two"}
            for a in range(4) for b in range(4)]  # fmt: skip
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rewards.py").write_text(EVEN)
    return path


def made(folder: Path, out: Path, kind: str = "grpo", devices: int = 1, **keys) -> recipe.Recipe:
    trainer = {
        "trainer_type": kind, "reward_functions": [{"path": f"{folder}/rewards.py:even"}, {"name": "exact"}],
        "num_generations": 4, "max_completion_length": 16, "max_length": 32, "total_batch_size": 32, "learning_rate": 1e-2,
        "scheduler": "constant", "max_training_steps": 12, "log_steps": 1, "save_directory": str(out), "save_steps": 4,
    }  # fmt: skip
    return recipe.from_dict({
        "model": {"name_or_path": str(folder / "model")}, "trainer": trainer | keys, "actions": ["train"],
        "mixture": {"informs": [{"type": "json", "data_files": str(folder / "rows.jsonl")}]},
        "sharding": {"axis_dims": [1, devices, 1, 1, 1]},
    })  # fmt: skip


def column(out: Path, name: str) -> np.ndarray:
    return np.array([row[name] for row in metrics.read(out)])


# ---- whole runs ----------------------------------------------------------------------------------------------------

KINDS = {
    "grpo": {"steps_per_generation": 2, "beta": 0.01}, "gspo": {"samples_per_row": 4, "learning_rate": 2e-2},
    "gfpo": {"num_remains_in_group": 2, "learning_rate": 2e-2, "repetition_penalty": 1.2},
    "rlvr": {"mask_truncated_completions": False}, "rloo": {"samples_per_row": 2, "presence_penalty": 0.1},
    "online_dpo": {"num_generations": 2, "learning_rate": 3e-2}, "xpo": {"num_generations": 2, "learning_rate": 3e-2},
    "ppo": {"num_generations": 2, "learning_rate": 2e-2, "vf_coef": 0.5, "repetition_penalty": 1.1,
            "frequency_penalty": -0.1},
    "nash_md": {"num_generations": 2, "learning_rate": 3e-2, "beta": 0.01},
    "sdpo": {"sdpo_policy_loss_mode": "hybrid", "success_reward_threshold": 0.6, "learning_rate": 3e-2},
    "a2po": {"num_generations": 2, "num_value_samples": 4, "beta2": 0.05, "learning_rate": 2e-2},
}  # fmt: skip


MORE = pytest.mark.matrix  # what `make matrix` runs beside the rest
ALL = [pytest.param(kind, marks=MORE) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=MORE), pytest.param(2, marks=MORE)])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[MORE] * (k not in ("grpo", "gfpo"))) for k in KINDS])
def test_the_reward_rises(kind, seed, folder, tmp_path):
    """The share of even tokens, from about a half."""
    found = recipe.train(made(folder, tmp_path, kind, seed=seed, **KINDS[kind]))
    reward = column(tmp_path, "reward")
    assert len(reward) == 12 and reward[0] < 0.6 and reward[-3:].mean() > reward[:3].mean() + 0.1, reward
    if (off := "sampling/sampling_logp_difference/mean") in metrics.read(tmp_path)[0]:
        assert (column(tmp_path, off) < 1e-5).all()  # sampler and trainer are one model
    assert (column(tmp_path, "staleness") == 0).all() and (column(tmp_path, "rewards/exact/failed") == 0).all()
    lines = shown(tmp_path)
    assert len(lines) == 48 and {"step", "task", "prompt", "completion", "finish", "reward", "rewards"} == set(lines[0])
    assert [line["step"] for line in lines] == [i // 4 + 1 for i in range(48)]
    again = models.load(tmp_path / "model")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, found.model.params))
    assert (tmp_path / "critic").exists() == (kind == "ppo")
    if kind == "rloo":  # the policy leaves the reference
        assert np.abs(column(tmp_path, "kl"))[0] < 1e-5 and column(tmp_path, "kl")[-1] > 1e-3


@pytest.fixture(scope="module")
def taught(folder):
    """A teacher that has learnt something."""
    recipe.train(made(folder, folder / "teacher", max_training_steps=8))
    return folder / "teacher" / "model"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=MORE), pytest.param(2, marks=MORE)])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [("on_policy_distillation", {"num_generations": 2}), ("gkd", {"lmbda": 0.5, "total_batch_size": 16})],
)
def test_a_student_learns_on_its_own_samples(kind, keys, seed, folder, taught, tmp_path):
    """The divergence from a teacher falls on what the student writes; gkd learns rows of the data between."""

    def run(out: Path, **more: int) -> models.Model:
        found = recipe.to_dict(made(folder, out, kind, seed=seed, **keys, **more))
        del found["trainer"]["reward_functions"]
        found["trainer"].pop("num_generations") if "num_generations" not in keys else None
        return recipe.train(recipe.from_dict(found | {"teacher_model": {"name_or_path": str(taught)}})).model

    whole = run(tmp_path / "whole")
    loss, own = column(tmp_path / "whole", "loss"), np.ones(12)
    assert "reward" not in metrics.read(tmp_path / "whole")[0]
    if kind == "gkd":
        own = column(tmp_path / "whole", "own_samples")
        assert 3 <= own.sum() <= 9
        run(tmp_path / "cut", max_training_steps=4)
        again = run(tmp_path / "cut")
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole.params, again.params))
    for kept in (loss[own == 1], loss[own == 0]):
        assert not len(kept) or kept[-2:].mean() < 0.6 * kept[:2].mean(), loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{}, pytest.param({"lora": {"r": 4}, "beta": 0.02}, marks=MORE), {"rollout_ahead": 1, "num_iterations": 2}],
    ids=str,
)
def test_a_run_that_was_cut_goes_on_bit_by_bit(keys, folder, tmp_path):
    """All weights, adapters alone, and with samples drawn ahead, which the checkpoint holds."""
    keys = {"max_training_steps": 6, "save_steps": 3} | keys
    whole = recipe.train(made(folder, tmp_path / "whole", **keys))
    recipe.train(made(folder, tmp_path / "cut", **keys | {"max_training_steps": 3}))
    again = recipe.train(made(folder, tmp_path / "cut", **keys))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole.model.params, again.model.params))
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")
    assert shown(tmp_path / "whole") == shown(tmp_path / "cut") != []
    if "lora" in keys:
        assert (tmp_path / "whole" / "model" / "adapter_model.safetensors").exists()
        assert (column(tmp_path / "whole", "kl")[1:] > 0).any()
    if "rollout_ahead" in keys:
        assert column(tmp_path / "whole", "staleness").tolist() == [0, *[2] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_each_type_goes_on_bit_by_bit(kind, folder, tmp_path):
    """What it draws, what it learns and what it shows."""
    test_a_run_that_was_cut_goes_on_bit_by_bit({"trainer_type": kind} | KINDS[kind], folder, tmp_path)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["nash_md", "a2po"])  # others as examples: tests/test_examples.py
def test_a_run_that_was_killed_goes_on(kind, folder, tmp_path):
    how = KINDS[kind] | {"max_training_steps": 8, "save_steps": 2}
    goes_on({name: made(folder, tmp_path / name, kind, **how) for name in ("whole", "killed")}, tmp_path, 4)


@pytest.mark.slow
def test_on_eight_devices_it_is_the_same_run(folder, tmp_path):
    """Against one device, to float32's rounding over three steps: fsdp=8 trains and serves; or four of them do either."""
    keys = {"max_training_steps": 3, "save_steps": 3, "learning_rate": 1e-3}
    runs = {"one": (1, 0, 1), "eight": (8, 0, 1), "apart": (4, 4, 2)}
    for name, (devices, apart, together) in runs.items():
        how = {"sampling_devices": apart, "samples_per_row": together}
        recipe.train(made(folder, tmp_path / name, devices=devices, **how, **keys))
        assert (column(tmp_path / name, "sampling/sampling_logp_difference/mean") < 1e-5).all()
        for column_name in ("reward", "completions/mean_length", "entropy", "grad_norm"):
            one, other = (column(tmp_path / where, column_name) for where in ("one", name))
            np.testing.assert_allclose(one, other, rtol=2e-3)


@pytest.mark.slow
def test_a_sampler_sleeps_while_samples_are_learnt(folder, tmp_path, monkeypatch):
    """Both that there are, and the run is the same to the bit."""
    slept, sleep = [], serve.Engine.sleep
    monkeypatch.setattr(serve.Engine, "sleep", lambda e: slept.append(e) or sleep(e))
    keys = KINDS["nash_md"] | {"max_training_steps": 3, "save_steps": 3}
    for name in ("awake", "asleep"):
        recipe.train(made(folder, tmp_path / name, "nash_md", sampler_sleeps=name == "asleep", **keys))
    assert len(slept) == 6 and len({id(e) for e in slept}) == 2
    assert rows_of(tmp_path / "awake") == rows_of(tmp_path / "asleep")
    with pytest.raises(recipe.RecipeError, match="sampler_sleeps: the sampler works while samples are learnt"):
        recipe.train(made(folder, tmp_path / "ahead", sampler_sleeps=True, rollout_ahead=1))


@pytest.mark.slow
def test_held_out_tasks_are_sampled_and_rewarded(folder, tmp_path):
    """Every two steps, also with a batch drawn ahead: as the weights then draw, and the run learns what it does without."""
    held = [{"prompt": f"what is two and {a}", "answer": "2"} for a in range(3)]
    keys = {"max_training_steps": 4, "save_steps": 2, "rollout_ahead": 1}
    recipe.train(made(folder, tmp_path / "plain", **keys))
    more = {"evaluation_steps": 2, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    wanted = made(folder, tmp_path / "run", **keys, **more)
    with pytest.raises(recipe.RecipeError, match="evaluation needs both; one is missing"):
        recipe.train(wanted)
    _, out, last = recipe.train(wanted, eval_dataset=held)
    rows = rows_of(tmp_path / "run")
    bare = [{k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows]
    assert bare == rows_of(tmp_path / "plain") and [row["step"] for row in rows if "eval_reward" in row] == [2, 4]
    tok = text.load(out)
    engine = serve.Engine(models.load(out), serve.Settings(rows=8, max_length=32), tokenizer=tok)
    tasks = [Task(i, tuple(text.encode(tok, row["prompt"]))) for i, row in enumerate(held)]
    ask = serve.SamplingParams(max_tokens=16, temperature=1.0)
    drawn = rollout(engine, tasks, ask, samples=4, seed=wanted.trainer.seed + samples.HELD_OUT)
    even = np.mean([np.mean([i % 2 == 0 for i in s.completion]) for s in drawn])
    assert last["eval_rewards/even/mean"] == pytest.approx(even) and last["eval_rewards/exact/mean"] == 0
    assert last["eval_completions/mean_length"] == pytest.approx(np.mean([s.length for s in drawn]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.values != ("online_dpo",)])  # that is an example
def test_each_type_is_the_same_run_on_eight_devices(kind, folder, tmp_path):
    """Against one device, to float32's rounding over three steps."""
    keys = KINDS[kind] | {"max_training_steps": 3, "save_steps": 3, "learning_rate": 1e-3}
    for devices in (1, 8):
        recipe.train(made(folder, tmp_path / str(devices), kind, devices=devices, **keys))
    for name in ("reward", "completions/mean_length", "grad_norm", "loss"):
        one, eight = (column(tmp_path / str(n), name) for n in (1, 8))
        np.testing.assert_allclose(one, eight, rtol=5e-3, atol=1e-5 if name == "loss" else 0, err_msg=name)


TOLD = """def told(completions, **columns):
    "Who called the tool, and says what it said."
    said = [c[0]["content"] for c in completions]
    return [float("</tool_call>" in x and x.endswith("#### 3")) for x in said]
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def hesitant(tmp_path_factory) -> Path:
    """A tiny model that calls a tool in half of the cases, and says what it was told; else it guesses wrong."""
    path = tmp_path_factory.mktemp("hesitant")
    said = lambda role, content: {"role": role, "content": content}
    question = said("user", "what is 1 + 2")
    chats = [[question, said("assistant", CALL), said("tool", "3"), said("assistant", "#### 3")],
             [question, said("assistant", "#### 4")]]  # fmt: skip
    tok = text.train_bpe([m["content"] for c in chats for m in c] * 9, 340, ["<|im_start|>", "<|im_end|>"])
    tok = dataclasses.replace(tok, templates={"default": TURNS}, special={"eos_token": "<|im_end|>"}, eos_ids=(2,))
    cfg = dataclasses.replace(CFG, vocab=340)
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    text.save(tok, path / "start")
    models.save(models.Model(llama, cfg, weights), path / "start")
    given = recipe.to_dict(made(path, path / "taught"))
    given["model"]["name_or_path"] = str(path / "start")
    given["trainer"] = {
        "trainer_type": "sft", "max_length": 96, "total_batch_size": 8, "max_training_steps": 160, "learning_rate": 5e-3,
        "scheduler": "constant", "save_directory": str(path / "taught"),
    }  # fmt: skip
    recipe.train(recipe.from_dict(given | {"mixture": {}}), [{"messages": c} for c in chats] * 8)
    (path / "rows.jsonl").write_text((json.dumps({"prompt": [question], "answer": "#### 3"}) + "\n") * 16)
    (path / "env.py").write_text(ENVIRONMENT + TOLD)
    (path / "taught" / "model").rename(path / "model")
    return path


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(3))
def test_a_model_learns_to_call_a_tool(seed, hesitant, tmp_path):
    """Two turns: whoever calls is told the sum, and says it. The call is learnt, what the tool said is not."""
    keys = {
        "environment": {"tools": f"{hesitant}/env.py:add", "parser": "hermes", "max_turns": 2}, "max_length": 160,
        "max_completion_length": 96, "reward_functions": [{"path": f"{hesitant}/env.py:told"}], "learning_rate": 7e-4,
        "seed": seed, "max_training_steps": 8,
    }  # fmt: skip
    recipe.train(made(hesitant, tmp_path / "whole", **keys))
    for name in ("reward", "tools/call_frequency", "rollout/turns"):
        found = column(tmp_path / "whole", name)
        assert found[-3:].mean() > found[:2].mean() + 0.15, (name, found)
    assert column(tmp_path / "whole", "tools/failure_frequency").max() < 0.3
    assert (column(tmp_path / "whole", "sampling/sampling_logp_difference/max") < 1e-5).all()
    assert any(
        line["completion"].count("#### 3") and "<tool_call>" in line["completion"] for line in shown(tmp_path / "whole")
    )
    if seed:
        for steps in (4, 8):
            recipe.train(made(hesitant, tmp_path / "cut", **keys | {"max_training_steps": steps}))
        assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")
        assert shown(tmp_path / "whole") == shown(tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.matrix
def test_tools_are_called_on_eight_devices(hesitant, tmp_path):
    """Against one device, to rounding over two steps."""
    keys = {
        "environment": {"tools": f"{hesitant}/env.py:add", "parser": "hermes", "max_turns": 2}, "max_length": 160,
        "max_completion_length": 96, "reward_functions": [{"path": f"{hesitant}/env.py:told"}], "learning_rate": 1e-4,
        "max_training_steps": 2,
    }  # fmt: skip
    for devices in (1, 8):
        recipe.train(made(hesitant, tmp_path / str(devices), devices=devices, **keys))
    for name in ("reward", "tools/call_frequency", "completions/mean_length", "grad_norm"):
        one, eight = (column(tmp_path / str(n), name) for n in (1, 8))
        np.testing.assert_allclose(one, eight, rtol=5e-3, err_msg=name)


# ---- keys ----------------------------------------------------------------------------------------------------------


def sample(i: int, length: int, finish: str = "stop", **row) -> Sample:
    drawn = np.arange(2 + length) >= 2
    zeros = np.zeros(len(drawn), np.float32)
    return Sample(
        Task(i, (1, 2), row), 0, np.arange(len(drawn), dtype=np.int32), drawn, zeros, zeros, drawn - 1, finish
    )


def test_what_is_learnt():
    """Each key of advantages, on two groups of four samples."""
    group = [sample(i // 4, n, "length" if n == 16 else "stop", hard=i / 8) for i, n in enumerate([1, 2, 3, 16] * 2)]
    rewards = Rewards(np.stack([[1.0, 0, 1, 0, 0, 0, 0, np.nan], np.arange(8.0)]), np.arange(8.0), ("a", "b"))
    of = lambda kind, **keys: settled.settle(recipe.from_dict(
        {"trainer": {"trainer_type": kind, "num_generations": 4, **keys, "reward_functions": [{"name": "exact"}] * 2}}
    ))  # fmt: skip
    put = lambda samples, better, learn: (better, learn)
    learnt = lambda s: s.method.samples.batch(s.keys, group, rewards, put)
    base = learnt(of("grpo"))
    np.testing.assert_allclose(base[0][:4], (np.arange(4) - 1.5) / (np.std(np.arange(4), ddof=1) + 1e-4))
    assert base[1].all()
    for kind, keys in (
        ("grpo", {"scale_rewards": "none"}), ("grpo", {"scale_rewards": "batch"}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}), ("gfpo", {"num_remains_in_group": 3}),
        ("gfpo", {"filter_by": "efficiency", "num_remains_in_group": 2}), ("rlvr", {"difficulty_column": "hard"}),
        ("rloo", {"normalize_advantages": True}),
        ("rloo", {"mask_truncated_completions": True}), ("rlvr", {"mask_truncated_completions": False}),
    ):  # fmt: skip
        fixed = {"num_remains_in_group": 2} if "filter_by" in keys else {}
        before, after = learnt(of(kind, **fixed)), learnt(of(kind, **keys))
        assert not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), keys
    assert learnt(of("gfpo"))[1].sum() == 8 and learnt(of("gfpo", num_remains_in_group=2))[1].tolist() == [
        True, True, False, False] * 2  # fmt: skip


def test_what_is_compared():
    """Pairs and who won; who did not end, has no reward or was cut; Nash-MD's preference against the mixture."""
    ends = ["stop", "stop", "stop", "length", "stop", "stop", "stop", "stop"]
    group = [sample(i // 2, 1 + i % 3, end) for i, end in enumerate(ends)]
    rewards = Rewards(np.zeros((1, 8)), np.array([1.0, 2, 1, 1.5, 0, np.nan, 3, 3]), ("a",))
    put = partial(collate, length=16, rows=8)

    def batch(kind, **keys):
        given = {"trainer_type": kind, "reward_functions": [{"name": "exact"}], **keys}
        s = settled.settle(recipe.from_dict({"trainer": given}))
        return s.method.samples.batch(s.keys, group, rewards, put)

    b = batch("online_dpo")
    assert b["tokens"].shape[:2] == b["mask"].shape[:2] == (4, 2) and b["places"].ndim == 3
    assert b["better"].tolist() == [False, False, False, True]
    assert b["mask"].any((1, 2)).tolist() == [True, True, False, True]
    assert batch("xpo", missing_eos_penalty=1.0)["better"].tolist() == [False, True, False, True]
    assert batch("xpo", mask_truncated_completions=True)["mask"].any((1, 2)).tolist() == [True, False, False, True]
    n = batch("nash_md")
    advantage = n["advantages"].sum(1) / np.maximum(n["mask"].sum(1), 1)
    want = [1 / (1 + np.exp(1)) - 0.5, 1 / (1 + np.exp(0.5)) - 0.5, 0, 0]
    np.testing.assert_allclose(advantage, want, atol=1e-6)
    assert n["mask"].any(1).tolist() == [True, True, False, True]


def test_what_a_reference_says_of_a_prompt() -> None:
    """A*PO: rewards less beta log mean exp(reward / beta) of the reference's samples; hopeless prompts are left out."""
    samples = [sample(i // 3, 2) for i in range(9)]
    total = np.array([1.0, 0, 1, 1, 0, 0, np.nan, 1, 0])
    given = {"trainer_type": "a2po", "reward_functions": [{"name": "exact"}], "num_value_samples": 2}
    for keys, learnt in (({}, [True, False, False]), ({"filter_all_incorrect": False}, [True, True, False])):
        s = settled.settle(recipe.from_dict({"trainer": {**given, **keys}}))
        rewards = Rewards(total[None], total, ("a",))
        b = s.method.samples.batch(s.keys, samples, rewards, partial(collate, length=16, rows=4))
        value = 0.5 * np.log((1 + np.exp(2.0)) / 2)
        np.testing.assert_allclose(b["advantage"], [1 - value, 1, 0, 0], rtol=1e-6)
        assert b["mask"].any(1).tolist() == [*learnt, False] and b["tokens"].shape[0] == 4
    tasks = [Task(i, (1, 2)) for i in range(3)]
    own = [recipe_samples.rival.writes(0.5, [t], 0) for t in [Task(i, ()) for i in range(40)]]
    assert 10 < sum(own) < 30
    engines = [lambda name=name: name for name in "ab"]
    drawn = lambda e, tasks, ask, samples, **how: [(e(), t.number) for t in tasks for _ in range(samples)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_samples.rival, "rollout", drawn)
        draw = partial(recipe_samples.rival.draw, *engines, tasks, None, seed=0, deadline=None)
        who = recipe_samples.rival.Draws
        assert draw(who=who(2, (1, 2))) == [(name, i) for i in range(3) for name in "abb"]
        assert draw(who=who(2, share=1.0)) == [("a", i) for i in range(3) for _ in range(2)]
        assert draw(who=who(2, share=0.0)) == [("b", i) for i in range(3) for _ in range(2)]


@pytest.mark.parametrize("whitened", [False, True])
def test_what_ppo_estimates(whitened):
    """Rewards with the divergence, GAE and whitening, against loops in float64 over drawn tokens (arXiv:1506.02438)."""
    rng, (rows, length) = np.random.default_rng(0), (3, 9)
    mask = np.zeros((rows, length), bool)
    mask[0, 2:7], mask[1, 3:4], mask[2, [2, 3, 6, 8]] = True, True, True  # one with an environment between
    draw = lambda: rng.normal(size=(rows, length))
    batch = {
        "mask": mask,
        "advantages": np.where(mask, [[1.0], [-0.5], [2.0]], 0.0),
        "values": draw(),
        "kl": draw() * mask,
    }
    k = methods.METHODS["ppo"].keys(kl_coef=0.1, gamma=0.9, lam=0.8, whiten_rewards=whitened)
    found = methods.METHODS["ppo"].samples.then(k, {n: jnp.asarray(x) for n, x in batch.items()})
    rewards = -0.1 * batch["kl"]
    for r, score in enumerate((1.0, -0.5, 2.0)):
        rewards[r, np.flatnonzero(mask[r])[-1]] += score
    if whitened:
        kept = rewards[mask]
        rewards = np.where(mask, (rewards - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) + kept.mean(), 0)
    want = np.zeros((rows, length))
    for r in range(rows):
        running, after = 0.0, 0.0
        for t in np.flatnonzero(mask[r])[::-1]:
            running = rewards[r, t] + 0.9 * after - batch["values"][r, t] + 0.9 * 0.8 * running
            want[r, t], after = running, batch["values"][r, t]
    np.testing.assert_allclose(found["returns"], np.where(mask, want + batch["values"], 0), atol=1e-5)
    scaled = (want - want[mask].mean()) / np.sqrt(want[mask].var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found["advantages"], np.where(mask, scaled, 0), atol=1e-5)


def test_what_ppo_knows_before_a_step():
    """The divergence of policy from reference, by both estimates, of the tokens that were drawn."""
    rng, heads = np.random.default_rng(0), models.heads
    params_of = lambda key: params.init(heads.spec(llama, CFG, "value", 1), jax.random.key(key), dtype=jnp.float32)
    policy, reference = params_of(0), params_of(1)
    tokens, mask = rng.integers(3, 200, (2, 8)), np.arange(8) >= np.array([[3], [5]])
    batch = {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}
    logp = lambda p: np.asarray(jax.nn.log_softmax(llama.forward(p["model"], tokens, CFG)[0] / 0.7))
    picked = lambda p: np.take_along_axis(logp(p)[:, :-1], tokens[:, 1:, None], 2)[..., 0]
    ratio = np.pad(picked(policy) - picked(reference), ((0, 0), (1, 0)))
    for estimator, want in (("k1", ratio), ("k3", np.exp(-ratio) - 1 + ratio)):
        k = methods.METHODS["ppo"].keys(kl_estimator=estimator)
        found = methods.METHODS["ppo"].samples.first(k, models.Model(llama, CFG, None))
        got = found(policy, batch, {"reference": reference})
        np.testing.assert_allclose(got["kl"], np.where(mask, want, 0), atol=2e-5)
    assert (np.asarray(got["values"])[mask] != 0).all() and (np.asarray(got["old"])[~mask] == 0).all()


def asked(found: recipe.Recipe, tok: text.Tokenizer):
    """What batches are drawn from, without a model."""
    return samples.build_source(
        found, samples.Policy(None, None, None, recipe.build_mesh(found)), None, tok, (), {"even": None, "exact": None}
    )


def test_what_is_asked(folder, tmp_path, monkeypatch):
    """Each key of sampling reaches the engine, the rewards, or what is shown."""
    seen: dict = {}

    def rollout(engine, tasks, ask, **how):
        seen.update(dataclasses.asdict(ask), **how)
        return [sample(i, 3, prompt="p", answer="x") for i in range(8)]

    def score(functions, found, **how):
        seen.update(functions=list(functions), **how)
        return Rewards(np.ones((2, 8)), np.ones(8), ("a", "b"))

    monkeypatch.setattr(samples.rival, "rollout", rollout)
    monkeypatch.setattr(samples.rewards, "score", score)
    tok = text.load(folder / "model")
    keys = {"top_p": 0.9, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
            "frequency_penalty": -0.3, "temperature": 0.5, "seed": 3,
            "sampling_timeout": 9.0, "reward_timeout": 8.0, "max_completion_length": 5}  # fmt: skip
    source = asked(made(folder, tmp_path, **keys), tok)
    source.sample([])
    wanted = {k: v for k, v in keys.items() if k in ("top_p", "top_k", "min_p", "temperature") or "penalty" in k}
    wanted |= {"max_tokens": 5, "samples": 4, "deadline": 9.0, "timeout": 8.0, "weights": [1.0, 1.0]}
    assert {k: seen[k] for k in wanted} == wanted and seen["functions"] == ["even", "exact"]


def test_what_learns_from_a_teacher_needs_no_rewards(folder, tmp_path):
    found = recipe.to_dict(made(folder, tmp_path, "on_policy_distillation", environment={"path": "env.py:turn"}))
    del found["trainer"]["reward_functions"]
    rewards = samples.build_score(settled.settle(recipe.from_dict(found)), {}, str)([sample(0, 3), sample(1, 3)])
    assert rewards.total.tolist() == [0, 0] and rewards.names == ()


def test_samples_are_shown(folder, tmp_path, monkeypatch, capsys):
    test_what_is_asked(folder, tmp_path, monkeypatch)
    tok = text.load(folder / "model")
    for count in (2, 3):
        found = made(folder, tmp_path / "shown", log_completions=True, num_completions_to_print=count)
        asked(found, tok).sample([])
        assert len(capsys.readouterr().err.splitlines()) == count


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"reward_functions": []}, "reward_functions: none"),
        ({"reward_functions": [{"name": "exact", "path": "a.py:f"}]}, "expected one of name, path, model, judge and"),
        ({"reward_functions": [{"name": "pattern"}]}, "missing a required argument: 'regex'; known are regex"),
        ({"reward_functions": [{"name": "exact", "options": {"regex": "a"}}]}, "unexpected keyword argument 'regex'"),
        ({"reward_functions": [{"name": "unit_tests"}]}, "pass allow=True in a container that holds nothing of value"),
        ({"reward_functions": [{"endpoint": "http://localhost/v1"}]}, "missing a required argument: 'model'"),
        ({"environment": {}}, "environment: expected one of tools and path"),
        ({"environment": {"path": "nowhere.py:f"}}, "expected FILE.py:FUNCTION or MODULE:FUNCTION"),
        ({"environment": {"tools": "json:dumps"}}, "trainer.environment.tools: parameter obj of dumps is annotated with"),
        ({"reward_functions": [{"name": "exakt"}]}, "did you mean 'exact'"),
        ({"num_generations": 5}, "5 does not divide the 32 samples"),
        ({"steps_per_generation": 3}, "3 updates of 1 parts do not divide the 32"),
        ({"samples_per_row": 3}, "3 does not divide num_generations 4"),
        ({"samples_per_row": 4, "steps_per_generation": 3}, "leaves 8 rows for 3 updates of 1 parts"),
        ({"samples_per_row": 2, "pack_samples": True}, "pack_samples: samples_per_row packs those of one prompt"),
        ({"trainer_type": "gkd", "seq_kd": True, "lmbda": 1.0}, "seq_kd: with lmbda=1 all steps learn the student's"),
        ({"max_completion_length": 32}, "32 tokens leave no room for a prompt in max_length 32"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"group_size": 4, "num_generations": 4}, "is num_generations, which is given too"),
        ({"kl_coef": 0.1}, "trainer_type grpo does not read it"),
        ({"eval_batch_size": 8}, "eval_batch_size: "),
        ({"trainer_type": "ppo", "lora": {"r": 4}}, "ppo trains all weights in this version"),
        ({"trainer_type": "sdpo", "repetition_penalty": 1.1}, "would be kept from repeating it; remove it"),
        ({"trainer_type": "sdpo", "presence_penalty": 0.5}, "presence_penalty=0.5: the models' own distributions are"),
        ({"trainer_type": "minillm", "repetition_penalty": 1.1}, "set single_step_decomposition: false, or remove it"),
        ({"trainer_type": "minillm", "frequency_penalty": 0.5}, "frequency_penalty=0.5 with single_step_decomposition"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"trainer_type": "sdpo", "epsilon": 0.1}, "epsilon: rewards are not learnt; set sdpo_policy_loss_mode"),
        ({"trainer_type": "sdpo", "distillation_alpha": 0.5}, "of the drawn tokens alone there is only the reverse KL"),
        ({"trainer_type": "sdpo", "lora": {"r": 4}}, "teacher_model_kind: with adapters, the reference is the model"),
        ({"trainer_type": "sdpo", "use_successful_as_teacher": False}, "nothing is told; set one of the two"),
        ({"trainer_type": "sdpo", "solution_template": "{x}"}, "solution_template: 'x' cannot be filled in; known are"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(keys, why, folder, tmp_path):
    with pytest.raises(recipe.RecipeError, match=why):
        recipe.train(made(folder, tmp_path, **keys))


@pytest.mark.parametrize("path", ["nowhere.py:f", "{}/rewards.py:nothing", "json:nothing", "rewards"])
def test_reward_functions_that_are_not_there(path, folder):
    given = methods.samples.Grpo(reward_functions=(methods.samples.RewardFunction(path=path.format(folder)),))
    with pytest.raises(recipe.RecipeError, match="expected FILE.py:FUNCTION or MODULE:FUNCTION"):
        build_rewards(given)


def test_a_reward_function_in_a_process_of_its_own(folder):
    given = (methods.samples.RewardFunction(path=f"{folder}/rewards.py:even", isolated=True),)
    found = build_rewards(methods.samples.Grpo(reward_functions=given))
    assert found["even"](completion_ids=[[1, 2], [2, 4]]) == [0.5, 1.0]


def test_verifiers_have_options_and_judges_are_asked(folder, monkeypatch, tmp_path):
    """By their names, with their arguments; an endpoint's answers are read as ratings, and its key is that of a file."""
    (tmp_path / "key").write_text("secret\n")
    seen = {}
    monkeypatch.setattr(
        recipe_rewards,
        "ask_endpoint",
        lambda base_url, model, *, key=None: seen.update(url=base_url, key=key) or answers,
    )
    answers = lambda questions: [str(5 + len(q) % 2) for q in questions]
    one = methods.samples.RewardFunction
    given = (one(name="pattern", options={"regex": "a+"}), one(name="length_penalty", options={"limit": 4}),
             one(endpoint="http://host/v1", options={"model": "m", "low": 0, "template": "{completion}",
                                                     "key_file": str(tmp_path / "key")}))  # fmt: skip
    found = build_rewards(methods.samples.Grpo(reward_functions=given))
    assert list(found) == ["pattern", "length_penalty", "judge"] and seen == {"url": "http://host/v1", "key": "secret"}
    assert found["pattern"](completions=["aa", "b"]) == [1.0, 0.0]
    np.testing.assert_allclose(found["judge"](prompts=["", ""], completions=["aa", "b"]), [0.5, 0.6])


ENVIRONMENT = """from fdel.train.rollout import Said
def turn(sample):
    return Said([5, 6], done=sample.info["turns"] >= 2, reward=float(sample.length))
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
"""


@pytest.mark.slow
def test_an_environment_answers_within_a_sample(folder, tmp_path):
    """It is given what ended by itself, says tokens that nobody learns, and its reward is one more."""
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    keys = {"environment": {"path": f"{tmp_path}/env.py:turn"}, "max_training_steps": 3, "save_steps": 3}
    keys |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}  # of each turn anew
    recipe.train(made(folder, tmp_path / "run", **keys))
    assert column(tmp_path / "run", "rollout/turns").max() > 1
    assert "rewards/environment/mean" in metrics.read(tmp_path / "run")[-1]
    assert (column(tmp_path / "run", "sampling/sampling_logp_difference/mean") < 1e-5).all()


def test_tools_are_shown_and_called(folder, tmp_path):
    """Tasks have the functions' schemas for the chat template, and the environment is that of `turns.tools`."""
    chats = pytest.importorskip("tests.test_text_chat", reason="the templates are beside the oracle")
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    s = settled.settle(made(folder, tmp_path, max_length=4096,
                                environment={"tools": f"{tmp_path}/env.py:add", "parser": "hermes"}))  # fmt: skip
    tok = dataclasses.replace(text.load(folder / "model"), templates={"default": chats.TEMPLATES["qwen"]})
    task = samples.build_tasks(s, tok, [{"prompt": [{"role": "user", "content": "what is one"}]}] * 8)[0][0]
    assert "Add two numbers." in text.decode(tok, task.prompt) and task.row["tools"][0]["function"]["name"] == "add"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    ids = text.encode(tok, call)
    drawn, zeros = np.arange(len(task.prompt) + len(ids)) >= len(task.prompt), np.zeros(len(task.prompt) + len(ids))
    found = Sample(task, 0, np.array([*task.prompt, *ids]), drawn, zeros, zeros, zeros, "stop")
    said = build_turn(s.keys.environment, tok)(found)
    assert "3" in text.decode(tok, said.tokens) and said.info == {"tools/calls": 1, "tools/failures": 0}


@pytest.mark.slow
def test_a_reward_model_rewards(folder, tmp_path):
    """One that `trainer_type: reward` saved; and it is in the metrics by its directory's name."""
    rows = [{"prompt": "what is one", "chosen": "it is two", "rejected": "one"}] * 8
    given = recipe.to_dict(made(folder, tmp_path / "judge"))
    given["trainer"] = {"trainer_type": "reward", "max_length": 32, "total_batch_size": 4, "max_training_steps": 2,
                        "save_directory": str(tmp_path / "judge")}  # fmt: skip
    recipe.train(recipe.from_dict(given | {"mixture": {}}), rows)
    how = {"reward_functions": [{"model": str(tmp_path / "judge" / "model")}], "max_training_steps": 2}
    recipe.train(made(folder, tmp_path / "run", **how))
    assert np.isfinite(column(tmp_path / "run", "rewards/model/mean")).all()
    assert column(tmp_path / "run", "rewards/model/std").min() > 0


@pytest.mark.parametrize(
    ("kind", "keys", "why"),
    [
        ("grpo", {"rollout_ahead": 1}, "rollout_ahead: several processes sample in step"),
        ("grpo", {"sampling_devices": 4}, "sampling_devices: each of several processes samples on its own"),
        ("grpo", {"scale_rewards": "batch"}, "scale_rewards: batch is over the samples of all processes"),
        ("rloo", {"normalize_advantages": True}, "normalize_advantages: is over the samples of all processes"),
        (
            "grpo",
            {"total_batch_size": 24, "num_generations": 8},
            "total_batch_size: 3 tasks .* not divisible by 2 processes",
        ),
    ],
    ids=lambda x: "" if isinstance(x, dict) else str(x)[:12],
)
def test_what_several_processes_cannot_do(kind, keys, why, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(samples.processes, "share", lambda mesh: (0, 2))
    with pytest.raises(recipe.RecipeError, match=why):
        recipe.train(made(folder, tmp_path, kind, devices=8 - keys.get("sampling_devices", 0), **keys))


def test_two_models_sample_where_they_are_trained(folder, tmp_path):
    with pytest.raises(recipe.RecipeError, match="sampling_devices: xpo samples from two models; set it to 0"):
        samples.rival.check(settled.settle(made(folder, tmp_path, "xpo", num_generations=2, sampling_devices=4)))


def test_adapters_alone_are_handed_over(folder, tmp_path):
    """The sampler holds the frozen weights once; an update brings the factors."""
    s = settled.settle(made(folder, tmp_path, lora={"r": 4}))
    with jax.set_mesh(recipe.build_mesh(s)):
        model = recipe.build_model(s)
        policy = samples.build_policy(s, model, text.load(folder / "model"))
        trained, _ = params.lora.split(model.params)
        new = policy.served(jax.tree.map(lambda x: x + 1, trained))
        policy.engine.update_params(new, reshard=True)
    held = policy.engine.engine._device.weights
    base, adapted = held[""], held[samples.NAME]
    assert held.slot(samples.NAME) == 0  # one call is for both
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (base, params.lora.unload(adapted))), strict=True))
    jax.tree.map(np.testing.assert_array_equal, adapted, new)


# ---- teachers, packed rows ---------------------------------------------------------------------------------------------


def with_teacher(folder: Path, out: Path, kind: str, taught: Path, **keys) -> recipe.Recipe:
    found = recipe.to_dict(made(folder, out, kind, **keys))
    if kind != "minillm":
        del found["trainer"]["reward_functions"]
    return recipe.from_dict(found | {"teacher_model": {"name_or_path": str(taught)}})


TAUGHT = {
    "iw_opd": {"num_generations": 2}, "minillm": {"learning_rate": 3e-3, "gamma": 0.5},
    "gkd": {"num_generations": 2, "lmbda": 0.5, "seq_kd": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", TAUGHT)
def test_a_teacher_judges_samples(kind, folder, taught, tmp_path):
    """The student comes near to the teacher; in two parts the run is the same."""
    for parts in (1, 2):
        keys = {"gradient_accumulation_steps": parts, **TAUGHT[kind]}
        recipe.train(with_teacher(folder, tmp_path / str(parts), kind, taught, **keys))
    one, two = (column(tmp_path / str(n), "grad_norm") for n in (1, 2))
    np.testing.assert_allclose(one[:2], two[:2], rtol=2e-3)
    name = "loss" if kind == "gkd" else "kl"
    far = column(tmp_path / "1", name)
    assert far[-3:].mean() < 0.7 * far[:2].mean(), far
    if kind == "gkd":
        assert 2 <= column(tmp_path / "1", "own_samples").sum() <= 10


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=MORE)])
def test_a_model_learns_what_it_would_say_if_it_were_told(parts, folder, tmp_path):
    """SDPO: the divergence from the first weights, which are told a solution, falls; a run that was cut is the same."""
    keys = {
        "distillation_mode": "full_logits", "teacher_model_kind": "base", "success_reward_threshold": 0.55,
        "gradient_accumulation_steps": parts, "learning_rate": 3e-3, "save_steps": 6,
    }  # fmt: skip
    recipe.train(made(folder, tmp_path / "whole", "sdpo", **keys))
    far = column(tmp_path / "whole", "distillation_loss") / column(tmp_path / "whole", "self_distillation/told")
    assert far[-3:].mean() < 0.7 * far[:3].mean(), far
    assert (column(tmp_path / "whole", "self_distillation/told") > 0).all()
    for steps in (6, 12):
        recipe.train(made(folder, tmp_path / "cut", "sdpo", **keys | {"max_training_steps": steps}))
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "cut")


def test_what_a_model_is_told(folder) -> None:
    """The first success of the group, but not a sample itself; feedback; texts and messages; each after its own prompt."""
    tok = text.load(folder / "model")
    group = [sample(i // 2, n, prompt=f"what is {'one' if i < 2 else 'two'}", privileged_context=hint)
             for i, (n, hint) in enumerate([(1, ""), (2, "wrong"), (3, ""), (2, "bad")])]  # fmt: skip
    rewards = Rewards(np.zeros((1, 4)), np.array([1.0, 1.0, 0.5, np.nan]), ("a",))
    put = partial(collate, length=16, rows=4)
    seen: dict = {}

    def asked(**keys):
        given = {"trainer_type": "sdpo", "reward_functions": [{"name": "exact"}], "num_generations": 2, **keys}
        s = settled.settle(recipe.from_dict({"trainer": given}))
        rows = methods.self_taught.told(s.keys, group, rewards, lambda ids: str(ids))
        seen["batch"] = s.method.samples.batch(s.keys, group, rewards, put, tok=tok)
        return [row and row["prompt"] for row in rows]

    ask = "{}\nCorrect solution:\n\n{}\n\n\n\nCorrectly solve the original question.\n"
    assert asked() == [ask.format("what is one", [2, 3]), ask.format("what is one", [2]), None, None]
    b = seen["batch"]
    assert b["mask"].any(1).tolist() == [True, True, True, False] == [bool(x) for x in b["places"][:, 0] < 8][:4]
    assert b["told_mask"].any(1).tolist() == [True, True, False, False]
    assert b["told_places"].shape == b["places"].shape
    for i in (0, 1):
        prompt = text.encode(tok, ask.format("what is one", text.decode(tok, [2, 3] if i == 0 else [2])))
        said = group[i].completion
        assert b["told_tokens"][i, : b["told_lengths"][i]].tolist() == [*prompt, *said]
        assert np.flatnonzero(b["told_mask"][i]).tolist() == [len(prompt) + j for j in range(len(said))]
    assert asked(dont_reprompt_on_self_success=False)[0] == ask.format("what is one", [2])
    assert asked(success_reward_threshold=0.5)[3] == ask.format("what is two", [2, 3, 4])
    hints = asked(include_environment_feedback=True, use_successful_as_teacher=False)
    assert hints[0] is hints[2] is None and "earlier attempt:\n\nwrong\n\n" in hints[1] and "bad" in hints[3]
    both = {"include_environment_feedback": True, "environment_feedback_only_without_solution": True}
    assert "wrong" not in asked(**both)[1] and "bad" in asked(**both)[3]
    short = {"reprompt_template": "{solution}", "solution_template": "<{successful_previous_attempt}>"}
    assert asked(**short)[0] == "<[2, 3]>"
    assert asked(max_reprompt_len=3) and (seen["batch"]["told_lengths"][:2] == [4, 5]).all()
    thinking = [
        {**s.task.row, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]} for s in group
    ]
    said = methods.self_taught.told(
        methods.METHODS["sdpo"].keys(num_generations=2, remove_thinking_from_demonstration=True),
        [dataclasses.replace(s, task=s.task._replace(row=row)) for s, row in zip(group, thinking, strict=True)],
        rewards, lambda ids: "<think>\nhm</think> yes",
    )  # fmt: skip
    assert said[0]["prompt"] == [thinking[0]["prompt"][0], {"role": "user", "content": ask.format("q", "yes")}]


@pytest.mark.slow
@pytest.mark.matrix
def test_packed_samples_are_learnt_as_others(folder, tmp_path):
    """Rows of several samples, in two parts: the numbers of rows of one sample each."""
    for packed in (0, 1):
        keys = {"pack_samples": bool(packed), "gradient_accumulation_steps": 1 + packed, "max_length": 64}
        recipe.train(made(folder, tmp_path / str(packed), max_training_steps=3, learning_rate=1e-3, **keys))
    for name in ("reward", "loss", "grad_norm", "entropy", "sampling/sampling_logp_difference/mean"):
        one, two = (column(tmp_path / str(n), name) for n in (0, 1))
        np.testing.assert_allclose(one, two, rtol=2e-3, atol=1e-5, err_msg=name)
