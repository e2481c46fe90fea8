"""A plugin of pytest (`-p tests.typecheck`): beartype checks the arrays of each function, by jaxtyping's import hook.

Only annotations that hold an array type are checked: `Int[Array, "B T"] | None`, `tuple[Float[Array, "B D"], ...]`. An
`Array` may be numpy's there, which jax takes everywhere.
"""

from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin

import jax
import numpy as np
import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

ROOMS = ["fdel.models", "fdel.ops", "fdel.params", "fdel.serve.engine", "fdel.train"]
SETTINGS = BeartypeConf(is_pep484_tower=True)  # an int may stand where a float is asked for
ARRAYS = jax.Array | np.ndarray | np.generic


def pytest_configure(config: pytest.Config) -> None:
    """Check what is imported from now on: conftest.py imports fdel in functions only."""
    install_import_hook(ROOMS, f"{__name__}.check")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that give wrong shapes on purpose, to see what the function itself says of them."""
    if item.get_closest_marker("wrong_shapes"):
        pytest.skip("it gives wrong shapes on purpose")


def check(function: Callable) -> Callable:
    """Check a function's arrays. Not those of a constructor: records of arrays also hold specs and shardings."""
    arrays = {name: widened(a) for name, a in function.__annotations__.items() if has_array(a)}
    if not arrays or function.__name__ == "__init__":
        return function
    function.__annotations__ = arrays
    return beartype(function, conf=SETTINGS)


def is_array(annotation: Any) -> bool:
    """Whether an annotation is an array type of jaxtyping."""
    return isinstance(annotation, type) and issubclass(annotation, AbstractArray)


def has_array(annotation: Any) -> bool:
    """Whether an annotation holds an array type."""
    return is_array(annotation) or any(map(has_array, get_args(annotation)))


def widened(annotation: Any) -> Any:
    """The annotation, with numpy's arrays wherever it has jax's."""
    if is_array(annotation):
        return annotation.dtype[ARRAYS, annotation.dim_str] if annotation.array_type is jax.Array else annotation
    if not has_array(annotation) or get_origin(annotation) is Callable:
        return annotation
    args = tuple(map(widened, get_args(annotation)))
    return Union[args] if isinstance(annotation, UnionType) else get_origin(annotation)[args]  # noqa: UP007
