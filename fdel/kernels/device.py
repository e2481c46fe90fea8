"""Whether the devices that a program is traced for are those that a kernel is written for: a reason if not, or None."""

import jax

from fdel.ops.platform import target

OLD = ("v2", "v3", "v4")  # in the names of TPUs with 16 MiB of fast memory
HOPPER = ("H100", "H200", "H800", "H20")  # in the names of such devices


def kind() -> str | None:
    """Name the devices of the mesh that is set, as their driver does; None if it does not tell."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.device_kind


def no_tpu() -> str | None:
    """Say why a kernel for TPUs with the memory of a v5 cannot be used."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    if (name := kind()) is not None and any(old in name for old in OLD):
        return f"it needs the memory of v5 or later; the mesh is of {name}"
    return None


def no_hopper() -> str | None:
    """Say why a kernel for Hopper cannot be used."""
    if target() != "gpu":
        return f"it is written for NVIDIA GPUs; the target is {target()}"
    if (name := kind()) is not None and not any(known in name for known in HOPPER):
        return f"it is written for Hopper ({', '.join(HOPPER)}); the mesh is of {name}"
    return None
