"""The programs of a Whisper model: what transcriptions ask for, computed for the windows of several sounds at once."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fdel import ops
from fdel.models import Model
from fdel.params import unstack
from fdel.serve.hear import decode
from fdel.serve.hear.tokens import Tokens
from fdel.serve.hear.windows import Detect, Draft, Follow, Hear, Write

WIDTHS = (8, 64)  # tokens of prompts; longer ones have the width of the longest


class Listener:
    """A Whisper model and its programs, for up to `rows` windows; each size is compiled once.

    ValueError for tokens that its vocabulary does not have.
    """

    def __init__(self, model: Model, tokens: Tokens, *, rows: int = 4) -> None:
        cfg = model.cfg
        times = tokens.first_time + cfg.states
        if max(times, tokens.start, tokens.end) > cfg.vocab:
            raise ValueError(f"found tokens up to {times}, beyond the model's vocabulary of {cfg.vocab}")
        self.cfg, self.tokens, self.rows, self.params = cfg, tokens, rows, unstack(model.params)
        family, whole = model.family, lambda p: Model(model.family, cfg, p)
        jit = lambda f, **how: jax.jit(ops.tracing_once()(f), **how)
        self._hear = jit(lambda p, x: family.remember(p, family.encode(p, x, cfg)))
        self._begin = jit(lambda p, memory, prompt, how: decode.begin(whole(p), memory, prompt, how, tokens))
        write = lambda p, memory, slots, most: decode.write(whole(p), memory, slots, most, tokens)
        self._write = jit(write, donate_argnums=2)
        self.pick = jax.jit(decode.pick)
        self._detect = jit(lambda p, memory, rows: decode.detect(whole(p), memory, rows, tokens), static_argnums=2)
        self._follow = jit(lambda p, memory, said: decode.follow(whole(p), memory, said, tokens))

    def answer(self, asks: Sequence[Any]) -> list[Any]:
        """Compute what questions of one kind ask for, all but `Write`; one program for each number of them."""
        kinds: dict[type, Any] = {Hear: self.hear, Detect: self.detect, Follow: self.follow}
        return kinds[type(asks[0])](asks)

    def hear(self, asks: Sequence[Hear]) -> list[Any]:
        """Encode windows."""
        memory = self._hear(self.params, np.stack([a.features for a in asks]))
        return [jax.tree.map(lambda x, i=i: x[i : i + 1], memory) for i in range(len(asks))]

    def detect(self, asks: Sequence[Detect]) -> list[np.ndarray]:
        """Find languages."""
        return list(np.asarray(self._detect(self.params, _joined(asks), len(asks))))

    def begin(self, asks: Sequence[Write]) -> tuple[Any, decode.Slots]:
        """Give transcripts their slots: the windows' memory and the slots."""
        most = self.cfg.max_positions
        width = next((w for w in WIDTHS if all(len(a.prompt) <= w <= most for a in asks)), most)
        prompt: Any = np.zeros((len(asks), width), np.int32)
        for row, a in zip(prompt, asks, strict=True):
            row[: len(a.prompt)] = a.prompt
        each: Any = lambda f, dtype=np.int32: np.array([f(a) for a in asks], dtype)
        said = decode.Prompt(prompt, each(lambda a: len(a.prompt)), each(lambda a: a.start))
        how = decode.How(
            each(lambda a: a.limit), each(lambda a: a.times, bool), each(lambda a: a.temperature, np.float32),
            each(lambda a: a.seed),
        )  # fmt: skip
        memory = _joined(asks)
        return memory, self._begin(self.params, memory, said, how)

    def write(self, memory: Any, slots: decode.Slots, most: int) -> tuple[decode.Slots, dict[int, Draft]]:
        """Write `most` tokens in each slot, or until a transcript ends: the slots, and drafts of those that are done."""
        slots = self._write(self.params, memory, slots, most)
        facts = slots.done, slots.tokens, slots.written.size, slots.logprob, slots.no_speech
        rows = enumerate(zip(*jax.device_get(facts), strict=True))
        return slots, {i: Draft(t[:n].tolist(), float(p), float(s)) for i, (done, t, n, p, s) in rows if done}

    def follow(self, asks: Sequence[Follow]) -> list[np.ndarray]:
        """Give the attention of tokens to the sound."""
        most = self.cfg.max_positions
        width = min(most, -(-max(len(a.said) for a in asks) // 64) * 64)
        said: Any = np.full((len(asks), width), self.tokens.end, np.int32)
        for row, a in zip(said, asks, strict=True):
            row[: len(a.said)] = a.said
        found = np.asarray(self._follow(self.params, _joined(asks), said))
        return [found[:, i, : len(a.said)] for i, a in enumerate(asks)]


def _joined(asks: Sequence[Any]) -> Any:
    """Put the memories of several sounds into one batch."""
    if len(asks) == 1:
        return asks[0].memory
    return jax.tree.map(lambda *x: jax.numpy.concatenate(x), *(a.memory for a in asks))
