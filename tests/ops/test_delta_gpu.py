"""The Hopper kernel for the delta rule, interpreted, against float64: see `interpreted_delta`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.platform import tracing_for
from tests.ops.test_kernels import interpret

MATRIX = pytest.mark.matrix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ((), 8e-3),
        (("channels",), 8e-3),
        pytest.param(("near",), 3e-2, marks=MATRIX),
        pytest.param(("channels", "near"), 3e-2, marks=MATRIX),
    ],
    ids=str,
)
def test_the_delta_rule_on_hopper_equals_float64(arguments, most):
    """Ragged sequences, NaN in padding, decays of exp(-3000), equal keys, no race: 8e-3 of the largest number.

    Seen: 4e-3 with decays of heads, 5.5e-3 with those of channels. With keys that are nearly equal 0.021 and 0.025: with
    the exact inverse of each chunk, rounded to bfloat16, it is 0.020.
    """
    done = interpret("delta", *arguments)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < most and "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [(), ("channels",)], ids=str)
def test_the_gradient_of_the_delta_rule_on_hopper_equals_float64(arguments):
    """Of q, k, v, g and beta, with NaN in padding of inputs and of what comes back (seen: 6e-3)."""
    done = interpret("delta", "gradient", *arguments)
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split()[-5:])) < 2e-2 and "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [(), ("channels",)], ids=str)
def test_a_race_planted_in_the_delta_rule_is_found(arguments):
    done = interpret("delta", "race", *arguments)
    assert "RACE DETECTED" in done.stdout + done.stderr


REASONS = [
    ({"platform": "tpu"}, "written for NVIDIA GPUs"),
    ({"dtype": jnp.float32}, "it multiplies bfloat16"),
    ({"dim": 64}, "heads of 64 and 64 channels"),
    ({"paged": True}, "slots.ssm of shape"),
    ({}, None),
    ({"gate": (128,)}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_for_the_delta_rule_on_hopper_says_what_it_cannot_serve(call, reason):
    """It is taken where it is named, and nowhere else."""
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct((1, 256, 4, *sizes), dtype)
    x = shape(call.get("dtype", jnp.bfloat16), call.get("dim", 128))
    args = (None, 0, x, x, x, shape(jnp.float32, *call.get("gate", ())), shape(jnp.float32))
    paged = ops.paged([(0, 0, [0])], np.zeros((1, 1), int))[1]
    batch = paged if "paged" in call else ops.packed(jnp.zeros((1, 256), int))
    with tracing_for(call.get("platform", "gpu")):
        if reason is None:
            assert "xla: chosen" in ops.explain(ops.gated_delta_rule, batch, *args)
        with ops.use(gated_delta_rule="hopper"):
            if reason is None:
                assert "hopper: chosen" in ops.explain(ops.gated_delta_rule, batch, *args)
            else:
                with pytest.raises(ValueError, match=reason):
                    ops.explain(ops.gated_delta_rule, batch, *args)
