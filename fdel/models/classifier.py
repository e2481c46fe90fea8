"""Reward and classification models: a family without its output projection, and a linear head on its hidden states.

Parameters are {"model": the family's, "score": float[labels D]}, and "score_bias" where the head has one; in a checkpoint
they are transformers' ...ForSequenceClassification, with a bias ...ForTokenClassification.
"""

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fdel.models.keys import ConfigError, show
from fdel.params.spec import Param, normal, zeros

KINDS = {"ForSequenceClassification": False, "ForTokenClassification": True}  # the end of a class's name: with a bias?
MOST = 2**20  # labels


def labels(d: Mapping[str, Any]) -> tuple[int, bool] | None:
    """Read (number of labels, whether the head has a bias) of a config.json; None where it is no classifier's."""
    classes = d.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(c, str) for c in classes)):
        raise ConfigError(f"config field 'architectures': found {show(classes)}, expected a list of names")
    kind = next((k for k in KINDS for c in classes or () if c.endswith(k)), None)
    if kind is None:
        return None
    names = d.get("id2label")
    n = len(names) if isinstance(names, Mapping) and names else d.get("num_labels", 2)  # 2: as transformers assumes
    if type(n) is not int or not 1 <= n <= MOST:
        raise ConfigError(f"config field 'num_labels': found {show(n)}, expected 1 to {MOST}")
    return n, KINDS[kind]


def spec(family: ModuleType, cfg: Any, labels: int = 1, bias: bool = False) -> dict[str, Any]:
    """Declare a classifier's arrays. One label without a bias is a reward; process rewards have one label per class."""
    model = {k: v for k, v in family.spec(cfg).items() if not k.startswith("head")}
    tree = {"model": model, "score": Param("labels embed", (labels, cfg.embed), normal(0.02), "score.weight")}
    return tree | ({"score_bias": Param("labels", (labels,), zeros, "score.bias")} if bias else {})


def config_dict(d: dict[str, Any], family: ModuleType, labels: int, bias: bool) -> dict[str, Any]:
    """Turn a family's config.json into a classifier's; names of as many labels stay."""
    kind = next(k for k, has in KINDS.items() if has == bias)
    out = d | {"architectures": [re.sub("(ForCausalLM|LMHeadModel)$", kind, family.ARCHITECTURE)]}
    if len(d.get("id2label") or ()) == labels:
        return out
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    return out | {"id2label": names, "label2id": {v: int(k) for k, v in names.items()}}


def no_text(params: Any) -> str | None:
    """Say why these params cannot generate, and what they are for, if they are a classifier's."""
    if "score" not in params:
        return None
    found = f"this is a classifier or reward model ({len(params['score'])} labels), which writes no text"
    return f"{found}; train.losses.score_rows(family, cfg)(params, {{'tokens': ...}}) scores rows of ids"
