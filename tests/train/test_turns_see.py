"""Environments that show images: tokens, pixels and positions are those of transformers' processors of the whole chat."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
PIL = pytest.importorskip("PIL.Image", reason="extra `media`")

from fdel import models, serve, text  # noqa: E402
from fdel.media import sight  # noqa: E402
from fdel.train import losses  # noqa: E402
from fdel.train.data import images  # noqa: E402
from fdel.train.rollout import Said, Sample, Task, collate, rollout, source  # noqa: E402
from fdel.train.rollout.sight import begun, prompt_media, shown, went_on  # noqa: E402
from fdel.train.rollout.turns import answer, generations, messages_of, tools  # noqa: E402
from tests.test_recipe_images import TEMPLATE, pixels, png, said, seeing, wanted  # noqa: E402, F401

ROWS = ([said("user", {"type": "image", "image": png(0)}, "what is it ?")], [said("user", "2 + 2 ?")])
SCREENS = (  # what is said after each reply, and the images in it
    ([said("tool", "now ", {"type": "image", "image": pixels(1)}, " and"), said("user", "so ?")], [1]),
    ([said("tool", {"type": "image", "image": {"bytes": png(2)}}, " to ",
           {"type": "image", "image": PIL.fromarray(pixels(3))})], [2, 3]),
)  # fmt: skip


def places(messages):
    """The messages as transformers' templates take them."""
    part = lambda p: {"type": "image"} if p["type"] == "image" else p
    return [{**m, "content": [part(p) for p in m["content"]]} for m in messages]


def tasks(see, tok) -> list[Task]:
    """Two prompts, one of which shows an image."""
    found = []
    for i, row in enumerate(ROWS):
        plain, taken = images.taken({"prompt": row}, None, "prompt", see, tok)
        ids = text.encode(tok, text.render_chat(tok, plain["prompt"], add_generation_prompt=True), special=False)
        ids, _, placed = images.expanded(see, ids, *taken or ((),))
        found.append(Task(i, tuple(ids), {"prompt": row}, tuple(placed)))
    return found


def environment(tok, see):
    """Shows screens after the first two replies."""

    def turn(s: Sample) -> Said:
        at = int(s.info["turns"]) - 1
        if at == len(SCREENS):
            return Said(done=True)
        return answer(tok, messages_of(s), SCREENS[at][0], generations(s)[-1], sight=see)

    return turn


def whole(path, task: int, replies: list[str]):
    """Transformers' tokens of the whole chat, before images have their tokens, and which images it shows."""
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(path)
    chat, seen = places(ROWS[task]), [0][task:]
    for reply, (new, more) in zip(replies, SCREENS, strict=False):
        chat, seen = [*chat, said("assistant", reply), *places(new)], seen + more
    return theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), seen, theirs


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.matrix)])
def test_a_chat_with_screens_is_what_transformers_makes_of_it(seeing, name):  # noqa: F811
    """Token for token, pixels bit for bit, and M-RoPE's positions; the sampler is given them, and so is the trainer."""
    path, oracle, processor, token = seeing(name)
    see, tok = sight.read(path), text.load(path)
    spell = partial(text.encode, tok, special=False)
    for task in tasks(see, tok):
        replies, tokens, new = ["a cat", "it sat"], list(task.prompt), []
        drawn = [False] * len(tokens)
        seen = begun(see, task)
        for reply, (messages, _) in zip(replies, SCREENS, strict=True):
            ids = spell(reply)
            tokens, drawn = tokens + ids, drawn + [True] * len(ids)
            out = answer(tok, task.row["prompt"], messages, ids, sight=see)
            new += [replace(x, start=x.start + len(tokens)) for x in out.images]
            tokens, drawn = tokens + list(out.tokens), drawn + [False] * len(out.tokens)
            seen = went_on(see, seen, tokens, new[-len(out.images) :])
        written, order, theirs = whole(path, task.number, replies)
        prepared = processor([pixels(i) for i in order], return_tensors="np")
        if name == "llava":
            counts = [len(sight.prepare(see, pixels(i)).run) for i in order]
            assert {*counts} == {see.count(len(sight.prepare(see, pixels(0)).patches))}
        else:
            counts = (prepared["image_grid_thw"].prod(-1) // 4).tolist()
        for n in counts:  # as their processors write each image
            written = written.replace("<image>", "<|>" * n, 1)
        want = theirs(written.replace("<|>", "<image>"), add_special_tokens=False)["input_ids"]
        assert tokens == want and len(new) == 3
        # What the sampler is given.
        media = prompt_media(see, seen)
        assert [i.values.tobytes() for i in media.items] == [
            sight.prepare(see, pixels(i)).patches.tobytes() for i in order
        ]
        if name == "qwen2_vl":
            np.testing.assert_array_equal(np.concatenate([i.values for i in media.items]), prepared["pixel_values"])
        assert ((media.index >= 0) == (np.array(tokens) == token)).all()
        # What the trainer is given.
        zeros = np.zeros(len(tokens), np.float32)
        sample = Sample(task, 0, np.array(tokens, np.int32), np.array(drawn), zeros, zeros, zeros, "stop",
                        images=tuple(new))  # fmt: skip
        batch = collate([sample], np.ones(1), length=256, media=partial(shown, sight=see))
        n = len(tokens)
        assert batch["tokens"][0, :n].tolist() == want and batch["mask"][0, :n].tolist() == drawn
        for j, i in enumerate(order):
            patches = sight.prepare(see, pixels(i)).patches
            np.testing.assert_array_equal(batch["media"].inputs.values[0, j, : len(patches)], patches)
        if name == "qwen2_vl":
            ids = torch.tensor([want])
            grid = torch.tensor(prepared["image_grid_thw"])
            turns, _ = oracle.model.get_rope_index(ids, mm_token_type_ids=(ids == token).int(), image_grid_thw=grid)
            np.testing.assert_array_equal(batch["rotary"][0, :n], turns[:, 0].numpy().T)
            np.testing.assert_array_equal(media.rotary, turns[:, 0].numpy().T)


ENDS = (75, 78, 81, 84, 87, 90)


def longer(model):
    """The model, which may be asked for longer chats than its file says."""
    inner = replace(model.cfg.text, max_positions=1024)
    return model._replace(cfg=replace(model.cfg, text=inner))


def drawn_samples(path, see, tok, more: int = 4, **settings) -> list[Sample]:
    model = longer(models.load(path, dtype=jnp.float32, stacked=False))
    settings = serve.Settings(rows=4, batches=(4,), budget=32, max_length=256, **settings)
    engine = serve.Engine(model, settings, tokenizer=tok, sight=see, eos=ENDS)
    ask = serve.SamplingParams(max_tokens=200, temperature=1.0)
    found = rollout(engine, tasks(see, tok), ask, samples=more, seed=0, turn=environment(tok, see))
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.matrix)])
def test_what_is_drawn_after_screens_is_learnt_as_it_was_drawn(seeing, name):  # noqa: F811
    """The engine's log-probabilities are the trainer's, 1e-5, in all forms of rows; 1e-4 of transformers'."""
    path, oracle, _, token = seeing(name)
    see, tok = sight.read(path), text.load(path)
    samples = drawn_samples(path, see, tok)
    shows = [s for s in samples if len(s.images) == 3 and s.finish == "stop"]
    assert len(shows) > 3 and {s.task.number for s in shows} == {0, 1}
    assert any(generations(s)[2] for s in shows)
    model = longer(models.load(path, dtype=jnp.float32))
    score = jax.jit(losses.token_logps(model.family, model.cfg))
    for how in ({"length": 256}, {"length": 512, "packed": True}, {"length": 512, "shared": True}):
        batch = collate(samples, np.ones(8), media=partial(shown, sight=see), **how)
        again = source.decode(source.encode(batch))
        jax.tree.map(np.testing.assert_array_equal, again, batch)
        mask, told = batch["mask"], np.asarray(score(model.params, again))
        assert mask.sum() == sum(s.length for s in samples)
        np.testing.assert_allclose(told[mask], (batch["logps"] + batch["kept"])[mask], atol=1e-5)
    order = {0: [0, 1, 2, 3], 1: [1, 2, 3]}
    compared = 0
    for s in shows:
        if (s.tokens[s.drawn] == token).any():  # transformers would look for an image there
            continue
        inputs, _ = wanted(seeing, name, [s.tokens.tolist()], order[s.task.number])
        with torch.no_grad():
            logp = torch.log_softmax(oracle(**inputs).logits[0], -1).numpy()
        at = np.flatnonzero(s.drawn)
        np.testing.assert_allclose(logp[at - 1, s.tokens[at]], s.logps[at], atol=1e-4)
        compared += 1
    assert compared > 1


def test_rows_end_before_a_screen_that_they_would_cut(seeing):  # noqa: F811
    """Such an image is left out, for nothing is learnt behind it; prompts of equal tokens share only what they show too."""
    path, *_, token = seeing("qwen2_vl")
    see, tok = sight.read(path), text.load(path)
    task = tasks(see, tok)[1]
    out = answer(tok, task.row["prompt"], SCREENS[0][0], [70], sight=see)
    n, (screen,) = len(task.prompt), out.images
    tokens = np.array([*task.prompt, 70, *out.tokens, 71], np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    drawn = np.isin(np.arange(len(tokens)), [n, len(tokens) - 1])
    placed = replace(screen, start=screen.start + n + 1)
    sample = Sample(task, 0, tokens, drawn, zeros, zeros, zeros, "stop", images=(placed,))
    media, end = partial(shown, sight=see), placed.start + len(screen.run)
    for length, there in ((end - 1, False), (end, True)):
        batch = collate([sample], np.ones(1), length=length, media=media)
        assert ("media" in batch) == there and batch["mask"].sum() == 1
    assert (batch["media"].index[0] >= 0).sum() == len(screen.run)
    with pytest.raises(ValueError, match="samples show pictures; give media="):
        collate([sample], np.ones(1), length=end)
    with pytest.raises(ValueError, match=f"tokens that stand for it are not those from {n} on"):
        collate([replace(sample, images=(replace(placed, start=n),))], np.ones(1), length=end, media=media)
    # Two images of one size behind the same words.
    first, second = (
        images.taken({"prompt": [said("user", {"type": "image", "image": pixels(i)}, "?")]}, None, "prompt", see, tok)
        for i in (0, 4)
    )
    ids = text.encode(tok, text.render_chat(tok, first[0]["prompt"], add_generation_prompt=True), special=False)
    pair = []
    for i, (_, found) in enumerate((first, second)):
        each, _, at = images.expanded(see, ids, *found)
        tokens = np.array([*each, 70], np.int32)
        ends, none = np.arange(len(tokens)) == len(each), np.zeros(len(tokens), np.float32)
        pair.append(Sample(Task(i, tuple(each), {}, tuple(at)), 0, tokens, ends, none, none, none, "stop"))
    assert pair[0].task.prompt == pair[1].task.prompt and pair[0].task.images != pair[1].task.images
    batch = collate(pair, np.ones(2), length=128, shared=True, media=media)
    values = batch["media"].inputs.values[0]
    for j, i in enumerate((0, 4)):
        patches = sight.prepare(see, pixels(i)).patches
        np.testing.assert_array_equal(values[j, : len(patches)], patches)


def call(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {}})}\n</tool_call>"


def screenshot():
    """Take a screenshot."""
    return pixels(1)


def screens():
    """Take two, and say so."""
    return [{"type": "text", "text": "two"}, *({"type": "image", "image": PIL.fromarray(pixels(i))} for i in (2, 3))]


def listing():
    """List numbers."""
    return [1, 2]


def wrong():
    """Give what is no image."""
    return np.zeros((2, 2))


def giving(part: dict):
    def screenshot():
        """Give what is not to be read, or is no image."""
        return [{"type": "image", **part}]

    return screenshot


def test_tools_show_what_they_give(seeing):  # noqa: F811
    """Images and parts stand in the tools' messages; where they are broken, or the model does not see, it is told so."""
    path, *_ = seeing("qwen2_vl")
    made = text.train_bpe(["tool call name arguments user"], 300, ["<image>"])
    tok, token = replace(made, templates={"default": TEMPLATE}), made.backend.token_to_id("<image>")
    see = sight.read(path)
    see = replace(see, placeholder=token, entries=(token,), settings=replace(see.settings, token=token))
    task, functions = tasks(see, tok)[1], [screenshot, screens, listing, wrong]
    ids = text.encode(tok, "".join(map(call, ("screenshot", "screens", "listing", "wrong"))), special=False)
    tokens = np.array([*task.prompt, *ids], np.int32)
    zeros, drawn = np.zeros(len(tokens), np.float32), np.arange(len(tokens)) >= len(task.prompt)
    sample = Sample(task, 0, tokens, drawn, zeros, zeros, zeros, "stop")
    out = tools(tok, functions, parser="hermes", sight=see)(sample)
    runs = [sight.prepare(see, pixels(i)).run for i in (1, 2, 3)]
    assert [x.run for x in out.images] == runs and out.info == {"tools/calls": 4, "tools/failures": 1}
    assert all(tuple(out.tokens[x.start :][: len(x.run)]) == x.run for x in out.images)
    rest = [t for i, t in enumerate(out.tokens) if not any(x.start <= i < x.start + len(x.run) for x in out.images)]
    shown = text.decode(tok, rest, skip_special=False).replace(" ", "")
    assert shown.startswith(";tool:;tool:two;tool:[1,2];tool:error:ValueError:foundanimagefloat64[2,2]")
    assert shown.endswith(";assistant:")
    for part in ({"path": "/etc/hostname"}, {"image": "/etc/hostname"}, {"url": "http://host/a"}, {"image": b"none"}):
        with pytest.raises(ValueError, match="lie in no folder|nothing is fetched|an image of 4 bytes"):
            tools(tok, [giving(part), screens, listing, wrong], parser="hermes", sight=see)(sample)
    with_text = replace(tok, templates={"default": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"})
    told = tools(with_text, functions, parser="hermes")(sample)
    assert not told.images and told.info["tools/failures"] == 3
    assert "this model reads text alone" in text.decode(tok, told.tokens, skip_special=False)


def test_an_environment_that_shows_what_cannot_be_shown_ends_its_sample(seeing):  # noqa: F811
    """The others go on."""
    path, *_ = seeing("qwen2_vl")
    see, tok = sight.read(path), text.load(path)
    model = longer(models.load(path, dtype=jnp.float32, stacked=False))
    settings = serve.Settings(rows=4, batches=(4,), budget=32, max_length=256, media_bytes=1)
    engine = serve.Engine(model, replace(settings), tokenizer=tok, sight=see, eos=ENDS)
    ask = serve.SamplingParams(max_tokens=200, temperature=1.0)
    shows = answer(tok, ROWS[1], SCREENS[0][0], [70], sight=see)

    def turn(s: Sample) -> Said:
        if s.index == 0:
            return Said(shows.tokens[1:], images=shows.images)  # one token aside
        return shows if s.index == 1 else Said(done=True)

    found = rollout(engine, tasks(see, tok)[1:], ask, samples=4, seed=2, turn=turn)
    engine.close()
    errors = {s.index: s.error for s in found if s.finish == "error"}
    assert "are not those from" in errors.get(0, "") and "media_bytes" in errors.get(1, ""), errors
    assert {s.finish for s in found[2:]} <= {"stop", "length"}


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_with_a_tool_that_shows(seeing, tmp_path):  # noqa: F811
    """A run file to its end, bit by bit after a checkpoint with batches that were sampled ahead, sharing rows too."""
    from fdel import recipe
    from tests.test_recipe_images import curve, run_file

    path, *_ = seeing("qwen2_vl")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": "2 + 2 ?"}]}) + "\n" for _ in range(4)))
    (tmp_path / "shows.py").write_text(
        "import numpy as np\n"
        "from fdel import text\n"
        "from fdel.media import sight\n"
        "from fdel.train.rollout.turns import Said, answer, generations, messages_of\n"
        f"FOLDER = {str(path)!r}\n"
        "def turn(s):\n"
        "    if s.info['turns'] > 1:\n"
        "        return Said(done=True)\n"
        "    image = np.full((16, 24, 3), 40 * s.index, np.uint8)\n"
        "    new = [{'role': 'tool', 'content': [{'type': 'image', 'image': image}]}]\n"
        "    return answer(text.load(FOLDER), messages_of(s), new, generations(s)[-1], sight=sight.read(FOLDER))\n"
        "def brief(completions, **_):\n"
        "    return [float(len(c) % 5) for c in completions]\n"
    )
    how = dict(trainer_type="grpo", num_generations=2, max_completion_length=60, num_train_epochs=4, max_length=96,
               environment={"path": f"{tmp_path / 'shows.py'}:turn"}, rollout_ahead=1,
               reward_functions=[{"path": f"{tmp_path / 'shows.py'}:brief"}])  # fmt: skip
    recipe.train(run_file(path, rows, tmp_path / "a", max_training_steps=3, **how))
    recipe.train(run_file(path, rows, tmp_path / "b", max_training_steps=1, save_steps=1, **how))
    recipe.train(run_file(path, rows, tmp_path / "b", max_training_steps=3, save_steps=1, **how))
    uneven = ("time/", "rollout/tokens_per_second")
    even = lambda name: [{k: v for k, v in r.items() if not k.startswith(uneven)} for r in curve(tmp_path / name)]
    assert even("a") == even("b") and len(even("a")) == 3
    assert all(np.isfinite(r["loss"]) for r in even("a")) and even("a")[0]["rollout/turns"] > 1
    recipe.train(run_file(path, rows, tmp_path / "c", max_training_steps=1, samples_per_row=2, **how))
    np.testing.assert_allclose(curve(tmp_path / "c")[0]["grad_norm"], even("a")[0]["grad_norm"], rtol=1e-3)
