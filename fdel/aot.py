"""Compile for accelerators that are not here: the compilers of XLA:TPU and XLA:GPU run on any machine; nothing is executed.

TPUs need `pip install "jax[tpu]"`, GPUs `pip install "jax[cuda13]" absl-py`. What is read is what the compiler decided: the
bytes of a device, the collectives in the dtypes that they are sent in, and XLA:TPU's own estimate of the seconds.
"""

import importlib.util
import math
import re
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdel import params, plan
from fdel.ops import platform
from fdel.report import render

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A device: its platform, bytes of memory, bytes per second from it, and bfloat16 FLOPs per second (data sheets)."""

    platform: str
    memory: float
    bandwidth: float
    flops: float
    name: str = ""  # as the GPU's driver writes it


CHIPS = {
    "v5e": Chip("tpu", 16 * GIB, 0.819e12, 197e12),
    "v5p": Chip("tpu", 95 * GIB, 2.765e12, 459e12),
    "v6e": Chip("tpu", 32 * GIB, 1.64e12, 918e12),
    "h100": Chip("gpu", 84942979072, 3.352e12, 989e12, "NVIDIA H100 80GB HBM3"),
    "h200": Chip("gpu", 150754820096, 4.8e12, 989e12, "NVIDIA H200"),
}
NEEDS = {  # the module that shows that a compiler is there, and how to install it
    "tpu": ("libtpu", 'pip install "jax[tpu]"'),
    "gpu": ("jax_plugins.xla_cuda13", 'pip install "jax[cuda13]" absl-py'),
}
# What XLA:GPU asks a device for; compute capability 9.0 has the same limits in every product.
HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }} device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Target:
    """Devices that need not be here: a chip, and how many along each dimension of the machine."""

    chip: str
    shape: tuple[int, ...]

    @property
    def facts(self) -> Chip:
        """What one device is."""
        return CHIPS[self.chip]

    @property
    def count(self) -> int:
        """How many devices there are."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.shape))}"


def parse_target(text: str) -> Target:
    """Read "v5p:4x4x4" (chips of a TPU slice) or "h100:1x4x8" (slices x hosts x GPUs of a host); else a ValueError."""
    chip, _, shape = text.strip().lower().partition(":")
    sizes = shape.split("x")
    examples = "v5p:4x4x4, v6e:16x16 (chips of a slice) or h100:1x4x8 (slices x hosts x GPUs of a host)"
    expected = f"write CHIP:SHAPE, as {examples}"
    if chip not in CHIPS:
        raise ValueError(f"target {text!r}: the chip {chip!r} is unknown, known are {', '.join(CHIPS)}; {expected}")
    wanted = 3 if CHIPS[chip].platform == "gpu" else 2 if chip in ("v5e", "v6e") else 3
    if len(sizes) != wanted or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise ValueError(f"target {text!r}: found the shape {shape!r}, expected {wanted} sizes above 0; {expected}")
    return Target(chip, tuple(map(int, sizes)))


def missing(target: Target) -> str | None:
    """Say which packages a target needs that are not installed; None if it can be compiled for."""
    module, command = NEEDS[target.facts.platform]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package that the module would be in
        found = None
    return None if found else f"compiling for {target} needs {module.partition('.')[0]}: {command}"


def devices(target: Target) -> list[Any]:
    """Give the target's devices, to make meshes of; they can be compiled for and nothing else.

    A ValueError where packages are missing or there is no such machine.
    """
    if why := missing(target):
        raise ValueError(why)
    c, shape = target.facts, "x".join(map(str, target.shape))
    try:
        if c.platform == "gpu":
            about = HOPPER.format(bandwidth=round(c.bandwidth), memory=round(c.memory), name=c.name)
            found = topologies.get_topology_desc("", "cuda", target_config=about, topology=shape)
        else:
            one = {"chips_per_host_bounds": [1, 1, 1]} if target.count == 1 else {}
            found = topologies.get_topology_desc(str(target), "tpu", **one)
    except jax.errors.JaxRuntimeError as e:
        hint = "one process at a time compiles for TPUs" if "lockfile" in str(e) else "hosts have 2x2 chips, or 8 GPUs"
        raise ValueError(f"target {target} cannot be compiled for ({e}); {hint}") from None
    return list(found.devices)


@dataclass(frozen=True)
class Compiled:
    """A program as a compiler made it; bytes are of one device. `estimate` is the compiler's seconds, where it has some,
    of those operations that it has figures for; loops count once."""

    text: str
    seconds: float  # that compiling took
    arguments: int
    temporaries: int
    output: int  # beyond what takes the place of an argument
    flops: float | None
    estimate: float | None

    @property
    def loops(self) -> int:
        """Loops in the program."""
        return len(re.findall(r" while\(", self.text))


def measure(lowered: Any) -> Compiled:
    """Compile what was lowered (`jax.jit(f).lower(...)`). What does not fit a TPU is a MemoryError with its account."""
    start = time.perf_counter()
    try:
        done = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            raise MemoryError(str(e)) from None
        raise
    memory, cost = done.memory_analysis(), done.cost_analysis() or {}
    estimate = cost.get("optimal_seconds", 0)
    # XLA:TPU counts -1 for each operation without a figure: SparseCore's scatters.
    estimate -= min(0, math.floor(estimate))
    return Compiled(
        done.as_text(),
        time.perf_counter() - start,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        cost.get("flops"),
        estimate or None,
    )


def compile(target: Target, program: Any, *args: Any, mesh: Mesh, **static: Any) -> Compiled:
    """Compile a jitted function for a target, from shapes whose shardings are on the target's devices; see `measure`."""
    with jax.set_mesh(mesh), platform.tracing_for(target.facts.platform):
        backend = {"gpu": "cuda", "tpu": "tpu"}[target.facts.platform]
        lowered = program.trace(*args, **static).lower(lowering_platforms=(backend,))
    return measure(lowered)


def train_step(target: Target, family: ModuleType, cfg: Any, t: plan.Training) -> Compiled:
    """Compile the composed training step on the mesh `t.mesh` of the target's devices."""
    mesh = params.make_mesh(params.parse_mesh(t.mesh), devices(target))
    with platform.tracing_for(target.facts.platform):
        step, args, _ = plan.training_step(family, cfg, t, mesh)
    return compile(target, step, *args, mesh=mesh)


@dataclass(frozen=True)
class Serving:
    """What to plan: an engine with `rows` sequences of `length` tokens that decode, prompts `budget` tokens at a time."""

    mesh: str
    rows: int
    length: int
    budget: int = 512
    dtype: str = "bfloat16"
    format: str | None = None  # of quantized matrices: see `params.quantize`
    kv: str | None = None  # of pages: "int8" or "fp8"; None: `dtype`


def serving(target: Target, family: ModuleType, cfg: Any, s: Serving, name: str) -> tuple[Compiled, int]:
    """Compile the engine's program "decode" or "prefill" for a target: (program, bytes of the cache on all devices)."""
    from fdel.serve.engine import packing
    from fdel.serve.engine.device import BLOCK
    from fdel.serve.engine.step import PAGE, programs, quantized

    mesh = params.make_mesh(params.parse_mesh(s.mesh), devices(target))
    whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    with platform.tracing_for(target.facts.platform):
        spec = params.unstack(family.spec(cfg))
        weights = params.abstract(spec, jnp.dtype(s.dtype), params.shardings(spec, mesh, params.SERVE))
        if form := s.format:
            put = lambda w, at: jax.tree.map(lambda x, a: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=a), w, at)
            plain = params.abstract(spec, jnp.dtype(s.dtype))
            few = jax.eval_shape(lambda p: params.quantize(p, form, spec=spec), plain)
            weights = params.reshard(few, spec, mesh, params.SERVE, put)
        width = -(-s.length // PAGE)
        engine = programs(family, cfg, mesh, kv=s.kv)
        sizes = dict(rows=s.rows, length=width * PAGE, pages=s.rows * width, dtypes=(jnp.dtype(s.dtype),))
        state, rows = jax.eval_shape(lambda: engine.begin(**sizes))
        kept = family.state_spec(cfg, pages=s.rows * width, page=PAGE, rows=s.rows)
        at = params.shardings(params.spread(quantized(kept, s.kv), mesh), mesh, params.SERVE)
        state = jax.tree.map(lambda x, a: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=a), state, (at,))
    kind, blocks = (packing.Decode, s.rows) if name == "decode" else (packing.Extend, s.budget // BLOCK)
    ints = lambda *shape, dtype=np.int32: whole(jax.ShapeDtypeStruct(shape, dtype))
    tables = ints(*packing.plan_shape(kind, blocks, width)), ints(blocks, -(-cfg.vocab // 32), dtype=np.uint32)
    args = (params.laid(weights),), state, jax.tree.map(whole, rows), *tables
    static = dict(drafts=0, steps=1) if name == "decode" else dict(block=BLOCK)
    program = engine.decode if name == "decode" else engine.extend
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return compile(target, program, *args, mesh=mesh, **static), cache


def hand_over(
    target: Target, family: ModuleType, cfg: Any, trained: str, served: str, dtype: str = "bfloat16"
) -> Compiled:
    """Compile what an engine on the mesh `served` does with float32 weights of a trainer on `trained`: it cuts layers
    apart, casts them to `dtype`, and lays them out anew."""
    from fdel.serve.engine import views

    chips = devices(target)  # once: each call's are of a client of their own
    meshes = [params.make_mesh(params.parse_mesh(m), chips) for m in (trained, served)]
    with platform.tracing_for(target.facts.platform):
        spec = family.spec(cfg)
        given = params.abstract(spec, jnp.float32, params.shardings(spec, meshes[0], params.TRAIN))
        spec = params.unstack(spec)
        like = params.abstract(spec, jnp.dtype(dtype), params.shardings(spec, meshes[1], params.SERVE))
        arrays, where = views.cuts(jax.tree.leaves(views.layer_views(given)), jax.tree.leaves(params.laid(like)))
    return compile(target, views.copier(where), arrays, [], mesh=meshes[0])


ENGINE = "divide more (tp), fewer rows or a shorter length, weights or a cache in 8 bits, or a chip with more memory"
REMEDIES = {
    "train": "divide more (fsdp, tp), remat nothing_saveable, more microbatches, or more devices",
    "decode": ENGINE,
    "prefill": ENGINE,
}


def describe(target: Target, name: str, c: Compiled, memory: float | None = None) -> str:
    """Write what a compiler said about one program; `memory` is what a device has, in GiB."""
    gib = lambda n: f"{n / GIB:,.3f}"
    need = c.arguments + c.temporaries + c.output
    parts = {"arguments": c.arguments, "temporaries": c.temporaries, "output": c.output, "total": need}
    rows: list[tuple[str, ...]] = [(f"{name}: memory per device", "GiB"), *((k, gib(n)) for k, n in parts.items())]
    known = [f"compiled in {c.seconds:.0f} s", f"{c.loops} loops"]
    known += [f"{c.flops:.4g} FLOPs per device, loops counted once"] if c.flops else []
    known += [f"by the compiler's estimate {c.estimate * 1e3:.3g} ms"] if c.estimate else []
    sent = plan.traffic(plan.collectives(c.text, narrow=False), lambda n: f"{n / 2**20:,.2f}", dtypes=True)
    verdict = plan.verdict(need / GIB, memory or round(target.facts.memory / GIB, 1), REMEDIES[name])
    return "\n\n".join([render(rows) + "\n" + verdict, ", ".join(known), render(sent)])


def report(
    target: Target, family: ModuleType, cfg: Any, what: plan.Training | Serving, *, memory: float | None = None
) -> str:
    """Describe a training step, or an engine's decode and prefill, as the target's compiler makes it.

    `memory` is what a device has, in GiB, where that is not the chip's. Where the packages are missing, a training step is
    planned for virtual CPU devices and the report begins with the reason; serving is a ValueError then.
    """
    why = missing(target)
    if why and isinstance(what, plan.Training):
        memory = target.facts.memory / GIB if memory is None else memory
        note = "until then planned for virtual CPU devices, whose temporaries and dtypes of sums differ"
        return f"{why}; {note}\n\n{plan.report(family, cfg, what, memory=memory)}"
    head = (
        f"{family.MODEL_TYPE}, {params.count(family.spec(cfg)):,} parameters in {what.dtype}, {what.mesh} on {target}"
    )
    parts = [f"{head}, {what.rows} x {what.length} tokens"]
    for name in ("train",) if isinstance(what, plan.Training) else ("decode", "prefill"):
        try:
            if isinstance(what, plan.Training):
                c = train_step(target, family, cfg, what)
            else:
                c, _ = serving(target, family, cfg, what, name)
            parts.append(describe(target, name, c, memory))
        except MemoryError as e:
            account = re.search(r"Used \S+ of \S+ \w+", str(e))
            parts.append(f"{name}: does NOT fit ({account[0] if account else str(e)[:300]}); {REMEDIES[name]}")
    return "\n\n".join(parts)
