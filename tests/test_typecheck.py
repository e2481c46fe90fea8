"""The check of annotations at run time (`make test-shapes`) finds wrong shapes and lets pass what may be given."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped

from tests import typecheck


@jaxtyped(typechecker=typecheck.check)
def gather(
    table: Float[Array, "V D"], ids: Int[Array, "B T"] | None, scale: float = 1.0, then: Callable = abs
) -> tuple[Float[Array, "B T D"], ...]:
    return (table[jnp.zeros((1, 1), int) if ids is None else ids] * scale,)[: 1 if scale else 0] or (table,)


def test_what_fits_passes():
    """Arrays of numpy as well, an int as a float, and anything where no array is declared."""
    for ids in (jnp.zeros((2, 3), int), np.zeros((2, 3), int), None):
        gather(jnp.ones((5, 4)), ids, 2, then="no function")


@pytest.mark.parametrize(
    ("table", "ids", "scale"),
    [
        (jnp.ones(5), jnp.zeros((2, 3), int), 1.0),
        (jnp.ones((5, 4)), jnp.zeros(2, int), 1.0),
        (jnp.ones((5, 4)), np.zeros((2, 3)), 1.0),
        (jnp.ones((5, 4)), jnp.zeros((2, 3), int), 0.0),  # returns the table
    ],
)
def test_what_does_not_fit_is_an_error(table, ids, scale):
    with pytest.raises(TypeCheckError, match="gather"):
        gather(table, ids, scale)
