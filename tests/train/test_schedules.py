"""Schedules against transformers', step by step."""

import jax
import numpy as np
import pytest

from fdel import train

CASES = [
    ("constant", "get_constant_schedule_with_warmup", {}, {}),
    ("linear", "get_linear_schedule_with_warmup", {}, {"num_training_steps": 60}),
    ("cosine", "get_cosine_schedule_with_warmup", {}, {"num_training_steps": 60}),
    (
        "cosine",
        "get_cosine_with_min_lr_schedule_with_warmup",
        {"final": 0.1},
        {"num_training_steps": 60, "min_lr_rate": 0.1},
    ),
    (
        "restarts",
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        {"cycles": 3},
        {"num_training_steps": 60, "num_cycles": 3},
    ),
    ("inverse_sqrt", "get_inverse_sqrt_schedule", {}, {}),
    ("inverse_sqrt", "get_inverse_sqrt_schedule", {"timescale": 30}, {"timescale": 30}),
    *(
        (
            "wsd",
            "get_wsd_schedule",
            {"decay": 20, "shape": shape},
            {"num_training_steps": 60, "num_decay_steps": 20, "decay_type": shape},
        )
        for shape in ("linear", "cosine", "1-sqrt")
    ),
]


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(("name", "theirs", "options", "their_options"), CASES)
def test_equals_transformers(name: str, theirs: str, options: dict, their_options: dict, warmup: int) -> None:
    """Every step of a run of 60, and ten after its end: 1e-6 of the peak."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = getattr(optimization, theirs)(optimizer, num_warmup_steps=warmup, **their_options)
    want = []
    for _ in range(71):
        want.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    schedule = train.schedule(name, 2.0, warmup=warmup, steps=60, **options)
    got = jax.jit(jax.vmap(schedule))(np.arange(71))
    last = 61 if "cosine_schedule" in theirs or "min_lr_rate" in their_options else 71  # their plain cosines rise again
    np.testing.assert_allclose(got[:last], want[:last], atol=2e-6)


@pytest.mark.slow
def test_corners() -> None:
    """By hand: the floor is a fraction of the peak and stays; a tenth of the steps decay by default; steps are counted."""
    at = lambda schedule, *steps: [float(schedule(s)) for s in steps]
    np.testing.assert_allclose(at(train.schedules.cosine(2.0, warmup=10, steps=110, final=0.1), 0, 5, 10, 60, 110, 500),
                               [0, 1, 2, 1.1, 0.2, 0.2], rtol=1e-6)  # fmt: skip
    np.testing.assert_allclose(
        at(train.schedules.wsd(2.0, steps=100, final=0.5), 0, 90, 95, 100, 200), [2, 2, 1.5, 1, 1], rtol=1e-6
    )
    np.testing.assert_allclose(at(train.schedules.linear(2.0, steps=10, final=0.5), 0, 5, 20), [2, 1.5, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("exponential", {"steps": 9}, "'exponential' is not one of constant, linear, cosine"),
        ("cosine", {}, "'cosine' needs steps"),
        ("linear", {"steps": 5, "warmup": 5}, "steps=5 end before the warm-up of 5 does"),
        ("wsd", {"steps": 9, "warmup": 5, "decay": 5}, "warmup=5 and decay=5 do not fit in steps=9"),
        ("wsd", {"steps": 9, "shape": "sqrt"}, "'sqrt' is not one of linear, cosine, 1-sqrt"),
        ("restarts", {"steps": 9, "cycles": 0}, "cycles=0"),
        ("constant", {"warmup": -1}, "warmup=-1"),
    ],
)
def test_errors(name: str, options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        train.schedule(name, 1.0, **options)
