"""`fdel plot`: the curves of runs, as a self-contained HTML page and as a PNG (extra `plot`)."""

import contextlib
import html
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdel.train import metrics

COLOURS = ("#1764ab", "#d1495b", "#2e8b57", "#e09f3e", "#6a4c93", "#00798c", "#8d6a4a", "#5c677d")
SAMPLED = ("reward", "eval_reward", "completions/mean_length", "kl", "objective/kl", "entropy", "clip_ratio/region_mean",
           "cispo_clip_ratio", "frac_reward_zero_std")  # fmt: skip
FIRST = ("loss", "eval_loss", "mean_token_accuracy", "rewards/margins", "rewards/accuracies", "grad_norm",
         "learning_rate", "tokens_per_second")  # fmt: skip

ROWS, LETTERS = 64, 4000  # of a table of completions, and of one text there
MOST = 2000  # points of a curve: three times as many as the image has pixels

Points = list[tuple[float, float]]
Curves = dict[str, dict[str, Points]]  # by metric, then by run


def read(runs: Sequence[Path], names: Sequence[str] = ()) -> Curves:
    """Read the curves of runs (directories, or metrics.jsonl files): of all metrics, or of those that are named.

    A run is called by its directory, by its whole path if two have the same name.
    The best-known ones come first, in runs that learn from samples those of samples. Numbers that are not finite are gaps.
    A name that no run has is a ValueError.
    """
    curves: Curves = {}
    for run, label in zip(runs, labels(runs), strict=True):
        for row in metrics.read(run):
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                    curves.setdefault(name, {}).setdefault(label, []).append((row["step"], value))
    if missing := sorted(set(names) - set(curves)):
        raise ValueError(f"no run has {', '.join(missing)}; there are {', '.join(sorted(curves)) or 'no rows at all'}")
    first = (*SAMPLED, *FIRST) if "reward" in curves else FIRST
    order = names or sorted(curves, key=lambda n: (first.index(n) if n in first else len(first), n))
    return {name: curves[name] for name in order}


def labels(runs: Sequence[Path]) -> list[str]:
    """Name runs by their directories, by whole paths where two have the same name."""
    names = [(run.parent if run.suffix else run).resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Choose round numbers from low to high: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    distance = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= count)
    return [i * distance for i in range(math.ceil(low / distance), math.floor(high / distance) + 1)]


def svg(title: str, runs: Mapping[str, Points], colours: Mapping[str, str] | None = None) -> str:
    """Draw one curve per run as an SVG image that needs nothing else."""
    width, height, left, top, right, bottom = 640, 320, 64, 36, 16, 32
    colours = colours or dict(zip(runs, COLOURS * len(runs), strict=False))
    xs, ys = zip(*(point for points in runs.values() for point in points), strict=True)
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    x = lambda v: left + (width - left - right) * (v - x0) / ((x1 - x0) or 1)
    y = lambda v: height - bottom - (height - top - bottom) * (v - y0) / ((y1 - y0) or 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{html.escape(title)}</text>',
    ]
    for v in ticks(y0, y1):
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>')
    for v in ticks(x0, x1, 8):
        parts.append(f'<text x="{x(v):.1f}" y="{height - 12}" text-anchor="middle">{v:g}</text>')
    for name, points in runs.items():
        shown = points[:: math.ceil(len(points) / MOST)]
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in shown)
        parts.append(f'<polyline fill="none" stroke="{colours[name]}" stroke-width="1.5" points="{line}"/>')
    return "\n".join(parts) + "</svg>\n"


def completions(run: Path) -> list[dict[str, Any]]:
    """Read the samples of the last step that a run has shown, from completions.jsonl beside metrics.jsonl."""
    file = (run.parent if run.suffix else run) / "completions.jsonl"
    rows: list[Any] = []
    if file.is_file():
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in deque(lines, ROWS):
                with contextlib.suppress(ValueError, RecursionError):  # the last one may be half written
                    rows.append(json.loads(line))
    rows = [row for row in rows if isinstance(row, dict)]
    return [row for row in rows if row.get("step") == rows[-1].get("step")]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write samples with their rewards as an HTML table."""
    names = list(dict.fromkeys(n for row in rows for n in _rewards(row)))
    number = lambda x: f"{x:.4g}" if isinstance(x, int | float) else ""
    said = lambda row, key: html.escape(str(row.get(key, ""))[:LETTERS])
    head = "".join(f"<th>{html.escape(n)}</th>" for n in ("reward", *names, "finish", "prompt", "completion"))
    body = "".join(
        f"<tr>{''.join(f'<td>{number(x)}</td>' for x in (row.get('reward'), *map(_rewards(row).get, names)))}"
        + "".join(f'<td class="said">{said(row, key)}</td>' for key in ("finish", "prompt", "completion"))
        + "</tr>"
        for row in rows
    )
    step = f"step {html.escape(str(rows[0]['step'])[:20])}" if "step" in rows[0] else "the last ones"
    return f"<h2>Completions, {step}</h2><table><tr>{head}</tr>{body}</table>"


def _rewards(row: Mapping[str, Any]) -> Mapping[str, Any]:
    found = row.get("rewards")
    return found if isinstance(found, dict) else {}


def page(curves: Curves, samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> str:
    """Write the HTML report: every metric's curves, and its last, lowest and highest number in each run.

    Below them stand the `samples` of runs, by the name of the run.
    """
    runs = list(dict.fromkeys(run for by_run in curves.values() for run in by_run))
    colours = dict(zip(runs, COLOURS * len(runs), strict=False))
    legend = "".join(f'<li style="color:{colours[run]}">{html.escape(run)}</li>' for run in runs)
    sections = []
    for name, by_run in curves.items():
        rows = "".join(
            f"<tr><td>{html.escape(run)}</td><td>{points[-1][0]}</td><td>{points[-1][1]:.6g}</td>"
            f"<td>{min(v for _, v in points):.6g}</td><td>{max(v for _, v in points):.6g}</td></tr>"
            for run, points in by_run.items()
        )
        head = "<tr><th>run</th><th>step</th><th>last</th><th>lowest</th><th>highest</th></tr>"
        sections.append(f"<section>{svg(name, by_run, colours)}<table>{head}{rows}</table></section>")
    style = (
        "body{font-family:sans-serif;margin:2em}main{display:grid;gap:2em;"
        "grid-template-columns:repeat(auto-fill,minmax(420px,1fr))}td,th{padding:2px 10px;text-align:right}"
        "td:first-child,th:first-child{text-align:left}.said{white-space:pre-wrap;text-align:left;vertical-align:top}"
    )
    told = "".join(f"<section><h1>{html.escape(run)}</h1>{table(x)}</section>" for run, x in (samples or {}).items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(", ".join(runs))}</title>'
        f"<style>{style}</style></head><body><ul>{legend}</ul><main>{''.join(sections)}</main>{told}</body></html>\n"
    )


def png(curves: Curves, path: Path) -> None:
    """Draw all curves in one PNG. Needs matplotlib, the extra `plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a PNG needs matplotlib: pip install 'fdel[plot]'; the HTML report does not") from e
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    colours = dict(zip(dict.fromkeys(r for c in curves.values() for r in c), COLOURS * 99, strict=False))
    for axes, (name, by_run) in zip(grid.flat, curves.items(), strict=False):
        for run, points in by_run.items():
            axes.plot(*zip(*points, strict=True), label=run, color=colours[run], linewidth=1.2)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(curves) :]:
        axes.remove()
    grid.flat[0].legend()
    figure.savefig(path, dpi=120)


def main(runs: Sequence[Path], out: Path, names: Sequence[str] = ()) -> list[Path]:
    """Write `out`.html and `out`.png, or only the one whose suffix `out` has; return what was written."""
    curves = read(runs, names)
    if not curves:
        raise ValueError(f"no rows in {', '.join(map(str, runs))}; is it a directory with metrics.jsonl?")
    paths = [out] if out.suffix in (".html", ".png") else [Path(f"{out}.html"), Path(f"{out}.png")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            png(curves, path)
        else:
            found = {label: x for run, label in zip(runs, labels(runs), strict=True) if (x := completions(run))}
            path.write_text(page(curves, found), "utf-8")
    return paths
