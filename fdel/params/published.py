"""Quantised checkpoints as they are published: which matrices of a spec a file has in few bits, declared as `Quantized`."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fdel.ops.weights import Quantized

from . import bnb, gguf_blocks
from .awq import awq
from .formats import READERS, Found
from .hf_layout import axes_in, file_dims, hf_names, matrix
from .spec import Param, named_leaves, path_name

Tree = Any
METHODS = READERS | {"awq": awq, "bitsandbytes": bnb.bitsandbytes, "gguf": gguf_blocks.blocks}
# Of activations and caches, which are computed in full precision here.
ACTIVATIONS = re.compile(r"\.(input|output|activation|[kvq])_(scale|scale_ub|zero_point|global_scale)$")


def declare(spec: Tree, found: Found, how: Mapping[str, Any], dtype: Any, problems: list[str]) -> Tree:
    """Declare what a file holds in few bits: matrices of `spec` become `Quantized` of Param, their tensors in `found` too.

    `how` is the `quantization_config` of config.json. What is wrong is appended to `problems`.
    """
    method = how.get("quant_method", "bitsandbytes" if how.get("load_in_4bit") or how.get("load_in_8bit") else None)
    if not isinstance(method, str) or method not in METHODS:
        fix = "load the unquantized model, or quantize it again in one of these"
        problems.append(f"quantization_config: quant_method is {method!r}; understood are {', '.join(METHODS)}; {fix}")
        return spec
    for name in [name for name in found if ACTIVATIONS.search(name)]:
        del found[name]
    names = dict.fromkeys(name for _, p in named_leaves(spec) if p.hf for name in hf_names(p))
    read: dict[str, Quantized] = {}
    for name in names:
        try:
            w = METHODS[method](found, name, how)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
            problems.append(f"{name}: {e if isinstance(e, ValueError) else f'malformed ({e!r})'}")
            continue
        if w is not None:
            read[name] = w
            found.update((f"{name}:{i}", t) for i, t in enumerate(jax.tree.leaves(w)))
            bias = name.removesuffix("weight") + "bias"  # some tools write one of zeros beside each matrix
            if bias not in names and bias in found and not found[bias].read().any():
                del found[bias]
    kinds = Counter(found[n].dtype for n in names if n in found and jnp.issubdtype(found[n].dtype, jnp.floating))
    dtype = jnp.dtype(dtype or (kinds.most_common(1)[0][0] if kinds else jnp.bfloat16))

    def one(path: tuple, p: Param) -> Any:
        ours = [read.get(name) for name in hf_names(p)] if p.hf else [None]
        structures = {None if w is None else jax.tree.structure(w) for w in ours}
        if structures == {None}:
            return p
        try:
            if len(structures) > 1:
                few = f"{sum(w is not None for w in ours)} of its {len(ours)} tensors are quantized, or not all alike"
                raise ValueError(f"{few}; load it with stacked=False, which gives each layer a leaf of its own")
            return _matrix(p, ours[0], dtype)
        except ValueError as e:
            problems.append(f"{path_name(path)}: {e}")
            return p

    return jax.tree_util.tree_map_with_path(one, spec)


def _matrix(p: Param, w: Any, dtype: jnp.dtype) -> Quantized:
    """Declare the arrays of one quantised matrix: the axes of `p`, with one axis in place of its inputs."""
    m, names, dims = matrix(p), p.axes.split(), file_dims(p)
    inputs = names[m.batch + m.outputs :] if m else []
    inner = [dim for dim in dims if set(axes_in(dim)) & set(inputs)]
    last = (
        w.format == "e2m1" or inner == dims[-1:]
    )  # experts of mxfp4 are declared as they are without it, inputs first
    if m is None or len(inner) != 1 or axes_in(inner[0]) != inputs or "[" in inner[0] or not last:
        raise ValueError(
            f"quantized in the file, where this array ({p.hf_axes or p.axes}) is no matrix [outputs inputs]"
        )
    if w.order is not None and names[: m.batch] not in ([], ["layers"]):
        raise ValueError("experts whose inputs are sorted by activation order; understood are other matrices so sorted")
    axes, outer = " ".join([*names[: -len(inputs)], "inputs"]), " ".join(dim for dim in dims if dim != inner[0])

    def child(i: int, t: Any) -> Param:
        if t is w.order:
            batch = " ".join([*names[: m.batch], "inputs"])
            shape = (*p.shape[: m.batch], t.shape[-1])
            return replace(p, axes=batch, shape=shape, hf=f"{p.hf}:{i}", hf_axes="inputs", dtype="int32", inputs=None)
        shape = (*p.shape[: -len(inputs)], t.shape[-1])
        return replace(
            p, axes=axes, shape=shape, hf=f"{p.hf}:{i}", hf_axes=f"{outer} inputs", dtype=str(t.dtype), inputs=None
        )

    leaves, structure = jax.tree.flatten(w)
    tree = jax.tree.unflatten(structure, [child(i, t) for i, t in enumerate(leaves)])
    return replace(tree, inputs=p.shape[-len(inputs) :], dtype=dtype)
