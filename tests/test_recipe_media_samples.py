"""Own samples of prompts that show images, where several read them: processes, a teacher that is told more, a mixture."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
pytest.importorskip("PIL.Image", reason="extra `media`")

from fdel import models, recipe, serve, text  # noqa: E402
from fdel.media import sight  # noqa: E402
from fdel.recipe import methods, rival  # noqa: E402
from fdel.recipe import samples as sampling  # noqa: E402
from fdel.recipe.settled import settle  # noqa: E402
from fdel.train import data, losses, rollout  # noqa: E402
from fdel.train.losses.self_distillation import TOLD  # noqa: E402
from fdel.train.rollout import local, mixture, source  # noqa: E402
from fdel.train.rollout.sight import shown  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.test_recipe_images import SHOWN, chats, curve, pixels, run_file, seeing, wanted  # noqa: E402, F401


def drawn_of(path, folder):
    """Two samples of each row's prompt, of tokens that nobody drew: (samples, sight, tokenizer)."""
    see, tok, rng = sight.read(path), text.load(path), np.random.default_rng(0)
    tasks = data.tasks(data.Source(str(chats(folder))), data.Settings(batch=1, length=64, sight=see), tok).rows

    def sample(task: rollout.Task, index: int) -> rollout.Sample:
        tokens = np.array([*task.prompt, *rng.integers(60, 100, 5 + index)], np.int32)
        drawn, zeros = np.arange(len(tokens)) >= len(task.prompt), np.zeros(len(tokens), np.float32)
        return rollout.Sample(task, index, tokens, drawn, zeros, zeros, zeros.astype(np.int32), finish="stop")

    return [sample(task, i) for task in tasks for i in range(2)], see, tok


def test_batches_of_processes_have_one_shape_and_are_that_of_one(seeing, tmp_path):  # noqa: F811
    """Of which one has prompts of text alone: put together they are the batch of all samples."""
    samples, see, _ = drawn_of(seeing("qwen2_vl")[0], tmp_path)
    sizes = []
    collate = lambda some, agree: rollout.collate(
        some, np.ones(len(some)), length=112, most=8, media=partial(shown, sight=see, agree=agree)
    )
    blind = [collate(some, lambda x: sizes.append(x) or x) for some in (samples[:6], samples[6:])][1]
    assert "media" not in blind and sizes[0].any() and not sizes[1].any()
    parts = [collate(some, lambda _: np.max(sizes, 0)) for some in (samples[:6], samples[6:])]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    jax.tree.map(np.testing.assert_array_equal, whole, collate(samples, None))
    assert (parts[1]["media"].index == -1).all() and "rotary" in parts[1]


def test_packed_rows_that_show_are_filled_up(seeing, tmp_path, monkeypatch):  # noqa: F811
    samples, see, _ = drawn_of(seeing("qwen2_vl")[0], tmp_path)
    batch = rollout.collate(samples, np.ones(8), length=112, packed=True, media=partial(shown, sight=see))
    monkeypatch.setattr(local, "most", lambda sizes: sizes + [1, 2])
    more = local.even(batch)
    same = lambda a, b: np.testing.assert_array_equal(a, b[: len(a)])
    jax.tree.map(
        same, {k: x for k, x in batch.items() if k != "places"}, {k: x for k, x in more.items() if k != "places"}
    )
    assert {len(x) for x in jax.tree.leaves(more)} == {len(batch["tokens"]) + 1}
    assert (more["media"].index[-1] == -1).all() and (more["media"].inputs.places[-1] == -1).all()


def told(path, folder, **keys):
    """What the teacher of SDPO reads of `drawn_of`'s second samples, whose first ones succeeded."""
    samples, see, tok = drawn_of(path, folder)
    k = methods.METHODS["sdpo"].keys(num_generations=2, reprompt_template="now {prompt} or {solution} !",
                                     solution_template="{successful_previous_attempt}", **keys)  # fmt: skip
    total = np.tile([1.0, 0.0], 4)
    put = partial(rollout.collate, length=96, media=partial(shown, sight=see))
    how = methods.METHODS["sdpo"].samples
    return (
        how.batch(k, samples, rollout.Rewards(total[None], total, ("a",)), put, tok=tok, sight=see),
        samples,
        see,
        tok,
    )


ASKED = (
    "user:now <image>what is it ? or {} !;",
    "user:now 2 + 2 ?<image> or {} !;",
    "user:now <image> and <image>? or {} !;",
    "user:now what is good or {} !;",
)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_teacher_that_is_told_more_sees_what_the_prompt_shows(seeing, name, tmp_path):  # noqa: F811
    """In its own place, with its own tokens; a prompt that loses its start loses images whole; a checkpoint has it all."""
    path, *_, token = seeing(name)
    batch, samples, see, tok = told(path, tmp_path)
    for i, asked in enumerate(ASKED):
        said = asked.format(text.decode(tok, samples[2 * i].completion)) + "assistant:"
        ids = text.encode(tok, said, special=False)
        prompt = sight.expand(see, ids, [sight.prepare(see, pixels(j)) for j in SHOWN[i]]).tokens
        row, want = 2 * i + 1, [*prompt, *samples[2 * i + 1].completion]
        assert batch[f"{TOLD}tokens"][row, : len(want)].tolist() == want
        assert np.flatnonzero(batch[f"{TOLD}mask"][row]).tolist() == [*range(len(prompt), len(want))]
        assert not batch[f"{TOLD}mask"][2 * i].any()  # the one that succeeded is told nothing
        media = batch[f"{TOLD}media"]
        assert ((media.index[row] >= 0) == (batch[f"{TOLD}tokens"][row] == token)).all()
        for j, picture in enumerate(SHOWN[i]):
            patches = sight.prepare(see, pixels(picture)).patches
            np.testing.assert_array_equal(media.inputs.values[row, j, : len(patches)], patches)
    jax.tree.map(np.testing.assert_array_equal, source.decode(source.encode(batch)), batch)
    short, *_ = told(path, tmp_path / "short", max_reprompt_len=30)
    kept = (short[f"{TOLD}media"].index >= 0).sum(1)
    runs = [[len(s.run) for s in samples[2 * i].task.images] for i in range(4)]
    assert all(kept[2 * i + 1] in (0, sum(runs[i]), runs[i][-1] if runs[i] else 0) for i in range(4)) and not kept.all()
    assert ((short[f"{TOLD}tokens"] == token) == (short[f"{TOLD}media"].index >= 0)).all()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_what_a_teacher_says_is_what_transformers_says(seeing, name, tmp_path):  # noqa: F811
    """Of all tokens after the rewritten prompts, 1e-4."""
    path, oracle, *_ = seeing(name)
    batch, samples, *_ = told(path, tmp_path)
    rows = {k.removeprefix(TOLD): x for k, x in batch.items() if k.startswith(TOLD)}
    model = models.load(path, dtype=jnp.float32)
    got = np.asarray(jax.jit(losses.token_logps(model.family, model.cfg))(model.params, rows))
    for i in range(1, 8, 2):
        tokens = rows["tokens"][i, : rows["lengths"][i]].tolist()
        inputs, _ = wanted(seeing, name, [tokens], list(SHOWN[i // 2]))
        with torch.no_grad():
            logp = torch.log_softmax(oracle(**inputs).logits[0], -1).numpy()
        at = np.flatnonzero(rows["mask"][i])
        np.testing.assert_allclose(got[i, at], logp[at - 1, rows["tokens"][i, at]], atol=1e-4)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_mixture_sees_with_both_towers(seeing, name, tmp_path):  # noqa: F811
    """Samples of the mixture of two models that differ in all weights, against transformers' logits of both; 1e-4."""
    path, oracle, _, token = seeing(name)
    other = tiny.build(name, 1)
    other.save_pretrained(tmp_path / "other")
    policy, reference = (models.load(p, dtype=jnp.float32, stacked=False) for p in (path, tmp_path / "other"))
    cfg = mixture.Config(policy.family, policy.cfg, 0.4)
    model = models.Model(mixture, cfg, {**policy.params, "reference": reference.params})
    see, tok = sight.read(path), text.load(path)
    tasks = data.tasks(data.Source(str(chats(tmp_path))), data.Settings(batch=1, length=64, sight=see), tok).rows
    settings = serve.Settings(rows=4, batches=(4,), budget=32, max_length=96)
    engine = serve.Engine(model, settings, tokenizer=tok, sight=see)
    ask = serve.SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    samples = rollout.rollout(engine, tasks, ask, samples=1)
    engine.close()
    compared = 0
    for sample, images in zip(samples, SHOWN, strict=True):
        foreign = np.flatnonzero(sample.drawn & (sample.tokens == token))  # transformers would look for an image there
        end = int(foreign[0]) if len(foreign) else len(sample.tokens)
        inputs, _ = wanted(seeing, name, [sample.tokens[:end].tolist()], list(images))
        with torch.no_grad():
            logits = [m(**inputs).logits[0].double() for m in (oracle, other)]
        logp = torch.log_softmax(0.6 * logits[0] + 0.4 * logits[1], -1).numpy()
        at = np.flatnonzero(sample.drawn[: end + 1])
        compared += len(at)
        np.testing.assert_allclose(sample.logps[at], logp[at - 1, sample.tokens[at]], atol=1e-4)
    assert compared > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.matrix)])
def test_a_teacher_writes_what_it_sees(seeing, name, tmp_path):  # noqa: F811
    """seq_kd: samples that the teacher draws, against transformers' logits of it on the same images; 1e-4."""
    path, _, _, token = seeing(name)
    other = tiny.build(name, 1)
    other.save_pretrained(tmp_path / "other")
    made = run_file(
        path, chats(tmp_path), tmp_path / "a", trainer_type="gkd", seq_kd=True, lmbda=0.5, max_completion_length=8
    )
    s, tok = settle(made.set("teacher_model", {"name_or_path": str(tmp_path / "other")})), text.load(path)
    settings = serve.Settings(rows=4, batches=(4,), budget=32, max_length=96)
    engine = rival.build_rival(s, models.load(path, dtype=jnp.float32), None, settings, tok)
    ask = serve.SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
    tasks, who = sampling.build_tasks(s, tok).rows, rival.Draws(1, share=0.0)
    found = rival.draw(None, engine, tasks, ask, who=who, seed=0, deadline=None)
    engine.close()
    compared = 0
    for sample, images in zip(found, SHOWN, strict=True):
        foreign = np.flatnonzero(sample.drawn & (sample.tokens == token))  # transformers would look for an image there
        end = int(foreign[0]) if len(foreign) else len(sample.tokens)
        inputs, _ = wanted(seeing, name, [sample.tokens[:end].tolist()], list(images))
        with torch.no_grad():
            logp = torch.log_softmax(other(**inputs).logits[0].double(), -1).numpy()
        at = np.flatnonzero(sample.drawn[: end + 1])[:end]
        at = at[at - 1 < len(logp)]
        compared += len(at)
        np.testing.assert_allclose(sample.logps[at], logp[at - 1, sample.tokens[at]], atol=1e-4)
    assert compared > 12


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "keys"),
    [("sdpo", {"rollout_ahead": 1, "save_steps": 1, "success_reward_threshold": 0.5}), ("nash_md", {}), ("xpo", {}),
     ("nash_md", {"lora": {"r": 2}}), ("gkd", {"seq_kd": True, "lmbda": 0.5, "save_steps": 1})],
)  # fmt: skip
def test_types_that_read_prompts_twice_learn_from_images(seeing, kind, keys, tmp_path):  # noqa: F811
    """Run files to their end, and from a checkpoint: what is resumed is what was never stopped."""
    path, *_ = seeing("llava")
    (tmp_path / "even.py").write_text(
        "def even(completion_ids, **_):\n    return [float(c[0] % 2 == 0) for c in completion_ids]\n"
    )
    how = dict(
        trainer_type=kind, num_generations=2, max_completion_length=8, num_train_epochs=2, max_length=128, **keys
    )
    how |= {} if kind == "gkd" else {"reward_functions": [{"path": f"{tmp_path / 'even.py'}:even"}]}
    tiny.build("llava", 1).save_pretrained(tmp_path / "other")
    teacher = {"name_or_path": str(tmp_path / "other")} if kind == "gkd" else None
    made = lambda to, steps: run_file(path, chats(tmp_path), tmp_path / to, max_training_steps=steps, **how).set(
        "teacher_model", teacher
    )
    recipe.train(made("a", 3))
    rows = curve(tmp_path / "a")
    assert len(rows) == 3 and all(np.isfinite(r["loss"]) for r in rows)
    if "save_steps" in keys:
        recipe.train(made("b", 2))
        recipe.train(made("b", 3))
        assert [r["loss"] for r in rows] == [r["loss"] for r in curve(tmp_path / "b")]


def test_a_prompt_of_parts_is_written_anew_around_them():
    """Whatever the template does with it."""
    around = methods.self_taught._around
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    say = lambda s: {"type": "text", "text": s}
    assert around("x", "1{}2".format) == "1x2"
    assert around(parts, "1{}2".format) == [say("1"), *parts, say("2")]
    assert around(parts, "{}".format) == parts
    assert around(parts, lambda _: "0") == [{"type": "image"}, say("0")]
    assert around(parts, lambda x: f"{x}1{x}2") == [*parts, say("1"), parts[0], parts[2], say("2")]
