"""The routes of models that score images and texts: embeddings of both, and images by labels that a client gives."""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from fdel import models, text
from fdel.media.sight import Picture, Sight
from fdel.media.sight import read as read_sight
from fdel.serve.dual import DualEncoder, unit
from fdel.serve.server import openai, pictures
from fdel.serve.server.call import Call
from fdel.serve.server.openai import APIError, body
from fdel.serve.server.openai.media import Media
from fdel.serve.server.tokenizing import PromptEncoder

KEPT = 4096  # embeddings of labels


@dataclass
class Recent:
    """The embeddings of the texts that were asked for last, by their tokens, since labels come again and again."""

    most: int = KEPT
    held: OrderedDict[tuple[int, ...], np.ndarray] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def split(self, texts: Sequence[Sequence[int]]) -> tuple[dict[tuple[int, ...], np.ndarray], list[tuple[int, ...]]]:
        """Give those that are known, and the others, each once."""
        with self.lock:
            keys = dict.fromkeys(map(tuple, texts))
            found = {k: self.held[k] for k in keys if k in self.held}
            for k in found:
                self.held.move_to_end(k)
        return found, [k for k in keys if k not in found]

    def add(self, new: dict[tuple[int, ...], np.ndarray]) -> None:
        """Keep embeddings; the longest unused make room."""
        with self.lock:
            self.held |= new
            while len(self.held) > self.most:
                self.held.popitem(last=False)


@dataclass(frozen=True)
class DualModel:
    """A name that clients ask for: a model that scores images and texts, with its tokenizer.

    `sight` is how it sees: None where its files have no image processor, and it embeds texts alone.
    """

    name: str
    towers: DualEncoder
    tokenizer: text.Tokenizer
    sight: Sight | None
    created: float  # seconds since 1970
    images: int = 8  # the most of one request
    labels: Recent = field(default_factory=Recent)
    parent = None  # as of a `ServedModel`

    @property
    def base(self) -> str:
        """The name of its tokenizer."""
        return self.name

    @property
    def takes(self) -> tuple[str, ...]:
        """What may go in."""
        return ("text",) if self.sight is None else ("text", "image")

    @functools.cached_property
    def limits(self) -> openai.Limits:
        """What one request may ask for."""
        return openai.Limits(
            self.towers.cfg.vocab, self.towers.context, media=Media(0 if self.sight is None else self.images)
        )

    @functools.cached_property
    def encoder(self) -> PromptEncoder:
        """What child processes need to know."""
        return PromptEncoder(self.tokenizer, self.towers.context, self.towers.cfg.vocab, self.sight)


def dual_model(directory: str | Path, name: str, dtype: Any = None, images: int = 8) -> DualModel:
    """Load a checkpoint that scores images and texts, and compile for one text and one image."""
    family = models.scoring(directory)
    if family is None:
        raise ValueError(f"{directory} scores no images; expected a model of {', '.join(models.SCORES)}")
    model, tok = models.load(directory, dtype=dtype, family=family, stacked=False), text.load(directory)
    towers = DualEncoder(model, pad=tok.ids.get("pad", tok.ids.get("eos", 0)))
    made = DualModel(name, towers, tok, read_sight(directory), time.time(), images)
    towers.texts([text.encode(tok, "a")])
    if made.sight is not None:
        towers.images([pictures.blank(made.sight)])
    return made


async def embeddings(call: Call, model: DualModel) -> web.Response:
    """Embed texts, or the images of a message, each for itself; of unit length unless `use_activation` is false."""
    asked = await call.parse(openai.parse_embeddings, model)
    check_width(asked, model.towers.cfg.width)
    said = asked.prompts
    if isinstance(said, openai.Chat) and said.shown:
        vectors, used = await _images(call, model, said)
    else:
        texts = [_text(said)] if isinstance(said, openai.Chat) else said
        vectors, used = await _texts(call, model, await call.encode(model, texts))
    vectors = unit(vectors) if asked.activation else vectors
    return call.json(body.embeddings(asked.model, list(vectors), asked.base64, used))


async def classify(call: Call, model: DualModel) -> web.Response:
    """Tell of each image of a message how likely each of `candidate_labels` is; scores if `use_activation` is false.

    A label stands in `hypothesis_template` ("This is a photo of {}."), as in transformers' pipeline for this.
    """
    asked = await call.parse(openai.parse_classify, model)
    said = asked.prompts
    if not asked.labels:
        raise APIError("candidate_labels: missing", param="candidate_labels", code="missing_required_parameter")
    if not isinstance(said, openai.Chat) or not said.shown:
        raise APIError("messages: expected images, which are given labels", param="messages")
    texts = await call.encode(model, asked.labels)
    of_texts, used = await _texts(call, model, texts, "candidate_labels")
    of_images, more = await _images(call, model, said)
    rows = await call.in_thread(lambda: model.towers.logits(of_images, of_texts))
    rows = await call.in_thread(lambda: model.towers.probabilities(rows)) if asked.activation else rows
    names = call.body["candidate_labels"]
    return call.json(body.classes(body.meta("classify", asked.model), list(rows), names, used + more))


def check_width(asked: openai.Pooled, width: int) -> None:
    """Refuse embeddings of another size than the model's: APIError."""
    if asked.dimensions not in (None, width):
        raise APIError(f"dimensions: found {asked.dimensions}, this model has {width}", param="dimensions")


def _text(said: openai.Chat) -> str:
    """Give the text of a conversation of one message. APIError for another: these models know no turns."""
    if len(said.messages) != 1 or said.messages[0]["role"] != "user":
        raise APIError("messages: expected one, of the role user: this model embeds no conversations", param="messages")
    found: str = said.messages[0]["content"]
    if not found:
        raise APIError("messages[0].content: expected a text or images, found neither", param="messages[0].content")
    return found


async def _texts(
    call: Call, model: DualModel, ids: Sequence[Sequence[int]], param: str = "input"
) -> tuple[np.ndarray, int]:
    """Embed texts, a batch at a time, and count their tokens; those of labels are kept. APIError for too long ones."""
    most, used = model.towers.context, sum(map(len, ids))
    if longest := max((len(t) for t in ids if len(t) > most), default=0):
        why = f"found a text of {longest} tokens, this model reads at most {most}; shorten it"
        raise APIError(f"{param}: {why}", param=param, code="context_length_exceeded")
    call.admit(used)
    kept = param == "candidate_labels"
    found, new = model.labels.split(ids) if kept else ({}, list(dict.fromkeys(map(tuple, ids))))
    fresh = dict(zip(new, await _batches(call, new, model.towers.rows, model.towers.texts), strict=True))
    if kept:
        model.labels.add(fresh)
    found |= fresh
    return np.stack([found[tuple(t)] for t in ids]), used


async def _images(call: Call, model: DualModel, said: openai.Chat) -> tuple[np.ndarray, int]:
    """Embed the images of one message, and count their patches, as tokens. APIError for a text beside them."""
    if len(said.messages) != 1 or any(p["type"] != "image" for p in said.messages[0]["content"]):
        found = "found a text and images; this model embeds each for itself"
        raise APIError(f"messages: {found}: send one message, of images alone", param="messages")
    seen: list[Any] = [(await pictures.prepared(call, model.name, shown))[0] for shown in said.shown]
    used = sum(len(p.patches) for p in seen)
    call.admit(used)
    return await _batches(call, seen, model.towers.rows, model.towers.images), used


async def _batches(
    call: Call, items: Sequence[tuple[int, ...]] | Sequence[Picture], rows: int, each: Callable[[Any], np.ndarray]
) -> np.ndarray:
    """Embed some at a time in a thread, so that others take their turns between, and a client may leave."""
    found = [each([])]
    for at in range(0, len(items), rows):
        found.append(await call.in_thread(functools.partial(each, items[at : at + rows])))
    return np.concatenate(found)
