"""Stream text out of token ids: certain text at once, and never half a character."""

import codecs
import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fdel.text.tokenizer import Pieces, Tokenizer

# GPT-2's alphabet: a visible Latin-1 character stands for its own byte, the other bytes follow from U+0100 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [b for b in range(256) if b not in _VISIBLE]
_BYTE_OF = {chr(b): b for b in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


@dataclass(frozen=True)
class Detokenizer:
    """The state of one stream: begin with `Detokenizer(tok)`, then call `step`, and `flush` at the end."""

    tok: Tokenizer
    skip_special: bool = True
    pending: bytes = b""  # bytes of a character, or a run of byte tokens, that may go on
    begun: bool = False
    stripped: int = 0


def step(state: Detokenizer, ids: Iterable[int]) -> tuple[Detokenizer, str]:
    """Take token ids and return the text that is certain now; nothing is taken back later.

    All these texts and the final `flush` together equal `decode` of all ids. Time is linear in their number. With byte
    fallback, a run of byte tokens is held until it ends, since one wrong byte changes the text of the whole run.
    """
    pieces, out, pending, begun = state.tok.pieces, [], bytearray(state.pending), state.begun
    for i in ids:
        piece = state.tok.backend.id_to_token(i)
        if piece is None or (state.skip_special and i in state.tok.special_ids):
            continue
        part = _part(pieces, piece if begun or not pieces.drop else piece.replace(pieces.drop, ""))
        if isinstance(part, bytes):
            pending += part
        else:
            out += [_held(pieces, pending), pieces.gap if begun else "", part]
            pending.clear()
        begun = True
    if pieces.byte_level:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        out.append(utf8.decode(pending))
        pending = bytearray(utf8.getstate()[0])
    text, stripped = _strip(pieces, "".join(out), state.stripped)
    return dataclasses.replace(state, pending=bytes(pending), begun=begun, stripped=stripped), text


def flush(state: Detokenizer) -> str:
    """Return what `step` held back, with U+FFFD for a character without its end."""
    return _strip(state.tok.pieces, _held(state.tok.pieces, state.pending), state.stripped)[0]


def token_bytes(tok: Tokenizer, token: int) -> bytes:
    """Return the bytes of UTF-8 that a token stands for inside a text; none for an id that is no token."""
    piece = tok.backend.id_to_token(token)
    part = b"" if piece is None else _part(tok.pieces, piece)
    return part if isinstance(part, bytes) else part.encode()


def _part(pieces: Pieces, piece: str) -> bytes | str:
    """What a piece adds: bytes, which make characters together with their neighbours, or text."""
    if pieces.byte_level:
        return bytes(_BYTE_OF[c] for c in piece) if all(c in _BYTE_OF for c in piece) else piece.encode()
    if pieces.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes.fromhex(piece[3:5])
    for old, new in pieces.replace:
        piece = piece.replace(old, new)
    return piece


def _held(pieces: Pieces, held: bytes | bytearray) -> str:
    try:
        return held.decode()
    except UnicodeDecodeError:
        return held.decode(errors="replace") if pieces.byte_level else "\ufffd" * len(held)


def _strip(pieces: Pieces, text: str, stripped: int) -> tuple[str, int]:
    char, most = pieces.strip
    while text and stripped < most:
        text, stripped = (text[1:], stripped + 1) if text[0] == char else (text, most)
    return text, stripped
