"""The Hopper kernels for recurrences over Paged batches, interpreted, against float64.

See `interpreted_decode` and `interpreted_prompts`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.batch import Paged, Slots, State
from fdel.ops.carry import Carry
from fdel.ops.platform import tracing_for
from tests.ops.test_kernels import interpret

F32, BF16, MATRIX = jnp.float32, jnp.bfloat16, pytest.mark.matrix
KINDS = "delta", "ssd", "scan"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ((*KINDS, "few"), [8e-3, 1e-6] * 3),
        *[pytest.param((kind,), [8e-3, 1e-6, 1e-6, 1e-6], marks=MATRIX) for kind in KINDS],
    ],
    ids=str,
)
def test_a_decode_step_on_hopper_equals_float64(arguments, most):
    """Outputs in bfloat16 and in float32, and states (seen: 4e-3, 1.2e-7, 8e-8); no race; no other slot is touched."""
    done = interpret("decode", *arguments)
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()[-len(most) :]]
    assert all(a < b for a, b in zip(errors, most, strict=True)), errors
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_race_planted_in_a_decode_step_is_found(kind):
    done = interpret("decode", kind, "few", "race")
    assert "RACE DETECTED" in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (("ssd",), [1e-2] * 4),
        (("scan",), [1e-2, 1e-6] * 2),
        (("shared",), [1e-6] * 2),
        (("delta",), [1e-2] * 2),
        (("channels",), [1e-2] * 2),
    ],
    ids=str,
)
def test_prompts_in_pieces_on_hopper_equal_float64(arguments, most):
    """In bfloat16, outputs and states (seen: `ssd` 4.1e-3, 3.5e-3, scans 4.1e-3, 4e-7, delta rules 6.2e-3); no race.

    NaN is in padding and in slots of nobody.

    In float32 what several sequences make of one slot in a call, against the reference (seen: 1.0e-7).
    """
    done = interpret("prompts", *arguments)
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()[-len(most) :]]
    assert all(a < b for a, b in zip(errors, most, strict=True)), errors
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ssd", "scan", "delta", "channels"])
def test_a_race_planted_in_prompts_is_found(kind):
    done = interpret("prompts", kind, "few", "race")
    assert "RACE DETECTED" in done.stdout + done.stderr


SHAPE = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
HALF = lambda *sizes: SHAPE(BF16, 4, *sizes)
NUMBERS = lambda *sizes: SHAPE(F32, 4, *sizes)
CALLS = {
    "gated_delta_rule": lambda keys, values: (
        (2, keys, values), (HALF(2, keys), HALF(2, keys), HALF(2, values), NUMBERS(2), NUMBERS(2)),
    ),
    "ssd": lambda channels, states: (
        (2, channels, states), (HALF(2, channels), NUMBERS(2), SHAPE(F32, 2), HALF(1, states), HALF(1, states)),
    ),
    "selective_scan": lambda channels, states: (
        (channels, states), (HALF(channels), NUMBERS(channels), SHAPE(F32, channels, states), HALF(states), HALF(states)),
    ),
}  # fmt: skip


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(
    ("op", "sizes", "states", "reason"),
    [
        ("gated_delta_rule", (136, 128), F32, "136 channels of keys and 128 of values"),
        ("gated_delta_rule", (128, 64), F32, "128 channels of keys and 64 of values"),
        ("ssd", (96, 128), F32, "96 channels of 128 states"),
        ("ssd", (64, 96), F32, "64 channels of 96 states"),
        ("selective_scan", (64, 256), F32, "256 states of a channel"),
        ("selective_scan", (96, 16), F32, "96 channels of 16 states"),
        ("ssd", (64, 128), BF16, "in float32"),
        ("gated_delta_rule", (64, 256), F32, None),
        ("ssd", (128, 256), F32, None),
        ("selective_scan", (192, 32), F32, None),
    ],
    ids=str,
)
def test_the_kernels_for_decoding_on_hopper_say_what_they_cannot_serve(op, sizes, states, reason):
    """They are taken where they are named, and nowhere else."""
    say(op, sizes, states, 4, 1, reason)


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(
    ("op", "sizes", "tokens", "block", "reason"),
    [
        ("selective_scan", (192, 16), 64, 32, "prompts of 192 channels; expected a multiple of 128"),
        ("selective_scan", (128, 16), 60, 12, "blocks of 12 tokens; expected 1, or a multiple of 8"),
        ("selective_scan", (128, 96), 64, 32, "128 channels of 96 states"),
        ("selective_scan", (128, 32), 64, 8, None),
        ("selective_scan", (256, 16), 96, 48, None),
        ("ssd", (64, 128), 96, 48, "blocks of 48 tokens; expected 1, or from 16 on"),
        ("ssd", (64, 32), 64, 32, "heads of 64 channels with 32 states, in blocks of several tokens"),
        ("ssd", (128, 256), 64, 16, None),
    ],
    ids=str,
)
def test_the_kernels_for_prompts_on_hopper_say_what_they_cannot_serve(op, sizes, tokens, block, reason):
    """The calls agree: no reference is taken in their place."""
    say(op, sizes, F32, tokens, block, reason)


def say(op: str, sizes: tuple[int, ...], states, tokens: int, block: int, reason: str | None) -> None:
    """Name the kernel for a call: it is chosen, or refused with a reason; and never chosen where it is not named."""
    shape, inputs = CALLS[op](*sizes)
    given = [SHAPE(x.dtype, tokens, *x.shape[1:]) if x.shape[0] == 4 else x for x in inputs]
    batch = Paged(np.arange(tokens), np.zeros((tokens // block, 1), int), np.arange(tokens // block), block)
    call = batch, Carry(State(slots=Slots(None, SHAPE(states, 1, 5, *shape)))), 0, *given
    with tracing_for("gpu"):
        assert "xla: chosen" in ops.explain(getattr(ops, op), *call)
        with ops.use(**{op: "hopper"}):
            if reason is None:
                assert "hopper: chosen" in ops.explain(getattr(ops, op), *call)
            else:
                with pytest.raises(ValueError, match=reason):
                    ops.explain(getattr(ops, op), *call)


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(
    ("block", "dtype", "sizes", "gate", "reason"),
    [
        (8, BF16, (128, 128), (), "blocks of 8 tokens"),
        (48, BF16, (128, 128), (), "blocks of 48 tokens"),
        (32, F32, (128, 128), (), "multiplies bfloat16 in blocks"),
        (32, BF16, (64, 128), (), "64 channels of keys and 128 of values, in blocks"),
        pytest.param(32, BF16, (128, 128), (128,), None, marks=MATRIX),
        (16, BF16, (128, 128), (), None),
        pytest.param(128, BF16, (128, 128), (), None, marks=MATRIX),
    ],
    ids=str,
)
def test_a_delta_rule_on_hopper_serves_the_prompts_that_it_says(block, dtype, sizes, gate, reason):
    """What it takes it computes itself."""
    keys, values = sizes
    x = lambda dtype, *sizes: SHAPE(dtype, 2 * block, 2, *sizes)
    inputs = x(dtype, keys), x(dtype, keys), x(dtype, values), x(F32, *gate), x(F32)
    batch = Paged(jnp.arange(2 * block), jnp.zeros((2, 1), int), jnp.arange(2), block)
    call = lambda *inputs: ops.gated_delta_rule(
        batch, Carry(State(slots=Slots(None, inputs[-1]))), 0, *inputs[:-1]
    )[0]  # fmt: skip
    with tracing_for("gpu"), ops.use(gated_delta_rule="hopper"):
        whole = *inputs, SHAPE(F32, 1, 5, 2, keys, values)
        if reason:
            with pytest.raises(ValueError, match=reason):
                ops.explain(call, *whole)
        else:
            assert "hopper: chosen" in ops.explain(call, *whole)
            assert "gated_delta_rule_prefill" in str(jax.make_jaxpr(call)(*whole))
