"""Tokenizers in the Hugging Face layout: load, save, train, encode, decode."""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from fdel.gguf import find
from fdel.text import gguf

GROWTH = 1000  # times that a normalizer may make a text longer
END_OF_TEXT = "<|endoftext|>"
# In transformers' order, which decides the ids of tokens that tokenizer.json lacks.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Pieces:
    """How the names of tokens (pieces) become text; read from a tokenizer's decoder by `read_pieces`."""

    byte_level: bool = False  # each character of a piece stands for a byte
    byte_fallback: bool = False  # "<0xE4>" is a byte; a run of them that is not UTF-8 gives one U+FFFD per byte
    replace: tuple[tuple[str, str], ...] = ()
    drop: str = ""  # what the first piece loses (Metaspace)
    strip: tuple[str, int] = ("", 0)  # a character, and how often the text loses it at its start
    gap: str = ""  # what stands between pieces


def read_pieces(backend: tokenizers.Tokenizer) -> Pieces:
    """Read the decoder of a tokenizer; a ValueError if its text cannot be streamed."""
    if backend.decoder is None:
        return Pieces(gap=" ")
    layout = json.loads(backend.decoder.__getstate__())
    steps = layout.get("decoders", [layout])
    known = r"(ByteLevel|Metaspace|(Replace)*(ByteFallback)?)(Fuse(Strip)?)?"
    last = {s["type"]: s for s in steps}
    replace = tuple((s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace")
    strip = last.get("Strip", {"content": "", "start": 0, "stop": 0})
    if not re.fullmatch(known, "".join(s["type"] for s in steps)) or strip["stop"] or None in dict(replace):
        raise ValueError(f"cannot stream text of the decoder {layout}; expected ByteLevel, Metaspace, or Replace (of "
                         "plain strings), ByteFallback, Fuse and Strip (at the start), in this order")  # fmt: skip
    drop = ""
    if "Metaspace" in last:
        replace = ((last["Metaspace"]["replacement"], " "),)
        drop = "" if last["Metaspace"]["prepend_scheme"] == "never" else last["Metaspace"]["replacement"]
    return Pieces("ByteLevel" in last, "ByteFallback" in last, replace, drop, (strip["content"], strip["start"]))


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and the facts that stand beside it in a checkpoint; change one with `dataclasses.replace`."""

    backend: tokenizers.Tokenizer = field(repr=False)
    special: Mapping[str, str]  # named special tokens, as chat templates see them: {"bos_token": "<s>", ...}
    eos_ids: tuple[int, ...]  # every id that ends a generation
    templates: Mapping[str, str]  # chat templates by name; the usual one is "default"
    config: Mapping[str, Any]  # tokenizer_config.json
    json: str = field(repr=False)  # tokenizer.json

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Ids of the named special tokens, as {"bos": 1, "eos": 2}; what the tokenizer has not is absent."""
        found = {name.removesuffix("_token"): self.backend.token_to_id(t) for name, t in self.special.items()}
        return {name: i for name, i in found.items() if i is not None}

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def pieces(self) -> Pieces:
        """How the tokens become text; a ValueError if that cannot be streamed."""
        return read_pieces(self.backend)

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins with a bos token."""
        return encode(self, "a")[:1] == [self.ids.get("bos")]

    @property
    def add_eos(self) -> bool:
        """Whether `encode` ends with an eos token."""
        return encode(self, "a")[-1:] == [self.ids.get("eos")]


def load(folder: str | Path) -> Tokenizer:
    """Read a tokenizer from a checkpoint folder: tokenizer.json and what is there of the files beside it; or a GGUF file.

    These are tokenizer_config.json, special_tokens_map.json, chat_template.jinja, additional_chat_templates/*.jinja,
    generation_config.json and config.json. `eos_ids` come from generation_config.json, or else are the eos token, or
    else come from config.json. What `encode` does stands in tokenizer.json alone, whatever `tokenizer_class` is.
    ValueError for files that are not as transformers writes them, and for a normalizer that makes texts grow without bound.
    """
    try:
        return _load(Path(folder))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as e:
        if str(folder) in str(e):
            raise
        fault = f"{type(e).__name__}: {e}"[:300]
        raise ValueError(f"{folder}: the tokenizer's files are not as transformers writes them ({fault})") from e


def _load(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file() and (whole := find(folder)):
        return Tokenizer(**gguf.read(whole))
    if not file.is_file():
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"no tokenizer.json in {folder} (found: {found}); if there is another format, such as tokenizer.model, "
            "convert it once with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints name the special tokens in a file of their own
        config |= _read(folder / "special_tokens_map.json")
    templates = {p.stem: p.read_text("utf-8") for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    inside = config.pop("chat_template", None) or []
    if not templates:  # files win over the config
        templates = {"default": inside} if isinstance(inside, str) else {t["name"]: t["template"] for t in inside}
    backend = _backend(file, config)
    special = {name: token.content for name, token in _special(config).items()}
    eos = _read(folder / "generation_config.json").get("eos_token_id")
    if eos is None and "eos_token" in special:
        eos = backend.token_to_id(special["eos_token"])
    if eos is None:
        eos = _read(folder / "config.json").get("eos_token_id")
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    if not all(type(i) is int and 0 <= i < 2**31 for i in eos_ids):
        raise ValueError(f"{folder}: eos_token_id: found {eos!r:.100}, expected a token id or a list of them")
    if not all(isinstance(x, str) for x in (*templates, *templates.values())):
        raise ValueError(f"{folder}: chat_template: expected a text, or a list of names with texts")
    return Tokenizer(backend, special, eos_ids, templates, config, file.read_bytes().decode())


def save(tok: Tokenizer, folder: str | Path) -> None:
    """Write the files that `load` and transformers read; tokenizer.json byte for byte as it was loaded.

    generation_config.json is written only if it exists or if `eos_ids` are not just the eos token.
    """
    folder = Path(folder)
    old = {name: token.content for name, token in _special(tok.config).items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(tok.config)
    config |= {name: token for name, token in tok.special.items() if old.get(name) != token}
    files = {"tokenizer.json": tok.json, "tokenizer_config.json": _dump(config)}
    for name, template in tok.templates.items():
        if Path(name).name != name:
            raise ValueError(f"the chat template name {name!r} cannot be a file name; rename it")
        files["chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"] = template
    generation = folder / "generation_config.json"
    if generation.exists() or list(tok.eos_ids) != [i for name, i in tok.ids.items() if name == "eos"]:
        files[generation.name] = _dump(_read(generation) | {"eos_token_id": list(tok.eos_ids)})
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE. The eos token "<|endoftext|>" and `special_tokens` get the first ids.

    ValueError if `vocab_size` has no room for them and the 256 bytes.
    >>> tok = text.train_bpe(["low lower lowest"], 260)
    >>> text.encode(tok, "low")
    [258]
    """
    special = list(dict.fromkeys([END_OF_TEXT, *special_tokens]))
    if vocab_size < 256 + len(special):
        raise ValueError(f"vocab_size={vocab_size} is less than 256 bytes and {len(special)} special tokens; raise it")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    named = {"eos_token": END_OF_TEXT}
    return Tokenizer(backend, named, (0,), {}, named, backend.to_str(pretty=True))


def encode(tok: Tokenizer, text: str | Sequence[str], *, special: bool = True) -> list[int]:
    """Turn text, or a pair of texts, into token ids; `special` adds what the tokenizer puts around them (bos, eos).

    Special tokens spelled out in the text become their ids either way. ValueError for a lone surrogate.
    """
    return encoding(tok, text, special=special).ids


def decode(tok: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Turn token ids into text, without the clean-up of spaces that WordPiece models had.
    >>> tok = text.train_bpe(["low lower lowest"], 260)
    >>> text.decode(tok, text.encode(tok, "slow"))
    'slow'
    """
    with _panics():
        return tok.backend.decode(list(ids), skip_special_tokens=skip_special)


def encoding(tok: Tokenizer, text: str | Sequence[str], *, special: bool) -> tokenizers.Encoding:
    """Encode to ids with their offsets in the text."""
    first, second = (text, None) if isinstance(text, str) else text
    try:
        with _panics():
            return tok.backend.encode(first, second, add_special_tokens=special)
    except TypeError as e:
        raise ValueError(f"cannot encode this {type(text).__name__}; expected a str without lone surrogates") from e


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Turn a panic of the library, which is no Exception, and its errors, which have no type, into a ValueError."""
    try:
        yield
    except BaseException as e:
        if type(e) is Exception or type(e).__name__ == "PanicException":
            raise ValueError(f"the tokenizer failed, its tokenizer.json may be damaged: {e}"[:300]) from e
        raise


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file}: found a {type(found).__name__}, expected an object")
    return found


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _added(token: str | dict | AddedToken) -> AddedToken:
    if isinstance(token, dict):
        return AddedToken(**{k: v for k, v in token.items() if k != "__type"})
    return AddedToken(token, special=True) if isinstance(token, str) else token


def _special(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    extra = config.get("extra_special_tokens")
    named = {k: config[k] for k in (*NAMES, *config) if k.endswith("_token") and k in config}
    named |= extra if isinstance(extra, dict) else {}
    return {k: _added(v) for k, v in named.items() if isinstance(v, str | dict)}


def _growth(normalizer: Any) -> float:
    """Bound how many times longer a normalizer makes a text, by what its steps insert for each character."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence":
        return math.prod(map(_growth, normalizer.get("normalizers") or ()))
    pattern = normalizer.get("pattern")
    replaced = len(pattern["String"]) if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) else 1
    inserted = max(len(str(normalizer.get(key, ""))) for key in ("content", "prepend"))
    return max(1.0, inserted / max(replaced, 1) + (replaced == 1 and not isinstance(pattern, dict)))


def _backend(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if (growth := _growth(_read(file).get("normalizer"))) > GROWTH:
        raise ValueError(f"{file}: normalizer: makes a text up to {growth:.3g} times longer, expected at most {GROWTH}")
    try:
        with _panics():
            backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:
        raise ValueError(f"tokenizers {tokenizers.__version__} cannot read {file}: {e}") from e
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    # As transformers: list the tokens anew, by id, then those that only the config names; the named ones are special.
    known, named = backend.get_added_tokens_decoder(), list(_special(config).values())
    listed = config.get("added_tokens_decoder", known)
    new = [_added(t) for _, t in sorted(listed.items(), key=lambda item: int(item[0]))]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for token in named + ([] if isinstance(extra, dict) else [_added(t) for t in extra]):
        new += [] if token.content in [t.content for t in [*known.values(), *new]] else [token]
    for token in new:
        token.special = token.special or token.content in [t.content for t in named]
    backend.add_tokens(new)
    return backend
