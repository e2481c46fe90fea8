"""The Hopper kernels for groups of rows: their tiles, and numbers of rows that no tile divides are lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel import ops
from fdel.kernels.grouped_matmul_gpu import tiles, tiling
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


GROUPS = st.sampled_from((1, 9)).flatmap(lambda n: st.lists(st.integers(0, 300), min_size=n, max_size=n))


@given(GROUPS, st.booleans(), st.sampled_from((8, 16, 64, 128)))
def test_tiles_begin_at_rows_that_are_copied_together_and_give_each_row_once(sizes, full, rows):
    """TMA leaves out what lies past the next multiple of 8 of a tile that begins elsewhere; no interpreter does."""
    many = 300 * len(sizes) + 4  # few sizes of arrays, as each is compiled
    sizes[-1] = many - sum(sizes[:-1]) if full else sizes[-1]
    table, (count,) = map(np.asarray, tiles(jnp.asarray(sizes, jnp.int32), many, rows))
    owners = np.full(many, -1)
    for group, top, first, end in table[:count]:
        assert top % 8 == 0 and top <= first < end <= top + rows
        assert (owners[first:end] == -1).all()
        owners[first:end] = group
    np.testing.assert_array_equal(owners, np.repeat(np.arange(len(sizes) + 1), [*sizes, many - sum(sizes)]))


SIZES = st.integers(1, 400).map(lambda n: 16 * n)


@given(SIZES, SIZES, st.integers(1, 2), st.booleans(), st.booleans())
def test_tiles_of_outputs_are_products_of_whole_pieces(outputs, inputs, matrices, turned, few):
    """Multiples of 128 have the tiles that were measured; sums of 64 rows fit into the registers of a group of warps."""
    turned |= matrices == 2
    x = jax.ShapeDtypeStruct((64 if few else 4096, inputs if turned else outputs), jnp.bfloat16)
    t = tiling(x, jax.ShapeDtypeStruct((4, outputs, inputs), x.dtype), turned, matrices=matrices)
    n = outputs if turned else inputs
    assert t.few == few and t.piece in (16, 32, 64) and not inputs % t.piece and not x.shape[1] % t.piece
    assert t.width % 8 == 0 and t.width * matrices <= 256 and (turned or t.width % t.piece == 0)
    if n % 128 == 0:
        assert t.outputs == (256 if matrices == 1 and n % 256 == 0 else 128)
