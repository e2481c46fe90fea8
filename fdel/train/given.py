"""What a loss is given beside parameters and batch, by name: `loss(params, batch, given) -> (sum, sums)`.

    step        int[], the state's counter                                                      always in a step
    key         random, folded from seed and step; each microbatch and replica has its own      always in a step
    base        frozen weights that the trained ones are joined with (`losses.on_adapters`)
    reference   parameters of a reference model (`losses.completions`)
    teacher     parameters of a teacher (`losses.distill`)
    bco         the running mean of rewards (`losses.bco_objective`)
    entropy     the coefficient of the entropy bonus (`losses.adaptive_entropy`)
    loss_scale  what float16 gradients are multiplied with (`precision.scaled`)

`update` collects it from the state's extras that `reads` names and from the keywords of the call, which may have any other
names too: `step(state, batch, teacher=weights)`. `jax.jit` traces keywords by name, `donate_argnums` leaves them alone, and
of its options only `in_shardings` takes none; arrays that lie where they should need it not. Nothing that is given is
differentiated or divided into microbatches. `evaluator` gives the same names, see there.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Int

Params = Any
Batch = Any
Given = Mapping[str, Any]
Sums = dict[str, Any]
Loss = Callable[[Params, Batch, Given], tuple[Array, Sums]]

NOTHING: Given = {}  # what a loss or a gradient function is given that is called by itself, with (params, batch)


def collect(step: Int[Array, ""], key: Array, extras: Given, named: Given) -> dict[str, Any]:
    """Join the sources of a step's `given`; a ValueError if one name comes from two of them."""
    always = {"step": step, "key": key}
    if twice := sorted((always.keys() & {*extras, *named}) | (extras.keys() & named.keys())):
        raise ValueError(
            f"{', '.join(twice)}: given twice; the step gives `step`, `key` and what `reads` names, so rename the keyword"
        )
    return always | dict(extras) | dict(named)


def lookup(given: Given, name: str) -> Any:
    """Look up what a loss needs; ValueError if it is not given."""
    if name not in given:
        raise ValueError(
            f"the loss needs {name!r} and was given {sorted(given)}; call step(state, batch, {name}=...), or read it from "
            f"the state: update(..., reads=({name!r},))"
        )
    return given[name]


def fold(given: Given, number: Int[Array, ""]) -> Given:
    """Fold the number of a microbatch, or of a replica, into the key; without a key, `given` as it is."""
    return {**given, "key": jax.random.fold_in(given["key"], number)} if "key" in given else given


def check_signature(f: Callable, first: str = "params") -> None:
    """Raise TypeError for a loss that does not take (params, batch, given)."""
    try:
        taken = inspect.signature(f)
    except ValueError:  # a builtin that does not say
        return
    try:
        taken.bind(first, "batch", "given")
    except TypeError:
        raise TypeError(
            f"{getattr(f, '__name__', f)}{taken}: expected ({first}, batch, given); add the third parameter, a mapping of "
            "what the step gives beside the batch (step, key, and what `reads` and keywords name), even if it is not read"
        ) from None
