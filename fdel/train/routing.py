"""What a step does to routers, whatever the loss is: noise, a capacity, and DeepSeek-V3's bias of selection.

    g = train.route(train.accumulate(train.grads(loss), n), jitter=0.01, capacity=1.25)
    g = train.count_choices(g, spec)  # sums have the choices of each layer
    step = train.balance(train.update(train.normalize(g), optimizer), 1e-3)

The bias is moved against the load after each step: counts add up beside gradients (`ops.Tallied`), over microbatches.
Biases are parameters like others, so a checkpoint holds them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.ops.contraction import widen
from fdel.params.spec import Param, path_name
from fdel.train.given import NOTHING, Batch, Given, Params, Sums, lookup
from fdel.train.losses.stats import check_range
from fdel.train.steps import GradFn, Metrics, Step, TrainState, unless_skipped

CHOICES = "choices of "  # sums and metrics with the counts of a bias, by its path
ROUTERS = 0x726F7574  # folded into a step's key: what else draws from that draws other numbers


def route(g: GradFn, *, jitter: float = 0.0, capacity: float | None = None) -> GradFn:
    """Train routers with noise on what they read, and with a capacity of experts; evaluation and serving have neither.

    `jitter`: what a router reads is multiplied by numbers, uniform from 1 - jitter to 1 + jitter (arXiv:2101.03961, section
    2.2; `router_jitter_noise` in config.json): `ops.jittered`. They are drawn for each row of the batch, each router,
    token and channel, by the step's key and the row's number, so neither resuming nor microbatches nor the mesh change
    them. `capacity`: an expert takes as many tokens of a row as `capacity` times its even share, later ones are dropped
    (`ops.limited`); the metric "router_dropped" of losses with `router_terms` is the share of choices that were.

    A reference and a teacher are left alone. Put it around `accumulate`, `gradcache` and `parallel.reduce_once`. ValueError
    for a model without experts when it is called, and for numbers out of range.
    """
    check_range(0, 1, jitter=jitter)
    check_range(above=True, capacity=capacity)
    if not jitter and capacity is None:
        return g

    def routed(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Sums]:
        if "routing" in batch:
            raise ValueError("route: the batch has 'routing' already; put route around gradients once")
        keys = None
        if jitter:
            key = jax.random.fold_in(lookup(given, "key"), ROUTERS)
            own = lambda row: jax.random.key_data(jax.random.fold_in(key, row))
            keys = jax.vmap(own)(jnp.arange(len(jax.tree.leaves(batch)[0])))
        return g(params, {**batch, "routing": ops.Routing(keys, jitter=jitter, capacity=capacity)}, given)

    return routed


def selection_biases(spec: Any) -> list[str]:
    """Name the biases of a spec tree that choose experts and weigh none (arXiv:2408.15664), by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(spec, is_leaf=lambda x: isinstance(x, Param))[0]
    return [path_name(path) for path, p in leaves if p.hf and "e_score_correction_bias" in p.hf]


def count_choices(g: GradFn, spec: Any) -> GradFn:
    """Add to the sums of a gradient function how often each expert was chosen by the routers that have a bias of selection.

    Padding does not count, nor does a reference or a teacher. The biases' gradients are zeros as before. Put it around
    `accumulate` or `gradcache`, and `balance` around the step. ValueError for the spec tree of a model without such biases.
    """
    found = set(selection_biases(spec))
    if not found:
        raise ValueError("count_choices: no router of the model has a bias of selection, as DeepSeek-V3's do")

    def counted(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Sums]:
        at = lambda f, tree: jax.tree_util.tree_map_with_path(
            lambda path, x: f(x) if path_name(path) in found else x, tree, is_leaf=lambda x: isinstance(x, ops.Tallied)
        )
        grad, sums = g(at(ops.Tallied, params), batch, given)
        leaves = jax.tree_util.tree_flatten_with_path(grad, is_leaf=lambda x: isinstance(x, ops.Tallied))[0]
        counts = {CHOICES + path_name(path): (widen(x.bias), 1) for path, x in leaves if isinstance(x, ops.Tallied)}
        return at(lambda x: jnp.zeros_like(x.bias), grad), sums | counts

    return counted


def balance(step: Step, speed: float) -> Step:
    """Move biases of selection after each step that is not skipped: bias + speed sign(mean load - load), in each layer.

    The rule of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2; 2408.15664, algorithm 1), which took 0.001; load is of all
    tokens of the step. The metrics "router_busiest" and "router_idle" are the loads of the busiest and of the idlest
    expert over the mean load, means over layers. ValueError around a step without `count_choices`, and for a speed below 0.
    """
    if not speed >= 0:
        raise ValueError(f"speed={speed}; expected a number from 0, as 0.001")

    def balanced(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, **given)
        counts = {name: x for name, x in metrics.items() if name.startswith(CHOICES)}
        if not counts:
            raise ValueError("balance: the step has no counts; build it of count_choices(g, spec)")
        metrics = {name: x for name, x in metrics.items() if name not in counts}

        def moved(path: tuple, bias: jax.Array) -> jax.Array:
            name = CHOICES + path_name(path)
            return ops.update_router_bias(bias, counts[name], speed) if name in counts else bias

        after = unless_skipped(metrics, jax.tree_util.tree_map_with_path(moved, new.params), new.params)
        each = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in counts.values()])
        load = each / jnp.maximum(each.mean(-1, keepdims=True), 1e-9)
        metrics |= {"router_busiest": load.max(-1).mean(), "router_idle": load.min(-1).mean()}
        return dataclasses.replace(new, params=after), metrics

    return balanced
