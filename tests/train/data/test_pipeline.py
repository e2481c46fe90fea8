"""Whole data sets: what is in batches, exact states, processes, epochs, the cache, streams."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdel import ops, params, text
from fdel.models import llama
from fdel.ops.mask import HIDDEN
from fdel.train import losses
from fdel.train.data import Report, Settings, Source, build, cache, dataset, key, store
from fdel.train.losses.forward import rows as loss_rows

grain = pytest.importorskip("grain", reason="the extra train")

LENGTHS = np.random.default_rng(0).integers(2, 41, 57)
PACKINGS = ["first_fit", "best_fit", "best_fit_split", "wrapped"]
Write = Callable[..., str]


def numbered(lengths, first: int = 0) -> list[dict]:
    """Rows whose tokens say where they are from: example * 100 + place; every third token and the last are learnt."""
    ids = [[100 * i + t for t in range(n)] for i, n in enumerate(lengths, first)]
    return [{"input_ids": x, "completion_mask": [t % 3 == 2 or t == x[-1] for t in x]} for x in ids]


@pytest.fixture
def source(write: Write) -> Source:
    return Source(write("a.jsonl", numbered(LENGTHS)))


def arrays(batch: dict) -> list[np.ndarray]:
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch))
    return jax.tree.leaves(batch)


def same(a: dict, b: dict) -> bool:
    """Bitwise, with keys, shapes and dtypes."""
    pairs = zip(arrays(a), arrays(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs
    )


def real(batch: dict) -> np.ndarray:
    """Which places hold tokens."""
    if "packed" in batch:
        return batch["packed"].segment_ids >= 0
    return np.arange(batch["tokens"].shape[-1]) < batch["lengths"][..., None]


def tokens(batches: Iterator[dict]) -> Counter:
    return Counter(int(t) for b in batches for t in b["tokens"][real(b)])


def labelled(batches: Iterator[dict]) -> Counter:
    """Each token with the label that the losses give it."""
    found = Counter()
    for b in batches:
        seen, packed, labels = loss_rows(jax.tree.map(jnp.asarray, b))
        there = np.asarray(packed.segment_ids) >= 0
        found.update(zip(np.asarray(seen)[there].tolist(), np.asarray(labels)[there].tolist(), strict=True))
    return found


# ---- what is in a batch --------------------------------------------------------------------------------------------


def test_unpacked(source: Source, tok: text.Tokenizer) -> None:
    data = dataset(source, Settings(batch=8, length=32, partial="pad"), tok)
    batches = list(data)
    assert len(batches) == data.batches == data.total == 8 and data.examples == 57
    for b in batches:
        assert {k: (v.shape, v.dtype.name) for k, v in b.items()} == {
            "tokens": ((8, 32), "int32"), "mask": ((8, 32), "bool"), "lengths": ((8,), "int32")
        }  # fmt: skip
        assert not b["tokens"][~real(b)].any() and not b["mask"][~real(b)].any()
    assert tokens(batches) == Counter(100 * i + t for i, n in enumerate(LENGTHS) for t in range(min(n, 32)))
    assert sum((b["lengths"] == 0).sum() for b in batches) == 8 * 8 - 57
    wanted = sum((100 * i + t) % 3 == 2 or t == n - 1 for i, n in enumerate(LENGTHS) for t in range(min(n, 32)))
    assert sum(b["mask"].sum() for b in batches) == wanted == data.report.learnt
    assert data.fill == pytest.approx(np.minimum(LENGTHS, 32).mean() / 32)


def test_all_tokens_need_no_mask(write: Write, tok: text.Tokenizer) -> None:
    data = dataset(Source(write("a.txt", ["the cat sat", "on a mat"])), Settings(batch=2, length=16), tok)
    assert set(next(iter(data))) == {"tokens", "lengths"} and data.report.learnt == data.report.tokens


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_packed(source: Source, tok: text.Tokenizer, packing: str, stream: bool) -> None:
    """Tokens, positions, segments and mask belong together; the losses see what they see of unpacked rows."""
    how = Settings(batch=4, length=48, packing=packing, partial="pad", stream=stream, window=24)
    batches = list(dataset(source, how, tok))
    for b in batches:
        assert {k: v.dtype.name for k, v in b.items() if k != "packed"} == {"tokens": "int32", "mask": "bool"}
        assert all(x.shape == (4, 48) for x in arrays(b))
        there, t, p, s = real(b), b["tokens"], b["packed"].positions, b["packed"].segment_ids
        assert not (b["mask"] | p | t)[~there].any() and (s[~there] == -1).all()
        assert (np.sort(~there, 1) == ~there).all()  # padding is at the end
        start = np.r_["1", np.ones((4, 1), bool), np.diff(s) != 0]
        assert (p[start] == 0).all() and (np.diff(p)[~start[:, 1:] & there[:, 1:]] == 1).all()
        follows = np.diff(t) == 1
        assert (follows == ~start[:, 1:])[there[:, 1:]].all() and (np.diff(s)[there[:, 1:]] >= 0).all()
        last = np.minimum(LENGTHS, 100)[t // 100] - 1
        assert (b["mask"] == ((t % 3 == 2) | (t % 100 == last)))[there].all()
    assert tokens(batches) == Counter(100 * i + t for i, n in enumerate(LENGTHS) for t in range(n))
    whole = labelled(dataset(source, Settings(batch=57, length=48), tok))
    if packing in ("first_fit", "best_fit"):
        assert labelled(batches) == whole
    else:  # what is cut off is not predicted
        assert not {pair for pair in labelled(batches) - whole if pair[1] >= 0}


@pytest.mark.slow
def test_loss_does_not_see_packing(write: Write, tok: text.Tokenizer) -> None:
    """Through a model: the summed loss and weight of all batches, one example a row against packed ones."""
    cfg = llama.Config(vocab=97, embed=16, ffn=32, layers=1, heads=2, kv_heads=1, head_dim=8, rope=ops.Rope(8, 1e4))
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    loss = jax.jit(losses.sft(llama, cfg))
    rng = np.random.default_rng(1)
    rows = [
        {"input_ids": rng.integers(0, 97, n).tolist(), "completion_mask": [i > 1 for i in range(n)]}
        for n in LENGTHS[:24]
    ]
    source, found = Source(write("a.jsonl", rows)), []
    for packing in (None, "best_fit"):
        data = dataset(source, Settings(batch=4, length=48, packing=packing, partial="pad"), tok)
        sums = [loss(weights, jax.tree.map(jnp.asarray, b)) for b in data]
        found.append((sum(float(s) for s, _ in sums), sum(float(m["weight"]) for _, m in sums)))
    assert found[0][1] == found[1][1] == sum(LENGTHS[:24] - 2)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)


@pytest.mark.parametrize("packing", [None, "wrapped"])
@pytest.mark.parametrize("stream", [False, True])
def test_forgetful_rows_hide_the_share_that_they_draw(
    write: Write, tok: text.Tokenizer, packing: str | None, stream: bool
) -> None:
    """Of 400 rows of 100 tokens: their shares lie as evenly as those drawn, no first token among them, anew each epoch."""
    source = Source(write("long.jsonl", [{"input_ids": [1 + i] * 100} for i in range(400)]))
    how = Settings(batch=8, length=100, packing=packing, epochs=2, stream=stream, fcm_min_ratio=0.2, fcm_max_ratio=0.6)
    found = list(dataset(source, how, tok))
    ids, keys, places = (
        np.concatenate([getattr(b["packed"], name) for b in found])
        for name in ("segment_ids", "key_segment_ids", "positions")
    )
    hidden = keys == HIDDEN
    assert len(ids) == 800 and (keys == np.where(hidden, HIDDEN, ids)).all() and not hidden[places == 0].any()
    shares = np.sort(hidden[:, 1:].mean(1))
    assert np.abs(shares.mean() - 0.4) < 4 * (0.4 / 12**0.5) / 800**0.5  # four deviations of the mean of uniform ratios
    assert np.abs(shares - np.linspace(0.2, 0.6, 800)).max() < 0.15  # and of one row's 99 coins of 0.6
    by_text = {t: [] for t in range(1, 401)}
    for b in found:
        for t, row in zip(b["tokens"], b["packed"].key_segment_ids, strict=True):
            by_text[int(t[1])].append(row == HIDDEN)
    if packing is None:
        assert all(len(rows) == 2 and (rows[0] != rows[1]).any() for rows in by_text.values())
    plain = list(dataset(source, dataclasses.replace(how, fcm_min_ratio=0.0, fcm_max_ratio=0.0), tok))
    assert all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(found, plain, strict=True))
    assert plain[0].get("packed") is None if packing is None else plain[0]["packed"].key_segment_ids is None


def test_first_tokens_of_packed_texts_are_seen(source: Source, tok: text.Tokenizer) -> None:
    for batch in dataset(source, Settings(batch=2, length=48, packing="best_fit", fcm_max_ratio=0.9), tok):
        ids, keys = batch["packed"].segment_ids, batch["packed"].key_segment_ids
        first = np.diff(ids, axis=1, prepend=-5) != 0
        assert (keys[first] == ids[first]).all() and (keys[ids < 0] == -1).all() and (keys == HIDDEN).any()


def test_pairs(write: Write, tok: text.Tokenizer) -> None:
    rows = [{"prompt": "the cat", "chosen": " sat" * (i + 1), "rejected": " is", "margin": i} for i in range(5)]
    data = dataset(Source(write("a.jsonl", rows)), Settings(kind="pairs", batch=2, length=12, shuffle=False), tok)
    first, second = data
    assert {k: v.shape for k, v in second.items()} == {
        "tokens": (2, 2, 12),
        "mask": (2, 2, 12),
        "lengths": (2, 2),
        "margin": (2,),
    }
    assert second["margin"].tolist() == [2, 3] and second["margin"].dtype == np.float32
    start = len(text.encode(tok, "the cat"))
    for b, i in ((first, 0), (second, 2)):
        for j in range(2):
            for side, end in ((0, " sat" * (i + j + 1)), (1, " is")):
                ids = [*text.encode(tok, "the cat" + end), tok.ids["eos"]]
                assert b["tokens"][j, side, : b["lengths"][j, side]].tolist() == ids
                assert b["mask"][j, side].tolist() == [start <= t < len(ids) for t in range(12)]


@pytest.mark.parametrize("stream", [False, True])
def test_unpaired(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """The "kl" of a row is its prompt with the completion of the row before it, cut to the length."""
    rows = [{"prompt": "the cat" * (i + 1), "completion": " is" * (9 - i), "label": i % 2} for i in range(6)]
    how = Settings(kind="unpaired", kl=True, batch=3, length=16, shuffle=False, stream=stream)
    batches = list(dataset(Source(write("a.jsonl", rows)), how, tok))
    assert len(batches) == 2
    halves = []
    for r in rows:
        before = text.encode(tok, r["prompt"])
        halves.append((before, [*text.encode(tok, r["prompt"] + r["completion"]), tok.ids["eos"]][len(before) : 16]))
    for n, b in enumerate(batches):
        assert b["label"].tolist() == [bool((3 * n + j) % 2) for j in range(3)]
        for j in range(3):
            i = 3 * n + j
            for part, completion in ((b, halves[i][1]), (b["kl"], halves[i - 1][1])):
                before = halves[i][0]
                ids = [*before, *completion][:16]
                assert part["tokens"][j, : part["lengths"][j]].tolist() == ids
                assert part["mask"][j].tolist() == [len(before) <= t < len(ids) for t in range(16)]
    alone = list(dataset(Source(write("a.jsonl", rows)), dataclasses.replace(how, kl=False), tok))
    for a, b in zip(alone, batches, strict=True):
        del b["kl"]
        chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize("stream", [False, True])
def test_unpaired_of_pairs(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """Both answers of a pair meet answers to another prompt; the bucket holds them."""
    rows = [
        {"prompt": " the" + "abcd"[i], "chosen": " is" * (9 - 2 * i), "rejected": " cat" * (i + 1)} for i in range(4)
    ]
    how = Settings(
        kind="unpaired", kl=True, batch=2, length=40, buckets=(2, 4, 8, 16), window=2, shuffle=False, stream=stream
    )
    each = [(b, j) for b in dataset(Source(write("a.jsonl", rows)), how, tok) for j in range(2)]
    said = lambda b, j: b["tokens"][j][b["mask"][j]].tolist()
    own = [said(*at) for at in each]
    assert len(own) == 8 and len({tuple(x) for x in own}) == 8
    for n, (b, j) in enumerate(each):
        width = len(b["tokens"][j])
        assert width >= max(b["lengths"].max(), b["kl"]["lengths"].max())
        assert said(b["kl"], j) in [x for pair, x in enumerate(own) if pair // 2 != n // 2]


@pytest.mark.parametrize("stream", [False, True])
def test_unpaired_buckets(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """The bucket holds the "kl" too, which may be longer than all completions of the batch."""
    rows = [
        {"prompt": "a" * (1 + 9 * (i % 2)), "completion": " b" * (1 + 9 * ((i + 1) % 2)), "label": 1} for i in range(8)
    ]
    how = Settings(kind="unpaired", kl=True, batch=2, length=40, buckets=(4, 8, 16, 24), shuffle=False, stream=stream)
    longer = 0
    for b in dataset(Source(write("a.jsonl", rows)), how, tok):
        most, of_kl = b["lengths"].max(), b["kl"]["lengths"].max()
        width = min(w for w in (4, 8, 16, 24, 40) if w >= max(most, of_kl))
        assert b["tokens"].shape == b["kl"]["tokens"].shape == (2, width)
        longer += of_kl > most
    assert longer


def test_prompts(write: Write, tok: text.Tokenizer) -> None:
    data = dataset(
        Source(write("a.jsonl", [{"prompt": "the cat"}] * 2)), Settings(kind="prompt", batch=2, length=8), tok
    )
    (batch,) = data
    assert set(batch) == {"tokens", "lengths"} and batch["lengths"].tolist() == [len(text.encode(tok, "the cat"))] * 2


def test_buckets(source: Source, tok: text.Tokenizer) -> None:
    """Each batch has the smallest bucket that holds it, and rows of like lengths; nothing is lost, orders vary."""
    how = Settings(batch=4, length=41, buckets=(10, 20, 30), partial="pad", epochs=2)
    batches = list(dataset(source, how, tok))
    widths = [b["tokens"].shape[1] for b in batches]
    assert set(widths) == {10, 20, 30, 41} and widths != sorted(widths) and widths[:15] != widths[15:]
    for b, width in zip(batches, widths, strict=True):
        assert width == min(w for w in (10, 20, 30, 41) if w >= b["lengths"].max())
    assert tokens(batches[:15]) == Counter(100 * i + t for i, n in enumerate(LENGTHS) for t in range(n))
    padding = sum(b["tokens"].size for b in batches) / sum(b["lengths"].sum() for b in batches)
    assert padding < 1.5 < 41 / LENGTHS.mean()


# ---- epochs, states, processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_epochs(source: Source, tok: text.Tokenizer, packing: str | None) -> None:
    how = Settings(batch=4, length=48, packing=packing, epochs=3, partial="pad")
    data = dataset(source, how, tok)
    batches = list(data)
    assert len(batches) == data.total
    assert set(tokens(batches).values()) == {3}
    assert set(tokens(batches[: data.batches]).values()) == {1}
    assert not same(batches[0], batches[data.batches])
    endless = dataset(source, dataclasses.replace(how, epochs=None), tok)
    assert endless.total is None and endless.batches == data.batches
    assert all(same(a, b) for a, b in zip(batches, endless, strict=False))
    plain = list(dataset(source, dataclasses.replace(how, shuffle=False, packing=None, epochs=1), tok))
    assert [int(t) // 100 for b in plain for t in b["tokens"][:, 0]][:57] == list(range(57))


PIPELINES = {
    "unpacked": {},
    "buckets": {"buckets": (16, 32)},
    "best_fit": {"packing": "best_fit"},
    "wrapped": {"packing": "wrapped", "window": 16},
    "mixture": {"packing": "best_fit", "block": 10},
    "longest": {"stop": "longest"},
    "forgetful": {"fcm_max_ratio": 0.5, "packing": "best_fit"},
    "stream": {"stream": True, "window": 11},
    "stream_forgetful": {"fcm_max_ratio": 0.5, "stream": True, "window": 11},
    "stream_packed": {"stream": True, "packing": "best_fit", "window": 20},
    "stream_mixture": {"stream": True, "packing": "wrapped", "window": 20, "stop": "longest"},
}


@pytest.mark.parametrize("name", PIPELINES)
def test_state(write: Write, tok: text.Tokenizer, name: str) -> None:
    """From any state, through JSON and in a new iterator or an old one, the same batches follow bitwise, to the end."""
    weights = (0.7, 0.3) if "mix" in name or name == "longest" else (None, None)
    files = [write(f"a{i}.jsonl", numbered(LENGTHS[i * 9 : i * 9 + 9], i * 9)) for i in range(4)]
    both = [Source(tuple(files[:3]), weight=weights[0]), Source(files[3], weight=weights[1])]
    data = dataset(both, Settings(batch=3, length=48, epochs=2, **PIPELINES[name]), tok)
    it, states, batches = iter(data), [], []
    states.append(json.dumps(it.get_state()))
    for batch in it:
        batches.append(batch)
        states.append(json.dumps(it.get_state()))
    assert len(batches) > 4 and len({b["tokens"].tobytes() for b in batches}) > 4
    for at in (*range(0, len(states), 3), len(states) - 1):
        fresh = iter(data)
        if at % 2:
            next(fresh)
        fresh.set_state(json.loads(states[at]))
        rest = list(fresh)
        assert len(rest) == len(batches) - at and all(same(a, b) for a, b in zip(rest, batches[at:], strict=True))


@given(st.lists(st.integers(2, 30), min_size=8, max_size=30), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=15)
def test_any_state(tmp_path_factory, tok: text.Tokenizer, lengths: list[int], seed: int, draw) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in numbered(lengths)))
    stream, packing = draw.draw(st.booleans()), draw.draw(st.sampled_from([None, *PACKINGS]))
    how = Settings(batch=2, length=16, epochs=None, packing=packing, seed=seed, stream=stream, window=7, prefetch=2)
    it = iter(dataset(Source(str(path)), how, tok))
    for _ in range(draw.draw(st.integers(0, 30))):
        next(it)
    state = json.loads(json.dumps(it.get_state()))
    want = [next(it) for _ in range(9)]
    it.set_state(state)
    assert all(same(next(it), b) for b in want)
    it.close()


SHARED = [{}, {"packing": "best_fit"}, {"buckets": (16, 32)}, {"partial": "pad"}, {"fcm_max_ratio": 0.5}]


@pytest.mark.parametrize("how", SHARED, ids=str)
def test_processes_share_batches(source: Source, tok: text.Tokenizer, how: dict) -> None:
    """Put together, the parts of two or four processes are the batch of one; also from a state of another number."""
    how = Settings(batch=8, length=48, epochs=2, **how)
    whole = list(dataset(source, how, tok))
    for count in (2, 4):
        its = [iter(dataset(source, how, tok, process_index=i, process_count=count)) for i in range(count)]
        one = iter(dataset(source, how, tok))
        next(one)
        for it in its:
            it.set_state(one.get_state())
        for want, *parts in zip(whole[1:], *its, strict=True):
            assert same(want, jax.tree.map(lambda *x: np.concatenate(x), *parts))


def test_processes_share_streams(write: Write, tok: text.Tokenizer) -> None:
    """Rows of all files are dealt out: disjoint, complete in each turn."""
    files = tuple(write(f"a{i}.jsonl", numbered(LENGTHS[i * 15 : i * 15 + 15], i * 15)) for i in range(3))
    how = Settings(batch=3, length=48, epochs=None, stream=True, window=16)
    seen = []
    for i in range(3):
        it = iter(dataset(Source(files), how, tok, process_index=i, process_count=3))
        seen.append({int(t) // 100 for _ in range(15) for t in next(it)["tokens"][:, 0]})
        it.close()
    assert set.union(*seen) == set(range(45)) and sum(map(len, seen)) == 45
    alike = Source(write("alike.jsonl", numbered([48] * 45)))  # each process draws its own masks
    how = dataclasses.replace(how, fcm_max_ratio=0.9)
    its = [iter(dataset(alike, how, tok, process_index=i, process_count=3)) for i in range(3)]
    assert len({(next(it)["packed"].key_segment_ids == HIDDEN).tobytes() for it in its}) == 3


# ---- sources -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_mixture_shares(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    sources = [
        Source(write(f"{i}.jsonl", numbered([4] * 60, 60 * i)), weight=w) for i, w in enumerate((0.5, 0.25, 0.25))
    ]
    how = Settings(batch=4, length=8, stream=stream, window=16)
    found = Counter(t // 100 // 60 for t in tokens(dataset(sources, how, tok)))
    assert 56 * 4 <= found[0] <= 60 * 4
    assert abs(found[1] - found[0] / 2) <= 16 and abs(found[2] - found[0] / 2) <= 16


def drawn(write: Write, tok: text.Tokenizer, **how) -> list[int]:
    """From which of two sources, of weights 0.8 and 0.2, the examples come, in the order in which they are trained."""
    sources = [Source(write(f"{i}.jsonl", numbered([5] * 200, 200 * i)), weight=w) for i, w in enumerate((0.8, 0.2))]
    batches = dataset(sources, Settings(length=16, seed=1, **how), tok)
    return [int(t) // 100 // 200 for b in batches for t in b["tokens"][real(b)] if t % 100 == 0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("how", [{}, {"packing": "best_fit"}, {"buckets": (8,)}, {"packing": "wrapped"}], ids=str)
def test_blocks_are_exact_in_what_is_trained(write: Write, tok: text.Tokenizer, shuffle: bool, how: dict) -> None:
    found = drawn(write, tok, batch=5, block=10, shuffle=shuffle, partial="pad", **how)
    blocks = np.array(found[: len(found) // 10 * 10]).reshape(-1, 10)
    assert len(blocks) == 25 and (blocks.sum(1) == 2).all()
    assert not shuffle or len({tuple(b) for b in blocks.tolist()}) > 5


def test_prefixes_of_a_mixture_have_its_shares(write: Write, tok: text.Tokenizer) -> None:
    found = np.cumsum(drawn(write, tok, batch=5))
    assert np.abs(found - 0.2 * np.arange(1, len(found) + 1)).max() <= 1


def test_a_shuffled_epoch_is_no_window_of_the_file(source: Source, tok: text.Tokenizer) -> None:
    """Without packing the order is the permutation of the whole epoch, another one in each."""
    how = Settings(batch=19, length=48, window=19, epochs=2)
    firsts = [int(t[0]) // 100 for b in dataset(source, how, tok) for t in b["tokens"]]
    assert sorted(firsts[:57]) == sorted(firsts[57:]) == list(range(57)) and firsts[:57] != firsts[57:]
    assert max(firsts[:19]) - min(firsts[:19]) > 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_column_that_is_not_there_is_an_error(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """If no row has it; a row that lacks it and has another of the new name is bad; what is renamed wins."""
    how = Settings(batch=1, length=16, stream=stream, shuffle=False, partial="pad")
    read = lambda rows, **rename: dataset(Source(write("a.jsonl", rows), rename=rename), how, tok)
    said = lambda data: [text.decode(tok, b["tokens"][0, : b["lengths"][0] - 1].tolist()) for b in data]
    plain = [{"text": "the cat", "content": "a mat"}] * 2
    for target in ("text", "completion"):
        with pytest.raises(ValueError, match="a.jsonl: no row has the column 'bogus'; found are content, text"):
            list(read(plain, bogus=target))
    for row in (plain[0], dict(reversed(plain[0].items()))):
        assert said(read([row], content="text")) == ["a mat"]
    assert said(read(plain[:1], content="text", text="content")) == ["a mat"]
    mixed = [{"content": "it is"}, {"text": "good", "tools": None}, *plain]
    data = read(mixed, content="text", tools="tools")
    assert said(data) == ["it is", "a mat", "a mat"] and data.report.kept == 3
    assert list(data.report.notes) == ["no column 'content' to be read as 'text' (found text, tools)"]
    assert said(read([{"text": "it"}, {"text": "is", "said": "so"}], said="said")) == ["it", "is"]  # some rows have it


@pytest.mark.parametrize("stream", [False, True])
def test_rows_from_memory(write: Write, tmp_path, tok: text.Tokenizer, stream: bool) -> None:
    """Batches are those of a file of the same rows; a cache knows them by what they hold."""
    rows, how = numbered(LENGTHS), Settings(batch=8, length=32, stream=stream, packing="best_fit", seed=2)
    file = Source(write("a.jsonl", rows))
    for source in (rows, Source(rows), [Source(rows)]):
        found = dataset(source, how, tok)
        assert all(same(a, b) for a, b in zip(found, dataset(file, how, tok), strict=True))
    options = {"cache_directory": tmp_path / "cache"} if not stream else {}
    mixed = dataset([Source(rows, weight=0.5), Source(rows[:20], weight=0.5)], how, tok, **options)
    assert tokens(mixed) and (stream or mixed.examples == 77)
    keys = [key(Source(x), tok, how) for x in (rows, list(rows), rows[1:])]
    assert keys[0] == keys[1] != keys[2]
    with pytest.raises(ValueError, match="expected rows as a list of dicts or a datasets.Dataset, found dict of text"):
        list(dataset({"text": ["a"]}, how, tok))


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_that_cannot_be_read_is_bad(tok: text.Tokenizer, stream: bool) -> None:
    """Whatever its reading or its transform raises, but for errors of the disk."""

    class Rows(list):
        def __getitem__(self, i: int) -> dict:
            if i % 10 == 3:
                raise errors[i // 10 % 3]
            return super().__getitem__(i)

    errors = [OverflowError("too large"), KeyError("x"), RecursionError("deep")]
    change = lambda row: row if row["input_ids"][0] % 7 else 1 // 0
    how = Settings(batch=1, length=48, stream=stream)
    data = dataset(Source(Rows(numbered(LENGTHS)), transform=change), how, tok)
    assert len(list(data)) == data.report.kept == 57 - 6 - 9
    assert sum(n for n, _ in data.report.notes.values()) == 15
    assert any("cannot be read (KeyError" in k for k in data.report.notes)
    assert any("the transform failed: ZeroDivisionError" in k for k in data.report.notes)
    errors[1] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        list(dataset(Source(Rows(numbered(LENGTHS))), how, tok))


@pytest.mark.parametrize("stream", [False, True])
def test_rename_transform_limit(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """Columns are renamed first, then a transform changes or leaves out; the limit is of rows read, over all files."""
    files = tuple(
        write(f"{i}.jsonl", [{"question": f"q{4 * i + j}", "answer": "it"} for j in range(4)]) for i in range(3)
    )
    change = lambda r: (
        None if r["prompt"] == "q2" else {**r, "completion": r["completion"] + (3 if r["prompt"] == "q3" else "")}
    )
    source = Source(files, rename={"question": "prompt", "answer": "completion"}, transform=change, rows=6)
    how = Settings(batch=1, length=16, stream=stream, shuffle=False)
    data = dataset(source, how, tok)
    starts = [text.decode(tok, b["tokens"][0, : b["lengths"][0]].tolist()) for b in data]
    assert starts == ["q0it", "q1it", "q4it", "q5it"]
    notes = {k: (n, [p.rpartition("/")[2] for p in at]) for k, (n, at) in data.report.notes.items()}
    assert notes.pop("left out by the transform") == (1, ["0.jsonl:3"])
    ((reason, where),) = notes.items()
    assert reason.startswith("the transform failed: TypeError") and where == (1, ["0.jsonl:4"])
    assert (data.report.read, data.report.kept) == (6, 4)


def test_stream_gives_everything(write: Write, tok: text.Tokenizer) -> None:
    files = tuple(write(f"a{i}.jsonl", ["{", *numbered(LENGTHS[i * 16 : i * 16 + 16], i * 16)]) for i in range(3))
    data = dataset(Source(files), Settings(batch=5, length=48, stream=True, window=10, partial="pad", epochs=2), tok)
    batches = list(data)
    assert tokens(batches) == Counter({100 * i + t: 2 for i, n in enumerate(LENGTHS[:48]) for t in range(n)})
    firsts = [int(r[0]) // 100 for b in batches for r, n in zip(b["tokens"], b["lengths"], strict=True) if n]
    assert firsts[:48] != firsts[48:] and firsts[:48] != sorted(firsts[:48])
    assert (data.report.kept, data.report.read) == (96, 102) and data.examples is data.batches is data.total is None
    ((reason, (count, _)),) = data.report.notes.items()
    assert reason.startswith("not JSON") and count == 6


@pytest.mark.parametrize("rows", [8, 9])
def test_a_stream_may_end_where_a_window_does(write: Write, tok: text.Tokenizer, rows: int) -> None:
    data = dataset(
        Source(write("a.jsonl", [{"text": "the cat"}] * rows)), Settings(batch=2, window=4, stream=True), tok
    )
    assert sum(len(b["tokens"]) for b in data) == 8


# ---- the cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft", "pairs", "unpaired"])
def test_cache(write: Write, tmp_path, tok: text.Tokenizer, monkeypatch, kind: str) -> None:
    """The first use writes, the second reads without tokenizing; batches are those without a cache."""
    rows = [
        {"prompt": "the", "completion": " cat" * i, "chosen": " a" * i, "rejected": " b", "label": 1}
        for i in range(1, 9)
    ]
    source, how = Source(write("a.jsonl", [*rows, "["])), Settings(kind=kind, batch=2, length=8)
    plain = dataset(source, how, tok)
    written = dataset(source, how, tok, cache_directory=tmp_path / "cache")
    monkeypatch.setattr("fdel.train.data.store.encode_rows", None)
    read = dataset(source, how, tok, cache_directory=tmp_path / "cache")
    for data in (written, read):
        assert all(same(a, b) for a, b in zip(plain, data, strict=True)) and data.report == plain.report
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [key(source, tok, how)]


def test_cache_key(write: Write, tok: text.Tokenizer) -> None:
    """All that changes tokens changes the key; what does not, does not."""
    path, how = write("a.jsonl", numbered(LENGTHS)), Settings()
    base = key(Source(path), tok, how)
    other = [dict(length=9), dict(learn="all"), dict(overlong="drop"), dict(packing="wrapped")]
    keys = [key(Source(path), tok, dataclasses.replace(how, **o)) for o in other]
    keys += [key(Source(path, **o), tok, how) for o in (dict(rename={"a": "b"}), dict(rows=3), dict(version="2"))]
    keys.append(key(Source(path), dataclasses.replace(tok, templates={}), how))
    write("a.jsonl", numbered(LENGTHS[1:]))
    keys.append(key(Source(path), tok, how))
    assert len({base, *keys}) == len(keys) + 1
    same_key = dict(batch=2, shuffle=False, seed=3, packing="best_fit", epochs=2)
    assert key(Source(path), tok, dataclasses.replace(how, **same_key)) == keys[-1]


def test_cache_is_complete_or_absent(write: Write, tmp_path, tok: text.Tokenizer, monkeypatch) -> None:
    source, folder = Source(write("a.jsonl", ["[", {"text": "the"}])), tmp_path / "cache"
    with pytest.raises(ValueError, match="a.jsonl:1: expected a JSON object|a.jsonl:1: not JSON"):
        cache(source, tok, Settings(bad_rows="raise"), folder)
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="give the source a version="):
        cache(dataclasses.replace(source, transform=lambda r: r), tok, Settings(), folder)
    first = cache(source, tok, Settings(), folder)
    other, original = tmp_path / "other", store._write

    def slow(*args) -> None:  # another process is faster
        original(*args)
        monkeypatch.undo()
        cache(source, tok, Settings(), other)

    monkeypatch.setattr(store, "_write", slow)
    assert np.array_equal(cache(source, tok, Settings(), other).tokens, first.tokens)
    assert [p.name for p in folder.iterdir()] == [p.name for p in other.iterdir()] and len(list(other.iterdir())) == 1


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_to_learn(write: Write, tok: text.Tokenizer, stream: bool) -> None:
    """A data set that is masked as a whole is an error that says why, with places."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it"}]
    plain = dataclasses.replace(tok, templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    source = Source(write("a.jsonl", [{"messages": messages}] * 1100))
    read = 1024 if stream else 1100  # a stream does not look at everything before it complains
    with pytest.raises(
        ValueError, match=f"no row can be used\n{read} rows(.|\n)*no {{% generation %}} block(.|\n)*a.jsonl:1, "
    ):
        list(dataset(source, Settings(learn="assistant", stream=stream, epochs=None), plain))
    user = Source(write("b.jsonl", [{"messages": messages[:1]}] * 3))
    with pytest.raises(ValueError, match="3 rows read, 0 examples(.|\n)*3 x no token to learn"):
        list(dataset(user, Settings(learn="assistant", stream=stream), tok))


BAD = [
    ({}, {}, {"process_count": 3}, "batch=8 rows cannot be divided among 3 processes"),
    ({}, {"weight": 1.0}, {}, "2 sources, 1 weights"),
    ({"stream": True}, {}, {"process_count": 2}, "no common end"),
    ({"stream": True}, {}, {"cache_directory": "x"}, "a stream has no cache"),
    ({"batch": 1000}, {}, {}, r"57 rows make no batch of 1000; give more data, or partial='pad'"),
]


@pytest.mark.parametrize(("how", "first", "options", "match"), BAD)
def test_wrong_use(source: Source, tok: text.Tokenizer, how: dict, first: dict, options: dict, match: str) -> None:
    sources = [dataclasses.replace(source, **first), *([source] if first else [])]
    with pytest.raises(ValueError, match=match):
        dataset(sources, Settings(**how), tok, **options)


@pytest.mark.parametrize(("how", "match"), [
    ({"kind": "dpo"}, "kind='dpo'; expected one of sft, pairs, triples, unpaired, prompt"),
    ({"packing": "bfd"}, "packing='bfd'; expected one of None, first_fit"),
    ({"batch": 0}, "at least 1"), ({"epochs": 0}, "epochs=0"), ({"block": -1}, "at least 1"),
    ({"kind": "pairs", "packing": "best_fit"}, "packing is for kind='sft'"),
    ({"fcm_max_ratio": 1.0}, "fcm_min_ratio=0, fcm_max_ratio=1; expected 0 <= fcm_min_ratio"),
    ({"fcm_min_ratio": 0.4, "fcm_max_ratio": 0.3}, "fcm_min_ratio=0.4, fcm_max_ratio=0.3; expected"),
    ({"kind": "pairs", "fcm_max_ratio": 0.3}, "fcm_max_ratio=0.3 is for kind='sft', not 'pairs'"),
    ({"length": 8, "buckets": (4, 16)}, r"buckets=\(4, 16\) go beyond length=8"),
])  # fmt: skip
def test_wrong_settings(how: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Settings(**how)


def test_grain_is_optional(source: Source, tok: text.Tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"fdel\[train\]"):
        dataset(source, Settings(), tok)
    assert build(source, tok, Settings()).report == Report(
        57, 57, int(LENGTHS.sum()), build(source, tok, Settings()).report.learnt
    )


def test_import_is_light() -> None:
    code = "import sys, fdel.train.data; print([m for m in ('grain', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
