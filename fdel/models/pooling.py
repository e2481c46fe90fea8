"""How hidden states become a text's embedding: sentence-transformers' files beside a checkpoint, read and written.

https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from fdel.models.keys import ConfigError, mapping, show

MODES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {  # sentence-transformers' name and order, of [T D]
    "cls": ("cls_token", lambda x: x[0]),
    "max": ("max_tokens", lambda x: x.max(0)),
    "mean": ("mean_tokens", lambda x: x.mean(0)),
    "sqrt": ("mean_sqrt_len_tokens", lambda x: x.sum(0) / np.sqrt(len(x))),
    "weighted": ("weightedmean_tokens", lambda x: np.average(x, 0, np.arange(1, len(x) + 1))),
    "last": ("lasttoken", lambda x: x[-1]),
}
LONGEST = 2**20  # bytes of one of the files
SMALLEST = 1e-12  # vectors shorter than that are not stretched to length one


@dataclass(frozen=True)
class Pooling:
    """Keys of `MODES`, whose vectors are joined, scaled to length one if `normalize`; `length`: most tokens of a text."""

    modes: tuple[str, ...] = ("last",)
    normalize: bool = True
    length: int | None = None

    def __post_init__(self) -> None:
        if not self.modes or not set(self.modes) <= MODES.keys():
            raise ValueError(f"pool={self.modes!r}; expected some of {', '.join(MODES)}")

    def __call__(self, x: Float[np.ndarray, "T D"]) -> Float[np.ndarray, " N"]:
        """Pool the hidden states of one text, float32."""
        pooled = np.concatenate([MODES[mode][1](x) for mode in self.modes]).astype(np.float32)
        return pooled / max(float(np.linalg.norm(pooled)), SMALLEST) if self.normalize else pooled


def default_pooling(model: Any) -> Pooling:
    """Take the last token, or the first one of an encoder, as it is."""
    return Pooling(("cls" if model.family.ARCHITECTURE.endswith("ForMaskedLM") else "last",), normalize=False)


def read(path: str | Path) -> Pooling | None:
    """Read modules.json, the pooling's config.json and sentence_bert_config.json of a directory; None where none is.

    ConfigError for modules other than Transformer, Pooling and Normalize, and for poolings that `MODES` lacks.
    """
    path = Path(path)
    if not (path / "modules.json").is_file():
        return None
    listed = _json(path / "modules.json")
    if not (isinstance(listed, list) and all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in listed)):
        raise ConfigError(f"{path}/modules.json: found {show(listed)}, expected a list of modules with their types")
    kinds = [m["type"].rpartition(".")[2] for m in listed]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{path}/modules.json: found {', '.join(kinds)}, expected Transformer, Pooling and maybe Normalize"
        )
    if not re.fullmatch(r"\w+", folder := str(listed[1].get("path"))):
        raise ConfigError(f"{path}/modules.json: found path {show(folder)}, expected the name of a folder beside it")
    d = mapping("1_Pooling/config.json", _json(path / folder / "config.json"))
    known = {theirs: ours for ours, (theirs, _) in MODES.items()}
    switched = {k.removeprefix("pooling_mode_") for k, v in d.items() if k.startswith("pooling_mode_") and v is True}
    asked = d.get("pooling_mode") or sorted(switched, key=lambda k: [*known, k].index(k))
    known |= {theirs.removesuffix("_token").removesuffix("_tokens"): ours for theirs, ours in known.items()}
    asked = [asked] if isinstance(asked, str) else asked
    if not asked or not isinstance(asked, list) or any(mode not in known for mode in map(str, asked)):
        raise ConfigError(f"{path}: pooling_mode {show(asked)}; expected some of {', '.join(known)}")
    file = path / "sentence_bert_config.json"
    length = mapping(file.name, _json(file)).get("max_seq_length") if file.is_file() else None
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"{file}: max_seq_length: found {show(length)}, expected a whole number of at least 1")
    return Pooling(tuple(known[mode] for mode in asked), len(kinds) == 3, length)


def write(pooling: Pooling, path: str | Path, embed: int) -> None:
    """Write these files beside a checkpoint whose hidden states have `embed` numbers."""
    path = Path(path)
    names = ["Transformer", "Pooling", "Normalize"][: 3 if pooling.normalize else 2]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    modes: dict[str, Any] = {f"pooling_mode_{theirs}": ours in pooling.modes for ours, (theirs, _) in MODES.items()}
    if list(pooling.modes) != [m for m in MODES if m in pooling.modes]:  # only newer versions have another order
        newer = lambda name: (
            name if name.startswith("mean_sqrt") else name.removesuffix("_token").removesuffix("_tokens")
        )
        modes = {"pooling_mode": [newer(MODES[m][0]) for m in pooling.modes]}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": embed, "include_prompt": True} | modes,
        "sentence_bert_config.json": {"max_seq_length": pooling.length, "do_lower_case": False},
    }
    for i, name in enumerate(names):
        (path / (f"{i}_{name}" if i else "")).mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name).write_text(json.dumps(value, indent=2) + "\n")


def _json(file: Path) -> Any:
    try:
        with file.open("rb") as f:
            raw = f.read(LONGEST + 1)
        if len(raw) > LONGEST:
            raise ValueError(f"more than {LONGEST} bytes")
        return json.loads(raw)
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{file}: is not JSON that can be read: {e}") from e
