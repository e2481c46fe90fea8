"""The arrays of one engine: weights, cache and rows, and the programs that change them. Plans are packed here."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import ops
from fdel import params as P
from fdel.models import Model
from fdel.serve.sample import Sampling, sampling_rows
from fdel.serve.schedule import Chunk, Request
from fdel.serve.step import PAGE, Out, compute_dtype, mesh_of, programs

BLOCK = 32  # tokens of one sequence that a prefill computes together; the last block of a chunk is padded
NOWHERE = np.iinfo(np.int32).max  # a page that is out of range


def recurrent(model: Model) -> bool:
    """Tell whether a model keeps recurrent state, which no two sequences can share and no step can take back."""
    spec = model.family.state_spec(model.cfg, pages=1, page=PAGE, rows=1)
    leaves = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, ops.Slots))
    return any(isinstance(x, ops.Slots) for x in leaves)


def sizes(first: int, last: int, factor: int) -> list[int]:
    """List first, first * factor, ... up to and with `last`."""
    out = []
    while first < last:
        out.append(first)
        first *= factor
    return [*out, last]


@dataclass
class Device:
    """What runs on the accelerators. `rows` sequences at a time, of at most `length` tokens, in `pages` pages.

    weights: the parameters of each adapter, "" for none. blocks, batches: the numbers of prefill blocks and of decode
    rows that programs are compiled for. drafts: tokens guessed ahead in `decode`, if it is asked to; by `draft`, then
    always, so that this model's cache has no gaps.
    """

    model: Model
    rows: int
    length: int
    pages: int
    blocks: Sequence[int]
    batches: Sequence[int]
    drafts: int = 0
    draft: Model | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = {name: P.unstack(tree) for name, tree in self.adapters.items()}
        self.weights = {"": P.unstack(self.model.params), **listed}
        mesh, small = mesh_of(self.model.params), self.draft
        net = None if small is None else (small.family, small.cfg)
        self.small = () if small is None else (P.unstack(small.params),)
        self.programs = programs(self.model.family, self.model.cfg, mesh, net)
        put = partial(jax.device_put, device=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
        words = -(-self.model.cfg.vocab // 32)
        self.unmasked = {n: put(np.zeros((n, words), np.uint32)) for n in {*self.blocks, *self.batches}}
        self.table = np.full((self.rows, -(-self.length // PAGE)), NOWHERE, np.int32)
        self.known = [0] * self.rows  # pages of each row that the table has
        self.state: ops.State = None
        self.held: Any = None
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache and empty rows."""
        self.state = self.held = None  # free the old ones first
        options = dict(rows=self.rows, length=self.table.shape[1] * PAGE, pages=self.pages)
        dtypes = tuple(compute_dtype(w) for w in (self.weights[""], *self.small))
        self.state, self.held = self.programs.begin(**options, dtypes=dtypes)

    def admit(self, r: Request, sampling: Sampling) -> None:
        """Give a request its row."""
        self.table[r.row], self.known[r.row] = NOWHERE, 0
        tokens = np.zeros(self.table.shape[1] * PAGE, np.int32)
        tokens[: len(r.tokens)] = r.tokens
        self.held = self.programs.admit(self.held, np.int32(r.row), tokens, np.int32(len(r.tokens)), sampling)

    def extend(self, chunks: Sequence[Chunk], masks: Mapping[int, np.ndarray]) -> tuple[Out, list[int]]:
        """Compute chunks of one adapter: (what was drawn, the index there of each). Masks are by request id."""
        count = next(n for n in self.blocks if n >= sum(-(-c.count // BLOCK) for c in chunks))
        plan, at, end = self._blank(count, 4), [], 0
        for c in chunks:
            starts = np.arange(c.start, c.start + c.count, BLOCK)
            first, end = end, end + len(starts)
            plan[first:end, 0], plan[first:end, 1] = c.request.row, starts
            plan[first:end, 2] = np.minimum(BLOCK, c.start + c.count - starts)
            plan[end - 1, 3] = c.last + 2 * (c.request.id in masks)
            plan[first:end, 4:] = self._pages(c.request)
            at.append(end - 1)
        requests = [c.request for c in chunks]
        return self._run(self.programs.extend, requests, plan, at, masks, block=BLOCK), at

    def decode(
        self, requests: Sequence[Request], masks: Mapping[int, np.ndarray], draft: bool
    ) -> tuple[Out, list[int]]:
        """Continue sequences of one adapter by a token, or by some with drafts: as `extend` returns."""
        n = len(requests)
        plan, at = self._blank(next(b for b in self.batches if b >= n), 2), list(range(n))
        for r in requests:
            self._pages(r)
        plan[:n, 0], plan[:n, 1] = [r.row for r in requests], [r.id in masks for r in requests]
        plan[:n, 2:] = self.table[plan[:n, 0]]
        drafts = self.drafts if draft or self.draft else 0
        return self._run(self.programs.decode, requests, plan, at, masks, drafts=drafts), at

    def warm_up(self) -> None:
        """Compile every program that steps may need, several at a time, and run each once over nothing."""
        weights, some = next(iter(self.weights.values())), self.unmasked
        calls = [(self.programs.extend, self._blank(n, 4), some[n], {"block": BLOCK}) for n in self.blocks]
        drafts = {0, self.drafts} if self.draft is None else {self.drafts}
        calls += [
            (self.programs.decode, self._blank(n, 2), some[n], {"drafts": d}) for n in self.batches for d in drafts
        ]
        with ThreadPoolExecutor() as threads:  # a run takes what was compiled ahead from the jitted function's cache
            compiling = lambda c: (
                c[0].lower((weights, *self.small), self.state, self.held, c[1], c[2], **c[3]).compile()
            )
            list(threads.map(compiling, calls))
        for adapted in self.weights.values():
            for program, plan, masks, static in calls:
                self.state, self.held, _ = program((adapted, *self.small), self.state, self.held, plan, masks, **static)
        one = sampling_rows([], [], [], [], vocab=self.model.cfg.vocab, rows=1)
        tokens = np.zeros(self.table.shape[1] * PAGE, np.int32)
        self.held = self.programs.admit(self.held, np.int32(self.rows), tokens, np.int32(0), one)
        jax.block_until_ready(self.held)

    def _blank(self, n: int, columns: int) -> np.ndarray:
        """A plan of n rows that do nothing."""
        plan = np.full((n, columns + self.table.shape[1]), NOWHERE, np.int32)
        plan[:, :columns] = 0
        plan[:, 0] = self.rows
        return plan

    def _pages(self, r: Request) -> np.ndarray:
        """The page table's row of a running request, brought up to date."""
        known = self.known[r.row]
        if known < len(r.pages):
            self.table[r.row, known : len(r.pages)] = r.pages[known:]
            self.known[r.row] = len(r.pages)
        return self.table[r.row]

    def _run(
        self, program: Any, requests: Sequence[Request], plan: np.ndarray, at: list[int], masks: Any, **static: Any
    ) -> Out:
        mask = self.unmasked[len(plan)]
        if any(r.id in masks for r in requests):
            mask = np.zeros(mask.shape, np.uint32)
            for i, r in zip(at, requests, strict=True):
                mask[i] = masks.get(r.id, 0)
        weights = (self.weights[requests[0].adapter], *self.small)
        self.state, self.held, out = program(weights, self.state, self.held, plan, mask, **static)
        out.drawn.copy_to_host_async()
        return out
