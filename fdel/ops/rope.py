"""Rotary position embeddings (arXiv:2104.09864) and the frequency scalings that checkpoints name."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.ops import cpu
from fdel.ops.batch import Batch, sequence_lengths


@dataclass(frozen=True)
class Rope:
    """Parameters of one rotary embedding; hashable. `dim` is the number of rotated channels.

    kind: default | linear | dynamic | yarn | llama3 | longrope | proportional. `original` is the context length before
    scaling. `attention` is an explicit attention factor (yarn, longrope); `mscale` and `mscale_all` the two of DeepSeek's
    yarn; `short_mscale` and `long_mscale` the factors of a long rope below and above `original`. `partial` is the share of
    a head that `dim` is; a proportional rope has the frequencies of the whole head, and turns that share of its pairs.
    `sections` are how many pairs turn by each component of `Packed.rotary` (time, row, column): the pairs lie in chunks one
    behind the other, or with `interleaved` alternate as long as rows and columns have some (`components`).
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    attention: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all: float | None = None
    truncate: bool = True
    low_freq: float = 1.0
    high_freq: float = 4.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    partial: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Compute yarn's magnitude correction 0.1 * mscale * ln(factor) + 1 (arXiv:2309.00071, eq. 22).
    >>> round(ops.yarn_mscale(4.0), 3)
    1.139
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(r: Rope, inv: np.ndarray) -> np.ndarray:
    # Channels that turn more than beta_fast times over the original context keep their frequency, those that turn
    # less than beta_slow times are interpolated, with a linear ramp between.
    turn = lambda n: r.dim * math.log(r.original / (n * 2 * math.pi)) / (2 * math.log(r.theta))
    low, high = turn(r.beta_fast), turn(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.dim - 1)
    ramp = np.clip((np.arange(r.dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    return inv / r.factor * ramp + inv * (1 - ramp)


def frequencies(r: Rope) -> tuple[np.ndarray, float]:
    """Compute inverse frequencies float64[dim / 2] and the factor on cos and sin; for contexts up to `original`."""
    inv = r.theta ** (-np.arange(0, r.dim, 2) / r.dim)
    match r.kind:
        case "default" | "dynamic":
            return inv, 1.0
        case "linear":
            return inv / r.factor, 1.0
        case "proportional":
            return np.where(np.arange(r.dim // 2) < int(r.partial * r.dim // 2), inv / r.factor, 0.0), 1.0
        case "llama3":
            smooth = np.clip((r.original / (2 * math.pi / inv) - r.low_freq) / (r.high_freq - r.low_freq), 0, 1)
            return (1 - smooth) * inv / r.factor + smooth * inv, 1.0
        case "yarn":
            ratio = yarn_mscale(r.factor, r.mscale or 0) / yarn_mscale(r.factor, r.mscale_all or 0)
            default = ratio if r.mscale and r.mscale_all else yarn_mscale(r.factor)
            return _yarn(r, inv), default if r.attention is None else r.attention
        case "longrope":
            default = math.sqrt(1 + math.log(r.factor) / math.log(r.original)) if r.factor > 1 else 1.0
            return inv / np.asarray(r.short), default if r.attention is None else r.attention
    raise ValueError(
        f"rope kind {r.kind!r} is unknown; known: default, linear, dynamic, yarn, llama3, longrope, proportional"
    )


def components(r: Rope) -> np.ndarray:
    """Give the component of `Packed.rotary` by which each pair turns, int[dim / 2]; ValueError for sections that misfit.

    Chunks as in arXiv:2409.12191, section 2.1, alternating as in arXiv:2511.21631, section 2.
    >>> ops.components(ops.Rope(16, 1e4, sections=(2, 3, 3))).tolist()
    [0, 0, 1, 1, 1, 2, 2, 2]
    >>> ops.components(ops.Rope(16, 1e4, sections=(4, 2, 2), interleaved=True)).tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    pairs, ends = r.dim // 2, [3 * n for n in r.sections]  # where rows and columns end among pairs that alternate
    fit = len(r.sections) == 3 and sum(r.sections) == pairs
    if not fit or (r.interleaved and (ends[1] > pairs + 1 or ends[2] > pairs)):
        found = f"Rope.sections={r.sections}, interleaved={r.interleaved}"
        raise ValueError(
            f"{found}: expected three numbers of pairs, {pairs} together, and room for those that alternate"
        )
    if not r.interleaved:
        return np.repeat(np.arange(3), r.sections)
    out = np.zeros(pairs, int)
    for part in 1, 2:
        out[part : ends[part] : 3] = part
    return out


def rotation(r: Rope, batch: Batch) -> tuple[Float[Array, "... T half"], Float[Array, "... T half"]]:
    """Compute cos and sin of every position's angles, in float32, once per forward.

    `dynamic` (NTK) and `longrope` depend on the length of each sequence so far. As in transformers, keys that were cached
    before the length passed `original` keep their old angles. A rope with sections turns by `batch.rotary`, if it is there;
    for one without them that is a ValueError.
    >>> cos, sin = ops.rotation(ops.Rope(4, 1e4), ops.packed(tokens))  # tokens [4 6]
    >>> cos.shape
    (4, 6, 2)
    """
    inv, factor = frequencies(r)
    freq, scale = jnp.asarray(inv, jnp.float32), jnp.float32(factor)
    if r.kind in ("dynamic", "longrope"):
        length = sequence_lengths(batch)[..., None].astype(jnp.float32)
        if r.kind == "longrope":
            far = jnp.asarray(inv * np.asarray(r.short) / np.asarray(r.long), jnp.float32)
            freq = jnp.where(length > r.original, far, freq)
            if r.short_mscale is not None and r.long_mscale is not None:
                scale = jnp.where(length > r.original, r.long_mscale, r.short_mscale)
        else:
            base = jnp.maximum(r.factor * length / r.original - (r.factor - 1), 1.0)
            freq = freq * base ** (-jnp.arange(0, r.dim, 2) / (r.dim - 2))
    if batch.rotary is None:
        places = batch.positions[..., None]
    elif r.sections:
        places = batch.rotary[..., components(r)]
    else:
        raise ValueError("batch.rotary: the rope has no sections, it turns by positions; leave batch.rotary out")
    angles = places.astype(jnp.float32) * freq
    cos, sin = cos_sin(angles)
    return cos * scale, sin * scale


def cos_sin(angles: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Compute cos and sin of angles, in radians; also on a CPU once for all heads that turn by them."""
    return cpu.once(lambda x: (jnp.cos(x), jnp.sin(x)), angles)


def rope(x: Float[Array, "... T N H"], rot: tuple[Array, Array]) -> Float[Array, "... T N H"]:
    """Rotate channel pairs (i, i + R/2) of the first R channels by `rotation(...)`; the others pass through.
    >>> ops.rope(jnp.array([[[1.0, 2, 3, 4]]]), (jnp.zeros((1, 2)), jnp.ones((1, 2))))  # a quarter turn
    Array([[[-3., -4.,  1.,  2.]]], dtype=float32)
    """
    half = rot[0].shape[-1]
    cos, sin = rot[0][..., None, :], rot[1][..., None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return out if 2 * half == x.shape[-1] else jnp.concatenate([out, x[..., 2 * half :]], -1)


def rope_interleaved(x: Float[Array, "... T N H"], rot: tuple[Array, Array]) -> Float[Array, "... T N H"]:
    """Rotate channel pairs (2i, 2i + 1) of the first R channels; the others pass through (GPT-J's order).
    >>> ops.rope_interleaved(jnp.array([[[1.0, 2, 3, 4]]]), (jnp.zeros((1, 2)), jnp.ones((1, 2))))
    Array([[[-2.,  1., -4.,  3.]]], dtype=float32)
    """
    half = rot[0].shape[-1]
    cos, sin = rot[0][..., None, :], rot[1][..., None, :]
    pairs = x[..., : 2 * half].astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    out = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return out if 2 * half == x.shape[-1] else jnp.concatenate([out, x[..., 2 * half :]], -1)
