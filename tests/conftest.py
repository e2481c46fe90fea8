"""Settings of every test: eight virtual CPU devices, a compilation cache between runs, GPU tests only on request."""

import gc
import os
from pathlib import Path

import hypothesis
import jax
import pytest

MAPPINGS = Path("/proc/self/maps")  # Linux gives a process 65,530; each compiled program takes ten or more

hypothesis.settings.register_profile("fdel", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fdel")


def pytest_configure(config: pytest.Config) -> None:
    """Choose devices before the first test initialises a backend."""
    marks = config.option.markexpr
    if "gpu" not in marks or "not gpu" in marks:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_compilation_cache_max_size", 2**31)  # a limit also makes writers take a lock (xdist)
    # Most of the time of a run is compiling; without LLVM's expensive passes a third less.
    jax.config.update("jax_disable_most_optimizations", True)
    # Without the newer emitters of fusions another third less; jaxlib 0.11 has no such flag, and it ends the process there.
    if jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()
    # jax_numpy_rank_promotion stays "allow": ops broadcast [D] over [B, T, D] and [T, S] over [B, T, S] on purpose.


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none, and say so."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU (run `pytest -m gpu` on a machine with one); found {jax.default_backend()}")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs before a process has so many that the next one cannot be mapped, which is a segfault."""
    leaving = nextitem is not None and nextitem.path != item.path
    if leaving and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()
