"""Ways to cut quantized products on a GPU of the Hopper kind: microseconds of the kernel alone, for each combination.

    python benchmarks/tilings.py --case "8 rows, GPTQ" "8 rows, MXFP4" --vary splits=1,2,4 ahead=1,3 [--lock FILE] [--dry]

Cases are those of kernels.py; what may vary are numbers in `quantized_arrays_gpu.Tiling`. The first row of a case is what
`quantized_matmul_gpu.tiling` chooses, which others are compared with. `--dry` compiles for an H100, and runs nothing.
"""

import argparse
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import HALF, Problem
from kernel_timing import Dry, abstract, by_kernel, copies, holding, repeated, timed
from kernels import cases, short

from fdel.kernels import quantized_matmul_gpu as kernel


def varied(case: Any, choices: dict[str, list[int]]) -> Iterator[tuple[str, Problem]]:
    """Give the case as it is cut, and cut in each other way: (what was changed, the call)."""
    whole = case.build(False)
    for numbers in [(), *itertools.product(*choices.values())]:
        changed = dict(zip(choices, numbers, strict=False))

        def run(x: Any, w: Any, changed: dict = changed) -> Any:
            return kernel.matmul(x, w, jnp.dtype(HALF), replace(kernel.tiling(x, w), **changed))

        yield " ".join(f"{k}={v}" for k, v in changed.items()) or "as chosen", replace(whole, run=run, others={})


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--case", nargs="+", required=True, help="names in the table of kernels.py")
    cli.add_argument("--vary", nargs="+", required=True, metavar="FIELD=N,N", help="numbers of a Tiling")
    cli.add_argument("--lock", type=Path, help="a file: of processes that share it one measures at a time")
    cli.add_argument("--dry", action="store_true", help="compile alone, without a GPU")
    args = cli.parse_args()
    choices = {k: [int(n) for n in v.split(",")] for k, _, v in (x.partition("=") for x in args.vary)}
    target, jobs = Dry() if args.dry else None, []
    for case in (c for c in cases() if c.name in args.case and c.op == "quantized_matmul"):
        for what, p in varied(case, choices):
            with ExitStack() as stack:
                if target:
                    target.enter(stack)
                inputs = jax.eval_shape(p.prepare, *abstract(p))
                sets = copies(p, inputs)
                count = 5 * sets
                lower = target.lower if target else lambda f, *given, **how: jax.jit(f, **how).lower(*given)
                try:
                    lowered = lower(repeated(p, count), [inputs] * sets, donate_argnums=0)
                except Exception as e:  # whatever a cut raises is its row
                    print(f"| {case.name} | {what} | {short(e)} |", flush=True)
                    continue
                jobs.append((case.name, what, p, sets, count, lowered))

    def compiled(job: tuple) -> Any:
        try:
            with holding(args.lock, False):
                return job[-1].compile()
        except Exception as e:
            return short(e)

    with ThreadPoolExecutor(8) as threads:
        programs = list(threads.map(compiled, jobs))
    print("| call | cut | in all, µs | each kernel, µs | differs |\n|---|---|---|---|---|", flush=True)
    first: dict[str, np.ndarray] = {}
    for (name, what, p, sets, count, _), program in zip(jobs, programs, strict=True):
        if isinstance(program, str) or args.dry:
            print(f"| {name} | {what} | {program if isinstance(program, str) else 'compiled'} |", flush=True)
            continue
        with holding(args.lock, True):
            inputs = [jax.jit(p.make)(jax.random.key(i)) for i in range(sets)]
            seconds, sample, inputs = timed(program, inputs, count)
            spent = by_kernel(program, inputs, count)
        off = np.abs(sample - first.setdefault(name, sample)).max() / np.abs(first[name]).max()
        each = ", ".join(f"{kind[:24]} {us:.2f}" for kind, us in list(spent.items())[:3])
        print(f"| {name} | {what} | {1e6 * seconds:.1f} | {each} | {off:.1e} |", flush=True)


if __name__ == "__main__":
    main()
