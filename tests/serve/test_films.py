"""Chats with videos and sounds through the whole server, of a tiny Qwen3-Omni: what its forward says of the same media.

tests/models/test_omni.py compares that forward with transformers, tests/media what the host makes of files.
"""

import base64
import io
import json
import re
import struct
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, serve, text
from fdel.media import hearing, senses, sight, sound, video
from fdel.media.senses import Most
from fdel.serve.engine import weights
from fdel.serve.engine.engine import Settings
from fdel.serve.server import http as server_http
from fdel.serve.server import launch, metrics
from fdel.serve.server.call import Server
from fdel.serve.server.openai import APIError, media, parse_chat
from fdel.serve.server.openai.tables import Limits
from fdel.serve.server.tokenizing import PromptEncoder
from tests.serve import small, wire
from tests.serve.test_images import children, file, rgb, spent, url

openai = pytest.importorskip("openai")
av = pytest.importorskip("av", reason="videos need the extra `video`")
pytest.importorskip("aiohttp", reason="needs the serve extra")
pytest.importorskip("PIL.Image", reason="needs the media extra")

SPECIALS = ["<|im_start|>", "<|im_end|>", "<image>", "<video>", "<audio>", "<see>", "<seen>", "<hear>", "<heard>"]
AROUND = {"image": "<see><image><seen>", "video": "<see><video><seen>", "audio": "<hear><audio><heard>"}
CASES = "".join(f"{{% elif p.type == '{kind}' %}}{shown}" for kind, shown in AROUND.items())
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    + CASES
    + "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 600


def mp4(frames: np.ndarray, container: str = "mp4", codec: str = "mpeg4", rate: int = 2, played=None) -> bytes:
    """A video; `played` is what it plays, int16[samples] at 16 kHz."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as c:
        stream = c.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if played is not None:
            track = c.add_stream("pcm_s16le", rate=16000, layout="mono")
            sound = av.AudioFrame.from_ndarray(played[None], "s16", "mono")
            sound.sample_rate, sound.pts = 16000, 0
            for packet in [*track.encode(sound), *track.encode()]:
                c.mux(packet)
        for x in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(x, "rgb24")):
                c.mux(packet)
        for packet in stream.encode():
            c.mux(packet)
    return out.getvalue()


def clip(seed: int, count: int = 6, height: int = 48, width: int = 32) -> np.ndarray:
    """Frames whose colours move."""
    at = np.add.outer(np.add.outer(20 * np.arange(count), 3 * np.arange(height)), 5 * np.arange(width))
    return np.stack([at * (seed + c + 1) % 256 for c in range(3)], -1).astype(np.uint8)


def wav(seconds: float, seed: int = 0, claimed: int | None = None) -> bytes:
    x = np.random.default_rng(seed).normal(size=int(seconds * 16000)) / 5
    data = (np.clip(x, -1, 1) * 32767).astype("<i2").tobytes()
    size = len(data) if claimed is None else claimed
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16) + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", min(2**32 - 1, 36 + size)) + head + data


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def seen(data: bytes, kind: str = "video/mp4") -> dict:
    return {"type": "video_url", "video_url": {"url": f"data:{kind};base64,{b64(data)}"}}


def heard(data: bytes) -> dict:
    return {"type": "input_audio", "input_audio": {"data": b64(data), "format": "wav"}}


def words(said: str) -> dict:
    return {"type": "text", "text": said}


def image(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": url(data)}}


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    """A random thinker, and a server of its files with OpenAI's client of it."""
    pytest.importorskip("torch", reason="transformers saves it")
    from tests.models.test_omni import EXTRACTOR, FILE
    from tests.models.tiny import qwenomni

    directory = tmp_path_factory.mktemp("omni")
    tok = text.train_bpe(wire.WORDS, small.VOCAB - 20, SPECIALS)
    ids = {s.strip("<>"): tok.backend.token_to_id(s) for s in SPECIALS}
    values = json.loads(json.dumps(qwenomni.VALUES))
    named = dict(image="image_token_id", video="video_token_id", audio="audio_token_id", see="vision_start_token_id",
                 seen="vision_end_token_id", hear="audio_start_token_id", heard="audio_end_token_id")  # fmt: skip
    values["thinker_config"] |= {key: ids[name] for name, key in named.items()}
    values["thinker_config"]["text_config"] |= dict(
        vocab_size=small.VOCAB, max_position_embeddings=LENGTH, eos_token_id=small.EOS
    )
    qwenomni.make(values, 0).save_pretrained(directory)
    text.save(text.Tokenizer(**{**vars(tok), "templates": {"default": TEMPLATE}, "eos_ids": (small.EOS,)}), directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(FILE | EXTRACTOR))
    see = sight.read(directory)
    see = replace(see, video=replace(see.video, frame=replace(see.video.frame, pixels=(256, 1024))))
    options = launch.ServerOptions(settings=Settings(rows=4, batches=(4,), budget=64, max_length=LENGTH), sounds=2)
    model = weights.load(directory)
    (served,) = launch.served(model, text.load(directory), "omni", options, seen=see)
    served.engine.start(wait=True)
    state = Server({"omni": served}, metrics.Metrics(metrics.serving(["omni"], server_http.PATHS)))
    with wire.listening(state) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(port=port, state=state, secrets={}, client=client, served=served, see=see, model=model)
    served.engine.close()


def wanted(omni, content: list, most: int = 8, played=None) -> tuple[str, int]:
    """What `forward` says greedily of a prompt with the same media, and how long the prompt is.

    Videos are heard where what they play is given, float32[samples].
    """
    kinds = {"image_url": "image", "video_url": "video", "input_audio": "audio", "audio_url": "audio"}
    tok, see, shown = omni.served.tokenizer, omni.see, []
    for p in content:
        if p["type"] == "image_url":
            shown.append(
                sight.prepare(see, sight.decode(base64.b64decode(p["image_url"]["url"].split(",")[1]), pixels=2**20))
            )
        elif p["type"] == "video_url":
            data = base64.b64decode(p["video_url"]["url"].split(",")[1])
            film = video.decode(data, lambda n, fps: video.sample(see.video, n, fps))
            moving = video.prepare(see.video, film, lambda said: text.encode(tok, said, special=False))
            heard_too = lambda p: hearing.together(see.sound, p, hearing.prepare(see.sound, played))
            shown.append(moving if played is None else heard_too(moving))
        elif p["type"] != "text":
            data = p["input_audio"]["data"] if p["type"] == "input_audio" else p["audio_url"]["url"].split(",")[1]
            shown.append(hearing.prepare(see.sound, sound.decode(base64.b64decode(data), most=60)))
    plain = [p if p["type"] == "text" else {"type": kinds[p["type"]]} for p in content]
    said = text.render_chat(tok, [{"role": "user", "content": plain}], add_generation_prompt=True)
    whole = sight.expand(see, text.encode(tok, sight.written(see, said), special=False), shown)
    if see.sound:
        pictures, sounds, index = senses.gather(see, [shown], np.array([whole.index]))
        held = ops.Patches(*map(jnp.asarray, pictures)), ops.Sounds(*map(jnp.asarray, sounds))
        inputs = tuple(x for x in held if jax.tree.leaves(x)[0].size)
    else:
        values, places, index = sight.gather(see, [shown], np.array([whole.index]))
        inputs = ops.Patches(jnp.asarray(values), jnp.asarray(places))
    tokens, count = list(whole.tokens), len(whole.tokens)
    turns = whole.rotary or [(i,) * 3 for i in range(count)]
    out: list[int] = []
    room = count + most
    forward = _forward(omni.model.family, omni.model.cfg)
    for _ in range(most):
        more = room - len(tokens)
        after = [(int(np.max(turns)) + 1 + i,) * 3 for i in range(room - count)]
        batch = replace(
            ops.packed(jnp.asarray([tokens + [0] * more]), jnp.asarray([len(tokens)])),
            media=ops.Media(jnp.asarray(np.pad(index, ((0, 0), (0, most)), constant_values=-1)), inputs=inputs),
            rotary=jnp.asarray([list(turns) + after]) if omni.model.family.hidden.rotary else None,
        )
        logits = forward(omni.model.params, jnp.asarray([tokens + [0] * more]), batch)
        out.append(int(logits[0, len(tokens) - 1].argmax()))
        tokens.append(out[-1])
    answer = out[: out.index(small.EOS)] if small.EOS in out else out
    return text.decode(tok, answer), count


@cache
def _forward(family, cfg):
    return jax.jit(lambda p, t, b: family.forward(p, t, cfg, b)[0])


def ask(omni, content: list, **options):
    return omni.client.chat.completions.create(
        model="omni", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=8, **options
    )


@pytest.mark.slow
def test_chats_show_and_play(omni):
    """A video, a sound, and all of it with an image; seen and heard before; another video is another answer."""
    film, other, noise = mp4(clip(1)), mp4(clip(4), "matroska"), wav(1.3)
    mixed = [
        words("the weather in "),
        heard(wav(0.5, 1)),
        seen(other, "video/webm"),
        image(file(rgb(0))),
        words("is fine"),
    ]
    answers = set()
    for content in ([words("the music "), seen(film), words("a")], [heard(noise), words("the music ")], mixed):
        want, count = wanted(omni, content)
        before = omni.served.engine.stats()["pictures encoded"]
        got = ask(omni, content)
        assert got.choices[0].message.content == want and got.usage.prompt_tokens == count
        encoded = omni.served.engine.stats()["pictures encoded"]
        assert encoded > before
        again = [words("other words before "), *content]
        assert ask(omni, again).choices[0].message.content == wanted(omni, again)[0]
        assert omni.served.engine.stats()["pictures encoded"] == encoded  # seen or heard before
        answers.add(want)
    assert len(answers) == 3
    changed = [words("the music "), seen(mp4(clip(9))), words("a")]
    assert ask(omni, changed).choices[0].message.content == wanted(omni, changed)[0]
    named = [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + b64(noise)}}, words("the music ")]
    assert ask(omni, named).choices[0].message.content == wanted(omni, [heard(noise), words("the music ")])[0]
    alone = [{"role": "user", "content": mixed}]
    assert serve.ask(omni.served, alone, temperature=0, max_tokens=8)["content"] == wanted(omni, mixed)[0]
    status, said, _ = wire.call(omni, "GET", "/v1/models", role=None)
    assert said["data"][0]["input_modalities"] == ["text", "image", "video", "audio"]


@pytest.mark.slow
def test_videos_are_heard_where_a_chat_asks_for_it(omni, monkeypatch):
    """As vLLM names it: frames and sounds in the order of their times, encoded once; a silent video is only seen."""
    played = (np.random.default_rng(5).normal(size=37_000) * 6000).clip(-32767, 32767).astype(np.int16)
    film = mp4(clip(1, 6), "matroska", played=played)
    content = [words("the music "), seen(film, "video/webm"), words("a"), image(file(rgb(0)))]
    asked = {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": True}}}
    want, count = wanted(omni, content, played=played.astype(np.float32) / 2**15)
    unheard, fewer = wanted(omni, content)
    got = ask(omni, content, **asked)
    assert got.choices[0].message.content == want != unheard and got.usage.prompt_tokens == count > fewer
    encoded = omni.served.engine.stats()["pictures encoded"]
    assert ask(omni, [words("b"), *content], **asked).usage.prompt_tokens > count
    assert omni.served.engine.stats()["pictures encoded"] == encoded
    assert ask(omni, content).choices[0].message.content == unheard
    silent = [seen(mp4(clip(1))), words("a music")]
    assert ask(omni, silent, **asked).choices[0].message.content == wanted(omni, silent)[0]
    alone = [{"role": "user", "content": content}]
    python = serve.ask(omni.served, alone, temperature=0, max_tokens=8, **asked["extra_body"])
    assert python["content"] == want
    monkeypatch.setattr(omni.state, "audio_seconds", 2)
    with pytest.raises(openai.BadRequestError, match="found more than 2 seconds of sound"):
        ask(omni, content, **asked)


def _repeated(x: np.ndarray, count: int, rate: int = 30) -> bytes:
    """One frame, and another after it, which changes nothing, again and again."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as c:
        stream = c.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *x.shape[:2], "yuv420p"
        first, again = [
            *(p for _ in range(2) for p in stream.encode(av.VideoFrame.from_ndarray(x, "rgb24"))),
            *stream.encode(),
        ][:2]
        for i in range(count):
            packet = av.Packet(bytes(again if i else first))
            packet.pts = packet.dts = i
            packet.time_base, packet.stream, packet.is_keyframe = first.time_base, stream, not i
            c.mux(packet)
    return out.getvalue()


def silence(seconds: int, rate: int = 48_000, said: bool = True) -> bytes:
    """A small FLAC file of a long silence; without `said` its header does not say how long."""
    out, soundfile = io.BytesIO(), pytest.importorskip("soundfile", reason="needs the media extra")
    with soundfile.SoundFile(out, "w", rate, 1, format="FLAC", subtype="PCM_S8") as f:
        for _ in range(seconds):
            f.write(np.zeros(rate, np.float32))
    data = out.getvalue()
    return data if said else data[:21] + bytes([data[21] & 0xF0, 0, 0, 0, 0]) + data[26:]


def hostile() -> dict[str, tuple[str, bytes | str]]:
    """Name -> the kind of a part, and a file or an address."""
    good, many = mp4(clip(1)), io.BytesIO()
    with av.open(many, "w", format="matroska") as c:
        streams = [c.add_stream("mpeg4", rate=2) for _ in range(40)]
        for s in streams:
            s.height, s.width, s.pix_fmt = 16, 16, "yuv420p"
        for s in streams:
            for packet in [*s.encode(av.VideoFrame.from_ndarray(clip(1, 1, 16, 16)[0], "rgb24")), *s.encode()]:
                c.mux(packet)
    local = b"ffconcat version 1.0\nfile '/etc/passwd'\n"
    found: dict[str, tuple[str, bytes | str]] = {
        "nothing": ("video", b""),
        "text": ("video", b"hello"),
        "cut": ("video", good[: len(good) // 3]),
        "a beginning": ("video", good[:16]),
        "zeros behind a beginning": ("video", good[:40] + bytes(4000)),
        "a frame of 6 million pixels": ("video", mp4(clip(1, 1, 2000, 3000))),
        "a list of files": ("video", local),
        "a list of files that says mp4": ("video", local[:4] + b"ftyp" + local),
        "a playlist": ("video", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
        "a session": ("video", b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n"),
        "a picture": ("video", file(rgb(0))),
        "a sound": ("video", wav(0.5)),
        "one frame of 40 streams": ("video", many.getvalue()),
        "100,000 small frames": ("video", _repeated(clip(1, 1, 16, 16)[0], 100_000)),
        "700 frames of 4 million pixels": ("video", _repeated(np.zeros((2048, 2048, 3), np.uint8), 700)),
        "more frames than go in": ("video", mp4(clip(1, 100, 128, 128))),
        "a path": ("video", "/etc/passwd"),
        "a file": ("video", "file:///etc/passwd"),
        "concat": ("video", "concat:/etc/passwd|/etc/hosts"),
        "this machine": ("video", "http://127.0.0.1/a.mp4"),
        "an image's address": ("video", url(file(rgb(0)))),
        "no sound": ("audio", b""),
        "a cut sound": ("audio", wav(0.5)[:30]),
        "a sound of 10 hours": ("audio", wav(0.1, claimed=36000 * 32000)),
        "a short sound": ("audio", wav(0.01)),
        "a long sound": ("audio", wav(100)),
        "text as sound": ("audio", b"hello"),
        "mp3 of nothing": ("audio", b"ID3" + bytes(400)),
        "ogg of nothing": ("audio", b"OggS" + bytes(400)),
        "flac of nothing": ("audio", b"fLaC" + bytes(400)),
        "a video that plays nothing": ("audio", good),
        "a silence longer than the context": ("audio", silence(1400)),
        "one that does not say so": ("audio", silence(1400, said=False)),
        "one in a video": ("video", mp4(clip(1), played=np.zeros(16_000 * 120, np.int16))),
        "an old format": ("audio", b"FORM\0\0\0\x2eAIFFCOMM" + bytes(60)),
        "an old format behind a tag": ("audio", b"ID3\4\0\0\0\0\0\0FORM\0\0\0\x2eAIFFCOMM" + bytes(60)),
        "a cut video as sound": ("audio", good[:200]),
        "a local sound": ("audio", "file:///etc/passwd"),
    }
    return found


@pytest.mark.slow
def test_hostile_videos_and_sounds_cost_little(omni):
    """Each a clear 400 within 2 s of CPU and 200 MB, and the server answers the next."""
    root, files = omni.state.workers.process.pid, hostile()
    assert len(files) >= 30
    for name, (kind, data) in files.items():
        address = data if isinstance(data, str) else f"data:{kind}/x;base64,{b64(data)}"
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": address}}
        body = {"model": "omni", "messages": [{"role": "user", "content": [words("a"), part]}]}
        body |= {"mm_processor_kwargs": {"use_audio_in_video": True}} if kind == "video" else {}
        began = spent(root)
        status, answer, _ = wire.call(omni, "POST", "/v1/chat/completions", body, role=None)
        seconds = spent(root) - began
        assert status == 400, (name, answer)
        assert answer["error"]["param"] in ("messages", f"messages[0].content[1].{kind}_url.url"), (name, answer)
        assert seconds < 2 and len(answer["error"]["message"]) < 400, (name, seconds, answer)
        peaks = children(root)
        assert peaks and max(peaks.values()) < 200_000, (name, peaks)
        assert not re.search("root:|Error|Errno|codec can't", answer["error"]["message"]), (name, answer)
    content = [heard(wav(0.5)), words("the music ")]
    assert ask(omni, content).choices[0].message.content == wanted(omni, content)[0]


@pytest.mark.slow
def test_a_video_within_all_limits_costs_no_more_than_its_budget(omni, monkeypatch):
    """Of noise, seen or heard too, with a hundredth of a second for what takes some fifteen; the next one is shown."""
    film = seen(mp4(np.random.default_rng(0).integers(0, 256, (60, 512, 512, 3), np.uint8), rate=30))
    monkeypatch.setattr(omni.state, "video_cpu", 0.01)
    for asked in ({}, {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": True}}}):
        with pytest.raises(
            openai.BadRequestError, match="the video cannot be used: .* 0.01 seconds of processor time are"
        ):
            ask(omni, [film, words("a")], **asked)
    monkeypatch.undo()
    assert ask(omni, [seen(mp4(clip(1))), words("a")]).usage.completion_tokens


@pytest.mark.slow
def test_how_many_and_how_large_is_bounded(omni, monkeypatch):
    film, noise = seen(mp4(clip(1))), heard(wav(0.5))
    with pytest.raises(openai.BadRequestError, match="found 2 videos, expected at most 1"):
        ask(omni, [film, film, words("a")])
    with pytest.raises(openai.BadRequestError, match="found 3 sounds, expected at most 2"):
        ask(omni, [noise] * 3)
    for name, value, part, match in (
        ("video_bytes", 10, film, "expected at most 10; make it smaller"),
        ("video_pixels", 48 * 32 * 2, film, "found 6 frames to take, expected 1 to 2 of their size"),
        ("audio_seconds", 0.2, noise, "expected more than 0 and at most 0.2"),
        ("audio_bytes", 10, noise, "expected at most 10; make it smaller"),
    ):
        with monkeypatch.context() as m:
            m.setattr(omni.state, name, value)
            with pytest.raises(openai.BadRequestError, match=match):
                ask(omni, [part, words("a")])
    with pytest.raises(openai.BadRequestError, match="format: found 'exe', expected wav or mp3"):
        ask(omni, [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "exe"}}])


def test_times_before_frames_are_read_as_the_model_reads_text(tmp_path):
    """Qwen3-VL's: as `media.video.prepare` with the model's own tokenizer, after the facts went to a child and back."""
    tok = text.train_bpe([*wire.WORDS, "<0.2 seconds>"], small.VOCAB - 20, SPECIALS)
    ids = [tok.backend.token_to_id(f"<{name}>") for name in ("image", "video", "see", "seen")]
    named = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "qwen3_vl", "vision_config": vision} | dict(zip(named, ids, strict=True))
    size = {"shortest_edge": 256, "longest_edge": 4096}
    processor = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    see, film = sight.read(tmp_path), mp4(clip(1))
    encoder = PromptEncoder.from_facts(PromptEncoder(tok, 100, small.VOCAB, see).facts())
    got = encoder.prepared("videos", film, Most(1, 2**20, 1.0))
    shown = video.decode(film, lambda n, fps: video.sample(see.video, n, fps))
    want = video.prepare(see.video, shown, lambda said: text.encode(tok, said, special=False))
    assert got.run == want.run and "<0.2 seconds>" in text.decode(tok, list(got.run))
    for a, b in zip((got.patches, got.places, got.turns), (want.patches, want.places, want.turns), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts_become_what_templates_know():
    limits = Limits(10, 10, media=media.Media(1, 1, 1))
    content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, words("b"), heard(b"1")]
    asked = parse_chat({"model": "m", "messages": [{"role": "user", "content": content}]}, limits)
    assert [(s.kind, s.path.rpartition("]")[2]) for s in asked.shown] == [
        ("videos", ".video_url.url"), ("sounds", ".input_audio.data")]  # fmt: skip
    assert asked.messages[0]["content"] == [{"type": "video"}, words("b"), {"type": "audio"}]
    assert media.embedded(asked.shown[1], 10) == base64.b64encode(b"1")
    with pytest.raises(APIError, match="this model takes text and images and sounds in a chat; leave videos out"):
        parse_chat(
            {"model": "m", "messages": [{"role": "user", "content": content}]},
            replace(limits, media=media.Media(1, 0, 1)),
        )
