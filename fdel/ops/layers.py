"""Walk the layers of a model, stacked (`lax.scan`) or listed (a Python loop), with rematerialisation by name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fdel.ops.shard import shard
from fdel.ops.watch import watch_hidden

# block(x, state, params of one layer, layer index) -> (x, state)
Block = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]

POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)
NAMED_POLICIES = (
    "save_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "offload_only_these_names",
)
# What the ops mark with `checkpoint_name`. The input of every layer is saved in any case.
TARGETS = (
    "normed_input",
    "attn_query",
    "attn_key",
    "attn_value",
    "attn_output",
    "mlp_gate",
    "mlp_up",
    "mlp_down",
    "moe_router_logits",
    "moe_gate",
    "moe_up",
    "moe_expert_output",
    "moe_output",
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


def layers(
    block: Block | Mapping[Any, Block],
    x: jax.Array,
    state: Any,
    tree: Any,
    kinds: tuple = (),
    *,
    remat: str | None = None,
) -> tuple[jax.Array, Any]:
    """Apply every layer in order; returns (x, state).

    `tree` is what `params.layers` declares: one stacked tree, a tuple of runs of stacked trees, or the list of
    `params.unstack`. `block` is one function, or one per layer kind; then `kinds` gives the kind of each layer. The layer
    index passed to a block counts all layers; with recurrent and attention layers mixed, `pool_index` turns it into the
    index within one pool of state. State is a carry, never scanned over (that copies it).
    """
    blocks = block if isinstance(block, Mapping) else dict.fromkeys(kinds or (None,), block)
    blocks = {kind: _laid_out(f) for kind, f in blocks.items()}
    if remat is not None:
        policy = remat_policy(remat)
        blocks = {k: jax.checkpoint(f, policy=policy, static_argnums=()) for k, f in blocks.items()}
    blocks = {kind: _watched(f) for kind, f in blocks.items()}
    kind = lambda i: kinds[i] if kinds else next(iter(blocks))
    state = watch_hidden(state, x, 0)
    if isinstance(tree, list):
        if state is not None and isinstance(x, jax.core.Tracer):
            # Trace and lower each kind of layer once: a server starts in half the time. Not outside a trace, where each
            # call would compile new functions; and only with state, since a loss may be differentiated eagerly.
            blocks = {k: jax.jit(f) for k, f in blocks.items()}
        for i, p in enumerate(tree):
            x, state = blocks[kind(i)](x, state, p, i)
        return x, state
    start = 0
    for run in tree if isinstance(tree, tuple) else ((tree,),):
        period, count = len(run), jax.tree.leaves(run[0])[0].shape[0]
        steps = [blocks[kind(start + j)] for j in range(period)]

        def body(carry: tuple, xs: tuple, steps: list = steps) -> tuple:
            p, first = xs
            for j, step in enumerate(steps):
                carry = step(*carry, p[j], first + j)
            return carry, None

        first = start + period * jnp.arange(count)
        (x, state), _ = jax.lax.scan(body, (x, state), (run, first))
        start += period * count
    return x, state


def _laid_out(block: Block) -> Block:
    """Keep what goes from layer to layer on the devices where the batch is; weights come to it, see `shard`."""
    lay = lambda x: shard(x, "rows tokens embed")

    def laid_out(x: jax.Array, state: Any, p: Any, layer: Any) -> tuple[jax.Array, Any]:
        x, state = block(lay(x), state, p, layer)
        return lay(x), state

    return laid_out


def _watched(block: Block) -> Block:
    def watched(x: jax.Array, state: Any, p: Any, layer: Any) -> tuple[jax.Array, Any]:
        x, state = block(x, state, p, layer)
        return x, watch_hidden(state, x, layer + 1)

    return watched


def pool_index(kinds: tuple, pool: set, layer: Any) -> Any:
    """Count the layers before `layer` whose kind is in `pool`: the layer's index in that pool's state."""
    before = [sum(k in pool for k in kinds[:i]) for i in range(len(kinds))]
    return before[layer] if isinstance(layer, int) else jnp.asarray(before)[layer]


def pool(state: Any, name: str) -> Any:
    """Give one pool of a state that has several by name; None where there is no state, or no such pool."""
    return state.get(name) if isinstance(state, Mapping) else None


def with_pool(state: Any, name: str, value: Any) -> Any:
    """Put a pool back; None, of a Packed call, leaves the state as it is."""
    return state if value is None else {**state, name: value}
