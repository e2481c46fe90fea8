"""The backward pass of attention on NVIDIA Hopper: Pallas Mosaic GPU kernels.

Algorithm: FlashAttention's (arXiv 2205.14135, 2307.08691). With s = softcap(scale q k), p = exp(s - lse) and
delta = dout . out - dlse,
  dv = sum p dout;  ds = p (dout . v - delta) softcap'(s);  dk = scale sum ds q;  dq = scale sum ds k
Heads of 128 take one kernel of five products, FlashAttention-3's (arXiv 2407.08608), which adds dq up in memory, in float32
and in no fixed order: `flash_joint_gpu`. FLOPs: 6 H + 4 Hv for each pair of a query and a key that share a tile.

Other heads, and those of 128 if they are to be `ordered`, take two kernels with sums that nobody shares, whose order is
always the same: 8 H + 6 Hv FLOPs. One gives dk and dv: a program has a tile of keys of a key head and walks the tiles of
queries that meet it, of all query heads of the group. One group of warps copies; one multiplies keys with queries, hands
probabilities on through shared memory, and sums dv; one multiplies values with dout and sums dk. So a thread keeps one sum,
and heads of 256 fit. The other kernel gives dq: a program has 128 queries of a head, half of them for each of two groups,
and walks tiles of keys. Heads of 64 would gain nothing from five products: shared memory, not tensor cores, bounds them.

Programs that walk most begin first under a causal mask. In tiles that see each other wholly nothing is masked. Operands are
bfloat16 or float16, so p and ds are rounded; sums are float32. Interpreted; two kernels of heads of 128 and of 256 were
measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import flash_gradients_gpu as program
from fdel.kernels import flash_tiles as tiles_of
from fdel.kernels.flash_gradients_gpu import About
from fdel.kernels.flash_joint_gpu import of_both
from fdel.kernels.flash_keys_gpu import HANDS, of_keys
from fdel.kernels.flash_tiles import NUMBERS, Tiles
from fdel.kernels.flash_tiles_gpu import BACKWARD
from fdel.ops.mask import NEG, Mask, Where

FILL = 128  # what tokens are filled up to: a multiple of every tile
LARGE = 1e30  # log-sum-exp of a query that sees nothing: its probabilities are 0
# Tiles of the kernel that gives dq, by the channels of keys and of values: see `flash_tiles_gpu.BACKWARD` for the other.
OF_QUERIES = {
    (64, 64): Tiles(128, 128),
    (128, 128): Tiles(128, 128),
    (192, 128): Tiles(128, 64),
    (256, 256): Tiles(128, 64),
}
# Tiles of keys, and of values, on their way there.
DEPTHS = {(64, 64): (3, 3), (128, 128): (2, 2), (192, 128): (3, 3), (256, 256): (2, 1)}
JOINT = ((128, 128),)  # heads that one kernel serves, which adds dq up in memory
STEPS = 2  # tiles of queries on their way to it
DEPTH = 3  # tiles of queries on their way to the other, at most
MEMORY = 208 * 2**10  # bytes that they, keys, values and probabilities may take there


class Arrays(NamedTuple):
    """What the kernels read, filled up to whole tiles; heads lie beside each other. lse is to the base 2."""

    q: Float[Array, "B T NH"]
    k: Float[Array, "B S KH"]
    v: Float[Array, "B S KHv"]
    dout: Float[Array, "B T NHv"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]


def backward(
    m: Mask, q: Array, k: Array, v: Array, where: Where, sinks: Any, *after: Any, ordered: bool = False,
    interpreted: bool = False,
) -> tuple:  # fmt: skip
    """Give (dq, dk, dv, dsinks): `mask.Passes.backward`, of what `flash_attention_gpu.unsupported` lets through.

    Then come alibi, which is None, out, lse, dout and dlse. `ordered`: equal calls give equal numbers.
    """
    alibi, out, lse, dout, dlse = after
    if alibi is not None:
        raise ValueError("alibi slopes, which attention on Hopper does not have; expected None")
    (t, heads, width), (s, kv_heads), values = q.shape[1:], k.shape[1:3], v.shape[3]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    dsinks = None if sinks is None else -(jnp.exp(sinks - lse) * delta).sum((0, 1)).astype(sinks.dtype)
    base_2 = jnp.where(lse <= NEG / 2, LARGE, lse * program.LOG2E)
    lay = lambda x: _filled(x.reshape(*x.shape[:2], -1))
    per_head = lambda x, fill: _filled(x.swapaxes(1, 2), 2, fill)
    arrays = Arrays(
        lay(q), lay(k), lay(v), lay(dout.astype(q.dtype)), per_head(base_2, LARGE), per_head(delta, 0)
    )  # fmt: skip
    about = lambda tiles: About(
        m.scale, m.softcap, tiles_of.tests(m, where), heads // kv_heads, width, values, tiles, interpreted
    )
    first, second = (about(table[width, values]) for table in (BACKWARD, OF_QUERIES))
    walked = _sight(first, m, where, (t, s), turned=True)
    if (width, values) in JOINT and not ordered:
        dq, dk, dv = _of_both(first, arrays, *walked)
    else:
        dk, dv = _of_keys(first, arrays, *walked)
        dq = _of_queries(second, arrays, *_sight(second, m, where, (t, s), turned=False))
    cut = lambda dx, x: dx[:, : x.shape[1]].reshape(x.shape)
    return cut(dq, q), cut(dk, k), cut(dv, v), dsinks


def _filled(x: Array, axis: int = 1, value: float = 0) -> Array:
    widths = [(0, -x.shape[i] % FILL if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _sight(about: About, m: Mask, where: Where, sizes: tuple[int, int], *, turned: bool) -> tuple[Array, Array, Array]:
    """Give the numbers of queries, the segments of keys, and what each tile walks: see `flash_tiles`."""
    numbers, segments = tiles_of.sight(m, where, *sizes, about.tiles)
    return numbers, segments, tiles_of.ranges(numbers, segments, about.tiles, of_keys=turned)


def _of_keys(
    about: About, arrays: Arrays, numbers: Int[Array, "B 4 T"], segments: Int[Array, "B S"],
    bounds: Int[Array, "B tiles 4"],
) -> list[Array]:  # fmt: skip
    """Give dk [B S KH] and dv [B S KHv]."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, kv_heads = about.tiles, arrays.k.shape[2] // about.width
    parts, both = size.keys // program.ROWS, about.width + about.values
    half, single = functools.partial(_tiled, arrays.q.dtype), functools.partial(gpu.SMEM, dtype=jnp.float32)
    own = {"own_s": half(2, parts, program.ROWS, size.queries)} if about.interpreted else {}
    depth = min(DEPTH, (MEMORY // 2 - size.keys * (both + 2 * size.queries)) // (size.queries * both))
    barrier = lambda count, arrivals: gpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    call = gpu.kernel(
        functools.partial(of_keys, about=about),
        kernel_name="flash_backward_keys",
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)],
        scratch_types={
            **own,
            "k_s": half(parts, program.ROWS, about.width), "v_s": half(parts, program.ROWS, about.values),
            "q_s": half(depth, size.queries, about.width), "dout_s": half(depth, size.queries, about.values),
            "hand_s": half(HANDS * parts, program.ROWS, size.queries),
            "lse_s": single((depth, size.queries)), "delta_s": single((depth, size.queries)),
            "numbers_s": gpu.SMEM((depth, NUMBERS, size.queries), jnp.int32),
            "segments_s": gpu.SMEM((parts, program.ROWS), jnp.int32),
            "shared": barrier(1, 3 * parts), "full": barrier(depth, 5), "free": barrier(depth, 2),
            "given": barrier(HANDS * parts, 1), "taken": barrier(HANDS * parts, 1),
        },
        grid=(bounds.shape[1], len(arrays.q), kv_heads),
        **_launched(),
    )  # fmt: skip
    return call(*arrays, numbers, segments, bounds)


def _of_both(
    about: About, arrays: Arrays, numbers: Int[Array, "B 4 T"], segments: Int[Array, "B S"],
    bounds: Int[Array, "B tiles 4"],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Give dq, dk and dv of heads of 128."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, kv_heads, dtype = about.tiles, arrays.k.shape[2] // about.width, arrays.q.dtype
    parts, half, single = size.keys // program.ROWS, functools.partial(_tiled, dtype), jnp.float32
    own = {"own_s": half(2, parts, program.ROWS, size.queries)} if about.interpreted else {}
    barrier = lambda count, arrivals: gpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    memory = {
        **own,
        "k_s": half(parts, program.ROWS, about.width), "v_s": half(parts, program.ROWS, about.values),
        "q_s": half(STEPS, size.queries, about.width), "dout_s": half(STEPS, size.queries, about.values),
        "ds_s": half(HANDS * parts, program.ROWS, size.queries),
        "dq_s": _tiled(single, parts, size.queries, program.ROWS),
        "lse_s": gpu.SMEM((STEPS, size.queries), single), "delta_s": gpu.SMEM((STEPS, size.queries), single),
        "numbers_s": gpu.SMEM((STEPS, NUMBERS, size.queries), jnp.int32),
        "segments_s": gpu.SMEM((parts, program.ROWS), jnp.int32),
        "shared": barrier(1, 3 * parts), "full": barrier(STEPS, 5), "free": barrier(STEPS, 2),
        "given": barrier(HANDS, 2), "taken": barrier(HANDS, 2),
    }  # fmt: skip
    sums, launched = jax.new_ref(jnp.zeros(arrays.q.shape, single)), _launched()
    grid = {name: launched.pop(name) for name in ("grid_names", "num_threads", "thread_name")}

    def flash_backward(*refs: Any) -> None:
        call = functools.partial(of_both, *refs, about=about)
        pl.run_scoped(call, collective_axes=(grid["thread_name"],), **memory)

    dk, dv = pl.kernel(
        flash_backward,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)],
        mesh=gpu.Mesh(grid=(bounds.shape[1], len(arrays.q), kv_heads), **grid),
        name="flash_backward",
        **launched,
    )(*arrays, numbers, segments, bounds, sums)
    return (jax.freeze(sums) * about.scale).astype(dtype), dk, dv


def _of_queries(
    about: About, arrays: Arrays, numbers: Int[Array, "B 4 T"], segments: Int[Array, "B S"],
    bounds: Int[Array, "B tiles 4"],
) -> Float[Array, "B T NH"]:  # fmt: skip
    """Give dq."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, heads = about.tiles, arrays.q.shape[2] // about.width
    half = functools.partial(_tiled, arrays.q.dtype)
    own = {"own_s": half(2, program.ROWS, size.keys)} if about.interpreted else {}
    keys, values = DEPTHS[about.width, about.values]
    barrier = lambda count, arrivals: gpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    call = gpu.kernel(
        functools.partial(program.of_queries, about=about),
        kernel_name="flash_backward_queries",
        out_type=jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        scratch_types={
            **own,
            "q_s": half(2, program.ROWS, about.width), "dout_s": half(2, program.ROWS, about.values),
            "k_s": half(keys, size.keys, about.width), "v_s": half(values, size.keys, about.values),
            "segments_s": gpu.SMEM((keys, size.keys), jnp.int32), "shared": barrier(2, 2),
            "k_full": barrier(keys, 2), "v_full": barrier(values, 1),
            "k_free": barrier(keys, 2), "v_free": barrier(values, 2),
        },
        grid=(bounds.shape[1], len(arrays.q), heads),
        **_launched(),
    )  # fmt: skip
    return call(*arrays, numbers, segments, bounds)


def _tiled(dtype: Any, *shape: int) -> Any:
    """Give shared memory for operands of products, or for a product."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    tile = gpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return gpu.SMEM(shape, dtype, transforms=(tile, gpu.SwizzleTransform(128)))


def _launched() -> dict[str, Any]:
    """Give what the kernels have in common: the last axis of the grid is walked first, so the first tiles begin first."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return {
        "grid_names": ("tile", "row", "head"), "num_threads": 3, "thread_name": "warps",
        "compiler_params": gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True, reduction_scratch_bytes=0  # sums are products'
        ),
    }  # fmt: skip
