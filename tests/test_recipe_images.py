"""Run files whose rows show images: losses are those of transformers' model on its own processor's output."""

import base64
import dataclasses
import io
import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers import models as kinds

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
PIL = pytest.importorskip("PIL.Image", reason="extra `media`")

from fdel import models, params, recipe, serve, text  # noqa: E402
from fdel.media import sight  # noqa: E402
from fdel.recipe import build, methods, samples  # noqa: E402
from fdel.recipe import seeing as sights  # noqa: E402
from fdel.train import data, losses, metrics, rollout  # noqa: E402
from fdel.train.rollout import source  # noqa: E402
from fdel.train.rollout.sight import shown  # noqa: E402
from tests.models import tiny  # noqa: E402

TEMPLATE = (  # as LLaVA's: contents are lists of parts
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% elif p.text is defined %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = ((37, 53), (24, 16), (16, 31), (40, 40))


def pixels(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (*SIZES[i % 4], 3), np.uint8)


def png(i: int) -> bytes:
    out = io.BytesIO()
    PIL.fromarray(pixels(i)).save(out, "PNG")
    return out.getvalue()


def said(role: str, *parts) -> dict:
    return {"role": role, "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Make a tiny checkpoint with its processor and a tokenizer that knows its tokens, and transformers' model."""
    made = {}

    def make(name: str):
        if name in made:
            return made[name]
        path = tmp_path_factory.mktemp(name)
        oracle = tiny.checkpoint(name, path)
        known = json.loads((path / "config.json").read_text())
        token = known.get("image_token_index", known.get("image_token_id"))
        names = {token: "<image>", 111: "[IMG_BREAK]", 112: "[IMG_END]"}
        spare = sorted(set(range(3, 128)) - set(names))
        vocab = {chr(c): i for c, i in zip(range(32, 127), spare, strict=False)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
        vocab |= {n: i for i, n in names.items()}
        made_of = Tokenizer(kinds.WordLevel(vocab, unk_token="<pad>"))
        made_of.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        made_of.add_special_tokens(["<pad>", "<s>", "</s>", *names.values()])
        special = {"eos_token": "</s>", "pad_token": "<pad>"}
        text.save(text.Tokenizer(made_of, special, (2,), {"default": TEMPLATE}, {}, made_of.to_str()), path)
        if name.startswith("qwen"):
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            processor = Qwen2VLImageProcessorPil(
                patch_size=4, merge_size=2, size=dict(shortest_edge=64, longest_edge=1024)
            )
        else:
            processor = tiny.sight.processor(name)
        processor.save_pretrained(path)
        made[name] = path, oracle, processor, token
        return made[name]

    return make


def wanted(seeing, name: str, tokens: list[list[int]], images: list[int]) -> tuple[dict, torch.Tensor]:
    """What transformers' model takes of rows of tokens with runs, and its labels, media's own tokens left out."""
    path, _, processor, token = seeing(name)
    longest = max(map(len, tokens))
    ids = torch.tensor([t + [0] * (longest - len(t)) for t in tokens])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in tokens])
    inputs = dict(processor([pixels(i) for i in images], return_tensors="pt")) if images else {}
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == token).int()
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    return {"input_ids": ids, "attention_mask": mask, **inputs}, labels


def run_file(model: Path, rows: Path, out: Path, **trainer) -> recipe.Recipe:
    settings = {"total_batch_size": 4, "max_training_steps": 3, "max_length": 96, "log_steps": 1, "learning_rate": 1e-2}
    settings |= {"save_directory": str(out), "scheduler": "constant"} | trainer
    sections = {"model": {"name_or_path": str(model)}, "mixture": {"informs": [{"data_files": str(rows)}]},
                "trainer": settings, "sharding": {"axis_dims": [1, 1, 1, 1, 1]}}  # fmt: skip
    return recipe.from_dict(sections)


def chats(folder: Path) -> Path:
    """Rows as people write them: a path, a data URL, bytes, a column, two images, none."""
    (folder / "pics").mkdir(parents=True, exist_ok=True)
    for i in range(4):
        (folder / "pics" / f"{i}.png").write_bytes(png(i))
    link = {"url": f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"}
    raw = {"bytes": base64.b64encode(png(2)).decode(), "path": None}
    rows = [
        {"messages": [said("user", {"type": "image", "image": "pics/0.png"}, "what is it ?"), said("assistant", "a cat")]},
        {"messages": [said("user", "2 + 2 ?", {"type": "image_url", "image_url": link}), said("assistant", "four")]},
        {"messages": [said("user", {"type": "image"}, " and ", {"type": "image", "image": None}, "?"),
                      said("assistant", "the cat sat")], "images": [raw, "pics/3.png"]},
        {"messages": [{"role": "user", "content": "what is good"}, {"role": "assistant", "content": "a mat"}]},
    ]  # fmt: skip
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


SHOWN = ((0,), (1,), (2, 3), ())  # the images of each row


def batches(made: recipe.Recipe):
    return list(recipe.build_dataset(made, build.build_tokenizer(made)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", pytest.param("mistral3", marks=pytest.mark.matrix), "qwen2_vl"])
def test_rows_with_images_are_what_transformers_learns(seeing, name, tmp_path):
    """Of all forms of images, one row each and packed: the loss 1e-5, its weight exactly."""
    path, oracle, *_ = seeing(name)
    rows = chats(tmp_path)
    plain = run_file(path, rows, tmp_path / "out", num_train_epochs=1)
    see = sights.seeing(plain)
    (batch,) = batches(plain)
    tok = build.build_tokenizer(plain)
    listed = lambda m: m if isinstance(m["content"], list) else said(m["role"], m["content"])
    shown = {}
    for line, images in zip(rows.read_text().splitlines(), SHOWN, strict=True):
        chat = [{**listed(m), "content": [{"type": "image"} if p["type"] != "text" else p for p in listed(m)["content"]]}
                for m in json.loads(line)["messages"]]  # fmt: skip
        ids = text.encode(tok, text.render_chat(tok, chat), special=False)
        pictures = [sight.prepare(see, pixels(i)) for i in images]
        shown[tuple(sight.expand(see, ids, pictures).tokens)] = images
    found = [tuple(t[:n].tolist()) for t, n in zip(batch["tokens"], batch["lengths"], strict=True)]
    assert set(found) == set(shown)
    inputs, labels = wanted(seeing, name, [list(t) for t in found], [i for t in found for i in shown[t]])
    with torch.no_grad():
        want = oracle(**inputs, labels=labels).loss.item()
    model = models.load(path, dtype=jnp.float32)
    loss = jax.jit(losses.sft(model.family, model.cfg))
    total, sums = loss(model.params, batch)
    assert int(sums["weight"]) == int((labels[:, 1:] >= 0).sum())
    np.testing.assert_allclose(total / sums["weight"], want, rtol=1e-5)
    packed = run_file(
        path, rows, tmp_path / "out", num_train_epochs=1, packing=True, max_length=160, total_batch_size=1
    )
    every = batches(packed)
    assert len(every) < 4 and max(int(b["packed"].segment_ids.max()) for b in every) > 0
    each = [loss(model.params, b) for b in every]
    assert sum(float(s["weight"]) for _, s in each) == float(sums["weight"])
    np.testing.assert_allclose(sum(float(t) for t, _ in each), total, rtol=1e-5)


def curve(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics.read(out)]


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_goes_on_bit_by_bit_and_its_model_sees(seeing, tmp_path):
    """Packed rows, saved after two of four steps; a cache of tokens holds the images' files."""
    path, *_ = seeing("llava")
    rows, save = chats(tmp_path), {"path": str(tmp_path / "cache")}
    how = dict(packing=True, max_length=120, total_batch_size=1, save_steps=2, num_train_epochs=4)
    whole = run_file(path, rows, tmp_path / "a", max_training_steps=4, **how).set("mixture.save", save)
    recipe.train(whole)
    recipe.train(run_file(path, rows, tmp_path / "b", max_training_steps=2, **how).set("mixture.save", save))
    found = recipe.train(run_file(path, rows, tmp_path / "b", max_training_steps=4, **how).set("mixture.save", save))
    assert curve(tmp_path / "a") == curve(tmp_path / "b") and len(curve(tmp_path / "a")) == 4
    assert sight.read(found.directory) == sight.read(path)
    (part,) = (tmp_path / "cache").iterdir()
    assert (part / "images.files.bin").stat().st_size > len(png(1))


def test_a_stream_gives_the_images_of_its_rows(seeing, tmp_path):
    path, *_ = seeing("qwen2_vl")
    made = run_file(path, chats(tmp_path), tmp_path / "out", num_train_epochs=1)
    streamed = made.set("mixture.pack_on_the_fly", True).set("mixture.shuffle_buffer_size", 4)
    (one,), (other,) = batches(made), batches(streamed)
    real = lambda b: {
        (tuple(t[:n]), tuple((i >= 0)[:n]), r[:n].tobytes(), float(np.abs(v).sum()))
        for t, n, i, r, v in zip(
            b["tokens"], b["lengths"], b["media"].index, b["rotary"], b["media"].inputs.values, strict=True
        )
    }
    assert real(one) == real(other) and one["rotary"].shape == (4, 96, 3)


ASKED = [
    ({"image": "../{name}/pics/0.png", "type": "image"}, None),
    ({"image": "/etc/hostname", "type": "image"}, "/etc/hostname leads to .*, outside of"),
    ({"image": "pics/../../x.png", "type": "image"}, "outside of"),
    ({"image": "pics/none.png", "type": "image"}, "there is no such file below"),
    ({"image": "https://example.org/a.png", "type": "image"}, "nothing is fetched"),
    ({"image": "file:///etc/hostname", "type": "image"}, "nothing is fetched"),
    ({"image": "data:image/png;base64,!!", "type": "image"}, "base64 is broken"),
    ({"image": "chats.jsonl", "type": "image"}, "chats.jsonl: found b.*no image of a known format"),
    ({"image": "pics/\0ok.png", "type": "image"}, r"image 'pics/.x00ok.png': expected a path without null bytes"),
    ({"image": "a" * 5000, "type": "image"}, "^image 'a{79}: expected a path .* of at most 4,096 characters$"),
    ({"image": "a" * 300, "type": "image"}, "^image 'a{79}: File name too long$"),
    (
        {"image": "pics/0.png", "type": "picture"},
        "part 1 of message 1 has 'image' and the type 'picture'; expected the",
    ),
    ({"image": "pics/0.png"}, "part 1 of message 1 has 'image' and the type 'None'; expected the type 'image'"),
    ({"image": 7, "type": "image"}, "expected an image as bytes, a data URL, a path"),
    ({"type": "image"}, "names none, and the column images has no more"),
]


@pytest.mark.parametrize("part,reason", ASKED)
def test_an_image_that_cannot_be_used_names_file_and_row(seeing, part, reason, tmp_path):
    """Paths stay below the folder of the rows' file; nothing is fetched."""
    path, *_ = seeing("llava")
    rows = chats(tmp_path)
    part = {k: v.format(name=tmp_path.name) if isinstance(v, str) else v for k, v in part.items()}
    row = {"messages": [said("user", part, "?"), said("assistant", "a")]}
    rows.write_text(rows.read_text() + json.dumps(row) + "\n")
    see = sight.read(path)
    settings = data.Settings(batch=1, length=96, sight=see)
    report = data.dataset(data.Source(str(rows)), settings, text.load(path)).report
    assert report.kept == 4 + (reason is None)
    if reason is not None:
        ((complaint, (_, places)),) = report.notes.items()
        assert places == (f"{rows}:5",) and re.search(reason, complaint), complaint


def test_what_is_learnt_is_counted_without_images(seeing, tmp_path):
    """As the loss weighs a batch; of prompts nothing is."""
    path, *_ = seeing("llava")
    tok, see, source = text.load(path), sight.read(path), data.Source(str(chats(tmp_path)))
    found = data.dataset(source, data.Settings(batch=4, length=96, sight=see, learn="all"), tok)
    (batch,) = found
    _, _, labels = losses.forward.rows(jax.tree.map(jnp.asarray, batch))
    wanted = int((labels >= 0).sum()) + len(batch["tokens"])  # nothing predicts the first token of a row
    assert f" tokens, {wanted} of them to be learnt" in str(found.report) and "mask" not in batch
    prompts = [{"prompt": [said("user", {"type": "image", "image": png(0)}, "?")]}]
    report = data.dataset(prompts, data.Settings(batch=1, length=96, sight=see, kind="prompt"), tok).report
    assert "1 examples" in str(report) and " 0 of them to be learnt" in str(report)


def test_what_would_cut_an_image_or_ignore_it_is_refused(seeing, tmp_path):
    path, *_ = seeing("llava")
    tok, see, source = text.load(path), sight.read(path), data.Source(str(chats(tmp_path)))
    small = data.dataset(source, data.Settings(batch=1, length=12, packing="wrapped", sight=see), tok).report
    assert small.kept == 1 and any("an image of 16 tokens does not fit whole" in note for note in small.notes)
    blind = data.dataset(source, data.Settings(batch=1, length=96), tok).report
    assert any("the row shows images, but this model reads text alone" in note for note in blind.notes)
    short = data.dataset(source, data.Settings(batch=1, length=20, sight=see), tok).report
    assert any("an image of 16 tokens does not fit whole" in note for note in short.notes)
    ones = [{"image": PIL.fromarray(pixels(0)), "text": "<image> a cat"}, {"images": [pixels(1)], "text": "<image> b"}]
    assert data.dataset(ones, data.Settings(batch=2, length=96, sight=see), tok).report.kept == 2
    two = [{"messages": [{"role": "user", "content": "a"}, said("assistant", "b")], "images": [png(0), pixels(1)]}]
    (batch,) = data.dataset(two, data.Settings(batch=1, length=96, sight=see), tok)
    assert (batch["tokens"][0][:5] == np.array(text.encode(tok, "user:", special=False))).all()
    assert (np.asarray(batch["media"].index[0][5:37]) == np.arange(32)).all()


def cut_rows(seeing, name: str, packing: str, folder: Path):
    """Rows that packing cuts, and its pieces: (its batch's row, segment, its tokens, the images whose runs it has)."""
    path, *_, token = seeing(name)
    settings = data.Settings(batch=1, length=24, packing=packing, sight=sight.read(path), partial="pad")
    found = data.dataset(data.Source(str(chats(folder))), settings, text.load(path))
    (store,), plan = found.origin.stores, found.origin.plan(0)
    every = [store.tokens[a:b] for a, b in zip(store.starts[:-1], store.starts[1:], strict=True)]
    pieces = []
    for r, k in enumerate(plan.order):
        for segment, (e, a, b) in enumerate(plan.pieces[plan.bounds[k] : plan.bounds[k + 1]].tolist()):
            begins = np.flatnonzero((every[e] == token) & (np.roll(every[e], 1) != token))
            here = [i for i, at in zip(SHOWN[e], begins, strict=True) if a <= at < b]
            pieces.append((r, segment, every[e][a:b], here))
    return list(found), pieces, every


@pytest.mark.parametrize("packing", ["wrapped", "best_fit_split"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_rows_are_cut_before_an_image_which_goes_with_its_piece(seeing, name, packing, tmp_path):
    """All tokens are there once; an image's stand together, each with its own entry, beside the image's own patches."""
    path, *_, token = seeing(name)
    found, pieces, every = cut_rows(seeing, name, packing, tmp_path)
    see = sight.read(path)
    assert sum(len(t) for _, _, t, _ in pieces) == sum(map(len, every)) and len(pieces) > len(every)  # some are cut
    for r, batch in enumerate(found):
        mine = [(s, t, here) for row, s, t, here in pieces if row == r]
        tokens, segments, media = batch["tokens"][0], batch["packed"].segment_ids[0], batch["media"]
        for s, t, _ in mine:
            np.testing.assert_array_equal(tokens[segments == s], t)
        assert (segments >= 0).sum() == sum(len(t) for _, t, _ in mine)
        index, images = media.index[0], [i for *_, here in mine for i in here]
        assert ((index >= 0) == (tokens == token)).all() and len({*index[index >= 0]}) == (index >= 0).sum()
        stride = see.count(media.inputs.values.shape[2])
        assert [*dict.fromkeys(index[index >= 0] // stride)] == [*range(len(images))]
        for j, i in enumerate(images):
            patches = sight.prepare(see, pixels(i)).patches
            np.testing.assert_array_equal(media.inputs.values[0, j, : len(patches)], patches)
            assert see.count(len(patches)) == (index // stride == j).sum()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "packing"), [("llava", "wrapped"), ("qwen2_vl", "best_fit_split")])
def test_pieces_of_rows_are_what_transformers_learns_of_each_alone(seeing, name, packing, tmp_path):
    """The sum of their losses 1e-5, its weight exactly."""
    path, oracle, *_ = seeing(name)
    found, pieces, _ = cut_rows(seeing, name, packing, tmp_path)
    want = weight = 0.0
    for _, _, tokens, images in pieces:
        inputs, labels = wanted(seeing, name, [tokens.tolist()], images)
        with torch.no_grad():
            logits = oracle(**inputs).logits[0, :-1]
        want += (
            torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item() if len(tokens) > 1 else 0
        )
        weight += int((labels[0, 1:] >= 0).sum())
    model = models.load(path, dtype=jnp.float32)
    loss = jax.jit(losses.sft(model.family, model.cfg))
    each = [loss(model.params, b) for b in found]
    assert sum(float(s["weight"]) for _, s in each) == weight
    np.testing.assert_allclose(sum(float(t) for t, _ in each), want, rtol=1e-5)


def test_an_image_that_changed_since_is_an_error(seeing, tmp_path):
    path, *_ = seeing("qwen2_vl")
    settings = data.Settings(batch=4, length=96, sight=sight.read(path))
    found = data.dataset(data.Source(str(chats(tmp_path))), settings, text.load(path))
    (tmp_path / "pics" / "0.png").write_bytes(png(3))
    with pytest.raises(ValueError, match="0.png: the image has another size than when its row was read"):
        found.origin[0]


def pairs(folder: Path) -> Path:
    rows = chats(folder).with_name("pairs.jsonl")
    one = lambda i, a, b: {"prompt": [{"role": "user", "content": "what is it ?"}], "chosen": [said("assistant", a)],
                           "rejected": [{"role": "assistant", "content": b}], "images": [f"pics/{i}.png"]}  # fmt: skip
    made = [one(0, "a cat", "a mat that sat"), one(3, "four", "2")]
    same = said("user", {"type": "image", "image": "pics/2.png"}, "is it good ?")
    made.append({"chosen": [same, said("assistant", "it is")], "rejected": [same, said("assistant", "so so")]})
    made.append(
        {"prompt": [said("user", "2 + 2")], "chosen": [said("assistant", "4")], "rejected": [said("assistant", "3")]}
    )
    rows.write_text("".join(json.dumps(r) + "\n" for r in made))
    return rows


def compared(folder: Path, kind: str) -> Path:
    """Rows of `pairs`; with a third completion for tpo, for kto one of them as two completions with labels."""
    file = pairs(folder)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if kind == "tpo":
        rows[2] = {"prompt": rows[2]["chosen"][:1], **{k: rows[2][k][1:] for k in ("chosen", "rejected")}}
        rows = [r | {"reference": [said("assistant", f"so {i}")]} for i, r in enumerate(rows)]
    elif kind == "kto":
        first = {"prompt": [said("user", {"type": "image", "image": "pics/0.png"}, "what is it ?")]}
        shows = said("assistant", "see ", {"type": "image", "image": "pics/1.png"}, "!")
        rows[:1] = [
            first | {"completion": rows[0]["chosen"], "label": True},
            first | {"completion": [shows], "label": 0},
        ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


COMPARED = [("llava", "dpo"), ("qwen2_vl", "kto")]
COMPARED += [
    pytest.param(*of, marks=pytest.mark.matrix) for of in (("qwen2_vl", "dpo"), ("llava", "kto"), ("llava", "tpo"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_completions_with_images_are_what_transformers_says_of_them(seeing, name, kind, tmp_path):
    """The log-probability of each after a prompt with images, in kto's "kl" too, of other rows that show images: 1e-5."""
    path, oracle, processor, token = seeing(name)
    rows = compared(tmp_path, kind)
    each = {"dpo": (4, 2), "tpo": (4, 3), "kto": (8, 1)}[kind]
    made = run_file(path, rows, tmp_path / "a", trainer_type=kind, num_train_epochs=1, total_batch_size=each[0])
    (batch,) = batches(made)
    model, see = models.load(path, dtype=jnp.float32), sights.seeing(made)
    score = jax.jit(losses.completion_logps(model.family, model.cfg))
    known = {i: sight.prepare(see, pixels(i)).patches for i in range(4)}
    mixed, every = batch.pop("kl", None), []
    for here in (batch, *([mixed] if mixed else ())):
        got = np.asarray(score(model.params, here)["logps"]).ravel()
        behind = here["tokens"].ndim - 1
        flat = jax.tree.map(lambda x, n=behind: x.reshape(-1, *x.shape[n:]), here["media"].inputs)
        lengths = here["lengths"].ravel()
        assert len(got) == np.prod(each)
        for i, n in enumerate(lengths):
            tokens, mask = (here[k].reshape(len(got), -1)[i, :n] for k in ("tokens", "mask"))
            count = [int((at[:, 0] >= 0).sum()) for at in flat.places[i]]
            shown = [j for x, c in zip(flat.values[i], count, strict=True) for j, p in known.items()
                     if c and np.array_equal(p, x[:c])]  # fmt: skip
            assert (np.sum(tokens == token) > 0) == (len(shown) > 0)
            inputs, _ = wanted(seeing, name, [tokens.tolist()], shown)
            with torch.no_grad():
                logp = torch.log_softmax(oracle(**inputs).logits[0].float(), -1)
            index = here["media"].index.reshape(len(got), -1)[i]
            learnt = [t for t in range(1, n) if mask[t] and index[t] < 0]
            np.testing.assert_allclose(got[i], sum(float(logp[t - 1, tokens[t]]) for t in learnt), rtol=1e-5)
            every.append((*shown, "|", *tokens.tolist()))
    own, others = set(every[: np.prod(each)]), every[np.prod(each) :]
    assert len(own) == np.prod(each)
    assert not mixed or any(1 in x[: x.index("|")] and x not in own for x in others)  # an image of another's completion


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["kto", "tpo"])
def test_runs_of_kto_and_tpo_learn_from_images(seeing, kind, tmp_path):
    """Run files to their end; kto's with a reference computed before is that with one beside."""
    path, *_ = seeing("qwen2_vl")
    rows, how = (
        compared(tmp_path, kind),
        dict(trainer_type=kind, max_training_steps=2, total_batch_size=4, num_train_epochs=2),
    )
    for name, more in (("a", {}), ("b", {"precompute_ref_log_probs": True}))[: 1 + (kind == "kto")]:
        made = run_file(path, rows, tmp_path / name, **how, **more)
        recipe.train(made.set("mixture.shuffle_buffer_size", 0))
        losses_of = [r["loss"] for r in curve(tmp_path / name)]
        assert len(losses_of) == 2 and np.isfinite(losses_of).all()
    if kind == "kto":
        np.testing.assert_allclose([r["loss"] for r in curve(tmp_path / "a")], losses_of, rtol=1e-4)


def test_only_what_the_assistant_says_is_learnt_beside_written_images(seeing, tmp_path):
    """Of a processor that writes text around images; ids without that text are refused."""
    path, *_ = seeing("llava")
    see, tok = dataclasses.replace(sight.read(path), around=("<image>", "( <image> )")), text.load(path)
    template = (
        "{% macro say(m) %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ say(m) }};{% endgeneration %}"
        "{% else %}{{ say(m) }};{% endif %}{% endfor %}"
    )
    tok = dataclasses.replace(tok, templates={"default": template})
    shows = {"type": "image", "image": png(1)}
    chat = [
        said("user", "a ", shows, "b"),
        said("assistant", "see ", shows, " c"),
        said("user", "d"),
        said("assistant", "e"),
    ]
    settings = data.Settings(batch=1, length=128, sight=see, learn="assistant")
    (batch,) = data.dataset([{"messages": chat}], settings, tok)
    ids, run = (lambda t: text.encode(tok, t, special=False)), list(sight.prepare(see, pixels(1)).run)
    parts = [(ids("user:a ( "), 0), (run, 0), (ids(" )b;assistant:"), 0), (ids("see ( "), 1), (run, 1), (ids(" ) c;"), 1),
             (ids("user:d;assistant:"), 0), (ids("e;"), 1)]  # fmt: skip
    want = [t for part, _ in parts for t in part], [bool(m) for part, m in parts for _ in part]
    n = len(want[0])
    assert batch["tokens"][0, :n].tolist() == want[0] and batch["lengths"].tolist() == [n]
    assert batch["mask"][0, :n].tolist() == want[1]
    row = {"input_ids": [70, run[0], 71], "labels": [-100, -100, 71], "images": [png(1)]}
    with pytest.raises(ValueError, match="writes text around images, which input_ids lack"):
        data.dataset([row], settings, tok)
    (batch,) = data.dataset([row], dataclasses.replace(settings, sight=sight.read(path)), tok)
    n = len(run) + 2
    assert batch["tokens"][0, :n].tolist() == [70, *run, 71] and batch["mask"][0].sum() == 1 and batch["mask"][0, n - 1]


@pytest.mark.slow
@pytest.mark.matrix
def test_samples_of_prompts_with_images_are_learnt_as_they_were_drawn(seeing, tmp_path):
    """What the engine says of its tokens, training says of them too, 1e-4, and transformers; also over two turns."""
    path, oracle, *_ = seeing("llava")
    model, see, tok = models.load(path, dtype=jnp.float32, stacked=False), sight.read(path), text.load(path)
    found = data.tasks(data.Source(str(chats(tmp_path))), data.Settings(batch=1, length=64, sight=see), tok)
    settings = serve.Settings(rows=4, batches=(4,), budget=32, max_length=96)
    again = lambda s: rollout.Said([70, 71], done=s.info["turns"] > 1)
    engine = serve.Engine(model, settings, tokenizer=tok, sight=see, eos=[75, 78, 81, 84, 87, 90])
    ask = serve.SamplingParams(max_tokens=12, temperature=1.0)
    samples = rollout.rollout(engine, found.rows, ask, samples=2, seed=0, turn=again)
    engine.close()
    assert any(s.info["turns"] > 1 for s in samples) and len(samples) == 8
    media = partial(shown, sight=see)
    batch = rollout.collate(samples, np.ones(8), length=96, media=media)
    told = jax.jit(losses.token_logps(model.family, model.cfg))(models.load(path, dtype=jnp.float32).params, batch)
    drawn = batch["mask"]
    assert drawn.sum() > 8
    np.testing.assert_allclose(np.asarray(told)[drawn], (batch["logps"] + batch["kept"])[drawn], atol=1e-4)
    for number, row in ((1, 2), (3, 6)):
        inputs, _ = wanted(seeing, "llava", [samples[row].tokens.tolist()], list(SHOWN[number]))
        with torch.no_grad():
            logp = torch.log_softmax(oracle(**inputs).logits[0], -1).numpy()
        at = np.flatnonzero(samples[row].drawn)
        np.testing.assert_allclose(logp[at - 1, samples[row].tokens[at]], samples[row].logps[at], atol=1e-4)
    with pytest.raises(ValueError, match="samples show pictures; give media="):
        rollout.collate(samples, np.ones(8), length=96)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.matrix)])
def test_samples_that_share_rows_are_those_of_rows_of_their_own(seeing, name, tmp_path):
    """Several in a row, and those of one prompt with it once: log-probabilities 1e-4; a checkpoint keeps the batch."""
    path, *_ = seeing(name)
    see, tok, rng = sight.read(path), text.load(path), np.random.default_rng(0)
    found = data.tasks(data.Source(str(chats(tmp_path))), data.Settings(batch=1, length=64, sight=see), tok)

    def sample(task: rollout.Task, index: int) -> rollout.Sample:
        tokens = np.array([*task.prompt, *rng.integers(60, 100, 5 + index)], np.int32)
        drawn, zeros = np.arange(len(tokens)) >= len(task.prompt), np.zeros(len(tokens), np.float32)
        return rollout.Sample(task, index, tokens, drawn, zeros, zeros, zeros.astype(np.int32), finish="stop")

    samples = [sample(task, i) for task in found.rows for i in range(2)]
    model = models.load(path, dtype=jnp.float32)
    score = jax.jit(losses.token_logps(model.family, model.cfg))
    told = []
    for how in ({}, {"packed": True}, {"shared": True}):
        batch = rollout.collate(samples, np.arange(8.0), length=112, media=partial(shown, sight=see), **how)
        again = source.decode(source.encode(batch))
        jax.tree.map(np.testing.assert_array_equal, again, batch)
        logps, mask = np.asarray(score(model.params, again)), batch["mask"]
        assert len(mask) < 8 or not how
        told.append(sorted(zip(batch["advantages"][mask], batch["tokens"][mask], logps[mask], strict=True)))
    assert len(told[0]) == 4 * 11
    for other in told[1:]:
        np.testing.assert_allclose(np.array(other), np.array(told[0]), atol=1e-4)
    last = found.rows[0]._replace(prompt=found.rows[0].prompt[: 5 + len(found.rows[0].images[0].run)])
    with pytest.raises(ValueError, match="the end of a prompt is an image"):
        both = [sample(last, 0), sample(last, 1)]
        rollout.collate(both, np.ones(2), length=112, shared=True, media=partial(shown, sight=see))


@pytest.mark.parametrize(
    ("kind", "keys"), [("sdpo", {}), ("nash_md", {}), ("gkd", {"seq_kd": True, "lmbda": 0.5}), ("a2po", {})],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_prompts_with_images_are_taken_by_types_that_read_them_twice(seeing, kind, keys, tmp_path):
    """Each has its images; a teacher that does not see is an error before a model is loaded."""
    path, *_ = seeing("llava")
    keys = {"num_generations": 2, "max_completion_length": 8} | keys
    keys |= {} if kind == "gkd" else {"reward_functions": [{"name": "exact"}]}
    made = run_file(path, chats(tmp_path), tmp_path, trainer_type=kind, **keys)
    assert any(task.images for task in samples.build_tasks(made, text.load(path)).rows)
    if kind == "gkd":
        (tmp_path / "blind").mkdir()
        (tmp_path / "blind" / "config.json").write_text(
            json.dumps(json.loads((path / "config.json").read_text())["text_config"])
        )
        blind = made.set("teacher_model", {"name_or_path": str(tmp_path / "blind")})
        with pytest.raises(recipe.RecipeError, match="teacher_model: llama reads text alone, and the prompts show"):
            samples.build_tasks(blind, text.load(path))


def test_what_is_learnt_of_samples_has_their_images():
    """The columns of every type that says itself which it takes."""
    drawn, zeros = np.arange(4) > 1, np.zeros(4, np.float32)
    group = [
        rollout.Sample(rollout.Task(0, (1, 2), {}), i, np.arange(4), drawn, zeros, zeros, drawn - 1, "stop")
        for i in range(4)
    ]
    scores = rollout.Rewards(np.zeros((1, 4)), np.arange(4.0), ("a",))
    collated = lambda found, *_, **how: rollout.collate(found, np.zeros(len(found)), length=8) | {
        "media": np.arange(len(found)), "rotary": np.arange(len(found))
    }  # fmt: skip
    for kind in ("a2po", "online_dpo", "xpo"):
        how = methods.METHODS[kind]
        found = how.samples.batch(
            how.keys(num_generations=2, **{"num_value_samples": 2} if kind == "a2po" else {}), group, scores, collated
        )
        assert {"media", "rotary"} <= set(found), kind


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_grpo_and_dpo_learn_from_images(seeing, lora, tmp_path):
    """Run files to their end: the metrics are finite, and DPO with a reference computed before is DPO with one beside."""
    path, *_ = seeing("llava")
    (tmp_path / "near.py").write_text(
        "def brief(completions, **_):\n    return [float(len(c) % 5) for c in completions]\n"
    )
    how = dict(reward_functions=[{"path": f"{tmp_path / 'near.py'}:brief"}], num_generations=2, max_completion_length=8,
               total_batch_size=4, num_train_epochs=1, max_training_steps=2, lora=lora)  # fmt: skip
    made = run_file(path, chats(tmp_path), tmp_path / "grpo", trainer_type="grpo", **how)
    recipe.train(made)
    ways = {"ahead": {"rollout_ahead": 1}, "shared": {"samples_per_row": 2}, "packed": {"pack_samples": True}}
    for name, more in ways.items():
        recipe.train(run_file(path, chats(tmp_path), tmp_path / name, trainer_type="grpo", **how, **more))
    first = {n: curve(tmp_path / n)[0] for n in ("grpo", *ways)}
    assert all(np.isfinite(row["loss"]) for n in first for row in curve(tmp_path / n))
    for name in ways:  # the first samples are the same
        np.testing.assert_allclose(first[name]["grad_norm"], first["grpo"]["grad_norm"], rtol=1e-3)
    how = dict(trainer_type="dpo", lora=lora, max_training_steps=2)
    rows = pairs(tmp_path)
    recipe.train(run_file(path, rows, tmp_path / "a", **how))
    recipe.train(run_file(path, rows, tmp_path / "b", precompute_ref_log_probs=True, **how))
    a, b = curve(tmp_path / "a"), curve(tmp_path / "b")
    np.testing.assert_allclose([r["loss"] for r in a], [r["loss"] for r in b], rtol=1e-4)
    np.testing.assert_allclose(a[0]["loss"], np.log(2), rtol=1e-5)
    assert a[1]["loss"] < 0.69


costly = lambda *of: pytest.param(*of, marks=pytest.mark.matrix)
UNSEEN = r"post_layernorm|encoder\.layers\.2"  # behind the state of LLaVA's tower that is read
PARTS = [
    (["multi_modal_projector"], {"r": 2}, "adamw"),
    costly(["multi_modal_projector"], None, "adamw"),
    costly(r"vision_tower\..*", None, "muon"),
    costly(r"vision_tower\..*|multi_modal_projector\..*", {"r": 2}, "lion"),
    costly(["language_model"], None, "adafactor"),
    costly(["q_proj", "norm"], None, "schedule_free"),
]


@pytest.mark.slow
@pytest.mark.parametrize("trainable,lora,optimizer", PARTS)
def test_what_is_not_trainable_stays_bit_by_bit(seeing, trainable, lora, optimizer, tmp_path):
    """All other tensors are what they were, and no state of the optimizer is there for them; the wanted ones all move.

    Beside adapters, what was trained whole stands in their file, as PEFT has it (tests/params/test_lora.py asks PEFT).
    """
    path, oracle, *_ = seeing("llava")
    rows = chats(tmp_path)
    how = dict(optimizer=optimizer, weight_decay=0.1, trainable=trainable, max_training_steps=2, scheduler="constant")
    made = run_file(path, rows, tmp_path / "out", lora=lora, **how)
    training = recipe.build_step(made, recipe.build_model(made), 2)
    spec = dict(params.named_leaves(models.load(path).family.spec(models.load(path).cfg)))
    wanted = [trainable] if isinstance(trainable, str) else [rf"(.*\.)?{re.escape(t)}\..*" for t in trainable]
    named = lambda leaf: any(re.fullmatch(w, n) for w in wanted for n in params.hf_names(spec[leaf]))
    learnt = {leaf.removesuffix(".a").removesuffix(".b") for leaf, _ in params.named_leaves(training.state.params)}
    assert {leaf for leaf in spec if named(leaf)} == learnt & {leaf for leaf in spec if named(leaf)}
    assert lora or all(map(named, learnt))
    sizes = sum(x.size for x in jax.tree.leaves(training.state.params))
    assert sum(x.size for x in jax.tree.leaves(training.state.opt_state)) <= 2 * sizes + 100
    found = recipe.train(made)
    before = load_file(path / "model.safetensors")
    if lora is None:
        after = load_file(found.directory / "model.safetensors")
        moved = {n for n in before if before[n].tobytes() != after[n].tobytes()}
        names = {n for leaf in spec if named(leaf) for n in params.hf_names(spec[leaf])}
        assert moved <= names and {n for n in names if not re.search(UNSEEN, n)} <= moved
        return
    held = load_file(found.directory / "adapter_model.safetensors")
    whole = {n for n in held if "lora_" not in n}
    assert whole == {f"base_model.model.model.{n}" for leaf in spec if named(leaf) for n in params.hf_names(spec[leaf])}
    still = {n for n in whole if held[n].tobytes() == before[n.removeprefix("base_model.model.model.")].tobytes()}
    assert all(re.search(UNSEEN, n) for n in still)
    said = json.loads((found.directory / "adapter_config.json").read_text())["modules_to_save"]
    assert said == ["model.multi_modal_projector"] + ["model.vision_tower"] * (trainable == PARTS[3].values[0])
    model = models.load(path, dtype=jnp.float32)
    again = params.load_peft(model.family.spec(model.cfg), model.params, found.directory)
    jax.tree.map(np.testing.assert_array_equal, params.lora.merge(again), params.lora.merge(found.model.params))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_dpo_and_grpo_with_frozen_weights(seeing, lora, tmp_path):
    """The reference is the model as it began: log 2 first, and as if it were computed before; samples are learnt twice."""
    path, *_ = seeing("llava")
    rows, part = pairs(tmp_path), ["multi_modal_projector"]
    how = dict(trainer_type="dpo", lora=lora, max_training_steps=2, trainable=part)
    recipe.train(run_file(path, rows, tmp_path / "a", **how))
    recipe.train(run_file(path, rows, tmp_path / "b", precompute_ref_log_probs=True, **how))
    a, b = curve(tmp_path / "a"), curve(tmp_path / "b")
    np.testing.assert_allclose([r["loss"] for r in a], [r["loss"] for r in b], rtol=1e-4)
    np.testing.assert_allclose(a[0]["loss"], np.log(2), rtol=1e-5)
    assert a[1]["loss"] < 0.69
    if lora is not None:
        return
    (tmp_path / "near.py").write_text("def brief(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    how = dict(reward_functions=[{"path": f"{tmp_path / 'near.py'}:brief"}], num_generations=2, max_completion_length=8,
               num_iterations=2, num_train_epochs=1, max_training_steps=2, trainable=part, beta=0.1)  # fmt: skip
    made = run_file(path, chats(tmp_path), tmp_path / "grpo", trainer_type="grpo", **how)
    found = recipe.train(made)
    assert all(np.isfinite(row["loss"]) for row in curve(tmp_path / "grpo"))
    before, after = load_file(path / "model.safetensors"), load_file(found.directory / "model.safetensors")
    assert {n for n in before if before[n].tobytes() != after[n].tobytes()} == {n for n in before if part[0] in n}


UNTRAINED = [
    ({"trainable": ["projector"]}, "'projector' is no part of a module's name; known are class_embedding"),
    ({"trainable": "projector"}, "no module matches the pattern 'projector'"),
    ({"trainable": r".*layers\.0\..*"}, "matches some layers of .* and not all"),
    ({"trainable": ["language_model"], "lora": {}}, "would have adapters; name others in lora.target_modules"),
    ({"trainable": ["multi_modal_projector"], "router_bias_update_speed": 0.1}, "routers are frozen"),
    ({"trainable": ["multi_modal_projector"], "trainer_type": "dpo", "sync_ref_model": True}, "sync_ref_model: moves"),
    ({"trainable": ["multi_modal_projector"], "trainer_type": "grpo", "lora": {}, "num_generations": 2},
     "the sampler is given the adapter alone"),
]  # fmt: skip


@pytest.mark.parametrize("keys,reason", UNTRAINED)
def test_what_cannot_be_trained_so_is_refused_before_anything_is_loaded(seeing, keys, reason, tmp_path):
    path, *_ = seeing("llava")
    with pytest.raises(recipe.RecipeError, match=reason):
        recipe.prepare(run_file(path, chats(tmp_path), tmp_path / "out", **keys))
