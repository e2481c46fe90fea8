"""The arrays of one engine: weights, cache and rows, and the programs that change them."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from fdel import ops
from fdel.models import Model
from fdel.ops.platform import target
from fdel.serve.engine import packing
from fdel.serve.engine.packing import NOWHERE, Call, Out
from fdel.serve.engine.request import TOP, check_prompt, length_limit
from fdel.serve.engine.sampling import Sampling, sampling_rows
from fdel.serve.engine.settings import LENGTH, Settings
from fdel.serve.engine.step import PAGE, compute_dtype, programs
from fdel.serve.engine.weights import Weights, owned
from fdel.serve.engine.work import Chunk, Request

BLOCK = 32  # tokens of one sequence that a prefill computes together; the last block of a chunk is padded
COMMON_PAGES = 1024 // PAGE  # pages of a row by default, if a sequence may have more


def sizes(first: int, last: int, factor: int) -> list[int]:
    """List first, first * factor, ... up to and with `last`."""
    out = []
    while first < last:
        out.append(first)
        first *= factor
    return [*out, last]


class Device:
    """What runs on the accelerators: `rows` sequences at a time, of at most `length` tokens, in `pages` pages.

    Programs are compiled for some numbers of prefill blocks (`blocks`) and of decode rows (`batches`). `draft` is a smaller
    model that guesses `settings.drafts` tokens at each decode, so that its own cache has no gaps; without it they are
    guessed from earlier tokens, in the steps that ask for it. Processes that follow one make the same `Device`.
    """

    fixed: ClassVar[str | None] = None  # why weights stay as they are and nothing is scored, where that is so

    def __init__(
        self, model: Model, settings: Settings, adapters: Mapping[str, Any] | None = None, draft: Model | None = None, *,
        writes: bool = True,
    ):  # fmt: skip
        s, limit = settings, length_limit(model, settings.max_length)
        self.length = min(LENGTH, (s.pages or LENGTH) * PAGE) if limit == math.inf else int(limit)
        width = -(-self.length // PAGE)
        self.rows, self.pages = s.rows, s.pages or max(width, s.rows * min(width, COMMON_PAGES))
        self.blocks, self.batches = sizes(2, max(2, -(-s.budget // BLOCK)), 2), s.batches or sizes(1, s.rows, 8)
        self.drafts, self.steps = s.drafts, s.decode_steps
        self.writes = writes  # else whole sequences are all that it computes
        self.width = max(s.drafts + 1, s.decode_steps)  # tokens that a step adds to a sequence at most
        self.weights = Weights(model, adapters or {}, s.max_loras, s.max_lora_rank or 16, s.lora_rank)
        self.model = model._replace(params=None)  # what was given is not held: weights come and go
        self.small = () if draft is None else (owned(draft.params),)
        net = None if draft is None else (draft.family, draft.cfg)
        kernels = tuple(sorted(s.kernels.items()))
        self.programs = programs(model.family, model.cfg, self.weights.mesh, net, s.kv_cache_dtype, kernels)
        self.words = -(-model.cfg.vocab // 32)  # of a mask
        put = partial(jax.device_put, device=self.weights.everywhere)
        self.unmasked = {n: put(np.zeros((n, self.words), np.uint32)) for n in {*self.blocks, *self.batches}}
        self.table = np.full((self.rows, width), NOWHERE, np.int32)
        self.known = [0] * self.rows  # pages of each row that the table has
        self.lengths = sizes(PAGE, self.length, 2)  # to which sequences are padded that are scored as a whole
        self.apart = target() == "gpu"  # whose kernel knows one sequence per row: a text alone has its own program
        self.usable = {"extend": list(self.blocks), "decode": list(self.batches)}  # the sizes that plans may have
        self.uncompiled: list[tuple[str, int, list[Callable[[], Any]]]] = []  # program, size, and what compiles it
        self.state: Any = None  # an `ops.State` for each model
        self.sequences: Any = None  # `Rows`
        self.reset()

    # ---- what changes the arrays ----

    def execute(self, call: Call) -> Out | None:
        """Change the arrays, by host arrays alone: the one way to do it, so that other processes can do the same.

        "extend" and "decode" take a packed plan, and masks if there are any; "copy" packed copies; "admit" the row, its
        tokens, their number, whether decode can continue it, the slot of its adapter, and the leaves of its `Sampling`.
        """
        if call.name == "begin":
            self._begin()
        elif call.name == "warm_up":
            self._warm_up(**call.static)
        elif call.name == "sleep":
            self.state = self.sequences = None
        elif call.name == "admit":
            *known, slot = call.arrays[:5]
            self.sequences = self.programs.admit(self.sequences, *known, Sampling(*call.arrays[5:]), slot)
        elif call.name == "copy":
            self.state = self.programs.copy(self.state, *call.arrays)
        else:
            plan, *masks = call.arrays
            weights = (self.weights.call(call.adapter), *self.small)
            mask = self.unmasked[len(plan)]
            if masks:  # where that one is, else it would compile again; every process has the whole
                mask = jax.make_array_from_callback(mask.shape, mask.sharding, lambda part: masks[0][part])
            step = getattr(self.programs, call.name)
            self.state, self.sequences, out = step(weights, self.state, self.sequences, plan, mask, **call.static)
            return out
        return None

    def reset(self) -> None:
        """Start with an empty cache and empty rows."""
        self.execute(Call("begin"))

    def sleep(self) -> None:
        """Free cache and rows, which `reset` makes again."""
        self.execute(Call("sleep"))

    def warm_up(self, least: bool = False) -> None:
        """Compile every program that steps may need, several at a time; or the `least` with which all steps can run.

        RuntimeError while there is no cache.
        """
        if self.writes and self.state is None:
            raise RuntimeError("the engine sleeps; call wake() before start()")
        self.execute(Call("warm_up", static={"least": int(least)}))

    def admit(self, r: Request, sampling: Sampling, running: bool) -> None:
        """Give a request its row; it is `running` if all but its newest token are in the cache, so that decode is next."""
        self.table[r.row], self.known[r.row] = NOWHERE, 0
        tokens = np.zeros(self.table.shape[1] * PAGE, np.int32)
        tokens[: len(r.tokens)] = r.tokens
        slot = np.int32(self.weights.slot(r.adapter))
        known = np.int32(r.row), tokens, np.int32(len(r.tokens)), np.bool_(running)
        self.execute(Call("admit", [*known, slot, *jax.tree.leaves(sampling)]))

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy pages: from which to which, in their order."""
        self.execute(Call("copy", [packing.pack_copies(copies, self.rows)]))

    def group(self, adapter: str) -> str:
        """Name the calls that an adapter's requests can be in: equal for all that share the base's arrays."""
        return adapter if self.weights.slot(adapter) < 0 else ""

    def extend(self, chunks: Sequence[Chunk], masks: Mapping[int, np.ndarray]) -> tuple[Out, list[int]]:
        """Compute chunks of one group of adapters: (what was drawn, the line there of each). Masks are by request id."""
        parts: list[packing.Extend] = []
        lines: list[int] = []
        for c in chunks:
            start = np.arange(c.start, c.start + c.count, BLOCK)
            final = np.arange(len(start)) == len(start) - 1
            draws, masked = final & c.last, final & (c.request.id in masks)
            row, pages = np.full(len(start), c.request.row), np.tile(self._pages(c.request), (len(start), 1))
            length = np.minimum(BLOCK, c.start + c.count - start)
            parts.append(packing.Extend(row, start, length, draws, masked, pages))
            lines.append((lines[-1] if lines else -1) + len(start))
        plan = packing.Extend(*map(np.concatenate, zip(*parts, strict=True)))
        return self._run("extend", [c.request for c in chunks], plan, lines, masks, block=BLOCK), lines

    def decode(
        self, requests: Sequence[Request], masks: Mapping[int, np.ndarray], draft: bool, many: bool = False
    ) -> tuple[Out, Sequence[int]]:
        """Continue sequences of one group of adapters, by a token, with drafts, or by `many`: as `extend` returns."""
        for r in requests:
            self._pages(r)
        rows, lines = [r.row for r in requests], range(len(requests))
        plan = packing.Decode(rows, [r.id in masks for r in requests] if masks else 0, self.table[rows])
        drafts, steps = self.drafts if draft or self.small else 0, self.steps if many else 1
        return self._run("decode", requests, plan, lines, masks, drafts=drafts, steps=steps), lines

    def _run(
        self, name: str, requests: Sequence[Request], plan: Any, lines: Sequence[int], masks: Any, **static: int
    ) -> Out:
        """Execute a plan, in the smallest program that holds it."""
        size = next(n for n in self.usable[name] if n >= len(plan.row))
        arrays = [packing.pack_plan(plan, size, self.rows)]
        if masks and any(r.id in masks for r in requests):
            arrays.append(np.zeros(self.unmasked[size].shape, np.uint32))
            for i, r in zip(lines, requests, strict=True):
                arrays[1][i] = masks.get(r.id, 0)
        out: Any = self.execute(Call(name, arrays, requests[0].adapter, static))
        out.drawn.copy_to_host_async()
        return out

    def _pages(self, r: Request) -> np.ndarray:
        """The page table's row of a running request, brought up to date."""
        known = self.known[r.row]
        if known < len(r.pages):
            self.table[r.row, known : len(r.pages)] = r.pages[known:]
            self.known[r.row] = len(r.pages)
        return self.table[r.row]

    def _begin(self) -> None:
        self.state = self.sequences = None  # free the old ones first
        if not self.writes:
            return
        options = dict(rows=self.rows, length=self.table.shape[1] * PAGE, pages=self.pages)
        dtypes = (self.weights.dtype, *map(compute_dtype, self.small))
        arrays = self.programs.begin(**options, dtypes=dtypes)
        if self.weights.mesh is None:  # committed, as every step returns them: else the second step would compile again
            arrays = jax.device_put(arrays, self.weights.everywhere)
        self.state, self.sequences = arrays

    # ---- whole sequences, without a cache ----

    def check_free(self) -> None:
        """Raise ValueError if weights have to stay as they are, and nothing can be scored."""
        if self.fixed is not None:
            raise ValueError(self.fixed)

    def model_of(self, adapter: str) -> tuple[Any, np.int32]:
        """Give what programs for whole sequences take: an adapter's parameters and slot. ValueError if it cannot be."""
        self.check_free()
        self.weights.check(adapter)
        return self.weights.call(adapter), np.int32(self.weights.slot(adapter))

    def padded(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Make a row of a sequence, as long as programs are compiled for: (tokens[1, T], lengths[1]).

        ValueError for what cannot be scored or embedded; a sequence may take all positions.
        """
        tokens = check_prompt(tokens, self.model.cfg.vocab, self.length + 1, "the text")
        padded = np.zeros((1, next(n for n in self.lengths if n >= len(tokens))), np.int32)
        padded[0, : len(tokens)] = tokens
        return padded, np.array([len(tokens)], np.int32)

    def row(self, texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, ops.Packed]:
        """Put texts behind each other into a row as long as programs are compiled for, in which each sees itself alone.

        ValueError as in `padded`.
        """
        listed = [check_prompt(t, self.model.cfg.vocab, self.length + 1, "the text") for t in texts]
        size = sum(map(len, listed))
        tokens, batch = ops.pack(listed, next(n for n in self.lengths if n >= size))
        return tokens, replace(batch, single=self.apart and len(texts) == 1)

    # ---- compiling ----

    def complete(self) -> None:
        """Compile what `warm_up` left, while another thread runs steps: each program is used once it is there."""
        while self.uncompiled and threading.main_thread().is_alive():  # a process that ends waits for one at most
            name, size, compilers = self.uncompiled[0]
            for compile in compilers:
                compile()
            self.usable[name] = sorted([*self.usable.get(name, ()), size])
            self.uncompiled = self.uncompiled[1:]

    def close(self) -> None:
        """Leave what is not compiled yet; see also `engine.follow`."""
        self.uncompiled = []

    def _warm_up(self, least: int) -> None:
        every = [("extend", n) for n in reversed(self.blocks)] + [("decode", n) for n in reversed(self.batches)]
        every = every if self.writes else []
        if self.fixed is None:
            every += [(name, n) for n in self.lengths for name in ("score", "embed")[not self.writes :]]
        sized = [(name, n, self._compilers(name, n)) for name, n in every]
        largest = {"extend": self.blocks[-1], "decode": self.batches[-1]}
        self.uncompiled = [(name, n, c) for name, n, c in sized if least and n != largest.get(name)]
        now = [c for c in sized if c not in self.uncompiled]
        self.usable = {name: sorted(n for kind, n, _ in now if kind == name) for name in largest}
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda compile: compile(), (c for _, _, compilers in now for c in compilers)))
        if not self.writes:
            return
        # One run over nothing, so that memory and threads are there; here alone, since a follower does it by itself.
        static = dict(drafts=self.drafts if self.small else 0, steps=1)
        Device.execute(self, Call("decode", [self._blank(packing.Decode, self.batches[-1])], static=static))
        one = sampling_rows([], [], [], [], vocab=self.model.cfg.vocab, rows=1)
        tokens, nowhere = np.zeros(self.table.shape[1] * PAGE, np.int32), np.int32(self.rows)
        known = nowhere, tokens, np.int32(0), np.bool_(False)
        self.sequences = self.programs.admit(self.sequences, *known, one, np.int32(-1))
        Device.execute(self, Call("copy", [packing.pack_copies([], self.rows)]))
        jax.block_until_ready((self.state, self.sequences))

    def _compilers(self, name: str, n: int) -> list[Callable[[], Any]]:
        """What compiles a size: a function for each program. The jitted function's next call of that size finds it."""
        row, one = np.zeros((1, n), np.int32), np.ones(1, np.int32)
        # Shapes alone: steps that run meanwhile replace these arrays.
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        arrays = jax.tree.map(shape, (self.state, self.sequences))
        args: tuple = (row, one, one[0])
        ways: list[dict[str, Any]] = [{}]
        if name == "embed":
            batch = ops.pack([[0]], n)[1]
            args, ways = (row, one[0]), [{"batch": replace(batch, single=s)} for s in {False, self.apart}]
        elif name == "score":
            args, ways = (*args, np.zeros((3, n), np.int32), one[0]), [{"top": TOP}]
        elif name == "extend":
            args, ways = (*arrays, self._blank(packing.Extend, n), self.unmasked[n]), [{"block": BLOCK}]
        elif name == "decode":
            args = (*arrays, self._blank(packing.Decode, n), self.unmasked[n])
            drafted = {(self.drafts, 1)} if self.small else {(0, 1), (self.drafts, 1), (0, self.steps)}
            ways = [{"drafts": drafts, "steps": steps} for drafts, steps in drafted]
        compile = lambda params, way: getattr(self.programs, name).lower(params, *args, **way).compile()
        steps = name in ("extend", "decode")
        every = [(params, *self.small) if steps else params for params in self.weights.calls()]
        return [partial(compile, params, way) for params in every for way in ways]

    def _blank(self, kind: type[packing.Extend] | type[packing.Decode], lines: int) -> np.ndarray:
        return packing.blank_plan(kind, lines, self.table.shape[1], self.rows)
