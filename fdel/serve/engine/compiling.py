"""The programs of a device, compiled before they are needed: the largest first, the others beside the first steps."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from fdel import ops
from fdel.ops.dispatch import met, without_effect
from fdel.serve.engine import packing
from fdel.serve.engine.packing import Call
from fdel.serve.engine.pictures import Holders, rounded
from fdel.serve.engine.request import TOP
from fdel.serve.engine.step import Programs

log = logging.getLogger(__name__)
RUN, LONGEST = ("extend", "decode", "encode", "hear"), 1.0  # programs that run over nothing; seconds that one may take
BLOCK = 32  # tokens of one sequence that a prefill computes together; the last block of a chunk is padded


class Compiling:
    """The part of a `Device` that compiles its programs, for every size that a step may have."""

    programs: Programs
    weights: Any
    model: Any
    blocks: list[int]  # sizes of programs
    fine: list[int]  # those of them that are compiled last: they save padding alone
    batches: Sequence[int]
    admissions: Sequence[int]
    lengths: list[int]
    drafts: int
    steps: int
    rows: int
    small: tuple
    apart: bool
    writes: bool
    unembedded: ClassVar[str | None]
    kernels: tuple[tuple[str, str], ...]
    table: np.ndarray
    unmasked: dict[int, Any]
    state: Any
    sequences: Any
    entries: Any  # of a model that sees: the array of what its tower gave
    sight: Any  # how it sees
    like: Any  # the shape of one
    holders: Holders
    _entries_like: Callable[[], jax.ShapeDtypeStruct]
    _blank_medium: Callable[[str, int], tuple[np.ndarray, ...]]
    length: int
    execute: Callable[[Call], Any]
    example: tuple[int, int] | None  # of a model that sees: patches of a picture, and numbers of a patch
    turned: bool  # whether it sees, and turns tokens by three components
    usable: dict[str, list[int]]
    uncompiled: list[tuple[str, int, list[Callable[[], Any]]]]
    unused: list[tuple[str, int]]  # sizes of programs that have not run: see `use_next`
    most: float  # tokens of the smallest program whose run took too long
    perform: Callable[[Call], Any]

    def complete(self) -> None:
        """Compile what `warm_up` left, while another thread runs steps: each program is used once it is there.

        One that is refused, as by a kernel that is named and cannot serve it, is left out: what asks for it fails alone.
        """
        while self.uncompiled and threading.main_thread().is_alive():  # a process that ends waits for one at most
            name, size, compilers = self.uncompiled[0]
            try:
                self._compile(name, size, compilers)
            except ValueError as e:
                log.warning("%s of size %d is not to be had: %s", name, size, e)
            self.uncompiled = self.uncompiled[1:]

    def compiler(self, name: str, n: int) -> Callable[[], None]:
        """Make what compiles a size, in any thread and while steps run; then it is `usable`."""
        return partial(self._compile, name, n, self._compilers(name, n))

    def _compile(self, name: str, n: int, compilers: Sequence[Callable[[], Any]]) -> None:
        for compile in compilers:
            compile()
        self.usable[name] = sorted({*self.usable.get(name, ()), n})
        if name in RUN and _tokens((name, n)) < self.most:
            self.unused.append((name, n))

    def use_next(self) -> bool:
        """Run the programs of the smallest size that have not run, over nothing, between steps; False if there are none.

        The first run of a program takes longer: 2 ms more on a CPU for each product, and GPUs load its code. Once one took
        more than `LONGEST` seconds, which a request might wait for, no larger one is run any more.
        """
        if not self.unused or not self.writes:
            return False
        begun, (name, n) = time.monotonic(), min(self.unused, key=_tokens)
        self.unused.remove((name, n))
        if name == "extend":
            seen = [] if self.example is None else [blank_seen(n)]
            self.execute(Call(name, [self._blank(packing.Extend, n), *seen], static={"block": BLOCK}))
        elif name == "decode":
            for drafts, steps in self._ways():
                self.execute(Call(name, [self._blank(packing.Decode, n)], static={"drafts": drafts, "steps": steps}))
        else:
            self.execute(Call("encode", [*self._blank_medium(name, n), np.int32(self.weights.slot(""))]))
        jax.block_until_ready((self.state, self.sequences, self.entries))
        if time.monotonic() - begun > LONGEST:
            self.most = _tokens((name, n))
            self.unused.clear()  # none was smaller
        return True

    def close(self) -> None:
        """Leave what is not compiled yet; see also `engine.follow`."""
        self.uncompiled = []

    def _warm_up(self, least: int) -> None:
        coarse = [n for n in reversed(self.blocks) if n not in self.fine]
        every = [("extend", n) for n in coarse] + [("decode", n) for n in reversed(self.batches)]
        every = every if self.writes else []
        whole = [name for name, there in {"score": self.writes, "embed": self.unembedded is None}.items() if there]
        if self.kernels:
            with met() as known:
                self.lengths = self._served(whole)
                for name, n in {"extend": self.blocks[-1], "decode": self.batches[-1]}.items() if self.writes else ():
                    for trace in self._compilers(name, n, traced=True):
                        trace()
            if why := without_effect(dict(self.kernels), known()):
                log.warning("kernels: %s", why)
        every += [(name, n) for n in self.lengths for name in whole]
        if self.example is not None:
            every += [("encode", n) for n in sorted({self.example[0], rounded(self.example[0])})]
        every += [("extend", n) for n in self.fine if self.writes]
        sized = [(name, n, self._compilers(name, n)) for name, n in every]
        largest = {"extend": self.blocks[-1], "decode": self.batches[-1]}
        later = lambda name, n: least and name != "encode" and n != largest.get(name)
        self.uncompiled = [(name, n, c) for name, n, c in sized if later(name, n)]
        now = [c for c in sized if c not in self.uncompiled]
        self.usable = {name: sorted(n for kind, n, _ in now if kind == name) for name in (*largest, "encode")}
        self.unused = [(name, n) for name, n, _ in now if name in RUN]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda compile: compile(), (c for _, _, compilers in now for c in compilers)))
        if not self.writes:
            return
        # One run over nothing, so that memory and threads are there; here alone, since a follower does it by itself.
        static = dict(drafts=self.drafts if self.small else 0, steps=1)
        self.perform(Call("decode", [self._blank(packing.Decode, self.batches[-1])], static=static))
        for n in self.admissions:
            self.perform(Call("admit", [packing.pack_admissions([], self.sequences, n)]))
        self.perform(Call("copy", [packing.pack_copies([], self.rows)]))
        jax.block_until_ready((self.state, self.sequences))

    def _served(self, whole: Sequence[str]) -> list[int]:
        """List the lengths of whole sequences that the named kernels serve; ValueError if the longest is none of them."""
        found: list[int] = []
        for n in reversed(self.lengths):
            try:
                for trace in (trace for name in whole for trace in self._compilers(name, n, traced=True)):
                    trace()
            except ValueError as e:
                if not found:
                    raise
                log.warning("sequences of up to %d tokens are computed as longer ones: %s", n, e)
                continue
            found.append(n)
        return found[::-1]

    def _compilers(self, name: str, n: int, traced: bool = False) -> list[Callable[[], Any]]:
        """What compiles a size, or only traces it: a function for each program, which the next call of that size finds."""
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
            seen = (blank_seen(n), shape(self.entries)) if self.example is not None else ()
            args, ways = (*arrays, self._blank(packing.Extend, n), self.unmasked[n], *seen), [{"block": BLOCK}]
        elif name in ("encode", "hear"):
            args = (self._entries_like(), *self._blank_medium(name, n), one[0])
        elif name == "decode":
            args = (*arrays, self._blank(packing.Decode, n), self.unmasked[n])
            ways = [{"drafts": drafts, "steps": steps} for drafts, steps in self._ways()]
        program: Any = self.programs.encode if name == "hear" else getattr(self.programs, name)
        trace = lambda params, way: program.trace(params, *args, **way)
        compile = lambda params, way: trace(params, way).lower().compile()
        steps = name in ("extend", "decode")
        weights = [jax.tree.map(shape, params) for params in self.weights.calls()]
        every = [(params, *self.small) if steps else params for params in weights]
        return [partial(trace if traced else compile, params, way) for params in every for way in ways]

    def _ways(self) -> set[tuple[int, int]]:
        """Drafts and steps of the programs of a size that decode."""
        return {(self.drafts, 1)} if self.small else {(0, 1), (self.drafts, 1), (0, self.steps)}

    def _blank(self, kind: type[packing.Extend] | type[packing.Decode], lines: int) -> np.ndarray:
        return packing.blank_plan(kind, lines, self.table.shape[1], self.rows)


def _tokens(size: tuple[str, int]) -> int:
    """Count the tokens, patches or chunks of sound that a program of a size computes."""
    return size[1] * (BLOCK if size[0] == "extend" else 1)


def blank_seen(lines: int) -> np.ndarray:
    """Make what lines see that see nothing."""
    return packing.pack_seen(np.zeros((0, BLOCK), np.int32), np.zeros((0, BLOCK, 3), np.int32), lines)
