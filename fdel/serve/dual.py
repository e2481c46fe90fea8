"""Models of two towers (CLIP, SigLIP): embed texts and images, and tell how likely each text is of an image."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from fdel import ops
from fdel.media.image import Picture
from fdel.models import Model
from fdel.params import unstack

WIDTH = 16  # tokens, for whose multiples programs of texts are compiled
TINY = 1e-12


class DualEncoder:
    """A model that scores images and texts, and its programs, for batches of up to `rows`; each size is compiled once.

    `pad` is the token behind a text, where the model sees any. Threads may share one.
    >>> dual = serve.DualEncoder(models.load(directory, family=models.scoring(directory)))  # doctest: +SKIP
    >>> texts = dual.texts([text.encode(tok, "a photo of a cat")])  # doctest: +SKIP
    >>> images = dual.images([media.sight.prepare(sight, rgb)])  # doctest: +SKIP
    >>> dual.probabilities(dual.logits(images, texts))  # doctest: +SKIP
    """

    def __init__(self, model: Model, *, pad: int = 0, rows: int = 8) -> None:
        family, cfg = model.family, model.cfg
        self.family, self.cfg, self.pad, self.rows, self.params = family, cfg, pad, rows, unstack(model.params)
        self.context: int = cfg.text.max_positions
        jit = lambda f: jax.jit(ops.tracing_once()(f))
        self._texts = jit(lambda p, tokens: family.text_features(p, tokens, cfg))
        self._images = jit(lambda p, values, at: family.image_features(p, ops.Patches(values, at), cfg))
        self._logits = jax.jit(family.logits)
        self._probabilities = jax.jit(family.probabilities)

    def texts(self, texts: Sequence[Sequence[int]]) -> Float[np.ndarray, "N width"]:
        """Embed texts, as tokens that begin and end as the tokenizer says; not normalised. ValueError for too long ones."""
        if longest := [len(t) for t in texts if len(t) > self.context]:
            raise ValueError(f"found texts of {max(longest)} tokens, expected at most {self.context}; cut them")
        return self._batches(texts, self._of_texts)

    def images(self, pictures: Sequence[Picture]) -> Float[np.ndarray, "N width"]:
        """Embed images, as `media.sight.prepare` gives them; not normalised."""
        return self._batches(pictures, self._of_images)

    def logits(
        self, images: Float[np.ndarray, "images width"], texts: Float[np.ndarray, "texts width"]
    ) -> Float[np.ndarray, "images texts"]:
        """Score embeddings of images and of texts, as the model was trained to."""
        few = {k: v for k, v in self.params.items() if not isinstance(v, dict)}  # the scale, and what stands beside it
        padded = [np.pad(x, ((0, _size(len(x), 2**16) - len(x)), (0, 0)), constant_values=1) for x in (images, texts)]
        return np.asarray(self._logits(few, *padded))[: len(images), : len(texts)]

    def probabilities(self, logits: Float[np.ndarray, "images texts"]) -> Float[np.ndarray, "images texts"]:
        """Give the likelihood of each text: of all of them together, or of each by itself, as the model was trained."""
        count = logits.shape[1]
        wide = [(0, _size(n, 2**16) - n) for n in logits.shape]
        return np.asarray(self._probabilities(np.pad(logits, wide, constant_values=-np.inf)))[: len(logits), :count]

    def _batches(self, items: Sequence[Any], each: Any) -> np.ndarray:
        found = [np.zeros((0, self.cfg.width), np.float32)]
        for at in range(0, len(items), self.rows):
            some = items[at : at + self.rows]
            rows = [*some, *[some[0]] * (_size(len(some), self.rows) - len(some))]
            found.append(np.asarray(each(rows)).astype(np.float32)[: len(some)])
        return np.concatenate(found)

    def _of_texts(self, texts: Sequence[Sequence[int]]) -> Any:
        width = -(-max(map(len, texts)) // WIDTH) * WIDTH
        tokens = np.full(
            (len(texts), self.context if self.family.PADDED else min(width, self.context)), self.pad, np.int32
        )
        for row, ids in zip(tokens, texts, strict=True):
            row[: len(ids)] = ids
        return self._texts(self.params, tokens)

    def _of_images(self, pictures: Sequence[Picture]) -> Any:
        return self._images(self.params, *(np.stack([getattr(p, k) for p in pictures]) for k in ("patches", "places")))


def unit(x: Float[np.ndarray, "*rows width"]) -> Float[np.ndarray, "*rows width"]:
    """Give vectors of length 1."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), TINY)


def _size(count: int, most: int) -> int:
    """The size of a program for so many rows: a power of two, or the most."""
    return min(most, 1 << max(0, count - 1).bit_length())
