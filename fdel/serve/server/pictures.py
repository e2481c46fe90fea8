"""What a chat shows and plays: from addresses to what an engine takes, decoded and prepared in child processes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media.hearing import Film, Sound
from fdel.media.sight import Picture, Sight, prepare
from fdel.serve.engine.pictures import PromptMedia, prompt_media
from fdel.serve.server import openai
from fdel.serve.server.call import Call
from fdel.serve.server.fetch import fetch
from fdel.serve.server.openai import APIError
from fdel.serve.server.openai.media import Shown, embedded
from fdel.serve.server.served import ServedModel
from fdel.serve.server.worker_pool import LARGE


@dataclass(frozen=True)
class Prompt:
    """A chat as tokens, what it shows in their places, and the end of its text."""

    tail: str
    tokens: list[int]
    media: PromptMedia | None = None


async def prompt(call: Call, served: ServedModel, asked: openai.Chat) -> Prompt:
    """Render and tokenize a chat, and put what it shows into it. APIError for what cannot be shown."""
    found = [await prepared(call, served.base, shown) for shown in asked.shown]
    tail, tokens = await call.workers.chat(call.holder, served.base, dataclasses.replace(asked, shown=()), call.large)
    if not found:
        return Prompt(tail, tokens)
    work = lambda: prompt_media(served.engine.sight, tokens, [p for p, _ in found], [d for _, d in found])
    try:
        return Prompt(tail, *await call.in_thread(work))
    except ValueError as e:
        raise APIError(f"messages: {e}; does this model's chat template show them?", param="messages") from e


async def prepared(call: Call, model: str, shown: Shown) -> tuple[Picture | Sound | Film, bytes]:
    """Have a file decoded and prepared for a model: what is shown, and a hash of it. It takes of the server's quota."""
    server, kind = call.server, shown.kind
    sizes = {"images": server.image_bytes, "sounds": server.audio_bytes}
    size = sizes.get(kind, server.video_bytes)
    data = embedded(shown, size)
    encoded = data is not None
    if data is None:
        call.take(server.pictures, min(size, server.pictures.total // 4))  # for what may come
        data = await fetch(shown.url, server.media_hosts, size, shown.path, kind)
    most = server.image_pixels, server.video_pixels, server.audio_seconds
    facts: dict[str, Any] = {"kind": kind, "encoded": encoded, "most": most}
    facts |= {"cpu": server.video_cpu} if kind in ("videos", "films") else {}

    def accept(size: int) -> None:
        most = server.pictures.total // 2
        if (found := call.shown + size) > most:
            raise APIError(f"the {kind} take {found} bytes as the model takes them, expected at most {most}; show fewer "
                           "or smaller ones")  # fmt: skip
        call.take(server.pictures, size)
        call.shown = found

    try:
        value, raw = await call.workers.ask(call.holder, kind, model, data, accept, large=len(data) > LARGE, **facts)
    except APIError as e:
        if e.status == 400:
            raise APIError(f"{shown.path}: {e.message}", param=shown.path) from e
        raise
    return unpack(value, raw, kind)


def unpack(value: Any, raw: bytes | bytearray, kind: str = "images") -> tuple[Picture | Sound | Film, bytes]:
    """Read what a job of `worker` gave of a file of this kind."""
    shapes: Sequence[Sequence[int]] = value["shapes"]
    arrays, at = [], 0
    for shape, dtype in zip(shapes, value["kinds"], strict=True):
        arrays.append(np.frombuffer(raw, f"<{dtype}4", int(np.prod(shape)), at).reshape(shape))
        at += arrays[-1].nbytes
    run, digest = tuple(value["run"]), bytes.fromhex(value["digest"])
    if len(value["runs"]) > 1:
        seen, heard = map(tuple, value["runs"])
        patches, places, features, lengths, turns = arrays
        return Film(Picture(patches, places, seen), Sound(features, lengths, heard), run, turns), digest
    what: Any = Sound if kind == "sounds" else Picture
    return what(arrays[0], arrays[1], run, *arrays[2:]), digest


def blank(sight: Sight) -> Picture:
    """Prepare a black image."""
    return prepare(sight, np.zeros((64, 64, 3), np.uint8))
