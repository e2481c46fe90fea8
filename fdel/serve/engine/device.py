"""The arrays of one engine: weights, cache and rows, and the programs that change them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from fdel import ops
from fdel.models import Model, heads
from fdel.ops import cpu
from fdel.ops.platform import target
from fdel.serve.engine import packing
from fdel.serve.engine.compiling import BLOCK as BLOCK
from fdel.serve.engine.packing import NOWHERE, Call, Out
from fdel.serve.engine.request import check_prompt, length_limit
from fdel.serve.engine.rows import Rows
from fdel.serve.engine.seeing import Seeing
from fdel.serve.engine.settings import LENGTH, Settings
from fdel.serve.engine.step import PAGE, compute_dtype, programs
from fdel.serve.engine.weights import Weights, owned
from fdel.serve.engine.work import Chunk, Request

ADMITTED = 8  # sequences that get their rows in one call at most
COMMON_PAGES = 1024 // PAGE  # pages of a row by default, if a sequence may have more


def sizes(first: int, last: int, factor: int) -> list[int]:
    """List first, first * factor, ... up to and with `last`."""
    out = []
    while first < last:
        out.append(first)
        first *= factor
    return [*out, last]


class Device(Seeing):
    """What runs on the accelerators: `rows` sequences at a time, of at most `length` tokens, in `pages` pages.

    Programs are compiled for some numbers of prefill blocks (`blocks`, the `fine` ones last) and of decode rows
    (`batches`). `draft` is a smaller model that guesses `settings.drafts` tokens at each decode, so that its own cache has
    no gaps; without it they are guessed from earlier tokens, in the steps that ask for it. `sight` (`media.sight.Sight`) is
    how the model sees; without it it reads text alone. Processes that follow one make the same `Device`.
    """

    unembedded: ClassVar[str | None] = None  # why nothing is embedded, where that is so

    def __init__(
        self, model: Model, settings: Settings, adapters: Mapping[str, Any] | None = None, draft: Model | None = None, *,
        writes: bool = True, sight: Any = None,
    ):  # fmt: skip
        s, limit = settings, length_limit(model, settings.max_length)
        self.length = min(LENGTH, (s.pages or LENGTH) * PAGE) if limit == math.inf else int(limit)
        width = -(-self.length // PAGE)
        self.rows, self.pages = s.rows, s.pages or max(width, s.rows * min(width, COMMON_PAGES))
        coarse, self.batches = sizes(2, max(2, -(-s.budget // BLOCK)), 2), s.batches or sizes(1, s.rows, 8)
        weights = jax.tree.leaves(heads.inner(model.params)["layers"])
        self.admissions = sizes(1, min(s.rows, ADMITTED), ADMITTED)
        self.fine = cpu.sizes_between(coarse, sum(x.size for x in weights))
        self.blocks = sorted([*coarse, *self.fine])
        self.drafts, self.steps = s.drafts, s.decode_steps
        self.writes = writes  # else whole sequences are all that it computes
        self.width = max(s.drafts + 1, s.decode_steps)  # tokens that a step adds to a sequence at most
        self.weights = Weights(model, adapters or {}, s.max_loras, s.max_lora_rank or 16, s.lora_rank)
        self.model = model._replace(params=None)  # what was given is not held: weights come and go
        self.small = () if draft is None else (owned(draft.params),)
        net = None if draft is None else (draft.family, draft.cfg)
        self.kernels = tuple(sorted(s.kernels.items()))
        self._open_eyes(sight, s.media_bytes)
        self.programs = programs(
            model.family, model.cfg, self.weights.mesh, net, s.kv_cache_dtype, self.kernels, self.turned
        )
        self.words = -(-model.cfg.vocab // 32)  # of a mask
        put = partial(jax.device_put, device=self.weights.everywhere)
        self.unmasked = {n: put(np.zeros((n, self.words), np.uint32)) for n in {*self.blocks, *self.batches}}
        self.table = np.full((self.rows, width), NOWHERE, np.int32)
        self.known = [0] * self.rows  # pages of each row that the table has
        self.lengths = sizes(PAGE, self.length, 2)  # to which sequences are padded that are scored as a whole
        self.apart = target() == "gpu"  # whose kernel knows one sequence per row: a text alone has its own program
        self.usable = {"extend": coarse, "decode": list(self.batches)}  # the sizes that plans may have
        self.uncompiled: list[tuple[str, int, list[Callable[[], Any]]]] = []  # program, size, and what compiles it
        self.unused: list[tuple[str, int]] = []
        self.most = math.inf
        self.state: Any = None  # an `ops.State` for each model
        self.sequences: Any = None  # `Rows`
        self.reset()

    # ---- what changes the arrays ----

    def execute(self, call: Call) -> Any:
        """Change the arrays, by host arrays alone: the one way to do it, so that other processes can do the same.

        "extend" and "decode" take a packed plan, and masks if there are any; "copy" packed copies; "admit" packed
        admissions. Of a model that sees, "extend" takes what is seen before masks, and "encode" the patches of a picture,
        their places, which entries it gets, and the slot of its adapter.
        "score" changes none: rows and lengths, the slot, the targets and how many of them count.
        """
        return self.perform(call)

    def perform(self, call: Call) -> Any:
        """Execute it here."""
        if call.name == "begin":
            self._begin()
        elif call.name == "warm_up":
            self._warm_up(**call.static)
        elif call.name == "sleep":
            self.state = self.sequences = self.entries = None
            if call.static["weights"]:
                self.weights.release()
        elif call.name == "remove":
            self.weights.pop(call.adapter, None)
        elif call.name == "admit":
            self.sequences = self.programs.admit(self.sequences, *call.arrays)
        elif call.name == "encode":
            self.entries = self.programs.encode(self.weights.call(call.adapter), self.entries, *call.arrays)
        elif call.name == "copy":
            self.state = self.programs.copy(self.state, *call.arrays)
        elif call.name == "score":
            return self.programs.score(self.weights.call(call.adapter), *call.arrays, **call.static)
        else:
            plan, *masks = call.arrays
            seen = (masks.pop(0), self.entries) if call.name == "extend" and self.example is not None else ()
            weights = (self.weights.call(call.adapter), *self.small)
            mask = self.unmasked[len(plan)]
            if masks:  # where that one is, else it would compile again; every process has the whole
                mask = jax.make_array_from_callback(mask.shape, mask.sharding, lambda part: masks[0][part])
            step = getattr(self.programs, call.name)
            self.state, self.sequences, out = step(
                weights, self.state, self.sequences, plan, mask, *seen, **call.static
            )
            return out
        return None

    def reset(self) -> None:
        """Start with an empty cache and empty rows."""
        self.forget()
        self.execute(Call("begin"))

    def sleep(self, weights: bool = False) -> None:
        """Free cache and rows, which `reset` makes again, and the base's `weights` if asked."""
        self.forget()
        self.execute(Call("sleep", static={"weights": int(weights)}))

    def checked(self, adapter: str, params: Any, **how: bool) -> Any:
        """Check new weights as `Weights.checked`, and make of them what `replace` takes."""
        return self.weights.checked(adapter, params, **how)

    def replace(self, adapter: str, new: Any, reuse: bool = False) -> None:
        """Hold other weights, see `Weights.put`."""
        self.weights.put(adapter, new, reuse=reuse)

    def warm_up(self, least: bool = False) -> None:
        """Compile every program that steps may need, several at a time; or the `least` with which all steps can run.

        RuntimeError while there is no cache.
        """
        if self.writes and self.state is None:
            raise RuntimeError("the engine sleeps; call wake() before start()")
        self.execute(Call("warm_up", static={"least": int(least)}))

    def admit(self, every: Sequence[tuple[Request, np.ndarray, bool]]) -> None:
        """Give requests their rows, up to `ADMITTED` in a call: of each its packed `Sampling`, and whether it is running.

        That it is if all but its newest token are in the cache, so that decode is next.
        """
        one = lambda x, dtype=np.int32: np.array([x], dtype)
        rows = []
        for r, sampling, running in every:
            self.table[r.row], self.known[r.row] = NOWHERE, 0
            tokens = np.zeros((1, self.table.shape[1] * PAGE), np.int32)
            tokens[0, : len(r.tokens)] = r.tokens
            shift = one(0 if r.media is None else r.media.shift) if self.turned else None
            known: Any = (
                tokens,
                one(len(r.tokens)),
                one(running, bool),
                sampling,
                one(self.weights.slot(r.adapter)),
                shift,
            )
            rows.append((r.row, Rows(*known)))
        for i in range(0, len(rows), self.admissions[-1]):
            some = rows[i : i + self.admissions[-1]]
            size = next(n for n in self.admissions if n >= len(some))
            self.execute(Call("admit", [packing.pack_admissions(some, self.sequences, size)]))

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy pages: from which to which, in their order."""
        self.execute(Call("copy", [packing.pack_copies(copies, self.rows)]))

    def group(self, adapter: str) -> str:
        """Name the calls that an adapter's requests can be in: equal for all that share the base's arrays."""
        return adapter if self.weights.slot(adapter) < 0 else ""

    def extend(self, chunks: Sequence[Chunk], masks: Mapping[int, np.ndarray]) -> tuple[Out, list[int]]:
        """Compute chunks of one group of adapters, as `divided`: (what was drawn, the line there of each).

        Masks are by request id. What the chunks show is encoded first, unless it is.
        """
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
        seen = self._see(chunks, len(plan.row)) if self.example is not None else None
        return self._run("extend", [c.request for c in chunks], plan, lines, masks, seen=seen, block=BLOCK), lines

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
        self, name: str, requests: Sequence[Request], plan: Any, lines: Sequence[int], masks: Any, seen: Any = None,
        **static: int,
    ) -> Out:  # fmt: skip
        """Execute a plan, in the smallest program that holds it."""
        size = next(n for n in self.usable[name] if n >= len(plan.row))
        arrays = [packing.pack_plan(plan, size, self.rows)]
        if seen is not None:
            index, turns = seen
            arrays.append(packing.pack_seen(index, turns, size))
        if masks and any(r.id in masks for r in requests):
            arrays.append(np.zeros(self.unmasked[size].shape, np.uint32))
            for i, r in zip(lines, requests, strict=True):
                arrays[-1][i] = masks.get(r.id, 0)
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
        self.state = self.sequences = self.entries = None  # free the old ones first
        if not self.writes:
            return
        options = dict(rows=self.rows, length=self.table.shape[1] * PAGE, pages=self.pages)
        dtypes = (self.weights.dtype, *map(compute_dtype, self.small))
        arrays = self.programs.begin(**options, dtypes=dtypes)
        if self.weights.mesh is None:  # committed, as every step returns them: else the second step would compile again
            arrays = jax.device_put(arrays, self.weights.everywhere)
        self.state, self.sequences = arrays
        self._begin_to_see()

    # ---- whole sequences, without a cache ----

    def score(self, rows: Sequence[np.ndarray], targets: np.ndarray, count: int, top: int, adapter: str) -> Any:
        """Score the first `count` of `targets` in `rows`, tokens and lengths; ValueError for an unknown adapter."""
        self.weights.check(adapter)
        slot = np.int32(self.weights.slot(adapter))
        return self.execute(Call("score", [*rows, slot, targets, np.int32(count)], adapter, {"top": top}))

    def model_of(self, adapter: str) -> tuple[Any, np.int32]:
        """Give what the program that embeds takes: an adapter's parameters and slot. ValueError if it cannot be."""
        if self.unembedded is not None:
            raise ValueError(self.unembedded)
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
