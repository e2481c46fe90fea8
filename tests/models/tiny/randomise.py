"""Seeded values for every weight of an oracle: a default initialisation hides a lost bias, a wrong norm or router."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def value(name: str, p: Any, generator: Any) -> Any:
    """Values for a weight, of a size that matters to the logits; `p` is what it holds now."""
    import torch

    leaf, r = name.rsplit(".", 1)[-1], torch.randn(p.shape, generator=generator)
    if leaf == "A_log":
        return 1.5 * torch.rand(p.shape, generator=generator)
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):
        return -2 + 0.5 * r
    if leaf == "D" or leaf.endswith(("scale", "scalar")):
        return 1 + 0.3 * r
    if leaf in ("input_min", "output_min", "input_max", "output_max"):  # bounds that some numbers are beyond
        return (1 if leaf.endswith("max") else -1) * (0.5 + 0.2 * r.abs())
    if p.ndim <= 1:  # norms around their own initial value, biases around zero
        return (p.float() if leaf == "weight" else 0) + 0.2 * r
    if "embed" in name or "wte" in name or "wpe" in name:
        return 0.5 * r
    return r * 1.2 / (p[0].numel() if p.ndim > 2 and "conv" in name else p.shape[-1]) ** 0.5


def randomise(model: Any, seed: int, keep: tuple[str, ...] = ()) -> None:
    """Overwrite every parameter and saved float buffer, but those whose names end with one of `keep` (derived ones)."""
    import torch

    g = torch.Generator().manual_seed(seed)
    saved, seen = set(model.state_dict()), set()
    items = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    with torch.no_grad():
        for name, p in sorted(items, key=lambda item: item[0]):
            if p.data_ptr() in seen or not p.is_floating_point() or name.endswith(keep):
                continue
            seen.add(p.data_ptr())
            p.copy_(value(name, p, g))


def formula(model_type: str, logits: Callable[[dict, dict, Any], Any]) -> Callable[[dict, int], Any]:
    """Make an oracle (`Entry.make`) of logits(weights by published name, config.json, tokens), for what transformers lacks.

    Names and shapes of the weights are those that fdel declares; the formula looks them up by the published ones.
    """

    def make(values: dict, seed: int) -> Any:
        import torch
        from safetensors.torch import save_file

        from fdel import models
        from fdel.params.hf_layout import hf_names, layout
        from fdel.params.spec import named_leaves

        family, g = models.family(model_type), torch.Generator().manual_seed(seed)
        config, weights = {"model_type": model_type, "architectures": [family.ARCHITECTURE]} | values, {}
        for _, p in named_leaves(family.spec(family.Config.from_hf(config))):
            for name in hf_names(p):
                weights[name] = value(name, torch.ones(layout(p).file_shape), g)
        weights = dict(sorted(weights.items()))

        def save_pretrained(directory: Path, **_: Any) -> None:
            save_file(weights, Path(directory) / "model.safetensors")
            (Path(directory) / "config.json").write_text(json.dumps(config))

        oracle = lambda tokens: SimpleNamespace(logits=logits(weights, config, tokens))
        return _Oracle(oracle, save_pretrained)

    return make


class _Oracle:
    """Looks like a model of transformers, as far as the suite asks."""

    def __init__(self, call: Callable, save_pretrained: Callable) -> None:
        self.call, self.save_pretrained = call, save_pretrained

    def __call__(self, tokens: Any) -> Any:
        return self.call(tokens)
