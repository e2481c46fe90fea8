"""Train, fine-tune and serve language models in JAX, as plain functions over plain arrays.

Submodules load on first use, so that `import fdel` costs nothing and `fdel.text` runs without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdel import kernels, models, ops, params, recipe, serve, text, train

__version__ = "0.1.0"
__all__ = ["kernels", "models", "ops", "params", "recipe", "serve", "text", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fdel' has no attribute {name!r}; its submodules are {', '.join(__all__)}")
    return importlib.import_module(f"fdel.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
