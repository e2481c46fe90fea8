"""Run files whose rows show videos and play sounds: losses are those of transformers' model on the same files.

A video here has each frame twice, so that transformers' processor of images makes the patches of its frames: its processor
of videos needs torchvision, tests/media/test_video.py asks it where that is there.
"""

import base64
import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers import models as kinds

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
pytest.importorskip("PIL.Image", reason="extra `media`")
av = pytest.importorskip("av", reason="extra `video`")

from fdel import models, recipe, serve, text  # noqa: E402
from fdel.media import senses, sight, video  # noqa: E402
from fdel.train import data, losses  # noqa: E402
from fdel.train.rollout import sight as shown  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.models.test_omni import EXTRACTOR  # noqa: E402
from tests.test_recipe_images import batches, curve, pixels, png, run_file, said  # noqa: E402

IMAGE, VIDEO, AUDIO = 120, 121, 122
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type in ['image', 'video'] %}"
    "<see><{{ p.type }}><seen>{% elif p.type == 'audio' %}<hear><audio><heard>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NAMES = {
    IMAGE: "<image>",
    VIDEO: "<video>",
    AUDIO: "<audio>",
    118: "<see>",
    119: "<seen>",
    116: "<hear>",
    117: "<heard>",
}
SECONDS = (0.63, 1.3)
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096}}  # fmt: skip


def clip(seed: int = 0, played: int | None = None) -> bytes:
    """An AVI file of two pictures, each twice, two frames a second, that plays the samples of this number.

    Wider than it is long in time, where transformers 5.23 goes on too early behind it.
    """
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as c:
        stream = c.add_stream("mjpeg", rate=2)
        stream.width, stream.height, stream.pix_fmt = 40, 16, "yuvj444p"
        stream.codec_context.qmin = stream.codec_context.qmax = 2  # alike frames become alike
        if played is not None:
            track = c.add_stream("pcm_s16le", rate=16000, layout="mono")
            sound = av.AudioFrame.from_ndarray((samples(played)[None] * 2**15).astype("<i2"), "s16", "mono")
            sound.sample_rate, sound.pts = 16000, 0
            c.mux([*track.encode(sound), *track.encode()])
        for x in np.repeat(np.random.default_rng(seed).integers(0, 256, (2, 16, 40, 3), np.uint8), 2, 0):
            c.mux(stream.encode(av.VideoFrame.from_ndarray(x, "rgb24")))
        c.mux(stream.encode())
    return out.getvalue()


def samples(i: int) -> np.ndarray:
    """A sound in whole sixteenths of a thousand, which 16 bits hold exactly."""
    x = np.random.default_rng(i).normal(size=int(SECONDS[i] * 16000)) / 5
    return (np.clip(x, -1, 1) * 32767).astype("<i2").astype(np.float32) / 2**15


def wav(i: int) -> bytes:
    out = io.BytesIO()
    import wave

    with wave.open(out, "wb") as f:
        f.setparams((1, 2, 16000, 0, "NONE", ""))
        f.writeframes((samples(i) * 2**15).astype("<i2").tobytes())
    return out.getvalue()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Make a tiny checkpoint with its processor and a tokenizer that knows its tokens, and transformers' model."""
    made, patch = {}, pytest.MonkeyPatch()
    small = video.HEARD._replace(bounds=None)  # the omni processor's own bounds make thousands of tokens of a frame
    patch.setattr(sight, "VIDEOS", sight.VIDEOS | {"qwen3_omni_moe_thinker": small})

    def make(name: str):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            oracle = tiny.checkpoint(name, path)
            spare = sorted(set(range(3, 128)) - set(NAMES))
            vocab = {chr(c): i for c, i in zip(range(32, 127), spare, strict=False)}
            vocab |= {"<pad>": 0, "<s>": 1, "</s>": 2} | {n: i for i, n in NAMES.items()}
            tok = Tokenizer(kinds.WordLevel(vocab, unk_token="<pad>"))
            tok.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
            tok.add_special_tokens(["<pad>", "<s>", "</s>", *NAMES.values()])
            special = {"eos_token": "</s>", "pad_token": "<pad>"}
            text.save(text.Tokenizer(tok, special, (2,), {"default": TEMPLATE}, {}, tok.to_str()), path)
            more = EXTRACTOR if "omni" in name else {}
            (path / "preprocessor_config.json").write_text(json.dumps(FILE | more))
            (path / "video_preprocessor_config.json").write_text(json.dumps(FILE | more))
            made[name] = path, oracle
        return made[name]

    yield make
    patch.undo()


def frames(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as file:
        return np.stack([f.to_ndarray(format="rgb24") for f in file.decode(video=0)])


def wanted(name: str, tokens: list[list[int]], shown: list[dict]) -> tuple[dict, torch.Tensor]:
    """What transformers' model takes of rows of tokens with runs, and its labels; media of each row by kind."""
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    longest, pixel = max(map(len, tokens)), dict(patch_size=4, merge_size=2, size=FILE["size"])
    mean = (
        dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if "qwen3_vl" in name else {}
    )  # of videos, where the file is silent
    ids = torch.tensor([t + [0] * (longest - len(t)) for t in tokens])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in tokens])
    moving = IMAGE if "glm" in name else VIDEO  # of GLM's, entries of videos are those of images
    every = {k: [x for row in shown for x in row.get(k, ())] for k in ("image", "video", "audio")}
    inputs: dict = {}
    if every["image"]:
        inputs |= Qwen2VLImageProcessorPil(**pixel)([pixels(i) for i in every["image"]], return_tensors="pt")
    if every["video"]:
        each = [frames(clip(i)) for i in every["video"]]
        assert all((x[0::2] == x[1::2]).all() and len(x) == 4 and (x[0] != x[2]).any() for x in each)
        found = Qwen2VLImageProcessorPil(**pixel, **mean)([x for v in each for x in v[::2]], return_tensors="pt")
        grids = found["image_grid_thw"][::2].clone()
        grids[:, 0] = 2
        inputs |= {"pixel_values_videos": found["pixel_values"], "video_grid_thw": grids}
    if every["audio"]:
        extract = WhisperFeatureExtractor(feature_size=16)
        sounds = [samples(i) for i in every["audio"]]
        found = extract(
            sounds, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
        )
        inputs |= {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
    if "omni" in name:
        inputs["video_second_per_grid"] = torch.tensor([1.0] * len(every["video"]))
    else:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() * (moving == VIDEO) + 2 * (ids == moving).int()
    if name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0] * len(every["video"]))
    labels = ids.masked_fill((mask == 0) | torch.isin(ids, torch.tensor([IMAGE, VIDEO, AUDIO])), -100)
    return {"input_ids": ids, "attention_mask": mask, **inputs}, labels


def chats(folder, heard: bool = True):
    """Rows as people write them: paths, data URLs, bytes, columns, all kinds in one row, none."""
    (folder / "files").mkdir(exist_ok=True)
    for name, content in {"0.png": png(1), "0.avi": clip(0), "0.wav": wav(0)}.items():
        (folder / "files" / name).write_bytes(content)
    b64 = lambda x: base64.b64encode(x).decode()
    part = lambda kind, x: {"type": kind, kind: x}
    film = part("video", "files/0.avi")
    rows = [
        ({"messages": [said("user", film, "what is it ?"), said("assistant", "a cat")]}, {"video": [0]}),
        ({"messages": [said("user", {"type": "image"}, " and ", {"type": "video"}, "?"), said("assistant", "the cat sat")],
          "videos": [{"bytes": b64(clip(1)), "path": None}], "images": ["files/0.png"]}, {"image": [1], "video": [1]}),
        ({"messages": [{"role": "user", "content": "what is good"}, {"role": "assistant", "content": "a mat"}]}, {}),
    ]  # fmt: skip
    if heard:
        url = {"url": f"data:audio/wav;base64,{b64(wav(1))}"}
        rows += [
            ({"messages": [said("user", part("audio", "files/0.wav"), "?", {"type": "audio_url", "audio_url": url}),
                           said("assistant", "four")]}, {"audio": [0, 1]}),
            ({"prompt": [said("user", "say", {"type": "audio"}, film, {"type": "image"})],
              "completion": [said("assistant", "so so")], "image": "files/0.png",
              "audio": {"array": samples(1).tolist(), "sampling_rate": 16000}}, {"image": [1], "video": [0], "audio": [1]}),
        ]  # fmt: skip
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r, _ in rows))
    return SimpleNamespace(file=file, shown=[s for _, s in rows])


def kind_counts(tokens) -> tuple[int, ...]:
    return tuple(int((np.array(tokens) == t).sum()) for t in (IMAGE, VIDEO, AUDIO))


costly = lambda *of: pytest.param(*of, marks=pytest.mark.matrix)


RUNS = [("qwen3_omni_moe", True), ("qwen3_vl", False), costly("qwen3_omni_moe", False), costly("qwen3_vl", True),
        costly("qwen2_5_vl", False), costly("qwen2_vl", False), costly("glm4v", False), costly("glm46v", True)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name,packed", RUNS)
def test_rows_with_videos_and_sounds_are_what_transformers_learns(seeing, name, packed, tmp_path):
    """In all forms, one row each or packed: the loss 1e-5, its weight exactly; of a completion its own tokens alone."""
    path, oracle = seeing(name)
    rows = chats(tmp_path, heard="omni" in name)
    if "glm" in name:  # transformers has no batch of both images and videos: their entries are one token
        kept = [(line, s) for line, s in zip(rows.file.open(), rows.shown, strict=True) if "image" not in s]
        rows.file.write_text("".join(line for line, _ in kept))
        rows.shown = [s for _, s in kept]
    n = len(rows.shown)
    plain = run_file(path, rows.file, tmp_path / "out", num_train_epochs=1, total_batch_size=n, max_length=160)
    (batch,) = batches(plain.set("mixture.shuffle_buffer_size", 0))
    found = [t[:k].tolist() for t, k in zip(batch["tokens"], batch["lengths"], strict=True)]
    inputs, labels = wanted(name, found, rows.shown)
    if "mask" in batch:
        labels[~torch.tensor(batch["mask"][:, : labels.shape[1]])] = -100
    with torch.no_grad():
        logits = oracle(**inputs).logits
    cross_entropy = torch.nn.functional.cross_entropy
    want = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").item()
    every = batches(plain.set("trainer.packing", True).set("trainer.total_batch_size", 1)) if packed else [batch]
    assert not packed or (len(every) < n and max(int(b["packed"].segment_ids.max()) for b in every) > 0)
    model = models.load(path, dtype=jnp.float32)
    loss = jax.jit(losses.sft(model.family, model.cfg))
    each = [loss(model.params, b) for b in every]
    assert sum(float(s["weight"]) for _, s in each) == int((labels[:, 1:] >= 0).sum())
    np.testing.assert_allclose(sum(float(t) for t, _ in each), want, rtol=1e-5)


def films(folder) -> SimpleNamespace:
    """Rows whose videos play something, beside other sounds, images, and none; `said`: as the template writes them."""
    (folder / "files").mkdir(exist_ok=True)
    for i in range(2):
        (folder / "files" / f"{i}.avi").write_bytes(clip(i, played=i))
    b64 = lambda x: base64.b64encode(x).decode()
    film = lambda i: {"type": "video", "video": f"files/{i}.avi"}
    noise = {"type": "audio", "audio": {"bytes": b64(wav(1))}}
    image = {"type": "image", "image": {"bytes": b64(png(1))}}
    last = said("assistant", "a cat")
    see, hear = "<see><{}><seen>".format, "<hear><audio><heard>"
    rows = [
        ([said("user", film(0), "what ?"), last], {"video": [0], "audio": [0]}, see("video") + "what ?"),
        ([said("user", noise, " and ", film(1), image), last], {"audio": [1, 1], "video": [1], "image": [1]},
         f"{hear} and {see('video')}{see('image')}"),
        ([said("user", film(1), film(0), noise), last], {"video": [1, 0], "audio": [1, 0, 1]}, see("video") * 2 + hear),
        ([said("user", "2 + 2 ?"), last], {}, "2 + 2 ?"),
    ]  # fmt: skip
    file = folder / "films.jsonl"
    file.write_text("".join(json.dumps({"messages": m}) + "\n" for m, _, _ in rows))
    return SimpleNamespace(
        file=file, shown=[s for _, s, _ in rows], said=[f"user:{t};assistant:a cat;" for *_, t in rows]
    )


def of_processor(tok, said: str, shown: dict) -> list[int]:
    """The tokens that transformers' processor makes of a chat whose videos are heard."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe as processing

    counts = [int(processing._get_feat_extract_output_lengths(len(samples(i)) // 160)) for i in shown.get("audio", ())]
    pixel = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=FILE["size"])
    grid = lambda x: pixel([x], return_tensors="np")["image_grid_thw"][0]
    words = SimpleNamespace(audio_bos_token="<hear>", audio_eos_token="<heard>", video_token="<video>",
                            audio_token="<audio>", video_processor=SimpleNamespace(merge_size=2))  # fmt: skip
    kinds = {"image": iter(shown.get("image", ())), "video": iter(shown.get("video", ())), "audio": iter(counts)}

    def run(found) -> str:
        kind = found[1]
        one = next(kinds[kind])
        if kind != "video":
            return f"<{kind}>" * (one if kind == "audio" else int(grid(pixels(one)).prod()) // 4)
        seen = {"video_grid_thw": [grid(frames(clip(one))[0]) * [2, 1, 1]], "video_second_per_grid": [1.0]}
        return processing.Qwen3OmniMoeProcessor.replace_video_with_audio_token(
            words, seen, 0, {"num_audio_tokens": [next(kinds["audio"])]}, 0, position_id_per_seconds=13
        )

    return text.encode(tok, re.sub("<(image|video|audio)>", run, said), special=False)


HEARD = {"use_audio_in_video": True}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, costly(False)])
def test_videos_that_are_heard_are_what_transformers_learns(seeing, packed, tmp_path):
    """Tokens of its processor, its loss 1e-5 and weight; a key of the run file asks for it, as its processor's does."""
    path, oracle = seeing("qwen3_omni_moe")
    rows, tok = films(tmp_path), text.load(path)
    plain = run_file(path, rows.file, tmp_path / "out", num_train_epochs=1, total_batch_size=4, max_length=192)
    plain = plain.set("mixture.shuffle_buffer_size", 0).set("mixture.use_audio_in_video", True)
    (batch,) = batches(plain)
    found = [t[:k].tolist() for t, k in zip(batch["tokens"], batch["lengths"], strict=True)]
    assert found == [of_processor(tok, *x) for x in zip(rows.said, rows.shown, strict=True)]
    inputs, labels = wanted("qwen3_omni_moe", found, rows.shown)
    positions = oracle.thinker.model.get_rope_index(
        inputs["input_ids"], inputs["image_grid_thw"], inputs["video_grid_thw"], inputs["attention_mask"], True,
        inputs["feature_attention_mask"].sum(1), inputs["video_second_per_grid"],
    )[0].permute(1, 2, 0).numpy()  # fmt: skip
    for mine, theirs, n in zip(batch["rotary"], positions, batch["lengths"], strict=True):
        np.testing.assert_array_equal(mine[:n], theirs[:n])
    with torch.no_grad():
        logits = oracle(**inputs, **HEARD).logits
    cross_entropy = torch.nn.functional.cross_entropy
    want = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum").item()
    every = batches(plain.set("trainer.packing", True).set("trainer.total_batch_size", 1)) if packed else [batch]
    assert not packed or (len(every) < 4 and max(int(b["packed"].segment_ids.max()) for b in every) > 0)
    model = models.load(path, dtype=jnp.float32)
    loss = jax.jit(losses.sft(model.family, model.cfg))
    each = [loss(model.params, b) for b in every]
    assert sum(float(s["weight"]) for _, s in each) == int((labels[:, 1:] >= 0).sum())
    np.testing.assert_allclose(sum(float(t) for t, _ in each), want, rtol=1e-5)


def test_what_a_video_plays_is_heard_where_a_run_file_asks_for_it(seeing, tmp_path):
    """A silent one is seen alone, and all are without the key; in pairs and prompts as in texts; refused by who is deaf."""
    path, _ = seeing("qwen3_omni_moe")
    rows, see = films(tmp_path), replace(sight.read(path), heard=True)
    tok, settings = text.load(path), data.Settings(batch=1, length=192, sight=see, shuffle=False)
    silent, film = ({"prompt": [said("user", {"type": "video", "video": x}, "?")]} for x in (clip(0), clip(0, 0)))
    answers = {"completion": [said("assistant", "a")]}
    for row, counts in ((silent, (0, 20, 0)), (film, (0, 20, 8))):
        (batch,) = data.dataset([row | answers], settings, tok)
        assert kind_counts(batch["tokens"][0]) == counts
        assert hasattr(batch["media"].inputs, "values") == (row is silent)
    (batch,) = data.dataset([film | answers], replace(settings, sight=sight.read(path)), tok)
    assert kind_counts(batch["tokens"][0]) == (0, 20, 0)
    sides = film | {"chosen": [said("assistant", "a cat")], "rejected": [said("assistant", "a mat")]}
    (batch,) = data.dataset([sides], replace(settings, kind="pairs"), tok)
    assert [kind_counts(x) for x in batch["tokens"][0]] == [(0, 20, 8)] * 2
    pictures, sounds = batch["media"].inputs
    assert pictures.values.shape[:3] == (1, 2, 2) and sounds.lengths.tolist() == [[[[63]], [[63]]]]
    np.testing.assert_array_equal(batch["media"].index[0, 0], batch["media"].index[0, 1])

    task = data.tasks([film], settings, tok).rows[0]
    spots = text.encode(tok, "user:<see><video><seen>?;assistant:", special=False)
    item = senses.prepare(see, "films", clip(0, 0), senses.TRUSTED, lambda said: [])
    tokens, want = serve.prompt_media(see, spots, [item])
    got = shown.prompt_media(see, shown.begun(see, task))
    assert list(task.prompt) == tokens and [i.digest for i in got.items] == [i.digest for i in want.items]
    assert len(got.items) == 3 and (got.index == want.index).all() and (got.rotary == want.rotary).all()
    for name in ("qwen3_vl", "qwen2_vl"):
        deaf = run_file(seeing(name)[0], rows.file, tmp_path / "b").set("mixture.use_audio_in_video", True)
        with pytest.raises(
            recipe.RecipeError, match="mixture.use_audio_in_video: this model takes no videos with sounds"
        ):
            batches(deaf)


def asked(kind: str, value, name: str = "qwen3_omni_moe", **columns):
    return name, {"messages": [said("user", {"type": kind, kind: value}, "?"), said("assistant", "a")], **columns}


ASKED = [
    (asked("audio", "files/0.wav"), None),
    (asked("video", "../files/0.avi"), "outside of"),
    (asked("audio", "https://example.org/a.wav"), "sound 'https.*nothing is fetched; put the sound beside"),
    (asked("video", "files/0.wav"), "files/0.wav: found b'RIFF.*no video in a known container"),
    (asked("audio", "files/0.avi"), "files/0.avi: .*not a sound of a known format"),
    (asked("audio", {"bytes": base64.b64encode(wav(0)[:5000]).decode()}), "a sound of 5000 bytes: the WAV file is cut off"),
    (asked("video", "files/0.avi", videos=[b"x".hex()]), "1 videos in the column videos, .* the messages have 1 places"),
    (asked("audio", None), "a part of type audio names none, and the column audios has no more"),
    (asked("audio", [0.5, 0.5]), "expected a sound as bytes, a data URL, a path, or array and sampling_rate, found list"),
    (asked("audio", {"array": [[[0.5]]]}), "found a sound float64.*expected floats"),
    (asked("audio", "files/0.wav", "qwen3_vl"), "the row shows sounds, but this model takes no sounds"),
]  # fmt: skip


@pytest.mark.parametrize("case,reason", ASKED)
def test_media_that_cannot_be_used_name_file_and_row(seeing, case, reason, tmp_path):
    name, row = case
    path, _ = seeing(name)
    rows = chats(tmp_path, heard=False).file
    rows.write_text(rows.read_text() + json.dumps(row) + "\n")
    report = data.dataset(
        data.Source(str(rows)), data.Settings(batch=1, length=160, sight=sight.read(path)), text.load(path)
    ).report
    assert report.kept == 3 + (reason is None)
    if reason is not None:
        ((complaint, (_, places)),) = report.notes.items()
        assert places == (f"{rows}:4",) and re.search(reason, complaint), complaint


def test_sounds_alone_make_no_images_and_columns_of_texts_take_the_models_tokens(seeing, tmp_path):
    """Arrays of rows in memory; the batch of a data set without images has sounds alone, one of a text beside none."""
    path, _ = seeing("qwen3_omni_moe")
    tok, settings = text.load(path), data.Settings(batch=2, length=96, sight=sight.read(path), shuffle=False)
    rows = [{"text": "a <hear><audio><heard> b", "audio": samples(0)}, {"text": "a cat"}]
    (batch,) = data.dataset(rows, settings, tok)
    heard = batch["media"].inputs
    assert (
        heard.features.shape == (2, 1, 1, 16, 100)
        and heard.lengths.tolist() == [[[63]], [[0]]]
        and "rotary" not in batch
    )
    assert (batch["media"].index >= 0).sum(1).tolist() == [8, 0]
    mixed = [{"text": "<audio> and <see><video><seen>", "audios": [wav(0)], "videos": [clip(0)]}, rows[1]]
    (batch,) = data.dataset(mixed, settings, tok)
    assert kind_counts(batch["tokens"][0]) == (0, 20, 8) and len(batch["media"].inputs) == 2
    first = [{"messages": [said("user", "what ?"), said("assistant", "a")], "audio": wav(0)}, rows[1]]
    (batch,) = data.dataset(first, settings, tok)
    assert batch["tokens"][0, 5] == 116 and kind_counts(batch["tokens"][0]) == (0, 0, 8)


def test_an_engine_is_given_what_a_chat_would_give_it(seeing, tmp_path):
    """Of a task with an image, a video and a sound: the same media, tokens and turns, as the server makes of a prompt."""
    path, _ = seeing("qwen3_omni_moe")
    tok, see, rows = text.load(path), sight.read(path), chats(tmp_path)
    settings = data.Settings(batch=1, length=96, sight=see)
    task = data.tasks(data.Source(str(rows.file)), settings, tok).rows[4]
    spots = text.encode(
        tok, "user:say<hear><audio><heard><see><video><seen><see><image><seen>;assistant:", special=False
    )
    most, spell = senses.TRUSTED, lambda said: text.encode(tok, said, special=False)
    files = {"sounds": wav(1), "videos": clip(0), "images": png(1)}
    items = [senses.prepare(see, kind, content, most, spell) for kind, content in files.items()]
    tokens, want = serve.prompt_media(see, spots, items)
    got = shown.prompt_media(see, shown.begun(see, task))
    assert list(task.prompt) == tokens and [i.digest for i in got.items] == [i.digest for i in want.items]
    assert len(got.items) == 4 and (got.index == want.index).all() and (got.rotary == want.rotary).all()


@pytest.mark.slow
@pytest.mark.matrix
def test_runs_learn_from_videos_and_sounds_and_a_stream_shows_them(seeing, tmp_path):
    """A run file to its end, with adapters; a cache gives what the rows gave; a stream the same batches' contents."""
    path, _ = seeing("qwen3_omni_moe")
    rows = chats(tmp_path).file
    plain = run_file(
        path, rows, tmp_path / "a", total_batch_size=5, max_length=160, num_train_epochs=1, max_training_steps=1
    )
    (one,) = batches(plain)
    (again,) = batches(plain.set("mixture.save", {"path": str(tmp_path / "cache")}))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    (other,) = batches(plain.set("mixture.pack_on_the_fly", True).set("mixture.shuffle_buffer_size", 8))
    size = lambda x: float(np.abs(x).sum())
    arrays = lambda b: (b["tokens"], b["lengths"], b["media"].inputs[0].values, b["media"].inputs[1].features)
    total = lambda b: sorted((t[:n].tolist(), size(v), size(f)) for t, n, v, f in zip(*arrays(b), strict=True))
    assert total(one) == total(other)
    recipe.train(
        plain.set("trainer.lora", {"r": 2}).set("trainer.max_training_steps", 3).set("trainer.num_train_epochs", 3)
    )
    curves = curve(tmp_path / "a")
    assert len(curves) == 3 and all(np.isfinite(row["loss"]) for row in curves)


REWARD = """def told(completion_ids, answer, **_):
    return [sum(i % 2 == a for i in c) / max(1, len(c)) for c, a in zip(completion_ids, answer)]
"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_vl", "video"), ("qwen3_omni_moe", "audio"), ("qwen3_omni_moe", "film")]
)
def test_grpo_learns_what_only_a_video_or_a_sound_can_tell(seeing, name, kind, tmp_path):
    """Two prompts of the same text, one wants even tokens and one odd ones: without looking the reward is a half.

    Of films the frames are the same too: only what they play tells.
    """
    path, _ = seeing(name)
    chats(tmp_path)
    content = {"video": clip, "audio": wav, "film": lambda i: clip(0, played=i)}[kind]
    heard, kind = kind == "film", kind.replace("film", "video")
    ask = lambda i: {"type": kind, kind: {"bytes": base64.b64encode(content(i)).decode()}}
    tasks = [{"prompt": [said("user", ask(i), "?")], "answer": i} for i in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    (tmp_path / "told.py").write_text(REWARD)
    how = dict(reward_functions=[{"path": f"{tmp_path / 'told.py'}:told"}], num_generations=8, max_completion_length=4,
               total_batch_size=16, num_train_epochs=45, max_training_steps=45, learning_rate=3e-3)  # fmt: skip
    made = run_file(path, tmp_path / "tasks.jsonl", tmp_path / "out", trainer_type="grpo", **how)
    recipe.train(made.set("mixture.use_audio_in_video", heard))
    rows = curve(tmp_path / "out")
    assert all(np.isfinite(r["loss"]) for r in rows)
    assert np.mean([r["reward"] for r in rows[:5]]) < 0.6 and np.mean([r["reward"] for r in rows[-5:]]) > 0.8
