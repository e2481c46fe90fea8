"""Model families: one file per Hugging Face model_type, each with Config, spec, hidden, head, forward and state_spec.

A family of your own is a module with these names, found as these are wherever fdel reads a config.json, once its package
says so: `[project.entry-points."fdel.models"]`, `model_type = "package.module"`. Or pass it: `load(path, family=module)`.
"""

import importlib
import json
import logging
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fdel import params as P
from fdel.models import classifier
from fdel.models.keys import ConfigError, dropouts, show, text_tensor

__all__ = [
    "ConfigError", "Model", "classifier", "config_dict", "dropouts", "families", "family", "load", "read_config", "save",
    "spec_of",
]  # fmt: skip

log = logging.getLogger(__name__)
ALIASES = {"gemma3_text": "gemma3"}  # model_type -> file, where they differ
SHARED = ("builders", "classifier", "config", "keys", "rope")  # files here that are not families
LONGEST = 16 * 2**20  # bytes of a config.json
MEMBERS = ("MODEL_TYPE", "ARCHITECTURE", "Config", "spec", "state_spec", "hidden", "head", "forward")


class Model(NamedTuple):
    """A family module, its Config and its params tree: of `family.spec`, or of a classifier (see `models.classifier`)."""

    family: ModuleType
    cfg: Any
    params: Any


def families() -> list[str]:
    """Names of all families of fdel itself."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED)


def family(model_type: str) -> ModuleType:
    """Find the module of a model_type: fdel's, or one that an installed package registers under "fdel.models".

    ConfigError for an unknown one, which lists all, and for a module that is no family.
    """
    if not isinstance(model_type, str):
        raise ConfigError(f"config field 'model_type': found {show(model_type)}, expected a string")
    name = ALIASES.get(model_type, model_type)
    if name in families():
        return importlib.import_module(f"{__name__}.{name}")
    registered = {e.name: e for e in entry_points(group="fdel.models")}
    if name in registered:
        return _complete(registered[name].load())
    known = ", ".join([*families(), *registered])
    raise ConfigError(
        f"config field 'model_type': found {show(model_type)}, not a family of this version; it has {known}"
    )


def _complete(module: Any) -> ModuleType:
    lacking = [name for name in MEMBERS if not hasattr(module, name)]
    if lacking:
        raise ConfigError(f"{getattr(module, '__name__', module)!r} is no model family: it lacks {', '.join(lacking)}")
    return module


def _read(path: str | Path, family_: ModuleType | None) -> tuple[ModuleType, Any, dict[str, Any]]:
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no config.json; expected a checkpoint directory in Hugging Face layout")
    try:
        if (size := file.stat().st_size) > LONGEST:
            raise ConfigError(f"found {size} bytes, expected at most {LONGEST}")
        d = json.loads(file.read_bytes())
        if not isinstance(d, dict):
            raise ConfigError(f"found {show(d)}, expected an object")
        module = family(d.get("model_type", "(absent)")) if family_ is None else _complete(family_)
        return module, module.Config.from_hf(d), d
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not JSON that can be read: {e}") from e


def read_config(path: str | Path, *, family: ModuleType | None = None) -> tuple[ModuleType, Any]:
    """Read config.json of a checkpoint directory: (family module, Config). ConfigError if fdel does not understand it."""
    return _read(path, family)[:2]


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Mapping | None = None,
    stacked: bool = True,
    revision: str | None = None,
    family: ModuleType | None = None,
) -> Model:
    """Load a checkpoint from a directory or a Hub id (extra `hub`) in Hugging Face layout.

    Of a file of several modalities the language model is loaded. A classifier or reward model has the params of
    `classifier.spec`. `family` is the module to use, whatever model_type says.

    dtype None keeps the checkpoint's. With a mesh, arrays go straight to their shards by `rules` (default `params.TRAIN`).
    stacked=False gives one tree per layer, which serving walks (see `params.unstack`).
    Raises ConfigError for a config and CheckpointError for tensors that do not fit; nothing is loaded then.
    """
    directory = P.resolve(path, revision=revision)
    module, cfg, d = _read(directory, family)
    labels = classifier.labels(d)
    spec = module.spec(cfg) if labels is None else classifier.spec(module, cfg, *labels)
    spec = spec if stacked else P.unstack(spec)
    rules = P.TRAIN if rules is None else rules
    shardings = None if mesh is None else P.shardings(spec, mesh, rules)
    for line in () if mesh is None else P.shared(spec, mesh, rules):
        log.warning(line)
    rename = getattr(module, "rename", lambda name, cfg: name)
    known = {name for leaf in jax.tree.leaves(spec) for name in P.hf_names(leaf)}

    def pick(name: str) -> str | None:
        """Give the spec's name of a file's tensor, or None for what is left out: other modalities, a tied head's copy."""
        ours = text_tensor(name) if "text_config" in d else name
        return None if ours is None or (ours == "lm_head.weight" and ours not in known) else rename(ours, cfg)

    ignore = (r"rotary_emb\.inv_freq$",)
    return Model(module, cfg, P.load(spec, directory, dtype=dtype, shardings=shardings, rename=pick, ignore=ignore))


def spec_of(model: Model) -> Any:
    """Declare the arrays of a model's params: `family.spec`, or those of a classifier; stacked."""
    if "score" not in model.params:
        return model.family.spec(model.cfg)
    return classifier.spec(model.family, model.cfg, len(model.params["score"]), "score_bias" in model.params)


def config_dict(family: ModuleType, cfg: Any) -> dict[str, Any]:
    """Write a Config as a complete config.json dict, model_type and architectures included."""
    return {"model_type": family.MODEL_TYPE, "architectures": [family.ARCHITECTURE]} | cfg.to_hf()


def save(model: Model, path: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
    """Save a model, or a classifier, as a Hugging Face checkpoint: config.json and safetensors shards.

    Several processes all call this, and the first writes what lies in several.
    """
    P.save(spec_of(model), model.params, path, shard_bytes=shard_bytes)
    if jax.process_index() > 0 and not all(x.is_fully_addressable for x in jax.tree.leaves(model.params)):
        return
    dtypes = {str(x.dtype) for x in jax.tree.leaves(model.params)}
    d = config_dict(model.family, model.cfg)
    if "score" in model.params:
        d = classifier.config_dict(d, model.family, len(model.params["score"]), "score_bias" in model.params)
    d = {"dtype" if k == "torch_dtype" else k: v for k, v in d.items()}
    d |= {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    (Path(path) / "config.json").write_text(json.dumps(d, indent=2, sort_keys=True) + "\n")
