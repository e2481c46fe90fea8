"""Transcription against transformers: its logits processors, its `generate` with timestamps, its times of tokens."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.serve import hear
from fdel.serve.hear import batch, rules, windows, words
from tests.models.tiny import whisper as tiny

TOKENS = hear.Tokens(
    tiny.START, tiny.END, tiny.NO_TIMES, tiny.NO_SPEECH, tiny.PREVIOUS, tiny.TRANSCRIBE, tiny.TRANSLATE,
    (("de", tiny.DE), ("en", tiny.EN)), tuple(tiny.GENERATION["suppress_tokens"]),
    tuple(tiny.GENERATION["begin_suppress_tokens"]), tiny.GENERATION["max_initial_timestamp_index"],
    tuple(map(tuple, tiny.GENERATION["alignment_heads"])),
)  # fmt: skip


def generated(hearing, features, **options):
    """What transformers writes, and its segments."""
    import torch

    return hearing.oracle.generate(
        torch.tensor(features)[None], return_timestamps=True, return_segments=True, return_dict_in_generate=True,
        **options,
    )  # fmt: skip


def written(hearing, features, **options):
    """What we write."""
    asked = windows.Options(**options)
    [found] = hear.run(hearing.listener, [hear.transcribe(features, hearing.listener.cfg, TOKENS, asked)])
    return found


def same(found, want, least=2):
    """Segments are equal: tokens, and times to a microsecond."""
    assert [list(s.tokens) for s in found.segments] == [s["tokens"].tolist() for s in want["segments"][0]]
    for part in ("start", "end"):
        expected = [float(s[part]) for s in want["segments"][0]]
        np.testing.assert_allclose([getattr(s, part) for s in found.segments], expected, atol=1e-6)
    assert len(found.segments) >= least


def test_rules_are_those_of_transformers_processors():
    """Random logits after all kinds of beginnings, with timestamps and without: the same tokens are left; exact."""
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig
    from transformers.generation import logits_process as p

    config = GenerationConfig(
        eos_token_id=tiny.END, no_timestamps_token_id=tiny.NO_TIMES, max_initial_timestamp_index=8
    )
    timed = p.WhisperTimeStampLogitsProcessor(config, begin_index=2)
    plain = [
        p.SuppressTokensAtBeginLogitsProcessor(list(TOKENS.not_first), begin_index=2),
        p.SuppressTokensLogitsProcessor(list(TOKENS.never)),
    ]
    t = TOKENS.first_time
    begun = [[], [t + 3], [t + 3, 9], [t + 3, 9, t + 5], [t + 3, 9, t + 5, t + 5], [t + 3, 9, t + 5, t + 5, 4], [9, 9]]
    begun += [[t, 9, t + 20], [9], [t + 2, t + 3]]
    last = lambda said, i: said[-i] if len(said) >= i else -1
    time = lambda said: max([x for x in said if x >= t], default=-1)
    facts = [[len(b) for b in begun], *([last(b, i) for b in begun] for i in (1, 2)), [time(b) for b in begun]]
    history, allowed = rules.Written(*map(jnp.array, facts)), jax.jit(rules.allowed, static_argnums=3)
    for seed, push in ((0, 0.0), (1, 3.0), (2, -3.0)):
        logits = np.random.default_rng(seed).standard_normal((len(begun), tiny.VALUES["vocab_size"])).astype(np.float32)
        logits[:, t:] += push
        for times in (True, False):
            flags = jnp.full(len(begun), times)
            found = allowed(jnp.asarray(logits), history, flags, TOKENS)
            for row, said, scores in zip(found, begun, logits, strict=True):
                ids, want = torch.tensor([[tiny.START, tiny.EN, *said]]), torch.tensor(scores[None])
                for processor in [*plain, *[timed] * times]:
                    want = processor(ids, want)
                np.testing.assert_array_equal(row, want[0])


PLAIN = dict(temperatures=(0.0,), compression=None, logprob=None, no_speech=None)


@pytest.mark.slow
@pytest.mark.parametrize("condition", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_long_sounds_are_written_as_transformers_does(hearing, condition):
    """Windows begin at the last pair of times; each knows the text before it, or not; a prompt; the language is
    detected: the same segments."""
    import torch

    want = generated(
        hearing, hearing.features, task="transcribe", condition_on_prev_tokens=condition,
        prompt_ids=torch.tensor([tiny.PREVIOUS, 11, 12, 13]), temperature=0.0,
    )  # fmt: skip
    same(written(hearing, hearing.features, prompt=(11, 12, 13), condition=condition, **PLAIN), want)


@pytest.mark.matrix
@pytest.mark.slow
def test_languages_and_silence_are_found_as_transformers_does(hearing):
    """The language is detected; the window that is most probably silence is left out; likelihoods to 1e-4.

    A batch of two sounds writes what each alone does.
    """
    first = written(hearing, hearing.features, condition=False, task="translate", **PLAIN)
    silence = {s.seek: s.no_speech for s in first.segments}
    middle = sorted(silence.values())[-2] + 1e-6
    options = PLAIN | {"logprob": 0.0, "no_speech": middle}
    found = written(hearing, hearing.features, condition=False, task="translate", **options)
    want = generated(
        hearing, hearing.features, task="translate", temperature=0.0, condition_on_prev_tokens=False, logprob_threshold=0.0,
        no_speech_threshold=middle,
    )  # fmt: skip
    same(found, want, 1)
    assert 1 <= len({s.seek for s in found.segments}) < len(silence)
    for ours, theirs in zip(found.segments, want["segments"][0], strict=True):
        said = theirs["result"]["sequences"]
        said = said[3:] if tiny.END not in said[3:] else said[3 : 4 + said[3:].tolist().index(tiny.END)]
        mean = hearing.oracle._retrieve_avg_logprobs(theirs["result"]["scores"], said, 0.0)
        np.testing.assert_allclose(ours.mean_logprob, float(mean), atol=1e-4)
        assert ours.compression == hearing.oracle._retrieve_compression_ratio(said, tiny.VALUES["vocab_size"])
    asked = windows.Options(condition=False, task="translate", **PLAIN)
    sounds = [
        hear.transcribe(x, hearing.listener.cfg, TOKENS, asked) for x in (hearing.features, hearing.features[:, 50:])
    ]
    together, other = hear.run(hearing.listener, sounds)
    assert [s.tokens for s in together.segments] == [s.tokens for s in first.segments]
    assert other.segments and other.segments[0].tokens != first.segments[0].tokens


@pytest.mark.matrix
@pytest.mark.slow
def test_times_of_tokens_are_those_of_transformers(hearing):
    """The same path through the same heads' attention, each token's row being that where it is read; exact."""
    import torch

    window = hearing.features[:, :40]
    want = hearing.oracle.generate(
        torch.tensor(window)[None], return_timestamps=True, return_token_timestamps=True, return_segments=True,
        language="en", task="transcribe", attention_mask=torch.ones(1, 30, dtype=torch.long), temperature=0.0,
    )  # fmt: skip
    prompt = TOKENS.prompt("en", "transcribe", True)
    said = want["segments"][0][0]["result"]["sequences"].tolist()[len(prompt) :]
    said = said[: said.index(tiny.END)] if tiny.END in said else said[:-1]
    [memory] = hearing.listener.answer([windows.Hear(window)])
    [rows] = hearing.listener.answer([windows.Follow(memory, [*prompt, *said])])
    times = words.align(rows[:, len(prompt) :, :15], 7) * 0.02
    expected = want["segments"][0][0]["result"]["token_timestamps"][len(prompt) : len(prompt) + len(said)]
    np.testing.assert_allclose(times, expected, atol=1e-6)
    assert len(set(times.tolist())) > 3
    found = written(hearing, window, language="en", words=True, **PLAIN)
    spoken = [x for s in found.segments for x in s.spoken]
    assert [t for t, _, _ in spoken] == [t for s in found.segments for t in s.tokens if t < tiny.END]
    assert all(a <= b for _, a, b in spoken) and spoken[-1][2] <= 0.4


def test_windows_join_and_leave_while_others_are_written(hearing):
    """Two places, four windows: a short one's is taken by the third before the long one ends; a fourth is dropped halfway.

    Each is written as alone, exactly; nobody is encoded without a place; what fails ends those that it concerns.
    """
    listener = hearing.listener
    prompts = {"long": ([81, 83], 40), "short": ([81], 3), "next": ([81, 82, 9, 11], 20), "dropped": ([81, 7], 44)}
    features = {k: hearing.features[:, 20 * i : 20 * i + 40] for i, k in enumerate(prompts)}
    facts = lambda k: (prompts[k][0], 0, prompts[k][1], False, 1.0, len(k))  # drawn, so that no two are alike

    def alone(k):
        [memory] = listener.answer([windows.Hear(features[k])])
        here, ask = batch.Batch(), {k: windows.Write(memory, *facts(k))}
        while not (found := batch.turn(listener, here, ask)):
            pass
        assert here.memory is None and here.sounds == []
        return found[k]

    want = {k: alone(k) for k in ("long", "short", "next")}
    assert len(want["long"].tokens) > 16 + len(want["short"].tokens)
    here, asks = batch.Batch(), {k: windows.Hear(features[k]) for k in prompts}
    ended, shared = {}, set()
    while asks:
        answers = batch.turn(listener, here, asks)
        shared.add(tuple(here.sounds))
        assert sum(isinstance(a, windows.Write) for a in asks.values()) <= 2 and len(here.sounds) <= 2
        for k, answer in answers.items():
            first = isinstance(asks.pop(k), windows.Hear)
            (asks if first else ended)[k] = windows.Write(answer, *facts(k)) if first else answer
        if "dropped" in here.sounds:
            del asks["dropped"]
    assert shared == {
        (),
        ("long", None),
        ("long", "next"),
        ("long", "dropped"),
    }  # the short one ended in the first steps
    assert list(ended) == ["short", "next", "long"]
    for k, draft in ended.items():
        assert draft.tokens == want[k].tokens
        np.testing.assert_allclose(draft[1:], want[k][1:], atol=1e-4)
    found = batch.turn(listener, here, {"bad": windows.Hear(features["long"][:3])})
    assert isinstance(found["bad"], ValueError) and "found features of shape" in str(found["bad"])
    [memory] = listener.answer([windows.Hear(features["long"])])
    asks = {"long": windows.Write(memory, *facts("long"))}
    assert batch.turn(listener, here, asks) == {} and here.sounds == ["long"]
    found = batch.turn(listener, here, asks | {"bad": windows.Write(None, *facts("long"))})
    assert isinstance(found["bad"], Exception) and list(found) == ["bad"]
    while not (found := batch.turn(listener, here, asks)):
        pass
    assert found["long"].tokens == want["long"].tokens


def test_temperatures_rise_while_a_transcript_is_bad():
    """A draft that repeats itself, then one that is unlikely, then a good one: the third; silence ends it at once."""
    drafts = [windows.Draft([9] * 30, -3.0, 0.1), windows.Draft([4, 8, 3], -9.0, 0.1), windows.Draft([4, 8], -0.2, 0.1)]
    cfg, features = SimpleNamespace(frames=40, max_positions=48, vocab=110, median=7), np.zeros((2, 30), np.float32)

    def drive(options, drafts):
        asked, drafts = [], iter(drafts)
        loop = hear.transcribe(features, cfg, TOKENS, options)
        answer = None
        while True:
            try:
                ask = loop.send(answer)
            except StopIteration as end:
                return end.value, asked
            asked += [ask.temperature] if isinstance(ask, windows.Write) else []
            answer = next(drafts) if isinstance(ask, windows.Write) else np.zeros(2)

    found, asked = drive(windows.Options(language="en"), drafts)
    assert asked == [0.0, 0.2, 0.4] and found.segments[0].tokens == (4, 8) and found.segments[0].temperature == 0.4
    found, asked = drive(windows.Options(language="en"), [windows.Draft([4], -5.0, 0.9)])
    assert asked == [0.0] and found.segments == []
    with pytest.raises(ValueError, match="found language 'xx', expected one of de, en"):
        drive(windows.Options(language="xx"), [])


def test_tokens_become_words_as_in_transformers():
    """Spaces begin words, marks join their neighbours, characters of several tokens stay whole; in Chinese, each is one."""
    pytest.importorskip("transformers")
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    pieces = [" Say", ' "', "hel", "lo", ",", " wor", "ld", '!"', " (", "it", "'", "s", " 5", " -", "5", "."]
    raw = [*(p.encode() for p in pieces), "你".encode()[:2], "你".encode()[2:], "好".encode(), "。".encode()]
    decode = lambda ids, **_: b"".join(raw[i] for i in ids).decode("utf-8", errors="replace")
    tokenizer, ids = SimpleNamespace(decode=decode, eos_token_id=1000), list(range(len(raw)))
    spoken = [(i, i * 0.1, i * 0.1 + 0.1) for i in ids]
    for code, name in (("en", "english"), ("zh", "chinese")):
        texts, _, indices = _combine_tokens_into_words(tokenizer, ids, name)
        found = words.split(spoken, decode, code)
        assert [w.text for w in found] == texts and len(found) > 5
        assert [(w.start, w.end) for w in found] == [(spoken[i[0]][1], spoken[i[-1]][2]) for i in indices]


def test_special_tokens_are_found_by_name():
    """A vocabulary as Whisper's gives the tokens of the tiny model; one that is not Whisper's is refused."""
    from fdel.serve.hear import tokens

    named = dict(endoftext=80, startoftranscript=81, en=82, de=83, translate=84, transcribe=85, startofprev=86)
    named |= dict(nospeech=87, notimestamps=88)
    vocabulary = {f"<|{k}|>": i for k, i in named.items()} | {"<|0.00|>": 89, "to": 3}
    assert tokens.read(vocabulary, tiny.GENERATION, 3, 4) == TOKENS
    english = tokens.read(vocabulary, {"is_multilingual": False}, 2, 1)
    assert english.prompt(None, "transcribe", False) == [81, 88] and english.alignment == ((1, 0),)
    with pytest.raises(ValueError, match="does not translate"):
        english.prompt("en", "translate", True)
    with pytest.raises(ValueError, match="the tokenizer is not Whisper's"):
        tokens.read({"a": 1}, {}, 1, 1)
    with pytest.raises(ValueError, match="alignment_heads has .3, 0., of 3 layers of 4 heads"):
        tokens.read(vocabulary, {"alignment_heads": [[3, 0]]}, 3, 4)
