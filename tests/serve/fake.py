"""A device without a model: token = f(all tokens that the pages hold), so that a wrong page gives a wrong token."""

import dataclasses
from collections.abc import Callable

import numpy as np

from fdel import serve
from fdel.serve.engine.core import Core, Job
from fdel.serve.engine.packing import Call, Drawn, Out, pack_drawn
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.reply import Reply
from fdel.serve.engine.schedule import Schedule
from fdel.serve.engine.work import Chunk, Request

SIZE, VOCAB, EOS = 4, 50, 0


def following(tokens: list[int]) -> int:
    """The model: any function of all tokens will do, if it also gives EOS sometimes."""
    return hash((7, *tokens)) % VOCAB


def solo(prompt: list[int], limit: int) -> list[int]:
    """What a request gives alone."""
    tokens = list(prompt)
    while len(tokens) < limit and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class Raises:
    """An output whose computation fails when it is read."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("the device failed")


@dataclasses.dataclass
class FakeDevice:
    """What `Device` does, with page contents kept as token ids."""

    drafts: int = 0
    steps: int = 1
    poison: Callable[[list[int]], str | None] = lambda tokens: None  # "admit", "raise", "read" or "nan"
    words: int = -(-VOCAB // 32)
    weights: dict = dataclasses.field(default_factory=lambda: {"": None})

    def __post_init__(self) -> None:
        self.width = max(self.drafts + 1, self.steps)
        self.reset()

    def reset(self) -> None:
        self.pages, self.rows, self.calls, self.wrong, self.broken = {}, {}, [], [], False

    def group(self, adapter: str) -> str:
        return adapter

    def replace(self, adapter: str, new: object, reuse: bool = False) -> None:
        self.weights[adapter] = new

    def execute(self, call: Call) -> None:
        del self.weights[call.adapter]

    def forget(self) -> None:
        """There are no pictures."""

    def divided(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        return [chunks]

    def admit(self, every: list[tuple[Request, object, bool]]) -> None:
        if "admit" in [self.poison(r.tokens) for r, *_ in every]:
            raise RuntimeError("no rows were given")
        for r, _, running in every:
            self.rows[r.row] = [list(r.tokens), r.limit, running]

    def copy(self, copies: list) -> None:
        for source, target in copies:
            self.pages |= {(target, i): self.pages[source, i] for i in range(SIZE) if (source, i) in self.pages}

    def _fail(self, found: list[str | None]) -> None:
        """Break as the rows' faults say, and stay broken until `reset`."""
        before, self.broken = self.broken, self.broken or bool({*found} & {"raise", "read"})
        if before or "raise" in found:
            raise RuntimeError("a step failed")

    def _write(self, r: Request, start: int, tokens: list[int]) -> None:
        for i, t in enumerate(tokens, start):
            self.pages[r.pages[i // SIZE], i % SIZE] = t

    def _draw(self, r: Request) -> int:
        row = self.rows[r.row]
        held = [self.pages[r.pages[i // SIZE], i % SIZE] for i in range(len(row[0]))]
        token = following(held)
        row[0].append(token)
        row[2] = token != EOS and len(row[0]) < row[1]
        return token

    def _out(self, drawn: list[list[int]], faults: list[str | None]) -> Out:
        tokens = np.array([[*new, *[0] * (self.width - len(new))] for new in drawn], np.int32)
        logprobs = np.where(np.array(faults)[:, None] == "nan", np.nan, np.zeros(tokens.shape)).astype(np.float32)
        packed = pack_drawn(
            Drawn(np.array([len(new) for new in drawn], np.int32), tokens, logprobs, logprobs, logprobs)
        )
        return Out(Raises() if "read" in faults else np.asarray(packed), None, None)

    def _compare(self, r: Request, tokens: list[int], masks: dict) -> None:
        """Note a mask that was not made for this token, or was used for several."""
        fits = [masks[r.id][t // 32] >> np.uint32(t % 32) & 1 for t in tokens if r.id in masks]
        if len(fits) > 1 or not all(fits):
            self.wrong.append((r.id, tokens))

    def extend(self, chunks: list[Chunk], masks: dict) -> tuple:
        faults, drawn = [self.poison(self.rows[c.request.row][0]) for c in chunks], []
        self._fail(faults)
        self.calls.append((sum(c.count for c in chunks), 0))
        for c in chunks:
            self._write(c.request, c.start, self.rows[c.request.row][0][c.start : c.start + c.count])
            drawn.append([self._draw(c.request)] if c.last else [])
            self._compare(c.request, drawn[-1], masks)
        return self._out(drawn, faults), list(range(len(chunks)))

    def decode(self, requests: list[Request], masks: dict, draft: bool, many: bool) -> tuple:
        faults, drawn = [], []
        self.calls.append((0, len(requests)))
        for r in requests:
            tokens, _, _ = row = self.rows[r.row]
            new: list[int] = []
            fault = self.poison(tokens)
            most = self.steps if many else 1 + following(tokens[:-1]) % (self.drafts + 1)  # some drafts are right
            while row[2] and len(new) < most:
                self._write(r, len(tokens) - 1, tokens[-1:])
                fault = fault or self.poison(tokens)
                new.append(self._draw(r))
            drawn.append(new)
            faults.append(fault)
            self._compare(r, new, masks)
        self._fail(faults)
        return self._out(drawn, faults), list(range(len(requests)))


def make_core(pages: int = 12, rows: int = 3, budget: int = 6, *, overlap: bool = True, **options) -> Core:
    device = FakeDevice(**options)
    return Core(device, Schedule(Pool(pages, SIZE), rows, budget, 2, device.width), overlap=overlap)


def make_job(id: int, prompt: list[int], room: int = 8, **where) -> Job:
    request = Request(id, list(prompt), len(prompt), len(prompt) + room, **where)
    asked = serve.SamplingParams(max_tokens=room)
    return Job(request, Reply(asked, frozenset([EOS]), room, None), None)


def run(core: Core, most: int = 2000) -> list:
    """Step until nothing is left to do."""
    deltas = []
    for _ in range(most):
        if core.idle:
            return deltas
        deltas += core.step()
    raise RuntimeError(f"still busy after {most} steps")
