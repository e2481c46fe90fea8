"""The tokenizer inside a GGUF file: llama.cpp's vocabulary, merges and special tokens as a tokenizer of `tokenizers`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from fdel import gguf

MODELS = ("gpt2", "llama")  # of tokenizer.ggml.model: BPE over bytes, SentencePiece's BPE
UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type
LONGEST = 1024  # characters of a piece
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # of special tokens, here and in the keys
ENDS = ("eos", "eot", "eom")  # tokens that end a generation
SPACE = "\u2581"
# How texts are cut before merging, by tokenizer.ggml.pre: llama.cpp's regular expressions (src/llama-vocab.cpp).
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_TEKKEN = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Those whose files begin texts with bos unless they say otherwise, and whose pieces are found before they are merged.
WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1")
CUTS = dict.fromkeys(WHOLE, _LLAMA3) | {
    "smaug-bpe": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN, "gpt-2": "", "default": "",
}  # fmt: skip


def read(file: Path) -> dict[str, Any]:
    """Give the fields of a `Tokenizer`. ValueError for a vocabulary of another kind, or one that is damaged."""
    meta = gguf.read(file).meta
    of = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}
    kind, tokens = of.get("model"), of.get("tokens") or []
    if kind not in MODELS:
        raise ValueError(f"{file}: tokenizer.ggml.model is {kind!r:.100}; understood are {', '.join(MODELS)}")
    if not _texts(tokens) or max(map(len, tokens)) > LONGEST:
        raise ValueError(f"{file}: tokenizer.ggml.tokens: expected texts of at most {LONGEST} characters")
    types, ids = of.get("token_type") or [1] * len(tokens), dict[str, int]()
    for name, theirs in NAMES.items() | {(e, e) for e in ENDS}:
        number = of.get(f"{theirs}_token_id")
        if number is not None and not (type(number) is int and 0 <= number < len(tokens)):
            raise ValueError(f"{file}: tokenizer.ggml.{theirs}_token_id is {number!r:.100} of {len(tokens)} tokens")
        ids |= {} if number is None else {name: number}
    if len(types) != len(tokens):
        raise ValueError(f"{file}: tokenizer.ggml.token_type has {len(types)} items for {len(tokens)} tokens")
    backend = (_bytes if kind == "gpt2" else _sentencepiece)(file, of, tokens, types)
    for number in (CONTROL, USER):
        new = [t for t, x in zip(tokens, types, strict=True) if x == number]
        backend.add_tokens([AddedToken(t, special=number == CONTROL, normalized=False) for t in new])
    _around(backend, of, tokens, ids, kind)
    special = {f"{name}_token": tokens[ids[name]] for name in NAMES if name in ids}
    return {
        "backend": backend, "special": special, "eos_ids": tuple(dict.fromkeys(ids[e] for e in ENDS if e in ids)),
        "templates": _templates(meta), "config": dict(special), "json": backend.to_str(pretty=True),
    }  # fmt: skip


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, str) for t in value)


def _templates(meta: Mapping[str, Any]) -> dict[str, str]:
    """Give the chat templates by name."""
    key = "tokenizer.chat_template"
    found = {k.removeprefix(f"{key}.") if k != key else "default": v for k, v in meta.items() if k.startswith(key)}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def _bytes(file: Path, of: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """Make a BPE over bytes."""
    merges, pre = of.get("merges"), of.get("pre", "default")
    if pre not in CUTS:
        raise ValueError(f"{file}: tokenizer.ggml.pre is {pre!r:.100}; understood are {', '.join(CUTS)}")
    pairs: Any = [tuple(m.split(" ")) for m in merges or ()] if _texts(merges) else []
    if not pairs or any(len(p) != 2 for p in pairs):
        raise ValueError(f"{file}: tokenizer.ggml.merges: expected pairs of pieces with a space between")
    model = models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=pre in WHOLE)
    backend = tokenizers.Tokenizer(model)
    first = [pre_tokenizers.Split(Regex(CUTS[pre]), "isolated")] if CUTS[pre] else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not first)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    file: Path, of: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    """Make a BPE with bytes for what it lacks; its merges are those that the scores of its pieces imply."""
    scores = of.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(type(x) is float for x in scores):
        raise ValueError(f"{file}: tokenizer.ggml.scores: expected a number for each of {len(tokens)} tokens")
    unknown = next((t for t, x in zip(tokens, types, strict=True) if x == UNKNOWN), None)
    vocab = {t: i for i, t in enumerate(tokens)}
    pieces = [(t, s) for t, s, x in zip(tokens, scores, types, strict=True) if x not in (UNKNOWN, CONTROL, BYTE)]
    merges = sorted(_merges(pieces), key=lambda m: (-m[0], -len(m[1]), -len(m[2])))
    model = models.BPE(vocab, [m[1:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaced = of.get("add_space_prefix", True) is True
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if spaced else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * spaced])
    if unknown is not None:
        backend.add_special_tokens([AddedToken(unknown, special=True, normalized=False)])
    return backend


def _merges(pieces: Sequence[tuple[str, float]]) -> Iterator[tuple[float, str, str]]:
    """Give (score, left, right) for each way to put a piece together from two."""
    known = {t for t, _ in pieces}
    for piece, score in pieces:
        for i in range(1, len(piece)):
            if piece[:i] in known and piece[i:] in known:
                yield score, piece[:i], piece[i:]


def _around(
    backend: tokenizers.Tokenizer, of: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int], kind: str
) -> None:
    """Have texts begin with bos and end with eos, where the file says so or its kind does."""
    usual = {"bos": kind == "llama" or of.get("pre") in WHOLE, "eos": False}
    put = {name: name in ids and of.get(f"add_{name}_token", usual[name]) is True for name in usual}
    if not any(put.values()):
        return
    at = {name: [tokens[ids[name]]] if put[name] else [] for name in put}
    single, second = ([*at["bos"], part, *at["eos"]] for part in ("$A", "$B"))
    special = [(tokens[ids[name]], ids[name]) for name in put if put[name]]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=special
    )
