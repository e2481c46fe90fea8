"""What stands whole beside adapters in PEFT's files: the tensors of its modules_to_save, under their own names."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdel.ops.weights import is_weight

from .hf_layout import hf_names, layout
from .quantize import declarations
from .spec import Param, named_leaves
from .tensor import Tensor

PREFIX = "base_model.model."


def find(
    spec: Any, params: Any, files: dict[str, Tensor], names: Any, problems: list[str]
) -> dict[str, tuple[Param, list[Tensor]]]:
    """Take the tensors of modules `names` out of `files`: the declaration and the tensors of each array of `params`."""
    names = names or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append(f"modules_to_save={str(names)[:100]!r}; expected a list of names")
        return {}
    out: dict[str, tuple[Param, list[Tensor]]] = {}
    arrays = {leaf for leaf, w in named_leaves(params, is_leaf=is_weight) if not is_weight(w)}
    for leaf, p in declarations(params, spec).items():
        found, expected = hf_names(p), layout(p).file_shape
        within = all(any(f".{m}." in f".{name}." for m in names) for name in found)
        if leaf in arrays and found and within and all(f"{PREFIX}{name}" in files for name in found):
            out[leaf] = p, [files[f"{PREFIX}{name}"] for name in found]
            for name, t in zip(found, out[leaf][1], strict=True):
                if t.shape != expected or not jnp.issubdtype(t.dtype, jnp.floating):
                    problems.append(f"{PREFIX}{name} {t.shape} {t.dtype}: expected floating-point numbers {expected}")
    for name in {f"{PREFIX}{name}" for p, _ in out.values() for name in hf_names(p)}:
        del files[name]  # parts of a fused tensor have the same
    return out


def read(p: Param, tensors: Sequence[Tensor], problems: list[str]) -> np.ndarray:
    """Read the tensors that take an array's place, one for each of its layers. Notes what is not finite."""
    x = np.stack([layout(p).read(t.read().astype(np.float32)) for t in tensors])
    problems += [] if np.isfinite(x).all() else [f"{PREFIX}{p.hf} holds values that are not finite"]
    return x.reshape(p.shape)


def lay_out(params: Any, spec: Any, whole: str | None) -> dict[str, np.ndarray]:
    """Lay the arrays whose path matches `whole` out as their tensors are, by name; parts of a fused tensor are in one."""
    out: dict[str, np.ndarray] = {}
    leaves = dict(named_leaves(params, is_leaf=is_weight))
    for leaf, p in declarations(params, spec).items():
        if whole and re.search(whole, leaf):
            x = np.asarray(leaves[leaf])
            for index, name in zip(np.ndindex(tuple(len(r) for _, r in p.stacked)), hf_names(p), strict=True):
                layout(p).write(out.setdefault(name, np.zeros(layout(p).file_shape, x.dtype)), x[index])
    return out


def modules(kept: Collection[str], every: Collection[str]) -> list[str]:
    """Name the modules of tensors that are kept whole: the outermost of which no tensor is left out, none a mere list."""
    outer = lambda name: [name[: m.start()] for m in re.finditer(r"\.(?!\d+\.)", name)]
    lost = {module for name in {*every} - {*kept} for module in outer(name)}
    whole = lambda name: next((module for module in outer(name) if module not in lost), outer(name)[-1])
    return sorted({whole(name) for name in kept})
