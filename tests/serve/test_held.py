"""Pictures of sizes whose program is not compiled: who shows one waits for it, all others go on."""

import re
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from fdel import serve
from fdel.serve.engine import pictures
from fdel.serve.engine.held import Held
from fdel.serve.engine.pictures import rounded
from tests.serve import test_sight
from tests.serve.test_sight import engine, naive, picture, prompt

model = test_sight.model
LONG = serve.SamplingParams(max_tokens=60, ignore_eos=True)
FEW = serve.SamplingParams(max_tokens=5, ignore_eos=True)
TEXT = [20, 30, 40]
PATCHES = 36  # of the picture for whose size the tower is compiled first
WAIT = 60  # seconds, of which a test that passes needs few


class Gate:
    """What compiles the programs of an engine's tower: not before it is told to, and what it compiles."""

    def __init__(self, device):
        self.begun, self.open, self.fails, self.sizes = threading.Event(), threading.Event(), None, []
        self.make, device.compiler = device.compiler, self.compiler

    def compiler(self, *size):
        compile = self.make(*size)

        def run():
            self.sizes.append(size)
            self.begun.set()
            assert self.open.wait(WAIT)
            if self.fails:
                raise self.fails
            compile()

        return run

    def reset(self):
        for event in (self.begun, self.open):
            event.clear()
        self.fails = None
        self.sizes.clear()


@pytest.fixture(scope="module")
def started(model):
    """An engine whose thread runs, with the largest programs alone, and a gate before all others, of 8 patches, 16, ..."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "rounded", lambda count, least=8: rounded(count, least))
        yield from running(model)


def running(model):
    e = engine(model)
    e._core.device.complete = lambda: None
    gate = Gate(e._core.device)
    e.start()
    yield e, gate
    gate.open.set()
    e.close()


@pytest.fixture
def compiled(caplog):
    """The functions that XLA has compiled since, in whichever thread."""
    jax.config.update("jax_log_compiles", True)
    of = lambda: (re.match(r"Finished XLA compilation of jit\((\w+)\)", r.getMessage()) for r in caplog.records)
    with caplog.at_level("WARNING"):
        yield lambda: [found[1] for found in of() if found]
    jax.config.update("jax_log_compiles", False)


@pytest.fixture
def eye(started):
    started[1].reset()
    yield started
    started[1].open.set()
    wait(started[0], lambda: started[0]._core.held.compiling is None)


def wait(e, done) -> None:
    end = time.monotonic() + WAIT
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def ask(e, shown, sampling=FEW, **how):
    return e.submit_all([shown[0]], sampling, media=[shown[1]], **how)


def ended(e, *jobs) -> list:
    assert e.wait(lambda: all(job.reply.finish_reason for job in jobs), WAIT)
    return [job.reply.finish_reason for job in jobs]


@pytest.mark.slow
def test_who_shows_a_new_size_waits_alone(eye, model, compiled) -> None:
    """A text is answered, and a picture of a known size, while the program compiles; then the new one is, as it should."""
    e, gate = eye
    new, known = prompt(5, picture(1, 70), 7), prompt(4, picture(2, PATCHES), 3)
    want = naive(model, *new, 5), naive(model, *known, 5)
    rest = len(e._core.device.uncompiled)
    assert PATCHES in e._core.device.usable["encode"] and e.stats()["to compile"] == rest
    (held,) = ask(e, new)
    assert gate.begun.wait(WAIT) and gate.sizes == [("encode", 72)]
    text, (other,) = e.submit(TEXT, LONG), ask(e, known)
    assert ended(e, text, other) == ["length"] * 2 and len(text.reply.tokens) == 60 and other.reply.tokens == want[1]
    assert not held.reply.tokens and held.reply.finish_reason is None
    assert e.stats()["waiting"] == 1 and e.stats()["to compile"] == 1 + rest
    gate.open.set()
    assert ended(e, held) == ["length"] and held.reply.tokens == want[0]
    assert ended(e, *ask(e, prompt(5, picture(3, 68), 7))) == ["length"]
    assert [name for name in compiled() if name != "step"] == ["encode"] and gate.sizes == [("encode", 72)]
    assert e.stats()["waiting"] == 0 and e.stats()["to compile"] == rest


@pytest.mark.slow
def test_who_leaves_while_it_compiles_holds_nobody_up(eye, model) -> None:
    """The first of two outputs, and a request for a size that nobody else needs: that is not compiled."""
    e, gate = eye
    new, left = prompt(5, picture(4, 10), 7), prompt(5, picture(5, 20), 7)
    first, second = ask(e, new, serve.SamplingParams(max_tokens=5, ignore_eos=True, n=2, temperature=0.5, seed=1))
    (gone,) = ask(e, left)
    assert gate.begun.wait(WAIT)
    for job in (first, gone):
        e.abort(job)
    assert ended(e, first, gone) == ["abort"] * 2 and second.reply.finish_reason is None
    gate.open.set()
    assert ended(e, second) == ["length"] and gate.sizes == [("encode", 16)]
    assert e.stats()["waiting"] == 0


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_fails_who_needs_it(eye, model) -> None:
    """With what was wrong; others go on, and the next request has it compiled again."""
    e, gate = eye
    gate.fails = RuntimeError("no memory for this")
    both = prompt(3, picture(6, 44), 4, picture(7, PATCHES), 2)
    (held,) = ask(e, both)
    text = e.submit(TEXT, LONG)
    assert gate.begun.wait(WAIT)
    gate.open.set()
    assert ended(e, held, text) == ["error", "length"]
    assert "encodes 48 patches could not be compiled: RuntimeError: no memory for this" in held.reply.error
    assert held.reply.tokens == [] and e.stats()["faults"] == 0 and e.stats()["waiting"] == 0
    gate.fails = None
    (again,) = ask(e, both)
    assert ended(e, again) == ["length"] and again.reply.tokens == naive(model, *both, 5)
    assert gate.sizes == [("encode", 48)] * 2


@pytest.mark.slow
def test_nothing_compiles_while_the_engine_sleeps(eye, model) -> None:
    """One that is being compiled goes on; the next is begun when the engine wakes."""
    e, gate = eye
    shown = [prompt(5, picture(8, n), 7) for n in (80, 90)]
    e.pause()
    jobs = [ask(e, s)[0] for s in shown]
    assert gate.begun.wait(WAIT)
    e.sleep()
    gate.open.set()
    wait(e, lambda: e._core.held.compiling is None)
    assert gate.sizes == [("encode", 80)] and len(e._core.held.jobs) == 1
    e.wake()
    assert ended(e, *jobs) == ["length"] * 2 and gate.sizes == [("encode", 80), ("encode", 96)]


@pytest.mark.slow
def test_an_engine_closes_while_it_compiles(model) -> None:
    """At once: who waits is told its end, and the thread leaves nothing behind."""
    e = engine(model)
    e._core.device.complete = lambda: None
    gate = Gate(e._core.device)
    e.start()
    (held,) = ask(e, prompt(5, picture(9, 100), 7))  # of a size of its own: programs are kept for the process
    assert gate.begun.wait(WAIT)
    e.close()
    assert held.reply.finish_reason == "abort" and e._core.held.jobs == {}
    gate.open.set()
    wait(e, lambda: not [t for t in threading.enumerate() if t.name == "fdel-compiler"])
    with pytest.raises(RuntimeError, match="the engine is closed"):
        e.submit(TEXT)


# ---- who comes next ------------------------------------------------------------------------------------------------


def job(id: int, key: str, priority: int = 0):
    return SimpleNamespace(request=SimpleNamespace(id=id, key=key, priority=priority))


def test_sizes_of_many_hold_up_another_by_one() -> None:
    """A client that sends 1,000 sizes is next when nobody else is; a higher priority is before both."""
    held, order = Held(), []
    for i in range(1000):
        held.jobs[i] = job(i, "many"), {("encode", 64 * (i + 1))}
    assert held.next() == ("encode", 64) and held.next() is None and len(held.sizes) == 1000
    held.jobs[1000] = job(1000, "few"), {("encode", 64), ("hear", 4)}
    held.jobs[1001] = job(1001, "few"), {("encode", 9)}
    held.jobs[1002] = job(1002, "first", 1), {("hear", 8)}
    size = ("encode", 64)
    for _ in range(5):
        for j in held.done(size):
            sizes = held.jobs[j.request.id][1]
            sizes.remove(size)
            if not sizes:
                del held.jobs[j.request.id]
        size = held.next()
        order.append(size)
    assert order == [("hear", 8), ("hear", 4), ("encode", 128), ("encode", 9), ("encode", 192)]
    held.done(size)
    held.jobs.clear()
    assert held.next() is None and not held.times


def test_there_are_few_sizes() -> None:
    """However many pictures come: 16, and 8 for each doubling beyond 1,024 patches; of sounds beyond 64 chunks."""
    assert [len({rounded(n) for n in range(1, most + 1)}) for most in (1024, 2048, 2**17)] == [16, 24, 72]
    assert [len({rounded(n, 4) for n in range(1, most + 1)}) for most in (64, 128, 2**10)] == [16, 24, 48]
