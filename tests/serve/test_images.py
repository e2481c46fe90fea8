"""Chats with images: OpenAI's client against transformers' LLaVA, hostile images, addresses that are not fetched."""

import asyncio
import base64
import contextlib
import http.server
import io
import ipaddress
import os
import re
import socket
import struct
import threading
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import serve, text
from fdel.media import senses, sight
from fdel.media.image import Picture
from fdel.serve.engine import weights
from fdel.serve.engine.engine import Settings
from fdel.serve.server import fetch, launch, metrics, worker
from fdel.serve.server import http as server_http
from fdel.serve.server.call import Server, picture_quota
from fdel.serve.server.openai import APIError, media, parse_chat, responses
from fdel.serve.server.openai.tables import Limits
from fdel.serve.server.tokenizing import PromptEncoder
from tests.serve import small, wire

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp", reason="needs the serve extra")
PIL = pytest.importorskip("PIL.Image", reason="needs the media extra")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rgb(seed: int, height: int = 20, width: int = 30) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def file(x: np.ndarray, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    PIL.fromarray(x).save(out, kind, **options)
    return out.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(address: str) -> dict:
    return {"type": "image_url", "image_url": {"url": address}}


def said(*content) -> list[dict]:
    """A message of texts and addresses of images."""
    plain = lambda c: part(c) if c.startswith(("data:", "http")) else {"type": "text", "text": c}
    return [{"role": "user", "content": [plain(c) for c in content]}]


@contextlib.contextmanager
def serving(directory, name: str):
    """A server of a checkpoint that sees, and OpenAI's client of it."""
    options = launch.ServerOptions(settings=Settings(rows=4, batches=(4,), budget=32, max_length=320))
    (served,) = launch.served(
        weights.load(directory), text.load(directory), name, options, seen=sight.read(directory)
    )  # fmt: skip
    served.engine.start(wait=True)
    state = Server({name: served}, metrics.Metrics(metrics.serving([name], server_http.PATHS)))
    with wire.listening(state) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(port=port, state=state, secrets={}, client=client, served=served)
    served.engine.close()


@pytest.fixture(scope="module")
def eye(tmp_path_factory):
    """transformers' tiny LLaVA with its processor, and a server of its files with OpenAI's client of it."""
    pytest.importorskip("torch", reason="needs the torch extra")
    import torch
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

    from tests.models.tiny import randomise
    from tests.models.tiny.sight import CLIP, TEXT

    directory = tmp_path_factory.mktemp("llava")
    tok = text.train_bpe(wire.WORDS, small.VOCAB - 10, ["<|im_start|>", "<|im_end|>", "<image>"])
    token = tok.backend.token_to_id("<image>")
    cfg = LlavaConfig(
        vision_config=CLIP, text_config=TEXT | dict(vocab_size=small.VOCAB, max_position_embeddings=400),
        image_token_index=token, image_seq_length=16,
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = LlavaForConditionalGeneration._from_config(cfg, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(oracle, 0, ())
    oracle.save_pretrained(directory)
    text.save(text.Tokenizer(**{**vars(tok), "templates": {"default": TEMPLATE}, "eos_ids": (small.EOS,)}), directory)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor.save_pretrained(directory)
    with serving(directory, "eye") as found:
        yield SimpleNamespace(**vars(found), oracle=oracle, processor=processor, token=token)


def wanted(eye, messages: list, arrays: list, most: int = 12) -> tuple[str, int]:
    """What transformers answers greedily, and the tokens of its prompt."""
    import torch

    content = [{"type": "image"} if p["type"] == "image_url" else p for p in messages[0]["content"]]
    shown = text.render_chat(
        eye.served.tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True
    )  # fmt: skip
    ids = [
        i for t in text.encode(eye.served.tokenizer, shown, special=False) for i in [t] * (16 if t == eye.token else 1)
    ]
    pixels = eye.processor(arrays, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = eye.oracle.generate(
            input_ids=torch.tensor([ids]), pixel_values=pixels, attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False, max_new_tokens=most, eos_token_id=small.EOS, pad_token_id=0,
        )  # fmt: skip
    answer = out[0, len(ids) :].tolist()
    return text.decode(eye.served.tokenizer, answer[: answer.index(small.EOS) if small.EOS in answer else None]), len(
        ids
    )


def media_counts(eye) -> list[int]:
    """Count the images that the server has encoded, and those that it found encoded."""
    said = wire.call(eye, "GET", "/metrics", role=None)[1]
    return [int(re.search(rf"^fdel_media_{name}_total (\d+)$", said, re.M)[1]) for name in ("encoded", "found")]


@pytest.mark.slow
def test_the_official_clients_calls_are_answered_as_transformers_does(eye):
    """A chat, a stream, a response, two images in one, from Python; usage counts the tokens of images."""
    one, two = rgb(0), rgb(1, 40, 17)
    messages = said("the weather in ", url(file(one)), "is fine")
    want, count = wanted(eye, messages, [one])
    options, first = dict(model="eye", messages=messages, temperature=0, max_tokens=12), media_counts(eye)
    again, found = (eye.client.chat.completions.create(**options) for _ in range(2))
    assert again.choices[0].message.content == found.choices[0].message.content == want and len(want) > 5
    assert found.usage.prompt_tokens == count > 16
    chunks = [c.choices[0].delta.content or "" for c in eye.client.chat.completions.create(**options, stream=True)]
    assert "".join(chunks) == want
    assert serve.ask(eye.served, messages, temperature=0, max_tokens=12)["content"] == want

    items = [{"role": "user", "content": [{"type": "input_text", "text": "the weather in "},
              {"type": "input_image", "image_url": url(file(one)), "detail": "high"},
              {"type": "input_text", "text": "is fine"}]}]  # fmt: skip
    answer = eye.client.responses.create(model="eye", input=items, temperature=0, max_output_tokens=12)
    new, known = (now - before for before, now in zip(first, media_counts(eye), strict=True))
    assert new <= 2 and new + known == 5  # what `ask` prepares in this process has a hash of its own
    assert answer.output_text == want and answer.usage.input_tokens == count

    both = said(url(file(two, "JPEG", quality=95), "jpeg"), "a music ", url(file(one, "BMP"), "bmp"))
    seen = [np.array(PIL.open(io.BytesIO(file(two, "JPEG", quality=95)))), one]
    want_both, count_both = wanted(eye, both, seen)
    got = eye.client.chat.completions.create(**options | {"messages": both})
    assert got.choices[0].message.content == want_both != want and got.usage.prompt_tokens == count_both > 32
    other = said("the weather in ", url(file(two)), "is fine")
    assert eye.client.chat.completions.create(**options | {"messages": other}).choices[0].message.content != want
    plain = eye.client.chat.completions.create(**options | {"messages": [{"role": "user", "content": "the weather"}]})
    assert plain.usage.prompt_tokens < 40  # a text alone, in a template that shows parts of lists
    status, counted, _ = wire.call(eye, "POST", "/tokenize", {"model": "eye", "messages": messages}, role=None)
    assert status == 200 and counted["count"] == count
    encoded = eye.served.engine.stats()["pictures encoded"]
    assert encoded <= 5


@pytest.mark.slow
def test_a_text_that_spells_the_placeholder_shows_nothing(eye):
    found = eye.client.chat.completions.create(
        model="eye", messages=said("<image>", url(file(rgb(0)))), temperature=0, max_tokens=2
    )
    assert found.usage.prompt_tokens > 16 + 7
    with pytest.raises(openai.BadRequestError, match="this model takes text and images in a chat; leave videos out"):
        eye.client.chat.completions.create(model="eye", messages=[{"role": "user", "content": [{"type": "video_url"}]}])


# ---- hostile images ----------------------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, data: bytes = b"", kind: int = 2, depth: int = 8, *more: bytes) -> bytes:
    """A PNG file with any header."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(size: int) -> bytes:
    """So many zeros, compressed."""
    packer, out = zlib.compressobj(9), []
    for _ in range(size // 2**20):
        out.append(packer.compress(bytes(2**20)))
    return b"".join([*out, packer.flush()])


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + b"," + struct.pack(
        "<HHHH", 0, 0, width, height) + b"\0\x02\x02D\x01\0;"  # fmt: skip


def hostile() -> dict[str, bytes | str]:
    """Name -> a file, or an address as it is."""
    good, photo = file(rgb(0)), file(rgb(0, 300, 300), "JPEG")
    moving = io.BytesIO()
    frames = [PIL.fromarray(rgb(i, 8, 8)) for i in range(3)]
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    webp = file(rgb(0, 64, 64), "WEBP")
    bmp = file(rgb(0), "BMP")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    return {
        "empty": b"",
        "text": b"hello, I am no image",
        "a cut png": good[: len(good) // 2],
        "a png's beginning": good[:20],
        "a png without data": png(20, 20),
        "a png that breaks": good[:60] + b"\xff" * 40 + good[100:],
        "a cut jpeg": photo[:200],
        "a jpeg of nothing": b"\xff\xd8\xff\xe0" + bytes(40),
        "a cut webp": webp[: len(webp) // 2],
        "a cut bmp": bmp[:60],
        "a cut gif": moving.getvalue()[:25],
        "100k x 100k": png(100_000, 100_000, zeros(2**20)),
        "the largest png": png(2**31 - 1, 2**31 - 1),
        "no pixels": png(0, 0, zeros(2**20)),
        "a thin png": png(1, 2**24, zeros(65 * 2**20)),
        "a zip bomb": png(5000, 5000, zeros(75 * 2**20)),
        "a zip bomb beyond its header": png(4000, 4000, zeros(2**20)),
        "a bomb of text": png(8, 8, b"", 2, 8, chunk(b"zTXt", b"a\0\0" + zeros(64 * 2**20))),
        "a bomb of a profile": png(8, 8, b"", 2, 8, chunk(b"iCCP", b"a\0\0" + zeros(64 * 2**20))),
        "a large gif": gif(65535, 65535),
        "a large bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 10**5, 10**5, 1, 24, 0, 0, 1, 1, 0, 0),
        "a long bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 10**8, 1, 1, 24, 0, 0, 1, 1, 0, 0),
        "svg": svg,
        "svg that says png": b"\x89PNG" + svg,
        "html": b"<html><script>alert(1)</script>",
        "pdf": b"%PDF-1.4 " + bytes(100),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9999 9999\n",
        "zip and gif": b"GIF89a" + b"PK\x03\x04" + bytes(64),
        "tiff": b"II*\0" + bytes(64),
        "ico": b"\0\0\1\0\1\0" + bytes(64),
        "a program": b"\x7fELF" + bytes(64),
        "a sound of 10 hours": b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WAVEfmt " + struct.pack(
            "<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16) + b"data" + struct.pack("<I", 36000 * 32000),  # fmt: skip
        "not base64": "data:image/png;base64,!!!!",
        "not encoded": "data:image/png,abc",
        "text by type": "data:text/html;base64,AAAA",
        "a path": "/etc/passwd",
        "a file": "file:///etc/passwd",
        "ftp": "ftp://example.com/a.png",
        "this machine": "http://127.0.0.1/a.png",
        "metadata": "http://169.254.169.254/latest/meta-data",
    }  # fmt: skip


def children(root: int) -> dict[int, int]:
    """The most memory in KiB of each process that a process has forked and that has not ended."""
    lines = {pid: _read(pid, "status").splitlines() for pid in _read(root, f"task/{root}/children").split()}
    peaks = {pid: [int(line.split()[1]) for line in said if line.startswith("VmHWM:")] for pid, said in lines.items()}
    return {int(pid): peak[0] for pid, peak in peaks.items() if peak}


def spent(root: int) -> float:
    """Seconds of CPU of this process, of one that forks, and of all that it has forked.

    The time of a process that ends is its parent's, so the parent is read last.
    """
    ticks = 0
    for pid in (*children(root), root):
        fields = _read(pid, "stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11 : 15 if pid == root else 13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _read(pid: int | str, name: str) -> str:
    """A file of a process under /proc; nothing of one that has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/{name}") as f:
        return f.read()
    return ""


@pytest.mark.slow
def test_hostile_images_cost_little(eye):
    """Each a clear 400 within 2 s of CPU and 200 MB, and the server answers the next."""
    root = eye.state.workers.process.pid
    files = hostile()
    assert len(files) >= 30
    for name, data in files.items():
        address = data if isinstance(data, str) else url(data)
        began = spent(root)
        status, answer, _ = wire.call(
            eye, "POST", "/v1/chat/completions", {"model": "eye", "messages": [
                {"role": "user", "content": [part(address)]}]}, role=None)  # fmt: skip
        seconds = spent(root) - began
        assert status == 400 and answer["error"]["param"] == "messages[0].content[0].image_url.url", (name, answer)
        assert seconds < 2 and len(answer["error"]["message"]) < 400, (name, seconds, answer)
        peaks = children(root)
        assert peaks and max(peaks.values()) < 200_000, (name, peaks)
        assert "passwd" not in answer["error"]["message"] or isinstance(data, str)
    messages = said("the weather in ", url(file(rgb(0))))
    assert eye.client.chat.completions.create(model="eye", messages=messages, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.slow
def test_harmless_oddities_are_images(eye):
    """A moving GIF shows its first frame; transparent, grey, palette and turned ones are images too."""
    moving = io.BytesIO()
    frames = [PIL.fromarray(rgb(i, 8, 8)) for i in range(3)]
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    clear = np.concatenate([rgb(2), np.full((20, 30, 1), 90, np.uint8)], -1)
    for data in (moving.getvalue(), file(clear), file(rgb(3)[..., 0]), file(rgb(0)) + b"PK\x03\x04 more"):
        found = eye.client.chat.completions.create(model="eye", messages=said("a ", url(data)), max_tokens=1)
        assert found.usage.prompt_tokens > 16
    large = png(4096, 4096, zeros(49 * 2**20))  # as many pixels as may be, of 50 kB
    found = eye.client.chat.completions.create(model="eye", messages=said("a ", url(large)), max_tokens=1)
    assert found.usage.prompt_tokens > 16 and max(children(eye.state.workers.process.pid).values()) < 400_000


@pytest.mark.slow
def test_limits_of_a_request(eye, monkeypatch):
    monkeypatch.setattr(eye.state, "image_bytes", 500)
    for messages, why in (
        (said(*[url(file(rgb(0, 4, 4)))] * 9), "found 9 images, expected at most 8"),
        (said(url(file(rgb(0)))), "bytes, expected at most 500"),
        (said("http://example.com/a.png"), "this server fetches no images"),
        ([{"role": "system", "content": [part(url(file(rgb(0))))]}], "found 'image_url', expected text"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            eye.client.chat.completions.create(model="eye", messages=messages)
    monkeypatch.undo()
    monkeypatch.setattr(eye.state, "image_pixels", 100)
    with pytest.raises(openai.BadRequestError, match="30 x 20 pixels, expected at most 100"):
        eye.client.chat.completions.create(model="eye", messages=said(url(file(rgb(0)))))


@pytest.mark.slow
def test_images_are_bounded_by_their_bytes(eye, monkeypatch):
    """16 patches of 48 numbers and their places are 3264 bytes: one has room, two have not, and none if others need it."""
    monkeypatch.setattr(eye.state, "pictures", quota := picture_quota(8000))
    ask = lambda *shown: eye.client.chat.completions.create(model="eye", messages=said("a ", *shown), max_tokens=1)
    assert ask(url(file(rgb(0)))).usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="take 6528 bytes as the model takes them, expected at most 4000"):
        ask(url(file(rgb(0))), url(file(rgb(1))))
    wire.wait_for(lambda: quota.taken == 0)
    assert quota.acquire("another", 2000)
    with pytest.raises(openai.RateLimitError, match="0 of at most 8000 bytes of prepared media are yours"):
        ask(url(file(rgb(0))))
    wire.wait_for(lambda: quota.taken == 2000)


# ---- without a server --------------------------------------------------------------------------------------------


def test_an_image_longer_than_the_context_ends_in_the_child(monkeypatch):
    """Its patches never come to the server."""
    picture = Picture(np.zeros((5, 12), np.float32), np.zeros((5, 3), np.int32), (7,) * 5)
    monkeypatch.setattr(senses.sights, "prepare", lambda *_: picture)
    asked, see = {"encoded": False, "kind": "images", "most": [999, 9, 9.0]}, SimpleNamespace(video=None, sound=None)
    seeing = lambda context: PromptEncoder(None, context, 9, see)
    assert worker._shown(seeing(5), asked, file(rgb(0)))[0]["run"] == (7,) * 5
    with pytest.raises(ValueError, match="takes 5 tokens, more than the model's 4; make it smaller"):
        worker._shown(seeing(4), asked, file(rgb(0)))


def test_a_model_of_text_says_so():
    body = {"model": "m", "messages": said("a ", url(b"x"))}
    with pytest.raises(APIError, match=r"messages\[0\].content\[1\]: this model reads text alone") as e:
        parse_chat(body, Limits(10, 10))
    assert e.value.status == 400
    item = [{"role": "user", "content": [{"type": "input_image", "image_url": url(b"x")}]}]
    with pytest.raises(APIError, match=r"input\[0\].content\[0\]: this model reads text alone"):
        responses.parse({"model": "m", "input": item}, Limits(10, 10))


@pytest.mark.parametrize("kind", [k for k, v in media.KINDS.items() if v != "images"])
def test_what_no_model_takes_is_refused_by_what_this_one_does(kind):
    """Sounds, videos and files in chats and responses; of the first, where they are taken."""
    for most, takes in ((0, "text alone"), (3, "text and images")):
        limits, content = (
            Limits(10, 10, media=media.Media(most)),
            [{"type": kind, kind: {"data": "AAAA", "format": "wav"}}],
        )
        for parse, body in (
            (parse_chat, {"messages": [{"role": "user", "content": content}]}),
            (responses.parse, {"input": [{"role": "user", "content": content}]}),
        ):
            with pytest.raises(APIError, match=f"content.0.: this model takes {takes} in a chat; leave") as e:
                parse({"model": "m"} | body, limits)
            assert e.value.status == 400 and ("/v1/audio/transcriptions" in e.value.message) == ("audio" in kind)


def test_images_are_taken_out_in_order():
    messages = said("a", url(b"1"), "b", url(b"2")) + [{"role": "assistant", "content": "c"}] + said(url(b"3"))
    asked = parse_chat({"model": "m", "messages": messages}, Limits(10, 10, media=media.Media(3)))
    assert [s.url for s in asked.shown] == [url(b"1"), url(b"2"), url(b"3")]
    assert [s.path for s in asked.shown][2] == "messages[2].content[0].image_url.url"
    kinds = [
        [p["type"] for p in m["content"]] if isinstance(m["content"], list) else m["content"] for m in asked.messages
    ]
    assert kinds == [["text", "image", "text", "image"], "c", ["image"]]
    assert media.embedded(asked.shown[0], 10) == base64.b64encode(b"1")
    with pytest.raises(APIError, match="detail: found 'best', expected auto or low or high"):
        wrong = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:", "detail": "best"}}]}]
        parse_chat({"model": "m", "messages": wrong}, Limits(10, 10, media=media.Media(3)))


PRIVATE = """127.0.0.1 10.0.0.1 192.168.1.1 172.16.0.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 255.255.255.255 ::1 ::
fe80::1 fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b:1::1 64:ff9b:1::808:808 ff02::1""".split()


def test_private_addresses_are_none_of_the_internets():
    assert [a for a in PRIVATE if fetch.public(a)] == []
    assert fetch.public("8.8.8.8") and fetch.public("2606:4700:4700::1111")


@pytest.mark.parametrize("inner", ["127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"])
def test_private_addresses_inside_of_others_are_found(inner):
    """By each way in which IPv6 carries IPv4; and a public one, by those ways that lead somewhere."""
    ways = {
        "mapped": "::ffff:{0}", "compatible": "::{0}", "translated": "::ffff:0:{0}", "NAT64": "64:ff9b::{0}",
        "NAT64 of a site": "64:ff9b:1::{0}", "6to4": "2002:{1}::1", "ISATAP": "2606:4700::5efe:{0}",
        "ISATAP, unique": "2606:4700::200:5efe:{0}", "Teredo's server": "2001:0:{1}::f7f7:f7f7",
        "Teredo's client": "2001:0:808:808::{2}",
    }  # fmt: skip

    def written(way: str, address: str) -> str:
        n = int(ipaddress.IPv4Address(address))
        halves = lambda n: f"{n >> 16:x}:{n & 0xFFFF:x}"
        return way.format(address, halves(n), halves(n ^ 0xFFFFFFFF))

    assert [name for name, way in ways.items() if fetch.public(written(way, inner))] == []
    open_ = {name for name, way in ways.items() if fetch.public(written(way, "8.8.8.8"))}
    assert {"NAT64", "ISATAP"} <= open_ and not open_ & {"NAT64 of a site", "compatible"}


class Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.strip("/")
        if name == "slow":
            time.sleep(1.5)
        moved = {
            "moved": "/file",
            "round": "/round",
            "away": "http://elsewhere.test/file",
            "disk": "file:///etc/passwd",
        }
        self.send_response(302 if name in moved else 200 if name != "missing" else 404)
        if name in moved:
            self.send_header("Location", moved[name])
        if name == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(b"x" * (5000 if name == "large" else 100))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def files():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def got(address: str, hosts: list[str], most: int = 1000) -> bytes:
    return asyncio.run(fetch.fetch(address, frozenset(hosts), most, "url"))


def test_only_allowed_hosts_are_asked_and_within_limits(files, monkeypatch):
    monkeypatch.setattr(fetch, "public", lambda address: True)
    monkeypatch.setattr(fetch, "SECONDS", 0.6)
    here = f"localhost:{files}"
    at = f"http://{here}/"
    assert got(at + "file", [here]) == b"x" * 100 == got(at + "moved", [here])
    for address, hosts, why in (
        (at + "file", [], "this server fetches no images"),
        (at + "file", ["localhost"], "fetched from localhost alone"),
        (at + "file", ["elsewhere.test"], "fetched from elsewhere.test alone"),
        (f"http://localhost:{files}@elsewhere.test/file", [here], "alone, found"),
        (f"http://user@{here}/file", [here], "alone, found"),
        (f"http://elsewhere.test#{here}", [here], "alone, found http://elsewhere.test"),
        (at + "large", [here], "more than 1000 bytes"),
        (at + "packed", [here], "expected 200 and no compression"),
        (at + "missing", [here], "answers 404"),
        (at + "round", [here], "more than 3 redirects"),
        (at + "away", [here], "alone, found http://elsewhere.test"),
        (at + "disk", [here], "alone, found file:"),
        (at + "slow", [here], "did not come within 0.6 seconds"),
    ):
        with pytest.raises(APIError, match=why):
            got(address, hosts)


def test_no_private_address_is_reached(files, monkeypatch):
    """Neither as a number, nor by a name that an operator allows, nor by a second answer of its name server."""
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(APIError, match="private address"):
            got(f"http://{host}:{files}/file", [f"{host}:{files}"])
    with pytest.raises(APIError, match="private address"):
        got(f"http://[::1]:{files}/file", [f"::1:{files}"])
    answers = iter(["93.184.216.34", "127.0.0.1"])
    asked = []

    async def lookup(self, host, port, **how):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lookup)
    monkeypatch.setattr(fetch, "SECONDS", 0.5)
    with pytest.raises(APIError, match="could not be fetched|did not come"):
        got(f"http://name.test:{files}/file", [f"name.test:{files}"])
    assert asked.count("name.test") == 1
