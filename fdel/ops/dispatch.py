"""Choose an implementation of an operation: the first that supports the call; the order ends at the reference.

Each operation for which a kernel is worth having has a `Table`. `use` names implementations for whatever runs inside it,
`explain` tells what a function would choose. What XLA cannot partition is divided between devices by `division`.
"""

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from fdel.ops.division import divide, is_array, of_device

F = TypeVar("F", bound=Callable)
WITHIN = {"expert_parallel": "moe", "attend_part": "attend"}  # operations that others call on some meshes alone
TABLES: dict[str, "Table"] = {}  # every operation that is imported, by its name


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `unsupported(*args, **kwargs)` is the reason why not, or None.

    `local`: XLA cannot partition it (a `pallas_call`, a call of a library), so each device calls it with its own part, of
    whose shapes (`jax.ShapeDtypeStruct`s on a mesh) reasons are asked.
    `passed_over(*args, **kwargs)` is a reason to take a later one all the same, unless `use` or `impl` names it.
    """

    call: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda *_, **__: None
    local: bool = False
    backward: Callable[..., Any] = lambda *_: None  # of an implementation in two passes: see `mask.Passes`
    on_request: bool = False  # taken only where `use` or `impl` names it: it has not run on its device, or is slower
    passed_over: Callable[..., str | None] = lambda *_, **__: None


@dataclass(frozen=True)
class Table:
    """The implementations of an operation in the order of choice, and how its arguments and results may be divided.

    `axes` names the axes of each argument's arrays in turn, as in "rows tokens heads head_dim" (an array with fewer axes
    has the first of them); keyword arguments follow under their names. `out` is a tree of such strings. "(rows)" is there
    if the first array so named has all its axes: not in a Paged call. A mapping gives the axes of a tree by its fields, ""
    the others'. What it leaves out is None to a local implementation, and in a result stays as in the argument of the same
    mapping. `axes` may also be a function of the arguments that gives (axes, out), or the reason why a mesh cannot divide
    them for local implementations. `also` are names of other projects: what they are here, or why there is none.
    """

    op: str
    implementations: Mapping[str, Implementation]
    axes: tuple[Any, ...] | Callable[..., tuple[tuple, Any] | str] = ()
    out: Any = ""
    named: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TABLES[self.op] = self  # which `use` then knows


class _Notes(list[str]):
    """Lines of `explain`: as an object of its own it makes jax trace anew what it has traced before."""

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


# Of the thread, and known to jax's caches: pairs of an operation and the implementation that `use` names.
_wanted, _notes = jax.make_user_context(()), jax.make_user_context(None)


def operation(
    *axes: Any, out: Any = "", named: Mapping[str, str] | None = None, also: Mapping[str, str] | None = None,
    **kernels: Implementation,
) -> Callable[[F], F]:  # fmt: skip
    """Decorate a reference: calls take the first kernel that supports them, else the reference, named "xla".

    The operation has the function's name, `axes` (or the one function that gives them) and the rest are those of `Table`.
    """

    def decorate(reference: F) -> F:
        ways = {**kernels, "xla": Implementation(reference)}
        of_call = axes[0] if axes and callable(axes[0]) else axes
        table = Table(reference.__name__.strip("_"), ways, of_call, out, named or {}, also or {})
        return functools.wraps(reference)(lambda *args, **kwargs: run(table, None, *args, **kwargs))  # type: ignore[return-value]

    return decorate


def weight(axes: str) -> Mapping[str, str]:
    """Name the axes of a weight of any kind; those of a low-rank factor `a`, and of choices, are others, and stay whole."""
    return {"a": "", "chosen": "", "": axes}


def kernel(module: str, on_request: bool = False, unproven: bool = False) -> Implementation:
    """Give the local implementation of fdel/kernels/<module>.py: its `call` and `unsupported`, imported on use; and
    `unproven`, a reason to pass it over, if some calls have not run on its device."""
    load = functools.partial(importlib.import_module, f"fdel.kernels.{module}")
    call, why = lambda *a, **k: load().call(*a, **k), lambda *a, **k: load().unsupported(*a, **k)
    over = (lambda *a, **k: load().unproven(*a, **k)) if unproven else Implementation.passed_over
    return Implementation(call, why, local=True, on_request=on_request, passed_over=over)


@contextlib.contextmanager
def use(**names: str) -> Iterator[None]:
    """Name the implementation of operations, as in `use(attend="flash")`, for what is called or traced inside.

    Names that EasyDeL has for them are known too, as in `use(attend="vanilla", paged_attention="page_attention")`.

    Also a decorator: of the function that is jitted, say, so that it holds in whatever thread traces it. A call that the
    named one cannot serve raises ValueError with the reason, as do names that no table has.
    """
    for op, name in names.items():
        if op not in TABLES:
            raise ValueError(f"{op}={name}: no operation {op!r} has implementations; known are {', '.join(TABLES)}")
        names[op] = _ours(TABLES[op], name)
    with _wanted(tuple(sorted({**dict(_wanted.value), **names}.items()))):
        yield


def choose(table: Table, impl: str | None, *args: Any, **kwargs: Any) -> Implementation:
    """Choose the implementation `impl`, else the one that `use` names, else the first that supports the call."""
    name = impl or dict(_wanted.value).get(table.op)
    ways = table.implementations
    whole = args, kwargs, None
    part = of_device(table, args, kwargs) if any(way.local for way in ways.values()) else whole

    def cannot(way: Implementation) -> str | None:
        args, kwargs, undivided = part if way.local else whole
        return way.unsupported(*args, **kwargs) or undivided

    def why_not(way: Implementation) -> str | None:
        args, kwargs, _ = part if way.local else whole
        return cannot(way) or way.passed_over(*args, **kwargs)

    if name is None:
        name = next(n for n, way in ways.items() if not way.on_request and why_not(way) is None)
    elif why := cannot(ways[name := _ours(table, name)]):
        raise ValueError(f"{table.op}: impl={name!r} cannot serve this call: {why}; leave it out to use one that can")
    if _notes.value is not None:
        later = lambda way: "supported, where `use` names it" if way.on_request else "supported, later in the order"
        reasons = {n: why_not(way) or later(way) for n, way in ways.items()}
        _notes.value.append(table.op + "".join(f"\n  {n}: {why}" for n, why in {**reasons, name: "chosen"}.items()))
    return ways[name]


def _ours(table: Table, name: str) -> str:
    """Give the name here of what may be another project's name for it, or raise ValueError."""
    ours = table.also.get(name, name)
    if ours not in table.implementations:
        why = "unknown" if ours == name else f"another project's: {ours}"
        known = ", ".join(table.implementations)
        raise ValueError(f"{table.op}: impl={name!r} is {why}; leave it out or use one of {known}")
    return ours


def run(table: Table, impl: str | None, *args: Any, **kwargs: Any) -> Any:
    """Call the chosen implementation; a local one with each device's part."""
    way = choose(table, impl, *args, **kwargs)
    if way.local and _notes.value is not None:  # what is explained may be for devices that this host lacks
        way = [*table.implementations.values()][-1]
    return (divide(way.call, table) if way.local else way.call)(*args, **kwargs)


@contextlib.contextmanager
def met() -> Iterator[Callable[[], set[str]]]:
    """Give what tells the operations that were called so far inside, by whatever was traced or called there."""
    with _notes(notes := _Notes()):
        yield lambda: {note.partition("\n")[0] for note in notes}


def without_effect(names: Mapping[str, str], known: set[str]) -> str | None:
    """Say which operations that `use` names are none of those `known`; None if all are.

    Those of a mesh, by which experts or a ring of devices compute another operation, count with that one.
    """
    if unmet := [f"{op}={name}" for op, name in names.items() if not {op, WITHIN.get(op, op)} & known]:
        return f"{', '.join(unmet)} has no effect: the model's operations are {', '.join(sorted(known))}"
    return None


def explain(f: Callable, *args: Any, **kwargs: Any) -> str:
    """Tell which implementations f(*args, **kwargs) would take, and why not the others; nothing is computed.

    f is an operation or all that calls some, as a model's `forward`. Arrays may be `jax.ShapeDtypeStruct`s.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

    def call(arrays: dict[int, Any]) -> None:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        f(*args, **kwargs)

    with _notes(notes := _Notes()):
        jax.eval_shape(call, arrays)
    times = lambda n: f" ({n} times)\n" if n > 1 else "\n"
    return "\n".join(line.replace("\n", times(n), 1) for line, n in Counter(notes).items())
