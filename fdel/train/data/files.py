"""Which files a data set has: paths, globs, folders in the Hub's layouts, URLs."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
INFO = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Source:
    """A data set on disk or behind a URL: what to read, and what its rows should look like.

    `files` are paths, globs, folders and URLs (through fsspec). A folder is one of the Hub: with a README that lists its
    files, written by `save_to_disk`, or with splits in the names of folders and files. `format` (json, jsonl, parquet,
    arrow, csv, text) is that of the suffix if None. `rename` maps a file's columns to fdel's. `transform` gets each row
    after that and returns it, changed or not, or None to leave it out; since a cache cannot look inside, it needs a
    `version` there. `weight` is the share of this source in a mixture; `rows` are the most that are read.
    """

    files: str | tuple[str, ...]
    format: str | None = None
    split: str = "train"
    rename: Mapping[str, str] = field(default_factory=dict)
    transform: Callable[[Row], Row | None] | None = None
    version: str = ""
    weight: float | None = None
    rows: int | None = None


@dataclass(frozen=True)
class File:
    """A local file, its name for people, and its format."""

    path: Path
    name: str
    format: str


def find(source: Source) -> list[File]:
    """List the files of a source in a fixed order; FileNotFoundError if a pattern finds none, ValueError for formats."""
    patterns = [source.files] if isinstance(source.files, str) else list(source.files)
    found = [
        pair for pattern in patterns for pair in (_remote(pattern) if "://" in pattern else _local(pattern, source))
    ]
    return [File(path, name, source.format or _format(name)) for path, name in found]


def _format(name: str) -> str:
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(
            f"{name}: the suffix {suffix!r} names no format; expected {', '.join(FORMATS)}, or set format="
        )
    return FORMATS[suffix]


def _local(pattern: str, source: Source) -> list[tuple[Path, str]]:
    path = Path(pattern)
    if path.is_dir():
        found = _folder(path, source.split)
    elif path.is_file():
        found = [path]
    else:
        base = Path(path.anchor)
        found = sorted(p for p in base.glob(str(path.relative_to(base))) if p.is_file())
    if not found:
        raise FileNotFoundError(f"{pattern} finds no file of the split {source.split!r}; check the path and split=")
    return [(p, str(p)) for p in found]


def _remote(url: str) -> list[tuple[Path, str]]:
    try:
        import fsspec
    except ImportError as e:
        raise ImportError(f"{url} needs fsspec and what it needs for this protocol: pip install fsspec") from e
    fs, pattern = fsspec.core.url_to_fs(url)
    names = [fs.unstrip_protocol(name) for name in sorted(fs.glob(pattern))]
    if not names:
        raise FileNotFoundError(f"{url} finds no file")
    return [(Path(fsspec.open_local(f"simplecache::{n}")), n) for n in names]


def _folder(folder: Path, split: str) -> list[Path]:
    """Find the files of a split in a folder of the Hub's layouts."""
    saved = next((f for f in (folder / split, folder) if (f / "state.json").is_file()), None)
    if saved:
        state = json.loads((saved / "state.json").read_text("utf-8"))
        return [saved / part["filename"] for part in state["_data_files"]]
    listed = _readme(folder, split)
    if listed:
        return sorted({p for pattern in listed for p in folder.glob(pattern) if p.is_file()})
    inside = {p: p.relative_to(folder).as_posix().lower() for p in sorted(folder.rglob("*")) if p.is_file()}
    known = lambda name: Path(name.removesuffix(".gz")).suffix in FORMATS and Path(name).name not in INFO
    files = [p for p, name in inside.items() if known(name) and not re.search(r"(^|/)(\.|__)", name)]
    named = lambda words: [p for p in files if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", inside[p])]
    if split in SPLITS and not any(named(words) for words in SPLITS.values()):
        return files if split == "train" else []
    return named(SPLITS.get(split, re.escape(split)))


def _readme(folder: Path, split: str) -> list[str]:
    """Read the patterns of a split from the head of README.md, that of the default configuration; [] if it lists none."""
    readme = folder / "README.md"
    head = re.match(r"---\n(.*?)\n---", readme.read_text("utf-8"), re.S) if readme.is_file() else None
    if not head or "data_files" not in head.group(1):
        return []
    try:
        import yaml
    except ImportError as e:
        raise ImportError(f"{readme} lists the files in YAML; install the extra: pip install 'fdel[data]'") from e
    configs = yaml.safe_load(head.group(1)).get("configs", [])
    chosen = next((c for c in configs if c.get("default") or c.get("config_name") == "default"), configs[0])
    files = chosen.get("data_files", [])
    if isinstance(files, dict):
        files = [{"split": k, "path": v} for k, v in files.items()]
    elif not any(isinstance(f, dict) for f in files):
        files = [{"split": "train", "path": files}]
    paths = [f["path"] for f in files if f["split"] == split]
    return [p for path in paths for p in ([path] if isinstance(path, str) else path)]
