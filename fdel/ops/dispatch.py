"""Choose an implementation of an operation: the first that supports the call; the order ends at the reference.

Each operation for which a kernel is worth having has a `Table`. `use` names implementations for whatever runs inside it,
`explain` tells what a function would choose. What XLA cannot partition is divided between devices here.
"""

import contextlib
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fdel.ops.cpu import collective
from fdel.ops.platform import context
from fdel.ops.shard import AXES, divided

F = TypeVar("F", bound=Callable)
TABLES: dict[str, "Table"] = {}  # every operation that is imported, by its name
TOGETHER = ("heads", "kv_heads", "groups")  # all are divided, or none
# Axes that `divide` may divide; "each" are tokens that are computed one by one, for which others need whole sequences;
# over "summed" ones the results of the devices are added up.
MESH = {
    "rows": AXES["rows"], "each": AXES["tokens"], "outputs": AXES["vocab"], "summed": AXES["vocab"],
    **dict.fromkeys(TOGETHER, AXES["attending"]),
}  # fmt: skip
ONE = ("summed", "groups")  # an array with one of these is whole on each device
FEW = ("kv_heads", "groups")  # where devices are a multiple of them, several devices have the same one


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `unsupported(*args, **kwargs)` is the reason why not, or None.

    `local`: XLA cannot partition it (a `pallas_call`, a call of a library), so each device calls it with its own part.
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
    mapping. `axes` may also be a function of the arguments that gives (axes, out). `also` are names of other projects:
    what they are here, or why there is none.
    """

    op: str
    implementations: Mapping[str, Implementation]
    axes: tuple[Any, ...] | Callable[..., tuple[tuple, Any]] = ()
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


def kernel_of_parts(module: str, unproven: bool = False) -> Implementation:
    """Give the two passes of fdel/kernels/<module>.py, its `forward` and `backward`, for the table of a ring."""
    load = functools.partial(importlib.import_module, f"fdel.kernels.{module}")
    passes = (lambda *a: load().forward(*a)), (lambda *a: load().unsupported_part(*a)), (lambda *a: load().backward(*a))
    over = (lambda *a: load().unproven(*a[1:])) if unproven else Implementation.passed_over
    return Implementation(passes[0], passes[1], local=True, backward=passes[2], passed_over=over)


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
    cannot = lambda way: way.unsupported(*args, **kwargs) or (_sent(table, args, kwargs) if way.local else None)
    why_not = lambda way: cannot(way) or way.passed_over(*args, **kwargs)
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


def explain(f: Callable, *args: Any, **kwargs: Any) -> str:
    """Tell which implementations f(*args, **kwargs) would take, and why not the others; nothing is computed.

    f is an operation or all that calls some, as a model's `forward`. Arrays may be `jax.ShapeDtypeStruct`s.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if _is_array(x)}

    def call(arrays: dict[int, Any]) -> None:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
        f(*args, **kwargs)

    with _notes(notes := _Notes()):
        jax.eval_shape(call, arrays)
    times = lambda n: f" ({n} times)\n" if n > 1 else "\n"
    return "\n".join(line.replace("\n", times(n), 1) for line, n in Counter(notes).items())


def divide(call: Callable, table: Table, out: Any = None) -> Callable:
    """Call with each device's part of the arrays (`jax.shard_map`), along those axes in `MESH` that all sizes allow.

    Arrays without such axes are whole on each device. Arguments without arrays are passed on. `out` replaces the table's.
    """

    def divided_call(*args: Any, **kwargs: Any) -> Any:
        mesh = set(jax.sharding.get_abstract_mesh().auto_axes)  # all: the compiler cannot divide these calls
        if not mesh:
            return call(*args, **kwargs)
        given, outs = _axes(table, out, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        texts, arrays, names = _named(given, leaves)
        over, times = _places([(names(text), x.shape) for x, text in arrays.values()])
        arrays = {i: (_repeated(x, names(text), times), text) for i, (x, text) in arrays.items()}
        of = lambda name, size=0: None if name in ONE and size == 1 else over.get(name) or None
        spec = lambda text, *shape: P(*map(of, names(text), *shape))
        total = over["summed"] if any("summed" in text for _, text in arrays.values()) else ()

        def local(parts: dict[int, Any]) -> Any:
            mine = [parts.get(i, None if texts[i] is None else x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, mine)
            y = call(*args, **kwargs)
            return jax.tree.map(functools.partial(collective, lambda y: jax.lax.psum(y, total)), y) if total else y

        def specs(entry: Any) -> Any:
            if isinstance(entry, str):
                return spec(entry)
            carry = argument(entry)
            each = [text if text is None else spec(text) for text in _texts(entry, carry)]
            return P() if carry is None else jax.tree.unflatten(jax.tree.structure(carry), each)

        def complete(entry: Any, new: Any) -> Any:
            keep, absent = lambda new, old: old if new is None else new, lambda x: x is None
            return new if isinstance(entry, str) else jax.tree.map(keep, new, argument(entry) or new, is_leaf=absent)

        mapping = lambda entry: isinstance(entry, Mapping)
        argument = lambda entry: next(x for e, x in given if e is entry)  # that a mapping among the results stands for
        outs_at = jax.tree.map(specs, outs, is_leaf=mapping)
        parts = {i: spec(text, x.shape) for i, (x, text) in arrays.items()}
        found = divided(local, mesh, (parts,), outs_at)({i: x for i, (x, _) in arrays.items()})
        return jax.tree.map(complete, outs, found, is_leaf=mapping)

    return divided_call


def _axes(table: Table, out: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """Give each argument's axes beside it, and those of the results, `out` or the table's."""
    axes, outs = table.axes(*args, **kwargs) if callable(table.axes) else (table.axes, out or table.out)
    of_keywords = ((table.named.get(name, ""), kwargs[name]) for name in sorted(kwargs))
    return [*zip_longest(axes[: len(args)], args, fillvalue=""), *of_keywords], outs


def _named(
    given: list[tuple[Any, Any]], leaves: list[Any]
) -> tuple[list, dict[int, tuple[Any, str]], Callable[[str], list[str]]]:
    """Give the axes of all leaves of the arguments, the arrays that a local implementation gets, and how axes are read."""
    texts = [text for entry, x in given for text in _texts(entry, x)]
    both = enumerate(zip(leaves, texts, strict=True))
    arrays = {i: (x, text) for i, (x, text) in both if _is_array(x) and text is not None}
    rows = next((x.ndim >= len(text.split()) for x, text in arrays.values() if text.startswith("(rows)")), True)
    return texts, arrays, lambda text: text.replace("(rows)", "rows" if rows else "").split()


def _sent(table: Table, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """Say why each device's part of the results would not do, or None."""
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return None
    given, outs = _axes(table, None, args, kwargs)
    _, arrays, names = _named(given, jax.tree.leaves((args, kwargs)))
    times = _places([(names(text), x.shape) for x, text in arrays.values()])[1]
    found = [name for text in jax.tree.leaves(outs) for name in names(text) if name in times]
    return f"{times[found[0]]} devices have the same {found[0]}: results would have to be exchanged" if found else None


def _places(arrays: list[tuple[list[str], tuple[int, ...]]]) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Say over which mesh axes the named axes of arrays go, and how many devices share each thing of `FEW`, if several."""
    over, times = {name: tuple(context(*axes)) for name, axes in MESH.items()}, dict[str, int]()
    for names, shape in arrays:
        for name, size in zip(names, shape, strict=False):
            count = math.prod(context(*over.get(name, ())).values())
            if size % count and name in FEW and size > 1 and count % size == 0:
                times[name] = count // size
            elif size % count and not (name in ONE and size == 1):
                over[name] = ()
    return (over, times) if all(over[name] for name in TOGETHER) else (over | dict.fromkeys(TOGETHER, ()), {})


def _repeated(x: Any, names: list[str], times: Mapping[str, int]) -> Any:
    """Repeat what devices share, once for each: no copy where each has its own already (`params.mesh.SHARED`)."""
    for axis, name in enumerate(names[: x.ndim]):
        x = jnp.repeat(x, times[name], axis) if name in times else x
    return x


def _texts(entry: Any, x: Any) -> list[str | None]:
    """Give the axes of each array in an argument; None: a local implementation does not get it."""
    fields = entry if isinstance(entry, Mapping) else {"": entry}
    paths = [[getattr(key, "name", None) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    return [next((fields[name] for name in path if name in fields), fields.get("")) for path in paths]


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
