"""The routes that write down sounds: from a form with a file to a transcript, whole or as it is written."""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from fdel import models, text
from fdel.serve import hear
from fdel.serve.hear import scribe, tokens, words
from fdel.serve.server.answer import PING, stream
from fdel.serve.server.call import Call
from fdel.serve.server.openai import APIError, Limits, body, requests, transcripts
from fdel.serve.server.tokenizing import PromptEncoder

HOP = 0.01  # seconds of a frame
SURE = 0.0  # the temperature from which others are tried where a transcript is bad


@dataclass(frozen=True)
class HeardModel:
    """A name that clients ask for: a model that writes down sounds, with its tokenizer."""

    name: str
    scribe: scribe.Scribe
    tokenizer: text.Tokenizer
    created: float  # seconds since 1970
    parent, takes = None, ("audio",)  # as of a `ServedModel`

    @property
    def listener(self) -> hear.Listener:
        """The model and its programs."""
        return self.scribe.listener

    @functools.cached_property
    def encoder(self) -> PromptEncoder:
        """What child processes need to know."""
        return PromptEncoder(self.tokenizer, self.listener.cfg.max_positions, self.listener.cfg.vocab)

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of tokens, without times."""
        said = [t for t in ids if t < self.listener.tokens.end]
        return self.tokenizer.backend.decode(said, skip_special_tokens=True)

    def part(self, segment: hear.Segment) -> transcripts.Part:
        """Put a segment into words."""
        facts = {
            "seek": segment.seek, "tokens": list(segment.tokens), "temperature": segment.temperature,
            "avg_logprob": segment.mean_logprob, "compression_ratio": segment.compression,
            "no_speech_prob": segment.no_speech,
        }  # fmt: skip
        found = words.split(segment.spoken, self.decode, segment.language)
        timed = [{"word": w.text.strip(), "start": round(w.start, 3), "end": round(w.end, 3)} for w in found]
        return transcripts.Part(self.decode(segment.tokens), segment.start, segment.end, facts, timed)


def heard_model(directory: str | Path, name: str, dtype: Any = None, rows: int = 4) -> HeardModel:
    """Load a checkpoint that writes down sounds; windows of `rows` of them at most share a batch. Nothing is started."""
    family = models.hearing(directory)
    if family is None:
        raise ValueError(f"{directory} writes no sounds down; expected a model of {', '.join(models.HEARS)}")
    model, tok = models.load(directory, dtype=dtype, family=family), text.load(directory)
    vocabulary = tok.backend.get_vocab(with_added_tokens=True)
    listener = hear.Listener(model, tokens.of(directory, vocabulary, model.cfg), rows=rows)
    return HeardModel(name, scribe.Scribe(listener), tok, time.time())


async def transcribe(call: Call) -> web.StreamResponse:
    """POST /v1/audio/transcriptions."""
    return await _answer(call, "transcribe")


async def translate(call: Call) -> web.StreamResponse:
    """POST /v1/audio/translations: a transcript in English."""
    return await _answer(call, "translate")


async def _answer(call: Call, task: str) -> web.StreamResponse:
    asked = requests(Limits(1, 1))["transcription" if task == "transcribe" else "translation"](_typed(call.body))
    model = call.heard()
    kind, kinds = asked.get("response_format", "json"), asked.get("timestamp_granularities", ["segment"])
    if "timestamp_granularities" in asked and kind != "verbose_json":
        param = "timestamp_granularities"
        raise APIError(f"{param}: needs response_format verbose_json, found {kind}", param=param)
    if asked.get("stream") and kind != "json":
        raise APIError(f"stream: needs response_format json, found {kind}", param="stream")
    features, seconds = await _features(call, model)
    options = await _options(call, model, asked, task, "word" in kinds and kind == "verbose_json")
    if asked.get("stream"):
        return await stream(call, _events(call, model, features, options, seconds))
    parts, language = list[transcripts.Part](), options.language
    async for found, known in _parts(call, model, features, options):
        parts, language = parts + ([] if found is None else [found]), known or language
    call.server.metrics.add("fdel_audio_seconds_total", seconds, model=model.name)
    if kind == "json":
        return call.json(transcripts.brief(parts, seconds))
    if kind == "verbose_json":
        return call.json(transcripts.verbose(parts, seconds, task, language, kinds))
    said = transcripts.whole(parts) + "\n" if kind == "text" else transcripts.subtitles(parts, kind)
    return web.Response(text=said, content_type="text/plain" if kind != "vtt" else "text/vtt", charset="utf-8")


def _typed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read numbers and flags, which a form has as texts; what is none is refused by the table."""
    out = dict(fields)
    with contextlib.suppress(ValueError, KeyError):
        out["temperature"] = float(out["temperature"])
    if "stream" in out:
        out["stream"] = {"true": True, "True": True, "false": False, "False": False}.get(out["stream"], out["stream"])
    return out


async def _features(call: Call, model: HeardModel) -> tuple[np.ndarray, float]:
    """Decode the file in a child process: features and seconds. APIError for what is no sound, or too long."""
    file, bins = call.files.get("file"), model.listener.cfg.bins
    if not file:
        raise APIError("file: missing or empty", param="file", code="missing_required_parameter")
    try:
        most = call.server.audio_seconds
        seconds, raw = await call.workers.ask(call.holder, "sound", data=file, large=True, most=most, bins=bins)
    except APIError as e:
        e.param = e.param or ("file" if e.status == 400 else None)
        raise
    call.files.clear()  # what is long
    return np.frombuffer(raw, np.float32).reshape(bins, -1), seconds


async def _options(call: Call, model: HeardModel, asked: Mapping[str, Any], task: str, timed: bool) -> hear.Options:
    prompt: list[int] = []
    if said := asked.get("prompt", "").strip():
        [prompt] = await call.workers.encode(call.holder, model.name, [" " + said], special=False)
        prompt = [t for t in prompt if t < model.listener.tokens.end]
    warmth = asked.get("temperature", SURE)
    temperatures = hear.Options().temperatures if warmth == SURE else (warmth,)
    options = hear.Options(
        language=asked.get("language"), task=task, prompt=tuple(prompt), temperatures=temperatures, words=timed,
        seed=asked.get("seed", 0),
    )  # fmt: skip
    try:
        model.listener.tokens.prompt(options.language, task, True)
    except ValueError as e:
        raise APIError(str(e), param="language" if options.language else "model") from e
    return options


async def _parts(
    call: Call, model: HeardModel, features: np.ndarray, options: hear.Options
) -> AsyncGenerator[tuple[transcripts.Part | None, str | None], None]:
    """Give segments as they are written, None while there is none; and the language, where it is known."""
    loop, said = asyncio.get_running_loop(), asyncio.Queue[hear.Segment]()
    listener, written = model.listener, 0
    most = math.ceil(features.shape[1] / listener.cfg.frames) * listener.cfg.max_positions
    call.admit(most)

    def tell(segment: hear.Segment) -> None:
        loop.call_soon_threadsafe(said.put_nowait, segment)

    job = model.scribe.write(hear.transcribe(features, listener.cfg, listener.tokens, options, tell))
    end = asyncio.wrap_future(job)
    try:
        while not (end.done() and said.empty()):
            new = asyncio.ensure_future(said.get())
            both: list[asyncio.Future] = [new, end]
            await asyncio.wait(both, timeout=PING, return_when=asyncio.FIRST_COMPLETED)
            if not new.done():
                new.cancel()
                if not end.done():
                    yield None, None
                continue
            segment = new.result()
            written += len(segment.tokens)
            yield model.part(segment), segment.language
        yield None, (await end).language
    finally:
        end.cancel()
        call.settle(most, body.Usage(len(options.prompt), written))


async def _events(
    call: Call, model: HeardModel, features: np.ndarray, options: hear.Options, seconds: float
) -> AsyncGenerator[bytes, None]:
    parts: list[transcripts.Part] = []
    async for part, _ in _parts(call, model, features, options):
        if part is None:
            yield body.PING
            continue
        parts.append(part)
        yield body.frame([transcripts.delta(part.text if len(parts) > 1 else part.text.lstrip())])
    call.server.metrics.add("fdel_audio_seconds_total", seconds, model=model.name)
    yield body.frame([transcripts.done(parts, seconds)]) + body.DONE
