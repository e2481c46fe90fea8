"""How a device sees: pictures go through the model's tower once, and what it gives stays in an array of entries."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdel.media import sight as sights
from fdel.media.hearing import states
from fdel.serve.engine.compiling import BLOCK, Compiling
from fdel.serve.engine.packing import NOWHERE, Call
from fdel.serve.engine.pictures import Holders, Key, Medium, PromptMedia, Size
from fdel.serve.engine.step import encoded
from fdel.serve.engine.work import Chunk

KEPT = 8  # prompts per row whose pictures stay encoded, where there is memory
SIDE = 336  # pixels of the picture for whose size the tower is compiled first


class Seeing(Compiling):
    """The part of a `Device` that has pictures encoded before the calls that show them."""

    def _open_eyes(self, sight: Any, most: int) -> None:
        """Make room for what is encoded: `most` bytes, or `KEPT` times what all rows could show at once.

        ValueError for a model of text.
        """
        self.sight, self.example, self.like, self.holders, self.entries = sight, None, None, Holders(0), None
        family, self.turned, self.whole = self.model.family, False, False
        if sight is None:
            return
        if not hasattr(family, "encode"):
            raise ValueError(f"sight is given, but {family.MODEL_TYPE} reads text alone; leave it out")
        self.turned, self.whole = family.hidden.rotary, family.hidden.ahead(self.model.cfg)
        picture = sights.prepare(sight, np.zeros((SIDE, SIDE, 3), np.uint8))
        self.example = len(picture.patches), picture.patches.shape[1]
        self.like = encoded(family, self.model.cfg, self.weights[""], self.example)
        each = math.prod(self.like.shape) * self.like.dtype.itemsize
        self.holders = Holders(max(1, min(most // each, KEPT * self.rows * self.length)))

    def _begin_to_see(self) -> None:
        """Make the entries."""
        if self.like is not None:
            like = self._entries_like()
            self.entries = jax.device_put(jnp.zeros(like.shape, like.dtype), like.sharding)

    def _entries_like(self) -> jax.ShapeDtypeStruct:
        """Shape the entries, which are not there while the device sleeps."""
        shape = (self.holders.total, *self.like.shape)
        return jax.ShapeDtypeStruct(shape, self.like.dtype, sharding=self.weights.everywhere)

    def lacking(self, media: PromptMedia | None) -> set[Size]:
        """Name the programs that are not compiled of those that a prompt's pictures and sounds need."""
        sizes = {i.size(self.example[0]) for i in media.items} if media is not None and self.example else set()
        return {(name, n) for name, n in sizes if n not in self.usable.get(name, ())}

    def _nowhere(self, values: np.ndarray) -> np.ndarray:
        """Make what names the entries of a picture's patches, or of a sound's features: as yet none."""
        heard = values.ndim == 3
        count = len(values) * int(states(np.array(values.shape[2]))) if heard else self.sight.count(len(values))
        return np.full(count, NOWHERE, np.int32)

    def _blank_medium(self, name: str, n: int) -> tuple[np.ndarray, ...]:
        """Make what the program of a size takes, of nothing."""
        s, (_, numbers) = self.sight.sound, self.example or (0, 0)
        shape, places = ((n, s.bins, s.frames), (n,)) if name == "hear" else ((n, numbers), (n, 3))
        values = np.zeros(shape, np.float32)
        return values, np.zeros(places, np.int32), self._nowhere(values)

    def check_media(self, media: Any, prompt: Sequence[int]) -> None:
        """Raise ValueError for what a prompt cannot show."""
        if not isinstance(media, PromptMedia):
            raise ValueError(
                f"media holds a {type(media).__name__}; expected PromptMedia, see serve.prompt_media, or None"
            )
        if self.example is None:
            raise ValueError(
                "this engine reads text alone; of a model that sees, give it sight=media.sight.read(folder)"
            )
        if len(media.index) != len(prompt):
            raise ValueError(f"the prompt has {len(prompt)} tokens, its media {len(media.index)}; they must not be cut")
        if media.rotary is not None and not self.turned:
            raise ValueError("rotary is given, but the model turns tokens by their positions; leave it out")
        seen = [i.values.shape[1] for i in media.items if not i.heard]
        if wrong := [n for n in seen if n != self.example[1]]:
            raise ValueError(f"a picture has patches of {wrong[0]} numbers, expected {self.example[1]}")
        heard, s = [i.values.shape[1:] for i in media.items if i.heard], self.sight.sound
        if heard and (s is None or {*heard} != {(s.bins, s.frames)}):
            expected = "a model that hears" if s is None else f"{s.bins} bins of {s.frames} frames"
            raise ValueError(f"a sound has chunks of bins and frames {heard[0]}, expected {expected}")
        if not self.holders.fits((("", i.digest), i) for i in media.items):
            room = f"{self.holders.total} entries; show fewer or smaller ones, or give the engine more media_bytes"
            raise ValueError(f"the pictures of the prompt have {media.starts[-1]} entries, there is room for {room}")

    def forget(self) -> None:
        """Encode pictures again: weights have changed, or what was encoded is lost."""
        self.holders.forget()

    def divided(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Divide chunks among calls, so that the pictures of each have room at once."""
        calls: list[list[Chunk]] = [[]]
        for c in chunks:
            if calls[-1] and not self.holders.fits(key for o in (*calls[-1], c) for key in self._shown(o)):
                calls.append([])
            calls[-1].append(c)
        return calls

    def _shown(self, c: Chunk) -> list[tuple[Key, Medium]]:
        """The pictures of a chunk, with their keys."""
        r = c.request
        shown = [] if r.media is None else [r.media.items[i] for i in r.media.shown(c.start, c.start + c.count)]
        return [((r.adapter, i.digest), i) for i in shown]

    def _see(self, chunks: Sequence[Chunk], lines: int) -> tuple[np.ndarray, np.ndarray]:
        """Encode the pictures of chunks, unless they are: what each token of their lines sees."""
        new = self.holders.hold(key for c in chunks for key in self._shown(c))
        for done, (key, medium, which) in enumerate(new):
            values, places = medium.padded(self.example[0] if self.example else 0)
            given = self._nowhere(values)
            given[: len(which)] = which
            try:
                self.execute(Call("encode", (values, places, given, np.int32(self.weights.slot(key[0]))), key[0]))
            except Exception:
                self.holders.drop(k for k, *_ in new[done:])
                raise
        index, turns = np.full((lines, BLOCK), -1, np.int32), np.zeros((lines, BLOCK, 3), np.int32)
        line = 0
        for c in chunks:
            media, (start, stop) = c.request.media, (c.start, c.start + c.count)
            size = -(-c.count // BLOCK)
            mine, turned = index[line : line + size].reshape(-1), turns[line : line + size].reshape(-1, 3)
            line += size
            if self.turned:
                turned[: c.count] = np.arange(start, stop)[:, None] if media is None else media.turns(start, stop)
            for i in () if media is None else media.shown(start, stop):
                local = media.index[start:stop] - media.starts[i]
                here = np.flatnonzero((local >= 0) & (local < media.items[i].entries))  # `local` ends with the prompt
                mine[here] = self.holders.held[c.request.adapter, media.items[i].digest][local[here]]
        return index, turns
