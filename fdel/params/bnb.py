"""bitsandbytes' matrices as `Quantized`: four bits in blocks of one row after the other, and int8 by rows."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdel.ops.weights import DYNAMIC, TABLES, Quantized

from .formats import Found, by_group, derived, leaf, take


def bitsandbytes(found: Found, name: str, how: Mapping[str, Any]) -> Quantized | None:
    """NF4 and FP4 with or without double quantisation (QLoRA, arXiv 2305.14314), and int8 by rows (arXiv 2208.07339)."""
    stem = name.removesuffix("weight")
    if stem + "SCB" in found:
        values, scale = take(found, name, stem + "SCB")
        layout = found.pop(stem + "weight_format", None)
        if values.dtype != np.int8 or (layout is not None and layout.read().any()):
            raise ValueError("bitsandbytes' int8 in the layout of a GPU; understood is 'row': save it again")
        make = lambda: scale.read().reshape(-1, 1) * np.float32(1 / 127)
        return leaf("int8", values, derived(scale, (values.shape[0], 1), np.float32, make))
    states = [key for key in found if key.startswith(name + ".quant_state.")]
    if not states:
        return None
    state = json.loads(take(found, *states)[0].read().tobytes())
    if state.get("quant_type") not in ("nf4", "fp4") or len(state.get("shape", ())) != 2:
        kind = f"{state.get('quant_type')!r} of shape {state.get('shape')}"
        raise ValueError(f"bitsandbytes' {kind}; understood are matrices of 'nf4' and 'fp4'")
    return _four(found, name, state)


def _four(found: Found, name: str, state: Mapping[str, Any]) -> Quantized:
    """A matrix in blocks of one row after the other; where blocks and rows do not fit, in groups of the common divisor."""
    values, absmax, table = take(found, name, name + ".absmax", name + ".quant_map")
    (outputs, inputs), size, outer_size = state["shape"], state["blocksize"], state.get("nested_blocksize", 1)
    if any(type(n) is not int or n < 1 for n in (outputs, inputs, size, outer_size)):
        raise ValueError(
            f"bitsandbytes' state has {outputs!r}, {inputs!r}, {size!r}, {outer_size!r}; expected numbers > 0"
        )
    nested = "nested_absmax" if "nested_blocksize" in state else ""
    group, aligned = math.gcd(inputs, size), inputs % size == 0
    kind = state["quant_type"]
    maps = [(table, TABLES[kind]), *((t, DYNAMIC) for t in (take(found, name + ".nested_quant_map") if nested else []))]
    same = lambda t, ours: np.allclose(t.read().ravel(), np.array(ours, np.float32), rtol=1e-6, atol=0)
    if group % 2 or not all(same(*pair) for pair in maps):
        raise ValueError(f"bitsandbytes' {kind} with a map of its own, or of odd rows; understood are its usual maps")
    groups = inputs // group
    where = lambda: (np.arange(outputs)[:, None] * inputs + np.arange(groups) * group) // size

    def make() -> np.ndarray:
        x = values.read().reshape(-1)
        return by_group(np.stack([x >> 4, x & 15], -1).reshape(outputs, inputs), group)

    stored = derived(values, (outputs, inputs // 2), np.uint8, make)
    scale: Any = derived(absmax, (outputs, groups), absmax.dtype, lambda: absmax.read()[where()])
    if nested:
        (outer,) = take(found, f"{name}.{nested}")
        step = math.gcd(groups, outer_size) if aligned else 1
        of = lambda: outer.read()[where()[:, ::step] // outer_size]
        offset = lambda: np.full((outputs, 1), state["nested_offset"], np.float32)
        outer_scale = derived(outer, (outputs, groups // step), np.float32, of)
        scale = leaf("dynamic", scale, outer_scale, derived(outer, (outputs, 1), np.float32, offset), (groups,))
    return leaf(kind, stored, scale)
