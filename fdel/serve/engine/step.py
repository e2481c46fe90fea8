"""The device side of serving: prefill chunks and decode, each forward, head and draw, over rows that stay there."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel import params as P
from fdel.models import heads
from fdel.ops import quantized_pages
from fdel.ops.cpu import in_step
from fdel.params.mesh import joined, spread
from fdel.params.spec import Param, zeros
from fdel.serve.engine import packing
from fdel.serve.engine.packing import Out
from fdel.serve.engine.rows import Drafts, Net, Rows, advance, guess, propose, sampling_of
from fdel.serve.engine.sampling import sampling_rows

States = tuple[ops.State, ...]
PAGE = 64  # tokens per page
SCORED = 128  # tokens whose logits are in memory at once in `score`


class Programs(NamedTuple):
    """The jitted functions of one model on one mesh. Params and state are tuples: the model's, and the draft model's."""

    begin: Callable[..., tuple[States, Rows]]  # (rows=, length=, pages=, dtypes=)
    admit: Callable[..., Rows]  # (Rows, packed admissions)
    copy: Callable[..., States]  # (state, packed copies of pages)
    # (params, state, Rows, packed plan, masks, and of a model that sees what is seen and entries, block=)
    extend: Callable[..., tuple[States, Rows, Out]]
    decode: Callable[..., tuple[States, Rows, Out]]  # (params, state, Rows, packed plan, masks, drafts=, steps=)
    score: Callable[..., tuple[Array, Array, Array]]  # (params, tokens[B T], lengths, slot, targets[3 N], count, top=)
    embed: Callable[..., Array]  # (the model's params, tokens[B T], slot of the adapter, batch= an ops.Packed)
    encode: Callable[..., Array]  # (the model's params, entries, patches, places, which entries, slot of the adapter)
    traces: Counter  # how often each was traced, and so compiled


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None if they are on one device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return joined(mesh) if isinstance(mesh, Mesh) and mesh.size > 1 else None


def compute_dtype(params: Any) -> np.dtype:
    """The dtype that activations have, and so keys, values and recurrent inputs."""
    return jax.eval_shape(lambda table: ops.embed(table, jnp.zeros(1, jnp.int32)), heads.inner(params)["embed"]).dtype


def encoded(family: ModuleType, cfg: Any, params: Any, example: tuple[int, int]) -> jax.ShapeDtypeStruct:
    """Shape one entry, [D] or [parts D], of what a family gives of a picture of so many patches of so many numbers."""
    patches, numbers = example
    picture = ops.Patches(np.zeros((1, patches, numbers), np.float32), np.zeros((1, patches, 3), np.int32))
    out = jax.eval_shape(lambda p, x: family.encode(heads.inner(p), x, cfg), params, picture)
    return jax.ShapeDtypeStruct(out.shape[1:], out.dtype)


@functools.lru_cache(maxsize=16)
def programs(
    family: ModuleType, cfg: Any, mesh: Mesh | None = None, draft: Net | None = None, kv: str | None = None,
    kernels: tuple[tuple[str, str], ...] = (), turned: bool = False,
) -> Programs:  # fmt: skip
    """Make the jitted functions of a model, and of a smaller one if that is to make drafts for it.

    `kv` is the format of keys and values in the cache, "int8" or "fp8"; None: the dtype of the activations. `kernels` are
    pairs of an operation and its implementation. Rows of a model whose tokens are `turned` by three components have a
    shift. They are cached because jax keeps compiled programs with the jitted function: a new one would compile again.
    """
    traces: Counter = Counter()
    nets: tuple[Net, ...] = ((family, cfg),) if draft is None else ((family, cfg), draft)
    specs = lambda **sizes: [spread(quantized(f.state_spec(c, page=PAGE, **sizes), kv), mesh) for f, c in nets]
    state_sharding, replicated = None, None
    if mesh is not None:  # fixed, so that no step hands the next one another layout, which would compile again
        replicated = NamedSharding(mesh, PartitionSpec())
        state_sharding = tuple(P.shardings(spec, mesh, P.SERVE) for spec in specs(pages=1, rows=1))

    def begin(*, rows: int, length: int, pages: int, dtypes: tuple) -> tuple[States, Rows]:
        made = (P.init(s, jax.random.key(0), d) for s, d in zip(specs(pages=pages, rows=rows), dtypes, strict=True))
        sampling = jnp.asarray(packing.pack_bits(sampling_rows([], [], [], [], vocab=cfg.vocab, rows=rows)))
        tokens, known = jnp.zeros((rows, length), jnp.int32), jnp.zeros(rows, jnp.int32)
        return tuple(made), Rows(tokens, known, known > 0, sampling, known - 1, known if turned else None)

    def extend(params, state, rows: Rows, plan: Array, masks: Array, *seen: Array, block: int) -> tuple:
        return _extend(nets, mesh, params, state, rows, packing.unpack_plan(packing.Extend, plan), masks, block, seen)

    def encode(params, entries: Array, *picture: Array) -> Array:
        return _encode(family, cfg, params, entries, *picture)

    def decode(params, state, rows: Rows, plan: Array, masks: Array, *, drafts: int, steps: int) -> tuple:
        lines = packing.unpack_plan(packing.Decode, plan)
        one = lambda params, state, rows: _decode(nets, mesh, params, state, rows, lines, masks, drafts)
        return one(params, state, rows) if steps == 1 else _repeat(one, params, state, rows, steps)

    def embed(params, tokens: Array, slot: Array, batch: ops.Packed) -> Float[Array, "B T D"]:
        params = P.lora.choose(params, slot[None])
        x = family.hidden(heads.inner(params), tokens, cfg, batch)[0]
        return x if heads.kind_of(params) is None else heads.outputs(params, x)

    def score(params, tokens: Array, lengths: Array, slot: Array, targets: Array, count: Array, *, top: int) -> tuple:
        x = embed(params, tokens, slot, ops.packed(tokens, lengths))
        return _score(x, family.head(P.lora.choose(params, slot[None]), cfg), targets, count, top)

    def jit(f: Callable, donate: tuple = (), static: tuple = (), out: Any = replicated) -> Callable:
        counted = _counted(ops.tracing_once()(ops.use(**dict(kernels))(on_mesh(mesh, f))), traces)
        return jax.jit(counted, donate_argnums=donate, static_argnames=static, out_shardings=mesh and out)

    moved = (state_sharding, replicated, replicated)
    return Programs(
        jit(begin, static=("rows", "length", "pages", "dtypes"), out=moved[:2]),
        jit(admit, donate=(0,)),
        jit(copy, donate=(0,), out=state_sharding),
        jit(extend, donate=(1, 2), static=("block",), out=moved),
        jit(decode, donate=(1, 2), static=("drafts", "steps"), out=moved),
        jit(score, static=("top",)),
        jit(embed),
        jit(encode, donate=(1,)),
        traces,
    )


def _encode(
    family: ModuleType, cfg: Any, params: Any, entries: Array, values: Array, places: Array, which: Array, slot: Array
) -> Array:
    """Put what the tower gives of one picture, or one sound, into the array of entries; numbers past its end are dropped.

    `values` are patches [P numbers] and `places` theirs, or the features of chunks [chunks bins frames] and their lengths.
    """
    params = heads.inner(P.lora.choose(params, slot[None]))
    kind = ops.Patches if values.ndim == 2 else ops.Sounds
    new = family.encode(params, kind(values[None], places[None]), cfg)
    return entries.at[which[: len(new)]].set(new.astype(entries.dtype), mode="drop")


def on_mesh(mesh: Mesh | None, f: Callable) -> Callable:
    """Trace a function for a mesh, whatever the thread that calls it has set: kernels are divided between its devices."""
    if mesh is None:
        return f

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*args, **kwargs)

    return traced


def _counted(f: Callable, traces: Counter) -> Callable:
    """Count how often jax traces a function: its body runs then, and only then."""

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        traces[f.__name__] += 1
        return f(*args, **kwargs)

    return traced


def admit(rows: Rows, packed: Int[Array, "lines columns"]) -> Rows:
    """Give rows to sequences."""
    numbers, new = packing.unpack_bits(packed, (rows.length, rows))
    return jax.tree.map(lambda every, some: every.at[numbers].set(some, mode="drop"), rows, new)


def copy(state: States, copies: Int[Array, "R 2"]) -> States:
    """Copy pages in all pools, one after the other and in place."""

    def one(i: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(pool, copies[i, 0], 1, 1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, copies[i, 1], 1)

    count = (copies[:, 0] != packing.NOWHERE).sum()
    pools = [s.pages for s in state]
    pools = jax.lax.fori_loop(0, count, lambda i, pools: jax.tree.map(partial(one, i), pools), pools)
    return tuple(replace(s, pages=p) for s, p in zip(state, pools, strict=True))


def _adapted(params: tuple, rows: Rows, row: Array, block: int) -> tuple:
    """Choose the adapter of each token, for blocks of tokens of these rows."""
    slots = jnp.repeat(rows.adapter.at[row].get(mode="clip"), block)
    return (P.lora.choose(params[0], slots), *params[1:])


def _extend(
    nets: Sequence[Net], mesh: Mesh | None, params: tuple, state: tuple, rows: Rows, plan: packing.Extend, masks: Array,
    block: int, seen: Sequence[Array] = (),
) -> tuple[tuple, Rows, Out]:  # fmt: skip
    """Run blocks of known tokens through every model; each that ends its prompt draws a token. Draft models see nothing."""
    (family, cfg), *_ = nets
    offset = jnp.arange(block)
    positions = jnp.where(offset < plan.length[:, None], plan.start[:, None] + offset, -1)
    tokens = rows.tokens.at[plan.row[:, None], positions].get(mode="clip").reshape(-1)
    params = _adapted(params, rows, plan.row, block)
    batch = ops.Paged(positions.reshape(-1), plan.pages, plan.row, block)
    batches = [batch] * len(nets)
    if seen:
        index, turns = packing.unpack_seen(seen[0])
        batches[0] = replace(batch, media=ops.Media(index, seen[1]), rotary=None if rows.shift is None else turns)
    ran = [f.hidden(p, tokens, c, b, s) for (f, c), p, s, b in zip(nets, params, state, batches, strict=True)]
    x = ran[0][0].reshape(len(plan.row), block, -1)
    last = x[jnp.arange(len(plan.row)), jnp.maximum(plan.length - 1, 0)]
    logits, none = ops.logits(last, family.head(params[0], cfg)), jnp.zeros((len(plan.row), 0), jnp.int32)
    s = sampling_of(rows, plan.row, cfg.vocab, mesh)
    drawn = advance(rows, plan.row, s, logits, plan.draws > 0, Drafts(none, none > 0), plan.masked > 0, masks)
    return tuple(state for _, state, _ in ran), *drawn


def _decode(
    nets: Sequence[Net], mesh: Mesh | None, params: tuple, state: tuple, rows: Rows, plan: packing.Decode, masks: Array,
    drafts: int,
) -> tuple[tuple, Rows, Out]:  # fmt: skip
    """Run each row's newest token, and drafts of what may follow it."""
    (family, cfg), *_ = nets
    running = rows.running.at[plan.row].get(mode="fill", fill_value=False)
    length = rows.length.at[plan.row].get(mode="clip")
    positions = length[:, None] - 1 + jnp.arange(drafts + 1)
    s = sampling_of(rows, plan.row, cfg.vocab, mesh)
    inside = running[:, None] & (positions < s.max_length[:, None])
    if nets[1:]:
        guessed, *small = guess(nets[1], params[1], state[1], rows, plan, s, jnp.where(inside, positions, -1))
    else:
        guessed, small = propose(rows.tokens.at[plan.row].get(mode="clip"), length, drafts), []
    guessed = guessed._replace(found=guessed.found & (running & (plan.masked == 0))[:, None])

    newest = rows.tokens.at[plan.row, length - 1].get(mode="clip")[:, None]
    tokens = jnp.concatenate([newest, guessed.tokens], 1).reshape(-1)
    known = jnp.concatenate([running[:, None], guessed.found], 1) & inside
    batch = ops.Paged(jnp.where(known, positions, -1).reshape(-1), plan.pages, plan.row, drafts + 1)
    if rows.shift is not None:
        turns = (positions + rows.shift.at[plan.row].get(mode="clip")[:, None]).reshape(-1, 1)
        batch = replace(batch, rotary=jnp.broadcast_to(turns, (len(turns), 3)))
    params = _adapted(params, rows, plan.row, drafts + 1)
    x, big, _ = family.hidden(params[0], tokens, cfg, batch, state[0])
    logits = ops.logits(x, family.head(params[0], cfg))
    return (big, *small), *advance(rows, plan.row, s, logits, running, guessed, plan.masked > 0, masks)


def _repeat(one: Callable, params: tuple, state: tuple, rows: Rows, steps: int) -> tuple[tuple, Rows, Out]:
    """Do several steps that add at most a token to each row; rows that end on the way stand still from there."""

    def step(carry: tuple, _: None) -> tuple[tuple, Out]:
        *carry, out = one(*in_step(params, *carry))
        return tuple(carry), out

    (state, rows), (drawn, *likely) = jax.lax.scan(step, (state, rows), length=steps)
    return state, rows, Out(packing.join_drawn(drawn), *(x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for x in likely))


def quantized(state_spec: ops.State, format: str | None) -> ops.State:
    """Turn the spec of any family's state into one whose pages are in 8 bits, "int8" or "fp8"; None changes nothing.

    Recurrent state stays as it is: it is read and written whole at each step, so that errors would add up.
    """
    pages = state_spec.pages
    if format is None or pages is None:
        return state_spec

    def scales(p: Param) -> Param:
        layers, pages, heads, page, _ = p.axes.split()
        shape = quantized_pages.scale_rows(quantized_pages.scales(p.shape[-1]), p.shape[3])
        return Param(f"{layers} {pages} {heads} scales {page}", (*p.shape[:3], *shape), zeros, dtype="float32")

    values = lambda p: replace(p, dtype=quantized_pages.FORMATS[format][0])
    pool = lambda p: ops.Pages(*jax.tree.map(values, (p.k, p.v)), *jax.tree.map(scales, (p.k, p.v)))
    return replace(state_spec, pages=tuple(map(pool, pages)) if isinstance(pages, tuple) else pool(pages))


def _score(
    x: Float[Array, "B T D"], head: ops.Head, targets: Int[Array, "3 N"], count: Array, top: int
) -> tuple[Float[Array, " N"], Int[Array, "N top"], Float[Array, "N top"]]:
    """Give the log-probability of target tokens, and the `top` most likely ones there.

    `targets` are row, position and next token, of which the first `count` are computed, `SCORED` at a time.
    """
    n, size = targets.shape[1], min(SCORED, targets.shape[1])

    def some(i: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row, position, following = jax.lax.dynamic_slice_in_dim(targets, i * size, size, 1)
        logits = ops.logits(x[row, position], head)
        total = jax.nn.logsumexp(logits, -1, keepdims=True)
        one = lambda: (logits.max(-1, keepdims=True), logits.argmax(-1)[:, None])
        best, ids = jax.lax.top_k(logits, top) if top > 1 else one()
        new = (jnp.take_along_axis(logits, following[:, None], 1) - total)[:, 0], ids.astype(jnp.int32), best - total
        put = lambda every, part: jax.lax.dynamic_update_slice_in_dim(every, part, i * size, 0)
        return jax.tree.map(put, out, new)

    blank = jnp.zeros(n), jnp.zeros((n, top), jnp.int32), jnp.zeros((n, top))
    return jax.lax.fori_loop(0, -(-count // size), some, blank)
