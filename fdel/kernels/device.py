"""Whether the devices that a program is traced for are those that a kernel is written for: a reason if not, or None."""

import jax.numpy as jnp
from jaxtyping import Array

from fdel.ops.platform import device_kind, target

OLD = ("v2", "v3", "v4")  # in the names of TPUs with 16 MiB of fast memory
HOPPER = ("H100", "H200", "H800", "H20")  # in the names of such devices


def no_tpu() -> str | None:
    """Say why a kernel for TPUs with the memory of a v5 cannot be used."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    if (name := device_kind()) is not None and any(old in name for old in OLD):
        return f"it needs the memory of v5 or later; the device is a {name}"
    return None


def no_hopper() -> str | None:
    """Say why a kernel for Hopper cannot be used."""
    if target() != "gpu":
        return f"it is written for NVIDIA GPUs; the target is {target()}"
    if (name := device_kind()) is not None and not any(known in name for known in HOPPER):
        return f"it is written for Hopper ({', '.join(HOPPER)}); the device is a {name}"
    return None


def unknown() -> str | None:
    """Say why a kernel for Hopper is not taken unless it is named: the device may be another one."""
    return "the device is not known to be of Hopper; `use` can name it" if device_kind() is None else None


def unmeasured(x: Array) -> str | None:
    """Say why a kernel for Hopper is taken only where it is named, or None: in bfloat16 it was compared with XLA's."""
    half = x.dtype == jnp.bfloat16
    return unknown() or (None if half else f"it has been measured in bfloat16; found {x.dtype}; `use` can name it")
