"""What PEFT calls that it adapts: modules, and parameters of modules that are no Linear (target_parameters)."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .kept import PREFIX

# The parameters of a module of experts, in its order: PEFT wraps the module once for each that it adapts.
EXPERTS = ("gate_up_proj", "down_proj")
# Modules of models with such experts that PEFT takes for older files' routers and experts, if target_modules names them.
TAKEN = ("gate", "gate_proj", "up_proj", "down_proj")
# Experts with matrices [in, out] that PEFT takes for [out, in]: Llama 4's.
TURNED = "feed_forward.experts."


def target(name: str, found: Callable[[str], bool]) -> str:
    """Give what patterns of a config match for a tensor's name: the module, or the parameter if `found` has it."""
    return name if found(name) else name.removesuffix(".weight")


def tensor_names(target: str, found: Callable[[str], bool], table: bool) -> tuple[str, str]:
    """Name the factors of a module or a parameter, where `found` tells which parameters are adapted."""
    module = target
    if found(target):
        module, _, last = target.rpartition(".")
        later = EXPERTS[EXPERTS.index(last) + 1 :] if last in EXPERTS else ()
        module += ".base_layer" * sum(found(f"{module}.{other}") for other in later)
    kind = "lora_embedding_{}" if table else "lora_{}.weight"
    return f"{PREFIX}{module}.{kind.format('A')}", f"{PREFIX}{module}.{kind.format('B')}"


def finder(config: Mapping[str, Any], problems: list[str]) -> Callable[[str], bool]:
    """Tell whether a config's target_parameters have a parameter, by its name or an end of it."""
    wanted = config.get("target_parameters") or []
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        problems.append(f"adapter_config.json: target_parameters={str(wanted)[:100]!r}; expected a list of names")
        return lambda name: False
    names = frozenset(wanted)
    return lambda name: name in names or any(name[i + 1 :] in names for i, c in enumerate(name) if c == ".")


def as_parameters(names: Collection[str], routers: Collection[str]) -> set[str]:
    """Choose of tensors' names those that PEFT must be given as parameters."""
    experts = {name for name in names if name.rpartition(".")[2] in EXPERTS}
    taken = {name for name in names if experts and name.removesuffix(".weight").rpartition(".")[2] in TAKEN}
    return experts | taken | {*routers}


def config(
    ranks: Mapping[str, int], alphas: Mapping[str, float], every: set[str], parameters: set[str]
) -> dict[str, Any]:
    """Make adapter_config.json of targets with these ranks and alphas, where the model has the modules `every`."""
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    last = lambda module: module.rpartition(".")[2]
    around = {part for x in every for part in x.split(".")[:-1]}  # modules that hold others
    modules = {*ranks} - parameters
    short = {last(x) for x in modules} - {last(x) for x in every - modules} - around
    differing = lambda values, usual: {re.escape(k): v for k, v in values.items() if v != usual}
    return {
        "peft_type": "LORA", "inference_mode": True, "bias": "none", "use_rslora": False,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "init_lora_weights": True,
        "rank_pattern": differing(ranks, rank), "alpha_pattern": differing(alphas, alpha),
        "target_modules": sorted({last(x) if last(x) in short else x for x in modules}),
    } | ({"target_parameters": sorted(parameters & {*ranks})} if parameters & {*ranks} else {})  # fmt: skip
