"""What may be attended to in one call (`Packed`, `Paged`) and what is remembered between calls (`Pages`, `Slots`).

A batch is small, made by the host for each step and never donated. State is large, donated, and rides through the
layer walk as a carry. Models never look inside either: `attend`, `causal_conv` and the recurrent ops do.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from fdel.ops.mask import Where

register = jax.tree_util.register_dataclass


@register
@dataclass(frozen=True)
class Patches:
    """Images cut into patches, as a family's tower takes them: what `Media.inputs` is for sight.

    `values` are the numbers of each patch, in the order that `fdel.media` gives the family's patches; `places` its frame,
    row and column, -1 of patches that pad an image and of images that pad a row.
    """

    values: Float[Array, "*rows images patches numbers"]
    places: Int[Array, "*rows images patches 3"]


@register
@dataclass(frozen=True)
class Sounds:
    """Sounds cut into chunks, as a family's tower takes them: what `Media.inputs` is for hearing.

    `features` are log-mel features of each chunk, zeros behind its own; `lengths` how many frames a chunk has, 0 of chunks
    that pad a sound and of sounds that pad a row. Only the last chunk of a sound is shorter than a whole one.
    """

    features: Float[Array, "*rows sounds chunks bins frames"]
    lengths: Int[Array, "*rows sounds chunks"]


@register
@dataclass(frozen=True)
class Media:
    """What stands in the place of tokens in one call: the states of images or sounds, or what they are computed from.

    `index` names the entry of each token, -1 where the token's own embedding stands: in a Packed call int[B T] among the
    entries of its own row, in a Paged one int[T] among all. An entry may have several parts: the first is the embedding,
    a family adds the others to its layers. `inputs` go through the family's `encode(params, inputs, cfg)`, which gives
    `values`.
    """

    index: Int[Array, "*rows T"]
    values: Float[Array, "*rows entries D"] | Float[Array, "*rows entries parts D"] | None = None
    inputs: Any = None


@register
@dataclass(frozen=True)
class Routing:
    """What a training step does to the routers of a Packed call: noise (`jittered`), and a capacity (`limited`).

    `keys` are the data of a random key for each row, so that a row draws the same noise in any microbatch and on any
    device; None: no noise. `jitter` is its amount; `capacity` the factor of `expert_capacity`, None: nothing is dropped.
    `routers` counts those that have drawn, from layer to layer.
    """

    keys: UInt32[Array, "*rows words"] | None = None
    routers: Int[Array, ""] | None = None
    jitter: float = field(default=0.0, metadata={"static": True})
    capacity: float | None = field(default=None, metadata={"static": True})


@register
@dataclass(frozen=True)
class Packed:
    """Whole sequences, several per row: training, scoring, embedding. Tokens are int[B T].

    Tokens see each other only inside a segment. Segment ids rise along a row; padding has an id of its own (or -1).
    With `key_segment_ids` queries see the keys that have their id there: `mask.HIDDEN` hides one from all, its own too.
    With `prefix_ids` a token also sees the keys of the segment of that id, which stands before its own in the row: several
    samples go on from one prompt, computed once; -2 names none. Positions go on too. Only causal attention can do that.
    `single`: every row is one sequence, with padding at its end only; kernels that know lengths alone can serve that.
    `full`: there is no padding either, so that without a causal mask every token sees all of its row.
    `rotary` are the time, row and column by which a family with rotary embeddings of three components turns each token,
    all three the position if it is None. `ahead` says how many tokens after its own each sees too, see `look_ahead`.
    `routing` is what a training step does to routers.
    """

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    key_segment_ids: Int[Array, "B T"] | None = None
    prefix_ids: Int[Array, "B T"] | None = None
    media: Media | None = None
    rotary: Int[Array, "B T 3"] | None = None
    ahead: Int[Array, "B T"] | None = None
    routing: Routing | None = None
    single: bool = field(default=False, metadata={"static": True})
    full: bool = field(default=False, metadata={"static": True})

    @property
    def where(self) -> Where:
        """Segment ids as attention takes them; with prefixes a query has two."""
        if self.prefix_ids is None:
            return Where(self.segment_ids, self.key_segment_ids, ahead=self.ahead, single=self.single, full=self.full)
        keys = self.segment_ids if self.key_segment_ids is None else self.key_segment_ids
        return Where(jnp.stack([self.segment_ids, self.prefix_ids], -1), keys, ahead=self.ahead)


@register
@dataclass(frozen=True)
class Paged:
    """New tokens of sequences whose past lies in state: prefill chunks and decode. Tokens are int[T], flat.

    The T tokens form T // block blocks. A block holds consecutive tokens of *one* sequence (padding at its end has
    position -1); the blocks of a sequence come in order. With block == 1 (decode) every sequence has at most one token.
    `page_table` names the pages of each block's sequence; `rows` is the sequence's slot in recurrent state. A position
    of 0 begins a sequence: its recurrent state starts from zero. Whatever is out of range is dropped on writing.
    `rotary` as in `Packed`, and `ahead`, which names tokens of the same call: none stands in pages that are to come.
    """

    positions: Int[Array, " T"]
    page_table: Int[Array, "blocks pages"]
    rows: Int[Array, " blocks"]
    block: int = field(metadata={"static": True})
    media: Media | None = None
    rotary: Int[Array, "T 3"] | None = None
    ahead: Int[Array, " T"] | None = None


@register
@dataclass(frozen=True)
class Pages:
    """Key/value cache of all attention layers. `v` is None where values are a prefix of keys (MLA latents).

    A cache in 8 bits has scales for each token and head (`ops.quantized_pages`, of TPUs in rows of whole registers: its
    `scale_rows`); other caches have none.
    """

    k: Float[Array, "layers pages kv_heads page head_dim"]
    v: Float[Array, "layers pages kv_heads page head_dim"] | None
    k_scale: Float[Array, "layers pages kv_heads rows lanes"] | None = None
    v_scale: Float[Array, "layers pages kv_heads rows lanes"] | None = None


class Place(NamedTuple):
    """The layer of `attend` where `State.pages` are several pools: its number, its pool, the pages' index in that.

    `kv_heads` are the pool's, which a layer without keys of its own must name.
    """

    layer: Any
    pool: int
    index: Any
    kv_heads: int | None = None


@register
@dataclass(frozen=True)
class Slots:
    """Recurrent state of all layers of one kind: `ssm`, and in `conv` the last inputs of causal convolutions.

    `conv` is an array [layers slots K-1 *C] or a tree of them, as `causal_conv` takes it, or None.
    """

    conv: Any
    ssm: Float[Array, "layers slots ..."]


@register
@dataclass(frozen=True)
class State:
    """What a model remembers between calls; None for what it does not keep.

    Layers whose keys and values have different shapes have a pool of pages for each; a page is the same one in all.
    """

    pages: Pages | tuple[Pages, ...] | None = None
    slots: Slots | None = None


Batch = Packed | Paged


def sequence_lengths(batch: Batch) -> Int[Array, "... T"]:
    """Length so far of the sequence that each token belongs to, as known in this call."""
    if isinstance(batch, Paged):
        blocks = batch.positions.reshape(-1, batch.block)
        return jnp.broadcast_to(blocks.max(-1, keepdims=True) + 1, blocks.shape).reshape(-1)
    s, t = batch.segment_ids, batch.positions.shape[-1]
    ends = jnp.concatenate([s[..., 1:] != s[..., :-1], jnp.ones_like(s[..., :1], bool)], -1)
    last = jax.lax.cummin(jnp.where(ends, jnp.arange(t), t - 1), axis=s.ndim - 1, reverse=True)
    return jnp.take_along_axis(batch.positions, last, -1) + 1


def look_ahead(batch: Batch) -> Int[Array, "... T"] | None:
    """Count the tokens after each one of an image up to that image's last: they see each other. None without media.

    An image is a run of neighbours with entries (`Media.index`) of one sequence, as transformers' Gemma 3 has it. A Paged
    call has to hold the rest of each image that it has a token of.
    >>> seen = ops.Media(jnp.array([[-1, 0, 1, 2, -1, -1]]))
    >>> ops.look_ahead(ops.Packed(jnp.arange(6)[None], jnp.zeros((1, 6), int), media=seen))[0]
    Array([0, 2, 1, 0, 0, 0], dtype=int32)
    """
    if batch.media is None:
        return None
    here, t = batch.media.index >= 0, batch.media.index.shape[-1]
    if isinstance(batch, Paged):
        rows, positions = jnp.repeat(batch.rows, batch.block, total_repeat_length=t), batch.positions
        near = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
    else:
        near = batch.segment_ids[..., 1:] == batch.segment_ids[..., :-1]
    ends = ~(near & here[..., 1:] & here[..., :-1])
    ends = jnp.concatenate([ends, jnp.ones_like(here[..., :1])], -1)
    last = jax.lax.cummin(jnp.where(ends, jnp.arange(t), t - 1), axis=here.ndim - 1, reverse=True)
    return (last - jnp.arange(t)).astype(jnp.int32)


def packed(tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None) -> Packed:
    """One sequence per row from position 0; tokens at or past `lengths` are padding.
    >>> ops.packed(tokens[:1], jnp.array([4])).segment_ids
    Array([[ 0,  0,  0,  0, -1, -1]], dtype=int32, weak_type=True)
    """
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))
    if lengths is None:
        return Packed(positions, jnp.zeros((b, t), jnp.int32), single=True)
    return Packed(positions, jnp.where(positions < lengths[:, None], 0, -1), single=True)


def pack(sequences: list[list[int]], length: int) -> tuple[np.ndarray, Packed]:
    """Pack sequences in order (first fit) into rows of `length`: int[B length] and its batch. Padding tokens are 0.

    A sequence longer than `length` is a ValueError.
    >>> ops.pack([[1, 2], [3, 4, 5], [6]], 4)[0].tolist()
    [[1, 2, 6, 0], [3, 4, 5, 0]]
    """
    rows: list[list[list[int]]] = []
    for s in sequences:
        if len(s) > length:
            raise ValueError(f"a sequence of {len(s)} tokens does not fit a row of {length}; truncate or split it")
        row = next((r for r in rows if sum(map(len, r)) + len(s) <= length), None)
        rows.append([s]) if row is None else row.append(s)
    tokens = np.zeros((len(rows), length), np.int32)
    positions, segments = np.zeros_like(tokens), np.full_like(tokens, -1)
    for i, row in enumerate(rows):
        start = 0
        for j, s in enumerate(row):
            end = start + len(s)
            tokens[i, start:end], positions[i, start:end], segments[i, start:end] = s, np.arange(len(s)), j
            start = end
    return tokens, Packed(positions, segments)


def paged(
    chunks: list[tuple[int, int, list[int]]], page_table: np.ndarray, *, block: int = 1, size: int | None = None
) -> tuple[np.ndarray, Paged]:
    """Build a Paged batch from chunks (row, start position, new tokens) and the page table int[rows pages].

    Each chunk is padded to a multiple of `block`, the whole to `size` tokens. Returns int[T] tokens and the batch; token
    i of chunk c stands at index (number of blocks before c) * block + i. Padding blocks point past every page and slot.
    """
    if block == 1 and any(len(t) > 1 for _, _, t in chunks):
        raise ValueError("block=1 is for decode: one token per chunk; use a larger block for prefill")
    needed = sum(-(-len(t) // block) for _, _, t in chunks)
    blocks = needed if size is None else size // block
    if needed > blocks or (size is not None and size % block):
        raise ValueError(f"{needed} blocks of {block} tokens do not fit size={size}; it must be a multiple of block")
    tokens = np.zeros((blocks, block), np.int32)
    positions = np.full((blocks, block), -1, np.int32)
    table = np.full((blocks, page_table.shape[1]), np.iinfo(np.int32).max, np.int32)
    rows = np.full(blocks, np.iinfo(np.int32).max, np.int32)
    b = 0
    for row, start, new in chunks:
        for i in range(0, len(new), block):
            part = new[i : i + block]
            tokens[b, : len(part)] = part
            positions[b, : len(part)] = start + i + np.arange(len(part))
            table[b], rows[b] = page_table[row], row
            b += 1
    return tokens.reshape(-1), Paged(positions.reshape(-1), table, rows, block)
