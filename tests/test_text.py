"""Tokenizers and incremental detokenisation; the oracle is transformers on tokenizers that are trained here."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fdel import text

transformers = pytest.importorskip("transformers", reason="the oracle")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it?",
    "naïve café, déjà vu; Ελληνικά; Русский текст; हिन्दी में लिखा; العربية",
    "今日は良い天気ですね。你好,世界!한국어 문장",
    "def f(x):\n    return x ** 2  # tabs\tand  spaces\n\n\n",
    "emoji 😀 👩‍👩‍👧 🇫🇷 👍🏽 and e\u0301 combining",
] * 3
BYTES = [f"<0x{b:02X}>" for b in range(256)]
STREAMED = ["byte_level", "llama", "gemma", "unigram", "unigram_bytes", "words"]


def fallback(normalizer: normalizers.Normalizer, decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """A SentencePiece-style BPE: 256 byte tokens in the vocabulary, and spaces as U+2581."""
    model = models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    # Every character of the corpus but emoji and CJK is in the alphabet; these become bytes.
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    corpus = ["".join(c for c in t if ord(c) < 0x3000) for t in CORPUS]
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    layout = json.loads(backend.to_str())
    layout["added_tokens"] = layout["added_tokens"][:3]  # byte tokens are ordinary ones
    layout["pre_tokenizer"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(layout))
    backend.decoder = decoder
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return backend


def build(kind: str) -> tuple[tokenizers.Tokenizer, dict]:
    """A tokenizer of this kind, and its named special tokens."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    space = normalizers.Replace(" ", "▁")
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "byte_level":
        backend = text.train_bpe(CORPUS, 500, ["<|im_start|>", "<|im_end|>"]).backend
        backend.add_tokens([AddedToken("<tool>"), AddedToken("<é x>"), AddedToken("é")])
        return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if kind == "llama":
        strip = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
        return fallback(normalizers.Sequence([normalizers.Prepend("▁"), space]), strip), named
    if kind == "gemma":
        return fallback(space, decoders.Sequence(spaces)), named
    if kind == "words":
        backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "fox": 2, "x": 3}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        return backend, {"unk_token": "<unk>"}
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 2)])
    if kind == "unigram_bytes":
        layout = json.loads(backend.to_str())
        kept = [v for v in layout["model"]["vocab"] if all(ord(c) < 0x3000 for c in v[0])]
        layout["model"] |= {"vocab": kept + [[b, -20.0] for b in BYTES], "byte_fallback": True}
        backend = tokenizers.Tokenizer.from_str(json.dumps(layout))
        backend.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    return backend, named


class Pair(NamedTuple):
    """Our tokenizer and transformers', loaded from the same folder."""

    folder: Path
    ours: text.Tokenizer
    theirs: "transformers.PreTrainedTokenizerFast"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def make(kind: str) -> Pair:
        folder = tmp_path_factory.mktemp(kind)
        backend, named = build(kind)
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(folder)
        return Pair(folder, text.load(folder), transformers.AutoTokenizer.from_pretrained(folder))

    return make


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def copy(source: Path, target: Path, **config: object) -> Path:
    """Copy a tokenizer's folder, with changes in tokenizer_config.json."""
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    old = json.loads((source / "tokenizer_config.json").read_text())
    write(target, "tokenizer_config.json", {k: v for k, v in (old | config).items() if v is not None})
    return target


# ---- encode, decode, load ------------------------------------------------------------------------------------------

characters = st.characters(exclude_categories=["Cs"]) | st.sampled_from("aé ▁ \n😀👍🏽\u200d\u0301你ह")
texts = st.lists(st.sampled_from([*CORPUS[:5], "<s>", "</s>", "<|im_end|>", "<tool>", "<é x>", "  "]) | characters)
texts = texts.map("".join)


@pytest.mark.parametrize("kind", STREAMED)
@settings(max_examples=40)
@given(words=texts, special=st.booleans())
def test_same_as_transformers(pair, kind: str, words: str, special: bool) -> None:
    _, ours, theirs = pair(kind)
    ids = text.encode(ours, words, special=special)
    assert ids == theirs(words, add_special_tokens=special)["input_ids"]
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert text.decode(ours, ids, skip_special=skip) == expected


@pytest.mark.parametrize("kind", ["RobertaProcessing", "BertProcessing"])
def test_pairs_are_joined_as_transformers_joins_them(pair, tmp_path: Path, kind: str) -> None:
    """A cross-encoder's: <s> a </s></s> b </s>, or [CLS] a [SEP] b [SEP]."""
    backend, named = build("unigram")
    backend.post_processor = getattr(processors, kind)(("</s>", 2), ("<s>", 1))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(tmp_path)
    ours, theirs = text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    got = text.encode(ours, CORPUS[:2])
    assert got == theirs(*CORPUS[:2])["input_ids"] and got.count(2) == (3 if kind[0] == "R" else 2) and got[0] == 1


@pytest.mark.parametrize(
    ("kind", "bos", "eos"), [("byte_level", False, False), ("llama", True, False), ("unigram", False, True)]
)
def test_facts(pair, kind: str, bos: bool, eos: bool) -> None:
    _, ours, theirs = pair(kind)
    assert ours.special == theirs.special_tokens_map
    assert ours.ids == {k.removesuffix("_token"): getattr(theirs, f"{k}_id") for k in theirs.special_tokens_map}
    assert (ours.add_bos, ours.add_eos) == (bos, eos)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        i for i, t in theirs.added_tokens_decoder.items() if t.special
    }


ADDED = {"content": "<new>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": False}


@pytest.mark.parametrize(
    "config",
    [
        {"pad_token": "<pad>", "mask_token": "<mask>", "cls_token": "<cls>"},
        {"pad_token": {"__type": "AddedToken", "special": True, **ADDED}},
        {"extra_special_tokens": ["<x>", "<y>"], "sep_token": "<x>"},
        {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
        {"additional_special_tokens": ["<y>", "<x>"]},
        {"added_tokens_decoder": {"1000": {**ADDED, "special": False}, "7": {**ADDED, "content": "<7>"}}},
        {"added_tokens_decoder": {"900": {**ADDED, "special": False}}, "unk_token": "<new>"},
        {"added_tokens_decoder": {"500": {**PLAIN, "content": "<tool>"}}, "unk_token": "<tool>"},
        {"unk_token": "<tool>"},
        {"split_special_tokens": True},
    ],
    ids=lambda c: "+".join(c),
)
def test_tokens_of_the_config_alone(pair, tmp_path: Path, config: dict) -> None:
    copy(pair("byte_level").folder, tmp_path, **config)
    ours, theirs = text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = "a <pad><mask>  <cls><x><y>b <new><image> <audio><7>é<tool><|im_end|>"
    ids = text.encode(ours, words)
    assert ids == theirs(words)["input_ids"]
    assert ours.special == theirs.special_tokens_map
    assert text.decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


def test_special_tokens_map_of_older_checkpoints(pair, tmp_path: Path) -> None:
    copy(pair("llama").folder, tmp_path, bos_token=None, eos_token=None)
    names = {"bos_token": {**ADDED, "content": "<s>"}, "eos_token": "</s>", "pad_token": ADDED}
    write(tmp_path, "special_tokens_map.json", names)
    ours, theirs = text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special == theirs.special_tokens_map == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<new>"
    }  # fmt: skip
    assert text.encode(ours, "a <new> b") == theirs("a <new> b")["input_ids"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": [5, 6], "config.json": 9}, (5, 6)),
        ({"generation_config.json": 7}, (7,)),
        ({"generation_config.json": None, "config.json": 9}, (2,)),
        ({"config.json": [9, 8], "eos_token": None}, (9, 8)),
        ({"eos_token": None}, ()),
    ],
)
def test_eos_ids(pair, tmp_path: Path, files: dict, expected: tuple) -> None:
    copy(pair("llama").folder, tmp_path, **{k: v for k, v in files.items() if k == "eos_token"})
    for name in files.keys() - {"eos_token"}:
        write(tmp_path, name, {"eos_token_id": files[name], "temperature": 0.5})
    tok = text.load(tmp_path)
    assert tok.eos_ids == expected
    text.save(dataclasses.replace(tok, eos_ids=(3, 4)), tmp_path)
    assert text.load(tmp_path).eos_ids == (3, 4)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved.get("temperature") == (0.5 if "generation_config.json" in files else None)


def test_truncation_and_padding_of_the_file_do_nothing(pair, tmp_path: Path) -> None:
    copy(pair("llama").folder, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert text.encode(text.load(tmp_path), CORPUS[0]) == pair("llama").theirs(CORPUS[0])["input_ids"]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "unigram"])
def test_save(pair, tmp_path: Path, kind: str) -> None:
    folder = copy(pair(kind).folder, tmp_path)
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes().replace(b"\n", b"\r\n"))
    ours = text.load(folder)
    templates = {"default": "{{ messages }}\n\n", "tool_use": "tööl {{ tools }}"}
    changed = dataclasses.replace(ours, templates=templates, special={**ours.special, "pad_token": "<pad>"})
    text.save(changed, tmp_path / "new")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    again, theirs = text.load(tmp_path / "new"), transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again.special == theirs.special_tokens_map == changed.special
    assert again.eos_ids == ours.eos_ids and not (tmp_path / "new" / "generation_config.json").exists()
    assert again.templates == theirs.chat_template
    assert text.encode(again, CORPUS[1] + "<pad>") == theirs(CORPUS[1] + "<pad>")["input_ids"]


def test_templates_of_the_config(pair, tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    copy(pair("llama").folder, tmp_path, chat_template=listed)
    tok = text.load(tmp_path)
    assert tok.templates == {"default": "a", "rag": "b"}
    copy(pair("llama").folder, tmp_path, chat_template="c")
    assert text.load(tmp_path).templates == {"default": "c"}
    (tmp_path / "chat_template.jinja").write_text("d")
    assert text.load(tmp_path).templates == {"default": "d"}
    with pytest.raises(ValueError, match="'../x' cannot be a file name"):
        text.save(dataclasses.replace(tok, templates={"../x": ""}), tmp_path)


def test_errors(pair, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json in .*found: \['tokenizer.model'\].*convert"):
        text.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        text.load(tmp_path / "absent")
    write(tmp_path, "tokenizer.json", {})
    with pytest.raises(ValueError, match=f"tokenizers {tokenizers.__version__} cannot read .*tokenizer.json"):
        text.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
        text.load(tmp_path)
    with pytest.raises(ValueError, match="expected a str without lone surrogates"):
        text.encode(pair("llama").ours, "a\ud83d")


WRONG = [None, 3, -1, True, 2.5, "x", [], ["x"], [[]], {}, {"a": 1}, {"content": 3}, [{"name": 1}], {"0": 3}, {"x": {}}]
FACTS = {"tokenizer_config.json": ("added_tokens_decoder", "chat_template", "eos_token", "extra_special_tokens",
         "additional_special_tokens", "split_special_tokens"), "generation_config.json": ("eos_token_id",)}  # fmt: skip


@pytest.mark.parametrize(("file", "key"), [(f, k) for f, keys in FACTS.items() for k in keys])
def test_facts_of_wrong_types_are_a_value_error(tmp_path: Path, file: str, key: str) -> None:
    """Or load; what is wrong is said with the folder's name, never by another error."""
    text.save(text.train_bpe(["a b"], 300), tmp_path)
    for value in WRONG:
        (tmp_path / file).write_text(json.dumps({key: value}))
        try:
            text.encode(text.load(tmp_path), "a b")
        except ValueError as e:
            assert str(tmp_path) in str(e), value
    for content in ("[]", "3", "null", "[" * 100_000, "{"):
        (tmp_path / file).write_text(content)
        with pytest.raises(ValueError, match=f"{file}.*(is not JSON|expected an object)"):
            text.load(tmp_path)


@pytest.mark.parametrize(
    "step", [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}, {"type": "Prepend", "prepend": "a" * 10}]
)
def test_a_normalizer_that_grows_texts_without_bound_is_refused(tmp_path: Path, step: dict) -> None:
    """40 doublings make 10^12 characters of one."""
    text.save(text.train_bpe(["a b"], 300), tmp_path)
    d = json.loads((tmp_path / "tokenizer.json").read_text())
    for times in (1, 40):
        d["normalizer"] = {"type": "Sequence", "normalizers": [step] * times}
        (tmp_path / "tokenizer.json").write_text(json.dumps(d))
        if times == 1:
            assert len(text.encode(text.load(tmp_path), "a")) >= 2
            continue
        with pytest.raises(ValueError, match=r"tokenizer.json: normalizer: makes a text up to .* times longer"):
            text.load(tmp_path)


def test_train_bpe(tmp_path: Path) -> None:
    tok = text.train_bpe(iter(CORPUS), 400, ["<|im_end|>"])
    assert tok.backend.get_vocab_size() == 400
    assert tok.ids == {"eos": 0} and tok.eos_ids == (0,) and tok.backend.token_to_id("<|im_end|>") == 1
    assert text.train_bpe(CORPUS, 400, ["<|im_end|>"]).json == tok.json
    text.save(tok, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for words in [*CORPUS, "ünseen 🦄 text<|im_end|>"]:
        ids = text.encode(tok, words)
        assert ids == theirs(words)["input_ids"] == text.encode(text.load(tmp_path), words)
        assert text.decode(tok, ids, skip_special=False) == words
    assert theirs.eos_token_id == 0
    with pytest.raises(ValueError, match="vocab_size=200 is less than 256 bytes and 1 special tokens"):
        text.train_bpe(CORPUS, 200)


# ---- streaming -----------------------------------------------------------------------------------------------------


def stream(state: text.Detokenizer, chunks: list[list[int]]) -> list[str]:
    """The texts of the steps, and the flushed one."""
    out = []
    for chunk in chunks:
        state, delta = text.step(state, chunk)
        out.append(delta)
    return [*out, text.flush(state)]


def token_ids(size: int) -> st.SearchStrategy[list[int]]:
    """Any ids (some of no token), and runs of neighbours, which are where the bytes are."""
    one = st.integers(0, size + 3).map(lambda i: [i])
    run = st.tuples(st.integers(0, size), st.lists(st.integers(0, 255), max_size=8))
    return st.lists(one | run.map(lambda r: [r[0] + i for i in r[1]])).map(lambda parts: sum(parts, []))


@pytest.mark.parametrize("kind", STREAMED)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100)
def test_stream_any_ids(pair, kind: str, data: st.DataObject, skip: bool) -> None:
    """Ids that are no text (half characters, stray bytes, unknown ids), split anywhere."""
    _, ours, theirs = pair(kind)
    ids = data.draw(token_ids(ours.backend.get_vocab_size()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    state = text.Detokenizer(ours, skip_special=skip)
    for way in (chunks, [[i] for i in ids]):
        assert "".join(stream(state, way)) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", STREAMED)
@settings(max_examples=40)
@given(words=texts)
def test_stream_text(pair, kind: str, words: str) -> None:
    """Text comes out whole, split at every position, and no later than its bytes are complete."""
    _, ours, theirs = pair(kind)
    words = words.replace("\ufffd", "").replace("é", "e")  # "é" is an added token whose text is half a character
    ids = text.encode(ours, words)
    whole = theirs.decode(ids, skip_special_tokens=True)
    state = text.Detokenizer(ours)
    for i in range(len(ids) + 1):
        assert "".join(stream(state, [ids[:i], ids[i:]])) == whole
    sent = ""
    for i in ids:
        state, delta = text.step(state, [i])
        assert "\ufffd" not in delta
        sent += delta
        assert whole.startswith(sent)
        if kind == "byte_level":
            assert len(state.pending) <= 3
        else:
            assert state.pending == b"" or ours.backend.id_to_token(i) in BYTES or i in ours.special_ids


def test_stream_holds_only_what_may_change(pair) -> None:
    tok = pair("llama").ours
    ids = [tok.backend.token_to_id(t) for t in ["▁fox", "<0xE4>", "<0xBD>", "<0xA0>", "b", "<0xF0>", "<0x9F>"]]
    assert stream(text.Detokenizer(tok), [[i] for i in ids]) == ["fox", "", "", "", "你b", "", "", "\ufffd\ufffd"]
    tok = pair("byte_level").ours
    unicorn = text.encode(tok, "🦄")
    ids = [*unicorn, *text.encode(tok, "a"), unicorn[0]]
    deltas = stream(text.Detokenizer(tok), [[i] for i in ids])
    assert "".join(deltas) == "🦄a\ufffd" and deltas[-3:] == ["a", "", "\ufffd"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_stream_strips_its_start(pair, count: int) -> None:
    tok = pair("gemma").ours
    backend = tokenizers.Tokenizer.from_str(tok.json)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", count, 0)])
    stripped = dataclasses.replace(tok, backend=backend)
    for words in ["fox", " fox", "    fox  ", "  ", "  \n fox"]:
        ids = text.encode(stripped, words, special=False)
        assert "".join(stream(text.Detokenizer(stripped), [[i] for i in ids])) == backend.decode(ids)


def test_stream_is_linear(pair) -> None:
    """Each id is looked up once; nothing is decoded again."""
    tok = pair("byte_level").ours
    ids = text.encode(tok, CORPUS[2] * 20)

    class Counting:
        calls = 0

        def id_to_token(self, i: int) -> str | None:
            self.calls += 1
            return tok.backend.id_to_token(i)

    counting = Counting()
    counted = dataclasses.replace(tok, backend=counting)
    counted.__dict__.update(pieces=tok.pieces, special_ids=tok.special_ids)
    assert "".join(stream(text.Detokenizer(counted), [[i] for i in ids])) == CORPUS[2] * 20
    assert counting.calls == len(ids)


def test_no_stream_for_other_decoders() -> None:
    for decoder in (
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ):
        tok = text.train_bpe(CORPUS, 300)
        tok.backend.decoder = decoder
        with pytest.raises(ValueError, match="cannot stream text of the decoder"):
            text.step(text.Detokenizer(tok), [1])


def test_token_bytes(pair) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tok = pair("byte_level").ours
    for byte, char in bytes_to_unicode().items():
        if char != "é":  # an added token has this name
            assert text.token_bytes(tok, tok.backend.token_to_id(char)) == bytes([byte])
    assert text.token_bytes(tok, 10**6) == b""
    llama = pair("llama").ours
    assert text.token_bytes(llama, llama.backend.token_to_id("<0x0A>")) == b"\n"
    assert text.token_bytes(llama, llama.backend.token_to_id("▁fox")) == b" fox"
    assert text.token_bytes(llama, llama.ids["eos"]) == b"</s>"


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma", "unigram_bytes"])
@settings(max_examples=40)
@given(words=texts)
def test_token_bytes_join_to_the_text(pair, kind: str, words: str) -> None:
    _, ours, theirs = pair(kind)
    words = words.replace("é", "e")
    ids = text.encode(ours, words, special=False)
    joined = b"".join(text.token_bytes(ours, i) for i in ids).decode()
    expected = theirs.decode(ids)
    assert joined == expected or (kind in ("llama", "unigram_bytes") and joined == " " + expected)
