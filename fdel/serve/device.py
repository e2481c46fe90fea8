"""The arrays of one engine: weights, cache and rows, and the programs that change them. Plans are packed here."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from fdel import ops
from fdel.models import Model
from fdel.serve.request import length_limit
from fdel.serve.sample import Sampling, sampling_rows
from fdel.serve.schedule import Chunk, Request
from fdel.serve.settings import LENGTH, Settings
from fdel.serve.step import PAGE, Out, compute_dtype, programs
from fdel.serve.weights import Weights, owned

BLOCK = 32  # tokens of one sequence that a prefill computes together; the last block of a chunk is padded
NOWHERE = np.iinfo(np.int32).max  # a page that is out of range


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

    weights: the parameters of each adapter, "" for none; `slots` adapters of a `rank` have room from the start, and none
    may exceed `most_rank`. blocks, batches: the numbers of prefill blocks and of decode rows that programs are compiled
    for. drafts: tokens guessed ahead in `decode`, if it is asked to; by `draft`, then always, so that this model's cache
    has no gaps. kv: the cache's format, "int8" or "fp8"; None: the activations' dtype. steps: tokens that `decode` adds
    where it may add `many`.
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
    kv: str | None = None
    slots: int = 0
    rank: int = 0
    steps: int = 1
    most_rank: int = 64
    fixed: ClassVar[str | None] = None  # why weights stay as they are and nothing is scored, where that is so

    def __post_init__(self) -> None:
        self.weights = Weights(self.model, self.adapters, self.slots, self.rank, self.most_rank)
        mesh, small = self.weights.mesh, self.draft
        net = None if small is None else (small.family, small.cfg)
        self.small = () if small is None else (owned(small.params),)
        # What was given is not held: weights come and go.
        self.model, self.adapters, self.draft = self.model._replace(params=None), {}, None
        self.programs = programs(self.model.family, self.model.cfg, mesh, net, self.kv)
        put = partial(jax.device_put, device=self.weights.everywhere)
        self.words = -(-self.model.cfg.vocab // 32)  # of a mask
        self.unmasked = {n: put(np.zeros((n, self.words), np.uint32)) for n in {*self.blocks, *self.batches}}
        self.table = np.full((self.rows, -(-self.length // PAGE)), NOWHERE, np.int32)
        self.known = [0] * self.rows  # pages of each row that the table has
        self.lengths = sizes(PAGE, self.length, 2)  # to which sequences are padded that are read as a whole
        self.usable = {"extend": list(self.blocks), "decode": list(self.batches)}  # the sizes that plans may have
        self.left: list[tuple[str, int, list[Callable[[], Any]]]] = []  # sizes to compile, and how
        self.state: ops.State = None
        self.held: Any = None
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache and empty rows."""
        self.launch("begin")

    def warm_up(self, least: bool = False) -> None:
        """Compile every program that steps may need, several at a time; or the `least` with which all steps can run."""
        self.launch("warm_up", least=int(least))

    def complete(self) -> None:
        """Compile what `warm_up` left, while another thread runs steps: each program is used once it is there."""
        while self.left and threading.main_thread().is_alive():  # who leaves the process waits for one program at most
            name, size, compilers = self.left[0]
            for compile in compilers:
                compile()
            self.usable[name] = sorted([*self.usable.get(name, ()), size])
            self.left = self.left[1:]

    def close(self) -> None:
        """Leave what is not compiled yet; see also `serve.follow`."""
        self.left = []

    def launch(self, name: str, arrays: Sequence[Any] = (), adapter: str = "", **static: int) -> Any:
        """Change the arrays here, by host arrays alone: what other processes need to know to do the same.

        "extend" and "decode" take a plan, and masks if there are any; "admit" what the program takes after its rows.
        """
        if name == "begin":
            self._begin()
        elif name == "warm_up":
            self._warm_up(**static)
        elif name == "admit":
            self.held = self.programs.admit(self.held, *arrays)
        else:
            program = {"extend": self.programs.extend, "decode": self.programs.decode}[name]
            plan, *masks = arrays
            weights, mask = (self.weights.call(adapter), *self.small), masks[0] if masks else self.unmasked[len(plan)]
            self.state, self.held, out = program(weights, self.state, self.held, plan, mask, **static)
            return out
        return None

    def _begin(self) -> None:
        self.state = self.held = None  # free the old ones first
        options = dict(rows=self.rows, length=self.table.shape[1] * PAGE, pages=self.pages)
        dtypes = (self.weights.dtype, *map(compute_dtype, self.small))
        made = self.programs.begin(**options, dtypes=dtypes)
        if self.weights.mesh is None:  # committed, as every step returns them: else the second step would compile again
            made = jax.device_put(made, self.weights.everywhere)
        self.state, self.held = made

    def admit(self, r: Request, sampling: Sampling) -> None:
        """Give a request its row."""
        self.table[r.row], self.known[r.row] = NOWHERE, 0
        tokens = np.zeros(self.table.shape[1] * PAGE, np.int32)
        tokens[: len(r.tokens)] = r.tokens
        slot = np.int32(self.weights.slot(r.adapter))
        self.launch("admit", (np.int32(r.row), tokens, np.int32(len(r.tokens)), sampling, slot))

    def group(self, adapter: str) -> str:
        """Name the calls that an adapter's requests can be in: equal for all that share the base's arrays."""
        return adapter if self.weights.slot(adapter) < 0 else ""

    def extend(self, chunks: Sequence[Chunk], masks: Mapping[int, np.ndarray]) -> tuple[Out, list[int]]:
        """Compute chunks of one group of adapters: (what was drawn, the index there of each). Masks are by request id."""
        count = next(n for n in self.usable["extend"] if n >= sum(-(-c.count // BLOCK) for c in chunks))
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
        return self._run("extend", requests, plan, at, masks, block=BLOCK), at

    def decode(
        self, requests: Sequence[Request], masks: Mapping[int, np.ndarray], draft: bool, many: bool = False
    ) -> tuple[Out, list[int]]:
        """Continue sequences of one group of adapters by a token, with drafts or if `many` by some: as `extend` returns."""
        n = len(requests)
        plan, at = self._blank(next(b for b in self.usable["decode"] if b >= n), 2), list(range(n))
        for r in requests:
            self._pages(r)
        plan[:n, 0], plan[:n, 1] = [r.row for r in requests], [r.id in masks for r in requests]
        plan[:n, 2:] = self.table[plan[:n, 0]]
        drafts = self.drafts if draft or self.small else 0
        return self._run("decode", requests, plan, at, masks, drafts=drafts, steps=self.steps if many else 1), at

    def read(self, name: str, tokens: Sequence[int], adapter: str) -> list[np.ndarray]:
        """Run "score" or "embed" over a sequence without a cache: what it gives for each token."""
        padded = np.zeros(next(n for n in self.lengths if n >= len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        length, slot = np.int32(len(tokens)), np.int32(self.weights.slot(adapter))
        out = getattr(self.programs, name)(self.weights.call(adapter), padded, length, slot)
        return [np.asarray(x)[: len(tokens)] for x in jax.tree.leaves(out)]

    def _warm_up(self, least: int) -> None:
        every = [("extend", n) for n in reversed(self.blocks)] + [("decode", n) for n in reversed(self.batches)]
        if self.fixed is None:
            every += [(name, n) for n in self.lengths for name in ("score", "embed")]
        sized = [(name, n, self._compilers(name, n)) for name, n in every]
        largest = {"extend": self.blocks[-1], "decode": self.batches[-1]}
        self.left = [(name, n, c) for name, n, c in sized if least and n != largest.get(name)]
        now = [c for c in sized if c not in self.left]
        self.usable = {name: sorted(n for kind, n, _ in now if kind == name) for name in largest}
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda compile: compile(), (c for _, _, compilers in now for c in compilers)))
        # One run over nothing, so that memory and threads are there.
        n, drafts = self.batches[-1], self.drafts if self.small else 0
        args = (self.weights.call(""), *self.small), self.state, self.held, self._blank(n, 2), self.unmasked[n]
        self.state, self.held, _ = self.programs.decode(*args, drafts=drafts, steps=1)
        one = sampling_rows([], [], [], [], vocab=self.model.cfg.vocab, rows=1)
        tokens = np.zeros(self.table.shape[1] * PAGE, np.int32)
        self.held = self.programs.admit(self.held, np.int32(self.rows), tokens, np.int32(0), one, np.int32(-1))
        jax.block_until_ready(self.held)

    def _compilers(self, name: str, n: int) -> list[Callable[[], Any]]:
        """What compiles a size: a function for each program. The jitted function's next call of that size finds it."""
        program: Any = getattr(self.programs, name)
        if name in ("score", "embed"):
            one, row = np.int32(1), np.zeros(n, np.int32)
            return [partial(lambda p: program.lower(p, row, one, one).compile(), p) for p in self.weights.calls()]
        if name == "extend":
            plan, ways = self._blank(n, 4), [{"block": BLOCK}]
        else:
            drafted = {(0, 1), (self.drafts, 1), (0, self.steps)} if not self.small else {(self.drafts, 1)}
            plan, ways = self._blank(n, 2), [{"drafts": drafts, "steps": steps} for drafts, steps in drafted]
        # Shapes alone: steps that run meanwhile replace these arrays.
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        state, held = jax.tree.map(shape, (self.state, self.held))
        args = [((adapted, *self.small), state, held, plan, self.unmasked[n]) for adapted in self.weights.calls()]
        return [partial(lambda a, w: program.lower(*a, **w).compile(), a, w) for a in args for w in ways]

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
        self, name: str, requests: Sequence[Request], plan: np.ndarray, at: list[int], masks: Any, **static: int
    ) -> Out:
        arrays = [plan]
        if any(r.id in masks for r in requests):
            arrays.append(np.zeros(self.unmasked[len(plan)].shape, np.uint32))
            for i, r in zip(at, requests, strict=True):
                arrays[1][i] = masks.get(r.id, 0)
        out = self.launch(name, arrays, requests[0].adapter, **static)
        out.drawn.copy_to_host_async()
        return out


def make_device(
    model: Model,
    settings: Settings,
    adapters: Mapping[str, Any] | None = None,
    draft: Model | None = None,
    make: Callable[..., Device] = Device,
) -> Device:
    """Make the device of an engine with these settings; processes that follow one make the same."""
    s, limit = settings, length_limit(model, settings.max_length)
    length = min(LENGTH, (s.pages or LENGTH) * PAGE) if limit == math.inf else int(limit)
    width = -(-length // PAGE)
    pages = s.pages or max(width, s.rows * min(width, 1024 // PAGE))
    blocks, batches = sizes(2, max(2, -(-s.budget // BLOCK)), 2), s.batches or sizes(1, s.rows, 8)
    return make(
        model, s.rows, length, pages, blocks, batches, s.drafts, draft,
        adapters or {}, s.kv_cache_dtype, s.max_loras, s.max_lora_rank or 16, s.decode_steps, s.lora_rank,
    )  # fmt: skip
