"""Write a model in few bits as vLLM and transformers read it, with what calibration data tells of the matrices' inputs."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from fdel import models, params
from fdel.calibration import grams
from fdel.params import writers
from fdel.params.files import write_checkpoint
from fdel.params.hf import Contents, contents
from fdel.params.hf_layout import axes_in, file_dims, hf_names, layout, matrix
from fdel.params.quantize import MATRICES, quantized_paths, targets
from fdel.smoothing import smooth

MOST = 8 << 30  # bytes of Gram matrices that are added up at once; more take further passes over the rows


def _is_linear(p: params.Param) -> bool:
    """Tell whether a tensor of the file is a matrix [outputs inputs], or has several such one below the other."""
    m, dims = matrix(p), file_dims(p)
    if m is None or len(layout(p).file_shape) != 2 or not p.hf.endswith(".weight"):
        return False
    return axes_in(dims[-1]) == p.axes.split()[m.batch + m.outputs :] and "[" not in dims[-1]


def _passes(names: Mapping[str, str], spec: Any) -> Iterator[dict[str, str]]:
    """Divide tensors (name: path of a leaf) into parts whose Gram matrices fit into memory together."""
    declared = dict(params.named_leaves(spec))
    part: dict[str, str] = {}
    size: dict[str, int] = {}
    for name, path in names.items():
        p = declared[path]
        outer, _, inputs = matrix(p).cut(p.shape)  # type: ignore[union-attr]
        more = 4 * math.prod(outer) * math.prod(inputs) ** 2
        if path not in size and sum(size.values()) + more > MOST and part:
            yield part
            part, size = {}, {}
        part[name], size[path] = path, more
    yield part


def encoded(
    model: models.Model,
    scheme: writers.Scheme,
    rows: Int[np.ndarray, "rows length"] | None = None,
    where: str = MATRICES,
) -> tuple[Contents, dict[str, writers.Tensors]]:
    """Give what a checkpoint holds, and the tensors that stand for its matrices (by `where`, see `params.quantize`).

    With `rows` integers are found by GPTQ. A model that is quantized already, or has no such matrix, is a ValueError.
    """
    spec, tree = params.unstack(models.spec_of(model)), params.unstack(model.params)
    if found := quantized_paths(tree):
        raise ValueError(
            f"{len(found)} matrices like {found[0]} are quantized already; `fdel convert` makes them plain"
        )
    if rows is not None and not scheme.calibrated:
        raise ValueError(
            "this format has nothing to calibrate: it rounds to the nearest; leave the calibration data out"
        )
    if rows is None and scheme.act_order:
        raise ValueError("act_order is an order in which GPTQ rounds; give calibration data, or leave it out")
    plain, wanted = contents(spec, tree), targets(tree, spec, where)
    parts = {n: group for n, group in plain.parts.items() if all(q in wanted and _is_linear(p) for q, p, _ in group)}
    if not parts:
        raise ValueError(
            "no matrix has its outputs first in the file, as these formats need it; nothing can be written"
        )
    out: dict[str, writers.Tensors] = {}
    paths = {name: group[0][0] for name, group in parts.items()}
    for some in [paths] if rows is None else _passes(paths, spec):
        known = {} if rows is None else grams(model, rows, list(dict.fromkeys(some.values())))
        for name in some:
            (path, _, index), *_ = parts[name]
            gram = known[path][index] if path in known and known[path][index].any() else None
            out[name] = writers.written(scheme, name, plain.tensor(name), plain.entries[name][1], gram)
    return plain, out


def _called(name: str, p: params.Param) -> set[str]:
    """Give the names of a tensor: the file's, and that among transformers' modules, if it is one of its own there."""
    names, held = hf_names(p), hf_names(p.module or p)
    return {name, held[names.index(name)]} if len(held) == len(names) else {name}


def save(
    model: models.Model, path: str | Path, scheme: writers.Scheme, rows: Int[np.ndarray, "rows length"] | None = None, *,
    where: str = MATRICES, shard_bytes: int = 5_000_000_000, alpha: float | None = None,
) -> int:  # fmt: skip
    """Write a model whose layers' matrices are quantized by `writers.scheme(...)`; give the bytes of all tensors.

    By default (`where`, see `params.quantize`) those of the language model: towers stay whole.

    With `alpha` the model is smoothed first, by the rows too (see `smoothing.smooth`). The host holds quantized matrices
    at once. What is wrong is a ValueError, and nothing is written then.
    """
    if alpha is not None:
        if rows is None or not scheme.dynamic:
            raise ValueError("smoothing helps formats that round activations, as w8a8, and needs calibration data")
        model = smooth(model, rows, alpha)[0]
    plain, few = encoded(model, scheme, rows, where)
    made = {name: x for tensors in few.values() for name, x in tensors.items()}
    entries = {n: e for n, e in plain.entries.items() if n not in few} | {
        n: (x.shape, x.dtype) for n, x in made.items()
    }
    table = lambda name: any("vocab" in p.axes and path != "head" for path, p, _ in plain.parts[name])
    left = {
        module.removesuffix(".weight")
        for name, (shape, _) in plain.entries.items()
        if name not in few and len(shape) > 1 and not table(name)
        for module in _called(name, plain.parts[name][0][1])
    }
    fetch = lambda name: made[name] if name in made else plain.tensor(name)
    write_checkpoint(Path(path), entries, fetch, shard_bytes, {"format": "pt"})
    skipped = [*sorted(left - {writers.HEAD}), writers.HEAD]
    models.save_config(model, path, quantization_config=scheme.describe(scheme, skipped))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in entries.values())
