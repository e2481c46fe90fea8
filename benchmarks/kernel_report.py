"""The table of kernels.py, what it says of the machine, and torch's attention beside."""

import importlib.metadata
import importlib.util
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

UNITS = {"dot": "TFLOP/s of a product of 8,192^3, bfloat16", "copy": "TB/s of a copy of 1 GiB, read and written",
         "read": "TB/s of a sum over 1 GiB", "exp": "T exponentials/s, float32"}  # fmt: skip


class Row(NamedTuple):
    """One way of one case. `needs` are its FLOPs, bytes and exponentials; `sample` some numbers of its output; `spent` the
    microseconds of each kernel."""

    op: str
    call: str
    way: str
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    needs: Mapping[str, float] | None = None
    target: float | None = None
    temporaries: float | None = None  # MiB
    failed: str | None = None
    sample: list[float] | None = None
    spent: Mapping[str, float] | None = None


def fraction(row: Row, ceilings: Mapping[str, float]) -> tuple[float, str]:
    """Give the least time that the machine could take, as a part of the time taken, and what that is bound by."""
    floors = {kind: amount / ceilings[kind] for kind, amount in (row.needs or {}).items()}
    kind = max(floors, key=floors.__getitem__)
    return floors[kind] / (row.seconds or float("inf")), kind


def differs(row: Row, rows: Iterable[Row]) -> float | None:
    """How far some numbers of the whole call are from those of the reference, which is the last way of the case."""
    last = [r for r in rows if (r.op, r.call) == (row.op, row.call) and r.way in ("xla", "flash") and r.sample]
    if not row.sample or not last or last[-1] is row or len(last[-1].sample or ()) != len(row.sample):
        return None
    most = max(map(abs, last[-1].sample or ())) or 1
    return max(abs(a - b) for a, b in zip(row.sample, last[-1].sample or (), strict=True)) / most


def table(rows: Iterable[Row], ceilings: Mapping[str, float] | None) -> str:
    """Format all rows; without ceilings, what is known without a device."""
    rows = list(rows)
    lines = [
        "| operation | call | by | error (allowed) | ms | of the ceiling | target | temporaries, MiB |",
        "|---|" + "---|" * 7,
    ]
    for row in rows:
        off = "" if row.error is None else f"{row.error:.1e} ({row.tolerance:.0e})"
        if (far := differs(row, rows)) is not None:
            off += f", whole {far:.1e}" + (" DIFFERS" if not far <= 3 * (row.tolerance or 1) else "")
        time, part = row.failed or "not measured", ""
        if row.seconds is not None and ceilings:
            share, kind = fraction(row, ceilings)
            time, part = f"{1e3 * row.seconds:.4g}", f"{share:.2f} of {kind}" + (" IMPLAUSIBLE" if share > 1.1 else "")
        goal = "" if row.target is None else f"{row.target:.2f}"
        mib = "" if row.temporaries is None else f"{row.temporaries:,.1f}"
        lines.append(f"| `{row.op}` | {row.call} | {row.way} | {off} | {time} | {part} | {goal} | {mib} |")
    return "\n".join(lines)


def smi() -> str:
    """What the driver says: name, clocks, power, temperature; empty where there is none."""
    asked = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
                              capture_output=True, text=True, check=False, timeout=20)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def versions() -> str:
    """The date, Python and packages."""
    known = []
    for name in (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
        "nvidia-cudnn-cu12",
        "torch",
    ):
        try:
            known.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([time.strftime("%Y-%m-%d"), f"Python {platform.python_version()}", *known])


def page(rows: Iterable[Row], about: Mapping[str, Any], left: Iterable[str]) -> str:
    """Write the whole result: versions, ceilings first and last, the table, what was left out."""
    first, last = about.get("first"), about.get("last")
    parts = [", ".join(x for x in (about.get("versions"), about.get("device")) if x)]
    parts += [f"{when}: {about[when]}" for when in ("driver, first", "driver, last") if about.get(when)]
    best = None
    if first:
        best = {k: max(first[k], (last or first)[k]) for k in first}
        lines = ["| ceiling | first | last |", "|---|---|---|"]
        for kind, unit in UNITS.items():
            shown = ["" if x is None else f"{x[kind] / 1e12:.4g}" for x in (first, last)]
            lines.append(f"| {kind}: {unit} | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    rows = list(rows)
    parts.append(table(rows, best))
    for row in rows:
        if row.spent:
            each = ", ".join(f"{name[:60]} {us:.2f}" for name, us in row.spent.items())
            parts.append(f"- {row.op}, {row.call}, {row.way}: {each} microseconds")
    if left := list(left):
        parts.append("Not measured: " + "; ".join(left) + ".")
    return "\n\n".join(parts)


def torch_sees_a_gpu() -> bool:
    """Say whether torch is installed and has CUDA."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def torch_attention(about: tuple, backward: bool, device: str = "cuda", repeats: int = 20) -> float | None:
    """Seconds of torch's attention at a shape of `kernel_cases.ATTEND`; None if it cannot serve it."""
    import torch

    rows, t, n, kv, h, how, parts = about
    if parts > 1 or set(how) - {"causal"} or isinstance(h, tuple):
        return None
    draw = lambda heads: torch.randn(rows, heads, t, h, device=device, dtype=torch.bfloat16, requires_grad=backward)
    q, k, v = draw(n), draw(kv), draw(kv)
    options = dict(is_causal=how.get("causal", True), enable_gqa=n != kv)
    call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    if backward:
        y, forward = call(), call
        dy = torch.randn_like(y)
        call = lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)
        del forward
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    call(), wait()
    spent = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        spent.append((time.perf_counter() - begin) / repeats)
    return sorted(spent)[2]
