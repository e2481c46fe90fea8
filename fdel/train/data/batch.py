"""From tokenized examples to the batches that losses read: the plan of an epoch, its rows, rows put together."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fdel.ops.batch import Packed
from fdel.ops.mask import HIDDEN
from fdel.train.data import pictures
from fdel.train.data.planning import Runs, pack
from fdel.train.data.settings import PER_TOKEN, Settings
from fdel.train.data.store import NUMBERS, Store
from fdel.train.losses.stats import IGNORE

Batch = dict[str, Any]
# Of one sequence: tokens, mask, positions, segment_ids; key_segment_ids if some are hidden; "media" if anything is shown.
Tokens = dict[str, Any]
Row = tuple[list[Tokens], dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The rows of an epoch, or of a window of a stream: pieces of examples (see `pack`), and in which order rows come."""

    stores: tuple[Store, ...]
    pieces: np.ndarray
    bounds: np.ndarray
    order: np.ndarray
    settings: Settings
    seed: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.order)

    @functools.cached_property
    def widths(self) -> np.ndarray:
        """Tokens of each row, in order; of several sequences (a pair, a completion and its "kl") those of the longest."""
        sizes = self.pieces[:, 2] - self.pieces[:, 1]
        sizes = np.add.reduceat(sizes, self.bounds[:-1])[self.order] if len(sizes) else sizes
        if not self.settings.mismatched:
            return sizes
        prompts = self._prompts
        return np.maximum(sizes, np.minimum(prompts + (sizes - prompts)[self.others], self.settings.length))

    @functools.cached_property
    def others(self) -> np.ndarray:
        """The row whose completion stands in each row's "kl": the one before, as TRL has it in a batch.

        Where that one has the same prompt, as the other row of a pair has, it is the one before that.
        """
        rows, prompts = np.arange(len(self)), self._prompts
        alike = rows[prompts == np.roll(prompts, 1)]
        prompt = lambda r: _slice(*_locate(self.stores, _pieces(self, r)[0][0]), 0, int(prompts[r]))["tokens"]
        same = [r for r in alike if np.array_equal(prompt(r), prompt(r - 1))]
        others = rows - 1
        others[same] -= 1
        return others % max(1, len(rows))

    @functools.cached_property
    def shows(self) -> np.ndarray | None:
        """What each row needs (`Files.needs`), of its sequences the most, int64[4 rows]; None if none shows anything."""
        if not any(s.images for s in self.stores):
            return None
        needs = self._needs()
        if not needs.size:
            return needs
        both = (np.add, np.maximum, np.add, np.maximum)  # of numbers, and of sizes
        rows = [f.reduceat(x, self.bounds[:-1])[self.order] for f, x in zip(both, needs, strict=True)]
        if self.settings.mismatched:  # the other row's completion is shown beside the prompt
            rows = [f(x, y[self.others]) for f, x, y in zip(both, rows, self._answers(), strict=True)]
        return np.stack(rows)

    def _answers(self) -> np.ndarray:
        """What each row's completion needs."""
        found = [
            s.images.needed(np.arange(len(s)), s.numbers["prompt"], s.lengths)
            if s.images
            else np.zeros((4, len(s)), int)
            for s in self.stores
        ]
        return np.concatenate(found, 1)[:, self.pieces[self.order, 0]]

    def _needs(self) -> np.ndarray:
        """What each piece needs, of its sequences the most."""
        example, first, last = self.pieces.T
        if not self.settings.whole:  # a piece is an example
            found = [s.images.needs if s.images else np.zeros((4, len(s.lengths)), np.int64) for s in self.stores]
            each = [x.reshape(4, -1, s.sides).max(2) for x, s in zip(found, self.stores, strict=True)]
            return np.concatenate(each, 1)[:, example]
        out, before = np.zeros((4, len(example)), np.int64), 0
        for s in self.stores:
            here = (example >= before) & (example < before + len(s))
            if s.images:
                out[:, here] = s.images.needed(example[here] - before, first[here], last[here])
            before += len(s)
        return out

    def room(self, rows: range) -> pictures.Room | None:
        """Say what a batch of these rows has room for; None if no row of any batch shows or plays anything."""
        if self.shows is None or self.settings.sight is None:
            return None
        here, units = self.shows[:, rows.start : rows.stop], (1, self.settings.sight.merge, 1, 1)
        halved = lambda most, found, unit: pictures.halved(int(most.max()), int(found.max()), unit)
        images, patches, sounds, chunks = map(halved, self.shows, here, units)
        found = [s.images for s in self.stores if s.images]
        numbers, turned = max(x.size for x in found), any(x.turned.any() for x in found)
        return pictures.Room(images, patches, sounds, chunks, numbers, turned)

    @property
    def _prompts(self) -> np.ndarray:
        """Tokens of each row's prompt."""
        return np.concatenate([s.numbers["prompt"] for s in self.stores])[self.pieces[self.order, 0]]


def plan(stores: Sequence[Store], examples: np.ndarray, settings: Settings, seed: Sequence[int]) -> Plan:
    """Distribute examples over rows, window by window, or block by block of a mixture; order the rows of each.

    Rows of one example stay in the order of the examples, which are shuffled: a mixture keeps its shares.
    """
    rng = np.random.default_rng([settings.seed, *seed])
    # Tokens of each example; of a pair those of the longer one.
    size = np.concatenate([s.lengths.reshape(-1, s.sides).max(1) for s in stores]).astype(np.int64)
    windows, rows, count = [tuple(np.zeros(shape, np.int64) for shape in ((0, 3), 1, 0))], 0, 0
    window = settings.block or max(1, settings.window // settings.batch) * settings.batch  # sorted rows fill batches
    mixed = settings.shuffle and settings.packing is not None
    for i in range(0, len(examples), window):
        here = examples[i : i + window]
        pieces, bounds = pack(size[here], settings.length, settings.packing, _runs(stores, here))
        pieces[:, 0] = here[pieces[:, 0]]
        order = rng.permutation(len(bounds) - 1) if mixed else np.arange(len(bounds) - 1)
        if settings.buckets:
            order = _alike(np.diff(pieces[:, 1:], axis=1)[order, 0], order, settings, rng)
        windows.append((pieces, bounds[1:] + count, order + rows))
        rows, count = rows + len(order), count + len(pieces)
    pieces, bounds, order = map(np.concatenate, zip(*windows, strict=True))
    return Plan(tuple(stores), pieces, bounds, order, settings, seed)


def _runs(stores: Sequence[Store], examples: np.ndarray) -> Runs | None:
    """Say of each of these examples, by its place among them, which tokens stand for something; None if none do."""
    if not any(s.images for s in stores):
        return None

    def runs(i: int) -> list[tuple[int, int]]:
        store, example = _locate(stores, int(examples[i]))
        return store.images.runs(example) if store.images else []

    return runs


def _alike(widths: np.ndarray, order: np.ndarray, settings: Settings, rng: np.random.Generator) -> np.ndarray:
    """Sort rows by length into batches, whose order stays random; the incomplete batch comes last."""
    order = order[np.argsort(widths, kind="stable")]
    full = len(order) // settings.batch * settings.batch
    batches = order[:full].reshape(-1, settings.batch)
    batches = rng.permutation(batches) if settings.shuffle else batches
    return np.concatenate([batches.ravel(), order[full:]])


# ---- rows ----------------------------------------------------------------------------------------------------------


def row(p: Plan, r: int) -> Row:
    """Make the r-th row of a plan: its sequences (one, chosen and rejected, or one and its "kl"), and its numbers.

    The "kl" of a row is its prompt with the completion of another row, see `Plan.others`.
    """
    settings, pieces = p.settings, _pieces(p, r)
    store, i = _locate(p.stores, pieces[0][0])
    numbers = {k: store.numbers[k][i] for k in NUMBERS[settings.kind]}
    if settings.mismatched:
        other, j = _locate(p.stores, _pieces(p, p.others[r])[0][0])
        kl = [_seen(p, store, i, 0, numbers["prompt"]), _seen(p, other, j, int(other.numbers["prompt"][j]), None)]
        return [_seen(p, store, i, 0, settings.length), _cut(_joined(p, kl, one=True), settings.length)], numbers
    if settings.packing is None:
        sequences = [_seen(p, store, i * store.sides + side, 0, settings.length) for side in range(store.sides)]
        return [_forget(p, r, x) for x in sequences], numbers
    parts = [_seen(p, *_locate(p.stores, e), start, stop, segment) for segment, (e, start, stop) in enumerate(pieces)]
    return [_forget(p, r, _joined(p, parts))], numbers


def _forget(p: Plan, r: int, sequence: Tokens) -> Tokens:
    """Hide keys of the r-th row, each with the row's own ratio as probability; first tokens stay (see `Settings`)."""
    s = p.settings
    if not s.fcm_max_ratio:
        return sequence
    rng = np.random.default_rng([s.seed, *p.seed, r, 2])
    hidden = rng.random(len(sequence["tokens"])) < rng.uniform(s.fcm_min_ratio, s.fcm_max_ratio)
    hidden &= sequence["positions"] > 0
    return sequence | {"key_segment_ids": np.where(hidden, np.int32(HIDDEN), sequence["segment_ids"])}


def _pieces(p: Plan, r: int) -> list[list[int]]:
    k = p.order[r]
    return p.pieces[p.bounds[k] : p.bounds[k + 1]].tolist()


def _locate(stores: Sequence[Store], example: int) -> tuple[Store, int]:
    for store in stores:
        if example < len(store):
            return store, example
        example -= len(store)
    raise IndexError(f"the stores have {sum(map(len, stores))} examples, which is {example} too few")


def _slice(store: Store, sequence: int, start: int, stop: int | None, segment: int = 0) -> Tokens:
    first, last = int(store.starts[sequence]), int(store.starts[sequence + 1])
    first, last = first + start, last if stop is None else min(last, first + stop)
    n = last - first
    found = {"tokens": store.tokens[first:last], "mask": store.mask[first:last]}
    return found | {"positions": np.arange(n, dtype=np.int32), "segment_ids": np.full(n, segment, np.int32)}


def _seen(p: Plan, store: Store, sequence: int, start: int, stop: int | None, segment: int = 0) -> Tokens:
    """Slice a sequence, with what its part shows and plays if the plan has any of that, none of which is ever cut."""
    found = _slice(store, sequence, start, stop, segment)
    if p.shows is None or p.settings.sight is None:
        return found
    shown = store.images.of(sequence, found["tokens"], start) if store.images else []
    return found | {"media": pictures.columns(p.settings.sight, found["tokens"], shown)}


def _joined(p: Plan, parts: Sequence[Tokens], one: bool = False) -> Tokens:
    """Put sequences one after the other, which are parts of `one` or share a row."""
    joined: Tokens = {k: np.concatenate([part[k] for part in parts]) for k in parts[0] if k != "media"}
    if "media" in parts[0] and p.settings.sight is not None:
        joined["media"] = pictures.join([part["media"] for part in parts], p.settings.sight, one)
    return joined


def _cut(sequence: Tokens, length: int) -> Tokens:
    """Give the first tokens of a sequence; what stands behind them is shown to none."""
    cut: Tokens = {k: v[:length] for k, v in sequence.items() if k != "media"}
    if "media" in sequence:
        seen = sequence["media"]
        cut["media"] = seen | {k: seen[k][:length] for k in ("index", "rotary")}
    return cut


# ---- batches -------------------------------------------------------------------------------------------------------


def collate(
    rows: Sequence[Row], settings: Settings, size: int, width: int, masked: bool, room: pictures.Room | None = None
) -> Batch:
    """Put rows together, with empty rows up to `size`, padded to the bucket that `width` tokens need.

    See `losses.forward` and `losses.completions` for the keys; with `masked` there is a "mask". `room` is that for media.
    """
    width = min((b for b in (*settings.buckets, settings.length) if b >= width), default=settings.length)
    sides, labelled = 2 if settings.mismatched else settings.sides, settings.kind in PER_TOKEN
    fill = {"tokens": np.int32(0), "mask": np.int32(IGNORE) if labelled else np.bool_(False)}
    fill |= {"positions": np.int32(0), "segment_ids": np.int32(-1)}
    fill |= {"key_segment_ids": np.int32(-1)} if settings.fcm_max_ratio else {}
    full: dict[str, Any] = {k: np.full((size, sides, width), v) for k, v in fill.items()}
    found = np.zeros((size, sides), np.int32)
    for i, (sequences, _) in enumerate(rows):
        for side, sequence in enumerate(sequences):
            found[i, side] = n = len(sequence["tokens"])
            for k, array in full.items():
                array[i, side, :n] = sequence[k]

    seen: Batch = {}
    if room is not None and settings.sight is not None:
        each = [[x["media"] if "media" in x else pictures.none(x["positions"]) for x in some] for some, _ in rows]
        seen = pictures.media(each, settings.sight, (size, sides, width), room)

    def side_of(side: Any) -> Batch:
        batch = {"tokens": full["tokens"][:, side], **jax.tree.map(lambda x: x[:, side], seen)}
        batch |= {"labels" if labelled else "mask": full["mask"][:, side]} if masked or labelled else {}
        if settings.packing or settings.fcm_max_ratio:
            names = ("positions", "segment_ids", "key_segment_ids")
            return batch | {"packed": Packed(*(full[k][:, side] for k in names if k in full))}
        return batch | {"lengths": found[:, side]}

    batch = side_of(slice(None) if settings.sides > 1 else 0)
    for name, dtype in NUMBERS[settings.kind].items():
        if name != "prompt":
            values = np.array([numbers[name] for _, numbers in rows], dtype)
            batch[name] = np.zeros((size, *values.shape[1:]), dtype)
            batch[name][: len(rows)] = values
    return batch | ({"kl": side_of(1)} if settings.mismatched else {})
