"""What an engine says of whole texts, without a cache: scores, embeddings, classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from fdel.models import heads
from fdel.models.pooling import Pooling, default_pooling
from fdel.serve.engine.changes import Changes
from fdel.serve.engine.packing import together
from fdel.serve.engine.reply import Score
from fdel.serve.engine.request import TOP, whole


class Reading(Changes):
    """A loop over a core whose device also reads whole texts, several at a time in one row."""

    _device: Any  # the `Device` of the core
    pooling: Pooling | None  # how it embeds
    silent: str | None  # why it writes no text

    def score(self, tokens: Sequence[int], top: int = 0, *, adapter: str = "") -> Score:
        """Tell the log-probability of each token after those before it, and of the `top` likeliest (at most 20)."""
        if not (whole(top) and 0 <= top <= TOP):
            raise ValueError(f"top={top!r}; expected 0 to {TOP}")
        self._device.weights.check(adapter)  # refused first
        if self.silent is not None:
            raise ValueError(self.silent)
        rows, count = self._device.padded(tokens), len(tokens) - 1
        positions = np.arange(rows[0].shape[1], dtype=np.int32)
        out = self.score_rows(rows, np.stack([0 * positions, positions, np.roll(rows[0][0], -1)]), count, TOP, adapter)
        logprobs, ids, best = (np.asarray(x)[:count].tolist() for x in out)
        likely = [dict(zip(i[:top], b[:top], strict=True)) for i, b in zip(ids, best, strict=True)]
        return Score([None, *logprobs], [{}, *likely])

    def score_rows(
        self, rows: tuple[np.ndarray, np.ndarray], targets: np.ndarray, count: int, top: int = 1, adapter: str = ""
    ) -> tuple[Float[Array, " N"], Int[Array, "N top"], Float[Array, "N top"]]:
        """Score the first `count` of `targets`: log-probabilities, and the `top` likeliest with theirs.

        `rows` are tokens int32[B T] and lengths int32[B]; `targets`, int32[3 N], row, position, and the token that may come
        next there. Each new shape compiles a program; what it gives may not be computed yet.
        """
        return self._device.score(rows, targets, count, top, adapter)

    def embed(
        self, tokens: Sequence[int], pool: str | Pooling | None = None, *, adapter: str = ""
    ) -> Float[np.ndarray, " D"]:
        """Give a text's embedding, float32[D]: final hidden states pooled as `pool` or `pooling` says, or the last one.

        A prompt of `pooling` is text, which the tokens begin with already.
        """
        return self.embed_all([tokens], pool, adapter=adapter)[0]

    def embed_all(
        self, texts: Sequence[Sequence[int]], pool: str | Pooling | None = None, *, adapter: str = ""
    ) -> list[Float[np.ndarray, " D"]]:
        """Embed texts, several at a time in one row."""
        how = Pooling((pool,), normalize=False) if isinstance(pool, str) else pool or self.pooling
        how = how or default_pooling(self._device.model)
        if self.head is not None:
            raise ValueError(f"this model has a head for a {self.head} and embeds no text; use classify")
        return [how(x) for x in self._outputs(texts, adapter)]

    @property
    def head(self) -> str | None:
        """The kind of the model's head (`models.heads`), None without one."""
        return heads.kind_of(self._device.weights.like)

    def classify(self, tokens: Sequence[int], *, adapter: str = "") -> Float[np.ndarray, "..."]:
        """Give logits of the model's head, float32: [labels] for a sequence, [T labels] for its tokens.

        ValueError for a model without one.
        """
        return self.classify_all([tokens], adapter=adapter)[0]

    def classify_all(self, texts: Sequence[Sequence[int]], *, adapter: str = "") -> list[Float[np.ndarray, "..."]]:
        """Classify texts, several at a time in one row."""
        if self.head is None:
            raise ValueError("this model has no head that classifies; use embed, score or generate")
        pool = heads.of(self._device.model.family, self.head).pool
        found = self._outputs(texts, adapter)
        return found if pool == "every" else [x[0 if pool == "first" else -1] for x in found]

    def together(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tell which texts, by their numbers, are computed at once."""
        return together(texts, self._device.lengths[-1])

    def _outputs(self, texts: Sequence[Sequence[int]], adapter: str) -> list[Float[np.ndarray, "T N"]]:
        """Compute whole sequences: what the head says of each token, or final hidden states."""
        (params, slot), out = self._device.model_of(adapter), dict[int, np.ndarray]()
        for group in self.together(texts):
            tokens, batch = self._device.row([texts[i] for i in group])
            x = np.asarray(self._device.programs.embed(params, tokens, slot, batch=batch))[0].astype(np.float32)
            parts = np.split(x, np.cumsum([len(texts[i]) for i in group]))  # and the spare end
            out |= zip(group, parts[:-1], strict=True)
        return [out[i] for i in range(len(texts))]
