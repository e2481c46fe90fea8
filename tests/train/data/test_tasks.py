"""Tasks: prompts with their rows beside them, the same batches by number whatever was read before."""

import numpy as np
import pytest

from fdel.train.data import Settings, Source, tasks

ROWS = [{"prompt": f"what is {a} + {b}?", "answer": a + b} for a in range(5) for b in range(5)]


def test_rows_come_beside_their_prompts(tok):
    found = tasks(Source(ROWS), Settings(batch=4, length=64, shuffle=False), tok)
    assert found.batches == 6 and found.total == 6
    seen = [t for batch in found for t in batch]
    assert [t.number for t in seen] == list(range(24))
    assert [t.row for t in seen] == ROWS[:24]
    assert seen[3].prompt == tuple(tok.backend.encode(ROWS[3]["prompt"]).ids)


def test_epochs_are_shuffled_and_numbered(tok):
    found = tasks(ROWS, Settings(batch=5, length=64, epochs=2, seed=1), tok)
    numbers = np.array([t.number for batch in found for t in batch]).reshape(2, 25)
    assert (np.sort(numbers) == np.arange(50).reshape(2, 25)).all() and (numbers[0] != numbers[1] - 25).any()
    every = [t for batch in found for t in batch]
    assert all(t.row == ROWS[t.number % 25] for t in every)


def test_a_place_in_the_data(tok):
    found = tasks(ROWS, Settings(batch=5, length=64, epochs=None), tok)
    it = iter(found)
    first = [next(it) for _ in range(7)]
    state = it.get_state()
    rest = [next(it) for _ in range(3)]
    again = iter(found)
    again.set_state(state)
    assert [next(again) for _ in range(3)] == rest and first[0] != rest[0] and found.total is None


def test_prompts_that_are_too_long_and_bad_rows_are_counted(tok):
    rows = [*ROWS[:6], {"prompt": "what is " * 200}, {"question": "?"}]
    found = tasks(rows, Settings(batch=2, length=64), tok)
    assert (
        len(found.rows) == 6
        and "longer than length=64" in str(found.report)
        and "no column 'prompt'" in str(found.report)
    )
    with pytest.raises(ValueError, match="make no batch of 8"):
        tasks(rows, Settings(batch=8, length=64), tok)
