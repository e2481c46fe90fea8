"""A process that interprets the backward pass of attention on Hopper: prints the largest errors against float64.

Of the cases whose numbers are named, with a detector of races; `race` plants one. Each line has the errors of dq, dk, dv
(and of dsinks), relative to the largest number of each; see `interpreted_pages`.
"""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import flash_backward_gpu as kernel
from tests.ops.flash_cases import Drawn, errors

ORDERED = (10,)  # of the cases: with dq in a kernel of its own, where it would be added up in memory
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
    Drawn(2, 1, 128, 128, 150, (0, 90), ops.Mask(0.1, window=50), ahead=True),
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


def backward(*args, ordered):
    """Call the kernel, with a detector of races."""
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        return kernel.backward(*args, ordered=ordered, interpreted=True)


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
    run = lambda case: print(*errors(CASES[case], functools.partial(backward, ordered=case in ORDERED)), flush=True)
    if sys.argv[1] in RACES:
        case, *wait = RACES[sys.argv[1]]
        plant_a_race(*wait)
        run(case)
    else:
        for i in map(int, sys.argv[1:]):
            run(i)
