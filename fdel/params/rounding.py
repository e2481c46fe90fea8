"""Matrices [outputs inputs] rounded to integers with a scale per output and group of inputs: to the nearest, or by GPTQ."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

Matrix = Float[np.ndarray, "outputs inputs"]
Integers = Int[np.ndarray, "outputs inputs"]
Scales = Float[np.ndarray, "outputs groups"]
BLOCK = 128  # columns after which GPTQ tells the others of its errors


def scales(w: Matrix, bits: int, group: int, dtype: Any) -> Scales:
    """Give the scale of each group of inputs: its greatest magnitude lies half a scale past the greatest integer.

    That is the least scale with which no weight moves by more than half of it. `dtype` is that of the file.
    """
    greatest = np.abs(w.reshape(len(w), -1, group)).max(-1)
    s = (greatest / (2 ** (bits - 1) - 0.5)).astype(dtype)
    return np.where(s == 0, np.ones((), dtype), s)


def nearest(w: Matrix, scale: Scales, bits: int) -> Integers:
    """Divide by the scales and round to the nearest signed integer."""
    each = np.repeat(scale.astype(w.dtype), w.shape[1] // scale.shape[1], 1)
    return np.clip(np.rint(w / each), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int8)


def gptq(
    w: Matrix, gram: Float[np.ndarray, "inputs inputs"], bits: int, group: int, dtype: Any, *,
    act_order: bool = False, damp: float = 0.01,
) -> tuple[Integers, Scales]:  # fmt: skip
    """Round a column after the other, and let those that follow make up for the error (GPTQ, arXiv 2210.17323).

    It makes tr((w - q) gram (w - q)^T) small, the squared error of the products with the rows x whose x^T x are added up
    in `gram`; `damp` times its mean diagonal is added first. With `act_order` columns of large inputs are rounded first,
    with scales of the matrix as it was, so that groups stay neighbours; else a group's scales are made when it begins.
    Inputs that were always zero are rounded to the nearest. Computed in float64. `group` must divide the inputs.
    """
    w, h = w.astype(np.float64), gram.astype(np.float64)
    outputs, inputs = w.shape
    diagonal = np.diagonal(h).copy()
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(inputs)
    h = h + np.diag(np.where(diagonal == 0, 1.0, damp * diagonal.mean()))
    # The rows of u, an upper triangle with h^-1 = u^T u, say how later columns make up for one (section 3.3).
    u = np.linalg.inv(np.linalg.cholesky(h[order][:, order][::-1, ::-1])[::-1, ::-1])
    scale = scales(w, bits, group, dtype)
    w, q = w[:, order], np.empty((outputs, inputs), np.int8)
    step = BLOCK if group == inputs else -(-BLOCK // group) * group
    for start in range(0, inputs, step):
        stop = min(start + step, inputs)
        errors = np.empty((outputs, stop - start))
        for i in range(start, stop):
            if not act_order and i % group == 0:
                scale[:, i // group] = scales(w[:, i : i + group], bits, group, dtype)[:, 0]
            s = scale[:, order[i] // group, None]
            q[:, i : i + 1] = nearest(w[:, i : i + 1], s, bits)
            error = (w[:, i] - q[:, i] * s[:, 0].astype(np.float64)) / u[i, i]
            w[:, i + 1 : stop] -= np.outer(error, u[i, i + 1 : stop])
            errors[:, i - start] = error
        w[:, stop:] -= errors @ u[start:stop, stop:]
    back = np.argsort(order)
    return q[:, back], scale
