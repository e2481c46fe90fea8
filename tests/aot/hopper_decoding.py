"""What a warp group's instructions make of bytes in few bits: PTX of `decode_gpu` alone, carried out here.

Below Pallas' types (`words_gpu`) no interpreter follows, so `run` does, for 128 threads and instructions without branches,
as PTX ISA 9.0 says (9.7). `python -m tests.aot.hopper_decoding`, with `MOSAIC_GPU_DUMP_PTX=1` set, prints it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import mosaic_gpu as gpu
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, params
from fdel.kernels import transfer_gpu
from fdel.kernels.decode_gpu import FORMATS, codes_of, decoded, scales_of
from fdel.kernels.words_gpu import WORD
from fdel.ops.weights import PACKED
from tests.ops.codes import BYTES, CODES

SCALES = {"scales, fp8": CODES["fp8"], "scales, exponent": np.array([0, *2.0 ** np.arange(-126.0, 128), np.nan])}
SHAPE = (64, 32)  # bytes of a warp group
THREADS = 128
SAME = {"fp4": "e2m1"}  # programs: their tables are read from memory
WHOLE = {
    "int8": BYTES.view(np.int8).astype(np.float64), "uint8": BYTES.astype(np.float64),
    "uint4": np.arange(16.0), "int4": np.arange(16.0) - 8,
}  # fmt: skip


def lower(format: str) -> None:
    """Compile a program that stores what it decodes [64 halves*32], or scales, four in a word, as float32 [4 64]."""
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))

    def numbers(raw: Any, *refs: Any) -> None:
        codes = [refs[0][i] for i in range(refs[0].shape[0])] if refs[1:] else []
        some = transfer_gpu.load(raw, layout=gpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        transfer_gpu.store(refs[-1], decoded(gpu.layout_cast(some, gpu.Layout.WGMMA), format, None, codes, False))

    def scales(words: Any, out: Any) -> None:
        some = transfer_gpu.load(words, layout=gpu.Layout.WGMMA.reduce(1), optimized=False)
        for i, x in enumerate(scales_of([some], format.removeprefix("scales, "), False)):
            transfer_gpu.store(out.at[i], x.astype(jnp.float32))

    many, codes = SHAPE[1] * (2 if format in PACKED else 1), None
    out, raw = (
        jax.ShapeDtypeStruct((SHAPE[0], many), jnp.bfloat16),
        (SHAPE, jnp.int8 if "int8" in format else jnp.uint8),
    )
    if format in SCALES:
        out, raw = jax.ShapeDtypeStruct((WORD, SHAPE[0]), jnp.float32), (SHAPE[:1], jnp.uint32)
    else:
        codes = codes_of(format)
    how = gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane)
    program = scales if format in SCALES else numbers
    kernel = gpu.kernel(program, out_type=out, grid=(1,), grid_names=("one",), compiler_params=how)
    call = lambda raw: kernel(raw, *([] if codes is None else [jnp.asarray(codes)]))
    put = jax.ShapeDtypeStruct(*raw, sharding=NamedSharding(mesh, PartitionSpec()))
    aot.compile(target, jax.jit(call), put, mesh=mesh)


def run(ptx: str, given: list[np.ndarray], size: int) -> np.ndarray:
    """Carry out a kernel: `size` bytes of its last argument. An instruction that is not known is a ValueError."""
    memory, starts = np.zeros(0, np.uint8), []
    for a in (*given, np.zeros(size, np.uint8)):
        memory = np.concatenate([memory, np.zeros(-len(memory) % 256, np.uint8)])
        starts.append(len(memory))
        memory = np.concatenate([memory, np.frombuffer(a.tobytes(), np.uint8)])
    threads = np.arange(THREADS)
    values: dict[str, np.ndarray] = {"%tid.x": threads.astype(np.uint64)}
    body = re.sub(r"\.loc[^\n]*|//[^\n]*|\.reg[^\n]*;", "", ptx[ptx.index("$L__func_begin0") : ptx.index("ret;")])
    lines = re.sub(r"\$L\w+:|^\s*[{}]\s*$", "", body, flags=re.MULTILINE).split(";")
    for line in filter(None, map(str.strip, lines)):
        op, _, rest = line.partition(" ")
        name = op if op.startswith("cvt.rn") else ".".join(op.split(".")[:2])
        fields = [x.strip() for x in re.split(r",(?![^{[]*[}\]])", rest)]
        if name in ("bar.sync", "fence.mbarrier_init", "elect.sync", "shfl.sync") and "bfly" not in op:
            continue  # nothing is divided between warps but by their numbers
        if name == "ld.param":
            values[fields[0]] = np.full(THREADS, starts[int(fields[1].rstrip("]").rpartition("_")[2])], np.uint64)
        elif name.startswith(("ld.", "st.")):
            where, what = (fields[1], fields[0]) if name.startswith("ld.") else fields
            base, _, offset = where.strip("[]").partition("+")
            at, size = values[base].astype(np.int64) + int(offset or 0), int(op[-2:]) // 8
            kind = np.dtype(f"uint{8 * size}")
            for i, register in enumerate(what.strip("{}").split(",")):
                bytes_of = at[:, None] + size * i + np.arange(size)
                if name.startswith("ld."):
                    values[register.strip()] = memory[bytes_of].copy().view(kind)[:, 0].astype(np.uint64)
                else:
                    memory[bytes_of] = values[register.strip()].astype(kind)[:, None].view(np.uint8)
        elif fields[0].startswith("{"):
            low, high = (x.strip() for x in fields[0].strip("{}").split(","))
            values[low], values[high] = values[fields[1]] & 0xFFFF, values[fields[1]] >> 16
        elif fields[1].startswith("{"):
            low, high = (values.get(x.strip(), values["%tid.x"] * 0) for x in fields[1].strip("{}").split(","))
            values[fields[0]] = low | high << 16  # a part that nothing was put into may be anything
        else:
            args = [values[x] if x in values else np.full(THREADS, int(x, 0) % 2**32, np.uint64) for x in fields[1:]]
            values[fields[0]] = _result(op, name, args)
    return memory[starts[-1] :]


def _result(op: str, name: str, x: list[np.ndarray]) -> np.ndarray:
    word = lambda a: a.astype(np.uint32)
    if name == "prmt.b32":
        pool = np.stack([x[i] >> 8 * j & 255 for i in (0, 1) for j in range(4)])
        which = np.stack([x[2] >> 4 * i & 15 for i in range(4)])
        byte = np.take_along_axis(pool, (which & 7).astype(int), 0)
        byte = np.where(which & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint64)
        return np.bitwise_or.reduce(byte << np.arange(0, 32, 8, dtype=np.uint64)[:, None])
    if name in ("add.bf16x2", "sub.bf16x2"):
        a, b = (word(y).view(ml_dtypes.bfloat16) for y in x)
        return (a + b if name.startswith("add") else a - b).view(np.uint32).astype(np.uint64)
    if name.startswith("cvt.rn.f16x2"):
        kind = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}[name.rpartition(".")[2]]
        return x[0].astype(np.uint16).view(kind).astype(np.float16).view(np.uint32).astype(np.uint64)
    if name in ("cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"):
        *high, low = (word(y).view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint64) for y in x)
        return high[0] << 16 | low if high else low
    narrow = ml_dtypes.bfloat16 if op.endswith("bf16") else np.float16
    simple = {
        "mov.b32": lambda: x[0], "mov.u32": lambda: x[0], "cvta.to": lambda: x[0], "and.b32": lambda: x[0] & x[1],
        "or.b32": lambda: x[0] | x[1], "xor.b16": lambda: (x[0] ^ x[1]) & 0xFFFF, "shr.u32": lambda: x[0] >> x[1],
        "shl.b32": lambda: x[0] << x[1] & 0xFFFFFFFF, "bfe.u32": lambda: x[0] >> x[1] & (1 << x[2]) - 1,
        "mul.wide": lambda: x[0] * x[1], "add.s64": lambda: x[0] + x[1], "setp.ne": lambda: (x[0] != x[1]) + 0,
        "selp.b32": lambda: np.where(x[2], x[0], x[1]), "cvt.u16": lambda: x[0] & 0xFFFF,
        "cvt.f32": lambda: x[0].astype(np.uint16).view(narrow).astype(np.float32).view(np.uint32),
        "shfl.sync": lambda: x[0][np.arange(THREADS) ^ int(x[1][0])],
    }  # fmt: skip
    if name not in simple:
        raise ValueError(f"{op}: an instruction that `run` does not know")
    return simple[name]().astype(np.uint64)


def texts() -> dict[str, str]:
    """Compile all formats in a process, and give the PTX of each; of two with the same PTX it is printed once."""
    command, root = [sys.executable, "-m", "tests.aot.hopper_decoding"], Path(__file__).parents[2]
    how: Any = {"env": os.environ | {"MOSAIC_GPU_DUMP_PTX": "1"}, "cwd": root, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=600, **how)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    parts = [part.partition("\n") for part in done.stdout.split("call: ")[1:]]
    found = {name: ptx for name, _, ptx in parts if ".entry" in ptx}
    return {name: found.get(name, found[SAME.get(name, name)]) for name, *_ in parts}


def errors(format: str, ptx: str) -> np.ndarray:
    """Decode every byte, in some order: relative differences from what codes stand for, but for NaN and infinities."""
    if format in SCALES:
        raw = np.random.default_rng(0).permutation(BYTES).reshape(SHAPE[0], WORD)
        got, want = run(ptx, [raw], 4 * raw.size).view(np.float32).reshape(WORD, -1), SCALES[format][raw.T]
        return _off(got, want)
    raw = np.random.default_rng(0).permutation(np.tile(BYTES, 8)).reshape(SHAPE)
    codes, packed, values = codes_of(format), format in PACKED, (CODES | WHOLE)[format]
    given = [raw] if codes is None else [codes, raw]  # in the order in which the kernel reads them
    got = run(ptx, given, (1 + packed) * 2 * raw.size).view(ml_dtypes.bfloat16).reshape(SHAPE[0], -1)
    want = values[np.concatenate([raw >> 4, raw & 15], 1) if packed else raw]
    return _off(got.astype(np.float64) * FORMATS[format].factor, want)


def _off(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    got, want = (x[np.isfinite(want)] for x in (got, want))
    return np.abs(got - want) / np.where(want == 0, 1, np.abs(want))


if __name__ == "__main__":
    for format in sys.argv[1:] or [*FORMATS, *SCALES]:
        print("call:", format, flush=True)
        lower(format)
