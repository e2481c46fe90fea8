"""Models that name the class of a sound, at /v1/classify: each sound of one message, by labels of the model's own."""

import base64
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from aiohttp import web

from fdel import models
from fdel.media.sound import HOP, RATE
from fdel.models import heads, whisper_classes
from fdel.serve.server import openai
from fdel.serve.server.call import Call
from fdel.serve.server.fetch import fetch
from fdel.serve.server.openai import APIError, body
from fdel.serve.server.openai.media import Media, Shown, embedded


@dataclass(frozen=True)
class LabelModel:
    """A name that clients ask for: a model that names the classes of sounds."""

    name: str
    model: models.Model
    created: float  # seconds since 1970
    sounds: int = 4  # the most of one request
    parent, takes = None, ("audio",)  # as of a `ServedModel`

    @property
    def limits(self) -> openai.Limits:
        """What one request may ask for."""
        return openai.Limits(1, 1, media=Media(sounds=self.sounds))

    @property
    def samples(self) -> int:
        """How many the model hears at once, at 16 kHz; shorter sounds are filled up with silence."""
        return int(self.model.cfg.frames) * HOP

    @cached_property
    def scores(self) -> Any:
        """The program: float32[1 bins frames] -> float32[1 labels]."""
        cfg = self.model.cfg
        run = jax.jit(lambda p, x: whisper_classes.logits(p, x, cfg))
        return lambda x: np.asarray(run(self.model.params, x))


def label_model(directory: str | Path, name: str, dtype: Any = None, sounds: int = 4) -> LabelModel:
    """Load a checkpoint that names the classes of sounds, and compile it."""
    family = models.labelling(directory)
    if family is None:
        raise ValueError(f"{directory} names no classes of sounds; expected a {whisper_classes.ARCHITECTURE}")
    made = LabelModel(name, models.load(directory, dtype=dtype, family=family), time.time(), sounds)
    made.scores(np.zeros((1, made.model.cfg.bins, made.model.cfg.frames), np.float32))
    return made


async def classify(call: Call, model: LabelModel) -> web.Response:
    """Tell the classes of sounds, as `input_audio` or `audio_url` of one message: transformers' pipeline for this.

    Scores if `use_activation` is false. APIError for sounds longer than the model hears at once.
    """
    asked = await call.parse(openai.parse_classify, model)
    said, cfg = asked.prompts, model.model.cfg
    names = heads.label_names(cfg, cfg.labels)
    if asked.labels:
        found = f"candidate_labels: {model.name} has labels of its own, {', '.join(names)}"
        raise APIError(f"{found:.300}; leave them out", param="candidate_labels")
    one = isinstance(said, openai.Chat) and bool(said.shown) and len(said.messages) == 1
    if not isinstance(said, openai.Chat) or not one or any(p["type"] != "audio" for p in said.messages[0]["content"]):
        raise APIError("messages: expected one, of sounds alone, which are given labels", param="messages")
    call.admit(used := len(said.shown) * cfg.states)
    rows = list[np.ndarray]()
    for shown in said.shown:
        features = await _features(call, model, shown)
        rows += list(await call.in_thread(partial(model.scores, features[None])))
    rows = [heads.probabilities(cfg, row) for row in rows] if asked.activation else rows
    return call.json(body.classes(body.meta("classify", asked.model), rows, names, used))


async def _features(call: Call, model: LabelModel, shown: Shown) -> np.ndarray:
    """Decode a sound in a child process: float32[bins frames]. APIError for what is none, or too long."""
    server, cfg = call.server, model.model.cfg
    encoded = embedded(shown, server.audio_bytes)
    try:
        if encoded is None:
            call.take(server.pictures, min(server.audio_bytes, server.pictures.total // 4))  # for what may come
            data = await fetch(shown.url, server.media_hosts, server.audio_bytes, shown.path, shown.kind)
        else:
            data = await call.in_thread(lambda: base64.b64decode(encoded, validate=True))
        facts = {"most": model.samples / RATE, "bins": cfg.bins, "window": model.samples}
        _, raw = await call.workers.ask(call.holder, "sound", data=data, large=True, **facts)
    except ValueError as e:
        raise APIError(f"{shown.path}: expected base64 behind the comma: {e}", param=shown.path) from e
    except APIError as e:
        if e.status == 400 and e.param is None:
            raise APIError(f"{shown.path}: {e.message}", param=shown.path) from e
        raise
    return np.frombuffer(raw, np.float32).reshape(cfg.bins, cfg.frames)
