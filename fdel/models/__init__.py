"""Model families: one file per Hugging Face model_type, each with Config, spec, hidden, head, forward and state_spec."""

import difflib
import importlib
import json
import logging
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fdel import params as P
from fdel.models.config import ConfigError

log = logging.getLogger(__name__)
ALIASES = {"gemma3_text": "gemma3"}  # model_type -> file, where they differ
SHARED = ("builders", "config")  # files here that are not families


class Model(NamedTuple):
    """A family module, its Config and its params tree."""

    family: ModuleType
    cfg: Any
    params: Any


def families() -> list[str]:
    """Names of all families."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED)


def family(model_type: str) -> ModuleType:
    """Find the module of a model_type; an unknown one is a ConfigError that names the nearest."""
    name = ALIASES.get(model_type, model_type)
    if name not in families():
        near = difflib.get_close_matches(str(name), families(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(families())}"
        raise ConfigError(f"config field 'model_type': found {model_type!r}, which fdel does not have{hint}")
    return importlib.import_module(f"{__name__}.{name}")


def read_config(path: str | Path) -> tuple[ModuleType, Any]:
    """Read config.json of a checkpoint directory: (family module, Config)."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no config.json; expected a checkpoint directory in Hugging Face layout")
    d = json.loads(file.read_text())
    module = family(d.get("model_type", "(absent)"))
    return module, module.Config.from_hf(d)


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Mapping | None = None,
    stacked: bool = True,
    revision: str | None = None,
) -> Model:
    """Load a checkpoint from a directory or a Hub id (extra `hub`) in Hugging Face layout.

    dtype None keeps the checkpoint's. With a mesh, arrays go straight to their shards by `rules` (default `params.TRAIN`).
    stacked=False gives one tree per layer, which serving walks (see `params.unstack`).
    Raises ConfigError for a config and CheckpointError for tensors that do not fit; nothing is loaded then.
    """
    directory = P.resolve(path, revision=revision)
    module, cfg = read_config(directory)
    spec = module.spec(cfg) if stacked else P.unstack(module.spec(cfg))
    rules = P.TRAIN if rules is None else rules
    shardings = None if mesh is None else P.shardings(spec, mesh, rules)
    for line in () if mesh is None else P.shared(spec, mesh, rules):
        log.warning(line)
    rename = getattr(module, "rename", lambda name, cfg: name)
    known = {name for leaf in jax.tree.leaves(spec) for name in P.hf_names(leaf)}
    pick = lambda name: rename(name, cfg) if "lm_head.weight" in known or name != "lm_head.weight" else None
    ignore = (r"rotary_emb\.inv_freq$",)
    return Model(module, cfg, P.load(spec, directory, dtype=dtype, shardings=shardings, rename=pick, ignore=ignore))


def config_dict(family: ModuleType, cfg: Any) -> dict[str, Any]:
    """Write a Config as a complete config.json dict, model_type and architectures included."""
    return {"model_type": family.MODEL_TYPE, "architectures": [family.ARCHITECTURE]} | cfg.to_hf()


def save(model: Model, path: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
    """Save a model as a Hugging Face checkpoint: config.json and safetensors shards."""
    P.save(model.family.spec(model.cfg), model.params, path, shard_bytes=shard_bytes)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(model.params)}
    d = config_dict(model.family, model.cfg)
    d = {re.sub("^torch_dtype$", "dtype", k): v for k, v in d.items()} | (
        {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    )
    (Path(path) / "config.json").write_text(json.dumps(d, indent=2, sort_keys=True) + "\n")
