"""Serve models: an engine of continuous batches, generation in one call, beam search, and the naive oracle.

Names load on first use, so that `fdel.serve.openai` runs without jax.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdel.serve.ask import ask
    from fdel.serve.beam import Beam, beam_search
    from fdel.serve.engine import Engine
    from fdel.serve.generate import generate, stream
    from fdel.serve.job import MaskSource
    from fdel.serve.metrics import export_metrics, prometheus
    from fdel.serve.naive import naive_generate
    from fdel.serve.reply import Delta, Generation, Score
    from fdel.serve.request import SamplingParams
    from fdel.serve.sample import Sampled, Sampling, process, sample, sampling_rows
    from fdel.serve.schedule import QueueFull
    from fdel.serve.settings import Settings, unsupported

__all__ = [
    "Beam",
    "Delta",
    "Engine",
    "Generation",
    "MaskSource",
    "QueueFull",
    "Sampled",
    "Sampling",
    "SamplingParams",
    "Score",
    "Settings",
    "ask",
    "beam_search",
    "export_metrics",
    "generate",
    "naive_generate",
    "process",
    "prometheus",
    "sample",
    "sampling_rows",
    "stream",
    "unsupported",
]

# Where a name is, if its module is not called as it is.
_MODULES = {
    "Beam": "beam", "beam_search": "beam", "Delta": "reply", "Engine": "engine", "Generation": "reply",
    "MaskSource": "job", "QueueFull": "schedule", "Sampled": "sample", "Sampling": "sample",
    "SamplingParams": "request", "Score": "reply", "Settings": "settings", "naive_generate": "naive", "process": "sample",
    "export_metrics": "metrics", "prometheus": "metrics",
    "sampling_rows": "sample", "stream": "generate", "unsupported": "settings",
}  # fmt: skip


class _Package(ModuleType):
    """This package, in which `generate` and `sample` are the functions, though modules have these names too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'fdel.serve' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(importlib.import_module(f"fdel.serve.{_MODULES.get(name, name)}"), name)

    def __dir__(self) -> list[str]:
        return sorted([*self.__dict__, *__all__])


sys.modules[__name__].__class__ = _Package
