"""Child processes for what texts of strangers cost: a job that is too much ends alone, and leaves nothing behind."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fdel import text
from fdel.serve.server import grammar, limits, openai, worker_pool
from fdel.serve.server.openai import APIError
from fdel.serve.server.tokenizing import PromptEncoder
from tests.serve import small

wire = pytest.importorskip("tests.serve.wire", reason="needs the serve extra")

CONTEXT, MESSAGES = small.CONTEXT, [{"role": "user", "content": "the weather"}]
ENDLESS = {"kind": "regex", "body": "a?" * 40_000}  # 10 s


def texts(template: str = wire.TEMPLATE) -> PromptEncoder:
    tok = dataclasses.replace(wire.tokenizer(), templates={"default": template})
    return PromptEncoder(tok, CONTEXT, small.VOCAB)


def asking(messages=MESSAGES) -> openai.Chat:
    return openai.Chat("m", messages, openai.request.SamplingParams())


@contextlib.asynccontextmanager
async def children(own: PromptEncoder | None = None):
    found = worker_pool.WorkerPool({"m": (own or texts()).facts()})
    try:
        yield found
    finally:
        found.close()
        await found.ended()


def compiling(found: worker_pool.WorkerPool, who: str = "a", **asked):
    return found.ask(who, "compile", "m", large=True, **asked)


async def refused(work, status: int = 400) -> str:
    with pytest.raises(APIError) as e:
        await work
    assert e.value.status == status, e.value.message
    return e.value.message


def pids(found: worker_pool.WorkerPool) -> list[int]:
    """The forking process and its children."""
    own = found.process.pid
    return [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


# ---- grammars ------------------------------------------------------------------------------------------------------


def chained(n: int, link, last) -> str:
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": links | {f"d{n}": last}})


def nested(n: int, before: str, inside: str, after: str) -> str:
    return before * n + inside + after * n


# name -> (kind, the body of a chain of n references or of n levels)
STRING = {"type": "string"}
CHAINS = {
    "arrays": ("json_schema", lambda n: chained(n, lambda r: {"type": "array", "items": r}, STRING)),
    "choices": ("json_schema", lambda n: chained(n, lambda r: {"anyOf": [r, {"type": "null"}]}, STRING)),
    "references": ("json_schema", lambda n: chained(n, lambda r: r, STRING)),
    "objects": ("json_schema", lambda n: chained(
        n, lambda r: {"type": "object", "properties": {"a": r}, "required": ["a"]}, STRING)),
    "rules": ("lark", lambda n: "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1} | "c"' for i in range(n)), f'r{n}: "b"'])),
    "terminals": ("lark", lambda n: "\n".join(["start: T0", *(f"T{i}: T{i + 1}" for i in range(n)), f'T{n}: "b"'])),
    "groups": ("regex", lambda n: nested(n, "(", "a", ")")),
    "nested objects": ("json_schema", lambda n: nested(
        n, '{"type": "object", "required": ["a"], "properties": {"a": ', '{"type": "string"}', "}}")),
    "nested arrays": ("json_schema", lambda n: nested(n, '{"type": "array", "items": ', '{"type": "string"}', "}")),
}  # fmt: skip


def test_chains_cost_one_request():
    """In the server's own process the first would have ended it."""

    async def main():
        async with children() as found:
            for name, (kind, body) in CHAINS.items():
                message = await refused(compiling(found, kind=kind, body=body(6000)))
                assert "cannot be used" in message, name
                await compiling(found, kind="regex", body="[abc]+")

    asyncio.run(main())


@pytest.mark.parametrize("name", CHAINS)
def test_chains_that_compile_need_little_stack_per_token(name):
    """A trial lets at most 1,500 links through; the engine's thread has 32 times the stack of this one."""
    kind, body = CHAINS[name]
    n = 60 if kind == "regex" or name.startswith("nested") else 2000
    matcher = grammar.compile(texts().vocabulary, grammar.Spec(kind, body(n)))
    steps: list[int] = []

    def follow() -> None:
        for _ in range(64):
            if not matcher.done:
                allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
                matcher.commit(int(allowed[0]))
            steps.append(len(matcher.tokens))

    before = threading.stack_size(2**18)
    thread = threading.Thread(target=follow)
    thread.start()
    threading.stack_size(before)
    thread.join()
    assert len(steps) == 64 and steps[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arrays", "objects", "rules", "terminals"])
def test_the_longest_chain_fits_the_stack(name):
    """What Python callers compile in their own process: refused or compiled, and nothing ends."""
    kind, body = CHAINS[name]
    n = 10_000
    while len(body(n)) < 0.95 * grammar.MAX_CHARS:
        n = int(n * 1.04)
    code = f"""
import sys
from fdel.serve.server import grammar
from tests.serve.test_worker_pool import CHAINS, texts
try:
    grammar.compile(texts().vocabulary, grammar.Spec({kind!r}, CHAINS[{name!r}][1]({n})[:grammar.MAX_CHARS]))
except ValueError as e:
    print(str(e)[:200])
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "alive" in done.stdout, (n, done.stdout, done.stderr[-500:])


# ---- what a job may cost -------------------------------------------------------------------------------------------


def test_a_deadline(monkeypatch):
    monkeypatch.setitem(worker_pool.CPU, "compile", 0.3)
    monkeypatch.setattr(worker_pool, "WALL", 300.0)  # a busy machine gives it 0.3 seconds of a processor late

    async def main():
        async with children() as found:
            assert "too much time: 0.3 seconds of processor time are spent" in await refused(
                compiling(found, **ENDLESS)
            )
            monkeypatch.setitem(worker_pool.CPU, "compile", 60.0)
            monkeypatch.setattr(worker_pool, "WALL", 0.3)
            assert "too much time" in await refused(compiling(found, **ENDLESS))
            monkeypatch.setattr(worker_pool, "WALL", 20.0)
            await compiling(found, kind="regex", body="a")

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has a policy for what gives way to all others")
@pytest.mark.parametrize("large", [True, False])
def test_long_jobs_give_way_to_the_engine(large, monkeypatch):
    """Large ones from the start, small ones after LIGHT seconds; such a child is not used again for small ones."""
    monkeypatch.setitem(worker_pool.CPU, "compile", 60.0)
    monkeypatch.setattr(worker_pool, "LIGHT", 2.0)  # a short job takes less, though others load the machine

    async def main():
        async with children() as found:
            await found.ask("a", "compile", "m", large=large, kind="regex", body="a")
            [_, child] = pids(found)
            assert os.sched_getscheduler(child) == (os.SCHED_IDLE if large else os.SCHED_OTHER)
            assert os.getsid(child) == os.getsid(
                0
            )  # Linux shares time out by sessions first, whatever their priorities
            work = asyncio.create_task(found.ask("a", "compile", "m", large=large, **ENDLESS))
            await until(lambda: not found.heavy.idle if large else os.sched_getscheduler(child) == os.SCHED_IDLE)
            work.cancel()
            await until(lambda: not running(child))
            await found.ask("a", "compile", "m", kind="regex", body="a")
            assert {os.sched_getscheduler(p) for p in pids(found)} == {os.SCHED_OTHER}

    asyncio.run(main())


BOMBS = {
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "tilde": "{% set n = namespace(a='aaaaaaaa') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "replace": "{% set n = namespace(a='a' * 99999) %}"
    "{% for i in range(9) %}{% set n.a = n.a | replace('a', 'aaaaaaaaaa') %}{% endfor %}",
    "join": "{% set n = namespace(a=['a' * 9999] * 999) %}{% for i in range(999) %}"
    "{% set x = n.a | join(n.a | join('a')) %}{% endfor %}",
    "tojson": "{% for i in range(99) %}{% set x = (range(99999) | list) | tojson(indent=999999) %}{% endfor %}",
    "lipsum": "{% for i in range(99999) %}{% set x = lipsum(999) %}{% endfor %}",
    "constants": "{{ 'a' * 99999999 * 99 }}",
    "power": "{{ (10 ** 99999) ** 99999 }}",
    "format": "{{ '%9999999999s' % 'a' }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_templates_are_bounded(name, monkeypatch):
    monkeypatch.setitem(worker_pool.CPU, "chat", 1.0)

    async def main():
        async with children(texts(BOMBS[name])) as found:
            await refused(found.chat("a", "m", asking()))
            assert await found.encode("a", "m", ["the music"])

    asyncio.run(main())


def test_a_tokenizer_that_panics(tmp_path):
    """A BaseException of Rust, which no handler expects."""
    layout = json.loads(wire.tokenizer().backend.to_str())
    second = [{"Sequence": {"id": "B", "type_id": 0}}]
    layout["post_processor"] = {"type": "TemplateProcessing", "single": second, "pair": second, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    damaged = text.load(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer failed"):
        text.encode(damaged, "ab")

    async def main():
        async with children(PromptEncoder(damaged, CONTEXT, small.VOCAB)) as found:
            assert "damaged" in await refused(found.encode("a", "m", ["ab"]))

    asyncio.run(main())


@pytest.mark.slow
def test_large_bodies_are_counted():
    """By values, not by bytes; those of JSON inside of strings as well."""

    async def main():
        async with children() as found:
            check = lambda data: found.ask("a", "check", data=data, large=True)
            await check(b'{"a": "' + b"x" * 2**22 + b'"}')
            many = lambda item: b'{"a": [' + b",".join([item] * 2**20) + b"]}"
            inside = json.dumps({"a": json.dumps([[]] * 2**20)}).encode()
            for body in (many(b"{}"), many(b"[]"), many(b"1"), inside):
                begin = time.process_time()
                assert "more than 300,000 values" in await refused(check(body))
                assert time.process_time() - begin < 1
            assert "twice" in await refused(check(b'{"a": 1, "b": "' + b"x" * 2**17 + b'", "a": 1}'))

    asyncio.run(main())


def test_the_reason_is_told(monkeypatch):
    """Memory and depth, by the way the child ended; `test_a_deadline` has time."""
    small_memory = worker_pool._CODE.replace("worker.main", "worker.MEMORY = 2**23; worker.main")
    monkeypatch.setattr(worker_pool, "_CODE", small_memory)

    async def main():
        async with children() as found:
            many = b'{"a": [' + b",".join([b"[]"] * 290_000) + b"]}"
            assert "the body cannot be used: it needs too much memory" in await refused(
                found.ask("a", "check", data=many)
            )
            assert await found.encode("a", "m", ["the music"])
        monkeypatch.undo()
        async with children() as found:
            kind, body = CHAINS["arrays"]
            assert "it is nested too deep" in await refused(compiling(found, kind=kind, body=body(6000)))

    asyncio.run(main())


# ---- what is left of it --------------------------------------------------------------------------------------------


def test_another_child_is_forked_for_one_that_ends_as_it_starts(monkeypatch):
    """Once: if none starts, the server is unavailable."""
    read, left = worker_pool._Child.read, [1]

    async def some(child, size):
        if left[0]:
            left[0] -= 1
            raise EOFError
        return await read(child, size)

    async def main():
        async with children() as found:
            assert await found.encode("a", "m", ["b"])
            found.light.idle.clear()
            left[0] = 2
            await refused(found.encode("a", "m", ["b"]), 503)

    monkeypatch.setattr(worker_pool._Child, "read", some)
    asyncio.run(main())


@pytest.mark.slow
def test_another_child_takes_over():
    """From one that was killed at work or at rest, and from the process that forks."""

    async def main():
        async with children() as found:
            await found.encode("a", "m", ["b"])
            os.kill(idle := pids(found)[1], signal.SIGKILL)
            await until(lambda: not running(idle))
            assert await found.encode("a", "m", ["b"])
            job = asyncio.ensure_future(compiling(found, **ENDLESS))
            await until(lambda: len(pids(found)) == 3)
            await asyncio.sleep(0.1)
            os.kill(pids(found)[2], signal.SIGKILL)
            assert "too much time" in await refused(job)  # another child did the job, which is too much for it
            os.kill(found.process.pid, signal.SIGKILL)
            found.process.wait()
            await compiling(found, kind="regex", body="a")
            assert await found.encode("b", "m", ["b"])

    asyncio.run(main())


def test_a_child_that_is_killed_from_outside_costs_nothing(monkeypatch):
    """Between the look at it and its job: another does that. If it ends too, the client may try again."""

    async def main():
        async with children() as found:
            want = await found.encode("a", "m", ["the music"])
            look = worker_pool._Child.alive

            def killed(child: worker_pool._Child) -> bool:
                alive = look(child)
                os.kill(pids(found)[1], signal.SIGKILL)
                return alive

            monkeypatch.setattr(worker_pool._Child, "alive", killed)
            assert await found.encode("a", "m", ["the music"]) == want
            monkeypatch.setattr(worker_pool._Child, "alive", look)
            known = set(pids(found))
            job = asyncio.ensure_future(compiling(found, **ENDLESS))
            for _ in range(2):
                await until(lambda: set(pids(found)) - known)
                (busy,) = set(pids(found)) - known
                await asyncio.sleep(0.3)
                os.kill(busy, signal.SIGKILL)
                known.add(busy)
            with pytest.raises(APIError, match="try again") as e:
                await job
            assert e.value.status == 503 and e.value.headers == {"Retry-After": "1"} and e.value.code == "unavailable"
            assert await found.encode("a", "m", ["the music"]) == want

    asyncio.run(main())


def test_who_hangs_up_frees_the_child_at_once():
    async def main():
        async with children() as found:
            await found.encode("a", "m", ["b"])
            job = asyncio.ensure_future(compiling(found, **ENDLESS))
            await until(lambda: len(pids(found)) == 3)
            busy = pids(found)[2]
            await asyncio.sleep(0.1)
            job.cancel()
            await until(lambda: not running(busy))
            await compiling(found, kind="regex", body="a")

    asyncio.run(main())


def test_close_ends_what_is_under_way():
    async def main():
        async with children() as found:
            jobs = [asyncio.ensure_future(compiling(found, who, **ENDLESS)) for who in ("a", "a", "b")]
            await until(lambda: len(pids(found)) == 3)
            every = pids(found)
            found.close()
            for job in jobs:
                await refused(job, 503)
            await found.ended()
            assert not any(map(running, every))

    asyncio.run(main())


def test_nothing_outlives_a_server_that_is_killed():
    code = """
import asyncio
from tests.serve.test_worker_pool import ENDLESS, children, compiling, pids, until
async def main():
    async with children() as found:
        job = asyncio.ensure_future(compiling(found, **ENDLESS))
        await until(lambda: len(pids(found)) == 2)
        print(*pids(found), flush=True)
        await job
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    every = list(map(int, process.stdout.readline().split()))
    assert len(every) == 2 and all(map(running, every))
    process.kill()
    process.wait()
    process.stdout.close()
    wire.wait_for(lambda: not any(map(running, every)))


def test_children_inherit_no_sockets_and_no_jax():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.set_inheritable(True)
            own = os.readlink(f"/proc/self/fd/{listening.fileno()}")
            async with children() as found:
                await found.encode("a", "m", ["b"])
                for pid in pids(found):
                    held = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()]
                    assert own not in held and sum(x.startswith("socket:") for x in held) == 1
                    assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text()

    asyncio.run(main())


# ---- shares --------------------------------------------------------------------------------------------------------


def test_one_key_never_has_all_places():
    async def main():
        shares, log = limits.FairSemaphore(2, 1, waiting=2), []

        async def work(who: str, go: asyncio.Event) -> None:
            async with shares.slot(who):
                log.append(who)
                await go.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        rest.set()
        jobs = [asyncio.ensure_future(work("a", first))]
        jobs += [asyncio.ensure_future(work("a", rest)) for _ in range(2)]
        await asyncio.sleep(0)
        await refused(work("a", rest), 429)
        await work("b", rest)
        assert log == ["a", "b"]
        jobs[1].cancel()
        await asyncio.sleep(0)
        first.set()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert log == ["a", "b", "a"] and shares.free == 2 and not shares.held and not shares.waiting
        held = [shares.slot(str(i)) for i in range(2)]
        for turn in held:
            await turn.__aenter__()
        jobs = [asyncio.ensure_future(work(str(i), rest)) for i in range(8)]
        await asyncio.sleep(0)
        await refused(work("c", rest), 503)
        for turn in held:
            await turn.__aexit__(None, None, None)
        await asyncio.gather(*jobs)
        assert shares.free == 2

    asyncio.run(main())


@pytest.mark.parametrize("first", ["the turn", "the cancellation"])
def test_a_turn_that_comes_with_the_cancellation_is_given_back(first):
    async def main():
        turns = limits.FairSemaphore(1, 1)
        held = turns.slot("a")
        await held.__aenter__()
        others = [turns.slot(who) for who in ("b", "c")]
        jobs = [asyncio.ensure_future(other.__aenter__()) for other in others]
        await asyncio.sleep(0)
        if first == "the cancellation":
            jobs[0].cancel()
        await held.__aexit__(None, None, None)
        jobs[0].cancel()
        await asyncio.wait(jobs)
        assert jobs[0].cancelled() and not jobs[1].cancelled()
        assert turns.free == 0 and turns.held == {"c": 1} and not turns.waiting

    asyncio.run(main())
