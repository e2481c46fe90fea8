"""What a run reports: rows in metrics.jsonl, TensorBoard, Weights & Biases, and the progress bar.

A row is a dict of numbers with "step" and, as TRL names them, "loss", "grad_norm", "learning_rate", "num_tokens",
"mean_token_accuracy", "rewards/margins", "eval_loss", "epoch". A writer is a context manager that gives `write(row)`.
"""

import contextlib
import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from fdel.train.steps import Batch, Metrics, Step, TrainState

Row = dict[str, Any]
Write = Callable[[Row], None]

log = logging.getLogger(__name__)

# Dense bfloat16 FLOP/s of one device, by the start of jax's `device_kind` (vendors' data sheets).
PEAK_FLOPS = MappingProxyType({
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12, "TPU v6e": 918e12,
})  # fmt: skip


def read(path: str | Path) -> list[Row]:
    """Read the rows of a run: a metrics.jsonl, or the directory that holds it. A half-written line is passed over."""
    path = Path(path)
    rows = []
    for line in (path / "metrics.jsonl" if path.is_dir() else path).read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def cut_back(path: Path, step: int) -> None:
    """Keep a JSONL file's whole rows up to `step`; it is made if it is not there."""
    rest = b"".join(_line(row) for row in (read(path) if path.exists() else []) if row["step"] <= step)
    part = path.with_name(path.name + ".part")
    part.write_bytes(rest)
    part.replace(path)


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


@contextlib.contextmanager
def jsonl(path: Path, step: int) -> Iterator[Write]:
    """Append rows to a JSONL file, cut back first to those up to `step`: steps that are run again appear once.

    What a full disk does not take is kept and written with a later row, or is an OSError at the end.
    """
    cut_back(path, step)
    unwritten = b""

    def write(row: Row) -> None:
        nonlocal unwritten
        unwritten += _line(row)
        try:
            flush()
        except OSError as e:
            log.warning("%s: %d bytes could not be written and will be tried again (%s)", path, len(unwritten), e)

    def flush() -> None:
        nonlocal unwritten
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]

    with path.open("ab", buffering=0) as file:
        yield write
        flush()


@contextlib.contextmanager
def tensorboard(directory: Path, step: int) -> Iterator[Write]:
    """Write scalars under `train/` and `eval/`; events after `step` of an earlier run are hidden."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as e:
        raise ImportError("report_to names tensorboard; install it: pip install tensorboardX") from e
    with SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1) as writer:

        def write(row: Row) -> None:
            for name, value in _tagged(row).items():
                writer.add_scalar(name, value, row["step"])

        yield write


@contextlib.contextmanager
def wandb(directory: Path, step: int) -> Iterator[Write]:
    """Log to Weights & Biases, in one run per directory: a run that is resumed goes on in the same plot."""
    try:
        import wandb as client
    except ImportError as e:
        raise ImportError("report_to names wandb; install it: pip install wandb") from e
    file = directory / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    run = client.init(id=file.read_text(), name=directory.resolve().name, dir=str(directory), resume="allow")
    run.define_metric("train/global_step")
    run.define_metric("*", step_metric="train/global_step", step_sync=True)
    try:
        yield lambda row: run.log(_tagged(row) | {"train/global_step": row["step"]})
    finally:
        run.finish()


def _tagged(row: Row) -> dict[str, float]:
    """Name a row's numbers as transformers' integrations do: train/loss, eval/loss."""
    name = lambda k: "eval/" + k.removeprefix("eval_") if k.startswith("eval_") else "train/" + k
    return {name(k): v for k, v in row.items() if k != "step" and isinstance(v, int | float)}


REPORTERS = MappingProxyType({"tensorboard": tensorboard, "wandb": wandb})


@contextlib.contextmanager
def rows(directory: str | Path | None, step: int, report_to: tuple[str, ...] = ()) -> Iterator[Write]:
    """Open every writer of a run that goes on after `step`; process 0 writes. An unknown reporter is a ValueError."""
    unknown = sorted(set(report_to) - set(REPORTERS))
    if unknown:
        raise ValueError(f"report_to names {unknown}; known are {', '.join(REPORTERS)}")
    if report_to and directory is None:
        raise ValueError(f"report_to={report_to} without a directory to write in")
    with contextlib.ExitStack() as stack:
        writers: list[Write] = []
        if directory is not None and jax.process_index() == 0:
            directory = Path(directory)
            directory.mkdir(parents=True, exist_ok=True)
            opened = jsonl(directory / "metrics.jsonl", step), *(REPORTERS[r](directory, step) for r in report_to)
            writers += map(stack.enter_context, opened)

        def write(row: Row) -> None:
            for writer in writers:
                writer(row)

        yield write


@contextlib.contextmanager
def bar(total: int | None, step: int, show: bool) -> Iterator[Callable[[Row], None]]:
    """Show the steps done and to come, and of each row the loss, the speed and the steps skipped."""
    shown = {"loss": "loss {:.4f}", "eval_loss": "eval {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
    shown |= {"mfu": "MFU {:.1%}", "nonfinite_steps": "{} not finite"}
    look: dict[str, Any] = dict(unit="step", desc="training", file=sys.stderr, mininterval=0.5)
    with tqdm(total=total, initial=step, disable=not show or jax.process_index() > 0, **look) as progress:

        def update(row: Row) -> None:
            text = ", ".join(form.format(row[k]) for k, form in shown.items() if row.get(k))
            progress.set_postfix_str(text, refresh=False)
            progress.update(row["step"] - progress.n)

        yield update


@dataclass
class Speed:
    """Tokens per second since the last reading; the first step, which compiles, does not count."""

    tokens: int = 0
    since: float = math.nan

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that has ended."""
        if math.isnan(self.since):
            self.restart()
        else:
            self.tokens += tokens

    def restart(self) -> None:
        """Begin to measure: what went before, such as an evaluation, was not training."""
        self.tokens, self.since = 0, time.perf_counter()

    def read(self, flops_per_token: float = 0) -> Row:
        """Give "tokens_per_second" on all devices and, for a device of known speed, "mfu"; then begin again."""
        if not self.tokens:
            return {}
        rate = self.tokens / (time.perf_counter() - self.since)
        self.restart()
        peak = peak_flops(jax.devices()[0].device_kind) * jax.device_count()
        known = {"mfu": rate * flops_per_token / peak} if peak and flops_per_token else {}
        return {"tokens_per_second": round(rate, 1), **known}


def peak_flops(device_kind: str) -> float:
    """Look up the dense bfloat16 FLOP/s of a device; 0 if it is not known."""
    names = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else 0.0


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Count the tokens of this process's batch that are not padding."""
    if "packed" in batch:
        return int(np.sum(np.asarray(batch["packed"].segment_ids) >= 0))
    return int(np.sum(batch["lengths"])) if "lengths" in batch else np.size(batch.get("tokens", ()))


def numbers(metrics: Mapping[str, Any]) -> Row:
    """Fetch a step's metrics from the device; float32 and bfloat16 keep their exact value as a Python float."""
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(dict(metrics)).items()}


def reporting(step: Step, **schedules: Callable[[Any], Any]) -> Step:
    """Add schedules to a step's metrics, at the step's own number: `reporting(step, learning_rate=rate)`."""

    def reported(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        new, values = step(state, batch, **given)
        return new, values | {name: rate(state.step) for name, rate in schedules.items()}

    return reported
