"""Models whose tokens see later ones, as a whole: what they are asked for, and what they refuse by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, serve
from fdel.models import Model, gidd, roberta
from tests.models import tiny

TOKENS = [5, 6, 3, 7, 8, 9]


@pytest.mark.slow
@pytest.mark.parametrize("family", [roberta, gidd], ids=["roberta", "gidd"])
def test_encoders_embed_and_write_no_text(family):
    """The engine gives the final hidden state of a token that has seen all others; 1e-5."""
    cfg = family.Config.from_hf(tiny.TINY[family.__name__.rpartition(".")[2]].values)
    model = Model(family, cfg, jax.jit(lambda k: params.init(family.spec(cfg), k))(jax.random.key(0)))
    engine = serve.Engine(model, serve.Settings(rows=1, pages=3))
    want = family.hidden(model.params, jnp.array([TOKENS]), cfg)[0][0]
    np.testing.assert_allclose(engine.embed(TOKENS, "last"), want[-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.embed(TOKENS, "mean"), want.mean(0), rtol=1e-5, atol=1e-5)
    for ask in (lambda: engine.generate([TOKENS]), lambda: engine.score(TOKENS)):
        with pytest.raises(ValueError, match="this is an encoder, which writes no text"):
            ask()
    table = np.arange(1)[None]
    tokens, batch = ops.paged([(0, 0, TOKENS)], table, block=8)
    with pytest.raises(ValueError, match="Paged batch"):
        family.forward(model.params, tokens, cfg, batch)


def test_positions_count_the_tokens_of_a_sequence_that_are_not_padding():
    """As transformers' `create_position_ids_from_input_ids` for each of two packed sequences, and for a step's tokens."""
    first, second = [5, 1, 6, 7], [1, 1, 8, 9]
    tokens, batch = ops.pack([first, second], 10)
    got = roberta.positions(jnp.asarray(tokens), batch, 1)[0]
    assert got[:8].tolist() == [2, 1, 3, 4, 1, 1, 2, 3]
    flat, step = ops.paged([(0, 4, [8])], np.arange(4)[None])
    assert roberta.positions(jnp.asarray(flat), step, 1).tolist() == [6]
