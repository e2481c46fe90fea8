"""Tensors of a PyTorch checkpoint (pytorch_model.bin), read with `weights_only=True`: no code in the file is run."""

import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .files import DTYPES, CheckpointError, Tensor

INSTALL = "needs PyTorch: pip install 'fdel[torch]', or convert it to safetensors where PyTorch is installed"


def _readinto(flat: Any, out: np.ndarray, at: int) -> None:
    out[...] = flat[at : at + out.size].numpy()


def bin_header(file: Path, problems: list[str]) -> dict[str, Tensor]:
    """Read which tensors a .bin file holds; append what does not fit to `problems`. Without torch: ImportError."""
    try:
        import torch
    except ImportError as e:
        raise ImportError(f"{file} {INSTALL}") from e
    try:
        # Only the zip format (since 2020) can be mapped; its bytes are then read when they are asked for.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as e:  # UnpicklingError, RuntimeError, EOFError or ValueError, by kind of damage
        why = f"{file.name}: torch.load(weights_only=True) refused it: {' '.join(str(e).split())[:300]}"
        raise CheckpointError(file, [why]) from e
    dtypes = {dtype.name: dtype for dtype in DTYPES.values()}
    out = {}
    for name, t in state.items() if isinstance(state, dict) else [("the file", state)]:
        dtype = dtypes.get(str(t.dtype).removeprefix("torch.")) if isinstance(t, torch.Tensor) else None
        if dtype is None:
            what = f"a tensor of {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
            problems.append(f"{file.name}: {name} is {what}, expected a flat dict of dense tensors")
            continue
        flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
        out[name] = Tensor(tuple(t.shape), dtype, file, partial(_readinto, flat))
    return out
