"""What the host hands to a device for a step, and what comes back: every layout, packed and unpacked in this file.

**A plan** is one int32 array, so that a step costs one copy to the device. A line is a block of known tokens of one
sequence (`Extend`) or a sequence that decodes (`Decode`); its columns are the fields in their order, `pages` last:

| field  | Extend                                         | Decode        |
|--------|------------------------------------------------|---------------|
| row    | the sequence's row of `Rows`                   | the same      |
| start  | position of the block's first token            | absent        |
| length | tokens of the block                            | absent        |
| draws  | 1: a token is drawn after the block's last one | absent        |
| masked | 1: the line's mask limits what is drawn        | the same      |
| pages  | the sequence's page table, W columns           | the same      |

Spare lines name a row and pages that do not exist: they read zeros, write nothing and draw nothing. **Masks** are
uint32[lines, ceil(V / 32)], one bit per token of the vocabulary, the lowest first; read where `masked` is 1.

**What is seen** by a call of "extend" of a model that sees is int32[lines, 4 block] beside its plan: of each token of a
line the entry that stands in its place, -1 for none, then three components of its rotary position each.

**Admissions** are int32[lines, columns]: the number of a row, then what the device holds of it, the leaves of a `Rows` in
their order as bits of 32 (`pack_bits`). Spare lines name a row that does not exist. A row's `Sampling` is packed so on the
device, too: each array of a call costs time, and most of a step's were of it.

**Copies** of pages are int32[rows, 2], from which to which, in their order; spare ones name pages that do not exist.

**What a call drew** (`Out.drawn`) is one int32 array too, of 1 + 4k columns: how many tokens; k tokens; the float32 bits of
their k log-probabilities, k sampled ones and k `kept` (see `Sampled`). What stands behind them means nothing.

**A call** as bytes, for processes that follow another, is a file of safetensors: its arrays by number, and "call", the JSON
text of its name, adapter and static arguments.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load, save

TOGETHER = (
    512  # tokens of several texts that are computed in one row: in longer ones attention would take the most time
)
NOWHERE = np.iinfo(np.int32).max  # a page that is out of range
CALLS = (
    "begin", "warm_up", "admit", "encode", "extend", "decode", "copy", "score", "sleep", "weights", "remove",
    "compile", "end",
)  # fmt: skip


class Extend(NamedTuple):
    """Blocks of known tokens to compute, a line each."""

    row: Int[Any, " B"]
    start: Int[Any, " B"]
    length: Int[Any, " B"]
    draws: Int[Any, " B"]
    masked: Int[Any, " B"]
    pages: Int[Any, "B W"]


class Decode(NamedTuple):
    """Sequences to continue by a token or more, a line each."""

    row: Int[Any, " B"]
    masked: Int[Any, " B"]
    pages: Int[Any, "B W"]


Plan = TypeVar("Plan", Extend, Decode)


def plan_shape(kind: type[Extend] | type[Decode], lines: int, pages: int) -> tuple[int, int]:
    """The shape of a packed plan."""
    return lines, len(kind._fields) - 1 + pages


def blank_plan(kind: type[Extend] | type[Decode], lines: int, pages: int, rows: int) -> Int[np.ndarray, "lines C_W"]:
    """Pack spare lines alone; row `rows` is the first that does not exist."""
    packed = np.full(plan_shape(kind, lines, pages), NOWHERE, np.int32)
    packed[:, : packed.shape[1] - pages] = 0
    packed[:, 0] = rows
    return packed


def pack_plan(plan: Extend | Decode, lines: int, rows: int) -> Int[np.ndarray, "lines C_W"]:
    """Pack a plan's columns, and fill it up to `lines` with spare ones."""
    *columns, pages = plan
    packed = blank_plan(type(plan), lines, pages.shape[1], rows)
    for i, column in enumerate(columns):
        packed[: len(pages), i] = column
    packed[: len(pages), len(columns) :] = pages
    return packed


def unpack_plan(kind: type[Plan], packed: Array) -> Plan:
    """Take a plan apart again."""
    columns: list[Any] = [packed[:, i] for i in range(len(kind._fields) - 1)]
    return kind._make([*columns, packed[:, len(columns) :]])


def pack_seen(
    index: Int[np.ndarray, "B block"], turns: Int[np.ndarray, "B block 3"], lines: int
) -> Int[np.ndarray, "lines C"]:
    """Pack what stands in the place of tokens, and their turns; spare lines see nothing."""
    packed = np.zeros((lines, 4 * index.shape[1]), np.int32)
    packed[:, : index.shape[1]] = -1
    packed[: len(index)] = np.concatenate([index, turns.reshape(len(turns), 3 * index.shape[1])], 1)
    return packed


def unpack_seen(packed: Int[Array, "lines C"]) -> tuple[Int[Array, " T"], Int[Array, "T 3"]]:
    """Take it apart again: (entry of each token, its turns)."""
    block = packed.shape[1] // 4
    return packed[:, :block].reshape(-1), packed[:, block:].reshape(-1, 3)


def pack_bits(tree: Any) -> Int[np.ndarray, "B columns"]:
    """Put the leaves [B ...] of a tree side by side, booleans and numbers of 32 bits."""
    bits = (x.astype(np.int32) if x.dtype == bool else x.view(np.int32) for x in jax.tree.leaves(tree))
    return np.concatenate([x.reshape(len(x), -1) for x in bits], 1)


def unpack_bits(packed: Int[Array, "B columns"], like: Any) -> Any:
    """Take them apart again, on the device: a tree as `like`, of which but the length of the first axis counts."""
    leaves, tree = jax.tree.flatten(like)
    ends = np.cumsum([0, *(math.prod(x.shape[1:]) for x in leaves)])
    cut = [packed[:, i:j].reshape(-1, *x.shape[1:]) for i, j, x in zip(ends, ends[1:], leaves, strict=False)]
    typed = lambda bits, x: bits != 0 if x.dtype == bool else jax.lax.bitcast_convert_type(bits, x.dtype)
    return jax.tree.unflatten(tree, map(typed, cut, leaves))


def pack_admissions(rows: Sequence[tuple[int, Any]], like: Any, lines: int) -> Int[np.ndarray, "lines columns"]:
    """Pack what is known of some rows, of each its number and a tree of one row, and fill up with spare lines.

    `like` are all rows, a tree of arrays [R ...].
    """
    leaves = jax.tree.leaves(like)
    packed = np.zeros((lines, 1 + sum(math.prod(x.shape[1:]) for x in leaves)), np.int32)
    packed[:, 0] = len(leaves[0])
    for line, (number, row) in zip(packed, rows, strict=False):
        line[0], line[1:] = number, pack_bits(row)[0]
    return packed


def pack_copies(copies: Sequence[Sequence[int]], rows: int) -> Int[np.ndarray, "rows 2"]:
    """Pack copies of pages, at most one for each row."""
    packed = np.full((rows, 2), NOWHERE, np.int32)
    packed[: len(copies)] = np.reshape(copies, (-1, 2))
    return packed


class Drawn(NamedTuple):
    """The tokens that each line drew: the first `length` of k."""

    length: Int[Any, " B"]
    tokens: Int[Any, "B k"]
    logprobs: Float[Any, "B k"]
    sampled_logprobs: Float[Any, "B k"]
    kept: Float[Any, "B k"]


class Token(NamedTuple):
    """A token that was drawn; see `Sampled`."""

    id: int
    logprob: float
    sampled_logprob: float
    kept: float
    likely: Sequence[tuple[int, float]]  # the most likely tokens and their log-probabilities


class Out(NamedTuple):
    """What a call gives back. The most likely tokens are of line i // k and its draw i % k."""

    drawn: Int[Array, "B columns"]  # a packed `Drawn`, of 1 + 4 k columns
    top_ids: Int[Array, "Bk n"]
    top_logprobs: Float[Array, "Bk n"]


def pack_drawn(drawn: Drawn) -> Int[Array, "B columns"]:
    """Pack what was drawn, on the device."""
    length, tokens, *floats = drawn
    bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in floats]
    return jnp.concatenate([length[:, None], tokens, *bits], 1)


def join_drawn(packed: Int[Array, "steps B 5"]) -> Int[Array, "B columns"]:
    """Make one of what several steps drew, on the device: each at most a token of each line."""
    length, *columns = (packed[:, :, i].T for i in range(5))
    return jnp.concatenate([length.sum(1, keepdims=True), *columns], 1)


def unpack_drawn(packed: Int[np.ndarray, "B columns"]) -> Drawn:
    """Take it apart again, on the host."""
    k = packed.shape[1] // 4
    floats = packed[:, 1 + k :].view(np.float32)
    return Drawn(packed[:, 0], packed[:, 1 : 1 + k], floats[:, :k], floats[:, k : 2 * k], floats[:, 2 * k :])


def unpack_out(out: Out, likely: bool) -> list[list[Token]]:
    """Wait for a call and list the tokens of each line; `likely` ones only if they are wanted: each array costs time."""
    drawn = unpack_drawn(np.asarray(out.drawn))
    k = drawn.tokens.shape[1]
    tops: list[Sequence[tuple[int, float]]] = [()] * drawn.tokens.size
    if likely:
        ids, logprobs = (np.asarray(x).tolist() for x in out[1:])
        tops = [list(zip(*both, strict=True)) for both in zip(ids, logprobs, strict=True)]
    lines = zip(*(x.tolist() for x in drawn), strict=True)  # each is cut to the tops of what it drew
    each = ((line, tops[i * k : i * k + n]) for i, (n, *line) in enumerate(lines))
    return [[Token(*token) for token in zip(*line, top, strict=False)] for line, top in each]


class Call(NamedTuple):
    """What `Device.execute` does: the name of one of `CALLS`, host arrays, and static arguments."""

    name: str
    arrays: Sequence[Any] = ()
    adapter: str = ""  # whose weights
    static: dict[str, int] = {}


def pack_call(call: Call) -> bytes:
    """Write a call as bytes."""
    text = np.frombuffer(json.dumps([call.name, call.adapter, call.static]).encode(), np.uint8)
    return save({"call": text} | {str(i): np.asarray(a, order="C") for i, a in enumerate(call.arrays)})


def unpack_call(message: bytes) -> Call:
    """Read a call; ValueError if it is none."""
    try:
        arrays = load(message)
        name, adapter, static = json.loads(arrays.pop("call").tobytes())
        found = Call(name, [arrays[str(i)] for i in range(len(arrays))], adapter, static)
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"a message of {len(message)} bytes that is no call ({e}): is this another version?") from e
    if name not in CALLS:
        raise ValueError(f"a message {name!r}; expected one of {', '.join(CALLS)}: is this another version?")
    return found


def together(texts: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
    """Group texts, by their numbers, that are computed in one row of at most `longest` tokens; the longest ones first.
    >>> together([[1] * 9, [2] * 300, [3] * 250, [4] * 40], 400)
    [[1], [2, 3, 0]]
    """
    room, groups = -1, list[list[int]]()
    for i in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
        if len(texts[i]) > room:
            groups, room = [*groups, []], min(TOGETHER, longest)
        groups[-1].append(i)
        room -= len(texts[i])
    return groups
