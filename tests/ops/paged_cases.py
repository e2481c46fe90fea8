"""Attention over pages by a formula: ragged sequences, NaN where no token is, a huge key before what a query sees."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fdel.ops import quantized_pages
from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import Mask
from fdel.ops.platform import tracing_for


class Sizes(NamedTuple):
    """Of a cache: key heads, channels of a head, heads in a row, tokens of a page, pages of a sequence."""

    kv_heads: int
    head_dim: int
    side: int
    page: int
    width: int
    latent: int | None = None  # channels of values, which are the first of the keys; None: values of their own


class Case(NamedTuple):
    """A call of `paged_attention` on layer 1, and what it gives for tokens of sequences."""

    batch: Paged
    cache: Pages
    q: jax.Array
    sinks: jax.Array
    want: np.ndarray  # [T N Hv] in float64
    real: np.ndarray  # [T]: not padding, of which only padding of an empty block has a value


def formula(q, k, v, position: int, mask: Mask, sink: float) -> np.ndarray:
    """Attend from one head of one token to its sequence's keys and values [tokens H], in float64."""
    first = max(0, position - (mask.window or position + 1) + 1)
    first = first if mask.chunk is None else max(first, position // mask.chunk * mask.chunk)
    seen = slice(first, position + 1)
    s = k[seen] @ q * mask.scale
    s = np.append(s if mask.softcap is None else mask.softcap * np.tanh(s / mask.softcap), sink)
    p = np.exp(s - s.max())
    return (p / p.sum())[:-1] @ v[seen]


class Bits:
    """Pages in 8 bits as TPUs have them: any bytes where no token is, and NaN scales."""

    def __init__(self, shape: tuple[int, ...], format: str):
        self.dtype, self.n = jnp.dtype(quantized_pages.FORMATS[format][0]), quantized_pages.scales(shape[-1])
        self.read = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}[format]
        self.values = np.random.default_rng(1).integers(0, 256, shape, np.uint8).view(self.dtype)
        with tracing_for("tpu"):
            rows = quantized_pages.scale_rows(self.n, shape[-2])
        self.scales = np.full((*shape[:3], *rows), np.nan, np.float32)
        self.places = [
            tuple(map(int, x)) for x in zip(*quantized_pages.scale_places(self.n, shape[-2], rows[0]), strict=True)
        ]

    def put(self, page: int, x: np.ndarray) -> np.ndarray:
        """Write the first tokens of layer 1's page, [heads tokens channels], and give what it then holds, in float64."""
        values, scales = map(np.asarray, quantized_pages.encode(jnp.asarray(x, jnp.float32), self.dtype, self.n))
        self.values[1, page, :, : x.shape[1]] = values
        for i, (row, first) in enumerate(self.places):
            self.scales[1, page, :, row, first : first + x.shape[1]] = scales[..., i]
        parts = values.view(self.read).astype(np.float64).reshape(*scales.shape, -1)
        return (parts * scales[..., None]).reshape(x.shape)


def case(
    sizes: Sizes, block: int, heads: int, sequences: list, mask: Mask, dtype, sinks: bool = True, format: str = ""
) -> Case:
    """Sequences of (length, new tokens) in blocks of `block`; none has pages 0 and 1, whose layer 0 is NaN as well."""
    r = np.random.default_rng(0)
    kv_heads, dim, side, page, width, latent = sizes
    blocks = [(i, j) for i, (_, new) in enumerate(sequences) for j in range(0, max(new, 1), block)]
    total = len(sequences) * width + 2
    draw: Callable = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), dtype), np.float64)
    row = -(-dim // 128) * 128 if latent or dim % 64 else dim * side
    shape = 2, total, kv_heads // side, page, row
    k, v = (Bits(shape, format) if format else np.full(shape, np.nan) for _ in range(2))
    table, free = np.full((len(blocks), width), total), iter(r.permutation(total))
    q, sink = draw(len(blocks) * block, heads, dim), r.normal(size=heads) if sinks else np.full(heads, -np.inf)
    positions, want, past = np.full((len(blocks), block), -1), np.zeros((*q.shape[:2], latent or dim)), []
    for i, (length, new) in enumerate(sequences):
        keys = draw(length, kv_heads, dim)
        past.append((keys, keys[..., :latent] if latent else draw(length, kv_heads, dim)))
        if mask.window and length > mask.window + new:
            past[-1][0][length - mask.window - new] = 1e4
        mine = [b for b, (sequence, _) in enumerate(blocks) if sequence == i]
        for j in range(-(-length // page)):
            table[mine, j], part = next(free), slice(j * page, (j + 1) * page)
            for pages, x in [*zip((k, v), past[-1], strict=True)][: 1 if latent else 2]:
                rows = np.zeros((len(x[part]), kv_heads // side, row))
                rows[..., : dim * side] = x[part].reshape(-1, kv_heads // side, dim * side)
                if format:
                    held = pages.put(table[mine[0], j], rows.swapaxes(0, 1)).swapaxes(0, 1)
                    x[part] = held[..., : dim * side].reshape(x[part].shape)
                else:
                    pages[1, table[mine[0], j], :, : len(rows)] = rows.swapaxes(0, 1)
    for b, (i, j) in enumerate(blocks):
        length, new = sequences[i]
        for t in range(min(block, new - j)):
            positions[b, t] = length - new + j + t
            for n in range(heads):
                keys, values = (x[:, n * kv_heads // heads] for x in past[i])
                row = b * block + t
                want[row, n] = formula(q[row, n], keys, values, positions[b, t], mask, sink[n])
    ints = lambda x: jnp.asarray(x, jnp.int32)
    batch = Paged(ints(positions.reshape(-1)), ints(table), ints([i for i, _ in blocks]), block)
    kept = [None if latent and x is v else x for x in (k, v)]
    arrays = [None if x is None else jnp.asarray(x.values) if format else jnp.asarray(x, dtype) for x in kept]
    arrays += [None if x is None else jnp.asarray(x.scales) for x in kept if format]
    return Case(
        batch, Pages(*arrays), jnp.asarray(q, dtype), jnp.asarray(sink, jnp.float32), want, positions.ravel() >= 0
    )
