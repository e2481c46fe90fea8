"""Which files a data set has: paths, globs, folders in the Hub's layouts, URLs; which of its rows are asked for."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
INFO = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
LONGEST = 4096  # characters of a path
SPLIT = re.compile(
    r"(?P<name>\w+(\.\w+)*)(\[((?P<start>-?\d+)(?P<start_pct>%)?)?:((?P<stop>-?\d+)(?P<stop_pct>%)?)?\])?"
    r"(\((?P<rounding>closest|pct1_dropremainder)\))?"
)


@dataclass(frozen=True)
class Source:
    """A data set on disk, behind a URL or in memory: what to read, and what its rows should look like.

    `files` are paths, globs, folders and URLs (through fsspec), or the rows themselves: a list of dicts, or a
    `datasets.Dataset`. A folder is one of the Hub: with a README that lists its files, written by `save_to_disk`, or with
    splits in the names of folders and files; it reads nothing outside of itself, and with `within`, neither do paths and
    globs read anything outside of that folder. `format` (json, jsonl, parquet, arrow, csv, text) is that of the suffix if
    None. `split` is that of `datasets`: "train", "train[:50%]", "train[10:20]"; files and rows have "train" alone. `rename`
    maps a file's columns to fdel's. `transform` gets each row after that and returns it, or None to leave it out; since a
    cache cannot look inside, it needs a `version` there. `weight` is the share of this source in a mixture;
    `rows` are the most that are read.
    """

    files: Any
    format: str | None = None
    split: str = "train"
    rename: Mapping[str, str] = field(default_factory=dict)
    transform: Callable[[Row], Row | None] | None = None
    version: str = ""
    weight: float | None = None
    rows: int | None = None
    within: Path | None = None


@dataclass(frozen=True, eq=False)
class File:
    """A local file, its name for people, and its format; or rows in memory."""

    path: Path
    name: str
    format: str
    rows: Any = None


def sources(given: Any) -> list[Source]:
    """List sources: one, several, or rows in memory."""
    several = isinstance(given, list | tuple) and given and all(isinstance(s, Source) for s in given)
    return list(given) if several else [given if isinstance(given, Source) else Source(given)]


def find(source: Source) -> list[File]:
    """List the files of a source in a fixed order.

    FileNotFoundError if a pattern finds none; ValueError for formats, splits, and what leads out of a folder.
    """
    name = _split(source.split)["name"]
    patterns = [source.files] if isinstance(source.files, str | Path) else source.files
    if not (isinstance(patterns, list | tuple) and all(isinstance(p, str | Path) for p in patterns)) or not patterns:
        _only_train(name, "rows in memory")
        return [File(Path(), "memory", "memory", patterns)]
    listed = (_remote(p, name) if "://" in p else _local(p, name, source.within) for p in map(str, patterns))
    return [File(path, shown, source.format or _format(shown)) for pairs in listed for path, shown in pairs]


def span(source: Source, total: int) -> range:
    """Number the rows that a source reads of all `total` of its files, as `datasets` slices a split."""
    m = _split(source.split)
    ends, percent = [m["start"], m["stop"]], bool(m["start_pct"] or m["stop_pct"])
    whole = m["rounding"] == "pct1_dropremainder"
    if percent and (any(abs(int(e or 0)) > 100 for e in ends) or (whole and total < 100)):
        found = f"split {source.split!r} of {total} rows"
        raise ValueError(f"{found}: expected percentages to 100, for pct1 of 100 rows or more")
    scale = lambda n: n * (total // 100) if whole else round(n * total / 100)
    cut = [None if e is None else scale(int(e)) if percent else int(e) for e in ends]
    rows = range(total)[slice(*cut)]
    return rows if source.rows is None else rows[: source.rows]


def sliced(source: Source) -> bool:
    """Whether the rows that a source reads depend on how many there are in all its files."""
    return "[" in source.split


def _split(split: str) -> re.Match:
    found = SPLIT.fullmatch(split)
    if found is None:
        expected = "a name and a slice at the most, as train, train[:50%] or train[10:20]"
        raise ValueError(f"split {split!r}: expected {expected}")
    return found


def _only_train(split: str, what: str) -> None:
    if split != "train":
        known = f"{what} have the split 'train' alone, as in `datasets`"
        raise ValueError(f"split {split!r}: {known}; name a folder for others")


def _format(name: str) -> str:
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{name}: the suffix {suffix!r} names no format; expected {known}, or set format=")
    return FORMATS[suffix]


def _local(pattern: str, split: str, within: Path | None) -> list[tuple[Path, str]]:
    path = Path(pattern)
    if path.is_dir():
        found = inside(path, _folder(path, split))
    else:
        _only_train(split, "files")
        base = Path(path.anchor)
        found = [path] if path.is_file() else sorted(base.glob(str(path.relative_to(base))))
    found = [p for p in (found if within is None else inside(within, found)) if p.is_file()]
    if not found:
        raise FileNotFoundError(f"{pattern} finds no file of the split {split!r}; check the path and the split")
    return [(p, str(p)) for p in found]


def inside(folder: Path, found: Iterable[Path]) -> list[Path]:
    """Give the paths back; ValueError if one leads out of the folder, or out of the Hub's cache that it is a part of."""
    root, found = folder.resolve(), list(found)
    roots = [root, *(p.parents[1] / "blobs" for p in (root, *root.parents) if p.parent.name == "snapshots")]
    for path in found:
        real = path.resolve()
        if not any(real.is_relative_to(r) for r in roots):
            raise ValueError(f"{path} leads to {real}, outside of the data set {folder}; copy the file into it")
    return found


def located(it: str, name: str, folder: Path | None) -> Path:
    """Give the path of a file below the folder of a row's own; `it` says what it is. ValueError for what is none."""
    if "://" in name or name.startswith("data:"):
        raise ValueError(f"{it} {name!r:.80}: nothing is fetched; put the {it} beside the rows' file, or into the row")
    if folder is None:
        raise ValueError(f"{it} {name!r:.80}: these rows lie in no folder; give the {it} itself")
    if "\0" in name or len(name) > LONGEST:
        raise ValueError(f"{it} {name!r:.80}: expected a path without null bytes, of at most {LONGEST:,} characters")
    path = folder.absolute() / name
    inside(folder, [path])
    try:
        there = path.is_file()
    except OSError as e:
        raise ValueError(f"{it} {name!r:.80}: {e.strerror}") from e
    if not there:
        raise ValueError(f"{it} {name!r:.80}: there is no such file below {folder}")
    return path


def _remote(url: str, split: str) -> list[tuple[Path, str]]:
    _only_train(split, "files")
    try:
        import fsspec
    except ImportError as e:
        raise ImportError(f"{url} needs fsspec and what it needs for this protocol: pip install fsspec") from e
    fs, pattern = fsspec.core.url_to_fs(url)
    names = [fs.unstrip_protocol(name) for name in sorted(fs.glob(pattern))]
    if not names:
        raise FileNotFoundError(f"{url} finds no file")
    return [(Path(fsspec.open_local(f"simplecache::{n}")), n) for n in names]


def _folder(folder: Path, split: str) -> Sequence[Path]:
    """Find the files of a split in a folder of the Hub's layouts."""
    saved = next((f for f in (folder / split, folder) if (f / "state.json").is_file()), None)
    if saved:

        def files_of_state(said: str) -> list[Path]:
            state = json.loads(said)
            files = [saved / str(part["filename"]) for part in state["_data_files"]]
            return files if saved != folder or split in ("train", state.get("_split")) else []

        return _read(inside(folder, [saved / "state.json"])[0], files_of_state)
    if patterns := _readme(folder, split):
        return sorted({p for pattern in patterns for p in folder.glob(pattern)})
    found = {p: p.relative_to(folder).as_posix().lower() for p in sorted(folder.rglob("*")) if p.is_file()}
    known = lambda name: Path(name.removesuffix(".gz")).suffix in FORMATS and Path(name).name not in INFO
    files = [p for p, name in found.items() if known(name) and not re.search(r"(^|/)(\.|__)", name)]
    named = lambda words: [p for p in files if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", found[p])]
    if split in SPLITS and not any(named(words) for words in SPLITS.values()):
        return files if split == "train" else []
    return named(SPLITS.get(split, re.escape(split)))


def _read(file: Path, read: Callable[[str], Any]) -> Any:
    """Read what a file of a folder says about the others; ValueError if it is not what it should be."""
    try:
        return read(file.read_text("utf-8"))
    except (LookupError, TypeError, AttributeError, ValueError, NotImplementedError, RecursionError) as e:
        raise ValueError(f"{file} does not list a data set's files: {type(e).__name__}: {e}") from e


def _readme(folder: Path, split: str) -> list[str]:
    """Read the patterns of a split from the head of README.md, that of the default configuration; [] if it lists none."""
    readme = folder / "README.md"
    head = _read(readme, lambda t: re.match(r"---\n(.*?)\n---", t, re.S)) if readme.is_file() else None
    if not head or "data_files" not in head.group(1):
        return []
    try:
        import yaml
    except ImportError as e:
        raise ImportError(f"{readme} lists the files in YAML; install the extra: pip install 'fdel[data]'") from e

    def listed(_: str) -> list[str]:
        try:
            configs = yaml.safe_load(head.group(1)).get("configs", [])
        except yaml.YAMLError as e:
            raise ValueError(str(e)) from e
        chosen = next((c for c in configs if c.get("default") or c.get("config_name") == "default"), configs[0])
        files = chosen.get("data_files", [])
        if isinstance(files, dict):
            files = [{"split": k, "path": v} for k, v in files.items()]
        elif not any(isinstance(f, dict) for f in files):
            files = [{"split": "train", "path": files}]
        paths = [f["path"] for f in files if f["split"] == split]
        found = [p for path in paths for p in ([path] if isinstance(path, str) else path)]
        if absolute := [p for p in found if Path(p).is_absolute()]:
            raise ValueError(f"{absolute[0]} is absolute; expected paths inside of the folder")
        return found

    return _read(readme, listed)
