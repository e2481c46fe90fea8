"""The device side of serving: prefill chunks and decode, each forward, head and draw, over rows that stay there."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from fdel import ops
from fdel import params as P
from fdel.models import builders
from fdel.serve.drafts import guess, propose
from fdel.serve.request import TOP
from fdel.serve.sample import Sampling, sample, sampling_rows

PAGE = 64  # tokens per page
SCORED = 64  # tokens whose logits are in memory at once in `score`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Sequences under way, donated from step to step. Tokens past `length` mean nothing."""

    tokens: Int[Array, "R L"]  # prompt and output
    length: Int[Array, " R"]  # tokens that are known; all but the last are in the cache
    running: Bool[Array, " R"]  # decode continues it
    sampling: Sampling  # what each row asks for
    adapter: Int[Array, " R"]  # the slot of its adapter in the weights; below zero: none


class Out(NamedTuple):
    """What a step drew, for the rows of its plan. The top log-probabilities are of row i // k and its draw i % k."""

    drawn: Int[Array, "B 1_3k"]  # how many tokens; the tokens; the bits of their two log-probabilities, see `Sampled`
    top_ids: Int[Array, "Bk n"]
    top_logprobs: Float[Array, "Bk n"]


Net = tuple[ModuleType, Any]  # a family and its Config


class Programs(NamedTuple):
    """The jitted functions of one model on one mesh. Params and state are tuples: the model's, and the draft model's."""

    begin: Callable[..., tuple[ops.State, Rows]]  # (rows=, length=, pages=, dtypes=)
    admit: Callable[..., Rows]  # (Rows, row, tokens[L], length, Sampling of one row, slot of its adapter)
    extend: Callable[..., tuple[ops.State, Rows, Out]]  # (params, state, Rows, plan[blocks 4+W], masks, block=)
    decode: Callable[..., tuple[ops.State, Rows, Out]]  # (params, state, Rows, plan[B 2+W], masks, drafts=, steps=)
    score: Callable[..., tuple[Array, Array, Array]]  # (the model's params, tokens[T], length, slot of the adapter)
    embed: Callable[..., Array]  # (the model's params, tokens[T], length, slot of the adapter)
    traces: Counter  # how often each was traced, and so compiled


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None if they are on one device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return P.joined(mesh) if isinstance(mesh, Mesh) and mesh.size > 1 else None


def compute_dtype(params: Any) -> np.dtype:
    """The dtype that activations have, and so keys, values and recurrent inputs."""
    return jax.eval_shape(lambda table: ops.embed(table, jnp.zeros(1, jnp.int32)), params["embed"]).dtype


@functools.lru_cache(maxsize=16)
def programs(
    family: ModuleType, cfg: Any, mesh: Mesh | None = None, draft: Net | None = None, kv: str | None = None
) -> Programs:
    """Make the jitted functions of a model, and of a smaller one if that is to make drafts for it.

    `kv` is the format of keys and values in the cache, "int8" or "fp8"; None: the dtype of the activations.
    They are cached because jax keeps compiled programs with the jitted function: a new one would compile again.
    """
    traces: Counter = Counter()
    nets: tuple[Net, ...] = ((family, cfg),) if draft is None else ((family, cfg), draft)
    specs = lambda **sizes: [builders.quantized(f.state_spec(c, page=PAGE, **sizes), kv) for f, c in nets]
    state_sharding, replicated = None, None
    if mesh is not None:  # fixed, so that no step hands the next one another layout, which would compile again
        replicated = NamedSharding(mesh, PartitionSpec())
        state_sharding = tuple(P.shardings(spec, mesh, P.SERVE) for spec in specs(pages=1, rows=1))

    def begin(*, rows: int, length: int, pages: int, dtypes: tuple) -> tuple[ops.State, Rows]:
        made = (P.init(s, jax.random.key(0), d) for s, d in zip(specs(pages=pages, rows=rows), dtypes, strict=True))
        sampling = jax.tree.map(jnp.asarray, sampling_rows([], [], [], [], vocab=cfg.vocab, rows=rows))
        tokens, known = jnp.zeros((rows, length), jnp.int32), jnp.zeros(rows, jnp.int32)
        return tuple(made), Rows(tokens, known, known > 0, sampling, known - 1)

    def admit(rows: Rows, row: Array, tokens: Array, length: Array, sampling: Sampling, adapter: Any = -1) -> Rows:
        new = Rows(tokens[None], length[None], jnp.zeros(1, bool), sampling, jnp.full(1, adapter, jnp.int32))
        return jax.tree.map(lambda every, one: every.at[row].set(one[0]), rows, new)

    def extend(params, state, rows: Rows, plan: Array, masks: Array, *, block: int) -> tuple[ops.State, Rows, Out]:
        return _extend(nets, params, state, rows, plan, masks, block)

    def decode(
        params, state, rows: Rows, plan: Array, masks: Array, *, drafts: int, steps: int
    ) -> tuple[ops.State, Rows, Out]:
        one = lambda state, rows: _decode(nets, params, state, rows, plan, masks, drafts)
        return one(state, rows) if steps == 1 else _repeat(one, state, rows, steps)

    def embed(params, tokens: Array, length: Array, slot: Array) -> Float[Array, "T D"]:
        batch = ops.packed(tokens[None], length[None])
        return family.hidden(P.lora.choose(params, slot[None]), tokens[None], cfg, batch)[0][0]

    def score(params, tokens: Array, length: Array, slot: Array) -> tuple[Array, Array, Array]:
        return _score(embed(params, tokens, length, slot), family.head(P.lora.choose(params, slot[None]), cfg), tokens)

    def jit(f: Callable, donate: tuple = (), static: tuple = (), out: Any = replicated) -> Callable:
        @functools.wraps(f)
        def traced(*args: Any, **kwargs: Any) -> Any:
            traces[f.__name__] += 1  # a body runs when jax traces it
            return f(*args, **kwargs)

        return jax.jit(traced, donate_argnums=donate, static_argnames=static, out_shardings=mesh and out)

    moved = (state_sharding, replicated, replicated)
    return Programs(
        jit(begin, static=("rows", "length", "pages", "dtypes"), out=moved[:2]),
        jit(admit, donate=(0,)),
        jit(extend, donate=(1, 2), static=("block",), out=moved),
        jit(decode, donate=(1, 2), static=("drafts", "steps"), out=moved),
        jit(score),
        jit(embed),
        traces,
    )


def _run(nets: Sequence[Net], params: tuple, tokens: Array, batch: ops.Paged, state: tuple) -> tuple[Array, tuple]:
    """Run every model over the same tokens and pages: the first one's hidden states, and all their states."""
    ran = [f.hidden(p, tokens, c, batch, s) for (f, c), p, s in zip(nets, params, state, strict=True)]
    return ran[0][0], tuple(s for _, s in ran)


def _adapted(params: tuple, rows: Rows, row: Array, block: int) -> tuple:
    """Choose the adapter of each token, for blocks of tokens of these rows."""
    slots = jnp.repeat(rows.adapter.at[row].get(mode="clip"), block)
    return (P.lora.choose(params[0], slots), *params[1:])


def _extend(
    nets: Sequence[Net], params: tuple, state: tuple, rows: Rows, plan: Array, masks: Array, block: int
) -> tuple[tuple, Rows, Out]:
    """Run blocks of known tokens; plan: (row, start, count, 1 to draw after it + 2 if masked, pages...) per block."""
    row, start, count, flags = (plan[:, i] for i in range(4))
    offset = jnp.arange(block)
    positions = jnp.where(offset < count[:, None], start[:, None] + offset, -1)
    tokens = rows.tokens.at[row[:, None], positions].get(mode="clip")
    params = _adapted(params, rows, row, block)
    batch = ops.Paged(positions.reshape(-1), plan[:, 4:], row, block)
    x, state = _run(nets, params, tokens.reshape(-1), batch, state)
    x = x.reshape(-1, block, x.shape[-1])[jnp.arange(len(row)), jnp.maximum(count - 1, 0)]
    family, cfg = nets[0]
    logits, nothing = ops.logits(x, family.head(params[0], cfg)), jnp.zeros((len(row), 0), jnp.int32)
    rows, out = _advance(rows, logits, row, flags & 1 > 0, nothing, nothing > 0, flags & 2 > 0, masks)
    return state, rows, out


def _decode(
    nets: Sequence[Net], params: tuple, state: tuple, rows: Rows, plan: Array, masks: Array, drafts: int
) -> tuple[tuple, Rows, Out]:
    """Run each row's newest token, and drafts of what may follow; plan: (row, 1 if masked, pages...) per row."""
    row, masked, table = plan[:, 0], plan[:, 1] > 0, plan[:, 2:]
    length = rows.length.at[row].get(mode="clip")
    running = rows.running.at[row].get(mode="fill", fill_value=False)
    tokens = rows.tokens.at[row, length - 1].get(mode="clip")[:, None]
    params = _adapted(params, rows, row, drafts + 1)
    most = rows.sampling.max_length.at[row].get(mode="clip")
    places = lambda n: length[:, None] - 1 + jnp.arange(n)
    inside = lambda n: running[:, None] & (places(n) < most[:, None])
    found = jnp.zeros((len(row), 0), bool)
    if drafts and len(nets) > 1:
        where = jnp.where(inside(drafts + 1), places(drafts + 1), -1)
        draft, small = guess(nets[1], params[1], state[1], rows, row, where, table)
        state, found = (state[0], small), jnp.ones((len(row), drafts), bool)
    elif drafts:
        draft, found = propose(rows.tokens.at[row].get(mode="clip"), length, drafts)
    if drafts:
        tokens, found = jnp.concatenate([tokens, draft], 1), found & (running & ~masked)[:, None]
    live = jnp.concatenate([running[:, None], found], 1) & inside(drafts + 1)
    batch = ops.Paged(jnp.where(live, places(drafts + 1), -1).reshape(-1), table, row, drafts + 1)
    x, (new,) = _run(nets[:1], params[:1], tokens.reshape(-1), batch, state[:1])
    family, cfg = nets[0]
    logits = ops.logits(x, family.head(params[0], cfg))
    rows, out = _advance(rows, logits, row, running, tokens[:, 1:], found, masked, masks)
    return (new, *state[1:]), rows, out


def _repeat(one: Callable, state: tuple, rows: Rows, steps: int) -> tuple[tuple, Rows, Out]:
    """Do several steps that add at most a token to each row; rows that end on the way stand still from there."""

    def step(carry: tuple, _: None) -> tuple[tuple, Out]:
        state, rows, out = one(*carry)
        return (state, rows), out

    (state, rows), out = jax.lax.scan(step, (state, rows), length=steps)
    count, tokens, raw, sampled = (out.drawn[:, :, i].T for i in range(4))
    by_row = lambda x: x.swapaxes(0, 1).reshape(-1, x.shape[-1])
    drawn = jnp.concatenate([count.sum(1, keepdims=True), tokens, raw, sampled], 1)
    return state, rows, Out(drawn, by_row(out.top_ids), by_row(out.top_logprobs))


def _advance(
    rows: Rows,
    logits: Float[Array, "Bk V"],
    row: Int[Array, " B"],
    active: Bool[Array, " B"],
    drafts: Int[Array, "B k_1"],
    found: Bool[Array, "B k_1"],
    masked: Bool[Array, " B"],
    masks: UInt[Array, "B W"],
) -> tuple[Rows, Out]:
    """Draw the next tokens of active rows, append them, and stop rows at a stop id or their greatest length.

    A draft is kept while it equals what is drawn in its place. So every kept token is drawn as it would be without
    drafts, with the same key: greedy or sampled, drafts change no output.
    """
    k, none = drafts.shape[1] + 1, rows.tokens.shape[1]
    length = rows.length.at[row].get(mode="clip")
    places = length[:, None] + jnp.arange(k)
    guessed = rows.tokens.at[row[:, None], jnp.where(found, places[:, :-1], none)].set(drafts, mode="drop")
    s = jax.tree.map(lambda x: x.at[row].get(mode="clip"), rows.sampling)
    allowed = masks & jnp.where(s.masked[:, None], s.allowed, ~jnp.uint32(0))
    s = replace(s, masked=s.masked | masked, allowed=jnp.where(masked[:, None], allowed, s.allowed))
    every = lambda x: x if k == 1 else jnp.repeat(x, k, 0)
    out = sample(logits, jax.tree.map(every, s), guessed, places.reshape(-1), every(jnp.minimum(row, len(guessed) - 1)))
    drawn = out.tokens.reshape(-1, k)
    ends = (drawn[:, :, None] == s.stop_ids[:, None]).any(-1) | (places + 1 >= s.max_length[:, None])
    right = found & (drawn[:, :-1] == drafts) & ~ends[:, :-1]
    keep = jnp.concatenate([active[:, None], active[:, None] & (jnp.cumprod(right, 1) > 0)], 1)
    count = keep.sum(1)
    tokens = rows.tokens.at[row[:, None], jnp.where(keep, places, none)].set(drawn, mode="drop")
    rows = Rows(
        tokens,
        rows.length.at[row].add(count, mode="drop"),
        rows.running.at[jnp.where(active, row, len(tokens))].set(~(keep & ends).any(1), mode="drop"),
        rows.sampling,
        rows.adapter,
    )
    both = jnp.concatenate([out.logprobs.reshape(-1, k), out.sampled_logprobs.reshape(-1, k)], 1)
    bits = jax.lax.bitcast_convert_type(both, jnp.int32)
    return rows, Out(jnp.concatenate([count[:, None], drawn, bits], 1), out.top_ids, out.top_logprobs)


def _score(x: Float[Array, "T D"], head: ops.Head, tokens: Int[Array, " T"]) -> tuple[Array, Array, Array]:
    """Give the log-probability of every next token, and the most likely ones: ([T], ids [T n], [T n])."""

    def some(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x, following = args
        logits = ops.logits(x, head)
        total = jax.nn.logsumexp(logits, -1, keepdims=True)
        best, ids = jax.lax.top_k(logits, min(TOP, logits.shape[1]))
        return (jnp.take_along_axis(logits, following[:, None], 1) - total)[:, 0], ids, best - total

    n, size = len(tokens), min(SCORED, len(tokens))
    cut = lambda a: jnp.pad(a, [(0, -n % size)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, size, *a.shape[1:])
    out = jax.lax.map(some, (cut(x), cut(jnp.roll(tokens, -1))))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:n], out)
