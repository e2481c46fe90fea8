"""Prompts with pictures in the engine, against a full forward that encodes and reads all at once."""

from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, serve
from fdel.media import clip, sight
from fdel.models import builders
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.pictures import Holders, Medium, PromptMedia, prompt_media, rounded
from fdel.serve.engine.step import PAGE
from tests.serve import seer, small
from tests.serve.small import CONTEXT, VOCAB

TOKEN = 9  # that stands for an entry
CFG = replace(small.CFG, max_positions=CONTEXT)
SIGHT = sight.Sight("seer", "clip_vision_model", TOKEN, (TOKEN,), clip.Settings(TOKEN, 2, size=(12, 12)))
SHAPE = dict(rows=4, pages=16, budget=64, batches=(4,), max_length=CONTEXT)


def picture(seed: int, patches: int) -> Medium:
    """One whose patches stand in two rows."""
    at = np.stack([np.zeros(patches), np.arange(patches) % 2, np.arange(patches) // 2], 1).astype(np.int32)
    values = np.random.default_rng(seed).standard_normal((patches, seer.NUMBERS)).astype(np.float32)
    return Medium(values, at, patches)


def prompt(*parts: int | Medium, seed: int = 0, turned: bool = True) -> tuple[list[int], PromptMedia]:
    """A prompt of so many words, a picture, so many words, ...; a picture's tokens are turned by row and column."""
    words = np.random.default_rng(seed)
    tokens, index, rotary, images, at = [], [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            tokens += words.integers(10, VOCAB, part).tolist()
            index += [-1] * part
            turns = np.repeat(np.arange(part)[:, None], 3, 1)
        else:
            first = sum(i.entries for i in images)
            tokens += [TOKEN] * part.entries
            index += range(first, first + part.entries)
            images.append(part)
            turns = part.places
        rotary += (turns + at).tolist()
        at += int(turns.max(initial=-1)) + 1
    return tokens, PromptMedia(images, np.array(index), np.array(rotary) if turned else None)


@pytest.fixture(scope="module")
def model() -> models.Model:
    return made()


def made() -> models.Model:
    make = jax.jit(lambda key: params.unstack(params.init(seer.spec(CFG), key, dtype=jnp.float32)))
    return models.Model(seer, CFG, jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, make(jax.random.key(0))))


@lru_cache
def program(family, images: tuple[int, ...]):
    """The next token of a padded row whose pictures have so many patches, each encoded alone and not padded."""

    @jax.jit
    def step(weights, tokens, length, index, rotary, patches):
        values = jnp.concatenate([seer.encode(weights, ops.Patches(v[None], p[None]), CFG) for v, p in patches])
        batch = replace(ops.packed(tokens, length), media=ops.Media(index, values[None]), rotary=rotary)
        return jnp.argmax(family.forward(weights, tokens, CFG, batch)[0][0, length[0] - 1])

    return step


def naive(model, tokens: list[int], media: PromptMedia, most: int) -> list[int]:
    """Continue greedily, all of it anew for each token."""
    said = list(tokens)
    patches = [(i.values, i.places) for i in media.items]
    for _ in range(most):
        row, index = np.zeros((1, CONTEXT), np.int32), np.full((1, CONTEXT), -1, np.int32)
        row[0, : len(said)], index[0, : len(tokens)] = said, media.index
        turns = media.turns(0, CONTEXT).astype(np.int32)[None]
        step = program(model.family, tuple(len(v) for v, _ in patches))
        said.append(int(step(model.params, row, np.array([len(said)], np.int32), index, turns, patches)))
    return said[len(tokens) :]


def engine(model, total: int = SHAPE["pages"], **changes) -> Engine:
    e = Engine(model, Settings(**SHAPE | changes), sight=SIGHT)
    e._core.schedule.pool = Pool(total, PAGE, e._core.schedule.pool.cache)
    return e


ASKED = serve.SamplingParams(max_tokens=10, ignore_eos=True)
A, B, C = picture(1, 50), picture(2, 20), picture(3, 70)
SHOWN = [
    prompt(5, A, 7),
    prompt(40, B, 3, C, 9, seed=1),
    prompt(6, C, 2, seed=2),
    prompt(3, A, B, 80, seed=3, turned=False),
]


@pytest.fixture(scope="module")
def wanted(model) -> list[list[int]]:
    return [naive(model, *p, 10) for p in SHOWN]


OTHERWISE = [
    dict(), dict(budget=7), dict(budget=33, overlap=False), dict(cache=False), dict(drafts=3), dict(decode_steps=4),
    dict(media_bytes=32 * 4 * 110),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERWISE, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain")
def test_output_is_that_of_a_full_forward(model, wanted, options):
    """In company of texts, with chunks that cut pictures, preemption, found pages, drafts, and little room for entries."""
    e = engine(model, **options)
    plain = [np.random.default_rng(5).integers(10, VOCAB, n).tolist() for n in (3, 70)]
    alone = engine(model).generate(plain, ASKED)
    tokens, media = [p for p, _ in SHOWN] + plain, [*(m for _, m in SHOWN), None, None]
    for again in range(2):
        got = e.generate(tokens, ASKED, media=media)
        assert [g.tokens for g in got] == [*wanted, *(g.tokens for g in alone)]
        cached = [g.cached for g in got]
        assert cached == ([0] * 6 if not again or "cache" in options else [0, 128, 64, 128, 0, 64])
    encoded = e.stats()["pictures encoded"]
    assert encoded > 3 if "media_bytes" in options else encoded == 3 or options


@pytest.fixture(scope="module")
def looking(model) -> models.Model:
    """The tokens of a picture see each other."""
    hidden = builders.hidden("attention", encode=seer.encode, rotary=True, ahead=lambda cfg: True)(seer.hidden.walk)
    family = ModuleType("looking")
    vars(family).update({**vars(seer), "hidden": hidden, "forward": builders.forward(hidden, seer.head)})
    return model._replace(family=family)


@pytest.mark.parametrize(
    "options",
    [pytest.param(dict(budget=72, drafts=3), marks=pytest.mark.slow),
     *(pytest.param(o, marks=[pytest.mark.slow, pytest.mark.matrix]) for o in (dict(), dict(budget=90, overlap=False)))],
    ids=str,
)  # fmt: skip
def test_pictures_whose_tokens_see_each_other_stay_whole(looking, wanted, options):
    """In chunks that end at their edges, beside texts, found pages that end inside of one, and drafts."""
    e, asked = engine(looking, **dict(budget=72) | options), []
    e._core.schedule.chunk = 16  # beside sequences that decode: a picture takes more
    plan = e._core.schedule.plan
    e._core.schedule.plan = lambda *a: asked.append(plan(*a)) or asked[-1]
    texts = [np.random.default_rng(5).integers(10, VOCAB, n).tolist() for n in (3, 70)]
    tokens, media = [*texts, *(p for p, _ in SHOWN)], [None, None, *(m for _, m in SHOWN)]
    want = [naive(looking, *p, 10) for p in SHOWN]
    assert all(a != b for a, b in zip(want, wanted, strict=True))
    for again in range(2):
        got = e.generate(tokens, ASKED, media=media)
        assert [g.tokens for g in got[2:]] == want
        assert [g.cached for g in got] == ([0] * 6 if not again else [0, 64, 0, 128, 64, 128])
    chunks = [c for p in asked for c in p.chunks if c.request.media is not None]
    parted = lambda c, n: n not in c.request.media.edges
    assert len(chunks) > 8 and not any(parted(c, c.start + c.count) for c in chunks if not c.last)
    assert any(parted(c, c.start) for c in chunks)
    with pytest.raises(ValueError, match="found 70 tokens of a picture, which see each other, expected at most 64"):
        engine(looking, budget=64).submit(*SHOWN[2][:1], ASKED, media=SHOWN[2][1])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_request_that_is_preempted_goes_on(model, wanted, steps):
    """In the middle of a picture, and among the tokens of its answer, which have turns of their own."""
    e = engine(model, rows=1, batches=(1,), budget=32)
    low = [e.submit(SHOWN[1][0], ASKED, media=SHOWN[1][1], priority=0)]
    for _ in range(steps):
        e.step()
    high = e.submit(SHOWN[2][0], ASKED, media=SHOWN[2][1], priority=1)
    e.wait(lambda: all(j.reply.finish_reason for j in (*low, high)))
    assert [low[0].reply.tokens, high.reply.tokens] == [wanted[1], wanted[2]] and e.stats()["preempted"] == 1


@pytest.mark.slow
def test_pages_and_entries_belong_to_a_picture(model):
    """The same words about another picture, or about its patches in other places, find nothing of the first's pages."""
    e = engine(model)
    turned = Medium(C.values, C.places[:, [0, 2, 1]], 70)
    answers = []
    for shown, found in (C, 0), (C, 64), (picture(8, 70), 0), (turned, 0):
        tokens, media = prompt(6, shown, 20, seed=4)
        (got,) = e.generate([tokens], ASKED, media=[media])
        assert got.cached == found and got.tokens == naive(model, tokens, media, 10)
        answers.append(got.tokens)
    assert len({*map(tuple, answers)}) == 3
    (text,) = e.generate([tokens], ASKED)  # the same ids are no picture
    assert text.cached == 0 and text.tokens not in answers
    before = e.stats()["pictures encoded"]
    tokens, media = prompt(30, C, 20, seed=5)
    e.generate([tokens], ASKED, media=[media])
    assert e.stats()["pictures encoded"] == before == 3


@pytest.mark.slow
def test_n_outputs_and_new_weights(model, wanted):
    """Outputs of one prompt share its pages; entries of old weights are not used by new ones, nor after sleep."""
    e = engine(model)
    got = e.generate([SHOWN[0][0]], replace(ASKED, n=3), media=[SHOWN[0][1]])
    assert [g.tokens for g in got] == [wanted[0]] * 3 and e.stats()["pictures encoded"] == 1
    e.sleep()
    e.wake()
    assert e.generate([SHOWN[0][0]], ASKED, media=[SHOWN[0][1]])[0].tokens == wanted[0]
    vision = jax.tree.map(lambda x: -0.7 * x, model.params["vision"])
    other = model._replace(params=model.params | {"vision": vision})
    e.update_params(other.params)
    (got,) = e.generate([SHOWN[0][0]], ASKED, media=[SHOWN[0][1]])
    assert got.tokens == naive(other, *SHOWN[0], 10) != wanted[0]


@pytest.mark.slow
def test_what_is_started_compiles_nothing_later(model, wanted):
    e = engine(model)
    e.start(wait=True)
    compiled = e.stats()["compiled"]
    got = e.generate([SHOWN[0][0]], ASKED, media=[SHOWN[0][1]])
    assert got[0].tokens == wanted[0] and e.stats()["compiled"] == compiled
    e.close()


@pytest.mark.slow
def test_a_mesh_sees_the_same(model, wanted):
    mesh, rules = params.make_mesh({"tp": 2}, jax.devices()[:2]), params.SERVE | {"numbers": None, "components": None}
    spread = model._replace(params=params.reshard(model.params, params.unstack(seer.spec(CFG)), mesh, rules))
    e = engine(spread, budget=33)
    got = e.generate([p for p, _ in SHOWN], ASKED, media=[m for _, m in SHOWN])
    assert [g.tokens for g in got] == wanted


@pytest.mark.slow
def test_adapters_see_with_their_own_tower(model):
    """One that changes the layers alone shares calls with the base, and pictures are encoded for each."""
    spec = params.unstack(seer.spec(CFG))
    adapted = params.lora.add(model.params, 2, 4.0, key=jax.random.key(1), spec=spec)
    adapted = jax.tree.map(lambda x: x + 0.05 if x.ndim > 1 and 2 in x.shape else x, adapted)
    e = Engine(model, Settings(**SHAPE), sight=SIGHT, adapters={"a": adapted})
    tokens, media = SHOWN[0]
    want = [naive(model._replace(params=p), tokens, media, 10) for p in (model.params, adapted)]
    jobs = [e.submit(tokens, ASKED, media=media, adapter=a) for a in ("", "a")]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    assert [j.reply.tokens for j in jobs] == want and want[0] != want[1]


# ---- what cannot be shown ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle(model) -> Engine:
    return engine(model, media_bytes=32 * 4 * 110)


@pytest.mark.parametrize(
    "tokens, media, said",
    [
        (SHOWN[0][0][1:], SHOWN[0][1], "the prompt has 61 tokens, its media 62"),
        (SHOWN[3][0], prompt(3, A, C, 30)[1], "the pictures of the prompt have 120 entries, there is room for 110"),
        (
            [1] * 8,
            prompt(1, Medium(np.ones((2, 5), np.float32), np.zeros((2, 3), int), 2), 5)[1],
            "5 numbers, expected 12",
        ),
        ([1], SHOWN[0], "media holds a tuple; expected PromptMedia"),
    ],
)
def test_media_that_do_not_fit_are_refused(idle, tokens, media, said):
    with pytest.raises(ValueError, match=said):
        idle.generate([tokens], ASKED, media=[media])


def test_media_of_other_prompts_and_other_models(model):
    e = Engine(small.make_model(), Settings(**SHAPE))
    with pytest.raises(ValueError, match="this engine reads text alone"):
        e.generate([SHOWN[0][0]], ASKED, media=[SHOWN[0][1]])
    with pytest.raises(ValueError, match="media of 1 prompts for 2"):
        e.generate([[1], [2]], ASKED, media=[None])
    with pytest.raises(ValueError, match="prompt_logprobs of a prompt with pictures"):
        e.generate([SHOWN[0][0]], replace(ASKED, prompt_logprobs=1), media=[SHOWN[0][1]])
    with pytest.raises(ValueError, match="sight is given, but llama reads text alone"):
        Engine(small.make_model(), Settings(**SHAPE), sight=SIGHT)
    for index, shape in ([0, 2], (4, 12)), ([0, 1, 1], (2, 12)), ([0, 1], (2, 12, 1)):
        with pytest.raises(ValueError, match="expected"):
            image = Medium(np.ones(shape, np.float32), np.zeros((shape[0], 3), int), 2)
            PromptMedia([image], np.array(index))


def test_a_model_of_text_gains_nothing(model):
    """No array and no program."""
    e = Engine(small.make_model(), Settings(**SHAPE))
    assert e._device.entries is None and e._device.sequences.shift is None
    seeing = e._device.programs.extend
    assert e._device.example is None and seeing is not engine(model)._device.programs.extend


# ---- places and holders --------------------------------------------------------------------------------------------


def test_pictures_take_the_places_of_a_prompt():
    rgb = np.random.default_rng(0).integers(0, 255, (2, 20, 30, 3), np.uint8)
    pictures = [sight.prepare(SIGHT, x) for x in rgb]
    tokens, media = prompt_media(SIGHT, [11, TOKEN, 12, TOKEN, 13], pictures)
    assert tokens == [11, *[TOKEN] * 36, 12, *[TOKEN] * 36, 13] and [i.entries for i in media.items] == [36, 36]
    assert media.index.tolist() == [-1, *range(36), -1, *range(36, 72), -1] and media.rotary is None
    assert media.shown(0, 1) == [] and media.shown(0, 2) == [0] and media.shown(36, 75) == [0, 1]
    assert media.items[0].digest != media.items[1].digest and media.mark(0, 1) == b"" != media.mark(0, 2)
    with pytest.raises(ValueError, match="1 places for images .* found 2"):
        prompt_media(SIGHT, [TOKEN], pictures)


def test_turns_go_on_after_the_prompt():
    tokens, media = prompt(2, picture(0, 6), 1)
    assert media.turns(0, 11).tolist() == [
        [0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 2], [2, 2, 3], [2, 3, 3], [2, 2, 4], [2, 3, 4],
        [5, 5, 5], [6, 6, 6], [7, 7, 7],
    ]  # fmt: skip
    assert media.turns(9, 11).tolist() == [[6] * 3, [7] * 3] and media.shift == -3


def test_the_longest_unused_make_room():
    h, images = Holders(10), [picture(i, 4) for i in range(4)]
    keys = [(("", i.digest), i) for i in images]
    assert [len(which) for *_, which in h.hold(keys[:2])] == [4, 4]
    first = h.held["", images[0].digest].tolist()
    assert h.hold(keys[:1]) == [] and h.counts == {"encoded": 2, "found": 1}
    ((_, new, which),) = h.hold([keys[0], keys[2]])  # picture 1 goes
    assert new is images[2] and not set(which.tolist()) & set(first) and list(h.held) == [keys[0][0], keys[2][0]]
    assert not h.fits(keys[:3]) and h.fits(keys[:2] * 2)
    h.drop([keys[2][0]])
    assert sorted([*h.free, *first]) == list(range(10))


def test_sizes_of_patches():
    assert [rounded(n) for n in (1, 64, 65, 576, 729, 1024, 1025, 4000)] == [64, 64, 128, 576, 768, 1024, 1152, 4096]
    shown = lambda n: Medium(np.ones((n, 4), np.float32), np.zeros((n, 3), np.int32), 1)
    for count, size in (
        (197, 197),
        (196, 256),
        (257, 320),
    ):  # of a tower whose pictures have 197 patches, none is padded
        values, places = shown(count).padded(197)
        assert len(values) == len(places) == size and (places[count:] == -1).all() and (values[:count] == 1).all()
