"""Recurrences among the calls that kernels.py measures: training rows, with gradients or not, and an engine's calls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import HALF, Problem, _normal, _size

from fdel import ops
from fdel.ops.batch import Packed, Paged, Slots, State
from tests.aot import hopper_products, hopper_scans, hopper_ssd

SERVED = {"decode, 64 sequences": (64, 1), "prefill, 512 tokens": (512, 32)}  # tokens, and those of a block
# Heads, channels of keys and values; whether each channel of the keys has a decay (KDA).
RULES = {"": (32, 128, False), ", decays of channels": (32, 128, True)}
CHANNELS, STATES = 5120, 16  # of Mamba 2.8B
HEADS, WIDTH, WIDE = 80, 64, 128  # of Mamba-2 2.7B: heads, channels, states
Shapes = dict[str, tuple]


def rows(
    shape: tuple[int, int], draw: Callable, op: Callable, gradient: bool, flops: float, exps: float = 0
) -> Problem:
    """Rows of a training batch: `draw(key, lead)` gives the inputs, `op(batch, carry, *inputs)` the output, and carry."""
    count, t = shape

    def make(key: jax.Array) -> tuple:
        first, second = jax.random.split(key)
        inputs = draw(first, (count, t))
        y = jax.eval_shape(lambda *x: call(jnp.zeros((count, t), jnp.int32), *x), *inputs)
        segments = jnp.where(jnp.arange(t) < (t // 3 if t < 512 else 0), 0, 1) + jnp.zeros((count, 1), jnp.int32)
        return segments, inputs, _normal(second, y.dtype, *y.shape)

    def call(segments: Any, *inputs: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), segments.shape)
        return op(Packed(positions, segments), None, *inputs)[0]

    def run(segments: Any, inputs: Any, dy: Any) -> Any:
        if not gradient:
            return call(segments, *inputs)
        y, back = jax.vjp(lambda *x: call(segments, *x), *inputs)
        return y, back(dy)

    _, inputs, y = jax.eval_shape(lambda: make(jax.random.key(0)))
    moved = _size(inputs) * (1 + 2 * gradient) + _size(y) * (1 + gradient)
    return Problem(make, run, flops * (1 + 2 * gradient), moved, exps * (1 + gradient))


def served(kind: str, state: tuple[int, ...], draw: Callable, op: Callable, small: bool) -> Problem:
    """An engine's call: a token of each of many sequences, or blocks of one; states are updated in place."""
    tokens, block = SERVED[kind]
    tokens = tokens if not small else 3 if block == 1 else 3 * block
    slots = tokens if block == 1 else 4

    def make(key: jax.Array) -> tuple:
        first, second = jax.random.split(key)
        each = jnp.arange(tokens // block, dtype=jnp.int32)
        positions = jnp.full(tokens, 7, jnp.int32) if block == 1 else 64 + jnp.arange(tokens, dtype=jnp.int32)
        which = each if block == 1 else jnp.full_like(each, 2)
        batch = Paged(positions, jnp.zeros((tokens // block, 1), jnp.int32), which, block)
        return batch, _normal(second, jnp.float32, 1, slots, *state), draw(first, (tokens,))

    def run(batch: Any, states: Any, inputs: Any) -> Any:
        y, carry = op(batch, ops.Carry(State(slots=Slots(None, states))), *inputs)
        return y, carry.slots.ssm

    batch, states, inputs = jax.eval_shape(lambda: make(jax.random.key(0)))
    used = _size(states) if block == 1 else _size(states) / slots
    y = jax.eval_shape(run, batch, states, inputs)[0]
    then = lambda args, out: ((args[0], out[1], args[2]), out[0])  # states are updated in place
    return Problem(make, run, 0, 2 * used + _size(inputs) + _size(y), then=then)


def _unit(x: jax.Array) -> jax.Array:
    return (x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)).astype(x.dtype)


def rule(heads: int, width: int, of_channels: bool) -> tuple[Callable, Callable]:
    """Give what draws inputs of the delta rule, and the call."""

    def draw(key: jax.Array, lead: tuple[int, ...]) -> tuple:
        keys = jax.random.split(key, 5)
        q, k, v = (_normal(key, HALF, *lead, heads, width) for key in keys[:3])
        g = -jnp.exp(2 * _normal(keys[3], jnp.float32, *lead, heads, *[width] * of_channels) - 2)
        return _unit(q) * jnp.asarray(width**-0.5, HALF), _unit(k), v, g, jax.random.uniform(keys[4], (*lead, heads))

    return draw, lambda batch, carry, *x: ops.gated_delta_rule(batch, carry, 0, *x)


def delta(name: str, small: bool) -> Problem:
    """Rows of `hopper_products.DELTAS`."""
    count, t, heads, gradient, of_channels = hopper_products.DELTAS[name]
    count, t, heads = (2, 192, 2) if small else (count, t, heads)
    draw, op = rule(heads, 128, of_channels)
    chunk = 64  # pairs, the states before and after, and the triangular system, which is counted as pairs
    return rows((count, t), draw, op, gradient, 2.0 * count * t * heads * 128 * (2 * 128 + 2 * chunk))


def delta_served(name: str, small: bool) -> Problem:
    """An engine's call of the delta rule."""
    kind = next(kind for kind in SERVED if name.startswith(kind))
    heads, width, of_channels = RULES[name.removeprefix(kind)]
    heads = 8 if small else heads
    return served(kind, (heads, width, width), *rule(heads, width, of_channels), small)


def mamba2(heads: int, channels: int, groups: int, states: int) -> tuple[Callable, Callable]:
    """Give what draws inputs of `ops.ssd`, and the call."""

    def draw(key: jax.Array, lead: tuple[int, ...]) -> tuple:
        keys = jax.random.split(key, 6)
        dt = jax.nn.softplus(_normal(keys[0], jnp.float32, *lead, heads) - 2)
        a, d = -jnp.exp(_normal(keys[1], jnp.float32, heads)), _normal(keys[2], jnp.float32, heads)
        shared = (_normal(key, HALF, *lead, groups, states) for key in keys[3:5])
        return _normal(keys[5], HALF, *lead, heads, channels), dt, a, *shared, d

    return draw, lambda batch, carry, x, dt, a, b, c, d: ops.ssd(batch, carry, 0, x, dt, a, b, c, d=d)


def ssd(name: str, small: bool) -> Problem:
    """Rows of `hopper_ssd.CALLS`."""
    heads, channels, groups, states, gradient = hopper_ssd.CALLS[name]
    count, t = (2, 192) if small else (hopper_ssd.ROWS, hopper_ssd.TOKENS)
    heads, groups = (2 * groups if groups > 1 else 4, groups) if small else (heads, groups)
    flops = 2.0 * count * t * (heads * channels * (2 * states + 64) + groups * 64 * states)
    return rows((count, t), *mamba2(heads, channels, groups, states), gradient, flops)


def ssd_served(name: str, small: bool) -> Problem:
    """An engine's call of `ops.ssd`."""
    heads = 8 if small else HEADS
    return served(name, (heads, WIDTH, WIDE), *mamba2(heads, WIDTH, 1, WIDE), small)


def mamba(channels: int, dtype: Any) -> tuple[Callable, Callable]:
    """Give what draws inputs of a selective scan, and the call."""

    def draw(key: jax.Array, lead: tuple[int, ...]) -> tuple:
        keys = jax.random.split(key, 6)
        dt = jax.nn.softplus(_normal(keys[0], jnp.float32, *lead, channels) - 2)
        a, d = -jnp.exp(_normal(keys[1], jnp.float32, channels, STATES)), _normal(keys[2], jnp.float32, channels)
        shared = (_normal(key, dtype, *lead, STATES) for key in keys[3:5])
        return _normal(keys[5], dtype, *lead, channels), dt, a, *shared, d

    return draw, lambda batch, carry, x, dt, a, b, c, d: ops.selective_scan(batch, carry, 0, x, dt, a, b, c, d=d)


def scan(name: str, small: bool) -> Problem:
    """Rows of `hopper_scans.SCANS`; bound by an exponential for each token, channel and state."""
    count, t, channels, dtype, gradient = hopper_scans.SCANS[name]
    count, t, channels = (2, 192, 256) if small else (count, t, channels)
    return rows((count, t), *mamba(channels, dtype), gradient, 0, count * t * channels * STATES)


def scan_served(name: str, small: bool) -> Problem:
    """An engine's call of a selective scan."""
    channels = 256 if small else CHANNELS
    return served(name, (channels, STATES), *mamba(channels, HALF), small)
