"""The backward pass of attention on Hopper, interpreted, against float64: see `interpreted_flash_backward`."""

import jax
import jax.numpy as jnp
import pytest

from fdel.kernels import flash_backward_gpu as kernel
from tests.ops.test_kernels import interpret

MATRIX = pytest.mark.matrix


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, *(pytest.param(n, marks=MATRIX) for n in range(1, 8))])
def test_gradients_of_attention_on_hopper_equal_float64(case):
    """Of q, k, v and sinks, with a cotangent of the log-sum-exps and queries that see nothing; no race (seen: 5e-3).

    Of sinks 0.03: sums of what cancels, with outputs that are rounded.
    """
    done = interpret("flash_backward", str(case))
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()]
    assert len(errors) >= 3 and all(x < 1e-2 for x in errors[:3]) and all(x < 5e-2 for x in errors[3:])
    assert "RACE" not in done.stdout + done.stderr


@MATRIX
def test_a_race_planted_in_gradients_of_attention_is_found():
    done = interpret("flash_backward", "race")
    assert "RACE DETECTED" in done.stdout + done.stderr


REASONS = [
    ((64, 64, jnp.float32), "bfloat16 and float16; found float32"),
    ((96, 96, jnp.bfloat16), "heads of 96 and 96 channels; expected one of"),
    ((192, 128, jnp.bfloat16), None),
    ((256, 256, jnp.float16), None),
]


@pytest.mark.parametrize(("sizes", "reason"), REASONS, ids=str)
def test_the_backward_pass_on_hopper_says_what_it_cannot_serve(sizes, reason):
    q, v = (jax.ShapeDtypeStruct((1, 256, 4, width), sizes[2]) for width in sizes[:2])
    why = kernel.unsupported(q, q, v)
    assert why is reason is None or reason in why
