"""One tensor of a checkpoint, whatever file holds it, and what is wrong with a checkpoint."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(t)
    for name, t in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F32": np.float32, "F64": np.float64, "C64": np.complex64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items()
}  # fmt: skip
NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked; `problems` lists every offender."""

    def __init__(self, where: str | Path, problems: Iterable[str], most: int = 20):
        self.problems = tuple(problems)
        rest = len(self.problems) - most
        lines = [*self.problems[:most], *([f"... and {rest} more"] if rest > 0 else [])]
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"checkpoint {where}: {count}\n" + "\n".join(f"  {line}" for line in lines))


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. `readinto(out, at)` fills a contiguous uint8 array with its bytes from `at` on.

    A `whole` tensor is read at once: its bytes are computed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    readinto: Callable[[np.ndarray, int], None] = field(repr=False, compare=False)
    whole: bool = False

    nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)  # in the file

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        out = np.empty(self.shape, self.dtype)
        self.readinto(out.reshape(-1).view(np.uint8), 0)
        return out
