"""A stream: rows are read, tokenized, shuffled and packed window by window, and forgotten. Imports grain."""

import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from fdel import text
from fdel.train.data.batch import Plan, plan, row
from fdel.train.data.encode import encode_rows
from fdel.train.data.files import File, Source, find, sliced
from fdel.train.data.finish import Example
from fdel.train.data.settings import Report, Settings
from fdel.train.data.store import CHUNK, arrays, check_columns, prepare, row_range, store
from fdel.train.data.tables import open_table


class Stream(grain.IterDataset):
    """Rows (see `batch.row`) of sources, every `process_count`-th row of the files for one process.

    `report` tells what became of the rows so far. With weights each window has their shares, and `stop` decides whether
    the first source that was read `epochs` times ends the stream, or the last one. Without, sources follow each other.
    """

    def __init__(
        self, sources: Sequence[Source], tok: text.Tokenizer, settings: Settings, process: tuple[int, int] = (0, 1)
    ) -> None:
        super().__init__()
        self.tok, self.settings, self.process = tok, settings, process
        weighted = sources[0].weight is not None
        found = [[(s, f) for f in find(s)] for s in sources]
        self.lanes = found if weighted else [[pair for lane in found for pair in lane]]
        weights = np.array([s.weight for s in sources] if weighted else [1.0], float)
        self.shares = weights / weights.sum()
        self.report = Report()

    def __iter__(self) -> "StreamIterator":
        return StreamIterator(self)


class StreamIterator(grain.DatasetIterator):
    """Reads one window after the other; its state is where the window began, and the next row of it.

    A place in a lane of files is (how often it was read, files of this turn that were read, next row of the file).
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.places = [(0, 0, stream.process[0])] * len(stream.lanes)
        self.window, self.next = 0, 0
        self.plan: Plan | None = None
        self.began = self.places
        self.table = functools.lru_cache(maxsize=len(stream.lanes))(open_table)
        self.length = functools.lru_cache(maxsize=None)(lambda file: open_table(file).length)
        self.seen: dict[int, tuple[Source, set[str]]] = {}  # the columns found in each source

    def __next__(self) -> Any:
        while self.plan is None or self.next >= len(self.plan):
            if self.plan is not None:
                self.window, self.next, self.plan = self.window + 1, 0, None
            self.began = list(self.places)
            self.plan = self._plan()
        self.next += 1
        return row(self.plan, self.next - 1)

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` needs; JSON."""
        return {"places": [list(p) for p in self.began], "window": self.window, "next": self.next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on as the iterator that gave this state; its window is read again."""
        self.places = [tuple(p) for p in state["places"]]
        self.began = list(self.places)
        self.window, self.next = state["window"], state["next"]
        self.plan = self._plan() if self.next else None

    def _finished(self) -> bool:
        epochs, some = self.stream.settings.epochs, self.stream.settings.stop == "first_exhausted"
        return epochs is not None and (any if some else all)(turn >= epochs for turn, _, _ in self.places)

    def _plan(self) -> Plan:
        """Read a window. StopIteration at the end."""
        stream, settings = self.stream, self.stream.settings
        if self._finished():
            raise StopIteration
        before, after = (np.floor(stream.shares * settings.window * (self.window + i)).astype(int) for i in (0, 1))
        examples = [e for lane, n in enumerate(after - before) for e in self._take(lane, int(n))]
        window = store(arrays(examples, settings), settings, Report())
        rng = np.random.default_rng([settings.seed, self.window, 0])
        order = rng.permutation(len(window)) if settings.shuffle else np.arange(len(window))
        return plan([window], order, settings, [self.window, 1, stream.process[0]])

    def _take(self, lane: int, count: int) -> list[Example]:
        """Read the next examples of a lane, fewer if the stream ends."""
        stream, settings, found = self.stream, self.stream.settings, []  # type: Stream, Settings, list[Example]
        while len(found) < count and not self._finished():
            turn, at, first = self.places[lane]
            files = self._files(lane, turn)
            if at == len(files):
                self.places[lane] = turn + 1, 0, stream.process[0]
                self._check()
                continue
            source, file = files[at]
            table, before = self.table(file), self._before(lane, source, file)
            rows = row_range(source, *before, table, first, stream.process[1])[: min(CHUNK, count - len(found))]
            if not rows:
                self.places[lane] = turn, at + 1, stream.process[0]
                continue
            seen = self.seen.setdefault(id(source), (source, set()))[1]
            examples, report = encode_rows(prepare(table, rows, source, seen), stream.tok, settings, table.folder)
            found += examples
            stream.report += report
            self.places[lane] = turn, at, rows[-1] + stream.process[1]
            if stream.report.read >= 1000:
                self._check()
        return found

    def _files(self, lane: int, turn: int) -> list[tuple[Source, File]]:
        files, settings = self.stream.lanes[lane], self.stream.settings
        if not settings.shuffle:
            return files
        return [files[i] for i in np.random.default_rng([settings.seed, lane, turn]).permutation(len(files))]

    def _before(self, lane: int, source: Source, file: File) -> tuple[int, int]:
        """Count the rows of the source's files before this one, and of all, as far as `row_range` wants them."""
        if source.rows is None and not sliced(source):
            return 0, 0
        files = [f for s, f in self.stream.lanes[lane] if s is source]
        before = sum(map(self.length, files[: files.index(file)]))
        return before, sum(map(self.length, files)) if sliced(source) else 0

    def _check(self) -> None:
        for source, seen in self.seen.values():
            check_columns(source, seen)
        if not self.stream.report.kept:
            raise ValueError(f"no row can be used\n{self.stream.report}")
