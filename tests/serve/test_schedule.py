"""Scheduling over a fake model: every output equals its solo run, whatever happens to others; pages are never confused."""

import collections
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fdel.serve.engine.schedule import FEW
from fdel.serve.engine.work import NO_ROW
from tests.serve.fake import EOS, VOCAB, make_core, make_job, run, solo

PROMPTS = [[1, 2, 3], list(range(1, 10)), list(range(1, 14)), [5], [1, 2, 3, 4, 9, 9, 9, 9, 2], [8, 8, 8, 8, 8, 8, 8]]


# ---- the state machine ---------------------------------------------------------------------------------------------


class Serving(RuleBasedStateMachine):
    """Requests come, are aborted, preempted, and make steps raise, in any order."""

    overlap, drafts, step_tokens = True, 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: dict[tuple[int, ...], str] = {}  # beginnings of tokens, and what steps with them do
        fault = lambda t: next((how for p, how in self.poisoned.items() if tuple(t[: len(p)]) == p), None)
        self.core = make_core(overlap=self.overlap, drafts=self.drafts, steps=self.step_tokens, poison=fault)
        self.jobs, self.told = {}, collections.defaultdict(list)

    def tell(self, told: list) -> None:
        for job, delta in told:
            self.told[job.request.id].append(delta)

    @rule(prompt=st.sampled_from(PROMPTS), room=st.integers(1, 14), priority=st.sampled_from([0, 0, 1]),
          key=st.sampled_from("ab"), fault=st.sampled_from([None] * 8 + ["raise", "read", "nan"]))  # fmt: skip
    def add(self, prompt, room, priority, key, fault) -> None:
        id = len(self.jobs)
        leader = self.jobs[id - 1].request if id % 5 >= 3 and not hasattr(self.jobs[id - 1], "poisoned") else None
        if leader:  # another output of the same request
            prompt, key, fault, leader = leader.tokens[: leader.prompt], leader.key, None, leader.after or leader
        prompt = [*prompt, VOCAB + id] if fault else prompt
        job = self.jobs[id] = make_job(id, prompt, room, priority=priority, key=key, salt=key.encode(), after=leader)
        if fault:
            own = solo(prompt, len(prompt) + room)
            self.poisoned[tuple(prompt + own[: len(own) // 2])] = fault
            job.poisoned = len(own) // 2
        self.core.add(job)

    @rule()
    def step(self) -> None:
        self.tell(self.core.step())

    @rule(n=st.integers(1, 6))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.tell(self.core.step())

    @precondition(lambda self: self.core.jobs)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.tell(self.core.end(data.draw(st.sampled_from(sorted(self.core.jobs))), "abort"))

    @precondition(lambda self: self.core.schedule.running)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        self.core.schedule.preempt(data.draw(st.sampled_from(self.core.schedule.running)))

    @rule()
    def new_weights(self) -> None:
        self.tell(self.core.replace_weights("", None))

    @invariant()
    def pages_and_owners_agree(self) -> None:
        schedule, pool = self.core.schedule, self.core.schedule.pool
        owners = collections.Counter(p for r in schedule.running for p in r.pages)
        assert [owners[p] for p in range(pool.total)] == pool.owners
        parts = [*pool.free, *pool.idle, *owners]
        assert sorted(parts) == list(range(pool.total))
        rows = [r.row for r in schedule.running]
        assert sorted([*rows, *schedule.free]) == list(range(schedule.rows))
        for r in schedule.running:
            for i, p in enumerate(r.pages):
                assert owners[p] == 1 or (p in pool.digests and i < len(r.digests))
        assert all(r.row == NO_ROW and not r.pages for r in schedule.waiting)

    @invariant()
    def outputs_are_solo(self) -> None:
        for id, job in self.jobs.items():
            own = solo(job.request.tokens[: job.request.prompt], job.request.limit)
            tokens = [t for d in self.told[id] for t in d.tokens]
            ends = [d.finish_reason for d in self.told[id] if d.finish_reason]
            assert tokens == job.reply.tokens == own[: len(tokens)]
            assert len(ends) == (id not in self.core.jobs)
            if ends and ends[0] in ("stop", "length"):
                assert tokens == own
            if ends == ["error"]:
                assert job.reply.error.startswith(("RuntimeError", "logits")) and hasattr(job, "poisoned")

    def teardown(self) -> None:
        self.tell(run(self.core))
        self.outputs_are_solo()
        pool = self.core.schedule.pool
        assert pool.available == pool.total and not any(pool.owners)
        for id, job in self.jobs.items():
            if (end := self.told[id][-1].finish_reason) != "abort":
                assert end == ("error" if hasattr(job, "poisoned") else end)


class Plain(Serving):
    overlap = False


class Drafting(Serving):
    drafts = 2


class Many(Serving):
    step_tokens = 3


def bounded(machine: type[Serving]) -> type:
    """Its test, with as many examples as a fast test affords."""
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, phases=[Phase.explicit, Phase.generate]
    )
    return machine.TestCase


TestOverlap, TestPlain, TestDrafting, TestMany = map(bounded, (Serving, Plain, Drafting, Many))


# ---- who is next ---------------------------------------------------------------------------------------------------


def test_steps_respect_the_budget_and_decode_goes_on() -> None:
    core = make_core(pages=40, rows=4, budget=6)
    core.add(make_job(0, [1, 2, 3], 12))
    core.step()
    core.add(make_job(1, list(range(1, 31)), 4))
    told = [core.step() for _ in range(6)]
    assert all(any(job.request.id == 0 for job, _ in t) for t in told)
    assert max(n for n, _ in core.device.calls) == 6 and [n for n, _ in core.device.calls if n] == [3, 6, 6, 6, 6, 6]


def test_prompts_are_cut_finer_beside_few_sequences_that_decode() -> None:
    """Alone a prompt has the budget, beside one to FEW that decode `chunk` tokens, beside more the budget again."""
    schedule = make_core(pages=400, rows=FEW + 2, budget=40).schedule
    schedule.chunk = 4
    counts = lambda: [c.count for c in schedule.plan().chunks]

    def arrive(id: int, prompt: int) -> None:
        schedule.add(make_job(id, [id] * prompt, 90).request)

    arrive(0, 70)
    assert [counts(), counts()] == [[40], [30]]
    arrive(1, 10)
    assert [counts(), counts(), counts()] == [[4], [4], [2]]
    for i in range(2, FEW):
        arrive(i, 3)
        assert counts() == [3]
    arrive(FEW, 6)
    assert [counts(), counts()] == [[4], [2]]  # beside FEW
    arrive(FEW + 1, 50)
    assert [counts(), counts(), counts()] == [[40], [10], []]


@pytest.mark.parametrize("key, first", [("a", 40), ("b", 2)])
def test_a_prompt_of_another_key_holds_tokens_up_for_half_a_chunk(key: str, first: int) -> None:
    schedule = make_core(pages=400, rows=FEW + 2, budget=40).schedule
    schedule.chunk = 4
    for i in range(FEW + 1):
        schedule.add(make_job(i, [i], 90, key="a").request)
    assert len(schedule.plan().chunks) == FEW + 1
    schedule.add(make_job(FEW + 1, [1] * 50, 90, key=key).request)
    plan = schedule.plan()
    assert len(plan.decodes) == FEW + 1 and [c.count for c in plan.chunks] == [first]


def test_calls_are_short_while_a_prompt_waits() -> None:
    """Three tokens a call alone; one beside a prompt of three chunks, until the last of them is dispatched."""
    core = make_core(pages=40, rows=4, budget=6, overlap=False, steps=3)
    core.add(make_job(0, [1, 2, 3], 22))
    told = [[len(delta.tokens) for _, delta in core.step()] for _ in range(3)]
    core.add(make_job(1, list(range(1, 16)), 1))
    told += [[len(delta.tokens) for job, delta in core.step() if job.request.id == 0] for _ in range(5)]
    assert told == [[1], [3], [3], [1], [1], [3], [3], [3]]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_call_follows_the_last_token(overlap: bool) -> None:
    """A prompt's end draws a token, five calls three each: a sixth, planned before the fifth is read, has none to draw."""
    prompt = next([1, 2, n] for n in range(3, 99) if EOS not in solo([1, 2, n], 19))
    core = make_core(pages=40, rows=4, budget=6, overlap=overlap, steps=3)
    job = make_job(0, prompt, 16)
    core.add(job)
    run(core)
    assert job.reply.tokens == solo(prompt, 19)
    assert core.device.calls == [(3, 0), *[(0, 1)] * 5]


def test_priorities_come_first_and_take_pages() -> None:
    core = make_core(pages=4, rows=3, budget=20)
    for id, priority in ((0, 0), (1, 0), (2, 5)):
        core.add(make_job(id, [id + 1] * 7, 5, priority=priority))
    told = run(core)
    ends = [job.request.id for job, d in told if d.finish_reason]
    assert ends[0] == 2 and core.schedule.counts["preempted"] == 0
    core = make_core(pages=6, rows=3, budget=20)
    core.add(make_job(0, [3] * 7, 14))
    core.add(make_job(1, [4] * 7, 14))
    core.step(), core.step()
    core.add(make_job(2, [1] * 11, 9, priority=1))
    ends = [job.request.id for job, d in run(core) if d.finish_reason]
    assert ends == [2, 0, 1] and core.schedule.counts["preempted"] >= 1


@pytest.mark.parametrize("keys", ["b", "bc"])
def test_a_key_that_comes_waits_for_no_long_output_of_another(keys) -> None:
    """Rows are shared: who has two more than a key that waits gives one back, and is computed on later."""
    core = make_core(pages=40, rows=4, budget=20)
    jobs = [make_job(i, [i + 9] * 4, 80, key="a") for i in range(8)]
    alone = max(len(solo([i + 9] * 4, 84)) for i in range(4))
    for job in jobs:
        core.add(job)
    told = [t for _ in range(5) for t in core.step()]
    for i, key in enumerate(keys):
        core.add(make_job(10 + i, [40 + i] * 3, 3, key=key))
    steps = 0
    while any(i in core.jobs for i in range(10, 10 + len(keys))):
        told += core.step()
        steps += 1
    assert steps <= 8 < alone
    assert core.schedule.counts["preempted"] <= len(keys)
    told += run(core)
    for job in jobs:
        assert job.request.tokens[4:] == solo([job.request.id + 9] * 4, 84)


def test_rows_of_one_key_are_its_own() -> None:
    """Nothing is preempted where all that wait are of the key that runs, nor for a key that has its share."""
    core = make_core(pages=40, rows=4, budget=20)
    for i in range(8):
        core.add(make_job(i, [i + 9] * 4, 20, key="ab"[i % 2]))
    run(core)
    assert not core.schedule.counts["preempted"]


def test_the_youngest_yields() -> None:
    core = make_core(pages=5, rows=3, budget=20)
    jobs = [make_job(i, [i + 2] * 4, 12) for i in range(2)]
    for job in jobs:
        core.add(job)
    victims, preempt = [], core.schedule.preempt
    core.schedule.preempt = lambda r: (victims.append(r.id), preempt(r))
    run(core)
    assert set(victims) == {1}
    assert all(job.reply.tokens == solo([i + 2] * 4, 16) for i, job in enumerate(jobs))


def test_keys_share_fairly() -> None:
    """One key with many requests does not keep another's few waiting; neither does it gain by having been away."""
    core = make_core(pages=40, rows=1, budget=8)
    for i in range(6):
        core.add(make_job(i, [i + 1] * 8, 1, key="many"))
    core.step()
    for i in range(6, 8):
        core.add(make_job(i, [i + 1] * 8, 1, key="few"))
    ends = [job.request.id for job, d in run(core) if d.finish_reason]
    assert ends == [0, 1, 6, 2, 7, 3, 4, 5]


def test_a_prefix_is_found_and_siblings_wait_for_it() -> None:
    core = make_core(pages=30, rows=4, budget=40)
    leader = make_job(0, list(range(1, 14)), 3)
    others = [make_job(i, list(range(1, 14)), 3, after=leader.request) for i in (1, 2)]
    stranger = make_job(3, list(range(1, 14)), 3, salt=b"other")
    for job in (leader, *others, stranger):
        core.add(job)
    run(core)
    assert [j.request.cached for j in (leader, *others, stranger)] == [0, 12, 12, 0]
    assert core.counts["prompt tokens"] == 13 + 1 + 1 + 13
    assert len({tuple(j.reply.tokens) for j in (leader, *others, stranger)}) == 1


@pytest.mark.parametrize("options", [dict(), dict(drafts=2), dict(steps=3), dict(overlap=False)], ids=str)
def test_outputs_of_one_prompt_copy_its_last_page(options: dict) -> None:
    """The first computes it; each other one computes the last token alone, in no call for prompts."""
    core = make_core(pages=40, rows=8, budget=40, **options)
    jobs: list = []
    for prompt in ([1, 2, 3], list(range(5, 16))):
        leader = make_job(len(jobs), prompt, 9)
        jobs += [leader, *(make_job(len(jobs) + i, prompt, 9, after=leader.request) for i in (1, 2, 3))]
    for job in jobs:
        core.add(job)
    run(core)
    assert [j.request.cached for j in jobs] == [0, 2, 2, 2, 0, 10, 10, 10]
    assert core.counts["prompt tokens"] == 3 + 3 + 11 + 3
    assert sum(prompts for prompts, _ in core.device.calls) == 3 + 11
    assert all(job.reply.tokens == solo(job.request.tokens[: job.request.prompt], job.request.limit) for job in jobs)


def test_nobody_waits_where_nothing_is_shared() -> None:
    """Without a cache, or for prompts of one token: all outputs begin in the first step."""
    for prompt, cache in (([1, 2, 3], False), ([4], True)):
        core = make_core(pages=40, rows=4, budget=40)
        core.schedule.pool.cache = cache
        jobs = [make_job(0, prompt, 3)]
        jobs += [make_job(i, prompt, 3, after=jobs[0].request) for i in (1, 2, 3)]
        for job in jobs:
            core.add(job)
        run(core)
        assert core.device.calls[0] == (4 * len(prompt), 0) and not any(job.request.cached for job in jobs)


def test_limits_are_named() -> None:
    core = make_core(pages=3)
    with pytest.raises(ValueError, match="may take 13 tokens, the cache holds 12; lower max_tokens"):
        core.schedule.check(make_job(0, [1] * 5, 8).request)


# ---- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["raise", "read"])
def test_the_guilty_request_fails_alone(how: str, overlap: bool) -> None:
    bad = [9, 9, 9, 9, 9]
    poison = lambda t: how if t[:5] == bad and len(t) == 8 else None
    core = make_core(pages=40, rows=6, budget=30, overlap=overlap, poison=poison)
    jobs = [make_job(i, p, 12) for i, p in enumerate([*PROMPTS[:3], bad, PROMPTS[4]])]
    for job in jobs:
        core.add(job)
    told = run(core)
    assert [j.reply.finish_reason for j in jobs].count("error") == 1 and jobs[3].reply.finish_reason == "error"
    assert jobs[3].reply.error == f"RuntimeError: {'the device failed' if how == 'read' else 'a step failed'}"
    assert jobs[3].reply.tokens == solo(bad, 17)[:3]
    for job in (*jobs[:3], jobs[4]):
        prompt = job.request.tokens[: job.request.prompt]
        assert job.reply.tokens == solo(prompt, len(prompt) + 12)
    assert sum(d.finish_reason is not None for _, d in told) == 5
    assert core.counts["faults"] <= 5 and not core.schedule.quarantine


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_can_get_no_row_fails_alone(overlap: bool) -> None:
    """All that begin in a step get their rows in one call: the others of it are not held up by it, and complete."""
    bad = [9, 9, 9, 9, 9]
    poison = lambda t: "admit" if t[:5] == bad else None
    core = make_core(pages=40, rows=6, budget=30, overlap=overlap, poison=poison)
    jobs = [make_job(i, p, 12) for i, p in enumerate([*PROMPTS[:3], bad, PROMPTS[4]])]
    for job in jobs:
        core.add(job)
    run(core)
    assert jobs[3].reply.error == "RuntimeError: no rows were given" and jobs[3].reply.tokens == []
    for job in (*jobs[:3], jobs[4]):
        prompt = job.request.tokens[: job.request.prompt]
        assert job.reply.tokens == solo(prompt, len(prompt) + 12)
    assert core.counts["faults"] <= 5 and not core.schedule.quarantine


def test_an_adapter_that_is_gone() -> None:
    core = make_core(pages=40, rows=4, budget=30)
    core.device.weights["a"] = None
    jobs = [make_job(0, [1, 2], 9), make_job(1, [1, 2], 9, adapter="a", salt=b"a")]
    for job in jobs:
        core.add(job)
    for _ in range(3):
        core.step()
    core.drop_adapter("a")
    run(core)
    assert jobs[1].reply.error == "adapter 'a' is not loaded any more" and jobs[0].reply.tokens == solo([1, 2], 11)


class Fixed:
    """A mask source that wants given tokens."""

    def __init__(self, wanted: list[int], fault: int | None = None) -> None:
        self.wanted, self.taken, self.fault = wanted, [], fault

    done = property(lambda self: len(self.taken) == len(self.wanted))

    def mask(self):
        if self.fault == len(self.taken):
            raise ValueError("the grammar failed")
        bits = np.zeros(64, np.uint8)
        bits[self.wanted[len(self.taken)]] = self.wanted[len(self.taken)] >= 0
        return np.packbits(bits, bitorder="little").view("<u4")

    def commit(self, token: int) -> None:
        self.taken.append(token)


class Odd(Exception):
    """What no list of known errors holds, and what cannot even be told."""

    def __str__(self) -> str:
        raise Odd


class Panic(BaseException):
    """What a panic of Rust code is in Python."""


@pytest.mark.parametrize("error", [Odd, Panic, StopIteration, RecursionError], ids=lambda e: e.__name__)
@pytest.mark.parametrize("where", ["mask", "commit", "done"])
def test_what_a_mask_source_raises_is_its_own(where: str, error: type[BaseException]) -> None:
    """Whatever type it is: its request ends with it, the others answer as alone."""
    own, core = solo([1, 2], 12), make_core(pages=40, rows=6, budget=30)

    def fail(*_):
        raise error

    members = {"mask": Fixed.mask, "commit": Fixed.commit, "done": Fixed.done}
    source = type("Source", (Fixed,), {where: property(fail) if where == "done" else fail} | {
        k: v for k, v in members.items() if k != where
    })(own[:4])  # fmt: skip
    jobs = [make_job(i, [1, 2], 10) for i in range(3)]
    jobs[1].mask = source
    for job in jobs:
        core.add(job)
    run(core)
    assert [j.reply.finish_reason == "error" for j in jobs] == [False, True, False] and core.counts["faults"] == 0
    assert error.__name__ in jobs[1].reply.error and jobs[0].reply.tokens == jobs[2].reply.tokens == own


NO_MASKS = [None, [1], np.ones(2, "<i4"), np.ones(1, "<u4"), np.uint32(1), np.ones((1, 2), "<u4")]


@pytest.mark.parametrize("mask", NO_MASKS, ids=str)
def test_a_mask_that_is_none(mask) -> None:
    """It is refused by what was expected; no array is stretched to fit, and no other request is requeued."""
    core, source = make_core(pages=40, rows=6, budget=30), Fixed([1])
    source.mask = lambda: mask
    jobs = [make_job(i, [1, 2], 10) for i in range(2)]
    jobs[0].mask = source
    for job in jobs:
        core.add(job)
    run(core)
    assert jobs[0].reply.error.endswith("expected uint32[2], one bit per token of the vocabulary")
    assert jobs[1].reply.tokens == solo([1, 2], 12) and core.counts["faults"] == 0


def test_a_tokenizer_that_fails_ends_its_request_alone() -> None:
    core = make_core(pages=40, rows=6, budget=30)
    jobs = [make_job(i, [1, 2], 10) for i in range(2)]
    jobs[0].reply.push = lambda *_, **__: (_ for _ in ()).throw(Panic("decode"))
    for job in jobs:
        core.add(job)
    run(core)
    assert jobs[0].reply.error == "RuntimeError: Panic: decode" and jobs[1].reply.tokens == solo([1, 2], 12)


@pytest.mark.parametrize("steps", [1, 3])
def test_masks_are_asked_and_told_in_order(steps: int) -> None:
    """Never a mask before the token that it depends on is known; ends and failures of a grammar are the request's own."""
    own = solo([1, 2], 12)
    core = make_core(pages=40, rows=6, budget=30, steps=steps)
    sources = [Fixed(own[:4]), Fixed(own, fault=2), Fixed([*own[:3], -1, 1])]
    jobs = [make_job(i, [1, 2], 10) for i in range(4)]
    for job, job.mask in zip(jobs, [*sources, None], strict=True):
        core.add(job)
    run(core)
    reasons = [(j.reply.tokens, j.reply.finish_reason) for j in jobs]
    assert reasons[:3] == [(own[:4], "stop"), (own[:2], "error"), (own[:3], "stop")]
    assert reasons[3][0] == own and jobs[1].reply.error == "ValueError: the grammar failed"
    assert [s.taken for s in sources] == [own[:4], own[:2], own[:3]] and not core.device.wrong


def test_what_is_not_finite_is_not_shared() -> None:
    core = make_core(pages=40, rows=2, budget=30, poison=lambda t: "nan")
    core.add(make_job(0, list(range(1, 14)), 3))
    ((job, delta),) = run(core)
    assert delta.finish_reason == "error" and job.reply.tokens == [] and not core.schedule.pool.cached


def test_the_fake_model_notices_a_wrong_page() -> None:
    """The oracle itself: with two owners of one writable page, outputs differ."""
    core = make_core(pages=40, rows=2, budget=30)
    jobs = [make_job(i, [i + 1] * 5, 6) for i in range(2)]
    for job in jobs:
        core.add(job)
    core.step()
    jobs[1].request.pages[1] = jobs[0].request.pages[1]
    try:
        run(core)
    except KeyError:
        return
    assert any(j.reply.tokens != solo([i + 1] * 5, 11) for i, j in enumerate(jobs))


def test_dear_masks_take_turns(monkeypatch) -> None:
    """Of 12 masks of 5 ms a step makes 3; no cheap one and no output without a mask waits, and the dear ones take turns."""
    core, clock = make_core(pages=90, rows=14, budget=90), [100.0]
    monkeypatch.setattr("fdel.serve.engine.core.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(Fixed):
        seconds = 0.005

        def mask(self):
            clock[0] += self.seconds
            return super().mask()

    first = next(n for n in range(1, VOCAB) if len(solo([n, 2], 18)) == 16)
    own, jobs = solo([first, 2], 18), [make_job(i, [first, 2], 16) for i in range(14)]
    for job in jobs[:13]:
        job.mask = Slow(own)
    jobs[0].mask.seconds = 1e-4
    for job in jobs:
        core.add(job)
    core.step(), core.step()  # the prompts, whose masks nobody knows yet; and the first step of tokens
    counts = lambda: [len(job.reply.tokens) for job in jobs]
    for _ in range(12):
        before, begun = counts(), clock[0]
        core.step()
        spent = [now - then for now, then in zip(counts(), before, strict=True)]
        assert clock[0] - begun < 0.0201 and sum(spent[1:13]) == 3
    assert counts()[13] >= 12 and counts()[0] >= 12 and max(counts()[1:13]) - min(counts()[1:13]) <= 1
    run(core)
    assert all(job.reply.tokens == own for job in jobs) and not core.device.wrong
