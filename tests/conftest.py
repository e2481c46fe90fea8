"""Settings of every test: eight virtual CPU devices, a compilation cache between runs, GPU tests only on request."""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

MAPPINGS = Path("/proc/self/maps")  # Linux gives a process 65,530; each compiled program takes ten or more

hypothesis.settings.register_profile("fdel", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fdel")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take the branches of an accelerator, on this machine's CPU."""
    parser.addoption("--matrix", action="store_true", help="run the tests marked `matrix` too")
    parser.addoption("--target", choices=("gpu", "tpu"), help="trace every test for a platform that need not be here")


def pytest_configure(config: pytest.Config) -> None:
    """Choose devices before the first test initialises a backend."""
    marks = config.option.markexpr
    if "gpu" not in marks or "not gpu" in marks:
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = (
            "cpu"  # of the processes that tests start; a CUDA plugin without a driver fails there
        )
    jax.config.update("jax_num_cpu_devices", 8)
    programs = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
        "jax_compilation_cache_max_size": 2**31,  # a limit also makes writers take a lock (xdist)
        # Most of the time of a run is compiling; without LLVM's expensive passes a third less.
        "jax_disable_most_optimizations": True,
    }
    for name, value in programs.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the processes that tests start
    # Without the newer emitters of fusions another third less; jaxlib 0.11 has no such flag, and it ends the process there.
    if jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()
    # jax_numpy_rank_promotion stays "allow": ops broadcast [D] over [B, T, D] and [T, S] over [B, T, S] on purpose.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `matrix` out unless they are asked for."""
    left = [] if config.getoption("--matrix") else [item for item in items if item.get_closest_marker("matrix")]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    # All checks of one family beside each other: they share its checkpoint and its compiled programs.
    here = [i for i, item in enumerate(items) if item.path.name == "test_families.py" and "name" in _values(item)]
    by_family = sorted((items[i] for i in here), key=lambda item: _values(item)["name"])
    for i, item in zip(here, by_family, strict=True):
        items[i] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage less often, and not among what was imported: it took a fifth of a late worker's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _values(item: pytest.Item) -> dict[str, Any]:
    """The values of a parametrised test."""
    return getattr(getattr(item, "callspec", None), "params", {})


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none, and those of the CPU's own ways with `--target`; say so."""
    from fdel.ops.platform import target

    mark = item.get_closest_marker("of_cpu")
    if mark and item.config.getoption("--target"):
        pytest.skip(mark.args[0])
    if item.get_closest_marker("gpu") and target() != "gpu":
        pytest.skip(f"needs a GPU (run `pytest -m gpu` on a machine with one); found {target()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Run a test and its fixtures for `--target`, with the references of operations whose kernels do not run here."""
    from fdel.ops import dispatch
    from fdel.ops.platform import tracing_for

    faked = item.config.getoption("--target")
    references = {op: "xla" for op, table in dispatch.TABLES.items() if "xla" in table.implementations}
    with ExitStack() as stack:
        if faked:
            stack.enter_context(tracing_for(faked))
            stack.enter_context(dispatch.use(**references))
        return (yield)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs before a process has so many that the next one cannot be mapped, which is a segfault."""
    place = lambda x: (x.path, _values(x).get("name"))  # what a family compiles, no other one uses
    leaving = nextitem is not None and (place(nextitem) != place(item) or item.get_closest_marker("matrix"))
    if leaving and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()
