"""The Hopper kernels for groups of rows: their tiles, and numbers of rows that no tile divides are lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel import ops
from fdel.kernels.grouped_matmul_gpu import tiles
from fdel.ops.platform import tracing_for
from tests.aot.hopper_products import weight

FORMATS = {"bfloat16": None, "int8": ("int8", 256, False), "MXFP4": ("e2m1", 32, "exponent")}


@pytest.mark.parametrize(
    ("name", "rows"),
    [("int8", 12), *(pytest.param(n, rows, marks=pytest.mark.matrix) for n in FORMATS for rows in (3, 130))],
)
def test_any_number_of_rows_is_lowered(name, rows):
    """Forward and backward; a tile that is copied has 8 rows, which ended the lowering of 12, 100 or 130."""
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    matrices = put(jnp.bfloat16, 4, 128, 256) if FORMATS[name] is None else weight(put, (4, 128), 256, *FORMATS[name])

    @ops.use(grouped_matmul="hopper")
    def both(x, w, sizes, dy):
        product = lambda x, w: ops.grouped_matmul(x, w, sizes)
        if FORMATS[name] is None:
            return jax.vjp(product, x, w)[1](dy)
        y, back = jax.vjp(lambda x: product(x, w), x)
        return y, back(dy)

    args = put(jnp.bfloat16, rows, 256), matrices, put(jnp.int32, 4), put(jnp.bfloat16, rows, 128)
    with tracing_for("gpu"):
        text = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(0, 40), st.sampled_from((8, 16, 64, 128)))
def test_tiles_begin_at_rows_that_are_copied_together_and_give_each_row_once(sizes, more, rows):
    """TMA leaves out what lies past the next multiple of 8 of a tile that begins elsewhere; no interpreter does."""
    many = -(-(sum(sizes) + more) // 8) * 8
    table, (count,) = map(np.asarray, tiles(jnp.asarray(sizes, jnp.int32), many, rows))
    owners = np.full(many, -1)
    for group, top, first, end in table[:count]:
        assert top % 8 == 0 and top <= first < end <= top + rows
        assert (owners[first:end] == -1).all()
        owners[first:end] = group
    np.testing.assert_array_equal(owners, np.repeat(np.arange(len(sizes) + 1), [*sizes, many - sum(sizes)]))
