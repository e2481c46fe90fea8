"""Tiny random checkpoints of every family, made by transformers with every weight randomised: the oracle of the suite.

Each file beside this one has a dict TINY: name -> `Entry`; "family:variant" switches on another path of a family.
"""

import importlib
import json
import pkgutil
from pathlib import Path

from .entry import BASE, Entry
from .randomise import randomise

__all__ = ["BASE", "TINY", "Entry", "build", "checkpoint", "randomise"]
FILES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
TINY: dict[str, Entry] = {name: e for file in FILES for name, e in getattr(file, "TINY", {}).items()}


def build(name: str | Entry, seed: int = 0):
    """Make the torch model of an entry, float32, its attention eager, in eval mode, with every weight randomised."""
    import torch
    import transformers

    entry = TINY[name] if isinstance(name, str) else name
    values = json.loads(json.dumps(entry.values))
    if entry.make:
        return entry.make(values, seed)
    torch.manual_seed(seed)
    cfg = getattr(transformers, entry.config)(**values)
    out = (
        getattr(transformers, entry.model)._from_config(cfg, attn_implementation=entry.attn, dtype=torch.float32).eval()
    )
    randomise(out, seed, entry.keep)
    return out


def checkpoint(name: str, directory: Path, seed: int = 0, **kwargs):
    """Save the torch model of an entry in hub layout; returns the torch model."""
    model = build(name, seed)
    model.save_pretrained(directory, **kwargs)
    return model
