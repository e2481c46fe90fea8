# ruff: noqa: F401 (the names that load on first use)
"""Serve models: `engine` (token ids) and `server` (OpenAI's protocol, text, HTTP).

Names load on first use, so that `fdel.serve.server.openai` runs without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdel.serve.dual import DualEncoder
    from fdel.serve.engine.beam import Beam, beam_search
    from fdel.serve.engine.engine import Engine
    from fdel.serve.engine.naive import naive_generate
    from fdel.serve.engine.pictures import Medium, PromptMedia, prompt_media
    from fdel.serve.engine.reply import Delta, Generation, MaskSource, Score
    from fdel.serve.engine.request import SamplingParams
    from fdel.serve.engine.sampling import Sampled, Sampling, process, sample, sampling_rows
    from fdel.serve.engine.schedule import QueueFull
    from fdel.serve.engine.settings import Settings, unsupported
    from fdel.serve.generation import generate, stream
    from fdel.serve.server.metrics import export_metrics, prometheus
    from fdel.serve.server.served import ask
    from fdel.serve.speech import speak

_PLACES = {
    "dual": ("DualEncoder",),
    "engine.beam": ("Beam", "beam_search"),
    "engine.engine": ("Engine",),
    "generation": ("generate", "stream"),
    "engine.naive": ("naive_generate",),
    "engine.pictures": ("Medium", "PromptMedia", "prompt_media"),
    "engine.reply": ("Delta", "Generation", "MaskSource", "Score"),
    "engine.request": ("SamplingParams",),
    "engine.sampling": ("Sampled", "Sampling", "process", "sample", "sampling_rows"),
    "engine.schedule": ("QueueFull",),
    "engine.settings": ("Settings", "unsupported"),
    "server.metrics": ("export_metrics", "prometheus"),
    "server.served": ("ask",),
    "speech": ("speak",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fdel.serve' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"fdel.serve.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
