"""Walk the layers of a model, stacked (`lax.scan`) or listed (a Python loop), with rematerialisation by name."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.carry import Carry, watch_hidden
from fdel.ops.shard import shard

_remat = jax.make_user_context(None)  # the policy of layers whose call names none
_once = jax.make_user_context(False)  # see `tracing_once`
# block(x, carry, params of one layer, layer index) -> (x, carry)
Block = Callable[[jax.Array, Carry, Any, Any], tuple[jax.Array, Carry]]

POLICIES = tuple(
    "everything_saveable nothing_saveable dots_saveable checkpoint_dots dots_with_no_batch_dims_saveable "
    "checkpoint_dots_with_no_batch_dims".split()
)
NAMED_POLICIES = tuple(
    "save_only_these_names save_any_names_but_these save_anything_except_these_names offload_only_these_names".split()
)
# What the ops mark with `checkpoint_name`. The input of every layer is saved in any case.
TARGETS = tuple(
    "normed_input attn_query attn_key attn_value attn_output mlp_gate mlp_up mlp_down moe_router_logits moe_gate moe_up "
    "moe_expert_output moe_output".split()
)
# EasyDeL's names for them, and for what is saved in any case: the input of a layer, what is outside of layers.
SYNONYMS = {
    "attn_key_value": ("attn_key", "attn_value"),
    "attn_qkv": ("attn_query", "attn_key", "attn_value"),
    "mlp_output": ("mlp_down",),
    "moe_gate_logits": ("moe_router_logits",),
    **dict.fromkeys(("embeddings", "layer_output", "residual", "model_output", "lm_head_output"), ()),
}


def remat_policy(name: str) -> Callable[..., Any]:
    """Look up what a backward pass saves of a layer: a `jax.checkpoint_policies` policy by its name, in any case.

    Those that take names are written "save_only_these_names:attn_output,mlp_up", with `TARGETS` (or `SYNONYMS`); two
    joined with "+" save what either does. "offload_only_these_names" keeps the named values in the host's memory. To
    those of dots, attention is one product: they save its output. Unknown names are a ValueError that lists the known
    ones.
    """
    if "+" in name:
        return jax.checkpoint_policies.save_from_both_policies(*map(remat_policy, name.split("+", 1)))
    policy, colon, listed = name.strip().lower().partition(":")
    if policy not in (NAMED_POLICIES if colon else POLICIES):
        known = ", ".join((*POLICIES, *(f"{p}:NAME,..." for p in NAMED_POLICIES)))
        raise ValueError(f"remat={name!r} is not a policy; use None or one of {known}")
    given = [t.strip() for t in listed.split(",")] if colon else []
    targets = [t for name in given for t in SYNONYMS.get(name, (name,))]
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise ValueError(f"remat={name!r}: no value is named {unknown[0]!r}; the names are {', '.join(TARGETS)}")
    if policy == "offload_only_these_names":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=targets,
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    found = getattr(jax.checkpoint_policies, policy)
    if "dots" in policy:
        output = jax.checkpoint_policies.save_only_these_names("attn_output")
        return jax.checkpoint_policies.save_from_both_policies(found, output)
    return found(*targets) if colon else found


@contextlib.contextmanager
def rematerialising(remat: str | None) -> Iterator[None]:
    """Walk layers inside, such as those of a tower, as `remat` says where the call names no policy."""
    with _remat(remat):
        yield


@contextlib.contextmanager
def tracing_once() -> Iterator[None]:
    """Trace and lower listed layers of one kind once inside, which is to be a function that is jitted.

    Each is a function of the program then, which every such layer calls. To trace a tower of 32 layers and to lower it,
    for which jax holds Python's lock, takes a tenth of the time.
    """
    with _once(True):
        yield


def layers(
    block: Block | Mapping[Any, Block], x: Float[Array, "... D"], carry: Carry, tree: Any, kinds: tuple = (), *,
    remat: str | None = None,
) -> tuple[Float[Array, "... D"], Carry]:  # fmt: skip
    """Apply every layer in order; returns (x, carry).

    `tree` is what `params.layers` declares: one stacked tree, a tuple of runs of stacked trees, or the list of
    `params.unstack`. `block` is one function, or one per layer kind; then `kinds` gives the kind of each layer. The layer
    index passed to a block counts all layers; with recurrent and attention layers mixed, `pool_index` turns it into the
    index within one part of the state. State is a carry, never scanned over (that copies it).
    """
    blocks = block if isinstance(block, Mapping) else dict.fromkeys(kinds or (None,), block)
    remat = _remat.value if remat is None else remat
    policy = None if remat is None else remat_policy(remat)
    blocks = {kind: _prepared(f, policy) for kind, f in blocks.items()}
    kind = lambda i: kinds[i] if kinds else next(iter(blocks))
    carry = watch_hidden(carry, x, 0)
    count = _count(tree)
    if carry.taps and carry.taps.hidden and not all(0 <= place <= count for place in carry.taps.hidden.places):
        found = f"places {carry.taps.hidden.places} of a model of {count} layers"
        raise ValueError(f"taps.hidden: {found}; expected 0 to {count}")
    if isinstance(tree, list):
        if _once.value:
            blocks = {k: jax.jit(f) for k, f in blocks.items()}
        for i, p in enumerate(tree):
            x, carry = blocks[kind(i)](x, carry, p, i)
        return x, carry
    start = 0
    for run in tree if isinstance(tree, tuple) else ((tree,),):
        period, count = len(run), _count(run)
        steps = [blocks[kind(start + j)] for j in range(period)]

        def body(passed: tuple, xs: tuple, steps: list = steps) -> tuple:
            p, first = xs
            for j, step in enumerate(steps):
                passed = step(*passed, p[j], first + j)
            return passed, None

        first = start + jnp.arange(0, count, period)
        (x, carry), _ = jax.lax.scan(body, (x, carry), (run, first))
        start += count
    return x, carry


def _count(tree: Any) -> int:
    """Count the layers of a list, of stacked trees, or of runs of them."""
    if isinstance(tree, list):
        return len(tree)
    return sum(map(_count, tree)) if isinstance(tree, tuple) else jax.tree.leaves(tree)[0].shape[0]


def _prepared(block: Block, policy: Callable[..., Any] | None) -> Block:
    """Watch what goes from layer to layer, and keep it where the batch is; weights come to the devices, see `shard`."""
    lay = lambda x: shard(x, "rows tokens embed")

    def laid_out(x: jax.Array, carry: Carry, p: Any, layer: Any) -> tuple[jax.Array, Carry]:
        x, carry = block(lay(x), carry, p, layer)
        return lay(x), carry

    run = laid_out if policy is None else jax.checkpoint(laid_out, policy=policy, static_argnums=())

    def watched(x: jax.Array, carry: Carry, p: Any, layer: Any) -> tuple[jax.Array, Carry]:
        x, carry = run(x, carry, p, layer)
        return x, watch_hidden(carry, x, layer + 1)

    return watched


def pool_index(kinds: tuple, pool: set, layer: Any) -> Any:
    """Count the layers before `layer` whose kind is in `pool`: the layer's index in that pool's state."""
    before = [sum(k in pool for k in kinds[:i]) for i in range(len(kinds))]
    return before[layer] if isinstance(layer, int) else jnp.asarray(before)[layer]
