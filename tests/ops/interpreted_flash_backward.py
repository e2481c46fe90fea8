"""A process that interprets the backward pass of attention on Hopper: prints the largest errors against float64.

Of the cases whose numbers are named, with a detector of races; `race` plants one. Each line has the errors of dq, dk, dv
(and of dsinks), relative to the largest number of each; see `interpreted_pages`.
"""

import math
import sys
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import flash_backward_gpu as kernel
from fdel.ops.mask import NEG, Where


class Drawn(NamedTuple):
    """Query heads, key heads, channels of keys and of values, tokens; where sequences of the first row begin."""

    heads: int
    kv_heads: int
    width: int
    values: int
    tokens: int
    begins: tuple[int, ...]
    mask: ops.Mask
    sinks: bool = False
    parts: int = 1  # of a row, each with its queries and its keys
    hidden: bool = False  # some keys are of no segment, and queries have two
    dtype: Any = jnp.bfloat16
    rows: int = 2
    ahead: bool = False  # some tokens see later ones
    ordered: bool = False  # sums of dq, where the kernel would add them up in memory


CASES = [
    Drawn(2, 1, 64, 64, 80, (0, 30, 33), ops.Mask(0.2, window=40, softcap=15.0), sinks=True, rows=1),
    Drawn(4, 2, 64, 64, 200, (0, 70, 75, 130), ops.Mask(0.2, softcap=15.0), sinks=True),
    Drawn(2, 1, 128, 128, 150, (0, 90), ops.Mask(0.1, window=50), ahead=True),
    Drawn(1, 1, 256, 256, 140, (0,), ops.Mask(0.06, window=40, softcap=10.0), dtype=jnp.float16),
    Drawn(2, 2, 192, 128, 130, (0, 60), ops.Mask(0.07)),
    Drawn(2, 1, 64, 64, 260, (0, 100), ops.Mask(0.2, causal=False, window=30)),
    Drawn(2, 1, 64, 64, 256, (0, 200), ops.Mask(0.2), parts=2),
    Drawn(2, 1, 64, 64, 200, (0, 64), ops.Mask(0.2, causal=False), hidden=True, sinks=True),
    Drawn(4, 2, 128, 128, 200, (0, 70, 75, 130), ops.Mask(0.1, window=60), sinks=True, dtype=jnp.float16),
    Drawn(2, 1, 128, 128, 256, (0, 200), ops.Mask(0.1), parts=2),
    Drawn(2, 1, 128, 128, 150, (0, 90), ops.Mask(0.1, window=50), ahead=True, ordered=True),
    Drawn(2, 1, 128, 128, 200, (0, 64), ops.Mask(0.1, causal=False, softcap=15.0), hidden=True, sinks=True),
]
# What is left out to plant a race: a case, and waits for barriers or for copies to memory, in the order of tracing.
RACES = {
    # The first 64 keys' probabilities. Before: free, of the group that copies; keys, copied, two taken, of the one with
    # scores; keys, copied.
    "race": (0, "barrier_wait", (8,)),
    # Gradients of scores, written while products read them. Before: free; keys, copied, of the first group.
    "race, gradients of scores": (2, "barrier_wait", (4,)),
    "race, gradients on their way to memory": (2, "wait_smem_to_gmem", (1, 2, 4, 5)),
}


def sight(c: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Segments of queries [2 T] or [2 T 2] and of keys [2 T]; the second row is one sequence and padding."""
    q = np.full((2, c.tokens), -1, np.int32)
    for i, begin in enumerate(c.begins):
        q[0, begin:] = i
    q[0, -9:] = -1
    q[1, :-50] = 7
    if not c.hidden:
        return q[: c.rows], q[: c.rows]
    k = q.copy()
    k[:, 20:50], k[0, 64:] = (
        -3,
        -3,
    )  # so that queries of the first row's second sequence see one key of another, or none
    second = np.where((np.arange(c.tokens) % 3 == 0) & (q == 1), 0, q)
    return np.stack([q, second], -1), k


def ahead(c: Drawn) -> np.ndarray:
    """How many later tokens each sees."""
    return np.arange(c.tokens) * 7 % 4 * c.ahead


def formula(c: Drawn, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp of all pairs, in the dtype of q; 0 and `NEG` where nothing is seen."""
    qs, ks = sight(c)
    seen = (qs.reshape(c.rows, c.tokens, 1, -1) == ks[:, None, :, None]).any(-1)
    distance = np.arange(c.tokens)[:, None] - np.arange(c.tokens)
    seen &= distance + ahead(c)[:, None] >= 0 if c.mask.causal else True
    seen &= np.abs(distance) < (c.mask.window or math.inf)
    k, v = (jnp.repeat(x, c.heads // c.kv_heads, 2) for x in (k, v))
    s = jnp.einsum("bqnh,bknh->bnqk", q, k) * c.mask.scale
    s = s if c.mask.softcap is None else c.mask.softcap * jnp.tanh(s / c.mask.softcap)
    s = jnp.where(seen[:, None], s, -jnp.inf)
    s = s if sinks is None else jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], 3)
    any_seen = jnp.isfinite(s).any(-1)
    safe = jnp.where(any_seen[..., None], s, 0.0)
    lse = jax.nn.logsumexp(safe, -1)
    p = jnp.where(jnp.isfinite(s), jnp.exp(s - lse[..., None]), 0)[..., : c.tokens]
    return jnp.einsum("bnqk,bknh->bqnh", p, v), jnp.where(any_seen, lse, NEG).swapaxes(1, 2)


def errors(c: Drawn) -> list[float]:
    """Relative to the largest of each gradient; NaN if any number is."""
    r = np.random.default_rng(0)
    half = lambda *shape: np.asarray(jnp.asarray(r.normal(size=shape), c.dtype), np.float64)
    rows = c.rows, c.tokens
    q, k = half(*rows, c.heads, c.width), half(*rows, c.kv_heads, c.width)
    v, dout = half(*rows, c.kv_heads, c.values), half(*rows, c.heads, c.values)
    dlse, sinks = r.normal(size=(*rows, c.heads)), r.normal(size=c.heads) if c.sinks else None
    with jax.enable_x64(True):
        inputs = tuple(map(jnp.asarray, (q, k, v, *([] if sinks is None else [sinks]))))
        call = lambda *x: formula(c, *x[:3], x[3] if c.sinks else None)
        (out, lse), vjp = jax.vjp(call, *inputs)
        want = [np.asarray(x) for x in vjp((jnp.asarray(dout), jnp.asarray(dlse)))]
        out, lse = np.asarray(out), np.asarray(lse)
    found = [np.zeros(x.shape) for x in want]
    half_of = lambda x: jnp.asarray(x, c.dtype)
    size = c.tokens // c.parts
    qs, ks = sight(c)
    for i in range(c.parts):
        for j in range(c.parts):
            a, b = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            where = Where(jnp.asarray(qs[:, a]), None if c.parts == 1 and not c.hidden else jnp.asarray(ks[:, b]),
                          *([] if c.parts == 1 else [jnp.int32(i * size), jnp.int32(j * size)]))  # fmt: skip
            if c.ahead:
                where = replace(where, ahead=jnp.tile(jnp.asarray(ahead(c), jnp.int32), (c.rows, 1)))
            single = lambda x: jnp.asarray(x, jnp.float32)
            given = half_of(q[:, a]), half_of(k[:, b]), half_of(v[:, b])
            after = half_of(out[:, a]), single(lse[:, a]), half_of(dout[:, a]), single(dlse[:, a])
            with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
                sink = None if sinks is None else single(sinks)
                got = kernel.backward(c.mask, *given, where, sink, None, *after, ordered=c.ordered, interpreted=True)
            for to, some, x in zip(found, (a, b, b), got[:3], strict=False):
                to[:, some] += np.asarray(x, np.float64)
            if sinks is not None:
                found[3] += np.asarray(got[3], np.float64)
    return [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(found, want, strict=True)]


def add_in_memory() -> None:
    """Have the interpreter copy to memory with `reduction_op` "add", which it refuses: read, add and write at once.

    What is read of shared memory is looked at for races as in any copy; additions to memory race with nothing.
    """
    copy, plain, lock = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask, threading.Lock()

    class Added(plain):
        def post_read(self, tma_thread_id, shared_memory):
            if shared_memory.detect_races:
                self.clock.inc(tma_thread_id)
                self.write_clock = self.clock.copy()

        def __call__(self, tma_thread_id):
            memory, logged = gpu_callbacks._get_shared_memory(), {"logging_info": self.logging_info}
            self.pre_read(tma_thread_id, memory)
            read = lambda *where: memory.get_buffer_content(*where, self.thread, **logged)[0]
            to = self.dst_allocation_key, self.dst_access
            value = read(self.src_allocation_key, self.src_access) + read(*to)
            self.post_read(tma_thread_id, memory)
            memory.store_buffer_content(*to, value, self.thread, **logged)
            self.post_write(tma_thread_id, memory)

    def some(*, reduction_op, **how):
        assert reduction_op in (None, "add")
        with lock:  # a copy is done when the call returns
            gpu_callbacks.AsyncCopySmemToGmemTask = plain if reduction_op is None else Added
            return copy(reduction_op=None, **how)

    gpu_callbacks.copy_smem_to_gmem = some


def watch_products() -> None:
    """Have the interpreter look for races of what products read of shared memory, as TMA reads; it does not by itself."""
    multiply = gpu_callbacks.wgmma

    def watched(*, thread, a_allocation_key_as_array, a_transforms, b_allocation_key_as_array, b_transforms, **how):
        memory = gpu_callbacks._get_shared_memory()
        sides = (a_allocation_key_as_array, a_transforms), (b_allocation_key_as_array, b_transforms)
        if memory.detect_races:
            memory.incr_clock(thread)
            with memory.lock:  # a product is done when the call returns
                memory.clocks[thread].async_smem_clock.inc(memory.thread_to_vc_position(thread))
                clock = memory.clocks[thread].async_smem_clock.copy()
            for key, transforms in sides:
                key = gpu_callbacks.HostAllocationKey.from_array(key)
                transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
                gpu_callbacks.get_races().check_read(
                    thread, clock, key, memory.access(key, transforms), source_info=how.get("source_info")
                )
        (a, a_how), (b, b_how) = sides
        return multiply(thread=thread, a_allocation_key_as_array=a, a_transforms=a_how, b_allocation_key_as_array=b,
                        b_transforms=b_how, **how)  # fmt: skip

    gpu_callbacks.wgmma = watched


def plant_a_race(name: str, left_out: tuple[int, ...]) -> None:
    """Leave out some of the waits of a name."""
    wait, calls = getattr(mosaic_gpu, name), []

    def some(*args, **how):
        calls.append(args)
        if len(calls) not in left_out:
            wait(*args, **how)

    setattr(mosaic_gpu, name, some)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # threads, of which each group of warps that waits holds one
    add_in_memory()
    watch_products()
    if sys.argv[1] in RACES:
        case, *wait = RACES[sys.argv[1]]
        plant_a_race(*wait)
        print(*errors(CASES[case]))
    else:
        for i in map(int, sys.argv[1:]):
            print(*errors(CASES[i]), flush=True)
