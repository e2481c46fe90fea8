"""/v1/audio: OpenAI's client against what the model writes alone; forms and files that are none."""

import asyncio
import contextlib
import io
import random
import re
import select
import socket
import struct
import threading
import wave
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import serve
from fdel.media import sound
from fdel.serve import hear
from fdel.serve.server import form, launch, metrics
from fdel.serve.server import http as server_http
from fdel.serve.server.call import Server
from fdel.serve.server.openai import APIError, transcripts
from fdel.serve.server.openai.schema import SCHEMAS
from tests.serve import wire

openai = pytest.importorskip("openai")
import jsonschema  # noqa: E402


def wav(seconds: float = 1.0, seed: int = 0) -> bytes:
    """A file of noise that swells."""
    n, out = int(seconds * 16000), io.BytesIO()
    noise = np.random.default_rng(seed).standard_normal(n) * np.linspace(0.01, 0.3, n)
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((np.clip(noise, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


@pytest.fixture(scope="module")
def ear(hearing):
    """A server of the tiny Whisper alone, and OpenAI's client of it."""
    state = Server({}, metrics.Metrics(metrics.serving(["ear"], server_http.PATHS)), heard={"ear": hearing.model})
    with wire.listening(state) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(port=port, state=state, secrets={}, client=client, model=hearing.model)


def alone(ear, file: bytes, **options) -> list[transcripts.Part]:
    """What the model writes of a file, without a server."""
    x, listener = sound.decode(file, most=60), ear.model.listener
    features = sound.log_mel(np.pad(x, (0, 400)), listener.cfg.bins, least=0)[:, : len(x) // 160]
    asked = hear.Options(**{"temperatures": (0.3,)} | options)
    [found] = hear.run(listener, [hear.transcribe(features, listener.cfg, listener.tokens, asked)])
    return [ear.model.part(s) for s in found.segments]


def ask(ear, **options):
    """Ask by OpenAI's client."""
    return ear.client.audio.transcriptions.create(
        **{"file": ("a.wav", wav()), "model": "ear", "temperature": 0.3} | options
    )


@pytest.mark.slow
def test_all_forms_of_a_transcript_are_what_the_model_writes(ear):
    """json, text, verbose_json with words, srt, vtt, a stream; with a language, a prompt; a translation; side by side."""
    parts = alone(ear, wav())
    said = transcripts.whole(parts)
    assert len(parts) > 1 and len(said) > 5
    found = ask(ear)
    assert found.text == said and found.usage.seconds == 1
    assert ask(ear, response_format="text") == said + "\n"
    deltas = list(ask(ear, stream=True))
    assert "".join(d.delta for d in deltas[:-1]).strip() == said == deltas[-1].text and len(deltas) == len(parts) + 1
    subtitles = ask(ear, response_format="srt")
    assert re.fullmatch(r"(\d+\n[\d:]{8},\d{3} --> [\d:]{8},\d{3}\n.*\n\n?)+", subtitles)
    assert subtitles.count("-->") == ask(ear, response_format="vtt").count("-->") == len(parts)

    timed = alone(ear, wav(), words=True, language="de", prompt=(62, 0, 1))  # " ab"
    kinds = ["word", "segment"]
    rich = ask(ear, response_format="verbose_json", timestamp_granularities=kinds, language="de", prompt="ab")
    assert [s.text for s in rich.segments] == [p.text for p in timed] and rich.language == "de" and rich.duration == 1
    assert [w.word for w in rich.words] == [w["word"] for p in timed for w in p.words] and len(rich.words) > 1
    assert [s.tokens for s in rich.segments] == [p.facts["tokens"] for p in timed]
    translated = ear.client.audio.translations.create(file=("a.wav", wav()), model="ear", temperature=0.3)
    assert translated.text == transcripts.whole(alone(ear, wav(), task="translate"))

    answers: dict[int, str] = {}
    work = lambda i: answers.update({i: ask(ear, file=("a.wav", wav(0.5, seed=i))).text})
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert answers == {i: transcripts.whole(alone(ear, wav(0.5, seed=i))) for i in range(3)}
    assert 'fdel_audio_seconds_total{model="ear"}' in ear.state.metrics.text()


def post(ear, body: bytes, kind: str, path: str = "/v1/audio/transcriptions"):
    """(status, error) of raw bytes."""
    status, said, _ = wire.call(ear, "POST", path, body, role=None, headers={"Content-Type": kind})
    jsonschema.validate(said, SCHEMAS["error"])
    return status, said["error"]


def test_what_is_no_sound_is_refused(ear, monkeypatch):
    """Truncated, ten hours by its header, other types, nothing: a 400 that says what is wrong, and of which parameter."""
    good = wav()
    cases = {
        "cut off: its header says": good[:-1],
        "1152000000 bytes of samples, found 0": good[:40] + struct.pack("<I", 36000 * 32000),
        "not WAV|not a sound": b"<svg onload='x'/>",
        "missing or empty": b"",
        "found 0.00 seconds": good[:40] + bytes(4),
    }
    for message, data in cases.items():
        with pytest.raises(openai.BadRequestError, match=message) as e:
            ask(ear, file=("a.wav", data))
        assert e.value.param == "file"
    for options, param in (
        ({"language": "xx"}, "language"), ({"response_format": "mp3"}, "response_format"),
        ({"temperature": 2}, "temperature"), ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"stream": True, "response_format": "srt"}, "stream"), ({"include": ["logprobs"]}, "include"),
        ({"extra_body": {"color": "red"}}, "color"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as e:
            ask(ear, **options)
        assert e.value.param == param
    with pytest.raises(openai.NotFoundError, match="those that do: ear"):
        ask(ear, model="tongue")
    with pytest.raises(openai.NotFoundError, match="hears: ask /v1/audio"):
        ear.client.chat.completions.create(model="ear", messages=[{"role": "user", "content": "a"}])
    assert [m.id for m in ear.client.models.list()] == ["ear"]
    monkeypatch.setattr(ear.state, "audio_seconds", 0.5)
    with pytest.raises(
        openai.BadRequestError, match="found 1.00 seconds of sound, expected more than 0 and at most 0.5"
    ):
        ask(ear)
    monkeypatch.setattr(ear.state, "audio_bytes", 100)
    with pytest.raises(openai.APIStatusError) as e:
        ask(ear, file=("a.wav", bytes(200_000)))
    assert e.value.status_code == 413 and "the body has more than" in e.value.message and e.value.code == "too_large"


def test_sounds_in_containers_are_written_down(ear):
    """M4A and WebM, as OpenAI takes them: the transcript of the samples that are in it; also in English."""
    av, out = pytest.importorskip("av", reason="needs the extra `video`"), io.BytesIO()
    with av.open(out, "w", format="webm") as c:
        track = c.add_stream("libopus", rate=48000, layout="mono")
        piece = av.AudioFrame.from_ndarray(np.frombuffer(wav()[44:], "<i2")[None], "s16", "mono")
        piece.sample_rate, piece.pts = 16000, 0
        c.mux([*track.encode(piece), *track.encode()])
    file = out.getvalue()
    assert ask(ear, file=("a.webm", file)).text == transcripts.whole(alone(ear, file))
    translated = ear.client.audio.translations.create(file=("a.webm", file), model="ear", temperature=0.3)
    assert translated.text == transcripts.whole(alone(ear, file, task="translate"))
    with pytest.raises(openai.BadRequestError, match="damaged or not a sound that can be read; it may be cut off"):
        ask(ear, file=("a.mp4", b"\0\0\0\x18ftypmp42" + bytes(99)))


def test_no_more_of_an_upload_is_read_than_may_come(ear, monkeypatch):
    """One in chunks, which says no size: a 413 before its end, and nothing more is taken of what comes."""
    taken = []

    class Content:
        async def iter_chunked(self, size):
            for _ in range(100):
                taken.append(size)
                yield bytes(size)

    with pytest.raises(APIError, match="the body has more than 196608 bytes"):
        asyncio.run(form.receive(Content(), 3 * 2**16))
    assert len(taken) == 4
    assert asyncio.run(form.receive(Content(), 100 * 2**16)) == bytes(100 * 2**16)
    monkeypatch.setattr(ear.state, "audio_bytes", 100)
    sent, head = 0, "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", ear.port), 30) as s:
        s.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # it may end the connection meanwhile
            while sent < 2**26 and not select.select([s], [], [], 0)[0]:
                s.sendall(b"10000\r\n" + bytes(2**16) + b"\r\n")
                sent += 2**16
        assert sent < 2**26 and s.recv(64).startswith(b"HTTP/1.1 413 ")


def test_forms_that_are_none_are_refused(ear):
    """Each broken body gets a 4xx of the protocol; random ones raise nothing but APIError."""
    part = lambda name, more="", content=b"x": (
        f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
    )
    kind, end = "multipart/form-data; boundary=b", b"--b--\r\n"
    assert post(ear, b"{}", "application/json")[0] == 415
    assert "no boundary" in post(ear, end, "multipart/form-data")[1]["message"]
    for body, message in {
        part("model"): "cut off", part("") + end: "no name", b"--b\r\nx\r\n" + end: "no headers",
        part("model") * 2 + end: "there are 2", part("file", '; filename="a"') * 2 + end: "two of it",
        part("model", content=b"\xff") + end: "not UTF-8", part("prompt", content=bytes(70_000)) + end: "70000 bytes",
        b"".join(part(f"p{i}") for i in range(70)) + end: "more than 64 parts", part("model") + end: "file",
        b"": "cut off",
    }.items():  # fmt: skip
        status, error = post(ear, body, kind)
        assert status == 400 and message in error["message"], (message, error)
    whole, rng = part("model") + part("file", '; filename="a"', b"\r\n--bx\r\n") + end, random.Random(0)
    assert form.read(whole.replace(b"--bx", b"-bx"), b"b").files == {"file": b"\r\n-bx\r\n"}
    for _ in range(300):
        cut = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            cut[rng.randrange(len(cut))] = rng.choice(b'-b\r\n:;="x')
        try:
            form.read(bytes(cut), b"b")
        except APIError:
            continue


def test_a_directory_that_hears_is_served_as_such(hearing, monkeypatch):
    """`fdel serve` finds by config.json what a model is for."""
    served = []
    monkeypatch.setattr(
        launch, "listen", lambda found, options, keys, heard, scored, labelled: served.extend([found, heard])
    )
    launch.main([hearing.directory], launch.ServerOptions(names=["ear"]))
    assert served[0] == [] and [h.name for h in served[1]] == ["ear"]
    asked = launch.ServerOptions(quantize="int8", settings=serve.Settings(rows=3))
    with pytest.raises(ValueError, match="quantize, rows: of an engine, which .* has no use for; leave them out"):
        launch.main([hearing.directory], asked)


def test_subtitles_escape_arrows():
    """Times of hours, and a text that would begin another time."""
    parts = [transcripts.Part(" a --> b", 3661.5, 3662.0, {}), transcripts.Part(" c\n\nd", 3662.0, 3663.25, {})]
    assert transcripts.subtitles(parts, "srt") == (
        "1\n01:01:01,500 --> 01:01:02,000\na -> b\n\n2\n01:01:02,000 --> 01:01:03,250\nc\nd\n"
    )
    assert transcripts.subtitles(parts, "vtt").startswith("WEBVTT\n\n01:01:01.500 --> 01:01:02.000\na -> b\n\n")
