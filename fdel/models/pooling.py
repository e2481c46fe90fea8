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
from fdel.params import files

MODES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {  # sentence-transformers' name and order, of [T D]
    "cls": ("cls_token", lambda x: x[0]),
    "max": ("max_tokens", lambda x: x.max(0)),
    "mean": ("mean_tokens", lambda x: x.mean(0)),
    "sqrt": ("mean_sqrt_len_tokens", lambda x: x.sum(0) / np.sqrt(len(x))),
    "weighted": ("weightedmean_tokens", lambda x: np.average(x, 0, np.arange(1, len(x) + 1))),
    "last": ("lasttoken", lambda x: x[-1]),
}
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of torch, as a Dense module's config.json has them
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
}
LONGEST = 2**20  # bytes of one of the files
UNBOUNDED = 10**9  # a tokenizer's length from which on it says that it knows none
SMALLEST = 1e-12  # vectors shorter than that are not stretched to length one


@dataclass(frozen=True, eq=False)
class Dense:
    """A layer behind the pooling, act(weight x + bias): float32 [outputs inputs] and [outputs], a key of `ACTIVATIONS`."""

    weight: Float[np.ndarray, "O I"]
    bias: Float[np.ndarray, " O"] | None = None
    act: str = "torch.nn.modules.activation.Tanh"

    def __call__(self, x: Float[np.ndarray, " I"]) -> Float[np.ndarray, " O"]:
        """Apply it to a vector."""
        y = self.weight @ x
        return ACTIVATIONS[self.act](y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class Pooling:
    """Keys of `MODES`, whose vectors are joined, put through `dense`, and scaled to length one if `normalize`.

    `length`: most tokens of a text. `prompt`: what is put in front of a text before it is tokenized.
    """

    modes: tuple[str, ...] = ("last",)
    normalize: bool = True
    length: int | None = None
    dense: tuple[Dense, ...] = ()
    prompt: str = ""

    def __post_init__(self) -> None:
        if not self.modes or not set(self.modes) <= MODES.keys():
            raise ValueError(f"pool={self.modes!r}; expected some of {', '.join(MODES)}")

    def __call__(self, x: Float[np.ndarray, "T D"]) -> Float[np.ndarray, " N"]:
        """Pool the hidden states of one text, float32."""
        pooled = np.concatenate([MODES[mode][1](x) for mode in self.modes]).astype(np.float32)
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled / max(float(np.linalg.norm(pooled)), SMALLEST) if self.normalize else pooled

    def width(self, embed: int) -> int:
        """Count the numbers of an embedding, of hidden states of `embed`. ValueError for dense layers of other sizes."""
        found = embed * len(self.modes)
        for layer in self.dense:
            if layer.weight.shape[1] != found:
                raise ValueError(
                    f"a Dense module takes {layer.weight.shape[1]} numbers, and what comes to it has {found}"
                )
            found = layer.weight.shape[0]
        return found


def default_pooling(model: Any) -> Pooling:
    """Take the last token, or the first one of an encoder, as it is."""
    return Pooling(("cls" if model.family.ARCHITECTURE.endswith("ForMaskedLM") else "last",), normalize=False)


def read(path: str | Path) -> Pooling | None:
    """Read modules.json, the pooling's config.json and sentence_bert_config.json of a directory; None where none is.

    A default prompt comes from config_sentence_transformers.json; a Dense module is read with its weights. ConfigError for
    modules other than these and Transformer and Normalize, for poolings that `MODES` lacks, and for what is not known here.
    """
    path = Path(path)
    if not (path / "modules.json").is_file():
        return None
    listed = _json(path / "modules.json")
    if not (isinstance(listed, list) and all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in listed)):
        raise ConfigError(f"{path}/modules.json: found {show(listed)}, expected a list of modules with their types")
    kinds = [m["type"].rpartition(".")[2] for m in listed]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        wanted = "Transformer, Pooling, maybe Dense, and maybe Normalize"
        raise ConfigError(f"{path}/modules.json: found {', '.join(kinds)}, expected {wanted}")
    folders = [str(m.get("path")) for m, kind in zip(listed, kinds, strict=True) if kind in ("Pooling", "Dense")]
    for folder in folders:
        if not re.fullmatch(r"\w+", folder):
            raise ConfigError(
                f"{path}/modules.json: found path {show(folder)}, expected the name of a folder beside it"
            )
    d = mapping("1_Pooling/config.json", _json(path / folders[0] / "config.json"))
    known = {theirs: ours for ours, (theirs, _) in MODES.items()}
    switched = {k.removeprefix("pooling_mode_") for k, v in d.items() if k.startswith("pooling_mode_") and v is True}
    asked = d.get("pooling_mode") or sorted(switched, key=lambda k: [*known, k].index(k))
    known |= {theirs.removesuffix("_token").removesuffix("_tokens"): ours for theirs, ours in known.items()}
    asked = [asked] if isinstance(asked, str) else asked
    if not asked or not isinstance(asked, list) or any(mode not in known for mode in map(str, asked)):
        raise ConfigError(f"{path}: pooling_mode {show(asked)}; expected some of {', '.join(known)}")
    prompt = _prompt(path)
    if prompt and d.get("include_prompt") is False:
        raise ConfigError(
            f"{path / folders[0]}/config.json: include_prompt false beside a default prompt is not known here"
        )
    layers = tuple(_dense(path / folder) for folder in folders[1:])
    return Pooling(tuple(known[mode] for mode in asked), kinds[-1] == "Normalize", _length(path), layers, prompt)


def _length(path: Path) -> int | None:
    """Read how many tokens a text may have: max_seq_length, else the tokenizer's model_max_length where it is one."""
    file = path / "sentence_bert_config.json"
    d = mapping(file.name, _json(file)) if file.is_file() else {}
    if d.get("do_lower_case"):
        raise ConfigError(f"{file}: do_lower_case: found true, which is not known here; lower texts' case before")
    length = d.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"{file}: max_seq_length: found {show(length)}, expected a whole number of at least 1")
    if length is None and (file := path / "tokenizer_config.json").is_file():
        most = mapping(file.name, _json(file)).get("model_max_length")
        length = most if type(most) is int and 0 < most < UNBOUNDED else None
    return length


def _prompt(path: Path) -> str:
    """Read the text that is put in front of all others: that of `prompts` which default_prompt_name names."""
    file = path / "config_sentence_transformers.json"
    d = mapping(file.name, _json(file)) if file.is_file() else {}
    name, prompts = d.get("default_prompt_name"), mapping("prompts", d.get("prompts") or {})
    if name is None:
        return ""
    if not isinstance(name, str) or not isinstance(prompts.get(name), str):
        found = f"default_prompt_name {show(name)} of the prompts {show(list(prompts))}"
        raise ConfigError(f"{file}: {found}, expected the name of a text there")
    return prompts[name]


def _dense(folder: Path) -> Dense:
    """Read a Dense module: its config.json and its tensors, linear.weight and maybe linear.bias."""
    d = mapping("config.json", _json(folder / "config.json"))
    act = d.get("activation_function", Dense.act)
    if act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{folder}/config.json: activation_function: found {show(act)}, expected one of {known}")
    for key in ("module_input_name", "module_output_name"):
        if d.get(key) not in (None, "sentence_embedding"):
            raise ConfigError(f"{folder}/config.json: {key}: found {show(d[key])}, expected sentence_embedding")
    found = {name: t.read().astype(np.float32) for name, t in files.tensors(folder).items()}
    shapes = {name: x.shape for name, x in found.items()}
    sizes = d.get("out_features"), d.get("in_features")
    wanted = {"linear.weight": sizes} | ({"linear.bias": sizes[:1]} if d.get("bias", True) else {})
    if shapes != wanted:
        raise ConfigError(f"{folder}: found the tensors {shapes}, expected {wanted}, as its config.json says")
    return Dense(found["linear.weight"], found.get("linear.bias"), act)


def write(pooling: Pooling, path: str | Path, embed: int) -> None:
    """Write these files beside a checkpoint whose hidden states have `embed` numbers."""
    path = Path(path)
    names = ["Transformer", "Pooling", *["Dense"] * len(pooling.dense), *["Normalize"] * pooling.normalize]
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
    said: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": embed, "include_prompt": True} | modes,
        "sentence_bert_config.json": {"max_seq_length": pooling.length, "do_lower_case": False},
    }
    if pooling.prompt:
        prompts = {"prompts": {"default": pooling.prompt}, "default_prompt_name": "default"}
        said["config_sentence_transformers.json"] = prompts
    for i, layer in enumerate(pooling.dense, 2):
        out, inputs = layer.weight.shape
        sizes = {"in_features": inputs, "out_features": out, "bias": layer.bias is not None}
        said[f"{i}_Dense/config.json"] = sizes | {"activation_function": layer.act}
        arrays = {"linear.weight": layer.weight} | ({} if layer.bias is None else {"linear.bias": layer.bias})
        arrays = {k: np.asarray(x, np.float32) for k, x in arrays.items()}
        (path / f"{i}_Dense").mkdir(parents=True, exist_ok=True)
        entries, to = {k: (x.shape, x.dtype) for k, x in arrays.items()}, path / f"{i}_Dense" / "model.safetensors"
        files.write_safetensors(to, entries, arrays.__getitem__, {"format": "pt"})
    for i, name in enumerate(names):
        (path / (f"{i}_{name}" if i else "")).mkdir(parents=True, exist_ok=True)
    for name, value in said.items():
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
