"""Each implementation of each operation on this GPU, in one run: first whether it is right, then how fast it is.

    python benchmarks/kernels.py [--only TEXT ...] [--ways NAME ...] [--minutes 8] [--out benchmarks/results/FILE.md]
        [--profile] [--wrong FOLDER] [--compiled FOLDER] [--dry]

Speeds are fractions of what this machine reaches in the same run, before and after: a product of matrices, a copy, a sum
over what is read, exponentials. A case (kernel_cases.py, recurrence_cases.py) is run by all implementations in the table
of its operation, under whatever names it has, and by peers: a product in bfloat16, `lax.ragged_dot`, and torch's
attention if torch finds the GPU. An implementation is compared at a small size with the reference in float32 on the CPU;
what is off, or raises, is not timed. Times are medians of runs of 20 repetitions or more inside of one program; weights
and pages that a cache could hold are several, taken in turn. The first case of each kind comes first, then those with a
target; what the minutes do not suffice for is listed. The work is done by processes that share the cases: while one
measures, none runs or compiles anything. What ends a process, or hangs, is a row, and the next one goes on.

`--dry` needs no GPU: every program is traced and lowered for one, and compiled where XLA:GPU's compiler is installed;
the small cases are run on the CPU by what serves there. With `--compiled FOLDER` it writes the compiled programs there, and
a run on a GPU with the same jax reads them instead of compiling: for our kernels. XLA tries its own programs on the device.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import ATTEND, LONGEST, PAGED, Case, attend, experts, grouped, paged, quantized
from kernel_report import Row, page, smi, torch_attention, torch_sees_a_gpu, versions
from kernel_timing import Dry, Job, expected, floors, holding, made, measured, on_cpu, stored, ways
from recurrence_cases import RULES, SERVED, delta, delta_served, scan, scan_served, ssd, ssd_served

from tests.aot import hopper_products, hopper_scans, hopper_ssd

QUIET = {"compile": 90, "run": 25, "wait": 90}  # seconds after which a worker that says nothing is ended
WORKERS = 3  # processes
LAST = 15  # seconds for what is measured at the end
BATCH, THREADS = 9, 5  # cases whose programs are compiled before any is timed, by so many threads
SMALL = 1 / 4096  # of a ceiling's size, in a dry run
Key = tuple[str, str, str]  # operation, call, implementation or peer


def cases() -> list[Case]:
    """All cases, in order: the first of each kind, those with a target, a second of each kind, the others."""
    found: list[tuple[int, Case]] = []

    def add(
        op: str, names: Any, build: Callable, tolerance: float, targets: Any = (), target: float = 0, to: str = ""
    ) -> None:
        for i, name in enumerate(names):
            goal = target if name in targets else None
            rank = 0 if i == 0 else 1 if goal else 2 + (i > 1)
            found.append((rank, Case(name + to, op, partial(build, name), tolerance, goal)))

    add("attend", ATTEND, lambda name, small: attend(name, False, small), 2e-2, LONGEST, 0.78)
    add("attend", ATTEND, lambda name, small: attend(name, True, small), 3e-2, LONGEST, 0.62, ", backward")
    add("paged_attention", PAGED, paged, 2e-2, [name for name in PAGED if "64 x 8,192" in name], 0.85)
    together = [name for name, row in hopper_products.GROUPED.items() if row[-1] in ("glu", "kept")]
    alone = [name for name in hopper_products.GROUPED if name not in together]
    add("grouped_matmul", alone, grouped, 2e-2, alone, 0.8)
    add("grouped_glu", together, grouped, 2e-2, together, 0.8)
    few = [name for name in hopper_products.QUANTIZED if name.startswith(("8 rows", "64 rows"))]
    add("quantized_matmul", hopper_products.QUANTIZED, quantized, 2e-2, few, 0.8)
    add("grouped_matmul", hopper_products.EXPERTS, experts, 2e-2)
    add("selective_scan", hopper_scans.SCANS, scan, 3e-2)
    add("ssd", hopper_ssd.CALLS, ssd, 3e-2)
    add("gated_delta_rule", hopper_products.DELTAS, delta, 4e-2)
    add("gated_delta_rule", [kind + decays for kind in SERVED for decays in RULES], delta_served, 4e-2)
    add("ssd", SERVED, ssd_served, 3e-2)
    add("selective_scan", SERVED, scan_served, 3e-2)
    return [case for _, case in sorted(found, key=lambda x: x[0])]


def keys(case: Case, only: Sequence[str] = ()) -> list[Key]:
    """All ways of a case, or some: those of the table, and peers."""
    found = (*ways(case), *case.build(True).others)
    return [(case.op, case.name, way) for way in found if not only or way in only]


def unknown_names(only: Sequence[str], some: Sequence[str]) -> str | None:
    """Say which texts are in no case's name, and which ways no case has; None if there are none."""
    found = cases()
    texts = [text for text in only if not any(text in f"{c.op}: {c.name}" for c in found)]
    if texts:
        return f"--only: no case has {', '.join(map(repr, texts))} in its operation or name"
    known = {"torch"} | {way for case in found for way in ways(case)}
    known |= set() if known >= set(some) else {key[2] for case in found for key in keys(case)}  # peers: takes seconds
    names = [name for name in some if name not in known]
    return f"--ways: no case has {', '.join(map(repr, names))}; known are {', '.join(sorted(known))}" if names else None


def short(e: BaseException) -> str:
    """One line of what was raised."""
    text = " ".join(str(e).split()).replace("|", "/")
    why = text.partition("cannot serve this call: ")[2].rpartition("; leave it out")[0]
    return (why or f"{type(e).__name__}: {text}")[:200]


def alive() -> bool:
    """Say whether the device still answers: an illegal access ends it for the process."""
    try:
        return int(jnp.ones(8).sum()) == 8
    except jax.errors.JaxRuntimeError:
        return False


def judged(job: Job, wrong: Path | None, profile: bool) -> Row:
    """Check a way of a case, and time it if it is right; what a wrong one gave is kept."""
    case, key = job.case, (job.case.op, job.case.name, job.way)
    off, got = job.check()
    if not off <= case.tolerance:
        if wrong:
            np.savez_compressed(wrong / (re.sub(r"\W+", "_", " ".join(key)) + ".npz"), *got)
        return Row(*key, off, case.tolerance, None, None, case.target, failed="wrong, so not timed")
    seconds, sample, spent = job.time(profile)
    needs, some = floors(job.full), [float(x) for x in sample[:256]]
    return Row(*key, off, case.tolerance, seconds, needs, case.target, job.temporaries, None, some, spent)


def work(chosen: Sequence[Case], done: set[Key], until: float, say: Callable[..., None], threads: int, lock: Path | None,
         only: Sequence[str] = (), wrong: Path | None = None, profile: bool = False,
         folder: Path | None = None) -> None:  # fmt: skip
    """Measure in batches, whose programs are compiled beside each other before any is timed."""
    batch = BATCH if threads > 1 else 1
    for some in (chosen[i : i + batch] for i in range(0, len(chosen), batch)):
        jobs: dict[Key, tuple[Job, Any]] = {}

        def compiled(job: Job) -> None:
            with holding(lock, False):
                job.compile()

        with ThreadPoolExecutor(threads) as pool:
            for case, key in ((c, key) for c in some for key in keys(c, only) if key not in done):
                if time.time() > until:
                    break
                say(at=key, doing="compile")
                try:
                    job = Job(case, key[2], folder=folder)
                    if case not in (j.case for j, _ in jobs.values()):
                        pool.submit(expected, case)
                    jobs[key] = job, pool.submit(compiled, job)
                    if threads == 1:  # so that what ends the process is known
                        wait([jobs[key][1]])
                except Exception as e:  # whatever a kernel raises is its row
                    say(row=Row(*key, target=case.target, failed=short(e)))
            for key, (_, future) in jobs.items():
                say(at=key, doing="compile")
                wait([future])
        say(at=next(iter(jobs), ("", "", "")), doing="wait")
        with holding(lock, True):
            for key, (job, future) in jobs.items():
                if time.time() > until:
                    return
                say(at=key, doing="run")
                try:
                    future.result()
                    say(row=judged(job, wrong, profile))
                except Exception as e:
                    say(row=Row(*key, target=job.case.target, failed=short(e)))
                    if not alive():
                        os._exit(3)  # what is left of the device may wait for ever
                job.compiled = []
            beside_torch([c for c in some if not only or "torch" in only], done, until, say)


def beside_torch(some: Sequence[Case], done: set[Key], until: float, say: Callable[..., None]) -> None:
    """Time torch's attention at the shapes of ours."""
    for case in some:
        key = (case.op, case.name, "torch")
        if case.op == "attend" and key not in done and time.time() < until and torch_sees_a_gpu():
            say(at=key, doing="run")
            name, _, backward = case.name.partition(", backward")
            seconds = torch_attention(ATTEND[name], case.name != name)
            if seconds is not None:
                say(row=Row(*key, seconds=seconds, needs=floors(case.build(False)), target=case.target))


def worker(
    log: Path,
    chosen: Sequence[Case],
    until: float,
    threads: int,
    scale: float = 1.0,
    ceilings: bool = True,
    lock: Path | None = None,
    **how: Any,
) -> None:
    """Measure ceilings and cases; what is found is written to the log line by line, so that nothing is lost."""
    before = events(log)
    done = {tuple(e["row"][:3]) for e in before if "row" in e}

    def say(**event: Any) -> None:
        with log.open("a") as f:
            f.write(json.dumps(event) + "\n")
        if row := event.get("row"):
            known = row.failed or f"{1e3 * row.seconds:.4g} ms, error {row.error}"
            print(time.strftime("%T"), " | ".join(row[:3]), known, file=sys.stderr, flush=True)

    if scale == 1.0 and jax.default_backend() != "gpu":
        say(device="no GPU: nothing is measured; --dry tries all but that")
        return
    if ceilings and not any("first" in e for e in before):
        say(at=("ceilings", "", ""), doing="compile")
        with holding(lock, True):
            say(**{"driver, first": smi()}, device=jax.devices()[0].device_kind)
            say(first=measured(scale))
    work(chosen, done, until, say, threads, lock, **how)
    say(at=("ceilings", "", ""), doing="wait")
    if ceilings:
        with holding(lock, True):
            say(last=measured(scale))
            say(**{"driver, last": smi()})


def events(log: Path) -> list[dict[str, Any]]:
    """Read a log; a line that was not finished is none."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def supervised(command: list[str], log: Path, until: float) -> None:
    """Run workers until one has done all there is, or its time is over. One that ends, or is silent for long, did so at
    what it last named."""
    threads = THREADS
    while True:
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(round(0.8 / WORKERS, 2))} | os.environ
        process = subprocess.Popen([*command, "--until", str(until), "--threads", str(threads)], env=memory)
        size, quiet, doing = -1, time.time(), "compile"
        while process.poll() is None:
            time.sleep(0.2)
            if (now := log.stat().st_size if log.exists() else 0) != size:
                size, quiet = now, time.time()
                doing = next((e["doing"] for e in reversed(events(log)) if "doing" in e), doing)
            if time.time() - quiet > QUIET[doing] or time.time() > until + LAST:
                process.kill()
                process.wait()
        found = events(log)
        at = next((e for e in reversed(found) if "at" in e), None)
        if process.returncode == 0 or at is None or at["at"][0] == "ceilings" or time.time() > until:
            if process.returncode:
                print(f"the worker ended with {process.returncode}; see above", file=sys.stderr)
            return
        if at["doing"] != "run" and threads > 1:
            threads = 1  # several compiled: the next worker does one at a time, and shows which it was
            continue
        if tuple(at["at"]) not in {tuple(e["row"][:3]) for e in found if "row" in e}:
            why = "did not end" if process.returncode == -9 else f"ended the process ({process.returncode})"
            with log.open("a") as f:
                f.write(json.dumps({"row": Row(*at["at"], failed=f"{why}, at {at['doing']}")}) + "\n")
        threads = THREADS


def dry(chosen: Sequence[Case], only: Sequence[str] = (), folder: Path | None = None) -> str:
    """Lower every case for a GPU, and run the small ones here: two tables. Compiled programs are written to a folder."""
    target, lowered, here = Dry(), [], []
    for case in chosen:
        for key in keys(case, only):
            row = Row(*key, target=case.target)
            try:
                job = Job(case, key[2], target, folder)
                state = f"lowered, {job.count} calls"
                if target.compiles:
                    job.compile()
                    if folder and "hopper" in key[2]:  # XLA's own it tries on the device
                        job.save()
                    state, row = (
                        f"compiled, {job.count} calls, {job.loops} loops",
                        row._replace(temporaries=job.temporaries),
                    )
                lowered.append(row._replace(failed=f"not measured: {state}"))
            except Exception as e:
                lowered.append(row._replace(failed=f"not measured: {short(e)}"))
            print(" | ".join(key), lowered[-1].failed, file=sys.stderr, flush=True)
            try:
                here.append(on_cpu(case, key[2]))
            except Exception as e:  # a row here, too; what does not serve a CPU is none
                if "cannot serve this call" not in str(e):
                    here.append(Row(*key, target=case.target, failed=short(e)))
    about = {"versions": versions(), "first": measured(SMALL), "device": "small shapes on this CPU: no measurement"}
    return page(lowered, {"versions": versions(), "device": "no GPU"}, ()) + "\n\n" + page(here, about, ())


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="*", default=[], help="cases whose operation or name has one of these texts")
    cli.add_argument("--ways", nargs="*", default=[], help="implementations and peers (default: all)")
    cli.add_argument("--profile", action="store_true", help="say how long each kernel of the GPU runs in a call")
    cli.add_argument("--lock", type=Path, help="a file: of processes that share it one measures at a time")
    cli.add_argument("--compiled", type=Path, help="a folder for compiled programs: written with --dry, else read")
    cli.add_argument("--wrong", type=Path, help="what wrong implementations gave at the small size is written here")
    cli.add_argument(
        "--minutes", type=float, default=8, help="what does not fit is listed as not measured (default: 8)"
    )
    cli.add_argument("--out", type=Path, help="also write the result here, as markdown")
    cli.add_argument("--dry", action="store_true", help="without a GPU: lower all programs, run small ones on the CPU")
    cli.add_argument("--until", type=float, help=argparse.SUPPRESS)
    cli.add_argument("--threads", type=int, default=8, help=argparse.SUPPRESS)
    cli.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    cli.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if not args.log:
        jax.config.update("jax_platforms", "cpu")  # the device's memory is the worker's
        if unknown := unknown_names(args.only, args.ways):
            cli.error(unknown)  # before a device's minutes go by
        parents = [file.parent for file in (args.lock, args.out) if file]
        for folder in (args.compiled if args.dry else None, args.wrong, *parents):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        read = args.compiled and not args.dry
        if read and not any(stored(file).get("made") == made() for file in args.compiled.glob("*.json")):
            print(
                f"{args.compiled} has no programs of this jax and these kernels: all are compiled here", file=sys.stderr
            )
    elif (platforms := jax.config.jax_platforms) and "cpu" not in platforms:
        jax.config.update("jax_platforms", f"{platforms},cpu")  # which computes what is right
    chosen = [c for c in cases() if not args.only or any(text in f"{c.op}: {c.name}" for text in args.only)]
    if args.log:
        how = dict(lock=args.lock, only=args.ways, wrong=args.wrong, profile=args.profile, ceilings=args.share == 0,
                   folder=args.compiled)  # fmt: skip
        worker(args.log, chosen[args.share :: WORKERS], args.until, args.threads, **how)
        return
    if args.dry:
        found = dry(chosen, args.ways, args.compiled)
    else:
        until = time.time() + 60 * args.minutes - LAST
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--only", *args.only, "--ways", *args.ways]
            command += ["--lock", str(args.lock or Path(folder) / "lock")]
            command += ["--wrong", str(args.wrong)] * bool(args.wrong) + ["--profile"] * args.profile
            command += ["--compiled", str(args.compiled)] * bool(args.compiled)
            logs = [Path(folder) / f"log{i}" for i in range(WORKERS)]
            with ThreadPoolExecutor() as pool:
                for i, log in enumerate(logs):
                    pool.submit(supervised, [*command, "--log", str(log), "--share", str(i)], log, until)
            said = [e for log in logs for e in events(log)]
        order = {key: i for i, key in enumerate((c.op, c.name) for c in chosen)}
        rows = sorted((Row(*e["row"]) for e in said if "row" in e), key=lambda row: order.get(row[:2], -1))
        about = {k: v for e in said for k, v in e.items()} | {"versions": versions()}
        known = {row[:3] for row in rows}
        left = [
            ": ".join(key[:2]) + f", {key[2]}" for case in chosen for key in keys(case, args.ways) if key not in known
        ]
        found = page(rows, about, left)
    print(found)
    if args.out:
        args.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
