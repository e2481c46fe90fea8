"""What a training step will need on a mesh that nobody here owns: memory, FLOPs, and what devices send each other.

The step is compiled ahead of time for as many virtual CPU devices, by the partitioner that GPUs and TPUs use too; nothing
runs. The CPU compiler computes bfloat16 in float32: what it sends as float32 after converting it from 16 bits is counted in
those. Three figures differ on an accelerator: temporaries are larger here, sums over devices are in float32 here, and a
reduce-scatter is an all-reduce and a slice.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SUMS = ("all-reduce", "reduce-scatter")
MOVES = ("convert", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "broadcast")
BITS = {"pred": 8, "bf16": 16, "token": 0}  # the others end in their number of bits


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, per device."""

    kind: str
    shapes: tuple[str, ...]  # of the result, as in "f32[64,128]"
    nbytes: int  # of the result
    devices: int  # that take part
    count: int  # executions per call of the program; loops of unknown length count once
    source: str  # the operation of the program it comes from

    @property
    def moved(self) -> float:
        """Bytes that a device sends per call on a ring."""
        share = (self.devices - 1) / self.devices
        factor = {"all-reduce": 2 * share, "reduce-scatter": self.devices - 1, "collective-permute": 1.0}
        return self.count * self.nbytes * factor.get(self.kind, share)


def shape_bytes(shape: str) -> int:
    """Count the bytes of an HLO shape such as "bf16[8,128]"."""
    kind, _, dims = shape.rstrip("]").partition("[")
    bits = BITS[kind] if kind in BITS else int(re.findall(r"\d+", kind)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def collectives(text: str, *, narrow: bool = True) -> list[Collective]:
    """Read the collective operations out of a compiled program (`compiled.as_text()`).

    `narrow` counts what XLA:CPU widened before sending it in its 16 bits; accelerators send what their programs say.
    """
    bodies, entry = _computations(text)
    devices = int(m[1]) if (m := re.search(r"num_partitions=(\d+)", text)) else 1
    found = []
    for name, times in _executions(bodies, entry).items():
        for line in bodies[name]:
            m = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
            if m:
                shapes = tuple(re.findall(r"\w+\[[\d,]*\]", m[1]))
                if m[3] and m[2] != "all-reduce":  # (operands, results, marks of progress): the results alone are moved
                    n = len(_operands(line))
                    shapes = shapes[n : 2 * n]
                if narrow and m[2] not in SUMS and (sent := _narrow(bodies, name, line)):
                    shapes = tuple(s.replace("f32", sent) for s in shapes)
                source = re.search(r'op_name="([^"]*)"', line)
                size = sum(map(shape_bytes, shapes))
                found.append(
                    Collective(m[2], shapes, size, _group(line) or devices, times, source[1] if source else "")
                )
    return found


def _narrow(bodies: dict[str, list[str]], name: str, line: str) -> str | None:
    """Give the 16-bit dtype that all operands of an instruction were converted from, and so can be sent in, if any."""
    kinds = {_converted(bodies, name, operand) for operand in _operands(line)}
    return kinds.pop() if len(kinds) == 1 else None


def _converted(bodies: dict[str, list[str]], name: str, operand: str) -> str | None:
    """Follow an array back through what only moves its numbers, into fusions too, to a conversion from 16 bits."""
    outer: list[tuple[str, list[str]]] = []  # the computations that call this one, with their operands
    for _ in range(100):
        line = next((x for x in bodies[name] if re.match(rf"\s*(?:ROOT )?%?{re.escape(operand)} = ", x)), "")
        m = re.search(r" = (\w+)\[[^ ]* ([\w\-]+)\(", line)
        if m is None or m[1] in ("bf16", "f16"):
            return m and m[1]
        if m[2] == "parameter" and outer:
            i = int(line.partition("parameter(")[2].partition(")")[0])
            (name, operands) = outer.pop()
            operand = operands[i]
        elif m[2] == "fusion" and (callee := re.search(r"calls=%?([\w.\-]+)", line)):
            outer.append((name, _operands(line)))
            name = callee[1]
            operand = (
                next(x for x in bodies[name] if "ROOT " in x).partition("ROOT ")[2].partition(" = ")[0].lstrip("%")
            )
        elif m[2] in MOVES:
            operand = _operands(line)[0]
        else:
            return None
    return None


def _operands(line: str) -> list[str]:
    """Name the operands of an instruction."""
    inside = re.search(r" = (?:\(.*?\)|[^ ]+) [\w\-]+\(([^)]*)\)", line)
    return [x.split()[-1].lstrip("%") for x in inside[1].split(", ")] if inside and inside[1] else []


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Cut HLO text into {computation: its lines} and name the entry."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _executions(bodies: dict[str, list[str]], entry: str) -> Counter[str]:
    """Count how often each computation runs: calls, times the known trip counts of loops."""
    times = Counter[str]()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in bodies[name]:
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for callee in re.findall(r"(?:body|to_apply|calls|condition)=%?([\w.\-]+)", line):
                if callee in bodies:
                    visit(callee, count * (int(trips[1]) if trips else 1))
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            for callee in branches[1].split(", ") if branches else ():
                visit(callee.lstrip("%"), count)

    visit(entry, 1)
    return times


def _group(line: str) -> int:
    """Count the devices of a collective's groups; 0 stands for all. HLO writes groups in four ways."""
    if "source_target_pairs" in line:
        return 2
    if m := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(m[1])
    if m := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", m[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", m[2])  # an axis, or a part of one
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if m := re.search(r"replica_groups=\{(?:\{([\d,]*)\})?", line):
        return len(m[1].split(",")) if m[1] else 0
    raise ValueError(f"cannot read the groups of {line.strip()[:200]!r}; expected replica_groups in a form known here")


@dataclass(frozen=True)
class Training:
    """What to plan: a training step on `rows` x `length` tokens."""

    mesh: str
    rows: int
    length: int
    microbatches: int = 1
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    remat: str | None = None


def compile_step(family: ModuleType, cfg: Any, t: Training) -> tuple[Any, dict[str, int]]:
    """Compile the composed training step for the mesh: (compiled program, bytes per device of what it is given).

    Needs as many JAX devices as the mesh has; virtual ones do, and hold nothing.
    """
    from fdel import params

    mesh = params.make_mesh(params.parse_mesh(t.mesh))
    step, args, given = training_step(family, cfg, t, mesh)
    with jax.set_mesh(mesh):
        return step.lower(*args).compile(), given


def training_step(family: ModuleType, cfg: Any, t: Training, mesh: Mesh) -> tuple[Any, tuple, dict[str, int]]:
    """Compose the training step for a mesh: (jitted function, shapes of its arguments, their bytes per device)."""
    from fdel import params, train
    from fdel.train import parallel

    spec, optimizer = family.spec(cfg), train.optimizer(t.optimizer, 1e-4, spec=family.spec(cfg))
    shardings = params.shardings(spec, mesh)
    options: dict[str, Any] = {"remat": t.remat} if t.remat else {}
    g = parallel.constrain(train.grads(train.losses.sft(family, cfg, **options)), shardings)
    g = train.normalize(parallel.reduce_once(train.accumulate(g, t.microbatches)))
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda p: train.init_state(p, optimizer), params.abstract(spec, jnp.dtype(t.dtype)))
        at = parallel.state_shardings(shapes, shardings)
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        state = jax.tree.map(place, shapes, at)
        batch = {"tokens": place(jax.ShapeDtypeStruct((t.rows, t.length), jnp.int32), params.batch_sharding(mesh))}
        step = jax.jit(train.update(g, optimizer), donate_argnums=0, out_shardings=(at, None))
    mine = lambda tree: sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    given = {"parameters": mine(state.params), "optimizer state": mine(state.opt_state), "batch": mine(batch)}
    return step, (state, batch), given


def report(family: ModuleType, cfg: Any, t: Training, *, memory: float | None = None) -> str:
    """Describe a training step on a mesh; `memory` is what a device has, in GiB."""
    from fdel import params
    from fdel.params.mesh import shared
    from fdel.report import flops_per_token, render

    program, given = compile_step(family, cfg, t)
    text, stats = program.as_text(), program.memory_analysis()
    mib = lambda n: f"{n / 2**20:,.2f}"
    devices = len(jax.devices())
    temporaries = stats.temp_size_in_bytes + max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    total = sum(given.values()) + temporaries
    rows: list[tuple[str, ...]] = [("memory per device", "MiB"), *((k, mib(n)) for k, n in given.items())]
    rows += [("temporaries: gradients, activations, fetched weights", mib(temporaries)), ("total", mib(total))]
    passes = 4 if (t.remat or "").lower() == "nothing_saveable" else 3
    flops = passes * flops_per_token(family, cfg, t.length // 2) * t.rows * t.length
    parts = [
        f"{family.MODEL_TYPE}, {params.count(family.spec(cfg)):,} parameters in {t.dtype}, {t.mesh} ({devices} devices), "
        f"{t.rows} x {t.length} tokens in {t.microbatches} microbatches, {t.optimizer}, remat {t.remat or 'none'}",
        render(rows) + ("" if memory is None else "\n" + verdict(total / 2**30, memory)),
        render([("largest arrays of a device", "MiB"), *((s, mib(shape_bytes(s))) for s in _largest(text))]),
        f"FLOPs per step: {flops:.4g}, per device {flops / devices:.4g}",
        render(traffic(collectives(text), mib)),
        *shared(family.spec(cfg), params.make_mesh(params.parse_mesh(t.mesh))),
    ]
    return "\n\n".join(parts)


def verdict(need: float, have: float, remedy: str = "divide more (fsdp, tp), or use remat or microbatches") -> str:
    """Say whether so many GiB fit, and what to change where they do not."""
    if need <= have:
        return f"fits in {have:g} GiB: {have - need:.1f} GiB are left"
    return f"does NOT fit in {have:g} GiB: {need - have:.1f} GiB too much; {remedy}"


def _largest(text: str, n: int = 5) -> list[str]:
    held = {s for s in re.findall(r" = (\w+\[[\d,]+\])", text)}
    return sorted(held, key=lambda s: (-shape_bytes(s), s))[:n]


def traffic(found: list[Collective], mib: Any, *, dtypes: bool = False) -> list[tuple[str, ...]]:
    """Tabulate collectives by kind and group size, and by `dtypes` if asked for."""
    calls, sent = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for c in found:
        kinds = ", ".join(sorted({s.partition("[")[0] for s in c.shapes})) if dtypes else ""
        key = f"{c.kind} {kinds}".rstrip(), c.devices
        calls[key] += c.count
        sent[key] += round(c.moved)
    rows: list[tuple[str, ...]] = [("sent per step and device", "calls", "MiB")]
    rows += [(f"{kind} among {n}", f"{calls[kind, n]:,}", mib(sent[kind, n])) for kind, n in sorted(calls)]
    return [*rows, ("total", f"{calls.total():,}", mib(sent.total()))]
