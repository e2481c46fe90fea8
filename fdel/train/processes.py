"""Processes of a run: how they find each other, which part of a batch each of them reads, and how all hear of the end."""

import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Int

from fdel.params import batch_sharding

# Who started this process says so in its environment, as all launchers do: the only variables that fdel looks at.
COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")  # jax finds the rest by itself


def cluster(found: Mapping[str, str]) -> dict[str, Any] | None:
    """Say from environment variables how `jax.distributed.initialize` joins the processes of a launcher; None: one alone.

    {} leaves it to jax (Slurm's srun, OpenMPI, TPU pods, Kubernetes with the package `kubernetes`). Read here are those of
    torchrun and PyTorchJob (MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK) and of JAXJob and JobSet (JAX_COORDINATOR_ADDRESS
    or COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID or JOB_COMPLETION_INDEX). ValueError for what is incomplete.
    """
    if "MASTER_ADDR" in found and "WORLD_SIZE" in found:
        if found["WORLD_SIZE"] == "1":
            return None
        # torchrun's own store listens at the port.
        port = int(found.get("MASTER_PORT", "29500")) + (found.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        given = {"LOCAL_WORLD_SIZE": found.get("LOCAL_WORLD_SIZE", "1"), "LOCAL_RANK": found.get("LOCAL_RANK", "0")}
        devices = {} if given["LOCAL_WORLD_SIZE"] == "1" else {"local_device_ids": int(given["LOCAL_RANK"])}
        return _given(found, f"{found['MASTER_ADDR']}:{port}", "WORLD_SIZE", ("RANK",)) | devices
    address = found.get("JAX_COORDINATOR_ADDRESS") or found.get("COORDINATOR_ADDRESS")
    if address is not None:
        address = address if ":" in address else f"{address}:{found.get('COORDINATOR_PORT', '1234')}"
        count = "JAX_NUM_PROCESSES" if "JAX_NUM_PROCESSES" in found else "NUM_PROCESSES"
        return _given(found, address, count, ("JAX_PROCESS_ID", "PROCESS_ID", "JOB_COMPLETION_INDEX"))
    launched = "SLURM_STEP_NODELIST" in found or not found.get("SLURM_NTASKS")  # not a shell of salloc
    if any(found.get(name, "1") != "1" for name in COUNTS) and launched:
        return {}
    if "," in found.get("TPU_WORKER_HOSTNAMES", ""):
        return {}
    if "KUBERNETES_SERVICE_HOST" in found and "JOB_COMPLETION_INDEX" in found:
        if importlib.util.find_spec("kubernetes") is not None:
            return {}
        raise ValueError(
            "this is a pod of an indexed Job, but it does not say how many there are: set JAX_COORDINATOR_ADDRESS and "
            "NUM_PROCESSES, or install the package kubernetes; for a run of its own, distributed.processes: 1"
        )
    return None


def _given(found: Mapping[str, str], address: str, count: str, ids: tuple[str, ...]) -> dict[str, Any]:
    mine = next((found[name] for name in ids if name in found), None)
    if mine is None or not mine.isdecimal() or not found.get(count, "").isdecimal():
        raise ValueError(
            f"the processes meet at {address}, but {count} is {found.get(count)!r} and {' or '.join(ids)} is {mine!r}; "
            "expected numbers"
        )
    return {"coordinator_address": address, "num_processes": int(found[count]), "process_id": int(mine)}


def join(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Join the processes of a run, before anything touches a device; with one process, do nothing.

    coordinator: "host:port" of process 0, "auto" for what jax finds by itself, None: as `cluster` finds. ValueError for
    what is incomplete, and where a device has been used already.
    """
    if processes == 1 or jax.distributed.is_initialized():
        return
    if coordinator is None:
        how = cluster(os.environ)
    elif coordinator == "auto":
        how = {}
    else:
        how = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process_id}
    if how is None or how.get("num_processes") == 1:
        return
    try:
        jax.distributed.initialize(**how)
    except RuntimeError as e:
        raise ValueError(f"the processes of this run cannot be joined: {e}") from e


def share(mesh: Mesh) -> tuple[int, int]:
    """Say which part of each batch this process reads: (its number, how many parts there are).

    Processes whose devices lie along tp or sp hold the same rows, and read the same part. ValueError for a mesh on which
    processes hold rows in part.
    """
    rows = batch_sharding(mesh)
    count = mesh.devices.size
    held: dict[int, set[int]] = {}
    device: Any
    for device, (part, *_) in rows.devices_indices_map((count,)).items():
        held.setdefault(device.process_index, set()).add(part.start or 0)
    parts = sorted({tuple(sorted(x)) for x in held.values()})
    if len({x for part in parts for x in part}) < sum(map(len, parts)) or len({len(x) for x in parts}) > 1:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: processes share some rows of a batch and not others; choose sizes of dp, fsdp and "
            f"ep whose product divides {len(held)} processes or is a multiple of it"
        )
    mine = held.get(jax.process_index())
    if mine is None:
        raise ValueError(f"mesh {dict(mesh.shape)} has no device of process {jax.process_index()}; use all devices")
    return parts.index(tuple(sorted(mine))), len(parts)


def most(sizes: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Give the largest of each size among all processes, which call it at the same time."""
    return np.asarray(multihost_utils.process_allgather(sizes.astype(np.int32))).reshape(-1, len(sizes)).max(0)


@contextlib.contextmanager
def listen() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them; a second one does what it did before.

    Where jax.distributed runs, its own service hears SIGTERM, so that all processes stop at the same step.
    """
    caught: list[int] = []
    usual: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread() and not jax.distributed.is_initialized():

        def note(number: int, frame: Any) -> None:
            caught.append(number)
            signal.signal(number, usual[number])

        usual = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, action in usual.items():
            signal.signal(number, action)


def signalled(caught: list[int], step: int) -> int:
    """Return the signal to stop for after this step, 0 if there is none; the same on every process."""
    if not jax.distributed.is_initialized():
        return caught[0] if caught else 0
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
