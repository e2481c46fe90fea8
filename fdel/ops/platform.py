"""Tell what a program is traced for: a platform and the mesh, facts of what is set and never of the process."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType

_override = jax.make_user_context(None)


def target() -> str:
    """Name the platform that runs what is traced here: "cpu", "gpu" or "tpu".

    It is that of `tracing_for`, else of the mesh that is set (`jax.set_mesh`), else of the default device. Arrays that
    lie elsewhere do not change it: set their mesh. Ask while tracing, not at import.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.default_device.value
    if _override.value is not None:
        return _override.value
    if device is not None:
        return device.platform
    if default is not None:
        return default if isinstance(default, str) else default.platform
    return jax.default_backend()


def device_kind() -> str | None:
    """Name the devices that run what is traced here, as drivers do; None where `tracing_for` says the platform alone."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        if _override.value is not None:
            return None
        default = jax.default_device.value
        device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return device.device_kind


def tracing_for(platform: str) -> AbstractContextManager[None]:
    """Trace what follows in this thread for "cpu", "gpu" or "tpu", whatever the mesh and the devices are.

    For tests, and for compiling where there is no such device and no mesh of a topology is set. jax's caches know it: a
    jitted function is traced again under another target. Surround the calls, or `.trace` with `.lower`; other threads do
    not see it. A ValueError for other names.
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f'tracing_for: expected "cpu", "gpu" or "tpu", found {platform!r}')
    return _override(platform)


def context(*axes: str) -> dict[str, int]:
    """Give the sizes of those mesh axes that the compiler may still use here, in `jax.set_mesh`'s mesh.

    Axes of size 1, and axes that an enclosing `jax.shard_map` has divided already, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {a: mesh.shape[a] for a in axes if types.get(a) == AxisType.Auto and mesh.shape[a] > 1}
