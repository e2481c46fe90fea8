"""How kernels.py checks and times a case: programs that repeat a call, the ceilings, and a GPU that is not here."""

import fcntl
import hashlib
import importlib
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from kernel_cases import HALF, Case, Problem
from kernel_report import Row

from fdel import aot, ops, params
from fdel.ops import dispatch, platform

ELSEWHERE = ("ring", "splash", "short", "dense", "mosaic", "ragged")  # of several devices, of TPUs and CPUs, all scores
COLD = 2e8  # bytes that are read before any is read again: four times an H100's second-level cache
WARM, MOST, REPEATS = 0.02, 2000, 5  # seconds of a run, if the device were as fast as its data sheet; repetitions; runs
KINDS = ("dot", "copy", "read", "exp")


def ceiling(what: str, scale: float = 1.0) -> Problem:
    """What the machine can do at best: "dot", "copy", "read" or "exp"."""
    side, count = int(8192 * scale**0.5), int(2**28 * scale)

    def squares(key: jax.Array) -> tuple:
        return tuple(jax.random.normal(k, (side, side), jnp.float32).astype(HALF) for k in jax.random.split(key))

    def exponentials(x: Any) -> Any:
        for _ in range(64):
            x = jnp.exp2(-x)
        return x

    numbers = lambda key: (jax.random.uniform(key, (count,), jnp.float32),)
    few = lambda key: (jax.random.uniform(key, (count // 16,), jnp.float32),)
    return {
        "dot": Problem(squares, jnp.matmul, 2.0 * side**3, 6.0 * side**2),
        "copy": Problem(numbers, lambda x: x + 1, 0, 8.0 * count),
        "read": Problem(numbers, jnp.sum, 0, 4.0 * count),
        "exp": Problem(few, exponentials, 0, count / 2, exps=4.0 * count),
    }[what]


@contextmanager
def holding(lock: Path | None, alone: bool) -> Iterator[None]:
    """Hold a lock of several processes: to measure, `alone`; with others to compile, which tries programs on the device.

    Who asks waits for those before, so that compiling does not go on for ever while some wait to measure.
    """
    if lock is None:
        yield
        return
    with lock.open("a") as held, lock.with_name(lock.name + ".turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(turn, fcntl.LOCK_UN)
        yield


def floors(p: Problem) -> dict[str, float]:
    return {"dot": p.flops, "copy": p.bytes, "exp": p.exps}


def measured(scale: float = 1.0, kinds: Sequence[str] = KINDS) -> dict[str, float]:
    """Ceilings: FLOPs, bytes or exponentials in a second."""
    found = {}
    for what in kinds:
        p = ceiling(what, scale)
        count = repetitions(p, 1) if scale == 1 else 2
        program, sets = jax.jit(repeated(p, count), donate_argnums=0), [jax.jit(p.make)(jax.random.key(0))]
        found[what] = {"dot": p.flops, "exp": p.exps}.get(what, p.bytes) / timed(program, sets, count)[0]
    return found


def ways(case: Case) -> list[str]:
    """Implementations in the table of the operation that a GPU may have, the reference last.

    Those that are `ordered` have backward passes of their own alone.
    """
    names = (name for name in dispatch.TABLES[case.op].implementations if name not in ELSEWHERE)
    return [name for name in names if "ordered" not in name or case.name.endswith("backward")]


def named(case: Case, way: str) -> ExitStack:
    """Take an implementation of the table by its name; a peer takes none."""
    stack = ExitStack()
    if way in dispatch.TABLES[case.op].implementations:
        stack.enter_context(ops.use(**{case.op: way}))
    return stack


def copies(p: Problem, arrays: Any) -> int:
    """How many sets of inputs are taken in turn, so that none comes from a cache: one where products bound."""
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    if p.flops / 9.9e14 > p.bytes / 3.35e12 or held > 4e9:
        return 1
    return int(np.clip(-(-COLD // p.bytes), 1, 16))


def repetitions(p: Problem, sets: int) -> int:
    """As many as take 20 milliseconds at the data sheet's speeds, 20 at least, a multiple of the sets."""
    floor = max(p.bytes / 3.35e12, p.flops / 9.9e14, p.exps / 3.7e12)
    return sets * math.ceil(np.clip(WARM / floor, 20, MOST) / sets)


def repeated(p: Problem, count: int) -> Callable:
    """Give a program that calls `count` times, with each set in turn. The barrier makes each round's inputs depend on the
    round before, for the compiler; it costs nothing."""

    call = jax.jit(p.run)  # so that it is traced once

    def program(sets: list) -> tuple:
        each = lambda sets: [p.then(args, call(*args)) for args in sets]
        outputs = jax.eval_shape(lambda sets: [out for _, out in each(sets)], sets)

        def body(_: Any, carry: tuple) -> tuple:
            sets, found = zip(*each(carry[0]), strict=True)
            return jax.lax.optimization_barrier(([*sets], [*found]))

        begin = sets, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)
        return jax.lax.fori_loop(0, count // len(sets), body, begin)

    return program


@cache
def made() -> str:
    """Name what programs are made of: jax, and the text of this library and of the cases."""
    root = Path(__file__).parents[1]
    files = sorted(
        f for folder in ("fdel/kernels", "fdel/ops", "benchmarks", "tests/aot") for f in (root / folder).glob("*.py")
    )
    return f"{jax.__version__} {hashlib.sha256(b''.join(f.read_bytes() for f in files)).hexdigest()}"


def stored(file: Path) -> dict[str, Any]:
    """What a file says of programs that were compiled elsewhere; nothing where it is none, or was not finished."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(f: Callable, *args: Any) -> tuple[Callable, list]:
    """Give f of a list of all arrays, which gives such a list, and the list of `args`."""
    leaves, tree = jax.tree.flatten(args)
    return lambda leaves: jax.tree.leaves(f(*jax.tree.unflatten(tree, leaves))), leaves


def abstract(p: Problem) -> Any:
    return jax.eval_shape(lambda: p.make(jax.random.key(0)))


def float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in (HALF, jnp.float16) else x, tree)


def checked(p: Problem) -> Callable:
    """The small call: what it gives."""
    return lambda *arrays: p.run(*p.prepare(*arrays))


@cache
def expected(case: Case) -> tuple[tuple, list[np.ndarray]]:
    """Draw the inputs of the small problem and compute it by the reference in float32, on the CPU."""
    p, last = case.build(True), [*dispatch.TABLES[case.op].implementations][-1]
    with jax.default_device(jax.devices("cpu")[0]), platform.tracing_for("cpu"), named(case, last):
        arrays = jax.jit(p.make)(jax.random.key(0))
        out = jax.jit(checked(p))(*float32(arrays))
        return jax.tree.map(np.asarray, arrays), [np.asarray(x) for x in jax.tree.leaves(out)]


def on_cpu(case: Case, way: str) -> Row:
    """Check and time the small problem on this CPU, with what serves there: what a GPU is spared to find in the harness."""
    p = case.build(True)
    own = way in dispatch.TABLES[case.op].implementations
    p = p if own else p.others[way]
    _, want = expected(case)
    with platform.tracing_for("cpu"), named(case, way):
        arrays = jax.jit(p.make)(jax.random.key(0))
        off = error(jax.jit(checked(p))(*arrays), want)
        sets = [jax.jit(p.prepare)(*arrays)]
        seconds, sample, _ = timed(jax.jit(repeated(p, 2), donate_argnums=0), sets, 2)
    failed = None if off <= case.tolerance else "wrong, so not timed"
    some = [float(x) for x in sample[:256]]
    return Row(case.op, case.name, way, off, case.tolerance, seconds, floors(p), case.target, None, failed, some)


def error(got: Any, want: list[np.ndarray]) -> float:
    """The largest difference of an output, of its largest number; NaN or infinite where one is that should not be."""
    pairs = zip((np.asarray(x, np.float32) for x in jax.tree.leaves(got)), want, strict=True)
    return max(float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-9)) for a, b in pairs)


class Job:
    """One way of a case: its programs, lowered when it is made, compiled beside others, checked and timed one by one.

    Programs take a list of arrays and give one: so they can be compiled where there is no GPU, written to a `folder`, and
    loaded where there is one, which spares tracing and compiling there.
    """

    def __init__(self, case: Case, way: str, target: "Dry | None" = None, folder: Path | None = None) -> None:
        self.case, self.way = case, way
        self.path = folder and folder / re.sub(r"\W+", "_", f"{case.op} {case.name} {way}")
        self.lowered: list[Any] = []  # or nothing, if it was compiled elsewhere
        both = [case.build(small) for small in (True, False)]
        if way not in dispatch.TABLES[case.op].implementations:
            both = [p.others[way] for p in both]
        self.small, self.full = both
        with ExitStack() as stack:
            stack.enter_context(named(case, way))
            if target:
                target.enter(stack)
            lower = target.lower if target else lambda f, *args, **how: jax.jit(f, **how).lower(*args)
            if self.path and not target and stored(self.path.with_suffix(".json")).get("made") == made():
                return
            inputs = jax.eval_shape(self.full.prepare, *abstract(self.full))
            self.sets = copies(self.full, inputs)
            self.count = repetitions(self.full, self.sets)
            draw = lambda seed: self.full.prepare(*self.full.make(jax.random.key(seed)))
            calls = (
                (repeated(self.full, self.count), [inputs] * self.sets),
                (checked(self.small), *abstract(self.small)),
            )
            for f, *args in (*calls, (draw, jax.ShapeDtypeStruct((), jnp.uint32))):
                listed, leaves = flat(f, *args)
                self.lowered.append(lower(listed, leaves, donate_argnums=0 if f is calls[0][0] else ()))

    def compile(self) -> None:
        """Compile what was lowered, or load what was compiled elsewhere."""
        if self.lowered:
            self.compiled = [x.compile() for x in self.lowered]
            self.temporaries = self.compiled[0].memory_analysis().temp_size_in_bytes / 2**20  # MiB
            return
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # says where its functions are
        about = stored(self.path.with_suffix(".json"))
        self.sets, self.count, self.temporaries = (about[name] for name in ("sets", "count", "temporaries"))
        self.compiled, here = [], jax.devices()[:1]
        for i, (given, found) in enumerate(about["arrays"]):
            trees = jax.tree.structure((([0] * given,), {})), jax.tree.structure([0] * found)
            program = self.path.with_suffix(f".{i}").read_bytes()
            self.compiled.append(serialize_executable.deserialize_and_load(program, *trees, execution_devices=here))

    def save(self) -> None:
        """Write what was compiled for a GPU that is not here."""
        arrays = []
        for i, program in enumerate(self.compiled):
            written, given, found = serialize_executable.serialize(program)
            self.path.with_suffix(f".{i}").write_bytes(written)
            arrays.append((given.num_leaves, found.num_leaves))
        about = {name: getattr(self, name) for name in ("sets", "count", "temporaries")} | {
            "made": made(),
            "arrays": arrays,
        }
        self.path.with_suffix(".json").write_text(json.dumps(about))

    @property
    def loops(self) -> int:
        """Loops in the compiled program."""
        return self.compiled[0].as_text().count(" while(")

    def check(self) -> tuple[float, list[np.ndarray]]:
        """Compare with the reference: how far off it is, and what it gave."""
        arrays, want = expected(self.case)
        own = arrays if self.way in dispatch.TABLES[self.case.op].implementations else self._own()
        got = [np.asarray(x, np.float32) for x in self.compiled[1](jax.tree.leaves(jax.device_put(own)))]
        return error(got, want), got

    def _own(self) -> tuple:
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, jax.jit(self.small.make)(jax.random.key(0)))

    def time(self, profile: bool = False) -> tuple[float, np.ndarray, dict[str, float]]:
        """Seconds of a call, the median of several runs, some of the numbers of the first output, and `by_kernel`."""
        sets = [x for i in range(self.sets) for x in self.compiled[2]([np.uint32(i)])]
        many = len(sets)

        def program(sets: list) -> tuple[list, list]:
            found = self.compiled[0](sets)
            return found[:many], found[many:]

        seconds, sample, sets = timed(program, sets, self.count)
        return seconds, sample, by_kernel(program, sets, self.count) if profile else {}


def by_kernel(program: Callable, sets: list, count: int) -> dict[str, float]:
    """Microseconds of a call in each of the GPU's kernels, as CUPTI tells, the longest first."""
    spent: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(sets))
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if "GPU" in plane.name else ():
                    if line.name and line.name.startswith("Stream"):
                        for event in line.events:
                            spent[event.name] += event.duration_ns / 1e3 / count
    return dict(spent.most_common(8))


def timed(program: Callable, sets: list, count: int) -> tuple[float, np.ndarray, list]:
    """Run a program of `repeated`; fewer times if it takes long."""
    sets, out = jax.block_until_ready(program(sets))
    spent: list[float] = []
    while len(spent) < REPEATS and not (spent and sum(spent) > 1):
        begin = time.perf_counter()
        sets, out = jax.block_until_ready(program(sets))
        spent.append(time.perf_counter() - begin)
    first = jnp.ravel(jax.tree.leaves(out[0])[0])
    return float(np.median(spent)) / count, np.asarray(first[:: max(1, first.size // 4096)], np.float32), sets


class Dry:
    """Lowers for a GPU that is not here; compiles for an H100 where XLA:GPU's compiler is installed."""

    def __init__(self) -> None:
        self.target = aot.parse_target("h100:1x1x1")
        self.compiles = aot.missing(self.target) is None
        self.mesh = params.make_mesh({}, aot.devices(self.target)) if self.compiles else None

    def enter(self, stack: ExitStack) -> None:
        """Trace for that GPU."""
        stack.enter_context(platform.tracing_for("gpu"))
        if self.mesh is not None:
            stack.enter_context(jax.set_mesh(self.mesh))

    def lower(self, f: Callable, *args: Any, **how: Any) -> Any:
        """As `jax.jit(f, **how).lower(*args)`."""
        if self.mesh is not None:
            at = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), args)
        return jax.jit(f, **how).trace(*args).lower(lowering_platforms=("cuda",))
