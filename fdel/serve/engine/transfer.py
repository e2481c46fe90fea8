"""New weights of an engine on several processes: the leader has them whole, and the others get them from it.

Both run the same code over views of the same tree (`Weights[name] = ...`). A leader's view sends each array as it is
copied, a follower's receives it then, so that no process holds more than one array beside the weights. Bytes alone go
over, in the dtype that is served; of an adapter, what is not the base's.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from fdel import params as P
from fdel.ops.weights import LowRank, is_weight
from fdel.params.quantize import change
from fdel.serve.engine.views import View, host_copy, spread

PIECE = 1 << 28  # bytes of an array that are sent at once

Send = Callable[[np.ndarray], None]


class Sent(View):
    """An array of the leader's, which its followers get when it is copied."""

    def __init__(self, view: View, send: Send):
        super().__init__(view.array, view.at)
        object.__setattr__(self, "send", send)

    def copy(self, dtype: Any = None, sharding: Any = None) -> jax.Array:
        """Copy it here and there."""
        x = host_copy(self, dtype)
        self.send(x)  # type: ignore[attr-defined]
        return spread(x, sharding)


class Received:
    """An array that the leader sends when it is copied."""

    at = None

    def __init__(self, shape: Sequence[int], dtype: str, receive: Callable[[np.ndarray], None]):
        self.shape, self.dtype, self.ndim, self.receive = tuple(shape), np.dtype(dtype), len(shape), receive
        self.array = self  # as a view's: nobody else has it

    def copy(self, dtype: Any = None, sharding: Any = None) -> jax.Array:
        """Wait for it."""
        x = np.empty(self.shape, dtype or self.dtype)
        self.receive(x)
        return spread(x, sharding)


def reachable(x: Any) -> bool:
    """Tell whether all of an array is on this process's devices or host."""
    return getattr(x, "is_fully_addressable", True)


def pieces(x: np.ndarray) -> list[memoryview]:
    """Divide the bytes of an array into messages; an empty one has none."""
    flat = np.ascontiguousarray(x.reshape(-1)).view(np.uint8).data
    return [flat[i : i + PIECE] for i in range(0, len(flat), PIECE)]


def receive(connection: Connection, x: np.ndarray) -> None:
    """Fill an array with what comes; ValueError for another number of bytes."""
    for piece in pieces(x):
        if (found := connection.recv_bytes_into(piece)) != len(piece):
            raise ValueError(f"{found} bytes of an array came, expected {len(piece)}: is this another version?")


def describe(new: Any, own: Callable[[str, Any], bool], name: str) -> np.ndarray:
    """Write what a follower needs to make the same tree: dtypes and shapes, and of an adapter which weights it updates.

    `own(path, view)`: whether an array is the base's, which followers have.
    """
    low = {path: w for path, w in P.named_leaves(new, is_leaf=is_weight) if name and isinstance(w, LowRank)}
    whole = {p: x for p, x in P.named_leaves(P.lora.unload(new) if name else new) if not (name and own(p, x))}
    form = lambda x: [list(x.shape), np.dtype(x.dtype).name]
    told = {
        "arrays": {path: form(x) for path, x in whole.items()},
        "updates": {path: [form(x) for x in (w.a, w.b, w.scale)] for path, w in low.items()},
    }
    return np.frombuffer(json.dumps(told).encode(), np.uint8)


def sending(new: Any, own: Callable[[str, Any], bool], name: str, send: Send) -> Any:
    """Let what is no part of the base be sent as it is copied."""

    def one(path: str, x: View) -> View:
        return x if name and own(path, x) else Sent(x, send)

    def weight(path: str, w: Any) -> Any:
        if not (name and isinstance(w, LowRank)):
            return _mapped(one, path, w)
        parts: Any = {part: Sent(getattr(w, part), send) for part in ("a", "b", "scale")}
        return replace(w, base=_mapped(one, path, w.base), **parts)

    return change(weight, new)


def receiving(told: np.ndarray, base: Any, receive: Callable[[np.ndarray], None]) -> Any:
    """Make the same tree of what comes, and of the base's arrays, here views of them."""
    found = json.loads(told.tobytes())
    arrays, updates = found["arrays"], found["updates"]
    coming = lambda form: Received(form[0], form[1], receive)

    def one(path: str, x: View) -> Any:
        return coming(arrays[path]) if path in arrays else x

    def weight(path: str, w: Any) -> Any:
        held: Any = _mapped(one, path, w)
        factors: Any = [coming(form) for form in updates.get(path, ())]
        return LowRank(held, *factors) if factors else held

    return change(weight, base)


def _mapped(one: Callable[[str, Any], Any], path: str, w: Any) -> Any:
    """Change the arrays of one weight, which may be quantised."""
    under = lambda rest: ".".join(filter(None, (path, rest)))
    flat, structure = jax.tree.flatten(w)
    paths = [under(rest) for rest, _ in P.named_leaves(w)]
    return jax.tree.unflatten(structure, [one(p, x) for p, x in zip(paths, flat, strict=True)])
