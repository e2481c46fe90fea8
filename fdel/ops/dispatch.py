"""Choose an implementation of an operation: the first that supports the call; the order ends at the reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `unsupported(*args, **kwargs)` is the reason why not, or None."""

    call: Callable[..., Any]
    unsupported: Callable[..., str | None]


def reasons(table: Mapping[str, Implementation], *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Say for each implementation why it does not serve this call (None: it does)."""
    return {name: i.unsupported(*args, **kwargs) for name, i in table.items()}


def choose(table: Mapping[str, Implementation], impl: str | None, *args: Any, **kwargs: Any) -> str:
    """Name the implementation to use. A named one works or raises ValueError with its reason."""
    if impl is None:
        return next(name for name, why in reasons(table, *args, **kwargs).items() if why is None)
    if impl not in table:
        raise ValueError(f"impl={impl!r} is unknown; use None or one of {', '.join(table)}")
    why = table[impl].unsupported(*args, **kwargs)
    if why:
        raise ValueError(f"impl={impl!r} cannot serve this call: {why}; use impl=None to pick one that can")
    return impl


def describe(table: Mapping[str, Implementation], *args: Any, **kwargs: Any) -> str:
    """Write one line per implementation: the choice, and the reasons against the others."""
    why = reasons(table, *args, **kwargs)
    chosen = next(name for name, reason in why.items() if reason is None)
    note = {
        name: reason or ("chosen" if name == chosen else "supported, later in the order")
        for name, reason in why.items()
    }
    return "\n".join(f"{name}: {text}" for name, text in note.items())
