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
from fdel.gguf import find
from fdel.models import heads, pooling, protocol
from fdel.models.keys import ConfigError, dropouts, quantization, show, text_tensor
from fdel.params import gguf
from fdel.params.files import scan
from fdel.params.hf import opened
from fdel.params.mesh import shared

__all__ = [
    "ConfigError", "Model", "config_dict", "dropouts", "families", "family", "heads", "load", "of_config", "pooling",
    "protocol", "read_config", "save", "spec_of",
]  # fmt: skip

log = logging.getLogger(__name__)
ALIASES = {  # model_type -> file, where they differ
    "gptj": "gpt_j",
    "grok-1": "grok_1",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
}
SHARED = (
    "builders",
    "config",
    "heads",
    "keys",
    "pooling",
    "protocol",
    "rope",
    "sight",
    "sublayers",
    "whisper_classes",
)  # files here that are not families
HEARS = ("whisper",)  # families of functions of their own: what goes in is a sound
SEES = ("clip", "pixtral", "siglip")  # or an image
SPEAKS = ("code2wav", "qwen3_omni_talker")  # or a frame of sound: parts of a checkpoint
SCORES = ("clip", "siglip")  # of those, families that score images and texts
LONGEST = 16 * 2**20  # bytes of a config.json


class Model(NamedTuple):
    """A family module, its Config and its params tree: of `family.spec`, or with a head (see `models.heads`)."""

    family: ModuleType
    cfg: Any
    params: Any

    def __repr__(self) -> str:
        return f"Model({getattr(self.family, '__name__', self.family)}, {self.cfg},\n{P.pformat(self.params)})"


def families() -> list[str]:
    """Names of all families of fdel itself.
    >>> "llama" in models.families()
    True
    """
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in (*SHARED, *HEARS, *SEES, *SPEAKS))


def family(model_type: str) -> ModuleType:
    """Find the module of a model_type: fdel's, or one that an installed package registers under "fdel.models".

    ConfigError for an unknown one, which lists all, and for a module that is no family.
    >>> models.family("gptj").__name__
    'fdel.models.gpt_j'
    """
    if not isinstance(model_type, str):
        raise ConfigError(f"config field 'model_type': found {show(model_type)}, expected a string")
    name = ALIASES.get(model_type, model_type)
    if name in families():
        return importlib.import_module(f"{__name__}.{name}")
    registered = {e.name: e for e in entry_points(group="fdel.models")}
    if name in registered:
        return protocol.check(registered[name].load())
    if name in HEARS:
        use = f"load it with models.load(path, family=fdel.models.{name}), or serve it with `fdel serve`"
        raise ConfigError(f"config field 'model_type': found {name!r}, which writes down sounds; {use}")
    if name in SPEAKS:
        use = f"load it of a whole checkpoint with models.load(path, family=fdel.models.{name})"
        raise ConfigError(f"config field 'model_type': found {name!r}, a part that speaks; {use}")
    if name in SEES:
        use = f"load it with models.load(path, family=fdel.models.{name})"
        use += ", or serve it with `fdel serve`" if name in SCORES else ""
        raise ConfigError(f"config field 'model_type': found {name!r}, which writes no text; {use}")
    found = f"found {show(model_type)}, not a family of this version"
    raise ConfigError(f"config field 'model_type': {found}; it has {', '.join([*families(), *registered])}")


def of_config(d: Mapping[str, Any]) -> ModuleType:
    """Find the module of a config.json: of a file without a vision_config, where there is one, that of the language model.

    >>> models.of_config({"model_type": "qwen3_5", "text_config": {}}).__name__
    'fdel.models.qwen3_5_text'
    """
    name = d.get("model_type", "(absent)")
    alone = isinstance(name, str) and not d.get("vision_config") and f"{name}_text" in families()
    return family(f"{name}_text" if alone else name)


def hearing(path: str | Path) -> ModuleType | None:
    """Give the family of a checkpoint directory if it writes down sounds (`HEARS`), for `load`; else None."""
    return None if labelling(path) else _one_of(path, HEARS)


def labelling(path: str | Path) -> ModuleType | None:
    """Give the module of a checkpoint directory if it names the classes of sounds, for `load`; else None."""
    module = importlib.import_module(f"{__name__}.whisper_classes")
    return module if _one_of(path, HEARS) and module.ARCHITECTURE in (_dict(path).get("architectures") or ()) else None


def scoring(path: str | Path) -> ModuleType | None:
    """Give the family of a checkpoint directory if it scores images and texts (`SCORES`), for `load`; else None."""
    return _one_of(path, SCORES)


def _one_of(path: str | Path, names: tuple[str, ...]) -> ModuleType | None:
    name = _dict(path).get("model_type")
    return importlib.import_module(f"{__name__}.{name}") if name in names else None


def _dict(path: str | Path) -> dict[str, Any]:
    """Read config.json; empty where there is none that can be one."""
    file = Path(path) / "config.json"
    if not file.is_file() or file.stat().st_size > LONGEST:
        return {}
    d = json.loads(file.read_bytes())
    return d if isinstance(d, dict) else {}


def _read(path: str | Path, family_: ModuleType | None) -> tuple[ModuleType, Any, dict[str, Any]]:
    file = Path(path) / "config.json"
    single = None if file.is_file() else find(Path(path))
    if not file.is_file() and single is None:
        several = "; of its GGUF models, give the path of one" if any(Path(path).glob("*.gguf")) else ""
        expected = "expected a checkpoint directory in Hugging Face layout, or one GGUF model"
        raise FileNotFoundError(f"{path} holds no config.json; {expected}{several}")
    try:
        if single is None and (size := file.stat().st_size) > LONGEST:
            raise ConfigError(f"found {size} bytes, expected at most {LONGEST}")
        d = json.loads(file.read_bytes()) if single is None else gguf.config(single)
        if not isinstance(d, dict):
            raise ConfigError(f"found {show(d)}, expected an object")
        if family_ is None:
            module = of_config(d)
        else:
            module = (
                family_ if getattr(family_, "MODEL_TYPE", None) in (*HEARS, *SEES, *SPEAKS) else protocol.check(family_)
            )
        return module, module.Config.from_hf(d), d
    except P.CheckpointError:
        raise
    except ConfigError as e:
        raise ConfigError(f"{single or file}: {e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file} is not JSON that can be read: {e}") from e


def read_config(path: str | Path, *, family: ModuleType | None = None) -> tuple[ModuleType, Any]:
    """Read config.json of a checkpoint directory: (family module, Config). ConfigError if fdel does not understand it."""
    return _read(path, family)[:2]


def load(
    path: str | Path, *, dtype: Any = None, mesh: Mesh | None = None, rules: Mapping | None = None, stacked: bool = True,
    revision: str | None = None, family: ModuleType | None = None,
) -> Model:  # fmt: skip
    """Load a checkpoint from a directory or a Hub id (extra `hub`) in Hugging Face layout, or from a GGUF file.

    What the file has in few bits (see `params.published`) stays so, as `Quantized`. A GGUF model is given by its file, any
    of its files, or a directory that has no other.
    Of a file of several modalities the language model is loaded, and the tower if the family sees. A model with a head of
    its own (classifier, reward, span of an answer, value) has the params of `heads.spec`. `family` is the module to use,
    whatever model_type says.

    dtype None keeps the checkpoint's. With a mesh, arrays go straight to their shards by `rules` (default `params.TRAIN`).
    stacked=False gives one tree per layer, which serving walks (see `params.unstack`).
    Raises ConfigError for a config and CheckpointError for tensors that do not fit; nothing is loaded then.
    >>> models.save(model, directory)
    >>> models.load(directory, dtype=jnp.bfloat16).cfg == cfg
    False
    """
    directory = P.resolve(path, revision=revision)
    module, cfg, d = _read(directory, family)
    cfg, spec = _spec(module, cfg, d, directory)
    spec = spec if stacked else P.unstack(spec)
    rules = P.TRAIN if rules is None else rules
    shardings = None if mesh is None else P.shardings(spec, mesh, rules)
    for line in () if mesh is None else shared(spec, mesh, rules):
        log.warning(line)
    how = _reading(module, cfg, d, spec)
    # Where the spec has no head, a file may have a tied one's copy.
    ignore = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"^lm_head\.weight$")
    return Model(module, cfg, P.load(spec, directory, dtype=dtype, shardings=shardings, ignore=ignore, **how))


def _spec(module: ModuleType, cfg: Any, d: Mapping[str, Any], path: str | Path) -> tuple[Any, Any]:
    """Give the Config for the files of a directory, and declare their arrays, those of a head among them; stacked."""
    names = scan(Path(path), [])
    cfg = module.of_file(cfg, names) if hasattr(module, "of_file") else cfg
    kind = (None, 0) if module.MODEL_TYPE in (*HEARS, *SEES) else heads.read(d, module, names)
    return cfg, heads.spec(module, cfg, *kind)


def _reading(module: ModuleType, cfg: Any, d: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    """Say how a file's tensors are named and stored, for `params.load`."""
    of_family, before = getattr(module, "rename", lambda name, cfg: name), heads.prefix(module.spec(cfg))
    alone = "text_config" in d and not hasattr(module, "encode")  # a language model out of a file of several modalities
    known = {name for _, p in P.named_leaves(spec) for name in P.hf_names(p)}

    def rename(name: str) -> str | None:
        """Give the spec's name of a file's tensor, or None for another modality's."""
        ours = text_tensor(name) if alone and name not in known else name
        ours = ours if ours in known or ours is None else of_family(ours, cfg)
        return ours if ours in known or ours is None else heads.rename(ours, known, before)

    return {"rename": rename, "quantization": quantization(d)}


def stored(path: str | Path) -> Any:
    """Declare the arrays of a checkpoint directory as its files have them: those in few bits as `Quantized` of Param."""
    module, cfg, d = _read(path, None)
    cfg, spec = _spec(module, cfg, d, path)
    spec = P.unstack(spec)
    return opened(spec, path, **_reading(module, cfg, d, spec))[0]


def spec_of(model: Model) -> Any:
    """Declare the arrays of a model's params, those of its head among them; stacked."""
    return heads.spec(model.family, model.cfg, _kind(model), heads.count(model.params))


def _kind(model: Model) -> str | None:
    bare = "head" not in model.params and "head" in model.family.spec(model.cfg)
    return heads.kind_of(model.params) or ("base" if bare else None)


def config_dict(family: ModuleType, cfg: Any) -> dict[str, Any]:
    """Write a Config as a complete config.json dict, model_type and architectures included.
    >>> models.config_dict(llama, cfg)["architectures"]
    ['LlamaForCausalLM']
    """
    return {"model_type": family.MODEL_TYPE, "architectures": [family.ARCHITECTURE]} | cfg.to_hf()


def save(model: Model, path: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
    """Save a model, with its head, as a Hugging Face checkpoint: config.json and safetensors shards.

    Several processes all call this, and the first writes what lies in several.
    >>> models.save(model, directory)
    >>> sorted(file.name for file in directory.iterdir())
    ['config.json', 'model.safetensors']
    """
    P.save(spec_of(model), model.params, path, shard_bytes=shard_bytes)
    if jax.process_index() > 0 and not all(x.is_fully_addressable for x in jax.tree.leaves(model.params)):
        return
    save_config(model, path)


def save_config(model: Model, path: str | Path, **more: Any) -> None:
    """Write the config.json of a model and its head; `more` are fields that it has besides."""
    dtypes = {str(x.dtype) for x in jax.tree.leaves(model.params)}
    d = config_dict(model.family, model.cfg)
    d = heads.config_dict(d, model.family, _kind(model), heads.count(model.params))
    d = {"dtype" if k == "torch_dtype" else k: v for k, v in d.items()}
    d |= {"dtype": dtypes.pop()} if len(dtypes) == 1 else {}
    (Path(path) / "config.json").write_text(json.dumps(d | more, indent=2, sort_keys=True) + "\n")
