"""The finished data set: sources in, batches out."""

import dataclasses
import functools
import operator
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fdel import text
from fdel.train import processes
from fdel.train.data import pictures
from fdel.train.data.batch import Batch, Plan, collate, plan, row
from fdel.train.data.files import Source, sources
from fdel.train.data.planning import order
from fdel.train.data.settings import COMPARED, Report, Settings
from fdel.train.data.store import Store, build, cache


@dataclass(eq=False)
class Batches:
    """The batches of all epochs by number, of each the rows that one process gets: a source for `grain.MapDataset`.

    A batch depends on its number alone. So the state of an iterator is a number, and other numbers of processes can go on.
    `columns` are more arrays of the batch, a row of each for each example of the stores, one store after the other.
    """

    stores: Sequence[Store]
    weights: Sequence[float] | None
    settings: Settings
    process: tuple[int, int] = (0, 1)
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.report = functools.reduce(operator.add, (s.report for s in self.stores), Report())
        partly = self.settings.kind != "prompt" and self.report.learnt < self.report.tokens
        self.masked = self.settings.kind in COMPARED or partly
        self.plan = functools.lru_cache(maxsize=2)(self._plan)
        self._firsts, self._lock = [0], threading.Lock()  # the number of the first batch of each epoch seen so far
        if not self.first(1):
            found = f"{len(self.plan(0))} rows make no batch of {self.settings.batch}"
            raise ValueError(f"{found}; give more data, or partial='pad'\n{self.report}")

    def __len__(self) -> int:
        return self.first(self.settings.epochs) if self.settings.epochs else sys.maxsize

    def __getitem__(self, number: int) -> Batch:
        settings, (index, count) = self.settings, self.process
        with self._lock:
            while self._firsts[-1] <= number:
                self._extend()
            epoch = bisect_right(self._firsts, number) - 1
            start = (number - self._firsts[epoch]) * settings.batch
        p, own = self.plan(epoch), settings.batch // count
        rows = range(start, min(start + settings.batch, len(p)))
        here = rows[index * own : (index + 1) * own]
        width = int(p.widths[rows.start : rows.stop].max())
        batch = collate([row(p, r) for r in here], settings, own, width, self.masked, p.room(rows))
        for name, column in self.columns.items():
            batch[name] = np.zeros((own, *column.shape[1:]), column.dtype)
            batch[name][: len(here)] = column[p.pieces[p.bounds[p.order[here.start : here.stop]], 0]]
        return batch

    def first(self, epoch: int) -> int:
        """Number the first batch of an epoch."""
        with self._lock:
            while len(self._firsts) <= epoch:
                self._extend()
            return self._firsts[epoch]

    def _extend(self) -> None:
        rows, size = len(self.plan(len(self._firsts) - 1)), self.settings.batch
        self._firsts.append(self._firsts[-1] + (rows // size if self.settings.partial == "drop" else -(-rows // size)))

    def _plan(self, epoch: int) -> Plan:
        examples = order([len(s) for s in self.stores], self.weights, self.settings, epoch)
        return plan(self.stores, examples, self.settings, [epoch, 1])


@dataclass(frozen=True)
class Data:
    """A data set: `iter` gives grain's iterator of batches, with `get_state` and `set_state`; facts that are known before.

    Of a stream only `report` is known, of the rows so far; the others are None. `sources` are those it was built of. With
    `put` the data set has the rows of batches, which all processes put together at the same time (`Together`).
    """

    dataset: Any
    origin: Any
    sources: Sequence[Source] = ()
    put: Callable[[Any], Batch] | None = None

    def __iter__(self) -> Any:
        found = iter(self.dataset)
        return found if self.put is None else Together(found, self.put)

    @property
    def report(self) -> Report:
        """What became of the rows."""
        return self.origin.report

    @property
    def shared(self) -> bool:
        """Whether a place in the data is a number of batches of all processes, so that others in number can go on there."""
        return isinstance(self.origin, Batches)

    @property
    def examples(self) -> int | None:
        """Examples that can be used, of all sources together."""
        return sum(map(len, self.origin.stores)) if isinstance(self.origin, Batches) else None

    @property
    def batches(self) -> int | None:
        """Batches of the first epoch; those of others differ a little where packing or a mixture makes them anew."""
        return self.origin.first(1) if isinstance(self.origin, Batches) else None

    @property
    def total(self) -> int | None:
        """Batches of all epochs; None where they never end."""
        return len(self.origin) if isinstance(self.origin, Batches) and self.origin.settings.epochs else None

    @property
    def fill(self) -> float | None:
        """The share of the first epoch's places, rows times `length`, that hold tokens."""
        if not isinstance(self.origin, Batches):
            return None
        widths = self.origin.plan(0).widths
        return float(widths.sum() / (len(widths) * self.origin.settings.length))


@dataclass
class Together:
    """Batches that are put together where they are asked for: processes agree on shapes, in step with all they do else."""

    rows: Any
    put: Callable[[Any], Batch]

    def __iter__(self) -> "Together":
        return self

    def __next__(self) -> Batch:
        return self.put(next(self.rows))

    def get_state(self) -> Any:
        """Give the place of the next batch: JSON."""
        return self.rows.get_state()

    def set_state(self, state: Any) -> None:
        """Go on from a state."""
        self.rows.set_state(state)


def dataset(
    given: Any,
    settings: Settings,
    tok: text.Tokenizer,
    *,
    cache_directory: str | Path | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Data:
    """Build the data set of a `Source`, of several, or of rows in memory: a list of dicts, or a `datasets.Dataset`.

    It has batches of `settings.batch` rows, of which each process gets its equal part, in order.

    A batch is a dict of numpy arrays, see `losses.forward` and `losses.completions`: "tokens" and "lengths", or "packed";
    "mask" where not all tokens are learnt; "margin" of pairs; "label" of unpaired completions, and their "kl"; "labels" of
    judged steps. Embeddings have tokens [B C T]: a query, its positive, hard negatives, of length 0 if absent. Arrays have
    `settings.length` tokens, or those of a bucket. All examples are tokenized first, into memory, or once and for all into
    `cache_directory`; with `stream` they are tokenized on the way. Needs the extra `train`. ValueError for settings that
    exclude each other and for data of which nothing can be learnt.
    """
    try:
        import grain
    except ImportError as e:
        raise ImportError("data sets need grain; install the extra: pip install 'fdel[train]'") from e
    found = sources(given)
    _check(found, settings, cache_directory, process_count)
    process = (process_index, process_count)
    if settings.stream:
        from fdel.train.data.stream import Stream

        masked = settings.kind not in ("prompt", "embedding", "labelled") and settings.learn != "all"
        own = settings.batch // process_count
        width = lambda rows: max(len(sequence["tokens"]) for sequences, _ in rows for sequence in sequences)
        agree = processes.most if process_count > 1 and settings.sight else None
        put = lambda rows: collate(rows, settings, own, width(rows), masked, pictures.room(rows, settings.sight, agree))
        stream = Stream(found, tok, settings, process)
        batches = stream.batch(own, drop_remainder=settings.partial == "drop", batch_fn=list if agree else put)
        ahead = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=settings.prefetch)
        return Data(ahead, stream, found, put if agree else None)
    make = build if cache_directory is None else functools.partial(cache, directory=cache_directory)
    weights = None if found[0].weight is None else [s.weight or 0.0 for s in found]
    batches = Batches([make(s, tok, settings) for s in found], weights, settings, process)
    return dataclasses.replace(read_ahead(batches), sources=found)


def read_ahead(origin: Batches) -> Data:
    """Make a data set of batches that are made by their numbers, in threads, before they are asked for."""
    import grain

    s = origin.settings
    options = grain.ReadOptions(num_threads=s.threads, prefetch_buffer_size=s.prefetch)
    return Data(grain.MapDataset.source(origin).to_iter_dataset(options), origin)


def in_order(data: Data, rows: int) -> Data:
    """Give every example once, whole, in the order of the stores, in batches of `rows`; ValueError for a stream."""
    b = _stored(data)
    plain: dict[str, Any] = dict(packing=None, buckets=(), block=None, fcm_min_ratio=0.0, fcm_max_ratio=0.0)
    plain |= dict(shuffle=False, epochs=1, batch=rows, partial="pad")
    return read_ahead(Batches(b.stores, None, dataclasses.replace(b.settings, **plain), b.process))


def with_columns(data: Data, **columns: np.ndarray) -> Data:
    """Add arrays to the batches: of each a row for each example, as `in_order` has them. ValueError for a stream."""
    b = _stored(data)
    if wrong := {k: len(v) for k, v in columns.items() if len(v) != sum(map(len, b.stores))}:
        raise ValueError(f"columns of {wrong} rows for {sum(map(len, b.stores))} examples; expected a row for each")
    return read_ahead(dataclasses.replace(b, columns={**b.columns, **columns}))


def _stored(data: Data) -> Batches:
    if not isinstance(data.origin, Batches):
        raise ValueError("a stream forgets its examples; read the data set without stream")
    return data.origin


def _check(sources: Sequence[Source], settings: Settings, cache_directory: Any, processes: int) -> None:
    weighted = [s.weight for s in sources if s.weight is not None]
    if not sources or 0 < len(weighted) < len(sources) or any(w <= 0 for w in weighted):
        found = f"{len(sources)} sources, {len(weighted)} weights"
        raise ValueError(f"{found}; expected a positive weight for all, or for none")
    if settings.batch % processes:
        raise ValueError(f"batch={settings.batch} rows cannot be divided among {processes} processes")
    if not settings.stream:
        return
    if processes > 1 and (settings.epochs is not None or settings.buckets):
        lacking = "streams of several processes have no common end and no common lengths"
        raise ValueError(f"{lacking}: use epochs=None, and no buckets")
    if cache_directory is not None or settings.block is not None:
        raise ValueError("a stream has no cache, and its window is its block: leave out stream, or the other two")
